"""What reaches code between units on ways that a capture does not see is refused, and never frozen; numbers in the output are
those of the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured_jobs import check_run, graph_of
from helpers.captured_stages import capture
from helpers.parity import validation_on
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from raypar.errors import ModelError
from raypar.job import (
    DataConfig,
    InitFromConfig,
    Job,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

X = {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}


class Blocks(nn.Module):
    """Three blocks in a row, the first of which is `first`."""

    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([first or nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Any:
        return self.blocks[2](self.blocks[1](self.between(self.blocks[0](x), x)))

    def between(self, y: Any, x: Tensor) -> Tensor:
        raise NotImplementedError


class LeavesMask(nn.Linear):
    """Leaves a tensor of the batch in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask = x > 0
        return super().forward(x)


class ReadsMask(Blocks):
    def __init__(self) -> None:
        super().__init__(LeavesMask(4, 4))

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return y * self.blocks[0].mask


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * 2 + 1


class CallsScript(Blocks):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return y + scripted(x)


class MadeOf:
    """Two tensors, in a class that PyTorch does not look into."""

    def __init__(self, y: Tensor, mask: Tensor) -> None:
        self.y, self.mask = y, mask


class ReturnsObject(nn.Linear):
    def forward(self, x: Tensor) -> MadeOf:
        return MadeOf(super().forward(x), x > 0)


class ReadsObject(Blocks):
    def __init__(self) -> None:
        super().__init__(ReturnsObject(4, 4))

    def between(self, y: MadeOf, x: Tensor) -> Tensor:
        return y.y * y.mask


class ReturnsNumber(nn.Linear):
    """Returns a number that it has read from the batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return super().forward(x), int((x > 0).sum())


class ReadsNumber(Blocks):
    def __init__(self) -> None:
        super().__init__(ReturnsNumber(4, 4))

    def between(self, y: tuple[Tensor, int], x: Tensor) -> Tensor:
        return y[0] * y[1]


class ReturnsNumberOfActivation(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        y = super().forward(x)
        return y, y.abs().max().item()


class ReadsNumberOfActivation(Blocks):
    def __init__(self) -> None:
        super().__init__(ReturnsNumberOfActivation(4, 4))

    between = ReadsNumber.between  # type: ignore[assignment]


class LeavesNumber(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.scale = float(x.abs().max())
        return super().forward(x)


class ReadsLeftNumber(Blocks):
    def __init__(self) -> None:
        super().__init__(LeavesNumber())

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return y / self.blocks[0].scale


class ChoosesKernel(Blocks):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.blocks[1](y)


class SavesInBfloat16(Blocks):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.bfloat16(), lambda kept: kept.float()):
            return self.blocks[1](y)


class GpuAutocast(Blocks):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cuda"):
            return self.blocks[1](y)


class HookOfDivided(Blocks):
    """A unit with a backward hook, inside of which code between units calls a module."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.blocks[0].register_full_backward_hook(lambda module, *gradients: None)

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return y + self.blocks[0][0](x)


@pytest.mark.parametrize(
    "make, what, cure",
    [
        (ReadsMask, "was made where the capture does not look", "return it from the module that makes it"),
        (CallsScript, "the TorchScript function 'scripted' is called between units", "call the Python function"),
        (ReadsObject, "was made where the capture does not look", "return it from the module that makes it"),
        (ReadsNumber, "reads values or draws random numbers, and returns", "return it as a tensor"),
        (ReadsNumberOfActivation, "or a number in it, depends on values", "fixed shapes"),
        (ReadsLeftNumber, "reads the attribute 'scale' of blocks.0 (LeavesNumber)", "return it as a tensor"),
        (ChoosesKernel, "changes the attention kernels that may be used (sdpa_kernel)", "inside of a module"),
        (SavesInBfloat16, "changes hooks on what autograd saves", "inside of a module"),
        (GpuAutocast, "enters torch.autocast('cuda')", "torch.autocast(x.device.type, ...)"),
        (HookOfDivided, "blocks.0 (Sequential) has a backward hook", "put the hook on modules that run whole"),
    ],
)
def test_what_a_record_would_freeze_or_leave_out_is_refused(make: Callable[[], nn.Module], what: str, cure: str):
    with pytest.raises(ModelError) as found:
        capture(make(), X)
    assert what in found.value.what and cure in found.value.cure


