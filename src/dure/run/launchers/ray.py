"""A real run on the machines of Ray: one actor for each node of the deployment.

    driver (this process)                         Ray
      reserve: a bundle for each place      ───>    the machine of each bundle
      an actor for each node                ───>    RayHost: a fork server, and the process of the node
      load, start, signal, look             ───>      (`runtime.launch.ray_host`)
      the wire: tensors, registration, ...  <──>    the process of the node

Ray chooses machines, starts actors and reports their end. Tensors, checkpoints, restarts and the failures of processes
are those of any real run: the driver is that of `run.driver`.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.deployment import Deployment
from dure.core.packages import import_extra
from dure.core.text import log, sentence
from dure.errors import DureError
from dure.run.launchers.local import train_on
from dure.run.outcome import Outcome
from dure.run.places import address_of
from dure.runtime.heartbeat import BeatPipe, put
from dure.runtime.launch import relay
from dure.runtime.launch.interruption import Interruption
from dure.runtime.launch.ray_cluster import check_hosts, connected
from dure.runtime.launch.ray_host import RayHost

if TYPE_CHECKING:
    from dure.report.run import Run
    from dure.run.config import TrainConfig
    from dure.run.prebuilt import Callbacks, Prebuilt
    from dure.run.setup import Setup

PLACE_SECONDS = 600.0
"""Time limit for Ray to reserve the bundles and start the actors. Ray may have to start machines for them."""

NOTICE_SECONDS = 10.0
"""Seconds of that time after which the wait is logged."""

CLOSE_SECONDS = 10.0
"""Time limit for the processes to end."""

KILLED = -signal.SIGKILL
"""Status of a process whose actor has ended: its fork server kills it."""

SHARE = 0.001
"""Processors that Ray reserves for a node by default: a bundle cannot be empty."""


def after_restart(config: TrainConfig) -> TrainConfig:
    """The configuration as it is: nothing restarts a run of this launcher from outside."""
    return config


def run_real(
    config: TrainConfig, prebuilt: Prebuilt, run_here: Callable[[TrainConfig, Callable[..., Outcome]], Run]
) -> Run:
    """Lead the run from this process, and have Ray start all others."""
    ray = import_extra("ray", f"--on {config.on}", "ray", "ray.util.placement_group", "ray.util.scheduling_strategies")
    return run_here(config, partial(_run, ray[0], prebuilt.interruption))


def _run(
    ray: Any, interruption: Interruption, setup: Setup, callbacks: Callbacks, resume: Path | None, folder: Path | None
) -> Outcome:
    setup.prepare()  # raises its errors before Ray starts
    with ExitStack() as stack:
        stack.enter_context(connected(ray, address_of(setup.config.on)))
        launcher = RayLauncher(ray, setup.deployment)
        stack.callback(launcher.close)
        launcher.meet(interruption)
        check_hosts(ray, launcher.places, insecure=setup.config.insecure)
        setup = replace(setup, machines=launcher.machines(setup.workers))
        setup.topology.check()
        return train_on(
            launcher, setup, callbacks, resume, folder, interruption=interruption, interface=launcher.interface
        )


class _Host:
    """An actor: its handle, the call that waits in it, and the state of the process that it has started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.handle: Any = None
        self.place: Mapping[str, Any] = {}
        self.number = -1
        self.pid: int | None = None
        self.calls: list[Any] = []
        self.looking: Any = None


