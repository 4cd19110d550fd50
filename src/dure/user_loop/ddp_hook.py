"""Codecs in a plain PyTorch script, as a communication hook of DistributedDataParallel.

    model = DistributedDataParallel(net)
    model.register_comm_hook(None, dure.hook("strom:threshold=0.001"))

DDP arranges its buckets anew after its first step. That step's gradients travel whole; from then on every bucket has
coders of its own, whose residuals stay with its parameters. They are each rank's own, and belong into its checkpoint:

    torch.save({"model": net.state_dict(), "hook": hook.state_dict()}, f"rank {rank}.pt")

A hook can be made before the ranks are there, as Lightning's `DDPStrategy(ddp_comm_hook=...)` needs it. It has a
process group of its own, since DDP and other hooks use theirs at the same moments; where `torch.distributed` was not
yet initialized, the first bucket makes that group.

DDP reads a hook's annotations, so here they are objects and not text.
"""

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from dure.codec.base import Codec
from dure.codec.coder import SliceLayout
from dure.codec.exchange import Owner, add_up, memory, remember
from dure.core.ranges import equal_ranges
from dure.errors import CheckpointError, UsageError
from dure.run.strategy import check_joins, make, member_text

_NARROW = (torch.float16, torch.bfloat16)
"""What is exchanged as float32: NumPy does not know all of them, and their sums round."""


def hook(codec: Codec | str, group: dist.ProcessGroup | None = None) -> "Hook":
    """A communication hook that sends gradients as `codec` has it, given as an object or as text ("sign").

    All ranks of `group` (of all there are, if None) call this; where they make several hooks, all make them, and
    register them with their models, in the same order. `torch.distributed` may be initialized later: the hook then
    finds the ranks at its first bucket, or at `state_dict()`.

    Raises `StrategyError` for what is no codec of the catalogue; `UsageError`, at the first bucket, where there are no
    ranks.
    """
    made = make(codec, "codec") if isinstance(codec, str) else codec
    check_joins(made)
    return Hook(made, group)


