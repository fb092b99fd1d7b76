"""Modules, functions and objects with and without effects, for `tests/unit/test_effect_analysis.py`.

They are in a file of their own because pytest compiles its test files otherwise than Python does.
"""

import contextlib
import os
import random
from collections import OrderedDict
from functools import partial

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SIZE = 4
KEPT: list[Tensor] = []


class Base(nn.Module):
    """x -> x + update(x); without effects, as long as `update` has none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)
        self.scale, self.drop = 2.0, nn.Dropout(0.5)
        self.parts = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        rows, _ = x.shape
        for part in self.parts:
            x = part(x)
        return x + self.update(self.linear(self.norm(x)).view(rows, -1)) * self.scale

    def update(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class Attention(Base):
    """Draws random numbers in training only."""

    def update(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1 if self.training else 0.0)


class AttentionByPosition(Base):
    def update(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, None, 0.1)


class AttentionByUnknown(Base):
    def update(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=float(x.sum() > 0))


class Dropout(Base):
    def update(self, x: Tensor) -> Tensor:
        return self.drop(x)


class FunctionalDropout(Base):
    """Draws random numbers in training only."""

    def update(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=self.training)


class ForcedDropout(Base):
    def update(self, x: Tensor) -> Tensor:
        return F.dropout(x)


class Python(Base):
    def update(self, x: Tensor) -> Tensor:
        return x * random.random()


class Numpy(Base):
    def update(self, x: Tensor) -> Tensor:
        return x * numpy.random.rand()


class Torch(Base):
    def update(self, x: Tensor) -> Tensor:
        return x + torch.rand(1)


class InPlace(Base):
    def update(self, x: Tensor) -> Tensor:
        return x.clone().uniform_()


class Later(Base):
    """Draws in a branch that the first calls do not take, and puts the generator back."""

    def update(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            with torch.random.fork_rng():
                return x + torch.rand(1)
        return x


class Double(torch.autograd.Function):
    """Draws random numbers in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand(1)


class OwnFunction(Base):
    def update(self, x: Tensor) -> Tensor:
        return Double.apply(x)


class Hook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda module, given, found: found * random.random())


class PreHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm.register_forward_pre_hook(lambda module, given: (given[0] * random.random(),))


class Replaced(Base):
    """A forward of the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.forward = lambda x: x * random.random()


class OwnCall(Base):
    def __call__(self, *given):
        return super().__call__(*given) * random.random()


class OwnAttributes(Base):
    def __getattr__(self, name):
        random.random()
        return super().__getattr__(name)


class Property(Base):
    @property
    def scale(self):
        return random.random()

    @scale.setter
    def scale(self, value):
        pass


class FunctionAttribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.noise = random.random

    def update(self, x: Tensor) -> Tensor:
        return x * self.noise()


class Default(Base):
    def update(self, x: Tensor, noise=random.random) -> Tensor:
        return x * noise()


class Noise:
    def __rmul__(self, other):
        return other * random.random()


class DefaultOperand(Base):
    def update(self, x: Tensor, noise=Noise()) -> Tensor:  # noqa: B008
        return x * noise


class Parametrised(Base):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.parametrizations.weight_norm(self.linear)


class GradMode(Base):
    def update(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return x


class DefaultDtype(Base):
    def update(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return x


class Threads(Base):
    def update(self, x: Tensor) -> Tensor:
        torch.set_num_threads(2)
        return x


class Flags(Base):
    def update(self, x: Tensor) -> Tensor:
        torch.backends.cudnn.benchmark = True
        return x


class Environment(Base):
    def update(self, x: Tensor) -> Tensor:
        os.environ["OMP_NUM_THREADS"] = "7"
        return x


class Context(Base):
    def update(self, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            return x


class GradientHook(Base):
    def update(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * random.random())
        return x


class Checkpointed(Base):
    def update(self, x: Tensor) -> Tensor:
        return checkpoint(self.noisy, x, use_reentrant=False)

    def noisy(self, x: Tensor) -> Tensor:
        return x * random.random()


class Helper(Base):
    def update(self, x: Tensor) -> Tensor:
        return noisy_helper(x)


def noisy_helper(x: Tensor) -> Tensor:
    return partial(Python.update, None)(x)


class Recursive(Base):
    def update(self, x: Tensor) -> Tensor:
        return self.update(x)


class Nested(Base):
    def update(self, x: Tensor) -> Tensor:
        return (lambda y: y * random.random())(x)


class Listed(Base):
    def update(self, x: Tensor) -> Tensor:
        return sum([x * random.random() for _ in range(2)])


class Walrus(Base):
    def update(self, x: Tensor) -> Tensor:
        return x * (noise := random.random()) + noise


class Summed(Base):
    """Without effects, with a comprehension."""

    def update(self, x: Tensor) -> Tensor:
        return sum([x * F.gelu(x) for _ in range(2) if x is not None])


class Assigned(Base):
    """Assigns an attribute of a module, which calls its `__setattr__`."""

    def update(self, x: Tensor) -> Tensor:
        self.last = x
        return x


class Shadowed(Base):
    """A parameter with an attribute that stands in for a method of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.view = lambda *given: random.random()

    def update(self, x: Tensor) -> Tensor:
        return x * self.linear.weight.view(-1)


