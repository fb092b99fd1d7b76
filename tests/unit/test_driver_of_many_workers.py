"""What many workers ask of their driver in a step: machine events and calls of Python functions are counted, never time."""

import asyncio
import importlib
import pickle
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from raypar.actors import (
    answer_batch,
    driver_actor,
    metrics_publisher,
    node_agents,
    run_state_in_ray_kv,
)
from raypar.elastic.call_routes import MOST_AGENTS
from raypar.elastic.events import StepReported, Tick
from raypar.elastic.run_machine import RunMachine

BENCH = Path(__file__).parents[2] / "jobs" / "bench"
WORKERS = 256
CALLS_PER_WORKER = 8
REPLACED = {  # by the bench, for its whole process
    answer_batch: ("ray",),
    driver_actor: ("ray",),
    metrics_publisher: ("make_ray_metrics",),
    node_agents: ("MOST_DIRECT", "start_node_agent", "kill_actor"),
    run_state_in_ray_kv: ("kv_put", "kv_get", "kv_delete", "kv_list"),
}


@pytest.fixture
def fakes(monkeypatch):
    """The bench's fake workers, whose steps are short here."""
    monkeypatch.syspath_prepend(str(BENCH))
    for module, names in REPLACED.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    found = importlib.import_module("fake_workers")
    monkeypatch.setattr(found, "STEP_S", 0.05)
    return found


def count_python_calls(counts, of_now):
    """Has `counts` count the calls of Python functions of raypar in all threads, while `of_now()` is true."""

    def called(frame, event, argument):
        if event == "call" and "/raypar/" in frame.f_code.co_filename and of_now():
            counts[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"] += 1

    threading.setprofile(called)
    sys.setprofile(called)


def test_answers_that_come_together_are_one_event_and_few_calls_of_functions(fakes, monkeypatch, tmp_path):
    """An event for each worker's report, with thirty calls, took the driver of 1,024 workers more than half of its time."""
    events, calls, running = Counter(), Counter(), []
    handle = RunMachine.handle

    def counted(machine, event, now_s):
        if machine.progress.emitted >= fakes.WARM_STEPS:
            running.append(type(event))
        return handle(machine, event, now_s)

    monkeypatch.setattr(RunMachine, "handle", counted)
    count_python_calls(calls, lambda: running)
    try:
        asyncio.run(fakes.own_costs(WORKERS, True, tmp_path))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    events.update(event for event in running if event is not Tick)
    steps = fakes.STEPS - fakes.WARM_STEPS
    assert 0 < events[StepReported] <= MOST_AGENTS * steps, events
    assert sum(events.values()) <= (MOST_AGENTS + 4) * steps, events
    assert calls.total() <= CALLS_PER_WORKER * WORKERS * steps, calls.most_common(30)


def test_a_request_has_the_plan_once_and_not_for_each_worker(fakes, monkeypatch, tmp_path):
    """To pickle the plan of 1,024 workers for each of them took 45 seconds."""
    monkeypatch.setattr(fakes, "replace", lambda made, **changes: made)
    request, _ = fakes.request_of(fakes.STAGES, 3, tmp_path)
    found = pickle.loads(request.assignments)
    assert len(found) == fakes.STAGES and len({id(one.plan) for one in found}) == 1
