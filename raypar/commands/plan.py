"""`raypar plan JOB`: shows the plan of a job without training: placement, memory, predicted step, the planner's reasons."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from raypar.console.command_arguments import add_job_arguments
from raypar.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar plan`."""
    add_job_arguments(parser)
    parser.add_argument("--workers", type=int, help="choose a plan for at most so many workers, whatever the job's plan says")
    parser.add_argument("--no-profile", action="store_true", help="sizes only, at once: no layer, cut or optimizer is tried")
    parser.add_argument(
        "--memory", type=float, metavar="MIB", help="what a worker has, in MiB, in place of this machine's free memory"
    )
    parser.add_argument("--svg", metavar="F", type=Path, help="draw the predicted step as a swimlane")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print stages, layers, replicas, sizes per worker, the imbalance of blocks and the predicted step; exit code 0."""
    import json
    import shutil

    from raypar.console.json_stdout import json_stdout
    from raypar.console.plan_text import plan_as_text
    from raypar.draw.swimlane_svg import swimlane_svg
    from raypar.draw.text_grid import timeline_text_for_width
    from raypar.files.atomic_write import write_text_atomically
    from raypar.job.read_job import load_job
    from raypar.launch.plan_as_dict import shown_plan_as_dict
    from raypar.launch.plan_to_show import find_plan_to_show
    from raypar.launch.steps_of_epochs import length_in_words, with_steps_of_epochs
    from raypar.planner.plan_report import plan_report, stage_balance_text
    from raypar.planner.predicted_step import predict_step
    from raypar.schedule.data_flow import message_routes

    with json_stdout(args.json) as out:
        check_numbers_of_arguments(args)
        job = with_steps_of_epochs(load_job(args.job, args.overrides), lambda event: None)
        shown, graph = find_plan_to_show(job, args.workers, args.memory, args.svg, with_profile=not args.no_profile)
        plan, found = shown.plan, shown_plan_as_dict(shown, job, graph)
        parts = [plan_as_text(found), job.precision_in_words or ""]
        if job.epochs is not None:
            parts.append(f"the run has {length_in_words(job)}")
        if shown.profile is not None:
            timeline, _ = predict_step(shown.profile, plan, shown.schedule or shown.name, job.batching)
            parts.append(timeline_text_for_width(timeline, shutil.get_terminal_size((120, 24)).columns) or "")
            if args.svg is not None:
                title = f"{job.name}: {found['plan']}, schedule {shown.name}"
                routes = message_routes(shown.profile.crossing(plan))
                write_text_atomically(args.svg, swimlane_svg(timeline, title=title, subtitle="predicted", routes=routes))
        if shown.balance is not None:
            parts.append(stage_balance_text(shown.balance))
        elif args.no_profile and job.leaves_cuts_open and plan.has_movable_split_points:
            parts.append("stages cut by number of layers; without --no-profile, and in a run, measured times decide")
        if shown.choice is not None:
            parts.append(plan_report(shown.choice))
        if args.json:
            print(json.dumps(found), file=out, flush=True)
            return 0
        print("\n\n".join(part for part in parts if part), flush=True)
        if args.svg is not None:
            print(f"wrote {args.svg}")
    return 0


def check_numbers_of_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for a number of workers or MiB that none can have."""
    if args.workers is not None and args.workers < 1:
        raise ConfigError(f"--workers {args.workers}", cure="give 1 worker or more")
    if args.memory is not None and not 0 < args.memory < math.inf:
        raise ConfigError(f"--memory {args.memory:g}", cure="give what a worker has, in MiB")
