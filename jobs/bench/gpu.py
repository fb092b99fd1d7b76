"""raypar on one GPU, in one command: NCCL's conformance and parity, groups aborted and formed anew, training, and its parts.

Usage: python jobs/bench/gpu.py [--first-half-hour [--minutes N]] [--page FILE] [--json] [--only PART ...] [--ranks 1 2 4]
                                [--rounds N] [--steps N]

Parts: `conformance` (the suite of all transports), `parity` (plans of several ranks against one process, bit for bit), `norm`
(the kernel of the gradient's norm against the same arithmetic on the processor, bit for bit, and against a plain sum), `loop`
(a model of GPT-2's size with one worker beside plain PyTorch loops, in float32 and bf16: tokens a second, how much of the time
the GPU has nothing to do, kernels), `costs` (norm, batches, seeds and guard by themselves), `offload` (activations in the
host's memory beside all in the GPU's, bit for bit: memory and time), `sums` (values summed over shards),
`reform` (an all-reduce that hangs is aborted, then the same ranks connect again), `kill` (the same, but a rank is killed) and
`ray` (a run on Ray, the only part that needs it, beside one process).

`--first-half-hour` is for the first visit to a machine: each part in a process of its own, what matters most first, with a
deadline for each; the page is written after each part, so that what was measured is kept whatever happens next.

Several ranks share the GPU, each in a process of its own with another NCCL_HOSTID, so that NCCL takes them for machines and
talks over sockets: that shows what is right, not how fast it is. On a machine without a GPU it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_on_ray import on_ray
from gpu_page import QUESTION, good, not_run, told
from gpu_visit import visit
from harness import ROOT, environment, page

sys.path.insert(0, str(ROOT / "tests"))

OF_RANKS = ("conformance", "parity", "sums", "reform", "kill")
"""Parts with several processes on the GPU."""
PARTS = (*OF_RANKS, "norm", "loop", "costs", "offload", "ray")
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
SUMMED = (("float32", (4, 1024, 768)), ("bfloat16", (4, 1024, 768)))
"""Dtype and shape of what is summed over shards: a layer's output in GPT-2 for a microbatch of 4 samples."""


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
        self._begin = ({**WORKER_ENVIRONMENT, **GPU_WORKER_ENVIRONMENT, **SETTINGS}, device)
        self.facts = self.workers.each(gpu_ranks.begin, *self._begin, timeout_s=ANSWER_S)
        self.addresses = [facts["address"] for facts in self.facts]

    def each(self, call: Callable[..., Any], *args: Any) -> list[Any]:
        """Of all at the same time."""
        return self.workers.each(call, *args, timeout_s=ANSWER_S)

    def connect(self) -> list[float]:
        """The next generation, with everything that the cases use; seconds by rank."""
        self.generation += 1
        return self.each(self.calls.connect, self.addresses, self.generation)

    def replace_last(self) -> None:
        """Another process in the place of the last one."""
        last = len(self.addresses) - 1
        self.workers.replace(last)
        self.addresses[last] = self.workers.each(self.calls.begin, *self._begin, on=[last], timeout_s=ANSWER_S)[0]["address"]

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


def sums(ranks: Ranks, rounds: int) -> list[dict[str, Any]]:
    """Values of `SUMMED` summed over all ranks: what rank 0 measures."""
    import torch

    ranks.connect()
    rows = []
    for dtype, shape in SUMMED:
        found = ranks.each(ranks.calls.sums_over_shards, rounds, shape, getattr(torch, dtype))
        rows.append({"value": f"{list(shape)} {dtype}", **found[0]})
    ranks.each(ranks.calls.close)
    return rows


def new_groups(ranks: Ranks, rounds: int, *, kill: bool) -> dict[str, Any]:
    """An all-reduce in which the last rank takes no part is aborted from outside on all; then they connect again. Seconds.

    `kill`: the last rank is killed, the others are told, and another process takes its place."""
    freed, ended, formed, ends, stuck = [], [], [], set(), []
    ranks.connect()
    for _ in range(rounds):
        *waiting, last = ranks.workers.workers
        for index, worker in enumerate(waiting):
            worker.call(ranks.calls.wait_in_vain, index)
        time.sleep(0.5)  # inside
        if kill:
            last.signal(signal.SIGKILL)
        told = waiting if kill else [*waiting, last]
        aborted = [worker.control(ranks.calls.abort, timeout_s=ANSWER_S) for worker in told]
        for worker, (start, _, _) in zip(waiting, aborted, strict=False):
            end, at = worker.result(ANSWER_S)
            ends.add(end)
            freed.append(at - start)
        ended += [seconds for _, seconds, _ in aborted]
        stuck += [name for _, _, names in aborted for name in names]
        if kill:
            ranks.replace_last()
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


