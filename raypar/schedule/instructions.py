"""The instructions of a schedule, and what each class of them declares about itself.

A *schedule* is a tuple with one list of `Compute` instructions per worker. `lower` turns it into *programs*, which add
communication, reduction, vote, optimizer step and frees. Instructions are frozen, carry stage and microbatch, and print
short (`1F0`).

Each class declares its letter, its role, its cost, what it needs, makes, allocates and frees, and how it is drawn. Lowering,
validator, simulator, pictures and planner read these declarations. The interpreter adds one rule per class. To add an
instruction: a class in this file, its name in `INSTRUCTIONS`, and a rule in `worker/step/interpreter.py`
(`tests/unit/test_instructions.py` adds two).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

MessageKind = Literal["activation", "gradient"]
"""What a message carries: values along an edge, or their gradients against it."""
Bundle = tuple[MessageKind, int, int, int]
"""(kind, producer's stage, consumer's stage, microbatch): the values of one edge, or their gradients."""
Role = Literal["compute", "communication", "release", "reduction", "step"]
"""Compute of one microbatch; one end of a message; memory given back; once a stage and step; once at the end of a step."""
Cost = Literal["forward", "input", "weight", "reduce", "step"]
"""Which of the simulator's `SimulationCosts` an instruction takes. Of a stage and microbatch; `reduce` of a stage, `step` of
the step."""

# What instructions make. Edges carry values to the stages behind, and gradients of a stage's inputs to the stages before.
VALUES: Final = "values"
INPUT_GRADIENTS: Final = "input gradients"
WEIGHT_GRADIENTS: Final = "weight gradients"
# What a stage keeps of a microbatch from one instruction to another.
ACTIVATIONS: Final = "activations"
STASH: Final = "stash"

KEPT_SIZE: dict[str, int] = {ACTIVATIONS: 1, STASH: 1}
"""Size of what a stage keeps of a microbatch, in activations of that microbatch.

The stash, which a split backward keeps for the weight gradients, is as large as all that the forward has saved.
"""


@dataclass(frozen=True, slots=True)
class DrawingStyle:
    """How pictures show a class of instructions. `colour`: of its boxes; `category`: in Chrome traces.

    The colours are Okabe and Ito's (2008), told apart with every kind of colour vision; slightly muted for large areas.
    """

    colour: str
    legend: str
    category: str


class Instruction:
    """What every class of instructions declares.

    `allocates` and `frees` are the only statement of what a step keeps in memory. Simulator, validator, memory sheet and traces
    count by them, and `lower` places each `FreeActivations`, which the interpreter executes, by them.
    """

    __slots__ = ()

    letter: ClassVar[str]
    """The instruction's name in programs, schedule files and pictures."""
    role: ClassVar[Role]
    """What kind of work it is."""
    cost: ClassVar[tuple[Cost, ...]] = ()
    """Which of the simulator's costs it takes, all of them one after the other; empty: nothing that is predicted."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What must be there before: values of the edges into the stage, input gradients of those out of it; anything else
    is what the stage itself has made or keeps."""
    makes: ClassVar[tuple[str, ...]] = ()
    """What it makes for others; each is made once for a stage and microbatch."""
    allocates: ClassVar[tuple[str, ...]] = ()
    """What the stage keeps of the microbatch from here on, by the names in `KEPT_SIZE`."""
    frees: ClassVar[tuple[str, ...]] = ()
    """What the stage no longer keeps of the microbatch afterwards."""
    drawing: ClassVar[DrawingStyle | None] = None
    """How it is drawn; None where it takes no time that a picture could show."""

    results: ClassVar[tuple[str, ...]] = ()
    """Derived: what others may need, made or allocated."""
    held_change: ClassVar[int] = 0
    """Derived: by how much it changes what the stage keeps, in activations of a microbatch."""
    last_use: ClassVar[bool] = False
    """Derived: whether the stage keeps nothing of the microbatch afterwards."""

    def __init_subclass__(cls) -> None:
        cls.results = (*cls.makes, *cls.allocates)
        cls.held_change = sum(KEPT_SIZE[kept] for kept in cls.allocates) - sum(KEPT_SIZE[kept] for kept in cls.frees)
        cls.last_use = bool(cls.frees) and not cls.allocates


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """Computes one microbatch on one stage: what a schedule consists of."""

    stage: int
    microbatch: int

    role = "compute"

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Forward(Compute):
    """Run the stage on one microbatch; its activations live until the matching `Backward` or `BackwardWeight`."""

    letter = "F"
    cost = ("forward",)
    needs = (VALUES,)
    makes = (VALUES,)
    allocates = (ACTIVATIONS,)
    frees = ()
    drawing = DrawingStyle("#2B7BBA", "forward (F)", "forward")


