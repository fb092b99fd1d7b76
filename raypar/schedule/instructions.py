"""The instructions of schedules and programs, and the properties that each class of them declares.

A *schedule* is a tuple with one order of `Compute` instructions per worker. `lower.py` turns it into *programs*, which add
communication, reduction, vote, optimizer step and frees. Instructions are frozen, carry stage and microbatch, and have a
short text (`1F0`).

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
"""The content of a message: values along an edge, or gradients of a relay, which go from a later stage to an earlier one."""
Bundle = tuple[MessageKind, int, int, int]
"""(kind, earlier stage, later stage, microbatch): the values of one edge, or the gradients of one relay."""
Role = Literal["compute", "communication", "release", "reduction", "step"]
"""`communication`: one end of a message. `release`: frees memory. `reduction`: per stage and step. `step`: once per step."""
Transfer = Literal["", "write", "read"]
"""What a worker does beside its compute: it writes offloaded activations, or reads them."""
Cost = Literal["forward", "recompute", "input", "weight", "gather", "reduce", "step"]
"""A time in `SimulationCosts`: per stage and microbatch, but `gather` per stage and gather, `reduce` per stage and step, `step`
per step."""

# Results that instructions make. Edges carry values to later stages, relays gradients of a stage's inputs to earlier ones.
VALUES: Final = "values"
INPUT_GRADIENTS: Final = "input gradients"
WEIGHT_GRADIENTS: Final = "weight gradients"
# Memory that a stage keeps for a microbatch from one instruction to another.
ACTIVATIONS: Final = "activations"
KEPT_INPUTS: Final = "kept inputs"
RESIDENT: Final = "resident"
FETCHED: Final = "fetched"
STASH: Final = "stash"
WRITTEN: Final = "written"
"""No kept memory: what is written of a microbatch whose activations are offloaded."""
UNOFFLOADED: Final = "unoffloaded"
"""No kept memory: what all activations of such a microbatch would take."""

KEPT_SIZE: dict[str, int] = {ACTIVATIONS: 1, KEPT_INPUTS: 0, RESIDENT: 0, FETCHED: 0, STASH: 1}
"""Kind of kept memory -> its size, in activations of one microbatch, where no bytes are known.

