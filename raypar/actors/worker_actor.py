"""One worker as a Ray actor: a thin shell around `elastic.member.Member` and `ElasticWorker`, which decide and do.

Methods of the group `step` run one after the other in one thread, in the order they were called; those of `ctl` answer while a
step runs. Failures travel as values (`CallFailure`), so that they arrive whole and of their own class.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from raypar.actors.lifeline import LifelineListener
from raypar.actors.processor_wait import processor_wait_s
from raypar.actors.worker_messages import CallFailure, WorkerHello
from raypar.actors.working_dir import WorkingDir
from raypar.comm.tcp.acceptor import THREAD as ACCEPT_THREAD
from raypar.comm.tcp.handshake import RunCredential
from raypar.elastic.member import Member, StaleGeneration
from raypar.errors import CommError, OutOfMemory, RayparError, UserCodeError
from raypar.user_code import USER_CODE_ERRORS, error_text

ORPHAN_THREAD = "raypar-orphan"
STEP_TIMEOUT_S = 900.0
"""Longer than the driver of a run that is not elastic waits for a silent worker (`RunPolicy.last_copy_wait_s`), for whom its
peers wait in communication."""
LEAVE_S = 5.0
LOADING, LOADING_S = "loading its code", 600.0
"""Nobody pings a worker meanwhile. A cold disk may take minutes for torch and the model's imports."""
ALLOCATORS_SAY = ("can't allocate memory", "not enough memory", "out of memory")
"""PyTorch's, in a RuntimeError, on a CPU; Windows; a GPU before torch 2.5."""