@dataclass(frozen=True, slots=True)
class Backward(Compute):
    """The whole backward of one microbatch: gradient of the inputs (I) and of the weights (W)."""

    letter = "B"
    cost = ("input", "weight")
    needs = (ACTIVATIONS, INPUT_GRADIENTS)
    makes = (INPUT_GRADIENTS, WEIGHT_GRADIENTS)
    allocates = ()
    frees = (ACTIVATIONS,)
    drawing = DrawingStyle("#F0A73A", "backward (B)", "backward")


@dataclass(frozen=True, slots=True)
class BackwardInput(Compute):
    """Gradient of the stage's inputs only (B in the zero-bubble paper, arXiv:2401.10241); what W needs is kept.

    A layer whose backward cannot be split computes its weight gradients here, too.
    """

    letter = "I"
    cost = ("input",)
    needs = (ACTIVATIONS, INPUT_GRADIENTS)
    makes = (INPUT_GRADIENTS,)
    allocates = (STASH,)
    frees = (ACTIVATIONS,)
    drawing = DrawingStyle("#E0702F", "input gradient (I)", "backward input")


@dataclass(frozen=True, slots=True)
class BackwardWeight(Compute):
    """Gradient of the stage's weights, after its `BackwardInput`."""

    letter = "W"
    cost = ("weight",)
    needs = (STASH,)
    makes = (WEIGHT_GRADIENTS,)
    allocates = ()
    frees = (STASH,)
    drawing = DrawingStyle("#2FA584", "weight gradient (W)", "backward weight")


class Communication(Instruction):
    """One end of a message between two workers. Posting it does not block compute."""

    __slots__ = ()

    stage: int
    microbatch: int
    peer: int
    kind: MessageKind

    role = "communication"
    sends: ClassVar[bool]

    @property
    def bundle(self) -> Bundle:
        """What moves."""
        raise NotImplementedError

    def ends(self, rank: int) -> tuple[int, int]:
        """(sender, receiver), of the message that `rank` posts."""
        return (rank, self.peer) if self.sends else (self.peer, rank)


@dataclass(frozen=True, slots=True)
class Send(Communication):
    """Post the bundle of edge (stage, to_stage) (an activation) or (to_stage, stage) (a gradient) for one microbatch.

    `stage` is the sender's stage, `to_stage` the receiver's, `peer` the receiver's rank.
    """

    stage: int
    microbatch: int
    to_stage: int
    peer: int
    kind: MessageKind

    letter = "S"
    sends = True

    @property
    def bundle(self) -> Bundle:
        """What moves."""
        if self.kind == "activation":
            return (self.kind, self.stage, self.to_stage, self.microbatch)
        return (self.kind, self.to_stage, self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.kind[0].upper()}{self.microbatch}>{self.to_stage}@{self.peer}"


