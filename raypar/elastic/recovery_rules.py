"""Rules for the first half of a recovery: claim a generation, ask the workers for their status, settle the open step. A run's
first generation begins so too.

    CLAIMING -> STANDING -> (SETTLING) -> (PLANNING) -> ADOPTING -> RUNNING
        ^           |            |             |            |
        +-----------+------------+-------------+------------+   the loss of a worker on the way begins a new generation
                                               |
                                               +-> WAITING      until there are enough workers

`find_and_adopt_plan_rules.py` has the second half, from the choice of a plan on.
"""

from __future__ import annotations

from collections.abc import Iterable

from raypar.elastic import state_sources
from raypar.elastic.actions import ApplyKeptGradients, FenceWorkers, KillWorker, RequestStacks, TellUser, WarnUser, WriteJournal
from raypar.elastic.deadlines import answer_deadline_s, waits_for_slow_sample
from raypar.elastic.events import (
    CallFailed,
    CheckpointFailed,
    DriverFailover,
    GenerationClaimed,
    KeptGradientsApplied,
    StacksReported,
    StepEmitted,
    StopRequested,
    Tick,
    ValidationEmitted,
    WorkerStatusReported,
)
from raypar.elastic.failures import (
    begin_recovery,
    choose_unreachable_workers,
    fail_run,
    is_caused_by_worker_loss,
    mark_worker_lost,
    note_out_of_memory,
    note_unreachable_workers,
    record_death,
)
from raypar.elastic.find_and_adopt_plan_rules import end_run_between_generations, find_plan, tell_what_is_awaited
from raypar.elastic.hire_and_release_workers import start_missing_workers
from raypar.elastic.phases import Phase
from raypar.elastic.replica_digests import compare_digests_in_recovery, end_run_if_doubts_stay
from raypar.elastic.run_state import RunState, ShardCountHistory
from raypar.elastic.step_flow_rules import record_emitted_step
from raypar.elastic.wait_for_last_copies import check_silent_worker_wait, waits_for_silent_workers
from raypar.errors import ClusterError, error_first_line
from raypar.plan.vote_result import VoteResult
from raypar.plan.wording import after_steps, format_worker_numbers

CLAIM_TOLD_S = 5.0
"""Time after which the user is told that the claim of a generation waits for Ray's control store."""
CUT_OFF_S, MOST_PATIENCE_S = 2.0, 20.0
"""If the claim of a generation takes longer than `CUT_OFF_S`, the driver's own network was interrupted. Silent workers then get
as much time again, but at most `MOST_PATIENCE_S`, and only if steps would be lost without them."""

# -- the way in ----------------------------------------------------------------------------------------------------------


def take_over_run(m: RunState, event: DriverFailover) -> Phase:
    """Go on in place of a driver that is gone: the workers keep the state, the journal has the emitted steps."""
    p, who, hiring = m.progress, m.membership, m.hiring
    known = (plan.shards_by_layer for plan in (who.plan, event.plan) if plan is not None)
    unsharded = all(max(shards) == 1 for shards in known)  # else other numbers of shards may have been used before
    m.replay = ShardCountHistory(m.policy.steps_before_run, event.plan.shards_by_layer if unsharded else None)
    who.generation, who.plan, who.members = event.generation, event.plan, event.members
    p.issued = p.committed = p.emitted = p.journalled = event.seen
    p.served_flush_point = event.seen - 1  # what is due there may not have been served
    p.validated, p.saved, p.best = event.validated, event.saved, event.best
    hiring.starting, hiring.placed = {*event.starting, *event.pending}, set(event.starting)
    for group in event.groups:
        hiring.note_placement_group(group)
    hiring.on_demand = set(event.on_demand)
    hiring.useful, hiring.useful_is_final = event.useful_workers, event.useful_workers is not None
    hiring.next_number = max(hiring.next_number, event.next_worker_number)
    p.last_commit_s = None if event.idle_s is None else m.timer.now_s - event.idle_s
    who.spares = set(event.workers) - set(event.members) - hiring.starting
    who.had_seat = set(event.workers)  # not known; any of them may keep a mirror snapshot
    m.mirror.complete = True  # not known; `elastic.lost_state: fail` prefers an error to a restart from the beginning
    who.gone = set(event.members) - set(event.workers)
    return begin_recovery(m, "a new driver takes over")


# -- the phases ----------------------------------------------------------------------------------------------------------


