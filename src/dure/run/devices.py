"""The devices of a run's replicas: what `--device` names, dealt out to the workers.

Devices are looked for in the process that leads a run, or in the process of a rank under torchrun, and never in a fork
server: a process that has asked a driver for its devices cannot be forked any more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dure.errors import UsageError

AUTO = "auto"
CPU = "cpu"

FORM = re.compile(r"(?P<kind>[a-z][a-z0-9_]*)(:(?P<index>\d{1,5}))?")
"""A kind of device, and the number of one device of this kind: cuda, cuda:1."""

UNFIT = ("mps",)
"""Kinds of devices without side streams and without numbers in double precision: no replica can be there."""


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


def found_kind() -> str | None:
    """The kind of this machine's accelerators; None if it has none."""
    import torch  # texts are checked before torch is imported

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def devices_of(text: str, workers: int, *, virtual: bool, local_rank: int | None = None) -> tuple[str, ...]:
    """The device of each worker's replica, for `text` as `--device` gives it.

    Workers on this machine get the devices of the kind in turn; several workers may share one. A `virtual` run has all
    replicas on one device. `local_rank` is the number of this process among those that torchrun has started on its
    machine: then each entry is the device of this process. Raises `UsageError` if this machine has no such device.
    """
    match = FORM.fullmatch(text)
    assert match is not None
    kind, index = match["kind"], match["index"]
    if kind == CPU:
        return (CPU,) * workers
    found = found_kind()
    if text == AUTO and (found is None or found in UNFIT):
        return (CPU,) * workers
    if text == AUTO:
        kind = found
    if kind in UNFIT:
        raise UsageError(
            f'device="{text}" was asked for, and devices of kind {kind} have neither side streams nor float64 in '
            f"PyTorch, which a replica needs. Write {CPU}."
        )
    if kind != found:
        raise UsageError(f'device="{text}" was asked for, and {_here(found)}')
    return dealt(kind, count_of_devices(), workers, index=index, one=virtual, local_rank=local_rank)


def first_of(kind: str, workers: int) -> tuple[str, ...]:
    """The device of each worker where each process has devices of its own: the first that it sees.

    >>> first_of("cuda", 2), first_of("cpu", 1)
    (('cuda:0', 'cuda:0'), ('cpu',))
    """
    return (kind if kind == CPU else f"{kind}:0",) * workers


def _here(found: str | None) -> str:
    """The kind of this machine's accelerators, and the texts that it allows. `2.13.0+cpu` is built without CUDA."""
    import torch

    if found is None:
        return f"PyTorch {torch.__version__} finds no accelerator here. Write {CPU} or {AUTO}."
    return f"PyTorch finds devices of kind {found} here. Write {found}, {CPU} or {AUTO}."


def count_of_devices() -> int:
    """The number of this machine's accelerators."""
    import torch

    return torch.accelerator.device_count()


def dealt(
    kind: str,
    count: int,
    workers: int,
    *,
    index: str | None = None,
    one: bool = False,
    local_rank: int | None = None,
) -> tuple[str, ...]:
    """Deal `count` devices out to `workers` in turn. All get the device `index` if it is given, `one`: the first.

    >>> dealt("cuda", 2, 3)
    ('cuda:0', 'cuda:1', 'cuda:0')
    """
    if index is not None and int(index) >= count:
        here = f"{count} are here, {kind}:0 to {kind}:{count - 1}. Write one of these, {kind} or {AUTO}."
        if count == 1:
            here = f"one is here. Write {kind}:0, {kind} or {AUTO}."
        raise UsageError(f'device="{kind}:{index}" was asked for, and {here}')
    if index is not None or one:
        return (f"{kind}:{int(index or 0)}",) * workers
    if local_rank is not None:
        return (f"{kind}:{local_rank % count}",) * workers
    return tuple(f"{kind}:{rank % count}" for rank in range(workers))


def check_use(devices: Sequence[str], *, timing_only: bool) -> None:
    """Raise `UsageError` if a run cannot use its `devices`."""
    used = [device for device in devices if device != CPU]
    if used and timing_only:
        raise UsageError(
            f'timing_only computes no gradient, and device="{used[0]}" was asked for. Leave one of them out.'
        )


def notice(text: str | None, devices: Sequence[str], *, places: Sequence[str] = ()) -> str:
    """The line on the devices of a run, for `text` as `--device` gave it; empty if there is nothing to say.

    `places` are the machines of the workers, if they are on several.

    >>> notice("auto", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"])
    'device=auto found cuda: 4 workers on cuda:0, cuda:1: several share one.'
    >>> notice("auto", ["cpu", "cpu"])
    'device=auto found no accelerator: 2 workers on the CPU.'
    """
    if all(device == CPU for device in devices):
        found = f"device={AUTO} found no accelerator: {described(devices)}." if text == AUTO else ""
        return found or (_unused() if text is None else "")
    took = f"device={AUTO} found {' and '.join(sorted(set(map(kind_of, devices))))}: " if text == AUTO else ""
    return f"{took}{described(devices, places)}."


def _unused() -> str:
    """A line that names the accelerators of this machine, if there are some and no option speaks of them."""
    found = found_kind()
    if found is None or found in UNFIT:
        return ""
    return f"the replicas are on the CPU, and this machine has devices of kind {found}: --device {AUTO} uses them."


def described(devices: Sequence[str], places: Sequence[str] = ()) -> str:
    """The devices of a run's workers in words. `places` are the machines of the workers, if they are on several.

    >>> described(["cuda:0", "cuda:1", "cuda:0", "cuda:1"])
    '4 workers on cuda:0, cuda:1: several share one'
    >>> described(["cuda:0", "cuda:0"], places=["one", "two"])
    '2 workers on cuda:0 of one, cuda:0 of two'
    """
    named = {place: f" of {place}" for place in places} if len(set(places)) > 1 else {}
    held = [
        "the CPU" if device == CPU else f"{device}{named.get(place, '')}"
        for device, place in zip(devices, places or [""] * len(devices), strict=True)
    ]
    different = sorted(set(held))
    shares = len(set(held) - {"the CPU"}) < len([each for each in held if each != "the CPU"])
    workers = "1 worker" if len(devices) == 1 else f"{len(devices)} workers"
    return f"{workers} on {', '.join(different)}{': several share one' if shares else ''}"


def check_alike(devices: Sequence[str]) -> None:
    """Raise `UsageError` if the devices of ranks that meet in collective operations are of several kinds."""
    kinds = {kind: devices.index(device) for device in reversed(devices) for kind in (kind_of(device),)}
    if len(kinds) > 1:
        held = " and ".join(f"rank {rank} has {kind}" for kind, rank in sorted(kinds.items(), key=lambda each: each[1]))
        raise UsageError(
            f"all ranks of a collective operation need devices of one kind, and {held}. Write --device {CPU}, or train "
            "over a parameter server: --topology ps."
        )


def in_summary(devices: Sequence[str]) -> dict[str, list[str]]:
    """The entry of a run's summary on its devices, one for each worker; none for a run on the CPU alone."""
    return {"devices": list(devices)} if set(devices) - {CPU} else {}
