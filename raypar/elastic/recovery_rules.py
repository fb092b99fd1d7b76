"""From one generation to the next: the rules of recovery and rescaling (DESIGN 4.7 to 4.9, 4.13).

    CLAIMING -> STANDING -> (SETTLING) -> (PLANNING) -> ADOPTING -> RUNNING
        ^           |            |             |            |
        +-----------+------------+-------------+------------+   whoever is lost on the way begins a new generation
                                               |
                                               +-> WAITING      until there are workers enough

The order of answers to a loss is that of their cost: fill the empty seats from workers that wait; go on with the replicas that
are left (nothing moves); a new plan. State comes from whoever holds it; else everybody goes back to the newest cut of the
mirror that is complete; else to the checkpoint. What is executed again is compared with the journal and emits nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raypar.elastic import last_copy, state_sources, stragglers
from raypar.elastic.actions import (
    AdoptPlan,
    ApplyKeptGradients,
    ChoosePlan,
    ClaimGeneration,
    FenceWorkers,
    KillWorker,
    Notice,
    Warn,
    WriteJournal,
)
from raypar.elastic.digest_check import check_digests_in_recovery
from raypar.elastic.events import (
    CallFailed,
    CheckpointFailed,
    DriverTakenOver,
    Event,
    GenerationClaimed,
    PlanAdopted,
    PlanChosen,
    StepEmitted,
    StopRequested,
    Tick,
    ValidationEmitted,
    WorkerSettled,
    WorkerStatusReported,
)
from raypar.elastic.failure_budget import mark_lost, record_death, repeated_out_of_memory, step_failed_too_often
from raypar.elastic.member import StaleGeneration, WorkerStatus
from raypar.elastic.phases import Phase
from raypar.elastic.replay import Replay, shards_of
from raypar.elastic.seating import assign_seats, refill_seats
from raypar.elastic.worker_names import name_workers
from raypar.errors import ClusterError, CommError, WorkerLost, first_line
from raypar.plan import ParallelPlan
from raypar.plan.pieces import Piece, missing_pieces, plan_moves

if TYPE_CHECKING:
    from raypar.elastic.run_machine import RunMachine


SLOWEST_PER_S = 2e6
"""Elements, with what the optimizer keeps for them, that a worker takes over in a second, at the least."""


SAY_S = 30.0
"""How often people are told again what is waited for."""


@dataclass
class Recovery:
    """What is known on the way to the next generation."""

    why: str
    expected: set[int] = field(default_factory=set)
    """Workers whose answer the phase waits for."""
    stands: dict[int, WorkerStatus] = field(default_factory=dict)
    done: int = 0
    order: AdoptPlan | None = None
    symptom: bool = False
    """It began with what a death does to others; whose death it was, and why, is not known yet."""
    awaited: str = ""
    told_s: float = 0.0
    """What is waited for, and when people were told last."""
    waited_from_s: float | None = None
    """When the wait for silent workers with an only copy began (`last_copy`); None: nobody is waited for."""
    holders: tuple[int, ...] = ()
    """The workers that are waited for."""
    former: AdoptPlan | None = None
    """The order that an earlier recovery gave last, if any: some workers may have adopted that plan."""


# -- the way in ----------------------------------------------------------------------------------------------------------


def begin(m: RunMachine, why: str, *, counts: bool = True) -> None:
    """A new generation is needed. What is in flight will be settled, or never happened.

    `counts`: it is an attempt at the next step, of which there are `max_attempts`. What was planned (somebody leaves, joins)
    and deaths that are nobody's fault (a machine was taken away) are none: there may be any number of them.
    """
    if m.phase in (Phase.VALIDATING, Phase.SAVING, Phase.ENDING):
        m.served = m.emitted - 1  # what was being served there is due again
    m._due.clear()
    m._reports.clear()
    m._digests.clear()
    m._busy.clear()
    m._probing = m._we_aborted = False
    m.choosing = False
    m.began_s = m._now_s if m.began_s is None else m.began_s
    m.attempts += counts
    if m.interrupted and m.interrupt_at_s is None:
        m.interrupt_at_s = m._now_s + m.policy.interrupt_s
    if m.attempts > m.policy.max_attempts:
        m.over("failed", f"{m.attempts} attempts without a step between them: {why}", step_failed_too_often(m))
        return
    m.recovery = Recovery(why, former=m.recovery.order or m.recovery.former)
    m.generation += 1
    m.go(Phase.CLAIMING, deadline_s=m.policy.claim_s)
    m.decide(ClaimGeneration(m.generation), why)


def taken_over(m: RunMachine, event: Event) -> None:
    """This driver follows one that is gone: its workers keep the state, its journal says what people have seen."""
    assert isinstance(event, DriverTakenOver)
    known = (shards_of(plan) for plan in (m.plan, event.plan) if plan is not None)
    alone = all(max(shards) == 1 for shards in known)  # else there may have been others before, of which nothing is known
    m.replay = Replay(m.policy.first, shards_of(event.plan) if alone else None)
    m.generation, m.plan, m.members = event.generation, event.plan, event.members
    m.issued = m.committed = m.emitted = m.journalled = event.seen
    m.served = event.seen - 1  # what is due there may not have been served
    m.validated, m.saved = event.validated, event.saved
    m.hiring, m.placed = set(event.starting), set(event.starting)
    m.hired = max(m.hired, event.hired)
    m.last_commit_s = None if event.idle_s is None else m._now_s - event.idle_s
    m.spares = set(event.workers) - set(event.members) - m.hiring
    m.clock.complete = True  # not known: rather an error than a long way from the beginning
    m.gone = set(event.members) - set(event.workers)
    begin(m, "a new driver takes over")


def disturbed(m: RunMachine, event: Event) -> None:
    """A worker is lost, or a group broke."""
    assert isinstance(event, CallFailed)
    counts, symptom = True, event.kind == "aborted"
    if event.kind == "lost" and event.worker is not None:
        seated_worker = event.worker in m.members and event.worker not in m.gone
        counts = record_death(m, event)
        if not seated_worker:
            return
    elif event.generation is not None and event.generation < m.generation:
        return  # a late symptom of what has been dealt with
    if repeated_out_of_memory(m, event):
        return
    m.failures.append(event)
    begin(m, first_line(event.error), counts=counts)
    m.recovery.symptom = symptom


# -- the phases ----------------------------------------------------------------------------------------------------------


def claimed(m: RunMachine, event: Event) -> None:
    """Ours: everybody is asked to leave what it does and to say where it stands."""
    assert isinstance(event, GenerationClaimed)
    if event.generation != m.generation:
        return
    if not event.ok:
        m.over("deposed", f"generation {event.generation} was claimed by another driver, which goes on with the run")
        return
    r = m.recovery
    # Only now: if it was this driver that stood still, another one may have gone on with them, and its claim comes first.
    for worker in sorted(m.silent):
        m.decide(KillWorker(worker, "did not answer"), "recovery never waits for a worker that hangs")
    m.silent.clear()
    r.expected = (set(m.members) | m.spares) - m.gone
    m.go(Phase.STANDING, deadline_s=m.stand_deadline_s())
    if r.expected:
        m.decide(FenceWorkers(m.generation, tuple(sorted(r.expected))), r.why)
    all_stood(m)


def stood(m: RunMachine, event: Event) -> None:
    """One more is out of the old generation."""
    assert isinstance(event, WorkerStatusReported)
    if event.generation == m.generation and event.stand.worker in m.recovery.expected:
        m.recovery.stands[event.stand.worker] = event.stand
        if event.stand.worker in m.recovery.holders:
            came_back(m, event.stand.worker)
        all_stood(m)


def came_back(m: RunMachine, worker: int) -> None:
    """A worker that was waited for has answered: what it did may take as long again, and must not be broken off again."""
    r = m.recovery
    assert r.waited_from_s is not None
    began_s = r.waited_from_s if m.last_commit_s is None else m.last_commit_s
    m.patience_s = max(m.patience_s, 2 * (m._now_s - began_s))
    waited_s = m._now_s - r.waited_from_s
    m.decide(Notice(f"worker {worker} has answered, after a wait of {waited_s:.1f} s; its state is whole"), "it was waited for")


def all_stood(m: RunMachine) -> None:
    """Commit or void the open step: committed if anybody has applied it (then somebody held the whole vote)."""
    r = m.recovery
    if r.expected - set(r.stands) or not check_digests_in_recovery(m):
        return
    holders = {w: s.done for w, s in r.stands.items() if s.done is not None and w not in m.tainted}
    r.done = max(holders.values(), default=m.committed)
    late = {w for w, done in holders.items() if done == r.done - 1 and r.stands[w].votable}
    known: dict[int, object] = {}
    for stand in r.stands.values():
        known.update(stand.outcomes)
    if not late:
        catch_up(m)
        return
    r.expected = late
    m.go(Phase.SETTLING, deadline_s=m.stand_deadline_s())
    m.decide(
        ApplyKeptGradients(m.generation, tuple(sorted(late)), r.done - 1, known[r.done - 1]),
        f"step {r.done - 1} was applied by {sorted(set(holders) - late)}: the whole vote was held",
    )


def settled_late(m: RunMachine, event: Event) -> None:
    """One more stands where the others do."""
    assert isinstance(event, WorkerSettled)
    r = m.recovery
    worker = event.stand.worker
    if event.generation != m.generation or worker not in r.expected:
        return
    r.expected.discard(worker)
    r.stands[worker] = event.stand
    if not r.expected:
        catch_up(m)


def catch_up(m: RunMachine) -> None:
    """All that stand, stand at one step: what the driver had not heard of is committed; then a plan is needed."""
    done = m.recovery.done
    for step in range(max(m.committed, m.journalled), done):
        m.journalled = step + 1
        m.decide(WriteJournal(step), f"step {step} was found applied")
    m.committed = m.issued = max(m.committed, done)
    find_plan(m)


def find_plan(m: RunMachine) -> None:
    """The cheapest answer that the workers allow."""
    r = m.recovery
    usable = sorted(set(r.stands) - m.leaving)
    if len(usable) < m.policy.min_workers:
        lost = state_sources.lost_pieces(m)
        if lost:
            unrecoverable(m, lost)
        else:
            least = m.policy.min_workers
            left = f"{len(usable)} worker{'s are' if len(usable) != 1 else ' is'} left, min_workers is {least}"
            wait(m, left, least - len(usable))
        return
    grown, m.next_plan = m.next_plan, None
    if grown is not None and m.next_for < min(len(usable), m.wanted):
        choose(m, usable)  # more have come since it was chosen
        return
    if grown is not None and grown.world <= len(usable):
        adopt(m, grown, assign_seats(m, grown, usable))
        return
    plan = refill_seats(m, usable) if m.plan is not None else None
    if plan is not None:
        adopt(m, *plan)
        return
    choose(m, usable)


def choose(m: RunMachine, usable: list[int]) -> None:
    """Ask the planner."""
    m.go(Phase.PLANNING, deadline_s=m.policy.pass_deadline_s)
    m.decide(ChoosePlan(m.generation, min(len(usable), m.wanted)), f"{len(usable)} workers")


def plan_chosen(m: RunMachine, event: Event) -> None:
    """The planner's plan, or none."""
    assert isinstance(event, PlanChosen)
    if event.generation != m.generation:
        return
    if event.plan is None:
        wait(m, event.why)
        return
    usable = sorted(set(m.recovery.stands) - m.leaving)
    if event.plan.world > len(usable):  # somebody was asked to leave meanwhile
        find_plan(m)
        return
    adopt(m, event.plan, assign_seats(m, event.plan, usable))


