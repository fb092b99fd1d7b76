"""The tiny job with a worker that kills itself at a moment of a step: before its vote, once it has applied, inside a gather
after it, or while a layer's parameters are on their way."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from helpers import tiny_job
from torch import nn

from raypar.comm.routine import Routine
from raypar.worker.step.parameter_requests import ArrivingParameters, ParameterRequests
from raypar.worker.step.step_commit import StepCommit


def model(moment: str = "", step: int = 0, marker: str = "", **arguments: Any) -> nn.Sequential:
    """`moment`: `vote`, `apply`, `gather` or `layer`; `marker`: a file that the first worker to reach the moment makes, which
    dies."""
    if marker:
        _die_once(moment, step, marker)
    return tiny_job.model(**arguments)


def _die_once(moment: str, step: int, marker: str) -> None:
    vote, apply, gather, begin, ask = _ORIGINAL
    under_way: list[StepCommit] = []

    def die(commit: StepCommit) -> None:
        if commit.step == step:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    def dies_before_vote(commit: StepCommit) -> Routine[None]:
        die(commit)
        yield from vote(commit)

    def dies_when_applied(commit: StepCommit) -> None:
        apply(commit)
        die(commit)

    def dies_in_gather(commit: StepCommit) -> None:
        gather(commit)
        die(commit)

    def begins(commit: StepCommit, number: int) -> None:
        under_way[:] = [commit]
        begin(commit, number)

    def dies_when_it_has_asked(requests: ParameterRequests, number: int) -> ArrivingParameters | None:
        asked = ask(requests, number)
        if number and under_way:
            die(under_way[0])
        return asked

    if moment == "layer":
        StepCommit.begin = begins  # type: ignore[method-assign]
        ParameterRequests.ask = dies_when_it_has_asked  # type: ignore[method-assign]
    elif moment == "vote":
        StepCommit.vote = dies_before_vote  # type: ignore[method-assign]
    elif moment == "apply":
        StepCommit.apply = dies_when_applied  # type: ignore[method-assign]
    else:
        StepCommit.gather_parameters = dies_in_gather  # type: ignore[method-assign]


_ORIGINAL = StepCommit.vote, StepCommit.apply, StepCommit.gather_parameters, StepCommit.begin, ParameterRequests.ask
