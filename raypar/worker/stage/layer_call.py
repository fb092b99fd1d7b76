"""One layer's forward as one callable: seed the generators, run the layer, check what it did.

Python's and NumPy's generators are seeded only for layers that draw from them. The first call that does, unseeded, is dropped
and made again (`raypar.worker.process.seeded_calls`).

Everything that can decide the bits of a layer's forward is an argument of `LayerCall`: the pass (which random numbers), the
weights and the inputs.

- Recomputation (`recomputation.py`) makes the same call twice. The second one has the same bits, because the call seeds the
  generators itself. The hooks that keep saved tensors (`PassContext.saved`) are active during the user's forward only: they
  belong to a thread, and workers of one process that wait inside layers share one guard.
- Mixed precision (`precision.py`) wraps the call in `torch.autocast`. Recomputation repeats the wrapped call.

A wrapper has the type `LayerFunction` and replaces the call in `Stage.layers`. It enters its own contexts (autocast) together
with `TorchStateGuard.accepting_contexts`; otherwise the check after the layer would undo them.
`tests/parity/test_layer_call.py` wraps calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, NoReturn, TypeVar

from torch import Tensor

from raypar.errors import RayparError, UserCodeError, error_message
from raypar.model.graph import Layer
from raypar.plan.seeds import seed_of
from raypar.torch_compat.autograd import forget_gradient_hooks
from raypar.user_code.user_code_errors import USER_CODE_ERRORS
from raypar.worker.process.seeded_calls import SeededCalls, UnseededDraw
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.stage.buffer_updates import BufferUpdates, same_bits
from raypar.worker.stage.layer_tensors import LayerBuffer, LayerTensors
from raypar.worker.stage.saved_tensors import SavedTensors
from raypar.worker.stage.stage_coordinate_in_errors import StageCoordinate

R = TypeVar("R")


class PassContext(NamedTuple):
    """One pass of a microbatch through a stage's layers."""

    step: int
    """The step, from 0. In validation: the last training step that has begun, used in messages only."""
    microbatch: int
    """Index of the microbatch in the step, or in the validation set."""
    training: bool
    """False in validation."""
    seeds: Mapping[str, int]
    """Layer name -> seed of the layer's random numbers in this pass (rule 3 of the numerics contract)."""
    saved: SavedTensors | None = None
    """Keeps the tensors that autograd saves in the call; None: autograd keeps them itself."""
    is_first: bool = True
    """False where recomputation runs a layer again: what it writes into buffers is dropped then."""
    data_set: str = ""
    """The name of the validation set, where there are several."""

    def with_saved_tensors(self, saved: SavedTensors | None, *, is_first: bool = True) -> PassContext:
        """This pass, for a call whose saved tensors go to `saved`; None: autograd keeps them."""
        return self if saved is None else self._replace(saved=saved, is_first=is_first)

    def call(self, function: Callable[..., R], *args: Tensor) -> R:
        """Call the user's function. What autograd saves in the call goes to `saved`, if there is one."""
        if self.saved is None:
            return function(*args)
        with self.saved.recording():
            return function(*args)


# Both compute the seeds of all layers at once: between two layers this code would be out of the processor's cache.


def training_pass_context(seed: int, step: int, microbatch: int, layers: Sequence[str]) -> PassContext:
    """The pass of a microbatch in a training step. `seed`: the job's; `layers`: names."""
    return PassContext(step, microbatch, True, {name: seed_of(seed, "forward", step, microbatch, name) for name in layers})


def validation_pass_context(seed: int, step: int, microbatch: int, layers: Sequence[str], data_set: str = "") -> PassContext:
    """The pass of a microbatch of a validation set, which draws the same random numbers after every step."""
    seeds = {name: seed_of(seed, "validation", microbatch, name) for name in layers}
    return PassContext(step, microbatch, False, seeds, data_set=data_set)


LayerFunction = Callable[[PassContext, LayerTensors, Sequence[Tensor]], tuple[Tensor, ...]]
"""(pass, weights, inputs) -> outputs in the order of the layer's names: a `LayerCall`, or what wraps one."""


