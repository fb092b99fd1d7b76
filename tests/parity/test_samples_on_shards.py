"""The samples of one microbatch on several shards: layers are whole, batch norms know all samples, the loss gets them all."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import on_shards
from helpers.model_zoo import ids
from helpers.virtual_shards import divided
from torch import Tensor, nn

import raypar
from examples import gpt
from raypar.errors import ModelError, PlanError
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.meta_check import check_shards_on_meta
from raypar.plan import ParallelPlan
from raypar.plan.addition_tree import fold_tree
from raypar.plan.shard_ranges import even_ranges_by_shard
from raypar.worker.check_model_can_shard import check_model_can_shard
from raypar.worker.check_samples_on_shards import check_samples_suffice
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

SAMPLES = {"samples": "shards"}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Images(nn.Module):
    """Convolutions with every kind of norm, pooling, then dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.groups = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.GroupNorm(2, 4)
        self.flat, self.last, self.out = nn.BatchNorm1d(16), nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.adaptive_avg_pool2d(F.max_pool2d(torch.sigmoid(self.groups(self.second(x))), 2), 2)
        return self.out(self.last(self.flat(x.flatten(1))))


def contrastive(made: Tensor, target: Tensor) -> Tensor:
    """Each sample against all others (InfoNCE): a loss that mixes samples."""
    scores = F.normalize(made, dim=-1) @ F.normalize(target, dim=-1).t()
    return F.cross_entropy(scores / 0.1, torch.arange(len(made)))


@pytest.mark.parametrize("shards", [2, 3])
def test_batch_norms_have_the_statistics_of_all_samples_and_the_loss_gets_all(shards):
    graph = on_shards.graph_of(lambda: [("images", Images())])
    layout = compute_shard_layout(graph, shards, None, SAMPLES)
    assert layout.divides_samples and not layout.cuts
    assert {share.compute for share in layout.costs["images.out"]} == {1 / shards}
    x, y = numbers(5, 3, 6, 6), numbers(5, 5)
    whole = on_shards.whole(graph, contrastive, x, y)
    runs, _ = on_shards.sharded(graph, layout, contrastive, x, y)
    assert max(on_shards.errors(runs, whole, layout).values()) <= 1e-12


@pytest.mark.parametrize("shards", [2, 3])
def test_a_gpt_on_samples_has_the_gradients_of_the_whole_one(shards):
    graph = on_shards.graph_of(lambda: gpt.layers(13, 24, 2, 3, 6))
    layout = compute_shard_layout(graph, shards, None, SAMPLES)
    x, y = ids(5, 6, 13), ids(5, 6, 13)
    whole = on_shards.whole(graph, gpt.loss, x, y)
    runs, ledgers = on_shards.sharded(graph, layout, gpt.loss, x, y)
    assert max(on_shards.errors(runs, whole, layout).values()) <= 1e-12
    assert ledgers[0].messages["all_gather"] == 1, "the output alone, for the loss"


class Recurrent(nn.Module):
    """A recurrent layer over sequences, with a state or without, and a head."""

    def __init__(self, kind: type[nn.RNNBase], batch_first: bool, has_state: bool, **more: object) -> None:
        super().__init__()
        self.rnn, self.has_state = kind(4, 6, batch_first=batch_first, **more), has_state
        self.head = nn.Linear(6 * (1 + self.rnn.bidirectional), 3)

    def forward(self, x: Tensor) -> Tensor:
        given = x if self.rnn.batch_first else x.transpose(0, 1)
        _, last = self.rnn(given) if self.has_state else (None, None)
        out, state = self.rnn(given, last)
        out = out if self.rnn.batch_first else out.transpose(0, 1)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.head(out).mean(1) + hidden.sum(0)[:, :3]


RECURRENT = {
    "LSTM": (nn.LSTM, True, False, {}),
    "LSTM with a state": (nn.LSTM, True, True, {}),
    "LSTM, sequences first": (nn.LSTM, False, True, {}),
    "GRU of two layers in both directions": (nn.GRU, True, True, {"num_layers": 2, "bidirectional": True}),
    "RNN": (nn.RNN, True, False, {"nonlinearity": "relu"}),
}


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("shards", [2, 3])
def test_recurrent_layers_take_each_sample_by_itself(kind, shards):
    *given, more = RECURRENT[kind]
    graph = on_shards.graph_of(lambda: [("rnn", Recurrent(*given, **more))])
    layout = compute_shard_layout(graph, shards, None, SAMPLES)
    x, y = numbers(5, 7, 4), numbers(5, 3)
    whole = on_shards.whole(graph, contrastive, x, y)
    runs, _ = on_shards.sharded(graph, layout, contrastive, x, y)
    assert max(on_shards.errors(runs, whole, layout).values()) <= 1e-12


