"""Private APIs of PyTorch that are gone or answer otherwise: one line each, with the release and the feature that is off.

What only saves time or memory is then done by public functions, with the same numbers. What a model cannot be read without is
an error.
"""

import importlib
import pkgutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_job import write_job
from test_fences import GONE, entered, raises, told  # noqa: F401 - the last is a fixture
from torch import nn

from raypar.errors import DataError, ModelError
from raypar.fences.private_api_fence import FENCES, Fence
from raypar.job.read_job import parse_job
from raypar.model.tensor_parallel.weight_gradient_memory_reuse import KeptGradientMemory
from raypar.plan import ParallelPlan
from raypar.torch_compat import (
    autograd,
    avoid_dynamo_import,
    dispatch,
    lazy_copies,
    modules,
    multi_tensor,
    printing,
    process_state,
    pytree,
    storages,
    worker_info,
)
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.backward import run_autograd_backward

ROOM = Path(__file__).parents[2] / "raypar/torch_compat"
for module in pkgutil.iter_modules([str(ROOM)]):
    importlib.import_module(f"raypar.torch_compat.{module.name}")
OF_TORCH = [fence for fence in FENCES if fence.api.startswith("torch.")]


@pytest.fixture(autouse=True)
def forgotten():
    for one in OF_TORCH:
        one.reset()
    yield
    for one in OF_TORCH:
        one.reset()


@pytest.mark.parametrize("one", OF_TORCH, ids=lambda one: one.api)
def test_the_installed_release_has_the_api_and_it_is_said_why_it_is_used(one: Fence, told):  # noqa: F811
    assert one.find() is not None and not told
    assert all((one.reason, one.versions, one.feature, one.without))


