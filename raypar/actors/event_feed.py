"""What a driver tells its client, in order, kept until the client has it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any


class EventFeed:
    """One client asks again and again for what came after the last line it has."""

    def __init__(self) -> None:
        self.epoch = time.time_ns()
        """Tells the client that the lines are another driver's."""
        self.heard_s = time.monotonic()
        """When the client asked last."""
        self._kept: list[dict[str, Any]] = []
        self._heard = 0
        """So many came before those kept: the client has them."""
        self._more = asyncio.Condition()

    def tell(self, kind: str, **facts: Any) -> None:
        """One line more, from within the event loop."""
        self._kept.append({"kind": kind, "time": time.time(), **facts})
        asyncio.ensure_future(self._wake())  # noqa: RUF006 (ends at once)

    def pass_on(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Lines that somebody else has made, each with its `kind`."""
        for line in lines:
            self.tell(**line)

    async def after(self, epoch: int, cursor: int, wait_s: float) -> tuple[list[dict[str, Any]], int, int]:
        """What came after `cursor` of `epoch`, waiting up to `wait_s` for more; the epoch here, and the next cursor. What came
        before is forgotten. Another epoch's cursor means nothing here: all that is kept is given."""
        self.heard_s = time.monotonic()
        async with self._more:
            if epoch == self.epoch:
                del self._kept[: max(0, cursor - self._heard)]
                self._heard = max(cursor, self._heard)
            if not self._kept:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._more.wait(), wait_s)
            return list(self._kept), self.epoch, self._heard + len(self._kept)

    async def _wake(self) -> None:
        async with self._more:
            self._more.notify_all()
