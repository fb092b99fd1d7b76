"""One stage by itself: what it returns and asks for, where gradients are added, and what it refuses."""

import gc
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from helpers import ugly_models
from helpers.parity import check_gradients, differences, validation_on
from helpers.reference import train
from torch import Tensor, nn

from raypar.errors import UserCodeError
from raypar.job import Job, LossConfig
from raypar.model.graph import Graph, Layer
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.addition_tree import TreeNode, covering_nodes, fold_tree
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.gradient_accumulator import Row
from raypar.worker.stage.stage import Stage
from raypar.worker.stage_builder import build_stage

pytestmark = pytest.mark.part(4)

S = ugly_models.SEQ
Sums = dict[str, dict[TreeNode, Tensor]]


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(S, S)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.inner(x).tanh() + skip


def linear() -> nn.Linear:
    return nn.Linear(S, S)


def wide() -> Graph:
    """`a` is read by layers 1, 2 and 3; `first` has a frozen bias."""

    def first() -> nn.Linear:
        made = linear()
        made.bias.requires_grad_(False)
        return made

    return Graph(
        (
            Layer("first", first, ("x",), ("a",)),
            Layer("second", linear, ("a",), ("b",)),
            Layer("third", Add, ("b", "a"), ("c",)),
            Layer("fourth", Add, ("c", "a"), ("d",)),
            Layer("head", lambda: nn.Linear(S, 1), ("d",), ("out",)),
        ),
        output="out",
    )


def chain(*builds) -> Graph:
    return Graph.sequential([(f"l{i}", b) for i, b in enumerate((*builds, lambda: nn.Linear(S, 1)))], input="x")


def stages(graph: Graph, job: Job, *cuts: int, replicas: int = 1, replica: int = 0, split: bool = False) -> list[Stage]:
    plan = ParallelPlan.of((replicas,) * (len(cuts) + 1), layers=len(graph.layers), cuts=cuts)
    routing = MicrobatchRouting(plan, job.batching)
    made = [
        build_stage(graph, plan, i, spec=job, routing=routing, replica=replica, loss_fn=job.loss.partial(), split=split)
        for i in range(len(cuts) + 1)
    ]
    for part in made:
        part.begin_step(0)
    return made


def batch(microbatch: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    return {"x": torch.randn(3, S, generator=generator), "y": torch.rand(3, generator=generator)}


def forward(parts: list[Stage], microbatch: int) -> None:
    values: dict[str, Tensor] = {}
    for part in parts:
        values |= part.forward(microbatch, values, batch(microbatch))


def backward(parts: list[Stage], microbatch: int, *, split: bool = False) -> None:
    sums: dict[str, Tensor | None] = {}
    for part in reversed(parts):
        run = part.backward_input if split else part.backward
        sums |= run(microbatch, sums)


def collect(parts: list[Stage]) -> Sums:
    """Qualified name of a use -> its subtree sums, as they are reported; twice is an error."""
    found: Sums = {}
    for part in parts:

        def report(uses: Sequence[int], rows: Mapping[TreeNode, Row], part: Stage = part) -> None:
            run = range(min(part.gradients.sizes), max(part.gradients.sizes) + 1)
            for use in uses:
                name = part.uses[use][0]
                assert name not in found, f"{name} reported twice"
                sums = {node: row[use] for node, row in rows.items()}
                totals = {
                    node: fold_tree(sums, node, torch.add) for node in covering_nodes(run, part.routing.microbatches.blocks)
                }
                found[name] = {node: total.clone() for node, total in totals.items() if total is not None}

        part.on_ready = report
    return found


def equal(a: Sums, b: Sums) -> bool:
    return a.keys() == b.keys() and all(
        a[n].keys() == b[n].keys() and all(torch.equal(a[n][node], b[n][node]) for node in a[n]) for n in a
    )


def job(microbatches: int, blocks: int) -> Job:
    return ugly_models.job("plain", microbatches=microbatches, virtual_replicas=blocks)


# -- gradients of values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (4,), (1, 2), (1, 3), (2, 3), (1, 2, 3), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("split", [False, True])
def test_gradients_of_a_value_with_three_consumers_do_not_depend_on_the_cut(cuts, split):
    graph, spec = wide(), job(1, 1)
    whole, parts = stages(graph, spec), stages(graph, spec, *cuts, split=split)
    want, got = collect(whole), collect(parts)
    for run in (whole, parts):
        forward(run, 0)
    backward(whole, 0)
    backward(parts, 0, split=split)
    if split:
        assert not got
        for part in parts:
            part.backward_weight(0)
    assert equal(got, want) and want


def test_gradients_of_a_value_go_from_each_consuming_stage_to_the_one_before_it():
    graph = wide()
    for cuts, ways in [
        ((1,), [(1, 0)]),
        ((3,), [(1, 0)]),
        ((1, 3), [(1, 0), (2, 1)]),
        ((1, 2, 3), [(1, 0), (2, 1), (3, 2)]),
        ((1, 2, 3, 4), [(1, 0), (2, 1), (3, 2)]),
    ]:
        plan = ParallelPlan.of((1,) * (len(cuts) + 1), layers=5, cuts=cuts)
        assert [(relay.src, relay.dst) for relay in graph.crossing(plan).relays if "a" in relay.values] == ways


class Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class Ending(nn.Linear):
    """Hands no gradient back."""

    def __init__(self) -> None:
        super().__init__(S, S)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Ends.apply(x))


