"""The `cpu` transport beside gloo: one-way time of a message and time of an all-reduce, two processes of this machine.

Usage: python jobs/bench/transport.py [--json] [--seconds S]

Rounds of both alternate in the same two processes, so that both see the same neighbours. A round repeats its operation
(10 times up to 256 KB, twice above) and counts the mean; one-way time is half a round trip. Medians over the rounds, in
milliseconds, with the 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.comm.tcp.handshake import RunCredential

SIZES = {"4 KB": 4 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20, "16 MB": 16 << 20}
DEADLINE_S = 60.0
CREDENTIAL = RunCredential("bench", b"no secret: a bench has this machine to itself")


def worker(rank: int, pipe: Connection, store: str, seconds: float) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = TcpEndpoint.listen(credential=CREDENTIAL)
    pipe.send(mesh.address)
    ours = mesh.connect(rank=rank, size=2, addresses=pipe.recv(), generation=1, deadline_s=DEADLINE_S)
    peer = 1 - rank

    def raypar_round_trip(data: torch.Tensor) -> None:
        back = ours.recv(data, source=peer, tag=0)
        if rank == 0:
            ours.send(data, to=peer, tag=0)
            back.wait(DEADLINE_S)
        else:
            back.wait(DEADLINE_S)
            ours.send(data, to=peer, tag=0).wait(DEADLINE_S)

    def gloo_round_trip(data: torch.Tensor) -> None:
        for turn in (0, 1):
            if rank == turn:
                dist.send(data, peer)
            else:
                dist.recv(data, peer)

    cases = {
        ("one-way", "raypar"): (raypar_round_trip, 2),
        ("one-way", "gloo"): (gloo_round_trip, 2),
        ("all-reduce", "raypar"): (lambda data: ours.all_reduce(data, group=(0, 1)).wait(DEADLINE_S), 1),
        ("all-reduce", "gloo"): (dist.all_reduce, 1),
    }
    times: dict[tuple[str, str, str], list[float]] = {}
    for name, nbytes in SIZES.items():
        data = torch.zeros(nbytes // 4)
        repeats = 10 if nbytes <= 256 << 10 else 2
        rounds = max(10, min(200, int(seconds * 1000 / (0.3 + nbytes / (1 << 20)) / repeats)))
        for number in range(rounds + 3):
            for (what, who), (run, ways) in cases.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    run(data)
                if number >= 3:  # the first ones warm caches and windows
                    times.setdefault((name, what, who), []).append((time.perf_counter() - start) * 1000 / ways / repeats)
    pipe.send(times)
    ours.close()
    mesh.close()
    dist.destroy_process_group()


def measure(seconds: float) -> list[dict[str, Any]]:
    """Rows of the table: operation, size, and for each of both the median, p10 and p90 in ms."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(2)]
        processes = [
            context.Process(target=worker, args=(r, pipes[r][1], os.path.join(folder, "store"), seconds)) for r in range(2)
        ]
        for process in processes:
            process.start()
        addresses = [near.recv() for near, _ in pipes]
        for near, _ in pipes:
            near.send(addresses)
        times = pipes[0][0].recv()
        for process in processes:
            process.join(DEADLINE_S)
    rows = []
    for what in ("one-way", "all-reduce"):
        for name in SIZES:
            row: dict[str, Any] = {"operation": what, "size": name}
            for who in ("raypar", "gloo"):
                found = sorted(times[name, what, who])
                row[who] = {
                    "median_ms": statistics.median(found),
                    "p10_ms": found[len(found) // 10],
                    "p90_ms": found[len(found) * 9 // 10],
                }
            row["speedup"] = row["gloo"]["median_ms"] / row["raypar"]["median_ms"]
            rows.append(row)
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.5, help="about how long each case runs")
    arguments = parser.parse_args()
    rows = measure(arguments.seconds)
    if arguments.json:
        print(json.dumps({"bench": "transport", "rows": rows}))
        return
    print(f"{'operation':<11}{'size':>8}{'raypar ms':>12}{'p10..p90':>18}{'gloo ms':>10}{'p10..p90':>18}{'gloo/raypar':>13}")
    for row in rows:
        cells = [f"{row['operation']:<11}{row['size']:>8}"]
        for who, width in (("raypar", 12), ("gloo", 10)):
            spread = f"{row[who]['p10_ms']:.3f}..{row[who]['p90_ms']:.3f}"
            cells.append(f"{row[who]['median_ms']:>{width}.3f}{spread:>18}")
        print("".join(cells) + f"{row['speedup']:>13.2f}")


if __name__ == "__main__":
    main()
