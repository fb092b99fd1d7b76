"""Two instructions that raypar does not have, to show what adding one takes."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from raypar.schedule.instructions import ACTIVATIONS, INSTRUCTIONS, KEPT_SIZE, VALUES, Compute, DrawingStyle


def add_toy_instructions(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`LeanForward` and `MakeAgain`, which are among raypar's instructions for the rest of the test.

    They do in another way what `CheckpointedForward` and `Recompute` do.
    """
    monkeypatch.setitem(KEPT_SIZE, "inputs", 0)

    @dataclass(frozen=True, slots=True)
    class LeanForward(Compute):
        """A forward that keeps its inputs only."""

        letter = "L"
        cost = ("forward",)
        needs = (VALUES,)
        makes = (VALUES,)
        allocates = ("inputs",)
        drawing = DrawingStyle("#000080", "forward, nothing kept (L)", "lean forward")

    @dataclass(frozen=True, slots=True)
    class MakeAgain(Compute):
        """The instruction that makes its activations again."""

        letter = "M"
        cost = ("forward",)
        needs = ("inputs",)
        allocates = (ACTIVATIONS,)
        frees = ("inputs",)
        drawing = DrawingStyle("#008080", "made again (M)", "make again")

    for kind in (LeanForward, MakeAgain):
        monkeypatch.setitem(INSTRUCTIONS, kind.letter, kind)
    return SimpleNamespace(LeanForward=LeanForward, MakeAgain=MakeAgain)