class Pairs:
    """An image, and a vector that belongs to it."""

    def __init__(self, dtype: str = "float32") -> None:
        self._dtype = getattr(torch, dtype)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return tuple(torch.randn(*shape, generator=generator).to(self._dtype) for shape in ((3, 6, 6), (5,)))


class Network(Images):
    """The same with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.norm(self.first(x))), 0.2, self.training)
        x = F.adaptive_avg_pool2d(F.max_pool2d(torch.sigmoid(self.groups(self.second(x))), 2), 2)
        return self.out(self.last(F.dropout(self.flat(x.flatten(1)), 0.2, self.training)))


class Reading(nn.Module):
    """A recurrent layer over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(18, 12, num_layers=2, batch_first=True), nn.Linear(12, 5)
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.rnn(x.transpose(1, 2).flatten(2))[0].mean(1)))


def trained(
    plan: Callable[[int], ParallelPlan], schedule: str = "1f1b", dtype: str = "float32", model: type[nn.Module] = Network
) -> dict[str, list[Tensor]]:
    """Parameters and buffers after two steps."""
    fixed = {"loss": contrastive, "optimizer": ("torch.optim:SGD", {"lr": 0.1}), "plan": {"layout": SAMPLES}, "dtype": dtype}
    data = Pairs, {"dtype": dtype}
    job = raypar.Trainer(model=model, steps=2, batch_size=10, microbatches=2, data=data, **fixed).job
    graph = make_layer_graph(job)
    with OneProcessRun(job, plan(len(graph.layers)), schedule, graph=graph) as run:
        for step in range(job.steps):
            run.step(step)
        return run.parameters() | run.buffers()


@pytest.mark.parametrize(
    "plan",
    [
        lambda n: ParallelPlan.mesh(tp=4, pp=2, layers=n),
        lambda n: divided(ParallelPlan.mesh(tp=2, layers=n), (1, 3)),
        pytest.param(lambda n: divided(ParallelPlan.mesh(layers=n, dp=2), (4,)), marks=pytest.mark.part(5)),
        pytest.param(lambda n: ParallelPlan.mesh(tp=4, pp=3, layers=n), marks=pytest.mark.part(6)),
    ],
    ids=["two stages", "one and three parts", "one worker, replicas", "three stages"],
)
@pytest.mark.parametrize("model", [Network, Reading])
def test_the_bits_are_those_of_the_parts_whoever_computes_them(model, plan):
    want = trained(lambda n: ParallelPlan.mesh(tp=4, layers=n), model=model)
    found = trained(plan, model=model)
    assert found.keys() == want.keys()
    for name, copies in found.items():
        assert all(torch.equal(copy, want[name][0]) for copy in (*copies, *want[name])), name


def dense() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 5))


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_the_gradients_have_the_bits_of_plain_pytorch_on_each_part(shards):
    """Each part of the outputs goes back by itself; what the parts give is added over the tree of shards."""
    graph = on_shards.graph_of(lambda: [("d", dense())])
    x, y = torch.randn(7, 7), torch.randn(7, 5)
    runs, _ = on_shards.sharded(
        graph, compute_shard_layout(graph, shards, None, SAMPLES), contrastive, x, y, dtype=torch.float32
    )
    plain = dense()
    plain.load_state_dict({name.removeprefix("d."): value for name, value in runs[0].parameters.items()})
    parts = [x[a:b].clone() for ((a, b),) in even_ranges_by_shard(7, shards)]
    outputs = [plain(part) for part in parts]
    whole = torch.cat(outputs).detach().requires_grad_()
    contrastive(whole, y).backward()
    found = []
    for output, gradient in zip(outputs, whole.grad.split([len(part) for part in parts]), strict=True):
        found.append(torch.autograd.grad(output, list(plain.parameters()), gradient.clone()))
    for number, (name, _) in enumerate(plain.named_parameters()):
        total = fold_tree({(t, t + 1): each[number] for t, each in enumerate(found)}, (0, shards), Tensor.add)
        assert all(torch.equal(run.gradients[f"d.{name}"], total) for run in runs), name


