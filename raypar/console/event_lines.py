"""Formats the events of a run as lines of text, for the terminal and for `raypar status`. Pure.

Nodes are shown by the first 8 characters of their id. `step` in an event is the number of steps done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raypar.elastic.plain_failure_text import plain_failure_text

Event = Mapping[str, Any]


def event_line(event: Event) -> str | None:
    """The line for an event; None for events that tell users nothing new (steps have a progress line)."""
    say = LINE_OF_KIND.get(event["kind"])
    return say(event) if say is not None else None


class EventNarrator:
    """Makes the lines for a sequence of events; also reports generations that were tried and given up."""

    def __init__(self) -> None:
        self.trying: int | None = None
        """The generation that is being started; None while none is."""
        self.known = 1
        """The last generation whose outcome was reported."""

    def __call__(self, event: Event) -> str | None:
        """The line of the next event, or None."""
        kind, trying = event["kind"], self.trying
        if kind == "recovering" and "workers" in event:
            self.trying = event["generation"]
        elif kind in ("recovering", "generation", "end", "started"):
            self.trying = None
        if kind == "recovering" and self.trying is None and trying is not None:
            self.known = trying
            return f"generation {trying} is given up: {plain_failure_text(event['text'])}"
        if kind == "started":
            self.known = 1
        if kind == "generation":
            missed, self.known = range(self.known + 1, event["generation"]), event["generation"]
            return event_line({**event, "missed": [*missed]})
        return event_line(event)


def started_line(event: Event) -> str | None:
    """The line when the workers have started; None for old run folders without its text."""
    return str(event["text"]) if "text" in event else None


def lost_line(event: Event) -> str:
    """The line for a lost worker."""
    return f"lost {worker_label(event)}: {short_loss_reason(event.get('why') or 'it died')}"


def recovering_line(event: Event) -> str:
    """The line when a recovery begins, or has a plan for the next generation (an event with `workers`)."""
    if "workers" not in event:
        return f"training stands still: {plain_failure_text(event['text'])}"
    plan = f" = {event['plan']}" if event.get("plan") else ""
    text = f"trying generation {event['generation']}: {count_noun(len(event['workers']), 'worker')}{plan}"
    if event.get("state") in STATE_SOURCES:
        text += f"; {STATE_SOURCES[event['state']].format(step=event.get('step', 0))}"
    elif event.get("moved_elements"):
        text += f"; {count_noun(event['moved_elements'], 'parameter')} and their optimizer state move"
    return text


def joined_line(event: Event) -> str:
    """The line for a worker that has started during the run."""
    return f"joined: {worker_label(event)}"


def draining_line(event: Event) -> str:
    """The line for a worker that was asked to leave."""
    return f"{worker_label(event)} is going to leave: {event.get('why') or 'its node is drained'}; " + (
        "its work moves off" if event.get("works", True) else "it has no work"
    )


def generation_line(event: Event) -> str:
    """The line when a new generation trains: its workers, plan and schedule, and what the change has cost."""
    facts = [count_noun(len(event["workers"]), "worker")]
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
        text += f"; {count_noun(event['again'], 'step')} executed again"
    return text


def replay_line(event: Event) -> str:
    """The line while steps are replayed: the present step, and the last one to replay."""
    return f"executing steps again: {event['step']} of {event['until']}"


def own_text_line(event: Event) -> str | None:
    """The event's own text; None if it has none."""
    return str(event["text"]) if event.get("text") else None


def warning_line(event: Event) -> str:
    """The line for a warning."""
    return f"warning: {event['text']}"


def checkpoint_line(event: Event) -> str:
    """The line for a saved checkpoint."""
    return f"step {event['step']}: checkpoint {event['path']}"


def end_line(event: Event) -> str:
    """The line when the run has ended."""
    why = event.get("why") or event.get("text")
    return f"{event.get('end') or 'ended'} after {count_noun(event.get('step') or event.get('done') or 0, 'step')}" + (
        f": {plain_failure_text(why)}" if why else ""
    )


LINE_OF_KIND: dict[str, Callable[[Event], str | None]] = {
    "started": started_line,
    "lost": lost_line,
    "joined": joined_line,
    "draining": draining_line,
    "recovering": recovering_line,
    "generation": generation_line,
    "waiting": own_text_line,
    "hiring": own_text_line,
    "released": own_text_line,
    "left": own_text_line,
    "node": own_text_line,
    "note": own_text_line,
    "straggler": own_text_line,
    "driver": own_text_line,
    "warning": warning_line,
    "checkpoint": checkpoint_line,
    "stopping": own_text_line,
    "resuming": own_text_line,
    "resumed": own_text_line,
    "end": end_line,
}


STATE_SOURCES = {
    "cut": "the last copy of something was lost: all go back to the mirror's cut after {step} steps",
    "checkpoint": "no memory has all of the state any more: all begin again from the checkpoint after {step} steps",
    "beginning": "no memory has all of the state any more: all begin again from the initial weights",
}
"""Source of a new generation's state, if not live workers -> its part of the line."""


def worker_label(event: Event) -> str:
    """A worker as text: `worker 3 (stage 1, replica 1; pid 5901, node b09ad58f)`; parts that the event lacks are left out."""
    place = seat_without_rank(event.get("coordinate") or "")
    where = ", ".join(
        f"{name} {short_node_id(event[key]) if key == 'node' else event[key]}"
        for name, key in (("pid", "pid"), ("node", "node"))
        if event.get(key) is not None
    )
    known = "; ".join(part for part in (place, where) if part)
    return f"worker {event['worker']}" + (f" ({known})" if known else "")


def seat_without_rank(coordinate: str) -> str:
    """A seat without its rank, which changes with every plan: `stage 1, replica 1` of `worker 3 (stage 1, replica 1)`."""
    return coordinate.partition("(")[2].rpartition(")")[0]


def short_loss_reason(why: str) -> str:
    """The reason of a loss, without the beginning that `lost_line` repeats and without Ray's details."""
    return plain_failure_text(why.rpartition(" was lost: ")[2])


def short_node_id(node: Any) -> str:
    """The first 8 characters of a node's id: enough for `raypar drain`."""
    return str(node)[:8]


def count_noun(number: int, noun: str) -> str:
    """A number with its noun: `1 worker`, `3 workers`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
