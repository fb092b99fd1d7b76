"""Rules for the replicas' shares of the blocks: a worker that is slow for long gets fewer, between two steps.

Members, seats, connections and state stay, and so does the generation: only who computes which blocks changes, and no bit
depends on that. The plan is lowered while training goes on. Shares change by what workers have measured, only if that makes a
step shorter by `LEAST_GAIN`, and the next change comes no sooner than after twice as many steps, so that they do not flap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypar.elastic.actions import AdoptShares, PrepareShares, ReportShares, TellUser
from raypar.elastic.block_shares import LEAST_GAIN, Shares, choose_shares, even_shares, plan_with_shares, slowest_replica_s
from raypar.elastic.deadlines import find_mute_workers
from raypar.elastic.events import CallFailed, SharesAdopted, SharesPrepared, StopRequested, Tick
from raypar.elastic.failures import begin_recovery, recover_from_failure
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.elastic.step_flow_rules import issue_steps
from raypar.elastic.stragglers import StragglerFinding
from raypar.errors import CommTimeout
from raypar.plan import ParallelPlan
from raypar.plan.wording import count_noun, format_worker_numbers, word_form

AS_GOOD_AS_WITHOUT = 0.98
"""A straggler is of no use if a step takes this fraction of what it would without its replica, or more."""
LOOKED_AT_EVERY = 5
"""Steps between two looks at the times of workers of which none has become slow, or fast again."""


@dataclass(frozen=True, slots=True)
class _Replicas:
    """The replicas of the stages of one grid of workers, with what their workers have measured."""

    grid: int
    """Index of the grid."""
    workers: Sequence[Sequence[int]]
    """By replica, its workers, which are its shards."""
    seconds: Sequence[float]
    """By replica, how long its slowest worker usually computes for a microbatch."""
    now: Shares
    """The present shares."""
    slow: tuple[int, ...]
    """The stragglers among the workers."""


def reconsider_shares(m: RunState, found: Sequence[StragglerFinding]) -> None:
    """Have a plan with other shares prepared if the workers' times say so. `found`: of the step that was committed last."""
    s, plan = m.sharing, m.membership.plan
    if not _may_share_anew(m) or plan is None:
        return
    if not found and m.progress.committed % LOOKED_AT_EVERY:
        return
    chosen, told, helpless = dict[int, Shares](), list[str](), set[int]()
    for each in _measured_replicas(m, plan):
        best = _best_shares(m, each)
        if best != each.now:
            chosen[each.grid] = best
            told.append(_describe_shares(m, plan, each, best))
        else:
            helpless |= _find_useless_workers(m, each)
    for worker in sorted(helpless - s.told_of_no_use):
        m.decide(TellUser(_describe_no_use(m, worker)), "elastic.stragglers is rebalance")
    s.told_of_no_use |= helpless
    s.of_no_use = helpless | _stragglers_without_other_shares(m, plan)
    if chosen:
        s.asked, s.text = plan_with_shares(plan, chosen, len(m.policy.block_work)), "; ".join(told)
        m.decide(PrepareShares(m.membership.generation, s.asked), s.text)


def _may_share_anew(m: RunState) -> bool:
    """Whether the job wants it, nothing else is going on, and the last change was long enough ago."""
    s, policy = m.sharing, m.policy
    if not (policy.elastic and policy.rebalance_stragglers and policy.block_work):
        return False
    idle = not s.pending and m.planned.reason is None and m.stopping.request is None and not m.membership.leaving
    return idle and m.health.disturbed_at_s is None and m.progress.committed >= s.not_before


