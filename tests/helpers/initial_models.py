"""Ways in which people give parameters and buffers their first values, each a model of four layers [.., 6] -> [.., 6]."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from raypar.model.graph import Graph, Layer

WIDTH = 6


class Block(nn.Module):
    """x + down(tanh(up(norm(x)))), with room for what a way adds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def blocks(number: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(number)))


def each_linear(model: nn.Module, change: Callable[[Tensor], Any]) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            change(module.weight)
    return model


def constructors() -> nn.Module:
    return blocks()


def zeroed_head() -> nn.Module:
    model = blocks()
    nn.init.zeros_(model[3].down.weight)
    nn.init.zeros_(model[3].down.bias)
    return model


def orthogonal() -> nn.Module:
    return each_linear(blocks(), nn.init.orthogonal_)


def truncated_normal() -> nn.Module:
    return each_linear(blocks(), lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.04, b=0.04))


def kaiming() -> nn.Module:
    return each_linear(blocks(), lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu"))


def xavier() -> nn.Module:
    return each_linear(blocks(), lambda w: nn.init.xavier_uniform_(w, gain=1.3))


def sparse() -> nn.Module:
    return each_linear(blocks(), lambda w: nn.init.sparse_(w, 0.3))


def identity() -> nn.Module:
    return each_linear(blocks(), nn.init.eye_)


def last_layer_first() -> nn.Module:
    model = blocks()
    with torch.no_grad():
        for block in reversed(model):
            block.down.weight.uniform_(-0.1, 0.1)
            block.up.weight.normal_(0, 0.2)
    return model


def init_weights() -> nn.Module:
    def visit(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(0.9)

    return blocks().apply(visit)


def gpt2_residual() -> nn.Module:
    model = init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith("down.weight"):
            parameter.data.normal_(mean=0.0, std=0.02 / math.sqrt(2 * len(model)))
    return model


def numpy_copies() -> nn.Module:
    model = blocks()
    with torch.no_grad():
        for block in model:
            block.up.weight.copy_(torch.from_numpy(numpy.random.standard_normal((8, WIDTH)) / 4))
            block.up.bias[:3] = torch.as_tensor(numpy.linspace(0, 0.1, 3), dtype=torch.float32)
    return model


def numpy_views() -> nn.Module:
    model = blocks()
    model[1].down.weight.data.numpy()[2] = 0.25
    model[2].up.bias.data = torch.from_numpy(numpy.random.rand(8).astype("float32"))
    return model


def pythons_random() -> nn.Module:
    model = blocks()
    with torch.no_grad():
        for block in model:
            block.norm.bias += torch.tensor([random.gauss(0, 0.1) for _ in range(WIDTH)])
    return model


def loaded_state() -> nn.Module:
    model, generator = blocks(), torch.Generator().manual_seed(99)
    model.load_state_dict({name: torch.randn(v.shape, generator=generator) / 3 for name, v in model.state_dict().items()})
    return model


def assigned_state() -> nn.Module:
    model = blocks()
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
    return model


def tied_after_init() -> nn.Module:
    model = init_weights()
    model[3].up.weight = model[0].up.weight
    model[2].norm.weight = model[1].norm.weight
    return model


def tied_then_changed() -> nn.Module:
    model = blocks()
    model[3].down.weight = model[1].down.weight
    nn.init.normal_(model[3].down.weight, std=0.3)
    return model


def weight_norm() -> nn.Module:
    model = blocks()
    for block in model:
        nn.utils.parametrizations.weight_norm(block.up)
    return model


def orthogonal_parametrization() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for layer in model[:2]:
        nn.utils.parametrizations.orthogonal(layer)
    return model


def old_weight_norm() -> nn.Module:
    model = blocks()
    nn.utils.weight_norm(model[1].up)
    return model


class Buffered(Block):
    """Its buffers decide its result."""

    def __init__(self, mask: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.register_buffer("shift", shift, persistent=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.mask + self.shift) * self.count


def random_buffers() -> nn.Module:
    return nn.Sequential(*(Buffered((torch.rand(WIDTH) > 0.3).float(), 0.1 * torch.randn(WIDTH)) for _ in range(4)))


def computed_buffers() -> nn.Module:
    table = 1.0 / 100 ** (torch.arange(0, WIDTH) / WIDTH)
    return nn.Sequential(*(Buffered(table.sin() * (i + 1), table.cos()) for i in range(4)))


class Rotary(Block):
    """Rotates pairs of features, as Llama's `freqs_cis` does."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(WIDTH // 2) * torch.rand(())
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("phase", torch.view_as_complex(torch.rand(WIDTH // 2, 2)))
        self.register_buffer("ids", torch.arange(WIDTH).to(torch.uint16))
        self.factor = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        turned = pairs * self.freqs_cis * torch.view_as_real(self.phase).sum() * self.factor
        return super().forward(torch.view_as_real(turned).flatten(-2).to(x.dtype)[..., self.ids.long()])


def complex_buffers() -> nn.Module:
    return nn.Sequential(*(Rotary() for _ in range(4)))


def shared_buffer() -> nn.Module:
    table = torch.randn(WIDTH)
    return nn.Sequential(*(Buffered(table, table) for _ in range(4)))


def decided_by_values() -> nn.Module:
    model = blocks()
    for rate, block in zip(torch.linspace(0.1, 0.9, 4), model, strict=True):
        if block.up.weight.abs().max().item() > 0.2:
            nn.init.constant_(block.norm.weight, rate.item())
        block.down.weight.data /= block.down.weight.data.norm()
    return model


def copied_layers() -> nn.Module:
    first = Block()
    return nn.Sequential(*(copy.deepcopy(first) for _ in range(4)))


def from_float64() -> nn.Module:
    model = blocks()
    with torch.no_grad():
        for block in model:
            block.up.weight.copy_(torch.randn(8, WIDTH, dtype=torch.float64) / 7)
    return model


def in_bfloat16() -> nn.Module:
    return blocks().bfloat16()


def scaled_rows() -> nn.Module:
    model = blocks()
    with torch.no_grad():
        model[0].up.weight[torch.randperm(8)[:3]] = 0.5
        model[1].up.weight[:, ::2] *= -1
        model[2].up.weight.index_fill_(0, torch.tensor([1, 2]), 0.1)
        model[3].up.weight.data = (model[0].up.weight @ torch.eye(WIDTH)).roll(1, 0)
    return model


class Embedded(nn.Module):
    """An embedding with padding and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, padding_idx=4)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-5))
        self.register_parameter("bias", nn.Parameter(torch.randn(WIDTH).abs()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.abs().sum(-1).long() % 9) * self.scale + self.bias


def without_reset_parameters() -> nn.Module:
    return nn.Sequential(Embedded(), Block(), Embedded(), Block())


def frozen() -> nn.Module:
    model = blocks()
    model[0].requires_grad_(False)
    model[2].up.weight.requires_grad_(False)
    return model


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(WIDTH), Block(), nn.LazyLinear(WIDTH), Block())
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    return model


