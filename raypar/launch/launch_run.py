"""One run from its job to its result: check, plan, connect, follow the driver, clean up."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypar.errors import ClusterError, ConfigError, InputError, OutOfMemory, RayparError, UserCodeError, error_first_line
from raypar.files.atomic_write import write_text_atomically
from raypar.job import Job
from raypar.launch.activity_reporter import ActivityReporter
from raypar.launch.check_offload_folder import check_offload_folder, lines_about_new_folders, lines_about_offloading
from raypar.launch.choose_plan import ChosenPlan, PlanChooser, describe_chosen_plan, idle_replicas_text
from raypar.launch.launch_options import EventHandler, LaunchOptions
from raypar.launch.make_run_request import (
    contract_fields,
    make_run_request,
    with_contract_of,
    with_facts_of_data,
    with_frozen_values,
)
from raypar.launch.result import Result
from raypar.launch.run_of_submitted_job import is_submitted_job
from raypar.launch.unspoken_end_of_checks import spoken_for
from raypar.plan.wording import count_noun
from raypar.record.events import (
    EndOfRun,
    Event,
    RunStart,
    RunWarning,
    SavedCheckpoint,
    StagesBuilt,
    StartupStage,
    StepPicture,
    StepRecord,
    ValidationRecord,
    Wait,
)
from raypar.storage.checkpoint_store import storage_scheme
from raypar.storage.run_folder import RunFolder
from raypar.user_code.stop_signals import recording_ctrl_c, reraise_ctrl_c
from raypar.user_code.stop_signals_outside_training import after_the_run
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text

if TYPE_CHECKING:
    from raypar.actors.messages import RunRequest
    from raypar.actors.queue_of_waiting_runs import PlacementQueue
    from raypar.actors.ray_connection import RayConnection
    from raypar.callbacks import Callback
    from raypar.model.graph import Graph
    from raypar.worker.checkpoint.frozen_table import FrozenTable

MakeRequest = Callable[[RunFolder, "str | None"], "RunRequest"]
"""Makes the driver's request from the run folder and the address on which workers listen."""


def launch_run(choose: PlanChooser, options: LaunchOptions, tell: EventHandler) -> Result:
    """Run a job to its end; returns the result, also of a run that fails or is interrupted.

    Raises `RayparError` if nothing was started.

    `tell` gets every event. The first ones (kind `stage`) report the progress of the start-up; those of kind `waiting_for` say
    what is waited for while nothing else is told.
    """
    _refuse_limits_of_this_machine(options)
    reporter = ActivityReporter(tell)
    with reporter.reporting(), keep_callers_state():
        return _run(choose, options, reporter)


def _refuse_limits_of_this_machine(options: LaunchOptions) -> None:
    """Raise `ClusterError` where no local Ray cluster could run, before PyTorch is loaded: with a low `ulimit -v` that fails
    anywhere, without a word of the limit."""
    from raypar.doctor.checks import refuse_unfit_machine
    from raypar.doctor.gather import read_limits

    try:
        refuse_unfit_machine({"limits": read_limits()})
    except ClusterError:
        from raypar.actors.ray_connection import uses_existing_ray

        if not uses_existing_ray(options.address):
            raise


def _refuse_folder_of_mirror(options: LaunchOptions) -> None:
    """Raise `ConfigError` where all workers would be on this machine, and its folder for the mirror's copies takes none.
    Workers of a cluster that is there already look for themselves, as they start."""
    from raypar.actors.ray_connection import uses_existing_ray

    elastic = options.job.elastic
    if elastic is None or elastic.mirror_in is None or options.forward_passes or uses_existing_ray(options.address):
        return
    from raypar.worker.state.file_memory import check_folder_for_copies

    check_folder_for_copies(elastic.mirror_in)


@contextlib.contextmanager
def keep_callers_state() -> Iterator[None]:
    """Put back on exit what the checks before a run change of this process, which may be a user's notebook: PyTorch's settings
    (threads, default dtype, grad mode, ...) and the generators of random numbers."""
    from raypar.model.random_state import preserve_random_state
    from raypar.worker.process.torch_state_guard import preserve_torch_state

    with preserve_random_state(), preserve_torch_state():
        yield


