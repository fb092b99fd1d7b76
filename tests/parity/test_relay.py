"""Gradients by relay or apart, strides that travel: each microbatch has the gradients of the plain module in plain autograd."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from helpers import reference, relayed_models, ugly_models
from helpers.nodes_apart import put_apart
from helpers.random_grids import ANY_PLAN, random_plan
from helpers.relayed_models import PlainModel
from torch import Tensor, nn

from raypar.job import DataConfig, Job, LossConfig, ModelConfig, PlanConfig, PrecisionConfig
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import canonical_names
from raypar.plan import ParallelPlan, StagePlan
from raypar.plan.stage_connections import MAX_VALUES_OF_MESSAGE
from raypar.schedule import registry
from raypar.schedule.instructions import Backward, Forward
from raypar.worker.check_model_can_shard import check_model_can_shard
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.gradient_accumulator import GradientAccumulator
from raypar.worker.step import message_tags

pytestmark = pytest.mark.part(5)

LAYERS = 10


def job(compute: Any = None, model: str = "relayed") -> Job:
    return ugly_models.job(model, microbatches=3, virtual_replicas=3, steps=1, precision=PrecisionConfig(compute=compute))


def plan_of(schedule: str, cuts: Sequence[int], *, layers: int = LAYERS, recompute: Sequence[int] = ()) -> ParallelPlan:
    chunks = registry.resolve_chunks_per_worker(schedule)
    positions = (len(cuts) + 1) // chunks
    return ParallelPlan.of(
        [1] * positions,
        layers=layers,
        chunks=chunks,
        placement=registry.placement_of_schedule(schedule),
        cuts=cuts,
        recompute=recompute,
    )


def gradients_of_microbatches(
    monkeypatch: pytest.MonkeyPatch, spec: Job, plan: ParallelPlan, schedule: str
) -> list[dict[str, Tensor | None]]:
    """By microbatch: parameter -> gradient of the first step, before anything is added over microbatches."""
    rows: dict[tuple[int, int], dict[str, Tensor | None]] = defaultdict(dict)
    add, switch = GradientAccumulator._add, GradientAccumulator.switch_to_block

    def keep(self: GradientAccumulator, block: int, uses: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        for use, gradient in zip(uses, gradients, strict=True):
            rows[0, block][self.names[use]] = None if gradient is None else gradient.clone()
        add(self, block, uses, gradients)

    monkeypatch.setattr(GradientAccumulator, "_add", keep)
    monkeypatch.setattr(GradientAccumulator, "switch_to_block", lambda self, block, *, join=False: switch(self, block))
    with OneProcessRun(spec, plan, schedule) as run:
        run.step(0)
        canonical = canonical_names(run.graph)
        order = [f"{layer.name}." for layer in run.graph.layers]
    found = []
    for microbatch in range(spec.microbatches):
        sums: dict[str, Tensor | None] = {}
        uses = rows[0, microbatch]
        # The uses of a tie, last layer first.
        for prefix in reversed(order):
            for name, gradient in ((n, g) for n, g in uses.items() if n.startswith(prefix)):
                name = canonical.get(name, name)
                before = sums.get(name)
                sums[name] = gradient if before is None else before if gradient is None else before + gradient
        found.append(sums)
    return found


def plain_gradients(spec: Job) -> list[dict[str, Tensor | None]]:
    torch.set_num_threads(1)
    model, data = PlainModel(make_layer_graph(spec), spec), spec.data.call()
    m, batch = spec.microbatches, spec.batch_size
    fields = [reference.samples(data, spec, i * batch // m, (i + 1) * batch // m) for i in range(m)]
    return [model.gradients(i, each, relayed_models.loss) for i, each in enumerate(fields)]


def unequal(found: list[dict[str, Tensor | None]], want: list[dict[str, Tensor | None]]) -> list[str]:
    bad = []
    for microbatch, (got, wanted) in enumerate(zip(found, want, strict=True)):
        assert got.keys() == wanted.keys()
        for name, gradient in wanted.items():
            other = got[name]
            if (gradient is None) != (other is None) or not (gradient is None or torch.equal(gradient, other)):
                bad.append(f"{name} of microbatch {microbatch}")
    return bad


CUTS = [(1,), (3,), (5,), (8,), (2, 4, 7), (1, 3, 5, 6), tuple(range(1, 10))]
CELLS = [("1f1b", cuts, (), None) for cuts in CUTS]
CELLS += [("zb-h1", (3, 5), (), None), ("zb-v", (3, 5, 7), (), None), ("interleaved", (2, 4, 6), (), None)]
CELLS += [("gpipe", (4, 7), (1, 2, 3, 6), None), ("zb-v", (2, 5, 6), (3, 4, 8, 9), None), ("1f1b", (3, 6), (), "bf16")]
EVERY_CUT = [(cut,) for cut in range(1, LAYERS)]
ALL = [
    (schedule, cuts, recompute, compute)
    for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
    for cuts in [*EVERY_CUT, (2, 4, 7), (1, 3, 5), (3, 6, 8), (1, 2, 4, 5, 7), tuple(range(1, 10))]
    if (len(cuts) + 1) % registry.resolve_chunks_per_worker(schedule) == 0
    for recompute in ((), tuple(range(LAYERS)), (1, 4, 7))
    for compute in (None, "bf16")
]


@pytest.mark.parametrize("schedule, cuts, recompute, compute", CELLS, ids=str)
def test_each_microbatch_has_the_gradients_of_the_plain_module(monkeypatch, schedule, cuts, recompute, compute):
    spec = job(compute)
    found = gradients_of_microbatches(monkeypatch, spec, plan_of(schedule, cuts, recompute=recompute), schedule)
    want = plain_gradients(spec)
    assert all(gradient is not None for gradient in want[0].values())
    assert unequal(found, want) == []


@pytest.mark.full
@pytest.mark.parametrize("schedule, cuts, recompute, compute", ALL, ids=str)
def test_each_microbatch_has_the_gradients_of_the_plain_module_in_every_layout(monkeypatch, schedule, cuts, recompute, compute):
    test_each_microbatch_has_the_gradients_of_the_plain_module(monkeypatch, schedule, cuts, recompute, compute)


def check_drawn(monkeypatch: pytest.MonkeyPatch, seed: int, draw: Callable[[int], Graph] = relayed_models.drawn) -> None:
    """A graph drawn by lot, cut and scheduled by lot."""
    dice, graph = random.Random(1000 + seed), draw(seed)
    schedule = dice.choice(["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"])
    chunks = registry.resolve_chunks_per_worker(schedule)
    count = len(graph.layers)
    cuts = sorted(dice.sample(range(1, count), chunks * dice.randint(1, (count - 1) // chunks) - 1))
    recompute = dice.choice([(), (), range(count), dice.sample(range(count), 3)])
    spec = job(dice.choice([None, None, "bf16"])).replace(model=ModelConfig(function=partial(draw, seed)))
    plan = plan_of(schedule, cuts, layers=count, recompute=recompute)
    found = gradients_of_microbatches(monkeypatch, spec, plan, schedule)
    assert unequal(found, plain_gradients(spec)) == [], (schedule, cuts, recompute)


@pytest.mark.parametrize("seed", range(12))
def test_a_graph_drawn_by_lot_has_the_gradients_of_the_plain_module(monkeypatch, seed):
    check_drawn(monkeypatch, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12, 400))
def test_any_graph_drawn_by_lot_has_the_gradients_of_the_plain_module(monkeypatch, seed):
    check_drawn(monkeypatch, seed)


def check_placed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Branches drawn by lot on grids of workers drawn by lot, some of which are replicas of several stages."""
    dice, draw = random.Random(2000 + seed), (relayed_models.drawn, relayed_models.branched)[seed % 2]
    count = len(draw(seed).layers)
    spec = job(dice.choice([None, None, "bf16"])).replace(model=ModelConfig(function=partial(draw, seed)))
    plan = replace(
        random_plan(dice, count, most_stages=7, shards=(1,)),
        recompute=tuple(sorted(dice.choice([(), (), range(count), dice.sample(range(count), 3)]))),
    )
    schedule = dice.choice(ANY_PLAN)
    found = gradients_of_microbatches(monkeypatch, spec, plan, schedule)
    assert unequal(found, plain_gradients(spec)) == [], (schedule, plan)


