"""A checkpoint for other workers: another split of the model, and another number of its copies.

The parameters and the optimizer's vectors of a copy of the model are those of its workers, put together: they are cut
again for the workers of the new split, with the same bits. This is exact for bsp over collectives, where nothing else
belongs to a worker. The workers of one more or one fewer copy go on with the mini-batches of the same number; a stream
that all workers share goes on behind the last sample that was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dure.errors import CheckpointError, StrategyError
from dure.job.data.split import COMMON_STREAM
from dure.partition.mesh import pipeline_of
from dure.partition.stage_state import StageCounts
from dure.run import checkpoint
from dure.run.checkpoint import Checkpoint, PartFiles, fitting
from dure.run.generations import gradients_in
from dure.run.saved_model import SavedModel, merged, shard_of, write_tensors
from dure.run.strategy import Strategy, make
from dure.run.workers import SHARD

if TYPE_CHECKING:
    from dure.run.setup import Setup

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
    """Whether a checkpoint is of another split of the same model, or of another number of copies of it."""
    with fitting("run"):
        wrote = dict(found.parts.plain["run"].get("origin", origin))
    if wrote == origin or any(wrote.get(name) != origin[name] for name in origin.keys() - set(MAY_DIFFER)):
        return False
    return can_split_again(origin, wrote["partition"])


def writer_of(parts: PartFiles, setup: Setup) -> Setup:
    """The set-up of the run that has written a checkpoint, which differs from `setup` in its split of the model.

    Raises `CheckpointError` for a checkpoint in which workers are done.
    """
    run = parts.plain["run"]
    origin = run["origin"]
    if run.get("finished") or run.get("retired"):
        raise CheckpointError(
            f"the checkpoint of step {run['checkpoint']} has workers that are done, so it cannot be split again: "
            f"resume it with partition={origin['partition']}."
        )
    strategy = Strategy.of(**{name: origin[name] for name in ("sync", "topology", "codec", "partition")})
    workers = int(origin["workers"])
    found = replace(setup, strategy=strategy, workers=workers, machines=(0,) * workers, devices=())
    found.__dict__["model"] = setup.model
    return found


def split_again(found: Checkpoint, setup: Setup, place: Path) -> None:
    """Write a checkpoint for the workers of `setup` to the folder `place`, in place of the same step of others.

    Raises `CheckpointError` where it does not fit, or cannot be written.
    """
    with fitting("run"):
        parts = found.parts
        old = writer_of(parts, setup)
        model = SavedModel(parts, old)
        draft = checkpoint.begin(place, found.step)
        try:
            write_tensors(draft, setup, model, _buffers(model, setup))
            plain = [parts.plain[f"worker-{number}"] for number in range(old.workers)]
            for number, each in enumerate(_plain_of_workers(plain, old, setup)):
                checkpoint.write_plain(draft, f"worker-{number}", each)
            run = parts["run"]
            checkpoint.write_part(draft, "run", replace(run, plain=_run(run.plain, plain, old, setup)))
            checkpoint.commit(place, found.step)
        except BaseException:
            checkpoint.discard(place, found.step)
            raise


def _copies(setup: Setup) -> int:
    return setup.workers // setup.parts


def _buffers(model: SavedModel, new: Setup) -> dict[int, torch.Tensor]:
    """The buffers of each new worker: those of its copy, or of all copies as one if there is another number of them."""
    old, found = model.setup, model.buffers()
    if not found:
        return {}
    if _copies(old) != _copies(new):
        whole = merged(model)
        assert whole is not None
        return buffers_of(new, [whole] * _copies(new))
    each = []
    for copy in range(_copies(old)):
        own = {part: found[copy * old.parts + part] for part in range(old.parts)}
        replicas = {} if old.stages is None else {part: old.stages.modules[part].replica for part in own}
        each.append(own[0] if old.stages is None else old.stages.layout.joined_buffers(replicas, own))
    return buffers_of(new, each)


def buffers_of(setup: Setup, copies: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The buffers of each worker of a run, from those of each copy of the model."""
    if setup.stages is None:
        return dict(enumerate(copies))
    layout, replicas = setup.stages.layout, [module.replica for module in setup.stages.modules]
    return {
        copy * setup.parts + part: layout.part_of_buffers(replica, part, whole)
        for copy, whole in enumerate(copies)
        for part, replica in enumerate(replicas)
    }


