"""Transformers of libraries, small: name -> (makes the model, its batch). `shard_styles.py` says which packages they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

if not hasattr(torch.ops.torchvision, "nms"):  # a torchvision that was built for another PyTorch misses its own operators
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {}
"""Name -> (the model, four samples)."""
SAMPLES = 4


def entry(name: str) -> Callable[[Callable[[], tuple[nn.Module, Batch]]], Callable[[], tuple[nn.Module, Batch]]]:
    """Decorator: the function makes the model and its batch, and stands under this name."""

    def enter(make: Callable[[], tuple[nn.Module, Batch]]) -> Callable[[], tuple[nn.Module, Batch]]:
        MODELS[name] = (lambda: make()[0], lambda: make()[1])
        return make

    return enter


def normal(*shape: int) -> Tensor:
    """Random numbers, the same each time."""
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(sum(shape)))


def ids(length: int, most: int = 64) -> Tensor:
    """Random token ids, the same each time."""
    return torch.randint(1, most, (SAMPLES, length), generator=torch.Generator().manual_seed(length))


def step_of_diffusion() -> Tensor:
    """A time step of each sample."""
    return torch.tensor([3, 500, 20, 999])


# -- PyTorch and torchvision ---------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Token ids to logits, by `nn.TransformerEncoder`."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(64, 64)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(input_ids)))


@entry("torch TransformerEncoder")
def encoder() -> tuple[nn.Module, Batch]:
    return Encoder(), {"input_ids": ids(10)}


@entry("torch TransformerEncoder, norm first")
def encoder_norm_first() -> tuple[nn.Module, Batch]:
    return Encoder(norm_first=True, activation="gelu"), {"input_ids": ids(10)}


class Decoder(nn.Module):
    """Token ids to logits, by `nn.TransformerDecoder` on a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 256, dropout=0.0, batch_first=True), 4)
        self.out = nn.Linear(64, 64)

    def forward(self, input_ids: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], dtype=memory.dtype)
        return self.out(self.decoder(self.embed(input_ids), memory, tgt_mask=mask, tgt_is_causal=True))


@entry("torch TransformerDecoder")
def decoder() -> tuple[nn.Module, Batch]:
    return Decoder(), {"input_ids": ids(10), "memory": normal(7, 64)}


