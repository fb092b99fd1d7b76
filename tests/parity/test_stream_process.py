"""An undivided stream is read by one data process of a node, for all its workers: the samples and bits of one process."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers import reference, stream_cases, ugly_models

from raypar.data import shared_rows
from raypar.errors import DataError, RayparError
from raypar.job import DataConfig, Job
from raypar.job.data_section import MixedSourceConfig
from raypar.plan import ParallelPlan
from raypar.worker.data import fed_stream_reader, stream_feed, stream_feed_process
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.data.microbatch_stream_positions import StreamCursor, StreamsRead
from raypar.worker.data.pickled_sample import pickle_sample
from raypar.worker.data.stream_feed import StreamFeed
from raypar.worker.data.stream_feed_messages import FedSamples, Opening, SampleRequest, digest_of_sample
from raypar.worker.data.stream_feed_process import StreamFeedJob, StreamFeedProcess, socket_name
from raypar.worker.data.stream_loader import OpenStreams, StreamLoader
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

STEPS, SAMPLES = 9, 8


def job(source: Callable[..., Any], *, microbatches: int = 4, args: dict[str, Any] | None = None, **data: Any) -> Job:
    config = DataConfig(function=source, args=args or {}, streams=1, processes=1, **data)
    made = ugly_models.job("plain", microbatches=microbatches, steps=STEPS, batch_size=SAMPLES).replace(data=config)
    return resolve_streams(made).job


class Node:
    """The workers' sides of one data process of a node."""

    def __init__(self, *, in_this_process: bool) -> None:
        self.key, self.made, self.in_this_process = socket_name(os.urandom(32), "this node"), [], in_this_process

    def process(self, spec: Job) -> StreamFeedProcess:
        """That of one more worker."""
        told = StreamFeedJob(b"" if self.in_this_process else pickle.dumps(spec), self.key, {})
        if self.in_this_process and not self.made:
            self.feed = StreamFeed(spec.training_data, spec.seed, spec.batch_size, TorchStateGuard(spec.threads))
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self.key)
            listener.listen()
            self.thread = threading.Thread(target=stream_feed_process.serve, args=(listener, lambda: self.feed))
            self.thread.start()
        self.made.append(StreamFeedProcess(told, spec.data.label))
        return self.made[-1]

    def close(self) -> None:
        peers = {one._peer for one in self.made if one._peer}
        for one in self.made:
            one.close()
        if self.in_this_process and self.made:
            self.thread.join(10)
            assert not self.thread.is_alive(), "it serves nobody"
            passes = list(self.feed._passes)
            self.feed.close()
            for one in passes:
                one.rows._thread.join(10)  # it would draw random numbers of this process
        else:
            wait_until_gone(peers)


@pytest.fixture
def node() -> Iterator[Node]:
    """What a data process does, in a thread of this one."""
    made = Node(in_this_process=True)
    yield made
    made.close()


@pytest.fixture
def real_node() -> Iterator[Node]:
    """With the process."""
    made = Node(in_this_process=False)
    yield made
    made.close()


def wait_until_gone(processes: set[int]) -> None:
    deadline = time.monotonic() + 10
    while left := [one for one in processes if psutil.pid_exists(one) and psutil.Process(one).status() != "zombie"]:
        assert time.monotonic() < deadline, f"data processes outlive their workers: {left}"
        time.sleep(0.05)


class Worker:
    """What one worker reads: its microbatches of the steps."""

    def __init__(self, spec: Job, process: StreamFeedProcess | None, own: range, *, cursors: bool = True) -> None:
        self.streams = OpenStreams(process, wants_cursors=cursors)
        self.own = own
        self.loader = loader_of(spec, own, self.streams)

    def step(self, step: int) -> dict[int, Any]:
        """Microbatch -> (its samples, their fields, their digest)."""
        fields = {m: self.loader.get(step, m) for m in self.own}
        return {m: (self.loader.sample_positions(step, m), *fields[m].values(), self.loader.digest(step, m)) for m in self.own}


def loader_of(spec: Job, own: range, streams: OpenStreams) -> StreamLoader:
    return StreamLoader(
        spec.training_data, spec.batching, seed=spec.seed, fields=(spec.data.input or "x",), own=own, streams=streams
    )


def same(found: dict[int, Any], want: dict[int, Any]) -> bool:
    return all(found[m][0] == want[m][0] and torch.equal(found[m][1], want[m][1]) and found[m][2] == want[m][2] for m in found)


def in_one_process(spec: Job, steps: int = STEPS) -> list[dict[int, Any]]:
    worker = Worker(spec, None, range(spec.microbatches))
    return [worker.step(step) for step in range(steps)]


