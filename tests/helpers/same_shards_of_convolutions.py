"""A chain of modules on shards by channels, written down in plain PyTorch in one process: the reference of convolutions.

No raypar in here. Each shard is a copy of the module with a slice of its parameters, so PyTorch's own code computes it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from helpers.same_shards import Fan, over_shards, run_of
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d)


def slices_of(module: nn.Module, style: str, shards: int, i: int) -> dict[str, tuple[int, slice]]:
    """Parameter -> (dim, indices) that shard i has."""
    transposed = isinstance(module, CONVOLUTIONS[3:])
    kind, _, units = style.partition(":")
    if kind == "groups":
        assert isinstance(module, CONVOLUTIONS)
        run = run_of(module.groups, shards, i)

        def of(channels: int) -> tuple[int, slice]:
            each = channels // module.groups
            return 0, slice(run.start * each, run.stop * each)

        return {"weight": of(module.in_channels if transposed else module.out_channels), "bias": of(module.out_channels)}
    dim = {"column": int(transposed), "row": int(not transposed)}[kind]
    total = module.weight.shape[dim]  # type: ignore[union-attr, index]
    count = int(units or total)
    run = run_of(count, shards, i)
    indices = slice(run.start * total // count, run.stop * total // count)
    return {"weight": (dim, indices)} | ({"bias": (0, indices)} if kind == "column" else {})


def shard_of(module: nn.Module, style: str, shards: int, i: int) -> nn.Module:
    """The module with slices in the place of its parameters; of a row without its bias."""
    made = copy.deepcopy(module)
    for name, (dim, indices) in slices_of(module, style, shards, i).items():
        whole = module._parameters.get(name)
        if whole is not None:
            part = whole.detach()[(slice(None),) * dim + (indices,)].clone(memory_format=torch.contiguous_format)
            made._parameters[name] = nn.Parameter(part)
    if style.startswith("row"):
        made._parameters["bias"] = None
    if style == "groups":
        run = run_of(module.groups, shards, i)  # type: ignore[arg-type]
        made.groups = run.stop - run.start  # type: ignore[assignment]
    return made


def norm_of(module: nn.Module, start: int, stop: int, channels: int) -> nn.Module:
    """A norm of the channels [start, stop)."""
    made = copy.deepcopy(module)
    for name, whole in module.named_parameters():
        made._parameters[name] = nn.Parameter(whole.detach()[start:stop].clone())
    for name, buffer in module.named_buffers():
        made._buffers[name] = buffer[start:stop].clone() if buffer.dim() else buffer.clone()
    if hasattr(made, "num_features"):
        made.num_features = stop - start  # type: ignore[assignment]
    if isinstance(module, nn.GroupNorm):
        made.num_groups = module.num_groups * (stop - start) // channels
    return made


class SameShards:
    """Modules in a row with their styles (empty: none); `run` computes them on shards."""

    def __init__(self, modules: Sequence[nn.Module], styles: Sequence[str], shards: int) -> None:
        self.shards = shards
        self.steps = list(zip(modules, styles, strict=True))
        self.parts: list[list[nn.Module]] = []
        self.biases: dict[int, nn.Parameter] = {}

    def run(self, x: Tensor) -> Tensor:
        """The output; gradients are then in the parameters of `parts` and `biases`."""
        value: list[Tensor] = [x]
        channels = 0
        for number, (module, style) in enumerate(self.steps):
            kind = style.partition(":")[0]
            if kind:
                parts = [shard_of(module, style, self.shards, i) for i in range(self.shards)]
                if kind == "column":
                    value = list(Fan.apply(value[0], self.shards))
                value = [part(v) for part, v in zip(parts, value, strict=True)]
                if kind == "row":
                    value = [over_shards(value)]
                    bias = module._parameters.get("bias")
                    if bias is not None:
                        self.biases[number] = nn.Parameter(bias.detach().clone())
                        spatial = value[0].dim() - 2
                        value = [value[0] + self.biases[number].view(-1, *[1] * spatial)]
                channels = sum(v.shape[1] for v in value)
            elif isinstance(module, NORMS) and len(value) > 1:
                parts, start = [], 0
                for v in value:
                    parts.append(norm_of(module, start, start + v.shape[1], channels))
                    start += v.shape[1]
                value = [part(v) for part, v in zip(parts, value, strict=True)]
            else:
                parts = [copy.deepcopy(module)]
                value = [parts[0](v) for v in value]
            self.parts.append(parts)
        (found,) = value
        return found

    def gradients(self, shard: int) -> dict[str, Tensor | None]:
        """Path -> gradient of the shard's slice, or of the whole parameter."""
        found: dict[str, Tensor | None] = {}
        for number, (module, style) in enumerate(self.steps):
            for name, parameter in module.named_parameters():
                parts = self.parts[number]
                if name == "bias" and number in self.biases:
                    gradient = self.biases[number].grad
                elif style:
                    gradient = parts[shard]._parameters[name].grad  # type: ignore[union-attr]
                else:
                    gradient = torch.cat([part._parameters[name].grad for part in parts])  # type: ignore[union-attr, misc]
                assert gradient is not None and parameter.requires_grad
                found[f"{number}.{name}"] = gradient
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Path -> buffer of the whole, after the run."""
        found = {}
        for number, parts in enumerate(self.parts):
            for name, buffer in parts[0].named_buffers():
                each = [dict(part.named_buffers())[name] for part in parts]
                found[f"{number}.{name}"] = torch.cat(each) if buffer.dim() else buffer
        return found
