"""Which optimizer state a checkpoint must have, by a trial of the optimizer, and whether a manifest has it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raypar.errors import CheckpointError
from raypar.worker.checkpoint.manifest import EncodedTensor, KeptState, Manifest
from raypar.worker.checkpoint.state_key import GROUP, OPTIMIZER, SHARED_KINDS, StateKey

NUMBER = "a number"
"""The form of what is no tensor."""


@dataclass(frozen=True)
class SharedEntry:
    """A piece of state that parameters share."""

    is_always_there: bool
    """Whether every checkpoint has it: its value is never again the one with which the optimizer was made."""
    forms: frozenset[str]
    """What it may be (`describe_tensor_form`)."""


@dataclass(frozen=True)
class ExpectedOptimizerState:
    """The state that an optimizer keeps."""

    shared: Mapping[tuple[str, StateKey], SharedEntry] = field(default_factory=dict)
    """(pattern of a group, or of an optimizer's parameters; kind and name) -> what is known of it."""
    has_state_of_parameters: bool = False
    """Whether there is any in `optimizer.state[p]` from the first step on: for checkpoints that do not say what there was."""
    shapes_are_fixed: bool = True
    """Whether tensors that parameters share have the same shapes for all models."""
    names_of_parameters: frozenset[str] = frozenset()
    """The names in `optimizer.state[p]`."""

    def check(self, manifest: Manifest) -> None:
        """Raises `CheckpointError` if a manifest lacks some of it, or has something else in its place."""
        check_kept_state(manifest)
        has_state = any(entry.kind.kind == OPTIMIZER for entry in manifest.entries)
        there = {(e.name, e.kind): e.value for e in manifest.entries if e.kind.kind in SHARED_KINDS}
        if not has_state and not there and _last_step_was_skipped(manifest):
            return  # so were all before it: the optimizer has made no step
        if manifest.kept is None and self.has_state_of_parameters and manifest.steps_done and not has_state:
            raise CheckpointError(
                f"checkpoint {manifest.checkpoint} has weights, and no state of the optimizer: the run cannot go on from it",
                cure=f"begin a new run with its weights: without resuming, and with init_from={manifest.checkpoint}",
            )
        for (pattern, key), expected in self.shared.items() if manifest.format > 1 else ():
            if (pattern, key) not in there:
                if expected.is_always_there:
                    raise _not_of_this(manifest, f"lacks {describe_shared(pattern, key)}")
                continue
            value = there[pattern, key]
            found = (
                describe_tensor_form(value.dtype, value.shape, self.shapes_are_fixed)
                if isinstance(value, EncodedTensor)
                else NUMBER
            )
            if found not in expected.forms:
                wanted = " or ".join(sorted(expected.forms))
                raise _not_of_this(manifest, f"has {describe_shared(pattern, key)} as {found}, and it is {wanted}")

    def describe_missing(self, manifest: Manifest) -> str | None:
        """What an earlier raypar, which did not keep it, has left out of a checkpoint; None if it has all."""
        if not self.shared or manifest.format > 1 or any(entry.kind.kind in SHARED_KINDS for entry in manifest.entries):
            return None
        lacking = ", ".join(describe_shared(*place) for place in self.shared)
        return (
            f"checkpoint {manifest.checkpoint.name} lacks {lacking} of the optimizer, which the raypar that wrote it did "
            "not keep: the run goes on with those of a new optimizer, so not as an undisturbed run\n  cure: train a new run, "
            "with init_from to begin with these weights"
        )


def _last_step_was_skipped(manifest: Manifest) -> bool:
    """Whether the last step before the checkpoint changed nothing, as its loss or its norm was not finite."""
    found = [manifest.metrics.get(name) for name in ("loss", "norm")]
    return any(isinstance(value, float) and not math.isfinite(value) for value in found)


def check_kept_state(manifest: Manifest) -> None:
    """Raises `CheckpointError` for state that was there when the checkpoint was saved, and that it lacks.

    Checkpoints of earlier formats do not say what there was.
    """
    kept: KeptState = manifest.kept if manifest.kept is not None else {}
    saved = {(entry.name, entry.kind.name) for entry in manifest.entries if entry.kind.kind == OPTIMIZER}
    lacking = [(name, key) for name in manifest.shapes for key in kept.get(name, ()) if (name, key) not in saved]
    if lacking:
        (name, key), more = lacking[0], f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise CheckpointError(
            f"checkpoint {manifest.checkpoint} lacks {key!r} of {name}, which the optimizer had when it was saved{more}: "
            "the run cannot go on from it",
            cure=f"use another checkpoint; or begin a new run with its weights: init_from={manifest.checkpoint}",
        )


def describe_tensor_form(dtype: str, shape: Sequence[int], is_shape_fixed: bool) -> str:
    """What a tensor is, as text: its dtype and shape, or number of dims."""
    return f"{dtype} of shape {list(shape)}" if is_shape_fixed else f"{dtype} of {len(shape)} dims"


def describe_shared(pattern: str, key: StateKey) -> str:
    """State that parameters share, in words."""
    return f"{key.name!r} of the group {pattern!r}" if key.kind == GROUP else f"the attribute {key.name!r}"


def _not_of_this(manifest: Manifest, what: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {manifest.checkpoint} is none of this optimizer: it {what}",
        cure=f"use another checkpoint; or begin a new run with its weights: init_from={manifest.checkpoint}",
    )
