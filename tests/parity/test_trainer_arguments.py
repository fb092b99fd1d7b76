"""What a script gives `Trainer` wrongly is said before anything starts."""

import pytest
import torch
from torch import nn

import raypar
from raypar.config import ElasticConfig
from raypar.errors import ConfigError
from raypar.worker import profile

GIVEN = {"model": "m:f", "loss": "m:f", "data": "m:f", "steps": 1, "batch_size": 1, "microbatches": 1}


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"batchsize": 3}, r"no argument 'batchsize'\n.*did you mean 'batch_size'"),
        ({"nonsense_at_all": 3}, r"no argument 'nonsense_at_all'\n.*help\(raypar.Trainer\)"),
        ({"shards": 2}, r"no argument 'shards'\n.*part of the plan: plan=\{'shards': ...\}"),
        (
            {"model": nn.Sequential(nn.Linear(1, 1))},
            r"model is a Sequential that is built already\n.*a function that builds it",
        ),
        ({"validation": {"function": "m:f", "every": 2}}, r"validation is a dict with keys function, every, not a data set"),
        (
            {"data": {"train": [1], "test": [2]}},
            r"data is a dict with keys train, test, not a data set\n.*of several splits, one",
        ),
        ({"data": 3}, r"data is a int"),
        ({"elastic": "yes"}, r"elastic is 'yes'\n.*give True, or a dict"),
        ({"elastic": {"min_worker": 2}}, r"unknown key elastic.min_worker: did you mean elastic.min_workers\?"),
        ({"elastic": {"min_workers": 0}}, r"elastic.min_workers: expected greater than 0, got 0"),
        ({"elastic": {"mirror": "on"}}, r"elastic.mirror: expected auto, off, or a number of steps, got 'on'"),
    ],
)
def test_a_wrong_argument_is_one_error_with_a_cure(wrong, says):
    with pytest.raises(ConfigError, match=says):
        raypar.Trainer(**(GIVEN | wrong))


def test_a_plan_of_more_workers_than_are_given_is_refused_before_anything_starts(tmp_path):
    job = {
        "model": lambda: nn.Sequential(nn.Linear(2, 2)),
        "loss": nn.functional.mse_loss,
        "data": [(torch.ones(2), torch.ones(2))] * 4,
    }
    job |= {"batch_size": 2, "microbatches": 2}
    trainer = raypar.Trainer(**(GIVEN | job), plan={"stages": 1, "replicas": 2}, workers=1, run_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="the plan has 2 workers = 1 stage x 2 replicas, but workers is 1"):
        trainer.fit(verbose=False)


def test_elastic_is_the_section_of_a_job_file():
    assert raypar.Trainer(**GIVEN).elastic is None and raypar.Trainer(**GIVEN, elastic=False).elastic is None
    assert raypar.Trainer(**GIVEN, elastic=True).elastic == ElasticConfig()
    given = {"min_workers": 2, "max_workers": 6, "grow_after_s": 1.5, "step_deadline_s": 4.0, "mirror": 8}
    assert raypar.Trainer(**GIVEN, elastic=given).elastic == ElasticConfig(**given)
    assert raypar.Trainer(**GIVEN, elastic={"mirror": False}).elastic.mirror == "off"


def test_more_workers_than_fit_here_are_taken_to_be_on_other_machines(monkeypatch):
    monkeypatch.setattr(profile, "processors", lambda: 2)
    assert profile.free_memory_bytes(4) > 0.5 * profile.free_memory_bytes(400) > 0
