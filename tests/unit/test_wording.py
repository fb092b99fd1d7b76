"""Counts in messages: one thing is in the singular."""

import re
from pathlib import Path

import pytest

import raypar
from raypar.elastic.step_flow_rules import describe_lost_steps
from raypar.plan.wording import after_steps, count_noun

PACKAGE = Path(raypar.__file__).parent


@pytest.mark.parametrize(
    "number, noun, plural, text",
    [
        (1, "step", None, "1 step"),
        (2, "step", None, "2 steps"),
        (1024, "microbatch", "microbatches", "1,024 microbatches"),
        ("2/1", "shard", None, "2/1 shards"),
    ],
)
def test_a_noun_fits_its_number(number, noun, plural, text):
    assert count_noun(number, noun, plural) == text


def test_the_state_after_one_step_is_named_in_the_singular():
    assert [after_steps(done) for done in (0, 1, 1024)] == ["after 0 steps", "after 1 step", "after 1,024 steps"]


@pytest.mark.parametrize(
    "lost, done, text",
    [
        (1, 1, "the only step is lost"),
        (3, 3, "all 3 steps are lost"),
        (1, 3, "1 of 3 steps is lost"),
        (2, 3, "2 of 3 steps are lost"),
    ],
)
def test_what_is_lost_fits_its_number(lost, done, text):
    assert describe_lost_steps(lost, done) == text


def test_no_message_says_after_1_steps():
    """`after {n} steps` with any number: `after_steps` makes it."""
    written = {
        f"{path.relative_to(PACKAGE)}: {found[0]}"
        for path in PACKAGE.rglob("*.py")
        for found in re.finditer(r"after \{[^}]*\} steps\b", path.read_text())
    }
    assert written == set()
