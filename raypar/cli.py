"""The command line: imports and runs one subcommand, and turns errors into two lines and an exit code.

Exit codes: 0 done, 1 failed, 2 bad input (nothing was started), 130 stopped by the user (Ctrl-C, SIGTERM, `raypar stop`).
"""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from raypar import __version__
from raypar.errors import ConfigError, Interrupted, RayparError
from raypar.files.atomic_write import DISK_FULL_ERRNOS
from raypar.files.os_error_cure import NO_DESCRIPTOR_ERRNOS, cure_of_os_error
from raypar.files.printable_text import printable_text
from raypar.files.redact_secrets import redact_certain_secrets, secrets_of_environment
from raypar.files.untrusted_files import READABLE
from raypar.user_code.stop_signals import recording_ctrl_c
from raypar.user_code.stop_signals_outside_training import describe_interrupt
from raypar.user_code.traceback_filter import remove_raypar_frames, shows_raypar_frames

UNWRITABLE_DISK_ERRNOS = DISK_FULL_ERRNOS | {errno.EROFS}
"""Error numbers for a disk that takes nothing more: full, or read-only."""

COMMANDS = {
    "example": "an example job with its code, written into a folder",
    "train": "train a job; leaves a run folder",
    "resume": "train on from a run's last checkpoint, under another plan if you like",
    "job": "the JSON schema of job files, for editors (--schema)",
    "plan": "placement, memory and predicted step time of a job's plan",
    "simulate": "a schedule's makespan, bubble and memory, and its picture",
    "submit": "train a job on a cluster, by its job server",
    "runs": "the runs in a folder, or the jobs of a cluster: state, step, loss",
    "logs": "what a run or a submitted job has printed; -f follows it",
    "stop": "let a run or a submitted job save a checkpoint and end",
    "status": "phase, speed and workers of a run, and what has happened to it",
    "top": "a run live on the terminal: workers, computing, memory, loss",
    "report": "a run as one HTML file, to be read without raypar",
    "doctor": "whether this machine, and a cluster, are fit for raypar, with cures",
    "drain": "announce that a node will leave: runs move their work off it",
    "export": "the whole model of a run as one file, or a folder for from_pretrained",
    "evaluate": "the validation loss of a run's weights, over any data set",
    "predict": "the outputs of a run's weights for each sample, as a Parquet file",
    "prepare": "a memory-mapped token file from a text",
    "debug": "the whole plan of a job or a run in one process, with breakpoints",
}
"""Name of a subcommand -> its line of help. Its code is the module `raypar.commands.<name>`."""


SYNONYMS = {
    "run": "train", "fit": "train", "start": "train", "launch": "train", "continue": "resume", "list": "runs", "ls": "runs",
    "ps": "runs", "log": "logs", "kill": "stop", "cancel": "stop", "delete": "stop", "check": "doctor", "info": "doctor",
    "watch": "top", "save": "export", "convert": "export", "init": "example", "new": "example", "help": "--help",
    "version": "--version",
}  # fmt: skip
"""What other programs call a command -> its name here."""


