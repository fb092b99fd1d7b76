"""Carries out the scenarios of `namespace_scenarios.py` on machines of `cluster.local`, and checks how each run has ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.namespace_scenarios import WORKERS, Act, Scenario
from helpers.tiny_job import write_job
from helpers.trainee import Undisturbed

from cluster.local import LocalCluster, Machine, Program
from raypar.errors import CheckpointError
from raypar.worker.checkpoint.checkpoint_files import verify_checkpoint

ROOT = Path(__file__).parents[2]
PYTHON_PATH = (str(ROOT / "tests"), str(ROOT / "jobs/bench"))
CPUS = 2
START_S, END_S, PROGRESS_S, LEFT_S = 180.0, 120.0, 180.0, 100.0
"""Limits for the first step, for the end after the last step, for a next step, and for everything of the run to be gone."""
NOTICED_S = 100.0
"""Limit for Ray to notice that a machine has lost its power."""
LEAST_LOSSES = 5
"""Fewest machines that `churn` lets join and be lost, however long that takes: on a busy machine a join takes half a minute."""
SLACK = 2.0
"""How many times longer than on a quiet machine a stall may last."""
SECOND_S, RESUME_S, WORKERS_BACK_S = 120.0, 240.0, 240.0
"""Limits for the end of a second client, for steps of a resumed run, and for as many workers as before."""
ACTIVE = "is active on this cluster"
OURS = re.compile(r"ray::(WorkerActor|DriverActor)|raypar (train|resume)")
"""Titles of processes of a run."""


@dataclass(frozen=True)
class Outcome:
    """What one scenario came to."""

    name: str
    end: str
    """`same weights`, or the error in one line."""
    steps: int
    generations: int
    """Changes of the workers' generation."""
    lost: int
    """Workers that were given up or died."""
    again: int
    """Steps executed a second time."""
    stall_s: float
    """The longest wait for a step after the first."""
    wall_s: float
    wrong: tuple[str, ...] = ()
    """Promises that were not kept."""
    load: float | None = None
    """The load average of the last minute at its end: how busy the machine was. None: not noted."""

    def cells(self) -> list[str]:
        """A row of the table."""
        numbers = [self.steps, self.generations, self.lost, self.again]
        return [
            self.name,
            self.end,
            *map(str, numbers),
            f"{self.stall_s:.1f}",
            f"{self.wall_s:.0f}",
            "?" if self.load is None else f"{self.load:.0f}",
            "; ".join(self.wrong) or "-",
        ]


HEADER = [
    *("scenario", "end", "steps", "new generations", "workers lost", "steps again", "longest stall s", "wall s", "load"),
    "not kept",
]


class ScenarioError(AssertionError):
    """A scenario could not be carried out."""


@dataclass
class ClusterKeeper:
    """A cluster that scenarios use one after the other; machines that did not survive one are replaced."""

    cluster: LocalCluster | None = None

    def ready(self) -> LocalCluster:
        """A whole cluster, its network undisturbed."""
        if self.cluster is not None and not self._restore(self.cluster):
            self.close()
        if self.cluster is None:
            self.cluster = LocalCluster(PYTHON_PATH)
            self.cluster.add_node("store")
            for name in ("driver", *WORKERS):
                self.cluster.add_node(name, CPUS * (name in WORKERS), wait=False)
            self.cluster.wait_for_nodes(self.cluster.nodes)
        return self.cluster

    def _restore(self, cluster: LocalCluster) -> bool:
        """Whether the cluster is whole again."""
        cluster.heal()
        if "store" not in cluster.nodes or cluster.nodes["store"].raylet.exit_code is not None:
            return False
        for name in list(cluster.nodes):
            cluster.shape(name)
            cluster.go_on(name)
        there = cluster.live_addresses()
        for name, node in list(cluster.nodes.items()):
            extra = name not in ("store", "driver", *WORKERS)
            if extra or node.address not in there or node.raylet.exit_code is not None:
                cluster.leave(name)
        for name in ("driver", *WORKERS):
            if name not in cluster.nodes:
                cluster.add_node(name, CPUS * (name in WORKERS), wait=False)
        cluster.wait_for_nodes(cluster.nodes)
        # Ray takes a minute to notice a loss of power, and places nothing while it waits for such a machine.
        until, whole = time.monotonic() + NOTICED_S, {node.address for node in cluster.nodes.values()}
        while set(cluster.live_addresses()) - whole and time.monotonic() < until:
            time.sleep(0.5)
        return "store" in cluster.nodes

    def close(self) -> None:
        """Remove the cluster."""
        if self.cluster is not None:
            self.cluster.close()
            self.cluster = None


