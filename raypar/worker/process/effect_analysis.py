"""Proves of users' code that a call neither draws random numbers nor changes the state of its process.

Such a call needs no seed before it and no check after it: it cannot tell the difference. The proof reads the source of what is
called, and of all that this calls in turn, together with the objects that it finds there: modules, their attributes, globals.
Whatever it does not know is not proved: other statements and names, hooks, source that is not that of the code that runs. What
it knows are operators, and the functions of `effect_free_functions.py`, on *data*: tensors, numbers, strings and containers of
these, which have no code of users'. Callers see to it that what they give is data.

What was found holds as long as nobody puts other code in the place of what was read, as recording a model's forward assumes,
too. It holds in the present mode of the modules (training or evaluation) only.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import tokenize
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor, nn

from raypar.model.capture.captured_layer import CapturedLayer, unit_of_bare_call
from raypar.torch_compat.modules import calls_only_forward
from raypar.worker.process.effect_free_functions import (
    TENSOR_METHODS,
    TENSOR_PROPERTIES,
    is_dropout,
    is_effect_free_function,
    is_effect_free_method,
    probability_of_drawing,
)


def has_no_effects(function: Callable[..., object], *objects: object) -> bool:
    """Whether a call with data neither draws random numbers nor changes the state of the process. False where it is not proved.

    `objects`: the first arguments, if they are no data.
    """
    try:
        _Proof().call(_Known(function), [*map(_Known, objects)], of_any_number=True)
    except (_NotProved, RecursionError):
        return False
    return True


def reads_without_effects(dataset: object) -> bool:
    """Whether reading a sample of a map-style data set has no effects, as `has_no_effects`."""
    read = inspect.getattr_static(type(dataset), "__getitem__", None)
    return isinstance(read, types.FunctionType) and has_no_effects(read, dataset)


def copies_without_effects(one: object) -> bool:
    """Whether a deep copy of an object runs no code of users', as `has_no_effects`: all that it holds is data."""
    own = (_of_class(type(one), name, object) for name in ("__reduce_ex__", "__reduce__", "__getstate__", "__setattr__"))
    hooks = any(hasattr(type(one), name) for name in ("__deepcopy__", "__setstate__", "__getattr__"))
    return not hooks and not any(own) and hasattr(one, "__dict__") and _is_data(vars(one))


class _NotProved(Exception):
    """Something that the proof does not know."""


class _Data:
    """A value of which only this is known: that it is data."""


_DATA = _Data()


@dataclass(frozen=True, eq=False)
class _Known:
    """A value that is known: an object, or data that nothing assigns anew."""

    value: Any


@dataclass(frozen=True, eq=False)
class _Method:
    """A method of data, which is about to be called."""

    name: str


@dataclass(frozen=True, eq=False)
class _OwnMethod:
    """A method of an object, which is about to be called."""

    function: types.FunctionType
    owner: _Known


_Value = _Data | _Known | _Method | _OwnMethod

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, torch.Size),
)
_MOST_ELEMENTS = 1000
_ATTRIBUTES_OF_TENSORS = TENSOR_METHODS | TENSOR_PROPERTIES


def _is_data(value: object) -> bool:
    """Whether an object is data."""
    kind = type(value)
    if kind in (Tensor, nn.Parameter):
        return vars(value).keys().isdisjoint(_ATTRIBUTES_OF_TENSORS)
    if kind in (tuple, list, dict, set):
        parts: Any = (*value, *value.values()) if isinstance(value, dict) else value
        return len(parts) <= _MOST_ELEMENTS and all(map(_is_data, parts))
    if isinstance(value, numpy.ndarray):
        return kind in (numpy.ndarray, numpy.memmap) and value.dtype != object
    return kind in _PLAIN


def _refuse(what: object) -> NoReturn:
    raise _NotProved(what)


