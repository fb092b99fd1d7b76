"""The one way from a checked job to a finished run, for the command line and for `Trainer`."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import CheckpointError, ConfigError, InputError, Interrupted, RayparError, UserCodeError
from raypar.plan import ParallelPlan, Routing
from raypar.run_folder import RunFolder, explain_write_errors, has_content, replace_whole, write_whole
from raypar.user_code import USER_CODE_ERRORS, error_text, recording_ctrl_c, reraise_ctrl_c
from raypar.worker.job_spec import JobSpec

if TYPE_CHECKING:
    from raypar.config import ElasticConfig, Job, PlanConfig
    from raypar.planner.model_profile import ModelProfile
    from raypar.schedule.instructions import Schedule
    from raypar.schedule.timeline import Timeline
    from raypar.worker.preflight import PreflightResult

Tell = Callable[[dict[str, Any]], None]


MIRROR_COST = 0.02
"""Of the steps' time, when `elastic.mirror` is auto."""


GPU_COURSE = {"adopt_s": 90.0, "stand_s": 8.0, "abort_s": 8.0, "move_s": 10.0}
"""Seconds: a generation's communicators have to be made (`nccl_mesh.MAKING_S`), and the last one's aborted
(`nccl_transport.ABORT_S`). Nobody has measured how long that takes on a GPU."""


@dataclass(frozen=True)
class Planned:
    """A plan with its schedule, and why it was chosen (one or more lines, may be empty)."""

    plan: ParallelPlan
    schedule: str
    """Its name, for people; `orders` is what runs."""
    orders: Schedule
    predicted: Timeline
    profile: ModelProfile
    why: str = ""


@dataclass(frozen=True)
class Options:
    """Everything about a run that cannot change its bits.

    `folder`: makes or finds the run folder and writes job and plan into it; called when all input has been found good.
    `resume`: checkpoint folder to go on from, `first`: the steps it has done. Times in seconds.
    """

    folder: Callable[[Planned], RunFolder]
    resume: Path | None = None
    first: int = 0
    save_every: int = 0
    save_at_end: bool = True
    keep: int = 2
    trace_every: int = 0
    stop_at_step: int | None = None
    max_time_s: float | None = None
    callbacks: tuple[Any, ...] = ()
    address: str | None = None
    local_nodes: int = 1
    wait_for_workers_s: float = 300.0
    orphan_timeout_s: float = 60.0
    elastic: ElasticConfig | None = None


@dataclass
class Result:
    """What `fit` returns: the fields of `ray.train.Result`, and the history of the run.

    `metrics`: of the last step, with the last `validation_loss`; `path`: the run folder; `error`: why a run has failed.
    """

    metrics: dict[str, Any]
    path: str
    end: str
    done: int
    why: str = ""
    error: Exception | None = None
    checkpoint_path: str | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    weights_sha256: str | None = None
    sample: str | None = None
    picture_path: str | None = None

    @property
    def handle(self) -> str:
        """What `raypar resume` and `raypar export` find the run by from here: its name under runs/, else its path."""
        path = Path(self.path)
        return path.name if path.parent == Path("runs") else self.path

    @property
    def checkpoint(self) -> Any:
        """The last checkpoint as a `ray.train.Checkpoint`, or None."""
        if self.checkpoint_path is None:
            return None
        from ray.train import Checkpoint

        return Checkpoint.from_directory(self.checkpoint_path)

    @property
    def metrics_dataframe(self) -> Any:
        """The history as a pandas data frame, one row per step or validation."""
        import pandas

        return pandas.DataFrame(self.history)


