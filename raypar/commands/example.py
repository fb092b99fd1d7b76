"""`raypar example NAME [FOLDER]`: writes an example, a job file with the code that it names; without NAME lists them all."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `raypar example`."""
    parser.add_argument("name", nargs="?", help="the example; without it all are listed")
    parser.add_argument("folder", nargs="?", default=".", help="where to write it (default: the current folder)")


def run(args: argparse.Namespace) -> int:
    """List the examples, or write one and say what to do next; exit code 0. Raises `ConfigError`."""
    import difflib
    import shlex

    from raypar.errors import ConfigError
    from raypar.example_jobs.write_example import list_examples, packages_to_install, write_example
    from raypar.files.printable_text import repr_text
    from raypar.storage.run_folder import check_local_path

    known = list_examples()
    if args.name is None:
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {summary}" for name, summary in known.items()))
        print("\n`raypar example NAME` writes one into the current folder, `raypar example NAME FOLDER` into another one.")
        return 0
    if args.name not in known:
        near = difflib.get_close_matches(args.name, known, n=1, cutoff=0.5)
        cure = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"there is no example {repr_text(args.name)}", cure=f"{cure}one of {', '.join(known)}")
    written = write_example(args.name, check_local_path(args.folder, "FOLDER"))
    steps = [f"cd {shlex.quote(args.folder)}"] if args.folder != "." else []
    steps += [f"pip install {packages}"] if (packages := packages_to_install(args.name)) else []
    print(f"wrote {', '.join(written)}")
    print(f"next: {' && '.join([*steps, f'raypar train {args.name}.yaml'])}")
    return 0
