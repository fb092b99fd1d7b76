"""Networks of convolutions that `convolution_shards.py` and `convolution_pipeline.py` train, and layers that the first cuts.

`python convolution_layers.py FIRST [--mended]` under torchrun tries the cases from number FIRST on by DTensor, and prints a
line for each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

SIZE, BATCH, MICROBATCHES, SEED, LR = 96, 8, 2, 1, 0.01
STYLES = {"convolutions.*": "spatial:width"}
"""How raypar cuts the network: as DTensor does."""


class Layers(nn.Module):
    """x [mb, 3, SIZE, SIZE] -> [mb, 32]: convolutions of the kinds that DTensor cuts by width, each with ReLU, then means."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(3, 32, 5, padding=2),
                nn.Conv2d(32, 32, 3, padding=1),
                nn.Conv2d(32, 64, 2, stride=2),
                nn.Conv2d(64, 64, 3, padding=1),
                nn.Conv2d(64, 64, 1),
                nn.Conv2d(64, 32, 3, padding=1),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Means over the images."""
        for convolution in self.convolutions:
            x = F.relu(convolution(x))
        return x.mean((2, 3))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the microbatch."""
    found: Tensor = (output - target).square().mean()
    return found


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A few images of random numbers, again and again."""

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(SEED)
        self.images = torch.randn(BATCH, 3, SIZE, SIZE, generator=chance)
        self.targets = torch.randn(BATCH, 32, generator=chance)

    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.targets[index]


def mend_dtensor() -> None:
    """Make DTensor cut convolutions by width, as its code means to.

    PyTorch 2.13 has put strategies before its rule for them, by which the output is whole though it is not
    (https://github.com/pytorch/pytorch/issues/191926): they are removed. And what adds up the input's gradient where parts meet
    changes it in place, but returns nothing: it returns what it has changed.
    """
    from torch.distributed.tensor import DTensor, _tp_conv

    strategies = getattr(DTensor._op_dispatcher.sharding_propagator, "op_single_dim_strategy_funcs", {})
    for operation in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
        strategies.pop(operation, None)
    add = _tp_conv._ring_send_recv_aggregate

    def add_and_return(gradient: Tensor, d1: int, d2: int, left: int, right: int, rank: int, size: int) -> Tensor:
        found: Tensor | None = add(gradient, d1, d2, left, right, rank, size)
        first, last = 0 if rank == 0 else d1, 0 if rank == size - 1 else d2
        return gradient[..., first : gradient.shape[-1] - last] if found is None else found

    _tp_conv._ring_send_recv_aggregate = add_and_return


class Plain:
    """A step of the network in one process."""

    hello: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model: nn.Module = Layers()
        data = Samples()
        self.batches = list(zip(data.images.chunk(MICROBATCHES), data.targets.chunk(MICROBATCHES), strict=True))
        self.optimizer = torch.optim.SGD(self.model.parameters(), LR)

    def steps(self, first: int, count: int) -> float:
        """Training steps; the last loss."""
        return [self.step() for _ in range(count)][-1]

    def step(self) -> float:
        """One of them."""
        total = 0.0
        for x, y in self.batches:
            value = loss(self.model(x), y) / MICROBATCHES
            value.backward()
            total += self.number_of(value.detach())
        self.complete_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def number_of(self, value: Tensor) -> float:
        """A loss as a number."""
        return value.item()

    def complete_gradients(self) -> None:
        """Once a step."""

    def info(self) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def close(self) -> None:
        """Nothing to release."""


class DTensors(Plain):
    """The same step with images that are cut by width, by DTensor over gloo; weights are whole on every process."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

        dist.init_process_group("gloo")
        mend_dtensor()
        super().__init__()
        self.mesh, self.whole = init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()]
        self.model = distribute_module(self.model, self.mesh)
        self.batches = [
            (distribute_tensor(x, self.mesh, [Shard(3)]), distribute_tensor(y, self.mesh, self.whole)) for x, y in self.batches
        ]
        self.optimizer = torch.optim.SGD(self.model.parameters(), LR)

    def number_of(self, value: Any) -> float:
        """It is a sum over the processes."""
        return float(value.full_tensor())

    def complete_gradients(self) -> None:
        """They are sums over the processes, which are added once a step, as in raypar."""
        for parameter in self.model.parameters():
            gradient: Any = parameter.grad
            parameter.grad = gradient.redistribute(self.mesh, self.whole)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class Residual(nn.Module):
    """Two convolutions with batch norms around a skip (He et al. 2016, arXiv:1512.03385)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class ResidualNetwork(nn.Module):
    """x [mb, 3, SIZE, SIZE] -> [mb, 32]: a stem, and blocks of one width, so that all stages have as much to do."""

    def __init__(self, blocks: int = 8, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(Residual(width) for _ in range(blocks))
        self.head = nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the image, of which the last layer makes 32 numbers."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


# -- what each can cut -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layer and how it is asked to be cut over two processes."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (2, 4, 8, 12)
    """Of the input."""
    by: int = -1
    """The dim of the input that is cut."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """Module -> the dim of its weight (and bias) that DTensor is to cut."""
    style: str | Mapping[str, str] = "spatial:width"
    """What raypar calls it; by module where they differ."""


def conv(*args: Any, **more: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(4, 8, *args, **more)


def up(*args: Any, **more: Any) -> Callable[[], nn.Module]:
    return lambda: nn.ConvTranspose2d(4, 8, *args, **more)


def behind(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The layers behind a convolution that both cut."""
    return lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), *(make() for make in layers))


