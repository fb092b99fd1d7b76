"""Choosing by metrics: which checkpoints are the best, when one is saved for it, which stay, and how they are named."""

import json
import math
import pickle
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.machine_steps import begin, commit, do
from test_metrics_shown import SMALL

from raypar.actors.run_recorder import RunRecorder
from raypar.callbacks import Callbacks, EarlyStopping, callbacks_from_job
from raypar.cli import main
from raypar.elastic.actions import RunStep, StartCheckpoint, Teardown, Validate
from raypar.elastic.events import (
    AllWorkersCopiedState,
    CheckpointSaved,
    DriverFailover,
    ValidationEmitted,
    ValidationReported,
)
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.step_flow_rules import list_due_saves_and_validations
from raypar.errors import CheckpointError, ConfigError
from raypar.job import Job
from raypar.plan import Microbatches, MicrobatchesOfSets, ParallelPlan
from raypar.record.best_checkpoint_rules import BestRule, BestValues, parse_rules
from raypar.storage.find_best_checkpoint import find_best_step
from raypar.storage.run_folder import RunFolder

ACCURACY, LOSS = BestRule("validation_accuracy", "max"), BestRule("validation_loss", "min", 2)


def test_a_new_best_value_is_found_and_of_equal_ones_the_first_counts():
    best = BestValues([ACCURACY])
    found = [best.add(step, {"validation_accuracy": value}) for step, value in [(2, 0.5), (4, 0.5), (6, 0.4), (8, 0.6)]]
    assert found == [True, False, False, True]
    assert best.kept([2, 4, 6, 8]) == {8} and best.kept([2, 4, 6]) == {2} and best.kept([6]) == {6} and best.kept([]) == set()


def test_what_is_not_finite_or_missing_is_never_the_best():
    best = BestValues([ACCURACY])
    assert not best.add(2, {"validation_accuracy": math.nan}) and not best.add(4, {"validation_accuracy": None})
    assert not best.add(6, {"validation_loss": 1.0}) and best.kept([2, 4, 6]) == set()
    assert best.add(8, {"validation_accuracy": -1.0})