def _run(choose: PlanChooser, options: LaunchOptions, tell: ActivityReporter) -> Result:
    """See `launch_run`."""
    job, chosen, make_request = _check_and_plan(choose, options, tell)
    _tell_stage(tell, "planned", "\n".join([describe_chosen_plan(chosen), *_plan_notes(job, chosen)]))
    if (idle := idle_replicas_text(chosen.plan, job.batching)) is not None:
        tell(RunWarning(text=idle))
    with contextlib.ExitStack() as after:
        result = _connect_and_follow(chosen, make_request, options, tell, after)
        if result.end in ("done", "stopped") and result.checkpoint_path is not None and not options.forward_passes:
            from raypar.worker.pretrained.frozen_values import weights_hash_of_checkpoint

            result.weights_sha256 = weights_hash_of_checkpoint(result.checkpoint_path)
            with recording_ctrl_c():
                result.sample = generate_text_with_checkpoint(job, result.checkpoint_path)
    return result


def make_callbacks(job: Job) -> tuple[Callback, ...]:
    """The callbacks of a job file; see `callbacks_from_job`."""
    from raypar.callbacks import callbacks_from_job

    if not job.callbacks:
        return callbacks_from_job(job)
    with spoken_for(f"the callbacks {', '.join(one.label for one in job.callbacks)}"):
        return callbacks_from_job(job)


def _check_and_plan(choose: PlanChooser, options: LaunchOptions, tell: EventHandler) -> tuple[Job, ChosenPlan, MakeRequest]:
    """The job with its weights file pinned, its plan, and a function that makes its request. First call of user code."""
    from raypar.worker.job_preflight import preflight
    from raypar.worker.pretrained.initial_values import with_weights_fingerprint

    made = lines_about_new_folders(options.job) if not options.forward_passes else ()
    _refuse_folder_of_mirror(options)
    _check_precision(options)
    with recording_ctrl_c(), spoken_for("the weights of init_from") as now_checking:
        try:
            # A resumed run has its values in the checkpoint; the file may be gone by now.
            job = options.job
            job = with_weights_fingerprint(job) if options.resume is None else job.replace(init_from=None)
            options = replace(options, job=job)
            contract = contract_fields(options)
            checked = preflight(job, now_checking)
            if checked.job is not job:  # what was found out of its data is part of what its checkpoints say
                job = checked.job
                options, contract = replace(options, job=job), with_contract_of(contract, job)
            layers, streams = count_noun(len(checked.graph.layers), "layer"), job.data.streams
            data = count_noun(checked.samples, "sample") if streams is None else count_noun(streams, "stream")
            _tell_stage(tell, "checked", f"model and data checked: {layers}, {data}")
            if options.forward_passes == 0 and (table := _frozen_table(options, checked.graph)) is not None:
                job = job.without_saving(table.tensors)
                options, contract = replace(options, job=job), with_frozen_values(contract, table.as_json())
            now_checking(f"how long the layers of {job.model.label} take, for the plan")
            chosen = choose(checked)  # if it raises, nothing but the error is worth reading
            if (any(chosen.plan.zero_levels) or job.leaves_zero_open) and checked.optimizer is not None:
                job = job.with_undivided(checked.optimizer.undivided)
                options = replace(options, job=job)
            _check_offloading(job, chosen, options)
            for line in (
                *(checked.notes if not options.forward_passes else ()),
                *chosen.warnings,
                *lines_about_offloading(job),
                *made,
            ):
                tell(RunWarning(text=line))
            contract = with_facts_of_data(contract, checked, options)
            return job, chosen, make_run_request(checked, chosen, options, contract)
        except UserCodeError as error:
            raise InputError(error.what, error.cure) from error  # nothing has been started: bad input, not a failed run
        except (SystemExit, KeyboardInterrupt) as error:
            reraise_ctrl_c(error)
            raise InputError(
                f"the job's code raised {error_text(error)}\n{traceback.format_exc()}",
                cure="the last lines of the traceback are where it did",
            ) from error