The stash, which a split backward pass keeps for the weight gradients, is as large as all that the forward has saved; to compute
activations again does not make it smaller. Kept inputs of recomputed layers, and what is resident of offloaded ones, are small
beside activations, and count 0. `FETCHED` is there inside a backward alone: what that reads of offloaded activations, beside
what was there when it began (`ACTIVATIONS`).
"""


@dataclass(frozen=True, slots=True)
class DrawingStyle:
    """The appearance of a class of instructions in pictures.

    The colours are Okabe and Ito's (2008), told apart with every kind of colour vision; slightly muted for large areas.
    """

    colour: str
    """Colour of its boxes."""
    legend: str
    """Its name in legends."""
    category: str
    """Its category in Chrome traces."""


_COSTS_WITH_WEIGHTS: frozenset[Cost] = frozenset({"forward", "recompute", "input"})
"""What costs such a time computes with parameters."""


class Instruction:
    """The base of all instructions: the properties that every class of them declares.

    `allocates` and `frees` alone say what a step keeps in memory. Simulator, validator, memory sheet and traces count by them,
    and lowering places each `FreeActivations`, which the interpreter executes, by them.
    """

    __slots__ = ()

    letter: ClassVar[str]
    """The instruction's name in programs, schedule files and pictures: one capital for all that takes time."""
    role: ClassVar[Role]
    """What kind of work it is."""
    cost: ClassVar[tuple[Cost, ...]] = ()
    """The simulator's costs that it takes, one after the other; empty: no time is predicted for it."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Results that must exist before: values of the edges into the stage, input gradients of the relays to it, and whatever
    else the stage itself has made or keeps."""
    makes: ClassVar[tuple[str, ...]] = ()
    """Results that it makes for others; each is made once for a stage and microbatch."""
    allocates: ClassVar[tuple[str, ...]] = ()
    """Memory that the stage keeps for the microbatch from now on, by the names in `KEPT_SIZE`."""
    frees: ClassVar[tuple[str, ...]] = ()
    """Memory that the stage no longer keeps for the microbatch afterwards."""
    transfer: ClassVar[Transfer] = ""
    """What goes on beside what follows it. What needs activations waits for those that are read."""
    drawing: ClassVar[DrawingStyle | None] = None
    """Its appearance in pictures; None if it takes no time that a picture could show."""

    results: ClassVar[tuple[str, ...]] = ()
    """Derived: everything made or allocated, which other instructions may need."""
    held_change: ClassVar[int] = 0
    """Derived: the change of the memory that the stage keeps, in activations of a microbatch."""
    last_use: ClassVar[bool] = False
    """Derived: whether the stage keeps no memory for the microbatch afterwards."""
    needs_weights: ClassVar[bool] = False
    """Derived: whether it computes with the stage's parameters, which must be whole then; weight gradients do not."""
    runs_beside: ClassVar[bool] = False
    """Derived: whether its time goes by beside that of compute."""

    def __init_subclass__(cls) -> None:
        cls.results = (*cls.makes, *cls.allocates)
        cls.held_change = sum(KEPT_SIZE[kept] for kept in cls.allocates) - sum(KEPT_SIZE[kept] for kept in cls.frees)
        cls.last_use = bool(cls.frees) and not cls.allocates
        cls.needs_weights = not _COSTS_WITH_WEIGHTS.isdisjoint(cls.cost)
        cls.runs_beside = cls.role in ("communication", "reduction") or cls.transfer == "read"


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """An instruction that computes one microbatch on one stage; schedules consist of these."""

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
class CheckpointedForward(Compute):
    """Run the stage on one microbatch. Drop the activations of its recomputed layers and keep what these read.

    Activation checkpointing (Chen et al. 2016, arXiv:1604.06174); `recomputation.py` replaces `Forward` by it.
    """

    letter = "C"
    cost = ("forward",)
    needs = (VALUES,)
    makes = (VALUES,)
    allocates = (KEPT_INPUTS,)
    frees = ()
    drawing = DrawingStyle("#7CC0EA", "forward, keeps inputs only (C)", "checkpointed forward")


@dataclass(frozen=True, slots=True)
class Recompute(Compute):
    """Recompute the dropped activations of one microbatch. Waits for no other worker, so it may fill a bubble."""

    letter = "R"
    cost = ("recompute",)
    needs = (KEPT_INPUTS,)
    makes = ()
    allocates = (ACTIVATIONS,)
    frees = (KEPT_INPUTS,)
    drawing = DrawingStyle("#E8DC52", "recomputation (R)", "recompute")


@dataclass(frozen=True, slots=True)
class OffloadedForward(Compute):
    """Run the stage on one microbatch. The activations of its offloaded layers are written out of memory, in the background.

    Offloading (Rhu et al. 2016, arXiv:1602.08124); `offloading.py` replaces `Forward` by it.
    """

    letter = "U"
    cost = ("forward",)
    needs = (VALUES,)
    makes = (VALUES,)
    allocates = (RESIDENT,)
    frees = ()
    transfer = "write"
    drawing = DrawingStyle("#56B4C2", "forward, activations offloaded (U)", "offloaded forward")


@dataclass(frozen=True, slots=True)
class OffloadedCheckpointedForward(Compute):
    """As `OffloadedForward`, but drops the activations of recomputed layers, as `CheckpointedForward` does."""

    letter = "J"
    cost = ("forward",)
    needs = (VALUES,)
    makes = (VALUES,)
    allocates = (RESIDENT,)
    frees = ()
    transfer = "write"
    drawing = DrawingStyle("#86CBD4", "forward, activations offloaded or dropped (J)", "offloaded checkpointed forward")


