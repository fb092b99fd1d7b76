"""A driver by itself, without a cluster."""

import asyncio
import contextlib
import itertools
import threading
import time
from types import SimpleNamespace

import pytest
from helpers.partial_objects import make_with
from ray.exceptions import ActorUnavailableError

from raypar.actors import driver_actor as module
from raypar.actors import driver_shutdown, membership_actions
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.driver_actor import DriverActor
from raypar.actors.events_for_client import STEP_POLLS_BURST, EventFeed
from raypar.actors.membership_actions import KernelOomKills
from raypar.actors.run_state_in_ray_kv import DriverReplaced
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.elastic.actions import Teardown
from raypar.elastic.deadlines import CpuWaitDeadlineExtension
from raypar.elastic.events import CallFailed, StopRequested
from raypar.errors import WorkerLost
from raypar.record.events import StepRecord, WorkerLoss


def test_a_driver_that_is_started_again_begins_even_if_ray_does_not_know_yet_that_it_lives(monkeypatch):
    """Its call to itself failed once with `The actor is restarting`, and the run hung for good."""
    begun, calls = threading.Event(), []

    def result(timeout_s):
        calls.append("a call")
        if len(calls) < 3:
            raise ActorUnavailableError("The actor is restarting.", None)
        driver.begin_again_called = True
        begun.set()

    call = SimpleNamespace(future=lambda: SimpleNamespace(result=result))
    me = SimpleNamespace(begin_again=SimpleNamespace(remote=lambda: call))
    context = SimpleNamespace(was_current_actor_reconstructed=True, current_actor=me)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    driver = DriverActor("tiny")
    assert begun.wait(5.0), calls


def test_what_the_client_has_is_forgotten_and_what_it_may_have_missed_is_not():
    """A driver kept every step of a run of days."""

    async def scene():
        news = EventFeed()
        for step in range(3):
            news.tell(StepRecord(step=step + 1, seconds=1.0, samples_per_s=1.0))
        asked = [await news.after(0, 0, 0.01)]  # of a client that knew another driver
        asked += [await news.after(news.epoch, 0, 0.01)]  # the answer was lost
        news.tell(StepRecord(step=3 + 1, seconds=1.0, samples_per_s=1.0))
        asked += [await news.after(news.epoch, 3, 0.01), await news.after(news.epoch, 4, 0.01)]
        return [([event["step"] for event in events], cursor) for events, _, cursor in asked], news._kept

    told, kept = asyncio.run(scene())
    assert told == [([1, 2, 3], 3), ([1, 2, 3], 3), ([4], 4), ([], 4)]
    assert kept == []


def test_of_many_quick_steps_each_answer_tells_several_and_everything_else_is_told_at_once(monkeypatch):
    """Polls cost the driver of 8 workers as much as another worker."""
    monkeypatch.setattr("raypar.actors.events_for_client.STEP_POLLS_BURST", 3)
    monkeypatch.setattr("raypar.actors.events_for_client.STEP_POLLS_PER_S", 0.1)

    async def scene():
        news, cursor, told = EventFeed(), 0, []
        for number in range(4):
            news.tell(StepRecord(step=number + 1, seconds=1.0, samples_per_s=1.0))
            poll = asyncio.ensure_future(news.after(news.epoch, cursor, 0.01))
            await asyncio.wait([poll], timeout=0.05)
            if number < 3:
                _, _, cursor = poll.result()
        told.append(poll.done())
        news.tell(StepRecord(step=4 + 1, seconds=1.0, samples_per_s=1.0))
        await asyncio.wait([poll], timeout=0.05)
        told.append(poll.done())
        news.tell(WorkerLoss(worker=1))
        events, _, _ = await asyncio.wait_for(poll, 1.0)
        return told, [event["kind"] for event in events]

    assert asyncio.run(scene()) == ([False, False], ["step", "step", "lost"])


