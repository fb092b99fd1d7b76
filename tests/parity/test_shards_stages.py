"""Shards of a stage: what comes in and goes out is whole, layers recompute, and real transports give the same bits."""

import threading
from typing import Any

import pytest
import torch
from helpers import sharded_models as models
from helpers.on_shards import SEED, check, error, graph_of, on_shards, partial_names, sharded, whole
from helpers.transport_cases import CREDENTIAL
from torch import nn
from torch.utils.checkpoint import checkpoint

from examples import gpt
from raypar.comm import blocking_code_as_routine
from raypar.comm.local_transport import LocalMesh
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.errors import GroupAborted, ModelError
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import canonical_names
from raypar.model.materialise import materialise
from raypar.model.tensor_parallel.build_shard_modules import materialise_shard, shard_slice_of, sharded_loss
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.shard_group import ShardGroup
from raypar.worker.stage.sum_gradients_over_shards import sum_partial_gradients

pytestmark = pytest.mark.part(4)

X = torch.arange(14).view(2, 7) % 23


def two_stages(graph, layout, cut, loss, *, sequence):
    """Both stages of every shard in one routine; values and gradients between them as they would be sent."""

    def work(group):
        groups = [ShardGroup(group.transport, group.ranks, channel=c, sequence_parallel=sequence) for c in (5, 6)]
        bounds = [(0, cut), (cut, len(graph.layers))]
        stages = [
            materialise_shard(graph, *b, layout=layout, group=g, seed=SEED, dtype=torch.float64)
            for b, g in zip(bounds, groups, strict=True)
        ]

        def forward(number, value):
            for i in range(*bounds[number]):
                torch.manual_seed(SEED + i)
                value = stages[number][graph.layers[i].name](value)
            return value

        sent = forward(0, X)
        received = sent.detach().requires_grad_()
        total = sharded_loss(loss, groups[1], graph.loss_inputs)(forward(1, received), X)
        total.backward()
        sent.backward(received.grad)
        canonical = canonical_names(graph)
        gradients = {
            canonical.get(f"{layer}.{path}", f"{layer}.{path}"): p.grad
            for modules in stages
            for layer, m in modules.items()
            for path, p in m.named_parameters()
        }
        partial = set().union(*(partial_names(m, g, canonical) for m, g in zip(stages, groups, strict=True)))
        for wait in sum_partial_gradients(gradients, partial=partial, cuts=layout.cuts, group=group):
            blocking_code_as_routine.wait_for_handle(wait.handle, wait.what)
        return total.detach(), sent.detach(), received.grad, gradients

    return on_shards(layout.shards, work)[0]


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("shards", [2, 3])
def test_values_and_gradients_between_stages_are_whole_on_every_shard(shards, cut, sequence):
    graph = graph_of(models.dropped)
    layout = compute_shard_layout(graph, shards)
    found = two_stages(graph, layout, cut, models.next_token, sequence=sequence)
    want = whole(graph, models.next_token, X, X)
    for shard, (loss, sent, back, gradients) in enumerate(found):
        assert sent.shape == (2, 7, 20) and torch.equal(sent, found[0][1]) and torch.equal(back, found[0][2])
        assert error(loss, want.loss) < 1e-12
        for name, gradient in want.gradients.items():
            assert error(gradients[name], shard_slice_of(layout, name, gradient, shard)) < 1e-12, name


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = gpt.Block(12, 3, 2)

    def forward(self, x, first):
        return self.block(x) + first, first * 2


@pytest.mark.parametrize("sequence", [False, True])
def test_values_that_skip_layers_and_layers_of_several_outputs(sequence):
    class Ends(nn.Module):
        def forward(self, x, y, first):
            return x + y * first

    layers = (
        Layer("a", lambda: gpt.Block(12, 3, 2), ("x",), ("v",)),
        Layer("b", Skip, ("v", "v"), ("w", "twice")),
        Layer("c", Ends, ("w", "twice", "v"), ("out",)),
    )
    graph = Graph(layers, "out")

    def run(modules, loss, x):
        v = modules["a"](x)
        w, twice = modules["b"](v, v)
        out = loss(modules["c"](w, twice, v), None)
        out.backward()
        return out.detach(), x.grad

    def value():
        return torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def loss(output, _):
        return (output**2).sum()

    want = run(materialise(graph, 0, 3, seed=1, dtype=torch.float64), loss, value())
    layout = compute_shard_layout(graph, 3)

    def work(group):
        modules = materialise_shard(graph, 0, 3, layout=layout, group=group, seed=1, dtype=torch.float64)
        return run(modules, sharded_loss(loss, group, graph.loss_inputs), value())

    for got in on_shards(3, work, sequence=sequence)[0]:
        assert error(got[0], want[0]) < 1e-12 and error(got[1], want[1]) < 1e-12


