"""The devices of a run's replicas: what `--device` names, dealt out to the workers."""

from __future__ import annotations

import re

from dure.errors import UsageError

AUTO = "auto"
CPU = "cpu"

FORM = re.compile(r"(?P<kind>[a-z][a-z0-9_]*)(:(?P<index>\d+))?")
"""A kind of device, and the number of one device of this kind: cuda, cuda:1."""


def check_form(text: str) -> None:
    """Raise `UsageError` if `text` can name no device."""
    if FORM.fullmatch(text) is None:
        raise UsageError(f'device="{text}" is no device. Write auto, cpu, cuda, or cuda:1 for one device of several.')


def kind_of(text: str) -> str:
    """The kind of a device, without its number.

    >>> kind_of("cuda:1"), kind_of("cpu")
    ('cuda', 'cpu')
    """
    return text.partition(":")[0]


def devices_of(text: str, workers: int, *, virtual: bool, local_rank: int | None = None) -> tuple[str, ...]:
    """The device of each worker's replica, for `text` as `--device` gives it.

    Workers on this machine get the devices of the kind in turn; several workers may share one. A `virtual` run has all
    replicas on one device. `local_rank` is the number of this process among those that torchrun has started on its
    machine: then each entry is the device of this process. Raises `UsageError` if this machine has no such device.
    """
    import torch  # texts are checked before torch is imported

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = None if accelerator is None else accelerator.type
    if text == AUTO:
        text = CPU if found is None else found
    match = FORM.fullmatch(text)
    assert match is not None
    kind, index = match["kind"], match["index"]
    if kind == CPU:
        return (CPU,) * workers
    if kind != found:
        has = "no accelerator" if found is None else f"devices of kind {found}"
        raise UsageError(f'device="{text}" was asked for, and PyTorch finds {has} here. Write {found or CPU}, or auto.')
    count = torch.accelerator.device_count()
    if index is not None:
        if int(index) >= count:
            raise UsageError(
                f'device="{text}" was asked for, and there are {count} here. Write {kind}:0 to {kind}:{count - 1}.'
            )
        return (text,) * workers
    if virtual:
        return (f"{kind}:0",) * workers
    if local_rank is not None:
        return (f"{kind}:{local_rank % count}",) * workers
    return tuple(f"{kind}:{rank % count}" for rank in range(workers))


def described(devices: tuple[str, ...]) -> str:
    """The devices of a run in words.

    >>> described(("cuda:0", "cuda:1", "cuda:0", "cuda:1"))
    '4 workers on cuda:0, cuda:1: several share one'
    """
    different = sorted(set(devices))
    shared = ": several share one" if len(different) < len(devices) else ""
    return f"{len(devices)} workers on {', '.join(different)}{shared}"
