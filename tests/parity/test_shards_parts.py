"""Parameters by (name, slice), styles and their defaults, what is refused, overlap, and code that computes on parts."""

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import sharded_models as models
from helpers.on_shards import SEED, check, graph_of, on_shards, sharded, whole
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from examples import gpt
from examples.gpt import Embedding, Linear
from raypar.comm.transport import CommunicationLedger
from raypar.errors import ModelError, PlanError
from raypar.model.layer_skeletons import canonical_names, make_model_outline, parameter_shapes
from raypar.model.materialise import materialise
from raypar.model.tensor_parallel.autograd_collectives import select_ranges
from raypar.model.tensor_parallel.build_shard_modules import materialise_shard, shard_slice_of
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.linear import ColumnLinear
from raypar.model.tensor_parallel.local_part_layout import LocalPartLayout
from raypar.model.tensor_parallel.meta_check import check_shards_on_meta
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.model.tensor_parallel.sharded_value import ShardedValue
from raypar.model.tensor_parallel.styles.registry import parse_style
from raypar.plan import ParallelPlan
from raypar.plan.ownership import Ownership
from raypar.plan.pieces import plan_moves
from raypar.plan.shard_ranges import TensorCut, count_indices, even_ranges_by_shard, positions_of_indices
from raypar.plan.tensor_parallel_layout import shard_slice_shape
from raypar.worker.state.parameter_state import read_elements, write_elements

pytestmark = pytest.mark.part(5)

TIED = (("model.embed_tokens.weight", "head.lm_head.weight"),)


def tied_llama():
    return graph_of(lambda: models.llama(kv=1), ties=TIED)


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


# -- (name, slice) -----------------------------------------------------------------------------------------------------


def state_of(graph, layout, values=None):
    """By shard: canonical name -> parameter."""
    canonical = canonical_names(graph)

    def work(group):
        modules = materialise_shard(
            graph,
            0,
            len(graph.layers),
            layout=layout,
            group=group,
            seed=SEED,
            dtype=torch.float32,
            values=None if values is None else values[group.shard],
        )
        found = {}
        for layer, module in modules.items():
            for path, parameter in module.named_parameters():
                found.setdefault(canonical.get(f"{layer}.{path}", f"{layer}.{path}"), parameter.detach())
        return found

    return on_shards(layout.shards, work)[0]


@pytest.mark.parametrize("shards", (1, 2, 3, 4))
@pytest.mark.parametrize(
    "make", [tied_llama, lambda: graph_of(models.dropped), lambda: graph_of(lambda: gpt.layers(37, 40, 2, 5, 8))]
)
def test_every_parameter_is_a_slice_of_what_one_process_makes(make, shards):
    graph = make()
    layout = compute_shard_layout(graph, shards)
    modules = materialise(graph, 0, len(graph.layers), seed=SEED, dtype=torch.float32)
    canonical = canonical_names(graph)
    want = {canonical.get(f"{n}.{p}", f"{n}.{p}"): t.detach() for n, m in modules.items() for p, t in m.named_parameters()}
    found = state_of(graph, layout)
    for shard, state in enumerate(found):
        assert set(state) == set(want)
        for name, parameter in state.items():
            assert torch.equal(parameter, shard_slice_of(layout, name, want[name], shard))
            if name in layout.cuts:
                assert tuple(parameter.shape) == shard_slice_shape(layout.cuts[name], want[name].shape, shard)


