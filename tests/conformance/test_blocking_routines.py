"""Code that blocks in the middle runs as a routine: interleaved with others, one at a time, with random numbers of its own."""

import threading

import pytest
import torch

from raypar.comm import blocking_code_as_routine
from raypar.comm.cooperative_scheduler import CooperativeScheduler
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import RoutineWait, RoutineWork, run_routine
from raypar.errors import CommError, CommTimeout, GroupAborted


def summing(transport, rounds=3):
    """Sums over all ranks, several times; the waits are inside plain calls."""

    def work():
        found = []
        for i in range(rounds):
            value = torch.full((4,), float(transport.rank + i))
            blocking_code_as_routine.wait_for_handle(transport.all_reduce(value, group=range(transport.size)), "a sum")
            found.append(value[0].item())
        return found

    return work


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_ranks_of_one_thread_meet_in_a_collective(seed):
    mesh = LocalMesh(3)
    found = CooperativeScheduler(seed).run([blocking_code_as_routine.as_routine(summing(t)) for t in mesh.transports], mesh)
    assert found == [[3.0, 6.0, 9.0]] * 3


def test_the_same_code_blocks_on_a_real_transport():
    mesh, found = LocalMesh(2), {}
    threads = [threading.Thread(target=lambda t=t: found.update({t.rank: summing(t)()})) for t in mesh.transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == {0: [1.0, 3.0, 5.0], 1: [1.0, 3.0, 5.0]}


def test_random_numbers_are_those_of_a_process_of_its_own():
    mesh = LocalMesh(2)

    def drawing(transport):
        def work():
            torch.manual_seed(transport.rank)
            first = torch.rand(3)
            blocking_code_as_routine.wait_for_handle(transport.barrier(group=(0, 1)), "the other")
            return torch.cat([first, torch.rand(3)])

        return work

    found = CooperativeScheduler().run([blocking_code_as_routine.as_routine(drawing(t)) for t in mesh.transports], mesh)
    for rank, drawn in enumerate(found):
        torch.manual_seed(rank)
        assert torch.equal(drawn, torch.rand(6))


def test_sums_have_the_bits_of_the_callers_number_of_threads():
    torch.set_num_threads(1)
    pieces = torch.randn(50, 32768, generator=torch.Generator().manual_seed(1))

    def work():
        return torch.stack([piece.dot(piece) for piece in pieces])

    assert torch.equal(run_routine(blocking_code_as_routine.as_routine(work)), work())


def test_an_error_inside_comes_out_and_ends_the_others():
    mesh, ended = LocalMesh(2), []

    def failing():
        raise ValueError("mine")

    def waiting():
        try:
            blocking_code_as_routine.wait_for_handle(mesh.transports[1].barrier(group=(0, 1)), "the other")
        except GroupAborted as error:
            ended.append(error.what)
            raise

    with pytest.raises(ValueError, match="mine"):
        CooperativeScheduler().run(
            [blocking_code_as_routine.as_routine(waiting), blocking_code_as_routine.as_routine(failing)], mesh
        )
    assert len(ended) == 1
    assert not [t for t in threading.enumerate() if t.name == "raypar-routine"]


def test_one_that_waits_for_nobody_is_reported_by_what_it_waits_for():
    mesh = LocalMesh(2)

    def waiting():
        blocking_code_as_routine.wait_for_handle(mesh.transports[1].barrier(group=(0, 1)), "the other shard")

    with pytest.raises(CommError, match="waits for the other shard"):
        CooperativeScheduler().run([blocking_code_as_routine.as_routine(waiting)], mesh)


def test_a_deadline_names_what_was_waited_for():
    mesh = LocalMesh(2)
    with pytest.raises(CommTimeout, match="the other shard: barrier"):
        blocking_code_as_routine.wait_for_handle(mesh.transports[0].barrier(group=(0, 1)), "the other shard", 0.01)


def test_a_routine_that_is_closed_ends_its_thread():
    mesh = LocalMesh(2)
    routine = blocking_code_as_routine.as_routine(summing(mesh.transports[0]))
    next(routine)
    routine.close()
    assert not [t for t in threading.enumerate() if t.name == "raypar-routine"]


def test_a_routine_runs_inside_code_that_blocks_on_the_same_clock():
    mesh = LocalMesh(2)

    def step(transport):
        yield RoutineWork("forward", 3.0 + transport.rank)
        summing(transport, rounds=1)()  # a layer
        handle = transport.barrier(group=(0, 1))
        yield RoutineWait(handle, "the other")
        return transport.rank

    scheduler = CooperativeScheduler()
    routines = [
        blocking_code_as_routine.as_routine(lambda t=t: blocking_code_as_routine.run_or_yield(step(t))) for t in mesh.transports
    ]
    assert scheduler.run(routines, mesh) == [0, 1] and scheduler.makespan_ms == 4.0


def test_what_a_wait_fails_with_is_thrown_into_the_routine_where_it_stands():
    mesh, seen = LocalMesh(2), []

    def step(transport):
        try:
            yield RoutineWait(transport.barrier(group=(0, 1)), "the other")
        except GroupAborted as error:
            seen.append(error.what)
            raise

    def leave():
        mesh.transports[1].abort("gone")

    with pytest.raises(CommError):
        routines = [lambda: blocking_code_as_routine.run_or_yield(step(mesh.transports[0])), leave]
        CooperativeScheduler().run([blocking_code_as_routine.as_routine(work) for work in routines], mesh)
    with pytest.raises(GroupAborted):
        blocking_code_as_routine.run_or_yield(step(mesh.transports[1]), 1.0)
    assert len(seen) == 1


def test_nothing_to_wait_for_is_a_routine_too():
    assert run_routine(blocking_code_as_routine.as_routine(lambda: 7)) == 7
