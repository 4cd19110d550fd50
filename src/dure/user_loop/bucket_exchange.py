"""Exchanges of one bucket of DistributedDataParallel: each gives all ranks the mean, or the vote, of their gradients.

Gradients and messages are on one device, that of the bucket. The sizes of messages travel apart, between CPUs: a rank
needs them on the host to allocate what it receives, and the host has not to wait for the device to learn them.

A rank whose gradient holds NaN or infinity announces that in place of sizes. Then no rank sends its bytes, and the
bucket becomes NaN on every rank, as it does without a codec. So a gradient scaler skips the step on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from dure.codec.base import Codec
from dure.codec.blocks import all_finite
from dure.codec.coder import Coder, SliceLayout
from dure.codec.exchange import Owner, add_up, memory, remember
from dure.core.ranges import equal_ranges
from dure.errors import DivergedError

_NOTHING = -1
"""The size that stands for a gradient that was not encoded."""


class Groups(NamedTuple):
    """The process groups of an exchange, of the same ranks: `bytes` for its device, `sizes` for the CPU."""

    bytes: dist.ProcessGroup
    sizes: dist.ProcessGroup

    def sends_from_the_host(self, device: torch.device) -> bool:
        """Whether tensors of `device` travel by Gloo, whose sends and receives use memory of the host alone."""
        return f"{device.type}:gloo" in dist.get_backend_config(self.bytes).split(",")


class Span(NamedTuple):
    """The place of a parameter in a bucket."""

    start: int
    stop: int
    shape: tuple[int, ...]


class Stripes:
    """Two phases: every stripe goes to its owner, and the owner's combination of them comes back."""

    def __init__(self, codec: Codec, spans: list[Span], groups: Groups, device: torch.device) -> None:
        self.bounds = [span.stop for span in spans]
        self.device = device
        self._groups = groups
        self._rank, self._world_size = dist.get_rank(groups.sizes), dist.get_world_size(groups.sizes)
        self._ranges = equal_ranges(spans[-1].stop, self._world_size)
        layouts = [SliceLayout.of(spans, [stripe]) for stripe in self._ranges]
        self._coders = [codec.coder(layout, seed=self._rank) for layout in layouts]
        self._owner = Owner(codec, layouts[self._rank])

    def run(self, values: torch.Tensor) -> int:
        """Replace `values` by the combination of all ranks' values; returns the bytes sent to others."""
        stripes = [values[start:stop] for start, stop in self._ranges]
        mine = _encode(self._coders, stripes)
        theirs = _to_each(mine, self._groups)
        if mine is None or theirs is None:
            values.fill_(torch.nan)
            return 0
        combined = self._owner.combine(dict(enumerate(theirs)))
        results = _to_all(combined, self._groups)
        assert results is not None
        for coder, result, stripe in zip(self._coders, results, stripes, strict=True):
            coder.decode(result, stripe)
        others = sum(message.numel() for owner, message in enumerate(mine) if owner != self._rank)
        return others + (self._world_size - 1) * combined.numel()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors that survive a restart, on the CPU."""
        return _copied(memory(self._coders, self._owner))

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a `state`."""
        remember(self._coders, self._owner, state)


class Gather:
    """Every rank's message goes to every rank."""

    def __init__(self, codec: Codec, spans: list[Span], groups: Groups, device: torch.device) -> None:
        self.bounds = [span.stop for span in spans]
        self.device = device
        self._groups = groups
        layout = SliceLayout.of(spans, [(0, spans[-1].stop)])
        self._coder = codec.coder(layout, seed=dist.get_rank(groups.sizes))

    def run(self, values: torch.Tensor) -> int:
        """Replace `values` by the mean of all ranks' values; returns the bytes sent to others."""
        mine = _encode([self._coder], [values])
        theirs = _to_all(None if mine is None else mine[0], self._groups)
        if mine is None or theirs is None:
            values.fill_(torch.nan)
            return 0
        add_up(self._coder, theirs, values)
        return (len(theirs) - 1) * mine[0].numel()

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors that survive a restart, on the CPU."""
        return _copied(self._coder.state())

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a `state`."""
        self._coder.restore(state)


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _encode(coders: Sequence[Coder], slices: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """The message of each slice; None where one holds NaN or infinity. No residual has taken that up."""
    try:
        return [coder.encode(values) for coder, values in zip(coders, slices, strict=True)]
    except DivergedError:
        if all(map(all_finite, slices)):  # float64 beyond the range of the codec
            raise
        return None


def _to_each(messages: Sequence[torch.Tensor] | None, groups: Groups) -> list[torch.Tensor] | None:
    """Send message i to rank i; returns the messages of all ranks, or None if a rank has none.

    Bulk goes by sends and receives: Gloo's all_to_all sends in one direction at a time.
    """
    here, world_size = dist.get_rank(groups.sizes), dist.get_world_size(groups.sizes)
    sizes = torch.tensor([_NOTHING] * world_size if messages is None else [message.numel() for message in messages])
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=groups.sizes)
    if messages is None or _NOTHING in coming.tolist():
        return None
    device = messages[here].device
    if device.type != "cpu" and groups.sends_from_the_host(device):
        messages = [message.cpu() for message in messages]
    received = [
        messages[here] if rank == here else messages[here].new_empty(size) for rank, size in enumerate(coming.tolist())
    ]
    operations = []
    for rank, peer in enumerate(dist.get_process_group_ranks(groups.bytes)):
        if rank != here:
            pairs = ((dist.irecv, received[rank]), (dist.isend, messages[rank]))
            operations += [dist.P2POp(way, part, peer, groups.bytes) for way, part in pairs if part.numel()]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        if messages[here].device.type == "cpu":
            work.wait(default_pg_timeout)
        else:
            work.synchronize()  # lets the current stream wait; NCCL's wait with a limit would let the host wait
    return [message.to(device) for message in received]


def _to_all(message: torch.Tensor | None, groups: Groups) -> list[torch.Tensor] | None:
    """Send one message to every rank; returns the messages of all ranks, or None if a rank has none."""
    return _to_each(None if message is None else [message] * dist.get_world_size(groups.sizes), groups)
