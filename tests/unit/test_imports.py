"""Imports point towards the core, in the source and at run time."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.sources import PACKAGE, source_files, tree_of

PURE = ("errors", "plan", "schedule", "planner", "elastic", "record", "telemetry", "draw")
MAY_IMPORT = {
    "errors": "",
    "files": "errors yaml",
    "storage": "files record errors",
    "user_code": "errors",
    "data": "files storage errors torch numpy",
    "draw": "schedule plan errors files.json_type",
    "record": "plan schedule elastic errors files draw",
    "fences": "errors",
    "ray_compat": "fences errors ray",
    "torch_compat": "fences errors torch",
    "plan": "errors",
    "schedule": "plan errors",
    "planner": "plan schedule errors files.json_type",
    "elastic": "plan errors",
    "telemetry": "plan record errors",
    "optimizers": "torch",
    "comm": "plan errors files.json_type torch_compat torch numpy cupy",
    "model": "plan comm errors user_code torch_compat torch numpy",
    "doctor": "plan storage errors ray_compat.settings files.json_type",
    "worker": "job schedule model comm plan planner.model_profile errors fences torch_compat "
    "user_code torch numpy safetensors files data storage",
    "actors": "job worker data model elastic planner comm schedule plan record telemetry files storage callbacks errors "
    "fences ray_compat user_code torch numpy ray draw doctor",
    "job": "plan schedule elastic record.events record.best_checkpoint_rules record.metric_names errors files user_code "
    "pydantic yaml",
}
"""What a package may import anywhere in its files, itself aside. A dotted name allows that one module."""

EDGE_FILES = (
    "callbacks",
    "launch",
    "console",
    "example_jobs",
    "trainer",
    "commands",
    "cli",
    "__main__",
)
"""The shell, from the bottom up: one of these imports only those named before it, types included. `console` knows of `launch`
only what a run came to."""
EDGE = (*EDGE_FILES, "__init__")
"""The shell: imports anything, but heavy things inside functions only, so that the command line starts at once."""

LIGHT_FENCES = ("raypar.ray_compat.settings",)
"""Modules of the rooms for private APIs that load nothing heavy."""
HEAVY = {"torch", "ray", "cupy", "numpy", "pydantic"}
ONLY_IN = {
    "cupy": ("comm/nccl/bindings.py",),
    "pydantic": ("job/",),
    "ray": ("actors/", "ray_compat/", "launch/make_run_request.py", "launch/result.py", "launch/submit_to_job_server.py"),
}
THIRD_PARTY = HEAVY | {"yaml", "safetensors"}
IMPURE = {"time", "random", "os", "datetime", "secrets", "socket", "subprocess", "threading", "multiprocessing"}
"""Clock, chance and environment are arguments of the pure packages, never fetched by them."""


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST, *, lazy: bool = True) -> Iterator[str]:
    """Full names of imported modules; `lazy=False` leaves out functions and `if TYPE_CHECKING` blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute in raypar"
            module = node.module or ""
            yield from ((f"raypar.{a.name}" for a in node.names) if module == "raypar" else [module])
        elif not lazy and (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            continue
        else:
            yield from imports(node, lazy=lazy)


@functools.cache
def imports_of(path: Path, *, lazy: bool = True) -> list[str]:
    """`imports` of a file."""
    return list(imports(tree_of(path), lazy=lazy))


def forbidden(name: str, package: str) -> bool:
    """Whether a core package may not import this module. Third-party modules outside THIRD_PARTY are judged by purity."""
    root, _, rest = name.partition(".")
    if root != "raypar" and root not in THIRD_PARTY:
        return False
    inside = rest or "__init__"
    target = inside if root == "raypar" else root
    allowed = {package, "__init__", "__version__", *MAY_IMPORT[package].split()}
    return not any(target == a or target.startswith(a + ".") for a in allowed)


def test_every_file_belongs_to_a_row_of_the_table():
    assert {package_of(path) for path in source_files()} <= {*MAY_IMPORT, *EDGE}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_only_towards_the_core(package: str):
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in source_files()
        if package_of(path) == package
        for name in imports_of(path)
        if forbidden(name, package)
    ]
    assert not wrong


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_use_the_standard_library_without_clock_chance_or_environment(package: str):
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in source_files()
        if package_of(path) == package
        for name in imports_of(path)
        if name.split(".")[0] not in {"raypar", *sys.stdlib_module_names} or name.split(".")[0] in IMPURE
    ]
    assert not wrong


