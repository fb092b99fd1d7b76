"""`precision: {compute: bf16}`: layers and the loss in bfloat16 by autocast, all else in float32 (rule 13 of the contract)."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from helpers import ragged, reference, shard_grid, torch_flesh, ugly_models
from helpers.generations import SHARDS, mesh
from helpers.parity import Layout, check_local, differences, different_gradients, layouts
from helpers.protocol import Fault, World
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raypar.errors import DataError, UserCodeError
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, PadConfig, PrecisionConfig, ValidationConfig
from raypar.model.graph import Graph
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.schedule import registry
from raypar.worker.check_layer_shapes import check_layer_shapes
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job
from raypar.worker.process.torch_state_guard import ExpectedTorchState, TorchStateGuard
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.layer_call import LayerCall
from raypar.worker.stage.precision import StagePrecision
from raypar.worker.stage.stage import Stage
from raypar.worker.stage_builder import build_stage

pytestmark = pytest.mark.part(5)

BF16 = PrecisionConfig(compute="bf16")
S = ugly_models.SEQ

# -- schedules x replicas x shards ---------------------------------------------------------------------------------------------

CELLS = [replace(cell, compute="bf16") for number, cell in enumerate(layouts()) if number % 2]
SHARDED = [replace(cell, compute="bf16", dtype="float32") for number, cell in enumerate(shard_grid.cells()) if number % 3 == 1]
SAMPLE = [
    Layout("tangled", "1f1b", (2, 1), 5, compute="bf16"),
    Layout("tangled", "zb-h1", (1, 2), 3, compute="bf16"),
    Layout("plain", "zb-v", (2,), 4, compute="bf16"),
]
SHARDED_SAMPLE = [
    shard_grid.Cell("gpt", "zb-h1", (2, 1), (2, 2), 4, True, "float32", compute="bf16"),
    shard_grid.Cell("dropped", "1f1b", (1, 1), (1, 2), 3, False, "float32", compute="bf16"),
]


def test_the_grids_have_at_least_60_layouts_of_every_kind():
    for cells in (CELLS, SHARDED):
        assert len(set(cells)) == len(cells) >= 60
        assert {cell.schedule for cell in cells} == set(registry.NAMES)
    assert {cell.model for cell in SHARDED} == {"gpt", "llama", "dropped"}


@pytest.mark.parametrize("layout", [*SAMPLE, *(pytest.param(cell, marks=pytest.mark.full) for cell in CELLS)], ids=str)
def test_a_layout_in_bfloat16_gives_the_bits_of_one_process_under_autocast(layout):
    check_local(layout)


@pytest.mark.parametrize("cell", [*SHARDED_SAMPLE, *(pytest.param(cell, marks=pytest.mark.full) for cell in SHARDED)], ids=str)
def test_a_layout_with_shards_in_bfloat16_gives_the_bits_of_the_same_shards_under_autocast(cell):
    shard_grid.check(cell)


# -- through a kill ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Killed:
    """A run in which a worker dies at a part of its instructions and messages."""

    model: str
    schedules: tuple[str, ...]
    replicas: int
    stages: int
    shards: int
    at: float

    def run(self, faults: list[Fault], work: torch_flesh.TorchJob, plan: ParallelPlan) -> tuple[World, dict[str, list[Tensor]]]:
        """The world at its end, and the parameters that its last workers hold."""
        plans = None if self.shards == 1 else self.plan_for
        world = World(work, plan, faults, flesh=torch_flesh.TorchFlesh, plans=plans, **torch_flesh.QUICK)
        try:
            assert world.run().end == "done", world.tell(str(world.over))
            found: dict[str, list[Tensor]] = {}
            for worker in world.driver.machine.membership.members:
                core = world.processes[worker].body.core
                for stage in core.stages.values():
                    for name, parameter in stage.parameters.items():
                        key = f"{name} {core.assignment.plan.roles[core.rank][0].shard}"
                        found.setdefault(key, []).append(parameter.detach().clone())
            return world, found
        finally:
            world.flesh.close()

    def plan_for(self, generation: int, workers: int) -> ParallelPlan:
        """The plan for fewer workers: whole seats of as many shards."""
        return mesh(self.model, max(1, workers // self.shards), 1, self.shards)


KILLS = [
    Killed("tangled", ("zb-h1",), 2, 2, 1, 0.6),
    Killed("plain", ("1f1b",), 2, 2, 1, 0.4),
    Killed("tangled", ("gpipe", "1f1b"), 3, 1, 1, 0.5),
    Killed("tangled", ("interleaved",), 2, 2, 1, 0.7),
    Killed("gpt", ("1f1b",), 2, 1, 2, 0.5),
    Killed("gpt", ("zb-h1",), 3, 1, 2, 0.7),
]


@pytest.mark.ci
@pytest.mark.parametrize(
    "killed",
    [pytest.param(case, marks=[pytest.mark.full] * (number not in (1, 4))) for number, case in enumerate(KILLS)],
    ids=str,
)
def test_a_run_in_bfloat16_that_loses_a_worker_ends_with_the_bits_of_one_process(killed):
    cell = shard_grid.Cell("gpt", "1f1b", (1,), (killed.shards,), 4, False, "float32", compute="bf16")
    if killed.shards == 1:
        spec = ugly_models.job(killed.model, microbatches=4, steps=4, precision=BF16)
        graph = make_layer_graph(spec)
        want = {f"{name} 0": value for name, value in reference.train(graph, spec).parameters.items()}
        plan = ParallelPlan.of(
            (killed.replicas,) * killed.stages,
            layers=len(graph.layers),
            chunks=registry.resolve_chunks_per_worker(killed.schedules[0], None),
        )
    else:
        spec, graph, plan = cell.job, cell.graph, mesh("gpt", killed.replicas, killed.stages, killed.shards)
        plain = shard_grid.plain(cell, (killed.shards,) * len(graph.layers))
        want = {f"{name} {shard}": value for (name, _, shard), (value,) in plain.parameters.items()}
    work = torch_flesh.TorchJob(spec, graph, killed.schedules, shards=SHARDS if killed.shards > 1 else ())
    quiet, found = killed.run([], work, plan)
    assert_equal(found, want)
    world, found = killed.run([Fault(int(killed.at * quiet.points), "kill")], work, plan)
    assert len(world.driver.machine.membership.members) < plan.world, world.tell("nobody died")
    assert_equal(found, want)


def assert_equal(found: dict[str, list[Tensor]], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    assert [name for name, copies in found.items() if not all(torch.equal(copy, want[name]) for copy in copies)] == []


# -- layers as people write them -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Of numbers, as a sequence of heads; adds in place to what it has made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(S, 3 * S), nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 3, 2, S // 2).unbind(1)
        y = x + 0.0
        y += self.out(F.scaled_dot_product_attention(q[None], k[None], v[None]).reshape(-1, S))
        return y


class Again(nn.Module):
    """One Linear three times: with autocast's cache its gradients would be added in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(S, S)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(self.linear(x).tanh()).tanh())