def launch(spec: JobSpec, plan: Callable[[PreflightResult], Planned], options: Options, tell: Tell) -> Result:
    """Check, plan, connect, run, clean up. `tell` gets every event, first those of the start-up in numbered order.

    Returns a `Result` also for interrupted and failed runs; raises `RayparError` when nothing was started.
    """

    def say(stage: str, text: str) -> None:
        tell({"kind": "stage", "stage": stage, "text": text})

    from raypar.planner.plan_report import fewer_shards
    from raypar.worker.preflight import preflight
    from raypar.worker.weights_initial import with_fingerprint

    with recording_ctrl_c():
        try:
            # A run that goes on has its values in the checkpoint; the file may be gone by now.
            spec = with_fingerprint(spec) if options.resume is None else replace(spec, init_from=None)
            checked = preflight(spec)
            say("checked", f"model and data checked: {len(checked.graph.layers)} layers, {checked.samples} samples")
            for line in checked.notes:
                tell({"kind": "warning", "text": line})
            planned = plan(checked)
            request = _request(spec, checked, planned, options)
        except UserCodeError as error:
            raise InputError(error.what, error.cure) from error  # nothing has been started: bad input, not a failed run
        except (SystemExit, KeyboardInterrupt) as error:
            reraise_ctrl_c(error)
            raise InputError(
                f"the job's code raised {error_text(error)}\n{traceback.format_exc()}",
                cure="the last lines of the traceback are where it did",
            ) from error
    gpus = int(spec.device == "gpu")
    notes = ["times are of this machine's processors, not of GPUs"] * gpus
    if options.elastic is not None:
        notes += fewer_shards(planned.plan, options.elastic.min_workers)
    say("planned", "\n".join([describe(planned), *notes]))
    from raypar.actors.cluster_info import cluster_capacity, require_capacity
    from raypar.actors.ray_connection import connect_ray

    most, elastic = planned.plan.world, options.elastic
    if elastic is not None:
        most = max(most, elastic.max_workers or 0) + elastic.standbys
    with connect_ray(options.address, most, Path.cwd(), options.local_nodes, bool(gpus)) as connection:
        require_capacity(planned.plan.world, cluster_capacity(), gpus, planned.plan.describe())
        folder = options.folder(planned)
        begun = options.resume is not None
        try:
            write_whole(folder.cluster, json.dumps(connection.facts, indent=1) + "\n")
            say("connected", f"{connection.text}\nthe run is called {folder.name}; its folder is {folder.path}")
            asked = request(folder, connection.host)
            if connection.kind == "joined":  # Ray gives every worker a processor of its own, on whichever machine
                asked = replace(asked, profile=replace(planned.profile, processors=None))

            def heard(event: dict[str, Any]) -> None:
                nonlocal begun
                begun = begun or event["kind"] in ("step", "checkpoint")
                tell(event)

            result = _follow(asked, folder, heard, say)
        finally:
            if not begun and not folder.metrics.exists():  # it may be missing because the disk is full
                shutil.rmtree(folder.path, ignore_errors=True)
    if result.end in ("done", "stopped") and result.checkpoint_path is not None:
        from raypar.worker.checkpoint import checkpoint_weights_hash

        result.weights_sha256 = checkpoint_weights_hash(Path(result.checkpoint_path))
        with recording_ctrl_c():
            result.sample = sample_of(spec, Path(result.checkpoint_path))
    return result


def sample_of(spec: JobSpec, checkpoint: Path) -> str | None:
    """What the trained model generates, where its module has a `generate(model, ...)` beside the model's function.

    `generate` gets those of `model.args` that it has parameters for. A failure in it is no failure of the run.
    """
    import inspect

    from torch import nn

    from raypar.worker.checkpoint import CheckpointTensors
    from raypar.worker.preflight import sibling_function

    generate = sibling_function(spec.model, "generate")
    if generate is None:
        return None
    try:
        model = spec.model.call()
        if not isinstance(model, nn.Module):
            return None
        model.load_state_dict(dict(CheckpointTensors(checkpoint)), strict=False)
        taken = inspect.signature(generate).parameters
        return str(generate(model, **{key: value for key, value in spec.model.args.items() if key in taken}))
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        return f"({spec.model.label} has a generate function beside it, but it raised {error_text(error)})"