class WorkerActor:
    """Created in a placement group of its own; gets everything else by calls. `number` is never given to another worker."""

    def __init__(self, credential: RunCredential, number: int, spec: bytes, host: str | None, orphan_timeout_s: float) -> None:
        self.credential, self.number, self.pickled_spec = credential, number, spec
        self.coordinate = f"worker {number}"
        self.footing = WorkingDir()
        self.spec: Any = None
        self.host = host
        self.core: Any = None
        self.guard: Any = None
        self.body: Any = None
        self.member: Any = None
        self.writer: Any = None
        self.mesh: Any = None
        self.backend: Any = None
        self.heard_s = time.monotonic()
        self.orphan_timeout_s = orphan_timeout_s
        self.doing = "starting"
        self.said: WorkerHello | None = None
        self.lifeline: LifelineListener | None = None
        self.computes = 0
        """Native id of the thread that executes steps; 0 before the first."""
        self.leaving = False
        with contextlib.suppress(ValueError):  # not the main thread: then a SIGTERM ends the process at once, as Ray has it
            signal.signal(signal.SIGTERM, self._asked_to_leave)
        threading.Thread(target=self._leave_when_orphaned, name=ORPHAN_THREAD, daemon=True).start()

    # -- step: one after the other -------------------------------------------------------------------------------------

    @ray.method(concurrency_group="step")  # type: ignore[untyped-decorator]
    def hello(self, joining: bool = False) -> WorkerHello | CallFailure:
        """Load torch, listen for the other workers; all that can be done before there is a plan. `joining`: in the middle of a
        run, where the others will have to wait for what is left to do."""
        return self._guard(LOADING, lambda: self._hello(joining))

    def _hello(self, joining: bool) -> WorkerHello:
        if self.said is not None:
            return self.said  # to a new driver
        with self.footing.elsewhere():
            import torch

        from raypar.actors.fingerprint import fingerprint
        from raypar.worker.allocator import freeze_what_stays, keep_freed_memory
        from raypar.worker.backend import make_backend
        from raypar.worker.compute_state import StateGuard
        from raypar.worker.elastic_worker import ElasticWorker
        from raypar.worker.state_snapshot import CheckpointWriter
        from raypar.worker.warm_up import warm_up
        from raypar.worker.worker_core import WorkerCore

        keep_freed_memory()
        self.guard = guard = StateGuard(threads=1)
        with guard.watching("a module that the job names"):
            self.spec = pickle.loads(self.pickled_spec)
        torch.set_num_threads(self.spec.threads)
        host = self.host or ray.util.get_node_ip_address()
        self.backend = make_backend(self.spec.device)
        device = self.backend.open_device(exact=self.spec.reduction == "canonical")
        self.mesh = self.backend.listen(host, self.credential)
        guard.accept()
        self.core = WorkerCore(self.spec, device=device, guard=guard, step_timeout_s=STEP_TIMEOUT_S)
        self.body = ElasticWorker(self.core, self.number)
        self.member = Member(self.number, self.body)
        self.writer = CheckpointWriter()
        warm_up(self.core, data=joining)
        freeze_what_stays(collect=True)
        node = ray.get_runtime_context().get_node_id()
        self.lifeline = LifelineListener(host)
        says = fingerprint(self.spec.threads, device)
        self.said = WorkerHello(self.mesh.address, node, os.getpid(), says, self.lifeline.address)
        return self.said

    @ray.method(concurrency_group="step")  # type: ignore[untyped-decorator]
    def adopt(
        self, generation: int, part: bytes, coordinate: str, addresses: Sequence[str], deadline_s: float
    ) -> dict[str, Any] | CallFailure | None:
        """Connect to the other workers of `generation`, hand over and take over state, build this worker's stages."""

        def build() -> dict[str, Any] | None:
            from raypar.comm.transport import run_routine
            from raypar.worker.allocator import freeze_what_stays, return_unused_memory

            self.member.hear(generation, f"generation {generation} begins")
            self._end_if_stuck()
            made = pickle.loads(part)

            def connect() -> Any:
                rank = made.ranks[self.number]
                return self.mesh.connect(
                    rank=rank,
                    size=len(addresses),
                    addresses=addresses,
                    generation=generation,
                    deadline_s=deadline_s,
                    communicators=self.backend.communicators(made, rank, self.spec, self.core.layout),
                )

            run_routine(self.member.adopt(generation, (made, connect)), deadline_s)
            freeze_what_stays(collect=False)
            if made.fresh or made.load:  # built from whole layers or files; in between nobody shall wait for this
                return_unused_memory()
            self.coordinate = coordinate
            described: dict[str, Any] | None = self.body.described
            return described

        return self._guard("building its stages", build)

    @ray.method(concurrency_group="step")  # type: ignore[untyped-decorator]
    def step(self, generation: int, step: int, trace: bool, cut: bool) -> Any:
        """One training step: a `StepReport` as a dict (spans: label, start and end in ms), or `CallFailure`.

        After a failure every later step of the generation fails too.
        """
        from raypar.comm.transport import run_routine

        self.body.trace, self.computes = trace, threading.get_native_id()
        routine = self.member.step(generation, step, cut)
        report = self._guard(f"in step {step + 1}", lambda: run_routine(routine, self.core.step_timeout_s))
        if isinstance(report, CallFailure):
            self._free_peers()
            return report
        return {**vars(report), "spans": [(s.label, s.start_ns / 1e6, s.end_ns / 1e6) for s in report.spans]}

    @ray.method(concurrency_group="step")  # type: ignore[untyped-decorator]
    def validate(self, generation: int, done: int) -> Any:
        """One validation pass: a `ValidationReport` as a dict, or `CallFailure`."""
        from raypar.comm.transport import run_routine

        return self._guard(
            f"in the validation after {done} steps",
            lambda: vars(run_routine(self.member.validate(generation), self.core.step_timeout_s)),
        )

    @ray.method(concurrency_group="step")  # type: ignore[untyped-decorator]
    def stand(self, generation: int) -> Any:
        """Where this worker stands (`elastic.member.WorkerStatus`), once what it was doing has ended."""
        return self._guard("saying where it stands", lambda: self.member.stand(generation))

    @ray.method(concurrency_group="step")  # type: ignore[untyped-decorator]
    def settle(self, generation: int, step: int, outcome: Any) -> Any:
        """Apply `step` late; where this worker stands then."""
        return self._guard(f"settling step {step + 1}", lambda: self.member.settle(generation, step, outcome))

    @ray.method(concurrency_group="step")  # type: ignore[untyped-decorator]
    def save(self, generation: int, done: int, folder: str) -> Any:
        """Copy the state after `done` steps, write it in the background; `save_result` has the outcome."""
        return self._guard("saving", lambda: self.member.save(generation, done, lambda: self._snapshot(Path(folder))))

    def _snapshot(self, folder: Path) -> None:
        from raypar.worker.state_snapshot import take_snapshot, written_state

        core = self.core
        names = written_state(core.assignment.plan, core.assignment.crossing, core.rank, core.stages)
        state = take_snapshot(core.stages, core.end.optimizers, names)
        self.writer.start(folder, f"worker_{core.rank:04d}.safetensors", state)

    # -- ctl: answers while a step runs --------------------------------------------------------------------------------

    @ray.method(concurrency_group="io")  # type: ignore[untyped-decorator]
    def save_result(self) -> Any:
        """Waits for the writer: its record, or `CallFailure` with the error of the disk."""
        return self._guard("writing", self.writer.result)

    @ray.method(concurrency_group="ctl")  # type: ignore[untyped-decorator]
    def ping(self) -> tuple[int, str, bool, float]:
        """(steps done, what it does, whether it has to leave, seconds that its computing thread has waited for a processor);
        keeps the worker from thinking that it is an orphan."""
        self.heard_s = time.monotonic()
        return self._done, self.doing, self.leaving, processor_wait_s(self.computes)

    def _asked_to_leave(self, number: int, frame: Any) -> None:
        """A cloud's notice. The driver hears of it by the next ping and moves the work off; if nobody asks, it ends."""
        if self.leaving and time.monotonic() - self.heard_s > LEAVE_S:
            os._exit(0)
        self.leaving = True

    @property
    def _done(self) -> int:
        return 0 if self.body is None else self.body.applied()

    @ray.method(concurrency_group="ctl")  # type: ignore[untyped-decorator]
    def hear(self, generation: int, reason: str) -> Any:
        """A new generation: what is done for an older one is aborted, and calls of it are refused from now on."""
        self.heard_s = time.monotonic()
        try:
            self.member.hear(generation, reason)
        except StaleGeneration as error:
            return CallFailure("aborted", error)
        self.mesh.abort_connect(reason)
        self._end_if_stuck()
        return None

    @ray.method(concurrency_group="ctl")  # type: ignore[untyped-decorator]
    def abort(self, reason: str) -> None:
        """Every pending wait of this worker's transport raises at once."""
        self.heard_s = time.monotonic()
        if self.mesh is not None:
            self.mesh.abort_connect(reason)
        if self.core is not None:
            self.core.abort(reason)
            self._end_if_stuck()

    @ray.method(concurrency_group="ctl")  # type: ignore[untyped-decorator]
    def stacks(self) -> str:
        """The stacks of the threads that work for raypar, as text."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        texts = [f"{self.doing}, after {self._done} steps"]
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

    @ray.method(concurrency_group="ctl")  # type: ignore[untyped-decorator]
    def close(self) -> None:
        """Stop loaders and sockets; the actor is killed afterwards."""
        if self.core is not None:
            self.core.close()
        if self.mesh is not None:
            self.mesh.close()

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _guard(self, doing: str, call: Callable[[], Any]) -> Any:
        self.heard_s = time.monotonic()
        self.doing = doing
        try:
            self.footing.keep()
            if self.guard is not None:
                self.guard.accept_directory()
            return call()
        except USER_CODE_ERRORS as error:  # a SystemExit would end this process without a word
            return self._judge(doing, error)
        finally:
            self.heard_s = time.monotonic()  # whoever waits for this is still there
            self.doing = "idle"

    def _judge(self, doing: str, error: BaseException) -> CallFailure:
        if isinstance(error, StaleGeneration):
            return CallFailure("aborted", error)
        if isinstance(error, CommError):
            return CallFailure("aborted", type(error)(f"{self.coordinate}, {doing}: {error.what}", error.cure))
        if is_out_of_memory(error):
            text = "".join(traceback.format_exception(error)).rstrip()
            first = str(error.what if isinstance(error, UserCodeError) else error).partition("\n")[0]
            what = f"{self.coordinate}, {doing}: out of memory: {first or type(error).__name__}\n{text}"
            return CallFailure("user", OutOfMemory(what, cure="use workers with more memory"))
        if isinstance(error, UserCodeError):
            return CallFailure("user", UserCodeError(f"{self.coordinate}, {doing}: {error.what}", error.cure))
        if isinstance(error, RayparError) or (isinstance(error, OSError) and doing in ("saving", "writing")):
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
        """Peers that wait for this worker learn it from the closed connection."""
        with contextlib.suppress(Exception):
            self.core.abort(f"{self.coordinate} has failed")
        self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """What NCCL does not let go of would keep this process's GPU busy in the next generation too. Its end is heard at once,
        and another worker can be hired."""
        stuck = () if self.mesh is None else self.mesh.stuck
        if stuck:
            print(f"{self.coordinate}: NCCL has not ended {', '.join(stuck)}; this process ends", file=sys.stderr, flush=True)
            os._exit(1)

    def _leave_when_orphaned(self) -> None:
        """Without a driver nobody would ever remove this worker: it removes its own placement group, which ends it. Where Ray
        does not answer, it ends all the same."""
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
    """Remove the placement group this process is in; with it goes the process."""
    group = ray.util.get_current_placement_group()
    if group is not None:
        ray.util.remove_placement_group(group)
        time.sleep(2.0)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, says that memory could not be had."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # two errors may be each other's cause
        seen.append(error)
        name = type(error).__name__
        refused = isinstance(error, RuntimeError) and any(words in str(error) for words in ALLOCATORS_SAY)
        if isinstance(error, MemoryError) or name == "OutOfMemoryError" or refused:
            return True
        error = error.__cause__
    return False


def worker_actor_class() -> Any:
    """The actor class. `io` is apart from `ctl`, so that a slow disk does not keep a worker from answering."""
    return ray.remote(concurrency_groups={"step": 1, "ctl": 2, "io": 1}, max_restarts=0)(WorkerActor)
