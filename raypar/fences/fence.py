"""A fence around an API of a library that is private or differs between releases: asked for once, missed with a line.

Only `ray_compat/` and `torch_compat/` use such APIs. The rest of raypar calls what these two rooms offer.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from raypar.errors import ClusterError, RayparError, error_first_line

API = TypeVar("API")
Result = TypeVar("Result")

log = logging.getLogger("raypar")

CHANGED = (ImportError, AttributeError, TypeError, ValueError, LookupError, AssertionError)
"""What calling an API raises, or reading its answer, if it is not what it was. Ray's own errors (`RayError`) say other things:
that a node does not answer, say."""

FENCES: list[Fence[Any]] = []
"""All fences of the modules that this process has imported."""

_lock = threading.RLock()
"""Held while a probe runs."""
_said: list[str] = []
"""All lines about missing APIs of this process."""


def _log_line(line: str) -> None:
    log.warning("warning: %s", line)


_listener: Callable[[str], None] = _log_line
"""Gets the next line about a missing API."""


@dataclass
class _Found(Generic[API]):
    """What a probe has found."""

    api: API | None = None
    """The API, if `asked` and not `missing`."""
    asked: bool = False
    """Whether the probe has run."""
    missing: str = ""
    """Why the API is not used; empty if it is."""
    usable: bool = False
    """Whether `asked` and not `missing`."""
    said: bool = False
    """Whether the user has been told so."""


@dataclass(frozen=True, eq=False)
class Fence(Generic[API]):
    """A private or version-dependent API of a library: why it is used, where it was seen to work, and what is lost without."""

    api: str
    """Its full name, which begins with the library's: `ray._private.services.ConsolePopen`."""
    reason: str
    """Why nothing public is used instead."""
    versions: str
    """The releases of the library with which it was seen to work."""
    feature: str
    """What is off without it, in words for users."""
    without: str
    """What happens then, in words for users."""
    probe: Callable[[], API]
    """Returns the API. Raises one of `CHANGED` where it is gone, renamed or of another form. Imports what it needs itself."""
    error: type[RayparError] = ClusterError
    """What `require` raises."""
    _found: _Found[API] = field(default_factory=_Found, init=False, repr=False)

    def __post_init__(self) -> None:
        FENCES.append(self)

    @property
    def release(self) -> str:
        """The library's name for users, and the release of it that is installed: `Ray 2.60.0`."""
        name = self.api.partition(".")[0]
        shown = {"ray": "Ray", "torch": "PyTorch"}.get(name, name)
        return f"{shown} {release_of(name)}"

    def find(self) -> API | None:
        """The API; None, after a warning, where this release does not have it. Only the first call looks."""
        found = self._found
        if found.usable:
            return found.api
        self.look()
        if found.missing:
            self._warn(found.missing)
        return found.api

    def require(self) -> API:
        """The API. Raises `error` where this release does not have it: nothing can be done without."""
        if self._found.usable:
            return self._found.api  # type: ignore[return-value]
        self.look()
        if self._found.missing:
            raise self._missing_error(self._found.missing)
        return self._found.api  # type: ignore[return-value]

    @contextlib.contextmanager
    def required(self) -> Iterator[API]:
        """`require` for a block, which may also find that the API's answer is not what it was: that is the same error."""
        api = self.require()
        try:
            yield api
        except CHANGED as error:
            raise self._missing_error(_reason(error)) from error

    def use(self, work: Callable[[API], Result], otherwise: Result) -> Result:
        """`work(api)`; `otherwise`, after a warning, where the API is gone or its answer is not what it was.

        Other errors, such as Ray's own about a head that does not answer, pass.
        """
        api = self.find()
        if api is None:
            return otherwise
        try:
            return work(api)
        except CHANGED as error:  # the next use tries again: an answer may be odd once
            self.note_odd_answer(error)
            return otherwise

    def note_odd_answer(self, error: BaseException | None = None) -> None:
        """Say, once, that the API's answer is not what it was. `error`: what reading it has raised."""
        self._warn(_reason(error))

    def forget(self) -> None:
        """Have the next use look for the API again. For tests, which put something in its place."""
        found = self._found
        found.api, found.asked, found.missing, found.usable, found.said = None, False, "", False, False

    def look(self) -> None:
        """Run the probe, if it has not run, and say nothing: for a probe that must not run in the middle of something."""
        found = self._found
        if found.asked:
            return
        with _lock:
            if not found.asked:
                try:
                    found.api = self.probe()
                except CHANGED as error:
                    found.missing = _reason(error)
                found.asked, found.usable = True, not found.missing

    def _warn(self, why: str) -> None:
        """Say that the API is missing, once."""
        with _lock:
            told, self._found.said = self._found.said, True
        if not told:
            _say(f"{self._what(why)}: {self.without}\n  cure: {self._cure()}")

    def _missing_error(self, why: str) -> RayparError:
        return self.error(f"{self._what(why)}: {self.without}", cure=self._cure())

    def _what(self, why: str) -> str:
        return f"{self.release}: {self.feature} is off, as {self.api} is not what raypar knows ({why})"

    def _cure(self) -> str:
        return f"use {self.release.partition(' ')[0]} {self.versions}, with which this was seen to work, or report it"


def _reason(error: BaseException | None) -> str:
    """What an error says, in a line."""
    if error is None:
        return "it answers otherwise"
    text = error_first_line(error) if isinstance(error, Exception) else ""
    return text if text == type(error).__name__ else f"{type(error).__name__}: {text}"


def release_of(library: str) -> str:
    """The release of a library that is installed; `?` if it does not say. Does not import it."""
    loaded = getattr(sys.modules.get(library), "__version__", None)
    if isinstance(loaded, str):
        return str(loaded)
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def look_at_room(room: str) -> list[RayparError]:
    """What the installed release does not have of all that a room, `ray_compat` or `torch_compat`, uses: as errors, unraised.

    Raises one of them where the room cannot even be imported without.
    """
    package = importlib.import_module(f"raypar.{room}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"raypar.{room}.{module.name}")
    found = []
    for fence in FENCES:
        if fence.api.partition(".")[0] == room.partition("_")[0]:
            try:
                fence.require()
            except RayparError as error:
                found.append(error)
    return found


def said_lines() -> tuple[str, ...]:
    """All lines about missing APIs that this process has said, for a worker's report."""
    return tuple(_said)


def send_lines_to(listener: Callable[[str], None]) -> None:
    """From now on give lines about missing APIs to `listener`, in whichever thread finds them, and not to the log."""
    global _listener
    _listener = listener


@contextlib.contextmanager
def lines_sent_to(listener: Callable[[str], None]) -> Iterator[None]:
    """`send_lines_to` for the length of a block."""
    before = _listener
    send_lines_to(listener)
    try:
        yield
    finally:
        send_lines_to(before)


def _say(line: str) -> None:
    _said.append(line)
    _listener(line)
