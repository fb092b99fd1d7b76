"""Every style, on 1 to 4 shards, gives the values and gradients of the whole model (float64, 1e-12 of the largest element,
of what cancels 1e-12 of what was summed)."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers import sharded_models as models
from helpers.kernel_calls import AnotherProcessor
from helpers.on_shards import TOLERANCE, check, error, errors, graph_of, on_shards, sharded, whole
from torch import nn

from examples import gpt
from examples.gpt import Embedding, Linear
from raypar.model.tensor_parallel.build_shard_modules import shard_slice_of
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout

pytestmark = pytest.mark.part(5)

SHARDS = (1, 2, 3, 4)


def ids(vocab: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def squares(output, target):
    return ((output - target) ** 2).sum()


# -- whole models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("heads", [4, 5])
@pytest.mark.parametrize("shards", SHARDS)
def test_the_example_gpt_unchanged(shards, heads, sequence):
    def make():
        return gpt.layers(vocab=37, width=8 * heads, depth=2, heads=heads, context=8)

    check(make, gpt.loss, ids(37, 3, 7), ids(37, 3, 7), shards, sequence=sequence)


@pytest.mark.ci
@pytest.mark.parametrize("length", [1, 2, 3])
def test_sequences_shorter_than_there_are_shards(length):
    for make in (lambda: gpt.layers(23, 20, 2, 5, 8), models.llama, models.dropped):
        check(make, gpt.loss, ids(23, 2, length), ids(23, 2, length), 4, sequence=True)


@pytest.mark.parametrize("length", [1, 2])
def test_on_a_processor_that_rounds_otherwise_what_cancels_is_measured_against_what_was_summed(length):
    graph, x = graph_of(models.llama), ids(23, 2, length)
    layout = compute_shard_layout(graph, 4)
    runs, _ = sharded(graph, layout, gpt.loss, x, x)
    with AnotherProcessor():
        want = whole(graph, gpt.loss, x, x)
    query = "layer0.self_attn.q_proj.weight"
    assert (error(runs[0].gradients[query], shard_slice_of(layout, query, want.gradients[query], 0)) > 0.1) == (length == 1)
    assert max(errors(runs, want, layout).values()) < TOLERANCE
    runs[2].gradients[query] += 1e-9
    assert errors(runs, want, layout)[query] > TOLERANCE


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("form, fused", [("gqa", True), ("expand", False), ("interleave", False), ("manual", True)])
@pytest.mark.parametrize("shards", SHARDS)
def test_llama_with_fewer_key_heads_than_shards_and_tied_embeddings(shards, form, fused, sequence):
    targets = ids(23, 2, 6)
    targets[0, 2:4] = -100
    ties = (("model.embed_tokens.weight", "head.lm_head.weight"),)
    check(
        lambda: models.llama(form=form, fused=fused),
        models.next_token,
        ids(23, 2, 6),
        targets,
        shards,
        sequence=sequence,
        ties=ties,
    )


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("shards", SHARDS)
def test_dropout_masks_do_not_know_of_shards(shards, sequence):
    check(models.dropped, models.next_token, ids(23, 2, 7), ids(23, 2, 7), shards, sequence=sequence)


class MovedHeads(nn.Module):
    """Drops of values whose heads are not the dim in which they lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(6, 8, std=0.5), Linear(8, 6, std=0.5)

    def forward(self, x):
        heads = self.up(x).view(*x.shape[:2], 4, 2).transpose(1, 2)
        heads = F.dropout(heads, 0.3) + F.dropout(heads.relu() * 2, 0.3) + F.dropout(heads.contiguous(), 0.3)
        return self.down(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_a_mask_is_the_same_where_a_shard_has_one_head_of_a_moved_value(shards):
    styles = {"*.up": "heads:4", "*.down": "heads-row:4"}
    check(lambda: [("m", MovedHeads())], squares, numbers(2, 3, 6), numbers(2, 3, 6), shards, styles=styles)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_in_which_shards_run_does_not_matter(seed):
    graph = graph_of(models.dropped)
    layout = compute_shard_layout(graph, 3)
    x, y = ids(23, 2, 7), ids(23, 2, 7)
    first, _ = sharded(graph, layout, models.next_token, x, y, sequence=True)
    other, _ = sharded(graph, layout, models.next_token, x, y, sequence=True, seed=seed)
    for a, b in zip(first, other, strict=True):
        assert all(torch.equal(g, b.gradients[name]) for name, g in a.gradients.items())


# -- linear layers -----------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.up, self.down = Linear(6, hidden, std=0.5), Linear(hidden, 6, std=0.5)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("shards", (2, 3, 4))
def test_a_pair_of_column_and_row_communicates_once_forward_and_once_backward(shards):
    _, ledgers = check(lambda: [("m", MLP())], squares, numbers(5, 4, 6), numbers(5, 4, 6), shards)
    assert [ledger.as_dict().keys() for ledger in ledgers] == [{"all_reduce"}] * shards
    assert [ledger.messages["all_reduce"] for ledger in ledgers] == [2] * shards


def test_seven_features_over_two_shards_are_three_and_four():
    graph = graph_of(lambda: [("m", MLP(7))])
    layout = compute_shard_layout(graph, 2)
    runs, _ = sharded(graph, layout, squares, numbers(2, 3, 6), numbers(2, 3, 6))
    assert [tuple(run.parameters["m.up.weight"].shape) for run in runs] == [(3, 6), (4, 6)]
    assert [tuple(run.parameters["m.down.weight"].shape) for run in runs] == [(6, 3), (6, 4)]
    assert [tuple(run.parameters["m.down.bias"].shape) for run in runs] == [(6,), (6,)]


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("style", ["gathered", "row", "whole"])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6)])
def test_a_linear_alone(shards, style, shape):
    """Partition-output with its output gathered; reduce-output of an input that all have."""
    out = (*shape[:-1], 9)
    check(lambda: [("a", Linear(6, 9, std=0.5))], squares, numbers(*shape), numbers(*out), shards, styles={"a": style})


