"""Words for people: what Ray's messages about a failure mean, and what a run waits for.

Pure: used by the driver and by commands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from raypar.plan.wording import count_noun, format_worker_numbers, word_form

PLAIN_WORDS = (
    (r"its node has died", "its node died"),
    (r"The actor died unexpectedly", "its process died"),
    (r"The actor( \w+)? is (temporarily )?unavailable", "it cannot be reached"),
)
"""(pattern of a part of Ray's messages about actors, plain words)."""

RAY_ACTOR_MESSAGE = re.compile(r"(The actor\b.*?(?:[.\n]|$)).*", re.DOTALL)
"""A message of Ray: its first sentence, and the rest, which helps to debug Ray only."""

LOST_RANK_MESSAGE = re.compile(r"(.*?)[^:]* of rank (\d+) with [\d, ]+ \(generation \d+\): lost rank (\d+): .*")
"""A failed operation between workers: where, the rank that reports it, and the rank that is lost."""

MESSAGE_TAGS = re.compile(r"\b(recv|send|batch) tags? (\d+|\[[^]]*\])")
"""Message tags, which mean nothing to users."""


def plain_failure_text(text: str) -> str:
    """A message of raypar or Ray, without message tags and Ray's details."""
    ray_message = RAY_ACTOR_MESSAGE.search(text)
    if ray_message is not None:
        words = next(
            (words for pattern, words in PLAIN_WORDS if re.search(pattern, ray_message[0])), ray_message[1].strip().rstrip(".")
        )
        text = text[: ray_message.start()] + words
    lost_rank = LOST_RANK_MESSAGE.fullmatch(text)
    if lost_rank is not None:
        step = re.search(r"in step \d+", lost_rank[1])
        return (
            f"a connection between two workers broke{f' {step[0]}' if step else ''} (rank {lost_rank[2]} with {lost_rank[3]})"
        )
    return MESSAGE_TAGS.sub(r"\1", text)


SILENCE_S = 2.0
"""Length of a silence after which a line says what is waited for."""
CHANGED_INTERVAL_S, REPEAT_INTERVAL_S = 5.0, 30.0
"""Least time between two such lines of one silence: if the activity has changed, and if it has not.

For a changed activity the silence must also have become twice as long since the last line, or the second interval have passed.
So a long start has few lines."""


class WaitAnnouncer:
    """Decides when a line about a wait is due. All times come from one clock, in seconds."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        """When the current silence began; None before the first."""
        self.said_s = 0.0
        """When the last line of this silence was due."""
        self.said: str | None = None
        """The activity that the last line of this silence named; None if it has had no line."""

    def due_line(self, doing: str | None, now_s: float, since_s: float, patience_s: float = SILENCE_S) -> str | None:
        """The line to print now, such as `no news for 3 s; now loading PyTorch`, or None.

        The seconds are the length of the silence; the activity that is named may have begun later.

        `doing`: the activity that is waited for; None if unknown. `since_s`: when the silence began. `patience_s`: how long a
        silence may last without a line.
        """
        if since_s != self.since_s:
            self.since_s, self.said = since_s, None
        if doing is None or now_s - since_s < patience_s:
            return None
        if self.said is not None:
            changed_s = min(max(CHANGED_INTERVAL_S, self.said_s - since_s), REPEAT_INTERVAL_S)
            if now_s - self.said_s < (changed_s if doing != self.said else REPEAT_INTERVAL_S):
                return None
        self.said, self.said_s = doing, now_s
        return f"no news for {now_s - since_s:.0f} s; now {doing}"


def describe_waited_workers(activities: Mapping[int, str], workers: int, idle: str) -> str:
    """`waiting for 1 of 4 workers (worker 2 is reading sample 17)`. `activities`: worker -> what it is doing.

    Workers whose activity is `idle`, those that only wait for other workers, are left out unless all of them are idle.
    The only worker of a run is named without numbers: `waiting for worker 0 (it is loading PyTorch)`.
    """
    busy = {number: doing for number, doing in activities.items() if doing != idle} or dict(activities)
    if workers == 1 and len(busy) == 1:
        ((number, doing),) = busy.items()
        return f"waiting for the answer of worker {number}" if doing == idle else f"waiting for worker {number} (it is {doing})"
    together: dict[str, list[int]] = {}
    for number, doing in sorted(busy.items()):
        together.setdefault(doing, []).append(number)
    each = [
        f"{format_worker_numbers(numbers)} {word_form(numbers, 'is', 'are')} {doing}" for doing, numbers in together.items()
    ]
    return f"waiting for {len(busy)} of {count_noun(max(workers, len(busy)), 'worker')} ({'; '.join(each)})"
