"""Add a method: post-local SGD, which dure does not contain, as one class in its own file.

Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020: average gradients at first, while
they are large and their direction matters; average models later, when bytes matter more.

    for t = 1, 2, 3, ...                              at every worker k
        if t <= switch     w    <- Opt(w, mean over workers of the gradient at w)
        else               w_k  <- Opt(w_k, gradient at w_k)
                           every period steps:  w_k  <- mean over workers of w
"""

from dataclasses import dataclass
from typing import ClassVar

import dure


@dataclass(frozen=True, slots=True)
class PostLocal:
    """BSP for the first `switch` steps, then local SGD that averages every `period`."""

    switch: int = 50
    period: int = 8

    traits: ClassVar[dure.Traits] = dure.Traits(needs=("group",), lockstep=True, delivers="mean", keeps={})

    async def work(self, worker):
        try:
            while worker.clock < self.switch:
                worker.step(await worker.mean_gradient())
            while True:
                worker.step(await worker.gradient())
                if worker.clock % self.period == 0:
                    await worker.group.mean_params()
        except dure.EndOfWork:
            await worker.group.mean_params()


if __name__ == "__main__":
    print(f"{'method':38}{'accuracy':>9}{'megabytes':>11}")
    for sync in ("bsp", "averaging:period=8", f"{__file__}:PostLocal:switch=50"):
        run = dure.train("digits-mlp", sync=sync, on="virtual", workers=4, steps=150, lr=0.4)
        figures = run.summary()
        name = sync.rpartition("/")[2]
        print(f"{name:38}{figures['accuracy']:9.3f}{figures['bytes_sent'] / 1e6:11.1f}")
