"""The lifetime of an attached training: it runs, then it has ended, in order or by an error.

| state   | left by                       | a call then                                                        |
|---------|-------------------------------|--------------------------------------------------------------------|
| running | `end`, or an error (`fail`)   | has its effect                                                     |
| ended   | `Attached.close`              | does nothing                                                       |
| closed  |                               | raises `UsageError`                                                |
| failed  |                               | raises the first error again                                       |

At the end, in order or not, all connections are closed, so that no other rank waits for this one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dure.core.log import log
from dure.errors import DureError, PeerLost, UsageError

if TYPE_CHECKING:
    from dure.runtime.launch.monitor import RankMonitor
    from dure.runtime.launch.rendezvous import Rendezvous
    from dure.runtime.process.node import ProcessNode
    from dure.sync.worker_state import WorkerState
    from dure.user_loop.optimizer import UserOptimizer
    from dure.user_loop.peers import LoopCollectives
    from dure.user_loop.servers import LoopServers


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
        ties: LoopCollectives | LoopServers,
        monitor: RankMonitor,
    ) -> None:
        self.ended = False
        self.closed = False
        self.error: BaseException | None = None
        self.inside = ""
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

    def remind(self, owner: object) -> None:
        """Have a warning logged if `owner` is dropped, or the process ends, while the training runs."""
        if self._reminder is None:
            self._reminder = weakref.finalize(owner, _warn_of_no_close, self._worker.rank)

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
        reason = _reason(self._rendezvous) if isinstance(error, PeerLost) and reachable else None
        self.error = error if reason is None else PeerLost(f"{reason}. {error}")
        if reachable:
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


def raised() -> bool:
    """Whether an uncaught exception ends the interpreter: its traceback says enough, and no warning is needed."""
    return getattr(sys, "last_value", None) is not None


def _warn_of_no_close(rank: int) -> None:
    """Log that close() is missing, unless an uncaught exception ends the interpreter."""
    if not raised():
        log.warning(
            "rank %d ended its training without replica.close(): the ranks' models may differ, and what the method "
            "delivers was not loaded. Write `with dure.attach(...) as replica:`, or call replica.close() at the end.",
            rank,
        )
