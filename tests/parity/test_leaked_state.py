"""What users' code leaves behind in its process (grad mode, default dtype, threads, ...) decides no result, and is named.

Each job runs twice, with and without the leak: losses, norms, parameters and validation are the same bit for bit.
"""

import functools
import os
import random
import signal
import threading
from collections import OrderedDict

import numpy
import pytest
import torch
from helpers.tiny_job import Count
from torch import nn

from raypar.callbacks import Callback, Callbacks
from raypar.errors import UserCodeError
from raypar.job import DataConfig, Job, LossConfig, LrScheduleConfig, ModelConfig, OptimizerConfig, ValidationConfig
from raypar.model.graph import Graph, Layer
from raypar.plan import ParallelPlan
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.process import torch_state_guard
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

WIDTH, STEPS = 8, 3
IN_TRAINING = 7
"""A layer's and the loss's first call in the second step: before it come 2 microbatches of training and 4 of validation."""
ENTERED = []
"""Contexts that are entered and not left."""


def enter(context):
    ENTERED.append(context)
    context.__enter__()


LEAKS = {
    "grad": (lambda: torch.set_grad_enabled(False), "torch.set_grad_enabled(False)"),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), "torch.set_default_dtype(torch.float64)"),
    "threads": (lambda: torch.set_num_threads(2), "torch.set_num_threads(2)"),
    "default device": (lambda: torch.set_default_device("meta"), "torch.set_default_device"),
    "device context": (lambda: enter(torch.device("meta")), "`with torch.device(...)`"),
    "autocast": (lambda: enter(torch.autocast("cpu", torch.bfloat16)), "torch.autocast"),
    "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), "torch.autograd.set_detect_anomaly"),
    "flush denormal": (lambda: torch.set_flush_denormal(True), "torch.set_flush_denormal(True)"),
    "deterministic": (lambda: torch.use_deterministic_algorithms(True), "torch.use_deterministic_algorithms"),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), "torch.set_float32_matmul_precision"),
    "mkldnn": (lambda: torch.backends.mkldnn.set_flags(_enabled=False), "torch.backends.mkldnn"),
    "cudnn": (lambda: torch.backends.cudnn.set_flags(_benchmark=True), "torch.backends.cudnn"),
    "attention": (lambda: torch.backends.cuda.enable_flash_sdp(False), "enable_..._sdp"),
    "saved tensors": (
        lambda: enter(torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float())),
        "saved_tensors_hooks",
    ),
    "directory": (lambda: os.chdir("/"), "os.chdir('/')"),
    "variable": (lambda: os.environ.update(OMP_NUM_THREADS="7"), "os.environ['OMP_NUM_THREADS'] = '7'"),
    "SIGTERM": (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "a handler of SIGTERM"),
    "SIGINT": (lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), "a handler of SIGINT"),
}
"""Name -> (what leaves it, how the line calls it)."""

GENERATORS = {
    "torch": lambda: torch.manual_seed(0),
    "python": lambda: random.seed(0),
    "numpy": lambda: numpy.random.seed(0),
}
"""Seeded again before each call: nothing to be named."""

SELDOM = ("precision", "mkldnn", "cudnn", "attention")
"""Compared after each call of the first step, then once a step."""
COMPUTE = [name for name in LEAKS if name not in ("directory", "variable", "SIGTERM", "SIGINT")]


