"""Deferred initialisation: runs the model function without memory for large tensors, and records what happens to them.

Afterwards the values of each tensor can be computed alone, bit-identical to those of an ordinary run.

- Large tensors are meta tensors that claim to be on the CPU; small ones are real.
- ATen operations on large tensors are recorded with what they read.
- A random operation is recorded with the generator's state before it. It also runs at once, on scratch memory, so that the
  generator advances for the operations that follow.
- Code that looks at values (`item()`, `numpy()`, `if (w > 0).all()`) gets them: they are computed at that moment.

The idea is that of torchdistx's `deferred_init`.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raypar.errors import ModelError
from raypar.model.layer_skeletons import replace_tensors
from raypar.model.model_function_allocations import uninitialised_fill_value
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo, without_dynamo
from raypar.torch_compat.dispatch import (
    OTHER_STRIDES,
    OperatorValue,
    TorchDispatchMode,
    draws_random_numbers,
    run_operation,
    schema_of,
    without_dispatch_modes,
    without_torch_function,
    written_tensors,
)
from raypar.torch_compat.pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from raypar.torch_compat.storages import count_storage_holders, storage_id, view_base

if TYPE_CHECKING:
    from raypar.torch_compat.dispatch import OpOverload

T = TypeVar("T")

DEFERRED_BYTES = 64 << 10
"""Smaller tensors are real from the start: biases, norms, tables of positions."""

CONSTANT_BYTES = 64 << 10
"""Real tensors below this are copied into the recording as constants. An operation that reads a larger one runs at once."""

META = torch.device("meta")

_FILLS = frozenset(
    f"aten::{name}_"
    for name in ("normal", "uniform", "bernoulli", "random", "exponential", "cauchy", "log_normal", "geometric")
)
"""Random operations that overwrite all of their first argument without reading it."""

_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _OwnGenerator:
    """In a recorded operation: stands for a generator of the user's own. Its state is `DeferredOperation.generator_state`."""


_OWN_GENERATOR = _OwnGenerator()


class Undeferrable(BaseException):
    """The model function does something that cannot be recorded.

    A `BaseException`, so that `except Exception` in the user's code does not catch it.
    """


@dataclass(frozen=True, slots=True)
class DeferredView:
    """A large tensor in a recorded operation: key of its `DeferredStorage`, and the geometry of the view."""

    storage_key: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def as_tensor(self, storage: torch.UntypedStorage) -> Tensor:
        """The view as a tensor in `storage`, the real memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


Recorded: TypeAlias = "OperatorValue | DeferredView | _OwnGenerator"
"""An argument of a recorded operation."""


@dataclass(frozen=True, slots=True)
class DeferredOperation:
    """One recorded call of an ATen operation."""

    func: OpOverload
    leaves: tuple[Recorded, ...]
    """The arguments as pytree leaves; large tensors as `DeferredView`, small ones as constants."""
    tree: TreeSpec
    """The pytree structure of `leaves`."""
    reads: tuple[int, ...]
    """Keys of the memory that it reads."""
    writes: tuple[int, ...]
    """Keys of the memory that it changes."""
    new_tensors: Mapping[int, DeferredView]
    """Index among the flattened results -> tensor in new memory."""
    generator_state: Tensor | None = None
    """The generator's state before the call, if it draws random numbers."""


@dataclass(slots=True)
class DeferredStorage:
    """The storage of one or more large tensors. Its key is the address of its meta storage."""

    anchor: torch.UntypedStorage
    """The meta storage; kept alive, so that its address stays unique."""
    writers: list[int] = field(default_factory=list)
    """Indices of the operations that make or change it, in order."""
    real_storage: torch.UntypedStorage | None = None
    """The memory with its values, once it has become real; from then on nothing is recorded."""


