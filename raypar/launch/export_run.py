"""`raypar export`: writes the weights of a run to one file, or to a folder that `from_pretrained` opens."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from raypar.errors import CheckpointError, ConfigError, ModelError, RayparError, with_article
from raypar.files.atomic_write import written_aside
from raypar.files.os_error_cure import cure_of_os_error
from raypar.files.remove_if_killed import removed_if_killed
from raypar.launch.load_model import load_trained_module
from raypar.plan.wording import after_steps, count_noun
from raypar.storage.run_folder import check_local_path, parse_storage_location
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raypar.storage.checkpoint_store import CheckpointRef

SUFFIXES = (".safetensors", ".pt")
"""The kinds of files that an export writes, by their suffix."""
DTYPES = {
    "float32": "float32", "fp32": "float32", "float16": "float16", "fp16": "float16", "bfloat16": "bfloat16",
    "bf16": "bfloat16", "float64": "float64",
}  # fmt: skip
"""What `--dtype` may say -> torch's name."""
TOKENIZER_FILES = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "spiece.model", "*.tiktoken",
    "sentencepiece*.model", "chat_template.*", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""The files of a tokenizer or image processor, of those in a model's folder."""


@dataclass(frozen=True)
class ExportRequest:
    """What is exported."""

    run: str
    """Name, path or URI of the run, or of a checkpoint."""
    run_dir: str
    """Where runs lie."""
    step: int | None
    """The checkpoint after so many steps; None: the last whole one."""
    out: str
    """What is written: a file, or a folder."""
    dtype: str | None = None
    """torch's name of the dtype to which floating-point tensors are cast; None: they stay as they were trained."""
    average: bool = False
    """Whether the averages of the weights are exported."""


@dataclass(frozen=True)
class FolderOptions:
    """What is written into a folder for `from_pretrained` beside the weights, and how."""

    model: str | None = None
    """`module:name` of the model function; None: the job file of the run names it."""
    tokenizer: str | None = None
    """The folder from which the tokenizer's files are copied."""
    max_shard_size: str | None = None
    """The most that a file of weights has, such as `5GB`; None: as `save_pretrained` has it."""
    merge: bool = False
    """Whether the adapters of a PEFT model are added to its weights, in place of an export of the adapters alone."""


class SavesPretrained(Protocol):
    """A model of `transformers` or `peft`."""

    def save_pretrained(self, save_directory: str, **options: str) -> None:
        """Write configuration and weights into a folder."""

    def to(self, dtype: torch.dtype, /) -> SavesPretrained:
        """Cast its weights, in place."""


def export_to_file(request: ExportRequest, warn: Callable[[str], None]) -> list[str]:
    """Write all parameters and persistent buffers to one file, whole or not at all; returns lines for the user.

    Raises `ConfigError`, `CheckpointError`. `warn` gets a line for each checkpoint that is skipped.
    """
    shared = parse_storage_location(request.out, "--out")
    out = check_local_path(request.out, "--out") if shared is None else Path(shared.name)
    if out.suffix not in SUFFIXES or (shared is None and not out.parent.is_dir()):
        cure = f"name a {' or '.join(SUFFIXES)} file in a folder that exists, or give --format hf for a folder"
        raise ConfigError(f"cannot write --out {request.out}", cure=cure)
    from raypar.worker.checkpoint.checkpoint_files import BUFFER, PARAMETER, load_manifest
    from raypar.worker.checkpoint.export_weights import export_checkpoint, write_to_folder, write_to_storage
    from raypar.worker.pretrained.frozen_values import AllTensors, check_frozen_values

    def export(checkpoint: CheckpointRef) -> list[str]:
        checkpoint = replace(checkpoint, averages=request.average)
        manifest, tensors = load_manifest(checkpoint), AllTensors(checkpoint, (PARAMETER, BUFFER), request.dtype)
        check_frozen_values(manifest)
        size = (
            write_to_folder(out, tensors, manifest.ties) if shared is None else write_to_storage(shared, tensors, manifest.ties)
        )
        text = (
            f"{count_noun(len(tensors), 'tensor')} {after_steps(manifest.steps_done)} in {request.out} ({size / 2**20:.1f} MiB)"
        )
        return [text, weights_line(checkpoint, request.dtype)]

    return export_checkpoint(request.run, request.run_dir, request.step, export, warn)


def weights_line(checkpoint: CheckpointRef, dtype: str | None) -> str:
    """The line with the hash of a checkpoint's weights. `dtype`: to which they were cast after that."""
    from raypar.worker.pretrained.frozen_values import weights_hash_of_checkpoint

    return f"weights sha256 {weights_hash_of_checkpoint(checkpoint)}" + f", before the cast to {dtype}" * (dtype is not None)


