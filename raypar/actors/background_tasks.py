"""Work that goes on beside the driver's loop; what goes wrong in it is told to the machine."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable

from raypar.elastic import events as on
from raypar.errors import RayparError, UserCodeError


class BackgroundTasks:
    """`post`: gives an event to the machine."""

    def __init__(self, post: Callable[[on.RunEvent], None]) -> None:
        self.post = post
        self._open: set[asyncio.Task[None]] = set()

    def spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Begin it; it is kept until it ends."""
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._open.add(task)
        task.add_done_callback(self._settled)
        return task

    def _settled(self, task: asyncio.Task[None]) -> None:
        """A task that raised is a mistake of ours; it must end the run, not leave it waiting for an event that never comes."""
        self._open.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            text = "".join(traceback.format_exception(error)).rstrip()
            wrong = RayparError(f"the driver failed:\n{text}", cure="please report it with the lines above")
            self.post(on.CallFailed("error", wrong))

    async def guarded(self, work: Awaitable[on.RunEvent | None]) -> None:
        """What it returns, or the failure that it raises, goes to the machine."""
        try:
            event = await work
        except RayparError as error:
            kind: on.FailureKind = "user" if isinstance(error, UserCodeError) else "error"
            event = on.CallFailed(kind, error)
        except Exception as error:
            event = on.CallFailed("error", error)
        if event is not None:
            self.post(event)
