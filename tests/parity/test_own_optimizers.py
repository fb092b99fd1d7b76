"""`raypar.optimizers`: LAMB, LARS and AdamW8bit follow their papers, serve any script, and have the bits of one process."""

import copy
import itertools
import math
from pathlib import Path

import pytest
import torch
from helpers.optimizer_layouts import job_of, outcomes
from torch import Tensor, nn

from raypar.job import OptimizerConfig
from raypar.optimizers import LAMB, LARS, AdamW8bit
from raypar.optimizers.adamw_8bit import dynamic_codebook
from raypar.plan.ownership import CANONICAL_PIECE
from raypar.plan.state_division import StateDivision
from raypar.worker.step.optimizer_trial import OptimizerKind, try_optimizer

STEPS = 7
SHAPES = ((6, 5), (7,), (), (3, 2, 4))


def parameters(shapes=SHAPES, dtype=torch.float64) -> list[nn.Parameter]:
    dice = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=dice, dtype=torch.float64).to(dtype)) for shape in shapes]


def gradients(step: int, given: list[nn.Parameter]) -> list[Tensor]:
    dice = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=dice, dtype=torch.float64).to(p.dtype) for p in given]


def trained(optimizer: torch.optim.Optimizer, steps: int = STEPS, begin: int = 0) -> list[Tensor]:
    given = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(begin, begin + steps):
        for p, gradient in zip(given, gradients(step, given), strict=True):
            p.grad = gradient
        optimizer.step()
    return [p.detach().clone() for p in given]


def norm(values: list[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))


def lamb_of_paper(x: list[float], each: list[list[float]], lr=0.01, b1=0.8, b2=0.95, eps=1e-6, decay=0.1, limits=None):
    """Algorithm 2 of arXiv:1904.00962, number by number."""
    m, v = [0.0] * len(x), [0.0] * len(x)
    for t, g in enumerate(each, 1):
        m = [b1 * a + (1 - b1) * b for a, b in zip(m, g, strict=True)]
        v = [b2 * a + (1 - b2) * b * b for a, b in zip(v, g, strict=True)]
        r = [(a / (1 - b1**t)) / (math.sqrt(b / (1 - b2**t)) + eps) for a, b in zip(m, v, strict=True)]
        u = [a + decay * b for a, b in zip(r, x, strict=True)]
        size = norm(x)
        phi = min(max(size, limits[0]), limits[1]) if limits else size
        ratio = phi / norm(u) if size and norm(u) else 1.0
        x = [a - lr * ratio * b for a, b in zip(x, u, strict=True)]
    return x


def lars_of_paper(x: list[float], each: list[list[float]], lr=0.5, momentum=0.9, decay=0.01, eta=0.02):
    """Algorithm 1 of arXiv:1708.03888, number by number."""
    v = [0.0] * len(x)
    for g in each:
        size, slope = norm(x), norm(g)
        rate = eta * size / (slope + decay * size) if size and slope else 1.0
        v = [momentum * a + lr * rate * (b + decay * c) for a, b, c in zip(v, g, x, strict=True)]
        x = [a - b for a, b in zip(x, v, strict=True)]
    return x


