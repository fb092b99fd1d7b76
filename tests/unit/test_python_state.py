"""What a model's code keeps outside of parameters and buffers is read, compared and put back."""

import array
import collections
import ctypes
import decimal
import functools
import io
import itertools
import time
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn
from tqdm import tqdm

from raypar.model import python_state
from raypar.model.python_state import PythonState


def test_a_small_tensor_beside_one_that_is_too_large_is_read(monkeypatch: pytest.MonkeyPatch):
    """A large table is not; a counter beside it was not either."""
    monkeypatch.setattr(python_state, "MOST_BYTES", 1000)
    module = nn.Module()
    module.table, module.calls = torch.zeros(1000), torch.zeros(1)
    state = PythonState({"": module})
    before = state.read()
    module.calls += 1
    assert any("calls" in place for place in before.changed(state.read()))


def objects() -> numpy.ndarray:
    made = numpy.empty(1, dtype=object)
    made[0] = 0
    return made


@pytest.mark.parametrize(
    "made",
    [lambda: bytearray(1), lambda: array.array("l", [0]), lambda: collections.UserList([0]), objects, lambda: [0]],
    ids=["bytearray", "array", "UserList", "objects", "list"],
)
def test_what_containers_hold_is_compared_and_put_back(made):
    module = nn.Module()
    module.kept = made()
    state = PythonState({"": module})
    before = state.read()
    module.kept[0] = 7
    assert before.changed(state.read()) == ["attribute 'kept' of the model (Module)"]
    state.put_back(before)
    assert module.kept[0] == 0 and not before.changed(state.read())


def test_lists_that_share_others_are_compared_once():
    """A list that holds another twice, which holds another twice, ...: 2 ** 24 ways lead to the last."""
    module = nn.Module()
    module.last = module.kept = [0]
    for _ in range(24):
        module.kept = [module.kept, module.kept]
    state = PythonState({"": module})
    before = state.read()
    start = time.process_time()
    assert before.changed(state.read()) == []
    assert time.process_time() - start < 0.5
    module.last[0] = 7
    assert len(before.changed(state.read())) == 2, "both attributes lead to the list that has changed"


def test_an_attribute_of_a_buffer_is_read():
    module = nn.Module()
    module.register_buffer("mean", torch.zeros(1))
    module.mean.calls = 0
    state = PythonState({"": module})
    before = state.read()
    module.mean.calls = 1
    assert before.changed(state.read()) == ["attribute 'calls' of the buffer mean"]


def test_a_place_that_holds_too_much_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(python_state, "_MOST_OBJECTS", 100)
    module = nn.Module()
    module.few, module.many = [[1]], [[number] for number in range(200)]
    state = PythonState({"": module})
    state.read()
    assert state.unread == "attribute 'many' of the model (Module) holds more than is looked through"


def module_with(kept):
    module = nn.Module()
    module.kept = kept
    return module, PythonState({"": module})


def in_lists(value, deep: int):
    return [in_lists(value, deep - 1)] if deep else value


class Point(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_double))


class Listed(list):
    """A list with an attribute."""


def written_with(buffer, what):
    buffer.write(what)
    return buffer


HELD = {
    "ctypes number": (ctypes.c_long(0), lambda it: setattr(it, "value", 7), lambda it: it.value),
    "ctypes struct": (Point(1, 2.0), lambda it: setattr(it, "y", 7.0), lambda it: (it.x, it.y)),
    "ctypes array": ((ctypes.c_int * 3)(), lambda it: it.__setitem__(1, 7), list),
    "BytesIO": (written_with(io.BytesIO(), b"a"), lambda it: it.write(b"b"), lambda it: (it.getvalue(), it.tell())),
    "StringIO": (written_with(io.StringIO(), "a"), lambda it: it.truncate(0), lambda it: (it.getvalue(), it.tell())),
    "partial": (functools.partial(max, []), lambda it: it.args[0].append(7), lambda it: it.args[0]),
    "partialmethod": (functools.partialmethod(max, []), lambda it: it.args[0].append(7), lambda it: it.args[0]),
    "30 lists": (in_lists({"n": 0}, 30), lambda it: functools.reduce(lambda a, _: a[0], range(30), it).update(n=7), str),
    "attribute of a list": (Listed(), lambda it: setattr(it, "n", 7), lambda it: vars(it)),
}