MIX = (
    MixedSourceConfig(function=stream_cases.Resuming, ratio=2),
    MixedSourceConfig(function=stream_cases.whole, args={"size": 11}, ratio=1),
)
CASES: dict[str, Job] = {
    "a generator function": job(stream_cases.whole),
    "with set_epoch, in windows": job(stream_cases.Plain, shuffle_window=5),
    "that keeps its place, in windows": job(stream_cases.Resuming, shuffle_window=7),
    "tar": job(stream_cases.tar_shards, input="x.npy"),
    "a mixture": job(stream_cases.whole, shuffle_window=3).replace(
        data=DataConfig(mix=MIX, streams=1, processes=1, shuffle_window=3)
    ),
}


COUNTED = 0


def counted() -> Iterator[dict[str, Any]]:
    """Counts the samples that it gives in this process."""
    global COUNTED
    for one in stream_cases.whole(1000):
        COUNTED += 1
        yield one


def slow_at_17() -> Iterator[dict[str, Any]]:
    for index, one in enumerate(stream_cases.whole()):
        time.sleep(0.6 * (index == 17))
        yield one


def with_a_lock() -> Iterator[dict[str, Any]]:
    for one in stream_cases.whole():
        yield {**one, "lock": threading.Lock()}


def of_two(spec: Job, node: Node) -> list[Worker]:
    """Two workers, each with every second microbatch."""
    return [Worker(spec, node.process(spec), range(first, spec.microbatches, 2)) for first in range(2)]


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
def test_workers_are_handed_the_samples_that_each_would_read(spec: Job, node: Node):
    want = in_one_process(spec)
    workers = of_two(spec, node)
    for step in range(STEPS):
        for worker in workers:
            assert same(worker.step(step), want[step]), step
            worker.loader.read_ahead(step + 1, worker.own)
    epochs = [report.epochs for report in (worker.loader.report(STEPS - 1) for worker in workers)]
    alone = Worker(spec, None, range(4))
    for step in range(STEPS):
        alone.step(step)
    assert epochs[1] == alone.loader.report(STEPS - 1).epochs


def test_a_sample_is_read_once_however_many_workers_there_are_and_not_far_ahead(node: Node):
    global COUNTED
    spec = job(counted, microbatches=4)
    workers = [Worker(spec, node.process(spec), range(first, first + 1)) for first in range(4)]
    COUNTED = 0
    for step in range(20):
        for worker in workers:
            worker.step(step)
    time.sleep(0.1)
    assert 20 * SAMPLES <= COUNTED <= (20 + stream_feed.AHEAD_STEPS) * SAMPLES + 1
    rows = node.feed._passes[0].rows
    assert len(rows._chunks) <= (stream_feed.KEPT_STEPS + stream_feed.AHEAD_STEPS) * SAMPLES + 2


@pytest.mark.parametrize("spec", CASES.values(), ids=CASES)
def test_who_takes_over_goes_on_with_what_is_kept_and_what_was_dropped_is_read_again(spec: Job, node: Node):
    want = in_one_process(spec, STEPS + 3)
    workers = of_two(spec, node)
    for step in range(STEPS):
        for worker in workers:
            worker.step(step)
    workers[0].streams.close()
    for step in range(STEPS, STEPS + 3):  # the other one has all microbatches now
        left = Worker.__new__(Worker)
        left.__dict__ |= {**vars(workers[1]), "own": range(4)}
        left.loader = loader_of(spec, range(4), workers[1].streams)
        assert same(left.step(step), want[step])
    assert len(node.feed._passes) == 1
    late = Worker(spec, node.process(spec), range(4))
    late.streams.learn({}, {}, {(1, m): want[1][m][2] for m in range(4)})
    assert same(late.step(2), want[2]) and len(node.feed._passes) == 2


CURSORS: dict[str, tuple[Any, bool]] = {
    "a source that keeps its place": (stream_cases.Resuming, True),
    "a source that keeps no place": (stream_cases.whole, False),
    "a source whose state is not all of it": (stream_cases.Buffered, False),
    "one whose state stays": (stream_cases.Sticky, False),
}


