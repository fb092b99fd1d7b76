"""Cures of capture errors that name a setting of this model, such as `use_cache`, if changing it would help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

SKIPS_LAYERS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Settings of libraries by which layers are skipped at random."""
DRAWS_MASKS = ("mask_time_prob", "mask_feature_prob")
"""Settings by which masks are drawn with numpy."""


def cure_for_cache(model: nn.Module) -> str:
    """The cure for a cache object (of keys and values) that is passed between modules."""
    asking = [(path, config) for path, config in _configs(model) if getattr(config, "use_cache", False)]
    if any(path == "" for path, _ in asking):
        return "set use_cache=False in the model's config"
    if asking:
        path, config = asking[0]
        return f"set use_cache=False in the config of {path} ({type(config).__name__}) too: it is another than the model's"
    if any(type(module).__name__ == "PrefixEncoder" for module in model.modules()):
        return "prefix tuning passes a cache, whatever use_cache says: use LoRA or prompt tuning, which pass none"
    return "have the code that makes it pass None, or tensors; or make the module that calls both a unit (model.units)"


def settings_to_be_zero(model: nn.Module, names: tuple[str, ...]) -> str:
    """Names of those settings that are not 0, for a message; empty if all are 0.

    If the model has none of them, the first name: its own setting may have another name.
    """
    found = [(name, value) for name in names for value in _values(model, name)]
    return ", ".join(dict.fromkeys(name for name, value in found if value)) if found else names[0]


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(module's name, config) of every config, those of the outermost modules first; that of the model has no name."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        config = vars(module).get("config")
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            yield path, config


def _values(model: nn.Module, name: str) -> Iterator[Any]:
    """The values of a setting: attributes of modules; where no module has it, of configs."""
    own = [vars(module)[name] for module in model.modules() if name in vars(module)]
    for value in own or [getattr(config, name, None) for _, config in _configs(model)]:
        if isinstance(value, (int, float)):
            yield value
