"""Push and pull through a server: dure against bare Gloo send and recv of the same bytes.

    python bench/push_pull.py [--values 25000000] [--repeats 15] [--json FILE]

Three processes: this one, a server (a `Shard` with plain SGD: check, apply, acknowledge, answer the pull), and
a Gloo peer that receives as many bytes and sends as many back. Each repeat does one of each, in turn; medians. The
small one is the same with 1,000 values and measures the way there and back.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from _script import parse, print_ratios, ratio_of, told
from torch import Tensor

from dure.core.node import Address
from dure.job.optimizer import OptimizerSpec
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity
from dure.topology.parameter_server.shard import Shard

JOB = "push-pull"
CREDENTIALS = Credentials(bytes(32))  # the processes of a benchmark know them
WARM_UP = 3


def serve(pipe: Connection, sizes: list[int]) -> None:
    """A server with one shard per size, until the worker has finished."""
    torch.set_num_threads(1)
    node = ProcessNode(Identity(JOB, "server 0"), CREDENTIALS)
    for values in sizes:
        node.serve(f"shard of {values}", Shard(node, torch.zeros(values), OptimizerSpec("sgd", lr=0.1)))
    pipe.send(node.wire.listen())
    node.loop.wire = node.wire
    done = []
    node.on_lost = done.append
    while not done:
        node.loop.turn(1.0)


def echo(store_port: int, sizes: list[int], repeats: int) -> None:
    """The Gloo peer."""
    torch.set_num_threads(1)
    join_gloo(store_port, 1)
    buffers = {values: torch.zeros(values) for values in sizes}
    for values in sizes:
        for _ in range(repeats + WARM_UP):
            dist.recv(buffers[values], 0)
            dist.send(buffers[values], 0)
    dist.destroy_process_group()


def join_gloo(port: int, rank: int) -> None:
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)


def over_gloo(gradient: Tensor, into: Tensor) -> None:
    dist.send(gradient, 1)
    dist.recv(into, 1)


def through_server(node: ProcessNode, gradient: Tensor, into: Tensor, seq: int) -> None:
    shard = Address("server 0", f"shard of {gradient.numel()}")

    async def push_and_pull() -> None:
        fields = {"worker": 0, "incarnation": 0, "seq": seq, "base": seq - 1, "weight": 1.0, "ordered": False}
        push = node.call(shard, "push", gradient, **fields)
        await push
        await node.call(shard, "pull", into=[into])

    node.loop.run_until(node.spawn(push_and_pull(), "worker"))


def measure(node: ProcessNode, values: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of both in each repeat for `values` float32, alternating."""
    gradient, into, back = torch.ones(values), torch.zeros(values), torch.zeros(values)
    runs: dict[str, Callable[[int], None]] = {
        "gloo": lambda _: over_gloo(gradient, back),
        "dure": lambda repeat: through_server(node, gradient, into, repeat + 1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + WARM_UP):
        for name, run in runs.items():
            began = time.perf_counter()
            run(repeat)
            seconds[name].append(time.perf_counter() - began)
    expected = -0.1 * (repeats + WARM_UP)
    assert torch.allclose(into, torch.full_like(into, expected), rtol=1e-4), "the server lost updates"
    return {name: each[WARM_UP:] for name, each in seconds.items()}


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=25_000_000)
    parser.add_argument("--small", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parse(parser, values=1_000_000, repeats=3)
    torch.set_num_threads(1)
    with told("push_pull", given) as facts:
        results = in_turn(given)
        print(f"{'values':>12} {'gloo':>12} {'dure':>12}")
        for values, each in results.items():
            gloo, dure = (statistics.median(each[name]) for name in ("gloo", "dure"))
            print(f"{values:12,} {gloo * 1e3:9.3f} ms {dure * 1e3:9.3f} ms")
        ratios = [
            ratio_of(f"push and pull of {values:,} values", "Gloo send and receive", each["dure"], each["gloo"])
            for values, each in results.items()
        ]
        print_ratios(ratios)
        medians = {values: {name: statistics.median(s) for name, s in each.items()} for values, each in results.items()}
        facts |= {"repeats": given.repeats, "seconds": medians, "ratios": ratios}


def in_turn(given: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    """Start the server and the peer, and measure; the seconds by number of values."""
    context = multiprocessing.get_context("forkserver")
    sizes, port = [given.values, given.small], free_port()
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, sizes), daemon=True)
    peer = context.Process(target=echo, args=(port, sizes, given.repeats), daemon=True)
    server.start()
    peer.start()
    join_gloo(port, 0)
    node = ProcessNode(Identity(JOB, "worker 0"), CREDENTIALS)
    if not ours.poll(120):
        raise SystemExit("the server did not start")
    node.directory["server 0"] = ("127.0.0.1", ours.recv())
    results = {values: measure(node, values, given.repeats) for values in sizes}
    node.wire.close()
    server.join(10)
    peer.join(10)
    return results


if __name__ == "__main__":
    main()