class LeavesTensor(nn.Linear):
    """Adds what its last call has left."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.left: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) if self.left is None else super().forward(x) + self.left
        self.left = y
        return y


class CalledTwice(Blocks):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return self.blocks[0](y)


class LeavesInBuffer(nn.Linear):
    """Adds what its last call has written into a tensor that was there before."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.left = torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.left
        self.left.copy_(x)
        return y


class Counts(nn.Linear):
    """Multiplies by the number of its calls."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Masked(nn.Linear):
    """Reads what others leave in its attributes."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.mask: Tensor | None = None
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale
        return y if self.mask is None else y * self.mask


class LeavesFieldForUnit(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Masked()

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        self.blocks[1].mask = x
        return y


class LeavesActivationForUnit(LeavesFieldForUnit):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        self.blocks[1].mask = y * 2
        return y


class LeavesNumberForUnit(LeavesFieldForUnit):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        self.blocks[1].scale = float(x.max())
        return y


class LeavesInObject(LeavesFieldForUnit):
    """One unit writes into the attribute of another."""

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.others[0].mask = y
            return y

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = self.First(4, 4)
        self.blocks[0].others = [self.blocks[1]]

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return y


class ReadsDict(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.given: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.given["mask"]


class LeavesInDict(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = ReadsDict()

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        self.blocks[1].given["mask"] = y * 2
        return y


class LeavesFieldInDict(LeavesInDict):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        self.blocks[1].given["mask"] = x
        return y


class WritesUnseen(Blocks):
    """As a C++ extension does."""

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            y.mul_(2)
        return y


class MakesUnseen(Blocks):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return y.mul(2)


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda: CalledTwice(LeavesTensor()), "another call reads the attribute 'left' of blocks.0 (LeavesTensor)"),
        (lambda: CalledTwice(LeavesInBuffer()), "unit blocks.0 reads a tensor [3, 4]"),
        (lambda: CalledTwice(Counts()), "another call reads the attribute 'calls' of blocks.0 (Counts)"),
        (LeavesFieldForUnit, "another call reads the attribute 'mask' of blocks.1 (Masked)"),
        (LeavesActivationForUnit, "another call reads the attribute 'mask' of blocks.1 (Masked)"),
        (LeavesNumberForUnit, "another call reads the attribute 'scale' of blocks.1 (Masked)"),
        (LeavesInObject, "another call reads the attribute 'mask' of blocks.1 (Masked)"),
        (LeavesInDict, "arguments: what code outside of this call has made"),
        (LeavesFieldInDict, "arguments: a field of the batch"),
        (WritesUnseen, "was written where the capture does not look"),
        (MakesUnseen, "was made where the capture does not look"),
    ],
)
def test_what_reaches_a_unit_on_other_ways_is_refused(make: Callable[[], nn.Module], what: str):
    with pytest.raises(ModelError) as found:
        capture(make(), X)
    assert what in found.value.what and str(__file__) in found.value.what and "(model.units)" in found.value.cure


class KeepsTable(nn.Linear):
    """Makes a table at its first call, and keeps what it has seen last; counts its calls, and nobody reads the count."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.table: Tensor | None = None
        self.seen: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        vars(self)["calls"] += 1
        y = super().forward(x) * self.table
        self.last, self.scale = y, 3
        self.seen.append(y)
        return y * self.scale


def test_a_table_that_a_unit_keeps_and_what_it_leaves_unread_are_no_matter():
    block = KeepsTable()
    captured = capture(CalledTwice(block), X)
    traced = captured.cache.model.get_submodule("blocks.0")
    assert traced.seen == [] and traced.table is None and not hasattr(traced, "last")  # a trace leaves nothing


class OwnTable(nn.Linear):
    """A unit that reads a tensor which it has had from the beginning, and tells a size."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.table = torch.arange(4.0)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return super().forward(x) * self.table[: x.shape[1]], len(x)


class ReadsOwnTable(Blocks):
    def __init__(self) -> None:
        super().__init__(OwnTable())

    def between(self, y: tuple[Tensor, int], x: Tensor) -> Tensor:
        return y[0] / y[1] + self.blocks[0].table


def test_tensors_from_before_and_sizes_are_no_secrets():
    capture(ReadsOwnTable(), X)


