"""The communication ledger: counts the bytes and messages that a rank sends and receives, by operation."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class CommunicationLedger:
    """Counts payload bytes (no headers) to and from other ranks, and calls, by operation: `send`, `all_reduce`, ..."""

    sent: Counter[str] = field(default_factory=Counter)
    """Operation -> bytes."""
    received: Counter[str] = field(default_factory=Counter)
    """Operation -> bytes."""
    messages: Counter[str] = field(default_factory=Counter)
    """Operation -> calls."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def count(self, operation: str, *, sent: int = 0, received: int = 0) -> None:
        """Add one call and its payload."""
        with self._lock:
            self.sent[operation] += sent
            self.received[operation] += received
            self.messages[operation] += 1

    def add_payload(self, operation: str, *, sent: int = 0, received: int = 0) -> None:
        """Add payload to a call that is counted already: of a later phase, or of a size that was not known before."""
        with self._lock:
            self.sent[operation] += sent
            self.received[operation] += received

    def as_dict(self) -> dict[str, dict[str, int]]:
        """The counts by operation, for reports and `--json`."""
        return {
            key: {"sent": self.sent[key], "received": self.received[key], "messages": self.messages[key]}
            for key in sorted(self.messages)
        }
