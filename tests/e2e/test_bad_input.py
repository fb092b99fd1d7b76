"""Every bad job ends with exit code 2 and one message, what and cure, before anything is started."""

import sys
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

from raypar.cli import main

CASES = {
    "unknown key": (["model.function=helpers.tiny_job:model", "microbatch=4"], "did you mean microbatches?"),
    "wrong type": (["steps=many"], "steps: expected"),
    "factory that cannot be imported": (["model.function=helpers.tiny_job:modle"], "cannot import 'helpers.tiny_job:modle'"),
    "module that does not exist": (["loss=no.such:thing"], "No module named 'no'"),
    "factory that raises": (["model=helpers.tiny_job:raises"], "KeyError: 'no such model'"),
    "more microbatches than samples": (["microbatches=9"], "9 microbatches cannot be cut from a batch of 8"),
    "fewer layers than stages": (["plan.stages=5"], "4 layers cannot fill 5 stages"),
    "empty data set": (["data.args.size=0"], "is empty"),
    "sample of the wrong shape": (["model.args.width=9"], "the first microbatch does not fit the model: layer 'layer0'"),
    "loss that is not a scalar": (["loss=helpers.tiny_job:vector_loss"], "not a scalar"),
    "loss that raises": (["loss=helpers.tiny_job:picky_loss"], "ArithmeticError: not these numbers"),
    "unknown schedule": (["plan.schedule=1f1c"], "did you mean 1f1b"),
    "style of no layer": (["plan.shards=2", "plan.styles={layer9.linear: column}"], "matches no layer (nearest: layer3.linear"),
    "shards of nothing": (["plan.shards=2"], "plan.shards is 2, but none of the model's layers has a style"),
    "more shards than features": (["plan.shards=9", "plan.styles={'*': gathered}"], "8 output features for 9 shards"),
    "optimizer of whole parameters": (
        ["plan.shards=2", "plan.styles={'*': gathered}", "optimizer.function=torch.optim:Adafactor"],
        "half of a parameter",
    ),
    "optimizer argument": (["optimizer.args.lrr=1.0"], "lrr"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_message_with_a_cure_and_starts_nothing(case, tmp_path, monkeypatch, capfd):
    sets, said = CASES[case]
    monkeypatch.chdir(Path(__file__).parents[1])
    status = main(["train", str(write_job(tmp_path)), *(word for s in sets for word in ("--set", s))])
    err = capfd.readouterr().err
    assert status == 2, err
    assert said in err and "cure: " in err and err.count("error: ") == 1
    assert not (tmp_path / "runs").exists()
    assert not ("ray" in sys.modules and sys.modules["ray"].is_initialized())


def test_a_run_that_does_not_exist_is_named_with_those_that_do(tmp_path, capfd):
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick/job.yaml").write_text("")
    assert main(["resume", "qick", "--run-dir", str(tmp_path)]) == 2
    assert "did you mean quick" in capfd.readouterr().err
