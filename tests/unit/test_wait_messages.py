"""What people are told while a run waits: when, in which words, and that nothing else is disturbed by it."""

import ast
import asyncio
import gc
import io
import json
import re
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import ugly_models
from helpers.partial_objects import make_with

import raypar
from raypar.actors import wait_reporter
from raypar.actors.events_for_client import EventFeed
from raypar.actors.wait_reporter import WaitReporter
from raypar.console.event_printer import EventPrinter
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import StepTimes
from raypar.elastic.user_messages import WaitAnnouncer, describe_waited_workers
from raypar.job import DataConfig, FunctionConfig
from raypar.launch.activity_reporter import ActivityReporter
from raypar.record.events import ActivityNotice, Note, StepRecord
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import read_microbatches
from raypar.worker.process.thread_activity import (
    ACTIVITIES,
    PURPOSES,
    WAITING_FOR_WORKERS,
    describe_thread_activity,
    reads_samples,
)

STEP = StepRecord(step=1, seconds=1.0, samples_per_s=8.0)


PACKAGE = Path(raypar.__file__).parent


def test_a_silence_is_broken_after_two_seconds_again_for_another_wait_and_every_half_minute():
    announcer, told = WaitAnnouncer(), {}
    for tenths in range(700):
        now = tenths / 10
        since, doing = (0.0, "loading PyTorch" if now < 5 else "reading sample 17") if now < 50 else (50.0, "idling")
        if (line := announcer.due_line(doing, now, since)) is not None:
            told[now] = line
    assert told == {
        2.0: "no news for 2 s; now loading PyTorch",
        7.0: "no news for 7 s; now reading sample 17",
        37.0: "no news for 37 s; now reading sample 17",
        52.0: "no news for 2 s; now idling",
    }


def test_waits_that_change_all_the_time_get_ever_fewer_lines_and_unknown_ones_none():
    announcer = WaitAnnouncer()
    lines = [announcer.due_line(f"measuring layer {t}", t / 10, 0.0) for t in range(1200)]
    assert [t for t, line in enumerate(lines) if line] == [20, 70, 140, 280, 560, 860, 1160], "ever fewer"
    assert [WaitAnnouncer().due_line(None, t, 0.0) for t in range(100)] == [None] * 100
    assert announcer.due_line("a step of a minute", 59.0, 1.0, patience_s=120.0) is None


@pytest.mark.parametrize("activities, text", [
    ({2: "loading PyTorch"}, "waiting for 1 of 4 workers (worker 2 is loading PyTorch)"),
    ({0: "a", 2: "b", 3: "a"}, "waiting for 3 of 4 workers (workers 0, 3 are a; worker 2 is b)"),
    ({0: "idle", 1: "reading sample 17", 2: "idle"}, "waiting for 1 of 4 workers (worker 1 is reading sample 17)"),
    ({0: "idle", 1: "idle"}, "waiting for 2 of 4 workers (workers 0, 1 are idle)"),
])  # fmt: skip
def test_workers_that_only_wait_for_others_are_left_out(activities, text):
    assert describe_waited_workers(activities, 4, "idle") == text


def test_an_only_worker_does_not_wait_for_others_and_is_not_counted():
    assert describe_waited_workers({7: "loading PyTorch"}, 1, "idle") == "waiting for worker 7 (it is loading PyTorch)"
    assert describe_waited_workers({0: "idle"}, 1, "idle") == "waiting for the answer of worker 0"
    both = describe_waited_workers({0: "a", 1: "b"}, 1, "idle")
    assert both == "waiting for 2 of 2 workers (worker 0 is a; worker 1 is b)", "one starts beside it"


def test_the_seconds_are_those_of_the_silence_and_not_of_what_is_done_now():
    """A data set that takes a quarter of a second was said to be made for 9 s."""
    announcer = WaitAnnouncer()
    assert announcer.due_line("loading PyTorch", 4.0, 0.0) == "no news for 4 s; now loading PyTorch"
    assert announcer.due_line("making the data set", 9.0, 0.0) == "no news for 9 s; now making the data set"


