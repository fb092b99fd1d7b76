"""The example job files that come with raypar, and the code that each of them names: lists them, and writes one into a folder.

In the repository they are `jobs/*.yaml` and `examples/*.py`; a wheel has copies of them, by `copy_into_wheel.py`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from raypar.errors import ConfigError
from raypar.files.os_error_cure import cure_of_os_error

HERE = Path(__file__).parent
_NAMED = re.compile(r"\bexamples[./](\w+)|^from examples import (\w+)", re.MULTILINE)
"""A module of `examples` that a text names."""


def example_folder() -> Path:
    """The folder with `jobs/` and `examples/`. Raises `ConfigError` where raypar was copied without them."""
    for folder in (HERE / "files", HERE.parents[1]):
        if (folder / "jobs" / "quickstart.yaml").is_file():
            return folder
    raise ConfigError(f"raypar in {HERE.parent} came without its examples", cure="install raypar by pip, or use a clone")


def list_examples() -> dict[str, str]:
    """Name of each example -> the first sentence of its job file."""
    found = {}
    for file in sorted((example_folder() / "jobs").glob("*.yaml")):
        found[file.stem] = file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return found


def example_files(name: str) -> dict[str, str]:
    """Path below a folder -> text, of a job file and of every module of `examples` that it needs or names. `name`: see
    `list_examples`."""
    source = example_folder()
    files = {f"{name}.yaml": (source / "jobs" / f"{name}.yaml").read_text(encoding="utf-8")}
    left = list(files.values())
    while left:
        for module in sorted({one or other for one, other in _NAMED.findall(left.pop())}):
            path, file = f"examples/{module}.py", source / "examples" / f"{module}.py"
            if path not in files and file.is_file():
                files[path] = file.read_text(encoding="utf-8")
                left.append(files[path])
    # There the job file lies in the folder itself.
    return {path: re.sub(r"\bjobs/(\w+\.yaml)", r"\1", text) for path, text in files.items()}


def packages_to_install(name: str) -> str:
    """The packages that an example needs beside raypar, as its job file names them; empty if it needs none."""
    found = re.search(r"pip install ([\w -]+\w)", example_files(name)[f"{name}.yaml"])
    return found[1] if found else ""


def write_example(name: str, folder: Path) -> list[str]:
    """Write an example into a folder, which is made if it is not there; the paths of its files below it.

    Raises `ConfigError`, before anything is written, if a file of these names is there already; a module with the very text,
    which another example has brought, may be.
    """
    files = example_files(name)
    try:
        there = [
            path
            for path, text in files.items()
            if os.path.lexists(folder / path) and not (path.endswith(".py") and _has_text(folder / path, text))
        ]
        if there:
            raise ConfigError(
                f"{', '.join(str(folder / path) for path in there)} {'is' if len(there) == 1 else 'are'} there already: "
                "nothing was written",
                cure=f"give another folder: raypar example {name} FOLDER",
            )
        for path in files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            if not (folder / path).exists():
                with open(folder / path, "x", encoding="utf-8") as file:
                    file.write(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {error.filename or folder}: {error.strerror}",
            cure=cure_of_os_error(error, f"give a folder that can be written: raypar example {name} FOLDER"),
        ) from error
    return list(files)


def _has_text(path: Path, text: str) -> bool:
    """Whether a file is a regular one with this text."""
    return path.is_file() and path.stat().st_size == len(text.encode()) and path.read_bytes() == text.encode()
