"""The tiny job in this process, on the Ray that it has joined, with something done to it while it trains."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import reference
from helpers.tiny_job import write_job

from raypar.job.read_job import load_job
from raypar.launch import Result, train_job_in_new_folder
from raypar.record.events import Event
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.norm_and_weights_hash import weights_hash


class Trainee:
    """Runs the tiny job with slow steps; `act(pids)` is called once, when step `at` has been seen, and so is `then[step]()`.

    `then[kind]()` is called after every event of that kind.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.path = write_job(folder)
        self.words = ["steps=30", "model.args.sleep_s=0.01", "checkpoint.every=0", *words]
        self.events: list[dict] = []
        self.pids: list[int] = []

    def run(
        self,
        act: Callable[[list[int]], None] | None = None,
        at: int = 8,
        then: Mapping[int | str, Callable[[], None]] | None = None,
    ) -> Result:
        acts = dict(then or {}) | ({at: lambda: act(self.pids)} if act is not None else {})

        def tell(given: Event) -> None:
            event = given.facts()
            self.events.append({**event, "at_s": time.monotonic()})
            if event["kind"] == "stage" and event["stage"] == "started":
                self.pids = [int(pid) for pid in re.findall(r"\d+", event["text"].split("pids")[1])]
            if event["kind"] == "step" and event["step"] in acts:
                self.acted_s = time.monotonic()
                acts.pop(event["step"])()
            if event["kind"] in acts:
                acts[event["kind"]]()

        return train_job_in_new_folder(load_job(self.path, self.words), tell)

    def run_with_a_stop(self, rank: int, seconds: float, then: int = signal.SIGCONT) -> None:
        """Run it; a worker is stopped, and gets the signal `then` so many seconds later."""
        timers: list[threading.Timer] = []

        def act(pids: list[int]) -> None:
            os.kill(pids[rank], signal.SIGSTOP)
            timers.append(threading.Timer(seconds, os.kill, (pids[rank], then)))
            timers[0].start()

        try:
            self.result = self.run(act)
        finally:
            for timer in timers:
                timer.join()

    def told(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def members(self) -> dict:
        return json.loads((self.folder / "runs/tiny/members.json").read_text())

    @property
    def losses(self) -> list[tuple[int, float]]:
        lines = map(json.loads, (self.folder / "runs/tiny/metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@dataclass(frozen=True)
class Undisturbed:
    """What the tiny job gives in one plain process: (step, loss) as in a run's metrics, and the hash of its weights."""

    losses: list[tuple[int, float]]
    weights_sha256: str

    @staticmethod
    def of(folder: Path, *words: str) -> Undisturbed:
        """Train by `helpers.reference`, without Ray; sleeping changes no number and is left out."""
        spec = load_job(write_job(folder), ["steps=30", *words])
        result = reference.train(make_layer_graph(spec), spec)
        return Undisturbed(list(enumerate(result.losses, 1)), weights_hash(result.parameters))


def kill(*ranks: int, number: int = signal.SIGKILL) -> Callable[[list[int]], None]:
    return lambda pids: [os.kill(pids[rank], number) for rank in ranks] and None


@contextlib.contextmanager
def as_soon_as(fact: Callable[[], Any], act: Callable[[Any], None], limit_s: float = 60.0) -> Iterator[None]:
    """Beside the block, once: `act(fact())` as soon as that is true. Raises what these raise, and `TimeoutError`."""

    def wait_and_act() -> None:
        until = time.monotonic() + limit_s
        while not (found := fact()):
            if time.monotonic() > until:
                raise TimeoutError(f"what was waited for has not come about within {limit_s:.0f} s")
            time.sleep(0.01)
        act(found)

    with ThreadPoolExecutor(1) as beside:
        acted = beside.submit(wait_and_act)
        yield
        acted.result()
