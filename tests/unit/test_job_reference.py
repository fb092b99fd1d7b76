"""The reference of job keys and `Trainer` arguments says what the code says."""

import datetime
import functools
import inspect
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel, BeforeValidator

from raypar import trainer as trainer_module
from raypar.callbacks import Callback
from raypar.job import reference as job_reference
from raypar.job.job import Job
from raypar.job.reference import TRAINER_ALSO_TAKES, TYPE_OF_KEY, make_reference
from raypar.job.section_docstrings import key_docstring
from raypar.job.walk_sections import dotted_keys
from raypar.launch.trainer_arguments import Arguments
from raypar.trainer import Trainer

PAGE = Path(__file__).parents[2] / "examples/guides/reference.md"


@functools.cache
def rows() -> dict[str, list[str]]:
    """Key or argument -> the cells of its row."""
    lines = [line for line in make_reference().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.replace("\\|", "¦").strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row for row in cells if ":" not in row[0]}


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == make_reference(), f"python -m raypar.job.reference {PAGE.relative_to(PAGE.parents[2])}"


def test_every_key_and_every_argument_has_a_row_with_its_meaning():
    arguments = set(inspect.signature(Trainer).parameters) - {"self"}
    found = rows()
    assert set(found) == {*dotted_keys(Job), *arguments}
    assert [key for key, row in found.items() if not (row[1] and row[2] and row[3].endswith((".", ".)")))] == []


@pytest.mark.parametrize(
    "key, kind, default",
    [
        ("steps", "integer from 1 to 1,000,000,000", "*none*"),
        ("batch_size", "integer from 1 to 16,777,216", "*required*"),
        ("plan.chunks", "integer from 1 to 65,536", "*none*"),
        ("clip_norm", "number > 0", "*none*"),
        ("elastic.straggler_times", "number > 1", "`1.5`"),
        ("reduction", "`canonical`, or `fast`", "`canonical`"),
        ("checkpoint.at_end", "`true`, `false`", "`true`"),
        ("init_from", "[section](#init_from), or just path", "*none*"),
        (
            "optimizer",
            "[section](#optimizer), or just `module:name`, or a list of [sections](#optimizerentries)",
            "`torch.optim:AdamW`",
        ),
        ("data.names", "list of text", "*empty*"),
        ("run_dir", "path", "`runs/`"),
    ],
)
def test_types_and_defaults_are_in_words(key: str, kind: str, default: str):
    assert rows()[key][1:3] == [kind, default]


def test_what_trainer_takes_beyond_a_job_file_is_said():
    """An argument whose type has classes or callables of Python, beside texts, numbers, dicts and the sections themselves."""
    hints = typing.get_type_hints(Trainer.__init__, vars(trainer_module) | {"Callback": Callback})

    def members(kind: object) -> set[object]:
        if typing.get_origin(kind) in (typing.Union, type(int | str)):
            return {part for inner in typing.get_args(kind) for part in members(inner)}
        if typing.get_origin(kind) is typing.get_origin(typing.Sequence[int]):
            return members(typing.get_args(kind)[0])
        return {kind}

    def written(kind: object) -> bool:
        plain = kind in (str, int, float, bool, type(None), Arguments) or typing.get_origin(kind) is typing.Literal
        return plain or (isinstance(kind, type) and issubclass(kind, BaseModel))

    more = {name for name in Job.model_fields if not all(map(written, members(hints[name])))}
    assert more == set(TRAINER_ALSO_TAKES)


def test_a_type_or_a_key_without_words_is_an_error():
    class Section(BaseModel):
        loose: datetime.timedelta = datetime.timedelta(0)  # which every release of pydantic knows
        checked: typing.Annotated[typing.Any, BeforeValidator(lambda value: value)] = None

    for name, says in (("loose", "no words for the type"), ("checked", "no words for the validator")):
        with pytest.raises(TypeError, match=says):
            job_reference._type_in_words(name, Section.model_fields[name])
    with pytest.raises(TypeError, match="loose has no docstring"):
        key_docstring(Section, "loose")


def test_no_words_are_left_of_keys_that_are_gone():
    assert set(TYPE_OF_KEY) <= set(rows()) and set(TRAINER_ALSO_TAKES) <= set(rows())