def _check_precision(options: LaunchOptions) -> None:
    """Raise `ClusterError` where workers' processors are this machine's, and do not have the job's precision."""
    from raypar.actors.ray_connection import uses_existing_ray
    from raypar.worker.backend import make_backend

    if options.job.device == "cpu" and not uses_existing_ray(options.address):
        make_backend("cpu").check_precision(options.job.precision)


def _check_offloading(job: Job, chosen: ChosenPlan, options: LaunchOptions) -> None:
    """See `check_offload_folder`; a cluster's workers check their own."""
    from raypar.actors.ray_connection import uses_existing_ray

    offloads = job.optimizer_in is not None or job.activations_folder is not None
    if offloads and not options.forward_passes and not uses_existing_ray(options.address):
        check_offload_folder(job, chosen.memory)


def _frozen_table(options: LaunchOptions, graph: Graph) -> FrozenTable | None:
    """The parameters that the run's checkpoints leave out; those of a run that is resumed leave out what they did before.

    Raises `ConfigError` for a new run that has none to leave out.
    """
    from raypar.worker.pretrained.frozen_values import make_frozen_table

    if options.job.checkpoint.only != "trained":
        return None
    if options.resume is not None:
        return options.frozen
    table = make_frozen_table(options.job, graph)
    if table is None:
        raise ConfigError(
            "checkpoint.only is trained, and the model has no frozen parameter that begins as init_from has it: checkpoints "
            "would hold all values",
            cure="leave checkpoint.only out; or freeze parameters in the model function, by requires_grad_(False)",
        )
    return table


def _plan_notes(job: Job, chosen: ChosenPlan) -> list[str]:
    """Notes about a plan that its description does not give."""
    from raypar.planner.plan_report import fewer_shards_warnings
    from raypar.worker.backend import make_backend

    notes = list(make_backend(job.device).plan_notes)
    if (precision := job.precision_in_words) is not None:
        notes.append(precision)
    if max(chosen.plan.virtual_shard_counts) > 1:
        notes.append("shards are tensor parallel: each layer's tensors are cut over them (this is not ZeRO or FSDP)")
    if job.elastic is not None:
        notes += [] if job.virtual_shards else fewer_shards_warnings(chosen.plan, job.elastic.min_workers)
    return notes


def _connect_and_follow(
    chosen: ChosenPlan,
    make_request: MakeRequest,
    options: LaunchOptions,
    tell: ActivityReporter,
    after: contextlib.ExitStack,
) -> Result:
    """Connect to Ray, make the run folder, and run. If the run ends before its first step the folder is removed.

    `after` is entered for what comes after the end of the run, leaving Ray included.
    """
    from raypar.actors.cluster_info import cluster_capacity, require_capacity, require_processor_for_ray_data
    from raypar.actors.control_store_watch import call_ray
    from raypar.actors.ray_connection import connect_ray
    from raypar.actors.ray_row_stream import reads_ray_data_as_stream
    from raypar.worker.backend import make_backend

    gpus = make_backend(options.job.device).gpus_per_worker
    with (
        contextlib.ExitStack() as until_disconnected,
        connect_ray(options.address, _most_workers(chosen, options), Path.cwd(), options.local_nodes, bool(gpus)) as connection,
    ):
        capacity = call_ray(cluster_capacity)
        least = _least_workers(chosen, options) if capacity.may_add_nodes else chosen.plan.world
        require_capacity(least, capacity, gpus, chosen.plan.describe())
        if reads_ray_data_as_stream(options.job):
            require_processor_for_ray_data(_most_workers(chosen, options), capacity)
        folder = options.make_folder(chosen)
        begun = options.resume is not None
        try:
            _record_connection(folder, connection, tell)
            request = make_request(folder, connection.host)
            if connection.kind == "joined":  # Ray gives every worker its own processor, on some machine
                request = replace(request, profile=replace(request.profile, processors=None))

            with contextlib.ExitStack() as stack:
                queue = None
                if connection.kind != "own":
                    # Until this process has disconnected: Ray may end it while it disconnects.
                    until_disconnected.enter_context(_notice_if_killed(folder.name, connection.address))
                    queue = stack.enter_context(_placement_turn(folder.name, chosen.plan.world, options, tell))

                documents = {} if folder.shared is not None else folder.read_documents_of_start()

                def tell_and_watch(event: Event) -> None:
                    nonlocal begun
                    begun = begun or isinstance(event, (StepRecord, SavedCheckpoint))
                    if queue is not None and (begun or (isinstance(event, StartupStage) and event.stage == "started")):
                        queue.leave()
                    tell(event)
                    if isinstance(event, SavedCheckpoint):
                        _put_documents_back(folder, documents, until_disconnected, tell)

                result = _follow_to_its_end(request, folder, tell_and_watch, tell.note_driver_answer, after)
                begun = begun or isinstance(result.error, OutOfMemory)  # its error.txt says what was in memory
                return result
        finally:
            if not begun and not folder.metrics.exists():  # on a full disk metrics.jsonl may be missing after steps
                shutil.rmtree(folder.path, ignore_errors=True)


