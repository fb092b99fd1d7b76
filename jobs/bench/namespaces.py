"""How long does a run stand still when the network between its machines breaks, and does it end as if nothing had happened?

`python jobs/bench/namespaces.py [--only TEXT ...] [--log FILE] [--page FILE] [--keep FOLDER]`: every scenario of
`tests/helpers/namespace_scenarios.py` on machines of `cluster/local.py`, as root. `--only`: those whose names have a text. With
`--log` outcomes are kept in a file, so that scenarios can be run in parts; the page has the last outcome of each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from harness import ROOT, page, table

sys.path.append(str(ROOT / "tests"))

from helpers.namespace_runner import HEADER, ClusterKeeper, Outcome, ScenarioRun
from helpers.namespace_scenarios import SCENARIOS, Scenario
from helpers.trainee import Undisturbed


def measure(scenarios: Sequence[Scenario], folder: Path, log: Path | None) -> list[Outcome]:
    """Every scenario once, one after the other, on as few clusters as possible. `log`: gets a line of JSON for each."""

    @cache
    def undisturbed(steps: int) -> Undisturbed:
        return Undisturbed.of(folder, f"steps={steps}", "validation=null")

    keeper, outcomes = ClusterKeeper(), []
    try:
        for number, scenario in enumerate(scenarios):
            place = folder / str(number)
            place.mkdir()
            began = time.monotonic()
            try:
                outcome = ScenarioRun(keeper.ready(), scenario, place, f"scenario{number}").carry_out(undisturbed)
            except Exception as error:  # a failure stays recorded
                keeper.close()
                wrong = (f"{type(error).__name__}: {error}",)
                outcome = Outcome(scenario.name, "not carried out", 0, 0, 0, 0, 0.0, time.monotonic() - began, wrong)
            if scenario.fresh_after:
                keeper.close()
            outcome = replace(outcome, load=os.getloadavg()[0])
            outcomes.append(outcome)
            print(time.strftime("%H:%M:%S"), *outcome.cells(), sep=" | ", flush=True)
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    finally:
        keeper.close()
    return outcomes


def read_log(log: Path) -> list[Outcome]:
    """The last outcome of each scenario, in the order of the table."""
    found = [Outcome(**json.loads(line)) for line in log.read_text().splitlines()]
    last = {outcome.name: replace(outcome, wrong=tuple(outcome.wrong)) for outcome in found}
    return [last[scenario.name] for scenario in SCENARIOS if scenario.name in last]


def make_page(outcomes: Sequence[Outcome]) -> str:
    """The results page."""
    kept = sum(not outcome.wrong for outcome in outcomes)
    same = sum(outcome.end == "same weights" for outcome in outcomes)
    run = {outcome.name for outcome in outcomes}
    left_out = "; ".join(scenario.name for scenario in SCENARIOS if scenario.name not in run) or "none"
    body = f"""{kept} of {len(outcomes)} scenarios ended as they must: {same} with the weights and losses of one undisturbed
process and every step told once, the others with an error that says why and what to do. Nothing of a run was left.

Machines: `store` (Ray's control store, no CPUs), `driver` (client and driver, no CPUs), `w1` to `w3` (two CPUs each);
namespaces of one machine, whose packets a user-space forwarder drops, delays and slows. Four workers train a tiny job,
2 stages x 2 replicas; "the last copy" is 4 stages without replicas or mirror. Where a machine that joins is to get seats,
up to eight workers are wanted, and six have a place before. Ray's settings are its defaults.

- *longest stall*: between two steps, from the first to the last.
- *steps again*: executed a second time, after a recovery from the mirror's snapshot.
- *new generations*: changes of the group of workers.
- *load*: the machine's load average of the last minute at the end of the scenario; ?: not noted.

{table(HEADER, [outcome.cells() for outcome in outcomes])}

Scenarios of the table that were not run for this page: {left_out}."""
    return page("A real network under test", "python jobs/bench/namespaces.py --page FILE", body)


def main() -> int:
    """Run the scenarios; 1 if a promise was not kept."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--only", nargs="+", default=[""], help="scenarios whose names have one of these texts, in this order")
    given.add_argument("--page", type=Path, help="where the table is written")
    given.add_argument("--log", type=Path, help="a file that gets a line of JSON for each scenario")
    given.add_argument("--keep", type=Path, help="a folder for the runs, which is kept")
    args = given.parse_args()
    chosen = list(dict.fromkeys(scenario for text in args.only for scenario in SCENARIOS if text in scenario.name))
    with tempfile.TemporaryDirectory(prefix="raypar-namespaces-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = measure(chosen, folder, args.log)
    if args.log is not None:
        outcomes = read_log(args.log)
    print(table(HEADER, [outcome.cells() for outcome in outcomes]))
    if args.page is not None:
        args.page.write_text(make_page(outcomes))
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
