"""Parses and writes YAML, as plain values. Depth is limited, and so is size with every alias expanded ("billion laughs")."""

from __future__ import annotations

import re
from typing import Any

import yaml

from raypar.errors import ConfigError
from raypar.files.printable_text import shorten
from raypar.files.untrusted_files import MAX_DEPTH

MAX_NODES = 20_000
"""Limit of keys and values in a file; an alias counts as often as the node it stands for has nodes."""


class YamlTooLargeError(ConfigError):
    """A YAML text has more levels, or more values after expanding aliases, than raypar reads."""


class _TooMuch(yaml.composer.ComposerError):
    """Raised while PyYAML composes nodes; `parse_yaml` converts it into `YamlTooLargeError`."""


class _KeyTwice(yaml.constructor.ConstructorError):
    """Raised for a key that is given twice in one mapping."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits. `3e-4` is a number here (YAML 1.1: a string), and a key given twice is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0
        self._sizes: dict[int, int] = {}
        """id of a complete node -> number of nodes in it, itself included. Its parent or anchor keeps the node alive."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark, alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)  # type: ignore[no-untyped-call]
        self._depth, self._count = self._depth + 1, self._count + 1
        if self._depth > MAX_DEPTH:
            raise _TooMuch(None, None, f"more than {MAX_DEPTH} levels within each other", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if alias and id(node) not in self._sizes:
            raise _TooMuch(None, None, "an alias within what it stands for", mark)
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            inner = [each for pair in inner for each in pair]
        size = self._sizes[id(node)] = self._sizes[id(node)] if alias else 1 + sum(self._sizes[id(each)] for each in inner)
        if max(size, self._count) > MAX_NODES:
            raise _TooMuch(None, None, f"more than {MAX_NODES:,} keys and values, aliases written out", mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (first := seen.get((key.tag, key.value))) is not None:
                problem = f"key {key.value!r} is given twice, first in line {first + 1}"
                raise _KeyTwice(None, None, problem, key.start_mark)
            seen[key.tag, key.value] = key.start_mark.line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which writes the text `3e-4` in quotes: here it would be read as a number."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def dump_yaml(value: Any) -> str:
    """A YAML text that `parse_yaml` reads as `value`, which is made of plain values. Short lists stand on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=None)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text. `source`: its name in messages. Raises `ConfigError` for invalid or too large YAML."""
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        twice = isinstance(error, _KeyTwice)
        cure = "leave one of the two out, or rename it" if twice else "check indentation, colons and brackets"
        refusal = YamlTooLargeError if isinstance(error, _TooMuch) else ConfigError
        raise refusal(f"{shorten(source)}{where}: not valid YAML: {shorten(problem)}", cure=cure) from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # Of PyYAML's conversions: 2020-99-99 is written like a date, `!!bool maybe` says what it is not.
        raise ConfigError(
            f"{shorten(source)}: not valid YAML: a value cannot be converted ({type(error).__name__}: {shorten(str(error))})",
            cure="write texts that look like dates or numbers in quotes",
        ) from None
    finally:
        if loader is not None:
            loader.dispose()
