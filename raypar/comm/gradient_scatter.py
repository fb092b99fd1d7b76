"""Reduction of gradients that are never whole: each goes to its owners as it leaves a layer (`plan.gradients: scatter`).

A message is one microbatch's gradients of one bucket. Its replica fills a slot of a bounded pool, and each owner gets its
segment of that. An owner adds what a round of microbatches has brought where it has arrived, then to its open sums
(`comm/owner_sums.py`), and acknowledges the messages: then both sides' slots are free. So a replica that is ahead of the others
waits, inside its backward pass, until they have come as far.

All replicas send in the same order: round by round, in each of them bucket by bucket. A message needs only messages that come
before it, or with it in its bucket and round, so replicas that have begun the same rounds never wait for each other in a circle
(`schedule/validate.py` proves that they begin them). That needs a replica that waits for a slot to wait for no later message
than the ones that free it: which these are follows from the order alone, not from what other threads have added up so far.
Additions run in the thread that completes a round: an owner that computes, or waits for something else, holds nobody up.

Where every replica needs all totals (ZeRO stage 0), the owners send them to the others at the end of the step.

An undefined gradient travels as -0.0 (`comm/gradient_reduction.py`).
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from raypar.comm.blocking_code_as_routine import wait_for_handle
from raypar.comm.bucket_layout import BucketLayout, BucketPart, BucketRoom, Runs, ShapeAndDtype, bucket_layouts
from raypar.comm.buffer_pool import ALIGNED, CPU
from raypar.comm.gradient_reduction import BUCKET_BYTES, POOL_BYTES, SLOTS
from raypar.comm.gradient_sums import SubtreeSums
from raypar.comm.operation_phase import OperationPhase, Phases
from raypar.comm.owner_sums import BucketFold, Run, RunSums, own_parts
from raypar.comm.parameter_marks import ParameterMarks
from raypar.comm.routine import Routine, RoutineWait, StreamWaits
from raypar.comm.transport import Handle, Transport
from raypar.errors import CommError, CommTimeout
from raypar.plan.gradient_scatter import StackStep, rounds_of
from raypar.torch_compat.multi_tensor import copy_all

FAILURE_POLL_S = 1.0
"""How often a replica that waits for one message looks whether another one, or an addition, has failed."""


class ScatterReduction:
    """The reduction of one stage, which has replicas.

    `group`: ranks of the replicas, ascending; `replica_of`: by microbatch, its replica; `steps`: by microbatch, what is done
    with its gradient (`plan.gradient_scatter`); `parameters`: (shape, dtype) of every use of a parameter, in layer order;
    `owners`: by use, the runs of which each replica gets totals; `gathers`: whether all replicas get all totals in the end,
    each element having one owner. `channel`: one that no other reduction of the group uses; `pool_bytes`: memory of all slots;
    `timeout_s`: of a wait for a slot.
    """

    parameters_to_mark: Callable[[], Collection[int]] | None = None
    """See `GradientReduction`; called when the last microbatch's gradients begin to be handed over."""
    marked_parameters: frozenset[int] = frozenset()
    """See `GradientReduction`."""
    defined_here: frozenset[int] = frozenset()
    """After `finish`: indices of parameters of which this replica has a gradient."""
    owned_totals: dict[int, list[Tensor]]
    """After `finish`: parameter that replicas own in runs -> the totals of this replica's runs of it, flat."""
    stream_waits: StreamWaits
    """Not used: everything is in host memory."""
    waited_ns: int
    """How long backward passes of this step have waited for slots."""

    def __init__(
        self,
        transport: Transport,
        *,
        group: Sequence[int],
        replica_of: Sequence[int],
        steps: Sequence[StackStep],
        parameters: Sequence[ShapeAndDtype],
        owners: Sequence[Sequence[Runs]],
        gathers: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        channel: int = 0,
        pool_bytes: int = POOL_BYTES,
        timeout_s: float | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.transport, self.group, self.channel, self.timeout_s = transport, tuple(group), channel, timeout_s
        self.device = device
        self.own_index = self.group.index(transport.rank)
        self.parameters = tuple(parameters)
        self.steps, self.rounds = steps, rounds_of(replica_of)
        self.microbatches = [[m for m, r in enumerate(replica_of) if r == replica] for replica in range(len(self.group))]
        """By replica: its microbatches."""
        self.replica_of, self.gathers = tuple(replica_of), gathers
        self.marks = ParameterMarks(transport, self.group, channel, len(self.parameters))
        """Which parameters replicas mark."""
        self.owned: list[Runs] = [runs[self.own_index] for runs in owners]
        """By parameter: the runs of which this replica adds up totals."""
        self.ahead, self.layouts = self._cut_into_buckets(owners, bucket_bytes, pool_bytes)
        self.parts = [own_parts(layout, self.own_index, self.owned) for layout in self.layouts]
        self.buckets_of: list[list[int]] = [[] for _ in self.parameters]
        """By parameter: the buckets that have a part of it."""
        for number, layout in enumerate(self.layouts):
            for index in layout.indices:
                self.buckets_of[index].append(number)
        self.kept = [number for number, layout in enumerate(self.layouts) if segment_of(layout, self.own_index)[1]]
        """The buckets of which this replica owns anything."""
        others = [r for r in range(len(self.group)) if r != self.own_index]
        self.sending, self.receiving = self._make_slots(others)
        """The slots of messages that are sent, in turn; other replica -> those of its messages."""
        self.owned_totals, self.stream_waits, self.waited_ns = {}, StreamWaits(), 0
        self._step: ScatterStep | None = None
        """The step under way."""

    def _cut_into_buckets(
        self, owners: Sequence[Sequence[Runs]], bucket_bytes: int, pool_bytes: int
    ) -> tuple[int, list[BucketLayout]]:
        """(how many microbatches find room in the pool whole, the buckets)."""
        subtrees = (1,) * len(self.group)
        layouts = bucket_layouts(self.parameters, bucket_bytes, CPU, owners, room=BucketRoom(sys.maxsize, subtrees))
        others = len(self.group) - 1
        most = max(
            (
                sum(one.nbytes + others * segment_bytes(one, r) + 2 * len(self.group) * ALIGNED for one in layouts)
                for r in range(len(self.group))
            ),
            default=0,
        )
        ahead = min(pool_bytes // most, max(map(len, self.microbatches))) if most else 1
        if ahead:
            return ahead, layouts
        room = BucketRoom(pool_bytes // SLOTS, subtrees)
        return 0, bucket_layouts(self.parameters, bucket_bytes, CPU, owners, room=room)

    def _make_slots(self, others: Sequence[int]) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
        """The slots of messages that are sent, and by other replica of those that it sends."""
        sizes = [segment_bytes(self.layouts[number], self.own_index) for number in self.kept]
        return self._slots([one.nbytes for one in self.layouts]), {r: self._slots(sizes) for r in others}

    def _slots(self, sizes: Sequence[int]) -> list[Tensor]:
        """The slots of messages of these bytes, which come again with each microbatch: for whole microbatches, or `SLOTS`."""
        if self.ahead:
            return [_zeros(size) for _ in range(self.ahead) for size in sizes]
        return [_zeros(max(sizes, default=0)) for _ in range(SLOTS)]

    def start(self) -> None:
        """Begin a step. Results of the step before are no longer valid."""
        self.owned_totals, self.defined_here, self.waited_ns = {}, frozenset(), 0
        self._step = self._new_step()
        self._step.begin()
        self.marks.begin(self.parameters_to_mark)
        if not self.microbatches[self.own_index]:
            self.marks.post()

    def _new_step(self) -> ScatterStep:
        return _HostScatterStep(self)

    def submit_gradients(self, indices: Sequence[int], rows: SubtreeSums) -> None:
        """Hand over the gradients of some parameters in one microbatch m, `rows[(m, m + 1)][index]`; None: no gradient.

        Each parameter is handed over once for each microbatch, microbatch after microbatch. Waits for slots.
        """
        assert self._step is not None
        ((microbatch, _),) = rows
        row = rows[microbatch, microbatch + 1]
        if microbatch == self.microbatches[self.own_index][-1]:
            self.marks.post()
        self._step.submit(microbatch, {index: row[index] for index in indices})

    def poll(self) -> None:
        """Nothing: messages go on by themselves. Raises what one has failed with."""
        if self._step is not None:
            self._step.raise_failure()

    def finish(self) -> Routine[list[Tensor | None]]:
        """Wait for all gradients. Returns totals that are whole, by parameter; None where replicas own runs, of which
        `owned_totals` has this replica's."""
        step = self._step
        assert step is not None
        step.check_all_submitted()
        yield from step.end()
        self.defined_here = frozenset(step.defined)
        self.marked_parameters = yield from self.marks.of_all()
        self._step = None
        if self.gathers:
            return (yield from self._gather(step.sums))
        for index in range(len(self.parameters)):
            self.owned_totals[index] = [step.sums.total((index, number)) for number in range(len(self.owned[index]))]
        return [None] * len(self.parameters)

    def _gather(self, sums: RunSums) -> Routine[list[Tensor | None]]:
        """Each parameter's whole total: what each owner has of a bucket goes to all, bucket after bucket, in the slots."""
        totals = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.parameters]
        flat = [total.view(-1) for total in totals]
        under_way: deque[tuple[BucketLayout, Tensor, Handle]] = deque()

        def put_first() -> Routine[None]:
            layout, slot, handle = under_way.popleft()
            if not handle.done():
                what = f"totals of gradients, channel {self.channel}"
                yield RoutineWait(handle, what, on_stream=self.device != CPU)
                if self.device != CPU:
                    self.stream_waits.add(handle, what)
            with torch.no_grad():
                copy_all(
                    [flat[part.parameter][part.start : part.stop] for part in layout.parts],
                    [slot[part.offset : part.offset + part.stop - part.start] for part in layout.parts],
                )

        for number, (layout, parts) in enumerate(zip(self.layouts, self.parts, strict=True)):
            if len(under_way) == len(self.sending):
                yield from put_first()
            slot = self.sending[number % len(self.sending)][: layout.nbytes].view(layout.dtype)
            pieces = [slot[start:stop] for start, stop in layout.segments or ()]
            mine = pieces[self.own_index]
            if parts:  # a replica may own nothing of a bucket
                with torch.no_grad():
                    copy_all([mine[part.offset : part.offset + part.stop - part.start] for part in parts], sums.views(0, parts))
                sums.release(0, parts)
            handle = self.transport.all_gather(pieces, mine, group=self.group, channel=self.channel)
            under_way.append((layout, slot, handle))
        while under_way:
            yield from put_first()
        return list(totals)


class ScatterStep(ABC):
    """What one step has sent and added so far."""

    def __init__(self, reduction: ScatterReduction) -> None:
        self.reduction = reduction
        self.defined: set[int] = set()
        """Parameters of which this replica has a gradient."""
        runs: dict[Run, tuple[int, torch.dtype]] = {
            (index, number): (stop - start, dtype)
            for index, (_, dtype) in enumerate(reduction.parameters)
            for number, (start, stop) in enumerate(reduction.owned[index])
        }
        self.sums = RunSums(runs, reduction.device)
        self.folds = [BucketFold(self.sums, parts, reduction.steps, reduction.rounds) for parts in reduction.parts]
        """By bucket: its sums here."""
        self._own = reduction.microbatches[reduction.own_index]
        """The microbatches of this replica."""
        self._waiting: dict[int, dict[int, _Gradient]] = {}
        """Own microbatch -> parameter -> its gradient, until all buckets have their parts of it."""
        self._unready: dict[int, list[int]] = {}
        """Own microbatch -> by bucket: parameters whose gradients are not handed over."""
        self.messages = 0
        """How many messages this replica has sent."""

    @abstractmethod
    def begin(self) -> None:
        """Post what needs none of this replica's gradients."""

    @abstractmethod
    def send(self, microbatch: int, bucket: int) -> None:
        """Send a message of this replica, the next one in order, all of whose gradients wait."""

    @abstractmethod
    def end(self) -> Routine[None]:
        """Wait until everything is sent, received and added up."""

    @abstractmethod
    def raise_failure(self) -> None:
        """Raise what any message has failed with."""

    def submit(self, microbatch: int, gradients: Mapping[int, Tensor | None]) -> None:
        """See `ScatterReduction.submit_gradients`."""
        reduction = self.reduction
        waiting = self._waiting.setdefault(microbatch, {})
        if microbatch not in self._unready:
            self._unready[microbatch] = [len(layout.shapes) for layout in reduction.layouts]
        for index, gradient in gradients.items():
            if gradient is not None:
                self.defined.add(index)
            waiting[index] = _Gradient(gradient, len(reduction.buckets_of[index]))
            for bucket in reduction.buckets_of[index]:
                self._unready[microbatch][bucket] -= 1
        buckets = len(reduction.layouts)
        while self.messages < len(self._own) * buckets:
            microbatch, bucket = self._own[self.messages // buckets], self.messages % buckets
            if microbatch not in self._unready or self._unready[microbatch][bucket]:
                return
            self.send(microbatch, bucket)
            self.messages += 1

    def check_all_submitted(self) -> None:
        """Raises `CommError` if gradients of some microbatch were not handed over."""
        if self.messages < len(self._own) * len(self.reduction.layouts):
            raise CommError(
                f"gradients of microbatch {self._own[self.messages // len(self.reduction.layouts)]} were not all handed over",
                cure="call `submit_gradients` for every parameter of the stage, also for those without a gradient",
            )

    def gradients_in(self, layout: BucketLayout, microbatch: int) -> list[Tensor]:
        """The gradients of a microbatch that a bucket has parts of."""
        waiting = self._waiting[microbatch]
        return [value for index in layout.indices if (value := waiting[index].value) is not None]

    def fill(self, layout: BucketLayout, flat: Tensor, microbatch: int) -> None:
        """Copy a microbatch's gradients into the memory of a bucket, and let go of those that all buckets have."""
        waiting = self._waiting[microbatch]
        to: list[Tensor] = []
        source: list[Tensor] = []
        for part in layout.parts:
            place = flat[part.offset : part.offset + part.stop - part.start]
            gradient = waiting[part.parameter]
            if gradient.value is None:
                place.fill_(-0.0)
            else:
                to.append(place)
                source.append(gradient.elements(part))
        if to:
            copy_all(to, source)
        for index in layout.indices:
            waiting[index].buckets -= 1
            if not waiting[index].buckets:
                del waiting[index]


class _HostScatterStep(ScatterStep):
    """A step whose messages lie in host memory."""

    def __init__(self, reduction: ScatterReduction) -> None:
        super().__init__(reduction)
        self._sent: list[Handle] = []
        """This replica's messages, in order: done when all other owners have acknowledged them."""
        self._received: dict[int, list[tuple[int, Handle]]] = {r: [] for r in reduction.receiving}
        """Other replica -> (number, posted receive) of its messages for this one, in order, without those known to be done."""
        self._acknowledgements: list[Handle] = []
        """Sends of acknowledgements, without those that are known to be done."""
        self._folded: dict[tuple[int, int], None] = {}
        """(microbatch, bucket) that is added up here."""
        self._arrivals: deque[tuple[int, int, Tensor]] = deque()
        """(microbatch, bucket, segment) to be added up."""
        self._lock = threading.Lock()
        """Guards `_is_folding`."""
        self._is_folding = False
        """Whether some thread adds up arrivals."""
        self.changed = threading.Condition()
        """Notified when arrivals have been added up."""

    def begin(self) -> None:
        """Post the first receives. What arrives meanwhile is added up behind that: additions post receives, too."""
        self._is_folding = True
        for replica in self.reduction.receiving:
            for number in range(len(self.reduction.receiving[replica])):
                self._post_receive(replica, number)
        self._is_folding = False
        self._add_up()

    # -- what this replica sends ---------------------------------------------------------------------------------------

    def send(self, microbatch: int, bucket: int) -> None:
        """See `ScatterStep.send`. Waits for a slot."""
        self._wait_for_slot()
        with torch.no_grad():
            self._send(microbatch, bucket)

    def _wait_for_slot(self) -> None:
        """Wait until the message that had the next slot before is acknowledged by all, and added up here."""
        reduction, number = self.reduction, len(self._sent) - len(self.reduction.sending)
        if number < 0:
            return
        buckets = len(reduction.layouts)
        microbatch, bucket = self._own[number // buckets], number % buckets

        def is_free() -> bool:
            return self._sent[number].done() and (bucket not in reduction.kept or (microbatch, bucket) in self._folded)

        def awaited() -> Iterator[Handle]:
            yield self._sent[number]
            if bucket in reduction.kept:
                yield from self._receives_until(microbatch, bucket)

        progress = _Progress(self, is_free, awaited)
        if not progress.done():
            start = time.perf_counter_ns()
            what = f"room for gradients: replicas that are behind microbatch {microbatch}, channel {reduction.channel}"
            wait_for_handle(progress, what, reduction.timeout_s)
            reduction.waited_ns += time.perf_counter_ns() - start

    def _receives_until(self, microbatch: int, bucket: int) -> Iterator[Handle]:
        """Posted receives of the messages in a microbatch's round and a bucket, and of those before. None of them needs what
        this replica sends later; any other receive may, so that waiting for it might have no end."""
        reduction = self.reduction
        for other in next(each for each in reduction.rounds if microbatch in each):
            replica = reduction.replica_of[other]
            last = self._place(other, bucket)
            yield from (handle for number, handle in self._received.get(replica, ()) if number <= last)

    def _place(self, microbatch: int, bucket: int) -> int:
        """Which of its replica's messages for this one it is."""
        reduction = self.reduction
        turn = reduction.microbatches[reduction.replica_of[microbatch]].index(microbatch)
        return turn * len(reduction.kept) + reduction.kept.index(bucket)

    def _send(self, microbatch: int, bucket: int) -> None:
        reduction, number = self.reduction, len(self._sent)
        layout = reduction.layouts[bucket]
        flat = reduction.sending[number % len(reduction.sending)][: layout.nbytes].view(layout.dtype)
        self.fill(layout, flat, microbatch)
        segments = [flat[start:stop] for start, stop in layout.segments or ()]
        self._sent.append(self._run(self._message(number, segments)))
        if bucket in reduction.kept:
            self._arrive(microbatch, bucket, segments[reduction.own_index])

    def _message(self, number: int, segments: Sequence[Tensor]) -> Phases:
        """The phases of a message to all other owners: it is over when all have acknowledged it."""
        group, me = self.reduction.group, self.reduction.own_index
        there = [(segment, group[r]) for r, segment in enumerate(segments) if r != me and segment.numel()]
        self.reduction.transport.ledger.count("scatter", sent=sum(segment.nbytes for segment, _ in there))
        yield OperationPhase(
            [(segment, rank, 2 * number) for segment, rank in there], [(_nothing(), rank, 2 * number + 1) for _, rank in there]
        )

    def _run(self, phases: Phases) -> Handle:
        return self.reduction.transport.run_phases(phases, group=self.reduction.group, channel=self.reduction.channel)

    # -- what this replica owns ----------------------------------------------------------------------------------------

    def _post_receive(self, replica: int, number: int) -> None:
        """Post the receive of the so many-th message of another replica that has anything for this one."""
        reduction = self.reduction
        theirs, kept = reduction.microbatches[replica], reduction.kept
        if number >= len(theirs) * len(kept):
            return
        turn, place = divmod(number, len(kept))
        microbatch, bucket = theirs[turn], kept[place]
        layout = reduction.layouts[bucket]
        slots = reduction.receiving[replica]
        slot = slots[number % len(slots)]
        segment = slot[: segment_bytes(layout, reduction.own_index)].view(layout.dtype)
        tag = 2 * (turn * len(reduction.layouts) + bucket)

        def phases() -> Phases:
            yield OperationPhase((), [(segment, reduction.group[replica], tag)])
            reduction.transport.ledger.add_payload("scatter", received=segment.nbytes)
            self._arrive(microbatch, bucket, segment)

        handle = self._run(phases())
        self._received[replica] = [*(each for each in self._received[replica] if _is_pending(each[1])), (number, handle)]

    def _arrive(self, microbatch: int, bucket: int, segment: Tensor) -> None:
        """Add up what has arrived; if another thread does so already (or this one), it does this, too."""
        self._arrivals.append((microbatch, bucket, segment))
        self._add_up()

    def _add_up(self) -> None:
        while True:
            with self._lock:
                if self._is_folding or not self._arrivals:
                    return
                self._is_folding = True
            try:
                while self._arrivals:
                    microbatch, bucket, segment = self._arrivals.popleft()
                    for freed in self.folds[bucket].arrive(microbatch, segment):
                        self._free(freed, bucket)
            finally:
                with self._lock:
                    self._is_folding = False
                with self.changed:
                    self.changed.notify_all()

    def _free(self, microbatch: int, bucket: int) -> None:
        """A message is added up here: acknowledge it, and receive the next one in its slot."""
        reduction = self.reduction
        self._folded[microbatch, bucket] = None
        replica = reduction.replica_of[microbatch]
        if replica == reduction.own_index:
            return
        turn = reduction.microbatches[replica].index(microbatch)
        tag, rank = 2 * (turn * len(reduction.layouts) + bucket) + 1, reduction.group[replica]
        sent = self._run(_one_phase(OperationPhase([(_nothing(), rank, tag)], ())))
        self._acknowledgements = [*filter(_is_pending, self._acknowledgements), sent]
        self._post_receive(replica, self._place(microbatch, bucket) + len(reduction.receiving[replica]))

    # -- waiting -------------------------------------------------------------------------------------------------------

    def end(self) -> Routine[None]:
        """See `ScatterStep.end`."""
        while not (progress := self.until_over()).done():
            yield RoutineWait(progress, f"gradients of other replicas, channel {self.reduction.channel}")

    def raise_failure(self) -> None:
        """See `ScatterStep.raise_failure`."""
        for handle in self._all():
            handle.done()

    def _all(self) -> Iterator[Handle]:
        """Those that may not be done."""
        yield from self._sent[-len(self.reduction.sending) :] if self._sent else ()
        for receives in self._received.values():
            yield from (handle for _, handle in receives)
        yield from self._acknowledgements

    def until_over(self) -> _Progress:
        """Done when everything is sent, received and added up."""

        def is_over() -> bool:
            folded = all(self.folds[bucket].is_over for bucket in self.reduction.kept)
            return folded and not self._is_folding and all(handle.done() for handle in self._all())

        return _Progress(self, is_over, self._all)


class _Gradient:
    """One parameter's gradient in one microbatch."""

    __slots__ = ("_flat", "buckets", "value")

    def __init__(self, value: Tensor | None, buckets: int) -> None:
        self.value = value
        """None: no gradient."""
        self.buckets = buckets
        """Buckets that have no copy of their parts yet."""
        self._flat: Tensor | None = None

    def elements(self, part: BucketPart) -> Tensor:
        """The elements of a part, flat."""
        assert self.value is not None
        if self._flat is None:
            self._flat = self.value.reshape(-1)
        return self._flat[part.start : part.stop]


class _Progress:
    """The handle of something that several messages, and additions in any thread, bring about."""

    def __init__(self, step: _HostScatterStep, is_over: Callable[[], bool], awaited: Callable[[], Iterator[Handle]]) -> None:
        """`awaited`: the messages that it needs, as far as they are posted."""
        self._step, self._is_over, self._awaited = step, is_over, awaited

    def done(self) -> bool:
        """See `Handle.done`."""
        if self._is_over():
            return True
        self._step.raise_failure()
        return False

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            turn_s = FAILURE_POLL_S if left_s is None else min(FAILURE_POLL_S, left_s)
            pending = next((handle for handle in self._awaited() if not handle.done()), None)
            if pending is not None:
                try:
                    pending.wait(turn_s)
                except CommTimeout as error:
                    if turn_s == left_s:
                        what = f"messages of other replicas had not come after {timeout_s:.3g} s"
                        raise CommTimeout(what, error.cure) from None
                continue
            with self._step.changed:  # all has come, and another thread adds it up
                if not self._step.changed.wait_for(self._is_over, turn_s) and turn_s == left_s:
                    raise CommTimeout("gradients were not added up", cure="report this: another thread of the worker hangs")

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        """See `Handle.wait_on_stream`: the memory is the host's."""
        self.wait(timeout_s)

    def tensor(self) -> Tensor:
        """Nothing is received by this handle."""
        return self.tensors()[0]

    def tensors(self) -> list[Tensor]:
        """Nothing is received by this handle."""
        return []


def _one_phase(phase: OperationPhase) -> Phases:
    yield phase


def _is_pending(handle: Handle) -> bool:
    """Whether an operation is not done; one that has failed never is."""
    try:
        return not handle.done()
    except CommError:
        return True


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _zeros(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def segment_of(layout: BucketLayout, replica: int) -> tuple[int, int]:
    """(first element, number of elements) of a replica's segment of a bucket."""
    assert layout.segments is not None
    start, stop = layout.segments[replica]
    return start, stop - start


def segment_bytes(layout: BucketLayout, replica: int) -> int:
    return segment_of(layout, replica)[1] * layout.dtype.itemsize
