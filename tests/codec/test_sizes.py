"""Bytes of messages, against closed forms and entropies."""

import math

import numpy as np
import pytest
import torch

from dure.codec import bits, gaps, top_k
from dure.codec.coder import SliceLayout
from dure.codec.floats import BFloat16, Float16, Int8
from dure.codec.one_bit import OneBit
from dure.codec.sign import Sign
from dure.codec.strom import Strom
from dure.codec.ternary import Ternary
from dure.codec.top_k import TopK, largest

N = 1_000_003


def size(codec, values, layout=None):
    return codec.coder(layout or SliceLayout.plain(values.numel())).encode(values).numel()


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, N])
def test_signs_are_a_bit_each(numel):
    assert size(Sign(), torch.randn(numel)) == math.ceil(numel / 8)
    assert size(Sign(scaled=True), torch.randn(numel)) == math.ceil(numel / 8) + 4


def test_floats():
    values = torch.randn(1000)
    assert size(Float16(), values) == size(BFloat16(), values) == 2000
    assert size(Int8(), values) == 1000 + 4 * 4


def test_one_bit_has_two_means_per_column():
    """A layer of 10 outputs with 100 inputs, and its bias."""
    layout = SliceLayout(1010, (*range(0, 1001, 100), 1010), (True,) * 10 + (False,))
    assert size(OneBit(), torch.randn(1010), layout) == 125 + 4 * (2 * 10 + 10)


@pytest.mark.parametrize("zeros", [0.0, 0.3, 0.9, 0.99])
def test_ternary_signs_are_near_their_entropy(zeros):
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(N, generator=generator) * (torch.rand(N, generator=generator) >= zeros)
    shares = [float((torch.sign(values) == sign).double().mean()) for sign in (-1, 0, 1)]
    entropy = -sum(share * math.log2(share) for share in shares if share)
    assert size(Ternary(), values) * 8 <= 1.02 * entropy * N
    assert size(Ternary("planes"), values) == 2 * math.ceil(N / 8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.05])
@pytest.mark.parametrize(("coding", "slack"), [("range", 1.03), ("rice", 1.08)])
def test_gaps_are_near_their_empirical_entropy(density, coding, slack):
    numel = 20_000_000
    positions = np.flatnonzero(np.random.default_rng(0).random(numel) < density)
    found = np.diff(positions, prepend=-1) - 1
    counts = np.unique(found, return_counts=True)[1]
    entropy = -(counts / found.size * np.log2(counts / found.size)).sum() * found.size
    message = gaps.encode(positions, numel, coding)
    assert entropy <= message.size * 8 <= slack * entropy
    assert np.array_equal(gaps.decode(message, numel, coding), positions)


@pytest.mark.parametrize("coding", ["range", "rice"])
@pytest.mark.parametrize("numel", [1, 2, 100, 1000])
def test_positions_at_every_density(coding, numel):
    whole = np.arange(numel)
    for positions in (whole[:0], whole[:1], whole[-1:], whole, whole[::2], np.array(sorted({0, numel - 1}))):
        message = gaps.encode(positions, numel, coding)
        assert message.size <= gaps.most_bytes(numel, positions.size)
        assert np.array_equal(gaps.decode(message, numel, coding), positions)


@pytest.mark.parametrize("coding", ["range", "rice"])
def test_one_far_position_among_many_near_ones(coding):
    """A quotient that has no symbol of its own."""
    positions = np.array([*range(1000), 9_999_999])
    message = gaps.encode(positions, 10_000_000, coding)
    assert np.array_equal(gaps.decode(message, 10_000_000, coding), positions)


def test_a_threshold_sends_signs_and_positions():
    values = torch.zeros(N)
    values[::1000] = 1.0
    coder = Strom(0.5).coder(SliceLayout.plain(N))
    sent = 1001
    out = torch.empty(N)
    message = coder.encode(values)
    coder.decode(message, out)
    assert message.numel() <= 4 + bits.nbytes(sent) + gaps.HEADER + sent * 11.5 / 8 + 8
    assert torch.equal(out, values * 0.5)
    assert torch.equal(coder.residual, values * 0.5)


def test_top_k_sends_the_largest():
    values = torch.arange(-60.0, 40.0)
    out = torch.empty(100)
    coder = TopK(0.03, feedback=False).coder(SliceLayout.plain(100))
    coder.decode(coder.encode(values), out)
    assert torch.nonzero(out).view(-1).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("numel", "count"), [(0, 0), (1, 1), (50, 7), (50, 50), (1000, 300)])
def test_the_largest_are_found_and_of_equal_ones_the_first(numel, count, dtype):
    values = torch.randn(numel).mul(4).round().to(dtype)  # many are equal, zeros of both signs among them
    ranked = sorted(range(numel), key=lambda place: (-abs(values[place].item()), place))
    assert largest(values, count).tolist() == sorted(ranked[:count])
    if count:
        assert top_k._largest_by_operations(values.abs(), count).tolist() == sorted(ranked[:count])


def test_packing_by_operations_is_packing():
    """What other devices do, done here."""
    values = torch.randn(1001)
    packed = bits.pack_signs(values)
    assert torch.equal(bits._pack_by_operations(values >= 0), packed)
    assert torch.equal(bits._unpack_by_operations(packed, 1001), values >= 0)
    votes = [bits.pack_signs(torch.randn(1001)) for _ in range(5)]
    assert torch.equal(bits._reaches(bits._count(votes), 3), bits.at_least(votes, 3))