def test_quick_steps_are_told_evenly_and_not_in_bursts_with_long_breaks(monkeypatch):
    """After 20 answers in a second nothing was told for three, and the client said that it waited for the driver's process."""
    monkeypatch.setattr("raypar.actors.events_for_client.STEP_POLLS_PER_S", 10.0)

    async def scene():
        news, cursor, answered_s = EventFeed(), 0, []

        async def train():
            for number in range(150):
                news.tell(StepRecord(step=number + 1, seconds=1.0, samples_per_s=1.0))
                await asyncio.sleep(0.02)

        training = asyncio.ensure_future(train())
        while not training.done():
            _, _, cursor = await news.after(news.epoch, cursor, 0.3)
            answered_s.append(time.monotonic())
        return answered_s, cursor

    answered_s, cursor = asyncio.run(scene())
    assert cursor == 150
    assert max(b - a for a, b in itertools.pairwise(answered_s)) < 1.0
    assert len(answered_s) <= STEP_POLLS_BURST + 10 * (answered_s[-1] - answered_s[0]) + 2


def test_a_driver_whose_client_is_gone_leaves_when_the_run_has_ended(monkeypatch):
    """It stayed, and its run was active for good: what was to end it waited for a call of the client's."""
    killed = []

    def kill(actor, no_restart):
        killed.append((actor, no_restart))
        if len(killed) == 2:
            raise asyncio.CancelledError  # the process is gone

    monkeypatch.setattr(driver_shutdown, "CLIENT_GONE_S", 0.0)
    monkeypatch.setattr(driver_shutdown.ray, "kill", kill)
    monkeypatch.setattr(driver_shutdown.ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="itself"))
    erased = []
    journal = SimpleNamespace(erase=lambda: erased.append(1))

    async def scene():
        news = EventFeed()
        with contextlib.suppress(asyncio.CancelledError):
            await make_with(driver_shutdown.DriverShutdown, journal=journal, feed=news)._leave({"end": "done"})
        return [event["kind"] for event in news._kept]

    assert asyncio.run(scene()) == ["end"]
    assert killed == [("itself", True)] * 2 and erased, "again, for the store may not answer"


def test_a_driver_that_was_replaced_in_its_last_steps_removes_nothing():
    """Quick steps look for another driver four times a second only; the workers and the journal are the other one's then."""
    feed, done = EventFeed(), []

    def check_claim(steps):
        raise DriverReplaced(f"step {steps}: another driver of this run has claimed generation 3")

    journal = SimpleNamespace(check_claim=check_claim, end=lambda facts: done.append("end"), erase=lambda: done.append("erase"))
    pool = SimpleNamespace(close=lambda: done.append("close"))

    async def scene():
        shutdown = make_with(driver_shutdown.DriverShutdown, journal=journal, feed=feed, pool=pool)
        await shutdown.end_run(Teardown("done", "all 8 steps are done", 8), 8)
        return [(event["kind"], event["end"], event["done"]) for event in feed._kept]

    assert asyncio.run(scene()) == [("end", "deposed", 8)] and done == []


def test_the_end_of_a_run_waits_for_a_callback_that_hangs_for_a_limited_time_and_is_recorded_without_it(monkeypatch):
    """Ctrl-C ended no such run, nor did a failure; only a second Ctrl-C did."""
    monkeypatch.setattr(driver_shutdown, "HURRIED_CALLBACKS_S", 0.1)
    feed, done, hangs = EventFeed(), [], threading.Event()
    recorder = SimpleNamespace(callbacks="some", record_end=lambda *given: done.append(recorder.callbacks), new_events=list)

    async def scene():
        tasks = BackgroundTasks(lambda event: None)
        effects = SideEffectThread(recorder, None, feed, tasks)
        assert not await effects.abandon_if_busy(10.0), "it has nothing to do"
        effects.aside(hangs.wait)
        effects.perform(lambda: done.append("a later step"), lambda _: None)
        shutdown = make_with(
            driver_shutdown.DriverShutdown,
            feed=feed,
            side_effects=effects,
            recorder=recorder,
            journal=SimpleNamespace(check_claim=lambda steps: None, end=lambda facts: None),
            pool=SimpleNamespace(close=lambda: asyncio.sleep(0)),
            write_members_file=lambda: None,
        )
        shutdown._leave = lambda facts: asyncio.sleep(0)
        await asyncio.wait_for(shutdown.end_run(Teardown("interrupted", "Ctrl-C", 4), 8), 10.0)
        hangs.set()

    asyncio.run(scene())
    assert done == [None], "recorded once, and no callback was called"
    assert "a callback has not returned" in feed._kept[0]["text"] and "cure: " in feed._kept[0]["text"]


