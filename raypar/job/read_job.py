"""Reads jobs: from job files with their overrides, from single sections, and from `Trainer`'s arguments."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveInt, ValidationError

from raypar.errors import ConfigError, PlanError
from raypar.files.printable_text import repr_text, shorten
from raypar.files.safe_yaml import parse_yaml
from raypar.files.untrusted_files import read_limited_text
from raypar.job.data_section import SET_NAME, ValidationConfig
from raypar.job.function_section import FunctionConfig, ModelConfig
from raypar.job.importable_name import is_importable_name
from raypar.job.job import JOB_BYTES, RUN_NAME_CURE, Job, is_run_name
from raypar.job.section import Section, Workers
from raypar.job.validation_errors import config_error
from raypar.job.walk_sections import keys_of, section_types, short_key


class RunArguments(Section):
    """The arguments of `Trainer` that say how and where a job is run; used to check them."""

    workers: Workers | None = None
    """The most workers that the planner may use, with `plan="auto"` or without `plan`; None: one per processor of this
    machine."""
    schedule: str | None = None
    """The schedule's name: the same as the key `schedule` of `plan`."""
    address: str | None = None
    """The Ray cluster to join, `"auto"` or `"HEAD:6379"`; None: the one that the program has joined by `ray.init`, else
    `RAY_ADDRESS`, else a local Ray cluster that is started and removed again."""
    local_nodes: PositiveInt = 1
    """Nodes of the local Ray cluster that is started when there is no other."""
    stop_at_step: PositiveInt | None = None
    """Number of steps after which the run saves a checkpoint and stops, to be resumed."""
    resume_from_checkpoint: Any = None
    """The `checkpoint` of a result, the path of a checkpoint, or a run, by its path or its name under `run_dir`, whose last one
    is taken. Training continues after its steps in a new run folder, under the plan that is given here."""
    scaling_config: Any = None
    """Ray Train's `ScalingConfig`: `num_workers` (also as (least, most) of an elastic run) and `use_gpu`."""
    run_config: Any = None
    """Ray Train's `RunConfig`: `name`, `storage_path`, `storage_filesystem`, its `FailureConfig` (`max_failures=-1`: elastic)
    and `CheckpointConfig`."""
    checkpoint_config: Any = None
    """Ray Train's `CheckpointConfig`: `num_to_keep`."""


RUN_ARGUMENTS = tuple(RunArguments.model_fields)
"""Arguments of `Trainer` that are not keys of a job."""


