"""Methods of dure in the train function of Ray Train's `TorchTrainer`.

    optimizer, replica = attach(model, optimizer, sync="averaging:period=8")    # in place of prepare_model
    for epoch in range(start, epochs):
        for x, y in loader:
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        with reporting(replica, {"epoch": epoch}) as folder:    # in place of TemporaryDirectory and report
            torch.save(model.state_dict(), f"{folder}/model.pt")
    replica.close()

A checkpoint has what the loop writes at rank 0, and the state of each rank (`rank_files`). After a restart the loop
loads its own part before `attach`, which loads the states.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import ray.train
import ray.train.torch
from ray.train.collective import broadcast_from_rank_zero

import dure
from dure.integrations.rank_files import load_rank, save_rank

if TYPE_CHECKING:
    import torch

    from dure.user_loop.attached import Attached


def attach(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> tuple[torch.optim.Optimizer, Attached]:
    """Move `model` to the worker's device and attach it; go on from the states in the checkpoint of the run, if any.

    Every worker calls this once, after it has loaded the model and the optimizer from `ray.train.get_checkpoint()`.
    `options` are those of `dure.attach`; buffers are rank 0's by default. The optimizer that is returned steps by the
    method. Schedulers keep the one that was given.

    Raises `UsageError` as `dure.attach`, and for the states of another strategy or number of workers.
    """
    model.to(ray.train.torch.get_device())
    optimizer.load_state_dict(optimizer.state_dict())  # moves its state to the device
    replica = dure.attach(model, optimizer, **{"buffers": "rank0", **options})
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            if (Path(folder) / "dure").is_dir():  # else DistributedDataParallel has written it, or servers had it
                load_rank(folder, replica)
    return replica.routed_optimizer, replica


@contextmanager
def reporting(replica: Attached, metrics: dict[str, Any]) -> Iterator[str]:
    """Report `metrics` and a checkpoint at the end of the block; every worker calls this after the same step.

    Inside, the model is what the method would deliver now. The folder that is given becomes the checkpoint, with the
    states of all ranks; only what rank 0 writes there counts. If it writes nothing, the report has no checkpoint.
    `metrics` may be changed inside.
    """
    with TemporaryDirectory() as folder:
        with TemporaryDirectory() as unused, replica.evaluation():
            yield unused if replica.rank else folder
            has_model = broadcast_from_rank_zero(any(Path(folder).iterdir()))  # states alone are no checkpoint
            if has_model and replica.keeps_state:
                save_rank(folder, replica)
        has_files = any(Path(folder).iterdir())
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder) if has_files else None)
