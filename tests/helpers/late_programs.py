"""Programs of all ranks over the `nccl` transport on late devices, each drawn from a seed: whatever the protocol allows.

Numbers are computed just before they are sent, in the default stream or one of the program's own. Tensors are dropped as soon
as they may be, what is received is read in any stream that has waited for it, and then written over. Every number that is read
is checked, at the end.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from helpers import pretend, transport_cases
from helpers.late_device import Deadlock, LateDevice, LateStream, World
from helpers.late_nccl import connected
from helpers.standin import all_communicators
from torch import Tensor

from raypar.comm.blocking_code_as_routine import _RUNNING, _ThreadFiber
from raypar.comm.gradient_reduction import CanonicalReduction, FastReduction, GradientReduction
from raypar.comm.nccl import transport as nccl_transport
from raypar.comm.nccl.transport import NcclTransport
from raypar.comm.routine import Routine, RoutineWait, RoutineWork, StreamWaits
from raypar.comm.transport import COLLECTIVES, FAST_REDUCTION_CHANNELS, CommunicatorKey
from raypar.errors import CommError
from raypar.plan.nested_shares import NestedTensorShares

sys.path.append(str(Path(__file__).parents[2] / "jobs" / "bench"))
from gpu_memory import OnDevice as ThroughDevice

SHAPES = ((3,), (20, 30), (6, 4), (40, 70))
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)


class Launched:
    """A handle that is done when another one has been given to the device."""

    def __init__(self, handle: Any) -> None:
        self.done = handle.launched


@dataclass
class Posted:
    """An operation of this rank: its handle, and what to do with the tensors once it is done."""

    handle: Any
    then: Callable[[LateStream], None]


class Rank:
    """One rank's program."""

    def __init__(self, end: NcclTransport, device: LateDevice, seed: int) -> None:
        self.end, self.device = end, device
        self.shared, self.own = random.Random(seed), random.Random(f"{seed} {end.rank}")
        self.again = random.Random(f"{seed} {end.rank} again")
        self.everybody = list(range(end.size))
        self.side = device.stream()
        self.checks: list[tuple[str, Tensor]] = []
        self.posted: list[Posted] = []
        self.waits = StreamWaits()

    def any_stream(self) -> LateStream:
        """The default one, or the program's own."""
        return self.own.choice((self.device.default, self.device.default, self.side))

    # -- tensors

    def made(self, value: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Filled by two kernels."""
        return torch.ones(shape, dtype=dtype, device=pretend.device()).mul_(value)

    def waiting(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory to receive into, whose old numbers are still to be read."""
        out = self.made(-2, shape, dtype)
        self.check(f"{name}: what was there before", out, -2)
        return out

    def check(self, name: str, tensor: Tensor, value: float) -> None:
        """All its numbers must be this one, in the current stream, now."""
        self.checks.append((name, (tensor == value).all()))

    def read(self, name: str, tensor: Tensor, value: float, stream: LateStream) -> None:
        """Check it in `stream`, which has waited for it, write over it, and drop it."""
        with stream.current():
            tensor.record_stream(stream)  # type: ignore[arg-type]
            self.check(name, tensor, value)
            tensor.fill_(-3)

    def write(self, stream: LateStream, *tensors: Tensor) -> None:
        """Write over what was sent."""
        with stream.current():
            for tensor in tensors:
                tensor.record_stream(stream)  # type: ignore[arg-type]
                tensor.fill_(-4)

    # -- operations: all ranks make the same choices of `shared`

    def message(self, number: int) -> None:
        """From one rank to another, or to itself: into given memory or fresh, with a layout or without."""
        source, to = self.shared.choice(self.everybody), self.shared.choice(self.everybody)
        shape, dtype = self.shared.choice(SHAPES), self.shared.choice(DTYPES)
        given, lies = self.shared.random() < 0.5, self.shared.choice(("new", "new", "transposed", "with gaps"))
        lies = lies if len(shape) == 2 else "new"
        first = self.own.random() < 0.5
        if to == self.end.rank and first:
            self.receive(number, source, shape if lies != "transposed" else shape[::-1], dtype, given)
        if source == self.end.rank:
            with self.any_stream().current():
                whole = self.made(number, (shape[0], 2 * shape[-1]) if lies == "with gaps" else shape, dtype)
                sent = whole.t() if lies == "transposed" else whole[:, : shape[-1]] if lies == "with gaps" else whole
                handle = self.end.send(sent, to=to, tag=number, keep_layout=True)
            del sent
            if self.own.random() < 0.6:  # else it is dropped at once, and the handle, too
                self.posted.append(Posted(handle, lambda stream: self.write(stream, whole)))
            else:
                del whole
        if to == self.end.rank and not first:
            self.receive(number, source, shape if lies != "transposed" else shape[::-1], dtype, given)

    def receive(self, number: int, source: int, shape: tuple[int, ...], dtype: torch.dtype, given: bool) -> None:
        """The other end of `message`."""
        name = f"message {number} from {source} to {self.end.rank}"
        with self.any_stream().current():
            out = self.waiting(name, shape, dtype) if given else None
            handle = self.end.recv(out, source=source, tag=number)
        if given and self.own.random() < 0.2:
            return  # received into memory that nobody looks at any more

        def then(stream: LateStream) -> None:
            with stream.current():
                found = handle.tensor()
                if out is None:  # its memory is another stream's, of which the transport has told the allocator
                    self.check(name, found, number)
                else:
                    self.read(name, found, number, stream)

        self.posted.append(Posted(handle, then))

    def host_message(self, number: int) -> None:
        """Of host memory, among the others."""
        source, to = self.shared.sample(self.everybody, 2)
        given = self.shared.random() < 0.5
        if source == self.end.rank:
            self.end.send(torch.full((5,), float(number)), to=to, tag=number)
        if to == self.end.rank:
            handle = self.end.recv(torch.zeros(5) if given else None, source=source, tag=number)

            def then(stream: LateStream) -> None:
                assert handle.tensor().tolist() == [float(number)] * 5

            self.posted.append(Posted(handle, then))

    def batch(self, number: int) -> None:
        """Round the ring, into given and fresh memory."""
        size, rank = self.end.size, self.end.rank
        right, left = (rank + 1) % size, (rank - 1) % size
        with self.any_stream().current():
            out = self.waiting(f"batch {number}", (600,), torch.float32)
            sends = [self.made(10 * number + rank, (600,), torch.float32) for _ in range(2)]
            handle = self.end.batch(
                [(sends[0], right, number), (sends[1], left, 1000 + number)],
                [(out, left, number), (None, right, 1000 + number)],
            )

        def then(stream: LateStream) -> None:
            with stream.current():
                first, second = handle.tensors()
                self.check(f"batch {number}, second", second, 10 * number + right)
                self.read(f"batch {number}, first", first, 10 * number + left, stream)
                self.write(stream, *sends)

        self.posted.append(Posted(handle, then))

    def collective(self, number: int) -> None:
        """One of all kinds, of even or ragged pieces, in one block or apart; of all ranks or of this one alone."""
        kind = self.shared.choice(("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"))
        numel, ragged, apart = self.shared.choice((3, 300, 2000)), self.shared.random() < 0.4, self.shared.random() < 0.5
        alone, root = self.shared.random() < 0.15, self.shared.choice(self.everybody)
        dtype = self.shared.choice((torch.float32, torch.bfloat16, torch.int64))
        group = [self.end.rank] if alone else self.everybody
        me, base = group.index(self.end.rank), 4 * (number % 8)
        sizes = [numel + (5 * i if ragged else 0) for i in range(len(group))]
        name = f"{kind} {number} of {sizes} {dtype}"

        def apart_or_not(make: Callable[[tuple[int, ...]], Tensor], alike: int | None = None) -> list[Tensor]:
            lengths = sizes if alike is None else [alike] * len(group)
            whole = [make((length,)) for length in lengths] if apart else list(make((sum(lengths),)).split(lengths))
            return whole

        total = sum(base + r for r in group)
        with self.any_stream().current():
            mine = lambda shape: self.made(base + self.end.rank, shape, dtype)  # noqa: E731
            busy = lambda shape: self.waiting(name, shape, dtype)  # noqa: E731
            outs: list[tuple[Tensor, float]]
            if kind == "all_reduce":
                sent, outs = [], [(mine((numel,)), total)]
                handle = self.end.all_reduce(outs[0][0], group=group)
            elif kind == "reduce_scatter":
                sent, outs = apart_or_not(mine), [(busy((sizes[me],)), total)]
                handle = self.end.reduce_scatter(outs[0][0], sent, group=group)
            elif kind == "all_gather":
                pieces, sent = apart_or_not(busy), [mine((sizes[me],))]
                outs = [(piece, base + r) for piece, r in zip(pieces, group, strict=True)]
                handle = self.end.all_gather(pieces, sent[0], group=group)
            elif kind == "all_to_all":
                pieces, sent = apart_or_not(busy, sizes[me]), apart_or_not(mine)
                outs = [(piece, base + r) for piece, r in zip(pieces, group, strict=True)]
                handle = self.end.all_to_all(pieces, sent, group=group)
            else:
                root = root if not alone else self.end.rank
                has = self.end.rank == root
                sent, outs = [], [(mine((numel,)) if has else busy((numel,)), base + root)]
                handle = self.end.broadcast(outs[0][0], root=root, group=group)
        if self.own.random() < 0.25:
            return  # nobody looks at it: neither handle nor tensors are held

        def then(stream: LateStream) -> None:
            self.write(stream, *sent)
            for out, value in outs:
                self.read(name, out, value, stream)

        self.posted.append(Posted(handle, then))

    # -- running

    def finish_one(self) -> Routine[None]:
        """Wait for any posted operation on the host, or let a stream wait; then use its tensors."""
        one = self.posted.pop(self.own.randrange(len(self.posted)))
        stream = self.any_stream()
        if self.own.random() < 0.5 or not hasattr(one.handle, "launched"):
            yield RoutineWait(one.handle, f"{one.handle.describe()}")
        else:
            yield RoutineWait(Launched(one.handle), f"{one.handle.describe()} to be launched")  # type: ignore[arg-type]
            if self.again.random() < 0.3:  # another stream has waited before, and does nothing else with it
                with self.again.choice((self.device.default, self.side)).current():
                    one.handle.wait_on_stream(1.0)
                if self.again.random() < 0.3:
                    self.waits.add(one.handle, one.handle.describe())
                    return  # and nobody looks at it
            with stream.current():
                one.handle.wait_on_stream(1.0)
            self.waits.add(one.handle, one.handle.describe())
        one.then(stream)

    def run(self, operations: int) -> Routine[None]:
        """The program; ends when all of this rank's streams have."""
        for number in range(1, operations + 1):
            kinds = (self.message, self.message, self.message, self.collective, self.collective, self.batch, self.host_message)
            self.shared.choice(kinds)(number)
            while self.posted and self.own.random() < 0.4:
                yield from self.finish_one()
        while self.posted:
            yield from self.finish_one()
        yield from self.end_checks()

    def end_checks(self) -> Routine[None]:
        """Wait for all streams, then look at all that was checked."""
        for stream in self.device.world.streams:
            if stream.device is self.device:
                yield RoutineWait(stream.record_event(), f"stream {stream.cuda_stream}")
        wrong = [name for name, good in self.checks if not good.raw.item()]  # type: ignore[attr-defined]
        assert not wrong, f"rank {self.end.rank}: {wrong}"

    def survive(self, operations: int, dies_at: int) -> Routine[None]:
        """The program until somebody gives up or fails; then the group ends, and the device computes something else."""
        try:
            for number in range(1, operations + 1):
                if number == dies_at:
                    raise CommError("this rank gives up", cure="-")
                self.shared.choice((self.message, self.collective, self.collective, self.batch))(number)
                while self.posted and self.own.random() < 0.4:
                    yield from self.finish_one()
            while self.posted:
                yield from self.finish_one()
            yield from self.waits.finish()
        except CommError as error:
            self.end.abort(f"rank {self.end.rank}: {error.what}")
            self.checks.clear()
        self.end.close()
        self.posted.clear()
        self.waits = StreamWaits()
        yield from self.compute_in_free_memory()
        yield from self.end_checks()

    def compute_in_free_memory(self) -> Routine[None]:
        """Whoever still writes there is seen."""
        kept = []
        for number in range(20):
            with self.device.default.current():
                kept.append(self.made(number, self.own.choice(((3,), (300,), (600,), (2000,), (2800,))), torch.float32))
            if self.own.random() < 0.3:  # else at once, before what uses the memory without having said so has been done
                yield RoutineWait(self.device.default.record_event(), "time to pass")
        for stream in self.device.world.streams:
            if stream.device is self.device:
                yield RoutineWait(stream.record_event(), f"stream {stream.cuda_stream}")
        for number, tensor in enumerate(kept):
            self.check(f"after the end, {number}", tensor, number)


@contextlib.contextmanager
def ending_in_one_thread(world: World) -> Iterator[None]:
    """`NcclTransport`'s threads run at once, and its pauses let the devices go on."""

    class Turns:
        """Takes turns with the others and the devices while somebody waits for it."""

        def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), daemon: bool = True) -> None:
            self._fiber, self._over = _ThreadFiber(lambda: target(*args)), False
            self._device = world.here
            turns.append(self)

        def start(self) -> None:
            """Until its first pause."""
            with world.at(self._device, self._device.default):
                self._over = self._fiber.resume() is None

        def join(self, timeout: float | None = None) -> None:
            """Let all go on until this one has ended."""
            while not self._over:
                for one in [one for one in turns if not one._over]:
                    one.start()
                with contextlib.suppress(Deadlock):
                    world.step()

    turns: list[Turns] = []

    def sleep(pause_s: float) -> None:
        _RUNNING.fiber.suspend(RoutineWork("a pause"))

    clock = SimpleNamespace(monotonic=nccl_transport.time.monotonic, sleep=sleep)
    threads = SimpleNamespace(Thread=Turns, Lock=threading.Lock)
    with mock.patch.object(nccl_transport, "threading", threads), mock.patch.object(nccl_transport, "time", clock):
        yield


