"""Digests of the user's code on which a run's results depend, and what of it has changed since a checkpoint was written.

Followed are the files of the job's functions and of what they import, as far as they are the user's (neither of an installed
package nor of Python), and of what a script or notebook defines the functions and classes that are used. Comments, docstrings
and layout are no code. Nothing is imported here. Not seen: data, compiled extensions, and modules that are loaded by name.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import inspect
import linecache
import sys
import textwrap
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from raypar.files.json_type import Json
from raypar.job import FunctionConfig, Job
from raypar.job.section import Section
from raypar.launch.user_value_digests import VALUES

PACKAGE = "package "
"""What the names of packages begin with; other names are paths below the folder of import, or `script: function`."""
BESIDE = "beside training: "
"""What the names begin with of code that only validation, metrics and callbacks use."""


def code_of_job(spec: Job) -> dict[str, str]:
    """Name of a file, a script's function or a package -> digest or version, of the code of all the job's functions."""
    found = _Code()
    for key in ("model", "loss", "data", "optimizer", "lr_schedule"):
        for ref in _functions_in(getattr(spec, key)):
            found.follow_ref(ref)
    of_training = dict(found.digests)
    for ref in _functions_in(spec):
        found.follow_ref(ref)
    beside = {BESIDE + name: digest for name, digest in found.digests.items() if name not in of_training}
    return dict(sorted((of_training | beside).items()))


def _functions_in(part: object) -> Iterator[FunctionConfig]:
    """The functions in a section of the job, that itself included."""
    if isinstance(part, FunctionConfig) and getattr(part, "function", None) is not None:  # `validation.sets` have none beside
        yield part
    inside: Iterable[object] = ()
    if isinstance(part, Section):
        inside = (getattr(part, name) for name in type(part).model_fields if name not in ("function", "args"))
    elif isinstance(part, Mapping):
        inside = part.values()
    elif isinstance(part, tuple):
        inside = part
    for one in inside:
        yield from _functions_in(one)


def describe_code_change(then: Json, now: Mapping[str, str], said: Collection[str] = ()) -> str | None:
    """One line that says what of a job's code, and of the values that its functions hold, has changed; None if nothing has.

    `then`: as the checkpoint has it; None in those of a raypar that kept no digests, about which nothing is said, nor of values
    of which only one of both has a digest. `said`: keys of the job of whose change the user has been told.
    """
    if not isinstance(then, Mapping):
        return None
    parts = []
    for name in sorted({*then, *now}):
        before, after = then.get(name), now.get(name)
        if before == after or name.startswith(BESIDE):
            continue
        if name.startswith(VALUES) and (None in (before, after) or name.removeprefix(VALUES) in said):
            continue
        if name.startswith(PACKAGE):
            parts.append(f"{name} {before or '(not used)'} -> {after or '(not used)'}")
        else:
            parts.append(name + (" (new)" if before is None else " (no longer used)" if after is None else ""))
    if not parts:
        return None
    more = f" and {len(parts) - 10} more" if len(parts) > 10 else ""
    only_values = all(part.startswith(VALUES) for part in parts)
    changed, word = ("values that the job's functions hold have", "values") if only_values else ("the job's code has", "code")
    return (
        f"{changed} changed since the checkpoint: {', '.join(parts[:10])}{more}; the run goes on with the {word} of "
        f"now, so that its results are those of an undisturbed run neither of the former {word} nor of "
        f"{'these' if only_values else 'this one'}"
    )


def describe_change_beside_training(then: Json, now: Mapping[str, str]) -> str | None:
    """One line that says what has changed of code that only validation, metrics and callbacks use; None if nothing has.

    `then`: as the checkpoint has it. Of what only one of both has nothing is said: these may change at a resume.
    """
    if not isinstance(then, Mapping):
        return None
    changed = [name.removeprefix(BESIDE) for name in now if name.startswith(BESIDE) and then.get(name, now[name]) != now[name]]
    if not changed:
        return None
    named = ", ".join(changed[:10]) + (f" and {len(changed) - 10} more" if len(changed) > 10 else "")
    return (
        f"code that only validation, metrics and callbacks use has changed since the checkpoint: {named}; what it measures "
        "does not compare with what was measured before, nor what is chosen by it (best checkpoint, early stopping, learning "
        "rates)"
    )


class _Code:
    """Follows code from the job's functions to what they use, each file and function once."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        """What `code_of_job` returns."""
        self._modules = set[str]()
        """Names of modules that were followed."""
        self._objects = list[Any]()
        """Functions, classes and objects that were followed."""

    def follow_ref(self, ref: FunctionConfig) -> None:
        """Follow a function of the job and what it is called with."""
        if isinstance(ref.function, str):
            self._follow_module(ref.function.partition(":")[0])
        else:
            self._follow_object(ref.function)
        self._follow_object(dict(ref.args))

    def _follow_object(self, value: Any) -> None:
        """Follow a function or class, or an object by its class; values that are no code are left alone."""
        if value is None or isinstance(value, (str, bytes, int, float)) or any(value is one for one in self._objects):
            return
        if isinstance(value, ModuleType):
            self._follow_module(value.__name__)
            return
        self._objects.append(value)
        if isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._follow_object(part)
        elif isinstance(value, Mapping):
            for part in value.values():
                self._follow_object(part)
        elif type(value) in (list, tuple):
            if len(value) <= 100:  # longer ones are data
                for part in value:
                    self._follow_object(part)
        elif inspect.ismethod(value):
            self._follow_object(value.__func__)
            self._follow_object(value.__self__)
        elif inspect.isfunction(value) or inspect.isclass(value):
            if value.__module__ == "__main__":
                self._follow_source(value)
            elif value.__module__:
                self._follow_module(value.__module__)
        elif not inspect.isbuiltin(value):
            self._follow_instance(value)

    def _follow_instance(self, value: Any) -> None:
        """Follow an object by its class and what it calls: the transforms of a data set, say, or the modules of a model."""
        kind, parts = type(value), getattr(value, "__dict__", {}).values()
        self._follow_object(kind)
        for part in parts:
            if callable(part) or kind.__module__.startswith("raypar."):  # raypar's own hold what users gave, `Given` for one
                self._follow_object(part)
        if hasattr(kind, "named_parameters") and hasattr(kind, "modules"):
            for kind in {type(part) for part in value.modules()}:
                self._follow_object(kind)

    def _follow_source(self, value: Any) -> None:
        """Follow a function or class of a script or notebook by its own source: other lines there are no part of the job."""
        trees = _source_trees(value)
        if not trees:
            return
        digest = hashlib.sha256(repr([syntax_tree_as_tuples(tree) for tree in trees]).encode())
        there = vars(sys.modules["__main__"]) | dict(getattr(value, "__globals__", {}))
        with_closure = inspect.isfunction(value)
        there |= inspect.getclosurevars(value).nonlocals if with_closure else {}
        for name in sorted({node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)} & {*there}):
            if isinstance(there[name], (bool, int, float, str, type(None))):
                digest.update(f"{name}={there[name]!r}".encode())
            else:
                self._follow_object(there[name])
        for name in (name for tree in trees for name in _imported_names(tree, "__main__", is_package=False)):
            self._follow_module(name)
        self.digests[f"script: {value.__qualname__}"] = digest.hexdigest()

    def _follow_module(self, name: str) -> None:
        """Follow a module's file and its imports; of an installed package take the version."""
        top = name.partition(".")[0]
        if name in self._modules or name == "__main__" or top == "raypar" or top in sys.stdlib_module_names:
            return
        self._modules.add(name)
        found = _find(name)
        if found is None:
            return
        path, is_package = found
        if {"site-packages", "dist-packages"} & set(path.parts):
            version = _version(top)
            if version is not None:
                self.digests[PACKAGE + top] = version
            return
        if "." in name:
            self._follow_module(name.rpartition(".")[0])  # the `__init__` runs first
        try:
            digest, imported = _read_source(path.read_bytes(), name, is_package)
        except (OSError, SyntaxError, ValueError):  # what cannot be read cannot have been imported either
            return
        label = name.replace(".", "/") + ("/__init__.py" if is_package else ".py")
        self.digests[label] = digest
        for other in imported:
            self._follow_module(other)


