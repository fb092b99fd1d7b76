"""The thread for side effects of a run, such as files and callbacks, which must not block the driver's event loop."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.events_for_client import EventFeed
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.run_state_in_ray_kv import DriverReplaced
from raypar.elastic import events as on
from raypar.elastic.run_machine import RunMachine
from raypar.errors import UserCodeError
from raypar.record.events import Event
from raypar.user_code.user_code_errors import error_text

P = ParamSpec("P")
T = TypeVar("T")


class SideEffectThread:
    """Performs side effects one after the other, in the order in which they were requested."""

    def __init__(self, recorder: RunRecorder, machine: RunMachine, feed: EventFeed, tasks: BackgroundTasks) -> None:
        self.recorder = recorder
        """Carries out the side effects."""
        self.machine = machine
        """Knows the present generation."""
        self.feed = feed
        """Gets the recorder's events for the client."""
        self.tasks = tasks
        """Awaits side effects, and posts events to the run machine."""
        self._thread = ThreadPoolExecutor(1, "raypar-effects")
        """The one thread: nothing else calls the recorder, unless a callback hangs in it (`abandon_if_busy`)."""

    def perform(self, call: Callable[[], T], event: Callable[[T], on.RunEvent]) -> None:
        """Perform a side effect; `event(its result)`, or its failure, goes to the run machine."""
        self.tasks.spawn(self._perform(call, event))

    async def _perform(self, call: Callable[[], T], event: Callable[[T], on.RunEvent]) -> None:
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

    async def awaited(self, call: Callable[[], T]) -> T:
        """The result of a side effect. The event loop stays free meanwhile: the client takes a silent driver for hung."""

        def called() -> T:
            try:
                return call()
            except (SystemExit, KeyboardInterrupt) as error:  # of a callback's module, say: would end the driver's loop
                raise UserCodeError(
                    f"code of a callback raised {error_text(error)}\n{traceback.format_exc()}",
                    cure="the last lines of the traceback are where it did",
                ) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, called)

    async def abandon_if_busy(self, limit_s: float) -> bool:
        """Wait up to `limit_s` for the side effects so far. If one of them hangs, leave it and those behind it, and perform
        later ones in a new thread, without callbacks; returns whether that was so."""
        idle = asyncio.wrap_future(self._thread.submit(lambda: None))
        if (await asyncio.wait([idle], timeout=limit_s))[0]:
            return False
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "raypar-effects")
        self.recorder.callbacks = None
        return True

    def aside(self, call: Callable[P, None], *facts: P.args, **named: P.kwargs) -> None:
        """Perform a side effect whose result nobody needs."""
        self._thread.submit(call, *facts, **named)

    def note(self, event: Event) -> None:
        """Send an event to the client and write it to events.jsonl."""
        self.feed.tell(event)
        self.aside(self.recorder.note, event)

    def after_telling_client(self, event: on.RunEvent) -> on.RunEvent:
        """Send the client the recorder's lines about a side effect; returns the side effect's event."""
        self.feed.pass_on(self.recorder.new_events())
        return event