@pytest.mark.parametrize("before, after", [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_what_shards_own_makes_the_state_of_any_other_number_of_shards(before, after):
    graph = tied_llama()
    shapes = parameter_shapes(graph)
    old, new = compute_shard_layout(graph, before), compute_shard_layout(graph, after)
    files = {}
    for shard, state in enumerate(state_of(graph, old)):
        for name, value in state.items():
            cut = old.cuts.get(name)
            if cut is not None:
                own = cut.owned(shard)
                mine = select_ranges(value, cut.dim, positions_of_indices(cut.indices_by_shard[shard], own))
                files.setdefault(name, []).append((cut.dim, own, mine))
            elif shard == 0:
                files[name] = [(0, ((0, shapes[name][0]),), value)]
    read = {}
    for name, pieces in files.items():
        read[name] = torch.full(shapes[name], torch.nan)
        for dim, spans, value in pieces:
            at = 0
            for start, stop in spans:
                place = read[name].narrow(dim, start, stop - start)
                assert place.isnan().all(), "written by two"
                place.copy_(value.narrow(dim, at, stop - start))
                at += stop - start
        assert not read[name].isnan().any(), name
    values = [{name: shard_slice_of(new, name, value, shard) for name, value in read.items()} for shard in range(after)]
    for got, want in zip(state_of(graph, new, values), state_of(graph, new), strict=True):
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_the_pieces_of_a_parameter_number_every_element_once():
    graph = tied_llama()
    layout, shapes = compute_shard_layout(graph, 4), parameter_shapes(graph)
    for name, cut in layout.cuts.items():
        if name == TIED[0][1]:
            continue
        owned = [
            i for shard in range(4) for a, b in cut.element_ranges(cut.owned(shard), shapes[name].numel()) for i in range(a, b)
        ]
        assert sorted(owned) == list(range(shapes[name].numel())), name
        for shard in range(4):
            assert (
                count_indices(cut.element_ranges(cut.indices_by_shard[shard], shapes[name].numel()))
                == torch.Size(shard_slice_shape(cut, shapes[name], shard)).numel()
            )


PLANS = {
    "1": ParallelPlan.mesh(layers=4),
    "2 shards": ParallelPlan.mesh(tp=2, layers=4),
    "3 shards, 2 stages": ParallelPlan.mesh(pp=2, tp=3, layers=4),
    "4 and 1 shards, 2 replicas": ParallelPlan.of([2, 2], [4, 1], layers=4),
    "1 and 2 shards": ParallelPlan.of([1, 1], [1, 2], layers=4, cuts=[3]),
}


@pytest.mark.parametrize("before, after", list(itertools.permutations(PLANS, 2)))
def test_state_moves_between_plans_of_other_shards_by_name_and_piece(before, after):
    """What the set difference of holdings says has to move, and nothing else, makes the state of the other plan."""
    graph = tied_llama()
    layouts = {shards: compute_shard_layout(graph, shards) for shards in (1, 2, 3, 4)}
    everything = {shards: state_of(graph, layout) for shards, layout in layouts.items()}
    outline = replace(make_model_outline(graph), shardings={shards: layout.cuts for shards, layout in layouts.items()})

    def need(plan):
        return Ownership(plan, outline).held

    def states(plan):
        """By rank: name -> (tensor, cut, shard)."""
        found = []
        for rank, pieces in enumerate(need(plan)):
            shards, shard = plan.stages[plan.stages_of(rank)[0]].shards, plan.roles[rank][0].shard
            names = {piece.name for piece in pieces}
            found.append({n: (everything[shards][shard][n].clone(), layouts[shards].cuts.get(n), shard) for n in names})
        return found

    old, want = states(PLANS[before]), states(PLANS[after])
    got = [{n: (torch.full_like(t, torch.nan), cut, shard) for n, (t, cut, shard) in rank.items()} for rank in want]
    # Workers 0, 1, ... hold the old plan's state, workers 100, 101, ... get the new one's.
    have = dict(enumerate(need(PLANS[before])))
    for move in plan_moves(have, {100 + rank: pieces for rank, pieces in enumerate(need(PLANS[after]))}):
        piece = move.piece
        tensor, cut, shard = got[move.dest - 100][piece.name]
        write_elements(tensor, cut, shard, piece.start, read_elements(*old[move.source][piece.name], piece.start, piece.stop))
    for mine, wanted in zip(got, want, strict=True):
        assert all(torch.equal(mine[name][0], wanted[name][0]) for name in wanted)


# -- styles ------------------------------------------------------------------------------------------------------------


def styles_of(make, **kwargs):
    return {name: str(style) for name, style in compute_shard_layout(graph_of(make, **kwargs), 2).styles.items()}


def test_defaults_of_the_example_gpt():
    assert styles_of(lambda: gpt.layers(depth=1)) == {
        "embed.token": "vocabulary",
        "block0.qkv": "qkv:4",
        "block0.project": "heads-row:4",
        "block0.up": "column",
        "block0.down": "row",
        "head.logits": "vocabulary",
    }


def test_defaults_of_common_names():
    found = styles_of(lambda: models.llama(fused=True), ties=TIED)
    assert {name: style for name, style in found.items() if "layer1" not in name} == {
        "model.embed_tokens": "vocabulary",
        "layer0.self_attn.q_proj": "heads:6/2",
        "layer0.self_attn.k_proj": "kv-heads:6/2",
        "layer0.self_attn.v_proj": "kv-heads:6/2",
        "layer0.self_attn.o_proj": "heads-row:6/2",
        "layer0.mlp.gate_up_proj": "column/2",
        "layer0.mlp.down_proj": "row",
        "head.lm_head": "vocabulary",
    }
    assert styles_of(models.dropped) == {
        "embed.wte": "vocabulary",
        **{
            f"h{i}.{name}": style
            for i in range(2)
            for name, style in {
                "c_attn": "qkv:5",
                "out_proj": "heads-row:5",
                "mlp.c_fc": "column",
                "mlp.c_proj": "row",
            }.items()
        },
        "head.lm_head": "vocabulary",
    }
    assert styles_of(lambda: [("a", models.Interleaved(8, 2))]) == {
        "a.query_key_value": "qkv-interleaved:2",
        "a.dense": "heads-row:2",
    }


def test_what_is_no_whole_pattern_stays_whole():
    class Lonely(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = Linear(6, 8), Linear(9, 6)
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(6, 6) for _ in range(4))  # how many heads?

    assert (
        styles_of(lambda: [("a", Lonely()), ("b", nn.TransformerEncoderLayer(8, 2, 16)), ("c", nn.MultiheadAttention(8, 2))])
        == {}
    )


def test_the_first_pattern_that_matches_counts_and_the_rest_is_inferred():
    graph = graph_of(lambda: gpt.layers(depth=2))
    layout = compute_shard_layout(
        graph, 2, {"block1.*": "whole", "block*.up": "gathered", "*.down.weight": "whole", "head.logits": "gathered"}
    )
    found = {name: str(style) for name, style in layout.styles.items()}
    assert found == {
        "embed.token": "vocabulary",
        "block0.qkv": "qkv:4",
        "block0.project": "heads-row:4",
        "block0.up": "gathered",
        "head.logits": "gathered",
    }
    assert compute_shard_layout(graph, 2, infer=False).styles == {}


@pytest.mark.parametrize("text", ["column", "qkv:8", "qkv:8/2", "kv-heads:8/2", "column/2", "heads-row", "whole", "vocabulary"])
def test_a_style_is_written_as_it_is_read(text):
    assert str(parse_style(text)) == text


@pytest.mark.parametrize(
    "shards, styles, words, cure",
    [
        (2, {"block*.qvk": "qkv"}, r"'block\*\.qvk' of plan.styles matches no layer \(nearest: .*block\d\.qkv", "checkpoints"),
        (2, {"block0.norm1": "column"}, "the style column does not fit block0.norm1, a LayerNorm", "vocabulary is for"),
        (2, {"embed.token": "row"}, "the style row does not fit embed.token, a Embedding", "vocabulary is for"),
        (2, {"block0.qkv": "qkv:5"}, "qkv:5 does not fit block0.qkv: 384 output features are no multiple of 15", "heads"),
        (2, {"block0.qkv": "qkv:4/3"}, "4 query heads cannot share 3 key heads", "multiple"),
        (2, {"head.logits": "heads"}, "head.logits goes by heads, and the module it is in does not say", "heads:8"),
        (2, {"block0.up": "colum"}, r"'colum' is no style \(nearest: column\)", "use one of"),
        (2, {"block0.up": "column/x"}, "'column/x' is no style", "use one of"),
        (2, {"block0.up": "row:0"}, "'row:0' is no style", "use one of"),
        (2, {"block0.qkv": "heads:0"}, "'heads:0' is no style", "use one of"),
        (5, None, "block0.qkv has 4 heads for 5 shards", "plan.shards <= 4"),
        (2, {"block0.qkv": "qkv-interleaved:4/2"}, "interleaved with 4 query heads and 2 key heads", "style whole"),
    ],
)
def test_bad_styles_are_one_clear_error(shards, styles, words, cure):
    with pytest.raises(PlanError, match=words) as error:
        compute_shard_layout(graph_of(lambda: gpt.layers(depth=2)), shards, styles)
    assert cure in error.value.cure


def test_a_layer_with_a_forward_of_its_own_has_no_style():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    with pytest.raises(PlanError, match="a Own with a forward of its own"):
        compute_shard_layout(graph_of(lambda: [("a", Own(4, 4))]), 2, {"a": "column"})
    with pytest.raises(PlanError, match="max_norm"):
        compute_shard_layout(graph_of(lambda: [("a", nn.Embedding(4, 4, scale_grad_by_freq=True))]), 2, {"a": "vocabulary"})


@pytest.mark.parametrize("styles", [{"head.lm_head": "whole"}, {"model.*": "whole"}, {"head.lm_head": "row"}])
def test_a_tie_cut_by_unequal_styles_is_refused(styles):
    with pytest.raises(
        PlanError, match=r"the tie model\.embed_tokens\.weight = head\.lm_head\.weight is cut by unequal styles"
    ) as error:
        compute_shard_layout(tied_llama(), 2, styles)
    assert "same style" in error.value.cure


def test_a_guess_for_half_of_a_tie_is_dropped():
    def make():
        return [("model", models.Tokens(9, 6)), ("middle", Linear(6, 6)), ("end", Linear(6, 9, bias=False))]

    assert styles_of(make, ties=(("model.embed_tokens.weight", "end.weight"),)) == {}


def test_one_shard_changes_nothing():
    graph = graph_of(lambda: gpt.layers(depth=1))
    layout = compute_shard_layout(graph, 1)
    assert all(cut.indices_by_shard == (((0, cut.whole_size),),) for cut in layout.cuts.values())
    (found,), _ = on_shards(
        1, lambda group: materialise_shard(graph, 0, 3, layout=layout, group=group, seed=1, dtype=torch.float32)
    )
    assert type(found["block0"].qkv) is Linear and "forward" not in vars(found["block0"])


# -- what a layer may do with a part -----------------------------------------------------------------------------------


class Column(nn.Module):
    """Ends in what `call` makes of 8 features that are cut."""

    def __init__(self, call) -> None:
        super().__init__()
        self.up, self.call = Linear(6, 8, std=0.5), call

    def forward(self, x):
        return self.call(self.up(x))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda h: h, "layer 'a' returns .* cut along dim 2"),
        (lambda h: h.softmax(-1), r"softmax of a value \[2, 3, 8\] that is cut along dim 2"),
        (lambda h: F.layer_norm(h, (8,)), "layer_norm of a value"),
        (lambda h: h.sum(), "sum of a value"),
        (lambda h: h.sum(()), "sum of a value"),
        (lambda h: h[..., 4], "indexing of a value"),
        (lambda h: h.view(16, 3), r"view\(16, 3\) of a value"),
        (lambda h: h.flip(-1), "flip of a value"),
        (lambda h: h if h > 0 else -h, "a condition of a value"),
        (lambda h: h.add_(1), "add_ of a value"),
        (lambda h: h.__setitem__(0, 1), "writing into a part of a value"),
        (lambda h: torch.ones(2).to(h), "to of a value"),
        (lambda h: torch.softmax(input=h, dim=2), "softmax of a value"),
        (lambda h: torch.fft.fft(h), "fft_fft of a value"),
        (lambda h: h @ torch.ones(8, 8, dtype=torch.float64), "matmul of a value"),
        (lambda h: torch.cat([h, torch.ones(2, 3, 2, dtype=h.dtype)], -1), "cat of a value"),
        (lambda h: h + h.view(2, 3, 2, 4).transpose(2, 3).reshape(2, 3, 8), "add of a value .* meets one of which"),
        (lambda h: F.scaled_dot_product_attention(h, h, h), "scaled_dot_product_attention of a value"),
    ],
)
def test_what_needs_other_shards_parts_is_refused_by_name(call, words):
    graph = graph_of(lambda: [("a", Column(call)), ("b", Linear(8, 8))])
    layout = compute_shard_layout(graph, 2, {"a.up": "column"})
    with pytest.raises(ModelError, match=words) as error:
        sharded(graph, layout, lambda o, t: o.sum(), numbers(2, 3, 6), numbers(1))
    assert "plan.styles" in error.value.cure
    with pytest.raises(ModelError, match=words):  # before anything is started
        assert check_shards_on_meta(graph, layout, lambda o, t: o.sum(), {"x": numbers(2, 3, 6), "y": numbers(1)}, "y") is False


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "make", [tied_llama, lambda: graph_of(models.dropped), lambda: graph_of(lambda: gpt.layers(37, 40, 2, 5, 8))]
)
def test_models_that_run_pass_the_check_by_shape(make, sequence):
    graph, x = make(), torch.zeros(2, 7, dtype=torch.int64)
    ran = []

    def loss(output, target):
        ran.append(output.shape)
        return models.next_token(output, target)

    layout = compute_shard_layout(graph, 3)
    assert check_shards_on_meta(graph, layout, loss, {"x": x, "y": x}, "y", sequence=sequence)
    kinds = {tuple(count_indices(cut.indices_by_shard[t]) for cut in layout.cuts.values()) for t in range(3)}
    assert len(ran) in (len(kinds), len(kinds) + 1) and ran[0][:2] == (2, 7), "to the end, on every kind of shard and the first"


