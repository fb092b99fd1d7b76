"""A captured model is compared with the user's own module on numbers before a run: what escapes the record is refused."""

from __future__ import annotations

import contextvars
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from helpers.captured_jobs import check_run, graph_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from raypar.errors import ModelError
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, ValidationConfig
from raypar.plan import ParallelPlan
from raypar.worker import plain_microbatches
from raypar.worker.job_preflight import preflight
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(7)

WIDTH = 4


class Rows:
    """Samples of four numbers, with a length from 1 to 4."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": x, "length": torch.tensor(1 + index % 4), "y": torch.tensor(float(index % 3))}


def loss(output: Any, target: Tensor) -> Tensor:
    return (output.reshape(len(output), -1).sum(1) - target).square().mean()


def job_of(make: Callable[..., nn.Module], **changed: Any) -> Job:
    job = Job(
        name="numbers",
        seed=3,
        steps=2,
        batch_size=7,
        microbatches=3,
        model=ModelConfig(function=make),
        loss=LossConfig(function=loss),
        data=DataConfig(function=Rows, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.05}),
    )
    return job.replace(**changed)


def not_compared(job: Job) -> list[str]:
    """Lines of preflight about layers that were not compared with the module."""
    return [line for line in preflight(job).notes if "not compared" in line]


class Blocks(nn.Module):
    """Linear layers, with what a test puts between them."""

    def __init__(self, block: Callable[[], nn.Module] | None = None, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() if block else nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.between(block(x), number)
        return x

    def between(self, x: Tensor, number: int) -> Tensor:
        return x


SCALE = [1.0]
DEPTH: contextvars.ContextVar[float] = contextvars.ContextVar("depth", default=1.0)


class ReadsGlobal(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE[0]


class SetsGlobal(Blocks):
    def __init__(self) -> None:
        super().__init__(ReadsGlobal)

    def between(self, x: Tensor, number: int) -> Tensor:
        SCALE[0] = number + 2.0 if number < 2 else 1.0
        return x


class ReadsContext(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * DEPTH.get()


class SetsContext(Blocks):
    def __init__(self) -> None:
        super().__init__(ReadsContext)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            token = DEPTH.set(number + 1.0)
            x = block(x)
            DEPTH.reset(token)
        return x


class ReadsTable(nn.Linear):
    """Reads a table, an object or a number that others put into it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.table: Any = None
        self.options: dict[str, float] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) * self.options.get("scale", 1.0)
        return x if self.table is None else x * self.table[-1]


class SetsTable(Blocks):
    def __init__(self) -> None:
        super().__init__(ReadsTable)

    def between(self, x: Tensor, number: int) -> Tensor:
        for block in self.blocks:
            block.table = torch.arange(1.0, WIDTH)
        return x


class SetsTuple(SetsTable):
    def between(self, x: Tensor, number: int) -> Tensor:
        for block in self.blocks:
            block.table = (1, len(x) + 1)
        return x


class SharesOptions(Blocks):
    """All blocks have one dict, which changes between them."""

    def __init__(self) -> None:
        super().__init__(ReadsTable)
        self.options: dict[str, float] = {}
        for block in self.blocks:
            block.options = self.options

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            self.options["scale"] = number + 1.0
            x = block(x)
        return x


class CallsBack(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        return change(super().forward(x))


class LateLambda(Blocks):
    def __init__(self) -> None:
        super().__init__(CallsBack)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, lambda y: y * (number + 1))  # noqa: B023
        return x


