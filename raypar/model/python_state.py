"""Reads the state that Python code keeps outside of parameters and buffers, compares two readings, and restores one.

The code is a model's or an optimizer's. Its state is in attributes of modules and of objects in them, in their classes, in
variables of functions (closures, default arguments, attributes), in global variables that their code names, and in generators
and iterators held by any of these. Caches of `functools`, files, what pointers lead to and what is in extensions are not seen.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import ctypes
import datetime
import functools
import hashlib
import io
import itertools
import numbers
import os
import pathlib
import pickle
import queue
import random
import sys
import threading
import types
import uuid
import warnings
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy
import torch
from torch import Tensor, nn

from raypar.model.graph import join_names
from raypar.torch_compat.modules import HOOKS_OF_MODULES
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS

T = TypeVar("T")
R = TypeVar("R")

MOST_BYTES = 64 << 20
"""Most bytes of tensors and arrays that one reading copies, so that they can be put back."""
_MOST_SUMMED_BYTES = 256 << 20
"""Most bytes beyond these that are compared by a checksum, and not put back."""
_MOST_OBJECTS = 50_000
"""How many objects are looked into in one reading."""
_MOST_VALUES = 500_000
"""How many elements of containers are looked at in one reading, which takes a second at most."""
_MOST_FUNCTIONS = 10_000
"""How many functions are looked into for the global variables that they name."""
_MOST_ELEMENTS = 100
"""How many elements of a container are looked at for functions."""
_DEPTH = 100
"""How many values inside each other are looked into."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_EXACT = frozenset((int, str, bytes, type(None), torch.dtype, torch.device))
"""Types of values that stand for themselves."""
_BY_TEXT = frozenset((bool, float, complex))
"""Types of values for which their texts stand: 1, 1.0 and True are not the same, nor are 0.0 and -0.0."""
_OTHERS = frozenset(("torch", "numpy", "raypar", "builtins", "tqdm")) | frozenset(sys.stdlib_module_names)
"""Names of packages whose functions and classes are not looked into. A thread of `tqdm` notes the time for its bars."""
_OF_MODULES = frozenset(vars(nn.Module())) - frozenset(HOOKS_OF_MODULES) - {"training"}
"""Attributes that every `nn.Module` has: not state of users' code. Those for hooks, and the mode, are not among them."""
_REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module with what is registered there, by name."""
_CALLED = ("forward", "__call__", "backward", "setup_context")
"""Methods that PyTorch calls, of modules and of `torch.autograd.Function`."""
_ITERATORS = (
    *(each for each in vars(itertools).values() if isinstance(each, type)),
    *(map, zip, enumerate, filter, reversed),
    *(type(iter(each())) for each in (list, tuple, dict, str, set)),
    type(iter(range(0))),
)
_VALUES = (
    numbers.Number, datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath, uuid.UUID, range, slice,
)  # fmt: skip
"""Classes of Python's library whose objects never change, and are equal if their texts are."""
_CONTAINERS = (dict, list, collections.deque, set, tuple, frozenset)
_C_VALUES = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)
_CACHED_FUNCTION = functools._lru_cache_wrapper
_PARTIAL = (functools.partial, functools.partialmethod)
_METHODS = (types.FunctionType, property, staticmethod, classmethod, functools.partialmethod, functools.cached_property)
_NO_STATE = (staticmethod, classmethod, property, type, types.FunctionType, types.ModuleType, _CACHED_FUNCTION)
"""Types of class attributes and global variables that are looked at elsewhere, or hold no state."""
_LOOKED_INTO = (
    collections.UserDict, collections.UserList, collections.ChainMap, types.SimpleNamespace, argparse.Namespace,
    threading.local, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, queue.Queue,
    torch.quasirandom.SobolEngine,
)  # fmt: skip
"""Classes of Python's library, and PyTorch's, whose objects are looked into."""


Content: TypeAlias = "Hashable | type | list[Content] | dict[Hashable, Content] | set[Hashable] | tuple[Content, ...]"
"""What has been read of a value: plain values, classes, checksums and texts, in containers as the value has them."""