def choose(
    spec: JobSpec,
    checked: PreflightResult,
    plan: Callable[[int], ParallelPlan] | None,
    schedule: str,
    workers: int,
    orders: Callable[[Routing], Schedule] | None = None,
) -> Planned:
    """The plan for so many layers and its predicted step; without `plan`, the planner's choice for `workers` and its table.

    `orders`: makes the schedule, where the name alone does not say it (a file, a warmup).
    """
    from raypar.planner.plan_report import plan_report
    from raypar.planner.plan_search import predict_step, search_plans
    from raypar.schedule import registry
    from raypar.worker.preflight import check_shards
    from raypar.worker.profiler import profile_job

    fixed = plan(len(checked.graph.layers)) if plan is not None else None
    if fixed is not None:
        check_shards(spec, checked, fixed)
    profile = profile_job(
        spec,
        workers=fixed.world if fixed is not None else workers,
        graph=checked.graph,
        shards={stage.shards for stage in fixed.stages} if fixed is not None else (),
    )
    if fixed is None:
        choice = search_plans(profile, workers, spec.cut)
        timeline, _ = predict_step(profile, choice.plan, choice.schedule, spec.cut)
        made = registry.build_schedule(choice.schedule, Routing(choice.plan, spec.cut))
        return Planned(choice.plan, choice.schedule, made, timeline, profile, plan_report(choice))
    routing = Routing(fixed, spec.cut)
    made = registry.build_schedule(schedule, routing) if orders is None else orders(routing)
    timeline, _ = predict_step(profile, fixed, made, spec.cut)
    return Planned(fixed, schedule, made, timeline, profile)


def _request(
    spec: JobSpec, checked: PreflightResult, planned: Planned, options: Options
) -> Callable[[RunFolder, str | None], Any]:
    """Everything for the driver but folder and host; lowering and its checks happen here, before anything starts."""
    from ray import cloudpickle

    from raypar.actors.run_request import RunRequest
    from raypar.callbacks import Callbacks
    from raypar.elastic.run_machine import RunPolicy
    from raypar.model.tensor_parallel.layout import outline_of_shards
    from raypar.planner.plan_search import possible_shards
    from raypar.worker.assignment import assignments
    from raypar.worker.checkpoint import contract_of
    from raypar.worker.preflight import check_fewer_shards

    if options.elastic is not None and options.elastic.min_workers > planned.plan.world:
        raise ConfigError(
            f"elastic.min_workers is {options.elastic.min_workers}, but the plan has {planned.plan.world} workers",
            cure=f"set it to {planned.plan.world} or less",
        )
    if options.elastic is not None and (options.elastic.max_workers or planned.plan.world) < planned.plan.world:
        raise ConfigError(
            f"elastic.max_workers is {options.elastic.max_workers}, but the plan has {planned.plan.world} workers",
            cure=f"set it to {planned.plan.world} or more, or leave it out",
        )
    shards = possible_shards(planned.plan)
    if options.elastic is not None:
        check_fewer_shards(spec, checked, planned.plan, shards)
    outline = outline_of_shards(checked.graph, shards, dict(spec.styles))
    lowered = assignments(spec, checked.graph, planned.plan, planned.orders, validation_samples=checked.validation_samples)
    policy = RunPolicy(
        workers=planned.plan.world,
        last=spec.steps,
        first=options.first,
        validates=spec.validation is not None,
        validate_every=spec.validation.every if spec.validation is not None else 0,
        save_every=options.save_every,
        save_at_end=options.save_at_end,
        stop_at=options.stop_at_step,
        **(elastic_course(options.elastic, options.wait_for_workers_s) if options.elastic is not None else {}),
        **(GPU_COURSE if spec.device == "gpu" else {}),
    )
    environment: dict[str, str] = {}
    if spec.device == "gpu":
        from raypar.comm.nccl.device import WORKER_ENVIRONMENT
        from raypar.worker.communicators import check_communicators
        from raypar.worker.gpu_process import ENVIRONMENT

        check_communicators(spec, checked.graph, planned.plan, lowered, elastic=options.elastic is not None)
        environment = {**WORKER_ENVIRONMENT, **ENVIRONMENT}

    def request(folder: RunFolder, host: str | None) -> RunRequest:
        return RunRequest(
            run=folder.name,
            folder=str(folder.path.resolve()),
            policy=policy,
            plan=planned.plan,
            schedule_name=planned.schedule,
            predicted=planned.predicted,
            crossing=lowered[0].crossing,
            cut=spec.cut,
            spec=cloudpickle.dumps(spec),
            assignments=tuple(cloudpickle.dumps(a) for a in lowered),
            callbacks=cloudpickle.dumps(Callbacks(options.callbacks)),
            contract=contract_of(spec),
            outline=outline,
            profile=planned.profile,
            validation_cut=lowered[0].validation_cut,
            resume=str(options.resume.resolve()) if options.resume is not None else None,
            keep=options.keep,
            host=host,
            trace=traced_steps(policy.first, policy.end, options.trace_every),
            max_time_s=options.max_time_s,
            wait_for_workers_s=options.wait_for_workers_s,
            orphan_timeout_s=options.orphan_timeout_s,
            gpus=int(spec.device == "gpu"),
            environment=environment,
        )

    return request


