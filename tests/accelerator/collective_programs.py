"""`dure.attach` over collectives at two ranks, on the device under test and on the CPU.

    python -m accelerator.collective_programs NAME ...      one line of JSON per name: name, what each rank gave

A name is that of a case below, or a strategy. A rank trains by a strategy on the CPU and on the device. It reports the
difference of all values, the bytes sent on both, and how often the host waited for the device in each step. The ranks
are forks of this process, which has loaded the device and not used it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from accelerator import target
from support.raw_caller import CREDENTIALS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import dure
from dure.core.node import Apply
from dure.errors import PeerLost
from dure.job.gradient import Gradient
from dure.job.overlap import Overlap
from dure.job.replica import Replica
from dure.run.strategy import make
from dure.runtime.launch.rendezvous import Rendezvous, place
from dure.runtime.process.group import EngineOperation
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity
from dure.topology.collective.compressed import CompressedGroup
from dure.topology.collective.message_group import SentGroup, algorithm_of
from dure.user_loop.source import Exchange

STEPS = 6
LONGEST, GRACE = 90.0, 5.0
"""Seconds for rank 0's answer, and then for rank 1's."""
CASES: dict[str, Callable[[], Any]] = {}


def case(function):
    """List a case: a function that each of the two ranks calls. It returns values that JSON has."""
    CASES[function.__name__] = function
    return function


# --- a model and a loop ---


class Net(nn.Module):
    """With running statistics, a frozen parameter, a constant, and a parameter outside of the first slice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))  # rank 0's values reach the others
        self.first, self.norm, self.last = nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Linear(20, 5)
        self.frozen = nn.Parameter(torch.randn(12), requires_grad=False)
        self.register_buffer("mask", torch.rand(20) > 0.3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x * self.frozen))) * self.mask)