@pytest.mark.parametrize("file, function, words", [row for row in (*ACTIVITIES, *PURPOSES) if row[0].startswith("raypar/")])
def test_every_activity_is_that_of_a_function_there_is_with_the_variables_it_names(file, function, words):
    found = [
        node
        for node in ast.walk(ast.parse((PACKAGE.parent / file).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    assert found
    for name in [part.partition("}")[0].partition(".")[0] for part in words.split("{")[1:]]:
        there = [
            {n.id for n in ast.walk(one) if isinstance(n, ast.Name)} | {a.arg for a in [*one.args.args, *one.args.kwonlyargs]}
            for one in found
        ]
        assert any(name in names for names in there), name


def blocked(file: str, code: str, **more: object) -> tuple[threading.Thread, threading.Event]:
    """A thread that waits inside of `code`, which is said to be in that file; and what ends the wait."""
    over, inside = threading.Event(), threading.Event()
    space = {"wait": lambda: (inside.set(), over.wait(20)), **more}
    exec(compile(code, str(PACKAGE.parent / file), "exec"), space)
    thread = threading.Thread(target=space["run"], daemon=True)
    thread.start()
    assert inside.wait(20)
    return thread, over


READ = "def _sample():\n    index = 17\n    wait()\ndef _wait():\n    _sample()\nrun = _wait"


def test_a_slow_data_set_is_told_with_the_number_of_samples_that_are_read_before_the_run():
    class Slow(list):
        def __getitem__(self, index):
            if not over.is_set():
                inside.set()
                over.wait(20)
            return torch.ones(4), torch.ones(1)

    over, inside = threading.Event(), threading.Event()
    job = raypar.Trainer(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 1)),
        loss=torch.nn.functional.mse_loss,
        data=lambda: Slow(range(100)),
        steps=1,
        batch_size=17,
        microbatches=4,
    ).job
    graph = make_layer_graph(job)
    thread = threading.Thread(target=read_microbatches, args=(job, graph, [0, 3]), daemon=True)
    thread.start()
    assert inside.wait(20)
    told = describe_thread_activity(thread.ident)
    over.set()
    thread.join(20)
    assert re.fullmatch(r"reading sample \d+ \(read before the run: 9 samples of 2 microbatches\)", told or ""), told


@pytest.mark.parametrize("file, code, words", [
    ("raypar/worker/data/sample_reader.py", READ, "reading sample 17"),
    ("raypar/worker/data/sample_reader.py", READ.replace("    index = 17\n", ""), "reading sample"),
    ("raypar/comm/transport.py", "def wait_named(): wait()\nrun = wait_named", WAITING_FOR_WORKERS),
    ("somewhere/else.py", READ, None),
    (
        "raypar/worker/stage/backward.py",
        "def run_autograd_backward(): wait()\nrun = run_autograd_backward",
        "computing gradients",
    ),
])  # fmt: skip
def test_the_deepest_frame_that_has_words_says_what_a_thread_is_doing(file, code, words):
    thread, over = blocked(file, code)
    assert describe_thread_activity(thread.ident) == words
    over.set()
    thread.join(20)
    assert describe_thread_activity(thread.ident) is None


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("sampler", "computing the order of epoch 0 (data.sampler waits_in_sampler)"),
        ("collate", "calling data.collate waits_in_collate"),
    ],
)
def test_who_waits_for_a_sampler_or_a_collate_function_reads_samples(key: str, words: str):
    """The step's deadline passed, and a worker that was asleep in a sampler cost a new generation."""
    inside, over = threading.Event(), threading.Event()

    def waits_in_sampler(dataset: Any, epoch: int) -> list[int]:
        inside.set()
        over.wait(20)
        return list(range(len(dataset)))

    def waits_in_collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        inside.set()
        over.wait(20)
        return {"x": torch.tensor(samples)}

    function = FunctionConfig(function={"sampler": waits_in_sampler, "collate": waits_in_collate}[key])
    data = DataConfig(function=lambda: [1.0, 2.0], **{key: function})
    job = ugly_models.job("plain", microbatches=2, batch_size=2).replace(data=data)

    def read() -> None:
        order = SampleOrder.of_job(job, data.call())
        MicrobatchLoader(data.call(), data, order, job.batching, seed=1, fields=("x",)).get(0, 0)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert inside.wait(20) and thread.ident is not None
    told, reads = describe_thread_activity(thread.ident), reads_samples(thread.ident)
    over.set()
    thread.join(20)
    assert (told or "").replace("test_who_waits_for_a_sampler_or_a_collate_function_reads_samples.<locals>.", "") == words
    assert reads


