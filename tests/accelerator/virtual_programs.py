"""Runs in virtual time on the device under test and on the CPU.

    python -m accelerator.virtual_programs NAME ...      one line of JSON per name: name, and what came out

A name is that of a case below, or a strategy. A strategy trains on the CPU and on the device, with checkpoints. Each
device then goes on from the checkpoint of the other.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerator import target
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dure
from dure.core.state import State
from dure.job.data.dataset import Data
from dure.job.data.loaders import load_digits
from dure.job.gradient import GradientWork
from dure.job.gradient_engine import GradientEngine
from dure.job.job import Job
from dure.job.models.mlp import top1
from dure.job.optimizer import OptimizerSpec
from dure.run.checkpoint import Parts
from dure.run.config import TrainConfig
from dure.run.outcome import Outcome
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.cluster import Cluster, Event, Machines
from dure.runtime.virtual.compute import LogNormal

DEVICE = target.prepare()
CASES: dict[str, Callable[[], Any]] = {}
OPTIONS = {"workers": 4, "steps": 10, "seed": 3, "batch_size": 16, "eval_every": 4}
SIGNS = ("sign", "ternary", "it-sign")
"""Codecs of a sign for each element: where a sum is nearly zero, its rounding decides on a whole step."""
WORKERS = 16
"""Workers of the runs in which the host's waits are counted."""


def case(function):
    """List a case: a function without parameters. It returns values that JSON has."""
    CASES[function.__name__] = function
    return function


# --- a run ---


@dataclass
class Finished:
    outcome: Outcome
    initial: Tensor
    losses: list[float]
    """Of the batches of the first worker."""
    parts: dict[int, Parts]
    """The parts of each checkpoint, as they are read from a disk: on the CPU."""
    signs: bool

    @property
    def params(self) -> Tensor:
        assert self.outcome.params is not None
        return self.outcome.params.cpu()

    @property
    def counts(self) -> dict[str, Any]:
        """Whatever does not depend on values."""
        totals, notes = self.outcome.totals, self.outcome.notes
        rows = [{key: row[key] for key in ("seconds", "step", "updates", "bytes")} for row in self.outcome.history]
        return {"seconds": totals.seconds, **totals.counts, "deaths": notes["deaths"], "rows": rows}

    @property
    def grades(self) -> Tensor:
        """The losses and accuracies of all evaluations."""
        return torch.tensor([[row["loss"], row["accuracy"] or 0.0] for row in self.outcome.history])

    def last_losses(self, count: int) -> Tensor:
        """The losses of the last `count` batches of the first worker."""
        return torch.tensor(self.losses[-count:])


def train(text: str, device: str, job: str | Job = "digits-mlp", *, start: Parts | None = None, **options: Any):
    """Train by a strategy, from the parts `start` of a checkpoint if given."""
    cluster = options.pop("cluster", None)
    given = OPTIONS | options | ({"out": Path("unused")} if "checkpoint_every" in options else {})
    if cluster is not None:
        given.pop("workers")
    name = job if isinstance(job, str) else "given"
    config = TrainConfig(job=name, strategy=text, on="virtual", device=device, **given)
    setup, cluster = resolve(config, Prebuilt(job=None if isinstance(job, str) else job, cluster=cluster))
    assert cluster is not None
    kept: dict[int, Parts] = {}

    def keep(step: int, parts: Parts) -> None:
        copies = {name: part.cloned() for name, part in parts.items()}
        kept[step] = {name: State({k: v.cpu() for k, v in p.tensors.items()}, p.plain) for name, p in copies.items()}

    losses: list[float] = []
    callbacks = Callbacks(checkpoint=keep, progress=lambda clock, steps, loss, samples: losses.append(loss))
    done = VirtualRun(setup, cluster, callbacks).run(start)
    signs = any(member.startswith(SIGNS) for member in text.split())
    return Finished(done, setup.replica.params.cpu(), losses, kept, signs)


