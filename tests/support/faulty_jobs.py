"""Jobs for runs in which something goes wrong. Their functions are named in job texts: `faulty_jobs.py:NAME`.

In the processes of a run, `counted` has every worker write down what it pushes and what was acknowledged, in files
that survive its death. Its gradients do not depend on the model: each is a row of a fixed table, whose number is its
first element, so that a list of row numbers is enough to compute the final parameters again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dure.core.node import Reply
from dure.job.data.dataset import Data
from dure.job.data.split import IID
from dure.job.job import Job, load_job
from dure.job.optimizer import OptimizerSpec
from dure.topology.parameter_server.client import ServerClient
from dure.topology.replica import Pulled

ROWS = 64
DIM = 1 << 17  # half a megabyte per push: a kill lands in the middle of one
LR = 2.0**-6


class Point(nn.Module):
    """A place w; its output for x is x . w."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(dim))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.place


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


def table(dim: int = DIM) -> Tensor:
    rows = torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(7))
    rows[:, 0] = torch.arange(ROWS) / ROWS
    return rows


def job(dim: int, loss: Callable[[Tensor, Tensor], Tensor] = mean_output) -> Job:
    return Job(
        model=lambda: Point(dim),
        loss=loss,
        train=Data(table(dim), torch.zeros(ROWS)),
        test=Data(torch.zeros(2, dim), torch.zeros(2)),
        batch_size=1,
        optimizer=OptimizerSpec(lr=LR),
        split="whole",
    )


def notes_samples(data_root: Path) -> Job:
    """Each step takes 2 ms, or as the file `pace` says, and each worker writes down the numbers of its samples."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(pace(data_root) or 0.002)
        if in_fork_server():
            with (data_root / f"samples {os.getpid()}").open("a") as file:
                file.write(" ".join(str(int(each)) for each in targets) + "\n")
        return mean_output(outputs, targets)

    numbers = torch.arange(960.0)
    return replace(job(16, loss), train=Data(torch.zeros(960, 16), numbers), batch_size=4, split="iid")


def notes_devices(data_root: Path) -> Job:
    """`notes_samples`, whose workers write down which GPUs they see."""
    noted = notes_samples(data_root)
    if in_fork_server():
        (data_root / f"devices {os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    return noted


def evaluation_of_nan(data_root: Path) -> Job:
    """Gradients and losses of workers are finite, and the loss of each evaluation is NaN."""
    return replace(job(DIM), test=Data(torch.full((2, DIM), torch.nan), torch.zeros(2)))


def quadratic(data_root: Path) -> Job:
    """Least squares with a rate at which fresh gradients converge, and gradients that are 7 updates old do not."""
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = Data(inputs, inputs.sum(1, keepdim=True))
    return Job(
        model=lambda: nn.Linear(4, 1),
        loss=nn.functional.mse_loss,
        train=data,
        test=data,
        batch_size=8,
        optimizer=OptimizerSpec(lr=0.4),
    )


def counted(data_root: Path) -> Job:
    if in_fork_server():
        note_pushes(data_root)
    return job(DIM)


def counted_slowly(data_root: Path) -> Job:
    """Each step takes at least 3 ms, so that whoever looks ten times a second sees every checkpoint's time."""
    if in_fork_server():
        note_pushes(data_root)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.003)
        return mean_output(outputs, targets)

    return job(DIM, loss)


def pace(data_root: Path) -> float:
    """Seconds of a step that the file `pace` gives; 0 without it."""
    with contextlib.suppress(FileNotFoundError):
        return float((data_root / "pace").read_text())
    return 0.0


def digits_at_a_pace(data_root: Path) -> Job:
    """`digits-mlp`, whose steps take as many seconds longer as the file `pace` says, while there is one."""
    digits = load_job("digits-mlp")
    plain = digits.loss

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(pace(data_root))
        return plain(outputs, targets)

    return replace(digits, loss=loss)


def small() -> Job:
    return job(256)


def waits_now_and_then() -> Job:
    """Each step takes 2 ms."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.002)
        return mean_output(outputs, targets)

    return job(256, loss)


def follows_verdicts(data_root: Path) -> Job:
    """Each step takes 2 ms, gradients depend on the model, and workers note whether theirs is the servers'."""
    if in_fork_server():
        note_models(data_root)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.002)
        return ((outputs - 1) ** 2).mean()

    return job(256, loss)


def in_fork_server() -> bool:
    spec = sys.modules["__main__"].__spec__
    return spec is not None and spec.name == "dure.run.launchers.entry"


def note_models(folder: Path) -> None:
    """Write a line per model that a worker goes on from: what brought it, and whether it is the servers'."""
    advanced = ServerClient.advance_mirrors

    async def noted(client: ServerClient, replies: Sequence[Reply], into: Tensor, version: int | None) -> Pulled:
        pulled = await advanced(client, replies, into, version)
        held = await client.pull(torch.full_like(into, torch.nan), version)
        brought = "model" if any(reply.fields["nbytes"] is None for reply in replies) else "verdict"
        with (folder / f"{client.sender.worker}.{client.sender.incarnation}.{os.getpid()}").open("a") as file:
            file.write(f"{brought} {'same' if held.values.equal(into) else 'other'}\n")
        return pulled

    ServerClient.advance_mirrors = noted  # type: ignore[method-assign]


