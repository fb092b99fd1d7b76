"""Setuptools' command `build_py`, which also copies the example job files and their code into the wheel, for `raypar example`.

`pyproject.toml` names it. The files lie in `jobs/` and `examples/` of the repository, and in `raypar/example_jobs/files/` of
a wheel; an installation by `pip install -e` finds them in the repository. Where there are none (images copy only the package
before they install it) the wheel has none. Nothing of raypar imports this file, which needs setuptools.
"""

from pathlib import Path

from setuptools.command.build_py import build_py

EXAMPLES = ("jobs/*.yaml", "examples/*.py")
TARGET = "raypar/example_jobs/files"


class BuildPyWithExamples(build_py):  # type: ignore[misc]
    """`build_py`, with the files of `EXAMPLES` as if they lay in the package."""

    def _copies(self) -> dict[str, str]:
        """Path in the build folder -> path in the repository; none for an editable installation."""
        if self.editable_mode:
            return {}
        files = sorted(path for pattern in EXAMPLES for path in Path().glob(pattern))
        return {str(Path(self.build_lib, TARGET, path)): str(path) for path in files}

    def run(self) -> None:
        super().run()
        for target, source in self._copies().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._copies()]

    def get_output_mapping(self) -> dict[str, str]:
        return {**super().get_output_mapping(), **self._copies()}

    def get_source_files(self) -> list[str]:
        """What a source distribution must have to build the wheel."""
        return [*super().get_source_files(), *self._copies().values()]
