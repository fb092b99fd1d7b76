"""A fence around a library's API that is private or differs between releases: probed once, and one warning if it is missing.

Only `ray_compat/` and `torch_compat/` use such APIs. The rest of raypar calls the functions of these two packages. Those of
Python and NumPy are in `worker/process/generator_positions.py`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import pkgutil
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from raypar.errors import ClusterError, RayparError, error_first_line

API = TypeVar("API")
Result = TypeVar("Result")

log = logging.getLogger("raypar")

API_CHANGED = (ImportError, AttributeError, TypeError, ValueError, LookupError, AssertionError)
"""Errors of calling a private API, or of reading its result, once a release has changed it. Ray's own errors (`RayError`) are
not among them: they have other causes, such as a node that does not answer."""

FENCES: list[Fence[Any]] = []
"""All fences of the modules that this process has imported."""

_lock = threading.RLock()
"""Held while a probe runs."""
_warnings: list[str] = []
"""All warnings of this process about missing APIs."""


def _log_warning(line: str) -> None:
    log.warning("warning: %s", line)


_listener: Callable[[str], None] = _log_warning
"""Receives the next warning about a missing API."""


@dataclass
class _ProbeResult(Generic[API]):
    """The result of a fence's probe."""

    api: API | None = None
    """The API, if `usable`."""
    probed: bool = False
    """Whether the probe has run."""
    missing: str = ""
    """Why the API cannot be used; empty if it can."""
    usable: bool = False
    """Whether `probed` and not `missing`."""
    warned: bool = False
    """Whether the warning was given."""


@dataclass(frozen=True, eq=False)
class Fence(Generic[API]):
    """A private or version-dependent API of a library: why it is used, its tested releases, and what is lost without it."""

    api: str
    """Full name, which begins with the library's: `ray._private.services.ConsolePopen`."""
    reason: str
    """Why no public API is used instead."""
    versions: str
    """The releases of the library with which the fence is tested."""
    feature: str
    """The feature that needs the API, as it stands in the warning "{feature} is off"."""
    without: str
    """The consequence for the user when the API is missing, as it stands in the warning."""
    probe: Callable[[], API]
    """Imports and returns the API. Raises one of `API_CHANGED` if it is gone, renamed or of another form."""
    error: type[RayparError] = ClusterError
    """What `require` raises."""
    _found: _ProbeResult[API] = field(default_factory=_ProbeResult, init=False, repr=False)

    def __post_init__(self) -> None:
        FENCES.append(self)

    @property
    def release(self) -> str:
        """The library's name and its installed release: `Ray 2.60.0`."""
        name = self.api.partition(".")[0]
        shown = {"ray": "Ray", "torch": "PyTorch", "numpy": "NumPy", "python": "Python"}.get(name, name)
        return f"{shown} {release_of(name)}"

    def find(self) -> API | None:
        """The API; None, after a warning, if this release does not have it. Only the first call runs the probe."""
        found = self._found
        if found.usable:
            return found.api
        self.run_probe()
        if found.missing:
            self._warn(found.missing)
        return found.api

    def require(self) -> API:
        """The API. Raises `error` if this release does not have it: for features that have no fallback."""
        if self._found.usable:
            return self._found.api  # type: ignore[return-value]
        self.run_probe()
        if self._found.missing:
            raise self._missing_error(self._found.missing)
        return self._found.api  # type: ignore[return-value]

    @contextlib.contextmanager
    def requiring(self) -> Iterator[API]:
        """`require` for a block, in which `API_CHANGED` errors (the API answers differently) become `error` too."""
        api = self.require()
        try:
            yield api
        except API_CHANGED as error:
            raise self._missing_error(_reason(error)) from error

    def use(self, work: Callable[[API], Result], default: Result) -> Result:
        """`work(api)`; `default`, after a warning, if the API is gone or its answer has changed.

        Other errors, such as Ray's own about a head that does not answer, are raised.
        """
        api = self.find()
        if api is None:
            return default
        try:
            return work(api)
        except API_CHANGED as error:  # the next use tries again: one unexpected answer is no proof
            self.warn_of_unexpected_answer(error)
            return default

    def warn_of_unexpected_answer(self, error: BaseException | None = None) -> None:
        """Warn, once, that the API's answer has changed. `error`: the exception that reading the answer raised."""
        self._warn(_reason(error))

    def reset(self) -> None:
        """Have the next use run the probe again. For tests, which replace the API."""
        vars(self._found).update(vars(_ProbeResult()))

    def run_probe(self) -> None:
        """Run the probe unless it has run; never warns. A module calls it on import for probes that must not run later."""
        found = self._found
        if found.probed:
            return
        with _lock:
            if not found.probed:
                try:
                    found.api = self.probe()
                except API_CHANGED as error:
                    found.missing = _reason(error)
                found.probed, found.usable = True, not found.missing

    def _warn(self, why: str) -> None:
        """Warn that the API is missing, unless that was done."""
        with _lock:
            warned, self._found.warned = self._found.warned, True
        if not warned:
            line = str(self._missing_error(why))
            _warnings.append(line)
            _listener(line)

    def _missing_error(self, why: str) -> RayparError:
        return self.error(
            f"{self.release}: {self.api} is missing or has changed ({why}), so {self.feature} is off: {self.without}",
            cure=f"use {self.release.partition(' ')[0]} {self.versions}, with which raypar is tested, or report this as a bug",
        )


def _reason(error: BaseException | None) -> str:
    """One line about the error that shows that an API has changed."""
    if error is None:
        return "its answer has another form"
    text = error_first_line(error) if isinstance(error, Exception) else ""
    return text if text == type(error).__name__ else f"{type(error).__name__}: {text}"


def release_of(library: str) -> str:
    """The installed release of a library, or Python's own; `?` if unknown. Does not import the library."""
    if library == "python":
        return platform.python_version()
    loaded = getattr(sys.modules.get(library), "__version__", None)
    if isinstance(loaded, str):
        return str(loaded)
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def find_missing_apis(package: str) -> list[RayparError]:
    """An error for each API that the package `ray_compat` or `torch_compat` uses and the installed release lacks.

    Raises the error if the package cannot be imported without that API.
    """
    for module in pkgutil.iter_modules(importlib.import_module(f"raypar.{package}").__path__):
        importlib.import_module(f"raypar.{package}.{module.name}")
    found = []
    for fence in FENCES:
        if fence.api.partition(".")[0] == package.partition("_")[0]:
            try:
                fence.require()
            except RayparError as error:
                found.append(error)
    return found


def fence_warnings() -> tuple[str, ...]:
    """All warnings about missing APIs that this process has given, for a worker's report."""
    return tuple(_warnings)


def send_warnings_to(listener: Callable[[str], None]) -> None:
    """Send later warnings about missing APIs to `listener` instead of the log. Any thread may call it."""
    global _listener
    _listener = listener


@contextlib.contextmanager
def warnings_sent_to(listener: Callable[[str], None]) -> Iterator[None]:
    """`send_warnings_to` for the length of a block."""
    before = _listener
    send_warnings_to(listener)
    try:
        yield
    finally:
        send_warnings_to(before)