def _follow_to_its_end(
    request: RunRequest,
    folder: RunFolder,
    tell: EventHandler,
    on_answer: Callable[[], None],
    after: contextlib.ExitStack,
) -> Result:
    """The result of `_follow`; then `after` is entered, also where the driver is lost: a signal ends what comes after a run."""
    try:
        result = _follow(request, folder, tell, on_answer)
    except RayparError as error:
        after.enter_context(after_the_run(f"it had failed ({error_first_line(error)})"))
        raise
    after.enter_context(after_the_run(describe_end(result)))
    return result


def _record_connection(folder: RunFolder, connection: RayConnection, tell: ActivityReporter) -> None:
    """Write what the run has connected to into its folder, and say it."""
    facts = {**connection.facts, "submitted": is_submitted_job()}
    write_text_atomically(folder.cluster, json.dumps(facts, indent=1) + "\n")
    text = f"{connection.text}\nthe run is called {folder.name}; its folder is {folder.place}"
    _tell_stage(tell, "connected", text, run=folder.name)


def _put_documents_back(
    folder: RunFolder, documents: Mapping[Path, bytes], held: contextlib.ExitStack, tell: EventHandler
) -> None:
    """Write the run's job, plan and cluster again where they are gone from its folder, and hold the folder's lock in `held`.

    Without them a run whose disk was replaced could be neither resumed nor exported, though its later checkpoints are there.
    """
    with contextlib.suppress(OSError, ConfigError):  # the next checkpoint tries again
        if not folder.put_back(documents):
            return
        names = ", ".join(path.name for path in documents)
        text = f"files of {folder.path} were removed: those of {names} that were gone are written again"
        tell(RunWarning(text=f"{text}\n  cure: leave the files of a run alone while it trains"))
        if folder.job in documents:
            held.enter_context(folder.hold_lock())


@contextlib.contextmanager
def _notice_if_killed(run: str, address: str) -> Iterator[None]:
    """While it lasts, a process of its own tells the user what to do if Ray ends this one."""
    from raypar.actors.control_store_watch import current_watch
    from raypar.actors.print_if_killed import killed_client_text, killed_while_silent_text, print_if_killed

    with print_if_killed(killed_client_text(run, address)) as notice:
        if (watch := current_watch()) is not None:
            watch.on_silence = lambda silent: notice.replace(killed_while_silent_text(run, address) if silent else None)
        yield


def _placement_turn(
    run: str, workers: int, options: LaunchOptions, tell: EventHandler
) -> contextlib.AbstractContextManager[PlacementQueue]:
    """The run's turn to be placed on a cluster that it shares with others; see `actors/queue_of_waiting_runs.py`."""
    from raypar.actors.queue_of_waiting_runs import placement_turn
    from raypar.launch.run_of_submitted_job import QUEUE_S, is_submitted_job

    wait_s = max(options.job.wait_for_workers_s, QUEUE_S if is_submitted_job() else 0)
    return placement_turn(run, workers, wait_s, lambda text: tell(Wait(text=text)))


def _least_workers(chosen: ChosenPlan, options: LaunchOptions) -> int:
    """With how many workers the run may begin where the others may come later."""
    from raypar.elastic.desired_capacity import least_workers_at_start

    elastic, virtual_shards = options.job.elastic, options.job.virtual_shards
    if elastic is None:
        return chosen.plan.world
    return least_workers_at_start(chosen.plan, elastic.min_workers, virtual_shards)