class Registered(nn.Linear):
    """A class that counts its subclasses."""

    subclasses = 0

    def __init_subclass__(cls) -> None:
        Registered.subclasses += 1


class TellsClasses(nn.ModuleList):
    """A list with a forward, which chooses by the classes of its modules."""

    def __init__(self) -> None:
        super().__init__([Registered(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)[0] if type(block) is nn.LSTM else block(x)
        return x


def test_units_keep_their_classes_and_a_list_its_forward():
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.sum(1) - target).square().mean()

    job = numbers_job(model=ModelConfig(function=TellsClasses), loss=LossConfig(function=loss))
    check_run(job, ParallelPlan.mesh(pp=3, layers=3), "1f1b")
    assert Registered.subclasses == 0
    assert "__getattribute__" not in vars(nn.Module) and nn.Module.__call__.__name__ == "_wrapped_call_impl"


class Rows:
    """Samples whose second field has another number of ones in each."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "keep": torch.arange(4) <= index % 4, "y": torch.tensor(float(index))}


class TellsNumbers(nn.Module):
    """Returns numbers beside tensors: the batch's size, and one that it reads from a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = nn.Linear(4, 4)  # a name that layers of captured models must not need
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, keep: Tensor) -> dict[str, Any]:
        x = self.cache(x)
        for block in self.blocks:
            x = block(x * keep).tanh()
        indices = torch.where(keep)
        return {"out": x, "rows": len(x), "kept": int(keep.sum()), "indices": len(indices[0])}


def loss_of_numbers(output: dict[str, Any], target: Tensor) -> Tensor:
    return (output["out"].sum(1) - target).square().sum() / output["kept"] + output["indices"] / output["rows"]


def numbers_job(**changed: Any) -> Job:
    job = Job(
        name="numbers",
        seed=3,
        steps=3,
        batch_size=5,
        microbatches=2,
        model=ModelConfig(function=TellsNumbers),
        loss=LossConfig(function=loss_of_numbers),
        data=DataConfig(function=Rows, target="y"),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 0.1}),
    )
    return job.replace(**changed)


@pytest.mark.parametrize("schedule, mesh", [("1f1b", {"pp": 2, "dp": 2}), ("gpipe", {"pp": 3, "recompute": range(4)})])
def test_numbers_in_the_output_are_those_of_the_batch(schedule: str, mesh: dict[str, Any]):
    job = numbers_job()
    check_run(job, ParallelPlan.mesh(layers=len(graph_of(job).layers), **mesh), schedule)


def test_numbers_in_the_output_are_those_of_the_batch_in_validation_too():
    data = DataConfig(function=Rows, target="y")
    job = numbers_job(validation=validation_on(data, every=1, samples=7))
    checked = preflight(job)
    with OneProcessRun(job, ParallelPlan.mesh(pp=2, layers=4), "1f1b", graph=checked.graph) as run:
        run.step(0)


class OtherUnitInEvaluation(nn.Module):
    """An auxiliary head in training, as GoogLeNet has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.auxiliary = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x + self.auxiliary(x) if self.training else x


class OtherOrderInEvaluation(nn.Module):
    """Calls a module with its arguments in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.blocks[0](x), self.blocks[1](x)
        return self.last(a, b) if self.training else self.last(b, a)


@pytest.mark.parametrize("model", [OtherUnitInEvaluation, OtherOrderInEvaluation])
def test_another_way_in_evaluation_is_refused_before_the_run_begins(model: type[nn.Module]):
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.sum(1) - target).square().mean()

    job = numbers_job(model=ModelConfig(function=model), loss=LossConfig(function=loss))
    preflight(job)
    with pytest.raises(ModelError, match="or in evaluation, the forward takes another path") as found:
        preflight(job.replace(validation=validation_on(job.data, every=1)))
    assert "self.training" in found.value.cure


class NumberForLargeBatches(nn.Module):
    """Returns a number in the place of None."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, int | None]:
        for block in self.blocks:
            x = block(x) * 1.0
        return x, None if len(x) < 3 else 1


def test_a_number_in_the_place_of_none_is_refused():
    def loss(output: tuple[Tensor, int | None], target: Tensor) -> Tensor:
        return (output[0].sum(1) - target).square().mean() * (output[1] or 0.5)

    job = numbers_job(model=ModelConfig(function=NumberForLargeBatches), loss=LossConfig(function=loss))
    with (
        OneProcessRun(job, ParallelPlan.mesh(layers=3), "1f1b") as run,
        pytest.raises(ModelError, match="returns something else"),
    ):
        run.step(0)


class PartlyInEvaluation(nn.Module):
    """Dropout between units that the constructor has put into evaluation mode, as `from_pretrained` does with all."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.train(training)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.5, self.training)
        return x