def test_the_numbers_are_those_of_whole_microbatches():
    """Running statistics and the masks of dropout, too."""
    want, found = (trained(lambda n, t=t: ParallelPlan.mesh(tp=t, layers=n), dtype="float64") for t in (1, 3))
    for name, (whole,) in want.items():
        torch.testing.assert_close(found[name][0], whole, rtol=1e-11, atol=1e-12)


class Mixing(nn.Module):
    """Subtracts the mean over the samples."""

    def __init__(self, of_samples: bool) -> None:
        super().__init__()
        self.linear, self.of_samples = nn.Linear(4, 4), of_samples
        self.table = nn.Parameter(torch.ones(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.mean(0)) if self.of_samples else self.table * 2


@pytest.mark.parametrize(
    ("of_samples", "says"),
    [(True, r"mean of a value \[5, 4\].*\(the samples: plan\.layout\)"), (False, "which does not depend on the samples")],
)
def test_what_mixes_samples_in_a_layer_is_refused_with_the_cure(of_samples, says):
    graph = on_shards.graph_of(lambda: [("m", Mixing(of_samples))])
    layout = compute_shard_layout(graph, 2, None, SAMPLES)
    with pytest.raises(ModelError, match=says) as error:
        on_shards.sharded(graph, layout, F.mse_loss, numbers(5, 4), numbers(5, 4))
    assert "samples out of plan.layout" in error.value.cure


def test_samples_share_the_shards_with_no_other_dimension():
    graph = on_shards.graph_of(lambda: gpt.layers(13, 24, 2, 3, 6))
    with pytest.raises(PlanError, match=r"plan\.layout divides samples, and heads, over the same shards"):
        compute_shard_layout(graph, 2, None, SAMPLES | {"heads": "shards"})
    with pytest.raises(PlanError, match=r"plan\.layout divides samples, and plan\.styles layers"):
        compute_shard_layout(graph, 2, {"*.up": "column"}, SAMPLES)
    assert compute_shard_layout(graph, 2, {"*.up": "whole"}, SAMPLES | {"heads": "whole"}).divides_samples


T, WIDTH = 4, 6


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], T, 2, WIDTH // 2).transpose(1, 2)


def masked(x: Tensor, **more: float) -> Tensor:
    """Of which the mask is made for all samples at once, and the arguments have names, in another order."""
    mask = torch.arange(x.shape[0]).view(-1, 1, 1, 1) + 1 > torch.arange(T)
    return F.scaled_dot_product_attention(value=heads(x), key=heads(x), query=heads(x), attn_mask=mask, **more)


WITH_NAMES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "attention, a mask of all samples": lambda model, x: masked(x).transpose(1, 2).flatten(2),
    "attention with dropout": lambda model, x: masked(x, dropout_p=0.4).transpose(1, 2).flatten(2),
    "attention of learned queries": lambda model, x: F.scaled_dot_product_attention(
        model.queries.expand(x.shape[0], T, WIDTH), x, x, torch.linspace(-1, 1, x.shape[0], dtype=x.dtype).view(-1, 1, 1)
    ),
    "products": lambda model, x: torch.bmm(input=torch.matmul(input=x, other=x.transpose(1, 2)), mat2=x),
    "cat and where": lambda model, x: torch.where(condition=x > 0, input=torch.cat(tensors=[x, x], dim=1)[:, T:], other=x),
}


