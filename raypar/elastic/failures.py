"""What follows a failure: a new generation without the lost workers, or the end of the run once its cause is known.

A run has `max_attempts` recoveries without a step between them. If the network is broken only between two machines, all workers
answer the driver's pings, but no generation can connect. After `FAILED_GENERATIONS` such generations the run gives up as few
workers as possible, so that all others can reach each other. It never gives up a worker that holds the only copy of some state.
Newcomers, which have no seat yet, need not fail in a row: between two moves that fail the members train. They are given up with
the other newcomers of their nodes, which have the same network.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping

from raypar.elastic.actions import AbortGroups, ClaimGeneration, ReportFirstStepAfterRecovery
from raypar.elastic.desired_capacity import retry_pause_s
from raypar.elastic.events import CallFailed, FailureKind, Tick
from raypar.elastic.generation_guard import StaleGeneration
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RecoveryState, RunState
from raypar.elastic.state_sources import find_only_holders
from raypar.errors import CommError, OutOfMemory, WorkerLost, error_first_line


def record_death(m: RunState, event: CallFailed) -> bool:
    """Mark the worker lost. True if the step itself may be to blame.

    The step is not to blame if the worker had been asked to leave, or its machine was taken away.
    """
    assert event.worker is not None
    who = m.membership
    innocent = event.preempted or event.worker in who.leaving
    if event.worker in who.members and event.worker not in who.gone and not innocent:
        m.health.deaths.append(event)
    mark_worker_lost(m, event.worker)
    return not innocent


def mark_worker_lost(m: RunState, worker: int) -> None:
    """Mark the worker lost for good: its number is never used again."""
    who = m.membership
    who.gone.add(worker)
    for known in (who.spares, who.leaving, m.hiring.starting, m.hiring.placed):
        known.discard(worker)


def note_out_of_memory(m: RunState, event: CallFailed) -> bool:
    """Note where memory was short, if it was. True if it was short there before: at the same position of the same plan."""
    order = m.recovery.order if m.phase is Phase.ADOPTING else None
    plan, members = (m.membership.plan, m.membership.members) if order is None else (order.plan, order.members)
    if not isinstance(event.error, OutOfMemory) or plan is None or event.worker not in members:
        return False
    place = plan, plan.stages_of(members.index(event.worker))
    again = place in m.health.out_of_memory_at
    m.health.out_of_memory_at.add(place)
    return again


def make_repeated_failure_error(m: RunState) -> WorkerLost:
    """The error of a run that has used up its attempts at a step."""
    deaths, failures = m.health.deaths, m.health.failures
    step, most = max(m.progress.committed, m.progress.journalled) + 1, m.policy.max_attempts
    signatures = {failure_signature(event.error) for event in deaths[-most:]}
    if len(deaths) >= most and len(signatures) == 1:
        who = ", ".join(str(event.worker) for event in deaths[-most:])
        return WorkerLost(
            f"{len(deaths)} workers have died in step {step}, one after the other and all in the same way "
            f"(the last were {who}): {error_first_line(deaths[-1].error)}",
            cure=f"something in step {step} (its samples, a library) ends the process: look at the workers' logs, and run it "
            "in one process; `raypar resume` goes on from the last checkpoint",
        )
    last = "\n".join(str(f.error) for f in failures[-most:])
    if pairs := describe_unreachable_workers(m):
        return WorkerLost(
            f"{m.health.attempts} recoveries in a row did not get beyond step {step}: {pairs} cannot reach each other, and "
            f"none of them can be done without; the last failures:\n{last}",
            cure="look at the network between their nodes (`raypar doctor`, routes, firewalls); `raypar resume` goes on from "
            "the last checkpoint",
        )
    return WorkerLost(
        f"{m.health.attempts} recoveries in a row did not get beyond step {step}; the last failures:\n{last}",
        cure="what kills the workers is probably in this step: look at their logs; `raypar resume` goes on",
    )


def failure_signature(error: Exception) -> str:
    """The text of a worker's death without numbers, ids and addresses, so that equal causes give equal texts."""
    return re.sub(r"\b[0-9a-f]{6,}\b|\d+", "", error_first_line(error).rpartition(" was lost: ")[2])


FAILED_GENERATIONS = 2
"""Number of generations that must fail to connect, so that an interruption of a few seconds costs no worker. In a row, except
where newcomers fail."""


def note_unreachable_workers(m: RunState, event: CallFailed) -> None:
    """Note the pairs of workers that could not connect, if this failed call says which."""
    order = m.recovery.order
    if m.phase is not Phase.ADOPTING or order is None or event.worker is None or not isinstance(event.error, CommError):
        return
    workers = (*order.members, *order.seatless_sources)
    pairs = {frozenset({event.worker, workers[rank]}) for rank in event.error.unreachable_ranks if rank < len(workers)}
    if pairs:
        m.health.unreachable[order.generation] = pairs
    if with_newcomers := {pair for pair in pairs if pair & m.membership.spares}:
        m.planned.unreachable[order.generation] = with_newcomers


