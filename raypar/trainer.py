"""`Trainer(...).fit()`: a job as Python objects."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.callbacks import check_callbacks as checked_callbacks
from raypar.errors import CheckpointError, ConfigError
from raypar.launch import (
    Options,
    Planned,
    Result,
    Tell,
    choose,
    last_checkpoint,
    launch,
    make_importable,
    orders_of,
    plan_json,
    raise_failure,
    resumed,
)
from raypar.plan import ParallelPlan, Routing
from raypar.run_folder import RunFolder, explain_read_errors, local_path
from raypar.worker.job_spec import DataSpec, JobSpec, OptimizerSpec, Ref, ValidationSpec, without_stable_text

if TYPE_CHECKING:
    from raypar.config import ElasticConfig
    from raypar.schedule.instructions import Schedule
    from raypar.worker.preflight import PreflightResult


NOT_OF_RAY_TRAIN = {
    "storage_filesystem": "give storage_path, the path of a folder (on a cluster, of storage that all nodes have mounted)",
    "callbacks": "give callbacks=[...] to Trainer, objects of classes derived from raypar.callbacks.Callback",
    "worker_runtime_env": "give it to ray.init(runtime_env=...)",
    "failure_config": "give elastic=True to Trainer: workers that are lost are then replaced; `raypar resume` after a failure",
    "stop": "give steps= or stop_at_step= to Trainer, or a callback that returns raypar.callbacks.Stop",
    "verbose": "give it to fit(verbose=...)",
    "checkpoint_score_attribute": "leave it out: the newest checkpoints are kept, num_to_keep of them",
    "checkpoint_score_order": "leave it out: the newest checkpoints are kept, num_to_keep of them",
    "checkpoint_at_end": "leave it out: there always is one at the end",
}
"""Fields of Ray Train's configs that raypar does not use -> what to give instead."""
USED_OF_RAY_TRAIN = ("name", "storage_path", "checkpoint_config", "num_to_keep", "checkpoint_frequency")


def check_is_used(config: Any, what: str) -> None:
    """Raise `ConfigError` if a config of Ray Train says something that has no effect: a field that is not as by default."""
    default = type(config)()
    for field in fields(config):
        value = getattr(config, field.name)
        same = value == getattr(default, field.name) or (field.name == "checkpoint_at_end" and value is True)
        if field.name not in USED_OF_RAY_TRAIN and not same:
            raise ConfigError(
                f"{what} has {field.name}, which raypar does not use", cure=NOT_OF_RAY_TRAIN.get(field.name, "leave it out")
            )


BUILT_BYTES = 32 << 20
"""Size limit of a model that is given built: it travels to every worker through Ray's store."""


