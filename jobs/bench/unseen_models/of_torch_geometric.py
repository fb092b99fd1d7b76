"""torch_geometric: its ready models for graphs, on one graph of a few nodes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch_geometric.nn import models

from unseen_models.case import Batch, Case, noise

_SIZES: dict[str, Any] = {"in_channels": 8, "hidden_channels": 16, "num_layers": 3, "out_channels": 4}
CASES: dict[str, dict[str, Any]] = {
    "GCN": _SIZES, "GraphSAGE": _SIZES, "GIN": _SIZES, "GAT": _SIZES, "PNA": _SIZES | {
        "aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.tensor([0, 2, 4, 2])},
    "EdgeCNN": _SIZES, "MLP": _SIZES, "LINKX": _SIZES | {"num_nodes": 12}, "GraphUNet": {
        "in_channels": 8, "hidden_channels": 16, "out_channels": 4, "depth": 2}, "JumpingKnowledge": {"mode": "cat"},
    "DeepGCNLayer": {}, "MaskLabel": {"num_classes": 4, "out_channels": 8}, "LightGCN": {
        "num_nodes": 12, "embedding_dim": 8, "num_layers": 3}, "AttentiveFP": {
        "in_channels": 8, "hidden_channels": 16, "out_channels": 4, "edge_dim": 4, "num_layers": 2, "num_timesteps": 2},
    "RECT_L": {"in_channels": 8, "hidden_channels": 16}, "SchNet": {
        "hidden_channels": 16, "num_filters": 16, "num_interactions": 2, "num_gaussians": 8}, "DimeNetPlusPlus": {
        "hidden_channels": 16, "out_channels": 1, "num_blocks": 2, "int_emb_size": 8, "basis_emb_size": 4,
        "out_emb_channels": 8,
        "num_spherical": 3, "num_radial": 3}, "ViSNet": {
        "lmax": 1, "hidden_channels": 16, "num_heads": 2, "num_layers": 2, "num_rbf": 8}, "GroupAddRev": {}, "Node2Vec": {},
}  # fmt: skip
for _name in ("JumpingKnowledge", "DeepGCNLayer", "MaskLabel", "GroupAddRev", "Node2Vec"):
    del CASES[_name]
_GRAPH: Batch = {
    "edge_index": torch.tensor([[i for i in range(12) for _ in range(3)], [(i + s) % 12 for i in range(12) for s in (1, 2, 5)]])
}
_ATOMS: Batch = {"z": torch.tensor([1, 6, 8, 1, 6, 8]), "pos": noise(6, 3), "batch": torch.tensor([0, 0, 0, 1, 1, 1])}


def names() -> list[str]:
    """The models."""
    return list(CASES)


def case(name: str) -> Case:
    """One of them."""
    kind = getattr(models, name)

    def make() -> nn.Module:
        made: nn.Module = kind(**CASES[name])
        return made

    parameters = inspect.signature(make().forward).parameters
    if "z" in parameters:
        return Case(make, lambda: dict(_ATOMS))
    batch: Batch = {"x": noise(12, 8), **_GRAPH}
    if name == "AttentiveFP":
        batch |= {"edge_attr": noise(36, 4), "batch": torch.arange(12) // 6}
    return Case(make, lambda: {key: value for key, value in batch.items() if key in parameters})
