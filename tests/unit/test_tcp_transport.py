"""The TCP transport alone, on a pair of sockets in one process."""

import socket

import pytest
import torch

from raypar.comm.tcp.transport import TcpTransport
from raypar.errors import CommError

LIMIT_S = 10


def test_a_send_that_fails_loses_nothing_that_the_peer_sent_before_it_left():
    mine, theirs = socket.socketpair()
    here, peer = TcpTransport(0, 2, 1, {1: mine}), TcpTransport(1, 2, 1, {0: theirs})
    out = torch.zeros(3)
    try:
        awaited = here.recv(out, source=1, tag=1)
        with here._connections[1].read_lock:  # nobody can read yet
            peer.send(torch.arange(3.0), to=0, tag=1).wait(LIMIT_S)
            peer.close()
            refused = here.send(torch.ones(3), to=1, tag=2)
        awaited.wait(LIMIT_S)
        assert out.tolist() == [0.0, 1.0, 2.0]
        with pytest.raises(CommError, match=r"send tag 2 of rank 0 with 1 .*: lost rank 1: Broken pipe"):
            refused.wait(LIMIT_S)
    finally:
        here.close()
        peer.close()
