"""The step that `raypar simulate` simulates: a schedule with its plan, and the costs of its parts, from the user's options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from raypar.errors import ConfigError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections, StagePlan
from raypar.plan.stage_plan import consecutive_grids
from raypar.plan.wording import count_noun
from raypar.schedule import registry
from raypar.schedule.data_flow import MessageRoute, message_routes
from raypar.schedule.instructions import Schedule
from raypar.schedule.schedule_csv import parse_schedule_csv
from raypar.schedule.simulate import SimulationCosts
from raypar.schedule.validate import validate_schedule

BYTES_PER_MS_OF_GBPS = 1e9 / 8 / 1e3

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class SimulationOptions:
    """The options of `raypar simulate` that say what is simulated, as its help has them; None: not given.

    Lists are one value, or one per stage, in groups as the user wrote them.
    """

    schedule: str | None
    schedule_file: str | None
    stages: int | None
    microbatches: int | None
    replicas: Sequence[Sequence[int]] | None
    chunks: int | None
    warmup: Sequence[Sequence[int]] | None
    recompute: bool | None
    forward_ms: Sequence[Sequence[float]] | None
    backward_ms: Sequence[Sequence[float]] | None
    weight_ms: Sequence[Sequence[float]] | None
    latency_ms: float
    bandwidth_gbps: float | None
    activation_mb: Sequence[Sequence[float]] | None
    held_mb: Sequence[Sequence[float]] | None


@dataclass(frozen=True)
class SimulatedStep:
    """A step to be simulated."""

    name: str
    """The schedule's name, or that of its file."""
    schedule: Schedule
    routing: MicrobatchRouting
    crossing: StageConnections
    costs: SimulationCosts

    @property
    def title(self) -> str:
        """The step in words: `1f1b: 4 stages, 4 workers, 8 microbatches`."""
        plan, microbatches = self.routing.plan, count_noun(self.routing.microbatches.count, "microbatch", "microbatches")
        return f"{self.name}: {count_noun(len(plan.grids), 'stage')}, {count_noun(plan.world, 'worker')}, {microbatches}"

    @property
    def timed_routes(self) -> list[MessageRoute]:
        """The routes of messages, for drawings; none if messages take no time."""
        takes_time = self.costs.latency_ms or self.costs.bandwidth_bytes_per_ms < math.inf
        return message_routes(self.crossing) if takes_time else []


def make_simulated_step(options: SimulationOptions, read_text: Callable[[Path], str]) -> SimulatedStep:
    """The step of the options; `read_text` reads a schedule's file. Raises `ConfigError` for options that do not agree."""
    path = Path(options.schedule_file) if options.schedule_file else None
    name, schedule, routing = _parse_schedule(options, path, read_text) if path else _build_named_schedule(options)
    costs, crossing = _costs(options, routing.plan)
    return SimulatedStep(name, schedule, routing, crossing, costs)


def _build_named_schedule(options: SimulationOptions) -> tuple[str, Schedule, MicrobatchRouting]:
    """The schedule of a name, and the plan that the options describe."""
    missing = [f"--{key}" for key in ("stages", "microbatches") if getattr(options, key) is None]
    if options.stages is None or options.microbatches is None:
        raise ConfigError(f"raypar simulate needs {' and '.join(missing)}", cure="for example --stages 4 --microbatches 8")
    name = options.schedule or "1f1b"
    chunks = registry.resolve_chunks_per_worker(name, options.chunks)
    replicas = _per_stage("--replicas", options.replicas, options.stages, 1)
    recompute = range(options.stages * chunks) if options.recompute else ()
    plan = ParallelPlan.of(replicas, chunks=chunks, placement=registry.placement_of_schedule(name), recompute=recompute)
    routing = MicrobatchRouting(plan, Microbatches(options.microbatches, blocks=options.microbatches))
    warmup = _per_stage("--warmup", options.warmup, options.stages, 1) if options.warmup else None
    return name, registry.build_schedule(name, routing, warmup=warmup), routing


