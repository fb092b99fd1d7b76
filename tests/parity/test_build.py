"""A stage's modules: made alone, initialised by name, and refused where values would be lost or decided by the cut."""

from collections import OrderedDict

import pytest
import torch
from helpers import ugly_models
from torch import Tensor, nn

from raypar.errors import ModelError
from raypar.job import ModelConfig
from raypar.model.capture.sequential import capture_layer_graph
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import build_on_meta, layer_sizes, parameter_shapes
from raypar.model.materialise import materialise
from raypar.plan.seeds import seed_of
from raypar.worker.layer_graph_of_job import make_layer_graph


def chain(*builds, **more) -> Graph:
    return Graph.sequential([(f"l{i}", build) for i, build in enumerate(builds)], input="x", **more)


def small() -> nn.Linear:
    return nn.Linear(4, 4)


def made(graph: Graph, first: int = 0, last: int | None = None) -> dict[str, nn.Module]:
    return materialise(graph, first, len(graph.layers) if last is None else last, seed=7, dtype=torch.float32)


class Table(nn.Module):
    """Buffers that the constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3).tril())
        self.register_buffer("scratch", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.mask + self.scratch


class Gain(nn.Linear):
    """Has a parameter that nobody fills."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.gain = nn.Parameter(torch.empty(4))


class Zeroed(nn.Linear):
    """Its constructor gives it other values than `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        nn.init.zeros_(self.weight)


class Twice(nn.Linear):
    """Has one tuple at two places of a list."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.register_buffer("mask", torch.ones(4))
        pair = (self.mask, 1)
        self.pairs = [pair, pair]


# -- initialisation ----------------------------------------------------------------------------------------------------


def test_a_stage_has_the_values_it_would_have_in_any_other_cut():
    graph = chain(small, small, lambda: nn.Sequential(nn.LayerNorm(4), small()), small)
    whole = made(graph)
    for first, last in [(0, 1), (1, 3), (2, 4)]:
        part = made(graph, first, last)
        assert list(part) == [layer.name for layer in graph.layers[first:last]]
        for name, module in part.items():
            for key, value in module.state_dict().items():
                assert torch.equal(value, whole[name].state_dict()[key])


def test_builds_run_in_layer_order_in_one_stream():
    graph = chain(small, lambda: nn.Sequential(OrderedDict(up=small())))
    torch.manual_seed(7)
    first, second = small(), small()
    for dtype in (torch.float32, torch.float64):  # drawn in float32, then cast
        modules = materialise(graph, 0, 2, seed=7, dtype=dtype)
        assert torch.equal(modules["l0"].weight, first.weight.to(dtype))
        assert torch.equal(modules["l1"].up.weight, second.weight.to(dtype))


def test_by_name_the_seed_is_the_modules_qualified_name():
    job = ugly_models.job("plain").replace(model=ModelConfig(function=lambda: chain(Zeroed, Zeroed)), init="by-name", seed=7)
    module = made(make_layer_graph(job))["l1"]
    torch.manual_seed(seed_of(7, "init", "l1"))
    assert torch.equal(module.weight, nn.Linear(4, 4).weight)


def test_init_by_parameter_sees_canonical_names_and_its_own_seed():
    names = []

    def init(name: str, tensor: Tensor) -> None:
        names.append(name)
        nn.init.normal_(tensor)

    graph = chain(small, small, init=init, ties=(("l0.weight", "l1.weight"),))
    weight = made(graph, 1, 2)["l1"].weight
    torch.manual_seed(seed_of(7, "init", "l0.weight"))
    assert torch.equal(weight, torch.randn(4, 4))
    assert set(names) == {"l0.weight", "l0.bias", "l1.bias"}