def handle_claim(m: RunState, event: GenerationClaimed) -> Phase | None:
    """Go on once the generation is claimed; end this driver if another one was first, which it may find whenever it writes."""
    if not event.ok:
        return m.end_run("deposed", "another driver has claimed a newer generation and goes on with the run")
    if m.phase is not Phase.CLAIMING or event.generation != m.membership.generation:
        return None
    if m.timer.elapsed_s > CUT_OFF_S:
        give_silent_workers_time(m, m.timer.elapsed_s)
    return Phase.STANDING


def fence_workers(m: RunState) -> Phase | None:
    """Make all workers abort their work and report their status; kill those that hang."""
    who, r = m.membership, m.recovery
    # Not earlier: if this driver was stopped, another one may have gone on with these workers; its claim comes first.
    for worker in sorted(who.hung):
        m.decide(KillWorker(worker, "did not answer"), "recovery never waits for a worker that hangs")
    who.hung.clear()
    r.expected = (set(who.members) | who.spares) - who.gone
    m.timer.limit(answer_deadline_s(m))
    if r.expected:
        m.decide(FenceWorkers(who.generation, tuple(sorted(r.expected))), r.why)
    return settle_open_step_if_all_answered(m)


def count_worker_status(m: RunState, event: WorkerStatusReported) -> Phase | None:
    """Record the status of a worker that has entered the new generation."""
    r = m.recovery
    worker = event.status.worker
    if event.generation != m.membership.generation or worker not in r.expected:
        return None
    r.statuses[worker] = event.status
    if worker in r.holders:
        announce_returned_worker(m, worker)
    return settle_open_step_if_all_answered(m)


def announce_returned_worker(m: RunState, worker: int) -> None:
    """Report that a worker has answered for which the run waited.

    Its next step may take as long, so the limit for that step is raised.
    """
    r = m.recovery
    assert r.waited_from_s is not None
    began_s = r.waited_from_s if m.progress.last_commit_s is None else m.progress.last_commit_s
    m.health.next_step_least_limit_s = max(m.health.next_step_least_limit_s, 2 * (m.timer.now_s - began_s))
    waited_s = m.timer.now_s - r.waited_from_s
    give_silent_workers_time(m, waited_s)
    m.decide(
        TellUser(f"worker {worker} has answered, after a wait of {waited_s:.1f} s; its state is whole"), "it was waited for"
    )


def give_silent_workers_time(m: RunState, interruption_s: float) -> None:
    """Give silent workers time to answer after an interruption of the driver's own network.

    TCP doubles the pause before each repetition of a lost packet, so its next repetition comes within the length of the
    interruption.
    """
    until_s = m.timer.now_s + min(interruption_s, MOST_PATIENCE_S)
    m.health.patient_until_s = max(m.health.patient_until_s, until_s)


def settle_open_step_if_all_answered(m: RunState) -> Phase | None:
    """Commit or drop the open step, once all workers have answered.

    The step is committed if any worker has applied it, because that worker has received all votes.
    """
    r = m.recovery
    if r.expected - set(r.statuses):
        return None
    m.health.slow_sample_from_s = None
    compare_digests_in_recovery(m)
    if (over := end_run_if_doubts_stay(m)) is not None:
        return over
    holders = steps_of_trusted_workers(m)
    r.done = max(holders.values(), default=m.progress.committed)
    late = {w for w, done in holders.items() if done == r.done - 1 and r.statuses[w].can_apply_late}
    if not late:
        return commit_found_steps(m)
    r.expected = late
    return Phase.SETTLING


def steps_of_trusted_workers(m: RunState) -> dict[int, int]:
    """Worker -> the steps that its state has had, of workers whose state is trusted."""
    return {w: s.done for w, s in m.recovery.statuses.items() if s.done is not None and w not in m.trust.tainted}


def apply_kept_gradients(m: RunState) -> None:
    """Have workers apply the open step late."""
    r = m.recovery
    vote_results: dict[int, VoteResult] = {}
    for status in r.statuses.values():
        vote_results.update(status.vote_results)
    m.timer.limit(answer_deadline_s(m))
    m.decide(
        ApplyKeptGradients(m.membership.generation, tuple(sorted(r.expected)), r.done - 1, vote_results[r.done - 1]),
        f"step {r.done - 1} was applied by {sorted(set(steps_of_trusted_workers(m)) - r.expected)}: the whole vote was held",
    )


def count_applied_kept_gradients(m: RunState, event: KeptGradientsApplied) -> Phase | None:
    """Count a worker that has applied the open step late; with the last worker the step is committed."""
    r = m.recovery
    worker = event.status.worker
    if event.generation != m.membership.generation or worker not in r.expected:
        return None
    r.expected.discard(worker)
    r.statuses[worker] = event.status
    return commit_found_steps(m) if not r.expected else None


