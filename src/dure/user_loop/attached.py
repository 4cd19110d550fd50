"""A training loop that the user owns, with a method of `sync/` in it.

    replica = dure.attach(model, optimizer, sync="ssp:bound=3")
    for x, y in loader:
        loss_fn(model(x), y).backward()
        replica.step()                      # in place of optimizer.step() and zero_grad()

Alone, or at every rank that `torchrun` starts. The method is the same coroutine as in `dure.train`: it stands at `await
worker.gradient()`, and `step()` resumes it with the gradient that `backward()` left, until it asks for the next.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import weakref
from collections.abc import Coroutine, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from dure.codec.fp32 import Float32
from dure.core.finite import all_finite
from dure.core.node import EndOfWork
from dure.errors import DureError, PeerLost, Quarantined, UsageError
from dure.job.replica import Replica
from dure.run.strategy import Strategy, make, member_text, name_of
from dure.runtime.launch.monitor import RankMonitor
from dure.runtime.launch.rendezvous import RankEnvironment, Rendezvous, place
from dure.runtime.launch.shared_key import credentials_of
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity
from dure.sync.base import traits_of
from dure.sync.refusals import MOST_REFUSED
from dure.sync.worker import Boundary, Worker
from dure.topology.base import topology_of
from dure.user_loop.optimizer import UserOptimizer, check_free, check_step
from dure.user_loop.peers import LoopCollectives
from dure.user_loop.sampler import EpochSampler, share_of
from dure.user_loop.servers import LoopServers, name_of_run
from dure.user_loop.source import LoopSource
from dure.user_loop.wrapped import check_unwrapped

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from dure.codec.base import Codec
    from dure.runtime.wire.credentials import Integrity
    from dure.sync.base import Sync
    from dure.topology.collective.choice import Collective
    from dure.topology.parameter_server.choice import ParameterServer

T = TypeVar("T")

log = logging.getLogger("dure")


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sync: Sync | str | None = None,
    topology: Collective | ParameterServer | str | None = None,
    codec: Codec | str | None = None,
    batch_size: int = 1,
    frozen_after: float = 30.0,
    key_file: str | Path | None = None,
    integrity: Integrity = "mac",
) -> Attached:
    """Have `model` trained by a loop of one's own, together with all ranks that were started with this one.

    Every rank calls this in the same place, with the same model and optimizer; all start from rank 0's values. `sync`,
    `topology` and `codec` are those of a `Strategy`. `batch_size` is this rank's weight in means, where ranks differ.
    A parameter that got no gradient in a step counts as one whose gradient is zero: unlike in plain PyTorch, momentum,
    moments and weight decay go on for it. A rank or a server that shows no sign of life for `frozen_after` seconds ends
    the training of all ranks that wait.

    The ranks and their servers admit only processes that have the key of the run: the content of `key_file`, 32 random
    bytes or more in a file of mode 0600; without it rank 0 draws one and hands it out through the store where the ranks
    meet. Tensors between machines have an authentication code, or with `integrity="checksum"` a checksum alone.

    Raises:
        UsageError: the strategy makes no sense, servers cannot do what the optimizer does, the model is attached
            already, a wrapper such as DistributedDataParallel synchronizes it, or others may read the key file.
        ReplicaError: the model cannot be laid out flat.
        PeerLost: another rank has failed before all were there.
    """
    coded = make(codec, "codec") if isinstance(codec, str) else codec or Float32()
    if not isinstance(coded, Float32):
        raise UsageError(
            "dure.attach sends float32. In a loop of your own codecs go with DistributedDataParallel: "
            f'model.register_comm_hook(None, dure.hook("{member_text("codec", coded)}")).'
        )
    strategy = Strategy.of(sync, topology)
    _check_strategy(strategy)
    _check_numbers(batch_size, frozen_after)
    check_unwrapped(model)
    check_free(model, optimizer)
    check_step(optimizer)
    _check_values(model)
    replica = Replica(model)
    rendezvous = Rendezvous(place() or RankEnvironment(), "attach")
    with ExitStack() as undo:
        undo.push(partial(_tell_if_failed, rendezvous))
        mine = UserOptimizer(optimizer, replica)
        undo.callback(mine.close)
        run, sizes = _introduce(rendezvous, strategy, replica, batch_size)
        credentials = credentials_of(rendezvous, None if key_file is None else Path(key_file), integrity)
        node = ProcessNode(Identity(run, f"worker {rendezvous.place.rank}", rendezvous.place.rank), credentials)
        undo.callback(node.wire.close)
        monitor = RankMonitor(rendezvous, frozen_after)
        undo.callback(monitor.close)
        node.loop.check = monitor.check
        worker = _worker(node, replica, mine, sizes)
        ties: LoopCollectives | LoopServers
        if topology_of(strategy.topology).clocked:
            ties = LoopServers(node, rendezvous, replica, strategy, mine, credentials)
        else:
            ties = LoopCollectives(node, rendezvous, replica, strategy)
        undo.pop_all()
    return Attached(strategy, rendezvous, replica, mine, worker, ties, monitor)


def _check_strategy(strategy: Strategy) -> None:
    because = traits_of(strategy.sync).no_loop
    if because:
        raise UsageError(f"{member_text('sync', strategy.sync)} does not run in a loop of one's own: {because}.")
    because = topology_of(strategy.topology).no_loop
    if because:
        raise UsageError(
            f"{name_of('topology', strategy.topology)} does not run in a loop of one's own: {because}. "
            'Write topology="collective" or "ps".'
        )


def _check_numbers(batch_size: int, frozen_after: float) -> None:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size is this rank's weight, a whole number of at least 1; got {batch_size!r}.")
    if not frozen_after > 0:
        raise UsageError(f"frozen_after is a number of seconds above 0, got {frozen_after!r}. Leave it out for 30.")


def _check_values(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"{name!r} is on the meta device, which holds no values: call model.to_empty(device=...), "
                "initialize the model or load its state, then attach."
            )


def _introduce(rendezvous: Rendezvous, strategy: Strategy, replica: Replica, batch_size: int) -> tuple[str, list[int]]:
    """The name of the run, and everybody's batch sizes. Raises `UsageError` if ranks want different things."""
    layers = [[layer.name, list(layer.shape)] for layer in replica.layers]
    constants = [[name, list(each.shape), str(each.dtype)] for name, each in replica.constants.items()]
    model = {
        "parameters": replica.numel,
        "dtype": str(replica.dtype),
        "buffers": replica.buffers_flat().numel(),
        "constants": sum(each.numel() for each in replica.constants.values()),
        "layers": hashlib.sha256(repr([layers, constants]).encode()).hexdigest()[:16],
    }
    mine = {"run": name_of_run(), "strategy": str(strategy), "model": model, "batch_size": batch_size}
    everybody = rendezvous.exchange("about", mine)
    for what in ("strategy", "model"):
        for rank, theirs in enumerate(everybody):
            if theirs[what] != everybody[0][what]:
                raise UsageError(
                    f"all ranks must attach the same {what}: rank 0 has {everybody[0][what]}, rank {rank} "
                    f"{theirs[what]}."
                )
    return everybody[0]["run"], [theirs["batch_size"] for theirs in everybody]