@pytest.mark.parametrize("seed", range(8))
def test_branches_on_any_workers_have_the_gradients_of_the_plain_module(monkeypatch, seed):
    check_placed(monkeypatch, seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8, 500))
def test_any_branches_on_any_workers_have_the_gradients_of_the_plain_module(monkeypatch, seed):
    check_placed(monkeypatch, seed)


def uses_apart(graph: Graph, plan: ParallelPlan) -> list[tuple[int, int, str]]:
    return [(relay.src, relay.dst, value) for relay in graph.crossing(plan).relays for value in sorted(relay.apart)]


BRANCHES = [("1f1b", (2, 5, 7)), ("zb-h1", (3, 4, 5, 6, 7)), ("interleaved", (1, 2, 3, 5, 8)), ("gpipe", tuple(range(1, 10)))]


@pytest.mark.parametrize("schedule, cuts", BRANCHES, ids=str)
def test_parallel_branches_send_their_uses_apart_and_have_the_gradients_of_the_plain_module(monkeypatch, schedule, cuts):
    """In a stage one layer has several uses of a value, several layers have some, one leaves its gradient undefined."""
    spec, plan = job(model="branching"), plan_of(schedule, cuts)
    assert any(value == "e" for *_, value in uses_apart(relayed_models.branching(), plan))
    found = gradients_of_microbatches(monkeypatch, spec, plan, schedule)
    assert unequal(found, plain_gradients(spec)) == []


