"""Layouts of transitions."""

import numpy as np
import pytest
from support.wording import raising

from dure.errors import UsageError
from dure.rl.transitions import STACKED, Column, FrameLayout, Layout


def test_a_row_has_references_in_place_of_frames():
    pixels = tuple(Column(name, "uint8", (4, 8, 8)) for name in STACKED)
    layout = Layout((*pixels, Column("action", "int64")), FrameLayout((8, 8), 4))
    assert layout.row["observation"] == np.dtype(("int64", (4,)))
    assert layout.row.itemsize == 2 * 4 * 8 + 8
    assert Layout(layout.columns).row.itemsize == 2 * 4 * 64 + 8


def test_bytes_of_values():
    assert Column("action", "float32", (2, 3)).nbytes == 24
    assert Column("action", "int64").nbytes == 8
    assert FrameLayout((84, 84), 4).nbytes == 7056


@pytest.mark.parametrize(
    ("columns", "frames", "message"),
    [
        (("reward", "reward"), None, "different"),
        (("frames",), None, "different"),
        (("observation", "next_observation"), FrameLayout((8, 8), 4), "4"),
        (("reward",), FrameLayout((8, 8), 4), "next_observation"),
    ],
)
def test_wrong_layouts(columns, frames, message):
    with raising(UsageError, message):
        Layout(tuple(Column(name, "float32") for name in columns), frames)
