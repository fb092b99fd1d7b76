"""Digests of the values that a job's functions hold, which neither their names nor their code tell: closures, attributes, data.

They stand in checkpoints beside the digests of the code (`user_code_digests.py`), and what has changed is said when a run is
resumed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from raypar.errors import ConfigError
from raypar.job import FunctionConfig, Job
from raypar.job.stable_callable_text import without_addresses
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS

T = TypeVar("T")

VALUES = "values of "
"""What the names of these digests begin with; the key of the job follows."""
WHOLE_BYTES, PIECES, PIECE_BYTES = 4 << 20, 64, 64 << 10
"""Of a larger tensor than this so many pieces count, evenly spread: it may be a mapped file of any size."""
ITEMS = 4096
"""Of a longer sequence or mapping so many items count, evenly spread, and its length: a list may be a whole data set. Of a
larger set only the length counts."""
MAX_DEPTH = 50
"""Values deeper inside each other do not count."""
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
"""Private attributes of an `nn.Module` that count."""


FUNCTIONS_OF_DATA = ("collate", "sampler", "weights", "group_by")
"""Keys of `data` that are functions."""


def value_digests_of_job(spec: Job) -> dict[str, str]:
    """`values of KEY` -> digest, of the job's functions with their arguments.

    Parameters of the model do not count: those of a checkpoint take their place. Nor do types of numbers, and whether a
    sequence is a tuple or a list.
    """
    found: dict[str, str] = {}
    parts = {key: getattr(spec, key) for key in ("model", "loss", "data", "optimizer", "lr_schedule")}
    for key, ref in {
        **parts,
        **{f"data.{name}": getattr(spec.data, name) for name in FUNCTIONS_OF_DATA},
        **_sources(spec),
    }.items():
        if ref is not None:
            found[VALUES + key] = _Values(with_tensors=key != "model").of([_function_of(ref), ref.args]).hex()
    return found


def _sources(spec: Job) -> dict[str, FunctionConfig]:
    """Key -> function, of the data sets that are mixed."""
    return {f"data.mix.{number}": source for number, source in enumerate(spec.data.mix)}


def _function_of(ref: FunctionConfig) -> Any:
    """The function itself, also where its name is given; None for a name that cannot be imported, which `preflight` refuses."""
    if ref.is_loss_of_model:
        return None
    try:
        return ref.resolve()
    except ConfigError:
        return None


class _Values:
    """Follows values to those inside them, each object once."""

    def __init__(self, *, with_tensors: bool) -> None:
        self._with_tensors = with_tensors
        self._found: dict[int, tuple[Any, bytes]] = {}
        """Id of an object -> (the object, its digest); of one that is being followed, what stands for itself inside it."""

    def of(self, value: Any, depth: int = 0) -> bytes:
        """The digest of a value."""
        if id(value) in self._found:
            return self._found[id(value)][1]
        self._found[id(value)] = value, b"itself"
        try:
            text = self._text(value, depth + 1) if depth < MAX_DEPTH else b"deeper"
        except USER_CODE_ERRORS as error:  # a `__repr__` or `__fspath__` of the user's
            reraise_ctrl_c(error)
            text = b"unreadable"
        digest = hashlib.sha256(text).digest()
        self._found[id(value)] = value, digest
        return digest

    def _text(self, value: Any, depth: int) -> bytes:
        if _is_tensor(value) or _is_array(value):
            return _tensor_text(value) if self._with_tensors else b"tensor"
        if isinstance(value, Real):
            return repr(float(value)).encode()
        if isinstance(value, (str, os.PathLike)):
            return os.fsencode(os.fspath(value))
        if value is None or isinstance(value, bytes):
            return repr(value).encode()
        if isinstance(value, Mapping):
            pairs = sorted(self.of(k, depth) + self.of(v, depth) for k, v in _some(value.items()))
            return b"mapping %d" % len(value) + b"".join(pairs)
        if isinstance(value, (list, tuple)):
            own = self._attributes(value, depth) if _is_plain_subclass(value) else b""
            return b"sequence %d" % len(value) + b"".join(self.of(part, depth) for part in _some(value)) + own
        if isinstance(value, (set, frozenset)):
            if len(value) > ITEMS:  # in no order that another process would have
                return b"set %d" % len(value)
            return b"set" + b"".join(sorted(self.of(part, depth) for part in value))
        if isinstance(value, functools.partial):
            return b"partial" + b"".join(self.of(part, depth) for part in (value.func, value.args, value.keywords))
        if isinstance(value, MethodType):
            return b"method" + self.of(value.__func__, depth) + self.of(value.__self__, depth)
        if isinstance(value, FunctionType):
            held = [
                *(cell.cell_contents if _is_assigned(cell) else None for cell in value.__closure__ or ()),
                *(value.__defaults__ or ()),
                *(value.__kwdefaults__ or {}).values(),
            ]
            return b"function" + b"".join(self.of(part, depth) for part in held)
        if isinstance(value, (type, ModuleType, BuiltinFunctionType)):
            return b"code"
        return self._attributes(value, depth)

    def _attributes(self, value: Any, depth: int) -> bytes:
        """Of an object: its class's name and its attributes; of Python's own classes their text, of packages' public ones."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}".encode()
        if kind.__module__.partition(".")[0] in sys.stdlib_module_names - {"__main__"}:
            return name + without_addresses(repr(value)).encode()
        is_module = hasattr(kind, "named_parameters") and hasattr(kind, "modules")
        theirs = is_module or _is_of_package(kind)
        held = _attributes_of(value)
        if held is None:
            return name + without_addresses(repr(value)).encode()
        left_out = {"training"} if is_module else set[str]()
        left_out |= {key for key in held if theirs and key[:1] == "_" and key not in _MODULE_PARTS}
        return name + b"".join(k.encode() + b"=" + self.of(v, depth) for k, v in sorted(held.items()) if k not in left_out)