@pytest.mark.parametrize("what", HELD)
def test_what_objects_of_python_s_library_hold_is_compared_and_put_back(what: str):
    kept, change, shown = HELD[what]
    _, state = module_with(kept)
    before, was = state.read(), repr(shown(kept))
    change(kept)
    assert before.changed(state.read()) == ["attribute 'kept' of the model (Module)"] and repr(shown(kept)) != was
    state.put_back(before)
    assert repr(shown(kept)) == was and not before.changed(state.read()) and state.unread is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (decimal.Decimal(1), decimal.Decimal(2)),
        (numpy.int64(1), numpy.int64(2)),
        (numpy.int64(1), 1),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (slice(1), slice(2)),
    ],
    ids=repr,
)
def test_values_of_which_one_takes_the_other_s_place_are_told_apart(one, other):
    module, state = module_with(one)
    before = state.read()
    module.kept = other
    assert before.changed(state.read())


def test_iterators_of_itertools_are_read():
    module, state = module_with(itertools.islice(itertools.count(), 5))
    before = state.read()
    assert not before.changed(state.read())
    next(module.kept)
    assert before.changed(state.read())


@pytest.mark.parametrize("large", [numpy.zeros(1000), torch.zeros(1000), bytearray(8000)], ids=lambda it: type(it).__name__)
def test_what_is_too_large_to_be_copied_is_compared_by_a_checksum(large, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(python_state, "MOST_BYTES", 100)
    _, state = module_with(large)
    before = state.read()
    assert not before.changed(state.read()) and state.unread is None
    (large.data if isinstance(large, torch.Tensor) else large)[7] = 1  # `.data`: no write is counted
    assert before.changed(state.read())
    monkeypatch.setattr(python_state, "_MOST_SUMMED_BYTES", 100)
    state.read()
    assert state.unread == "attribute 'kept' of the model (Module) holds more than is looked through"


def test_a_container_of_many_values_is_not_looked_through(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(python_state, "_MOST_VALUES", 1000)
    module, state = module_with(list(range(2000)))
    before = state.read()
    assert state.unread == "attribute 'kept' of the model (Module) holds more than is looked through"
    module.kept.append(1)
    assert before.changed(state.read()), "how many there are is compared all the same"


class HidesAttributes:
    """Answers to nothing."""

    @property
    def __dict__(self):
        raise RuntimeError("no")


class HidesClass:
    @property
    def __class__(self):
        raise RuntimeError("no")


class HidesSlot:
    __slots__ = ("kept",)

    def __getattribute__(self, name: str):
        raise RuntimeError("no")


@pytest.mark.parametrize("kind", [HidesAttributes, HidesClass, HidesSlot])
def test_an_object_that_cannot_be_read_is_named_and_those_beside_it_are_read(kind: type):
    module, state = module_with([kind(), [0]])
    before = state.read()
    assert state.unread == "attribute 'kept' of the model (Module) raises RuntimeError when it is read"
    module.kept[1][0] = 7
    assert before.changed(state.read())
    state.put_back(before)
    assert module.kept[1] == [0]


@dataclass(frozen=True, slots=True)
class Frozen:
    kept: int


class Refuses(dict):
    """Is written by nobody."""

    def __contains__(self, key: object) -> bool:
        raise TypeError

    def __getitem__(self, key: object):
        raise TypeError


def test_what_forbids_to_be_written_is_put_back():
    module, state = module_with([Frozen(0), Refuses(n=0)])
    before = state.read()
    object.__setattr__(module.kept[0], "kept", 7)
    dict.__setitem__(module.kept[1], "n", 7)
    assert before.changed(state.read())
    state.put_back(before)
    assert module.kept[0].kept == 0 and module.kept[1].get("n") == 0 and state.unread is None


def test_what_cannot_be_put_back_is_named():
    table = numpy.zeros(3)
    _, state = module_with(table)
    before = state.read()
    table[1] = 7
    table.flags.writeable = False
    state.put_back(before)
    assert state.unread == "attribute 'kept' of the model (Module) raises ValueError when it is put back"


def test_modes_and_what_is_registered_later_are_compared_and_put_back():
    """A module that leaves dropout, or one that makes a buffer to count in, trained otherwise on two replicas, silently."""
    module = nn.Sequential(nn.Dropout())
    module.register_buffer("old", torch.zeros(1))
    state = PythonState({"": module})
    before = state.read()
    module[0].eval()
    module.register_buffer("calls", torch.zeros(1))
    module.add_module("more", nn.Identity())
    module.old = torch.ones(1)
    places = ["attribute 'training' of 0 (Dropout)", "attribute 'calls' of the model (Sequential)"]
    first = state.read()
    assert sorted(before.changed(first)) == sorted([*places, "attribute 'more' of the model (Sequential)"])
    module.calls += 1
    assert first.changed(state.read()) == places[1:]
    state.put_back(before)
    assert module[0].training and not hasattr(module, "calls") and not hasattr(module, "more")
    assert module.old == 1 and not before.changed(state.read())
    state.put_back(first)
    assert not module[0].training and module.calls == 0 and not first.changed(state.read())


class Barred(nn.Module):
    """Shows its progress."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in tqdm(range(2), disable=True):
            x = x + 1
        return x


def test_progress_bars_are_no_state(monkeypatch: pytest.MonkeyPatch):
    """A thread of theirs notes the time, which made a model look as if its microbatches left something."""
    state = PythonState({"": Barred()})
    before = state.read()
    monkeypatch.setattr(tqdm, "monitor", 1.0)
    assert before.changed(state.read()) == []


class Doubles(torch.autograd.Function):
    calls = 0

    @staticmethod
    def backward(context, gradient):
        Doubles.calls += 1
        return 2 * gradient


class Entered:
    calls = 0

    def __enter__(self):
        Entered.calls += 1

    def __exit__(self, *_):
        pass


class Made:
    calls = 0

    def __init__(self):
        Made.calls += 1


class Attributes:
    calls = 0

    def __getattr__(self, name):
        Attributes.calls += 1


class Imports(nn.Module):
    """Counts in a module that its forward imports."""

    def forward(self, x):
        import helpers.counted_calls
        from helpers import counted_calls as other
        from helpers.counted_calls import count

        helpers.counted_calls.by_attribute += 1
        other.by_name += 1
        return x + count()


def by_backward():
    Doubles.backward(None, torch.ones(1))


def by_with():
    with Entered():
        pass


def by_construction():
    Made()


def by_attribute():
    return Attributes().other


class Descriptor:
    calls = 0

    def __get__(self, instance, owner):
        Descriptor.calls += 1


class Described:
    other = Descriptor()


def by_descriptor():
    return Described.other


class Dispatched:
    calls = 0


@functools.singledispatch
def dispatched(value):
    return value


@dispatched.register
def _(value: int):
    Dispatched.calls += 1


dispatched(1)  # fills its cache


def by_dispatch():
    dispatched(1)


ACTS = [
    (by_descriptor, Descriptor),
    (by_dispatch, Dispatched),
    (by_backward, Doubles),
    (by_with, Entered),
    (by_construction, Made),
    (by_attribute, Attributes),
]


@pytest.mark.parametrize("act, place", ACTS)
def test_what_python_and_pytorch_call_without_a_name_is_looked_through(act, place):
    class Acts(nn.Module):
        def forward(self, x):
            Doubles.apply(x)
            with Entered():
                return Made(), Attributes().other, Described.other, dispatched(x)

    state = PythonState({"": Acts()})
    before = state.read()
    act()
    assert before.changed(state.read()) == [f"class attribute 'calls' of {place.__module__}.{place.__name__}"]
    state.put_back(before)
    assert not before.changed(state.read())


def test_a_module_that_forward_imports_is_looked_through():
    module = Imports()
    module(torch.zeros(1))
    state = PythonState({"": module})
    before = state.read()
    module(torch.zeros(1))
    names = ("by_attribute", "by_name", "calls")
    assert sorted(before.changed(state.read())) == [f"global variable {name!r} of helpers.counted_calls" for name in names]


def test_a_quasirandom_sequence_is_looked_through():
    module, state = module_with(torch.quasirandom.SobolEngine(1))
    before = state.read()
    module.kept.draw()
    assert before.changed(state.read())
