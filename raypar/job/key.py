"""What a key of a job is for: the marker in its annotation, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

    from raypar.job.section import Section


S = TypeVar("S", bound="Section")


@dataclass(frozen=True)
class Key:
    """The marker of a key, `seed: Annotated[int, BITS]`.

    Every key of a job has one. Inside a section that goes whole to workers a key without one is as the section's own key;
    inside the others each key says for itself that no worker gets it (`contract.unmarked_keys`).
    """

    decides_bits: bool = False
    """Whether trained bits depend on it: checkpoints have it in their contract."""
    may_change_at_resume: bool = True
    """Whether a run may go on with another value."""
    may_change_when_said: bool = False
    """Whether a resume may ask for another value, with which the run then goes on: its checkpoints name the step."""
    for_workers: bool = False
    """Whether workers get it; they have the defaults of all other keys."""
    for_driver: bool = False
    """Whether the driver gets it, likewise."""


BITS = Key(decides_bits=True, may_change_at_resume=False, for_workers=True)
"""What decides bits: the same from the first step of a run to the last."""
BITS_FROM_A_STEP_ON = Key(decides_bits=True, may_change_at_resume=False, may_change_when_said=True, for_workers=True)
"""What decides bits, and may be another when a run is resumed, from that step on, where the resume says so."""
BITS_OF_SHARDS = Key(decides_bits=True, for_workers=True)
"""What decides bits only where a plan has shards. A run may go on with others, as it may with another number of shards."""
BITS_OF_CUT_LAYERS = Key(decides_bits=True, for_workers=True, for_driver=True)
"""The same, where the driver needs it too, which makes other plans."""
WORKERS = Key(for_workers=True)
"""What workers need, and no bits depend on."""
DRIVER = Key(for_driver=True)
"""What the driver needs."""
WORKERS_AND_DRIVER = Key(for_workers=True, for_driver=True)
"""What workers and the driver need, and no bits depend on."""
CLIENT = Key()
"""What only the process needs that starts the run."""


def marker_of(section: type[BaseModel], name: str) -> Key | None:
    """The marker of a section's key; None if it has none."""
    return next((one for one in section.model_fields[name].metadata if isinstance(one, Key)), None)


def marked_keys(section: type[BaseModel], above: Key | None = None, prefix: str = "") -> Iterator[tuple[str, Key | None]]:
    """(dotted name, marker) of every key of a section and of those inside it. `above`: the section's own."""
    from raypar.job.walk_sections import section_types

    for name, info in section.model_fields.items():
        marker = marker_of(section, name) or above
        yield prefix + name, marker
        for inner in section_types(info.annotation):
            yield from marked_keys(inner, marker, f"{prefix}{name}.")


def project(section: S, wanted: Callable[[Key], bool], above: Key | None = None) -> S:
    """A section with its `wanted` keys alone: others have their defaults, and those that have no default are not there.

    `above`: the section's own marker. Nothing is checked again.
    """
    from raypar.job.section import Section

    kept: dict[str, Any] = {}
    fields = type(section).model_fields
    for name in fields:
        marker, value = marker_of(type(section), name) or above, getattr(section, name)
        assert marker is not None, f"{type(section).__name__}.{name} has no marker"
        if isinstance(value, Section):
            inner = project(value, wanted, marker)
            if wanted(marker) or inner.model_fields_set:
                kept[name] = inner
        elif wanted(marker):
            kept[name] = value
    whole = len(kept) == len(fields) and all(value is getattr(section, name) for name, value in kept.items())
    return section if whole else type(section).model_construct(**kept)
