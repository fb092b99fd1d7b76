"""Training begins with what one process has after seeding Python, NumPy and torch and calling the model function (rule 2).

Every way of `helpers.initial_models` in six layouts, made whole and deferred; then after a kill, and after a resume.
"""

import copy
import io
import pickle
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import initial_models as models
from helpers import reference, torch_flesh
from helpers.generations import Generations
from safetensors.torch import load_file, save_file
from torch import nn

from raypar.cli import main
from raypar.comm.buffer_pool import BufferPool
from raypar.elastic.replica_digests import InitialDigestCheck
from raypar.errors import ModelError, UserCodeError
from raypar.job import DataConfig, InitFromConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PlanConfig
from raypar.job.contract import contract_of_job
from raypar.model import deferred_init as deferred
from raypar.model.graph import Graph, Layer
from raypar.model.layer_skeletons import STATE_DTYPES, state_shapes
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.plan import ParallelPlan
from raypar.plan.pieces import AdoptedStages
from raypar.worker import layer_graph_of_job
from raypar.worker.checkpoint.checkpoint_files import BUFFER, CACHE, PARAMETER
from raypar.worker.checkpoint.manifest import DTYPES
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.pretrained import safetensors_weights, weights_file
from raypar.worker.pretrained.initial_values import with_weights_fingerprint
from raypar.worker.process.torch_state_guard import TorchStateGuard
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.initial_state import StageStateSource
from raypar.worker.stage.stage_shard import StageShard
from raypar.worker.state.mirror import StateCopy
from raypar.worker.state.parameter_state import WHOLE

pytestmark = pytest.mark.part(5)

WAYS = {way.__name__: way for way in models.WAYS}
LAYOUTS = {
    "one worker": (1, 1, 1),
    "2 stages": (2, 1, 1),
    "2 replicas": (1, 2, 1),
    "4 stages": (4, 1, 1),
    "2 x 2": (2, 2, 1),
    "2 shards x 2 stages": (2, 1, 2),
}
"""Stages, replicas, shards."""
STYLES = (("*.up", "column"), ("*.down", "row"))
SEED = 5


def job(way: str, *, shards: int = 1, deferred_init: str = "never", dtype: str = "float32", steps: int = 4) -> Job:
    made = WAYS[way]()
    return Job(
        name=way,
        seed=SEED,
        steps=steps,
        batch_size=8,
        microbatches=4,
        model=ModelConfig(function=WAYS[way]),
        loss=LossConfig(function=models.loss),
        data=DataConfig(function=models.data),
        optimizer=OptimizerConfig(function="torch.optim:Adam", args={"lr": 1e-3}),
        deferred_init=deferred_init,
        dtype=dtype,
        plan=PlanConfig(styles=dict(STYLES if shards > 1 and sharded(made) else ())),
    )


def sharded(made) -> bool:
    linears = [m.up for m in modules_of(made).values() if type(m) is models.Block]
    return len(linears) == 4 and all(type(up) is nn.Linear and not up._forward_pre_hooks for up in linears)


def modules_of(made) -> dict[str, nn.Module]:
    if isinstance(made, nn.Sequential):
        return dict(made.named_children())
    if isinstance(made, list):
        return dict(made)
    return {layer.name: layer.build() for layer in made.layers}


def one_process(way: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """State by name, as plain PyTorch has it."""
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    made = WAYS[way]()
    layers = modules_of(made)
    tensors = {
        f"{name}.{path}": tensor.detach()
        for name, module in layers.items()
        for path, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    for names in getattr(made, "ties", ()):
        tensors |= dict.fromkeys(names, tensors[names[0]])
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def held(cores) -> list[tuple[str, torch.Tensor, object]]:
    """(name, tensor, shard that it is a slice for) of everything that workers hold."""
    return [
        (name, tensor.detach(), stage.shard)
        for core in cores
        for stage in core.stages.values()
        for name, tensor in {**stage.parameters, **stage.buffers}.items()
    ]


def check(cores, want: dict[str, torch.Tensor]) -> None:
    found = held(cores)
    for name, tensor, shard in found:
        whole = want[name]
        part = whole if shard is None else shard.part(name, whole)
        assert torch.equal(tensor, part), name
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0, name
    assert {name for name, _, _ in found} >= set(checkpoint_names(want, cores[0].graph))


def checkpoint_names(want, graph):
    canonical = {name: names[0] for names in graph.ties for name in names}
    return {canonical.get(name, name) for name in want}


def begins_with_the_values_of_one_process(way: str, deferred_init: str, layouts, dtypes) -> None:
    if way == "lazy":
        deferred_init = "never"  # cannot be deferred, see below
    for dtype in dtypes:
        want = one_process(way, getattr(torch, dtype))
        for stages, replicas, shards in layouts:
            spec = job(way, shards=shards, deferred_init=deferred_init, dtype=dtype)
            if shards > 1 and not spec.styles:
                stages, shards = 2 * stages, 1  # nothing in it can be cut
            plan = ParallelPlan.mesh(pp=stages, dp=replicas, tp=shards, layers=4)
            with OneProcessRun(spec, plan, "1f1b") as run:
                check(run.cores, want)


@pytest.mark.parametrize("way", WAYS)
def test_training_begins_with_the_values_of_one_process(way, monkeypatch):
    begins_with_the_values_of_one_process(way, "never", [LAYOUTS["2 x 2"]], ["float32"])
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    begins_with_the_values_of_one_process(way, "always", [LAYOUTS["2 shards x 2 stages"]], ["float32"])


@pytest.mark.full
@pytest.mark.parametrize("deferred_init", ["never", "always"])
@pytest.mark.parametrize("way", WAYS)
def test_so_it_does_in_every_layout(way, deferred_init, monkeypatch):
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    begins_with_the_values_of_one_process(way, deferred_init, LAYOUTS.values(), ["float32", "float64"])


SOME = [
    pytest.param(
        way, marks=() if way in ("random_buffers", "complex_buffers", "tied_after_init", "graph") else pytest.mark.full
    )
    for way in WAYS
]


@pytest.mark.parametrize("way", SOME)
def test_the_first_loss_and_all_that_follows_is_that_of_one_process(way):
    spec = job(way)
    want = reference.train(make_layer_graph(spec), spec)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=4), "1f1b") as run:
        assert [run.step(step)[0].loss for step in range(spec.steps)] == want.losses
        for name, copies in run.parameters().items():
            assert all(torch.equal(copy, want.parameters[name]) for copy in copies), name