def communicators(size: int) -> list[CommunicatorKey]:
    """Everything that the programs do together."""
    everybody = tuple(range(size))
    messages = [CommunicatorKey((a, b), "message") for a in everybody for b in everybody if a != b]
    return messages + [CommunicatorKey(everybody, name) for name in COLLECTIVES if name != "halving_all_reduce"]


def messages_and_collectives(seed: int, *, sanitize: bool = False) -> None:
    """A program of two or three ranks."""
    size = 2 + seed % 2
    with World(seed, size, sanitize=sanitize) as world:
        ends = connected(world, communicators(size), exact=seed % 5 != 4)
        ranks = [Rank(end, device, seed) for end, device in zip(ends, world.devices, strict=True)]
        world.run([rank.run(10) for rank in ranks])


def kills(seed: int, *, sanitize: bool = False) -> None:
    """One of the ranks gives up in the middle; or the only one, before its message to itself is there."""
    if seed % 5 == 4:
        ends_before_a_message_to_itself(seed, sanitize=sanitize)
        return
    size = 2 + seed % 2
    with World(seed, size, sanitize=sanitize) as world, ending_in_one_thread(world):
        ends = connected(world, communicators(size))
        ranks = [Rank(end, device, seed) for end, device in zip(ends, world.devices, strict=True)]

        def abort_all() -> bool:
            old = [end for end in ends if end._aborted is None]
            for end in old:
                with world.at(world.devices[end.rank]):
                    end.abort("the step's deadline is over")
            return bool(old)

        world.at_deadline = abort_all
        dies = world.random.randrange(size)
        at = world.random.randint(2, 7)
        world.run([rank.survive(7, at if rank.end.rank == dies else 0) for rank in ranks])


