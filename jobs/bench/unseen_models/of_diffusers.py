"""diffusers: networks that remove noise, and autoencoders, with configurations as its own tests have them."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from unseen_models.case import Batch, Case, ids, noise

_NET: dict[str, Any] = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
_VAE: dict[str, Any] = {
    "block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4, "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}  # fmt: skip
_TIME = torch.tensor([3, 7])
_IMAGE = {"sample": noise(2, 3, 16, 16)}
_LATENT = {"sample": noise(2, 4, 16, 16), "timestep": _TIME}
_VIDEO = {"sample": noise(2, 4, 4, 16, 16), "timestep": _TIME}


def _hidden(*shape: int, text: tuple[int, ...] = (), **more: Any) -> Batch:
    found = {"hidden_states": noise(*shape), "timestep": _TIME, **more}
    return found | ({"encoder_hidden_states": noise(*text)} if text else {})


_DIT: dict[str, Any] = {
    "sample_size": 8, "num_layers": 3, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 3, "in_channels": 4,
    "out_channels": 8, "attention_bias": True, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 8,
}  # fmt: skip
_ADA: dict[str, Any] = {"norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6}
_FLUX: dict[str, Any] = {
    "patch_size": 1, "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
_FLUX_IDS = {"img_ids": torch.arange(48.0).reshape(16, 3) % 4, "txt_ids": torch.zeros(12, 3)}

CASES: dict[str, tuple[dict[str, Any], Batch]] = {
    "UNet2DModel": (
        _NET | {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": noise(2, 3, 16, 16), "timestep": _TIME},
    ),
    "UNet2DConditionModel": (
        _NET | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 8,
                "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 32},
        _LATENT | {"encoder_hidden_states": noise(2, 5, 32)},
    ),
    "UNet1DModel": (
        {"block_out_channels": (8, 8, 16, 16), "in_channels": 14, "out_channels": 14, "time_embedding_type": "positional",
         "use_timestep_embedding": True, "out_block_type": "OutConv1DBlock", "mid_block_type": "MidResTemporalBlock1D",
         "down_block_types": ("DownResnetBlock1D",) * 4, "up_block_types": ("UpResnetBlock1D",) * 3, "act_fn": "swish",
         "freq_shift": 1.0, "flip_sin_to_cos": False},
        {"sample": noise(2, 14, 16), "timestep": _TIME},
    ),
    "UNet3DConditionModel": (
        {"block_out_channels": (4, 8), "norm_num_groups": 4, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 8, "attention_head_dim": 2,
         "layers_per_block": 1, "sample_size": 16},
        _VIDEO | {"encoder_hidden_states": noise(2, 4, 8)},
    ),
    "UNetSpatioTemporalConditionModel": (
        {"block_out_channels": (32, 64), "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
         "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "cross_attention_dim": 32,
         "num_attention_heads": 8, "in_channels": 4, "layers_per_block": 1, "sample_size": 16, "addition_time_embed_dim": 32,
         "projection_class_embeddings_input_dim": 96},
        {"sample": noise(2, 2, 4, 16, 16), "timestep": _TIME, "encoder_hidden_states": noise(2, 1, 32),
         "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]] * 2)},
    ),
    "ControlNetModel": (
        {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 32,
         "attention_head_dim": 8, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
         "conditioning_embedding_out_channels": (8, 16)},
        _LATENT | {"encoder_hidden_states": noise(2, 5, 32), "controlnet_cond": noise(2, 3, 32, 32)},
    ),
    "T2IAdapter": ({"channels": [16, 16, 32, 32], "num_res_blocks": 1, "downscale_factor": 4}, {"x": noise(2, 3, 64, 64)}),
    "AutoencoderKL": (_VAE, _IMAGE),
    "AsymmetricAutoencoderKL": (
        {key: value for key, value in _VAE.items() if key != "block_out_channels"}
        | {"down_block_out_channels": (16, 32), "up_block_out_channels": (16, 32)},
        _IMAGE,
    ),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (32, 32), "decoder_block_out_channels": (32, 32), "num_encoder_blocks": (1, 2),
         "num_decoder_blocks": (2, 1)},
        _IMAGE,
    ),
    "VQModel": (_VAE | {"latent_channels": 3, "num_vq_embeddings": 32}, _IMAGE),
    "AutoencoderKLTemporalDecoder": (
        {"block_out_channels": (32, 64), "down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1}, _IMAGE,
    ),
    "AutoencoderKLCogVideoX": (
        {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4,
         "block_out_channels": (8, 8, 8, 8), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2},
        {"sample": noise(2, 3, 8, 16, 16)},
    ),
    "AutoencoderOobleck": (
        {"encoder_hidden_size": 12, "decoder_channels": 12, "decoder_input_channels": 6, "downsampling_ratios": [2, 4],
         "channel_multiples": [1, 2]},
        {"sample": noise(2, 2, 24)},
    ),
    "AutoencoderDC": (
        {"in_channels": 3, "latent_channels": 4, "attention_head_dim": 2, "encoder_block_types": ("ResBlock",
         "EfficientViTBlock"),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 8),
         "decoder_block_out_channels": (8, 8), "encoder_qkv_multiscales": ((), (5,)), "decoder_qkv_multiscales": ((), (5,)),
         "encoder_layers_per_block": (1, 1), "decoder_layers_per_block": (1, 1), "downsample_block_type": "conv",
         "upsample_block_type": "interpolate", "decoder_norm_types": "rms_norm", "decoder_act_fns": "silu"},
        {"sample": noise(2, 3, 32, 32)},
    ),
    "AutoencoderKLWan": (
        {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]},
        {"sample": noise(2, 3, 5, 16, 16)},
    ),
    "AutoencoderKLLTXVideo": (
        {"latent_channels": 8, "block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (8, 8, 8, 8),
         "layers_per_block": (1, 1, 1, 1, 1), "decoder_layers_per_block": (1, 1, 1, 1, 1), "patch_size": 1, "patch_size_t": 1,
         "spatio_temporal_scaling": (True, True, False, False), "decoder_spatio_temporal_scaling": (True, True, False, False)},
        {"sample": noise(2, 3, 9, 16, 16)},
    ),
    "DiTTransformer2DModel": (_DIT, _hidden(2, 4, 8, 8, class_labels=torch.tensor([1, 3]))),
    "PixArtTransformer2DModel": (
        _DIT | _ADA | {"cross_attention_dim": 24, "caption_channels": 8, "use_additional_conditions": False},
        _hidden(2, 4, 8, 8, text=(2, 8, 8)),
    ),
    "LatteTransformer3DModel": (
        _DIT | _ADA | {"cross_attention_dim": 24, "caption_channels": 8, "video_length": 2}, _hidden(2, 4, 2, 8, 8, text=(2,
         4, 8)),
    ),
    "Transformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "norm_num_groups": 8, "num_layers": 3,
         "cross_attention_dim": 16},
        {"hidden_states": noise(2, 16, 8, 8), "encoder_hidden_states": noise(2, 5, 16)},
    ),
    "PriorTransformer": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "embedding_dim": 8, "num_layers": 3, "num_embeddings": 7},
        _hidden(2, 8, text=(2, 7, 8), proj_embedding=noise(2, 8)),
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 16, "patch_size": 1, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8, "out_channels": 4,
         "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32, "pooled_projection_dim": 64},
        _hidden(2, 4, 8, 8, text=(2, 10, 32), pooled_projections=noise(2, 64)),
    ),
    "FluxTransformer2DModel": (
        _FLUX | {"pooled_projection_dim": 32}, _hidden(2, 16, 4, text=(2, 12, 32), pooled_projections=noise(2, 32),
         **_FLUX_IDS),
    ),
    "ChromaTransformer2DModel": (
        _FLUX | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        _hidden(2, 16, 4, text=(2, 12, 32), **_FLUX_IDS),
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 32, "num_mmdit_layers": 2, "num_single_dit_layers": 2, "attention_head_dim": 8,
         "num_attention_heads": 4,
         "caption_projection_dim": 32, "joint_attention_dim": 32, "pos_embed_max_size": 256},
        _hidden(2, 4, 16, 16, text=(2, 10, 32)),
    ),
    "CogVideoXTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 2,
         "text_embed_dim": 8, "num_layers": 3, "sample_width": 8, "sample_height": 8, "sample_frames": 8,
         "max_text_seq_length": 8},
        _hidden(2, 1, 4, 8, 8, text=(2, 8, 8)),
    ),
    "CogView3PlusTransformer2DModel": (
        {"in_channels": 4, "num_layers": 2, "attention_head_dim": 4, "num_attention_heads": 2, "out_channels": 4,
         "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 2, "pos_embed_max_size": 8, "sample_size": 8},
        _hidden(2, 4, 8, 8, text=(2, 8, 8), original_size=torch.full((2, 2), 20), target_size=torch.full((2, 2), 20),
                crop_coords=torch.zeros(2, 2, dtype=torch.long)),
    ),
    "SanaTransformer2DModel": (
        {"patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 4, "caption_channels": 8,
         "num_attention_heads": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 4, "cross_attention_dim": 8},
        _hidden(2, 4, 8, 8, text=(2, 8, 8)),
    ),
    "MochiTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "pooled_projection_dim": 16, "in_channels": 12,
         "text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": 16},
        _hidden(2, 12, 2, 16, 16, text=(2, 16, 16), encoder_attention_mask=torch.ones(2, 16, dtype=torch.bool)),
    ),
    "Lumina2Transformer2DModel": (
        {"sample_size": 16, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1, "cap_feat_dim": 8,
         "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 2, 2), "axes_lens": (128, 128,
         128)},
        _hidden(2, 4, 16, 16, text=(2, 16, 8), encoder_attention_mask=torch.ones(2, 16, dtype=torch.bool)),
    ),
    "WanTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16, "ffn_dim": 32,
         "num_layers": 3, "rope_max_seq_len": 32},
        _hidden(2, 4, 2, 16, 16, text=(2, 12, 16)),
    ),
    "HunyuanVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1,
         "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1, "text_embed_dim": 16, "pooled_projection_dim": 8,
         "rope_axes_dim": (2, 4, 4)},
        _hidden(2, 4, 3, 8, 8, text=(2, 12, 16), encoder_attention_mask=torch.ones(2, 12), pooled_projections=noise(2, 8),
                guidance=torch.tensor([1000.0, 2000.0])),
    ),
    "StableAudioDiTModel": (
        {"sample_size": 4, "in_channels": 4, "num_layers": 3, "attention_head_dim": 4, "num_attention_heads": 2,
         "num_key_value_attention_heads": 2, "out_channels": 4, "cross_attention_dim": 4, "time_proj_dim": 8,
         "global_states_input_dim": 8, "cross_attention_input_dim": 4},
        _hidden(2, 4, 4, text=(2, 4, 4), global_hidden_states=noise(2, 1, 8)),
    ),
    "UVit2DModel": (
        {"hidden_size": 32, "cond_embed_dim": 32, "micro_cond_embed_dim": 20, "micro_cond_encode_dim": 4, "vocab_size": 32,
         "encoder_hidden_size": 32, "codebook_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 64,
         "block_out_channels": 32, "block_num_heads": 4, "sample_size": 8, "in_channels": 32, "num_res_blocks": 1},
        {"input_ids": ids(2, 64, 32).reshape(2, 8, 8), "encoder_hidden_states": noise(2, 5, 32),
         "pooled_text_emb": noise(2, 32), "micro_conds": noise(2, 5)},
    ),
}  # fmt: skip


def names() -> list[str]:
    """The models."""
    return list(CASES)


def case(name: str) -> Case:
    """One of them."""
    given, batch = CASES[name]
    return Case(lambda: getattr(diffusers, name)(**given), lambda: dict(batch))