def commit_found_steps(m: RunState) -> Phase:
    """Commit the steps that workers have applied without a report to the driver, then find a plan.

    All workers have applied the same steps now.
    """
    p, done = m.progress, m.recovery.done
    for step in range(max(p.committed, p.journalled), done):
        p.journalled = step + 1
        m.decide(WriteJournal(step), f"step {step} was found applied")
    p.committed = p.issued = max(p.committed, done)
    return find_plan(m)


# -- what may come in any phase ------------------------------------------------------------------------------------------


def handle_failure_while_recovering(m: RunState, event: CallFailed) -> Phase | None:
    """Begin the next generation after a death or a new failure; consequences of older failures are ignored.

    A run that is not elastic fails instead, if this happens at its start.
    """
    r = m.recovery
    if event.kind in ("user", "error") or (m.begins and not m.policy.elastic):
        return fail_run(m, event)
    silent = m.begins and event.generation is None  # a worker that has answered no pings for long
    if event.kind == "lost" and event.worker is not None:
        known = event.worker in m.membership.gone
        counts = record_death(m, event)
        if not (counts or known) and r.symptom:
            m.health.attempts, r.symptom = m.health.attempts - 1, False
        if known or m.phase is Phase.WAITING:
            return None
        if note_out_of_memory(m, event):
            return m.end_run("failed", error_first_line(event.error), event.error)
        m.health.failures.append(event)
        if m.phase is Phase.STANDING:
            r.expected.discard(event.worker)
            r.statuses.pop(event.worker, None)
            return settle_open_step_if_all_answered(m)
        if m.phase is not Phase.CLAIMING:
            return begin_recovery(m, error_first_line(event.error), counts=counts)
    elif (silent or event.generation == m.membership.generation) and m.phase is not Phase.CLAIMING:
        m.health.failures.append(event)
        note_unreachable_workers(m, event)
        mark_workers_hung(m, choose_unreachable_workers(m))
        return begin_recovery(m, error_first_line(event.error))
    return None


def stop_after_recovery(m: RunState, event: StopRequested) -> Phase | None:
    """Remember the request: the new generation saves its state and ends. At the start the run ends at once.

    After Ctrl-C the recovery may take `interrupt_s` at most, and the run does not wait for workers.
    """
    if m.begins:
        return m.end_run("interrupted" if event.interrupt else "stopped", event.reason)
    m.stopping.request = event
    if event.interrupt and m.phase is Phase.WAITING:
        return end_run_between_generations(m)
    if event.interrupt:
        m.stopping.abandon_at_s = m.timer.now_s + m.policy.interrupt_s
    return None


def check_recovery_deadlines(m: RunState, event: Tick) -> Phase | None:
    """Give up workers that do not answer in time; tell people from time to time what the run waits for."""
    r, timer = m.recovery, m.timer
    if waits_for_silent_workers(m):
        return check_silent_worker_wait(m, event)
    if m.stopping.abandon_at_s is not None and timer.now_s >= m.stopping.abandon_at_s:
        return end_run_between_generations(m)
    if m.phase is Phase.CLAIMING and timer.elapsed_s > CLAIM_TOLD_S and not r.awaited:
        r.awaited = "Ray's control store, which does not answer (the workers keep their state meanwhile)"
        tell_what_is_awaited(m)
    if m.phase is Phase.WAITING:
        start_missing_workers(m)
        if timer.now_s - r.told_s >= state_sources.TELL_EVERY_S and timer.deadline_s is not None and not timer.expired:
            tell_what_is_awaited(m)
    silent = unanswering_workers(m)
    asked = m.phase in (Phase.STANDING, Phase.SETTLING, Phase.ADOPTING)
    if m.begins and asked:  # a start is slow, and nobody holds state yet: silence alone says nothing
        if timer.expired and not m.health.probing:
            m.health.probing = True
            m.decide(RequestStacks(tuple(silent)), f"{m.phase.value} took more than {timer.elapsed_s:.0f} s")
        return None
    if m.phase is Phase.STANDING and timer.now_s < m.health.patient_until_s:
        living = set(silent) - event.ended
        if living and state_sources.steps_are_lost_without(m, living):
            return None
    hopeless = asked and silent and set(silent) <= event.unheard and timer.elapsed_s > m.policy.hopeless_s
    if not (hopeless or timer.expired or (m.phase is Phase.STANDING and r.waited_from_s is not None)):
        return None
    if m.phase is Phase.WAITING:
        cure = "add workers and use `raypar resume`, or lower elastic.min_workers"
        what = f"no workers came within {m.policy.capacity_s:g} s; awaited were {r.awaited}"
        return m.end_run("failed", "no workers came", ClusterError(what, cure=cure))
    if m.phase in (Phase.CLAIMING, Phase.PLANNING):
        what = f"{m.phase.value} took more than {timer.elapsed_s:.0f} s"
        cure = "look at the head node, whose control store does not answer; `raypar resume` goes on from the last checkpoint"
        return m.end_run("failed", what, ClusterError(what, cure=cure))
    if m.phase is Phase.STANDING and waits_for_slow_sample(m, silent, event):
        timer.deadline_s = max(timer.deadline_s or 0.0, timer.now_s + answer_deadline_s(m))  # its step has to end afterwards
        return None
    if m.phase is Phase.STANDING:
        return wait_for_or_drop_silent_workers(m, event, silent)
    # Workers that answer pings wait for others, or are slow: the next generation asks for their status.
    mute = set(silent) & event.unheard
    mark_workers_hung(m, mute - set(state_sources.find_only_holders(m, mute - event.ended)))
    return begin_recovery(m, f"{format_worker_numbers(silent)} did not answer while {m.phase.value}")


