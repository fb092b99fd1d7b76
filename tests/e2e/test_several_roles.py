"""Workers that are replicas of some layers and shards of others, on Ray: killed, replaced, and with fewer left."""

from pathlib import Path

import pytest
from helpers.trainee import Trainee, kill

from raypar.actors.ray_connection import connect_ray

SHARDS = "{layers: [layer2, layer3], workers: [[0, 1]]}"
STYLES = "plan.styles={'*': gathered}"


def placed(*placements: str) -> list[str]:
    """The tiny job's arguments with these placements."""
    return [f"plan={{placements: [{', '.join(placements)}]}}", STYLES, "elastic.min_workers=1", "steps=40"]


@pytest.mark.ci
@pytest.mark.parametrize("worker", [0, 1, 2])
def test_a_run_that_loses_a_worker_has_the_bits_of_stages_on_workers_of_their_own(worker: int, tmp_path: Path):
    """Worker 2 is a replica only, the others are shards, too; each is replaced, or its microbatches go to the others."""
    apart = ["plan.stages=2", "plan.cuts=[2]", "plan.replicas=1", "plan.shards=[1, 2]", STYLES, "steps=40"]
    three = "{layers: [layer0, layer1], workers: [[0], [1], [2]]}"
    for name in ("apart", "shared"):
        (tmp_path / name).mkdir()
    with connect_ray(None, 3, Path(__file__).parents[1]):
        undisturbed = Trainee(tmp_path / "apart", *apart).run()
        trainee = Trainee(tmp_path / "shared", *placed(three, SHARDS), "elastic.min_workers=2")
        result = trainee.run(kill(worker))
    assert result.end == "done", result.why
    assert all(event.get("shards_was") is None for event in trainee.told("generation")), "as many shards as before"
    assert result.weights_sha256 == undisturbed.weights_sha256


@pytest.mark.ci
def test_with_virtual_shards_a_run_that_loses_shards_and_gets_them_back_has_the_bits_of_one_worker(tmp_path: Path):
    """Two workers are replicas of two layers, and shards of two; one is killed, and the other one is both shards."""
    words = ["virtual_shards=2", STYLES, "steps=40"]
    for name in ("one", "shared"):
        (tmp_path / name).mkdir()
    with connect_ray(None, 2, Path(__file__).parents[1]):
        one = Trainee(tmp_path / "one", "plan={stages: 1}", *words).run()
        trainee = Trainee(tmp_path / "shared", *placed("{layers: [layer0, layer1], workers: [[0], [1]]}", SHARDS), *words)
        result = trainee.run(kill(1))
    assert result.end == "done", result.why
    assert [len(event["workers"]) for event in trainee.told("generation")][:1] == [1], trainee.told("generation")
    assert all(event.get("shards_was") is None for event in trainee.told("generation")), "as many virtual shards as before"
    assert result.weights_sha256 == one.weights_sha256
