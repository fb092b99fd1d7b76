"""The schedule validator against a brute-force search of all reachable states.

`python jobs/bench/validator.py [--json] [--page FILE] [--mutations 2000] [--seed 2]`: every built-in schedule with p <= 4,
m <= 6, v <= 2, and random mutations of valid programs; both judges must agree on each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from harness import ROOT, environment, page, table

sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "unit"))

from helpers.brute_force import good
from test_schedule_validity import case, compare

from raypar.schedule import registry
from raypar.schedule.lower import lower_schedule
from raypar.schedule.validate import find_schedule_problems


def built_in() -> list[dict[str, Any]]:
    """One row a schedule: cases, each searched whole, and how many verdicts are equal."""
    rows = []
    for name in registry.NAMES:
        row = {"schedule": name, "cases": 0, "equal": 0}
        for pp, microbatches in product(range(1, 5), range(1, 7)):
            for chunks in (1, 2) if name == "interleaved" else (None,):
                schedule, routing, crossing = case(name, pp, microbatches, chunks)
                programs = lower_schedule(schedule, routing, crossing)
                verdict = good(programs, routing, crossing)
                row["cases"] += 1
                row["equal"] += verdict == (not find_schedule_problems(programs, routing, crossing))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=2)
    given = parser.parse_args()
    start = time.monotonic()
    rows = built_in()
    disagreement = ""
    verdicts = {True: 0, False: 0}
    try:
        verdicts = compare(given.mutations, given.seed)
    except AssertionError as error:
        disagreement = str(error)
    seconds = time.monotonic() - start
    cells = [[str(row[key]) for key in ("schedule", "cases", "equal")] for row in rows]
    text = "\n\n".join(
        [
            table(["schedule", "cases, all states searched", "equal verdicts"], cells),
            f"Mutations: the two disagree on {disagreement}"
            if disagreement
            else f"{given.mutations} random mutations: all verdicts are equal ({verdicts[True]} good, {verdicts[False]} bad).",
            f"{seconds:.0f} s.",
        ]
    )
    summary = {
        "built_in": rows,
        "mutations": given.mutations,
        "good": verdicts[True],
        "bad": verdicts[False],
        "disagreement": disagreement,
        "seconds": seconds,
    }
    print(json.dumps({"environment": environment(), **summary}) if given.json else text)
    if given.page:
        command = f"python jobs/bench/validator.py --mutations {given.mutations} --seed {given.seed}"
        given.page.write_text(page("Does the validator agree with brute force?", command, text))
    sys.exit(1 if disagreement or any(row["equal"] != row["cases"] for row in rows) else 0)


if __name__ == "__main__":
    main()
