"""Virtual shards that share workers find the sums, gathers, scatters and exchanges of a group with a rank for each."""

import contextlib
import itertools
import threading
from functools import partial

import pytest
import torch
from helpers.transport_cases import noise

from raypar.comm.blocking_code_as_routine import as_routine, current_wait, keep_all_generators, wait_for_handle
from raypar.comm.blocking_code_in_turn import run_blocking_in_turn
from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import RoutineWait, RoutineWork, run_routine
from raypar.comm.routines_in_turn import run_in_turn
from raypar.comm.virtual_shards import VirtualShards, workers_add_subtrees
from raypar.errors import CommError, GroupAborted

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (1, 3)], ids=str)
def test_a_shared_sum_has_the_bits_of_an_all_reduce_and_who_writes_into_it_writes_alone(sizes, dtype):
    count = sum(sizes)
    values = [noise(t, 33).to(dtype) for t in range(count)]
    added, mesh, found = noise(99, 33).to(dtype), LocalMesh(len(sizes)), {}

    def one(member):
        def sum_up(tensor):
            handle = member.sum(tensor, channel=3, added=added)
            wait_for_handle(handle, "a shared sum")
            return handle.tensor()

        flat = values[member.rank].clone()
        wait_for_handle(member.all_reduce(flat, group=range(count), channel=3), "a sum")
        shared = sum_up(values[member.rank].clone())
        equal = torch.equal(shared, flat + added)
        shared.add_(member.rank)
        again = sum_up(values[member.rank].clone())  # all have written by now
        return equal and torch.equal(shared, flat + added + member.rank) and torch.equal(again, flat + added)

    def worker(transport):
        shards = VirtualShards(transport, range(len(sizes)), runs_of(sizes))
        works = [partial(one, shards.member(t)) for t in shards.own]
        turns = partial(run_blocking_in_turn, works, keep_all_generators)
        found.update(zip(shards.own, (yield from as_routine(lambda: turns(current_wait()))), strict=True))

    CooperativeScheduler().run([worker(t) for t in mesh.transports], mesh)
    assert found == dict.fromkeys(range(count), True)


def in_turn(*works):
    return run_blocking_in_turn(works, keep_all_generators, current_wait(1.0))


def test_blocking_code_that_makes_unequal_calls_is_told_so_and_no_thread_is_left():
    shards = VirtualShards(LocalMesh(1).transports[0], [0], [range(3)])

    def call(shard):
        values, member = torch.zeros(3), shards.member(shard)
        if shard < 2:
            wait_for_handle(member.all_reduce(values, group=range(3), channel=1), f"the sum of shard {shard}")
        else:
            wait_for_handle(member.all_gather([values] * 3, values, group=range(3), channel=1), "the parts of shard 2")

    before = threading.active_count()
    with pytest.raises(
        CommError, match=r"all_reduce number 1 of channel 1 is called by 2 of the 3 virtual shards of this worker: 0, 1"
    ):
        in_turn(*(partial(call, shard) for shard in range(3)))
    assert threading.active_count() == before


@pytest.mark.parametrize("raises", [0, 1, 2])
def test_what_one_piece_of_blocking_code_raises_ends_the_others_even_if_they_catch_errors(raises):
    shards, seen = VirtualShards(LocalMesh(1).transports[0], [0], [range(3)]), []

    def piece(shard):
        member = shards.member(shard)
        wait_for_handle(member.all_reduce(torch.zeros(1), group=range(3)), "a sum")
        if shard == raises:
            raise ValueError("broken")
        for _ in range(5):
            try:
                wait_for_handle(member.all_reduce(torch.zeros(1), group=range(3)), "a sum")
            except GroupAborted:
                seen.append(shard)

    before = threading.active_count()
    with pytest.raises(ValueError, match="broken"):
        in_turn(*(partial(piece, shard) for shard in range(3)))
    assert threading.active_count() == before
    assert set(seen) <= {0, 1, 2} - {raises} and all(seen.count(shard) == 5 for shard in seen)


def test_pieces_that_have_not_begun_do_not_begin_after_an_error():
    def breaks():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        in_turn(breaks, partial(pytest.fail, "it has begun"))


def test_a_failed_wait_is_raised_where_it_was_called_and_the_others_go_on():
    def waits():
        with pytest.raises(CommError, match="the link is broken"):
            wait_for_handle(Fails(), "a sum")
        return threading.current_thread()

    first, second = in_turn(waits, waits)
    assert first is threading.current_thread() is not second


def test_each_piece_finds_the_generators_as_it_left_them():
    shards = VirtualShards(LocalMesh(1).transports[0], [0], [range(2)])

    def piece(shard):
        torch.manual_seed(shard)
        first = torch.rand(3)
        wait_for_handle(shards.member(shard).all_reduce(torch.zeros(1), group=range(2)), "a sum")
        return torch.cat([first, torch.rand(3)])

    for shard, found in enumerate(in_turn(partial(piece, 0), partial(piece, 1))):
        assert torch.equal(found, torch.rand(6, generator=torch.Generator().manual_seed(shard)))


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
