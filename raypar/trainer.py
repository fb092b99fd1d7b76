"""`Trainer(...).fit()`: trains a job that is given as Python objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from raypar.errors import ConfigError
from raypar.files.json_type import Json
from raypar.files.printable_text import repr_text
from raypar.files.redact_secrets import secrets_of_environment
from raypar.job import (
    AverageConfig,
    CheckpointConfig,
    EarlyStoppingConfig,
    ElasticConfig,
    InitFromConfig,
    Job,
    PlacementConfig,
    PlanConfig,
    PrecisionConfig,
    TrackerConfig,
)
from raypar.job.read_job import check_run_arguments, load_job
from raypar.launch.launch_options import EventHandler
from raypar.launch.result import CheckpointArgument, Result
from raypar.launch.resume import find_checkpoint
from raypar.launch.run_failure import raise_run_failure
from raypar.launch.run_of_submitted_job import choose_lasting_run_dir
from raypar.launch.signature_in_help import with_brief_signature
from raypar.launch.start_new_run import train_job_in_new_folder
from raypar.launch.trainer_arguments import (
    Arguments,
    FunctionArgument,
    MetricObject,
    SampleSource,
    check_plan_fits_workers,
    defaults_to_auto_plan,
    job_from_trainer_arguments,
    with_checked_argument_names,
)
from raypar.plan import ParallelPlan
from raypar.user_code.stop_signals_outside_training import ends_script_if_unhandled, stopped_before_training
from raypar.user_code.traceback_filter import without_raypar_frames

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from raypar.callbacks import Callback
    from raypar.launch.forward_run import Cluster

DEFAULTS = {name: info.default for name, info in Job.model_fields.items()}
"""The defaults of a job's keys, which are those of `Trainer`'s arguments."""


class Trainer:
    """Trains a PyTorch model on Ray, over workers as `plan` says, with the results of one process, bit for bit:
        result = raypar.Trainer(model=Net, loss=torch.nn.functional.mse_loss, data=torch.utils.data.TensorDataset(x, y),
            optimizer=(torch.optim.AdamW, {"lr": 1e-3}), steps=100, batch_size=64, microbatches=8,
            plan={"stages": 2, "replicas": 2}).fit()  # four workers

    Arguments (reference: examples/guides/reference.md); a function: itself, "module:name" or (function, {arguments}).
    - what is trained: model, loss, data, optimizer, lr_schedule, clip_norm, init, init_from, deferred_init, seed
    - how it is computed: dtype, precision, virtual_shards, reduction, non_finite, device, threads, scaling_config
    - for how long: steps, epochs, batch_size, microbatches, virtual_replicas, max_time_s, early_stopping, stop_at_step
    - on which workers: plan, schedule, elastic, workers, placement, wait_for_workers_s, address, local_nodes
    - what is kept: name, run_dir, checkpoint, average, resume_from_checkpoint, run_config, checkpoint_config
    - what is watched: validation, metrics, metrics_every, callbacks, trackers, trace_every, price_per_worker_hour
    """

    @without_raypar_frames
    @with_checked_argument_names
    def __init__(
        self,
        *,
        # keys of a job: generated
        model: FunctionArgument,
        loss: FunctionArgument,
        data: FunctionArgument | SampleSource,
        batch_size: int,
        microbatches: int,
        optimizer: FunctionArgument = DEFAULTS["optimizer"],
        name: str = "run",
        seed: int = 0,
        steps: int | None = None,
        epochs: float | None = None,
        virtual_replicas: int = 0,
        virtual_shards: int = 0,
        lr_schedule: FunctionArgument | None = None,
        clip_norm: float | None = None,
        validation: FunctionArgument | SampleSource | None = None,
        metrics: Mapping[str, FunctionArgument | MetricObject] = {},
        metrics_every: int = 0,
        plan: Literal["auto"] | Arguments | PlanConfig | ParallelPlan = DEFAULTS["plan"],
        elastic: Arguments | ElasticConfig | bool | None = None,
        placement: Arguments | PlacementConfig = DEFAULTS["placement"],
        checkpoint: Arguments | CheckpointConfig = DEFAULTS["checkpoint"],
        average: Arguments | AverageConfig | None = None,
        run_dir: str | os.PathLike[str] = "runs/",
        reduction: Literal["canonical", "fast"] = "canonical",
        dtype: Literal["float32", "float64"] = "float32",
        precision: Arguments | PrecisionConfig | None = None,
        init: Literal["model", "by-name"] = "model",
        deferred_init: Literal["auto", "always", "never"] = "auto",
        init_from: str | os.PathLike[str] | Arguments | InitFromConfig | None = None,
        device: Literal["cpu", "gpu"] = "cpu",
        threads: int = 1,
        non_finite: Literal["stop", "skip"] = "stop",
        max_time_s: float | None = None,
        early_stopping: Arguments | EarlyStoppingConfig | None = None,
        callbacks: Sequence[Callback | FunctionArgument] = (),
        trackers: Sequence[Literal["tensorboard", "wandb", "mlflow"] | Arguments | TrackerConfig] = (),
        wait_for_workers_s: float = 300.0,
        trace_every: int = 0,
        price_per_worker_hour: float | None = None,
        workers: int | None = None,
        schedule: str | None = None,
        address: str | None = None,
        local_nodes: int = 1,
        stop_at_step: int | None = None,
        resume_from_checkpoint: Any = None,
        scaling_config: Any = None,
        run_config: Any = None,
        checkpoint_config: Any = None,
        # keys of a job: end
    ) -> None:
        given = dict(locals())  # the arguments by name: there is no other local yet
        self._set_attributes(*job_from_trainer_arguments({name: value for name, value in given.items() if name != "self"}))

    @classmethod
    @with_brief_signature
    @without_raypar_frames
    def from_yaml(
        cls,
        path: str | os.PathLike[str],
        overrides: Sequence[str] = (),
        *,
        workers: int | None = None,
        address: str | None = None,
        local_nodes: int = 1,
        stop_at_step: int | None = None,
        resume_from_checkpoint: CheckpointArgument | None = None,
    ) -> Self:
        """The trainer of a job file, after overrides such as `"plan.stages=4"`. Raises `ConfigError` or `PlanError`."""
        run_arguments = {
            "workers": workers,
            "address": address,
            "local_nodes": local_nodes,
            "stop_at_step": stop_at_step,
            "resume_from_checkpoint": resume_from_checkpoint,
        }
        check_run_arguments(run_arguments)
        job = load_job(path, overrides, defaults={"plan": "auto"} if defaults_to_auto_plan(workers) else None)
        check_plan_fits_workers(job, workers)
        trainer = cls.__new__(cls)
        trainer._set_attributes(job, run_arguments)
        return trainer

    if not TYPE_CHECKING:  # a type checker would take any attribute to be there

        def __getattr__(self, name: str) -> Any:
            # Only for attributes that there are not. A docstring would take a line of `help`.
            hint = "; fit() trains, and returns the result" if not name.startswith("_") else ""
            raise AttributeError(f"Trainer has no attribute {name!r}{hint}")

    def _set_attributes(self, job: Job, run_arguments: Mapping[str, Any]) -> None:
        """`run_arguments`: by name, with those that are attributes here. Raises `ConfigError` for a `run_dir` URI."""
        choose_lasting_run_dir(job.run_dir)
        self.job: Job = job
        """The job, checked."""
        self.workers: int | None = run_arguments["workers"]
        """The most workers to use; None: one per processor of this machine."""
        self.address: str | None = run_arguments["address"]
        """The Ray cluster to join."""
        self.local_nodes: int = run_arguments["local_nodes"]
        """Nodes of the local Ray cluster that is started without an `address`."""
        self.stop_at_step: int | None = run_arguments["stop_at_step"]
        """Number of steps after which the run saves and stops."""
        self.resume_from_checkpoint: CheckpointArgument | None = run_arguments["resume_from_checkpoint"]
        """The checkpoint to resume from, as given; None: a new run."""

    @without_raypar_frames
    def to_yaml(self) -> str:
        """The text of a job file with this job. Raises `ConfigError` that names what no text can stand for."""
        return self.job.to_yaml()

    @without_raypar_frames
    @ends_script_if_unhandled
    @stopped_before_training()
    def fit(self, *, verbose: bool | Literal["brief"] = True) -> Result:
        """Train to the end; raises what fails. Ctrl-C saves and raises `Interrupted`. `verbose`: True, False or "brief"."""
        from raypar.console.event_printer import BriefEventPrinter, EventPrinter
        from raypar.launch.run_name_of_tune_trial import check_run_dir_in_trial, current_trial_id, name_of_run_in_trial
        from raypar.launch.steps_of_epochs import length_in_words, with_steps_of_epochs
        from raypar.record.events import StartupStage

        if isinstance(verbose, str) and verbose != "brief":
            raise ConfigError(f"verbose={repr_text(verbose)}", cure='give True, False or "brief"')
        trial = current_trial_id()
        check_run_dir_in_trial(self.job.run_dir, trial)
        name, run_dir = name_of_run_in_trial(self.job.name, DEFAULTS["name"], trial), choose_lasting_run_dir(self.job.run_dir)
        console: EventPrinter | BriefEventPrinter | None = None
        if verbose == "brief":
            console = BriefEventPrinter(name, secrets_of_environment(os.environ))
        elif verbose:
            console = EventPrinter(steps=self.job.steps, metrics=self.job.metrics)
        tell: EventHandler = console or (lambda event: None)
        job = with_steps_of_epochs(self.job, tell)
        if isinstance(console, EventPrinter):
            console.steps = job.steps
        tell(StartupStage(stage="read", text=f"job {name}: {length_in_words(job)}"))
        result = train_job_in_new_folder(
            job.model_copy(update={"name": name, "run_dir": str(run_dir)}),
            tell,
            stop_at_step=self.stop_at_step,
            address=self.address,
            local_nodes=self.local_nodes,
            workers=self.workers,
            resume_from=self.resume_from_checkpoint,
        )
        raise_run_failure(result)
        if isinstance(console, EventPrinter):
            console.finish(result, in_program=True)
        elif console is not None:
            console.finish(result)
        return result

    @with_brief_signature
    @without_raypar_frames
    def evaluate(
        self,
        run: CheckpointArgument | None = None,
        *,
        data: SampleSource | None = None,
        samples: int | None = None,
        batch_size: int | None = None,
        verbose: bool = True,
    ) -> dict[str, Json]:
        """{"validation_loss": ..., "count": ...} of `run`, a name, path or checkpoint; `data`: as `validation`."""
        from raypar.launch.evaluate_run import evaluate_checkpoint
        from raypar.launch.trainer_arguments import validation_argument

        tell = self._printer(verbose)
        return evaluate_checkpoint(
            self.job,
            find_checkpoint(self.resume_from_checkpoint if run is None else run, tell, self.job.run_dir),
            validation_argument(data),
            tell,
            self._cluster,
            batch_size=batch_size,
            samples=samples,
        )

    @with_brief_signature
    @without_raypar_frames
    def predict(
        self,
        run: CheckpointArgument | None = None,
        *,
        data: SampleSource | None = None,
        function: FunctionArgument | None = None,
        out: str | os.PathLike[str] | Callable[[Mapping[str, Tensor]], object] | None = None,
        overwrite: bool = False,
        samples: int | None = None,
        batch_size: int | None = None,
        verbose: bool = True,
    ) -> dict[str, Tensor]:
        """Output -> rows, as `evaluate`. `function(output)`: what is kept; `out`: file (`overwrite` it?) or function."""
        from raypar.job.read_job import parse_function_argument
        from raypar.launch.predict_run import PredictionRequest, predict_with_checkpoint
        from raypar.launch.prediction_sinks import open_rows
        from raypar.launch.trainer_arguments import validation_argument

        tell = self._printer(verbose)
        checkpoint = find_checkpoint(self.resume_from_checkpoint if run is None else run, tell, self.job.run_dir)
        kept = None if function is None else parse_function_argument(function, "function")
        request, cluster = PredictionRequest(validation_argument(data), kept, batch_size, samples), self._cluster
        with open_rows(out, overwrite=overwrite) as rows:
            predict_with_checkpoint(self.job, checkpoint, request, rows, tell, cluster)
            return rows.columns_in_memory()

    @property
    def _cluster(self) -> Cluster:
        """Where workers are found."""
        from raypar.launch.forward_run import Cluster

        return Cluster(self.address, self.local_nodes, self.workers)

    def _printer(self, verbose: bool) -> EventHandler:
        """Prints the events of a run, or nothing."""
        from raypar.console.event_printer import EventPrinter

        return EventPrinter(steps=0) if verbose else lambda event: None
