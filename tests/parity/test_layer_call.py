"""The layer call as its specification: seed, forward and checks of one layer, repeatable, and ready to be wrapped."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

import numpy
import pytest
import torch
from helpers import ugly_models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from raypar.comm.buffer_pool import CPU
from raypar.errors import UserCodeError
from raypar.model.graph import Graph, Layer
from raypar.plan import MicrobatchRouting, ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.worker.process.seed_generators import make_seeder
from raypar.worker.process.seeded_calls import SeededCalls
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.layer_call import LayerCall, LayerFunction, PassContext, training_pass_context, validation_pass_context
from raypar.worker.stage.layer_tensors import LayerTensors, StageTensors, alias_received, own_tensors
from raypar.worker.stage.stage import Stage
from raypar.worker.stage.stage_coordinate_in_errors import StageCoordinate
from raypar.worker.stage_builder import build_stage

SIZE = 6
SEED = 7


class Noisy(nn.Linear):
    """Draws from PyTorch's, NumPy's and Python's generators."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        noise = numpy.random.rand() + random.random()
        return nn.functional.dropout(super().forward(x), 0.5, training=True) * noise


def always_seeded(seed):
    return SeededCalls(seed, seed, None), SeededCalls(seed, seed, None)


class Scene:
    """One layer with its weights and its call."""

    def __init__(self, build, outputs=("b",), guard: TorchStateGuard | None = None, seed_generators=None) -> None:
        self.layer = Layer("noisy", build, ("a",), outputs)
        graph = Graph((self.layer,), output=outputs[0])
        torch.manual_seed(1)
        self.weights = StageTensors(graph, (self.layer,), {"noisy": build()}).of_layer(0)
        self.guard = guard or TorchStateGuard(torch.get_num_threads())
        self.call = LayerCall(
            self.layer,
            coordinate=StageCoordinate(3, 1, None, "noisy"),
            calls=always_seeded(seed_generators or make_seeder(CPU)),
            guard=self.guard,
        )

    def run(self, forward_pass: PassContext, x: Tensor, call: LayerFunction | None = None) -> tuple[Tensor, list[Tensor]]:
        """The first output; gradients of the input and the parameters."""
        x = x.clone().requires_grad_()
        (out, *_) = (call or self.call)(forward_pass, self.weights, [x.view_as(x)])
        return out, list(torch.autograd.grad(out.square().sum(), [x, *self.weights.module.parameters()]))


def passes(step: int, microbatch: int) -> PassContext:
    return training_pass_context(SEED, step, microbatch, ["noisy"])


def equal(a: tuple[Tensor, list[Tensor]], b: tuple[Tensor, list[Tensor]]) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


X = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(0))


# -- what decides the bits -----------------------------------------------------------------------------------------------


def test_a_second_call_with_the_same_arguments_gives_the_same_outputs_and_gradients():
    scene = Scene(Noisy)
    first = scene.run(passes(2, 5), X)
    torch.rand(3), numpy.random.rand(), random.random()  # whatever others have drawn meanwhile
    assert equal(scene.run(passes(2, 5), X), first)


@pytest.mark.parametrize("step, microbatch", [(2, 6), (3, 5)])
def test_another_microbatch_or_step_draws_other_numbers(step, microbatch):
    scene = Scene(Noisy)
    assert not equal(scene.run(passes(step, microbatch), X), scene.run(passes(2, 5), X))


def test_a_layers_seed_depends_on_step_microbatch_and_name_in_training_and_on_no_step_in_validation():
    training, validation = training_pass_context(SEED, 2, 5, ["a", "b"]), validation_pass_context(SEED, 2, 5, ["a", "b"])
    assert training.training and dict(training.seeds) == {n: seed_of(SEED, "forward", 2, 5, n) for n in "ab"}
    assert not validation.training and dict(validation.seeds) == {n: seed_of(SEED, "validation", 5, n) for n in "ab"}


# -- what a wrapper wraps ------------------------------------------------------------------------------------------------