class Branches(nn.Module):
    """A model of two branches, each on a stream of its own on a device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))
        self.one, self.other = nn.Linear(12, 5), nn.Linear(12, 5)
        self.side: torch.Stream | None = None

    def forward(self, x):
        if self.side is None:
            return self.one(x) + self.other(x)
        main = torch.accelerator.current_stream()
        self.side.wait_stream(main)
        with self.side:
            other = self.other(x)
        main.wait_stream(self.side)
        other.record_stream(main)
        x.record_stream(self.side)
        return self.one(x) + other


def batches(device: str, steps: int = STEPS):
    generator = torch.Generator().manual_seed(7 + int(os.environ["RANK"]))
    for _ in range(steps):
        x, y = torch.randn(8, 12, generator=generator), torch.randint(5, (8,), generator=generator)
        yield x.to(device), y.to(device)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def device() -> str:
    return target.of_rank(int(os.environ["RANK"]))


def synchronizations() -> int:
    """How often the host has waited for the device, where it counts that."""
    return torch.standin.synchronizations() if target.device_type() == "standin" else 0


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str, **more: Any):
    sync, *topology = strategy.split()
    return dure.attach(model, optimizer, sync=sync, topology=topology[0] if topology else None, **more)


def train(
    device: str, strategy: str, *, stream: torch.Stream | None = None, model: nn.Module | None = None
) -> dict[str, Any]:
    """Train, on a device on the stream `stream`, and return all values, the bytes sent and the waits of each step."""
    model = (model or Net()).to(device)
    optimizer = sgd(model)
    waits, losses = [], []
    with ExitStack() as inside:
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream())
            inside.enter_context(stream)
        replica = inside.enter_context(attach(model, optimizer, strategy))
        for x, y in batches(device):
            before = synchronizations()
            loss = cross_entropy(model(x), y)
            loss.backward()
            replica.step()
            waits.append(synchronizations() - before)
            losses.append(loss.detach())
        with replica.evaluation():
            seen = next(model.parameters()).detach().clone()
        replica.close()
        sent = bytes_sent(replica)
        values = [tensor.detach().double().cpu().flatten() for tensor in (*model.state_dict().values(), seen, *losses)]
    return {"values": torch.cat(values), "bytes": sent, "waits": waits}


def bytes_sent(replica) -> int:
    """By the engine, as the group counts them, and by the wire."""
    by_engine = getattr(replica._worker.sessions.members, "bytes_sent", 0)
    return by_engine + sum(each.payload_nbytes_sent for each in replica._node.wire.traffic.values())


def compare(on_cpu: dict[str, Any], on_device: dict[str, Any]) -> dict[str, Any]:
    return {
        "moved": difference(on_cpu["values"], torch.zeros_like(on_cpu["values"])),
        "difference": difference(on_cpu["values"], on_device["values"]),
        "bytes": [on_cpu["bytes"], on_device["bytes"]],
        "waits": on_device["waits"],
        "digest": on_cpu["values"].sum().item(),
    }


def difference(one: Tensor, other: Tensor) -> float:
    """The largest one; infinite where a value is NaN."""
    far = (one - other).abs().max().item()
    return far if far == far else float("inf")


def both_ways(strategies: list[str]) -> list[dict[str, Any]]:
    return [compare(train("cpu", text), train(device(), text)) for text in strategies]


# --- streams ---


@case
def on_a_stream_of_the_user():
    strategies = ("bsp", "averaging:period=2", "bsp collective:algorithm=ring")
    on_device = [train(device(), text, stream=torch.Stream(device())) for text in strategies]
    return [compare(train("cpu", text), got) for text, got in zip(strategies, on_device, strict=True)]


def branches() -> dict[str, Any]:
    model = Branches()
    on_cpu = train("cpu", "bsp", model=model)
    torch.accelerator.synchronize()
    model = Branches()
    model.side = torch.Stream(device())
    return compare(on_cpu, train(device(), "bsp", model=model))


@case
def branches_on_two_streams():
    return [branches()]


@case
def fault_slice_does_not_wait_for_its_streams():
    Overlap._wait_for_writers = lambda *_: None
    return [branches()]


@case
def fault_results_are_not_waited_for():
    EngineOperation._wait_in_loop = lambda self: iter(())
    return [compare(train("cpu", "bsp"), train(device(), "bsp"))]


@case
def fault_slice_is_sent_on_a_stream_that_does_not_wait():
    launch = Exchange._launch

    def elsewhere(self, part):
        with torch.Stream(device()):
            return launch(self, part)

    Exchange._launch = elsewhere
    return [compare(train("cpu", "bsp"), train(device(), "bsp"))]


# --- lost ranks ---


def lost(signal_number: int) -> Any:
    """Rank 1 sends itself a signal before it sends a slice; what rank 0 says, and after how many seconds."""
    model = Net().to(device())
    began = 0.0
    try:
        with attach(model, sgd(model), "bsp", frozen_after=3.0) as replica:
            for step, (x, y) in enumerate(batches(device())):
                if (step, replica.rank) == (2, 1):
                    Exchange._launch = lambda *_: (time.sleep(0.5), os.kill(os.getpid(), signal_number))
                began = time.monotonic()
                cross_entropy(model(x), y).backward()
                replica.step()
    except PeerLost as error:
        return [str(error), time.monotonic() - began]
    return "nothing"


@case
def killed_rank():
    return lost(signal.SIGKILL)


@case
def frozen_rank():
    return lost(signal.SIGSTOP)


# --- scaled losses ---


def scaled(device: str, strategy: str, *, autocast: bool) -> dict[str, Any]:
    """Train with a gradient scaler; at step 3 the loss of rank 1 overflows."""
    model = Net().to(device)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, growth_interval=2)
    scales, clocks, unmoved = [], [], []
    rank = int(os.environ["RANK"])
    with attach(model, sgd(model), strategy) as replica:
        for step, (x, y) in enumerate(batches(device)):
            with torch.autocast(kind, torch.bfloat16, enabled=autocast):
                loss = cross_entropy(model(x), y)
            if (step, rank) == (3, 1):
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            before = replica._replica.params.clone()
            momentum = [state["momentum_buffer"].clone() for state in replica.optimizer.state.values()]
            replica.step(scaler)
            scaler.update()
            after = [state["momentum_buffer"] for state in replica.optimizer.state.values()]
            unmoved.append(torch.equal(before, replica._replica.params) and all(map(torch.equal, momentum, after)))
            scales.append(scaler.get_scale())
            clocks.append(replica.clock)
        values = torch.cat([each.detach().flatten() for each in model.parameters()]).double()
    return {"values": values.cpu(), "bytes": 1, "waits": [], "scales": scales, "clocks": clocks, "unmoved": unmoved}


SCALED = ["bsp", "averaging:period=5", "diloco:period=5", "averaging:period=5 collective:algorithm=ring"]


@case
def gradient_scalers():
    return {text: _scaled(text, autocast=False) for text in SCALED} | {"autocast": _scaled("bsp", autocast=True)}


def _scaled(text: str, *, autocast: bool) -> dict[str, Any]:
    on_cpu, on_device = (scaled(each, text, autocast=autocast) for each in ("cpu", device()))
    told = ("scales", "clocks", "unmoved")
    return compare(on_cpu, on_device) | {name: [on_cpu[name], on_device[name]] for name in told}


# --- codecs ---


CODECS = ["fp16", "bf16+ef", "int8", "int8+ef", "1bit", "1bit:feedback=false", "sign", "sign:scaled=true+ef"]
CODECS += [
    "sign+momentum",
    "ternary",
    "ternary:coding=planes",
    "it-sign:start=3",
    "it-sign:granularity=coordinate,start=3",
]
CODECS += ["top-k:share=0.1", "top-k:share=0.1,feedback=false", "strom:threshold=0.05", "strom:coding=rice"]


def node_on(device: str, rendezvous: Rendezvous, name: str) -> ProcessNode:
    """A node that can reach the other rank's of the same `name`."""
    rank = rendezvous.place.rank
    node = ProcessNode(Identity("coded", f"worker {rank}", rank), CREDENTIALS, device=device)
    ports = rendezvous.exchange(name, node.wire.listen())
    node.directory.update({f"worker {rank}": ("127.0.0.1", port) for rank, port in enumerate(ports)})
    return node