def compared(one: Finished, other: Finished) -> dict[str, Any]:
    """Two runs: the largest difference of parameters and of grades, and counts that differ. How far training went."""
    differ = {key: [value, other.counts[key]] for key, value in one.counts.items() if value != other.counts[key]}
    steps = min(len(one.losses), len(other.losses))  # a resumed run has those after the checkpoint
    return {
        "params": apart(one.params, other.params),
        "grades": 0.0 if "rows" in differ else apart(one.grades, other.grades),
        "losses": apart(one.last_losses(steps), other.last_losses(steps)),
        "differ": differ,
        "moved": float((one.params - one.initial).abs().max()),
        "signs": one.signs,
    }


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; where values exceed 1, relative to the largest."""
    return float((one - other).abs().max() / one.abs().max().clamp_(min=1))


def both(text: str, job: str | Job = "digits-mlp", **options: Any) -> dict[str, Any]:
    """A run on the device, compared with the run on the CPU."""
    return compared(train(text, "cpu", job, **options), train(text, DEVICE, job, **options))


def carried_over(text: str, job: str | Job = "digits-mlp", **options: Any) -> dict[str, Any]:
    """A run on the device, and one from each checkpoint of the other device, compared with the run on the CPU."""
    options |= {"checkpoint_every": 6}
    here, there = train(text, "cpu", job, **options), train(text, DEVICE, job, **options)
    found = {"device": compared(here, there), "checkpoints": len(here.parts)}
    for step in here.parts:
        for name, device, parts in (("to the device", DEVICE, here.parts), ("to the CPU", "cpu", there.parts)):
            resumed = train(text, device, job, start=parts[step], **options)
            found[f"{name} from {step}"] = compared(here, resumed)
    return found


# --- models ---


def digits(*modules: nn.Module, **changes: Any) -> Job:
    """A job on digits whose model is a sequence of new modules like these."""
    data = load_digits()
    job = Job(
        model=lambda: nn.Sequential(*(module() for module in modules)), loss=cross_entropy, train=data.train,
        test=data.test, batch_size=8, accuracy=top1, name="given", optimizer=OptimizerSpec("momentum", lr=0.05),
    )  # fmt: skip
    return replace(job, **changes)


def normed(**changes: Any) -> Job:
    """With a convolution and running statistics."""
    layers = (partial(nn.Unflatten, 1, (1, 8, 8)), partial(nn.Conv2d, 1, 4, 3), partial(nn.BatchNorm2d, 4), nn.ReLU)
    return digits(*layers, partial(nn.MaxPool2d, 2), nn.Flatten, partial(nn.Linear, 36, 10), **changes)


def dropping() -> Job:
    return digits(partial(nn.Linear, 64, 12), partial(nn.Dropout, 0.3), partial(nn.Linear, 12, 10))


class Table(nn.Module):
    """An embedding, of which a batch reads some rows."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4, sparse=sparse)
        self.out = nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.table(words).mean(1))


def words(optimizer: str = "adagrad", *, sparse: bool = False) -> Job:
    drawn = torch.randint(50, (200, 5), generator=torch.Generator().manual_seed(0))
    data = Data({"words": drawn}, drawn.sum(1) % 3)
    return Job(
        model=partial(Table, sparse), loss=cross_entropy, train=data, batch_size=8, accuracy=top1, name="given",
        optimizer=OptimizerSpec(optimizer, lr=0.05), rows=lambda inputs: {"table.weight": inputs["words"]},
    )  # fmt: skip


@case
def convolutions_and_running_statistics():
    return carried_over("bsp", normed()), carried_over("averaging:period=3 ps", normed())


@case
def layers_that_only_vmap_stacks():
    job = digits(partial(nn.Linear, 64, 12), partial(nn.LayerNorm, 12), nn.GELU, partial(nn.Linear, 12, 10))
    return both("bsp", job, workers=17, steps=4)


@case
def large_layers_and_activations_by_autograd():
    job = digits(partial(nn.Linear, 64, 300), nn.GELU, partial(nn.Linear, 300, 10))
    return both("downpour ps", job)


@case
def rows_of_tables_at_servers():
    return carried_over("bsp hybrid:servers=table.weight,shards=2", words())


@case
def sparse_gradients():
    texts = ("bsp", "bsp hybrid:servers=all,shards=2", "hogwild shared:mode=atomic,locks=3", "hogbatch:batch=3")
    return [carried_over(text, words("sgd", sparse=True)) for text in texts]


@case
def parameter_groups():
    layers = partial(nn.Linear, 64, 12), nn.ReLU, partial(nn.Linear, 12, 10)
    job = digits(*layers, groups=lambda name, parameter: {"lr": 0.02, "weight_decay": 0.1} if name[0] == "2" else {})
    return [both(text, job, optimizer="adamw:lr=0.01") for text in ("bsp ps:shards=2", "averaging:period=3")]


@case
def a_loss_of_its_own():
    return both("bsp", "quadratic", dtype="float64")


@case
def random_layers():
    """Draws of the device are its own. They depend on seed, worker and step alone, as on the CPU."""
    job, options = dropping(), {"checkpoint_every": 6}
    once, again = train("bsp", DEVICE, job, **options), train("bsp", DEVICE, job, **options)
    resumed = train("bsp", DEVICE, job, start=once.parts[6], **options)
    before = torch.get_rng_state(), torch.get_device_module(DEVICE).get_rng_state()
    train("bsp", DEVICE, job, seed=4)
    after = torch.get_rng_state(), torch.get_device_module(DEVICE).get_rng_state()
    kept = all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    runs = {"again": compared(once, again), "resumed": compared(once, resumed)}
    return runs | {"state kept": kept, "draws": different_draws(job)}


def different_draws(job: Job) -> int:
    """The number of different gradients of one batch under other seeds, workers and steps."""
    engine, data = GradientEngine(job, device=DEVICE), load_digits().train
    values = engine.initial_values(0).to(DEVICE)
    inputs, targets = data.inputs[:8].to(DEVICE), data.targets[:8].to(DEVICE)
    draws = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]
    works = [GradientWork(rank, step, values, inputs, targets, seed, 1.0) for seed, rank, step in draws]
    return len({tuple(gradient.values.tolist()) for gradient in engine.evaluate(works)})


