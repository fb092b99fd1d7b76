"""Makes the layer graph of an unmodified module: traces it, and puts its modules, parameters and buffers into layers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.capture.captured_layer import CapturedLayer, cache_of
from raypar.model.capture.cut_trace_into_layers import USES, CutTrace, LayerProgram, used_parameter
from raypar.model.capture.forward_inputs import ForwardInputs, choose_forward_inputs
from raypar.model.capture.memoryless_tensor import memoryless_like
from raypar.model.capture.trace_cache import TraceCache
from raypar.model.capture.trace_data import TensorKey
from raypar.model.capture.units import LARGE_PART, divide_into_branches, find_units, open_units, units_by_pattern
from raypar.model.graph import Graph, Layer, ModelOutput, join_names
from raypar.model.initial_values_source_protocol import InitialValues
from raypar.model.layer_skeletons import (
    SkeletonCopier,
    build_on_meta,
    make_skeletons,
    norms_with_running_statistics,
    running_statistics_names,
    shared_skeleton,
)
from raypar.model.parameter_aliasing_check import refuse_parameter_aliasing
from raypar.model.rounded_parameters import ids_of_rounded_parameters
from raypar.model.synchronised_norms import BatchNormOfMicrobatch
from raypar.plan.stage_connections import LATER_USE
from raypar.plan.wording import count_noun
from raypar.torch_compat.modules import has_backward_hooks, non_persistent_buffer_names
from raypar.torch_compat.pytree import tree_unflatten


class _Container(nn.Module):
    """Takes the place of a user's module that is split: holds the submodules and parameters that a layer needs."""


@dataclass(frozen=True)
class ModuleCaptureOptions:
    """What a job says about a model that is captured."""

    fields: Callable[[], tuple[str, ...]]
    """Reads the names of the fields of a sample."""
    read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    """Reads these fields of the first microbatch, collated as workers do."""
    dtype: torch.dtype
    """The job's dtype."""
    input: str = "x"
    """The field that forward is given as a positional argument, if its parameters have other names."""
    target: str = "y"
    """The field that the loss reads."""
    wants_loss: bool = False
    """Whether the model computes the loss itself."""
    wants_output: bool = True
    """Whether all that such a model returns is used; else only the loss."""
    units: tuple[str, ...] = ()
    """Patterns of modules that are units."""
    autocast_dtype: torch.dtype | None = None
    """The dtype of the autocast in which layers run; None: there is none."""
    rounded_to: torch.dtype | None = None
    """The dtype of the copies of parameters that layers compute with; None: they compute with the parameters."""
    lengths: Callable[[], Mapping[str, Sequence[int]]] = dict
    """Asked after `read`: padded field -> the lengths of the samples of the first microbatch."""


def capture_module_graph(made: nn.Module, initial: InitialValues, request: ModuleCaptureOptions) -> Graph:
    """The graph of an unmodified module: one layer for each call of a unit. `initial`: values of its parameters and buffers.

    Raises `ModelError` for what cannot be captured, with the file and line of the user's code.
    """
    ((_, skeleton),) = make_skeletons([("", made)])
    _refuse_names(skeleton)
    _refuse_own_train(skeleton)
    names = request.fields()
    inputs = choose_forward_inputs(
        skeleton,
        names,
        input=request.input,
        target=request.target,
        wants_loss=request.wants_loss,
        wants_output=request.wants_output,
    )
    buffers = dict(initial.stream([name for name, _ in skeleton.named_buffers()], request.dtype))
    batch = request.read(inputs.fields)
    cache = trace_module(
        skeleton,
        buffers,
        batch,
        inputs,
        dtype=request.dtype,
        units=request.units,
        autocast_dtype=request.autocast_dtype,
        rounded_to=request.rounded_to,
    )
    cache.skeleton, cache.first_lengths = skeleton, request.lengths()
    refuse_parameter_aliasing([(name, made.get_submodule(name)) for name in cache.units])
    _refuse_written_overlaps(made, cache.written_buffers)
    layers, ties = make_layers(cache, skeleton)
    cut = cache.first_trace
    if not cut.outputs:
        raise ModelError(
            f"{type(made).__name__} returned no tensor, and the loss needs one",
            cure="return the output, or the loss (loss: model)",
        )
    bare = len(cut.trace.output_leaves) == 1 and tree_unflatten([0], cut.trace.output_structure) == 0
    return Graph(
        tuple(layers),
        output=cut.outputs[0] if bare else "",
        ties=tuple(ties),
        initial_values=initial,
        outputs=() if bare else (*dict.fromkeys(cut.outputs), *((cut.form_output,) if cut.returns_numbers else ())),
        rebuild_output=None if bare else _OutputBuilder(cache),
        aliases=find_aliases(skeleton, layers, ties),
        batch_names=names,
    )