@pytest.mark.parametrize("way", SOME)
def test_values_outlive_a_kill_a_change_of_plan_and_a_resume(way, tmp_path):
    """Buffers that forward may not change are the same to the end; parameters as in the undisturbed run."""
    spec = job(way)
    want, begun = reference.train(make_layer_graph(spec), spec), one_process(way, torch.float32)
    live = Generations(torch_flesh.TorchJob(spec, make_layer_graph(spec)))
    live.adopt(ParallelPlan.mesh(pp=2, dp=2, layers=4), [0, 1, 2, 3], 0)
    live.step(0)
    del live.bodies[1]  # killed: the others and a new worker go on, under other plans
    live.adopt(ParallelPlan.mesh(pp=4, layers=4), [0, 2, 3, 9], 1)
    live.step(1)
    for worker in (0, 2, 3, 9):
        for stage in live.bodies[worker].core.stages.values():
            assert all(torch.equal(buffer, begun[name]) for name, buffer in stage.buffers.items())
    path = live.save(tmp_path, 2)
    with OneProcessRun(spec, ParallelPlan.mesh(dp=2, layers=4), "1f1b") as run:
        for core in run.cores:
            core.load(path)
        losses = [run.step(step)[0].loss for step in range(2, spec.steps)]
        assert losses == want.losses[2:]
        for name, tensor, _ in held(run.cores):
            assert torch.equal(tensor, want.parameters.get(name, begun.get(name))), name


def without_elements() -> nn.Module:
    model = models.blocks()
    model[0].extra = nn.Parameter(torch.empty(0, 3))
    model[1].register_buffer("nothing", torch.empty(0))
    return model


def test_parameters_without_elements_go_from_plan_to_plan():
    spec = job("constructors").replace(model=ModelConfig(function=without_elements))
    want = reference.train(make_layer_graph(job("constructors")), job("constructors")).parameters
    live = Generations(torch_flesh.TorchJob(spec, make_layer_graph(spec)))
    for step, (plan, members) in enumerate(
        [({"pp": 2, "dp": 2}, [0, 1, 2, 3]), ({"pp": 4}, [0, 2, 3, 9]), ({}, [9]), ({}, [4])]
    ):
        live.adopt(ParallelPlan.mesh(**plan, layers=4), members, step)
        live.step(step)
    (stage,) = live.bodies[4].core.stages.values()
    assert stage.parameters["0.extra"].shape == (0, 3)
    assert all(torch.equal(stage.parameters[name], value) for name, value in want.items())


def test_checkpoints_hold_buffers_and_those_of_an_older_raypar_are_completed(tmp_path):
    spec = job("random_buffers")
    begun = one_process("random_buffers", torch.float32)
    plan = ParallelPlan.mesh(pp=2, dp=2, layers=4)
    with OneProcessRun(spec, plan, "1f1b") as run:
        run.step(0)
        path = checkpoint_files.save_run(run, tmp_path, 1)
    kinds = {(e.name, e.kind) for e in checkpoint_files.load_manifest(path).entries}
    assert {("0.mask", BUFFER), ("3.shift", CACHE), ("2.count", BUFFER), ("0.up.weight", PARAMETER)} <= kinds
    older = checkpoint_files.create_checkpoint(tmp_path, 2)
    tensors = {
        (n, k): v
        for n, kinds in checkpoint_files.read_checkpoint_state(path).items()
        for k, v in kinds.items()
        if torch.is_tensor(v)
    }
    record = checkpoint_files.write_shard(older, "worker_0000.safetensors", tensors)
    lacking = checkpoint_files.commit_checkpoint(older, [record], steps_done=2, contract=contract_of_job(spec))
    with OneProcessRun(spec, ParallelPlan.mesh(layers=4), "1f1b") as run:
        for core in run.cores:
            for stage in core.stages.values():
                for buffer in stage.buffers.values():
                    buffer.zero_()
            core.load(lacking)
            for stage in core.stages.values():
                assert all(torch.equal(buffer, begun[name]) for name, buffer in stage.buffers.items())


