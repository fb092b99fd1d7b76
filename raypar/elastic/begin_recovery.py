"""The start of a recovery: the machine claims the next generation."""

from __future__ import annotations

from raypar.elastic.actions import ClaimGeneration
from raypar.elastic.desired_capacity import retry_pause_s
from raypar.elastic.failure_budget import make_repeated_failure_error
from raypar.elastic.generation_guard import StaleGeneration
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.elastic.run_state_parts import RecoveryState
from raypar.errors import CommError, WorkerLost


def begin_recovery(m: RunState, why: str, *, counts: bool = True) -> None:
    """Begin a new generation. Steps in flight will be settled or dropped.

    `counts`: whether the recovery counts as one of the `max_attempts` attempts at the next step. A planned change (a worker
    leaves or joins) does not count, nor does a death that the step cannot have caused (a machine was taken away).
    """
    progress, health, stopping = m.progress, m.health, m.stopping
    if m.phase is Phase.ADOPTING:
        _note_failed_move(m)
    if m.phase in (Phase.VALIDATING, Phase.SAVING, Phase.ENDING):
        progress.served_flush_point = progress.emitted - 1  # saving and validation are due there again
    progress.forget_open_steps()
    health.probing = health.aborted_by_us = False
    health.slow_sample_from_s = None
    m.planned.asking = False
    if health.disturbed_at_s is None:
        health.disturbed_at_s = m.timer.now_s
    health.attempts += counts
    if stopping.interrupted and stopping.abandon_at_s is None:
        stopping.abandon_at_s = m.timer.now_s + m.policy.interrupt_s
    if health.attempts > m.policy.max_attempts:
        m.end_run("failed", f"{health.attempts} attempts without a step between them: {why}", make_repeated_failure_error(m))
        return
    m.recovery = RecoveryState(why, former_order=m.recovery.order or m.recovery.former_order)
    m.membership.generation += 1
    m.enter(Phase.CLAIMING, deadline_s=m.policy.claim_s)
    m.decide(ClaimGeneration(m.membership.generation), why)


def _note_failed_move(m: RunState) -> None:
    """Delay the next move to a larger plan if the one that fails now was to give newcomers seats: a failure costs seconds."""
    order = m.recovery.order
    if order is not None and not set(order.members) <= set(m.membership.members):
        m.planned.not_before_s = m.timer.now_s + retry_pause_s(m.policy.capacity, m.planned.failed_moves)
        m.planned.failed_moves += 1


def is_caused_by_worker_loss(error: Exception) -> bool:
    """Whether a checkpoint's error comes from a worker that died or left, not from the disk: then it can be written again."""
    return isinstance(error, (WorkerLost, CommError, StaleGeneration))
