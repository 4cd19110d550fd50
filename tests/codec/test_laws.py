"""What holds for every codec, whatever is encoded."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wording import raising

from dure.codec.coder import FeedbackCoder, SliceLayout
from dure.codec.feedback import ErrorFeedback, Momentum
from dure.codec.floats import BFloat16, Float16, Int8
from dure.codec.fp32 import Float32
from dure.codec.one_bit import OneBit
from dure.codec.sign import Sign
from dure.codec.strom import Strom
from dure.codec.ternary import Ternary
from dure.codec.top_k import TopK
from dure.errors import DamagedMessage, DivergedError
from dure.run.strategy import make

FLOAT8 = Path(__file__).parents[2] / "examples" / "08_float8.py"

CODECS = {
    "fp32": Float32(),
    "fp16": Float16(),
    "bf16": BFloat16(),
    "int8": Int8(),
    "sign": Sign(),
    "scaled sign": Sign(scaled=True),
    "ternary": Ternary(),
    "ternary in planes": Ternary("planes"),
    "one bit": OneBit(feedback=False),
    "top-k": TopK(0.1, feedback=False),
    "strom": Strom(0.5),
    "strom, rice": Strom(0.5, "rice"),
    "one bit, fed back": OneBit(),
    "top-k, fed back": TopK(0.1),
    "scaled sign, fed back": ErrorFeedback(Sign(scaled=True)),
    "fp16, fed back": ErrorFeedback(Float16()),
    "signum": Momentum(Sign()),
    "random zeros": Sign(zeros="random"),
    "of a file": make(f"{FLOAT8}:Float8"),
}
FED_BACK = [name for name, codec in CODECS.items() if isinstance(codec.coder(SliceLayout.plain(1)), FeedbackCoder)]

ORDINARY = st.floats(-1e3, 1e3, width=32)
ODD = st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1.0, -1.0, 65504.0, -3e4])


@st.composite
def vectors(draw):
    """Flat float32 tensors of 0 to 300 elements: of all kinds, all equal, or every other element of a larger one."""
    values = draw(st.lists(ORDINARY | ODD, max_size=300))
    if draw(st.booleans()):
        values = [values[0]] * len(values) if values else []
    flat = torch.tensor(values, dtype=torch.float32)
    return torch.stack([flat, flat + 1]).t().reshape(-1)[::2] if draw(st.booleans()) else flat


def layout_of(numel, cut=7):
    """Columns of `cut` elements, the last of which is none."""
    bounds = [*range(0, numel, cut), numel] if numel else [0]
    return SliceLayout(numel, tuple(bounds), tuple(i < len(bounds) - 2 for i in range(len(bounds) - 1)))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=20, deadline=None)
@given(values=vectors())
def test_messages_are_bytes_within_their_bound_and_decode(name, values):
    coder = CODECS[name].coder(layout_of(values.numel()))
    before = values.clone()
    message = coder.encode(values)
    assert torch.equal(values, before)
    assert message.dtype == torch.uint8
    assert message.dim() == 1
    assert message.numel() <= coder.most_bytes
    out = torch.full_like(before, float("nan"))
    coder.decode(message, out)
    assert torch.isfinite(out).all()
    added = torch.ones_like(out)
    coder.accumulate(message, added, -2.0)
    torch.testing.assert_close(added, 1 - 2 * out, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FED_BACK)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), numel=st.integers(0, 60))
def test_what_is_lost_comes_later(name, data, numel):
    """All that was decoded and the residual add up to all that was given."""
    coder = CODECS[name].coder(layout_of(numel))
    given_so_far, decoded = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for _ in range(5):
        values = torch.tensor(data.draw(st.lists(ORDINARY, min_size=numel, max_size=numel)), dtype=torch.float32)
        out = torch.empty(numel)
        coder.decode(coder.encode(values), out)
        given_so_far += values.double()
        decoded += out.double()
    torch.testing.assert_close(decoded + coder.residual.double(), given_so_far, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("name", FED_BACK)
def test_nothing_at_all_is_lost_where_sums_are_exact(name):
    """Few bits, powers of two: bit for bit."""
    if name in ("fp16, fed back", "one bit, fed back", "scaled sign, fed back"):
        values = torch.tensor([1.0, -1.0, 1.0, 1.0])  # their means are exact
    else:
        values = torch.tensor([0.25, -0.5, 1.0, 0.125])
    coder = CODECS[name].coder(SliceLayout.plain(4))
    decoded = torch.zeros(4)
    for _ in range(8):
        coder.accumulate(coder.encode(values), decoded)
    assert torch.equal(decoded + coder.residual, 8 * values)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused_and_changes_nothing(name, wrong):
    coder = CODECS[name].coder(SliceLayout.plain(9))
    coder.encode(torch.ones(9))
    before = {key: tensor.clone() for key, tensor in coder.state().items()}
    values = torch.ones(9)
    values[4] = wrong
    with raising(DivergedError, "infinity"):
        coder.encode(values)
    assert all(torch.equal(tensor, before[key]) for key, tensor in coder.state().items())


def test_one_bit_stands_for_the_mean_of_its_sign_in_its_column():
    values, out = torch.randn(40, generator=torch.Generator().manual_seed(0)), torch.empty(40)
    values[:7] = values[:7].abs()  # a column of one sign
    coder = CODECS["one bit"].coder(layout_of(40))
    coder.decode(coder.encode(values), out)
    for column in range(5):
        mine = slice(7 * column, 7 * column + 7)
        for sign in (values[mine] >= 0, values[mine] < 0):
            assert out[mine][sign].tolist() == pytest.approx([values[mine][sign].mean().item()] * int(sign.sum()))
    assert torch.equal(out[35:], values[35:])


def test_strom_sends_what_reaches_the_threshold():
    out = torch.empty(4)
    coder = Strom(0.5).coder(SliceLayout.plain(4))
    coder.decode(coder.encode(torch.tensor([0.5, -0.5, 0.49, -0.49])), out)
    assert out.tolist() == [0.5, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("name", CODECS)
def test_enormous_numbers_stay_numbers(name):
    values = torch.full((4_000,), 1e30)
    values[::2] *= -1
    coder, decoded = CODECS[name].coder(SliceLayout.plain(4_000)), torch.empty(4_000)
    for _ in range(3):
        coder.decode(coder.encode(values), decoded)
        assert decoded.isfinite().all()


LARGEST = torch.finfo(torch.float32).max


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("signs", ["positive", "alternating", "turning", "one"])
def test_numbers_near_the_largest_are_decoded_as_numbers_or_refused(name, dtype, signs):
    """What a sender encodes, its receivers accept; sums, means, scales and residuals may not overflow on the way."""
    wider = dtype == torch.float64  # than what codecs send, as are residuals of such values
    for magnitude in {torch.finfo(dtype).max, LARGEST, LARGEST * (1 - 2**-24), LARGEST / 2}:
        values = torch.full((1_000,), magnitude, dtype=dtype)
        if signs == "alternating":
            values[::2] *= -1
        if signs == "one":
            values[1:] = 0.0
        coder, decoded = CODECS[name].coder(layout_of(1_000)), torch.empty(1_000, dtype=dtype)
        may_refuse = magnitude > LARGEST or name == "signum" or (wider and name in FED_BACK)
        with suppress(*((DivergedError,) if may_refuse else ())):
            for _ in range(3):
                coder.decode(coder.encode(values), decoded)
                assert decoded.isfinite().all()
                values = -values if signs == "turning" else values


def test_a_sum_that_overflows_is_still_of_numbers():
    values = torch.full((4,), 3e38)
    assert Sign().coder(SliceLayout.plain(4)).encode(values).tolist() == [15]


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_damage_is_refused_or_harmless(name, data):
    """Flipped bits, missing and added bytes: an error of ours, or finite values. Never a crash."""
    numel = data.draw(st.sampled_from([1, 9, 200]))
    coder = CODECS[name].coder(layout_of(numel))
    message = coder.encode(torch.randn(numel, generator=torch.Generator().manual_seed(numel)))
    kind = data.draw(st.sampled_from(["flip", "shorter", "longer", "other"]))
    if kind == "flip" and message.numel():
        place = data.draw(st.integers(0, message.numel() - 1))
        message[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "shorter":
        message = message[: data.draw(st.integers(0, message.numel()))]
    elif kind == "longer":
        message = torch.cat([message, torch.zeros(data.draw(st.integers(1, 9)), dtype=torch.uint8)])
    else:
        message = torch.tensor(list(data.draw(st.binary(max_size=300))), dtype=torch.uint8)
    out = torch.full((numel,), 7.0)
    try:
        coder.decode(message, out)
    except DamagedMessage:
        assert torch.equal(out, torch.full((numel,), 7.0))
    else:
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", CODECS)
def test_state_goes_on_where_it_was(name):
    rounds = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    whole = CODECS[name].coder(layout_of(40))
    messages = [whole.encode(values) for values in rounds]
    first, second = (CODECS[name].coder(layout_of(40)) for _ in range(2))
    for values in rounds[:3]:
        first.encode(values)
    second.restore({key: tensor.clone() for key, tensor in first.state().items()})
    assert all(torch.equal(second.encode(values), m) for values, m in zip(rounds[3:], messages[3:], strict=True))


def test_values_of_other_types_are_encoded_too():
    for codec in CODECS.values():
        coder = codec.coder(layout_of(30))
        values = torch.randn(30, dtype=torch.float64)
        out = torch.empty(30, dtype=torch.float64)
        coder.decode(coder.encode(values), out)
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("step", [-128, 100], ids=["step", "scale"])
def test_int8_refuses_messages_whose_values_would_not_be_finite(step):
    """A flipped bit of a scale can make a finite scale whose multiples are infinite."""
    coder = CODECS["int8"].coder(layout_of(9))
    message = coder.encode(torch.ones(9))
    largest = torch.finfo(torch.float32).max
    scale = largest / 127.9 if step == -128 else largest / 2
    message[0] = step % 256
    message[9:] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(DamagedMessage):
        coder.decode(message, torch.empty(9))


@pytest.mark.parametrize("name", CODECS)
def test_any_counts_of_signs_are_decoded(name):
    """As many zeros as positive elements, one sign alone, each as often: no count is taken for another."""
    for signs in ((1, 0, -1), (1, 1, 0, 0), (-1, -1), (0, 0), (1, 1), (0, -1, 1, 0, 1, -1)):
        values, out = torch.tensor(signs, dtype=torch.float32).repeat(3), torch.empty(3 * len(signs))
        coder = CODECS[name].coder(SliceLayout.plain(len(values)))
        message = coder.encode(values)
        assert message.numel() <= coder.most_bytes
        coder.decode(message, out)
        if name in ("ternary", "ternary in planes", "fp32", "of a file"):
            assert torch.equal(out, values)
