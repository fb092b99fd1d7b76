"""A worker with the only copy of a state is slow or stopped for a while, on a real Ray: it is waited for, nothing is lost."""

import signal
from pathlib import Path

import pytest
from helpers.trainee import Trainee, Undisturbed

from raypar.actors.ray_connection import connect_ray

ALONE = ("plan.stages=1", "plan.replicas=1", "elastic.min_workers=1")


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    with connect_ray(None, 2, Path(__file__).parents[1]):
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, own_ray) -> Trainee:
    trainee = Trainee(tmp_path_factory.mktemp("undisturbed"), *ALONE)
    trainee.result = trainee.run()
    return trainee


def same(trainee: Trainee, undisturbed: Trainee) -> None:
    assert trainee.result.end == "done", trainee.result.why
    assert trainee.result.weights_sha256 == undisturbed.result.weights_sha256
    assert trainee.losses == undisturbed.losses
    assert not trainee.told("lost")
    (line,) = [event["text"] for event in trainee.told("waiting")]
    assert "no other memory has the state after" in line and "s left (elastic.last_copy_wait_s)" in line
    assert any("has answered, after a wait of" in event["text"] for event in trainee.told("note"))


@pytest.mark.chaos
@pytest.mark.parametrize(
    "layout",
    [ALONE, ("plan.stages=2", "plan.replicas=1", "elastic={min_workers: 1, mirror: off}")],
    ids=["one worker", "stages"],
)
def test_a_sample_that_takes_25_s_to_read_once_costs_nothing_else(layout, undisturbed, tmp_path):
    """Its worker was given up after 4 s, and with it the state. (Where another memory has that: `test_slow_sample.py`.)"""
    trainee = Trainee(tmp_path, *layout, f"data.args={{slow: {tmp_path / 'slow'}, slow_s: 25.0}}")
    trainee.result = trainee.run()
    assert (tmp_path / "slow").exists() and trainee.result.end == "done", trainee.result.why
    assert trainee.result.weights_sha256 == undisturbed.result.weights_sha256
    assert trainee.losses == undisturbed.losses
    assert not trainee.told("lost") and not trainee.told("recovering")


@pytest.mark.chaos
def test_a_worker_that_is_stopped_for_a_while_goes_on(undisturbed, tmp_path):
    trainee = Trainee(tmp_path, *ALONE)
    trainee.run_with_a_stop(0, 12.0)
    same(trainee, undisturbed)
    assert "answers no pings" in trainee.told("waiting")[0]["text"]


@pytest.mark.chaos
@pytest.mark.parametrize("layout", [("plan.stages=2", "plan.replicas=1"), ("plan.stages=1", "plan.replicas=2")])
def test_a_worker_of_a_run_that_is_not_elastic_is_stopped_for_a_while_and_nothing_else_happens(layout, tmp_path):
    """It ended the run after 10 s; its peer waits for it in communication meanwhile."""
    trainee = Trainee(tmp_path, *layout, "elastic=false")
    trainee.run_with_a_stop(1, 20.0)
    wanted = Undisturbed.of(tmp_path, *layout, "elastic=false")
    assert trainee.result.end == "done", trainee.result.why
    assert (trainee.losses, trainee.result.weights_sha256) == (wanted.losses, wanted.weights_sha256)
    (line,) = [event["text"] for event in trainee.told("waiting")]
    assert line.startswith("waiting for worker 1: it answers no pings") and "600 s left" in line
    (note,) = [event["text"] for event in trainee.told("note")]
    assert "worker 1 answers again, after a wait of" in note


@pytest.mark.chaos
def test_a_worker_that_is_killed_while_it_is_waited_for_ends_the_wait_at_once(tmp_path):
    trainee = Trainee(tmp_path, *ALONE, "elastic.lost_state=fail")
    trainee.run_with_a_stop(0, 6.0, then=signal.SIGKILL)
    assert trainee.told("waiting") and trainee.result.end == "failed"
    assert "is lost" in str(trainee.result.error) and "no mirror and no checkpoint has it" in str(trainee.result.error)
