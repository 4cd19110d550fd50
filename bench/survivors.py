"""How long the others of a group stand still when one of them is killed or stopped: dure's `bsp collective`, torchft.

    python bench/survivors.py [--runs 50] [--stopped 15] [--workers 4] [--steps 250] [--json FILE]

Each run trains one small model on processes of this machine. At a random moment, the same in the runs of both sides,
one random process gets SIGKILL, or SIGSTOP in the last `--stopped` runs. The *pause* is the longest time without a step
of a survivor after that. A run is *right* if all survivors have made all steps and have the same model, bit for bit.

|                                    | dure                     | torchft                                              |
|------------------------------------|--------------------------|------------------------------------------------------|
| sum                                | Gloo, one flat gradient  | `ProcessGroupGloo`, one flat gradient                |
| a process is given up, if stopped  | `--frozen-after 2`       | heartbeat limit of the lighthouse 2 s, Gloo limit 3 s|
| steps lost                         | gradients that were computed again | gradients of steps that were not committed |

torchft's replica groups have one process each. Its survivors learn of a death by the lighthouse's missing heartbeats.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _noted_steps import BATCH, LR, SUFFIX, data, model, note, times
from _script import PATH, absent, parse, told
from torch import nn

FROZEN_AFTER = 2.0
GLOO_LIMIT = timedelta(seconds=3)
WITHOUT_TORCHFT = absent("torchft", "bench")
BEGUN = 5
"""Steps that every process has made before one is killed."""

LIMIT_SECONDS = 300.0


class Ended(NamedTuple):
    """The result of a run with one kill: the longest pause of a survivor, steps lost, and whether it was right."""

    pause: float
    lost: int
    right: bool


Start = Callable[[Path, int, int], "subprocess.Popen[bytes]"]
"""Starts a side in a folder, with so many processes and steps; it has ended once the process has."""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{PATH}{os.pathsep}{Path(__file__).parent}", "OMP_NUM_THREADS": "1"}


# ---- the sides


def start_dure(folder: Path, workers: int, steps: int) -> subprocess.Popen[bytes]:
    job = f"{Path(__file__).parent / '_noted_steps.py'}:noted"
    options = {"strategy": "bsp", "on": "local", "workers": workers, "steps": steps, "data": folder}
    options |= {"frozen-after": FROZEN_AFTER, "eval-every": steps, "out": folder / "run"}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "dure", "train", job, *words, "--no-replace"]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def start_torchft(folder: Path, workers: int, steps: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--lead", str(folder), "--workers", str(workers), "--steps", str(steps)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def lead_torchft(folder: Path, workers: int, steps: int) -> None:
    """Hold the lighthouse, and wait for the replica groups."""
    from torchft.coordination import LighthouseServer

    limits = {"join_timeout_ms": 100, "quorum_tick_ms": 10, "heartbeat_timeout_ms": int(FROZEN_AFTER * 1000)}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, **limits)
    command = [sys.executable, __file__, "--train", str(folder), "--steps", str(steps), "--workers", str(workers)]
    command += ["--lighthouse", lighthouse.address(), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment()) for rank in range(workers)]
    while any(rank.poll() is None and not is_stopped(rank.pid) for rank in ranks):
        time.sleep(0.05)
    for rank in ranks:
        rank.kill()
        rank.wait()
    lighthouse.shutdown()


def train_torchft(folder: Path, workers: int, steps: int, rank: int, lighthouse: str) -> None:
    """One replica group of one process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    os.environ.setdefault("RUST_LOG", "error")
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=GLOO_LIMIT),
        load_state_dict=lambda state: module.load_state_dict(state),
        state_dict=module.state_dict,
        min_replica_size=1,
        timeout=GLOO_LIMIT,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"survivors_{rank}",
        hostname="127.0.0.1",
    )
    meet(folder, workers, rank)
    inputs, targets = data()
    draw = torch.Generator().manual_seed(rank)
    while manager.current_step() < steps:
        rows = torch.randint(len(inputs), (BATCH,), generator=draw)
        manager.start_quorum()
        optimizer.zero_grad()
        note(folder)
        ((module(inputs[rows]) - targets[rows]) ** 2).mean().backward()
        flat = torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])
        manager.allreduce(flat).wait()
        nn.utils.vector_to_parameters(flat, [each.grad for each in module.parameters() if each.grad is not None])
        if manager.should_commit():
            optimizer.step()
    (folder / f"{os.getpid()}.model").write_bytes(digest(module))
    os._exit(0)  # the shutdown of a manager may wait for a stopped one


