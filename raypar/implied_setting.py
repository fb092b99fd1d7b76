"""A value for a key of a job that something else than the key itself says: an older argument, or a config of Ray Train's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from raypar.errors import ConfigError


class ImpliedSetting(NamedTuple):
    """A value for a key of a job that something else than the key itself says."""

    key: str
    """The key, such as `checkpoint.keep`."""
    value: Any
    """The value."""
    said_by: str
    """What says it, for messages: `run_config.checkpoint_config.num_to_keep`."""

    yields: bool = False
    """Whether the key's own value counts where there is one."""

    def put_into(self, tree: dict[str, Any]) -> None:
        """Set the key in a job's tree. Raises `ConfigError` if the tree says something else already."""
        section, _, inner = self.key.rpartition(".")
        here = tree
        if section:
            inside = tree.get(section)
            if inside is None or inside is True:
                inside = {}
            elif hasattr(inside, "model_fields_set"):  # a section that is made already
                inside = {name: getattr(inside, name) for name in inside.model_fields_set}
            elif not isinstance(inside, Mapping):
                if inside is False:
                    raise ConfigError(f"{section} is False, and {self.said_by} is {self.value!r}", cure="give one of them")
                return  # of a wrong type: the job's checks say so
            tree[section] = here = dict(inside)
        there = here.get(inner)
        if there is not None and (self.yields or (self.value is True and there is not False)):  # True: whatever it says
            return
        if there is not None and there != self.value:
            raise ConfigError(
                f"{self.key} is {there!r}, and {self.said_by} is {self.value!r}", cure="give one of them, or both alike"
            )
        here[inner] = self.value
