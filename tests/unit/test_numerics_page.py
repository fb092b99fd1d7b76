"""The page of the numerics contract: each rule has its reason and its tests, and every rule named elsewhere is there."""

import ast
import re
from pathlib import Path

import pytest

from raypar.comm.buffer_pool import ALIGNED, ALIGNED_ON_CUDA
from raypar.job.contract import CONTRACT_EDITION
from raypar.plan.addition_tree import fold_tree
from raypar.plan.microbatches import DEFAULT_MAX_BLOCKS
from raypar.plan.ownership import CANONICAL_PIECE
from raypar.plan.seeds import seed_of
from raypar.worker.data.mixed_order import MixPattern

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "raypar/NUMERICS.md").read_text()
RULES = {int(number): text for number, text in re.findall(r"^## Rule (\d+)\. (.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)}
"""Number of a rule -> its section, with the title."""
REFERENCE = re.compile(r"\brules? (\d+(?:(?:,| and| to)\s+\d+)*)", re.IGNORECASE)
"""`rule 6`, `rules 7, 10`, `rules 6 to 9`."""


def rules_named_in(text: str) -> set[int]:
    return {int(number) for named in REFERENCE.findall(text) for number in re.findall(r"\d+", named)}


def sources() -> list[Path]:
    """The code and the pages of the project, without recorded measurements."""
    found = [ROOT / "README.md", *(ROOT / ".github").rglob("*.md")]
    for place in ("raypar", "jobs", "examples", "cluster", "tests"):
        found += [path for ending in ("*.py", "*.md", "*.yaml", "*.pyi") for path in (ROOT / place).rglob(ending)]
    return found


def test_the_rules_are_numbered_without_a_gap():
    assert list(RULES) == list(range(1, 15))


@pytest.mark.parametrize("number", RULES)
def test_a_rule_has_its_reason_and_its_tests(number: int):
    assert re.search(r"^\*Why:\* \S", RULES[number], re.MULTILINE) and re.search(
        r"^\*Tests:\* `tests/", RULES[number], re.MULTILINE
    )


@pytest.mark.parametrize("number", RULES)
def test_the_tests_that_a_rule_names_exist(number: int):
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", RULES[number])
    assert named
    for file, function in named:
        there = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}
        assert not function or function in there, f"{file} has no {function}"


def test_references_are_read_in_every_form_that_is_used():
    assert rules_named_in("(rules 7, 10), Rule 4, rules 6 and 9, rules 11 to 13; rule: none") == {4, 6, 7, 9, 10, 11, 13}


def test_every_rule_that_code_and_pages_name_is_there():
    wrong = [
        f"{path.relative_to(ROOT)}: {sorted(more)}"
        for path in sources()
        if (more := rules_named_in(path.read_text()) - {*RULES})
    ]
    assert wrong == []


def test_the_page_is_of_the_edition_that_checkpoints_name():
    words = {1: "first", 2: "second", 3: "third", 4: "fourth"}
    assert PAGE.startswith(f"# The numerics contract, {words[CONTRACT_EDITION]} edition\n")


def test_the_words_come_before_the_rules_and_their_numbers_are_those_of_the_code():
    words = PAGE[PAGE.index("\n## Words\n") : PAGE.index("\n## Rule 1.")]
    order = fold_tree({(i, i + 1): str(i) for i in range(5)}, (0, 5), lambda left, right: f"({left} + {right})")
    assert f"Of five: {order}" in words
    assert f"without it min(M, {DEFAULT_MAX_BLOCKS})" in words
    assert f"a multiple of {ALIGNED} bytes, on CUDA of {ALIGNED_ON_CUDA}" in words
    assert f"(Here: {seed_of(1337, 'epoch', 3)}.)" in words


def test_the_numbers_in_rules_are_those_of_the_code():
    pattern = MixPattern.of_ratios([2, 1])
    assert f"(Ratios 2 and 1: sources {', '.join(str(pattern.source_at(q)) for q in range(3))}.)" in " ".join(RULES[1].split())
    assert f"pieces of {CANONICAL_PIECE:,} elements" in " ".join(RULES[7].split())


def test_no_line_but_a_table_row_is_longer_than_a_screen_is_wide():
    assert [line[:60] for line in PAGE.splitlines() if len(line) > 160 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", ["README.md", "examples/guides/coming_from.md", "raypar/README.md"])
def test_the_pages_that_promise_bits_link_to_the_contract(page: str):
    assert re.search(r"\]\((\.\./)*(raypar/)?NUMERICS\.md\)", (ROOT / page).read_text())
