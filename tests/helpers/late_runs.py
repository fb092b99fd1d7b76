"""Whole steps of all workers of a plan on late devices, over the `nccl` transport: the bits are those of a device that computes
at once, over the local transport.

Batches are copied as on a GPU: from page-locked memory, in a stream of their own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from helpers import parity, pretend
from helpers.late_device import World, pinned
from helpers.late_nccl import connected
from helpers.late_programs import conformance, ending_in_one_thread, kills, messages_and_collectives, reductions
from helpers.offloaded_layouts import small_memory_offloaded
from helpers.parity import Layout
from helpers.pretend import OnDevice
from helpers.shard_grid import SHALLOW, Cell
from helpers.zero_layouts import small_pieces
from torch import Tensor

from raypar.job import Job
from raypar.model.tensor_parallel import vocabulary_parallel
from raypar.plan import ParallelPlan, bundle_parts
from raypar.plan.offloading import HOST
from raypar.worker import run_in_one_process
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.process import gpu_setup
from raypar.worker.process.gpu_setup import DeviceBatchSource
from raypar.worker.required_communicators import required_communicators
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage import activation_offloading
from raypar.worker.stage.activation_offloading import OffloadedTensor
from raypar.worker.state import activation_host_memory
from raypar.worker.worker_core import WorkerCore

STEPS = 2


class TorchWithLateStreams:
    """`torch`, whose `torch.cuda` has the streams of the late device that is running."""

    def __init__(self, world: World) -> None:
        self.cuda = SimpleNamespace(
            current_stream=lambda device: world.here.current, stream=lambda stream: stream.current(), Stream=None
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def late(world: World) -> Iterator[None]:
    """An `OneProcessRun` that is made and run inside has a device for each worker, and transports between these."""
    adopt, init = WorkerCore.adopt, WorkerCore.__init__
    made: list[WorkerCore] = []

    def made_on_its_device(core: WorkerCore, *args: Any, **kwargs: Any) -> None:
        made.append(core)
        with world.at(world.devices[len(made) - 1]):
            init(core, *args, **kwargs)

    def adopted(core: WorkerCore, part: Any, transport: Any, **kwargs: Any) -> None:
        rank = made.index(core)
        with world.at(world.devices[rank]):
            adopt(core, part, all_ends(kwargs.get("nodes", ()))[rank], **kwargs)

    @functools.cache
    def all_ends(nodes: tuple[int, ...]) -> list[Any]:
        keys = set()
        for rank, part in enumerate(parts):
            command: Any = SimpleNamespace(assignment=part, moves=(), direct=False, nodes=nodes)
            made[rank].take_layouts_from_assignment(part)
            keys |= required_communicators(command, rank, made[0].spec, made[rank].layout)
        return connected(world, sorted(keys))

    parts: list[Any] = []
    make = run_in_one_process.make_worker_assignments

    def noted(*args: Any, **kwargs: Any) -> Any:
        parts.extend(make(*args, **kwargs))
        return parts

    def copies(source: DeviceBatchSource, *args: Any, **kwargs: Any) -> None:
        init_source(source, *args, **kwargs)
        source._copying = world.here.stream()  # type: ignore[assignment]

    init_source = DeviceBatchSource.__init__
    scheduler = SimpleNamespace(run=lambda routines, mesh: world.run(routines))
    with (
        ending_in_one_thread(world),
        mock.patch.object(gpu_setup, "torch", TorchWithLateStreams(world)),
        mock.patch.object(DeviceBatchSource, "__init__", copies),
        mock.patch.object(torch.Tensor, "pin_memory", pinned),
        mock.patch.object(WorkerCore, "__init__", made_on_its_device),
        mock.patch.object(WorkerCore, "adopt", adopted),
        mock.patch.object(run_in_one_process, "make_worker_assignments", noted),
        mock.patch.object(run_in_one_process, "CooperativeScheduler", lambda seed: scheduler),
    ):
        yield


def end_of(layout: Layout | Cell, nodes: Sequence[int] = (), plan: ParallelPlan | None = None) -> tuple[Any, ...]:
    """Losses, norms, weights and buffers after some steps. `nodes`: by rank, its node; `plan`: another one of the layout."""
    given = {"graph": layout.graph, "device": pretend.device(), "nodes": nodes}
    with OneProcessRun(layout.job, plan or layout.plan, layout.schedule, **given) as run:
        reports = [run.step(step) for step in range(STEPS)]
        told = [(report.loss, report.norm) for reports_of_step in reports for report in reports_of_step]
        every = {name: copy.cpu() for name, copies in run.buffers().items() for name, copy in _numbered(name, copies)}
        return told, weights_hash({name: copies[0].cpu() for name, copies in run.parameters().items()} | every)


def _numbered(name: str, copies: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"{name} {number}", copy) for number, copy in enumerate(copies)]


@functools.cache
def at_once(layout: Layout) -> tuple[Any, ...]:
    """What must come out."""
    return end_of(layout)


def runs_late(layout: Layout, seed: int, *, sanitize: bool = False) -> None:
    """Steps of a plan on late devices."""
    want = at_once(layout)
    with World(seed, layout.plan.world, sanitize=sanitize) as world, late(world):
        assert end_of(layout) == want


@functools.cache
def plans() -> list[Layout]:
    """Those of `parity.layouts` of at most four workers, and of more than one."""
    return [layout for layout in parity.layouts() if 1 < layout.plan.world <= 4]


def plan_of(seed: int) -> Layout:
    """Another one for each seed, as unlike the one before as the list allows."""
    return plans()[seed * 31 % len(plans())]


def steps(seed: int, *, sanitize: bool = False) -> None:
    """Steps of a plan."""
    runs_late(plan_of(seed), seed, sanitize=sanitize)


WRITING = (
    Layout("norms", "1f1b", (2,), 2),
    Layout("norms", "gpipe", (2, 2), 4),
    Layout("norms", "1f1b", (3, 1), 3),
)
"""Plans with replicas of norms that keep running statistics: told in the first step, gathered in the second."""


def buffers(seed: int, *, sanitize: bool = False) -> None:
    """Steps of a plan whose replicas exchange what they have written into buffers."""
    runs_late(WRITING[seed % len(WRITING)], seed, sanitize=sanitize)


ON_SHARDS = Cell(SHALLOW, "1f1b", (1, 1), (2, 2), 2, dtype="float32")
"""Two stages of two shards."""


@functools.cache
def whole_at_once() -> tuple[Any, ...]:
    """What must come out of `parts`."""
    with own_tables():
        return end_of(ON_SHARDS)


def own_tables() -> contextlib.AbstractContextManager[Any]:
    """Every rank's device has a table of its own of where ids are, as in a process of its own."""
    table = vocabulary_parallel._rows_of_all_ids.__wrapped__
    return mock.patch.object(vocabulary_parallel, "_rows_of_all_ids", table)


