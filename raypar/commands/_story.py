"""The events of a run in words: one line each, for the terminal and for `raypar status`. Pure.

Of every node its id's first 8 characters are shown. `step` in an event is the number of steps done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Event = Mapping[str, Any]


def in_words(event: Event) -> str | None:
    """One line for people; None for events that tell them nothing new (a step has a progress line of its own)."""
    say = WORDS.get(event["kind"])
    return say(event) if say is not None else None


def started(event: Event) -> str | None:
    return str(event["text"]) if "text" in event else None


def lost(event: Event) -> str:
    return f"lost {member(event)}: {reason(event.get('why') or 'it died')}"


def recovering(event: Event) -> str:
    """Twice for one generation: when training is stopped, and when it is known how it goes on."""
    if "workers" not in event:
        return f"training stands still: {event['text']}"
    plan = f" = {event['plan']}" if event.get("plan") else ""
    text = f"generation {event['generation']} is made of {counted(len(event['workers']), 'worker')}{plan}"
    if event.get("moved_elements"):
        text += f"; {counted(event['moved_elements'], 'parameter')} and their optimizer state move"
    return text


def joined(event: Event) -> str:
    return f"joined: {member(event)}"


def draining(event: Event) -> str:
    return f"{member(event)} is going to leave: {event.get('why') or 'its node is drained'}; its work moves off"


def generation(event: Event) -> str:
    facts = [counted(len(event["workers"]), "worker")]
    if event.get("plan"):
        facts[0] += f" = {event['plan']}"
    if event.get("schedule"):
        facts.append(f"schedule {event['schedule']}")
    text = f"generation {event['generation']}: {', '.join(facts)}"
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
    return f"{event['end']} after {counted(event.get('step', event.get('done', 0)), 'step')}" + (f": {why}" if why else "")


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
    "note": told,
    "straggler": told,
    "driver": told,
    "warning": warning,
    "checkpoint": checkpoint,
    "stopping": told,
    "resuming": told,
    "end": end,
}


PLAINLY = {
    "its node has died": "its node died",
    "The actor died unexpectedly": "its process died",
    "The actor is unavailable": "it cannot be reached",
    "The actor is temporarily unavailable": "it cannot be reached",
}
"""Parts of Ray's messages about actors, in words."""


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
    why = why.rpartition(" was lost: ")[2]
    return next((words for theirs, words in PLAINLY.items() if theirs in why), why)


def short(node: Any) -> str:
    """Enough of a node's id for people, and for `raypar drain`."""
    return str(node)[:8]


def counted(number: int, noun: str) -> str:
    """`1 worker`, `3 workers`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
