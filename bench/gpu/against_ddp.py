"""BSP over NCCL against DistributedDataParallel: speed (check 4), results (5) and device memory (12).

    python bench/gpu/against_ddp.py [--only 4 5 12] [--pairs 15] [--json FILE]

Two ranks, each with a device of its own, train the same small GPT. For speed the same processes hold both and take
turns; the ratio is DDP's time over attach's. Memory is the peak of a process that holds one of them alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _check import Finding, Ratio, Setting, exact_arithmetic, main, need_devices
from _ranks import on_ranks
from _side_by_side import take_turns, warm_up
from _training import WithAttach, WithDDP

from dure.job.overlap import cut
from dure.job.replica import Replica

SPEED, APART = 0.95, 1e-5


def speed(setting: Setting) -> Iterator[Finding]:
    need_devices(2)
    steps = setting.size(20, 1)
    seconds = on_ranks(in_turns, setting, steps)[0]
    ratio = Ratio.of(seconds["ddp"], seconds["attach"])
    what = f"DDP's time over attach's, BSP over NCCL, {setting.pairs} pairs of {steps} steps"
    yield Finding(what, str(ratio), f"at least {SPEED}", ratio.median >= SPEED)


def in_turns(rank: int, setting: Setting, steps: int) -> dict[str, list[float]]:
    arms = {"ddp": WithDDP(rank, setting), "attach": WithAttach(rank, setting)}
    warm_up(arms, steps)
    seconds = take_turns(arms, steps, setting.pairs)
    arms["attach"].replica.close()
    return seconds


def results(setting: Setting) -> Iterator[Finding]:
    need_devices(2)
    steps = setting.size(50, 2)
    apart = max(on_ranks(both_results, setting, steps))
    what = f"largest difference of a parameter from DDP's after {steps} steps, TF32 off"
    yield Finding(what, f"{apart:.2g}", f"at most {APART:g}", apart <= APART)


def both_results(rank: int, setting: Setting, steps: int) -> float:
    exact_arithmetic()
    arms = WithDDP(rank, setting), WithAttach(rank, setting)
    for arm in arms:
        arm.train(steps)
    arms[1].replica.close()
    return float((arms[0].params - arms[1].params).abs().max())


def memory(setting: Setting) -> Iterator[Finding]:
    need_devices(2)
    [(ddp, _), *_], [(attached, slice_bytes), *_] = (on_ranks(peak, setting, kind) for kind in ("ddp", "attach"))
    most = ddp + 2 * slice_bytes  # float32 has no residual
    what = "peak of device memory under attach, DDP's in brackets"
    yield Finding(what, f"{attached} B ({ddp} B)", f"at most DDP's plus two slices, {most} B", attached <= most)


def peak(rank: int, setting: Setting, kind: str) -> tuple[int, int]:
    """The most bytes that tensors of the device held at once, and the bytes of the largest slice."""
    arm = (WithDDP if kind == "ddp" else WithAttach)(rank, setting)
    torch.accelerator.reset_peak_memory_stats()
    arm.train(setting.size(20, 2))
    most = torch.accelerator.max_memory_allocated()
    if isinstance(arm, WithAttach):
        arm.replica.close()
        return most, 0
    replica = Replica(arm.model)
    return most, max(stop - start for start, stop in cut(replica)) * replica.params.element_size()


CHECKS = {4: speed, 5: results, 12: memory}

if __name__ == "__main__":
    main(__doc__, CHECKS)
