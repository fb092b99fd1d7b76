"""What a process with the pretended device runs for `tests/parity/test_gpu_process.py`: checks that fail with an assertion.

A process of its own, because autograd counts the devices when it is first used.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from helpers import checkpoint_folders as checkpoint_files
from helpers import metrics, pretend, torch_flesh, ugly_models, zero_layouts
from helpers.generations import SHARDS, Generations, mesh
from helpers.operation_budget import NORM, counting
from helpers.parity import PRECISIONS, STEPS, Layout, Precision, expected
from helpers.shard_grid import Cell, different, graph
from helpers.shard_grid import run as run_cell
from torch import nn
from torch.utils.data import Dataset

from raypar.job import DataConfig, Job, LossConfig, MetricConfig, ModelConfig, OptimizerConfig, ValidationConfig
from raypar.job.read_job import load_job
from raypar.model.capture.captured_layer import cache_of
from raypar.plan import ParallelPlan
from raypar.plan.pieces import AdoptPlanCommand, PieceMove, may_move_directly
from raypar.worker.elastic_worker import ElasticWorker
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.optimizer_and_parameter_groups import build_optimizer
from raypar.worker.step.optimizer_state import OptimizerState, read_optimizer_state, write_optimizer_state

State = dict[str, Any]
KINDS = ("kill", "zombie", "late_answer", "join", "drain")
LIMITS = {"step_deadline_s": 0.5, "start_deadline_s": 1.0, "pass_deadline_s": 2.0, "status_s": 0.5, "adopt_s": 2.0}


def begin(state: State) -> None:
    """Before the first backward pass."""
    pretend.device()
    torch.backends.cuda.enable_flash_sdp(False)  # of the CPU too: the device has no attention in one piece


def on_device(value: Any) -> bool:
    """Whether it lies there."""
    return isinstance(value, torch.Tensor) and value.device == pretend.device() and type(value.detach()) is pretend.OnDevice


def refuses(state: State) -> int:
    """How many of the mistakes that a GPU would find it finds."""
    x = torch.ones(3, 4).to(pretend.device())
    assert (x + 1).sum().item() == 24 and x.cpu().device.type == "cpu" and on_device(x.view(-1))
    found = 0
    for call in (
        lambda: x + torch.ones(4),
        lambda: x.numpy(),
        lambda: torch.stack([x, torch.ones(3, 4)]),
        lambda: torch.add(torch.ones(3, 4), 1, out=x),
        lambda: torch.nn.functional.linear(torch.ones(3, 4), x),
    ):
        try:
            call()
        except (RuntimeError, TypeError):
            found += 1
    return found


def trains(state: State, layout: Layout) -> None:
    """Five steps and a validation on the device: losses, norms, parameters and optimizer state as in one plain process."""
    want = expected(layout.model, layout.microbatches, layout.blocks, layout.compute)
    data = layout.job.data
    job = layout.job.replace(
        validation=ValidationConfig(function=data.function, args=data.args, samples=11), **measured(layout)
    )
    with OneProcessRun(job, layout.plan, layout.schedule, device=pretend.device()) as run:
        for step in range(STEPS):
            reports = run.step(step)
            assert {r.loss for r in reports} == {want.losses[step]}, step
            assert {repr(r.norm) for r in reports} == {repr(want.norms[step])}, step
        in_training, validated = run.metrics, (run.validate(STEPS), run.metrics)
        for name, copies in run.parameters().items():
            assert all(on_device(copy) and torch.equal(copy.cpu(), want.parameters[name]) for copy in copies), name
        for name, found in run.optimizer_state().items():
            for kept in found:
                assert on_device(kept["exp_avg"]) and not on_device(kept["step"])
                assert all(torch.equal(value.cpu(), want.state[name][key]) for key, value in kept.items()), name
    with OneProcessRun(job, layout.plan, layout.schedule) as plain:
        for step in range(STEPS):
            plain.step(step)
        assert plain.metrics == in_training and bool(in_training) == bool(job.metrics)
        assert (plain.validate(STEPS), plain.metrics) == validated


def folds(state: State, layouts: list[Layout]) -> None:
    """Norms with running statistics: parameters are the CPU's, averages those of one worker on the device under every layout,
    and the CPU's but for rounding."""
    want = expected(layouts[0].model, layouts[0].microbatches, layouts[0].blocks)
    kept: dict[str, torch.Tensor] = {}
    for layout in layouts:
        with OneProcessRun(layout.job, layout.plan, layout.schedule, device=pretend.device(), seed=1) as run:
            for step in range(STEPS):
                assert {r.loss for r in run.step(step)} == {want.losses[step]}, (layout, step)
            for name, copies in run.parameters().items():
                assert all(torch.equal(copy.cpu(), want.parameters[name]) for copy in copies), (layout, name)
            for name, copies in run.buffers().items():
                first = kept.setdefault(name, copies[0].cpu())
                assert all(on_device(copy) and torch.equal(copy.cpu(), first) for copy in copies), (layout, name)
    assert kept.keys() == want.buffers.keys()
    for name, found in kept.items():
        torch.testing.assert_close(found, want.buffers[name], rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(found, want.buffers[name]) for name, found in kept.items()), "another arithmetic"


