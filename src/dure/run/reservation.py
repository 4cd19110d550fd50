"""The processors and GPUs that Ray reserves for the processes of a run, by the kind of their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dure.core.deployment import ACTOR, REPLAY, SERVER, WORKER
from dure.core.spec_text import names, nearest, parse_member, typed
from dure.errors import UsageError
from dure.run.devices import CPU

KINDS = (WORKER, SERVER, ACTOR, REPLAY)

LEAST = 0.001
"""Processors that Ray reserves for a process at least: a bundle cannot be empty."""

GPU = "cuda"
"""The device of a worker that trains on the GPU that Ray has reserved for it."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Processors and GPUs of one process. Part of a GPU is shared with other processes."""

    cpus: float = LEAST
    gpus: float = 0.0


def reservations(text: str | None, device: str | None) -> Mapping[str, Reservation]:
    """The reservation of each kind of node, for the options `reserve` and `device`. Raises `UsageError`.

    >>> reservations("worker:cpus=2 server:cpus=1", "cuda")["worker"]
    Reservation(cpus=2.0, gpus=1.0)
    """
    found = {kind: Reservation(gpus=float(kind == WORKER and device == GPU)) for kind in KINDS}
    for each in (text or "").split():
        member = parse_member(each)
        if member.name not in KINDS:
            raise UsageError(f'reserve="{text}": {member.name} is none of {names(KINDS)}.{nearest(member.name, KINDS)}')
        found[member.name] = replace(found[member.name], **typed(member, Reservation))
    for kind, (cpus, gpus) in {kind: (each.cpus, each.gpus) for kind, each in found.items()}.items():
        if not (LEAST <= cpus < 1e6 and 0 <= gpus < 1e6 and (gpus < 1 or gpus.is_integer())):
            raise UsageError(
                f'reserve="{text}" gives a {kind} cpus={cpus:g} and gpus={gpus:g}. Give at least {LEAST:g} processors, '
                "and a part of one GPU or a whole number of them."
            )
    if device == GPU and not found[WORKER].gpus:
        raise UsageError(f'reserve="{text}" gives a worker no GPU, and device={GPU} needs one. Write --device {CPU}.')
    return found


def check_device(on: str, device: str | None) -> None:
    """Raise `UsageError` for a device that a worker on Ray cannot have."""
    if device not in (None, CPU, GPU):
        raise UsageError(
            f"--device {device} was asked for, and a worker of --on {on} has the GPU that Ray reserves for it, on a "
            f"machine that Ray chooses. Write --device {GPU} or --device {CPU}."
        )
