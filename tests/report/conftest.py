"""Made-up runs for the tests of the report."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dure.report import Run


def rows(
    *, seconds: float = 10.0, count: int = 11, accuracy: bool = True, nan_from: int | None = None
) -> list[dict[str, Any]]:
    """Loss falls, accuracy climbs from 0 to 1 in equal steps; from row `nan_from` on the loss is NaN."""
    found = []
    for place in range(count):
        part = place / max(1, count - 1)
        loss = math.nan if nan_from is not None and place >= nan_from else 2.0 * math.exp(-4 * part)
        found.append(
            {
                "seconds": seconds * part,
                "step": 10 * place,
                "samples": 320 * place,
                "loss": loss,
                "accuracy": part if accuracy else None,
                "bytes": 1000 * place,
            }
        )
    return found


def run(sync: str = "bsp", *, time: str = "virtual", path: Path | None = None, **history: Any) -> Run:
    """A finished run with all the figures that training writes."""
    kept = rows(**history)
    last = kept[-1] if kept else {"loss": None, "accuracy": None, "seconds": 0.0, "step": 0, "samples": 0, "bytes": 0}
    figures = {
        "strategy": {"sync": sync, "topology": "ps:shards=2", "codec": "fp32", "partition": "none"},
        "on": "virtual" if time == "virtual" else "local",
        "time": time,
        "workers": 4,
        "steps": last["step"],
        "samples": last["samples"],
        "seconds": last["seconds"],
        "loss": last["loss"],
        "accuracy": last["accuracy"],
        "best_accuracy": last["accuracy"],
        "bytes_sent": last["bytes"],
        "bytes_received": last["bytes"],
        "messages": 40,
        "updates_applied": 40,
        "updates_refused": 0,
        "staleness": {"mean": 1.5, "max": 3, "histogram": {"0": 10, "1": 10, "2": 10, "3": 10}},
        "time_share": {"compute": 0.5, "communicate": 0.3, "wait": 0.2},
        "failures_survived": 0,
        "params_sha256": "ab" * 32,
    }
    return Run({"job": "digits-mlp"}, kept, figures, path, {"torch": "2.13.0"}, 7)


def coded_run(sync: str = "bsp", *, link: float | None = 1.25e9, saves: bool = True, **rest: Any) -> Run:
    """A run whose codec takes 4 ms of a step and saves 8 of 9 MB (nothing unless `saves`): even at 2 GB/s."""
    coded, plain = (1e6, 9e6) if saves else (9e6, 9e6)
    rates = sorted({12.5e6, 125e6, 1.25e9, 12.5e9} | ({link} if link else set()))
    payoff = {
        "codec": "1bit",
        "costs": "measured" if link is None else "cluster",
        "compute": 0.01,
        "coding": 0.004,
        "bytes": coded,
        "bytes_fp32": plain,
        "link": link,
        "steps": [{"bandwidth": r, "seconds": 0.014 + coded / r, "fp32": 0.01 + plain / r} for r in rates],
        "break_even": 2e9 if saves else None,
    }
    made = run(sync, **rest)
    strategy = {**made.figures["strategy"], "codec": "1bit"}
    return replace(made, figures={**made.figures, "strategy": strategy, "payoff": payoff})


@pytest.fixture
def coded() -> Callable[..., Run]:
    return coded_run


@pytest.fixture
def made() -> Callable[..., Run]:
    return run
