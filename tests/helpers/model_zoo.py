"""Unmodified models as people write them: small random configurations, batches and losses. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from helpers import vision_networks
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ZooModel:
    """One model of the zoo."""

    make: Callable[[float], nn.Module]
    """Dropout probability -> the model."""
    batch: Callable[[], Batch]
    """A batch."""
    other_batch: Callable[[], Batch]
    """A batch of other sizes."""
    loss: Callable[[Any], Tensor]
    """What the model returns -> a scalar."""
    has_dropout: bool = True
    """Whether its dropout probability can be set."""


# -- batches -----------------------------------------------------------------------------------------------------------------


def ids(batch: int, length: int, vocabulary: int = 99) -> Tensor:
    """Token ids that depend on the sizes alone."""
    generator = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randint(3, vocabulary, (batch, length), generator=generator)


def tokens(batch: int, length: int, *, padded: bool = False) -> Batch:
    """Tokens; `padded`: with a mask that leaves out the first sample's last three."""
    found = {"input_ids": ids(batch, length)}
    if padded:
        found["attention_mask"] = torch.ones(batch, length, dtype=torch.long)
        found["attention_mask"][0, -3:] = 0
    return found


def noise(seed: int, *shape: int) -> Tensor:
    """Random numbers that depend on the arguments alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(batch: int, size: int = 16) -> Tensor:
    """Images of three channels."""
    return noise(batch, batch, 3, size, size)


# -- losses ------------------------------------------------------------------------------------------------------------------


def cross_entropy(output: Any) -> Tensor:
    """Cross-entropy of the logits with made-up targets."""
    logits = output if isinstance(output, Tensor) else output.logits if hasattr(output, "logits") else output[0]
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(flat, torch.arange(len(flat)) % flat.shape[-1])


def sum_of_squares(output: Any) -> Tensor:
    """The mean square of every floating point tensor in the output, added up."""
    return sum((each.float() ** 2).mean() for each in _floats(output))  # type: ignore[return-value]


def _floats(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if hasattr(output, "values"):
        output = list(output.values())
    return [each for part in output for each in _floats(part)] if isinstance(output, (tuple, list)) else []


# -- the packages ------------------------------------------------------------------------------------------------------------


def import_transformers() -> Any:
    """The package `transformers`, without a torchvision that was built for another PyTorch, which it would import."""
    with contextlib.suppress(ImportError):
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            sys.modules["torchvision"] = None  # type: ignore[assignment]
    import transformers

    return transformers


# -- models of transformers --------------------------------------------------------------------------------------------------

_SMALL = dict(  # noqa: C408
    vocab_size=99, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64
)
_GROUPED = dict(_SMALL, num_key_value_heads=2, pad_token_id=0)
_VISION = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4)  # noqa: C408
_BART = dict(  # noqa: C408
    vocab_size=99, d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=64,
)  # fmt: skip


def _transformer(model: str, config: str, dropout: tuple[str, ...], given: dict[str, Any], p: float) -> nn.Module:
    """A model of `transformers`; `dropout`: the arguments of its configuration that are dropout probabilities."""
    transformers = import_transformers()
    made = getattr(transformers, config)(**given, **dict.fromkeys(dropout, p))
    made.use_cache = False
    found: nn.Module = getattr(transformers, model)(made)
    return found


def _clip(p: float) -> nn.Module:
    transformers = import_transformers()
    text = dict(
        _SMALL, num_hidden_layers=3, max_position_embeddings=32, attention_dropout=p, eos_token_id=98, projection_dim=16
    )
    vision = dict(_VISION, num_hidden_layers=3, attention_dropout=p, projection_dim=16)
    made: nn.Module = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    return made


_GPT2 = ("GPT2LMHeadModel", "GPT2Config", ("resid_pdrop", "embd_pdrop", "attn_pdrop"))
_GPT2_SIZES = dict(vocab_size=99, n_embd=32, n_layer=4, n_head=4, n_positions=64)  # noqa: C408
_HIDDEN = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_ATTENTION = ("attention_dropout",)


def _language(model: Callable[[float], nn.Module], *, padded: bool = False) -> ZooModel:
    return ZooModel(model, partial(tokens, 2, 12, padded=padded), partial(tokens, 3, 9, padded=padded), cross_entropy)


def _translation(model: Callable[[float], nn.Module]) -> ZooModel:
    return ZooModel(
        model,
        lambda: tokens(2, 12, padded=True) | {"decoder_input_ids": ids(2, 7)},
        lambda: tokens(3, 9, padded=True) | {"decoder_input_ids": ids(3, 5)},
        cross_entropy,
    )


def _of(model: str, config: str, dropout: tuple[str, ...], **given: Any) -> Callable[[float], nn.Module]:
    return partial(_transformer, model, config, dropout, given)


_DEBERTA = dict(  # noqa: C408
    relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True
)
_T5 = dict(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=0)  # noqa: C408
_MAE = dict(  # noqa: C408
    decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2, decoder_intermediate_size=32
)
_WHISPER = dict(  # noqa: C408
    num_mel_bins=8, max_source_positions=16, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1,
)  # fmt: skip

ZOO: dict[str, ZooModel] = {
    "gpt2": _language(_of(*_GPT2, **_GPT2_SIZES)),
    "gpt2_mask": _language(_of(*_GPT2, **_GPT2_SIZES), padded=True),
    "llama": _language(_of("LlamaForCausalLM", "LlamaConfig", _ATTENTION, **_GROUPED)),
    "mistral": _language(_of("MistralForCausalLM", "MistralConfig", _ATTENTION, sliding_window=8, **_GROUPED)),
    "qwen2": _language(_of("Qwen2ForCausalLM", "Qwen2Config", _ATTENTION, tie_word_embeddings=True, **_GROUPED)),
    "qwen3": _language(_of("Qwen3ForCausalLM", "Qwen3Config", _ATTENTION, head_dim=8, **_GROUPED), padded=True),
    "gemma": _language(_of("GemmaForCausalLM", "GemmaConfig", _ATTENTION, head_dim=8, **_GROUPED)),
    "gemma3": _language(_of("Gemma3ForCausalLM", "Gemma3TextConfig", _ATTENTION, head_dim=8, sliding_window=8, **_GROUPED)),
    "bert": _language(_of("BertForMaskedLM", "BertConfig", _HIDDEN, **_SMALL), padded=True),
    "roberta": _language(_of("RobertaForMaskedLM", "RobertaConfig", _HIDDEN, **_SMALL), padded=True),
    "deberta2": _language(_of("DebertaV2ForMaskedLM", "DebertaV2Config", _HIDDEN, **_SMALL, **_DEBERTA), padded=True),
    "albert": _language(_of("AlbertForMaskedLM", "AlbertConfig", _HIDDEN, embedding_size=16, **_SMALL), padded=True),
    "vit": ZooModel(
        _of("ViTForImageClassification", "ViTConfig", _HIDDEN, num_labels=7, **_VISION),
        lambda: {"pixel_values": images(2)},
        lambda: {"pixel_values": images(3)},
        cross_entropy,
    ),
    "vitmae": ZooModel(
        _of("ViTMAEForPreTraining", "ViTMAEConfig", _HIDDEN, **_VISION, **_MAE),
        lambda: {"pixel_values": images(2), "noise": noise(1, 2, 16)},
        lambda: {"pixel_values": images(3), "noise": noise(1, 3, 16)},
        lambda output: output.loss,
    ),
    "t5": _translation(_of("T5ForConditionalGeneration", "T5Config", ("dropout_rate",), tie_word_embeddings=True, **_T5)),
    "bart": _translation(
        _of(
            "BartForConditionalGeneration",
            "BartConfig",
            ("dropout", "attention_dropout", "activation_dropout"),
            max_position_embeddings=64,
            **_BART,
        )
    ),
    "whisper": ZooModel(
        _of("WhisperForConditionalGeneration", "WhisperConfig", ("dropout", "attention_dropout"), **_BART, **_WHISPER),
        lambda: {"input_features": noise(2, 2, 8, 32), "decoder_input_ids": ids(2, 7)},
        lambda: {"input_features": noise(2, 3, 8, 32), "decoder_input_ids": ids(3, 5)},
        cross_entropy,
    ),
    "mamba": ZooModel(
        _of("MambaForCausalLM", "MambaConfig", (), vocab_size=99, hidden_size=32, state_size=4, num_hidden_layers=4),
        partial(tokens, 2, 12),
        partial(tokens, 3, 9),
        cross_entropy,
        has_dropout=False,
    ),
    "mixtral": _language(
        _of(
            "MixtralForCausalLM",
            "MixtralConfig",
            _ATTENTION,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            **_GROUPED,
        )
    ),
    "clip": ZooModel(
        _clip,
        lambda: tokens(2, 12) | {"pixel_values": images(2)},
        lambda: tokens(3, 9) | {"pixel_values": images(3)},
        lambda output: sum_of_squares([output.logits_per_image, output.text_embeds, output.image_embeds]),
    ),
}

# -- networks for images -----------------------------------------------------------------------------------------------------


def _vision(make: Callable[[float], nn.Module], *, has_dropout: bool = True) -> ZooModel:
    return ZooModel(make, lambda: {"x": images(3, 32)}, lambda: {"x": images(2, 40)}, sum_of_squares, has_dropout)


ZOO |= {
    "bottlenecks": _vision(lambda p: vision_networks.BottleneckResNet(), has_dropout=False),
    "dense_blocks": _vision(vision_networks.DenseBlocks),
    "inception": _vision(vision_networks.Inception),
    "inverted_residuals": _vision(vision_networks.InvertedResiduals),
    "segmentation": _vision(vision_networks.Segmentation),
}

# -- models that people write themselves -------------------------------------------------------------------------------------


class DoubleConvolution(nn.Sequential):
    """Two convolutions with BatchNorm, writing in place."""

    def __init__(self, given: int, made: int, p: float) -> None:
        super().__init__(
            nn.Conv2d(given, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(inplace=True), nn.Dropout2d(p),
            nn.Conv2d(made, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    """An encoder and a decoder with skips between them."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first = DoubleConvolution(3, 8, p)
        self.downs = nn.ModuleList([DoubleConvolution(8, 16, p), DoubleConvolution(16, 32, p)])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.convolutions = nn.ModuleList([DoubleConvolution(32, 16, p), DoubleConvolution(16, 8, p)])
        self.last = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.first(x)]
        for down in self.downs:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        y = skips.pop()
        for up, convolution in zip(self.ups, self.convolutions, strict=True):
            y, skip = up(y), skips.pop()
            y = F.pad(y, (0, skip.shape[-1] - y.shape[-1], 0, skip.shape[-2] - y.shape[-2]))
            y = convolution(torch.cat([skip, y], 1))
        made: Tensor = self.last(y)
        return made


