"""How many layouts give the bits of one process: runs the parity grid of `tests/parity/` and counts.

`python jobs/bench/parity.py [--json] [--page FILE] [--select EXPRESSION]`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from harness import ROOT, environment, page, table


def run_grid(select: str | None) -> dict[str, Any]:
    """Verdicts by test function: one case of the grid is one layout."""
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        out = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "tests/parity", "-m", "full or not full", f"--junitxml={out}"]
        command += ["-p", "no:cacheprovider", *(["-k", select] if select else [])]
        start = time.monotonic()
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
        seconds = time.monotonic() - start
        cases = list(ElementTree.parse(out).iter("testcase"))
    found: dict[str, Counter[str]] = {}
    failed = []
    for case in cases:
        name = f"{case.get('classname', '').removeprefix('tests.')}.{case.get('name', '').split('[')[0]}"
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found.setdefault(name, Counter())[bad[0] if bad else "equal"] += 1
        if bad:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "seconds": seconds,
        "equal": sum(c["equal"] for c in found.values()),
        "not_equal": len(failed),
        "by_test": {name: dict(counts) for name, counts in sorted(found.items())},
        "failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--select", help="pytest -k expression")
    given = parser.parse_args()
    found = run_grid(given.select)
    rows = [[name, str(c.get("equal", 0)), str(sum(c.values()) - c.get("equal", 0))] for name, c in found["by_test"].items()]
    text = "\n\n".join(
        [
            table(["claim", "layouts that are equal", "not"], rows),
            f"{found['equal']} equal, {found['not_equal']} not, in {found['seconds']:.0f} s."
            + "".join(f"\n- failed: {name}" for name in found["failed"]),
        ]
    )
    print(json.dumps({"environment": environment(), **found}) if given.json else text)
    if given.page:
        given.page.write_text(page("Which layouts give the bits of one process?", "python jobs/bench/parity.py", text))
    sys.exit(1 if found["not_equal"] or not found["equal"] else 0)


if __name__ == "__main__":
    main()
