"""A stage's place in the plan, for messages, and errors of users' code that name the place."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from raypar.errors import RayparError, UserCodeError, error_message
from raypar.plan.microbatches import Microbatches
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import cure_for_known_error, error_text
from raypar.worker.layer_precisions import AUTOCAST_PRECISIONS


@dataclass(frozen=True)
class SamplesOfPasses:
    """Which samples a microbatch of a run of forward passes has."""

    whole: Microbatches
    """How all samples are cut."""

    def describe(self, microbatch: int) -> str:
        """Text such as `microbatch 2 (samples 8 to 11)`. The last pass repeats the last microbatch."""
        number = min(microbatch, self.whole.count - 1)
        samples = self.whole.samples(number)
        return f"microbatch {number} (samples {samples.start} to {samples.stop - 1})"


@dataclass
class StageCoordinate:
    """The place of one worker's stage in the plan."""

    stage: int
    """Index of the stage."""
    replica: int
    """Which replica of the stage this is."""
    shard: int | None
    """Which shard of the replica this is; None if the stage is not cut over shards."""
    first_layer: str
    """Name of the stage's first layer."""
    is_virtual: bool = False
    """Whether `shard` is a virtual one, of which workers compute several."""
    samples_of: SamplesOfPasses | None = None
    """Of a run of forward passes, which has no steps."""
    is_profiling: bool = False
    """Whether the planner is timing single layers, before the job has a plan or a step."""

    def describe(self, step: int, microbatch: int, data_set: str = "") -> str:
        """Text such as `at stage 1, replica 0, step 3, microbatch 2`. `step` counts from 0, the text from 1. `data_set`: the
        name of the validation set, of several."""
        if self.is_profiling:
            return f"in layer {self.first_layer!r}, with the first microbatch, before the run"
        shard = "" if self.shard is None else f", {'virtual ' * self.is_virtual}shard {self.shard}"
        place = f"at stage {self.stage}, replica {self.replica}{shard}"
        if self.samples_of is not None:
            return f"{place}, {self.samples_of.describe(microbatch)}"
        return f"{place}, step {step + 1}, microbatch {microbatch}" + (f" of validation set {data_set}" * bool(data_set))

    def user_code_error(self, code: str, step: int, microbatch: int, error: BaseException, data_set: str = "") -> RayparError:
        """The error to raise for `error`, which users' code (`code` names it) has raised; call it in the `except` block.

        An error that raypar itself raised inside that code is returned as it is. Raises `KeyboardInterrupt` for a real Ctrl-C.
        """
        reraise_ctrl_c(error)
        if isinstance(error, RayparError):
            return error
        return UserCodeError(
            f"{code} raised {error_text(error)}\n  {self.describe(step, microbatch, data_set)}\n{traceback.format_exc()}",
            cure=_cure_for_autocast(error)
            or _cure_for_hooks(error)
            or cure_for_known_error(error)
            or (
                "this is an error of the user's code"
                + "; `raypar debug JOB` runs the same plan in one process under pdb" * (self.samples_of is None)
            ),
        )


def refuses_saved_tensor_hooks(error: BaseException | None) -> bool:
    """Whether PyTorch has raised this because of hooks on saved tensors, which `torch.func.grad` and its like refuse."""
    return isinstance(error, RuntimeError) and "saved tensor hooks" in str(error)


def _cure_for_hooks(error: BaseException) -> str | None:
    """What to do about code that refuses hooks on saved tensors, by which layers are recomputed and offloaded; None for other
    errors."""
    if not refuses_saved_tensor_hooks(error):
        return None
    return (
        "leave the layer out of plan.recompute and plan.offload, and enter no saved_tensors_hooks of your own around torch.func"
    )


def _cure_for_autocast(error: BaseException) -> str | None:
    """What to do about an operation that does not compute in the dtype that autocast has chosen; None for other errors."""
    text = error_message(error)
    if "unsafe to autocast" in text:
        return (
            "leave the sigmoid out and use F.binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss), "
            "which autocast computes in float32"
        )
    for autocast in AUTOCAST_PRECISIONS.values():
        if autocast.says_kernel_is_missing(text):
            return (
                "let the operation compute in float32, on x.float() inside "
                f"`with torch.autocast(x.device.type, enabled=False):` ({autocast.dtype_name} comes from precision.compute "
                "of the job, or from an autocast of your own); where a value meets parameters in it (precision.parameters), "
                "cast it to their dtype: x.to(self.weight.dtype)"
            )
    return None
