"""What a model's code keeps is read whole as far as the bytes go."""

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
