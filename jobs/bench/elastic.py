"""Does raypar keep the limits it has set itself for losses, joins, drains and for days when nothing fails?

`python jobs/bench/elastic.py [--only ROW ...] [--count N] [--log FILE] [--page FILE]`; rows:

    kill    kill -9 of a worker of a 2x2 plan           raylet  kill -9 of a raylet with its workers, three nodes
    stop    SIGSTOP of a worker                         hang    SIGSTOP of a raylet with its workers
    driver  kill -9 of the driver                       join    a node of two workers is added, and drained again
    replan  100 MB of state: fewer workers, and back    cost    elastic against no `elastic` section
    calm    processors oversubscribed three times       busy    cost where workers leave the driver no processor
    owners  kill -9 of an owner of divided state that a second worker holds, of three replicas and of four

Stages sleep where only time counts, so that many workers fit few processors. All times are of one clock: that of the lines in
metrics.jsonl and of the moment of the fault. "One step" is the median step of the new plan. With `--log` finished rows are kept
in a file, so that rows can be run one by one; the page has them all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import gate  # noqa: F401  (found here, so that the driver of `cost` finds it too)
import yaml
from chaos import Disturbed, lines_of, train_command
from elastic_read import Answer, Story, percentile
from harness import ROOT, BenchError, Contender, alternate, environment, page, ratio, table

from cluster.fleet import Fleet, works
from raypar.record.stages_of_plan import plan_of_stages

HERE = Path(__file__).parent
SLOTS = 2
LIMIT_S = 90.0
"""Until the plan is whole again after a fault."""
CALM_STEPS = 6
"""Of the whole plan, before the next fault."""
BUSY = 6
STATE_BYTES = 100e6
PLAN = ("plan.stages=2", "plan.replicas=2", "checkpoint.every=0")
HANG_S, HANG_TIMES = 3.0, 5.0


@dataclass
class Row:
    """One limit and what was measured: `values` in `unit`, each beside `bounds`. `also`: a promise beside the number."""

    name: str
    what: str
    bound: str
    unit: str
    values: list[float]
    bounds: list[float]
    share: float = 1.0
    """The limit is for this share of the values."""
    step_s: float | None = None
    whole: list[float] = field(default_factory=list)
    """The same with the step in it."""
    also: str = ""
    kept: bool = True
    phases: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def excess(self) -> list[float]:
        """Above the limit, for each value."""
        return [value - bound for value, bound in zip(self.values, self.bounds, strict=True)]

    @property
    def holds(self) -> bool:
        """The limit and the promise beside it."""
        return self.kept and bool(self.values) and percentile(self.excess, self.share) <= 0

    def cells(self) -> list[str]:
        """For the table."""
        each = [f"{percentile(self.values, share):.2f}" for share in (0.5, 0.95, 1.0)] if self.values else ["", "", ""]
        step = "" if self.step_s is None else f"{self.step_s:.2f}"
        return [
            self.name,
            self.what,
            self.bound,
            *each,
            self.unit,
            str(len(self.values)),
            step,
            self.also,
            "yes" if self.holds else "NO",
        ]


HEADER = ["row", "what", "limit", "p50", "p95", "worst", "unit", "n", "one step s", "also", "holds"]


# -- runs ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(given: argparse.Namespace, nodes: int, *overrides: str) -> Iterator[Disturbed]:
    """A run of sleeping layers on so many nodes, which is read when the block ends."""
    fleet = Fleet(SLOTS, [str(ROOT), str(HERE)])
    folder = fleet.folder / "runs"
    folder.mkdir(parents=True)
    (folder / "ledger").touch()
    run = Disturbed(fleet, folder, given.ms, [*PLAN, *overrides])
    try:
        for _ in range(nodes):
            fleet.add()
        run.start()
        yield run
        run.finish()
    finally:
        run.give_up()
        if given.keep is not None:
            fleet.keep_logs(given.keep / "ray_logs")
            for name in ("log", "runs/chaos/events.jsonl", "runs/chaos/metrics.jsonl"):
                with contextlib.suppress(OSError):
                    (given.keep / Path(name).name).write_text((folder / name).read_text())
        left = fleet.end()
    if left:
        raise BenchError("left running: " + "; ".join(left))


def story(run: Disturbed) -> Story:
    """Of a run that has ended."""
    return Story([(at, step) for at, step, _ in run.seen.steps], run.seen.events)


def settle(run: Disturbed, workers: int, steps: int = CALM_STEPS) -> dict[str, Any]:
    """Wait until so many workers train, and have done some steps; what members.json says then."""
    deadline = time.monotonic() + LIMIT_S
    since: int | None = None
    while True:
        told = run.members()
        whole = (
            told.get("phase") == "running"
            and len(told["members"]) == workers
            and all(works(member["pid"]) for member in told["members"])
            and works(told["driver_pid"])
        )
        since = (run.count() if since is None else since) if whole else None
        if since is not None and run.count() - since >= steps:
            return told
        run.check(time.monotonic() < deadline, f"did not come to train with {workers} workers within {LIMIT_S:.0f} s: {told}")
        run.wait(time.monotonic() + 0.05)


def moment(run: Disturbed, chance: random.Random) -> float:
    """Let a random part of a step pass; the time."""
    time.sleep(chance.uniform(0.0, 0.6))
    return time.time()


def pids(told: dict[str, Any]) -> set[int]:
    """Of the workers that train."""
    return {member["pid"] for member in told["members"]}


def phases(answers: Sequence[Answer]) -> list[str]:
    """Median seconds of each part of the way."""
    parts = {
        "until the driver begins": [a.noticed_s for a in answers],
        "until the new plan is sent out": [a.ordered_s - a.noticed_s for a in answers],
        "from there to the first step's commit": [a.latency_s - a.ordered_s for a in answers],
    }
    return [f"{name}: median {statistics.median(v):.2f} s, worst {max(v):.2f} s" for name, v in parts.items()]


def say(text: str) -> None:
    """Progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def faults(
    given: argparse.Namespace,
    nodes: int,
    count: int,
    act: Callable[[Disturbed, random.Random, dict[str, Any]], set[int]],
    *more: str,
    workers: int = 4,
) -> tuple[Story, list[float], int]:
    """`count` times: wait until the plan is whole, `act`; (what the run folder says, times, survivors that were replaced)."""
    chance, times, restarted = random.Random(given.seed), [], 0
    with running(given, nodes, f"elastic.max_workers={workers}", *more) as run:
        told = settle(run, workers)
        for number in range(count):
            at = moment(run, chance)
            times.append(at)
            victims = act(run, chance, told)
            say(f"fault {number + 1} of {count}: pids {sorted(victims)}")
            generation = told.get("generation", 0)
            before = pids(told) - victims
            while run.members().get("generation", generation) == generation:
                run.wait(time.monotonic() + 0.05)
            if len(run.fleet.alive) < nodes:
                settle(run, min(workers, SLOTS * len(run.fleet.alive)), 3)
                for node in list(run.fleet.draining):
                    run.fleet.kill(node)
                run.fleet.add()
            told = settle(run, workers)
            restarted += len(before - pids(told))
    return story(run), times, restarted


