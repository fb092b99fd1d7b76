"""What NCCL answers when a peer is lost or it is set otherwise, and what its operations do to each other on one device.

CuPy's real bindings run over the stand-in for its library (`helpers.standin`), on host memory.
"""

import contextlib
import re
import threading
import time

import pytest
import torch
from helpers import standin
from helpers.nccl_group import PAIR, Group
from helpers.standin import Count, HostDevice, Setting, Status, set_to
from helpers.transport_cases import LIMIT_S

from raypar.comm.nccl import connect, pending_operations
from raypar.comm.transport import CommunicatorKey
from raypar.errors import CommError, CommTimeout

pytestmark = pytest.mark.skipif(not standin.SUPPORTED, reason="CuPy has a wheel for Linux x86-64 only")

REDUCE = CommunicatorKey((0, 1), "all_reduce")


@pytest.fixture(scope="module", autouse=True)
def library():
    return standin.load()


@pytest.fixture(autouse=True)
def short_wait_for_the_reason(monkeypatch):
    monkeypatch.setattr(pending_operations, "REASON_S", 0.3)


@pytest.fixture
def status(request):
    """Faults on request answer it."""
    with set_to(Setting.STATUS, request.param, after=Status.SYSTEM_ERROR):
        yield request.param


def fail_once(setting):
    standin.load().standin_set(setting, 1)


# -- statuses


SAID = {
    Status.REMOTE_ERROR: "remote process exited or there was a network error",
    Status.IN_PROGRESS: "(?s)'in progress'.*NCCL_COMM_BLOCKING=0.*nccl.conf",
    99: "status 99, which this CuPy does not know",
}
STATUSES = [pytest.param(status, id=str(int(status))) for status in SAID]


@pytest.mark.parametrize("status", STATUSES, indirect=True)
@pytest.mark.parametrize("setting", [Setting.LAUNCHES_UNTIL_ERROR, Setting.CALLS_UNTIL_ERROR], ids=["launch", "call"])
def test_any_status_of_a_call_is_an_error_of_raypar_with_its_cure(setting, status):
    with Group(2, [*PAIR, REDUCE]) as ends:
        fail_once(setting)
        with pytest.raises(CommError, match=SAID[status]) as caught:
            ends[0].send(torch.ones(5), to=1, tag=1)
        assert caught.value.what.startswith("NCCL failed at a send") and caught.value.cure
        with pytest.raises(CommError, match="NCCL failed at a send"):
            ends[0].all_reduce(torch.ones(2), group=[0, 1])
        ends[0].abort("after an error")
        assert not ends[0].unended_communicators


@pytest.mark.parametrize("status", STATUSES, indirect=True)
def test_any_status_of_a_call_within_a_group_of_operations_is_that_call_s(status):
    with Group(3, [CommunicatorKey((0, 1, 2), "all_to_all")]) as ends:
        fail_once(Setting.CALLS_UNTIL_ERROR)
        with pytest.raises(CommError, match=SAID[status]) as caught:
            ends[0].all_to_all(list(torch.ones(3, 2)), list(torch.ones(3, 2)), group=[0, 1, 2])
        assert caught.value.what.startswith("NCCL failed at a send")


@pytest.mark.parametrize("status", [Status.REMOTE_ERROR, 99], indirect=True)
def test_any_status_that_nccl_finds_in_the_background_breaks_the_group(status):
    with Group(2, [*PAIR, REDUCE]) as ends:
        fail_once(Setting.OPERATIONS_UNTIL_ERROR)
        reducing = ends[0].all_reduce(torch.ones(5), group=[0, 1])
        with pytest.raises(CommError, match="all_reduce of 0,1 channel 0: NCCL failed at work in the background") as caught:
            reducing.wait(LIMIT_S)
        assert caught.match(SAID[status])
        ends[0].abort("after an error")
        assert not ends[0].unended_communicators


