"""The same faults given to raypar, to Ray Train's elastic trainer and to torchft: how long nothing is learnt, what is lost.

`python jobs/bench/recovery.py [--json] [--page FILE] [--repeats 5] [--only TEXT ...] [--faults worker node join] [--log FILE]`

Each run is a fresh start: a fault in the first 70 % of a random step, then on until the last step. Everything is seen from
outside, on the machine's one clock: every contender writes a line for a committed step. With `--log` finished runs are kept
in a file, and those found in it are not repeated. torchft gets a virtual environment of its own (`--torchft-venv` keeps it).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from harness import BenchError, environment, page, table
from recovery_runs import (
    Commit,
    Raypar,
    RayparPipelines,
    RayTrain,
    Run,
    RunSettings,
    Seen,
    Torchft,
    TorchftManager,
    torchft_python,
)
from side_by_side import command_line

Fault = Literal["none", "worker", "node", "join"]
CONTENDERS: tuple[type[Run], ...] = (Raypar, RayparPipelines, TorchftManager, Torchft, RayTrain)
WORKERS, SAMPLES = 4, 24
FIRST_STEP_LIMIT_S, RUN_LIMIT_S = 120.0, 300.0
POLL_S = 0.05
SETTLED_STEPS = 3
"""So long before the end processes are counted."""

UNDISTURBED = 2
EARLIEST, LATEST = 11, 15
"""Steps after which the fault comes."""


@dataclass
class Outcome:
    """What one run showed. Times in seconds; None where the contender never got there.

    `recovery_s`: from the fault to the first commit of a step that had not been committed. `standstill_s`: the longest time
    without such a commit after the fault; `joined_s`: until a step is computed by more workers than before. `repeated`: steps
    committed a second time. `samples_lost`: that were due in a step and are in nobody's gradient.
    """

    contender: str
    fault: Fault
    number: int
    step_s: float | None = None
    recovery_s: float | None = None
    standstill_s: float | None = None
    joined_s: float | None = None
    repeated: int = 0
    samples_lost: int = 0
    survivors: int = 0
    restarted: int = 0
    started: int = 0
    weights: str | None = None
    failed: str | None = None


def one_run(kind: type[Run], fault: Fault, number: int, settings: RunSettings, seed: int) -> Outcome:
    """Start, hurt once, watch to the end. A run that fails or takes too long is an outcome too."""
    chance = random.Random(f"{seed} {fault} {number}")  # the same moments for every contender
    outcome = Outcome(kind.name, fault, number)
    try:
        with kind(settings, WORKERS // 2 if fault == "join" else WORKERS, chance) as run:
            watch(run, fault, outcome, chance)
    except BenchError as error:
        outcome.failed = str(error)
    return outcome


def watch(run: Run, fault: Fault, outcome: Outcome, chance: random.Random) -> None:
    """Wait for the moment, do it, follow the run to its end and fill in `outcome`."""
    after = chance.randint(EARLIEST, LATEST)
    deadline = time.monotonic() + FIRST_STEP_LIMIT_S
    while (seen := first_commits(run.commits())).get(after) is None:
        check(not run.over() and time.monotonic() < deadline, run, f"did not come to step {after}")
        time.sleep(POLL_S)
    outcome.step_s = statistics.median(seen[n + 1] - seen[n] for n in range(2, after))
    pause_s = 0.7 * chance.random() * outcome.step_s
    before, killed = run.training(), set[int]()
    run.look()
    time.sleep(max(0.0, seen[after] + pause_s - time.monotonic()))
    at_s = time.monotonic()
    if fault == "join":
        run.join()
    elif fault != "none":
        killed = run.kill_worker() if fault == "worker" else run.kill_node()
    counted = False
    deadline = time.monotonic() + RUN_LIMIT_S
    while not run.over():
        check(time.monotonic() < deadline, run, f"had not ended {RUN_LIMIT_S:.0f} s after the fault")
        if not counted and any(commit.step >= run.settings.steps - SETTLED_STEPS for commit in run.commits()):
            counted, survivors, now = True, before - killed, run.training()
            outcome.survivors, outcome.restarted, outcome.started = len(survivors), len(survivors - now), len(now - before)
        time.sleep(POLL_S)
    measure(run, at_s, outcome)


def check(holds: bool, run: Run, what: str) -> None:
    """Raise `BenchError` with the last output of the run."""
    if not holds:
        raise BenchError(f"{run.name}: {what}\n{run.log()}")


def first_commits(commits: Sequence[Commit]) -> dict[int, float]:
    """When each step was first committed."""
    found: dict[int, float] = {}
    for commit in commits:
        found.setdefault(commit.step, commit.at_s)
    return found


def measure(run: Seen, at_s: float, outcome: Outcome) -> None:
    """What the lines of a run that has ended say."""
    commits, first = run.commits(), first_commits(run.commits())
    before = max(step for step, s in first.items() if s <= at_s)
    new = sorted(s for step, s in first.items() if step > before)
    outcome.recovery_s = new[0] - at_s
    outcome.standstill_s = max(b - a for a, b in pairwise([first[before], *new]))
    outcome.joined_s = next((c.at_s - at_s for c in commits if c.at_s > at_s and c.workers > run.workers), None)
    outcome.repeated = run.repeated()
    used = {commit.step: commit.samples for commit in commits}
    outcome.samples_lost = sum(SAMPLES - used[step] for step in range(before + 1, run.settings.steps + 1))
    outcome.weights = run.weights()


# -- the result --------------------------------------------------------------------------------------------------------------

FAULTS: dict[Fault, str] = {
    "worker": "kill -9 of one of 4 workers",
    "node": "kill -9 of one of 2 nodes, with its 2 workers; it stays away",
    "join": "2 workers train, 2 more come",
}


def tables(outcomes: Sequence[Outcome]) -> str:
    """One table a fault, a row a contender; then what failed."""
    undisturbed: dict[str, set[str | None]] = {}
    for one in outcomes:
        if one.fault == "none":
            undisturbed.setdefault(one.contender, set()).add(one.weights)
    parts = []
    for fault, title in FAULTS.items():
        names = list(dict.fromkeys(one.contender for one in outcomes if one.fault == fault))
        rows = [
            row([o for o in outcomes if (o.contender, o.fault) == (name, fault)], undisturbed.get(name, set()))
            for name in names
        ]
        if rows:
            parts.append(f"## {title}\n\n{table(header(fault), rows)}")
    failed = [
        f"- {one.contender}, {one.fault}, run {one.number}: {one.failed.splitlines()[0]}" for one in outcomes if one.failed
    ]
    if failed:
        parts.append("## Runs that did not end well\n\n" + "\n".join(failed))
    return "\n\n".join(parts)


HURT = ("first new step after, s: p50 (worst)", "longest standstill, s: p50 (worst)")
JOINED = ("standstill of those who train, s: p50 (worst)", "with more workers after, s: p50 (worst)")


def header(fault: Fault) -> tuple[str, ...]:
    """Of the fault's table."""
    counts = ("steps done again", "samples lost", "survivors restarted", "processes started", "weights as undisturbed")
    return ("contender", "runs", "step before, s", *(JOINED if fault == "join" else HURT), *counts)


