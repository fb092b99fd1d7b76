"""`Trainer(...).fit()`: trains a job that is given as Python objects."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.callbacks import check_callbacks
from raypar.errors import ConfigError
from raypar.launch.chosen_plan import ChosenPlan, PlanChooser, choose_plan, make_schedule_builder, plan_json
from raypar.launch.launch_run import launch_run
from raypar.launch.result import Result, raise_run_failure
from raypar.launch.result_neutral_options import EventHandler, ResultNeutralOptions
from raypar.launch.resume import find_checkpoint, prepare_resumed_run
from raypar.launch.submitted_job import choose_lasting_run_dir
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.run_folder import RunFolder
from raypar.user_code import make_importable
from raypar.worker.job_spec import JobSpec

if TYPE_CHECKING:
    from raypar.config import ElasticConfig
    from raypar.schedule.instructions import Schedule
    from raypar.worker.preflight import PreflightResult


class Trainer:
    """Trains a model on Ray, in stages, replicas and shards. Of the plan, only shards and their styles change the results.

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
    `plan`: "auto", a dict with the keys of a job file's `plan`, or a `ParallelPlan`. `schedule`: the schedule of a plan that
    is given, by default 1f1b.
    `workers`: the most workers to use, by default one per processor of this machine; with "auto" only as many as help.
    `elastic`: True, or a dict with the keys of a job file's `elastic`: workers may die, hang, join or be drained.
    `run_config`, `checkpoint_config`: Ray Train's, for name, storage path, number of checkpoints kept and their frequency.
    `local_nodes`: nodes of the local Ray cluster that is started when there is no `address`.
    `run_dir`: where the run folder is made; in a job of `ray job submit`, a relative one lies below `~/raypar`.
    `init`, `deferred_init`, `init_from`: as in a job file; where initial values come from.
    `resume_from_checkpoint`: a result's `checkpoint`, or the path of a checkpoint or of a run, whose last one is taken.
    Training continues after its steps, in a new run folder, under the plan given here.
    """

    spec: JobSpec
    """The job: everything that the results depend on."""
    plan: str | Mapping[str, Any] | ParallelPlan
    """As given: "auto", a dict, or a whole plan."""
    schedule: str
    """The schedule of a plan that is given without one."""
    workers: int | None
    """The most workers to use; None: one per processor of this machine."""
    elastic: ElasticConfig | None
    """How the run grows, shrinks and recovers; None: it does none of these."""
    callbacks: tuple[Any, ...]
    """The user's callbacks and trackers, checked."""
    address: str | None
    """The Ray cluster to join."""
    local_nodes: int
    """Nodes of the local Ray cluster that is started without an `address`."""
    run_dir: Path
    """Where the run folder is made."""
    save_every: int
    """Steps from one checkpoint to the next; 0: at the end only."""
    keep: int
    """How many checkpoints are kept."""
    stop_at_step: int | None
    """Number of steps after which the run saves and stops."""
    max_time_s: float | None
    """Time after which the run saves and stops."""
    wait_for_workers_s: float
    """How long the run waits for a cluster that has room for its workers."""
    resume_from_checkpoint: Any
    """The checkpoint to resume from, as given; None: a new run."""

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
        given = dict(locals())  # the arguments by name: there is no other local yet
        given = {key: value for key, value in given.items() if key not in ("self", "rest")} | rest
        from raypar import trainer_arguments
        from raypar.config import parse_elastic_section
        from raypar.ray_train_config import arguments_from_ray_train

        trainer_arguments.check_schedule_argument(schedule, plan)
        trainer_arguments.check_argument_names(rest, plan, inspect.signature(Trainer).parameters)
        given = arguments_from_ray_train(given)
        trainer_arguments.check_argument_values(given)
        self.spec = trainer_arguments.build_job_spec(given, rest)
        self.plan, self.schedule, self.workers = plan, schedule or "1f1b", workers
        self.elastic = parse_elastic_section(elastic)
        self.callbacks = check_callbacks(callbacks)
        self.address, self.local_nodes, self.run_dir = address, local_nodes, choose_lasting_run_dir(given["run_dir"])
        self.save_every, self.keep, self.stop_at_step = given["checkpoint_every"], given["keep"], stop_at_step
        self.max_time_s, self.wait_for_workers_s = max_time_s, wait_for_workers_s
        self.resume_from_checkpoint = resume_from_checkpoint

    def fit(self, *, verbose: bool = True) -> Result:
        """Train to the end. Raises the error of a failed run, and `RayparError` if nothing could be started."""
        from raypar.console.event_printer import EventPrinter

        make_importable(Path.cwd())
        tell: EventHandler = EventPrinter(steps=self.spec.steps) if verbose else lambda event: None
        options = ResultNeutralOptions(
            make_folder=self._create_folder,
            save_every=self.save_every,
            keep_checkpoints=self.keep,
            stop_at_step=self.stop_at_step,
            max_time_s=self.max_time_s,
            callbacks=self.callbacks,
            address=self.address,
            local_nodes=self.local_nodes,
            wait_for_workers_s=self.wait_for_workers_s,
            elastic=self.elastic,
        )
        plan, schedule, make_schedule = self._plan()
        spec = self._with_styles()
        workers = self.workers or os.cpu_count() or 1

        def check_and_choose(checked: PreflightResult) -> ChosenPlan:
            fixed = plan(len(checked.graph.layers)) if plan is not None else None
            if fixed is not None and self.workers is not None and fixed.world > self.workers:
                raise ConfigError(
                    f"the plan has {fixed.world} workers = {fixed.describe()}, but workers is {self.workers}",
                    cure='give a smaller plan, plan="auto", or leave workers out',
                )
            return choose_plan(spec, checked, plan, schedule, workers, make_schedule)

        choose: PlanChooser = check_and_choose
        if self.resume_from_checkpoint is not None:
            path = find_checkpoint(self.resume_from_checkpoint, tell)
            options, choose = prepare_resumed_run(path, options, spec, choose, tell)
        result = launch_run(spec, choose, options, tell)
        raise_run_failure(result)
        return result

    def _plan(self) -> tuple[Callable[[int], ParallelPlan] | None, str, Callable[[MicrobatchRouting], Schedule] | None]:
        """(maker of the plan from the number of layers, or None for the planner's choice; the schedule's name; its maker)."""
        given = self.plan
        if isinstance(given, ParallelPlan):
            return lambda layers: given, self.schedule, None
        if isinstance(given, str):
            if given != "auto":
                raise ConfigError(f"plan is {given!r}", cure='give "auto", a dict such as {"stages": 2}, or a ParallelPlan')
            return None, self.schedule, None
        from raypar.config import parse_plan_section

        config = parse_plan_section({"schedule": self.schedule, **given})
        return config.to_plan, config.schedule_file or config.schedule, make_schedule_builder(config)

    def _with_styles(self) -> JobSpec:
        """The job with the sharding styles of the plan's dict."""
        from raypar.config import parse_plan_section

        if not isinstance(self.plan, Mapping):
            return self.spec
        config = parse_plan_section({"schedule": self.schedule, **self.plan})
        return replace(self.spec, styles=tuple(config.styles.items()), sequence_parallel=config.sequence_parallel)

    def _create_folder(self, chosen: ChosenPlan) -> RunFolder:
        """A new run folder with plan.json."""
        folder = RunFolder.create(self.run_dir, self.spec.name)
        with folder.removed_if_filling_fails():
            folder.plan.write_text(plan_json(chosen))
        return folder
