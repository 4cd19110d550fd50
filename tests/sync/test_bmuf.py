"""BMUF and DiLoCo against what they are: momentum on pseudo-gradients, averaging, Lookahead; and plain loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import attached
from support.runs import Finished, bowls, local, resolved, virtual
from support.wording import raising
from torch import Tensor

from dure.errors import StrategyError
from dure.job.job import Job, load_job
from dure.job.optimizer import OptimizerSpec
from dure.run.prebuilt import Callbacks
from dure.run.strategy import Strategy
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Event, Link, Machines
from dure.runtime.virtual.compute import Constant
from dure.sync.bmuf import BMUF, DiLoCo

TOPOLOGIES = ["collective", "ps:shards=2"]
BATCH = 8


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def gradients(job: Job, workers: int) -> tuple[list[Callable[[Tensor], Tensor]], Tensor]:
    """Each worker's next gradient at given parameters, by PyTorch alone; and the initial parameters."""
    model = job.build(0)
    parameters = list(model.parameters())

    def of(sampler: Any) -> Callable[[Tensor], Tensor]:
        def gradient(values: Tensor) -> Tensor:
            torch.nn.utils.vector_to_parameters(values, parameters)
            inputs, targets = job.train.batch(sampler.next())
            parts = torch.autograd.grad(job.loss(model(inputs), targets), parameters)
            return torch.cat([part.reshape(-1) for part in parts])

        return gradient

    first = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
    return [of(sampler) for sampler in job.samplers([BATCH] * workers, seed=0)], first


def digits(workers: int) -> tuple[list[Callable[[Tensor], Tensor]], Tensor]:
    return gradients(load_job("digits-mlp", dtype="float64"), workers)


def run_digits(strategy: str, steps: int, workers: int = 3, **options: Any) -> Finished:
    given = {"workers": workers, "batch_size": BATCH, "steps": steps, "dtype": "float64"}
    return virtual("digits-mlp", strategy, **given | options)


# ---- what it is


@pytest.mark.sampled(1)
@pytest.mark.parametrize("nesterov", ["true", "false"])
@pytest.mark.parametrize("steps", [8, 11])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_without_momentum_it_is_model_averaging_bit_for_bit(nesterov, steps, dtype):
    options: dict[str, Any] = {"batch_sizes": (4, 8, 20), "dtype": dtype, "optimizer": "adam"}
    one = run_digits(f"bmuf:period=4,momentum=0,zeta=1,nesterov={nesterov}", steps, **options)
    assert torch.equal(one.params, run_digits("averaging:period=4", steps, **options).params)
    servers = run_digits(f"bmuf:period=4,momentum=0,zeta=1,nesterov={nesterov} ps:shards=2", steps, **options)
    assert distance(servers.params, one.params) < (1e-6 if dtype == "float32" else 1e-12)


def test_without_momentum_and_a_period_of_one_it_is_bsp():
    one = run_digits("bmuf:period=1,momentum=0", 9)
    assert distance(one.params, run_digits("bsp", 9).params) < 1e-12


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_without_zeta_it_stands_still(topology):
    run = run_digits(f"bmuf:period=3,zeta=0 {topology}", 10)
    assert torch.equal(run.params, digits(3)[1])


def by_torch(steps: int, period: int, *, momentum: float, zeta: float, nesterov: bool, workers: int = 3) -> Tensor:
    """Wg under `torch.optim.SGD` on Wg - mean of w_k; what is left of the lookahead is taken back at the end."""
    each, first = digits(workers)
    outer = torch.nn.Parameter(first.clone())
    rule = torch.optim.SGD([outer], lr=zeta, momentum=momentum, nesterov=nesterov)
    for start in range(0, steps, period):
        ends = []
        for gradient in each:
            values = outer.detach().clone()
            for _ in range(min(period, steps - start)):
                values -= 0.1 * gradient(values)
            ends.append(values)
        outer.grad = outer.detach() - torch.stack(ends).mean(dim=0)
        rule.step()
    lookahead = -zeta * momentum * rule.state[outer]["momentum_buffer"] if nesterov else 0.0
    return outer.detach() - lookahead


@pytest.mark.sampled(6)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("steps", [4, 8, 20, 22])
def test_it_is_torch_momentum_on_pseudo_gradients(topology, nesterov, steps):
    """NBM is `SGD(nesterov=True)`, CBM (SlowMo) plain momentum; also when the last block is not complete."""
    text = f"bmuf:period=4,momentum=0.8,zeta=0.7,nesterov={str(nesterov).lower()} {topology}"
    theirs = by_torch(steps, 4, momentum=0.8, zeta=0.7, nesterov=nesterov)
    assert distance(run_digits(text, steps).params, theirs) < 1e-12