def test_code_that_reads_numbers_is_left_to_the_first_step():
    graph = graph_of(lambda: [("a", Column(lambda h: h * h.local.sum().item()))])
    layout = compute_shard_layout(graph, 2, {"a.up": "column"})
    assert not check_shards_on_meta(graph, layout, lambda o, t: o.sum(), {"x": numbers(2, 3, 6), "y": numbers(1)}, "y")


def test_a_part_of_the_sequence_does_not_meet_a_part_of_the_features():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = Linear(6, 12), Linear(12, 6)

        def forward(self, x):
            return self.down(self.up(x) + x.mean(-1, keepdim=True))

    graph = graph_of(lambda: [("a", Both())])
    layout = compute_shard_layout(graph, 2)
    sharded(graph, layout, lambda o, t: o.sum(), numbers(2, 3, 6), numbers(1))
    with pytest.raises(ModelError, match=r"add of a value \[2, 3, 1\] .* cut along dim 1 .* meets one \[2, 3, 12\]") as error:
        sharded(graph, layout, lambda o, t: o.sum(), numbers(2, 3, 6), numbers(1), sequence=True)
    assert "plan.sequence_parallel: false" in error.value.cure


def test_layers_that_follow_each_other_must_cut_alike():
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = Linear(6, 12), Linear(12, 6)

        def forward(self, x):
            return self.down(self.up(x))

    for styles, words in [
        ({"a.up": "heads:3", "a.down": "row"}, "a.down has the features"),
        ({"a.up": "column", "a.down": "column"}, "a.down needs all of its input"),
        ({"a.up": "column", "a.down": "whole"}, "linear of a value"),
    ]:
        graph = graph_of(lambda: [("a", Wrong())])
        with pytest.raises(ModelError, match=words) as error:
            sharded(graph, compute_shard_layout(graph, 2, styles), lambda o, t: o.sum(), numbers(2, 3, 6), numbers(1))
        assert "style" in error.value.cure


