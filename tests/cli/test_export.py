"""`dure export` and `dure import`: models of runs for other programs, and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support import fsdp_program
from support.commands import environment, here, refused
from support.purposes import soaked
from support.runs import virtual
from support.shared_layers import pairs
from support.stage_jobs import job_text
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import dure
from dure.core.regular_file import CHECKPOINTS
from dure.job.job import load_job
from dure.run import checkpoint

ONE, THREE = "zero:stage=1", "zero:stage=3"
OPTIONS = {"seed": 3, "dtype": "float64", "split": "striped"}
GPT = "char-gpt:layers=1,width=8,heads=2,context=8,tied=true"


def started(folder, partition="none", workers=2, job="plain", *, on="virtual", **options):
    given = {"steps": 3, "checkpoint_every": 3, "batch_size": 12, "optimizer": "adamw:lr=0.01,weight_decay=0.1"}
    text = job if "-" in job else job_text(job)
    return dure.train(text, partition=partition, workers=workers, out=folder, on=on, **given | OPTIONS | options)


def done(*words):
    found = here(*map(str, words), "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def model_of(job, seed=99):
    return load_job(job if "-" in job else job_text(job), dtype="float64").build(seed)


def delivered(partition, workers, job, **options):
    """The model after three steps, as the run itself delivers it."""
    text = job if "-" in job else job_text(job)
    given = {"batch_size": 12, "optimizer": "adamw:lr=0.01,weight_decay=0.1", "steps": 3, **OPTIONS, **options}
    return virtual(text, f"bsp collective {partition}", workers=workers, **given).params


def flat(module):
    return torch.cat([each.detach().reshape(-1) for each in module.parameters() if each.requires_grad])


# ---- safetensors


@pytest.mark.parametrize(
    ("partition", "workers", "job"),
    [
        (THREE, 2, "normed_last"),
        *soaked(
            (ONE, 3, "plain"),
            ("none", 2, "normed_last"),
            (pairs(2), 2, "plain"),
            ("gpipe:stages=2,micro=2", 2, "tied"),
            (ONE, 2, GPT),
            (THREE, 2, GPT),
        ),
    ],
)
def test_a_state_dict_is_loaded_strictly(partition, workers, job, tmp_path):
    started(tmp_path / "run", partition, workers, job)
    said = done("export", tmp_path / "run", "--to", "safetensors", "--out", tmp_path / "m.safetensors", "--trust")
    assert said == {"out": str(tmp_path / "m.safetensors"), "step": 3, "optimizer": False}
    model = model_of(job)
    model.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
    assert torch.equal(flat(model), delivered(partition, workers, job))
    parts = checkpoint.load(tmp_path / "run" / CHECKPOINTS).parts
    if "normed" in job:
        means = torch.stack([parts[f"worker-{number}"].tensors["buffers"] for number in range(workers)]).mean(0)
        floating = [each.reshape(-1) for each in model.buffers() if each.is_floating_point()]
        torch.testing.assert_close(torch.cat(floating), means[: sum(each.numel() for each in floating)])


def test_a_model_that_was_changed_elsewhere_comes_back(tmp_path):
    started(tmp_path / "run", ONE)
    done("export", tmp_path / "run", "--trust")
    file = tmp_path / "run" / "model.safetensors"
    changed = {name: each + 1 for name, each in load_file(file).items()}
    save_file(changed, tmp_path / "changed.safetensors")
    said = done("import", tmp_path / "changed.safetensors", tmp_path / "run", "--step", "7", "--trust")
    assert said == {"folder": str(tmp_path / "run"), "step": 7, "optimizer": False}
    parts = checkpoint.load(tmp_path / "run" / CHECKPOINTS).parts
    assert parts.plain["worker-1"]["clock"] == 7
    assert parts.plain["worker-1"]["optimizer"] == {"steps": 0}
    assert not parts["worker-0"].tensors["optimizer.mean"].any()
    run = dure.train("", resume=tmp_path / "run", partition=THREE, steps=7, checkpoint_every=7)
    assert run.history[-1]["step"] == 7
    done("export", tmp_path / "run", "--out", tmp_path / "again.safetensors", "--trust")
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == changed.keys()
    assert all(torch.equal(again[name], changed[name]) for name in changed)


# ---- torch.distributed.checkpoint


def read(path, model, optimizer):
    found, optim = get_state_dict(model, optimizer)
    dcp.load({"model": found, "optim": optim}, checkpoint_id=path, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=optim)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("partition", "job", "text", "kind"),
    [
        (THREE, "normed_last", "adamw:lr=0.01,weight_decay=0.1", "adamw"),
        *soaked((ONE, "tied", "momentum:lr=0.05", "momentum"), ("none", "plain", "adagrad:lr=0.01", "adagrad")),
    ],
)
def test_one_process_goes_on_from_dcp_as_the_run_does(partition, job, text, kind, tmp_path):
    started(tmp_path / "run", partition, 1 if "normed" in job else 2, job, optimizer=text)
    workers = 1 if "normed" in job else 2
    done("export", tmp_path / "run", "--to", "dcp", "--out", tmp_path / "dcp", "--trust")
    model, loaded = model_of(job), load_job(job_text(job), batch_size=12, split="striped", dtype="float64")
    optimizer = fsdp_program.OPTIMIZERS[kind](model.parameters())
    read(tmp_path / "dcp", model, optimizer)
    samplers = loaded.samplers([12] * workers, seed=3)
    for sampler in samplers:
        sampler.number = 3
    for step in (3, 4):
        optimizer.zero_grad()
        for sampler in samplers:
            inputs, targets = loaded.train.batch(sampler.next(), (3, 1, step))
            (loaded.loss(model(inputs), targets) / workers).backward()
        optimizer.step()
    there = delivered("none", workers, job, steps=5, optimizer=text)
    torch.testing.assert_close(flat(model), there, rtol=0, atol=1e-9)


def program(tmp_path, job, optimizer, begin, steps, source, target):
    """Run two ranks of the script; the sums of their losses."""
    words = [tmp_path / f"store-{begin}", job_text(job), optimizer, begin, steps, source, target]
    extra = {"GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, fsdp_program.__file__, str(rank), "2", *map(str, words)],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment(**extra),
                )
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [float(text.split()[-1]) for text in said]


@pytest.mark.long
@pytest.mark.parametrize(
    ("partition", "job", "text", "kind"),
    [
        (ONE, "plain", "adamw:lr=0.01,weight_decay=0.1", "adamw"),
        *soaked((THREE, "plain", "momentum:lr=0.05", "momentum"), ("none", "plain", "adagrad:lr=0.01", "adagrad")),
    ],
)
def test_a_run_moves_to_a_script_with_fully_shard_and_back(partition, job, text, kind, tmp_path):
    folder = tmp_path / "run"
    started(folder, partition, 2, job, on="local", optimizer=text)
    done("export", folder, "--to", "dcp", "--trust")
    program(tmp_path, job, kind, 3, 4, folder / "dcp", tmp_path / "fsdp")
    steps = ["--step", 7] if kind == "momentum" else []
    said = done("import", tmp_path / "fsdp", folder, "--trust", *steps)
    assert said == {"folder": str(folder), "step": 7, "optimizer": True}
    run = dure.train("", resume=folder, partition=THREE if partition == ONE else "none", steps=10)
    whole = virtual(
        job_text(job), "bsp collective", workers=2, steps=10, batch_size=12, optimizer=text, eval_every=1, **OPTIONS
    )
    assert run.history[-1]["step"] == 10
    assert run.history[-1]["loss"] == pytest.approx(whole.rows[-1]["loss"], abs=1e-6)
    assert run.summary()["updates_applied"] == 20
    assert run.summary()["samples"] == 10 * 24


PEAK = """
import re, sys
from pathlib import Path
from dure.core.regular_file import CHECKPOINTS
from dure.run.export import SavedRun, write_model
from dure.run.saved_model import write_tensors

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