@pytest.mark.parametrize("seed", range(6))
def test_branches_drawn_by_lot_have_the_gradients_of_the_plain_module(monkeypatch, seed):
    check_drawn(monkeypatch, seed, relayed_models.branched)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6, 400))
def test_any_branches_drawn_by_lot_have_the_gradients_of_the_plain_module(monkeypatch, seed):
    check_drawn(monkeypatch, seed, relayed_models.branched)


def test_the_messages_and_bytes_that_go_back_are_those_of_each_sum_and_of_each_use_by_itself():
    """`e` has 4 uses in stage 1, 2 in stage 2, one in 3 and in 4; several follow their number, of 8 bytes. 5 sends the sum."""
    spec, plan = job(model="branching"), plan_of("gpipe", tuple(range(1, 10)))
    messages, nbytes = Counter[tuple[int, int]](), Counter[tuple[int, int]]()

    def listened(rank: int, send: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *, to: int, tag: int, **more: Any) -> Any:
            if tag >> message_tags._KIND_SHIFT & 7 == message_tags._KINDS["gradient"]:
                messages[rank, to] += 1
                nbytes[rank, to] += tensor.nbytes
            return send(tensor, to=to, tag=tag, **more)

        return call

    with OneProcessRun(spec, plan, "gpipe") as run:
        for rank, core in enumerate(run.cores):
            core.transport.send = listened(rank, core.transport.send)
        run.step(0)
    of_e, count = spec.batch_size * relayed_models.LENGTH * relayed_models.WIDTH * 4, spec.microbatches
    for stage, uses in {1: 4, 2: 2, 3: 1, 4: 1, 5: 1}.items():
        assert messages[stage, 0] == count * (uses + (uses > 1)), stage
        assert nbytes[stage, 0] == uses * of_e + 8 * count * (uses > 1), stage
    # `a`: 7 sends the sum, 2 its 2 uses. `e`: 6 leaves it undefined, and hands on to 5, beside that of `c`, that of the loss.
    assert {pair for pair in messages if pair[1] in (0, 1)} == {*((s, 0) for s in range(1, 6)), (2, 1), (7, 1)}
    assert messages[2, 1] == 3 * count and messages[7, 1] == count and (messages[9, 6], messages[6, 5]) == (count, 2 * count)


