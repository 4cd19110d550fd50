"""The limit of memory that control groups set, read from files as Linux has them."""

from __future__ import annotations

import pytest

from dure.runtime.memory import memory_limit

FIRST = "4:cpu,memory:/outer/inner\n0::/\n"
SECOND = "0::/outer/inner\n"
UNLIMITED = "9223372036854771712"


@pytest.mark.parametrize(
    ("membership", "limits", "found"),
    [
        (SECOND, {"outer/inner/memory.max": "1000"}, 1000),
        (SECOND, {"outer/inner/memory.max": "max", "outer/memory.max": "2000"}, 2000),
        (SECOND, {"outer/inner/memory.max": "3000", "outer/memory.max": "2000"}, 2000),
        (SECOND, {"memory.max": "500"}, 500),  # a container, which sees its group as the root
        (SECOND, {"outer/inner/memory.max": "max"}, None),
        (SECOND, {"outer/other/memory.max": "10", "memory/outer/inner/memory.limit_in_bytes": "10"}, None),
        (FIRST, {"memory/outer/inner/memory.limit_in_bytes": "1000"}, 1000),
        (FIRST, {"memory/outer/inner/memory.limit_in_bytes": UNLIMITED, "memory/memory.limit_in_bytes": "700"}, 700),
        (FIRST, {"memory/outer/inner/memory.limit_in_bytes": UNLIMITED}, None),
        (FIRST, {}, None),
    ],
)
def test_the_limit_is_the_least_of_the_groups_around_a_process(tmp_path, membership, limits, found):
    (tmp_path / "membership").write_text(membership)
    for path, text in limits.items():
        file = tmp_path / "groups" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert memory_limit(tmp_path / "membership", tmp_path / "groups") == found


def test_a_system_without_control_groups_has_no_limit(tmp_path):
    assert memory_limit(tmp_path / "none", tmp_path) is None