def test_computation_inside_a_measurement_is_described_as_the_measurement():
    """A layer is measured by its backward pass too."""
    space = {}
    outer = "def _profile_layer(inner):\n    index = 3\n    inner()"
    exec(compile(outer, str(PACKAGE / "worker/measure_profile.py"), "exec"), space)
    inner = "def run_autograd_backward(): wait()\nrun = lambda: outer(run_autograd_backward)"
    thread, over = blocked("raypar/worker/stage/backward.py", inner, outer=space["_profile_layer"])
    assert describe_thread_activity(thread.ident) == "measuring layer 3 (from 0)"
    over.set()
    thread.join(20)


def test_a_command_says_what_it_is_doing_unless_it_or_the_driver_has_told_something(monkeypatch):
    monkeypatch.setattr("raypar.launch.activity_reporter.POLL_S", 0.02)
    told = []
    reporter = ActivityReporter(told.append, patience_s=0.2)
    read = {"sleep": time.sleep, "reporter": reporter}
    code = "def _sample(times, act):\n    index = 17\n    for _ in range(times):\n        sleep(0.05)\n        act()"
    exec(compile(code, str(PACKAGE / "worker/data/sample_reader.py"), "exec"), read)
    with reporter.reporting():
        read["_sample"](10, reporter.note_driver_answer)
        read["_sample"](10, lambda: reporter(STEP))
        assert set(map(id, told)) == {id(STEP)}
        read["_sample"](12, lambda: None)
    assert told[10:] == [ActivityNotice(text="no news for 0 s; now reading sample 17")]
    read["_sample"](10, lambda: None)
    assert len(told) == 11  # over


def test_what_is_waited_for_is_a_line_for_people_and_none_in_json():
    event = ActivityNotice(text="no news for 3 s; now loading PyTorch")
    for as_json, expected in ((False, "      no news for 3 s; now loading PyTorch\n"), (True, "")):
        out = io.StringIO()
        EventPrinter(steps=4, as_json=as_json, out=out)(event)
        assert out.getvalue() == expected
    out = io.StringIO()
    console = EventPrinter(steps=4, as_json=True, out=out)
    console(Note(text="x"))
    console(event)
    assert [json.loads(line)["kind"] for line in out.getvalue().splitlines()] == ["note"]


class Worker:
    """Answers what it is doing, or not at all."""

    def __init__(self, doing: str | None) -> None:
        self.doing, self.activity = doing, SimpleNamespace(remote=lambda: SimpleNamespace(future=self.answer))

    def answer(self):
        import concurrent.futures

        found = concurrent.futures.Future()
        if self.doing is not None:
            found.set_result(self.doing)
        return found