@pytest.mark.parametrize("shards", (2, 3))
def test_layers_of_a_sequential_by_pattern(shards):
    def make():
        return [("a", nn.Sequential(Linear(6, 9, std=0.5), nn.ReLU(inplace=True), Linear(9, 6, bias=False, std=0.5)))]

    styles = {"a.0": "column", "*.2.weight": "row"}
    check(make, squares, numbers(2, 3, 6), numbers(2, 3, 6), shards, styles=styles)
    check(make, squares, numbers(2, 3, 6), numbers(2, 3, 6), shards, styles=styles, sequence=True)


class Two(nn.Module):
    """Several layers read one value, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = Linear(6, 5, std=0.5), Linear(6, 5, bias=False, std=0.5), Linear(5, 6, std=0.5)

    def forward(self, x):
        return self.w2(self.w1(x).tanh() * self.w3(x) + self.w1(x)) + self.w2(self.w1(x * 2))


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("sequence", [False, True])
def test_layers_that_read_one_value_share_one_collective(shards, sequence):
    _, ledgers = check(lambda: [("m", Two())], squares, numbers(2, 5, 6), numbers(2, 5, 6), shards, sequence=sequence)
    if shards > 1 and not sequence:
        assert ledgers[0].messages["all_reduce"] == 4  # two values read, two sums


@pytest.mark.parametrize("frozen", ["w1", "w3", "w2"])
def test_frozen_layers_and_inputs_without_gradient(frozen):
    def make():
        made = Two()
        getattr(made, frozen).requires_grad_(False)
        return [("m", made)]

    for sequence in (False, True):
        check(make, squares, numbers(2, 5, 6), numbers(2, 5, 6), 2, sequence=sequence)
    check(lambda: [("e", Embedding(5, 6)), *make()], squares, ids(5, 2, 5), numbers(2, 5, 6), 2, styles={"e": "vocabulary"})


# -- attention ---------------------------------------------------------------------------------------------------------


HEADS = [(4, 4), (4, 2), (6, 2), (6, 3), (5, 1), (8, 2), (7, 7)]


@pytest.mark.ci
@pytest.mark.parametrize("form", ["gqa", "expand", "manual"])
@pytest.mark.parametrize("shards, heads", list(product((2, 3, 4), HEADS)), ids=str)
def test_attention_by_heads_that_shards_do_not_divide(shards, heads, form):
    check(
        lambda: [("a", models.Attention(10, *heads, form, norms=False))], squares, numbers(2, 5, 10), numbers(2, 5, 10), shards
    )


@pytest.mark.parametrize("form", ["gqa", "expand", "manual"])
def test_whole_keys_and_values_with_cut_queries(form):
    make = lambda: [("a", models.Attention(10, 5, 1, form, norms=True))]  # noqa: E731
    check(make, squares, numbers(2, 5, 10), numbers(2, 5, 10), 3, styles={"*.[kv]_proj": "whole"})


def test_a_key_head_that_serves_two_shards_is_equal_on_both():
    graph = graph_of(lambda: [("a", models.Attention(10, 4, 1, "gqa", norms=True))])
    layout = compute_shard_layout(graph, 4)
    runs, _ = sharded(graph, layout, squares, numbers(2, 5, 10), numbers(2, 5, 10))
    for name in ("a.k_proj.weight", "a.k_proj.bias", "a.v_proj.weight", "a.q_norm.weight"):
        assert all(torch.equal(run.gradients[name], runs[0].gradients[name]) for run in runs), name
    assert runs[0].partial == {"a.q_norm.weight", "a.k_norm.weight"}


class Biased(models.Attention):
    """With a learned mask, as relative positions have it."""

    def __init__(self, shape: tuple[int, ...], made: str) -> None:
        super().__init__(10, 4, 4, "gqa", norms=False)
        self.k_proj = Linear(10, 16, bias=False, std=0.3)  # attention does not see it: its gradient would be rounding alone
        self.bias, self.made = nn.Parameter(torch.empty(shape)), made
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.bias)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        mask = self.bias if self.made == "as it is" else self.bias.tanh()
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("shape", [(5, 5), (1, 5, 5), (4, 5, 5), (1, 4, 5, 5)], ids=str)
@pytest.mark.parametrize("made", ["as it is", "computed"])
@pytest.mark.parametrize("shards", (2, 3))
def test_a_learned_mask_gets_the_gradients_of_all_heads(shards, made, shape):
    make = lambda: [("a", Biased(shape, made))]  # noqa: E731
    check(make, squares, numbers(2, 5, 10), numbers(2, 5, 10), shards)


@pytest.mark.parametrize("shards", (2, 3))
def test_interleaved_q_k_and_v(shards):
    for sequence in (False, True):
        make = lambda: [("a", models.Interleaved(20, 5))]  # noqa: E731
        check(make, squares, numbers(2, 6, 20), numbers(2, 6, 20), shards, sequence=sequence)


class Norms(nn.Module):
    """Norms and scales on parts: of single heads, of rows, without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.plain = nn.RMSNorm(6), nn.LayerNorm(6, elementwise_affine=False)
        self.up, self.down = Linear(6, 9, std=0.5), Linear(9, 6, std=0.5)
        self.scale = models.RMSNorm(9)

    def forward(self, x):
        h = self.up(self.plain(self.before(x)))
        h = F.layer_norm(h.unflatten(-1, (3, 3)), (3,)).flatten(-2) * self.scale.weight
        return x + self.down(h * torch.linspace(0, 1, 9, dtype=h.dtype)) + x.mean(-1, keepdim=True)


