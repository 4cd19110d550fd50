"""A model that a user's own loop trains as one of several replicas: its steps, its evaluation and its end.

The method is the same coroutine as in `dure.train`. It waits at `await worker.gradient()`. `step()` resumes it with the
gradient that `backward()` left, until it asks for the next one.

| state of the training | left by                       | a call then                  |
|-----------------------|-------------------------------|------------------------------|
| running               | `end`, or an error (`fail`)   | has its effect               |
| ended                 | `Attached.close`              | does nothing                 |
| closed                |                               | raises `UsageError`          |
| failed                |                               | raises the first error again |

At the end, in order or not, all connections are closed, so that no other rank waits for this one (`Lifetime`).
"""

from __future__ import annotations

import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dure.core.node import EndOfWork, Suspend
from dure.core.text import log
from dure.core.vectors import all_finite
from dure.errors import DureError, PeerLost, ReplicaError, UsageError
from dure.partition.mesh import zero_of
from dure.run.strategy import member_text
from dure.sync.base import traits_of
from dure.sync.worker import Worker
from dure.sync.worker_state import WorkerState
from dure.user_loop import saved
from dure.user_loop.checks import GradientCheck, ModelCheck, check_unwrapped, raised, sums_of_runs
from dure.user_loop.optimizer import RoutedOptimizer
from dure.user_loop.shards import ShardedExchange, check_unscaled
from dure.user_loop.source import REMEDY, EpochSampler, share_of

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from dure.core.node import Task
    from dure.job.replica import Replica
    from dure.run.strategy import Strategy
    from dure.runtime.launch.monitor import RankMonitor
    from dure.runtime.launch.rendezvous import Rendezvous
    from dure.runtime.process.node import ProcessNode
    from dure.sync.base import Sync
    from dure.user_loop.gossip import LoopGossip
    from dure.user_loop.optimizer import UserOptimizer
    from dure.user_loop.peers import LoopCollectives
    from dure.user_loop.servers import LoopServers
    from dure.user_loop.source import LoopSource

    Ties = LoopCollectives | LoopServers | LoopGossip
    """The connections of a rank to the others, by topology."""


T = TypeVar("T")


