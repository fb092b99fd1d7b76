"""Makes `helpers.*` and `examples.*` importable, keeps Ray quiet and private in every test, and samples the long tests."""

import os
import random
import sys
from pathlib import Path

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


def pytest_collection_finish() -> None:
    """`torch.manual_seed` notes for each kind of device that is not there from where it was called, for the day it is: the text
    of the whole stack, three times, half a millisecond under pytest. Tests seed a hundred thousand times."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        for device in ("cuda", "xpu", "mtia"):
            module = getattr(torch, device, None)
            if module is not None and not getattr(module, "is_available", lambda: True)():
                module.manual_seed_all = lambda seed: None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The choice depends on the seed and the tests' names only, so that a failing sample can be run again."""
    count = config.getoption("--sample")
    if not 0 < count < len(items):
        return
    names = sorted(item.nodeid for item in items)
    chosen = set(random.Random(config.getoption("--sample-seed")).sample(names, count))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
