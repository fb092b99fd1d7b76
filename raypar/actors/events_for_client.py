"""The events that a driver sends its client, in order, each kept until the client has received it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable
from typing import Any

from raypar.actors.actor_handle_types import Polled
from raypar.files.redact_secrets import secrets_of_environment, without_certain_secrets
from raypar.record.events import ActivityNotice, Event, StepRecord

STEP_POLLS_PER_S = 5.0
"""Rate at which polls are answered, on average, while only steps are to be told. A poll costs the driver as much processor time
as a call of a worker."""
STEP_POLLS_BURST = 10
"""How many polls may be answered at once before that rate holds: capacity of a token bucket."""


class EventFeed:
    """The events for one client, which polls for those after the last one that it has received."""

    def __init__(self) -> None:
        self.epoch = time.time_ns()
        """Identifies this driver: another epoch tells the client that the driver was replaced."""
        self.heard_s = time.monotonic()
        """When the client last polled."""
        self.told_s = time.monotonic()
        """When the last event was added that was not of kind `waiting_for`."""
        self._kept: list[dict[str, Any]] = []
        """Events that the client may not have received."""
        self._heard = 0
        """Number of events before `_kept`: the client has received them."""
        self._known_secrets = secrets_of_environment(os.environ)
        """Secrets of this process's environment, which no text may contain."""
        self._tokens = float(STEP_POLLS_BURST)
        """How many polls may be answered at once (token bucket) at `_tokens_s`."""
        self._tokens_s = time.monotonic()
        """When `_tokens` was computed last."""
        self._more = asyncio.Condition()
        """Notified when an event is added; not for steps that are held back."""
        self._holds_steps = False
        """Whether a poll is held back that would tell of steps only."""

    def tell(self, event: Event) -> None:
        """Add an event. Call it from within the event loop only."""
        self.told_s = time.monotonic()
        self._add(event)

    def tell_wait(self, text: str) -> None:
        """Add an event that says what the run waits for, while there is nothing else to tell."""
        self._add(ActivityNotice(text=text))

    def _add(self, event: Event) -> None:
        facts = event.facts()
        clean = without_certain_secrets(facts, self._known_secrets)
        if "path" in facts:  # the client opens it
            clean["path"] = facts["path"]
        self._kept.append({"kind": event.kind, "time": time.time(), **clean})
        if not isinstance(event, StepRecord) or not self._holds_steps:
            asyncio.ensure_future(self._wake())  # noqa: RUF006 (ends at once)

    def pass_on(self, events: Iterable[Event]) -> None:
        """Add events, in order."""
        for event in events:
            self.tell(event)

    async def after(self, epoch: int, cursor: int, wait_s: float) -> Polled:
        """(events after `cursor`, this driver's epoch, the next cursor); waits up to `wait_s` for an event.

        Events before `cursor` are dropped. A cursor of another `epoch` means nothing here: then all events are returned.
        """
        self.heard_s = time.monotonic()
        async with self._more:
            if epoch == self.epoch:
                del self._kept[: max(0, cursor - self._heard)]
                self._heard = max(cursor, self._heard)
            if not self._kept:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._more.wait(), wait_s)
            await self._hold_back_steps()
            self._tokens = max(0.0, self._tokens_now() - 1.0)
            return list(self._kept), self.epoch, self._heard + len(self._kept)

    def _tokens_now(self) -> float:
        """The tokens in the bucket at present."""
        now = time.monotonic()
        self._tokens = min(float(STEP_POLLS_BURST), self._tokens + STEP_POLLS_PER_S * (now - self._tokens_s))
        self._tokens_s = now
        return self._tokens

    async def _hold_back_steps(self) -> None:
        """Wait until the token bucket has a token, or an event other than a step is kept. The caller holds `_more`."""
        while self._kept and all(event["kind"] == StepRecord.kind for event in self._kept):
            left_s = (1.0 - self._tokens_now()) / STEP_POLLS_PER_S
            if left_s <= 0:
                return
            self._holds_steps = True
            try:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._more.wait(), left_s)
            finally:
                self._holds_steps = False

    async def _wake(self) -> None:
        async with self._more:
            self._more.notify_all()