def divides(state: State, layout: Layout, level: int) -> None:
    """Replicas on the device that divide state (`plan.zero`), a parameter between several of them: the CPU's bits."""
    want = zero_layouts.expected(layout.model, layout.microbatches, layout.blocks)
    with (
        zero_layouts.small_pieces(),
        OneProcessRun(layout.job, layout.plan.with_zero(level), layout.schedule, device=pretend.device(), seed=1) as run,
    ):
        for step in range(STEPS):
            assert {r.loss for r in run.step(step)} == {want.losses[step]}, step
        for name, copies in run.parameters().items():
            assert all(on_device(copy) and torch.equal(copy.cpu(), want.parameters[name]) for copy in copies), name


class Decides(nn.Module):
    """Its forward asks for the batch's values between units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if x[0, 0] > 0:
            hidden = hidden * 2
        return self.last(hidden if x[-1, 1] > 0 else -hidden)


class Signs(Dataset[dict[str, torch.Tensor]]):
    """Samples that are positive or negative, in turns of several lengths."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = torch.randn(6, generator=torch.Generator().manual_seed(index)).abs()
        return {"x": numbers * (-1 if index % 5 < 2 else 1), "y": torch.tensor(index % 3)}


def decides(state: State, recompute: bool, precision: Precision = None) -> None:
    """What the forward asks of a batch is read on the host: its paths are those of the CPU, and the vote alone reads from the
    device."""
    spec = Job(
        name="decides",
        seed=3,
        steps=4,
        batch_size=8,
        microbatches=4,
        model=ModelConfig(function=Decides),
        loss=LossConfig(function=F.cross_entropy),
        data=DataConfig(function=Signs, target="y", shuffle=False),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.1}),
        precision=PRECISIONS[precision],
    )
    plan = ParallelPlan.mesh(pp=2, layers=2, recompute=(0, 1) if recompute else ())
    hashes = set()
    for device in (torch.device("cpu"), pretend.device()):
        with OneProcessRun(spec, plan, "gpipe", device=device) as run, counting() as found:
            for step in range(4):
                run.step(step)
            hashes.add(weights_hash({name: copies[0] for name, copies in run.parameters().items()}))
            cache = cache_of(next(iter(run.cores[0].stages[0, 0].modules.values())))
            assert sum(map(len, cache._traces.values())) == 4  # paths
    assert len(hashes) == 1 and set(found.reads) <= {NORM, "losses and counts for the vote"}, found.reads


def measured(layout: Layout) -> dict[str, Any]:
    """Metrics of every step and of the validation, of models whose output has a class for each token."""
    functions = (metrics.accuracy, metrics.certainty, metrics.Median) if layout.model == "tangled" else ()
    return {"metrics": {f.__name__: MetricConfig(function=f) for f in functions}, "metrics_every": bool(functions) * 1}


def resumes(state: State, folder: str) -> None:
    """What is saved on either device is gone on with on the other one."""
    spec = ugly_models.job("tangled", steps=4)
    plan = ParallelPlan.mesh(pp=2, dp=2, layers=len(make_layer_graph(spec).layers))
    places = (torch.device("cpu"), pretend.device())
    ends = set()
    for first in places:
        with OneProcessRun(spec, plan, "1f1b", device=first) as run:
            run.step(0), run.step(1)
            path = checkpoint_files.save_run(run, Path(folder) / first.type, 2)
        for second in places:
            with OneProcessRun(spec, plan, "zb-h1", device=second) as run:
                for core in run.cores:
                    core.load(path)
                run.step(2), run.step(3)
                assert all(on_device(copies[0]) == (second == pretend.device()) for copies in run.parameters().values())
                ends.add(weights_hash({name: copies[0] for name, copies in run.parameters().items()}))
    assert len(ends) == 1


