"""A whole raypar run as a contender of a bench: its driver waits between two steps until the bench lets it run some more."""

from __future__ import annotations

import time
from multiprocessing.connection import Client, Connection

from raypar.callbacks import Callback, RunStartInfo, StepInfo, Stop

LEAD = 2
"""Steps before the clock starts: one was executed before the gate opened, one has waited in the workers' queues."""
SETTLE_STEPS = 2.0
"""The step that is under way when the gate closes is over after this many steps; only then another contender may run."""


class Gate(Callback):
    """Talks to `harness.Contender` as a worker does."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.left = 0
        self.enough = False
        self.connection: Connection | None = None

    def on_start(self, info: RunStartInfo) -> None:
        """Say that we are there."""
        self.connection = Client(self.address, "AF_UNIX")
        self.connection.send(("ok", {}))

    def on_step(self, info: StepInfo) -> Stop | None:
        """Go on while there are steps left, else answer and wait for the next command."""
        if self.enough:  # a step that was under way when the run was stopped
            return None
        if self.left:
            self.left -= 1
            if self.left == self.steps:
                self.start_ns = time.perf_counter_ns()
            if self.left:
                return None
            end_ns = time.perf_counter_ns()
            time.sleep(SETTLE_STEPS * (end_ns - self.start_ns) / self.steps / 1e9)
            self.connection.send(("ok", {"start_ns": self.start_ns, "end_ns": end_ns}))
        try:
            while (command := self.connection.recv())[0] == "info":
                self.connection.send(("ok", {}))
        except EOFError:
            return Stop("the bench is gone")
        if command[0] == "stop":
            self.enough = True
            return Stop("the bench has seen enough")
        self.steps = command[1]
        self.left = self.steps + LEAD
        return None