def adopt(m: RunMachine, plan: ParallelPlan, members: tuple[int, ...]) -> None:
    """Find the state, and let everybody take its part."""
    r = m.recovery
    need = dict(zip(members, m.layout(plan), strict=True))
    source = state_sources.find_state(m, need)
    if source is None:
        unrecoverable(m, missing_pieces(state_sources.live_holders(m, r.done), need))
        return
    ways = plan_moves(source.have, need)
    seatless = tuple(sorted({way.source for way in ways} - set(members)))
    r.expected = {*members, *seatless}
    r.order = AdoptPlan(m.generation, plan, members, seatless, source.done, ways, source.cut, source.load)
    most = max((sum(p.size for p in pieces) for pieces in need.values()), default=0)
    usual_s = (m.policy.load_s if source.load else m.policy.adopt_s) + most / SLOWEST_PER_S
    m.go(Phase.ADOPTING, deadline_s=usual_s * max(1, m.attempts))  # longer each time: perhaps nobody hangs, and all are slow
    where = "the disk, or made anew," if source.load else "the mirror" if source.cut else "the workers that hold it"
    m.decide(r.order, f"{len(ways)} pieces of state from {where}, after {source.done} steps")


def unrecoverable(m: RunMachine, lost: tuple[Piece, ...]) -> None:
    """Nobody has it, nowhere."""
    names = ", ".join(map(str, lost[:4])) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
    gone = m.gone & set(m.members)
    held_by = "the workers' copies differ" if m.doubt else f"{name_workers(gone)} held it"
    if m.waited_s:
        held_by += f" and did not answer, in a wait of {m.waited_s:.0f} s (elastic.last_copy_wait_s)"
    m.over(
        "failed",
        f"the only copies of {len(lost)} pieces of state are lost",
        WorkerLost(
            f"state after {m.recovery.done} steps is lost: {names}; {held_by}, no mirror and no checkpoint has it",
            cure=f"start again with {', or with '.join(what_would_help(m))}",
        ),
    )


