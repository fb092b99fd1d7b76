"""Optimizers that keep state, couple parameters and draw random numbers in every way, written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Written(torch.optim.Optimizer):
    """`p -= lr * way(p)` for every parameter with a gradient; `way` is the class's."""

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0, **more: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for group in self.param_groups:
            self.begin_group(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    way = self.way(parameter, parameter.grad, group, self.state[parameter])
                    parameter.add_(way + group["weight_decay"] * parameter, alpha=-group["lr"])

    def begin(self) -> None:
        """What a step does first."""

    def begin_group(self, group: dict[str, Any]) -> None:
        """What a step does first in each group."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient

    def trained(self) -> Iterator[nn.Parameter]:
        """All parameters with a gradient."""
        yield from (p for group in self.param_groups for p in group["params"] if p.grad is not None)


class CountsInGroup(Written):
    """As schedule-free optimizers: an average whose weights are counted in the group, a number and a tensor."""

    def begin_group(self, group: dict[str, Any]) -> None:
        group["k"] = group.get("k", 0) + 1
        group["weight_sum"] = group.get("weight_sum", torch.zeros(())) + group["lr"] ** 2

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(parameter))
        average.lerp_(gradient, 1 / group["k"])
        return average + gradient * group["weight_sum"].sqrt()


class CountsInAttribute(Written):
    """The same in attributes of the optimizer."""

    def __init__(self, params: Any, **given: Any) -> None:
        super().__init__(params, **given)
        self.count, self.total = 0, torch.zeros(2)

    def begin(self) -> None:
        self.count += 1
        self.total += torch.tensor([1.0, 0.5])

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient * (1 + 1 / self.count) + self.total.prod() * 1e-3


class SumsLearningRates(Written):
    """As schedule-free optimizers: a sum that is no count, in an attribute."""

    def __init__(self, params: Any, **given: Any) -> None:
        super().__init__(params, **given)
        self.total = 0.0

    def begin(self) -> None:
        self.total += self.param_groups[0]["lr"] ** 2

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient * (1 + self.total)


class SumsInGroup(Written):
    """The same in a group, beside a count."""

    def __init__(self, params: Any, **given: Any) -> None:
        super().__init__(params, k=0, weight_sum=0.0, **given)

    def begin_group(self, group: dict[str, Any]) -> None:
        group["k"] += 1
        group["weight_sum"] += group["lr"] ** 2

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient * (group["k"] + group["weight_sum"])


class DividesByNorm(Written):
    """Divides by the norm of a parameter's gradient as a number of Python, which raises where that is 0."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient * (1 / float(gradient.norm()))


class CountsToTwenty(Written):
    """Counts its steps in an attribute, and begins again."""

    def __init__(self, params: Any, **given: Any) -> None:
        super().__init__(params, **given)
        self.phase = 0

    def begin(self) -> None:
        self.phase = (self.phase + 1) % 20


class HostileNames(Written):
    """Momentum under names that raypar has for other things."""

    NAMES = ("parameter", "buffer", "tie", "non-persistent buffer", "optimizer", "optimizer group", "params", "lr", "w#x@1")

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        for place, name in enumerate(self.NAMES):
            state.setdefault(name, torch.full_like(parameter, 3.0 + place)).mul_(0.5).add_(gradient)
        return sum(state[name] for name in self.NAMES)  # type: ignore[return-value]


class KeepsOddShapes(Written):
    """Momentum whose state has every shape but the parameter's: flat, turned, by row, by block, without dims, empty, larger."""

    BLOCK = 7

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        flat = gradient.reshape(-1)
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % self.BLOCK)).view(-1, self.BLOCK).abs().amax(1)
        if not state:
            state |= {"flat": torch.zeros_like(flat), "blocks": torch.zeros_like(blocks), "count": torch.zeros(())}
            state |= {
                "rows": torch.zeros(len(gradient)),
                "turned": torch.zeros_like(gradient.movedim(0, -1)),
                "none": torch.zeros(0, 3),
            }
            state |= {"codes": torch.zeros(2, flat.numel() + 1, dtype=torch.uint8)}
        state["count"] += 1
        state["flat"].mul_(0.9).add_(flat)
        state["blocks"].copy_(torch.maximum(0.5 * state["blocks"], blocks))
        state["rows"].add_(gradient.reshape(len(gradient), -1).sum(1).abs())
        state["turned"].mul_(0.5).add_(gradient.movedim(0, -1))
        state["codes"][:, 1:] = (127 * flat / blocks.max()).round().abs().to(torch.uint8)
        scale = state["blocks"].repeat_interleave(self.BLOCK)[: flat.numel()] + state["codes"][0, 1:] / 255
        rows = state["rows"].view(-1, *[1] * (gradient.ndim - 1))
        return (state["flat"] / (scale + 1)).view_as(gradient) + state["turned"].movedim(-1, 0) / (1 + rows) / state["count"]


