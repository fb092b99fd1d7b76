"""Copies on a device are read where they were copied from, while neither was written."""

import pytest
import torch
from helpers import pretend
from helpers.processes import Worker

from raypar.model.copy_on_device import on_host, remember_source

pytestmark = pytest.mark.skipif(not pretend.POSSIBLE, reason="this PyTorch has no devices written in Python")


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


def test_the_source_is_read_until_it_or_the_copy_is_written():
    worker = Worker()
    worker.call(reads)
    assert worker.result(60.0) == [(True, [1.0, 1.0]), (False, [2.0, 2.0]), (False, [1.0, 1.0])]
    worker.end()
