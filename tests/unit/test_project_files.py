"""What people need to take part: the pages, hooks and templates say what the project does."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / ".github/CONTRIBUTING.md").read_text()
CI = (ROOT / ".ci/run").read_text()
README = (ROOT / "README.md").read_text()


def hooks() -> list[dict]:
    return [hook for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"] for hook in repo["hooks"]]


def test_the_hooks_run_what_ci_runs_and_download_nothing():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in repos] == ["local"] and {hook["language"] for hook in hooks()} == {"system"}
    of_ci = re.findall(r'^"\$python" -m (ruff \w+|mypy)( --check)?', CI, re.MULTILINE)
    of_hooks = [re.match(r"python -m (ruff \w+|mypy)( --check)?", hook["entry"]) for hook in hooks()]
    assert of_ci and [(found[1], found[2] or "") for found in of_hooks if found] == of_ci


def test_set_up_is_the_command_of_the_readme_that_ci_runs():
    (command,) = re.findall(r"^python3 -m venv .*pytest$", README, re.MULTILINE)
    set_up = re.search(r"^python3 -m venv .*$", CONTRIBUTING, re.MULTILINE)
    assert set_up is not None and command == f"{set_up[0]} && .venv/bin/python -m pytest"


@pytest.mark.parametrize("what", ["schedule", "sharding style", "event", "key of a job", "check"])
def test_there_is_a_recipe_for_what_is_added_most(what: str):
    recipe = re.search(rf"^## Add an? {what}.*?(?=^## )", CONTRIBUTING, re.MULTILINE | re.DOTALL)
    assert recipe is not None and re.search(r'python -m pytest (-m "not full" )?tests/', recipe[0])


def test_tests_that_recipes_run_are_there():
    named = set(re.findall(r"tests/[\w/]+\.py", CONTRIBUTING))
    assert named and [name for name in named if not (ROOT / name).is_file()] == []


def test_the_changes_begin_with_what_is_not_released_yet():
    import raypar

    titles = re.findall(r"^## (.*)$", (ROOT / ".github/CHANGELOG.md").read_text(), re.MULTILINE)
    assert titles[0].startswith("Unreleased") or titles[0].startswith(raypar.__version__)


@pytest.mark.parametrize("template", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.md")), ids=lambda path: path.stem)
def test_a_template_has_what_the_list_of_templates_shows(template: Path):
    head = yaml.safe_load(template.read_text().split("---")[1])
    assert head["name"] and head["about"]
