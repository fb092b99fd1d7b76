"""monai: networks for volumes and slices."""

from __future__ import annotations

from typing import Any

from monai.networks import nets

from unseen_models.case import Case, noise

_2D: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "UNet": (_2D | {"channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 1}, (2, 1, 32, 32)),
    "AttentionUnet": (_2D | {"channels": (4, 8, 16), "strides": (2, 2)}, (2, 1, 32, 32)),
    "BasicUNet": (_2D | {"features": (4, 4, 8, 8, 16, 4)}, (2, 1, 32, 32)),
    "BasicUNetPlusPlus": (_2D | {"features": (4, 4, 8, 8, 16, 4)}, (2, 1, 32, 32)),
    "DynUNet": (
        _2D | {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (4, 8, 16)}, (2, 1,
         32, 32),
    ),
    "VNet": ({"spatial_dims": 3, "in_channels": 1, "out_channels": 2}, (2, 1, 16, 16, 16)),
    "SegResNet": (_2D | {"init_filters": 8}, (2, 1, 32, 32)),
    "SegResNetVAE": (_2D | {"init_filters": 8, "input_image_size": (32, 32)}, (2, 1, 32, 32)),
    "UNETR": (
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "img_size": 32, "feature_size": 8, "hidden_size": 48,
         "mlp_dim": 64,
         "num_heads": 4},
        (2, 1, 32, 32),
    ),
    "SwinUNETR": (_2D | {"feature_size": 12}, (2, 1, 64, 64)),
    "ViT": (
        {"spatial_dims": 2, "in_channels": 1, "img_size": 32, "patch_size": 8, "hidden_size": 32, "mlp_dim": 64,
         "num_layers": 3,
         "num_heads": 4, "classification": True},
        (2, 1, 32, 32),
    ),
    "ViTAutoEnc": (
        {"spatial_dims": 2, "in_channels": 1, "img_size": 32, "patch_size": 4, "hidden_size": 32, "mlp_dim": 64,
         "num_layers": 3,
         "num_heads": 4},
        (2, 1, 32, 32),
    ),
    "DenseNet121": (_2D, (2, 1, 64, 64)),
    "SENet154": ({"spatial_dims": 2, "in_channels": 1, "num_classes": 2}, (2, 1, 64, 64)),
    "SEResNet50": ({"spatial_dims": 2, "in_channels": 1, "num_classes": 2}, (2, 1, 64, 64)),
    "EfficientNetBN": ({"model_name": "efficientnet-b0", "spatial_dims": 2, "in_channels": 1, "pretrained": False}, (2, 1,
    64, 64)),
    "resnet18": ({"spatial_dims": 2, "n_input_channels": 1, "num_classes": 2}, (2, 1, 32, 32)),
    "HighResNet": ({"spatial_dims": 2, "in_channels": 1, "out_channels": 2}, (2, 1, 32, 32)),
    "AutoEncoder": (_2D | {"channels": (4, 8), "strides": (2, 2)}, (2, 1, 32, 32)),
    "VarAutoEncoder": (
        {"spatial_dims": 2, "in_shape": (1, 32, 32), "out_channels": 1, "latent_size": 4, "channels": (4, 8), "strides": (2,
         2)},
        (2, 1, 32, 32),
    ),
    "Discriminator": ({"in_shape": (1, 32, 32), "channels": (4, 8), "strides": (2, 2)}, (2, 1, 32, 32)),
    "Regressor": ({"in_shape": (1, 32, 32), "out_shape": (2,), "channels": (4, 8), "strides": (2, 2)}, (2, 1, 32, 32)),
    "Classifier": ({"in_shape": (1, 32, 32), "classes": 3, "channels": (4, 8), "strides": (2, 2)}, (2, 1, 32, 32)),
    "GlobalNet": ({"image_size": (32, 32), "spatial_dims": 2, "in_channels": 1, "num_channel_initial": 4, "depth": 2}, (2, 1,
    32, 32)),
    "LocalNet": (
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 2, "num_channel_initial": 4, "extract_levels": (0, 1, 2)}, (2,
         1, 32, 32),
    ),
    "RegUNet": ({"spatial_dims": 2, "in_channels": 1, "num_channel_initial": 4, "depth": 2}, (2, 1, 32, 32)),
    "FlexibleUNet": (
        {"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0", "spatial_dims": 2, "is_pad": False}, (2, 3, 32,
         32),
    ),
    "TorchVisionFCModel": ({"model_name": "resnet18", "num_classes": 2, "pretrained": False}, (2, 3, 224, 224)),
    "DiffusionModelUNet": (
        _2D | {"channels": (8, 8), "attention_levels": (False, True), "num_res_blocks": 1, "norm_num_groups": 4,
         "num_head_channels": 4},
        (2, 1, 16, 16),
    ),
    "AutoencoderKL": (
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (4, 4), "latent_channels": 2, "num_res_blocks": 1,
         "norm_num_groups": 4, "attention_levels": (False, False)},
        (2, 1, 16, 16),
    ),
    "VQVAE": (
        {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (8, 8), "num_res_channels": (8, 8),
         "num_res_layers": 1,
         "downsample_parameters": ((2, 4, 1, 1),) * 2, "upsample_parameters": ((2, 4, 1, 1, 0),) * 2, "num_embeddings": 8,
         "embedding_dim": 8},
        (2, 1, 16, 16),
    ),
}  # fmt: skip


def names() -> list[str]:
    """The networks."""
    return list(CASES)


def case(name: str) -> Case:
    """One of them."""
    import inspect

    import torch

    given, shape = CASES[name]
    kind = getattr(nets, name)
    model = kind(**given)
    field = next(iter(inspect.signature(model.forward).parameters))
    more = {"timesteps": torch.tensor([1, 2])} if name == "DiffusionModelUNet" else {}
    return Case(lambda: kind(**given), lambda: {field: noise(*shape), **more})