class Watched(Again):
    """Computes once without gradients, which must not leave a cast without a gradient behind."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = self.linear(x).square().mean()
        return super().forward(x) / (1 + size)


class Exact(Again):
    """Switches autocast off for a part, and asks whether it is on."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.is_meta or torch.is_autocast_enabled("cpu")
        y = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            z = torch.linalg.vector_norm(self.linear(x.float()).double(), dim=-1, keepdim=True)
        return y * z.to(y.dtype)


class Own(Again):
    """Enters an autocast of its own, with the cache."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            return super().forward(x)


class Checkpointed(Again):
    """Runs its forward again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) if torch.is_grad_enabled() else super().forward(x)


class Product(torch.autograd.Function):
    """x w, as people write such functions for autocast: the backward pass computes under the forward's."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


class Handmade(Again):
    """Computes by an autograd function of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(S, S))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight).tanh() + super().forward(x)


class Waves(nn.Module):
    """Complex in the middle, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(S, S)
        self.phase = nn.Parameter(torch.ones(S // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.linear(x)) * torch.view_as_complex(self.phase)
        return F.dropout(torch.fft.irfft(spectrum, n=S), 0.2, self.training)


def squared(output: Tensor, target: Tensor) -> Tensor:
    """A mean that is bfloat16 itself."""
    return (output.squeeze(-1) - target.to(output.dtype)).square().mean()


def exact(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """In float64, with a count that is a tensor."""
    return (output.squeeze(-1).double() - target).square().sum(), torch.tensor(len(target))


def job_of(middle: Callable[[], nn.Module], loss: Callable[..., object] = squared) -> tuple[Graph, Job]:
    layers = [("a", lambda: nn.Linear(S, S)), ("b", middle), ("c", middle), ("d", lambda: nn.Linear(S, 1))]
    job = ugly_models.job("plain", microbatches=4, steps=2, virtual_replicas=2, precision=BF16, loss=LossConfig(function=loss))
    return Graph.sequential(layers, input="x"), job


def logistic(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.squeeze(-1), target)


PAIRS = [
    (Attention, squared),
    (Again, exact),
    (Watched, logistic),
    (Exact, squared),
    (Own, squared),
    (Checkpointed, exact),
    (Handmade, squared),
    (Waves, logistic),
]


@pytest.mark.parametrize("schedule, stages", [("zb-h1", 2), pytest.param("1f1b", 1, marks=pytest.mark.full)])
@pytest.mark.parametrize("middle, loss", PAIRS)
def test_a_layer_in_bfloat16_has_the_bits_of_one_process(middle, loss, schedule, stages):
    graph, job = job_of(middle, loss)
    want = reference.train(graph, job)
    with OneProcessRun(job, ParallelPlan.of((1,) * stages, layers=4), schedule, graph=graph) as run:
        for step in range(job.steps):
            assert [report.loss for report in run.step(step)] == [want.losses[step]] * stages
            assert not different_gradients(run, want, step)
            assert {g.dtype for copies in run.gradients().values() for g in copies} == {torch.float32}
        assert run.warnings == []


def stage_of(middle: Callable[[], nn.Module], **changes: object) -> tuple[Stage, dict[str, Tensor]]:
    """A whole model as one stage, and a microbatch for it."""
    graph, job = job_of(middle)
    job, routing = job.replace(**changes), MicrobatchRouting(ParallelPlan.of((1,), layers=4), job.batching)
    stage = build_stage(graph, routing.plan, 0, spec=job, routing=routing, replica=0, loss_fn=job.loss.partial())
    stage.begin_step(0)
    generator = torch.Generator().manual_seed(3)
    return stage, {"x": torch.randn(3, S, generator=generator), "y": torch.rand(3, generator=generator)}


def test_without_mixed_precision_calls_are_not_wrapped():
    stage, _ = stage_of(Again, precision=PrecisionConfig())
    assert all(isinstance(layer.call, LayerCall) for layer in stage.layers)


def test_values_between_layers_are_bfloat16_and_everything_that_stays_is_float32():
    graph, job = job_of(Again)
    routing = MicrobatchRouting(ParallelPlan.of((1, 1), layers=4), job.batching)
    first, second = (
        build_stage(graph, routing.plan, i, spec=job, routing=routing, replica=0, loss_fn=job.loss.partial()) for i in (0, 1)
    )
    (name,) = first.values.outgoing
    for stage in (first, second):
        stage.begin_step(0)
    batch = {"x": torch.randn(3, S), "y": torch.rand(3)}
    sent = first.forward(0, {}, batch)
    second.forward(0, sent, batch)
    returned = second.backward(0, {})
    first.backward(0, returned)
    assert sent[name].dtype == returned[name][0].dtype == torch.bfloat16
    assert second.losses[0][0].dtype == torch.float32
    leaves = [*first.weights.leaves, *second.weights.leaves]
    assert {leaf.dtype for leaf in leaves} == {torch.float32} and not torch.is_autocast_enabled("cpu")


def test_validation_computes_in_bfloat16_too():
    stage, batch = stage_of(Attention)
    stage.evaluate(0, {}, batch)
    with torch.no_grad():
        x = batch["x"]
        for module in stage.modules.values():
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                x = module(x)
        want = squared(x, batch["y"]).float() * 3.0
    total, count = stage.losses[0]
    assert x.dtype == torch.bfloat16 and torch.equal(torch.as_tensor(total), want) and count == 3.0


@pytest.mark.ci
def test_validation_of_fused_layers_has_the_bits_of_one_process():
    """In evaluation PyTorch computes a `TransformerEncoderLayer` by one operation, which returns bfloat16; in training, and on
    shards, the layer returns float32."""
    data = {"function": ragged.Masked, "pad": PadConfig(multiple=8)}
    job = ugly_models.job("plain", microbatches=2, batch_size=4).replace(
        model=ModelConfig(function=ragged.Reader),
        loss=LossConfig(function=ragged.next_word),
        data=DataConfig(**data, target="labels"),
        validation=ValidationConfig(**data, samples=4),
        precision=BF16,
    )
    torch.manual_seed(job.seed)
    model, total, count = ragged.Reader().eval(), 0.0, 0
    for first in (0, 2):
        batch = ragged.longest(
            [*map(ragged.Sentences().__getitem__, (first, first + 1)), {"ids": [0] * 8, "labels": [0] * 8, "title": ""}]
        )
        ids, mask, labels = (batch[name][:2].contiguous() for name in ("ids", "mask", "labels"))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            output = model(ids, mask)
            assert output.dtype == torch.bfloat16
            lost, words = ragged.next_word(output, labels)
        total, count = total + float(lost), count + int(words)
    graph = make_layer_graph(job)
    for plan in (ParallelPlan.mesh(layers=len(graph.layers)), ParallelPlan.mesh(pp=2, dp=2, layers=len(graph.layers))):
        with OneProcessRun(job, plan, "1f1b", graph=graph) as run:
            assert run.validate(0) == total / count
    with OneProcessRun(job, ParallelPlan.mesh(tp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        assert run.validate(0) == pytest.approx(total / count, rel=1e-2)


def test_a_step_may_go_on_in_any_thread():
    graph, job = job_of(Again)
    want = reference.train(graph, job)
    with OneProcessRun(job, ParallelPlan.of((1, 1), layers=4), "zb-h1", graph=graph) as run:
        for step in range(job.steps):
            thread = threading.Thread(target=run.step, args=(step,))
            thread.start()
            thread.join()
        found = run.parameters()
    assert not [d for n, p in want.parameters.items() for d in differences(n, found[n], p)]


# -- what a layer leaves behind ------------------------------------------------------------------------------------------------


class Enters(Again):
    """Enters an autocast of its own; `leaves` says whether it leaves it."""

    def __init__(self, leaves: bool, **entered: object) -> None:
        super().__init__()
        self.leaves, self.entered = leaves, entered

    def forward(self, x: Tensor) -> Tensor:
        context = torch.autocast("cpu", **self.entered)
        context.__enter__()
        y = super().forward(x.float())
        if self.leaves or x.is_meta:
            context.__exit__(None, None, None)
        return y


@pytest.mark.parametrize(
    "entered", [{"enabled": False}, {"dtype": torch.float16}, {"dtype": torch.bfloat16, "cache_enabled": True}], ids=str
)
def test_an_autocast_that_a_layer_does_not_leave_decides_no_bits_of_other_calls(entered):
    """A cast that is kept would be of former weights."""
    wanted, job = job_of(lambda: Enters(True, **entered))
    want, (graph, _) = reference.train(wanted, job), job_of(lambda: Enters(False, **entered))
    with OneProcessRun(job, ParallelPlan.of((1, 1), layers=4), "1f1b", graph=graph) as run:
        for step in range(job.steps):
            run.step(step)
        found, lines = run.parameters(), run.warnings
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0, "else the next autocast would keep casts"
    assert not [d for n, p in want.parameters.items() for d in differences(n, found[n], p)]
    assert any("layer 'b'" in line and "torch.autocast" in line for line in lines)
    assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()


def test_workers_that_take_turns_inside_layers_expect_each_their_own_autocast():
    """Shards of one process share a guard."""
    cell = SHARDED_SAMPLE[0]
    with OneProcessRun(cell.job, cell.plan, cell.schedule, graph=cell.graph) as run:
        run.step(0)
        assert run.warnings == []
        assert run.guard.check("nobody", compare_everything=True) == ()


def test_a_call_enters_autocast_without_making_anything_anew_unless_another_is_entered_or_expected(monkeypatch):
    guard = TorchStateGuard(threads=1)
    precision, other = (StagePrecision(BF16, torch.device("cpu"), guard) for _ in range(2))
    made, expected = [], []
    init, of = torch.autocast.__init__, ExpectedTorchState.of
    monkeypatch.setattr(torch.autocast, "__init__", lambda self, *args, **more: made.append(1) or init(self, *args, **more))
    monkeypatch.setattr(ExpectedTorchState, "of", lambda state: expected.append(state) or of(state))
    for _ in range(3):
        with precision._entered():
            assert torch.is_autocast_enabled("cpu") and guard.check("nobody", compare_everything=True) == ()
    assert (len(made), len(expected)) == (1, 1)
    with other._entered(), precision._entered(), precision._entered():
        assert guard.check("nobody", compare_everything=True) == ()
        torch.set_autocast_enabled("cpu", False)
        assert guard.check("somebody") == ("autocast",) and torch.is_autocast_enabled("cpu")
    assert (len(made), len(expected)) == (3, 3), "one for each that is entered inside another, none for the outermost"
    with pytest.raises(RuntimeError, match="of a layer"), precision._entered():
        raise RuntimeError("of a layer")
    guard.accept()
    with precision._entered():
        assert guard.check("nobody", compare_everything=True) == ()
    assert not torch.is_autocast_enabled("cpu") and guard.check("nobody", compare_everything=True) == ()
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0


# -- errors --------------------------------------------------------------------------------------------------------------------


class Raises(Again):
    """An operation that has no kernel for bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(super().forward(x))