class LayerCall:
    """Seeds the generators, runs one layer, and checks what the layer did. Equal arguments give equal bits.

    Raises `UserCodeError`, with stage, layer and microbatch, for what the layer raises. Refuses a layer that writes into its
    inputs, or into buffers that `updates` does not keep, returns other outputs than it declares, or loses the gradient.
    """

    layer: Layer
    """The layer that is run."""
    label: str
    """The layer's name in messages."""
    _coordinate: StageCoordinate
    """The stage's place in the plan, for messages."""
    calls: tuple[SeededCalls, SeededCalls]
    """How its module is called: in evaluation, and in training."""
    _guard: TorchStateGuard
    """Restores process state that the layer leaves changed."""
    _updates: BufferUpdates | None
    """Keeps what the layer writes into buffers; None: it may write none."""
    _has_compared_buffers: bool
    """Whether a training call of the layer is known to leave the values of its buffers as they were."""

    def __init__(
        self,
        layer: Layer,
        *,
        coordinate: StageCoordinate,
        calls: tuple[SeededCalls, SeededCalls],
        guard: TorchStateGuard,
        updates: BufferUpdates | None = None,
    ) -> None:
        self.layer, self.label = layer, f"layer {layer.name!r}"
        self._coordinate, self.calls, self._guard = coordinate, calls, guard
        self._updates, self._has_compared_buffers = updates, False

    def __call__(self, forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The layer's outputs."""
        training = forward_pass.training
        buffer_versions = [buffer.tensor._version for buffer in weights.buffers]
        input_versions = [tensor._version for tensor in inputs]
        compared = () if self._has_compared_buffers or not training else weights.buffers
        values = [buffer.tensor.clone() for buffer in compared]
        result = self._result(forward_pass, weights, inputs, input_versions)
        changed = self._guard.check(self.label, evaluating=not training)
        if [tensor._version for tensor in inputs] != input_versions:
            _refuse_written_inputs(self.layer, inputs, input_versions)
        if weights.buffers:
            _check_buffers(self.layer, weights.buffers, buffer_versions, training=training)
        for buffer, value in zip(compared, values, strict=True):
            if not same_bits(buffer.tensor, value):  # written by a kernel that counts no version
                raise _written_buffer(self.layer, buffer, training=True)
        self._has_compared_buffers = self._has_compared_buffers or training
        outputs = result if isinstance(result, tuple) else (result,)
        if len(outputs) != len(self.layer.outputs) or not all(isinstance(o, Tensor) for o in outputs):
            raise _wrong_outputs(self.layer, outputs)
        if training and "grad" in changed:
            self._check_graph(forward_pass, weights, inputs, outputs)
        return outputs

    def _result(
        self, forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor], versions: Sequence[int]
    ) -> object:
        """What the module returns; that of a second attempt, where the first has drawn unseeded. `versions`: of the inputs."""
        while True:
            try:
                return self._call(forward_pass, weights, inputs)
            except UnseededDraw:  # it has written no buffer, and its graph goes
                pass
            except USER_CODE_ERRORS as error:
                raise self._error(forward_pass, inputs, versions, error) from error
            self._guard.check(self.label, evaluating=not forward_pass.training)
            for tensor in inputs:
                forget_gradient_hooks(tensor)

    def _call(self, forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor]) -> object:
        seeded, number = self.calls[forward_pass.training], forward_pass.seeds[self.layer.name]
        function = weights.module if forward_pass.saved is None else partial(forward_pass.call, weights.module)
        if self._updates is None or not forward_pass.training:
            return seeded(number, function, *inputs)
        with self._updates.recording(forward_pass.microbatch, counts=forward_pass.is_first):
            return seeded(number, function, *inputs)

    def _error(
        self, forward_pass: PassContext, inputs: Sequence[Tensor], versions: Sequence[int], error: BaseException
    ) -> RayparError:
        """The error to raise for what the layer raised."""
        if isinstance(error, RuntimeError) and _is_about_writing(error):
            _refuse_written_inputs(self.layer, inputs, versions, error)
        shapes = ", ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in zip(self.layer.inputs, inputs, strict=True))
        code = f"{self.label} (inputs: {shapes})"
        return self._coordinate.user_code_error(code, forward_pass.step, forward_pass.microbatch, error, forward_pass.data_set)

    def _check_graph(
        self, forward_pass: PassContext, weights: LayerTensors, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        """Raises `UserCodeError` if a layer that left gradients switched off has returned a tensor without a graph.

        The guard switches gradients on again after the layer only, too late for what the layer itself has computed.
        """
        trained = any(p.requires_grad for p in (*inputs, *weights.module.parameters()))
        if trained and not all(out.requires_grad for out in outputs if out.is_floating_point() or out.is_complex()):
            place = self._coordinate.describe(forward_pass.step, forward_pass.microbatch, forward_pass.data_set)
            raise UserCodeError(
                f"{self.label} left torch.set_grad_enabled(False) behind and returned a tensor without a gradient, "
                f"{place}: it and what comes before it would not be trained",
                cure="use it as a context manager: `with torch.no_grad():` around what needs no gradient",
            )


# -- checks ------------------------------------------------------------------------------------------------------------------

_WRITTEN_IN_PLACE = (
    "is a view and is being modified inplace",
    "a leaf Variable that requires grad is being used in an in-place operation",
    "a view of a leaf Variable that requires grad is being used in an in-place operation",
)
"""What PyTorch says when a layer writes into a view that may not be written, or into a value from another stage."""


def _is_about_writing(error: Exception) -> bool:
    return any(words in error_message(error) for words in _WRITTEN_IN_PLACE)


@contextlib.contextmanager
def refuse_input_writes(layer: Layer, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Context that refuses a layer that writes into its inputs: only readers in the same stage would see the change.

    Raises `UserCodeError`, also in place of PyTorch's error about views and aliases.
    """
    versions = [tensor._version for tensor in inputs]
    try:
        yield
    except RuntimeError as error:
        if _is_about_writing(error):
            _refuse_written_inputs(layer, inputs, versions, error)
        raise
    if [tensor._version for tensor in inputs] != versions:
        _refuse_written_inputs(layer, inputs, versions)


def _refuse_written_inputs(
    layer: Layer, inputs: Sequence[Tensor], versions: Sequence[int], error: Exception | None = None
) -> NoReturn:
    """Raises `UserCodeError` for a layer that has written into an input. `versions`: of the inputs before the call; `error`:
    what PyTorch said, if it has refused the writing."""
    written = [name for name, t, version in zip(layer.inputs, inputs, versions, strict=True) if t._version != version]
    raise UserCodeError(
        f"layer {layer.name!r} writes into its input {' or '.join(map(repr, written or layer.inputs))} in place, "
        "which other layers may read too" + (f" ({error})" if error is not None else ""),
        cure="use the operation that returns a new tensor (inplace=False, relu instead of relu_), or clone the input first",
    ) from error


def _check_buffers(layer: Layer, buffers: Sequence[LayerBuffer], versions: Sequence[int], *, training: bool) -> None:
    """Raises `UserCodeError` if forward has changed a buffer. `versions`: of their tensors before the call."""
    for buffer, version in zip(buffers, versions, strict=True):
        tensor = buffer.tensor
        if tensor._version != version:
            raise _written_buffer(layer, buffer, training=training)
        if buffer.persistent and buffer.owner._buffers.get(buffer.key) is not tensor:
            raise UserCodeError(
                f"layer {layer.name!r} replaces its buffer {buffer.path!r} in forward: replicas would no longer be equal",
                cure=f"compute it from the inputs, {_policy_cure(training)}or register a buffer that is only a cache with "
                "persistent=False",
            )


def _written_buffer(layer: Layer, buffer: LayerBuffer, *, training: bool) -> UserCodeError:
    """The error for a buffer that forward has written into."""
    return UserCodeError(
        f"layer {layer.name!r} writes into its buffer {buffer.path!r} in forward: replicas would no longer be equal",
        cure=cure_of_buffer_writes(training=training),
    )


def cure_of_buffer_writes(*, training: bool) -> str:
    """The cure for a forward that writes into a buffer."""
    return (
        f"compute it from the inputs, {_policy_cure(training)}or, if the buffer is only a cache, register it with "
        "persistent=False, and assign a new tensor to it instead of writing into the old one"
    )


def _policy_cure(training: bool) -> str:
    """The cure for a buffer that is state, beside those for buffers that need not be."""
    if not training:
        return "write it in training only (if self.training), "
    return "say what becomes of it (model.buffers: last, or sum, which adds what each microbatch has added), "


def _wrong_outputs(layer: Layer, outputs: tuple[Tensor, ...]) -> UserCodeError:
    """The error for a layer that has not returned one tensor for each of its output names."""
    got = ", ".join(type(o).__name__ for o in outputs)
    return UserCodeError(
        f"layer {layer.name!r} returned ({got}) where {len(layer.outputs)} tensor(s) {layer.outputs} were declared",
        cure="return one tensor per name in the layer's outputs",
    )
