"""The 1F1B schedule: warmup, steady phase, cooldown (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.errors import ScheduleError
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.schedule.instructions import Backward, Compute, Forward, Schedule


def replicas_by_position(plan: ParallelPlan) -> tuple[int, ...]:
    """The number of replicas of each position."""
    return tuple(len(grid) for grid in plan.grids)


def has_parallel_pipelines(plan: ParallelPlan) -> bool:
    """Whether replica r of every position runs the same microbatches, so that each replica is a pipeline by itself."""
    return len({(stage.replicas, stage.share) for stage in plan.stages}) == 1


def default_warmups(plan: ParallelPlan) -> tuple[int, ...]:
    """By position, the forwards of a replica before its first backward: enough to keep every later stage busy.

    w of the last stage is 1; w_s = 1 + ceil(w_(s+1) R_(s+1) / R_s), which is p - s when all stages have as many replicas.
    """
    replicas = replicas_by_position(plan)
    counts = [1]
    for own, after in zip(replicas[-2::-1], replicas[:0:-1], strict=True):
        counts.append(1 - -counts[-1] * after // own)
    return tuple(reversed(counts))


def resolve_warmups(plan: ParallelPlan, given: Sequence[int] | None) -> tuple[int, ...]:
    """By position, the forwards before the first backward: `given` once checked, or `default_warmups` if it is None."""
    if given is None:
        return default_warmups(plan)
    if len(given) != len(plan.grids) or min(given) < 1:
        raise ScheduleError(
            f"warmup {list(given)} for {len(plan.grids)} stages",
            cure="give one number >= 1 per stage: forwards before the first B",
        )
    return tuple(given)


def one_f_one_b(routing: MicrobatchRouting, warmup: Sequence[int] | None = None) -> Schedule:
    """1F1B orders: at most `warmup` activations alive (p - s by default); bubble (p-1)/m of the ideal time.

    The default lets every plan run: `warmups_that_run`. A given `warmup` is taken as it is.
    """
    plan = routing.plan
    by_position = resolve_warmups(plan, warmup)
    depths = [by_position[plan.only_role(rank).grid] for rank in range(plan.world)]
    if warmup is None and not has_parallel_pipelines(plan):
        depths = warmups_that_run(routing, depths)
    orders: list[tuple[Compute, ...]] = []
    for rank in range(plan.world):
        (stage,) = plan.stages_of(rank)
        mine = routing.microbatches_of_worker(stage, rank)
        ahead = min(depths[rank], len(mine)) - 1 if mine else 0
        order: list[Compute] = [Forward(stage, m) for m in mine[:ahead]]
        for m, behind in zip(mine[ahead:], mine, strict=False):
            order += [Forward(stage, m), Backward(stage, behind)]
        order += [Backward(stage, m) for m in mine[len(mine) - ahead :]]
        orders.append(tuple(order))
    return tuple(orders)


def warmups_that_run(routing: MicrobatchRouting, warmups: Sequence[int]) -> list[int]:
    """By rank, the least warmups, from `warmups` up, with which no workers wait for each other in a circle.

    Where replica counts differ, the neighbours of a microbatch on one replica of a stage are on several of the next: a backward
    may then need forwards that its own worker has put behind it. All orders are run as far as they come. If they stop, the
    worker whose forward is the next to enter, held back by its own warmup only, gets one more; then they are run again.

    There is such a worker until all finish. Of the microbatches that are not yet through all forwards let x be the first to
    enter: it stands before a worker that has done all forwards before x, so waits for a backward. With all forwards done, the
    first microbatch that is not yet through all backwards finds its worker waiting for it, since all keep the order of entry.
    """
    run = _OrdersRun(routing)
    warmups = list(warmups)
    while (held_back := run.held_back(warmups)) is not None:
        for shard in range(routing.plan.stages[run.stage[held_back]].shards):
            warmups[held_back + shard] += 1
    return warmups


class _OrdersRun:
    """The 1F1B orders of some warmups, run as far as they come; only one shard of each replica is followed."""

    stage: dict[int, int]
    """Rank -> its stage."""
    mine: dict[int, tuple[int, ...]]
    """Rank -> its microbatches in order of entry."""
    rounds: list[list[int]]
    """Stage -> microbatch -> end of the round in which owners add its gradients, if they are scattered: all up to there have to
    begin before its backward is over, if they find no room on their way."""
    place: list[dict[int, tuple[int, int]]]
    """Stage -> microbatch -> (rank that runs it, index among the microbatches of that rank)."""

    def __init__(self, routing: MicrobatchRouting) -> None:
        plan = routing.plan
        firsts = [(row[0], replica) for grid in plan.grids for replica, row in enumerate(grid)]
        self.stage = {rank: plan.stages_of(rank)[0] for rank, _ in firsts}
        self.mine = {rank: routing.microbatches_of_replica(self.stage[rank], replica) for rank, replica in firsts}
        self.entry = {m: turn for turn, m in enumerate(routing.entry_order)}
        self.rounds = [[of_round.stop for of_round in rounds for _ in of_round] for rounds in routing.rounds_of_stage]
        self.place = [{} for _ in plan.stages]
        for rank, microbatches in self.mine.items():
            self.place[self.stage[rank]] |= {m: (rank, index) for index, m in enumerate(microbatches)}

    def held_back(self, warmups: Sequence[int]) -> int | None:
        """The rank of the first microbatch to enter whose forward only a warmup holds back; None if all orders finish."""
        forwards, backwards = dict.fromkeys(self.mine, 0), dict.fromkeys(self.mine, 0)
        handed_over = _HandedOver(self.rounds)
        runnable = list(self.mine)
        held_back: dict[int, int] = {}  # rank -> turn of its next forward, which nothing else holds back
        while runnable:
            rank = runnable.pop()
            stage, mine = self.stage[rank], self.mine[rank]
            held_back.pop(rank, None)
            while backwards[rank] < len(mine):
                done = forwards[rank]
                ready = done < len(mine) and self._is_done(forwards, stage - 1, mine[done])
                if done < min(backwards[rank] + warmups[rank], len(mine)):
                    if not ready:
                        break
                    forwards[rank] += 1
                    neighbour, microbatch = stage + 1, mine[done]
                else:
                    microbatch = mine[backwards[rank]]
                    is_here = self._is_done(backwards, stage + 1, microbatch)
                    if is_here and handed_over.begin(stage, microbatch):  # others may have waited for it
                        runnable += [other for other, at in self.stage.items() if at == stage and other != rank]
                    if not is_here or not handed_over.has_room(stage, microbatch):
                        if ready:
                            held_back[rank] = self.entry[mine[done]]
                        break
                    backwards[rank] += 1
                    neighbour = stage - 1
                if 0 <= neighbour < len(self.place):
                    runnable.append(self.place[neighbour][microbatch][0])
        finished = all(backwards[rank] == len(mine) for rank, mine in self.mine.items())
        return None if finished else min(held_back, key=held_back.__getitem__)

    def _is_done(self, counts: dict[int, int], stage: int, microbatch: int) -> bool:
        """Whether a stage has computed a microbatch; one that does not exist, before the first or behind the last, always."""
        if not 0 <= stage < len(self.place):
            return True
        rank, index = self.place[stage][microbatch]
        return counts[rank] > index


class _HandedOver:
    """Which microbatches have begun to hand over their gradients, where these are scattered, if none finds room on its way."""

    def __init__(self, rounds: Sequence[Sequence[int]]) -> None:
        """`rounds`: see `_OrdersRun.rounds`."""
        self._rounds = rounds
        self._begun: list[set[int]] = [set() for _ in rounds]
        self._first = [0] * len(rounds)
        """Stage -> the first microbatch that has not begun."""

    def begin(self, stage: int, microbatch: int) -> bool:
        """Note that a microbatch begins; returns whether others may have waited for that."""
        if not self._rounds[stage] or microbatch in self._begun[stage]:
            return False
        self._begun[stage].add(microbatch)
        before = self._first[stage]
        while self._first[stage] in self._begun[stage]:
            self._first[stage] += 1
        return self._first[stage] > before

    def has_room(self, stage: int, microbatch: int) -> bool:
        """Whether all have begun that owners need with its gradients."""
        return not self._rounds[stage] or self._first[stage] >= self._rounds[stage][microbatch]