@pytest.fixture(autouse=True)
def this_process_stays_as_it_is(monkeypatch):
    """Also where the code under test does not see to it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    here, threads = os.getcwd(), torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    ENTERED.clear()
    torch.set_default_device(None)
    while torch._C._len_torch_function_stack():
        torch.overrides._pop_mode()
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)
    torch.autograd.set_detect_anomaly(False)
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.set_flags(_enabled=True)
    torch.backends.cudnn.set_flags(_benchmark=False)
    torch.backends.cuda.enable_flash_sdp(True)
    os.chdir(here)
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Leak:
    """Leaves something behind in one of its calls."""

    def __init__(self, name: str, at: int = 3) -> None:
        self.name, self.count, self.at = name.removesuffix(" later"), Count(), at
        if self.name in SELDOM:
            self.at = 1 if self.name == name else IN_TRAINING

    def __call__(self) -> None:
        if self.count.add() == self.at and self.name:
            (LEAKS[self.name][0] if self.name in LEAKS else GENERATORS[self.name])()


class Sensitive(nn.Module):
    """A layer whose result depends on most of what can be left behind."""

    def __init__(self, leak: str = "") -> None:
        super().__init__()
        self.linear, self.leak = nn.Linear(WIDTH, WIDTH), Leak(leak, at=IN_TRAINING)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        y = nn.functional.dropout(y, 0.2)  # in validation too
        y = y * torch.tensor([1 / 3]) + y * 1e-40 * 1e38 * 10
        y = y + 0.1 * random.random() + 0.1 * float(numpy.random.rand()) + 0.1 * torch.rand(WIDTH)
        y = nn.functional.scaled_dot_product_attention(y[None], y[None], y[None])[0] + y
        if not x.is_meta:
            self.leak()
        return y


class Samples:
    """Sample i, which depends on what its reader's process is set to."""

    def __init__(self, leak: str = "") -> None:
        self.leak = Leak(leak)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.arange(WIDTH) / 7 + index + torch.rand(WIDTH) + random.random() + float(numpy.random.rand())
        y = torch.tensor([0.1 * index] * WIDTH) * 1e-40 * 1e38 * 10
        self.leak()
        return x, y


class Loss:
    def __init__(self, leak: str = "") -> None:
        self.leak = Leak(leak, at=IN_TRAINING)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = (output - target).square().mean() * torch.tensor([1 / 3]).sum()
        self.leak()
        return found


class LeakInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, leak):
        ctx.leak = leak
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.leak()
        return gradient, None


class Backwards(Sensitive):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(LeakInBackward.apply(x, self.at_last))


class LeakyAdam(torch.optim.Adam):
    def __init__(self, parameters, leak: str) -> None:
        super().__init__(parameters, lr=1e-2)
        self.leak = Leak(leak)

    def step(self, closure=None):
        super().step(closure)
        self.leak()


class Schedule:
    def __init__(self, leak: str) -> None:
        self.leak = Leak(leak)

    def __call__(self, step: int) -> float:
        self.leak()
        return 1.0


def layers(leak: str = "", in_backward: str = "", in_model: str = "", in_constructor: str = "") -> object:
    if in_constructor:
        return Graph(
            (Layer("a", lambda: Constructed(in_constructor), ("x",), ("y",)), Layer("b", Constructed, ("y",), ("z",))), "z"
        )
    made = nn.Sequential(OrderedDict(a=Sensitive(), b=Backwards() if in_backward else Sensitive(leak), c=Sensitive()))
    made.b.at_last = Leak(in_backward)
    if in_model:
        LEAKS[in_model][0]()
    return made


class Constructed(Sensitive):
    """Its constructor computes a buffer, then leaks."""

    def __init__(self, leak: str = "") -> None:
        super().__init__()
        self.register_buffer("table", (torch.arange(WIDTH, device="cpu") / 3).exp())
        if leak:
            LEAKS[leak][0]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.table)


def job(place: str = "", leak: str = "", processes: int = 0) -> Job:
    """`leak` in one place."""
    here = {"leak": leak}
    data = DataConfig(function=Samples, args=here if place == "data set" else {}, processes=processes)
    model = {"layer": "leak", "backward": "in_backward", "model": "in_model", "constructor": "in_constructor"}.get(place)
    return Job(
        name="leaky",
        seed=1,
        steps=STEPS,
        batch_size=4,
        microbatches=2,
        model=ModelConfig(function=layers, args={model: leak} if model else {}),
        loss=LossConfig(function=Loss(leak if place == "loss" else "")),
        data=data,
        optimizer=OptimizerConfig(function=LeakyAdam, args={"leak": leak if place == "optimizer" else ""}),
        lr_schedule=LrScheduleConfig(function=Schedule(leak if place == "lr_schedule" else "")),
        validation=ValidationConfig(function=Samples, every=1),
        clip_norm=1.0,
    )


