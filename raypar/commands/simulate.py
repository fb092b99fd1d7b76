"""raypar simulate: the time, idle time and memory of a step of a schedule, and its picture.

Nothing runs: times are given (by default forward 1 ms and backward 2 ms), each for one microbatch through all chunks of one
worker. Lists are one value, or one per stage: `1 1 3 1` or `1,1,3,1`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from raypar.errors import ConfigError
from raypar.files.untrusted_files import SCHEDULE_BYTES, read_limited_text
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections, StagePlan
from raypar.plan.wording import count_noun
from raypar.schedule import registry
from raypar.schedule.instructions import Schedule
from raypar.schedule.simulate import SimulationCosts, Timeline, simulate_schedule

BYTES_PER_MS_OF_GBPS = 1e9 / 8 / 1e3
MOST_ROWS = 32
"""The most workers whose grid is printed."""

T = TypeVar("T", int, float)


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
    what.add_argument("--stages", type=_count, metavar="P", help="length of the pipeline in workers")
    what.add_argument("--microbatches", type=_count, metavar="M", help="the step's total, over all replicas")
    _list(what, "--replicas", _count, "workers per stage (default 1)")
    what.add_argument("--chunks", type=_count, metavar="V", help="stages hosted by each worker (default 2 where it matters)")
    _list(what, "--warmup", _count, "forwards before the first backward of a worker")
    what.add_argument("--recompute", action="store_true", default=None, help="make activations again before the backward")
    costs = parser.add_argument_group("costs")
    _list(costs, "--forward-ms", _amount, "forward (default 1)")
    _list(costs, "--backward-ms", _amount, "whole backward (default 2)")
    _list(costs, "--weight-ms", _amount, "the weight gradients' part of the backward (default half)")
    costs.add_argument("--latency-ms", type=_amount, default=0, metavar="MS", help="of a message between workers (default 0)")
    costs.add_argument("--bandwidth-gbps", type=_amount, metavar="G", help="Gbit/s from a worker to another (default endless)")
    _list(costs, "--activation-mb", _amount, "MB that leave a stage per microbatch, and as much for the gradient (default 0)")
    _list(costs, "--held-mb", _amount, "MB a worker keeps per microbatch from forward to backward (default --activation-mb)")
    results = parser.add_argument_group("results")
    results.add_argument("--json", action="store_true", help="print JSON instead of the text grid and table")
    results.add_argument("--svg", metavar="F", type=Path, help="draw a swimlane")
    results.add_argument("--csv", metavar="F", type=Path, help="write the schedule, to be changed and given to --schedule-file")
    results.add_argument("--trace", metavar="F", type=Path, help="write a Chrome trace, for ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    """Build and simulate the schedule, write the files asked for, print the report; exit code 0."""
    name, schedule, routing = _from_file(args) if args.schedule_file else _built(args)
    plan = routing.plan
    costs, crossing = _costs(args, plan)
    timeline = simulate_schedule(schedule, routing, crossing, costs)
    microbatches = count_noun(routing.microbatches.count, "microbatch", "microbatches")
    title = f"{name}: {count_noun(plan.positions, 'stage')}, {count_noun(plan.world, 'worker')}, {microbatches}"
    written = list(_write(args, title, schedule, timeline, crossing, costs))
    facts = _facts(name, routing, timeline)
    if args.json:
        print("{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()) + "\n}")
    else:
        print(_report(title, timeline, shutil.get_terminal_size((120, 24)).columns))
        for path in written:
            print(f"wrote {path}")
    return 0


# -- the schedule --------------------------------------------------------------------------------------------------------


def _built(args: argparse.Namespace) -> tuple[str, Schedule, MicrobatchRouting]:
    missing = [f"--{key}" for key in ("stages", "microbatches") if getattr(args, key) is None]
    if missing:
        raise ConfigError(f"raypar simulate needs {' and '.join(missing)}", cure="for example --stages 4 --microbatches 8")
    name = args.schedule or "1f1b"
    chunks = registry.resolve_chunks_per_worker(name, args.chunks)
    replicas = _per_stage("--replicas", args.replicas, args.stages, 1)
    recompute = range(args.stages * chunks) if args.recompute else ()
    plan = ParallelPlan.of(replicas, chunks=chunks, placement=registry.placement_of_schedule(name), recompute=recompute)
    routing = MicrobatchRouting(plan, Microbatches(args.microbatches, blocks=args.microbatches))
    warmup = _per_stage("--warmup", args.warmup, args.stages, 1) if args.warmup else None
    return name, registry.build_schedule(name, routing, warmup=warmup), routing


def _from_file(args: argparse.Namespace) -> tuple[str, Schedule, MicrobatchRouting]:
    """The schedule of a file, and the plan that it implies."""
    from raypar.schedule.schedule_csv import parse_schedule_csv
    from raypar.schedule.validate import validate_schedule

    for option in ("schedule", "chunks", "warmup", "recompute"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--schedule-file and --{option} exclude each other", cure=f"leave --{option} out")
    path = Path(args.schedule_file)
    cure = "name a schedule file; --csv F writes one"
    schedule = parse_schedule_csv(read_limited_text(path, follow=True, limit=SCHEDULE_BYTES, cure=cure))
    if args.replicas:
        given = [count for group in args.replicas for count in group]
        replicas = _per_stage("--replicas", args.replicas, args.stages or len(given), 1)
    else:
        replicas = _replicas_of(schedule)
    if args.stages not in (None, len(replicas)) or len(schedule) > sum(replicas):
        raise ConfigError(
            f"{path} has {len(schedule)} workers, in {len(replicas)} groups with {replicas} replicas",
            cure="make --stages and --replicas agree with it, or leave them out",
        )
    # Empty lines at the end of the file are workers too, when there are more replicas than microbatches.
    schedule += ((),) * (sum(replicas) - len(schedule))
    plan = _plan_of(schedule, replicas)
    count = args.microbatches or 1 + max(i.microbatch for order in schedule for i in order)
    routing = MicrobatchRouting(plan, Microbatches(count, blocks=count))
    validate_schedule(schedule, routing, StageConnections.chain(len(plan.stages)))
    return path.name, schedule, routing


def _replicas_of(schedule: Schedule) -> list[int]:
    """Replicas per position: neighbouring workers with the same stages are replicas of one position."""
    hosted = [frozenset(i.stage for i in order) for order in schedule]
    if frozenset() in hosted:
        raise ConfigError(
            f"line {hosted.index(frozenset()) + 1} of the schedule file is a worker without instructions",
            cure="say with --replicas how many workers each stage has, or remove the line",
        )
    return [len(list(group)) for _, group in itertools.groupby(hosted)]


def _plan_of(schedule: Schedule, replicas: Sequence[int]) -> ParallelPlan:
    """The plan of a schedule: the workers of a position host the stages that their lines name."""
    lines = iter(schedule)
    hosted = [sorted({i.stage for order in itertools.islice(lines, count) for i in order}) for count in replicas]
    position = {stage: place for place, stages in enumerate(hosted) for stage in stages}
    if sorted(position) != list(range(sum(map(len, hosted)))) or not all(hosted):
        raise ConfigError(
            f"the workers of the schedule file host stages {', '.join(map(str, hosted[:8]))}" + ", ..." * (len(hosted) > 8),
            cure="number the stages 0, 1, 2, ... without gaps, and give each to one worker, or to replicas in a row",
        )
    return ParallelPlan(tuple(StagePlan(s, s + 1, place, replicas[place]) for s, place in sorted(position.items())))


# -- costs ---------------------------------------------------------------------------------------------------------------


def _costs(args: argparse.Namespace, plan: ParallelPlan) -> tuple[SimulationCosts, StageConnections]:
    """Costs per stage from costs per worker: a worker's chunks share its times and memory equally."""
    p = plan.positions
    forward = _per_stage("--forward-ms", args.forward_ms, p, 1)
    backward = _per_stage("--backward-ms", args.backward_ms, p, 2)
    weight = _per_stage("--weight-ms", args.weight_ms, p, 0) if args.weight_ms else [b / 2 for b in backward]
    for stage, (whole, part) in enumerate(zip(backward, weight, strict=True)):
        if part > whole:
            raise ConfigError(
                f"stage {stage}: --weight-ms {part:g} is more than --backward-ms {whole:g}",
                cure="the first is part of the second",
            )
    if args.bandwidth_gbps == 0:
        raise ConfigError("--bandwidth-gbps 0 would never deliver anything", cure="leave it out for links without limit")
    sent = _per_stage("--activation-mb", args.activation_mb, p, 0)
    held = _per_stage("--held-mb", args.held_mb, p, 0) if args.held_mb else sent
    at = [stage.position for stage in plan.stages]
    chunks = [at.count(position) for position in at]

    def share(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[position] / v for position, v in zip(at, chunks, strict=True))

    crossing = StageConnections.chain(len(at), [round(sent[position] * 1e6) for position in at[:-1]])
    costs = SimulationCosts(
        share(forward),
        share([whole - part for whole, part in zip(backward, weight, strict=True)]),
        share(weight),
        latency_ms=args.latency_ms,
        bandwidth_bytes_per_ms=args.bandwidth_gbps * BYTES_PER_MS_OF_GBPS if args.bandwidth_gbps else math.inf,
        activation_bytes=tuple(round(mb * 1e6) for mb in share(held)) if any(held) else (),
    )
    return costs, crossing