def test_a_loss_that_cannot_work_on_a_part_of_the_vocabulary():
    for loss, words in [
        (lambda o, t: -o.log_softmax(-1).flatten()[0], "log_softmax of a value"),
        (lambda o, t: o * 2, "the loss returned a value"),
        (lambda o, t: F.cross_entropy(o, t, weight=torch.ones(8)), "class weights"),
    ]:
        graph = graph_of(lambda: [("a", Linear(6, 8))])
        layout, x, y = compute_shard_layout(graph, 2, {"a": "vocabulary"}), numbers(4, 6), torch.zeros(4, dtype=torch.int64)
        with pytest.raises(ModelError, match=words) as error:
            sharded(graph, layout, loss, x, y)
        assert "gathered" in error.value.cure
        with pytest.raises(ModelError, match=words):
            check_shards_on_meta(graph, layout, loss, {"x": x, "y": y}, "y")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_what_hides_gradients_of_a_part_is_refused():
    class Hiding(nn.Module):
        def __init__(self, call) -> None:
            super().__init__()
            self.up, self.down, self.call = Linear(6, 8), Linear(8, 6), call

        def forward(self, x):
            return self.call(self.up(x), self.down)

    def without(h, down):
        with torch.no_grad():
            return down(h)

    def detached(h, down):
        with torch.no_grad():
            kept = h.detach() * 2
        return down(h + kept)

    for call in (lambda h, down: down(Doubled.apply(h)), without):
        graph = graph_of(lambda call=call: [("a", Hiding(call))])
        with pytest.raises(ModelError, match="is used without gradients") as error:
            sharded(graph, compute_shard_layout(graph, 2), lambda o, t: o.sum(), numbers(2, 3, 6), numbers(1))
        assert "detach()" in error.value.cure
    check(lambda: [("a", Hiding(detached))], lambda o, t: (o**2).sum(), numbers(2, 3, 6), numbers(1), 2)