def elastic_course(elastic: ElasticConfig, wait_for_workers_s: float) -> dict[str, Any]:
    """What an elastic run does differently. Deadlines are short: a wrong suspicion costs a recovery, not the run."""
    return {
        "elastic": True,
        "hires": True,
        "min_workers": elastic.min_workers,
        "max_workers": elastic.max_workers,
        "standbys": elastic.standbys,
        "grow_after_s": elastic.grow_after_s,
        "step_deadline_s": elastic.step_deadline_s,
        "step_deadline_times": 5.0,
        "capacity_s": wait_for_workers_s,
        "last_copy_wait_s": elastic.last_copy_wait_s,
        "replace_stragglers": elastic.stragglers == "replace",
        "straggler_times": elastic.straggler_times,
        "mirror_every": elastic.mirror if isinstance(elastic.mirror, int) else 0,
        "mirror_cost": MIRROR_COST if elastic.mirror == "auto" else 0.0,
    }


def traced_steps(first: int, end: int, every: int) -> Collection[int]:
    """Steps whose spans are kept; the latest is drawn. Without `every` a few, early ones too, should the run end there."""
    if every:
        return range(first, end, every)
    return frozenset(s for s in (first, first + 4, first + 20, first + 100, end - 1) if first <= s < end)


def _follow(request: Any, folder: RunFolder, tell: Tell, say: Callable[[str, str], None]) -> Result:
    from raypar.actors.client import follow_run

    result = Result({}, str(folder.path), "failed", request.policy.first, checkpoint_path=request.resume)

    def listen(event: dict[str, Any]) -> None:
        facts = {key: value for key, value in event.items() if key not in ("kind", "time")}
        if event["kind"] in ("started", "built"):
            say(event["kind"], event["text"])
            return
        if event["kind"] == "step":
            result.metrics.update(facts)
            result.history.append(facts)
        elif event["kind"] == "validation":
            result.metrics["validation_loss"] = event["validation_loss"]
            result.history.append(facts)
        elif event["kind"] == "checkpoint":
            result.checkpoint_path = event["path"]
        elif event["kind"] == "picture":
            result.picture_path = event["path"]
        tell(event)

    end = follow_run(request, listen)
    result.end, result.done, result.why, result.error = end.end, end.done, end.why, end.error
    tell({"kind": "end", "end": end.end, "text": end.why, "done": end.done})
    return result


def describe(planned: Planned) -> str:
    """`4 workers = 2 stages x 2 replicas, schedule 1f1b; predicted step 85 ms, bubble 11 %`, and the reasons below."""
    plan = planned.plan
    bubble = 100 * planned.predicted.bubble_of_total
    text = (
        f"{plan.world} worker{'s' * (plan.world > 1)} = {plan.describe()}, schedule {planned.schedule}; "
        f"predicted step {planned.predicted.makespan_ms:.0f} ms, bubble {bubble:.0f} %"
    )
    return f"{text}\n{planned.why}" if planned.why else text


