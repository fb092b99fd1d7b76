"""Scripted faults happen where the script says, on top of any transport."""

import threading
import time

import pytest
import torch

from raypar.comm.faulty_transport import Fault, FaultyTransport
from raypar.comm.local_transport import LocalMesh
from raypar.comm.transport import Transport
from raypar.errors import CommError, CommTimeout, GroupAborted


def wrapped(*script):
    return [FaultyTransport(t, script) for t in LocalMesh(2).transports]


def pass_one(ends, tag):
    recv = ends[1].recv(None, source=0, tag=tag)
    send = ends[0].send(torch.tensor([tag]), to=1, tag=tag)
    recv.wait(1)
    send.wait(1)
    assert recv.tensor().item() == tag and recv.done()


def test_without_faults_it_is_the_transport_inside():
    ends = wrapped()
    assert all(isinstance(end, Transport) for end in ends)
    pass_one(ends, 1)
    assert ends[0].ledger.sent["send"] == 8


def test_a_call_fails_at_its_rank_step_and_number_only():
    fault = Fault(rank=0, call="send", action="fail", call_index=1, step=3)
    ends = wrapped(fault)
    for step in (2, 3):
        for end in ends:
            end.at_step(step)
        pass_one(ends, 10 * step)
        if step == 2:
            pass_one(ends, 10 * step + 1)
    with pytest.raises(CommError, match="send of rank 0 failed"):
        ends[0].send(torch.ones(1), to=1, tag=99)
    pass_one(ends, 100)
    assert ends[0].injected_faults == [fault] and ends[1].injected_faults == []


def test_a_delayed_call_is_late():
    ends = wrapped(Fault(rank=0, call="send", action="delay", delay_s=0.05))
    start = time.monotonic()
    pass_one(ends, 5)
    assert time.monotonic() - start >= 0.05


def test_a_dropped_call_never_comes_and_abort_frees_who_waits_for_it():
    ends = wrapped(Fault(rank=0, call="all_reduce", action="drop"))
    theirs = ends[1].all_reduce(torch.ones(2), group=[0, 1])
    mine = ends[0].all_reduce(torch.ones(2), group=[0, 1])
    assert not mine.done()
    for handle in (mine, theirs):
        with pytest.raises(CommTimeout):
            handle.wait(0.02)
    timer = threading.Timer(0.02, ends[0].abort, ("enough",))
    timer.start()
    with pytest.raises(GroupAborted, match="enough"):
        mine.wait(1)
    with pytest.raises(CommError, match="rank 0"):
        theirs.wait(1)
