"""vit_pytorch: the classes of its files that take an image and return what they say of it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import torch
import vit_pytorch
from torch import nn

from unseen_models.case import Case, noise

SMALL: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 3, "heads": 2, "mlp_dim": 64, "dim_head": 16,
    "channels": 3, "num_patches": 16, "patch_dim": 8, "pixel_size": 4, "pixel_dim": 8, "patch_embed_dim": 32, "cls_depth": 1,
    "spatial_depth": 2, "temporal_depth": 2, "frames": 4, "image_patch_size": 8, "frame_patch_size": 2,
    "num_register_tokens": 2,
    "num_memory_tokens": 2, "cross_attn_depth": 2, "cross_attn_heads": 2, "cross_attn_dim_head": 16, "window_size": 4,
    "dim_conv_stem": 16, "mbconv_expansion_rate": 2, "mbconv_shrinkage_rate": 0.25, "dropout": 0.0, "emb_dropout": 0.0,
    "sm_dim": 16, "lg_dim": 32, "sm_patch_size": 8, "lg_patch_size": 16, "sm_enc_depth": 1, "lg_enc_depth": 1,
    "sm_enc_heads": 2, "lg_enc_heads": 2, "sm_enc_mlp_dim": 32, "lg_enc_mlp_dim": 32, "max_tokens_per_depth": (16, 8, 4),
    "seq_len": 64, "stages": 2, "num_blocks": 3, "heads_": 2, "max_sequence_length": 64, "vocab_size": 99,
}  # fmt: skip
"""Arguments by name."""


def names() -> list[str]:
    """file.Class of every module whose constructor is content with the arguments above."""
    found = []
    for file in pkgutil.iter_modules(vit_pytorch.__path__):
        try:
            module = importlib.import_module(f"vit_pytorch.{file.name}")
        except Exception:
            continue
        for name, kind in vars(module).items():
            if (
                isinstance(kind, type)
                and issubclass(kind, nn.Module)
                and kind.__module__ == module.__name__
                and _is_whole(kind)
            ):
                found.append(f"{file.name}.{name}")
    return found


def _is_whole(kind: type) -> bool:
    parameters = inspect.signature(kind.__init__).parameters
    needed = [
        key
        for key, each in parameters.items()
        if each.default is each.empty and key != "self" and each.kind != each.VAR_KEYWORD
    ]
    return "num_classes" in parameters and all(key in SMALL or key in _TUPLES for key in needed)


_TUPLES: dict[str, Any] = {"dims": (16, 32), "depths": (1, 2), "num_heads": (1, 2)}
"""Arguments that some want as a number for each stage."""


OWN: dict[str, tuple[dict[str, Any], int]] = {
    "look_vit.LookViT": (
        {"dim": 32, "image_size": 48, "num_classes": 10, "patch_size": 12, "highres_patch_size": 8, "heads": 2, "dim_head": 16,
         "cross_attn_heads": 2, "cross_attn_dim_head": 16, "patch_conv_kernel_size": 3},
        48,
    ),
    "max_vit.MaxViT": ({"num_classes": 10, "dim": 16, "depth": (1, 2), "dim_head": 8, "window_size": 4}, 32),
    "max_vit_with_registers.MaxViT": ({"num_classes": 10, "dim": 16, "depth": (1, 2), "dim_head": 8, "window_size": 4}, 32),
    "mobile_vit.MobileViT": (
        {"image_size": (64, 64), "dims": [16, 16, 16], "channels": [8, 8, 16, 16, 16, 16, 16, 16, 16, 16, 32],
         "num_classes": 10},
        64,
    ),
    "pit.PiT": (
        {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 16, "depth": (1, 2), "heads": 2, "mlp_dim": 32,
         "dim_head": 8},
        32,
    ),
    "regionvit.RegionViT": ({"dim": (16, 16, 32, 32), "depth": (1, 1, 2, 1), "window_size": 2, "num_classes": 10}, 64),
    "sep_vit.SepViT": (
        {"num_classes": 10, "dim": 16, "depth": (1, 2), "heads": (1, 2), "dim_head": 8}, 56
    ),
    "twins_svt.TwinsSVT": (
        {"num_classes": 10, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 32, "s4_emb_dim": 32, "s1_local_patch_size": 4,
         "s2_local_patch_size": 4, "s3_local_patch_size": 2, "s4_local_patch_size": 1, "s1_global_k": 4, "s2_global_k": 4,
         "s3_global_k": 2, "s4_global_k": 1, "s3_depth": 2, "s4_depth": 1},
        64,
    ),
}  # fmt: skip
"""Model -> its arguments and the size of its images, where those of the others do not do."""


def case(name: str) -> Case:
    """A small model, and images or videos."""
    if name in OWN:
        arguments, own_size = OWN[name]
        file, kind_name = name.split(".")
        own_kind = getattr(importlib.import_module(f"vit_pytorch.{file}"), kind_name)
        field = next(iter(inspect.signature(own_kind.forward).parameters.keys() - {"self"}))
        return Case(lambda: own_kind(**arguments), lambda: {field: noise(2, 3, own_size, own_size)})
    file, kind_name = name.split(".")
    kind = getattr(importlib.import_module(f"vit_pytorch.{file}"), kind_name)
    parameters = inspect.signature(kind.__init__).parameters
    takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
    given = {key: value for key, value in (SMALL | _TUPLES).items() if key in parameters and not takes_all}
    for key, each in parameters.items():
        if key in given and isinstance(each.default, (tuple, list)) and not isinstance(given[key], tuple):
            del given[key]
    if not takes_all and "channels" in given and "frames" not in parameters and "seq_len" in parameters:
        shape: tuple[int, ...] = (2, 3, 64)
    else:
        size = 224 if "image_size" not in parameters else 32
        shape = (2, 3, 4, 32, 32) if "frames" in parameters else (2, 3, size, size)
    model = kind(**given)
    with torch.no_grad():
        model(noise(*shape))
    field = next(iter(inspect.signature(model.forward).parameters))
    return Case(lambda: kind(**given), lambda: {field: noise(*shape)})