@functools.lru_cache(maxsize=256)
def _read_source(source: bytes, module: str, is_package: bool) -> tuple[str, tuple[str, ...]]:
    """(digest of a module's code, names of modules that it may import); kept for later runs of this process."""
    tree = ast.parse(source)
    digest = hashlib.sha256(repr(syntax_tree_as_tuples(tree)).encode()).hexdigest()
    return digest, tuple(dict.fromkeys(_imported_names(tree, module, is_package)))


def syntax_tree_as_tuples(node: Any) -> Hashable:
    """A syntax tree as nested tuples without places, comments and docstrings, the same under several versions of Python."""
    if isinstance(node, list):
        return tuple(map(syntax_tree_as_tuples, node))
    if isinstance(node, ast.Constant):
        return type(node.value).__name__, repr(node.value)
    if not isinstance(node, ast.AST):
        plain: Hashable = node
        return plain
    fields = dict(ast.iter_fields(node))
    body = fields.get("body")
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and body:
        first = body[0].value if isinstance(body[0], ast.Expr) else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            fields["body"] = body[1:]
    left_out: tuple[Any, ...] = (None, [], ())
    return type(node).__name__, *(
        (name, syntax_tree_as_tuples(value))
        for name, value in fields.items()
        if value not in left_out and name != "type_comment"
    )


def _imported_names(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Names of modules that a module's tree may import; some of them are names in modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*parents, *filter(None, [base])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


def _find(name: str) -> tuple[Path, bool] | None:
    """(source of a module, whether it is a package), found as an import would find it; None if there is no such source."""
    folders: list[str] | None = None
    spec = None
    for depth in range(name.count(".") + 1):
        try:
            # By the last part of the name: with all of it, folders without __init__.py are looked up in sys.modules.
            spec = importlib.machinery.PathFinder.find_spec(name.split(".")[depth], folders)
        except (ImportError, ValueError, AttributeError):
            return None
        if spec is None:
            return None
        folders = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        if folders is None and depth < name.count("."):
            return None
    if spec is None or not spec.origin:
        return None
    path = Path(spec.origin)
    if path.suffix != ".py" and not {"site-packages", "dist-packages"} & set(path.parts):
        return None
    return path, spec.submodule_search_locations is not None


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a distribution of another name
        version = getattr(sys.modules.get(package), "__version__", None)
        return version if isinstance(version, str) else None


def _source_trees(value: Any) -> list[ast.AST]:
    """The syntax trees of a function or class of a script or notebook; of a lambda all those of its line. None: no source."""
    code: CodeType | None = getattr(value, "__code__", None)
    try:
        if code is not None and code.co_name == "<lambda>":
            file = ast.parse("".join(linecache.getlines(code.co_filename)))
            return [node for node in ast.walk(file) if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno]
        return [ast.parse(textwrap.dedent(inspect.getsource(value)))]
    except (OSError, TypeError, SyntaxError, ValueError):
        if not inspect.isclass(value):
            return []
        methods = [
            part for part in vars(value).values() if inspect.isfunction(part)
        ]  # of notebooks: Python finds no class there
        return [tree for method in methods if method.__module__ == "__main__" for tree in _source_trees(method)]
