"""A YAML reader that refuses repeated keys, as the standard demands. PyYAML silently takes the last one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class _Once(yaml.SafeLoader):
    """A safe loader that refuses repeated keys of a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f'the key "{key.value}" is there twice', problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(text: str) -> Any:
    """Parse `text`. Raises `yaml.YAMLError` for text that is no YAML or repeats a key."""
    loader = _Once(text)
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deep") from error
    finally:
        loader.dispose()