# ---- plain values


def _plain_of_workers(plain: Sequence[Mapping[str, Any]], old: Setup, new: Setup) -> list[dict[str, Any]]:
    """The plain values of the new workers. The first of each copy has the counts of the old workers of that copy.

    If there is another number of copies, the first of all has those of all.
    """
    same, found = _copies(old) == _copies(new), []
    for number in range(new.workers):
        copy, part = divmod(number, new.parts)
        counted = plain[copy * old.parts : (copy + 1) * old.parts] if same else plain
        base, first = counted[0], part == 0 and (same or copy == 0)
        each = {name: value for name, value in base.items() if name != SHARD} | shard_of(new, number)
        for name in ("counted", "time") if "counted" in base else ():
            each[name] = _sum([one[name] for one in counted], count=first)
        sampler = base["source"].get("sampler", base["source"])
        each["source"] = sampler if same else _sampler(new, copy, sampler, base["clock"])
        if new.stages is not None:
            counts = StageCounts()
            counts.staleness[0] = base["clock"]
            each["source"] = {"sampler": each["source"], "counts": counts.plain()}
        found.append(each)
    return found


def _sampler(new: Setup, copy: int, before: Mapping[str, Any], clock: int) -> dict[str, Any]:
    """The state of the sampler of a copy of the model, at the mini-batch of the number `clock`.

    `before` is that of the first copy under another number of copies. A stream that all share goes on where it was.
    """
    if new.config.timing_only:
        return {}
    sampler = new.data.sampler(copy)
    sampler.number = clock
    state = dict(sampler.state())
    if state.get("stream") == before.get("stream") == COMMON_STREAM:
        state["position"] = before["position"]
    return state


def _run(plain: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], old: Setup, new: Setup) -> dict[str, Any]:
    """The values of a run, for its new workers; `workers` has those of each old one."""
    found, first = {**plain, "origin": new.origin}, workers[0]
    if "at" in plain:  # in virtual time
        clock = min(at for _, at in plain["at"])
        found["at"] = [[number, clock] for number in range(new.workers)]
        found["done"] = plain["done"] // old.parts * new.parts
    if "progress" in plain:  # on processes
        found["progress"] = _progress(workers, old, new)
    if _copies(old) != _copies(new) or (plain.get("generations") and not new.re_forms):
        found |= _counts(plain, first["clock"] - first["refused"][0], old, new)
        if "progress" in plain and "batch_sizes" in plain:
            totals, each = plain["totals"], sum(plain["batch_sizes"]) - sum(new.batch_sizes)
            samples = totals["counts"]["samples"] + (first["clock"] - first["entered"]) * each
            found["totals"] = {**totals, "counts": {**totals["counts"], "samples": samples}}
    return found


def _counts(plain: Mapping[str, Any], made: int, old: Setup, new: Setup) -> dict[str, Any]:
    """The counts of gradients in the model, to which each old worker has added as many as it `made` steps."""
    generations, missing = plain.get("generations"), plain.get("missing", 0)
    if generations and new.re_forms:
        return {}  # the next generation begins with the new workers
    gradients = gradients_in(generations, made) if generations else made * _copies(old)
    return {"generations": [], "missing": made * _copies(new) - gradients + missing}


def _progress(workers: Sequence[Mapping[str, Any]], old: Setup, new: Setup) -> dict[str, Any]:
    """Reports of the new workers. The first of each copy, or of all copies, has sent what the old ones had.

    The last reports of the old ones may be of earlier steps.
    """
    same, found = _copies(old) == _copies(new), {}
    for number in range(new.workers):
        copy, part = divmod(number, new.parts)
        held = workers[copy * old.parts : (copy + 1) * old.parts] if same else workers
        clock, done = held[0]["clock"], held[0]["clock"] - held[0]["entered"]
        sent = sum(each["counted"]["bytes_sent"] for each in held) if part == 0 and (same or copy == 0) else 0
        report = {"steps": clock, "at": max(clock - 1, 0), "done": done, "loss": None, "bytes": sent}
        found[f"worker {number}"] = report
    return found


def _sum(amounts: Sequence[Mapping[str, float]], *, count: bool) -> dict[str, float]:
    """The sum of amounts by name; zeros unless they `count`."""
    return {name: sum(each[name] for each in amounts) if count else 0 for name in amounts[0]}
