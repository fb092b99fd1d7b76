"""Turns pydantic's validation errors about a job into one `ConfigError`, worded for a job file or for `Trainer`."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from raypar.errors import ConfigError
from raypar.files.printable_text import repr_text, shorten
from raypar.job.importable_name import is_importable_name
from raypar.job.keys_of_other_frameworks import advice_for
from raypar.job.precision_and_plan_names import AUTO, COPIES_TEXT, GIVEN, precision_settings_text
from raypar.job.walk_sections import dotted_keys, keys_of, section_types

_COMMAND_LINE = {
    "address": "--address",
    "local_nodes": "--local-nodes",
    "stop_at_step": "--stop-at-step",
    "workers": "none; with plan: auto the planner uses as many processors as help",
    "resume_from_checkpoint": "`raypar resume RUN`",
}
"""Arguments of `Trainer` that are not keys of a job file -> the command line's counterpart."""


def config_error(
    errors: Sequence[Any],
    inside: tuple[str, ...],
    job: type[BaseModel],
    *,
    of_trainer: bool = False,
    more: Sequence[str] = (),
    in_argument: str = "",
    overrides: Sequence[str] = (),
) -> ConfigError:
    """One `ConfigError` for the errors of pydantic (`ValidationError.errors()`), with the cure of each; unknown keys first.

    A missing key often is one that was misspelt, so the misspelt one is the better first message. `inside`: path of the section
    of `job` that was checked; `of_trainer`: whether to speak of `Trainer`'s arguments instead of a job file; `more`: arguments
    that are not keys of a job; `in_argument`: the argument that was given in the place of this section, such as
    `--data`. `overrides`: keys that were given by `--set`.
    """
    order = {"extra_forbidden": 0, "missing": 2}
    ordered = sorted(errors, key=lambda one: order.get(one["type"], 1))
    alike = Counter((one["type"] == "missing", tuple(one["loc"][:-1])) for one in errors if one["type"] != "extra_forbidden")
    explainer = _Explainer(job, of_trainer, tuple(more), in_argument, tuple(overrides))
    whats, cures = list[str](), list[tuple[str, str]]()
    for one in ordered[:MOST_ERRORS]:
        several = alike[one["type"] == "missing", tuple(one["loc"][:-1])] > 1
        what, cure = explainer.explain({**one, "loc": (*inside, *one["loc"])}, several=several)
        whats.append(what)
        cures.append((explainer.key_of([*inside, *one["loc"]]), cure))
    if len(ordered) > MOST_ERRORS:
        whats.append(f"and {len(ordered) - MOST_ERRORS} more")
    return ConfigError("; ".join(whats), cure=_join_cures(cures))


MOST_ERRORS = 16
"""The most errors about one job that are said at once."""


def _join_cures(cures: Sequence[tuple[str, str]]) -> str:
    """One text of (key, cure) pairs: of several different cures each has a line of its own, after the keys that it is for."""
    keys_by_cure: dict[str, list[str]] = {}
    for key, cure in cures:
        keys_by_cure.setdefault(cure, []).append(key)
    if len(keys_by_cure) == 1:
        return next(iter(keys_by_cure))
    indent = "\n" + " " * len("  cure: ")
    return indent.join(f"{', '.join(keys)}: {cure}" for cure, keys in keys_by_cure.items())


FUNCTION_KEY = '"function": ..., '
_OPTIMIZER_OPTIONS = {"lr": "lr", "learning_rate": "lr", "weight_decay": "weight_decay", "betas": "betas"}
"""Arguments that people give to `Trainer` -> the optimizer's own."""
_HALF_PRECISION = {"bfloat16", "bf16", "float16", "fp16", "half"}
_DEVICES = {"cuda": "gpu", "nvidia": "gpu", "gpu": "gpu", "gpus": "gpu", "cpu": "cpu", "cpus": "cpu"}
"""What people write for a kind of device -> the value of `device`."""