def _some(items: Collection[T]) -> Iterable[T]:
    """The items, or `ITEMS` of them, evenly spread, the first and the last one too."""
    if len(items) <= ITEMS:
        return items
    if isinstance(items, Sequence):
        return [items[number * (len(items) - 1) // (ITEMS - 1)] for number in range(ITEMS)]
    return itertools.islice(items, 0, None, -(-len(items) // ITEMS))


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's own attributes; None if its class keeps none in Python."""
    slots = [name for kind in type(value).__mro__ for name in _as_names(vars(kind).get("__slots__", ()))]
    if not slots and not hasattr(value, "__dict__"):
        return None
    own = {name: getattr(value, name) for name in slots if hasattr(value, name) and name != "__dict__"}
    return own | getattr(value, "__dict__", {})


def _as_names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _is_assigned(cell: CellType) -> bool:
    """Whether a variable of a closure has a value yet."""
    try:
        return bool(cell.cell_contents is not cell)
    except ValueError:
        return False


def _is_plain_subclass(value: list[T] | tuple[T, ...]) -> bool:
    """Whether a list or tuple is one of a class of its own with attributes."""
    return type(value) not in (list, tuple) and bool(getattr(value, "__dict__", None))


def _is_of_package(kind: type) -> bool:
    """Whether a class comes from an installed package, or from raypar, which may be a clone."""
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", None))
    return "site-packages" in file or "dist-packages" in file or kind.__module__.startswith("raypar.")


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _tensor_text(value: Any) -> bytes:
    """Shape, dtype and values of a tensor or array; of a large one pieces of its bytes, of one without plain values none."""
    import torch

    head = f"{value.dtype} {list(value.shape)} ".encode()
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            return head
        if not value.is_contiguous() and value.numel() * value.element_size() > WHOLE_BYTES:
            return head
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif value.dtype.hasobject:
        return head + repr(value.tolist()).encode()
    elif not value.flags.c_contiguous and value.nbytes > WHOLE_BYTES:
        return head
    else:
        import numpy

        data = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8).data
    digest = hashlib.sha256()
    if len(data) <= WHOLE_BYTES:
        digest.update(data)
    else:
        for piece in range(PIECES):
            at = piece * (len(data) - PIECE_BYTES) // (PIECES - 1)
            digest.update(data[at : at + PIECE_BYTES])
    return head + digest.digest()
