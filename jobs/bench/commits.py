"""Is raypar slower than it was? An older commit beside this one: the same work, alternating in one run.

`python jobs/bench/commits.py OLD [--only steps interpreter kill] [--rounds 24] [--json] [--page FILE] [--log FILE]`; OLD is a
checkout of the older commit (`git worktree add OLD COMMIT`), whose own benches are run. Of every contender there are three: the
old commit, the old commit once more, and the new one. A ratio is old / new inside a round, so over 1 is faster; what old / old
again differs from 1 is the noise of this machine. A row holds when its median ratio is at least 0.98, or within that noise.

    steps        seconds a step of workers over TCP: one worker, replicas, stages, two shards
    interpreter  microseconds of the interpreter for an instruction (the function of that name of `control.py`, without Ray)
    kill         seconds from kill -9 of a worker to the next step (`elastic.py --only kill`)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, BenchError, Contender, alternate, environment, page, ratio, table, worker_command

LIMIT = 0.98
"""The smallest ratio old / new that is no slowing down."""
RUN_TIMEOUT_S = 590.0
WORK: dict[str, dict[str, Any]] = {
    "1 worker": {},
    "2 replicas": {"replicas": 2},
    "2 replicas, fast reduction": {"replicas": 2, "reduction": "fast"},
    "2 stages, 1f1b": {"stages": 2, "schedule": "1f1b"},
    "2 stages, zb-v": {"stages": 2, "schedule": "zb-v"},
    "2 shards": {"shards": 2, "model": "split_gpt:layers"},
    "2 shards, sequence_parallel": {"shards": 2, "model": "split_gpt:layers", "sequence": True},
}
"""Options of `worker.py raypar` by what they measure; those of `peers.py` and `shards.py`."""
MICROBATCHES = 4


@dataclass
class Row:
    """One quantity of the old commit (twice) and of the new one, in `unit`, one number a round each."""

    what: str
    unit: str
    old: list[float]
    again: list[float]
    new: list[float]

    def cells(self) -> list[str]:
        """For the table."""
        found, noise = ratio(self.old, self.new), ratio(self.old, self.again)
        medians = [f"{statistics.median(values):.4g}" for values in (self.old, self.again, self.new)]
        told = [f"{found.median:.3f}", f"{found.lower:.3f} to {found.upper:.3f}"]
        told += [f"{noise.median:.3f}", f"{noise.lower:.3f} to {noise.upper:.3f}"]
        return [self.what, self.unit, *medians, *told, str(found.pairs), "yes" if self.holds else "NO"]

    @property
    def holds(self) -> bool:
        """No slower than `LIMIT`, or than the lower end of old against old."""
        return ratio(self.old, self.new).median >= min(LIMIT, ratio(self.old, self.again).lower)


HEADER = ["what", "unit", "old", "old again", "new", "old / new", "95 %", "old / old again", "95 %", "rounds", "holds"]


def steps(old: Path, rounds: int) -> list[Row]:
    """Seconds a step of raypar's workers, a set of three contenders after the other."""
    rows = []
    for what, options in WORK.items():
        world = options.get("stages", 1) * options.get("replicas", 1) * options.get("shards", 1)
        sets = [_contender(f"{what}, {name}", root, world, options) for name, root in _sides(old)]
        try:
            for contender in sets:
                contender.start()
            seconds = alternate(sets, rounds=rounds, steps=4)
        finally:
            for contender in sets:
                contender.stop()
        rows.append(Row(what, "s a step", *(seconds[c.name] for c in sets)))
        say(rows[-1])
    return rows


def _sides(old: Path) -> list[tuple[str, Path]]:
    return [("old", old), ("old again", old), ("new", ROOT)]


def _contender(name: str, root: Path, world: int, options: dict[str, Any]) -> Contender:
    given = {"work": {}, "microbatches": MICROBATCHES, **options}
    return Contender(
        name, world, lambda a: [worker_command("raypar", a, rank, root=root, **given) for rank in range(world)], root=root
    )


INTERPRETER_RUN = """
import json, sys
sys.path.insert(0, "jobs/bench")
import torch
import control
control.make_importable(control.Path("jobs/bench").resolve())
torch.set_num_threads(1)
found = [control.interpreter(m, s, 40) for _ in range(3) for s in ("1f1b", "zb-v") for m in (8, 64)]
print(json.dumps(found))
"""
"""Run in a checkout, since `control.py` itself also starts Ray, whose processes would disturb microseconds."""


