"""`help(raypar.Trainer)` fits on a screen and names every argument; tools still find all of them in the signature."""

import inspect
import pydoc
import re

import pytest

import raypar
from raypar.job import Job
from raypar.job.read_job import RUN_ARGUMENTS
from raypar.launch.signature_in_help import BriefSignature, with_brief_signature

LINES, COLUMNS = 50, 120
HELP = pydoc.plain(pydoc.render_doc(raypar.Trainer, "Help on %s:")).splitlines()
ARGUMENTS = list(inspect.signature(raypar.Trainer).parameters)


def test_the_help_fits_on_a_screen():
    assert len(HELP) <= LINES
    assert [line for line in HELP if len(line) > COLUMNS] == []


def test_the_help_has_a_line_for_each_group_of_arguments_and_each_argument_once():
    grouped = [re.sub(r"^ \|  - [\w ]+: ", "", line).split(", ") for line in HELP if line.startswith(" |  - ")]
    assert (
        sorted(name for names in grouped for name in names) == sorted(ARGUMENTS) == sorted({*Job.model_fields, *RUN_ARGUMENTS})
    )


def test_the_help_has_an_example_the_methods_and_the_place_of_the_reference():
    text = "\n".join(HELP)
    for part in (
        "raypar.Trainer(model=Net",
        " |  fit(",
        " |  evaluate(",
        " |  predict(",
        " |  from_yaml(path, ...)",
        " |  to_yaml(",
        "examples/guides/reference.md",
    ):
        assert text.count(part) == 1, part
    assert text.count("(*, model, loss, data, batch_size, microbatches, ...)") == 1
    assert "Initialize self" not in text


def test_the_signature_has_every_argument_with_its_default():
    parameters = inspect.signature(raypar.Trainer).parameters
    assert parameters["seed"].default == 0 and parameters["plan"].default == Job.model_fields["plan"].default
    assert inspect.signature(raypar.Trainer.from_yaml).parameters["local_nodes"].default == 1


@pytest.mark.parametrize(
    "function, text",
    [
        (lambda: 0, "()"),
        (lambda a, b: 0, "(a, b)"),
        (lambda a=1: 0, "(...)"),
        (lambda a, *, b=1: 0, "(a, ...)"),
        (lambda a, *, b, c=1: 0, "(a, *, b, ...)"),
    ],
)
def test_a_brief_signature_names_what_must_be_given(function, text):
    found = inspect.signature(with_brief_signature(function))
    assert isinstance(found, BriefSignature) and str(found) == found.format(max_width=20) == text
