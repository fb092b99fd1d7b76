"""Generates a text with a trained model, to be shown at the end of its run."""

from __future__ import annotations

import inspect

from raypar.job import Job
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text, reraise_ctrl_c


def generate_text_with_checkpoint(spec: Job, checkpoint: str) -> str | None:
    """The text that the model's module generates with the weights of a checkpoint (its location).

    None if the module has no function for it.

    The function is `generate(model, ...)`, defined beside the model's function. It gets those of `model.args` for which it
    has parameters. If it raises, the run does not fail: the text then says what was raised.
    """
    from torch import nn

    from raypar.worker.checkpoint.checkpoint_files import CheckpointTensors
    from raypar.worker.job_preflight import find_sibling_function

    generate = find_sibling_function(spec.model, "generate")
    if generate is None:
        return None
    try:
        model = spec.model.call()
        if not isinstance(model, nn.Module):
            return None
        model.load_state_dict(dict(CheckpointTensors(checkpoint)), strict=False)
        taken = inspect.signature(generate).parameters
        return str(generate(model, **{key: value for key, value in spec.model.args.items() if key in taken}))
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        return f"({spec.model.label} has a generate function beside it, but it raised {error_text(error)})"
