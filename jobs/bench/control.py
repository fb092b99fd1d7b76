"""What control costs: driver calls and object-store bytes a step on a real run, interpreter time an instruction, what hundreds
of workers are told of a change of plan, how long their votes take (`votes.py`), what they cost a driver (`fake_workers.py`).

`python jobs/bench/control.py [--json] [--page FILE] [--microbatches 4 16 64 256]`. Calls and bytes are those of a longer run
less those of a shorter one, over the difference in steps: start and end of a run cancel. The interpreter runs one rank of two
over a transport that does nothing; its time is what is left of a step beside the time inside compute instructions.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import fake_workers
import torch
import votes
from harness import environment, page, table
from ours import sleeping_job

from raypar.actors import driver_client
from raypar.actors.driver_actor import DriverActor
from raypar.actors.shared_pickles import SharedPickles
from raypar.comm.routine import run_routine
from raypar.comm.transport import CommunicationLedger
from raypar.elastic.mirror_schedule_and_buddies import assign_buddies
from raypar.job import Job
from raypar.launch.choose_plan import choose_plan
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.launch_run import launch_run
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.plan.pieces import AdoptPlanCommand, Piece, may_move_directly, moves_by_worker, plan_moves
from raypar.plan.tensor_parallel_layout import TensorParallelLayout
from raypar.record.events import EndOfRun, Event
from raypar.schedule import registry
from raypar.schedule.instructions import OncePerStep, ReduceGradients
from raypar.schedule.program_assignment import assign_programs_to_ranks
from raypar.storage.run_folder import RunFolder
from raypar.user_code.user_code_errors import make_importable
from raypar.worker.connected_ranks import connected_ranks
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.make_worker_assignments import make_worker_assignments
from raypar.worker.worker_core import WorkerCore

SHORT, LONG = 10, 60
COUNTS_FILE = "counts.json"
INLINE_BYTES = 100 << 10
"""Ray's `max_direct_call_object_size`, at its default."""

LAYERS, TENSORS, ELEMENTS = 96, 6, 1 << 20
MOST_TOLD_BYTES, MOST_CONNECTIONS = 1 << 20, 40
"""Wanted: a change of plan tells no worker more, besides state; none is connected with more others in 8 stages x 8 replicas."""


NOTE = (
    "Calls are counted where the driver makes them. Object-store bytes are worked out, not read from the store: answers to "
    f"step calls, pickled, that are larger than the {INLINE_BYTES >> 10} KiB which travel with the reply (arguments are two "
    "numbers). Interpreter time is the wall time of a step's program less the time inside compute instructions, transport "
    "calls being answered at once; what the interpreter does inside a compute instruction to hand values on counts as compute. "
    f"The change of plan is that of a model of {LAYERS} layers with {TENSORS} tensors each, from 8 stages to 4 with twice the "
    "replicas, so that half of all state moves; connections are those of the plan before it; its bytes are those of the "
    "command to adopt the plan, pickled, with the addresses of all workers; "
    "times are of the driver's processor: to work out the moves, and to make the commands."
)


class CountingDriver(DriverActor):
    """The driver; at the end it leaves in the run folder what it has counted.

    Ray puts an answer into the object store when it is larger than `INLINE_BYTES`; smaller ones travel with the reply.
    """

    calls_made = answer_bytes = stored_bytes = 0

    def _set_up(self, request: Any, credential: Any) -> None:
        DriverActor._set_up(self, request, credential)
        reports = self.steps.reports
        call_all, stepped, tell = self.calls.call_all, reports.keep_step_reports, self.feed.tell

        def counting_calls(call: Any, event: Any, by_agent: Any = None) -> None:
            def counted(worker: Any) -> Any:
                self.calls_made += 1
                return call(worker)

            call_all(counted, event, by_agent)

        def weighing(generation: int, step: int, reports: Any) -> Any:
            for report in reports.values():
                size = len(pickle.dumps(report))
                self.answer_bytes = max(self.answer_bytes, size)
                self.stored_bytes += size if size > INLINE_BYTES else 0
            return stepped(generation, step, reports)

        def leaving_counts(event: Event) -> None:
            if isinstance(event, EndOfRun):
                found = {"calls": self.calls_made, "answer_bytes": self.answer_bytes, "stored_bytes": self.stored_bytes}
                (Path(request.folder) / COUNTS_FILE).write_text(json.dumps(found))
            tell(event)

        self.calls.call_all, reports.keep_step_reports, self.feed.tell = (
            counting_calls,
            weighing,
            leaving_counts,
        )


def job(stages: int, microbatches: int) -> Job:
    """Layers that compute next to nothing."""
    return sleeping_job([0.0] * stages, [0.0] * stages, [0.0] * stages, microbatches, min(16, microbatches))