class Trainer:
    """Trains a model on Ray, in stages, replicas and shards; of the plan, only shards and their styles change the bits.

    Functions are given as `"module:name"`, as the callable itself, or as a pair (either of those, dict of keyword arguments):

    - `model()`: an `nn.Sequential`, a list of blocks or a `Graph`; training begins with the values it gives its parameters;
      also a small model that is built already, which is taken with its values;
    - `loss(output, target)`: a scalar, or (sum, count); also a loss module without parameters (`nn.CrossEntropyLoss()`) or the
      class of one;
    - `data()`: a map-style data set, or the data set itself; `validation` likewise;
    - `optimizer`: a class of `torch.optim`; `lr_schedule(step)`: factor on its learning rates.

    `data_input`, `data_target`: fields of dict samples that the first layer reads and the loss is given; `data_names`: names of
    the fields of tuple samples, where they are not x, y, z; `data_processes`: CPU processes that read ahead. What a job file
    calls `data.input` and so on; `validation` samples have the same fields.
    `plan`: "auto", a dict with the keys of a job file's `plan`, or a `ParallelPlan`. `schedule`: of a plan that is given, by
    default 1f1b.
    `workers`: so many at most; with "auto" as many are used as help, by default as many as this machine has processors.
    `elastic`: True, or a dict with the keys of a job file's `elastic`: workers may die, hang, join or be drained.
    `run_config`, `checkpoint_config`: Ray Train's, for name, storage path, number of checkpoints kept and their frequency.
    `start_local_nodes`: of the Ray that is started when there is no `address`.
    `run_dir`: where the run folder is made; in a submitted job of Ray's, where it is not absolute, below `~/raypar`.
    `init`, `deferred_init`, `init_from`: as in a job file; where initial values come from.
    `resume_from_checkpoint`: a result's `checkpoint`, or the path of a checkpoint or of a run, whose last one is taken.
    Training goes on after its steps, in a run folder of its own, under the plan given here.
    """

    def __init__(
        self,
        *,
        model: Any,
        loss: Any,
        data: Any,
        data_input: str | None = None,
        data_target: str | None = None,
        data_names: Sequence[str] = (),
        data_processes: int = 0,
        optimizer: Any = "torch.optim:AdamW",
        steps: int,
        batch_size: int,
        microbatches: int,
        name: str | None = None,
        seed: int = 0,
        virtual_replicas: int = 0,
        lr_schedule: Any = None,
        clip_norm: float | None = None,
        validation: Any = None,
        validate_every: int = 0,
        validation_samples: int = 0,
        plan: str | Mapping[str, Any] | ParallelPlan = "auto",
        schedule: str | None = None,
        workers: int | None = None,
        elastic: bool | Mapping[str, Any] | ElasticConfig | None = None,
        callbacks: Sequence[Any] = (),
        checkpoint_every: int = 0,
        keep: int = 2,
        run_dir: str | os.PathLike[str] = "runs",
        run_config: Any = None,
        checkpoint_config: Any = None,
        address: str | None = None,
        local_nodes: int = 1,
        stop_at_step: int | None = None,
        max_time_s: float | None = None,
        wait_for_workers_s: float = 300.0,
        resume_from_checkpoint: Any = None,
        **rest: Any,
    ) -> None:
        from raypar.commands._submitted import lasting
        from raypar.config import PlanConfig, check_arguments, parse_elastic, parse_init_from

        if schedule is not None and isinstance(plan, str) and plan == "auto":
            raise ConfigError(
                f'schedule is {schedule!r}, but with plan="auto" the planner chooses the schedule too',
                cure=f'leave schedule out, or give the plan: plan={{"stages": ..., "schedule": {schedule!r}}}',
            )
        if schedule is not None and isinstance(plan, Mapping) and plan.get("schedule", schedule) != schedule:
            raise ConfigError(
                f"schedule is {schedule!r}, and the plan's is {plan['schedule']!r}",
                cure="give one of them, in plan or beside it",
            )
        known = {f.name for f in fields(JobSpec)}
        whole_plan = isinstance(plan, ParallelPlan)  # which says nothing of styles
        for key in rest:
            if key not in known or (key in PlanConfig.model_fields and not whole_plan):
                near = get_close_matches(key, [*inspect.signature(Trainer).parameters, *known], n=1, cutoff=0.6)
                cure = f"did you mean {near[0]!r}?" if near else "see help(raypar.Trainer)"
                if key in PlanConfig.model_fields:
                    cure = f"it is part of the plan: plan={{{key!r}: ...}}"
                raise ConfigError(f"Trainer has no argument {key!r}", cure=cure)
        if run_config is not None:
            name = name or run_config.name  # in this order: Ray Train's RunConfig makes up a name if it is given none
            run_dir = run_config.storage_path or run_dir
            checkpoint_config = checkpoint_config or run_config.checkpoint_config
            check_is_used(run_config, "run_config")
        if checkpoint_config is not None:
            check_is_used(checkpoint_config, "checkpoint_config")
            keep = checkpoint_config.num_to_keep or keep
            frequency = getattr(checkpoint_config, "checkpoint_frequency", None)
            checkpoint_every = frequency if isinstance(frequency, int) and frequency else checkpoint_every
        check_arguments(
            {
                "name": name or "run",
                "seed": seed,
                "steps": steps,
                "batch_size": batch_size,
                "microbatches": microbatches,
                "virtual_replicas": virtual_replicas,
                "clip_norm": clip_norm,
                "data_input": data_input,
                "data_target": data_target,
                "data_names": data_names,
                "data_processes": data_processes,
                "validate_every": validate_every,
                "validation_samples": validation_samples,
                "checkpoint_every": checkpoint_every,
                "keep": keep,
                "run_dir": os.fspath(run_dir) if isinstance(run_dir, os.PathLike) else run_dir,
                "workers": workers,
                "address": address,
                "local_nodes": local_nodes,
                "stop_at_step": stop_at_step,
                "max_time_s": max_time_s,
                "wait_for_workers_s": wait_for_workers_s,
                **rest,
            }
        )
        if validation is None and (validate_every or validation_samples):
            raise ConfigError(
                "validate_every or validation_samples is given, but validation is not",
                cure="give validation=, a data set, or leave them out",
            )
        rest["init_from"] = parse_init_from(rest.get("init_from"))
        reading = {"names": tuple(data_names), "input": data_input, "target": data_target, "processes": data_processes}
        self.spec = JobSpec(
            name=name or "run",
            seed=seed,
            steps=steps,
            batch_size=batch_size,
            microbatches=microbatches,
            virtual_replicas=virtual_replicas,
            model=as_model(model),
            loss=as_loss(loss),
            data=as_data(data, "data", reading),
            optimizer=OptimizerSpec(as_ref(optimizer, "optimizer")),
            lr_schedule=as_ref(lr_schedule, "lr_schedule") if lr_schedule is not None else None,
            clip_norm=clip_norm,
            validation=ValidationSpec(as_data(validation, "validation", reading), validate_every, validation_samples)
            if validation is not None
            else None,
            **rest,
        )
        self.plan, self.schedule, self.workers = plan, schedule or "1f1b", workers
        self.elastic = parse_elastic(elastic)
        self.callbacks = checked_callbacks(callbacks)
        self.address, self.local_nodes, self.run_dir = address, local_nodes, lasting(run_dir)
        self.save_every, self.keep, self.stop_at_step = checkpoint_every, keep, stop_at_step
        self.max_time_s, self.wait_for_workers_s = max_time_s, wait_for_workers_s
        self.resume_from_checkpoint = resume_from_checkpoint

    def fit(self, *, verbose: bool = True) -> Result:
        """Train to the end. Raises what a failed run failed with, and `RayparError` when nothing could be started."""
        from raypar.console.terminal import Console

        make_importable(Path.cwd())
        tell: Tell = Console(steps=self.spec.steps) if verbose else lambda event: None
        options = Options(
            folder=self._folder,
            save_every=self.save_every,
            keep=self.keep,
            stop_at_step=self.stop_at_step,
            max_time_s=self.max_time_s,
            callbacks=self.callbacks,
            address=self.address,
            local_nodes=self.local_nodes,
            wait_for_workers_s=self.wait_for_workers_s,
            elastic=self.elastic,
        )
        plan, schedule, orders = self._plan()
        spec = self._with_styles()
        workers = self.workers or os.cpu_count() or 1

        def planned(checked: PreflightResult) -> Planned:
            fixed = plan(len(checked.graph.layers)) if plan is not None else None
            if fixed is not None and self.workers is not None and fixed.world > self.workers:
                raise ConfigError(
                    f"the plan has {fixed.world} workers = {fixed.describe()}, but workers is {self.workers}",
                    cure='give a smaller plan, plan="auto", or leave workers out',
                )
            return choose(spec, checked, plan, schedule, workers, orders)

        chosen: Callable[[PreflightResult], Planned] = planned
        if self.resume_from_checkpoint is not None:
            path = checkpoint_at(self.resume_from_checkpoint, tell)
            options, chosen = resumed(options, path, spec, chosen, tell)
        result = launch(spec, chosen, options, tell)
        raise_failure(result)
        return result

    def _plan(self) -> tuple[Callable[[int], ParallelPlan] | None, str, Callable[[Routing], Schedule] | None]:
        """A function of the number of layers (None: the planner's choice), the schedule's name, and what makes it."""
        given = self.plan
        if isinstance(given, ParallelPlan):
            return lambda layers: given, self.schedule, None
        if isinstance(given, str):
            if given != "auto":
                raise ConfigError(f"plan is {given!r}", cure='give "auto", a dict such as {"stages": 2}, or a ParallelPlan')
            return None, self.schedule, None
        from raypar.config import parse_plan

        config = parse_plan({"schedule": self.schedule, **given})
        return config.to_plan, config.schedule_file or config.schedule, orders_of(config)

    def _with_styles(self) -> JobSpec:
        """The job, cut over shards as the plan's dict says."""
        from raypar.config import parse_plan

        if not isinstance(self.plan, Mapping):
            return self.spec
        config = parse_plan({"schedule": self.schedule, **self.plan})
        return replace(self.spec, styles=tuple(config.styles.items()), sequence_parallel=config.sequence_parallel)

    def _folder(self, planned: Planned) -> RunFolder:
        folder = RunFolder.create(self.run_dir, self.spec.name)
        with folder.unless_it_fails():
            folder.plan.write_text(plan_json(planned))
        return folder