_Holder = dict[str, Any] | type
"""What has a place: the attributes of a module, a namespace, a class."""


@dataclass
class StateReading:
    """What all places held at one moment."""

    values: dict[str, Content] = field(default_factory=dict)
    """Place -> what it held, in a form that can be compared."""
    restores: dict[str, list[Callable[[], Any]]] = field(default_factory=dict)
    """Place -> what puts the content of each object back that was first reached by it."""

    def changed(self, other: StateReading) -> list[str]:
        """The places that hold something else in `other`."""
        labels = dict.fromkeys((*self.values, *other.values))
        known: dict[tuple[int, int], bool] = {}
        both = ((label, self.values.get(label, _NOTHING), other.values.get(label, _NOTHING)) for label in labels)
        return [label for label, one, two in both if not _are_equal(one, two, known)]


_NOTHING = ("nothing",)


def _are_equal(one: Any, other: Any, known: dict[tuple[int, int], bool]) -> bool:
    """Whether two values that have been read are equal. Each pair of containers is compared once: `==` compares one again on
    every way that leads to it, and values that share others have ways without number.

    `known`: `id` of two containers -> whether they are equal; is added to. They must live as long as it does.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if not isinstance(one, (dict, list, tuple)):
        return bool(one == other)
    pair = id(one), id(other)
    if pair not in known:
        known[pair] = False  # until all is compared; nothing that has been read is inside itself
        if len(one) != len(other) or (isinstance(one, dict) and one.keys() != other.keys()):
            return False
        pairs = ((one[key], other[key]) for key in one) if isinstance(one, dict) else zip(one, other, strict=True)
        for mine, theirs in pairs:
            if not _are_equal(mine, theirs, known):
                return False
        known[pair] = True
    return known[pair]


class PythonState:
    """The places of some code that may hold state, by a text that names each: `attribute 'calls' of blocks.1 (Block)`."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        *,
        code: Iterable[Any] = (),
        called: Iterable[str] = _CALLED,
        known: Mapping[int, Content] | None = None,
    ) -> None:
        """`modules`: by qualified name; the modules inside of them are looked at too. `code`: more classes and functions.

        `called`: names of the methods with which the code begins. `known`: `id` of objects that are not read -> what stands
        for them.
        """
        self._modules: dict[int, tuple[str, nn.Module]] = {}
        """`id` of every module -> (qualified name, module)."""
        for name, module in modules.items():
            for path, part in module.named_modules():
                self._modules.setdefault(id(part), (join_names(name, path), part))
        self._registered = {
            key: {each: frozenset(names) for each in _REGISTRIES if isinstance(names := vars(module).get(each), dict)}
            for key, (_, module) in self._modules.items()
        }
        """`id` of a module -> registry -> names in it (a module of torch.jit has other registries); later ones are state."""
        self._known = {**(known or {}), **_of_modules(self._modules)}
        """`id` of what is not read -> what stands for it: registered modules, parameters, buffers."""
        self.unread: str | None = None
        """The first place that was not read, or put back, whole, and why (`... holds more than is looked through`); or None."""
        self._code = _Code(called)
        """The functions, classes and global variables that the modules' code names."""
        for each in code:
            self._code.add(each)
        for _, part in self._modules.values():
            self._code.add(type(part))
            for value in vars(part).values():
                self._code.add(value)

    def read(self) -> StateReading:
        """What all places hold now."""
        reading, reader = StateReading(), _Reader(self._known)
        for label, holder, key in self._places():
            reader.restores, reader.unread = [], None
            reading.values[label] = reader.read(_get(holder, key))
            reader.restores.append(functools.partial(_set, holder, key, _get(holder, key)))
            reading.restores[label] = reader.restores
            if reader.unread is not None:
                self.unread = self.unread or f"{label} {reader.unread}"
        return reading

    def put_back(self, reading: StateReading, only: str | None = None) -> None:
        """Restore what all places, or one of them, held at the reading; not iterators, nor what refuses to be written."""
        undo: list[tuple[str, Callable[[], Any]]] = [
            (label, functools.partial(_delete, holder, key))
            for label, holder, key in self._places()
            if label not in reading.restores
        ]
        undo += [(label, restore) for label, restores in reading.restores.items() for restore in restores]
        with torch.no_grad():
            for label, action in undo:
                if only in (None, label):
                    try:
                        action()
                    except USER_CODE_ERRORS as error:
                        reraise_ctrl_c(error)
                        self.unread = self.unread or f"{label} raises {type(error).__name__} when it is put back"

    def _places(self) -> Iterator[tuple[str, _Holder, str]]:
        """(what it is, holder, key) of every place."""
        for name, module in self._modules.values():
            held = [(vars(module), key) for key in vars(module) if key not in _OF_MODULES]
            for registry, known in self._registered[id(module)].items():
                held += [(vars(module)[registry], key) for key in vars(module)[registry] if key not in known]
            for holder, key in held:
                yield f"attribute {key!r} of {name or 'the model'} ({type(module).__name__})", holder, key
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for path, tensor in tensors.items():
                    for key in vars(tensor) if tensor is not None else ():
                        yield f"attribute {key!r} of the {kind} {join_names(name, path)}", vars(tensor), key
        yield from self._code.places()
        yield "an environment variable", vars(os.environ), "_data"