class Recomputed(nn.Module):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.block = models.DroppedBlock(20, 5, 0.3)

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def recomputing(reentrant):
    kind = type("Recomputed", (Recomputed,), {"reentrant": reentrant})
    return lambda: [
        ("embed", models.DroppedTokens(23, 8, 20, 0.3)),
        ("a", kind()),
        ("b", kind()),
        ("head", models.Output(20, 23)),
    ]


@pytest.mark.parametrize("reentrant, sequence", [(False, False), (False, True), (True, False)])
def test_layers_that_recompute_run_their_collectives_again(reentrant, sequence):
    _, ledgers = check(recomputing(reentrant), models.next_token, X, X, 2, sequence=sequence)
    assert not sequence or ledgers[0].messages["reduce_scatter"] > 4 * 2 + 2


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_of_a_part_of_the_sequence_is_refused():
    graph = graph_of(recomputing(True))
    with pytest.raises(ModelError, match="is used without gradients") as caught:
        sharded(graph, compute_shard_layout(graph, 2), models.next_token, X, X, sequence=True)
    assert "use_reentrant=False" in caught.value.cure


@pytest.mark.parametrize("sequence", [False, True])
def test_sockets_give_the_bits_of_the_local_transport(sequence):
    """Every shard in a thread that blocks, as in a worker's process."""
    graph = graph_of(lambda: models.llama())
    layout = compute_shard_layout(graph, 3)
    want, _ = sharded(graph, layout, models.next_token, X[:, :6], X[:, :6], sequence=sequence)
    meshes = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(3)]
    addresses = [mesh.address for mesh in meshes]
    ends: list[Any] = [None] * 3
    stages: list[Any] = [None] * 3
    found: list[Any] = [None] * 3

    def connect(shard):
        mesh = meshes[shard]
        ends[shard] = mesh.connect(rank=shard, size=3, addresses=addresses, generation=1, deadline_s=60.0)

    def train(shard):
        value = X[:, :6]
        for module in stages[shard].values():
            value = module(value)
        total = sharded_loss(models.next_token, groups[shard], graph.loss_inputs)(value, X[:, :6])
        total.backward()
        found[shard] = total.detach()

    def in_threads(work):
        threads = [threading.Thread(target=work, args=(shard,)) for shard in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)

    try:
        in_threads(connect)
        groups = [ShardGroup(t, range(3), sequence_parallel=sequence, timeout_s=60.0) for t in ends]
        for shard, group in enumerate(groups):  # one after the other: initialisation seeds torch's generator
            stages[shard] = materialise_shard(graph, 0, 4, layout=layout, group=group, seed=SEED, dtype=torch.float64)
        in_threads(train)
        for shard, run in enumerate(want):
            assert torch.equal(found[shard], run.loss)
            for layer, module in stages[shard].items():
                for path, parameter in module.named_parameters():
                    name = f"{layer}.{path}"
                    if name not in run.partial and not (name in layout.cuts and layout.cuts[name].shared):
                        assert torch.equal(parameter.grad, run.gradients[name]), name
    finally:
        for end in (*ends, *meshes):
            if end is not None:
                end.close()


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("sequence", [False, True])
def test_an_abort_frees_a_shard_that_waits_inside_a_layer(sequence, when):
    """Also from inside autograd, with the error of the transport."""
    graph = graph_of(lambda: models.llama())
    mesh = LocalMesh(2)
    groups = [ShardGroup(t, range(2), sequence_parallel=sequence, timeout_s=60.0) for t in mesh.transports]
    layout = compute_shard_layout(graph, 2)
    stages = [materialise_shard(graph, 0, 4, layout=layout, group=g, seed=SEED, dtype=torch.float64) for g in groups]
    caught: list[Any] = []

    def forward(shard):
        value = X[:, :6]
        for module in stages[shard].values():
            value = module(value)
        return sharded_loss(models.next_token, groups[shard], graph.loss_inputs)(value, X[:, :6])

    def survivor():
        try:
            forward(0).backward()
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=survivor)
    thread.start()
    if when == "backward":
        forward(1)
    mesh.abort("shard 1 died")
    thread.join(60)
    assert not thread.is_alive() and [type(error) for error in caught] == [GroupAborted]
    assert caught[0].what == "shard 1 died"
