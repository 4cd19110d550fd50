"""The diffs of docs/how-to/from-ddp.md, applied to scripts with DistributedDataParallel, at two ranks of torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "from-ddp.md").read_text(encoding="utf-8")

BEGIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, 8, sampler=sampler)
loss_fn, epochs = torch.nn.functional.mse_loss, 2
"""
LOOP = """
model = DistributedDataParallel(model, device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        scheduler.step()
torch.save({key.removeprefix("module."): value for key, value in model.state_dict().items()}, f"{FILE}{rank}.pt")
dist.destroy_process_group()
"""

ACCUMULATION = """
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
ACCUM = 3
WRAP
for i, (x, y) in enumerate(loader):
    loss = loss_fn(model(x), y) / ACCUM
    loss.backward()
    if (i + 1) % ACCUM == 0:
        optimizer.step()
        optimizer.zero_grad()
LAST
torch.save({key.removeprefix("module."): value for key, value in model.state_dict().items()}, f"{FILE}{rank}.pt")
dist.destroy_process_group()
"""

MIDDLE = """
import dure
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
batches = list(loader)
def steps(replica, batches):
    for x, y in batches:
        loss_fn(model(x), y).backward()
        replica.step()
        scheduler.step()
    return model[0].weight.detach().clone()
"""
SAVE = """
replica = dure.attach(model, optimizer, sync="averaging:period=8")
steps(replica, batches[:3])
if rank == 0:
    validate(model)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    torch.save({name: part.state_dict() for name, part in parts.items()}, "last.pt")
unbroken = steps(replica, batches[3:])
replica.close()
dist.barrier()
"""
RESUME = """
saved = torch.load("last.pt")
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
scheduler.load_state_dict(saved["scheduler"])
assert torch.equal(steps(replica, batches[3:]), unbroken)
replica.close()
dist.destroy_process_group()
"""


def diffs():
    """The diffs of the page, each without the indentation of its block."""
    found = re.findall(r"^( *)```diff\n(.*?)^ *```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [re.sub(f"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


def patched(script, diff):
    """`script` with the diff: its lines without + are searched in their order, new lines stand before the next."""
    lines, done, new = script.splitlines(), [], []
    for mark, text in ((line[:1], line[1:]) for line in diff.splitlines()):
        if mark == "+":
            new.append(text)
            continue
        place = lines.index(text)
        done += [*lines[:place], *new, *([text] if mark == " " else [])]
        lines, new = lines[place + 1 :], []
    return "\n".join([*done, *new, *lines])


def run(tmp_path, script):
    (tmp_path / "script.py").write_text(script)
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_first_diff_leaves_the_result_as_it_is(tmp_path):
    ddp = LOOP.replace("FILE", "'ddp'").replace(", device_ids=[local_rank]", "")
    run(tmp_path, BEGIN + ddp)
    dure = patched(LOOP.replace("FILE", "'dure'"), diffs()[0])
    run(tmp_path, BEGIN + dure)
    for rank in range(2):
        one, other = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("ddp", "dure"))
        assert one.keys() == other.keys()
        differ = {key for key in one if not torch.equal(one[key], other[key])}
        # DDP sends the buffers of rank 0 before a forward, so rank 1 ends with those of its own last batch
        assert differ <= ({"1.running_mean", "1.running_var"} if rank else set())


@pytest.mark.long
def test_the_diff_of_accumulation_differs_by_rounding_and_steps_on_the_last_batch(tmp_path):
    last = "optimizer.step()"  # the batch that is left over: 4 batches, 3 of which make a step
    ddp = ACCUMULATION.replace("WRAP", "model = DistributedDataParallel(model)").replace("LAST", last)
    run(tmp_path, BEGIN + ddp.replace("FILE", "'ddp'"))
    attach = 'import dure; replica = dure.attach(model, optimizer, sync="bsp", buffers="rank0")'
    dure = patched(ACCUMULATION, diffs()[1]).replace("WRAP", attach)
    dure = dure.replace("LAST", "assert replica.clock == 2; replica.state_dict(); replica.close()")
    run(tmp_path, BEGIN + dure.replace("FILE", "'dure'"))
    one, other = (torch.load(tmp_path / f"{name}0.pt") for name in ("ddp", "dure"))
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.long
def test_the_diffs_of_a_checkpoint_resume_exactly(tmp_path):
    save, resume = diffs()[2:4]
    assert "replica.load_state_dict" in resume.partition("dure.attach")[2], "it comes after attach"
    begin = BEGIN + MIDDLE + "def validate(model): pass\n"
    run(tmp_path, begin + patched(SAVE, save) + patched(RESUME, resume))