def test_frozen_parameters_stay_frozen_and_keep_their_values():
    spec = job("frozen")
    begun = one_process("frozen", torch.float32)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=4), "1f1b") as run:
        for step in range(spec.steps):
            run.step(step)
        for name, tensor, _ in held(run.cores):
            still = name.startswith("0.") or name == "2.up.weight"
            assert torch.equal(tensor, begun[name]) == still, name


def test_attributes_of_parameters_are_kept():
    """As `no_weight_decay`, by which people tell optimizers what to do."""

    def marked() -> nn.Module:
        model = models.blocks()
        model[1].up.weight.no_weight_decay = True
        return model

    with OneProcessRun(
        job("constructors").replace(model=ModelConfig(function=marked)), ParallelPlan.mesh(pp=2, layers=4), "1f1b"
    ) as run:
        found = {n: p for core in run.cores for stage in core.stages.values() for n, p in stage.parameters.items()}
        assert [name for name, parameter in found.items() if hasattr(parameter, "no_weight_decay")] == ["1.up.weight"]


def test_the_users_own_model_is_not_touched():
    """A model function may return what the user still holds."""
    model = models.blocks()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with OneProcessRun(
        job("constructors").replace(model=ModelConfig(function=lambda: model)), ParallelPlan.mesh(layers=4), "1f1b"
    ) as run:
        run.step(0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_generators_are_left_as_they_were():
    spec = job("graph")
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    want = random.random(), float(numpy.random.rand()), torch.rand(1).item()
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    make_layer_graph(spec)
    assert (random.random(), float(numpy.random.rand()), torch.rand(1).item()) == want


def described(initial: dict[str, int]) -> AdoptedStages:
    return {"rank": 0, "parameters": {}, "bytes": 0, "initial": initial, "collated": {}, "not_kept": ""}


def never_the_same() -> nn.Module:
    model = models.blocks()
    nn.init.constant_(model[1].up.weight, random.SystemRandom().random())
    return model


def test_workers_that_begin_with_other_values_are_found():
    spec = job("constructors").replace(model=ModelConfig(function=never_the_same))
    found = InitialDigestCheck()
    built = [StageStateSource(make_layer_graph(spec), 0, 4, spec).initial().digests for _ in range(2)]
    errors = [found.add(worker, described(initial=digests)) for worker, digests in enumerate(built)]
    assert errors[0] is None
    assert isinstance(errors[1], ModelError) and "workers 0 and 1 begin with other values of 1.up.weight" in errors[1].what


def test_trained_complex_parameters_are_refused():
    """Norms and ballots are of real numbers."""

    def model() -> nn.Module:
        made = models.blocks()
        made[1].phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        return made

    with pytest.raises(ModelError, match=r"1\.phase is a trained parameter of complex numbers"):
        make_layer_graph(job("constructors").replace(model=ModelConfig(function=model)))


def test_layers_with_complex_buffers_pass_the_check_of_shapes():
    """`Module.to(dtype)` would make the skeleton's complex buffers real."""
    assert preflight(job("complex_buffers")).samples == 16


def test_complex_buffers_are_mirrored_exported_and_read_by_init_from(tmp_path):
    spec, begun = job("complex_buffers"), one_process("complex_buffers", torch.float32)
    phase = begun["1.phase"]
    copy = StateCopy.of({("1.phase", WHOLE): {PARAMETER: phase}, ("0.ids", WHOLE): {PARAMETER: begun["0.ids"]}}, BufferPool())
    assert torch.equal(copy.holdings()["1.phase", WHOLE].state[PARAMETER], phase)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=4), "1f1b") as run:
        path = checkpoint_files.save_run(run, tmp_path / "checkpoints", 0)
    assert main(["export", str(path), "--out", str(tmp_path / "m.safetensors")]) == 0
    exported = load_file(tmp_path / "m.safetensors")
    assert torch.equal(exported["1.phase"], phase) and exported["1.phase"].dtype == torch.complex64
    for source in (path, tmp_path / "m.safetensors"):
        again = make_layer_graph(spec.replace(seed=77, init_from=InitFromConfig(path=str(source)))).initial_values
        values = dict(again.stream(["1.phase", "1.ids", "1.factor"], torch.float32))
        assert all(torch.equal(value, begun[name]) and value.dtype == begun[name].dtype for name, value in values.items())


