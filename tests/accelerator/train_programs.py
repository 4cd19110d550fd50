"""Runs of `dure train` with the device under test: `python -m accelerator.train_programs TASKS`.

TASKS is a JSON list. An object describes a run by `job` (a function of `train_jobs`), `strategy` and options; it is
carried out on the CPU and on the device, and a line says what both have delivered. A list is a command of `dure`; a
line has its exit status and what it has written. Under torchrun, commands write what they write.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerator import target
from support.runs import local

from dure.cli.main import main as command
from dure.errors import DureError
from dure.runtime.launch.fork_server import ForkServer

JOBS = Path(__file__).with_name("train_jobs.py")


def outcome(fork_server: ForkServer, device: str, *, job: str, strategy: str, **options: Any) -> dict[str, Any]:
    """What a run has delivered, or the error that ended it."""
    try:
        run = local(f"{JOBS}:{job}", strategy, fork_server=fork_server, device=device, **{"workers": 2} | options)
    except DureError as error:
        return {"error": str(error)}
    kept = {name: run.summary[name] for name in ("params_sha256", "bytes_sent", "updates_applied")}
    return {**kept, "loss": run.rows[-1]["loss"], "devices": run.summary.get("devices")}


def written(arguments: Sequence[str]) -> dict[str, Any]:
    """The exit status of a command, and its standard output and error."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        for descriptor, file in ((1, out), (2, errors)):
            os.dup2(file.fileno(), descriptor)
        try:
            status = command(arguments)
        finally:
            for descriptor, before in zip((1, 2), kept, strict=True):
                os.dup2(before, descriptor)
                os.close(before)
        texts = [(file.seek(0), file.read())[1] for file in (out, errors)]
    return {"status": status, "out": texts[0], "err": texts[1]}


def main() -> None:
    tasks = json.loads(sys.argv[1])
    if "RANK" in os.environ:
        target.prepare()
        sys.exit(max(map(command, tasks)))
    with ForkServer() as fork_server:
        for task in tasks:
            if isinstance(task, list):
                print(json.dumps(written(task)), flush=True)
            else:
                print(
                    json.dumps({device: outcome(fork_server, device, **task) for device in ("cpu", "auto")}), flush=True
                )


if __name__ == "__main__":
    main()
