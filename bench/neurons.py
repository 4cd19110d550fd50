"""Words and seconds of assignments of units to machines, computed from the assignments alone.

    python bench/neurons.py [--gflops 20] [--gbits 10] [--batch 32]

A locally connected network of three layers of 7 x 7 patches, 8 channels on a 64 x 64 grid, and a dense one of four
layers of 2048 units, on 2 to 16 machines: words that a sample sends forward and backward, the forecast of how many
times faster than one machine they are, and the share of time that they are idle. A word has four bytes.
"""

from __future__ import annotations

import argparse
import math

from torch import nn

from dure.job.models.local import LocallyConnected2d
from dure.partition.methods.neurons import Neurons
from dure.partition.neurons.layers import unit_model
from dure.partition.neurons.traffic import forecast, traffic, words_sent

BACKWARD = 2 / 3
CHOICES = {"random": {}, "even": {}, "cut": {}, "cut,slack=0.1": {"slack": 0.1}}


def local(side: int = 64, channels: int = 8, kernel: int = 7, depth: int = 3) -> nn.Sequential:
    shape, layers = (1, side, side), []
    for _ in range(depth):
        layers += [LocallyConnected2d(shape, channels, kernel), nn.Tanh()]
        shape = layers[-2].outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(math.prod(shape), 10))


def dense(width: int = 2048) -> nn.Sequential:
    hidden = [nn.Linear(width, width) for _ in range(3)]
    return nn.Sequential(nn.Linear(784, width), *hidden, nn.Linear(width, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("gflops", 20.0), ("gbits", 10.0), ("batch", 32.0)):
        parser.add_argument(f"--{name}", type=float, default=value)
    given = parser.parse_args()
    words_per_second = given.gbits * 1e9 / 32 / given.batch
    for model in (local(), dense()):
        layers, _ = unit_model(model)
        print(f"{sum(each.numel() for each in model.parameters()):,} parameters")
        for machines in (2, 4, 8, 16):
            for name, options in CHOICES.items():
                chosen = Neurons(machines, name.partition(",")[0], **options)
                found = traffic(layers, chosen.assigned(layers), machines)
                seconds = 6 * given.batch * sum(int(each.work.sum()) for each in found) / (given.gflops * 1e9)
                step = forecast(found, seconds, words_per_second, BACKWARD)
                forward, backward = words_sent(found)
                print(
                    f"{machines:3} {name:14} {forward:8,} {backward:8,} words   {seconds / step.seconds:5.2f} times   "
                    f"idle {step.idle:4.0%}"
                )


if __name__ == "__main__":
    main()
