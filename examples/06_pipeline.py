"""A pipeline: a model of your own, an `nn.Sequential`, in two stages on two processes.

An `nn.Sequential` is cut between its children. GPipe equals SGD, so the two processes end where one would.

python examples/06_pipeline.py
dure train examples/06_pipeline.py:spirals --partition gpipe:stages=2,micro=4 --workers 2
"""

import json
import subprocess
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dure

PARTITION = "gpipe:stages=2,micro=4"


def spirals(points: int = 300):
    """A job: points in the plane on three arms of a spiral, by arm."""
    way, arm = torch.linspace(0.1, 1, points), torch.arange(points) % 3
    angle = 5 * way + arm * (2 * torch.pi / 3)
    return dure.Job(
        model=lambda: nn.Sequential(
            nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
        ),
        loss=cross_entropy,
        train=dure.Data(torch.stack((way * angle.cos(), way * angle.sin()), dim=1), arm),
        accuracy=lambda outputs, targets: float((outputs.argmax(1) == targets).double().mean()),
        batch_size=60,
        optimizer=dure.OptimizerSpec("adam", lr=0.02),
        steps=150,
    )


def main():
    job = f"{__file__}:spirals"
    command = ["train", job, "--partition", PARTITION, "--workers", "2", "--eval-every", "150", "--json"]
    done = subprocess.run([sys.executable, "-m", "dure", *command], stdout=subprocess.PIPE, check=True)
    pipeline = json.loads(done.stdout.splitlines()[-1])
    alone = dure.train(job, on="virtual", workers=1, exact=True).summary()
    print("two stages learn the spirals:", pipeline["accuracy"] > 0.95)
    print("the loss of one process, within 1 %:", abs(pipeline["loss"] / alone["loss"] - 1) < 0.01)


if __name__ == "__main__":
    main()
