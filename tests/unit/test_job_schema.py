"""The JSON schema of job files: it accepts what raypar accepts, and finds misspelt keys and wrong types, for every key."""

import copy
import datetime
import json
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helpers.guides import GUIDES, README, code_blocks
from pydantic import BaseModel, BeforeValidator, ValidationError

from raypar.cli import main
from raypar.errors import RayparError
from raypar.files.safe_yaml import parse_yaml
from raypar.job import Job
from raypar.job.schema import SCHEMA_OF_KEY, _value, make_schema
from raypar.job.walk_sections import dotted_keys, walk_sections

pytestmark = pytest.mark.part(4)

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))
SCHEMA = make_schema()
CHECK = jsonschema.Draft7Validator(SCHEMA)

WHOLE = """
name: whole
steps: 3
batch_size: 8
microbatches: 4
model: {function: m:layers}
loss: {function: m:loss}
data: {function: m:text, collate: {function: m:collate}, pad: {}, pack: {to: 8}}
lr_schedule: {function: m:lr}
validation: {function: m:text, every: 1, collate: {function: m:collate}, pad: {}, pack: {to: 8}}
optimizer: {function: "torch.optim:SGD"}
plan: {}
elastic: {}
placement: {}
checkpoint: {best: [{metric: validation_accuracy, mode: max}]}
precision: {compute: fp16, loss_scale: {}}
average: {}
init_from: {path: FILE}
early_stopping: {}
metrics: {accuracy: {function: m:accuracy}}
callbacks: [{function: m:callback}]
trackers: [{tracker: wandb}]
"""
"""A job with every section."""
WHOLE_TREE = yaml.safe_load(WHOLE)
KEYS = list(dict.fromkeys(dotted_keys(Job)))
VALUES: list[Any] = [
    None,
    True,
    "text",
    "auto",
    "m:f",
    "model",
    -1,
    0,
    1,
    3,
    1.5,
    10**12,
    [],
    [1],
    ["a"],
    {},
    {"a": "b"},
    {"a": 1},
]
OF_OTHER_KEYS: dict[str, list[Any]] = {
    "loss": ["model"],  # without `count`, which pack needs
    "loss.function": ["model"],
    "batch_size": [1, 3],  # there are 4 microbatches
    "validation": [None, "m:f"],  # without `every`, which early_stopping needs
    "validation.every": [0],
    "validation.metrics": [["a"], []],  # no metric of the job; a metric of the job that nothing computes
    "validation.sets.metrics": [["a"], []],
    "validation.sets": [None],  # without a function
    "metrics": [{}, None],  # checkpoint.best names one
    "early_stopping.metric": ["text", "auto", "m:f", "model"],  # which nobody computes
    "lr_schedule.metric": ["text", "auto", "m:f", "model"],
    "optimizer.entries.lr_schedule.metric": ["text", "auto", "m:f", "model"],  # only the job's lr_schedule has one
    "checkpoint.best.metric": ["text", "auto", "m:f", "model"],
    "checkpoint.best.mode": [None],  # the name of the metric does not say it
    "checkpoint.best": [["a"]],
    "precision.compute": [None],  # which loss_scale needs
    "plan.chunks": [3],  # the schedule has 1
    "plan.cuts": [[1]],  # there is 1 stage
    "plan.warmup": [[]],
    "plan.offload": ["full", ["a"]],  # without `activations_in`
    "plan.placements.share": [[1]],  # of 4 blocks
    "plan.schedule_file": ["text", "auto", "m:f", "model"],  # there is no such file
}
"""Key -> values of its type that raypar refuses beside the other keys of `WHOLE`."""


def errors(tree: Any) -> list[str]:
    return [error.message for error in CHECK.iter_errors(tree)]


def accepted(tree: Any) -> bool:
    try:
        Job.model_validate(tree)
    except (ValidationError, RayparError):
        return False
    return True


