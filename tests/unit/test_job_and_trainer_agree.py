"""Job files, `Trainer(...)` and `Trainer.from_yaml` agree: the same keys, types, defaults and errors."""

import copy
import datetime
import functools
import inspect
import random
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

import raypar
from raypar import trainer as trainer_module
from raypar.errors import ConfigError, RayparError
from raypar.files.safe_yaml import dump_yaml, parse_yaml
from raypar.job import CheckpointConfig, Job, PlanConfig
from raypar.job.contract import contract_of_job, unmarked_keys
from raypar.job.key import DRIVER
from raypar.job.read_job import RUN_ARGUMENTS, load_job, parse_job
from raypar.job.signature import with_signature
from raypar.job.walk_sections import section_types
from raypar.launch import start_new_run
from raypar.launch.result import Result
from raypar.launch.run_of_submitted_job import choose_lasting_run_dir
from raypar.trainer import Trainer
from raypar.worker.data.user_dataset import make_dataset

pytestmark = pytest.mark.part(8)

ROOT = Path(__file__).parents[2]
FULL: dict[str, Any] = {
    "name": "full",
    "steps": 3,
    "batch_size": 8,
    "microbatches": 4,
    "model": {"function": "m:layers", "args": {"depth": 2, "dropout": None}},
    "loss": "m:loss",
    "data": {
        "function": "m:text",
        "names": ["ids", "labels"],
        "input": "ids",
        "target": "labels",
        "collate": {"function": "m:c"},
        "pad": {},
        "pack": {"to": 8},
    },
    "optimizer": {"function": "torch.optim:SGD", "args": {"lr": 3e-4}, "groups": [{"match": "*.bias", "lr": 1e-3}]},
    "lr_schedule": {"function": "m:cosine", "args": {"warmup": 2}},
    "validation": {"function": "m:text", "every": 2, "collate": {"function": "m:c"}, "pad": {}, "pack": {"to": 8}},
    "plan": {"stages": 2, "replicas": [1, 2], "styles": {"*.up": "column"}, "layout": {"heads": "shards"}},
    "elastic": {"min_workers": 2},
    "placement": {"label_selector": {"market": "spot"}, "on_demand": 1},
    "precision": {"compute": "bf16"},
    "average": {"decay": 0.99},
    "checkpoint": {"every": 2, "best": [{"metric": "validation_accuracy", "mode": "max"}]},
    "init_from": {"path": "weights.safetensors", "rename": {"a": "b"}},
    "early_stopping": {"patience": 2},
    "metrics": {"accuracy": {"function": "m:accuracy", "args": {"top": 1}}},
    "callbacks": [{"function": "m:Log", "args": {}}],
    "trackers": [{"tracker": "tensorboard"}],
}
"""A job with all of its sections."""
VALUES: tuple[Any, ...] = (
    "wrong",
    "m:f",
    "",
    -1,
    0,
    1,
    10**12,
    0.5,
    -0.5,
    True,
    False,
    None,
    [],
    [1, 2],
    ["a"],
    {},
    {"no_such": 1},
)
"""What every key is given in turn: each is wrong for most keys, and right for some."""