def of_gpt2(part: str, given: argparse.Namespace, device: Any = None) -> Any:
    """`loop` (see `gpu_loop.compare`), `costs` (see `gpu_costs.measure`) or `offload` (see `gpu_offload.measure`) with GPT-2's
    sizes, in this process."""
    from raypar.worker.process.gpu_setup import GPU_WORKER_ENVIRONMENT

    os.environ.update(GPU_WORKER_ENVIRONMENT)  # before PyTorch asks for cuBLAS
    import gpu_costs
    import gpu_loop
    import gpu_offload
    import torch
    from models import Workload

    sizes = {key: value for key, value in gpu_loop.GPT2.items() if key != "vocab"}
    work, vocab = Workload(**sizes, batch_size=16), gpu_loop.GPT2["vocab"]
    device = torch.device("cuda", 0) if device is None else device
    if part == "loop":
        return gpu_loop.compare(work, vocab, 4, given.rounds, given.steps, device)
    if part == "offload":
        return gpu_offload.measure(work, 4, given.steps, device)
    return gpu_costs.measure(work, vocab, 4, given.rounds, device)


def norm() -> Any:
    """See `gpu_norm.measure`."""
    import gpu_norm
    import torch

    return gpu_norm.measure(torch.device("cuda", 0))


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-half-hour", action="store_true", help="all that a first visit wants to know, in its order")
    parser.add_argument("--minutes", type=float, default=30.0, help="of a first visit, at most")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--ranks", nargs="+", type=int, choices=sorted(PLANS), default=sorted(PLANS), metavar="N")
    parser.add_argument("--rounds", type=int, default=10, help="of new groups, sums, parts, and of training in turns")
    parser.add_argument("--steps", type=int, default=5, help="of training, in each turn")
    parser.add_argument("--device", default=DEVICE, help="module:name of what opens the device; tests give a stand-in's")
    return parser


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """All parts asked for; ranks are ended whatever happens."""
    found: dict[str, Any] = {}
    grouped = [part for part in OF_RANKS if part in given.only]
    for count in given.ranks if grouped else ():
        ranks = Ranks(count, given.device)
        try:
            found["device"], found["library"] = ranks.facts[0]["device"], ranks.facts[0]["library"]
            for part in grouped:
                if part in ("conformance", "parity") or count > 1:
                    found.setdefault(part, {})[count] = _of_ranks(part, ranks, given.rounds)
        finally:
            ranks.end()
    if "norm" in given.only:
        found["norm"] = norm()
    for part in ("loop", "costs", "offload"):
        if part in given.only:
            found[part] = of_gpt2(part, given)
    if "ray" in given.only:
        found["ray"] = on_ray()
    return found


def _of_ranks(part: str, ranks: Ranks, rounds: int) -> Any:
    match part:
        case "conformance":
            return conformance(ranks)
        case "parity":
            return parity(ranks, len(ranks.addresses))
        case "sums":
            return sums(ranks, rounds)
    return new_groups(ranks, rounds, kill=part == "kill")


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 0 all is right, 1 something is wrong, 2 there is no GPU."""
    words = sys.argv[1:] if words is None else words
    given = arguments().parse_args(words)
    command = "python jobs/bench/gpu.py " + " ".join(words)
    why = lacking() if given.device == DEVICE else ""
    if why:
        print(f"error: this machine cannot run the GPU bench: {why}", file=sys.stderr)
        if given.page:
            given.page.write_text(not_run(why, command.strip()))
        return 2
    found = visit(given.minutes, given.device, given.page, command) if given.first_half_hour else measure(given)
    print(json.dumps({"environment": environment(), **found}) if given.json else told(found))
    if given.page:
        given.page.write_text(page(QUESTION, command.strip(), told(found)))
    return 0 if good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
