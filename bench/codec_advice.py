"""Which rate, threshold and share suit each codec: BSP of five workers on a small GPT over characters.

    python bench/codec_advice.py [--optimizer adamw] [--steps 200] [--only strom] [--json FILE]

A GPT of 2 layers of width 64 learns Python's own manual. Each worker draws mini-batches of 8 windows of 32 characters.
For each codec and setting the script looks for the rate with the lowest held-out loss after the last step: it starts at
the rate that suits float32, and goes on by factors of about 3 until the best rate lies between two others. Runs are in
virtual time, since only bytes and losses count. Float32 at its best rate is repeated with two more seeds: smaller
differences between losses are noise.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from _char_gpt import GPT, loss_of, text
from _script import parse, told

import dure
from dure.errors import DivergedError

LENGTH, BATCH, WORKERS = 32, 8, 5
STEP = math.sqrt(10)
START = {"adamw": 3.16e-3, "sgd": 0.316}
SIGNS = ("sign", "ternary", "it-sign")
SIGN_START = {"adamw": 3.16e-3, "sgd": 1e-3}
"""With SGD every coordinate of a vote moves by the rate, whatever the gradient."""

CODECS = (
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "1bit",
    *(f"strom:threshold={threshold}" for threshold in (1e-4, 1e-3, 1e-2)),
    *(f"top-k:share={share}" for share in (0.001, 0.01, 0.1)),
    "sign",
    "sign+momentum",
    "sign:scaled=true+ef",
    "ternary",
    "it-sign",
)


def job(optimizer: str, lr: float) -> dure.Job:
    """The language model, its text and the optimizer."""
    characters, vocabulary = text()
    split = len(characters) - 64 * LENGTH - 1
    return dure.Job(
        model=lambda: GPT(vocabulary, layers=2, width=64, length=LENGTH),
        loss=loss_of,
        train=dure.Stream(characters[:split], block=LENGTH, windows="random"),
        test=dure.Stream(characters[split:], block=LENGTH),
        batch_size=BATCH,
        optimizer=dure.OptimizerSpec(optimizer, lr=lr),
        name="char-gpt",
    )


class Losses:
    """Held-out losses of one codec and setting, by rate; `saved` is float32's bytes over those that were sent."""

    def __init__(self, codec: str, optimizer: str, steps: int) -> None:
        self.codec, self.optimizer, self.steps = codec, optimizer, steps
        self.saved = 1.0
        self._found: dict[float, float] = {}

    def at(self, lr: float, seed: int = 0) -> float:
        if seed or lr not in self._found:
            options = {"on": "virtual", "workers": WORKERS, "steps": self.steps, "eval_every": self.steps, "seed": seed}
            given = job(self.optimizer, lr)
            try:
                run = dure.train(given, strategy=f"bsp collective {self.codec}", **options)
            except DivergedError:
                loss = math.inf
            else:
                loss, numel = run.summary()["loss"], sum(each.numel() for each in given.model().parameters())
                ring = 2 * (WORKERS - 1) / WORKERS * 4 * numel
                self.saved = ring / run.summary()["bytes_per_step"]["sent"]
            if seed:
                return loss
            self._found[lr] = loss
        return self._found[lr]

    def best(self, start: float) -> float:
        """The rate of the lowest loss, with a worse rate on both sides."""
        best = start
        for factor in (STEP, 1 / STEP):
            while self.at(best * factor) < self.at(best):
                best *= factor
        return best


def measure(given: argparse.Namespace) -> list[dict[str, float | str]]:
    found: list[dict[str, float | str]] = []
    for codec in CODECS:
        if codec != "fp32" and not codec.startswith(given.only):
            continue
        losses = Losses(codec, given.optimizer, given.steps)
        rate = losses.best((SIGN_START if codec.startswith(SIGNS) else START)[given.optimizer])
        if codec == "fp32":
            base = rate
            seeds = [losses.at(rate, seed) for seed in (0, 1, 2)]
            print(f"fp32 at its best rate, three seeds: {', '.join(f'{loss:.3f}' for loss in seeds)}\n")
            print("| codec | best rate | over fp32's | loss | bytes: float32's over its |\n|---|---:|---:|---:|---:|")
        print(
            f"| `{codec}` | {rate:.2g} | {rate / base:.2g} | {losses.at(rate):.3f} | {losses.saved:.1f} |", flush=True
        )
        found.append({"codec": codec, "rate": rate, "loss": losses.at(rate), "saved": losses.saved})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=list(START), default="adamw")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default="", help="codecs whose text begins so, and fp32")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    given = parse(parser, steps=4, only="sign+")
    torch.set_num_threads(1)
    with told("codec_advice", given) as facts:
        facts["rows"] = measure(given)


if __name__ == "__main__":
    main()
