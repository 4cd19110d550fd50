"""What shorter numbers make of each element, at the edges of what they can hold."""

from __future__ import annotations

import pytest
import torch

from dure.codec.base import Codec
from dure.codec.coder import SliceLayout
from dure.codec.floats import BFloat16, Float16, Int8
from dure.codec.sign import Sign

TINY = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
"""The smallest float32 above zero."""


def decoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    coder = codec.coder(SliceLayout.plain(values.numel()))
    out = torch.empty_like(values)
    coder.decode(coder.encode(values), out)
    return out


@pytest.mark.parametrize(("codec", "dtype"), [(Float16(), torch.float16), (BFloat16(), torch.bfloat16)])
def test_what_is_too_large_is_the_largest_and_the_rest_is_the_nearest(codec, dtype):
    most = torch.finfo(dtype).max
    values = torch.tensor([3.4e38, -3.4e38, 1 / 3, -0.0])
    assert decoded(codec, values).tolist() == [most, -most, torch.tensor(1 / 3).to(dtype).item(), 0.0]


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 300, 600])
def test_the_last_neighbors_have_their_own_scale(numel):
    values = torch.linspace(-1.0, 2.0, numel) * (1.0 + torch.arange(numel) // 256)
    for start in range(0, numel, 256):
        part = values[start : start + 256]
        assert (decoded(Int8(), values)[start : start + 256] - part).abs().max() <= part.abs().max() / 127 * 0.5001


def test_where_a_scale_is_too_small_to_be_exact_a_sign_is_kept():
    """190 of the smallest steps are 127 of its scale, and no 190, which wraps around to -66."""
    assert decoded(Int8(), torch.tensor([190 * TINY, -190 * TINY])).tolist() == [127 * TINY, -127 * TINY]


@pytest.mark.parametrize("value", [0.0, 50 * TINY])
def test_where_a_scale_is_zero_all_is_zero(value):
    """In the message too: what a division by zero would leave there is not the same everywhere."""
    assert Int8().coder(SliceLayout.plain(3)).encode(torch.full((3,), value)).tolist() == [0] * 7
    assert decoded(Int8(), torch.full((3,), value)).tolist() == [0.0] * 3


@pytest.mark.parametrize("codec", [Float16(), BFloat16(), Int8(), Sign()])
def test_a_sum_that_overflows_is_no_reason_to_refuse(codec):
    assert decoded(codec, torch.full((4,), 3e38)).isfinite().all()


def test_zero_counts_as_positive():
    assert decoded(Sign(), torch.tensor([0.0, -0.0, -1.0])).tolist() == [1.0, 1.0, -1.0]
