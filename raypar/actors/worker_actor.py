"""One worker as a Ray actor: a thin shell around `elastic.generation_guard.GenerationGuard`, which decides, and
`ElasticWorker`, which acts.

Methods of the group `step` run one after the other in one thread, in the order of their calls; those of `ctl` answer while a
step runs. Failures are returned as values (`CallFailure`), so that they arrive whole and of their own class.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from raypar.actors.liveness_connection import LivenessListener
from raypar.actors.messages import CallFailure, StepCall, WorkerHello
from raypar.actors.removed_working_dir import WorkingDirGuard
from raypar.comm.tcp.acceptor import THREAD as ACCEPT_THREAD
from raypar.comm.tcp.handshake import RunCredential
from raypar.elastic.generation_guard import GenerationGuard, StaleGeneration, WorkerStatus
from raypar.errors import CommError, OutOfMemory, RayparError, UserCodeError, exception_chain
from raypar.fences.private_api_fence import send_warnings_to
from raypar.plan.pieces import AdoptedStages, AdoptPlanCommand
from raypar.plan.vote_result import VoteResult
from raypar.plan.wording import after_steps
from raypar.storage.filesystems import register_pickled_filesystems
from raypar.user_code.user_code_errors import error_text
from raypar.worker.process.thread_activity import IDLE, STARTING, describe_thread_activity, reads_samples, thread_cpu_wait_s

if TYPE_CHECKING:  # torch is loaded by `hello`
    from raypar.comm.transport import CommunicatorKey, Transport, WorkerEndpoint
    from raypar.job import Job
    from raypar.worker.backend import DeviceBackend
    from raypar.worker.checkpoint.checkpoint_files import ShardRecord
    from raypar.worker.elastic_worker import ElasticWorker
    from raypar.worker.process.torch_state_guard import TorchStateGuard
    from raypar.worker.worker_core import WorkerCore
    from raypar.worker.worker_reports import StepReport

Answer = TypeVar("Answer")

ORPHAN_THREAD = "raypar-orphan"
STEP_TIMEOUT_S = 900.0
"""Time limit of a step. It exceeds the time that a run which is not elastic waits for a silent worker
(`RunPolicy.last_copy_wait_s`): the worker's peers wait in communication all the while."""
LEAVE_S = 5.0
"""How long a worker that ends waits for Ray or its driver before it exits."""
LOADING, LOADING_S = "loading PyTorch and the job's code", 600.0
"""What `doing` is while a worker loads its code, and how long that may take without a ping: torch from a cold disk needs
minutes."""
LOADING_PARTS = ("loading PyTorch", "loading Ray")
"""Activities that are told as `LOADING`: they alternate with others, and users would see them come and go."""
WRITING = "writing"
"""What a worker does that writes its part of a checkpoint, beside its steps."""
HELLO_FIRST = "the driver calls `hello` first"
ALLOCATORS_SAY = ("can't allocate memory", "not enough memory", "out of memory")
"""Texts of out-of-memory RuntimeErrors: PyTorch's on a CPU, Windows's, and a GPU's before torch 2.5."""