@dataclass(frozen=True, slots=True)
class Fetch(Compute):
    """Begin to read what the backward of one microbatch needs first of its offloaded activations. The backward waits for it,
    and reads the rest itself, one layer ahead."""

    letter = "H"
    cost = ()
    needs = (RESIDENT,)
    makes = ()
    allocates = (ACTIVATIONS,)
    frees = (RESIDENT,)
    transfer = "read"
    drawing = DrawingStyle("#8A6FB0", "fetch of offloaded activations (H)", "fetch")


@dataclass(frozen=True, slots=True)
class FetchKeptInputs(Compute):
    """As `Fetch`, after an `OffloadedCheckpointedForward`: what recomputed layers read is there, and `Recompute` follows."""

    letter = "K"
    cost = ()
    needs = (RESIDENT,)
    makes = ()
    allocates = (KEPT_INPUTS,)
    frees = (RESIDENT,)
    transfer = "read"
    drawing = DrawingStyle("#B9A5D3", "fetch before recomputation (K)", "fetch kept inputs")


@dataclass(frozen=True, slots=True)
class Backward(Compute):
    """Run the whole backward pass of one microbatch: gradients of the inputs (I) and of the weights (W)."""

    letter = "B"
    cost = ("input", "weight")
    needs = (ACTIVATIONS, INPUT_GRADIENTS)
    makes = (INPUT_GRADIENTS, WEIGHT_GRADIENTS)
    allocates = ()
    frees = (ACTIVATIONS,)
    drawing = DrawingStyle("#F0A73A", "backward (B)", "backward")


@dataclass(frozen=True, slots=True)
class BackwardInput(Compute):
    """Compute gradients of the stage's inputs only (B in the zero-bubble paper, arXiv:2401.10241); what W needs is kept.

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
    """Compute gradients of the stage's weights, after the `BackwardInput` of the microbatch."""

    letter = "W"
    cost = ("weight",)
    needs = (STASH,)
    makes = (WEIGHT_GRADIENTS,)
    allocates = ()
    frees = (STASH,)
    drawing = DrawingStyle("#2FA584", "weight gradient (W)", "backward weight")


def _message_letter(kind: MessageKind) -> str:
    """`F` for values, `B` for gradients: messages print as those of PyTorch's schedules do (`1RECV_F0`)."""
    return {"activation": "F", "gradient": "B"}[kind]


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
        """The bundle that the message carries."""
        raise NotImplementedError

    def ends(self, rank: int) -> tuple[int, int]:
        """(sender, receiver) of the message if `rank` posts this end."""
        return (rank, self.peer) if self.sends else (self.peer, rank)


@dataclass(frozen=True, slots=True)
class Send(Communication):
    """Post the bundle of the edge (an activation) or the relay (a gradient) from `stage` to `to_stage` for one microbatch.

    `stage` is the sender's stage, `to_stage` the receiver's, `peer` the receiver's rank.
    """

    stage: int
    microbatch: int
    to_stage: int
    peer: int
    kind: MessageKind

    letter = "SEND"
    sends = True

    @property
    def bundle(self) -> Bundle:
        """The bundle that the message carries."""
        if self.kind == "activation":
            return (self.kind, self.stage, self.to_stage, self.microbatch)
        return (self.kind, self.to_stage, self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}_{_message_letter(self.kind)}{self.microbatch}>{self.to_stage}@{self.peer}"


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

    letter = "RECV"
    sends = False

    @property
    def bundle(self) -> Bundle:
        """The bundle that the message carries."""
        if self.kind == "activation":
            return (self.kind, self.from_stage, self.stage, self.microbatch)
        return (self.kind, self.stage, self.from_stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}_{_message_letter(self.kind)}{self.microbatch}<{self.from_stage}@{self.peer}"


