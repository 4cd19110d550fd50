"""The backends of `torch.distributed` for a process group whose tensors are on a device, with control on the CPU."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dure.errors import UsageError


def backends_of(device: torch.device, places: Sequence[str], given: str | None = None) -> str:
    """The argument `backend` of `init_process_group` for a rank on `device`; `places` are the `place_of` of all ranks.

    `given` is the backend, or the backends by device type, of a process group that exists. Its choice for the device is
    kept.

    >>> backends_of(torch.device("cpu"), ["cpu", "cpu"])
    'gloo'
    >>> backends_of(torch.device("cuda:0"), ["one/cuda:0", "two/cuda:0"])
    'cpu:gloo,cuda:nccl'
    >>> backends_of(torch.device("cuda:0"), ["one/cuda:0", "one/cuda:0"])
    'cpu:gloo,cuda:gloo'
    """
    types = sorted({place.rpartition("/")[2].partition(":")[0] for place in places})
    if len(types) > 1:
        raise UsageError(
            f"the ranks are on devices of different types, {' and '.join(types)}: collectives of the engine need one. "
            "Move all models to the same type of device."
        )
    if device.type == "cpu":
        return "gloo"
    chosen = _by_type(given).get(device.type) if given else None
    return f"cpu:gloo,{device.type}:{chosen or _default(device, places)}"


def place_of(device: torch.device) -> str:
    """The name of the physical device: two processes on one device have the same, also if each numbers its devices.

    A backend that tells no identifier of a device is taken to number them alike in all processes of a machine.
    """
    if device.type == "cpu":
        return "cpu"
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    return f"{socket.gethostname()}/{device.type}:{getattr(properties, 'uuid', index)}"


def _by_type(given: str) -> dict[str, str]:
    """The backends of `get_backend_config`, as in `cpu:gloo,cuda:nccl`."""
    return dict(part.split(":", 1) for part in given.split(",") if ":" in part)


def _default(device: torch.device, places: Sequence[str]) -> str:
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError as error:
        raise UsageError(
            f"PyTorch names no backend of collectives for {device.type}. Choose one before: "
            f'torch.distributed.init_process_group("cpu:gloo,{device.type}:<backend>").'
        ) from error
    # NCCL refuses two ranks on one device.
    return "gloo" if backend == "nccl" and len(set(places)) < len(places) else backend