def traces_of(graph: Graph) -> TraceCache | None:
    """The traces of a captured model; None for other models."""
    shell = graph.layers[-1].build.skeleton if isinstance(graph.layers[-1].build, SkeletonCopier) else None
    return cache_of(shell) if isinstance(shell, CapturedLayer) else None


def put_initial_buffers_into_captured_model(graph: Graph, initial: InitialValues, dtype: torch.dtype) -> None:
    """Let a captured model's forward, where it decides by buffers in Python, find in them the values with which the run begins.

    `initial`: those values. Raises `ModelError` if it then calls other units than with the model function's values.
    """
    cache = traces_of(graph)
    if cache is not None:
        owned = {name for layer in graph.layers for _, name in layer.own_names or ()}
        cache.set_buffers(dict(initial.stream([name for name, _ in cache.model.named_buffers() if name in owned], dtype)))


def check_evaluation_calls_same_units(graph: Graph, batch: Mapping[str, Tensor]) -> None:
    """Raises `ModelError` if a captured model in evaluation calls other units than in training, or calls them otherwise."""
    cache = traces_of(graph)
    if cache is not None:
        cache.trace_of({name: batch[name] for name in cache.inputs.fields}, training=False)


def trace_ahead(graph: Graph, batches: Iterable[Mapping[str, Tensor]], *, training: bool) -> None:
    """Trace a captured model for batches before they come, and keep these traces beside others. Layers that are the same for
    every batch need none.

    Raises `ModelError` as `TraceCache.trace_of` does, with the traces before it made.
    """
    cache = traces_of(graph)
    if cache is not None and not all(cache.first_trace.is_fixed(index) for index in range(len(graph.layers))):
        for batch in batches:
            cache.trace_ahead(batch, training=training)


def captured_outputs_on_meta(graph: Graph) -> dict[str, Tensor] | None:
    """Value -> meta tensor of each value that the loss reads of a captured model; None for other models."""
    cache = traces_of(graph)
    if cache is None:
        return None
    cut = cache.first_trace
    facts = [(value, cut.trace.facts[key]) for value, key in zip(cut.outputs, cut.trace.output_keys, strict=True)]
    made = {value: torch.empty(fact.shape, dtype=fact.dtype, device="meta") for value, fact in facts}
    return made | ({cut.form_output: torch.empty((), dtype=torch.int64, device="meta")} if cut.returns_numbers else {})


def recorded_values(graph: Graph) -> dict[str, Tensor]:
    """Value -> a memoryless tensor like that of the first batch; the fields of the batch themselves. Empty for models that are
    not captured."""
    cache = traces_of(graph)
    if cache is None:
        return {}
    facts, own = cache.first_trace.trace.facts, _parameter_dtype(cache)
    found = {name: cache.first_batch[name] for name in graph.batch_fields if name in cache.first_batch}
    for program in cache.first_trace.layers:
        for name, key in (*program.reads, *program.outputs):
            if name not in found and key in facts:
                fact = facts[key]
                dtype = own if fact.dtype == cache.autocast_dtype and own is not None else fact.dtype
                shape = torch.empty(fact.shape, dtype=dtype, device="meta", requires_grad=fact.requires_grad)
                found[name] = memoryless_like(shape)
    return found


def runs_of_leaf_units(graph: Graph) -> list[tuple[int, int]]:
    """All layers of a captured model as (first, last + 1): each by itself, but those whose units have no modules inside, and
    stand in a row in one module (the linear layers and activations of an `nn.Sequential`), together."""
    cache = traces_of(graph)
    programs = () if cache is None else cache.first_trace.layers
    found: list[tuple[int, int]] = []
    before: str | None = None
    for index, program in enumerate(programs):
        unit = program.unit
        is_leaf = unit is not None and cache is not None and not any(cache.model.get_submodule(unit).children())
        home = unit.rpartition(".")[0] if unit is not None and is_leaf else None
        if home is not None and home == before:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
        before = home
    return found


