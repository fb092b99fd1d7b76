"""Transformers whose names say nothing are cut over shards by what they compute, with the plain module's loss and gradients."""

import copy
import types
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.captured_shards import share_of_largest_shard
from helpers.model_zoo import import_transformers
from helpers.on_shards import on_shards
from torch import Tensor, nn
from torch.nn import functional as F

import raypar
from raypar.comm.local_transport import LocalMesh
from raypar.errors import ModelError
from raypar.job import Job
from raypar.model.graph import Graph
from raypar.model.tensor_parallel.build_shard_modules import build_shard_modules
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.infer_styles_by_structure import reasons_for_whole, structure_of
from raypar.model.tensor_parallel.multihead_attention import ShardedMultiheadAttention
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan import ParallelPlan
from raypar.worker import plain_microbatches
from raypar.worker.check_layers_with_numbers import check_shards_with_numbers
from raypar.worker.check_model_can_shard import check_model_can_shard
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

WIDTH, HEADS, LENGTH = 16, 4, 5


class FusedAttention(nn.Module):
    """As in a ViT: one product makes q, k and v. `order`: how they lie in it."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.norm = order, nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made, (b, n, _) = self.first(self.norm(x)), x.shape
        if self.order == "chunk":
            q, k, v = (each.view(b, n, HEADS, -1).transpose(1, 2) for each in made.chunk(3, dim=-1))
        elif self.order == "three first":
            q, k, v = made.reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:  # head after head
            q, k, v = made.reshape(b, n, HEADS, 3, -1).permute(3, 0, 2, 1, 4)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        return x + self.second(torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v).transpose(1, 2).reshape(b, n, -1))


class CrossAttention(nn.Module):
    """As in diffusers: `to_q` reads the value, `to_k` and `to_v` a context; the output layer is in a ModuleList."""

    def __init__(self, key_heads: int = HEADS, fused: bool = False) -> None:
        super().__init__()
        self.key_heads, self.fused, own = key_heads, fused, WIDTH // HEADS * key_heads
        self.to_q, self.to_out = nn.Linear(WIDTH, WIDTH), nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)])
        if fused:
            self.to_kv = nn.Linear(WIDTH, 2 * own)
        else:
            self.to_k, self.to_v = nn.Linear(WIDTH, own), nn.Linear(WIDTH, own)

    def forward(self, x: Tensor) -> Tensor:
        context = x.flip(1) * 2
        k, v = self.to_kv(context).chunk(2, -1) if self.fused else (self.to_k(context), self.to_v(context))
        q, k, v = (
            each.view(len(x), LENGTH, heads, -1).transpose(1, 2)
            for each, heads in ((self.to_q(x), HEADS), (k, self.key_heads), (v, self.key_heads))
        )
        made = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2)
        return x + self.to_out[1](self.to_out[0](made))


class Glu(nn.Module):
    """As in x-transformers: one product makes value and gate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.Identity(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.inner[0](x).chunk(2, dim=-1)
        return x + self.inner[2](value * F.gelu(gate))


class Modulated(nn.Module):
    """As in DiT: a vector for each sample scales and shifts the value."""

    def __init__(self) -> None:
        super().__init__()
        self.by, self.norm = nn.Linear(WIDTH, 6 * WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, gate, *_ = self.by(F.silu(x.mean(1))).unsqueeze(1).chunk(6, -1)
        return x + gate * (self.norm(x) * (1 + scale) + shift)


def encoder(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, **options)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "fused, chunk": (lambda: FusedAttention("chunk"), {"qkv:4", "heads-row:4"}),
    "fused, three first": (lambda: FusedAttention("three first"), {"qkv:4", "heads-row:4"}),
    "fused, head after head": (lambda: FusedAttention("heads"), {"heads:4", "heads-row:4"}),
    "cross": (CrossAttention, {"heads:4", "heads-row:4"}),
    "grouped keys": (lambda: CrossAttention(2), {"heads:4/2", "kv-heads:4/2", "heads-row:4/2"}),
    "fused keys and values": (lambda: CrossAttention(fused=True), {"heads:4", "kv:4", "heads-row:4"}),
    "glu": (Glu, {"column/2", "row"}),
    "sequential": (lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)), {"column", "row"}),
    "modulated": (Modulated, {"gathered"}),
    "encoder": (encoder(), {"attention", "column", "row"}),
    "encoder, norm first": (encoder(norm_first=True, activation=F.silu), {"attention", "column", "row"}),
}
"""Name -> (a block, the styles that it gets)."""