class OperationRecording:
    """The operations on large tensors; `values(tensor)` computes the values of one of them."""

    def __init__(self, small_bytes: int | None = None, *, draws: bool = True) -> None:
        self.small_bytes = DEFERRED_BYTES if small_bytes is None else small_bytes
        """Tensors below this are real from the start."""
        self.draws = draws
        """Whether random operations advance the generator. If not, only shapes are right, and values without random numbers."""
        self._operations: list[DeferredOperation] = []
        """All recorded operations, in the order in which they ran."""
        self._memories: dict[int, DeferredStorage] = {}
        """Key -> memory of large tensors."""

    # -- recording -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Record what runs inside. Raises `Undeferrable`."""
        with _Operations(self), _Attributes(self):
            yield

    def tracks(self, value: Recorded) -> TypeGuard[Tensor]:
        """Whether `value` is a large tensor of this recording (it may have become real: see `is_real`)."""
        if not isinstance(value, Tensor) or not value.is_meta:
            return False
        try:
            return storage_id(value) in self._memories
        except NotImplementedError as error:
            raise Undeferrable(f"a tensor without memory of its own, as torch.func.vmap makes them ({error})") from error

    def view(self, tensor: Tensor) -> DeferredView:
        """How operations refer to a tracked tensor. Raises `Undeferrable` where its geometry does not say its values."""
        if tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided:
            raise Undeferrable("a conjugated, negated or sparse view")
        key = storage_id(tensor)
        return DeferredView(key, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def track(self, tensor: Tensor, real: torch.UntypedStorage | None = None) -> DeferredView:
        """Track the memory of a new meta tensor, whose values are `real` if they are known already."""
        storage = tensor.untyped_storage()
        self._memories[storage_id(tensor)] = DeferredStorage(storage, real_storage=real)
        return self.view(tensor)

    def stand_in(self, value: Tensor) -> Tensor:
        """A new tracked tensor that shares the memory of the real tensor `value`."""
        with without_dispatch_modes():
            return self._stand_in(value)

    def _stand_in(self, value: Tensor) -> Tensor:
        room = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device=META).untyped_storage()
        made = torch.empty(0, dtype=value.dtype, device=META)
        made.set_(room, value.storage_offset(), value.shape, value.stride())
        self.track(made, real=value.untyped_storage())
        return made

    def add(self, operation: DeferredOperation) -> None:
        """Append an operation."""
        for key in {*operation.writes, *(view.storage_key for view in operation.new_tensors.values())}:
            self._memories[key].writers.append(len(self._operations))
        self._operations.append(operation)

    @property
    def loaded_bytes(self) -> int:
        """Bytes of tracked memory that became real, because values came from outside or were looked at."""
        return sum(memory.real_storage.nbytes() for memory in self._memories.values() if memory.real_storage is not None)

    def is_real(self, tensor: Tensor) -> bool:
        """Whether the memory of a tracked tensor is real already."""
        return self._memories[storage_id(tensor)].real_storage is not None

    def has_other_users(self, tensors: Collection[Tensor]) -> bool:
        """Whether other tensors than these lie in tracked memory: in variables, or kept by PyTorch for a view."""
        ours = Counter(storage_id(tensor) for tensor in tensors if self.tracks(tensor))
        held = {key: count_storage_holders(key) for key in self._memories}
        return any(number is None or number > 1 + ours[key] for key, number in held.items())

    # -- computing -------------------------------------------------------------------------------------------------------

    def values(self, tensor: Tensor) -> Tensor:
        """A tracked tensor's values after the operations so far; in memory of their own, unless its memory is real already."""
        view = self.view(tensor)
        with without_dispatch_modes():
            return view.as_tensor(self._compute(view.storage_key))

    def make_real(self, tensor: Tensor) -> Tensor:
        """Make the memory of a tracked tensor real for good; returns the real tensor, whose changes others see."""
        view = self.view(tensor)
        memory = self._memories[view.storage_key]
        with without_dispatch_modes():
            memory.real_storage = self._compute(view.storage_key)
            return view.as_tensor(memory.real_storage)

    def _compute(self, key: int) -> torch.UntypedStorage:
        """The values of one memory, from running the operations that it depends on."""
        memory = self._memories[key]
        if memory.real_storage is not None:
            return memory.real_storage
        order = self._needed(key)
        last = {k: index for index in order for k in self._touched(index)}
        real: dict[int, torch.UntypedStorage] = {}
        before = torch.get_rng_state()
        try:
            with torch.no_grad():
                for index in order:
                    self._run(self._operations[index], real)
                    for done in [k for k in real if last[k] == index and k != key]:
                        del real[done]
        finally:
            torch.set_rng_state(before)
        return real[key]

    def _touched(self, index: int) -> set[int]:
        """Keys of the memory that an operation reads, changes or makes."""
        operation = self._operations[index]
        return {*operation.reads, *operation.writes, *(view.storage_key for view in operation.new_tensors.values())}

    def _needed(self, key: int) -> list[int]:
        """Indices of the operations that this memory depends on, in order: its writers, and, for everything that they read,
        the writers before that read."""
        found: set[int] = set()
        seen: dict[int, int] = {}
        todo = [(key, len(self._operations))]
        while todo:
            memory, before = todo.pop()
            if seen.get(memory, -1) >= before:
                continue
            seen[memory] = before
            for index in self._memories[memory].writers:
                if index >= before:
                    break
                if index not in found:
                    found.add(index)
                    todo += [(read, index) for read in (*self._operations[index].reads, *self._operations[index].writes)]
        return sorted(found)

    def _run(self, operation: DeferredOperation, real: dict[int, torch.UntypedStorage]) -> None:
        """Run one operation on real memory; adds to `real` what it makes."""
        leaves = [
            leaf.as_tensor(real[leaf.storage_key]) if isinstance(leaf, DeferredView) else leaf for leaf in operation.leaves
        ]
        own = torch.Generator()
        leaves = [own if leaf is _OWN_GENERATOR else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, operation.tree)
        if operation.generator_state is not None:
            if not self.draws:
                raise Undeferrable(f"the values of {operation.func} are needed, and no random numbers are drawn")
            _generator_of(leaves).set_state(operation.generator_state)
        results, _ = tree_flatten(operation.func(*args, **kwargs))
        for place, view in operation.new_tensors.items():
            result = results[place]
            if (tuple(result.shape), tuple(result.stride()), result.storage_offset()) != (view.shape, view.stride, view.offset):
                raise ModelError(
                    f"deferred initialisation: {operation.func} gave a tensor with strides {tuple(result.stride())}, "
                    f"{view.stride} were expected",
                    cure="report this; set deferred_init: never to build the whole model in every worker",
                )
            real[view.storage_key] = result.untyped_storage()