def samples_of(graph: Graph) -> int:
    """How many samples the first batch of a captured model had; 0 for other models."""
    cache = traces_of(graph)
    return 0 if cache is None else max((len(field) for field in cache.first_batch.values() if field.dim()), default=0)


def build_layer_without_parameter_values(graph: Graph, index: int) -> nn.Module:
    """A layer of a captured model as it is when it is recorded: with memoryless parameters and real buffers."""
    cache, layer = traces_of(graph), graph.layers[index]
    assert cache is not None
    module = build_on_meta(layer)
    dtype = _parameter_dtype(cache)
    if dtype is not None:
        _put_absent_parameters(module, dtype if cache.rounded_to is None else torch.float32, cache.rounded_to)
    kept = dict(cache.model.named_buffers())
    _put_real_buffers(module, {path: kept[layer.qualify(path)] for path, _ in module.named_buffers()})
    return module


def _parameter_dtype(cache: TraceCache) -> torch.dtype | None:
    return next((p.dtype for p in cache.model.parameters() if p.is_floating_point()), None)


def buffers_written_in_capture(graph: Graph) -> frozenset[str]:
    """Names of the buffers that a captured model's forward writes in training, apart from running statistics and caches; empty
    for other models."""
    cache = traces_of(graph)
    return frozenset() if cache is None else cache.written_buffers


def line_about_parameters_added_by_layer(graph: Graph) -> str | None:
    """A line for the user about `parameters_added_by_layer`; None if there are none."""
    cache = traces_of(graph)
    names = [] if cache is None else parameters_added_by_layer(cache, graph.ties)
    if not names:
        return None
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return (
        f"several layers use {', '.join(names[:3])}{more}, and one of them several times: the gradients of one layer's uses "
        "are summed first, then those of the layers. Every plan does so, with the same bits; a training loop of your own sums "
        "them one after the other, so its last bits may differ (by 1e-7 of the largest number in float32)"
    )


def line_about_evaluation_mode(graph: Graph) -> str | None:
    """A line for the user about a model that its function returns in evaluation mode as a whole; None for another one.

    It is taken as it is. Parts in evaluation mode, as frozen norms, are the user's intention.
    """
    cache = traces_of(graph)
    models = [shared_skeleton(layer) for layer in graph.layers] if cache is None else [cache.skeleton or cache.model]
    if any(part.training for model in models for part in model.modules()):
        return None
    return (
        "the model function returns the model in evaluation mode (eval() was called, by itself or in from_pretrained): it is "
        "trained so, without dropout and with the running statistics of its norms as they are, as in a loop that does not call "
        "train()\n  cure: call train() in the model function, before it returns the model; leave it if that is what you want"
    )


def line_about_synchronised_norms(graph: Graph) -> str | None:
    """A line for the user about `nn.SyncBatchNorm` in the model; None without any."""
    norms = {
        layer.qualify(path) or "the model"
        for layer in graph.layers
        for path, part in shared_skeleton(layer).named_modules()
        if isinstance(part, BatchNormOfMicrobatch)
    }
    if not norms:
        return None
    some, said = ", ".join(sorted(norms)[:3]) + (", ..." if len(norms) > 3 else ""), "SyncBatchNorm are"
    return (
        f"{count_noun(len(norms), 'SyncBatchNorm is', said)} read as BatchNorm ({some}): its statistics are those of one "
        "microbatch, not of all replicas"
    )


def parameters_added_by_layer(cache: TraceCache, ties: Iterable[Sequence[str]]) -> list[str]:
    """Parameters that several layers use, and one of them several times.

    Their gradients are summed within each layer first, which is another order than autograd's in one process (rule 6 of the
    numerics contract).
    """
    trace = cache.first_trace.trace
    first_names = {id(parameter): name for name, parameter in cache.model.named_parameters()}
    found = []
    for first, *_ in ties:
        name = first_names[id(cache.model.get_parameter(first))]
        if 1 < trace.most_parts_of_call[name] < trace.gradient_parts.get(name, 0):
            found.append(first)
    return found


