"""The process of a companion, such as an actor or a replay, in a real run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dure.errors import CallTimeout, DamagedFrame, DureError, PeerLost, RemoteError
from dure.run import checkpoint
from dure.run.process import FAILURE_TEXT, Control, FaultSettings, RunProcess
from dure.run.snapshots import DRIVER_ADDRESS
from dure.run.virtual_companions import part_of

if TYPE_CHECKING:
    from dure.job.companions import Companion
    from dure.run.checkpoint import Parts
    from dure.run.setup import Setup
    from dure.runtime.process.node import ProcessNode

REPORT_SECONDS = 0.25
"""Period of the reports to the driver."""


class CompanionProcess(RunProcess):
    """Builds the companion of `node`, lets it work until the end of the run, and reports its figures."""

    def __init__(self, setup: Setup, node: ProcessNode, _: FaultSettings) -> None:
        super().__init__(setup, node)
        self.companion: Companion

    async def live(self, where: tuple[str, int], parts: Parts) -> None:
        assert self.setup.job.companions is not None
        node = self.node
        node.serve("process", Control(bye=self._end, meet=self._meet, save=self._save, report=self._report))
        await self.register(where)
        start = parts["run"].plain["checkpoint"] if parts else 0
        self.companion = self.setup.job.companions.companion(self.setup.shape(start), node)
        part = parts.get(part_of(node.name))
        if self.companion.saves and part is not None:
            with checkpoint.fitting(part_of(node.name)):
                self.companion.restore(part)
        go = await node.call(DRIVER_ADDRESS, "ready")
        node.begin(go.fields["seconds"])
        self.companion.count_on(go.fields["figures"])
        node.spawn(self._work(), "its work")
        node.spawn(self._report_often(), "its reports")
        await self.bye

    async def _work(self) -> None:
        """Work; an error of dure, or the refusal of a call, ends the run."""
        try:
            await self.companion.work()
        except (PeerLost, CallTimeout):
            return  # the run ends, or the node that it works with has failed
        except DamagedFrame:
            raise  # the process ends, and is started again
        except DureError as error:
            kind, message = type(error).__name__, str(error)[:FAILURE_TEXT]
            await self.node.call(DRIVER_ADDRESS, "failed", kind=kind, message=message, refused=0)
            raise SystemExit(1) from error

    def _end(self) -> None:
        self.delivered = True
        self.bye.resolve()

    async def _report(self) -> None:
        await self.node.call(DRIVER_ADDRESS, "figures", figures=self.companion.figures())

    async def _report_often(self) -> None:
        with suppress(RemoteError):
            while True:
                await self._report()
                await self.node.sleep(REPORT_SECONDS)

    def _save(self, draft: str) -> None:
        checkpoint.write_part(Path(draft), part_of(self.node.name), self.companion.state())
