"""YAML in which a key that is there twice is an error, as the standard has it; PyYAML silently takes the last."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class _Once(yaml.SafeLoader):
    """Safe, and of every mapping each key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f'the key "{key.value}" is there twice', problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_yaml(text: str) -> Any:
    """The value that `text` describes. Raises `yaml.YAMLError` where it is none, also for a key that is there twice."""
    loader = _Once(text)
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deep") from error
    finally:
        loader.dispose()
