"""Owners of parameters that come layer by layer, and their readers, die at any message: the bits are those of a quiet run."""

import pytest
from test_zero_kills import PLANS, ends, kills, parameters_are_divided  # noqa: F401

BY_USE = {
    f"{name}, {span}": plan.with_zero(3).with_gather(span) for name, plan in PLANS.items() for span in ("layer", "microbatch")
}
DEFAULT = "three replicas, layer"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == DEFAULT else pytest.mark.ci) for n in BY_USE])
def test_kills_leave_the_bits(name):
    found = ends(kills(BY_USE[name], 61), BY_USE[name])
    assert found["from_mirror=True"] > 0


@pytest.mark.full
@pytest.mark.parametrize("name", BY_USE)
def test_a_kill_at_any_message_and_instruction_leaves_the_bits(name):
    found = ends(kills(BY_USE[name], 1), BY_USE[name])
    assert found["from_mirror=True"] > 0 and found["late"] > 0


@pytest.mark.ci
def test_with_two_holders_a_kill_runs_nothing_twice():
    plan = BY_USE[DEFAULT]
    found = ends(kills(plan, 41, holders=2), plan, holders=2)
    assert not found["again"]