def row_of_faults(
    name: str,
    what: str,
    found: tuple[Story, list[float], int],
    limits: Callable[[Story, float], float],
    bound: str,
    share: float,
) -> Row:
    """Latency without one step."""
    told, times, restarted = found
    answers = [(at, answer) for at in times if (answer := told.after(at)) is not None]
    only = [answer for _, answer in answers]
    return Row(
        name,
        what,
        bound,
        "s + one step",
        [a.latency_s - a.step_s for a in only],
        [limits(told, at) for at, _ in answers],
        share,
        statistics.median(a.step_s for a in only),
        [a.latency_s for a in only],
        also=f"survivors restarted: {restarted}; steps again: {sum(a.again for a in only)}",
        kept=restarted == 0 and len(answers) == len(times),
        phases=phases(only),
    )


def one_worker(number: signal.Signals) -> Callable[[Disturbed, random.Random, dict[str, Any]], set[int]]:
    """A signal to one of the members."""

    def act(run: Disturbed, chance: random.Random, told: dict[str, Any]) -> set[int]:
        pid = chance.choice(sorted(pids(told)))
        run.signal(pid, number)
        return {pid}

    return act


def one_node(act: str) -> Callable[[Disturbed, random.Random, dict[str, Any]], set[int]]:
    """`kill` or `stop` a node that somebody works on."""

    def do(run: Disturbed, chance: random.Random, told: dict[str, Any]) -> set[int]:
        used = {member["node"] for member in told["members"]}
        node = chance.choice([n for n in run.fleet.alive if str(n.node_id)[:8] in used])
        victims = {m["pid"] for m in told["members"] if m["node"] == str(node.node_id)[:8]}
        if act == "stop":
            run.fleet.stop(node)
        else:
            run.fleet.kill(node)
        return victims

    return do