class _Code:
    """The functions and classes that a model's forward may come to, and the global variables that they name.

    It is found by names: from `forward` on, a method of a known class counts if code that counts names it.
    """

    def __init__(self, called: Iterable[str]) -> None:
        self._globals: dict[tuple[int, str], dict[str, Any]] = {}
        """(`id` of a namespace, name in it) -> the namespace."""
        self._classes: dict[int, type] = {}
        """Classes by `id`."""
        self._functions: dict[int, types.FunctionType] = {}
        """Functions by `id`."""
        self._names = set(called)
        """Names of methods that may be called."""
        self._unnamed: dict[str, list[Any]] = collections.defaultdict(list)
        """Name -> methods of known classes that nothing has named yet."""
        self._seen: dict[int, Any] = {}
        """What has been looked at, by `id`."""

    def places(self) -> Iterator[tuple[str, _Holder, str]]:
        """(what it is, holder, key) of class attributes, global variables and variables of functions."""
        names = collections.Counter[str]()

        def numbered(label: str) -> str:
            names[label] += 1
            return label if names[label] == 1 else f"{label} ({names[label]})"

        for kind in self._classes.values():
            for key, value in list(vars(kind).items()):
                if key in self._names and not isinstance(value, _NO_STATE):
                    yield numbered(f"class attribute {key!r} of {kind.__module__}.{kind.__qualname__}"), kind, key
        for (_, key), namespace in self._globals.items():
            if key in namespace and not isinstance(namespace[key], _NO_STATE):
                yield numbered(f"global variable {key!r} of {namespace.get('__name__', '?')}"), namespace, key
        for function in self._functions.values():
            if function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function):
                yield numbered(f"a variable of function {function.__qualname__}"), {"": function}, ""

    def add(self, value: Any) -> None:
        """Look for functions and classes in a value, and for the global variables that they name."""
        pending = [value]
        while pending:
            each = pending.pop()
            if type(each) not in _EXACT and id(each) not in self._seen:
                self._seen[id(each)] = each
                try:
                    pending += self._parts(each)
                except USER_CODE_ERRORS as error:  # its class answers wrongly, or not at all; the reader says so
                    reraise_ctrl_c(error)

    def _parts(self, value: Any) -> list[Any]:
        """The values in or behind a value that may be code, or have some."""
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            return [value.__func__]
        if isinstance(value, property):
            return [value.fget, value.fset, value.fdel]
        if isinstance(value, functools.cached_property):
            return [value.func]
        if isinstance(value, _PARTIAL):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, (list, tuple)):
            return list(value[:_MOST_ELEMENTS])
        if isinstance(value, dict):
            return list(itertools.islice(dict.values(value), _MOST_ELEMENTS))
        if isinstance(value, types.MappingProxyType):  # the functions of a `functools.singledispatch`
            return list(itertools.islice(value.values(), _MOST_ELEMENTS))
        if isinstance(value, types.FunctionType):
            return self._parts_of_function(value)
        if isinstance(value, _CACHED_FUNCTION):
            return [value.__wrapped__]
        return self._methods(value if isinstance(value, type) else type(value))

    def _methods(self, kind: type) -> list[Any]:
        """The methods of a class that may be called; others are kept until something names them."""
        found: list[Any] = []
        for each in kind.__mro__:
            if id(each) not in self._classes and _is_users(each):
                self._classes[id(each)] = each
                for name, value in list(vars(each).items()):
                    is_called = name in self._names or _is_called_by_python(name, each)
                    if isinstance(value, _METHODS) or not (name.startswith("__") and name.endswith("__")):
                        (found if is_called else self._unnamed[name]).append(value)
        return found

    def _parts_of_function(self, function: types.FunctionType) -> list[Any]:
        """What a function holds, and what it names: methods and global variables."""
        if not _is_users(function) or len(self._functions) >= _MOST_FUNCTIONS:
            return []
        self._functions[id(function)] = function
        found = [*map(_content_of, function.__closure__ or ()), *vars(function).values()]
        names = set(_names_in(function.__code__))
        self._names |= names
        for name in names & self._unnamed.keys():
            found += self._unnamed.pop(name)
        modules = list(_imported_by(function, names))
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                modules.append(value)
            else:
                self._globals[id(function.__globals__), name] = function.__globals__
                found.append(value)
        for module in filter(_is_users, modules):
            for attribute in names & vars(module).keys():
                self._globals[id(vars(module)), attribute] = vars(module)
                found.append(vars(module)[attribute])
        return found


