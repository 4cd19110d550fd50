"""Processes of a check: each is a rank with a device, as torchrun starts it. The script has the store of the ranks."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from _check import Setting, target
from _side_by_side import LIMIT

Work = Callable[..., Any]
"""Called as `work(rank, setting, *arguments)` in each process."""


def on_ranks(
    work: Work,
    setting: Setting,
    *arguments: Any,
    ranks: int = 2,
    group: bool = True,
    lost: Collection[int] = (),
) -> list[Any]:
    """The result of `work` at each rank; None for those that are to be `lost`.

    With `group` the processes form one of `torch.distributed`: the device's backend, and Gloo. A rank that fails ends
    the script; its message is on standard error.
    """
    spawn = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, ranks, True, timeout=LIMIT, wait_for_workers=False)
    processes, answers = [], []
    for rank in range(ranks):
        ours, theirs = spawn.Pipe(duplex=False)
        told = (theirs, work, rank, ranks, store.port, setting, group, arguments)
        processes.append(spawn.Process(target=_be, args=told))
        processes[-1].start()
        theirs.close()
        answers.append(ours)
    try:
        return [None if rank in lost else _answer(answer) for rank, answer in enumerate(answers)]
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _answer(pipe: Any) -> Any:
    if not wait([pipe], LIMIT.total_seconds() * 4):
        raise SystemExit("a process gave no answer in time.")
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit("a process failed; its message is above.") from None


def _be(pipe: Any, work: Work, rank: int, ranks: int, port: int, setting: Setting, group: bool, arguments: Any) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    target.prepare()
    if setting.device == "cuda":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    if group:
        store = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", port, ranks, False, timeout=LIMIT))
        dist.init_process_group(target.backend(), store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    pipe.send(work(rank, setting, *arguments))
    if group:
        dist.barrier()  # no rank closes the group while another one uses it
        dist.destroy_process_group()
