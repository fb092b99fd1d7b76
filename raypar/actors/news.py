"""What a driver has to tell its client, kept until the client has it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any


class News:
    """One client asks again and again for what came after the last it has. `epoch` tells it that this is another driver."""

    def __init__(self) -> None:
        self.epoch = time.time_ns()
        self._kept: list[dict[str, Any]] = []
        self._heard = 0
        """So many came before those kept: the client has them."""
        self._more = asyncio.Condition()

    def tell(self, event: dict[str, Any]) -> None:
        """From within the event loop."""
        self._kept.append(event)
        asyncio.ensure_future(self._wake())  # noqa: RUF006 (ends at once)

    async def after(self, epoch: int, cursor: int, wait_s: float) -> tuple[list[dict[str, Any]], int, int]:
        """What came after `cursor` of `epoch`, waiting up to `wait_s` for more; the epoch here, and the next cursor. What came
        before is forgotten. Another epoch's cursor means nothing here: all that is kept is given."""
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