@pytest.mark.parametrize(
    "buffer, said",
    [
        (torch.ones(3, dtype=torch.complex128), "1.odd has the dtype complex128, which checkpoints do not hold"),
        (torch.eye(3).to_sparse(), r"1.odd is no dense tensor \(torch.sparse_coo\)"),
    ],
)
def test_buffers_that_no_checkpoint_could_hold_are_refused_before_anything_starts(buffer, said):
    def model() -> nn.Module:
        made = models.blocks()
        made[1].register_buffer("odd", buffer)
        return made

    with pytest.raises(ModelError, match=said) as error:
        make_layer_graph(job("constructors").replace(model=ModelConfig(function=model)))
    assert "register it" in error.value.cure


def test_what_models_may_hold_is_what_checkpoints_can_hold():
    held = {str(dtype).removeprefix("torch.") for dtype in STATE_DTYPES}
    assert held == {name for name in DTYPES if "float" not in name}


# -- from a file -------------------------------------------------------------------------------------------------------------


def tied_and_frozen() -> nn.Module:
    """Of its ties one leads across stages; a layer on shards is frozen."""
    model = models.random_buffers()
    model[3].up.weight = model[0].up.weight
    model[2].norm.weight = model[1].norm.weight
    model[1].down.requires_grad_(False)
    model[2].norm.bias.requires_grad_(False)
    return model


def weights_in_bfloat16(path) -> dict[str, torch.Tensor]:
    """What was written: of a tie one name, and everything but buffers that are not persistent."""
    torch.manual_seed(99)
    state = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in tied_and_frozen().state_dict().items()
    }
    state = {name: value + 1 if "count" in name else value for name, value in state.items()}
    del state["3.up.weight"], state["2.norm.weight"]
    save_file(state, path)
    return state


def loads_itself(path: str) -> nn.Module:
    model = tied_and_frozen()
    model.load_state_dict(load_file(path), strict=False)
    return model


@pytest.mark.ci
@pytest.mark.parametrize(
    "layout, deferred_init",
    [
        ("2 x 2", "never"),
        ("2 shards x 2 stages", "always"),
        pytest.param("2 x 2", "always", marks=pytest.mark.full),
        pytest.param("2 shards x 2 stages", "never", marks=pytest.mark.full),
    ],
)
def test_a_file_in_bfloat16_gives_ties_and_frozen_layers_the_values_of_one_process_that_loads_it(
    layout, deferred_init, tmp_path, monkeypatch
):
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    path = str(tmp_path / "f.safetensors")
    weights_in_bfloat16(path)
    torch.manual_seed(SEED)
    model = loads_itself(path)
    want = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    stages, replicas, shards = LAYOUTS[layout]
    spec = job("random_buffers", shards=shards, deferred_init=deferred_init).replace(init_from=InitFromConfig(path=path))
    spec = spec.replace(model=ModelConfig(function=tied_and_frozen))
    frozen = {"1.down.weight", "1.down.bias", "2.norm.bias"}
    with OneProcessRun(spec, ParallelPlan.mesh(pp=stages, dp=replicas, tp=shards, layers=4), "1f1b") as run:
        check(run.cores, want)
        held = {name: p for core in run.cores for stage in core.stages.values() for name, p in stage.parameters.items()}
        assert {name for name, parameter in held.items() if not parameter.requires_grad} == frozen
        losses = [run.step(step)[0].loss for step in range(spec.steps)]
    by_hand = spec.replace(model=ModelConfig(function=loads_itself, args={"path": path}), init_from=None)
    if shards == 1:
        assert losses == reference.train(make_layer_graph(by_hand), by_hand).losses
    else:
        with OneProcessRun(by_hand, ParallelPlan.mesh(tp=shards, layers=4), "1f1b") as run:
            assert losses == [run.step(step)[0].loss for step in range(spec.steps)]


def test_a_shard_reads_its_slices_of_a_file_and_nothing_else(tmp_path, monkeypatch):
    """Every byte of the two layers on shards is read once, by one shard; what is whole on both, by both."""
    monkeypatch.setattr(safetensors_weights, "_MIN_RUN_BYTES", 1)  # else rows as short as these are read whole
    path, read, made = str(tmp_path / "f.safetensors"), [], {}
    torch.manual_seed(1)
    model = nn.Sequential(models.Block())
    save_file(model.state_dict(), path)
    spec = job("constructors", shards=2).replace(model=ModelConfig(function=lambda: nn.Sequential(models.Block())))
    spec = with_weights_fingerprint(spec.replace(init_from=InitFromConfig(path=path)))
    graph = make_layer_graph(spec)
    read_values, read_into = safetensors_weights.SafetensorsWeights._values, weights_file.WeightsFile.read_into

    def values(self, memory, file, offset, elements, kind):
        read.append(elements * kind.itemsize)
        return read_values(self, memory, file, offset, elements, kind)

    def into(self, out, name, slices=None):
        made.setdefault(name, []).append(tuple(out.shape))
        read_into(self, out, name, slices)

    monkeypatch.setattr(safetensors_weights.SafetensorsWeights, "_values", values)
    monkeypatch.setattr(weights_file.WeightsFile, "read_into", into)
    layout, names = compute_shard_layout(graph, 2, dict(STYLES)), dict(model.named_parameters())
    for rank in range(2):
        shard = StageShard(SimpleNamespace(shard=rank, size=2), layout)
        state = StageStateSource(graph, 0, 1, spec, shard).initial()
        assert all(torch.equal(state.values[name], shard.part(name, whole)) for name, whole in names.items())
        assert len(state.digests) == len(names) and "0.up.weight" not in state.digests and "0.norm.weight" in state.digests
    assert made["0.up.weight"] == [(4, 6)] * 2 and made["0.down.weight"] == [(6, 4)] * 2 and made["0.up.bias"] == [(4,)] * 2
    assert made["0.down.bias"] == [(6,)] * 2
    whole = sum(p.nbytes for name, p in names.items() if name not in layout.cuts)
    assert sum(read) == 2 * whole + sum(p.nbytes for name, p in names.items() if name in layout.cuts)


