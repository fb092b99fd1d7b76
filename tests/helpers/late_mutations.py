"""Every wait, event, kept tensor and `record_stream` of the `nccl` path, each taken out once: some seed must fail then."""

from __future__ import annotations
import __future__

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from helpers.late_runs import failure, prepare

from raypar.comm import gradient_reduction, gradient_scatter_on_device, parameter_marks, routine
from raypar.comm.nccl import communicator_stream, late_message, operation_handle, pending_operations, tagged_messages, transport
from raypar.worker.process import gpu_setup
from raypar.worker.state import activation_host_memory
from raypar.worker.step import buffer_exchange, interpreter, tied_gradients

OWN, ENDS, STEPS, SUMS, BUFFERS = "messages and collectives", "kills", "steps", "reductions", "buffers"
SCATTERED, PINNED = "scattered", "pinned copies"
HERE = "torch.empty(tuple({0}), dtype={1}, device=self.{2}device.device)"


@dataclass(frozen=True)
class Mutation:
    """A function with some of its text replaced."""

    what: str
    """What is taken out."""
    module: Any
    function: str
    """Its name in the module."""
    edits: tuple[tuple[str, str], ...]
    """(text, what stands in its place); each text is there once."""
    program: str = OWN
    """The program that finds it (`late_programs.PROGRAMS`)."""
    beside: str = ""
    """`what` of another mutation that is made, too: either alone is enough for a caching allocator."""
    stays: str = ""
    """Why it is there although no seed can fail without it; empty: one must."""

    @property
    def place(self) -> str:
        """File and line of the first text."""
        lines, first = inspect.getsourcelines(self._target())
        text = textwrap.dedent("".join(lines))
        return f"{self.module.__name__.rpartition('.')[2]}.py:{first + text[: text.index(self.edits[0][0])].count(chr(10))}"

    def _target(self) -> Any:
        found = self.module
        for part in self.function.split("."):
            found = vars(found)[part]
        return found.fget if isinstance(found, property) else found

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """The function is another one inside."""
        spare = next((one for one in MUTATIONS if one.what == self.beside), None)
        with self._made(), spare._made() if spare is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _made(self) -> Iterator[None]:
        function = self._target()
        text = textwrap.dedent(inspect.getsource(function))
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.what}: {text.count(old)} times in {self.function}: {old}"
            text = text.replace(old, new)
        names: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(text, f"<{self.what}>", "exec", flags=flags), function.__globals__ | {}, names)
        (other,) = names.values()
        before, function.__code__ = function.__code__, other.__code__
        try:
            yield
        finally:
            function.__code__ = before

    def seeds_until_caught(self, seeds: int) -> tuple[int | None, str]:
        """How many seeds of its program run until one fails, and how it does; None: none of them."""
        for seed in range(seeds):
            prepare(self.program, seed)
            with self.made():
                found = failure(self.program, seed)
            if found:
                return seed + 1, found
        return None, ""


def of(module: Any) -> Callable[..., Mutation]:
    """Makes mutations of a module's functions."""

    def make(what: str, function: str, *edits: tuple[str, str], **more: str) -> Mutation:
        return Mutation(what, module, function, edits, **more)

    return make


_handle, _pending, _messages = of(operation_handle), of(pending_operations), of(tagged_messages)
_stream, _transport, _routine, _late = of(communicator_stream), of(transport), of(routine), of(late_message)
_reduction, _gpu, _interpreter, _ties = of(gradient_reduction), of(gpu_setup), of(interpreter), of(tied_gradients)
_host = of(activation_host_memory)
_buffers, _marks, _scatter = of(buffer_exchange), of(parameter_marks), of(gradient_scatter_on_device)
_SCRATCH = "the memory was allocated in the communicator's own stream, which gives it to nobody before it has done its work"

_VOTE = "a step is applied after all votes, and who has voted has received; the wait raises what the send has failed with"