class Scatters(Again):
    """An operation whose operands have to have one dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=torch.float32).index_put((torch.arange(len(x)),), super().forward(x))


@pytest.mark.parametrize("middle, says", [(Raises, "bessel_j0"), (Scatters, "dtypes match")])
def test_an_operation_that_cannot_compute_in_bfloat16_is_told_with_its_place_and_the_cure(middle, says):
    stage, batch = stage_of(middle)
    with pytest.raises(UserCodeError) as caught:
        stage.forward(2, {}, batch)
    assert "layer 'b'" in caught.value.what and says in caught.value.what
    assert "at stage 0, replica 0, step 1, microbatch 2" in caught.value.what
    assert "torch.autocast(x.device.type, enabled=False)" in caught.value.cure and ".float()" in caught.value.cure
    assert not torch.is_autocast_enabled("cpu")


def unsafe(output: Tensor, target: Tensor) -> Tensor:
    """What PyTorch says on GPUs."""
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer."
    )


def test_a_loss_that_is_unsafe_in_bfloat16_is_told_with_the_safe_one():
    stage, batch = stage_of(Again, loss=LossConfig(function=unsafe))
    with pytest.raises(UserCodeError, match=r"the loss .* raised RuntimeError.*unsafe to autocast") as caught:
        stage.forward(0, {}, batch)
    assert "binary_cross_entropy_with_logits" in caught.value.cure


class ByHand(Again):
    """Casts by hand what autocast then takes as it is, and asks the value for its device, which preflight's has not."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.linear(x.bfloat16())
        return self.linear(y.bfloat16())