def run(microbatches: int, steps: int) -> dict[str, int]:
    """What the driver counted in a whole run of 2 stages x 2 replicas."""
    spec = job(2, microbatches).replace(steps=steps)
    plan = ParallelPlan.mesh(dp=2, pp=2, layers=2)
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        place = RunFolder.create(folder, "control")
        options = LaunchOptions(spec, lambda planned: place)
        result = launch_run(
            lambda checked: choose_plan(spec, checked, lambda layers: plan, "1f1b", plan.world),
            options,
            lambda event: None,
        )
        if result.error is not None:
            raise result.error
        found: dict[str, int] = json.loads((place.path / COUNTS_FILE).read_text())
    return found


def per_step(microbatches: int) -> dict[str, float]:
    """Calls and bytes of one step, 4 workers."""
    short, long = run(microbatches, SHORT), run(microbatches, LONG)
    return {
        "microbatches": microbatches,
        "workers": 4,
        "calls": (long["calls"] - short["calls"]) / (LONG - SHORT),
        "object_store_bytes": (long["stored_bytes"] - short["stored_bytes"]) / (LONG - SHORT),
        "largest_answer_bytes": long["answer_bytes"],
    }


class Done:
    """A handle of something that is over."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self._tensor = tensor

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    def wait_on_stream(self, timeout_s: float | None = None) -> None:
        return None

    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor


class Nothing:
    """A transport that does nothing: every send is taken, every receive has the same [1, 1] tensor."""

    generation = 0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.ledger = rank, size, CommunicationLedger()
        self.received = Done(torch.zeros(1, 1))
        self.sent = Done()

    def send(self, tensor: torch.Tensor, *, to: int, tag: int, keep_layout: bool = False) -> Done:
        return self.sent

    def recv(self, out: torch.Tensor | None, *, source: int, tag: int) -> Done:
        return self.received

    def close(self) -> None:
        return None


def interpreter(microbatches: int, schedule: str, repeats: int = 30) -> dict[str, Any]:
    """Microseconds an instruction of the first of two stages, its end of step left out."""
    spec = job(2 * registry.resolve_chunks_per_worker(schedule), microbatches)
    plan = ParallelPlan.mesh(
        pp=2, chunks=registry.resolve_chunks_per_worker(schedule), placement=registry.placement_of_schedule(schedule)
    )
    core = WorkerCore(spec)
    part = make_worker_assignments(
        spec, make_layer_graph(spec), plan, registry.build_schedule(schedule, MicrobatchRouting(plan, spec.batching))
    )[0]
    core.adopt(part, Nothing(0, plan.world))  # type: ignore[arg-type]
    program = tuple(i for i in part.program if not isinstance(i, (ReduceGradients, OncePerStep)))
    found = []
    for step in range(repeats):
        core.loader.prefetch(step, range(microbatches))
        found.append(_beside_compute_us(core, program, step) / len(program))
    core.close()
    return {
        "schedule": schedule,
        "microbatches": microbatches,
        "instructions": len(program),
        "us_per_instruction": statistics.median(found[repeats // 3 :]),
    }


def held(plan: ParallelPlan) -> dict[int, list[Piece]]:
    """Worker -> the pieces of the model that it holds under a plan, whose ranks are the workers' numbers."""
    found = {}
    for rank, (role,) in enumerate(plan.roles):
        stage = plan.stages[plan.stages_of(rank)[0]]
        own = range(role.shard * ELEMENTS, (role.shard + 1) * ELEMENTS)
        names = [f"layers.{layer}.{tensor}" for layer in range(stage.first, stage.last + 1) for tensor in range(TENSORS)]
        found[rank] = [Piece(name, own.start, own.stop) for name in names]
    return found


