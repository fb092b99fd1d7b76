"""The table of the driver: what carries out each kind of action that the run machine decides on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raypar.actors.checkpoint_task import CheckpointTask
from raypar.actors.driver_shutdown import DriverShutdown
from raypar.actors.generation_change import GenerationChange
from raypar.actors.membership_actions import MembershipActions
from raypar.actors.step_actions import StepActions
from raypar.elastic import actions as do

ActionTable = Mapping[type[do.Action], Callable[[Any, str], None]]
"""Kind of action -> what carries it out: it takes the action and its reason."""


def make_action_table(
    steps: StepActions,
    checkpoints: CheckpointTask,
    members: MembershipActions,
    generations: GenerationChange,
    shutdown: DriverShutdown,
) -> ActionTable:
    """The table of one driver. A test says that it has every kind of action."""
    return {
        do.RunStep: steps.run_step,
        do.WriteJournal: steps.write_journal,
        do.EmitStep: steps.emit_step,
        do.Validate: steps.validate,
        do.EmitValidation: steps.emit_validation,
        do.StartCheckpoint: checkpoints.start_checkpoint,
        do.AbortGroups: steps.abort_groups,
        do.RequestStacks: steps.request_stacks,
        do.WarnUser: steps.warn_user,
        do.TellUser: steps.tell_user,
        do.CompareReplayedStep: steps.compare_replayed_step,
        do.StartWorkers: members.start_workers,
        do.ReleaseWorkers: members.release_workers,
        do.StoreUsefulWorkers: members.store_useful_workers,
        do.KillWorker: members.kill_worker,
        do.ReportStraggler: members.report_straggler,
        do.ClaimGeneration: generations.claim_generation,
        do.FenceWorkers: generations.fence_workers,
        do.ApplyKeptGradients: generations.apply_kept_gradients,
        do.ChoosePlan: generations.choose_plan,
        do.AdoptPlan: generations.adopt_plan,
        do.ReportFirstStepAfterRecovery: generations.report_first_step,
        do.Teardown: shutdown.tear_down,
    }
