"""The page of the GPU bench: one section for each part that was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import table

QUESTION = "What does raypar do on a GPU?"
RESULTS = Path(__file__).parent / "results"
WORST = 1e-12
"""How far a piece's squares may be from a plain sum in float64, beside its size."""


def told(found: Mapping[str, Any]) -> str:
    """Everything measured, as the body of a results page. `found`: part -> what was measured, by number of ranks where there
    are several; beside them the device, its libraries, and what went wrong."""
    sections = [f"{found['device']}; {found['library']}."] if found.get("device") else []
    sections += [tell(found[part]) for part, tell in SECTIONS.items() if part in found]
    if found.get("failures"):
        sections.append(
            "## What failed\n\n" + "\n".join(f"- {what}:\n\n```\n{why}\n```" for what, why in found["failures"].items())
        )
    return "\n\n".join(sections)


def _conformance(by_ranks: Mapping[Any, list[dict[str, Any]]]) -> str:
    rows, wrong = [], []
    for count, cases in by_ranks.items():
        bad = [case for case in cases if case["wrong"]]
        rows.append([str(count), str(len(cases)), str(len(cases) - len(bad))])
        wrong += [f"- {count} ranks, {case['case']}: {case['wrong']}" for case in bad]
    text = "## Conformance\n\n" + table(["ranks", "cases", "passed"], rows)
    return text + ("\n\n" + "\n".join(wrong) if wrong else "")


def _parity(by_ranks: Mapping[Any, list[dict[str, Any]]]) -> str:
    rows = [
        [str(count), row["plan"], row["schedule"], f"{row['parameters'] - len(row['other'])} of {row['parameters']}"]
        for count, plans in by_ranks.items()
        for row in plans
    ]
    header = ["ranks", "plan", "schedule", "parameters equal to one process's, bit for bit"]
    return "## Parity\n\n" + table(header, rows)


def _norm(found: list[dict[str, Any]]) -> str:
    rows = [
        [
            row["dtype"],
            str(row["offset"]),
            "yes" if row["kernel"] else "NO",
            f"{row['equal']} of {row['pieces']}",
            f"{row['worst']:.1e}",
        ]
        for row in found
    ]
    header = [
        "dtype",
        "elements behind an aligned address",
        "by the kernel",
        "pieces equal to the processor's, bit for bit",
        "from a plain sum",
    ]
    return "## The gradient's norm\n\n" + table(header, rows)


def norm_is_right(rows: list[dict[str, Any]]) -> bool:
    """Whether the kernel was used, and computed what it should."""
    return all(row["kernel"] and row["equal"] == row["pieces"] and row["worst"] <= WORST for row in rows)


def _new_groups(title: str, by_ranks: Mapping[Any, dict[str, Any]]) -> str:
    rows = []
    for count, found in by_ranks.items():
        cells = [f"{statistics.median(found[key]):.3f} ({max(found[key]):.3f})" for key in ("freed_s", "ended_s", "formed_s")]
        rows.append([str(count), str(found["communicators"]), *cells, ", ".join(found["ends"]), str(len(found["stuck"]))])
    header = [
        "ranks", "communicators of rank 0", "waiting call is free, s", "NCCL has ended all, s", "formed anew, s",
        "the call ends with", "stuck",
    ]  # fmt: skip
    return f"## {title}\n\nMedian (worst).\n\n" + table(header, rows)


def _reform(by_ranks: Mapping[Any, dict[str, Any]]) -> str:
    return _new_groups("Abort and new group", by_ranks)


def _kill(by_ranks: Mapping[Any, dict[str, Any]]) -> str:
    return _new_groups("A rank killed (SIGKILL), abort and new group", by_ranks)


def _sums(by_ranks: Mapping[Any, list[dict[str, Any]]]) -> str:
    rows = [
        [str(count), row["value"], *(f"{row[key]:,.0f}" for key in ("posted", "free", "there"))]
        for count, values in by_ranks.items()
        for row in values
    ]
    header = ["ranks", "value", "posted, us", "the host goes on, us", "the sum is there, us"]
    return "## Sums over shards\n\nMedians of rank 0; over sockets on one machine.\n\n" + table(header, rows)