def coded(device: str, rendezvous: Rendezvous, text: str) -> dict[str, Any]:
    """Mean gradients and mean changes of a model by a codec, over rounds, so that residuals and votes count."""
    node = node_on(device, rendezvous, f"{text} on {device}")
    group = SentGroup(node, range(2), algorithm_of(make("collective:algorithm=ring", "topology")), node.meter)
    layers, share, rounds = Replica(Net()).layers, (0.25, 0.75)[node.rank], []
    compressed = CompressedGroup(node, group, make(text, "codec"), layers, node.meter)

    async def work():
        generator = torch.Generator().manual_seed(node.rank)
        since = torch.zeros(layers[-1].stop, device=device)
        for _ in range(3):
            values = 0.1 * torch.randn(layers[-1].stop, generator=generator).to(device)
            computed = Apply(lambda values=values: Gradient(values.clone(), 0.0, 1, None), 0)
            waits = synchronizations()
            gradient = await compressed.mean_gradient(computed, share)
            rounds.append(synchronizations() - waits)
            since = await compressed.mean_change(since + gradient.values + values, since, share)
        return since

    values = node.loop.run_until(node.spawn(work()))
    node.loop.run_until(group.barrier())
    sent = sum(each.payload_nbytes_sent for each in node.wire.traffic.values())
    node.services.clear()  # the other rank may close first
    node.wire.close()
    return {"values": values.double().cpu(), "bytes": sent, "waits": rounds}


@case
def codecs():
    meeting = Rendezvous(place(), "codecs")
    return {text: compare(coded("cpu", meeting, text), coded(device(), meeting, text)) for text in CODECS}


# --- two ranks ---


def on_two_ranks(work: Callable[[], Any]) -> list[Any]:
    """The result of each rank, or the text of its error."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    children = [_rank(rank, port, work) for rank in range(2)]
    given = []
    for (child, reading), seconds in zip(children, (LONGEST, GRACE), strict=True):
        with os.fdopen(reading) as pipe:
            answers, _, _ = select.select([pipe], [], [], seconds)
            if not answers:
                os.kill(child, signal.SIGUSR1)  # where it waits, on standard error
                time.sleep(0.5)
            given.append(json.loads(pipe.read() or '"no answer"') if answers else "no answer in time")
        os.kill(child, signal.SIGKILL)  # it may be frozen
        os.waitpid(child, 0)
    return given


def _rank(rank: int, port: int, work: Callable[[], Any]) -> tuple[int, int]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        faulthandler.register(signal.SIGUSR1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            store = Rendezvous(place(), "test")  # rank 0 has the store: one for all trainings of these ranks
            result = work()
            del store
        except BaseException:  # noqa: BLE001
            result = traceback.format_exc()
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(result))
        os._exit(0)
    os.close(writing)
    return child, reading


def main(names: list[str]) -> None:
    target.prepare()
    sgd(nn.Linear(1, 1))  # the first optimizer imports much, which the ranks then need not
    strategies = [name for name in names if name not in CASES]
    if strategies:
        first, second = on_two_ranks(lambda: both_ways(strategies))
        for number, text in enumerate(strategies):
            failed = isinstance(first, str) or isinstance(second, str)
            print(json.dumps([text, first, second] if failed else [text, first[number], second[number]]), flush=True)
    for name in names:
        if name in CASES:
            print(json.dumps([name, *on_two_ranks(CASES[name])]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
