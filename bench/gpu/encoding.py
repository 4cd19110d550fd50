"""Codecs on the device: the time of encoding against that of the copy it saves (check 9), and their bytes (10).

    python bench/gpu/encoding.py [--only 9 10] [--pairs 15] [--json FILE]

9   Seconds to encode a gradient and copy the message to pinned memory, over those to copy the gradient there. Below 1
    the encoding is shorter than the copy that it saves. This has no bar: the report says which codec pays.
10  The same values are encoded on the CPU and on the device, three messages one after another. Codecs that treat each
    element alone must give the same bytes. Others add up values, in another order on each device; there the report has
    the largest difference of a decoded value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _check import Finding, Setting, exact_arithmetic, in_pairs, main, target

from dure.codec.coder import SliceLayout
from dure.run.strategy import make

ELEMENTWISE = (
    *("fp32", "fp16", "bf16", "int8", "sign", "ternary", "ternary:coding=planes", "strom:threshold=2"),
    *("top-k:share=0.01", "fp16+ef", "bf16+ef", "int8+ef"),
)
SUMMING = ("1bit", "it-sign", "sign:scaled=true+ef", "sign+momentum", "ternary+momentum")
MESSAGES = 3
COLUMN = 1000
"""Values of a column."""


def layout_of(numel: int) -> SliceLayout:
    bounds = (*range(0, numel, COLUMN), numel)
    return SliceLayout(numel, bounds, (True,) * (len(bounds) - 1))


def gradients(numel: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=draw) for _ in range(MESSAGES)]


# ---- 9


def seconds(setting: Setting) -> Iterator[Finding]:
    numel = setting.size(1 << 22, 1 << 12)
    values = gradients(numel)[0].to(target.of_rank(0))
    for text in (*ELEMENTWISE[1:], *SUMMING):
        yield _pays(text, values, setting)


def _pays(text: str, values: torch.Tensor, setting: Setting) -> Finding:
    coder = make(text, "codec").coder(layout_of(values.numel()))
    room = torch.empty(max(coder.most_bytes, values.nbytes), dtype=torch.uint8, pin_memory=True)

    def encoded() -> None:
        message = coder.encode(values)
        room[: message.numel()].copy_(message, non_blocking=True)

    whole = room[: values.nbytes].view(torch.float32)
    ratio = in_pairs(encoded, lambda: whole.copy_(values, non_blocking=True), setting)
    verdict = "shorter than the copy it saves" if ratio.median < 1 else "longer than the copy it saves"
    return Finding(f"{text}: encoding and copying the message over copying fp32", str(ratio), verdict, None)


# ---- 10


def messages(setting: Setting) -> Iterator[Finding]:
    exact_arithmetic()
    numel = setting.size(1 << 20, 1 << 12) + 5
    for text in ELEMENTWISE:
        different = sum(not torch.equal(one, other) for one, other, _ in _both(text, numel))
        measured = f"{different} of {MESSAGES} messages differ from the CPU's"
        yield Finding(f"{text}, bytes of messages", measured, "none may", different == 0)
    for text in SUMMING:
        apart = max(apart for _, _, apart in _both(text, numel))
        yield Finding(f"{text}, decoded values", f"differ from the CPU's by at most {apart:.2g}", "no bar", None)


def _both(text: str, numel: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Each message of the CPU and of the device, and how far apart their decoded values are."""
    codec, layout = make(text, "codec"), layout_of(numel)
    one, other = codec.coder(layout), codec.coder(layout)
    for values in gradients(numel):
        there = values.to(target.of_rank(0))
        mine, theirs = one.encode(values), other.encode(there)
        decoded, decoded_there = torch.empty_like(values), torch.empty_like(there)
        one.decode(mine, decoded)
        other.decode(theirs, decoded_there)
        yield mine, theirs.cpu(), float((decoded - decoded_there.cpu()).abs().max())


CHECKS = {9: seconds, 10: messages}

if __name__ == "__main__":
    main(__doc__, CHECKS)
