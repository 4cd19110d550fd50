"""Vectors that never leave their shards: each shard has named ones, and carries out commands on them.

Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, section 4.2: a coordinator issues commands "drawn
from a small set of operations (e.g., dot product, scaling, coefficient-wise addition, multiplication)"; results stay
on the shard under a name, and only numbers come back.

| command                        | does                                                                   |
|--------------------------------|------------------------------------------------------------------------|
| `zero` to                      | to = 0                                                                 |
| `copy` to x                    | to = x; costs nothing until one of them changes                        |
| `free` x                       | forget x                                                               |
| `scale` to a                   | to = a to                                                              |
| `axpy` to a x                  | to = to + a x                                                          |
| `combine` to a x b y           | to = a x + b y                                                         |
| `multiply` to x y              | to = x y, coefficient by coefficient                                   |
| `dot` x y                      | a number, this shard's part of x'y, summed in double precision         |
| `accumulate` to worker incarnation seq | to = to + what the worker has staged under that number         |
| `drop` worker incarnation seq  | forget what the worker has staged under that number                    |
| `fence` worker incarnation     | forget, and refuse from now on, what its earlier incarnations stage    |
| `model` to                     | to = the shard's part of the model                                     |
| `publish` x (gradients)        | x is the next version of the model, to which so many gradients have led |

A program of several is one call. A shard carries programs out one after another, in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dure.core.node import Apply, Call, Ghost, Reply
from dure.core.state import State
from dure.errors import Evicted, Refused

if TYPE_CHECKING:
    from dure.topology.parameter_server.apply import Updater
    from dure.topology.parameter_server.staging import StagingArea
    from dure.topology.parameter_server.versions import Buffer, Versions


BLOCK = 1 << 15
"""Elements of a dot product that are made double at a time."""

FREE_OF_CHARGE = ("copy", "free", "drop", "fence", "model", "publish")

Key = tuple[int, int, int]
"""A worker, its incarnation, and the number of what it has staged."""


class Vectors:
    """The named vectors of one shard."""

    def __init__(self, versions: Versions, staging: StagingArea, updater: Updater, nbytes: int) -> None:
        self._versions = versions
        self._staging = staging
        self._updater = updater
        self._nbytes = nbytes
        self._named: dict[str, Buffer] = {}
        self._staged: dict[Key, Buffer] = {}
        self._fences: dict[int, int] = {}
        self._commands: Mapping[str, Callable[..., float | None]] = {
            "zero": lambda to: self._fill(to, lambda tensor: tensor.zero_()),
            "copy": lambda to, x: self._bind(to, self._hold(x)),
            "free": self._free,
            "scale": self._scale,
            "axpy": lambda to, a, x: self._add(to, a, self[x]),
            "combine": self._combine,
            "multiply": lambda to, x, y: self._fill(to, lambda tensor: tensor.copy_(self[x]).mul_(self[y])),
            "dot": self._dot,
            "accumulate": self._accumulate,
            "drop": lambda: None,
            "fence": lambda: None,
            "model": lambda to: self._bind(to, _held(self._versions.current)),
            "publish": lambda x, gradients=0: self._updater.publish(self._hold(x), gradients),
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        """The vector called `name`; not to be written to."""
        return self._buffer(name).tensor

    # ---- calls

    def stage(self, call: Call) -> Reply:
        """Keep a worker's slice until a command uses it."""
        worker, incarnation, seq = (call.fields[name] for name in ("worker", "incarnation", "seq"))
        # The coordinator has given this life's portions to others. What it sent before its end may come after that.
        if incarnation < self._fences.get(worker, 0):
            raise Evicted(f"incarnation {incarnation} of worker {worker} is over: join again.")
        if (worker, incarnation, seq) not in self._staged:  # else the call is repeated
            self._staged[worker, incarnation, seq] = self._staging.received(call)
        return Reply()

    def _take(self, worker: int, incarnation: int, seq: int) -> Buffer:
        """Hand a staged slice over to the caller, which releases it."""
        staged = self._staged.pop((worker, incarnation, seq), None)
        if staged is None:
            raise Refused(
                f"worker {worker} has staged nothing as {seq} of incarnation {incarnation}, or it has been used."
            )
        return staged

    def _drop(self, worker: int, incarnation: int, seq: int) -> None:
        staged = self._staged.pop((worker, incarnation, seq), None)
        if staged is not None:
            staged.release()

    def _fence(self, worker: int, incarnation: int) -> None:
        self._fences[worker] = max(incarnation, self._fences.get(worker, 0))
        for key in [key for key in self._staged if key[0] == worker and key[1] < incarnation]:
            self._staged.pop(key).release()

    async def order(self, call: Call) -> Reply:
        """Carry out commands in turn; `dots`, in their order."""
        commands = [self._resolved(command) for command in call.fields["commands"]]
        charged = sum(name not in FREE_OF_CHARGE for name, _ in commands)
        dots = await self._updater.in_turn(Apply(partial(self._carry_out, commands), self._nbytes * charged))
        return Reply({"dots": dots})

    def _resolved(self, command: Sequence[Any]) -> tuple[str, Sequence[Any]]:
        """A command with the staged slice that it uses, taken now: the worker may be lost when its turn comes."""
        name, *arguments = command
        if name not in self._commands:
            raise Refused(f'there is no command "{name}"; there are {", ".join(self._commands)}.')
        if name == "accumulate":
            return name, (arguments[0], self._take(*arguments[1:]))
        if name in ("drop", "fence"):  # at once, not in turn: commands in the queue have taken what they add
            (self._drop if name == "drop" else self._fence)(*arguments)
            return name, ()
        return name, arguments

    def _carry_out(self, commands: Sequence[tuple[str, Sequence[Any]]]) -> list[float]:
        values = [self._commands[name](*arguments) for name, arguments in commands]
        return [value for value in values if value is not None]

    def fetch(self, call: Call) -> Reply:
        """The vector of a name."""
        buffer = _held(self._buffer(call.fields["name"]))
        return Reply({}, buffer.pieces, buffer.release)

    # ---- names and buffers

    def _buffer(self, name: str) -> Buffer:
        if name not in self._named:
            raise Refused(f'no vector is called "{name}" here; there are {", ".join(sorted(self._named)) or "none"}.')
        return self._named[name]

    def _hold(self, name: str) -> Buffer:
        return _held(self._buffer(name))

    def _bind(self, name: str, buffer: Buffer) -> None:
        self._free(name)
        self._named[name] = buffer

    def _free(self, name: str) -> None:
        old = self._named.pop(name, None)
        if old is not None:
            old.release()

    def _fill(self, to: str, write: Callable[[torch.Tensor], Any]) -> None:
        """`to` becomes what `write` makes of fresh memory; what is read may be called the same."""
        fresh = self._versions.pool.take()
        write(fresh.tensor)
        self._bind(to, fresh)

    def _own(self, name: str) -> torch.Tensor:
        """The vector called `name`, to be changed in place: a copy if its buffer has another holder."""
        buffer = self._buffer(name)
        if buffer.holders > 1:  # another name, a version of the model, or a reply on its way
            self._fill(name, lambda tensor: tensor.copy_(buffer.tensor))
        return self[name]

    # ---- commands

    def _scale(self, to: str, a: float) -> None:
        self._own(to).mul_(a)

    def _add(self, to: str, a: float, tensor: torch.Tensor) -> None:
        self._own(to).add_(tensor, alpha=a)

    def _combine(self, to: str, a: float, x: str, b: float, y: str) -> None:
        self._fill(to, lambda tensor: tensor.copy_(self[x]).mul_(a).add_(self[y], alpha=b))

    def _accumulate(self, to: str, staged: Buffer) -> None:
        self._add(to, 1.0, staged.tensor)
        staged.release()

    def _dot(self, x: str, y: str) -> float:
        left, right = self[x], self[y]
        if isinstance(left, Ghost):
            return 1.0
        blocks = zip(torch.split(left, BLOCK), torch.split(right, BLOCK), strict=True)
        return float(sum(torch.dot(a.double(), b.double()) for a, b in blocks))

    # ---- checkpoints

    def state(self) -> State:
        """All vectors, and the names of those that a timing-only run has no tensors for.

        No two vectors share memory, and none shares memory with the model. Staged updates are left out: workers
        compute their portions again after a restart.
        """
        tensors = {
            name: buffer.tensor.clone() if buffer.holders > 1 else buffer.tensor
            for name, buffer in self._named.items()
            if not isinstance(buffer.tensor, Ghost)
        }
        return State(tensors, {"names": sorted(self._named), "fences": sorted(self._fences.items())})

    def restore(self, state: State) -> None:
        """Continue from `state`."""
        self._fences = {int(worker): int(incarnation) for worker, incarnation in state.plain["fences"]}
        for name in state.plain["names"]:
            self._fill(name, lambda tensor, name=name: tensor.copy_(state.tensors.get(name, tensor)))  # type: ignore[misc]


def _held(buffer: Buffer) -> Buffer:
    """`buffer`, held once more."""
    buffer.holders += 1
    return buffer
