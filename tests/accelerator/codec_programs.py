"""Programs that hold every codec on the device against itself on the CPU, and count the host's waits for the device.

    python -m accelerator.codec_programs        one line of JSON per program and codec: program, codec, outcome

The outcome is `right`, or the error. On the stand-in the CPU's kernels compute, so that everything is equal bit for
bit. On other devices the order of a sum may differ, and with it the last bits of the codecs in `SUMS`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import torch
from accelerator import target
from torch import Tensor

from dure.codec.base import Codec
from dure.codec.coder import Coder, SliceLayout
from dure.codec.exchange import Owner
from dure.errors import DamagedMessage, DivergedError
from dure.run.strategy import make

CODECS = (
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "1bit",
    "1bit:feedback=false",
    "strom:threshold=0.5",
    "strom:threshold=0.5,coding=rice",
    "top-k:share=0.1",
    "top-k:share=0.1,feedback=false",
    "sign",
    "sign:zeros=random",
    "sign:scaled=true",
    "sign:scaled=true,zeros=random",
    "ternary",
    "ternary:coding=planes",
    "it-sign",
    "it-sign:granularity=coordinate,start=1",
    "it-sign:zeros=random,start=1",
    "fp16+ef",
    "bf16+ef",
    "int8+ef",
    "sign:scaled=true+ef",
    "sign+momentum",
    "ternary+momentum",
    "it-sign+momentum",
)
SUMS = ("1bit", "sign:scaled=true", "it-sign")
"""Codecs whose messages or votes depend on a sum."""

VOTERS = 3
ROUNDS = 4
NUMEL = 3001
LONG = 300_003
"""Elements of more than one block on the CPU, also for the columns of one width."""

PROGRAMS: dict[str, Callable[[str, str], None]] = {}


def program(function: Callable[[str, str], None]) -> Callable[[str, str], None]:
    PROGRAMS[function.__name__] = function
    return function


def layout_of(numel: int) -> SliceLayout:
    """Two matrices of different width, and a bias after each."""
    half, bounds, is_column = numel // 2, [0], []
    for start, stop, width in ((0, half, 7), (half, numel, 300)):
        bias = min(5, stop - start)
        ends = [*range(start + width, stop - bias, width), stop - bias, stop]
        ends = [end for before, end in zip([start, *ends], ends, strict=False) if end > before]
        bounds += ends
        is_column += [True] * (len(ends) - 1) + [False] * (len(ends) > 0)
    return SliceLayout(numel, tuple(bounds), tuple(is_column))


def values_of(numel: int = NUMEL, count: int = ROUNDS, seed: int = 0) -> list[Tensor]:
    """Values of all kinds: zeros of both signs, many equal ones, tiny and large ones, a long stretch of zeros."""
    drawn = torch.randn(count, numel, generator=torch.Generator().manual_seed(seed))
    drawn[:, ::5] = 0.0
    drawn[:, 1::5] = -0.0
    drawn[:, 2::5] = drawn[:, 2::5].round()
    drawn[:, 3:50:5] *= 1e-41
    drawn[:, 4:50:5] *= 1e6
    drawn[:, 1000:1600] = 0.0
    return list(drawn)


def same(one: Tensor, other: Tensor, text: str) -> None:
    """Raises where two results differ. `text` is the codec's."""
    one, other = one.cpu(), other.cpu()
    if target.device_type() == "standin" or not text.startswith(SUMS):
        assert one.shape == other.shape, f"{tuple(one.shape)}, not {tuple(other.shape)}"
        assert torch.equal(one, other), f"{int((one != other).sum())} of {one.numel()} differ"
    elif one.is_floating_point() and one.numel():
        share = torch.isclose(one, other, rtol=1e-4, atol=1e-5).float().mean().item()
        assert share > 0.99, f"{share:.1%} are close"  # a residual of nearly zero may have either sign


def decoded(coder: Coder, message: Tensor, like: Tensor) -> Tensor:
    out = torch.full((coder.numel,), torch.nan, device=like.device, dtype=like.dtype)
    coder.decode(message, out)
    return out


def two_of(text: str, numel: int = NUMEL) -> tuple[Codec, SliceLayout, Coder, Coder]:
    """The codec, and a coder for each of CPU and device."""
    codec: Codec = make(text, "codec")
    layout = layout_of(numel)
    return codec, layout, codec.coder(layout, seed=3), codec.coder(layout, seed=3)


def refused(work: Callable[[], object]) -> str:
    """The text of the error that `work` raises; empty if it raises none."""
    try:
        work()
    except (DivergedError, DamagedMessage) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- what is equal on both ---


