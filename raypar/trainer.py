"""`Trainer(...).fit()`: a job as Python objects."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.callbacks import checked as checked_callback
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
from raypar.run_folder import RunFolder
from raypar.worker.spec import DataSpec, JobSpec, OptimizerSpec, Ref, ValidationSpec

if TYPE_CHECKING:
    from raypar.config import ElasticConfig
    from raypar.schedule.instructions import Schedule
    from raypar.worker.preflight import Checked


class Trainer:
    """Trains a model on Ray, in stages, replicas and shards; of the plan, only shards and their styles change the bits.

    Functions are given as `"module:name"`, as the callable itself, or as a pair (either of those, dict of keyword arguments):

    - `model()`: an `nn.Sequential`, a list of blocks or a `Graph`; called under the meta device;
    - `loss(output, target)`: a scalar, or (sum, count);
    - `data()`: a map-style data set, or the data set itself; `validation` likewise;
    - `optimizer`: a class of `torch.optim`; `lr_schedule(step)`: factor on its learning rates.

    `plan`: "auto", a dict with the keys of a job file's `plan`, or a `ParallelPlan` (then `schedule` is used).
    `workers`: so many at most; with "auto" as many are used as help, by default as many as this machine has processors.
    `elastic`: True, or a dict with the keys of a job file's `elastic`: workers may die, hang, join or be drained.
    `run_config`, `checkpoint_config`: Ray Train's, for name, storage path, number of checkpoints kept and their frequency.
    `local_nodes`: of the Ray that is started when there is no `address`.
    `run_dir`: where the run folder is made; in a submitted job of Ray's, where it is not absolute, below `~/raypar`.
    `resume_from_checkpoint`: a result's `checkpoint`, or the path of a checkpoint or of a run, whose last one is taken.
    Training goes on after its steps, in a run folder of its own, under the plan given here.
    """

    def __init__(
        self,
        *,
        model: Any,
        loss: Any,
        data: Any,
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
        schedule: str = "1f1b",
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
        from raypar.config import PlanConfig, parse_elastic

        known = {f.name for f in fields(JobSpec)}
        for key in rest:
            if key not in known:
                near = get_close_matches(key, [*inspect.signature(Trainer).parameters, *known], n=1, cutoff=0.6)
                cure = f"did you mean {near[0]!r}?" if near else "see help(raypar.Trainer)"
                if key in PlanConfig.model_fields:
                    cure = f"it is part of the plan: plan={{{key!r}: ...}}"
                raise ConfigError(f"Trainer has no argument {key!r}", cure=cure)
        if run_config is not None:
            name = run_config.name or name
            run_dir = run_config.storage_path or run_dir
            checkpoint_config = checkpoint_config or run_config.checkpoint_config
        if checkpoint_config is not None:
            keep = checkpoint_config.num_to_keep or keep
            checkpoint_every = getattr(checkpoint_config, "checkpoint_frequency", None) or checkpoint_every
        self.spec = JobSpec(
            name=name or "run",
            seed=seed,
            steps=steps,
            batch_size=batch_size,
            microbatches=microbatches,
            virtual_replicas=virtual_replicas,
            model=as_ref(model, "model"),
            loss=as_ref(loss, "loss"),
            data=as_data(data, "data"),
            optimizer=OptimizerSpec(as_ref(optimizer, "optimizer")),
            lr_schedule=as_ref(lr_schedule, "lr_schedule") if lr_schedule is not None else None,
            clip_norm=clip_norm,
            validation=ValidationSpec(as_data(validation, "validation"), validate_every, validation_samples)
            if validation is not None
            else None,
            **rest,
        )
        self.plan, self.schedule, self.workers = plan, schedule, workers
        self.elastic = parse_elastic(elastic)
        self.callbacks = tuple(checked_callback(c, type(c).__name__) for c in callbacks)
        self.address, self.local_nodes, self.run_dir = address, local_nodes, lasting(run_dir)
        self.save_every, self.keep, self.stop_at_step = checkpoint_every, keep, stop_at_step
        self.max_time_s, self.wait_for_workers_s = max_time_s, wait_for_workers_s
        self.resume_from_checkpoint = resume_from_checkpoint

    def fit(self, *, verbose: bool = True) -> Result:
        """Train to the end. Raises what a failed run failed with, and `RayparError` when nothing could be started."""
        from raypar.commands._console import Console

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

        def planned(checked: Checked) -> Planned:
            fixed = plan(len(checked.graph.layers)) if plan is not None else None
            if fixed is not None and self.workers is not None and fixed.world > self.workers:
                raise ConfigError(
                    f"the plan has {fixed.world} workers = {fixed.describe()}, but workers is {self.workers}",
                    cure='give a smaller plan, plan="auto", or leave workers out',
                )
            return choose(spec, checked, plan, schedule, workers, orders)

        chosen: Callable[[Checked], Planned] = planned
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
    from raypar.worker.checkpoint import MANIFEST, verify

    given = getattr(given, "path", given)
    if not given or not isinstance(given, (str, os.PathLike)):
        raise ConfigError(
            f"resume_from_checkpoint is {given!r}", cure="give a result's checkpoint, or the path of a checkpoint or of a run"
        )
    path = Path(given)
    if (path / "checkpoints").is_dir():
        return last_checkpoint(RunFolder(path), tell)
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"{path} is neither a checkpoint nor a run", cure="give a folder runs/NAME/checkpoints/step_...")
    return verify(path).path


def as_ref(value: Any, what: str) -> Ref:
    """A function as `Trainer` takes it."""
    if isinstance(value, Ref):
        return value
    if hasattr(value, "named_parameters"):
        raise ConfigError(
            f"{what} is a {type(value).__name__} that is built already",
            cure=f"give a function that builds it ({what}=lambda: nn.Sequential(...)): every worker makes only its own stage",
        )
    args: Mapping[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        value, args = value
    if isinstance(value, str) or callable(value):
        return Ref(value, args)
    raise ConfigError(
        f"{what} is a {type(value).__name__}", cure='give "module:name", a function, or a pair (function, keyword arguments)'
    )


def as_data(value: Any, what: str) -> DataSpec:
    """A data set as `Trainer` takes it: a factory, or the data set itself."""
    if isinstance(value, DataSpec):
        return value
    if isinstance(value, Mapping):
        raise ConfigError(
            f"{what} is a {type(value).__name__} with keys {', '.join(map(str, list(value)[:4]))}, not a data set",
            cure='give one data set (of several splits, one); or "module:name", or a pair (function, keyword arguments)',
        )
    if not callable(value) and hasattr(value, "__getitem__") and not isinstance(value, (str, tuple)):
        return DataSpec(Ref(Given(value)))
    return DataSpec(as_ref(value, what))


@dataclass(frozen=True)
class Given:
    """A factory that returns what it was given; pickled to the workers with it."""

    value: Any

    def __call__(self) -> Any:
        return self.value