@dataclass
class ScenarioRun:
    """One run of `raypar train` and what is done to it."""

    cluster: LocalCluster
    scenario: Scenario
    folder: Path
    name: str
    """Of the run, not used before on this cluster."""
    cut: list[str] = field(default_factory=list)
    """The machines that the last partition has cut off."""
    last: list[str] = field(default_factory=list)
    """The machines that the last act was about."""
    second: Program | None = None
    """A second client."""
    seen_events: int = 0
    """Lines of events.jsonl that were there when the last act but `await_event` began."""

    def __post_init__(self) -> None:
        self.run_folder = self.folder / "runs" / self.name
        self.stop_file = self.folder / "stop"
        self.job = write_job(self.folder)
        self.words = [
            f"name={self.name}",
            "steps=100000",
            "model.args.sleep_s=0.05",
            "checkpoint.every=0",
            "validation=null",
            "elastic.min_workers=1",
            f"callbacks=[{{function: stop_when:StopWhen, args: {{path: {self.stop_file}}}}}]",
            *self.scenario.layout,
        ]

    # -- the run -----------------------------------------------------------------------------------------------------------

    def start_client(self, machine: str, log: str, *command: str) -> Program:
        """`raypar train` or `resume` on a machine, in the run's own folder."""
        words = [sys.executable, "-m", "raypar", *command, "--address", self.cluster.address]
        return self.cluster.nodes[machine].machine.start(words, self.cluster.environment, self.folder / log, cwd=self.folder)

    def train(self, machine: str, log: str) -> Program:
        """`raypar train` of this run."""
        settings = [word for setting in self.words for word in ("--set", setting)]
        return self.start_client(machine, log, "train", str(self.job), *settings)

    def lines(self, file: str, run: str = "") -> list[dict[str, Any]]:
        """The whole lines of a file of the run folder; `run`: the name of another run."""
        with contextlib.suppress(OSError):
            text = (self.run_folder.with_name(run or self.name) / file).read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return []

    def steps(self) -> list[dict[str, Any]]:
        """The lines of steps."""
        return [line for line in self.lines("metrics.jsonl") if "loss" in line]

    def members(self) -> list[dict[str, Any]]:
        """The workers that train, by rank."""
        with contextlib.suppress(OSError, json.JSONDecodeError):
            return list(json.loads((self.run_folder / "members.json").read_text())["members"])
        return []

    def wait(self, what: str, there: Callable[[], Any], limit_s: float) -> Any:
        """Wait until `there()` is true, and return it. Raises `ScenarioError` after `limit_s`."""
        until = time.monotonic() + limit_s
        while not (found := there()):
            if time.monotonic() > until:
                raise ScenarioError(f"{self.scenario.name}: {what} not within {limit_s:.0f} s\n{self.client.text()[-3000:]}")
            time.sleep(0.05)
        return found

    def carry_out(self, undisturbed: Callable[[int], Undisturbed]) -> Outcome:
        """Train, do everything, let the run end, and look at what it has left."""
        began = time.monotonic()
        self.machine_of_node = {id[:8]: name for name, node in self.cluster.nodes.items() for id in self._ids(node.address)}
        self.client = self.train(self.scenario.client, "client.log")
        early = [act for act in self.scenario.acts if act.step == 0]
        for act in early:
            self._do(act)
        self.wait("a first step", self._steps_or_end, START_S)
        for act in self.scenario.acts[len(early) :]:
            self._do(act)
        seen = len(self.steps())
        self.wait("further steps", lambda: len(self.steps()) >= seen + self.scenario.steps_after or self._ended(), PROGRESS_S)
        self.stop_file.touch()
        self.wait("the end", self._ended, END_S)
        wrong = [*self._wrong_end(undisturbed), *self._wrong_second(undisturbed), *self._left_behind()]
        return self._outcome(time.monotonic() - began, tuple(wrong))

    def _ids(self, address: str) -> list[str]:
        there = self.cluster.live_addresses()
        return [there[address]] if address in there else []

    def _steps_or_end(self) -> bool:
        return bool(self.steps()) or self._ended()

    def _ended(self) -> bool:
        return self.client.exit_code is not None

    def _do(self, act: Act) -> None:
        if act.step is not None:
            self.wait(f"{act.step} steps", lambda: len(self.steps()) >= act.step or self._ended(), PROGRESS_S)
        time.sleep(act.after_s)
        self.seen_events = self.seen_events if act.do.startswith("await_") else len(self.lines("events.jsonl"))
        getattr(self, act.do)(*act.given)

    # -- acts --------------------------------------------------------------------------------------------------------------

    def machines(self, who: str) -> list[str]:
        """The names of the machines that `who` means now."""
        found = self.wait(f"a machine called {who}", lambda: self._machines(who), PROGRESS_S)
        self.last = found
        return found

    def _machines(self, who: str) -> list[str]:
        nodes = self.cluster.nodes
        if who in ("cut", "last"):
            return self.cut if who == "cut" else self.last
        if who in ("all", "workers"):
            return [name for name in nodes if who == "all" or name not in ("store", "driver")]
        if who in nodes:
            return [who]
        there = [self.machine_of_node[m["node"]] for m in self.members() if m.get("node") in self.machine_of_node]
        there = [name for name in there if name in nodes]
        if who == "rank0":
            return there[:1]
        if who == "other":
            return [name for name in there if name != there[0]][:1]
        raise ScenarioError(f"{self.scenario.name}: there is no machine {who}")

    def partition(self, who: str, other: str, direction: str = "both") -> None:
        """See `LocalCluster.partition`."""
        self.cut = self.machines(who)
        self.cluster.partition(self.cut, None if other == "all" else self._machines(other), direction)

    def heal(self) -> None:
        """The network is whole."""
        self.cluster.heal()

    def shape(self, who: str, *given: float) -> None:
        """See `LocalCluster.shape`."""
        for name in self.machines(who):
            self.cluster.shape(name, *given)

    def kill(self, who: str) -> None:
        """Machines lose their power."""
        for name in self.machines(who):
            self.cluster.kill(name)

    def add(self, name: str) -> None:
        """One more machine; nobody waits for it."""
        self.cluster.add_node(name, CPUS, wait=False)

    def drain(self, who: str) -> None:
        """Ray is told that machines will be taken away."""
        for name in self.machines(who):
            self.cluster.begin_drain(name)

    def stop(self, who: str) -> None:
        """Machines hang."""
        for name in self.machines(who):
            self.cluster.stop(name)

    def continue_all(self) -> None:
        """All that hangs goes on."""
        for name in self.cluster.nodes:
            self.cluster.go_on(name)

    def flap(self, who: str, period_s: float, seconds: float) -> None:
        """A machine is cut off and comes back, again and again."""
        (name,) = self.machines(who)
        for _ in range(int(seconds / period_s / 2)):
            self.cluster.partition([name])
            time.sleep(period_s)
            self.cluster.heal()
            time.sleep(period_s)

    def churn(self, period_s: float, seconds: float) -> None:
        """Add machines; when one has joined, the machine of the first worker loses its power, unless it is the only one with
        workers: nothing could go on without it.

        This goes on for `seconds`, and for at least `LEAST_LOSSES` losses. Every `period_s` one machine is added or lost,
        unless two are on their way or the run has not noticed the last loss.
        """
        lost, added, at_first, began_s = 0, 0, len(self._machines("workers")), time.monotonic()
        while time.monotonic() - began_s < seconds or lost < LEAST_LOSSES:
            if time.monotonic() - began_s > PROGRESS_S:
                raise ScenarioError(f"{self.scenario.name}: only {lost} machines had joined within {PROGRESS_S:.0f} s")
            there = self.cluster.live_addresses()
            names = {name: there.get(self.cluster.nodes[name].address, "") for name in self._machines("workers")}
            self.machine_of_node |= {id[:8]: name for name, id in names.items() if id}
            used = [self.machine_of_node.get(member.get("node", ""), "") for member in self.members()]
            if sum(map(bool, names.values())) > at_first and len(set(used)) > 1 and set(used) <= set(names):
                self.cluster.kill(used[0])
                lost += 1
            elif len(names) < at_first + 2:
                self.cluster.add_node(f"x{added}", CPUS, wait=False)
                added += 1
            time.sleep(period_s)

    def await_event(self, kind: str, words: str = "") -> None:
        """Wait for an event of this kind with these words that the run had not told when the last act but a wait began."""

        def told() -> bool:
            new = self.lines("events.jsonl")[self.seen_events :]
            return self._ended() or any(event["kind"] == kind and words in event["text"] for event in new)

        self.wait(f"an event {kind} ({words})", told, PROGRESS_S)

    def await_checkpoint_begun(self) -> None:
        """Wait until a checkpoint is being written."""
        until = time.monotonic() + PROGRESS_S
        while not (list(self.run_folder.glob("checkpoints/.tmp-*")) or self._ended()):
            if time.monotonic() > until:
                raise ScenarioError(f"{self.scenario.name}: no checkpoint was begun within {PROGRESS_S:.0f} s")
            time.sleep(0.002)

    def await_workers(self, count: int) -> None:
        """Wait until so many workers have seats."""
        self.wait(f"{count} workers", lambda: len(self.members()) == count or self._ended(), WORKERS_BACK_S)

    def _machine_of_client(self) -> Machine:
        return self.client.machine

    def stop_driver(self) -> None:
        """The driver's process hangs."""
        pid = json.loads((self.run_folder / "members.json").read_text())["driver_pid"]
        self._machine_of_client().signal(signal.SIGSTOP, [pid])

    def kill_driver(self) -> None:
        """The driver's process dies; Ray starts it again."""
        pid = json.loads((self.run_folder / "members.json").read_text())["driver_pid"]
        self._machine_of_client().signal(signal.SIGKILL, [pid])

    def stop_worker(self, rank: int) -> None:
        """A worker's process hangs."""
        worker = self.members()[rank]
        self.cluster.nodes[self.machine_of_node[worker["node"]]].machine.signal(signal.SIGSTOP, [worker["pid"]])

    def signal_client(self, name: str) -> None:
        """A signal to the client."""
        self.client.signal(signal.Signals[name])

    def second_train(self, machine: str) -> None:
        """The same command once more, at the same time. It must become another run, `NAME-2`, and end as well."""
        self.second = self.train(machine, "second.log")
        called = f"the run is called {self.name}"
        self.wait("two runs", lambda: all(called in client.text() for client in (self.client, self.second)), START_S)
        if f"{called}-2" in self.client.text():
            self.client, self.second = self.second, self.client

    def second_resume(self, machine: str) -> None:
        """`raypar resume` of the run that trains."""
        self.second = self.start_client(machine, "second.log", "resume", str(self.run_folder))

    def second_refused(self) -> None:
        """The second client ends with an error that has a cure."""
        second = self.second
        assert second is not None
        self.wait("the end of the second client", lambda: second.exit_code is not None, SECOND_S)
        if second.exit_code == 0 or "cure:" not in second.text():
            raise ScenarioError(f"the second client was not refused: {second.exit_code}\n{second.text()[-2000:]}")
        self.second = None

    def resume(self, machine: str) -> None:
        """`raypar resume`, from another machine, again and again while the run is said to be active."""
        until = time.monotonic() + RESUME_S
        for number in range(1000):
            self.client = self.start_client(machine, f"resume-{number}.log", "resume", str(self.run_folder))
            before = len(self.steps())
            self.wait("steps of the resumed run", lambda seen=before: len(self.steps()) > seen or self._ended(), RESUME_S)
            if not self._ended() or ACTIVE not in self.client.text() or time.monotonic() > until:
                return
            time.sleep(2.0)

    # -- how it has ended --------------------------------------------------------------------------------------------------

    def _wrong_end(self, undisturbed: Callable[[int], Undisturbed]) -> list[str]:
        """Promises about the end and the steps that were not kept."""
        code, text, steps = self.client.exit_code, self.client.text(), self.steps()
        numbers, wrong = [line["step"] for line in steps], []
        if numbers != list(range(1, len(numbers) + 1)):
            wrong.append(f"not every step was told once: {numbers[-5:]} of {len(numbers)}")
        if not steps:
            return [f"ended before the first step: {text.strip()[-1500:]}"]
        reference = undisturbed(len(numbers))
        if [(line["step"], line["loss"]) for line in steps] != reference.losses:
            wrong.append("other losses than undisturbed")
        if code == 0:
            weights = re.findall(r"^weights sha256 (\w+)$", text, re.MULTILINE)
            if weights != [reference.weights_sha256]:
                wrong.append(f"the weights are {weights}, undisturbed {reference.weights_sha256}")
            if self.scenario.must_fail:
                wrong.append("it should have ended with an error")
        elif not any(words in text for words in self.scenario.errors):
            wrong.append(f"ended with exit code {code}: {text.strip()[-1500:]}")
        elif "Traceback" in text:
            wrong.append(f"a traceback instead of an error: {text.strip()[-1500:]}")
        again, stall_s = self._again(), self._stall_s()
        if self.scenario.again is not None and again > self.scenario.again:
            wrong.append(f"{again} steps were executed again, {self.scenario.again} may be")
        if stall_s > SLACK * self.scenario.stall_s:
            wrong.append(f"a stall of {stall_s:.1f} s, {SLACK * self.scenario.stall_s:.0f} s may be")
        changes = sum(event["kind"] == "generation" for event in self.lines("events.jsonl"))
        fewest, most = self.scenario.changes
        if not fewest <= changes <= most:
            wrong.append(f"{changes} changes of the workers' generation, {fewest} to {most} should be")
        wrong += self._wrong_checkpoints()
        claimed = [event["generation"] for event in self.lines("events.jsonl") if event["kind"] == "generation"]
        if claimed != sorted(set(claimed)):
            wrong.append(f"generations out of order, as of two drivers: {claimed}")
        return wrong

    def _wrong_checkpoints(self) -> list[str]:
        """Checkpoints that have their final name and are not whole."""
        wrong = []
        for folder in sorted(self.run_folder.glob("checkpoints/step_*")):
            try:
                verify_checkpoint(folder)
            except CheckpointError as error:
                wrong.append(f"{folder.name} is not whole: {error}")
        return wrong

    def _wrong_second(self, undisturbed: Callable[[int], Undisturbed]) -> list[str]:
        """Promises about a second run that were not kept."""
        second = self.second
        if second is None:
            return []
        self.wait("the end of the second run", lambda: second.exit_code is not None, PROGRESS_S)
        done = len([line for line in self.lines("metrics.jsonl", f"{self.name}-2") if "loss" in line])
        weights = re.findall(r"^weights sha256 (\w+)$", second.text(), re.MULTILINE)
        right = [undisturbed(done).weights_sha256] if done else []
        return [] if weights and weights == right else [f"the second run: {second.text().strip()[-1000:]}"]

    def _left_behind(self) -> list[str]:
        """What of the run is still there after `LEFT_S`: processes, and what Ray's control store knows."""
        self.cluster.heal()
        self.continue_all()
        until = time.monotonic() + LEFT_S
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.5)
        return left

    def _left(self) -> list[str]:
        found = []
        for node in self.cluster.nodes.values():
            for pid in node.machine.pids().values():
                with contextlib.suppress(OSError):
                    title = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                    if OURS.search(title):
                        found.append(f"a process on {node.name}: {title[:60]}")
        if "store" in self.cluster.nodes and self.cluster.nodes["store"].raylet.exit_code is None:
            found += [f"actor {a}" for a in self.cluster.ask("actors") if a.startswith(f"raypar-{self.name}/")]
            found += [f"group {g}" for g in self.cluster.ask("groups") if g.startswith(f"raypar-{self.name}-")]
            if self.client.exit_code == 0:
                found += [f"key {k}" for k in self.cluster.ask("keys", f"raypar/{self.name}/")]
        return found

    def _again(self) -> int:
        return sum(event.get("again", 0) for event in self.lines("events.jsonl") if event["kind"] == "generation")

    def _stall_s(self) -> float:
        times = [line["time"] for line in self.steps()]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    def _outcome(self, wall_s: float, wrong: tuple[str, ...]) -> Outcome:
        events = self.lines("events.jsonl")
        end = "same weights"
        if self.client.exit_code != 0:
            said = [line for line in self.client.text().splitlines() if any(words in line for words in self.scenario.errors)]
            end = (said[-1] if said else self.client.text().strip()[-120:]).strip()[:160]
        kinds = [event["kind"] for event in events]
        return Outcome(
            self.scenario.name,
            end,
            len(self.steps()),
            kinds.count("generation"),
            kinds.count("lost"),
            self._again(),
            self._stall_s(),
            wall_s,
            wrong,
        )
