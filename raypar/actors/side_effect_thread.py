"""Side effects of a run: one after the other, in a thread beside the driver's loop, for callbacks may take long."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.event_feed import EventFeed
from raypar.actors.journal import DriverReplaced
from raypar.actors.run_recorder import RunRecorder
from raypar.elastic import events as on
from raypar.elastic.run_machine import RunMachine
from raypar.errors import UserCodeError
from raypar.user_code import error_text


class SideEffectThread:
    """Metrics, events and callbacks, in the order in which they were asked for."""

    def __init__(self, recorder: RunRecorder, machine: RunMachine, feed: EventFeed, tasks: BackgroundTasks) -> None:
        self.recorder, self.machine, self.feed, self.tasks = recorder, machine, feed, tasks
        self._thread = ThreadPoolExecutor(1, "raypar-effects")

    def perform(self, call: Callable[[], Any], event: Callable[[Any], on.RunEvent]) -> None:
        """What it returns becomes an event; so does what it raises."""
        self.tasks.spawn(self._perform(call, event))

    async def _perform(self, call: Callable[[], Any], event: Callable[[Any], on.RunEvent]) -> None:
        try:
            result = await self.awaited(call)
        except DriverReplaced:
            self.tasks.post(on.GenerationClaimed(self.machine.membership.generation, ok=False))
        except UserCodeError as error:
            self.tasks.post(on.CallFailed("user", error))
        except Exception as error:
            self.tasks.post(on.CallFailed("error", error))
        else:
            self.tasks.post(event(result))

    async def awaited(self, call: Callable[[], Any]) -> Any:
        """Its result. The loop goes on meanwhile: a driver that does not answer is taken for hung by its client."""

        def called() -> Any:
            try:
                return call()
            except (SystemExit, KeyboardInterrupt) as error:  # of a callback's module, say: would end the driver's loop
                raise UserCodeError(
                    f"code of a callback raised {error_text(error)}\n{traceback.format_exc()}",
                    cure="the last lines of the traceback are where it did",
                ) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, called)

    def aside(self, call: Callable[..., Any], *facts: Any) -> None:
        """Nobody waits for it."""
        self._thread.submit(call, *facts)

    def note(self, kind: str, **facts: Any) -> None:
        """Tell the client, and keep it in the run folder."""
        self.feed.tell(kind, **facts)
        self.aside(self.recorder.note, {"kind": kind, **facts})

    def seen(self, event: on.RunEvent) -> on.RunEvent:
        """`event` is an effect's: what the recorder has to say of it is told first."""
        self.feed.pass_on(self.recorder.new_events())
        return event
