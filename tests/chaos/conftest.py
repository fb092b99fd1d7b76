"""Says how many cases the fault suite has tried: one test tries thousands."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Runs with faults by their end; nothing when there were none."""
    from helpers.protocol import ENDED

    for flesh in sorted({flesh for flesh, _ in ENDED}):
        ends = {end: count for (of, end), count in sorted(ENDED.items()) if of == flesh}
        told = ", ".join(f"{count:,} {end}" for end, count in ends.items())
        terminalreporter.write_line(f"fault cases, {flesh}: {sum(ends.values()):,} ({told})")
