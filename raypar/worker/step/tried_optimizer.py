"""Some small parameters with a job's optimizer, stepped as workers do it, for trials before a run (`optimizer_trial.py`)."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.errors import CheckpointError, ConfigError, RayparError, UserCodeError
from raypar.model.python_state import read_content
from raypar.model.random_state import RandomState
from raypar.plan.seeds import seed_of
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text, reraise_ctrl_c
from raypar.worker.job_spec import OptimizerSpec
from raypar.worker.process.gpu_setup import make_seeder
from raypar.worker.stage.buffer_updates import same_bits
from raypar.worker.step.make_optimizers_by_name import build_optimizer, set_learning_rate
from raypar.worker.step.optimizer_state import (
    OptimizerState,
    Value,
    names_with_patterns,
    read_optimizer_state,
    write_optimizer_state,
)

WARMUP, DECAY = 6, 200
"""Steps in which the learning rate rises, and after which it has fallen to its smallest."""
SMALL_FROM, SMALL_GRADIENT = 9, 1e-3
"""From which step of a trial on gradients are small, as late in a training and behind clipping, and by which factor."""

Gradients = Sequence[Mapping[str, Tensor | None]]
"""By step: parameter -> its gradient."""


def values_and_gradients(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, steps: int
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Initial values, and gradients that mostly point in one direction, as those of training do."""
    dice = torch.Generator().manual_seed(0)
    values = {name: torch.randn(*shape, generator=dice, dtype=dtype) for name, shape in shapes.items()}
    sizes = torch.tensor([SMALL_GRADIENT if step >= SMALL_FROM else 1.0 for step in range(steps)], dtype=dtype)
    by_name = {}
    for name, shape in shapes.items():
        way, noise = (torch.randn(*first, *shape, generator=dice, dtype=dtype) for first in ((), (steps,)))
        by_name[name] = ((way + 0.3 * noise) * sizes.view(-1, *[1] * len(shape))).unbind()
    return values, [{name: of[step] for name, of in by_name.items()} for step in range(steps)]


def _rise_and_fall(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP) * max(0.02, 1 - step / DECAY)


class TriedOptimizer:
    """Parameters with an optimizer that is stepped as workers do it."""

    seed = staticmethod(make_seeder(CPU))

    def __init__(self, spec: OptimizerSpec, values: Mapping[str, Tensor]) -> None:
        self.spec, self.label = spec, spec.optimizer.label
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        self.optimizer = build_optimizer(spec, self.parameters)
        self.steps = 0
        """Number of steps done; also those of a former optimizer whose state this one was given."""
        self.watches_draws, self.draws = False, False
        """Whether it is looked at whether a step draws random numbers, and whether one did."""

    def saved_and_loaded(self) -> TriedOptimizer:
        """A new optimizer with the same parameters, which is given this one's state, as a worker that joins."""
        names = names_with_patterns(self.optimizer)
        state = OptimizerState.of_parameters(self.state().by_parameter(names), names)
        made = TriedOptimizer(self.spec, self.values())
        write_optimizer_state(made.optimizer, state)
        made.steps = self.steps
        return made

    def run(self, gradients: Gradients, lr_factor: Callable[[int], float] = _rise_and_fall) -> None:
        """Make a step with each of the gradients. Raises `UserCodeError` for what one raises."""
        for of_step in gradients:
            for name, parameter in self.parameters.items():
                gradient = of_step[name]
                parameter.grad = None if gradient is None else gradient.clone()
            self.seed(seed_of(0, "optimizer", self.steps))
            before = RandomState.now() if self.watches_draws else None
            set_learning_rate(self.optimizer, lr_factor(self.steps))
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
            self.steps += 1
            self.draws |= before is not None and before.is_changed()

    def fast_forward(self, steps: int) -> None:
        """Add `steps` to every number in the state that counts the steps done, as if so many more had been done."""

        def later(value: Value) -> Value:
            if isinstance(value, bool) or value is None or (isinstance(value, Tensor) and value.numel() != 1):
                return value
            return value + steps if abs(float(value) - self.steps) <= 1 else value

        state = self.state()
        write_optimizer_state(
            self.optimizer,
            replace(
                state,
                parameters={name: {k: later(v) for k, v in of.items()} for name, of in state.parameters.items() if of},
                groups={pattern: {k: later(v) for k, v in of.items()} for pattern, of in state.groups.items()},
                attributes={name: later(value) for name, value in state.attributes.items()},
            ),
        )
        self.steps += steps

    def state(self) -> OptimizerState:
        """The optimizer's state. Raises `ConfigError` for what cannot be kept."""
        try:
            return read_optimizer_state(self.optimizer)
        except CheckpointError as error:
            more = f" after {self.steps} steps" if self.steps > WARMUP else ""
            raise ConfigError(f"{self.label}{more}: {error.what}", cure=error.cure) from error

    def check_code(self, changed: Sequence[str]) -> None:
        """Raises `ConfigError` if steps have changed something that the optimizer's code keeps outside of it (`changed`)."""
        if changed:
            raise ConfigError(
                f"{self.label} keeps something in {changed[0]}, which its steps change: it would be neither saved nor moved to "
                "another worker",
                cure=_CURE_OF_STATE,
            )

    def check_resumed(self, resumed: TriedOptimizer, saved_after: int) -> None:
        """Raises `ConfigError` if one that was saved and loaded has gone on otherwise than this one."""
        if (difference := describe_difference(self, resumed, "undisturbed", "saved and loaded")) is not None:
            raise ConfigError(
                f"{self.label} goes on otherwise once its state was saved and loaded, after {saved_after} steps: {difference}. "
                "It keeps something that is neither in optimizer.state[p], nor a number or tensor in param_groups or an "
                "attribute",
                cure=_CURE_OF_STATE,
            )

    def values(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}