def what_would_help(m: RunMachine) -> list[str]:
    """Against such a loss: nothing in memory where all are gone, and only what the run did not have."""
    helps = ["checkpoint.every set"]
    if m.waited_s:
        helps.append("a larger elastic.last_copy_wait_s, if it was only slow")
    if set(m.members) - m.gone:
        if not (m.policy.mirror_every or m.policy.mirror_cost):
            helps.append("elastic.mirror: auto")
        if m.plan is not None and min(stage.replicas for stage in m.plan.stages) == 1:
            helps.append("two replicas of every stage")
    return helps


def adopted(m: RunMachine, event: Event) -> None:
    """The last one opens the new generation."""
    assert isinstance(event, PlanAdopted)
    r = m.recovery
    if event.generation != m.generation or event.worker not in r.expected:
        return
    r.expected.discard(event.worker)
    if r.expected:
        return
    assert r.order is not None
    trained = m.members
    m.plan, m.members = r.order.plan, r.order.members
    rerun_otherwise(m, r.order)
    m.spares = (m.spares | set(r.stands)) - set(m.members) - m.leaving - m.gone
    m.issued = m.committed = r.order.done
    m.clock.begin()
    m.doubt, m.waited_s = "", 0.0
    m.tainted -= set(m.members)
    m.pause_for = m.next_plan = None
    m.grow_at_s = m._now_s if m.spares else None
    for worker in sorted(m.leaving):
        if worker in m.members:
            m.pause_for = f"worker {worker} leaves"
        else:
            why = "its state differs from that of its replicas" if worker in m.wrong else "drained"
            m.decide(KillWorker(worker, why), "its work is with the others" if worker in trained else "it had no work")
            mark_lost(m, worker)
    if m.stop is not None and (m.stop_at is None or m.interrupted):
        m.stop_at = max(m.committed, m.emitted)
    if m.interrupt_at_s is not None and m.committed < m.emitted:
        interrupted(m)  # what people have seen would have to be executed again first
        return
    m.interrupt_at_s = None
    stragglers.begin_straggler_watch(m)
    m.go(Phase.RUNNING)
    m.advance()