@without_dynamo
class _Operations(TorchDispatchMode):
    """Records ATen operations."""

    def __init__(self, recording: OperationRecording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self._scratch: Tensor | None = None
        """Memory in which random operations run to advance the generator."""

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[OperatorValue, ...] = (),
        kwargs: Mapping[str, OperatorValue] | None = None,
    ) -> OperatorValue:
        with without_torch_function():  # PyTorch's own code has to see the real devices
            try:
                return self._call(func, args, dict(kwargs or {}))
            except NotImplementedError as error:  # perhaps of the meta device only: the CPU may have a kernel
                raise Undeferrable(f"{func}: {error}") from error

    def _call(self, func: OpOverload, args: tuple[OperatorValue, ...], kwargs: dict[str, OperatorValue]) -> OperatorValue:
        """The results of one operation: run as it is, recorded, or computed at once, by what it reads and writes."""
        recording, name = self.recording, schema_of(func).name
        leaves, tree = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            return self._factory(func, leaves, tree)
        tracked = [recording.tracks(tensor) for tensor in tensors]
        if name == "aten::set_" and tracked == [True, False]:  # a large tensor is given the memory of a real one
            return run_operation(func, (tensors[0], recording.stand_in(tensors[1])))
        if not any(tracked) or _is_view(func):
            return self._without_garbage(func, run_operation(func, args, kwargs))
        if any(tensor.is_meta and not known for tensor, known in zip(tensors, tracked, strict=True)):
            raise Undeferrable(f"{func} with a tensor that was made on the meta device")
        if name == "aten::resize_":
            raise Undeferrable(f"{func} on a large tensor")
        written = written_tensors(func, args, kwargs)
        if (
            any(map(self._has_large_values, tensors))
            or not all(map(recording.tracks, written))  # a small tensor, which has to be right from now on
            or not _gives_tensors(func)  # a number, which the code is about to look at
            or name in OTHER_STRIDES
        ):
            return self._at_once(func, leaves, tree, written)
        return self._record(func, leaves, tree, written)

    def _has_large_values(self, tensor: Tensor) -> bool:
        """Whether a tensor is real and too large to be kept in the recording as a constant."""
        if self.recording.tracks(tensor):
            return self.recording.is_real(tensor)
        return tensor.untyped_storage().nbytes() >= CONSTANT_BYTES

    def _without_garbage(self, func: OpOverload, made: OperatorValue) -> OperatorValue:
        """`made` by an operation on untracked tensors; if it is uninitialised (`to_empty`), what `_factory` makes instead."""
        if not isinstance(made, Tensor) or made.is_meta or (value := uninitialised_fill_value(func, made)) is None:
            return made
        if made.untyped_storage().nbytes() < max(1, self.recording.small_bytes):
            return made.fill_(value)
        given = (tuple(made.shape), made.stride()), {"dtype": made.dtype, "device": made.device}
        return self._factory(torch.ops.aten.empty_strided.default, *tree_flatten(given))

    def _factory(self, func: OpOverload, leaves: list[OperatorValue], tree: TreeSpec) -> OperatorValue:
        """Run an operation without tensors among its arguments; a large result becomes a tracked tensor."""
        args, kwargs = tree_unflatten(leaves, tree)
        if not _gives_tensors(func) or "device" not in {a.name for a in schema_of(func).arguments}:
            return run_operation(func, args, kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
            if torch.device(kwargs["device"]) == META:
                return run_operation(func, args, kwargs)
            raise Undeferrable(f"a tensor on {kwargs['device']}")
        try:
            made = run_operation(func, args, {**kwargs, "device": META})
        except NotImplementedError:  # no meta kernel: the tensor is real
            return run_operation(func, args, kwargs)
        if not isinstance(made, Tensor) or made.untyped_storage().nbytes() < max(1, self.recording.small_bytes):
            return run_operation(func, args, kwargs)
        random = None
        if draws_random_numbers(func):
            random = _generator_of(leaves).get_state()
            if self.recording.draws:
                run_operation(func, args, kwargs)  # for the generator, which it advances
        view = self.recording.track(made)
        fill = uninitialised_fill_value(func, made)
        self.recording.add(DeferredOperation(func, tuple(map(self._kept, leaves)), tree, (), (), {0: view}, random))
        if fill is not None:
            whole = torch.ops.aten.fill_.Scalar
            fill_leaves, fill_tree = tree_flatten(((view, fill), {}))
            self.recording.add(DeferredOperation(whole, tuple(fill_leaves), fill_tree, (), (view.storage_key,), {}))
        return made

    def _record(
        self, func: OpOverload, leaves: list[OperatorValue], tree: TreeSpec, written: Sequence[Tensor]
    ) -> OperatorValue:
        """Record an operation, and run it on meta tensors for the shapes of its results."""
        recording = self.recording
        views = [self._kept(leaf) for leaf in leaves]
        random = None
        if draws_random_numbers(func):
            random = _generator_of(leaves).get_state()
            if recording.draws:
                self._move_generator(func, leaves, tree)
        overwrites = random is not None and schema_of(func).name in _FILLS
        if overwrites:
            made = leaves[0]
        else:
            on_meta = [
                leaf.to(META) if isinstance(leaf, Tensor) and not leaf.is_meta else
                META if isinstance(leaf, torch.device) and leaf.type == "cpu" else leaf
                for leaf in leaves
            ]  # fmt: skip
            args, kwargs = tree_unflatten(on_meta, tree)
            try:
                made = run_operation(func, args, kwargs)
            except Exception:  # no meta kernel, or an error of the user's: real values show which
                if random is not None:
                    _generator_of(leaves).set_state(random)
                return self._at_once(func, leaves, tree, written)
        writes = tuple({recording.view(t).storage_key for t in written})
        reads = {v.storage_key for v in views if isinstance(v, DeferredView)} - (set(writes) if overwrites else set())
        results, _ = tree_flatten(made)
        new: dict[int, DeferredView] = {}
        for place, result in enumerate(results):
            if isinstance(result, Tensor) and not recording.tracks(result):
                new[place] = recording.track(result)
        recording.add(DeferredOperation(func, tuple(views), tree, tuple(reads), writes, new, random))
        return made

    def _move_generator(self, func: OpOverload, leaves: list[OperatorValue], tree: TreeSpec) -> None:
        """Advance the generator as the operation does."""
        if schema_of(func).name in _FILLS:
            assert isinstance(leaves[0], Tensor)
            rest = [self._scratch_like(leaves[0]), *map(self._with_values, leaves[1:])]
        else:
            rest = [self._with_values(leaf) for leaf in leaves]
            rest = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in rest]
        args, kwargs = tree_unflatten(rest, tree)
        with torch.no_grad():
            run_operation(func, args, kwargs)

    def _with_values(self, leaf: OperatorValue) -> OperatorValue:
        """An argument; a large tensor as a real one with its present values."""
        return self.recording.values(leaf) if self.recording.tracks(leaf) else leaf

    def _scratch_like(self, target: Tensor) -> Tensor:
        """A scratch tensor of this geometry; all share one buffer.

        The buffer comes from mmap: blocks that malloc frees one by one leave holes in the heap
        (`worker.process.allocator_and_garbage_collector`).
        """
        extent = 1 + sum((n - 1) * step for n, step in zip(target.shape, target.stride(), strict=True))
        nbytes = max(1, extent) * target.element_size()
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = None  # before the larger one is taken
            self._scratch = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        flat = self._scratch[:nbytes].view(target.dtype)
        return flat.as_strided(target.shape, target.stride()) if target.numel() else flat[:0].view(target.shape)

    def _kept(self, leaf: OperatorValue) -> Recorded:
        """An argument as the recording keeps it: large tensors as views, small ones as copies of their present values."""
        if self.recording.tracks(leaf):
            return self.recording.view(leaf)
        if isinstance(leaf, torch.Generator):
            return _OWN_GENERATOR
        if isinstance(leaf, torch.device) and leaf == META:  # PyTorch's own code took it from a large tensor
            return torch.device("cpu")
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    def _at_once(
        self, func: OpOverload, leaves: list[OperatorValue], tree: TreeSpec, written: Sequence[Tensor]
    ) -> OperatorValue:
        """Run an operation on real values: it reads large real tensors, or returns values to the caller."""
        recording = self.recording
        targets = {id(t) for t in written}
        real = [
            (recording.make_real(leaf) if id(leaf) in targets else recording.values(leaf)) if recording.tracks(leaf) else leaf
            for leaf in leaves
        ]
        args, kwargs = tree_unflatten(real, tree)
        with torch.no_grad():
            made = run_operation(func, args, kwargs)
        given = {id(r): leaf for r, leaf in zip(real, leaves, strict=True) if isinstance(leaf, Tensor)}
        with_leaves: OperatorValue = tree_map(lambda result: given.get(id(result), result), made)
        return with_leaves


