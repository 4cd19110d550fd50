"""Methods whose update needs the gradients of a quorum: K-sync, K-batch-sync, K-async, K-batch-async, backup workers.

Dutta, Joshi, Ghosh, Dube, Nagpurkar, "Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in
Distributed SGD", AISTATS 2018;
Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, algorithms 3 and 4 (backup).

    for j = 0, 1, 2, ...                              at the server, with P workers
        K-sync:         wait until K workers have finished a mini-batch at w_j
        K-batch-sync:   wait until K mini-batches at w_j are finished, several by one worker if it is fast
        K-async:        wait until K workers have pushed a gradient; those K wait for the update
        K-batch-async:  wait until K gradients have been pushed; a worker goes on at the newest w after each push
        backup:         K-sync with K = N, of N + b workers
        w_j+1  <- w_j - (lr / K) sum of the K gradients
        sync, backup:   the other workers stop what they compute, and start over at w_j+1
        async:          the other workers go on with what they compute, at the older w that they have

| in the papers              | here                                                                             |
|----------------------------|----------------------------------------------------------------------------------|
| K of P                     | `k`; all but one live worker in twenty (or but one) if left out                  |
| N of N + b                 | `backups`, b; N is what they leave of the live workers                           |
| w - (lr / K) sum           | the job's optimizer on the mean of the K                                         |
| stop and start over;       | abort by the clock; on processes, refusal: a process finishes the gradient, which |
| a late gradient is dropped | is refused before its bytes are sent                                             |
| tag t of a gradient        | the version that it was computed on                                              |
| staleness, in updates      | sync: 0. Async: unbounded; by K-batch-async (P - 1) / K on average               |
| samples from the whole set | `sampling`: slow workers are left out, so nobody owns a part of the data         |

With exponential times of mean 1 an update takes H_P - H_(P-K) by K-sync, K / P by K-batch-sync.

``k-sync:k=P``, ``k-async:k=P`` and ``backups=0`` are BSP; k-batch-sync with K = P is not, unless all are equally fast.
``k-async:k=1`` is asynchronous SGD. K-batch-async is the n-softsync of Zhang, Gupta, Lian, Liu (2016) with K = P / n;
their rate by staleness is ``+staleness-lr``.

The async methods drop no gradient: those of a slow worker come late, and count. The server does not wait for a failed
worker. If fewer than K workers are left, an update of K-sync and K-async takes the gradients of all of them;
K-batch-sync takes several of each; the last group of K-batch-async may be smaller than K. In backup, a failed or
paused worker takes the place of one backup until it is evicted; then N is one smaller. A newcomer begins at the newest
version.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from dure.core.catalogue import parameter
from dure.sync.base import Messages, Reasons, ServerRule, Traits
from dure.topology.parameter_server.admission import most
from dure.topology.parameter_server.policies import AnyOf, FirstOf

if TYPE_CHECKING:
    import torch

    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker


def _k(meaning: str, unit: str) -> Any:
    """The parameter K of Dutta et al."""
    return parameter(None, meaning, range=">= 1", unit=unit, symbol="K")


@dataclass(frozen=True, slots=True)
class _Quorum:
    """The part that the methods of Dutta et al. share: `k`, and its check, whose error ends with `advice`."""

    paper: ClassVar[str] = (
        "Dutta, Joshi, Ghosh, Dube and Nagpurkar, Slow and Stale Gradients Can Win the Race, AISTATS 2018"
    )
    advice: ClassVar[str]

    k: int | None = None

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 1:
            counts = fields(self)[0].metadata["unit"]
            raise ValueError(f"k counts {counts} and must be >= 1, got {self.k}. {self.advice}")

    def quorum(self, workers: int) -> int:
        """K, the gradients of an update, with `workers` live ones."""
        return most(workers) if self.k is None else self.k


@dataclass(frozen=True, slots=True)
class _OfWorkers(_Quorum):
    """K counts workers, each once in an update, so a run needs as many."""

    traits: ClassVar[Traits]

    k: int | None = _k("workers whose gradients make an update; none: all less one in twenty (at least one)", "workers")

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        return replace(self.traits, fewest=self.k or 1)


@dataclass(frozen=True, slots=True)
class KSync(_OfWorkers):
    """Synchronous SGD on the gradients of the first `k` workers; the other workers start over."""

    advice: ClassVar[str] = "Use as many as there are for BSP."

    traits: ClassVar[Traits] = Traits(
        needs=("servers",),
        reasons=Reasons(
            topology="it goes on without the slowest workers",
            collective="a collective needs all of them",
            stages="it leaves gradients out, and each stage would leave out others",
        ),
        messages=Messages(over=("servers",)),
        lockstep=True,
        sampling="whole",
        keeps={},
    )

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, FirstOf(self.quorum, distinct=True), quorum=self.quorum)

    async def work(self, worker: Worker) -> None:
        while True:
            worker.state.set_clock(await worker.server.next_version(lend=True))
            await _push_in_time(worker)


@dataclass(frozen=True, slots=True)
class KBatchSync(_Quorum):
    """Synchronous SGD on the first `k` mini-batches of any workers; workers with unfinished ones start over."""

    advice: ClassVar[str] = "Use 1 for the first that comes."

    k: int | None = _k(
        "mini-batches that make an update; none: all workers less one in twenty (at least one)", "mini-batches"
    )

    traits: ClassVar[Traits] = Traits(
        needs=("servers",),
        reasons=Reasons(
            topology="a fast worker gives several gradients to an update",
            collective="a collective takes one of each",
            stages="it leaves gradients out, and each stage would leave out others",
        ),
        messages=Messages(over=("servers",)),
        sampling="whole",
        keeps={},
    )

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, FirstOf(self.quorum, distinct=False), quorum=self.quorum)

    async def work(self, worker: Worker) -> None:
        while True:
            await worker.server.next_version(lend=True)
            await _push_in_time(worker)


@dataclass(frozen=True, slots=True)
class KAsync(_OfWorkers):
    """Asynchronous SGD on the gradients of any `k` workers, of any staleness; those `k` workers wait for the update."""

    advice: ClassVar[str] = "Use 1 for asynchronous SGD."

    traits: ClassVar[Traits] = Traits(
        needs=("servers",),
        reasons=Reasons(
            topology="its workers are at different versions",
            collective="a collective needs all of them at the same one",
            stages="its servers group the gradients that come first, and each stage would form other groups",
        ),
        messages=Messages(over=("servers",)),
        stale_gradients=True,
        sampling="whole",
        keeps={},
    )

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, AnyOf(self.quorum, distinct=True), quorum=self.quorum)

    async def work(self, worker: Worker) -> None:
        await _push_all(worker)


@dataclass(frozen=True, slots=True)
class KBatchAsync(_Quorum):
    """Asynchronous SGD on any `k` gradients, of any staleness; no worker waits."""

    advice: ClassVar[str] = "Use 1 for asynchronous SGD."

    k: int | None = _k(
        "mini-batches that make an update; none: all workers less one in twenty (at least one)", "mini-batches"
    )

    traits: ClassVar[Traits] = Traits(
        needs=("servers",),
        reasons=Reasons(
            topology="its workers push at different times",
            collective="a collective needs all of them at once",
            stages="its servers group the gradients that come first, and each stage would form other groups",
        ),
        messages=Messages(over=("servers",)),
        stale_gradients=True,
        sampling="whole",
        keeps={},
    )

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, AnyOf(self.quorum, distinct=False), quorum=self.quorum)

    async def work(self, worker: Worker) -> None:
        await _push_all(worker)


@dataclass(frozen=True, slots=True)
class Backup:
    """Synchronous SGD that drops the gradients of the `backups` slowest workers in every step."""

    paper: ClassVar[str] = "Chen, Pan, Monga, Bengio and Jozefowicz, Revisiting Distributed Synchronous SGD, 2016"

    backups: int | None = parameter(
        None,
        "slowest workers for which a step does not wait; none: one in twenty, at least one",
        range=">= 0",
        unit="workers",
        symbol="b",
    )

    traits: ClassVar[Traits] = Traits(
        needs=("servers",),
        reasons=Reasons(
            topology="it goes on without the slowest workers",
            collective="a collective needs all of them",
            stages="it leaves out the last gradients, and each stage would leave out others",
        ),
        messages=Messages(over=("servers",), votes=True),
        lockstep=True,
        sampling="whole",
        keeps={},
    )

    def __post_init__(self) -> None:
        if self.backups is not None and self.backups < 0:
            raise ValueError(f"backups counts workers and must be >= 0, got {self.backups}. Use 0 to wait for all.")

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        return replace(self.traits, fewest=(self.backups or 0) + 1)

    def quorum(self, workers: int) -> int:
        """N, the gradients of an update, with `workers` live ones."""
        return most(workers) if self.backups is None else max(1, workers - self.backups)

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, FirstOf(self.quorum, distinct=True), quorum=self.quorum)

    async def work(self, worker: Worker) -> None:
        while True:
            worker.state.set_clock(await worker.server.next_version(lend=True))
            await _push_in_time(worker)


async def _push_all(worker: Worker) -> None:
    """Push every gradient, and go on once the servers let this worker start its next step."""
    await worker.server.next_version(lend=True)
    while True:
        await worker.server.push_pull(await worker.gradient())


async def _push_in_time(worker: Worker) -> None:
    """Push the next gradient, unless the clock closes its version first."""
    gradient = await _gradient_unless_aborted(worker)
    if gradient is not None:
        await worker.server.push(gradient)


async def _gradient_unless_aborted(worker: Worker) -> torch.Tensor | None:
    """Compute a gradient as `Worker.gradient` does; None if the clock closes the version that it is computed on.

    The mini-batch then counts as a step. A process cannot stop a gradient: it finishes the gradient, and its push
    is refused.
    """
    state = worker.state
    await state.boundary.stop(state)
    started = state.node.now()
    computing = state.source.gradient(state)
    if state.source.can_stop and await worker.server.aborted(computing):
        state.meter.add("compute", started, state.node.now(), "aborted")
        # An abort is a step without an update: otherwise a worker that is always late would never end its work.
        state.clock += 1
        state.given += 1
        if state.on_abort is not None:
            state.on_abort(state)
        return None
    gradient = await computing
    state.meter.add("compute", started, state.node.now())
    return state.finish_step(gradient)
