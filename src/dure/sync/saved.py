"""The state of a worker in a checkpoint, as named tensors and plain values."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dure.codec.coder import restore as restore_coders
from dure.codec.coder import states
from dure.core.node import Ghost
from dure.topology.collective.compressed import CompressedGroup
from dure.topology.replica import Pulled

if TYPE_CHECKING:
    import torch

    from dure.sync.worker import Worker


def state(worker: Worker) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return all declared state of a worker, its optimizer, its source and its sessions."""
    optimizer, counts = worker.optimizer.state()
    server, group, peer = worker.sessions.server, worker.sessions.members, worker.sessions.peer
    plain = {
        "clock": worker.clock,
        "entered": worker.joined_at,
        "given": worker.given,
        "refused": [worker.refusals.total, worker.refusals.in_a_row],
        "source": worker.source.state(),
        "versions": worker.versions,
        "optimizer": counts,
        "kept": worker.kept_plain,
        "lr": worker.lr,
        "client": None if server is None else server.client.state(),
        "peer": None if peer is None else peer.state(),
    }
    coded = {} if server is None else states(server.client.coders)
    if isinstance(group, CompressedGroup):
        coded, plain["rounds"] = group.state()
    tensors = {
        "params": worker.params,
        **_prefixed("kept.", worker.kept),
        **({} if worker.buffers is None else {"buffers": worker.buffers}),
        **_prefixed("optimizer.", optimizer),
        **_prefixed("coded.", coded),
    }
    return {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, Ghost)}, plain


def restore(worker: Worker, tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
    """Set a worker to the state of a checkpoint."""
    if not isinstance(worker.params, Ghost):
        if tensors["params"].shape != worker.params.shape:
            raise ValueError(f"{tensors['params'].numel()} parameters in place of {worker.params.numel()}")
        worker.params = tensors["params"].clone()
    worker.buffers = tensors["buffers"].clone() if "buffers" in tensors else None
    worker.kept_plain = copy.deepcopy(plain["kept"])
    worker.kept = _copies("kept.", tensors)
    worker.optimizer.restore(_copies("optimizer.", tensors), plain["optimizer"])
    worker.source.restore(plain["source"])
    worker.clock, worker.joined_at, worker.given = (int(plain[name]) for name in ("clock", "entered", "given"))
    worker.refusals.total, worker.refusals.in_a_row = plain.get("refused", (0, 0))
    worker.lr = plain.get("lr")  # of gradients that are not pushed yet
    _restore_sessions(worker, _part("coded.", tensors), plain)
    if plain["versions"] is not None:
        worker.storage.pulled = Pulled(worker.params, list(plain["versions"]))


def _restore_sessions(worker: Worker, coded: dict[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
    server, group, peer = worker.sessions.server, worker.sessions.members, worker.sessions.peer
    if server is not None:
        server.client.restore(plain["client"])
    if peer is not None:
        peer.restore(plain["peer"])
    if isinstance(group, CompressedGroup):
        group.restore(coded, plain["rounds"])
    elif server is not None:
        restore_coders(server.client.coders, coded)


def _prefixed(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _part(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _copies(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in _part(prefix, tensors).items()}