@pytest.mark.parametrize("training, zeros", [(False, False), (True, True)])
def test_what_the_model_function_puts_into_evaluation_mode_stays_in_it(training: bool, zeros: bool):
    seen: list[bool] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(bool((output == 0).any()))
        return (output.sum(1) - target).square().mean()

    job = numbers_job(
        model=ModelConfig(function=PartlyInEvaluation, args={"training": training}), loss=LossConfig(function=loss), steps=1
    )
    with OneProcessRun(job, ParallelPlan.mesh(pp=2, layers=3), "1f1b") as run:
        run.step(0)
    assert seen[-2:] == [zeros, zeros]


class DecidesByBuffer(nn.Module):
    """Doubles what passes between units, if its buffer says so; with a 2 in it leaves the last unit out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("mode", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        x = x * 2 if self.mode == 1 else x
        return x if self.mode == 2 else self.blocks[2](x)


def test_a_forward_decides_by_the_buffers_of_the_weights_file(tmp_path: Path):
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output.sum(1) - target).square().mean()

    state = DecidesByBuffer().state_dict()

    def job(mode: int) -> Job:
        torch.save(state | {"mode": torch.tensor(mode)}, file := tmp_path / f"{mode}.pt")
        return numbers_job(
            model=ModelConfig(function=DecidesByBuffer),
            loss=LossConfig(function=loss),
            init_from=InitFromConfig(path=str(file)),
        )

    for mode in (0, 1):
        check_run(job(mode), ParallelPlan.mesh(pp=2, layers=3), "1f1b")
    with pytest.raises(ModelError, match="takes another path"):
        preflight(job(2))


class ScalesBy(torch.autograd.Function):
    """Multiplies by what an attribute of a function holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.table = function.table
        return x * ctx.table

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.table, None


def holder_of(table: Tensor) -> Callable[[], None]:
    """A function with a tensor in its attribute."""

    def holder() -> None:
        pass

    holder.table = table
    return holder


class GivesFunctionToAutograd(Blocks):
    """Calls a custom autograd function between units."""

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return ScalesBy.apply(y, holder_of(x * 2))


class GivesFunctionWithFieldToAutograd(Blocks):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        return ScalesBy.apply(y, holder_of(x))


class GivesWrappedFunctionToAutograd(Blocks):
    def between(self, y: Tensor, x: Tensor) -> Tensor:
        @functools.wraps(holder_of(x))
        def outer() -> None:
            pass

        return ScalesBy.apply(y, outer)


class MapsFunction(Blocks):
    """The function that `torch.vmap` is given calls one with a tensor in its attribute."""

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        holder = holder_of(x.sum(0) * 2)
        return torch.vmap(lambda row: row * holder.table)(y)


class GivesWrapperToAutograd(Blocks):
    """A wrapper holds what it wraps as `__wrapped__` only."""

    def between(self, y: Tensor, x: Tensor) -> Tensor:
        def outer() -> None:
            pass

        outer.__wrapped__ = self.blocks[0].forward
        outer.table = 2.0
        return ScalesBy.apply(y, outer)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(1) - target).square().mean()


@pytest.mark.parametrize("make", [GivesFunctionToAutograd, GivesFunctionWithFieldToAutograd, GivesWrappedFunctionToAutograd])
def test_a_tensor_in_an_attribute_of_a_function_is_not_taken_from_the_record(make: Callable[[], nn.Module]):
    """Later batches were computed with the first batch's."""
    with pytest.raises(ModelError, match=r"function is passed between units at .* it may hide tensors"):
        capture(make(), X)


@pytest.mark.parametrize("make", [MapsFunction, GivesWrapperToAutograd])
def test_functions_whose_attributes_can_be_given_anew_or_hold_no_tensor_are_recorded(make: Callable[[], nn.Module]):
    check_run(
        numbers_job(model=ModelConfig(function=make), loss=LossConfig(function=squares)),
        ParallelPlan.mesh(pp=3, layers=3),
        "1f1b",
    )
