"""Blocks whose modules form parallel branches, in the idioms of their papers, small; and blocks that look like them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Convolution(nn.Module):
    """A convolution with norm and activation."""

    def __init__(self, given: int, made: int, size: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(given, made, size, padding=size // 2, bias=False), nn.BatchNorm2d(made)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class InceptionE(nn.Module):
    """Inception-v3's last blocks: four branches, of which two end in two convolutions, one begins with a function."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.branch1x1, self.branch3x3_1 = Convolution(WIDTH, 2), Convolution(WIDTH, 4)
        self.branch3x3_2a, self.branch3x3_2b = Convolution(4, 1, 3), Convolution(4, 1, 3)
        self.branch3x3dbl_1, self.branch3x3dbl_2 = Convolution(WIDTH, 4), Convolution(4, 2, 3)
        self.branch_pool, self.p = Convolution(WIDTH, 2), p

    def forward(self, x: Tensor) -> Tensor:
        branch1x1 = self.branch1x1(x)
        branch3x3 = self.branch3x3_1(x)
        branch3x3 = torch.cat([self.branch3x3_2a(branch3x3), self.branch3x3_2b(branch3x3)], 1)
        branch3x3dbl = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        branch_pool = self.branch_pool(F.avg_pool2d(x, 3, 1, 1))
        return F.dropout(torch.cat([branch1x1, branch3x3, branch3x3dbl, branch_pool], 1), self.p, self.training)


class GoogLeNetBlock(nn.Module):
    """GoogLeNet's block: branches that are sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = Convolution(WIDTH, 2), nn.Sequential(Convolution(WIDTH, 2), Convolution(2, 2, 3))
        self.five, self.pool = nn.Sequential(Convolution(WIDTH, 2), Convolution(2, 2, 3)), Convolution(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(F.max_pool2d(x, 3, 1, 1))], 1)


class ResNeXtBlock(nn.Module):
    """ResNeXt's block as its paper draws it: equal paths that are added to what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Sequential(Convolution(WIDTH, 2), nn.Conv2d(2, WIDTH, 3, padding=1)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + sum(path(x) for path in self.paths))


class NASNetCell(nn.Module):
    """A cell of NASNet: sums of pairs, of which one reads another sum; all are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.left_0, self.right_0 = Convolution(WIDTH, 4, 5), Convolution(WIDTH, 4, 3)
        self.left_1, self.right_1 = Convolution(WIDTH, 4, 5), nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(WIDTH, 4, 1))
        self.left_2 = Convolution(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        zero = self.left_0(x) + self.right_0(x)
        one = self.left_1(x) + self.right_1(x)
        return torch.cat([one, self.left_2(zero) + zero], 1)


class Mixture(nn.Module):
    """A mixture by sum: two experts, and a gate that weighs them."""

    def __init__(self, stacks: bool = False) -> None:
        super().__init__()
        experts = (nn.Sequential(nn.Conv2d(WIDTH, 16, 1), nn.ReLU(), nn.Conv2d(16, WIDTH, 1)) for _ in range(2))
        self.gate, self.experts, self.stacks = nn.Linear(WIDTH, 2), nn.ModuleList(experts), stacks

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x.mean((2, 3))).softmax(-1)
        if self.stacks:
            return torch.einsum("be,ebchw->bchw", weights, torch.stack([expert(x) for expert in self.experts]))
        return sum(weights[:, k, None, None, None] * expert(x) for k, expert in enumerate(self.experts))  # type: ignore[return-value]


# -- no branches -------------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """ResNet's block with a projection beside it, which has a fifth of the multiplications."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(Convolution(WIDTH, 4), Convolution(4, 4, 3), nn.Conv2d(4, WIDTH, 1))
        self.shortcut = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = self.left(x)
        out += self.shortcut(x)
        return F.relu(out)


class DenseLayer(nn.Module):
    """DenseNet's: what it reads is concatenated with what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = Convolution(WIDTH, 4), Convolution(4, WIDTH, 3)
        self.narrow = nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.cat([x, self.three(self.one(x))], 1))


class Attention(nn.Module):
    """Queries, keys and values of the same, which meet in products."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).transpose(1, 2)
        made = F.scaled_dot_product_attention(self.q(rows), self.k(rows), self.v(rows))
        return x + self.out(made).transpose(1, 2).reshape(x.shape)


class GatedMLP(nn.Module):
    """Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Conv2d(WIDTH, 16, 1), nn.Conv2d(WIDTH, 16, 1), nn.Conv2d(16, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class AttentionBesideMLP(nn.Module):
    """GPT-J's and GPT-NeoX's: both read the same and are added, and are not alike."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), GatedMLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x) + self.mlp(x)


class RepVGGBlock(nn.Module):
    """A convolution of 3x3 and one of 1x1, which has a tenth of the multiplications."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.small = Convolution(WIDTH, WIDTH, 3), Convolution(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x) + self.small(x) + x


class Checkpointed(Mixture):
    """Keeps no activations of its experts; apart they would keep them."""

    def forward(self, x: Tensor) -> Tensor:
        one, two = (checkpoint(expert, x, use_reentrant=False) for expert in self.experts)
        return one + two


class OnlyInTraining(Mixture):
    """Calls its experts in another order in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.experts if self.training else reversed(self.experts)  # type: ignore[call-overload]
        return one(x) + two(x)


class Blocks(nn.Module):
    """x [mb, 3, h, w] -> [mb, 5]: a convolution, three equal blocks, a linear layer."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, WIDTH, 3), nn.Sequential(*(block() for _ in range(3))), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Towers(nn.Module):
    """x [mb, n] -> [mb, 1]: two towers side by side, as the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        left = F.relu(self.left(x))
        return self.head(torch.cat([left, F.relu(self.right(x))], 1))