class _Reader:
    """Reads values into a form that can be compared, each object once, and keeps what puts the content of objects back."""

    def __init__(self, known: Mapping[int, Content], most_bytes: int | None = None) -> None:
        self.restores: list[Callable[[], Any]] = []
        """Functions that restore the content of the objects read so far."""
        self.unread: str | None = None
        """Why the last values were not read whole, as a predicate; None: they were."""
        self._known = dict(known)
        """`id` of an object -> what has been read."""
        self._kept: list[Any] = []
        """Objects that have been read, so that no `id` is used twice."""
        self._bytes_left = MOST_BYTES if most_bytes is None else most_bytes
        """How many more bytes are copied."""
        self._summed_bytes_left = _MOST_SUMMED_BYTES
        """How many more bytes are compared by a checksum."""
        self._objects_left = _MOST_OBJECTS
        """How many more objects are looked into."""
        self._values_left = _MOST_VALUES
        """How many more elements of containers are looked at."""

    def read(self, value: Any, depth: int = 0) -> Content:
        """What a value holds; of one that cannot be read its type."""
        kind = type(value)
        if kind in _EXACT:
            exact: Hashable = value
            return exact
        if kind in _BY_TEXT:
            return kind, repr(value)
        if id(value) in self._known:
            return self._known[id(value)]
        self._kept.append(value)
        self._known[id(value)] = ("a cycle", kind)
        self._objects_left -= 1
        found: Content
        if self._objects_left < 0:
            found = self._skip(kind, "holds more than is looked through")
        elif depth > _DEPTH:
            found = self._skip(kind, f"has more than {_DEPTH} values inside each other")
        else:
            try:
                found = self._content(value, depth + 1)
            except USER_CODE_ERRORS as error:
                reraise_ctrl_c(error)
                found = self._skip(kind, f"raises {type(error).__name__} when it is read")
        self._known[id(value)] = found
        return found

    def _skip(self, kind: type, why: str) -> type:
        """What stands for a value that is not read."""
        self.unread = self.unread or why
        return kind

    def _content(self, value: Any, depth: int) -> Content:
        """What an object holds; its type alone, if it is not looked into."""
        kind = type(value)
        for base in (bool, int, float, complex, str, bytes):
            if isinstance(value, base):
                return kind, base.__repr__(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, numpy.ndarray):
            return self._array(value, depth)
        if isinstance(value, numpy.generic):
            return kind, (self.read(value.item(), depth) if value.dtype.hasobject else value.tobytes())
        if isinstance(value, _CONTAINERS):
            return self._container(value, depth)
        if isinstance(value, (bytearray, array.array)):
            if not self._may_copy(nbytes := memoryview(value).nbytes):
                return kind, nbytes, self._checksum(nbytes, lambda: value)
            self.restores.append(functools.partial(_restore_bytes, value, value[:]))
            return kind, bytes(value)
        if isinstance(value, _C_VALUES):
            if not self._may_copy(ctypes.sizeof(value)):
                return self._skip(kind, "holds more than is looked through")
            self.restores.append(functools.partial(_restore_c_value, value, content := bytes(value)))
            return kind, content
        if isinstance(value, ctypes._Pointer):
            return self._skip(kind, "holds a pointer, which is not followed")
        if isinstance(value, (io.BytesIO, io.StringIO)):
            if value.closed:
                return kind, "closed"
            self.restores.append(functools.partial(_restore_buffer, value, text := value.getvalue(), at := value.tell()))
            return kind, text, at
        if isinstance(value, random.Random):
            self.restores.append(functools.partial(value.setstate, value.getstate()))
            return value.getstate()
        if isinstance(value, (numpy.random.Generator, numpy.random.BitGenerator, numpy.random.RandomState)):
            bits: Any = getattr(value, "bit_generator", getattr(value, "_bit_generator", value))
            self.restores.append(functools.partial(setattr, bits, "state", bits.state))
            return pickle.dumps(bits.state)
        if isinstance(value, torch.Generator):
            self.restores.append(functools.partial(value.set_state, state := value.get_state()))
            return state.numpy().tobytes()
        if isinstance(value, contextvars.ContextVar):
            if (content := value.get(None)) is not None:
                self.restores.append(functools.partial(value.set, content))
            return self.read(content, depth)
        if isinstance(value, _PARTIAL):
            return [self.read(each, depth) for each in (value.func, value.args, value.keywords)]
        if isinstance(value, types.MethodType):
            return [self.read(each, depth) for each in (value.__self__, value.__func__)]
        if isinstance(value, types.FunctionType):
            return self._function(value, depth) if _is_users(value) else kind
        if isinstance(value, types.GeneratorType):
            return (frame := value.gi_frame) and (frame.f_lasti, {k: self.read(v, depth) for k, v in frame.f_locals.items()})
        if isinstance(value, _ITERATORS):
            return self._iterator(value, depth)
        if isinstance(value, _VALUES) and not _is_users(kind):
            return kind, repr(value)
        if isinstance(value, (type, types.ModuleType)) or not (_is_users(kind) or isinstance(value, _LOOKED_INTO)):
            return kind
        return (kind, *self._attributes(value, depth))

    def _container(self, value: Any, depth: int) -> Content:
        """What a dict, list, deque, set, tuple or frozenset holds; of one with too many elements their number."""
        kind = type(value)
        self._values_left -= len(value)
        if self._values_left < 0:
            return self._skip(kind, "holds more than is looked through"), len(value)
        found: Content
        if isinstance(value, dict):
            base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            self.restores.append(functools.partial(_restore_dict, base, value, content := dict(dict.items(value))))
            found = {_key(key): self.read(each, depth) for key, each in content.items()}
        elif isinstance(value, (list, collections.deque)):
            self.restores.append(functools.partial(_restore_list, value, elements := [*_elements_of(value)]))
            found = [self.read(each, depth) for each in elements]
        elif isinstance(value, set):
            self.restores.append(functools.partial(_restore_set, value, set(value)))
            found = set(map(_key, value))
        else:
            found = tuple(map(_key, value)) if isinstance(value, frozenset) else [self.read(each, depth) for each in value]
        return (kind, found, *(self._attributes(value, depth) if kind not in _CONTAINERS else ()))

    def _attributes(self, value: Any, depth: int) -> list[Content]:
        """What the attributes of an object hold."""
        found: list[Content] = []
        if isinstance(own := getattr(value, "__dict__", None), dict):
            found.append(self._container(own, depth))
        for each in type(value).__mro__ if _is_users(type(value)) else ():
            names = vars(each).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    self.restores.append(functools.partial(_restore_slot, value, name, content := getattr(value, name)))
                    found.append((name, self.read(content, depth)))
        return found

    def _function(self, function: types.FunctionType, depth: int) -> Content:
        cells = function.__closure__ or ()
        self.restores += [functools.partial(setattr, cell, "cell_contents", _content_of(cell)) for cell in cells]
        held = (*map(_content_of, cells), function.__defaults__, function.__kwdefaults__, vars(function))
        return function.__qualname__, [self.read(each, depth) for each in held]

    def _iterator(self, value: Any, depth: int) -> Content:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                _, arguments, *state = value.__reduce__()
        except (TypeError, AttributeError):
            return repr(value) if isinstance(value, itertools.count) else type(value)
        # The iterators inside are made for this call: what is known by their `id` would be taken for others later.
        self._kept += [arguments, state]
        return self.read(arguments, depth), self.read(state, depth)

    def _tensor(self, value: Tensor) -> Content:
        what = (tuple(value.shape), value.dtype)
        nbytes = value.numel() * value.element_size()
        if value.is_meta or value.layout is not torch.strided:
            return (*what, id(value), 0 if value.is_inference() else value._version)
        with torch.no_grad():
            if not self._may_copy(nbytes):
                written = id(value), 0 if value.is_inference() else value._version
                is_here = value.device.type == "cpu"
                return (*what, *written, self._checksum(nbytes, lambda: _bytes_of(value)) if is_here else None)
            content = value.detach().clone().resolve_conj().resolve_neg()
            if value.is_leaf:
                self.restores.append(functools.partial(_restore_tensor, value, content))
            return (*what, hashlib.blake2b(_bytes_of(content)).digest())

    def _array(self, value: numpy.ndarray, depth: int) -> Content:
        if value.dtype.hasobject:
            self.restores.append(functools.partial(numpy.copyto, value, value.copy()))
            return value.shape, self._container(value.reshape(-1).tolist(), depth)
        if not self._may_copy(value.nbytes):
            return value.shape, value.dtype, self._checksum(value.nbytes, lambda: numpy.ascontiguousarray(value))
        if value.flags.writeable:
            self.restores.append(functools.partial(numpy.copyto, value, value.copy()))
        return value.shape, value.dtype, hashlib.blake2b(value.tobytes()).digest()

    def _may_copy(self, nbytes: int) -> bool:
        if nbytes > self._bytes_left:  # small ones after a large one are copied all the same
            return False
        self._bytes_left -= nbytes
        return True

    def _checksum(self, nbytes: int, read: Callable[[], Any]) -> int | type:
        """A checksum of bytes that are too many to be copied; None, if they are too many for that too."""
        if nbytes > self._summed_bytes_left:
            return self._skip(type(None), "holds more than is looked through")
        self._summed_bytes_left -= nbytes
        return zlib.crc32(read())


