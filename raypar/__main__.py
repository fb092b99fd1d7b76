"""Where `raypar` and `python -m raypar` begin: Ctrl-C ends them without a traceback even while the command line is imported."""

import os
import sys


def main() -> int:
    """Import and run the command line. Returns its exit code; 130 after Ctrl-C."""
    try:
        import signal

        waits_for_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not if the caller ignores it
        if waits_for_ctrl_c:
            # `except KeyboardInterrupt` is not enough: code that is imported may catch it. Nothing has to be cleaned up yet.
            signal.signal(signal.SIGINT, lambda *_: _end_at_once())
        from raypar.cli import main as run_command

        if waits_for_ctrl_c:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run_command()
    except KeyboardInterrupt:  # before the handler is there, or before the command line catches it
        return _end_at_once()


def _end_at_once() -> int:
    os.write(2, b"interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
