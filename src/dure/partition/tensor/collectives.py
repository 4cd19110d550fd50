"""Collectives between the workers that share layers, written from messages.

| collective       | messages of a worker to each other          | elements sent, of n in the whole   |
|------------------|---------------------------------------------|------------------------------------|
| `all_gather`     | its tensor                                  | (W - 1) n / W                      |
| `reduce_scatter` | the other's slice                           | (W - 1) n / W                      |
| `all_reduce`     | the two above; for W = 2 its whole tensor   | 2 (W - 1) n / W                    |
| `exchange`       | the other's tensor                          |                                    |

Sums are in the order of ranks. Each slice is summed by one worker, so that all get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dure.core.node import Ghost
from dure.core.ranges import equal_ranges

if TYPE_CHECKING:
    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.partition.tensor.ways import CollectiveCall


class WayCollectives:
    """Carries out collectives for `rank` of the workers `peers`, on `node`, in messages with `tag`."""

    def __init__(self, node: Node, meter: Meter, *, rank: int, peers: Sequence[str], tag: int) -> None:
        self._node = node
        self._meter = meter
        self._rank = rank
        self._peers = peers
        self._tag = tag

    async def carried(self, call: CollectiveCall) -> Any:
        """The result of a collective."""
        started = self._node.now()
        result = await self._result(call)
        self._meter.add("communicate", started, self._node.now(), call.kind)
        return result

    def payload_nbytes(self, call: CollectiveCall) -> int:
        """The bytes of the whole tensor of a collective; of an exchange, those that this worker sends."""
        if call.kind == "exchange":
            return sum(each.nbytes for rank, each in enumerate(call.sends) if rank != self._rank)
        if call.kind == "all_gather":
            return call.sends[0].element_size() * sum(shape.numel() for shape in call.receives)
        return sum(each.nbytes for each in call.sends)

    async def _result(self, call: CollectiveCall) -> Any:
        sends, receives = call.sends, call.receives
        if call.kind == "all_reduce":
            return (await self._all_reduce(sends[0])).view(receives[0])
        if call.kind == "all_gather":
            return await self._exchange([sends[0]] * len(self._peers), receives)
        found = await self._exchange(sends, receives if call.kind == "exchange" else [receives[0]] * len(self._peers))
        return found if call.kind == "exchange" else total(found)

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        workers, numel = len(self._peers), tensor.numel()
        flat = tensor.view(-1)
        if workers == 2:
            return total(await self._exchange([flat] * 2, [torch.Size([numel])] * 2))
        slices = [flat[start:stop] for start, stop in equal_ranges(numel, workers)]
        sizes = [torch.Size([each.numel()]) for each in slices]
        own = total(await self._exchange(slices, [sizes[self._rank]] * workers))
        return joined(await self._exchange([own] * workers, sizes))

    async def _exchange(self, sends: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Send a tensor to each worker, and receive one of these shapes from each. An empty one needs no message."""
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        receiving = {
            rank: self._node.recv(self._peers[rank], _room(sends[rank], shapes[rank]), tag=self._tag)
            for rank in others
            if shapes[rank].numel()
        }
        sending = [
            self._node.send(self._peers[rank], sends[rank], tag=self._tag) for rank in others if sends[rank].numel()
        ]
        found = [
            await receiving[rank]
            if rank in receiving
            else sends[rank].view(shapes[rank])
            if rank == self._rank
            else _room(sends[rank], shapes[rank])
            for rank in range(len(self._peers))
        ]
        for operation in sending:
            await operation
        return found


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts of a flat tensor, one after another."""
    return parts[0] if isinstance(parts[0], Ghost) else torch.cat(list(parts))


def _room(like: Tensor, shape: torch.Size) -> Tensor:
    """Memory for a tensor of `shape`; a ghost knows the number of elements only."""
    return like.new_empty(shape.numel()) if isinstance(like, Ghost) else like.new_empty(shape)


def total(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, in their order; a new tensor."""
    result = tensors[0].clone()
    for each in tensors[1:]:
        result += each
    return result
