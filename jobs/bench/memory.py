"""Memory and time of replicas that divide state (ZeRO), beside the peers': the same GPT, two processes, alternating in one run.

`python jobs/bench/memory.py [--json] [--page FILE] [--rounds 12] [--steps 2]`
DDP, DDP with ZeroRedundancyOptimizer, FSDP2 with parameters kept and resharded, and raypar's workers at the levels of
`plan.zero`. Memory is that of a process above what it had before the model was made, in multiples of the parameters; raypar's
sheet is beside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from harness import Contender, alternate, page, ratio, spread, table, torchrun_command
from peers import raypar

WORK = {"depth": 7, "width": 384, "heads": 6, "context": 64, "batch_size": 8}
"""12.9 million parameters, and few samples: state is most of the memory."""
MICROBATCHES, WORLD, LEVELS = 4, 2, (0, 1, 2)


def peer(name: str, kind: str, **options: Any) -> Contender:
    """One of PyTorch's ways, under torchrun."""
    given = {"work": WORK, "microbatches": MICROBATCHES, **options}
    return Contender(name, WORLD, lambda address: [torchrun_command(kind, address, WORLD, **given)])


def contenders() -> list[Contender]:
    """All that run side by side."""
    return [
        peer("DDP", "ddp"),
        peer("ZeroRedundancyOptimizer", "zero-redundancy"),
        peer("FSDP2, kept", "fsdp2", reshard=False),
        peer("FSDP2, resharded", "fsdp2", reshard=True),
        *(raypar(f"zero {level}", MICROBATCHES, replicas=WORLD, zero=level, work=WORK) for level in LEVELS),
    ]


def predicted() -> tuple[int, dict[str, int]]:
    """(bytes of the parameters, contender -> bytes that the sheet says of its largest worker)."""
    import ours

    from raypar.planner.memory_sheet import memory_sheets
    from raypar.worker.layer_graph_of_job import make_layer_graph
    from raypar.worker.measure_profile import profile_job

    found, parameters = {}, 0
    for level in LEVELS:
        spec, plan, schedule = ours.job_and_plan(MICROBATCHES, replicas=WORLD, zero=level, work=WORK)
        profile = profile_job(spec, workers=WORLD, graph=make_layer_graph(spec))
        sheets = memory_sheets(profile, plan, schedule, spec.batching)
        found[f"raypar zero {level}"] = max(sheet.total for sheet in sheets)
        parameters = sheets[0].state["parameter"]
    return parameters, found


CLAIMS = (("raypar zero 0", "raypar zero 1", 0.97), ("ZeroRedundancyOptimizer", "raypar zero 1", 1.0))
"""(base, own, how many times as fast own shall be at least)."""
MEMORY_CLAIMS = (("DDP", "raypar zero 0"), ("ZeroRedundancyOptimizer", "raypar zero 1"))
"""(base, own): own shall take no more resident memory."""


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Seconds a step, and bytes above the start, of each."""
    started: list[Contender] = []
    try:
        for contender in contenders():
            print(f"starting {contender.name}", file=sys.stderr, flush=True)
            started.append(contender)
            contender.start()
        seconds = alternate(started, rounds=rounds, steps=steps, say=lambda text: print(text, file=sys.stderr, flush=True))
        facts = {one.name: one.info() for one in started}
    finally:
        for contender in started:
            contender.stop()
    return {
        "seconds": seconds,
        "rss_bytes": {name: max(i["rss_bytes"] - i["begun_bytes"] for i in of) for name, of in facts.items()},
        "peak_bytes": {name: max(i["peak_rss_bytes"][0] - i["begun_bytes"] for i in of) for name, of in facts.items()},
    }


def tables(found: dict[str, Any]) -> str:
    """What was measured, for people."""
    rows = []
    for name, values in found["seconds"].items():
        median, (low, high) = statistics.median(values), spread(values)
        sheet = f"{found['sheet'][name] / found['parameters']:.2f}" if name in found["sheet"] else ""
        memory = [f"{found[kind][name] / found['parameters']:.2f}" for kind in ("rss_bytes", "peak_bytes")]
        rows.append([name, sheet, *memory, f"{1e3 * median:.1f}", f"{1e3 * low:.1f} to {1e3 * high:.1f}"])
    ratios = []
    for base, own, bound in CLAIMS:
        r = ratio(found["seconds"][base], found["seconds"][own])
        ratios.append([own, base, f"{r.median:.3f}", f"{r.lower:.3f}", f"{bound:.2f}", "yes" if r.lower >= bound else "NO"])
    first = table(["contender", "sheet", "resident", "peak", "step ms", "quartiles"], rows)
    second = table(["raypar", "beside", "times as fast", "95 % lower bound", "wanted", "holds"], ratios)
    held = [
        [own, base, *(f"{found['rss_bytes'][name] / found['parameters']:.2f}" for name in (own, base))]
        + ["yes" if found["rss_bytes"][own] <= found["rss_bytes"][base] else "NO"]
        for base, own in MEMORY_CLAIMS
    ]
    third = table(["raypar", "beside", "resident", "the other's", "no more"], held)
    return f"{first}\n\n{second}\n\n{third}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender in a round")
    given = parser.parse_args()
    parameters, sheet = predicted()
    found = {"parameters": parameters, "sheet": sheet, **measure(given.rounds, given.steps)}
    print(json.dumps(found) if given.json else tables(found))
    if given.page:
        command = "python jobs/bench/memory.py " + " ".join(a for a in sys.argv[1:] if a != "--json")
        note = (
            f"A GPT of {parameters // 4:,} parameters, float32, AdamW with clipping, two processes with one thread each on one "
            "machine; raypar without a mirror. Memory is resident memory above that before the model was made, now and at its "
            "peak, in multiples of the parameters' bytes. A round runs every contender once."
        )
        given.page.write_text(page("Memory of replicas that divide state", command, f"{note}\n\n{tables(found)}"))


if __name__ == "__main__":
    main()
