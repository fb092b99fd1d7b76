"""What a driver tells its client, in order; a client that asks late, or again, hears all of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any


class News:
    """Lines of one driver, kept until it ends."""

    def __init__(self) -> None:
        self.epoch = time.time_ns()
        """Tells the client that the lines are another driver's."""
        self.told: list[dict[str, Any]] = []
        self.heard_s = time.monotonic()
        """When the client asked last."""
        self._more = asyncio.Condition()

    def tell(self, kind: str, **facts: Any) -> None:
        """One line more."""
        self.told.append({"kind": kind, "time": time.time(), **facts})
        asyncio.ensure_future(self._wake())  # noqa: RUF006 (ends at once)

    def pass_on(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Lines that somebody else has made, each with its `kind`."""
        for line in lines:
            self.tell(**line)

    async def after(self, epoch: int, cursor: int, wait_s: float) -> tuple[list[dict[str, Any]], int, int]:
        """What was told after `cursor` of `epoch`, waiting up to `wait_s` for more; the epoch, and the next cursor.
        Another epoch's cursor means nothing here: everything is told."""
        self.heard_s = time.monotonic()
        async with self._more:
            if epoch != self.epoch:
                cursor = 0
            if cursor >= len(self.told):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._more.wait(), wait_s)
            return self.told[cursor:], self.epoch, len(self.told)

    async def _wake(self) -> None:
        async with self._more:
            self._more.notify_all()
