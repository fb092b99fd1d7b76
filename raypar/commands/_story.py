"""The events of a run in words: one line each, for the terminal and for `raypar status`. Pure.

Of every node its id's first 8 characters are shown. `step` in an event is the number of steps done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Event = Mapping[str, Any]


def in_words(event: Event) -> str | None:
    """One line for people; None for events that tell them nothing new (a step has a progress line of its own)."""
    say = WORDS.get(event["kind"])
    return say(event) if say is not None else None


class Teller:
    """Tells events one after the other, and of a generation that came to nothing that it is given up."""

    def __init__(self) -> None:
        self.trying: int | None = None
        self.known = 1
        """The last generation of which people know what became of it."""

    def __call__(self, event: Event) -> str | None:
        """One line for people, or None."""
        kind, trying = event["kind"], self.trying
        if kind == "recovering" and "workers" in event:
            self.trying = event["generation"]
        elif kind in ("recovering", "generation", "end", "started"):
            self.trying = None
        if kind == "recovering" and self.trying is None and trying is not None:
            self.known = trying
            return f"generation {trying} is given up: {plainly(event['text'])}"
        if kind == "started":
            self.known = 1
        if kind == "generation":
            missed, self.known = range(self.known + 1, event["generation"]), event["generation"]
            return in_words({**event, "missed": [*missed]})
        return in_words(event)


def started(event: Event) -> str | None:
    return str(event["text"]) if "text" in event else None


def lost(event: Event) -> str:
    return f"lost {member(event)}: {reason(event.get('why') or 'it died')}"


def recovering(event: Event) -> str:
    """Twice for one generation: when training is stopped, and when it is known how it goes on."""
    if "workers" not in event:
        return f"training stands still: {plainly(event['text'])}"
    plan = f" = {event['plan']}" if event.get("plan") else ""
    text = f"trying generation {event['generation']}: {counted(len(event['workers']), 'worker')}{plan}"
    if event.get("state") in STATES:
        text += f"; {STATES[event['state']].format(step=event['step'])}"
    elif event.get("moved_elements"):
        text += f"; {counted(event['moved_elements'], 'parameter')} and their optimizer state move"
    return text


def joined(event: Event) -> str:
    return f"joined: {member(event)}"


def draining(event: Event) -> str:
    return f"{member(event)} is going to leave: {event.get('why') or 'its node is drained'}; " + (
        "its work moves off" if event.get("works", True) else "it has no work"
    )


def generation(event: Event) -> str:
    facts = [counted(len(event["workers"]), "worker")]
    if event.get("plan"):
        facts[0] += f" = {event['plan']}"
    if event.get("schedule"):
        was = f" ({event['schedule_was']} before; {event['schedule_why']})" if event.get("schedule_was") else ""
        facts.append(f"schedule {event['schedule']}{was}")
    if event.get("shards_was"):
        now = f"{event['shards']} shard{'s' * (event['shards'] != '1')} instead of {event['shards_was']}"
        facts.append(f"layers cut over {now}, which changes the bits from here on")
    missed = f" ({', '.join(map(str, event['missed']))} came to nothing)" if event.get("missed") else ""
    text = f"generation {event['generation']}{missed}: {', '.join(facts)}"
    if event.get("step") is not None:
        text += f"; training goes on after step {event['step']}"
    if event.get("pause_s") is not None:
        text += f", after a pause of {event['pause_s']:.2f} s"
    if event.get("again"):
        text += f"; {counted(event['again'], 'step')} executed again"
    return text


def executing_again(event: Event) -> str:
    """Of a roll-back: the step that runs, and the last one that people have seen."""
    return f"executing steps again: {event['step']} of {event['until']}"


def told(event: Event) -> str | None:
    """What the event says itself."""
    return str(event["text"]) if event.get("text") else None


def warning(event: Event) -> str:
    return f"warning: {event['text']}"


def checkpoint(event: Event) -> str:
    return f"step {event['step']}: checkpoint {event['path']}"


def end(event: Event) -> str:
    why = event.get("why") or event.get("text")
    return f"{event.get('end') or 'ended'} after {counted(event.get('step', event.get('done', 0)), 'step')}" + (
        f": {plainly(why)}" if why else ""
    )


WORDS: dict[str, Callable[[Event], str | None]] = {
    "started": started,
    "lost": lost,
    "joined": joined,
    "draining": draining,
    "recovering": recovering,
    "generation": generation,
    "waiting": told,
    "hiring": told,
    "left": told,
    "node": told,
    "note": told,
    "straggler": told,
    "driver": told,
    "warning": warning,
    "checkpoint": checkpoint,
    "stopping": told,
    "resuming": told,
    "end": end,
}


STATES = {
    "cut": "the last copy of something was lost: all go back to the mirror's cut after {step} steps",
    "checkpoint": "no memory has all of the state any more: all begin again from the checkpoint after {step} steps",
    "beginning": "no memory has all of the state any more: all begin again from the initial weights",
}
"""Where a new generation has its state from, if not from the workers that live."""

PLAINLY = (
    (r"its node has died", "its node died"),
    (r"The actor died unexpectedly", "its process died"),
    (r"The actor( \w+)? is (temporarily )?unavailable", "it cannot be reached"),
)
"""Parts of Ray's messages about actors, in words."""

RAYS = re.compile(r"(The actor\b.*?(?:[.\n]|$)).*", re.DOTALL)
"""Where a message of Ray begins, its first sentence, and the rest, which is for those who debug Ray."""

BROKEN = re.compile(r"(.*?)[^:]* of rank (\d+) with [\d, ]+ \(generation \d+\): lost rank (\d+): .*")
"""An operation between workers that has failed: where, by whose word, and the rank that it lost; a peer has no other name."""

TAGS = re.compile(r"\b(recv|send|batch) tags? (\d+|\[[^]]*\])")
"""Message tags: numbers that say nothing to people."""


def member(event: Event) -> str:
    """`worker 3 (stage 1, replica 1; pid 5901, node b09ad58f)`, as far as it is known."""
    place = within(event.get("coordinate") or "")
    where = ", ".join(
        f"{name} {short(event[key]) if key == 'node' else event[key]}"
        for name, key in (("pid", "pid"), ("node", "node"))
        if event.get(key) is not None
    )
    known = "; ".join(part for part in (place, where) if part)
    return f"worker {event['worker']}" + (f" ({known})" if known else "")


def within(coordinate: str) -> str:
    """`stage 1, replica 1` of `worker 3 (stage 1, replica 1)`: workers keep their number, ranks change with the plan."""
    return coordinate.partition("(")[2].rpartition(")")[0]


def reason(why: str) -> str:
    """Without what `lost` says already, and without Ray's words for the ends that are common."""
    return plainly(why.rpartition(" was lost: ")[2])


def plainly(text: str) -> str:
    """A message of ours or of Ray's in words: without tags and Ray's details."""
    rays = RAYS.search(text)
    if rays is not None:
        words = next((words for theirs, words in PLAINLY if re.search(theirs, rays[0])), rays[1].strip().rstrip("."))
        text = text[: rays.start()] + words
    broken = BROKEN.fullmatch(text)
    if broken is not None:
        step = re.search(r"in step \d+", broken[1])
        return f"a connection between two workers broke{f' {step[0]}' if step else ''} (rank {broken[2]} with {broken[3]})"
    return TAGS.sub(r"\1", text)


def short(node: Any) -> str:
    """Enough of a node's id for people, and for `raypar drain`."""
    return str(node)[:8]


def counted(number: int, noun: str) -> str:
    """`1 worker`, `3 workers`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
