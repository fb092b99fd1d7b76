"""A device whose work is done late: streams are queues, whose heads run in any order that CUDA allows, chosen by a seed.

The pretended device's tensors (`helpers.pretend`) get memory as PyTorch's caching allocator gives it: by stream, reused at once
in the stream that it was allocated in, elsewhere only after `record_stream` and its events. What is freed is overwritten by the
stream that owns it. So code that forgets an event, a wait, a tensor or a `record_stream` reads other numbers under some seed.
PyTorch's own sanitizer for CUDA is told of everything, too (`World(sanitize=True)`).
"""

from __future__ import annotations

import functools
import math
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from helpers import pretend
from helpers.pretend import OnDevice
from torch import Tensor
from torch.cuda import _sanitizer

from raypar.comm import blocking_code_as_routine
from raypar.comm.blocking_code_as_routine import as_routine, run_or_yield
from raypar.comm.nccl.device import MAX_COMMUNICATORS
from raypar.comm.routine import Routine, RoutineWait

ALIGNED = 512
"""Bytes: sizes of blocks are multiples, as PyTorch's."""
POISON = 0xFF
"""Byte of memory that is nobody's: NaN as a float, -1 as an integer."""
COPIES = ("_to_copy", "copy_", "_copy_from", "_copy_from_and_resize")
VIEWS = ("_unsafe_view", "_reshape_alias", "lift_fresh")
"""Operations whose result lies in their argument's memory, whatever their schema says."""
ASKING = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount")
"""Operations whose result has a shape that only the numbers tell: the host waits."""


class Deadlock(AssertionError):
    """Nobody can go on: no host, no stream, no message."""


class RaceFound(AssertionError):
    """PyTorch's sanitizer has found two accesses that nothing puts in order."""


class Work(Protocol):
    """One entry of a stream's queue."""

    def ready(self) -> bool:
        """Whether it can go on now, at the head of its stream."""

    def advance(self) -> bool:
        """Go on; whether it is over."""


class Kernel:
    """Reads and writes memory at once."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work

    def ready(self) -> bool:
        """See `Work.ready`."""
        return True

    def advance(self) -> bool:
        """See `Work.advance`."""
        with torch.no_grad():
            self._work()
        return True


class Mark:
    """The point of an event."""

    def __init__(self, event: LateEvent) -> None:
        self._event = event

    def ready(self) -> bool:
        """See `Work.ready`."""
        return True

    def advance(self) -> bool:
        """See `Work.advance`."""
        self._event.passed = True
        return True


class WaitFor:
    """Waits for an event of another stream."""

    def __init__(self, event: LateEvent) -> None:
        self._event = event

    def ready(self) -> bool:
        """See `Work.ready`."""
        return self._event.query()

    def advance(self) -> bool:
        """See `Work.advance`."""
        return True


class LateEvent:
    """See `StreamEvent`; also the `Handle` of a host that waits for it."""

    def __init__(self, stream: LateStream) -> None:
        self.device, self.passed = stream.device, False
        stream.give(Mark(self))
        stream.device.told("_handle_event_creation", id(self))
        stream.device.told("_handle_event_record", id(self), stream.cuda_stream)
        stream.device.events.append(self)

    def query(self) -> bool:
        """See `StreamEvent.query`. Whatever the host asks for from here on comes after it."""
        if self.passed:
            self.device.told("_handle_event_synchronization", id(self))
        return self.passed

    def make_stream_wait(self, check: Callable[[], object] = lambda: None) -> None:
        """See `StreamEvent.make_stream_wait`."""
        self.device.current.wait_event(self)

    done = query

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait`, of a host that is no routine."""
        while not self.query():
            self.device.world.step()