def _measured_replicas(m: RunState, plan: ParallelPlan) -> list[_Replicas]:
    """The grids with stragglers, or with uneven shares, whose workers have all been measured for long enough."""
    watch, found = m.health.stragglers, []
    for number, grid in enumerate(plan.grids):
        stage = plan.stages[plan.stages_of_grid[number][0]]
        if not (_has_other_shares(m, plan, number) and (watch.told or stage.share)):
            continue
        workers = [[m.membership.members[rank] for rank in replica] for replica in grid]
        usual_s = [[watch.usual_s(worker) for worker in replica] for replica in workers]
        slow = tuple(sorted(watch.told.intersection(*[[w for replica in workers for w in replica]])))
        known = [max(s for s in replica if s is not None) for replica in usual_s if None not in replica]
        if any(watch.slowdown(worker) <= watch.times for worker in slow):
            continue  # perhaps it is fast again: the watch will say so
        if len(known) == stage.replicas and min(known) > 0 and (slow or stage.share):
            now = stage.share or even_shares(stage.replicas, len(m.policy.block_work))
            found.append(_Replicas(number, workers, known, now, slow))
    return found


def _has_other_shares(m: RunState, plan: ParallelPlan, grid: int) -> bool:
    """Whether a grid has replicas, all of them with blocks, whose workers have no other role.

    The time for a microbatch of a worker with several roles depends on its share, so it says nothing about its speed.
    """
    return plan.one_role_each and 1 < len(plan.grids[grid]) <= len(m.policy.block_work)


def _stragglers_without_other_shares(m: RunState, plan: ParallelPlan) -> set[int]:
    """The stragglers none of whose grids could have other shares."""
    roles = zip(plan.roles, m.membership.members, strict=True)
    told = m.health.stragglers.told
    return {w for of, w in roles if w in told and not any(_has_other_shares(m, plan, role.grid) for role in of)}


def _best_shares(m: RunState, each: _Replicas) -> Shares:
    """The shares that a grid should have; the present ones if others gain too little."""
    work = m.policy.block_work
    even = even_shares(len(each.seconds), len(work))
    best = choose_shares(each.seconds, len(work), each.now)
    if not each.slow and slowest_replica_s(each.seconds, work, even) < LEAST_GAIN * slowest_replica_s(each.seconds, work, best):
        best = even
    now_s, then_s = (slowest_replica_s(each.seconds, work, shares) for shares in (each.now, best))
    return best if now_s >= LEAST_GAIN * then_s else each.now


def _find_useless_workers(m: RunState, each: _Replicas) -> set[int]:
    """The stragglers without whose replica a step would be as short: there are too few blocks, or it is too slow."""
    work, found = m.policy.block_work, set[int]()
    with_s = slowest_replica_s(each.seconds, work, each.now)
    for replica, workers in enumerate(each.workers):
        slow = set(workers) & set(each.slow)
        others = [s for r, s in enumerate(each.seconds) if r != replica]
        if not slow:
            continue
        shares = choose_shares(others, len(work), even_shares(len(others), len(work)))
        if with_s >= AS_GOOD_AS_WITHOUT * slowest_replica_s(others, work, shares):
            found |= slow
    return found


# -- the change ------------------------------------------------------------------------------------------------------------


def take_prepared_shares(m: RunState, event: SharesPrepared) -> Phase | None:
    """Change the shares as soon as no step is in flight, unless something else has been planned since."""
    s = m.sharing
    if event.generation != m.membership.generation or s.asked != event.plan:
        return None
    s.asked = None
    if event.why:
        s.not_before = m.policy.job_steps
        s.of_no_use |= m.health.stragglers.told
        m.decide(TellUser(f"shares stay as they are: {event.why}"), "the plan cannot be made")
    elif m.planned.reason is None and m.stopping.request is None and not m.membership.leaving:
        s.plan = event.plan
        return issue_steps(m)
    return None


def forget_prepared_shares(m: RunState, event: SharesPrepared) -> None:
    """Drop a plan that comes at another time: what was measured may have changed when training goes on."""
    if event.generation == m.membership.generation and m.sharing.asked == event.plan:
        m.sharing.asked = None


def adopt_shares(m: RunState) -> None:
    """Tell the members their blocks of the plan with other shares."""
    s, who = m.sharing, m.membership
    assert s.plan is not None
    s.expected, s.fits = set(who.members), True
    m.timer.limit(m.policy.adopt_s)
    m.decide(AdoptShares(who.generation, s.plan, m.progress.committed), s.text)


