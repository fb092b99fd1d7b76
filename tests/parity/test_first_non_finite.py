"""`raypar debug` names the first layer that had a number which is not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raypar.cli import main
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.run_in_one_process import name_samples_not_finite

MODEL = """
import torch
from torch import nn

class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt((x - x).abs()) + x  # finite; its gradient at zero is not

class Logarithm(nn.Module):
    def forward(self, x):
        return torch.log(x.detach() * 0 - 1 + (x.sum() > 1e9)) + x

def model(kind):
    if kind in ("sample", "weight"):
        return given(kind)
    odd = {"value": Logarithm, "gradient": Root}[kind]()
    return [("first", nn.Linear(2, 2)), ("second", nn.Linear(2, 2)), ("odd", odd), ("last", nn.Linear(2, 1))]

def given(kind):
    layers = model("gradient")
    if kind == "weight":
        with torch.no_grad():
            layers[1][1].bias[1] = float("inf")
    return layers[:2] + layers[3:]

def data(kind=None):
    x = [float("nan"), 1.0] if kind == "sample" else [1.0, 1.0]
    return [(torch.tensor(x), torch.zeros(1)) for _ in range(8)]

def loss(output, target):
    return (output - target).square().mean()
"""


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (
            "sample",
            "layer 'first' in microbatch 0 of step 1: its input 'x' has NaN (2 of 4 numbers), in samples {ids} (field 'x')\n",
        ),
        ("weight", "layer 'second' in microbatch 0 of step 1: its parameter 'bias' has infinite numbers (1 of 2 numbers)"),
        ("value", "layer 'odd' in microbatch 0 of step 1: its output 'odd.out' has NaN (4 of 4 numbers)"),
        (
            "gradient",
            "layer 'second' in microbatch 0 of step 1, in the backward pass: the gradient of its output 'second.out' has NaN",
        ),
    ],
    ids=["sample", "weight", "value", "gradient"],
)
def test_debug_names_the_first_layer_that_is_not_finite(
    kind: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"odd_{kind}.py").write_text(MODEL)
    (tmp_path / "job.yaml").write_text(
        f"""
steps: 2
batch_size: 4
microbatches: 2
model: {{function: "odd_{kind}:model", args: {{kind: {kind}}}}}
data: {{function: "odd_{kind}:data", args: {{kind: {kind}}}}}
loss: "odd_{kind}:loss"
optimizer: {{function: "torch.optim:SGD", args: {{lr: 0.1}}}}
plan: {{stages: 2}}
"""
    )
    place = place.replace("{ids}", ", ".join(str(one) for _, one in SampleOrder(seed=0, size=8).ids(0, 2)))
    assert main(["debug", str(tmp_path / "job.yaml")]) == 1
    assert f"first not finite: {place}" in capsys.readouterr().err
    assert main(["debug", str(tmp_path / "job.yaml"), "--set", "non_finite=skip"]) == 0
    assert f"skipped; first not finite: {place}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("odd", "named"),
    [([1], "sample 71"), ([0, 3], "samples 70, 73"), (range(7), "samples 70, 71, 72, 73, 74 and 2 more")],
    ids=["one", "two", "many"],
)
@pytest.mark.parametrize("shape", [(7,), (7, 2, 3)], ids=["numbers", "tensors"])
def test_samples_are_named_by_their_ids_in_the_order_of_their_rows(odd, named: str, shape: tuple[int, ...]):
    rows = torch.ones(shape)
    for row in odd:
        rows[row] = float("-inf")
    assert name_samples_not_finite(rows, [(1, 70 + row) for row in range(7)]) == named