def _parse_schedule(
    options: SimulationOptions, path: Path, read_text: Callable[[Path], str]
) -> tuple[str, Schedule, MicrobatchRouting]:
    """The schedule of a file, and the plan that it implies."""
    for option in ("schedule", "chunks", "warmup", "recompute"):
        if getattr(options, option) is not None:
            raise ConfigError(f"--schedule-file and --{option} exclude each other", cure=f"leave --{option} out")
    schedule = parse_schedule_csv(read_text(path))
    if options.replicas:
        given = [count for group in options.replicas for count in group]
        replicas = _per_stage("--replicas", options.replicas, options.stages or len(given), 1)
    else:
        replicas = _replicas_of(schedule)
    if options.stages not in (None, len(replicas)) or len(schedule) > sum(replicas):
        raise ConfigError(
            f"{path} has {len(schedule)} workers, in {len(replicas)} groups with {replicas} replicas",
            cure="make --stages and --replicas agree with it, or leave them out",
        )
    # Empty lines at the end of the file are workers too, when there are more replicas than microbatches.
    schedule += ((),) * (sum(replicas) - len(schedule))
    plan = _plan_of(schedule, replicas)
    count = options.microbatches or 1 + max(i.microbatch for order in schedule for i in order)
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
    grids = consecutive_grids((count, 1) for count in replicas)
    return ParallelPlan(tuple(StagePlan(s, s + 1, grids[place]) for s, place in sorted(position.items())))


def _costs(options: SimulationOptions, plan: ParallelPlan) -> tuple[SimulationCosts, StageConnections]:
    """Costs per stage from costs per worker: a worker's chunks share its times and memory equally."""
    p = len(plan.grids)
    forward = _per_stage("--forward-ms", options.forward_ms, p, 1)
    backward = _per_stage("--backward-ms", options.backward_ms, p, 2)
    weight = _per_stage("--weight-ms", options.weight_ms, p, 0) if options.weight_ms else [b / 2 for b in backward]
    for stage, (whole, part) in enumerate(zip(backward, weight, strict=True)):
        if part > whole:
            raise ConfigError(
                f"stage {stage}: --weight-ms {part:g} is more than --backward-ms {whole:g}",
                cure="the first is part of the second",
            )
    if options.bandwidth_gbps == 0:
        raise ConfigError("--bandwidth-gbps 0 would never deliver anything", cure="leave it out for links without limit")
    sent = _per_stage("--activation-mb", options.activation_mb, p, 0)
    held = _per_stage("--held-mb", options.held_mb, p, 0) if options.held_mb else sent
    at = plan.grid_of_stage
    chunks = [at.count(position) for position in at]

    def share(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[position] / v for position, v in zip(at, chunks, strict=True))

    crossing = StageConnections.chain(len(at), [round(sent[position] * 1e6) for position in at[:-1]])
    costs = SimulationCosts(
        share(forward),
        share([whole - part for whole, part in zip(backward, weight, strict=True)]),
        share(weight),
        latency_ms=options.latency_ms,
        bandwidth_bytes_per_ms=options.bandwidth_gbps * BYTES_PER_MS_OF_GBPS if options.bandwidth_gbps else math.inf,
        activation_bytes=tuple(round(mb * 1e6) for mb in share(held)) if any(held) else (),
    )
    return costs, crossing


def _per_stage(option: str, values: Sequence[Sequence[T]] | None, stages: int, default: T) -> list[T]:
    """The values of an option, one per stage; a single value stands for all stages."""
    flat = [value for group in values or () for value in group] or [default]
    if len(flat) not in (1, stages):
        raise ConfigError(f"{option} has {len(flat)} values for {stages} stages", cure=f"give 1 or {stages}")
    return flat * stages if len(flat) == 1 else flat