def count_adopted_shares(m: RunState, event: SharesAdopted) -> Phase | None:
    """Count a member that has taken its blocks; with the last one training goes on.

    Where someone needs other connections, or other stages, all begin a new generation with that plan.
    """
    s, who = m.sharing, m.membership
    if event.generation != who.generation or event.worker not in s.expected:
        return None
    s.expected.discard(event.worker)
    s.fits &= event.fits
    if s.expected:
        return None
    plan, s.plan = s.plan, None
    assert plan is not None
    s.note_change(m.progress.committed, m.policy.straggler_steps)
    if not s.fits:
        m.planned.plan, m.planned.members = plan, who.members
        return begin_recovery(m, s.text, counts=False)
    who.plan = plan
    since_s = m.timer.now_s if m.progress.last_commit_s is None else m.progress.last_commit_s
    m.decide(ReportShares(s.text, plan, m.timer.now_s - since_s, m.progress.committed), "its workers hold what they need")
    return Phase.RUNNING


def stop_after_rebalancing(m: RunState, event: StopRequested) -> None:
    """Issue no more steps once the members have their blocks."""
    if m.stopping.request is None or (event.interrupt and not m.stopping.interrupted):
        m.stopping.request = event
        m.stopping.stop_step = max(m.progress.issued, m.progress.emitted)


def check_rebalancing_deadline(m: RunState, event: Tick) -> Phase | None:
    """Begin a recovery if a member does not take its blocks in time."""
    mute = set(find_mute_workers(m)) or (m.sharing.expected if m.timer.expired else set())
    if not mute:
        return None
    what = (
        f"{format_worker_numbers(mute)} {word_form(mute, 'has', 'have')} not taken other blocks for {m.timer.elapsed_s:.1f} s"
    )
    return recover_from_failure(m, CallFailed("aborted", CommTimeout(what), generation=m.membership.generation))


# -- words -----------------------------------------------------------------------------------------------------------------


def _describe_shares(m: RunState, plan: ParallelPlan, each: _Replicas, best: Shares) -> str:
    """`worker 2 takes 2.0 times as long as the others: it gets 2 of 12 blocks, they 5`."""
    blocks, watch, slow = count_noun(len(m.policy.block_work), "block"), m.health.stragglers, each.slow
    if not slow:
        where = f" of stage {','.join(map(str, plan.stages_of_grid[each.grid]))}" if len(plan.grids) > 1 else ""
        return f"the replicas{where} are equally fast again: they get {_span(best)} of {blocks} each"
    fewer = [not set(workers).isdisjoint(slow) for workers in each.workers]
    own, theirs = ([n for n, few in zip(best, fewer, strict=True) if few is one] for one in (True, False))
    times = " and ".join(f"{watch.slowdown(worker):.1f}" for worker in slow)
    replica = word_form(own, "its replica gets", "their replicas get")
    gets = replica if len(each.workers[0]) > 1 else word_form(slow, "it gets", "they get")
    text = f"{format_worker_numbers(slow)} {word_form(slow, 'takes', 'take')} {times} times as long as the others: {gets}"
    others = f", {'they' if gets == 'it gets' else 'the others'} {_span(theirs)}" if theirs else ""
    return f"{text} {_span(own)} of {blocks}{others}"


def _span(shares: Sequence[int]) -> str:
    """`5`, `5 or 6`, `3 to 6`: the numbers of blocks of some replicas."""
    low, high = min(shares), max(shares)
    return str(low) if low == high else f"{low} {'or' if high == low + 1 else 'to'} {high}"


def _describe_no_use(m: RunState, worker: int) -> str:
    slowdown, blocks = m.health.stragglers.slowdown(worker), count_noun(len(m.policy.block_work), "block")
    return (
        f"worker {worker} takes {slowdown:.1f} times as long as the others: whatever its share of the {blocks}, a step takes "
        "as long as without it"
    )