# --- workers that come and go, and gradients that are refused ---


def events() -> Cluster:
    happens = (
        Event(at=0.012, kind="slow", worker=2, factor=3, duration=0.1),
        Event(at=0.03, kind="crash", worker=1),
        Event(at=0.055, kind="pause", worker=0, duration=0.04),
        Event(at=0.12, kind="join", worker=1),
    )
    machines = (Machines(count=4, compute=LogNormal(seconds=0.01, sigma=0.4)),)
    return Cluster(machines=machines, events=happens, unfairness=0.3)


@case
def workers_come_and_go():
    texts = ("bsp ps", "ssp:bound=2 ps:shards=2 top-k", "bsp ps sign", "easgd:period=2", "ad-psgd", "hogwild")
    return [both(text, cluster=events(), steps=20) for text in texts]


def spoiled() -> Job:
    """Digits, one of which is no number, with a loss that leaves it out; its gradient is no number all the same."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.where(outputs.isnan(), 0.0, outputs).square().mean()

    job = digits(partial(nn.Linear, 64, 10))
    data = load_digits().train
    inputs = data.inputs.clone()
    inputs[5] = torch.nan
    return replace(job, loss=loss, train=Data(inputs, data.targets))


@case
def gradients_that_are_not_finite():
    runs = []
    for text, exact in (("bsp", False), ("downpour ps", False), ("averaging:period=3", False), ("bsp", True),
                        ("bsp collective:algorithm=ring", True)):  # fmt: skip
        runs.append([train(text, device, spoiled(), steps=90, exact=exact) for device in ("cpu", DEVICE)])
    refused = [here.outcome.totals.counts["updates_refused"] for here, _ in runs]
    return {"runs": [compared(*each) for each in runs], "refused": refused}


@case
def squares_that_overflow():
    """Gradients of 1e25 are finite, though their squares are not."""
    job = digits(partial(nn.Linear, 64, 10), loss=lambda outputs, targets: 1e25 * cross_entropy(outputs, targets))
    here, there = (train("bsp ps", device, job, optimizer="sgd:lr=1e-26") for device in ("cpu", DEVICE))
    return compared(here, there) | {"refused": there.outcome.totals.counts["updates_refused"]}


# --- the record, memory, files ---


@contextmanager
def free(nbytes: int):
    """While open, so many bytes of the device's memory are free."""
    real = torch.accelerator.get_memory_info
    torch.accelerator.get_memory_info = lambda device=None: (nbytes, 1 << 40)
    try:
        yield
    finally:
        torch.accelerator.get_memory_info = real


@case
def the_size_of_a_stack_follows_from_free_memory():
    """The parameters of digits-mlp have 19,240 bytes."""
    found = []
    for nbytes in (1 << 22, 7 << 20, 1 << 21):
        with free(nbytes):
            batching = train("bsp", DEVICE, steps=3).outcome.notes["batching"]
        found.append([batching["most_bytes"], *batching["shapes"].values()])
    return found


@case
def a_run_that_goes_on_elsewhere():
    """Through files, by the public interface."""
    options: dict[str, Any] = {"on": "virtual", "strategy": "averaging:period=3 ps", **OPTIONS}
    whole = dure.train("digits-mlp", **options).summary()
    found = []
    for first, second in ((DEVICE, "cpu"), ("cpu", DEVICE)):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "run"
            dure.train("digits-mlp", device=first, out=folder, checkpoint_every=6, **options)
            (folder / "summary.json").unlink()
            resumed = dure.train("digits-mlp", resume=folder, device=second).summary()
            kept = sorted(path.name for path in folder.glob("checkpoints/step-*"))
            shutil.rmtree(folder)
        same = resumed["params_sha256"] == whole["params_sha256"]
        found.append([same, kept, resumed.get("numerics")])
    return found


# --- waits of the host ---


def waits(text: str) -> float:
    """How often the host waits for the device in a virtual step of all workers, without evaluations."""
    options = {"workers": WORKERS, "eval_every": 1000}
    module = torch.get_device_module(DEVICE)
    counts = []
    for steps in (8, 24):
        before = module.synchronizations()
        train(text, DEVICE, **options, steps=steps)
        counts.append(module.synchronizations() - before)
    return (counts[1] - counts[0]) / 16


@case
def waits_of_the_host():
    texts = ("bsp", "averaging:period=4", "ad-psgd gossip:graph=ring", "bsp ps", "downpour ps", "hogwild")
    return {text: waits(text) for text in texts}


def outcome(name: str) -> Any:
    try:
        return CASES[name]() if name in CASES else carried_over(name)
    except Exception:  # noqa: BLE001  (the test shows it)
        return traceback.format_exc()


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(json.dumps([each, outcome(each)]), flush=True)
