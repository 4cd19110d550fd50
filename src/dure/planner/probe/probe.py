"""`dure probe`: measure hosts and the links between them, and describe them as a cluster file.

    rank 0, or this process alone           every rank                         a second process of each host
      conducts                                a benchmark  ---- local ------------> a second benchmark
      "measure" ------------------------------> with each partner, one pair at a time
      "apply", "compute" ---------------------> by itself

Ranks that see the same network of the same running system are on one host. The first rank of each host measures the
links between hosts and the second process. The ranks of a host measure the link between them. All ranks measure steps.

The measurements use dure's own wire and dure's own shard, so that the constants hold for real runs. Messages of several
sizes, alone and several at once, separate a byte's cost on the link from its other cost: messages at once occupy the
link one after another, but pay the other cost only once (`wire_of`). Half of a small round trip consists of alpha, the
time of the cores for a message, and of latency.
"""

from __future__ import annotations

import secrets
import socket
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dure.core.node import Address
from dure.errors import PeerLost, UsageError
from dure.job.initial_model import is_on_meta
from dure.job.replica import Replica
from dure.planner.probe.advice import advice
from dure.planner.probe.description import described, stragglers, wire_of
from dure.planner.probe.measure import KINDS, PRODUCT_FLOPS, SERVICE, Figures, LinkBenchmark, curve, fitted
from dure.planner.probe.short_runs import short_runs
from dure.run.strategy import codec_name, make
from dure.runtime.launch.engine_store import EngineStore
from dure.runtime.launch.rendezvous import RankEnvironment, Rendezvous, credentials_of, met, place
from dure.runtime.launch.shard_process import ShardProcess
from dure.runtime.process.group import Engine
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity, Loss

if TYPE_CHECKING:
    from dure.codec.base import Codec
    from dure.job.job import Job

RACES = 24
"""Number of races in total: two messages sent at once to one host."""

MOST_MEMBERS = 8
"""Largest number of processes that are started on one machine to measure collectives."""

PAIR_SECONDS = 600.0
"""Timeout of the measurements of one pair, or of one host's steps."""


def probe(
    job: Job | None = None,
    *,
    workers: int = 4,
    codecs: Sequence[str] = (),
    name: str = "",
    data: Path | None = None,
    key_file: Path | None = None,
    curves: bool = True,
) -> Figures | None:
    """Measure all hosts. If torchrun has started several ranks, each calls this; only rank 0 returns the figures.

    On one machine, short real runs with `workers` workers train the job called `name` (as in `dure train`, with its
    `data`); without a name, a step is measured in this process alone. `key_file` is as in `dure.attach`.

    The entry `cluster` is the `Cluster`. It is derived from the other entries: `hosts` (the ranks of each), `local`,
    `pairs` (each with its two `hosts`), `inside` (pairs of ranks on one `host`), `races`, `apply`, `compute` (seconds
    of steps at each rank, of `job`, or of `flops` operations without a job), `stragglers` (`description.stragglers`),
    `codecs` (by name, for each rank), `cores`, `residual` (the worst fit of a link),
    and `advice` if that fit is bad. One process alone also has `hand_over`, `numel` and `runs` (`short_runs`).

    Without `curves`, collectives are not measured on one machine, which saves seconds.

    Raises `PeerLost` if a host fails or exits.
    """
    if workers < 1:
        raise UsageError(f"workers counts the workers of this machine and must be >= 1, got {workers}.")
    if job is not None and is_on_meta(job):
        raise UsageError(
            f"{name or 'the job'} has shapes and no values, so its steps cannot be measured here. A plan can name "
            'machines instead, as in --on "1x8 a100-sxm4-40gb" (dure devices), or a cluster file.'
        )
    found = _measured(job, _named(codecs), key_file, min(workers, MOST_MEMBERS) if curves else 1)
    if found is None:
        return None
    found["flops"] = PRODUCT_FLOPS if job is None else None
    if len(found["compute"]) == 1 and job is not None:
        found["numel"] = Replica(job.build(0)).numel
        found["runs"] = None
        if name:
            found["runs"] = short_runs(name, data, workers, statistics.median(found["compute"][0]))
    found["stragglers"] = stragglers(found)
    found["advice"] = advice(found)
    cluster = described(found, workers).changed(hosts=tuple(found["names"]))
    if job is not None:
        cluster = cluster.referred(job.batch_size * job.flops_per_sample)
    found["cluster"] = cluster
    found["collectives"] = {
        kind: fitted(kind, points, cluster, found["members"]) for kind, points in found["collectives"].items()
    }
    return found


