"""`raypar debug JOB`: runs the whole plan in one process and one thread, so that pdb works everywhere."""

from __future__ import annotations

import argparse
import bdb
import sys

from raypar.errors import ConfigError, NonFiniteError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar debug`."""
    parser.add_argument("job", help="job file (YAML)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c", help="override a job key")
    parser.add_argument("--steps", type=int, default=2, help="how many steps to run (default 2)")
    parser.add_argument(
        "--stop-at",
        metavar="STEP,STAGE,MICROBATCH",
        help="open pdb just before the instructions of this stage and microbatch in this step; all count from 0",
    )
    parser.add_argument("--order-seed", type=int, default=None, help="interleave the workers in another (seeded) order")


def run(args: argparse.Namespace) -> int:
    """Run the first steps of a job in this process; exit code 0, or 130 if the debugger was left."""
    from raypar.job.read_job import load_job
    from raypar.launch.chosen_plan import make_custom_schedule_builder
    from raypar.plan import MicrobatchRouting
    from raypar.plan.recomputation import apply_recompute_policy
    from raypar.user_code.user_code_errors import make_importable
    from raypar.worker.first_non_finite import FirstNonFinite
    from raypar.worker.process.torch_state_guard import TorchStateGuard
    from raypar.worker.run_in_one_process import OneProcessRun
    from raypar.worker.worker_assignments import make_layer_graph

    place = _place(args.stop_at)
    job = load_job(args.job, args.overrides)
    make_importable(job.source_dir)
    spec = job
    guard = TorchStateGuard(spec.threads)
    with guard.watching(f"the model function {spec.model.label}"):
        graph = make_layer_graph(spec)
    plan = apply_recompute_policy(job.to_plan(len(graph.layers)), job.recompute, [layer.name for layer in graph.layers])
    if place is not None:
        sizes = (min(args.steps, spec.steps), len(plan.stages), spec.microbatches)
        if not all(0 <= at < size for at, size in zip(place, sizes, strict=True)):
            raise ConfigError(
                f"--stop-at {args.stop_at} is never reached: {sizes[0]} steps, {sizes[1]} stages, {sizes[2]} microbatches",
                cure="all three count from 0; --steps runs more steps",
            )
    build = make_custom_schedule_builder(job)
    schedule = build(MicrobatchRouting(plan, spec.batching)) if build is not None else job.schedule_name
    print(f"{plan.world} workers, {len(plan.stages)} stages in one process; schedule {job.schedule_name}", flush=True)
    if (precision := spec.precision_in_words) is not None:
        print(precision, flush=True)

    def before(step: int, instruction: object) -> None:
        where = (step, getattr(instruction, "stage", None), getattr(instruction, "microbatch", None))
        if where == place:
            print(f"step {step}: about to run {instruction}; `up` leads to the interpreter's frame", file=sys.stderr)
            breakpoint()
            guard.accept_environment()  # pdb handles Ctrl-C itself

    with OneProcessRun(spec, plan, schedule, graph=graph, seed=args.order_seed, before_compute=before, guard=guard) as local:
        first = FirstNonFinite(stage for core in local.cores for stage in core.stages.values())
        for step in range(min(args.steps, spec.steps)):
            try:
                report = local.step(step)[0]
            except NonFiniteError as error:
                raise NonFiniteError(f"{error.what}\n  first not finite: {first.describe()}", error.cure) from error
            except bdb.BdbQuit:
                print(f"left the debugger in step {step}", file=sys.stderr)
                return 130
            while local.warnings:
                print(f"warning: {local.warnings.pop(0)}", file=sys.stderr, flush=True)
            print(f"step {step}: loss {report.loss:.6f}, gradient norm {report.norm:.6f}", flush=True)
            if report.skipped:
                print(f"  skipped; first not finite: {first.describe()}", flush=True)
                first.found = None
    return 0


def _place(text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    try:
        step, stage, microbatch = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--stop-at {text!r} is not STEP,STAGE,MICROBATCH", cure="for example --stop-at 3,1,0") from None
    return step, stage, microbatch