def pairs() -> list[tuple[str, nn.Module]]:
    return [(f"part{i}", block) for i, block in enumerate(init_weights())]


def graph() -> Graph:
    """Builds of a hand-written graph, after draws of the model function's own."""
    shift = 0.1 * torch.randn(WIDTH)

    def build(number: int) -> nn.Module:
        block = Buffered(torch.rand(WIDTH), shift * number)
        nn.init.normal_(block.up.weight, std=0.1 + random.random())
        return block

    values = ["x", "a", "b", "c", "out"]
    layers = [Layer(f"l{i}", lambda i=i: build(i), (values[i],), (values[i + 1],)) for i in range(4)]
    return Graph(tuple(layers), "out", ties=(("l0.down.weight", "l3.down.weight"),))


WAYS = (
    constructors, zeroed_head, orthogonal, truncated_normal, kaiming, xavier, sparse, identity, last_layer_first, init_weights,
    gpt2_residual, numpy_copies, numpy_views, pythons_random, loaded_state, assigned_state, tied_after_init, tied_then_changed,
    weight_norm, orthogonal_parametrization, old_weight_norm, random_buffers, computed_buffers, shared_buffer, complex_buffers,
    decided_by_values, copied_layers, from_float64, in_bfloat16, scaled_rows, without_reset_parameters, frozen, lazy, pairs,
    graph,
)  # fmt: skip


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, 5, WIDTH, generator=generator)) for _ in range(16)]  # type: ignore[misc]


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()