class RayLauncher:
    """A launcher whose processes run in actors of Ray, one for each node of `deployment`.

    The actors of nodes beside each other are in one bundle, and so on one machine.
    """

    def __init__(self, ray: Any, deployment: Deployment) -> None:
        self.beats = BeatPipe()
        self.exited: dict[str, int] = {}
        self._ray = ray
        self._setup: dict[str, Any] = {}
        self._last_lines: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._bundles = deployment.places()
        sizes = Counter(self._bundles.values())
        bundles = [{"CPU": SHARE * sizes[bundle]} for bundle in sorted(sizes)]
        self._group = ray.util.placement_group(bundles, strategy="SPREAD")
        self._hosts = {name: _Host(name) for name in self._bundles}
        self._here = ray.get_runtime_context().get_node_id()

    # ---- the start

    def meet(self, interruption: Interruption) -> None:
        """Wait until Ray has reserved the bundles, and each actor has told its place."""
        self._wait(interruption, [self._group.ready()], "room for the run's processes")
        for host in self._hosts.values():
            self._create(host)
        calls = [host.handle.where.remote() for host in self._hosts.values()]
        self._wait(interruption, calls, "the actors of the run's processes")
        for host, place in zip(self._hosts.values(), self._ray.get(calls), strict=True):
            host.place = place

    def _wait(self, interruption: Interruption, calls: list[Any], what: str) -> None:
        """Wait for the results of `calls`. Raises `DureError` if Ray does not bring them in time."""

        def done() -> bool:
            return len(self._ray.wait(calls, num_returns=len(calls), timeout=0)[0]) == len(calls)

        if interruption.until(done, NOTICE_SECONDS):
            return
        log.warning("waiting for Ray: %s.", what)
        if not interruption.until(done, PLACE_SECONDS - NOTICE_SECONDS):
            raise DureError(f"Ray did not bring {what} within {PLACE_SECONDS:g} s. See ray status for what it lacks.")

    def _create(self, host: _Host) -> None:
        """Have Ray start the actor of a node, in the node's bundle."""
        bundle = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, self._bundles[host.name]
        )
        made = self._ray.remote(
            num_cpus=SHARE,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"look": 1},
            scheduling_strategy=bundle,
        )(RayHost)
        host.handle = made.remote(os.getcwd())
        host.looking = None
        host.calls = []

    @property
    def places(self) -> list[Mapping[str, Any]]:
        """The place of each actor."""
        return [host.place for host in self._hosts.values()]

    def machines(self, workers: int) -> tuple[int, ...]:
        """The machine of each worker, in numbers from 0."""
        nodes = [self._hosts[f"worker {rank}"].place["node"] for rank in range(workers)]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        return tuple(numbers[node] for node in nodes)

    @property
    def interface(self) -> str | None:
        """The address at which processes reach this one; None if all are on this machine."""
        if all(host.place["node"] == self._here for host in self._hosts.values()):
            return None
        return str(self._ray.util.get_node_ip_address())

    # ---- the protocol of launchers

    @property
    def processes(self) -> Mapping[str, int]:
        """Process ids of the running processes that are on this machine."""
        running = [host for host in self._hosts.values() if host.pid is not None and host.name not in self.exited]
        return {host.name: host.pid for host in running if host.pid is not None and host.place["node"] == self._here}

    def load(self, setup: Mapping[str, Any]) -> None:
        """Load a run in all actors."""
        self._setup = dict(setup)
        self.exited.clear()
        for host in self._hosts.values():
            self._call(host, "load", self._setup)

    def start(self, name: str, **arguments: Any) -> None:
        """Start a process in its actor, or in a new one if that has ended."""
        host = self._hosts[name]
        if host.handle is None:
            self._create(host)
            self._call(host, "load", self._setup)
        self.exited.pop(name, None)
        host.number += 1
        host.pid = None
        _, self._numbers[name], _ = arguments["heartbeat"]
        self._call(host, "start", host.number, name, arguments, loopback=self.interface is None)

    def room(self) -> int:
        """None yet: an elastic run grows by `dure scale` alone."""
        return 0

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process, on whatever machine it is."""
        host = self._hosts[name]
        if host.handle is not None and name not in self.exited:
            self._call(host, "signal", number)

    def clear(self) -> None:
        """End all processes of the run; the actors stay ready."""
        for host in self._hosts.values():
            host.number += 1  # what is reported of the earlier ones does not count
            if host.handle is not None:
                self._call(host, "clear")

    def look(self) -> None:
        """Take the news of all actors that have some, and ask again."""
        for host in self._hosts.values():
            if host.handle is not None:
                self._look_at(host)

    def last_line(self, name: str) -> str:
        return self._last_lines.get(name, "")

    def close(self) -> None:
        """End all processes and actors, and write the rest of their output."""
        alive = [host for host in self._hosts.values() if host.handle is not None]
        calls = [host.handle.close.remote() for host in alive]
        if calls:
            done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=CLOSE_SECONDS)
            for call in done:
                with suppress(Exception):
                    _show(self._ray.get(call))
        for host in alive:
            self._ray.kill(host.handle)
        self._ray.util.remove_placement_group(self._group)
        self.beats.close()

    def _call(self, host: _Host, method: str, *arguments: Any, **named: Any) -> None:
        host.calls.append(getattr(host.handle, method).remote(*arguments, **named))

    def _look_at(self, host: _Host) -> None:
        if host.looking is None:
            host.looking = host.handle.look.options(concurrency_group="look").remote()
        waiting = [*host.calls, host.looking]
        done, host.calls = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        if host.looking in host.calls:
            host.calls.remove(host.looking)
        try:
            results = {call: self._ray.get(call) for call in done}
        except self._ray.exceptions.RayActorError as error:
            self._lost(host, f"its Ray actor has ended: {str(error).splitlines()[0]}")
            return
        if host.looking in results:
            news, host.looking = results[host.looking], None
            self._take(host, news)

    def _take(self, host: _Host, news: Mapping[str, Any]) -> None:
        _show(news["output"])
        if not news["usable"]:
            self._lost(host, news["last_line"], news["status"])
        if news["number"] != host.number:
            return
        host.pid, host.place = news["pid"], news["place"]
        for clock, waiting in news["beats"]:
            put(self.beats.sink, self._numbers[host.name], clock, waiting)
        if news["status"] is not None:
            self._last_lines[host.name] = news["last_line"]
            self.exited[host.name] = news["status"]

    def _lost(self, host: _Host, reason: str, status: int = KILLED) -> None:
        """Note that an actor has ended, and its process with it. An actor that Ray cannot reach is ended."""
        self._ray.kill(host.handle)
        host.handle, host.looking, host.calls = None, None, []
        if host.number >= 0:
            self._last_lines[host.name] = sentence(reason)
            self.exited[host.name] = status


def _show(output: bytes) -> None:
    """Write lines of the processes to standard error; they begin with the name of the process."""
    if output:
        relay.write_all(relay.STDERR, output)