# -- what changes with a parameter without being it ---------------------------------------------------------------------------


def shares_data() -> nn.Module:
    model = models.blocks()
    model[2].up.weight.data = model[0].up.weight.data
    return model


def transposed_view() -> nn.Module:
    model = models.blocks()
    model[0].down.weight = nn.Parameter(model[0].up.weight.data.t())
    return model


def buffer_in_parameter() -> nn.Module:
    model = models.blocks()
    model[1].register_buffer("row", model[1].up.weight.data[0])
    return model


def buffer_is_parameter() -> nn.Module:
    model = models.blocks()
    model[1].register_buffer("same", model[1].norm.weight)
    return model


def parameter_in_a_list() -> nn.Module:
    model = models.blocks()
    model[1].scales = [model[1].norm.weight]
    return model


def data_in_an_attribute() -> nn.Module:
    model = models.blocks()
    model[1].scale = {"of norm": model[1].norm.weight.data}
    return model


def lambda_with_self() -> nn.Module:
    model = models.blocks()
    block = model[1]
    block.project = lambda x: block.up(x)
    return model


def hook_with_a_parameter() -> nn.Module:
    model = models.blocks()
    scale = model[1].norm.weight
    model[0].register_forward_hook(lambda module, args, output: output * scale)
    return model


def module_and_a_function_of_it() -> nn.Module:
    """The module alone would be copied with its layer; the function keeps the one that is not trained."""
    model = models.blocks()
    norm = model[1].norm
    model[1].stages = [norm, lambda x: norm(x)]
    return model


def module_of_another_layer() -> nn.Module:
    model = models.blocks()
    model[2].others = [model[0].norm]
    return model


@pytest.mark.parametrize("deferred_init", ["never", "always"])
@pytest.mark.parametrize(
    "model, found",
    [
        (shares_data, "0.up.weight and the trained parameter 2.up.weight share memory"),
        (transposed_view, "0.up.weight and the trained parameter 0.down.weight share memory"),
        (buffer_in_parameter, "1.row and the trained parameter 1.up.weight share memory"),
        (buffer_is_parameter, "1.same and the trained parameter 1.norm.weight share memory"),
        (parameter_in_a_list, "1.scales holds the trained parameter 1.norm.weight in a plain attribute"),
        (data_in_an_attribute, "1.scale holds the trained parameter 1.norm.weight in a plain attribute"),
        (lambda_with_self, "1.project holds the trained parameter 1.norm.weight in a variable of a function"),
        (
            module_and_a_function_of_it,
            "1.stages holds the trained parameter 1.norm.weight in a variable of a function",
        ),
        (hook_with_a_parameter, "0._forward_hooks holds the trained parameter 1.norm.weight in a variable of a function"),
        (module_of_another_layer, "2.others holds the trained parameter 0.norm.weight in a module of another layer"),
    ],
)
def test_what_would_change_with_a_trained_parameter_in_one_process_only_is_refused(model, found, deferred_init, monkeypatch):
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    with pytest.raises(ModelError) as error:
        make_layer_graph(job("constructors", deferred_init=deferred_init).replace(model=ModelConfig(function=model)))
    assert found in error.value.what


def test_parameters_that_are_disjoint_parts_of_one_memory_are_parameters_like_others():
    def columns() -> nn.Module:
        model, both = models.blocks(), torch.randn(8, 12)
        model[0].up.weight, model[1].up.weight = nn.Parameter(both[:, :6]), nn.Parameter(both[:, 6:])
        return model

    torch.manual_seed(SEED)
    want = dict(columns().named_parameters())
    initial = make_layer_graph(job("constructors").replace(model=ModelConfig(function=columns))).initial_values
    for name, value in initial.stream(list(want), torch.float32):
        assert torch.equal(value, want[name]), name


def test_a_parameter_that_builds_of_a_graph_share_needs_a_tie():
    def shared(ties=()) -> Graph:
        weight = nn.Parameter(torch.randn(6, 6))

        def build() -> nn.Module:
            made = nn.Linear(6, 6, bias=False)
            made.weight = weight
            return made

        return Graph((Layer("a", build, ("x",), ("y",)), Layer("b", build, ("y",), ("z",))), "z", ties=ties)

    spec = job("constructors")
    with pytest.raises(ModelError, match=r"share a trained parameter, a.weight and b.weight, but no tie names them"):
        make_layer_graph(spec.replace(model=ModelConfig(function=shared)))
    make_layer_graph(spec.replace(model=ModelConfig(function=shared, args={"ties": (("a.weight", "b.weight"),)})))