@pytest.mark.parametrize(("source", "fast"), CURSORS.values(), ids=CURSORS)
@pytest.mark.parametrize("window", [0, 7])
def test_who_resumes_reads_the_same_and_with_cursors_little_of_it_twice(source: Any, fast: bool, window: int):
    spec, done = job(source, args={"size": 1000}, shuffle_window=window), 20
    want, first, second = in_one_process(spec, done + 2), Node(in_this_process=True), Node(in_this_process=True)
    try:
        workers = of_two(spec, first)
        for step in range(done - 1):
            found: dict[int, Any] = {}
            epochs: dict[int, Any] = {}
            for worker in workers:
                worker.step(step)
                report: StreamsRead = worker.loader.report(step)
                found |= {number: (tuple(cursor),) for number, cursor in report.cursors.items()}
                epochs |= {number: (mark,) for number, mark in report.epochs.items()}
        assert bool(found) == (source is not stream_cases.whole)
        known = {(done - 1, m): want[done - 1][m][2] for m in range(4)}
        first.close()
        alone = Worker(spec, None, range(4))  # cursors are the same for who reads by himself
        for resumed in ([alone], of_two(spec, second)):
            for one in resumed:
                one.streams.learn(epochs, found, known)
            for step in (done, done + 1):
                for one in resumed:
                    assert same(one.step(step), want[step])
        passes = second.feed._passes
        assert len(passes) == (2 if source in (stream_cases.Buffered, stream_cases.Sticky) else 1)
        for reader in (passes[-1]._reader, *alone.streams.readers.values()):
            assert (reader.skipped <= SAMPLES + 2 * window) == fast, reader.skipped
    finally:
        first.close()
        second.close()


def test_an_error_of_the_source_reaches_all_workers_with_its_place(node: Node):
    spec = job(stream_cases.Raises)
    for worker in of_two(spec, node):
        with pytest.raises(RayparError, match=r"stream 0 of 1, sample 11 \(epoch 0\): the data set raised .*sample 11 is"):
            for step in range(3):
                worker.step(step)


def test_waiting_ends_with_an_error_that_names_the_process_and_the_sample(node: Node, monkeypatch: pytest.MonkeyPatch):
    spec = job(slow_at_17)
    monkeypatch.setattr(shared_rows, "ANSWER_S", 0.05)
    monkeypatch.setattr(shared_rows, "SILENT_S", 0.2)
    worker = Worker(spec, node.process(spec), range(4))
    with pytest.raises(DataError, match=rf"of this node \(process {os.getpid()}\) that reads .*slow_at_17 has read no "):
        for step in range(3):
            worker.step(step)
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(key := socket_name(b"1" * 32, "silent"))
    silent.listen()
    monkeypatch.setattr(stream_feed_process, "SILENT_S", 0.1)
    with (
        silent,
        pytest.raises(DataError, match=r"that reads it has not answered for 0 s; sample 5 of the stream is w"),
    ):
        StreamFeedProcess(StreamFeedJob(b"", key, {}), "it").read(SampleRequest(5, 1, {}))
    monkeypatch.setattr(stream_feed_process, "START_S", 0.1)
    monkeypatch.setattr(StreamFeedProcess, "_start", lambda self: None)
    with pytest.raises(DataError, match=r"that reads it has not started within 0 s"):
        StreamFeedProcess(StreamFeedJob(b"", socket_name(b"1" * 32, "none"), {}), "it").read(SampleRequest(5, 1, {}))


def unresolved(**data: Any) -> Job:
    return resolve_streams(ugly_models.job("plain").replace(data=DataConfig(**data))).job


REFUSED: dict[str, tuple[Callable[[], Job], str]] = {
    "several processes": (
        lambda: unresolved(function=stream_cases.whole, processes=2),
        r"data\.processes is 2, .* one process of a node can read it\n  cure: set data\.processes: 1",
    ),
    "several streams": (
        lambda: unresolved(function=stream_cases.Divided, processes=1),
        r"is read as 4 streams, by the workers themselves\n  cure: .* with data\.streams: 1 and data\.p",
    ),
    "samples that are no data": (
        lambda: job(with_a_lock),
        r"a sample of data set .*with_a_lock cannot be handed from the process that reads it .*lock.*\n  cure: let it give t",
    ),
    "rows of Ray Data": (
        lambda: job(OfRayData),
        r"a ray\.data\.Dataset, whose rows an actor computes and hands to all workers\n  cure: leave data\.processes out",
    ),
}


class OfRayData(stream_cases.Divided):
    line_about_one_stream = "an actor computes its rows"


@pytest.mark.parametrize(("make", "text"), REFUSED.values(), ids=REFUSED)
def test_what_no_process_can_read_is_refused_before_the_run(make: Callable[[], Job], text: str):
    with pytest.raises(RayparError, match=text):
        make()