class Attached:
    """A model that trains as one of several replicas; made by `dure.attach`. A context manager.

    The end of the block, or `close()`, ends the training: the method synchronizes a last time where it has to, and the
    model becomes the one that the method delivers. After an error every call raises that error again. If the process
    ends, or the object is deleted, after a step and without `close()`, a warning is logged.
    """

    def __init__(
        self,
        strategy: Strategy,
        rendezvous: Rendezvous,
        replica: Replica,
        optimizer: UserOptimizer,
        worker: WorkerState,
        ties: Ties,
        monitor: RankMonitor,
        buffers: str = "mean",
    ) -> None:
        self.strategy = strategy
        self._place = rendezvous.place
        self._replica = replica
        self._optimizer = optimizer
        self._worker = worker
        self._ties = ties
        monitor.servers = ties.processes
        self._node: ProcessNode = worker.node  # type: ignore[assignment]
        self._source: LoopSource = worker.source  # type: ignore[assignment]
        self._role = Role(strategy.sync, worker, self._source)
        alike = not worker.over_servers and traits_of(strategy.sync).delivers == "replica"
        self._shares_buffers = buffers == "rank0" and worker.buffers is not None and alike
        self._aside: tuple[torch.Tensor, torch.Tensor] | None = None
        self._gathers = False  # a backward inside accumulate() belongs to the next step
        self.routed_optimizer = RoutedOptimizer(optimizer.optimizer, self._step, self.zero_grad)
        """An optimizer whose `step()` is `step` of this object, for a trainer that steps by itself. Schedulers keep the
        user's optimizer. A gradient scaler may step it: `scaler.step(routed_optimizer)`."""
        self._is_sharded = zero_of(strategy.partition) is not None
        self._check = GradientCheck(self._node, replica, (optimizer.optimizer, self.routed_optimizer))
        self._model_check = ModelCheck(replica, ties.undone_at)
        self._lifetime = lifetime = Lifetime(rendezvous, optimizer, worker, ties, monitor)
        with lifetime.guarded():
            self._role.run(ties.begin(worker, self._source, lifetime.fail))
            self._role.begin()
            self._model_check.note()

    # ---- the rank

    @property
    def ended(self) -> bool:
        """Whether the training has ended in order: further steps do nothing."""
        return self._lifetime.ended

    @property
    def closed(self) -> bool:
        """Whether `close` has been called, or an error has ended the training."""
        return self._lifetime.closed or self._lifetime.error is not None

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def world_size(self) -> int:
        return self._place.world_size

    @property
    def clock(self) -> int:
        """Steps that this rank has taken."""
        return self._worker.clock

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors that this rank has sent to other ranks and to servers, counted as in the report of a run.

        PyTorch reports none of its collectives: they count with what a ring sends.
        """
        traffic = self._node.wire.traffic.values()
        return self._ties.bytes_sent + sum(each.payload_nbytes_sent for each in traffic)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer: its `param_groups` decide the rates, so schedulers and gradient scalers work on it."""
        return self._optimizer.optimizer

    def sampler(self, dataset: Sized, *, split: str = "iid", seed: int = 0, targets: Any = None) -> EpochSampler:
        """This rank's share of `dataset`, for `DataLoader(dataset, sampler=...)`; each pass is a new order.

        `split` is "iid" (disjoint equal parts), "dirichlet:alpha=0.1" (disjoint parts with unequal shares of the
        classes; a smaller alpha makes them less equal), "whole" (all samples, each rank in an order of its own) or
        "striped" (one order for all ranks, each its part of it). "dirichlet" needs `targets`, the class of each sample;
        left out, they are those of `dataset`.
        """
        return share_of(dataset, self.rank, self.world_size, split=split, seed=seed, targets=targets)

    # ---- steps

    def step(self, scaler: GradScaler | None = None) -> bool:
        """Step with the gradients that `backward()` left, and zero them; returns whether the training continues.

        If losses are scaled, give the `scaler`: gradients are unscaled, and a step with an overflow is skipped. Over
        collectives an overflow at one rank skips the step of all ranks, and lowers all scales. Without a scaler, a
        gradient with NaN or infinity skips the step; under BSP over collectives the mean is checked, so all ranks skip.

        Over collectives, False means that a rank has no more batches: all ranks have ended at the same step, and
        further steps do nothing.

        Raises:
            Quarantined: the third gradient in a row holds NaN or infinity.
            ReplicaError: the loop has replaced, added or frozen parameters.
            PeerLost: a rank or a server has failed.
        """
        return self._step(scaler, self.optimizer)

    def _step(self, scaler: GradScaler | None, stepped: torch.optim.Optimizer) -> bool:
        """`step`, which the loop calls as a step of `stepped`."""
        if not self._may("step"):
            return False
        with self._lifetime.guarded():
            if self._is_sharded and scaler is not None:
                check_unscaled(scaler)
                scaler = None
            if scaler is not None:
                self._check.begin(scaler, stepped)
            if not self._source.is_over:
                self._optimizer.missing.look(self.clock, exchanged=self._source.is_exchanged)
            self._examine("step")
            mine = self._is_faulty(scaler)
            if not self._ties.intend("overflow" if mine else "step"):
                self._finish()
                return False
            if scaler is None:
                overflowed = self._ties.overflowed
                elsewhere = overflowed and self._replica.is_part
                skipping = self._check.refuses(self._source, self.clock, elsewhere=elsewhere) or overflowed
            else:
                # A gradient that is exchanged during backward is the mean by now, which tells all ranks.
                known = None if self._source.exchanges else mine or self._ties.overflowed
                skipping = self._check.skips(scaler, known)
            self._advance(skipping=skipping or (self._replica.is_part and self._ties.skipped))
            return True

    def _is_faulty(self, scaler: GradScaler | None) -> bool:
        """Whether all ranks are to skip the step, since the gradient of this one overflowed, which they do not see.

        Without a scaler, a rank that has a whole replica decides for itself.
        """
        if scaler is not None:
            return not self._source.exchanges and self._check.overflowed(scaler)
        return self._replica.is_part and not all_finite(self._replica.grads)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Limit the norm of the next step's gradient to `max_norm`; returns the norm before, a tensor of one number.

        It clips what `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` would, which cannot be used with
        shards: there each rank has a part of the mean, and clips it by the norm of the whole. All ranks call it, after
        the last backward of the step.
        """
        if not self._may("clip_grad_norm_"):
            return torch.zeros(())
        exchange = self._source.exchanged
        with self._lifetime.guarded():
            if exchange is not None and not self._ties.intend("step"):  # for a rank without a backward
                return torch.zeros(())
            if isinstance(exchange, ShardedExchange):
                return exchange.clip(max_norm)
        return torch.nn.utils.clip_grad_norm_(self._replica.parameters, max_norm)

    def skip(self) -> bool:
        """Make a step without a gradient: the clock advances, and this rank contributes zero.

        The optimizer does not step: parameters, momentum, moments and weight decay stay as they are. If other ranks
        contribute to the same mean (BSP over collectives, servers that take the step), the step is taken with that
        mean, in which this rank counts as zero. As `step`, this returns False once the training has ended.

        Under BSP over collectives `backward()` exchanges the gradient. So call `skip` before `backward()`, or after it
        at every rank. If some ranks skip after `backward()` and others step, the replicas differ: the next step or
        `close()` raises `UsageError` at every rank.
        """
        if not self._may("skip"):
            return False
        with self._lifetime.guarded():
            self._examine("skip")
            meets = self._source.exchanges and not self._source.is_exchanged
            self.zero_grad()
            if not self._ties.intend("skip"):
                self._finish()
                return False
            self._advance(skipping=not meets or self._source.all_skip)
            return True

    def zero_grad(self) -> None:
        """Discard what `backward()` has left since the last step; the gradients keep their memory."""
        self._gathers = False
        self._replica.zero_grad()
        self._optimizer.missing.reset()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Have each backward() inside add to the gradient of the next step, as PyTorch does, without an exchange."""
        self._may("accumulate")
        if self._source.is_exchanged:
            if not self._replica.is_emptied():
                raise UsageError(
                    "accumulate() comes before the last backward of a step, and the gradient of "
                    f"{self._source.name} has been exchanged. Call replica.step() first. {REMEDY}"
                )
            self._source.replace()
        self._lifetime.inside = "accumulate"
        self._source.hold()
        try:
            yield
        finally:
            self._lifetime.inside = ""
            self._gathers = True
            self._source.release()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, the model has the parameters that the method would deliver now: the servers', or the mean.

        Where the method delivers a mean, all ranks enter it, over collectives after the same step, and the buffers are
        those that `close` would deliver. Elsewhere buffers are this rank's own. A block inside another has no effect.

        Raises `UsageError` at the end if parameters were changed inside: the replica goes on as before.
        """
        if self._lifetime.inside == "evaluation" or not self._may("evaluation"):
            yield
            return
        replica = self._replica
        with self._lifetime.guarded():
            self._examine("evaluation")
            _note_buffers(self._worker, self._replica)
            delivered = self._role.run(self._ties.delivered(self._worker))
        self._aside = params, buffers = replica.params.clone(), replica.buffers_flat()
        merged = delivered.buffers is not self._worker.buffers
        replica.load(delivered.params)
        if merged:
            _load_buffers(delivered, replica)
        self._lifetime.inside = "evaluation"
        try:
            yield
            replica.collect()
            changed = not torch.equal(sums_of_runs(replica.params), sums_of_runs(delivered.params))
        finally:
            self._lifetime.inside = ""
            self._aside = None
            replica.load(params)
            if merged:
                replica.load_buffers(buffers)
        if changed:
            raise UsageError(
                "parameters were changed in place inside `with replica.evaluation():`, whose end puts the model back. "
                "Change a copy there, as copy.deepcopy(model); a change that training continues from belongs after it."
            )

    # ---- its state

    @property
    def keeps_state(self) -> bool:
        """Whether this rank has a state to save: not over servers or gossip, nor with a center at the ranks."""
        return saved.is_kept_at_ranks(self.strategy, self._worker)

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's state; save it beside the model and the optimizer to resume exactly.

        Under methods whose replicas differ between two synchronizations, it holds the replica, its optimizer and the
        state of the method. Under `bsp`, where all ranks have one model and one optimizer, it holds the clock alone,
        with a codec also its error memory, with shards this rank's part of the optimizer's state. It holds tensors and
        plain values: `torch.save` writes it, and `torch.load` reads it with `weights_only=True`.

        Raises `UsageError` if `keeps_state` is False (servers have the state, or averagings are under way), and between
        `accumulate()` and `step()`.
        """
        if self._lifetime.inside != "evaluation":
            self._may("state_dict")
        self._gathers = self._gathers and not self._replica.is_emptied()
        if self._gathers:
            raise UsageError(
                "state_dict() was called between accumulate() and step(), and the gradients that add up there are in "
                "no state: a training that goes on from it would lose them. Save after replica.step()."
            )
        if self._aside is None:
            self._replica.collect()
        present = self._aside or (self._replica.params, self._replica.buffers_flat())
        return saved.state_dict(self.strategy, self._place, self._worker, self._replica, self.optimizer, present)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the rank whose `state_dict()` this is; all ranks call it between two steps, each with its own.

        Load the model and the optimizer before: under `bsp` they are not in it. Gradients are discarded.

        Raises `UsageError` for the state of another strategy, model, optimizer, rank or number of ranks, for one with
        missing parts, or if ranks load states of different steps.
        """
        if not self._may("load_state_dict"):
            return
        with self._lifetime.guarded():
            found = saved.checked(state, self.strategy, self._place, self._worker, self._replica, self.optimizer)
            self._lifetime.agree_on("the step of a loaded state", found.clock)
            self._source.discard()
            self.zero_grad()
            self._role.suspend()
            found.restore(self._worker, self.optimizer)
            self._role.begin()
            self._model_check.note()

    # ---- the end

    def failed(self, error: BaseException) -> BaseException:
        """End the training because of an error of the loop's own, so that no other rank waits; returns the first error.

        Leaving the `with` block by an exception does the same.
        """
        return error if self._lifetime.closed else self._lifetime.fail(error)

    def close(self) -> None:
        """End this rank's training, wait for the method's remaining work, and load its result into the model.

        Over servers this waits until all ranks have closed.
        """
        if self._lifetime.closed:
            return
        if self._may("close"):
            with self._lifetime.guarded():
                self._replica.collect()
                self._model_check.check("close")
                _note_buffers(self._worker, self._replica)
                self._source.discard()
                self._ties.intend("end")
                self._finish()
        self._lifetime.closed = True
        self._optimizer.close()
        self._replica.release()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.failed(error)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "an attached model has connections to the other ranks, so no copy of the replica can be made, and it "
            "cannot be pickled. Copy the model, or save what replica.state_dict() gives."
        )

    def _examine(self, call: str) -> None:
        """Raise an error if the user's code has moved or changed what is trained in a way that `call` would undo."""
        try:
            self._replica.check()
        except ReplicaError:
            # A wrapper that has moved the parameters says more.
            check_unwrapped(self._replica.module, allowed="fully_shard" if self._replica.is_part else "")
            raise
        self._optimizer.check()
        self._model_check.check(call)

    def _advance(self, *, skipping: bool) -> None:
        self._lifetime.remind(self)
        if skipping:
            self._replica.zero_grad()
            self._source.leave_out()
        unused = self._optimizer.missing.unused() if self._source.exchanged is None else self._source.exchanged.unused
        self._optimizer.begin_step(unused, pausing=skipping)
        rates = self._worker.lr = self._ties.rates()  # read before the method goes on: rates travel with this update
        # Where servers step by the user's rule. Ranks with shards all step, and gather, so that no rank waits.
        self._worker.pausing = skipping and rates is not None and self._worker.over_servers
        self._source.give()
        self._role.go()
        if self._shares_buffers:
            self._role.run(self._ties.share_buffers(self._worker))
        self._model_check.note()
        self._optimizer.end_step()
        self._replica.zero_grad()
        self._gathers = False

    def _finish(self) -> None:
        """Throw `EndOfWork` into the method. At its end, load the model that it delivers."""
        self._role.end()
        self._replica.load(self._role.run(self._ties.finish(self._worker)))
        _load_buffers(self._worker, self._replica)
        self._lifetime.end()

    def _may(self, what: str) -> bool:
        """Whether `what` has anything to do. Raises the first error again, or `UsageError` if it cannot be called."""
        self._lifetime.check(what)
        if self.ended:  # a loop that continues changes nothing
            self._replica.zero_grad()
            _load_buffers(self._worker, self._replica)
        return not self.ended


