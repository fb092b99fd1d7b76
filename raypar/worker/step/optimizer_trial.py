"""Tries a job's optimizer on small tensors before a run: what it keeps, and which parameters and elements depend on others.

Its parameters have the job's names, groups and numbers of dims. It observes how the optimizer behaves, and reads no code.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.errors import CheckpointError, ConfigError, RayparError, UserCodeError
from raypar.model.random_state import RandomState, preserve_random_state
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.user_code_errors import USER_CODE_ERRORS, error_text, reraise_ctrl_c
from raypar.worker.job_spec import OptimizerSpec
from raypar.worker.process.gpu_setup import make_seeder
from raypar.worker.step.make_optimizers_by_name import build_optimizer, optimizer_group_of, set_learning_rate
from raypar.worker.step.optimizer_state import (
    OptimizerState,
    fingerprint,
    names_with_patterns,
    read_optimizer_state,
    write_optimizer_state,
)

SAVED_AFTER, STEPS = 6, 12
"""Steps of a trial, and after how many of them the state is saved and given to a new optimizer."""
LARGEST_DIM, LARGEST_FIRST_DIM, SMALL_DIM = 64, 256, 6
"""Largest dims: of the largest parameter of each group and number of dims; of its first dim; of one more such parameter."""
SMALL_FROM, SMALL_GRADIENT = 9, 1e-3
"""From which step of a trial on gradients are small, as late in a training and behind clipping, and by which factor."""
ELEMENTS = 8192
"""About the most elements of a parameter: enough for 8-bit optimizers, which keep smaller ones than 4,096 in 32 bits."""


class OptimizerKind(Enum):
    """What a step of one element depends on."""

    ELEMENTWISE = "takes each element by itself"
    PER_PARAMETER = "takes each parameter by itself"
    COUPLED = "couples parameters"


@dataclass(frozen=True)
class OptimizerTrial:
    """What was found out about a job's optimizer."""

    label: str
    """The optimizer's name, in messages."""
    kind: OptimizerKind
    """What a step of one element depends on."""
    shared: tuple[str, ...] = ()
    """State that parameters share, in words: `'k' of the group '*'`."""
    difference: str = ""
    """Of an optimizer that couples parameters: what was measured."""
    draws: bool = False
    """Whether a step draws random numbers."""

    @property
    def most_stages(self) -> int | None:
        """How many stages a plan may have; None: any number."""
        return 1 if self.kind is OptimizerKind.COUPLED else None

    def check_plan(self, plan: ParallelPlan) -> None:
        """Raises `ConfigError` for a plan in which the optimizer would train otherwise than in one process."""
        if self.kind is OptimizerKind.COUPLED and len(plan.stages) > 1:
            draws = ": its step draws random numbers, one after the other for all parameters of a stage" if self.draws else ""
            raise ConfigError(
                f"{self.label} trains parameters together otherwise than apart{draws}, and the plan has {len(plan.stages)} "
                f"stages, each with an optimizer of its own parameters; in a trial of {STEPS} steps {self.difference}",
                cure="set plan.stages: 1 (plan.replicas may be any number), or use an optimizer that takes each parameter by "
                "itself (SGD, Adam, AdamW, ...)",
            )
        if self.kind is not OptimizerKind.ELEMENTWISE and any(stage.shards > 1 for stage in plan.stages):
            raise ConfigError(
                f"{self.label} trains half of a parameter otherwise than that half of the whole one, and shards "
                "have slices of parameters",
                cure="use an optimizer that takes each element by itself (SGD, Adam, AdamW, ...), or set plan.shards: 1",
            )


def try_optimizer(
    spec: OptimizerSpec, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32
) -> OptimizerTrial:
    """Try an optimizer on parameters like those of `shapes` (trained ones, by qualified name).

    Raises `ConfigError` for what makes no optimizer, and for state that cannot be kept: saved and moved to other workers;
    `UserCodeError` for what a step raises.
    """
    with preserve_random_state():
        small = _small_shapes(spec, shapes)
        real = {name: tuple(shapes[name]) for name in small}
        if small != real:
            with contextlib.suppress(UserCodeError):  # perhaps it expects the model's sizes
                return _try(spec, small, dtype)
        return _try(spec, real, dtype)