# -- tensors that are neither parameters nor buffers, and are never trained ---------------------------------------------------


TABLES: dict[str, torch.Tensor] = {}


class Tables(models.Block):
    """Reads tensors from plain attributes, from a module that nobody registered, and from a global."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nested = torch.rand(6), {"shift": [torch.rand(6)]}
        self.shadow = [copy.deepcopy(self.up).requires_grad_(False)]
        TABLES["global"] = torch.rand(6)

    def forward(self, x):
        return super().forward(x * self.scale + self.nested["shift"][0] + TABLES["global"]) + self.shadow[0](x)[..., :6]


def tables() -> nn.Module:
    return nn.Sequential(*(Tables() for _ in range(4)))


def tables_in_functions() -> nn.Module:
    model, table, extra = models.blocks(), torch.rand(6), nn.Linear(6, 6).requires_grad_(False)
    model[1].register_forward_hook(lambda module, args, output: output * table)
    model[2].register_forward_hook(lambda module, args, output: extra(output))
    return model


def frozen_in_a_function() -> nn.Module:
    model = models.blocks()
    block = model[2].requires_grad_(False)
    block.register_buffer("shift", torch.rand(6))
    block.register_forward_hook(lambda module, args, output: output * block.norm.weight + block.shift)
    return model


def other_names_of_what_is_not_trained() -> nn.Module:
    model = nn.Sequential(*(Aliased() for _ in range(4)))
    model[1].shift.factor = 3.0  # type: ignore[union-attr]
    return model


class Aliased(models.Block):
    """Plain attributes that hold its buffer and its frozen parameter; it reads an attribute of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.rand(6))
        self.norm.requires_grad_(False)
        self.same, self.frozen = self.shift, [self.norm.bias]

    def forward(self, x):
        return super().forward(x + self.same * getattr(self.shift, "factor", 1.0)) + self.frozen[0]


@pytest.mark.ci
@pytest.mark.parametrize("model", [tables, tables_in_functions, other_names_of_what_is_not_trained])
@pytest.mark.parametrize(
    "begins, deferred_init",
    [
        pytest.param(begins, mode, marks=() if (begins, mode) in (("model", "never"), ("file", "always")) else pytest.mark.full)
        for begins in ("model", "by-name", "file")
        for mode in ("never", "always")
    ],
)
def test_tensors_that_are_no_parameters_hold_what_the_model_function_gave_them(
    begins, model, deferred_init, tmp_path, monkeypatch
):
    """With `init: by-name` and `init_from` too. Compared by losses: one process has the same parameters."""
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    spec = job("constructors", deferred_init=deferred_init).replace(model=ModelConfig(function=model))
    by_hand = spec
    if begins == "file":
        torch.manual_seed(99)
        state, path = model().state_dict(), tmp_path / "f.safetensors"
        save_file(state, path)
        spec = spec.replace(init_from=InitFromConfig(path=str(path)))
        by_hand = by_hand.replace(model=ModelConfig(function=lambda: loaded(model(), state)))
    elif begins == "by-name":
        spec = spec.replace(init="by-name")
        names = [name for name, _ in model().named_parameters()]
        values = dict(make_layer_graph(spec).initial_values.stream(names, torch.float32))
        by_hand = by_hand.replace(model=ModelConfig(function=lambda: loaded(model(), values)))
    want = reference.train(make_layer_graph(by_hand), by_hand).losses
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=4), "1f1b") as run:
        assert [run.step(step)[0].loss for step in range(spec.steps)] == want


@pytest.mark.parametrize("deferred_init", ["never", pytest.param("always", marks=pytest.mark.full)])
def test_a_function_with_a_frozen_parameter_is_refused_where_other_values_replace_the_model_functions(
    deferred_init, tmp_path, monkeypatch
):
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    spec = job("constructors", deferred_init=deferred_init).replace(model=ModelConfig(function=frozen_in_a_function))
    want = reference.train(make_layer_graph(spec), spec).losses
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, layers=4), "1f1b") as run:
        assert [run.step(step)[0].loss for step in range(spec.steps)] == want
    save_file(frozen_in_a_function().state_dict(), tmp_path / "f.safetensors")
    for other in (spec.replace(init="by-name"), spec.replace(init_from=InitFromConfig(path=str(tmp_path / "f.safetensors")))):
        with pytest.raises(
            ModelError, match=r"2\._forward_hooks holds 2.norm.weight in a variable of a function .* would keep"
        ):
            make_layer_graph(other)


def loaded(model: nn.Module, state) -> nn.Module:
    model.load_state_dict(state, strict=False)
    return model