def outcome(spec: Job, stages: int = 2):
    """Everything that can be seen of a run, and its warnings."""
    seen, lines = [], []
    count = 2 if "in_constructor" in spec.model.args else 3
    with OneProcessRun(spec, ParallelPlan.mesh(pp=min(stages, count), layers=count), "1f1b") as run:
        for step in range(STEPS):
            reports = run.step(step)
            seen += [reports[0].loss, reports[0].norm, run.validate(step)]
        lines += getattr(run, "warnings", [])
        seen += [p.clone() for copies in run.parameters().values() for p in copies]
    return seen, lines


UNDISTURBED = {}


def undisturbed(stages: int = 2, constructor: bool = False):
    """Once for all tests."""
    if (stages, constructor) not in UNDISTURBED:
        spec = job()
        if constructor:
            spec = spec.replace(model=ModelConfig(function=layers, args={"in_constructor": "no leak"}))
        seen, lines = outcome(spec, stages)
        assert lines == []
        UNDISTURBED[stages, constructor] = seen
    return UNDISTURBED[stages, constructor]


LEAKS["no leak"] = (lambda: None, "")


def check_same(seen, wanted):
    bad = [
        i for i, (a, b) in enumerate(zip(seen, wanted, strict=True)) if not torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    ]
    assert not bad, f"{len(bad)} of {len(seen)} figures differ from those of the undisturbed job"


CALLERS = {
    "layer": "layer 'b'",
    "loss": "the loss",
    "data set": "the data set's __getitem__",
    "backward": "the backward pass of layer 'b'",
    "optimizer": "the optimizer",
    "lr_schedule": "the lr_schedule",
    "model": "the model function layers",
    "constructor": "the constructor of layer 'a'",
}
AUTOGRAD_SETS = {(leak, "backward") for leak in ("grad", "default device", "device context", "saved tensors")}
"""Back after each node of a backward pass: most of what belongs to a thread. (Of autocast its state, and not its depth.)"""
CELLS = [
    *((leak, place) for leak in LEAKS for place in ("layer", "loss", "data set") if leak != "no leak"),
    *((leak, place) for leak in COMPUTE for place in ("backward", "optimizer")),
    *((leak, place) for leak in ("default dtype", "grad", "threads", "directory") for place in ("model", "lr_schedule")),
    *((leak, "constructor") for leak in ("default dtype", "grad", "variable")),
]


@pytest.mark.parametrize(("leak", "place"), CELLS)
def test_what_is_left_behind_is_set_back_and_named(leak, place):
    stages = 1 if place == "backward" else 2
    seen, lines = outcome(job(place, leak), stages)
    check_same(seen, undisturbed(stages, constructor=place == "constructor"))
    if (leak, place) in AUTOGRAD_SETS:
        assert lines == []
        return
    call = LEAKS[leak][1]
    named = [line for line in lines if call in line]
    assert named and all("left" in line and "behind: set back\n  cure: " in line for line in named), lines
    assert lines == named, "nothing else is said"
    if leak in COMPUTE:
        assert [line.startswith(f"{CALLERS[place]} left ") for line in lines] == [True], lines  # once


@pytest.mark.parametrize(("leak", "place"), [(leak, place) for leak in SELDOM for place in ("layer", "loss", "data set")])
def test_flags_of_backends_that_change_later_stop_the_job_before_the_step_is_applied(leak, place):
    """What came after the call in this step has computed with them, and nobody else."""
    with pytest.raises(UserCodeError) as caught:
        outcome(job(place, f"{leak} later"), stages=1)
    assert caught.value.what.startswith("a layer, the loss or the data set, up to step 2, left ")
    assert LEAKS[leak][1] in caught.value.what
    check_same(outcome(job())[0], undisturbed())


@pytest.mark.parametrize("place", ["layer", "loss", "data set"])
@pytest.mark.parametrize("generator", GENERATORS)
def test_generators_are_seeded_before_each_call_whatever_was_done_to_them(generator, place):
    seen, lines = outcome(job(place, generator))
    check_same(seen, undisturbed())
    assert lines == []


