"""Rules for the second half of a recovery: choose the next generation's plan, find its state, and have the workers adopt it.

Plans are tried in the order of their cost: fill the empty seats from workers that wait; go on with the replicas that are left,
so that nothing moves; choose a new plan. The state comes from the workers that hold it; else all go back to the newest complete
mirror snapshot; else to the checkpoint. Replayed steps are compared with the journal and emit nothing.
"""

from __future__ import annotations

from raypar.elastic import state_sources
from raypar.elastic.actions import AdoptPlan, ChoosePlan, KillWorker, WarnUser
from raypar.elastic.events import PlanAdopted, PlanChosen, StopRequested
from raypar.elastic.failures import begin_recovery, mark_worker_lost
from raypar.elastic.hire_and_release_workers import desired_capacity_of_run, spares_of_complete_replicas, start_missing_workers
from raypar.elastic.membership_rules import begin_straggler_watch
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.elastic.seating import assign_seats, refill_seats, with_measured_shares
from raypar.elastic.step_flow_rules import describe_last_checkpoint
from raypar.errors import ClusterError, WorkerLost
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Holdings, Piece, pieces_nobody_holds, plan_moves
from raypar.plan.wording import after_steps, count_noun, format_worker_numbers

MOST_NAMED = 8
"""Lost workers whose seats are named; more of them are listed by their numbers."""
SLOWEST_PER_S = 2e6
"""Elements, with their optimizer state, that a worker receives in a second at least; for time limits."""


def find_plan(m: RunState) -> Phase:
    """Adopt the cheapest plan that the workers allow, ask the planner, or wait for workers."""
    usable = _usable_workers(m)
    wanted = desired_capacity_of_run(m, len(usable))
    if wanted.workers_lacking:
        lost = state_sources.find_lost_pieces(m)
        return end_unrecoverable(m, lost) if lost else await_workers(m, wanted.reason, wanted.workers_lacking)
    grown, m.planned.plan = m.planned.plan, None
    seated, m.planned.members = m.planned.members, ()
    if grown is not None and seated and set(seated) <= set(usable):
        return find_state_for_plan(m, grown, seated)
    if seated:
        grown = None  # someone has left since
    if grown is not None and m.planned.workers < wanted.seats:
        return Phase.PLANNING  # more workers have joined since the plan was chosen
    if grown is not None and grown.world <= len(usable):
        return find_state_for_plan(m, grown, assign_seats(m, grown, usable))
    plan = refill_seats(m, usable) if m.membership.plan is not None else None
    return Phase.PLANNING if plan is None or _would_run_out_of_memory(m, plan[0]) else find_state_for_plan(m, *plan)


def _would_run_out_of_memory(m: RunState, plan: ParallelPlan) -> bool:
    """Whether replicas that divide state, of which fewer are left, have too little memory for their larger parts, and a warning
    if so: they would die, too, one after the other. Then the planner is asked; if it finds nothing that fits, the run waits for
    workers."""
    now = m.membership.plan
    assert now is not None
    if not now.most_zero or plan.world >= now.world or m.memory_lacking(now):  # a prediction that has been wrong says nothing
        return False
    lacking = m.memory_lacking(plan)
    if lacking:
        m.decide(WarnUser(f"with {count_noun(plan.world, 'worker')} {lacking}"), "replicas that are left would hold more state")
    return bool(lacking)


def _usable_workers(m: RunState) -> list[int]:
    """Workers that have answered in this recovery and are not leaving.

    Spares whose replica is incomplete, because other shards of it have not joined, count only where seats would stay empty
    without them.
    """
    answered = set(m.recovery.statuses) - m.membership.leaving
    complete = answered - (m.membership.spares - spares_of_complete_replicas(m))
    return sorted(complete if len(complete) >= len(m.membership.members) else answered)


def request_plan(m: RunState) -> None:
    """Ask the planner for a plan for the workers that are left."""
    usable = len(_usable_workers(m))
    m.timer.limit(m.policy.pass_deadline_s)
    m.decide(ChoosePlan(m.membership.generation, desired_capacity_of_run(m, usable).seats), f"{count_noun(usable, 'worker')}")


def use_chosen_plan(m: RunState, event: PlanChosen) -> Phase | None:
    """Adopt the planner's plan, or wait for workers if the planner has found none."""
    if event.generation != m.membership.generation:
        return None
    if event.plan is None:
        return await_workers(m, event.why)
    usable = _usable_workers(m)
    if event.plan.world > len(usable):  # a worker was asked to leave meanwhile
        return find_plan(m)
    return find_state_for_plan(m, event.plan, assign_seats(m, event.plan, usable))


