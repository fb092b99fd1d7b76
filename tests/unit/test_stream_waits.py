"""Operations that only a stream waits for: no vote, and no blame of users' code, for the numbers that a failed one has left."""

import pytest
import torch
from helpers import ugly_models

from raypar.comm.routine import StreamWaits, drive_routine
from raypar.errors import GroupAborted, UserCodeError
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun


class Operation:
    """A handle that is done, or fails, when the test says so."""

    def __init__(self, *, is_done=False, error=None):
        self.is_done, self.error, self.waited = is_done, error, 0

    def done(self):
        if self.error is not None:
            raise self.error
        return self.is_done


FAILED = GroupAborted("rank 1 is gone")


def finish(waits):
    def wait(operation):
        operation.handle.waited += 1
        operation.handle.is_done = True

    drive_routine(waits.finish(), wait)


def test_what_is_not_done_is_waited_for_once_and_what_is_done_is_let_go_of():
    waits, handles = StreamWaits(), [Operation(is_done=True), Operation(), Operation(is_done=True)]
    for handle in handles:
        waits.add(handle, "a sum")
    assert len(waits._posted) == 2  # the first is done, the third is behind the second
    finish(waits)
    finish(waits)
    assert [handle.waited for handle in handles] == [0, 1, 0] and not waits._posted


@pytest.mark.parametrize("find", [lambda waits: waits.add(Operation(), "later"), StreamWaits.raise_failure, finish])
def test_a_failure_is_raised_by_whoever_looks(find):
    waits, handle = StreamWaits(), Operation()
    waits.add(handle, "a sum")
    handle.error = FAILED
    with pytest.raises(GroupAborted, match="rank 1 is gone"):
        find(waits)


@pytest.mark.parametrize("raises", [False, True], ids=["goes on", "users' code raises"])
def test_no_step_is_committed_and_no_code_blamed_for_the_numbers_of_a_failed_operation(raises):
    spec = ugly_models.job("plain")
    with OneProcessRun(spec, ParallelPlan.mesh(layers=len(make_layer_graph(spec).layers)), "1f1b") as run:
        run.step(0)
        core, handle = run.cores[0], Operation()
        core.step_commit.stream_waits.add(handle, "a sum")
        before = {name: copies[0].clone() for name, copies in run.parameters().items()}
        layer = next(iter(core.stages.values())).layers[1]
        call = layer.call

        def fails(*given):
            handle.error = FAILED  # while the layer runs, for whose input it was
            if raises:
                raise UserCodeError("its input is no index", cure="none")
            return call(*given)

        layer.call = fails
        with pytest.raises(GroupAborted, match="rank 1 is gone"):
            run.step(1)
        assert core.step_commit.last_decided_step == 0
        assert all(torch.equal(copies[0], before[name]) for name, copies in run.parameters().items())