@dataclass(frozen=True, slots=True)
class Recv(Communication):
    """Post the receive that matches a `Send`; `stage` is the receiver's stage, `from_stage` and `peer` the sender's.

    The compute instruction that uses the bundle waits for it; posting does not.
    """

    stage: int
    microbatch: int
    from_stage: int
    peer: int
    kind: MessageKind

    letter = "R"
    sends = False

    @property
    def bundle(self) -> Bundle:
        """What moves."""
        if self.kind == "activation":
            return (self.kind, self.from_stage, self.stage, self.microbatch)
        return (self.kind, self.stage, self.from_stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.kind[0].upper()}{self.microbatch}<{self.from_stage}@{self.peer}"


@dataclass(frozen=True, slots=True)
class FreeActivations(Instruction):
    """Give back the memory of a microbatch of which the stage keeps nothing any longer."""

    stage: int
    microbatch: int

    letter = "X"
    role = "release"

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class ReduceGradients(Instruction):
    """Canonical (or fast) reduction of the stage's gradients over its replicas, bucket by bucket.

    Placed right after the stage's last weight-gradient instruction; buckets are posted from inside that instruction
    as they become ready, so that they overlap with the rest of the backward pass.
    """

    stage: int

    letter = "G"
    role = "reduction"
    cost = ("reduce",)
    needs = (WEIGHT_GRADIENTS,)
    drawing = DrawingStyle("#B86A9B", "gradient reduction", "reduction")

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}"


class OncePerStep(Instruction):
    """Once a step and worker, after all compute and reductions."""

    __slots__ = ()

    role = "step"

    def __str__(self) -> str:
        return self.letter


@dataclass(frozen=True, slots=True)
class ExchangeTies(OncePerStep):
    """Add the reduced gradients of parameters used by several layers, in layer order, and give the sum to every holder."""

    letter = "T"
    drawing = DrawingStyle("#8C8C8C", "tied parameters", "ties")


@dataclass(frozen=True, slots=True)
class ExchangeVotes(OncePerStep):
    """The step's last exchange: ready flags, losses, counts and norm pieces of all workers, gathered by all.

    Predictions count all of the step's end here.
    """

    letter = "V"
    cost = ("step",)
    drawing = DrawingStyle("#8C8C8C", "vote", "vote")


@dataclass(frozen=True, slots=True)
class OptimizerStep(OncePerStep):
    """Scale once, clip, apply; only after the whole vote."""

    letter = "O"
    drawing = DrawingStyle("#4D4D4D", "optimizer step", "optimizer")


INSTRUCTIONS: dict[str, type[Instruction]] = {
    kind.letter: kind
    for kind in (
        Forward,
        Backward,
        BackwardInput,
        BackwardWeight,
        Send,
        Recv,
        FreeActivations,
        ReduceGradients,
        ExchangeTies,
        ExchangeVotes,
        OptimizerStep,
    )
}
"""Letter -> class, of all that there are."""

Order = tuple[Compute, ...]
"""One worker's compute instructions."""
Schedule = tuple[Order, ...]
"""One `Order` per worker, indexed by rank."""
Program = tuple[Instruction, ...]
"""One worker's lowered instructions for one step."""


def compute_classes() -> tuple[type[Compute], ...]:
    """All classes of compute instructions."""
    return tuple(kind for kind in INSTRUCTIONS.values() if issubclass(kind, Compute))


def compute_instructions(order: Iterable[Instruction]) -> list[Compute]:
    """The compute instructions of a list, in order."""
    return [i for i in order if isinstance(i, Compute)]


def splits_backward(order: Iterable[Instruction]) -> bool:
    """Whether anything in the list puts weight gradients off, so that stages must be able to."""
    return any(STASH in i.allocates for i in order)


def drawing_style(kind: type[Instruction]) -> DrawingStyle:
    """How a class of instructions is drawn."""
    if kind.drawing is None:
        raise TypeError(f"{kind.__name__} takes no time, so no picture shows it")
    return kind.drawing


def letter_of_maker(what: str) -> str:
    """Letter of the instruction that makes or allocates something; of the first class, where several do."""
    return next(letter for letter, kind in INSTRUCTIONS.items() if what in kind.results)