class LSTMLanguageModel(nn.Module):
    """LSTMs whose state goes from one to the next, with residuals and tied embeddings."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(99, 32), nn.Dropout(p)
        self.rnns = nn.ModuleList([nn.LSTM(32, 32, batch_first=True) for _ in range(3)])
        self.logits = nn.Linear(32, 99)
        self.logits.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.dropout(self.embedding(input_ids))
        start = torch.zeros(1, input_ids.shape[0], 32)
        state = (start, start)
        for rnn in self.rnns:
            y, state = rnn(x, state)
            x = x + self.dropout(y)
        made: Tensor = self.logits(x)
        return made


class Seq2Seq(nn.Module):
    """PyTorch's own Transformer."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, 32)
        self.transformer = nn.Transformer(32, 4, 2, 3, 64, dropout=p, batch_first=True)
        self.logits = nn.Linear(32, 99)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        made = self.transformer(self.embedding(src), self.embedding(tgt), tgt_mask=mask, src_key_padding_mask=src == 5)
        found: Tensor = self.logits(made)
        return found


ZOO |= {
    "unet": ZooModel(UNet, lambda: {"x": images(3, 18)}, lambda: {"x": images(2, 20)}, sum_of_squares),
    "lstm": _language(LSTMLanguageModel),
    "nn_transformer": ZooModel(
        Seq2Seq,
        lambda: {"src": ids(2, 12), "tgt": ids(2, 7)},
        lambda: {"src": ids(3, 9), "tgt": ids(3, 5)},
        cross_entropy,
    ),
}


# -- for jobs ----------------------------------------------------------------------------------------------------------------


def make_zoo_model(name: str, p: float = 0.0) -> nn.Module:
    """A model of the zoo, as a model function of a job."""
    return ZOO[name].make(p)


class TokenSamples:
    """A data set of token ids that are their own labels."""

    def __init__(self, samples: int = 16) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        found = torch.randint(3, 99, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": found, "labels": found}
