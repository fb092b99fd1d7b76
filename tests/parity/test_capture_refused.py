"""What cannot be captured is refused before anything starts: by name, with the file and line of the user's code, and a cure."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured_stages import capture, make_stages, run_stages
from helpers.model_zoo import ZOO, ids, import_transformers, sum_of_squares, tokens
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.model.layer_skeletons import refuse_unsupported_modules


def blocks(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(count))


class Base(nn.Module):
    """Three linear layers, with what a test puts between them."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.blocks = blocks()
        vars(self).update(given)

    def forward(self, x: Tensor) -> Any:
        for index, block in enumerate(self.blocks):
            x = self.between(block(x), index)
        return x

    def between(self, x: Tensor, index: int) -> Tensor:
        raise NotImplementedError


class DecidesByActivation(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        return x * 2 if x.abs().max() > 1e6 else x  # decides


class ReadsItem(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        return x * x.mean().item()  # decides


class DecidesByParameter(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        return x if self.blocks[0].bias.sum() > 0 else -x  # decides


class DecidesAtRandom(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        return x if torch.rand([]) < 0.5 else -x  # decides


class PythonRandom(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        return x if random.random() < 0.5 else -x


class BooleanIndex(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        return x[x[:, 0] > 0]  # decides


class ViewInAnotherLayer(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        half = y[:, :2]
        z = self.blocks[1](y)
        half.mul_(0)  # writes
        return self.blocks[2](z + y)


class Box:
    """An object of the user's own."""

    def __init__(self, value: Any) -> None:
        self.value = value


class TakesBox(nn.Linear):
    def forward(self, box: Any) -> Any:
        return super().forward(box.value)


class PassesObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TakesBox(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(Box(x))  # passes
        return x


class HookOnTensor(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        x.register_hook(lambda gradient: gradient * 2)  # hooks
        return x


class SetsData(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        y = x.clone()
        y.data = x.detach()  # sets
        return y


class WritesParameter(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            self.blocks[0].bias.mul_(0.5)  # writes
        return x


class Backward(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        return x + torch.utils.checkpoint.checkpoint(lambda y: self.blocks[0](y), x, use_reentrant=True)  # checkpoints


class Vmapped(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        return torch.vmap(lambda row: row * 2)(x)  # maps


X = {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}
HERE = Path(__file__)


@pytest.mark.parametrize(
    "make, mark, what, cure",
    [
        (DecidesByActivation, "# decides", "decides by the values of an activation", "decide inside of a module"),
        (ReadsItem, "# decides", "item() of a tensor", "decide inside of a module"),
        (DecidesByParameter, "# decides", "decides by the values of an activation", "make that a unit"),
        (DecidesAtRandom, "# decides", "or a random number", "layerdrop"),
        (PythonRandom, "", "draws from Python's random", "layerdrop"),
        (BooleanIndex, "# decides", "a shape, or what Python does next, depends on the values", "torch.where"),
        (ViewInAnotherLayer, "# writes", "writes into memory that a view [3, 4] from another layer", "returns a new tensor"),
        (PassesObject, "# passes", "a Box is passed between units", "pass tensors"),
        (HookOnTensor, "# hooks", "a hook on a tensor between units", "make that a unit"),
        (SetsData, "# sets", "an assignment to an attribute of a tensor", "make that a unit"),
        (WritesParameter, "# writes", "writes into parameter blocks.0.bias", "returns a new tensor"),
        (Backward, "# checkpoints", "a function is passed between units", "use_reentrant=False"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_its_place(make: Any, mark: str, what: str, cure: str):
    with pytest.raises(ModelError) as found:
        capture(make(), X)
    assert what in found.value.what and cure in found.value.cure
    if mark:
        lines = HERE.read_text().splitlines()
        first = (
            lines.index(f"class {make.__name__}(Base):")
            if make is not PassesObject
            else lines.index("class PassesObject(nn.Module):")
        )
        line = next(number for number in range(first, len(lines)) if lines[number].endswith(mark)) + 1
        assert f"{HERE}:{line}" in found.value.what


def test_a_map_over_a_batch_is_captured_or_refused_and_never_another_thing():
    try:
        captured = capture(Vmapped(), X)
    except ModelError as error:
        assert str(HERE) in error.what
    else:
        model = Vmapped()
        stages = make_stages(captured, model, [1])
        loss, _, _ = run_stages(captured, stages, X, sum_of_squares, seeded=False)
        assert torch.equal(loss, sum_of_squares(model(**X)))


def test_a_cache_between_units_is_refused_with_its_switch():
    transformers = import_transformers()
    model = ZOO["llama"].make(0.0)
    model.config.use_cache = True
    with pytest.raises(ModelError, match="DynamicCache is passed between units") as found:
        capture(model, tokens(2, 12))
    assert (
        found.value.cure == "set use_cache=False in the model's config" and str(transformers.__file__)[:-11] in found.value.what
    )


def test_layerdrop_is_refused_with_its_switch():
    model = ZOO["bart"].make(0.0)
    for part in (model.model.encoder, model.model.decoder):
        part.layerdrop = 0.5
    with pytest.raises(ModelError, match="random number") as found:
        capture(model, tokens(2, 12) | {"decoder_input_ids": ids(2, 7)})
    assert "(layerdrop) must be set to 0" in found.value.cure


class LengthDecides(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        return x if index or len(x) < 5 else torch.cat([x, x])[: len(x)] + self.blocks[1](x)


def test_a_batch_that_takes_the_forward_another_way_is_one_error():
    model = LengthDecides()
    captured = capture(model, X)
    stages = make_stages(captured, model, [1])
    with pytest.raises(ModelError, match="takes another path than with the first batch in training: the units are called in"):
        run_stages(captured, stages, {"x": torch.randn(6, 4)}, sum_of_squares, seeded=False)


class Shrinks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y[y[:, 0] > 0]


class Shrinking(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shrinks(4, 4) for _ in range(2))

    def between(self, x: Tensor, index: int) -> Tensor:
        return x


def test_a_module_whose_shapes_depend_on_values_is_refused():
    with pytest.raises(ModelError, match=r"the shape of what blocks\.0 \(Shrinks\) returns, or a number in it, depends"):
        capture(Shrinking(), X)


def test_a_pattern_of_units_that_matches_nothing_is_refused():
    with pytest.raises(ModelError, match=r"the pattern 'block\.\*' of model\.units matches no module \(nearest: .*blocks"):
        capture(ReadsItem(), X, units=["block.*"])


def test_a_backward_hook_of_a_module_that_is_divided_is_refused():
    model = Base()
    model.register_full_backward_hook(lambda module, *gradients: None)
    with pytest.raises(ModelError, match=r"the model .Base. has a backward hook"):
        capture(model, X)


class Counts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, x: Tensor, index: int) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_a_forward_that_counts_its_calls_is_refused():
    with pytest.raises(ModelError, match="the forward of Counts changes its attribute 'calls' from 0 to 3"):
        capture(Counts(), X)


# -- what a forward leaves behind --------------------------------------------------------------------------------------------


class LeavesTensor(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        former = getattr(self, "former", None)
        self.former = x.detach()
        return x if former is None else x + former

    def between(self, x: Tensor, index: int) -> Tensor:
        return x.tanh()


class CountsInDict(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {"calls": 0}

    def between(self, x: Tensor, index: int) -> Tensor:
        self.seen["calls"] += 1
        return x * self.seen["calls"]


SEEN = []


class CountsInGlobal(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        SEEN.append(index)
        return x * len(SEEN)


class WithBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))


class ReplacesBuffer(WithBuffer):
    def between(self, x: Tensor, index: int) -> Tensor:
        self.average = 0.9 * self.average + x.detach().mean(0)
        return x


class DecidesByWrittenBuffer(WithBuffer):
    def between(self, x: Tensor, index: int) -> Tensor:
        self.average.add_(1)
        return x * 2 if self.average[0] > 5 else x


class WithNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


class NormOfSeveralLayers(WithNorm):
    def between(self, x: Tensor, index: int) -> Tensor:
        return self.norm(x)


class ReadsAverages(WithNorm):
    def between(self, x: Tensor, index: int) -> Tensor:
        return self.norm(x) + self.norm.running_mean if index == 2 else x


class DecidesByCount(WithNorm):
    def between(self, x: Tensor, index: int) -> Tensor:
        return self.norm(x) * (2 if self.norm.num_batches_tracked > 5 else 1) if index == 2 else x


class Seeds(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        torch.manual_seed(3)
        return x + torch.randn(4)


class ViewBeforeWrite(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        half = x[:, :2]
        x.relu_()
        return self.blocks[2]((self.blocks[1](x) + nn.functional.pad(half, (0, 2))) * x)


class WritesData(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        self.blocks[0].weight.data.mul_(0.9)
        return x


class WritesOwnWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


class UnitWritesData(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = WritesOwnWeight(4, 4)

    def between(self, x: Tensor, index: int) -> Tensor:
        return x


class TiesLate(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        self.blocks[1].weight = self.blocks[0].weight
        return x


class Pickles(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        return copy.copy(x)


class Formats(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        assert f"{x.mean():.3f}"
        return x


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 4)
        self.rnns = nn.ModuleList(nn.LSTM(4, 4, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + self.first(x[..., None]).argmax(1)[:, 0].sort(descending=True)[0]
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x[..., None]), lengths, batch_first=True)
        for rnn in self.rnns:
            packed, _ = rnn(packed)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]


@pytest.mark.parametrize(
    "make, what, cure",
    [
        (LeavesTensor, "does not do the same when it is called again", "buffer"),
        (CountsInDict, "changes its attribute 'seen'", "buffer"),
        (CountsInGlobal, "does not do the same when it is called again", "buffer"),
        (ReplacesBuffer, "assigns a new tensor to its buffer 'average'", "copy_"),
        (DecidesByWrittenBuffer, "decides by the values of its buffer 'average'", "torch.where"),
        (NormOfSeveralLayers, "several layers call it: norm, norm#2, norm#3", "a norm for each call"),
        (ReadsAverages, "between units reads norm.running_mean", "track_running_stats=False"),
        (DecidesByCount, "decides by the values of its buffer 'norm.num_batches_tracked'", "torch.where"),
        (Seeds, "seeds PyTorch's generator between units", "raypar seeds every layer"),
        (ViewBeforeWrite, "of which a view [3, 2] was taken before", "take the view after the write"),
        (WritesData, "writes into parameter blocks.0.weight", "the optimizer"),
        (UnitWritesData, "writes into parameter blocks.1.weight", "the optimizer"),
        (TiesLate, "replaces parameter 'weight' of blocks.1", "in the model function"),
        (Pickles, "pickling or copy.copy() of a tensor", "inside a module"),
        (Formats, "__format__() of a tensor", "decide inside of a module"),
        (Packs, "tolist() of a tensor [3]", "inside of a module"),
    ],
)
def test_what_a_record_would_not_repeat_is_refused(make: Any, what: str, cure: str):
    with pytest.raises(ModelError) as found:
        capture(make(), X)
    assert what in found.value.what and cure in found.value.cure


class CachesMask(Base):
    def between(self, x: Tensor, index: int) -> Tensor:
        if not hasattr(self, "mask"):
            self.mask = torch.arange(4.0)
        return x * self.mask


def test_a_table_that_a_forward_keeps_for_the_next_one_is_captured():
    model = CachesMask()
    stages = make_stages(captured := capture(model, X), model, [1])
    assert torch.equal(run_stages(captured, stages, X, sum_of_squares, seeded=False)[0], sum_of_squares(model(**X)))


@pytest.mark.parametrize("inside", [False, True])
def test_a_scripted_module_is_refused(inside: bool):
    model = CachesMask()
    if inside:
        model.blocks[1] = torch.jit.script(model.blocks[1])
    made = model if inside else torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(ModelError, match=r"is a RecursiveScriptModule of torch\.jit"):
        refuse_unsupported_modules("", made)