class Pair(nn.Module):
    """`forward`: what is done with them."""

    def __init__(self, call) -> None:
        super().__init__()
        self.up, self.down, self.call = Linear(6, 8), Linear(8, 6), call
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1.5)

    def forward(self, x):
        return self.call(self, x)


APART = {
    "linear": lambda m, x: F.linear(F.gelu(F.linear(x, m.up.weight)), m.down.weight),
    "T": lambda m, x: m.down(m.up(x)) + x @ m.up.weight.T @ m.up.weight,
    "to": lambda m, x: F.linear(x, m.up.weight.to(torch.float64)),
    "square": lambda m, x: m.down(m.up(x)) * torch.square(m.up.weight).mean(),
}


@pytest.mark.parametrize("name", APART)
def test_a_slice_that_is_read_apart_from_its_layer_is_refused(name):
    graph = graph_of(lambda: [("a", Pair(APART[name]))])
    layout = compute_shard_layout(graph, 2)
    assert layout.styles.keys() == {"a.up", "a.down"}
    with pytest.raises(ModelError, match=f"layer 'a' computes {name} with a.up.weight itself") as error:
        batch = {"x": numbers(2, 3, 6), "y": numbers(1)}
        check_shards_on_meta(graph, layout, lambda o, t: o.sum(), batch, "y", dtype=torch.float64)
    assert "give a.up the style whole" in error.value.cure


