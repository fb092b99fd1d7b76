"""A job's optimizer on small parameters, stepped as workers step it, for trials before a run (`optimizer_trial.py`)."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.errors import CheckpointError, ConfigError, RayparError, UserCodeError
from raypar.job import SingleOptimizerConfig
from raypar.model.python_state import comparable_content, is_same_content
from raypar.model.random_state import RandomState
from raypar.plan.seeds import seed_of
from raypar.plan.wording import after_steps, count_noun
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text
from raypar.worker.process.seed_generators import make_seeder
from raypar.worker.stage.buffer_updates import same_bits
from raypar.worker.step.optimizer_and_parameter_groups import build_optimizer, set_learning_rate
from raypar.worker.step.optimizer_state import (
    OptimizerState,
    Value,
    names_with_patterns,
    read_optimizer_state,
    write_optimizer_state,
)

WARMUP, DECAY = 6, 200
"""Steps over which the learning rate rises; and over which it then falls, to 2 % at least."""
SMALL_FROM, SMALL_GRADIENT = 9, 1e-3
"""The step of a trial from which gradients are smaller, as they are late in training or after clipping; and by what factor."""

Gradients = Sequence[Mapping[str, Tensor | None]]
"""For each step: parameter's name -> its gradient, in the parameter's shape; None if it has none."""


def values_and_gradients(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, steps: int
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """(initial values, gradients of each step) for parameters of these shapes. Gradients mostly point in one direction."""
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    sizes = torch.tensor([SMALL_GRADIENT if step >= SMALL_FROM else 1.0 for step in range(steps)], dtype=dtype)
    by_name = {}
    for name, shape in shapes.items():
        direction, noise = (torch.randn((*first, *shape), generator=generator, dtype=dtype) for first in ((), (steps,)))
        by_name[name] = ((direction + 0.3 * noise) * sizes.view(-1, *[1] * len(shape))).unbind()
    return values, [{name: of[step] for name, of in by_name.items()} for step in range(steps)]


def _warmup_and_decay(step: int) -> float:
    """The factor of the learning rate in step `step`, from 0: linear warmup, then linear decay to 2 %."""
    return min(1.0, (step + 1) / WARMUP) * max(0.02, 1 - step / DECAY)


class TriedOptimizer:
    """Small parameters with a job's optimizer, which is stepped as workers step it."""

    seed = staticmethod(make_seeder(CPU))

    def __init__(self, spec: SingleOptimizerConfig, values: Mapping[str, Tensor]) -> None:
        self.spec, self.label = spec, spec.label
        self.parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        self.optimizer = build_optimizer(spec, self.parameters)
        self.steps = 0
        """Number of steps done, with those of the optimizer whose state was loaded into this one, and those set forward."""
        self.set_forward = 0
        """By how many steps the counters were set forward."""
        self.detects_draws, self.draws = False, False
        """Whether steps are checked for drawing random numbers, and whether one drew any."""

    def saved_and_loaded(self) -> TriedOptimizer:
        """A new optimizer with copies of the parameters and this one's state, as a worker that joins makes it."""
        names = names_with_patterns(self.optimizer)
        state = OptimizerState.of_parameters(self.state().by_parameter(names), names)
        made = TriedOptimizer(self.spec, self.values())
        write_optimizer_state(made.optimizer, state)
        made.steps, made.set_forward = self.steps, self.set_forward
        return made

    def run(self, gradients: Gradients, lr_factor: Callable[[int], float] = _warmup_and_decay) -> None:
        """Make one step for each entry of `gradients`. `lr_factor`: number of steps done -> factor of the learning rate.

        Raises `UserCodeError` if a step raises.
        """
        for of_step in gradients:
            for name, parameter in self.parameters.items():
                gradient = of_step[name]
                parameter.grad = None if gradient is None else gradient.clone()
            self.seed(seed_of(0, "optimizer", self.steps))
            before = RandomState.now() if self.detects_draws else None
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
        """Add `steps` to every step counter in the state: numbers that equal the number of steps done, give or take one."""

        def advanced(value: Value) -> Value:
            if isinstance(value, bool) or value is None or (isinstance(value, Tensor) and value.numel() != 1):
                return value
            return value + steps if abs(float(value) - self.steps) <= 1 else value

        state = self.state()
        write_optimizer_state(
            self.optimizer,
            replace(
                state,
                parameters={name: {k: advanced(v) for k, v in of.items()} for name, of in state.parameters.items() if of},
                groups={pattern: {k: advanced(v) for k, v in of.items()} for pattern, of in state.groups.items()},
                attributes={p: {k: advanced(v) for k, v in of.items()} for p, of in state.attributes.items()},
            ),
        )
        self.steps += steps
        self.set_forward += steps

    @property
    def steps_in_words(self) -> str:
        """The steps that were made: `12 steps`, `106 steps (counters set forward to 9,009,003)`."""
        forward = f" (counters set forward to {self.steps:,})" if self.set_forward else ""
        return f"{count_noun(self.steps - self.set_forward, 'step')}{forward}"

    def state(self) -> OptimizerState:
        """The optimizer's state. Raises `ConfigError` for state that cannot be kept."""
        try:
            return read_optimizer_state(self.optimizer)
        except CheckpointError as error:
            more = f" after {self.steps_in_words}" if self.steps > WARMUP else ""
            raise ConfigError(f"{self.label}{more}: {error.what}", cure=error.cure) from error

    def check_code(self, changed: Sequence[str]) -> None:
        """Raises `ConfigError` if steps have changed what the optimizer's code keeps outside of the optimizer (`changed`)."""
        if changed:
            raise ConfigError(
                f"{self.label} keeps state in {changed[0]}, which its steps change: it would be neither saved nor moved to "
                "another worker",
                cure=_CURE_OF_STATE,
            )

    def check_resumed(self, resumed: TriedOptimizer, saved_after: int) -> None:
        """Raises `ConfigError` if `resumed`, which was saved and loaded, has not trained as this one did."""
        if (difference := describe_difference(self, resumed, "undisturbed", "saved and loaded")) is not None:
            raise ConfigError(
                f"{self.label} trains differently once its state was saved and loaded ({after_steps(saved_after)}): "
                f"{difference}. It keeps state that is neither in optimizer.state[p], nor a number or tensor in param_groups "
                "or an attribute",
                cure=_CURE_OF_STATE,
            )

    def values(self) -> dict[str, Tensor]:
        """The parameters' values, detached, by name."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}


_CURE_OF_STATE = (
    "let the optimizer keep all of its state as numbers and tensors: in optimizer.state[p], in param_groups or in its "
    "attributes; or use another optimizer"
)


def describe_coupling(whole: TriedOptimizer, part: TriedOptimizer) -> str | None:
    """What differs between parameters trained with all others (`whole`) and without them (`part`), in words; None: nothing."""
    several = list(part.parameters)
    which = several[0] if len(several) == 1 else f"{len(several)} of them"
    return describe_difference(whole, part, f"with all {len(whole.parameters)} parameters", f"with {which} alone")


def describe_difference(whole: TriedOptimizer, part: TriedOptimizer, of_whole: str, of_part: str) -> str | None:
    """What differs between two optimizers after the same steps, in words: weights, then shared state, then other state.

    None if nothing does. `part` has some or all of the parameters of `whole`. `of_whole`, `of_part`: what they are, in words.
    """
    texts = []
    there, here = whole.state(), part.state()
    unequal = [name for name in part.parameters if not _same(whole.parameters[name], part.parameters[name])]
    if unequal:
        most = max(float((whole.values()[n] - part.values()[n]).abs().max()) for n in unequal)
        texts.append(f"the weights of {unequal[0]} differ by {most:.2g} between {of_whole} and {of_part}")
    scopes = [(f"of the group {p!r}", there.groups.get(p, {}), here.groups[p]) for p in here.groups]
    (of_here,) = here.attributes.values() or [{}]
    (of_there,) = there.attributes.values() or [{}]
    for what, one, other in (*scopes, ("of the optimizer", of_there, of_here)):
        texts += [
            f"{key!r} {what} is {_shown(one.get(key))} {of_whole} and {_shown(other.get(key))} {of_part}"
            for key in sorted({*one, *other})
            if not _same(one.get(key), other.get(key))
        ]
    for name, entries in here.parameters.items() if not texts else ():
        for key, value in entries.items():
            if not _same(there.parameters[name].get(key), value):
                texts.append(f"{key!r} of {name} differs between {of_whole} and {of_part}")
    return f"in a trial of {part.steps_in_words} {'; '.join(texts[:2])}" if texts else None


def _shown(value: Value) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _same(a: Value, b: Value) -> bool:
    """Whether two tensors of one dtype have equal numbers, NaN too, or two other values are the same."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return is_same_content(comparable_content(a), comparable_content(b))
    return a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