MUTATIONS = (
    # what an operation waits for
    _pending(
        "an operation waits for the poster's stream",
        "PendingOperations.launch",
        ("stream.device_stream.wait_event(self.device.record_event())", "pass"),
    ),
    _messages(
        "a message is received elsewhere until its memory may be written",
        "Mailbox._launch_announced",
        (" or (handle.writable_event is not None and not handle.writable_event.query())", ""),
    ),
    _messages("the point from which a receive may write", "Mailbox.recv", ("= self._owner.device.record_event()", "= ARRIVED")),
    _late("a late message is copied once it has arrived", "LateMessage.copy_if_possible", ("self.arrived.query() and ", "")),
    _late(
        "a late message is copied once its memory may be written",
        "LateMessage.copy_if_possible",
        (" and self._writable.query()", ""),
    ),
    _late(
        "a stream that copies a late message waits until it has arrived",
        "LateMessage.copy_in_current_stream",
        ("self.arrived.make_stream_wait(check)", "pass"),
    ),
    _late(
        "a stream that copies a late message waits until its memory may be written",
        "LateMessage.copy_in_current_stream",
        ("self._writable.make_stream_wait(check)", "pass"),
    ),
    # what a caller waits for
    _handle(
        "a stream waits for an operation", "NcclHandle.order_current_stream", ("self._event.make_stream_wait(check)", "pass")
    ),
    _handle(
        "a stream waits for each operation of a batch",
        "NcclBatchHandle.order_current_stream",
        ("in self._handles", "in self._handles[1:]"),
    ),
    _handle(
        "a batch is done when all its operations are", "NcclBatchHandle.done", ("in self._handles", "in self._handles[1:]")
    ),
    _handle(
        "a batch is launched when all its operations are",
        "NcclBatchHandle.launched",
        ("in self._handles", "in self._handles[1:]"),
    ),
    _handle("an operation is launched when it has an event", "NcclHandle.launched", ("self._event is not None", "True")),
    _handle("an operation is done when its event has passed", "NcclHandle.release_if_done", (" and event.query()", "")),
    _pending(
        "an operation's event is behind it",
        "PendingOperations.launch",
        ("stream.operation_count += 1", "stream.operation_count += 1; early = stream.device_stream.record_event()"),
        ("    handle.mark_launched(stream.device_stream.record_event())\n", "    handle.mark_launched(early)\n"),
    ),
    _late(
        "a late message's event is behind its copy",
        "CopyStream.copy",
        ("self._stream.run(", "early = self._stream.record_event(); self._stream.run("),
        ("return self._stream.record_event()", "return early"),
    ),
    _late(
        "a late message's event is behind its copy in a stream that waits",
        "LateMessage.copy_in_current_stream",
        ("self._copied = self._device.record_event()", "self._copied = self.arrived"),
    ),
    _messages(
        "a message to itself: its send's event",
        "Mailbox.send",
        ("handle.mark_launched(self._event_behind(tensor))", "handle.mark_launched(ARRIVED)"),
    ),
    _messages("a message to itself: the event of its copy", "Mailbox._send_to_self", ("self._event_behind(copy)", "ARRIVED")),
    _transport(
        "a collective of one rank: its event",
        "NcclTransport._run",
        (
            "handle.mark_launched(self.device.record_event())",
            "handle.mark_launched(__import__('sys').modules[Mailbox.__module__].ARRIVED)",
        ),
    ),
    # in which stream work is done, and memory is allocated
    _stream(
        "copies are made in the communicator's stream",
        "CommunicatorStream._copy",
        ("self.device_stream.run(partial(target.copy_, source))", "target.copy_(source)"),
    ),
    _stream(
        "small sums are added in the communicator's stream",
        "CommunicatorStream.all_reduce",
        (
            "self.device_stream.run(partial(add_over_tree_on_device, parts, self.own_index, flat))",
            "add_over_tree_on_device(parts, self.own_index, flat)",
        ),
    ),
    _stream(
        "slices are added in the communicator's stream",
        "CommunicatorStream.all_reduce",
        (
            "self.device_stream.run(partial(add_over_tree_on_device, parts, self.own_index, cut[self.own_index]))",
            "add_over_tree_on_device(parts, self.own_index, cut[self.own_index])",
        ),
    ),
    _stream(
        "pieces are added in the communicator's stream",
        "CommunicatorStream.reduce_scatter",
        (
            "self.device_stream.run(partial(add_over_tree_on_device, parts, self.own_index, out))",
            "add_over_tree_on_device(parts, self.own_index, out)",
        ),
    ),
    _stream(
        "halves are added in the communicator's stream",
        "CommunicatorStream.halving_all_reduce",
        (
            "self.device_stream.run(partial(step.add, flat, received, self.own_index))",
            "step.add(flat, received, self.own_index)",
        ),
        program=SUMS,
    ),
    _late(
        "a late message is copied in the stream of copies",
        "CopyStream.copy",
        ("self._stream.run(partial(target.copy_, source))", "target.copy_(source)"),
    ),
    _messages(
        "a layout is filled in the communicator's stream",
        "Mailbox._launch_laid_out",
        (
            "stream.device_stream.run(lambda: fill_from_message(tensor, message, layout))",
            "fill_from_message(tensor, message, layout)",
        ),
    ),
    _messages(
        "fresh memory is the communicator's stream's",
        "Mailbox._launch_announced",
        ("self._owner.device.empty(shape, dtype, stream.device_stream)", HERE.format("shape", "dtype", "_owner.")),
    ),
    _messages(
        "memory of a layout is the communicator's stream's",
        "Mailbox._launch_laid_out",
        ("self._owner.device.empty(shape, dtype, stream.device_stream)", HERE.format("shape", "dtype", "_owner.")),
    ),
    _stream(
        "parts of a sum are the communicator's stream's",
        "CommunicatorStream._scratch",
        ("self.device.empty(like.shape, like.dtype, self.device_stream)", "torch.empty_like(like)"),
        beside="an operation keeps its scratch",
    ),
    _stream(
        "a block for pieces is the communicator's stream's",
        "CommunicatorStream._whole",
        (
            "self.device.empty((self.size, pieces[0].numel()), pieces[0].dtype, self.device_stream)",
            "torch.empty((self.size, pieces[0].numel()), dtype=pieces[0].dtype, device=self.device.device)",
        ),
        beside="an operation keeps its scratch",
    ),
    # what is kept
    _handle("record_stream of what was received", "NcclHandle.received", ("self.owner.device.record_stream(self.out)", "pass")),
    _messages("a send keeps its tensor", "Mailbox.send", ("(to,), (tensor,))", "(to,), ())")),
    _transport(
        "a collective keeps its tensors", "NcclTransport._run", ("if r != self.rank], kept)", "if r != self.rank], ())")
    ),
    _pending(
        "an operation keeps what it was given with its scratch",
        "PendingOperations.launch",
        ("(*handle.kept, *work())", "tuple(work())"),
    ),
    _pending(
        "operations are remembered until they are over",
        "PendingOperations.track",
        ("handle.tracked = True\n            self._handles.append(handle)", "handle.tracked = True"),
    ),
    _pending("operations that are not over stay remembered", "PendingOperations.track", ("if not one.released:", "if False:")),
    _late(
        "record_stream of a late message and its memory",
        "LateMessage.copy_in_current_stream",
        ("self._device.record_stream(tensor)", "pass"),
        program=ENDS,
    ),
    _pending(
        "an operation keeps its scratch",
        "PendingOperations.launch",
        ("(*handle.kept, *work())", "(*handle.kept, *work()[:0])"),
        stays=_SCRATCH,
    ),
    _messages(
        "a message with a layout keeps its memory",
        "Mailbox._launch_laid_out",
        ("arrived.kept, arrived.message_bytes = (message, tensor), message.nbytes", "arrived.message_bytes = message.nbytes"),
        stays=_SCRATCH,
    ),
    # ends
    _transport(
        "an ended communicator's stream has done its last work",
        "NcclTransport._end_stream",
        ("self._finish_work(stream)", "self._ended.add(stream.name)"),
        program=ENDS,
    ),
    _transport(
        "copies of late messages have been made when a transport has ended",
        "NcclTransport._end_copies",
        ("self._finish_work(self.copies)", "self._ended.add(self.copies.name)"),
        program=ENDS,
    ),
    _late(
        "no copies begin once a transport has ended",
        "CopyStream.copy",
        ("if self._over:", "if False:"),
        program=ENDS,
        stays="a receive that has failed is not copied; only another thread can have looked whether it has just before it did",
    ),
    _routine(
        "what streams have waited for is asked for failures",
        "StreamWaits.add",
        ("self._posted.append((handle, what))", "pass"),
        program=ENDS,
    ),
    _routine(
        "what streams have waited for is waited for in the end",
        "StreamWaits.finish",
        ("yield RoutineWait(handle, what)", "yield from ()"),
        program=ENDS,
    ),
    # steps
    _gpu(
        "the computing stream waits for copies of batches",
        "DeviceBatchSource._copies",
        ("computing.wait_stream(self._copying)", "pass"),
        program=STEPS,
    ),
    _gpu(
        "record_stream of copies of batches",
        "DeviceBatchSource._copies",
        ("copies[name].record_stream(computing)", "pass"),
        program=STEPS,
    ),
    _reduction(
        "totals are waited for on the stream",
        "GradientReduction._empty_pool",
        ("yield RoutineWait(last, name, on_stream=True)", "yield from ()"),
        program=SUMS,
    ),
    _reduction(
        "the host asks for totals before a worker votes",
        "GradientReduction._empty_pool",
        ("self.stream_waits.add(last, name)", "pass"),
        program=SUMS,
        stays="the stream waits already; the host asks, so that no worker votes for a sum that has failed",
    ),
    _reduction(
        "a bucket is filled when the one that had its memory has its totals where they stay",
        "GradientReduction._enqueue",
        ("self.buckets[needed - 1].second_phase if needed else None", "None"),
        program=SUMS,
    ),
    _transport(
        "buckets are filled when their gradients are there",
        "NcclTransport._enqueue",
        ("stream.device_stream.wait_event(self.device.record_event())", "pass"),
        program=SUMS,
    ),
    _transport(
        "gradients are kept until a bucket has them",
        "NcclTransport._enqueue",
        ("else (), tuple(keep))", "else (), ())"),
        program=SUMS,
    ),
    _transport(
        "additions wait for what they add",
        "NcclTransport._enqueue",
        ("stream.device_stream.wait_event(after.event)", "pass"),
        program=SUMS,
    ),
    _transport(
        "additions: the event behind them",
        "NcclTransport._enqueue",
        (
            "handle.mark_launched(stream.device_stream.record_event())",
            "handle.mark_launched((after.event if after is not None else None) or stream.device_stream.record_event())",
        ),
        program=SUMS,
    ),
    _marks(
        "the marks of gradients are waited for",
        "ParameterMarks.of_all",
        (
            'yield RoutineWait(self._posted, f"which gradients are parts of sums over shards, channel {self._channel}")',
            "yield from ()",
        ),
        program=SUMS,
    ),
    _reduction(
        "a second phase begins when the first is done",
        "GradientReduction.poll",
        ("_is_done(self.buckets[self._next_second].first_phase)", "True"),
        program=SUMS,
    ),
    _scatter(
        "the stream waits until a message is filled from gradients that it then lets go of",
        "_DeviceScatterStep.send",
        ("filled.wait_on_stream(self.reduction.timeout_s)", "pass"),
        program=SCATTERED,
    ),
    _scatter(
        "totals are allocated in the stream that reads them",
        "_DeviceScatterStep.begin",
        ("self.sums.allocate_totals()", "pass"),
        program=SCATTERED,
    ),
    _ties(
        "gradients of tied parameters are waited for",
        "TiedGradientExchange.run",
        ("yield RoutineWait(handle, what, on_stream=True)", "yield from ()"),
        program=STEPS,
    ),
    _ties(
        "gradients of tied parameters are waited for until they are taken",
        "TiedGradientExchange.finish_sends",
        ('yield RoutineWait(handle, "the gradients of tied parameters to be taken")', "yield from ()"),
        program=STEPS,
        stays=_VOTE,
    ),
    _buffers(
        "what replicas have written into buffers is waited for on the stream",
        "BufferExchange._gather",
        ("yield RoutineWait(handle, what, on_stream=True)", "yield from ()"),
        program=BUFFERS,
    ),
    _buffers(
        "the host asks for what replicas have written before a worker votes",
        "BufferExchange._gather",
        ("self.stream_waits.add(handle, what)", "pass"),
        program=BUFFERS,
        stays="the stream waits already; the host asks, so that no worker votes for what has failed to come",
    ),
    _interpreter(
        "sends are waited for at the end of a step",
        "Interpreter._drain",
        ('yield RoutineWait(handle, "a send to be taken by its receiver at the end of the step")', "yield from ()"),
        program=STEPS,
        stays=_VOTE,
    ),
    # activations in the host's memory
    _host(
        "a copy to the host waits for what computes the memory",
        "HostActivations.write",
        ("self._out.wait_event(computed)", "pass"),
        program=PINNED,
    ),
    _host(
        "memory goes once the computing stream has waited for its copy",
        "HostMemory.leave",
        ("self._written.make_stream_wait(_go_on)", "pass"),
        program=PINNED,
    ),
    _host(
        "a copy from the host waits for who had its memory before",
        "HostActivations.begin_reading",
        ("self._back.wait_event(self._streams.record_event())", "pass"),
        program=PINNED,
    ),
    _host(
        "the computing stream waits for a copy from the host",
        "HostMemory._await_arrival",
        ("self._arrived.make_stream_wait(_go_on)", "pass"),
        program=PINNED,
    ),
    _host(
        "the event of a copy to the host is behind it",
        "HostActivations.write",
        ("self._out.run(", "early = self._out.record_event(); self._out.run("),
        ("pinned, self._out.record_event())", "pinned, early)"),
        program=PINNED,
    ),
    _host(
        "the event of a copy from the host is behind it",
        "HostActivations.begin_reading",
        ("self._back.run(", "early = self._back.record_event(); self._back.run("),
        ("return again, self._back.record_event()", "return again, early"),
        program=PINNED,
    ),
    _host(
        "copies to the host are made in their stream",
        "HostActivations.write",
        (
            "self._out.run(partial(pinned[:nbytes].copy_, memory, non_blocking=True))",
            "self._back.run(partial(pinned[:nbytes].copy_, memory, non_blocking=True))",
        ),
        program=PINNED,
    ),
    _host(
        "pinned memory is used again once the computing stream is done with it",
        "HostMemory.fetch",
        (
            "self._again, self._arrived = self._place.begin_reading(self._pinned, self.nbytes)",
            "self._again, self._arrived = self._place.begin_reading(self._pinned, self.nbytes); "
            "self._place.give_back(self._pinned); self._pinned = None",
        ),
        program=PINNED,
    ),
)