def _most_workers(chosen: ChosenPlan, options: LaunchOptions) -> int:
    """How many workers the run may have at once, standbys included; a local Ray cluster offers so many CPUs."""
    most, elastic = chosen.plan.world, options.job.elastic
    return most if elastic is None else max(most, elastic.max_workers or 0) + elastic.standbys


def _follow(request: RunRequest, folder: RunFolder, tell: EventHandler, on_answer: Callable[[], None]) -> Result:
    """Run the request to its end; returns the result, gathered from the events. `on_answer`: see `follow_run`."""
    from raypar.actors.driver_client import follow_run

    result = Result({}, folder.place, "failed", request.policy.steps_before_run, checkpoint_path=request.resume)

    def gather(event: Event) -> None:
        facts = {key: value for key, value in event.facts().items() if key not in ("kind", "time")}
        match event:
            case RunStart() | StagesBuilt():
                _tell_stage(tell, event.kind, event.text or "")
                return
            case StepRecord():
                result.metrics.update(facts)
                result.history.append(facts)
            case ValidationRecord():
                result.metrics.update(event.more, validation_loss=event.validation_loss)
                result.history.append(facts)
            case SavedCheckpoint():
                result.checkpoint_path = event.path
            case StepPicture():
                result.picture_path = event.path
        tell(event)

    end = follow_run(request, gather, on_answer)
    result.end, result.done, result.why, result.error = end.end, end.done, end.why, end.error
    if request.job.best_rules:
        result.best_checkpoint_path = _find_best_checkpoint(result, tell)
    tell(EndOfRun(end=end.end, text=end.why, done=end.done))
    return result


def _find_best_checkpoint(result: Result, tell: EventHandler) -> str | None:
    """Where the best checkpoint of a run is; None if there is none, which is told."""
    from raypar.storage.checkpoint_store import CheckpointRef, open_checkpoint_store
    from raypar.storage.find_best_checkpoint import find_best_step
    from raypar.worker.checkpoint.checkpoint_files import checkpoint_name

    try:
        place = result.path if storage_scheme(result.path) else os.path.abspath(result.path)
        with RunFolder.open_for_reading(place, "", with_job=False) as folder:
            step = find_best_step(folder)
            store = open_checkpoint_store(folder.checkpoint_store_location)
            return str(CheckpointRef(store, checkpoint_name(step)))
    except RayparError as error:
        tell(RunWarning(text=f"the best checkpoint is not known: {error.what}\n  cure: {error.cure}"))
        return None


def describe_end(result: Result) -> str:
    """How a run has ended, and its last checkpoint: `done after 40 steps, the checkpoint ... is whole`."""
    saved = f", the checkpoint {result.checkpoint_path} is whole" if result.checkpoint_path else ""
    return f"{result.end} after {count_noun(result.done, 'step')}{saved}"


def _tell_stage(tell: EventHandler, stage: str, text: str, run: str | None = None) -> None:
    """Tell that a stage of the start-up is over."""
    tell(StartupStage(stage=stage, text=text, run=run))


def generate_text_with_checkpoint(spec: Job, checkpoint: str) -> str | None:
    """The text that the model's module generates with the weights of a checkpoint (its location).

    None if the module has no function for it.

    The function is `generate(model, ...)`, defined beside the model's function. It gets those of `model.args` for which it
    has parameters. If it raises, the run does not fail: the text then says what was raised.
    """
    from torch import nn

    from raypar.worker.job_preflight import find_sibling_function
    from raypar.worker.pretrained.frozen_values import AllTensors

    generate = find_sibling_function(spec.model, "generate")
    if generate is None:
        return None
    try:
        model = spec.model.call()
        if not isinstance(model, nn.Module):
            return None
        model.load_state_dict(dict(AllTensors(checkpoint)), strict=False)
        taken = inspect.signature(generate).parameters
        return str(generate(model, **{key: value for key, value in spec.model.args.items() if key in taken}))
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        return f"({spec.model.label} has a generate function beside it, but it raised {error_text(error)})"