def load_job(path: str | os.PathLike[str], overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> Job:
    """The checked job of a job file, after overrides `a.b=c` (values in YAML). Raises `ConfigError` or `PlanError`.

    `defaults`: values of keys that the job gives neither way.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"the job file is {repr_text(path)}, not a path", cure="give the path of a YAML file")
    if isinstance(overrides, str) or not isinstance(overrides, Sequence) or not all(isinstance(one, str) for one in overrides):
        raise ConfigError(
            f"overrides is {repr_text(overrides)}, not a list of texts", cure='for example ["plan.stages=4", "seed=7"]'
        )
    path = Path(path)
    if path.suffix == ".py":
        raise ConfigError(
            f"{shorten(str(path))} is a Python script, not a job file",
            cure=f"a script that calls raypar.Trainer(...).fit() is run by `python {shorten(str(path))}`; a job file is YAML",
        )
    cure = "give the path of a YAML file such as jobs/quickstart.yaml"
    text = read_limited_text(path, follow=True, limit=JOB_BYTES, cure=cure, what="job file ")
    return parse_job(text, overrides, source=str(path), name=path.stem, defaults=defaults)


def load_job_of_run(path: Path, shown: str, overrides: Sequence[str] = ()) -> Job:
    """The checked job of a run's own job file, as `load_job`; every error names the file. `shown`: its place, for messages."""
    text = read_limited_text(path, follow=False, limit=JOB_BYTES, cure="put the run's job file back", what="job file ")
    try:
        return parse_job(text, overrides, source=shown, name=path.stem)
    except (ConfigError, PlanError) as error:
        if shown in error.what:
            raise
        changed = f" with --set {' --set '.join(overrides)}" if overrides else ""
        raise type(error)(f"{shown}{changed}: {error.what}", error.cure) from None


def parse_job(
    text: str,
    overrides: Sequence[str] = (),
    *,
    source: str = "job",
    name: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Job:
    """The checked job of a YAML text. `name`: the job's name if the text gives none; `source`: name of the text in messages.
    `defaults`: see `load_job`."""
    tree = parse_yaml(text, source)
    if not isinstance(tree, dict):
        what = f"{source} holds a {type(tree).__name__}, not keys and values"
        raise ConfigError(what, cure=f"keys: {', '.join(keys_of(Job))}")
    for override in overrides:
        _apply_override(tree, override)
    if name is not None and "name" not in tree:
        if not is_run_name(name):
            raise ConfigError(
                f"the job has no name, and that of its file, {repr_text(name)}, cannot name a run's folder",
                cure=f"add name to the job file: {RUN_NAME_CURE}",
            )
        tree["name"] = name
    for key, value in (defaults or {}).items():
        tree.setdefault(key, value)
    try:
        return Job.model_validate(tree)
    except ValidationError as error:
        set_keys = [override.partition("=")[0].strip() for override in overrides]
        raise config_error(error.errors(), (), Job, overrides=set_keys) from None


def parse_data_argument(text: str) -> ValidationConfig | str:
    """The data set that `--data` names: `module:name`, or the keys of `validation` as YAML; or the name of one of the job's
    validation sets, as it is. Raises `ConfigError`."""
    if re.fullmatch(SET_NAME, text):
        return text
    if not text.lstrip().startswith("{"):
        if not is_importable_name(text):
            raise ConfigError(
                f"--data {shorten(text)} names no data set",
                cure="give --data module:function, the name of one of the job's validation sets, or keys and values: "
                f"--data '{{function: module:name, args: {{...}}}}'{clause_on_data_file(text)}",
            )
        return parse_data_section(text, "--data")
    return parse_data_section(parse_yaml(text, "--data"), "--data")


def clause_on_data_file(text: str) -> str:
    """How `--data` names a file, for the cure of a text that is no data set and may be a file's name; empty for others."""
    kind = next((kind for kind, suffixes in _FILE_SUFFIXES.items() if text.endswith(suffixes)), None)
    return f"; a file is named so: --data '{{{kind}: {shorten(text)}}}'" if kind is not None else ""


_FILE_SUFFIXES = {"parquet": (".parquet",), "jsonl": (".jsonl", ".json", ".jsonl.gz"), "tar": (".tar", ".tar.gz", ".tgz")}
"""Key of a data section -> how the names of its files end."""


def parse_function_argument(given: object, what: str) -> FunctionConfig:
    """A function with its arguments: `module:name`, a callable, or a pair of it and its arguments. Raises `ConfigError`."""
    try:
        return FunctionConfig.model_validate(given)
    except ValidationError:
        raise ConfigError(
            f"{what} is {repr_text(given)}, which names no function",
            cure="give module:name; from Python also the function itself",
        ) from None


def parse_data_section(given: object, argument: str) -> ValidationConfig:
    """A section `validation` that was given by itself in an argument, checked. Raises `ConfigError`. `argument`: its name."""
    try:
        return ValidationConfig.model_validate(given)
    except ValidationError as error:
        raise config_error(error.errors(), ("validation",), Job, in_argument=argument) from None


def parse_model_section(given: object) -> ModelConfig:
    """A section `model` that was given by itself in the argument `model`, checked. Raises `ConfigError`."""
    try:
        return ModelConfig.model_validate(given)
    except ValidationError as error:
        raise config_error(error.errors(), ("model",), Job, in_argument="model") from None


def check_run_arguments(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for wrong values among `RUN_ARGUMENTS`, given by name."""
    try:
        RunArguments.model_validate(dict(given))
    except ValidationError as error:
        raise config_error(error.errors(), (), Job, of_trainer=True) from None


def job_from_argument_tree(tree: Mapping[str, Any]) -> Job:
    """The checked job of `Trainer`'s arguments. Raises `ConfigError` or `PlanError`, as for the same keys of a job file.

    `tree`: argument name -> value as in a job file, except that callables may stand in place of `module:name`. Arguments that
    are not keys of a job (`RUN_ARGUMENTS`) are checked too.
    """
    found: list[Any] = []
    made: dict[type[BaseModel], Any] = {}
    for model, of_run in ((Job, False), (RunArguments, True)):
        try:
            made[model] = model.model_validate({key: value for key, value in tree.items() if (key in RUN_ARGUMENTS) == of_run})
        except ValidationError as error:
            found += error.errors()
    if found:
        raise config_error(found, (), Job, of_trainer=True, more=RUN_ARGUMENTS)
    job: Job = made[Job]
    return job


_LENGTHS = {"steps": "epochs", "epochs": "steps"}


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one key by `a.b=c`. The short form of a section (`module:name`, a path, `plan: auto`, `elastic: true`) is written out
    if a key inside it is set."""
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not key=value", cure="for example --set plan.stages=4")
    value = parse_yaml(text, f"--set {override}")
    if parts[0] in _LENGTHS:  # either of them is the length of a run
        tree.pop(_LENGTHS[parts[0]], None)
    here: Any = tree
    model: type[BaseModel] | None = Job  # the section that `here` is; None among values that have no section
    for index, part in enumerate(parts):
        at = ".".join(parts[: index + 1])
        key: Any = part
        if isinstance(here, list):
            key = _place(here, part, at)
        else:
            field = model.model_fields.get(part) if model is not None else None
            model = next(section_types(field.annotation), None) if field is not None else None
        if index == len(parts) - 1:
            here[key] = value
            return
        inside = here[key] if isinstance(here, list) else here.get(key)
        if not isinstance(inside, list):
            inside = _written_out(inside, model, f"--set {override}: {at}", at)
        inside = copy.copy(inside)  # an alias in YAML is the same object as what it stands for
        here[key] = inside
        here = inside


def _written_out(value: Any, model: type[BaseModel] | None, what: str, at: str) -> dict[str, Any]:
    """The keys of a section that has none yet, or is given in its short form. Raises `ConfigError` for a value without keys."""
    if isinstance(value, dict):
        return value
    if value is None or (value == "auto" and at == "plan") or (value is True and at == "elastic"):
        return {}
    if isinstance(value, str) and model is not None and (first := short_key(model)) is not None:
        return {first: value}
    raise ConfigError(f"{what} is {repr_text(value)} and has no keys", cure=f"set {at} itself")


def _place(items: list[Any], part: str, at: str) -> int:
    """The place in a list that a text names. Raises `ConfigError`."""
    if not part.isdecimal() or int(part) >= len(items):
        raise ConfigError(f"{at}: there are {len(items)} entries, numbered from 0", cure="give the number of one of them")
    return int(part)