def test_a_layer_with_hooks_or_a_forward_of_its_own_is_not_cut():
    """What stands in its place would not have them."""

    def hooked() -> nn.Module:
        made = Pair(lambda m, x: m.down(m.up(x)))
        made.up.register_forward_hook(lambda module, given, found: found * 2)
        return made

    def replaced() -> nn.Module:
        made = Pair(lambda m, x: m.down(m.up(x)))
        made.down.forward = lambda x: x[..., :6]
        return made

    for make, name in ((hooked, "up"), (replaced, "down")):
        graph = graph_of(lambda make=make: [("a", make())])
        assert not compute_shard_layout(graph, 2).styles
        with pytest.raises(PlanError, match=f"does not fit a.{name}, a Linear with a forward of its own, hooks"):
            compute_shard_layout(graph, 2, {f"a.{name}": "column"})


def test_what_asks_a_slice_for_its_dtype_or_place_is_not():
    def asks(m, x):
        w = m.up.weight
        return m.down(m.up.forward(x.to(w.dtype).type_as(w)) * w.new_ones(1)) + x * (w.dim() + w.requires_grad)

    graph = graph_of(lambda: [("a", Pair(asks))])
    batch = {"x": numbers(2, 3, 6), "y": numbers(1)}
    assert check_shards_on_meta(graph, compute_shard_layout(graph, 2), lambda o, t: o.sum(), batch, "y", dtype=torch.float64)


def test_a_layer_that_shares_a_slice_without_being_cut_is_refused():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.mix, self.readout = Embedding(8, 6), Linear(6, 6), Linear(6, 8, bias=False)
            self.readout.weight = self.token.weight

        def forward(self, ids):
            return self.readout(self.mix(self.token(ids)))

    graph, batch = graph_of(lambda: [("a", Model())]), dict.fromkeys("xy", torch.arange(6).view(2, 3))
    with pytest.raises(ModelError, match=r"layer 'a' computes linear with a\.token.weight itself"):
        check_shards_on_meta(graph, compute_shard_layout(graph, 2), gpt.loss, batch, "y")
    both = compute_shard_layout(graph, 2, {"a.readout": "vocabulary"})
    assert check_shards_on_meta(graph, both, gpt.loss, batch, "y")


@pytest.mark.parametrize("sequence", [False, True])
def test_a_parameter_that_meets_parts_and_whole_values_is_refused(sequence):
    def checked(call):
        graph, batch = graph_of(lambda: [("a", Pair(call))]), {"x": numbers(2, 3, 6), "y": numbers(1)}
        layout, dtype = compute_shard_layout(graph, 2), torch.float64
        return check_shards_on_meta(graph, layout, lambda o, t: o.sum(), batch, "y", sequence=sequence, dtype=dtype)

    with pytest.raises(ModelError, match=r"a\.scale meets whole values and values of which every shard has a part"):
        checked(lambda m, x: m.down(m.up(x) * m.scale) + torch.exp(m.scale))
    assert checked(lambda m, x: m.down(m.up(x) * m.scale))
    assert checked(lambda m, x: m.down(m.up(x)) * m.scale)


def test_ids_outside_the_vocabulary_are_found():
    graph = graph_of(lambda: [("e", Embedding(5, 4))])
    with pytest.raises(IndexError, match=r"ids 0 to 5, not all in \[0, 5\)"):
        sharded(
            graph, compute_shard_layout(graph, 2, {"e": "vocabulary"}), lambda o, t: o.sum(), torch.tensor([[0, 5]]), numbers(1)
        )
    graph = graph_of(lambda: [("a", Linear(6, 8))])
    with pytest.raises(IndexError, match="Target 8 is out of bounds"):
        sharded(graph, compute_shard_layout(graph, 2, {"a": "vocabulary"}), F.cross_entropy, numbers(1, 6), torch.tensor([8]))


def test_sequence_parallelism_without_a_sequence_is_refused():
    graph = graph_of(lambda: [("a", nn.Sequential(Linear(6, 8), Linear(8, 6)))])
    layout = compute_shard_layout(graph, 2, {"a.0": "column", "a.1": "row"})
    with pytest.raises(ModelError, match=r"a\.1 sees a value of 2 dims"):
        sharded(graph, layout, lambda o, t: o.sum(), numbers(4, 6), numbers(1), sequence=True)


class Fake:
    """A transport end of two shards whose sums are done at once and whose waits are noted."""

    def __init__(self, log):
        self.rank, self.size, self.generation, self.ledger, self.log = 0, 2, 0, CommunicationLedger(), log

    def all_reduce(self, flat, *, group, channel=0):
        self.log.append("post")
        return self

    def reduce_scatter(self, out, pieces, *, group, channel=0):
        self.log.append("post")
        out.copy_(pieces[0])
        return self

    def all_gather(self, pieces, mine, *, group, channel=0):
        for piece in pieces:
            if piece is not mine:
                piece.copy_(mine[tuple(slice(n) for n in piece.shape)])
        return self

    def done(self):
        return False

    def wait(self, timeout_s=None):
        self.log.append("wait")