def four_branches() -> Graph:
    """A value, four layers that use it twice each, and one that joins them."""
    return Graph(
        (
            Layer("embed", relayed_models.Embed, ("x",), ("e",)),
            *(Layer(f"branch{n}", partial(relayed_models.Drawn, 1, 1, n), ("e",), (f"b{n}",)) for n in range(4)),
            Layer("join", partial(relayed_models.Drawn, 4, 1, 0), tuple(f"b{n}" for n in range(4)), ("h",)),
        ),
        outputs=("h", "b0"),
        rebuild_output=lambda h, b: {"out": h.mean((1, 2)), "first": b, "last": h},
    )


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_workers_run_four_branches_backward_at_the_same_time(seed):
    """9 ms on the virtual clock, as simulated; the bits are those of one worker, which takes 18."""
    spec = job().replace(model=ModelConfig(function=four_branches), microbatches=1, virtual_replicas=1)
    on_four = [["F0", "F1", "F5", "B5", "B1", "B0"], ["F2", "B2"], ["F3", "B3"], ["F4", "B4"]]
    on_one = [[f"F{s}" for s in range(6)] + [f"B{s}" for s in reversed(range(6))]]
    found = []
    for plan, order, takes in [
        (ParallelPlan(tuple(StagePlan(s, s + 1, ((at,),)) for s, at in enumerate((0, 0, 1, 2, 3, 0)))), on_four, 9),
        (ParallelPlan.mesh(pp=1, chunks=6), on_one, 18),
    ]:
        schedule = tuple(tuple({"F": Forward, "B": Backward}[what](int(s), 0) for what, s in worker) for worker in order)
        with OneProcessRun(spec, plan, schedule, seed=seed, cost_ms=lambda i: {Forward: 1, Backward: 2}.get(type(i), 0)) as run:
            run.step(0)
            assert run.scheduler.makespan_ms == takes
            found.append(run.gradients())
    assert all(torch.equal(*both) for name in found[0] for both in zip(found[0][name], found[1][name], strict=True))


class Often(nn.Module):
    """Uses its input more often than a message tag can number."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.sum(-1)
        for number in range(MAX_VALUES_OF_MESSAGE + 200):
            out = out + (x * (0.1 * number)).sum(-1).sin()
        return out


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.inner((a.sum(1) + b.mean((1, 2))).unsqueeze(1)).squeeze(1)


def often() -> Graph:
    return Graph(
        (
            Layer("embed", relayed_models.Embed, ("x",), ("e",)),
            Layer("often", Often, ("e",), ("a",)),
            Layer("other", relayed_models.Several, ("e",), ("b",)),
            Layer("join", Summed, ("a", "b"), ("out",)),
        ),
        outputs=("out", "e", "b"),
        rebuild_output=relayed_models.rebuild,
    )


def test_more_uses_than_a_message_tag_can_number_are_sent_apart(monkeypatch):
    spec = job().replace(model=ModelConfig(function=often), microbatches=1, virtual_replicas=1)
    plan = plan_of("1f1b", (1, 2, 3), layers=4)
    assert uses_apart(often(), plan) == [(1, 0, "e")]
    assert unequal(gradients_of_microbatches(monkeypatch, spec, plan, "1f1b"), plain_gradients(spec)) == []


class Block(nn.Module):
    """Reads its input and the first value, each several times; column and row layers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDE), nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))) + e * e.tanh()


class Vocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDE, IDS, bias=False)

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        return self.out(x * e.sigmoid())


WIDE, IDS = 8, 10


def on_shards() -> Graph:
    """`e` is read by all layers behind the first one, and by the loss."""
    return Graph(
        (
            Layer("embed", lambda: nn.Embedding(IDS, WIDE), ("x",), ("e",)),
            Layer("one", Block, ("e", "e"), ("a",)),
            Layer("two", Block, ("a", "e"), ("b",)),
            Layer("three", Block, ("b", "e"), ("c",)),
            Layer("head", Vocabulary, ("c", "e"), ("logits",)),
        ),
        outputs=("logits", "e"),
        rebuild_output=lambda logits, e: {"logits": logits, "first": e},
        ties=(("one.up.weight", "two.up.weight", "three.up.weight"),),
    )


def branches_on_shards() -> Graph:
    """Three branches that read `e`, and what joins them."""
    return Graph(
        (
            Layer("embed", lambda: nn.Embedding(IDS, WIDE), ("x",), ("e",)),
            Layer("one", Block, ("e", "e"), ("a",)),
            Layer("two", Block, ("e", "e"), ("b",)),
            Layer("three", Block, ("b", "a"), ("c",)),
            Layer("head", Vocabulary, ("c", "e"), ("logits",)),
        ),
        outputs=("logits", "e"),
        rebuild_output=lambda logits, e: {"logits": logits, "first": e},
    )


