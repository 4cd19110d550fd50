"""Trainings of two and three workers in Ray Train.

`ray_train_cases.py FOLDER` writes to FOLDER/found.json what worker 0 gave, or the errors that the driver saw.
"""

import json
import os
import signal
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

pytest.importorskip("ray")
pytest.importorskip("pandas")

import ray
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError

from dure.integrations.ray_train import attach, reporting

EPOCHS, STEPS = 4, 6
DILOCO = "diloco:period=8"
FAILING = {
    "bsp": [(2, 5, 1, "error")],
    "averaging:period=8": [(2, 5, 0, "kill")],
    DILOCO: [(0, 3, 2, "kill"), (2, 3, 0, "kill"), (2, 4, 1, "kill")],
}
"""By method, the failure of each start: epoch, step in it, rank and kind. Epochs 0 to 2 end within a period."""
WORKERS = {"bsp": 2, "averaging:period=8": 2, DILOCO: 3}
METHODS = {
    "bsp": {},
    "averaging": {"sync": "averaging:period=8"},
    "diloco": {"sync": DILOCO},
    "int8": {"codec": "int8"},
}
LONG = 720
"""Steps of a training that ends near its best loss."""


def rank_of_worker():
    return ray.train.get_context().get_world_rank()


def made(dtype):
    torch.manual_seed(0)
    # Before batch norm, a bias has a gradient of rounding errors alone, which AdamW makes as large as others.
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def losses_of(model, dtype, epoch):
    """A loss for each batch of this worker; a step comes between two."""
    rank = rank_of_worker()
    chance = torch.Generator().manual_seed(1000 * epoch + rank)
    for _ in range(STEPS):
        x = torch.randn(8, 8, generator=chance).to(dtype)
        yield cross_entropy(model(x), x[:, :4].argmax(1))


def restored(model, optimizer):
    """The epoch to begin with."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(f"{folder}/state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def state_of(model, optimizer, epoch):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}


def given(model, losses):
    values = torch.cat([each.flatten().double() for each in model.state_dict().values()])
    return {"losses": losses, "state": values.tolist()}


def by_ray(dtype):
    """The loop as it is for Ray's DDP."""
    model, optimizer = made(dtype)
    model = ray.train.torch.prepare_model(model)
    losses = []
    for epoch in range(EPOCHS):
        for loss in losses_of(model, dtype, epoch):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return given(model.module, losses)


def by_dure(dtype, sync, starts=None):
    """The same loop. With `starts`, a file that counts its starts, it reports after each epoch and fails."""
    model, optimizer = made(dtype)
    start, losses = restored(model, optimizer), []
    failure = next_failure(sync, starts) if starts else None
    optimizer, replica = attach(model, optimizer, sync=sync)
    for epoch in range(start, EPOCHS):
        for step, loss in enumerate(losses_of(model, dtype, epoch)):
            loss.backward()
            if failure and failure[:3] == (epoch, step, replica.rank):
                fail(failure[3])
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if starts:
            with reporting(replica, {"epoch": epoch}) as folder:
                if epoch != 1:
                    torch.save(state_of(model, optimizer, epoch), f"{folder}/state.pt")
    replica.close()
    return given(model, losses)


def next_failure(sync, starts):
    """The failure of this start at this rank; the last start has none."""
    path = Path(f"{starts}{rank_of_worker()}")
    count = len(path.read_text()) if path.exists() else 0
    path.write_text("." * (count + 1))
    return dict(enumerate(FAILING[sync])).get(count)


def fail(how):
    if how == "error":
        raise RuntimeError("an error of the user's")
    os.kill(os.getpid(), signal.SIGKILL)


def near(how):
    """The loss of new samples after many steps. Noise hides a part of their classes: no loss gets near to zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    optimizer, replica = attach(model, optimizer, **how)
    for x, y in zip(*(each.split(16) for each in samples(16 * LONG, replica.rank)), strict=True):
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    replica.close()
    x, y = samples(4000, 99)
    return cross_entropy(model(x), y).item()


def samples(count, seed):
    teacher = torch.randn(20, 5, generator=torch.Generator().manual_seed(7))
    chance = torch.Generator().manual_seed(100 + seed)
    x = torch.randn(count, 20, generator=chance)
    return x, (x @ teacher + 3 * torch.randn(count, 5, generator=chance)).argmax(1)


# ---- trainings in one start of the workers, which takes seconds


def two(_):
    found = {
        name: [by_ray(dtype), by_dure(dtype, "bsp")]
        for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32))
    }
    return found | {sync: by_dure(torch.float32, sync) for sync in FAILING if WORKERS[sync] == 2}


def three(_):
    found = {"three": [by_ray(torch.float64), by_dure(torch.float64, "bsp")]}
    found |= {"near": {name: near({"sync": "bsp", **how}) for name, how in METHODS.items()}}
    return found | {DILOCO: by_dure(torch.float32, DILOCO)}


def interrupted(config):
    return by_dure(torch.float32, config["sync"], config["starts"])


def uneven(_):
    """Worker 1 has fewer batches than worker 0, and comes to its report."""
    model, optimizer = made(torch.float32)
    optimizer, replica = attach(model, optimizer, sync="bsp", frozen_after=5.0)
    for loss in islice(losses_of(model, torch.float32, 0), STEPS - replica.rank):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ray.train.report({})


def trainer_of(loop, folder, name, workers, failures=0, **config):
    run = RunConfig(storage_path=str(folder), name=name, failure_config=FailureConfig(max_failures=failures))
    scaling = ScalingConfig(num_workers=workers)
    return ray.train.torch.TorchTrainer(loop, train_loop_config=config, scaling_config=scaling, run_config=run)


def restarted(folder, sync):
    starts = f"{folder}/starts {sync} "
    workers, failures = WORKERS[sync], len(FAILING[sync])
    trainer = trainer_of(interrupted, folder, sync, workers, failures, sync=sync, starts=starts)
    return trainer.fit().return_value | {"starts": len(Path(f"{starts}0").read_text())}


def refused(trainer):
    """The errors of workers, as the driver sees them."""
    try:
        trainer.fit()
    except TrainingFailedError as error:
        return [f"{type(each).__name__}: {each}" for each in error.worker_failures.values()]


def main(folder):
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    found = (
        trainer_of(two, folder, "two", 2).fit().return_value | trainer_of(three, folder, "three", 3).fit().return_value
    )
    found |= {sync: [found[sync], restarted(folder, sync)] for sync in FAILING}
    fewer = trainer_of(interrupted, folder, DILOCO, 2, sync=DILOCO, starts=f"{folder}/fewer ")
    found |= {"fewer": refused(fewer), "uneven": refused(trainer_of(uneven, folder, "uneven", 2))}
    (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
