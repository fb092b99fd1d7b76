"""What is installed with raypar, and what only where somebody asks for it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()


def extra(name: str) -> str:
    """The requirements of an extra, as they are written."""
    found = re.search(rf"^{name} = \[(.*?)\]$", PROJECT, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def test_the_suite_brings_cupy_where_there_is_a_wheel_and_nothing_else_does_but_the_extras_for_gpus():
    assert "cupy-cuda13x>=14; sys_platform == 'linux' and platform_machine == 'x86_64'" in extra("test")
    assert "cupy-cuda12x>=14" in extra("cuda12") and "cupy-cuda13x>=14" in extra("cuda13")
    assert "cupy" not in extra("dependencies")


def test_the_job_server_is_an_extra_that_the_suite_does_without():
    """With it every node of a test's cluster takes seconds longer to start."""
    assert "ray[default]" in extra("jobs") and "ray[default]" not in extra("test") and "ray[train]" in extra("dependencies")


def required_packages(file: Path) -> set[str]:
    """The packages that a file imports, at its top or in its functions; not those that it tries to import."""
    tree = ast.parse(file.read_text())
    tried = {node for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    nodes = [node for node in ast.walk(tree) if node not in tried]
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    parts = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in whole | parts}


def test_the_suite_does_without_torchvision_and_no_guide_tells_people_to_uninstall_something():
    """PyPI's torchvision belongs to PyTorch for CUDA: beside one for CPUs `import transformers` fails, which imports it."""
    assert "torchvision" not in PROJECT[: PROJECT.index("[tool.")] + (ROOT / "constraints.txt").read_text()
    named = [path for path in (ROOT / "tests").rglob("*.py") if "torchvision" in path.read_text()]
    assert named and not [path for path in named if "torchvision" in required_packages(path)]
    pages = [ROOT / "README.md", *(ROOT / "examples").rglob("*.md")]
    assert len(pages) > 5 and not [path for path in pages if "uninstall" in path.read_text()]


def test_the_version_stands_in_one_place():
    import raypar

    assert re.fullmatch(r"\d+\.\d+\.\d+", raypar.__version__)
    assert 'dynamic = ["version"]' in PROJECT and 'version = { attr = "raypar.__version__" }' in PROJECT


def test_type_checkers_know_every_public_name():
    """Names come by `__getattr__`, of which a type checker knows nothing."""
    import raypar

    tree = ast.parse((ROOT / "raypar/__init__.pyi").read_text())
    named = {alias.asname: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert named == {**raypar._WHERE, **dict.fromkeys(raypar._MODULES, "raypar")}


def test_type_checkers_read_the_annotations_of_an_installed_raypar():
    assert (ROOT / "raypar/py.typed").is_file()
    assert re.search(r"^\[tool\.setuptools\.package-data\]\nraypar = \[\"py\.typed\", \"\*\.pyi\"\]$", PROJECT, re.MULTILINE)


@pytest.mark.ci
def test_raypar_is_imported_without_cupy_also_where_there_is_none_and_asking_for_it_names_the_cure():
    """Neither its public names nor the command line look for it; who has none pays and misses nothing."""
    code = (
        "import sys; sys.modules['cupy'] = None; sys.modules['cupy_backends'] = None\n"
        "import raypar, raypar.cli, raypar.launch\n"
        "for name in raypar.__all__: getattr(raypar, name)\n"
        "import raypar.worker.worker_core, raypar.actors.worker_actor\n"
        "print(sorted(name for name, module in sys.modules.items() if name.startswith('cupy') and module is not None))\n"
        "from raypar.comm.nccl import connect\n"
        "from raypar.comm.nccl.device import CudaDevice\n"
        "try: CudaDevice()\n"
        "except raypar.errors.ClusterError as error: print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    first, said = found.stdout.split("\n", 1)
    assert first == "[]" and not found.stderr
    assert "needs CuPy, which cannot be imported" in said and "pip install 'raypar[cuda13]'" in said