def test_the_two_momenta_differ():
    one, other = (by_torch(12, 4, momentum=0.8, zeta=0.7, nesterov=nesterov) for nesterov in (True, False))
    assert distance(one, other) > 1e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_diloco_is_bmuf_with_adamw(topology):
    options: dict[str, Any] = {"optimizer": "adamw:lr=0.001,weight_decay=0.1"}
    bmuf = run_digits(f"bmuf:period=30,momentum=0.9,zeta=0.7,nesterov=true {topology}", 70, **options)
    diloco = run_digits(f"diloco {topology}", 70)
    assert torch.equal(diloco.params, bmuf.params)
    assert diloco.setup.job.optimizer == OptimizerSpec("adamw", lr=0.001, weight_decay=0.1)
    asked = run_digits(f"diloco {topology}", 10, optimizer="momentum", lr=0.02)
    assert asked.setup.job.optimizer == OptimizerSpec("momentum", lr=0.02)
    assert run_digits("diloco", 10, lr=0.02).setup.job.optimizer.name == "adamw"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_alone_without_momentum_and_half_the_way_it_is_lookahead(topology):
    each, slow = digits(1)
    for _ in range(5):
        fast = slow.clone()
        for _ in range(4):
            fast -= 0.1 * each[0](fast)
        slow = slow + 0.5 * (fast - slow)
    run = run_digits(f"bmuf:period=4,momentum=0,zeta=0.5,nesterov=false {topology}", 20, workers=1)
    assert distance(run.params, slow) < 1e-12


@pytest.mark.parametrize("text", ["bmuf:period=3", "bmuf:period=3,overlap=2,fragments=2", "diloco:period=3 ps"])
def test_workers_with_the_same_data_are_one_worker(text):
    many = virtual(bowls([(0.7, 1.0)] * 4, lr=0.3), text, workers=4, steps=14)
    one = virtual(bowls([(0.7, 1.0)], lr=0.3), text, workers=1, steps=14)
    assert float(many.params) == pytest.approx(float(one.params), abs=1e-14)


# ---- the gain, and where it is stable


@pytest.mark.long
@pytest.mark.parametrize("topology", ["collective", "ps"])
@pytest.mark.parametrize("nesterov", ["true", "false"])
def test_a_lasting_change_is_amplified_by_one_over_one_minus_momentum(topology, nesterov):
    """10 for both momenta; (1 + m) / (1 - m) = 19 and 1 + m = 1.9 are other people's."""
    job = bowls([(0.0, 1.0), (0.0, 3.0)], lr=0.25)
    text = f"bmuf:period=2,momentum=0.9,nesterov={nesterov} {topology}"
    ends = [float(virtual(job, text, workers=2, steps=2 * blocks).params) for blocks in (200, 201)]
    change = 2 * 0.25 * 2.0
    assert (ends[1] - ends[0]) / change == pytest.approx(10, rel=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("topology", "period"), [("collective", 1), ("collective", 3), ("ps", 1)])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("nesterov", [True, False])
def test_stability_on_a_bowl(topology, momentum, nesterov, period):
    """h = zeta (1 - (1 - lr a)^period): 0 < h < 2 (1 + m), or 2 (1 + m) / (1 + 2 m) with Nesterov's lookahead."""
    limit = 2 * (1 + momentum) / (1 + 2 * momentum if nesterov else 1)
    reach = 1 - (1 - 0.4) ** period
    size = {}
    for h in (0.95 * limit, 1.05 * limit):
        text = f"bmuf:period={period},momentum={momentum},zeta={h / reach!r},nesterov={str(nesterov).lower()}"
        job = bowls([(1.0, 0.0)] * 2, lr=0.4, start=1.0)
        size[h] = abs(float(virtual(job, f"{text} {topology}", workers=2, steps=120 * period).params))
    calm, wild = size.values()
    assert calm < 0.5 < 2 < wild


# ---- fragments and overlap