def find_state_for_plan(m: RunState, plan: ParallelPlan, members: tuple[int, ...]) -> Phase:
    """Find the source of the state that the workers need under the plan. Without one the run is over."""
    r, plan = m.recovery, with_measured_shares(m, plan, members)
    need = dict(zip(members, m.held_pieces(plan), strict=True))
    source = state_sources.find_state_source(m, need)
    if source is None:
        return end_unrecoverable(m, find_pieces_nobody_holds(m, need))
    if source.from_checkpoint and source.done == m.policy.steps_before_run < r.done and m.progress.saved is None:
        text = f"{describe_lost_state(m, find_pieces_nobody_holds(m, need))}; all begin again with the first step"
        m.decide(WarnUser(text), "its results do not depend on when it is executed")
    ways = plan_moves(source.holdings, need)
    seatless = tuple(sorted({way.source for way in ways} - set(members)))
    r.expected = {*members, *seatless}
    told = [r.statuses[worker].skipped_steps for worker in source.holdings if worker in r.statuses]
    skipped = sorted({step for steps in told for step in steps if step < source.done})
    r.order = AdoptPlan(
        m.membership.generation,
        plan,
        members,
        seatless,
        source.done,
        ways,
        source.from_mirror,
        source.from_checkpoint,
        tuple(skipped),
    )
    r.largest_part = max((sum(p.size for p in pieces) for pieces in need.values()), default=0)
    return Phase.ADOPTING


def adopt_plan(m: RunState) -> None:
    """Tell the workers to adopt their parts of the plan."""
    order = m.recovery.order
    assert order is not None
    usual_s = (m.policy.load_s if order.from_checkpoint else m.policy.adopt_s) + m.recovery.largest_part / SLOWEST_PER_S
    # Longer with each attempt: perhaps no worker hangs, and all are slow.
    m.timer.limit(max(usual_s * max(1, m.health.attempts), m.policy.start_deadline_s * m.begins))
    memory = "the mirror" if order.from_mirror else "the workers that hold it"
    where = "the disk, or made anew" if order.from_checkpoint else memory
    m.decide(order, f"{len(order.moves)} pieces of state from {where}, {after_steps(order.done)}")


def find_pieces_nobody_holds(m: RunState, need: Holdings) -> tuple[Piece, ...]:
    """The pieces of `need` that no worker computes with."""
    return pieces_nobody_holds(state_sources.find_live_holders(m, m.recovery.done), need)


def end_unrecoverable(m: RunState, lost: tuple[Piece, ...]) -> Phase:
    """End the run with an error, because no memory and no checkpoint has the `lost` pieces of state."""
    return m.end_run(
        "failed",
        f"the only copies of {len(lost)} pieces of state are lost",
        WorkerLost(
            describe_lost_state(m, lost), cure=f"start again with {', or with '.join(suggest_settings_to_keep_state(m))}"
        ),
    )


def describe_lost_state(m: RunState, lost: tuple[Piece, ...]) -> str:
    """The clause about state that is lost: some of its pieces, and the lost workers that held it, with their seats."""
    names = ", ".join(map(str, lost[:4])) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
    held_by = "the workers' copies differ" if m.trust.doubt else _describe_lost_holders(m)
    if m.health.waited_s:
        held_by += f" and did not answer, in a wait of {m.health.waited_s:.0f} s (elastic.last_copy_wait_s)"
    return f"state {after_steps(m.recovery.done)} is lost: {names}; {held_by}, no mirror and no checkpoint has it"


def _describe_lost_holders(m: RunState) -> str:
    """`worker 4 (stage 0, replica 1) and worker 2 (stage 1, replica 0) held it`: the lost members, by rank."""
    who, plan = m.membership, m.membership.plan
    gone = [(rank, worker) for rank, worker in enumerate(who.members) if worker in who.gone]
    if not gone:
        return "it was lost on its way"
    if plan is None or len(gone) > MOST_NAMED:
        return f"{format_worker_numbers([worker for _, worker in gone])} held it"
    return f"{' and '.join(f'worker {worker} ({plan.seat(rank)})' for rank, worker in gone)} held it"


def suggest_settings_to_keep_state(m: RunState) -> list[str]:
    """Settings that would have saved the state. If all workers are gone, only a checkpoint would have."""
    helps = ["a smaller checkpoint.every" if m.policy.save_every else "checkpoint.every set"]
    if m.health.waited_s:
        helps.append("a larger elastic.last_copy_wait_s, if it was only slow")
    if not (m.policy.restarts or m.policy.steps_before_run or m.trust.doubt):
        helps.append("elastic.lost_state: restart")
    if set(m.membership.members) - m.membership.gone:
        if not (m.policy.mirror_every or m.policy.mirror_cost):
            helps.append("elastic.mirror: auto")
        plan = m.membership.plan
        if plan is not None and min(stage.replicas for stage in plan.stages) == 1:
            helps.append("two replicas of every stage")
    return helps


def count_adoption(m: RunState, event: PlanAdopted) -> Phase | None:
    """Count a worker that has adopted its part of the plan; with the last worker the new generation starts."""
    r = m.recovery
    if event.generation != m.membership.generation or event.worker not in r.expected:
        return None
    r.expected.discard(event.worker)
    r.not_kept = r.not_kept or event.not_kept
    if r.expected:
        return None
    assert r.order is not None
    return start_generation(m, r.order)