def export_to_folder(request: ExportRequest, options: FolderOptions, warn: Callable[[str], None]) -> list[str]:
    """Write the folder that the model's own `save_pretrained` writes, whole or not at all; returns lines for the user.

    The module is made and filled as `raypar.load` does: it takes the memory of the whole model, and `save_pretrained` once more
    that of what it casts or merges. Raises `ConfigError`, `CheckpointError`, and `ModelError` for a module that is neither of
    `transformers` nor of `peft`.
    """
    from raypar.worker.checkpoint.checkpoint_files import load_manifest

    out = check_out_folder(request.out)
    files = find_tokenizer_files(options.tokenizer) if options.tokenizer is not None else ()
    when, hashes = "", list[str]()

    def note(checkpoint: CheckpointRef) -> None:
        nonlocal when
        when = after_steps(load_manifest(checkpoint).steps_done)
        hashes[:] = [weights_line(checkpoint, request.dtype)]

    module = load_trained_module(request.run, request.run_dir, request.step, options.model, warn, note, average=request.average)
    model = pretrained_model(module, request.run, merge=options.merge)
    if request.dtype is not None:
        import torch

        model.to(getattr(torch, request.dtype))
    limit = {} if options.max_shard_size is None else {"max_shard_size": options.max_shard_size}
    try:
        with written_aside(out) as aside, removed_if_killed(aside):
            aside.mkdir()
            call_save_pretrained(model, str(aside), limit)
            for file in files:
                shutil.copyfile(file, aside / file.name)
            written = [path.stat().st_size for path in aside.rglob("*") if path.is_file()]
    except OSError as error:
        raise CheckpointError(
            f"cannot write {out}: {error.strerror or error}",
            cure=cure_of_os_error(error, "choose another --out, or free disk space"),
        ) from error
    size = f"{sum(written) / 2**20:.1f} MiB" if sum(written) >= 2**20 else f"{sum(written) / 2**10:.1f} KiB"
    return [f"{count_noun(len(written), 'file')} {when} in {out} ({size}); {how_to_open(model, str(out))}", *hashes]


def how_to_open(model: SavesPretrained, out: str) -> str:
    """How the folder is opened: `GPT2LMHeadModel.from_pretrained('gpt2_hf') opens it`; of adapters over which model."""
    adapted = getattr(sys.modules.get("peft"), "PeftModel", None)
    if adapted is None or not isinstance(model, adapted):
        return f"{type(model).__name__}.from_pretrained({out!r}) opens it"
    make_base: Any = getattr(model, "get_base_model", None)
    kind = type(make_base()).__name__ if callable(make_base) else "MODEL"
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    folder = next((str(at) for one in configs.values() if (at := one.base_model_name_or_path)), "BASE")
    opens = f"peft.PeftModel.from_pretrained({kind}.from_pretrained({folder!r}), {out!r}) opens it"
    return f"adapters alone: {opens}; with --merge the folder has the whole model"


def check_out_folder(given: str) -> Path:
    """The folder to write: one that is not there, or is empty, in a folder that exists. Raises `ConfigError`."""
    out = check_local_path(given, "--out")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {given} has files in it already", cure="name a folder that does not exist, or is empty")
    if (out.exists() and not out.is_dir()) or not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write --out {given}", cure="name a new folder in a folder that exists")
    return out


def find_tokenizer_files(given: str) -> Sequence[Path]:
    """The files of a tokenizer or image processor in a folder. Raises `ConfigError` if there are none."""
    folder = check_local_path(given, "--tokenizer")
    found = sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    if not found:
        what = "has no files of a tokenizer" if folder.is_dir() else "is no folder"
        raise ConfigError(
            f"--tokenizer {given} {what}",
            cure="give the folder of the model that you began with; one of a hub is to be downloaded first",
        )
    return found


def pretrained_model(module: nn.Module, run: str, *, merge: bool) -> SavesPretrained:
    """The module, if it can write itself by `save_pretrained`; with `merge` without its adapters. Raises `ModelError`."""
    kinds = [("transformers", "PreTrainedModel"), ("peft", "PeftModel")]
    pretrained, adapted = (getattr(sys.modules.get(package), name, None) for package, name in kinds)
    if adapted is not None and isinstance(module, adapted):
        saves: SavesPretrained = module.merge_and_unload() if merge else module
        return saves
    if merge:
        what = f"--merge, but the model of run {run} is {with_article(type(module).__name__)}, no PeftModel with adapters"
        raise ModelError(what, cure="leave --merge out")
    if pretrained is not None and isinstance(module, pretrained):
        saves = module
        return saves
    known = tuple(kind for kind in (pretrained, adapted) if kind is not None)
    inside = next((name for name, part in module.named_children() if known and isinstance(part, known)), None)
    where = f"raypar.load({run!r}).{inside}.save_pretrained(FOLDER) writes the part that is one; or " if inside else ""
    raise ModelError(
        f"the model of run {run} is {with_article(type(module).__name__)}, no PreTrainedModel of transformers: it has no "
        "configuration that from_pretrained could read",
        cure=f"{where}leave --format out: --out model.safetensors writes all tensors to one file",
    )


def call_save_pretrained(model: SavesPretrained, folder: str, options: dict[str, str]) -> None:
    """Have a model write itself, without a progress bar. Raises `CheckpointError`; `OSError` where the disk refuses."""
    logging = getattr(getattr(sys.modules.get("transformers"), "utils", None), "logging", None)
    shown = logging is not None and logging.is_progress_bar_enabled()
    try:
        if shown:
            logging.disable_progress_bar()  # type: ignore[union-attr]
        model.save_pretrained(folder, **options)
    except (OSError, RayparError):
        raise
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is not None:  # of the library `safetensors`
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise CheckpointError(
            f"{type(model).__name__}.save_pretrained raised {error_text(error)}",
            cure="raypar.load(RUN) gives the model: change there what it complains of, and call save_pretrained yourself",
        ) from error
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[union-attr]