def fields_without_target(graph: Graph, target: str) -> tuple[str, ...] | None:
    """The fields that a captured model's forward gets, if it has a parameter with the target's name and does not get that."""
    cache = traces_of(graph)
    if cache is None or target in cache.inputs.fields or target not in inspect.signature(cache.model.forward).parameters:
        return None
    return cache.inputs.fields


def lines_about_repeated_traces(graph: Graph) -> dict[str, str]:
    """Key -> line for the user about a captured model that is traced again for most batches; empty for other models."""
    cache = traces_of(graph)
    return {} if cache is None else dict(cache.repeated.lines)


def refuse_parameters_in_no_unit(graph: Graph, given: Collection[str] = ()) -> None:
    """Raises `ModelError` for parameters of a captured model that code between units uses, or that nothing uses: a layer has
    them without the module whose `reset_parameters()` would give them values.

    `given`: names of parameters that get their values elsewhere.
    """
    cache, found = traces_of(graph), list[str]()
    for layer in graph.layers if cache is not None else ():
        module = shared_skeleton(layer)
        if all(LATER_USE in name or name in given for name in (layer.qualify(path) for path, _ in module.named_parameters())):
            continue
        for path, part in module.named_modules():
            if isinstance(part, (CapturedLayer, _Container)):
                own = [layer.qualify(join_names(path, key)) for key, p in part._parameters.items() if p is not None]
                found += [name for name in own if LATER_USE not in name]
    if found:
        assert cache is not None
        owners = [type(cache.model.get_submodule(name.rpartition(".")[0])).__name__ for name in found]
        named = [f"{name} (of {owner})" for name, owner in zip(found, owners, strict=True)]
        which = " and ".join(named[:3]) + (f" (and {len(named) - 3} more)" if len(named) > 3 else "")
        raise ModelError(
            f"with init: by-name reset_parameters() of modules gives values, and {which} {'are' if named[1:] else 'is'} in no "
            "unit: workers have the parameter without the module that owns it",
            cure="set init: model (what constructors give is kept), or put such a parameter into a module of its own with "
            "reset_parameters(), whose forward uses it",
        )


class _OutputBuilder:
    """Makes what the model returned of the tensors in it and, if there is more than tensors in it, of the output's form."""

    def __init__(self, cache: TraceCache) -> None:
        cut = cache.first_trace
        self._cache = cache
        """The traces, of which each says what it has returned beside tensors."""
        self._structure = cut.trace.output_structure
        """The pytree structure of what the model returned."""
        self._returns_numbers = cut.returns_numbers
        """Whether the last of the values is the form."""
        indices = {value: index for index, value in enumerate(dict.fromkeys(cut.outputs))}
        names = iter(cut.outputs)
        self._indices = [indices[next(names)] if isinstance(leaf, TensorKey) else None for leaf in cut.trace.output_leaves]
        """Index among the values of each leaf that is a tensor; None for others."""

    def __call__(self, *values: Tensor) -> ModelOutput:
        """What the model returns, with these tensors in it."""
        others = self._cache.first_trace.trace.output_leaves_without_tensors
        if self._returns_numbers and not values[-1].is_meta:
            others = self._cache.output_forms[int(values[-1])]
        leaves = [other if index is None else values[index] for index, other in zip(self._indices, others, strict=True)]
        rebuilt: ModelOutput = tree_unflatten(leaves, self._structure)
        return rebuilt


def _refuse_own_train(skeleton: nn.Module) -> None:
    """Raises `ModelError` for a module whose own `train()` would leave parts of it in evaluation mode, if nobody has called it:
    a loop of the user's own calls `model.train()`, and raypar takes the model as the function returns it."""
    for name, module in skeleton.named_modules():
        if type(module).train is not nn.Module.train and all(part.training for part in module.modules()):
            ((_, copied),) = make_skeletons([("", module)])
            copied.train()  # which may return nothing
            left = next((path for path, part in copied.named_modules() if not part.training), None)
            if left is not None:
                raise ModelError(
                    f"train() of {name or 'the model'} ({type(module).__name__}) leaves {left or 'itself'} in evaluation mode, "
                    "and has not been called",
                    cure="call model.train() in the model function, before it returns the model",
                )