def test_several_rules_keep_their_own_and_the_keep_best_of_each():
    best = BestValues([ACCURACY, LOSS])
    for step, accuracy, loss in [(1, 0.9, 3.0), (2, 0.1, 1.0), (3, 0.2, 2.0), (4, 0.3, 4.0)]:
        best.add(step, {"validation_accuracy": accuracy, "validation_loss": loss})
    assert best.kept(range(1, 5)) == {1, 2, 3}
    assert best.best_of(LOSS, range(1, 5)) == [2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_are_those_that_sorting_all_values_gives_also_of_very_many(seed: int, monkeypatch: Any):
    monkeypatch.setattr("raypar.record.best_checkpoint_rules.MOST_VALUES", 20)
    chance, values = random.Random(seed), {}
    rule = BestRule("m", chance.choice(["min", "max"]), 3)
    best = BestValues([rule])
    for step in range(300):
        values[step] = chance.choice([chance.random(), 0.5])
        sign = 1 if rule.mode == "min" else -1
        wanted = sorted(values, key=lambda one: (sign * values[one], one))[:3]
        assert best.add(step, {"m": values[step]}) == (step in wanted)
        assert best.best_of(rule, range(300)) == wanted
    assert len(best.values["m"]) <= 21


def test_rules_in_a_record_are_read_and_what_is_none_is_left_out():
    lines: list[Any] = [
        {"metric": "a", "mode": "min"},
        {"metric": "b"},
        {"mode": "max"},
        {"metric": "c", "mode": "max", "keep": 3},
    ]
    assert parse_rules(lines) == [BestRule("a", "min"), BestRule("c", "max", 3)]


# -- when it is saved ----------------------------------------------------------------------------------------------------


def at_validation(**policy: Any) -> RunMachine:
    """Two workers that have validated after two of four steps."""
    machine = RunMachine(RunPolicy(workers=2, job_steps=4, validates=True, validate_every=2, **policy))
    begin(machine)
    commit(machine, 0)
    actions = commit(machine, 1)
    if policy.get("save_every"):
        actions = do(machine, AllWorkersCopiedState(2))
    assert actions == [Validate(2)]
    do(machine, ValidationReported((0,), 2))
    do(machine, ValidationReported((1,), 2))
    return machine


def test_a_state_with_a_best_metric_is_saved_before_training_goes_on():
    machine = at_validation()
    assert do(machine, ValidationEmitted(2, is_best=True)) == [StartCheckpoint(2)] and machine.phase is Phase.SAVING
    assert do(machine, AllWorkersCopiedState(2)) == [RunStep(2), RunStep(3)]


def test_one_without_is_not():
    assert do(at_validation(), ValidationEmitted(2)) == [RunStep(2), RunStep(3)]


def test_one_that_is_saved_or_being_saved_is_not_saved_again():
    machine = at_validation(save_every=2)
    assert do(machine, ValidationEmitted(2, is_best=True)) == [RunStep(2), RunStep(3)]


def test_a_stop_by_the_same_validation_saves_once():
    machine = at_validation()
    assert do(machine, ValidationEmitted(2, stop="enough", is_best=True)) == [StartCheckpoint(2)]
    do(machine, AllWorkersCopiedState(2))
    assert do(machine, CheckpointSaved(2)) == [Teardown("stopped", "enough", 2)]


def test_a_new_driver_saves_what_the_former_one_has_not_come_to():
    """The former one died between the line of the validation and the checkpoint."""
    plan = ParallelPlan.mesh(dp=2, layers=2)
    for saved, due in ((None, ["save"]), (2, [])):
        machine = RunMachine(RunPolicy(workers=2, job_steps=4, validates=True, validate_every=2, elastic=True), plan=plan)
        do(machine, DriverFailover((0, 1), 1, 2, plan, (0, 1), validated=2, saved=saved, best=2))
        assert list(list_due_saves_and_validations(machine, 2)) == due


# -- the recorder: which checkpoints stay ----------------------------------------------------------------------------------


def recorder_of(folder: Path, rules: list[BestRule], first: int = 0, keep: int = 1) -> RunRecorder:
    job = SimpleNamespace(best_rules=rules, checkpoint=SimpleNamespace(keep=keep))
    request = SimpleNamespace(folder=folder, job=job, policy=RunPolicy(workers=2, job_steps=9, steps_before_run=first), run="r")
    request.callbacks, request.validation_batching = pickle.dumps(Callbacks([])), None
    recorder = RunRecorder(request)  # type: ignore[arg-type]
    recorder.start_callbacks()
    return recorder


def validate(recorder: RunRecorder, done: int, accuracy: float) -> bool:
    report = {"losses": {0: (1.0, 1.0)}, "seconds": 0.1, "metrics": {"accuracy": accuracy}}
    return recorder.record_validation(done, [report])[1]


def save(recorder: RunRecorder, folder: Path, done: int) -> list[int]:
    """Save a checkpoint; returns those that are there then."""
    begun = recorder.checkpoints.begin(done)
    recorder.request.contract = {}  # type: ignore[misc]
    recorder.checkpoints.commit(done, begun, [])
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path):
    recorder = recorder_of(tmp_path, [ACCURACY])
    there = []
    for done, accuracy in ((2, 0.5), (4, 0.9), (6, 0.7), (8, 0.8)):
        validate(recorder, done, accuracy)
        there.append(save(recorder, tmp_path, done))
    assert there == [[2], [4], [4, 6], [4, 8]]


def test_a_checkpoint_that_is_saved_before_its_validation_is_among_the_best_once_its_value_is_known(tmp_path: Path):
    """`checkpoint.every` saves first: with keep: 1 and best keep: 2 three checkpoints were left."""
    recorder = recorder_of(tmp_path, [BestRule("validation_accuracy", "max", 2)])
    there = []
    for done, accuracy in ((2, 0.5), (4, 0.6), (6, 0.7), (8, 0.1)):
        save(recorder, tmp_path, done)
        validate(recorder, done, accuracy)
        there.append(sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "checkpoints").glob("step_*")))
    assert there == [[2], [2, 4], [4, 6], [4, 6, 8]]


def test_a_resumed_run_knows_the_best_of_before_and_forgets_what_it_does_again(tmp_path: Path):
    first = recorder_of(tmp_path, [ACCURACY])
    for done, accuracy in ((2, 0.9), (4, 0.5), (6, 0.95)):
        validate(first, done, accuracy)
        save(first, tmp_path, done)
    again = recorder_of(tmp_path, [ACCURACY], first=4)
    assert not validate(again, 6, 0.7), "0.9 after 2 steps is better"
    assert validate(again, 8, 0.91)


