"""A shard whose workers do as a schedule says, one thing at a time: staleness as exact as a test wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dure.core.node import Call, Loop, Operation, Reply, Work
from dure.job.optimizer import OptimizerSpec
from dure.run.strategy import make
from dure.sync.base import server_rule_of
from dure.sync.corrected import corrections, server_optimizer
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.staging import Corrections

Gradient = Callable[[torch.Tensor], torch.Tensor]


class Instant:
    """A node that computes at once."""

    name = "server 0"

    def __init__(self) -> None:
        self.loop = Loop()

    def compute(self, work: Work) -> Operation[Any]:
        operation: Operation[Any] = Operation(self.loop)
        operation.resolve(work.run())
        return operation

    def promise(self, label: str) -> Operation[Any]:
        return Operation(self.loop, label)

    def overlapped(self, *values: torch.Tensor) -> AbstractContextManager[None]:
        return nullcontext()

    def room_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(tensor.shape)


class Bench:
    """One shard under `method`, and what each of `workers` has pulled last. Worker k's gradient is `gradient(w)`."""

    def __init__(
        self, method: Any, workers: int, start: Sequence[float] | torch.Tensor, gradient: Gradient, **optimizer: Any
    ) -> None:
        self.method = make(method) if isinstance(method, str) else method
        self.gradient = gradient
        values = torch.as_tensor(start, dtype=torch.float64)
        self.spec = server_optimizer(self.method, OptimizerSpec(**optimizer), workers)
        self.node = Instant()
        self.shard = Shard(
            self.node,
            values,
            self.spec,
            corrections=Corrections.of(corrections(self.method)),
            max_delay=server_rule_of(self.method).max_delay,
        )
        self.read: dict[int, tuple[int, torch.Tensor]] = {}
        self.seq = [0] * workers
        for worker in range(workers):
            self.pull(worker)

    @property
    def values(self) -> torch.Tensor:
        return self.shard.values.clone()

    def call(self, worker: int, method: str, *tensors: torch.Tensor, **fields: Any) -> Reply:
        fields = {"worker": worker, "incarnation": 0, **fields}
        answer: Any = self.shard.handle(Call(f"worker {worker}", method, fields, tensors))
        if isinstance(answer, Reply):
            return answer
        try:
            answer.send(None)
        except StopIteration as stop:
            reply: Reply = stop.value
            self.node.loop.run_ready()
            return reply
        raise AssertionError(f"{method} waits, and nothing on a bench does")

    def pull(self, worker: int) -> None:
        reply = self.call(worker, "pull")
        self.read[worker] = (reply.fields["version"], torch.cat([*reply.tensors]).clone())
        reply.release()

    def push(self, worker: int, *, ordered: bool = False, weight: float = 1.0) -> int:
        """A gradient of `worker`, at what it has pulled; its number."""
        base, values = self.read[worker]
        self.seq[worker] += 1
        gradient, seq = self.gradient(values), self.seq[worker]
        self.call(worker, "push", gradient, seq=seq, base=base, weight=weight, ordered=ordered, lr=None)
        return seq

    def close(self, members: Sequence[tuple[int, int]], reduce: str = "mean") -> None:
        """Apply a group of staged updates, (worker, seq)."""
        version = self.shard.version
        drop = [version - 1] if version else []
        self.call(0, "close", version=version + 1, group=version, members=members, drop=drop, reduce=reduce)

    def turn(self, worker: int) -> None:
        """Push, then pull."""
        self.push(worker)
        self.pull(worker)

    def round_robin(self, updates: int) -> list[torch.Tensor]:
        """Everybody in turn: after the first round each gradient is as stale as there are other workers."""
        seen = []
        for update in range(updates):
            self.turn(update % len(self.seq))
            seen.append(self.values)
        return seen
