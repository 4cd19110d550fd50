"""Codecs in a plain PyTorch script, as a communication hook of DistributedDataParallel.

    model = DistributedDataParallel(net)
    model.register_comm_hook(None, dure.hook("strom:threshold=0.001"))

DDP arranges its buckets anew after its first step. The gradients of that step travel whole. From then on every bucket
has coders of its own, whose residuals stay with its parameters. Each rank saves those of its own in its checkpoint:

    torch.save({"model": net.state_dict(), "hook": hook.state_dict()}, f"rank {rank}.pt")

A hook can be made before the ranks are there, as a strategy for Lightning needs it. It has process groups of its own,
since DDP and other hooks use theirs at the same moments. If `torch.distributed` was not yet initialized, the first
bucket makes them.

An exchange gives all ranks the mean, or the vote, of their gradients of one bucket. Gradients and messages are on the
device of the bucket; messages travel by the backend of the group for that device. The sizes of messages travel apart,
between CPUs: a rank needs them on the host to allocate what it receives, and this way the host does not wait for the
device.

A rank whose gradient holds NaN or infinity announces that in place of sizes. Then no rank sends its bytes, and the
bucket becomes NaN on every rank, as it does without a hook. So a gradient scaler skips the step on every rank. No
residual takes the gradient up. Residuals are in the units of scaled gradients.

DDP reads a hook's annotations, so here they are objects and not text.
"""

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.optim.optimizer import register_optimizer_step_post_hook

from dure.codec.base import Codec
from dure.codec.blocks import all_finite
from dure.codec.coder import Coder, SliceLayout
from dure.codec.exchange import Owner, add_up, memory, remember
from dure.codec.fp32 import Float32
from dure.core.text import log
from dure.core.vectors import equal_ranges
from dure.errors import CheckpointError, DivergedError, UsageError
from dure.run.strategy import check_joins, member_text, resolved
from dure.user_loop.checks import raised

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


T = TypeVar("T")