def interpreter(old: Path, rounds: int) -> list[Row]:
    """Microseconds an instruction, by schedule and microbatches; the median of three measurements in one process."""

    def measure(root: Path) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for one in json.loads(_python(root, "-c", INTERPRETER_RUN)):
            found.setdefault(f"interpreter, {one['schedule']}, m={one['microbatches']}", []).append(one["us_per_instruction"])
        return found

    return _in_turn(old, rounds, "us an instruction", measure)


def kill(old: Path, rounds: int, count: int) -> list[Row]:
    """Seconds from the fault to the next commit, and the same without the step itself; `count` kills a round."""

    def measure(root: Path) -> dict[str, list[float]]:
        with tempfile.TemporaryDirectory(prefix="rp-") as folder:
            log = Path(folder) / "log"
            _bench(root, "elastic.py", "--only", "kill", "--count", str(count), "--log", str(log), may_miss=True)
            row = json.loads(log.read_text().splitlines()[-1])["row"]
        return {"kill, to the next step": row["whole"], "kill, without the step": row["values"]}

    return _in_turn(old, rounds, "s", measure)


def _in_turn(old: Path, rounds: int, unit: str, measure: Callable[[Path], dict[str, list[float]]]) -> list[Row]:
    """A process of its own for each side and round, in an order that is reversed every other round; medians of each."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for name, root in _sides(old) if number % 2 == 0 else reversed(_sides(old)):
            for what, values in measure(root).items():
                found.setdefault(what, {}).setdefault(name, []).append(statistics.median(values))
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
    rows = [Row(what, unit, sides["old"], sides["old again"], sides["new"]) for what, sides in found.items()]
    for row in rows:
        say(row)
    return rows


def _bench(root: Path, name: str, *arguments: str, may_miss: bool = False) -> str:
    """Output of a bench of a checkout; exit code 1 says that a limit of the bench was missed."""
    return _python(root, str(root / "jobs" / "bench" / name), *arguments, may_miss=may_miss)


def _python(root: Path, *arguments: str, may_miss: bool = False) -> str:
    """Output of a Python process that imports raypar from the checkout `root`."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(root)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode not in ((0, 1) if may_miss else (0,)):
        raise BenchError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def say(row: Row) -> None:
    print(" | ".join(row.cells()), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the older commit")
    parser.add_argument("--only", nargs="+", choices=["steps", "interpreter", "kill"], default=["steps", "interpreter", "kill"])
    parser.add_argument("--rounds", type=int, default=24, help="of steps; interpreter has a third, kill a sixth of them")
    parser.add_argument("--kills", type=int, default=5, help="in one round")
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--log", type=Path, help="keep finished parts in this file; those in it are not run again")
    given = parser.parse_args()
    old = given.old.resolve()
    parts = {
        "steps": lambda: steps(old, given.rounds),
        "interpreter": lambda: interpreter(old, max(1, given.rounds // 3)),
        "kill": lambda: kill(old, max(1, given.rounds // 6), given.kills),
    }
    kept: dict[str, list[dict[str, Any]]] = json.loads(given.log.read_text()) if given.log and given.log.exists() else {}
    facts = environment()
    for name in given.only:
        if name not in kept:
            kept[name] = [asdict(row) for row in parts[name]()]
            if given.log:
                given.log.write_text(json.dumps(kept))
    rows = [Row(**one) for name in parts for one in kept.get(name, ())]
    shown = table(HEADER, [row.cells() for row in rows])
    print(json.dumps({"environment": facts, "rows": [asdict(row) for row in rows]}) if given.json else shown)
    if given.page:
        described = subprocess.run(["git", "describe", "--always"], cwd=old, capture_output=True, text=True, check=True)
        note = f"Old: {described.stdout.strip()}, new: the commit below. Ratios are of one round; over 1: the new is faster."
        command = "python jobs/bench/commits.py OLD" + (f" --rounds {given.rounds}" if given.rounds != 24 else "")
        given.page.write_text(page("Is this commit slower than the one before?", command, f"{note}\n\n{shown}"))
    sys.exit(0 if all(row.holds for row in rows) else 1)


if __name__ == "__main__":
    main()
