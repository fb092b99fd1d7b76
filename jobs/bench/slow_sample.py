"""One sample takes 25 s to read, once: what a run says and does meanwhile, and that its weights are those of a run without it.

`python jobs/bench/slow_sample.py [--seconds 25] [--layout stages one no-mirror]`: 2 stages x 1 replica with the mirror, a plan
of one worker, 2 stages x 1 replica without the mirror. Prints what `raypar train` prints, then whether the weights are equal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from jobs.bench.tiny_run import TinyRun

LAYOUTS = {
    "stages": ["plan={stages: 2, replicas: 1}", "elastic={min_workers: 1}"],
    "one": ["plan={stages: 1, replicas: 1}", "elastic={min_workers: 1}"],
    "no-mirror": ["plan={stages: 2, replicas: 1}", "elastic={min_workers: 1, mirror: off}"],
}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--layout", choices=LAYOUTS, nargs="*", default=list(LAYOUTS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypar-slow-") as place:
        folder = Path(place)
        print("undisturbed:", flush=True)
        plain = TinyRun(folder, "plain", *LAYOUTS["one"]).finish()
        same = True
        for layout in given.layout:
            print(f"{layout}: one sample takes {given.seconds:g} s", flush=True)
            slow = f"data.args={{slow: {folder / f'slow-{layout}'}, slow_s: {given.seconds}}}"
            found = TinyRun(folder, layout, *LAYOUTS[layout], slow).finish()
            assert (folder / f"slow-{layout}").exists(), "no sample was slow"
            same &= found == plain
            print(f"{layout}: {'the same weights' if found == plain else 'OTHER WEIGHTS'}", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