VIEWS = [
    lambda h: h.view(2, 3, 4, 3).transpose(1, 2),
    lambda h: h.view(2, 3, -1, 3)[:, :, :, 1:].permute(0, 2, 1, 3).contiguous(),
    lambda h: h.unflatten(-1, (2, 6)).flatten(0, 1).unsqueeze(0).squeeze(0),
    lambda h: h.reshape(6, 12).reshape(2, 3, 12)[:, -1],
    lambda h: h[None, :, 1, ...],
    lambda h: h.chunk(2, dim=-1)[1].tanh(),
    lambda h: h.split([3, 4, 5], -1)[1],
    lambda h: torch.split(h, 5, dim=2)[1],
    lambda h: torch.stack([h, 2 * h], 1).unbind(1)[1],
    lambda h: torch.stack([h, -h], -1).flatten(-2),
    lambda h: torch.cat([h, h], 0).mean(0),
    lambda h: h.pow(2).mean(1, keepdim=True).rsqrt() * h,
    lambda h: (1.0 - h) / 2 + h**2 - torch.arange(12.0, dtype=h.dtype),
    lambda h: torch.where(h > 0, h, h * 0.1).clamp(max=1.0),
    lambda h: h.masked_fill(torch.arange(12) % 5 == 0, 7.0),
    lambda h: torch.arange(3.0, dtype=h.dtype)[:, None] + h.to(torch.float64).sub(1),
    lambda h: h.transpose(-2, -1).softmax(-1) @ torch.ones(3, 2, dtype=h.dtype),
    lambda h: torch.ones(4, 3, dtype=h.dtype) @ h,
    lambda h: h.view(2, 3, 4, 3).transpose(1, 2) @ h.view(2, 3, 4, 3).permute(0, 2, 3, 1),
    lambda h: h.view(2, 3, 4, 3).transpose(1, 2) @ torch.arange(72.0, dtype=h.dtype).view(2, 4, 3, 3),
    lambda h: h.view(2, 3, 4, 3).repeat_interleave(2, dim=2).movedim(2, 1),
    lambda h: h[:, :, None].expand(-1, -1, 5, -1).select(2, 3).narrow(1, 1, 2),
    lambda h: h.view_as(torch.empty(2, 3, 6, 2)).swapaxes(2, 3),
    lambda h: torch.ones(5, 4, 3, dtype=h.dtype) @ h[0],
    lambda h: h[0].transpose(0, 1) @ torch.ones(5, 3, 4, dtype=h.dtype),
    lambda h: h[0].T + h.mT[1],
    lambda h: h.unflatten(2, (4, 3)).permute(2, 0, 1, 3) @ torch.ones(3, 2, dtype=h.dtype),
    lambda h: h.var(1, False) + h.std(dim=1, correction=0, keepdim=True)[:, 0],
    lambda h: h.sum([0, 1]) + h.amax(1, True).mean(dim=(0, 1)),
    lambda h: h.split(split_size=2, dim=1)[1] + h.chunk(chunks=2, dim=0)[0][..., None].squeeze(-1)[:, :1],
    lambda h: (h == h.clone()).float() + (h != 0) * h,
    lambda h: torch.maximum(F.silu(h), h.float().double()),
]


@pytest.mark.parametrize("call", VIEWS, ids=range(len(VIEWS)))
@pytest.mark.parametrize("spans", [((0, 3),), ((6, 12),), ((0, 12),), ((0, 1), (6, 7))], ids=str)
def test_an_operation_on_a_part_is_the_part_of_the_operation(call, spans):
    """Or refused, where the part is no block of the result."""
    full = numbers(2, 3, 12)
    part = ShardedValue(select_ranges(full, 2, spans), LocalPartLayout(2, 12, spans, "features"), ShardGroup(Fake([]), (0, 1)))
    try:
        found = call(part)
    except ModelError:
        assert spans in (((0, 1), (6, 7)), ((0, 3),)), "a block"
        return
    want = call(full)
    assert found.shape == want.shape
    assert torch.allclose(
        found.local, select_ranges(want, found.part_layout.dim, found.part_layout.ranges), rtol=1e-14, atol=1e-14
    )


# -- overlap -----------------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Notes matrix products."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in func.__name__:
            self.log.append("product")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sequence", [False, True])
