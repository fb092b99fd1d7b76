"""AdamW whose two averages take one byte an element each, quantised block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT, StateDict

CHUNK = 1 << 20
"""About how many elements are widened to float32 at once: what a step needs beside the state does not grow with parameters."""
AVERAGES = {"exp_avg": True, "exp_avg_sq": False}
"""Name of an average in the state -> whether its elements have a sign."""
SMALLEST_EXPONENT = -6
"""Power of ten of the smallest numbers of the 8-bit format, relative to the largest of the block."""


class AdamW8bit(torch.optim.Optimizer):
    r"""AdamW with averages in 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861:
    blocks of section 2.1, the dynamic format of section 2.2).

    A step is that of `torch.optim.AdamW` in float32, of averages that are widened before and rounded to 8 bits after. A
    flattened average is cut into blocks of `block_size` elements; each is divided by its largest absolute value, its *scale*,
    and then each element is rounded to the nearest of 256 numbers that `dynamic_codebook` gives. So the state of a parameter of
    n elements is 2 n bytes and 8 bytes a block, where AdamW has 8 n.

    Parameters with fewer than `min_8bit_size` elements keep averages in float32; a group may set it for its own parameters
    (the paper keeps those of embeddings wide: a `min_8bit_size` beyond their size does).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        block_size: int = 2048,
        min_8bit_size: int = 4096,
    ) -> None:
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                f"AdamW8bit needs lr, eps, weight_decay >= 0 and betas in [0, 1): {lr=}, {eps=}, {weight_decay=}, {betas=}"
            )
        if block_size < 1 or min_8bit_size < 0:
            raise ValueError(f"AdamW8bit needs block_size >= 1 and min_8bit_size >= 0: {block_size=}, {min_8bit_size=}")
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**given, "block_size": block_size, "min_8bit_size": min_8bit_size})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all parameters that have a gradient. Returns what `closure`, which is called first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                if gradient.is_sparse:
                    raise RuntimeError("AdamW8bit takes no sparse gradients")
                state = self.state[parameter]
                if not state:
                    averages = _averages_at_begin(parameter, group["block_size"], group["min_8bit_size"])
                    state.update({"step": 0, **averages})
                state["step"] += 1
                given = {name: group[name] for name in ("betas", "eps", "weight_decay", "block_size")}
                options = _StepOptions(lr=float(group["lr"]), step=state["step"], **given)
                flat = parameter.reshape(-1)  # a copy, where the parameter is not contiguous
                _step_in_chunks(flat, gradient.reshape(-1), state, options)
                if not parameter.is_contiguous():
                    parameter.copy_(flat.view(parameter.shape))
        return loss

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As of every optimizer; but averages keep their own dtypes, where others get those of the parameters."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(saved, (p for group in self.param_groups for p in group["params"]), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


@dataclass(frozen=True)
class _StepOptions:
    """What a step of a parameter needs beside its tensors."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    block_size: int
    step: int
    """Number of this step, from 1."""


def _averages_at_begin(parameter: Tensor, block_size: int, min_8bit_size: int) -> dict[str, Tensor]:
    """The averages before the first step, of the parameter's shape, and their scales, one number a block."""
    if parameter.numel() < min_8bit_size:
        return {name: torch.zeros(parameter.shape, device=parameter.device) for name in AVERAGES}
    blocks, device = -(-parameter.numel() // block_size), parameter.device
    found: dict[str, Tensor] = {}
    for name, signed in AVERAGES.items():
        zero = int(dynamic_codebook(signed, device).eq(0).nonzero().item())
        found[name] = torch.full(parameter.shape, zero, dtype=torch.uint8, device=device)
        found[f"{name}_scale"] = torch.zeros(blocks, device=device)
    return found


def _step_in_chunks(flat: Tensor, gradient: Tensor, state: Mapping[str, Tensor], options: _StepOptions) -> None:
    """The step of a flattened parameter, whole blocks at a time."""
    (beta1, beta2), size = options.betas, options.block_size
    rate, root = options.lr / (1 - beta1**options.step), (1 - beta2**options.step) ** 0.5
    chunk = max(1, CHUNK // size) * size
    for start in range(0, flat.numel(), chunk):
        part, wide = flat[start : start + chunk], gradient[start : start + chunk].float()
        mean, square = (_Average.at(state, name, start, part.numel(), size) for name in AVERAGES)
        m = mean.read().mul_(beta1).add_(wide, alpha=1 - beta1)
        v = square.read().mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
        values = part.to(torch.promote_types(part.dtype, torch.float32)).mul(1 - options.lr * options.weight_decay)
        part.copy_(values.sub_(m / v.sqrt().div_(root).add_(options.eps), alpha=rate))
        mean.write(m)
        square.write(v)


@dataclass(frozen=True)
class _Average:
    """Some whole blocks of one of the two averages of a flattened parameter."""

    kept: Tensor
    """The elements as they are kept, flat."""
    scales: Tensor | None
    """The scale of each block; None: the elements are kept in float32."""
    block_size: int
    signed: bool

    @staticmethod
    def at(state: Mapping[str, Tensor], name: str, start: int, count: int, block_size: int) -> _Average:
        scales = state.get(f"{name}_scale")
        if scales is not None:
            first = start // block_size
            scales = scales[first : first - -count // block_size]
        return _Average(state[name].view(-1)[start : start + count], scales, block_size, AVERAGES[name])

    def read(self) -> Tensor:
        """The elements in float32, in a new tensor."""
        if self.scales is None:
            return self.kept.clone()
        found = dynamic_codebook(self.signed, self.kept.device)[self.kept.int()]
        return found.mul_(self._by_element(self.scales))

    def write(self, wide: Tensor) -> None:
        """Keep these elements, in 8 bits if the parameter's are."""
        if self.scales is None:
            self.kept.copy_(wide)
            return
        padded = torch.nn.functional.pad(wide.abs(), (0, -wide.numel() % self.block_size))
        self.scales.copy_(padded.view(-1, self.block_size).amax(1))
        scales = self._by_element(self.scales)
        relative = torch.where(scales > 0, wide / scales, torch.zeros_like(wide))
        self.kept.copy_(torch.bucketize(relative, _boundaries(self.signed, wide.device)))

    def _by_element(self, scales: Tensor) -> Tensor:
        """The scale of each element."""
        return scales.repeat_interleave(self.block_size)[: self.kept.numel()]


@cache
def dynamic_codebook(signed: bool, device: torch.device | None = None) -> Tensor:
    """The 256 numbers of the dynamic format, ascending, float32: in [-1, 1] if `signed`, else in [0, 1].

    The unary exponent e, from 0 to -6, takes bits from the fraction: 10^e times [0.1, 1] is cut into 2^(6 + e) equal parts
    (twice as many without a sign), whose means are numbers of the format. 0 and 1 are two more. (Section 1.3 of the paper, and
    2.2: numbers that are not negative use the sign's bit for the fraction.)
    """
    found = [0.0, 1.0]
    for exponent in range(SMALLEST_EXPONENT, 1):
        parts = 2 ** (exponent - SMALLEST_EXPONENT + (not signed))
        means = [10.0**exponent * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        found += means + [-mean for mean in means if signed]
    return torch.tensor(sorted(found), dtype=torch.float64).float().to(device)


@cache
def _boundaries(signed: bool, device: torch.device) -> Tensor:
    """The 255 numbers half-way between neighbours of `dynamic_codebook`, float32."""
    codes = dynamic_codebook(signed).double()
    return ((codes[1:] + codes[:-1]) / 2).float().to(device)
