"""A slow data set is named as what workers wait for, with its share of a step, in all that tells people of a run."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.recorded_runs import view_of
from torch import nn

from raypar.actors.run_recorder import RunRecorder
from raypar.console.event_printer import EventPrinter
from raypar.console.run_report import summary_facts
from raypar.console.run_status import build_run_status, format_status
from raypar.elastic.run_policy import RunPolicy
from raypar.job import Job
from raypar.plan import ParallelPlan
from raypar.worker.data.slow_data_watch import STEPS, SlowDataWatch
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

SLEEP_S = 0.005


class Slow:
    """Samples that take 5 ms each."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SLEEP_S)
        return torch.ones(3), torch.ones(1)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def job(**data: Any) -> Job:
    sgd = {"function": "torch.optim:SGD", "args": {"lr": 0.1}}
    return Job(
        model={"function": model},
        loss={"function": nn.MSELoss()},
        data={"function": Slow, **data},
        steps=100,
        batch_size=8,
        microbatches=2,
        optimizer=sgd,
    )


def test_reading_is_told_apart_from_computing_on_each_worker():
    graph = make_layer_graph(job())
    with OneProcessRun(job(), ParallelPlan.mesh(pp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        first, last = run.step(0)
    assert first.read_seconds >= 8 * SLEEP_S > first.busy_seconds
    assert last.read_seconds >= 8 * SLEEP_S > last.busy_seconds, "the loss reads its fields of the same samples"


def report_of(read_seconds: float, **more: Any) -> dict[str, Any]:
    times = {"seconds": 0.5, "busy_seconds": 0.2, "read_seconds": read_seconds, "peak_rss_bytes": 1, "spans": [], "ledger": {}}
    return {"loss": 1.0, "norm": 1.0, "count": 8.0, "skipped": False, **times, **more}


def warnings(read_s: float, seconds: float, steps: int, **data: Any) -> list[str]:
    watch = SlowDataWatch(job(**data).data)
    return [line for _ in range(steps) if (line := watch.add(read_s, seconds)) is not None]


@pytest.mark.parametrize(
    ("data", "cure"),
    [
        ({}, "set data.processes: 2, whose processes read ahead, or make a sample cheaper to read"),
        ({"processes": 3}, "set data.processes: 6, whose processes read ahead, or make a sample cheaper to read"),
        ({"streams": 2}, "let the data set read ahead in a thread of its own, or make its samples cheaper to read"),
    ],
)
def test_a_slow_data_set_is_named_with_its_share_and_a_cure(data: dict[str, Any], cure: str):
    told = "it waits for samples of data set Slow, 40 % of a step (200 of 500 ms)"
    assert warnings(0.2, 0.5, STEPS, **data) == [f"{told}\n  cure: {cure}"]


@pytest.mark.parametrize(
    ("read_s", "seconds", "steps"), [(0.09, 0.5, 99), (0.2, 0.5, STEPS - 1), (0.0, 0.5, 99), (0.009, 0.01, 99)]
)
def test_nothing_is_said_of_short_waits_and_of_the_first_steps(read_s: float, seconds: float, steps: int):
    assert not warnings(read_s, seconds, steps)


def test_a_worker_tells_it_once():
    graph = make_layer_graph(job())
    with OneProcessRun(job(), ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph) as run:
        told = [line for step in range(STEPS + 5) for _, line in run.step(step)[0].warnings]
    assert sum(line.startswith("it waits for samples of data set Slow, ") for line in told) == 1


def test_the_share_is_in_the_file_progress_line_status_and_report(tmp_path: Path):
    policy = RunPolicy(workers=2, job_steps=100)
    request = SimpleNamespace(folder=tmp_path, policy=policy, batching=SimpleNamespace(batch_size=8), traced_steps=())
    request.plan = SimpleNamespace(world=2)
    recorder = RunRecorder(request)  # type: ignore[arg-type]
    recorder.restart_step_timer()
    for step in range(5):
        recorder.record_step(step, {0: report_of(0.2), 1: report_of(0.0)})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["data_wait"] for line in lines] == [0.4] * 5
    out = io.StringIO()
    EventPrinter(steps=100, out=out)(recorder.new_events()[-1])
    assert "bubble 60 % (samples 40 %)  ETA" in out.getvalue()
    view = view_of(lines)
    told = build_run_status("r", "r", view, steps=100, plan=None, members=None, cluster=None, now=lines[-1]["time"] + 0.1)
    assert told.data_wait == pytest.approx(0.4) and "samples  workers wait for them 40 % of a step" in format_status(told)
    facts = summary_facts(told, SimpleNamespace(view=view, plan=None, totals=None), ())  # type: ignore[arg-type]
    assert ("waiting for samples", "40.0 %") in [(fact.name, fact.value) for fact in facts]
