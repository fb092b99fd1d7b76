"""Every change of phase that the table declares happens somewhere, and no other does (the machine raises)."""

import ast
import inspect
from pathlib import Path

import pytest
from helpers.hash_body import Job
from helpers.machine_steps import first_generation
from helpers.protocol import KINDS, random_faults, simulate
from helpers.transitions import declared_transitions, record_transitions
from test_recovery_rules import WHOLE, do, layout, lost
from test_run_machine import World as RandomWorld

from raypar.elastic import (
    failures,
    find_and_adopt_plan_rules,
    membership_rules,
    rebalance_rules,
    recovery_rules,
    running_rules,
    wait_for_last_copies,
)
from raypar.elastic.events import (
    AllWorkersCopiedState,
    CallFailed,
    CheckpointFailed,
    DrainRequested,
    DriverFailover,
    GenerationClaimed,
    GroupsAborted,
    KeptGradientsApplied,
    PlanAdopted,
    PlanChosen,
    SharesAdopted,
    SharesPrepared,
    StacksReported,
    StepEmitted,
    StepJournalled,
    StepReported,
    StopRequested,
    Tick,
    ValidationEmitted,
    WorkerJoined,
    WorkerSilent,
    WorkersReady,
    WorkerStatusReported,
)
from raypar.elastic.generation_guard import WorkerStatus
from raypar.elastic.phases import Phase as P
from raypar.elastic.phases import UnexpectedEvent
from raypar.elastic.replica_digests import MAX_DOUBTS, compare_replica_digests, end_run_if_doubts_stay
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.elastic.transition_diagram import draw_diagram, insert_diagram
from raypar.elastic.transition_table import ON_ENTER, RECOVERING, ROWS, TABLE, TransitionRow, make_transition_row
from raypar.elastic.wait_for_last_copies import ENDED_GRACE_S
from raypar.errors import GroupAborted, OutOfMemory, RayparError, WorkerLost
from raypar.plan import ParallelPlan, StagePlan

PAGE = Path(__file__).parents[2] / "raypar/elastic/RUN_MACHINE.md"
CTRL_C = StopRequested("Ctrl-C", interrupt=True)
MISTAKE = CallFailed("error", RayparError("a mistake of ours", cure="none"))
SILENT = WorkerSilent(1, 10.0)
ENDED = Tick(unheard=frozenset({1}), ended=frozenset({1}))
FULL = CheckpointFailed(1, OSError("full"))
LATE_S = 10_000.0
ADOPTED = [PlanAdopted(0, 1), PlanAdopted(1, 1)]
STACKS = StacksReported("worker 1 waits")
SHARED = [SharesAdopted(0, 1), SharesAdopted(1, 1)]
PREPARED = SharesPrepared(1, ParallelPlan((StagePlan(0, 2, ((0,), (1,)), (3, 1)),)))


def broke(generation):
    return CallFailed("aborted", GroupAborted("closed"), 0, generation)


def stood(generation, worker, done, **more):
    return WorkerStatusReported(generation, WorkerStatus(worker, done, pieces=WHOLE, **more))


