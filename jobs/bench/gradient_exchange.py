"""The ways in which replicas exchange gradients over TCP: by owners, by halving, and as `plan/gradient_exchange.py` chooses.

Usage: python jobs/bench/gradient_exchange.py [--replicas R] [--unix] [--seconds S] [--cases CASE...]

R processes of this machine, with one block each, reduce the same gradients; the ways take turns, in an order that is reversed
in every second round. A round counts its slowest process. Medians over the rounds, in milliseconds, with the 10th and 90th
percentile, and the messages that rank 0 has sent in one reduction.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from raypar.comm.bucket_layout import BucketLayout
from raypar.comm.gradient_buckets import CanonicalBucket, GradientBucket, HalvingBucket, ReplicaGroup
from raypar.comm.gradient_reduction import CanonicalReduction
from raypar.comm.phased_operation import OperationMessage
from raypar.comm.routine import run_routine
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential

DEADLINE_S = 60.0
CREDENTIAL = RunCredential("bench", b"no secret: a bench has this machine to itself")
KIB = 1 << 10
CASES = {
    "1 x 4 KiB": [4 * KIB],
    "1 x 64 KiB": [64 * KIB],
    "1 x 256 KiB": [256 * KIB],
    "64 x 4 KiB": [4 * KIB] * 64,
    "1 x 2 MiB": [2048 * KIB],
    "1 x 8 MiB": [8192 * KIB],
    "16 x 2 MiB": [2048 * KIB] * 16,
}
"""Bytes of each parameter; buckets have about 2 MiB, or one parameter."""
Times = dict[tuple[str, str], list[float]]


class ByOwners(CanonicalReduction):
    """Every bucket has owners."""

    def _bucket(self, layout: BucketLayout, replicas: ReplicaGroup) -> GradientBucket:
        return CanonicalBucket(replicas, layout)


class ByHalving(CanonicalReduction):
    """Every bucket is halved."""

    def _bucket(self, layout: BucketLayout, replicas: ReplicaGroup) -> GradientBucket:
        return HalvingBucket(replicas, layout)


WAYS = {"owners": ByOwners, "halving": ByHalving, "chosen": CanonicalReduction}


def reduce(reduction: CanonicalReduction, rank: int, sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The totals of one step."""
    reduction.start()
    for index in reversed(range(len(sums))):
        reduction.submit_gradients([index], {(rank, rank + 1): {index: sums[index]}})
    return [total for total in run_routine(reduction.finish(), DEADLINE_S) if total is not None]


def worker(rank: int, replicas: int, pipe: Connection, unix: bool, seconds: float, cases: list[str]) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    mesh = TcpEndpoint.listen(credential=CREDENTIAL, unix_sockets=unix)
    pipe.send(mesh.address)
    end = mesh.connect(rank=rank, size=replicas, addresses=pipe.recv(), generation=1, deadline_s=DEADLINE_S)
    sent, post = [0], end.post_send

    def counted(message: OperationMessage) -> None:
        sent[0] += 1
        post(message)

    end.post_send = counted  # type: ignore[method-assign]
    times: Times = {}
    messages: dict[tuple[str, str], int] = {}
    for number, case in enumerate(cases):
        sizes = CASES[case]
        sums = [torch.randn(size // 4) for size in sizes]
        made = {
            way: kind(
                end, group=range(replicas), runs=[range(r, r + 1) for r in range(replicas)], block_count=replicas,
                parameters=[(one.shape, one.dtype) for one in sums], channel=10 * number + place,
            )
            for place, (way, kind) in enumerate(WAYS.items())
        }  # fmt: skip

        totals: dict[str, list[torch.Tensor]] = {}
        repeats = max(1, min(10, 256 * KIB // sum(sizes)))
        rounds = max(15, min(150, int(seconds * 1000 / (replicas * (0.5 + sum(sizes) / (1 << 20))) / repeats / len(WAYS))))
        for turn in range(rounds + 3):
            for way in WAYS if turn % 2 else reversed(WAYS):
                end.barrier(group=range(replicas)).wait(DEADLINE_S)
                before, start = sent[0], time.perf_counter()
                for _ in range(repeats):
                    totals[way] = reduce(made[way], rank, sums)
                if turn >= 3:
                    times.setdefault((case, way), []).append((time.perf_counter() - start) * 1000 / repeats)
                    messages[case, way] = (sent[0] - before) // repeats
        for found in totals.values():
            assert all(
                a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, totals["owners"], strict=True)
            )
    pipe.send((times, messages))
    end.barrier(group=range(replicas)).wait(DEADLINE_S)
    end.close()
    mesh.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--unix", action="store_true", help="Unix sockets, as between workers of one machine")
    parser.add_argument("--seconds", type=float, default=3.0, help="about how long each case runs")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(given.replicas)]
    for rank, (_, far) in enumerate(pipes):
        context.Process(
            target=worker, args=(rank, given.replicas, far, given.unix, given.seconds, given.cases), daemon=True
        ).start()
    addresses = [near.recv() for near, _ in pipes]
    for near, _ in pipes:
        near.send(addresses)
    answers: list[tuple[Times, dict[tuple[str, str], int]]] = [near.recv() for near, _ in pipes]
    print("| gradients | " + " | ".join(f"{way}, ms (p10..p90), messages" for way in WAYS) + " | owners / halving |")
    print("|---|" + "---|" * (len(WAYS) + 1))
    for case in given.cases:
        medians, cells = {}, []
        for way in WAYS:
            found = sorted(map(max, zip(*(times[case, way] for times, _ in answers), strict=True)))
            medians[way] = statistics.median(found)
            spread = f"{found[len(found) // 10]:.2f}..{found[len(found) * 9 // 10]:.2f}"
            cells.append(f"{medians[way]:.2f} ({spread}), {answers[0][1][case, way]}")
        print(f"| {case} | " + " | ".join(cells) + f" | {medians['owners'] / medians['halving']:.2f} |")


if __name__ == "__main__":
    main()
