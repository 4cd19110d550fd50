"""The script of plain data parallelism that a plan prints: it runs, and trains what dure trains under BSP."""

import ast
import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.runs import virtual

import dure
from dure.job.job import load_job
from dure.planner.candidates import Scene
from dure.planner.commands import Command, command_of, ddp_script, script_of
from dure.planner.options import PlanOptions
from dure.planner.ranking import ranked
from dure.planner.timing import timed
from dure.run.config import TrainConfig
from dure.runtime.virtual.cluster import Cluster, Machines

ROOT = Path(__file__).parents[2]

JOB = """\
import torch
from torch import nn

import dure


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(4, 3)

    def forward(self, x, scale):
        return self.dense(x) * scale


def job():
    draw = torch.Generator().manual_seed(0)
    x, scale = torch.randn(64, 4, generator=draw), torch.rand(64, 1, generator=draw)
    return dure.Job(
        model=Scaled,
        loss=nn.functional.cross_entropy,
        train=dure.Data({"x": x, "scale": scale}, torch.randint(0, 3, (64,), generator=draw)),
        batch_size=8,
        steps=6,
        optimizer=dure.OptimizerSpec("adamw", lr=0.05, betas=(0.8, 0.99), weight_decay=0.1, clip=0.4),
        groups=lambda name, parameter: {"weight_decay": 0.0} if parameter.dim() < 2 else {},
        schedule="cosine:steps=6,warmup=2",
    )
"""


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_script_of_a_plan_trains_as_bsp_does(tmp_path, ranks):
    (tmp_path / "own.py").write_text(JOB)
    text = f"{tmp_path / 'own.py'}:job"
    script = ddp_script(load_job(text), text, None, workers=ranks, batch=8, line="torchrun ddp.py")
    assert script is not None
    (tmp_path / "ddp.py").write_text(script)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "ddp.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if ranks == 1:  # what torchrun sets, without the seconds of its own process
        launch, place = ["ddp.py"], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        environment |= {**place, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, *launch], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = torch.load(tmp_path / "model.pt", weights_only=True)
    flat = torch.cat([each.flatten() for each in theirs.values()])
    torch.testing.assert_close(flat, virtual(text, "bsp", workers=ranks, seed=0).params, rtol=1e-5, atol=1e-6)
    first = torch.cat([each.detach().flatten() for each in load_job(text).build(0).parameters()])
    assert (flat - first).abs().max() > 0.01


@pytest.mark.parametrize(
    ("optimizer", "written"),
    [
        (dure.OptimizerSpec("sgd", lr=0.1), "torch.optim.SGD(model.parameters(), lr=0.1)"),
        (
            dure.OptimizerSpec("momentum", lr=0.1, nesterov=True),
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)",
        ),
        (dure.OptimizerSpec("adamw", lr=0.1), "torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)"),
        (dure.OptimizerSpec("adagrad", lr=0.1), "torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-08)"),
    ],
)
def test_defaults_that_differ_from_those_of_pytorch_are_written(optimizer, written):
    job = load_job("digits-mlp").adjusted(optimizer=optimizer)
    assert written in ddp_script(job, "digits-mlp", None, workers=2, batch=8, line="torchrun ddp.py")


@pytest.mark.parametrize("gpus", [False, True])
def test_the_command_and_the_script_for_gpus_train_on_them(tmp_path, gpus):
    (tmp_path / "own.py").write_text(JOB)
    text = f"{tmp_path / 'own.py'}:job"
    kind = Machines(count=2, gpus=2) if gpus else Machines(count=2, workers=2)
    job = load_job(text)
    scene, options = Scene(job, Cluster(machines=(kind,)), 32), PlanOptions(job=text)
    row = ranked("bsp", timed(scene, "bsp"), scene)
    command = command_of(scene, options, row)
    script = script_of(command, job, named=True)
    assert ("--device cuda" in command.line) == gpus
    lines = ["import os", 'device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))']
    lines += ["model = DistributedDataParallel(job.build(seed=0).to(device), gradient_as_bucket_view=True)"]
    for line in [*lines, "torch.accelerator.set_device_index(device.index)"]:
        assert (line in script.splitlines()) == gpus
    moved = "model(**{key: each.to(device) for key, each in inputs.items()}), targets.to(device))"
    assert (moved if gpus else "model(**inputs), targets)") in script
    ast.parse(script)


def test_the_command_and_the_script_have_the_rate_that_reached_the_target():
    scene, options = Scene(load_job("digits-mlp"), Cluster.uniform(workers=4), 128), PlanOptions(job="digits-mlp")
    row = ranked("bsp", timed(scene, "bsp"), scene)
    for scaled, rate in ((True, 0.4), (False, 0.1)):
        command = command_of(scene, options, row, scaled=scaled)
        assert ("--scale-lr" in command.line) == scaled
        assert f"torch.optim.SGD(model.parameters(), lr={rate})" in script_of(command, scene.job, named=True)


def test_an_optimizer_that_pytorch_lacks_has_no_script():
    job = load_job("digits-mlp").adjusted(optimizer=dure.OptimizerSpec("rmsprop", lr=0.1))
    assert ddp_script(job, "digits-mlp", None, workers=2, batch=8, line="torchrun ddp.py") is None


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("ranks", [(2,), (2, 2), (2, 1)])
def test_a_script_says_first_what_is_to_be_filled_in(named, ranks):
    command = Command(TrainConfig(job="digits-mlp", strategy="bsp", batch_size=8, on="torchrun"), ranks)
    script = script_of(command, load_job("digits-mlp"), named=named)
    nodes = list(ast.walk(ast.parse(script)))
    defined = {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    defined |= {each.asname or each.name.split(".")[0] for node in nodes for each in getattr(node, "names", [])}
    missing = {each.id for each in nodes if isinstance(each, ast.Name)} - defined - set(dir(builtins))
    missing |= {word for word in ("NODE", "HOST", "RANKS") if word in script.splitlines()[1].split()}
    wanted = {(2,): set(), (2, 2): {"NODE", "HOST"}, (2, 1): {"NODE", "HOST", "RANKS"}}[ranks]
    assert missing == wanted | (set() if named else {"make_job"})
    assert ("# This is a template: make_job is " in script) != named
    assert all(f"# {each} is " in script for each in missing - {"make_job"})