def test_layers_may_draw_from_pythons_and_numpys_generators_wherever_they_are():
    check_same(undisturbed(1)[: 3 * STEPS], undisturbed(3)[: 3 * STEPS])


class Casting(Sensitive):
    """Enters an autocast of its own, which keeps the cast of its weight until it is the outermost one that is left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(self.linear(x)).float()


def casting_layers(in_backward: str = "") -> nn.Sequential:
    made = layers(in_backward=in_backward or "no leak")
    made.c = Casting()
    return made


def test_an_autocast_that_is_entered_in_a_backward_pass_and_not_left_keeps_no_cast_of_former_weights():
    """Autograd switches it off, and does not count it down."""
    runs = [
        outcome(job().replace(model=ModelConfig(function=casting_layers, args={"in_backward": leak})), stages=1)
        for leak in ("", "autocast")
    ]
    check_same(runs[1][0], runs[0][0])
    assert [line.startswith(f"{CALLERS['backward']} left torch.autocast") for line in runs[1][1]] == [True]


class Quiet(Sensitive):
    """Switches gradients off at its beginning, for good: nobody recorded what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        return super().forward(x)


class Inference(Sensitive):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            enter(torch.inference_mode())
        return super().forward(x)


def with_layer(kind):
    return nn.Sequential(OrderedDict(a=Sensitive(), b=kind(), c=Sensitive()))


def test_a_layer_that_has_lost_its_own_graph_is_an_error():
    """Its gradients, and those of all before it, would be zero to the end."""
    with pytest.raises(UserCodeError) as caught:
        outcome(job().replace(model=ModelConfig(function=with_layer, args={"kind": Quiet})))
    assert caught.value.what == (
        "layer 'b' left torch.set_grad_enabled(False) behind and returned a tensor without a gradient, "
        "at stage 1, replica 0, step 1, microbatch 0: it and what comes before it would not be trained"
    )
    assert torch.is_grad_enabled()


def test_inference_mode_that_is_not_left_is_an_error():
    with pytest.raises(UserCodeError, match=r"layer 'b' entered torch\.inference_mode\(\) and did not leave it"):
        outcome(job().replace(model=ModelConfig(function=with_layer, args={"kind": Inference})))
    assert not torch.is_inference_mode_enabled()
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad


class OnlyInValidation(Sensitive):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not self.training:
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float64)
        return y


def test_validation_is_watched_too():
    seen, lines = outcome(job().replace(model=ModelConfig(function=with_layer, args={"kind": OnlyInValidation})))
    check_same(seen, undisturbed())
    assert [line.partition(" behind")[0] for line in lines] == [
        "layer 'b' left torch.set_grad_enabled(True)",
        "layer 'b' left torch.set_default_dtype(torch.float64)",
    ]


FIRST_OF_SECOND_VALIDATION = 9
"""The call of a layer: before it come twice 2 microbatches of training, and 4 of the first validation."""


class LeaksInCalls(Sensitive):
    """Leaves another default dtype behind in these calls: what the next layer computes has another dtype."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.calls, self.count = calls, Count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not x.is_meta and self.count.add() in self.calls:
            torch.set_default_dtype(torch.float64)
        return y


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_layers_of_a_validation_are_run_again_where_they_have_left_something_changed(stages, last):
    """State is compared once a microbatch there, once all of it has been compared after each call."""
    begin = FIRST_OF_SECOND_VALIDATION + 1
    calls = list(range(begin, 99)) if last else [begin]
    model = ModelConfig(function=with_layer, args={"kind": functools.partial(LeaksInCalls, calls)})
    seen, lines = outcome(job().replace(model=model), stages)
    check_same(seen, undisturbed(stages))
    who = "layer 'b'" if last else f"a layer of stage {0 if stages == 1 else 1}"
    assert [line.partition(" behind")[0] for line in lines] == [f"{who} left torch.set_default_dtype(torch.float64)"]


class ForOthers(Sensitive):
    """Leaves a setting to the layers after it, in validation alone."""

    def __init__(self, flushes: bool) -> None:
        super().__init__()
        self.flushes = flushes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not x.is_meta and not self.training:
            torch.set_flush_denormal(self.flushes)
        return y


def first_layer_leaves_what_last_one_undoes() -> nn.Module:
    return nn.Sequential(OrderedDict(a=ForOthers(True), b=Sensitive(), c=ForOthers(False)))


@pytest.mark.parametrize("stages", [1, 3])
def test_what_a_later_layer_of_a_validation_undoes_is_seen_too(stages):
    seen, lines = outcome(job().replace(model=ModelConfig(function=first_layer_leaves_what_last_one_undoes)), stages)
    check_same(seen, undisturbed(stages))
    assert [line.partition(" behind")[0] for line in lines] == ["layer 'a' left torch.set_flush_denormal(True)"]


class Alternating(Samples):
    """Every other sample undoes what the one before it has left."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = super().__getitem__(index)
        torch.set_flush_denormal(index % 2 == 0)
        return made