class WarmsUp(nn.Linear):
    """Counts its calls over microbatches."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 3)


class KeepsAverage(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.average = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return super().forward(x) + self.average


class OwnGenerator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.random.random())


class SwapsParameter(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = first(x)
        x = torch.func.functional_call(second, {name: p.detach() for name, p in second.named_parameters()}, (x,)) + second(x)
        return third(x)


class LengthOfTable(Blocks):
    """The length of a table that PyTorch makes of a value without telling Python the value."""

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        return super().forward(x) * len(torch.zeros(int(length.max()))) + len(torch.nn.functional.one_hot(length)[0])


class FormatsField(Blocks):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        return super().forward(x) * float(f"{length[0]}")


class AsksForType(Blocks):
    def between(self, x: Tensor, number: int) -> Tensor:
        return x * 2 if type(x) is torch.Tensor else x


class CachedCasts(Blocks):
    """Autocast that keeps the casts of weights, so that two uses of one add their gradients in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def between(self, x: Tensor, number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = (x @ self.weight) @ self.weight
        return y.float()


class WritesData(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return super().forward(x)


class WritesDataOfSkip(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = WritesData()

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](y)) + y


@pytest.mark.parametrize(
    "make",
    [
        SetsGlobal,
        SetsContext,
        SharesOptions,
        LateLambda,
        SwapsParameter,
        AsksForType,
        CachedCasts,
        FormatsField,
        WritesDataOfSkip,
    ],
)
def test_what_no_record_shows_is_refused_by_the_numbers(make: Callable[[], nn.Module]):
    with pytest.raises(ModelError, match="do not compute what the module computes") as found:
        preflight(job_of(make))
    assert "your_own_model.md" in found.value.cure


@pytest.mark.parametrize(
    ("make", "attribute"),
    [
        (lambda: Blocks(WarmsUp), "'calls' of blocks.0"),
        (lambda: Blocks(KeepsAverage), "'average' of blocks.0"),
        (lambda: Blocks(OwnGenerator), "'random' of blocks.0"),
        (SetsTable, "'table' of blocks.0"),
        (SetsTuple, "'table' of blocks.0"),
    ],
)
def test_what_a_microbatch_leaves_for_the_next_is_refused_with_its_attribute(make: Callable[[], nn.Module], attribute: str):
    with pytest.raises(ModelError, match="keeps something of one microbatch for the next in attribute " + attribute) as found:
        preflight(job_of(make))
    assert "model.buffers" in found.value.cure


class CountsLate(nn.Linear):
    """Counts its calls; the count has an effect from the 20th one on."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 if self.calls < 20 else 2.0)


class Checkpointed(nn.Linear):
    """Computes its activations again in the backward pass, as layers of transformers do: around `__call__`."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def __call__(self, *args: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False)


class CheckpointedDropout(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.3)


class CheckpointedWarmUp(Checkpointed):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 4)


class CheckpointsGlue(Blocks):
    """Checkpoints two blocks together, with dropout between them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[2](checkpoint(self.two, x, use_reentrant=False))

    def two(self, x: Tensor) -> Tensor:
        return self.blocks[1](nn.functional.dropout(self.blocks[0](x), 0.3))


@pytest.mark.parametrize("block", [CountsLate, CheckpointedWarmUp])
def test_a_counter_is_refused_however_late_it_has_an_effect_and_with_checkpointing(block: Callable[[], nn.Module]):
    with pytest.raises(ModelError, match=r"attribute 'calls' of blocks\.0"):
        preflight(job_of(lambda: Blocks(block)))


@pytest.mark.parametrize("make", [lambda: Blocks(CheckpointedDropout), CheckpointsGlue])
def test_checkpointed_forwards_are_compared(make: Callable[[], nn.Module]):
    assert not_compared(job_of(make)) == []


class DrawsInBackward(Checkpointed):
    """Draws from Python's generator in a checkpointed forward: the second one draws another number."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) * (0.5 + random.random()))


def test_random_numbers_of_the_backward_pass_are_refused():
    with pytest.raises(ModelError, match="draws random numbers in its backward pass"):
        preflight(job_of(lambda: Blocks(DrawsInBackward)))


class PythonAndNumpyRandom(nn.Linear):
    """Draws from all three generators."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.2) * (0.5 + random.random()) + numpy.random.rand()


@pytest.mark.parametrize(
    "plan", [ParallelPlan.mesh(pp=3, dp=2, layers=3), ParallelPlan.mesh(pp=2, layers=3, recompute=(0, 1, 2))], ids=str
)
def test_random_and_numpy_inside_of_a_unit_have_the_numbers_of_one_process(plan: ParallelPlan):
    job = job_of(lambda: Blocks(PythonAndNumpyRandom))
    assert not_compared(job) == []
    check_run(job, plan, "1f1b")


class Cached(nn.Linear):
    """Keeps what is made of sizes: a table that grows, a mask for each batch size, the last one of another; and its output."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.angles: Tensor | None = None
        self.masks: dict[int, Tensor] = {}
        self.last: tuple[int, Tensor] | None = None
        self.activation: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        if self.angles is None or len(self.angles) < rows:
            self.angles = torch.arange(float(rows)).cos()[:, None]
        if rows not in self.masks:
            self.masks[rows] = torch.arange(rows)[:, None] < rows - 1
        if self.last is None or self.last[0] != rows:
            self.last = rows, torch.arange(float(rows)).sin()[:, None]
        self.activation = super().forward(x) * self.angles[:rows] * self.masks[rows] + self.last[1]
        return self.activation