TENSORS = {
    "whole": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "expanded": torch.arange(3).expand(4, 3),
    "part of a large one": torch.arange(100_000)[7:9],
    "a column of a large one": torch.arange(100_000).reshape(1000, 100)[:, 3],
    "a number": torch.tensor(5),
    "empty": torch.zeros(0, 3),
    "bfloat16": torch.arange(6.0).bfloat16()[::2],
    "complex": torch.arange(3.0) * 1j,
    "bools": torch.tensor([True, False]),
    "conjugated": (torch.arange(3.0) * 1j).conj(),
    "with gradient": torch.arange(3.0, requires_grad=True),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_is_handed_over_with_its_values_and_strides_and_nothing_else(tensor: torch.Tensor):
    pickled = pickle_sample({"x": tensor})
    found = pickle.loads(pickled)["x"]
    assert torch.equal(found, tensor) and found.dtype == tensor.dtype and found.requires_grad == tensor.requires_grad
    assert found.stride() == tensor.stride() or tensor.numel() == 1000
    assert len(pickled) < 9000


def test_classes_of_the_script_that_was_started_are_refused():
    made = type("Made", (), {"__module__": "__main__"})
    with pytest.raises(pickle.PicklingError, match="its class Made is in the script that was started"):
        pickle_sample([made()])


@pytest.mark.parametrize("plan", [ParallelPlan.mesh(dp=2, layers=8), ParallelPlan.mesh(dp=2, pp=2, layers=8)], ids=str)
@pytest.mark.full
def test_training_has_the_bits_of_one_process_also_when_the_data_process_is_killed(plan: ParallelPlan, real_node: Node):
    spec = job(stream_cases.Resuming, args={"size": 31}, shuffle_window=5)
    graph = make_layer_graph(spec)
    want = reference.train(graph, spec)
    with OneProcessRun(spec, plan, "1f1b", graph=graph) as here:
        for core in here.cores:
            core.data.streams.process = real_node.process(spec)
        killed = set()
        for step in range(STEPS):
            if step in (3, 6):
                (peer,) = {one._peer for one in real_node.made if one._peer}
                killed.add(peer)
                os.kill(peer, signal.SIGKILL)
            reports = here.step(step)
            assert {report.loss for report in reports} == {want.losses[step]}
        found = here.parameters()
    assert len(killed) == 2
    for name, value in want.parameters.items():
        assert all(torch.equal(copy, value) for copy in found[name]), name


@pytest.mark.full
def test_the_data_process_outlives_the_worker_that_started_it_and_ends_with_the_last_one(real_node: Node, tmp_path: Path):
    spec = job(stream_cases.whole)
    (tmp_path / "job").write_bytes(pickle.dumps((spec, real_node.key)))
    reads = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path / "job"), *sys.path], stdout=subprocess.PIPE, text=True
    )
    assert reads.stdout is not None
    peer = int(reads.stdout.readline())
    here = Worker(spec, real_node.process(spec), range(4))
    want = in_one_process(spec, 3)
    assert same(here.step(0), want[0]) and here.streams.process is not None and here.streams.process._peer == peer
    reads.kill()
    reads.wait(10)
    time.sleep(1.5)  # longer than the process stays without a worker that reads
    assert same(here.step(1), want[1]) and psutil.pid_exists(peer)
    here.streams.close()
    wait_until_gone({peer})


def test_a_pass_that_a_wrong_cursor_has_opened_is_given_to_nobody():
    """Each worker knows places of its own when a data process is killed: one that had found the stream by a right place was
    given samples of the pass that another's wrong one had opened, until that worker noticed."""
    spec = job(stream_cases.Resuming, args={"size": 1000})
    feeds = [StreamFeed(spec.training_data, spec.seed, spec.batch_size, TorchStateGuard(spec.threads)) for _ in range(3)]
    for feed in feeds:  # which have a process each, and so its generators: here they read ahead in turn
        feed._turn = feeds[0]._turn
    begin = {0: [(0, 0)]}

    def read(feed: StreamFeed, position: int, opening: Opening) -> FedSamples:
        given: Opening | None = None
        for _ in range(20):
            found = feed.read(SampleRequest(position, 4, {}, opening=given))
            if found is not None and found.contents:
                return found
            given = opening if found is None else None
        raise AssertionError("no samples")

    try:
        right, other = (read(feeds[0], position, Opening(begin, {})) for position in (40, 16))
        seen = {43: digest_of_sample(right.contents[3])}
        assert read(feeds[1], 40, Opening(begin, right.cursors, seen)).contents == right.contents
        wrong = {0: StreamCursor(40, 0, 40, other.cursors[0].state)}
        assert read(feeds[2], 40, Opening(begin, wrong, seen)).contents == right.contents
        opening = Opening(begin, {0: wrong[0]._replace(position=20)})
        assert read(feeds[2], 20, opening).contents[0] == read(feeds[0], 20, Opening(begin, {})).contents[0]
        assert [one.by_cursor for feed in feeds for one in feed._passes] == [False, False, True, False]
        assert [feed._uses_cursors for feed in feeds] == [True, True, False]
    finally:
        for feed in feeds:
            feed.close()