def _refuse_written_overlaps(made: nn.Module, written: Collection[str]) -> None:
    """Raises `ModelError` for a buffer that the forward writes, and that lies in the memory of another one: workers keep each
    buffer by itself."""
    names: dict[int, str] = {}
    for name, buffer in made.named_buffers() if written else ():
        if buffer.layout is torch.strided and not buffer.is_meta:
            other = names.setdefault(buffer.untyped_storage().data_ptr(), name)
            if other != name and not {name, other}.isdisjoint(written):
                raise ModelError(
                    f"the buffers {other} and {name} share memory, and the forward writes into it: workers keep each by itself",
                    cure="register one of them, and make the other in forward",
                )


def _refuse_names(model: nn.Module) -> None:
    """Raises `ModelError` for a module or parameter whose name would be taken for another's."""
    for name in (*(n for n, _ in model.named_modules()), *(n for n, _ in model.named_parameters())):
        if LATER_USE in name or "#" in name:
            raise ModelError(
                f"the name {name!r} has a {LATER_USE!r} or '#', with which raypar marks later uses", cure="give it another name"
            )


def trace_module(
    skeleton: nn.Module,
    buffers: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    inputs: ForwardInputs,
    *,
    dtype: torch.dtype,
    units: Sequence[str] = (),
    autocast_dtype: torch.dtype | None = None,
    rounded_to: torch.dtype | None = None,
) -> TraceCache:
    """The traces of a model, of which the first, for `batch`, is made.

    `skeleton`: the model on the meta device. `buffers`: their values by name. `dtype`: the job's. `units`: patterns of modules.
    `rounded_to`: as in `ModuleCaptureOptions`. Raises `ModelError` for what cannot be captured.
    """
    ((_, model),) = make_skeletons([("", skeleton)])
    _put_absent_parameters(model, dtype, rounded_to)
    _put_real_buffers(model, buffers)
    found = units_by_pattern(model, units) if units else find_units(model)
    opened = found if units else open_units(model, found)

    def trace(chosen: Mapping[str, nn.Module], branching: Collection[str] | None = None) -> TraceCache:
        _refuse_hooks_of_glue(model, chosen)
        cache = TraceCache(
            model,
            chosen,
            inputs,
            autocast_dtype,
            rounded_to=rounded_to,
            units_are_named=bool(units),
            branching=branching,
        )
        cache.trace_of(batch, training=True)
        _refuse_hooks_of_glue(model, cache.units)  # tracing may have divided some of those found
        return cache

    made = None
    if opened.keys() != found.keys():
        with contextlib.suppress(ModelError):  # the code of a unit that was opened cannot be captured: it runs whole
            made = trace(opened)
    made = made or trace(found)
    first = made.first_trace.trace
    if first.branches or first.branching:
        with contextlib.suppress(ModelError):  # the code of a unit with branches cannot be captured
            divided = trace(divide_into_branches(model, made.units, first.branches), {*first.branches, *first.branching})
            make_layers(divided, skeleton)
            if _can_evaluate(divided, batch) or not _can_evaluate(made, batch):
                return divided
    return made


def _can_evaluate(cache: TraceCache, batch: Mapping[str, Tensor]) -> bool:
    """Whether the model calls its units in evaluation as in training."""
    try:
        cache.trace_of(batch, training=False)
    except ModelError:
        return False
    return True