def rerun_otherwise(m: RunMachine, order: AdoptPlan) -> None:
    """What people have seen of steps that are executed again with other shards is no measure for them."""
    others = m.replay.begin(order.done, shards_of(order.plan), m.journalled)
    if others:
        m.doubted = range(min(m.doubted.start, others.start), others.stop) if m.doubted.stop > order.done else others
        text = f"steps {others.start + 1} to {others.stop} are executed again with other shards: losses may differ a little"
        m.decide(Warn(text), "a sum's order depends on the number of shards")


def wait(m: RunMachine, why: str, lacking: int | None = None) -> None:
    """Until somebody joins, or the deadline; not at all where nobody can, or where somebody has, since all were asked where
    they stand. `lacking`: how many workers, where that is known."""
    unasked = m.spares - set(m.recovery.stands) - m.gone - m.leaving
    if unasked:
        begin(m, f"worker {min(unasked)} has joined", counts=False)
        return
    if not m.policy.capacity_s:
        cure = "`raypar resume` goes on from the last checkpoint, also under a smaller plan; or lower elastic.min_workers"
        m.over("failed", why, ClusterError(why, cure=cure))
        return
    m.go(Phase.WAITING, deadline_s=m.policy.capacity_s)
    more = "more workers" if lacking is None else f"{lacking} more worker{'s' * (lacking > 1)}"
    m.recovery.awaited = f"{more} of 1 CPU each ({why})"
    say_what_is_awaited(m)
    m.hire()