def keeps(state: State, fused: bool) -> None:
    """An optimizer's state goes where the optimizer itself would have it."""
    spec = OptimizerConfig(function="torch.optim:AdamW", args={"fused": fused})
    made = []
    for where in (torch.device("cpu"), pretend.device()):
        parameter = torch.nn.Parameter(torch.ones(4, device=where))
        parameter.grad = torch.ones(4, device=where)
        optimizer = build_optimizer(spec, {"a": parameter})
        optimizer.step()
        made.append(optimizer)
    for source in made:
        kept = {name: dict(state) for name, state in read_optimizer_state(source).parameters.items()}
        for target in made:
            write_optimizer_state(target, OptimizerState(kept))
            found = read_optimizer_state(target).parameters["a"]
            there = target is made[1]
            assert on_device(found["exp_avg"]) == there and on_device(found["step"]) == (there and fused)
            target.step()


def hands_over(state: State, dests: int) -> set[str]:
    """The kinds of memory from which a worker's state leaves, when so many others want it."""
    spec = ugly_models.job("tangled", steps=1)
    left: set[str] = set()

    class Post:
        """A transport that takes everything."""

        rank = 0

        def send(self, tensor: torch.Tensor, *, to: int, tag: int) -> Any:
            if tensor.dtype == torch.float32 and tensor.dim():
                left.add(tensor.device.type)

    with OneProcessRun(
        spec, ParallelPlan.mesh(layers=len(make_layer_graph(spec).layers)), "1f1b", device=pretend.device()
    ) as run:
        run.step(0)
        body = ElasticWorker(run.cores[0], 0)
        ways = tuple(PieceMove(0, dest, piece) for dest in range(1, dests + 1) for piece in body.pieces()[:3])
        part = AdoptPlanCommand(None, {worker: worker for worker in range(dests + 1)}, 1, ways, direct=may_move_directly(ways))
        next(body._exchange(part, Post(), body._held_state()), None)  # type: ignore[arg-type]
    return left