class LateStream:
    """See `Stream`: a queue, of which only the head may run."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.queue: deque[Work] = deque()
        self.cuda_stream = len(device.world.streams)
        self.weight = device.world.any_weight()
        device.world.streams.append(self)
        device.told("_handle_stream_creation", self.cuda_stream)

    def give(self, work: Work) -> None:
        """Append to the queue."""
        self.queue.append(work)

    def ready(self) -> bool:
        """Whether its head can go on."""
        return bool(self.queue) and self.queue[0].ready()

    def advance(self) -> None:
        """Let its head go on."""
        if self.queue[0].advance():
            self.queue.popleft()

    def wait_event(self, event: LateEvent) -> None:
        """See `Stream.wait_event`."""
        self.give(WaitFor(event))
        self.device.told("_handle_event_wait", id(event), self.cuda_stream)

    def wait_stream(self, other: LateStream) -> None:
        """As `torch.cuda.Stream.wait_stream`."""
        self.wait_event(other.record_event())

    def run(self, work: Callable[[], object]) -> None:
        """See `Stream.run`."""
        with self.current(), torch.no_grad():
            work()

    @contextmanager
    def current(self) -> Iterator[None]:
        """What is computed inside is given to this stream."""
        before, self.device.current = self.device.current, self
        try:
            yield
        finally:
            self.device.current = before

    def record_event(self) -> LateEvent:
        """See `Stream.record_event`."""
        return LateEvent(self)

    def close(self) -> None:
        """See `Stream.close`."""


class Block:
    """Memory of a device, allocated for one stream."""

    def __init__(self, stream: LateStream, nbytes: int) -> None:
        self.stream = stream
        room = np.empty(nbytes + ALIGNED, dtype=np.uint8)
        start = -room.ctypes.data % ALIGNED
        self.bytes = torch.from_numpy(room[start : start + nbytes])
        self.bytes.fill_(POISON)


class Memory:
    """Holds a block for the tensors that lie in it; the last of them frees it."""

    def __init__(self, block: Block) -> None:
        self.block, self.device = block, block.stream.device
        self._users: list[LateStream] = []

    def nbytes(self) -> int:
        """Of the whole block."""
        return int(self.block.bytes.numel())

    def used_by(self, stream: LateStream) -> None:
        """See `Tensor.record_stream`: nothing for the stream that it belongs to."""
        if stream is not self.block.stream and stream not in self._users:
            self._users.append(stream)

    def __del__(self) -> None:
        self.device.freed(self.block, self._users)


class LateDevice:
    """See `Device`: one rank's, with PyTorch's default stream as the current one."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.name, self.identity, self.device = f"late device {rank}", f"late device {rank}", pretend.device()
        self.max_communicators = MAX_COMMUNICATORS
        self.checker = _sanitizer.EventHandler() if world.sanitize else None
        self.events: list[LateEvent] = []
        """All, so that each keeps its own id; only for the sanitizer."""
        self.default = self.current = LateStream(self)
        self.copied_out = 0
        """Copies to the host for which that has not waited."""
        self._free: dict[tuple[LateStream, int], list[Block]] = {}
        self._pending: list[tuple[Block, list[LateEvent]]] = []
        """Blocks that were freed while other streams were using them."""

    def told(self, what: str, *facts: Any) -> None:
        """Tell the sanitizer."""
        if self.checker is None:
            self.events = []
        elif errors := getattr(self.checker, what)(*facts):
            raise RaceFound("\n".join(map(str, errors)))

    # -- see `raypar.comm.nccl.device.Device`

    def bind(self) -> None:
        """See `Device.bind`."""

    def owns(self, tensor: Tensor) -> bool:
        """See `Device.owns`."""
        return isinstance(tensor, OnDevice) and tensor.memory.device is self

    def stream(self) -> LateStream:
        """See `Device.stream`."""
        return LateStream(self)

    def record_event(self) -> LateEvent:
        """See `Device.record_event`."""
        return self.current.record_event()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, stream: Any) -> Tensor:
        """See `Device.empty`."""
        with stream.current():
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def record_stream(self, tensor: Any) -> None:
        """See `Device.record_stream`."""
        tensor.record_stream(self.current)

    # -- the allocator

    def allocate(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> OnDevice:
        """A tensor for the current stream, in memory that the stream has freed if there is some: its last first."""
        extent = 0 if 0 in shape else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        nbytes = max(1, math.ceil(extent * dtype.itemsize / ALIGNED)) * ALIGNED
        self._take_back()
        free = self._free.get((self.current, nbytes))
        block = free.pop() if free else Block(self.current, nbytes)
        self.told("_handle_memory_allocation", block.bytes.data_ptr())
        made = OnDevice(block.bytes.view(dtype).as_strided(tuple(shape), tuple(strides)))
        made.memory = Memory(block)
        return made

    def freed(self, block: Block, users: Sequence[LateStream]) -> None:
        """The host needs a block no more, but what it has asked for may not have been done."""
        self.told("_handle_memory_deallocation", block.bytes.data_ptr())
        if users:
            self._pending.append((block, [stream.record_event() for stream in users]))
        else:
            self._give_back(block)

    def _take_back(self) -> None:
        """Not overwritten: nobody may have had it since."""
        pending, self._pending = self._pending, []
        for block, events in pending:
            if all(event.passed for event in events):
                self._free.setdefault((block.stream, block.bytes.numel()), []).append(block)
            else:
                self._pending.append((block, events))

    def _give_back(self, block: Block) -> None:
        block.stream.give(Kernel(functools.partial(block.bytes.fill_, POISON)))
        self._free.setdefault((block.stream, block.bytes.numel()), []).append(block)


class World:
    """The devices of all ranks, and the seed's choices. Inside `with`, it computes for the pretended device."""

    def __init__(self, seed: int, size: int, *, sanitize: bool = False) -> None:
        self.random, self.sanitize = random.Random(seed), sanitize
        self.streams: list[LateStream] = []
        self.links: list[Any] = []
        """Whatever else may go on (`ready`, `advance`, `weight`): messages between hosts."""
        self.devices = [LateDevice(self, rank) for rank in range(size)]
        self.here = self.devices[0]
        """Whose host is running."""
        self.steps = 0
        self.at_deadline: Callable[[], bool] = lambda: False
        """Called when nobody can go on; whether somebody may now: as a driver aborts a step at its deadline."""

    def __enter__(self) -> World:
        assert pretend.late is None
        pretend.late = self
        return self

    def __exit__(self, *exc: object) -> None:
        pretend.late = None

    def any_weight(self, spread: float = 7.0) -> float:
        """How often something is chosen: some streams, messages and hosts are much slower than others."""
        return float(2.0 ** -self.random.uniform(0, spread))

    @contextmanager
    def at(self, device: LateDevice, stream: LateStream | None = None) -> Iterator[None]:
        """Inside, a thread of that rank is running; with `stream` as the current one if that is not the routine's own."""
        before, self.here = self.here, device
        current = device.current
        device.current = stream or current
        try:
            yield
        finally:
            if stream is not None:
                device.current = current
            self.here = before

    # -- going on

    def step(self, hosts: Sequence[Any] = ()) -> Any:
        """Let one stream or message go on, or return one of `hosts`. Raises `Deadlock` if there is nothing."""
        ready = [*hosts, *(one for one in (*self.streams, *self.links) if one.ready())]
        if not ready:
            raise Deadlock("nobody can go on")
        self.steps += 1
        (chosen,) = self.random.choices(ready, [one.weight for one in ready])
        if isinstance(chosen, Host):
            return chosen
        chosen.advance()
        return None

    def run(self, routines: Sequence[Routine[Any]]) -> list[Any]:
        """Run a routine for each rank to their ends; their results. Raises the first error."""
        hosts = [Host(self, device, routine) for device, routine in zip(self.devices, routines, strict=True)]
        try:
            while left := [host for host in hosts if not host.over]:
                try:
                    chosen = self.step([host for host in left if host.ready()])
                except Deadlock:
                    if self.at_deadline():
                        continue
                    waits = "\n".join(f"rank {host.device.rank} waits for {host.waiting}" for host in left)
                    raise Deadlock(waits) from None
                if chosen is not None:
                    chosen.go_on()
        finally:
            for host in hosts:
                host.stop()
        return [host.result for host in hosts]

    def drain(self) -> None:
        """Let everything go on until nothing can."""
        while any(one.ready() for one in (*self.streams, *self.links)):
            self.step()

    def finish(self, tensor: OnDevice) -> None:
        """The host waits until the current stream has done what it was given."""
        event = tensor.memory.device.record_event()
        blocking_code_as_routine.wait_for_handle(event, "what the host reads")

    # -- computing

    def compute(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What an operation of PyTorch returns, whose numbers come later."""
        call = Call(op, args, kwargs)
        name = pretend._name_of(op)
        device = call.tensors[0].memory.device if call.tensors else self.here
        if any(tensor.memory.device is not device for tensor in call.tensors):
            raise RuntimeError(f"{op}: tensors of two ranks")
        if name in COPIES and (found := self._copied(call, name, device)) is not None:
            return found
        if call.on_host and call.tensors:
            raise RuntimeError(f"{op}: expected all tensors to be on the same device, but found cpu and {pretend.NAME}")
        if call.is_view or name in VIEWS:
            return call.wrapped(op(*call.given, **call.named))
        if not call.tensors or "empty" in name:
            made = op(*call.given, **call.named)
            return made if not isinstance(made, Tensor) else self._known(device, made, filled=not name.startswith("empty"))
        if name in ASKING or not call.returns_tensors or call.has_mask(name):
            self.finish(call.tensors[0])
            found = op(*call.given, **call.named)
            return self._known(device, found) if isinstance(found, Tensor) else found
        return call.queued(device)

    def _known(self, device: LateDevice, value: Tensor, *, filled: bool = True) -> OnDevice:
        """A tensor of numbers that the host knows."""
        made = device.allocate(value.shape, value.stride(), value.dtype)
        if filled:
            launch(device, "known", [], [made], functools.partial(made.raw.copy_, value))
        return made

    def _copied(self, call: Call, name: str, device: LateDevice) -> Any:
        """A copy between the host and the device; None: it is one within the device."""
        first, *more = call.args
        target, source = (None, first) if name == "_to_copy" else (first, more[0]) if name == "copy_" else (more[0], first)
        where = call.kwargs.get("device")
        to_host = where is not None and torch.device(where).type == "cpu"
        asks_to_go_on = bool(call.kwargs.get("non_blocking") or (name == "copy_" and True in more[1:]))
        if isinstance(source, OnDevice):
            if target is None and to_host:
                self.finish(source)
                return call.op(*call.given, **call.named)
            if target is not None and not isinstance(target, OnDevice):
                if is_pinned(target) and asks_to_go_on:
                    device.copied_out += 1
                    launch(device, name, [source], [target], functools.partial(target.copy_, source.raw))
                    return target
                self.finish(source)
                return target.copy_(source.raw)
            return None
        later = is_pinned(source) and asks_to_go_on
        value = source if later else source.detach().clone()
        if target is None:
            target = device.allocate(
                value.shape, call.op(*call.given, **call.named).stride(), call.kwargs.get("dtype") or value.dtype
            )
        launch(device, name, [source] if later else [], [target], functools.partial(target.raw.copy_, value))
        return target


def launch(
    device: LateDevice, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], object]
) -> None:
    """Give a kernel to the current stream."""
    launch_at(device.current, name, [t.data_ptr() for t in reads], [t.data_ptr() for t in writes], Kernel(work))


def launch_at(stream: LateStream, name: str, reads: Sequence[int], writes: Sequence[int], work: Work) -> None:
    """Give work that reads and writes these addresses to a stream."""
    written = {place for place in writes if place}
    read = {place for place in reads if place} - written
    names = {place: [name] for place in read | written}
    stream.device.told("_handle_kernel_launch", stream.cuda_stream, read, written, written, name, names)
    stream.give(work)


class Host:
    """One rank's thread: a routine that may block anywhere."""

    def __init__(self, world: World, device: LateDevice, routine: Routine[Any]) -> None:
        self.world, self.device, self.weight = world, device, world.any_weight()
        self.waiting: RoutineWait | None = None
        self.over, self.result = False, None
        self._routine = as_routine(functools.partial(run_or_yield, routine))
        self._error: Exception | None = None

    def ready(self) -> bool:
        """Whether it has nothing to wait for. What it waits for is polled, as the transport's `wait` does."""
        if self.waiting is None:
            return True
        handle: Any = self.waiting.handle
        try:
            with self.world.at(self.device):
                return bool(handle.launched() if self.waiting.on_stream and hasattr(handle, "launched") else handle.done())
        except Exception as error:
            self._error = error
            return True

    def go_on(self) -> None:
        """Run until it waits again."""
        with self.world.at(self.device):
            waiting, error, self.waiting, self._error = self.waiting, self._error, None, None
            if waiting is not None and waiting.on_stream and error is None:
                waiting.handle.wait_on_stream(0.0)
            try:
                found = next(self._routine) if error is None else self._routine.throw(error)
            except StopIteration as end:
                self.over, self.result = True, end.value
            else:
                self.waiting = found if isinstance(found, RoutineWait) else None

    def stop(self) -> None:
        """End its thread."""
        if not self.over:
            self.over = True
            with self.world.at(self.device):
                try:
                    self._routine.close()
                except Exception:  # of code that was stopped in the middle
                    return


# -- operations of PyTorch


@functools.cache
def _schema(op: Any) -> tuple[list[bool], dict[str, bool], bool, bool, list[int | None]]:
    """(which arguments are written to, by place and by name; is it a view; returns it tensors; which argument each returns)."""
    schema = op._schema
    writes = [arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments]
    sets = {frozenset(arg.alias_info.before_set): i for i, arg in enumerate(schema.arguments) if arg.alias_info is not None}
    returned = [
        sets.get(frozenset(res.alias_info.before_set)) if res.alias_info is not None and res.alias_info.is_write else None
        for res in schema.returns
    ]
    is_view = any(res.alias_info is not None and not res.alias_info.is_write for res in schema.returns)
    tensors = not schema.returns or any("Tensor" in str(res.type) for res in schema.returns)
    return writes, {arg.name: w for arg, w in zip(schema.arguments, writes, strict=True)}, is_view, tensors, returned


class Call:
    """One call of an operation, with the raw memory of its tensors."""

    def __init__(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op, self.args, self.kwargs = op, args, kwargs
        self.tensors: list[OnDevice] = []
        self.on_host = False
        self._writes, self._named_writes, self.is_view, self.returns_tensors, self._returned = _schema(op)
        self.writes: list[OnDevice] = []
        self.given = [self._lowered(value, write) for value, write in zip(args, self._writes, strict=False)]
        self.named = {
            key: self._lowered(value, self._named_writes.get(key, False))
            for key, value in kwargs.items()
            if key != "pin_memory"
        }

    def _lowered(self, value: Any, write: bool) -> Any:
        if isinstance(value, OnDevice):
            self.tensors.append(value)
            if write:
                self.writes.append(value)
            return value.raw
        if isinstance(value, Tensor):
            self.on_host |= value.dim() > 0
            return value.clone() if value.dim() == 0 else value
        if isinstance(value, (list, tuple)):
            return [self._lowered(each, write) for each in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def has_mask(self, name: str) -> bool:
        """Whether it chooses elements by a mask, so that only the numbers tell how many."""
        if name == "index":
            return any(isinstance(one, OnDevice) and one.dtype in (torch.bool, torch.uint8) for one in self.args[1])
        return False

    def wrapped(self, value: Any) -> Any:
        """Views of the first tensor's memory."""
        if isinstance(value, Tensor):
            made = OnDevice(value)
            made.memory = self.tensors[0].memory
            return made
        return type(value)(self.wrapped(each) for each in value) if isinstance(value, (list, tuple)) else value

    def queued(self, device: LateDevice) -> Any:
        """Give the operation to the current stream; what it returns."""
        op, given, named = self.op, self.given, self.named
        written = {id(tensor.raw): tensor for tensor in self.writes}
        random_state = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in op.tags else None
        fresh: list[OnDevice] = []
        if any(place is None for place in self._returned) or random_state is not None:
            pattern = op(*_zeros(given), **_zeros(named))  # tells shapes, and draws the random numbers that the operation will
        else:
            pattern = ()
        results = pattern if isinstance(pattern, (list, tuple)) else [pattern]

        def out(value: Any) -> Any:
            if isinstance(value, Tensor):
                fresh.append(device.allocate(value.shape, value.stride(), value.dtype))
                return fresh[-1]
            return [out(each) for each in value] if isinstance(value, (list, tuple)) else value

        if len(self._returned) == 1 and isinstance(pattern, (list, tuple)) and self._returned[0] is None:
            made: list[Any] = [out(list(pattern))]
        else:
            made = [self._argument(place) if place is not None else out(results[i]) for i, place in enumerate(self._returned)]
        raws = [tensor.raw for tensor in fresh]
        keep = [place is None for place in self._returned]

        def work() -> None:
            before = torch.get_rng_state() if random_state is not None else None
            if random_state is not None:
                torch.set_rng_state(random_state)
            found = op(*given, **named)
            if before is not None:
                torch.set_rng_state(before)
            if raws:
                whole = [found] if len(keep) == 1 else [one for one, new in zip(found, keep, strict=True) if new]
                for raw, value in zip(raws, _flat(whole), strict=True):
                    raw.copy_(value)

        reads = [tensor for tensor in self.tensors if id(tensor.raw) not in written]
        launch(device, str(op), reads, [*self.writes, *fresh], work)
        return None if not made else made[0] if len(made) == 1 else tuple(made)

    def _argument(self, place: int) -> Any:
        schema = self.op._schema.arguments
        return self.args[place] if place < len(self.args) else self.kwargs[schema[place].name]


def _zeros(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value) if value.dim() else value
    if isinstance(value, dict):
        return {key: _zeros(each) for key, each in value.items()}
    return [_zeros(each) for each in value] if isinstance(value, (list, tuple)) else value


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for one in value for each in _flat(one)] if isinstance(value, (list, tuple)) else []


# -- page-locked memory of the host


_PINNED: set[int] = set()
"""Addresses of page-locked memory."""


def pinned(tensor: Tensor) -> Tensor:
    """As `Tensor.pin_memory`: a copy from it may be made later than it is asked for, and holds it until then."""
    made = tensor.detach().clone()
    place = made.data_ptr()
    _PINNED.add(place)
    weakref.finalize(made, _PINNED.discard, place)
    return made


def is_pinned(tensor: Any) -> bool:
    """Whether it is a copy in page-locked memory."""
    return isinstance(tensor, Tensor) and tensor.data_ptr() in _PINNED
