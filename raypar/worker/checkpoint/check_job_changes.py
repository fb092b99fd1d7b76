"""What a resume changes of the job of its checkpoint: which keys it may, and what the run's later checkpoints say of it."""

from __future__ import annotations

from collections.abc import Collection

from raypar.errors import CheckpointError
from raypar.job import Job
from raypar.job.contract import (
    CHANGES,
    OF_FOLLOWED_METRIC,
    VALIDATED,
    contract_of_job,
    keys_that_may_change_when_said,
)
from raypar.job.history_of_resume_changes import Changes, JobBefore, changed_values, is_optimizer_key, parse_history
from raypar.job.lr_schedule_metric import values_in_checkpoint
from raypar.worker.checkpoint.contract_comparison import (
    check_data_digest,
    check_number_of_samples,
    compare_contracts,
    list_contract_differences,
    streams_of,
)
from raypar.worker.checkpoint.expected_optimizer_state import ExpectedOptimizerState
from raypar.worker.checkpoint.manifest import Manifest
from raypar.worker.checkpoint.state_key import GROUP, OPTIMIZER


def changes_at_resume(manifest: Manifest, spec: Job) -> Changes:
    """What has changed in a run that goes on from a checkpoint with this job, this resume included.

    Raises `CheckpointError` for a job of which other keys differ than those that may (`BITS_FROM_A_STEP_ON`), or in a way in
    which they may not.
    """
    differences = compare_contracts(manifest, spec)
    measuring = {key for key, _, _ in differences} & set(OF_FOLLOWED_METRIC)
    may_change = [*keys_that_may_change_when_said(), *sorted(measuring)]
    changed = [one for key, then, now in differences for one in changed_values(then.get(key), now.get(key), key)]
    refused = [line for line in list_contract_differences(manifest, spec) if line.partition(" was ")[0] not in may_change]
    refused += [str(one) for one in changed if _is_fixed(one.key)]
    if refused:
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} belongs to another job: {'; '.join(refused)}",
            cure=f"resume with these as they were (plan, steps and validation may change; and {', '.join(may_change)}, except "
            "for the optimizer's class, patterns of parameters and data.streams); or begin a new run with its weights: "
            f"without resuming, and with init_from={manifest.checkpoint}",
        )
    history = parse_history(manifest.contract.get(CHANGES, []), manifest.steps_done)
    if not changed:
        return Changes(history)
    was = {key: then.get(key) for key, then, _ in differences}
    follows = {"virtual_replicas"} if not spec.virtual_replicas and "microbatches" in was else set()
    follows |= {key for key, then, now in differences if key in measuring and (key in then) != (key in now)}
    told = tuple(one for one in changed if one.key not in follows)
    return Changes((*history, JobBefore(manifest.steps_done, was)), told)


def _is_fixed(key: str) -> bool:
    """Whether a key may not change, though it is inside of one that may."""
    optimizer, of_group, option = key.partition(".groups.")
    if of_group and is_optimizer_key(optimizer):
        return option.endswith(".match")
    section, _, name = key.rpartition(".")
    if is_optimizer_key(section):
        return name in ("function", "groups", "match", "entries")
    return key == "data.streams"


def with_former_batches(manifest: Manifest, spec: Job, changes: Changes) -> Job:
    """The job, which reads on after the samples that the steps before have read. Raises `CheckpointError` where the batches
    have changed, and the order of samples depends on their size."""
    former = changes.former_batches(contract_of_job(spec))
    why = None
    if former and spec.data.drop_last:
        why = "data.drop_last", "the length of an epoch depends on it"
    elif former and spec.data.group_by is not None:
        why = "data.group_by", "the order of an epoch depends on it"
    elif former and spec.epochs is not None:
        why = "epochs", "the number of steps depends on it"
    if why is not None:
        sizes = sorted({one.batch_size for one in former} | {spec.batch_size})
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint}: the run has steps of {' and of '.join(map(str, sizes))} samples, and with "
            f"{why[0]} {why[1]}",
            cure="give steps in the place of epochs"
            if why[0] == "epochs"
            else f"resume with batch_size and microbatches as they were, or leave {why[0]} out",
        )
    return spec.after_batches(former)


def followed_values(manifest: Manifest, spec: Job) -> dict[int, float]:
    """Number of steps done -> value of the metric that the job's learning rates follow, of validations before the checkpoint;
    none if the run has followed another metric until then, or none. Raises `CheckpointError` for values that no run writes."""
    if spec.followed_metric is None:
        return {}
    return values_in_checkpoint(manifest.contract.get(VALIDATED), spec.followed_metric, manifest.steps_done)


def check_changed_optimizer(manifest: Manifest, changes: Changes, keeps: ExpectedOptimizerState) -> None:
    """Raises `CheckpointError` where this resume has changed options of the optimizer with which it keeps other state than the
    checkpoint has, or options that its steps change. `keeps`: what it keeps with the new ones."""
    options = {one.key.rpartition(".")[2] for one in changes.last if one.key.startswith("optimizer.")}
    if not options:
        return
    kept = {name for names in (manifest.kept or {}).values() for name in names}
    kept |= {entry.kind.name for entry in manifest.entries if entry.kind.kind == OPTIMIZER}
    if kept != keeps.names_of_parameters:
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} has {_names(kept)} of each parameter as the optimizer's state, and with the "
            f"changed options it keeps {_names(keeps.names_of_parameters)} ({changes.lines[0]})",
            cure="change only options that leave the optimizer's state as it is, such as lr and weight_decay",
        )
    if of_steps := options & {entry.kind.name for entry in manifest.entries if entry.kind.kind == GROUP}:
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} has {_names(of_steps)} as the optimizer's state, which its steps change "
            f"({changes.lines[0]})",
            cure="leave it as it was",
        )


def _names(names: Collection[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names)) or "nothing"


def check_changed_data(manifest: Manifest, changes: Changes, spec: Job, samples: int, digest: str | None = None) -> None:
    """Raises `CheckpointError` for other samples or another number of them where `data` is as it was, and for streams in the
    place of a map-style data set. `spec`: the job with what is known of its data, `samples`: their number, `digest`: theirs."""
    if not any(one.key.partition(".")[0] == "data" for one in changes.last):
        check_number_of_samples(manifest, samples)
        check_data_digest(manifest, digest)
    elif spec.data.streams is not None and "data" not in streams_of(manifest):
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} was trained on a map-style data set, and data is iterable: the run cannot read "
            "on from the place where it was",
            cure=f"begin a new run with its weights: without resuming, and with init_from={manifest.checkpoint}",
        )