class Blocks(nn.Module):
    """A block of each kind."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[kind][0]() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class Rows:
    """Samples (x, y)."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(LENGTH + 1, WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return drawn[1:], drawn[0]


def job(model: Any, **given: Any) -> Job:
    common = {"loss": F.mse_loss, "data": Rows, "steps": 1, "batch_size": 4, "microbatches": 2, "dtype": "float64"}
    return raypar.Trainer(model=model, **(common | given)).job


def step(spec: Job, graph: Any, **mesh: Any) -> tuple[float, dict[str, list[Tensor]]]:
    """(loss, gradients by parameter and shard) of a step."""
    with OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers), **mesh), "1f1b", graph=graph) as run:
        loss = run.step(0)[0].loss
        return loss, {name: [g.clone() for g in copies] for name, copies in run.gradients().items()}


@pytest.mark.ci
def test_blocks_are_cut_by_what_they_compute_and_compute_the_same(monkeypatch: pytest.MonkeyPatch):
    kinds = list(BLOCKS)
    spec = job((Blocks, {"kinds": kinds}))
    checked = preflight(spec)
    graph = checked.graph
    layout = compute_shard_layout(graph, 2)
    for number, kind in enumerate(kinds):
        own = {style for name, style in layout.styles.items() if name.startswith(f"blocks.{number}.")}
        own |= {style for name, style in layout.styles.items() if name == f"blocks.{number}"}
        assert own == BLOCKS[kind][1], kind
    assert all(compute_shard_layout(graph, shards).styles == layout.styles for shards in (1, 3, 4))
    assert share_of_largest_shard(graph, layout, cuttable=lambda name: "norm" not in name and "bias" not in name) <= 0.6
    monkeypatch.setitem(plain_microbatches.TOLERANCES, "float64", 1e-12)
    for shards in (2, 3):  # loss and gradients of the layers on shards and whole
        check_model_can_shard(spec, checked, ParallelPlan.mesh(layers=len(graph.layers), tp=shards))


@pytest.mark.ci
@pytest.mark.parametrize(
    "kinds", [["sequential"] * 3, ["fused, three first", "encoder", "cross"]], ids=["sequential", "attention"]
)
def test_other_stages_and_replicas_have_the_same_bits(kinds: list[str], monkeypatch: pytest.MonkeyPatch):
    """Also where the column and the row layer of an `nn.Sequential` are in two stages: what is between them computes with the
    same parts, in the same form (on some processors the bits would be equal otherwise, too)."""
    seen: Counter[object] = Counter()
    gelu = F.gelu

    def noted(x: Any, **options: Any) -> Any:
        local = getattr(x, "local", x)
        seen[local.shape, local.stride(), local.data_ptr() % 64] += 1
        return gelu(x, **options)

    monkeypatch.setattr(F, "gelu", noted)
    spec = job((Blocks, {"kinds": kinds}))
    graph = make_layer_graph(spec)
    assert len(graph.layers) == (9 if kinds[0] == "sequential" else 3)
    compute_shard_layout(graph, 2)  # tries styles on tensors without values
    seen.clear()
    loss, wanted = step(spec, graph, tp=2)
    calls = Counter(seen)
    for mesh in ({"pp": len(graph.layers)}, {"pp": 2, "dp": 2}):
        seen.clear()
        other, found = step(spec, graph, tp=2, **mesh)
        assert other == loss and seen == calls
        for name, copies in found.items():
            assert all(torch.equal(copy, wanted[name][shard % 2]) for shard, copy in enumerate(copies)), name


