"""The result of a vote travels back in place of the model: each worker applies it by the server's rule.

Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", ICLR 2019, algorithm 1;
Park and Lee, "IT-signSGD", equation 5: the server returns the aggregated signs U, and every worker makes the step.

    worker, at version v - 1            a shard
      signs of its gradient ---------->  puts all members' signs to the vote; U
      <------------------------- U, lr   w <- Opt(w, U)
      w <- Opt(w, U)

Both apply the same message to equal slices with equal optimizer states, in the same order of operations, so both have
the same values bit for bit. The message is as long as one that a worker pushes.

One result leads from a version to the next. A worker at any other version (a newcomer, one that was restored from a
checkpoint, one that has missed a version) pulls values and optimizer state once. The optimizer state exists for the
newest version only: where that is no longer the version pulled, the worker pulls the model again at its next step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.node import Apply, CodecWork, Ghost, Node, Reply, nothing, taking
from dure.core.vectors import Ranges, gather, pieces, size
from dure.job.optimizer import FlatOptimizer, GroupRange, OptimizerSpec

if TYPE_CHECKING:
    from dure.codec.coder import Coder
    from dure.core.node import Call
    from dure.topology.parameter_server.versions import Versions


class VoteResult(NamedTuple):
    """The encoded signs that lead to a version, and the rate at which the shard applied them."""

    message: torch.Tensor
    lr: float | Sequence[float] | None


class SliceMirror:
    """A worker's mirror of one shard's slice and optimizer state, at `version`; None where they are not known.

    `values` is the whole model at version 0, of which the shard holds `ranges`; `spec` and `segments` are its rule. The
    result of a vote is received into `message`. In a timing-only run `values` is a `Ghost`: only the version counts.
    """

    def __init__(
        self,
        values: torch.Tensor,
        ranges: Ranges,
        spec: OptimizerSpec,
        segments: Sequence[GroupRange],
        coder: Coder,
    ) -> None:
        self.version: int | None = 0
        self.message = values.new_empty(coder.most_bytes, dtype=torch.uint8)
        self._ranges = ranges
        self._coder = coder
        self._timing_only = isinstance(values, Ghost)
        self.values = values[: size(ranges)] if self._timing_only else gather(values, ranges).clone()
        if not self._timing_only:
            self.rule = FlatOptimizer(spec, self.values.numel(), values.dtype, segments=segments, device=values.device)
            self._signs = torch.empty_like(self.values)

    @property
    def decoding(self) -> CodecWork:
        """Cost of decoding a result, in virtual time."""
        return CodecWork("decode", self.values.numel())

    def apply(self, fields: Mapping[str, Any]) -> None:
        """Make the shard's step by the result in `message`; `fields` are those of the reply that brought it.

        Raises `DamagedMessage`.
        """
        if not self._timing_only:
            self._coder.decode(self.message[: fields["nbytes"]], self._signs)
            self.rule.apply(self.values, self._signs, self.values, lr=fields["lr"])
        self.version = fields["version"]

    def start_at(self, version: int, model: torch.Tensor, steps: int) -> None:
        """Go on from the slice in `model` at `version`, with the optimizer state that the rule's vectors hold."""
        self.values.copy_(gather(model, self._ranges))
        self.rule.steps = steps
        self.version = version

    def write(self, model: torch.Tensor) -> None:
        """Write the slice to its ranges of `model`; nothing in a timing-only run."""
        if self._timing_only:
            return
        sizes = [stop - start for start, stop in self._ranges]
        for piece, part in zip(pieces(model, self._ranges), torch.split(self.values, sizes), strict=True):
            piece.copy_(part)


async def apply_vote_results(node: Node, brought: Sequence[tuple[SliceMirror, Mapping[str, Any]]]) -> None:
    """Apply every result that the shards' replies have brought, as work of the worker's `node`."""
    if not brought:
        return
    await node.compute(taking(*(mirror.decoding for mirror, _ in brought)))
    await node.compute(Apply(nothing, sum(mirror.values.nbytes for mirror, _ in brought)))
    for mirror, fields in brought:
        mirror.apply(fields)


Answer = tuple[Mapping[str, Any], tuple[torch.Tensor, ...]]
"""Fields and tensors of a reply."""


class VoteResults:
    """The results of votes at a shard, by the version that each leads to, as long as `versions` keep that one."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._by_version: dict[int, VoteResult] = {}

    def add(self, version: int, result: VoteResult) -> None:
        self._by_version[version] = result

    def drop(self, version: int) -> None:
        self._by_version.pop(version, None)

    def follow(self, call: Call) -> Reply | Awaitable[Reply]:
        """As `Versions.pull`, answered with the result that leads to that version in place of the slice."""
        pulled = self._versions.pull(call)
        return self._replace(call, pulled) if isinstance(pulled, Reply) else self._replace_later(call, pulled)

    async def _replace_later(self, call: Call, pulled: Awaitable[Reply]) -> Reply:
        return self._replace(call, await pulled)

    def _replace(self, call: Call, pulled: Reply) -> Reply:
        pulled.release()
        return Reply(*self.lead(call.fields["has"], pulled.fields["version"]))

    def lead(self, has: int | None, version: int) -> Answer:
        """The reply that brings a worker from version `has` to `version`: its fields and its message.

        `nbytes` is the message's length: 0 where the worker has `version`, None where it must pull the model.
        """
        if has == version:
            return {"version": version, "nbytes": 0}, (_NO_BYTES,)
        result = self._by_version.get(version) if has == version - 1 else None
        if result is None:
            return {"version": version, "nbytes": None}, (_NO_BYTES,)
        message = result.message
        return {"version": version, "nbytes": message.numel(), "lr": result.lr}, (message,)


def optimizer_state(rule: FlatOptimizer, *, newest: bool) -> Answer:
    """Fields and copies of a rule's vectors for a worker; none of them where its version is no longer the `newest`."""
    if newest:
        return {"steps": rule.steps}, tuple(vector.clone() for vector in rule.vectors.values())
    return {"steps": None}, tuple(vector[:0] for vector in rule.vectors.values())


_NO_BYTES = torch.empty(0, dtype=torch.uint8)