class Spectrum(nn.Linear):
    def __init__(self) -> None:
        super().__init__(S, S)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(super().forward(x))


class Back(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.real + x.imag


@pytest.mark.parametrize("builds", [(linear, Ending), (linear, Spectrum, Back)], ids=["undefined", "complex"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_undefined_and_complex_gradients_have_the_bits_of_one_process_in_every_cut(builds, schedule):
    graph = chain(*builds)
    spec = ugly_models.job("plain", microbatches=5, steps=2, virtual_replicas=2)
    want = train(graph, spec)
    for count in range(1, len(graph.layers) + 1):
        with OneProcessRun(spec, ParallelPlan.of((1,) * count, layers=len(graph.layers)), schedule, graph=graph) as run:
            check_gradients(run, want)
            parameters = run.parameters()
            assert not [d for n, p in want.parameters.items() for d in differences(n, parameters[n], p)], count


# -- gradients of parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches, blocks, replicas", [(5, 2, 1), (7, 4, 2), (8, 5, 3), (3, 7, 2)])
@pytest.mark.parametrize("split", [False, True])
def test_blocks_may_be_interleaved_and_each_use_is_reported_once(microbatches, blocks, replicas, split):
    spec = job(microbatches, blocks)
    for replica in range(replicas):
        in_turn, mixed = (stages(wide(), spec, 2, replicas=replicas, replica=replica, split=split) for _ in range(2))
        want, got = collect(in_turn), collect(mixed)
        routing = in_turn[0].routing
        mine = sorted(m for m in range(microbatches) if routing.replica_for(0, m) == replica)
        for m in mine:
            forward(in_turn, m)
            backward(in_turn, m)
        # one microbatch of every block in turn: several blocks are open at a time
        turns = sorted(mine, key=lambda m: (m - spec.batching.microbatches_of_block(spec.batching.block_of(m)).start, m))
        for m in turns:
            forward(mixed, m)
        for m in turns:
            backward(mixed, m, split=split)
        for m in turns if split else ():
            for part in mixed:
                part.backward_weight(m)
        assert equal(got, want)
        full = {b for b in range(blocks) if len(spec.batching.microbatches_of_block(b))}
        nodes = {n for n in covering_nodes(routing.blocks_of_replica(0, replica), blocks) if full & set(range(*n))}
        assert all(set(sums) == nodes for sums in got.values()) and (got or not mine)


def test_sums_are_final_while_the_last_backward_still_runs():
    (part,) = stages(wide(), job(2, 2))
    inside: list[str] = []
    running = False
    part.on_ready = lambda uses, rows: inside.extend(part.uses[use][0] for use in uses) if running else None
    for m in range(2):
        forward([part], m)
    backward([part], 0)
    assert not inside
    running = True
    part.gradients.record_finished_halves = _stop_clock(part, lambda: len(inside))
    backward([part], 1)
    assert inside[0].startswith("head.") and inside[-1].startswith("first.")
    assert len(inside) == len(part.uses)  # each once


def _stop_clock(part: Stage, count):
    finished = part.gradients.record_finished_halves

    def check(block: int, halves: int) -> None:
        behind = [name for name, _, _ in part.uses if not name.startswith("first.")]  # the backward pass ends in the first
        assert count() == len(behind), "reported only after the backward pass"
        finished(block, halves)

    return check


def test_frozen_parameters_are_no_uses_and_tied_ones_have_a_use_per_layer_over_one_storage():
    graph = replace(wide(), ties=(("second.weight", "third.inner.weight"),))
    (part,) = stages(graph, job(1, 1))
    names = [name for name, _, _ in part.uses]
    assert "first.bias" not in names and "first.bias" in part.parameters
    assert names.index("second.weight") < names.index("third.inner.weight")
    assert "third.inner.weight" not in part.parameters
    a, b = part.modules["second"].weight, part.modules["third"].inner.weight
    assert a is not b and a.data_ptr() == b.data_ptr()


def test_a_parameter_without_gradient_has_no_tensor_for_the_node():
    (part,) = stages(chain(linear, Ending), job(1, 1))
    found = collect([part])
    forward([part], 0)
    backward([part], 0)
    assert found["l0.weight"] == {} and found["l1.weight"].keys() == {(0, 1)}


def test_gradients_and_parameters_lie_at_64_byte_boundaries():
    (part,) = stages(wide(), job(1, 1))
    assert all(p.data_ptr() % 64 == 0 for p in part.parameters.values())


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_freed_microbatch_keeps_nothing():
    (part,) = stages(chain(linear), job(2, 2))
    fields = batch()
    seen = weakref.ref(fields["x"])
    part.forward(0, {}, fields)
    del fields
    backward([part], 0)
    part.free(0)
    gc.collect()
    assert seen() is None and not part._live


# -- what forward may not do -------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Keeps a count of its calls, in place or by a new tensor."""

    def __init__(self, in_place: bool, persistent: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("calls", torch.zeros(()), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x + 0


@pytest.mark.parametrize("in_place", [True, False])
def test_a_layer_that_changes_its_state_in_forward_is_refused(in_place):
    words = "writes into" if in_place else "replaces"
    (part,) = stages(chain(lambda: nn.Sequential(Counter(in_place, persistent=True))), job(1, 1))
    with pytest.raises(UserCodeError, match=rf"layer 'l0' {words} its buffer '0\.calls' in forward"):
        forward([part], 0)


def test_a_cache_may_be_replaced_but_not_written_into_and_state_is_what_it_was_at_first():
    (part,) = stages(chain(lambda: Counter(False, persistent=False)), job(1, 1))
    forward([part], 0)
    forward([part], 0)
    assert part.modules["l0"].calls == 2 and part.buffers["l0.calls"] == 0
    (part,) = stages(chain(lambda: Counter(True, persistent=False)), job(1, 1))
    with pytest.raises(UserCodeError, match="writes into its buffer 'calls'") as error:
        forward([part], 0)
    assert "assign a new tensor" in error.value.cure


def test_what_a_constructor_put_into_evaluation_mode_stays_in_it_after_validation():
    def half() -> nn.Sequential:
        return nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5).eval())

    spec = job(2, 2).replace(steps=3, validation=validation_on(ugly_models.job("plain").data, every=1, samples=4))
    graph = chain(half)
    with OneProcessRun(spec, ParallelPlan.of((1,), layers=2), "1f1b", graph=graph) as run:
        reports = [(run.step(step)[0].loss, run.validate(step))[0] for step in range(3)]
        part = run.cores[0].stages[0, 0]
        assert [m.training for m in part.modules["l0"].modules()] == [False] * 3
        part.begin_step(3)
        assert [m.training for m in part.modules["l0"].modules()] == [True, True, False]
    assert reports == train(graph, spec).losses


def test_errors_of_user_code_have_their_place_and_traceback():
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("lost")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ArithmeticError("bad sum")

    for parts, words in [
        (stages(chain(linear, Breaks), job(1, 1), 1), ("layer 'l1'", "stage 1, replica 0", "microbatch 0", "KeyError: 'lost'")),
        (
            stages(chain(linear), job(1, 1).replace(loss=LossConfig(function=loss))),
            ("the loss", "ArithmeticError: bad sum", "in loss"),
        ),
    ]:
        with pytest.raises(UserCodeError) as error:
            forward(parts, 0)
        assert all(word in error.value.what for word in words), error.value.what
        assert "Traceback" in error.value.what


@pytest.mark.parametrize("shape", [(3,), (1,), (3, 1)])
def test_a_loss_that_is_no_scalar_is_refused_with_its_shape(shape):
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sum().expand(shape)

    with pytest.raises(UserCodeError, match="not a scalar") as error:
        forward(stages(chain(linear), job(1, 1).replace(loss=LossConfig(function=loss))), 0)
    assert str(list(shape)) in error.value.what