def choose_unreachable_workers(m: RunState) -> tuple[int, ...]:
    """The workers to give up. Empty if too few generations have failed to connect, or if every choice would lose state."""
    who = m.membership
    # Failures of newcomers that were given up already do not count against those that are still there.
    of_newcomers = {
        generation: pairs
        for generation, found in m.planned.unreachable.items()
        if (pairs := {pair for pair in found if not pair & who.gone})
    }
    chosen = _choose_from_pairs(m, of_newcomers, who.spares, [])
    nodes = {who.nodes[worker] for worker in chosen if worker in who.nodes}
    for worker in sorted(who.spares - set(chosen)):
        if who.nodes.get(worker) in nodes and not find_only_holders(m, {*chosen, worker}):
            chosen.append(worker)
    return tuple(sorted(_choose_from_pairs(m, m.health.unreachable, {*who.members, *who.spares}, chosen)))


def _choose_from_pairs(
    m: RunState, unreachable: Mapping[int, Collection[frozenset[int]]], among: Collection[int], chosen: list[int]
) -> list[int]:
    """`chosen`, and the workers of `among` to give up besides, so that every pair loses one of its workers.

    Only `chosen` if too few generations have failed, or if state would be lost. `unreachable`: generation -> its pairs of
    workers that could not reach each other.
    """
    if len(unreachable) < FAILED_GENERATIONS:
        return chosen
    given_up = m.membership.gone | set(chosen)
    pairs = {pair for found in unreachable.values() for pair in found if not pair & given_up}
    more = list(chosen)
    while pairs:
        times = Counter(worker for pair in pairs for worker in pair if worker in among)
        # Of two with as many broken connections the newer one.
        ranked = sorted(times, key=lambda worker: (times[worker], worker), reverse=True)
        dispensable = [worker for worker in ranked if not find_only_holders(m, {*more, worker})]
        if not dispensable:
            return chosen
        more.append(dispensable[0])
        pairs = {pair for pair in pairs if dispensable[0] not in pair}
    return more


def describe_unreachable_workers(m: RunState) -> str:
    """`workers 0 and 2, 1 and 3`: the pairs that could not reach each other; empty if there are none."""
    pairs = sorted({tuple(sorted(pair)) for found in m.health.unreachable.values() for pair in found})
    return "workers " + ", ".join(" and ".join(map(str, pair)) for pair in pairs) if pairs else ""


def begin_recovery(m: RunState, why: str, *, counts: bool = True, symptom: bool = False) -> Phase:
    """Give up the present work for a new generation: steps in flight will be settled or dropped. Returns `CLAIMING`.

    Returns `OVER` after too many attempts. `counts`: whether the recovery counts as one of the `max_attempts` attempts at the
    next step. A planned change (a worker leaves or joins) does not count, nor does a death that the step cannot have caused (a
    machine was taken away). `symptom`: see `RecoveryState`.
    """
    progress, health, stopping = m.progress, m.health, m.stopping
    if m.phase is Phase.ADOPTING:
        _note_failed_move(m)
    if m.phase in (Phase.VALIDATING, Phase.SAVING, Phase.ENDING):
        progress.served_flush_point = progress.emitted - 1  # saving and validation are due there again
    progress.forget_open_steps()
    health.probing = health.aborted_by_us = False
    m.planned.asking = False
    m.sharing.forget()
    if health.disturbed_at_s is None:
        health.disturbed_at_s = m.timer.now_s
    health.attempts += counts
    if stopping.interrupted and stopping.abandon_at_s is None:
        stopping.abandon_at_s = m.timer.now_s + m.policy.interrupt_s
    if health.attempts > m.policy.max_attempts:
        what = f"{health.attempts} attempts without a step between them: {why}"
        return m.end_run("failed", what, make_repeated_failure_error(m))
    m.recovery = RecoveryState(why, former_order=m.recovery.order or m.recovery.former_order, symptom=symptom)
    return Phase.CLAIMING


def end_recovery(m: RunState, step: int) -> None:
    """If `step` is the first committed step after a recovery, report it: the failures before it are settled."""
    p, health, now_s = m.progress, m.health, m.timer.now_s
    if health.disturbed_at_s is None:
        return
    since_s = health.disturbed_at_s if p.last_commit_s is None else p.last_commit_s
    m.decide(ReportFirstStepAfterRecovery(step, now_s - since_s, max(0, p.journalled - step)), "training goes on")
    health.disturbed_at_s = None
    health.failures.clear()


def claim_generation(m: RunState) -> None:
    """Ask the journal whether this driver may go on with the next generation."""
    m.timer.limit(m.policy.claim_s)
    m.membership.generation += 1
    m.decide(ClaimGeneration(m.membership.generation), m.recovery.why)


