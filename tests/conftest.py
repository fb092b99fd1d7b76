"""Makes `helpers.*` and `examples.*` importable, keeps Ray quiet and private in every test, and chooses what runs where: the
default suite takes a part of each large grid, `.ci/run` the rest and a sample of the long tests."""

import gc
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
for folder in (TESTS, TESTS.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest -m 'full or chaos' --sample 16 --sample-seed 7` runs 16 of the long tests, chosen by the seed."""
    group = parser.getgroup("raypar")
    group.addoption("--sample", type=int, default=0, metavar="N", help="run only N of the selected tests")
    group.addoption("--sample-seed", type=int, default=7, metavar="S", help="seed of the choice made by --sample")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole default suite, `-m quick` and `-m ci` run in one process more than there are processors, in four at most; tests
    that were chosen otherwise, by path or by marker, run in this one (0).

    One more, because tests wait for processes that they start; four at most, because end-to-end tests, a quarter of the
    suite's time, run one after the other.
    """
    options = ("-k", "--sample") if config.option.markexpr in ("quick", "ci") else ("-m", "-k", "--sample")
    words = map(str, config.invocation_params.args)
    chosen = config.args_source is not pytest.Config.ArgsSource.TESTPATHS or any(word.startswith(options) for word in words)
    processors = os.cpu_count() or 1
    return 0 if chosen or processors < 2 else min(processors + 1, 4)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Says which tests run in one process, in order: those of a module, and all end-to-end tests.

    Not `xdist_group` marks: xdist 3.8 appends them to names of tests that pytest 9.2 does not read, and tests were dealt out
    one by one, with every module's clusters and references made twice.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "end-to-end" if module.startswith("tests/e2e/") else module

    return ByModule(config, log)


_PROCESSES_OF_MODULES: dict[str, set[str]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes in which process each module was run (in the process that xdist reports to)."""
    if hasattr(report, "node"):
        _PROCESSES_OF_MODULES.setdefault(report.nodeid.partition("::")[0], set()).add(report.node.gateway.id)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A module in two processes is an error, if no process has crashed: see `pytest_xdist_make_scheduler`."""
    torn = sorted(module for module, processes in _PROCESSES_OF_MODULES.items() if len(processes) > 1)
    if torn and not session.testsfailed:
        pytest.exit(f"{len(torn)} modules were run in two processes, one test here and one there: {', '.join(torn[:3])}", 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests and all modules stay until the end, and Python's garbage collector would look through them again and
    again: a quarter of the time in which they are collected, and a twelfth of that in which they run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


def pytest_collection_finish() -> None:
    """`torch.manual_seed` notes for each kind of device that is not there from where it was called, for the day it is: the text
    of the whole stack, three times, half a millisecond under pytest. Tests seed a hundred thousand times."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        for device in ("cuda", "xpu", "mtia"):
            module = getattr(torch, device, None)
            if module is not None and not getattr(module, "is_available", lambda: True)():
                module.manual_seed_all = lambda seed: None


STARTS_PROCESSES = (
    *("parity/test_tcp", "parity/test_gpu_process", "parity/test_gpu_workers", "parity/test_data", "parity/test_example_jobs"),
    *("parity/test_without_dynamo", "parity/test_kernel_calls", "unit/test_cluster_files", "unit/test_packaging"),
    *("unit/test_folder_upload", "unit/test_import_circles", "unit/test_fences", "unit/test_top", "unit/test_parts"),
    *("unit/test_unspoken_end_of_checks", "unit/test_unhandled_interrupt", "unit/test_working_dir"),
)
"""Modules of `unit` and `parity` that spend their time in processes which they start: not in `pytest -m quick`."""
AROUND_TRAINING = tuple(
    f"parity/test_{name}"
    for name in (
        *("all_predictions", "changed_at_resume", "collate", "data_files", "data_loader_given", "evaluation", "export_folder"),
        *("frozen_teacher", "label_count", "metrics", "only_trained", "packing", "padding", "prediction", "pretrained_folder"),
        *("sample_weights", "schedulers_of_metrics", "streams"),
    )
)
"""Modules of `parity` that take whole jobs through data, measures, a resume, evaluation or export: not in `pytest -m quick`."""
NOT_QUICK = frozenset(f"tests/{name}.py" for name in (*STARTS_PROCESSES, *AROUND_TRAINING))


def leave_out_other_parts(items: Sequence[pytest.Item]) -> None:
    """Of a test (or of each test of a module) marked `part(n)`, all cases but one in `n` are marked `ci`. A case that is long
    is not `ci`, too."""
    from helpers.parts import choose_part

    grids: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        part = item.get_closest_marker("part")
        if any(item.iter_markers("full")) or any(item.iter_markers("chaos")):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "ci"]
        elif part is not None:
            grids.setdefault((item.nodeid.partition("[")[0], part.args[0]), []).append(item)
    for (_, one_in), grid in grids.items():
        chosen = choose_part([item.nodeid.partition("[")[2] for item in grid], one_in)
        for item in grid:
            if item.nodeid.partition("[")[2] not in chosen:
                item.add_marker("ci")


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_mark_tests(items: list[pytest.Item]) -> None:
    """`pytest -m ci`: what the default suite leaves out and `.ci/run` runs. `pytest -m quick`: what the pure rooms decide, and
    the bits of one process, without the longest grids and what is around training."""
    leave_out_other_parts(items)
    for item in items:
        module = item.nodeid.partition("::")[0]
        marked = {mark.name for mark in item.iter_markers()} & {"full", "chaos", "ci"}
        if module.startswith(("tests/unit/", "tests/parity/")) and module not in NOT_QUICK and not marked:
            item.add_marker("quick")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """End-to-end tests come first: the process that has finished them takes its share of the others.

    The choice of a sample depends on the seed and the tests' names only, so that a failing one can be run again.
    """
    items.sort(key=_is_end_to_end, reverse=True)
    count = config.getoption("--sample")
    if not 0 < count < len(items):
        return
    names = sorted(item.nodeid for item in items)
    chosen = set(random.Random(config.getoption("--sample-seed")).sample(names, count))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def _is_end_to_end(item: pytest.Item) -> bool:
    return item.nodeid.startswith("tests/e2e/")