def test_a_weight_gradient_is_computed_while_the_inputs_gradient_travels(sequence):
    log = []
    group = ShardGroup(Fake(log), (0, 1), sequence_parallel=sequence)
    held = even_ranges_by_shard(8, 2)[0]

    def value():
        x = numbers(2, 3, 6).requires_grad_()
        return ShardedValue(x, LocalPartLayout(1, 6, ((0, 3),), "sequence"), group) if sequence else x

    alone = ColumnLinear(nn.Linear(6, 4, dtype=torch.float64), "alone", group, held)
    three = [ColumnLinear(nn.Linear(6, 4, dtype=torch.float64), name, group, held, shares_input=True) for name in "qkv"]
    for read, before in [(lambda x: alone(x).local, 1), (lambda x: sum(layer(x).local for layer in three), 5)]:
        out = read(value()).sum()
        log.clear()
        with Products(log):
            out.backward()
        assert log == ["product"] * before + ["post", "product", "wait"]


def test_a_wrong_number_of_heads_is_told_with_the_right_one():
    part = ShardedValue(numbers(4, 32, 42), LocalPartLayout(2, 84, ((0, 42),), "features"), ShardGroup(Fake([]), (0, 1)))
    with pytest.raises(ModelError, match=r"needs runs of 12: if these are 7 heads, .*heads:7"):
        part.reshaped((4, 32, 7, 12))
    assert part.reshaped((4, 32, 6, 14)).local.shape == (4, 32, 3, 14)


def test_a_graph_of_several_layers_that_read_one_value_may_be_gone_back_twice():
    group, held = ShardGroup(Fake([]), (0, 1)), even_ranges_by_shard(8, 2)[0]
    three = [ColumnLinear(nn.Linear(6, 4, dtype=torch.float64), name, group, held, shares_input=True) for name in "qkv"]
    x = numbers(2, 3, 6).requires_grad_()
    out = sum(layer(x).local for layer in three).square().sum()
    (before,) = torch.autograd.grad(out, x, retain_graph=True)
    assert all(layer.weight.grad is None for layer in three)
    out.backward()
    assert torch.equal(x.grad, before)
    rows = 2 * sum(F.linear(x, layer.weight, layer.bias) for layer in three).detach().reshape(-1, 4)
    assert all(torch.allclose(layer.weight.grad, rows.t() @ x.detach().reshape(-1, 6), rtol=1e-12) for layer in three)


@pytest.mark.parametrize("sequence", [False, True])
def test_activations_are_freed_without_pythons_collector(sequence):
    graph = graph_of(lambda: [("b", models.LlamaBlock(12, 4, 2, "gqa", True, False))])
    group = ShardGroup(Fake([]), (0, 1), sequence_parallel=sequence)
    layout = compute_shard_layout(graph, 2)
    block = materialise_shard(graph, 0, 1, layout=layout, group=group, seed=1, dtype=torch.float64)["b"]
    seen = []
    block.self_attn.q_proj.register_forward_hook(lambda module, inputs, output: seen.append(weakref.ref(output.local)))
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            out = block(numbers(2, 4, 12).requires_grad_())
            if backward:
                out.sum().backward()
            assert seen[-1]() is not None or backward
            del out
            assert seen[-1]() is None
    finally:
        gc.enable()


# -- zero bubble -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True])
def test_weight_gradients_may_be_put_off(sequence):
    """As zero-bubble schedules do; the numbers are those of a whole backward pass."""
    graph = graph_of(lambda: models.llama())
    layout = compute_shard_layout(graph, 2)
    x = torch.arange(12).view(2, 6)

    def work(group):
        found = []
        for put_off in (False, True):
            modules = materialise_shard(graph, 0, 4, layout=layout, group=group, seed=1, dtype=torch.float64)
            stash = []
            if put_off:
                for module in modules.values():
                    for part in module.modules():
                        if hasattr(part, "stash"):
                            part.stash = lambda: stash  # noqa: B023
            value = x
            for module in list(modules.values())[:3]:
                value = module(value)
            value.square().sum().backward()
            parameters = {f"{n}.{p}": t for n, m in modules.items() for p, t in m.named_parameters()}
            gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
            names = {id(p): name for name, p in parameters.items()}
            for deferred in stash:
                gradients |= {names[id(parameter)]: gradient for parameter, gradient in deferred.gradients()}
            found.append(gradients)
        return found

    for plain, put_off in on_shards(2, work, sequence=sequence)[0]:
        assert plain.keys() == put_off.keys()
        assert all(torch.equal(plain[name], put_off[name]) for name in plain)


def test_the_whole_model_still_trains_in_one_process_beside_it():
    """Building shards leaves the graph as it was."""
    graph = graph_of(models.dropped)
    x = torch.arange(14).view(2, 7)
    first = whole(graph, models.next_token, x, x)
    compute_shard_layout(graph, 3)
    sharded(graph, compute_shard_layout(graph, 2), models.next_token, x, x)
    again = whole(graph, models.next_token, x, x)
    assert all(torch.equal(first.gradients[name], again.gradients[name]) for name in first.gradients)
    assert isinstance(compute_shard_layout(graph, 2).cuts["h0.c_attn.weight"], TensorCut)
