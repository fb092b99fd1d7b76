"""Models that people brought and that were refused, or crashed, at first: each is the plain module now, in training and in
evaluation."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured_stages import capture, capture_as_a_job, differences, evaluate_stages, make_stages, run_plain, run_stages
from helpers.model_zoo import ids, noise, sum_of_squares
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from raypar.errors import ModelError
from raypar.model.capture.forward_inputs import choose_forward_inputs
from raypar.model.capture.refusal import user_location

pytestmark = pytest.mark.part(6)

Batch = dict[str, Tensor]


def check(make: Callable[[], nn.Module], batches: list[Batch], loss: Callable[[Any], Tensor] = sum_of_squares) -> list[str]:
    """Compare with the plain module, cut before every unit; returns the names of the layers."""
    torch.manual_seed(0)
    plain = make().train()
    captured = capture(plain, batches[0])
    stages = make_stages(captured, plain, range(1, len(captured.layers)))
    for batch in batches:
        found = run_stages(captured, stages, batch, loss, seeded=True)
        assert differences(found, run_plain(captured, plain, batch, loss, seeded=True)) == []
    for module in (plain, *(module for stage in stages for module in stage.modules)):
        module.eval()
    for batch in batches:
        found = evaluate_stages(captured, stages, batch)
        with torch.no_grad():
            wanted = [value for value in tree_leaves(plain(**batch)) if isinstance(value, Tensor)]
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    return [layer.name for layer in captured.layers]


def numbers(*rows: int) -> list[Batch]:
    return [{"x": noise(count, count, 8)} for count in rows]


class Attention(nn.Module):
    """Rotates by tables that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.linear(x)
        return x + F.dropout(y * cos + y.flip(-1) * sin, 0.1, self.training)


class KeepsTables(nn.Module):
    """Makes tables in the dtype of an activation, and again for another length, as the code of many rotary embeddings does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(99, 8), nn.ModuleList(Attention() for _ in range(3))
        self.cos = self.sin = torch.zeros(0)
        self.made_for = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if x.shape[1] != self.made_for:
            self.made_for = x.shape[1]
            angles = torch.outer(torch.arange(x.shape[1]).type_as(x), 1 / torch.arange(1, 9).to(x)) + x.new_zeros(8)
            self.cos, self.sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


@pytest.mark.ci
def test_a_table_in_the_dtype_of_an_activation_is_made_where_it_is_needed():
    check(KeepsTables, [{"tokens": ids(2, 6)}, {"tokens": ids(3, 4)}, {"tokens": ids(2, 6)}])
    captured = capture(KeepsTables(), {"tokens": ids(2, 6)})
    assert captured.layers[2].inputs == ("blocks.0.out0", "tokens")  # no table travels


class ScalesByLongest(KeepsTables):
    """Makes tables for the longest batch so far, which change all others."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if x.shape[1] > self.made_for:
            self.made_for = x.shape[1]
            self.cos = self.sin = torch.arange(2.0 * x.shape[1]).view(-1, 1) / self.made_for
        for block in self.blocks:
            x = block(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])
        return x


def test_a_table_that_depends_on_the_batches_before_is_refused():
    captured = capture(model := ScalesByLongest(), {"tokens": ids(2, 6)})
    stages = make_stages(captured, model, [1])
    with pytest.raises(ModelError, match="does not do the same when it is called again"):
        run_stages(captured, stages, {"tokens": ids(2, 4)}, sum_of_squares, seeded=False)


class Packed(nn.Module):
    """Recurrent nets over sequences of several lengths."""

    def __init__(self, restored: bool) -> None:
        super().__init__()
        self.embedding, self.dropout, self.restored = nn.Embedding(99, 8), nn.Dropout(0.2), restored
        self.rnns = nn.ModuleList([nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True, bidirectional=True)])
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, _ = self.rnns[0](packed)
        packed, last = self.rnns[1](packed)
        if self.restored:
            return self.head(nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0])
        return self.head(torch.cat([last[0], last[1]], 1))


