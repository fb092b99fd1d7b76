"""The driver's table carries out every action that the run machine may decide on, each by a method for its kind."""

import typing

from raypar.actors.checkpoint_task import CheckpointTask
from raypar.actors.driver_actor import make_action_table
from raypar.actors.driver_shutdown import DriverShutdown
from raypar.actors.generation_change import GenerationChange
from raypar.actors.membership_actions import MembershipActions
from raypar.actors.step_actions import StepActions
from raypar.elastic import actions as do

TABLE = make_action_table(StepActions, CheckpointTask, MembershipActions, GenerationChange, DriverShutdown)
"""With the classes in place of objects."""


def test_the_table_has_every_action():
    assert set(TABLE) == set(typing.get_args(do.Action))


def test_each_method_takes_the_action_of_its_row():
    for kind, method in TABLE.items():
        action, reason, _ = typing.get_type_hints(method).values()
        assert (action, reason) == (kind, str), method