def set_key(key: str, value: Any) -> dict[str, Any]:
    """The job with every section, with one key set."""
    tree = copy.deepcopy(WHOLE_TREE)
    *path, last = key.split(".")
    if len(path) == 2 and path[1] in ("sampler", "weights", "group_by"):  # there is one of them at most
        tree["data"][path[1]] = {"function": "m:f"}
    if path[1:] == ["mix"]:  # in the place of a function
        tree["data"] = {"mix": [{"function": "m:text", "ratio": 3}, {"function": "m:code", "ratio": 1}]}
    if path[1:] == ["placements"]:  # in the place of stages
        tree["plan"] = {"placements": [{"layers": "a", "workers": [[0]], "share": [4]}]}
    if path[:2] == ["optimizer", "entries"]:  # in the place of a function
        entry = {"match": "*", "function": "m:f", "lr_schedule": {"function": "m:lr"}}
        tree["optimizer"] = {"entries": [entry]}
    if key.startswith("validation.sets"):
        one = {name: part for name, part in tree["validation"].items() if name != "every"}
        tree["validation"] = {"every": 1, "sets": {"accuracy": one}}
    if key.startswith("metrics.preprocess_logits"):  # of metrics of all predictions only
        tree["metrics"]["accuracy"] |= {"of": "all", "preprocess_logits": {"function": "m:f"}}
    here = inside(tree, path)
    if key == "epochs" and value is not None:
        del tree["steps"]
    here[last] = value
    return tree


def inside(tree: Any, path: Sequence[str]) -> Any:
    """What lies at a path of keys; of a list the first, of what has names of its own `accuracy`."""
    for part in path:
        tree = tree[part]
        named = part in ("metrics", "sets") and isinstance(tree, dict)
        tree = tree[0] if isinstance(tree, list) else tree["accuracy"] if named else tree
    return tree