def loss_of_ids(output: dict[str, Tensor], target: Tensor) -> tuple[Tensor, int]:
    total = nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten(), reduction="sum")
    return total + output["first"].square().mean(), target.numel()


class Ids:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = torch.randint(0, IDS, (7,), generator=torch.Generator().manual_seed(index))
        return window[:-1], window[1:]


def run_on_shards(
    cuts: Sequence[int], shards: Sequence[int], sequence: bool = False, model: Callable[[], Graph] = on_shards
) -> dict[str, list[Tensor]]:
    """Parameter -> every worker's part of it, after two steps in float64; checked on the meta device before."""
    spec = ugly_models.job("plain", microbatches=2, steps=2, batch_size=6, dtype="float64")
    styles = (("*.up", "column"), ("*.down", "row"), ("head.out", "vocabulary"))
    spec = spec.replace(
        model=ModelConfig(function=model),
        loss=LossConfig(function=loss_of_ids),
        data=DataConfig(function=Ids),
        plan=PlanConfig(styles=dict(styles), sequence_parallel=sequence),
    )
    graph, plan = make_layer_graph(spec), ParallelPlan.of([1] * len(shards), shards, layers=5, cuts=cuts)
    check_model_can_shard(spec, preflight(spec), plan)
    with OneProcessRun(spec, plan, "1f1b", graph=graph) as run:
        for step in range(2):
            run.step(step)
        return run.parameters()


@pytest.mark.parametrize(
    "cuts, shards, alike, as_shards, sequence",
    [
        pytest.param((2, 3), (2, 2, 2), (), (2,), False, marks=pytest.mark.full),
        ((1, 2, 3, 4), (2,) * 5, (), (2,), True),
        ((1, 2, 3), (2, 1, 1, 2), (1, 3), (2, 1, 2), False),
        pytest.param((1, 3, 4), (1, 2, 2, 1), (1, 4), (1, 2, 1), False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_on_shards_the_cut_into_stages_decides_nothing(cuts, shards, alike, as_shards, sequence, model=on_shards):
    found, want = run_on_shards(cuts, shards, sequence, model), run_on_shards(alike, as_shards, sequence, model)
    whole = run_on_shards((), (1,), model=model)
    assert found.keys() == want.keys() == whole.keys()
    for name, parts in want.items():
        assert {part.numpy().tobytes() for part in parts} == {part.numpy().tobytes() for part in found[name]}, name
        if parts[0].shape == whole[name][0].shape:
            assert torch.allclose(parts[0], whole[name][0], rtol=0, atol=1e-9), name


@pytest.mark.parametrize(
    "cuts, shards, alike, as_shards, sequence",
    [((1, 2, 3, 4), (2, 2, 1, 2, 2), (2, 3), (2, 1, 2), False), ((1, 2, 3, 4), (2,) * 5, (), (2,), True)],
    ids=str,
)
def test_on_shards_the_cut_of_branches_into_stages_decides_nothing(cuts, shards, alike, as_shards, sequence):
    plan = ParallelPlan.of([1] * len(shards), shards, layers=5, cuts=cuts)
    assert uses_apart(branches_on_shards(), plan) == [(1, 0, "e")]
    test_on_shards_the_cut_into_stages_decides_nothing(cuts, shards, alike, as_shards, sequence, branches_on_shards)


def test_uses_apart_travel_in_parts_between_nodes_with_the_same_bits(monkeypatch):
    found = run_on_shards((1, 2, 3, 4), (2,) * 5, True, branches_on_shards)
    gathered = put_apart(monkeypatch)
    parts = run_on_shards((1, 2, 3, 4), (2,) * 5, True, branches_on_shards)
    assert max(gathered) > 1, "uses of one value, cut each"
    for name, of_workers in found.items():
        assert all(torch.equal(*pair) for pair in zip(of_workers, parts[name], strict=True)), name
