"""The README's and the guides' blocks of code, and how a guide's commands are run: as a shell script, or one by one."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.processes import Worker

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


def run_in_forked_processes(blocks: Iterable[Block], folder: Path) -> str:
    """Write the blocks' files and run their `bash` commands, each `raypar WORDS` or `python FILE` in a process of its own that
    has loaded PyTorch; what they print, each block after a line `<<block>>`. Fails at the first that fails."""
    printed = ""
    for block in blocks:
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        elif block.runs(full=False):
            printed += "\n<<block>>\n"
            for command in block.text.splitlines():
                worker = Worker()
                try:
                    worker.call(_run_command, str(folder), shlex.split(command))
                    code, said = worker.result(120.0)
                finally:
                    worker.end()
                assert code == 0, f"{command}: exit code {code}\n{said}"
                printed += said
    return printed


def _run_command(state: dict[str, Any], folder: str, words: list[str]) -> tuple[int, str]:
    """(exit code, what is printed)."""
    from raypar.cli import main

    os.chdir(folder)
    os.environ["COLUMNS"] = "130"
    with io.StringIO() as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = 0
        if words[0] == "python":
            (script,) = words[1:]
            sys.path.insert(0, folder)
            runpy.run_path(script, run_name="__main__")
        else:
            assert words[0] == "raypar", words
            code = main(words[1:])
        return code, out.getvalue()