# -- source ------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _source_tree(code: types.CodeType, imported: tuple[str, ...]) -> ast.FunctionDef:
    """The source of a function, of which compiling makes this very code. Raises `_NotProved`.

    `imported`: the names among those it reads that stand for modules, whose functions Python calls by other instructions.
    """
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        text = "".join(inspect.getblock(lines))
        (node,) = ast.parse(f"if 1:\n{text}" if text[:1].isspace() else text).body
        (function,) = node.body if isinstance(node, ast.If) else [node]
        if not isinstance(function, ast.FunctionDef):
            _refuse(code.co_name)
        function.decorator_list = []
        imports = ast.parse("".join(f"import {name}\n" for name in imported)).body
        made = compile(ast.Module([*imports, function], []), code.co_filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, tokenize.TokenError, IndexError):
        _refuse(code.co_name)
    if not any(isinstance(one, types.CodeType) and _same_code(one, code) for one in made.co_consts):
        _refuse(code.co_name)
    return function


def _names(code: types.CodeType) -> list[str]:
    """The names of globals and attributes that code reads, that of its comprehensions too."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for one in inner for name in _names(one))]))


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two code objects do the same, wherever they are."""
    parts = [
        (c.co_name, c.co_code, c.co_names, c.co_varnames, c.co_freevars, c.co_argcount, c.co_kwonlyargcount)
        for c in (one, other)
    ]
    return (
        parts[0] == parts[1]
        and len(one.co_consts) == len(other.co_consts)
        and all(
            _same_code(a, b) if isinstance(a, types.CodeType) and isinstance(b, types.CodeType) else repr(a) == repr(b)
            for a, b in zip(one.co_consts, other.co_consts, strict=True)
        )
    )


# -- the proof ---------------------------------------------------------------------------------------------------------------


@dataclass
class _Scope:
    """One call of a function."""

    function: types.FunctionType
    values: dict[str, _Value]
    """By name of a parameter or local variable."""

    def read(self, name: str) -> _Value:
        """What a name stands for. Raises `_NotProved` for a local variable without a value."""
        if name in self.values:
            return self.values[name]
        code = self.function.__code__
        if name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            _refuse(name)
        home = next((home for home in (self.function.__globals__, vars(builtins)) if name in home), None)
        return _changeable(home[name]) if home is not None else _refuse(name)

    def assign(self, name: str) -> None:
        """Let a name stand for data from now on. Raises `_NotProved` for one that stands for an object."""
        if not self.holds_data(name):
            _refuse(name)
        self.values[name] = _DATA

    def holds_data(self, name: str) -> bool:
        """Whether a name stands for data, or nothing yet."""
        return isinstance(self.values.get(name, _DATA), _Data)


