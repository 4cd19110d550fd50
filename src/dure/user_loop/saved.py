"""The state of one rank of an attached model, in a checkpoint of the user's loop: tensors and plain values.

| over                         | a rank's state                                                          |
|------------------------------|-------------------------------------------------------------------------|
| collectives, `bsp`           | the clock, and what a codec remembers at this rank; the loop saves the  |
|                              | one model and the one optimizer. Without a codec, for any number of ranks |
| collectives, `bsp` with      | the clock, and the optimizer's state of this rank's part of the model   |
| shards                       |                                                                         |
| collectives, other methods   | the replica, the state of the method, and the optimizer, of this rank   |
| servers                      | refused: the servers have the state                                     |
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dure.core.state import State
from dure.errors import UsageError
from dure.partition.mesh import zero_of
from dure.run.strategy import member_text
from dure.sync import lifecycle
from dure.sync.base import traits_of

if TYPE_CHECKING:
    from dure.job.replica import Replica
    from dure.run.strategy import Strategy
    from dure.runtime.launch.rendezvous import RankEnvironment
    from dure.sync.worker_state import WorkerState

FORMAT = 2
"""The version of the form of a rank's state."""

FORM = {"strategy": str, "rank": int, "world_size": int, "model": str, "clock": int}
FORM_OF_REPLICA = {"tensors": dict, "plain": dict, "kind": str, "optimizer": dict}
"""The entries of a state, and those that it has besides where replicas differ. `kind` is the class of the optimizer."""


def model_text(replica: Replica) -> str:
    """A text that differs for models of other layers: their names, shapes and strides, and their constants."""
    pairs = zip(replica.layers, replica.parameters, strict=True)
    layers = [[layer.name, list(parameter.shape), list(parameter.stride())] for layer, parameter in pairs]
    constants = [[name, list(each.shape), str(each.dtype)] for name, each in replica.constants.items()]
    return hashlib.sha256(repr([layers, constants]).encode()).hexdigest()[:16]


def state_dict(
    strategy: Strategy,
    place: RankEnvironment,
    worker: WorkerState,
    replica: Replica,
    optimizer: torch.optim.Optimizer,
    present: tuple[torch.Tensor, torch.Tensor],
) -> dict[str, Any]:
    """The state of this rank; `present` are the parameters and the buffers that it goes on with.

    Raises `UsageError` for a strategy whose state is not at the ranks.
    """
    _check_kept_at_ranks(strategy, worker)
    whole = {
        "format": FORMAT,
        "strategy": str(strategy),
        "rank": place.rank,
        "world_size": place.world_size,
        "model": model_text(replica),
        "clock": worker.clock,
    }
    if zero_of(strategy.partition) is not None:
        shard = worker.optimizer.state().cloned()
        return whole | ({"tensors": shard.tensors, "plain": shard.plain} if shard.tensors else {})
    if traits_of(strategy.sync).delivers == "replica":
        coded = lifecycle.state_of_codec(worker).cloned()
        return whole | ({"tensors": coded.tensors, "plain": coded.plain} if coded.tensors else {})
    state = lifecycle.state(worker)
    params, buffers = present
    state.tensors["params"] = params
    if worker.buffers is not None:
        state.tensors["buffers"] = buffers
    copied = state.cloned()
    whole |= {"tensors": copied.tensors, "plain": copied.plain}
    return whole | {"kind": type(optimizer).__name__, "optimizer": _copied(optimizer.state_dict())}


@dataclass(frozen=True, slots=True)
class RankState:
    """A state that fits a rank; `restore` sets the rank to it."""

    saved: Mapping[str, Any]
    of_shard: bool = False

    @property
    def clock(self) -> int:
        return int(self.saved["clock"])

    def restore(self, worker: WorkerState, optimizer: torch.optim.Optimizer) -> None:
        """Set the worker of a method that does not run, and the user's optimizer, to this state.

        Raises `UsageError` where a part of it is missing or has another size.
        """
        try:
            self._restore(worker, optimizer)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UsageError(
                f"this state is not whole ({type(error).__name__}: {error}). Load what replica.state_dict() gave, "
                "unchanged, and for an optimizer with the same parameter groups."
            ) from error

    def _restore(self, worker: WorkerState, optimizer: torch.optim.Optimizer) -> None:
        state = State(dict(self.saved.get("tensors", {})), dict(self.saved.get("plain", {})))
        if "optimizer" in self.saved:
            lifecycle.restore(worker, state)
            optimizer.load_state_dict(self.saved["optimizer"])
            return
        worker.clock = worker.given = self.clock
        if state.tensors and self.of_shard:
            worker.optimizer.restore(state)
        elif state.tensors:
            lifecycle.restore_codec(worker, state.to(worker.params.device))