# -- rows ----------------------------------------------------------------------------------------------------------------


def kill(given: argparse.Namespace) -> list[Row]:
    found = faults(given, 2, given.count or 20, one_worker(signal.SIGKILL))
    what = "kill -9 of a worker -> first new step"
    return [row_of_faults("kill", what, found, lambda told, at: 1.0, "p95: 1.0 s + one step", 0.95)]


def owners(given: argparse.Namespace) -> list[Row]:
    """Nothing is gone back to: where a step is run again, the row does not hold."""
    rows = []
    for replicas in (3, 4):
        plan = ("plan.stages=1", f"plan.replicas={replicas}", "plan.zero=3", "plan.zero_holders=2", "elastic.mirror=off")
        found = faults(given, 2, given.count or 20, one_worker(signal.SIGKILL), *plan, workers=replicas)
        what = f"kill -9 of an owner, one of {replicas} replicas, two holders -> first new step"
        row = row_of_faults(f"owners {replicas}", what, found, lambda told, at: 0.2, "p95: 0.2 s + one step", 0.95)
        rows.append(replace(row, kept=row.kept and row.also.endswith("steps again: 0")))
    return rows


def raylet(given: argparse.Namespace) -> list[Row]:
    found = faults(given, 3, given.count or 5, one_node("kill"))
    what = "kill -9 of a raylet with its workers -> first new step"
    return [row_of_faults("raylet", what, found, lambda told, at: 4.0, "4 s + one step", 1.0)]


def hang_limit(told: Story, at: float) -> float:
    """By the steps before the fault."""
    return max(HANG_S, HANG_TIMES * told.p99_s(at))


def stop(given: argparse.Namespace) -> list[Row]:
    found = faults(given, 2, given.count or 5, one_worker(signal.SIGSTOP))
    what = "SIGSTOP of a worker -> first new step"
    return [row_of_faults("stop", what, found, hang_limit, "max(3 s, 5 x p99 step) + one step", 1.0)]


def hang(given: argparse.Namespace) -> list[Row]:
    found = faults(given, 3, given.count or 3, one_node("stop"))
    what = "SIGSTOP of a raylet with its workers -> first new step"
    return [row_of_faults("hang", what, found, hang_limit, "max(3 s, 5 x p99 step) + one step", 1.0)]


def driver(given: argparse.Namespace) -> list[Row]:
    def act(run: Disturbed, chance: random.Random, told: dict[str, Any]) -> set[int]:
        run.signal(told["driver_pid"], signal.SIGKILL)
        return {told["driver_pid"]}

    found = faults(given, 2, given.count or 5, act)
    what = "kill -9 of the driver -> next step"
    return [row_of_faults("driver", what, found, lambda told, at: 3.0, "3 s + one step", 1.0)]


