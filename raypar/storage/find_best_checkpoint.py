"""Finds the best checkpoint of a run by a metric, from the run's record."""

from __future__ import annotations

import re
from collections.abc import Sequence

from raypar.errors import CheckpointError
from raypar.record.best_checkpoint_rules import BestRule, BestValues, parse_rules
from raypar.record.events import RunStart
from raypar.record.field_types import is_finite_number
from raypar.record.metric_names import short_name
from raypar.storage.read_run_lines import step_of
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
        raise _no_best_error(folder, rule)
    return found[0]


def _no_best_error(folder: RunFolder, rule: BestRule) -> CheckpointError:
    """Says why no checkpoint is the best one by a metric that the run keeps: no value, none that is finite, or none saved."""
    name = rule.metric
    values = {step_of(line): line[name] for line in folder.read_lines(folder.metrics) if name in line}
    finite = [step for step, value in values.items() if is_finite_number(value)]
    if not values:
        return CheckpointError(f"run {folder.name} has no value of {name} yet", cure="wait for a validation, or give a step")
    if not finite:
        counted = "the only value" if len(values) == 1 else f"all {len(values):,} values"
        return CheckpointError(
            f"run {folder.name} has no best checkpoint by {name}: {counted} of it so far "
            f"{'is' if len(values) == 1 else 'are'} NaN or infinite (the first at step {min(values):,})",
            cure="give a step; for the next run let the metric return a finite number (0/0 is NaN: where nothing was counted, "
            "divide by at least 1), or name another one in checkpoint.best",
        )
    return CheckpointError(
        f"run {folder.name} has no checkpoint with a value of {name}: of {len(finite):,} finite ones the last is that of step "
        f"{max(finite):,}, of which no checkpoint is left",
        cure=f"give a step; it has: {', '.join(folder.list_checkpoints()) or 'none'}",
    )


def best_steps(folder: RunFolder, rules: Sequence[BestRule], rule: BestRule) -> list[int]:
    """The numbers of steps of the best checkpoints that are there, best first."""
    values = BestValues(rules)
    for line in folder.read_lines(folder.metrics):
        values.add(step_of(line), line)
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