CASES = [
    Case("3 x 3, padding 1", conv(3, padding=1)),
    Case("5 x 5, padding 2", conv(5, padding=2)),
    Case("2 x 2, stride 2, no padding", conv(2, stride=2)),
    Case("1 x 1", conv(1)),
    Case("1 x 3, padding 0 x 1", conv((1, 3), padding=(0, 1))),
    Case("3 x 1, padding 1 x 0", conv((3, 1), padding=(1, 0))),
    Case("3 x 3, no padding", conv(3)),
    Case("3 x 3, padding 2", conv(3, padding=2)),
    Case("3 x 3, stride 2, padding 1", conv(3, stride=2, padding=1)),
    Case("1 x 1, stride 2", conv(1, stride=2)),
    Case("3 x 3, dilation 2, padding 2", conv(3, dilation=2, padding=2)),
    Case("4 x 4, padding same", conv(4, padding="same")),
    Case("3 x 3, padding 1, circular", conv(3, padding=1, padding_mode="circular")),
    Case("3 x 3, padding 1, reflect", conv(3, padding=1, padding_mode="reflect")),
    Case("3 x 3, padding 1, odd width", conv(3, padding=1), (2, 4, 8, 11)),
    Case("3 x 3, padding 1, groups 4", conv(3, padding=1, groups=4)),
    Case("3 x 3, padding 1, no batch dim", conv(3, padding=1), (4, 8, 12)),
    Case("3 x 3, padding 1, channels_last", lambda: nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)),
    Case("3 x 3, padding 1, by height", conv(3, padding=1), by=2, style="spatial"),
    Case("1 dim, 3, padding 1", lambda: nn.Conv1d(4, 8, 3, padding=1), (2, 4, 12), style="spatial"),
    Case("3 dims, 3 x 3 x 3, padding 1", lambda: nn.Conv3d(4, 8, 3, padding=1), (2, 4, 4, 6, 8)),
    Case("transposed 2 x 2, stride 2", up(2, stride=2)),
    Case("transposed 3 x 3, stride 2, padding 1", up(3, stride=2, padding=1, output_padding=1)),
    Case("by output channels", conv(3, padding=1), weights={"": 0}, style="gathered"),
    Case("by input channels", conv(3, padding=1), weights={"": 1}, by=1, style="row"),
    Case(
        "by groups, then by input channels",
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.Conv2d(8, 4, 1)),
        by=1,
        weights={"0": 0, "1": 1},
        style={"0": "groups", "1": "row:4"},
    ),
    Case("max pooling 2 x 2", behind(lambda: nn.MaxPool2d(2))),
    Case("max pooling 3 x 3, stride 2, padding 1", behind(lambda: nn.MaxPool2d(3, 2, 1))),
    Case("mean pooling 2 x 2", behind(lambda: nn.AvgPool2d(2))),
    Case("mean pooling to 1 x 1", behind(lambda: nn.AdaptiveAvgPool2d(1))),
    Case("mean over the image", behind(lambda: MeanOfImage())),
    Case("batch norm, in training", behind(lambda: nn.BatchNorm2d(4))),
    Case("group norm", behind(lambda: nn.GroupNorm(2, 4))),
    Case("instance norm", behind(lambda: nn.InstanceNorm2d(4, affine=True))),
    Case("upsampling, nearest", behind(lambda: nn.Upsample(scale_factor=2))),
    Case("upsampling, bilinear", behind(lambda: nn.Upsample(scale_factor=2, mode="bilinear"))),
    Case("residual: x + 3 x 3 of x", lambda: AroundASkip()),
]


class MeanOfImage(nn.Module):
    """[mb, channels, h, w] -> [mb, channels]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


class AroundASkip(nn.Module):
    """A convolution around a skip, with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv(x))


def by_dtensor(case: Case) -> str:
    """`right`, `wrong: ...`, or the first line of the error."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    torch.manual_seed(SEED)
    plain, x = case.make().double(), torch.randn(case.shape, dtype=torch.float64, requires_grad=True)
    want = plain(x)
    want.sin().sum().backward()
    torch.manual_seed(SEED)
    cut = case.make().double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module._parameters.items()):
            dim = case.weights.get(name)
            if parameter is not None and dim is not None and parameter.dim() > dim:
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(dim)])))

    try:
        cut = distribute_module(cut, mesh, place)
        cuts_input = not case.weights or case.by > 0
        given = distribute_tensor(x.detach(), mesh, [Shard(case.by % x.dim()) if cuts_input else Replicate()])
        given.requires_grad_()
        made = cut(given)
        made.sin().sum().backward()
        found: dict[str, tuple[Any, Any]] = {"output": (made, want), "gradient of the input": (given.grad, x.grad)}
        found |= {
            f"gradient of {name}": (q.grad, p.grad)
            for (name, p), q in zip(plain.named_parameters(), cut.parameters(), strict=True)
        }
        for name, (got, whole) in found.items():
            if got is None:
                return f"wrong: no {name}"
            local = got.full_tensor()
            if local.shape != whole.shape:
                return f"wrong: {name} is {list(local.shape)}, not {list(whole.shape)}"
            if not torch.allclose(local, whole, rtol=1e-9, atol=1e-12):
                return f"wrong: {name} is off by {(local - whole).abs().max().item():.2g}"
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    cut_still = any(placement.is_shard() for placement in made.placements)
    return "right" if cut_still or want.dim() < 3 else "right, made whole"


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if "--mended" in sys.argv:
        mend_dtensor()
    for number in range(int(sys.argv[1]), len(CASES)):
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, by_dtensor(CASES[number]))
        if dist.get_rank() == 0:
            worst = next((answer for answer in answers if not answer.startswith("right")), answers[0])
            print(json.dumps({"case": number, "answer": worst}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # what a failed case has left in gloo's threads would end the process otherwise


if __name__ == "__main__":
    main()
