"""The section `plan` of a job: which workers hold which layers, and in which order they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, PrivateAttr, model_validator

from raypar.errors import ConfigError, PlanError
from raypar.files.printable_text import shorten
from raypar.job.key import BITS_OF_SHARDS, CLIENT, WORKERS
from raypar.job.section import MAX_WORKERS, LocalFolder, LocalFolderOrHost, Parts, PathText, Section, Workers
from raypar.plan.gradient_scatter import GradientRoute
from raypar.plan.offloading import OffloadPolicy
from raypar.plan.parallel_plan import ParallelPlan, describe_mesh
from raypar.plan.placements import LayerPlacement, check_placements, plan_of_placements
from raypar.plan.recomputation import RecomputePolicy
from raypar.plan.stage_plan import GATHER_SPANS, GATHERS_FROM, GatherSpan, WorkerGrid
from raypar.plan.wording import count_noun

T = TypeVar("T")


def _counts(value: T) -> T | tuple[int, ...]:
    """`value`, if it is one count or a list with one count per stage. Raises `ValueError`."""
    each = value if isinstance(value, (list, tuple)) and value else [value]
    if any(not isinstance(count, int) or isinstance(count, bool) or count < 1 for count in each):
        raise ValueError("a number >= 1, or a list with one per stage")
    if sum(each) > MAX_WORKERS:
        raise ValueError(f"at most {MAX_WORKERS:,} in all")
    return tuple(value) if isinstance(value, (list, tuple)) else value


MOST_ZERO = 3
"""The highest ZeRO stage."""


def _zero_levels(value: T) -> T | tuple[int, ...]:
    """`value`, if it is `auto`, a ZeRO stage or a list with one per stage of the pipeline. Raises `ValueError`."""
    if value == "auto":
        return value
    each = value if isinstance(value, (list, tuple)) and value else [value]
    if any(type(level) is not int or not 0 <= level <= MOST_ZERO for level in each):
        raise ValueError("0, 1, 2 or 3, a list with one per stage, or auto")
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _gather_spans(value: T) -> T | tuple[str, ...]:
    """`value`, if it is a span for which parameters are whole, or a list with one per stage of the pipeline. Raises
    `ValueError`."""
    each = value if isinstance(value, (list, tuple)) and value else [value]
    if any(not isinstance(span, str) or span not in GATHER_SPANS for span in each):
        raise ValueError("step, microbatch or layer, or a list with one per stage")
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _recompute_policy(value: T) -> T | tuple[str, ...]:
    """`value`, if it is `auto`, `none`, `full` or a list of patterns. Raises `ValueError`."""
    if value in ("auto", "none", "full"):
        return value
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(pattern, str) and pattern for pattern in value):
        raise ValueError('none, full, auto, or a list of patterns of layer names, for example ["block*"]')
    return tuple(value)


def _offload_policy(value: T) -> T | tuple[str, ...]:
    """`value`, if it is None, `full` or a list of patterns. Raises `ValueError`."""
    if value is None or value == "full":
        return value
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(pattern, str) and pattern for pattern in value):
        raise ValueError('full, or a list of patterns of layer names, for example ["block*"]')
    return tuple(value)


def _layer_patterns(value: T) -> T | tuple[str, ...]:
    """`value`, a pattern or a list of patterns, as a tuple. Raises `ValueError`."""
    each = (value,) if isinstance(value, str) else value
    if not isinstance(each, (list, tuple)) or not each or not all(isinstance(pattern, str) and pattern for pattern in each):
        raise ValueError('a pattern of layer names, or a list of patterns, for example "conv*"')
    return tuple(each)


def _worker_grid(value: T) -> T | WorkerGrid:
    """`value`, a list of lists of worker numbers, as tuples. Raises `ValueError`."""
    rows = list(value) if isinstance(value, (list, tuple)) else []
    cells = [cell for row in rows if isinstance(row, (list, tuple)) for cell in row]
    whole = rows and all(isinstance(row, (list, tuple)) and row for row in rows)
    if not whole or not all(type(cell) is int and 0 <= cell < MAX_WORKERS for cell in cells):
        raise ValueError("a list for each replica, with the number of a worker for each of its shards: [[0], [1]], or [[0, 1]]")
    return tuple(map(tuple, rows))


def _is_said_by_counts(plan: ParallelPlan, schedule: str) -> bool:
    """Whether replicas and shards by position, and the schedule's order of stages, say which worker has which layers."""
    from raypar.schedule.registry import placement_of_schedule

    return len(plan.stages) % len(plan.grids) == 0 and plan.lies_in(placement_of_schedule(schedule))


