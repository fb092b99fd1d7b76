"""Ray Train's configs, as `Trainer` takes them: which of their fields say something to raypar, and what to give for the others.

Taken are `ScalingConfig`, `RunConfig` with its `FailureConfig` and `CheckpointConfig`, and `CheckpointConfig` by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from raypar.errors import ConfigError
from raypar.files.printable_text import repr_text


class ImpliedSetting(NamedTuple):
    """A value for a key of a job, given by something else than the key itself."""

    key: str
    """The key, such as `checkpoint.keep`."""
    value: Any
    """The value."""
    source: str
    """Name of what gives the value, for messages: `run_config.checkpoint_config.num_to_keep`."""

    overridable: bool = False
    """Whether a value that the key has already wins silently. Else a different value is an error."""

    def apply_to(self, tree: dict[str, Any]) -> None:
        """Set the key in a job's tree. Raises `ConfigError` if the key has a different value already."""
        section, _, inner = self.key.rpartition(".")
        here = tree
        if section:
            inside = tree.get(section)
            if inside is None or inside is True:
                inside = {}
            elif hasattr(inside, "model_fields_set"):  # a section object, such as `CheckpointConfig(...)`
                inside = {name: getattr(inside, name) for name in inside.model_fields_set}
            elif not isinstance(inside, Mapping):
                if inside is False:
                    raise ConfigError(
                        f"{section} is False, and {self.source} is {repr_text(self.value)}", cure="give one of them"
                    )
                return  # a wrong type, which the job's own checks report
            tree[section] = here = dict(inside)
        there = here.get(inner)
        if there is not None and (
            self.overridable or (self.value is True and there is not False)
        ):  # `elastic: true` agrees with any settings of it
            return
        if there is not None and there != self.value:
            raise ConfigError(
                f"{self.key} is {repr_text(there)}, and {self.source} is {repr_text(self.value)}",
                cure="give one of them, or both alike",
            )
        here[inner] = self.value


RAY_TRAIN_ARGUMENTS = ("scaling_config", "run_config", "checkpoint_config")
"""Arguments of `Trainer` that are configs of Ray Train, in the order of `settings_from_ray_train`."""

UNUSED_FIELDS = {
    "callbacks": "give callbacks=[...] to Trainer, objects of classes derived from raypar.callbacks.Callback",
    "worker_runtime_env": "give it to ray.init(runtime_env=...)",
    "stop": "give steps= or stop_at_step= to Trainer, or a callback that returns raypar.callbacks.Stop",
    "verbose": "give it to fit(verbose=...)",
    "checkpoint_score_attribute": 'give Trainer checkpoint={"best": [{"metric": ..., "mode": "min" or "max", "keep": ...}]}',
    "checkpoint_score_order": 'give Trainer checkpoint={"best": [{"metric": ..., "mode": "min" or "max", "keep": ...}]}',
    "max_failures": "give -1, or elastic=True to Trainer: an elastic run replaces lost workers, however many",
    "max_preemption_failures": "leave it out: drained workers are replaced in an elastic run, however many",
    "preemption_grace_s": "leave it out: work moves off a drained node before its deadline",
    "controller_failure_limit": "leave it out: the driver of an elastic run is started again",
    "fail_fast": "leave it out: the run ends at once where it is not elastic",
    "resources_per_worker": "leave it out: a worker takes one CPU, with use_gpu one GPU too; threads= says how many threads",
    "trainer_resources": "leave it out: the driver takes no CPU",
    "placement_strategy": "leave it out: workers of one stage are placed together where there is room",
    "label_selector": "give one for all workers: a dict",
    "use_tpu": "leave it out: workers compute on CPUs, or with use_gpu on GPUs",
    "elastic_resize_monitor_interval_s": "leave it out: workers join between two steps (elastic.grow_after_s)",
}
"""Fields of Ray Train's configs that raypar does not use -> what to give instead."""

MADE_UP_NAME = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
"""The name that `RunConfig` makes up where it is given none."""


def settings_from_ray_train(scaling_config: Any, run_config: Any, checkpoint_config: Any) -> Iterator[ImpliedSetting]:
    """The keys of a job that the configs set, of those that are given.

    Raises `ConfigError` for a config of another class, and for one that sets a field that raypar does not use.
    """
    if scaling_config is not None:
        yield from _settings_of_scaling(scaling_config, "scaling_config")
    if run_config is not None:
        yield from _settings_of_run(run_config, "run_config")
    if checkpoint_config is not None:
        yield from _settings_of_checkpoint(checkpoint_config, "checkpoint_config")