def _own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A new group of the ranks of `group`, or of all; every rank takes part. Raises `UsageError` without ranks."""
    if not dist.is_initialized():
        raise UsageError(
            "a hook needs the other ranks: call torch.distributed.init_process_group before the first backward, or "
            "before state_dict() and load_state_dict()."
        )
    own: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group or dist.group.WORLD),
        backend=None if group is None else dist.get_backend(group),
        use_local_synchronization=group is not None,
    )
    return own


class Span(NamedTuple):
    """Where a parameter lies in a bucket."""

    start: int
    stop: int
    shape: tuple[int, ...]


class Hook:
    """Gives every rank the mean, or the vote, of all ranks' gradients.

    Buckets are exchanged one after another, on a thread of their own, while the next gradients are computed.
    `bytes_sent` counts the messages that this rank has sent to others, those of the first step apart.
    """

    def __init__(self, codec: Codec, group: dist.ProcessGroup | None = None) -> None:
        self.codec = codec
        self._given = group
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            self._group = _own_group(group)
        self.bytes_sent = 0
        self._exchanges: dict[int, Stripes | Gather] = {}
        self._saved: dict[int, Mapping[str, Any]] = {}
        self._first_step = True
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="dure hook")
        self.__qualname__ = self.__name__ = type(self).__name__  # DDP's log asks for them

    @property
    def group(self) -> dist.ProcessGroup:
        """The hook's own process group. Raises `UsageError` before `torch.distributed` is initialized."""
        if self._group is None:
            self._group = _own_group(self._given)
        return self._group

    def __call__(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls for each bucket."""
        _ = self.group  # made on DDP's thread: on the hook's, the order of groups could differ between ranks
        if self._first_step:
            self._first_step = not bucket.is_last()
            return self._start(self._mean, bucket.buffer())
        number = bucket.index()
        if number not in self._exchanges:
            kind = Gather if self.codec.exchange == "all_gather" else Stripes
            self._exchanges[number] = kind(self.codec, _spans(bucket), self.group)
            self._take_up(number)
        return self._start(self._encoded(self._exchanges[number]), bucket.buffer())

    def state_dict(self) -> dict[str, Any]:
        """What this rank's coders and votes remember, copied: text, whole numbers and tensors. Between steps."""
        met = {
            number: {"bounds": each.bounds, "tensors": {name: kept.clone() for name, kept in each.state().items()}}
            for number, each in self._exchanges.items()
        }
        return {**self._kind(), "buckets": {**self._saved, **met}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what the same rank's hook remembered.

        The first step after a restart travels whole and leaves it as it is. Raises `CheckpointError` for a state of
        another codec or number of ranks; at once, or as soon as a bucket is met, where the buckets are others.
        """
        for key, mine in self._kind().items():
            theirs = state.get(key)
            if theirs != mine:
                raise CheckpointError(
                    f"this state of a hook has {key}={theirs}, and the hook {key}={mine}: load that of the same."
                )
        self._saved = dict(state["buckets"])
        for number in self._exchanges:
            self._take_up(number)

    def _kind(self) -> dict[str, Any]:
        """What two hooks must have alike to take up each other's state."""
        return {
            "codec": member_text("codec", self.codec),
            "rank": dist.get_rank(self.group),
            "world_size": dist.get_world_size(self.group),
        }

    def _take_up(self, number: int) -> None:
        if not self._saved:
            return
        exchange, saved = self._exchanges[number], self._saved.get(number)
        if saved is None or list(saved["bounds"]) != exchange.bounds:
            there = "is not in the state" if saved is None else f"had its parameters end at {list(saved['bounds'])}"
            raise CheckpointError(
                f"bucket {number} of DistributedDataParallel {there}; they end at {exchange.bounds} now. Load a state "
                "of the same model and bucket_cap_mb."
            )
        exchange.restore(saved["tensors"])

    def _start(
        self, work: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[concurrent.futures.Future[torch.Tensor]] = torch.futures.Future()
        self._thread.submit(work, values).add_done_callback(future.set_result)
        return future.then(lambda done: done.value().result())  # an error that is raised here reaches DDP as it is

    def _mean(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values, group=self.group)
        return values.div_(dist.get_world_size(self.group))

    def _encoded(self, exchange: "Stripes | Gather") -> Callable[[torch.Tensor], torch.Tensor]:
        def work(values: torch.Tensor) -> torch.Tensor:
            wide = values.float() if values.dtype in _NARROW else values
            self.bytes_sent += exchange.run(wide)
            return values if wide is values else values.copy_(wide)

        return work


class Stripes:
    """Two phases: every stripe goes to its owner, and what that makes of all of them comes back."""

    def __init__(self, codec: Codec, spans: list[Span], group: dist.ProcessGroup) -> None:
        self.bounds = [span.stop for span in spans]
        self._group = group
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._ranges = equal_ranges(spans[-1].stop, self._world_size)
        layouts = [SliceLayout.of(spans, [stripe]) for stripe in self._ranges]
        self._coders = [codec.coder(layout, seed=self._rank) for layout in layouts]
        self._owner = Owner(codec, layouts[self._rank])

    def run(self, values: torch.Tensor) -> int:
        """Replace `values` by what all ranks have of them; the bytes sent to others."""
        stripes = [values[start:stop] for start, stop in self._ranges]
        mine = [coder.encode(stripe) for coder, stripe in zip(self._coders, stripes, strict=True)]
        theirs = _to_each(mine, self._group)
        combined = self._owner.combine(dict(enumerate(theirs)))
        results = _to_all(combined, self._group)
        for coder, result, stripe in zip(self._coders, results, stripes, strict=True):
            coder.decode(result, stripe)
        others = sum(message.numel() for owner, message in enumerate(mine) if owner != self._rank)
        return others + (self._world_size - 1) * combined.numel()

    def state(self) -> dict[str, torch.Tensor]:
        """What survives a restart."""
        return memory(self._coders, self._owner)

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up a `state`."""
        remember(self._coders, self._owner, state)


class Gather:
    """Everybody's message goes to everybody."""

    def __init__(self, codec: Codec, spans: list[Span], group: dist.ProcessGroup) -> None:
        self.bounds = [span.stop for span in spans]
        self._group = group
        self._coder = codec.coder(SliceLayout.of(spans, [(0, spans[-1].stop)]), seed=dist.get_rank(group))

    def run(self, values: torch.Tensor) -> int:
        """Replace `values` by what all ranks have of them; the bytes sent to others."""
        message = self._coder.encode(values)
        add_up(self._coder, _to_all(message, self._group), values)
        return (dist.get_world_size(self._group) - 1) * message.numel()

    def state(self) -> dict[str, torch.Tensor]:
        """What survives a restart."""
        return self._coder.state()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up a `state`."""
        self._coder.restore(state)


def _spans(bucket: GradBucket) -> list[Span]:
    spans, start = [], 0
    for parameter in bucket.parameters():
        spans.append(Span(start, start + parameter.numel(), tuple(parameter.shape)))
        start += parameter.numel()
    return spans


def _to_each(messages: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Message i goes to rank i; what came from each. Their sizes go first.

    Bulk goes by sends and receives: Gloo's all_to_all sends in one direction at a time.
    """
    here = dist.get_rank(group)
    sizes = torch.tensor([message.numel() for message in messages], device=messages[here].device)
    coming = torch.empty_like(sizes)
    dist.all_to_all_single(coming, sizes, group=group)
    received = [
        messages[here] if rank == here else messages[here].new_empty(int(size)) for rank, size in enumerate(coming)
    ]
    operations = []
    for rank, peer in enumerate(dist.get_process_group_ranks(group)):
        if rank != here:
            pairs = ((dist.irecv, received[rank]), (dist.isend, messages[rank]))
            operations += [dist.P2POp(way, part, peer, group) for way, part in pairs if part.numel()]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait(default_pg_timeout)
    return received


def _to_all(message: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Everybody's message."""
    return _to_each([message] * dist.get_world_size(group), group)
