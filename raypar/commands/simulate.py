"""raypar simulate: the time, idle time and memory of a step of a schedule, and its picture.

Nothing runs: times are given (by default forward 1 ms and backward 2 ms), each for one microbatch through all chunks of one
worker. Lists are one value, or one per stage: `1 1 3 1` or `1,1,3,1`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import fields
from functools import partial
from pathlib import Path

from raypar.console.command_arguments import add_list, amount, count
from raypar.console.simulation_report import simulation_facts, simulation_report, write_simulation
from raypar.files.untrusted_files import SCHEDULE_BYTES, read_limited_text
from raypar.schedule import registry
from raypar.schedule.simulate import simulate_schedule
from raypar.schedule.step_to_simulate import SimulationOptions, make_simulated_step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar simulate`."""
    parser.epilog = (
        "examples:\n"
        "  raypar simulate --schedule 1f1b --stages 4 --microbatches 8\n"
        "  raypar simulate --schedule zb-v --stages 4 --microbatches 8 --svg zb-v.svg\n"
        "  raypar simulate --stages 4 --microbatches 24 --forward-ms 1 1 3 1 --backward-ms 2 2 6 2 --replicas 1 1 3 1\n"
    )
    what = parser.add_argument_group("what")
    what.add_argument("--schedule", metavar="NAME", help=f"{', '.join(registry.NAMES)} (default 1f1b)")
    what.add_argument("--schedule-file", metavar="F.csv", help="a schedule of your own: a line per worker, 0F0,0F1,0B0,...")
    what.add_argument("--stages", type=count, metavar="P", help="length of the pipeline in workers")
    what.add_argument("--microbatches", type=count, metavar="M", help="the step's total, over all replicas")
    add_list(what, "--replicas", count, "workers per stage (default 1)")
    what.add_argument("--chunks", type=count, metavar="V", help="stages hosted by each worker (default 2 where it matters)")
    add_list(what, "--warmup", count, "forwards before the first backward of a worker")
    what.add_argument("--recompute", action="store_true", default=None, help="make activations again before the backward")
    costs = parser.add_argument_group("costs")
    add_list(costs, "--forward-ms", amount, "forward (default 1)")
    add_list(costs, "--backward-ms", amount, "whole backward (default 2)")
    add_list(costs, "--weight-ms", amount, "the weight gradients' part of the backward (default half)")
    costs.add_argument("--latency-ms", type=amount, default=0, metavar="MS", help="of a message between workers (default 0)")
    costs.add_argument("--bandwidth-gbps", type=amount, metavar="G", help="Gbit/s from a worker to another (default endless)")
    add_list(costs, "--activation-mb", amount, "MB that leave a stage per microbatch, and as much for the gradient (default 0)")
    add_list(costs, "--held-mb", amount, "MB a worker keeps per microbatch from forward to backward (default --activation-mb)")
    results = parser.add_argument_group("results")
    results.add_argument("--json", action="store_true", help="print JSON instead of the text grid and table")
    results.add_argument("--svg", metavar="F", type=Path, help="draw a swimlane")
    results.add_argument("--csv", metavar="F", type=Path, help="write the schedule, to be changed and given to --schedule-file")
    results.add_argument("--trace", metavar="F", type=Path, help="write a Chrome trace, for ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    """Build and simulate the schedule, write the files asked for, print the report; exit code 0."""
    cure = "name a schedule file; --csv F writes one"
    read_text = partial(read_limited_text, follow=True, limit=SCHEDULE_BYTES, cure=cure)
    options = SimulationOptions(*(getattr(args, field.name) for field in fields(SimulationOptions)))
    step = make_simulated_step(options, read_text)
    timeline = simulate_schedule(step.schedule, step.routing, step.crossing, step.costs)
    files = {kind: path for kind in ("csv", "svg", "trace") if (path := getattr(args, kind)) is not None}
    write_simulation(files, step.schedule, timeline, step.title, step.timed_routes)
    if args.json:
        facts = simulation_facts(step.name, step.routing, timeline)
        print("{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()) + "\n}")
    else:
        print(simulation_report(step.title, timeline, shutil.get_terminal_size((120, 24)).columns))
        for path in files.values():
            print(f"wrote {path}")
    return 0
