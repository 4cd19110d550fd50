"""Copies between the device and the host: overlap (check 6), pinned memory (7) and their bytes (8).

    python bench/gpu/copies.py [--only 6 7 8] [--pairs 15] [--json FILE]

6  Two ranks train under BSP over a ring of messages. PyTorch's profiler gives the spans of the copies to the host and
   those of the kernels on the stream of the backward.
7  A tensor is copied to a buffer of pinned memory's pool and to ordinary memory, in turn.
8  A gradient is pushed to a server, as signs and as float32; every copy from the device to the host is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from _check import Finding, Setting, Unavailable, in_pairs, main, target
from _pushing import push, pushing_node
from _ranks import on_ranks
from _training import WithAttach
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from dure.codec.coder import SliceLayout
from dure.codec.sign import Sign
from dure.runtime.process.transfers import PinnedPool

OVERLAPPED, FASTER, FEWER_BYTES = 0.70, 2.0, 31.0


# ---- 6


class Span(NamedTuple):
    """Nanoseconds of an operation of the device."""

    start: int
    stop: int


def overlap(setting: Setting) -> Iterator[Finding]:
    copies, kernels = on_ranks(spans_of_training, setting, group=False)[0]
    if setting.rehearse:
        copies, kernels = [Span(0, 10)], [Span(0, 8)]  # the profiler does not know the stand-in
    if not copies:
        raise Unavailable("the profiler saw no copy from the device: it needs CUPTI")
    share = overlapped(copies, kernels)
    what = "share of the time of copies to the host that overlaps the kernels of forward and backward, BSP over a ring"
    yield Finding(what, f"{share:.0%}", f"at least {OVERLAPPED:.0%}", share >= OVERLAPPED)


def spans_of_training(rank: int, setting: Setting) -> tuple[list[Span], list[Span]]:
    arm = WithAttach(rank, setting, "bsp collective:algorithm=ring")
    arm.train(setting.size(10, 1))
    with profile() as profiled:
        arm.train(setting.size(10, 2))
    arm.replica.close()
    return spans(profiled)


def spans(profiled: Any) -> tuple[list[Span], list[Span]]:
    """The copies to the host, and the kernels of the stream that has most of their time."""
    copies: list[Span] = []
    kernels: dict[int, list[Span]] = {}
    for event in profiled.profiler.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        span = Span(event.start_ns(), event.start_ns() + event.duration_ns())
        if event.name().startswith("Memcpy DtoH"):
            copies.append(span)
        elif not event.name().startswith(("Memcpy", "Memset")):
            kernels.setdefault(event.device_resource_id(), []).append(span)
    busiest = max(kernels.values(), key=lambda each: sum(span.stop - span.start for span in each), default=[])
    return copies, busiest


def overlapped(copies: Sequence[Span], kernels: Sequence[Span]) -> float:
    """The share of the copies' time in which a kernel runs. Kernels of one stream do not overlap each other."""
    both = sum(
        max(0, min(copy.stop, kernel.stop) - max(copy.start, kernel.start)) for copy in copies for kernel in kernels
    )
    return both / sum(copy.stop - copy.start for copy in copies)


# ---- 7


def pinned(setting: Setting) -> Iterator[Finding]:
    nbytes = setting.size(1 << 26, 1 << 10)
    values = torch.ones(nbytes, dtype=torch.uint8, device=target.of_rank(0))
    buffer = PinnedPool().take("check", nbytes)
    assert buffer is not None
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    ratio = in_pairs(lambda: pageable.copy_(values), lambda: buffer[:nbytes].copy_(values, non_blocking=True), setting)
    what = f"seconds of a copy of {nbytes} B to ordinary memory over those to pinned memory"
    yield Finding(what, str(ratio), f"at least {FASTER:g}", ratio.median >= FASTER)


# ---- 8


class HostCopies(TorchDispatchMode):
    """Counts the bytes that operators of this thread copy from the device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name == "copy_" and args[0].is_cpu and not args[1].is_cpu:
            self.nbytes[name] += args[0].nbytes
        elif name == "_to_copy" and result.is_cpu and not args[0].is_cpu:
            self.nbytes[name] += result.nbytes
        elif name == "_local_scalar_dense" and not args[0].is_cpu:
            self.nbytes[name] += args[0].element_size()
        return result


def nbytes(setting: Setting) -> Iterator[Finding]:
    numel = setting.size(1 << 23, 1 << 14)
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(target.of_rank(0))
    coder = Sign().coder(SliceLayout.plain(numel))
    counts = {}
    with pushing_node(setting, numel) as node:
        for name, encode in (("fp32", lambda: gradient), ("sign", lambda: coder.encode(gradient))):
            with HostCopies() as copies:
                push(node, encode())
            counts[name] = copies.nbytes.total()
    ratio = counts["fp32"] / counts["sign"]
    what = f"bytes of a pushed gradient of {numel} values that leave the device: fp32 over sign"
    yield Finding(
        what, f"{counts['fp32']} / {counts['sign']} = {ratio:.2f}", f"at least {FEWER_BYTES:g}", ratio >= FEWER_BYTES
    )


CHECKS = {6: overlap, 7: pinned, 8: nbytes}

if __name__ == "__main__":
    main(__doc__, CHECKS)
