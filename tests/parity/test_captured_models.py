"""An unmodified module, captured and run in stages apart, gives what the plain module gives under plain autograd."""

import copy
from typing import Any

import pytest
import torch
from helpers.captured_stages import capture, differences, evaluate_stages, make_stages, run_plain, run_stages
from helpers.model_zoo import ZOO, ZooModel, cross_entropy, images, noise, sum_of_squares, tokens
from helpers.random_modules import WIDTH, RandomModule
from torch import Tensor, nn
from torch.nn import functional as F

from raypar.model.capture import replay, trace_cache
from raypar.model.capture.trace_data import Event

pytestmark = pytest.mark.part(5)

FEW = ("gpt2", "llama", "t5", "bert", "unet", "lstm", "mixtral")
"""Models of the default suite."""
CUT_EVERYWHERE = ("llama", "t5", "unet", "lstm")
"""Those of them that it cuts before every unit too."""


def check(model: ZooModel, p: float, *, every_unit: bool) -> None:
    """Compare both batches with the plain module: in three stages, or cut before every unit."""
    torch.manual_seed(0)
    plain = model.make(p).train()
    captured = capture(plain, model.batch())
    count = len(captured.layers)
    cuts = list(range(1, count)) if every_unit else sorted({count * s // 3 for s in (1, 2)} - {0})
    stages = make_stages(captured, plain, cuts)
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    for batch in (model.batch(), model.other_batch()):
        for name, buffer in (*plain.named_buffers(), *(pair for stage in stages for pair in stage.buffers.items())):
            buffer.data.copy_(before[name])
        found = run_stages(captured, stages, batch, model.loss, seeded=p > 0)
        wanted = run_plain(captured, plain, batch, model.loss, seeded=p > 0)
        assert differences(found, wanted) == []
        after = {name: buffer for stage in stages for name, buffer in stage.buffers.items()}
        assert [n for n, b in plain.named_buffers() if not torch.equal(after[n], b)] == []


@pytest.mark.ci
@pytest.mark.parametrize("name", [pytest.param(one, marks=[] if one in CUT_EVERYWHERE else pytest.mark.full) for one in FEW])
def test_a_module_cut_before_every_unit_is_the_plain_module(name: str):
    check(ZOO[name], 0.1, every_unit=True)


@pytest.mark.full
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("every_unit", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_every_model_in_stages_is_the_plain_module(name: str, every_unit: bool, p: float):
    model = ZOO[name]
    if p and not model.has_dropout:
        return  # the same as another case
    check(model, p, every_unit=every_unit)


# -- what people write between modules ---------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """An operation of the user's own, with a gradient that no other has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


class Glue(nn.Module):
    """Between its modules: parameters and buffers, writes in place, no_grad, an operation of its own, dropout, autocast."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale, self.token = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(1, 8))
        self.register_buffer("places", torch.arange(8.0))
        self.table, self.p = torch.arange(8.0), p

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = torch.cat([self.token.expand(1, 8), x])
        first = x
        for i, layer in enumerate(self.layers):
            x = layer(x) * self.scale + self.places + self.table.to(x.dtype)
            x[0] = 0
            x += first.tanh()
            x = Doubled.apply(x)
            with torch.no_grad():
                mean = x.mean()
            x = F.dropout(x - mean, self.p, self.training)
            if i == 1:
                x = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)
            with torch.autocast("cpu", torch.bfloat16):
                y = x @ x.mT
        return {"x": x, "y": y.float(), "rows": x.shape[0]}


class Structured(nn.Module):
    """A unit that takes keywords, a dict and None, and returns nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, others: dict[str, Tensor], bias: Tensor | None = None) -> dict[str, Any]:
        y = self.linear(x) + others["a"]
        return {"y": y if bias is None else y + bias, "pair": (y.tanh(), [y.sigmoid(), None]), "count": 3}


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Structured() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        kept = []
        for block in self.blocks:
            found = block(x, others={"a": x * 2}, bias=None if not kept else kept[-1])
            x = found["y"] * found["count"] + found["pair"][0]
            kept.append(found["pair"][1][0])
        return x, kept


class SharedModule(nn.Module):
    """One module that is called several times, and a parameter that glue and a module use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norms = nn.Linear(6, 6), nn.ModuleList(nn.LayerNorm(6) for _ in range(3))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(self.linear(x)) + F.linear(x, self.linear.weight)
        return x


class Collected(nn.Module):
    """Hooks take what inner modules return out of their units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        hooks = [block[1].register_forward_hook(lambda m, a, out: kept.append(out)) for block in self.blocks]
        for block in self.blocks:
            x = block(x)
        for hook in hooks:
            hook.remove()
        return x + sum(kept)


class WrittenByUnits(nn.Module):
    """Modules that write into what they are given, and views of what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            half = y[:, :2]
            half.mul_(2)
            total = half.sum()
            x = self.relu(y) + total
        return x


def of(make: Any, batch: Any, other: Any, loss: Any = sum_of_squares) -> ZooModel:
    return ZooModel(make, batch, other, loss)


def numbers(rows: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))}


WRITTEN = {
    "glue": of(Glue, lambda: numbers(3, 8), lambda: numbers(5, 8), lambda out: (out["x"] ** 2).mean() + out["y"].mean()),
    "containers": of(lambda p: Containers(), lambda: numbers(3, 4), lambda: numbers(2, 4)),
    "shared module": of(lambda p: SharedModule(), lambda: numbers(3, 6), lambda: numbers(2, 6)),
    "collected by hooks": of(lambda p: Collected(), lambda: numbers(3, 4), lambda: numbers(2, 4)),
    "written by units": of(lambda p: WrittenByUnits(), lambda: numbers(3, 4), lambda: numbers(2, 4)),
    "no modules": of(lambda p: nn.Bilinear(4, 4, 2), lambda: {f"input{i}": numbers(3, 4)["x"] for i in (1, 2)},
                     lambda: {f"input{i}": numbers(2, 4)["x"] for i in (1, 2)}),
}  # fmt: skip


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("name", WRITTEN)
def test_code_between_modules_does_what_it_does_in_the_plain_module(name: str, p: float):
    check(WRITTEN[name], p, every_unit=True)


class Masked(nn.Module):
    """Leaves the mask out where nothing is padded, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weight = None if bool(mask.all()) else mask.to(x.dtype)
        for block in self.blocks:
            x = block(x)
            if weight is not None:
                x = x * weight
        return x


def test_what_the_forward_reads_of_the_batch_is_a_guard_and_another_answer_another_trace():
    model = Masked()
    full, padded = torch.ones(3, 4), torch.tensor([[1.0, 1, 1, 0]] * 3)
    batches = [{"x": numbers(3, 4)["x"], "mask": mask} for mask in (full, padded, full, padded)]
    captured = capture(model, batches[0])
    stages = make_stages(captured, model, [1, 2])
    for batch in batches:
        found = run_stages(captured, stages, batch, sum_of_squares, seeded=False)
        assert differences(found, run_plain(captured, model, batch, sum_of_squares, seeded=False)) == []
    assert [len(kept) for kept in captured.cache._traces.values()] == [2]


class Placed(Masked):
    """Reads, beside the mask, a number that it has of a batch's shape alone, as libraries make position ids."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found = super().forward(x, mask)
        return found * 2 if bool((torch.arange(x.shape[0]) > 2).any()) else found


@pytest.mark.parametrize("model", [Masked, Placed])
def test_what_the_forward_reads_of_shapes_alone_is_asked_once_for_each_shape(model, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def run_event(event: Event, *given: Any) -> Any:
        asked.append(event.label)
        return replay.run_event(event, *given)

    monkeypatch.setattr(trace_cache, "run_event", run_event)
    plain, full = model(), torch.ones(3, 4)
    batches = [{"x": numbers(rows, 4)["x"], "mask": full[:rows].clone()} for rows in (3, 2, 3, 2)]
    captured = capture(plain, batches[0])
    stages = make_stages(captured, plain, [1, 2])
    for batch in batches:
        found = run_stages(captured, stages, batch, sum_of_squares, seeded=False)
        assert differences(found, run_plain(captured, plain, batch, sum_of_squares, seeded=False)) == []
    assert [len(kept) for kept in captured.cache._traces.values()] == [1, 1]
    assert asked == ["all", "__bool__"] * len(asked[::2])  # of the mask; where shapes repeat, nothing else


class Moved(nn.Module):
    """Reads places, and writes into them once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(8, 8), False

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        found = self.linear(x) + places
        return found if not self.writes else found + 0 * places.add_(1)


class WithPlaces(nn.Module):
    """Makes places of a batch's shape, as libraries make position ids."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Moved() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[-1])
        for block in self.blocks:
            x = block(x, places)
        return x


def test_what_glue_makes_of_shapes_alone_is_made_once_and_again_when_it_was_written(monkeypatch: pytest.MonkeyPatch):
    ran: list[str] = []
    own = replay.run_event

    def run_event(event: Event, *given: Any) -> Any:
        ran.append(event.label)
        return own(event, *given)

    monkeypatch.setattr(replay, "run_event", run_event)
    batch, model = numbers(3, 8), WithPlaces()
    layer = make_stages(capture(model, batch, ["blocks.0", "blocks.1"]), model, [1])[1].modules[0]

    def run() -> Tensor:
        ran.clear()
        return layer(batch["x"], batch["x"])

    first = run()
    assert ran == ["arange", "blocks.1"]
    assert torch.equal(run(), first) and ran == ["blocks.1"]
    with torch.device("cpu"):  # a mode, as those of tensors without memory
        assert torch.equal(run(), first) and ran == ["arange", "blocks.1"]
    with torch.autocast("cpu", torch.bfloat16):  # which may give what glue makes another dtype
        run()
        assert ran == ["arange", "blocks.1"]
    layer.get_submodule("blocks.1").writes = True
    assert torch.equal(run(), first) and ran == ["blocks.1"]
    assert torch.equal(run(), first) and ran == ["arange", "blocks.1"]


def test_in_evaluation_mode_layers_do_what_the_plain_module_does():
    """Their dropout is off."""
    for name in ("gpt2", "unet", "lstm"):
        model = ZOO[name].make(0.5)
        captured = capture(model, ZOO[name].batch())
        stages = make_stages(captured, model, [1, 3])
        for module in (model, *(module for stage in stages for module in stage.modules)):
            module.eval()
        batch = ZOO[name].batch()
        found = evaluate_stages(captured, stages, batch)
        with torch.no_grad():
            wanted = model(**batch)
        assert torch.equal(found[-1], wanted if isinstance(wanted, Tensor) else wanted.logits)


def test_layers_have_the_names_of_the_models_modules_and_tensors():
    model = SharedModule()
    captured = capture(model, numbers(3, 6))
    names = ["linear", "norms.0", "linear#2", "norms.1", "linear#3", "norms.2"]
    assert [layer.name for layer in captured.layers] == names
    assert captured.ties[0] == (
        "linear.weight", "linear.weight@norms.0", "linear.weight@linear#2", "linear.weight@norms.1", "linear.weight@linear#3",
        "linear.weight@norms.2",
    )  # fmt: skip
    held = [layer.qualify(path) for layer in captured.layers for path, _ in layer.build().named_parameters()]
    assert {name for name in held if "@" not in name} == set(dict(model.named_parameters()))
    assert captured.layers[0].inputs == ("x",) and captured.layers[1].inputs == ("linear.out0", "x")


@pytest.mark.ci
def test_modules_stay_live_with_their_classes_and_hooks():
    model = ZOO["llama"].make(0.0)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 2)
    captured = capture(model, tokens(2, 12))
    block = captured.layers[3].build().get_submodule("model.layers.1")
    assert type(block) is type(model.model.layers[1]) and len(block.mlp._forward_hooks) == 1
    found = run_stages(captured, make_stages(captured, model, [3]), tokens(2, 12), cross_entropy, seeded=False)
    assert differences(found, run_plain(captured, model, tokens(2, 12), cross_entropy, seeded=False)) == []


@pytest.mark.ci
def test_the_user_names_units():
    model = ZOO["vit"].make(0.0)
    captured = capture(model, {"pixel_values": images(2)}, units=["vit.layers.*.attention", "vit.layers.*.mlp"])
    found = [layer.name for layer in captured.layers]
    assert [f"vit.layers.{i}.{part}" in found for i in range(4) for part in ("attention", "mlp")] == [True] * 8
    check_units = run_stages(
        captured, make_stages(captured, model, [4, 9]), {"pixel_values": images(2)}, cross_entropy, seeded=False
    )
    wanted = run_plain(captured, model, {"pixel_values": images(2)}, cross_entropy, seeded=False)
    assert differences(check_units, wanted) == []


def test_capturing_leaves_the_model_and_the_generators_as_they_were():
    model = ZOO["unet"].make(0.5)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    capture(model, ZOO["unet"].batch())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Frozen(nn.Module):
    """Units that run without gradients, a batch field that is written, a batch field and numbers in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        labels[labels == 2] = -100
        with torch.no_grad():
            for block in self.blocks[:2]:
                x = block(x)
        hidden = [x]
        for block in self.blocks[2:]:
            hidden.append(block(hidden[-1]) + self.table)
        keep = (labels != -100).unsqueeze(1)
        table = torch.from_numpy((labels.numpy() * 2.0).astype("float32"))
        loss = (hidden[-1] * keep).mean() + table.mean()
        return {"loss": loss, "labels": labels, "hidden": tuple(hidden), "rows": len(x), "twice": (hidden[-1], hidden[-1])}


class RandomBeforeUnits(nn.Module):
    """Random numbers before the first module, which choose what later ones see."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        order = torch.rand(x.shape).argsort(1)
        for block in self.blocks:
            x = block(x)
        return torch.gather(x, 1, order) + torch.randn_like(x)


class CachesMask(nn.Module):
    """Keeps what it has computed for the first length it met."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None or self.mask.shape[0] != x.shape[0]:
            self.mask = torch.ones(x.shape[0], x.shape[0]).tril()
        for block in self.blocks:
            x = self.mask @ block(x)
        return x


def labelled(rows: int) -> dict[str, Tensor]:
    return numbers(rows, 4) | {"labels": torch.arange(rows)}


MORE = {
    "frozen units": of(lambda p: Frozen(), lambda: labelled(4), lambda: labelled(5), lambda out: out["loss"]),
    "random before units": of(lambda p: RandomBeforeUnits(), lambda: numbers(3, 4), lambda: numbers(2, 4)),
    "caches": of(lambda p: CachesMask(), lambda: numbers(3, 4), lambda: numbers(2, 4)),
}


@pytest.mark.parametrize("name", MORE)
def test_what_is_hard_to_record_is_the_plain_module_too(name: str):
    check(MORE[name], 0.1, every_unit=True)


def two_fields(rows: int) -> dict[str, Tensor]:
    return {"x": noise(rows, rows, WIDTH), "other": noise(rows + 9, rows, WIDTH)}


def check_random(seed: int) -> None:
    """One random module: cut before every unit, with dropout."""
    make = lambda p: RandomModule(seed, p)  # noqa: E731
    check(ZooModel(make, lambda: two_fields(3), lambda: two_fields(2), sum_of_squares), 0.3 * (seed % 2), every_unit=True)


@pytest.mark.ci
@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(10, 20))])
def test_random_modules_are_the_plain_module(seed: int):
    check_random(seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(20, 520, 25))
def test_many_random_modules_are_the_plain_module(first: int):
    for seed in range(first, first + 25):
        check_random(seed)


class FirstToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids[:, 0])  # of one sample: one element, with the stride of a row
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_one_element_with_the_stride_of_a_row_is_captured():
    assert len(capture(FirstToken(), {"ids": torch.arange(6).reshape(1, 6)}).layers) == 3