class _Proof:
    """Calls, statements and expressions, run on what is known of their values. All methods raise `_NotProved`."""

    def __init__(self) -> None:
        self._called: dict[tuple[int, ...], bool] = {}
        """(function, objects that it was given) -> whether it is proved; False while that is under way."""
        self._kept: list[object] = []
        """Objects whose `id` is in use."""

    # -- calls ---------------------------------------------------------------------------------------------------------------

    def call(self, callee: _Value, args: Sequence[_Value], *, of_any_number: bool = False) -> None:
        """Prove that a call has no effects and returns data. `of_any_number`: data follows the arguments."""
        if isinstance(callee, _OwnMethod):
            return self._function(callee.function, [callee.owner, *args])
        if isinstance(callee, _Method):
            return self._need_data(args)
        function = callee.value if isinstance(callee, _Known) else _refuse(callee)
        if is_effect_free_function(function):
            if (
                function is isinstance
                and len(args) == 2
                and isinstance(args[1], _Known)
                and args[1].value in (Tensor, *_PLAIN[:6])
            ):
                args = args[:1]
            return self._need_data(args)
        if isinstance(function, nn.Module):
            return self._module(function, args)
        if isinstance(function, partial):
            if type(function) is not partial or not _is_data(function.keywords):
                _refuse(function)
            return self.call(_Known(function.func), [*map(_Known, function.args), *args], of_any_number=of_any_number)
        if type(function) is types.MethodType and isinstance(function.__func__, types.FunctionType):
            return self._function(function.__func__, [_Known(function.__self__), *args])
        if type(function) is not types.FunctionType:
            _refuse(function)
        return self._function(function, args)

    def _module(self, module: nn.Module, args: Sequence[_Value]) -> None:
        if isinstance(module, CapturedLayer) and calls_only_forward(module):
            unit = unit_of_bare_call(module)
            return self._module(unit if unit is not None else _refuse(module), args)
        forward = inspect.getattr_static(type(module), "forward", None)
        if not calls_only_forward(module) or not isinstance(forward, types.FunctionType):
            _refuse(module)
        return self._function(forward, [_Known(module), *args])

    def _function(self, function: types.FunctionType, args: Sequence[_Value]) -> None:
        """Prove a function of Python code. Parameters without a value here are data, too."""
        code = function.__code__
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            _refuse(function)
        objects = {place: arg for place, arg in enumerate(args) if not self._is_data(arg)}
        if not _is_data(defaults) or any(place >= code.co_argcount for place in objects):
            _refuse(function)
        key = (id(function), *(number for place, arg in objects.items() for number in (place, id(_object(arg)))))
        if key in self._called:
            return None if self._called[key] else _refuse(function)
        self._called[key] = False
        self._kept += [function, *objects.values()]
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        names = code.co_varnames[:count]
        scope = _Scope(function, {name: objects.get(place, _DATA) for place, name in enumerate(names)})
        imported = [name for name in _names(code) if isinstance(function.__globals__.get(name), types.ModuleType)]
        self._statements(_source_tree(code, tuple(imported)).body, scope)
        self._called[key] = True
        return None

    # -- statements ----------------------------------------------------------------------------------------------------------

    def _statements(self, body: Iterable[ast.stmt], scope: _Scope) -> None:
        for node in body:
            match node:
                case ast.Return(value=None) | ast.Pass() | ast.Break() | ast.Continue() | ast.Raise():
                    pass  # what is raised ends the run
                case ast.Return(value=ast.expr() as value) | ast.Expr(value=value):
                    self._data(value, scope)
                case ast.Assign(targets=targets, value=value):
                    self._data(value, scope)
                    for target in targets:
                        self._assign(target, scope)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self._data(value, scope)
                    self._assign(target, scope)
                case ast.AugAssign(target=target, value=value):
                    self._all_data([target, value], scope)
                    self._assign(target, scope)
                case ast.If(test=test, body=then, orelse=otherwise):
                    known = self._truth(test, scope)
                    self._statements([*(then if known is not False else []), *(otherwise if known is not True else [])], scope)
                case ast.For(target=ast.Name(id=name), iter=ast.expr() as over, body=each, orelse=after):
                    self._loop(name, over, each, scope)
                    self._statements(after, scope)
                case ast.For(target=target, iter=over, body=each, orelse=after):
                    self._data(over, scope)
                    self._assign(target, scope)
                    self._statements([*each, *after], scope)
                case ast.Assert(test=test, msg=message):
                    self._data(test, scope)
                    if message is not None:
                        self._data(message, scope)
                case _:
                    _refuse(node)

    def _loop(self, name: str, over: ast.expr, each: Sequence[ast.stmt], scope: _Scope) -> None:
        """A loop over data, or over the modules of an `nn.Sequential` or `nn.ModuleList`."""
        values = self.value(over, scope)
        if self._is_data(values):
            scope.assign(name)
            return self._statements(each, scope)
        modules = _object(values)
        if name in scope.values or getattr(type(modules), "__iter__", None) not in (
            nn.Sequential.__iter__,
            nn.ModuleList.__iter__,
        ):
            _refuse(over)
        for module in vars(modules)["_modules"].values():
            scope.values[name] = _Known(module)
            self._statements(each, scope)
            del scope.values[name]
        return None

    def _assign(self, target: ast.expr, scope: _Scope) -> None:
        match target:
            case ast.Name(id=name):
                scope.assign(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._assign(part, scope)
            case ast.Starred(value=value):
                self._assign(value, scope)
            case ast.Attribute(value=owner, attr=name):
                found = _object(self.value(owner, scope))
                kind = type(found)
                if isinstance(found, (nn.Module, type, types.ModuleType)) or _of_class(kind, "__setattr__", object):
                    _refuse(target)
                if not hasattr(found, "__dict__") or not _is_data(inspect.getattr_static(kind, name, None)):
                    _refuse(target)
            case ast.Subscript(value=owner, slice=index):
                self._all_data([owner, index], scope)
            case _:
                _refuse(target)

    # -- expressions ---------------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr, scope: _Scope) -> _Value:
        """What an expression gives."""
        match node:
            case ast.Constant(value=value):
                return _Known(value)
            case ast.Name(id=name):
                return scope.read(name)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self.value(owner, scope), name)
            case ast.Call():
                return self._call(node, scope)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                known = self._truth(operand, scope)
                return _DATA if known is None else _Known(not known)
            case ast.BoolOp(op=op, values=parts):
                return self._all_or_any(isinstance(op, ast.And), parts, scope)
            case ast.IfExp(test=test, body=then, orelse=otherwise):
                known = self._truth(test, scope)
                if known is not None:
                    return self.value(then if known else otherwise, scope)
                return self._all_data([then, otherwise], scope)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
                found = self.value(left, scope)
                return _Known((found.value is None) == isinstance(op, ast.Is)) if isinstance(found, _Known) else _DATA
            case ast.Compare(left=left, comparators=others):
                return self._all_data([left, *others], scope)
            case ast.Subscript(value=owner, slice=index):
                return self._all_data([owner, index], scope)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node, scope)
            case ast.Dict(keys=keys, values=values):
                return self._all_data([*(key for key in keys if key is not None), *values], scope)
            case _:
                return self._all_data(_operands(node), scope)

    def _all_data(self, nodes: Iterable[ast.expr], scope: _Scope) -> _Data:
        for node in nodes:
            self._data(node, scope)
        return _DATA

    def _data(self, node: ast.expr, scope: _Scope) -> None:
        """Prove that an expression has no effects and gives data."""
        self._need_data([self.value(node, scope)])

    def _truth(self, node: ast.expr, scope: _Scope) -> bool | None:
        """Whether an expression, which gives data, is true; None if it may be either."""
        found = self.value(node, scope)
        self._need_data([found])
        plain = isinstance(found, _Known) and type(found.value) in (bool, int, float, str, type(None))
        return bool(found.value) if plain and isinstance(found, _Known) else None

    def _all_or_any(self, needs_all: bool, parts: Sequence[ast.expr], scope: _Scope) -> _Value:
        """`and`, `or`: what follows a part that decides is not run."""
        known: list[bool | None] = []
        for part in parts:
            known.append(self._truth(part, scope))
            if known[-1] is (not needs_all):
                return _Known(not needs_all) if None not in known else _DATA
        return _DATA if None in known else _Known(needs_all)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: _Scope) -> _Data:
        inner = _Scope(scope.function, dict(scope.values))
        for part in node.generators:
            self._data(part.iter, inner)
            self._assign(part.target, inner)
            self._all_data(part.ifs, inner)
        self._data(node.elt, inner)
        return _DATA

    def _call(self, node: ast.Call, scope: _Scope) -> _Data:
        callee = self.value(node.func, scope)
        args = [self.value(arg.value if isinstance(arg, ast.Starred) else arg, scope) for arg in node.args]
        named = {word.arg: self.value(word.value, scope) for word in node.keywords}
        self._need_data(named.values())
        has_star = any(isinstance(arg, ast.Starred) for arg in node.args)
        if has_star:
            self._need_data(args)
        function = callee.value if isinstance(callee, _Known) else None
        if not has_star and None not in named and _does_not_draw(function, args, named):  # no **names
            self._need_data(args)
        else:
            self.call(callee, args)
        return _DATA

    def _attribute(self, owner: _Value, name: str) -> _Value:
        if self._is_data(owner):
            return _DATA if name in TENSOR_PROPERTIES else _Method(name) if is_effect_free_method(name) else _refuse(name)
        found = _object(owner)
        if isinstance(found, types.ModuleType):
            return _changeable(vars(found)[name]) if name in vars(found) else _refuse(name)
        kind = type(found)
        is_module = isinstance(found, nn.Module)
        if isinstance(found, type) or _of_class(kind, "__getattribute__", object) or not hasattr(found, "__dict__"):
            _refuse(name)
        if _of_class(kind, "__getattr__", nn.Module if is_module else object):
            _refuse(name)
        of_class = inspect.getattr_static(kind, name, None)
        if name not in vars(found) and isinstance(of_class, types.FunctionType) and isinstance(owner, _Known):
            return _OwnMethod(of_class, owner)
        if hasattr(type(of_class), "__get__") and not isinstance(of_class, types.FunctionType):
            _refuse(name)  # a property
        homes: list[Mapping[str, Any]] = [vars(found)]
        if is_module:
            homes += [vars(found)[home] for home in ("_parameters", "_buffers", "_modules")]
        homes.append({} if of_class is None else {name: of_class})
        home = next((home for home in homes if name in home), None)
        if home is None:
            _refuse(name)
        return _Known(home[name]) if is_module else _changeable(home[name])

    # -- data ----------------------------------------------------------------------------------------------------------------

    @staticmethod
    def _is_data(value: _Value) -> bool:
        return isinstance(value, _Data) or (isinstance(value, _Known) and _is_data(value.value))

    def _need_data(self, values: Iterable[_Value]) -> None:
        for value in values:
            if not self._is_data(value):
                _refuse(value)