Counts = Annotated[Any, BeforeValidator(_counts)]
"""One count (int), or one per stage (tuple of int)."""


DividedOrWhole = Literal["shards", "whole"]
"""What becomes of a dimension of layers: it is divided over the shards, or whole on each of them."""


class LayersOnWorkers(Section):
    """Consecutive layers, and the workers that compute them."""

    layers: Annotated[Any, BeforeValidator(_layer_patterns), CLIENT]
    """A pattern of layer names, or a list of patterns. A layer that no placement names joins the layer before it."""
    workers: Annotated[Any, BeforeValidator(_worker_grid), CLIENT]
    """The numbers of the workers: a list for each replica, with a number for each of its shards. `[[0], [1]]`: two replicas,
    `[[0, 1]]`: two shards. A worker may be in several placements."""
    share: Annotated[tuple[PositiveInt, ...], Field(strict=False), CLIENT] = ()
    """How many of the `virtual_replicas` blocks each replica computes; without it all nearly as many."""

    def __str__(self) -> str:
        return f"{', '.join(self.layers)}: {[list(replica) for replica in self.workers]}"

    def to_placement(self) -> LayerPlacement:
        """The placement."""
        return LayerPlacement(self.layers, self.workers, self.share)


class PlanConfig(Section):
    """Which workers hold which layers, and in which order they compute."""

    stages: Annotated[Workers, CLIENT] = 1
    """Pipeline parallel: how many workers stand one behind the other, each with its part of the layers (with `chunks`: with
    several parts)."""
    replicas: Annotated[Counts, CLIENT] = 1
    """Data parallel: how many workers hold the same layers and compute different microbatches; one number, or a list with one
    per stage."""
    shards: Annotated[Counts, CLIENT] = 1
    """Tensor parallel: over how many workers the tensors of each layer are cut (this is not ZeRO or FSDP); one number, or a
    list with one per stage."""
    placements: Annotated[tuple[LayersOnWorkers, ...], Field(strict=False), CLIENT] = ()
    """Which workers compute which layers, in place of `stages`, `replicas`, `shards` and `cuts`: a stage for each entry. So the
    same workers may be replicas of some layers and shards of others, and branches of a model may run side by side."""
    schedule: Annotated[str, CLIENT] = "1f1b"
    """The order in which a worker computes forwards and backwards; `afab` is another name of `gpipe`. With `placements` the
    default is `list`."""
    chunks: Annotated[Parts | None, CLIENT] = None
    """Stages of each worker (virtual pipeline stages); None: 2 with `interleaved` and `zb-v`, else 1."""
    cuts: Annotated[tuple[PositiveInt, ...] | None, Field(strict=False), CLIENT] = None
    """Split points: the numbers of the first layers of stages 1, 2, ...; None: layers are timed, and divided so that the
    predicted step is shortest. Results do not depend on it."""
    schedule_file: Annotated[PathText | None, CLIENT] = None
    """A file with a schedule of your own, in place of `schedule`: a line for each worker, as `raypar simulate --csv` writes
    it."""
    warmup: Annotated[tuple[NonNegativeInt, ...] | None, Field(strict=False), CLIENT] = None
    """For each stage: how many forwards a worker computes before its first backward; None: as the schedule has it."""
    styles: Annotated[dict[str, str], BITS_OF_SHARDS] = {}
    """How layers are cut over shards: pattern of layer names -> style, such as `"block*.up": column`. The first match counts;
    for other layers the style is inferred from what they compute and from their names."""
    layout: Annotated[dict[str, DividedOrWhole], BITS_OF_SHARDS] = {}
    """How a whole model is cut over shards, by the names of dimensions: `{heads: shards, vocabulary: shards}`. Layers are cut
    along the dimensions that it names, and no others; what `styles` says comes first. Without it all layers are cut that raypar
    finds. Dimensions: `heads`, `features`, `vocabulary`, `hidden`, `samples`; of convolutions `channels`,
    `height`, `width`, `depth`, `length`."""
    sequence_parallel: Annotated[bool, BITS_OF_SHARDS] = False
    """Whether values [batch, sequence, features] between sharded layers are cut along the sequence (sequence parallel)."""

    zero: Annotated[Any, BeforeValidator(_zero_levels), CLIENT] = 0
    """ZeRO: which state the replicas of a stage divide. 0: each has everything. 1: each has a part of the optimizer's state
    (and of float32 masters), steps it, and gets the other parameters from their owners. 2: each also frees the gradients of
    the others' parts once they are reduced. 3: each also frees the others' parameters after their last use in a step, and gets
    them again before the next, frozen ones too. One number, or a list with one per stage; `auto`: of the ZeRO
    stages, with every `gather`, and `gradients` and `recompute` where these are `auto`, what is predicted to take least time of
    all with which the memory sheet of the largest worker fits into its memory. Results do not depend on it."""
    zero_holders: Annotated[int, Field(ge=1, le=2), CLIENT] = 1
    """How many replicas hold, and step, each part of the state that replicas divide (`zero`). 1: if its only holder dies, all
    go back to the mirror's last copy. 2: the other one goes on, as without `zero`, for twice the memory of each part; with
    two replicas each holds everything. Results do not depend on it."""
    gather: Annotated[Any, BeforeValidator(_gather_spans), CLIENT] = "step"
    """How long a worker has whole parameters that replicas divide (`zero: 3`). `step`: from their first use in a step to the
    last. `microbatch`: while it computes in their stage, so that a worker with several stages (`chunks`) has two of them at
    most; with one stage that is the step. `layer`: two layers of a stage at a time, of which one computes and one arrives. Each
    gather sends parameters again. One word, or a list with one per stage. Results do not depend on it."""
    gradients: Annotated[Literal["auto", "fold", "scatter"], CLIENT] = "auto"
    """How gradients of replicas are added up. `fold`: a replica has consecutive microbatches, adds their gradients up, and
    sends the sums. `scatter`: replicas take microbatches in turn, and each gradient goes to its owners as it leaves a layer, so
    that none is ever whole (with `zero: 0` their totals are, at the end of a step): less memory, and microbatches / replicas
    times the bytes sent. `auto`: `scatter` where it alone fits into workers' memory, or is predicted to be
    faster, which the run then says; `fold` on GPUs. Results do not depend on it."""
    reduction_buffer_mib: Annotated[PositiveInt, WORKERS] = 8
    """Memory of a stage with replicas, in MiB, for gradients that are on their way between these. Gradients that find no room
    wait where they are; with `gradients: scatter` their replica waits. Results do not depend on it."""
    optimizer_in: Annotated[LocalFolder | None, WORKERS] = None
    """A folder on a local disk of each worker, in whose files the optimizer's state lies, with float32 masters and averages of
    the weights (offloading); None: in memory. It is read ahead while parameters are stepped, and gone when the worker
    ends. For optimizers that take each parameter by itself; not on GPUs. Results do not depend on it."""
    recompute: Annotated[Any, BeforeValidator(_recompute_policy), CLIENT] = "auto"
    """Activation checkpointing: layers whose activations are dropped after the forward and computed again for the backward, for
    less memory and more time, with the same results. `none`, `full`, or a list of patterns of layer names; `auto`: none, unless
    with `zero: auto` that is what makes the plan fit in the least time."""

    offload: Annotated[Any, BeforeValidator(_offload_policy), CLIENT] = None
    """Layers whose activations are offloaded to `activations_in`: `full`, or a list of patterns of layer names; None: with
    `activations_in` all layers that are not recomputed, without it none."""
    activations_in: Annotated[LocalFolderOrHost | None, WORKERS] = None
    """A folder on a local disk of each worker, to whose files the activations of layers are written after the forward, and from
    which the backward reads them, one layer ahead; `host`, on GPUs: the memory of the worker's host; None: they lie in memory.
    The files are gone when the worker ends. Results do not depend on it."""

    @model_validator(mode="before")
    @classmethod
    def _schedule_of_placements(cls, tree: T) -> T | dict[str, Any]:
        """`tree` with the default schedule of placements."""
        return {"schedule": "list", **tree} if isinstance(tree, Mapping) and tree.get("placements") else tree

    @property
    def replicas_per_stage(self) -> tuple[int, ...]:
        """Number of replicas of each worker position; of each stage of `placements`."""
        if (grids := self._grids) is not None:
            return tuple(len(grid) for grid in grids)
        return self.replicas if isinstance(self.replicas, tuple) else (self.replicas,) * self.stages

    @property
    def shards_per_stage(self) -> tuple[int, ...]:
        """Number of shards of each worker position; of each stage of `placements`."""
        if (grids := self._grids) is not None:
            return tuple(len(grid[0]) for grid in grids)
        return self.shards if isinstance(self.shards, tuple) else (self.shards,) * self.stages

    @property
    def given_zero(self) -> int | tuple[int, ...]:
        """The ZeRO stages that the section gives; 0 until the planner has chosen."""
        return 0 if self.zero == "auto" else self.zero

    @property
    def given_gather(self) -> GatherSpan | tuple[GatherSpan, ...]:
        """How long parameters that replicas divide are whole, as the section gives it."""
        given: GatherSpan | tuple[GatherSpan, ...] = self.gather
        return given

    @property
    def given_recompute(self) -> RecomputePolicy:
        """Which layers the section has recomputed; `none` until the planner has chosen."""
        found: RecomputePolicy = "none" if self.recompute == "auto" else self.recompute
        return found

    @property
    def given_gradients(self) -> GradientRoute:
        """The way of gradients that the section gives; `fold` until the planner has chosen."""
        return "fold" if self.gradients == "auto" else self.gradients

    @property
    def offload_policy(self) -> OffloadPolicy:
        """Which layers are offloaded."""
        found: OffloadPolicy = "none" if self.activations_in is None else self.offload or "full"
        return found

    @property
    def workers(self) -> int:
        """Number of workers of the plan."""
        if (grids := self._grids) is not None:
            return 1 + max(worker for grid in grids for replica in grid for worker in replica)
        return sum(r * s for r, s in zip(self.replicas_per_stage, self.shards_per_stage, strict=True))

    @property
    def _grids(self) -> list[WorkerGrid] | None:
        """By stage: its grid of workers, where the section gives them."""
        plan = self._parallel_plan
        if plan is not None and not _is_said_by_counts(plan, self.schedule):
            return [stage.workers for stage in plan.stages]
        return [each.workers for each in self.placements] or None

    _parallel_plan: ParallelPlan | None = PrivateAttr(default=None)
    """The `ParallelPlan` that the section was made from, if it was."""

    @property
    def unwritable_parts(self) -> list[str]:
        """A line for each part of the section that no job file can express."""
        plan = self._parallel_plan
        if plan is None:
            return []
        found = []
        if not _is_said_by_counts(plan, self.schedule):
            found.append("plan says of each stage which workers it has: a job file has plan.placements, with names of layers")
        if any(stage.division and len(set(stage.division)) > 1 for stage in plan.stages):
            found.append(
                "plan gives shards unequal numbers of virtual shards: a job file has virtual_shards, which all share evenly"
            )
        if plan.recompute and self.recompute != "full":
            numbers = list(plan.recompute)
            found.append(f"plan.recompute has numbers of layers, {numbers}: a job file has patterns of their names")
        return found

    def describe(self) -> str:
        """The plan's shape as text: `2 stages x 2 replicas`."""
        return describe_mesh(self.replicas_per_stage, self.shards_per_stage)

    @model_validator(mode="after")
    def _fits(self) -> PlanConfig:
        from raypar.schedule.registry import resolve_chunks_per_worker

        if self.zero_holders > 1 and not any(self.zero if isinstance(self.zero, tuple) else (self.zero,)):
            raise PlanError(
                f"plan.zero_holders is {self.zero_holders}, and plan.zero is 0: each replica holds all state of its stage",
                cure="set plan.zero: 1, or leave plan.zero_holders out",
            )
        self._check_offload()
        if self.placements:
            self._check_placements()
            self._check_gather()
            return self
        for key in ("replicas", "shards", "warmup", "zero", "gather"):
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) != self.stages:
                raise PlanError(
                    f"plan.{key} has {len(value)} entries for {self.stages} stages", cure="give one value, or one per stage"
                )
        self._check_gather()
        chunks = resolve_chunks_per_worker(self.schedule, self.chunks)
        if self.cuts is not None and len(self.cuts) != self.stages * chunks - 1:
            raise PlanError(
                f"plan.cuts has {len(self.cuts)} cuts for {self.stages * chunks} stages"
                + (f" ({self.stages} workers x {chunks} chunks)" if chunks > 1 else ""),
                cure=f"give {self.stages * chunks - 1}: the first layer of stages 1, 2, ...",
            )
        if self.schedule_file is not None and not Path(self.schedule_file).is_file():
            raise ConfigError(
                f"plan.schedule_file {shorten(self.schedule_file)} does not exist, or is no regular file",
                cure="give the path of a schedule file",
            )
        return self

    def _check_gather(self) -> None:
        """Raise `PlanError` where parameters shall be gathered again that no replicas divide."""
        given, levels = self.given_gather, self.given_zero
        count = max([len(each) for each in (given, levels) if isinstance(each, tuple)], default=1)
        spans = given if isinstance(given, tuple) else (given,) * count
        zeros = levels if isinstance(levels, tuple) else (levels,) * count
        pairs = list(zip(spans, zeros, strict=False))
        wrong = [index for index, (span, zero) in enumerate(pairs) if span != "step" and zero < GATHERS_FROM]
        if not wrong:
            return
        span, zero = pairs[wrong[0]]
        if self.zero == "auto":
            raise PlanError(
                f"plan.gather is {span}, and plan.zero is auto, which chooses how long parameters are whole, too",
                cure=f"leave plan.gather out, or set plan.zero: {GATHERS_FROM}",
            )
        of_stage = f" of stage {wrong[0]}" if count > 1 else ""
        kept = ", ".join("step" if index in wrong else each for index, (each, _) in enumerate(pairs))
        raise PlanError(
            f"plan.gather: {span} needs plan.zero: {GATHERS_FROM}, and plan.zero{of_stage} is {zero}: each replica has whole "
            "parameters",
            cure=f"set plan.zero: {GATHERS_FROM}, or " + (f"plan.gather: [{kept}]" if count > 1 else "leave plan.gather out"),
        )

    def _check_offload(self) -> None:
        """Raise `PlanError` for layers that are offloaded to no place, and where none are left to offload."""
        if self.offload is not None and self.activations_in is None:
            raise PlanError(
                "plan.offload names layers whose activations are offloaded, and plan.activations_in does not say where to",
                cure="set plan.activations_in: FOLDER, on a local disk of workers (host on GPUs), or leave plan.offload out",
            )
        if self.activations_in is not None and self.recompute == "full":
            raise PlanError(
                "plan.recompute: full drops all activations, and plan.activations_in is where some would be offloaded to",
                cure="name the layers to recompute: all others are offloaded; or leave one of the two keys out",
            )

    def _check_placements(self) -> None:
        """Raise `PlanError` for keys that placements are given in place of, and for grids that no model makes right."""
        from raypar.schedule.registry import check_plan_fits

        stood_for = [
            key
            for key in ("stages", "replicas", "shards", "cuts", "chunks", "warmup", "schedule_file")
            if getattr(self, key) != type(self).model_fields[key].default
        ]
        if stood_for:
            raise PlanError(
                f"plan.placements and plan.{stood_for[0]} exclude each other",
                cure=f"leave plan.{stood_for[0]} out: placements say which workers compute which layers",
            )
        for key, noun in (("zero", "number"), ("gather", "word")):
            if isinstance(value := getattr(self, key), tuple):
                raise PlanError(
                    f"plan.{key} has {len(value)} entries, and plan.placements have no positions to count by",
                    cure=f"give plan.{key} one {noun}",
                )
        check_plan_fits(self.schedule, check_placements([each.to_placement() for each in self.placements]))

    def check_shares(self, blocks: int, virtual_shards: int) -> None:
        """Raise `PlanError` for placements whose shares are not of all blocks, and for shards that do not divide the job's
        virtual shards. A plan from Python may divide them unevenly. `virtual_shards`: 0 if the job gives none."""
        for index, each in enumerate(self.placements):
            given = sum(each.share)
            if each.share and given != blocks:
                raise PlanError(
                    f"plan.placements[{index}].share adds up to {count_noun(given, 'block')}, and a step has {blocks}",
                    cure=f"give numbers that add up to {blocks}, or set virtual_replicas, the number of blocks",
                )
        for index, shards in enumerate(self.shards_per_stage if virtual_shards and self._parallel_plan is None else ()):
            if virtual_shards % shards:
                where = f"plan.placements[{index}]" if self.placements else f"stage {index}"
                raise PlanError(
                    f"virtual_shards is {virtual_shards}, and {where} has {count_noun(shards, 'shard')}",
                    cure=f"set virtual_shards to a multiple of {shards}, or its shards to a divisor of {virtual_shards}",
                )

    @classmethod
    def of_plan(cls, plan: ParallelPlan, schedule: str, **more: Any) -> PlanConfig:
        """The section for a whole plan, with `more` keys. Raises `PlanError` if `schedule` has the stages elsewhere, and
        `ScheduleError` if it is for workers with one role, and some have several."""
        from raypar.schedule.registry import check_plan_fits, find_schedule

        levels = plan.zero_levels
        more.setdefault("zero", levels[0] if len(set(levels)) == 1 else levels)
        more.setdefault("zero_holders", plan.zero_holders if any(levels) else 1)
        spans = plan.gather_spans
        more.setdefault("gather", spans[0] if len(set(spans)) == 1 else spans)
        more.setdefault("gradients", plan.gradients)
        if not plan.one_role_each or (find_schedule(schedule).takes_any_plan and not _is_said_by_counts(plan, schedule)):
            check_plan_fits(schedule, plan)
            made = cls(schedule=schedule, **more)
            made._parallel_plan = plan
            return made
        replicas, shards = zip(*((len(grid), len(grid[0])) for grid in plan.grids), strict=True)
        made = cls(
            stages=len(plan.grids),
            replicas=replicas[0] if len(set(replicas)) == 1 else replicas,
            shards=shards[0] if len(set(shards)) == 1 else shards,
            schedule=schedule,
            chunks=len(plan.stages) // len(plan.grids),
            cuts=tuple(stage.first for stage in plan.stages[1:]),
            recompute="full" if plan.recompute and len(plan.recompute) == plan.stages[-1].last else "none",
            **more,
        )
        positions, theirs = (list(one.grid_of_stage) for one in (plan, made.to_plan(plan.stages[-1].last)))
        if positions != theirs:
            raise PlanError(
                f"the plan has its stages on positions {positions}, and schedule {schedule} on {theirs}",
                cure="give schedule= the name of the schedule that the plan is for",
            )
        made._parallel_plan = plan
        return made

    def to_plan(self, layers: int | Sequence[str]) -> ParallelPlan:
        """The plan for a model with these layers; without cuts, stages have nearly equal numbers of layers.

        `layers`: their names, or how many there are, which does without placements. Raises `PlanError` if they do not fill the
        stages.
        """
        from raypar.schedule.registry import placement_of_schedule, resolve_chunks_per_worker

        if self.placements:
            if isinstance(layers, int):
                raise PlanError(
                    "plan.placements name layers, and only their number is known", cure="give the names of the layers"
                )
            made = plan_of_placements([each.to_placement() for each in self.placements], layers)
            return self._with_state(made)
        layers = layers if isinstance(layers, int) else len(layers)
        if self._parallel_plan is not None:
            if self._parallel_plan.stages[-1].last != layers:
                raise PlanError(
                    f"the plan is for {self._parallel_plan.stages[-1].last} layers, and the model has {layers}",
                    cure="make the plan for the model's layers, or give its section: plan={'stages': ...}",
                )
            return self._parallel_plan
        made = ParallelPlan.of(
            self.replicas_per_stage,
            self.shards_per_stage,
            layers=layers,
            chunks=resolve_chunks_per_worker(self.schedule, self.chunks),
            placement=placement_of_schedule(self.schedule),
            cuts=self.cuts,
        )
        return self._with_state(made)

    def _with_state(self, plan: ParallelPlan) -> ParallelPlan:
        """The plan with what the section says of the state that replicas divide."""
        divided = plan.with_zero(self.given_zero, self.zero_holders).with_gather(self.given_gather)
        return divided.with_gradients(self.given_gradients)
