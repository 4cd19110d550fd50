"""`dure.attach` over servers at two ranks, on the device and on the CPU.

    python -m accelerator.attach_programs [CASE ...]      one line of JSON per case: name, then what each rank gave

Each rank trains on the CPU and then on the device, and reports how far the results are apart. Ranks of methods without
an order take turns, so that updates arrive in the same order twice. The ranks are forks of this process, which has
loaded the device and not used it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerator import target
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dure

STEPS = 6
CASES: dict[str, Callable[[], Any]] = {}


def case(function):
    """Lists a case: a function that each of two ranks calls. It returns values that JSON has."""
    CASES[function.__name__] = function
    return function


# --- a model and a loop ---


class Net(nn.Module):
    """With running statistics, a frozen parameter, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(rank())  # rank 0's values reach the others
        self.first, self.norm, self.last = nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 5)
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)
        self.register_buffer("mask", torch.rand(20) > 0.3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x * self.frozen))) * self.mask)


def rank() -> int:
    return int(os.environ["RANK"])


def batches(device: str, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7 + rank())
    for _ in range(steps):
        x, y = torch.randn(8, 12, generator=generator), torch.randint(5, (8,), generator=generator)
        yield x.to(device), y.to(device)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def waits(device: str) -> int:
    """How often the host has waited for the device."""
    return 0 if device == "cpu" else torch.standin.synchronizations()


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str) -> Any:
    sync, *topology = strategy.split()
    return dure.attach(model, optimizer, sync=sync, topology=topology[0] if topology else None)


def payload(replica: Any) -> int:
    """Bytes of tensors that this rank has sent."""
    return sum(peer.payload_nbytes_sent for peer in replica._node.wire.traffic.values())


class Turns:
    """Lets one rank work at a time: rank 0, then rank 1, then rank 0."""

    def __init__(self) -> None:
        self.tokens = [os.pipe() for _ in range(2)]
        os.write(self.tokens[0][1], b"!")

    def mine(self) -> ExitStack:
        """Inside the block it is this rank's turn."""
        os.read(self.tokens[rank()][0], 1)
        block = ExitStack()
        block.callback(os.write, self.tokens[1 - rank()][1], b"!")
        return block


TURNS = Turns()


@dataclass
class Result:
    """What a training gave: `values` of parameters, buffers and losses."""

    values: Tensor
    sent: int
    waits: list[int] = field(default_factory=list)


def train(device: str, strategy: str, *, in_turn: bool = False, stream: torch.Stream | None = None) -> Result:
    model = Net().to(device)
    optimizer = sgd(model)
    counts, losses = [], []
    with ExitStack() as inside:
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream())
            inside.enter_context(stream)
        replica = inside.enter_context(attach(model, optimizer, strategy))
        for x, y in batches(device):
            before = waits(device)
            loss = cross_entropy(model(x), y)
            loss.backward()
            with TURNS.mine() if in_turn else ExitStack():
                replica.step()
            counts.append(waits(device) - before)
            losses.append(loss.detach())
        with TURNS.mine() if in_turn else ExitStack(), replica.evaluation():
            seen = model.first.weight.detach().clone()
        replica.close()
        values = torch.cat([each.detach().double().cpu().flatten() for each in (*model.state_dict().values(), seen)])
        return Result(values, payload(replica), counts)


def compared(strategy: str, **more: Any) -> dict[str, Any]:
    """Two trainings, on the CPU and on the device, by one line of figures."""
    start = Net()
    on_cpu, on_device = train("cpu", strategy, **more), train(target.of_rank(rank()), strategy, **more)
    begun = torch.cat([each.detach().double().flatten() for each in start.state_dict().values()])
    return {
        "moved": difference(on_cpu.values[: len(begun)], begun),
        "difference": difference(on_cpu.values, on_device.values),
        "sent": [on_cpu.sent, on_device.sent],
        "waits": on_device.waits,
    }


def difference(one: Tensor, other: Tensor) -> float:
    """The largest one; infinite where a value is NaN."""
    far = (one - other).abs().max().item()
    return far if far == far else float("inf")


ORDERED = ("bsp ps",)


@case
def ordered():
    """Servers make the updates of all workers one, or wait for all of them."""
    return {strategy: compared(strategy) for strategy in ORDERED}


# --- two ranks ---


def on_two_ranks(work: Callable[[], Any]) -> list[Any]:
    """What each rank gave, or the text of its error."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    children = [_rank(number, port, work) for number in range(2)]
    given = []
    for child, reading in children:
        with os.fdopen(reading) as pipe:
            given.append(json.loads(pipe.read() or '"no answer"'))
        os.waitpid(child, 0)
    return given


def _rank(number: int, port: int, work: Callable[[], Any]) -> tuple[int, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            result = work()
        except BaseException:  # noqa: BLE001  (the parent reports it)
            result = traceback.format_exc()
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(result))
        os._exit(0)
    os.close(writing)
    return child, reading


def main(names: list[str]) -> None:
    target.prepare()
    for name in names or CASES:
        print(json.dumps([name, *on_two_ranks(CASES[name])]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