def start_generation(m: RunState, order: AdoptPlan) -> Phase:
    """Go on with training under the new plan; workers that leave are dismissed now."""
    who, p, stopping = m.membership, m.progress, m.stopping
    trained = who.members
    who.plan, who.members = order.plan, order.members
    who.had_seat.update(trained, order.members)
    who.spares = (who.spares | set(m.recovery.statuses)) - set(who.members) - who.leaving - who.gone
    p.issued = p.committed = order.done
    m.trust.doubt, m.health.waited_s = "", 0.0
    m.trust.tainted -= set(who.members)
    m.planned.reason = m.planned.plan = None
    if not set(order.members) <= set(trained):
        m.planned.failed_moves = 0
        m.planned.unreachable.clear()
    m.planned.ask_at_s = m.timer.now_s if who.spares else None
    m.planned.declined_at_s = None
    m.hiring.useful = m.hiring.useful if m.hiring.useful_is_final else None
    m.mirror.begin()
    warn_of_changed_shard_counts(m)
    _dismiss_leaving_workers(m, trained)
    begin_straggler_watch(m)
    if stopping.request is not None and (stopping.stop_step is None or stopping.interrupted):
        stopping.stop_step = max(p.committed, p.emitted)
    if m.recovery.not_kept:  # no step can be made from here; after a roll-back the weights are older than what people saw
        stopping.request = stopping.request or StopRequested(m.recovery.not_kept)
        stopping.stop_step, stopping.abandon_at_s = p.committed, None
    if stopping.abandon_at_s is not None and p.committed < p.emitted:
        return end_run_between_generations(m)  # emitted steps would have to be replayed before the state can be saved
    stopping.abandon_at_s = None
    return Phase.RUNNING


def _dismiss_leaving_workers(m: RunState, trained: tuple[int, ...]) -> None:
    """Kill the leaving workers that have no seat; a leaving worker with a seat goes at the next change of plan.

    `trained`: the members of the former plan.
    """
    who = m.membership
    for worker in sorted(who.leaving):
        if worker in who.members:
            m.planned.reason = f"worker {worker} leaves"
        else:
            why = "its state differs from that of its replicas" if worker in m.trust.wrong else "drained"
            m.decide(KillWorker(worker, why), "its work is with the others" if worker in trained else "it had no work")
            mark_worker_lost(m, worker)


def warn_of_changed_shard_counts(m: RunState) -> None:
    """Warn about replayed steps whose shard count changed; their losses may differ from those already reported."""
    plan, done = m.membership.plan, m.progress.committed
    others = m.replay.begin(done, plan.shards_by_layer, m.progress.journalled) if plan is not None else ()
    if others:
        doubted = m.trust.doubted_steps
        m.trust.doubted_steps = range(min(doubted.start, others.start), others.stop) if doubted.stop > done else others
        text = f"steps {others.start + 1} to {others.stop} are executed again with other shards: losses may differ a little"
        m.decide(WarnUser(text), "a sum's order depends on the number of shards")


def await_workers(m: RunState, why: str, workers_lacking: int | None = None) -> Phase:
    """Wait until a worker joins or the time limit is over; end the run if it does not wait for workers.

    If a worker has joined since the statuses were asked for, begin a new recovery at once. `workers_lacking`: the number of
    missing workers, if known.
    """
    who = m.membership
    unasked = who.spares - set(m.recovery.statuses) - who.gone - who.leaving
    if unasked:
        return begin_recovery(m, f"worker {min(unasked)} has joined", counts=False)
    if not m.policy.capacity_s:
        cure = "`raypar resume` goes on from the last checkpoint, also under a smaller plan; or lower elastic.min_workers"
        return m.end_run("failed", why, ClusterError(why, cure=cure))
    more = "more workers" if workers_lacking is None else count_noun(workers_lacking, "more worker")
    m.recovery.awaited = f"{more} of 1 CPU each ({why})"
    return Phase.WAITING


def wait_for_workers(m: RunState) -> None:
    """Say what the run waits for, and start the workers that are missing."""
    m.timer.limit(m.policy.capacity_s)
    tell_what_is_awaited(m)
    start_missing_workers(m)


def tell_what_is_awaited(m: RunState, more: str = "") -> None:
    """Warn people what the run waits for, and for how long; `more` is added to the sentence."""
    assert m.timer.deadline_s is not None
    m.recovery.told_s = m.timer.now_s
    text = f"waiting for {m.recovery.awaited}; {m.timer.deadline_s - m.timer.now_s:.0f} s left"
    m.decide(WarnUser(f"{text} {more}".rstrip()), "nothing can be done without them")


def end_run_between_generations(m: RunState) -> Phase:
    """End the run between two generations: the state is incomplete on the workers, so only the last checkpoint is left."""
    return m.end_run("interrupted", f"interrupted while {m.phase.value}; {describe_last_checkpoint(m)}")