def paths(model: Any = Job, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all keys in a job's tree; an item of a list has the number 0, one of a mapping a name."""
    found = []
    items = {
        "callbacks": (0,),
        "trackers": (0,),
        "metrics": ("accuracy",),
        "best": (0,),
        "mix": (0,),
        "entries": (0,),
        "placements": (0,),
        "sets": ("accuracy",),
    }
    for name, info in model.model_fields.items():
        found.append((*above, name))
        for inner in section_types(info.annotation):
            found += paths(inner, (*above, name, *items.get(name, ())))
    return found


PATHS = paths()


def with_value(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """`FULL` with one key set."""
    tree = copy.deepcopy(FULL)
    if path[:2] == ("loss", path[-1]):
        tree["loss"] = {"function": "m:loss"}
    if len(path) > 2 and path[1] in ("sampler", "weights", "group_by"):  # there is one of them at most
        tree["data"][path[1]] = {"function": "m:f"}
    if path[1:2] == ("mix",) and len(path) > 2:  # in the place of a function
        tree["data"] = {"mix": [{"function": "m:text", "ratio": 3}, {"function": "m:code", "ratio": 1}]}
    if path[1:2] == ("entries",) and len(path) > 2:  # in the place of a function
        entry = {"match": "*.weight", "function": "torch.optim:Muon", "lr_schedule": {"function": "m:cosine"}}
        tree["optimizer"] = {"entries": [entry, {"match": "*", "function": "torch.optim:SGD"}]}
    if path[1:2] == ("placements",) and len(path) > 2:  # in the place of stages
        tree["plan"] = {"placements": [{"layers": "a", "workers": [[0]], "share": [1]}]}
    if "loss_scale" in path[1:-1]:  # which only fp16 has
        tree["precision"] = {"compute": "fp16", "loss_scale": {}}
    if path[:2] == ("validation", "sets"):
        every = tree["validation"].pop("every")
        tree["validation"] = {"every": every, "sets": {"accuracy": tree["validation"]}}
    if "preprocess_logits" in path:
        tree["metrics"]["accuracy"] |= {"of": "all", "preprocess_logits": {"function": "m:classes"}}
    here: Any = tree
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    return tree


def read(tree: dict[str, Any], section: str) -> Job:
    """The job of a tree of which one section is written as a job file. YAML of the whole takes most of these tests' time."""
    rest = {key: value for key, value in copy.deepcopy(tree).items() if key != section}
    return parse_job(dump_yaml({section: tree[section]}), defaults=rest)


def outcome(make: Any) -> Any:
    """The job, or the error, that a way in comes to."""
    try:
        return make()
    except RayparError as error:
        return error


def as_from_python(error: RayparError) -> tuple[type, str, str]:
    """A job file's error as it reads where the job was given to `Trainer`: only the words that name the key differ."""
    what = re.sub(r"unknown key (\w+)(?![\w.])", r"unknown argument \1", error.what)
    cure = re.sub(r"(correct|add) (\w+)\.([\w.]+) (in|to) the job file", r"\1 \3 \4 the argument \2", error.cure)
    cure = re.sub(r"correct (\w+) in the job file", r"correct the argument \1", cure)
    cure = re.sub(r"add (\w+) to the job file", r"give the argument \1", cure)
    return type(error), what, cure


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_every_value_of_every_key_is_the_same_job_or_the_same_error_both_ways(path: tuple[Any, ...]):
    compared = 0
    for value in VALUES:
        if (
            isinstance(value, list)
            and path[0] in ("data", "validation")
            and (len(path) == 1 or path[-1] == "function")
            and (set(path) <= {"data", "validation", "mix", "sets", "accuracy", 0, "function"})
        ):
            continue  # from Python a list is a data set
        if path in (("elastic",), ("name",)) and value is None:
            continue  # from Python it is the default, of `name` that of the former release; of a file it could mean either
        tree = with_value(path, value)
        written, given = outcome(lambda tree=tree: read(tree, path[0])), outcome(lambda tree=tree: Trainer(**tree).job)
        if isinstance(written, Job):
            assert given == written, (path, value, str(given))
        else:
            assert isinstance(given, RayparError), (path, value, str(written))
            words = '; a function is "module:name", the function itself, or a pair (function, keyword arguments)'
            assert (type(given), given.what, given.cure.replace(words, "")) == as_from_python(written), (path, value)
            compared += 1
    assert compared > 0, "no value is wrong for this key: add one"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_a_misspelt_key_is_the_same_error_both_ways(path: tuple[Any, ...]):
    wrong = (*path[:-1], path[-1] + "q")
    tree = with_value(wrong, 1)
    written, given = outcome(lambda: read(tree, wrong[0])), outcome(lambda: Trainer(**tree).job)
    assert isinstance(written, ConfigError) and isinstance(given, ConfigError)
    assert f"unknown key {'.'.join(map(str, wrong))}: did you mean" in written.what
    assert given.what == as_from_python(written)[1]
    if len(path) > 1:
        assert given.cure == written.cure
    elif given.cure != written.cure:  # the list of arguments is longer, and what is inside a section is given there
        assert given.cure.startswith(("arguments of Trainer: name, seed, steps", "give it in the argument"))


@pytest.mark.parametrize("needed", ["model", "loss", "data", "steps", "batch_size", "microbatches"])
def test_a_missing_or_misspelt_argument_is_no_type_error(needed: str):
    tree = {key: value for key, value in FULL.items() if key != needed}
    with pytest.raises(ConfigError) as found:
        Trainer(**tree)
    assert str(found.value) == f"{needed} is missing\n  cure: give the argument {needed}"
    with pytest.raises(ConfigError, match=rf"unknown argument {needed}q: did you mean {needed}\?; {needed} is missing"):
        Trainer(**tree, **{f"{needed}q": FULL[needed]})


def test_an_argument_of_another_framework_gets_its_own_advice():
    for name in ("failure_config", "num_workers", "datasets", "lr"):
        with pytest.raises(ConfigError, match=f"^unknown argument {name}\n") as found:
            Trainer(**FULL, **{name: object()})
        assert "did you mean" not in str(found.value)


def test_a_number_of_workers_without_a_plan_asks_the_planner_who_chooses_the_schedule_too():
    assert given_ray_train(workers=4).plan == "auto" and given_ray_train(schedule="gpipe").plan.schedule == "gpipe"
    with pytest.raises(ConfigError, match=r'schedule is \'gpipe\', but with plan="auto"'):
        given_ray_train(workers=4, schedule="gpipe")


def test_arguments_without_names_are_refused():
    with pytest.raises(ConfigError, match="Trainer got 2 arguments without names"):
        Trainer("m:layers", "m:loss")  # type: ignore[misc]


def stripped(annotation: Any) -> set[Any]:
    """The members of a type, without bounds and validators; a type variable's lists and tuples by their kind."""
    if typing.get_origin(annotation) is typing.Annotated:
        return stripped(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return {part for inner in typing.get_args(annotation) for part in stripped(inner)}
    if typing.get_origin(annotation) is typing.Literal:
        return {("literal", value) for value in typing.get_args(annotation)}
    return {annotation}


def test_the_signature_has_the_names_defaults_and_types_of_the_model():
    """An editor completes `Trainer(` with exactly the keys of a job file, and the arguments that say how it is run."""
    from raypar.callbacks import Callback

    parameters = {name: found for name, found in inspect.signature(Trainer).parameters.items() if name != "self"}
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values())
    assert list(parameters) and set(parameters) == {*Job.model_fields, *RUN_ARGUMENTS}
    hints = typing.get_type_hints(Trainer.__init__, vars(trainer_module) | {"Callback": Callback})
    for name, info in Job.model_fields.items():
        default = parameters[name].default
        assert (default is inspect.Parameter.empty) == info.is_required(), name
        assert info.is_required() or (default == info.default and type(default) is type(info.default)), name
        taken, wanted = stripped(hints[name]), stripped(info.annotation)
        if name in ("callbacks", "trackers"):  # a sequence, whose items are as in the model
            assert {typing.get_origin(one) for one in taken} == {typing.get_origin(typing.Sequence[Any])}
            taken = {part for one in taken for item in typing.get_args(one) for part in stripped(item)}
            wanted = {typing.get_args(one)[0] for one in wanted}
        if name == "metrics":  # a mapping, likewise
            assert {typing.get_origin(one) for one in taken} == {typing.get_origin(typing.Mapping[str, Any])}
            taken = {part for one in taken for part in stripped(typing.get_args(one)[1])}
            wanted = {typing.get_args(one)[1] for one in wanted}
        classes = [one for one in taken if isinstance(one, type) and not getattr(one, "_is_protocol", False)]
        for one in wanted:
            assert one in taken or (isinstance(one, type) and any(issubclass(one, c) for c in classes)), (name, one, taken)
    from_yaml = inspect.signature(Trainer.from_yaml).parameters
    assert set(from_yaml) == {"path", "overrides", *RUN_ARGUMENTS} - {
        "schedule",
        "scaling_config",
        "run_config",
        "checkpoint_config",
    }


def test_the_parameters_are_those_that_the_tree_of_a_job_gives():
    file = Path(trainer_module.__file__)
    assert with_signature(file.read_text()) == file.read_text(), "python -m raypar.job.signature raypar/trainer.py"


def test_a_section_that_is_made_by_name_is_checked_when_it_is_made():
    plan = PlanConfig(stages=2, replicas=[1, 2])
    assert Trainer(**(FULL | {"plan": plan})).job == Trainer(**(FULL | {"plan": {"stages": 2, "replicas": [1, 2]}})).job
    with pytest.raises(ConfigError, match=r"plan\.stages: expected a valid integer, got 'two' .*\n.*in the argument plan"):
        PlanConfig(stages="two")
    with pytest.raises(ConfigError, match=r"unknown key checkpoint\.evry: did you mean checkpoint\.every"):
        CheckpointConfig(evry=2)
    with pytest.raises(ConfigError, match="batch_size is missing") as found:
        raypar.Job(steps=1)
    assert found.traceback[-1].path == Path(__file__)


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_job_file_its_keys_as_arguments_and_from_yaml_are_one_job(path: Path, tmp_path: Path):
    tree = {"name": path.stem, **yaml.load(path.read_text(), Loader=yaml.SafeLoader), **parse_yaml(path.read_text(), "")}
    written, given, read = load_job(path), Trainer(**tree), Trainer.from_yaml(path)
    assert written == given.job == read.job
    assert contract_of_job(written) == contract_of_job(given.job) == contract_of_job(read.job)
    again = tmp_path / "again.yaml"
    again.write_text(given.to_yaml())
    assert Trainer.from_yaml(again).job == written


def test_from_yaml_takes_overrides_and_says_what_is_wrong_as_the_command_line_does(tmp_path: Path):
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml({key: value for key, value in FULL.items() if key != "name"}))
    trainer = Trainer.from_yaml(path, ["plan=auto", "seed=7"], workers=3, address="auto", stop_at_step=2)
    assert (trainer.job.name, trainer.job.seed, trainer.job.plan) == ("mine", 7, "auto")
    assert (trainer.workers, trainer.address, trainer.stop_at_step) == (3, "auto", 2)
    with pytest.raises(ConfigError, match=r"unknown key plan\.stagse: did you mean plan\.stages"):
        Trainer.from_yaml(path, ["plan.stagse=2"])
    with pytest.raises(
        ConfigError, match=r"^stop_at_step: expected greater than 0, got 0 .*\n  cure: correct the argument stop"
    ):
        Trainer.from_yaml(path, stop_at_step=0)
    with pytest.raises(ConfigError, match="the plan has 3 workers = 2 stages x 1/2 replicas, but workers is 2"):
        Trainer.from_yaml(path, workers=2)


# -- to_yaml -----------------------------------------------------------------------------------------------------------------

TEXTS = (
    "3e-4",
    "on",
    "null",
    "2020-01-01",
    "a: b",
    "ünï\ncode",
    "0o7",
    "~",
    "",
    " x ",
    "- a",
    "#",
    "1_000",
    "yes",
    "{",
    "*b",
    "=",
    "\t",
)
NUMBERS = (0, -1, 10**20, 0.1, 1e-8, 3e300, float("inf"), 1.0, True, None)


def random_value(chance: random.Random, depth: int = 0) -> Any:
    """A value that a job file may hold as an argument of a function."""
    kind = chance.choice(["text", "number", "list", "dict"] if depth < 3 else ["text", "number"])
    if kind == "list":
        return [random_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == "dict":
        return {chance.choice(TEXTS): random_value(chance, depth + 1) for _ in range(chance.randrange(4))}
    return chance.choice(TEXTS if kind == "text" else NUMBERS)


@pytest.mark.parametrize("seed", range(40))
def test_a_job_written_out_is_read_as_the_same_job(seed: int):
    chance = random.Random(seed)
    kept = {
        key: value for key, value in FULL.items() if key in ("steps", "batch_size", "microbatches") or chance.random() < 0.6
    }
    tree = {"model": "m:layers", "loss": "m:loss", "data": "m:text", **kept}
    if "validation" not in tree:
        for needing in ("early_stopping", "metrics"):
            tree.pop(needing, None)
    if "metrics" not in tree:
        tree.pop("checkpoint", None)
    tree["model"] = {"function": "m:layers", "args": {chance.choice(TEXTS): random_value(chance) for _ in range(4)}}
    tree["run_dir"] = chance.choice([text for text in TEXTS if text])
    job = Trainer(**tree).job
    assert parse_job(job.to_yaml()) == job


def layers() -> list[Any]:
    """A function that has a name."""
    return []


def test_functions_are_written_by_their_names():
    trainer = Trainer(**{**FULL, "model": layers, "optimizer": (random.Random, {"x": 1}), "callbacks": []})
    tree = yaml.safe_load(trainer.to_yaml())
    assert tree["model"]["function"] == f"{__name__}:layers" and tree["optimizer"]["function"] == "random:Random"
    assert parse_job(trainer.to_yaml()).model.resolve() is layers


def test_a_function_among_the_arguments_of_another_is_not_written_as_a_text():
    trainer = Trainer(**{**FULL, "model": (layers, {"activation": random.Random}), "callbacks": []})
    with pytest.raises(ConfigError, match=r"model\.args\.activation is <class 'random.Random'> \(type\)"):
        trainer.to_yaml()


def test_what_has_no_name_is_one_error_that_names_every_such_value():
    class Log(raypar.Callback):
        pass

    def local() -> None:
        pass

    script = types.FunctionType(local.__code__, {}, "build")
    script.__module__, script.__qualname__ = "__main__", "build"
    given = {
        "model": lambda: None,
        "loss": script,
        "data": [1, 2],
        "callbacks": [Log()],
        "lr_schedule": (local, {"of": object()}),
    }
    with pytest.raises(ConfigError) as found:
        Trainer(**(FULL | given)).to_yaml()
    what, cure = found.value.what, found.value.cure
    assert what.startswith("the job cannot be written as a job file: model.function is ") and "into a module" in cure
    assert "<lambda>, a function without a name that can be imported" in what
    assert "loss.function is build of the script itself (__main__)" in what
    assert "data.function is an object (list)" in what and "callbacks.0.function is an object (Log)" in what
    assert "lr_schedule.function is" in what and "lr_schedule.args.of is <object object" in what


class Log(raypar.Callback):
    """A callback that a job file can name."""


def made_folder(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str], Any]:
    """(the run folder that `fit` makes, what it tells the user before, the run's options), without a run."""
    seen: dict[str, Any] = {}

    def launch_run(choose: Any, options: Any, tell: Any) -> Result:
        seen["folder"], seen["options"] = options.make_folder(None), options
        return Result({}, str(seen["folder"].path), "done", 1)

    told: list[str] = []
    monkeypatch.setattr(start_new_run, "launch_run", launch_run)
    monkeypatch.setattr(start_new_run, "plan_json", lambda chosen: "{}")
    monkeypatch.setattr("raypar.console.event_printer.EventPrinter.__call__", lambda self, event: told.append(event.text))
    trainer.fit()
    return seen["folder"].path, told, seen["options"]


def test_a_run_folder_has_the_job_file_of_a_job_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Job, "usable_processors", 8)
    named = {"model": layers, "loss": "m:f", "data": "m:f", "steps": 1, "batch_size": 4, "microbatches": 2, "run_dir": tmp_path}
    validation = {"function": "m:f", "every": 1}
    trainer = Trainer(**named, trackers=["tensorboard"], early_stopping={"patience": 2}, validation=validation)
    folder, told, options = made_folder(trainer, monkeypatch)
    assert parse_job((folder / "job.yaml").read_text()).to_yaml() == trainer.to_yaml()
    assert told == ["job run: 1 step", "no plan is given: one worker; plan auto uses as many of the 8 processors as help"]
    assert [type(one).__name__ for one in options.callbacks] == ["EarlyStopping", "TensorBoard"]
    log = Log()
    folder, told, options = made_folder(Trainer(**named, plan={"replicas": 2}, callbacks=[log, f"{__name__}:Log"]), monkeypatch)
    assert not (folder / "job.yaml").exists() and (folder / "plan.json").read_text() == "{}"
    assert told[:-1] == ["job run: 1 step"] and "gets no job.yaml: " in told[-1] and "callbacks.0.function is" in told[-1]
    assert options.callbacks[0] is log and type(options.callbacks[1]) is Log


