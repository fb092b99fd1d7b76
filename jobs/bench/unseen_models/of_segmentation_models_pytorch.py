"""segmentation_models_pytorch: each of its architectures with two encoders."""

from __future__ import annotations

import segmentation_models_pytorch as smp

from unseen_models.case import Case, noise

ARCHITECTURES = ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "PAN", "UPerNet",
                 "Segformer")  # fmt: skip
ENCODERS = ("resnet18", "mobilenet_v2", "tu-tf_efficientnet_lite0")


def names() -> list[str]:
    """Architecture and encoder."""
    return [f"{architecture} {encoder}" for architecture in ARCHITECTURES for encoder in ENCODERS]


def case(name: str) -> Case:
    """One of them."""
    architecture, encoder = name.split()
    size = 128 if architecture == "PAN" else 64
    return Case(
        lambda: getattr(smp, architecture)(encoder_name=encoder, encoder_weights=None, classes=3),
        lambda: {"x": noise(2, 3, size, size)},
    )
