"""Shows a line that several workers print, such as a library's warning about the model, once, and counts the others.

Ray does so from three workers on; of two, it prints the second one's line some seconds later.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

DEDUP_VARIABLE, ALLOW_VARIABLE = "RAY_DEDUP_LOGS", "RAY_DEDUP_LOGS_ALLOW_REGEX"
"""Ray's variables with which users have all lines shown, or those that match a pattern."""
SAME_S = 30.0
"""A line that another worker has printed within this time is not shown again: on a busy machine workers start one by one."""
COUNT_S = 5.0
"""Lines that were not shown are counted aloud after this time, with the next line of a worker, or at the end."""
MOST_LINES = 2000
"""Number of lines that are remembered."""
LONG_LINE = 500
"""Of a longer line, in characters, its hash is remembered."""


@dataclass
class _ShownLine:
    """A line that was shown."""

    time_s: float
    """When it was shown."""
    sources: set[Hashable]
    """The processes that have printed it since."""


@dataclass
class RepeatedWorkerLines:
    """Tells the lines of one stream of the workers that are to be shown, and counts the rest."""

    environment: Mapping[str, str]
    """This process's environment variables."""
    _shown: OrderedDict[str, _ShownLine] = field(default_factory=OrderedDict)
    """The lines shown last, in the order of time."""
    _left_out: dict[Hashable, int] = field(default_factory=dict)
    """Process -> number of its lines that were not shown and not counted aloud."""
    _since_s: float = 0.0
    """When the first of these came."""

    def __post_init__(self) -> None:
        self._off = self.environment.get(DEDUP_VARIABLE, "1").lower() not in ("1", "true")
        self._always = re.compile(self.environment.get(ALLOW_VARIABLE) or r"(?!)")

    def shown(self, lines: list[str], source: Hashable, now_s: float) -> list[str]:
        """Those of the lines of a process that no other process has printed just before."""
        return lines if self._off else [line for line in lines if self._is_shown(str(line), source, now_s)]

    def count(self, now_s: float, *, at_end: bool = False) -> str | None:
        """The line that counts what was not shown, if it is time for it."""
        if not self._left_out or not (at_end or now_s - self._since_s >= COUNT_S):
            return None
        lines, workers = sum(self._left_out.values()), len(self._left_out)
        self._left_out.clear()
        of = f"{lines:,} line{'s' * (lines > 1)} of {workers:,} worker{'s' * (workers > 1)}"
        return f"not shown: {of}, the same as another worker's just before ({DEDUP_VARIABLE}=0 shows all)"

    def _is_shown(self, line: str, source: Hashable, now_s: float) -> bool:
        if not line.strip() or self._always.search(line):
            return True
        if len(line) > LONG_LINE:
            line = hashlib.sha256(line.encode(errors="surrogatepass")).hexdigest()
        before = self._shown.get(line)
        if before is not None and now_s - before.time_s < SAME_S and source not in before.sources:
            before.sources.add(source)
            self._since_s = self._since_s if self._left_out else now_s
            self._left_out[source] = self._left_out.get(source, 0) + 1
            return False
        self._shown[line] = _ShownLine(now_s, {source})
        self._shown.move_to_end(line)
        if len(self._shown) > MOST_LINES:
            self._shown.popitem(last=False)
        return True
