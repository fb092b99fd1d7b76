"""raypar beside its peers: the same GPT, batch, optimizer and threads (one a process), alternating in one run.

`python jobs/bench/peers.py [--json] [--page FILE] [--rounds 24] [--steps 4] [--microbatches 4 8] [--ray] [--only TEXT ...]
[--old CHECKOUT] [--zero]`
Without `--ray`: plain loop, torchrun DDP, torch.distributed.pipelining, and raypar's workers over TCP. With `--ray`: Ray
Train and raypar's actors, and some of the others beside them. Ray's own processes use some processor even when idle:
each Ray is stopped (SIGSTOP) between its turns. `--old`: a checkout of an older commit, whose workers run beside all others.
`--zero`: replicas that divide state (`plan.zero`) beside ZeroRedundancyOptimizer and FSDP2, a larger GPT in two processes;
`memory.py` has their memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Contender, Ratio, environment, page, ratio, table, torchrun_command, worker_command
from raypar_contenders import OLD, raypar, raypar_on_ray
from side_by_side import bench_parser, command_line, ms_cells, say, train_in_turn

TOKENS = 32 * 128
TORCH_SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
OURS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
SAME = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zb-v"}


def plain(microbatches: int) -> Contender:
    return Contender("plain", 1, lambda a: [worker_command("plain", a, 0, work={}, microbatches=microbatches)])


def ddp(microbatches: int) -> Contender:
    return Contender("DDP", 2, lambda a: [torchrun_command("ddp", a, 2, work={}, microbatches=microbatches)])


def pipelining(schedule: str, microbatches: int) -> Contender:
    options: dict[str, Any] = {"work": {}, "microbatches": microbatches, "schedule": schedule}
    return Contender(f"torch {schedule}", 2, lambda a: [torchrun_command("pipelining", a, 2, **options)])


def ray_train(microbatches: int, storage: str) -> Contender:
    options: dict[str, Any] = {"work": {}, "microbatches": microbatches, "workers": 2, "storage": storage}
    return Contender("Ray Train", 2, lambda a: [worker_command("ray-train", a, 0, **options)], never_idle=True)


def contenders(microbatches: int, storage: str | None, old: Path | None = None) -> list[Contender]:
    """All that run side by side; `storage` is a folder for Ray Train, None for the set without Ray."""
    make = raypar if storage is None else raypar_on_ray
    schedules = OURS if storage is None else ("1f1b", "zb-v")
    ours = []
    for more in ({}, {"root": old}) if old is not None else ({},):
        ours += [
            make("1 worker", microbatches, **more),
            make("2 replicas", microbatches, replicas=2, **more),
            make("2 replicas fast", microbatches, replicas=2, reduction="fast", **more),
            *(make(f"2 stages {s}", microbatches, stages=2, schedule=s, **more) for s in schedules),
        ]
    if storage is None:
        return [plain(microbatches), ddp(microbatches), *(pipelining(s, microbatches) for s in TORCH_SCHEDULES), *ours]
    return [
        plain(microbatches),
        ddp(microbatches),
        pipelining("1F1B", microbatches),
        pipelining("ZBVZeroBubble", microbatches),
        ray_train(microbatches, storage),
        *ours,
    ]


@dataclass(frozen=True)
class Claim:
    """`own` against `base`: the lower bound of the ratio base seconds / own seconds should reach `bound`."""

    base: str
    own: str
    bound: float


def claims(seconds: dict[str, list[float]], on_ray: bool) -> list[Claim]:
    """What the project promises of this set; those whose contenders did not run are left out."""
    end = " on Ray" if on_ray else ""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    torch_runs = [n for n in medians if n.startswith("torch ")]
    our_pipelines = [n for n in medians if n.startswith("raypar 2 stages")]
    wanted = [
        Claim("plain", f"raypar 1 worker{end}", 0.98),
        Claim("DDP", f"raypar 2 replicas{end}", 1.0),
        Claim("Ray Train", f"raypar 2 replicas{end}", 1.0),
        Claim(f"raypar 2 replicas fast{end}", f"raypar 2 replicas{end}", 0.97),
        *(Claim(name, name.replace(OLD, "raypar", 1), 0.97) for name in medians if name.startswith(OLD)),
        *(Claim(f"torch {theirs}", f"raypar 2 stages {ours}{end}", 1.0) for theirs, ours in SAME.items()),
    ]
    if torch_runs and our_pipelines:
        best = min(our_pipelines, key=medians.__getitem__)
        wanted += [Claim(min(torch_runs, key=medians.__getitem__), best, 1.0), Claim("torch 1F1B", best, 1.05)]
    return list(dict.fromkeys(c for c in wanted if c.base in seconds and c.own in seconds))


def chosen_contenders(given: argparse.Namespace, microbatches: int, storage: str | None) -> list[Contender]:
    """Those that the arguments ask for."""
    if given.zero:
        import zero_peers

        return zero_peers.contenders(microbatches)
    return contenders(microbatches, storage, given.old)


def chosen_claims(given: argparse.Namespace, seconds: dict[str, list[float]], on_ray: bool) -> list[Claim]:
    """What the project promises of them."""
    if given.zero:
        import zero_peers

        return [Claim(*claim) for claim in zero_peers.claims(seconds)]
    return claims(seconds, on_ray)


def measure(given: argparse.Namespace, microbatches: int, storage: str | None) -> dict[str, Any]:
    """Run one set for one number of microbatches."""
    chosen = chosen_contenders(given, microbatches, storage)
    if given.only:
        chosen = [c for c in chosen if any(text in c.name for text in given.only)]
    say(f"m={microbatches}: {', '.join(contender.name for contender in chosen)}")
    seconds, facts = train_in_turn(chosen, given)
    return {
        "microbatches": microbatches,
        "seconds": seconds,
        "peak_rss_bytes": {name: [peak for one in found for peak in one["peak_rss_bytes"]] for name, found in facts.items()},
        "loss": {name: next((i["loss"] for i in found if i["loss"] is not None), None) for name, found in facts.items()},
        "ratios": [
            asdict(claim) | asdict(ratio(seconds[claim.base], seconds[claim.own]))
            for claim in chosen_claims(given, seconds, storage is not None)
        ],
        "tokens": tokens_of_step(given),
    }


def tokens_of_step(given: argparse.Namespace) -> int:
    """Tokens of one step of every contender."""
    if not given.zero:
        return TOKENS
    import zero_peers

    return zero_peers.WORK["batch_size"] * zero_peers.WORK["context"]


def tables(found: dict[str, Any]) -> str:
    """The result of one number of microbatches, for people."""
    rows = []
    for name, values in found["seconds"].items():
        memory = "/".join(f"{n / 2**20:.0f}" for n in found["peak_rss_bytes"][name])
        timing = [*ms_cells(values), f"{found['tokens'] / statistics.median(values):,.0f}"]
        rows.append([name, *timing, memory, f"{found['loss'][name]:.4f}"])
    ratios = []
    for one in found["ratios"]:
        r = Ratio(one["median"], one["lower"], one["upper"], one["pairs"])
        holds = "yes" if r.lower >= one["bound"] else "NO"
        ratios.append(
            [one["own"], one["base"], f"{r.median:.3f}", f"{r.lower:.3f}", f"{one['bound']:.2f}", holds, str(r.pairs)]
        )
    first = table(["contender", "step ms", "quartiles", "tokens/s", "peak MiB per process", "last loss"], rows)
    second = table(["raypar", "beside", "times as fast", "95 % lower bound", "wanted", "holds", "pairs"], ratios)
    return f"## {found['microbatches']} microbatches\n\n{first}\n\n{second}"


def main() -> None:
    # Several steps, because a long run is made of steps that follow one another: the first after a pause finds cold caches.
    parser = bench_parser(__doc__, rounds=24, steps=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--ray", action="store_true", help="the set with Ray Train and raypar's actors")
    parser.add_argument("--only", nargs="+", help="contenders whose name contains one of these")
    parser.add_argument("--old", type=Path, help="a checkout of an older commit; without --ray")
    parser.add_argument("--zero", action="store_true", help="replicas that divide state beside their peers; without the others")
    given = parser.parse_args()
    if given.old is not None and (given.ray or given.zero):
        parser.error("--old compares workers without Ray, and with none of --zero")
    if given.ray and given.zero:
        parser.error("--zero compares workers without Ray")
    facts = environment()
    found = []
    for microbatches in given.microbatches:
        with tempfile.TemporaryDirectory(prefix="rp-") as folder:
            found.append(measure(given, microbatches, folder if given.ray else None))
    print(json.dumps({"environment": facts, "results": found}) if given.json else "\n\n".join(map(tables, found)))
    if given.page:
        title = "Step time of replicas that divide state" if given.zero else "Step time beside peers"
        given.page.write_text(page(title, command_line(), "\n\n".join([*notes(given), *map(tables, found)])))


def notes(given: argparse.Namespace) -> list[str]:
    """What a page says above its tables."""
    rounds = (
        "A round runs every contender once, in an order that is reversed every other round; ratios are taken inside a round; "
        "bounds are of the two-sided 95 % bootstrap interval of the median ratio."
    )
    if not given.zero:
        work = "One GPT (8 blocks, width 128, context 128, bytes), 32 samples a step"
        return [f"{work}, AdamW with clipping, one thread a process, on one machine. {rounds}"]
    import zero_peers

    work = "A GPT of 12.6 million parameters (7 blocks, width 384, context 64, bytes), 8 samples a step"
    peers = (
        "FSDP2 is `fully_shard` of every block and of the whole, over gloo: `kept` keeps parameters from forward to backward, "
        "`one reduction` also adds up gradients of a step whole and reduces them once (`set_requires_gradient_sync`)."
    )
    first = f"{work}, AdamW with clipping, two processes with one thread each on one machine, without a mirror. {rounds}"
    return [first, peers, *filter(None, [zero_peers.left_out()])]


if __name__ == "__main__":
    main()