def row(runs: Sequence[Outcome], undisturbed: set[str | None]) -> list[str]:
    """Of one contender and one fault."""
    well = [run for run in runs if run.failed is None]
    if not well:
        return [runs[0].contender, f"0 of {len(runs)}", *["-"] * (len(header(runs[0].fault)) - 2)]

    def times(name: str) -> str:
        found = [value for run in well if (value := getattr(run, name)) is not None]
        return f"{statistics.median(found):.2f} ({max(found):.2f})" if found else "never"

    def count(name: str) -> str:
        found = sorted(getattr(run, name) for run in well)
        return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"

    equal = sum(run.weights is not None and undisturbed == {run.weights} for run in well)
    same = f"{equal} of {len(well)}" if len(undisturbed) == 1 else "differ without a fault" if undisturbed else "not known"
    return [
        runs[0].contender,
        f"{len(well)} of {len(runs)}",
        f"{statistics.median(run.step_s or 0.0 for run in well):.2f}",
        *map(times, ("standstill_s", "joined_s") if runs[0].fault == "join" else ("recovery_s", "standstill_s")),
        count("repeated"),
        count("samples_lost"),
        f"{count('restarted')} of {count('survivors')}",
        count("started"),
        same,
    ]


def say(outcome: Outcome) -> None:
    """Progress, for people."""
    facts = {key: round(value, 2) if isinstance(value, float) else value for key, value in asdict(outcome).items()}
    text = outcome.failed or ", ".join(f"{key} {value}" for key, value in list(facts.items())[3:-2])
    print(f"{outcome.contender}, {outcome.fault}, run {outcome.number}: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print every run as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each fault")
    parser.add_argument("--only", nargs="+", help="contenders whose name contains one of these")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, help="keep finished runs here, one JSON line each, and do not repeat them")
    parser.add_argument("--torchft-venv", type=Path, help="keep torchft's environment here; made where it is missing")
    given = parser.parse_args()
    kinds = [k for k in CONTENDERS if not given.only or any(text in k.name for text in given.only)]
    outcomes = (
        [Outcome(**json.loads(line)) for line in given.log.read_text().splitlines()] if given.log and given.log.exists() else []
    )
    with tempfile.TemporaryDirectory(prefix="rp-torchft-") as folder:
        if any(issubclass(kind, Torchft) for kind in kinds):
            Torchft.python = torchft_python((given.torchft_venv or Path(folder)).absolute())
        for fault, number, kind in runs(kinds, given.faults, given.repeats):
            if any((one.contender, one.fault, one.number) == (kind.name, fault, number) for one in outcomes):
                continue
            outcomes.append(one_run(kind, fault, number, settings(fault, given.steps), given.seed))
            say(outcomes[-1])
            if given.log:
                with given.log.open("a") as file:
                    file.write(json.dumps(asdict(outcomes[-1])) + "\n")
    print(
        json.dumps({"environment": environment(), "results": [asdict(o) for o in outcomes]}) if given.json else tables(outcomes)
    )
    if given.page:
        given.page.write_text(page("Recovery beside peers", command_line(), f"{NOTE}\n\n{tables(outcomes)}"))


