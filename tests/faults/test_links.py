"""A link that is down for a while between two hosts: all runs go on, and end as if it had not been down."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.purposes import long, soaked
from support.runs import virtual

from dure.report.run import read_run
from dure_studies import namespaces

STEPS = 600
OPTIONS = ["--on", "torchrun", "--steps", str(STEPS), "--eval-every", "40", "--seed", "3", "--dtype", "float64"]
ORDERED = ("bsp collective", "bsp collective:algorithm=ring", "bsp collective gpipe:stages=2")
"""Strategies whose models do not depend on the order in which messages arrive."""

FEW = ("bsp collective", "downpour ps:shards=2")
MANY = ("bsp collective:algorithm=ring", "bsp collective gpipe:stages=2")

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing()),
]


def begun(folder: Path) -> bool:
    """Whether a run has made its first steps."""
    history = folder / "history.jsonl"
    return history.exists() and history.read_text().count("\n") >= 2


def trained_over_a_link(strategies: Sequence[str], down_seconds: float, folder: Path) -> list[dict]:
    """The summaries of runs of all strategies at once; when all have begun, the link is down for some seconds."""
    runs = []
    with namespaces.hosts(2, bandwidth=125e6) as hosts:
        try:
            for number, strategy in enumerate(strategies):
                train = ["-m", "dure", "train", "digits-mlp", "--strategy", strategy, *OPTIONS]
                for rank in (0, 1):
                    out = ["--out", str(folder / str(number))] if rank == 0 else []
                    environ = {"MASTER_PORT": str(29500 + number), "OMP_NUM_THREADS": "1"}
                    command = hosts._command(rank, 1, [sys.executable, *train, *out], environ)
                    with (folder / f"{number}.{rank}.log").open("wb") as log:
                        runs.append(subprocess.Popen(command, stdout=log, stderr=log))
            until(lambda: all(begun(folder / str(number)) for number in range(len(strategies))), runs, folder)
            namespaces._ip(hosts.names[1], "link set eth0 down")
            time.sleep(down_seconds)
            assert not (folder / "0" / "summary.json").exists(), "the link was down after the end"
            namespaces._ip(hosts.names[1], "link set eth0 up")
            until(lambda: all(run.poll() is not None for run in runs), runs, folder)
        finally:
            for name in hosts.names:
                namespaces._end_all(name)
            for run in runs:
                run.wait(20)
    assert [run.returncode for run in runs] == [0] * len(runs), shown(folder)
    return [dict(read_run(folder / str(number)).summary()) for number in range(len(strategies))]


def until(over, runs, folder: Path, seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not over():
        assert time.monotonic() < end, shown(folder)
        assert not any(run.poll() for run in runs), shown(folder)
        time.sleep(0.1)


def shown(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.log")))


@pytest.mark.parametrize("down_seconds", [*long(6.0), *soaked(1.0, 3.0, 10.0, 20.0)])
@pytest.mark.parametrize("strategies", [FEW, *soaked((MANY,))])
def test_runs_go_on_after_a_link_has_been_down(strategies, down_seconds, tmp_path):
    for strategy, summary in zip(strategies, trained_over_a_link(strategies, down_seconds, tmp_path), strict=True):
        assert summary["seconds"] > down_seconds, strategy
        if strategy in ORDERED:
            undisturbed = virtual("digits-mlp", strategy, workers=2, steps=STEPS, seed=3, dtype="float64")
            assert summary["loss"] == pytest.approx(undisturbed.summary["loss"], rel=1e-9), strategy
        else:
            assert summary["updates_applied"] == 2 * STEPS, strategy
