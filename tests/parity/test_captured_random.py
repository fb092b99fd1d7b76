"""Random modules, captured and run under random plans, against one plain process that runs the module itself."""

import random

import pytest
from helpers import plain_module
from helpers.captured_jobs import check_run, expected, graph_of
from helpers.parity import differences
from helpers.random_modules import RandomModule, Rows, loss

from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PrecisionConfig
from raypar.plan import ParallelPlan
from raypar.schedule import registry

pytestmark = pytest.mark.part(5)

SCHEDULES = ("1f1b", "interleaved", "zb-v", "gpipe", "zb-h1")


def job_of(seed: int) -> Job:
    """Two steps of AdamW on a batch of 1 to 4 microbatches, of which some have a sample more."""
    microbatches = 1 + seed % 4
    return Job(
        name=f"random-{seed}",
        seed=seed,
        steps=2,
        batch_size=2 * microbatches + seed % microbatches,
        microbatches=microbatches,
        model=ModelConfig(function=RandomModule, args={"seed": seed, "p": 0.3 * (seed % 2)}),
        loss=LossConfig(function=loss),
        data=DataConfig(function=Rows, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:AdamW", args={"lr": 1e-2}),
        clip_norm=0.5,
        precision=PrecisionConfig(compute="bf16" if seed % 11 == 0 else None),
    )


def plan_of(seed: int, layers: int) -> tuple[str, ParallelPlan]:
    """(schedule, plan): stages, replicas of each, cuts and recomputed layers, all random."""
    choose = random.Random(f"plan {seed}")
    schedule = choose.choice(SCHEDULES)
    chunks = registry.resolve_chunks_per_worker(schedule)
    stages = choose.randint(1, max(1, min(4, layers // chunks)))
    same = choose.randint(1, 2)
    return schedule, ParallelPlan.of(
        [same if chunks > 1 else choose.randint(1, 2) for _ in range(stages)],
        layers=layers,
        chunks=chunks,
        placement=registry.placement_of_schedule(schedule),
        cuts=sorted(choose.sample(range(1, layers), stages * chunks - 1)),
        recompute=tuple(layer for layer in range(layers) if choose.random() < 0.25),
    )


def check(seed: int) -> None:
    job = job_of(seed)
    schedule, plan = plan_of(seed, len(graph_of(job).layers))
    check_run(job, plan, schedule, order_seed=seed)
    if job.microbatches == 1:
        plain, want = plain_module.train(graph_of(job), job, leaves=False)[0], expected(job)
        assert (plain.losses, plain.norms) == (want.losses, want.norms)
        for found, gradients in zip(plain.gradients, want.gradients, strict=True):
            assert [n for n, g in gradients.items() if differences(n, [found[n]], g)] == []


@pytest.mark.parametrize("seed", range(15))
def test_a_random_module_under_a_random_plan_has_the_bits_of_one_plain_process(seed: int):
    check(seed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(15, 515))
def test_other_random_modules_under_random_plans_have_the_bits_of_one_plain_process(seed: int):
    check(seed)
