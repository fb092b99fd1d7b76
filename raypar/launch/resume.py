"""Resumes runs: finds the checkpoint, checks that it fits the job, and trains on from it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.errors import ActiveError, CheckpointError, ConfigError, LeaseHeldError, OutlivedError
from raypar.files.atomic_write import explain_write_errors, file_has_content, replace_file_atomically, write_text_atomically
from raypar.files.printable_text import repr_text
from raypar.files.untrusted_files import explain_read_errors
from raypar.job import Job
from raypar.job.contract import CODE, FINGERPRINT
from raypar.launch.activity_reporter import ActivityReporter
from raypar.launch.choose_plan import ChosenPlan, PlanChooser, make_plan_chooser, plan_json
from raypar.launch.launch_options import EventHandler, LaunchOptions
from raypar.launch.launch_run import launch_run, make_callbacks
from raypar.launch.result import CheckpointArgument, Result
from raypar.launch.run_on_storage import (
    names_of_checkpoints,
    refuse_new_checkpoints,
    resumed_run_on_storage,
)
from raypar.launch.steps_of_epochs import with_steps_of_epochs
from raypar.plan.wording import count_noun
from raypar.record.document_fields import MembersDocument
from raypar.record.events import EndOfRun, ResumeNotice, Resumption, RunWarning
from raypar.record.fold import RunView
from raypar.record.folder import ERROR
from raypar.storage.filesystems import place_of_checkpoint_object
from raypar.storage.list_and_remove_runs import has_run
from raypar.storage.read_run_lines import jsonl_line_sort_key
from raypar.storage.run_folder import NoSuchRun, RunFolder, SharedStoragePlace, parse_storage_location
from raypar.storage.run_lease import LEASE_S
from raypar.storage.s3_lease_store import check_run_dir_on_storage
from raypar.user_code.user_code_errors import make_importable

if TYPE_CHECKING:
    from raypar.job import Job
    from raypar.storage.checkpoint_store import CheckpointRef
    from raypar.worker.job_preflight import PreflightResult

FORMER_S = 20.0
"""How long a former client may still seem to live: somewhat longer than `actors.driver_client.ALONE_S`."""


def resume_former_run(job: Job, former: RunFolder, tell: EventHandler, **options: Any) -> Result:
    """Resume a run of this job, after waiting for its former driver, which may still be saving if its client was killed.

    A run on shared storage is also waited for until its lease has ended. `options`: those of `resume_job`.

    Raises `ActiveError` if the run has a live client.
    """
    until_s, last_warning = time.monotonic() + FORMER_S, ""
    while True:
        try:
            return resume_job(job, former, tell, **options)
        except ActiveError as error:
            more_s = LEASE_S if isinstance(error, LeaseHeldError) else 0.0  # of a process that has died
            if not isinstance(error, OutlivedError) and time.monotonic() > until_s + more_s:
                raise
            if error.what != last_warning:
                last_warning = error.what
                tell(RunWarning(text=last_warning))
            time.sleep(1.0)


def describe_resumption(steps_done: int, view: RunView, members: MembersDocument | None, plan: str, now: float) -> Resumption:
    """The event of a run that is resumed from a checkpoint after `steps_done` steps, under `plan` (in words).

    `view`, `members`: the state in the run's files before the resumption. `now`: Unix time.
    """
    reported = view.last_step.step if view.last_step is not None else 0
    again = max(0, reported - steps_done)
    has_crashed = view.boundary not in ("", EndOfRun.kind)
    before: MembersDocument = members or {}
    plan_before = before.get("plan")
    parts = [f"resumed from the checkpoint after step {steps_done}"]
    if again == 1:
        parts.append(f"step {reported} had been reported and is executed again")
    elif again:
        parts.append(f"steps {steps_done + 1}-{reported} had been reported and are executed again")
    if has_crashed:
        parts.append(f"the run had ended after step {max(reported, steps_done)} without recording why (killed?)")
    if plan_before and plan_before != plan:
        parts.append(f"plan {plan_before} -> {plan}")
    heard_s = max((at for at in (view.last_s, before.get("time")) if at), default=now)
    return Resumption(
        text="; ".join(parts),
        step=steps_done,
        again=again,
        lost=has_crashed,
        plan=plan,
        former_end_s=min(now, heard_s),
        resumed_s=now,
    )


def resume_job(
    job: Job,
    folder: RunFolder,
    tell: EventHandler,
    *,
    stop_at_step: int | None = None,
    address: str | None = None,
    local_nodes: int = 1,
) -> Result:
    """Continue a run from its last good checkpoint, under the plan of `job`.

    Raises `CheckpointError` if there is no such checkpoint, `ConfigError` or `ClusterError` if the run is under way.
    """
    make_importable(job.source_dir)
    job = with_steps_of_epochs(job, tell)
    resumption = list[Resumption]()

    def rewind_folder(chosen: ChosenPlan) -> RunFolder:
        from raypar.actors.driver_client import refuse_active_run

        refuse_active_run(folder.name)  # its client may be gone, and its driver not
        held = hold()
        if held.shared is not None:
            refuse_new_checkpoints(held, before)
        plan = chosen.plan.describe()
        resumption.append(rewind_metrics(folder, options.steps_done, plan, validates_first=options.validates_first))
        (folder.path / ERROR).unlink(missing_ok=True)
        write_text_atomically(folder.plan, plan_json(chosen))
        folder.rewrite_job(job.to_yaml())  # last: the next resumption goes by it
        return held

    with folder.hold_lock(), holding_run(folder, tell) as hold:
        before = names_of_checkpoints(folder) if folder.shared is not None else set()
        try:
            checkpoint = find_last_whole_checkpoint(folder, tell)
        except CheckpointError:
            end_orphaned_driver(folder, address)
            raise
        for _ in folder.read_lines(folder.metrics):  # raises for an unreadable file before anything is started
            pass
        options = LaunchOptions(
            job,
            rewind_folder,
            resumption=resumption,
            stop_at_step=stop_at_step,
            address=address,
            local_nodes=local_nodes,
            callbacks=make_callbacks(job),
        )
        options, choose = prepare_resumed_run(checkpoint, options, make_plan_chooser(job), tell)
        return launch_run(choose, options, tell)


def rewind_metrics(folder: RunFolder, steps_done: int, plan: str, *, validates_first: bool) -> Resumption:
    """Remove the lines of steps after `steps_done` from metrics.jsonl; returns the event of the resumption, for events.jsonl.

    `plan`: the plan under which the run goes on, in words. `validates_first`: whether it begins with a validation, whose former
    line is removed too.
    """
    view, lines = RunView.of(folder.read_timeline()), folder.read_lines(folder.metrics)
    members: MembersDocument | None = folder.read_document(folder.members, damaged=True)
    last = steps_done, not validates_first
    text = "".join(json.dumps(line) + "\n" for line in lines if jsonl_line_sort_key(line) <= last).encode()
    if not file_has_content(folder.metrics, text):
        with explain_write_errors(folder.metrics):
            replace_file_atomically(folder.metrics, text)
    return describe_resumption(steps_done, view, members, plan, time.time())


def holding_run(folder: RunFolder, tell: EventHandler) -> AbstractContextManager[Callable[[], RunFolder]]:
    """Hold the lease of a run on shared storage during the block (`resumed_run_on_storage`). A run in a folder needs none."""
    if folder.shared is None:
        return contextlib.nullcontext(lambda: folder)
    check_run_dir_on_storage(folder.shared.uri)
    return resumed_run_on_storage(folder, tell)


def prepare_resumed_run(
    checkpoint: CheckpointRef, options: LaunchOptions, choose: PlanChooser, tell: EventHandler
) -> tuple[LaunchOptions, PlanChooser]:
    """Options and plan chooser of a run that resumes from the checkpoint; tells the user so.

    Raises `CheckpointError` if the checkpoint belongs to another job or has all steps done.
    """
    from raypar.worker.checkpoint.check_job_changes import (
        changes_at_resume,
        check_changed_data,
        check_changed_optimizer,
        followed_values,
        with_former_batches,
    )
    from raypar.worker.checkpoint.checkpoint_files import check_checkpoint_fits_model, load_manifest
    from raypar.worker.checkpoint.contract_comparison import (
        describe_edition_change,
        list_changed_shard_settings,
        with_streams_of,
    )
    from raypar.worker.pretrained.frozen_values import check_frozen_values_at_resume

    manifest, spec = load_manifest(checkpoint), options.job
    check_frozen_values_at_resume(manifest, spec)
    changes = changes_at_resume(manifest, spec)
    if manifest.steps_done >= min(spec.steps, options.stop_at_step or spec.steps):
        stop, more = options.stop_at_step, 2 * max(spec.steps, manifest.steps_done)
        raises_stop = stop is not None and manifest.steps_done < spec.steps
        longer = f"steps={more}" if spec.epochs is None else f"epochs={2 * spec.epochs:g}"
        raise CheckpointError(
            f"checkpoint {checkpoint}: {manifest.steps_done} of {stop if raises_stop else spec.steps} steps already done",
            cure="raise the step to stop at (--stop-at-step; from Python stop_at_step), or leave it out"
            if raises_stop
            else f"raise {longer.partition('=')[0]} (--set {longer}; from Python {longer})",
        )

    spec = with_former_batches(manifest, with_streams_of(manifest, spec), changes)

    def check_and_choose(checked: PreflightResult) -> ChosenPlan:
        from raypar.model.layer_skeletons import parameter_shapes

        check_checkpoint_fits_model(manifest, parameter_shapes(checked.graph))
        check_changed_data(manifest, changes, checked.job, checked.samples, checked.data_digest)
        if checked.optimizer is not None:
            check_changed_optimizer(manifest, changes, checked.optimizer.keeps)
            checked.optimizer.keeps.check(manifest)
            if line := checked.optimizer.keeps.describe_missing(manifest):
                tell(RunWarning(text=line))
        return choose(checked)

    text = f"from {checkpoint.name}: {count_noun(manifest.steps_done, 'step is', 'steps are')} done"
    if changed := list_changed_shard_settings(manifest, spec):
        text += f"; with another {' and '.join(changed)}, on which the bits depend where the plan has shards"
    if line := describe_edition_change(manifest):
        tell(RunWarning(text=line))
    tell(ResumeNotice(text="; ".join([text, *changes.lines]), step=manifest.steps_done))
    options = replace(options, job=spec, resume=checkpoint, steps_done=manifest.steps_done, changes=changes)
    options = replace(options, validated=followed_values(manifest, spec), frozen=manifest.frozen)
    options = replace(options, former_code=manifest.contract.get(CODE), former_fingerprint=manifest.contract.get(FINGERPRINT))
    return options, check_and_choose


def find_last_whole_checkpoint(folder: RunFolder, tell: EventHandler) -> CheckpointRef:
    """The run's last whole checkpoint; tells which ones were skipped. Raises `CheckpointError` if there is none."""
    from raypar.worker.checkpoint.checkpoint_files import latest_usable_checkpoint, no_usable_checkpoint_error

    with ActivityReporter(tell).reporting():
        checkpoint, skipped = latest_usable_checkpoint(folder.checkpoint_store_location)
    for line in skipped:
        tell(RunWarning(text=line))
    if checkpoint is None:
        raise no_usable_checkpoint_error(folder.name, folder.checkpoint_store_location, skipped, "train it again")
    return checkpoint


