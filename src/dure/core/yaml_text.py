"""A YAML reader for files of users: it refuses repeated keys, as the standard demands, and has bounds.

PyYAML silently takes the last of repeated keys. Aliases let a short text describe any number of values; the bound holds
for the values once aliases are replaced. The largest files are traces and profiles, of some 100,000 values.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from dure.core.regular_file import read_regular
from dure.core.text import quoted

LARGEST = 1 << 24
"""Most bytes of a file."""

MOST_VALUES = 1_000_000
"""Most values of a text, with those that aliases stand for."""


class _Bounded(yaml.SafeLoader):
    """A safe loader that refuses repeated keys of a mapping, too many values, and values that no type can hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if not alias:
            self._sizes[node] = 1 + sum(self._sizes[each] for each in _children(node))
        elif node not in self._sizes:
            raise yaml.MarkedYAMLError(problem="the alias stands for a value that contains it", problem_mark=mark)
        if self._sizes[node] > MOST_VALUES:
            problem = f"aliases make more than {MOST_VALUES:,} values" if alias or self.anchors else _TOO_MANY
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"{quoted(node.value)} is no value of the type {kind}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()  # PyYAML refuses others
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f'the key "{key.value}" is there twice', problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_TOO_MANY = f"it has more than {MOST_VALUES:,} values"


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def read_yaml(text: str) -> Any:
    """Parse `text`. Raises `yaml.YAMLError` for text that is no YAML, repeats a key, or has too many values."""
    loader = _Bounded(text)
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deep") from error
    finally:
        loader.dispose()


def read_yaml_file(path: str | Path) -> Any:
    """Parse the file `path`. Raises `ValueError` with the reason in words if that is not possible."""
    try:
        return read_yaml(read_regular(Path(path), LARGEST).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is not text in UTF-8") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"it is no YAML ({place}{problem})") from error