class NormalisesParameter(Written):
    """By the norm of each parameter, as LAMB and LARS."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient * (parameter.norm() / (gradient.norm() + 1e-6))


class NormalisesVectors(Written):
    """By the norm of each gradient that is a vector; matrices are trained element by element."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient / (gradient.norm() + 1e-6) if gradient.ndim == 1 else gradient


class NormalisesLater(Written):
    """By the norm of each gradient, from the fifth step on."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        return gradient / (gradient.norm() + 1e-6) if state["step"] >= 5 else gradient


class NormalisesAll(Written):
    """By the norm of all gradients together."""

    def begin(self) -> None:
        self.norm = float(torch.stack([p.grad.norm() for p in self.trained()]).norm())  # type: ignore[union-attr]

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient / (self.norm + 1e-6)


class NormalisesEqualShapes(Written):
    """By the norm of all gradients of one shape, as optimizers that stack parameters may."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        norm = sum(float(p.grad.norm()) for p in self.trained() if p.shape == parameter.shape)  # type: ignore[union-attr]
        return gradient / (norm + 1e-6)


class NormalisesSmall(Written):
    """By the norm of all gradients together, once that is below 1."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        norm = float(torch.stack([p.grad.norm() for p in self.trained()]).norm())  # type: ignore[union-attr]
        return gradient / (norm + 1e-6) if norm < 1 else gradient


class NormalisesInWarmup(Written):
    """By the norm of all gradients together, while the learning rate is below half of its first one."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        norm = float(torch.stack([p.grad.norm() for p in self.trained()]).norm())  # type: ignore[union-attr]
        return gradient / (norm + 1e-6) if group["lr"] < 0.5 * self.defaults["lr"] else gradient


class NormalisesAfter(Written):
    """By the norm of all gradients together, or of each by itself, after `warmup_steps` steps; or in every `every`th one."""

    def __init__(self, params: Any, warmup_steps: int = 0, every: int = 1, together: bool = True, **given: Any) -> None:
        super().__init__(params, warmup_steps=warmup_steps, every=every, together=together, **given)

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        if state["step"] <= group["warmup_steps"] or state["step"] % group["every"]:
            return gradient
        among = self.trained() if group["together"] else [parameter]
        return gradient / (float(torch.stack([p.grad.norm() for p in among]).norm()) + 1e-6)  # type: ignore[union-attr]


class TakesSeventhOtherwise(Written):
    """Trains the seventh parameter of each group half as fast."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        seventh = len(group["params"]) > 6 and parameter is group["params"][6]
        return gradient * 0.5 if seventh else gradient


class EstimatesDistance(Written):
    """As Prodigy and D-Adaptation: a step size, estimated over all parameters, that is the first group's."""

    def begin(self) -> None:
        first = self.param_groups[0]
        for p in self.trained():
            self.state[p].setdefault("p0", p.detach().clone())
        moved = sum(float((p.grad * (self.state[p]["p0"] - p)).sum()) for p in self.trained())  # type: ignore[operator]
        for group in self.param_groups:
            group["d"] = max(first.get("d", 1e-3), 1e-2 * moved)

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient * (1 + group["d"])


