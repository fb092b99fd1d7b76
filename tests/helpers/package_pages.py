"""Makes the pages that list the modules of each package, from the first sentence of their docstrings.

`python tests/helpers/package_pages.py` writes them all: a page in each package of raypar and in other folders with code, and
the list of rooms in `raypar/README.md`. `tests/unit/test_map.py` says which are out of date.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "raypar"
MAP = PACKAGE / "README.md"
BEGIN, END = "<!-- rooms: generated -->", "<!-- rooms: end -->"
"""The lines in the map that enclose the list of rooms."""
OTHERS = {
    "examples": (
        "README.md",
        "Example models and programs. `jobs/*.yaml` are their job files; guides are in [guides/](guides).",
    ),
    "jobs/bench": ("FILES.md", "The benches; what they have measured is in [README.md](README.md)."),
    "cluster": ("FILES.md", "Local clusters for tests and benches; what users need is in [README.md](README.md)."),
    "tests/helpers": ("README.md", "What the tests share: references, models, stand-ins, comparisons."),
}
"""Folder outside of the package -> (name of its page, what it begins with)."""
COMMAND = "python tests/helpers/package_pages.py"


@functools.cache
def first_sentence(file: Path) -> str:
    """The first sentence of a module's docstring, on one line; empty without a docstring."""
    docstring = re.match(r'(?:#.*\n)*(r?""".*?"""|"[^"\n]*")', file.read_text(), re.DOTALL)
    text = " ".join((ast.literal_eval(docstring[1]) if docstring else "").split("\n\n")[0].split())
    found = re.match(r".+?(?:(?<!et al)[.?])(?=\s|$)", text)
    return found[0] if found else text.rstrip(":")


def packages() -> list[Path]:
    """The packages directly below raypar."""
    return sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def page_paths() -> list[Path]:
    """Every page but the map."""
    return [folder / "README.md" for folder in packages()] + [ROOT / folder / name for folder, (name, _) in OTHERS.items()]


def make_pages() -> dict[Path, str]:
    """Page -> its text, for every page but the map."""
    heads = [first_sentence(folder / "__init__.py") for folder in packages()] + [head for _, head in OTHERS.values()]
    return {page: _page(page.parent, head) for page, head in zip(page_paths(), heads, strict=True)}


def _page(folder: Path, head: str) -> str:
    lines = [f"# {folder.relative_to(ROOT).as_posix()}", "", head, ""]
    lines += [f"Made by `{COMMAND}` from the first sentences of the modules' docstrings.", "", *_modules(folder, folder)]
    for inside in sorted(path for path in folder.rglob("*/") if next(path.glob("*.py"), None) and path.name != "__pycache__"):
        about = first_sentence(inside / "__init__.py") if (inside / "__init__.py").is_file() else ""
        lines += ["", f"## {inside.relative_to(folder).as_posix()}", "", *([about, ""] if about else [])]
        lines += _modules(inside, folder)
    return "\n".join(lines) + "\n"


def _modules(folder: Path, page: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            yield f"- [{file.name}]({file.relative_to(page).as_posix()}): {first_sentence(file)}"


def rooms() -> str:
    """The list of rooms for the map: the packages of raypar, and the files beside them."""
    lines = [f"- [{folder.name}/]({folder.name}/README.md): {first_sentence(folder / '__init__.py')}" for folder in packages()]
    files = [file for file in sorted(PACKAGE.glob("*.py")) if file.name != "__init__.py"]
    lines += ["", "Beside them:", "", *(f"- [{file.name}]({file.name}): {first_sentence(file)}" for file in files)]
    return "\n".join(lines)


def insert_rooms(text: str) -> str:
    """The map with the list of rooms in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{rooms()}\n{END}{after}"


if __name__ == "__main__":
    for page, text in {**make_pages(), MAP: insert_rooms(MAP.read_text())}.items():
        page.write_text(text)