@pytest.mark.parametrize("status", [Status.IN_PROGRESS], indirect=True)
def test_an_operation_that_is_in_progress_is_waited_for(status):
    with Group(2, [REDUCE]) as ends, set_to(Setting.DELAY_US, 100_000):
        fail_once(Setting.OPERATIONS_UNTIL_ERROR)
        flats = [torch.ones(5), torch.ones(5)]
        handles = [end.all_reduce(flat, group=[0, 1]) for end, flat in zip(ends, flats, strict=True)]
        for handle in handles:
            handle.wait(LIMIT_S)
        assert [flat.tolist() for flat in flats] == [[2.0] * 5] * 2


@pytest.mark.parametrize("status", SAID)
def test_a_communicator_that_nccl_does_not_make_is_an_error_on_all_ranks_and_nothing_is_left(status):
    start, before = time.monotonic(), set(threading.enumerate())  # another test's may wait inside NCCL for who gave up
    with set_to(Setting.INIT_STATUS, status):
        failed = Group(2, PAIR, deadline_s=10 * LIMIT_S)
    assert time.monotonic() - start < LIMIT_S
    for error in failed.ends:
        assert isinstance(error, CommError) and "messages 0 -> 1: NCCL failed at making a communicator" in error.what, error
        assert re.search(SAID[status], str(error)), error
    failed.__exit__()
    assert standin.count(Count.ALIVE) == 0
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("raypar-nccl")]


@pytest.mark.parametrize("status", STATUSES, indirect=True)
def test_a_rank_that_nccl_gives_no_id_says_so_and_the_others_hear_of_it(status):
    fail_once(Setting.CALLS_UNTIL_ERROR)
    failed = Group(2, PAIR, deadline_s=10 * LIMIT_S)
    assert all(isinstance(error, CommError) for error in failed.ends), failed.ends
    own = [error for error in failed.ends if error.what.startswith("NCCL failed at making an id")]
    assert len(own) == 1 and re.search(SAID[status], str(own[0]))
    failed.__exit__()


# -- peers that are lost


def reduce_all(stream, flat):
    """Enqueue a sum without anything of raypar above it."""
    stream.communicator.all_reduce(flat.data_ptr(), flat.numel(), flat.dtype, stream.device_stream.cuda_stream)
    return stream.device_stream.record_event()


def until(reached):
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("silent", [False, True])
def test_a_lost_peer_poisons_its_communicator_until_that_is_aborted_and_no_other_one(silent):
    """What the stand-in does, as NCCL: with an error, or without one between GPUs of one machine."""
    other = CommunicatorKey((1, 2), "all_reduce")
    with Group(3, [REDUCE, other]) as ends, set_to(Setting.SILENT_LOSSES, silent):
        ends[0]._streams[REDUCE].communicator.abort()
        mine, flat = ends[1]._streams[REDUCE], torch.ones(2)
        event = reduce_all(mine, flat)
        if silent:
            time.sleep(0.05)
            mine.communicator.raise_background_error()
        else:
            with pytest.raises(CommError, match=r"work in the background: .*remote process exited"):
                until(lambda: mine.communicator.raise_background_error())
            with pytest.raises(CommError, match=r"an all-reduce: .*remote process exited"):
                reduce_all(mine, flat)
        assert not event.query()
        flats = [torch.ones(2), torch.ones(2)]
        events = [reduce_all(end._streams[other], flat) for end, flat in zip(ends[1:], flats, strict=True)]
        until(lambda: all(event.query() for event in events))
        assert [flat.tolist() for flat in flats] == [[2.0, 2.0]] * 2 and not event.query()
        mine.communicator.abort()
        until(event.query)


