"""Layers that do not draw from Python's and NumPy's generators are not seeded for; the bits are those of always seeding.

The layers here draw in ways that are hard to see, from the first call on or seldom. PyTorch's generator, which is always
seeded, says in which microbatches: so it is the same ones on every plan.
"""

import functools
import random
import sys
import threading
from collections import OrderedDict
from random import random as bound_at_import

import numpy
import pytest
import torch
from helpers.tiny_job import Count
from torch import Tensor, nn

from raypar.comm.buffer_pool import CPU
from raypar.fences import private_api_fence as fences
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, ValidationConfig
from raypar.plan import ParallelPlan
from raypar.plan.seeds import seed_of
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.process import generator_positions, seed_generators
from raypar.worker.process.generator_positions import OF_NUMPY, OF_PYTHON
from raypar.worker.process.seed_generators import HostGenerators, make_seeder, make_torch_seeder, seed_host_generators
from raypar.worker.process.seeded_calls import SeededCalls, UnseededDraw
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.run_in_one_process import OneProcessRun

WIDTH, STEPS = 6, 3
CALLS: list[str] = []
"""Every call of a drawing layer."""


def in_a_thread() -> float:
    found = []
    thread = threading.Thread(target=lambda: found.append(random.random() + numpy.random.rand()))
    thread.start()
    thread.join()
    return found[0]


def python_restored() -> float:
    state = random.getstate()
    found = random.random()
    random.setstate(state)
    return found


def numpy_restored() -> float:
    state = numpy.random.get_state()
    found = numpy.random.rand()
    numpy.random.set_state(state)
    return found


def from_a_generator_of_its_own() -> float:
    before, number = numpy.random.get_bit_generator(), numpy.random.randint(1000)
    numpy.random.set_bit_generator(numpy.random.PCG64(number))
    found = numpy.random.rand()
    numpy.random.set_bit_generator(before)
    return found


def drawn_and_seeded() -> float:
    found = random.random() + numpy.random.rand()
    random.seed(0), numpy.random.seed(0)
    return found


DRAWS = {
    "python": lambda: random.random(),
    "bound": lambda: bound_at_import(),
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(numpy.random.rand()),
    "randn": lambda: float(numpy.random.randn()),
    "raw": lambda: numpy.random.get_bit_generator().random_raw() / 2**32,
    "thread": in_a_thread,
    "624 of python": lambda: [random.getrandbits(32) for _ in range(624)][5] / 2**32,
    "624 of numpy": lambda: float(numpy.random.random_sample(312)[5]),
    "own": from_a_generator_of_its_own,
    "seeded afterwards": drawn_and_seeded,
}
RESTORED = {"python restored": python_restored, "numpy restored": numpy_restored}
WHEN = ("always", "seldom", "in training")


