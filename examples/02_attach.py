"""Your own training loop under four methods: as the only worker, or as one of several.

python examples/02_attach.py
torchrun --nproc-per-node 2 examples/02_attach.py
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dure
from dure.job.data import load_digits

digits = load_digits()
data = TensorDataset(digits.train.inputs, digits.train.targets)

for sync in ("bsp", "averaging:period=4", "downpour", "ssp:bound=3"):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dure.attach(model, optimizer, sync=sync) as replica:
        loader = DataLoader(data, batch_size=32, sampler=replica.sampler(data))
        for _ in range(6):
            for inputs, targets in loader:
                cross_entropy(model(inputs), targets).backward()
                replica.step()  # in place of optimizer.step() and zero_grad()
    right = (model(digits.test.inputs).argmax(dim=1) == digits.test.targets).double().mean()
    if replica.rank == 0:
        print(f"{sync:20}{'learned' if right > 0.9 else f'only {right:.0%} right'}")