def test_caches_are_allowed_and_have_the_bits_of_one_process():
    job = job_of(lambda: Blocks(Cached))
    assert not_compared(job) == []
    check_run(job, ParallelPlan.mesh(pp=2, dp=2, layers=3), "1f1b")


class SkipsCall(nn.Linear):
    """Has a `__call__` that runs no hooks."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Fails(Blocks):
    """Raises between units where there are numbers, so never in a record."""

    def between(self, x: Tensor, number: int) -> Tensor:
        if type(x) is Tensor:
            raise ZeroDivisionError("not today")
        return x


@pytest.mark.parametrize(
    ("make", "limit", "reason"),
    [
        (Blocks, ("MOST_BYTES", 10), "its parameters and buffers have 0 MiB"),
        (Blocks, ("MOST_SECONDS", 0.0), r"one microbatch took 0\.\d s"),
        (Fails, ("MICROBATCHES", 3), "its own forward and backward raised ZeroDivisionError: not today"),
        (lambda: Blocks(SkipsCall), ("MICROBATCHES", 3), "blocks.0 is called otherwise than by its class's __call__"),
    ],
)
def test_a_check_that_compares_nothing_says_so(
    make: Any, limit: tuple[str, float], reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plain_microbatches, *limit)
    (line,) = not_compared(job_of(make))
    assert re.match(f"the layers were not compared with the model on numbers: {reason}", line)


class HidesAttributes:
    """An object whose attributes nobody may read."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not for you")


class HoldsHidden(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.hidden = HidesAttributes()


def test_an_object_that_cannot_be_read_is_said():
    (line,) = (line for line in preflight(job_of(lambda: Blocks(HoldsHidden))).notes if "hidden" in line)
    assert line.startswith("attribute 'hidden' of blocks.0 (HoldsHidden) raises RuntimeError when it is read; state that")


class TakesTime(nn.Linear):
    """Remembers when it was called last, which nothing reads."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.called = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.called = time.perf_counter()
        return super().forward(x)


def test_a_time_that_is_kept_is_refused_and_the_cure_names_it():
    with pytest.raises(ModelError, match=r"attribute 'called' of blocks.0 .* is changed by every microbatch") as found:
        preflight(job_of(lambda: Blocks(TakesTime)))
    assert "leave out what only counts or measures (a number of calls, a time)" in found.value.cure


class GlueRandom(Blocks):
    """Skips a block by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def between(self, x: Tensor, number: int) -> Tensor:
        return x if self.random.random() < 0.999 else x * 2


class GlueCounts(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": 0}

    def between(self, x: Tensor, number: int) -> Tensor:
        self.state["calls"] += 1
        return x if self.state["calls"] < 100 else x * 2


class GlueTable(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def between(self, x: Tensor, number: int) -> Tensor:
        self.calls += 1
        return x if self.calls < 100 else x * 2


class GlueNumpy(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.random = numpy.random.default_rng(0)

    def between(self, x: Tensor, number: int) -> Tensor:
        return x if self.random.random() < 0.999 else x * 2


@pytest.mark.parametrize("make", [GlueRandom, GlueCounts, GlueTable, GlueNumpy])
def test_state_that_code_between_units_changes_is_refused_at_once(make: Callable[[], nn.Module]):
    with pytest.raises(ModelError, match=r"changes its attribute|does not do the same"):
        preflight(job_of(make))


class Trims(nn.Linear):
    """Returns as many tensors as the largest number in it says."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = super().forward(x)
        return y, y * 2 if float(y.detach().abs().max()) > self.limit else None


class UsesSecond(Blocks):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.blocks[0] = Trims()
        self.blocks[0].limit = limit

    def forward(self, x: Tensor) -> Tensor:
        y, more = self.blocks[0](x)
        return self.blocks[2](self.blocks[1](y if more is None else y + more))


def test_a_unit_that_returns_another_form_for_other_values_is_an_error_in_the_run():
    job = job_of(UsesSecond, model=ModelConfig(function=UsesSecond, args={"limit": 1.0}))
    with pytest.raises(ModelError, match="returns something of another form than in the record"):
        preflight(job)
    job = job_of(UsesSecond, model=ModelConfig(function=UsesSecond, args={"limit": 1e9}))
    check_run(job, ParallelPlan.mesh(pp=2, layers=3), "1f1b")


class Endless(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        while float(x.detach().norm()) < 100:
            x = x * 0.5
        return super().forward(x)


def test_a_unit_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raypar.model.capture.recorder.MOST_UNIT_SECONDS", 0.3)
    with pytest.raises(ModelError, match=r"unit blocks.0 has run for 0 s while it was recorded"):
        preflight(job_of(lambda: Blocks(Endless)))


class Reverse(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -gradients[0]


reverse = Reverse.apply


class Reverses(Blocks):
    def between(self, x: Tensor, number: int) -> Tensor:
        return x + reverse(x) * 0.5


class SlicesByField(Blocks):
    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        return super().forward(x)[:, : length.max()]


class OtherLayout(nn.Module):
    """Convolutions of a channels_last image, and code that asks how it lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(1, 1, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 1, 2, 2).expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)[:, :1]
        for block in self.blocks:
            x = block(x)
        return x


class AsksForLayout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 1, 2, 2).repeat(1, 3, 1, 1).contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            x = block(x)
            x = x if x.is_contiguous() else x * 2
        return x


class FillsWithNan(Blocks):
    def between(self, x: Tensor, number: int) -> Tensor:
        return torch.nan_to_num(x.masked_fill(x.detach() > 9, float("nan")))


@pytest.mark.ci
@pytest.mark.parametrize("make", [Reverses, SlicesByField, OtherLayout, AsksForLayout, FillsWithNan, LengthOfTable])
def test_what_a_record_does_show_has_the_bits_of_the_module(make: type[nn.Module]):
    job = job_of(make)
    preflight(job)
    check_run(job, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph_of(job).layers)), "1f1b")