_CURE_OF_STATE = (
    "let the optimizer keep all of its state as numbers and tensors: in optimizer.state[p], in param_groups or in attributes; "
    "or use another one"
)


def describe_coupling(whole: TriedOptimizer, part: TriedOptimizer) -> str | None:
    """What differs between parameters that were trained with all others (`whole`) and without, in words; or None."""
    several = list(part.parameters)
    which = several[0] if len(several) == 1 else f"{len(several)} of them"
    return describe_difference(whole, part, f"with all {len(whole.parameters)} parameters", f"with {which} alone")


def describe_difference(whole: TriedOptimizer, part: TriedOptimizer, of_whole: str, of_part: str) -> str | None:
    """What differs between two optimizers after the same steps, in words: weights, and state that parameters share; or None.

    `part`: has some of the parameters of `whole`. `of_whole`, `of_part`: what they are, in words.
    """
    texts = []
    there, here = whole.state(), part.state()
    unequal = [name for name in part.parameters if not _same(whole.parameters[name], part.parameters[name])]
    if unequal:
        most = max(float((whole.values()[n] - part.values()[n]).abs().max()) for n in unequal)
        texts.append(f"the weights of {unequal[0]} differ by {most:.2g} between {of_whole} and {of_part}")
    scopes = [(f"of the group {p!r}", there.groups.get(p, {}), here.groups[p]) for p in here.groups]
    for what, one, other in (*scopes, ("of the optimizer", there.attributes, here.attributes)):
        texts += [
            f"{key!r} {what} is {_shown(one.get(key))} {of_whole} and {_shown(other.get(key))} {of_part}"
            for key in sorted({*one, *other})
            if not _same(one.get(key), other.get(key))
        ]
    for name, entries in here.parameters.items() if not texts else ():
        for key, value in entries.items():
            if not _same(there.parameters[name].get(key), value):
                texts.append(f"{key!r} of {name} differs between {of_whole} and {of_part}")
    return f"in a trial of {part.steps:,} steps {'; '.join(texts[:2])}" if texts else None


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _same(a: object, b: object) -> bool:
    """Whether two tensors of one dtype have equal numbers, NaN too, or two other values are the same."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(read_content(a) == read_content(b))
    return a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