def parameter(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def gradient_by(run: Callable) -> list[float]:
    """The gradient of a leaf after `run(loss)`."""
    leaf = parameter(1.0, 2.0)
    run((leaf * leaf).sum())
    return leaf.grad.tolist()


def shared_hooks() -> list:
    """What two hooks that come and go see of a value's gradient and of a leaf's."""
    seen, hooks = [], OrderedDict()
    value = parameter(1.0) * 2
    autograd.share_hooks(value, hooks)
    leaf = parameter(3.0)
    autograd.share_hooks_of_leaf(leaf, hooks)
    hooks[0] = lambda gradient: seen.append(gradient.item())  # put in later, as stages do
    (value * 5 + leaf * 7).backward()
    return sorted(seen)


def foreach() -> list[float]:
    into, other = [torch.ones(2), torch.ones(1)], [torch.full((2,), 2.0), torch.full((1,), 4.0)]
    multi_tensor.add_all(into, other)
    multi_tensor.scale_all(into, 0.5)
    multi_tensor.copy_all(other, into)
    multi_tensor.add_to_all(other, 3)
    multi_tensor.zero_all(into)
    return [*other[0].tolist(), *other[1].tolist(), *into[0].tolist()]


def read_and_set(read: Callable, put: Callable[..., None], value) -> Callable:
    """Reads a setting, and sets it to what is not there: without the API nothing happens."""

    def use():
        found = read()
        put(value)
        return found, read() == found

    return use


def keep_memory():
    """Whether the memory of a weight's gradient is taken again."""
    memory, weight = KeptGradientMemory(), parameter(*[1.0] * 64)
    with torch.no_grad():
        weight.grad = torch.zeros(64)
        memory.keep(weight)
        weight.grad = None
        return memory.take(torch.zeros(1), torch.zeros(1))


class Step(torch.optim.SGD):
    """An optimizer whose methods nobody has changed yet."""


PLAIN = SimpleNamespace(Module=SimpleNamespace, Identity=SimpleNamespace)
WITHOUT = SimpleNamespace()
"""In the place of a module: it has nothing."""
ODD_TENSOR = SimpleNamespace(ones=lambda *given, **more: SimpleNamespace(__mul__=None))
Case = tuple[Fence, dict[str, object], Callable, object]
CASES: dict[str, Case] = {
    # what: (fence, what PyTorch has instead, what raypar does, what comes of it; "says": a ModelError)
    "trees renamed": (pytree.TREES, {"torch.utils._pytree.tree_map": GONE}, raises(ModelError, pytree.TREES.require), "says"),
    "trees flatten otherwise": (
        pytree.TREES,
        {"torch.utils._pytree.tree_flatten": lambda tree: ([tree], None)},
        raises(ModelError, pytree.TREES.require),
        "says",
    ),
    "dispatch modes gone": (
        dispatch.MODES,
        {"torch.utils._python_dispatch.TorchDispatchMode": GONE},
        raises(ModelError, dispatch.MODES.require),
        "says",
    ),
    "wrappers gone": (
        dispatch.WRAPPERS,
        {"torch._C._DisableTorchDispatch": GONE},
        raises(ModelError, dispatch.WRAPPERS.require),
        "says",
    ),
    "schemas otherwise": (
        dispatch.SCHEMAS,
        {
            "raypar.torch_compat.dispatch.torch": SimpleNamespace(
                ops=SimpleNamespace(aten=SimpleNamespace(add_=SimpleNamespace()))
            )
        },
        raises(ModelError, dispatch.SCHEMAS.require),
        "says",
    ),
    "operations renamed": (
        dispatch.OPERATIONS,
        {"raypar.torch_compat.dispatch.torch": SimpleNamespace(ops=SimpleNamespace(aten=WITHOUT))},
        raises(ModelError, dispatch.OPERATIONS.require),
        "says",
    ),
    "the worker that a data set sees renamed": (
        worker_info.WORKER_INFO,
        {"torch.utils.data._utils.worker._worker_info": GONE},
        raises(DataError, lambda: worker_info.seen_as_worker(1, 2, 0, None).__enter__()),
        "says",
    ),
    "the worker that a data set sees is kept otherwise, and there is one": (
        worker_info.WORKER_INFO,
        {"torch.utils.data.get_worker_info": lambda: None},
        lambda: [each for each in map(list, [[1, 2]]) if worker_info.seen_as_worker(0, 1, 0, None).__enter__() is None],
        [[1, 2]],
    ),
    "storages without address": (
        storages.ADDRESSES,
        {"raypar.torch_compat.storages.torch": SimpleNamespace(empty=lambda *given, **more: SimpleNamespace())},
        raises(ModelError, storages.ADDRESSES.require),
        "says",
    ),
    "holders are not counted": (storages.COUNTS, {"torch._C._storage_Use_Count": GONE}, keep_memory, None),
    "holders counted otherwise": (
        storages.COUNTS,
        {"torch._C._storage_Use_Count": lambda address: "many"},
        lambda: storages.count_storage_holders(0),
        None,
    ),
    "the engine gone": (
        autograd.ENGINE,
        {"torch.autograd.graph._engine_run_backward": GONE},
        lambda: gradient_by(lambda loss: run_autograd_backward([loss], [None])),
        [2.0, 4.0],
    ),
    "the engine does not say what it runs": (
        autograd.EXECUTION,
        {"torch._C._will_engine_execute_node": GONE},
        lambda: autograd.will_execute(None),
        False,
    ),
    "hooks kept otherwise": (autograd.HOOKS, {"raypar.torch_compat.autograd.torch": ODD_TENSOR}, shared_hooks, [5.0, 7.0]),
    "hooks on parameters kept otherwise": (
        autograd.HOOKS,
        {"raypar.torch_compat.autograd.torch": ODD_TENSOR},
        lambda: (autograd.has_gradient_hooks(parameter(1.0)), autograd.has_hooks_on_sums(parameter(1.0))),
        (False, False),
    ),
    "hooks of nodes kept otherwise": (
        autograd.NODE_HOOKS,
        {"torch.utils.hooks.RemovableHandle": lambda kept: SimpleNamespace(id=0, remove=kept.clear)},
        lambda: autograd.hooks_of_node(parameter(1.0).sum().grad_fn),
        (),
    ),
    "transforms gone": (
        autograd.TRANSFORMS,
        {"torch._C._functorch.peek_interpreter_stack": GONE},
        lambda: (autograd.innermost_transform(), autograd.is_wrapped_by_transform(torch.ones(1))),
        (None, False),
    ),
    "custom functions called otherwise": (
        autograd.APPLY,
        {"torch.autograd.function._SingleLevelFunction": GONE},
        raises(ModelError, autograd.custom_function_apply),
        "says",
    ),
    "vmap is implemented otherwise": (
        autograd.VMAP,
        {"torch._functorch.apis.vmap_impl": GONE},
        autograd.vmap_implementation,
        None,
    ),
    "distributions validate otherwise": (
        autograd.VALIDATION,
        {"torch.distributions.Distribution._validate_args": GONE},
        autograd.settings_without_distribution_checks,
        [],
    ),
    "hooks of modules kept otherwise": (
        modules.MODULE_HOOKS,
        {"raypar.torch_compat.modules.nn": PLAIN},
        lambda: (modules.has_hooks(nn.ReLU()), modules.has_backward_hooks(nn.ReLU())),
        (False, False),
    ),
    "buffers that are no state kept otherwise": (
        modules.PERSISTENCE,
        {"raypar.torch_compat.modules.nn": PLAIN},
        raises(ModelError, lambda: modules.non_persistent_buffer_names(nn.ReLU())),
        "says",
    ),
    "compiled calls kept otherwise": (
        modules.COMPILED_CALLS,
        {"raypar.torch_compat.modules.nn": PLAIN},
        lambda: modules.has_compiled_call(nn.ReLU()),
        False,
    ),
    "norms without a common base": (
        modules.NORMS,
        {"torch.nn.modules.batchnorm._NormBase": GONE},
        raises(ModelError, modules.NORMS.require),
        "says",
    ),
    "operations on lists gone": (multi_tensor.LISTS, {"torch._foreach_mul_": GONE}, foreach, [4.5, 4.5, 5.5, 0.0, 0.0]),
    "lazy copies gone": (
        lazy_copies.LAZY,
        {"torch._lazy_clone": GONE},
        lambda: lazy_copies.lazy_copy(torch.ones(2)).add_(1.0).tolist(),
        [2.0, 2.0],
    ),
    "tensors printed otherwise": (
        printing.PRINTING,
        {"torch._tensor_str._str": lambda *given, **more: "1.0"},
        printing.print_tensors_without_memory,
        None,
    ),
    "inference mode gone": (
        process_state.INFERENCE,
        {"torch._C._InferenceMode": GONE},
        read_and_set(torch.is_inference_mode_enabled, process_state.set_inference, True),
        (False, True),
    ),
    "autocast gone": (
        process_state.AUTOCAST,
        {"torch._C._is_any_autocast_enabled": GONE},
        lambda: process_state.torch_state_reader(process_state.AUTOCAST, "_is_any_autocast_enabled", False)(),
        False,
    ),
    "modes gone": (
        process_state.MODES,
        {"torch.overrides._pop_mode": GONE},
        lambda: (process_state.leave_function_modes(0), process_state.leave_dispatch_modes(0)),
        (None, None),
    ),
    "hooks on saved tensors gone": (
        process_state.SAVED_TENSORS,
        {"torch._C._autograd._pop_saved_tensors_default_hooks": GONE},
        process_state.pop_all_saved_tensors_hooks,
        None,
    ),
    "deterministic gone": (
        process_state.DETERMINISTIC,
        {"torch._C._get_deterministic_fill_uninitialized_memory": GONE},
        read_and_set(process_state.deterministic_flags, process_state.set_deterministic, (True, True, False)),
        ((False, False, True), True),
    ),
    "precisions gone": (
        process_state.PRECISIONS,
        {"torch._C._set_fp32_precision_setter": GONE},
        lambda: process_state.set_float32_precision("cuda", "all", "tf32"),
        None,
    ),
    "oneDNN's flags gone": (
        process_state.MKLDNN,
        {"torch._C._set_mkldnn_deterministic": GONE},
        read_and_set(process_state.mkldnn_flags, process_state.set_mkldnn, (False, True)),
        ((True, False), True),
    ),
    "cuDNN's flags gone": (
        process_state.CUDNN,
        {"torch._C._get_cudnn_benchmark": GONE},
        read_and_set(process_state.cudnn_flags, process_state.set_cudnn, (False, True, True)),
        ((True, False, False), True),
    ),
    "attention's flags are no functions": (
        process_state.ATTENTION,
        {"torch._C._get_cudnn_sdp_enabled": True},
        read_and_set(process_state.attention_flags, process_state.set_attention, (False,) * 4),
        ((True,) * 4, True),
    ),
    "the compiler is loaded otherwise": (
        avoid_dynamo_import.WRAPPERS,
        {"torch._disable_dynamo": GONE},
        lambda: (
            avoid_dynamo_import.without_dynamo(Step) is Step and entered(avoid_dynamo_import.meta_operations_without_dynamo)()
        ),
        "went on",
    ),
}


def test_there_is_a_case_for_every_fence():
    assert {case[0] for case in CASES.values()} == set(OF_TORCH)


@pytest.mark.parametrize("what", CASES)
def test_an_api_that_is_gone_or_answers_otherwise_is_one_line_and_the_run_goes_on_where_it_can(what, told, monkeypatch):  # noqa: F811
    fence, instead, use, expected = CASES[what]
    monkeypatch.setattr(torch, "__version__", "3.1.4+cpu")
    if fence is avoid_dynamo_import.WRAPPERS:
        avoid_dynamo_import._references.cache_clear()
    for name, value in instead.items():
        if value is GONE:
            monkeypatch.delattr(name)
        else:
            monkeypatch.setattr(name, value)
    got = [use(), use()]
    avoid_dynamo_import._references.cache_clear()
    assert got == ([got[0]] * 2 if expected == "says" else [expected] * 2)
    lines = got[:1] if expected == "says" else told
    assert len(lines) == 1, "it is said once"
    first = lines[0].partition("\n")[0]
    assert first.startswith(f"PyTorch 3.1.4+cpu: {fence.api} is missing or has changed (")
    assert first.endswith(f"), so {fence.feature} is off: {fence.without}")


def steps(folder: Path) -> tuple[list, list[str]]:
    """(losses, norms and gradients of two steps, lines for the user) of a job in stages and replicas, with a split backward."""
    spec = parse_job(write_job(folder).read_text())
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=4), "zb-h1") as run:
        found = [(report.loss, report.norm) for step in range(2) for report in run.step(step)]
        gradients = [(name, each.tolist()) for name, copies in run.gradients().items() for each in copies if each is not None]
        return [*found, *gradients], run.warnings


@pytest.mark.parametrize(
    "fence",
    [autograd.ENGINE, autograd.EXECUTION, autograd.HOOKS, storages.COUNTS, multi_tensor.LISTS, process_state.CUDNN],
    ids=lambda fence: fence.api,
)
def test_a_worker_without_what_only_saves_time_has_the_same_bits_and_reports_the_line(fence, tmp_path, told):  # noqa: F811
    usual, quiet = steps(tmp_path)
    found = fence._found
    found.asked, found.usable, found.missing = True, False, "ImportError: it has moved"
    without, lines = steps(tmp_path)
    assert without == usual and not quiet
    assert fence is storages.COUNTS or [line for line in lines if fence.feature in line] == lines != []


def test_with_the_api_and_without_the_numbers_are_the_same():
    assert foreach() == [4.5, 4.5, 5.5, 0.0, 0.0] and shared_hooks() == [5.0, 7.0]
    assert gradient_by(lambda loss: run_autograd_backward([loss], [None])) == [2.0, 4.0]
    assert storages.count_holders(torch.ones(1)) is not None