def test_what_a_later_sample_undoes_is_seen_too():
    spec = job().replace(validation=ValidationConfig(function=Alternating, every=1))
    seen, lines = outcome(spec)
    check_same(seen, undisturbed())
    who = "the data set's __getitem__"
    assert [line.partition(" behind")[0] for line in lines] == [f"{who} left torch.set_flush_denormal(True)"]


class EntersInferenceMode(LeaksInCalls):
    """PyTorch's own error about what it returns is of raypar's code, before the next layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Sensitive.forward(self, x)
        if not x.is_meta and self.count.add() in self.calls:
            enter(torch.inference_mode())
            return y.clone()
        return y


def test_inference_mode_that_a_layer_enters_in_a_later_validation_is_named():
    calls = list(range(FIRST_OF_SECOND_VALIDATION + 1, 99))
    model = ModelConfig(function=with_layer, args={"kind": functools.partial(EntersInferenceMode, calls)})
    with pytest.raises(UserCodeError, match=r"layer 'b' entered torch.inference_mode\(\) and did not leave it"):
        outcome(job().replace(model=model), stages=1)


def test_samples_are_read_again_where_they_have_left_something_changed():
    class Later(Samples):
        def __init__(self) -> None:
            self.leak = Leak("default dtype", at=30)

    seen, lines = outcome(job().replace(data=DataConfig(function=Later), validation=ValidationConfig(function=Later, every=1)))
    check_same(seen, undisturbed())
    assert {line.partition(" behind")[0] for line in lines} == {
        "the data set's __getitem__ left torch.set_default_dtype(torch.float64)"
    }


def test_state_is_compared_once_a_microbatch_after_layers_in_a_validation_and_after_samples(monkeypatch):
    compared = []
    read = torch_state_guard.read_per_call_state
    monkeypatch.setattr(torch_state_guard, "read_per_call_state", lambda: (compared.append(1), read())[1])
    with OneProcessRun(job(), ParallelPlan.mesh(layers=3), "1f1b") as run:
        run.step(0)
        run.validate(0)
        compared.clear()
        run.validate(0)
        begins, microbatches, by_microbatch = 1, 4, len(("samples", "layers", "loss"))
        assert len(compared) == begins + microbatches * by_microbatch


@pytest.mark.full
@pytest.mark.parametrize("leak", ["default dtype", "directory"])
def test_data_processes_are_watched_too(leak):
    wanted = undisturbed()
    seen, lines = outcome(job("data set", leak, processes=1))
    check_same(seen, wanted)
    assert len(lines) == 1 and lines[0].startswith(f"the data set's __getitem__ left {LEAKS[leak][1]} behind")


def test_a_step_in_another_thread_has_the_same_state():
    """Ray may run the next step in another thread, which has its own grad mode and number of threads."""
    wanted = undisturbed()
    with OneProcessRun(job(), ParallelPlan.mesh(pp=2, layers=3), "1f1b") as run:
        for step in range(STEPS):
            found = []

            def work(step=step, found=found):
                torch.set_num_threads(2)
                torch.set_grad_enabled(False)
                found += [run.step(step)[0], run.validate(step)]

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            check_same([found[0].loss, found[0].norm, found[1]], wanted[3 * step : 3 * step + 3])


def test_threads_that_openmp_started_meanwhile_do_not_flush_denormal_numbers_for_ever():
    """They keep the mode that their starter had, which no later call can change."""
    found = []

    def work():
        from raypar.worker.process.torch_state_guard import TorchStateGuard

        guard = TorchStateGuard(threads=2)
        small = torch.full((1 << 20,), 1e-39)
        torch.set_flush_denormal(True)
        (small * 1.0).sum()
        assert guard.check("a layer") == ("flush_denormal",)
        found.append(int((small * 1.0).count_nonzero()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [1 << 20]


class Wanders(Callback):
    def on_step(self, info):
        os.chdir("/")
        os.environ["MKL_NUM_THREADS"] = "9"
        torch.set_default_dtype(torch.float64)


class Stays(Callback):
    def __init__(self):
        self.found = []

    def on_step(self, info):
        self.found.append((os.getcwd(), torch.get_default_dtype(), os.environ.get("MKL_NUM_THREADS")))


def test_callbacks_do_not_meet_what_others_leave():
    from raypar.worker.process.torch_state_guard import TorchStateGuard

    stays, guard, here = Stays(), TorchStateGuard(1), os.getcwd()
    facts = dict.fromkeys(["step", "loss", "norm", "count", "seconds", "samples_per_s", "count_per_s", "bubble"], 1)
    Callbacks([Wanders(), stays]).call("on_step", facts, around=guard.watching)
    assert stays.found == [(here, torch.float32, None)]
    assert [line.partition(":")[0] for _, line in guard.lines()] == [
        "callback Wanders.on_step left torch.set_default_dtype(torch.float64) behind",
        "callback Wanders.on_step left os.chdir('/') behind",
        "callback Wanders.on_step left os.environ['MKL_NUM_THREADS'] = '9' behind",
    ]


@pytest.mark.ci
def test_a_job_is_checked_and_profiled_whatever_it_leaves_behind():
    """In the process of `raypar train`, before there are workers; the profile enters hooks of its own around layers."""
    from raypar.worker.job_preflight import preflight
    from raypar.worker.measure_profile import profile_job

    here = os.getcwd()
    for place, leak in (
        ("layer", "grad"),
        ("layer", "directory"),
        ("data set", "default dtype"),
        ("model", "default dtype"),
        ("loss", "saved tensors"),
    ):
        spec = job(place, leak)
        torch.set_default_dtype(torch.float64)  # as modules do that were imported before, with the callbacks
        profile = profile_job(spec, workers=1, graph=preflight(spec).graph)
        assert len(profile.layers) == 3
        assert all(layer.activation_bytes > 0 for layer in profile.layers)
        assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
        assert os.getcwd() == here, "a Ray of our own stands where it is started from, and so do its workers"


class InnerGradient(Sensitive):
    """Takes a gradient in its forward, inside contexts of its own: nothing of that is left behind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        if not self.training:
            return y
        with torch.autograd.detect_anomaly(check_nan=False), torch.autocast("cpu", torch.bfloat16):
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return y + 0.1 * slope.float()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_layer_that_takes_gradients_inside_contexts_of_its_own_leaves_nothing():
    spec = job().replace(model=ModelConfig(function=with_layer, args={"kind": InnerGradient}))
    (one, said), (two, said_too) = (outcome(spec, stages) for stages in (1, 3))
    check_same(one, two)
    assert said == said_too == []


def test_all_state_is_compared_after_each_call_until_a_worker_has_run_all_of_its_code_once():
    spec = job()
    graph = make_layer_graph(spec)
    with (
        OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=3), "1f1b", graph=graph) as run,
        OneProcessRun(spec, ParallelPlan.mesh(layers=3), "1f1b", graph=graph) as of_one,
    ):
        core = run.cores[0]
        assert core.guard.compare_everything
        run.step(0)
        assert not core.guard.compare_everything
        core.adopt(core.assignment, core.transport)  # as after a loss: the same layers
        assert not core.guard.compare_everything
        core.adopt(of_one.cores[0].assignment, of_one.mesh.transports[0])
        assert core.guard.compare_everything, "layers that it has not run yet"
