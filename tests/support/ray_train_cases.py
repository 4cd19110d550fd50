"""Trainings of two workers in Ray Train: `ray_train_cases.py FOLDER` writes what worker 0 gave to FOLDER/found.json."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

pytest.importorskip("ray")
pytest.importorskip("pandas")

import ray
import ray.train.torch
from ray.train import FailureConfig, RunConfig, ScalingConfig

from dure.integrations.ray_train import attach, reporting

EPOCHS, STEPS = 4, 6
FAILING = {"bsp": "error", "averaging:period=8": "kill"}


def made(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def losses_of(model, dtype, epoch):
    """A loss for each batch of this worker; a step comes between two."""
    rank = ray.train.get_context().get_world_rank()
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


def by_dure(dtype, sync, fails=None):
    """The same loop; it reports after each epoch if it `fails` in the third."""
    model, optimizer = made(dtype)
    start, losses = restored(model, optimizer), []
    optimizer, replica = attach(model, optimizer, sync=sync)
    for epoch in range(start, EPOCHS):
        for loss in losses_of(model, dtype, epoch):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if fails:
            if epoch == 2 and start == 0:
                fail(fails, replica.rank)
            with reporting(replica, {"epoch": epoch}) as folder:
                torch.save(state_of(model, optimizer, epoch), f"{folder}/state.pt")
    replica.close()
    return given(model, losses)


def fail(how, rank):
    if how == "error" and rank == 1:
        raise RuntimeError("an error of the user's")
    if how == "kill" and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def uninterrupted(_):
    found = {
        name: [by_ray(dtype), by_dure(dtype, "bsp")]
        for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32))
    }
    return found | {sync: by_dure(torch.float32, sync) for sync in FAILING}


def interrupted(config):
    return by_dure(torch.float32, config["sync"], FAILING[config["sync"]])


def result_of(loop, folder, sync):
    """A start of the workers takes seconds; so all trainings that do not fail share one."""
    failure = FailureConfig(max_failures=1)
    run = RunConfig(storage_path=str(folder), name=sync or "uninterrupted", failure_config=failure)
    scaling = ScalingConfig(num_workers=2)
    trainer = ray.train.torch.TorchTrainer(
        loop, train_loop_config={"sync": sync}, scaling_config=scaling, run_config=run
    )
    return trainer.fit().return_value


def main(folder):
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    whole = result_of(uninterrupted, folder, "")
    found = whole | {sync: [whole[sync], result_of(interrupted, folder, sync)] for sync in FAILING}
    (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