def make_layers(cache: TraceCache, skeleton: nn.Module) -> tuple[list[Layer], list[tuple[str, ...]]]:
    """(the layers of a traced model, its tied parameters). Modules are copies of the skeleton's."""
    first_trace = cache.first_trace
    shells = [_make_shell(cache, index, skeleton) for index in range(len(first_trace.layers))]
    _refuse_distant_statistics(first_trace, shells, skeleton)
    _add_unused(shells, first_trace, skeleton)
    taken: set[str] = set()
    uses: dict[int, list[str]] = {}
    layers = []
    for index, (program, shell) in enumerate(zip(first_trace.layers, shells, strict=True)):
        names: dict[str, str] = {}
        here: set[str] = set()
        for path, parameter in _in_order_of_use(program, shell):
            name, number = used_parameter(path) or (path, "")
            whole = parameter if not number else skeleton.get_parameter(name)
            later = f"{name}{LATER_USE}{program.name}" + (f"{USES}{number}" if number else "")
            names[path] = later if name in taken | here else name
            here.add(name)
            uses.setdefault(id(whole), []).append(names[path])
        names |= {path: path for path, _ in shell.named_buffers()}  # a buffer is one state, whichever layers read it
        for path, module in shell.named_modules():
            if path and any(LATER_USE in names.get(f"{path}.{key}", "") for key in module._parameters):
                names[path] = f"{path}{LATER_USE}{program.name}"
        taken |= here
        fields = () if first_trace.is_fixed(index) else cache.inputs.fields
        form = (first_trace.form_output,) if first_trace.returns_numbers and program is first_trace.layers[-1] else ()
        layers.append(
            Layer(
                program.name,
                SkeletonCopier(shell),
                inputs=(*(name for name, _ in program.reads), *fields),
                outputs=(*(name for name, _ in program.outputs), *form),
                own_names=tuple(names.items()),
            )
        )
    return layers, [tuple(names) for names in uses.values() if len(names) > 1]


