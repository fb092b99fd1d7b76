"""A backend of `einops` for `ShardedValue`: `einops` chooses its backend by the class of the tensor."""

from __future__ import annotations

import sys
from functools import cache

from raypar.model.tensor_parallel.sharded_value import ShardedValue


def let_einops_take_parts() -> None:
    """Idempotent; nothing happens while nobody has imported `einops`."""
    if "einops" in sys.modules:
        _add_backend()


@cache
def _add_backend() -> type:
    from einops._backends import TorchBackend  # type: ignore[import-not-found, import-untyped, unused-ignore]

    class PartsBackend(TorchBackend):  # type: ignore[misc, unused-ignore]
        """The backend of PyTorch: its operations are those that values in parts have. `einops` finds it as a subclass."""

        framework_name = __name__

        def is_appropriate_type(self, tensor: object) -> bool:
            """Whether it is a value in parts."""
            return isinstance(tensor, ShardedValue)

    return PartsBackend