def run_job(
    job: Job, tell: Tell, *, stop_at_step: int | None = None, address: str | None = None, local_nodes: int = 1
) -> Result:
    """Train a job from a job file in a new run folder. `start_local_nodes`: of a Ray of our own."""
    make_importable(job.source_dir)
    spec = job.to_spec()
    with contextlib.ExitStack() as stack:

        def folder(planned: Planned) -> RunFolder:
            made = RunFolder.create(job.run_dir, job.name)
            with made.unless_it_fails():
                made.job.write_text(job.to_yaml())
                stack.enter_context(made.held())
                made.plan.write_text(plan_json(planned))
            return made

        return launch(spec, chooser(job, spec), options_of(job, folder, stop_at_step, address, local_nodes), tell)


def resume_job(
    job: Job,
    folder: RunFolder,
    tell: Tell,
    *,
    stop_at_step: int | None = None,
    address: str | None = None,
    local_nodes: int = 1,
) -> Result:
    """Go on from the last good checkpoint of a run, under the plan of `job`. Raises `CheckpointError`, and `ConfigError` or
    `ClusterError` when the run is under way."""
    make_importable(job.source_dir)
    spec = job.to_spec()

    def found(planned: Planned) -> RunFolder:
        from raypar.actors.client import refuse_active_run

        refuse_active_run(folder.name)  # its client may be gone, and its driver not
        kept = [line for line in folder.read(folder.metrics) if line["step"] <= options.first]
        text = "".join(json.dumps(line) + "\n" for line in kept).encode()
        if not has_content(folder.metrics, text):
            with explain_write_errors(folder.metrics):
                replace_whole(folder.metrics, text)
        write_whole(folder.plan, plan_json(planned))
        folder.rewrite_job(job.to_yaml())  # last: the next resumption goes by it
        return folder

    with folder.held():
        try:
            path = last_checkpoint(folder, tell)
        except CheckpointError:
            save_first(folder, address)
            raise
        for _ in folder.read(folder.metrics):  # what is wrong with them is said before anything is started
            pass
        options = options_of(job, found, stop_at_step, address, local_nodes)
        options, plan = resumed(options, path, spec, chooser(job, spec), tell)
        return launch(spec, plan, options, tell)


def save_first(folder: RunFolder, address: str | None) -> None:
    """A driver that has outlived its client saves at once, where it runs on the cluster that would be joined: raises
    `OutlivedError` then, because the run can be resumed now, and `ActiveError` when it has not saved."""
    from raypar.actors.client import refuse_active_run
    from raypar.actors.ray_connection import connect_ray, uses_existing_ray

    if uses_existing_ray(address):
        with connect_ray(address, 0, Path.cwd()):
            refuse_active_run(folder.name)


def last_checkpoint(folder: RunFolder, tell: Tell) -> Path:
    """The last one that is whole; says which had to be skipped. Raises `CheckpointError`."""
    from raypar.worker.checkpoint import latest_usable_checkpoint

    path, skipped = latest_usable_checkpoint(folder.checkpoints)
    for line in skipped:
        tell({"kind": "warning", "text": line})
    if path is None:
        raise CheckpointError(f"run {folder.name} has no usable checkpoint under {folder.checkpoints}", cure="train it again")
    return path


def resumed(
    options: Options, path: Path, spec: JobSpec, plan: Callable[[PreflightResult], Planned], tell: Tell
) -> tuple[Options, Callable[[PreflightResult], Planned]]:
    """A run that goes on from a checkpoint. Raises `CheckpointError` if it is another job's or nothing is left to do."""
    from raypar.worker.checkpoint import changes_of_shards, check_contract, check_model, load_manifest

    manifest = load_manifest(path)
    check_contract(manifest, spec)
    if manifest.steps_done >= min(spec.steps, options.stop_at_step or spec.steps):
        more = 2 * max(spec.steps, manifest.steps_done)
        raise CheckpointError(
            f"checkpoint {path}: {manifest.steps_done} of {spec.steps} steps already done",
            cure=f"raise steps (--set steps={more}) or the step to stop at (--stop-at-step)",
        )

    def checked_plan(checked: PreflightResult) -> Planned:
        from raypar.model.build import parameter_shapes

        check_model(manifest, parameter_shapes(checked.graph))
        return plan(checked)

    text = f"from {path.name}: {manifest.steps_done} steps are done"
    if changed := changes_of_shards(manifest, spec):
        text += f"; with another {' and '.join(changed)}, on which the bits depend where the plan has shards"
    tell({"kind": "resuming", "text": text, "step": manifest.steps_done})
    return replace(options, resume=path, first=manifest.steps_done), checked_plan