@pytest.mark.parametrize("restored", [False, True])
def test_packed_sequences_pass_between_units(restored: bool):
    lengths = [torch.tensor(each) for each in ([5, 2, 4], [3, 5, 5], [1, 2])]
    batches = [{"tokens": ids(len(each), 5), "lengths": each} for each in lengths]
    names = check(lambda: Packed(restored), batches)
    assert names == ["embedding", "dropout", "rnns.0", "rnns.1", "head"]


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        code = torch.distributions.Normal(mean, spread.exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        return self.decoder(code.rsample() * self.training + mean), torch.distributions.kl_divergence(code, prior).sum()


def test_checks_of_a_distributions_arguments_are_left_out():
    check(Variational, numbers(3, 2))
    with pytest.raises(ValueError, match="to satisfy the constraint"):  # not for others
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


class Experts(nn.Module):
    """Sends each row through one of its experts: rows are chosen by values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                out[rows] = expert(x[rows]) * weight[rows, None]
        return F.dropout(x + out, 0.2, self.training)


class FewBlocksOfExperts(nn.Module):
    """Blocks of which each holds so much of the model that it would be divided, if it could be."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Experts() for _ in range(count)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.ci
def test_a_module_whose_own_code_decides_by_values_runs_whole():
    assert check(FewBlocksOfExperts, numbers(5, 4)) == ["blocks.0", "blocks.1", "blocks.2", "head"]


def test_a_module_with_most_of_the_model_inside_does_not_run_whole_unasked():
    with pytest.raises(ModelError, match="depends on the values of an activation"):
        capture(FewBlocksOfExperts(1), numbers(5)[0])
    with pytest.raises(ModelError, match="depends on the values of an activation"):
        capture(FewBlocksOfExperts(), numbers(5)[0], units=["blocks.*.experts.*"])
    assert len(capture(FewBlocksOfExperts(1), numbers(5)[0], units=["blocks.*"]).layers) == 2


@dataclass
class Hidden:
    """What goes from block to block."""

    x: Tensor
    scale: float = 2.0
    kept: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.x.dim() == 2


class TakesHidden(nn.Linear):
    def forward(self, hidden: Hidden) -> Hidden:  # type: ignore[override]
        return Hidden(super().forward(hidden.x) * hidden.scale, kept=hidden.x)


class Dataclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TakesHidden(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Hidden:
        hidden = Hidden(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_dataclasses_of_tensors_pass_between_units_and_are_returned():
    check(Dataclasses, numbers(3, 2), lambda hidden: (hidden.x**2).mean() * hidden.scale + hidden.kept.mean())


class DropsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.dropout = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Dropout(0.3, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.dropout(block(x))
        return x


def test_dropout_in_place_is_the_plain_modules_in_evaluation():
    check(DropsInPlace, numbers(3, 2))


class CallsOneTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.utils.spectral_norm(nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) + self.blocks[1](self.blocks[0](-x))


def test_a_buffer_that_two_calls_write_is_named():
    with pytest.raises(ModelError, match=r"reads its buffer 'blocks\.0\.weight_u'.*which an earlier call") as found:
        capture(CallsOneTwice(), numbers(3)[0])
    assert "torch.cat" in found.value.cure


class WithoutMetaKernels(nn.Module):
    """Between its modules: a product with a sparse matrix, and the CTC loss, which PyTorch cannot compute on meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, edges: Tensor, targets: Tensor) -> Tensor:
        graph = torch.sparse_coo_tensor(edges.t(), torch.ones(len(edges)), (len(x), len(x)))
        for block in self.blocks:
            x = F.dropout(torch.sparse.mm(graph, block(x)), 0.2, self.training)
        scores = x.view(len(x), 2, 4).log_softmax(-1)
        ends = (targets > 0).sum(-1)
        return F.ctc_loss(scores, targets[targets > 0], torch.full_like(ends, len(x)), ends)


def test_operations_that_meta_tensors_have_not_are_captured():
    edges = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]])
    batches = [numbers(rows)[0] | {"edges": edges, "targets": torch.tensor([[1, 2], [3, 0]])} for rows in (5, 6)]
    check(WithoutMetaKernels, [*batches, batches[0] | {"targets": torch.tensor([[1, 2], [3, 1]])}])


class MultipliesGraphs(nn.Module):
    """Makes a compressed sparse matrix of the batch's edges, and its square, between its modules, as graph nets do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def weights(self, edges: Tensor) -> Tensor:
        return torch.ones(len(edges))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        graph = torch.sparse_coo_tensor(edges.t(), self.weights(edges), (len(x), len(x))).to_sparse_csr()
        square = graph @ graph
        for block in self.blocks:
            x = torch.sparse.mm(square, block(x))
        return x


EDGES = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [3, 1], [1, 3]])


def test_compressed_sparse_matrices_between_units_are_the_plain_modules():
    check(MultipliesGraphs, [{"x": noise(4, 4, 8), "edges": EDGES}, {"x": noise(4, 4, 8), "edges": EDGES[1:]}])


CALLS: list[int] = []


class CountsInASparseMatrix(MultipliesGraphs):
    """Its graph has other weights in each call."""

    def weights(self, edges: Tensor) -> Tensor:
        CALLS.append(1)
        return torch.full((len(edges),), float(len(CALLS)))


def test_another_content_of_a_sparse_matrix_is_seen():
    with pytest.raises(ModelError, match=r"does not do the same when it is called again.*calls _sparse_mm"):
        capture(CountsInASparseMatrix(), {"x": noise(4, 4, 8), "edges": EDGES})


class ReshapesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        mask.unsqueeze_(1)
        for block in self.blocks:
            x = block(x) * mask.squeeze(1)
        return x


def test_a_mask_that_gets_another_shape_in_place_is_captured():
    check(ReshapesInPlace, numbers(3, 2))


class ChoosesRows(nn.Module):
    """Goes on with the rows that the batch chooses, and takes all fields by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, **batch: Tensor) -> Tensor:
        x = self.blocks[0](batch["x"]).view(-1, 2, 8)
        x = F.dropout(self.blocks[1](x[batch["keep"].view(-1, 2)]), 0.2, self.training)
        return self.blocks[2](x)


def test_rows_that_the_batch_chooses_go_on():
    keep = [torch.tensor(each, dtype=torch.bool) for each in ([1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 0, 1, 0, 0])]
    check(ChoosesRows, [{"x": noise(7, len(each), 8), "keep": each} for each in keep])
    inputs = choose_forward_inputs(ChoosesRows(), ["x", "keep", "label"], input="x", target="label", wants_loss=False)
    assert inputs.keywords == ("x", "keep") and inputs.positional == ()


class ChoosesRowsOfPadding(Packed):
    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        rows = super().forward(tokens, lengths)
        return rows[rows > 0]


def test_rows_that_values_choose_are_refused_after_packing():
    with pytest.raises(ModelError, match="depends on the values of an activation"):
        capture(ChoosesRowsOfPadding(True), {"tokens": ids(3, 5), "lengths": torch.tensor([5, 2, 4])})


class Frozen(OrderedDict[str, Any]):
    """A config as diffusers has it: what has been made cannot be changed."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("a frozen dict")


class HasFrozenConfig(nn.Module):
    """Keeps a config that cannot be changed, and beside it dicts, lists and sets that a forward fills."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.blocks = Frozen(rounds=2), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.seen: OrderedDict[int, bool] = OrderedDict()
        self.rows: list[int] = []
        self.shapes: set[torch.Size] = set()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.seen:
            self.seen[len(x)] = True
            self.rows.append(len(x))
            self.shapes.add(x.shape)
        for _ in range(self.config["rounds"]):
            for block in self.blocks:
                x = block(x)
        return x


def test_a_dict_that_cannot_be_updated_keeps_its_content():
    check(HasFrozenConfig, numbers(2, 3))


def test_what_a_forward_puts_into_containers_is_taken_out_again():
    captured = capture(HasFrozenConfig(), numbers(2)[0])
    model = captured.cache.model
    assert model.config == {"rounds": 2}
    assert (list(model.seen.items()), model.rows, model.shapes) == ([], [], set())


class FreezesNorm(nn.Module):
    """Keeps a norm in evaluation mode; its `train` returns nothing, as those of five models of timm."""

    def __init__(self, call: bool) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Dropout(0.5)
        if call:
            self.train()

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def test_an_own_train_may_return_nothing():
    capture_as_a_job(FreezesNorm(call=True), numbers(2)[0])
    with pytest.raises(ModelError, match="leaves norm in evaluation mode, and has not been called"):
        capture_as_a_job(FreezesNorm(call=False), numbers(2)[0])


def test_code_in_a_package_whose_name_begins_with_torch_is_the_users():
    folder = Path(torch.__file__).parent
    for name, is_users in (("torchvision", True), ("torch_geometric", True), ("torch", False)):
        found: dict[str, Any] = {"user_location": user_location}
        file = str(folder.with_name(name) / "models" / "deep.py")
        exec(compile("where = user_location()", file, "exec"), found)
        assert (found["where"] == f"{file}:1") == is_users


class Bias(nn.Module):
    """A position bias that attention asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(7, 8), nn.Parameter(torch.ones(8))

    def forward(self, rows: int) -> Tensor:
        return F.dropout(self.embedding.weight[:rows] * self.scale, 0.2, self.training)


class TakesBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, bias: Callable[[int], Tensor] | None = None) -> Tensor:
        return x if bias is None else x + self.linear(x + bias(len(x)))


class GivesModules(nn.Module):
    """Gives its blocks one module, as x-transformers does with its position biases; the first gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.blocks, self.norm = Bias(), nn.ModuleList(TakesBias() for _ in range(4)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, bias=self.bias if index else None)
        return self.norm(x) + self.bias.scale


def test_a_module_is_an_argument_like_any_other():
    check(GivesModules, numbers(3, 5))
    captured = capture(GivesModules(), numbers(3)[0])
    uses = [[name for name, _ in layer.build().named_parameters() if "bias." in name] for layer in captured.layers]
    embedding = ["bias.embedding.weight", "bias.scale"]
    assert uses == [
        [],
        sorted(embedding, reverse=True),
        sorted(embedding, reverse=True),
        sorted(embedding, reverse=True),
        ["bias.scale"],
    ]
    assert [len(names) for names in captured.ties] == [4, 3]


class GivesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TakesBias() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, bias=self.blocks)
        return x


def test_a_module_that_has_units_inside_is_no_argument():
    with pytest.raises(ModelError, match="a ModuleList is passed between units"):
        capture(GivesItself(), numbers(3)[0])


class AsksForGradientOfInput(nn.Module):
    """As wav2vec2 and its relatives do in training, for the sake of checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        if self.training:
            x.requires_grad = True
        for block in self.blocks:
            x = block(x)
        return x


def test_an_input_may_be_asked_for_its_gradient():
    check(AsksForGradientOfInput, numbers(2, 3))


def chain() -> nn.Sequential:
    """Two layers write what they read: one does so by itself, one begins with a module that does."""
    begins = nn.Sequential(nn.Hardtanh(inplace=True), nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), begins)