def _per_stage(option: str, values: list[list[T]] | None, stages: int, default: T) -> list[T]:
    """The values of an option, one per stage; a single value stands for all stages."""
    flat = [value for group in values or () for value in group] or [default]
    if len(flat) not in (1, stages):
        raise ConfigError(f"{option} has {len(flat)} values for {stages} stages", cure=f"give 1 or {stages}")
    return flat * stages if len(flat) == 1 else flat


def _list(group: argparse._ArgumentGroup, option: str, parse: Callable[[str], float], text: str) -> None:
    def values(word: str) -> list[float]:
        return [parse(part) for part in word.split(",") if part]

    group.add_argument(option, nargs="+", type=values, metavar="X", help=text)


def _count(word: str) -> int:
    return _number(word, int, 1)


def _amount(word: str) -> float:
    return _number(word, float, 0)


def _number(word: str, kind: type[T], least: int) -> T:
    try:
        value = kind(word)
    except ValueError:
        value = None
    if value is None or not least <= value < math.inf:
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{word!r} is not {what} of at least {least}")
    return value


# -- results -------------------------------------------------------------------------------------------------------------


def _write(
    args: argparse.Namespace,
    title: str,
    schedule: Schedule,
    timeline: Timeline,
    crossing: StageConnections,
    costs: SimulationCosts,
) -> Iterable[Path]:
    """Write the files that were asked for; returns their paths. Raises `ConfigError` for one that cannot be written."""
    from raypar.files.atomic_write import write_text_atomically

    for option in ("csv", "svg", "trace"):
        path: Path | None = getattr(args, option)
        if path is None:
            continue
        if option == "csv":
            from raypar.schedule.schedule_csv import format_schedule_csv

            write_text_atomically(path, format_schedule_csv(schedule))
        elif option == "svg":
            from raypar.draw.swimlane_svg import swimlane_svg
            from raypar.schedule.data_flow import message_routes

            timed_links = costs.latency_ms or costs.bandwidth_bytes_per_ms < math.inf
            routes = message_routes(crossing) if timed_links else []
            write_text_atomically(path, swimlane_svg(timeline, title=title, routes=routes))
        else:
            from raypar.draw.chrome_trace import chrome_trace

            write_text_atomically(path, json.dumps(chrome_trace(timeline)))
        yield path


