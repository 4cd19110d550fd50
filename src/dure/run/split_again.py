"""A checkpoint of a model that was split in one way, for a run that splits it in another.

The parameters and the optimizer's vectors of a copy of the model are those of its workers, put together: they are cut
again for the workers of the new split. This is exact for bsp over collectives, where nothing else belongs to a worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dure.core.state import State
from dure.errors import CheckpointError, StrategyError
from dure.partition.mesh import parts_of, pipeline_of
from dure.partition.stage_state import StageCounts
from dure.run.checkpoint import Checkpoint, fitting
from dure.run.strategy import Strategy, make

if TYPE_CHECKING:
    from dure.run.checkpoint import Parts
    from dure.run.setup import Setup

BUFFERS = "buffers"
MAY_DIFFER = ("partition", "workers")
"""The fields of a run in which one that splits its model anew may differ."""


def can_split_again(members: Mapping[str, str], partition: str) -> bool:
    """Whether runs of a strategy go on with another `partition` from the same state of the model."""
    if (members["sync"].partition(":")[0], members["codec"]) != ("bsp", "fp32"):
        return False
    if members["topology"].partition(":")[0] != "collective":
        return False
    return all(_one_version(each) for each in (members["partition"], partition))


def _one_version(partition: str) -> bool:
    """Whether the workers of one copy of the model have its parameters after the same update."""
    try:
        pipeline = pipeline_of(make(partition, "partition"))
    except StrategyError:
        return False
    return pipeline is None or pipeline.flushes


def is_split_otherwise(found: Checkpoint, origin: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is of another split of the same model, by as many copies of it."""
    with fitting("run"):
        wrote = dict(found.parts["run"].plain.get("origin", origin))
    if wrote == origin or any(wrote.get(name) != origin[name] for name in origin.keys() - set(MAY_DIFFER)):
        return False
    copies = {each["workers"] / parts_of(make(each["partition"], "partition")) for each in (wrote, origin)}
    return len(copies) == 1 and can_split_again(origin, wrote["partition"])


def split_again(found: Checkpoint, setup: Setup) -> Parts:
    """The parts of a checkpoint for the workers of `setup`."""
    with fitting("run"):
        run = found.parts["run"]
        origin = run.plain["origin"]
        if run.plain.get("finished") or run.plain.get("retired"):
            raise CheckpointError(
                f"the checkpoint of step {found.step} has workers that are done, so it cannot be split again: resume "
                f"it with partition={origin['partition']}."
            )
        strategy = Strategy.of(**{name: origin[name] for name in ("sync", "topology", "codec", "partition")})
        workers = int(origin["workers"])
        old = replace(setup, strategy=strategy, workers=workers, machines=(0,) * workers, devices=())
        parts: Parts = {}
        for copy in range(setup.workers // setup.parts):
            held = range(copy * old.parts, (copy + 1) * old.parts)
            states = [found.parts[f"worker-{number}"] for number in held]
            for part, state in enumerate(_cut(setup, _joined(old, states), states)):
                parts[f"worker-{copy * setup.parts + part}"] = state
        return {"run": State({}, _run(run.plain, old, setup))} | parts


def _joined(old: Setup, states: Sequence[State]) -> dict[str, torch.Tensor]:
    """The tensors of the whole model, by name, from the states of the workers of one copy of it."""
    if old.stages is None:
        return states[0].tensors
    layout = old.stages.layout
    flat = [name for name in states[0].tensors if name != BUFFERS]
    found = {name: layout.joined([state.tensors[name] for state in states]) for name in flat}
    if BUFFERS in states[0].tensors:
        replicas = {part: module.replica for part, module in enumerate(old.stages.modules)}
        found[BUFFERS] = layout.joined_buffers(
            replicas, {part: state.tensors[BUFFERS] for part, state in enumerate(states)}
        )
    return found


def _cut(new: Setup, whole: Mapping[str, torch.Tensor], states: Sequence[State]) -> list[State]:
    """The states of the workers of one copy of the model. The first of them has the counts of the run."""
    base, stages = states[0].plain, new.stages
    found: list[State] = []
    sampler = base["source"].get("sampler", base["source"])
    for part in range(new.parts):
        plain = dict(base)
        if "counted" in base:
            plain["counted"] = _sum([state.plain["counted"] for state in states], count=part == 0)
            plain["time"] = _sum([state.plain["time"] for state in states], count=part == 0)
        tensors = dict(whole)
        if stages is None:
            plain["source"] = sampler
        else:
            counts = StageCounts()
            counts.staleness[0] = base["clock"]
            plain["source"] = {"sampler": sampler, "counts": counts.plain()}
            tensors = {name: stages.layout.part(part, each) for name, each in whole.items() if name != BUFFERS}
            if BUFFERS in whole:
                replica = stages.modules[part].replica
                tensors[BUFFERS] = stages.layout.part_of_buffers(replica, part, whole[BUFFERS])
        found.append(State(tensors, plain))
    return found


def _run(plain: Mapping[str, Any], old: Setup, new: Setup) -> dict[str, Any]:
    """The values of a run, for its new workers."""
    found = {**plain, "origin": new.origin}
    if "at" in plain:  # in virtual time
        clock = min(at for _, at in plain["at"])
        found["at"] = [[number, clock] for number in range(new.workers)]
        found["done"] = plain["done"] // old.parts * new.parts
    if "progress" in plain:  # on processes
        reports = plain["progress"]
        found["progress"] = {}
        for number in range(new.workers):
            copy, part = divmod(number, new.parts)
            held = [reports[f"worker {copy * old.parts + each}"] for each in range(old.parts)]
            sent = sum(report["bytes"] for report in held)
            found["progress"][f"worker {number}"] = {**held[0], "bytes": sent if part == 0 else 0}
    return found


def _sum(amounts: Sequence[Mapping[str, float]], *, count: bool) -> dict[str, float]:
    """The sum of amounts by name; zeros unless they `count`."""
    return {name: sum(each[name] for each in amounts) if count else 0 for name in amounts[0]}
