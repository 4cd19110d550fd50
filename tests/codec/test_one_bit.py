"""1-bit SGD: the places of bits in a message of several columns."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from dure.codec.coder import SliceLayout
from dure.codec.one_bit import OneBit


def test_one_bit_has_the_signs_of_columns_that_begin_inside_a_byte() -> None:
    """Columns of several widths with other elements between them. The bits of the fourth column begin at bit 9."""
    widths = [3, 3, 3, -2, 5, 5, -1, 7, 7]  # below 0: so many elements outside of columns
    bounds = (0, *accumulate(map(abs, widths)))
    layout = SliceLayout(bounds[-1], bounds, tuple(width > 0 for width in widths))
    values, out = torch.randn(layout.numel, generator=torch.Generator().manual_seed(0)), torch.empty(layout.numel)
    coder = OneBit(feedback=False).coder(layout)
    coder.decode(coder.encode(values), out)
    for width, (start, stop) in zip(widths, pairwise(bounds), strict=True):
        mine, got = values[start:stop], out[start:stop]
        if width < 0:
            assert torch.equal(got, mine)
        for sign in (mine >= 0, mine < 0) if width > 0 else ():
            assert got[sign].tolist() == pytest.approx([mine[sign].mean().item()] * int(sign.sum()))
