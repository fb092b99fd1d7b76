"""How much useful work is left when machines fail all the time?

`python jobs/bench/chaos.py --minutes 10 --every 15 --seed 7 [--page FILE] [--json]`: one seeded fault about every 15 s against
a job of sleeping layers that begins with 4 workers and may grow to 6: `kill -9` of a worker, SIGSTOP of a worker (resumed
later: a zombie), loss of a whole node, a drained node, a new node, `kill -9` of the driver. `--spot FILE` (or
RAYPAR_SPOT_TRACE; a generated history with `--spot generated`) plays a recorded fleet of spot instances instead, an instance
being a node.

Useful work = committed samples / integral over time of what the workers alive would have done undisturbed: the same job is
measured first, with 1, 2, ... workers in the same place. The weights and the
losses must be those of one worker that nobody has disturbed. Everything runs on a Ray of the bench's own.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import spot
import yaml
from harness import ROOT, BenchError, environment, page, table

from cluster.fleet import Fleet, works

HERE = Path(__file__).parent
BATCH, MICROBATCHES = 24, 12
BEGIN, MOST, LEAST = 4, 6, 1
SLOTS = 2
"""Workers a node has room for, in a run with faults; in a spot history an instance is one worker."""

CHECKPOINT_EVERY, SPOT_CHECKPOINT_EVERY = 200, 10
"""Steps. A fleet of spot instances may lose in two seconds all that hold state, before who is hired has a copy: then only the
disk has one."""

RESUME_S = 6.0
"""After this time a stopped worker goes on, if it still exists."""
NOTICE_S = 10.0
"""Between the notice that a node will be taken away and its end."""
SAMPLE_S = 0.05
SOON_S = 0.5
"""A step that was all but done may still come within this time after a fault."""
STUCK_S = 60.0
"""Without a step for so long, although somebody could work, the run is given up."""
START_S, END_S = 120.0, 120.0
WARM_STEPS, RATE_STEPS = 4, 24
KINDS = ("kill", "stop", "node", "drain", "join", "driver")
WORDS = {
    "kill": "kill -9 of a worker",
    "stop": "SIGSTOP of a worker",
    "node": "kill -9 of a node",
    "drain": "a node is drained",
    "join": "a node is added",
    "driver": "kill -9 of the driver",
}


@dataclass
class Sample:
    """What there was at one time. `live`: workers of the run that are alive and not stopped; `slots`: room for workers."""

    time: float
    live: int
    slots: int


@dataclass
class Fault:
    """One that was done; `text` names what it met."""

    time: float
    kind: str
    text: str


@dataclass
class Observed:
    """A run with faults. `steps`: (time, step, loss) in the order of metrics.jsonl."""

    samples: list[Sample] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    steps: list[tuple[float, int, float]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    computed: int = 0
    """Microbatches that went through the first layer."""
    weights: str | None = None
    left: list[str] = field(default_factory=list)


def write_job(folder: Path, ms: float, workers: int, **more: Any) -> Path:
    """The job file; `more` are further keys. All workers are replicas: what the planner chooses for layers that sleep."""
    job = {
        "name": "chaos",
        "seed": 5,
        "steps": 1_000_000,
        "batch_size": BATCH,
        "microbatches": MICROBATCHES,
        "model": {"function": "chaos_model:layers", "args": {"ms": ms, "ledger": str(folder / "ledger")}},
        "loss": "chaos_model:loss",
        "data": "chaos_model:samples",
        "optimizer": {"function": "torch.optim:AdamW", "args": {"lr": 1.0e-3}},
        "clip_norm": 1.0,
        "plan": {"replicas": workers},
        "checkpoint": {"every": 0},
        "run_dir": str(folder / "runs"),
        **more,
    }
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def train_command(job: Path, *words: str) -> list[str]:
    """`raypar train`."""
    return [sys.executable, "-m", "raypar", "train", str(job), *words]


def undisturbed(
    folder: Path, name: str, ms: float, workers: int, steps: int, *words: str, **more: Any
) -> tuple[list[dict[str, Any]], str]:
    """The lines of metrics.jsonl and the weights of a run that is left alone, on a Ray of its own unless `words` say where."""
    job = write_job(folder, ms, workers, name=name, steps=steps, **more)
    command = train_command(job, *words)
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=600, check=False)
    if done.returncode:
        raise BenchError(f"the undisturbed run {name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return lines_of(folder / "runs" / name / "metrics.jsonl"), hash_in(done.stdout) or ""


def rate(fleet: Fleet, folder: Path, ms: float, workers: int) -> float:
    """Samples a second that so many workers do when nobody disturbs them: the same job, in the same place."""
    elastic = {"min_workers": workers, "max_workers": workers}
    lines, _ = undisturbed(
        folder, f"rate-{workers}", ms, workers, RATE_STEPS + WARM_STEPS, "--address", fleet.address, elastic=elastic
    )
    return BATCH * RATE_STEPS / (lines[-1]["time"] - lines[WARM_STEPS - 1]["time"])


def rates_of(fleet: Fleet, folder: Path, ms: float, path: Path | None) -> dict[int, float]:
    """By the number of workers; those of an earlier run of the bench, if `path` has them."""
    if path is not None and path.exists():
        return {int(workers): samples for workers, samples in json.loads(path.read_text()).items()}
    fleet.restore(-(-MOST // fleet.slots))
    found = {0: 0.0} | {workers: rate(fleet, folder, ms, workers) for workers in range(1, MOST + 1)}
    if path is not None:
        path.write_text(json.dumps(found))
    return found


class Disturbed:
    """One run under faults. `start` it, let `play` do things to it, then `finish`."""

    def __init__(
        self, fleet: Fleet, folder: Path, ms: float, overrides: Sequence[str], checkpoint_every: int = CHECKPOINT_EVERY
    ) -> None:
        self.fleet, self.folder = fleet, folder
        self.run_folder = folder / "runs/chaos"
        self.stop_file = folder / "stop"
        elastic = {"min_workers": LEAST, "max_workers": MOST}
        stop = {"function": "stop_when:StopWhen", "args": {"path": str(self.stop_file)}}
        job = write_job(folder, ms, BEGIN, elastic=elastic, checkpoint={"every": checkpoint_every}, callbacks=[stop])
        words = itertools.chain.from_iterable(("--set", override) for override in overrides)
        self.command = train_command(job, "--address", fleet.address, *words)
        self.seen = Observed()
        self.child: subprocess.Popen[bytes] | None = None
        self._pids: dict[int, int] = {}
        self._over = threading.Event()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._tie = itertools.count()
        self._steps, self._since = -1, 0.0

    # -- the run -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Until its first step has been seen."""
        self.log = (self.folder / "log").open("w+")
        self.child = subprocess.Popen(self.command, stdout=self.log, stderr=subprocess.STDOUT, cwd=HERE)
        deadline = time.monotonic() + START_S
        while not self.count():
            self.check(time.monotonic() < deadline, f"no step within {START_S:.0f} s")
            time.sleep(SAMPLE_S)
        ledger = self.folder / "ledger"
        self._ledger_before = ledger.stat().st_size - self.count() * MICROBATCHES
        self._watch = threading.Thread(target=self.watch, daemon=True)
        self._watch.start()

    def finish(self) -> Observed:
        """Let the run end by itself; read what it has written."""
        self.stop_file.touch()
        try:
            self.child.wait(END_S)
        except subprocess.TimeoutExpired:
            self.check(False, f"did not end within {END_S:.0f} s")
        self._over.set()
        self._watch.join()
        self.check(self.child.returncode == 0, f"exit code {self.child.returncode}")
        seen = self.seen
        lines = lines_of(self.run_folder / "metrics.jsonl")
        seen.steps = [(line["time"], line["step"], line["loss"]) for line in lines]
        seen.events = lines_of(self.run_folder / "events.jsonl")
        seen.computed = (self.folder / "ledger").stat().st_size - self._ledger_before
        seen.weights = hash_in((self.folder / "log").read_text())
        (self.folder / "observed.json").write_text(json.dumps(asdict(seen)))
        return seen

    def give_up(self) -> None:
        """End the client, whatever has happened."""
        self._over.set()
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait()

    def check(self, holds: bool, what: str) -> None:
        """Raise `BenchError` with the end of the log."""
        if holds and (self._over.is_set() or self.child.poll() is None):
            return
        if holds:
            what = f"ended with exit code {self.child.returncode}"
        told = "\n".join(f"  {fault.time:.1f} {fault.kind} {fault.text}" for fault in self.seen.faults[-5:])
        log = (self.folder / "log").read_text()[-4000:]
        raise BenchError(f"the run {what} (now {time.time():.1f}); the last faults:\n{told}\n{log}")

    def count(self) -> int:
        """Steps seen so far."""
        with contextlib.suppress(OSError):
            return (self.run_folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def members(self) -> dict[str, Any]:
        """`members.json`, or nothing while it is being replaced."""
        with contextlib.suppress(OSError, json.JSONDecodeError):
            return dict(json.loads((self.run_folder / "members.json").read_text()))
        return {"members": [], "spares": [], "driver_pid": None}

    def workers(self) -> list[dict[str, Any]]:
        """Members and spares that are alive and not stopped; a new driver does not know their pids at once."""
        told = self.members()
        there = [*told["members"], *told["spares"]]
        self._pids |= {worker["worker"]: worker["pid"] for worker in there if "pid" in worker}
        known = [{**worker, "pid": self._pids[worker["worker"]]} for worker in there if worker["worker"] in self._pids]
        return [worker for worker in known if works(worker["pid"])]

    def watch(self) -> None:
        """Samples until the run is over."""
        while not self._over.wait(SAMPLE_S):
            live, now = len(self.workers()), time.time()
            slots = self.fleet.slots * (len(self.fleet.alive) + len(self.fleet.draining))
            last = self.seen.samples[-1] if self.seen.samples else None
            if last is None or (last.live, last.slots) != (live, slots):
                self.seen.samples.append(Sample(now, live, slots))
        self.seen.samples.append(Sample(time.time(), 0, 0))

    # -- what is done to it ----------------------------------------------------------------------------------------------

    def wait(self, until: float) -> None:
        """Do what is due; raise when the run is over or stuck."""
        while (now := time.monotonic()) < until:
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            self.check(True, "")
            steps = self.count()
            if steps != self._steps or not self.fleet.alive:
                self._steps, self._since = steps, now
            self.check(now - self._since < STUCK_S, f"has not made a step for {STUCK_S:.0f} s")
            time.sleep(SAMPLE_S)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do it while waiting."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._tie), act))

    def possible(self) -> list[str]:
        """Kinds of faults that leave room for `LEAST` workers, and do not need more than `MOST`."""
        free = len(self.fleet.alive)
        kinds = ["kill", "stop", "driver"] if self.workers() else ["driver"]
        kinds += ["node", "drain"] if free > 1 else []
        return kinds + (["join", "join"] if (free + 1) * SLOTS <= MOST else [])

    def do(self, kind: str, chance: random.Random) -> None:
        """One fault."""
        now = time.time()
        if kind in ("kill", "stop"):
            worker = chance.choice(sorted(self.workers(), key=lambda w: w["worker"]))
            self.signal(worker["pid"], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "stop":
                self.later(RESUME_S, lambda: self.signal(worker["pid"], signal.SIGCONT))
            text = f"{worker.get('coordinate', 'a spare')}, pid {worker['pid']}"
        elif kind == "driver":
            pid = self.members()["driver_pid"]
            self.signal(pid, signal.SIGKILL)
            text = f"pid {pid}"
        elif kind == "join":
            text = str(self.fleet.add().node_id)[:8]
        else:
            node = chance.choice(self.fleet.alive)
            text = str(node.node_id)[:8]
            if kind == "node":
                self.fleet.kill(node)
            else:
                text += "" if self.fleet.drain(node, NOTICE_S) else " (refused by Ray)"
                self.later(NOTICE_S, lambda: self.fleet.take_away(node))
        self.seen.faults.append(Fault(now, kind, text))
        print(f"{time.strftime('%H:%M:%S')} {WORDS[kind]}: {text}; {self.count()} steps", file=sys.stderr, flush=True)

    def signal(self, pid: int | None, number: signal.Signals) -> None:
        """To a process that may be gone."""
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, number)


def disturb(run: Disturbed, seed: int, every_s: float, seconds: float) -> None:
    """A fault every `every_s` on the average, between half and one and a half of it."""
    chance = random.Random(seed)
    end = time.monotonic() + seconds
    at = time.monotonic() + every_s * chance.uniform(0.5, 1.5)
    while at < end:
        run.wait(at)
        run.do(chance.choice(run.possible()), chance)
        at += every_s * chance.uniform(0.5, 1.5)
    run.wait(end)


def replay(run: Disturbed, history: spot.History, seed: int, seconds: float) -> None:
    """As many nodes as the history has instances."""
    chance = random.Random(seed)
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        wanted, there = history.at(now), len(run.fleet.alive)
        if there < wanted:
            node = run.fleet.add()
            run.seen.faults.append(Fault(time.time(), "join", str(node.node_id)[:8]))
        elif there > wanted:
            node = chance.choice(run.fleet.alive)
            run.seen.faults.append(Fault(time.time(), "node", str(node.node_id)[:8]))
            run.fleet.kill(node)
        else:
            run.wait(min(start + seconds, time.monotonic() + 0.1))
            continue
        print(f"{now:6.1f} s: {len(run.fleet.alive)} of {wanted} nodes, {run.count()} steps", file=sys.stderr, flush=True)


# -- the report ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Of the time between the first and the last step: samples committed, and what could have been."""

    seconds: float
    samples: int
    possible: float
    """Workers alive at their measured rate."""
    of_slots: float
    """Also those that were not there yet, or any more, although there was room for them."""
    live: float
    """Workers alive, mean over time."""

    @property
    def useful(self) -> float:
        """The part of it that was committed."""
        return self.samples / self.possible


def work_of(seen: Observed, rates: dict[int, float]) -> Work:
    """The integrals."""
    first, last = seen.steps[0][0], seen.steps[-1][0]
    possible = of_slots = live = 0.0
    for a, b in itertools.pairwise(seen.samples):
        seconds = max(0.0, min(b.time, last) - max(a.time, first))
        possible += seconds * rates[min(a.live, MOST)]
        of_slots += seconds * rates[min(a.slots, MOST)]
        live += seconds * a.live
    samples = BATCH * sum(first < at <= last for at, _, _ in seen.steps)
    return Work(last - first, samples, possible, of_slots, live / (last - first))


@dataclass
class Pauses:
    """Seconds, an entry for each fault of a kind: until the first step that it could hold up, and the longest wait for a step
    after that, until the next fault (a replacement or a new worker gets its seat)."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)


def pauses(seen: Observed) -> dict[str, Pauses]:
    """By kind of fault."""
    gaps = list(itertools.pairwise(at for at, _, _ in seen.steps))
    found: dict[str, Pauses] = defaultdict(Pauses)
    for fault, following in itertools.pairwise([*seen.faults, None]):
        until = following.time if following is not None else float("inf")
        soon = fault.time + SOON_S  # a step that was all but done may still come
        first = [b - max(a, fault.time) for a, b in gaps if b > fault.time and a < soon]
        later = [b - a for a, b in gaps if soon <= a < until]
        found[fault.kind].first.append(max(first, default=float("inf")))
        found[fault.kind].later += [max(later)] if later else []
    return found


def wrongs(seen: Observed, reference: Sequence[dict[str, Any]], weights: str) -> list[str]:
    """Promises that were not kept."""
    wrong = []
    if seen.weights != weights:
        wrong.append(f"the weights are {seen.weights}, undisturbed {weights}")
    numbers = [step for _, step, _ in seen.steps]
    if numbers != list(range(1, len(numbers) + 1)):
        wrong.append("the steps in metrics.jsonl are not 1, 2, 3, ...")
    different = [step for (_, step, loss), line in zip(seen.steps, reference, strict=False) if loss != line["loss"]]
    if different or len(reference) != len(numbers):
        wrong.append(f"the losses differ in {len(different)} steps, first {different[:1]}")
    if seen.left:
        wrong.append("left running: " + "; ".join(seen.left))
    return wrong


def both(values: Sequence[float]) -> list[str]:
    """Median and worst, for a table."""
    return [f"{f(values):.2f}" if values else "" for f in (statistics.median, max)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def hash_in(text: str) -> str | None:
    """What the last line of a run says."""
    found = [line.split()[-1] for line in text.splitlines() if line.startswith("weights sha256 ")]
    return found[-1] if found else None


def report(seen: Observed, rates: dict[int, float], wrong: Sequence[str], bound: float | None, what: str) -> str:
    """The body of the page."""
    work, found = work_of(seen, rates), pauses(seen)
    counts = Counter(fault.kind for fault in seen.faults)
    again = max(0.0, seen.computed / MICROBATCHES - len(seen.steps))  # one step may be in flight when counting begins
    generations = sum(event["kind"] == "generation" for event in seen.events)
    rows = [
        [WORDS[kind], str(counts[kind]), *both(found[kind].first), *both(found[kind].later)] for kind in KINDS if counts[kind]
    ]
    wanted = f" (wanted: {100 * bound:.0f} %)" if bound is not None else ""
    return "\n\n".join(
        [
            what,
            f"**Useful work: {100 * work.useful:.1f} %**{wanted}: {work.samples:,} samples committed in {work.seconds:.0f} s, "
            f"{work.possible:,.0f} possible with the workers alive ({work.live:.2f} on the average) at the rate measured "
            f"undisturbed; {100 * work.samples / work.of_slots:.1f} % of what all places for workers would have given.",
            f"{len(seen.faults)} faults, {generations} generations, {len(seen.steps):,} steps committed, "
            f"{again:.1f} executed in vain or again ({100 * again / len(seen.steps):.2f} %).",
            table(["fault", "count", "pause s, median", "worst", "later s, median", "worst"], rows),
            table(["workers", "samples/s undisturbed"], [[str(w), f"{rates[w]:.1f}"] for w in sorted(rates) if w]),
            "Pause: until the first step that the fault could hold up. Later: the longest wait for a step between that and the "
            "next fault, when a replacement or a new worker gets its seat or a drained node is left.",
            "Weights and losses are those of one worker that nobody has disturbed; nothing was left running."
            if not wrong
            else "**Not kept:**\n\n" + "\n".join(f"- {line}" for line in wrong),
        ]
    )


def main() -> int:
    """Returns the exit code: 1 when a promise was not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=15.0, metavar="S", help="seconds between two faults, on the average")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--ms", type=float, default=4.0, help="a layer's forward; its backward is twice that")
    parser.add_argument("--spot", default=os.environ.get("RAYPAR_SPOT_TRACE"), metavar="FILE", help="or `generated`")
    parser.add_argument("--scale", type=float, default=100.0, help="how many times faster the history is played")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="override a job key")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the run folder and all logs there")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="take the undisturbed rates from there, or keep them there")
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    given = parser.parse_args()
    history = None
    if given.spot:
        recorded = spot.generated(given.seed) if given.spot == "generated" else spot.read(Path(given.spot))
        history = recorded.scaled(given.scale, MOST)
    seconds = 60 * given.minutes
    fleet = Fleet(1 if history else SLOTS, [str(ROOT), str(HERE)])
    folder = given.keep or fleet.folder / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    run = None
    try:
        rates = rates_of(fleet, folder, given.ms, given.rates)
        fleet.restore(history.at(0.0) if history else BEGIN // SLOTS)
        begin = [f"plan.replicas={history.at(0.0)}"] if history else []  # a run begins with all workers of its plan
        every = SPOT_CHECKPOINT_EVERY if history else CHECKPOINT_EVERY
        run = Disturbed(fleet, folder, given.ms, [*begin, *given.overrides], every)
        run.start()
        if history:
            replay(run, history, given.seed, min(seconds, history.seconds))
        else:
            disturb(run, given.seed, given.every, seconds)
        seen = run.finish()
        lines, weights = undisturbed(folder, "reference", 0.0, 1, len(seen.steps))
    finally:
        if run is not None:
            run.give_up()
        if given.keep is not None:
            fleet.keep_logs(given.keep / "ray_logs")
        left = fleet.end()
    seen.left = left
    wrong = wrongs(seen, lines, weights)
    command = f"python jobs/bench/chaos.py --minutes {given.minutes:g} --seed {given.seed} " + (
        f"--spot {Path(given.spot).name} --scale {given.scale:g}" if history else f"--every {given.every:g}"
    )
    bound = None if history else 0.95 if given.every >= 60 else 0.8 if given.every >= 15 else None
    what = (
        f"The history {history.name}, {given.scale:g} times as fast, at most {MOST} nodes of one worker each; a checkpoint "
        f"every {SPOT_CHECKPOINT_EVERY} steps."
        if history
        else f"A fault every {given.every:g} s; {BEGIN} workers at the beginning, at most {MOST}, {SLOTS} to a node."
    )
    if bound is not None and (useful := work_of(seen, rates).useful) < bound:
        wrong.append(f"{100 * useful:.1f} % of useful work, wanted {100 * bound:.0f} %")
    text = report(seen, rates, wrong, bound, what)
    if given.json:
        facts = {
            "work": vars(work_of(seen, rates)),
            "pauses": {kind: vars(found) for kind, found in pauses(seen).items()},
            "rates": rates,
            "wrong": wrong,
        }
        print(json.dumps({"environment": environment(), **facts, "faults": [vars(fault) for fault in seen.faults]}))
    else:
        print(text)
    if given.page:
        given.page.write_text(page("How much useful work is left when machines fail all the time?", command, text))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
