"""Virtual shards that share workers find the sums, gathers, scatters and exchanges of a group with a rank for each."""

import contextlib
import itertools
import threading
from functools import partial

import pytest
import torch

from raypar.comm.blocking_code_as_routine import as_routine, wait_for_handle
from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import RoutineWait, RoutineWork, run_routine
from raypar.comm.routines_in_turn import run_in_turn
from raypar.comm.virtual_shards import VirtualShards, workers_add_subtrees
from raypar.errors import CommError

SHARINGS = [
    pytest.param(sizes, id=":".join(map(str, sizes)))
    for count in range(2, 9)
    for workers in (1, 2, 3)
    for sizes in itertools.product(range(1, count + 1), repeat=workers)
    if sum(sizes) == count and len(sizes) < count
]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def runs_of(sizes):
    ends = [0, *itertools.accumulate(sizes)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def collectives(transport, count, group, dtype):
    """A virtual shard's (or a rank's) calls, and what it has at the end."""
    shard = transport.rank
    draw = torch.Generator().manual_seed(shard)

    def values(size):
        return (torch.randn(size, generator=draw, dtype=torch.float64) * 10.0 ** (shard % 3)).to(dtype)

    whole, parts, mine = values(37), [values(3 + t) for t in range(count)], values(5 + shard)
    out, gathered = parts[shard].new_empty(3 + shard), [mine.new_empty(5 + t) for t in range(count)]
    exchanged = [values(0 if (shard + t) % 3 else 2 + shard + 2 * t) for t in range(count)]  # not all have something for all
    received = [mine.new_empty(0 if (shard + t) % 3 else 2 + t + 2 * shard) for t in range(count)]
    given = whole.clone()
    for handle in (
        transport.all_reduce(whole, group=group, channel=7),
        transport.reduce_scatter(out, parts, group=group, channel=7),
        transport.all_gather(gathered, mine, group=group, channel=7),
        transport.all_to_all(received, exchanged, group=group, channel=7),
    ):
        wait_for_handle(handle, "a collective")
    again = given + whole
    wait_for_handle(transport.all_reduce(again, group=group, channel=7), "another one")
    return [whole, out, *gathered, *received, again]


def ranks_of_their_own(count, dtype):
    mesh, found = LocalMesh(count), {}

    def rank(transport):
        found[transport.rank] = yield from as_routine(partial(collectives, transport, count, range(count), dtype))

    CooperativeScheduler().run([rank(t) for t in mesh.transports], mesh)
    return found


def virtual(sizes, dtype):
    runs, mesh, found = runs_of(sizes), LocalMesh(len(sizes)), {}

    def worker(transport):
        shards = VirtualShards(transport, range(len(sizes)), runs)
        count = runs[-1].stop
        each = [as_routine(partial(collectives, shards.member(t), count, range(count), dtype)) for t in shards.own]
        found.update(zip(shards.own, (yield from run_in_turn(each)), strict=True))

    CooperativeScheduler().run([worker(t) for t in mesh.transports], mesh)
    return found, mesh


@pytest.mark.part(8)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHARINGS)
def test_collectives_have_the_bits_of_ranks_of_their_own(sizes, dtype):
    expected, (found, _) = ranks_of_their_own(sum(sizes), dtype), virtual(sizes, dtype)
    assert sorted(found) == list(range(sum(sizes)))
    for shard, tensors in expected.items():
        assert len(tensors) == len(found[shard]) and all(map(torch.equal, tensors, found[shard])), shard


@pytest.mark.parametrize(
    ("sizes", "alike"),
    [
        ((2, 2), True),
        ((2, 2, 2, 2), True),
        ((4, 2), True),
        ((2, 2, 2), True),
        ((1, 3), False),
        ((3, 3), False),
        ((2, 4), False),
    ],
)
def test_workers_whose_runs_are_subtrees_sum_these_among_themselves(sizes, alike):
    assert workers_add_subtrees(runs_of(sizes)) is alike
    _, mesh = virtual(sizes, torch.float32)
    ledger = mesh.transports[0].ledger.as_dict()
    assert ledger["all_gather"]["messages"] == (1 if alike else 4), "else sums gather, too"
    assert ledger.get("all_reduce", {"messages": 0})["messages"] == (2 if alike else 0)


def test_a_worker_sends_one_sum_for_its_run():
    def of(sizes):
        (_, mesh) = virtual(sizes, torch.float32)
        return mesh.transports[0].ledger.as_dict()["all_reduce"]["sent"]

    assert of((4, 4)) == of((2, 2)) == 2 * 37 * 4


def test_workers_send_each_other_what_their_runs_have_for_each_other_and_no_more():
    sizes = (2, 3)
    _, mesh = virtual(sizes, torch.float32)
    ledger = mesh.transports[0].ledger.as_dict()["all_to_all"]
    pairs = [(s, t) for s in range(2) for t in range(2, 5) if (s + t) % 3 == 0]
    assert ledger == {
        "messages": 1,
        "sent": 4 * sum(2 + s + 2 * t for s, t in pairs),
        "received": 4 * sum(2 + t + 2 * s for s, t in pairs),
    }


def test_virtual_shards_that_make_unequal_calls_are_told_so_and_none_is_left():
    shards = VirtualShards(LocalMesh(1).transports[0], [0], [range(2)])

    def call(shard):
        member = shards.member(shard)
        values = torch.zeros(3)
        if shard == 0:
            wait_for_handle(member.all_reduce(values, group=range(2), channel=1), "the sum of shard 0")
        else:
            wait_for_handle(member.all_gather([values, values], values, group=range(2), channel=1), "the parts of shard 1")

    before = threading.active_count()
    with pytest.raises(
        CommError, match=r"all_reduce number 1 of channel 1 is called by 1 of the 2 virtual shards of this worker: 0"
    ):
        run_routine(run_in_turn([as_routine(partial(call, shard)) for shard in range(2)]), 1.0)
    assert threading.active_count() == before


def test_what_one_raises_ends_the_others():
    ended = []

    def waits():
        try:
            yield RoutineWait(
                VirtualShards(LocalMesh(1).transports[0], [0], [range(2)]).member(0).all_reduce(torch.zeros(1), group=[0]), ""
            )
        finally:
            ended.append("waits")

    def raises():
        yield RoutineWork("work")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run_routine(run_in_turn([waits(), raises()]), 1.0)
    assert ended == ["waits"]


class Fails:
    """An operation that has failed, which `done` raises."""

    def done(self) -> bool:
        raise CommError("the link is broken", cure="mend it")


def test_what_an_operation_failed_with_is_raised_in_the_routine_that_waits_for_it():
    caught = []

    def waits():
        try:
            yield RoutineWait(Fails(), "a sum")
        except CommError as error:
            caught.append(error.what)
        return "went on"

    def works():
        yield RoutineWork("work")
        yield RoutineWork("more work")
        return "worked"

    assert run_routine(run_in_turn([waits(), works()]), 1.0) == ["went on", "worked"]
    assert caught == ["the link is broken"]


def test_code_that_catches_errors_and_waits_again_ends_with_the_others():
    member = VirtualShards(LocalMesh(1).transports[0], [0], [range(2)]).member(0)

    def persists():
        for _ in range(5):
            with contextlib.suppress(Exception):
                wait_for_handle(member.all_reduce(torch.zeros(1), group=range(2)), "a sum")

    def raises():
        yield RoutineWork("work")
        raise ValueError("broken")

    before = threading.active_count()
    with pytest.raises(ValueError, match="broken"):
        run_routine(run_in_turn([as_routine(persists), raises()]), 1.0)
    assert threading.active_count() == before
