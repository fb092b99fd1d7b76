"""Seeded membership histories over real Ray: workers and nodes die, two neighbours at once too, leave, join, and the driver
dies; every history ends with the weights and the losses of the undisturbed run."""

import contextlib
import json
import os
import random
import signal
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

from cluster.fleet import Fleet, works
from raypar.job.read_job import load_job
from raypar.launch import Result, train_job_in_new_folder
from raypar.record.events import Event

STEPS = 60
LAYOUTS = [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (3, 1), (1, 3)]
"""Stages and replicas at the beginning."""
NODES, SLOTS = 3, 2
NOTICE_S = 5.0
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def fleet():
    fleet = Fleet(SLOTS, [str(TESTS.parent), str(TESTS)])
    try:
        for _ in range(NODES):
            fleet.add()
        yield fleet
    finally:
        left = fleet.end()
    assert not left


class History:
    """One run and what happens to it: `acts` are (step, kind), done in this order once the step has been seen."""

    def __init__(self, folder: Path, fleet: Fleet, seed: int) -> None:
        self.folder, self.fleet = folder, fleet
        self.chance = random.Random(seed)
        self.stages, self.replicas = self.chance.choice(LAYOUTS)
        count = self.chance.randint(2, 4)
        at = sorted(self.chance.sample(range(5, STEPS - 20), count))
        kinds = ("kill", "two", "node", "drain", "join", "driver")
        self.acts = [(step, self.chance.choice(kinds)) for step in at]
        self.done: list[str] = []
        self.events: list[dict] = []

    def run(self) -> Result:
        words = [
            f"steps={STEPS}",
            "model.args.sleep_s=0.02",
            "checkpoint.every=20",
            f"plan={{stages: {self.stages}, replicas: {self.replicas}}}",
            f"elastic={{min_workers: 1, max_workers: {NODES * SLOTS}}}",
        ]
        waiting = list(self.acts)

        def tell(given: Event) -> None:
            event = given.facts()
            self.events.append(event)
            while waiting and event["kind"] == "step" and event["step"] >= waiting[0][0]:
                self.act(waiting.pop(0)[1])

        result = train_job_in_new_folder(load_job(write_job(self.folder), words), tell, address=self.fleet.address)
        assert result.end == "done", f"{self}: {result.why} {result.error}"
        assert not waiting, f"{self}; the run ended before {waiting}"
        return result

    def __str__(self) -> str:
        return f"{self.stages} stages x {self.replicas} replicas; {'; '.join(self.done)}"

    def act(self, kind: str) -> None:
        """To what `members.json` says is there."""
        told = json.loads((self.folder / "runs/tiny/members.json").read_text())
        alive = [member for member in told["members"] if works(member.get("pid", 0))]
        saved = any((self.folder / "runs/tiny/checkpoints").glob("step_*"))
        free = [node for node in self.fleet.alive if saved or any(m["node"] != str(node.node_id)[:8] for m in alive)]
        """Who may go: before there is a checkpoint, somebody has to keep the state."""
        room = len(self.fleet.alive) > 1 and free
        most = len(alive) - (not saved)
        if kind in ("kill", "two") and most > 0:
            first = self.chance.randrange(len(alive))
            victims = alive[first : first + 1 + (kind == "two")][:most]
            for victim in victims:
                self.kill(victim["pid"])
            self.done.append(f"kill -9 {[victim['coordinate'] for victim in victims]}")
        elif kind == "driver":
            self.kill(told["driver_pid"])
            self.done.append("kill -9 driver")
        elif kind == "node" and room:
            self.fleet.kill(self.chance.choice(free))
            self.done.append("node lost")
        elif kind == "drain" and room:
            self.fleet.drain(self.chance.choice(self.fleet.alive), NOTICE_S)
            self.done.append("node drained")
        else:
            self.fleet.add()
            self.done.append("node added")

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    @property
    def losses(self) -> list[tuple[int, float]]:
        lines = map(json.loads, (self.folder / "runs/tiny/metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, fleet) -> tuple[str, list[tuple[int, float]]]:
    history = History(tmp_path_factory.mktemp("undisturbed"), fleet, 0)
    history.acts = []
    return history.run().weights_sha256, history.losses


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(20))
def test_no_membership_history_changes_the_result(seed, fleet, undisturbed, tmp_path):
    history = History(tmp_path, fleet, seed)
    try:
        result = history.run()
    finally:
        fleet.restore(NODES)
    assert result.weights_sha256 == undisturbed[0], history
    assert history.losses == undisturbed[1], history
