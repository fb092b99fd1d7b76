"""raypar on one GPU, in one command: NCCL's conformance and parity, how fast a group is aborted and formed anew, and training.

Usage: python jobs/bench/gpu.py [--page FILE] [--json] [--only PART ...] [--ranks 1 2 4] [--rounds N] [--steps N]

Parts: `conformance` (the suite of all transports), `parity` (plans of several ranks against one process, bit for bit), `reform`
(an all-reduce that hangs is aborted, then the same ranks connect again), `loop` (a model of GPT-2's size with one worker beside
the plain PyTorch loop: tokens a second, and how much of the time the GPU has nothing to do).

Several ranks share the GPU, each in a process of its own with another NCCL_HOSTID, so that NCCL takes them for machines and
talks over sockets: that shows what is right, not how fast it is. On a machine without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import ROOT, environment, page, table

sys.path.insert(0, str(ROOT / "tests"))

PARTS = ("conformance", "parity", "reform", "loop")
QUESTION = "What does raypar do on a GPU?"
DEVICE = "raypar.comm.nccl.device:CudaDevice"
SETTINGS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
"""Of every rank's process, beside what every worker on a GPU has and its own NCCL_HOSTID."""
ANSWER_S = 240.0
PLANS = {
    1: [((1,), "1f1b")],
    2: [((2,), "1f1b"), ((1, 1), "zb-h1")],
    4: [((2, 2), "1f1b"), ((4,), "gpipe"), ((1, 2, 1), "1f1b")],
}
"""Ranks -> replicas by stage, and schedule."""


def lacking() -> str:
    """What this machine lacks, in a sentence; nothing if it has a GPU, and NCCL for it."""
    import torch

    from raypar.comm.nccl.device import CudaDevice
    from raypar.errors import RayparError

    if not torch.cuda.is_available():
        built = f"was built for CUDA {torch.version.cuda}" if torch.version.cuda else "was built without CUDA"
        return f"PyTorch {torch.__version__} sees no GPU here (it {built})."
    try:
        CudaDevice()
    except RayparError as error:
        return f"{error.what}. {error.cure[:1].upper()}{error.cure[1:]}."
    return ""


class Ranks:
    """So many processes on the GPU."""

    def __init__(self, count: int, device: str = DEVICE) -> None:
        import gpu_ranks
        from helpers.processes import Workers

        from raypar.comm.nccl.device import WORKER_ENVIRONMENT
        from raypar.worker.process.gpu_setup import GPU_WORKER_ENVIRONMENT

        self.calls = gpu_ranks
        self.workers = Workers(count)
        self.generation = 0
        settings = {**WORKER_ENVIRONMENT, **GPU_WORKER_ENVIRONMENT, **SETTINGS}
        self.facts = self.workers.each(gpu_ranks.begin, settings, device, timeout_s=ANSWER_S)
        self.addresses = [facts["address"] for facts in self.facts]

    def each(self, call: Callable[..., Any], *args: Any) -> list[Any]:
        """Of all at the same time."""
        return self.workers.each(call, *args, timeout_s=ANSWER_S)

    def connect(self) -> list[float]:
        """The next generation, with everything that the cases use; seconds by rank."""
        self.generation += 1
        return self.each(self.calls.connect, self.addresses, self.generation)

    def end(self) -> None:
        """All processes."""
        self.workers.end()


def conformance(ranks: Ranks) -> list[dict[str, Any]]:
    """Every case; what went wrong on the first rank where anything did. A generation lasts until something does."""
    from helpers.transport_cases import CASES

    rows, wrong = [], ["at the beginning"]
    for name in CASES:
        if wrong:
            ranks.connect()
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(ranks.each(ranks.calls.case, name)) if text]
        rows.append({"case": name, "wrong": wrong[0] if wrong else ""})
    ranks.each(ranks.calls.close)
    return rows


