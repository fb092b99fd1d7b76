"""Checks, before a run starts, that the layers of a model can run on shards: by a pass on the meta device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import raypar
from raypar.comm.transport import CommunicationLedger
from raypar.errors import CommError, ModelError, RayparError
from raypar.model.graph import Graph
from raypar.model.layer_skeletons import build_on_meta, convert_module_dtype
from raypar.model.tensor_parallel.build_shard_modules import build_shard_modules, sharded_loss
from raypar.model.tensor_parallel.parameter_misuse import ParameterMisuseDetector
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan.shard_ranges import count_indices
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.torch_compat.avoid_dynamo_import import meta_operations_without_dynamo
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text


class _Done:
    """The handle of an operation that is done at once."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        return None

    def tensor(self) -> Tensor:
        return self.tensors()[0]

    def tensors(self) -> list[Tensor]:
        return []


class NoTransport:
    """A transport without peers: collectives leave their tensors, which have no numbers anyway, as they are."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.generation, self.ledger = rank, size, 0, CommunicationLedger()

    def can_share_memory(self, rank: int) -> bool:
        return True

    def check_alive(self) -> None:
        return None

    def all_reduce(self, flat: Tensor, *, group: Sequence[int], channel: int = 0) -> _Done:
        return _Done()

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> _Done:
        return _Done()

    def all_gather(self, pieces: Sequence[Tensor], mine: Tensor, *, group: Sequence[int], channel: int = 0) -> _Done:
        return _Done()

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor], *, group: Sequence[int], channel: int = 0) -> _Done:
        return _Done()

    def __getattr__(self, name: str) -> Any:
        raise CommError(f"{name} has nobody at its other end", cure="report this: a layer may use collectives only")


def check_shards_on_meta(
    graph: Graph,
    layout: TensorParallelLayout,
    loss: Callable[..., Tensor | tuple[Tensor, Tensor | float]],
    batch: Mapping[str, Tensor],
    target: str,
    *,
    weights: Sequence[str] = (),
    sequence: bool = False,
    dtype: torch.dtype = torch.float32,
    training: bool = True,
) -> bool:
    """Send a microbatch through the layers and the loss on the meta device, once for every size of shard.

    Raises the `ModelError` of what cannot be computed on a part, or would be wrong (`ParameterMisuseDetector`). Code that reads
    numbers cannot run this way: then False is returned, and what is wrong shows in the first step. `training`: else as in a
    validation.
    """
    kinds = {
        tuple((len(cut.indices_by_shard[t]), count_indices(cut.indices_by_shard[t])) for cut in layout.cuts.values()): t
        for t in range(layout.shards)
    }
    for shard in sorted({0, layout.shards - 1, *kinds.values()}):
        group = ShardGroup(NoTransport(shard, layout.shards), range(layout.shards), sequence_parallel=sequence)
        values = {name: tensor.to("meta") for name, tensor in batch.items()}
        with torch.set_grad_enabled(training), meta_operations_without_dynamo(), torch.device("meta"):
            modules = build_shard_modules(
                graph,
                0,
                len(graph.layers),
                lambda i: convert_module_dtype(build_on_meta(graph.layers[i]), dtype),
                layout=layout,
                group=group,
                whole=True,
            )
            _set_modes(modules, training)
            place = "the model"
            try:
                with ParameterMisuseDetector(graph, modules, layout, group) as access:
                    for layer in graph.layers:
                        access.layer, place = layer.name, f"layer {layer.name!r}"
                        made = modules[layer.name](*(values[name] for name in layer.inputs))
                        values.update(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
                    access.refuse_mixed_use()
                    place = "the loss"
                read = [values[name] for name in graph.loss_inputs]
                sharded_loss(graph.loss_of_values(loss), group, graph.loss_inputs)(
                    *read, *(values[name] for name in (target, *weights))
                )
            except RayparError as error:
                raise placed_error(error, place) from error
            except USER_CODE_ERRORS as error:
                reraise_ctrl_c(error)
                if layout.divides_samples and _whole_layers_run(graph, batch, dtype, training):
                    raise placed_error(_error_on_samples(error, layout.shards), place) from error
                return False
    return True


def _set_modes(modules: Mapping[str, nn.Module], training: bool) -> None:
    for module in modules.values() if not training else ():
        module.eval()


def _whole_layers_run(graph: Graph, batch: Mapping[str, Tensor], dtype: torch.dtype, training: bool) -> bool:
    """Whether the layers run on the meta device, each with all samples: what failed, then, failed for having some of them."""
    values = {name: tensor.to("meta") for name, tensor in batch.items()}
    modules = {layer.name: convert_module_dtype(build_on_meta(layer), dtype) for layer in graph.layers}
    _set_modes(modules, training)
    try:
        for layer in graph.layers:
            made = modules[layer.name](*(values[name] for name in layer.inputs))
            values.update(zip(layer.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        return False
    return True


def _error_on_samples(error: BaseException, shards: int) -> ModelError:
    """The error of code that does not run where each shard has some of the samples."""
    return ModelError(
        f"on {shards} shards, of which each has some of the samples (plan.layout), {error_text(error)}",
        cure="make what meets samples for all of them (x.shape[0]), and give torch functions their first argument without its "
        "name; or take samples out of plan.layout",
    ).with_traceback(error.__traceback__)


def placed_error(error: RayparError, place: str) -> RayparError:
    """The error with the layer, and the line of the user's code, in which it was raised."""
    ours = tuple(str(Path(package.__file__ or "").parent) for package in (raypar, torch))
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(ours)]
    lines = [f" ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})" for frame in theirs[-1:]]
    if not lines and place in error.what:
        return error
    return type(error)(f"{place}{''.join(lines)}: {error.what}", error.cure)
