"""A training script with `fully_shard`, as users of FSDP2 write them: it reads and writes a folder of DCP.

python fsdp_program.py RANK RANKS STORE JOB OPTIMIZER BEGIN STEPS READ WRITE

The mini-batches of step BEGIN and later are those of a run of dure with one stream for all workers, of 12 samples for
each rank. WRITE is "-" where nothing is to be written. The last line of output is the sum of the losses.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from dure.job.job import load_job

SAMPLES = 12
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
}


def states(model, optimizer):
    found, optim = get_state_dict(model, optimizer)
    return {"model": found, "optim": optim}


def main(rank, ranks, store, job, optimizer, begin, steps, read, write):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    job = load_job(job, batch_size=SAMPLES, split="striped", dtype="float64")
    model = job.build(99)  # other values than those that are read
    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    rule = OPTIMIZERS[optimizer](model.parameters())
    there = states(model, rule)
    dcp.load(there, checkpoint_id=read)
    set_state_dict(model, rule, model_state_dict=there["model"], optim_state_dict=there["optim"])
    sampler = job.samplers([SAMPLES] * ranks, seed=3)[rank]
    sampler.number, total = begin, 0.0
    for step in range(begin, begin + steps):
        inputs, targets = job.train.batch(sampler.next(), (3, 1 + rank, step))
        loss = job.loss(model(inputs), targets)
        loss.backward()
        rule.step()
        rule.zero_grad()
        total += float(loss)
    if write != "-":
        dcp.save(states(model, rule), checkpoint_id=write)
    dist.destroy_process_group()
    sys.stdout.write(f"{total!r}\n")


if __name__ == "__main__":
    rank, ranks, store, job, optimizer, begin, steps, read, write = sys.argv[1:]
    main(int(rank), int(ranks), store, job, optimizer, int(begin), int(steps), read, write)