def survives(state: State, replicas: int, stages: int, whole: bool) -> set[str]:
    """Faults of all kinds, on the device (`helpers.protocol`): the end is that of a quiet run on the CPU. In which ways state
    came back."""
    from helpers.protocol import Fault, random_faults

    spec = ugly_models.job("tangled", microbatches=4, steps=5)
    work = torch_flesh.TorchJob(spec, make_layer_graph(spec), mirror_every=0 if replicas > 1 else 1)
    plan = ParallelPlan.mesh(dp=replicas, pp=stages, layers=work.layers)
    quiet = LIMITS | {"capacity_s": 5.0, "save_every": 0 if replicas == 1 else 2}
    plain, reference = torch_flesh.simulate(work, plan, **quiet)
    there = replace(work, device=pretend.device())
    assert torch_flesh.simulate(there, plan, **quiet)[1] == reference
    ways: set[str] = set()
    half = plain.points // 2
    histories = [[Fault(at, "kill")] for at in (range(plain.points // 6, plain.points, 11) if whole else [half])]
    histories += [[Fault(half, "drain", 2), Fault(5, "drain", 3)]]  # with two replicas nobody is left in the last stage
    histories += [random_faults(seed, 3, plain, workers=4, kinds=KINDS) for seed in range(30 if whole else 1)]
    for faults in histories:
        world, found = torch_flesh.simulate(there, plan, faults, **quiet)
        assert world.over.end == "done" or "the only copies" in world.over.why, world.tell(f"{faults}: {world.over.why}")
        assert found in (reference, None), world.tell(f"{faults}: other bits")
        adopted = "".join(line for line in world.story if "AdoptPlan(" in line)
        ways |= {way for way in ("from_mirror=True", "from_checkpoint=True", "Move(") if way in adopted}
    return ways


# -- shards --------------------------------------------------------------------------------------------------------------------


def trains_on_shards(state: State, cell: Cell) -> None:
    """Three steps on the device: losses, norms, gradients, parameters and optimizer state as on the CPU."""
    found = run_cell(cell, cell.plan, device=pretend.device())
    assert list(different(found, run_cell(cell, cell.plan))) == []


def trains_on_rows(state: State, shards: int) -> None:
    """Two steps of a U-Net whose images are cut by rows, with batch norms by the statistics of all rows: as on the CPU."""
    smaller = ["model.args={width: 4, depth: 2}", "batch_size=4", "microbatches=2", "steps=2"]
    spec = load_job(str(Path(__file__).parents[2] / "jobs" / "unet_rows.yaml"), smaller).replace(validation=None)
    layers = make_layer_graph(spec)
    plan = ParallelPlan.mesh(tp=shards, layers=len(layers.layers)).with_virtual_shards(spec.virtual_shards)
    found = []
    for device in (torch.device("cpu"), pretend.device()):
        with OneProcessRun(spec, plan, "1f1b", graph=layers, device=device) as local:
            local.step(0), local.step(1)
            found.append([{name: own[0].cpu() for name, own in each().items()} for each in (local.parameters, local.buffers)])
    (want, averages), (parameters, buffers) = found
    assert [name for name, value in want.items() if not torch.equal(value, parameters[name])] == []
    for name, value in averages.items():  # another arithmetic
        torch.testing.assert_close(buffers[name], value, rtol=1e-5, atol=1e-6)


def changes_shards(state: State, model: str, path: list[tuple[int, int, int]], folder: str) -> None:
    """Bodies that go from plan to plan (replicas x stages x shards), two steps under each, half of them new in the third: every
    checkpoint is that of the same path on the CPU, and those that load it on the other device end alike."""
    spec = Cell(model, "1f1b", (1,), (1,), 5, True).job
    there = torch_flesh.TorchJob(spec, graph(model), shards=SHARDS, device=pretend.device())
    live = {work.device.type: Generations(work) for work in (there, replace(there, device=torch.device("cpu")))}
    for number, shape in enumerate(path):
        plan, done = mesh(model, *shape), 2 * number
        first = plan.world // 2 if number == 2 else 0
        saved = []
        for kind, run in live.items():
            run.adopt(plan, list(range(first, first + plan.world)), done)
            run.step(done), run.step(done + 1)
            for body in run.bodies.values():
                assert all(
                    on_device(kept[checkpoint_files.PARAMETER]) == (kind == pretend.NAME)
                    for kept in body._stages_state().values()
                )
            saved.append(run.save(Path(folder) / kind, done + 2))
        same_tensors(*saved)
    last = []
    for device, path_saved in zip((torch.device("cpu"), pretend.device()), saved, strict=True):
        with OneProcessRun(spec, mesh(model, 1, 2, 2), "1f1b", graph=graph(model), device=device) as local:
            for core in local.cores:
                core.load(path_saved)
            local.step(2 * len(path))
            last.append(checkpoint_files.save_run(local, Path(folder) / f"last-{device.type}", 1, contract={}))
    same_tensors(*last)


def same_tensors(one: Path, other: Path) -> None:
    """Two checkpoints."""
    found, want = checkpoint_files.read_checkpoint_state(one), checkpoint_files.read_checkpoint_state(other)
    assert found.keys() == want.keys()
    for name, kinds in want.items():
        for kind, value in kinds.items():
            assert torch.equal(torch.as_tensor(found[name][kind]), torch.as_tensor(value)), (name, kind)


def survives_on_shards(state: State, replicas: int, shards: int, whole: bool) -> set[str]:
    """As `survives`, with workers that hold slices."""
    from helpers.protocol import Fault, random_faults

    spec = Cell("llama", "1f1b", (1,), (1,), 4, True).job
    there = torch_flesh.TorchJob(
        spec, graph("llama"), shards=SHARDS, mirror_every=0 if replicas > 1 else 1, device=pretend.device()
    )

    def plans(generation: int, workers: int) -> ParallelPlan:
        seats = max(1, workers // shards)
        return mesh("llama", 1 if seats > 1 else seats, 2 if seats > 1 else 1, shards)

    policy = LIMITS | {"capacity_s": 5.0, "validates": False, "plans": plans, "hires": True, "min_workers": shards}
    plan = mesh("llama", replicas, 1, shards)
    plain, reference = torch_flesh.simulate(replace(there, device=torch.device("cpu")), plan, **policy)
    assert reference is not None
    ways: set[str] = set()
    at = range(plain.points // 3, plain.points, plain.points // 12) if whole else [plain.points // 2]
    histories = [[Fault(point, "kill")] for point in at]
    if whole and replicas > 1:
        histories += [random_faults(seed, 2, plain, workers=4, kinds=KINDS) for seed in range(10)]
    for faults in histories:
        world, found = torch_flesh.simulate(there, plan, faults, **policy)
        assert world.over.end == "done" or "the only copies" in world.over.why, world.tell(f"{faults}: {world.over.why}")
        assert found in (reference, None), world.tell(f"{faults}: other bits")
        ways |= {way for line in world.story if "AdoptPlan(" in line for way in ("from_mirror=True", "Move(") if way in line}
    return ways