@program
def messages(text, device):
    """Encoded on the device, the same bytes, there; decoded and accumulated there, the same values."""
    for numel, count in ((NUMEL, ROUNDS), (LONG, 2), (8, 2), (1, 2), (0, 1)):
        _, _, on_cpu, on_device = two_of(text, numel)
        for values in values_of(numel, count):
            placed = values.to(device)
            expected, message = on_cpu.encode(values), on_device.encode(placed)
            assert message.device == placed.device
            assert message.dtype == torch.uint8
            assert torch.equal(placed.cpu(), values), "the values changed"
            same(message, expected, text)
            same(decoded(on_device, message, placed), decoded(on_cpu, expected, values), text)
            added, summed = torch.ones(numel), torch.ones(numel, device=device)
            on_cpu.accumulate(expected, added, 0.3)
            on_device.accumulate(message, summed, 0.3)
            same(summed, added, text)


@program
def other_types(text, device):
    """Values of half and of double precision."""
    for dtype in (torch.float16, torch.float64):
        _, _, on_cpu, on_device = two_of(text)
        for values in values_of(count=2):
            values = (values / 1000).to(dtype)
            expected, message = on_cpu.encode(values), on_device.encode(values.to(device))
            same(message, expected, text)
            same(decoded(on_device, message, values.to(device)), decoded(on_cpu, expected, values), text)


@program
def results_of_an_owner(text, device):
    """The mean or the vote of messages, over several rounds: the owner has a residual or reliabilities."""
    codec, layout, _, _ = two_of(text)
    on_cpu, on_device = Owner(codec, layout), Owner(codec, layout)
    coders = [[codec.coder(layout, seed) for seed in range(VOTERS)] for _ in range(2)]
    for step in range(ROUNDS):
        gradients = values_of(count=VOTERS, seed=step)
        sent = {i: coders[0][i].encode(values) for i, values in enumerate(gradients)}
        there = {i: coders[1][i].encode(values.to(device)) for i, values in enumerate(gradients)}
        expected, combined = on_cpu.combine(sent), on_device.combine(there)
        assert combined.device.type == device
        same(combined, expected, text)


@program
def votes_on_decoded_signs(text, device):
    """`settle`, by which a server votes on updates that it has decoded."""
    codec, _, on_cpu, on_device = two_of(text)
    here, there = codec.vote(), codec.vote()
    if here is None or there is None:
        return
    for step in range(ROUNDS):
        signs = [values.sign() for values in values_of(count=VOTERS, seed=step)]
        expected = here.settle(dict(enumerate(signs)), on_cpu)
        verdict = there.settle({i: sign.to(device) for i, sign in enumerate(signs)}, on_device)
        same(verdict, expected, text)


# --- checkpoints ---


@program
def from_the_cpu_to_the_device_and_back(text, device):
    """A coder and an owner that change devices after every round, by way of a checkpoint, encode what others do."""
    codec, layout, whole, moved = two_of(text)
    owner, moved_owner = Owner(codec, layout), Owner(codec, layout)
    for step, (values, place) in enumerate(zip(values_of(), ("cpu", device, "cpu", device), strict=True)):
        expected, message = whole.encode(values), moved.encode(values.to(place))
        same(message, expected, text)
        votes = {i: codec.coder(layout, i).encode(each) for i, each in enumerate(values_of(count=VOTERS, seed=step))}
        there = {i: vote.to(place) for i, vote in votes.items()}
        same(moved_owner.combine(there), owner.combine(votes), text)
        kept = [keeper.state() for keeper in (moved, moved_owner)]
        assert all(tensor.device.type == "cpu" for state in kept for tensor in state.values())
        moved, moved_owner = codec.coder(layout), Owner(codec, layout)
        moved.restore(kept[0])
        moved_owner.restore(kept[1])
    for one, other in ((moved, whole), (moved_owner, owner)):
        assert one.state().keys() == other.state().keys()
        for key, tensor in other.state().items():
            same(one.state()[key], tensor, text)


# --- what is refused ---


@program
def not_a_number(text, device):
    """NaN and infinity are refused with the error of the CPU, and leave the coder as it was."""
    _, _, on_cpu, on_device = two_of(text)
    rounds = values_of()
    for values in rounds[:2]:
        on_cpu.encode(values)
        on_device.encode(values.to(device))
    before = {key: tensor.clone() for key, tensor in on_device.state().items()}
    for place in (0, 1234, NUMEL - 1):
        for wrong in (torch.nan, torch.inf, -torch.inf):
            values = rounds[2].clone()
            values[place] = wrong
            error = refused(lambda values=values: on_cpu.encode(values))
            assert "NaN or infinity" in error
            assert refused(lambda values=values: on_device.encode(values.to(device))) == error
    assert all(torch.equal(tensor, before[key]) for key, tensor in on_device.state().items())
    for values in rounds[2:]:
        same(on_device.encode(values.to(device)), on_cpu.encode(values), text)