def parts(seed: int, *, sanitize: bool = False) -> None:
    """Steps of two stages on two nodes, between which all that can be cut travels in parts."""
    want, nodes = whole_at_once(), bundle_parts.node_of_each_replica(ON_SHARDS.plan)
    with (
        own_tables(),
        mock.patch.object(bundle_parts, "LEAST_BYTES_IN_PARTS", 1),
        World(seed, ON_SHARDS.plan.world, sanitize=sanitize) as world,
        late(world),
    ):
        assert end_of(ON_SHARDS, nodes) == want


OWNING = (
    Layout("tangled", "1f1b", (2, 1), 4),
    Layout("tangled", "1f1b", (3,), 6),
    Layout("tangled", "zb-v", (2, 2), 5),
    Cell(SHALLOW, "1f1b", (2,), (2,), 4, sequence=True, dtype="float32"),
)
"""Plans whose replicas divide state: ties of two stages, two of a worker, and gradients that shards add up."""


@functools.cache
def nothing_divided(number: int) -> tuple[Any, ...]:
    """What must come out of `owners`."""
    with small_pieces(), own_tables():
        return end_of(OWNING[number])


def owners(seed: int, *, sanitize: bool = False) -> None:
    """Steps of a plan whose replicas divide state and gradients."""
    number = seed % len(OWNING)
    layout, want = OWNING[number], nothing_divided(number)
    level, holders = 1 + seed // len(OWNING) % 2, 1 + (max(layout.replicas) > 2 and seed // 8 % 2)
    with small_pieces(), own_tables(), World(seed, layout.plan.world, sanitize=sanitize) as world, late(world):
        assert end_of(layout, plan=layout.plan.with_zero(level, holders)) == want


