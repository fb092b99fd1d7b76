"""The cooperative scheduler: a virtual clock, seeded interleavings, deadlocks told, errors kept."""

import pytest
import torch

from raypar.comm.cooperative_scheduler import CooperativeScheduler, RoutineSpan
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import RoutineWait, RoutineWork, run_routine
from raypar.errors import CommError, CommTimeout, GroupAborted


def pipeline(t, costs, microbatches):
    """Stage `t.rank` works `costs[rank]` ms on each microbatch and hands it on."""
    for m in range(microbatches):
        if t.rank > 0:
            yield RoutineWait(t.recv(None, source=t.rank - 1, tag=m), f"microbatch {m}")
        yield RoutineWork(f"{t.rank}F{m}", costs[t.rank])
        if t.rank < t.size - 1:
            t.send(torch.tensor([m]), to=t.rank + 1, tag=m)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_virtual_clock_gives_the_makespan_of_a_pipeline(seed):
    mesh = LocalMesh(3)
    scheduler = CooperativeScheduler(seed, trace=True)
    scheduler.run([pipeline(t, [1.0, 3.0, 2.0], 4) for t in mesh.transports], mesh)
    assert scheduler.makespan_ms == 1 + 4 * 3 + 2
    last = [s for s in scheduler.spans if s.routine == 2]
    assert last[:3] == [
        RoutineSpan(2, "microbatch 0", 0.0, 4.0, "wait"),
        RoutineSpan(2, "2F0", 4.0, 6.0, "work"),
        RoutineSpan(2, "microbatch 1", 6.0, 7.0, "wait"),
    ]


def test_a_seed_gives_the_same_interleaving_and_seeds_differ():
    def order(seed):
        seen = []

        def routine(index):
            for step in range(4):
                seen.append((index, step))
                yield RoutineWork("x", 1.0)

        CooperativeScheduler(seed).run([routine(i) for i in range(4)])
        return seen

    assert order(3) == order(3)
    assert order(None) == [(i, s) for s in range(4) for i in range(4)]
    assert len({tuple(order(seed)) for seed in range(8)}) > 4


def test_a_deadlock_says_who_waits_for_what():
    mesh = LocalMesh(3)

    def routine(t):
        yield RoutineWork("first", float(t.rank))
        if t.rank == 2:
            return
        handle = t.recv(None, source=1 - t.rank, tag=0)
        yield RoutineWait(handle, f"the gradient of worker {1 - t.rank}")
        t.send(torch.ones(1), to=1 - t.rank, tag=0)

    with pytest.raises(CommError) as caught:
        CooperativeScheduler().run([routine(t) for t in mesh.transports], mesh)
    assert "routine 0 at 0 ms waits for the gradient of worker 1" in str(caught.value)
    assert "routine 1 at 1 ms waits for the gradient of worker 0" in str(caught.value)
    assert "routine 2" not in str(caught.value)


def test_the_first_error_stops_all_and_is_raised_itself():
    mesh = LocalMesh(2)
    seen = []

    def good(t):
        try:
            yield RoutineWait(t.recv(None, source=1, tag=0), "something")
        except CommError as error:
            seen.append(error)
            raise

    def bad(t):
        yield RoutineWork("1F0", 2.0)
        raise ZeroDivisionError("user code")

    with pytest.raises(ZeroDivisionError, match="user code"):
        CooperativeScheduler().run([good(mesh.transports[0]), bad(mesh.transports[1])], mesh)
    assert isinstance(seen[0], GroupAborted) and "ZeroDivisionError: user code" in str(seen[0])
    with pytest.raises(GroupAborted):
        mesh.transports[0].barrier(group=[0, 1])


def test_a_routine_may_handle_the_failure_of_a_wait():
    def routine(t):
        if t.rank == 1:
            yield RoutineWork("leave", 1.0)
            t.abort("leaving")
            return "left"
        try:
            yield RoutineWait(t.recv(None, source=1, tag=0), "something")
        except CommError:
            yield RoutineWork("clean up", 5.0)
            return "cleaned up"

    scheduler = CooperativeScheduler()
    assert scheduler.run([routine(t) for t in LocalMesh(2).transports]) == ["cleaned up", "left"]
    assert scheduler.makespan_ms == 6.0


def test_drive_throws_what_a_wait_failed_with_into_the_routine_and_names_timeouts():
    mesh = LocalMesh(2)

    def routine(t):
        try:
            yield RoutineWait(t.recv(None, source=1, tag=4), "activation of microbatch 3")
        except CommTimeout as error:
            text = str(error)
        mesh.transports[1].send(torch.tensor([7]), to=0, tag=4)
        yield RoutineWork("1F0")
        second = t.recv(None, source=1, tag=5)
        mesh.transports[1].send(torch.tensor([8]), to=0, tag=5)
        yield RoutineWait(second, "another")
        return text, second.tensor().item()

    text, value = run_routine(routine(mesh.transports[0]), 0.02)
    assert text.startswith("activation of microbatch 3: recv tag 4 of rank 0 with 1") and value == 8


def test_a_local_send_is_done_when_its_receiver_has_the_bytes():
    mesh = LocalMesh(2)
    data = torch.ones(3)
    send = mesh.transports[0].send(data, to=1, tag=0)
    assert not send.done()
    recv = mesh.transports[1].recv(None, source=0, tag=0)
    assert send.done() and recv.done()
    data.zero_()
    assert recv.tensor().tolist() == [1, 1, 1]