def _measured(job: Job | None, codecs: Mapping[str, Codec], key_file: Path | None, members: int) -> Figures | None:
    """The figures of all hosts, at rank 0; None at other ranks, after their part.

    If this process is alone, collectives are measured among `members` other processes, and not at all for one.
    """
    here = place() or RankEnvironment()
    rendezvous = met(here, "probe", key_file)
    run = rendezvous.exchange("run", f"probe-{secrets.token_hex(4)}")[0]
    credentials = credentials_of(rendezvous)
    hosts = hosts_of(rendezvous.exchange("host", network_identity()))
    names = rendezvous.exchange("name", [socket.gethostname(), here.interface])
    node = ProcessNode(Identity(run, f"rank {here.rank}", here.rank), credentials)
    benchmark = LinkBenchmark(node, job, codecs)
    node.serve(SERVICE, benchmark)
    with ExitStack() as stack:
        stack.callback(node.wire.close)
        first = any(here.rank == ranks[0] for ranks in hosts)
        alone = here.world_size == 1
        besides = _begin_besides(node, here, credentials, stack, members if alone else int(first))
        stack.callback(benchmark.over.resolve)  # from here on, the exit of a peer is no error
        _exchange_addresses(rendezvous, node, besides)
        rendezvous.exchange("ready", True)
        node.on_lost = lambda loss: _lost(loss, benchmark)
        engine = Engine(node, rendezvous, torch.device("cpu"))
        stack.push(lambda kind, error, trace: engine.close(failed=kind is not None))
        benchmark.group = engine.group
        if here.rank:
            node.loop.run_until(benchmark.over)
            found = None
        else:
            group = (
                [f"beside {rank}" for rank in range(members)]
                if alone
                else [f"rank {rank}" for rank in range(here.world_size)]
            )
            measurements = _conduct(node, hosts, group, list(codecs))
            found = node.loop.run_until(node.spawn(measurements, "the measurements"))
            found["names"] = [named_host(*names[ranks[0]], alone=len(hosts) == 1) for ranks in hosts]
            benchmark.over.resolve()
        for name, beside in besides.items():
            node.loop.run_until(node.call(Address(name, SERVICE), "over"))
            beside.until_gone()
        rendezvous.part()
    return found


def named_host(name: str, interface: str, *, alone: bool) -> str:
    """The name of a host; with its address where there are several, as containers may have equal names."""
    return name if alone else f"{name} ({interface})"