def test_an_attribute_with_a_frozen_parameter_that_is_cut_over_shards_is_refused():
    def model() -> nn.Module:
        made = models.blocks()
        made[1].requires_grad_(False)
        made[1].aliases = [made[1].up.weight]
        return made

    spec = job("constructors", shards=2).replace(model=ModelConfig(function=model))
    with pytest.raises(ModelError, match=r"'aliases' of a Block is a plain attribute with a parameter \[8, 6\] that is cut"):
        OneProcessRun(spec, ParallelPlan.mesh(tp=2, layers=4), "1f1b")


class Doubled(nn.Parameter):
    """A class of parameters of its own, which may change what operations do."""


@pytest.mark.parametrize("what", ["class", "hook", "hook after accumulation", "method of another layer"])
def test_what_workers_would_leave_out_silently_is_refused(what):
    def model() -> nn.Module:
        made = models.blocks()
        weight = made[1].up.weight
        if what == "class":
            made[1].up.weight = Doubled(weight.data)
        elif what == "hook":
            weight.register_hook(lambda gradient: gradient * 0.5)
        elif what == "hook after accumulation":
            weight.register_post_accumulate_grad_hook(lambda parameter: None)
        else:
            made[2].forward = made[1].forward
        return made

    said = {"class": "1.up.weight is a Doubled, a class of its own", "method of another layer": "2.forward holds the trained"}
    with pytest.raises(ModelError, match=said.get(what, "1.up.weight has a hook on its gradient")):
        make_layer_graph(job("constructors").replace(model=ModelConfig(function=model)))


# -- deferred ----------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_deferred_is_made_whole_and_a_line_says_so(monkeypatch):
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    monkeypatch.setattr("raypar.worker.layer_graph_of_job.WHOLE_BYTES", 100)
    spec = job("lazy", deferred_init="auto")
    graph = make_layer_graph(spec)
    assert "cannot be made in parts" in graph.initial_values.notes[0]
    with pytest.raises(ModelError, match="does what cannot be deferred") as error:
        make_layer_graph(spec.replace(deferred_init="always"))
    assert "deferred_init: never" in error.value.cure


def probabilities() -> nn.Module:
    model = models.blocks()
    for block in model:
        block.up.weight.data.bernoulli_(torch.rand(8, 6))
    return model


def through_a_file() -> nn.Module:
    file = io.BytesIO()
    torch.save(models.blocks().state_dict(), file)
    file.seek(0)
    model = models.blocks()
    model.load_state_dict(torch.load(file))
    return pickle.loads(pickle.dumps(model))


def decompositions() -> nn.Module:
    model = models.blocks()
    with torch.no_grad():
        left, _, right = torch.linalg.svd(model[1].up.weight, full_matrices=False)
        model[1].up.weight.copy_(left @ right)
        model[2].up.weight.copy_(torch.poisson(model[3].up.weight.t().abs()).t())
        model[3].norm.weight.copy_(torch.linalg.eig(torch.randn(6, 6)).eigenvectors.real[0])
        model[3].down.weight.copy_(torch.fft.rfft(torch.randn(14, 6), dim=0).real.t())
    return model


def channels_last() -> nn.Module:
    return nn.Sequential(*(nn.Conv2d(3, 3, 3).to(memory_format=torch.channels_last) for _ in range(4)))


def under_autocast() -> nn.Module:
    model = models.blocks()
    with torch.autocast("cpu"), torch.no_grad():
        model[0].norm.bias.copy_(model(torch.randn(5, 6)).mean(0))
    return model


def under_vmap() -> nn.Module:
    model = models.blocks()
    with torch.no_grad():
        model[1].up.weight.copy_(torch.func.vmap(lambda row: row / row.norm())(model[1].up.weight))
    return model


def quasirandom() -> nn.Module:
    model = models.blocks()
    model[0].up.weight.data.copy_(torch.quasirandom.SobolEngine(6, scramble=True, seed=3).draw(8))
    return model


def made_without_values() -> nn.Module:
    model = models.blocks()
    for block in model:
        block.up = nn.utils.skip_init(nn.Linear, 6, 8)
        nn.init.normal_(block.up.weight)
        nn.init.zeros_(block.up.bias)
    return model


@pytest.mark.parametrize("model", [probabilities, through_a_file, decompositions, channels_last, made_without_values])
def test_deferred_values_are_those_of_one_process(model, monkeypatch):
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    begins_like_one_process(model, "always")


@pytest.mark.parametrize("model", [under_autocast, under_vmap, quasirandom])
def test_what_the_meta_device_does_not_do_is_done_whole(model, monkeypatch):
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    monkeypatch.setattr("raypar.worker.layer_graph_of_job.WHOLE_BYTES", 100)
    initial = begins_like_one_process(model, "auto")
    assert "cannot be made in parts" in initial.notes[0]
    with pytest.raises((ModelError, UserCodeError)) as error:
        make_layer_graph(job("constructors", deferred_init="always").replace(model=ModelConfig(function=model)))
    assert "deferred_init: never" in error.value.cure