WORKER = """
import pickle, sys, time
sys.path[:] = sys.argv[2:]
from raypar.worker.data.stream_feed_process import StreamFeedJob, StreamFeedProcess
from raypar.worker.data.stream_feed_messages import Opening, SampleRequest
spec, key = pickle.load(open(sys.argv[1], "rb"))
process = StreamFeedProcess(StreamFeedJob(pickle.dumps(spec), key, {}), "it")
while not (found := process.read(SampleRequest(0, 1, {}, False, Opening({}, {})))).contents:
    pass
print(process._peer, flush=True)
time.sleep(60)
"""
"""A worker that reads a sample, and stays."""


def test_a_worker_whose_pass_is_given_up_for_others_waits_for_the_new_one(monkeypatch: pytest.MonkeyPatch):
    """`has read no sample for 120 s`, while the new pass read those before its place."""
    monkeypatch.setattr(shared_rows, "SILENT_S", 0.3)

    class Answers:
        who = "the data process"

        def __init__(self, *progress: int) -> None:
            empty = [FedSamples((), one, 0, {}, {}, {}, []) for one in progress]
            self.given = iter([*empty, FedSamples((pickle_sample(((0, 45), "it")),), 46, 0, {}, {}, {}, [])])

        def read(self, request: SampleRequest) -> FedSamples:
            time.sleep(0.02)
            return next(self.given)

    def read_from(*progress: int) -> object:
        reader = fed_stream_reader.FedStreamReader(Answers(*progress), job(stream_cases.whole).data, 1, None)  # type: ignore[arg-type]
        reader.seek(45)
        return reader.read()

    assert read_from(40, *range(3, 40)) == ((0, 45), "it")
    with pytest.raises(DataError, match=r"the data process has begun 6 times anew, for readers at other places; sample 45 of"):
        read_from(*[40, 3] * 20)


STARTER = """
import os, sys, time
sys.path[:] = sys.argv[2:]
os.environ["STARTED_BY"] = str(os.getpid())
from raypar.worker.data.stream_feed_process import StreamFeedJob, StreamFeedProcess
from raypar.worker.data.stream_feed_messages import SampleRequest
process = StreamFeedProcess(StreamFeedJob(bytes.fromhex(sys.argv[1]), os.urandom(9).hex().encode(), {}), "it")
print(flush=True)
process.read(SampleRequest(0, 1, {})) if process._job.job else process.begin()
time.sleep(60)
"""
"""A worker that starts the process, and asks it for a sample, or not yet."""


class LongToLoad:
    """A job whose modules are imported for half a minute."""

    def __reduce__(self) -> tuple[Callable[[float], None], tuple[float]]:
        return time.sleep, (30.0,)


@pytest.mark.parametrize("job", [b"", pickle.dumps(LongToLoad())], ids=["nobody has read", "it still loads the job"])
def test_the_data_process_ends_at_once_with_its_only_worker_also_before_it_has_answered(job: bytes):
    """It stayed for a minute, or until it had loaded the data set."""
    with subprocess.Popen([sys.executable, "-c", STARTER, job.hex(), *sys.path], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline()
        deadline = time.monotonic() + 30
        while not (found := started_by(worker.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0 + 2 * bool(job))
        worker.kill()
    wait_until_gone(found)


def started_by(worker: int) -> set[int]:
    """Data processes with this worker's mark in their environment, which have a session of their own by now."""
    found = set()
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if one.environ().get("STARTED_BY") == str(worker) and os.getsid(one.pid) == one.pid:
                found.add(one.pid)
    return found


@pytest.mark.full
def test_a_data_set_that_ends_its_process_is_an_error_after_some_attempts(real_node: Node):
    spec = job(stream_cases.whole).replace(data=DataConfig(function=ends_its_process, streams=1, processes=1))
    worker = Worker(spec, real_node.process(spec), range(4))
    with pytest.raises(DataError, match=r"that reads .*ends_its_process is gone, as 5 before it, and none has come further"):
        for step in range(9):
            worker.step(step)


def ends_its_process() -> Iterator[dict[str, Any]]:
    for index, one in enumerate(stream_cases.whole()):
        if index == 12 and threading.current_thread() is not threading.main_thread():
            os._exit(3)
        yield one