def changes(given: argparse.Namespace, count: int, low: int, high: int, nodes: int, *more: str) -> tuple[Disturbed, list[Any]]:
    """`count` times: a node more, then it is drained. (the run, [(time, "join" or "drain", members.json before, after)])."""
    chance, found = random.Random(given.seed), []
    with running(given, nodes, f"elastic.max_workers={high}", *more) as run:
        told = settle(run, low)
        for number in range(count):
            at = moment(run, chance)
            node = run.fleet.add()
            grown = settle(run, high, 2 * CALM_STEPS)
            found.append((at, "join", told, grown))
            at = moment(run, chance)
            run.fleet.drain(node, 60.0)
            told = settle(run, low, 2 * CALM_STEPS)
            found.append((at, "drain", grown, told))
            run.fleet.take_away(node)
            say(f"joined and drained {number + 1} of {count}")
    return run, found


def join(given: argparse.Namespace) -> list[Row]:
    run, found = changes(given, given.count or 5, 4, 6, 2)
    told, rows = story(run), []
    for kind, what in (("join", "a node joins: between two steps"), ("drain", "a node is drained: between two steps")):
        wanted = (lambda a, b: b > a) if kind == "join" else (lambda a, b: b < a)
        answers = [a for at, k, _, _ in found if k == kind and (a := told.after(at, wanted)) is not None]
        again = sum(event["again"] for event in told.generations)
        replaced = sum(
            len(pids(before) - pids(after)) if k == "join" else len(pids(after) - pids(before)) for _, k, before, after in found
        )
        rows.append(
            Row(
                kind,
                what,
                "one step + 0.3 s",
                "s + one step",
                [a.gap_s - a.step_s for a in answers],
                [0.3] * len(answers),
                step_s=statistics.median(a.step_s for a in answers),
                whole=[a.gap_s for a in answers],
                also=f"steps again: {again}; survivors restarted: {replaced}",
                kept=not again and not replaced and len(answers) == len(found) // 2,
                facts={"plans": sorted({a.plan for a in answers})},
            )
        )
    return rows


def replan(given: argparse.Namespace) -> list[Row]:
    from wide_model import layer_bytes, width_for

    width = width_for(STATE_BYTES)
    with tempfile.TemporaryDirectory(prefix="raypar-diary.") as folder:
        diary = Path(folder) / "diary"
        model = f"model={{function: 'wide_model:layers', args: {{width: {width}, diary: {diary}}}}}"
        data = f"data={{function: 'wide_model:samples', args: {{width: {width}}}}}"
        run, found = changes(given, given.count or 3, 2, 4, 1, model, data, "plan.stages=2", "plan.replicas=1")
        told = story(run)
        lines = lines_of(diary)
    pauses, shares, moved_mb, plans = [], [], [], []
    for (at, kind, before, after), following in zip(found, [*found[1:], (float("inf"),)], strict=True):
        answer = told.after(at, (lambda a, b: b > a) if kind == "join" else (lambda a, b: b < a))
        if answer is None:
            continue
        had, has = held(before), held(after)
        need = sum(len(layers - had.get(worker, set())) for worker, layers in has.items()) * layer_bytes(width)
        moved = sum(line["bytes"] for line in lines if at < line["time"] < following[0])
        pauses.append(answer.gap_s)
        plans.append(f"{kind}: {before['plan']} -> {after['plan']}, {moved / 1e6:.0f} MB in {answer.gap_s:.2f} s")
        moved_mb.append(moved / 1e6)
        shares.append(moved / need if need else (1.0 if not moved else float("inf")))
    facts = {"changes": plans, "moved_mb": moved_mb, "state_mb": layer_bytes(width) * 8 / 1e6}
    what = f"{layer_bytes(width) * 8 / 1e6:.0f} MB of state, another plan: between two steps"
    whole = len(pauses) == len(found)
    return [
        Row("replan", what, "2 s", "s", pauses, [2.0] * len(pauses), kept=whole, facts=facts, phases=plans),
        Row("moved", "bytes received / set difference", "1.1", "x", shares, [1.1] * len(shares), kept=whole),
    ]