def recover_from_failure(m: RunState, event: CallFailed) -> Phase | None:
    """Begin a recovery from a lost worker or a broken connection, unless an earlier recovery has dealt with it."""
    counts, symptom = True, event.kind == "aborted"
    if event.kind == "lost" and event.worker is not None:
        seated = event.worker in m.membership.members and event.worker not in m.membership.gone
        counts = record_death(m, event)
        if not seated:
            return None
    elif event.generation is not None and event.generation < m.membership.generation:
        return None  # the consequence of a failure that has been dealt with
    if note_out_of_memory(m, event):
        return m.end_run("failed", error_first_line(event.error), event.error)
    m.health.failures.append(event)
    return begin_recovery(m, error_first_line(event.error), counts=counts, symptom=symptom)


def can_recover(m: RunState, event: CallFailed) -> bool:
    """Whether a recovery can help: a worker is lost, or a connection broke without an abort by the machine itself."""
    return m.policy.elastic and (event.kind == "lost" or (event.kind == "aborted" and not m.health.aborted_by_us))


def _note_failed_move(m: RunState) -> None:
    """Delay the next move to a larger plan if the one that fails now was to give newcomers seats: a failure costs seconds."""
    order = m.recovery.order
    if order is not None and not set(order.members) <= set(m.membership.members):
        m.planned.not_before_s = m.timer.now_s + retry_pause_s(m.policy.capacity, m.planned.failed_moves)
        m.planned.failed_moves += 1


def is_caused_by_worker_loss(error: Exception) -> bool:
    """Whether a checkpoint's error comes from a worker that died or left, not from the disk: then it can be written again."""
    return isinstance(error, (WorkerLost, CommError, StaleGeneration))


BLAME: dict[FailureKind, int] = {"user": 0, "error": 1, "lost": 2, "aborted": 3}
"""Kind of failure -> its rank: the failure with the smallest rank is the cause; among equals, the first."""


def fail_run(m: RunState, event: CallFailed) -> Phase | None:
    """Record a failure and abort all workers, so that none waits for a failed one; the run ends once the cause is known."""
    if event.kind == "aborted" and m.health.aborted_by_us:
        return None
    m.health.failures.append(event)
    m.health.silent_since_s.clear()  # no worker is waited for any more
    m.decide(AbortGroups(f"{type(event.error).__name__} elsewhere"), "no worker may wait for one that has failed")
    return Phase.FAILING


def look_for_cause(m: RunState) -> Phase | None:
    """Wait for the failure that caused the others, and for a checkpoint that is being written."""
    m.timer.limit(m.policy.root_cause_s if m.progress.saving is None else m.policy.save_grace_s)
    return end_run_once_cause_is_known(m)


def end_run_once_cause_is_known(m: RunState) -> Phase | None:
    """End the run with the failure that caused the others, once it is known and no checkpoint is being written."""
    cause = min(m.health.failures, key=lambda failure: BLAME[failure.kind])
    known = cause.kind != "aborted" or m.timer.deadline_s is None or m.timer.expired
    if not known or (m.progress.saving is not None and not m.timer.expired):
        return None
    why = str(cause.error).splitlines()[0] if str(cause.error) else type(cause.error).__name__
    return m.end_run("failed", why, cause.error)


def tear_down(m: RunState) -> None:
    """Decide on the last action of the run."""
    m.health.silent_since_s.clear()
    assert m.ending is not None, "a rule led to OVER without `end_run`"
    m.decide(m.ending, m.ending.why)


# -- the rules ----------------------------------------------------------------------------------------------------------------


def handle_failure(m: RunState, event: CallFailed) -> Phase | None:
    """Recover without the worker in an elastic run, if only to save after Ctrl-C; errors of user code or raypar end it."""
    return recover_from_failure(m, event) if can_recover(m, event) else fail_run(m, event)


def fail_run_while_aborting(m: RunState, event: CallFailed) -> Phase | None:
    """Fail the run, which is being interrupted: there is no time for a recovery."""
    return fail_run(m, event)


def handle_failure_at_end(m: RunState, event: CallFailed) -> Phase | None:
    """Recover from a failure after the last step, or fail the run once a checkpoint that is being written is complete.

    A worker that dies then loses only its share of the checkpoint; if others hold that state, they write it again.
    """
    if can_recover(m, event):
        return recover_from_failure(m, event)
    if m.progress.saving is None or event.kind == "user":
        return fail_run(m, event)
    m.health.failures.append(event)
    return Phase.FAILING


def note_further_failure(m: RunState, event: CallFailed) -> Phase | None:
    """Record a further failure: a consequence of the first one, or its cause."""
    m.health.failures.append(event)
    return end_run_once_cause_is_known(m)


def check_failure_deadline(m: RunState, event: Tick) -> Phase | None:
    """End the run with the failures so far if no other cause has shown up in time."""
    return end_run_once_cause_is_known(m)
