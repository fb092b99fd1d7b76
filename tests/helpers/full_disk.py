"""A full disk without root: a limit on the size of this process's files."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def room(nbytes: int) -> Iterator[None]:
    """Files of this process, and of processes that it starts meanwhile, take no more than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with no_bytecode():
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def no_bytecode() -> Iterator[None]:
    """Modules that this process imports, and processes that it starts meanwhile, leave no bytecode behind.

    Python 3.11 takes what could be written of a file for the whole of it, and no later process could import the module.
    """
    with mock.patch.object(sys, "dont_write_bytecode", True), mock.patch.dict(os.environ, PYTHONDONTWRITEBYTECODE="1"):
        yield
