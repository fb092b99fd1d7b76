"""Modules drawn by lot, captured and run in plans drawn by lot, against one plain process that runs the module itself."""

import random

import pytest
from helpers import drawn_modules
from helpers.captured_jobs import check_run, graph_of

from raypar.plan import ParallelPlan
from raypar.schedule import registry
from raypar.worker.job_spec import DataSpec, JobSpec, OptimizerSpec, Precision, Ref

SCHEDULES = ("1f1b", "interleaved", "zb-v", "gpipe", "zb-h1")


def job_of(seed: int) -> JobSpec:
    """Two steps of AdamW on a ragged batch of 2 to 4 microbatches."""
    microbatches = 2 + seed % 3
    return JobSpec(
        name=f"drawn {seed}",
        seed=seed,
        steps=2,
        batch_size=2 * microbatches + 1 + seed % microbatches,
        microbatches=microbatches,
        model=Ref(drawn_modules.make_drawn, {"seed": seed}),
        loss=Ref(drawn_modules.loss),
        data=DataSpec(Ref(drawn_modules.Rows), target="y"),
        optimizer=OptimizerSpec(Ref("torch.optim:AdamW", {"lr": 1e-2}), ()),
        clip_norm=0.5,
        precision=Precision("bf16" if seed % 11 == 0 else None),
    )


def plan_of(seed: int, layers: int) -> tuple[str, ParallelPlan]:
    """A schedule, stages, replicas by stage, cuts and recomputed layers, by lot."""
    dice = random.Random(f"plan {seed}")
    schedule = dice.choice(SCHEDULES)
    chunks = registry.resolve_chunks_per_worker(schedule)
    positions = dice.randint(1, max(1, min(4, layers // chunks)))
    cuts = sorted(dice.sample(range(1, layers), positions * chunks - 1))
    same = dice.randint(1, 2)
    return schedule, ParallelPlan.of(
        [same if chunks > 1 else dice.randint(1, 2) for _ in range(positions)],
        layers=layers,
        chunks=chunks,
        placement=registry.placement_of_schedule(schedule),
        cuts=cuts,
        recompute=tuple(layer for layer in range(layers) if dice.random() < 0.25),
    )


def check(seed: int) -> None:
    spec = job_of(seed)
    schedule, plan = plan_of(seed, len(graph_of(spec).layers))
    check_run(spec, plan, schedule, order_seed=seed)


@pytest.mark.parametrize("seed", range(15))
def test_a_drawn_module_has_the_bits_of_one_plain_process(seed: int):
    check(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(15, 515))
def test_other_drawn_modules_have_the_bits_of_one_plain_process(seed: int):
    check(seed)
