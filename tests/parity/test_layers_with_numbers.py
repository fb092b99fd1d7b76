"""Hand-written layers are run on numbers before a run: what they may leave behind, what is refused, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raypar
from raypar.errors import ModelError
from raypar.worker import plain_microbatches
from raypar.worker.job_preflight import preflight

WIDTH = 4
SHARED: dict[Any, Tensor] = {}


def notes_of(*kinds: Callable[[], nn.Module], width: int = WIDTH, **more: Any) -> list[str]:
    """What preflight says of a chain of layers about its code."""
    SHARED.clear()
    rows = [{"x": torch.full((width,), float(index)), "y": torch.zeros(width)} for index in range(8)]
    job: Any = {"loss": nn.functional.mse_loss, "data": rows, "steps": 2, "batch_size": 4, "microbatches": 2, **more}
    notes = preflight(raypar.Trainer(model=lambda: [kind() for kind in kinds], **job).job).notes
    return [line for line in notes if "state" in line]


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Leaves(Plain):
    """Leaves its input for a later layer, beside the chain."""

    def forward(self, x: Tensor) -> Tensor:
        SHARED["skip"] = x
        return super().forward(x)


class Takes(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + SHARED.get("skip", torch.zeros(1))


class Needs(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + SHARED["skip"]


@pytest.mark.parametrize("reader", [Takes, Needs])
def test_a_layer_that_reads_what_another_has_left_is_refused(reader: Callable[[], nn.Module]):
    with pytest.raises(ModelError, match="a layer reads what another layer of the same microbatch has left in global variable"):
        notes_of(Leaves, Plain, reader)


class MakesTable(Plain):
    """Makes a table for each length once, for all layers."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in SHARED:
            SHARED[len(x)] = torch.arange(WIDTH).float()
        return super().forward(x) * SHARED[len(x)]


def test_a_table_that_layers_share_is_a_cache():
    assert notes_of(MakesTable, MakesTable) == []


class Dropout(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x) * torch.rand(1), 0.3, self.training)


class Counts(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(WIDTH)


def test_random_numbers_and_running_statistics_are_no_state():
    assert notes_of(Dropout, Counts, Plain) == []


class Fails(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            raise ZeroDivisionError("not today")
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "limit", "reason"),
    [
        (Plain, ("MOST_BYTES", 10), "its parameters and buffers have 0 MiB"),
        (Plain, ("MOST_SECONDS", 0.0), r"one microbatch took 0.0 s"),
        (Fails, ("MICROBATCHES", 3), "its own forward and backward raised ZeroDivisionError: not today"),
    ],
)
def test_layers_that_were_not_looked_through_are_said(
    kind: Callable[[], nn.Module], limit: tuple[str, float], reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plain_microbatches, *limit)
    (line,) = notes_of(kind)
    assert line.startswith(f"the layers were not looked through for state that they keep: {reason}")
