"""`loss: {function: model, count: labels}`: the mean over all unmasked labels of a step, in whichever microbatches they are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import plain_module
from helpers.model_zoo import import_transformers
from helpers.parity import differences
from torch import Tensor, nn

import raypar
from raypar.errors import ConfigError, NonFiniteError
from raypar.job import Job
from raypar.job.contract import contract_of_job
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

VOCABULARY, TOKENS = 23, 9


class Ragged:
    """Tokens, with other numbers of masked labels in each sample; of sample 3 all labels are masked."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: (5 * index) % (TOKENS + 1) if index != 3 else TOKENS] = -100
        return {"input_ids": ids, "labels": labels}


class Tagger(nn.Module):
    """Has a loss of its own, over all labels (`shift` 0), or of each next token (1)."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head, self.shift = nn.Linear(8, VOCABULARY), shift

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.head(self.blocks(self.embed(input_ids)))
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def tagger(shift: int) -> nn.Module:
    return Tagger(shift)


def gpt2() -> nn.Module:
    transformers = import_transformers()
    sizes = {"vocab_size": VOCABULARY, "n_positions": TOKENS, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, tuple[Any, str]] = {
    "all labels": ((tagger, {"shift": 0}), "labels"),
    "of the next token": ((tagger, {"shift": 1}), "shifted_labels"),
    "gpt2": (gpt2, "shifted_labels"),
}


def job(model: Any, count: str | None, **more: Any) -> Job:
    given: dict[str, Any] = {"steps": 2, "batch_size": 8, "microbatches": 8, "optimizer": (torch.optim.SGD, {"lr": 0.1})}
    loss = {"function": "model", **({"count": count} if count else {})}
    return raypar.Trainer(model=model, loss=loss, data={"function": Ragged, "shuffle": False}, **{**given, **more}).job


def of_whole_batch(spec: Job) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the model on the first batch at once."""
    torch.manual_seed(spec.seed)
    model = spec.model.call()
    rows = [Ragged()[index] for index in range(spec.batch_size)]
    loss = model(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("what", MODELS)
def test_loss_and_gradients_are_those_of_the_whole_batch(what: str):
    """One microbatch has no label at all: its mean is NaN, and counts nothing."""
    model, count = MODELS[what]
    spec = job(model, count, steps=1)
    graph = make_layer_graph(spec)
    loss, gradients = of_whole_batch(spec)
    for plan in (ParallelPlan.mesh(layers=len(graph.layers)), ParallelPlan.mesh(pp=2, dp=2, layers=len(graph.layers))):
        with OneProcessRun(spec, plan, "1f1b", graph=graph) as run:
            report = run.step(0)[0]
            found = {name: copies[0] for name, copies in run.gradients().items()}
        assert report.loss == pytest.approx(loss, rel=1e-6)
        largest = max(float(gradient.abs().max()) for gradient in gradients.values())
        for name, gradient in gradients.items():
            got = found[name]
            assert got is not None and float((got - gradient).abs().max()) <= 1e-6 * largest, name


def test_without_it_gradients_are_others_by_a_tenth():
    spec = job(MODELS["gpt2"][0], None, steps=1, microbatches=4)
    _, gradients = of_whole_batch(spec)
    graph = make_layer_graph(spec)
    with OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph) as run:
        run.step(0)
        found = {name: copies[0] for name, copies in run.gradients().items()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert max(float((found[name] - gradient).abs().max()) for name, gradient in gradients.items()) > 0.1 * largest


def test_the_error_of_a_microbatch_without_labels_names_it():
    spec = job(MODELS["all labels"][0], None, steps=1)
    graph = make_layer_graph(spec)
    plan = ParallelPlan.mesh(layers=len(graph.layers))
    with OneProcessRun(spec, plan, "1f1b", graph=graph) as run, pytest.raises(NonFiniteError, match="loss nan") as found:
        run.step(0)
    assert found.value.cure.startswith(
        "if a microbatch may have no label (all -100), set loss: {function: model, count: labels}"
    )


@pytest.mark.parametrize("what", MODELS)
def test_plans_have_the_bits_of_one_process(what: str):
    model, count = MODELS[what]
    spec = job(model, count)
    graph = make_layer_graph(spec)
    want = plain_module.train(graph, spec)[0]
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        losses = [run.step(step)[0].loss for step in range(spec.steps)]
        assert losses == want.losses
        for name, copies in run.parameters().items():
            assert differences(name, copies, want.parameters[name]) == []


@pytest.mark.parametrize("what", MODELS)
def test_a_count_of_other_labels_than_the_models_is_refused_with_the_right_one(what: str):
    model, count = MODELS[what]
    assert preflight(job(model, count)).notes == ()
    wrong = "labels" if count == "shifted_labels" else "shifted_labels"
    does = "leaves out" if wrong == "labels" else "counts"
    with pytest.raises(
        ConfigError, match=rf"loss.count is {wrong}, and the loss of \w+ {does} the first label of each"
    ) as found:
        preflight(job(model, wrong))
    assert found.value.cure == f"set loss.count: {count}"


@pytest.mark.ci
def test_the_line_about_masked_labels_names_the_key():
    (line,) = preflight(job(MODELS["gpt2"][0], None, microbatches=1)).notes
    assert "some of labels are -100 (masked)" in line and "set loss: {function: model, count: labels}" in line


def test_it_is_for_the_loss_of_the_model_alone_and_in_the_contract_where_it_is_set():
    with pytest.raises(ConfigError, match=r"loss.count is labels, and loss.function is m:loss"):
        raypar.Trainer(
            model="m:f", loss={"function": "m:loss", "count": "labels"}, data="m:d", steps=1, batch_size=1, microbatches=1
        )
    held = [contract_of_job(job("m:f", count))["loss"] for count in (None, "labels")]
    assert held == [{"function": "model", "args": {}}, {"function": "model", "args": {}, "count": "labels"}]


class Named(Tagger):
    """Returns a dict."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return vars(super().forward(input_ids, labels))


def named() -> nn.Module:
    return Named(0)


def right(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = output["logits"][:, -labels.shape[1] :]
    return ((logits.argmax(-1) == labels) & (labels != -100)).sum(), (labels != -100).sum()


@pytest.mark.parametrize(("model", "count"), [(named, "labels"), (named, None), (gpt2, "shifted_labels")])
def test_metrics_read_all_that_a_model_with_its_own_loss_returns(model: Any, count: str | None):
    """And they change no bit. Given the loss alone, `argmax` would make 0 of it, which counts labels that are 0."""
    found = []
    for measured in (False, True):
        metrics: dict[str, Any] = {"metrics": {"right": right}, "metrics_every": 1} if measured else {}
        spec = job(model, count, steps=2, microbatches=4, validation=Ragged, **metrics)
        preflight(spec)
        graph = make_layer_graph(spec)
        for stages, replicas in ((1, 1), (2, 2)):
            plan = ParallelPlan.mesh(pp=stages, dp=replicas, layers=len(graph.layers))
            with OneProcessRun(spec, plan, "1f1b", graph=graph) as run:
                seen: list[Any] = [run.step(step)[0].loss for step in range(2)]
                seen.append(run.validate(2))
                found.append((seen, {name: copies[0].detach().clone() for name, copies in run.parameters().items()}))
                value = run.metrics
        if measured:
            assert value == {"right": expected_right(spec, found[-1][1])}
    assert all(seen == found[0][0] for seen, _ in found)
    assert all(torch.equal(weights[name], found[0][1][name]) for _, weights in found for name in weights)


def expected_right(spec: Job, weights: dict[str, Tensor]) -> float:
    """The metric over all samples at once, by the model itself."""
    model = spec.model.call().eval()
    model.load_state_dict(weights, strict=False)
    rows = [Ragged()[index] for index in range(len(Ragged()))]
    fields = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        total, count = right(model(**fields), fields["labels"])
    return float(total.double() / count.double())