def start(workers=2, pp=1, **policy):
    plan = ParallelPlan.mesh(dp=workers // pp, pp=pp, layers=2)
    fixed = {"workers": workers, "job_steps": 9, "elastic": True}
    return RunMachine(RunPolicy(**(fixed | policy)), plan=plan, held_pieces=layout)


def run(steps=0, **policy):
    """A run after so many steps that people have seen; the next ones are issued."""
    machine = start(**policy)
    do(machine, *first_generation(machine))
    for step in range(steps):
        do(machine, *reports(machine, step), StepJournalled(step), StepEmitted(step))
    return machine


def reports(machine, step, digests=(None, None, None)):
    who = machine.membership
    return [
        StepReported((w,), step, 0.1, who.generation, digests={} if digest is None else {w: digest})
        for w, digest in zip(who.members, digests, strict=False)
    ]


def arrive(phase, **policy):
    """A run in that phase; `elastic` where nothing else is said."""
    match phase:
        case P.STARTING:
            return start(**policy)
        case P.RUNNING:
            return run(**policy)
        case P.FLUSHING:
            return run(1, **({"job_steps": 2} | policy))
        case P.VALIDATING:
            return run(1, **({"validates": True, "validate_every": 1} | policy))
        case P.SAVING:
            return run(1, **({"job_steps": 1} | policy))
        case P.REBALANCING:
            return reported(sharing(run(1, **policy)), 1, 2)
        case P.ENDING:
            return sent(arrive(P.SAVING, **policy), AllWorkersCopiedState(1))
        case P.ABORTING:
            return sent(arrive(P.FLUSHING, **policy), CTRL_C, Tick())
        case P.FAILING:
            return sent(run(elastic=False, **policy), broke(1))
        case P.CLAIMING:
            machine = run(**({"workers": 3} | policy))
            return sent(machine, lost(machine.membership.members[-1]))
        case P.STANDING:
            return sent(arrive(P.CLAIMING, **policy), GenerationClaimed(2, True))
        case P.SETTLING:
            applied = WorkerStatus(0, 1, vote_results={0: "outcome"}, pieces=WHOLE)
            missed = WorkerStatus(1, 0, can_apply_late=True, pieces=WHOLE)
            return sent(arrive(P.STANDING, **policy), *(WorkerStatusReported(2, stand) for stand in (applied, missed)))
        case P.PLANNING:
            machine = sent(run(workers=4, pp=2, **policy), lost(2), lost(3), GenerationClaimed(2, True))
            return sent(machine, stood(2, 0, 0), stood(2, 1, 0))
        case P.ADOPTING:
            return sent(arrive(P.STANDING, **policy), stood(2, 0, 0), stood(2, 1, 0))
        case P.WAITING:
            return arrive(P.ADOPTING, **({"min_workers": 3} | policy))


def beginning(phase, **policy):
    """A run on the way to its first generation."""
    machine = start(**policy)
    if phase is P.PLANNING:  # the first stage has nobody
        machine = start(pp=2, **policy)
        do(machine, DrainRequested(0, ""))
    for event in first_generation(machine):
        if machine.phase is phase:
            return machine
        do(machine, event)
    raise AssertionError(machine.phase)


def sent(machine, *events, now_s=0.0):
    do(machine, *events, now_s=now_s)
    return machine


def writing(machine, done=0):
    """The same while a checkpoint is being written."""
    machine.progress.saving = done
    return machine


def spent(machine):
    """The same after as many recoveries as there may be."""
    machine.health.attempts = machine.policy.max_attempts
    return machine


def taken_over(seen, saved):
    """A run whose driver was killed just after the checkpoint of the last step that its workers have applied."""
    machine = start(save_every=saved, job_steps=20)
    found = DriverFailover((0, 1), 1, seen, machine.membership.plan, (0, 1), saved=saved, next_worker_number=2)
    stands = [stood(2, worker, saved) for worker in (0, 1)]
    return sent(machine, found, GenerationClaimed(2, True), *stands, PlanAdopted(0, 2), PlanAdopted(1, 2))


def replaying(machine, done=2, **progress):
    """The same after a roll-back: people have seen `done` steps."""
    machine.progress.emitted = machine.progress.journalled = done
    for name, value in progress.items():
        setattr(machine.progress, name, value)
    return machine


@pytest.mark.parametrize("phase", [phase for phase in P if phase is not P.OVER])
def test_the_scenes_begin_where_they_say(phase):
    assert arrive(phase).phase is phase


def not_elastic(phase, **policy):
    return arrive(phase, elastic=False, **policy)


def committed_aborting():
    """Aborted while the last step is committed and not seen yet."""
    machine = arrive(P.FLUSHING)
    return sent(machine, CTRL_C, Tick(), *reports(machine, 1), GroupsAborted((2, 2)))


def out_of_memory(worker):
    return CallFailed("lost", OutOfMemory("killed", cure="less"), worker)


SCENES = {
    # the start
    "the workers have started": (lambda: start(), [WorkersReady()], P.CLAIMING),
    "a job of no steps is saved": (lambda: beginning(P.ADOPTING, job_steps=0), ADOPTED, P.SAVING),
    "a resumed job of one more step": (lambda: beginning(P.ADOPTING, steps_before_run=8), ADOPTED, P.FLUSHING),
    "a finished job": (lambda: beginning(P.ADOPTING, steps_before_run=9), ADOPTED, P.OVER),
    "forward passes over what a finished job has trained": (
        lambda: beginning(P.ADOPTING, steps_before_run=9, forward_passes=2),
        ADOPTED,
        P.VALIDATING,
    ),
    "a run is stopped while its first generation is claimed": (lambda: beginning(P.CLAIMING), [CTRL_C], P.OVER),
    "a run is stopped while its workers are asked for the first time": (lambda: beginning(P.STANDING), [CTRL_C], P.OVER),
    "a run is stopped while its first plan is chosen anew": (lambda: beginning(P.PLANNING), [CTRL_C], P.OVER),
    "a run is stopped while its stages are built": (lambda: beginning(P.ADOPTING), [CTRL_C], P.OVER),
    "a worker hangs when it is asked for the first time": (
        lambda: sent(beginning(P.STANDING), Tick(), now_s=LATE_S),
        [STACKS],
        P.OVER,
    ),
    "a worker hangs while its stages are built": (lambda: sent(beginning(P.ADOPTING), Tick(), now_s=LATE_S), [STACKS], P.OVER),
    "a connection breaks at the start": (lambda: not_elastic(P.STARTING), [broke(1)], P.FAILING),
    "a worker dies at the start": (lambda: arrive(P.STARTING), [lost(1)], P.CLAIMING),
    "user code fails at the start": (lambda: arrive(P.STARTING), [MISTAKE], P.OVER),
    "Ctrl-C at the start": (lambda: arrive(P.STARTING), [CTRL_C], P.OVER),
    "a silent worker is gone at the start": (lambda: sent(not_elastic(P.STARTING), SILENT, ENDED), [ENDED], P.OVER),
    # steps
    "the replicas differ again and again": (lambda: doubted(P.RUNNING), "digests", P.OVER),
    "a validation's callback stops the run late": (lambda: run(), [ValidationEmitted(1, "enough")], P.FLUSHING),
    "a replay ends at a flush point that was served": (
        lambda: replaying(run(4, save_every=5, job_steps=20), done=5, saved=5),
        "reports of step 4",
        P.RUNNING,
    ),
    "a replay ends at the end of the job": (
        lambda: replaying(writing(arrive(P.FLUSHING, save_at_end=False), 1)),
        "reports of step 1",
        P.ENDING,
    ),
    "a replay ends where a checkpoint is due": (lambda: replaying(arrive(P.FLUSHING)), "reports of step 1", P.SAVING),
    "a replay ends where a validation is due": (
        lambda: replaying(run(1, validates=True, validate_every=2), saved=2),
        "reports of step 1",
        P.VALIDATING,
    ),
    "a replay ends after the last checkpoint": (lambda: replaying(arrive(P.FLUSHING), saved=2), "reports of step 1", P.OVER),
    "a worker leaves after the steps in flight": (
        lambda: sent(arrive(P.FLUSHING), DrainRequested(1, "")),
        "reports of step 1",
        P.CLAIMING,
    ),
    "a new driver finds a checkpoint of steps that people have not seen": (
        lambda: taken_over(seen=3, saved=4),
        [StepEmitted(3)],
        P.RUNNING,
    ),
    "the job ends while a checkpoint is written": (
        lambda: seen(writing(arrive(P.FLUSHING, save_at_end=False))),
        [StepEmitted(1)],
        P.ENDING,
    ),
    "the job ends after a share of the last checkpoint was lost": (
        lambda: replaying(seen(arrive(P.FLUSHING, save_at_end=False)), done=1, save_error=WorkerLost("gone")),
        [StepEmitted(1)],
        P.CLAIMING,
    ),
    "a hung worker while a checkpoint is written": (
        lambda: writing(not_elastic(P.FLUSHING)),
        [StacksReported("stacks")],
        P.FAILING,
    ),
    "a hung worker while a checkpoint is written, steps ahead": (
        lambda: writing(not_elastic(P.RUNNING)),
        [StacksReported("stacks")],
        P.FAILING,
    ),
    "a silent worker is gone": (lambda: sent(not_elastic(P.FLUSHING), SILENT, ENDED), [ENDED], P.OVER),
    "a silent worker is gone while a checkpoint is written": (
        lambda: writing(sent(not_elastic(P.FLUSHING), SILENT, ENDED)),
        [ENDED],
        P.FAILING,
    ),
    "the same steps ahead": (lambda: writing(sent(not_elastic(P.RUNNING), SILENT, ENDED)), [ENDED], P.FAILING),
    # between two steps
    "Ctrl-C's grace ends in a validation": (lambda: sent(arrive(P.VALIDATING), CTRL_C), [Tick()], P.ABORTING),
    "a validation hangs while a checkpoint is written": (lambda: writing(not_elastic(P.VALIDATING)), [Tick()], P.FAILING),
    "a connection breaks in a validation": (lambda: not_elastic(P.VALIDATING), [broke(1)], P.FAILING),
    "a validation hangs": (lambda: not_elastic(P.VALIDATING), [Tick()], P.OVER),
    "a worker dies in a checkpoint": (lambda: arrive(P.SAVING), [lost(1)], P.CLAIMING),
    "a worker dies in a checkpoint once too often": (lambda: spent(arrive(P.SAVING)), [lost(1)], P.OVER),
    "a checkpoint hangs": (lambda: arrive(P.SAVING), [Tick()], P.CLAIMING),
    "a checkpoint hangs after Ctrl-C": (lambda: sent(arrive(P.SAVING), CTRL_C), [Tick()], P.OVER),
    "a share of the last checkpoint is lost": (lambda: arrive(P.SAVING), [CheckpointFailed(1, WorkerLost("gone"))], P.CLAIMING),
    "the disk is full at the end": (lambda: arrive(P.SAVING), [FULL], P.ENDING),
    "the disk is full at the end, and Ctrl-C": (lambda: sent(arrive(P.SAVING), CTRL_C), [FULL], P.OVER),
    "the disk was full at the end a while ago": (lambda: sent(arrive(P.ENDING), FULL), [Tick()], P.SAVING),
    "the disk is full at the end, and nobody waits": (lambda: arrive(P.ENDING, save_wait_s=0.0), [FULL], P.OVER),
    "the disk is full, three steps before the next checkpoint": (
        lambda: run(3, save_every=3),
        [CheckpointFailed(3, OSError("full"))],
        P.RUNNING,
    ),
    "a worker that was drained in a checkpoint leaves after it": (
        lambda: sent(run(1, save_every=1), DrainRequested(1, "")),
        [AllWorkersCopiedState(1)],
        P.CLAIMING,
    ),
    "a worker dies at the end once too often": (lambda: spent(arrive(P.ENDING)), [lost(1)], P.OVER),
    "the last checkpoint hangs after Ctrl-C": (lambda: sent(arrive(P.ENDING), CTRL_C), [Tick()], P.OVER),
    # other shares of the blocks
    "a worker gets fewer blocks": (lambda: reported(sharing(run(1)), 1), "reports of step 2", P.REBALANCING),
    "a worker gets fewer blocks, and a checkpoint is due": (
        lambda: sharing(run(1, save_every=2)),
        "reports of step 1",
        P.REBALANCING,
    ),
    "other shares are there when no step is in flight": (lambda: asked(idle(run())), [PREPARED], P.REBALANCING),
    "other shares are there when a checkpoint is due": (
        lambda: asked(seen(run(1, save_every=2))),
        [PREPARED],
        P.REBALANCING,
    ),
    "all workers have their blocks": (lambda: arrive(P.REBALANCING), SHARED, P.RUNNING),
    "all workers have their blocks, and a checkpoint is due": (lambda: shared_at_flush_point(save_every=2), SHARED, P.SAVING),
    "all workers have their blocks, and the last step is not seen": (
        lambda: reported(sharing(run(1, save_every=2)), 1),
        SHARED,
        P.FLUSHING,
    ),
    "all workers have their blocks, and a validation is due": (
        lambda: shared_at_flush_point(validates=True, validate_every=2),
        SHARED,
        P.VALIDATING,
    ),
    "a worker would need other connections": (
        lambda: arrive(P.REBALANCING),
        [SHARED[0], SharesAdopted(1, 1, False)],
        P.CLAIMING,
    ),
    "a worker is drained while it gets other blocks": (
        lambda: sent(arrive(P.REBALANCING), DrainRequested(1, "")),
        SHARED,
        P.CLAIMING,
    ),
    "Ctrl-C while workers get other blocks, and all is saved": (
        lambda: sent(saved(shared_at_flush_point(save_every=2), 2), CTRL_C),
        SHARED,
        P.OVER,
    ),
    "Ctrl-C while workers get other blocks, and a checkpoint is written": (
        lambda: sent(writing(shared_at_flush_point(save_every=2), 2), CTRL_C),
        SHARED,
        P.ENDING,
    ),
    "a worker does not take other blocks": (lambda: arrive(P.REBALANCING), [Tick()], P.CLAIMING),
    "a worker does not take other blocks, once too often": (lambda: spent(arrive(P.REBALANCING)), [Tick()], P.OVER),
    "a worker dies while it gets other blocks": (lambda: arrive(P.REBALANCING), [lost(1)], P.CLAIMING),
    # aborted steps
    "a mistake in an abort": (lambda: arrive(P.ABORTING), [MISTAKE], P.OVER),
    "a mistake in an abort while a checkpoint is written": (lambda: writing(arrive(P.ABORTING)), [MISTAKE], P.FAILING),
    "all workers stand where the last checkpoint is": (lambda: saved(arrive(P.ABORTING), 1), [GroupsAborted((1, 1))], P.OVER),
    "all workers stand where a checkpoint is being written": (
        lambda: writing(arrive(P.ABORTING), 1),
        [GroupsAborted((1, 1))],
        P.ENDING,
    ),
    "the last step is seen": (committed_aborting, [StepEmitted(1)], P.SAVING),
    "the last step is seen, and its checkpoint is there": (lambda: saved(committed_aborting(), 2), [StepEmitted(1)], P.OVER),
    "the last step is seen, and its checkpoint is being written": (
        lambda: writing(committed_aborting(), 2),
        [StepEmitted(1)],
        P.ENDING,
    ),
    "a worker that leaves has reported late": (
        lambda: sent(arrive(P.FLUSHING), DrainRequested(1, ""), CTRL_C, Tick()),
        "reports of step 1",
        P.CLAIMING,
    ),
    "a replay is reported late": (lambda: replaying(arrive(P.ABORTING)), "reports of step 1", P.SAVING),
    "a replay is reported late, and its checkpoint is there": (
        lambda: replaying(arrive(P.ABORTING), saved=2),
        "reports of step 1",
        P.OVER,
    ),
    "a replay is reported late, and its checkpoint is being written": (
        lambda: replaying(arrive(P.ABORTING), saving=2),
        "reports of step 1",
        P.ENDING,
    ),
    # recoveries
    **{
        f"a mistake while {phase.value}": (lambda phase=phase: arrive(phase), [MISTAKE], P.OVER)
        for phase in (P.REBALANCING, P.CLAIMING, P.STANDING, P.SETTLING, P.PLANNING, P.ADOPTING, P.WAITING)
    },
    **{
        f"a mistake while {phase.value} and a checkpoint is written": (
            lambda phase=phase: writing(arrive(phase)),
            [MISTAKE],
            P.FAILING,
        )
        for phase in (P.REBALANCING, P.CLAIMING, P.STANDING, P.SETTLING, P.PLANNING, P.ADOPTING, P.WAITING)
    },
    **{
        f"a connection breaks while {phase.value}": (lambda phase=phase: arrive(phase), [broke(2)], P.CLAIMING)
        for phase in (P.STANDING, P.SETTLING, P.PLANNING, P.ADOPTING, P.WAITING)
    },
    **{
        f"Ctrl-C while {phase.value}, and time passes": (lambda phase=phase: sent(arrive(phase), CTRL_C), [Tick()], P.OVER)
        for phase in (P.CLAIMING, P.STANDING, P.SETTLING, P.PLANNING, P.ADOPTING)
    },
    **{
        f"no answer while {phase.value}": (lambda phase=phase: arrive(phase, last_copy_wait_s=0.0), [Tick()], P.CLAIMING)
        for phase in (P.STANDING, P.SETTLING, P.ADOPTING)
    },
    **{
        f"no answer while {phase.value}, for good": (lambda phase=phase: arrive(phase), [Tick()], P.OVER)
        for phase in (P.CLAIMING, P.PLANNING, P.WAITING)
    },
    "Ctrl-C while waiting": (lambda: arrive(P.WAITING), [CTRL_C], P.OVER),
    "memory is short twice at the same place": (lambda: starved(arrive(P.CLAIMING)), [out_of_memory(0)], P.OVER),
    "all workers die": (lambda: sent(arrive(P.CLAIMING), lost(0), lost(1)), [GenerationClaimed(2, True)], P.WAITING),
    "all workers die with the state": (
        lambda: sent(run(1, capacity_s=0.0), lost(0), lost(1)),
        [GenerationClaimed(2, True)],
        P.OVER,
    ),
    "another driver was first": (lambda: arrive(P.CLAIMING), [GenerationClaimed(2, False)], P.OVER),
    **{
        f"another driver is found while {phase.value}": (lambda at=phase: arrive(at), [GenerationClaimed(9, False)], P.OVER)
        for phase in P
        if phase not in (P.STARTING, P.CLAIMING, P.FAILING, P.OVER)
    },
    "one more worker dies, and the others have answered": (
        lambda: sent(arrive(P.STANDING), stood(2, 0, 0)),
        [lost(1)],
        P.ADOPTING,
    ),
    "one more worker dies, and too few are left": (
        lambda: sent(arrive(P.STANDING, min_workers=2), stood(2, 0, 0)),
        [lost(1)],
        P.WAITING,
    ),
    "one more worker dies, and nobody can come": (
        lambda: sent(arrive(P.STANDING, min_workers=2, capacity_s=0.0), stood(2, 0, 0)),
        [lost(1)],
        P.OVER,
    ),
    "one more worker dies, and one has joined": (
        lambda: sent(arrive(P.STANDING, min_workers=2), stood(2, 0, 0), WorkerJoined(3)),
        [lost(1)],
        P.CLAIMING,
    ),
    "one more worker dies, and the last of a stage with it": (
        lambda: sent(run(workers=4, pp=2), lost(2), GenerationClaimed(2, True), stood(2, 0, 0), stood(2, 1, 0)),
        [lost(3)],
        P.PLANNING,
    ),
    "one more worker dies, and another has missed a step": (
        lambda: sent(
            arrive(P.STANDING, workers=4),
            WorkerStatusReported(2, WorkerStatus(0, 1, vote_results={0: "outcome"}, pieces=WHOLE)),
            WorkerStatusReported(2, WorkerStatus(1, 0, can_apply_late=True, pieces=WHOLE)),
        ),
        [lost(2)],
        P.SETTLING,
    ),
    **{
        f"a step is settled: {to.value}": (
            lambda policy=policy, events=events: sent(arrive(P.SETTLING, **policy), *events),
            [KeptGradientsApplied(2, WorkerStatus(1, 1, pieces=WHOLE))],
            to,
        )
        for to, policy, events in (
            (P.ADOPTING, {}, []),
            (P.WAITING, {"min_workers": 3}, []),
            (P.CLAIMING, {"min_workers": 3}, [WorkerJoined(3)]),
            (P.OVER, {"min_workers": 3, "capacity_s": 0.0}, []),
        )
    },
    "a step is settled, and a stage has nobody": (
        lambda: sent(
            run(workers=4, pp=2),
            *(lost(2), lost(3), GenerationClaimed(2, True)),
            WorkerStatusReported(2, WorkerStatus(0, 1, vote_results={0: "outcome"}, pieces=WHOLE)),
            WorkerStatusReported(2, WorkerStatus(1, 0, can_apply_late=True, pieces=WHOLE)),
        ),
        [KeptGradientsApplied(2, WorkerStatus(1, 1, pieces=WHOLE))],
        P.PLANNING,
    ),
    "no plan fits": (lambda: arrive(P.PLANNING), [PlanChosen(2, None, "none fits")], P.WAITING),
    "no plan fits, and a worker has joined": (
        lambda: sent(arrive(P.PLANNING), WorkerJoined(5)),
        [PlanChosen(2, None, "none fits")],
        P.CLAIMING,
    ),
    "no plan fits, and nobody can come": (lambda: arrive(P.PLANNING, capacity_s=0.0), [PlanChosen(2, None, "none")], P.OVER),
    "the last checkpoint is still being written when the new generation runs": (
        lambda: sent(arrive(P.ENDING), lost(1), GenerationClaimed(2, True), stood(2, 0, 1)),
        [PlanAdopted(0, 2)],
        P.ENDING,
    ),
    # more of steps, passes and ends
    "no report for long": (lambda: run(), [Tick()], P.CLAIMING),
    "a silent worker is gone, steps ahead": (lambda: sent(not_elastic(P.RUNNING), SILENT, ENDED), [ENDED], P.OVER),
    "a connection breaks": (lambda: not_elastic(P.RUNNING), [broke(1)], P.FAILING),
    "a connection breaks in the last steps": (lambda: not_elastic(P.FLUSHING), [broke(1)], P.FAILING),
    "a worker is drained while no step is in flight": (lambda: idle(run()), [DrainRequested(1, "")], P.CLAIMING),
    "a worker is drained while the last step is shown": (lambda: seen(arrive(P.FLUSHING)), [DrainRequested(1, "")], P.CLAIMING),
    "a larger plan is worth the move": (
        lambda: asking(idle(run())),
        [PlanChosen(1, ParallelPlan.mesh(dp=3, layers=2))],
        P.CLAIMING,
    ),
    "the job ends without a checkpoint": (lambda: seen(arrive(P.FLUSHING, save_at_end=False)), [StepEmitted(1)], P.OVER),
    "a validation's callback stops the run": (lambda: arrive(P.VALIDATING), [ValidationEmitted(1, "enough")], P.SAVING),
    "the disk is full before a checkpoint of every step": (
        lambda: run(1, save_every=1),
        [CheckpointFailed(1, OSError("full"))],
        P.FLUSHING,
    ),
    "the disk is full before a validation": (
        lambda: run(1, save_every=1, validates=True, validate_every=1),
        [CheckpointFailed(1, OSError("full"))],
        P.VALIDATING,
    ),
    "a checkpoint hangs, and nobody can recover": (lambda: not_elastic(P.SAVING), [Tick()], P.FAILING),
    "the last checkpoint hangs": (lambda: not_elastic(P.ENDING), [Tick()], P.FAILING),
    "a worker is mute while the last checkpoint is written": (
        lambda: sent(arrive(P.ENDING), Tick(unheard=frozenset({1}))),
        [Tick(unheard=frozenset({1}))],
        P.CLAIMING,
    ),
    "a share of the last checkpoint is lost at the end": (
        lambda: arrive(P.ENDING),
        [CheckpointFailed(1, WorkerLost("gone"))],
        P.CLAIMING,
    ),
    "the cause shows up": (lambda: arrive(P.FAILING), [MISTAKE], P.OVER),
    "the cause does not show up": (lambda: arrive(P.FAILING), [Tick()], P.OVER),
    "all workers stand where people have seen": (lambda: arrive(P.ABORTING), [GroupsAborted((1, 1))], P.SAVING),
    "a worker does not answer the abort": (lambda: not_elastic(P.ABORTING), [Tick()], P.OVER),
    "a worker does not answer the abort, and others can save": (lambda: arrive(P.ABORTING), [Tick()], P.CLAIMING),
    "a worker that was drained meanwhile has a seat": (
        lambda: sent(arrive(P.ADOPTING), DrainRequested(1, ""), PlanAdopted(0, 2)),
        [PlanAdopted(1, 2)],
        P.CLAIMING,
    ),
    "Ctrl-C, and what people have seen would have to be executed again": (
        lambda: replaying(sent(arrive(P.ADOPTING), CTRL_C, PlanAdopted(0, 2))),
        [PlanAdopted(1, 2)],
        P.OVER,
    ),
    "too few workers, and one has joined": (
        lambda: sent(arrive(P.STANDING, min_workers=3), stood(2, 0, 0), WorkerJoined(3)),
        [stood(2, 1, 0)],
        P.CLAIMING,
    ),
    "too few workers, and nobody can come": (
        lambda: sent(arrive(P.STANDING, min_workers=3, capacity_s=0.0), stood(2, 0, 0)),
        [stood(2, 1, 0)],
        P.OVER,
    ),
    "a worker comes that was waited for": (lambda: arrive(P.WAITING), [WorkerJoined(3)], P.CLAIMING),
}
"""Name -> (the run, what happens, the phase after it)."""


def test_validations_of_state_in_doubt_that_learning_rates_follow_are_run_again():
    """That after 4 steps may be of wrong state if the replicas have agreed last after 3 steps; or after 4, as the copies
    that agreed were taken before it."""
    for follows, validated, agreed, again in (
        (True, 4, 3, (4,)),
        (True, 9, 3, (4, 8)),
        (True, 4, 4, (4,)),
        (True, 5, 4, (4,)),
        (True, 4, 5, ()),
        (True, None, 0, ()),
        (False, 4, 3, ()),
    ):
        machine = arrive(P.RUNNING, mirror_every=1, validate_every=4, rates_follow_validations=follows)
        machine.progress.validated, machine.trust.agreed = validated, agreed
        assert not compare_replica_digests(machine, 9, {0: (1, 2), 1: (1, 3)})
        assert machine.progress.doubted_validations == again, (follows, validated, agreed)
        assert end_run_if_doubts_stay(machine) is None


def doubted(phase):
    machine = arrive(phase, mirror_every=1)
    machine.trust.doubts = MAX_DOUBTS
    return machine


def seen(machine):
    """The last step is committed and journalled; people have not seen it."""
    return sent(machine, *reports(machine, 1), StepJournalled(1))


def idle(machine):
    """Both steps in flight are committed; people have not seen the first."""
    return sent(machine, *reports(machine, 0), *reports(machine, 1))


def asked(machine):
    """A plan with other shares is being lowered."""
    machine.sharing.asked = PREPARED.plan
    return machine


def sharing(machine):
    """That plan is there: the workers get it as soon as no step is in flight."""
    return sent(asked(machine), PREPARED)


def reported(machine, *steps):
    for step in steps:
        do(machine, *reports(machine, step))
    return machine


def shared_at_flush_point(**policy):
    """The workers get other blocks where a save or a validation is due after two steps, which people have seen."""
    return sent(reported(sharing(run(1, **policy)), 1), StepJournalled(1), StepEmitted(1))


def asking(machine):
    """A worker has joined, and the planner has been asked for a plan with it."""
    machine.membership.spares.add(2)
    machine.planned.asking = True
    return machine


def saved(machine, done):
    machine.progress.saved = done
    return machine


def starved(machine):
    machine.health.out_of_memory_at.add((machine.membership.plan, (0,)))
    return machine


def play(scene):
    make, events, _ = SCENES[scene]
    machine = make()
    if events == "digests":
        events = reports(machine, 0, ((1, 2), (1, 3)))
    elif isinstance(events, str):
        events = reports(machine, int(events.removeprefix("reports of step ")))
    now_s = LATE_S if isinstance(events[0], (Tick, StacksReported)) else 0.0
    now_s = ENDED_GRACE_S if events[0] is ENDED else now_s
    do(machine, *events, now_s=now_s)
    return machine


@pytest.mark.parametrize("scene", SCENES)
def test_a_rare_transition(scene):
    assert play(scene).phase is SCENES[scene][2]


QUICK = {"validates": True, "validate_every": 2, "step_deadline_s": 0.5, "start_deadline_s": 1.0, "pass_deadline_s": 2.0}
QUICK |= {"status_s": 0.5, "adopt_s": 2.0, "capacity_s": 5.0}


def walk_at_random():
    """Runs on a virtual clock: random orders of events, then random faults under the whole protocol."""
    for seed in range(300):
        RandomWorld(seed).run()
    for plan, work in (
        (ParallelPlan.mesh(dp=2, pp=2, layers=4), Job(steps=5)),
        (ParallelPlan.mesh(pp=4, layers=4), Job(steps=6, mirror_every=2)),
    ):
        plain = simulate(work, plan, **QUICK)[0]
        for seed in range(40):
            faults = random_faults(seed, 3, plain, workers=4, kinds=KINDS)
            simulate(work, plan, faults, save_every=2 * (seed % 2), hires=seed % 3 == 0, **QUICK)


def test_every_declared_transition_happens():
    with record_transitions() as found:
        walk_at_random()
        for scene in SCENES:
            play(scene)
    declared = declared_transitions()
    assert found <= declared, "the machine should have raised"
    never = sorted(f"{before.name} {event} {after.name}" for before, event, after in declared - found)
    assert never == [], "a transition that nobody can show does not belong into the table"


def test_every_phase_that_is_entered_has_its_work():
    assert set(ON_ENTER) == set(P) - {P.STARTING}
    assert {to for row in ROWS for to in row.to} == set(ON_ENTER)


def calls(function):
    """The names that a function calls."""
    tree = ast.parse(inspect.getsource(function))
    return {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def test_no_rule_calls_another_rule_and_none_starts_the_work_of_a_phase():
    """A rule returns the next phase; what that phase begins with is the table's. Steps are issued within a phase too."""
    modules = (
        failures,
        membership_rules,
        find_and_adopt_plan_rules,
        rebalance_rules,
        recovery_rules,
        running_rules,
        wait_for_last_copies,
    )
    rules = {row.rule: next(vars(module)[row.rule] for module in modules if row.rule in vars(module)) for row in ROWS}
    works = {work.__name__: work for work in ON_ENTER.values()}
    tails = (rules.keys() | works.keys()) - {"issue_steps"}
    found = {f"{name} calls {called}" for name, rule in (rules | works).items() for called in calls(rule) & tails}
    assert found == set()


def test_the_page_has_the_tables_diagram():
    text = PAGE.read_text()
    assert insert_diagram(text) == text, "python -m raypar.elastic.transition_diagram raypar/elastic/RUN_MACHINE.md"


def test_the_diagram_draws_an_edge_of_all_phases_of_a_group_once():
    rows = [make_transition_row(Tick, [*RECOVERING, P.RUNNING], lambda m, event: None, [P.OVER, P.CLAIMING])]
    edges = [line.strip() for line in draw_diagram(rows).splitlines() if "-->" in line]
    inner = [f'{phase.name} -- "Tick" --> CLAIMING' for phase in (P.RUNNING, *RECOVERING[1:])]
    assert sorted(edges) == sorted(['RUNNING -- "Tick" --> OVER', 'RECOVERY -- "Tick" --> OVER', *inner])


def test_a_phase_that_the_row_does_not_name_raises_with_the_story(monkeypatch):
    machine = run()
    row = TABLE[P.RUNNING, Tick]
    wrong = TransitionRow(row.phases, Tick, "wrong", lambda m, event: P.VALIDATING, row.to)
    monkeypatch.setitem(TABLE, (P.RUNNING, Tick), wrong)
    with pytest.raises(UnexpectedEvent, match=r"Tick.*led from running to validating(.|\n)*PlanAdopted.*RunStep"):
        do(machine, Tick())