def parity(ranks: Ranks, count: int) -> list[dict[str, Any]]:
    """Plans of so many ranks beside one process on the same GPU: parameters that are not equal."""
    from gpu_ranks import SMALL

    from raypar.plan import ParallelPlan

    ranks.workers.workers[0].call(ranks.calls.reference, 0)
    want = ranks.workers.workers[0].result(ANSWER_S)
    rows = []
    for replicas, schedule in PLANS.get(count, []):
        plan = ParallelPlan.of(replicas, layers=SMALL.depth + 2)
        ranks.generation += 1
        found = ranks.each(ranks.calls.train, plan, schedule, ranks.addresses, ranks.generation)
        other = sorted({name for held in found for name, digest in held.items() if digest != want[name]})
        rows.append({"plan": plan.describe(), "schedule": schedule, "parameters": len(want), "other": other})
    return rows


def reform(ranks: Ranks, rounds: int) -> dict[str, Any]:
    """An all-reduce in which the last rank takes no part is aborted from outside on all; then they connect again. Seconds."""
    freed, ended, formed, ends, stuck = [], [], [], set(), []
    ranks.connect()
    for _ in range(rounds):
        waiting = ranks.workers.workers[:-1]
        for index, worker in enumerate(waiting):
            worker.call(ranks.calls.wait_in_vain, index)
        time.sleep(0.5)  # inside
        aborted = [worker.control(ranks.calls.abort, timeout_s=ANSWER_S) for worker in ranks.workers.workers]
        for worker, (start, _, _) in zip(waiting, aborted, strict=False):
            end, at = worker.result(ANSWER_S)
            ends.add(end)
            freed.append(at - start)
        ended += [seconds for _, seconds, _ in aborted]
        stuck += [name for _, _, names in aborted for name in names]
        formed.append(max(ranks.connect()))
    made = len([key for key in _communicators(len(ranks.addresses)) if 0 in key.members])
    return {
        "freed_s": freed,
        "ended_s": ended,
        "formed_s": formed,
        "ends": sorted(ends),
        "stuck": stuck,
        "communicators": made,
    }


def _communicators(size: int) -> Sequence[Any]:
    from helpers.standin import all_communicators

    return all_communicators(size)


def loop(rounds: int, steps: int, device: Any = None) -> dict[str, Any]:
    """See `gpu_loop.compare`, with GPT-2's sizes."""
    import torch
    from gpu_loop import GPT2, compare
    from models import Workload

    sizes = {key: value for key, value in GPT2.items() if key != "vocab"}
    work = Workload(**sizes, batch_size=16)
    return compare(work, GPT2["vocab"], 4, rounds, steps, torch.device("cuda", 0) if device is None else device)


# -- telling


def told(found: dict[str, Any]) -> str:
    """Everything measured, as the body of a results page."""
    sections = [f"{found['device']}; {found['library']}."] if found.get("device") else []
    for part, tell in (("conformance", _conformance), ("parity", _parity), ("reform", _reform), ("loop", _loop)):
        if part in found:
            sections.append(tell(found[part]))
    return "\n\n".join(sections)


def _conformance(by_ranks: dict[int, list[dict[str, Any]]]) -> str:
    rows, wrong = [], []
    for count, cases in by_ranks.items():
        bad = [case for case in cases if case["wrong"]]
        rows.append([str(count), str(len(cases)), str(len(cases) - len(bad))])
        wrong += [f"- {count} ranks, {case['case']}: {case['wrong']}" for case in bad]
    text = "## Conformance\n\n" + table(["ranks", "cases", "passed"], rows)
    return text + ("\n\n" + "\n".join(wrong) if wrong else "")


def _parity(by_ranks: dict[int, list[dict[str, Any]]]) -> str:
    rows = [
        [str(count), row["plan"], row["schedule"], f"{row['parameters'] - len(row['other'])} of {row['parameters']}"]
        for count, plans in by_ranks.items()
        for row in plans
    ]
    header = ["ranks", "plan", "schedule", "parameters equal to one process's, bit for bit"]
    return "## Parity\n\n" + table(header, rows)


