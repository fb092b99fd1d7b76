"""The instructions of a schedule: frozen, carrying stage and microbatch, printing short (`1F0`).

A *schedule* is a tuple with one list of `Compute` instructions per worker. `lower` turns it into *programs*, which add
communication, reduction, vote, optimizer step and frees. Validator, simulator, pictures, trace and interpreter all read these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["activation", "gradient"]


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage on one microbatch; its activations live until the matching `Backward` or `BackwardWeight`."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}F{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Backward:
    """The whole backward of one microbatch: gradient of the inputs (I) and of the weights (W)."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}B{self.microbatch}"


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Gradient of the stage's inputs only (B in the zero-bubble paper, arXiv:2401.10241); what W needs is kept."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}I{self.microbatch}"


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Gradient of the stage's weights, after its `BackwardInput`."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}W{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Send:
    """Post the bundle of edge (stage, to_stage) (an activation) or (to_stage, stage) (a gradient) for one microbatch.

    `stage` is the sender's stage, `to_stage` the receiver's, `peer` the receiver's rank. Does not block compute.
    """

    stage: int
    microbatch: int
    to_stage: int
    peer: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.stage}S{self.kind[0].upper()}{self.microbatch}>{self.to_stage}@{self.peer}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive that matches a `Send`; `stage` is the receiver's stage, `from_stage` and `peer` the sender's.

    The compute instruction that uses the bundle waits for it; posting does not.
    """

    stage: int
    microbatch: int
    from_stage: int
    peer: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.stage}R{self.kind[0].upper()}{self.microbatch}<{self.from_stage}@{self.peer}"


@dataclass(frozen=True, slots=True)
class Free:
    """The stage's activations of this microbatch have had their last use."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}X{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Canonical (or fast) reduction of the stage's gradients over its replicas, bucket by bucket.

    Placed right after the stage's last weight-gradient instruction; buckets are posted from inside that instruction
    as they become ready, so that they overlap with the rest of the backward pass.
    """

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}G"


@dataclass(frozen=True, slots=True)
class ExchangeTies:
    """Add the reduced gradients of parameters used by several layers, in layer order, and give the sum to every holder."""

    def __str__(self) -> str:
        return "T"


@dataclass(frozen=True, slots=True)
class Vote:
    """The step's last exchange: ready flags, losses, counts and norm pieces of all workers, gathered by all (DESIGN 4.7)."""

    def __str__(self) -> str:
        return "V"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Scale once, clip, apply; only after the whole vote."""

    def __str__(self) -> str:
        return "O"


Compute = Forward | Backward | BackwardInput | BackwardWeight
Communication = Send | Recv
Instruction = Compute | Communication | Free | Reduce | ExchangeTies | Vote | OptimizerStep

Order = tuple[Compute, ...]
"""One worker's compute instructions."""
Schedule = tuple[Order, ...]
"""One `Order` per worker, indexed by rank."""
Program = tuple[Instruction, ...]
"""One worker's lowered instructions for one step."""