class WorkerActor:
    """A worker process in a placement group. It gets its job when it is created, and everything else by calls.

    No other worker of the run ever has its `number`.
    """

    def __init__(
        self,
        credential: RunCredential,
        number: int,
        spec: bytes,
        host: str | None,
        orphan_timeout_s: float,
        filesystems: Mapping[str, bytes] | None = None,
    ) -> None:
        self.credential = credential
        """The run's name and secret, for connections to other workers."""
        self.number = number
        """The worker's number."""
        self.pickled_spec = spec
        """The `Job`, pickled; opened by `hello`."""
        self.filesystems = filesystems or {}
        """Id -> pickle of file systems that were given as objects, on which checkpoints lie."""
        self.connections: tuple[frozenset[CommunicatorKey], frozenset[int]] = (frozenset(), frozenset())
        """The communicators of the present generation, and the ranks that it connects this worker with."""
        self.coordinate = f"worker {number}"
        """The worker's seat in words, for messages."""
        self.working_dir = WorkingDirGuard()
        """Keeps the current directory valid."""
        self.spec: Job
        """The job. `hello` sets it, and the two below."""
        self.backend: DeviceBackend
        """The kind of device this worker computes on."""
        self.generation_guard: GenerationGuard
        """Refuses calls of old generations."""
        self.host = host
        """The address to listen on; None: the node's address."""
        self.core: WorkerCore | None = None
        """Stages, transport, data; None, like all that follows to `endpoint`, before `hello`."""
        self.torch_guard: TorchStateGuard | None = None
        """What surrounds user code."""
        self.elastic_worker: ElasticWorker | None = None
        """The core's side of the elastic protocol."""
        self.endpoint: WorkerEndpoint | None = None
        """Connects with the other workers of each generation."""
        self.heard_s = time.monotonic()
        """When the driver last called."""
        self.orphan_timeout_s = orphan_timeout_s
        """How long this worker lives without a call of its driver."""
        send_warnings_to(lambda line: None)  # step reports carry them (`WorkerCore`)
        self.doing = STARTING
        """What the worker does, in words."""
        self.calls: dict[int, str] = {}
        """Thread -> what the call that it executes is for, in words."""
        self.hello_sent: WorkerHello | None = None
        """The hello it has answered with, for a new driver that asks again."""
        self.liveness_listener: LivenessListener | None = None
        """Shows the driver that this process exists."""
        self.step_thread_id = 0
        """Native id of the thread that executes steps; 0 before the first step."""
        self.leaving = False
        """Whether this process was asked to end (SIGTERM)."""
        with contextlib.suppress(ValueError):  # not the main thread: then a SIGTERM ends the process at once, as Ray has it
            signal.signal(signal.SIGTERM, self._asked_to_leave)
        threading.Thread(target=self._leave_when_orphaned, name=ORPHAN_THREAD, daemon=True).start()

    # -- step: one after the other -------------------------------------------------------------------------------------

    @ray.method(concurrency_group="step")
    def hello(self, joining: bool = False) -> WorkerHello | CallFailure:
        """Load torch and listen for other workers: do all that can be done before there is a plan.

        `joining`: the worker starts during a run, so that others would wait for whatever is not done here.
        """
        return self._run_call(LOADING, lambda: self._hello(joining))

    def _hello(self, joining: bool) -> WorkerHello:
        if self.hello_sent is not None:
            return self.hello_sent  # to a new driver
        from raypar.worker.process.allocator_and_garbage_collector import (
            freeze_existing_objects,
            garbage_collector_paused,
            keep_freed_memory,
            large_blocks_returned,
        )

        with garbage_collector_paused():
            with self.working_dir.elsewhere():
                import torch

            from raypar.actors.numerics_fingerprint import fingerprint_worker_numerics
            from raypar.worker.backend import make_backend
            from raypar.worker.data.stream_feed_process import StreamFeedJob, StreamFeedProcess, socket_name
            from raypar.worker.elastic_worker import ElasticWorker
            from raypar.worker.process.torch_state_guard import TorchStateGuard
            from raypar.worker.process_warm_up import warm_up_process
            from raypar.worker.worker_core import WorkerCore

        keep_freed_memory()
        register_pickled_filesystems(self.filesystems)
        self.torch_guard = guard = TorchStateGuard(threads=1)
        with guard.watching("a module that the job names"):
            self.spec = pickle.loads(self.pickled_spec)
        torch.set_num_threads(self.spec.threads)
        host = self.host or ray.util.get_node_ip_address()
        self.backend = make_backend(self.spec.device)
        device = self.backend.open_device(exact=self.spec.reduction == "canonical")
        self.backend.check_precision(self.spec.precision)
        self.endpoint = self.backend.listen(host, self.credential)
        guard.accept()
        stream_process = None
        if self.spec.data.streams is not None and self.spec.data.processes and self.spec.forward_passes is None:
            key = socket_name(self.credential.secret, ray.get_runtime_context().get_node_id())
            told = StreamFeedJob(self.pickled_spec, key, self.filesystems)
            stream_process = StreamFeedProcess(told, self.spec.data.label)
        with large_blocks_returned():  # of layers that are made to be looked at
            self.core = core = WorkerCore(
                self.spec, device=device, guard=guard, step_timeout_s=STEP_TIMEOUT_S, stream_process=stream_process
            )
        self.elastic_worker = ElasticWorker(core, self.number)
        self.generation_guard = GenerationGuard(self.number, self.elastic_worker)
        warm_up_process(core, data=joining)
        freeze_existing_objects(collect=True)
        node = ray.get_runtime_context().get_node_id()
        self.liveness_listener = LivenessListener(host)
        says = fingerprint_worker_numerics(self.spec.threads, device, self.spec.precision)
        self.hello_sent = WorkerHello(self.endpoint.address, node, os.getpid(), says, self.liveness_listener.address)
        return self.hello_sent

    @ray.method(concurrency_group="step")
    def adopt(
        self, generation: int, part: bytes, coordinate: str, addresses: Sequence[str], deadline_s: float
    ) -> AdoptedStages | CallFailure | None:
        """Connect to the other workers of `generation`, exchange state with them, build this worker's stages."""

        def build() -> AdoptedStages | None:
            from raypar.comm.routine import run_routine
            from raypar.schedule.gathering import gathers_in_pass
            from raypar.worker.process.allocator_and_garbage_collector import (
                freeze_existing_objects,
                keep_freed_memory,
                return_unused_memory,
            )

            self.generation_guard.enter_generation(generation, f"generation {generation} begins")
            self._end_if_stuck()
            made = pickle.loads(part)
            if made.assignment is not None:
                keep_freed_memory(large_blocks=not gathers_in_pass(made.assignment.plan))

            def connect() -> Transport:
                self._end_if_stuck()  # the former transport has been closed meanwhile
                rank = made.rank_of_worker[self.number]
                assert self.endpoint is not None, HELLO_FIRST
                communicators, peers = self.connections = self._connections(made)
                return self.endpoint.connect(
                    rank=rank,
                    size=len(addresses),
                    addresses=addresses,
                    generation=generation,
                    deadline_s=deadline_s,
                    communicators=communicators,
                    peers=peers,
                )

            run_routine(self.generation_guard.adopt(generation, (made, connect)), deadline_s)
            freeze_existing_objects(collect=False)
            if made.run_begins or made.checkpoint_folder:  # built from whole layers or files
                return_unused_memory()  # not during a run: other workers would wait for this
            self.coordinate = coordinate
            assert self.elastic_worker is not None, HELLO_FIRST
            return self.elastic_worker.adopt_description

        return self._run_call("building its stages", build)

    @ray.method(concurrency_group="step")
    def share_out_anew(self, generation: int, part: bytes) -> bool | CallFailure:
        """Take other blocks from the next step on. False, and nothing has changed, if this worker would need connections that
        it does not have, or other stages."""

        def change() -> bool:
            made = pickle.loads(part)
            reaches = self._connections(made)
            fits = all(needed <= there for needed, there in zip(reaches, self.connections, strict=True))
            return fits and self.generation_guard.share_out_anew(generation, made)

        return self._run_call("taking other blocks", change)

    def _connections(self, part: AdoptPlanCommand) -> tuple[frozenset[CommunicatorKey], frozenset[int]]:
        """The communicators that this worker needs for its part of a plan, and the ranks that it exchanges messages with."""
        from raypar.worker.connected_ranks import connected_ranks

        assert self.core is not None, HELLO_FIRST
        rank = part.rank_of_worker[self.number]
        return (
            self.backend.communicators(part, rank, self.spec, self.core.layout),
            connected_ranks(part, rank, self.spec, self.core.layout),
        )

    @ray.method(concurrency_group="step")
    def step(self, call: bytes) -> dict[str, Any] | CallFailure:
        """One training step: a `StepReport` as a dict (spans: label, start and end in ms), or `CallFailure`.

        `call`: an encoded `StepCall`.

        After a failure every later step of the generation fails too.
        """
        asked = StepCall.from_bytes(call)
        if asked.before is not None and asked.before.step >= self.generation_guard.backend.applied():
            before = self._step(asked.before)  # the guard keeps its answer for its own call
            if isinstance(before, CallFailure):
                return before
        return self._step(asked)

    def _step(self, asked: StepCall) -> dict[str, Any] | CallFailure:
        from raypar.comm.routine import run_routine

        core, elastic_worker = self._loaded
        core.data.streams.wants_cursors = asked.cursors
        elastic_worker.trace, self.step_thread_id = asked.trace, threading.get_native_id()
        routine = self.generation_guard.step(asked.generation, asked.step, asked.into_mirror)

        def stepped() -> StepReport:
            self.generation_guard.admit(asked.generation)
            if asked.validated is not None:
                core.validated[asked.step] = asked.validated
            done: StepReport = run_routine(routine, core.step_timeout_s)
            return done

        report = self._run_call(f"in step {asked.step + 1}", stepped)
        if isinstance(report, CallFailure):
            if not isinstance(report.error, StaleGeneration):  # which a late call gets beside the present generation's work
                self._free_peers()
            return report
        return {**vars(report), "spans": [(s.label, s.start_ns / 1e6, s.end_ns / 1e6) for s in report.spans]}

    @ray.method(concurrency_group="step")
    def validate(self, generation: int, done: int, number: int = 0) -> dict[str, Any] | CallFailure:
        """One validation pass: a `ValidationReport` as a dict, or `CallFailure`. `number`: see `elastic.actions.Validate`."""
        from raypar.comm.routine import run_routine

        core, elastic_worker = self._loaded
        elastic_worker.pass_number = number
        return self._run_call(
            core.name_of_pass(done),
            lambda: vars(run_routine(self.generation_guard.validate(generation), core.step_timeout_s)),
        )

    @ray.method(concurrency_group="step")
    def report_status(self, generation: int) -> WorkerStatus | CallFailure:
        """This worker's status (`elastic.generation_guard.WorkerStatus`), after its calls in progress have ended."""

        def status() -> WorkerStatus:
            read = dict(self.core.data.streams.digests) if self.core is not None else {}
            return dataclasses.replace(self.generation_guard.report_status(generation), samples=read)

        return self._run_call("saying where it stands", status)

    @ray.method(concurrency_group="step")
    def apply_kept_gradients(self, generation: int, step: int, vote_result: VoteResult) -> WorkerStatus | CallFailure:
        """Apply `step` late, with the gradients that were kept; returns the worker's status after that."""
        return self._run_call(
            f"settling step {step + 1}", lambda: self.generation_guard.apply_kept_gradients(generation, step, vote_result)
        )

    @ray.method(concurrency_group="step")
    def save(self, generation: int, done: int, checkpoint: str, only_weights: bool = False) -> CallFailure | None:
        """Copy the state after `done` steps and start writing it in the background; `save_result` returns the outcome."""

        def copy() -> None:
            core, _ = self._loaded
            core.start_save(checkpoint, only_weights=only_weights)

        return self._run_call("saving", lambda: self.generation_guard.save(generation, done, copy))

    # -- ctl: answers while a step runs --------------------------------------------------------------------------------

    @ray.method(concurrency_group="io")
    def save_result(self) -> ShardRecord | CallFailure:
        """Wait for the writer: its record, or `CallFailure` with the error of the disk."""
        core, _ = self._loaded
        return self._run_call(WRITING, core.save_result)

    @ray.method(concurrency_group="ctl")
    def ping(self) -> tuple[int, str, bool, float, int | None]:
        """(steps done, what the worker does, whether it has to leave, seconds that its step thread has waited for a processor,
        how many samples of streams it has read to find a place if it is reading samples, else None).

        A ping also tells the worker that its driver lives.
        """
        self.heard_s = time.monotonic()
        reading = any(reads_samples(thread) for thread in list(self.calls))
        skipped = self.core.data.streams.skipped if reading and self.core is not None else None
        return self._done, self.doing, self.leaving, thread_cpu_wait_s(self.step_thread_id), skipped

    @ray.method(concurrency_group="ctl")
    def activity(self) -> str:
        """What this worker is doing, as exactly as its stack says: `in step 12, reading sample 17`."""
        self.heard_s = time.monotonic()
        for thread, doing in sorted(self.calls.items(), key=lambda call: call[1] == WRITING):
            found = describe_thread_activity(thread)
            if doing == LOADING and found in LOADING_PARTS:
                return LOADING
            return f"{doing}, {found}" if found and doing.startswith("in ") else found or doing
        return self.doing

    def _asked_to_leave(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM, a cloud's notice: the next ping tells the driver, which moves the work. Exit if no driver pings."""
        if self.leaving and time.monotonic() - self.heard_s > LEAVE_S:
            os._exit(0)
        self.leaving = True

    @property
    def _done(self) -> int:
        """Steps that this worker has applied."""
        return 0 if self.elastic_worker is None else self.elastic_worker.applied()

    @ray.method(concurrency_group="ctl")
    def announce_generation(self, generation: int, reason: str) -> CallFailure | None:
        """Begin a new generation: abort the work of older generations, and refuse their calls from now on."""
        self.heard_s = time.monotonic()
        try:
            new = self.generation_guard.enter_generation(generation, reason)
        except StaleGeneration as error:
            return CallFailure("aborted", error)
        assert self.endpoint is not None, HELLO_FIRST
        if new:  # else its workers may be connecting already
            self.endpoint.abort_connect(reason)
        self._end_if_stuck()
        return None

    @ray.method(concurrency_group="ctl")
    def abort(self, reason: str) -> None:
        """Make every pending wait of this worker's transport raise at once."""
        self.heard_s = time.monotonic()
        if self.endpoint is not None:
            self.endpoint.abort_connect(reason)
        if self.core is not None:
            self.core.abort(reason)
            self._end_if_stuck()

    @ray.method(concurrency_group="ctl")
    def stacks(self) -> str:
        """The stacks of raypar's threads as text."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        texts = [f"{self.doing}, {after_steps(self._done)}"]
        for ident, frame in sys._current_frames().items():
            name = names.get(ident, "a thread")
            lines = traceback.format_stack(frame)
            if (
                ident != threading.get_ident()
                and name not in (ORPHAN_THREAD, ACCEPT_THREAD)
                and any(f"{os.sep}raypar{os.sep}" in line for line in lines)
            ):
                texts.append(f"{name}:\n{''.join(lines).rstrip()}")
        return "\n".join(texts)

    @ray.method(concurrency_group="ctl")
    def close(self) -> None:
        """Stop loaders and sockets; the actor is killed afterwards."""
        if self.core is not None:
            self.core.close()
        if self.endpoint is not None:
            self.endpoint.close()

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def _loaded(self) -> tuple[WorkerCore, ElasticWorker]:
        """The core and its side of the elastic protocol, which `hello` has made."""
        assert self.core is not None and self.elastic_worker is not None, HELLO_FIRST
        return self.core, self.elastic_worker

    def _run_call(self, doing: str, call: Callable[[], Answer]) -> Answer | CallFailure:
        """The result of `call`, or its failure as a `CallFailure`. `doing`: what the worker does, for pings and messages."""
        self.heard_s = time.monotonic()
        self.doing = self.calls[threading.get_ident()] = doing
        try:
            self.working_dir.keep()
            if self.torch_guard is not None:
                self.torch_guard.accept_directory()
            return call()
        except BaseException as error:  # what is no Exception would end this process, or its thread, without a word
            return self._classify_failure(doing, error)
        finally:
            self.heard_s = time.monotonic()  # the driver that waits for the answer lives
            self.doing = IDLE
            del self.calls[threading.get_ident()]

    def _classify_failure(self, doing: str, error: BaseException) -> CallFailure:
        """The failure as a `CallFailure` that says who is to blame: an abort, user code, or raypar."""
        if isinstance(error, StaleGeneration):
            return CallFailure("aborted", error)
        if isinstance(error, CommError) and not is_out_of_memory(error):
            named = type(error)(f"{self.coordinate}, {doing}: {error.what}", error.cure)
            named.unreachable_ranks = error.unreachable_ranks
            return CallFailure("aborted", named)
        if is_out_of_memory(error):
            text = "".join(traceback.format_exception(error)).rstrip()
            first = str(error.what if isinstance(error, UserCodeError) else error).partition("\n")[0]
            what = f"{self.coordinate}, {doing}: out of memory: {first or type(error).__name__}\n{text}"
            return CallFailure("user", OutOfMemory(what, cure="use workers with more memory"))
        if isinstance(error, UserCodeError):
            return CallFailure("user", UserCodeError(f"{self.coordinate}, {doing}: {error.what}", error.cure))
        if isinstance(error, RayparError) or (isinstance(error, OSError) and doing in ("saving", WRITING)):
            return CallFailure("error", error)
        text = "".join(traceback.format_exception(error)).rstrip()
        innermost = traceback.extract_tb(error.__traceback__)[-1].filename
        if Path(innermost).is_relative_to(Path(__file__).parents[1]):
            what = f"{self.coordinate}, {doing}: a mistake of raypar's own\n{text}"
            return CallFailure("error", RayparError(what, cure="please report it with the lines above"))
        what = f"{self.coordinate}, {doing}: {error_text(error)}\n{text}"
        return CallFailure(
            "user", UserCodeError(what, cure="the last lines of the traceback are where your code, or what it called, raised")
        )

    def _free_peers(self) -> None:
        """Close the connections, from which waiting peers learn of this worker's failure."""
        with contextlib.suppress(Exception):
            core, _ = self._loaded
            core.abort(f"{self.coordinate} has failed")
        self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """Exit if NCCL operations cannot be ended, because they would keep the GPU busy in the next generation too.

        The driver notices the end at once and can start another worker.
        """
        unended = () if self.endpoint is None else self.endpoint.unended_communicators
        if unended:
            print(f"{self.coordinate}: NCCL has not ended {', '.join(unended)}; this process ends", file=sys.stderr, flush=True)
            os._exit(1)

    def _leave_when_orphaned(self) -> None:
        """Exit when no driver has called for `orphan_timeout_s`: nobody else would ever remove this worker.

        The worker removes its own placement group, which ends it; it also exits if Ray does not answer.
        """
        while time.monotonic() - self.heard_s < (LOADING_S if self.doing == LOADING else self.orphan_timeout_s):
            turn_s, before_s = min(1.0, self.orphan_timeout_s / 4), time.monotonic()
            time.sleep(turn_s)
            late_s = time.monotonic() - before_s - turn_s
            if late_s > turn_s:  # this process itself was stopped, and calls that came meanwhile are still waiting
                self.heard_s += late_s
        removing = threading.Thread(target=remove_own_placement_group, daemon=True)
        removing.start()
        removing.join(LEAVE_S)
        os._exit(1)


def remove_own_placement_group() -> None:
    """Remove the placement group of this process, which ends the process."""
    group = ray.util.get_current_placement_group()
    if group is not None:
        ray.util.remove_placement_group(group)
        time.sleep(2.0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one of its causes, says that memory could not be allocated."""
    for each in exception_chain(error):
        refused = isinstance(each, RuntimeError) and any(words in str(each) for words in ALLOCATORS_SAY)
        refused = refused or (isinstance(each, OSError) and each.errno == errno.ENOMEM)
        if isinstance(each, MemoryError) or type(each).__name__ == "OutOfMemoryError" or refused:
            return True
    return False


def make_worker_actor_class() -> Any:
    """The actor class of workers. `io` is a concurrency group of its own, so that a slow disk does not delay pings."""
    options: dict[str, Any] = {"concurrency_groups": {"step": 1, "ctl": 2, "io": 1}, "max_restarts": 0}
    return ray.remote(**options)(WorkerActor)
