"""The guides' files and commands, run as they stand there.

A block that begins with `# file: NAME` is written to that file. All `bash` blocks of a guide run in one shell, in the folder of
these files, and end at the first command that fails. The lines of a `text` block are in what the `bash` block before it prints.
A picture that a command draws is the one that lies in `examples/guides/pictures/`. Blocks that say `bash full` run in the long
tests only; `sh` blocks need what the suite does not have, and are read by `tests/unit/test_documentation.py`. `console` blocks
show what somebody has seen.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.guides import GUIDES, PICTURES, Block, code_blocks, guide_script, run_in_forked_processes
from helpers.moto_s3 import ENVIRONMENT, fake_s3

ROOT = Path(__file__).parents[2]
DEADLINE_S = 900.0
SHORT = ("your_own_model", "your_data", "reading_the_swimlane")
"""Guides whose `bash` blocks run in the default suite too. Commands of `FORKED` run one by one in processes that have loaded
PyTorch already; all run in a shell in the long tests.

Of `your_own_model.md` these make the data and plan the job, which checks all of its code as the start of a run does. Training
and export are `bash full`; the default suite trains and exports other jobs (`test_train.py`, `tests/parity/test_export.py`).
"""
FORKED = ("your_own_model", "your_data")
RAY_SHIM = """#!{python}
# `ray start` and `ray stop` for a guide: a cluster with its own ports and folder, whose processes the test knows and ends.
import os, pathlib, signal, subprocess, sys, time
words, pids = sys.argv[1:], pathlib.Path({temp!r}, "pids")
ray = [sys.executable, "-m", "ray.scripts.scripts"]
own = ["--block", "--node-ip-address", "127.0.0.1", "--object-store-memory", str(150 * 2**20), "--disable-usage-stats"]
own += ["--dashboard-agent-listen-port", "0", "--min-worker-port", "0", "--max-worker-port", "0"]
head = ["--temp-dir", {temp!r}, "--include-dashboard", "true", "--dashboard-host", "127.0.0.1"]
if words[:1] == ["start"]:
    log = open({temp!r} + "/ray_start.log", "ab")
    command = [*ray, *words, *own, *(head if "--head" in words else [])]
    node = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    with pids.open("a") as file:
        print(node.pid, file=file)
    until, nodes = time.monotonic() + 120, len(pids.read_text().split())
    status = [*ray, "status", "--address", {address!r}]
    while subprocess.run(status, capture_output=True, text=True).stdout.count(" node_") < nodes:
        if node.poll() is not None or time.monotonic() > until:
            sys.exit("the node has not started:\\n" + pathlib.Path({temp!r}, "ray_start.log").read_text()[-3000:])
        time.sleep(0.5)
elif words[:1] == ["stop"]:
    for pid in map(int, pids.read_text().split()):
        os.kill(pid, signal.SIGTERM)
else:
    os.execv(sys.executable, [*ray, *words])
"""


@contextlib.contextmanager
def stand_in_for_s3(wanted: bool) -> Iterator[dict[str, str]]:
    """The environment by which commands take moto's server on this machine for S3; it has a bucket called `bucket`, and listens
    on `HOST:PORT`."""
    if not wanted:
        yield {}
        return
    with fake_s3() as server:
        yield {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}", "HOST:PORT": f"127.0.0.1:{server.port}"}


@contextlib.contextmanager
def ray_of_its_own() -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """(what a guide's commands are given in place of the usual host and ports, their environment): `ray start` starts nodes
    that end with this."""
    temp = Path(tempfile.mkdtemp(prefix="raypar-", dir="/tmp"))  # short: Ray puts its sockets in it
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, server = str(one.getsockname()[1]), str(other.getsockname()[1])
    shim = temp / "bin" / "ray"
    shim.parent.mkdir()
    shim.write_text(RAY_SHIM.format(python=sys.executable, temp=str(temp), address=f"127.0.0.1:{port}"))
    shim.chmod(0o755)
    home = temp / "home"
    home.mkdir()
    try:
        yield (
            {"HEAD": "127.0.0.1", "6379": port, "8265": server, "BUCKET": "bucket"},
            {"HOME": str(home), "RAY_SHIM": str(shim.parent)},
        )
    finally:
        pids = [int(pid) for pid in (temp / "pids").read_text().split()] if (temp / "pids").exists() else []
        end_sessions(pids)
        shutil.rmtree(temp, ignore_errors=True)


def end_sessions(leaders: list[int]) -> None:
    """Ask the processes to end, and kill what is left of their sessions after half a minute."""
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + 30
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in leaders):
        time.sleep(0.2)
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def run_guide(guide: Path, folder: Path, *, full: bool) -> None:
    """Run the guide's commands in `folder`; fails with what they have printed."""
    blocks = code_blocks(guide)
    needs_s3 = any("s3://BUCKET" in block.text for block in blocks)
    with ray_of_its_own() as (instead, environment), stand_in_for_s3(full and needs_s3) as s3:
        path = f"{environment.pop('RAY_SHIM')}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
        instead |= {"HOST:PORT": s3.pop("HOST:PORT", "")}
        env |= environment | s3 | {"PATH": path, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "COLUMNS": "130"}
        script, log = folder / ".guide.sh", folder / ".guide.log"
        script.write_text(guide_script(blocks, instead, full=full))
        with log.open("wb") as out:
            shell = subprocess.Popen(
                ["bash", str(script)],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        try:
            code = shell.wait(DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    said = log.read_text(errors="replace")
    assert code == 0, f"{guide.name}: exit code {code}\n{said[-5000:]}"
    check_what_is_printed(blocks, said, full=full)


def check_what_is_printed(blocks: list[Block], said: str, *, full: bool) -> None:
    """Each line of a `text` block is in what the command block before it has printed."""
    printed, last = said.split("\n<<block>>\n")[1:], ""
    for block in blocks:
        if block.runs(full):
            last = printed.pop(0)
        elif block.language == "text":
            missing = [line for line in block.text.splitlines() if line.strip() and line.strip() not in last]
            assert missing == [], f"not printed by the block before: {missing}\n{last}"


def check_pictures(folder: Path) -> None:
    """Pictures that were drawn here and belong to the guides are as they were committed."""
    drawn = [picture for picture in folder.glob("*.svg") if (PICTURES / picture.name).exists()]
    assert [p.name for p in drawn if p.read_text() != (PICTURES / p.name).read_text()] == []


@pytest.mark.part(3)
@pytest.mark.parametrize("guide", [guide for guide in GUIDES if guide.stem in SHORT], ids=lambda guide: guide.stem)
def test_the_guides_commands_do_what_it_says(guide: Path, tmp_path: Path):
    if guide.stem in FORKED:
        blocks = code_blocks(guide)
        check_what_is_printed(blocks, run_in_forked_processes(blocks, tmp_path), full=False)
    else:
        run_guide(guide, tmp_path, full=False)
    check_pictures(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.stem)
def test_all_commands_of_every_guide_do_what_it_says(guide: Path, tmp_path: Path):
    run_guide(guide, tmp_path, full=True)


@pytest.mark.full
def test_the_readmes_first_script_trains(tmp_path: Path):
    first = next(block for block in code_blocks(ROOT / "README.md") if block.language == "python")
    (tmp_path / "train.py").write_text(first.text)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=240, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Checkpoint(" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def test_drawings_of_the_guides_load_nothing():
    for drawing in PICTURES.glob("*.svg"):
        assert set(re.findall(r"[a-z]+://[^\s\"'<)]+", drawing.read_text())) <= {"http://www.w3.org/2000/svg"}, drawing.name