@pytest.mark.parametrize("sequence", [False, True])
def test_norms_and_scales_on_parts(sequence):
    styles = {"n.up": "heads:3", "n.down": "heads-row:3"}
    args = (squares, numbers(2, 5, 6), numbers(2, 5, 6), 2)
    runs, _ = check(lambda: [("n", Norms())], *args, styles=styles, sequence=sequence)
    assert runs[0].partial == {"n.scale.weight"} | ({"n.before.weight"} if sequence else set())


class Written(nn.Module):
    """Writes into what its column layer makes, and reads that under another name."""

    def __init__(self, write) -> None:
        super().__init__()
        self.up, self.down, self.write = Linear(6, 8, std=0.5), Linear(8, 6, std=0.5), write

    def forward(self, x):
        h = self.up(x)
        view = h.view(*h.shape[:-1], 4, 2)
        self.write(view)
        return self.down(h * 2.0)


def add_to(h):
    h += 1.0


def scale_by_each(h):
    h *= torch.linspace(0.5, 1.5, 8, dtype=h.dtype).view(4, 2)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("write", [add_to, scale_by_each, nn.Dropout(0.4, inplace=True), nn.ReLU(inplace=True)])
def test_what_is_written_into_a_part_is_seen_under_its_other_names(write, sequence):
    args = (squares, numbers(2, 5, 6), numbers(2, 5, 6), 2)
    check(lambda: [("n", Written(write))], *args, styles={"n.up": "column", "n.down": "row"}, sequence=sequence)