def change_of_plan(shards: int) -> dict[str, Any]:
    """What the driver tells workers, and computes, for 8 stages x 8 replicas that become 4 x 16."""
    before, after = (ParallelPlan.mesh(pp=pp, dp=64 // pp, tp=shards, layers=LAYERS) for pp in (8, 4))
    batching = Microbatches(64, 0, 512)
    order = registry.build_schedule("1f1b", MicrobatchRouting(after, batching))
    parts = assign_programs_to_ranks(order, after, StageConnections.chain(len(after.stages)), batching)
    have, need = held(before), held(after)
    start = time.process_time()
    moves = plan_moves(have, need)
    own, direct = moves_by_worker(moves), may_move_directly(moves)
    planned = time.process_time()
    ranks = {worker: worker for worker in range(after.world)}
    keepers = assign_buddies([worker // 8 for worker in ranks])
    pickles = SharedPickles([after, parts[0].crossing, ranks, keepers])
    told = [
        pickles.dumps(AdoptPlanCommand(parts[worker], ranks, 5, own.get(worker, ()), direct=direct, mirror_keepers=keepers))
        for worker in ranks
    ]
    made = time.process_time()
    addresses = pickle.dumps([f"10.0.{worker // 250}.{worker % 250}:43123" for worker in ranks])
    return {
        "workers": after.world,
        "moves": len(moves),
        "bytes": max(map(len, told)) + len(addresses),
        "connections": most_connections(before, batching),
        "moves_bytes": max(len(pickle.dumps(one)) for one in own.values()),
        "moves_s": planned - start,
        "commands_s": made - planned,
    }


def most_connections(plan: ParallelPlan, batching: Microbatches) -> int:
    """The largest number of other workers with which one is connected."""
    order = registry.build_schedule("1f1b", MicrobatchRouting(plan, batching))
    parts = assign_programs_to_ranks(order, plan, StageConnections.chain(len(plan.stages)), batching)
    layout = cache(lambda count: TensorParallelLayout(count, {}, {}))  # of layers whose shards add up
    ranks = {worker: worker for worker in range(plan.world)}
    keepers, spec = assign_buddies([worker // 8 for worker in ranks]), job(1, batching.count)
    orders = [AdoptPlanCommand(part, ranks, 0, mirror_keepers=keepers) for part in parts]
    return max(len(connected_ranks(order, rank, spec, layout)) for rank, order in enumerate(orders))


def _beside_compute_us(core: WorkerCore, program: Any, step: int) -> float:
    start = time.perf_counter_ns()
    run_routine(core.interpreter.run(program, step), 60.0)
    return (time.perf_counter_ns() - start - core.interpreter.busy_ns - core.interpreter.read_ns) / 1e3  # nor reading samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything measured as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 16, 64, 256])
    given = parser.parse_args()
    make_importable(Path(__file__).parent)
    torch.set_num_threads(1)
    facts = environment()
    driver_client.DriverActor = CountingDriver
    overhead = [interpreter(m, s) for s in ("1f1b", "zb-v") for m in (8, 64)]
    changes = [change_of_plan(shards) for shards in (1, 4, 16)]
    ballots = votes.measure()
    ray_cost, drivers = fake_workers.measure()
    calls = [per_step(m) for m in given.microbatches]
    text = "\n\n".join(
        [
            NOTE,
            table(
                ["microbatches", "workers", "driver calls a step", "object-store bytes a step", "largest answer, bytes"],
                [
                    [
                        str(c["microbatches"]),
                        str(c["workers"]),
                        f"{c['calls']:.2f}",
                        f"{c['object_store_bytes']:.0f}",
                        str(c["largest_answer_bytes"]),
                    ]
                    for c in calls
                ],
            ),
            table(
                ["schedule", "microbatches", "instructions", "interpreter us an instruction (wanted: 50)"],
                [
                    [o["schedule"], str(o["microbatches"]), str(o["instructions"]), f"{o['us_per_instruction']:.1f}"]
                    for o in overhead
                ],
            ),
            table(
                [
                    "workers",
                    "connections of one, at most",
                    "moves of state",
                    "told to a worker, bytes",
                    "of them its moves",
                    "moves worked out, s",
                    "commands made, s",
                ],
                [
                    [
                        *(f"{c[key]:,}" for key in ("workers", "connections", "moves", "bytes", "moves_bytes")),
                        *(f"{c[key]:.2f}" for key in ("moves_s", "commands_s")),
                    ]
                    for c in changes
                ],
            ),
            f"A message with a ballot takes {1000 * votes.message_ms():.0f} us. Wanted: at most {votes.WANTED_MS:g} ms for "
            f"{votes.OF_WORKERS:,} workers.",
            table(votes.header(), votes.rows(ballots)),
            fake_workers.describe(ray_cost, drivers),
            table(fake_workers.header(), fake_workers.rows(drivers)),
        ]
    )
    found = {"environment": facts, "calls": calls, "interpreter": overhead, "changes": changes}
    print(json.dumps({**found, "votes": [asdict(cost) for cost in ballots]}) if given.json else text)
    if given.page:
        command = "python jobs/bench/control.py --microbatches " + " ".join(map(str, given.microbatches))
        given.page.write_text(page("What does control cost?", command, text))
    good = votes.holds(ballots) and fake_workers.holds(drivers)
    good = good and all(c["bytes"] <= MOST_TOLD_BYTES and c["connections"] <= MOST_CONNECTIONS for c in changes)
    good = good and all(c["calls"] == c["workers"] and c["object_store_bytes"] == 0 for c in calls)
    sys.exit(0 if good and all(o["us_per_instruction"] <= 50 for o in overhead) else 1)


if __name__ == "__main__":
    main()