@pytest.mark.parametrize("package", EDGE_FILES)
def test_the_shell_has_an_order(package: str):
    above = EDGE_FILES[EDGE_FILES.index(package) + 1 :]
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in source_files()
        if package_of(path) == package
        for name in imports_of(path)
        if name.startswith("raypar.")
        and (
            name.split(".")[1] in above
            or (package == "console" and name.startswith("raypar.launch") and name != "raypar.launch.result")
        )
    ]
    assert not wrong


def test_the_shell_imports_heavy_things_inside_functions_only():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name} at the top"
        for path in source_files()
        if package_of(path) in EDGE
        for name in imports_of(path, lazy=False)
        if name.split(".")[0] in HEAVY or name.split(".")[1:2] in (["worker"], ["comm"], ["model"], ["actors"], ["ray_compat"])
        if name not in LIGHT_FENCES
    ]
    assert not wrong


@pytest.mark.parametrize("module", ONLY_IN)
def test_one_place_imports(module: str):
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in source_files()
        if not path.relative_to(PACKAGE).as_posix().startswith(ONLY_IN[module])
        and any(name.split(".")[0] == module for name in imports_of(path))
    ]
    assert not wrong


def loaded(modules: list[str], heavy: set[str]) -> str:
    """Those of `heavy` that a new process has loaded once it has imported `modules`."""
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}];"
            f"print(*sorted({heavy!r} & set(sys.modules)))",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return found.stdout.strip()


LIGHT_FILES = [
    "cli",
    "job",
    "files",
    "storage",
    "draw",
    "__init__",
]
"""Modules beside the pure core that load no heavy package."""


def test_the_pure_core_and_the_command_line_load_neither_torch_nor_ray():
    light = [
        ".".join(("raypar", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in source_files()
        if package_of(path) in {*PURE, *LIGHT_FILES}
    ]
    assert loaded(light, {"torch", "ray", "cupy", "numpy"}) == ""


def test_a_driver_starts_without_torch_and_with_all_of_raypar_that_pickles_need():
    """A run waits for the driver that Ray starts in place of one that died. What it imports later, while Ray unpacks the job's
    folder anew, may not be found: "No module named 'raypar....'"."""
    needs = {
        "raypar.callbacks",
        "raypar.plan.microbatches",
        "raypar.elastic.generation_guard",
        "raypar.worker.checkpoint.checkpoint_files",
        "raypar.errors",
    }
    needs |= {
        "raypar.actors.numerics_fingerprint",
        "raypar.actors.messages",
        "raypar.schedule.program_assignment",
    }
    assert loaded(["raypar.actors.driver_actor"], {"torch", "cupy", "numpy", *needs}) == " ".join(sorted(needs))


@pytest.mark.ci
def test_a_worker_starts_without_what_driver_and_client_decide_by():
    """A run waits for the worker that replaces a lost one."""
    worker = ["raypar.actors.worker_actor", "raypar.worker.elastic_worker", "raypar.actors.numerics_fingerprint"]
    others = {"raypar.record.events", "raypar.elastic.run_policy", "raypar.elastic.desired_capacity", "raypar.job.read_job"}
    others |= {"raypar.doctor.machine_facts", "raypar.actors.driver_actor", "raypar.elastic.run_machine", "sympy"}
    assert loaded(worker, {"torch", *others, *(f"raypar.{room}" for room in (*EDGE_FILES, "draw", "telemetry"))}) == "torch"


def test_commands_that_read_a_runs_folder_load_no_job_and_nothing_that_checks_one():
    status = ["raypar.console.read_run_folder", "raypar.console.run_status", "raypar.launch.find_cluster_job"]
    assert loaded(status, {"pydantic", "raypar.job", "torch", "ray", "numpy"}) == ""


def test_what_the_readme_and_messages_name_is_there_after_import_raypar_alone():
    code = "import raypar; assert raypar.callbacks.Callback is raypar.Callback; raypar.errors.RayparError"
    subprocess.run([sys.executable, "-c", code], check=True)


EXTRAS = {"datasets", "torchmetrics", "torchdata", "peft", "transformers", "accelerate", "tokenizers", "webdataset"}
"""Libraries that users bring: raypar imports them, if at all, where a job uses them."""


@pytest.mark.ci
def test_no_module_of_raypar_loads_the_libraries_that_users_bring_or_cupy():
    """A transport loads CuPy when it needs it."""
    names = [".".join(("raypar", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in source_files()]
    assert loaded([name.removesuffix(".__init__") for name in names if not name.endswith("__main__")], EXTRAS | {"cupy"}) == ""
