"""How often the host waits for the device while a codec works, as a table in Markdown. The stand-in counts.

    python -m accelerator.synchronizations

`decode` stands for `accumulate` too. `combine` is the work of an owner for `VOTERS` messages of one round: each of them
decoded or voted on, and the result encoded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerator import standin
from accelerator.codec_programs import CODECS, NUMEL, VOTERS, two_of, values_of

from dure.codec.exchange import Owner

COLUMNS = ("encode", "decode", "combine")


def waits(work: Callable[[], object]) -> int:
    """How often the host waited for the device in `work`."""
    before = torch.standin.synchronizations()
    work()
    return torch.standin.synchronizations() - before


def counts(text: str, device: str) -> tuple[int, int, int]:
    """The waits of a codec by `COLUMNS`, in a round after the first: a residual and reliabilities are there."""
    codec, layout, coder, _ = two_of(text)
    owner, out = Owner(codec, layout), torch.zeros(NUMEL, device=device)
    sent = {}
    for step in range(2):
        coders = [codec.coder(layout, seed) for seed in range(VOTERS)]
        values = [each.to(device) for each in values_of(count=VOTERS, seed=step)]
        sent = {i: each.encode(value) for i, (each, value) in enumerate(zip(coders, values, strict=True))}
        encode = waits(lambda values=values: coder.encode(values[0]))
        combine = waits(lambda sent=sent: owner.combine(sent))
    decode, accumulate = waits(lambda: coder.decode(sent[0], out)), waits(lambda: coder.accumulate(sent[0], out, 0.5))
    return encode, max(decode, accumulate), combine


def main() -> None:
    standin.register()
    print(f"| codec | {' | '.join(COLUMNS)} |")
    print(f"|---|{'---|' * len(COLUMNS)}")
    for text in CODECS:
        print(f"| {text} | {' | '.join(map(str, counts(text, 'standin')))} |")


if __name__ == "__main__":
    main()
