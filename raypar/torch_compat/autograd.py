"""The inside of PyTorch's autograd: its engine, its nodes and hooks, and where custom functions are called."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from raypar.errors import ModelError
from raypar.fences.private_api_fence import Fence
from raypar.torch_compat import TESTED

# -- the engine ----------------------------------------------------------------------------------------------------------------


def _look_for_engine() -> Callable[..., tuple[Tensor | None, ...] | None]:
    from torch.autograd import graph

    run: Callable[..., tuple[Tensor | None, ...] | None] = graph._engine_run_backward
    x = torch.ones(1, requires_grad=True)
    (node,) = [(x * 2).grad_fn]
    metadata: Any = node._input_metadata[0]  # type: ignore[union-attr]
    assert callable(run) and list(metadata.shape) == [1] and metadata.dtype == torch.float32
    assert not metadata.is_nested_tensor and not metadata.is_cpp_nested_tensor
    return run


ENGINE = Fence(
    api="torch.autograd.graph._engine_run_backward",
    reason="`torch.autograd.backward` loads sympy to compare shapes that are numbers anyway",
    versions=TESTED,
    feature="running a backward pass without loading sympy",
    without="each worker's first backward pass takes half a second more",
    probe=_look_for_engine,
)


def backward_engine() -> Callable[..., tuple[Tensor | None, ...] | None] | None:
    """The function that `torch.autograd.backward` calls once it has checked its arguments; None in a PyTorch without it."""
    return ENGINE.find()


def root_metadata(node: Node, output: int) -> Any:
    """Metadata (`shape`, `dtype`, `is_nested_tensor`) of output number `output` of a graph node. Needs a `backward_engine`."""
    return node._input_metadata[output]


def _look_for_execution() -> Callable[[Node], bool]:
    return torch._C._will_engine_execute_node


EXECUTION = Fence(
    api="torch._C._will_engine_execute_node",
    reason="a custom function's backward is not told which gradients are asked for; PyTorch's checkpointing uses this too",
    versions=TESTED,
    feature="computing weight gradients later than input gradients",
    without="schedules that put them off (zb-h1, zb-v) compute both at once: the same numbers, with larger bubbles",
    probe=_look_for_execution,
)


def will_execute(node: Any) -> bool:
    """Whether the running backward pass reaches a node. False, after a warning, in a PyTorch that does not say."""
    ask = EXECUTION.find()
    try:
        return bool(ask is not None and ask(node))
    except RuntimeError:  # `torch.autograd.grad` of the weight itself
        return False


# -- nodes and hooks -----------------------------------------------------------------------------------------------------------


def _look_for_hooks() -> bool:
    called: list[Tensor] = []
    leaf = torch.ones(1, requires_grad=True)
    value: Tensor = leaf * 1
    assert value._backward_hooks is None and leaf._post_accumulate_grad_hooks is None
    value._backward_hooks = {0: called.append}
    value.grad_fn._register_hook_dict(value)
    value._backward_hooks = None
    return True


HOOKS = Fence(
    api="torch.Tensor._backward_hooks",
    reason="`register_hook` makes a handle for each value of each microbatch, a third of a percent of a small GPT's step",
    versions=TESTED,
    feature="sharing the hooks of values between microbatches",
    without="each value has a hook of its own, which takes a third of a percent of a step",
    probe=_look_for_hooks,
)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether users' code has registered a hook on the gradient of a tensor."""
    return HOOKS.find() is not None and tensor._backward_hooks is not None


def can_forget_gradient_hooks() -> bool:
    """Whether `forget_gradient_hooks` finds any; elsewhere raypar's own hooks are among them."""
    return HOOKS.find() is not None


def forget_gradient_hooks(tensor: Tensor) -> None:
    """Remove the hooks that users' code has registered on the gradient of a tensor."""
    if has_gradient_hooks(tensor):
        tensor._backward_hooks.clear()  # type: ignore[union-attr]


def has_hooks_on_sums(parameter: Tensor) -> bool:
    """Whether a parameter has hooks on its gradient, or post-accumulate-grad hooks."""
    return HOOKS.find() is not None and bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def share_hooks(value: Any, hooks: dict[int, Any]) -> None:
    """Have autograd call the hooks that the dict holds by then with the gradient of `value`, the result of an operation.

    Like `Tensor.register_hook`, but without a handle. The tensor's reference to the dict is removed again: hooks that users'
    code registers on the tensor would otherwise go into `hooks`, and so be called for other microbatches.
    """
    if HOOKS.find() is None:
        value.register_hook(_call_all(hooks))
        return
    value._backward_hooks = hooks
    value.grad_fn._register_hook_dict(value)
    value._backward_hooks = None


def share_hooks_of_leaf(leaf: Tensor, hooks: dict[int, Any]) -> None:
    """`share_hooks` for a leaf. Its hooks run after those that users' code registers on values computed from it."""
    if HOOKS.find() is None:
        leaf.register_hook(_call_all(hooks))
        return
    leaf._backward_hooks = hooks


def _call_all(hooks: dict[int, Callable[[Tensor], Tensor | None]]) -> Callable[[Tensor], None]:
    """A hook that calls all hooks that the dict holds by then."""

    def call(gradient: Tensor) -> None:
        for hook in list(hooks.values()):
            hook(gradient)

    return call


