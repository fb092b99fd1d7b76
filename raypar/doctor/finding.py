"""What a check has found, and how findings are told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from raypar.plan.wording import count_noun

Level = Literal["ok", "warning", "failure", "not checked"]
"""How bad it is. A failure keeps jobs from running; what is not checked says why."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Level
    subject: str
    """What was looked at, in a word or two."""
    text: str
    """What was found, with numbers; or why it could not be checked."""
    cure: str = ""
    """What to do about it; empty if there is nothing to do."""


@dataclass(frozen=True)
class NotKnown:
    """In place of a fact that could not be gathered."""

    why: str
    """The reason: a deadline that has passed, an error."""


def format_findings(findings: Sequence[Finding]) -> str:
    """The findings as text, a line each with its cure below, and their numbers."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<11}  {finding.subject:<{width}}  {finding.text}")
        if finding.cure:
            lines.append(f"{'':<11}  {'':<{width}}  cure: {finding.cure}")
    return "\n".join([*lines, "", count_findings(findings)])


def count_findings(findings: Sequence[Finding]) -> str:
    """The numbers of findings: `20 ok, 2 warnings, 1 failure, 1 not checked`."""
    plurals: dict[Level, str] = {"ok": "ok", "warning": "warnings", "failure": "failures", "not checked": "not checked"}
    counts = [(sum(finding.level == level for finding in findings), level) for level in plurals]
    return ", ".join(count_noun(count, level, plurals[level]) for count, level in counts if count or level != "not checked")


def findings_as_json(findings: Sequence[Finding]) -> str:
    """The findings as one JSON object."""
    return json.dumps({"healthy": not has_failures(findings), "checks": [asdict(finding) for finding in findings]})


def has_failures(findings: Sequence[Finding]) -> bool:
    """Whether one of them is a failure."""
    return any(finding.level == "failure" for finding in findings)
