"""Failures of Ray's actors and of connections between workers in plain words, for files and lines that users read. Pure."""

from __future__ import annotations

import re

PLAINLY = (
    (r"its node has died", "its node died"),
    (r"The actor died unexpectedly", "its process died"),
    (r"The actor( \w+)? is (temporarily )?unavailable", "it cannot be reached"),
)
"""(pattern of a part of Ray's messages about actors, plain words)."""

RAYS = re.compile(r"(The actor\b.*?(?:[.\n]|$)).*", re.DOTALL)
"""A message of Ray: its first sentence, and the rest, which helps to debug Ray only."""

BROKEN = re.compile(r"(.*?)[^:]* of rank (\d+) with [\d, ]+ \(generation \d+\): lost rank (\d+): .*")
"""A failed operation between workers: where, the rank that reports it, and the rank that is lost."""

TAGS = re.compile(r"\b(recv|send|batch) tags? (\d+|\[[^]]*\])")
"""Message tags, which mean nothing to users."""


def plain_failure_text(text: str) -> str:
    """A message of raypar or Ray, without message tags and Ray's details."""
    rays = RAYS.search(text)
    if rays is not None:
        words = next((words for theirs, words in PLAINLY if re.search(theirs, rays[0])), rays[1].strip().rstrip("."))
        text = text[: rays.start()] + words
    broken = BROKEN.fullmatch(text)
    if broken is not None:
        step = re.search(r"in step \d+", broken[1])
        return f"a connection between two workers broke{f' {step[0]}' if step else ''} (rank {broken[2]} with {broken[3]})"
    return TAGS.sub(r"\1", text)
