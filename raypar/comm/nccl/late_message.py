"""Messages of an `nccl` transport that came before the memory of their receive was there, or could be written.

They are received into memory of their own, and copied. For a host that waits neither stream that is there may do that: the
caller's may wait for what this host does next, and so may the senders of later messages, whose receives stand in the
communicator's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from raypar.comm.nccl.device import Device, Stream, StreamEvent


class CopyStream:
    """A stream whose copies wait for nothing, so that none waits for another one; made when it is first needed.

    If there are as many communicators as hardware queues for them, it shares a queue with one of these. Workers post no
    receives into given memory of a device in steps.
    """

    name = "copies of messages"

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._over = False
        self._stream: Stream | None = None

    @property
    def used(self) -> bool:
        """Whether there was a copy."""
        return self._stream is not None

    @property
    def device_stream(self) -> Stream:
        """Its stream on the device, once it is `used`."""
        assert self._stream is not None
        return self._stream

    def copy(self, source: Tensor, target: Tensor) -> StreamEvent | None:
        """Copy what the host has seen to be there into memory that it has seen to be free; the event behind the copy.

        None once the transport has ended.
        """
        with self._lock:
            if self._over:
                return None
            if self._stream is None:
                self._stream = self._device.stream()
            self._stream.run(partial(target.copy_, source))
            return self._stream.record_event()

    def end(self) -> bool:
        """From here on no copies begin. Returns whether there were any."""
        with self._lock:
            self._over = True
        return self.used


class LateMessage:
    """A message in memory of its own, or on its way there, and the memory of its receive. Thread-safe."""

    def __init__(
        self, device: Device, copies: CopyStream, message: Tensor, arrived: StreamEvent, out: Tensor, writable: StreamEvent
    ) -> None:
        self.arrived = arrived
        self._device, self._copies = device, copies
        self._message, self._out, self._writable = message, out, writable
        self._lock = threading.Lock()
        self._copied: StreamEvent | None = None

    def copy_if_possible(self) -> StreamEvent | None:
        """Copy it if it has arrived and the receive's memory may be written; the event behind its copy, if there is one."""
        with self._lock:
            if self._copied is None and self.arrived.query() and self._writable.query():
                self._copied = self._copies.copy(self._message, self._out)
            return self._copied

    def copy_in_current_stream(self, check: Callable[[], None]) -> StreamEvent:
        """Copy it in the caller's current stream, which waits for all that the copy needs; the event behind the copy."""
        self.arrived.make_stream_wait(check)
        self._writable.make_stream_wait(check)
        with self._lock:
            if self._copied is None:
                for tensor in (self._message, self._out):  # both are other streams' memory, which may be given up before
                    self._device.record_stream(tensor)
                with torch.no_grad():
                    self._out.copy_(self._message)
                self._copied = self._device.record_event()
            return self._copied