@pytest.mark.parametrize("hears", ["who waits", "who posts the next one", "who posts after that"])
def test_a_peer_that_nccl_loses_first_is_named_once_the_control_transport_has_lost_it(hears):
    with Group(2, [REDUCE]) as ends:
        reducing = ends[1].all_reduce(torch.ones(5), group=[0, 1])
        ends[0]._streams[REDUCE].communicator.abort()
        if hears != "who waits":
            until(lambda: has_failed(ends[1]._streams[REDUCE]))
        if hears == "who posts after that":
            ends[1].poll()
        losing = threading.Timer(0.1, ends[0].control.abort, ["killed"])
        losing.start()
        with pytest.raises(CommError, match=r"remote process exited.*; lost rank 0"):
            (reducing if hears == "who waits" else ends[1].all_reduce(torch.ones(5), group=[0, 1])).wait(LIMIT_S)
        losing.join()
        ends[1].abort("after an error")


def has_failed(stream):
    with contextlib.suppress(CommError):
        stream.communicator.raise_background_error()
        return False
    return True


def test_a_peer_that_nccl_loses_first_breaks_the_group_and_the_error_names_the_ranks():
    """Its process still answers over the control transport."""
    with Group(2, [*PAIR, REDUCE]) as ends:
        reducing = ends[1].all_reduce(torch.ones(5), group=[0, 1])
        for stream in ends[0]._streams.values():
            stream.communicator.abort()
        with pytest.raises(
            CommError, match=r"all_reduce of rank 1 with 0 .*all_reduce of 0,1 channel 0.*remote process exited"
        ):
            reducing.wait(LIMIT_S)
        with pytest.raises(CommError, match="remote process exited"):
            ends[1].recv(None, source=0, tag=1).wait(LIMIT_S)
        ends[1].abort("after an error")
        assert not ends[1].unended_communicators


def test_who_gives_up_connecting_is_heard_though_nccl_notices_first_that_it_is_gone(monkeypatch):
    class Full(HostDevice):
        made = 0

        def stream(self):
            self.made += 1
            if self.made > 1:
                raise CommError("no memory is left", cure="none")
            return super().stream()

    said = connect.send_document_to_all

    def say_later(control, document, *tag):
        if document.get("what") and control.rank == 1:
            time.sleep(0.3)
        said(control, document, *tag)

    monkeypatch.setattr(connect, "send_document_to_all", say_later)
    failed = Group(2, PAIR, device=lambda rank: Full("full") if rank else HostDevice("other"))
    assert ["messages 1 -> 0: no memory is left" in error.what for error in failed.ends] == [True, True], failed.ends
    failed.__exit__()


# -- operations of one device


def two_sums(ends, orders):
    """Each rank posts a sum on two channels, in an order of its own."""
    flats = [[torch.ones(3), torch.ones(3)] for _ in ends]
    handles = [
        end.all_reduce(flats[end.rank][channel], group=[0, 1], channel=channel)
        for end, order in zip(ends, orders, strict=True)
        for channel in order
    ]
    return flats, handles


@pytest.mark.parametrize("channels, orders, done", [(1, ("01", "10"), False), (1, ("01", "01"), True), (2, ("01", "10"), True)])
def test_operations_in_crossed_orders_block_each_other_where_a_device_has_too_few_channels(channels, orders, done):
    """What the stand-in does, as a GPU: who waits for a peer keeps its channel."""
    keys = [CommunicatorKey((0, 1), "all_reduce", channel) for channel in (0, 1)]
    with Group(2, keys, device=lambda rank: HostDevice(f"device {rank}", channels=channels)) as ends:
        flats, handles = two_sums(ends, [[int(channel) for channel in order] for order in orders])
        if done:
            for handle in handles:
                handle.wait(LIMIT_S)
            assert all(flat.tolist() == [2.0] * 3 for row in flats for flat in row)
            return
        for handle in handles:
            with pytest.raises(CommTimeout, match="all_reduce of rank"):
                handle.wait(0.1)
        for end in ends:
            end.abort("they wait for each other")
            assert not end.unended_communicators, "an abort needs no channel"


