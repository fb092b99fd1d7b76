"""A local Ray cluster listens on the loopback address only, and no port or file of its gives another user anything."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from helpers import unauthorised_access
from helpers.tiny_job import write_job

from raypar.actors.local_cluster_token import TOKEN_FILE, find_local_token

ROOT = Path(__file__).parents[2]
START_S = 120.0


def open_inodes(pid: int) -> set[int]:
    """Of the files and sockets that this process has open."""
    found: set[int] = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
    return found


@pytest.mark.chaos
def test_a_user_without_the_token_gets_nothing_from_a_run_and_its_user_drains_a_node(tmp_path):
    """`RAY_AUTH_MODE=disabled` in the environment makes no difference."""
    temp = Path(tempfile.mkdtemp(prefix="rp", dir="/tmp"))
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_A")}
    env |= {"TMPDIR": str(temp), "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "HOME": str(temp), "RAY_AUTH_MODE": "disabled"}
    words = ["steps=100000", "validation=null", "checkpoint.every=0", "model.args.sleep_s=0.02", "elastic={}"]
    command = [sys.executable, "-m", "raypar", "train", str(write_job(tmp_path)), "--local-nodes", "2", "--json"]
    for word in words:
        command += ["--set", word]
    output, run = tmp_path / "told", tmp_path / "runs/tiny"
    with output.open("w") as file:
        process = subprocess.Popen(command, env=env, cwd=ROOT / "tests", stdout=file)
    try:
        deadline = time.monotonic() + START_S
        while '"kind": "step"' not in output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        cluster = json.loads((run / "cluster.json").read_text())
        token = find_local_token(cluster["address"])
        (folder,) = temp.glob("raypar-*")
        file = folder / TOKEN_FILE
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert token is not None and len(token) == 64 and json.loads(file.read_text())["token"] == token
        assert find_local_token("127.0.0.1:1") is None and not (temp / ".ray").exists()

        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        addresses = [at.laddr for one in family for at in one.net_connections("inet") if at.status in ("LISTEN", "NONE")]
        assert len(addresses) > 10 and {at.ip.removeprefix("::ffff:") for at in addresses} == {"127.0.0.1"}
        commands = [word for one in family for word in one.cmdline()]
        assert not [word for word in commands if token in word], "what `ps` shows to everybody"

        there = [path for place in (folder, run) for path in place.rglob("*") if path.is_file() and path != file]
        assert len(there) > 20 and not [path for path in there if token.encode() in path.read_bytes()]
        assert token not in output.read_text()

        sockets = [str(path) for path in folder.rglob("sockets/*")]
        inodes = {inode for one in family for inode in open_inodes(one.pid)}
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        sockets += [row[7] for row in rows if len(row) > 7 and int(row[6]) in inodes and row[7].startswith("@")]
        shared = {region.path for one in family for region in one.memory_maps() if region.path.startswith("/dev/shm/")}
        files = [str(path) for path in (folder, file, folder / "r")] + sorted(path for path in shared if os.path.exists(path))
        asked = {"ports": sorted({at.port for at in addresses}), "sockets": sockets, "files": files, "token": token}
        tried = subprocess.run(
            [sys.executable, unauthorised_access.__file__, json.dumps(asked)], check=True, capture_output=True, text=True
        )
        got = json.loads(tried.stdout)
        if os.getuid() == 0:
            assert not got["read"] and len(sockets) > 4
        told_by_grpc, told_by_http = 0, 0
        for port, (without, right, http) in got["ports"].items():
            # 12: the process does not offer that service. With the token some answer of the service itself comes.
            assert {*without} <= {unauthorised_access.UNAUTHENTICATED, 12}, (port, without)
            told_by_grpc += (
                bool(without)
                and unauthorised_access.UNAUTHENTICATED in without
                and {*right} - {12, unauthorised_access.UNAUTHENTICATED, None} != set()
            )
            assert http == [] or (http[0] == 401 and http[1] != 401), (port, http)
            told_by_http += bool(http)
        assert told_by_grpc >= 7 and told_by_http >= 1, got["ports"]

        drained = subprocess.run(
            [sys.executable, "-m", "raypar", "drain", str(cluster["nodes"][1]["pid"])], env=env, capture_output=True, text=True
        )
        assert drained.returncode == 0, drained.stderr
        assert "is going to leave" in drained.stdout and token not in drained.stdout + drained.stderr
    finally:
        process.terminate()
        process.wait(60)
        left = list(temp.glob("raypar-*"))
        shutil.rmtree(temp, ignore_errors=True)
    assert not left, "the token goes with the folder"