def checked(
    state: Mapping[str, Any],
    strategy: Strategy,
    place: RankEnvironment,
    worker: WorkerState,
    replica: Replica,
    optimizer: torch.optim.Optimizer,
) -> RankState:
    """The state, if it fits. Raises `UsageError` if it is none, or of another strategy, model, optimizer or rank."""
    _check_kept_at_ranks(strategy, worker)
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise UsageError(
            f"load_state_dict needs what replica.state_dict() of this version of dure gave, and got {_told(state)}. "
            "The states of the model and of the optimizer are loaded by these."
        )
    mine = {"strategy": str(strategy), "model": model_text(replica)}
    form: dict[str, type] = FORM
    if traits_of(strategy.sync).delivers != "replica" and state.get("strategy") == mine["strategy"]:
        form = FORM | FORM_OF_REPLICA
        mine["kind"] = type(optimizer).__name__
    missing = [name for name, kind in form.items() if not isinstance(state.get(name), kind)]
    if missing:
        raise UsageError(
            f"this state has no {' and no '.join(missing)}, or a value of another type there. Load what "
            "replica.state_dict() gave, unchanged."
        )
    of_shard = zero_of(strategy.partition) is not None
    _check_fits(state, place, mine, "a part of the optimizer's state" if of_shard else "a replica of its own")
    return RankState(state, of_shard)


def _check_fits(state: Mapping[str, Any], place: RankEnvironment, mine: dict[str, Any], held: str) -> None:
    if "tensors" in state:
        mine["rank"] = place.rank
    if "tensors" in state and state["world_size"] != place.world_size:
        raise UsageError(
            f"this state is of a training with {state['world_size']} ranks, and {place.world_size} are attached: each "
            f"has {held}. Start {state['world_size']} ranks, or load the model alone and leave the state."
        )
    for name, value in mine.items():
        if state[name] != value:
            raise UsageError(
                f"this state is of a rank with {_NAMED.get(name, name)} {state[name]}, and this rank has {value}. Load "
                "what replica.state_dict() gave at this rank, under this strategy, and for this model and optimizer."
            )


_NAMED = {"model": "a model of the layers", "kind": "the optimizer"}


def is_kept_at_ranks(strategy: Strategy, worker: WorkerState) -> bool:
    """Whether each rank has what it needs to go on between two steps."""
    at_servers_or_under_way = worker.over_servers or worker.sessions.peer is not None
    return not at_servers_or_under_way and traits_of(strategy.sync).delivers in ("replica", "mean")


def _check_kept_at_ranks(strategy: Strategy, worker: WorkerState) -> None:
    sync = member_text("sync", strategy.sync)
    if worker.over_servers:
        raise UsageError(
            f"{sync} over servers has its state at the servers, which a loop cannot save. Save the model inside "
            "`with replica.evaluation():`; a training that begins with it starts the optimizer's state anew."
        )
    if worker.sessions.peer is not None:
        raise UsageError(
            f"{sync} has averagings under way between two steps, which no state of a rank can hold. Save the model "
            "inside `with replica.evaluation():`."
        )
    if traits_of(strategy.sync).delivers not in ("replica", "mean"):
        raise UsageError(
            f"{sync} over collectives moves its center before the gradient of a step, so its state between two steps "
            "is not one to go on from. Save the model inside `with replica.evaluation():`."
        )


def _told(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"an object of type {type(state).__name__}"
    if "format" in state:
        return f"a state of format {state['format']}, where {FORMAT} is right"
    return f"a dictionary with {', '.join(map(repr, [*state][:3])) or 'nothing'}"


def _copied(value: Any) -> Any:
    """A copy that shares no tensor with the original."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value
