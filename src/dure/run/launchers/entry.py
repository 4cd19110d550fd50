"""The program of a fork server (`runtime.launch.fork_server`): load a run's job once, and fork the run's processes."""

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
    setup, _ = resolve(TrainConfig.of(config))
    setup.prepare()
    return lambda **arguments: process.main(setup, process.LaunchSpec.of(**arguments))


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Ends(*map(int, sys.argv[1:])), load)
