"""A first visit to a machine with a GPU: the parts of `gpu.py`, each in a process of its own with a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_page import QUESTION, told
from harness import environment_of_children, page

HERE = Path(__file__).parent


class Visit(NamedTuple):
    """One process of a first visit."""

    words: tuple[str, ...]
    """Its arguments."""
    limit_s: float
    """It is ended after so many seconds."""


FIRST_HALF_HOUR = (
    Visit(("--only", "parity", "--ranks", "1", "2"), 240.0),
    Visit(("--only", "conformance", "--ranks", "2"), 300.0),
    Visit(("--only", "norm"), 60.0),
    Visit(("--only", "loop", "--rounds", "6", "--steps", "3"), 300.0),
    Visit(("--only", "costs", "--rounds", "20"), 90.0),
    Visit(("--only", "offload", "--steps", "2"), 120.0),
    Visit(("--only", "kill", "--ranks", "2", "--rounds", "3"), 120.0),
    Visit(("--only", "sums", "--ranks", "2", "--rounds", "20"), 90.0),
    Visit(("--only", "ray"), 240.0),
    Visit(("--only", "parity", "--ranks", "4"), 240.0),
    Visit(("--only", "reform", "--ranks", "2", "4", "--rounds", "3"), 180.0),
    Visit(("--only", "conformance", "--ranks", "4"), 300.0),
)
"""In the order in which they are worth knowing."""
LEAST_S = 20.0
"""A part is not begun with less time left."""


def visit(
    minutes: float, device: str, page_file: Path | None, command: str, parts: Sequence[Visit] = FIRST_HALF_HOUR
) -> dict[str, Any]:
    """Measure all parts; the page is written after each. What failed or had no time is said under `failures`."""
    found: dict[str, Any] = {}
    end = time.monotonic() + 60 * minutes
    for words, limit_s in parts:
        name, left = " ".join(words), end - time.monotonic()
        if left < LEAST_S:
            _fail(found, name, "not begun: the time is over")
            continue
        print(f"{name} ({left:.0f} s left)", file=sys.stderr, flush=True)
        why = _visited(found, [*words, "--device", device], min(limit_s, left))
        if why:
            _fail(found, name, why)
        if page_file is not None:
            page_file.write_text(page(QUESTION, command, told(found)))
    return found


def _fail(found: dict[str, Any], name: str, why: str) -> None:
    found.setdefault("failures", {})[name] = why
    print(f"  {why}", file=sys.stderr, flush=True)


def _visited(found: dict[str, Any], words: Sequence[str], limit_s: float) -> str:
    """Run `gpu.py` with these words in a session of its own; what it measured goes to `found`. Returns what failed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            [sys.executable, str(HERE / "gpu.py"), "--json", *words],
            env=environment_of_children(),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            child.wait(limit_s)
            ended = f"exit {child.returncode}" if child.returncode not in (0, 1) else ""
        except subprocess.TimeoutExpired:
            ended = f"ended after {limit_s:.0f} s"
        finally:
            _end_group(child)
        out.seek(0)
        err.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
        for part, values in (json.loads(lines[-1]) if lines else {}).items():
            merge = isinstance(values, dict) and isinstance(found.get(part), dict) and part != "environment"
            found[part] = {**found[part], **values} if merge else values
        said = err.read()[-2000:].strip()
        return f"{ended}: {said}" if ended else "" if lines else f"nothing was printed: {said}"


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Everything that a part has started: also ranks that wait for each other, and Ray's processes in its session."""
    for process in _session(child.pid):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    child.wait()


def _session(leader: int) -> list[int]:
    """The processes of a session."""
    import psutil

    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader:
                found.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return found
