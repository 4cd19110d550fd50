"""Groups of ranks: `fully_shard` in every step inside a group, and a method of dure, every few steps, across them.

python examples/11_fsdp_groups.py                               # one group of one rank
torchrun --nproc-per-node 4 examples/11_fsdp_groups.py          # two groups of two ranks
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dure
from dure.job.data import load_digits

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = 2 if dist.get_world_size() % 2 == 0 else 1
mesh = init_device_mesh("cpu", (groups, dist.get_world_size() // groups), mesh_dim_names=("groups", "inside"))

digits = load_digits()
data = TensorDataset(digits.train.inputs, digits.train.targets)

for sync in ("averaging:period=8", "bmuf:period=8,momentum=0.5", "diloco:period=8"):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 65), torch.nn.ReLU(), torch.nn.Linear(65, 10))
    fully_shard(model[1], mesh=mesh["inside"])
    fully_shard(model, mesh=mesh["inside"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with dure.attach(model, optimizer, sync=sync, across=mesh["groups"]) as replica:
        loader = DataLoader(data, batch_size=16, sampler=replica.sampler(data))
        for _ in range(6):
            for inputs, targets in loader:
                cross_entropy(model(inputs), targets).backward()
                replica.step()  # in place of optimizer.step() and zero_grad()
    with torch.no_grad():  # all ranks of a group compute a forward together
        right = (model(digits.test.inputs).argmax(dim=1) == digits.test.targets).double().mean()
    if replica.rank == 0:
        print(f"{sync:28}{'learned' if right > 0.9 else f'only {right:.0%} right'}")

dist.destroy_process_group()