def unanswering_workers(m: RunState) -> list[int]:
    """The workers whose answers the phase waits for."""
    return sorted(m.recovery.expected - set(m.recovery.statuses if m.phase is Phase.STANDING else ()))


def fail_start_on_hung_workers(m: RunState, event: StacksReported) -> Phase | None:
    """End the run if workers have still not answered at its start; the error shows their stacks."""
    if not m.begins or not m.health.probing:
        return None
    late = format_worker_numbers(unanswering_workers(m))
    what = f"{late} did not answer within {m.timer.elapsed_s:.0f} s while {m.phase.value}\n{event.text}"
    cure = "look at the stacks above and at Ray's logs on those nodes"
    return fail_run(m, CallFailed("error", ClusterError(what, cure=cure)))


def wait_for_or_drop_silent_workers(m: RunState, event: Tick, silent: list[int]) -> Phase | None:
    """Wait for workers that have not reported their status in time, or give them up.

    The run waits up to `last_copy_wait_s` while some of them hold the only copy of some state and their processes are not known
    to have ended; else all of them are given up.
    """
    r, timer = m.recovery, m.timer
    over = r.waited_from_s is not None and timer.expired
    holders = state_sources.find_only_holders(m, set(silent) - event.ended)
    if holders and not over and m.policy.last_copy_wait_s:
        if r.waited_from_s is None:
            r.waited_from_s = r.told_s = timer.now_s
            timer.deadline_s = timer.now_s + m.policy.last_copy_wait_s
        elif holders == r.holders and timer.now_s - r.told_s < state_sources.TELL_EVERY_S:
            return None
        r.holders, r.awaited = holders, state_sources.describe_wait_for_last_copy(m, holders, event.unheard)
        tell_what_is_awaited(m, f"(elastic.last_copy_wait_s), {state_sources.describe_failed_wait(m, holders)}")
        return None
    more = ""
    if holders and r.waited_from_s is not None:
        m.health.waited_s = timer.now_s - r.waited_from_s
        more = f", in a wait of {m.health.waited_s:.0f} s"
    mark_workers_hung(m, silent)
    return begin_recovery(m, f"{format_worker_numbers(silent)} did not answer while {m.phase.value}{more}")


def mark_workers_hung(m: RunState, silent: Iterable[int]) -> None:
    """Mark the `silent` workers lost; they are killed once the next generation is claimed."""
    for worker in silent:
        mark_worker_lost(m, worker)
        m.membership.hung.add(worker)


# -- side effects that were under way when the recovery began --------------------------------------------------------------


def note_emitted_step(m: RunState, event: StepEmitted) -> None:
    """Count a step as emitted; no step is issued before the new generation runs."""
    record_emitted_step(m, event)


def note_validation_stop_request(m: RunState, event: ValidationEmitted) -> None:
    """Remember that a callback of the validation asked to stop. The validation itself is not due again."""
    if event.stop is not None and m.stopping.request is None:
        m.stopping.request = StopRequested(event.stop)


def note_failed_checkpoint(m: RunState, event: CheckpointFailed) -> None:
    """Warn that a checkpoint failed; if only a worker's loss is to blame, the failure is not kept for the end of the run."""
    m.progress.saving = None
    if not is_caused_by_worker_loss(event.error):
        m.progress.save_error = event.error
    m.decide(
        WarnUser(f"the checkpoint {after_steps(event.done)} was not completed ({error_first_line(event.error)})"),
        "training goes on",
    )
