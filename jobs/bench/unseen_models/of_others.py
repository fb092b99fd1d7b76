"""Small packages of one architecture each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from unseen_models.case import Batch, Case, ids, noise


def _reformer() -> nn.Module:
    from reformer_pytorch import ReformerLM

    return ReformerLM(num_tokens=99, dim=32, depth=2, max_seq_len=64, heads=2, bucket_size=4, n_hashes=2, causal=True)  # type: ignore[no-any-return]


def _perceiver(file: str = "perceiver_pytorch") -> nn.Module:
    import importlib

    kind = importlib.import_module(f"perceiver_pytorch.{file}").Perceiver
    return kind(  # type: ignore[no-any-return]
        input_channels=3, input_axis=2, num_freq_bands=4, max_freq=10.0, depth=3, num_latents=8, latent_dim=16, cross_heads=1,
        latent_heads=2, cross_dim_head=8, latent_dim_head=8, num_classes=5,
    )  # fmt: skip


def _of(package: str, kind: str, **given: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import importlib

        made: nn.Module = getattr(importlib.import_module(package), kind)(**given)
        return made

    return make


_TOKENS: Batch = {"x": ids(2, 16)}
_IMAGE = noise(2, 3, 32, 32)
CASES: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "reformer_pytorch.ReformerLM": (_reformer, _TOKENS),
    "perceiver_pytorch.Perceiver": (_perceiver, {"data": noise(2, 8, 8, 3)}),
    "efficientnet_pytorch.EfficientNet": (
        lambda: __import__("efficientnet_pytorch").EfficientNet.from_name("efficientnet-b0"), {"inputs": noise(2, 3, 64, 64)},
    ),
    "g_mlp_pytorch.gMLP": (_of("g_mlp_pytorch", "gMLP", num_tokens=99, dim=32, depth=3, seq_len=16), _TOKENS),
    "g_mlp_pytorch.gMLPVision": (
        _of("g_mlp_pytorch", "gMLPVision", image_size=32, patch_size=8, num_classes=5, dim=32, depth=3), {"x": _IMAGE},
    ),
    "linformer.LinformerLM": (
        _of("linformer", "LinformerLM", num_tokens=99, dim=32, seq_len=16, depth=3, heads=2, k=8), _TOKENS,
    ),
    "performer_pytorch.PerformerLM": (
        _of("performer_pytorch", "PerformerLM", num_tokens=99, max_seq_len=16, dim=32, depth=3, heads=2, dim_head=16), _TOKENS,
    ),
    "linear_attention_transformer.LinearAttentionTransformerLM": (
        _of("linear_attention_transformer", "LinearAttentionTransformerLM", num_tokens=99, dim=32, heads=2, depth=3,
         max_seq_len=16),
        _TOKENS,
    ),
    "timesformer_pytorch.TimeSformer": (
        _of("timesformer_pytorch", "TimeSformer", dim=32, image_size=32, patch_size=8, num_frames=2, num_classes=5, depth=3,
         heads=2,
            dim_head=16),
        {"video": noise(2, 2, 3, 32, 32)},
    ),
    "denoising_diffusion_pytorch.Unet": (
        _of("denoising_diffusion_pytorch", "Unet", dim=16, dim_mults=(1, 2), flash_attn=False), {"x": noise(2, 3, 16, 16),
         "time": ids(2, 1)[:, 0]},
    ),
    "open_clip ViT": (lambda: _clip("ViT"), {"image": noise(2, 3, 32, 32), "text": ids(2, 12)}),
    "open_clip ResNet": (lambda: _clip("ResNet"), {"image": noise(2, 3, 64, 64), "text": ids(2, 12)}),
}  # fmt: skip


def _clip(kind: str) -> nn.Module:
    from open_clip.model import CLIP

    vision = {"layers": (1, 1, 1, 1), "width": 16, "image_size": 64} if kind == "ResNet" else {
        "layers": 3, "width": 32, "image_size": 32, "patch_size": 8, "head_width": 16}  # fmt: skip
    text = {"context_length": 12, "vocab_size": 99, "width": 32, "heads": 2, "layers": 3}
    made: nn.Module = CLIP(32, vision, text)
    return made


def names() -> list[str]:
    """The models."""
    return list(CASES)


def case(name: str) -> Case:
    """One of them."""
    make, batch = CASES[name]
    return Case(make, lambda: dict(batch))
