"""What is done to a run whose machines have a real network between them, as data, and how each such run must end.

A run trains the tiny job on machines of `cluster.local`: `store` has Ray's control store and no CPUs, `driver` has the client
and the driver and no CPUs, `w1`, `w2`, `w3` have two CPUs each. `namespace_runner.py` carries the acts out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COPIES = ("plan.stages=2", "plan.replicas=2")
"""Every piece of state is on two workers, and the mirror keeps further copies."""
LAST_COPIES = ("plan.stages=4", "plan.replicas=1", "elastic={min_workers: 1, mirror: off, lost_state: fail}")
"""Every worker has the only copy of its piece, until the last checkpoint, and the run must not begin again."""

GROWS = (*COPIES, "elastic.max_workers=8")
"""Up to eight workers, two more than the machines have CPUs: the run grows when a machine is added."""
SAVES = (*COPIES, "checkpoint.every=4")
"""Every piece of state is on two workers, and checkpoints are written."""

WORKERS = ("w1", "w2", "w3")


@dataclass(frozen=True)
class Act:
    """One thing that is done: a method of `namespace_runner.ScenarioRun`, with its arguments.

    Machines are named, or by what they hold when it is done: `rank0` (the machine of the first worker), `other` (a machine with
    workers that is not that one), `workers` (all of `WORKERS`).
    """

    do: str
    given: tuple[Any, ...] = ()
    step: int | None = None
    """It is done when so many steps have been seen,"""
    after_s: float = 0.0
    """or so long after the act before."""


def at_step(step: int, do: str, *given: Any) -> Act:
    """An act when so many steps have been seen."""
    return Act(do, given, step=step)


def after(seconds: float, do: str, *given: Any) -> Act:
    """An act so long after the one before."""
    return Act(do, given, after_s=seconds)


@dataclass(frozen=True)
class Scenario:
    """A run, what is done to it, and how it must end."""

    name: str
    acts: tuple[Act, ...]
    layout: tuple[str, ...] = COPIES
    """Overrides of the job."""
    errors: tuple[str, ...] = ()
    """Empty: it must end with the weights of the undisturbed run. Else it may also end with an error that says one of these."""
    must_fail: bool = False
    """Whether it must end with one of `errors`."""
    stall_s: float = 30.0
    """No wait for a step may be longer than this (on a quiet machine; the runner multiplies it)."""
    again: int | None = None
    """Most steps that may be executed a second time; None: any number."""
    steps_after: int = 10
    """Steps that must follow the last act."""
    client: str = "driver"
    """The machine of the client and the driver."""
    fresh_after: bool = False
    """Whether no later scenario may use this cluster."""
    changes: tuple[int, int] = (0, 1000)
    """Fewest and most changes of the workers' generation."""


def cut_off(name: str, who: str, seconds: float, direction: str = "both", **more: Any) -> Scenario:
    """A machine is cut off from all others, and comes back."""
    return Scenario(name, (at_step(8, "partition", who, "all", direction), after(seconds, "heal")), **more)


def split(name: str, a: str, b: str, seconds: float, direction: str = "both", **more: Any) -> Scenario:
    """Two machines cannot reach each other; all others reach both."""
    return Scenario(name, (at_step(8, "partition", a, b, direction), after(seconds, "heal")), **more)


STORE_LOST = ("error: Ray's control store at",)
"""How the error of a run begins whose control store has not answered for longer than the run waits for it."""
STORE_GONE = (*STORE_LOST, "error: the process that followed run")
"""How the error of a run begins that could not reach Ray's control store for longer than Ray allows."""
DRIVER_GONE = ("error: the driver was lost", *STORE_GONE)
STATE_GONE = ("no mirror and no checkpoint has it",)