def compared_with_paper(optimizer: torch.optim.Optimizer, of_paper) -> None:
    given = [p for group in optimizer.param_groups for p in group["params"]]
    begun = [p.detach().clone() for p in given]
    steps = [gradients(step, given) for step in range(STEPS)]
    for number, (found, first) in enumerate(zip(trained(optimizer), begun, strict=True)):
        want = of_paper(first.flatten().tolist(), [step[number].flatten().tolist() for step in steps])
        torch.testing.assert_close(found.flatten(), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_lamb_follows_algorithm_2():
    compared_with_paper(LAMB(parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1), lamb_of_paper)
    limited = LAMB(parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, norm_limits=(0.5, 2.0))
    compared_with_paper(limited, lambda x, each: lamb_of_paper(x, each, limits=(0.5, 2.0)))


def test_lamb_without_adaptation_is_adam_with_decoupled_decay():
    lamb = LAMB(parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, adapt=False)
    adamw = torch.optim.AdamW(parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for one, other in zip(trained(lamb, 1), trained(adamw, 1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_lars_follows_algorithm_1():
    compared_with_paper(LARS(parameters(), lr=0.5, momentum=0.9, weight_decay=0.01, trust_coefficient=0.02), lars_of_paper)


def test_lars_without_adaptation_is_sgd_with_momentum():
    lars = LARS(parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, adapt=False)
    sgd = torch.optim.SGD(parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for one, other in zip(trained(lars), trained(sgd), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_where_a_norm_is_0_the_step_is_not_scaled(kind: type):
    zero = nn.Parameter(torch.zeros(3))
    optimizer = kind([zero], lr=0.1)
    zero.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(zero, torch.zeros(3))
    zero.grad = torch.tensor([1.0, -2.0, 0.0])
    optimizer.step()
    assert torch.isfinite(zero).all() and zero[0] < 0 < zero[1]


# -- 8 bits ------------------------------------------------------------------------------------------------------------------


def codes_of_paper(signed: bool) -> list[float]:
    """The dynamic format, written out: sign, unary exponent (zeros before the indicator bit), linear fraction of the rest."""
    found = {0.0, 1.0}
    for zeros in range(7):
        bits = (6 if signed else 7) - zeros
        edges = [0.1 + 0.9 * k / 2**bits for k in range(2**bits + 1)]
        for low, high in itertools.pairwise(edges):
            found |= {sign * (low + high) / 2 * 10.0**-zeros for sign in ((1, -1) if signed else (1,))}
    return sorted(found)


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_format_has_256_numbers_that_are_finer_near_0(signed: bool):
    codes = dynamic_codebook(signed)
    assert len(codes) == 256 and torch.equal(codes, torch.tensor(codes_of_paper(signed), dtype=torch.float64).float())
    assert codes.unique().numel() == 256 and codes[-1] == 1 and 0.0 in codes.tolist()


def adamw_8bit_of_paper(x: list[float], each: list[list[float]], block=8, lr=0.01, b1=0.9, b2=0.99, eps=1e-8, decay=0.1):
    """AdamW whose averages are rounded block by block after every step; float64, number by number."""
    m, v = [0.0] * len(x), [0.0] * len(x)
    for t, g in enumerate(each, 1):
        m = [b1 * a + (1 - b1) * b for a, b in zip(m, g, strict=True)]
        v = [b2 * a + (1 - b2) * b * b for a, b in zip(v, g, strict=True)]
        hat = [a / (1 - b1**t) / (math.sqrt(b / (1 - b2**t)) + eps) for a, b in zip(m, v, strict=True)]
        x = [a * (1 - lr * decay) - lr * b for a, b in zip(x, hat, strict=True)]
        m, v = rounded(m, codes_of_paper(True), block), rounded(v, codes_of_paper(False), block)
    return x, m, v


def rounded(values: list[float], codes: list[float], block: int) -> list[float]:
    found = []
    for start in range(0, len(values), block):
        part = values[start : start + block]
        scale = max(map(abs, part))
        found += [scale * min(codes, key=lambda code, one=one: abs(code - one / scale)) if scale else 0.0 for one in part]
    return found


def test_adamw_8bit_rounds_its_averages_block_by_block_as_the_paper_says():
    (p,) = parameters(((3, 7),), torch.float32)
    begun, each = p.detach().flatten().tolist(), [gradients(step, [p])[0].flatten().tolist() for step in range(STEPS)]
    optimizer = AdamW8bit([p], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, block_size=8, min_8bit_size=0)
    (found,) = trained(optimizer)
    x, m, v = adamw_8bit_of_paper(begun, each)
    torch.testing.assert_close(found.flatten().double(), torch.tensor(x, dtype=torch.float64), rtol=2e-5, atol=2e-6)
    for name, signed, want in (("exp_avg", True, m), ("exp_avg_sq", False, v)):
        kept, scales = optimizer.state[p][name], optimizer.state[p][f"{name}_scale"]
        assert kept.dtype == torch.uint8 and kept.shape == p.shape and scales.shape == (3,)
        wide = dynamic_codebook(signed)[kept.flatten().int()] * scales.repeat_interleave(8)[:21]
        torch.testing.assert_close(wide.double(), torch.tensor(want, dtype=torch.float64), rtol=2e-5, atol=1e-7)


def test_small_parameters_keep_averages_in_float32_and_are_those_of_adamw():
    ours, theirs = (kind(parameters(dtype=torch.float32), lr=0.01, weight_decay=0.1) for kind in (AdamW8bit, torch.optim.AdamW))
    for one, other in zip(trained(ours), trained(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_state_of_one_byte_an_element_trains_nearly_as_adamw():
    shapes = ((96, 64), (5000,))
    ours, theirs = (
        kind(parameters(shapes, torch.float32), lr=0.01, weight_decay=0.0) for kind in (AdamW8bit, torch.optim.AdamW)
    )
    begun = [p.detach().clone() for p in parameters(shapes, torch.float32)]
    for one, other, first in zip(trained(ours, 20), trained(theirs, 20), begun, strict=True):
        assert (one - other).norm() < 0.05 * (other - first).norm()
    nbytes = sum(v.nbytes for state in ours.state.values() for v in state.values() if isinstance(v, Tensor))
    assert nbytes == 2 * (96 * 64 + 5000) + 8 * (3 + 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LAMB, LARS, AdamW8bit])
def test_a_loaded_state_goes_on_with_the_same_bits(kind: type, dtype: torch.dtype):
    given = {"lr": 0.01} | ({"min_8bit_size": 8, "block_size": 16} if kind is AdamW8bit else {})
    undisturbed = trained(kind(parameters(dtype=dtype), **given))
    first = kind(parameters(dtype=dtype), **given)
    values = trained(first, 3)
    second = kind([nn.Parameter(value) for value in values], **given)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(torch.equal(one, other) for one, other in zip(trained(second, STEPS - 3, 3), undisturbed, strict=True))


def test_parameters_that_do_not_lie_contiguous_and_several_chunks_have_the_same_bits(monkeypatch):
    (plain,) = parameters(((40, 30),), torch.float32)
    turned = nn.Parameter(plain.detach().T.contiguous().T)
    assert not turned.is_contiguous()
    small = nn.Parameter(plain.detach().clone())
    given = {"lr": 0.01, "min_8bit_size": 0, "block_size": 64}
    (whole,) = trained(AdamW8bit([plain], **given))
    (other,) = trained(AdamW8bit([turned], **given))
    monkeypatch.setattr("raypar.optimizers.adamw_8bit.CHUNK", 128)
    (chunked,) = trained(AdamW8bit([small], **given))
    assert torch.equal(whole, other) and torch.equal(whole, chunked)


@pytest.mark.parametrize("kind", [LAMB, LARS, AdamW8bit])
def test_wrong_options_and_sparse_gradients_are_refused(kind: type):
    with pytest.raises(ValueError, match=kind.__name__):
        kind(parameters(), lr=-1.0)
    (p,) = parameters(((4,),))
    p.grad = torch.ones(4, dtype=torch.float64).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        kind([p]).step()


@pytest.mark.parametrize("kind", [LAMB, LARS, AdamW8bit])
def test_a_closure_is_called_first_with_gradients_on(kind: type):
    (p,) = parameters(((4,),))
    optimizer = kind([p])

    def closure() -> float:
        p.grad = None
        loss = (p * p).sum()
        loss.backward()
        return float(loss)

    assert optimizer.step(closure) == pytest.approx(float((parameters(((4,),))[0] ** 2).sum()))


# -- under plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [AdamW8bit, pytest.param(LAMB, marks=pytest.mark.ci), pytest.param(LARS, marks=pytest.mark.ci)]
)
def test_they_have_the_bits_of_one_process_in_every_layout_but_on_shards(kind: type, tmp_path: Path):
    given = {"min_8bit_size": 1000, "block_size": 256} if kind is AdamW8bit else {"weight_decay": 0.01}
    found = outcomes(job_of(OptimizerConfig(function=kind, args=given)), tmp_path)
    assert "measured: " not in found["2 shards"] and found.pop("2 shards").startswith("refused: ")
    assert set(found.values()) == {"equal"}, found


@pytest.mark.ci
@pytest.mark.parametrize("args", [{}, {"min_8bit_size": 0}])
@pytest.mark.parametrize("kind", [LAMB, LARS, AdamW8bit])
def test_their_state_is_divided_by_whole_parameters(kind: type, args: dict):
    shapes = {"w": (CANONICAL_PIECE // 64 + 70, 64), "b": (64,)}
    trial = try_optimizer(OptimizerConfig(function=kind, args=args if kind is AdamW8bit else {}), shapes)
    assert (trial.kind, trial.division) == (OptimizerKind.PER_PARAMETER, StateDivision.BY_PARAMETERS)