@program
def enormous_numbers(text, device):
    """Sums, means and residuals may overflow on the way; float64 may exceed what the codec sends."""
    most = torch.finfo(torch.float32).max
    for dtype, factor in ((torch.float32, 1.0), (torch.float32, 0.6), (torch.float64, 1.5), (torch.float64, 0.7)):
        _, _, on_cpu, on_device = two_of(text)
        for turn in (1, 1, -1):
            values = torch.full((NUMEL,), turn * factor, dtype=dtype) * most
            values[::3] *= -1
            messages: list[Tensor] = []
            placed = values.to(device)
            error = refused(lambda encode=on_cpu.encode, values=values, kept=messages: kept.append(encode(values)))
            there = refused(lambda encode=on_device.encode, values=placed, kept=messages: kept.append(encode(values)))
            assert there == error
            if error:
                break  # what a residual holds after this error is not defined
            out = decoded(on_device, messages[1], placed)
            assert out.isfinite().all()
            torch.testing.assert_close(out.cpu(), decoded(on_cpu, messages[0], values), rtol=1e-6, atol=0)


@program
def damage(text, device):
    """A damaged message is refused as on the CPU, or decodes to the same values."""
    _, _, on_cpu, on_device = two_of(text)
    whole = on_cpu.encode(values_of()[0])
    size = whole.numel()
    random = torch.Generator().manual_seed(5)
    for place in (0, 3, 4, 5, size // 2, size - 5, size - 2, size - 1, size, size + 1):
        message = whole[:place] if place < size else torch.cat([whole, torch.zeros(place - size, dtype=torch.uint8)])
        flipped = whole.clone()
        flipped[min(place, size - 1)] ^= int(torch.randint(1, 256, (1,), generator=random))
        for damaged in (message, flipped):
            out, there = torch.zeros(NUMEL), torch.zeros(NUMEL, device=device)
            error = refused(lambda damaged=damaged, out=out: on_cpu.decode(damaged, out))
            found = refused(lambda damaged=damaged, there=there: on_device.decode(damaged.to(device), there))
            assert found == error, f"{found or 'accepted'}, not {error or 'accepted'}"
            assert torch.equal(there.cpu(), out)


@program
def message_on_the_host(text, device):
    """A message that lies on the host is decoded to values on the device."""
    _, _, on_cpu, on_device = two_of(text)
    for values in values_of(count=2):
        message = on_cpu.encode(values)
        out = decoded(on_device, message, values.to(device))
        assert torch.equal(out.cpu(), decoded(on_cpu, message, values))


# --- the host ---


def waits(work: Callable[[], object]) -> int:
    """How often the host waits for the stand-in in `work`."""
    before: int = torch.standin.synchronizations()
    work()
    return torch.standin.synchronizations() - before


@program
def the_host_waits_once_per_message(text, device):
    """Once for each message that is encoded, decoded or voted on; `strom` asks for the number of its elements, too.

    Counted in the second round, when residuals and reliabilities are there.
    """
    if device != "standin":
        return
    codec, layout, coder, _ = two_of(text)
    owner, out = Owner(codec, layout), torch.zeros(NUMEL, device=device)
    once = 2 if text.startswith("strom") else 1
    learns = text.startswith("it-sign")  # from the elements whose decision changed; the device knows how many
    for step in range(2):
        gradients = [values.to(device) for values in values_of(count=VOTERS, seed=step)]
        sent = {i: codec.coder(layout, i).encode(values) for i, values in enumerate(gradients)}
        encode = waits(lambda values=gradients[0]: coder.encode(values))
        combine = waits(lambda sent=sent: owner.combine(sent))
    decode, accumulate = waits(lambda: coder.decode(sent[0], out)), waits(lambda: coder.accumulate(sent[0], out, 0.5))
    assert encode <= once, f"{encode} to encode"
    assert decode <= 1, f"{decode} to decode"
    assert accumulate <= 1, f"{accumulate} to accumulate"
    assert combine <= VOTERS + once + learns, f"{combine} to combine {VOTERS} messages"


def outcome(function: Callable[[str, str], None], text: str, device: str) -> str:
    try:
        function(text, device)
    except Exception as error:  # noqa: BLE001  (any error is an outcome)
        return f"{type(error).__name__}: {str(error)[:300]}"
    return "right"


def main(chosen: Sequence[str]) -> None:
    device = target.prepare()
    for name, function in PROGRAMS.items():
        for text in chosen:
            print(json.dumps([name, text, outcome(function, text, device)]))


if __name__ == "__main__":
    main(sys.argv[1:] or CODECS)
