"""Guards the working directory, environment variables and signal handlers of a process against users' code.

Does not import torch, because the driver guards callbacks with it. `worker/process/torch_state_guard.py` adds PyTorch's
state, and says why the state of a process is guarded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NamedTuple

from raypar.errors import UserCodeError

GUARDED_VARIABLES = (
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
"""Prefixes of environment variables that decide results, in this process or in those that it starts later."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class EnvironmentState(NamedTuple):
    """The state of a process outside PyTorch on which users' code may depend.

    Slower to read than PyTorch's: compared once a step, after a caller's first call, and after everything that runs once
    (imports, the model function, the data set's constructor).
    """

    directory: str | None
    """The working directory; None if it has been removed."""
    variables: tuple[tuple[str, str], ...]
    """(name, value) of the environment variables that begin with one of `GUARDED_VARIABLES`, sorted."""
    handlers: tuple[Callable[[int, FrameType | None], None] | int | signal.Handlers | None, ...]
    """Python's handlers of `_SIGNALS`."""


def read_environment_state() -> EnvironmentState:
    """The present `EnvironmentState` of this process."""
    try:
        directory: str | None = os.getcwd()
    except FileNotFoundError:
        directory = None
    # Not `items()`, which encodes and decodes every value of the environment.
    guarded = sorted(name for name in os.environ if name.startswith(GUARDED_VARIABLES))
    variables = tuple((name, os.environ[name]) for name in guarded)
    return EnvironmentState(directory, variables, tuple(signal.getsignal(number) for number in _SIGNALS))


def _restore_environment(caller: str, found: EnvironmentState, wanted: EnvironmentState) -> Iterator[tuple[str, str, str]]:
    """Restore what `caller` has left changed; yields (kind, the call that changed it, cure) of each difference.

    Raises `UserCodeError` for signal handlers outside the main thread, which cannot restore them.
    """
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
                raise UserCodeError(f"{caller} left {call} behind, which can be set back in the main thread only", cure=cure)
            signal.signal(number, before_it)
            yield number.name, call, cure


StateWarnings = tuple[tuple[str, str], ...]
"""(key, line for the user) of each part of the state that users' code left changed, and of a captured model that is traced
often. The key (kind and caller, or place) is the same in all processes."""


class EnvironmentGuard:
    """Compares `EnvironmentState` after users' code has run, restores it, and keeps a line for the user."""

    environment: EnvironmentState
    """The expected state."""
    _told: set[str]
    """Keys of all lines so far."""
    _lines: list[tuple[str, str]]
    """(key, line) pairs that `lines` has not returned yet."""

    def __init__(self) -> None:
        self.environment = read_environment_state()
        self._told, self._lines = set(), []

    def accept_directory(self) -> None:
        """Expect the present working directory from now on."""
        self.environment = self.environment._replace(directory=read_environment_state().directory)

    def accept_environment(self) -> None:
        """Expect the present state from now on."""
        self.environment = read_environment_state()

    def check_environment(self, caller: str) -> bool:
        """Restore what `caller` has left changed; returns whether that was nothing. Raises `UserCodeError` if it is not
        possible."""
        found = read_environment_state()
        if found == self.environment:
            return True
        for kind, call, cure in _restore_environment(caller, found, self.environment):
            self.tell(kind, caller, call, cure)
        return False

    @contextlib.contextmanager
    def watching(self, caller: str) -> Iterator[None]:
        """Context that restores on exit what users' code inside it has changed."""
        yield
        self.check_environment(caller)

    def tell(self, kind: str, caller: str, call: str, cure: str) -> None:
        """Keep a line about state that has been restored."""
        self.pass_on([(f"{kind} of {caller}", f"{caller} left {call} behind: set back\n  cure: {cure}")])

    def pass_on(self, lines: Iterable[tuple[str, str]]) -> None:
        """Keep (key, line) pairs, of this guard or another process's; each key once."""
        for key, line in lines:
            if key not in self._told:
                self._told.add(key)
                self._lines.append((key, line))

    def lines(self) -> StateWarnings:
        """The lines that have not been returned yet; each is returned once."""
        lines, self._lines = self._lines, []
        return tuple(lines)