class _Attributes(TorchFunctionMode):
    """Answers what code asks a large tensor without an ATen operation: its device, and its values in other forms."""

    def __init__(self, recording: OperationRecording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        recording = self.recording
        if torch.is_autocast_enabled("cpu") and any(map(recording.tracks, tree_flatten((args, kwargs))[0])):
            raise Undeferrable("a large tensor is used under torch.autocast, which does not cast what is on the meta device")
        if func == _SET_DATA and recording.tracks(args[1]) and not args[0].is_meta:
            raise Undeferrable("`.data` of a small tensor is set to a large one, as lazy modules do")
        if not args or not recording.tracks(args[0]):
            return func(*args, **kwargs)
        tensor = args[0]
        if func in _ANSWERS_OF_CPU_TENSORS:
            return _ANSWERS_OF_CPU_TENSORS[func]
        if func in _GIVE_SHARED_MEMORY:
            return func(recording.make_real(tensor.detach()), *args[1:], **kwargs)
        if func in _GIVE_VALUES:
            return func(recording.values(tensor.detach()).clone(), *args[1:], **kwargs)
        if func == torch.Tensor.__setitem__ and not isinstance(args[2], Tensor):
            # PyTorch would make a tensor of the number where `tensor` is: on the meta device.
            return func(tensor, args[1], torch.tensor(args[2], dtype=tensor.dtype))
        if func in (torch.where, torch.Tensor.where):
            return func(tensor, *(torch.tensor(v) if isinstance(v, (bool, int, float)) else v for v in args[1:]), **kwargs)
        if func == torch.Tensor.cpu:
            return tensor
        if func == _SET_DATA and not args[1].is_meta:
            return func(tensor, recording.stand_in(args[1].detach()))
        return func(*args, **kwargs)


_ANSWERS_OF_CPU_TENSORS = {
    torch.Tensor.device.__get__: torch.device("cpu"),
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.get_device: -1,
}
_GIVE_SHARED_MEMORY = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr, torch.Tensor.untyped_storage}
"""Functions whose results share the tensor's memory: it becomes real for good."""
_GIVE_VALUES = {torch.Tensor.tolist, torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.__reduce_ex__}


