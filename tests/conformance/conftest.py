"""Says how many bad messages the fuzzer of `test_strangers` has tried: one test tries thousands."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """By message; nothing when there were none."""
    from helpers.strangers import CASES

    if CASES:
        told = ", ".join(f"{count:,} of {name}" for name, count in sorted(CASES.items()))
        terminalreporter.write_line(f"bad messages: {sum(CASES.values()):,} cases ({told})")
