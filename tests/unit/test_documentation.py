"""The README and the guides: links lead somewhere, and the commands, keys and names in them exist."""

import argparse
import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.guides import GUIDES, LANGUAGES, README, ROOT, Block, code_blocks

import raypar
from raypar.cli import COMMANDS, _Parser
from raypar.job import Job
from raypar.job.walk_sections import dotted_keys

CONTRIBUTING = ROOT / ".github/CONTRIBUTING.md"
FOR_DEVELOPERS = [*(ROOT / ".github").rglob("*.md"), *(ROOT / "raypar").glob("*.md"), ROOT / "jobs/bench/README.md"]
PAGES = [README, *GUIDES, ROOT / "cluster/README.md", *sorted(FOR_DEVELOPERS)]
README_LINES, OWN_MODEL_BEFORE = 230, 90
KEYS = set(dotted_keys(Job))
WITHOUT_CODE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    return WITHOUT_CODE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files_and_headings_that_are_there(page: Path):
    dead = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_the_readme_is_short_and_in_the_order_in_which_people_ask():
    lines = README.read_text().splitlines()
    assert len(lines) <= README_LINES
    assert lines.index("## Your own model") < OWN_MODEL_BEFORE
    titles = [line for line in lines if line.startswith("## ")]
    asked = ["Start", "Your own model", "Choose a plan", "On a cluster", "When machines come and go"]
    assert [title for title in titles if title[3:] in asked] == [f"## {one}" for one in asked]


def test_every_guide_is_in_the_readme_and_every_picture_in_a_guide():
    readme = README.read_text()
    assert [guide.name for guide in GUIDES if f"(examples/guides/{guide.name})" not in readme] == []
    shown = {Path(link).name for guide in GUIDES for link in links(guide) if link.startswith("pictures/")}
    assert {picture.name for picture in (ROOT / "examples/guides/pictures").iterdir()} == shown


def test_every_command_is_in_the_readme():
    readme = README.read_text()
    assert [name for name in COMMANDS if f"`raypar {name}" not in readme] == []


# -- commands ------------------------------------------------------------------------------------------------------------


def raypar_commands(block: Block) -> Iterator[list[str]]:
    """The words of each call of raypar in a shell block, without redirections, up to the end of the simple command."""
    for line in block.text.splitlines():
        line = re.sub(r"\s\d>(&\d|\s*\S+)", " ", line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if re.fullmatch(r"[|&;()<>]+", word):
                if (found := call_of_raypar(words)) is not None:
                    yield found
                words = []
            else:
                words.append(word)


def call_of_raypar(words: list[str]) -> list[str] | None:
    """The arguments of raypar, if it is what the words call."""
    at = next((i for i, word in enumerate(words) if word == "raypar" or word.endswith("/raypar")), None)
    if at is None or words[at + 1 : at + 2] == ["--version"]:
        return None
    return words[at + 1 :]


@pytest.mark.parametrize("page", [README, *GUIDES, CONTRIBUTING], ids=page_id)
def test_commands_are_ones_that_raypar_takes(page: Path):
    for block in code_blocks(page):
        if block.language not in ("bash", "bash full", "sh") or block.file is not None:
            continue
        for words in raypar_commands(block):
            assert words and words[0] in COMMANDS, words
            module = importlib.import_module(f"raypar.commands.{words[0]}")
            parser = _Parser(prog=f"raypar {words[0]}", allow_abbrev=False)
            module.add_arguments(parser)
            given = parser.parse_args(words[1:])
            check_overrides(given)
            file = getattr(given, "job", "")
            assert not file.startswith("jobs/") or (ROOT / file).is_file(), file


def check_overrides(given: argparse.Namespace) -> None:
    for override in getattr(given, "overrides", ()):
        key, equals, _ = override.partition("=")
        free = re.match(r"(\w+)\.args\.", key)  # the arguments of a function of the user's
        assert equals and (key in KEYS or free or key in MISNAMED), override


MISNAMED = {"gradient_accumulation_steps"}
"""Keys of other frameworks that a guide gives on purpose."""


# -- keys and names ------------------------------------------------------------------------------------------------------


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The keys of a job in a block, as `plan.stages`; what users name themselves is left out."""
    for key, value in tree.items():
        here = ".".join((*path, str(key)))
        if path == ("validation",) and here not in KEYS:  # the name of a set
            yield from leaves(value if isinstance(value, dict) else {}, ("validation", "sets"))
            continue
        yield here
        if here == "metrics":
            yield from (f"metrics.{inner}" for one in value.values() if isinstance(one, dict) for inner in one)
        elif isinstance(value, dict) and not here.endswith(
            (".args", ".adapter", ".styles", ".layout", ".rename", "label_selector")
        ):
            yield from leaves(value, (*path, str(key)))


@pytest.mark.parametrize("page", [README, *GUIDES], ids=page_id)
def test_keys_in_yaml_are_keys_of_a_job(page: Path):
    for block in code_blocks(page):
        tree = yaml.safe_load(block.text) if block.language == "yaml" else {}
        if next(iter(tree), None) in Job.model_fields:
            assert [key for key in leaves(tree) if key not in KEYS] == []


@pytest.mark.parametrize("page", [README, *GUIDES], ids=page_id)
def test_keys_in_the_text_are_keys_of_a_job(page: Path):
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    named = re.findall(r"`([a-z_]+\.[a-z_]+)(?:[:=] [^`]*)?`", prose(page))
    files = {"plan.json", "metrics.jsonl"}
    assert [key for key in named if key.partition(".")[0] in sections and key not in KEYS | files] == []


@pytest.mark.parametrize("page", [README, *GUIDES], ids=page_id)
def test_python_blocks_name_what_raypar_has(page: Path):
    arguments = set(inspect.signature(raypar.Trainer).parameters)
    for block in code_blocks(page):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "raypar":
                assert hasattr(raypar, node.attr), node.attr
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "raypar.Trainer":
                assert {word.arg for word in node.keywords} <= arguments


@pytest.mark.parametrize("page", [README, *GUIDES, CONTRIBUTING], ids=page_id)
def test_names_of_raypar_and_of_files_in_the_text_exist(page: Path):
    text = prose(page)
    names = set(re.findall(r"`raypar\.([A-Z]\w+)", text))
    assert [name for name in names if not hasattr(raypar, name)] == []
    files = set(re.findall(r"`((?:jobs|examples|cluster|tests|raypar)/[\w./]+\.(?:py|yaml|md|sh))`", text))
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("guide", GUIDES, ids=page_id)
def test_every_block_of_a_guide_says_what_it_is(guide: Path):
    fences = re.findall(r"^```(.*)$", guide.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0 and {*fences[::2]} <= LANGUAGES and {*fences[1::2]} <= {""}
