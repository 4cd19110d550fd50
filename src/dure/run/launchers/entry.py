"""The program of a fork server (`runtime.launch.fork_server`): builds a run's set-up once and forks its processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dure.run import process_main
from dure.run.resolve import rebuild
from dure.runtime.launch.fork_server import Ends, serve


def load(values: Mapping[str, Any]) -> Callable[..., None]:
    """Build the set-up of a run from its plain `values`; returns the main function of the run's processes."""
    setup = rebuild(values)
    setup.prepare()
    return lambda **arguments: process_main.main(setup, process_main.LaunchSpec.of(**arguments))


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Ends(*map(int, sys.argv[1:])), load)
