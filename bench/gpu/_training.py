"""A small GPT over characters on a device, trained with DistributedDataParallel or `dure.attach`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _char_gpt import GPT, loss_of, text
from _check import Setting, target
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dure


class Training:
    """A model on the device of this rank, its optimizer, and batches that lie on the device.

    Every rank has the same initial values and batches of its own.
    """

    def __init__(self, rank: int, setting: Setting, lr: float = 0.1) -> None:
        self.device = torch.device(target.of_rank(rank))
        length = setting.size(256, 8)
        layers, width, batch = setting.size(6, 1), setting.size(512, 16), setting.size(16, 2)
        characters, vocabulary = text()
        torch.manual_seed(0)
        self.model = GPT(vocabulary, layers=layers, width=width, length=length).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        draw = torch.Generator().manual_seed(1337 + rank)
        starts = torch.randint(len(characters) - length, (8, batch), generator=draw)
        rows = [torch.stack([characters[start : start + length + 1] for start in each]) for each in starts]
        self.batches = [(each[:, :-1].to(self.device), each[:, 1:].to(self.device)) for each in rows]
        self.clock = 0

    def backward(self, model: nn.Module) -> None:
        x, y = self.batches[self.clock % len(self.batches)]
        self.clock += 1
        loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]

    @property
    def params(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


class WithDDP(Training):
    """PyTorch's own. `register` may give the model a communication hook."""

    def __init__(
        self, rank: int, setting: Setting, register: Callable[[DistributedDataParallel], object] | None = None
    ):
        super().__init__(rank, setting)
        self.parallel = DistributedDataParallel(self.model)
        if register is not None:
            register(self.parallel)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward(self.parallel)
            self.optimizer.step()
            self.optimizer.zero_grad()
        torch.accelerator.synchronize()


class WithAttach(Training):
    """`dure.attach` under a strategy such as `bsp` or `ssp:bound=3 ps`."""

    def __init__(
        self, rank: int, setting: Setting, strategy: str = "bsp", *, lr: float = 0.1, **options: float
    ) -> None:
        super().__init__(rank, setting, lr)
        sync, _, topology = strategy.partition(" ")
        self.replica = dure.attach(self.model, self.optimizer, sync=sync, topology=topology or None, **options)

    def step(self) -> None:
        self.backward(self.model)
        self.replica.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        torch.accelerator.synchronize()