def test_a_wrapper_encloses_seed_forward_and_checks_in_this_order_and_nothing_else():
    events: list[str] = []

    class Watched(TorchStateGuard):
        def check(self, caller, *, evaluating=False, compare_everything=False):
            events.append(f"check {caller}")
            return super().check(caller, evaluating=evaluating, compare_everything=compare_everything)

    class Told(nn.Linear):
        def __init__(self) -> None:
            super().__init__(SIZE, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            events.append("forward")
            return super().forward(x)

    guard = Watched(torch.get_num_threads())
    scene = Scene(Told, guard=guard, seed_generators=lambda number: events.append(f"seed {number}"))

    def wrapped(forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        events.append("enter")
        outputs = scene.call(forward_pass, weights, inputs)
        events.append("leave")
        return outputs

    scene.run(passes(0, 1), X, wrapped)
    seed = seed_of(SEED, "forward", 0, 1, "noisy")
    assert events == ["enter", f"seed {seed}", "forward", "check layer 'noisy'", "leave"]


def recomputed(call: LayerFunction, guard: TorchStateGuard) -> LayerFunction:
    """The call, without its activations: it is made again in the backward pass."""

    def run(forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        def once(*inputs: Tensor) -> tuple[Tensor, ...]:
            with guard.accepting_contexts():
                return call(forward_pass, weights, inputs)

        with set_checkpoint_early_stop(False):  # which would end a second call by an exception inside the layer
            return checkpoint(once, *inputs, use_reentrant=False, preserve_rng_state=False)

    return run


def test_recomputing_a_call_in_the_backward_pass_gives_the_bits_of_keeping_its_activations():
    scene = Scene(Noisy)
    want = scene.run(passes(2, 5), X)
    assert equal(scene.run(passes(2, 5), X, recomputed(scene.call, scene.guard)), want)
    assert scene.guard.lines() == ()


def stage(guard: TorchStateGuard, split: bool = False) -> Stage:
    graph = Graph.sequential([("l0", Noisy), ("l1", Noisy), ("l2", partial(nn.Linear, SIZE, 1))], input="x")
    job = ugly_models.job("plain", microbatches=2, virtual_replicas=1)
    plan = ParallelPlan.of((1,), layers=3)
    routing = MicrobatchRouting(plan, job.batching)
    made = build_stage(
        graph, plan, 0, spec=job, routing=routing, replica=0, loss_fn=job.loss.partial(), split=split, guard=guard
    )
    made.begin_step(0)
    return made


def run_step(part: Stage, split: bool = False) -> dict[str, Tensor]:
    """Use -> sum of its gradients over two microbatches, which are open at the same time. `split`: the backward in halves."""
    found: dict[str, Tensor] = {}

    def report(uses, rows):
        for use in uses:
            grads = [row[use] for row in rows.values() if row[use] is not None]
            found[part.uses[use].name] = sum(grads[1:], grads[0]).clone()

    part.on_ready = report
    generator = torch.Generator().manual_seed(3)
    batches = [{"x": torch.randn(3, SIZE, generator=generator), "y": torch.rand(3, generator=generator)} for _ in range(2)]
    for m, batch in enumerate(batches):
        part.forward(m, {}, batch)
    for m in range(2):
        (part.backward_input if split else part.backward)(m, {})
    for m in range(2) if split else ():
        part.backward_weight(m)
    return found


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_stage_whose_layers_are_recomputed_has_the_gradients_and_losses_of_one_whose_are_not(split):
    plain, again = (stage(TorchStateGuard(torch.get_num_threads()), split) for _ in range(2))
    for layer in again.layers:
        layer.call = recomputed(layer.call, again.guard)
    want, got = run_step(plain, split), run_step(again, split)
    assert want.keys() == got.keys() and len(want) == 6
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert {m: float(s) for m, (s, _) in plain.losses.items()} == {m: float(s) for m, (s, _) in again.losses.items()}
    assert again.guard.lines() == ()


def test_a_wrapper_may_enter_autocast_for_one_layer_alone():
    part = stage(TorchStateGuard(torch.get_num_threads()))
    dtypes: list[torch.dtype] = []
    inner = part.layers[1].call

    def autocast(forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16), part.guard.accepting_contexts():
            outputs = inner(forward_pass, weights, inputs)
        dtypes.append(outputs[0].dtype)
        return tuple(out.to(inputs[0].dtype) for out in outputs)

    part.layers[1].call = autocast
    found = run_step(part)
    assert dtypes == [torch.bfloat16] * 2 and not torch.is_autocast_enabled("cpu")
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    assert part.guard.lines() == ()


# -- what is checked -----------------------------------------------------------------------------------------------------


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("lost")


def test_an_error_of_the_layer_names_the_layer_its_inputs_stage_replica_step_and_microbatch():
    with pytest.raises(UserCodeError) as error:
        Scene(Breaks).run(passes(2, 5), X)
    for words in ("layer 'noisy'", "[4, 6]", "KeyError: 'lost'", "stage 3, replica 1, step 3, microbatch 5", "Traceback"):
        assert words in error.value.what


def test_a_shard_and_a_stage_that_is_only_timed_are_named_too():
    assert StageCoordinate(0, 1, 2, "first").describe(0, 4) == "at stage 0, replica 1, shard 2, step 1, microbatch 4"
    timed = StageCoordinate(0, 0, None, "first", is_profiling=True)
    assert timed.describe(0, 0) == "in layer 'first', with the first microbatch, before the run"


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.data.add_(1)
        return x.add_(1)


class Twice(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = super().forward(x)
        return out, out


class Leaves(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return super().forward(x)


def test_a_layer_that_writes_into_an_input_is_refused():
    with pytest.raises(UserCodeError, match="layer 'noisy' writes into its input 'a' in place"):
        Scene(Writes).run(passes(0, 0), X)


def test_a_layer_that_returns_one_tensor_twice_has_two_outputs():
    scene = Scene(Twice, outputs=("b", "c"))
    outputs = scene.call(passes(0, 0), scene.weights, [X.clone().requires_grad_()])
    b, c = own_tensors(outputs, set())
    assert b is outputs[0] and b is not c and torch.equal(b, c) and c.requires_grad
    with pytest.raises(UserCodeError, match=r"returned \(Tensor, Tensor\) where 1 tensor"):
        Scene(Twice).run(passes(0, 0), X)


def test_an_alias_has_the_strides_of_its_value_also_in_dims_of_length_1():
    image = torch.empty_strided((2, 1, 2, 2), (4, 1, 2, 1)).requires_grad_()
    for alias in (alias_received(image, OrderedDict()), *own_tensors([image], {id(image)})):
        assert alias is not image and alias.data_ptr() == image.data_ptr() and alias.stride() == (4, 1, 2, 1)


def test_a_layer_that_leaves_gradients_switched_off_is_refused_and_the_switch_set_back():
    with pytest.raises(UserCodeError, match="stage 3, replica 1, step 1, microbatch 0: it and what comes before it"):
        Scene(Leaves).run(passes(0, 0), X)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("number", [0, 1, 12345, 2**32 - 1, 2**62 + 7])
def test_generators_are_seeded_as_the_functions_of_their_modules_seed_them(number):
    def state_after(seed):
        random.gauss(0, 1), numpy.random.randn()  # each keeps a second number for the next call
        seed(number)
        return random.getstate(), [numpy.random.randn() for _ in range(3)], torch.get_rng_state().tolist()

    wanted = state_after(lambda n: (torch.manual_seed(n), random.seed(n % 2**32), numpy.random.seed(n % 2**32)))
    assert state_after(make_seeder(CPU)) == wanted


def test_a_generator_that_the_user_has_put_behind_numpy_random_is_seeded_as_numpy_seeds_it():
    before = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(3))
        numpy.random.seed(7)
        wanted = numpy.random.random(3).tolist()
        make_seeder(CPU)(7)
        assert numpy.random.random(3).tolist() == wanted
    finally:
        numpy.random.set_bit_generator(before)
