"""A full disk without root: a limit on the size of this process's files."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def room(nbytes: int) -> Iterator[None]:
    """Files of this process take no more than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