def _try(spec: OptimizerSpec, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> OptimizerTrial:
    values, gradients = _values_and_gradients(shapes, dtype)
    whole = _Trainee(spec, values)
    whole.watches_draws = True
    whole.run(gradients[:SAVED_AFTER])
    state = whole.state()
    names = names_with_patterns(whole.optimizer)
    resumed = _Trainee(spec, whole.values(), OptimizerState.of_parameters(state.by_parameter(names), names))
    before = {place: fingerprint(value) for place, value in _tensors(state)}
    aliases = _aliases(whole, state)
    whole.run(gradients[SAVED_AFTER:], SAVED_AFTER)
    after = {place: fingerprint(value) for place, value in _tensors(whole.state())}
    for one, other in aliases:
        if before[one] != after.get(one) or (other in before and before[other] != after.get(other)):
            raise ConfigError(
                f"{spec.optimizer.label} keeps one tensor under two names: {one} and {other}; saved and loaded they "
                "would be two",
                cure="let the optimizer keep a clone",
            )
    resumed.run(gradients[SAVED_AFTER:], SAVED_AFTER)
    if (difference := _difference(whole, resumed, "undisturbed", "saved and loaded")) is not None:
        raise ConfigError(
            f"{spec.optimizer.label} goes on otherwise once its state was saved and loaded: {difference} in a trial of {STEPS} "
            f"steps, saved after {SAVED_AFTER}. It keeps something that is neither in optimizer.state[p], nor a number or "
            "tensor in param_groups or an attribute",
            cure="let the optimizer keep all of its state there, or use another one",
        )
    difference = _coupling(spec, values, gradients, whole)
    kind = OptimizerKind.COUPLED
    if difference is None:
        kind = OptimizerKind.ELEMENTWISE if _is_elementwise(spec) else OptimizerKind.PER_PARAMETER
    shared = [f"{key!r} of the group {pattern!r}" for pattern, entries in state.groups.items() for key in entries]
    shared += [f"the attribute {name!r}" for name in state.attributes]
    return OptimizerTrial(spec.optimizer.label, kind, tuple(shared), difference or "", whole.draws)


# -- what is tried -----------------------------------------------------------------------------------------------------------


def _small_shapes(spec: OptimizerSpec, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Some parameters of each group and number of dims, with smaller dims, in layer order: the largest, one of the same shape
    (an optimizer may step those together), and one of another.
    """
    alike: dict[tuple[int, int], list[str]] = {}
    for name, shape in shapes.items():
        if 0 not in shape:
            alike.setdefault((optimizer_group_of(spec, name), len(shape)), []).append(name)
    found: dict[str, tuple[int, ...]] = {}
    for names in alike.values():
        largest = max(names, key=lambda name: math.prod(shapes[name]))
        found[largest] = _smaller(shapes[largest])
        alike_shapes = [name for name in names if name != largest and tuple(shapes[name]) == tuple(shapes[largest])]
        found |= dict.fromkeys(alike_shapes[:1], found[largest])
        for name in [name for name in names if name not in found][:1]:
            found[name] = tuple(min(size, SMALL_DIM) for size in shapes[name])
    return {name: found[name] for name in shapes if name in found}


def _smaller(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with smaller dims, of about `ELEMENTS` elements if it has as many."""
    if not shape:
        return ()
    most = LARGEST_DIM if len(shape) < 3 else 8
    others = [min(size, most) for size in shape[1:]]
    return min(shape[0], LARGEST_FIRST_DIM, max(most, ELEMENTS // math.prod(others))), *others


Gradients = Sequence[Mapping[str, Tensor | None]]
"""By step: parameter -> its gradient."""


def _values_and_gradients(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[dict[str, Tensor | None]]]:
    """Initial values, and gradients that mostly point in one direction, as those of training do."""
    dice = torch.Generator().manual_seed(0)
    values = {name: torch.randn(*shape, generator=dice, dtype=dtype) for name, shape in shapes.items()}
    ways = {name: torch.randn(*shape, generator=dice, dtype=dtype) for name, shape in shapes.items()}
    gradients: list[dict[str, Tensor | None]] = [
        {
            name: (way + 0.3 * torch.randn(way.shape, generator=dice, dtype=dtype))
            * (SMALL_GRADIENT if step >= SMALL_FROM else 1.0)
            for name, way in ways.items()
        }
        for step in range(STEPS)
    ]
    return values, gradients


class _Trainee:
    """Parameters with an optimizer that is stepped as workers do it."""

    seed = staticmethod(make_seeder(CPU))

    def __init__(self, spec: OptimizerSpec, values: Mapping[str, Tensor], state: OptimizerState | None = None) -> None:
        self.label, self.watches_draws = spec.optimizer.label, False
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        self.optimizer = build_optimizer(spec, self.parameters)
        self.draws = False
        if state is not None:
            write_optimizer_state(self.optimizer, state)

    def run(self, gradients: Gradients, first: int = 0) -> None:
        """Make a step with each of the gradients, which are those of the steps from `first` on."""
        for number, of_step in enumerate(gradients, first):
            for name, parameter in self.parameters.items():
                gradient = of_step[name]
                parameter.grad = None if gradient is None else gradient.clone()
            self.seed(seed_of(0, "optimizer", number))
            before = RandomState.now() if self.watches_draws else None
            set_learning_rate(self.optimizer, min(1.0, (number + 1) / SAVED_AFTER))  # as in a warmup
            try:
                self.optimizer.step()
            except RayparError:
                raise
            except USER_CODE_ERRORS as error:
                reraise_ctrl_c(error)
                raise UserCodeError(
                    f"the step of optimizer {self.label}, tried on small parameters, raised {error_text(error)}\n"
                    f"{traceback.format_exc()}",
                    cure="the last lines of the traceback are where your code, or what it called, raised",
                ) from error
            self.draws |= before is not None and before.is_changed()

    def state(self) -> OptimizerState:
        """The optimizer's state. Raises `ConfigError` for what cannot be kept."""
        try:
            return read_optimizer_state(self.optimizer)
        except CheckpointError as error:
            raise ConfigError(f"{self.label}: {error.what}", cure=error.cure) from error

    def values(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}


def _tensors(state: OptimizerState) -> Iterator[tuple[str, Tensor]]:
    """(description, tensor) of all tensors in an optimizer's state."""
    for name, entries in state.parameters.items():
        yield from ((f"{key!r} of {name}", value) for key, value in entries.items() if isinstance(value, Tensor))
    for pattern, entries in state.groups.items():
        yield from ((f"{key!r} of the group {pattern!r}", v) for key, v in entries.items() if isinstance(v, Tensor))
    yield from ((f"the attribute {key!r}", value) for key, value in state.attributes.items() if isinstance(value, Tensor))


def _aliases(trainee: _Trainee, state: OptimizerState) -> list[tuple[str, str]]:
    """Pairs of tensors that share memory: one of the optimizer's, with another one or a parameter or its gradient."""
    own = list(_tensors(state))
    others = [(f"the parameter {name}", p.detach()) for name, p in trainee.parameters.items()]
    others += [(f"the gradient of {name}", p.grad) for name, p in trainee.parameters.items() if p.grad is not None]
    pairs = [*itertools.combinations(own, 2), *itertools.product(own, others)]
    return [(one, other) for (one, a), (other, b) in pairs if _overlap(a, b)]


def _overlap(a: Tensor, b: Tensor) -> bool:
    def span(x: Tensor) -> tuple[int, int]:
        last = sum((size - 1) * abs(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()

    return bool(a.numel() and b.numel()) and span(a)[0] < span(b)[1] and span(b)[0] < span(a)[1]


# -- comparisons -------------------------------------------------------------------------------------------------------------


def _difference(whole: _Trainee, part: _Trainee, of_whole: str, of_part: str) -> str | None:
    """What differs between two trainees, in words: state that parameters share, and weights; None if nothing does."""
    texts = []
    there, here = whole.state(), part.state()
    unequal = [name for name in part.parameters if not _equal(whole.parameters[name], part.parameters[name])]
    if unequal:
        most = max(float((whole.values()[n] - part.values()[n]).abs().max()) for n in unequal)
        texts.append(f"the weights of {unequal[0]} differ by {most:.2g} between {of_whole} and {of_part}")
    scopes = [(f"of the group {p!r}", there.groups.get(p, {}), here.groups[p]) for p in here.groups]
    for what, one, other in (*scopes, ("of the optimizer", there.attributes, here.attributes)):
        texts += [
            f"{key!r} {what} is {_shown(one.get(key))} {of_whole} and {_shown(other.get(key))} {of_part}"
            for key in sorted({*one, *other})
            if fingerprint(one.get(key)) != fingerprint(other.get(key))
        ]
    for name, entries in here.parameters.items() if not texts else ():
        for key, value in entries.items():
            if fingerprint(there.parameters[name].get(key)) != fingerprint(value):
                texts.append(f"{key!r} of {name} differs between {of_whole} and {of_part}")
    return "; ".join(texts[:2]) or None


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _coupling(spec: OptimizerSpec, values: Mapping[str, Tensor], gradients: Gradients, whole: _Trainee) -> str | None:
    """What differs between parameters that are trained together and apart, in words; None if nothing does.

    Also where the last one has no gradient in some steps, as in a stage that a step does not use.
    """
    if len(values) < 2:
        return None
    names = list(values)
    parts = [*([name] for name in names), names[::2], names[1::2]]
    last = names[-1]
    absent = [{**of, last: None} if number in (1, 2, 7) else of for number, of in enumerate(gradients)]

    def compared(whole: _Trainee, gradients: Gradients, parts: Sequence[Sequence[str]], when: str) -> str | None:
        for part in parts:
            alone = _Trainee(spec, {name: values[name] for name in part})
            alone.run(gradients)
            which = part[0] if len(part) == 1 else f"{len(part)} of them"
            found = _difference(whole, alone, f"with all {len(names)} parameters", f"with {which} alone")
            if found is not None:
                return found + when
        return None

    found = compared(whole, gradients, parts, "")
    if found is None:
        try:
            other = _Trainee(spec, values)
            other.run(absent)
            found = compared(other, absent, [[last], names[:-1]], f" ({last} having no gradient in some steps)")
        except UserCodeError:
            return None  # it takes no parameter without a gradient: a run in which there is one says so
    return found


def _is_elementwise(spec: OptimizerSpec) -> bool:
    """Whether the optimizer takes each element by itself, as slices of parameters need: with the options of every group.

    Vectors and matrices are trained beside their halves, some steps long because some optimizers begin with plain ones; a large
    matrix too, because optimizers that factor or quantise their state leave small parameters alone (as Adafactors with
    `min_dim_size_to_factor`).
    """
    try:
        return all(
            _halves_train_as_the_whole(OptimizerSpec(spec.optimizer, (("weight", overrides),)), shape)
            for shape in ((24,), (4, 6), (256, 256))
            for overrides in ({}, *(given for _, given in spec.groups))
        )
    except (UserCodeError, ConfigError):
        return False  # it does not take such a parameter


def _halves_train_as_the_whole(spec: OptimizerSpec, shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(1 + SAVED_AFTER))

    def trained(*place: slice) -> Tensor:
        trainee = _Trainee(spec, {"weight": start[place]})
        trainee.run([{"weight": gradient[place]} for gradient in gradients])
        return trainee.parameters["weight"].detach()

    whole = trained()
    halves = [(slice(None),) * dim + (slice(0, size // 2),) for dim, size in enumerate(shape)]
    return all(torch.allclose(trained(*place), whole[place], rtol=1e-9, atol=1e-9) for place in halves)
