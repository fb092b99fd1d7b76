"""Reads jobs: from job files with their overrides, from single sections, and from `Trainer`'s arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, PositiveInt, ValidationError

from raypar.config.job import Job, PlanConfig, Workers, _Section
from raypar.config.validation_errors import config_error, keys_of
from raypar.errors import ConfigError
from raypar.safe_yaml import parse_yaml
from raypar.untrusted_files import read_limited_text

JOB_BYTES = 1 << 20
"""Size limit of a job file."""


class _RunArguments(_Section):
    """The arguments of `Trainer` that say how and where a job is run; used to check them."""

    workers: Workers | None = None
    schedule: str | None = None
    address: str | None = None
    local_nodes: PositiveInt = 1
    stop_at_step: PositiveInt | None = None
    resume_from_checkpoint: Any = None
    scaling_config: Any = None
    run_config: Any = None
    checkpoint_config: Any = None


RUN_ARGUMENTS = tuple(_RunArguments.model_fields)
"""Arguments of `Trainer` that are not keys of a job."""


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The checked job of a job file, after overrides `a.b=c` (values in YAML). Raises `ConfigError` or `PlanError`."""
    path = Path(path)
    cure = "give the path of a YAML file such as jobs/quickstart.yaml"
    text = read_limited_text(path, follow=True, limit=JOB_BYTES, cure=cure, what="job file ")
    return parse_job(text, overrides, source=str(path), name=path.stem)


def parse_job(text: str, overrides: Sequence[str] = (), *, source: str = "job", name: str | None = None) -> Job:
    """The checked job of a YAML text. `name`: the job's name if the text gives none; `source`: name of the text in messages."""
    tree = parse_yaml(text, source)
    if not isinstance(tree, dict):
        what = f"{source} holds a {type(tree).__name__}, not keys and values"
        raise ConfigError(what, cure=f"keys: {', '.join(keys_of(Job))}")
    for override in overrides:
        _apply_override(tree, override)
    if name is not None:
        tree.setdefault("name", name)
    try:
        return Job.model_validate(tree)
    except ValidationError as error:
        raise config_error(error.errors(), (), Job) from None


def parse_plan_section(given: Mapping[str, Any]) -> PlanConfig:
    """The section `plan` of a job by itself, checked. Raises `ConfigError` or `PlanError`."""
    try:
        return PlanConfig.model_validate(dict(given))
    except ValidationError as error:
        raise config_error(error.errors(), ("plan",), Job) from None


def check_run_arguments(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for wrong values among `RUN_ARGUMENTS`, given by name."""
    try:
        _RunArguments.model_validate(dict(given))
    except ValidationError as error:
        raise config_error(error.errors(), (), Job, of_trainer=True) from None


def job_from_argument_tree(tree: Mapping[str, Any]) -> Job:
    """The checked job of `Trainer`'s arguments. Raises `ConfigError` or `PlanError`, as for the same keys of a job file.

    `tree`: argument name -> value as in a job file, except that callables may stand in place of `module:name`. Arguments that
    are not keys of a job (`RUN_ARGUMENTS`) are checked too.
    """
    found: list[Any] = []
    made: dict[type[BaseModel], Any] = {}
    for model, of_run in ((Job, False), (_RunArguments, True)):
        try:
            made[model] = model.model_validate({key: value for key, value in tree.items() if (key in RUN_ARGUMENTS) == of_run})
        except ValidationError as error:
            found += error.errors()
    if found:
        raise config_error(found, (), Job, of_trainer=True, more=RUN_ARGUMENTS)
    job: Job = made[Job]
    return job


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one key by `a.b=c`. A `module:name` entry or `plan: auto` becomes a mapping if a key inside it is set."""
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"override {override!r} is not key=value", cure="for example --set plan.stages=4")
    value = parse_yaml(text, f"--set {override}")
    here: Any = tree
    for index, part in enumerate(parts[:-1]):
        at = ".".join(parts[: index + 1])
        if isinstance(here, list):
            here = _item(here, part, at)
            continue
        inside = here.get(part)
        if inside is None or (at == "plan" and inside == "auto"):
            inside = here[part] = {}
        elif isinstance(inside, str) and ":" in inside:
            inside = here[part] = {"function": inside}
        if not isinstance(inside, (dict, list)):
            raise ConfigError(f"--set {override}: {at} is {inside!r} and has no keys", cure=f"set {at} itself")
        here = inside
    if isinstance(here, list):
        _item(here, parts[-1], path)
        here[int(parts[-1])] = value
    else:
        here[parts[-1]] = value


def _item(items: list[Any], part: str, at: str) -> Any:
    """The item of a list by its number as text. Raises `ConfigError`."""
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"{at}: there are {len(items)} entries, numbered from 0", cure="give the number of one of them")
    return items[int(part)]