def reported(monkeypatch, unanswered: set[int], hellos: set[int], tells: bool = False, step_s: float = 0.0) -> list[str]:
    """What a driver of four workers tells within 0.6 s, if 0.1 s is a silence."""
    monkeypatch.setattr(wait_reporter, "POLL_S", 0.02)
    monkeypatch.setattr(wait_reporter, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(wait_reporter, "SILENCE_S", 0.1)
    doing = ["reading sample 17", WAITING_FOR_WORKERS, None, WAITING_FOR_WORKERS]
    steps = StepTimes()
    if step_s:
        steps.add(step_s, 4)

    async def run() -> list[str]:
        plan = SimpleNamespace(world=4)
        feed = EventFeed()
        reporter = make_with(
            WaitReporter,
            machine=SimpleNamespace(
                phase=Phase.RUNNING, step_times=steps, membership=SimpleNamespace(members=(0, 1, 2, 3), plan=plan)
            ),
            feed=feed,
            calls=SimpleNamespace(unanswered=unanswered),
            pool=SimpleNamespace(workers={n: Worker(each) for n, each in enumerate(doing)}),
            registry=SimpleNamespace(hellos=dict.fromkeys(hellos)),
        )
        watching = asyncio.ensure_future(reporter.watch())
        for _ in range(20):
            await asyncio.sleep(0.03)
            if tells:
                feed.tell(STEP)
        reporter.machine.phase = Phase.OVER
        await asyncio.wait_for(watching, 5)
        return [event["text"] for event in (await feed.after(0, 0, 0.0))[0] if event["kind"] == "waiting_for"]

    return asyncio.run(run())


def test_a_driver_names_the_workers_that_it_waits_for(monkeypatch):
    (line,) = reported(monkeypatch, {0, 1}, {0, 1, 2, 3})
    assert line == "no news for 0 s; now waiting for 1 of 4 workers (worker 0 is reading sample 17)"
    (line,) = reported(monkeypatch, set(), {0, 1, 3})
    assert line == "no news for 0 s; now waiting for 1 of 4 workers (worker 2 is starting up)"
    (line,) = reported(monkeypatch, {2}, {0, 1, 2, 3})
    assert line == "no news for 0 s; now waiting for 1 of 4 workers (worker 2 is not answering)"


def test_a_worker_that_is_too_busy_loading_to_answer_is_not_said_to_start_up_again(monkeypatch):
    """Lines went back from `loading PyTorch` to `starting up`, and forth."""
    loading = Worker("loading PyTorch and the job's code")
    reporter = make_with(
        WaitReporter,
        machine=SimpleNamespace(membership=SimpleNamespace(plan=SimpleNamespace(world=2))),
        calls=SimpleNamespace(unanswered=()),
        pool=SimpleNamespace(workers={0: loading, 1: Worker(None)}),
        registry=SimpleNamespace(hellos={}),
    )
    monkeypatch.setattr(wait_reporter, "ANSWER_TIMEOUT_S", 0.05)

    async def looks() -> list[str]:
        first = await reporter._what_is_waited_for()
        loading.doing = None
        return [first, await reporter._what_is_waited_for()]

    first, again = asyncio.run(looks())
    assert (
        first
        == again
        == ("waiting for 2 of 2 workers (worker 0 is loading PyTorch and the job's code; worker 1 is starting up)")
    )


def test_a_driver_that_waits_for_nobody_or_tells_enough_or_has_long_steps_says_nothing(monkeypatch):
    assert reported(monkeypatch, set(), {0, 1, 2, 3}) == []
    assert reported(monkeypatch, {0, 1}, {0, 1, 2, 3}, tells=True) == []
    assert reported(monkeypatch, {0, 1}, {0, 1, 2, 3}, step_s=1.0) == []


def test_a_call_that_fails_after_its_worker_was_given_up_prints_nothing():
    """Ray's error of a killed worker was printed, with twelve lines for each, above the run's own error."""
    answers, printed = [Future()], []

    async def scene():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: printed.append(context))
        reporter = make_with(WaitReporter)
        activity = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: answers[0]))
        assert await reporter._ask({0: SimpleNamespace(activity=activity)}) == {}
        answers.pop().set_exception(RuntimeError("it was killed"))
        await asyncio.sleep(0.01)
        del reporter, activity
        gc.collect()

    asyncio.run(scene())
    assert printed == []