def _in_order_of_use(program: LayerProgram, shell: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(path, parameter) of all parameters of a layer.

    The uses of one parameter come in such an order that adding their gradients from last to first is what autograd does.
    """
    places: dict[str, tuple[int, int]] = {}
    for index, event in enumerate(program.events):
        for number, leaf in enumerate(event.inputs):
            # Autograd adds the gradients of one operation's arguments first to last.
            places[leaf.name] = (index, -number)
    unit = next((index for index, event in enumerate(program.events) if event.is_unit), 0)
    return sorted(shell.named_parameters(), key=lambda named: places[named[0]] if used_parameter(named[0]) else (unit, 0))


def find_aliases(
    skeleton: nn.Module, layers: Collection[Layer], ties: Collection[Sequence[str]]
) -> tuple[tuple[str, str], ...]:
    """(name, qualified name) of parameters and buffers that the model's `state_dict` has under names that no layer has."""
    known = {name for layer in layers for _, name in layer.own_names or ()}
    first = {name: names[0] for names in ties for name in names}
    home: dict[int, str] = {}
    others: list[tuple[str, int]] = []
    for kind in (skeleton.named_parameters(remove_duplicate=False), skeleton.named_buffers(remove_duplicate=False)):
        for name, tensor in kind:
            if name in known:
                home.setdefault(id(tensor), first.get(name, name))
            else:
                others.append((name, id(tensor)))
    return tuple((name, home[tensor]) for name, tensor in others)


def _make_shell(cache: TraceCache, index: int, skeleton: nn.Module) -> CapturedLayer:
    """The module of a layer, made of the skeleton's own modules."""
    program = cache.first_trace.layers[index]
    shell = CapturedLayer(cache, index, () if cache.first_trace.is_fixed(index) else cache.inputs.fields)
    if program.unit is not None:
        _put(shell, program.unit, skeleton)
    for path in program.modules:
        _put(shell, path, skeleton)
    for key in program.state:
        use = used_parameter(key.name)
        if use is None:
            _put(shell, key.name, skeleton)
        else:
            whole = skeleton.get_parameter(use[0])
            own = nn.Parameter(torch.empty_like(whole), requires_grad=whole.requires_grad)
            if USES not in shell._modules:
                shell.add_module(USES, _Container())
            shell.get_submodule(USES).register_parameter(key.name.partition(".")[2], own)
    return shell


def _put(shell: nn.Module, path: str, skeleton: nn.Module) -> None:
    """Put the skeleton's module, parameter or buffer at `path` at the same path of a layer's module."""
    here, there = shell, skeleton
    *owners, last = path.split(".")
    for name in owners:
        there = there.get_submodule(name)
        child = here._modules.get(name)
        if child is there:
            here = there  # the unit itself has what is asked for
            continue
        if child is None:
            child = _Container()
            here.add_module(name, child)
        here = child
    if here is there:
        return
    if last in there._modules:
        here.add_module(last, there._modules[last])
    elif last in there._parameters:
        here.register_parameter(last, there._parameters[last])
    else:
        here.register_buffer(last, there._buffers[last], persistent=last not in non_persistent_buffer_names(there))


def _refuse_distant_statistics(first_trace: CutTrace, shells: Sequence[nn.Module], skeleton: nn.Module) -> None:
    """Raises `ModelError` for running statistics that several layers change, or that code between units reads: at a step's end
    each layer changes its own by its own calls."""
    for path, norm in norms_with_running_statistics(skeleton):
        statistics = {id(buffer) for buffer in norm._buffers.values()}
        homes = [
            program.name
            for program, shell in zip(first_trace.layers, shells, strict=True)
            if any(id(buffer) in statistics for buffer in shell.buffers())
        ]
        what = f"{path} ({type(norm).__name__}) has running statistics, and "
        for program in first_trace.layers:
            for event in program.events:
                read = [
                    key.name
                    for key in event.inputs
                    if key.kind == "buffer" and key.name in running_statistics_names(path, norm)
                ]
                if read:
                    raise ModelError(
                        f"{what}{event.label}() between units reads {read[0]} at {event.location}, where the calls of this "
                        "step have not been added yet",
                        cure="give the norm track_running_stats=False, or compute it of the values themselves",
                    )
        if len(homes) > 1:
            raise ModelError(
                f"{what}several layers call it: {', '.join(homes)}; each would add its own calls only",
                cure="make a norm for each call, which may share weight and bias; or use GroupNorm, or "
                "track_running_stats=False; or make a module around all calls, and that a unit (model.units)",
            )


def _add_unused(shells: Sequence[nn.Module], first_trace: CutTrace, skeleton: nn.Module) -> None:
    """Put what no layer uses into one: it is part of the model's state.

    It goes where what is registered before it is, unless much of the model is unused: what would give a layer more than
    `LARGE_PART` of all goes to the layer that holds least.
    """
    homes: dict[int, int] = {}
    for index, shell in enumerate(shells):
        for tensor in (*shell.parameters(), *shell.buffers()):
            homes.setdefault(id(tensor), index)
    last = 0
    sizes = [sum(p.numel() for p in shell.parameters()) for shell in shells]
    limit = LARGE_PART * sum(p.numel() for p in skeleton.parameters())
    for named in (skeleton.named_parameters(), skeleton.named_buffers()):
        for name, tensor in named:
            if id(tensor) in homes:
                last = homes[id(tensor)]
            else:
                if sizes[last] + tensor.numel() > limit:
                    last = sizes.index(min(sizes))
                sizes[last] += tensor.numel()
                homes[id(tensor)] = last
                _put(shells[last], name, skeleton)


def _put_absent_parameters(model: nn.Module, dtype: torch.dtype, rounded_to: torch.dtype | None) -> None:
    """Make every parameter of a skeleton memoryless, in place: floating point ones in `dtype`, those that are rounded in
    `rounded_to`, if that is given."""
    made: dict[int, nn.Parameter] = {}
    rounded = ids_of_rounded_parameters(model) if rounded_to is not None else frozenset[int]()
    for part in model.modules():
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                kind = rounded_to if rounded_to is not None and id(parameter) in rounded else kind
                absent = memoryless_like(torch.empty(parameter.shape, dtype=kind, device="meta"))
                made[id(parameter)] = nn.Parameter(absent, requires_grad=parameter.requires_grad)
                vars(made[id(parameter)]).update(vars(parameter))
            part._parameters[key] = made[id(parameter)]


def _put_real_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give every buffer of a skeleton its value, in place."""
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    made = {key: buffers[name].detach().clone() for key, name in names.items()}
    for part in model.modules():
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = made[id(buffer)]


def _refuse_hooks_of_glue(model: nn.Module, units: Mapping[str, nn.Module]) -> None:
    """Raises `ModelError` for backward hooks of modules that are no units: workers never call these modules."""
    for name, module in model.named_modules():
        inside = any(name == unit or name.startswith(unit + ".") for unit in units)
        if not inside and has_backward_hooks(module):
            raise ModelError(
                f"{name or 'the model'} ({type(module).__name__}) has a backward hook, and is divided into layers",
                cure="put the hook on modules that run whole, or name this one as a unit (model.units)",
            )
