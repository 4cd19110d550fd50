"""The entry point of each process of a real run, and the process of a companion, such as an actor or a replay."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dure.core.deployment import SERVER, WORKER
from dure.core.node import nothing
from dure.core.user_code import record, recorded
from dure.errors import CallTimeout, DamagedFrame, DureError, PeerLost, RemoteError
from dure.job.gradient_engine import GradientEngine
from dure.run import checkpoint
from dure.run.devices import CPU, kind_of
from dure.run.process import FAILURE_TEXT, Control, FaultSettings, RunProcess, ServerProcess, WorkerProcess
from dure.run.snapshots import DRIVER_ADDRESS
from dure.run.virtual_companions import part_of
from dure.runtime.heartbeat import Heartbeat, put
from dure.runtime.launch.monitor import HeartbeatCaller
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity, WireLimits
from dure.runtime.wire.reactor import is_loopback, retry_soon

if TYPE_CHECKING:
    from dure.job.companions import Companion
    from dure.run.checkpoint import Parts
    from dure.run.setup import Setup


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


PROCESSES: Mapping[str, Callable[..., RunProcess]] = {WORKER: WorkerProcess, SERVER: ServerProcess}
"""The processes of nodes by their kind; those of all other kinds are `CompanionProcess`."""


@dataclass(frozen=True)
class LaunchSpec:
    """The start values of a process: its `name` in `run`, the address of the `driver`, a checkpoint to `resume`.

    `credentials` are the run's, as plain values. They come through a pipe: no argument or environment variable has
    them. `heartbeat` is a result of `LivenessMonitor.admit`: the way of heartbeats, the number of this
    incarnation, and the seconds of a period. The way is an inherited pipe, or the address of rank 0's monitor. A
    process without it sends no heartbeats.
    """

    name: str
    run: str
    incarnation: int
    driver: Sequence[Any]
    credentials: Mapping[str, Any] = field(repr=False)
    fault_settings: FaultSettings = FaultSettings()  # noqa: RUF009
    interface: str = "127.0.0.1"
    resume: str | None = None
    heartbeat: Sequence[Any] = ()

    @classmethod
    def of(cls, *, fault_settings: Mapping[str, Any], **plain: Any) -> LaunchSpec:
        """Make a launch specification of values that JSON has."""
        return cls(fault_settings=FaultSettings(**fault_settings), **plain)


def main(setup: Setup, spec: LaunchSpec, check: Callable[[], None] = nothing) -> None:
    """Entry point of the process of a node.

    On an error the process exits without closing its connections; peers treat that as a crash. `check` is called at
    least once a second during a wait; it raises an error that ends this process.
    """
    torch.set_num_threads(1)
    kind, rank = spec.name.split()
    identity = Identity(spec.run, spec.name, int(rank), spec.incarnation)
    config = setup.config
    gradient_engine: GradientEngine | None = None
    if kind == "worker":
        setup = setup.for_worker(int(rank))
        take(setup.device)
        if setup.stages is None:  # a stage computes its gradients itself
            # One worker per process: its gradients are computed one at a time.
            gradient_engine = GradientEngine(setup.job, exact=True, device=setup.device, seed=config.seeded)
            setup.configure(gradient_engine)
        else:
            setup.stages.keep(int(rank) % setup.parts)
    credentials = Credentials.of(spec.credentials)
    node = ProcessNode(
        identity,
        credentials,
        seed=config.seeded,
        trace=config.trace,
        gradient_engine=gradient_engine,
        device=setup.device if kind == "worker" else "cpu",
        limits=WireLimits(silent_seconds=config.frozen_after),
    )
    node.loop.check = check
    node.directory["driver"] = (str(spec.driver[0]), int(spec.driver[1]))
    port = node.wire.listen(spec.interface)
    process = PROCESSES.get(kind, CompanionProcess)(setup, node, spec.fault_settings)
    folder = config.out if config.out is not None else config.resume
    node.on_error = partial(record, folder, spec.name)
    with recorded(folder, spec.name), ExitStack() as stack:
        if spec.heartbeat:
            _beat(stack, spec, credentials, config.frozen_after, lambda: (process.steps, node.loop.waiting))
        parts = checkpoint.load(Path(spec.resume)).parts if spec.resume is not None else {}
        node.loop.run_until(node.spawn(process.live((spec.interface, port), parts), spec.name))
        node.wire.close()
        node.loop.end()


def _beat(
    stack: ExitStack,
    spec: LaunchSpec,
    credentials: Credentials,
    frozen_after: float,
    state: Callable[[], tuple[int, bool]],
) -> None:
    """Send heartbeats until `stack` closes."""
    way, number, period = spec.heartbeat
    send: Callable[[int, bool], None]
    if isinstance(way, int):
        send = partial(put, way, number)
    else:
        caller = HeartbeatCaller(spec.name, way, credentials)
        stack.callback(caller.wire.close, 0.1)
        send = lambda clock, waiting: caller.send("beat", period / 2, number=number, clock=clock, waiting=waiting)  # noqa: E731
    crosses_network = not is_loopback(spec.interface)

    def beat(clock: int, waiting: bool) -> None:
        if crosses_network:
            retry_soon(frozen_after)  # the engine makes connections at any time
        send(clock, waiting)

    stack.callback(Heartbeat(beat, state, period).stop)


def take(device: str) -> None:
    """Make `device` the current device of this process.

    A process that is forked after a gradient was computed or a device was used can do neither, on a machine with an
    accelerator. This raises `DureError` then: the job has done so in its file or in `model()`.
    """
    if torch.accelerator.current_accelerator() is None:
        if device != CPU:  # another process has chosen it, for a machine that it has not seen
            raise DureError(
                f"PyTorch {torch.__version__} finds no accelerator on {socket.gethostname()}, and this worker "
                f"was given {device}. Install PyTorch for {kind_of(device)} there, or write --device {CPU}."
            )
        return
    try:
        torch.autograd.backward(torch.ones((), requires_grad=True))
        if device != CPU:
            torch.accelerator.set_device_index(device)
            torch.empty(0, device=device)
    except RuntimeError as error:
        raise DureError(
            f"this worker cannot compute on {device}: {str(error).splitlines()[0].rstrip('.')}. A job must not compute "
            "gradients or use a device before its workers are forked, in its file or in model(): do it in another "
            "program that saves the result."
        ) from error
