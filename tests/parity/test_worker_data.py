"""What a worker reads from: data sets are made once and outlive plans, loaders are those of one plan."""

from __future__ import annotations

from typing import Any

import torch
from helpers import ugly_models

from raypar.job import DataConfig
from raypar.worker.data.worker_data import WorkerData
from raypar.worker.process.torch_state_guard import TorchStateGuard

made: list[int] = []
"""Sizes of the data sets that were made."""


def numbers(size: int) -> list[dict[str, Any]]:
    made.append(size)
    return [{"x": torch.full((2,), float(index)), "y": index} for index in range(size)]


def test_a_data_set_is_made_once_for_all_loaders_of_all_plans_and_read_in_order_in_validation():
    made.clear()
    spec = ugly_models.job("plain", microbatches=2, batch_size=4).replace(data=DataConfig(function=numbers, args={"size": 8}))
    data = WorkerData(spec, TorchStateGuard(1))
    for _ in range(2):
        loader = data.make_loader(None, spec.data, spec.batching, fields=("x",), readers=1, own=(0, 1))
        seen = torch.cat([loader.get(0, 0)["x"], loader.get(0, 1)["x"]])[:, 0].tolist()
        assert seen != [0.0, 1.0, 2.0, 3.0] and len({*seen}) == 4, "shuffled"
        data.close_loaders()
    of_set = data.make_loader("", spec.data, spec.batching, fields=("x",), readers=1, own=(0, 1))
    assert of_set.get(0, 0)["x"][:, 0].tolist() == [0.0, 1.0]
    assert data.dataset(spec.data) is data.dataset(spec.data.replace(shuffle=False)) and made == [8]
    assert len(data.dataset(spec.data.replace(args={"size": 3}))) == 3 and made == [8, 3]
    assert set(data.all_fields(spec.data, spec.batching)) == {"x", "y"}
    data.close()
    data.close()
