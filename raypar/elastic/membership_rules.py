"""Rules for workers that join a run, are asked to leave or are too slow, and for moving to a larger plan."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.elastic.actions import ChoosePlan, KillWorker, ReportStraggler, StoreUsefulWorkers, TellUser, WarnUser
from raypar.elastic.deadlines import usual_step_s
from raypar.elastic.desired_capacity import DesiredCapacity, retry_pause_s
from raypar.elastic.events import DrainRequested, PlanChosen, WorkerJoined, WorkerPlaced, WorkerStartFailed
from raypar.elastic.failures import begin_recovery, mark_worker_lost
from raypar.elastic.hire_and_release_workers import (
    count_available_workers,
    desired_capacity_of_run,
    spares_of_complete_replicas,
)
from raypar.elastic.phases import Phase
from raypar.elastic.rebalance_rules import reconsider_shares
from raypar.elastic.run_state import RunState
from raypar.elastic.seating import find_seats_for_on_demand_workers
from raypar.elastic.step_flow_rules import issue_steps
from raypar.elastic.stragglers import StragglerFinding
from raypar.errors import error_first_line
from raypar.plan.parallel_plan import ComputeKey
from raypar.plan.wording import count_noun, format_worker_numbers, word_form


def note_placed_worker(m: RunState, event: WorkerPlaced) -> None:
    """Remember that the cluster has found room for a new worker, which will join in seconds."""
    if event.worker not in m.membership.gone:
        m.hiring.placed.add(event.worker)


def add_spare_while_recovering(m: RunState, event: WorkerJoined) -> Phase | None:
    """Let a new worker wait for a seat; if the run waits for workers, begin a new recovery with it."""
    if add_spare(m, event) and m.phase is Phase.WAITING:
        return begin_recovery(m, f"worker {event.worker} has joined", counts=False)
    return None


def add_spare_while_running(m: RunState, event: WorkerJoined) -> None:
    """Let a new worker wait for a seat, which it may get between two steps."""
    if add_spare(m, event):
        ask_for_larger_plan(m, desired_capacity_of_run(m))


def add_spare(m: RunState, event: WorkerJoined) -> bool:
    """Add a new worker to the spares. False if it was given back or lost before its message came.

    At the end of a run it is needed only if a worker is lost with its share of the last checkpoint.
    """
    if event.worker in m.membership.gone:
        return False
    m.hiring.starting.discard(event.worker)
    m.hiring.placed.discard(event.worker)
    m.hiring.next_number = max(m.hiring.next_number, event.worker + 1)
    m.hiring.failures = 0
    m.membership.spares.add(event.worker)
    if m.planned.ask_at_s is None:
        m.planned.ask_at_s = m.timer.now_s + m.policy.grow_after_s
    return True


def add_spare_only(m: RunState, event: WorkerJoined) -> None:
    """Add a new worker to the spares and do nothing else: at the start and at the end of a run no plan is changed."""
    add_spare(m, event)


def retry_start_later(m: RunState, event: WorkerStartFailed) -> None:
    """Mark the worker lost and allow the next start after a pause; another machine may work."""
    if event.worker in m.membership.gone:
        return  # it was given back or drained while it was starting
    group = {event.worker} | (m.hiring.asked_together.get(event.worker, set()) & (m.hiring.starting - m.hiring.placed))
    for worker in group:  # they share the placement group
        mark_worker_lost(m, worker)
    pause_s = retry_pause_s(m.policy.capacity, m.hiring.failures)
    m.hiring.retry_at_s = m.timer.now_s + pause_s
    m.hiring.failures += 1
    again = f"; the next is tried in {pause_s:.0f} s" if m.policy.hires else ""
    m.decide(
        WarnUser(f"{format_worker_numbers(group)} could not be started: {error_first_line(event.error)}{again}"),
        "the others go on",
    )


def forget_failed_start(m: RunState, event: WorkerStartFailed) -> None:
    """Mark the worker lost; at the end of a run no other worker is started in its place."""
    mark_worker_lost(m, event.worker)


def ask_for_larger_plan(m: RunState, decision: DesiredCapacity) -> None:
    """Ask the planner for a plan with seats for the spares, if `decision` says so; training goes on meanwhile."""
    if decision.grow:
        m.planned.asking, m.planned.ask_at_s = True, None
        m.planned.asked_workers = decision.seats
        m.decide(ChoosePlan(m.membership.generation, decision.seats), decision.reason)


def seat_on_demand_workers(m: RunState) -> Phase | None:
    """Plan a new generation in which on-demand workers in reserve get seats in stages that have no on-demand worker.

    A stage loses its last on-demand worker when a worker in reserve on a spot node takes the seat of a lost on-demand worker.
    """
    unchanged = m.planned.reason is None and not m.planned.asking and m.health.disturbed_at_s is None
    if not unchanged or m.stopping.request is not None or m.phase not in (Phase.RUNNING, Phase.FLUSHING):
        return None
    leave = find_seats_for_on_demand_workers(m, spares_of_complete_replicas(m))
    if not leave:
        return None
    who = f"{format_worker_numbers(leave)} {word_form(leave, 'gives its seat', 'give their seats')}"
    m.planned.reason = f"{who} to an on-demand worker: the stage has no other"
    return issue_steps(m)


def judge_larger_plan(m: RunState, event: PlanChosen) -> Phase | None:
    """Plan the move to the planner's larger plan if it saves more time than it costs.

    Below the number of workers that the job asks for, a move counts as saving a quarter of the remaining time at least:
    second copies of the state are worth more than time.
    """
    who, planned = m.membership, m.planned
    if event.generation != who.generation or not planned.asking:
        return None
    planned.asking = False
    if planned.reason is not None:
        return None
    if event.plan is None or event.plan.world <= len(who.members):
        note_declined_capacity(m)
        return None
    left = m.policy.end_step - m.progress.committed
    # Predictions give the ratio of the two plans' step times; the present step time is measured.
    left_s = left * usual_step_s(m)
    gain_s = left_s * (1 - event.step_s / event.now_s) if event.now_s else 0.0
    if len(who.members) < m.policy.workers and left_s:
        gain_s = max(gain_s, left_s / 4)
    if event.now_s and gain_s <= m.policy.move_s:
        stay = f"{format_worker_numbers(who.spares)} {word_form(who.spares, 'stays', 'stay')} in reserve"
        text = f"{stay}: {word_form(who.spares, 'a seat', 'seats')} would save {max(gain_s, 0.0):.1f} s of {left} steps"
        m.decide(TellUser(text), f"moving costs about {m.policy.move_s:.1f} s")
        note_declined_capacity(m)
        return None
    planned.reason, planned.plan = f"making room for {format_worker_numbers(who.spares)}", event.plan
    planned.workers = count_available_workers(m)
    return issue_steps(m) if m.phase in (Phase.RUNNING, Phase.FLUSHING) else None


def note_declined_capacity(m: RunState) -> None:
    """Note that the planner can use no more workers than the members; further ones are given back and not asked for again.

    If the planner was asked about fewer workers than the run wants, the spares are kept for `capacity_s`: together with workers
    that are still to come they may be useful.
    """
    m.planned.declined_at_s = m.timer.now_s
    if m.planned.asked_workers >= m.policy.wanted:
        useful = len(m.membership.members)
        if (m.hiring.useful, m.hiring.useful_is_final) != (useful, True):
            m.decide(StoreUsefulWorkers(useful), f"the planner has no use for more than {count_noun(useful, 'worker')}")
        m.hiring.useful, m.hiring.useful_is_final = useful, True


def give_up_larger_plan(m: RunState) -> None:
    """Stop asking for workers if declined spares have waited for `capacity_s` and no further workers have come.

    After the next change of plan they are asked for again.
    """
    declined_s = m.planned.declined_at_s
    if m.hiring.useful is not None or declined_s is None or not m.membership.spares:
        return
    if m.timer.now_s - declined_s >= m.policy.capacity_s:
        m.hiring.useful = len(m.membership.members)


def drain_worker(m: RunState, event: DrainRequested) -> Phase | None:
    """Have a worker with a seat leave between two steps, or before the first; kill a worker without a seat at once."""
    who = m.membership
    if event.worker in who.spares | m.hiring.starting:
        mark_worker_lost(m, event.worker)
        m.decide(KillWorker(event.worker, "drained"), "it had no work")
    elif event.worker in who.members and event.worker not in who.gone:
        who.leaving.add(event.worker)
        m.planned.reason = f"worker {event.worker} leaves: {event.why}"
        if m.phase in (Phase.RUNNING, Phase.FLUSHING):
            return issue_steps(m)
    return None


def drain_later(m: RunState, event: DrainRequested) -> None:
    """Mark the worker as leaving: the next plan is made without it, or a plan after the one that is being adopted."""
    if event.worker not in m.membership.gone:
        m.membership.leaving.add(event.worker)


def begin_straggler_watch(m: RunState) -> None:
    """Begin to compare the workers of a new generation with those that compute the same."""
    if m.membership.plan is None:
        return
    places: dict[ComputeKey, list[int]] = {}
    for worker, place in zip(m.membership.members, m.membership.plan.compute_keys, strict=True):
        places.setdefault(place, []).append(worker)
    m.health.stragglers.begin(list(places.values()))


def check_stragglers(m: RunState, busy_s: Mapping[int, float]) -> None:
    """Report stragglers after a committed step, and ask one of them to leave if the job wants that and another can come.

    Only one leaves at a time, and only one of a node: if the worker that came in its place is slow too, the node is.
    """
    watch, slow_nodes, nodes = m.health.stragglers, m.health.slow_nodes, m.membership.nodes
    found = watch.step(busy_s)
    reconsider_shares(m, found)
    leaver = next((each for each in watch.now() if _is_to_leave(m, each.worker)), None) if _can_replace(m) else None
    if leaver is not None and nodes.get(leaver.worker, f"of worker {leaver.worker}") in slow_nodes:
        leaver = None
    for finding in found:
        if leaver is None or finding.worker != leaver.worker:
            m.decide(
                _report(finding), "its replicas wait for it in every step" if not finding.recovered else "it has caught up"
            )
    if leaver is None:
        return
    slow_nodes.add(nodes.get(leaver.worker, f"of worker {leaver.worker}"))
    wanted = "elastic.stragglers is replace" if m.policy.replace_stragglers else "no share of the blocks makes it useful"
    m.decide(_report(leaver, leaves=True), wanted)
    m.membership.leaving.add(leaver.worker)
    m.planned.reason = f"worker {leaver.worker} leaves: it takes {leaver.slowdown:.1f} times as long as it should"


def _can_replace(m: RunState) -> bool:
    """Whether one worker may leave now, and another can come."""
    policy, who = m.policy, m.membership
    if not policy.elastic or not (policy.replace_stragglers or policy.rebalance_stragglers) or m.sharing.pending:
        return False
    if who.leaving or m.planned.reason is not None or m.stopping.request is not None:
        return False
    another = bool(who.spares) or policy.hires
    return another and len(who.members) + len(who.spares) - 1 >= policy.min_workers and len(who.members) > 1


def _is_to_leave(m: RunState, worker: int) -> bool:
    """Whether a straggler is to leave if another can come; where it could have fewer blocks, only if that does not help."""
    return m.policy.replace_stragglers or worker in m.sharing.of_no_use


def _report(finding: StragglerFinding, leaves: bool = False) -> ReportStraggler:
    return ReportStraggler(finding.worker, finding.slowdown, finding.steps, finding.alone, finding.recovered, leaves)