def checkpoint_at(given: Any, tell: Tell) -> Path:
    """The whole checkpoint meant by a Ray Train checkpoint, or by the path of a checkpoint or run. Raises `CheckpointError`."""
    from raypar.worker.checkpoint import MANIFEST, verify_checkpoint

    elsewhere = getattr(given, "filesystem", None)
    if elsewhere is not None and elsewhere.type_name != "local":
        raise ConfigError(
            f"resume_from_checkpoint lies on a file system of its own ({elsewhere.type_name}), and raypar reads folders only",
            cure="copy it here first: resume_from_checkpoint=checkpoint.to_directory()",
        )
    given = getattr(given, "path", given)
    if not given or not isinstance(given, (str, os.PathLike)):
        raise ConfigError(
            f"resume_from_checkpoint is {given!r}", cure="give a result's checkpoint, or the path of a checkpoint or of a run"
        )
    path = local_path(given, "resume_from_checkpoint")
    with explain_read_errors(path):
        is_run, is_checkpoint = (path / "checkpoints").is_dir(), (path / MANIFEST).is_file()
    if is_run:
        return last_checkpoint(RunFolder(path), tell)
    if not is_checkpoint:
        raise CheckpointError(f"{path} is neither a checkpoint nor a run", cure="give a folder runs/NAME/checkpoints/step_...")
    return verify_checkpoint(path).path


