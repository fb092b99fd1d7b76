"""Random modules with hidden state: what a call leaves for later calls outside of parameters and buffers.

A seed decides where the state is (an attribute, a dict, a closure, a global variable, a generator), how it is written, and from
which microbatch on it has an effect, 1 to 20. The number of calls, or of draws, decides that effect, so one process that runs
all microbatches in order computes something else than workers of which each runs some. Nothing here is made for a check that
finds it: how Python programs happen to keep state, in as many ways as came to mind.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import os
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
LAST_EFFECT = 20
"""The latest microbatch at which an effect begins."""


class Rows:
    """29 samples of one field and a target."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {name: torch.randn(WIDTH, generator=generator) for name in ("x", "y")}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclass(frozen=True)
class HiddenState:
    """What a seed decides."""

    place: str
    """Key of `VARIANTS`."""
    variant: str
    """Name of the class that keeps the state."""
    first_effect: int
    """Number of the call, from 1, from which on the state has an effect."""
    is_inside: bool
    """Whether it is in a module inside of the unit, not in the unit itself."""
    is_checkpointed: bool
    """Whether the unit uses activation checkpointing, whose second forward is a call too."""
    only_gradient: bool
    """Whether the effect is on the gradient only."""


def hidden_state_of(seed: int) -> HiddenState:
    """What this seed decides. 20 seeds in a row have every place four times."""
    choose = random.Random(f"hidden state {seed}")
    place = list(VARIANTS)[seed % len(VARIANTS)]
    variants = VARIANTS[place]
    return HiddenState(
        place,
        variants[seed // len(VARIANTS) % len(variants)].__name__,
        choose.randint(1, LAST_EFFECT),
        choose.random() < 0.4,
        choose.random() < 0.25,
        choose.random() < 0.25,
    )


class HiddenStateModel(nn.Module):
    """Four blocks in a row with skips, of which one, or more if they share it, has the hidden state of a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        state = hidden_state_of(seed)
        kind = next(each for each in VARIANTS[state.place] if each.__name__ == state.variant)
        keepers = [kind(state) for _ in range(3 if kind.is_shared else 1)]
        if kind.is_shared:
            kind.share(keepers)
        holds: list[Any] = keepers if kind.is_shared else [None, keepers[0], None]
        self.blocks = nn.ModuleList(Block(keeper, state) for keeper in holds)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Skip(nn.Module):
    """A block with a skip, as a layer of a list."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)  # type: ignore[no-any-return]


def hidden_state_layers(seed: int) -> list[nn.Module]:
    """The same model as a list of layers."""
    model = HiddenStateModel(seed)
    return [*map(Skip, model.blocks), model.head]


class Block(nn.Module):
    """A linear layer, whose output a keeper scales."""

    def __init__(self, keeper: Keeper | None, state: HiddenState) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = (nn.Sequential(keeper) if state.is_inside else keeper) if keeper is not None else nn.Identity()
        self.is_checkpointed = state.is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.is_checkpointed else self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return self.scale(torch.tanh(self.linear(x)))


class Keeper(nn.Module):
    """Scales its input by a factor that depends on the calls before."""

    is_shared = False
    """Whether three blocks have the same state."""

    def __init__(self, state: HiddenState) -> None:
        super().__init__()
        self.first_effect, self.only_gradient = state.first_effect, state.only_gradient
        self.set_up()

    @staticmethod
    def share(keepers: list[Any]) -> None:
        """Give all keepers the first one's state."""

    def set_up(self) -> None:
        """Make the state."""
        raise NotImplementedError

    def advance(self, y: Tensor) -> int:
        """Count a call; returns the number of calls so far."""
        raise NotImplementedError

    def factor(self, y: Tensor) -> float:
        """The factor of a call: 1 before the first effect, then another one in each call."""
        return 1.0 + 0.1 * max(0, self.advance(y) - self.first_effect + 1)

    def forward(self, y: Tensor) -> Tensor:
        factor = self.factor(y)
        return y + (factor - 1) * (y - y.detach()) if self.only_gradient else y * factor


# -- in an attribute ---------------------------------------------------------------------------------------------------------


class Meter:
    """A plain object that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def next(self) -> int:
        self.calls += 1
        return self.calls


class SlotMeter:
    """The same without a `__dict__`."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class IntAttribute(Keeper):
    def set_up(self) -> None:
        self.calls = 0

    def advance(self, y: Tensor) -> int:
        self.calls += 1
        return self.calls


class FloatAttribute(Keeper):
    def set_up(self) -> None:
        self.progress = 0.0

    def factor(self, y: Tensor) -> float:
        self.progress += 1 / self.first_effect
        return 1.0 if self.progress < 1 - 1e-6 else 0.5 + self.progress / 2


class NewTensor(Keeper):
    def set_up(self) -> None:
        self.calls = torch.zeros(())

    def advance(self, y: Tensor) -> int:
        self.calls = self.calls + 1
        return int(self.calls)


class WrittenTensor(Keeper):
    def set_up(self) -> None:
        self.calls = torch.zeros(3)

    def advance(self, y: Tensor) -> int:
        self.calls[1] += 1
        return int(self.calls.max())


class WrittenData(Keeper):
    def set_up(self) -> None:
        self.calls = torch.zeros(())

    def advance(self, y: Tensor) -> int:
        self.calls.data.add_(1)
        return int(self.calls)


class WrittenArray(Keeper):
    def set_up(self) -> None:
        self.calls = numpy.zeros(2)

    def advance(self, y: Tensor) -> int:
        self.calls[0] += 1
        return int(self.calls[0])


class History(Keeper):
    """Keeps what it has seen."""

    def set_up(self) -> None:
        self.seen: list[Tensor] = []

    def advance(self, y: Tensor) -> int:
        self.seen.append(y.detach())
        return len(self.seen)


class Window(Keeper):
    """Keeps the last outputs, as many as decide when the effect begins."""

    def set_up(self) -> None:
        self.seen: collections.deque[float] = collections.deque(maxlen=self.first_effect)

    def factor(self, y: Tensor) -> float:
        self.seen.append(float(y.detach().abs().mean()))
        return 1.0 if len(self.seen) < self.first_effect else 1.0 + sum(self.seen)


class Average(Keeper):
    """A moving average that is used once it has settled."""

    def set_up(self) -> None:
        self.average, self.weight = torch.zeros(WIDTH), 1.0

    def factor(self, y: Tensor) -> float:
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        self.weight *= 0.9
        return 1.0 if self.weight > 0.9**self.first_effect * 1.001 else 1.0 + float(self.average.norm())


class Former(Keeper):
    """The output of the call before; every `first_effect`th call reads it."""

    def set_up(self) -> None:
        self.former: Tensor | None = None
        self.left = self.first_effect

    def factor(self, y: Tensor) -> float:
        former, self.former = self.former, y.detach()
        self.left = self.left - 1 or self.first_effect
        return 1.0 if former is None or self.left != self.first_effect else 1.0 + float(former.abs().mean())


class LargestSoFar(Keeper):
    """The largest number seen so far."""

    def set_up(self) -> None:
        self.largest = torch.zeros(())

    def factor(self, y: Tensor) -> float:
        self.largest = torch.maximum(self.largest, y.detach().abs().max())
        return 1.0 + float(self.largest)


class ObjectAttribute(Keeper):
    def set_up(self) -> None:
        self.meter = Meter()

    def advance(self, y: Tensor) -> int:
        return self.meter.next()


class SlotAttribute(Keeper):
    def set_up(self) -> None:
        self.meter = SlotMeter()

    def advance(self, y: Tensor) -> int:
        self.meter.calls += 1
        return self.meter.calls


class ClassAttribute(Keeper):
    calls = 0

    def set_up(self) -> None:
        type(self).calls = 0

    def advance(self, y: Tensor) -> int:
        type(self).calls += 1
        return self.calls


class ParameterAttribute(Keeper):
    def set_up(self) -> None:
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.weight.calls = 0  # type: ignore[attr-defined]

    def advance(self, y: Tensor) -> int:
        self.weight.calls += 1  # type: ignore[attr-defined]
        return self.weight.calls  # type: ignore[attr-defined]

    def forward(self, y: Tensor) -> Tensor:
        return super().forward(y * self.weight)


class TextAttribute(Keeper):
    def set_up(self) -> None:
        self.log = ""

    def advance(self, y: Tensor) -> int:
        self.log += "."
        return len(self.log)


# -- in a dict ---------------------------------------------------------------------------------------------------------------


class Dict(Keeper):
    def set_up(self) -> None:
        self.state = {"calls": 0, "name": "dict"}

    def advance(self, y: Tensor) -> int:
        self.state["calls"] += 1  # type: ignore[operator]
        return self.state["calls"]  # type: ignore[return-value]


class NestedDict(Keeper):
    def set_up(self) -> None:
        self.state: dict[str, Any] = {"a": {"b": [{"c": 0}]}}

    def advance(self, y: Tensor) -> int:
        inner = self.state["a"]["b"][0]
        inner["c"] += 1
        return inner["c"]


class CounterDict(Keeper):
    def set_up(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def advance(self, y: Tensor) -> int:
        self.calls["forward"] += 1
        return self.calls["forward"]


class DefaultDict(Keeper):
    def set_up(self) -> None:
        self.seen: collections.defaultdict[int, list[int]] = collections.defaultdict(list)

    def advance(self, y: Tensor) -> int:
        self.seen[y.shape[-1]].append(len(y))
        return len(self.seen[y.shape[-1]])


class OrderedDict(Keeper):
    def set_up(self) -> None:
        self.seen: collections.OrderedDict[int, Tensor] = collections.OrderedDict()

    def advance(self, y: Tensor) -> int:
        self.seen[len(self.seen)] = y.detach()
        return len(self.seen)


class SharedDict(Keeper):
    """Three blocks count in one dict."""

    is_shared = True

    def set_up(self) -> None:
        self.state = {"calls": 0}

    @staticmethod
    def share(keepers: list[Any]) -> None:
        for keeper in keepers:
            keeper.state = keepers[0].state

    def advance(self, y: Tensor) -> int:
        self.state["calls"] += 1
        return 1 + (self.state["calls"] - 1) // 3


class TensorsInDict(Keeper):
    def set_up(self) -> None:
        self.state = {"calls": torch.zeros(()), "table": torch.arange(4.0)}

    def advance(self, y: Tensor) -> int:
        self.state["calls"].add_(1)
        return int(self.state["calls"])


class DictInTuple(Keeper):
    def set_up(self) -> None:
        self.state: tuple[Any, ...] = ("calls", {"calls": 0})

    def advance(self, y: Tensor) -> int:
        self.state[1]["calls"] += 1
        return self.state[1]["calls"]


class OwnVars(Keeper):
    """Writes its `__dict__` itself."""

    def set_up(self) -> None:
        vars(self)["calls"] = 0

    def advance(self, y: Tensor) -> int:
        vars(self)["calls"] += 1
        return vars(self)["calls"]


class SeenInputs(Keeper):
    """A dict by what was given, whose size has an effect."""

    def set_up(self) -> None:
        self.seen: dict[float, int] = {}

    def advance(self, y: Tensor) -> int:
        self.seen[float(y.detach().sum())] = len(y)
        return len(self.seen)


class FrozenLikeDict(dict[str, Any]):
    """A dict that cannot be updated."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")


class DictOfOwnClass(Keeper):
    def set_up(self) -> None:
        self.state = FrozenLikeDict(calls=[0])

    def advance(self, y: Tensor) -> int:
        self.state["calls"][0] += 1
        return self.state["calls"][0]


WEAK: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class WeakDict(Keeper):
    def set_up(self) -> None:
        WEAK.clear()

    def advance(self, y: Tensor) -> int:
        WEAK[self] = WEAK.get(self, 0) + 1
        return WEAK[self]


class SetOfNumbers(Keeper):
    def set_up(self) -> None:
        self.state: dict[str, set[int]] = {"seen": set()}

    def advance(self, y: Tensor) -> int:
        self.state["seen"].add(len(self.state["seen"]))
        return len(self.state["seen"])


# -- in a closure ------------------------------------------------------------------------------------------------------------


class CallableKeeper(Keeper):
    """Has a function that counts."""

    next_call: Callable[[], int]

    def advance(self, y: Tensor) -> int:
        return self.next_call()


def count_in_cell() -> Callable[[], int]:
    calls = 0

    def advance() -> int:
        nonlocal calls
        calls += 1
        return calls

    return advance


class Cell(CallableKeeper):
    def set_up(self) -> None:
        self.next_call = count_in_cell()


class CellWithList(CallableKeeper):
    def set_up(self) -> None:
        calls = [0]

        def advance() -> int:
            calls[0] += 1
            return calls[0]

        self.next_call = advance


class Partial(CallableKeeper):
    def set_up(self) -> None:
        def advance(state: list[int]) -> int:
            state.append(1)
            return len(state)

        self.next_call = functools.partial(advance, [])


class DefaultArgument(CallableKeeper):
    def set_up(self) -> None:
        def advance(state: dict[str, int] = {"calls": 0}) -> int:  # noqa: B006
            state["calls"] += 1
            return state["calls"]

        advance.__defaults__[0]["calls"] = 0  # type: ignore[index]
        self.next_call = advance


class FunctionAttribute(CallableKeeper):
    def set_up(self) -> None:
        def advance() -> int:
            advance.calls += 1  # type: ignore[attr-defined]
            return advance.calls  # type: ignore[attr-defined, no-any-return]

        advance.calls = 0  # type: ignore[attr-defined]
        self.next_call = advance


class InHook(Keeper):
    """A forward hook counts, and scales what the module returns."""

    def set_up(self) -> None:
        calls, first = 0, self.first_effect

        def count(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return out * (1.0 + 0.1 * max(0, calls - first + 1))

        self.register_forward_hook(count)

    def factor(self, y: Tensor) -> float:
        return 1.0


class InBackwardHook(Keeper):
    """Counts backward passes."""

    def set_up(self) -> None:
        calls = [1]

        def count(module: nn.Module, given: Any, out: Any) -> None:
            calls[0] += 1

        self.register_full_backward_hook(count)
        self.read = lambda: calls[0]

    def advance(self, y: Tensor) -> int:
        return self.read()


class LambdaOverObject(CallableKeeper):
    def set_up(self) -> None:
        meter = Meter()
        self.next_call = lambda: meter.next()


class NestedClosure(CallableKeeper):
    def set_up(self) -> None:
        inner = count_in_cell()

        def outer() -> int:
            return inner()

        self.next_call = outer


class CellWithTensor(CallableKeeper):
    def set_up(self) -> None:
        calls = torch.zeros(())

        def advance() -> int:
            calls.add_(1)
            return int(calls)

        self.next_call = advance


class BoundMethod(CallableKeeper):
    def set_up(self) -> None:
        self.next_call = Meter().next


class CountsCacheHits(Keeper):
    """The statistics of a cache."""

    def set_up(self) -> None:
        self.table = functools.lru_cache(lambda width: width * 2)

    def advance(self, y: Tensor) -> int:
        self.table(y.shape[-1])
        return self.table.cache_info().hits + 1


class OwnForward(Keeper):
    """Its forward is replaced by a function with a counter, as wrappers of libraries do."""

    def set_up(self) -> None:
        calls, original, first = 0, super().forward, self.first_effect

        def forward(y: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return original(y) * (1.0 + 0.1 * max(0, calls - first + 1))

        self.forward = forward  # type: ignore[method-assign]

    def factor(self, y: Tensor) -> float:
        return 1.0


# -- in a global variable ----------------------------------------------------------------------------------------------------

CALLS = 0
CALLS_IN_LIST = [0]
CALLS_IN_DICT = {"calls": 0}
CALLS_OF_HELPER = 0
CALLS_IN_TENSOR = torch.zeros(())
CALLS_IN_CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
CALLS_OF_THREAD = threading.local()
OTHER_MODULE = types.ModuleType("other_module")
METER = Meter()
VARIABLE = "RAYPAR_TEST_CALLS"


class Namespace:
    """A class that is used as a namespace."""

    calls = 0


class GlobalInt(Keeper):
    def set_up(self) -> None:
        global CALLS
        CALLS = 0

    def advance(self, y: Tensor) -> int:
        global CALLS
        CALLS += 1
        return CALLS


class GlobalList(Keeper):
    def set_up(self) -> None:
        CALLS_IN_LIST[0] = 0

    def advance(self, y: Tensor) -> int:
        CALLS_IN_LIST[0] += 1
        return CALLS_IN_LIST[0]


class GlobalDict(Keeper):
    def set_up(self) -> None:
        CALLS_IN_DICT["calls"] = 0

    def advance(self, y: Tensor) -> int:
        CALLS_IN_DICT["calls"] += 1
        return CALLS_IN_DICT["calls"]


def count_globally() -> int:
    global CALLS_OF_HELPER
    CALLS_OF_HELPER += 1
    return CALLS_OF_HELPER


def count_through_another() -> int:
    return count_globally()


class GlobalOfHelper(Keeper):
    def set_up(self) -> None:
        global CALLS_OF_HELPER
        CALLS_OF_HELPER = 0

    def advance(self, y: Tensor) -> int:
        return count_through_another()


class GlobalTensor(Keeper):
    def set_up(self) -> None:
        CALLS_IN_TENSOR.zero_()

    def advance(self, y: Tensor) -> int:
        CALLS_IN_TENSOR.add_(1)
        return int(CALLS_IN_TENSOR)


class GlobalContextVariable(Keeper):
    def set_up(self) -> None:
        CALLS_IN_CONTEXT.set(0)

    def advance(self, y: Tensor) -> int:
        CALLS_IN_CONTEXT.set(CALLS_IN_CONTEXT.get() + 1)
        return CALLS_IN_CONTEXT.get()


class GlobalOfThread(Keeper):
    def set_up(self) -> None:
        CALLS_OF_THREAD.calls = 0

    def advance(self, y: Tensor) -> int:
        CALLS_OF_THREAD.calls = getattr(CALLS_OF_THREAD, "calls", 0) + 1
        return CALLS_OF_THREAD.calls


class GlobalOfOtherModule(Keeper):
    def set_up(self) -> None:
        OTHER_MODULE.calls = 0  # type: ignore[attr-defined]

    def advance(self, y: Tensor) -> int:
        OTHER_MODULE.calls += 1  # type: ignore[attr-defined]
        return OTHER_MODULE.calls  # type: ignore[attr-defined]


class GlobalObject(Keeper):
    def set_up(self) -> None:
        METER.calls = 0

    def advance(self, y: Tensor) -> int:
        return METER.next()


class GlobalClass(Keeper):
    def set_up(self) -> None:
        Namespace.calls = 0

    def advance(self, y: Tensor) -> int:
        Namespace.calls += 1
        return Namespace.calls


class EnvironmentVariable(Keeper):
    def set_up(self) -> None:
        os.environ[VARIABLE] = "0"

    def advance(self, y: Tensor) -> int:
        os.environ[VARIABLE] = str(int(os.environ.get(VARIABLE, "0")) + 1)
        return int(os.environ[VARIABLE])


class GlobalByName(Keeper):
    """Finds a global variable by its name."""

    def set_up(self) -> None:
        globals()["CALLS_BY_NAME"] = 0

    def advance(self, y: Tensor) -> int:
        globals()["CALLS_BY_NAME"] += 1
        return globals()["CALLS_BY_NAME"]


# -- in a generator ----------------------------------------------------------------------------------------------------------


def _draws_before(make: Callable[[int], Callable[[], float]], first_effect: int) -> tuple[int, float]:
    """(seed of a generator, threshold): the `first_effect`th draw is the first one below the threshold."""
    for seed in itertools.count():
        draw = make(seed)
        *before, last = (draw() for _ in range(first_effect))
        lowest = min(before, default=1.0)
        if last < lowest:
            return seed, (last + lowest) / 2
    raise AssertionError


class Draws(Keeper):
    """Draws a number in each call, and does something else where it is small."""

    def generator(self, seed: int) -> Any:
        raise NotImplementedError

    @staticmethod
    def draw(generator: Any) -> float:
        return float(generator.random())

    def set_up(self) -> None:
        def drawing(seed: int) -> Callable[[], float]:
            generator = self.generator(seed)
            return lambda: self.draw(generator)

        seed, self.threshold = _draws_before(drawing, self.first_effect)
        self.keep(self.generator(seed))

    def keep(self, generator: Any) -> None:
        self.random = generator

    def kept(self) -> Any:
        return self.random

    def factor(self, y: Tensor) -> float:
        return 1.5 if self.draw(self.kept()) < self.threshold else 1.0


class PythonRandom(Draws):
    def generator(self, seed: int) -> Any:
        return random.Random(seed)


class NumpyGenerator(Draws):
    def generator(self, seed: int) -> Any:
        return numpy.random.default_rng(seed)


class NumpyRandomState(Draws):
    def generator(self, seed: int) -> Any:
        return numpy.random.RandomState(seed)


class TorchGenerator(Draws):
    def generator(self, seed: int) -> Any:
        return torch.Generator().manual_seed(seed)

    @staticmethod
    def draw(generator: Any) -> float:
        return float(torch.rand((), generator=generator))


GLOBAL_RANDOM: list[Any] = [None]


class GlobalRandom(PythonRandom):
    def keep(self, generator: Any) -> None:
        GLOBAL_RANDOM[0] = generator

    def kept(self) -> Any:
        return GLOBAL_RANDOM[0]


class ClosureOverNumpy(NumpyGenerator):
    def keep(self, generator: Any) -> None:
        self.read = lambda: generator

    def kept(self) -> Any:
        return self.read()


class Iterates(Keeper):
    """Takes the next factor of an iterator."""

    def factors(self) -> Iterator[float]:
        raise NotImplementedError

    def set_up(self) -> None:
        self.iterator = self.factors()

    def factor(self, y: Tensor) -> float:
        return next(self.iterator)


class CountIterator(Iterates):
    def factors(self) -> Iterator[Any]:
        return itertools.count(1)

    def factor(self, y: Tensor) -> float:
        return 1.0 + 0.1 * max(0, next(self.iterator) - self.first_effect + 1)


class ListIterator(Iterates):
    def factors(self) -> Iterator[float]:
        return iter([1.0] * (self.first_effect - 1) + [1.0 + 0.1 * n for n in range(1, 1000)])


class CycleIterator(Iterates):
    def factors(self) -> Iterator[float]:
        return itertools.cycle([1.0] * (self.first_effect - 1) + [1.5])


class MapIterator(Iterates):
    def factors(self) -> Iterator[float]:
        first = self.first_effect
        return map(lambda n: 1.0 + 0.1 * max(0, n - first + 1), range(1, 1000))  # noqa: C417


def schedule(first_effect: int) -> Iterator[float]:
    for number in itertools.count(1):
        yield 1.0 + 0.1 * max(0, number - first_effect + 1)


class PythonGenerator(Iterates):
    def factors(self) -> Iterator[float]:
        return schedule(self.first_effect)


class ClosureOverGenerator(Keeper):
    def set_up(self) -> None:
        factors = schedule(self.first_effect)
        self.next_factor = lambda: next(factors)

    def factor(self, y: Tensor) -> float:
        return self.next_factor()


VARIANTS: dict[str, tuple[type[Keeper], ...]] = {
    "attribute": (
        IntAttribute, FloatAttribute, NewTensor, WrittenTensor, WrittenData, WrittenArray, History, Window, Average, Former,
        LargestSoFar, ObjectAttribute, SlotAttribute, ClassAttribute, ParameterAttribute, TextAttribute,
    ),
    "dict": (
        Dict, NestedDict, CounterDict, DefaultDict, OrderedDict, SharedDict, TensorsInDict, DictInTuple, OwnVars, SeenInputs,
        DictOfOwnClass, WeakDict, SetOfNumbers,
    ),
    "closure": (
        Cell, CellWithList, Partial, DefaultArgument, FunctionAttribute, InHook, InBackwardHook, LambdaOverObject,
        NestedClosure, CellWithTensor, BoundMethod, CountsCacheHits, OwnForward,
    ),
    "global": (
        GlobalInt, GlobalList, GlobalDict, GlobalOfHelper, GlobalTensor, GlobalContextVariable, GlobalOfThread,
        GlobalOfOtherModule, GlobalObject, GlobalClass, EnvironmentVariable, GlobalByName,
    ),
    "generator": (
        PythonRandom, NumpyGenerator, NumpyRandomState, TorchGenerator, GlobalRandom, ClosureOverNumpy, CountIterator,
        ListIterator, CycleIterator, MapIterator, PythonGenerator, ClosureOverGenerator,
    ),
}  # fmt: skip
"""Where hidden state is -> ways to keep it there."""