def runs(kinds: Sequence[type[Run]], faults: Sequence[Fault], repeats: int) -> Iterator[tuple[Fault, int, type[Run]]]:
    """In turn, so that a busy hour of the machine meets all contenders; `UNDISTURBED` runs first, for the weights."""
    for number in range(UNDISTURBED):
        yield from (("none", number, kind) for kind in kinds)
    for number in range(repeats):
        yield from ((fault, number, kind) for fault in faults for kind in kinds)


def settings(fault: Fault, steps: int) -> RunSettings:
    """Ray Train looks for new nodes once a minute; where one joins it looks more often, so that a run need not last minutes."""
    return RunSettings(steps, resize_s=10.0) if fault == "join" else RunSettings(steps)


NOTE = """\
One GPT (4 blocks, width 32) whose blocks also rest, 24 samples a step, AdamW; 4 workers need 0.3 s a step, on one machine.

- Ray Train: `TorchTrainer`, DDP, `num_workers=(1, 4)`, `max_failures=5`, a checkpoint every 5 steps.
- torchft: gloo, as in its `train_ddp.py` and README: lighthouse with `--join_timeout_ms 10000`, torchrun starts a killed
  process again. With its DDP, and with `Manager.allreduce`: its DDP raises in every survivor when gloo reports a lost peer.
- raypar: `elastic: {min_workers: 1, max_workers: 4}`, a checkpoint every 5 steps.
- Ray: a head without CPUs, nodes of 2, no dashboard, else default settings.

The fault comes in the first 70 % of a random step, at the same place for all. Every commit is written down by those who make it
(for raypar: by its client, when the driver tells), on the machine's one clock.

- *first new step*: from the fault to the first commit of a step that had not been committed before.
- *standstill*: the longest time without such a commit from the fault to the end of the run, the step itself included.
- *samples lost*: due in a step after the fault, and in nobody's gradient. A torchft group trains on its own share of the
  samples: while it is away, nobody does. With 2 of 4 groups it loses half from the start.
- *survivors restarted*, *processes started*: counted three steps before the end.
- *weights as undisturbed*: sha256 of the final weights equals that of two runs with 4 workers and no fault.
- Where workers join, Ray Train looks for them every 10 s instead of 60 s: it stands still for as long, runs are shorter."""


if __name__ == "__main__":
    main()