def options_of(
    job: Job,
    folder: Callable[[Planned], RunFolder],
    stop_at_step: int | None,
    address: str | None,
    local_nodes: int = 1,
) -> Options:
    """What a job file says about its run. Raises `ConfigError` for callbacks and local nodes that cannot be."""
    from raypar.actors.ray_connection import check_local_nodes
    from raypar.callbacks import callbacks_from_job

    check_local_nodes(address, local_nodes)

    if stop_at_step is not None and stop_at_step < 1:
        raise ConfigError(f"--stop-at-step {stop_at_step}", cure="give 1 step or more")
    return Options(
        folder=folder,
        save_every=job.checkpoint.every,
        save_at_end=job.checkpoint.at_end,
        keep=job.checkpoint.keep,
        trace_every=job.trace_every,
        callbacks=callbacks_from_job(job),
        stop_at_step=stop_at_step,
        max_time_s=job.max_time_s,
        address=address,
        local_nodes=local_nodes,
        wait_for_workers_s=job.wait_for_workers_s,
        elastic=job.elastic,
    )


def chooser(job: Job, spec: JobSpec) -> Callable[[PreflightResult], Planned]:
    """The plan a job file asks for."""
    from raypar.config import PlanConfig

    config = job.plan
    if not isinstance(config, PlanConfig):
        return lambda checked: choose(spec, checked, None, "", job.workers)
    name, orders = config.schedule_file or config.schedule, orders_of(config)
    return lambda checked: choose(spec, checked, config.to_plan, name, job.workers, orders)


def orders_of(config: PlanConfig) -> Callable[[Routing], Schedule]:
    """The schedule that a plan section asks for: a file, or a name with an optional warmup. The file is read at once."""
    from raypar.input_files import SCHEDULE_BYTES, read_text
    from raypar.schedule import registry
    from raypar.schedule.schedule_csv import read_csv

    if config.schedule_file is not None:
        cure = "name a schedule file; `raypar simulate --csv F` writes one"
        schedule = read_csv(read_text(Path(config.schedule_file), follow=True, limit=SCHEDULE_BYTES, cure=cure))
        return lambda routing: schedule
    return lambda routing: registry.build_schedule(config.schedule, routing, warmup=config.warmup)


def make_importable(folder: Path) -> None:
    """Functions of a job file are imported from the folder it was started in; workers inherit this path."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def plan_json(planned: Planned) -> str:
    """The plan for the run folder."""
    facts: dict[str, Any] = {
        "schedule": planned.schedule,
        "stages": [asdict(stage) for stage in planned.plan.stages],
        "workers": [planned.plan.coordinate(rank) for rank in range(planned.plan.world)],
    }
    facts |= {"predicted_ms": planned.predicted.makespan_ms, "predicted_bubble": planned.predicted.bubble_of_total}
    return json.dumps(facts, indent=1) + "\n"


def raise_failure(result: Result) -> None:
    """Raise what a failed run failed with, or `Interrupted`."""
    if result.end == "failed":
        if isinstance(result.error, RayparError):
            result.error.exit_code = RayparError.exit_code  # the run had begun: failed, even where the input was bad
            raise result.error
        raise RayparError(f"the run failed after {result.done} steps: {result.why}") from result.error
    if result.end == "deposed":
        raise RayparError(f"this driver gave way to another after {result.done} steps: {result.why}", cure="follow that one")
    if result.end == "interrupted":
        at = f"the checkpoint {result.checkpoint_path} can be resumed" if result.checkpoint_path else "there is no checkpoint"
        cure = f"raypar resume {result.handle}" if result.checkpoint_path else ""
        raise Interrupted(f"stopped after {result.done} steps ({result.why}): {at}", cure=cure)