def note_pushes(folder: Path) -> None:
    push, push_pull = ServerClient.push, ServerClient.push_pull

    def note(client: ServerClient, word: str, *figures: int) -> None:
        line = " ".join(map(str, (word, client.sender.worker, client.sender.incarnation, *figures))) + "\n"
        with (folder / f"{client.sender.worker}.{client.sender.incarnation}.{os.getpid()}").open("a") as file:
            file.write(line)

    async def noted(client: ServerClient, update: Tensor, **options: Any) -> list[int]:
        note(client, "pushes", client.sender.seq + 1, round(float(update[0]) * ROWS))
        versions = await push(client, update, **options)
        note(client, "acknowledged", client.sender.seq)
        return versions

    async def noted_too(client: ServerClient, update: Tensor, into: Tensor | None, **options: Any) -> Pulled:
        note(client, "pushes", client.sender.seq + 1, round(float(update[0]) * ROWS))
        pulled = await push_pull(client, update, into, **options)
        note(client, "acknowledged", client.sender.seq)
        return pulled

    ServerClient.push = noted  # type: ignore[method-assign,assignment]
    ServerClient.push_pull = noted_too  # type: ignore[method-assign,assignment]


class Fault:
    """A loss that goes wrong once, at worker processes, after some steps of each."""

    def __init__(self, happen: Callable[[], None], after: int) -> None:
        self.happen = happen
        self.left = after

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if in_fork_server() and outputs.requires_grad:
            self.left -= 1
            if self.left < 0:
                self.happen()
        return mean_output(outputs, targets)


def raises() -> Job:
    def happen() -> None:
        raise RuntimeError("the labels of this batch\nare upside down")

    return job(256, Fault(happen, after=20))


def exits() -> Job:
    return job(256, Fault(lambda: os._exit(0), after=20))


def crashes() -> Job:
    return job(256, Fault(lambda: os.kill(os.getpid(), signal.SIGSEGV), after=20))


def one(happen: Callable[[], None], folder: Path, after: int = 20) -> Job:
    """Only the first worker to come this far is struck."""

    def first() -> None:
        try:
            (folder / "struck").touch(exist_ok=False)
        except FileExistsError:
            return
        happen()

    return job(256, Fault(first, after))


def one_raises(data_root: Path) -> Job:
    def happen() -> None:
        raise RuntimeError("the labels of this batch\nare upside down")

    return one(happen, data_root)


def one_exits(data_root: Path) -> Job:
    return one(lambda: os._exit(0), data_root)


def one_crashes(data_root: Path) -> Job:
    return one(lambda: os.kill(os.getpid(), signal.SIGSEGV), data_root)


def starts_processes(data_root: Path) -> Job:
    """Each worker starts one process, as a loader of data does, and notes its number; steps take 2 ms."""

    def start() -> None:
        note = data_root / f"{os.getpid()}.child"
        if not note.exists():
            note.write_text(str(subprocess.Popen(["sleep", "600"]).pid))

    fault = Fault(start, after=1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.002)
        return fault(outputs, targets)

    return job(256, loss)


def one_holds_the_lock(data_root: Path) -> Job:
    """Sleeps in native code without letting any other thread of its process run Python."""
    return one(lambda: ctypes.PyDLL(None).sleep(60), data_root, after=50) if sys.platform == "linux" else small()


def one_sleeps(data_root: Path) -> Job:
    """One step takes as many seconds as the file `seconds` says, or 1.6."""

    def happen() -> None:
        said = data_root / "seconds"
        time.sleep(float(said.read_text()) if said.exists() else 1.6)

    return one(happen, data_root, after=20)


def one_evaluation_sleeps(data_root: Path) -> Job:
    """As `one_sleeps`, for the third evaluation."""
    said, evaluations = data_root / "seconds", []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.002)
        if not torch.is_grad_enabled():
            evaluations.append(1)
            if len(evaluations) == 3:
                (data_root / "struck").touch()
                time.sleep(float(said.read_text()) if said.exists() else 1.6)
        return mean_output(outputs, targets)

    return job(256, loss)


def one_computes_in_c(data_root: Path) -> Job:
    """One step computes for two seconds in native code that keeps the interpreter's lock."""

    def happen() -> None:
        ended = time.monotonic() + 2.0
        while time.monotonic() < ended:
            pow(3, 1 << 22)

    return one(happen, data_root, after=20)


# ---- gradients that hold NaN


class Root(Point):
    """A place whose gradient is NaN, and whose output is as usual, for a sample whose last element is 1."""

    def forward(self, inputs: Tensor) -> Tensor:
        plain = 1.0 - inputs[:, -1]
        outputs = inputs[:, :-1] @ self.place
        return outputs + (plain + 0.0 * outputs).sqrt() - plain.sqrt()


def spoiled(spoils: Callable[[int], bool], *, samples: int = 120) -> Job:
    """Samples of which those that `spoils` names have a gradient of NaN."""
    flags = torch.tensor([[float(spoils(row))] for row in range(samples)])
    inputs = torch.cat([torch.ones(samples, 8), flags], dim=1)

    return Job(
        model=lambda: Root(8),
        loss=mean_output,
        train=Data(inputs, torch.zeros(samples)),
        test=Data(torch.zeros(2, 9), torch.zeros(2)),
        batch_size=1,
        optimizer=OptimizerSpec(lr=LR),
        split="iid",
    )


def one_nan() -> Job:
    """120 samples, of which one spoils its gradient: in 60 steps, two workers see each once."""
    return spoiled(lambda row: row == 41)


def one_worker_of_nan() -> Job:
    """Every sample of the second of two workers spoils its gradient, under seed 0."""
    sampler = IID().samplers(torch.zeros(120), (1, 1), seed=0)[1]
    seen = {int(row) for _ in range(60) for row in sampler.next()}
    return spoiled(seen.__contains__)


def no_nan() -> Job:
    """As `one_nan`, and no sample spoils its gradient."""
    return spoiled(lambda row: False)
