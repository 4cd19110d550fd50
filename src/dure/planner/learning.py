"""Learning of strategies: runs of a job with real gradients in virtual time, up to a target.

A method whose update is a mean of all workers gets the job's learning rate and K times that rate (`--scale-lr`); the
better one counts. One machine gets both rates, too: otherwise a rate that is too low for all would count as its fault.
It may make as many steps as have the samples of the others' runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dure.core.target import Target
from dure.errors import DivergedError
from dure.planner.candidates import ONE, placed
from dure.planner.timing import config_of
from dure.report.progress import Progress
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks, Prebuilt, Row
from dure.run.resolve import resolve
from dure.run.virtual import VirtualRun
from dure.sync.base import server_rule_of

if TYPE_CHECKING:
    from dure.planner.candidates import Scene

EVALUATIONS, SAMPLES = 25, 2000
"""Evaluations of a run, and samples of each."""


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """The course of a run at its evaluations, and the virtual seconds to the target (None: not reached)."""

    seconds: list[float]
    loss: list[float]
    accuracy: list[float | None]
    seconds_to_target: float | None
    scaled: bool


def learned(
    scene: Scene, strategies: Sequence[str], target: Target, steps: int | None, say: Callable[[str, int, int], None]
) -> dict[str, LearningCurve]:
    """Run each of `strategies` with real gradients in virtual time; returns their curves."""
    found = {}
    for number, strategy in enumerate(strategies):
        say(f"training {strategy}", number, len(strategies))
        tried = [_curve(scene, strategy, target, steps, scaled=scaled) for scaled in _scalings(scene, strategy)]
        curves = [curve for curve in tried if curve is not None]
        if curves:
            found[strategy] = min(curves, key=_order)
    return found


def _scalings(scene: Scene, strategy: str) -> tuple[bool, ...]:
    if strategy == ONE:
        return (False, True)
    averaged = server_rule_of(config_of(scene, strategy).chosen().sync).averaged(scene.workers)
    return (False, True) if averaged > 1 else (False,)


def _curve(scene: Scene, strategy: str, target: Target, steps: int | None, *, scaled: bool) -> LearningCurve | None:
    where, text = placed(scene, strategy)
    options = config_of(where, text).plain()
    wanted = (steps or scene.job.steps) * scene.batch // where.batch
    options |= {"steps": wanted, "eval_every": max(1, wanted // EVALUATIONS), "eval_samples": SAMPLES}
    if strategy != ONE:
        options |= {"scale_lr": scaled}
    elif scaled:
        options |= {"lr": scene.workers * scene.job.optimizer.lr}
    try:
        history = run_until(target, TrainConfig.of(options), where)
    except DivergedError:
        return None
    return LearningCurve(
        seconds=[row["seconds"] for row in history],
        loss=[row["loss"] for row in history],
        accuracy=[row.get("accuracy") for row in history],
        seconds_to_target=crossed(history, target),
        scaled=scaled,
    )


class _Reached(Exception):
    """The target of a run is reached."""


def run_until(target: Target, config: TrainConfig, scene: Scene) -> list[Row]:
    """The rows of a virtual run until it reaches `target`, or until its end."""
    setup, _ = resolve(config, Prebuilt(scene.job, scene.cluster, times=scene.times))
    history: list[Row] = []

    def row(values: Row) -> None:
        history.append(values)
        if crossed(history, target) is not None:
            raise _Reached

    with Progress(config.strategy, " (virtual)", clock=time.monotonic) as progress, suppress(_Reached):
        VirtualRun(setup, scene.cluster, Callbacks(row, progress.update, progress.evaluating)).run()
    return history


def crossed(history: Sequence[Mapping[str, Any]], target: Target) -> float | None:
    """The seconds at which a curve crosses `target`, on the line between two evaluations; None if it never does."""
    sign = 1.0 if target.measure == "accuracy" else -1.0
    before: Mapping[str, Any] | None = None
    for row in history:
        value = row.get(target.measure)
        if value is None:
            continue
        if sign * (value - target.value) >= 0:
            if before is None:
                return float(row["seconds"])
            share = (target.value - before[target.measure]) / (value - before[target.measure])
            return float(before["seconds"] + share * (row["seconds"] - before["seconds"]))
        before = row
    return None


def unreached(curves: Mapping[str, LearningCurve], target: Target | None) -> list[str]:
    """A sentence about a target that no strategy has reached, with the nearest value; none if one has."""
    if target is None or any(curve.seconds_to_target is not None for curve in curves.values()):
        return []
    of_accuracy = target.measure == "accuracy"
    values = [
        value
        for curve in curves.values()
        for value in (curve.accuracy if of_accuracy else curve.loss)
        if value is not None
    ]
    nearest = f"the nearest was {(max if of_accuracy else min)(values):.4g}" if values else "all diverged"
    return [
        f"No strategy reached the target, {target.measure} {target.value:g}: {nearest}. Train for more steps "
        "(--steps), or choose another target."
    ]


def _order(curve: LearningCurve) -> tuple[bool, float, float]:
    """Curves that reach the target first, then those of the lowest last loss."""
    reached = curve.seconds_to_target
    return reached is None, reached or 0.0, curve.loss[-1] if curve.loss else 0.0
