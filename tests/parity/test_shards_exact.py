"""A sharded run has the bits of a same-shards reference in one process, and moves exactly the bytes of Megatron's formulas."""

import pytest
import torch
from helpers import sharded_models as models
from helpers.on_shards import SEED, graph_of, on_shards, sharded, train_once
from helpers.same_shards import gpt_on_shards, gpt_slices, in_order, over_shards

from examples import gpt
from raypar.model.layer_skeletons import parameter_shapes
from raypar.model.materialise import materialise
from raypar.model.tensor_parallel.build_shard_modules import materialise_shard, sharded_loss
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.linear import ColumnLinear
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.plan.shard_ranges import even_ranges_by_shard
from raypar.worker.stage.sum_gradients_over_shards import sum_partial_gradients

pytestmark = pytest.mark.part(4)

SHARDS = (2, 3, 4)


def ids(vocab: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("shards", SHARDS)
def test_loss_and_gradients_have_the_bits_of_the_same_shards_in_one_process(shards, sequence, dtype):
    heads, vocab = 5, 37
    graph = graph_of(lambda: gpt.layers(vocab, 8 * heads, 2, heads, 8))
    layout = compute_shard_layout(graph, shards)
    x, y = ids(vocab, 3, 7), ids(vocab, 3, 7).flip(0)
    runs, _ = sharded(graph, layout, gpt.loss, x, y, sequence=sequence, dtype=dtype)
    modules = materialise(graph, 0, len(graph.layers), seed=SEED, dtype=dtype)
    state = {f"{layer}.{path}": p.detach() for layer, m in modules.items() for path, p in m.named_parameters()}
    slices = gpt_slices(state, heads, shards)
    loss, gradients = gpt_on_shards(slices, x, y, depth=2, heads=heads, shards=shards, sequence=sequence)
    if sequence:  # the norms' gradients are parts of sums
        for name in [name for name in gradients[0] if ".norm" in name]:
            whole = over_shards([mine[name] for mine in gradients])
            for mine in gradients:
                mine[name] = whole
    for run, want in zip(runs, gradients, strict=True):
        assert torch.equal(run.loss, loss)
        assert set(run.gradients) == set(want)
        different = [name for name, gradient in want.items() if not torch.equal(run.gradients[name], gradient)]
        assert not different


@pytest.mark.parametrize("together", [True, False], ids=["one sum", "a sum each"])
@pytest.mark.parametrize("shards", SHARDS)
def test_the_gradients_of_what_q_k_and_v_read_are_added_latest_first_over_the_tree_of_shards(shards, together):
    width, features = 64, 12
    generator = torch.Generator().manual_seed(1)
    weights, gradients = (
        {name: torch.randn(shape, generator=generator) for name in "qkv"} for shape in [(features, width), (35, features)]
    )
    held = even_ranges_by_shard(features, shards)

    def work(group: ShardGroup) -> torch.Tensor:
        ((start, stop),) = held[group.shard]
        x, made = torch.ones(35, width, requires_grad=True), []
        for name in "qkv":
            linear = torch.nn.Linear(width, stop - start, bias=False)
            linear.weight = torch.nn.Parameter(weights[name][start:stop].clone())
            made.append(ColumnLinear(linear, name, group, held[group.shard], shares_input=together)(x).local)
        torch.autograd.backward(made, [gradients[name][:, start:stop].contiguous() for name in "qkv"])
        return x.grad

    def part(name: str, shard: int) -> torch.Tensor:
        ((start, stop),) = held[shard]
        return gradients[name][:, start:stop].contiguous() @ weights[name][start:stop]

    by_shard = [[part(name, shard) for name in "vkq"] for shard in range(shards)]
    if together:
        want = over_shards([in_order(parts) for parts in by_shard])
    else:
        want = in_order([over_shards(parts) for parts in zip(*by_shard, strict=True)])
    assert all(torch.equal(found, want) for found in on_shards(shards, work)[0])


# -- the ledger --------------------------------------------------------------------------------------------------------

B, S, V, DEPTH = 2, 24, 48, 3


def ledgers_of(shards: int, sequence: bool, heads: int = 12, width: int = 48):
    graph = graph_of(lambda: gpt.layers(V, width, DEPTH, heads, S))
    layout = compute_shard_layout(graph, shards)
    _, ledgers = sharded(graph, layout, gpt.loss, ids(V, B, S), ids(V, B, S), sequence=sequence)
    return [ledger.as_dict() for ledger in ledgers], width


@pytest.mark.parametrize("shards", SHARDS)
def test_four_all_reduces_a_layer_of_batch_times_sequence_times_width(shards):
    """Ring formula: 2 (t-1)/t n bytes a shard and all-reduce; beside the layers' one for the embedding, one for the head."""
    ledgers, width = ledgers_of(shards, sequence=False)
    n, count = B * S * width * 8, 4 * DEPTH + 2
    for ledger in ledgers:
        assert ledger["all_reduce"]["messages"] == count
        assert ledger["all_reduce"]["sent"] == ledger["all_reduce"]["received"] == count * 2 * (shards - 1) * n // shards
        assert ledger["all_gather"] == {
            "messages": 1,  # the loss: maximum, sum and target's logit of every token
            "sent": (shards - 1) * 3 * B * S * 8,
            "received": (shards - 1) * 3 * B * S * 8,
        }
        assert set(ledger) == {"all_reduce", "all_gather"}


@pytest.mark.parametrize("shards", SHARDS)
def test_sequence_parallelism_moves_the_same_volume_as_all_gather_and_reduce_scatter(shards):
    ledgers, width = ledgers_of(shards, sequence=True)
    n, count = B * S * width * 8, 4 * DEPTH + 2
    half = (shards - 1) * n // shards
    for ledger in ledgers:
        loss = (shards - 1) * 3 * B * S * 8
        assert ledger["reduce_scatter"] == {"messages": count, "sent": count * half, "received": count * half}
        assert ledger["all_gather"] == {"messages": count + 1, "sent": count * half + loss, "received": count * half + loss}
        # The positions' gradient, [S, width]: all shards add them to their own part of the sequence.
        assert ledger["all_reduce"]["sent"] == 2 * (shards - 1) * S * width * 8 // shards
        assert ledger["all_reduce"]["messages"] == 1


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("shards", SHARDS)
def test_ragged_shards_move_the_same_volume_in_all(shards, sequence):
    graph = graph_of(lambda: gpt.layers(V + 1, 40, DEPTH, 5, S))
    layout = compute_shard_layout(graph, shards)
    _, ledgers = sharded(graph, layout, gpt.loss, ids(V, 3, 23), ids(V, 3, 23), sequence=sequence)
    n, count = 3 * 23 * 40 * 8, 4 * DEPTH + 2
    for way in ("sent", "received"):
        total = sum(sum(values[way] for values in ledger.as_dict().values()) for ledger in ledgers)
        loss = shards * (shards - 1) * 3 * 3 * 23 * 8
        assert total == count * 2 * (shards - 1) * n + loss + (2 * (shards - 1) * 23 * 40 * 8 if sequence else 0)


@pytest.mark.parametrize("shards", SHARDS)
def test_separate_q_k_v_and_gates_cost_no_more_than_fused_ones(shards):
    graph = graph_of(lambda: models.llama(norms=False))
    layout = compute_shard_layout(graph, shards)
    _, ledgers = sharded(graph, layout, models.next_token, ids(23, 4, 24), ids(23, 4, 24))
    assert [ledger.messages["all_reduce"] for ledger in ledgers] == [4 * 2 + 2] * shards


def test_partial_gradients_are_completed_in_one_message_a_step():
    """Norms under sequence parallelism: 4 a block and 2 of the head, [width] each."""
    graph = graph_of(lambda: gpt.layers(V, 48, DEPTH, 12, S))
    layout = compute_shard_layout(graph, 2)
    x, y = ids(V, B, S), ids(V, B, S)

    def work(group):
        from raypar.comm import blocking_code_as_routine

        modules = materialise_shard(graph, 0, DEPTH + 2, layout=layout, group=group, seed=1, dtype=torch.float64)
        run = train_once(graph, modules, sharded_loss(gpt.loss, group, graph.loss_inputs), x, y)
        partial = {name for name in run.gradients if "norm" in name}
        assert {id(p) for p in group.partially_used_parameters.values()} == {
            id(p) for m in modules.values() for name, p in m.named_parameters() if "norm" in name
        }
        before = group.transport.ledger.as_dict()["all_reduce"]
        for wait in sum_partial_gradients(run.gradients, partial=partial, cuts=layout.cuts, group=group):
            blocking_code_as_routine.wait_for_handle(wait.handle, wait.what)
        after = group.transport.ledger.as_dict()["all_reduce"]
        return {key: after[key] - before[key] for key in after}

    found, _ = on_shards(2, work, sequence=True)
    assert found == [{"messages": 1, "sent": (4 * DEPTH + 2) * 48 * 8, "received": (4 * DEPTH + 2) * 48 * 8}] * 2


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", SHARDS)
def test_shards_hold_their_part_of_what_is_cut_and_all_of_the_rest(shards):
    graph = graph_of(lambda: gpt.layers(48, 48, 2, 12, 8))
    layout = compute_shard_layout(graph, shards)
    sizes = {name: shape.numel() for name, shape in parameter_shapes(graph).items()}
    rest = 2 * (4 * 48 + 2 * 48) + 2 * 48 + 8 * 48  # norms and biases of row layers, the last norm, positions
    assert sum(size for name, size in sizes.items() if name not in layout.cuts) == rest
    found, _ = on_shards(
        shards,
        lambda group: sum(
            p.numel()
            for m in materialise_shard(graph, 0, 4, layout=layout, group=group, seed=1, dtype=torch.float32).values()
            for p in m.parameters()
        ),
    )
    assert found == [rest + (sum(sizes.values()) - rest) // shards] * shards