class Odd(nn.Module):
    """Attention over a dim that looks like heads, and an MLP with a norm over what a shard would have a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_of, self.out_of = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.norm, self.narrow = nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_of(x).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v  # over heads
        x = x + self.out_of(mixed.flatten(2))
        return x + self.narrow(self.norm(self.wide(x)).relu())


class Two(nn.Module):
    """Two odd blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Odd(), Odd()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x)).mean(1)


def test_what_cannot_be_proved_stays_whole_and_the_reason_is_known():
    graph = make_layer_graph(job(Two))
    assert compute_shard_layout(graph, 2).styles == {}
    refused = structure_of(graph).refused
    assert "layer_norm of a value" in refused["blocks.0.wide"] and "blocks.1.out_of" in refused


@pytest.mark.ci
def test_a_style_that_would_compute_something_else_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch):
    """Code that asks whether a value is a tensor sees the difference between a part and a whole."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            wide = self.a(x)
            return self.b(wide.relu() if isinstance(wide, Tensor) else wide.sigmoid())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Asking(), Asking()])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x)).mean(1)

    spec = job(Model)
    checked = preflight(spec)
    plan = ParallelPlan.mesh(layers=len(checked.graph.layers), tp=2)
    with pytest.raises(
        ModelError, match="do not compute on 2 shards what they compute whole: in the first microbatch the loss"
    ):
        check_model_can_shard(spec, checked, plan)
    compared = []
    monkeypatch.setattr("raypar.worker.check_model_can_shard.check_shards_with_numbers", lambda *args: compared.append(args))
    check_model_can_shard(spec, checked, plan)
    assert len(compared) == 1


def test_shards_that_were_not_compared_on_numbers_are_said(monkeypatch: pytest.MonkeyPatch):
    spec = job((Blocks, {"kinds": ["glu"]}))
    checked = preflight(spec)
    plan = ParallelPlan.mesh(layers=len(checked.graph.layers), tp=2)
    assert check_model_can_shard(spec, checked, plan) == ()
    monkeypatch.setattr("raypar.worker.check_layers_with_numbers.MOST_BYTES", 1000)
    (line,) = check_model_can_shard(spec, checked, plan)
    assert line.startswith(
        "the layers on 2 shards were not compared with the whole ones on numbers: its parameters and buffers"
    )


def test_evaluation_does_not_read_the_weights_of_an_encoder_layer_by_itself():
    """`nn.TransformerEncoderLayer` has a fast path of its own in evaluation, which would compute with a shard's slices."""
    layer, held = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True).double().eval(), ((0, HEADS),)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    group = ShardGroup(LocalMesh(1).transports[0], range(1))
    with torch.no_grad():
        wanted, called = layer(x), []
        layer.self_attn = ShardedMultiheadAttention(layer.self_attn, "self_attn", group, held).eval()
        whole = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, **named: called.append(args) or whole(*args, **named)
        torch.testing.assert_close(layer(x), wanted, rtol=0, atol=1e-12)
    assert called


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_on_shards_returns_what_the_whole_one_returns(batch_first: bool, average: bool):
    """Other keys and values than queries, both masks, weights of all heads or their mean, dropout."""
    whole = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2, batch_first=batch_first, kdim=6, vdim=10, dtype=torch.float64)
    q, k, v = (torch.randn(2, n, w, dtype=torch.float64) for n, w in ((5, WIDTH), (7, 6), (7, 10)))
    mask = torch.randn(2 * HEADS, 5, 7, dtype=torch.float64)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    inputs = [x if batch_first else x.transpose(0, 1) for x in (q, k, v)]

    def call(module: nn.Module) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return module(*inputs, key_padding_mask=padding, attn_mask=mask, average_attn_weights=average)

    graph = Graph.sequential([("a", lambda: copy.deepcopy(whole))], input="x")

    def work(group: ShardGroup) -> tuple[Tensor, Tensor]:
        layout = compute_shard_layout(graph, 3, {"a": "attention"}, infer=False)
        build = {"first": 0, "last": 1, "layout": layout, "group": group, "whole": True}
        part = build_shard_modules(graph, make=lambda index: copy.deepcopy(whole), **build)["a"]
        return call(partial(type(part).forward, part))

    found, _ = on_shards(3, work)
    for got in found:
        for one, other in zip(got, call(whole), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Adapter(nn.Module):
    """A linear layer with a low-rank adapter beside it, as PEFT's LoRA has it; or with a factor for each feature, as IA3."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer, self.scale = base, nn.Parameter(torch.rand(base.out_features)) if not rank else None
        if rank:
            self.lora_A, self.lora_B = nn.Linear(base.in_features, rank), nn.Linear(rank, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        made = self.base_layer(x)
        return made + 2 * self.lora_B(self.lora_A(x)) if self.scale is None else made * self.scale


class NamedAttention(nn.Module):
    """Attention with names that are known, and adapters around some of its layers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.num_heads, linears = HEADS, [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = linears
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.q_proj, self.o_proj = Adapter(linears[0], rank), Adapter(linears[3], rank) if rank else linears[3]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down_proj(self.up_proj(x).relu())


class Adapted(nn.Module):
    """Two such blocks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(
            base_model_tp_plan={"blocks.*.k_proj": "colwise", "blocks.*.v_proj": "colwise", "blocks.*.o_proj": "rowwise"}
        )
        self.blocks = nn.ModuleList(NamedAttention(rank) for _ in range(2))

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x)).mean(1)


class WeightNorm(nn.Module):
    """A linear layer scaled by the norms of its weight's rows, which are read beside the layer, as in PEFT's DoRA."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.magnitude = base, nn.Parameter(torch.rand(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base_layer.weight
        scale = self.magnitude / torch.linalg.norm(weight + torch.eye(WIDTH, dtype=x.dtype).T, dim=1).detach()
        return self.base_layer(x) * scale


class Reading(NamedAttention):
    """Attention of which one layer is so."""

    def __init__(self) -> None:
        super().__init__(4)
        self.q_proj = WeightNorm(nn.Linear(WIDTH, WIDTH))


class TwoReading(Adapted):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks = nn.ModuleList(Reading() for _ in range(2))


@pytest.mark.ci
def test_attention_whose_code_reads_a_weight_stays_whole_and_the_reason_names_it():
    graph = make_layer_graph(job(TwoReading))
    styles = compute_shard_layout(graph, 2).styles
    assert styles["blocks.1.up_proj"] == "column" and styles["blocks.1.down_proj"] == "row"
    assert "blocks.1.q_proj.base_layer" not in styles and "blocks.1.k_proj" not in styles
    why = reasons_for_whole(graph)["blocks.1.k_proj"]
    assert "with blocks.1.q_proj.base_layer.weight itself, of which every shard has a slice" in why


@pytest.mark.parametrize("rank", [4, 0], ids=["low rank", "factors"])
def test_layers_with_adapters_around_some_projections_are_cut_with_them(rank: int, monkeypatch: pytest.MonkeyPatch):
    spec = job((Adapted, {"rank": rank}))
    checked = preflight(spec)
    styles = compute_shard_layout(checked.graph, 2).styles
    own = {name.removeprefix("blocks.1."): style for name, style in styles.items() if name.startswith("blocks.1.")}
    wanted = {"q_proj.base_layer": "heads:4", "up_proj": "column", "down_proj": "row"}
    wanted |= {"k_proj": own["k_proj"], "v_proj": own["v_proj"]}
    if rank:
        wanted |= {"q_proj.lora_B": "heads:4", "o_proj.base_layer": "heads-row:4", "o_proj.lora_A": "heads-row:4"}
    else:
        wanted |= {"o_proj": "heads-row:4"}
    assert own == wanted and own["k_proj"] in ("heads:4", "kv-heads:4") and own["v_proj"] in ("heads:4", "kv-heads:4")
    monkeypatch.setitem(plain_microbatches.TOLERANCES, "float64", 1e-12)
    check_model_can_shard(spec, checked, ParallelPlan.mesh(layers=len(checked.graph.layers), tp=2))


MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
} | {
    name: {}
    for name in (
        *("mixtral", "deepseek_v3", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "flex_olmo", "granitemoe", "phimoe"),
        *("granitemoeshared", "granitemoehybrid", "glm4_moe", "glm4_moe_lite", "ernie4_5_moe", "afmoe", "exaone_moe"),
        *("minimax_m2", "solar_open"),
    )
}  # fmt: skip
"""Models of transformers with experts of which their own plan says `moe_tp_experts` -> what their small form needs."""
SMALL = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 64, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_shared_experts": 1, "num_shared_experts": 1, "shared_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "mamba_n_heads": 4, "mamba_d_head": 16,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 12,
    "v_head_dim": 8,
}