@pytest.mark.parametrize("channels, done", [(1, False), (2, True)])
def test_messages_in_both_directions_need_a_channel_each(channels, done):
    """Which is why no plan may have more communicators than a device has room for."""
    with Group(2, PAIR, device=lambda rank: HostDevice(f"device {rank}", channels=channels)) as ends:
        with ends[0].mailbox._matching, ends[1].mailbox._matching:  # neither receives before both have sent
            sends = [end.send(torch.ones(300_000), to=1 - end.rank, tag=1) for end in ends]
        receives = [end.recv(None, source=1 - end.rank, tag=1) for end in ends]
        for handle in [*sends, *receives]:
            with contextlib.nullcontext() if done else pytest.raises(CommTimeout):
                handle.wait(LIMIT_S if done else 0.1)
        for end in ends:
            end.abort("a test")
            assert not end.unended_communicators


def test_a_device_tells_in_which_order_operations_were_enqueued():
    keys = [CommunicatorKey((0, 1), "all_reduce", channel) for channel in (0, 1)]
    devices = [HostDevice(f"device {rank}") for rank in range(2)]
    with Group(2, keys, device=devices.__getitem__) as ends:
        before = [len(device.launches()) for device in devices]
        for handle in two_sums(ends, [[1, 0], [0, 1]])[1]:
            handle.wait(LIMIT_S)
        numbers = [standin.communicator_number(ends[0]._streams[key].communicator) for key in keys]
        assert numbers == [standin.communicator_number(ends[1]._streams[key].communicator) for key in keys]
        found = [device.launches()[count:] for device, count in zip(devices, before, strict=True)]
        assert found == [numbers[::-1], numbers] and numbers[0] != numbers[1]


@pytest.mark.parametrize("operation", ["send", "all_reduce"])
def test_a_device_that_frees_memory_waits_for_its_peers_alone_and_they_need_nothing_of_it_meanwhile(operation):
    """A `cudaFree` waits for all that is enqueued, and the allocator serves nobody meanwhile, also not those who receive."""
    devices = [HostDevice(f"device {rank}") for rank in range(2)]
    with Group(2, [*PAIR, REDUCE], device=devices.__getitem__) as ends:
        ours = (
            ends[0].send(torch.ones(300_000), to=1, tag=1)
            if operation == "send"
            else ends[0].all_reduce(torch.ones(3), group=[0, 1])
        )
        freeing = threading.Thread(target=devices[0].free_cached)
        freeing.start()
        until(devices[0].allocating.locked)
        theirs = ends[1].send(torch.ones(300_000), to=0, tag=2)
        if operation == "send":
            ends[1].recv(None, source=0, tag=1).wait(LIMIT_S)
        else:
            ends[1].all_reduce(torch.ones(3), group=[0, 1]).wait(LIMIT_S)
        freeing.join(LIMIT_S)
        assert not freeing.is_alive()
        ends[0].recv(None, source=1, tag=2).wait(LIMIT_S)
        ours.wait(LIMIT_S), theirs.wait(LIMIT_S)


def test_two_devices_that_free_memory_while_messages_cross_are_freed_by_an_abort():
    """Each one's message waits for memory on the other: nothing but the step's deadline ends that."""
    devices = [HostDevice(f"device {rank}") for rank in range(2)]
    with Group(2, PAIR, device=devices.__getitem__) as ends:
        with ends[0].mailbox._matching, ends[1].mailbox._matching:
            sends = [end.send(torch.ones(300_000), to=1 - end.rank, tag=1) for end in ends]
            freeing = [threading.Thread(target=device.free_cached) for device in devices]
            for device, thread in zip(devices, freeing, strict=True):
                thread.start()
                until(device.allocating.locked)
        for send in sends:
            with pytest.raises(CommTimeout):
                send.wait(0.1)
        start = time.monotonic()
        for end in ends:
            end.abort("the step's deadline is over")
        for thread in freeing:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        assert time.monotonic() - start < LIMIT_S / 2 and not any(end.unended_communicators for end in ends)