def _reform(by_ranks: dict[int, dict[str, Any]]) -> str:
    rows = []
    for count, found in by_ranks.items():
        cells = [f"{statistics.median(found[key]):.3f} ({max(found[key]):.3f})" for key in ("freed_s", "ended_s", "formed_s")]
        rows.append([str(count), str(found["communicators"]), *cells, ", ".join(found["ends"]), str(len(found["stuck"]))])
    header = [
        "ranks", "communicators of rank 0", "waiting call is free, s", "NCCL has ended all, s", "formed anew, s",
        "the call ends with", "stuck",
    ]  # fmt: skip
    return "## Abort and new group\n\nMedian (worst).\n\n" + table(header, rows)


def _loop(found: dict[str, Any]) -> str:
    rows = []
    for row in found["rows"]:
        median, low, high = row["tokens_s"]
        idle = "not traced" if row["idle"] is None else f"{100 * row['idle']:.1f} %"
        rows.append([row["name"], f"{median:,.0f}", f"{low:,.0f} to {high:,.0f}", idle])
    how = found["ratio"]
    said = (
        f"raypar is {how['median']:.3f} times as fast as the plain loop (95 % interval {how['lower']:.3f} to "
        f"{how['upper']:.3f}, {how['pairs']} pairs); {found['tokens_a_step']:,} tokens a step, float32."
    )
    return "## Training\n\n" + table(["", "tokens/s", "quartiles", "GPU idle"], rows) + "\n\n" + said


def not_run(why: str, command: str) -> str:
    """The page of a machine without a GPU."""
    return (
        f"# {QUESTION}\n\n**Not run.** {why}\n\nOn a machine with a GPU, from the root of a clone with raypar and CuPy "
        f"installed (`pip install -e '.[test]'`):\n\n```\n{command}\n```\n"
    )


def good(found: dict[str, Any]) -> bool:
    """Whether everything that is right or wrong is right."""
    cases = [case for cases in found.get("conformance", {}).values() for case in cases]
    plans = [row for rows in found.get("parity", {}).values() for row in rows]
    groups = found.get("reform", {}).values()
    return not (any(c["wrong"] for c in cases) or any(p["other"] for p in plans) or any(g["stuck"] for g in groups))


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--ranks", nargs="+", type=int, choices=sorted(PLANS), default=sorted(PLANS), metavar="N")
    parser.add_argument("--rounds", type=int, default=10, help="of abort and new group, and of training in turns")
    parser.add_argument("--steps", type=int, default=5, help="of training, in each turn")
    return parser


def measure(given: argparse.Namespace, device: str = DEVICE) -> dict[str, Any]:
    """All parts asked for; ranks are ended whatever happens."""
    found: dict[str, Any] = {}
    grouped = [part for part in ("conformance", "parity", "reform") if part in given.only]
    for count in given.ranks if grouped else ():
        ranks = Ranks(count, device)
        try:
            found["device"], found["library"] = ranks.facts[0]["device"], ranks.facts[0]["library"]
            if "conformance" in grouped:
                found.setdefault("conformance", {})[count] = conformance(ranks)
            if "parity" in grouped:
                found.setdefault("parity", {})[count] = parity(ranks, count)
            if "reform" in grouped and count > 1:
                found.setdefault("reform", {})[count] = reform(ranks, given.rounds)
        finally:
            ranks.end()
    if "loop" in given.only:
        found["loop"] = loop(given.rounds, given.steps)
        found["loop"]["ratio"] = asdict(found["loop"]["ratio"])
    return found


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 0 all is right, 1 something is wrong, 2 there is no GPU."""
    given = arguments().parse_args(words)
    command = "python jobs/bench/gpu.py " + " ".join(sys.argv[1:] if words is None else words)
    why = lacking()
    if why:
        print(f"error: this machine cannot run the GPU bench: {why}", file=sys.stderr)
        if given.page:
            given.page.write_text(not_run(why, command.strip()))
        return 2
    found = measure(given)
    print(json.dumps({"environment": environment(), **found}) if given.json else told(found))
    if given.page:
        given.page.write_text(page(QUESTION, command.strip(), told(found)))
    return 0 if good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