SCENARIOS: tuple[Scenario, ...] = (
    # A machine with workers is cut off from everything.
    cut_off("a worker machine cut off for 1 s", "rank0", 1, stall_s=8),
    cut_off("a worker machine cut off for 3 s", "rank0", 3, stall_s=12),
    cut_off("a worker machine cut off for 8 s", "rank0", 8),
    cut_off("a worker machine cut off for 20 s", "rank0", 20),
    cut_off("a worker machine cut off for 60 s", "other", 60),
    cut_off("a worker machine whose packets are lost for 8 s", "rank0", 8, "out"),
    cut_off("a worker machine whose packets are lost for 20 s", "other", 20, "out"),
    cut_off("a worker machine that hears nothing for 8 s", "rank0", 8, "in"),
    cut_off("a worker machine that hears nothing for 20 s", "other", 20, "in"),
    # Two machines with workers cannot reach each other, while the driver reaches both.
    split("two worker machines split for 3 s", "rank0", "other", 3, stall_s=20),
    split("two worker machines split for 10 s", "rank0", "other", 10),
    split("two worker machines split for 30 s", "rank0", "other", 30, stall_s=60),
    split("two worker machines split for 60 s", "rank0", "other", 60, stall_s=60),
    split("one worker machine does not hear another for 20 s", "rank0", "other", 20, "in", stall_s=60),
    # The driver's machine.
    cut_off("the driver's machine cut off for 1 s", "driver", 1, stall_s=8),
    cut_off("the driver's machine cut off for 5 s", "driver", 5, stall_s=20),
    cut_off("the driver's machine cut off for 20 s", "driver", 20, stall_s=60),
    cut_off("the driver's machine cut off for 45 s", "driver", 45, stall_s=120, errors=DRIVER_GONE, fresh_after=True),
    cut_off("the driver's machine whose packets are lost for 10 s", "driver", 10, "out", stall_s=40),
    cut_off("the driver's machine that hears nothing for 10 s", "driver", 10, "in", stall_s=40),
    split("the driver cannot reach any worker for 5 s", "driver", "workers", 5, stall_s=20),
    split("the driver cannot reach any worker for 30 s", "driver", "workers", 30, stall_s=80),
    split("a worker machine does not hear the driver for 20 s", "driver", "rank0", 20, "out"),
    split("the driver's machine cannot reach the control store for 5 s", "driver", "store", 5),
    split("the driver's machine cannot reach the control store for 20 s", "driver", "store", 20, stall_s=60),
    split(
        "the driver's machine cannot reach the control store for 45 s",
        "driver",
        "store",
        45,
        stall_s=120,
        errors=STORE_GONE,
        fresh_after=True,
    ),
    # The control store.
    cut_off("the control store cut off for 5 s", "store", 5),
    cut_off("the control store cut off for 20 s", "store", 20, stall_s=60),
    # Ray may count the connections that break with it as failed checks, and then ends all machines, workers included.
    cut_off(
        "the control store cut off for 45 s",
        "store",
        45,
        stall_s=120,
        errors=(*DRIVER_GONE, *STATE_GONE),
        fresh_after=True,
    ),
    cut_off(
        "the control store cut off for 100 s",
        "store",
        100,
        stall_s=150,
        errors=STORE_LOST,
        must_fail=True,
        fresh_after=True,
    ),
    Scenario(
        "the control store's machine dies", (at_step(8, "kill", "store"),), errors=STORE_LOST, must_fail=True, fresh_after=True
    ),
    # Losses, delay, bandwidth.
    Scenario(
        "5 % of all packets are lost", (at_step(8, "shape", "all", 1e9, 0.0, 0.05), after(20, "shape", "all")), stall_s=40
    ),
    Scenario(
        "5 % of the driver's packets are lost", (at_step(8, "shape", "driver", 1e9, 0.0, 0.05), after(20, "shape", "driver"))
    ),
    Scenario(
        "20 % of a worker machine's packets are lost",
        (at_step(8, "shape", "rank0", 1e9, 0.0, 0.2), after(20, "shape", "rank0")),
        stall_s=60,
    ),
    Scenario("50 ms to and from every machine", (at_step(8, "shape", "all", 1e9, 0.05, 0.0), after(20, "shape", "all"))),
    Scenario("1 Mbit/s and 20 ms at one machine", (at_step(8, "shape", "rank0", 1.0, 0.02, 0.0), after(20, "shape", "rank0"))),
    # Membership while the network is broken.
    Scenario(
        "a machine is drained while it is cut off",
        (at_step(8, "partition", "rank0", "all"), after(1, "drain", "cut"), after(10, "heal")),
    ),
    Scenario(
        "a drained machine is cut off before it has left",
        (at_step(8, "drain", "rank0"), after(0.3, "partition", "last", "all"), after(10, "heal")),
    ),
    Scenario(
        "every worker machine is cut off once, one after the other",
        (
            *(act for name in WORKERS for act in (at_step(8, "partition", name, "all"), after(8, "heal"), after(4, "heal"))),
            after(0, "await_workers", 4),
        ),
        stall_s=60,
    ),
    Scenario("a machine flaps every 2 s for a minute", (at_step(8, "flap", "rank0", 2.0, 60.0),), stall_s=60),
    Scenario("a machine is cut off for 1 s, ten times", (at_step(8, "flap", "rank0", 1.0, 20.0),)),
    Scenario("an idle machine flaps every 2 s for a minute", (at_step(4, "add", "w4"), after(1, "flap", "w4", 2.0, 60.0))),
    Scenario(
        "machines join, and as many with workers are lost, for a minute",
        (at_step(8, "churn", 2.0, 60.0),),
        stall_s=60,
        changes=(4, 1000),
    ),
    Scenario(
        "a machine that joins is cut off while it gets its state",
        (
            at_step(8, "add", "w4"),
            after(0, "shape", "w4", 1e9, 0.1, 0.0),
            after(0, "await_event", "recovering", "8 workers"),
            after(0, "partition", "w4", "all"),
            after(8, "heal"),
        ),
        layout=GROWS,
    ),
    Scenario(
        "a machine that joins cannot reach another one for a minute",
        (
            at_step(8, "add", "w4"),
            after(0, "partition", "w4", "rank0"),
            after(0, "await_event", "joined"),
            after(60, "heal"),
        ),
        layout=GROWS,
        changes=(1, 8),
    ),
    Scenario(
        "a machine is cut off while a checkpoint is written",
        (
            at_step(2, "shape", "all", 1e9, 0.05, 0.0),
            at_step(8, "await_checkpoint_begun"),
            after(0, "partition", "rank0", "all"),
            after(8, "heal"),
            after(0, "shape", "all"),
        ),
        layout=SAVES,
    ),
    Scenario("a machine dies while another joins", (at_step(8, "add", "w4"), after(0.5, "kill", "rank0"))),
    Scenario(
        "a machine dies while another is cut off",
        (at_step(8, "partition", "rank0", "all"), after(0.5, "kill", "other"), after(8, "heal")),
        stall_s=60,
    ),
    Scenario("two machines die one after the other", (at_step(8, "kill", "rank0"), at_step(16, "kill", "rank0"))),
    Scenario("a machine that was cut off dies", (at_step(8, "partition", "rank0", "all"), after(5, "kill", "cut"))),
    # Processes and machines that hang.
    Scenario(
        "the driver's machine is cut off while a new driver takes over",
        (at_step(8, "kill_driver"), after(0.5, "partition", "driver", "all"), after(8, "heal")),
        stall_s=40,
    ),
    Scenario("the driver is stopped for 10 s", (at_step(8, "stop_driver"), after(10, "continue_all")), stall_s=30),
    Scenario(
        "the driver is stopped for 45 s, longer than its client waits",
        (at_step(8, "stop_driver"), after(45, "continue_all")),
        stall_s=90,
    ),
    Scenario("the client is stopped for 40 s", (at_step(8, "signal_client", "SIGSTOP"), after(40, "signal_client", "SIGCONT"))),
    Scenario("a worker is stopped for 40 s", (at_step(8, "stop_worker", 0), after(40, "continue_all"))),
    Scenario("a worker machine hangs for 20 s", (at_step(8, "stop", "rank0"), after(20, "continue_all"))),
    Scenario("a worker machine hangs for 70 s", (at_step(8, "stop", "rank0"), after(70, "continue_all"))),
    # The only copy of some state lives behind the partition: it is waited for.
    cut_off("the last copy is cut off for 5 s", "rank0", 5, layout=LAST_COPIES, again=1),
    cut_off("the last copy is cut off for 20 s", "rank0", 20, layout=LAST_COPIES, again=1, stall_s=60),
    # Ray gives up a machine after five failed checks, one every 13 s, and a connection that is reset is a failed one. So it may
    # end the workers of this machine just after they have come back; until then the run has waited for them.
    cut_off("the last copy is cut off for 45 s", "other", 45, layout=LAST_COPIES, again=1, stall_s=110, errors=STATE_GONE),
    cut_off("the last copy hears nothing for 20 s", "rank0", 20, "in", layout=LAST_COPIES, again=1, stall_s=60),
    split("the holders of last copies are split for 20 s", "rank0", "other", 20, layout=LAST_COPIES, again=1, stall_s=60),
    Scenario(
        "the last copy is in a stopped worker for 40 s",
        (at_step(8, "stop_worker", 0), after(40, "continue_all")),
        layout=LAST_COPIES,
        again=1,
        stall_s=60,
    ),
    Scenario(
        "the machine with the last copy dies",
        (at_step(8, "kill", "rank0"),),
        layout=LAST_COPIES,
        errors=STATE_GONE,
        must_fail=True,
    ),
    # People.
    Scenario(
        "Ctrl-C while a machine is cut off",
        (at_step(8, "partition", "rank0", "all"), after(1, "signal_client", "SIGINT"), after(15, "heal")),
        errors=("stopped after",),
        must_fail=True,
    ),
    Scenario(
        "Ctrl-C twice",
        (at_step(8, "signal_client", "SIGINT"), after(0.2, "signal_client", "SIGINT")),
        errors=("stopped after",),
        must_fail=True,
    ),
    Scenario(
        "Ctrl-C twice while a machine is cut off",
        (
            at_step(8, "partition", "rank0", "all"),
            after(0.5, "signal_client", "SIGINT"),
            after(0.5, "signal_client", "SIGINT"),
            after(10, "heal"),
        ),
        errors=("stopped after",),
        must_fail=True,
    ),
    Scenario("two trains of one name at once", (at_step(0, "second_train", "store"),)),
    Scenario("a resume of a run that trains", (at_step(8, "second_resume", "store"), after(0, "second_refused"))),
    Scenario(
        "the client's machine dies, and another resumes",
        (at_step(20, "kill", "driver"), after(1, "resume", "store")),
        layout=SAVES,
        fresh_after=True,
        stall_s=150,
    ),
)
