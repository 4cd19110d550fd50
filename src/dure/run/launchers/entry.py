"""The program of a nursery: it loads a run's job once, and forks the run's processes (`runtime.launch.nursery`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dure.run import process
from dure.run.config import TrainConfig
from dure.run.resolve import resolve
from dure.runtime.launch.fork_server import Ends, serve


def load(config: Mapping[str, Any]) -> Callable[..., None]:
    """What each process of a run with this configuration (plain) does with its arguments."""
    task, _ = resolve(TrainConfig.of(config))
    task.prepare()
    return lambda **arguments: process.main(task, process.Start.of(**arguments))


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Ends(*map(int, sys.argv[1:])), load)