COLLECT_EVERY = 20_000
"""After so many new objects Python's garbage collector looks for garbage in a command's process. PyTorch, Ray and raypar make
200,000 objects that stay: with Python's default (700) the collector takes 0.5 s of the 3 s of a processor of `raypar plan`."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        cure = f"`{self.prog} --help` lists what it takes"
        _, lacking, names = message.partition("the following arguments are required: ")
        if lacking:
            words = [name if name.startswith("-") else name.upper() for name in names.split(", ")]
            flags = {option for action in self._actions if action.nargs == 0 for option in action.option_strings}
            takes = [f"{word} ..." if word.startswith("-") and word not in flags else word for word in words]
            cure = f"`{self.prog} {' '.join(takes)}`; {cure}"
        _, found, unknown = message.partition("unrecognized arguments: ")
        if found:
            given = unknown.split()[0].lstrip("-").partition("=")[0]
            advice, near = _advice_about_key(given) if "--set" in options else None, _nearest(unknown.split()[0], options)
            cure = advice or (f"did you mean {near}? {cure}" if near else cure)
        raise ConfigError(f"{self.prog}: {message}", cure=cure)


def _advice_about_key(name: str) -> str | None:
    """How to set a key of the job that was given as an option, or what another framework's option is here; else None."""
    from raypar.job import Job
    from raypar.job.keys_of_other_frameworks import advice_for

    key = name.replace("-", "_")
    if key in Job.model_fields:
        return f"keys of the job are set by --set: --set {key}=..."
    advice = advice_for(key)
    return advice if advice is None else f"{advice}; keys of the job are set by --set, such as --set steps=100"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code. `--help` and `--version` raise SystemExit, as argparse does.

    Without `argv` the arguments are the process's own, and a process that has loaded Ray exits here, at once: to destroy the
    objects of torch and Ray one by one takes a second or more, and users who have pressed Ctrl-C would wait for it.
    """
    if argv is not None:
        return _run_and_explain_errors(argv)
    gc.set_threshold(COLLECT_EVERY, *gc.get_threshold()[1:])
    status = _run_and_explain_errors(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more Ctrl-C ends the process at once, without a traceback
    if "ray" in sys.modules:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run_and_explain_errors(argv: Sequence[str]) -> int:
    """The exit code of a subcommand; its errors are printed."""
    words = list(argv)
    try:
        with recording_ctrl_c():
            status = _run_subcommand(words)
        sys.stdout.flush()
        return status
    except Interrupted as stopped:  # at the user's request: this is no error
        print(describe_interrupt(stopped), file=sys.stderr)
        return stopped.exit_code
    except RayparError as error:
        if not shows_raypar_frames():
            remove_raypar_frames(error)
        text = redact_certain_secrets(str(error), secrets_of_environment(os.environ))  # a job's log is read by others too
        print(f"error: {printable_text(text)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename is not None:
            print(f"error: cannot use {error.filename}: {error.strerror}\n  cure: {READABLE}", file=sys.stderr)
            return ConfigError.exit_code
        if error.errno in NO_DESCRIPTOR_ERRNOS:
            where = f" for {error.filename}" if error.filename is not None else ""
            print(f"error: {error.strerror}: no file descriptor is left{where}", file=sys.stderr)
            print(f"  cure: {cure_of_os_error(error, '')}", file=sys.stderr)
            return 1
        if error.errno not in UNWRITABLE_DISK_ERRNOS:
            raise
        what = f"cannot write {error.filename or 'what is printed'}: {error.strerror}"
        print(f"error: {what}\n  cure: free disk space, or choose a place you may write to", file=sys.stderr)
        if error.filename is None:  # as above
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run_subcommand(words: list[str]) -> int:
    """Run the subcommand that the first word names; without one print the overview. Raises `RayparError`."""
    if not words or words[0].startswith("-"):
        _overview().parse_args(words)
        _overview().print_help()
        return 0
    chosen = words[0]
    if chosen not in COMMANDS:
        near = SYNONYMS.get(chosen.lower()) or _nearest(chosen.lower(), COMMANDS)
        raise ConfigError(
            f"raypar has no command {chosen!r}", cure=f"did you mean {near}?" if near else f"one of {', '.join(COMMANDS)}"
        )
    module = importlib.import_module(f"raypar.commands.{chosen}")
    parser = _Parser(
        prog=f"raypar {chosen}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    status: int = module.run(parser.parse_args(words[1:]))
    return status


def _overview() -> argparse.ArgumentParser:
    """The parser of `raypar` without a subcommand: `--help` and `--version`."""
    width = max(map(len, COMMANDS))
    parser = _Parser(
        prog="raypar",
        usage="raypar COMMAND ...",
        description="Train PyTorch models on a Ray cluster, in stages (pipeline parallel), replicas (data parallel) and shards "
        "(tensor parallel), with the results of one process.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
        + "\n\n`raypar COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"raypar {__version__}")
    return parser


def _nearest(word: str, among: Sequence[str] | dict[str, str]) -> str | None:
    """The word of `among` that is most like `word`; None if none is like it."""
    import difflib

    return next(iter(difflib.get_close_matches(word, among, n=1, cutoff=0.6)), None)