def held(told: dict[str, Any]) -> dict[int, set[int]]:
    """worker -> layers, by members.json."""
    seats: dict[int, set[int]] = {}
    by_coordinate = {member["coordinate"]: member["worker"] for member in told["members"]}
    plan = plan_of_stages(told["stages"])
    assert plan is not None, told
    for rank in range(plan.world):
        worker = by_coordinate[plan.coordinate(rank)]
        seats[worker] = {n for i in plan.stages_of(rank) for n in range(plan.stages[i].first, plan.stages[i].last)}
    return seats


RESTING = {
    "model": "recovery_work:layers",
    "data": {"function": "examples.gpt:text", "args": {"context": 16}},
    "batch_size": 24,
    "microbatches": 12,
    "plan": {"stages": 2, "replicas": 2},
}
COMPUTING = {"plan": {"stages": 1, "replicas": 2}}
"""How the jobs differ from the quickstart."""

MOST_COST = 1.03


def cost(given: argparse.Namespace) -> list[Row]:
    """4 workers whose blocks also rest, as in all timed runs."""
    return [_cost(given, "cost", "2x2 workers whose blocks also rest", RESTING, MOST_COST)]


def busy(given: argparse.Namespace) -> list[Row]:
    """2 workers that compute all the time, without a limit: with a worker for each processor the driver and Ray's daemons take
    their time from the workers. (Of 4 that compute on 2 processors it would measure chance: pairs differ by a third.)"""
    return [_cost(given, "busy", "2 workers on 2 processors, nothing left for the driver", COMPUTING, math.inf)]


def _cost(given: argparse.Namespace, row: str, what: str, changes: dict[str, Any], most: float) -> Row:
    fleet = Fleet(8, [str(ROOT), str(HERE)])
    folder = fleet.folder / "runs"
    folder.mkdir()
    job = yaml.safe_load((ROOT / "jobs/quickstart.yaml").read_text()) | changes
    job |= {"steps": 1_000_000, "checkpoint": {"every": 0}, "run_dir": str(folder)}
    for key in ("validation", "lr_schedule", "elastic"):
        job.pop(key, None)

    def contender(name: str, **more: Any) -> Contender:
        def commands(address: str) -> list[list[str]]:
            path = folder / f"{name}.yaml"
            path.write_text(
                yaml.safe_dump(
                    job | {"name": name, "callbacks": [{"function": "gate:Gate", "args": {"address": address}}]} | more
                )
            )
            return [train_command(path, "--address", fleet.address)]

        return Contender(name, 1, commands)

    on, off = contender("on", elastic={"min_workers": 1}), contender("off")
    try:
        fleet.add()
        on.start()
        off.start()
        seconds = alternate([on, off], rounds=given.rounds, steps=given.steps, say=say)
        events = [json.loads(line) for line in (folder / "on/events.jsonl").read_text().splitlines()]
    finally:
        on.stop()
        off.stop()
        left = fleet.end()
    found = ratio(seconds["on"], seconds["off"])
    disturbed = [event for event in events if event["kind"] in ("lost", "generation", "recovering")]
    mean = statistics.mean(seconds["on"]) / statistics.mean(seconds["off"])
    return Row(
        row,
        f"step time, elastic / no elastic section, in pairs: {what}",
        f"{most} (upper end of the 95 % interval of the median)" if math.isfinite(most) else "none",
        "x",
        [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)],
        [most] * given.rounds,
        step_s=statistics.median(seconds["off"]),
        also=f"median {found.median:.4f}, 95 % interval {found.lower:.4f} to {found.upper:.4f}; of the means {mean:.4f}",
        kept=found.upper <= most and not disturbed and not left,
        phases=[f"{event['kind']}: {event.get('text', '')}" for event in disturbed] + [f"left running: {one}" for one in left],
        share=0.5,
        facts={"seconds": seconds, "median": found.median, "lower": found.lower, "upper": found.upper, "mean": mean},
    )


