"""Models as people write them, for one process: what tensor parallelism must run as it is."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import Embedding, Linear


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, mean=1.0, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def repeat_kv(x: Tensor, times: int) -> Tensor:
    batch, heads, seq, width = x.shape
    if times == 1:
        return x
    return x[:, :, None, :, :].expand(batch, heads, times, seq, width).reshape(batch, heads * times, seq, width)


class Attention(nn.Module):
    """Separate q, k, v, fewer key heads, rotary positions, norms of single heads. `form`: how k and v meet q."""

    def __init__(self, width: int, heads: int, kv: int, form: str, norms: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.form = heads, kv, form
        self.head_dim = 4
        self.q_proj = Linear(width, heads * 4, bias=False, std=0.3)
        self.k_proj = Linear(width, kv * 4, std=0.3)
        self.v_proj = Linear(width, kv * 4, bias=False, std=0.3)
        self.o_proj = Linear(heads * 4, width, std=0.3)
        self.q_norm = RMSNorm(4) if norms else nn.Identity()
        self.k_norm = RMSNorm(4) if norms else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, seq, -1, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, seq, -1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        speed = torch.tensor([1.0, 0.1], dtype=v.dtype, device=v.device)
        angle = torch.outer(torch.arange(seq, dtype=v.dtype, device=v.device), speed).repeat(1, 2)
        q, k = rotate(q, angle.cos(), angle.sin()), rotate(k, angle.cos(), angle.sin())
        each = self.num_heads // self.num_key_value_heads
        if self.form == "expand":
            k, v = repeat_kv(k, each), repeat_kv(v, each)
        elif self.form in ("interleave", "manual"):
            k, v = k.repeat_interleave(each, dim=1), torch.repeat_interleave(v, each, dim=1)
        if self.form == "manual":
            later = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
            scores = torch.matmul(q, k.transpose(-2, -1)) / self.head_dim**0.5
            out = F.softmax(scores.masked_fill(later, float("-inf")), dim=-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.form == "gqa")
        return self.o_proj(out.transpose(1, 2).contiguous().view(batch, seq, -1))


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden, bias=False, std=0.3)
        self.up_proj = Linear(width, hidden, bias=False, std=0.3)
        self.down_proj = Linear(hidden, width, bias=False, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FusedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = Linear(width, 2 * hidden, std=0.3)
        self.down_proj = Linear(hidden, width, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv: int, form: str, norms: bool, fused: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)
        self.self_attn = Attention(width, heads, kv, form, norms)
        self.mlp = (FusedMLP if fused else GatedMLP)(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Tokens(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(vocab, width, padding_idx=3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids) * 5.0


class Output(nn.Module):
    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.lm_head = Linear(width, vocab, bias=False, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(x))


def llama(
    vocab: int = 23, width: int = 12, heads: int = 6, kv: int = 2, form: str = "gqa", norms: bool = True, fused: bool = False
) -> nn.Sequential:
    """LLaMA- and Qwen-like, two blocks."""
    blocks = [(f"layer{i}", LlamaBlock(width, heads, kv, form, norms, fused)) for i in range(2)]
    return nn.Sequential(OrderedDict([("model", Tokens(vocab, width)), *blocks, ("head", Output(width, vocab))]))


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    """As in Hugging Face models: shifted, flat, with ignored places, a mean."""
    shifted = logits.float() if logits.dtype == torch.bfloat16 else logits
    shifted = shifted[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.size(-1)), targets[..., 1:].reshape(-1), ignore_index=-100)


class DroppedBlock(nn.Module):
    """GPT-2 with its three dropouts, q, k, v by split."""

    def __init__(self, width: int, n_head: int, p: float) -> None:
        super().__init__()
        self.n_head, self.p = n_head, p
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.out_proj = Linear(width, 3 * width, std=0.3), Linear(width, width, std=0.3)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": Linear(width, 3 * width, std=0.3),
                "c_proj": Linear(3 * width, width, std=0.3),
                "act": nn.GELU(),
                "drop": nn.Dropout(p),
            }
        )
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, seq, self.n_head, width // self.n_head).transpose(1, 2) for t in (q, k, v))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop(self.out_proj(y.transpose(1, 2).reshape(batch, seq, width)))
        m = self.mlp
        return x + m["drop"](m["c_proj"](m["drop"](m["act"](m["c_fc"](self.ln_2(x))))))


class DroppedTokens(nn.Module):
    def __init__(self, vocab: int, context: int, width: int, p: float) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = Embedding(vocab, width), Embedding(context, width), nn.Dropout(p)

    def forward(self, ids: Tensor) -> Tensor:
        return self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))


def dropped(vocab: int = 23, width: int = 20, heads: int = 5, p: float = 0.3) -> nn.Sequential:
    """GPT-2 with dropout, tied embeddings by the caller."""
    blocks = [(f"h{i}", DroppedBlock(width, heads, p)) for i in range(2)]
    return nn.Sequential(OrderedDict([("embed", DroppedTokens(vocab, 8, width, p)), *blocks, ("head", Output(width, vocab))]))


class Interleaved(nn.Module):
    """BLOOM's and GPT-NeoX's order: head after head, each with its query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.query_key_value, self.dense = Linear(width, 3 * width, std=0.3), Linear(width, width, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        fused = self.query_key_value(x).view(batch, seq, self.num_heads, 3, width // self.num_heads)
        q, k, v = (fused[..., i, :].transpose(1, 2) for i in range(3))
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.dense(out.transpose(1, 2).flatten(2))
