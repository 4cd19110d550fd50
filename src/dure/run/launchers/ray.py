"""A real run on the machines of Ray: one actor for each node of the deployment.

    driver (this process)                         Ray
      reserve: a bundle for each place      ───>    the machine of each bundle
      an actor for each node                ───>    RayHost: a fork server, and the process of the node
      load, start, signal, look             ───>      (`runtime.launch.ray_host`)
      heartbeats                            <───    the process of the node
      the wire: tensors, registration, ...  <──>    the process of the node

Ray chooses machines, starts actors and reports their end. Tensors, checkpoints, restarts and the failures of processes
are those of any real run: the driver is that of `run.driver`.

| node                                | its room on a machine                                                        |
|-------------------------------------|------------------------------------------------------------------------------|
| of the start                        | a bundle of one placement group, with the nodes beside it, to the run's end  |
| worker that an elastic run may add  | an actor of its own, from its start until it leaves                          |
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.deployment import WORKER
from dure.core.packages import import_extra
from dure.core.text import log, sentence
from dure.errors import DureError
from dure.run.devices import CPU, notice
from dure.run.launchers.local import train_on
from dure.run.outcome import Outcome
from dure.run.places import address_of
from dure.run.reservation import Reservation, reservations
from dure.runtime.heartbeat import BeatPipe, Silence, put
from dure.runtime.launch import relay
from dure.runtime.launch.interruption import Interruption
from dure.runtime.launch.monitor import BeatReceiver
from dure.runtime.launch.ray_cluster import check_hosts, connected
from dure.runtime.launch.ray_host import RayHost
from dure.runtime.wire import Credentials

if TYPE_CHECKING:
    from dure.report.run import Run
    from dure.run.config import TrainConfig
    from dure.run.prebuilt import Callbacks, Prebuilt
    from dure.run.setup import Setup

PLACE_SECONDS = 600.0
"""Time limit for Ray to reserve the bundles and start the actors. Ray may have to start machines for them."""

NOTICE_SECONDS = 10.0
"""Seconds of that time after which the wait is logged."""

AGAIN_SECONDS = 90.0
"""Time in which a process gets another actor if its own ends first. Ray notices a silent machine after 67 s."""

CLOSE_SECONDS = 10.0
"""Time limit for the processes to end."""

KILLED = -signal.SIGKILL
"""Status of a process whose actor has ended: its fork server kills it."""

NEVER_CAME = 1
"""Status of a process whose actor Ray does not start: it is not started again."""


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
        launcher = RayLauncher(ray, setup)
        stack.callback(launcher.close)
        launcher.meet(interruption)
        check_hosts(ray, launcher.places, insecure=setup.config.insecure)
        setup = replace(setup, machines=launcher.machines(setup.workers))
        setup.topology.check()
        launcher.announce()
        return train_on(
            launcher, setup, callbacks, resume, folder, interruption=interruption, interface=launcher.interface
        )


class _Host:
    """An actor: its handle, the call that waits in it, and the state of the process that it has started.

    `bundle` is the number of its bundle; None for a worker that an elastic run may add. It is
    `up` once it has answered; `reached` is false after a call to which Ray could not find it. `starting` are the
    arguments of a process that it has not started yet.
    """

    def __init__(self, name: str, reserved: Reservation, bundle: int | None) -> None:
        self.name, self.reserved, self.bundle = name, reserved, bundle
        self.handle: Any = None
        self.up = False
        self.reached = True
        self.place: Mapping[str, Any] = {}
        self.number = -1
        self.pid: int | None = None
        self.starting: Mapping[str, Any] | None = None
        self.calls: list[Any] = []
        self.looking: Any = None


class RayLauncher:
    """A launcher whose processes run in actors of Ray, one for each node of the deployment of `setup`.

    The actors of nodes beside each other are in one bundle, and so on one machine. `interface` is the address at which
    processes reach this one; None if all are on this machine, and none can be added.
    """

    def __init__(self, ray: Any, setup: Setup) -> None:
        self.beats = BeatPipe()
        self.exited: dict[str, int] = {}
        self.interface: str | None = None
        self._ray = ray
        self._config = setup.config
        self._setup: dict[str, Any] = {}
        self._last_lines: dict[str, str] = {}
        self._receiver: BeatReceiver | None = None
        self._credentials: Mapping[str, Any] = {}
        self._coming = Silence()
        self._leaving: dict[Any, Any] = {}
        self._hosts = _hosts_of(setup)
        self._group = ray.util.placement_group(_bundles_of(self._hosts.values()), strategy="SPREAD")
        self._here = ray.get_runtime_context().get_node_id()

    # ---- the start

    def meet(self, interruption: Interruption) -> None:
        """Wait until Ray has reserved the bundles, and each actor of the start has told its place."""
        self._wait(interruption, [self._group.ready()], "room for the run's processes")
        first = [host for host in self._hosts.values() if host.bundle is not None]
        for host in first:
            self._create(host)
        calls = [host.handle.where.remote() for host in first]
        self._wait(interruption, calls, "the actors of the run's processes")
        for host, place in zip(first, self._ray.get(calls), strict=True):
            host.place, host.up = place, True
        all_here = all(host.up and host.place["node"] == self._here for host in self._hosts.values())
        self.interface = None if all_here else str(self._ray.util.get_node_ip_address())

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
        """Have Ray start the actor of a node, in the node's bundle if it has one."""
        in_bundle = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        made = self._ray.remote(
            num_cpus=host.reserved.cpus,
            num_gpus=host.reserved.gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"look": 1},
            scheduling_strategy="SPREAD" if host.bundle is None else in_bundle(self._group, host.bundle),
        )(RayHost)
        host.handle = made.remote(os.getcwd())
        host.up, host.reached, host.looking, host.calls = False, True, None, []

    @property
    def places(self) -> list[Mapping[str, Any]]:
        """The place of each actor that has come up."""
        return [host.place for host in self._hosts.values() if host.up]

    def machines(self, workers: int) -> tuple[int, ...]:
        """The machine of each worker, in numbers from 0; that of worker 0 for those that an elastic run may add."""
        places = [self._hosts[f"worker {rank}"].place or self._hosts["worker 0"].place for rank in range(workers)]
        numbers = {node: number for number, node in enumerate(dict.fromkeys(place["node"] for place in places))}
        return tuple(numbers[place["node"]] for place in places)

    def announce(self) -> None:
        """Say which GPUs the workers have."""
        places = [host.place for host in self._hosts.values() if host.up and host.name.startswith(WORKER)]
        devices = [f"{self._config.device}:{min(place['gpus'], default=CPU)}" for place in places]
        if self._config.device not in (None, CPU):
            log.warning("%s", notice(self._config.device, devices, places=[place["host"] for place in places]))

    # ---- the protocol of launchers

    @property
    def processes(self) -> Mapping[str, int]:
        """Process ids of the running processes that are on this machine."""
        running = [host for host in self._hosts.values() if host.pid is not None and host.name not in self.exited]
        here = [host for host in running if host.place.get("node") == self._here]
        return {host.name: host.pid for host in here if host.pid is not None}

    def load(self, setup: Mapping[str, Any]) -> None:
        """Load a run in all actors."""
        self._setup = dict(setup)
        self.exited.clear()
        for host in self._hosts.values():
            if host.handle is not None:
                self._call(host, "load", self._setup)

    def start(self, name: str, **arguments: Any) -> None:
        """Start a process in its actor, or in a new one if that has ended."""
        host = self._hosts[name]
        self._coming.heard(name)
        host.number += 1
        host.pid = None
        _, *counted = arguments["heartbeat"]
        host.starting = {**arguments, "heartbeat": [self._receives(arguments["credentials"]), *counted]}
        self._start(host, host.starting)

    def _receives(self, credentials: Mapping[str, Any]) -> Sequence[Any]:
        """The address for heartbeats of processes with the `credentials`. Each driver has its own."""
        if self._receiver is None or credentials != self._credentials:
            self._close_receiver()
            self._credentials = credentials
            address, beat = self.interface or "127.0.0.1", partial(put, self.beats.sink)
            self._receiver = BeatReceiver(address, Credentials.of(credentials), beat)
        return self._receiver.address

    def _close_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None

    def _start(self, host: _Host, arguments: Mapping[str, Any]) -> None:
        self.exited.pop(host.name, None)
        if host.handle is None:
            self._create(host)
            self._call(host, "load", self._setup)
        self._call(host, "start", host.number, host.name, arguments, loopback=self.interface is None)

    def room(self) -> int:
        """The processors of Ray that are left if each worker uses one, as far as Ray has what it reserves for each."""
        workers = [host for host in self._hosts.values() if host.name.startswith(WORKER)]
        used = sum(host.number >= 0 and host.name not in self.exited for host in workers)
        needed = {"CPU": workers[0].reserved.cpus, "GPU": workers[0].reserved.gpus}
        free, total = self._ray.available_resources(), self._ray.cluster_resources()
        fitting = [int(free.get(name, 0) // amount) for name, amount in needed.items() if amount]
        return max(0, min(int(total.get("CPU", 0)) - used, *fitting))

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process, on whatever machine it is."""
        host = self._hosts[name]
        if host.handle is None or name in self.exited:
            return
        if host.up or number != signal.SIGKILL:
            self._call(host, "signal", number)
        else:
            self._lost(host, "it was ended before Ray had started its actor")

    def clear(self) -> None:
        """End all processes of the run; the actors stay ready."""
        for host in self._hosts.values():
            host.number += 1  # what is reported of the earlier ones does not count
            host.starting = None
            if host.handle is not None:
                self._call(host, "clear")

    def look(self) -> None:
        """Take the news of all actors that have some, and ask again."""
        self._coming.pass_time()
        if self._receiver is not None:
            self._receiver.poll()
        for host in self._hosts.values():
            if host.handle is not None:
                self._look_at(host)
        for call in self._done([*self._leaving]):
            self._end(call)

    def last_line(self, name: str) -> str:
        return self._last_lines.get(name, "")

    def close(self) -> None:
        """End all processes and actors, and write the rest of their output."""
        for host in self._hosts.values():
            if host.handle is not None:
                self._release(host)
        if self._leaving:
            self._ray.wait([*self._leaving], num_returns=len(self._leaving), timeout=CLOSE_SECONDS)
        for call in [*self._leaving]:
            self._end(call)
        self._ray.util.remove_placement_group(self._group)
        self._close_receiver()
        self.beats.close()

    def _release(self, host: _Host) -> None:
        """End an actor, once the rest of its output is here: its room is free for others then."""
        self._leaving[host.handle.close.remote()] = host.handle
        host.handle, host.looking, host.calls = None, None, []

    def _end(self, call: Any) -> None:
        """End an actor whose `call` of `close` is done, or late."""
        with suppress(Exception):
            _show(self._ray.get(call, timeout=0))
        self._ray.kill(self._leaving.pop(call))

    def _call(self, host: _Host, method: str, *arguments: Any, **named: Any) -> None:
        host.calls.append(getattr(host.handle, method).remote(*arguments, **named))

    def _done(self, calls: list[Any]) -> list[Any]:
        """Those of `calls` that are done."""
        return self._ray.wait(calls, num_returns=len(calls), timeout=0)[0] if calls else []

    def _look_at(self, host: _Host) -> None:
        if host.looking is None:
            host.looking = host.handle.look.options(concurrency_group="look").remote()
        done = self._done([*host.calls, host.looking])
        host.calls = [call for call in host.calls if call not in done]
        errors = self._ray.exceptions
        for call in done:
            try:
                news = self._ray.get(call)
            except errors.RayActorError as error:
                if call == host.looking and isinstance(error, errors.ActorUnavailableError) and host.reached:
                    host.looking, host.reached = None, False  # the connection may have been reset: ask once more
                    continue
                self._ended(host, str(error).splitlines()[0])
                return
            if call == host.looking:
                host.looking, host.reached = None, True
                self._take(host, news)
        if host.handle is not None and not host.up and self._coming.seconds(host.name) > PLACE_SECONDS:
            self._lost(host, f"Ray did not start its actor within {PLACE_SECONDS:g} s", NEVER_CAME)

    def _take(self, host: _Host, news: Mapping[str, Any]) -> None:
        host.up, host.place = True, news["place"]
        _show(news["output"])
        if not news["usable"]:
            self._lost(host, news["last_line"], news["status"])
        if news["number"] != host.number:
            return
        host.pid = news["pid"]
        if host.pid is not None:
            host.starting = None
        if news["status"] is not None:
            self._last_lines[host.name] = news["last_line"]
            self.exited[host.name] = news["status"]
            if host.bundle is None and not news["status"] and host.handle is not None:
                self._release(host)

    def _ended(self, host: _Host, reason: str) -> None:
        """Note that an actor has ended. A process that it had not yet started is started in another one."""
        self._lost(host, f"its Ray actor has ended: {reason}")
        # Ray may place that one on the same machine, until it has noticed that the machine is lost.
        if host.starting is not None and self._coming.seconds(host.name) < AGAIN_SECONDS:
            self._start(host, host.starting)

    def _lost(self, host: _Host, reason: str, status: int = KILLED) -> None:
        """Note that an actor has ended, and its process with it. An actor that Ray cannot reach is ended."""
        self._ray.kill(host.handle)
        host.handle, host.looking, host.calls = None, None, []
        if host.number >= 0:
            self._last_lines[host.name] = sentence(reason)
            self.exited[host.name] = status


def _hosts_of(setup: Setup) -> dict[str, _Host]:
    """The actors of a run by the names of their nodes. A place is a bundle if a node of the start is there."""
    places, reserved = setup.deployment.places(), reservations(setup.config.reserve, setup.config.device)
    absent = {f"{WORKER} {rank}" for rank in setup.absent}
    first = dict.fromkeys(place for name, place in places.items() if name not in absent)
    bundles = {place: bundle for bundle, place in enumerate(first)}
    kinds = {name: setup.deployment[name].id.kind for name in places}
    return {name: _Host(name, reserved[kinds[name]], bundles.get(place)) for name, place in places.items()}


def _bundles_of(hosts: Iterable[_Host]) -> list[dict[str, float]]:
    """The processors and GPUs that Ray reserves in each bundle."""
    found: dict[int, dict[str, float]] = {}
    for host in hosts:
        if host.bundle is not None:
            bundle = found.setdefault(host.bundle, {"CPU": 0.0, "GPU": 0.0})
            bundle["CPU"] += host.reserved.cpus
            bundle["GPU"] += host.reserved.gpus
    return [{name: amount for name, amount in found[bundle].items() if amount} for bundle in sorted(found)]


def _show(output: bytes) -> None:
    """Write lines of the processes to standard error; they begin with the name of the process."""
    if output:
        relay.write_all(relay.STDERR, output)
