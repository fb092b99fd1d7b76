"""Values for keys of a job that come from elsewhere: from a deprecated argument of `Trainer`, or from a config of Ray Train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from raypar.errors import ConfigError
from raypar.files.untrusted_files import repr_text


class ImpliedSetting(NamedTuple):
    """A value for a key of a job, given by something else than the key itself."""

    key: str
    """The key, such as `checkpoint.keep`."""
    value: Any
    """The value."""
    source: str
    """Name of what gives the value, for messages: `run_config.checkpoint_config.num_to_keep`."""

    overridable: bool = False
    """Whether a value that the key has already wins silently. Else a different value is an error."""

    def apply_to(self, tree: dict[str, Any]) -> None:
        """Set the key in a job's tree. Raises `ConfigError` if the key has a different value already."""
        section, _, inner = self.key.rpartition(".")
        here = tree
        if section:
            inside = tree.get(section)
            if inside is None or inside is True:
                inside = {}
            elif hasattr(inside, "model_fields_set"):  # a section object, such as `CheckpointConfig(...)`
                inside = {name: getattr(inside, name) for name in inside.model_fields_set}
            elif not isinstance(inside, Mapping):
                if inside is False:
                    raise ConfigError(
                        f"{section} is False, and {self.source} is {repr_text(self.value)}", cure="give one of them"
                    )
                return  # a wrong type, which the job's own checks report
            tree[section] = here = dict(inside)
        there = here.get(inner)
        if there is not None and (
            self.overridable or (self.value is True and there is not False)
        ):  # `elastic: true` agrees with any settings of it
            return
        if there is not None and there != self.value:
            raise ConfigError(
                f"{self.key} is {repr_text(there)}, and {self.source} is {repr_text(self.value)}",
                cure="give one of them, or both alike",
            )
        here[inner] = self.value
