"""The end of a run that a bench watches. Apart from the models, because a driver that imports no torch starts sooner."""

from __future__ import annotations

from pathlib import Path

from raypar.callbacks import Callback, StepInfo, Stop


class StopWhen(Callback):
    """Ends the run once a file is there."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_step(self, info: StepInfo) -> Stop | None:
        """Asked after every committed step."""
        return Stop("the bench has seen enough") if self.path.exists() else None
