"""`sys.exit(3)` and `KeyboardInterrupt` in user code are errors of it: they end no worker in silence, and are no Ctrl-C."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_job import Samples, ends, loss, model, write_job
from torch import nn

import raypar
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.messages import CallFailure
from raypar.actors.side_effect_thread import SideEffectThread
from raypar.actors.worker_actor import WorkerActor
from raypar.callbacks import Callback, Callbacks
from raypar.cli import main
from raypar.errors import UserCodeError
from raypar.job import DataConfig
from raypar.plan import Microbatches, ParallelPlan
from raypar.user_code.stop_signals import recording_ctrl_c
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.run_in_one_process import OneProcessRun

HOW = {"exit": "SystemExit: 3 .*sys.exit", "ctrl-c": "KeyboardInterrupt .*nobody has pressed Ctrl-C"}
NO_EXCEPTION = {"cancelled": "CancelledError: by a library", "own": "BaseException: by a library"}
"""What libraries raise that is no `Exception` either."""


WAYS = [*HOW, *NO_EXCEPTION]


class Bad(Samples):
    """The first samples cannot be read, each in one of `WAYS`."""

    def __init__(self) -> None:
        super().__init__(8)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return ends(how=WAYS[index]) if index < len(WAYS) else super().__getitem__(index)


@pytest.fixture(scope="module", params=[0, 1], ids=["here", "in a data process"])
def loader_of_bad_samples(request):
    """One sample a step, read one after the other: who has failed to read one reads the next."""
    spec = DataConfig(function=Bad, processes=request.param)
    order = SampleOrder(0, 8, shuffle=False)
    loader = MicrobatchLoader(Bad(), spec, order, Microbatches(1, batch_size=1), seed=0, fields=("x",))
    yield loader
    loader.close()


@pytest.mark.ci
@pytest.mark.part(3)
@pytest.mark.parametrize("how", WAYS)
def test_a_data_set_that_ends_is_an_error_that_names_the_sample(how, loader_of_bad_samples):
    index = WAYS.index(how)
    said = f"(?s)sample {index} .epoch 0.: the data set raised {(HOW | NO_EXCEPTION)[how]}"
    with recording_ctrl_c(), pytest.raises(UserCodeError, match=said):
        loader_of_bad_samples.get(index, 0)


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ends(how=ctx.how)


class Stops(torch.optim.SGD):
    def __init__(self, params, how):
        super().__init__(params, lr=0.1)
        self.how = how

    def step(self, closure=None):
        ends(how=self.how)


PLACES = {
    "layer": (lambda how: {"model": (model, {"fault": how})}, r"layer 'layer3' .*raised {}.*microbatch 0"),
    "loss": (lambda how: {"loss": lambda output, target: ends(how=how)}, r"the loss .*raised {}.*step 1, microbatch 0"),
    "backward": (
        lambda how: {"loss": lambda output, target: loss(Backwards.apply(output, how), target)},
        r"the backward pass raised {}.*step 1, microbatch 0",
    ),
    "optimizer": (lambda how: {"optimizer": (Stops, {"how": how})}, r"the optimizer Stops raised {}.*in step 1"),
    "lr_schedule": (lambda how: {"lr_schedule": lambda step: ends(how=how)}, r"lr_schedule raised {}.*in step 1"),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("place", PLACES)
def test_what_ends_in_a_step_is_an_error_that_names_its_place(place, how):
    given, says = PLACES[place]
    job = {"model": model, "loss": loss, "data": Samples(8), "steps": 1, "batch_size": 4, "microbatches": 2}
    spec = raypar.Trainer(**(job | given(how))).job
    with (
        recording_ctrl_c(),  # before the job: whose handlers are to be in place when it begins
        OneProcessRun(spec, ParallelPlan.mesh(layers=4), "1f1b") as local,
        pytest.raises(UserCodeError, match="(?s)" + says.format(HOW[how])) as found,
    ):
        local.step(0)
    assert "tiny_job.py" in found.value.what, "the traceback leads to the code"


@pytest.mark.part(2)
@pytest.mark.parametrize("how", HOW)
def test_a_worker_answers_with_what_its_code_ended_in(how):
    """As an actor does: in a thread. A `SystemExit` there ends the process without a word."""
    worker = object.__new__(WorkerActor)
    worker.coordinate, worker.working_dir, worker.torch_guard = "worker 7", SimpleNamespace(keep=lambda: None), None
    worker.calls = {}
    answers: list[object] = []
    call = threading.Thread(target=lambda: answers.append(worker._run_call("building its stages", lambda: ends(how=how))))
    call.start()
    call.join(10)
    (answer,) = answers
    assert isinstance(answer, CallFailure) and answer.kind == "user" and worker.doing == "idle"
    with pytest.raises(UserCodeError, match=f"(?s)worker 7, building its stages: {HOW[how]}"):
        raise answer.error


class Ends(Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_step(self, info):
        ends(how=self.how)


@pytest.mark.part(2)
@pytest.mark.parametrize("how", HOW)
def test_a_callback_that_ends_is_an_error_after_all_others_were_called(how):
    seen = []
    other = type("Other", (Callback,), {"on_step": lambda self, info: seen.append(info.step)})()
    facts = {"step": 3, "loss": 0.0, "norm": 0.0, "count": 1.0, "seconds": 1.0, "samples_per_s": 1.0, "count_per_s": 1.0}
    with recording_ctrl_c(), pytest.raises(UserCodeError, match=f"(?s)callback Ends.on_step, after 3 steps, raised {HOW[how]}"):
        Callbacks([Ends(how), other]).call("on_step", facts | {"bubble": 0.0})
    assert seen == [3]


@pytest.mark.part(2)
@pytest.mark.parametrize("how", HOW)
def test_a_callbacks_module_that_ends_does_not_end_the_driver(how):
    """Callbacks are unpickled, so imported, in the driver. Its event loop would end with it."""
    told = []
    effects = SideEffectThread(None, None, None, BackgroundTasks(told.append))

    async def begins() -> None:
        effects.perform(lambda: ends(how=how), lambda found: found)
        await asyncio.gather(*effects.tasks._open)

    asyncio.run(begins())
    (event,) = told
    assert event.kind == "user" and isinstance(event.error, UserCodeError)
    assert HOW[how].partition(" .*")[0] in event.error.what


CASES = {
    "model": ["model={function: helpers.tiny_job:ends, args: {how: HOW}}"],
    "loss": ["loss={function: helpers.tiny_job:ends, args: {how: HOW}}"],
    "data": ["data={function: helpers.tiny_job:ends, args: {how: HOW}}"],
    "layer": ["model.args.fault=HOW"],
    "lr_schedule": ["lr_schedule={function: helpers.tiny_job:ends, args: {how: HOW}}"],
    "optimizer": ["optimizer={function: helpers.tiny_job:ends, args: {how: HOW}}"],
    "callback": ["callbacks=[{function: helpers.tiny_job:ends, args: {how: HOW}}]"],
    "module": ["loss=ends_when_imported:loss"],
}


@pytest.mark.part(2)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("case", CASES)
def test_before_anything_starts_it_is_bad_input(case, how, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(Path(__file__).parents[1])
    (tmp_path / "ends_when_imported.py").write_text(f"from helpers.tiny_job import ends\nends(how={how!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    sets = [word.replace("HOW", how) for word in CASES[case]]
    status = main(["train", str(write_job(tmp_path)), *(word for s in sets for word in ("--set", s))])
    err = capfd.readouterr().err
    assert status == 2, err
    assert HOW[how].partition(" .*")[0] in err and "cure: " in err and err.count("error: ") == 1
    assert not (tmp_path / "runs").exists()


def test_a_ctrl_c_in_user_code_is_a_ctrl_c(tmp_path, monkeypatch, capfd):
    def pressed(*given: object) -> nn.Module:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("nobody has heard it")

    monkeypatch.setattr("helpers.tiny_job.model", pressed)
    monkeypatch.chdir(Path(__file__).parents[1])
    # A background job of a shell script ignores SIGINT, and so would these tests in one.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["train", str(write_job(tmp_path))]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outside)
    assert capfd.readouterr().err.startswith("stopped before training began (Ctrl-C): nothing was trained")
