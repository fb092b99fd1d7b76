"""What a model's code keeps outside of parameters and buffers is read, compared and put back."""

import array
import collections

import numpy
import pytest
import torch
from torch import nn

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
    assert PythonState({"": module}).read().unread == "attribute 'many' of the model (Module)"