def test_empty_tensors_have_the_jobs_dtype_also_where_values_are_handed_over():
    """State that workers hand over does not contain them. After a change of plan they had the skeleton's dtype, which code may
    ask for; a checkpoint of such a run could not be resumed."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.rank_0 = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(0, 3))
            self.register_buffer("dummy", torch.empty(0))
            self.register_buffer("none", torch.empty(0, dtype=torch.int64))

    graph = Graph((Layer("a", Adapter, ("x",), ("y",)),), output="y")
    for values in (None, {"a.weight": torch.ones(2, dtype=torch.float64)}):
        made = materialise(graph, 0, 1, seed=0, dtype=torch.float64, values=values)["a"]
        assert [t.dtype for t in (made.rank_0, made.dummy, made.none)] == [torch.float64, torch.float64, torch.int64]


def test_frozen_parameters_stay_frozen_and_dtype_is_the_jobs():
    module = materialise(chain(lambda: small().requires_grad_(False)), 0, 1, seed=1, dtype=torch.float64)["l0"]
    assert {(p.requires_grad, p.dtype) for p in module.parameters()} == {(False, torch.float64)}


@pytest.mark.parametrize("how", ["by the constructor", "by-name", "by init"])
def test_a_parameter_that_nobody_gives_values_is_refused(how):
    init = None if how != "by init" else lambda name, tensor: tensor.fill_(1) if name != "l0.gain" else None
    job = ugly_models.job("plain").replace(model=ModelConfig(function=lambda: chain(Gain, init=init)))
    with pytest.raises(ModelError, match=r"l0\.gain is left without"):
        made(make_layer_graph(job.replace(init="by-name" if how == "by-name" else "model")))


def test_by_name_a_module_without_reset_parameters_is_refused():
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    job = ugly_models.job("plain").replace(model=ModelConfig(function=lambda: chain(lambda: nn.Sequential(Bare()))))
    assert made(make_layer_graph(job))["l0"][0].scale.tolist() == [1, 1]
    with pytest.raises(ModelError, match=r"l0\.0 \(Bare\) owns parameters but has no reset_parameters"):
        made(make_layer_graph(job.replace(init="by-name")))


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_buffers_keep_what_the_constructor_gave_them():
    module = made(chain(Table))["l0"]
    assert torch.equal(module.mask, torch.ones(3, 3).tril()) and torch.equal(module.scratch, torch.arange(3.0))
    assert list(module.state_dict()) == ["mask"]


def test_one_tuple_at_two_places_of_an_attribute_has_the_values_at_both():
    """At the second one it kept the buffer of the skeleton, on the meta device."""
    twice = made(chain(Twice))["l0"]
    assert all(mask is twice.mask for mask, _ in twice.pairs)


def test_what_is_made_on_meta_has_no_values_and_is_refused_when_they_are_asked_for():
    with torch.device("meta"):
        graph = capture_layer_graph(nn.Sequential(nn.Linear(3, 3), Table()), input="x")
    with pytest.raises(ModelError, match=r"0\.weight has no values: it is on the meta device") as error:
        made(graph)
    assert "init_from" in error.value.cure


def test_lazy_modules_are_refused_until_a_batch_has_gone_through():
    def lazy(ready: bool) -> nn.Sequential:
        model = nn.Sequential(nn.LazyLinear(4))
        if ready:
            model(torch.ones(2, 3))
        return model

    with pytest.raises(ModelError, match=r"0\.weight is not initialised yet") as error:
        capture_layer_graph(lazy(False), input="x")
    assert "run a batch" in error.value.cure
    assert made(capture_layer_graph(lazy(True), input="x"))["0"].weight.shape == (4, 3)


# -- size --------------------------------------------------------------------------------------------------------------


def test_sizes_are_known_without_values_and_ties_count_once():
    graph = chain(small, lambda: nn.Linear(4, 2), small, ties=(("l0.weight", "l2.weight"),))
    assert [(s.name, s.parameters, s.nbytes) for s in layer_sizes(graph, torch.float64)] == [
        ("l0", 20, 160),
        ("l1", 10, 80),
        ("l2", 4, 32),
    ]
    assert list(parameter_shapes(graph)) == ["l0.weight", "l0.bias", "l1.weight", "l1.bias", "l2.bias"]


# -- capture -----------------------------------------------------------------------------------------------------------


def test_layers_are_named_after_children_places_or_pairs():
    with torch.device("meta"):
        a, b = small(), small()
    for given, names in [
        (nn.Sequential(OrderedDict(up=a, down=b)), ["up", "down"]),
        ([a, b], ["0", "1"]),
        (nn.ModuleList([a, b]), ["0", "1"]),
        ([("first", a), ("second", b)], ["first", "second"]),
    ]:
        graph = capture_layer_graph(given, input="tokens")
        assert [layer.name for layer in graph.layers] == names
        assert graph.batch_fields == ("tokens",) and graph.layers[1].build() is not b


def test_parameters_shared_between_children_become_ties():
    with torch.device("meta"):
        a, b = small(), small()
        b.weight = a.weight
    assert capture_layer_graph([a, nn.ReLU(), b], input="x").ties == (("0.weight", "2.weight"),)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize(
    "given, words",
    [
        (3, "returned an int"),
        ([small(), "relu"], "is a str, not an nn.Module"),
        (small(), "the model is a Linear, whose forward raypar cannot cut"),
        (Residual(small()), "forward of its own"),
        (nn.Sequential(*[nn.ReLU()] * 2), "more than once"),
    ],
)
def test_what_is_not_layers_is_refused(given, words):
    with pytest.raises(ModelError, match=words):
        capture_layer_graph(given, input="x")


def doubled(module: nn.Module, *given: object) -> Tensor:
    return given[-1] * 2


class Doubled(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda chain: chain.register_forward_hook(doubled), "has hooks of its own"),
        (lambda chain: chain.register_forward_pre_hook(doubled), "has hooks of its own"),
        (lambda chain: chain.register_full_backward_hook(doubled), "has hooks of its own"),
        (lambda chain: setattr(chain, "forward", lambda x: 2 * x), "has a forward of its own"),
        (lambda chain: setattr(chain, "__class__", Doubled), "has a forward of its own"),
    ],
)
def test_what_only_a_call_of_the_whole_chain_does_is_refused(change, words):
    """Workers call layers: it was left out in silence, and the losses were others."""
    chain = nn.Sequential(small(), small())
    change(chain)
    with pytest.raises(ModelError, match=f"the model function returned {words}"):
        capture_layer_graph(chain, input="x")


@pytest.mark.full  # PyTorch's compiler takes seconds to be imported
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("where", ["0", "0.0"])
def test_compiled_modules_are_refused_and_the_cure_works(where, trained):
    """The message spoke of variables of functions, and frozen ones ran without their compiled form."""
    chain = nn.Sequential(nn.Sequential(small().requires_grad_(trained)), small())
    chain.get_submodule(where).compile(backend="eager")
    with pytest.raises(ModelError, match=f"^{where} is a compiled module") as error:
        capture_layer_graph(chain, input="x")
    assert "put @torch.compile on the method forward of its class" in error.value.cure
    with pytest.raises(ModelError, match=r"^0 is a compiled module"):
        capture_layer_graph([torch.compile(small().requires_grad_(trained), backend="eager")], input="x")

    whole = nn.Sequential(small())
    whole.compile(backend="eager")
    with pytest.raises(ModelError, match="the model is a compiled module"):
        capture_layer_graph(whole, input="x")

    class Layer(nn.Linear):
        @torch.compile(backend="eager")
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    made = Layer(4, 4)
    graph = capture_layer_graph([made], input="x")
    module = graph.layers[0].build()
    module.to_empty(device="cpu").load_state_dict(made.state_dict())
    x = torch.ones(2, 4)
    assert torch.equal(module(x), made(x))


class OwnSynchronisedNorm(nn.SyncBatchNorm):
    """May do anything."""


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: nn.Sequential(OwnSynchronisedNorm(4)), r"l\.0 is a subclass of SyncBatchNorm(.|\n)*cure: use BatchNorm"),
        (lambda: nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
        (lambda: nn.EmbeddingBag(4, 4, sparse=True), "sparse"),
    ],
)
def test_layers_that_wait_for_replicas_write_weights_in_forward_or_have_sparse_gradients_are_refused(build, words):
    with pytest.raises(ModelError, match=words):
        build_on_meta(Layer("l", build))


def test_norms_are_taken_with_running_statistics_and_without():
    without = (lambda: nn.BatchNorm1d(4, track_running_stats=False), lambda: nn.InstanceNorm1d(4), lambda: nn.LayerNorm(4))
    for build in (*without, lambda: nn.BatchNorm1d(4), lambda: nn.InstanceNorm1d(4, track_running_stats=True)):
        build_on_meta(Layer("l", build))


@pytest.mark.parametrize(
    "other, name, words",
    [
        (small, "l1.wieght", "no parameter of layer 'l1'"),
        (lambda: nn.Linear(4, 1), "l1.weight", "tied parameters differ"),
        (lambda: small().requires_grad_(False), "l1.weight", "frozen"),
        (small, "l2.weight", "no layer owns"),
    ],
)
def test_a_tie_of_things_that_are_not_one_parameter_is_refused(other, name, words):
    with pytest.raises(ModelError, match=words):
        capture_layer_graph(chain(small, other, ties=(("l0.weight", name),)), input="x")


def test_a_layer_that_reads_a_value_before_it_is_written_is_refused():
    with pytest.raises(ModelError, match="'a' reads 'late'"):
        Graph(
            (
                Layer("a", small, ("late",), ("x1",)),
                Layer("b", small, ("x1",), ("late",)),
                Layer("c", small, ("late",), ("y",)),
            ),
            "y",
        )
    with pytest.raises(ModelError, match="by itself or by a later layer"):
        Graph((Layer("a", small),), "x")
