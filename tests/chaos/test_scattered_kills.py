"""Owners of gradients that are scattered die at any message: the bits are those of a run that lost nobody."""

import pytest
from test_zero_kills import PLANS, ends, kills, parameters_are_divided  # noqa: F401

SCATTERED = {name: plan.with_zero(2).with_gradients("scatter") for name, plan in PLANS.items()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "three replicas" else pytest.mark.ci) for n in SCATTERED])
def test_kills_leave_the_bits(name):
    found = ends(kills(SCATTERED[name], 41), SCATTERED[name])
    assert found["from_mirror=True"] > 0


@pytest.mark.full
@pytest.mark.parametrize("name", SCATTERED)
def test_a_kill_at_any_message_and_instruction_leaves_the_bits(name):
    found = ends(kills(SCATTERED[name], 1), SCATTERED[name])
    assert found["from_mirror=True"] > 0 and found["late"] > 0


@pytest.mark.ci
def test_with_two_holders_a_kill_runs_nothing_twice():
    plan = SCATTERED["three replicas"]
    found = ends(kills(plan, 41, holders=2), plan, holders=2)
    assert not found["again"]
