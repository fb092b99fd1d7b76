"""The map is short, and names files that are there; each package has a page of its modules that is up to date."""

import functools
import re
from pathlib import Path

import pytest
from helpers import package_pages

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "raypar/README.md").read_text()
MAP_LINES = 180


@functools.cache
def pages() -> dict[Path, str]:
    """Each page as its modules make it; not when tests are collected, for which 600 files would be read."""
    return package_pages.make_pages()


@pytest.mark.parametrize("page", package_pages.page_paths(), ids=lambda page: page.parent.relative_to(ROOT).as_posix())
def test_the_page_of_a_package_is_what_its_modules_say(page: Path):
    assert page.is_file() and page.read_text() == pages()[page], package_pages.COMMAND


def test_the_map_lists_the_rooms():
    assert package_pages.insert_rooms(MAP) == MAP, package_pages.COMMAND


@pytest.mark.parametrize("place", ["raypar", "tests/helpers", "jobs", "examples", "cluster"])
def test_every_module_says_what_it_is(place: str):
    files = [
        path for path in (ROOT / place).rglob("*.py") if path.name != "__init__.py" or path.parent.parent == ROOT / "raypar"
    ]
    assert [str(path.relative_to(ROOT)) for path in files if not package_pages.first_sentence(path).endswith((".", "?"))] == []


def test_every_module_is_on_a_page():
    listed = {
        (page.parent / link).resolve() for page, text in pages().items() for link in re.findall(r"\]\(([\w/]+\.py)\)", text)
    }
    listed |= {(ROOT / "raypar" / link).resolve() for link in re.findall(r"\]\((\w+\.py)\)", package_pages.rooms())}
    there = {
        path.resolve()
        for place in ("raypar", "tests/helpers", "jobs", "examples", "cluster")
        for path in (ROOT / place).rglob("*.py")
    }
    assert sorted(str(path) for path in there - listed if path.name != "__init__.py") == []


def test_what_the_map_names_is_there():
    there = {path.name for place in ("raypar", "tests", "jobs", "examples", "cluster") for path in (ROOT / place).rglob("*.py")}
    assert sorted({*re.findall(r"\w+\.py", MAP)} - there) == []


def test_the_map_is_read_in_ten_minutes():
    assert len(MAP.splitlines()) <= MAP_LINES
