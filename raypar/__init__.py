"""raypar: train PyTorch models on a Ray cluster that grows, shrinks and fails, with the results of one process, bit for bit."""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` takes longer to import than all else here, and Ctrl-C meanwhile ends in Python's traceback
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "Trainer": "raypar.trainer",
    "load": "raypar.launch.load_model",
    "Result": "raypar.launch.result",
    "Callback": "raypar.callbacks",
    "EarlyStopping": "raypar.callbacks",
    "Stop": "raypar.callbacks",
    "StepInfo": "raypar.callbacks",
    "ValidationInfo": "raypar.callbacks",
    "Job": "raypar.job",
    "ParallelPlan": "raypar.plan",
    "StagePlan": "raypar.plan",
    "Graph": "raypar.model.graph",
    "Layer": "raypar.model.graph",
    "RayparError": "raypar.errors",
}
_MODULES = {"callbacks", "errors"}
"""What `import raypar` alone gives too: raypar.callbacks.Callback."""
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Public names are imported when they are asked for, so that `import raypar` needs neither torch nor ray."""
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"raypar.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'raypar' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