def _look_for_hooks_of_nodes() -> bool:
    node = (torch.ones(1, requires_grad=True) * 1).grad_fn
    before, after = _hooks_of_node(node)
    assert not before and not after
    node.register_prehook(_do_nothing)  # type: ignore[union-attr]
    assert len(before) == 1 and not after
    node.register_hook(_do_nothing)  # type: ignore[union-attr]
    assert len(before) == len(after) == 1
    return True


NODE_HOOKS = Fence(
    api="torch.utils.hooks.RemovableHandle.hooks_dict_ref",
    reason="nothing public says which hooks a node of the graph has",
    versions=TESTED,
    feature="noticing hooks on `grad_fn`",
    without="a hook that a layer registers on the grad_fn of a value that others read, too, is not refused, and the gradients "
    "it is called with depend on the plan; register it on that of a view: x = x.view_as(x)",
    probe=_look_for_hooks_of_nodes,
)


def hooks_of_node(node: Any) -> tuple[Collection[int], ...]:
    """What PyTorch keeps a node's pre-hooks in, and its hooks: both grow with each that is registered. Empty in a PyTorch that
    does not say."""
    return () if NODE_HOOKS.find() is None else _hooks_of_node(node)


def _hooks_of_node(node: Any) -> tuple[Collection[int], ...]:
    found = []
    for register in (node.register_prehook, node.register_hook):
        handle = register(_do_nothing)
        found.append(handle.hooks_dict_ref())
        handle.remove()
    return tuple(found)


def _do_nothing(*gradients: Any) -> None:
    """A hook."""


# -- torch.func, custom functions, distributions -------------------------------------------------------------------------------


def _look_for_transforms() -> ModuleType:
    functorch = torch._C._functorch
    assert functorch.peek_interpreter_stack() is None and functorch.is_functorch_wrapped_tensor(torch.empty(0)) is False
    return functorch


TRANSFORMS = Fence(
    api="torch._C._functorch.peek_interpreter_stack",
    reason="nothing public says whether a transform of torch.func is running",
    versions=TESTED,
    feature="noticing torch.func",
    without="torch.func around a linear layer, or between units of a captured model, is neither refused nor handled, and may "
    "give wrong gradients; remove torch.func from the model",
    probe=_look_for_transforms,
)


def innermost_transform() -> Any:
    """The innermost `torch.func` transform that is running; None if none is."""
    functorch = TRANSFORMS.find()
    return None if functorch is None else functorch.peek_interpreter_stack()


def is_wrapped_by_transform(tensor: Tensor) -> bool:
    """Whether a transform of torch.func has made this tensor."""
    functorch = TRANSFORMS.find()
    return functorch is not None and bool(functorch.is_functorch_wrapped_tensor(tensor))


def _look_for_vmap() -> ModuleType:
    from torch._functorch import apis

    if not callable(vars(apis)["vmap_impl"]):
        raise TypeError("vmap_impl cannot be called")
    return apis


VMAP = Fence(
    api="torch._functorch.apis.vmap_impl",
    reason="`torch.vmap` is bound by name in users' code, so that only what it calls can be seen",
    versions=TESTED,
    feature="recording torch.vmap",
    without="a forward that calls it between units is refused; call it inside of a module, and make that a unit (model.units)",
    probe=_look_for_vmap,
)


def vmap_implementation() -> tuple[ModuleType, Callable[..., Tensor | tuple[Tensor, ...]]] | None:
    """(the module whose `vmap_impl` every call of `torch.vmap` ends in, that function); None in a PyTorch without."""
    apis = VMAP.find()
    return None if apis is None else (apis, vars(apis)["vmap_impl"])


def _look_for_apply() -> tuple[type, Callable[..., Tensor | tuple[Tensor, ...]]]:
    base: type = torch.autograd.function._SingleLevelFunction
    assert base in torch.autograd.Function.__mro__
    return base, vars(torch._C._FunctionBase)["apply"]


APPLY = Fence(
    api="torch.autograd.function._SingleLevelFunction",
    reason="no function mode sees the call of a custom autograd function",
    versions=TESTED,
    feature="recording custom autograd functions",
    without="no forward can be recorded: results of such functions would become constants; write the model as nn.Sequential",
    probe=_look_for_apply,
    error=ModelError,
)


def _look_for_validation() -> type[torch.distributions.Distribution]:
    kind: type[torch.distributions.Distribution] = torch.distributions.Distribution
    assert isinstance(kind._validate_args, bool)
    return kind


VALIDATION = Fence(
    api="torch.distributions.Distribution._validate_args",
    reason="`set_default_validate_args` cannot be undone without knowing what was set before",
    versions=TESTED,
    feature="recording distributions",
    without="a forward that makes one is refused, as it reads values: give it validate_args=False",
    probe=_look_for_validation,
)


def settings_without_distribution_checks() -> list[tuple[type, str, bool]]:
    """Settings (class, attribute, value) with which distributions do not check the values of their arguments."""
    kind = VALIDATION.find()
    return [] if kind is None else [(kind, "_validate_args", False)]


def custom_function_apply() -> tuple[type, Callable[..., Tensor | tuple[Tensor, ...]]]:
    """(the class whose `apply` every custom function inherits, what that calls). Raises `ModelError`."""
    found: tuple[type, Callable[..., Tensor | tuple[Tensor, ...]]] = APPLY.require()
    return found


for _fence in (ENGINE, HOOKS, NODE_HOOKS, TRANSFORMS):
    _fence.run_probe()  # on import: their tensor operations must not run while a model is recorded