def network_identity() -> str:
    """Identity of the running system and of the network that this process sees: that of its host, or its container."""
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{system} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def hosts_of(identities: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, in the order of ranks. Raises `UsageError` if the ranks of a host are not in a row.

    >>> hosts_of(["a", "a", "b"])
    [[0, 1], [2]]
    """
    hosts = [[rank for rank, _ in group] for _, group in groupby(enumerate(identities), key=itemgetter(1))]
    if len(hosts) > len(set(identities)):
        raise UsageError(
            "the ranks of a host are not in a row, and a cluster file numbers workers machine by machine. Start all "
            "ranks of one host, then those of the next, as torchrun does."
        )
    return hosts


def _begin_besides(
    node: ProcessNode, here: RankEnvironment, credentials: Credentials, stack: ExitStack, count: int
) -> dict[str, ShardProcess]:
    """Start `count` other processes on this host, numbered from the rank on. Several are a group of the engine."""
    shared: dict[str, Any] = {"run": node.identity.job, "interface": here.interface, "workers": count}
    shared["credentials"] = credentials.plain()
    if count > 1:
        store = EngineStore(None, count)
        stack.callback(store.close)
        shared["store"] = store.place
    besides = {}
    for rank in range(here.rank, here.rank + count):
        name = f"beside {rank}"
        besides[name] = helper = ShardProcess(
            "dure.planner.probe.measure", name, {**shared, "name": name, "rank": rank}
        )
        stack.push(partial(_kill_after_error, helper))
    return besides


def _kill_after_error(helper: ShardProcess, kind: type[BaseException] | None, *_: object) -> None:
    if kind is not None:
        helper.kill()


def _exchange_addresses(rendezvous: Rendezvous, node: ProcessNode, besides: Mapping[str, ShardProcess]) -> None:
    """Listen, and enter the addresses of all ranks and of the processes beside them into the node's directory."""
    interface = rendezvous.place.interface
    places = rendezvous.exchange("place", [interface, node.wire.listen(interface)])
    node.directory |= {f"rank {rank}": (host, port) for rank, (host, port) in enumerate(places)}
    mine = {name: [interface, beside.answer()["port"]] for name, beside in besides.items()}
    for places in rendezvous.exchange("beside", mine):
        node.directory |= {name: (host, port) for name, (host, port) in places.items()}


def _lost(loss: Loss, benchmark: LinkBenchmark) -> None:
    if not benchmark.over.done and not loss.finished:
        raise PeerLost(f"{loss.peer} failed or exited during the measurements: {loss.reason}.")


def _named(codecs: Sequence[str]) -> dict[str, Codec]:
    """Parse codecs, and map the names that a cluster file uses to them. Raises `StrategyError`."""
    made = [make(text, "codec") for text in codecs]
    names = [codec_name(codec) for codec in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"a cluster file has one cost for {twice}, and several were asked for. Give it once.")
    return dict(zip(names, made, strict=True))


async def _conduct(
    node: ProcessNode, hosts: Sequence[Sequence[int]], group: Sequence[str], codecs: Sequence[str]
) -> Figures:
    """Measure one thing after another, as measurements at the same time would disturb each other.

    `group` are the processes among which collectives are measured.
    """
    ranks = [Address(f"rank {rank}", SERVICE) for members in hosts for rank in members]
    found: Figures = {"hosts": [list(members) for members in hosts], "local": [], "inside": [], "pairs": []}
    found |= {"apply": [], "cores": [], "memory": [], "codecs": {}, "collectives": {}, "members": len(group)}
    for number, members in enumerate(hosts):
        found["local"].append(await _measure(node, members[0], f"beside {members[0]}"))
        reply = await node.call(ranks[members[0]], "apply", timeout=PAIR_SECONDS)
        found["apply"].append(reply.fields["points"])
        found["cores"].append(reply.fields["cores"])
        found["memory"].append(reply.fields["memory"])
        for one, other in partners(len(members)):
            figures = await _measure(node, members[one], f"rank {members[other]}")
            found["inside"].append({"host": number, **figures})
    for one, other in partners(len(hosts)):
        figures = await _measure(node, hosts[one][0], f"rank {hosts[other][0]}")
        found["pairs"].append({"hosts": [one, other], **figures})
    for kind in KINDS if len(group) > 1 else ():
        addresses = [Address(name, SERVICE) for name in group]
        found["collectives"][kind] = await curve(partial(_at_ranks, node, addresses, kind))
    found["compute"] = [reply["seconds"] for reply in await _together(node, ranks, "compute")]
    if len(ranks) == 1:
        reply = await node.call(ranks[0], "hand_over", peer="beside 0", timeout=PAIR_SECONDS)
        found["hand_over"] = reply.fields["points"]
    for codec in codecs:
        found["codecs"][codec] = await _together(node, ranks, "code", codec=codec)
    found["races"] = [ends async for ends in _races(node, hosts, found["pairs"])]
    for rank in ranks:  # this one first: after that, the exit of another rank is no error
        await node.call(rank, "over")
    links = found["pairs"] or found["inside"] or found["local"]
    found["residual"] = max(wire_of(figures).residual for figures in links)
    return found


async def _together(node: ProcessNode, ranks: Sequence[Address], method: str, **fields: Any) -> list[Figures]:
    """The replies of all ranks, which measure at once. The own call is the last, as it occupies this process."""
    for rank in ranks[1:]:
        await node.call(rank, "ping")  # connects
    own, *others = ranks
    calls = [node.call(rank, method, timeout=PAIR_SECONDS, **fields) for rank in (*others, own)]
    replies = [dict((await each).fields) for each in calls]
    return replies[-1:] + replies[:-1]


async def _at_ranks(node: ProcessNode, ranks: Sequence[Address], kind: str, nbytes: int) -> list[list[float]]:
    """The seconds of a collective at each rank."""
    return [reply["seconds"] for reply in await _together(node, ranks, "collective", kind=kind, nbytes=nbytes)]


async def _measure(node: ProcessNode, rank: int, peer: str) -> Figures:
    """The figures of the link between a rank and another process."""
    reply = await node.call(Address(f"rank {rank}", SERVICE), "measure", peer=peer, timeout=PAIR_SECONDS)
    return dict(reply.fields)


async def _races(
    node: ProcessNode, hosts: Sequence[Sequence[int]], pairs: Sequence[Figures]
) -> AsyncIterator[tuple[float, float]]:
    """Ends of two messages sent at once to each host: by the next two hosts, or by two processes of the next host."""
    firsts = [members[0] for members in hosts]
    count = len(hosts)
    if count == 1:
        return
    size = max(size for figures in pairs for size, *_ in figures["points"])
    for number, first in enumerate(firsts):
        one, other = firsts[(number + 1) % count], firsts[(number + 2) % count]
        peers = [f"rank {one}", f"rank {other}" if other != first else f"beside {one}"]
        host = Address(f"rank {first}", SERVICE)
        reply = await node.call(host, "race", peers=peers, size=size, count=-(-RACES // count), timeout=PAIR_SECONDS)
        for earlier, later in reply.fields["rounds"]:
            yield earlier, later


def partners(world: int) -> Iterator[tuple[int, int]]:
    """Pairs of hosts at distances 1, 2, 4, ...: each host has several partners, and their number grows slowly.

    >>> list(partners(4))
    [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)]
    """
    met = set()
    distance = 1
    while distance < world:
        for one in range(world):
            pair = (one, (one + distance) % world)
            if frozenset(pair) not in met:
                met.add(frozenset(pair))
                yield pair
        distance *= 2
