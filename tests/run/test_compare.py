"""Several strategies in one call, however they are given."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.wording import raising

import dure
from dure.errors import UsageError
from dure.report import read_run
from dure.runtime.virtual.cluster import Cluster, SharedHost


def compared(folder: Path, *strategies: str, **options: Any) -> list[str]:
    given = {"on": "virtual", "workers": 2, "steps": 2, "report": folder / "report.html"}
    found = dure.compare("digits-mlp", *strategies, **given, **options)
    return [run.summary()["strategy"]["sync"] for run in found.runs]


@pytest.mark.long
def test_strategies_are_given_one_by_one_or_by_name(tmp_path: Path) -> None:
    both = ["bsp", "ssp:bound=3"]
    assert compared(tmp_path, *both) == compared(tmp_path, strategies=both) == both
    assert compared(tmp_path, strategies="bsp") == ["bsp"]


def test_not_both(tmp_path: Path) -> None:
    with raising(UsageError, "bsp"):
        compared(tmp_path, "bsp", strategies=["ssp"])


def test_the_progress_of_strategies_that_differ_at_their_end_tells_them_apart(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # the bar of a terminal, which is drawn for short runs, too
    compared(tmp_path, "averaging:period=8", "averaging:period=16")
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", capsys.readouterr().err)
    assert set(re.findall(r"(\S+) \(virtual\)", shown)) == {"ave…period=8", "ave…eriod=16"}


def test_a_virtual_run_tells_its_machines(tmp_path: Path) -> None:
    lab = tmp_path / "lab.yaml"
    lab.write_text("{machines: [{count: 1}, {count: 1, speed: 0.4}], link: {bandwidth: 100 Mbit/s}}")
    run = dure.train("digits-mlp", on=str(lab), steps=2)
    assert run.summary()["machines"] == f"{lab}: 2 machines of 2 kinds, links of 100 Mbit/s"
    assert "20 GFLOP/s" in run.summary()["basis"]
    assert "not checked for these machines" in run.summary()["basis"]
    assert run.summary()["hosts"] == []
    assert run.written == ["job", "steps", "seed", "on"]
    assert dure.train("digits-mlp", on="virtual", workers=1, steps=2).figures["machines"] == (
        "1 machine, links of 10 Gbit/s"
    )


@pytest.mark.long
def test_real_and_virtual_runs_of_one_host_are_compared(tmp_path: Path) -> None:
    """What `make demo` does, with a description that was not measured."""
    here = tmp_path / "here.yaml"
    shared = SharedHost(cores=2)
    here.write_text(Cluster.uniform(2, host=shared, hosts=(socket.gethostname(),)).to_yaml())
    found = dure.compare(
        "digits-mlp", "bsp", on=["local", str(here)], workers=2, steps=4, report=tmp_path / "report.html"
    )
    real, virtual = (run.summary() for run in found.runs)
    assert real["hosts"] == virtual["hosts"] == [socket.gethostname()]
    assert virtual["machines"].endswith(f"2 workers on a machine of 2 cores, as measured on {socket.gethostname()}")
    assert found.report is not None
    assert f"How wrong virtual time is on {socket.gethostname()}" in found.report.read_text()


@pytest.mark.long
def test_a_run_under_torchrun_tells_the_hosts_of_its_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "dure"]
    command += ["train", "digits-mlp", "--on", "torchrun", "--steps", "2", "--out", str(tmp_path / "run")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    found = read_run(tmp_path / "run")
    assert found.figures["machines"] == f"2 workers on {socket.gethostname()}, torchrun"
    assert found.written[:2] == ["job", "workers"]
