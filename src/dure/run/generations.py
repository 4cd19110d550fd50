"""The generations of a group that is formed again: the driver decides when one is over, and which ranks the next has.

| state    | left when                                             | then the driver                                   |
|----------|-------------------------------------------------------|---------------------------------------------------|
| running  | a member has failed or stopped, or a newcomer waits   | sends `break_up` to the members                   |
| stopping | every living member has stopped                       | answers all that have stopped: the next generation|
| forming  | all have formed it; after a failure: back to stopping | waits                                             |
| over     | every member has come to the end of its work          | lets all deliver their models                     |

An all-reduce ends at a member only with the parts of all, so members that stop differ by at most one step, or one
round of steps between two averages. If they differ, or one is new, the most advanced of the lowest rank is the *source*
of the model for the others. If that one fails before they have it, they make its step again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.core.deployment import NodeId, by_rank
from dure.core.node import Address, Reply
from dure.core.protocol import COUNT, TEXT, TRUTH, WORKERS, nullable, remote
from dure.core.text import log
from dure.errors import DureError, PeerLost
from dure.run.roster import DriverService

if TYPE_CHECKING:
    from dure.core.node import Call, Operation
    from dure.run.checkpoint_schedule import CheckpointSchedule
    from dure.run.roster import Commands, ProcessRoster
    from dure.runtime.process.node import ProcessNode

GENERATIONS = Address("driver", "generations")

MOST_IN_VAIN = 3
"""Generations in a row that may end without a step, a failure or a newcomer before the run ends."""

LOST = "every worker that had the model has failed. Resume from the last checkpoint, if one was written."

TOO_LATE = "the others had finished before it could join"


class Stopped(NamedTuple):
    """A worker that waits for the next generation; one that is `fresh` does not have the model.

    The models of all workers were equal after `steps`. It has made more until its `clock` where they train alone.
    """

    steps: int
    clock: int
    fresh: bool
    answer: Operation[Reply]


def gradients_in(generations: Sequence[Mapping[str, Any]], step: int) -> int:
    """The number of gradients in the model after `step` of a run with these `generations`."""
    found = 0
    for each in reversed(generations):  # a later generation may begin before the end of an earlier one
        if each["step"] < step:
            found += len(each["ranks"]) * (step - each["step"])
            found -= sum(min(step, each["clock"]) - each["step"] for _ in each["copies"])
            step = each["step"]
    return found


class Generations(DriverService):
    """The generation that runs, and the workers that wait for the next one.

    `history` has the ranks of each generation, and the step after which it began. `copies` are those that begin with a
    copy of the source's state at its `clock`: they have made no steps of their own until then.
    """

    called = "the generations"

    def __init__(
        self, node: ProcessNode, roster: ProcessRoster, commands: Commands, checkpoints: CheckpointSchedule
    ) -> None:
        super().__init__(roster)
        self.history: list[dict[str, Any]] = []
        self.over = False
        self._node = node
        self._commands = commands
        self._checkpoints = checkpoints
        self._number = -1
        self._members = set(roster.workers)  # of the run's start: a generation that is stopping
        self._is_stopping = True
        self._must_stop = False
        self._formed: set[str] = set()
        self._stopped: dict[str, Stopped] = {}
        self._through: dict[str, Operation[Reply]] = {}
        self._reason = ""
        self._in_vain = 0
        self._error: DureError | None = None

    def runs(self) -> bool:
        """Whether all members have formed the present generation, and none has stopped."""
        return not self._is_stopping and self._formed >= self._living

    @property
    def _living(self) -> set[str]:
        return self._members & self.roster.living()

    # ---- the members

    @remote(WORKERS, steps=COUNT, clock=COUNT, fresh=TRUTH, reason=nullable(TEXT))
    async def stopped(self, call: Call) -> Reply:
        """Note that a worker has stopped, or is new, and wait for the next generation."""
        answer: Operation[Reply] = self._node.promise("the next generation")
        steps, clock, fresh = (call.fields[name] for name in ("steps", "clock", "fresh"))
        self._stopped[call.caller] = Stopped(steps, clock, fresh, answer)
        if call.caller in self._members:
            self._must_stop = True
            self._reason = call.fields["reason"] or self._reason
        elif self.over:
            self.roster.evicted[call.caller] = TOO_LATE
        self.look()
        return await answer

    @remote(WORKERS, generation=COUNT)
    def formed(self, call: Call) -> Reply:
        """Note that a worker has formed a generation, and has the model."""
        if call.fields["generation"] == self._number and not self._is_stopping:
            self._formed.add(call.caller)
            self.look()
        return Reply()

    @remote(WORKERS)
    async def through(self, call: Call) -> Reply:
        """Note that a worker has come to the end of its work, and wait for the others.

        It stays a member until all have: one that is a step behind needs it.
        """
        if self._is_stopping:
            return Reply({"over": False})
        answer: Operation[Reply] = self._node.promise("the end of the others' work")
        self._through[call.caller] = answer
        self.look()
        return await answer

    def gradients(self, step: int) -> int:
        """The number of gradients in the model after `step`."""
        return gradients_in(self.history, step)

    def lost(self, name: str) -> None:
        """Note that a worker has failed."""
        if name in self._members:
            self._members.discard(name)
            self._must_stop = True
            self._in_vain = 0
        for noted in (self._stopped, self._through):
            noted.pop(name, None)
        self.look()

    # ---- the decisions

    def look(self) -> None:
        """Break up the present generation, and form the next one, where that is due."""
        living = self._living
        if self.over or self._checkpoints.is_writing:  # then all have stopped at one step, and no collective waits
            return
        newcomers = self._stopped.keys() - self._members
        if not self._is_stopping:
            if self._must_stop or (newcomers and self.runs()):
                self._break_up(living)
            elif living and living <= self._through.keys():
                self._end()
        if self._is_stopping and living <= self._stopped.keys() and self._stopped:
            self._form()

    def check(self) -> None:
        """Raise `DureError` if the group cannot be formed again."""
        if self._error is not None:
            raise self._error

    def _break_up(self, living: set[str]) -> None:
        self._is_stopping = True
        self._answer(self._through, over=False)
        self._checkpoints.interrupt()
        for name in by_rank(living - self._stopped.keys()):
            self._commands.break_up(name, self._number)

    def _form(self) -> None:
        entering = {name: self._stopped[name] for name in by_rank(self._stopped.keys() & self.roster.living())}
        holding = {name: (each.steps, each.clock) for name, each in entering.items() if not each.fresh}
        if not holding:
            self._error = self._error or DureError(LOST)
            return
        furthest = steps, clock = max(holding.values())
        ranks = {name: NodeId.of(name).rank for name in entering}
        copies = [ranks[name] for name in entering if holding.get(name) != furthest]
        source = next(rank for name, rank in ranks.items() if holding.get(name) == furthest) if copies else None
        self._check_progress(steps, list(ranks.values()))
        begun = steps if self.history else 0  # a checkpoint of a run without generations has no history of them
        generation = {"step": begun, "clock": clock, "ranks": list(ranks.values()), "copies": copies}
        self.history.append(generation | {"seconds": self._node.now()})
        self._number += 1
        self._members, self._formed, self._stopped = set(entering), set(), {}
        self._is_stopping = self._must_stop = False
        fields = {"generation": self._number, "ranks": generation["ranks"], "source": source}
        for each in entering.values():
            each.answer.resolve(Reply(fields))

    def _check_progress(self, steps: int, ranks: Sequence[int]) -> None:
        """Log new members. Members that keep stopping with no failure or step end the run."""
        last = self.history[-1] if self.history else None
        if last is not None and last["ranks"] == ranks and last["step"] == steps:
            self._in_vain += 1
        else:
            self._in_vain = 0
        if self._in_vain > MOST_IN_VAIN:
            self._error = self._error or PeerLost(self._reason)
        if last is not None and last["ranks"] != ranks:
            named = ", ".join(map(str, ranks))
            log.warning("the group goes on from step %d with %d workers: %s.", steps, len(ranks), named)

    def _end(self) -> None:
        self.over = True
        for name in self.roster.living() - self._members:
            self.roster.evicted[name] = TOO_LATE
        self._answer(self._through, over=True)

    def _answer(self, waiting: dict[str, Operation[Reply]], *, over: bool) -> None:
        for answer in waiting.values():
            answer.resolve(Reply({"over": over}))
        waiting.clear()