@dataclass(frozen=True, slots=True)
class FreeActivations(Instruction):
    """Free the memory of a microbatch that the stage does not need any more."""

    stage: int
    microbatch: int

    letter = "X"
    role = "release"

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class ServeParameters(Instruction):
    """Post what one reader asks for in this pass: `count` times the parameters of the stage that this worker owns.

    `reader`: the rank of another replica that does not hold them. It is served when it asks, without this worker's doing.
    """

    stage: int
    reader: int
    count: int

    letter = "SERVE"
    role = "communication"

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}_{self.count}@{self.reader}"


@dataclass(frozen=True, slots=True)
class Gather(Instruction):
    """Have memory for the stage's whole parameters, and ask their owners for them. The next use waits for their arrival."""

    stage: int

    letter = "A"
    role = "communication"
    cost = ("gather",)
    drawing = DrawingStyle("#C8B400", "gather of parameters", "gather")

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}"


@dataclass(frozen=True, slots=True)
class Release(Instruction):
    """Free the memory of the stage's whole parameters, which a later use gathers again."""

    stage: int

    letter = "Z"
    role = "release"

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}"


@dataclass(frozen=True, slots=True)
class ReduceGradients(Instruction):
    """Reduce the stage's gradients over its replicas (canonically or fast), bucket by bucket.

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
    """An instruction that every worker executes once in a step, after all compute and reductions."""

    __slots__ = ()

    role = "step"

    def __str__(self) -> str:
        return self.letter


@dataclass(frozen=True, slots=True)
class ExchangeTies(OncePerStep):
    """Send the reduced gradients of parameters that several stages use to every holder, which adds them last layer first."""

    letter = "T"
    drawing = DrawingStyle("#5E4B8B", "gradients of tied parameters", "ties")


@dataclass(frozen=True, slots=True)
class ExchangeBuffers(OncePerStep):
    """Give the other replicas of each stage what forward has written into buffers: running statistics, and by policy others."""

    letter = "S"
    drawing = DrawingStyle("#7A6A4F", "statistics and other written buffers", "buffers")


@dataclass(frozen=True, slots=True)
class ExchangeVotes(OncePerStep):
    """Gather the ready flags, losses, counts and norm pieces of all workers on every worker: the step's last exchange.

    Predictions count the whole end of the step here.
    """

    letter = "V"
    cost = ("step",)
    drawing = DrawingStyle("#8C8C8C", "end of step: all workers agree", "vote")


@dataclass(frozen=True, slots=True)
class OptimizerStep(OncePerStep):
    """Scale, clip and apply the gradients; only after all votes have arrived."""

    letter = "O"
    drawing = DrawingStyle("#4D4D4D", "optimizer step", "optimizer")


INSTRUCTIONS: dict[str, type[Instruction]] = {
    kind.letter: kind
    for kind in (
        Forward,
        CheckpointedForward,
        Recompute,
        OffloadedForward,
        OffloadedCheckpointedForward,
        Fetch,
        FetchKeptInputs,
        Backward,
        BackwardInput,
        BackwardWeight,
        Send,
        Recv,
        FreeActivations,
        ServeParameters,
        Gather,
        Release,
        ReduceGradients,
        ExchangeTies,
        ExchangeBuffers,
        ExchangeVotes,
        OptimizerStep,
    )
}
"""Letter -> class of instructions, for all classes."""

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
    """Whether an instruction in the list puts weight gradients off, which its stage must be able to do."""
    return any(STASH in i.allocates for i in order)


def drawing_style(kind: type[Instruction]) -> DrawingStyle:
    """The drawing style of a class of instructions. Raises `TypeError` if it has none."""
    if kind.drawing is None:
        raise TypeError(f"{kind.__name__} takes no time, so no picture shows it")
    return kind.drawing


def letter_of_producer(what: str) -> str:
    """Letter of the first class of instructions that makes or allocates `what`."""
    return next(letter for letter, kind in INSTRUCTIONS.items() if what in kind.results)