def ends_before_a_message_to_itself(seed: int, *, sanitize: bool) -> None:
    """Of any stream's memory to any other's, for which any stream waits, or none. Nobody writes to what is allocated then."""

    def routine(end: NcclTransport, device: LateDevice) -> Routine[None]:
        streams = [device.default, device.stream(), device.stream()]
        home, sender, waiter = (world.random.choice(streams) for _ in range(3))
        with home.current():
            out = torch.zeros(5, device=pretend.device())
            taken = end.recv(out, source=0, tag=1)
        with sender.current():
            end.send(torch.ones(5, device=pretend.device()), to=0, tag=1)
        if world.random.random() < 0.8:
            with waiter.current():
                taken.wait_on_stream()
        else:
            yield RoutineWait(home.record_event(), "time to pass")
            taken.done()
        del taken, out
        end.close()
        with home.current():
            other = torch.full((5,), 7.0, device=pretend.device())
        for stream in streams:
            yield RoutineWait(stream.record_event(), "what was begun")
        assert (other == 7).all().item()

    with World(seed, 1, sanitize=sanitize) as world, ending_in_one_thread(world):
        (end,) = connected(world, [])
        world.run([routine(end, world.devices[0])])


def conformance(seed: int, *, sanitize: bool = False) -> None:
    """One case of the suite that all transports pass, the next one for each seed."""
    name = list(transport_cases.CASES)[seed % len(transport_cases.CASES)]
    size = 2 + seed // len(transport_cases.CASES) % 2
    with World(seed, size, sanitize=sanitize) as world, mock.patch.object(transport_cases, "BIG", 3 << 10):
        ends = connected(world, all_communicators(size))
        world.run([transport_cases.CASES[name](ThroughDevice(end, pretend.device())) for end in ends])


