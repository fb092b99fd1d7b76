"""Failures of Ray's actors and of connections between workers in plain words, for files and lines that users read. Pure."""

from __future__ import annotations

import re

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