def test_without_best_nothing_is_read_and_only_the_newest_stay(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(RunFolder, "read_lines", lambda *given: pytest.fail("the record was read"))
    recorder = recorder_of(tmp_path, [])
    assert not validate(recorder, 2, 0.9) and save(recorder, tmp_path, 2) == [2]
    assert not validate(recorder, 4, 0.5) and save(recorder, tmp_path, 4) == [4]


# -- what names it ---------------------------------------------------------------------------------------------------------


def recorded_run(folder: Path, best: Any) -> RunFolder:
    start = {"kind": "started", "time": 1.0, "best": best}
    (folder / "events.jsonl").write_text(json.dumps(start) + "\n")
    values = [(2, 0.5, 3.0), (4, 0.9, 2.0), (6, 0.7, 1.0)]
    lines = [{"time": 1.0 + n, "step": n, "validation_loss": loss, "validation_accuracy": a} for n, a, loss in values]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for done in (2, 4, 6):
        (folder / "checkpoints" / f"step_{done:08d}").mkdir(parents=True)
    return RunFolder(folder)


def test_the_best_step_of_a_run_is_found_by_any_metric_that_it_keeps(tmp_path: Path):
    run = recorded_run(
        tmp_path, [{"metric": "validation_accuracy", "mode": "max", "keep": 1}, {"metric": "validation_loss", "mode": "min"}]
    )
    assert find_best_step(run) == find_best_step(run, "accuracy") == find_best_step(run, "validation_accuracy") == 4
    assert find_best_step(run, "validation_loss") == 6
    (tmp_path / "checkpoints" / "step_00000004").rmdir()
    assert find_best_step(run) == 6
    with pytest.raises(
        CheckpointError, match=r"does not keep its best checkpoint by 'f1'\n  cure: it keeps those by validation_a"
    ):
        find_best_step(run, "f1")


NO_VALUE = r"has no value of validation_accuracy yet\n  cure: wait for a validation"
NOT_FINITE = r"all 3 values of it so far are NaN or infinite \(the first at step 2\).*\n  cure: give a step; for the"
ONE_NOT_FINITE = r"by validation_accuracy: the only value of it so far is NaN or infinite"
NOT_SAVED = r"of 3 finite ones the last is that of step 6, of which no checkpoint is left\n  cure: give a step; it has"


@pytest.mark.parametrize(
    ("values", "saved", "message"),
    [({}, [2], NO_VALUE), ({2: None, 4: None, 6: None}, [6], NOT_FINITE), ({2: None}, [2], ONE_NOT_FINITE),
     ({2: 0.5, 4: 0.6, 6: 0.7}, [8], NOT_SAVED)],
)  # fmt: skip
def test_a_run_without_a_best_checkpoint_says_why(tmp_path: Path, values: dict[int, float], saved: list[int], message: str):
    """With NaN in each validation the cure was to wait for one."""
    start = {"kind": "started", "time": 1.0, "best": [{"metric": "validation_accuracy", "mode": "max"}]}
    (tmp_path / "events.jsonl").write_text(json.dumps(start) + "\n")
    lines = [{"time": 1.0, "step": step, "validation_loss": 1.0, "validation_accuracy": v} for step, v in values.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for done in saved:
        (tmp_path / "checkpoints" / f"step_{done:08d}").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=message):
        find_best_step(RunFolder(tmp_path))


@pytest.mark.parametrize("best", [None, []])
def test_a_run_that_keeps_none_says_so(tmp_path: Path, best: Any):
    with pytest.raises(CheckpointError, match=r"does not keep a best checkpoint\n  cure: set checkpoint.best"):
        find_best_step(recorded_run(tmp_path, best))


def test_export_names_the_best_one(tmp_path: Path, capsys: Any):
    recorded_run(tmp_path, [{"metric": "validation_loss", "mode": "min"}])
    assert main(["export", str(tmp_path), "--best", "accuracy", "--out", str(tmp_path / "a.pt")]) != 0
    assert "does not keep its best checkpoint by 'accuracy'" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--best", "--out", str(tmp_path / "a.pt")]) != 0
    assert "step_00000006" in capsys.readouterr().err, "the one that is chosen is empty here"


# -- early stopping --------------------------------------------------------------------------------------------------------


def test_early_stopping_on_a_metric_that_shall_grow_and_in_a_resumed_run(tmp_path: Path):
    def facts(step: int, accuracy: float) -> dict[str, Any]:
        return {"step": step, "validation_loss": 1.0, "count": 1.0, "seconds": 0.1, "validation_accuracy": accuracy}

    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(facts(*one)) + "\n" for one in [(2, 0.5), (4, 0.4)]))
    job = Job(**SMALL, validation={"function": "m:d", "every": 2}, metrics={"accuracy": "m:f"},
              early_stopping={"metric": "validation_accuracy", "mode": "max", "patience": 3, "min_delta": 0.01})  # fmt: skip
    callbacks = Callbacks(callbacks_from_job(job))
    callbacks.call("on_start", {"run": "r", "folder": str(tmp_path), "first": 5})
    stops = [callbacks.call("on_validation", facts(step, value))[0] for step, value in [(6, 0.505), (8, 0.6), (10, 0.5)]]
    assert stops == [None, None, None]
    callbacks.call("on_validation", facts(12, 0.5))
    stop, _ = callbacks.call("on_validation", facts(14, 0.6))
    assert stop == "EarlyStopping: validation_accuracy 0.6000 is not above its best 0.6000 for 3 values in a row"