class Subclass(Tensor):
    """Draws in every operation."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        random.random()
        return super().__torch_function__(func, types, args, kwargs or {})


class SubclassParameter(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(SIZE).as_subclass(Subclass))

    def update(self, x: Tensor) -> Tensor:
        return x * self.table


class Kept(Base):
    """Calls a method that is none of tensors."""

    def update(self, x: Tensor) -> Tensor:
        KEPT.append(x)
        return x


def wrapped(function):
    def run(*given):
        random.random()
        return function(*given)

    return run


class Decorated(Base):
    @wrapped
    def update(self, x: Tensor) -> Tensor:
        return x


class WithoutGradients(Base):
    @torch.no_grad()
    def update(self, x: Tensor) -> Tensor:
        return x


class Reassigned(Base):
    """`self` is another object in one branch."""

    def update(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self = x
        return self.abs(x)

    def abs(self, x: Tensor) -> Tensor:
        return x * random.random()


WITHOUT = (Base, Summed)
"""Without effects in both modes."""
IN_TRAINING_ONLY = (Attention, Dropout, FunctionalDropout)
"""With effects in training."""
WITH = (
    *(AttentionByPosition, AttentionByUnknown, ForcedDropout, Python, Numpy, Torch, InPlace, Later, OwnFunction, Hook, PreHook),
    *(
        Replaced,
        OwnCall,
        OwnAttributes,
        Property,
        FunctionAttribute,
        Default,
        DefaultOperand,
        Parametrised,
        GradMode,
        DefaultDtype,
        Threads,
    ),
    *(Flags, Environment, Context, GradientHook, Checkpointed, Helper, Recursive, Nested, Listed, Walrus, Assigned, Shadowed),
    *(SubclassParameter, Kept, Decorated, WithoutGradients, Reassigned),
)
"""Not proved, in either mode: most have effects."""


def two_layers(kind: type[nn.Module]) -> nn.Sequential:
    """A layer without effects, one of this kind, and a head without effects."""
    return nn.Sequential(OrderedDict(first=Base(), second=kind(), head=nn.Linear(SIZE, 1)))


class Rows:
    """A data set without effects."""

    def __init__(self) -> None:
        self.x = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum(0, keepdim=True)


class NoisyRows(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + torch.rand(1), self.x[index].sum(0, keepdim=True)


class TransformedRows(Rows):
    def __init__(self, transform) -> None:
        super().__init__()
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform(self.x[index]), self.x[index].sum(0, keepdim=True)


class LeakingRows(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        torch.set_default_dtype(torch.float64)
        return self.x[index], self.x[index].sum(0, keepdim=True)


def right(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return ((output - target).abs() < 1).sum(), target.numel()


def noisy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output * random.random()).sum(), target.numel()


class Total:
    """A metric without effects."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = torch.zeros((), dtype=torch.float64)

    def update(self, output: Tensor, target: Tensor) -> None:
        self.total += (output - target).double().sum()

    def merge_state(self, other: "Total") -> None:
        self.total += other.total

    def compute(self) -> Tensor:
        return self.total / 2


class NoisyMerge(Total):
    def merge_state(self, other: "Total") -> None:
        self.total += other.total * random.random()


class NoisyCopy(Total):
    def __deepcopy__(self, memo):
        random.random()
        return type(self)()


class NoisyFinish(Total):
    def compute(self) -> Tensor:
        return self.total * torch.rand(())
