"""Schedules by name: nearest names, chunks, placement, and a warmup only where it means something."""

import pytest

from raypar.errors import ScheduleError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan
from raypar.schedule import registry


def routing(pp=4, microbatches=8, **shape):
    return MicrobatchRouting(ParallelPlan.mesh(pp=pp, **shape), Microbatches(microbatches, microbatches))


def test_afab_is_gpipe():
    assert registry.build_schedule("afab", routing()) == registry.build_schedule("gpipe", routing())


@pytest.mark.parametrize(
    "typo, meant", [("1f1B", "1f1b"), ("interleave", "interleaved"), ("zbv", "zb-v"), ("zb_h1", "zb-h1"), ("gpip", "gpipe")]
)
def test_an_unknown_name_gets_the_nearest_one(typo, meant):
    with pytest.raises(ScheduleError, match=f"unknown schedule '{typo}'") as error:
        registry.build_schedule(typo, routing())
    assert f"did you mean {meant}" in error.value.cure


def test_chunks_are_two_where_they_matter_and_one_elsewhere():
    assert {name: registry.resolve_chunks_per_worker(name) for name in registry.NAMES} == {
        "naive": 1,
        "gpipe": 1,
        "1f1b": 1,
        "interleaved": 2,
        "zb-h1": 1,
        "zb-v": 2,
        "list": 1,
    }
    assert registry.resolve_chunks_per_worker("interleaved", 5) == 5
    for name, chunks in [("zb-v", 3), ("1f1b", 2), ("interleaved", 0)]:
        with pytest.raises(ScheduleError, match="per worker"):
            registry.resolve_chunks_per_worker(name, chunks)


def test_a_plan_laid_out_for_another_schedule_is_refused():
    with pytest.raises(ScheduleError, match="'v' order"):
        registry.build_schedule("zb-v", routing(chunks=2, placement="loop"))
    with pytest.raises(ScheduleError, match="'loop' order"):
        registry.build_schedule("interleaved", routing(chunks=2, placement="v"))
    with pytest.raises(ScheduleError, match="needs 1 stage"):
        registry.build_schedule("1f1b", routing(chunks=2))


@pytest.mark.parametrize("name", ["naive", "gpipe"])
def test_a_warmup_is_refused_where_it_would_be_ignored(name):
    with pytest.raises(ScheduleError, match="no warmup to set"):
        registry.build_schedule(name, routing(), warmup=[4, 3, 2, 1])


def test_a_warmup_needs_one_number_per_position():
    with pytest.raises(ScheduleError, match=r"warmup \[4, 3\] for 4 stages"):
        registry.build_schedule("1f1b", routing(), warmup=[4, 3])
