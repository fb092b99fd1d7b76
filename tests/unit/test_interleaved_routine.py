"""A routine with something done before each of its waits is the same routine, also where a wait fails."""

import pytest

from raypar.comm.routine import RoutineWork, drive_routine, interleave_with_routine
from raypar.errors import CommError


def routine(seen):
    yield RoutineWork("first")
    try:
        yield RoutineWork("second")
    except CommError as error:
        seen.append(f"caught {error.what}")
        raise
    return "done"


def test_between_is_called_before_each_operation_and_the_result_is_the_routines():
    seen = []
    made = interleave_with_routine(routine(seen), lambda: seen.append("between"))
    assert drive_routine(made, lambda operation: seen.append(operation.instruction)) == "done"
    assert seen == ["between", "first", "between", "second"]


def test_an_error_of_a_wait_is_raised_inside_the_routine():
    seen = []

    def do(operation):
        if operation.instruction == "second":
            raise CommError("a peer is gone", cure="")

    with pytest.raises(CommError, match="a peer is gone"):
        drive_routine(interleave_with_routine(routine(seen), lambda: None), do)
    assert seen == ["caught a peer is gone"]
