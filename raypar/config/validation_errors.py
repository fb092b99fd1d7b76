"""Turns pydantic's validation errors about a job into one `ConfigError`, worded for a job file or for `Trainer`."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from raypar.config.plain_values import is_importable_name
from raypar.errors import ConfigError
from raypar.keys_of_other_frameworks import advice_for
from raypar.untrusted_files import repr_text, shorten
from raypar.worker.autocast_precisions import precision_settings_text

AUTO, GIVEN = "<auto>", "<given>"
"""Tags of the two types of `plan`. Pydantic puts them into error locations; messages leave them out."""

_COMMAND_LINE = {
    "address": "--address",
    "local_nodes": "--local-nodes",
    "stop_at_step": "--stop-at-step",
    "workers": "none; with plan: auto the planner uses as many processors as help",
    "resume_from_checkpoint": "`raypar resume RUN`",
}
"""Arguments of `Trainer` that are not keys of a job file -> the command line's counterpart."""


def section_types(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from section_types(inner)


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys of a section, without those of sections inside it."""
    return list(model.model_fields)


def walk_sections(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """(path, class) of every section inside a section, at any depth."""
    for name, info in model.model_fields.items():
        for inner in section_types(info.annotation):
            yield (*above, name), inner
            yield from walk_sections(inner, (*above, name))


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The keys of a section and of all sections inside it, such as `plan.stages`."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in section_types(info.annotation):
            yield from dotted_keys(inner, f"{prefix}{name}.")


def config_error(
    errors: Sequence[Any],
    inside: tuple[str, ...],
    job: type[BaseModel],
    *,
    of_trainer: bool = False,
    more: Sequence[str] = (),
) -> ConfigError:
    """One `ConfigError` for the errors of pydantic (`ValidationError.errors()`), unknown keys first.

    A missing key often is one that was misspelt, so the misspelt one is the better first message. `inside`: path of the section
    of `job` that was checked; `of_trainer`: whether to speak of `Trainer`'s arguments instead of a job file; `more`: arguments
    that are not keys of a job.
    """
    ordered = sorted(errors, key=lambda one: one["type"] != "extra_forbidden")
    explain = _Explainer(job, of_trainer, tuple(more)).explain
    found = [explain({**one, "loc": (*inside, *one["loc"])}) for one in ordered]
    return ConfigError("; ".join(what for what, _ in found[:5]), cure=found[0][1])


FUNCTION_KEY = '"function": ..., '
_OPTIMIZER_OPTIONS = {"lr": "lr", "learning_rate": "lr", "weight_decay": "weight_decay", "betas": "betas"}
"""Arguments that people give to `Trainer` -> the optimizer's own."""
_HALF_PRECISION = ("bfloat16", "float16", "bf16", "fp16", "half")


_MAIN_KEY = {"checkpoint": "every", "early_stopping": "patience", "plan": "replicas", "elastic": "min_workers"}
"""Section -> the key that people mean who give a number in its place."""
_WEIGHTS_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_LOSSES = {"mse": "mse_loss", "cross_entropy": "cross_entropy", "crossentropy": "cross_entropy", "ce": "cross_entropy"}
_LOSSES |= {"l1": "l1_loss", "mae": "l1_loss", "bce": "binary_cross_entropy", "nll": "nll_loss", "huber": "huber_loss"}
_OPTIMIZERS: tuple[str, ...] = (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "Adamax",
    "AdamW",
    "ASGD",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
)
_OPTIMIZERS += ("Rprop", "SGD", "Muon")
"""Bare names that people write for PyTorch's own losses and optimizers."""


def _known_function(section: str, name: str) -> str:
    """What to write for a bare name, such as `adam` or `mse`, or for a file of weights as the model; empty for other names."""
    if section == "model" and name.endswith(_WEIGHTS_SUFFIXES):
        return f"a function that makes the module there, and the file as init_from: {shorten(name)}"
    if section == "loss":
        found = _LOSSES.get(name.lower().removesuffix("loss").removesuffix("_"))
        return f"torch.nn.functional:{found}" if found else ""
    if section == "optimizer":
        return next((f"torch.optim:{one}" for one in _OPTIMIZERS if one.lower() == name.lower()), "")
    return ""


@dataclass(frozen=True)
class _Explainer:
    """Words for pydantic's errors about a job."""

    job: type[BaseModel]
    """The class of jobs."""
    of_trainer: bool
    """Whether the user gave `Trainer`'s arguments, not a job file."""
    more: tuple[str, ...]
    """Arguments that are not keys of a job."""

    def section_at(self, path: Sequence[str | int]) -> type[BaseModel]:
        """The section of a job to which `path` leads."""
        model = self.job
        for part in path:
            field = model.model_fields.get(part) if isinstance(part, str) else None
            if field is not None:  # else an item of a list, or a key of values that have no section
                model = next(section_types(field.annotation), model)
        return model

    def suggest_keys(self, key: str, path: Sequence[str | int], here: Sequence[str]) -> list[str]:
        """The full names of the keys that an unknown one may mean: those that have its name, in the singular or the plural, in
        `here`, where `path` leads, else in other sections; else the most similar one of `here`.

        Similar names in other sections mean other things: `data.shuffle` has nothing to do with `plan.schedule`.
        """
        name = key.lower().replace("-", "_").rstrip("s")
        same = [one for one in here if one.rstrip("s") == name]
        elsewhere = [full for full in dict.fromkeys(dotted_keys(self.job)) if full.rpartition(".")[2].rstrip("s") == name]
        if elsewhere and not same:
            return elsewhere
        return [".".join(map(str, [*path, one])) for one in same or difflib.get_close_matches(key, here, n=1, cutoff=0.7)]

    def explain(self, error: Mapping[str, Any]) -> tuple[str, str]:
        """(what, cure) for one error of pydantic."""
        path = [part for part in error["loc"] if part not in (AUTO, GIVEN)]
        key = shorten(".".join(map(str, path))) or "the job file"
        argument = self.of_trainer and len(path) == 1
        if error["type"] == "extra_forbidden":
            return self.explain_unknown_key(path, key, argument)
        if error["type"] == "invalid_key" or path[-1:] == ["[key]"]:
            where = shorten(".".join(map(str, path[: -2 if path[-1] == "[key]" else -1])))
            what = f"{f'{where}: ' if where else ''}the key {repr_text(error['input'])} is no text"
            return what, "write a key that looks like a number, a date or a truth value in quotes"
        inside = "the job file" if not self.of_trainer else f"the argument {path[0]}"
        inner = key.partition(".")[2] if self.of_trainer else key
        if error["type"] == "missing":
            return f"{key} is missing", f"give the argument {key}" if argument else f"add {inner} to {inside}"
        expected = (
            error["msg"].removeprefix("Value error, ").removeprefix("Input should be ").replace("a valid tuple", "a list")
        )
        if error["type"].startswith(("model_", "dict_type")):
            names = [at for at, part in enumerate(path) if isinstance(part, str)]  # an item of a list: the list's section
            known = self.section_at(path[: names[-1]]).model_fields.get(str(path[names[-1]])) if names else None
            section = next(section_types(known.annotation), None) if known is not None else None if path else self.job
            expected = f"keys and values ({', '.join(keys_of(section))})" if section else "keys and values"
            if section is not None and "function" in section.model_fields:
                expected = f"module:name, or {expected}"
        if error["loc"] == ("plan", AUTO):
            expected = f"auto, or keys and values ({', '.join(keys_of(self.section_at(path)))})"
        got = error["input"]
        cure = f"correct the argument {key}" if argument else f"correct {inner} in {inside}"
        if self.of_trainer and "function" in self.section_at(path).model_fields:
            cure += '; a function is "module:name", the function itself, or a pair (function, keyword arguments)'
        cure += self._as_it_is_written(path, got)
        return f"{key}: expected {expected}, got {repr_text(got)} ({type(got).__name__})", cure

    def _as_it_is_written(self, path: Sequence[str | int], got: Any) -> str:
        """What a cure says besides, for a value that stands for another one elsewhere: `torch.bfloat16`, `cuda`."""
        here, text = str(path[0]) if path else "", got if isinstance(got, str) else ""
        name = (str(got) if text or type(got).__module__ == "torch" else "").removeprefix("torch.")
        if here == "precision":
            return f"; for mixed precision it is {precision_settings_text()}, and without it everything is computed in `dtype`"
        if here == "dtype" and name in _HALF_PRECISION:
            return f"; for mixed precision leave it float32, and set precision to {precision_settings_text()}"
        if here == "dtype" and name in ("float32", "float64"):
            return f'; write "{name}"'
        if here == "device" and name.partition(":")[0] in ("cuda", "nvidia"):
            return '; write "gpu"'  # which one, Ray decides
        if path[-1:] == ["function"] and ":" not in text and (known := _known_function(here, text)):
            return f"; write {known}"
        if isinstance(got, (int, float)) and not isinstance(got, bool) and len(path) == 1 and here in _MAIN_KEY:
            return f'; for {here}.{_MAIN_KEY[here]} write {{"{_MAIN_KEY[here]}": {got}}}'
        if path[-1:] == ["function"] and ":" not in text and is_importable_name(text.replace(".", ":", 1)):
            return f"; write {':'.join(text.rsplit('.', 1))}"
        return ""

    def explain_unknown_key(self, path: Sequence[str | int], key: str, argument: bool) -> tuple[str, str]:
        """(what, cure) for an unknown key; `argument`: whether it was given as an argument of `Trainer`."""
        what = f"unknown {'argument' if argument else 'key'} {key}"
        advice = advice_for(str(path[-1]))
        if not self.of_trainer and key in _COMMAND_LINE:
            advice = f"it is no part of the job: the command line has {_COMMAND_LINE[key]}"
        if path[-1] == "workers" and len(path) > 1:
            advice = advice_for("world_size")
        if argument and (option := _OPTIMIZER_OPTIONS.get(str(path[0]))):
            advice = f'it is an argument of the optimizer: optimizer=("torch.optim:AdamW", {{"{option}": ...}})'
        if advice is not None:
            return what, advice
        section, _, inner = str(path[0]).partition("_")
        if len(path) == 1 and inner and f"{section}.{inner}" in dotted_keys(self.job):
            what, full = f"{what}: did you mean {section}.{inner}?", "function" in self.section_at([section]).model_fields
            given = f'{section}={{{FUNCTION_KEY * full}"{inner}": ...}}'
            return what, f"give it in the argument {section}: {given}" if argument else f"write it in the section {section}"
        here = [*keys_of(self.section_at(path[:-1])), *(self.more if argument else ())]
        near = self.suggest_keys(str(path[-1]), path[:-1], here)
        what += f": did you mean {' or '.join(near[:3])}?" if near else ""
        if argument and near and "." in near[0]:
            section, _, inner = near[0].partition(".")
            return what, f'give it in the argument {section}: {section}={{"{inner}": ...}}'
        valid = "arguments of Trainer" if argument else "valid keys here"
        return what, f"{valid}: {', '.join(here)}"