def _facts(name: str, routing: MicrobatchRouting, timeline: Timeline) -> dict[str, Any]:
    plan = routing.plan
    firsts = [next(s for s in plan.stages if s.position == p) for p in range(plan.positions)]
    facts: dict[str, Any] = {
        "schedule": name,
        "stages": plan.positions,
        "replicas": [s.replicas for s in firsts],
        "chunks": len(plan.stages) // plan.positions,
        "workers": plan.world,
        "microbatches": routing.microbatches.count,
        "makespan_ms": _tidy(timeline.makespan_ms),
        "bubble_of_ideal": timeline.bubble_of_ideal,
        "bubble_of_total": timeline.bubble_of_total,
        "utilization": timeline.utilization,
        "busy_ms": [_tidy(x) for x in timeline.busy_ms],
        "peak_activations": [_tidy(x) for x in timeline.peak_activations],
    }
    if timeline.peak_bytes is not None:
        facts["peak_activation_bytes"] = list(timeline.peak_bytes)
    return facts


def _tidy(value: float) -> float:
    """The value as an int if it is whole, without the rounding noise of sums of thirds or tenths."""
    near = round(value, 6)
    if abs(near - value) > 1e-9:
        return value
    return int(near) if near == int(near) else near


def _report(title: str, timeline: Timeline, columns: int) -> str:
    """The printed report: title, grid if it fits, table."""
    from raypar.draw.text_grid import format_activations, format_milliseconds

    lines = [title, ""]
    grid = timeline_text_for_width(timeline, columns)
    lines += [grid, ""] if grid else []
    rows = [
        ("makespan", format_milliseconds(timeline.makespan_ms)),
        ("bubble", f"{timeline.bubble_of_total:.1%} of total, {timeline.bubble_of_ideal:.1%} of ideal"),
        ("utilization", f"{timeline.utilization:.1%}"),
        ("peak activations", f"{_values([format_activations(n) for n in timeline.peak_activations])} microbatches, by worker"),
    ]
    if timeline.peak_bytes is not None:
        rows.append(
            ("peak memory", f"{_values([f'{b / 1e6:,.4g}' for b in timeline.peak_bytes])} MB of activations, by worker")
        )
    width = max(len(key) for key, _ in rows)
    lines += [f"{key:<{width}}  {value}" for key, value in rows]
    if not grid:
        lines.append(f"{'picture':<{width}}  too large for this terminal; --svg F draws it")
    return "\n".join(lines)


def timeline_text_for_width(timeline: Timeline, columns: int) -> str | None:
    """The step as a text grid: exact if that fits the terminal, else squeezed, else (an instruction has no column) None."""
    from raypar.draw.text_grid import text_grid

    if len(timeline.spans) > MOST_ROWS or max(map(len, timeline.spans)) > columns:
        return None
    exact = text_grid(timeline)
    if max(map(len, exact.splitlines())) <= columns:
        return exact
    shortest = min((s.end_ms - s.start_ms for row in timeline.spans for s in row if s.end_ms > s.start_ms), default=0)
    room = columns - 32
    return text_grid(timeline, columns) if timeline.makespan_ms <= room * shortest else None


def _values(shown: Sequence[str], most: int = 16) -> str:
    """The values as text; of many the first ones and the last."""
    return " ".join(shown if len(shown) <= most else [*shown[: most // 2], "...", shown[-1]])
