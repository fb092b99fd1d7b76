"""Tasks that run beside the driver's loop; their failures become events of the run machine."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable

from raypar.elastic import events as on
from raypar.errors import RayparError, UserCodeError


class BackgroundTasks:
    """Starts tasks, keeps references to them while they run, and reports those that raise."""

    def __init__(self, post: Callable[[on.RunEvent], None]) -> None:
        self.post = post
        """Gives an event to the run machine."""
        self._open: set[asyncio.Task[None]] = set()
        """Tasks that have not ended: asyncio alone would let them be garbage-collected."""

    def spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Start a task in the background; returns the task."""
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._open.add(task)
        task.add_done_callback(self._settled)
        return task

    def _settled(self, task: asyncio.Task[None]) -> None:
        """End the run if the task raised: that is a bug of raypar, and the run would wait for an event that never comes."""
        self._open.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            text = "".join(traceback.format_exception(error)).rstrip()
            wrong = RayparError(f"the driver failed:\n{text}", cure="please report it with the lines above")
            self.post(on.CallFailed("error", wrong))

    async def guarded(self, work: Awaitable[on.RunEvent | None]) -> None:
        """Await `work`; post the event that it returns, or the failure that it raises."""
        try:
            event = await work
        except RayparError as error:
            kind: on.FailureKind = "user" if isinstance(error, UserCodeError) else "error"
            event = on.CallFailed(kind, error)
        except Exception as error:
            event = on.CallFailed("error", error)
        if event is not None:
            self.post(event)
