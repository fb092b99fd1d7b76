"""Makes the module of a folder of `transformers`, with adapters of `peft` if wanted: the model function of `model.pretrained`.

The module has the configuration of the folder and its own initial values; the folder's weights are read by `init_from`, by each
worker those that it holds. Nothing is downloaded, and no code of the folder is run.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from raypar.errors import ConfigError, error_first_line

if TYPE_CHECKING:
    from torch import nn


def from_folder(
    folder: str, adapter: Mapping[str, object] | None = None, config: Mapping[str, object] | None = None
) -> nn.Module:
    """The module of the class that a folder's `config.json` names, with initial values of its own.

    `adapter`: arguments of `peft.LoraConfig`; the base model is then frozen. `config`: other values of the configuration.
    Raises `ConfigError` for a folder without a configuration, with a class that is not in `transformers`, and for an adapter
    that cannot be made, or that matches no module.
    """
    kind = _class_of(folder)
    library, options = _installed("transformers"), {"use_cache": False, **(config or {})}
    try:
        settings = library.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"transformers makes no configuration of {Path(folder) / 'config.json'}: {error_first_line(error)}",
            cure="install the release of transformers that has this model, or correct the file or model.args.config",
        ) from None
    made: nn.Module = getattr(library, kind)(settings)
    return made if adapter is None else _with_adapter(made, kind, adapter)


def set_cache_of_folder(module: nn.Module, args: Mapping[str, Any]) -> None:
    """Give the configuration of a trained module the folder's `use_cache`, which is off in training only.

    `args`: those of `from_folder`; a `use_cache` among `config` stays.
    """
    settings = getattr(module, "config", None)
    at = Path(args["folder"]).expanduser() / "config.json"
    if "use_cache" not in (args.get("config") or {}) and settings is not None and hasattr(settings, "use_cache"):
        settings.use_cache = json.loads(at.read_text()).get("use_cache", True)  # as transformers has it where it is not said


def _class_of(folder: str) -> str:
    """The name of the class of `transformers` that a folder's configuration names. Raises `ConfigError`."""
    at = Path(folder).expanduser()
    if not (at / "config.json").is_file():
        looks_like_hub = not at.exists() and folder.count("/") <= 1 and not folder.startswith((".", "~", "/"))
        raise ConfigError(
            f"model.pretrained is {folder!r}, and there is no {at / 'config.json'}",
            cure=f"download it (hf download {folder} --local-dir DIR) and give the folder"
            if looks_like_hub
            else "give a folder that save_pretrained of transformers has written",
        )
    try:
        found = json.loads((at / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{at / 'config.json'} cannot be read: {error}", cure="copy or download the folder again") from None
    if not isinstance(found, dict):
        found = {}
    if "auto_map" in found:
        raise ConfigError(
            f"{at / 'config.json'} has auto_map: the model's code lies in the folder, which raypar does not run",
            cure="read that code, and make the model in a function of your own: model: module:name, with init_from: FOLDER",
        )
    names = found.get("architectures")
    (name,) = names if isinstance(names, list) and len(names) == 1 else (None,)
    if not isinstance(name, str) or not name.isidentifier() or not hasattr(_installed("transformers"), name):
        raise ConfigError(
            f"{at / 'config.json'} names the class {names!r} as architectures, and transformers has none of that name",
            cure='write the class there, such as ["LlamaForCausalLM"], or make the model in a function of your own',
        )
    return name


def _with_adapter(base: nn.Module, kind: str, options: Mapping[str, object]) -> nn.Module:
    """The module with LoRA adapters, which alone require gradients. Raises `ConfigError`."""
    library = _installed("peft")
    if kind.endswith("ForCausalLM"):
        options = {"task_type": "CAUSAL_LM", **options}
    try:
        made: nn.Module = library.get_peft_model(base, library.LoraConfig(**options))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"model.adapter: peft makes no LoRA adapters of {dict(options)}: {error}",
            cure="its keys are the arguments of peft.LoraConfig, such as {r: 8, target_modules: [q_proj, v_proj]}; "
            f"the modules of {kind} have names such as {_names_of_linear_layers(base)}",
        ) from None
    return made


def _installed(name: str) -> ModuleType:
    """The library. Raises `ConfigError` where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        key = "model.adapter" if name == "peft" else "model.pretrained"
        raise ConfigError(f"{key} needs {name}, which is not installed ({error})", cure=f"pip install {name}") from None


def _names_of_linear_layers(module: nn.Module) -> str:
    found = dict.fromkeys(name.rpartition(".")[2] for name, part in module.named_modules() if hasattr(part, "weight"))
    return ", ".join([*found][:8])
