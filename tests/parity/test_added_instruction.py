"""The interpreter executes an instruction that only this test knows, by one rule of its own, and the bits stay the same."""

import pytest
from helpers.parity import Layout, different_gradients, expected
from helpers.toy_instructions import add_toy_instructions

from raypar.plan import MicrobatchRouting
from raypar.schedule import registry
from raypar.schedule.instructions import (
    ACTIVATIONS,
    INSTRUCTIONS,
    Compute,
    Forward,
)
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.step.interpreter import TRAINING_RULES, VALIDATION_RULES, Interpreter


def test_every_instruction_has_a_rule_and_a_validation_pass_only_those_without_gradients():
    assert list(TRAINING_RULES) == list(INSTRUCTIONS.values())
    assert [kind.letter for kind in VALIDATION_RULES] == ["F", "SEND", "RECV", "X", "SERVE", "A", "Z"]


@pytest.fixture
def added(monkeypatch):
    """A forward that keeps its inputs only (L), and the instruction that makes its activations again (M), with their rules."""
    toys = add_toy_instructions(monkeypatch)
    kept: dict[tuple[int, int, int], tuple] = {}

    def run_lean_forward(interpreter: Interpreter, i: Compute, step: int, received) -> None:
        stage, values = interpreter.stages[i.stage], dict(received)
        feed = interpreter.batch_sources[i.stage]
        batch = {} if feed is None else feed.get(step, i.microbatch)
        interpreter._hand_on(i.stage, i.microbatch, stage.forward(i.microbatch, values, batch))
        stage.free(i.microbatch)
        kept[interpreter.rank, i.stage, i.microbatch] = values, batch

    def run_recompute(interpreter: Interpreter, i: Compute, step: int, received) -> None:
        assert received == {}
        interpreter.stages[i.stage].forward(i.microbatch, *kept.pop((interpreter.rank, i.stage, i.microbatch)))

    for kind, rule in ((toys.LeanForward, run_lean_forward), (toys.MakeAgain, run_recompute)):
        monkeypatch.setitem(TRAINING_RULES, kind, rule)
    yield toys
    assert kept == {}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1, 2)])
def test_a_run_that_computes_its_activations_again_has_the_bits_of_one_process(added, schedule, replicas):
    layout = Layout("plain", schedule, replicas, 4)
    want = expected(layout.model, layout.microbatches, layout.blocks)
    orders = []
    for order in registry.build_schedule(schedule, MicrobatchRouting(layout.plan, layout.job.batching)):
        new: list[Compute] = []
        for i in order:
            new += [added.LeanForward(i.stage, i.microbatch)] if type(i) is Forward else [i]
            if ACTIVATIONS in i.frees:
                new.insert(-1, added.MakeAgain(i.stage, i.microbatch))
        orders.append(tuple(new))
    with OneProcessRun(layout.job, layout.plan, tuple(orders)) as run:
        for step in range(2):
            reports = run.step(step, trace=True)
            assert {r.loss for r in reports} == {want.losses[step]} and {r.norm for r in reports} == {want.norms[step]}
            assert not different_gradients(run, want, step)
        labels = [span.label for report in reports for span in report.spans]
    assert sum("M" in label for label in labels) == sum("L" in label for label in labels) > 0


def test_an_instruction_without_a_rule_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(TRAINING_RULES, Forward)
    layout = Layout("plain", "gpipe", (1,), 2)
    with OneProcessRun(layout.job, layout.plan, "gpipe") as run, pytest.raises(TypeError, match="no rule for Forward"):
        run.step(0)