def comparable_content(value: Any, known: Mapping[int, Content] | None = None, most_bytes: int | None = None) -> Content:
    """What a value holds, in a form that is equal for two values only if they are bit-identical as far as they are looked into.

    `known`: `id` of objects that are not read -> what stands for them. `most_bytes`: of tensors and arrays whose content is
    read; of larger tensors the identity counts too.
    """
    return _Reader(known or {}, most_bytes).read(value)


def is_same_content(one: Content, other: Content) -> bool:
    """Whether two results of `comparable_content` are equal; time grows with their size, also where values are shared."""
    return _are_equal(one, other, {})


def _of_modules(modules: Mapping[int, tuple[str, nn.Module]]) -> dict[int, Content]:
    """`id` of modules, their parameters and buffers -> what stands for them."""
    known: dict[int, Content] = {key: ("module", name) for key, (name, _) in modules.items()}
    for _, module in modules.values():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            known[id(tensor)] = ("tensor of the model", name)
    known.pop(id(None), None)
    return known


def _is_users(value: Any) -> bool:
    """Whether a function, class or module is none of PyTorch's, Python's or raypar's."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    return name.partition(".")[0] not in _OTHERS


def _is_called_by_python(name: str, kind: type) -> bool:
    """Whether a method is called where nothing names it: by an operator, a `with`, an attribute's look-up, a construction."""
    is_special = name.startswith("__") and name.endswith("__")
    return is_special and not (name == "__init__" and issubclass(kind, nn.Module))  # modules are made before