def as_model(value: Any) -> Ref:
    """The model function as `Trainer` takes it, or a small model that is built already, which is taken with its values.

    Raises `ConfigError` for a larger one: every worker would get all of it, through Ray's store.
    """
    if not hasattr(value, "named_parameters") or isinstance(value, type):
        return as_ref(value, "model")
    nbytes = sum(t.numel() * t.element_size() for t in (*value.parameters(), *value.buffers()))
    if nbytes > BUILT_BYTES:
        raise ConfigError(
            f"model is a {type(value).__name__} that is built already, with {nbytes / 2**20:.0f} MiB of values; up to "
            f"{BUILT_BYTES >> 20} MiB are sent to workers",
            cure="give a function that builds it (model=lambda: nn.Sequential(...)), and init_from=FILE for its values",
        )
    return Ref(Given(copy.deepcopy(value)))


def as_ref(value: Any, what: str) -> Ref:
    """A function as `Trainer` takes it."""
    if isinstance(value, Ref):
        return value
    args: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, args = value
    if what != "loss" and hasattr(value, "named_parameters") and not isinstance(value, type):
        raise ConfigError(
            f"{what} is a {type(value).__name__} that is built already",
            cure=f"give a function that builds it ({what}=lambda: nn.Sequential(...)): every worker makes only its own stage",
        )
    if isinstance(value, str) or callable(value):
        if isinstance(value, functools.partial) and (unstable := without_stable_text(value)) is not None:
            raise ConfigError(
                f"{what} is a functools.partial with the argument {unstable}, which is another text in another process, so "
                "the run could not be resumed",
                cure=f"give a function that makes that argument itself, or the class of it a __repr__ that says what it holds: "
                f"{what}=a function, or (function, {{...}})",
            )
        return Ref(value, args)
    cure = 'give "module:name", a function, or a pair (function, keyword arguments)'
    if what == "optimizer" and hasattr(value, "param_groups"):
        name = type(value).__name__
        cure = f"give its class, which every worker calls with the parameters that it holds: optimizer=({name}, {{'lr': ...}})"
    elif hasattr(value, "dataset") and hasattr(value, "batch_sampler"):
        cure = f"give the data set in it ({what}=loader.dataset): raypar makes the batches, of batch_size= samples each"
    raise ConfigError(f"{what} is a {type(value).__name__}", cure=cure)


def as_loss(value: Any) -> Ref:
    """A loss as `Trainer` takes it: a function, a loss module, or the class of one. Raises `ConfigError` for a module that
    would have to be trained."""
    from raypar.worker.loss import loss_function

    ref = as_ref(value, "loss")
    if callable(ref.target):  # "module:name" is imported by `preflight`, from the folder that the job is started in
        loss_function(ref)
    return ref


def as_data(value: Any, what: str, reading: Mapping[str, Any]) -> DataSpec:
    """A data set as `Trainer` takes it: a factory, or the data set itself. `reading`: the other fields of its `DataSpec`."""
    if isinstance(value, DataSpec):
        if any(reading.values()):
            raise ConfigError(
                f"{what} is a DataSpec, and data_input, data_target, data_names or data_processes is given beside it",
                cure="give them to the DataSpec, or give the data set itself",
            )
        return value
    if isinstance(value, Mapping):
        raise ConfigError(
            f"{what} is a {type(value).__name__} with keys {', '.join(map(str, list(value)[:4]))}, not a data set",
            cure='give one data set (of several splits, one); or "module:name", or a pair (function, keyword arguments)',
        )
    if not callable(value) and hasattr(value, "__getitem__") and not isinstance(value, (str, tuple)):
        return DataSpec(Ref(Given(value)), **reading)
    return DataSpec(as_ref(value, what), **reading)


@dataclass(frozen=True)
class Given:
    """A factory that returns what it was given; pickled to the workers with it."""

    value: Any

    def __call__(self) -> Any:
        return self.value
