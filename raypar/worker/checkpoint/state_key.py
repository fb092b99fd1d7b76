"""Keys of state in checkpoints: what a tensor or number is of its parameter or buffer, with the optimizer's own names apart."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.errors import with_article

OPTIMIZER, GROUP, ATTRIBUTE = "optimizer", "optimizer group", "optimizer attribute"
"""Kinds of optimizer state: of one parameter (`optimizer.state[p]`); of a group of parameters (an entry of `param_groups`); of
the optimizer itself (an attribute)."""
NOT_KEPT = "optimizer state that cannot be kept"
"""Kind of what stands for optimizer state that cannot be moved, in the mirror and in moves; its name says why."""
NAMED_KINDS = (OPTIMIZER, GROUP, ATTRIBUTE)
"""The kinds whose keys have a name, which the optimizer has chosen."""
SHARED_KINDS = (GROUP, ATTRIBUTE)
"""The kinds of state that many parameters share: of a group, or of all."""


@dataclass(frozen=True, slots=True, order=True)
class StateKey:
    """The kind of a piece of state of a parameter or buffer and, for optimizer state, the optimizer's name for it."""

    kind: str
    """`parameter`, `average`, `buffer`, `non-persistent buffer`, `tie`, or one of `NAMED_KINDS`."""
    name: str = ""
    """The optimizer's name for it, such as `exp_avg`; empty for kinds without."""

    def __str__(self) -> str:
        return self.name if self.kind == OPTIMIZER else f"{self.kind} {self.name}".rstrip()


PARAMETER = StateKey("parameter")
"""A parameter's own values."""
AVERAGE = StateKey("average")
"""A moving average of a parameter, in its shape."""
BUFFER, CACHE = StateKey("buffer"), StateKey("non-persistent buffer")
"""Buffers. Both are state, put back when a run goes on; exports have those that are persistent."""
TIE = StateKey("tie")
"""A tied parameter's other names: the entry leads to the tensor of its first name. For exports only."""
PLAIN_KEYS = {key.kind: key for key in (PARAMETER, AVERAGE, BUFFER, CACHE, TIE)}
"""Kind -> key, of the kinds without names."""


def optimizer_key(name: str) -> StateKey:
    """The key of what the optimizer keeps for one parameter under `name`, such as `exp_avg`."""
    return StateKey(OPTIMIZER, name)


def why_unusable_name(name: object) -> str | None:
    """What makes a name of optimizer state impossible in a checkpoint, as a participle; None if it is possible."""
    if not isinstance(name, str):
        return f"named by {with_article(type(name).__name__)}, not by a text"
    if not name or not name.isprintable():
        return "named by no printable text"
    return None