class Both(nn.Module):
    """`nn.Transformer` with the sequence first, as it is by default."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(64, 4, 3, 3, 256, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.both(source, target)


@entry("torch Transformer")
def both() -> tuple[nn.Module, Batch]:
    return Both(), {"source": normal(9, 64), "target": normal(7, 64)}


@entry("torchvision ViT")
def torchvision_vit() -> tuple[nn.Module, Batch]:
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 4, 4, 4, 64, 256, num_classes=10), {"x": normal(3, 16, 16)}


@entry("torchvision Swin")
def torchvision_swin() -> tuple[nn.Module, Batch]:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], 64, [4, 4], [4, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=10), {
        "x": normal(3, 64, 64)
    }


@entry("torchvision MaxViT")
def torchvision_maxvit() -> tuple[nn.Module, Batch]:
    from torchvision.models import MaxVit

    return MaxVit((32, 32), 32, 4, [32, 64], [2, 2], 8, 0.0, num_classes=10), {"x": normal(3, 32, 32)}


# -- x-transformers ------------------------------------------------------------------------------------------------------


def x_transformer(name: str, **options: Any) -> None:
    """A decoder of x-transformers."""

    def make() -> tuple[nn.Module, Batch]:
        from x_transformers import Decoder as Layers
        from x_transformers import TransformerWrapper

        layers = Layers(dim=64, depth=4, heads=4, **({"attn_dim_head": 16} | options))
        return TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers), {"x": ids(12)}

    entry(f"x-transformers {name}")(make)


x_transformer("decoder")
x_transformer("GLU, flash, rotary", ff_glu=True, attn_flash=True, rotary_pos_emb=True)
x_transformer("ALiBi, RMSNorm", alibi_pos_bias=True, use_rmsnorm=True)
x_transformer("grouped keys, SwiGLU", attn_kv_heads=2, ff_swish=True, ff_glu=True)
x_transformer("one key head, no biases", attn_one_kv_head=True, ff_no_bias=True)
x_transformer("relative bias, qk norm", rel_pos_bias=True, attn_qk_norm=True)
x_transformer("gated values", attn_gate_values=True, ff_relu_squared=True)


@entry("x-transformers ViT")
def x_vit() -> tuple[nn.Module, Batch]:
    from x_transformers import Encoder as Layers
    from x_transformers import ViTransformerWrapper

    layers = Layers(dim=64, depth=4, heads=4, attn_dim_head=16)
    return ViTransformerWrapper(image_size=16, patch_size=4, num_classes=10, attn_layers=layers), {"img": normal(3, 16, 16)}


class Cross(nn.Module):
    """A decoder of x-transformers that reads a context, which its own forward takes by keyword only."""

    def __init__(self) -> None:
        super().__init__()
        from x_transformers import Decoder as Layers
        from x_transformers import TransformerWrapper

        layers = Layers(dim=64, depth=3, heads=4, attn_dim_head=16, cross_attend=True)
        self.wrapper = TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.wrapper(x, context=context)


@entry("x-transformers cross attention")
def x_cross() -> tuple[nn.Module, Batch]:
    return Cross(), {"x": ids(12), "context": normal(5, 64)}


# -- vit-pytorch ---------------------------------------------------------------------------------------------------------


def vit_pytorch(name: str, kind: str, **options: Any) -> None:
    """A model of vit-pytorch: `module.Class`."""

    def make() -> tuple[nn.Module, Batch]:
        import importlib

        module, _, own = kind.rpartition(".")
        common = {"image_size": 16, "patch_size": 4, "num_classes": 10, "dim": 64, "depth": 4, "heads": 4, "mlp_dim": 256}
        given = {key: value for key, value in (common | options).items() if value is not None}
        model = getattr(importlib.import_module(f"vit_pytorch.{module}"), own)(**given)
        return model, {"img": normal(3, 16, 16)}

    entry(f"vit-pytorch {name}")(make)


vit_pytorch("ViT", "vit.ViT", dim_head=16)
vit_pytorch("SimpleViT", "simple_vit.SimpleViT", dim_head=16)
vit_pytorch("DeepViT", "deepvit.DeepViT", dim_head=16)
vit_pytorch("CaiT", "cait.CaiT", dim_head=16, cls_depth=2)
vit_pytorch("ViT for small data sets", "vit_for_small_dataset.ViT", dim_head=16)
vit_pytorch("parallel ViT", "parallel_vit.ViT", dim_head=16)
vit_pytorch("ViT with registers", "simple_vit_with_register_tokens.SimpleViT", dim_head=16)
vit_pytorch("ViT with qk norm", "simple_vit_with_qk_norm.SimpleViT", dim_head=16)


# -- diffusers -----------------------------------------------------------------------------------------------------------

SMALL = {"num_attention_heads": 4, "attention_head_dim": 16}


class Called(nn.Module):
    """A model that is given numbers beside the fields of a batch."""

    def __init__(self, model: nn.Module, numbers: dict[str, int]) -> None:
        super().__init__()
        self.model, self.numbers = model, numbers

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch, **self.numbers)


def diffusers_model(
    name: str, kind: str, batch: Callable[[], Batch], numbers: dict[str, int] | None = None, **options: Any
) -> None:
    """A model of diffusers: its class, its batch and what its forward is given besides."""

    def make() -> tuple[nn.Module, Batch]:
        import diffusers

        model = getattr(diffusers, kind)(**options)
        return (model if numbers is None else Called(model, numbers)), batch()

    entry(f"diffusers {name}")(make)


diffusers_model(
    "Transformer2D",
    "Transformer2DModel",
    lambda: {"hidden_states": normal(8, 8, 8), "encoder_hidden_states": normal(5, 24)},
    **SMALL, in_channels=8, num_layers=4, cross_attention_dim=24, norm_num_groups=4,
)  # fmt: skip
diffusers_model(
    "DiT",
    "DiTTransformer2DModel",
    lambda: {"hidden_states": normal(4, 8, 8), "timestep": step_of_diffusion(), "class_labels": torch.tensor([1, 2, 3, 4])},
    **SMALL, in_channels=4, out_channels=4, num_layers=4, sample_size=8, patch_size=2, norm_num_groups=4,
    num_embeds_ada_norm=10,
)  # fmt: skip
diffusers_model(
    "PixArt",
    "PixArtTransformer2DModel",
    lambda: {"hidden_states": normal(4, 8, 8), "encoder_hidden_states": normal(5, 24), "timestep": step_of_diffusion()},
    **SMALL, in_channels=4, out_channels=4, num_layers=4, sample_size=8, patch_size=2, cross_attention_dim=64,
    caption_channels=24, norm_num_groups=4, use_additional_conditions=False,
)  # fmt: skip
diffusers_model(
    "SD3",
    "SD3Transformer2DModel",
    lambda: {
        "hidden_states": normal(4, 8, 8), "encoder_hidden_states": normal(5, 24), "pooled_projections": normal(32),
        "timestep": step_of_diffusion(),
    },
    **SMALL, sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=4, joint_attention_dim=24,
    caption_projection_dim=64, pooled_projection_dim=32, pos_embed_max_size=8,
)  # fmt: skip
diffusers_model(
    "AuraFlow",
    "AuraFlowTransformer2DModel",
    lambda: {"hidden_states": normal(4, 8, 8), "encoder_hidden_states": normal(5, 24), "timestep": step_of_diffusion() / 1000},
    **SMALL, sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=2, num_single_dit_layers=3,
    joint_attention_dim=24, caption_projection_dim=64, pos_embed_max_size=16,
)  # fmt: skip
diffusers_model(
    "Lumina2",
    "Lumina2Transformer2DModel",
    lambda: {
        "hidden_states": normal(4, 8, 8), "timestep": step_of_diffusion() / 1000, "encoder_hidden_states": normal(5, 24),
        "encoder_attention_mask": torch.ones(SAMPLES, 5, dtype=torch.bool),
    },
    sample_size=8, patch_size=2, in_channels=4, hidden_size=64, num_layers=4, num_refiner_layers=1, num_attention_heads=4,
    num_kv_heads=2, multiple_of=32, axes_dim_rope=(4, 6, 6), axes_lens=(32, 32, 32), cap_feat_dim=24,
)  # fmt: skip
diffusers_model(
    "Sana",
    "SanaTransformer2DModel",
    lambda: {"hidden_states": normal(4, 8, 8), "encoder_hidden_states": normal(5, 24), "timestep": step_of_diffusion()},
    **SMALL, in_channels=4, out_channels=4, num_layers=3, sample_size=8, patch_size=1, num_cross_attention_heads=4,
    cross_attention_head_dim=16, cross_attention_dim=64, caption_channels=24,
)  # fmt: skip
diffusers_model(
    "Flux",
    "FluxTransformer2DModel",
    lambda: {
        "hidden_states": normal(16, 4), "encoder_hidden_states": normal(5, 24), "pooled_projections": normal(16),
        "timestep": step_of_diffusion() / 1000, "img_ids": torch.zeros(SAMPLES, 16, 3)[0].expand(SAMPLES, 16, 3),
        "txt_ids": torch.zeros(SAMPLES, 5, 3),
    },
    **SMALL, patch_size=1, in_channels=4, num_layers=2, num_single_layers=3, joint_attention_dim=24, pooled_projection_dim=16,
    axes_dims_rope=(4, 6, 6),
)  # fmt: skip
diffusers_model(
    "CogVideoX",
    "CogVideoXTransformer3DModel",
    lambda: {"hidden_states": normal(2, 4, 8, 8), "encoder_hidden_states": normal(5, 24), "timestep": step_of_diffusion()},
    **SMALL, in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=24, num_layers=4, sample_width=8,
    sample_height=8, sample_frames=5, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=5,
)  # fmt: skip
diffusers_model(
    "LTX",
    "LTXVideoTransformer3DModel",
    lambda: {
        "hidden_states": normal(2 * 4 * 4, 4), "encoder_hidden_states": normal(5, 24), "timestep": step_of_diffusion(),
        "encoder_attention_mask": torch.ones(SAMPLES, 5, dtype=torch.bool),
    },
    numbers={"num_frames": 2, "height": 4, "width": 4},
    **SMALL, in_channels=4, out_channels=4, cross_attention_dim=64, num_layers=4, caption_channels=24,
)  # fmt: skip
diffusers_model(
    "Prior",
    "PriorTransformer",
    lambda: {
        "hidden_states": normal(32), "timestep": step_of_diffusion(), "proj_embedding": normal(32),
        "encoder_hidden_states": normal(7, 32),
    },
    **SMALL, num_layers=4, embedding_dim=32, num_embeddings=7, additional_embeddings=4,
)  # fmt: skip