def test_a_chain_whose_layers_write_in_place_is_the_plain_module():
    torch.manual_seed(0)
    plain, batch = chain(), {"input": numbers(4)[0]["x"]}
    captured = capture_as_a_job(plain, batch)
    assert [layer.name for layer in captured.layers] == ["0", "1", "2", "3"]
    stages = make_stages(captured, plain, [1, 2, 3])
    found = run_stages(captured, stages, batch, sum_of_squares, seeded=True)
    assert differences(found, run_plain(captured, plain, batch, sum_of_squares, seeded=True)) == []


class Stash(nn.Linear):
    """What `@skippable(stash=["skip"])` of torchgpipe makes."""

    stashable_names, poppable_names = frozenset({"skip"}), frozenset[str]()


def test_skips_beside_a_chain_are_refused_before_the_run():
    with pytest.raises(ModelError, match="layer '1' is @skippable and stashes skip"):
        capture_as_a_job(nn.Sequential(nn.Linear(8, 8), Stash(8, 8)), {"input": numbers(4)[0]["x"]})


@dataclass
class Settings:
    use_cache: bool = False
    layerdrop: float = 0.0


class DynamicCache:
    """A cache object as libraries have it."""


class PassesCache(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.inner, self.config = DecidesAtRandom(), Settings(**given)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner.blocks:
            x = block(x, bias=DynamicCache())
        return x


class DecidesAtRandom(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.blocks, self.config = nn.ModuleList(TakesBias() for _ in range(3)), Settings(**given)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if torch.rand(()) < 0.5 else x
        return x


def cure_of(model: nn.Module) -> str:
    with pytest.raises(ModelError) as found:
        capture(model, numbers(3)[0])
    return found.value.cure


def test_advice_names_only_settings_that_would_help():
    model = PassesCache(use_cache=True)
    assert cure_of(model) == "set use_cache=False in the model's config"
    model.config, model.inner.config = Settings(use_cache=False), Settings(use_cache=True)
    assert cure_of(model) == "set use_cache=False in the config of inner (Settings) too: it is another than the model's"
    model.inner.config = Settings(use_cache=False)
    assert "use_cache" not in cure_of(model)
    assert "layers at random (layerdrop) must be set to 0" in cure_of(DecidesAtRandom(layerdrop=0.1))
    assert "layerdrop" not in cure_of(DecidesAtRandom(layerdrop=0.0))


class DeepBias(Bias):
    """Has a list of modules, which would be units."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, rows: int) -> Tensor:
        found = super().forward(rows)
        for layer in self.mlp:
            found = layer(found)
        return found


class GivesDeepModule(GivesModules):
    def __init__(self) -> None:
        super().__init__()
        self.bias = DeepBias()


def test_a_module_with_modules_in_a_list_is_an_argument_too():
    names = check(GivesDeepModule, numbers(3, 5))
    assert names == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm"]


class Encoder(nn.Module):
    """Nearly all of a model, without a list inside; the half of it that is never called is unused."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.unused = nn.Linear(64, 100)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return self.third(x * 2 if self.reads and x.sum() > 0 else x)


class EncoderAndHead(nn.Module):
    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.encoder, self.heads = Encoder(reads=reads), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for head in self.heads:
            x = head(x)
        return x


def test_a_unit_that_holds_nearly_all_of_a_model_is_opened():
    check(EncoderAndHead, numbers(2, 3))
    captured = capture(EncoderAndHead(), numbers(2)[0])
    sizes = [sum(p.numel() for p in layer.build().parameters()) for layer in captured.layers]
    assert [layer.name for layer in captured.layers][:2] == ["encoder.first", "encoder.second"]
    assert max(sizes) < 0.6 * sum(sizes)


def test_it_stays_whole_where_its_code_cannot_be_captured():
    captured = capture(EncoderAndHead(reads=True), numbers(2)[0])
    assert [layer.name for layer in captured.layers] == ["encoder", "heads.0", "heads.1"]


class MapsMasks(nn.Module):
    """Makes masks by functions of single indices, as the code of many attentions does; one holds a field of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        near = [
            lambda query, key: (query - key).abs() < 2,
            lambda query, key, row=padding[0]: row[key] > 0,
            lambda query, key, *, row=padding[1]: row[key] > 0,
        ]

        def allowed(query: Tensor, key: Tensor) -> Tensor:
            found = query.new_ones((), dtype=torch.bool)
            for mask in near:
                found = found & mask(query, key)
            return found

        every, count = torch.arange(x.shape[1]), x.shape[1]
        mask = torch.vmap(torch.vmap(allowed, in_dims=(None, 0)), in_dims=(0, None))(every, every)
        for block in self.blocks:
            scores = torch.vmap(torch.dot)(x.reshape(-1, 8), block(x).reshape(-1, 8)).view(x.shape[:2])
            weights = scores[:, None].expand(-1, count, -1).masked_fill(~mask, -1e9).softmax(-1)
            x = F.dropout(weights @ x, 0.1, self.training)
        return x


def test_mapped_functions_are_calls_like_others():
    paddings = [torch.tensor(each) for each in ([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]], [[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]])]
    check(MapsMasks, [{"x": noise(2, 2, 5, 8), "padding": padding} for padding in paddings])


class MapsAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.blocks[1](row) * self.scale)(self.blocks[0](x))


def test_a_mapped_function_that_holds_a_module_is_refused():
    with pytest.raises(ModelError, match=r"torch\.vmap is called between units at .*with a function that holds"):
        capture(MapsAModule(), numbers(3)[0])


class Lengths(nn.Module):
    """Returns numbers of the batch's mask, and a table for them; it has no parameters."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, list[int]]:
        lengths = mask.sum(1).tolist()
        return torch.arange(max(lengths)).to(x).cos(), lengths


class ReadsLengths(nn.Module):
    """As in Lumina2: a module without parameters tells the code between units lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths, self.blocks = Lengths(), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.blocks[0](x)
        table, lengths = self.lengths(x, mask)
        x = self.blocks[1](x[:, : max(lengths)] * table[:, None])
        return torch.stack([self.blocks[2](row[:length].mean(0)) for row, length in zip(x, lengths, strict=True)])


def test_numbers_that_a_module_without_parameters_reads_of_the_batch_are_seen():
    masks = [torch.tensor(each) for each in ([[1, 1, 1, 0], [1, 1, 0, 0]], [[1, 0, 0, 0], [1, 1, 0, 0]])]
    layers = check(ReadsLengths, [{"x": noise(2, 2, 4, 8), "mask": mask} for mask in masks])
    assert layers == ["blocks.0", "blocks.1", "blocks.2", "blocks.2#2"]


class DrawsLengths(ReadsLengths):
    """Its numbers are read of an activation."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, (self.blocks[0](x).mean(-1) > 0).long() + mask)


def test_numbers_that_a_module_reads_of_activations_are_refused():
    with pytest.raises(ModelError, match="decides by the values of an activation"):
        capture(DrawsLengths(), {"x": noise(2, 2, 4, 8), "mask": torch.ones(2, 4, dtype=torch.int64)})
