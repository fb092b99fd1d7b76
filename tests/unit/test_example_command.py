"""`raypar example` writes a job file and the code that it names, into any folder, from a clone and from a wheel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raypar.cli import main
from raypar.example_jobs.write_example import example_files, list_examples, packages_to_install
from raypar.job.read_job import load_job

ROOT = Path(__file__).parents[2]


def files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_it_lists_every_job_file_with_its_first_line(capsys):
    assert main(["example"]) == 0
    out = capsys.readouterr().out
    assert "quickstart A small GPT on real English text" in " ".join(out.split())
    assert list(list_examples()) == sorted(path.stem for path in (ROOT / "jobs").glob("*.yaml"))


def test_it_writes_the_job_file_and_its_code_and_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["example", "quickstart"]) == 0
    assert capsys.readouterr().out == "wrote quickstart.yaml, examples/gpt.py\nnext: raypar train quickstart.yaml\n"
    assert files_below(tmp_path) == ["examples/gpt.py", "quickstart.yaml"]
    assert load_job("quickstart.yaml") == load_job(ROOT / "jobs/quickstart.yaml")
    assert "raypar train quickstart.yaml" in Path("quickstart.yaml").read_text()


def test_another_folder_is_made_and_other_packages_are_named(tmp_path, capsys):
    assert main(["example", "vit_digits", f"{tmp_path}/new/one"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(f"cd {tmp_path}/new/one && pip install transformers scikit-learn && raypar train vit_digits.yaml\n")


@pytest.mark.parametrize("name", list_examples())
def test_every_example_has_the_code_that_it_names_and_imports(name: str, tmp_path):
    """In a process that finds no other `examples`; what cannot be imported but for a missing package is not asked for."""
    assert main(["example", name, str(tmp_path)]) == 0
    texts = example_files(name)
    modules = {path.removesuffix(".py").replace("/", ".") for path in texts if path.endswith(".py")}
    job = load_job(tmp_path / f"{name}.yaml")
    named = {one.function.partition(":")[0] for one in (job.model, job.loss, job.data, job.optimizer)}
    assert {module for module in named if module.startswith("examples.")} <= modules
    for path, text in texts.items():
        assert "jobs/" not in text, path


def test_a_job_file_that_is_there_is_refused_and_nothing_is_written(tmp_path, capsys):
    (tmp_path / "quickstart.yaml").write_text("mine")
    assert main(["example", "quickstart", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert (
        f"{tmp_path}/quickstart.yaml is there already: nothing was written" in said
        and "raypar example quickstart FOLDER" in said
    )
    assert files_below(tmp_path) == ["quickstart.yaml"] and (tmp_path / "quickstart.yaml").read_text() == "mine"


def test_a_module_of_an_other_text_is_refused_and_one_of_another_example_is_not(tmp_path, capsys):
    assert main(["example", "quickstart", str(tmp_path)]) == 0 and main(["example", "lstm", str(tmp_path)]) == 0
    (tmp_path / "examples/gpt.py").write_text("mine")
    (tmp_path / "lstm.yaml").unlink()
    capsys.readouterr()
    assert main(["example", "lstm", str(tmp_path)]) == 2
    assert "examples/gpt.py is there already" in capsys.readouterr().err and not (tmp_path / "lstm.yaml").exists()


@pytest.mark.parametrize("made", ["a file in the folder's place", "a file in the place of examples", "a link to nowhere"])
def test_what_cannot_be_written_is_one_error_and_leaves_nothing(made: str, tmp_path, capsys):
    folder = tmp_path / "folder"
    if made == "a file in the folder's place":
        folder.write_text("")
    elif made == "a file in the place of examples":
        folder.mkdir()
        (folder / "examples").write_text("")
    else:
        folder.mkdir()
        (folder / "quickstart.yaml").symlink_to("nowhere")
    before = files_below(tmp_path)
    assert main(["example", "quickstart", str(folder)]) == 2
    assert capsys.readouterr().err.count("error:") == 1 and files_below(tmp_path) == before


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path, capsys):
    assert main(["example", "quikstart", str(tmp_path)]) == 2
    assert "did you mean quickstart?" in capsys.readouterr().err


def test_packages_are_those_that_the_job_file_tells_people_to_install():
    assert {name: packages_to_install(name) for name in ("quickstart", "llama", "resnet_digits")} == {
        "quickstart": "",
        "llama": "transformers",
        "resnet_digits": "scikit-learn",
    }


@pytest.fixture(scope="module")
def build_tree(tmp_path_factory) -> Path:
    """A copy of what a wheel is built from, so that the build leaves nothing in the repository."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("raypar", "jobs", "examples"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "bench", "guides"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.mark.ci
def test_a_wheel_has_all_of_raypar_and_the_examples_and_writes_them_elsewhere(build_tree, tmp_path):
    """What `python -m build` puts into a wheel, by the same command of setuptools."""
    lib = tmp_path / "lib"
    code = (
        "import sys; from setuptools import Distribution\n"
        "found = Distribution({'script_name': 'none'}); found.parse_config_files()\n"
        "command = found.get_command_obj('build_py'); command.build_lib = sys.argv[1]\n"
        "command.ensure_finalized(); command.run()\n"
        "print(*command.get_source_files(), sep='\\n')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(lib)], cwd=build_tree, capture_output=True, text=True, check=True, timeout=120
    )
    sources = [path.relative_to(ROOT).as_posix() for path in (ROOT / "raypar").rglob("*.py")]
    examples = [
        path.relative_to(ROOT).as_posix() for pattern in ("jobs/*.yaml", "examples/*.py") for path in ROOT.glob(pattern)
    ]
    package = [*sources, "raypar/py.typed", "raypar/__init__.pyi"]
    assert files_below(lib) == sorted([*package, *(f"raypar/example_jobs/files/{path}" for path in examples)])
    # A wheel may be built from a source distribution.
    assert {*sources, *examples} <= {line.removeprefix("./") for line in found.stdout.splitlines()}
    written = tmp_path / "elsewhere"
    written.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(lib), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "raypar", "example", "quickstart"]
    subprocess.run(command, cwd=written, env=environment, check=True, timeout=60, capture_output=True)
    assert files_below(written) == ["examples/gpt.py", "quickstart.yaml"]
    assert (written / "examples/gpt.py").read_text() == (ROOT / "examples/gpt.py").read_text()