def run_with_deferred_init(
    call: Callable[[], T], small_bytes: int | None = None, *, draws: bool = True
) -> tuple[T, OperationRecording]:
    """(what `call()` returns, with large tensors on the meta device; the recording of their values). Raises `Undeferrable`.

    `draws`: see `OperationRecording`.
    """
    recording = OperationRecording(small_bytes, draws=draws)
    with meta_operations_without_dynamo(), recording.record():
        made = call()
    return made, recording


def materialise_tensor_attributes(module: nn.Module, registered: Collection[Tensor], recording: OperationRecording) -> None:
    """Replace large tensors that are plain attributes of modules, and not `registered` too, by real ones, in place."""
    known = set(map(id, registered))

    def settled(tensor: Tensor) -> Tensor:
        if id(tensor) in known or not recording.tracks(tensor):
            return tensor
        return recording.values(tensor.detach()).clone()

    for part in module.modules():
        for key, value in vars(part).items():
            if not key.startswith("_") or isinstance(value, Tensor):
                vars(part)[key] = replace_tensors(value, settled)


def materialise_hidden_tensors(registered: Collection[Tensor], recording: OperationRecording) -> None:
    """Give large tensors that are not `registered` their values, in place: those in closures, globals, unregistered modules.

    Raises `Undeferrable` for one that PyTorch cannot exchange.
    """
    if not recording.has_other_users(registered):
        return  # looking through all objects takes a quarter of a second
    gc.collect()  # what only cycles still hold is not needed
    alive = [value for value in gc.get_objects() if issubclass(type(value), Tensor) and recording.tracks(value)]
    known = {id(tensor) for each in registered for tensor in (each, each.grad)}
    known |= {id(view_base(each)) for each in (*registered, *alive)}  # PyTorch itself keeps these, for their views
    for found in alive:
        if id(found) in known:
            continue
        real = recording.values(found.detach()).clone().requires_grad_(found.requires_grad)
        if isinstance(found, nn.Parameter):
            real = nn.Parameter(real.detach(), requires_grad=found.requires_grad)
        vars(real).update(vars(found))
        try:
            torch.utils.swap_tensors(found, real)
        except RuntimeError as error:
            shape = list(found.shape)
            raise Undeferrable(f"a tensor {shape} that is no parameter, buffer or attribute is used by others too") from error


def _is_view(func: OpOverload) -> bool:
    """Whether an operation returns a view of its argument, or turns its argument into one: no values are read or written."""
    if torch.Tag.inplace_view in func.tags or schema_of(func).name in ("aten::set_", "aten::lift_fresh"):
        return bool(schema_of(func).name != "aten::resize_")
    returns = schema_of(func).returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _generator_of(leaves: Sequence[Recorded]) -> torch.Generator:
    """The generator from which a random operation with these arguments draws."""
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), torch.default_generator)


def _gives_tensors(func: OpOverload) -> bool:
    returns = schema_of(func).returns
    return bool(returns) and all("Tensor" in str(r.type) for r in returns)