class Drawing(nn.Linear):
    """Draws `what`, and does with the number what a second attempt might do twice."""

    def __init__(self, what: str, when: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.what, self.when = what, when
        self.register_buffer("drawn", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(self.what)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 1.5)
        x = nn.functional.dropout(x, 0.2, training=True)
        due = {"always": True, "seldom": torch.rand(()) < 0.3, "in training": self.training}[self.when]
        number = (DRAWS | RESTORED)[self.what]() if due else 0.0
        if self.training and due:
            self.drawn.add_(number)
        return torch.tanh(super().forward(x)) + number


class Samples:
    raypar_thread_safe = True

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.arange(WIDTH) / 7 + index / 5, torch.full((WIDTH,), index / 16)


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    """Goes on with the random numbers of the last layer."""
    return (output - target * random.random() * numpy.random.rand()).square().mean()


def model(what: str, when: str) -> nn.Module:
    drawing = functools.partial(Drawing, what, when)
    return nn.Sequential(
        OrderedDict(a=nn.Linear(WIDTH, WIDTH), b=drawing(), c=nn.BatchNorm1d(WIDTH), d=drawing(), e=nn.Linear(WIDTH, WIDTH))
    )


def plain(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def job(function, buffers: str = "refuse", loss=noisy_loss, **args) -> Job:
    return Job(
        name="drawing",
        seed=3,
        steps=STEPS,
        batch_size=8,
        microbatches=4,
        model=ModelConfig(function=function, args=args, buffers=buffers),
        loss=LossConfig(function=loss),
        data=DataConfig(function=Samples),
        optimizer=OptimizerConfig(function=torch.optim.SGD, args={"lr": 0.05}),
        validation=ValidationConfig(function=Samples, every=1),
    )


def outcome(spec: Job, stages: int = 1, recompute: bool = False) -> list[Tensor]:
    graph, seen = make_layer_graph(spec), []
    layers = len(graph.layers)
    plan = ParallelPlan.mesh(pp=stages, layers=layers, recompute=range(layers) if recompute else ())
    CALLS.clear()
    with OneProcessRun(spec, plan, "1f1b", graph=graph) as run:
        for step in range(STEPS):
            report = run.step(step)[0]
            seen += [report.loss, report.norm, run.validate(step)]
        seen += [one.clone() for copies in (run.parameters(), run.buffers()) for each in copies.values() for one in each]
    return [torch.as_tensor(one) for one in seen]


@functools.cache
def always_seeded(what: str, when: str, buffers: str) -> tuple[list[Tensor], int]:
    """What one process computes that seeds all generators before each call, and its calls of drawing layers."""
    before, HostGenerators.of_process = HostGenerators.of_process, staticmethod(lambda: None)
    try:
        return outcome(job(model, buffers, what=what, when=when)), len(CALLS)
    finally:
        HostGenerators.of_process = before


CASES = [(what, when, "last") for what in DRAWS for when in WHEN]
CASES += [(what, when, "last") for what in RESTORED for when in ("always", "in training")]
CASES += [("numpy", when, "sum") for when in WHEN]


@pytest.mark.part(9)
@pytest.mark.parametrize(("what", "when", "buffers"), CASES)
@pytest.mark.parametrize(("stages", "recompute"), [(2, False), (2, True), (1, False)])
def test_a_layer_that_draws_has_the_bits_of_one_process_that_always_seeds(what, when, buffers, stages, recompute):
    wanted, calls = always_seeded(what, when, buffers)
    found = outcome(job(model, buffers, what=what, when=when), stages, recompute)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    if not recompute:  # of both layers at most one call in training is made again, and two in evaluation
        assert len(CALLS) - calls in ((1, 2, 3, 4, 5, 6) if when == "seldom" else (0,))


def seedings(monkeypatch) -> list[int]:
    """The numbers by which Python's and NumPy's generators are seeded from now on."""
    numbers, real = [], seed_generators.seed_python_and_numpy
    monkeypatch.setattr(seed_generators, "seed_python_and_numpy", lambda number: (numbers.append(number), real(number)))
    return numbers


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def test_layers_that_do_not_draw_are_seeded_for_in_their_first_call_only(monkeypatch):
    """Beside the last one, which the loss follows, and the first one after that."""
    layers, spec, by_call = 6, job(plain, loss=mean_square, layers=6), []
    graph, numbers = make_layer_graph(spec), seedings(monkeypatch)
    with OneProcessRun(spec, ParallelPlan.mesh(layers=layers), "1f1b", graph=graph) as run:
        for step in range(2):
            for call in (run.step, run.validate):
                numbers.clear()
                call(step)
                by_call.append(len(numbers))
    optimizer, first, later = 1, layers, 2
    assert by_call == [first + 3 * later + optimizer, first + 7 * later, 4 * later + optimizer, 8 * later]


# -- samples -----------------------------------------------------------------------------------------------------------------


class KeptSamples:
    """Keeps what it has drawn, in an attribute or on the disk, as data sets may; the first samples seldom draw."""

    def __init__(self, what: str) -> None:
        self.what, self.kept = what, dict[int, Tensor]()

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor]:
        if index not in self.kept:
            number = (DRAWS | RESTORED)[self.what]() if index > 5 or torch.rand(()) < 0.1 else 0.0
            self.kept[index] = torch.cat([torch.rand(2), torch.tensor([number])])
        return (self.kept[index],)


@pytest.mark.parametrize("what", DRAWS | RESTORED)
def test_samples_that_a_data_set_keeps_are_the_same_in_any_order(what: str):
    """So the generators are seeded before every sample: one that was drawn unseeded would stay, however often it is read."""
    wanted, dataset = {}, KeptSamples(what)
    for index in range(32):
        seed_host_generators(seed_of(5, "sample", 0, index))
        wanted[index] = dataset[index][0]
    for order in (range(32), range(31, -1, -1)):
        guard, dataset = TorchStateGuard(1), KeptSamples(what)
        guard.establish("the data set")
        for at in range(0, 32, 4):
            reader = SampleReader(dataset, (), ("x",), 5, guard)  # as after a new plan
            for _ in range(2):
                found = reader.read([(0, index) for index in order[at : at + 4]])["x"]
                assert all(torch.equal(one, wanted[index]) for one, index in zip(found, order[at : at + 4], strict=True))


# -- one layer's calls -------------------------------------------------------------------------------------------------------


def new_calls() -> SeededCalls:
    return SeededCalls(make_seeder(CPU), make_torch_seeder(CPU), HostGenerators.of_process())


def drawn_by(draw, number: int):
    make_seeder(CPU)(number)
    return draw()


def called(calls: SeededCalls, number: int, draw):
    """As `LayerCall` calls it: (result, how many attempts it took)."""
    try:
        return calls(number, draw), 1
    except UnseededDraw:
        return calls(number, draw), 2


@pytest.mark.parametrize("what", DRAWS)
def test_a_call_that_begins_to_draw_is_made_again_and_later_ones_are_seeded(what):
    calls, draw = new_calls(), DRAWS[what]
    assert called(calls, 1, lambda: 0.0) == (0.0, 1) and calls.draws is False
    random.gauss(0, 1), numpy.random.randn()  # others draw meanwhile, and leave a second number
    assert called(calls, 2, draw) == (drawn_by(draw, 2), 2) and calls.draws is True
    assert called(calls, 3, draw) == (drawn_by(draw, 3), 1)


@pytest.mark.parametrize("what", DRAWS)
def test_of_calls_that_are_asked_at_the_end_those_that_have_drawn_are_made_again(what):
    guard, generators, made = TorchStateGuard(1), HostGenerators.of_process(), []
    guard.establish("a layer")
    for draw in (lambda: 0.0, lambda: 0.0, DRAWS[what]):
        made.clear()
        guard.compare_once(lambda: made.append(draw()), "a layer", "layers", generators=generators)  # noqa: B023
    assert len(made) == 2


@pytest.mark.parametrize("what", DRAWS | RESTORED)
def test_a_first_call_that_draws_shows_it_also_where_it_puts_the_state_back(what):
    calls, draw = new_calls(), (DRAWS | RESTORED)[what]
    before = numpy.random.get_bit_generator()
    assert called(calls, 2**40 + 1, draw) == (drawn_by(draw, 2**40 + 1), 1) and calls.draws is True
    assert numpy.random.get_bit_generator() is before and type(random.seed.__self__) is random.Random


def test_what_a_first_call_leaves_is_what_always_seeding_leaves():
    def states():
        return random.getstate(), str(numpy.random.get_state(legacy=False)), torch.get_rng_state().tolist()

    def draw():
        return random.gauss(0, 1), numpy.random.randn(), torch.rand(1)

    new_calls()(5, draw)
    found = states()
    drawn_by(draw, 5)
    assert found == states()


@pytest.mark.parametrize(
    "touch", [random.getstate, numpy.random.get_state, lambda: random.seed(1), lambda: numpy.random.seed(1)]
)
def test_a_first_call_that_reads_or_seeds_counts_as_one_that_draws(touch):
    calls = new_calls()
    calls(1, touch)
    assert calls.draws is True


def test_an_error_after_an_unseeded_draw_is_raised_only_if_the_second_attempt_raises_it():
    calls = new_calls()
    called(calls, 1, lambda: 0)
    wanted, tried = drawn_by(random.random, 2), Count()

    def fails_on_others():
        tried.add()
        if random.random() != wanted:
            raise ValueError("another number")
        return "done"

    assert called(calls, 2, fails_on_others) == ("done", 2)
    with pytest.raises(ValueError, match="another number"):
        calls(3, fails_on_others)


def test_an_error_without_a_draw_is_raised_at_once():
    calls = new_calls()
    called(calls, 1, lambda: 0)
    with pytest.raises(ZeroDivisionError):
        calls(2, lambda: 1 / 0)
    assert calls.draws is False


def test_after_another_generator_was_put_behind_numpy_random_all_calls_are_seeded():
    before, calls = numpy.random.get_bit_generator(), new_calls()
    try:
        called(calls, 1, lambda: 0)
        numpy.random.set_bit_generator(numpy.random.PCG64(1))
        for number, attempts in ((2, 2), (3, 1)):
            assert called(calls, number, numpy.random.rand) == (drawn_by(numpy.random.rand, number), attempts)
        calls = new_calls()
        called(calls, 1, lambda: 0)
        assert calls.draws is True
    finally:
        numpy.random.set_bit_generator(before)


# -- the fences --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(fences, "_warnings", lines)
    monkeypatch.setattr(fences, "_listener", lambda line: None)
    for fence in (OF_PYTHON, OF_NUMPY):
        fence.reset()
    yield lines
    for fence in (OF_PYTHON, OF_NUMPY):
        fence.reset()


@pytest.mark.parametrize("fence", [OF_PYTHON, OF_NUMPY])
def test_the_generators_tell_how_far_they_are_here(fence, told):
    assert fence.find() is not None and not told
    assert HostGenerators.of_process() is not None and all((fence.reason, fence.versions))


@pytest.mark.parametrize(
    ("fence", "breaks", "release"),
    [
        (OF_PYTHON, (sys.implementation, "name", "pypy"), f"Python {sys.version.split()[0]}"),
        (OF_PYTHON, (generator_positions, "_three_words_at", lambda address: lambda: b"others"), "Python 3."),
        (OF_NUMPY, (numpy.random, "get_bit_generator", None), f"NumPy {numpy.__version__}"),
    ],
    ids=["no-cpython", "other-words", "no-function"],
)
def test_where_they_do_not_all_layers_are_seeded_and_it_is_said_once(fence, breaks, release, told, monkeypatch):
    spec = job(plain, loss=mean_square, layers=3)
    wanted = outcome(spec)
    fence.reset()
    monkeypatch.setattr(*breaks)
    numbers = seedings(monkeypatch)
    found = outcome(spec, 2)
    assert all(map(torch.equal, found, wanted))
    assert len(numbers) == STEPS * (3 * (4 + 8) + 2)  # layers by microbatch; both stages' optimizer
    (line,) = [one for one in told if fence.api in one]
    assert line.startswith(release) and f"so {fence.feature} is off: {fence.without}\n" in line
