"""Runs on machines whose network breaks: they end with the same weights or an error that says why, and nothing is left."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from helpers.namespace_runner import ClusterKeeper, ScenarioRun
from helpers.namespace_scenarios import SCENARIOS, Scenario
from helpers.trainee import Undisturbed

pytestmark = pytest.mark.chaos
NUMBERS = {scenario.name: number for number, scenario in enumerate(SCENARIOS)}


@pytest.fixture(scope="module")
def keeper() -> Iterator[ClusterKeeper]:
    keeper = ClusterKeeper()
    yield keeper
    keeper.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    @cache
    def of(steps: int) -> Undisturbed:
        return Undisturbed.of(tmp_path_factory.mktemp("undisturbed"), f"steps={steps}", "validation=null")

    return of


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[scenario.name.replace(" ", "-") for scenario in SCENARIOS])
def test_scenario(scenario: Scenario, keeper: ClusterKeeper, undisturbed, tmp_path: Path) -> None:
    run = ScenarioRun(keeper.ready(), scenario, tmp_path, f"scenario{NUMBERS[scenario.name]}")
    try:
        outcome = run.carry_out(undisturbed)
    except BaseException:
        keeper.close()
        raise
    if scenario.fresh_after:
        keeper.close()
    assert not outcome.wrong, "\n".join(outcome.wrong)