# -- vocabulary --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("padding", [None, 0, 10])
def test_an_embedding_cut_by_vocabulary_is_exact(shards, padding):
    def make():
        return [("e", nn.Embedding(11, 6, padding_idx=padding))]

    graph = graph_of(make)
    layout = compute_shard_layout(graph, shards, {"e": "vocabulary"})
    x, y = ids(11, 4, 5), numbers(4, 5, 6)
    want = whole(graph, squares, x, y)
    runs, _ = sharded(graph, layout, squares, x, y)
    for shard, run in enumerate(runs):
        assert torch.equal(run.loss, want.loss)
        assert torch.equal(run.gradients["e.weight"], shard_slice_of(layout, "e.weight", want.gradients["e.weight"], shard))


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_cross_entropy_without_gathering_logits(shards, reduction, smoothing):
    def loss(logits, target):
        found = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction=reduction, label_smoothing=smoothing, ignore_index=1
        )
        return (found * torch.arange(1.0, 1.0 + found.numel())).sum() if reduction == "none" else found

    target = ids(13, 3, 5)
    assert (target == 1).any()
    make = lambda: [("a", Linear(6, 13, std=30.0))]  # noqa: E731
    _, ledgers = check(make, loss, numbers(3, 5, 6), target, shards, styles={"a": "vocabulary"})
    rows = 4 if smoothing else 3
    for ledger in ledgers:
        assert ledger.sent["all_gather"] == (shards - 1) * rows * 15 * 8
        assert ledger.sent["all_reduce"] <= 4 * 15 * 6 * 8  # the input's gradient only


def test_logits_with_classes_in_the_second_dim():
    make = lambda: [("a", Linear(6, 13, std=3.0))]  # noqa: E731
    check(
        make, lambda o, t: F.cross_entropy(o.transpose(1, 2), t), numbers(3, 5, 6), ids(13, 3, 5), 3, styles={"a": "vocabulary"}
    )


def test_very_large_logits_do_not_overflow():
    make = lambda: [("a", Linear(6, 13, std=1e5))]  # noqa: E731
    runs, _ = check(make, gpt.loss, numbers(2, 3, 6), ids(13, 2, 3), 3, styles={"a": "vocabulary"})
    assert torch.isfinite(runs[0].loss) and runs[0].loss > 1e4


def test_a_shard_all_of_whose_vocabulary_is_masked_adds_nothing():
    def loss(logits, target):
        return F.cross_entropy(logits.masked_fill(torch.arange(13) > 7, float("-inf")).flatten(0, 1), target.flatten())

    make = lambda: [("a", Linear(6, 13, std=3.0))]  # noqa: E731
    runs, _ = check(make, loss, numbers(3, 5, 6), ids(8, 3, 5), 3, styles={"a": "vocabulary"})
    assert torch.isfinite(runs[0].loss)


# -- without gradients, in lower precision -----------------------------------------------------------------------------


def test_evaluation_is_the_whole_models():
    from raypar.model.materialise import materialise
    from raypar.model.tensor_parallel.build_shard_modules import materialise_shard, sharded_loss

    graph, x, y = graph_of(models.dropped), ids(23, 2, 7), ids(23, 2, 7)
    layout = compute_shard_layout(graph, 2)

    def evaluate(modules, loss):
        value = x
        with torch.no_grad():
            for module in modules.values():
                value = module.eval()(value)
            return loss(value, y)

    want = evaluate(materialise(graph, 0, 4, seed=1, dtype=torch.float64), models.next_token)
    for sequence in (False, True):
        found, _ = on_shards(
            2,
            lambda group: evaluate(
                materialise_shard(graph, 0, 4, layout=layout, group=group, seed=1, dtype=torch.float64),
                sharded_loss(models.next_token, group, graph.loss_inputs),
            ),
            sequence=sequence,
        )
        assert max(error(loss, want) for loss in found) < 1e-12


@pytest.mark.parametrize("sequence", [False, True])
def test_bfloat16_trains(sequence):
    graph, x, y = graph_of(lambda: gpt.layers(37, 32, 2, 4, 8)), ids(37, 2, 7), ids(37, 2, 7)
    layout = compute_shard_layout(graph, 2)
    want = whole(graph, gpt.loss, x, y, dtype=torch.bfloat16)
    runs, _ = sharded(graph, layout, gpt.loss, x, y, sequence=sequence, dtype=torch.bfloat16)
    assert error(runs[0].loss.double(), want.loss.double()) < 0.02
    assert all(g.dtype == torch.bfloat16 and torch.isfinite(g).all() for g in runs[0].gradients.values())