def say_what_is_awaited(m: RunMachine, more: str = "") -> None:
    """At once, then every `SAY_S`."""
    assert m._deadline_s is not None
    m.recovery.told_s = m._now_s
    text = f"waiting for {m.recovery.awaited}; {m._deadline_s - m._now_s:.0f} s left"
    m.decide(Warn(f"{text} {more}".rstrip()), "nothing can be done without them")


# -- what may come at any of them ------------------------------------------------------------------------------------------


def lost_recovering(m: RunMachine, event: Event) -> None:
    """Symptoms of the old generation are expected; a death or a failure of the new one begins the next."""
    assert isinstance(event, CallFailed)
    if event.kind == "lost" and event.worker is not None:
        known = event.worker in m.gone
        counts = record_death(m, event)
        if not (counts or known) and m.recovery.symptom:
            m.attempts, m.recovery.symptom = m.attempts - 1, False
        if known or m.phase is Phase.WAITING or repeated_out_of_memory(m, event):
            return
        m.failures.append(event)
        if m.phase is Phase.STANDING:
            m.recovery.expected.discard(event.worker)
            m.recovery.stands.pop(event.worker, None)
            all_stood(m)
        elif m.phase is not Phase.CLAIMING:
            begin(m, first_line(event.error), counts=counts)
    elif event.kind in ("user", "error"):
        m.fail(event)
    elif event.generation == m.generation and m.phase is not Phase.CLAIMING:
        m.failures.append(event)
        begin(m, first_line(event.error))


def stop_recovering(m: RunMachine, event: Event) -> None:
    """The new generation saves what it has, and ends. After Ctrl-C it has `interrupt_s` for that; nobody waits for workers."""
    assert isinstance(event, StopRequested)
    m.stop = event
    if event.interrupt and m.phase is Phase.WAITING:
        interrupted(m)
    elif event.interrupt:
        m.interrupt_at_s = m._now_s + m.policy.interrupt_s


def interrupted(m: RunMachine) -> None:
    """Ended between two generations: the state is spread, so the last checkpoint is what is left."""
    left = f"the last checkpoint is of step {m.saved}" if m.saved else "nothing is saved"
    m.over("interrupted", f"interrupted while {m.phase.value}; {left}")


