"""Shards of the optimizer's state and of the gradient in a user's loop: ZeRO (`partition/methods/zero.py`).

    user's loss.backward()
        slice complete           times this rank's share, reduce-scatter under way; stage 2 frees the slice behind it
        end of backward          this rank's part of the mean, and the norm of the whole (8 bytes from each rank)
    replica.clip_grad_norm_()    each rank scales its part
    replica.step()               the user's rule steps the part of the parameters; all parts are gathered

Between backward and step no rank has the mean. So the gradient of a parameter is a `ScatteredGradient`, whose every use
raises an error: a clipping of the user's own would find other values at each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.core.shards import Shards
from dure.core.vectors import all_finite
from dure.errors import PeerLost, UsageError
from dure.job.optimizer import RangesOptimizer, clip_factor
from dure.job.overlap import cut
from dure.topology.collective.sharded import ShardedSession, ShardGroups, squares_of
from dure.user_loop.optimizer import AT_SHARDS, FlatRule
from dure.user_loop.peers import LoopCollectives
from dure.user_loop.source import Exchange

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from dure.core.node import Operation
    from dure.core.state import State
    from dure.job.replica import Replica
    from dure.run.strategy import Strategy
    from dure.runtime.launch.rendezvous import Rendezvous
    from dure.runtime.process.group import ProcessGroup
    from dure.runtime.process.node import ProcessNode
    from dure.runtime.process.scatter import Scatters
    from dure.sync.worker_state import WorkerState
    from dure.user_loop.optimizer import UserOptimizer
    from dure.user_loop.source import Failed, LoopSource


class LoopShards(LoopCollectives):
    """Ties over collectives of ranks that each hold a part of the optimizer's state.

    Raises `UsageError` for an optimizer whose rule is not element by element.
    """

    def __init__(
        self,
        node: ProcessNode,
        rendezvous: Rendezvous,
        replica: Replica,
        strategy: Strategy,
        optimizer: UserOptimizer,
    ) -> None:
        self._rule = FlatRule(optimizer.optimizer, replica, AT_SHARDS)  # before there is an engine to close
        optimizer.refuse_states(AT_SHARDS)
        super().__init__(node, rendezvous, replica, strategy, optimizer.missing.unused)
        zero: Any = strategy.partition
        units = [[each] for each in reversed(cut(replica))]
        frees = zero.stage == 2 and not self._engine.alone
        self._shards = Shards(units, len(self._group.ranks), frees_gradients=frees)
        self._mine = optimizer

    async def begin(self, worker: WorkerState, source: LoopSource, failed: Failed) -> None:
        """As `LoopCollectives.begin`; from now on the rank steps its part by the user's rule."""
        own = self._shards.of(worker.rank)
        worker.optimizer = ShardOptimizer(self._rule, self._mine, own, self._replica)
        if self._shards.frees_gradients:
            self._replica.drop_gradients()
        await super().begin(worker, source, failed)
        if not self._engine.alone:
            group: Any = self._group
            groups = ShardGroups(group, group, None, self._shards, worker.rank)
            worker.sessions.group = worker.sessions.sharded = ShardedSession(worker, groups, whole=True)

    def rates(self) -> list[float] | None:
        """The present rate of each parameter group."""
        return self._rule.rates()

    def _exchange(self, worker: WorkerState, failed: Failed, name: str) -> Exchange:
        group: Any = self._group
        return ShardedExchange(self._node, group, self._replica, worker.share, failed, name, self._shards)


class ShardOptimizer:
    """A `LocalOptimizer`: the rule of the user's optimizer for this rank's ranges of the flat parameters."""

    def __init__(self, rule: FlatRule, mine: UserOptimizer, own: Sequence[tuple[int, int]], replica: Replica) -> None:
        self.spec = rule.spec
        self._mine = mine
        self._rule = RangesOptimizer(rule.spec, own, replica.dtype, segments=rule.segments, device=replica.device)

    def apply(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        out: torch.Tensor,
        *,
        lr: float | Sequence[float] | None = None,
    ) -> None:
        """Step along the part `gradient`, unless the step is skipped."""
        if not self._mine.pausing:
            self._rule.apply(values, gradient, out, lr=lr)

    def state(self) -> State:
        """The state of this rank's part."""
        return self._rule.state()

    def restore(self, state: State) -> None:
        """Continue from `state`. Raises `ValueError` if it belongs to another rule or part."""
        self._rule.restore(state)


