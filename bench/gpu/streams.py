"""Training on a stream of the user's own gives the result of training on the default stream (check 13).

    python bench/gpu/streams.py [--json FILE]

Two ranks train the same model twice, under each strategy; the parameters must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from _check import Finding, Setting, exact_arithmetic, main, need_devices, target
from _ranks import on_ranks
from _training import Training, WithAttach, WithDDP

import dure

OVER_NCCL = ("bsp", "averaging:period=2", "hook sign")
OVER_MESSAGES = ("bsp ps", "averaging:period=2 ps", "bsp collective:algorithm=ring")
"""They need no device for each rank."""


def streams(setting: Setting) -> Iterator[Finding]:
    yield from _same(OVER_MESSAGES, setting, group=False)
    need_devices(2)
    yield from _same(OVER_NCCL, setting, group=True)


def _same(strategies: Sequence[str], setting: Setting, *, group: bool) -> Iterator[Finding]:
    ranks = on_ranks(on_both, setting, strategies, setting.size(20, 3), group=group)
    for strategy in strategies:
        apart = max(rank[strategy] for rank in ranks)
        what = f"{strategy}, a stream of the user's own against the default"
        yield Finding(what, f"parameters differ by at most {apart:.2g}", "must be equal", apart == 0)


def on_both(rank: int, setting: Setting, strategies: Sequence[str], steps: int) -> dict[str, float]:
    """How far the parameters on the two streams are apart, by strategy."""
    exact_arithmetic()
    own = torch.Stream(target.of_rank(rank))
    own.wait_stream(torch.accelerator.current_stream())
    apart = {}
    for strategy in strategies:
        default = trained(rank, setting, strategy, steps).params.cpu()
        with own:
            apart[strategy] = float((trained(rank, setting, strategy, steps).params.cpu() - default).abs().max())
    return apart


def trained(rank: int, setting: Setting, strategy: str, steps: int) -> Training:
    kind, _, codec = strategy.partition(" ")
    if kind == "hook":
        with_hook = WithDDP(rank, setting, partial(_register, codec))
        with_hook.train(steps)
        return with_hook
    attached = WithAttach(rank, setting, strategy)
    attached.train(steps)
    attached.replica.close()
    return attached


def _register(codec: str, model: torch.nn.parallel.DistributedDataParallel) -> None:
    model.register_comm_hook(None, dure.hook(codec))


CHECKS = {13: streams}

if __name__ == "__main__":
    main(__doc__, CHECKS)