class AsksForGradients(Blocks):
    def between(self, x: Tensor, number: int) -> Tensor:
        return x * 2 if torch.is_grad_enabled() else x


def test_a_forward_in_evaluation_is_recorded_without_gradients():
    job = job_of(AsksForGradients, validation=ValidationConfig(function=Rows, target="y", every=1, samples=4), steps=1)
    model = AsksForGradients()
    with OneProcessRun(job, ParallelPlan.mesh(pp=2, layers=3), "1f1b", graph=preflight(job).graph) as run:
        run.step(0)
        model.load_state_dict({name: copies[0] for name, copies in run.parameters().items()})
        rows = [Rows()[index] for index in range(4)]
        x, y = (torch.stack([row[name] for row in rows]) for name in ("x", "y"))
        with torch.no_grad():
            wanted = loss(model(x), y)
        assert run.validate(0) == pytest.approx(float(wanted), rel=1e-6)


class FrozenNorm(Blocks):
    """Keeps a norm in evaluation mode, as detection models do."""

    def __init__(self, call: bool) -> None:
        super().__init__()
        self.norm = nn.Dropout(0.5)
        if call:
            self.train()

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def between(self, x: Tensor, number: int) -> Tensor:
        return self.norm(x)


def test_an_own_train_must_have_been_called():
    with pytest.raises(ModelError, match="leaves norm in evaluation mode, and has not been called"):
        preflight(job_of(FrozenNorm, model=ModelConfig(function=FrozenNorm, args={"call": False})))
    preflight(job_of(FrozenNorm, model=ModelConfig(function=FrozenNorm, args={"call": True})))