def _changeable(value: object) -> _Value:
    """An object that is found, or data that may be other data at the next call."""
    return _DATA if _is_data(value) else _Known(value)


def _of_class(kind: type, name: str, base: type) -> bool:
    """Whether a class has a special method of its own, not that of `base`."""
    return inspect.getattr_static(kind, name, None) is not inspect.getattr_static(base, name, None)


def _object(value: _Value) -> Any:
    """The object that a value is. Raises `_NotProved` for data of which nothing is known, and for a method."""
    return value.value if isinstance(value, _Known) else _refuse(value)


def _is_one_of(value: _Value, objects: Sequence[object]) -> bool:
    """Whether a value is one of these very objects."""
    return isinstance(value, _Known) and any(value.value is one for one in objects)


def _operands(node: ast.expr) -> list[ast.expr]:
    """The operands of an operator, or the parts of a container or text. Raises `_NotProved` for other expressions."""
    match node:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.UnaryOp(operand=operand):
            return [operand]
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.JoinedStr(values=parts):
            return parts
        case ast.Starred(value=value):
            return [value]
        case ast.FormattedValue(value=value, format_spec=spec):
            return [value, *([spec] if spec is not None else [])]
        case ast.Slice(lower=lower, upper=upper, step=step):
            return [part for part in (lower, upper, step) if part is not None]
    _refuse(node)


def _does_not_draw(function: object, args: Sequence[_Value], named: Mapping[str | None, _Value]) -> bool:
    """Whether a function is one of PyTorch's that draws random numbers by its arguments, and does not with these."""

    def given(name: str, position: int, default: object) -> object:
        found = named.get(name, args[position] if len(args) > position else _Known(default))
        return found.value if isinstance(found, _Known) else _DATA

    drawing = probability_of_drawing(function)
    if drawing is not None:
        return _is_zero(given(*drawing, 0.0))
    return is_dropout(function) and (given("training", 2, True) is False or _is_zero(given("p", 1, 0.5)))


def _is_zero(value: object) -> bool:
    return type(value) in (int, float) and value == 0
