"""What workers ask the data process of their node that reads a stream, and what it answers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

from raypar.worker.data.microbatch_stream_positions import EpochMark, StreamCursor
from raypar.worker.process.environment_and_signals_guard import StateWarnings


class Opening(NamedTuple):
    """How a worker would open the stream."""

    epochs: Mapping[int, Collection[EpochMark]]
    """Number of a source's stream -> where epochs begin, as workers have found them."""
    cursors: Mapping[int, StreamCursor]
    """Likewise a place before the first sample that is asked for; empty: read from where an epoch begins."""
    seen: Mapping[int, bytes] = {}
    """Position -> `digest_of_sample` of samples that the worker was given before: a cursor that leads to others is not used."""


class SampleRequest(NamedTuple):
    """What a worker asks for."""

    position: int
    """Position in the stream of the first sample."""
    samples: int
    """How many samples are asked for."""
    known: Mapping[int, int]
    """Number of a source's stream -> the last epoch of which the worker knows where it begins."""
    from_epochs: bool = False
    """Whether no cursor may have led to the samples: those that the worker knows did not lead there."""
    opening: Opening | None = None
    """How to open the stream; None at first: most of the time it is open."""


class FedSource(NamedTuple):
    """What workers are told of a data set; see `StreamSource`."""

    keeps_place: bool = False
    """Whether the data set tells its state, and can begin with it."""
    why_places_are_read_for: str = ""
    """Why a place in the stream is found by reading samples, and the cure."""


class FedSamples(NamedTuple):
    """The answer."""

    contents: tuple[bytes, ...]
    """Samples from the wanted one on, each as a pickle of ((epoch, index), sample); none if they are not there yet."""
    progress: int
    """Grows while the stream is read."""
    skipped: int
    """Samples that were read to find the place, by this pass over the stream."""
    epochs: Mapping[int, Mapping[int, int]]
    """Where epochs begin of which the worker does not know it."""
    cursors: Mapping[int, StreamCursor]
    """A place from which the stream can be read, before or behind these samples; empty if the data set keeps none."""
    sources: Mapping[int, FedSource]
    """Number of a source's stream -> what is known of its data set."""
    warnings: StateWarnings
    """Lines about process state that the data set has left changed."""


def digest_of_sample(content: bytes) -> bytes:
    """16 bytes that tell a pickled sample from others."""
    return hashlib.blake2b(content, digest_size=16).digest()
