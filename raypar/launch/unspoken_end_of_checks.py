"""Has a line printed if this process ends without a word in users' code before a run: by `os._exit`, a crash, or SIGKILL.

The checks before a run call users' code in the command's own process. One that ends so prints nothing, so a shell process does.
"""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable, Iterator


def text_of_unspoken_end(what: str) -> str:
    """The message for a process that has ended while it checked `what`."""
    return (
        f"error: this process has ended without a word while it checked {what}, before the run: code there called os._exit or "
        "crashed, or the system killed the process, as it does where memory runs out\n"
        "  cure: call that code by itself in Python; `dmesg` names processes that were killed for memory"
    )


@contextlib.contextmanager
def spoken_for(what: str) -> Iterator[Callable[[str], None]]:
    """While it lasts, a process that ends without a word is spoken for; after a crash Python's stack is printed too. Gives a
    function that takes what is checked now. `what`: what is checked first."""
    from raypar.actors.print_if_killed import print_if_killed

    enabled = faulthandler.is_enabled()
    with print_if_killed(text_of_unspoken_end(what)) as notice:
        if not enabled:
            with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # a notebook's stderr is no file
                faulthandler.enable()
        try:
            yield lambda now: notice.replace(text_of_unspoken_end(now))
        finally:
            if not enabled:
                faulthandler.disable()
