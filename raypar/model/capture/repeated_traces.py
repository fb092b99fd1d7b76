"""Notices a model that is traced again for most batches, because Python code between its units reads another number of each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable

from raypar.model.capture.trace import Guard, Trace

MANY_TRACES = 8
"""After so many traces of one signature the user is told."""


class RepeatedTraces:
    """Counts the traces of each signature, and keeps a line for the user where there are many."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        """Key -> line for the user, one for each place. A key is the same in all processes."""
        self._counts: Counter[Hashable] = Counter()
        """Signature -> number of its traces."""
        self._seconds: defaultdict[Hashable, float] = defaultdict(float)
        """Signature -> time that its traces took."""

    def add(self, signature: Hashable, made: Trace, before: Trace | None, seconds: float) -> None:
        """Count a new trace. `before`: the trace of the same signature that was used last. `seconds`: time of the new one."""
        self._counts[signature] += 1
        self._seconds[signature] += seconds
        count, guard = self._counts[signature], _first_new_answer(made, before)
        if count < MANY_TRACES or guard is None:
            return
        event = made.events[guard.event]
        read = f"{event.label.strip('_')}() at {event.location}"
        self.lines.setdefault(
            f"many traces: {read}",
            f"the forward reads {read} between units, and the answer is another for each batch: the forward has been "
            f"recorded {count} times, {1000 * self._seconds[signature] / count:.1f} ms each\n"
            "  cure: compute it with tensors (torch.arange(n) < lengths[:, None], torch.where), or inside a module that is a "
            "unit (model.units)",
        )


def _first_new_answer(made: Trace, before: Trace | None) -> Guard | None:
    """The first thing that the forward has read whose answer is not that of the trace before."""
    pairs = zip(made.guards, before.guards, strict=False) if before is not None else ()
    return next((new for new, old in pairs if new.answer != old.answer), None)