def begins_like_one_process(model, deferred_init):
    torch.manual_seed(SEED)
    made = model()
    want = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    initial = make_layer_graph(
        job("constructors", deferred_init=deferred_init).replace(model=ModelConfig(function=model))
    ).initial_values
    for name, value in initial.stream(list(want), torch.float32):
        assert torch.equal(value, want[name]), name
    return initial


@pytest.mark.parametrize("deferred_init", ["never", "always"])
def test_memory_that_skip_init_leaves_without_values_is_found(deferred_init, monkeypatch):
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 100)  # the weight is deferred, the bias is not

    def model() -> nn.Module:
        made = models.blocks()
        made[1].up = nn.utils.skip_init(nn.Linear, 6, 8)
        return made

    initial = make_layer_graph(
        job("constructors", deferred_init=deferred_init).replace(model=ModelConfig(function=model))
    ).initial_values
    for name in ("1.up.weight", "1.up.bias"):
        with pytest.raises(ModelError, match=f"parameter {name} is left without values"):
            dict(initial.stream([name], torch.float32))


def test_a_large_model_is_deferred_by_itself(monkeypatch):
    monkeypatch.setattr(deferred, "DEFERRED_BYTES", 0)
    monkeypatch.setattr("raypar.worker.layer_graph_of_job.WHOLE_BYTES", 100)
    graph = make_layer_graph(job("gpt2_residual").replace(deferred_init="auto"))
    assert type(graph.initial_values).__name__ == "DeferredInitialValues"
    want = one_process("gpt2_residual", torch.float32)
    assert all(torch.equal(value, want[name]) for name, value in graph.initial_values.stream(list(want), torch.float32))


def test_values_that_the_model_function_loads_are_told_with_their_cure():
    def load() -> nn.Module:
        model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
        model.load_state_dict({k: torch.from_numpy(numpy.ones(v.shape, "float32")) for k, v in model.state_dict().items()})
        return model

    for deferred_init in ("never", "always"):
        (line,) = make_layer_graph(
            job("constructors").replace(model=ModelConfig(function=load), deferred_init=deferred_init)
        ).initial_values.notes
        assert "loads 3 MiB of values itself" in line and "init_from" in line


def test_by_name_says_that_constructors_do_not_count():
    graph = make_layer_graph(job("zeroed_head").replace(init="by-name"))
    assert "not with what the model function did" in graph.initial_values.notes[0]
    values = dict(graph.initial_values.stream(["3.down.weight"], torch.float32))
    assert values["3.down.weight"].abs().min() > 0


def test_a_torchvision_of_another_pytorch_is_named_where_transformers_hides_it():
    def model() -> nn.Module:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'LlamaForCausalLM'.") from error

    with pytest.raises(UserCodeError) as raised:
        make_layer_graph(job("constructors").replace(model=ModelConfig(function=model)))
    assert "install both from one index, or uninstall torchvision" in raised.value.cure


def test_what_the_model_function_raises_is_the_users_error():
    with pytest.raises(UserCodeError, match="ZeroDivisionError"):
        make_layer_graph(job("constructors").replace(model=ModelConfig(function=lambda: 1 / 0)))


def init_that_leaks(name: str, parameter: torch.Tensor) -> None:
    parameter.copy_(torch.randn(parameter.shape).to(parameter.dtype))
    torch.set_default_dtype(torch.float64)


def graph_that_leaks() -> Graph:
    layers = [Layer("a", lambda: nn.Linear(3, 3), ("x",), ("h",)), Layer("b", lambda: nn.Linear(3, 3), ("h",), ("y",))]
    return Graph(tuple(layers), output="y", init=init_that_leaks)


class LeakingLinear(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        torch.set_default_dtype(torch.float64)


@pytest.mark.parametrize(
    "model, init", [(graph_that_leaks, "model"), (lambda: [LeakingLinear(3, 3), nn.Linear(3, 3)], "by-name")]
)
def test_process_state_that_an_initialisation_by_name_leaves_changed_decides_no_value(model, init):
    """A worker that holds the second layer alone has the values of one that holds both."""
    found = []
    for first in (0, 1):
        guard = TorchStateGuard(threads=torch.get_num_threads())
        graph = make_layer_graph(job("constructors").replace(model=ModelConfig(function=model), init=init), guard.watching)
        names = state_shapes(graph, first, 2)
        found.append(dict(graph.initial_values.stream(names, torch.float32)))
        assert torch.get_default_dtype() is torch.float32
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[1])


def test_lines_about_what_the_model_function_costs_are_told_whatever_values_replace_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_graph_of_job, "LOADS_BYTES", 1)
    state = {name: torch.zeros_like(tensor) for name, tensor in WAYS["numpy_copies"]().state_dict().items()}
    torch.save(state, tmp_path / "zeros.pt")
    spec = job("numpy_copies")
    for given in ({"init": "by-name"}, {"init_from": InitFromConfig(path=str(tmp_path / "zeros.pt"))}):
        notes = make_layer_graph(spec.replace(**given)).initial_values.notes
        assert any("loads" in note and "init_from: FILE" in note for note in notes), notes