def calm(given: argparse.Namespace) -> list[Row]:
    busy: list[subprocess.Popen[bytes]] = []
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"
    try:
        with running(given, 2, "elastic.max_workers=4") as run:
            settle(run, 4)
            # Each in a session of its own: Linux shares processors out by session first.
            busy += [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(BUSY)]
            start = run.count()
            run.wait(time.monotonic() + 60 * given.minutes)
            steps = run.count() - start
            for process in busy:
                process.kill()
            settle(run, 4, 1)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    alarms = [event for event in run.seen.events if event["kind"] in ("lost", "recovering", "generation")]
    durations = [b[0] - a[0] for a, b in zip(run.seen.steps, run.seen.steps[1:], strict=False)]
    texts = [f"{event['kind']}: {event.get('text', '')}" for event in alarms]
    what = f"false alarms in {given.minutes:g} minutes beside {BUSY} busy processes on {os.cpu_count()} processors"
    also = f"{steps} steps, median {statistics.median(durations):.2f} s, longest {max(durations):.2f} s"
    return [Row("calm", what, "0", "alarms", [float(len(alarms))], [0.0], also=also, phases=texts[:10])]


ROWS = {row.__name__: row for row in (kill, owners, raylet, stop, hang, driver, join, replan, cost, busy, calm)}


# -- the report ----------------------------------------------------------------------------------------------------------


def kept_rows(log: Path | None) -> dict[str, dict[str, Any]]:
    """Rows of earlier calls by name, the last of each."""
    if log is None or not log.exists():
        return {}
    return {line["row"]["name"]: line for line in map(json.loads, log.read_text().splitlines())}


def body(found: Sequence[dict[str, Any]]) -> str:
    """Of the page."""
    rows = [Row(**line["row"]) for line in found]
    cells = [[*row.cells(), str(facts["load"]), facts["commit"]] for row, facts in zip(rows, found, strict=True)]
    parts = [table([*HEADER, "load", "commit"], cells)]
    parts += [f"{row.name}, where the time goes:\n\n" + "\n".join(f"- {p}" for p in row.phases) for row in rows if row.phases]
    parts.append(
        "p50, p95, worst: nearest rank. Where the unit is `s + one step`, one step of the new plan (its median) is taken off. "
        "First new step: the first that the new generation commits, whatever was committed on the way there. Load: the load "
        "average of one minute when the row began."
    )
    return "\n\n".join(parts)


def main() -> int:
    """Returns the exit code: 1 when a limit does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ROWS), metavar="ROW", help="none: just the page, from the log")
    parser.add_argument("--count", type=int, default=0, help="faults; 0: 20 kills of each plan, 5 or 3 of the others")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the row `calm`")
    parser.add_argument("--rounds", type=int, default=24, help="of the rows `cost`, `busy`")
    parser.add_argument("--steps", type=int, default=6, help="of a round of these")
    parser.add_argument("--ms", type=float, default=4.0, help="a layer's forward; its backward is twice that")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--log", type=Path, help="keep finished rows here, one JSON line each")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the files of the last run there")
    parser.add_argument("--page", type=Path, help="also write a results page")
    given = parser.parse_args()
    if unknown := set(given.only) - set(ROWS):
        parser.error(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    found = kept_rows(given.log)
    done = []
    for name in given.only:
        facts = environment()
        for row in ROWS[name](given):
            line = {"row": asdict(row), "load": facts["load_average"], "commit": facts["commit"], "date": facts["date"]}
            found[row.name] = line
            done.append(row)
            if given.log is not None:
                with given.log.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            say(" | ".join(row.cells()) + "".join(f"\n    {text}" for text in row.phases))
    print(table(HEADER, [row.cells() for row in done]))
    if given.page:
        command = "python jobs/bench/elastic.py"
        given.page.write_text(page("Are the limits of an elastic run kept?", command, body(list(found.values()))))
    return 0 if all(row.holds for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
