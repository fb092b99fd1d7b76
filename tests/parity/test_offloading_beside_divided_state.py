"""Offloading beside all else of a plan, drawn by lot: replicas that divide state and gather parameters, shards, recomputation,
precisions, ties and uneven replicas, under every schedule: the bits of one process."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from helpers.offloaded_layouts import offloads, small_memory_offloaded, with_rest_offloaded
from helpers.zero_grid import ZeroLayout, check_zero_layout, zero_layouts

from raypar.job import Job
from raypar.plan import ParallelPlan

IN_DEFAULT_SUITE, IN_CI = 40, 8
"""One layout in so many is run there."""


@dataclass(frozen=True)
class OffloadedZeroLayout(ZeroLayout):
    """A layout that also offloads what it does not recompute."""

    @property
    def plan(self) -> ParallelPlan:
        """The plan."""
        return with_rest_offloaded(super().plan)


def layouts() -> list[OffloadedZeroLayout]:
    made = [OffloadedZeroLayout(**vars(given)) for given in zero_layouts()]
    return [each for each in made if offloads(each.plan, each.cell.schedule, each.cell.job)]


LAYOUTS = layouts()
MARKS = [
    [] if n % IN_DEFAULT_SUITE == 0 else [pytest.mark.ci] if n % IN_CI == 0 else [pytest.mark.full] for n in range(len(LAYOUTS))
]


@pytest.fixture(autouse=True)
def into_files(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(Job, "activations_in", property(lambda job: str(tmp_path)))
    with small_memory_offloaded():
        yield


@pytest.mark.parametrize(
    "layout", [pytest.param(*pair[:1], marks=pair[1]) for pair in zip(LAYOUTS, MARKS, strict=True)], ids=str
)
def test_a_layout_that_offloads_has_the_bits_of_one_process(layout):
    check_zero_layout(layout)


def test_each_schedule_level_and_way_to_gather_offloads_somewhere():
    assert len(LAYOUTS) >= 150
    assert {max(each.levels) for each in LAYOUTS} == {0, 1, 2, 3}
    assert {each.gather for each in LAYOUTS} == {"step", "microbatch", "layer"}
    assert len({each.cell.schedule for each in LAYOUTS}) >= 6 and {bool(each.recompute) for each in LAYOUTS} == {True, False}
