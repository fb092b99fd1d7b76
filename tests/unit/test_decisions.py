"""The decision log: each entry says its context, what was decided, what users would lose otherwise, and when to look again."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "raypar/DECISIONS.md").read_text()
ENTRIES = re.findall(r"^## (\d+)\. (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
HALF_A_PAGE = 30


def test_entries_are_numbered_and_a_dozen_or_so():
    assert [int(number) for number, _, _ in ENTRIES] == list(range(1, len(ENTRIES) + 1)) and 10 <= len(ENTRIES) <= 24


@pytest.mark.parametrize("title, text", [entry[1:] for entry in ENTRIES], ids=[entry[0] for entry in ENTRIES])
def test_an_entry_has_its_four_parts_in_half_a_page(title: str, text: str):
    assert re.findall(r"^\*\*(\w[\w ]*?)\.?\*\*", text, re.MULTILINE) == ["Context", "Decision", "Otherwise", "Look again"]
    assert len(text.splitlines()) <= HALF_A_PAGE


def test_the_files_that_entries_name_are_there():
    named = set(re.findall(r"`((?:\w+/)+[\w.]*)`", PAGE))
    assert named and [name for name in named if not any((ROOT / place / name).exists() for place in ("", "raypar"))] == []


def test_the_map_leads_to_it():
    assert "](DECISIONS.md)" in (ROOT / "raypar/README.md").read_text()
