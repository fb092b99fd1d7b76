"""What `raypar plan` says of a plan, without building or timing anything."""

import json
from typing import NamedTuple

from raypar.commands.plan import description, text
from raypar.plan import Microbatches, ParallelPlan
from raypar.planner.profile import LayerProfile, LinkProfile, ModelProfile


class Size(NamedTuple):
    name: str
    parameters: int
    nbytes: int


SIZES = tuple(Size(f"block{i}", 1000 * (i + 1), 4000 * (i + 1)) for i in range(4))
PROFILE = ModelProfile(tuple(LayerProfile(s.name, 1.0, 2.0, 1.0, 1.0) for s in SIZES), LinkProfile(0.0))


def test_every_worker_is_told_with_its_layers_and_bytes():
    found = description(ParallelPlan.mesh(dp=2, pp=2, layers=4), "1f1b", Microbatches(8), SIZES, None)
    assert [w["layers"] for w in found["workers"]] == [[["block0", "block1"]]] * 2 + [[["block2", "block3"]]] * 2
    assert [w["parameter_bytes"] for w in found["workers"]] == [12000, 12000, 28000, 28000]
    assert [w["microbatches"] for w in found["workers"]] == [4] * 4
    assert found["imbalance"] == 0 and "predicted_ms" not in found
    json.dumps(found)


def test_uneven_shares_are_said():
    found = description(ParallelPlan.mesh(dp=3, layers=4), "1f1b", Microbatches(8, 4), SIZES, None)
    assert [w["microbatches"] for w in found["workers"]] == [2, 2, 4]
    assert found["imbalance"] == 0.5
    assert "50 % more microbatches" in text(found)


def test_workers_without_a_block_are_said():
    found = description(ParallelPlan.mesh(dp=4, layers=4), "1f1b", Microbatches(8, 2), SIZES, None)
    assert "2 workers have no block" in text(found)


def test_the_prediction_is_the_simulators():
    found = description(ParallelPlan.mesh(pp=4, layers=4), "1f1b", Microbatches(8), SIZES, PROFILE)
    assert found["predicted_ms"] == 33
    assert "predicted step 33.0 ms, bubble 27.3 %" in text(found)


def test_chunks_of_one_worker_are_listed_apart():
    found = description(ParallelPlan.mesh(pp=2, chunks=2, layers=4), "gpipe", Microbatches(4), SIZES, None)
    assert "block0 + block2" in text(found)