def scattered(seed: int, *, sanitize: bool = False) -> None:
    """Steps of a plan whose gradients are never whole, some of them with a pool that makes replicas wait for each other."""
    number = seed % len(OWNING)
    layout, want = OWNING[number], nothing_divided(number)
    plan = layout.plan.with_zero(seed // len(OWNING) % 4).with_gradients("scatter")
    pool = property(lambda job: 4_000) if seed % 3 and layout.schedule == "1f1b" else Job.reduction_buffer_bytes
    with (
        mock.patch.object(Job, "reduction_buffer_bytes", pool),
        small_pieces(),
        own_tables(),
        World(seed, layout.plan.world, sanitize=sanitize) as world,
        late(world),
    ):
        assert end_of(layout, plan=plan) == want


@contextlib.contextmanager
def offloading_to_host(world: World) -> Iterator[None]:
    """Jobs have `plan.activations_in: host`, tensors of late devices the memory that these have, and copies their streams."""

    def storage_of(tensor: Tensor) -> Any:
        return tensor.memory if isinstance(tensor, OnDevice) else None

    def as_bytes(memory: Any) -> OnDevice:
        made = OnDevice(memory.block.bytes)
        made.memory = memory
        return made

    def tensor_in(memory: Any, saved: OffloadedTensor) -> OnDevice:
        made = OnDevice(memory.raw.view(saved.dtype).as_strided(saved.shape, saved.strides, saved.offset))
        made.memory = memory.memory
        return made

    own = {"storage_of": storage_of, "as_bytes": as_bytes, "tensor_in": tensor_in}
    with (
        small_memory_offloaded(),
        mock.patch.multiple(activation_offloading, **own),
        mock.patch.object(activation_host_memory, "CudaStreams", lambda device: world.here),
        mock.patch.object(Job, "_check_activations_place", lambda job: None),
        mock.patch.object(Job, "activations_in", property(lambda job: HOST)),
    ):
        yield


OFFLOADING = (
    (Layout("tangled", "1f1b", (1,), 3), ()),
    (Layout("tangled", "gpipe", (1, 1), 4), ()),
    (Layout("plain", "zb-h1", (1,), 3), ()),
    (Layout("tangled", "1f1b", (1, 1), 4), (1, 2, 6)),
)
"""Layouts that offload all layers but those with these numbers, which are recomputed."""


def offloaded(seed: int, *, sanitize: bool = False) -> None:
    """Steps of a plan whose activations lie in the host's memory between forward and backward."""
    layout, recomputed = OFFLOADING[seed % len(OFFLOADING)]
    want, layers = at_once(layout), range(len(layout.graph.layers))
    plan = replace(layout.plan, recompute=recomputed).with_offload(set(layers).difference(recomputed))
    with World(seed, plan.world, sanitize=sanitize) as world, offloading_to_host(world), late(world):
        assert end_of(layout, plan=plan) == want
        assert sum(device.copied_out for device in world.devices) > 10


def pinned_copies(seed: int, *, sanitize: bool = False) -> None:
    """Memory goes to the host and comes back, while other work is given the memory that it had."""
    dice, device = random.Random(seed), pretend.device()
    layout = (torch.float32, torch.Size([64]), (1,), 0)
    with (
        World(seed, 1, sanitize=sanitize) as world,
        offloading_to_host(world),
        mock.patch.object(torch.Tensor, "pin_memory", pinned),
    ):
        place = activation_host_memory.HostActivations(device)
        away: list[tuple[int, Any]] = []
        coming: list[tuple[int, Any]] = []
        back: list[tuple[int, Tensor]] = []
        for number in range(40):
            if number < 30:
                made = torch.full((64,), float(number), device=device) + 0
                away.append((number, place.write(activation_offloading.as_bytes(made.memory), 0)))
                del made
            for _ in range(2):
                torch.full((64,), -1.0, device=device)
            if away and (number >= 30 or dice.random() < 0.6):
                coming.append(away.pop(dice.randrange(len(away))))
                coming[-1][1].fetch()
            while len(coming) > (2 if number < 39 else 0):
                what, piece = coming.pop(0)
                memory: Any = piece.wait("it")
                back.append((what, activation_offloading.tensor_in(memory, OffloadedTensor(memory, *layout)) + 0))
                del memory
                piece.release()
        place.settle()
        for what, tensor in back:
            assert tensor.tolist() == [float(what)] * 64, f"{what} came back as {tensor.tolist()[0]}"
        assert len(back) > 20


PROGRAMS: dict[str, Callable[..., None]] = {
    "messages and collectives": messages_and_collectives,
    "conformance": conformance,
    "kills": kills,
    "reductions": reductions,
    "steps": steps,
    "buffers": buffers,
    "parts": parts,
    "owners": owners,
    "scattered": scattered,
    "offloaded": offloaded,
    "pinned copies": pinned_copies,
}


def prepare(program: str, seed: int) -> None:
    """What a seed's outcome is compared with, while nothing is mutated."""
    if program == "steps":
        at_once(plan_of(seed))
    if program == "buffers":
        at_once(WRITING[seed % len(WRITING)])
    if program == "parts":
        whole_at_once()
    if program == "offloaded":
        at_once(OFFLOADING[seed % len(OFFLOADING)][0])
    if program in ("owners", "scattered"):
        nothing_divided(seed % len(OWNING))


def failure(program: str, seed: int, *, sanitize: bool = False) -> str | None:
    """What a seed of a program fails with; None if it passes."""
    prepare(program, seed)
    gc.disable()  # what is freed, and when, shall depend on the seed alone
    try:
        PROGRAMS[program](seed, sanitize=sanitize)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gc.enable()
    return None