def _worker(node: ProcessNode, replica: Replica, optimizer: UserOptimizer, sizes: Sequence[int]) -> Worker:
    buffers = replica.buffers_flat()

    def merge(snapshots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Weighted by batch size, unless some ranks are gone."""
        return replica.merge_buffers(snapshots, sizes if len(snapshots) == len(sizes) else None)

    return Worker(
        node=node,
        rank=node.rank,
        world_size=len(sizes),
        params=replica.params,
        optimizer=optimizer,
        source=LoopSource(node, replica, sizes[node.rank]),
        meter=node.meter,
        boundary=Boundary(None),
        total_weight=float(sum(sizes)),
        buffers=buffers if buffers.numel() else None,
        merge_buffers=merge,
    )


def _tell(rendezvous: Rendezvous, error: BaseException) -> None:
    """Leave word of `error` for the others, if they can still be reached."""
    with suppress(RuntimeError):
        if rendezvous.failure() is None:
            rendezvous.fail(f"{type(error).__name__}: {error}")


def _tell_if_failed(
    rendezvous: Rendezvous, kind: type[BaseException] | None, error: BaseException | None, _: object
) -> None:
    if error is not None:
        _tell(rendezvous, error)


def _reason(rendezvous: Rendezvous) -> str | None:
    """What somebody has said of its failure, if the store can still be reached."""
    with suppress(RuntimeError):
        return rendezvous.failure()
    return None


def _warn_of_no_close(rank: int) -> None:
    """Log that close() is missing, unless an uncaught exception ends the interpreter: its traceback says enough."""
    if getattr(sys, "last_value", None) is None:
        log.warning(
            "rank %d ended its training without replica.close(): the ranks' models may differ, and what the method "
            "delivers was not loaded. Write `with dure.attach(...) as replica:`, or call replica.close() at the end.",
            rank,
        )


class Attached:
    """A model that trains as one of several replicas; made by `dure.attach`. A context manager.

    Leaving it, or `close()`, ends the training: the method may still meet the others, and the model is what the
    method delivers. After an error every call raises that error again. A warning is logged where the process ends, or
    the object is dropped, after a step and without `close()`.
    """

    def __init__(
        self,
        strategy: Strategy,
        rendezvous: Rendezvous,
        replica: Replica,
        optimizer: UserOptimizer,
        worker: Worker,
        ties: LoopCollectives | LoopServers,
        monitor: RankMonitor,
    ) -> None:
        self.strategy = strategy
        self.ended = False
        self._meeting = rendezvous
        self._replica = replica
        self._optimizer = optimizer
        self._worker = worker
        self._ties = ties
        self._monitor = monitor
        monitor.servers = ties.processes
        self._refused = 0
        self._node: ProcessNode = worker.node  # type: ignore[assignment]
        self._source: LoopSource = worker.source  # type: ignore[assignment]
        self._error: BaseException | None = None
        self._closed = False
        self._inside = ""
        self._reminder: weakref.finalize[..., Attached] | None = None
        with self._guarded():
            self._run(ties.begin(worker, self._source, self._fail))
            self._role = self._node.spawn(self._work(), self._node.name)
            self._go()

    # ---- who this is

    @property
    def rank(self) -> int:
        return self._worker.rank

    @property
    def world_size(self) -> int:
        return self._worker.world_size

    @property
    def clock(self) -> int:
        """Steps that this rank has taken."""
        return self._worker.clock

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer: its `param_groups` decide the rates, so schedulers and gradient scalers work on it."""
        return self._optimizer.optimizer

    def sampler(self, dataset: Sized, *, split: str = "iid", seed: int = 0, targets: Any = None) -> EpochSampler:
        """This rank's share of `dataset`, for `DataLoader(dataset, sampler=...)`; each pass is a new order.

        `split` is a text as in `dure.job.data.split`; "dirichlet" needs `targets` (those of `dataset` if left out).
        """
        return share_of(dataset, self.rank, self.world_size, split=split, seed=seed, targets=targets)

    # ---- steps

    def step(self, scaler: GradScaler | None = None) -> bool:
        """Go on with the gradients that `backward()` left, and zero them. Whether the training goes on.

        Give the `scaler` where losses are scaled: gradients are unscaled, and a step where they overflowed is skipped,
        as by `skip`. Without a scaler, a gradient that holds NaN or infinity skips the step too, and the third in a row
        raises `Quarantined`; under BSP over collectives it is the mean that counts, at all ranks alike.

        False: some rank has no more work and all have ended at the same step (over collectives). Further steps do
        nothing.

        Raises `ReplicaError` (parameters moved), `PeerLost` (a rank or a server is gone), what the method raises.
        """
        if not self._may("step"):
            return False
        with self._guarded():
            self._replica.check()
            if not self._ties.intend("step"):
                self._finish()
                return False
            skipping = self._refuses() if scaler is None else not self._unscaled(scaler)
            self._advance(skipping=skipping)
            return True

    def skip(self) -> bool:
        """A step without a gradient: the clock advances, and what this rank gives to the others is zero.

        The local optimizer does not step; only where others have given something to the mean (BSP over collectives) it
        steps as theirs do. Servers that step by the optimizer's rule count a zero in a mean with others, and do not
        step where nobody gave more: momentum, moments and weight decay stay as they are. As `step`, False once the
        training has ended.

        Under BSP over collectives `backward()` exchanges the gradient. After it, skip at every rank or at none:
        a step that some ranks take makes the replicas differ, and is a `UsageError` at every rank in the next step
        or `close()`.
        """
        if not self._may("skip"):
            return False
        with self._guarded():
            self._replica.check()
            meets = self._source.exchanges and not self._source.is_exchanged
            self._replica.zero_grad()
            if not self._ties.intend("skip"):
                self._finish()
                return False
            self._advance(skipping=not meets or self._source.all_skip)
            return True

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let backwards inside add to the gradient of the next step, as PyTorch does, and exchange nothing yet."""
        self._may("accumulate")
        if self._source.is_exchanged:
            raise UsageError(
                "accumulate() comes before the last backward of a step, and this step's gradient has been exchanged. "
                "Call replica.step() first."
            )
        self._inside = "accumulate"
        self._source.hold()
        try:
            yield
        finally:
            self._inside = ""
            self._source.release()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, the model has the parameters that the method would deliver now: the servers', or the mean.

        Over collectives all ranks enter it after the same step where the method delivers a mean. Buffers are this
        rank's own.
        """
        if not self._may("evaluation"):
            yield
            return
        replica = self._replica
        with self._guarded():
            replica.check()
            delivered = self._run(self._ties.delivered(self._worker))
        kept = replica.params.clone()
        replica.load(delivered)
        self._inside = "evaluation"
        try:
            yield
        finally:
            self._inside = ""
            replica.load(kept)

    # ---- the end

    def close(self) -> None:
        """End this rank's training, and wait for what the method still has to do: the model is then its result.

        Over servers this waits until all ranks have closed.
        """
        if self._closed:
            return
        if self._may("close"):
            with self._guarded():
                while self._ties.intend("end"):
                    self._advance(skipping=False)  # a gradient that has been exchanged, and was not stepped with
                self._finish()
        self._closed = True
        self._optimizer.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._error is None and not self._closed:
            self._fail(error)

    # ---- beneath

    async def _work(self) -> None:
        try:
            await self.strategy.sync.work(self._worker)
        except EndOfWork:
            pass
        finally:
            self._source.asked.resolve()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._node.loop.run_until(self._node.spawn(coroutine, self._node.name))

    def _go(self) -> None:
        """Let the method go on until it asks for a gradient, or ends."""
        self._node.loop.run_until(self._source.asked)

    def _advance(self, *, skipping: bool) -> None:
        if self._reminder is None:
            self._reminder = weakref.finalize(self, _warn_of_no_close, self.rank)
        if skipping:
            self._replica.zero_grad()
            self._source.leave_out()
        self._optimizer.begin_step(pausing=skipping)
        rates = self._worker.lr = self._ties.rates()
        self._worker.pausing = skipping and rates is not None  # where servers step by the user's rule
        self._source.give()
        self._go()
        self._optimizer.end_step()
        self._replica.zero_grad()

    def _finish(self) -> None:
        """Throw `EndOfWork` into the method; when it is through, the model is what it delivers."""
        self._source.end()
        self._go()
        if not self._role.done:
            raise DureError(f"{member_text('sync', self.strategy.sync)} asked for a gradient after the end of work.")
        self._replica.load(self._run(self._ties.finish(self._worker)))
        self._load_buffers()
        self.ended = True
        self._forget()
        self._node.wire.close()
        self._ties.close()
        self._monitor.close()

    def _load_buffers(self) -> None:
        if self._worker.buffers is not None:
            self._replica.load_buffers(self._worker.buffers)

    def _unscaled(self, scaler: GradScaler) -> bool:
        """Unscale the gradients, unless the user has; whether they are finite."""
        try:
            scaler.unscale_(self.optimizer)
        except RuntimeError as error:
            if "already" not in str(error):
                raise
        return bool(torch.isfinite(self._replica.grads.sum()) or torch.isfinite(self._replica.grads).all())

    def _refuses(self) -> bool:
        """Whether the gradients hold NaN or infinity. Raises `Quarantined` where they have done so in a row."""
        exchange = self._source.exchange if self._source.wants_mean else None
        refused = not all_finite(self._replica.grads)
        self._refused = self._refused + 1 if refused else 0
        if exchange is not None:
            exchange.examines = refused
        if self._refused >= MOST_REFUSED:
            ranks = [self.rank] if exchange is None else self._run(exchange.faulty_ranks())
            whose = ", ".join(f"rank {rank}" for rank in ranks) or "a rank"
            raise Quarantined(
                f"the gradients of {whose} hold NaN or infinity in {self._refused} steps in a row, the last of them "
                f"step {self.clock}. Try a lower learning rate, and look at the data of these steps."
            )
        if refused:
            log.warning("the gradient of step %d at rank %d holds NaN or infinity: skipped.", self.clock, self.rank)
        return refused

    def _forget(self) -> None:
        """Cancel the warning of a missing close: the training has ended, in order or by an error."""
        if self._reminder is not None:
            self._reminder.detach()

    def _may(self, what: str) -> bool:
        """Whether there is anything to do for `what`. Raises the first error again, or what stands against it."""
        if self._error is not None:
            raise self._error
        if self._inside:
            raise UsageError(f"{what}() was called inside `with replica.{self._inside}():`. Call it after that block.")
        if self._closed:
            raise UsageError(f"{what}() was called after close(): the training has ended. Attach the model again.")
        if self.ended:  # a loop that goes on changes nothing
            self._replica.zero_grad()
            self._load_buffers()
        return not self.ended

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Remember the first error, and let nobody wait for this rank any more."""
        try:
            yield
        except BaseException as error:
            told = self._fail(error)
            if told is error:
                raise
            raise told from error

    def _fail(self, error: BaseException) -> BaseException:
        """Let go of everything because of `error`; that error, with what is known of its cause."""
        if self._error is not None:
            return self._error
        reachable = self._monitor.reachable
        reason = _reason(self._meeting) if isinstance(error, PeerLost) and reachable else None
        self._error = error if reason is None else PeerLost(f"{reason}. {error}")
        self._forget()
        if reachable:
            _tell(self._meeting, error)
        self._optimizer.close()
        if self._worker.over_servers:
            with suppress(DureError):
                leaving = self._node.spawn(self._worker.server.leave(finished=False), "leaving")
                self._node.loop.run_until(self._node.first(leaving, timeout=LEAVE_SECONDS))
        self._node.wire.close()
        self._ties.close(failed=True)
        self._monitor.close()
        return self._error


LEAVE_SECONDS = 2.0
"""How long a rank that fails tries to tell the servers."""