def _settings_of_scaling(config: Any, what: str) -> Iterator[ImpliedSetting]:
    """What a `ScalingConfig` says: the number of workers, or its limits in an elastic run, the device, and the nodes."""
    changed = _changed_fields(config, what, "ScalingConfig", {"num_workers", "use_gpu", "accelerator_type", "label_selector"})
    workers = changed.get("num_workers")
    if isinstance(workers, tuple):
        least, most = workers
        yield ImpliedSetting("elastic.min_workers", least, f"the least of {what}.num_workers")
        yield ImpliedSetting("elastic.max_workers", most, f"the most of {what}.num_workers")
        workers = most
    if workers is not None:
        yield ImpliedSetting("workers", workers, f"{what}.num_workers")
    if "use_gpu" in changed:
        yield ImpliedSetting("device", "gpu" if config.use_gpu else "cpu", f"that of {what}.use_gpu")
    if isinstance(changed.get("label_selector"), list):
        raise _unused(what, "label_selector")
    for field in ("accelerator_type", "label_selector"):
        if field in changed:
            yield ImpliedSetting(f"placement.{field}", changed[field], f"{what}.{field}")


def _settings_of_run(config: Any, what: str) -> Iterator[ImpliedSetting]:
    """What a `RunConfig` says: name and folder, and what its `FailureConfig` and `CheckpointConfig` say."""
    used = {"name", "storage_path", "storage_filesystem", "failure_config", "checkpoint_config"}
    changed = _changed_fields(config, what, "RunConfig", used)
    if config.name is not None:
        yield ImpliedSetting("name", config.name, f"{what}.name", overridable=MADE_UP_NAME.fullmatch(config.name) is not None)
    if config.storage_filesystem is not None:
        from raypar.storage.filesystems import uri_of_filesystem_object

        if "storage_path" not in changed:
            raise ConfigError(
                f"{what}.storage_filesystem is given without a path in it", cure='give storage_path="BUCKET/FOLDER" too'
            )
        place = uri_of_filesystem_object(config.storage_filesystem, config.storage_path, f"{what}.storage_filesystem")
        yield ImpliedSetting("run_dir", str(place), f"{what}.storage_path")
    elif config.storage_path is not None:
        yield ImpliedSetting("run_dir", config.storage_path, f"{what}.storage_path", overridable="storage_path" not in changed)
    if config.failure_config is not None:
        inner = f"{what}.failure_config"
        failures = _changed_fields(config.failure_config, inner, "FailureConfig", {"max_failures"}).get("max_failures")
        if failures == -1:
            yield ImpliedSetting("elastic", True, f"that of {inner}.max_failures=-1")
        elif failures is not None:
            raise _unused(inner, "max_failures")
    if config.checkpoint_config is not None:
        yield from _settings_of_checkpoint(config.checkpoint_config, f"{what}.checkpoint_config")


def _settings_of_checkpoint(config: Any, what: str) -> Iterator[ImpliedSetting]:
    """What a `CheckpointConfig` says: how many checkpoints are kept, how often they are saved, and whether at the end."""
    used = {"num_to_keep", "checkpoint_frequency", "checkpoint_at_end"}
    keys = {"num_to_keep": "keep", "checkpoint_frequency": "every", "checkpoint_at_end": "at_end"}
    for field, value in _changed_fields(config, what, "CheckpointConfig", used).items():
        if value is not None:
            yield ImpliedSetting(f"checkpoint.{keys[field]}", value, f"{what}.{field}")


def _changed_fields(config: Any, what: str, kind: str, used: set[str]) -> dict[str, Any]:
    """The fields that are not as by default. Raises `ConfigError` if one is not `used`, or if `config` is of another class."""
    if not is_dataclass(config) or isinstance(config, type) or not used <= {field.name for field in fields(config)}:
        name = config.__name__ if isinstance(config, type) else f"a {type(config).__name__}"
        raise ConfigError(f"{what} is {name}, not a ray.train.{kind}", cure=f"give ray.train.{kind}(...), or leave it out")
    default = type(config)()
    changed = {
        field.name: value for field in fields(config) if (value := getattr(config, field.name)) != getattr(default, field.name)
    }
    for name in changed:
        if name not in used:
            raise _unused(what, name)
    return changed


def _unused(what: str, field: str) -> ConfigError:
    """The error about a field that has no effect here."""
    return ConfigError(f"{what} has {field}, which raypar does not use", cure=UNUSED_FIELDS.get(field, "leave it out"))
