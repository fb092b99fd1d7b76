"""Ray Train's `RunConfig` and `CheckpointConfig`, as `Trainer` takes them: which of their fields say something to raypar."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from raypar.errors import ConfigError

UNUSED_FIELDS = {
    "storage_filesystem": "give storage_path, the path of a folder (on a cluster, of storage that all nodes have mounted)",
    "callbacks": "give callbacks=[...] to Trainer, objects of classes derived from raypar.callbacks.Callback",
    "worker_runtime_env": "give it to ray.init(runtime_env=...)",
    "failure_config": "give elastic=True to Trainer: workers that are lost are then replaced; `raypar resume` after a failure",
    "stop": "give steps= or stop_at_step= to Trainer, or a callback that returns raypar.callbacks.Stop",
    "verbose": "give it to fit(verbose=...)",
    "checkpoint_score_attribute": "leave it out: the newest checkpoints are kept, num_to_keep of them",
    "checkpoint_score_order": "leave it out: the newest checkpoints are kept, num_to_keep of them",
    "checkpoint_at_end": "leave it out: there always is one at the end",
}
"""Fields of Ray Train's configs that raypar does not use -> what to give instead."""
USED_FIELDS = ("name", "storage_path", "checkpoint_config", "num_to_keep", "checkpoint_frequency")


def arguments_from_ray_train(given: dict[str, Any]) -> dict[str, Any]:
    """`Trainer`'s arguments by name, with name, run_dir, keep and checkpoint_every as the two configs among them say.

    Raises `ConfigError` for a config with a field that raypar does not use.
    """
    found = {**given}
    run_config = found.pop("run_config")
    checkpoint_config = found.pop("checkpoint_config")
    if run_config is not None:
        found["name"] = found["name"] or run_config.name  # in this order: without a name, RunConfig makes one up
        found["run_dir"] = run_config.storage_path or found["run_dir"]
        checkpoint_config = checkpoint_config or run_config.checkpoint_config
        refuse_unused_fields(run_config, "run_config")
    if checkpoint_config is not None:
        refuse_unused_fields(checkpoint_config, "checkpoint_config")
        found["keep"] = checkpoint_config.num_to_keep or found["keep"]
        frequency = getattr(checkpoint_config, "checkpoint_frequency", None)
        if isinstance(frequency, int) and frequency:
            found["checkpoint_every"] = frequency
    return found


def refuse_unused_fields(config: Any, what: str) -> None:
    """Raise `ConfigError` if a config of Ray Train sets a field that has no effect here: one that is not as by default."""
    default = type(config)()
    for field in fields(config):
        value = getattr(config, field.name)
        same = value == getattr(default, field.name) or (field.name == "checkpoint_at_end" and value is True)
        if field.name not in USED_FIELDS and not same:
            raise ConfigError(
                f"{what} has {field.name}, which raypar does not use", cure=UNUSED_FIELDS.get(field.name, "leave it out")
            )
