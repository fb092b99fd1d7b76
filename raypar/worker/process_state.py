"""State of a process that users' code may leave changed, less PyTorch's: directory, environment variables, signal handlers.

Loads no torch: the driver watches callbacks with it. What PyTorch adds is in `worker/compute_state.py`, and why all this.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from raypar.errors import UserCodeError

VARIABLES = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "OPENBLAS_",
    "ONEDNN_",
    "DNNL_",
    "ATEN_",
    "TORCH_ALLOW_TF32",
    "TORCH_BLAS",
    "TORCH_CUDNN",
    "TORCH_LINALG",
    "CUBLAS",
    "CUDNN_",
    "NVIDIA_TF32",
    "PYTHONHASHSEED",
    "RAYPAR_",
)
"""Beginnings of the names of environment variables that decide results, here or in processes that are started later."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class EnvironmentState(NamedTuple):
    """What else a process's work depends on. Slower to read: compared once a step, after a caller's first call, and after
    everything that is done once (imports, the model function, the data set's constructor)."""

    directory: str | None
    """None: it has been removed."""
    variables: tuple[tuple[str, str], ...]
    """Environment variables that begin as `VARIABLES` say, by name."""
    handlers: tuple[Any, ...]
    """Python's, of `_SIGNALS`."""


def environment_state() -> EnvironmentState:
    """The state of this process now."""
    try:
        directory: str | None = os.getcwd()
    except FileNotFoundError:
        directory = None
    variables = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(VARIABLES)))
    return EnvironmentState(directory, variables, tuple(signal.getsignal(number) for number in _SIGNALS))


def _environment_back(found: EnvironmentState, wanted: EnvironmentState) -> Iterator[tuple[str, str, str]]:
    """Sets back what differs; yields (kind, what it was, cure). Raises `UserCodeError` for handlers outside the main thread."""
    if found.directory != wanted.directory and wanted.directory is not None:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile, which is nobody's leak
            os.chdir(wanted.directory)
            yield "directory", f"os.chdir({found.directory!r})", "open files by absolute paths"
    if found.variables != wanted.variables:
        before, now = dict(wanted.variables), dict(found.variables)
        changed = sorted(name for name in {**before, **now} if before.get(name) != now.get(name))
        for name in changed:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
        yield (
            "variables",
            ", ".join(f"os.environ[{name!r}] = {now.get(name)!r}" for name in changed),
            "set it where the job is started, before Python is; most are read once, by import torch",
        )
    for number, handler, before_it in zip(_SIGNALS, found.handlers, wanted.handlers, strict=True):
        if handler != before_it:
            call = f"a handler of {number.name}"
            cure = "leave signals to raypar: its workers save and hand over when they are asked to leave"
            if threading.current_thread() is not threading.main_thread() or before_it is None:
                raise UserCodeError(f"{call} was left behind, which can be set back in the main thread only", cure=cure)
            signal.signal(number, before_it)
            yield number.name, call, cure


Warnings = tuple[tuple[str, str], ...]
"""(what was left by whom, the line for people): the first is the same wherever it happens."""


class EnvironmentGuard:
    """Compares the environment after users' code has run, sets it back, and keeps a line for people."""

    def __init__(self) -> None:
        self.environment = environment_state()
        """What is right."""
        self._told: set[str] = set()
        self._lines: list[tuple[str, str]] = []

    def accept_directory(self) -> None:
        """As `accept_environment`, of the directory alone."""
        self.environment = self.environment._replace(directory=environment_state().directory)

    def accept_environment(self) -> None:
        """What has been set since is right from now on."""
        self.environment = environment_state()

    def check_environment(self, caller: str) -> bool:
        """Whether `caller` has left nothing changed; else it is set back. Raises `UserCodeError` for what cannot be."""
        found = environment_state()
        if found == self.environment:
            return True
        for kind, call, cure in _environment_back(found, self.environment):
            self.tell(kind, caller, call, cure)
        return False

    @contextlib.contextmanager
    def watching(self, caller: str) -> Iterator[None]:
        """Around users' code: what it changes is set back."""
        yield
        self.check_environment(caller)

    def tell(self, kind: str, caller: str, call: str, cure: str) -> None:
        """Keep a line about something that has been set back."""
        self.pass_on([(f"{kind} of {caller}", f"{caller} left {call} behind: set back\n  cure: {cure}")])

    def pass_on(self, lines: Iterable[tuple[str, str]]) -> None:
        """Keep lines, perhaps of another process's guard: each kind and caller once."""
        for key, line in lines:
            if key not in self._told:
                self._told.add(key)
                self._lines.append((key, line))

    def lines(self) -> Warnings:
        """What people have not been told yet."""
        lines, self._lines = self._lines, []
        return tuple(lines)