folder, out = map(Path, sys.argv[1:])
run = SavedRun(folder)
before = peak()
write_model(run, "safetensors", out / "model")
write_model(run, "dcp", out / "dcp")
write_tensors(out, run.setup, run.model, {})
print(peak() - before, run.replica.params.nbytes)
"""


@pytest.mark.long
def test_no_process_holds_the_state_of_the_whole_optimizer(tmp_path):
    """The resident memory of an export grows by a parameter, not by a vector of the optimizer."""
    started(tmp_path / "run", ONE, job="digits-mlp:hidden=1000,depth=30", steps=1, checkpoint_every=1, dtype="float32")
    words = [sys.executable, "-c", PEAK, str(tmp_path / "run"), str(tmp_path)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=200, env=environment(), check=True)
    grown, nbytes = map(int, found.stdout.split())
    assert nbytes > 100e6
    assert grown < 0.8 * nbytes  # PyTorch imports at its first use are half of it


# ---- refusals


def test_a_folder_of_pickles_needs_trust(tmp_path):
    (tmp_path / "dcp").mkdir()
    started(tmp_path / "run")
    said = refused("import", str(tmp_path / "dcp"), str(tmp_path / "run"))
    assert "holds pickles" in said
    assert "--trust" in said


def test_a_run_without_a_common_model_is_refused(tmp_path):
    started(tmp_path, sync="averaging:period=2", topology="collective")
    said = refused("export", str(tmp_path), "--trust")
    assert 'is a run of "averaging:period=2' in said
    assert '"bsp collective"' in said


def test_what_is_there_stays(tmp_path):
    started(tmp_path / "run")
    (tmp_path / "mine").write_text("mine")
    said = refused("export", str(tmp_path / "run"), "--out", str(tmp_path / "mine"), "--trust")
    assert f"{tmp_path / 'mine'} is there already" in said
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_rule_without_a_form_in_pytorch_is_refused(tmp_path):
    started(tmp_path, ONE, optimizer="rmsprop:lr=0.01")
    said = refused("export", str(tmp_path), "--to", "dcp", "--trust")
    assert "no optimizer that equals rmsprop" in said
    assert not [path for path in Path(tmp_path).iterdir() if "dcp" in path.name]


def test_a_model_of_another_run_is_refused(tmp_path):
    started(tmp_path / "run")
    save_file({"other": torch.zeros(3)}, tmp_path / "other.safetensors")
    said = refused("import", str(tmp_path / "other.safetensors"), str(tmp_path / "run"), "--trust")
    assert "has no parameter '0.0.weight'" in said
    done("export", tmp_path / "run", "--trust")
    file = tmp_path / "run" / "model.safetensors"
    said = refused("import", str(file), str(tmp_path / "run"), "--step", "2", "--trust")
    assert "has a checkpoint of step 3" in said
    save_file({name: each.float() for name, each in load_file(file).items()}, tmp_path / "half.safetensors")
    said = refused("import", str(tmp_path / "half.safetensors"), str(tmp_path / "run"), "--trust")
    assert "torch.float32" in said


@pytest.mark.parametrize("shape", [(1,), (3, 3)])
def test_a_buffer_of_another_shape_is_refused(shape, tmp_path):
    """A single value would be copied to all elements."""
    started(tmp_path / "run", job="normed_last")
    done("export", tmp_path / "run", "--trust")
    tensors = load_file(tmp_path / "run" / "model.safetensors")
    name = next(each for each in tensors if each.endswith("running_mean"))
    save_file(tensors | {name: tensors[name].new_zeros(shape)}, tmp_path / "other.safetensors")
    said = refused("import", str(tmp_path / "other.safetensors"), str(tmp_path / "run"), "--trust")
    assert f"{name} is torch.float64 of shape {shape}, and the buffer is" in said


def test_a_pipe_is_not_read(tmp_path):
    started(tmp_path / "run")
    os.mkfifo(tmp_path / "model.safetensors")
    said = refused("import", str(tmp_path / "model.safetensors"), str(tmp_path / "run"), "--trust")
    assert "it is no regular file" in said


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_folder_is_named(damage, tmp_path):
    started(tmp_path / "run")
    done("export", tmp_path / "run", "--to", "dcp", "--out", tmp_path / "dcp", "--trust")
    for file in (tmp_path / "dcp").glob("*.distcp"):
        content = file.read_bytes()
        file.unlink()
        if damage == "cut":
            file.write_bytes(content[:100])
    said = refused("import", str(tmp_path / "dcp"), str(tmp_path / "run"), "--trust")
    assert f"{tmp_path / 'dcp'}: " in said
    assert "The folder is damaged or incomplete" in said
    assert checkpoint.load(tmp_path / "run" / CHECKPOINTS).step == 3


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_folder_that_is_missing_is_named(to, tmp_path):
    started(tmp_path / "run")
    out = tmp_path / "missing" / "model"
    said = refused("export", str(tmp_path / "run"), "--to", to, "--out", str(out), "--trust")
    assert f"cannot write {out}: there is no folder {out.parent}" in said
