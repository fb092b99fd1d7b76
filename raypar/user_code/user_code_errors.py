"""How raypar calls user code: where the code is imported from, which exceptions are caught, and the cures for known ones.

`SystemExit` (`sys.exit()` in a data set) and `KeyboardInterrupt` are not subclasses of `Exception`. Uncaught, `SystemExit` ends
a worker without a message, and `KeyboardInterrupt` looks like a Ctrl-C. Calls of user code therefore catch
`USER_CODE_ERRORS` instead of `Exception`.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from pathlib import Path

from raypar.errors import error_message

USER_CODE_ERRORS = (Exception, SystemExit, KeyboardInterrupt)
"""For `except` around a call of user code; call `reraise_ctrl_c(error)` first in the handler."""


def error_text(error: BaseException) -> str:
    """`ValueError: no such file`; for `SystemExit` and `KeyboardInterrupt` also what they mean."""
    if isinstance(error, SystemExit):
        return f"SystemExit: {error.code} (sys.exit or exit was called: that would have ended the process)"
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt (raised by the code itself: nobody has pressed Ctrl-C)"
    near = _attribute_meant(error) if isinstance(error, AttributeError) else None
    return f"{type(error).__name__}: {error_message(error)}" + (f" (did you mean {near!r}?)" if near else "")


def _attribute_meant(error: AttributeError) -> str | None:
    """The attribute that is spelt most like the one asked for, as Python's own traceback suggests it; None: none is."""
    try:
        there = [name for name in dir(error.obj) if not name.startswith("_")]
        return next(iter(difflib.get_close_matches(str(error.name), there, 1, 0.75)), None)
    except Exception:  # the object is the user's, and old exceptions have neither name nor object
        return None


def is_chain_of_users(error: BaseException) -> bool:
    """Whether the error before this one is for people to read: raised `from` it, or not inside PyTorch alone, which tries an
    operation in several ways."""
    before = error.__context__
    if error.__cause__ is not None or before is None:
        return True
    own = f"{Path(__file__).parents[1]}{os.sep}"
    frames = [frame.filename for frame in traceback.extract_tb(before.__traceback__)]
    return any("/torch/" not in name and not name.startswith(own) for name in frames)


_DEVICE_ERRORS = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available", "on the same device")
"""What PyTorch says where code asks for a GPU itself."""


_DTYPE_ERROR = re.compile(
    r"have the same dtype|expected (scalar type|target dtype)|type \(.*\) and .*type \(.*\) should be the same"
    r"|to have one of the following scalar types"
)
"""What PyTorch says where dtypes differ."""
_DISTRIBUTED = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}torch{os.sep}nn{os.sep}parallel{os.sep}")
"""Folders of PyTorch's code that wants a process group."""


def cure_for_known_error(error: BaseException, model: object = None) -> str | None:
    """What to do about an error that PyTorch raises in many users' code; None for others. `model`: whose forward raised it."""
    text = error_message(error)
    if any(part in text for part in _DEVICE_ERRORS):
        return (
            "leave .cuda() and .to(device) out: raypar puts model and batches where workers compute (device: gpu gives each a "
            "GPU); a tensor that forward makes itself gets device=x.device"
        )
    frames = traceback.extract_tb(error.__traceback__)
    if frames and any(part in frames[-1].filename for part in _DISTRIBUTED):
        return (
            "leave process groups and what is wrapped around a model (DistributedDataParallel, FSDP) out: raypar connects the "
            "workers itself; for data parallelism set plan.replicas"
        )
    if _DTYPE_ERROR.search(text):
        return (
            "cast the fields of the samples in the data set's __getitem__ to the dtype that the code takes: "
            "torch.as_tensor(value, dtype=torch.float32), or torch.int64 for ids and labels of classes; or set dtype in the job"
        )
    if "does not have a deterministic implementation" in text:
        return (
            "compute this without that operation (the documentation of torch.use_deterministic_algorithms lists those without "
            "a deterministic kernel on a GPU); or set device: cpu, or reduction: fast, whose results are not the same each time"
        )
    if isinstance(error, NotImplementedError) and 'the required "forward"' in text:
        if hasattr(model, "training_step"):  # Lightning's, which raypar does not call
            return "give the network inside of it as the model, and as loss a function of the network's output and the target"
        return "define forward in that class, or call what it holds (an nn.ModuleList has no forward of its own)"
    if isinstance(error, ValueError) and text.startswith("Expected more than 1 value per channel"):
        return (
            "a norm's statistics are those of one microbatch: give every microbatch two samples at least (batch_size >= 2 x "
            "microbatches), or use GroupNorm or LayerNorm, whose statistics are those of one sample"
        )
    return None


def make_importable(folder: Path) -> None:
    """Put `folder` first on the import path: a job file's functions are imported from it. Workers inherit the path."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
