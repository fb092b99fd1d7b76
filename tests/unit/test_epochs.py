"""A job's length in epochs: how many steps they are, where that is said, and that nothing else depends on it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import raypar
from raypar.console.read_run_folder import read_job_step_count
from raypar.errors import ConfigError, DataError, UserCodeError
from raypar.job import Job
from raypar.job.contract import contract_of_job
from raypar.job.read_job import parse_job
from raypar.launch.steps_of_epochs import length_in_words, with_steps_of_epochs
from raypar.storage.run_folder import RunFolder

TEXT = "{model: m:f, loss: m:l, data: test_epochs:samples, batch_size: 32, microbatches: 2, name: a, "
GIVEN: dict[str, Any] = {
    "model": "m:f",
    "loss": "m:l",
    "batch_size": 32,
    "microbatches": 2,
}


def samples(size: int = 1000) -> range:
    return range(size)


def job(more: str, *overrides: str) -> Job:
    return parse_job(TEXT + more + "}", overrides)


def counted(job: Job) -> Job:
    return with_steps_of_epochs(job, lambda event: None)


@pytest.mark.parametrize(
    "epochs, size, drop_last, steps",
    [
        (1, 1000, False, 32),  # 31.25
        (3, 1000, False, 94),  # 93.75
        (3, 1000, True, 93),
        (1, 992, False, 31),
        (1, 992, True, 31),
        (0.5, 992, True, 16),  # 15.5
        (0.1, 3200, False, 10),  # not 11, though 0.1 * 100 has a rounding error as a float
        (1.1, 3200, False, 110),
        (2.5, 10, False, 1),
        (1e6, 1000, False, 31_250_000),
    ],
)
def test_epochs_are_so_many_steps(epochs: float, size: int, drop_last: bool, steps: int):
    data = {"function": samples, "args": {"size": size}, "drop_last": drop_last}
    given = raypar.Trainer(**GIVEN, data=data, epochs=epochs).job
    assert given.steps is None and given.epochs == epochs and counted(given).steps == steps
    assert counted(given).replace(steps=None) == given
    assert counted(counted(given)) == counted(given)


def test_a_length_is_given_once():
    for make in (lambda: job("steps: 3, epochs: 2"), lambda: raypar.Trainer(**GIVEN, data=samples, steps=3, epochs=2)):
        with pytest.raises(ConfigError, match=r"^steps is 3 and epochs is 2, and either of them is the length of the run\n"):
            make()
    for make in (lambda: job("seed: 1"), lambda: raypar.Trainer(**GIVEN, data=samples)):
        with pytest.raises(ConfigError, match=r"^steps is missing\n"):
            make()
    for wrong in ("0", "-1", ".nan", ".inf", "two"):
        with pytest.raises(ConfigError, match="epochs: expected"):
            job(f"epochs: {wrong}")


def test_an_override_of_one_takes_the_place_of_the_other():
    assert (job("steps: 3", "epochs=2").steps, job("steps: 3", "epochs=2").epochs) == (None, 2)
    assert (job("epochs: 3", "steps=2").steps, job("epochs: 3", "steps=2").epochs) == (2, None)
    assert job("epochs: 3", "epochs=2.5").epochs == 2.5


def test_epochs_of_no_step_or_of_too_many_are_refused_with_the_numbers():
    few = raypar.Trainer(**GIVEN, data={"function": samples, "args": {"size": 31}, "drop_last": True}, epochs=5).job
    with pytest.raises(ConfigError, match=r"epochs is 5, of 31 samples in batches of 32: 0 steps\n.*leave data.drop_last out"):
        few.steps_of_epochs(31)
    with pytest.raises(DataError, match=r"an epoch has 31 samples for a batch_size of 32\n.*leave data.drop_last out"):
        counted(few)
    with pytest.raises(ConfigError, match=r"epochs is 1e\+09, of 1,000 samples in batches of 32: 31,250,000,000 steps\n"):
        counted(job("epochs: 1.0e+9"))


def test_a_data_set_that_cannot_be_counted_is_an_error_with_its_name():
    def broken() -> list[int]:
        raise OSError("no such disk")

    with pytest.raises(UserCodeError, match=r"the data set function .*broken raised OSError: no such disk"):
        counted(raypar.Trainer(**GIVEN, data=broken, epochs=1).job)


def test_counting_leaves_the_callers_process_as_it_is():
    def leaves_things() -> list[int]:
        torch.manual_seed(5)
        torch.set_default_dtype(torch.float64)
        return [1] * 64

    before = torch.get_rng_state()
    assert counted(raypar.Trainer(**GIVEN, data=leaves_things, epochs=1).job).steps == 2
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32


def test_the_contract_is_that_of_a_job_with_these_steps():
    assert contract_of_job(counted(job("epochs: 3"))) == contract_of_job(job("steps: 94")) == contract_of_job(job("epochs: 7"))
    assert counted(job("epochs: 3")).for_workers() == job("steps: 94").for_workers()


def test_a_runs_job_file_has_the_epochs_and_its_status_the_steps(tmp_path: Path):
    made = RunFolder.create(tmp_path, "a")
    made.job.write_text(counted(job("epochs: 3")).to_yaml())
    again = parse_job(made.job.read_text())
    assert again == job("epochs: 3") and "steps:" not in made.job.read_text()
    assert read_job_step_count(made) is None  # the run has not begun
    made.members.write_text('{"phase": "running", "steps": 94}')
    assert read_job_step_count(made) == 94
    made.job.write_text(job("steps: 5").to_yaml())
    assert read_job_step_count(made) == 5


def test_it_is_said_in_words():
    assert length_in_words(counted(job("epochs: 3"))).endswith(" (3 epochs)") and length_in_words(job("steps: 3")) == "3 steps"
    assert length_in_words(job("steps: 1")) == "1 step"
    assert length_in_words(counted(job("epochs: 1"))).endswith(" (1 epoch)")
    assert length_in_words(counted(job("epochs: 0.5"))).endswith(" (0.5 epochs)")