def owned_runs(sizes: list[int], replicas: int) -> list[list[list[tuple[int, int]]]]:
    """By parameter: the runs of each replica."""
    shares = NestedTensorShares(tuple(sizes), replicas, 16)
    found: list[list[list[tuple[int, int]]]] = [[[] for _ in range(replicas)] for _ in sizes]
    for owner in range(replicas):
        for index, start, stop in shares.runs_of_owner(owner):
            found[index][owner].append((start, stop))
    return found


def reductions(seed: int, *, sanitize: bool = False) -> None:
    """Gradients of replicas are reduced in two steps, to all or to owners of runs; the steps may be given up, and some replicas
    have none of a parameter, and mark some."""
    chosen = random.Random(seed)
    size, fast = 4 if seed % 5 == 4 else 2 + seed % 2, chosen.random() < 0.25
    halved = size == 4 and seed % 10 == 9
    kind, channel = (FastReduction, FAST_REDUCTION_CHANNELS) if fast else (CanonicalReduction, 0)
    everybody = tuple(range(size))
    names = ("all_reduce", "all_to_all", "all_gather", *(("halving_all_reduce",) if size == 4 else ()))
    keys = [CommunicatorKey(everybody, name, channel) for name in names]
    blocks = chosen.choice((4, 8)) if halved else size + chosen.randrange(3)
    cuts = [0, *sorted(chosen.sample(range(1, blocks), size - 1)), blocks]
    if halved:
        cuts = list(range(0, blocks + 1, blocks // 4))
    runs = [range(a, b) for a, b in pairwise(cuts)]
    shapes = [(chosen.choice((3, 70, 600)),) for _ in range(5)]
    defined = [[[chosen.random() < 0.5 for _ in shapes] for _ in range(blocks)] for _ in range(2)]
    holders = chosen.choice((0, 1, 1 + (size > 2))) if kind is CanonicalReduction else 0
    owners = owned_runs([shape[0] for shape in shapes], size) if holders else []
    marks = [[{i for i in range(5) if chosen.random() < 0.2} for _ in everybody] for _ in range(2)]

    def two_steps(reduction: GradientReduction, end: NcclTransport, device: LateDevice) -> Routine[None]:
        own = random.Random(f"{seed} {end.rank}")
        for step in range(2):
            reduction.parameters_to_mark = lambda step=step: marks[step][end.rank]
            reduction.start()
            for index in reversed(range(5)) if runs[end.rank] else ():
                rows = {
                    (b, b + 1): {
                        index: torch.ones(shapes[index], device=pretend.device()).mul_(1 + b + step)
                        if defined[step][b][index]
                        else None
                    }
                    for b in runs[end.rank]
                }
                reduction.submit_gradients([index], rows)
                del rows
                if own.random() < 0.3:
                    yield RoutineWait(device.record_event(), "time to pass")
                reduction.poll()
            if step == gives_up:
                return
            found = yield from reduction.finish()
            for index, total in enumerate(found):
                there = [1 + b + step for b in range(blocks) if defined[step][b][index]]
                mine = [b for b in runs[end.rank] if defined[step][b][index]]
                assert (index in reduction.defined_here) == bool(mine), (step, index)
                totals = [total] if not holders else reduction.owned_totals[index]
                assert holders or total is not None
                assert all(one is not None and bool((one == sum(there)).all()) for one in totals), (step, index)
            assert reduction.marked_parameters == set().union(*marks[step]), step
            yield from reduction.stream_waits.finish()

    def routine(end: NcclTransport, device: LateDevice) -> Routine[None]:
        parameters = [(torch.Size(shape), torch.float32) for shape in shapes]
        reduction = kind(
            end, group=everybody, runs=runs, block_count=blocks, parameters=parameters, bucket_bytes=1500,
            device=pretend.device(), owners=owners, holders=holders or 1,
        )  # fmt: skip
        try:
            yield from two_steps(reduction, end, device)
        except CommError:
            assert gives_up is not None
        if gives_up is None:
            return
        slots = {id(bucket.replicas.slot): bucket.replicas.slot for bucket in reduction.buckets}.values()
        lengths = [slot._memory.numel() // 4 for slot in slots if slot is not None] + [shape[0] for shape in shapes] * blocks
        end.abort("the step is given up")
        del reduction
        end.close()
        fresh = [torch.full((length,), 0.5, device=pretend.device()) for length in lengths]
        for stream in world.streams:
            if stream.device is device:
                yield RoutineWait(stream.record_event(), "whatever is left to be done")
        assert all(bool((one == 0.5).all()) for one in fresh), "a reduction writes to memory of others"

    by_host = mock.patch.multiple(NcclTransport, run_before=lambda *_, **__: None, run_after=lambda *_, **__: None)
    in_streams = chosen.choice((by_host, contextlib.nullcontext()))
    gives_up = chosen.choice((0, 1)) if chosen.random() < 0.3 else None
    with World(seed, size, sanitize=sanitize) as world, ending_in_one_thread(world), in_streams:
        ends = connected(world, keys)
        world.run([routine(end, device) for end, device in zip(ends, world.devices, strict=True)])