class HoldsLock(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_what_cannot_be_copied_is_named():
    with pytest.raises(ModelError, match=r"HoldsLock .* cannot be copied.*lock"):
        preflight(job_of(HoldsLock))


class OverlappingBuffers(Blocks):
    """Writes a buffer of which another one is a part."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(WIDTH))
        self.register_buffer("part", self.whole[:2])

    def between(self, x: Tensor, number: int) -> Tensor:
        with torch.no_grad():
            self.whole.add_(1)
        return x * self.part.sum()


def test_written_buffers_that_share_memory_are_refused():
    with pytest.raises(ModelError, match="the buffers whole and part share memory"):
        preflight(job_of(OverlappingBuffers, model=ModelConfig(function=OverlappingBuffers, buffers="last")))


class HoldsSparse(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.eye(WIDTH).to_sparse()

    def between(self, x: Tensor, number: int) -> Tensor:
        return torch.sparse.mm(self.graph, x.T).T


def test_a_product_with_a_sparse_matrix_between_units_is_the_plain_modules():
    preflight(job := job_of(HoldsSparse))
    check_run(job, ParallelPlan.mesh(pp=3, layers=len(graph_of(job).layers)), "1f1b")


class PaddedEncoder(nn.Module):
    """An encoder of PyTorch's with a padding mask, which makes nested tensors of it in evaluation."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.embed, self.encoder = nn.Linear(1, WIDTH), nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        mask = torch.arange(WIDTH) >= length[:, None]
        return self.encoder(self.embed(x[..., None]), src_key_padding_mask=mask)[:, 0]


def test_nested_tensors_are_refused_with_their_switch():
    validation = ValidationConfig(function=Rows, target="y", every=1, samples=4)
    with pytest.raises(ModelError) as found:
        preflight(
            job_of(PaddedEncoder, model=ModelConfig(function=PaddedEncoder, args={"nested": True}), validation=validation)
        )
    assert "enable_nested_tensor=False" in found.value.cure
    preflight(job_of(PaddedEncoder, model=ModelConfig(function=PaddedEncoder, args={"nested": False}), validation=validation))


class SquareRoot(Blocks):
    """Its value is finite, and its gradient at zero is not a number."""

    def between(self, x: Tensor, number: int) -> Tensor:
        return torch.sqrt(x * 0) if number == 1 else x


def nothing_counts(output: Any, target: Tensor) -> tuple[Tensor, int]:
    return output.sum() * 0, 0


@pytest.mark.parametrize("make, with_loss", [(SquareRoot, loss), (Blocks, nothing_counts)])
def test_numbers_that_are_not_finite_say_nothing_of_the_record(make: Callable[[], nn.Module], with_loss: Callable[..., Any]):
    """A gradient of NaN was blamed on hidden state of the model; a first step without terms was `ZeroDivisionError`."""
    (line,) = not_compared(job_of(make, loss=LossConfig(function=with_loss)))
    assert "on the first microbatches" in line


class UsesBank(nn.Module):
    """A block that computes its weight of a bank which other blocks have too, in one or in several operations."""

    def __init__(self, bank: nn.Parameter, uses: int, *, asks: bool) -> None:
        super().__init__()
        self.bank, self.uses, self.asks = bank, uses, asks

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and float(x.detach().sum()) > 1e9:  # it cannot run without values
            return x
        for _ in range(self.uses):
            x = torch.tanh(x @ self.bank)
        return x


class SharesBank(nn.Module):
    """Blocks with one bank of parameters, as VB-LoRA's."""

    def __init__(self, uses: Sequence[int], asks: bool = False) -> None:
        super().__init__()
        bank = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(UsesBank(bank, uses[number], asks=asks and number == 1) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def said_of_bank(**args: Any) -> list[str]:
    return [
        line
        for line in preflight(job_of(SharesBank, model=ModelConfig(function=SharesBank, args=args))).notes
        if "several layers use" in line
    ]


@pytest.mark.parametrize("asks", [False, True])
def test_gradients_that_are_not_added_in_the_order_of_autograd_are_said(asks: bool):
    (line,) = said_of_bank(uses=[2, 2, 2], asks=asks)
    assert "several layers use blocks.0.bank, and one of them several times" in line and "with the same bits" in line
    assert said_of_bank(uses=[1, 1, 1], asks=asks) == []


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("uses, is_said", [([2, 0, 1], True), ([0, 2, 1], True), ([2, 0, 0], False)])
def test_a_layer_that_has_a_shared_parameter_and_does_not_read_it_is_no_use(uses: list[int], is_said: bool, asks: bool):
    assert bool(said_of_bank(uses=uses, asks=asks)) == is_said