def test_before_the_run_a_layer_that_autocast_would_help_is_not_refused():
    graph, job = job_of(ByHand)
    batch = {"x": torch.zeros(3, S), "y": torch.zeros(3)}
    check_layer_shapes(job, graph, batch)

    class Casts(Again):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bi,oi->bo", x.bfloat16(), self.linear.weight)

    graph, job = job_of(Casts)
    check_layer_shapes(job, graph, batch)
    with pytest.raises(DataError, match=r"expected scalar type torch\.bfloat16"):
        check_layer_shapes(job.replace(precision=PrecisionConfig()), graph, batch)


def test_before_the_run_an_operation_that_cannot_compute_in_bfloat16_is_told_by_the_profile():
    graph, job = job_of(Raises)
    with pytest.raises(UserCodeError, match=r"in layer 'b', with the first microbatch, before the run") as caught:
        profile_job(job, workers=1, graph=graph)
    assert "autocast" in caught.value.cure


# -- what is planned -----------------------------------------------------------------------------------------------------------


def test_the_planner_counts_activations_and_messages_in_bfloat16():
    graph, job = job_of(Again)
    plain, mixed = (
        profile_job(job.replace(precision=PrecisionConfig(compute=c)), workers=1, graph=graph) for c in (None, "bf16")
    )
    assert [output._replace(nbytes=2 * output.nbytes) for output in mixed.outputs] == list(plain.outputs)
    for whole, half in zip(plain.layers, mixed.layers, strict=True):
        assert 2 * half.output_bytes == whole.output_bytes
        kept = (half.parameter_bytes, half.optimizer_bytes), (whole.parameter_bytes, whole.optimizer_bytes)
        assert kept[0] == kept[1], "parameters and optimizer state are float32"