def test_a_callback_that_hangs_at_the_very_end_keeps_no_run_from_its_end(monkeypatch):
    """All steps were done and saved, and the command did not return."""
    monkeypatch.setattr(driver_shutdown, "END_CALLBACKS_S", 0.1)
    feed, hangs = EventFeed(), threading.Event()
    recorder = SimpleNamespace(callbacks="some", record_end=lambda *given: hangs.wait(), new_events=list)

    async def scene():
        effects = SideEffectThread(recorder, None, feed, BackgroundTasks(lambda event: None))
        shutdown = make_with(
            driver_shutdown.DriverShutdown,
            feed=feed,
            side_effects=effects,
            recorder=recorder,
            journal=SimpleNamespace(check_claim=lambda steps: None, end=lambda facts: None),
            pool=SimpleNamespace(close=lambda: asyncio.sleep(0)),
            write_members_file=lambda: None,
        )
        shutdown._leave = lambda facts: asyncio.sleep(0)
        await asyncio.wait_for(shutdown.end_run(Teardown("done", "all 4 steps are done", 4), 8), 10.0)
        hangs.set()

    asyncio.run(scene())
    assert "has not returned from on_end" in feed._kept[0]["text"]


@pytest.mark.parametrize("age_s, stops", [(0.0, False), (3000.0, False), (3599.9, True)])
def test_the_time_that_a_run_may_take_is_counted_over_all_its_drivers(age_s, stops):
    """Each new driver gave it the whole time again."""
    driver = DriverActor.__new__(DriverActor)
    driver.feed, driver.queue = EventFeed(), asyncio.Queue()
    driver.request = SimpleNamespace(job=SimpleNamespace(max_time_s=3600.0))
    driver.recorder = SimpleNamespace(age_s=age_s)
    driver.registry = SimpleNamespace(
        unheard_workers=frozenset,
        ended_workers=frozenset,
        reading_workers=frozenset,
        searching_workers=frozenset,
        cpu_wait=CpuWaitDeadlineExtension(),
    )
    driver.machine = SimpleNamespace(phase=module.Phase.RUNNING)

    async def scene():
        ticking = asyncio.ensure_future(driver._tick())
        await asyncio.sleep(0.6)
        assert not ticking.done(), ticking.exception()
        ticking.cancel()
        return [driver.queue.get_nowait() for _ in range(driver.queue.qsize())]

    assert any(isinstance(event, StopRequested) for event in asyncio.run(scene())) == stops


def test_processes_that_the_kernel_ends_for_lack_of_memory_are_counted_since_the_last_look(tmp_path):
    vmstat = tmp_path / "vmstat"
    assert KernelOomKills(vmstat).new() == 0, "a kernel that does not say"
    vmstat.write_text("nr_free_pages 5\noom_kill 11\n")
    kills = KernelOomKills(vmstat)
    vmstat.write_text("nr_free_pages 5\noom_kill 13\n")
    assert [kills.new(), kills.new()] == [2, 0]


@pytest.mark.parametrize("on_one_machine, killed, avoided", [(True, 2, {"head", "other"}), (True, 0, set()), (False, 2, set())])
def test_after_the_kernel_has_ended_workers_for_lack_of_memory_none_is_started_for_a_while(
    on_one_machine, killed, avoided, monkeypatch
):
    """In a container with room for two of four workers the new ones brought death to those that were left, and to the run."""
    monkeypatch.setattr(membership_actions.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "head"))
    told, nodes = [], set()
    members = make_with(
        membership_actions.MembershipActions,
        memory_kills=SimpleNamespace(new=lambda: killed) if on_one_machine else None,
        registry=SimpleNamespace(node_of_worker={1: "other"}, avoid_nodes=nodes.update),
        side_effects=SimpleNamespace(note=lambda event: told.append(event.text)),
        pool=SimpleNamespace(workers={}),
    )
    members.note_event(CallFailed("lost", WorkerLost("gone"), 1))
    assert nodes == avoided
    assert [text.splitlines()[0] for text in told] == [
        "the kernel has ended 2 processes of this machine because memory is short: no worker is started for 90 s or more"
    ] * bool(avoided)
