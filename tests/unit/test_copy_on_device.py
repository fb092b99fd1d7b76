"""Copies on a device are read where they were copied from, while neither was written."""

import pytest
import torch
from helpers import pretend
from helpers.processes import Worker

from raypar.model.copy_on_device import on_host, remember_source
from raypar.model.rounded_parameters import as_layers_read

pytestmark = pretend.NEEDED


def reads(state) -> list[tuple[bool, list[float]]]:
    """(whether it is the source itself, its numbers) of a copy, then after a write to the copy, then to the source."""
    found = []
    for written in (None, "copy", "source"):
        source = torch.ones(2)
        copied = source.to(pretend.device())
        remember_source(copied, source)
        if written is not None:
            (copied if written == "copy" else source).add_(1)
        numbers = on_host(copied)
        found.append((numbers is source, numbers.tolist()))
    return found


def reads_rounded(state) -> list[tuple[bool, bool, list[float]]]:
    """(whether layers get one tensor, whether the device is not asked, the numbers) of a field that layers read in bfloat16,
    then after a write to what they were given, to the field, and to its source."""
    found, asked = [], []
    pretend.watchers.append(lambda op, args, to_host: asked.append(to_host))
    for written in (None, "rounded", "field", "source"):
        source = torch.full((2,), 257.0)
        field = source.to(pretend.device())
        remember_source(field, source)
        first = as_layers_read(field, torch.bfloat16)
        if written is not None:
            {"rounded": first, "field": field, "source": source}[written].add_(2)
        second = as_layers_read(field, torch.bfloat16)
        asked.clear()
        numbers = on_host(second)
        found.append((second is first, not any(asked), numbers.tolist()))
        assert numbers.dtype == second.dtype == torch.bfloat16
    return found


@pytest.mark.ci
def test_layers_that_read_a_field_in_bfloat16_get_one_tensor_and_the_host_rounds_the_source_until_something_is_written():
    worker = Worker()
    worker.call(reads_rounded)
    assert worker.result(60.0) == [
        (True, True, [256.0, 256.0]),
        (False, True, [256.0, 256.0]),
        (False, False, [260.0, 260.0]),
        (True, False, [256.0, 256.0]),
    ]
    worker.end()


def test_the_source_is_read_until_it_or_the_copy_is_written():
    worker = Worker()
    worker.call(reads)
    assert worker.result(60.0) == [(True, [1.0, 1.0]), (False, [2.0, 2.0]), (False, [1.0, 1.0])]
    worker.end()