def _imported_by(function: types.FunctionType, names: Iterable[str]) -> Iterator[types.ModuleType]:
    """The modules that a function imports by itself, among the names in its code."""
    package = function.__globals__.get("__package__") or ""
    for name in names:
        for full in (name, f"{package}.{name}" if name else package):
            module = sys.modules.get(full)
            if isinstance(module, types.ModuleType) and function.__globals__.get(name) is not module:
                yield module


def _key(value: Any) -> Hashable:
    """The key of a dict, or an element of a set, to be compared."""
    return (
        value
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))
        else id(value)
    )


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names that a function's code, and that of functions inside of it, looks up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _elements_of(value: list[T] | collections.deque[T]) -> Iterator[T]:
    """The elements of a list or deque, whatever the methods of its own class do."""
    return list.__iter__(value) if isinstance(value, list) else collections.deque.__iter__(value)


def _bytes_of(value: Tensor) -> Any:
    """The bytes of a tensor, as numpy has them."""
    flat = value.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


def _get(holder: _Holder, key: str) -> Any:
    return vars(holder).get(key) if isinstance(holder, type) else holder[key]


def _set(holder: _Holder, key: str, value: Any) -> None:
    if isinstance(holder, type):
        if vars(holder).get(key) is not value:
            setattr(holder, key, value)
    elif holder.get(key) is not value:
        holder[key] = value