def _note_buffers(worker: WorkerState, replica: Replica) -> None:
    """Let buffers that the user's code has changed since the last step count at the end."""
    if worker.buffers is not None:
        worker.buffers = replica.buffers_flat()


def _load_buffers(worker: WorkerState, replica: Replica) -> None:
    if worker.buffers is not None:
        replica.load_buffers(worker.buffers)


class Role:
    """The coroutine of a method at this rank, which waits at `source` between two steps of the loop."""

    def __init__(self, sync: Sync, worker: WorkerState, source: LoopSource) -> None:
        self._sync = sync
        self._worker = worker
        self._source = source
        self._node: ProcessNode = worker.node  # type: ignore[assignment]
        self._task: Task[None] | None = None

    def begin(self) -> None:
        """Start the method, and run it until it asks for a gradient."""
        self._task = self._node.spawn(self._work(), self._node.name)
        self.go()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something else to its end."""
        return self._node.loop.run_until(self._node.spawn(coroutine, self._node.name))

    def go(self) -> None:
        """Run the method until it asks for a gradient, or ends."""
        self._node.loop.run_until(self._source.asked)

    def suspend(self) -> None:
        """End the method without its remaining work; `begin` starts it again."""
        assert self._task is not None
        self._task.throw(Suspend())
        self._source.forget()

    def end(self) -> None:
        """Throw `EndOfWork` into the method, and let it do its remaining work."""
        assert self._task is not None
        self._source.end()
        self.go()
        if not self._task.done:
            raise DureError(f"{member_text('sync', self._sync)} asked for a gradient after the end of work.")

    async def _work(self) -> None:
        try:
            await self._sync.work(Worker(self._worker))
        except (EndOfWork, Suspend):
            pass
        finally:
            self._source.asked.resolve()


LEAVE_SECONDS = 2.0
"""Time limit for a rank that fails to tell the servers."""


class Lifetime:
    """The state of one training, and the connections that end with it.

    `inside` names the `with` block of the training that is open now; it is empty outside.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        optimizer: UserOptimizer,
        worker: WorkerState,
        ties: Ties,
        monitor: RankMonitor,
    ) -> None:
        self.ended = False
        self.closed = False
        self.error: BaseException | None = None
        self.inside = ""
        self._agreed = 0
        self._rendezvous = rendezvous
        self._optimizer = optimizer
        self._worker = worker
        self._node: ProcessNode = worker.node  # type: ignore[assignment]
        self._ties = ties
        self._monitor = monitor
        self._reminder: weakref.finalize[..., Any] | None = None

    def check(self, what: str) -> None:
        """Raise the first error again, or `UsageError` if `what` cannot be called now."""
        if self.error is not None:
            raise self.error
        if self.inside:
            raise UsageError(f"{what}() was called inside `with replica.{self.inside}():`. Call it after that block.")
        if self.closed:
            raise UsageError(f"{what}() was called after close(): the training has ended. Attach the model again.")

    def agree_on(self, what: str, mine: Any) -> None:
        """Raise `UsageError` if another rank has another value; all ranks call this."""
        self._agreed += 1
        name = f"agreed {self._node.identity.job} {self._agreed}"
        for rank, theirs in enumerate(self._rendezvous.exchange(name, mine, self._monitor.check)):
            if theirs != mine:
                raise UsageError(f"{what} is {mine} at rank {self._node.rank}, and {theirs} at rank {rank}.")

    def remind(self, owner: object) -> None:
        """Have a warning logged if `owner` is dropped, or the process ends, while the training runs."""
        if self._reminder is None:
            self._reminder = weakref.finalize(owner, _warn_of_no_close, self._node.rank)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """End the training on an error inside."""
        try:
            yield
        except BaseException as error:
            told = self.fail(error)
            if told is error:
                raise
            raise told from error

    def end(self) -> None:
        """End the training in order."""
        self.ended = True
        self._release()

    def fail(self, error: BaseException) -> BaseException:
        """End the training because of `error`; returns the first error, with its cause as far as it is known."""
        if self.error is not None:
            return self.error
        reachable = self._monitor.reachable
        reason = _reason(self._rendezvous) if _is_of_others(error) and reachable else None
        self.error = error if reason is None else PeerLost(f"{reason}. {error}")
        if reachable:  # before connections close: a rank that loses one looks into the store for the cause
            report_failure(self._rendezvous, error)
        self._optimizer.close()
        if self._worker.over_servers:
            with suppress(DureError):
                leaving = self._node.spawn(self._worker.server.leave(finished=False), "leaving")
                self._node.loop.run_until(self._node.first(leaving, timeout=LEAVE_SECONDS))
        self._release(failed=True)
        return self.error

    def _release(self, *, failed: bool = False) -> None:
        """Cancel the warning of a missing close, and close all connections."""
        if self._reminder is not None:
            self._reminder.detach()
        # Connections first: a server exits once no connection to it is left, and `ties.close` waits for that.
        # The monitor last: this rank sends heartbeats, and sees failures of others, while it waits for its servers.
        self._node.wire.close()
        self._ties.close(failed=failed)
        self._monitor.close()


def report_failure(rendezvous: Rendezvous, error: BaseException) -> None:
    """Report `error` to the other ranks through the store, if it can still be reached and no failure is in it."""
    with suppress(RuntimeError):
        if rendezvous.failure() is None:
            rendezvous.fail(f"{type(error).__name__}: {error}")


def _reason(rendezvous: Rendezvous) -> str | None:
    """The failure that a rank has reported, if the store can still be reached."""
    with suppress(RuntimeError):
        return rendezvous.failure()
    return None


def _is_of_others(error: BaseException) -> bool:
    """Whether another rank is the cause: dure has lost it, or a collective of the loop's own has."""
    return isinstance(error, PeerLost) or (
        isinstance(error, RuntimeError) and "Connection closed by peer" in str(error)
    )


def _warn_of_no_close(rank: int) -> None:
    """Log that close() is missing, unless an uncaught exception ends the interpreter."""
    if not raised():
        log.warning(
            "rank %d ended its training without replica.close(): the ranks' models may differ, and what the method "
            "delivers was not loaded. Write `with dure.attach(...) as replica:`, or call replica.close() at the end.",
            rank,
        )