def streamed(steps: int, method: BMUF, workers: int = 3) -> Tensor:
    """The method as a plain loop over clocks, in which what is sent arrives `overlap` steps later."""
    each, first = digits(workers)
    size = first.numel()
    edges = [number * size // method.fragments for number in range(method.fragments + 1)]
    cuts = [slice(*edge) for edge in itertools.pairwise(edges)]
    offsets = [(number + 1) * method.period // method.fragments for number in range(method.fragments)]
    local = [first.clone() for _ in range(workers)]
    model, delta, ahead = first.clone(), torch.zeros_like(first), first.clone()
    mail: list[tuple[int, slice, list[Tensor]]] = []

    def arrive(cut: slice, ends: list[Tensor]) -> None:
        change = torch.stack(ends).mean(dim=0) - ahead[cut]
        delta[cut] = method.momentum * delta[cut] + method.zeta * change
        model[cut] += delta[cut]
        ahead[cut] = model[cut] + (method.momentum * delta[cut] if method.nesterov else 0.0)
        for values, end in zip(local, ends, strict=True):
            values[cut] = ahead[cut] + values[cut] - end

    def send(cut: slice, due: int) -> None:
        mail.append((due, cut, [values[cut].clone() for values in local]))

    last = [0] * method.fragments
    for clock in range(1, steps + 1):
        for values, gradient in zip(local, each, strict=True):
            values -= 0.1 * gradient(values)
        while mail and mail[0][0] <= clock:
            arrive(*mail.pop(0)[1:])
        for number, cut in enumerate(cuts):
            if clock % method.period == offsets[number] % method.period:
                last[number] = clock
                send(cut, clock + method.overlap)
                if not method.overlap:
                    arrive(*mail.pop(0)[1:])
    while mail:
        arrive(*mail.pop(0)[1:])
    for number, cut in enumerate(cuts):
        if last[number] < steps:
            send(cut, steps)
            arrive(*mail.pop(0)[1:])
    return model


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("overlap", "fragments"), [(0, 1), (0, 3), (1, 1), (3, 1), (6, 1), (2, 3), (6, 2), (6, 6), (5, 4)]
)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("steps", [12, 23])
def test_streams_are_what_a_plain_loop_does(overlap, fragments, nesterov, steps):
    method = BMUF(6, 0.6, 0.8, nesterov, overlap, fragments)
    text = f"bmuf:period=6,momentum=0.6,zeta=0.8,nesterov={nesterov},overlap={overlap},fragments={fragments}"
    assert distance(run_digits(text, steps).params, streamed(steps, method)) < 1e-12


def test_one_fragment_and_no_overlap_is_the_method_without():
    texts = ("bmuf:period=5", "bmuf:period=5,fragments=1,overlap=0")
    one, other = (run_digits(text, 13) for text in texts)
    assert torch.equal(one.params, other.params)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("overlap", [0, 2, 5])
@pytest.mark.parametrize("fragments", [1, 2, 5])
@pytest.mark.parametrize("steps", [5, 14, 16])
def test_every_step_counts_once(overlap, fragments, steps):
    """Without momentum, on slopes that are the same everywhere, nothing is lost and nothing counted twice."""
    slopes = torch.arange(10, dtype=torch.float64)
    job = slope(slopes)
    text = f"bmuf:period=5,momentum=0,overlap={overlap},fragments={fragments}"
    run = virtual(job, text, workers=3, steps=steps, lr=0.25)
    assert distance(run.params, -0.25 * steps * slopes) < 1e-12


class Slope(torch.nn.Module):
    """f(w) = sum of slopes w, whatever the sample."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.slopes = slopes
        self.place = torch.nn.Parameter(torch.zeros_like(slopes))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.place * self.slopes).sum() + 0 * inputs.sum(dim=1)


def slope(slopes: Tensor) -> Job:
    job = bowls([(0.0, 0.0)] * 6, lr=0.25)
    job.model = lambda: Slope(slopes)
    return job


def far(workers: int = 3) -> Cluster:
    """A ring that takes 40 ms for a message, and steps of 10 ms."""
    machines = Machines(count=workers, compute=Constant(seconds=0.01))
    return Cluster(machines=(machines,), link=Link(latency=0.01))


def test_overlap_hides_the_way():
    """A meeting takes 4 rounds of 10 ms: 4 to 5 steps."""
    seconds = {o: virtual("digits-mlp", f"bmuf:period=8,overlap={o}", far(), steps=80).seconds for o in (0, 3, 6, 8)}
    assert seconds[0] == pytest.approx(80 * 0.01 + 10 * 0.04, rel=0.05)
    assert seconds[3] == pytest.approx(80 * 0.01 + 10 * 0.01, rel=0.1)
    assert seconds[6] == seconds[8] == pytest.approx(80 * 0.01 + 0.04, rel=0.05), "but for the last one"


@pytest.mark.parametrize("text", ["bmuf:period=6,overlap=4,fragments=3", "diloco:period=6,overlap=6"])
def test_what_is_under_way_survives_a_checkpoint(text, tmp_path):
    options: dict[str, Any] = {"workers": 3, "steps": 20}
    without = virtual("digits-mlp", text, **options)
    setup, cluster = resolved(
        "digits-mlp", text, on="virtual", checkpoint_every=5, out=tmp_path, eval_every=1000, **options
    )
    assert cluster is not None
    assert torch.equal(without.params, VirtualRun(setup, cluster, Callbacks()).run().params)


# ---- real processes, deaths, loops of one's own, and what cannot be


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "text", ["bmuf:period=4,overlap=3,fragments=2 collective", "diloco:period=4 ps:shards=2", "one-shot collective"]
)
def test_real_processes_come_to_the_same(text, fork_server):
    options: dict[str, Any] = {"workers": 2, "steps": 14, "dtype": "float64"}
    real = local("digits-mlp", text, fork_server=fork_server, **options)
    modelled = virtual("digits-mlp", text, **options)
    assert distance(real.params, modelled.params) < 1e-12
    assert real.summary["samples"] == modelled.summary["samples"]


@pytest.mark.parametrize("nesterov", ["true", "false"])
def test_servers_keep_the_momentum_while_workers_come_and_go(nesterov):
    """On a slope the model moves by what is left of the workers and by its momentum, whoever they are."""
    events = (
        Event(at=2.05, kind="crash", worker=0),
        Event(at=4.0, kind="join", worker=0),
        Event(at=5.0, kind="pause", worker=1, duration=60.0),
    )
    job = bowls([(0.0, 1.0)] * 3, lr=0.25)
    machines = Machines(count=3, compute=Constant(seconds=0.1))
    cluster = Cluster(machines=(machines,), events=events)
    text = f"bmuf:period=4,momentum=0.5,nesterov={nesterov} ps"
    setup, cluster = resolved(job, text, cluster, on="virtual", steps=200, eval_every=1000)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    assert segment.run() is None
    outcome = segment.outcome()
    assert outcome.totals.failures_survived == 2
    assert [worker.clock for worker in segment.workers.values()] == [200] * 3
    steady, undisturbed = 0.25 * 4 / (1 - 0.5), virtual(bowls([(0.0, 1.0)], lr=0.25), text, workers=1, steps=200)
    assert outcome.params is not None
    assert abs(float(outcome.params) - float(undisturbed.params)) <= 2 * steady


@pytest.mark.long
@pytest.mark.parametrize("text", ["bmuf:period=4,zeta=0.7,overlap=2,fragments=3", "diloco:period=4 ps"])
def test_a_loop_of_ones_own(text):
    """The user's optimizer inside; outside, the method's own momentum, on servers too."""
    module = attached.model()
    with attached.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), text) as replica:
        for batch in attached.batches(9):
            attached.loss_of(module, batch).backward()
            replica.step()
    if "ps" not in text:
        return
    inner = attached.model()
    outer = torch.nn.utils.parameters_to_vector(inner.parameters()).detach().clone()
    velocity = torch.zeros_like(outer)
    rule = torch.optim.SGD(inner.parameters(), lr=0.1)
    batches = attached.batches(9)
    start = outer.clone()
    for steps in (4, 4, 1):
        torch.nn.utils.vector_to_parameters(start.clone(), inner.parameters())
        for batch in itertools.islice(batches, steps):
            rule.zero_grad()
            attached.loss_of(inner, batch).backward()
            rule.step()
        velocity = 0.9 * velocity + start - torch.nn.utils.parameters_to_vector(inner.parameters()).detach()
        outer = outer - 0.7 * velocity
        start = outer - 0.9 * 0.7 * velocity
    assert attached.flat(module) == pytest.approx(outer.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"period": 0}, "mini-batches"),
        ({"momentum": 1.0}, "least 0"),
        ({"zeta": -1.0}, "scales"),
        ({"overlap": 11}, "between 0"),
        ({"fragments": 0}, "between 1"),
    ],
)
def test_bad_parameters_are_refused(given, words):
    with raising(ValueError, words):
        BMUF(**given)
    with raising(ValueError, "learning"):
        DiLoCo(lr=-1)


@pytest.mark.parametrize("text", ["bmuf:overlap=2 ps", "diloco:fragments=2 ps"])
def test_servers_do_not_stream(text):
    with raising(StrategyError, "collective"):
        Strategy.parse(text)