# -- Ray Train's configs -----------------------------------------------------------------------------------------------------


def given_ray_train(**given: Any) -> Job:
    """The job of a small `Trainer` that is given these arguments too."""
    return Trainer(model="m:f", loss="m:f", data="m:f", steps=1, batch_size=4, microbatches=2, **given).job


def test_ray_trains_configs_say_what_they_say_there():
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

    assert given_ray_train(scaling_config=ScalingConfig()).plan == Job.model_fields["plan"].default
    assert given_ray_train(scaling_config=ScalingConfig(num_workers=4)).plan == "auto"
    assert given_ray_train(scaling_config=ScalingConfig(num_workers=4), plan={"replicas": 4}).workers == 4
    nodes = ScalingConfig(num_workers=2, use_gpu=True, accelerator_type="H100", label_selector={"market": "spot"})
    placement = given_ray_train(scaling_config=nodes, plan={"replicas": 2}).placement
    assert (placement.accelerator_type, placement.label_selector) == ("H100", {"market": "spot"})
    job = given_ray_train(scaling_config=ScalingConfig(num_workers=(2, 6), use_gpu=True), plan={"replicas": 3})
    assert (job.device, job.elastic.min_workers, job.elastic.max_workers, job.workers) == ("gpu", 2, 6, 3)
    job = given_ray_train(run_config=RunConfig(name="there", failure_config=FailureConfig(max_failures=-1)))
    assert job.name == "there" and job.elastic is not None
    job = given_ray_train(
        run_config=RunConfig(failure_config=FailureConfig(max_failures=-1)), elastic={"standbys": 1}, name="a"
    )
    assert job.elastic.standbys == 1 and job.name == "a"
    both = {"checkpoint_config": CheckpointConfig(num_to_keep=3), "checkpoint": {"every": 5, "keep": 3}}
    assert given_ray_train(**both).checkpoint.keep == 3
    assert given_ray_train(run_config=RunConfig(), run_dir="mine").run_dir == "mine"