def find_checkpoint(given: CheckpointArgument | None, tell: EventHandler, run_dir: str | os.PathLike[str]) -> CheckpointRef:
    """The checkpoint that `given` means: a `ray.train.Checkpoint`, the path of a checkpoint, or a run (its last one), by its
    path or its name under `run_dir`, as commands take it. Paths may be URIs.

    Raises `CheckpointError` if there is none or it is not whole.
    """
    from raypar.storage.checkpoint_store import open_checkpoint
    from raypar.worker.checkpoint.checkpoint_files import MANIFEST, verify_checkpoint

    place = place_of_checkpoint_object(given, "resume_from_checkpoint")
    if not place or not isinstance(place, (str, os.PathLike)):
        raise ConfigError(
            f"resume_from_checkpoint is {repr_text(place)}",
            cure="give a result's checkpoint, a run's name, or the path of a checkpoint or of a run",
        )
    if (shared := parse_storage_location(place, "resume_from_checkpoint")) is not None:
        place = str(shared)
    checkpoint = open_checkpoint(place, "resume_from_checkpoint")
    if checkpoint.has_file(MANIFEST):
        with ActivityReporter(tell).reporting():
            return verify_checkpoint(checkpoint).checkpoint
    if shared is not None and has_run(shared):
        return find_last_whole_checkpoint(RunFolder(Path(shared.name), SharedStoragePlace(shared)), tell)
    runs = ""
    if shared is None:
        path = Path(place)
        with explain_read_errors(path):
            has_checkpoints = (path / "checkpoints").is_dir()
        try:
            if has_checkpoints:
                return find_last_whole_checkpoint(RunFolder(path), tell)
            with RunFolder.open_for_reading(
                place if isinstance(place, str) else path, os.fspath(run_dir), with_job=False, last_bytes=0
            ) as folder:
                return find_last_whole_checkpoint(folder, tell)
        except NoSuchRun as error:
            runs = f"; {error.cure}"
    raise CheckpointError(
        f"{checkpoint} is neither a checkpoint nor a run",
        cure=f"give a run's name or place, or that of runs/NAME/checkpoints/step_...{runs}",
    )


def end_orphaned_driver(folder: RunFolder, address: str | None) -> None:
    """Have a driver that has outlived its client save and end, if it runs on the cluster that would be joined.

    Raises `OutlivedError` once it has ended, because the run can be resumed now, and `ActiveError` if it has not.
    """
    from raypar.actors.driver_client import refuse_active_run
    from raypar.actors.ray_connection import connect_ray, uses_existing_ray

    if uses_existing_ray(address):
        with connect_ray(address, 0, Path.cwd()):
            refuse_active_run(folder.name)