def tick_recovering(m: RunMachine, event: Event) -> None:
    """Who does not answer in time is given up: recovery never waits for it."""
    assert isinstance(event, Tick)
    if m.interrupt_at_s is not None and m._now_s >= m.interrupt_at_s:
        interrupted(m)
        return
    if m.phase is Phase.WAITING:
        m.hire()
        if m._now_s - m.recovery.told_s >= SAY_S and m._deadline_s is not None and m._now_s < m._deadline_s:
            say_what_is_awaited(m)
    r = m.recovery
    silent = sorted(r.expected - set(r.stands)) if m.phase is Phase.STANDING else sorted(r.expected)
    asked = m.phase in (Phase.STANDING, Phase.SETTLING, Phase.ADOPTING)
    hopeless = asked and silent and set(silent) <= event.unheard and m._now_s - m._since_s > m.policy.hopeless_s
    due = m._deadline_s is not None and m._now_s >= m._deadline_s
    if not (hopeless or due or (m.phase is Phase.STANDING and r.waited_from_s is not None)):
        return
    if m.phase is Phase.WAITING:
        cure = "add workers and use `raypar resume`, or lower elastic.min_workers"
        what = f"no workers came within {m.policy.capacity_s:g} s; awaited were {r.awaited}"
        m.over("failed", "no workers came", ClusterError(what, cure=cure))
    elif m.phase in (Phase.CLAIMING, Phase.PLANNING):
        what = f"{m.phase.value} took more than {m._now_s - m._since_s:.0f} s"
        m.over("failed", what, ClusterError(what, cure="look at the head node: it does not answer"))
    elif m.phase is Phase.STANDING:
        wait_or_give_up(m, event, silent)
    else:
        # Workers that answer pings wait for others, or are slow: the next generation asks them where they stand.
        mute = set(silent) & event.unheard
        give_up(m, mute - set(last_copy.only_holders(m, mute - event.ended)))
        begin(m, f"{name_workers(silent)} did not answer while {m.phase.value}")


def wait_or_give_up(m: RunMachine, event: Tick, silent: list[int]) -> None:
    """Deal with workers that have not said where they stand in time: wait while some of them hold the only copy of something
    and their processes live, up to `last_copy_wait_s`; else give all of them up."""
    r = m.recovery
    over = r.waited_from_s is not None and m._deadline_s is not None and m._now_s >= m._deadline_s
    holders = last_copy.only_holders(m, set(silent) - event.ended)
    if holders and not over and m.policy.last_copy_wait_s:
        if r.waited_from_s is None:
            r.waited_from_s = r.told_s = m._now_s
            m._deadline_s = m._now_s + m.policy.last_copy_wait_s
        elif holders == r.holders and m._now_s - r.told_s < SAY_S:
            return
        r.holders, r.awaited = holders, last_copy.waiting_text(m, holders, event.unheard)
        say_what_is_awaited(m, f"(elastic.last_copy_wait_s), {last_copy.outcome_text(m, holders)}")
        return
    more = ""
    if holders and r.waited_from_s is not None:
        m.waited_s = m._now_s - r.waited_from_s
        more = f", in a wait of {m.waited_s:.0f} s"
    give_up(m, silent)
    begin(m, f"{name_workers(silent)} did not answer while {m.phase.value}{more}")


def give_up(m: RunMachine, silent: Iterable[int]) -> None:
    """Count these workers as lost; they are killed once the next generation is claimed."""
    for worker in silent:
        mark_lost(m, worker)
        m.silent.add(worker)


# -- bookkeeping of effects that are still under way --------------------------------------------------------------------------


def emitted_aside(m: RunMachine, event: Event) -> None:
    """Counted; nothing is issued before the new generation runs."""
    assert isinstance(event, StepEmitted)
    m.count_emitted(event)


def validation_emitted_aside(m: RunMachine, event: Event) -> None:
    """Seen; it is not due again."""
    assert isinstance(event, ValidationEmitted)
    if event.stop is not None and m.stop is None:
        m.stop = StopRequested(event.stop)


def save_failed_aside(m: RunMachine, event: Event) -> None:
    """A share of the checkpoint was lost with its worker; the next one will be complete."""
    assert isinstance(event, CheckpointFailed)
    m.saving = None
    if not spoilt(event.error):
        m._save_error = event.error
    m.decide(Warn(f"the checkpoint after {event.done} steps was not completed ({first_line(event.error)})"), "training goes on")


def spoilt(error: Exception) -> bool:
    """Whether a checkpoint failed because a worker died or left meanwhile, not because of the disk: it can be written again."""
    return isinstance(error, (WorkerLost, CommError, StaleGeneration))