def meet(folder: Path, workers: int, rank: int) -> None:
    """Wait for the other replica groups, so that all make the first step together."""
    (folder / f"here {rank}").touch()
    while len(list(folder.glob("here *"))) < workers:
        time.sleep(0.01)


def digest(module: nn.Module) -> bytes:
    return hashlib.sha256(nn.utils.parameters_to_vector(module.parameters()).detach().numpy().tobytes()).digest()


# ---- one run


def run(start: Start, seed: int, *, stops: bool, workers: int, steps: int) -> Ended:
    """Kill or stop one process of a run at a random moment."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="survivors-") as name:
        folder = Path(name)
        process = start(folder, workers, steps)
        try:
            pids = begun(folder, workers, process)
            time.sleep(chance.uniform(0.0, 0.5))
            victim, at = chance.choice(pids), time.monotonic()
            os.kill(victim, signal.SIGSTOP if stops else signal.SIGKILL)
            process.wait(LIMIT_SECONDS)
        finally:
            process.kill()
            process.wait()
        return judged(folder, [pid for pid in pids if pid != victim], at, steps)


def begun(folder: Path, workers: int, process: subprocess.Popen[bytes]) -> list[int]:
    """The process ids of the workers, once all of them have made some steps."""
    last = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < last and process.poll() is None:
        # a process that only tries the job before a run notes one or two steps
        found = sorted(int(path.stem) for path in folder.glob(f"*{SUFFIX}") if len(times(path)) >= BEGUN)
        if len(found) == workers:
            return found
        time.sleep(0.01)
    raise SystemExit("the processes did not begin to train.")


def judged(folder: Path, survivors: Sequence[int], at: float, steps: int) -> Ended:
    noted = [times(folder / f"{pid}{SUFFIX}") for pid in survivors]
    pauses = [late - early for each in noted for early, late in itertools.pairwise(each) if late > at]
    models = {path.read_bytes() for path in folder.glob("*.model")}
    whole = all(len(each) >= steps for each in noted)
    alike = len(models) == 1
    if (folder / "run").exists():  # of dure, which delivers one model and compares none: its steps must be all
        summary = json.loads((folder / "run" / "summary.json").read_text())
        alike = summary["steps"] == steps and len(summary["generations"]) >= 2
    return Ended(max(pauses), max(len(each) for each in noted) - steps, whole and alike)


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


# ---- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--stopped", type=int, default=15)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--json", type=Path)
    for inner in ("--lead", "--train", "--lighthouse"):
        parser.add_argument(inner, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parse(parser, runs=2, stopped=1, workers=2, steps=200)
    if given.lead:
        lead_torchft(Path(given.lead), given.workers, given.steps)
        return
    if given.train:
        train_torchft(Path(given.train), given.workers, given.steps, given.rank, given.lighthouse)
        return
    sides: dict[str, Start] = {"dure bsp collective": start_dure}
    if WITHOUT_TORCHFT:
        print(WITHOUT_TORCHFT)
    else:
        sides["torchft 0.2.0"] = start_torchft
    found: dict[tuple[str, str], list[Ended]] = {}
    with told("survivors", given) as facts:
        for seed in range(given.runs):
            stops = seed >= given.runs - given.stopped
            for side, start in sides.items():
                ended = run(start, seed, stops=stops, workers=given.workers, steps=given.steps)
                found.setdefault((side, "SIGSTOP" if stops else "SIGKILL"), []).append(ended)
        facts["rows"] = [row(*key, each) for key, each in found.items()]
        print_rows(facts["rows"])


def row(side: str, event: str, ended: Sequence[Ended]) -> dict[str, Any]:
    pauses = [each.pause for each in ended]
    return {
        "side": side,
        "event": event,
        "runs": len(ended),
        "right": sum(each.right for each in ended),
        "pause_median": statistics.median(pauses),
        "pause_most": max(pauses),
        "steps_lost_median": statistics.median(each.lost for each in ended),
        "steps_lost_most": max(each.lost for each in ended),
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'side':>20} {'event':>8} {'right':>9} {'pause, median':>14} {'most':>8} {'steps lost':>11} {'most':>5}")
    for each in rows:
        print(
            f"{each['side']:>20} {each['event']:>8} {each['right']:>3} of {each['runs']:>2} "
            f"{each['pause_median']:12.3f} s {each['pause_most']:6.3f} s "
            f"{each['steps_lost_median']:11g} {each['steps_lost_most']:5}"
        )


if __name__ == "__main__":
    main()
