"""Cases of each rank in the tests of `shard=` in a user's loop: `torchrun --nproc-per-node N sharded.py FOLDER NAMES`.

Rank r writes what the cases return to FOLDER/r.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import dure

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
STAGES = ("zero:stage=1", "zero:stage=2")
RULES = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
}


class Net(nn.Module):
    """A tied and a frozen parameter, batch norm, and layers that are slices of their own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 32)
        self.wide = nn.Linear(32, 20000)  # of slices of their own, with the next
        self.narrow = nn.Linear(20000, 32)
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.head = nn.Linear(32, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.narrow(torch.relu(self.wide(self.embedding(tokens))))
        return self.head(torch.relu(self.frozen(self.norm(hidden))))


def groups(net):
    """The biases learn at half the rate; the other parameters decay."""
    trained = [each for each in net.parameters() if each.requires_grad]
    small = [each for each in trained if each.dim() == 1]
    return [{"params": small, "lr": 0.05}, {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.01}]


def batches(steps, size=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(10, (size,), generator=generator)
        yield tokens.chunk(WORLD)[RANK], ((tokens + 3) % 10).chunk(WORLD)[RANK]


def flat(net):
    return torch.cat([each.detach().reshape(-1) for each in net.parameters()])


def digest(values):
    """Of the bits, and some of the values."""
    values = values.detach()
    return [values.view(torch.int32).sum(dtype=torch.int64).item(), values[:: max(len(values) // 4000, 1)].tolist()]


def train(rule="adamw", *, shard=None, steps=4, clip=None, net=None, between=lambda replica, number: None, **more):
    """The model after `steps` steps; `between` is called after the backward of each."""
    net = net or Net()
    optimizer = RULES[rule](groups(net))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with dure.attach(net, optimizer, sync="bsp", shard=shard, **more) as replica:
        for number, (tokens, targets) in enumerate(batches(steps)):
            cross_entropy(net(tokens), targets).backward()
            between(replica, number)
            if clip:
                replica.clip_grad_norm_(clip)
            replica.step()
            scheduler.step()
    return net


def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# ---- cases


def case_equal():
    """Parameters and running means with shards, without, and of DistributedDataParallel."""
    gave = {}
    for rule in RULES:
        for shard in (None, *STAGES):
            net = train(rule, shard=shard, buffers="rank0")
            gave[f"{rule} {shard}"] = [digest(flat(net)), net.norm.running_mean.tolist()]
        gave[f"{rule} ddp"] = beside(rule)
    return gave


def beside(rule, clip=None, steps=4):
    torch.distributed.init_process_group("gloo")
    net = Net()
    ddp = DistributedDataParallel(net)
    optimizer = RULES[rule](groups(net))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for tokens, targets in batches(steps):
        optimizer.zero_grad(set_to_none=False)
        cross_entropy(ddp(tokens), targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scheduler.step()
    torch.distributed.destroy_process_group()
    return [digest(flat(net)), net.norm.running_mean.tolist()]


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    gave = {name: globals()[f"case_{name}"]() for name in names}
    (Path(folder) / f"{RANK}.json").write_text(json.dumps(gave))
