"""torchvision: the smallest of each family of its models, on small images and videos."""

from __future__ import annotations

import torchvision

from unseen_models.case import Case, noise

SIZES = {
    "alexnet": 64, "convnext_tiny": 32, "densenet121": 32, "efficientnet_b0": 32, "efficientnet_v2_s": 32, "googlenet": 64,
    "inception_v3": 139, "maxvit_t": 224, "mnasnet0_5": 32, "mobilenet_v2": 32, "mobilenet_v3_small": 32, "regnet_x_400mf": 32,
    "regnet_y_400mf": 32, "resnet18": 32, "resnet50": 32, "resnext50_32x4d": 32, "shufflenet_v2_x0_5": 32, "squeezenet1_0": 64,
    "squeezenet1_1": 64, "swin_t": 32, "swin_v2_t": 64, "vgg11_bn": 32, "vit_b_32": 224, "wide_resnet50_2": 32,
    "deeplabv3_resnet50": 32, "deeplabv3_mobilenet_v3_large": 32, "fcn_resnet50": 32, "lraspp_mobilenet_v3_large": 32,
}  # fmt: skip
"""Model -> size of its images."""
VIDEOS = {"r3d_18": 32, "mc3_18": 32, "r2plus1d_18": 32, "s3d": 224, "mvit_v1_b": 224, "swin3d_t": 32}
"""Model -> size of the images of its videos."""


def names() -> list[str]:
    """The models."""
    return [*SIZES, *VIDEOS]


def case(name: str) -> Case:
    """One of them."""
    if name in VIDEOS:
        size = VIDEOS[name]
        frames = 16 if name in ("s3d", "mvit_v1_b") else 4
        return Case(lambda: torchvision.models.get_model(name), lambda: {"x": noise(2, 3, frames, size, size)})
    own = {"weights_backbone": None} if name.startswith(("deeplab", "fcn", "lraspp")) else {}
    return Case(
        lambda: torchvision.models.get_model(name, weights=None, **own),
        lambda: {"input" if name.startswith("lraspp") else "x": noise(2, 3, SIZES[name], SIZES[name])},
    )