def contradictions() -> list[tuple[dict[str, Any], str]]:
    """Arguments of which one says something else than the other, or a field that says nothing here -> the error."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

    keep = CheckpointConfig(num_to_keep=3)
    return [
        ({"name": "a", "run_config": RunConfig(name="b")}, "name is 'a', and run_config.name is 'b'"),
        (
            {"run_dir": "a", "run_config": RunConfig(storage_path="/b")},
            "run_dir is 'a', and run_config.storage_path is '/b'",
        ),
        (
            {"checkpoint": {"keep": 2}, "checkpoint_config": keep},
            "checkpoint.keep is 2, and checkpoint_config.num_to_keep is 3",
        ),
        (
            {"run_config": RunConfig(checkpoint_config=keep), "checkpoint_config": CheckpointConfig(num_to_keep=4)},
            "checkpoint.keep is 3, and checkpoint_config.num_to_keep is 4",
        ),
        (
            {"elastic": False, "run_config": RunConfig(failure_config=FailureConfig(max_failures=-1))},
            "elastic is False, and that of run_config.failure_config.max_failures=-1 is True",
        ),
        (
            {"elastic": {"max_workers": 4}, "scaling_config": ScalingConfig(num_workers=(1, 2))},
            "elastic.max_workers is 4, and the most of scaling_config.num_workers is 2",
        ),
        (
            {"elastic": False, "scaling_config": ScalingConfig(num_workers=(1, 2))},
            "elastic is False, and the least of scaling_config.num_workers is 1",
        ),
        ({"workers": 3, "scaling_config": ScalingConfig(num_workers=4)}, "workers is 3, and scaling_config.num_workers is 4"),
        (
            {"plan": {"replicas": 2}, "scaling_config": ScalingConfig(num_workers=4)},
            "the plan has 2 workers = 1 stage x 2 replicas, and scaling_config.num_workers is 4",
        ),
        (
            {"plan": {"stages": 4}, "scaling_config": ScalingConfig(num_workers=2)},
            "the plan has 4 workers = 4 stages x 1 replica, and scaling_config.num_workers is 2",
        ),
        (
            {"scaling_config": ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2})},
            "scaling_config has resources_per_worker, which raypar does not use",
        ),
        ({"run_config": "here"}, "run_config is a str, not a ray.train.RunConfig"),
        ({"run_config": RunConfig}, "run_config is RunConfig, not a ray.train.RunConfig"),
        ({"scaling_config": RunConfig()}, "scaling_config is a RunConfig, not a ray.train.ScalingConfig"),
    ]


@pytest.mark.parametrize("number", range(14))
def test_what_contradicts_or_has_no_counterpart_is_one_error_that_names_both(number: int):
    given, said = contradictions()[number]
    with pytest.raises(ConfigError) as found:
        given_ray_train(**given)
    assert found.value.what == said and found.value.cure


# -- what a review by attack found -------------------------------------------------------------------------------------------


def test_values_that_yaml_has_are_written_and_read_again():
    args = {"since": datetime.date(2020, 1, 1), "at": datetime.datetime(2020, 1, 1, 3), "key": b"\xff"}
    args |= {"nested": {1: "a", "1": "b", None: 2}}
    job = Trainer(**{**FULL, "model": ("m:layers", args), "callbacks": []}).job
    assert parse_job(job.to_yaml()) == job
    read = parse_job(dump_yaml(FULL), ["model.args.since=2020-01-01"])
    assert parse_job(read.to_yaml()) == read


def deep() -> list[Any]:
    """A list in itself."""
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "value, says",
    [
        ({(1, 2): 3}, r"model\.args\.v has the key \(1, 2\) \(tuple\)"),
        ({Path("a"): 3}, r"has the key PosixPath\('a'\)"),
        (deep(), r"has more than 64 levels"),
        (list(range(30_000)), r"more than 20,000 keys and values"),
        ("x" * (1 << 20), r"characters, and a job file has at most 1,048,576"),
        (10**5000, r"4300 digits"),
    ],
    ids=["tuple as key", "path as key", "within itself", "many", "long", "digits"],
)
def test_what_would_not_be_read_again_is_not_written(value: Any, says: str):
    job = Trainer(**{**FULL, "model": ("m:layers", {"v": value}), "callbacks": []}).job
    with pytest.raises(ConfigError, match=f"the job cannot be written as a job file: .*{says}"):
        job.to_yaml()


def test_a_name_in_any_script_is_a_name_and_one_that_cannot_be_imported_is_not_written(monkeypatch: pytest.MonkeyPatch):
    assert parse_job(dump_yaml({**FULL, "model": "mödul:модель"})).model.function == "mödul:модель"
    module = types.ModuleType("with-dash")
    module.f = types.FunctionType(layers.__code__, {}, "f")  # type: ignore[attr-defined]
    module.f.__module__ = module.f.__qualname__ = "f"
    module.f.__module__ = "with-dash"
    monkeypatch.setitem(sys.modules, "with-dash", module)
    with pytest.raises(ConfigError, match=r"model\.function is f, a function without a name that can be imported"):
        Trainer(**{**FULL, "model": module.f}).to_yaml()


def test_a_value_without_a_text_is_an_error_that_names_its_type():
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    for given in ({"steps": 10**5000}, {"plan": {"stages": 10**5000}}, {"steps": Silent()}, {"model": Silent()}):
        with pytest.raises(ConfigError, match=r"got <(int|Silent)> \((int|Silent)\)"):
            Trainer(**(FULL | given))


def test_setting_a_key_leaves_an_alias_of_its_section_as_it_is():
    text = dump_yaml({**FULL, "model": "m:layers", "data": "m:text"})
    text = text.replace("model: m:layers", "model: {function: m:layers, args: &a {n: 1, sizes: [1, 2]}}")
    text = text.replace("data: m:text", "data: {function: m:text, args: *a}")
    job = parse_job(text, ["model.args.n=2", "model.args.sizes.0=5"])
    assert job.model.args == {"n": 2, "sizes": [5, 2]} and job.data.args == {"n": 1, "sizes": [1, 2]}


SHORT = {"trackers": ["tensorboard"], "callbacks": ["m:Log"], "elastic": True, "init_from": "a:w.pt", "plan": "auto"}


@pytest.mark.parametrize(
    "override, found",
    [
        ("trackers.0.args.log_dir=x", lambda job: job.trackers[0].args == {"log_dir": "x"}),
        ("trackers.0.tracker=wandb", lambda job: job.trackers[0].tracker == "wandb"),
        ("callbacks.0.args.every=2", lambda job: job.callbacks[0].args == {"every": 2}),
        ("callbacks.0.function=m:Other", lambda job: job.callbacks[0].function == "m:Other"),
        ("elastic.standbys=1", lambda job: job.elastic.standbys == 1),
        ("init_from.strip_prefix=a", lambda job: (job.init_from.path, job.init_from.strip_prefix) == ("a:w.pt", "a")),
        ("plan.stages=3", lambda job: job.plan.stages == 3),
        ("model.args.depth=3", lambda job: job.model.args["depth"] == 3),
        ("loss.args.weight=3", lambda job: job.loss.function == "m:loss" and job.loss.args == {"weight": 3}),
    ],
)
def test_a_key_inside_a_short_form_can_be_set(override: str, found: Any):
    assert found(parse_job(dump_yaml(FULL | SHORT), [override]))


@pytest.mark.parametrize(
    "override, says",
    [
        ("callbacks.²=m:f", r"callbacks\.²: there are 1 entries"),
        ("callbacks.1.args.a=1", r"callbacks\.1: there are 1 entries"),
        ("plan.replicas.0.x=1", r"plan\.replicas\.0 is 1 and has no keys"),
        ("elastic.min_workers=2", r"elastic is False and has no keys"),
        ("name.x=2", r"name is 'full' and has no keys"),
        ("precision.compute.x=1", r"precision\.compute is 'bf16' and has no keys"),
    ],
)
def test_a_key_inside_what_has_none_is_one_error(override: str, says: str):
    tree = FULL | SHORT | {"plan": FULL["plan"], "elastic": False}
    with pytest.raises(ConfigError, match=says):
        parse_job(dump_yaml(tree), [override])


@pytest.mark.parametrize(
    "key, near",
    [
        ("replica", "plan.replicas"),
        ("stage", "plan.stages"),
        ("min_worker", "elastic.min_workers"),
        ("every", "validation.every or checkpoint.every or average.every"),
        ("step", "steps"),
        ("virtual_replica", "virtual_replicas"),
    ],
)
def test_the_hint_is_the_nearest_key_of_the_section_or_the_very_name_in_another_one(key: str, near: str):
    for make in (lambda: parse_job(dump_yaml({**FULL, key: 2})), lambda: Trainer(**FULL, **{key: 2})):
        with pytest.raises(ConfigError) as found:
            make()
        assert f"{key}: did you mean {near}?" in found.value.what


def test_a_key_that_is_no_text_is_said_to_be_one():
    for tree, says in (({True: 2}, "the key True is no text"), ({"plan": {1: 2}}, "plan: the key 1 is no text")):
        with pytest.raises(ConfigError, match=f"^{says}") as found:
            parse_job(dump_yaml({**FULL, **tree}))
        assert "quotes" in found.value.cure


def test_a_job_file_whose_name_cannot_name_a_folder_needs_a_name_of_its_own(tmp_path: Path):
    path = tmp_path / "my job.yaml"
    path.write_text(dump_yaml({key: value for key, value in FULL.items() if key != "name"}))
    with pytest.raises(ConfigError, match="that of its file, 'my job', cannot name") as found:
        load_job(path)
    assert "add name" in found.value.cure and load_job(path, ["name=mine"]).name == "mine"


def test_from_yaml_with_a_number_of_workers_asks_the_planner_as_the_arguments_do(tmp_path: Path):
    path = tmp_path / "job.yaml"
    tree = {key: value for key, value in FULL.items() if key != "plan"}
    path.write_text(dump_yaml(tree))
    assert Trainer.from_yaml(path, workers=4).job == Trainer(**tree, workers=4).job
    assert Trainer.from_yaml(path, ["plan.stages=2"], workers=4).job.plan.stages == 2  # type: ignore[union-attr]
    assert Trainer.from_yaml(path, workers=1).job.plan == PlanConfig()


@pytest.mark.parametrize("given", [(None,), (5,), ("job.yaml", "seed=3"), ("job.yaml", [("seed", 3)]), ("job.yaml", None)])
def test_from_yaml_refuses_what_is_no_path_or_no_list_of_texts(given: tuple[Any, ...]):
    with pytest.raises(ConfigError, match=r", not a (path|list of texts)"):
        Trainer.from_yaml(*given)


def test_a_path_object_is_taken_wherever_a_job_has_a_path(tmp_path: Path):
    table = tmp_path / "schedule.csv"
    table.write_text("")
    given = {"run_dir": tmp_path, "init_from": {"path": tmp_path}, "plan": {"schedule_file": table}}
    job = Trainer(**(FULL | given)).job
    assert (job.run_dir, job.init_from.path, job.plan.schedule_file) == (str(tmp_path), str(tmp_path), str(table))  # type: ignore[union-attr]


def test_callbacks_are_given_in_every_form_of_a_function():
    forms = [(Log, {}), ("m:Log", {"x": 1}), lambda: Log(), functools.partial(Log), {"function": Log}, "m:Log"]
    job = Trainer(**(FULL | {"callbacks": forms})).job
    assert [one.args for one in job.callbacks] == [{}, {"x": 1}, {}, {}, {}, {}]
    made = [one.call() for one in job.callbacks if callable(one.function)]
    assert [type(one) for one in made] == [Log] * 4
    assert raypar.Job(**(FULL | {"model": layers, "loss": (layers, {"x": 1})})).loss.args == {"x": 1}


def test_a_number_of_workers_of_ray_trains_is_that_of_the_plan_in_an_elastic_run_too():
    from ray.train import ScalingConfig

    with pytest.raises(ConfigError, match=r"the plan has 2 workers .*, and scaling_config\.num_workers is 4"):
        given_ray_train(scaling_config=ScalingConfig(num_workers=4), plan={"replicas": 2}, elastic=True)
    assert given_ray_train(scaling_config=ScalingConfig(num_workers=(1, 4)), plan={"replicas": 2}).workers == 2


def test_the_contract_of_a_data_set_given_as_a_list_does_not_hold_its_samples():
    def contract(samples: list[Any]) -> Any:
        return contract_of_job(Trainer(**(FULL | {"data": samples})).job)["data"]["function"]

    many, other = contract([{"x": i} for i in range(5000)]), contract([{"x": i} for i in range(1, 5001)])
    assert len(many) < 300 and many.startswith("Given(value=[{'x': 0}") and many[-66:] != other[-66:]
    assert contract([1, 2]) == "Given(value=[1, 2])"


def test_the_text_of_a_data_set_is_made_for_its_contract_only():
    class Samples(list[int]):
        texts = 0

        def __repr__(self) -> str:
            Samples.texts += 1
            return "Samples"

    spec = Trainer(**(FULL | {"data": Samples([1, 2, 3])})).job
    assert spec.data.label == "Samples" and len(make_dataset(spec.data)) == 3 and Samples.texts == 0
    assert contract_of_job(spec)["data"]["function"] == "Given(value=Samples)" and Samples.texts == 1


def test_a_home_folder_is_not_a_folder_called_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert choose_lasting_run_dir("~/runs") == tmp_path / "runs" and choose_lasting_run_dir("a~") == Path("a~")
    with pytest.raises(ConfigError, match="run_dir is ~nobody_of_this_name/x"):
        Trainer(**(FULL | {"run_dir": "~nobody_of_this_name/x"}))


def test_every_key_says_what_it_is_for():
    """A key that says nothing would reach neither workers nor the contract of checkpoints."""
    assert unmarked_keys(Job) == []


class NewCheckpointConfig(CheckpointConfig):
    compress: bool = False


class NewJob(Job):
    """A job with keys that lack their markers."""

    cache: bool = False
    checkpoint: typing.Annotated[NewCheckpointConfig, DRIVER] = NewCheckpointConfig.model_construct()


def test_a_key_without_a_marker_is_named_and_goes_to_no_process_in_silence():
    assert unmarked_keys(NewJob) == ["cache", "checkpoint.compress"]
    with pytest.raises(AssertionError, match=r"NewJob\.cache has no marker"):
        NewJob.model_construct(**dict(Trainer(**FULL).job)).for_workers()


def test_where_a_list_belongs_the_error_says_so():
    for key in ("trackers", "callbacks"):
        with pytest.raises(ConfigError, match=f"^{key}: expected a list, got 'x'"):
            parse_job(dump_yaml({**FULL, key: "x"}))
    with pytest.raises(
        ConfigError, match=r"checkpoint.best: expected a list.*\n.*also where it has one item: \[{'metric': 'loss'}\]"
    ):
        parse_job(dump_yaml({**FULL, "checkpoint": {"best": {"metric": "loss"}}}))