def job_blocks() -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole job files that README and guides show."""
    for page in [README, *GUIDES]:
        for block in code_blocks(page):
            tree = yaml.safe_load(block.text) if block.language == "yaml" else None
            if isinstance(tree, dict) and {"steps", "model", "data", "loss"} <= set(tree):
                yield page.name, tree


def test_the_schema_is_one():
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.stem)
def test_the_jobs_that_come_with_raypar_are_right(file: Path):
    assert errors(parse_yaml(file.read_text(), str(file))) == []


def test_so_are_the_job_files_of_the_guides():
    assert [(page, errors(tree)) for page, tree in job_blocks() if errors(tree)] == []


SET = {"function": "m:text", "samples": 3}


@pytest.mark.parametrize(
    "validation, right",
    [
        ({"every": 2, "short": "m:text", "long": SET}, True),
        ({"every": 2, "sets": {"short": "m:text", "long": SET}}, True),
        ({"every": 2}, False),
        ({"short": "m:text", **SET}, False),
        ({"short": {**SET, "every": 2}}, False),
        ({"short": 3}, False),
        ({**SET, "sets": {"short": SET}}, False),
    ],
)
def test_several_validation_sets_are_right_in_both_forms(validation: dict[str, Any], right: bool):
    tree = {key: value for key, value in WHOLE_TREE.items() if key not in ("early_stopping", "checkpoint")}
    tree["validation"] = validation
    assert accepted(tree) is right is not bool(errors(tree))


def test_a_misspelt_key_and_a_wrong_type_are_found():
    tree = yaml.safe_load((ROOT / "jobs/quickstart.yaml").read_text())
    for key, value, says in (
        ("batchsize", 32, "'batchsize' was unexpected"),
        ("steps", "200", "'200' is not of type 'integer'"),
        ("dtype", "float16", "'float16' is not one of ['float32', 'float64']"),
        ("clip_norm", 0, "0 is not valid under any of the given schemas"),
    ):
        assert says in " ".join(errors({**tree, key: value}))
    assert errors({**tree, "epochs": 2}) != []
    del tree["steps"]
    assert errors(tree) == ["'steps' is a required property"] and errors({**tree, "epochs": 2}) == []


def test_the_job_with_every_section_is_right():
    assert errors(WHOLE_TREE) == [] and accepted(WHOLE_TREE)


@pytest.mark.parametrize("key", KEYS)
def test_the_schema_and_raypar_agree_on_every_key(key: str):
    """What raypar accepts is right by the schema, and what it refuses is wrong, but for what another key decides."""
    wrong, top = [], key.partition(".")[0]
    check = jsonschema.Draft7Validator(SCHEMA["properties"][top])  # the rest of the tree is right
    for value in VALUES:
        tree = set_key(key, value)
        by_schema, by_raypar = check.is_valid(tree[top]), accepted(tree)
        if by_raypar and not by_schema:
            wrong.append(f"{value!r} is refused by the schema alone")
        if by_schema and not by_raypar and value not in OF_OTHER_KEYS.get(key, []):
            wrong.append(f"{value!r} passes the schema")
    assert wrong == []


@pytest.mark.parametrize("path", [(), *(path for path, _ in walk_sections(Job))], ids=".".join)
def test_an_unknown_key_is_found_in_every_section(path: tuple[str, ...]):
    tree = set_key(".".join((*path, "unheard_of")), 1)
    if path == ("validation",):  # what is no key may be the name of a set
        assert not accepted(tree) and "'unheard_of' is not one of ['function', 'args'" in " ".join(errors(tree))
        return
    assert not accepted(tree) and errors(tree) == ["Additional properties are not allowed ('unheard_of' was unexpected)"]


@pytest.mark.parametrize("key", KEYS)
def test_the_first_error_of_a_validator_names_a_misspelt_key_and_where_it_is(key: str):
    """Also where the section has a short form, and where the key is required: then a second error says that it is missing."""
    *above, last = key.split(".")
    tree = set_key(f"{key}q", 1)
    inside(tree, above).pop(last, None)
    first, *more = CHECK.iter_errors(tree)
    if above == ["validation"]:  # it may be the name of a set, which has other values
        assert [*first.absolute_path] == [*above, f"{last}q"] and first.message == "1 is not of type 'string', 'object'"
        return
    assert first.message == f"Additional properties are not allowed ('{last}q' was unexpected)"
    assert [part for part in first.absolute_path if part not in (0, "accuracy")] == above
    assert [error.message for error in more] in ([], [f"'{last}' is a required property"])


@pytest.mark.parametrize(
    "key, value, says",
    [
        ("plan", 2, "2 is not of type 'string', 'object'"),
        ("plan", "auot", "'auot' is not one of ['auto']"),
        ("optimizer", "SGD", "'SGD' does not match"),
        ("elastic", "yes", "'yes' is not of type 'boolean', 'object'"),
        ("plan.stages", "two", "'two' is not of type 'integer'"),
        ("trackers", [{"tracker": "tensorbord"}], "'tensorbord' is not one of ['tensorboard', 'wandb', 'mlflow']"),
    ],
)
def test_the_first_error_of_a_wrong_value_says_what_would_be_right(key: str, value: Any, says: str):
    assert errors(set_key(key, value))[0].startswith(says)


@pytest.mark.parametrize("key, values", [("plan", ["auto"]), ("elastic", [True, False]), ("loss", ["model"])])
def test_editors_complete_the_short_form_of_a_section(key: str, values: list[Any]):
    assert SCHEMA["properties"][key]["examples"] == values


def test_no_section_is_one_of_several_alternatives():
    """Structure: what names a misspelt key is outside of `anyOf`."""

    def alternatives(schema: Any) -> Iterator[Any]:
        for name, part in schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ():
            if name == "anyOf":
                yield from part
            yield from alternatives(part)

    assert [one for one in alternatives(SCHEMA) if "properties" in one] == []


def test_every_key_says_what_it_is_and_has_its_default():
    found = SCHEMA["properties"]
    assert (
        found["steps"]["description"] == ("Number of optimizer steps of the whole run. Either it or `epochs` is given.")
        and "default" not in found["steps"]
    )
    assert found["reduction"]["default"] == "canonical"


def test_a_type_without_a_schema_is_an_error():
    class Section(BaseModel):
        loose: datetime.timedelta = datetime.timedelta(0)  # which every release of pydantic knows
        checked: typing.Annotated[typing.Any, BeforeValidator(lambda value: value)] = None

    for name, says in (("loose", "no schema for the type"), ("checked", "no schema for the validator")):
        with pytest.raises(TypeError, match=says):
            _value(name, Section.model_fields[name])


def test_no_schema_is_left_of_keys_that_are_gone():
    assert set(SCHEMA_OF_KEY) <= {*KEYS}


def test_the_command_prints_it(capsys):
    assert main(["job", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA


def test_the_command_without_the_flag_names_it_as_it_is_written(capsys):
    assert main(["job"]) == 2
    assert "cure: `raypar job --schema`; `raypar job --help`" in capsys.readouterr().err


def test_the_help_of_the_command_says_what_the_schema_is_for(capsys):
    with pytest.raises(SystemExit):
        main(["job", "--help"])
    text = capsys.readouterr().out
    for part in (
        "`raypar job --schema` prints",
        "an editor completes keys",
        "raypar job --schema > job.schema.json",
        "  --schema ",
    ):
        assert part in text
