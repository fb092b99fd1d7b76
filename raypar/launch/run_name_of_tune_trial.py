"""The trial of Ray Tune in which a run is, if any: its name is the run's."""

from __future__ import annotations

import os
import sys
import warnings

from raypar.errors import ConfigError


def current_trial_id() -> str | None:
    """The id of the Ray Tune trial that this process works for; None outside of trials."""
    tune = sys.modules.get("ray.tune")
    if tune is None:
        return None
    with warnings.catch_warnings():  # outside of a trial Ray warns, and returns None
        warnings.simplefilter("ignore")
        found: str | None = tune.get_context().get_trial_id()
    return found


def name_of_run_in_trial(name: str, default: str, trial: str | None) -> str:
    """The name of a run in this trial: `name`, or one of its own if that is the default, which other trials have too."""
    return name if trial is None or name != default else f"{default}_{trial}"


def check_run_dir_in_trial(run_dir: str | os.PathLike[str], trial: str | None) -> None:
    """Raise `ConfigError` if checkpoints would go to the temporary folder that Ray Tune makes a trial's working folder."""
    text = os.fspath(run_dir)
    if trial is not None and "://" not in text and not os.path.isabs(text):
        raise ConfigError(
            f"run_dir {text!r} is relative, and this is trial {trial} of Ray Tune, whose folder {os.getcwd()} is temporary",
            cure="give run_dir an absolute path, or a URI of shared storage",
        )