def library_model(name: str) -> nn.Module:
    """A small causal model of `transformers`."""
    transformers = import_transformers()
    if name.startswith("falcon"):
        grouped = name == "falcon, grouped keys"
        given = {"num_kv_heads": 2 if grouped else 1, "new_decoder_architecture": grouped, "multi_query": True, "alibi": False}
        given |= {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
        return transformers.FalconForCausalLM(transformers.FalconConfig(**given, use_cache=False))
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    usual = kind()
    given = {key: value for key, value in SMALL.items() if getattr(usual, key, None) is not None or key.endswith("token_id")}
    if hasattr(usual, "kv_lora_rank"):
        given |= LATENT | {"num_key_value_heads": 4}
        given.pop("head_dim", None)
    config = kind(**given | MIXTURES.get(name, {}))
    config._experts_implementation = "eager"
    return transformers.AutoModelForCausalLM.from_config(config)


class Tokens:
    """Samples {"input_ids": ..., "unused": ...}."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(1, 99, (10,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "unused": torch.zeros(())}


def token_loss(output: Any, unused: Tensor) -> Tensor:
    flat = output.logits.reshape(-1, output.logits.shape[-1])
    return F.cross_entropy(flat, torch.arange(len(flat)) % flat.shape[-1])


@pytest.fixture
def only_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that ask for float32 (norms, routers) compute in float64 too: so only what the cut makes differs."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setitem(plain_microbatches.TOLERANCES, "float64", 1e-12)


def library_job(name: str, **given: Any) -> Job:
    data = {"function": Tokens, "target": "unused"}
    return job((library_model, {"name": name}), loss=token_loss, data=data, **given)


@pytest.mark.full
@pytest.mark.parametrize("name", ["falcon, grouped keys", "falcon, one key head", *MIXTURES])
def test_fused_attention_experts_and_latent_attention_of_transformers_are_cut(name: str, only_float64: None):
    spec = library_job(name)
    checked = preflight(spec)
    layout = compute_shard_layout(checked.graph, 2)
    assert ("experts" in layout.styles.values()) == (name in MIXTURES)
    # DeepSeek-V3's plan names no attention; convolutions and state spaces stay whole.
    assert share_of_largest_shard(checked.graph, layout) <= 0.65
    check_model_can_shard(spec, checked, ParallelPlan.mesh(layers=len(checked.graph.layers), tp=2))
    check_shards_with_numbers(spec, checked.graph, layout)


@pytest.mark.full
def test_fused_attention_that_names_say_wrongly_is_refused_with_the_cure_that_helps(only_float64: None):
    """MiniMax's linear attention has q, k and v of each head side by side, and a norm over all heads."""
    spec = library_job("minimax")
    checked = preflight(spec)
    plan = ParallelPlan.mesh(layers=len(checked.graph.layers), tp=2)
    with pytest.raises(
        ModelError, match=r"(?s)view\(2, 10, 4, 24\) of a value .* or both layers the style whole \(plan.styles\)"
    ):
        check_model_can_shard(spec, checked, plan)
    spec = library_job("minimax", plan={"shards": 2, "styles": {"*.qkv_proj": "whole", "*.self_attn.out_proj": "whole"}})
    check_model_can_shard(spec, checked, plan)
    layout = compute_shard_layout(checked.graph, 2, dict(spec.styles))
    assert "experts" in layout.styles.values()
    check_shards_with_numbers(spec, checked.graph, layout)
