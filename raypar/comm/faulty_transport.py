"""A wrapper around any transport that adds scripted faults, at the same calls in every run."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from raypar.comm.operation_phase import Phases
from raypar.comm.transport import Handle, Transport, generation_over_error
from raypar.errors import CommError, CommTimeout


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at one call of one rank."""

    rank: int
    call: str
    """Name of the call: `send`, `all_reduce`, ..."""
    action: Literal["fail", "delay", "drop"]
    """`fail` makes the call raise `CommError`; `delay` posts it `delay_s` later; `drop` never posts it, and its handle is never
    done."""
    call_index: int = 0
    """Which of these calls, from 0: within `step`, or since the transport was made."""
    step: int | None = None
    delay_s: float = 0.0


class DelayedHandle:
    """The handle of a call that is delayed or dropped."""

    def __init__(self, owner: FaultyTransport, name: str) -> None:
        self._owner = owner
        self._name = name
        self._changed = threading.Condition()
        self._inner: Handle | None = None
        """The handle of the call, once it is posted."""
        self._error: CommError | None = None
        """Why it was never posted."""

    def post(self, post: Callable[[], Handle]) -> None:
        """Post the call: the delay is over."""
        with self._changed:
            if self._error is None:
                try:
                    self._inner = post()
                except CommError as error:
                    self._error = error
            self._changed.notify_all()

    def fail(self, error: CommError) -> None:
        """Fail the handle: the group was aborted before the call was posted."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def done(self) -> bool:
        """See `Handle.done`."""
        if self._inner is not None:
            return self._inner.done()
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        return False

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait`."""
        inner, left_s = self._posted(timeout_s)
        inner.wait(left_s)

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait_on_stream`."""
        inner, left_s = self._posted(timeout_s)
        inner.wait_on_stream(left_s)

    def _posted(self, timeout_s: float | None) -> tuple[Handle, float | None]:
        """Wait for the end of the delay: (the call's own handle, seconds that are left). Raises what the call failed with."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: self._inner is not None or self._error is not None, timeout_s):
                raise CommTimeout(
                    f"{self._name} of rank {self._owner.rank} was not done after {timeout_s} s",
                    cure="a fault of the test's script holds it back",
                )
        if self._inner is None:
            assert self._error is not None
            raise type(self._error)(*self._error.args)
        return self._inner, None if deadline is None else max(0.0, deadline - time.monotonic())

    def tensor(self) -> Tensor:
        """See `Handle.tensor`."""
        return self.tensors()[0]

    def tensors(self) -> list[Tensor]:
        """See `Handle.tensors`."""
        if self._inner is None:
            raise CommError(f"{self._name} is not done", cure="wait for the handle before reading its tensor")
        return self._inner.tensors()


class FaultyTransport:
    """A transport that passes calls on to `inner`, and injects the faults of `script` for its rank."""

    def __init__(self, inner: Transport, script: Sequence[Fault]) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.generation = inner.generation
        self.ledger = inner.ledger
        self.injected_faults: list[Fault] = []
        """The faults that have been injected so far, in order."""
        self._script = [f for f in script if f.rank == inner.rank]
        self._step: int | None = None
        """The step of the calls that follow (`at_step`)."""
        self._calls: Counter[tuple[int | None, str]] = Counter()
        """(step, or None for all of them; name) -> calls so far."""
        self._delayed: list[DelayedHandle] = []
        """Handles of all calls that were delayed or dropped."""
        self._timers: list[threading.Timer] = []
        """Timers that post the delayed calls."""

    def at_step(self, step: int) -> None:
        """Begin `step`: the calls that follow belong to it, and `Fault.call_index` counts them from 0."""
        self._step = step
        self._calls = Counter({key: n for key, n in self._calls.items() if key[0] is None})

    def _call(self, name: str, post: Callable[[], Handle]) -> Handle:
        in_all = self._calls[None, name]
        in_step = self._calls[self._step, name]
        for scope in {None, self._step}:
            self._calls[scope, name] += 1
        for fault in self._script:
            number = in_all if fault.step is None else in_step
            if fault.call != name or fault.call_index != number or fault.step not in (None, self._step):
                continue
            self.injected_faults.append(fault)
            if fault.action == "fail":
                raise CommError(f"{name} of rank {self.rank} failed: {fault}", cure="a fault of the test's script")
            delayed = DelayedHandle(self, name)
            self._delayed.append(delayed)
            if fault.action == "delay":
                timer = threading.Timer(fault.delay_s, delayed.post, (post,))
                timer.daemon = True
                self._timers.append(timer)
                timer.start()
            return delayed
        return post()

    def can_share_memory(self, rank: int) -> bool:
        """See `Transport.can_share_memory`."""
        return self.inner.can_share_memory(rank)

    def forget_freed_memory(self) -> None:
        """See `Transport.forget_freed_memory`."""
        self.inner.forget_freed_memory()

    def run_before(
        self,
        operation: str,
        work: Callable[[], None],
        *,
        group: Sequence[int],
        channel: int = 0,
        after: Handle | None = None,
        keep: Sequence[Tensor] = (),
    ) -> Handle | None:
        """See `Transport.run_before`: what is copied has no faults of its own."""
        return self.inner.run_before(operation, work, group=group, channel=channel, after=after, keep=keep)

    def run_after(
        self,
        after: Handle,
        work: Callable[[], None],
        *,
        group: Sequence[int],
        channel: int = 0,
        operation: str = "all_gather",
    ) -> Handle | None:
        """See `Transport.run_after`: additions have no faults of their own."""
        return self.inner.run_after(after, work, group=group, channel=channel, operation=operation)

    def send(self, tensor: Tensor, *, to: int, tag: int, keep_layout: bool = False) -> Handle:
        """See `Transport.send`."""
        return self._call("send", lambda: self.inner.send(tensor, to=to, tag=tag, keep_layout=keep_layout))

    def recv(self, out: Tensor | None, *, source: int, tag: int) -> Handle:
        """See `Transport.recv`."""
        return self._call("recv", lambda: self.inner.recv(out, source=source, tag=tag))

    def batch(self, sends: Sequence[tuple[Tensor, int, int]], recvs: Sequence[tuple[Tensor | None, int, int]]) -> Handle:
        """See `Transport.batch`."""
        return self._call("batch", lambda: self.inner.batch(sends, recvs))

    def all_reduce(self, flat: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_reduce`."""
        return self._call("all_reduce", lambda: self.inner.all_reduce(flat, group=group, channel=channel))

    def halving_all_reduce(self, flat: Tensor, scratch: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.halving_all_reduce`."""
        return self._call(
            "halving_all_reduce", lambda: self.inner.halving_all_reduce(flat, scratch, group=group, channel=channel)
        )

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.reduce_scatter`."""
        return self._call("reduce_scatter", lambda: self.inner.reduce_scatter(out, pieces, group=group, channel=channel))

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_gather`."""
        return self._call("all_gather", lambda: self.inner.all_gather(pieces, mine, group=group, channel=channel))

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.all_to_all`."""
        return self._call("all_to_all", lambda: self.inner.all_to_all(outs, pieces, group=group, channel=channel))

    def broadcast(self, tensor: Tensor, *, root: int, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.broadcast`."""
        return self._call("broadcast", lambda: self.inner.broadcast(tensor, root=root, group=group, channel=channel))

    def run_phases(self, phases: Phases, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.run_phases`."""
        return self._call("run_phases", lambda: self.inner.run_phases(phases, group=group, channel=channel))

    def barrier(self, *, group: Sequence[int], channel: int = 0) -> Handle:
        """See `Transport.barrier`."""
        return self._call("barrier", lambda: self.inner.barrier(group=group, channel=channel))

    def check_alive(self) -> None:
        """See `Transport.check_alive`."""
        self.inner.check_alive()

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        self.inner.abort(reason)
        self._release(reason)

    def close(self) -> None:
        """See `Transport.close`."""
        self.inner.close()
        self._release("the transport was closed")

    def _release(self, reason: str) -> None:
        for timer in self._timers:
            timer.cancel()
        for delayed in self._delayed:
            delayed.fail(generation_over_error(reason))