def _costs(found: list[dict[str, Any]]) -> str:
    rows = []
    for row in found:
        plain = [f"{us:,.0f}" for us in row["plain"]] if "plain" in row else ["-", "-"]
        rows.append([row["name"], row["times"], *(f"{us:,.0f}" for us in row["ours"]), *plain])
    header = ["", "a step has it", "raypar: host, us", "device done, us", "plain loop: host, us", "device done, us"]
    return "## Parts of a step by themselves\n\nMedians.\n\n" + table(header, rows)


def _loop(found: dict[str, Any]) -> str:
    rows = []
    for row in found["rows"]:
        median, low, high = row["tokens_s"]
        trace = row["trace"]
        told = ["not traced"] * 3
        if trace is not None:
            told = [f"{100 * trace['idle']:.1f} %", f"{trace['kernels']:,.0f}", f"{trace['copies']:,.0f}"]
        rows.append([row["name"], f"{median:,.0f}", f"{low:,.0f} to {high:,.0f}", *told])
    said = [
        f"- {how['ours']}: {how['median']:.3f} times as fast as {how['beside']} (95 % interval {how['lower']:.3f} to "
        f"{how['upper']:.3f}, {how['pairs']} pairs)"
        for how in found["ratios"]
    ]
    header = ["", "tokens/s", "quartiles", "GPU idle", "kernels a step", "copies and fills a step"]
    return f"## Training\n\n{found['tokens_a_step']:,} tokens a step.\n\n" + table(header, rows) + "\n\n" + "\n".join(said)


def _offload(found: list[dict[str, Any]]) -> str:
    rows = []
    for row in found:
        mib = [f"{row[key] / 2**20:,.0f}" for key in ("gpu_bytes", "place_bytes")]
        rows.append([row["place"], row["weights"][:12], *mib, f"{row['seconds']:.3f}"])
    header = ["activations in", "weights", "most memory of the GPU, MiB", "of that place, MiB", "a step, s"]
    return "## Activations out of the GPU's memory\n\n" + table(header, rows)


def offloading_is_right(rows: list[dict[str, Any]]) -> bool:
    """Whether the weights are the same wherever activations lie."""
    return len({row["weights"] for row in rows}) <= 1


def _ray(found: dict[str, Any]) -> str:
    equal = "equal" if found["run"] == found["one_process"] else "NOT equal"
    return (
        f"## A run on Ray\n\n`{found['command']}`: {found['seconds']:.0f} s, weights {found['run'][:12]}, {equal} to one "
        f"process's on this GPU ({found['one_process'][:12]})."
    )


SECTIONS: Mapping[str, Callable[[Any], str]] = {
    "conformance": _conformance,
    "parity": _parity,
    "norm": _norm,
    "loop": _loop,
    "costs": _costs,
    "offload": _offload,
    "sums": _sums,
    "reform": _reform,
    "kill": _kill,
    "ray": _ray,
}
"""Part -> what is told of it, in the order of the page."""


def not_run(why: str, command: str) -> str:
    """The page of a machine without a GPU."""
    budget = max(RESULTS.glob("operation_budget_*.md")).name
    return (
        f"# {QUESTION}\n\n**Not run.** {why}\n\nWhat is known without one: how many operations, reads and waits a step asks of "
        f"a device beside a plain loop's, as integers; and what steps of both would take on an H100, predicted by stated "
        f"assumptions (`jobs/bench/results/{budget}`). How long they take nobody has measured."
        "\n\nOn a machine with a GPU, from the root of a clone with raypar and CuPy "
        f"installed (`pip install -e '.[test]'`):\n\n```\n{command}\n```\n"
    )


def good(found: Mapping[str, Any]) -> bool:
    """Whether everything that is right or wrong is right."""
    cases = [case for cases in found.get("conformance", {}).values() for case in cases]
    plans = [row for rows in found.get("parity", {}).values() for row in rows]
    groups = [*found.get("reform", {}).values(), *found.get("kill", {}).values()]
    ray = found.get("ray")
    return not (
        found.get("failures")
        or any(c["wrong"] for c in cases)
        or any(p["other"] for p in plans)
        or not norm_is_right(found.get("norm", []))
        or not offloading_is_right(found.get("offload", []))
        or any(g["stuck"] for g in groups)
        or (ray is not None and ray["run"] != ray["one_process"])
    )
