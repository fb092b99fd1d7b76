"""Memory and time of replicas that divide state (ZeRO), beside the peers': the same GPT, two processes, alternating in one run.

`python jobs/bench/memory.py [--json] [--page FILE] [--rounds 12] [--steps 2]`
DDP, DDP with ZeroRedundancyOptimizer, FSDP2 with parameters kept and resharded, and raypar's workers at the levels of
`plan.zero` (`zero_peers.py`). Memory is that of a process above what it had before the model was made, in multiples of the
parameters; raypar's sheet is beside, kind by kind too, and with the mirror, which these workers have not. `peers.py --zero` has
the times, on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from harness import page, ratio, table
from side_by_side import bench_parser, command_line, ms_cells, train_in_turn
from zero_peers import OWN, WORK, WORLD, claims, contenders, left_out

MICROBATCHES = 4


def predicted() -> dict[str, Any]:
    """What the sheet says of the largest worker of each plan, and of it with the mirror; bytes of the parameters."""
    import ours

    from raypar.planner.memory_sheet import memory_sheets
    from raypar.worker.layer_graph_of_job import make_layer_graph
    from raypar.worker.measure_profile import profile_job

    kinds, mirrored = {}, {}
    spec, *_ = ours.job_and_plan(MICROBATCHES, replicas=WORLD, work=WORK)
    profile = profile_job(spec, workers=WORLD, graph=make_layer_graph(spec))
    for name, options in OWN.items():
        _, plan, schedule = ours.job_and_plan(MICROBATCHES, replicas=WORLD, work=WORK, **options)
        largest = max(memory_sheets(profile, plan, schedule, spec.batching), key=lambda sheet: sheet.total)
        with_mirror = memory_sheets(replace(profile, mirror="memory"), plan, schedule, spec.batching)
        kinds[f"raypar {name}"] = largest.by_kind
        mirrored[f"raypar {name}"] = max(sheet.total for sheet in with_mirror)
    return {
        "parameters": kinds["raypar zero 0"]["parameter"],
        "sheet": {name: sum(of.values()) for name, of in kinds.items()},
        "predicted_kinds": kinds,
        "sheet_with_mirror": mirrored,
    }


MEMORY_CLAIMS = (
    ("DDP", "raypar zero 0", 1.0),
    ("ZeroRedundancyOptimizer", "raypar zero 1", 1.0),
    ("FSDP2, resharded", "raypar zero 3", 0.6),
    ("FSDP2, resharded", "raypar zero 3, by layer", 0.6),
)
"""(base, own, how many times the base's resident memory own shall take at most); those count whose contenders run."""


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step, and bytes above the start, of each."""
    seconds, facts = train_in_turn(contenders(MICROBATCHES), given)
    largest = {name: max(of, key=lambda i: i["rss_bytes"] - i["begun_bytes"]) for name, of in facts.items()}
    return {
        "seconds": seconds,
        "rss_bytes": {name: one["rss_bytes"] - one["begun_bytes"] for name, one in largest.items()},
        "peak_bytes": {name: max(i["peak_rss_bytes"][0] - i["begun_bytes"] for i in of) for name, of in facts.items()},
        "held_kinds": {name: one["memory"] for name, one in largest.items() if "memory" in one},
    }


def tables(found: dict[str, Any]) -> str:
    """What was measured, for people."""

    def times(nbytes: int | None) -> str:
        return "" if nbytes is None else f"{nbytes / found['parameters']:.2f}"

    rows = []
    for name, values in found["seconds"].items():
        predicted = [times(found[kind].get(name)) for kind in ("sheet", "sheet_with_mirror")]
        memory = [times(found[kind][name]) for kind in ("rss_bytes", "peak_bytes")]
        rows.append([name, *predicted, *memory, *ms_cells(values)])
    ratios = []
    for base, own, bound in claims(found["seconds"]):
        r = ratio(found["seconds"][base], found["seconds"][own])
        ratios.append([own, base, f"{r.median:.3f}", f"{r.lower:.3f}", f"{bound:.2f}", "yes" if r.lower >= bound else "NO"])
    held = []
    for base, own, most in MEMORY_CLAIMS:
        if own in found["rss_bytes"] and base in found["rss_bytes"]:
            ours, theirs = found["rss_bytes"][own], found["rss_bytes"][base]
            held.append([own, base, times(ours), times(theirs), f"{most:.2f}", "yes" if ours <= most * theirs else "NO"])
    first = ["contender", "sheet", "with the mirror", "resident", "peak", "step ms", "quartiles"]
    second = ["raypar", "beside", "times as fast", "95 % lower bound", "wanted", "holds"]
    third = ["raypar", "beside", "resident", "the other's", "at most, of it", "holds"]
    return "\n\n".join([table(first, rows), table(third, held), kinds_table(found), table(second, ratios)])


def kinds_table(found: dict[str, Any]) -> str:
    """What each level's largest worker is predicted to hold, kind by kind, and what its tensors take between two steps."""
    predicted, measured = found["predicted_kinds"], found["held_kinds"]
    kinds = [kind for kind in predicted["raypar zero 0"] if any(of.get(kind) for of in predicted.values())]
    rows = []
    for name, of in predicted.items():
        here = measured.get(name, {})
        above = found["rss_bytes"].get(name)
        rows.append([name, *(f"{of.get(kind, 0) / 2**20:.1f}" for kind in kinds), f"{sum(of.values()) / 2**20:.1f}"])
        held = (f"{here[kind] / 2**20:.1f}" if kind in here else "" for kind in kinds)
        rows.append(["measured", *held, "" if above is None else f"{above / 2**20:.1f}"])
    return table(["MiB", *kinds, "in all"], rows)


def main() -> None:
    given = bench_parser(__doc__, rounds=12, steps=2).parse_args()
    found = {**predicted(), **measure(given)}
    print(json.dumps(found) if given.json else tables(found))
    if given.page:
        note = (
            f"A GPT of {found['parameters'] // 4:,} parameters, float32, AdamW with clipping, two processes with one thread "
            "each on one machine; raypar without a mirror. Memory is resident memory above that before the model was made, now "
            "and at its peak, in multiples of the parameters' bytes. In the table of kinds `measured` is what tensors take "
            "between two steps (of gathered parameters that come for each use: inside one, at most), and, in all, the resident "
            f"memory. A round runs every contender once. {left_out()}"
        )
        given.page.write_text(page("Memory of replicas that divide state", command_line(), f"{note}\n\n{tables(found)}"))


if __name__ == "__main__":
    main()
