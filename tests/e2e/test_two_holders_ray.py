"""On a real Ray: an owner of a part of the optimizer's state dies in a step; a second holder of the part goes on with it."""

from pathlib import Path

import pytest
from helpers.full_disk import no_bytecode
from helpers.trainee import Trainee, Undisturbed

from raypar.actors.ray_connection import connect_ray

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    with no_bytecode(), connect_ray(None, 4, Path(__file__).parents[1]):
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Undisturbed:
    return Undisturbed.of(tmp_path_factory.mktemp("undisturbed"))


def run_until_an_owner_dies(moment, at, folder, *words) -> tuple[Trainee, list[str]]:
    """The run, and what it told of the recovery."""
    died = f"model.args={{moment: {moment}, step: {at}, marker: {folder / 'died'}}}"
    trainee = Trainee(folder, *words, "model.function=helpers.dies_in_step:model", died)
    trainee.result = trainee.run()
    assert (folder / "died").exists() and trainee.result.end == "done", trainee.result.why
    assert len(trainee.told("generation")[-1]["workers"]) == 2
    told = [event["text"] for event in trainee.events if event["kind"] == "recovering"]
    assert any("generation 2" in text for text in told)
    return trainee, told


@pytest.mark.parametrize("at, level", [(9, 3), (18, 1), (27, 3)])
@pytest.mark.parametrize("moment", ["vote", "apply", "gather"])
def test_with_a_second_holder_no_step_is_gone_back_to(moment, at, level, undisturbed, tmp_path):
    words = ("elastic={min_workers: 1, mirror: off}", f"plan={{replicas: 3, zero: {level}, zero_holders: 2}}")
    trainee, told = run_until_an_owner_dies(moment, at, tmp_path, *words)
    assert trainee.result.weights_sha256 == undisturbed.weights_sha256
    assert trainee.losses == undisturbed.losses, "every step was seen once, with the same loss"
    assert not any(words in text for text in told for words in ("mirror", "checkpoint", "begin again")), told


@pytest.mark.full
@pytest.mark.parametrize("holders", [1, 2])
@pytest.mark.parametrize("moment", ["vote", "apply", "gather"])
@pytest.mark.parametrize("number", range(20))
def test_an_owner_dies_at_each_moment_twenty_times(number, moment, holders, undisturbed, tmp_path):
    """At steps all over the run, of all levels, with copies of the mirror after every step to every fifth one."""
    level, at = 1 + number % 3, 2 + (7 * number) % 26
    mirror = "off" if holders == 2 else 1 + number % 5
    words = (
        f"elastic={{min_workers: 1, mirror: {mirror}}}",
        f"plan={{replicas: 3, zero: {level}, zero_holders: {holders}}}",
    )
    trainee, told = run_until_an_owner_dies(moment, at, tmp_path, *words)
    assert trainee.result.weights_sha256 == undisturbed.weights_sha256 and trainee.losses == undisturbed.losses
    back = [text for text in told if any(words in text for words in ("mirror", "checkpoint", "begin again"))]
    assert holders == 1 or not back, back


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("moment", ["vote", "apply", "gather"])
def test_without_one_all_go_back_to_the_mirrors_copy(moment, level, undisturbed, tmp_path):
    words = ("elastic={min_workers: 1, mirror: 4}", f"plan={{replicas: 3, zero: {level}}}")
    trainee, told = run_until_an_owner_dies(moment, 14, tmp_path, *words)
    assert trainee.result.weights_sha256 == undisturbed.weights_sha256 and trainee.losses == undisturbed.losses
    assert any("mirror" in text for text in told), told


@pytest.mark.parametrize("gather", ["layer", "microbatch"])
@pytest.mark.parametrize("moment", ["vote", "layer"])
def test_so_they_do_where_parameters_come_for_each_use(moment, gather, undisturbed, tmp_path):
    words = ("elastic={min_workers: 1, mirror: 4}", f"plan={{replicas: 3, zero: 3, gather: {gather}}}")
    trainee, told = run_until_an_owner_dies(moment, 14, tmp_path, *words)
    assert trainee.result.weights_sha256 == undisturbed.weights_sha256 and trainee.losses == undisturbed.losses
    assert any("mirror" in text for text in told), told


@pytest.mark.parametrize("moment", ["vote", "gather"])
def test_so_they_do_where_gradients_are_never_whole(moment, undisturbed, tmp_path):
    words = ("elastic={min_workers: 1, mirror: 4}", "plan={replicas: 3, zero: 2, gradients: scatter}")
    trainee, told = run_until_an_owner_dies(moment, 14, tmp_path, *words)
    assert trainee.result.weights_sha256 == undisturbed.weights_sha256 and trainee.losses == undisturbed.losses
    assert any("mirror" in text for text in told), told
