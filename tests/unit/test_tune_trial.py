"""Runs inside trials of Ray Tune: each has a name of its own, and none leaves its checkpoints in a trial's temporary folder."""

import sys
from types import SimpleNamespace

import pytest

import raypar
from raypar.console.event_printer import BriefEventPrinter
from raypar.errors import ConfigError
from raypar.launch.run_name_of_tune_trial import check_run_dir_in_trial, current_trial_id, name_of_run_in_trial
from raypar.record.parse_events import parse_event


def test_runs_of_trials_that_were_given_no_name_do_not_share_one():
    """The second trial of a sweep failed: "a run called 'run' is active on this cluster"."""
    assert name_of_run_in_trial("run", "run", "3d6f7_00001") == "run_3d6f7_00001"
    assert name_of_run_in_trial("mine", "run", "3d6f7_00001") == "mine"
    assert name_of_run_in_trial("run", "run", None) == "run"


@pytest.mark.parametrize("run_dir, refused", [("runs", True), ("/data/runs", False), ("s3://bucket/runs", False)])
def test_a_relative_run_dir_is_refused_in_a_trial_and_nowhere_else(run_dir, refused):
    check_run_dir_in_trial(run_dir, None)
    if not refused:
        check_run_dir_in_trial(run_dir, "3d6f7_00001")
        return
    with pytest.raises(ConfigError, match="'runs' is relative, and this is trial 3d6f7_00001 of Ray Tune") as found:
        check_run_dir_in_trial(run_dir, "3d6f7_00001")
    assert "absolute path" in found.value.cure


def test_fit_in_a_trial_is_refused_before_anything_starts(monkeypatch):
    context = SimpleNamespace(get_trial_id=lambda: "3d6f7_00001")
    monkeypatch.setitem(sys.modules, "ray.tune", SimpleNamespace(get_context=lambda: context))
    assert current_trial_id() == "3d6f7_00001"
    trainer = raypar.Trainer(
        model="examples.gpt:layers", loss="examples.gpt:loss", data="examples.gpt:text", steps=1, batch_size=4, microbatches=2
    )
    with pytest.raises(ConfigError, match="trial 3d6f7_00001"):
        trainer.fit()


def test_brief_lines_have_the_name_that_the_run_has_got(capsys):
    """Three runs called `run` by their jobs all printed `run: ...`, though two were `run-2` and `run-3`."""
    printer = BriefEventPrinter("run", [])
    printer(parse_event({"kind": "stage", "stage": "planned", "text": "1 worker; more"}))
    printer(parse_event({"kind": "stage", "stage": "connected", "text": "...", "run": "run-2"}))
    printer(parse_event({"kind": "stage", "stage": "built", "text": "..."}))
    assert capsys.readouterr().out == "run-2: training begins: 1 worker\n"