class Named(nn.Module):
    """One of these functions between two dense layers."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.into, self.out = what, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.queries = nn.Parameter(torch.randn(T, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(WITH_NAMES[self.what](self, self.into(x)))


@pytest.mark.parametrize("what", WITH_NAMES)
def test_arguments_with_names_and_tensors_made_for_all_samples_have_the_numbers_of_the_whole(what):
    graph = on_shards.graph_of(lambda: [("m", Named(what))])
    layout = compute_shard_layout(graph, 2, None, SAMPLES)
    x, y = numbers(5, T, WIDTH), numbers(5, T, WIDTH)
    whole = on_shards.whole(graph, F.mse_loss, x, y)
    runs, _ = on_shards.sharded(graph, layout, F.mse_loss, x, y)
    assert max(on_shards.errors(runs, whole, layout).values()) <= 1e-12


class ByName(nn.Module):
    """Gives a method its argument by name."""

    def forward(self, x: Tensor) -> Tensor:
        return x.matmul(other=torch.ones(4, 4))


def test_what_fails_only_for_having_some_samples_is_one_error_before_the_run():
    graph = on_shards.graph_of(lambda: [("m", ByName())])
    layout, x = compute_shard_layout(graph, 2, None, SAMPLES), torch.randn(4, 4)
    said = r"layer 'm' \(test_samples_on_shards.py, line \d+: .*\): on 2 shards, .* TypeError"
    with pytest.raises(ModelError, match=said) as error:
        check_shards_on_meta(graph, layout, F.mse_loss, {"x": x, "y": x}, "y")
    assert "samples out of plan.layout" in error.value.cure


class ReadsNumbers(nn.Module):
    """Reads a number of its own, which tensors without numbers do not have, and then fails on some samples alone, or not."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(6, 5), fails

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.mean((1, 2)) * (1.0 + (self.linear.weight.max().item() > 0)))
        return x.matmul(other=torch.ones(5, 5)) if self.fails else x


def reading(fails: bool) -> list[tuple[str, nn.Module]]:
    return [("m", ReadsNumbers(fails=fails))]


def test_code_that_reads_numbers_is_tried_on_some_samples_with_numbers():
    def checked(fails: bool) -> tuple[str, ...]:
        job = raypar.Trainer(
            model=(reading, {"fails": fails}),
            loss=contrastive,
            data=Pairs,
            plan={"layout": SAMPLES},
            steps=1,
            batch_size=8,
            microbatches=2,
        ).job
        return check_model_can_shard(job, preflight(job), ParallelPlan.mesh(tp=2, layers=1))

    assert checked(False) == ()
    said = r"do not compute on 2 shards what they compute whole: in the first microbatch .*layer 'm'(.|\n)*TypeError"
    with pytest.raises(ModelError, match=said) as error:
        checked(True)
    assert "samples out of plan.layout" in error.value.cure


def test_packed_samples_are_not_divided():
    job = raypar.Trainer(
        model=Images, loss=contrastive, data={"function": Pairs, "pack": {"to": 12}}, steps=1, batch_size=8, microbatches=2
    ).job
    with pytest.raises(PlanError, match=r"over 2 shards, and data\.pack puts several into a row") as error:
        check_samples_suffice(job, 2)
    assert error.value.cure == "use data.pad, or take samples out of plan.layout"


class WithToken(Images):
    """Puts a value in front that is made for all samples: one sample alone cannot be told from what is the same for all."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([torch.zeros(x.shape[0], 3, 1, 6), x], 2))


@pytest.mark.parametrize(
    ("samples", "own_batch", "says"),
    [
        (1, None, r"give validation 4 samples or more; or use fewer shards"),
        pytest.param(9, 1, r"set validation.batch_size: 8, or more; or use fewer shards", marks=pytest.mark.part(5)),
    ],
)
def test_a_validation_of_fewer_samples_than_shards_is_right_or_one_error_before_the_run(samples, own_batch, says):
    def job(model: type[nn.Module]):
        validation = {"function": Pairs, "samples": samples, "every": 1, "batch_size": own_batch}
        return raypar.Trainer(
            model=model,
            loss=contrastive,
            data=Pairs,
            validation=validation,
            plan={"layout": SAMPLES},
            steps=1,
            batch_size=8,
            microbatches=2,
        ).job

    checked, found = preflight(fits := job(Images)), {}
    for shards in (1, 4):
        plan = ParallelPlan.mesh(tp=shards, layers=len(checked.graph.layers))
        check_model_can_shard(fits, checked, plan)
        with OneProcessRun(fits, plan, "1f1b", graph=checked.graph) as run:
            found[shards] = run.validate(0)
    assert found[4] == pytest.approx(found[1], rel=1e-5, abs=1e-6)
    with pytest.raises(
        PlanError, match=r"over 4 shards, and a microbatch of validation has 1 of them: .*: on 4 shards, .* RuntimeError: Sizes"
    ) as error:
        check_model_can_shard(mixed := job(WithToken), preflight(mixed), plan)
    assert error.value.cure == says