class ShardedExchange(Exchange):
    """Turns the gradient into this rank's part of the mean over `group`; no parameter has a gradient afterwards."""

    def __init__(
        self,
        node: ProcessNode,
        group: ProcessGroup,
        replica: Replica,
        share: float,
        failed: Failed,
        name: str,
        shards: Shards,
    ) -> None:
        super().__init__(node, group, replica, share, failed, name, list)
        self._members = group
        self._shards = shards
        self._scatters: Scatters | None = None
        self._part = replica.params[:0]
        self._norm = 0.0
        self._hidden = [ScatteredGradient(parameter) for parameter in replica.parameters]

    @property
    def mean(self) -> torch.Tensor:
        """This rank's part; zeros where a `zero_grad()` has discarded the gradient."""
        return self._part.zero_() if self._replica.is_emptied() else self._part

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self._norm)

    def clip(self, norm: float) -> torch.Tensor:
        """Limit the norm of the whole mean to `norm`, at all ranks alike; returns the norm before."""
        before, factor = self._norm, clip_factor(self._norm, norm)
        self._part *= factor
        self._norm *= factor
        return torch.tensor(before)

    def arm(self) -> None:
        self._scatters = None
        super().arm()

    def close(self) -> None:
        """As `Exchange.close`; parameters may have gradients again."""
        super().close()
        self._replica.zero_grad()

    def _launch(self, part: torch.Tensor) -> None:
        if self.examines and not all_finite(part):
            self._faulty = True
        if self._scatters is None:
            self._scatters = self._members.scatters(self._shards, self._replica.params)
        part *= self._share
        try:
            self._scatters.begin(part)
        except PeerLost as error:  # in the middle of the user's backward
            told = self._failed(error)
            if told is error:
                raise
            raise told from error

    def _sent(self) -> Sequence[Operation[Any]]:
        self._overlap.finish()
        return [self._node.spawn(self._meet(), f"{self._node.name} exchanging its gradient")]

    async def _meet(self) -> None:
        """Wait for this rank's part of all slices, and add up the squared norms of the parts."""
        assert self._scatters is not None
        self._part = await self._members.parts(self._scatters, self._replica.params)
        squares = torch.tensor([squares_of(self._part, exact=True)], dtype=torch.float64, device="cpu")
        self._norm = math.sqrt(float(await self._members.all_reduce(squares)))

    def _wait(self) -> None:
        super()._wait()
        if self.going:
            self._replica.hide_gradients(self._hidden)


class ScatteredGradient(torch.Tensor):
    """The gradient of a `parameter` of which each rank has a part: a tensor without values, whose uses all raise."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> ScatteredGradient:
        made: ScatteredGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        return made

    def __init__(self, parameter: torch.Tensor) -> None:
        """Do nothing: `__new__` has made the tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise `UsageError`."""
        raise UsageError(
            f"a gradient that is sharded was used, by {func}: backward() has scattered it, and each rank has a part "
            "of the mean. To clip, write replica.clip_grad_norm_(1.0) in place of clip_grad_norm_(...). Call "
            "backward() once before replica.step(), and all other backwards of that step inside `with "
            "replica.accumulate():`; zero_grad() discards a gradient that belongs to no step, with set_to_none=True."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScatteredGradient(shape={tuple(self.shape)})"


def check_unscaled(scaler: GradScaler) -> None:
    """Raises `UsageError` for a `scaler` that scales losses."""
    if scaler.is_enabled():
        raise UsageError(
            "a gradient scaler unscales whole gradients, and with shard each rank has a part of the mean. Train in "
            "torch.autocast(..., dtype=torch.bfloat16), which needs no scaler, and call replica.step(); or leave shard "
            "out."
        )
