"""An independent judge of programs: explores every reachable state of all workers and their message queues.

Written from the rules in words, sharing nothing with `schedule.validate`: a state is (position of every worker, messages moved
per pair). From a state, any worker may run its next instruction if what it uses is there, and any pair may move the message
that both ends have at the head of their queue. The programs are good if every reachable dead end is the finished state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from raypar.plan import Crossing, Routing
from raypar.schedule.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    OptimizerStep,
    Recv,
    Reduce,
    Send,
    Vote,
)


def good(programs: Sequence[Sequence[Instruction]], routing: Routing, crossing: Crossing, *, all_orders: bool = True) -> bool:
    """Whether the programs compute exactly the right things in a legal order and can never get stuck.

    `all_orders=False` follows twenty random interleavings instead (for cases with too many states to explore).
    """
    walks = [None] if all_orders else [random.Random(seed) for seed in range(20)]
    return _work_is_right(programs, routing, crossing) and all(_never_stuck(programs, routing, crossing, w) for w in walks)


def _work_is_right(programs: Sequence[Sequence[Instruction]], routing: Routing, crossing: Crossing) -> bool:
    plan = routing.plan
    if len(programs) != plan.world:
        return False
    for rank, program in enumerate(programs):
        texts = Counter(str(i) for i in program if isinstance(i, (Forward, Backward, BackwardInput, BackwardWeight)))
        wanted = 0
        for stage in plan.stages_of(rank):
            weights: dict[int, list[int]] = {}
            inputs: dict[int, list[int]] = {}
            for i in program:
                if getattr(i, "stage", None) == stage and not isinstance(i, (Send, Recv)):
                    block = routing.microbatches.block(i.microbatch) if hasattr(i, "microbatch") else -1
                    if isinstance(i, (Backward, BackwardWeight)):
                        weights.setdefault(block, []).append(i.microbatch)
                    if isinstance(i, (Backward, BackwardInput)):
                        inputs.setdefault(block, []).append(i.microbatch)
            if any(v != sorted(v) for v in (*weights.values(), *inputs.values())):
                return False
            for m in range(routing.microbatches.count):
                if routing.rank(stage, m) != rank:
                    continue
                split = texts[f"{stage}I{m}"] + texts[f"{stage}W{m}"]
                if texts[f"{stage}F{m}"] != 1 or (texts[f"{stage}B{m}"], split) not in ((1, 0), (0, 2)):
                    return False
                if split and texts[f"{stage}I{m}"] != 1:
                    return False
                wanted += 2 if not split else 3
            last = max(
                (n for n, i in enumerate(program) if isinstance(i, (Backward, BackwardWeight)) and i.stage == stage), default=-1
            )
            reduce = [n for n, i in enumerate(program) if isinstance(i, Reduce) and i.stage == stage]
            votes = [n for n, i in enumerate(program) if isinstance(i, Vote)]
            steps = [n for n, i in enumerate(program) if isinstance(i, OptimizerStep)]
            if not reduce or not votes or not steps or not last < reduce[-1] < votes[-1] < steps[-1]:
                return False
        if wanted != sum(texts.values()):
            return False
    return True


def _message(rank: int, i: Send | Recv) -> tuple[object, ...]:
    """(kind, producer, consumer, microbatch, sending rank, receiving rank)"""
    if isinstance(i, Send):
        pair = (i.stage, i.to_stage) if i.kind == "activation" else (i.to_stage, i.stage)
        return (i.kind, *pair, i.microbatch, rank, i.peer)
    pair = (i.from_stage, i.stage) if i.kind == "activation" else (i.stage, i.from_stage)
    return (i.kind, *pair, i.microbatch, i.peer, rank)


def _never_stuck(
    programs: Sequence[Sequence[Instruction]], routing: Routing, crossing: Crossing, walk: random.Random | None
) -> bool:
    size = len(programs)
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    queues: dict[tuple[int, int], list[list[tuple[int, tuple[object, ...], bool]]]] = {p: [[], []] for p in pairs}
    for rank, program in enumerate(programs):
        for place, i in enumerate(program):
            if isinstance(i, (Send, Recv)):
                if not 0 <= i.peer < size or i.peer == rank:
                    return False
                pair = (min(rank, i.peer), max(rank, i.peer))
                queues[pair][rank != pair[0]].append((place, _message(rank, i), isinstance(i, Send)))
    pairs = [p for p in pairs if queues[p][0] or queues[p][1]]
    uses = [[_uses(rank, i, routing, crossing) for i in program] for rank, program in enumerate(programs)]
    arrivals = [
        ((rank, message), (pair, n))
        for pair in pairs
        for side, rank in enumerate(pair)
        for n, (_, message, sends) in enumerate(queues[pair][side])
        if not sends
    ]
    received = dict(arrivals)
    # every received bundle must be used by its receiver, and only once
    needed = Counter((rank, m) for rank in range(size) for here in uses[rank] for m in here[1])
    have = Counter(
        (rank, m) for pair in pairs for side, rank in enumerate(pair) for _, m, sends in queues[pair][side] if not sends
    )
    if have != needed:
        return False

    start = (tuple([0] * size), tuple([0] * len(pairs)))
    seen, todo = {start}, [start]
    while todo:
        places, moved = todo.pop()
        following = []
        for rank in range(size):
            at = places[rank]
            if at == len(programs[rank]):
                continue
            local, remote = uses[rank][at]
            before = {str(i) for i in programs[rank][:at]}
            if any(not (set(choice) & before) for choice in local):
                return False  # uses something of its own worker that does not exist yet: a wrong program, not a wait
            ok = True
            for message in remote:
                where = received.get((rank, message))
                if where is None:
                    return False
                pair, n = where
                if queues[pair][rank != pair[0]][n][0] >= at:
                    return False  # used before its receive is posted
                ok &= moved[pairs.index(pair)] > n
            if ok:
                following.append((places[:rank] + (at + 1,) + places[rank + 1 :], moved))
        for number, pair in enumerate(pairs):
            n = moved[number]
            if n < len(queues[pair][0]) and n < len(queues[pair][1]):
                (low, left, left_sends), (high, right, right_sends) = queues[pair][0][n], queues[pair][1][n]
                if left == right and left_sends != right_sends and low < places[pair[0]] and high < places[pair[1]]:
                    following.append((places, moved[:number] + (n + 1,) + moved[number + 1 :]))
        if not following:
            finished = all(places[r] == len(programs[r]) for r in range(size)) and all(
                moved[n] == len(queues[p][0]) == len(queues[p][1]) for n, p in enumerate(pairs)
            )
            if not finished:
                return False
        for state in following if walk is None or not following else [walk.choice(following)]:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return True


def _uses(rank: int, i: Instruction, routing: Routing, crossing: Crossing) -> tuple[list[set[str]], list[tuple[object, ...]]]:
    """(sets of own instructions of which one must stand before, messages that must have arrived)"""
    local: list[set[str]] = []
    remote: list[tuple[object, ...]] = []
    if isinstance(i, Forward):
        for edge in crossing.edges:
            if edge.dst == i.stage:
                source = routing.rank(edge.src, i.microbatch)
                if source == rank:
                    local.append({f"{edge.src}F{i.microbatch}"})
                else:
                    remote.append(("activation", edge.src, i.stage, i.microbatch, source, rank))
    elif isinstance(i, (Backward, BackwardInput)):
        local.append({f"{i.stage}F{i.microbatch}"})
        for edge in crossing.edges:
            if edge.src == i.stage and edge.differentiable:
                source = routing.rank(edge.dst, i.microbatch)
                if source == rank:
                    local.append({f"{edge.dst}B{i.microbatch}", f"{edge.dst}I{i.microbatch}"})
                else:
                    remote.append(("gradient", i.stage, edge.dst, i.microbatch, source, rank))
    elif isinstance(i, BackwardWeight):
        local.append({f"{i.stage}I{i.microbatch}"})
    elif isinstance(i, Send):
        if i.kind == "activation":
            local.append({f"{i.stage}F{i.microbatch}"})
        else:
            local.append({f"{i.stage}B{i.microbatch}", f"{i.stage}I{i.microbatch}"})
    return local, remote
