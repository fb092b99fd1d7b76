"""What a rank keeps of parameters: these whole, or the runs of their elements that it owns, which its optimizers train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

from raypar.plan.ownership import OwnedRun
from raypar.plan.shard_ranges import IndexRanges
from raypar.worker.stage.layer_tensors import StageTensors
from raypar.worker.stage.tensors_without_memory import has_memory


@dataclass(frozen=True, slots=True)
class OwnedParameter:
    """What a rank keeps of one parameter of a stage: what its optimizer trains, unless the parameter is frozen."""

    name: str
    """The parameter's canonical name."""
    parameter: nn.Parameter
    """The stage's own parameter, or a run of its elements [n]: a view of it, unless the whole one has no memory
    (`GatheredMemory`). Where layers compute with a copy in a lower precision a run is all that there is of the master."""
    run: tuple[int, int] | None = None
    """The elements [start, stop) of the parameter as it lies here, flattened; None: all, in its own shape."""

    @property
    def key(self) -> str:
        """The name under which the optimizer's state goes: the parameter's, or that of a run."""
        return self.name if self.run is None else run_key(self.name, *self.run)

    def of(self, tensor: Tensor) -> Tensor:
        """The same elements of a contiguous tensor that has the parameter's shape."""
        return tensor if self.run is None else tensor.view(-1)[slice(*self.run)]

    def parts(self, held: IndexRanges) -> Iterator[tuple[tuple[int, int], slice]]:
        """(elements as `Piece` numbers them, their places in the run) for each stretch of consecutive ones. `held`: those of
        the parameter's slice here."""
        assert self.run is not None
        before, (first, last) = 0, self.run
        for start, stop in held:
            a, b = max(first, before), min(last, before + stop - start)
            if a < b:
                yield (start + a - before, start + b - before), slice(a - first, b - first)
            before += stop - start


def run_key(name: str, start: int, stop: int) -> str:
    """The name of a run of a parameter's elements."""
    return f"{name}[{start}:{stop}]"


def own_parameters(
    tensors: StageTensors,
    runs: Iterable[OwnedRun] | None,
    frozen: Iterable[OwnedRun] | None = None,
    values: Mapping[OwnedRun, Tensor] = MappingProxyType({}),
) -> list[OwnedParameter]:
    """What a rank trains of a stage, in layer order: its `runs`, and empty parameters; all if no replicas divide it (None).
    `frozen`: its runs of frozen parameters, which are then kept beside; None: all replicas have these. `values`: the
    elements of runs of parameters that have no memory; the others are in their parameters.

    Of a parameter that layers use as a copy in a lower precision, and of which the rank owns a part, that part is all that is
    left: the other elements of the master are freed.
    """
    kept = {name: parameter for name, parameter in tensors.parameters.items() if parameter.requires_grad or frozen is not None}
    if runs is None:
        return [OwnedParameter(name, parameter) for name, parameter in kept.items()]
    of_name: dict[str, list[tuple[int, int]]] = {}
    for name, start, stop in (*runs, *(frozen or ())):
        of_name.setdefault(name, []).append((start, stop))
    found = []
    for name, parameter in kept.items():
        size, own = parameter.numel(), of_name.get(name, [])
        if not size or own == [(0, size)]:
            found.append(OwnedParameter(name, parameter))
            continue
        flat, is_master = parameter.detach().view(-1), name in tensors.rounded
        for start, stop in own:
            value = values.get(OwnedRun(name, start, stop))
            if value is not None and (is_master or not has_memory(flat)):
                part = value
            else:
                part = flat[start:stop].clone() if is_master else flat[start:stop]
            if value is not None and part is not value:
                part.copy_(value)
            run = nn.Parameter(part, requires_grad=parameter.requires_grad)
            vars(run).update({key: value for key, value in vars(parameter).items() if key not in vars(run)})
            found.append(OwnedParameter(name, run, (start, stop)))
        if is_master:
            tensors.free_master(name)
    return found


def named_parameters(owned: Iterable[OwnedParameter]) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """(key -> what an optimizer gets, key -> canonical name of the parameter)."""
    trained = [each for each in owned if each.parameter.requires_grad]
    return {each.key: each.parameter for each in trained}, {each.key: each.name for each in trained}


def rounded_runs(owned: Sequence[OwnedParameter], tensors: StageTensors) -> tuple[list[Tensor], list[Tensor]]:
    """(parts of the copies that layers compute with, the runs of masters of which they are copies)."""
    masters = [each for each in owned if each.name in tensors.freed_masters]
    return [each.of(tensors.computed_with(each.name)) for each in masters], [each.parameter.detach() for each in masters]