def of_sets(step: int, a: float, b: float) -> dict[str, Any]:
    values = {"validation/a/loss": a, "validation/b/accuracy": b}
    return {"step": step, "validation_loss": a, "count": 1.0, "seconds": 0.1, **values}


def test_several_early_stoppings_each_on_a_validation_set_go_on_counting_right_after_a_resume(tmp_path: Path):
    lines = [of_sets(2, 1.0, 0.5), of_sets(4, 0.9, 0.4), of_sets(6, 0.8, 0.5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def stops(loss: float, accuracy: float) -> str | None:
        several = [
            EarlyStopping(patience=3, metric="validation/a/loss"),
            EarlyStopping(patience=3, metric="validation/b/accuracy", mode="max"),
        ]
        callbacks = Callbacks(several)
        callbacks.call("on_start", {"run": "r", "folder": str(tmp_path), "first": 7})
        return callbacks.call("on_validation", of_sets(8, loss, accuracy))[0]

    said = "EarlyStopping: validation/b/accuracy 0.5000 is not above its best 0.5000 for 3 values in a row"
    assert stops(0.7, 0.5) == said, "the two values before the resume count"
    assert stops(0.9, 0.6) is None, "the loss of a was best just before the resume"


def test_the_best_of_several_sets_are_known_right_after_a_resume(tmp_path: Path):
    rules = [BestRule("validation/a/loss", "min"), BestRule("validation/b/accuracy", "max")]
    lines = [of_sets(2, 1.0, 0.9), of_sets(4, 0.5, 0.4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for done in (2, 4):
        (tmp_path / "checkpoints" / f"step_{done:08d}").mkdir(parents=True)

    def validated(a: float, b: float) -> bool:
        recorder = recorder_of(tmp_path, rules, first=4)
        recorder.request.validation_batching = MicrobatchesOfSets.of({"a": Microbatches(1), "b": Microbatches(1)})  # type: ignore[misc]
        report = {"losses": {0: (a, 1.0), 1: (9.0, 1.0)}, "seconds": 0.1, "metrics": {"b/accuracy": b}}
        found = recorder.record_validation(6, [report])[1]
        recorder.metrics.close()
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return found

    assert [validated(*one) for one in ((0.6, 0.8), (0.4, 0.8), (0.6, 0.95))] == [False, True, True]


# -- what is refused -------------------------------------------------------------------------------------------------------

VALIDATED = {**SMALL, "validation": {"function": "m:d", "every": 2}, "metrics": {"accuracy": "m:f"}}


@pytest.mark.parametrize(
    "given, says",
    [
        (
            {"checkpoint": {"best": ["validation_f1"]}},
            r"checkpoint.best names the metric 'validation_f1', which nobody computes",
        ),
        (
            {"checkpoint": {"best": [{"metric": "accuracy", "mode": "max"}]}},
            r"checkpoint.best names the metric 'accuracy', .*every",
        ),
        ({"checkpoint": {"best": ["validation_accuracy"]}}, r"checkpoint.best does not say whether small or large values of"),
        ({"early_stopping": {"metric": "validation_f1"}}, r"early_stopping names the metric 'validation_f1', which nobody"),
        (
            {"early_stopping": {"metric": "validation_accuracy"}},
            r"early_stopping does not say whether .*\n  cure: set mode: max",
        ),
        ({"validation": "m:d", "early_stopping": {}}, r"early_stopping needs validation losses"),
    ],
)
def test_a_choice_by_what_nobody_computes_is_refused(given: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=re.compile(says, re.DOTALL)):
        Job(**{**VALIDATED, **given})


def test_choices_that_can_be_made():
    Job(**VALIDATED, checkpoint={"best": ["validation_loss", {"metric": "validation_accuracy/0", "mode": "max", "keep": 3}]})
    Job(**VALIDATED, callbacks=["m:callback"], checkpoint={"best": [{"metric": "of_callback", "mode": "max"}]})
    job = Job(**SMALL, early_stopping={"metric": "loss"}, checkpoint={"best": ["loss"]})
    assert job.best_rules == [BestRule("loss", "min")] == job.for_driver().best_rules
    (stopping,) = callbacks_from_job(job)
    assert isinstance(stopping, EarlyStopping) and (stopping.metric, stopping.mode) == ("loss", "min")