class BucketThread:
    """A thread for a hook's work on buckets, one after another, while the next gradients are computed.

    Work on a device is on a side stream, one for each device.

        DDP's thread    gradients of a bucket ... event | future                               wait for the future
        side stream                                wait for the event, encode, send, decode, event |

    An event orders each two: the side stream reads a bucket after the stream that computed it, which the user may have
    chosen, and DDP reads the result after the side stream. The host waits for neither.
    """

    def __init__(self) -> None:
        # One thread: DDP calls hooks in the order of buckets at every rank, and collectives must start in one order.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="dure hook")
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(self, work: Callable[[torch.Tensor], object], values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Start `work`, which changes `values`, after the operations that the current stream has so far.

        The future gives `values`. A stream that waits for it waits for the work.
        """
        stream = self._stream(values.device)
        if stream is not None:
            ready = torch.accelerator.current_stream(values.device).record_event()
            values.record_stream(stream)  # else the allocator may hand the memory out while this stream reads it
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[values.device] if stream else None)

        def run() -> None:
            with stream or contextlib.nullcontext():
                if stream is not None:
                    stream.wait_event(ready)
                work(values)

        def complete(_: object) -> None:
            with stream or contextlib.nullcontext():
                future.set_result(values)  # records an event of the current stream, for a tensor on a device

        def result(_: object) -> torch.Tensor:
            done.result()  # an error that is raised here reaches DDP as it is
            return values

        # `complete` runs after an error too: DDP waits for the future, and learns of the error in `result`.
        done = self._thread.submit(run)
        done.add_done_callback(complete)
        return future.then(result)

    def call(self, work: Callable[[], T], device: torch.device) -> T:
        """Do `work` on `device` after all that was started, and wait for its result on the host."""
        stream = self._stream(device)

        def run() -> T:
            with stream or contextlib.nullcontext():
                return work()

        return self._thread.submit(run).result()

    def _stream(self, device: torch.device) -> torch.Stream | None:
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]


_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)
"""Types that codecs get as float32: NumPy does not know all of them, and their sums round."""
_DTYPES = (*_WIDE, *_NARROW, torch.complex64, torch.complex128)
"""Types of buckets; those of complex numbers are exchanged as twice as many real ones."""


def hook(codec: Codec | str, group: dist.ProcessGroup | None = None) -> "Hook":
    """A communication hook that encodes gradients by `codec`, an object or text such as "sign".

    All ranks of `group` (all ranks of the script, if None) call this. If a script has several hooks, every rank makes
    them, and registers them with their models, in the same order. `torch.distributed` may be initialized later: then
    the hook finds the ranks at its first bucket, or at `state_dict()`.

    Raises:
        StrategyError: `codec` names no codec.
        UsageError: at the first bucket, `torch.distributed` is not initialized.
    """
    made = resolved("codec", codec)
    check_joins(made)
    return Hook(made, group)


def _own_groups(group: dist.ProcessGroup | None) -> Groups:
    """New groups of the ranks of `group`, or of all; every rank takes part. Raises `UsageError` without ranks.

    A group whose backends are all for devices (NCCL) gets one of Gloo beside it, for sizes.
    """
    if not dist.is_initialized():
        raise UsageError(
            "a hook needs the other ranks: call torch.distributed.init_process_group before the first backward, or "
            "before state_dict() and load_state_dict()."
        )

    def new(backend: str | None) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(
            dist.get_process_group_ranks(group or dist.group.WORLD),
            backend=backend,
            use_local_synchronization=group is not None,
        )
        return made

    own = new(None if group is None else dist.get_backend(group))
    backends = dist.get_backend_config(own).split(",")
    return Groups(own, own if any(each.startswith("cpu:") for each in backends) else new("gloo"))


class Hook:
    """Gives every rank the mean, or the vote, of all ranks' gradients.

    Buckets are exchanged one after another, on a thread of their own, while the next gradients are computed.
    `bytes_sent` counts the messages that this rank has sent to others, those of the first step apart. A warning is
    logged where the process ends, or the object is dropped, and DDP has not called it before a step of an optimizer.
    """

    def __init__(self, codec: Codec, group: dist.ProcessGroup | None = None) -> None:
        self.codec = codec
        self._given = group
        self._groups: Groups | None = None
        if dist.is_initialized():
            self._groups = _own_groups(group)
        self.bytes_sent = 0
        self._exchanges: dict[int, Stripes | Gather] = {}
        self._saved: dict[int, Mapping[str, Any]] = {}
        self._first_step = True
        self._model: set[int] = set()  # ids: DDP keeps the parameters as long as it has the hook
        self._whole = isinstance(codec, Float32)
        self._thread = BucketThread()
        self.__qualname__ = self.__name__ = type(self).__name__  # DDP's log asks for them
        self._reminder = _Reminder(self, member_text("codec", codec), group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The hook's own process group. Raises `UsageError` before `torch.distributed` is initialized."""
        return self._made().bytes

    def _made(self) -> Groups:
        if self._groups is None:
            self._groups = _own_groups(self._given)
        return self._groups

    def __call__(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the exchange of a bucket. DDP calls this for each.

        Raises `UsageError` for gradients of a type that is not exchanged, or of another model, before they are sent.
        """
        self._reminder.close()
        _check_dtype(bucket)
        self._check_model(bucket)
        groups = self._made()  # on DDP's thread: on the hook's, the order of groups could differ between ranks
        if self._first_step:
            self._first_step = not bucket.is_last()
            return self._thread.start(self._mean, bucket.buffer())
        if self._whole or bucket.buffer().layout != torch.strided:
            return self._thread.start(self._counted_mean, bucket.buffer())
        number = bucket.index()
        if number not in self._exchanges:
            kind = Gather if self.codec.exchange == "all_gather" else Stripes
            self._exchanges[number] = kind(self.codec, _spans(bucket), groups, bucket.buffer().device)
            self._take_up(number)
        return self._thread.start(self._encoded(self._exchanges[number]), bucket.buffer())

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state of this rank's coders and votes: text, whole numbers and tensors on the CPU.

        To be called between steps.
        """
        met = {
            number: {"bounds": each.bounds, "tensors": self._thread.call(each.state, each.device)}
            for number, each in self._exchanges.items()
        }
        return {**self._kind(), "buckets": {**self._saved, **met}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same rank's hook, on the same or on another device.

        The first step after a restart travels whole and leaves the state as it is. Raises `CheckpointError` for a state
        of another codec or number of ranks, or of other buckets as soon as they are known.
        """
        for key, mine in self._kind().items():
            theirs = state.get(key)
            if theirs != mine:
                raise CheckpointError(
                    f"this state is of a hook with {key}={theirs}, and this hook has {key}={mine}: load a state with "
                    f"the same {key}."
                )
        self._saved = dict(state["buckets"])
        for number in self._exchanges:
            self._take_up(number)

    def _kind(self) -> dict[str, Any]:
        """The entries of a state that must be equal in the hook that loads it."""
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

    def _check_model(self, bucket: GradBucket) -> None:
        """Raise `UsageError` unless the bucket is of the model whose gradients came first: coders belong to it."""
        if self._first_step:
            self._model.update(map(id, bucket.parameters()))
        elif not self._whole and not self._model.issuperset(map(id, bucket.parameters())):
            raise UsageError(
                "a dure.hook was registered with two models, and its coders belong to the first. Make a hook for each "
                "model, in the same order at all ranks."
            )

    def _mean(self, values: torch.Tensor) -> None:
        """The same operations as DDP's own, so that results are equal bit for bit."""
        values.mul_(1 / dist.get_world_size(self.group))
        dist.all_reduce(values, group=self.group)

    def _counted_mean(self, values: torch.Tensor) -> None:
        size = dist.get_world_size(self.group)
        if values.layout == torch.strided:
            self.bytes_sent += 2 * (size - 1) * values.nbytes // size  # as in a ring
        else:
            self.bytes_sent += (size - 1) * (values._indices().nbytes + values._values().nbytes)
        self._mean(values)

    def _encoded(self, exchange: Stripes | Gather) -> Callable[[torch.Tensor], None]:
        def work(values: torch.Tensor) -> None:
            real = torch.view_as_real(values).view(-1) if values.is_complex() else values
            wide = real if real.dtype in _WIDE else real.float()
            self.bytes_sent += exchange.run(wide)
            if wide is not real:
                real.copy_(wide)

        return work


class _Reminder:
    """Logs a warning at the end of `owner` if DDP has never called it, and an optimizer of several ranks has stepped.

    A process that takes no step, such as one that evaluates, or that an exception ends, logs no warning.
    """

    def __init__(self, owner: Hook, codec: str, group: dist.ProcessGroup | None) -> None:
        self._codec = codec
        self._group = group
        self._stepped = False
        self._steps = register_optimizer_step_post_hook(self._note)
        self._end = weakref.finalize(owner, self._warn)

    def close(self) -> None:
        """Log no warning: the hook has been called."""
        if self._end.detach():
            self._steps.remove()

    def _note(self, *_: object) -> None:
        self._stepped = self._stepped or (dist.is_initialized() and dist.get_world_size(self._group) > 1)

    def _warn(self) -> None:
        self._steps.remove()
        if self._stepped and not raised():
            log.warning(
                'dure.hook("%s") was never called, so the gradients were exchanged without its codec. Register it: '
                "model.register_comm_hook(None, hook), with the model that DistributedDataParallel made. On CPUs "
                "Lightning ignores DDPStrategy(ddp_comm_hook=...): write dure.integrations.lightning."
                "DureStrategy(codec=...).",
                self._codec,
            )


def _check_dtype(bucket: GradBucket) -> None:
    """Raises `UsageError` for gradients of a type that is not exchanged."""
    dtype = bucket.buffer().dtype
    if dtype not in _DTYPES:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in bucket.parameters())
        known = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
        raise UsageError(
            f"the gradients of the parameters of shape {shapes} are {dtype}; dure.hook exchanges {known}. Keep these "
            f"parameters in one of those types, and convert them to {dtype} in forward()."
        )


def _spans(bucket: GradBucket) -> list[Span]:
    """The places of a bucket's parameters among its real numbers: a complex one counts as two, side by side."""
    spans, start = [], 0
    for parameter in bucket.parameters():
        shape = tuple(parameter.shape)
        if parameter.is_complex():
            shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
        stop = start + parameter.numel() * (1 + parameter.is_complex())
        spans.append(Span(start, stop, shape))
        start = stop
    return spans