def _delete(holder: _Holder, key: str) -> None:
    if isinstance(holder, type):
        delattr(holder, key)
    else:
        del holder[key]


# A container is put back by the methods of its base class, and only if it has changed: its own class may forbid it.


def _restore_dict(base: type[dict[T, R]], value: dict[T, R], content: dict[T, R]) -> None:
    if len(value) != len(content) or any(dict.get(value, key, _NOTHING) is not each for key, each in content.items()):
        base.clear(value)
        base.update(value, content)


def _restore_slot(value: T, name: str, content: R) -> None:
    if getattr(value, name, _NOTHING) is not content:
        object.__setattr__(value, name, content)  # the class may forbid it: a frozen dataclass


def _restore_list(value: list[T] | collections.deque[T], content: list[T]) -> None:
    if len(value) != len(content) or any(a is not b for a, b in zip(value, content, strict=True)):
        base = list if isinstance(value, list) else collections.deque
        base.clear(value)
        base.extend(value, content)  # type: ignore[arg-type]


def _restore_bytes(value: Any, content: Any) -> None:
    value[:] = content


def _restore_c_value(value: Any, content: bytes) -> None:
    ctypes.memmove(ctypes.addressof(value), content, len(content))


def _restore_buffer(value: io.BytesIO | io.StringIO, content: Any, at: int) -> None:
    if value.getvalue() != content:
        value.seek(0)
        value.truncate()
        value.write(content)
    value.seek(at)


def _restore_set(value: set[T], content: set[T]) -> None:
    set.clear(value)
    set.update(value, content)


def _restore_tensor(value: Tensor, content: Tensor) -> None:
    if value.shape == content.shape and not torch.equal(value.detach(), content):
        value.data.copy_(content)
