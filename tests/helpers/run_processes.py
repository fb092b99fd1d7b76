"""The processes of one run on this machine, found without asking the run: what there is to kill, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from pathlib import Path

import psutil

MARK = "RAYPAR_TEST_RUN"
"""Environment variable that all processes below a marked one inherit."""

SHARED_MEMORY = Path("/dev/shm")
SETTLED_S = 2.0
"""By this age a process has the parent, the environment and the command line by which it is judged."""


class RunProcesses:
    """Everything that runs below one marked process, orphans too. Give `env` to that process, then call `see` now and then.

    A process is known by the mark in its environment, or because it was seen below one that is known: some of Ray's processes
    write their title over their environment.
    """

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.env = {MARK: self.mark}
        self.folders: set[str] = set()
        """Of Ray, as its processes name them in their command lines."""
        self._known: set[psutil.Process] = set()
        self._strangers: set[psutil.Process] = set(psutil.process_iter())
        self._shared_before = _names(SHARED_MEMORY)

    def see(self) -> list[psutil.Process]:
        """Those alive now, by pid."""
        alive = []
        for process in psutil.process_iter():
            if process in self._strangers:
                continue
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process not in self._known:
                    if not self._ours(process):
                        if time.time() - process.create_time() > SETTLED_S:
                            self._strangers.add(process)
                        continue
                    self._known.add(process)
                    self.folders.update(re.findall(r"--temp-dir=(\S+)", " ".join(process.cmdline())))
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def raylets(self) -> dict[str, psutil.Process]:
        """The raylets alive by the id of their node, the head's first; one raylet is one node of Ray."""
        found = {}
        for process in self.see():
            command = " ".join(command_of(process))
            if node := re.search(r"raylet/raylet .*--node_id=(\w+)", command):
                found[node[1]] = process, "node:__internal_head__" in command
        return {node: process for node, (process, head) in sorted(found.items(), key=lambda item: not item[1][1])}

    def left(self, patience_s: float = 10.0) -> list[str]:
        """What is still there after `patience_s`: processes, Ray's folders, new files in shared memory that nobody uses."""
        deadline = time.monotonic() + patience_s
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def end(self) -> None:
        """Kill what is left, by pid, and remove Ray's folders: who would have done it is killed too."""
        for process in self.see():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _ours(self, process: psutil.Process) -> bool:
        parent = process.parent()
        return (parent is not None and parent in self._known) or process.environ().get(MARK) == self.mark

    def _left(self) -> list[str]:
        processes = [f"process {p.pid} {' '.join(command_of(p))[:80]}" for p in self.see()]
        folders = [folder for folder in sorted(self.folders) if Path(folder).exists()]
        shared = {str(SHARED_MEMORY / name) for name in _names(SHARED_MEMORY) - self._shared_before}
        return processes + folders + sorted(shared - _mapped() if shared else shared)


def kill_node(raylet: psutil.Process) -> list[int]:
    """`kill -9` of a raylet and of all its processes at once, as when a machine loses its power; their pids."""
    doomed = [raylet, *raylet.children(recursive=True)]
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return [process.pid for process in doomed]


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return list(process.cmdline())
    return []


def _names(place: Path) -> set[str]:
    return set(os.listdir(place)) if place.is_dir() else set()


def _mapped() -> set[str]:
    """Files that a living process has mapped."""
    mapped: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            mapped.update(region.path for region in process.memory_maps())
    return mapped