class Prodigy(torch.optim.Optimizer):
    """Prodigy with Adam's averages (Mishchenko and Defazio 2023, arXiv:2306.06101, algorithm 4): all parameters share d."""

    def __init__(self, params: Any, lr: float = 1.0, weight_decay: float = 0.0, d0: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "weight_decay": weight_decay, "d": d0, "r": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parts = [(p, self.state[p], group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        first = self.param_groups[0]
        (beta1, beta2), d, lr = first["betas"], first["d"], first["lr"]
        decay, moved, total = beta2**0.5, 0.0, 0.0
        for p, state, _ in parts:
            if not state:
                state |= {"p0": p.clone(), "m": torch.zeros_like(p), "v": torch.zeros_like(p), "s": torch.zeros_like(p)}
            state["m"].mul_(beta1).add_(p.grad, alpha=(1 - beta1) * d)
            state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=(1 - beta2) * d * d)
            state["s"].mul_(decay).add_(p.grad, alpha=(1 - decay) * lr * d * d)
            moved += float((p.grad * (state["p0"] - p)).sum())
            total += float(state["s"].abs().sum())
        r = decay * first["r"] + (1 - decay) * lr * d * d * moved
        new = max(d, r / total) if total else d
        for group in self.param_groups:
            group["d"], group["r"] = new, r
        for p, state, group in parts:
            p.mul_(1 - lr * d * group["weight_decay"]).sub_(state["m"] / (state["v"].sqrt() + d * 1e-8), alpha=lr * d)


class Draws(Written):
    """Adds noise, as stochastic rounding and Langevin dynamics."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient + 0.1 * torch.randn_like(parameter)


class CountsSteps(Written):
    """Counts only steps in which some parameter has a gradient."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + bool(list(self.trained()))

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient / max(1, group["k"])


class CountsForEach(Written):
    """Counts the steps of each parameter, as a number."""

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        return gradient / state["step"]


class Meter:
    """A plain object that counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: dict[str, list[int]] = {"calls": []}

    def count(self) -> int:
        self.calls += 1
        return self.calls


class CountsInObject(Written):
    """Counts in an object; the count has an effect after 60 steps."""

    def __init__(self, params: Any, **given: Any) -> None:
        super().__init__(params, **given)
        self.meter = Meter()

    def begin(self) -> None:
        self.meter.count()

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient if self.meter.calls < 60 else gradient * 0.5


_METER = Meter()


class CountsGlobally(CountsInObject):
    """The same in an object that is a global variable."""

    def __init__(self, params: Any, **given: Any) -> None:
        Written.__init__(self, params, **given)

    def begin(self) -> None:
        _METER.count()

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient if _METER.calls % 100 < 60 else gradient * 0.5


class CountsInClass(CountsInObject):
    """The same in its class."""

    calls = 0

    def begin(self) -> None:
        type(self).calls += 1


class CountsInClosure(CountsInObject):
    """The same in a variable of a function."""

    def __init__(self, params: Any, **given: Any) -> None:
        Written.__init__(self, params, **given)
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def begin(self) -> None:
        self.calls = self.count()

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient if self.calls < 60 else gradient * 0.5


class CachesInClass(Written):
    """Has a table in its class, made in the first step: no state."""

    TABLE: dict[int, float] = {}  # noqa: RUF012

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient * self.TABLE.setdefault(parameter.dim(), 0.5 + parameter.dim())


class KeepsListLater(Written):
    """Keeps a list for each parameter after so many steps, or once the learning rate is above what the job sets at first."""

    def __init__(self, params: Any, after: int = 0, above: float = 0.0, **given: Any) -> None:
        super().__init__(params, after=after, above=above, **given)

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > group["after"] and group["lr"] > group["above"]:
            state["factors"] = [gradient]
        return gradient


def doubles_after_two(step: int) -> float:
    """A factor on the learning rate that no trial has: 2 from the third step on."""
    return 1.0 if step < 2 else 2.0


def doubles_after_nine(step: int) -> float:
    """2 from the tenth step on, between the looks after 8 and 16 steps."""
    return 1.0 if step < 9 else 2.0


class BeginsAbove(Written):
    """Begins a momentum once the learning rate is above a limit, or after so many steps; steps by sign of the sum before."""

    def __init__(self, params: Any, above: float = 0.0, after: int = 0, **given: Any) -> None:
        super().__init__(params, above=above, after=after, steps=0, **given)

    def begin_group(self, group: dict[str, Any]) -> None:
        group["steps"] += 1

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        if not state and (group["lr"] <= group["above"] or group["steps"] <= group["after"]):
            return gradient
        state["sum"] = 0.9 * state.get("sum", torch.zeros_like(parameter)) + gradient
        return state["sum"]


def small_for_two(step: int) -> float:
    """A factor on the learning rate that no trial has: almost nothing in the first two steps."""
    return 0.01 if step < 2 else 1.0


class Keeps(Written):
    """Keeps something that no file holds: `what`, a key of `KEPT`."""

    def __init__(self, params: Any, what: str, **given: Any) -> None:
        super().__init__(params, **given)
        self.what = what
        self.history: list[float] = []
        self.dice = torch.Generator().manual_seed(1)

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        KEPT[self.what](self, parameter, gradient, group, state)
        return gradient


def _keep_two_names(optimizer: Keeps, p: Tensor, g: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> None:
    state.setdefault("first", torch.zeros_like(p))
    state.setdefault("second", state["first"])
    state["first"] += 1


_calls = [0]


class CountsInModule(Written):
    """Counts its steps in a global: a process that begins anew does not know it."""

    def __init__(self, params: Any, **given: Any) -> None:
        super().__init__(params, **given)
        _calls[0] = 0

    def begin(self) -> None:
        _calls[0] += 1

    def way(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], state: dict[Any, Any]) -> Tensor:
        return gradient / _calls[0]


KEPT = {
    "int key": lambda o, p, g, group, state: state.update({0: torch.zeros_like(p)}),
    "empty key": lambda o, p, g, group, state: state.update({"": torch.zeros_like(p)}),
    "list": lambda o, p, g, group, state: state.update(factors=[torch.zeros_like(p)]),
    "text": lambda o, p, g, group, state: state.update(mode="warm"),
    "complex": lambda o, p, g, group, state: state.update(phase=torch.zeros_like(p, dtype=torch.complex128)),
    "sparse": lambda o, p, g, group, state: state.update(rows=torch.zeros_like(p).to_sparse()),
    "object": lambda o, p, g, group, state: state.update(thing=object()),
    "two names": _keep_two_names,
    "gradient": lambda o, p, g, group, state: state.update(last=g),
    "list in group": lambda o, p, g, group, state: group.setdefault("seen", []).append(1),
    "list in attribute": lambda o, p, g, group, state: o.history.append(1.0),
    "generator": lambda o, p, g, group, state: p.add_(torch.randn(p.shape, generator=o.dice)),
    "state of no parameter": lambda o, p, g, group, state: o.state["all"].update(k=1),
    "large attribute": lambda o, p, g, group, state: setattr(o, "table", torch.zeros(1 << 16)),
}
"""What is kept -> what a step does to keep it."""


def zero_at_first(step: int) -> float:
    """A learning-rate schedule that begins with steps of 0, as a warm-up from 0 does."""
    return min(1.0, max(0, step - 1) / 4)


def no_number(output: Tensor, target: Tensor) -> Tensor:
    """A loss that is NaN."""
    return (output - target).square().mean() * float("nan")
