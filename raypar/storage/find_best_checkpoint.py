"""Finds the best checkpoint of a run by a metric, from the run's record."""

from __future__ import annotations

import re
from collections.abc import Sequence

from raypar.errors import CheckpointError
from raypar.record.best_checkpoint_rules import BestRule, BestValues, parse_rules
from raypar.record.events import RunStart
from raypar.record.metric_names import short_name
from raypar.storage.run_folder import RunFolder


def find_best_step(folder: RunFolder, metric: str = "") -> int:
    """The number of steps of the run's best checkpoint, of those that are there, by one of the metrics of its
    `checkpoint.best`: the first one, or `metric`, whose `validation_` or `validation/` may be left out.

    Raises `CheckpointError` if the run keeps none by that metric, or there is none yet.
    """
    rules = rules_of_run(folder)
    rule = next((one for one in rules if metric in ("", one.metric, short_name(one.metric))), None)
    if rule is None:
        named = f"its best checkpoint by {metric!r}" if metric else "a best checkpoint"
        kept = (
            f"it keeps those by {', '.join(one.metric for one in rules)}" if rules else "set checkpoint.best for the next run"
        )
        raise CheckpointError(f"run {folder.name} does not keep {named}", cure=f"{kept}; or give a step")
    found = best_steps(folder, rules, rule)
    if not found:
        raise CheckpointError(
            f"run {folder.name} has no checkpoint with a value of {rule.metric}", cure="wait for a validation, or give a step"
        )
    return found[0]


def best_steps(folder: RunFolder, rules: Sequence[BestRule], rule: BestRule) -> list[int]:
    """The numbers of steps of the best checkpoints that are there, best first."""
    values = BestValues(rules)
    for line in folder.read_lines(folder.metrics):
        values.add(line["step"], line)
    there = (re.fullmatch(r"step_([0-9]+)", name) for name in folder.list_checkpoints())
    return values.best_of(rule, [int(found[1]) for found in there if found is not None])


def rules_of_run(folder: RunFolder) -> list[BestRule]:
    """By which metrics the last start of a run keeps checkpoints."""
    starts = [event for event in folder.read_timeline() if isinstance(event, RunStart)]
    return parse_rules(starts[-1].best or ()) if starts else []


def find_best_step_of_run(run: str, run_dir: str, metric: str) -> int:
    """As `find_best_step`, of a run by its name under `run_dir`, path or URI. Raises `ConfigError` if there is no such run."""
    with RunFolder.open_for_reading(run, run_dir, with_job=False) as folder:
        return find_best_step(folder, metric)
