"""The page of the numerics contract: each rule has its reason and its tests, and every rule named elsewhere is there."""

import ast
import re
from pathlib import Path

import pytest

from raypar.job.contract import CONTRACT_EDITION

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
    words = {1: "first", 2: "second", 3: "third"}
    assert PAGE.startswith(f"# The numerics contract, {words[CONTRACT_EDITION]} edition\n")


@pytest.mark.parametrize("page", ["README.md", "examples/guides/coming_from.md", "raypar/README.md"])
def test_the_pages_that_promise_bits_link_to_the_contract(page: str):
    assert re.search(r"\]\((\.\./)*(raypar/)?NUMERICS\.md\)", (ROOT / page).read_text())
