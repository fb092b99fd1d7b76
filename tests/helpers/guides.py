"""The README's and the guides' blocks of code, and the shell script that a guide's commands make."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PICTURES = ROOT / "examples" / "guides" / "pictures"
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
LANGUAGES = {"bash", "bash full", "sh", "python", "yaml", "text", "console"}
"""What a block of a guide may be; see `tests/e2e/test_guides.py`."""


@dataclass(frozen=True)
class Block:
    """A block of code."""

    language: str
    """What stands behind the fence."""
    text: str
    """The lines between the fences."""

    @property
    def file(self) -> str | None:
        """The file that it is written to."""
        named = re.match(r"# file: (\S+)\n", self.text)
        return named[1] if named else None

    def runs(self, full: bool) -> bool:
        """Whether its commands are run; `full`: in the long tests."""
        return self.language == "bash" or (full and self.language == "bash full")


def code_blocks(page: Path) -> list[Block]:
    """The page's blocks that name a language."""
    return [Block(*found) for found in re.findall(r"^```(\w[\w ]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)]


def guide_script(blocks: Iterable[Block], instead: Mapping[str, str], *, full: bool) -> str:
    """A bash script that writes the blocks' files and runs their commands, each block after a line `<<block>>`.

    `instead`: word in a guide -> what stands for it, such as a port that is free.
    """
    lines = ["set -eu"]
    for number, block in enumerate(blocks):
        text = re.sub("|".join(rf"\b{re.escape(word)}\b" for word in instead), lambda found: instead[found[0]], block.text)
        if block.file is not None:
            end = f"END_OF_FILE_{number}"
            lines += [f"cat > {block.file} <<'{end}'", text.rstrip("\n"), end]
        elif block.runs(full):
            lines += ["printf '\\n<<block>>\\n'", text]
    return "\n".join(lines) + "\n"