_MAIN_KEY = {"checkpoint": "every", "early_stopping": "patience", "plan": "replicas", "elastic": "min_workers"}
_MAIN_KEY |= {"average": "decay"}
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
    """What to write for a bare name, such as `adam` or `mse`; empty for other names."""
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
    in_argument: str = ""
    """The argument that was given in the place of a section of the job, such as `--data`; empty for none."""
    overrides: tuple[str, ...] = ()
    """Keys that were given by `--set`."""

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
        return [self.key_of([*path, one]) for one in same or difflib.get_close_matches(key, here, n=1, cutoff=0.7)]

    def key_of(self, place: Sequence[str | int]) -> str:
        """The key at a location of pydantic, such as `plan.stages`; in an argument in its place `parquet in --data`."""
        parts = [str(part) for part in place if part not in (AUTO, GIVEN)]
        if self.in_argument:
            return f"{shorten('.'.join(parts[1:]))} in {self.in_argument}" if parts[1:] else self.in_argument
        return shorten(".".join(parts)) or "the job file"

    def explain(self, error: Mapping[str, Any], *, several: bool = False) -> tuple[str, str]:
        """(what, cure) for one error of pydantic. `several`: one of several missing or wrong keys of a section."""
        path = [part for part in error["loc"] if part not in (AUTO, GIVEN)]
        key = self.key_of(path)
        argument = self.of_trainer and len(path) == 1
        if error["type"] == "extra_forbidden":
            return self.explain_unknown_key(path, key, argument)
        if error["type"] == "invalid_key" or path[-1:] == ["[key]"]:
            where = shorten(".".join(map(str, path[: -2 if path[-1] == "[key]" else -1])))
            what = f"{f'{where}: ' if where else ''}the key {repr_text(error['input'])} is no text"
            return what, "write a key that looks like a number, a date or a truth value in quotes"
        inside = self.in_argument or ("the job file" if not self.of_trainer else f"the argument {path[0]}")
        override = next((one for one in reversed(self.overrides) if f"{key}.".startswith(f"{one}.")), None)
        inner = key.partition(".")[2] if self.of_trainer else key
        if self.in_argument:
            inner = key.removesuffix(f" in {self.in_argument}")
        if error["type"] == "missing":
            if argument:
                return f"{key} is missing", "give these arguments" if several else f"give the argument {key}"
            return f"{key} is missing", f"add {'these keys' if several else inner} to {inside}"
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
        cure = cure if override is None else f"correct --set {override}"
        if several and len(path) == 1 and override is None:
            cure = "correct these arguments" if argument else f"correct these keys in {inside}"
        if error["type"] in ("tuple_type", "list_type") and isinstance(got, (str, Mapping)):
            cure += f"; it is a list, also where it has one item: [{repr_text(got)}]"
        if (value := self._value_meant(path, got)) is not None:
            if path[-1:] == ["function"]:  # perhaps beside arguments of its own
                cure = f'write "{value}"' if self.of_trainer else f"write {value}"
            else:
                cure = f'write {key}="{value}"' if self.of_trainer else f"write {key}: {value}"
        if self.of_trainer and "function" in self.section_at(path).model_fields:
            cure += '; a function is "module:name", the function itself, or a pair (function, keyword arguments)'
        cure += self._further_advice(path, got)
        return f"{key}: expected {expected}, got {repr_text(got)} ({type(got).__name__})", cure

    def _value_meant(self, path: Sequence[str | int], got: Any) -> str | None:
        """What is written here for a value that is known from elsewhere, as `cuda` for `gpu`; None for other values."""
        here, text = str(path[0]) if path else "", got if isinstance(got, str) else ""
        name = (str(got) if text or type(got).__module__ == "torch" else "").removeprefix("torch.")
        if here == "dtype" and name in ("float32", "float64"):
            return name
        if here == "device":
            return _DEVICES.get(name.lower().partition(":")[0])  # which GPU, Ray decides
        if path[-1:] == ["function"] and ":" not in text and not text.endswith(_WEIGHTS_SUFFIXES):
            if known := _known_function(here, text):
                return known
            if is_importable_name(text.replace(".", ":", 1)):
                return ":".join(text.rsplit(".", 1))
        return None

    def _further_advice(self, path: Sequence[str | int], got: Any) -> str:
        """What a cure says besides, for a value that another key is for."""
        here = str(path[0]) if path else ""
        name = (str(got) if isinstance(got, str) or type(got).__module__ == "torch" else "").removeprefix("torch.")
        if path == ["model", "function"] and isinstance(got, str) and got.endswith(_WEIGHTS_SUFFIXES):
            return f"; give a function that makes the module there, and the file as init_from: {shorten(got)}"
        if path == ["model", "function"] and isinstance(got, str) and ":" not in got:
            return f"; for a model by its name a function makes it: lambda: AutoModel.from_pretrained({repr_text(got)})"
        if path == ["plan"] and isinstance(got, str) and (advice := advice_for(got)) is not None:
            return f"; {advice}"
        if here == "precision":
            own = path[1:] in (["parameters"], ["master"], ["gradients"])
            mixed = f"for mixed precision it is {COPIES_TEXT if own else precision_settings_text()}"
            return f"; {mixed}, and without it everything is computed in `dtype`"
        if here == "dtype" and name in _HALF_PRECISION:
            return f"; for mixed precision leave it float32, and set precision to {precision_settings_text()}"
        if isinstance(got, (int, float)) and not isinstance(got, bool) and len(path) == 1 and here in _MAIN_KEY:
            return f'; for {here}.{_MAIN_KEY[here]} write {{"{_MAIN_KEY[here]}": {got}}}'
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
