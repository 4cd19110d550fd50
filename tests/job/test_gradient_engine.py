"""Gradients computed together are those computed one at a time, whatever the company."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from support.runs import virtual
from support.wording import raising
from torch import nn
from torch.nn import functional

import dure
from dure.core.node import Ghost
from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.gradient import Gradient, GradientWork
from dure.job.gradient_engine import LEAST_PENDING, MOST_BYTES, GradientEngine, Isolated
from dure.job.job import Job
from dure.job.models.mlp import mlp
from dure.job.optimizer import OptimizerSpec
from dure.job.replica import Replica


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job_of(model, loss=functional.cross_entropy):
    return SimpleNamespace(model=model, loss=loss)


def works_for(gradient_engine, count, inputs=(7, 12), classes=3, seed=0):
    """Works with values of their own; (batch, features) inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    dtype = gradient_engine.replica.dtype
    return [
        GradientWork(
            rank=rank,
            step=3,
            values=gradient_engine.initial_values(rank),
            inputs=torch.randn(*inputs, generator=generator, dtype=dtype),
            targets=torch.randint(classes, (inputs[0],), generator=generator),
            seed=5,
            flops=1.0,
        )
        for rank in range(count)
    ]


def plain_gradient(job, work):
    """Autograd on a module of its own, the textbook way."""
    module = job.model()
    parameters = list(module.parameters())
    with torch.no_grad():
        torch.nn.utils.vector_to_parameters(work.values.clone(), parameters)
    loss = job.loss(module(work.inputs), work.targets)
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in parameters]), loss.item()


class Residual(nn.Module):
    """Not a plain chain, but vmap takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, inputs):
        return self.outer(inputs + torch.sin(self.inner(inputs)))


def wide() -> nn.Sequential:
    """Has a large first weight, a large inner one and small ones."""
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 1500), nn.ReLU(), nn.Linear(1500, 12), nn.Tanh(), nn.Linear(12, 3))


CHAINS = {
    "mlp": lambda: mlp(12, 8, 3),
    "large weights": wide,
    "no bias": lambda: nn.Sequential(nn.Linear(12, 5, bias=False), nn.Sigmoid(), nn.Linear(5, 3, bias=False)),
    "in place": lambda: nn.Sequential(nn.Linear(12, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ELU(inplace=True)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(12, 5), nn.SiLU()), nn.Identity(), nn.Linear(5, 3)),
    "activation first": lambda: nn.Sequential(nn.Tanh(), nn.Linear(12, 5), nn.GELU(), nn.Linear(5, 3), nn.Softplus()),
    "linear only": lambda: nn.Sequential(nn.Linear(12, 3)),
}  # fmt: skip
OTHERS = {"residual": Residual, "layer norm": lambda: nn.Sequential(nn.Linear(12, 6), nn.LayerNorm(6), nn.Linear(6, 3))}


def how(gradient_engine):
    (decision,) = gradient_engine.rule["shapes"].values()
    return decision


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [*CHAINS, *OTHERS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_together_equals_alone_equals_autograd(name, dtype, tolerance):
    make = {**CHAINS, **OTHERS}[name]
    job = job_of(lambda: make().to(dtype))
    gradient_engine, exact = GradientEngine(job), GradientEngine(job, exact=True)
    works = works_for(gradient_engine, 20)
    together, alone = gradient_engine.evaluate(works), exact.evaluate(works)
    assert how(gradient_engine).startswith("stacked: batched products" if name in CHAINS else "stacked: vmap")
    for work, one, other in zip(works, together, alone, strict=True):
        values, loss = plain_gradient(job, work)
        torch.testing.assert_close(other.values, values, rtol=0, atol=tolerance)
        torch.testing.assert_close(one.values, values, rtol=0, atol=tolerance)
        assert one.loss == pytest.approx(loss, abs=tolerance)
        assert other.loss == pytest.approx(loss, abs=tolerance)
        assert one.samples == other.samples == 7
        assert one.values.is_contiguous()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*CHAINS, *OTHERS])
def test_bits_do_not_depend_on_the_company(name):
    gradient_engine = GradientEngine(job_of({**CHAINS, **OTHERS}[name]))
    works = works_for(gradient_engine, 45)
    results = gradient_engine.evaluate(works)
    assert how(gradient_engine).startswith("stacked")
    fewest = 1 if name in CHAINS else LEAST_PENDING
    for start, size in ((0, fewest), (44, fewest), (3, 17), (10, 33), (0, 44)):
        places = [(start + offset) % 45 for offset in range(size)][::-1]
        for place, again in zip(places, gradient_engine.evaluate([works[place] for place in places]), strict=True):
            assert torch.equal(again.values, results[place].values)
            assert again.loss == results[place].loss


def test_results_come_in_order_whatever_the_shapes():
    job = job_of(lambda: mlp(12, 8, 3))
    gradient_engine = GradientEngine(job)
    long, short = works_for(gradient_engine, 4), works_for(gradient_engine, 4, inputs=(2, 12), seed=1)
    mixed = [work for pair in zip(long, short, strict=True) for work in pair]
    for work, result in zip(mixed, gradient_engine.evaluate(mixed), strict=True):
        torch.testing.assert_close(result.values, plain_gradient(job, work)[0])
        assert result.samples == len(work.inputs)
    assert len(gradient_engine.rule["shapes"]) == 2
    assert gradient_engine.evaluate([]) == []


def test_lent_values_are_untouched_and_results_are_owned():
    gradient_engine = GradientEngine(job_of(lambda: mlp(12, 8, 3)))
    works = works_for(gradient_engine, 5)
    before = [work.values.clone() for work in works]
    first = gradient_engine.evaluate(works)
    kept = [result.values.clone() for result in first]
    first[2].values.zero_()
    again = gradient_engine.evaluate(works)
    for place, work in enumerate(works):
        assert torch.equal(work.values, before[place])
        assert torch.equal(again[place].values, kept[place])
        if place != 2:
            assert torch.equal(first[place].values, kept[place])


def test_values_may_be_a_slice_of_something_larger():
    job = job_of(lambda: wide())
    gradient_engine = GradientEngine(job)
    (work,) = works_for(gradient_engine, 1)
    shifted = torch.cat([torch.full((3,), 9.0), work.values])[3:]
    (result,) = gradient_engine.evaluate([dataclasses.replace(work, values=shifted)])
    torch.testing.assert_close(result.values, plain_gradient(job, work)[0])


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: functional.cross_entropy(outputs, targets),
        lambda outputs, targets: functional.cross_entropy(outputs, targets, label_smoothing=0.1),
        lambda outputs, targets: (outputs.sum(1) - targets).square().mean(),
        nn.MultiMarginLoss(),
    ],
)
def test_any_loss_that_vmap_takes_or_refuses(loss):
    job = job_of(lambda: mlp(12, 8, 3), loss)
    gradient_engine = GradientEngine(job)
    for work, result in zip(works := works_for(gradient_engine, 20), gradient_engine.evaluate(works), strict=True):
        values, number = plain_gradient(job, work)
        torch.testing.assert_close(result.values, values)
        assert result.loss == pytest.approx(number, rel=1e-5)


def test_labels_that_do_not_count():
    job = job_of(lambda: mlp(12, 8, 3))
    gradient_engine = GradientEngine(job)
    works = works_for(gradient_engine, 3)
    works[1].targets[2:5] = -100
    values, loss = plain_gradient(job, works[1])
    result = gradient_engine.evaluate(works)[1]
    torch.testing.assert_close(result.values, values)
    assert result.loss == pytest.approx(loss)


def test_a_loss_that_is_not_finite_is_passed_on():
    gradient_engine = GradientEngine(job_of(lambda: mlp(12, 8, 3)))
    works = works_for(gradient_engine, 4)
    expected = gradient_engine.evaluate(works)
    works[1].values = torch.full_like(works[1].values, torch.nan)
    results = gradient_engine.evaluate(works)
    assert results[1].loss != results[1].loss
    assert torch.equal(results[2].values, expected[2].values)


def test_a_loss_per_sample_is_refused():
    gradient_engine = GradientEngine(
        job_of(lambda: mlp(12, 8, 3), lambda o, t: functional.cross_entropy(o, t, reduction="none"))
    )
    with raising(UsageError, "7"):
        gradient_engine.evaluate(works_for(gradient_engine, 1))


# ---- the rule


def test_vmap_waits_for_company_and_chains_do_not():
    chain, other = GradientEngine(job_of(lambda: mlp(12, 8, 3))), GradientEngine(job_of(Residual))
    assert chain.batches(works_for(chain, 2))
    assert not other.batches(works_for(other, LEAST_PENDING - 1))
    assert other.batches(works_for(other, LEAST_PENDING))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(12, 3), nn.Dropout(0.5)), "random"),
        (lambda: nn.Sequential(nn.Linear(12, 3), nn.BatchNorm1d(3)), "buffers"),
        (lambda: nn.Sequential(nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 3, 12), nn.Flatten()), "convolutions"),
    ],
)
def test_what_is_computed_one_at_a_time(model, why):
    job = job_of(model)
    gradient_engine = GradientEngine(job)
    works = works_for(gradient_engine, 20)
    assert not gradient_engine.batches(works)
    assert why in gradient_engine.rule["one_at_a_time"]
    assert len(gradient_engine.evaluate(works)) == 20


def test_hooks_are_not_skipped():
    def model():
        module = mlp(12, 8, 3)
        module[1].register_forward_hook(lambda _module, _inputs, outputs: outputs * 2)
        return module

    job = job_of(model)
    gradient_engine = GradientEngine(job)
    works = works_for(gradient_engine, 2)
    torch.testing.assert_close(gradient_engine.evaluate(works)[1].values, plain_gradient(job, works[1])[0])
    assert "hooks" in gradient_engine.rule["one_at_a_time"]


def test_a_model_too_large_to_stack():
    features = MOST_BYTES // LEAST_PENDING // 4 + 1
    gradient_engine = GradientEngine(
        job_of(lambda: nn.Sequential(nn.Linear(features, 1)), lambda o, t: (o.sum(1) - t).square().mean())
    )
    works = works_for(gradient_engine, 2, inputs=(1, features))
    assert not gradient_engine.batches(works)
    assert "are more than" in how(gradient_engine)


def test_large_batches_are_cut_evenly():
    gradient_engine = GradientEngine(job_of(lambda: mlp(9000, 2, 3)))
    works = works_for(gradient_engine, 40, inputs=(20, 9000))
    results = gradient_engine.evaluate(works)
    most = MOST_BYTES // (20 * 9000 * 4)
    assert how(gradient_engine).endswith(f"at most {most}")
    sizes = [len({r.values.untyped_storage().data_ptr() for r in results})]
    assert sizes == [2]
    assert torch.equal(gradient_engine.evaluate([works[39]])[0].values, results[39].values)


class DrawsItself(nn.Module):
    """Randomness that no module type gives away."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)

    def forward(self, inputs):
        return self.linear(functional.dropout(inputs, 0.5))


def test_what_vmap_refuses_is_noted():
    gradient_engine = GradientEngine(job_of(DrawsItself))
    works = works_for(gradient_engine, LEAST_PENDING)
    assert not gradient_engine.batches(works)
    assert "vmap" in how(gradient_engine)
    assert "random" in how(gradient_engine)


# ---- randomness


@pytest.mark.parametrize(
    "model", [lambda: nn.Sequential(nn.Linear(12, 9), nn.Dropout(0.5), nn.Linear(9, 3)), DrawsItself]
)
def test_random_layers_draw_by_seed_rank_and_step(model):
    gradient_engine = GradientEngine(job_of(model))
    (work,) = works_for(gradient_engine, 1)
    (first,) = gradient_engine.evaluate([work])
    torch.rand(3)
    (again,) = gradient_engine.evaluate([dataclasses.replace(work)])
    assert torch.equal(first.values, again.values)
    for change in ({"seed": 6}, {"rank": 1}, {"step": 4}):
        (other,) = gradient_engine.evaluate([dataclasses.replace(work, **change)])
        assert not torch.equal(first.values, other.values)


def test_global_randomness_is_left_as_it_was():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    gradient_engine = GradientEngine(job_of(lambda: nn.Sequential(nn.Linear(12, 9), nn.Dropout(0.5), nn.Linear(9, 3))))
    gradient_engine.initial_values(4)
    works = [dataclasses.replace(work) for work in works_for(gradient_engine, 2)]
    gradient_engine.evaluate(works)
    assert torch.equal(torch.rand(3), expected)


def test_initial_values_follow_the_seed():
    gradient_engine = GradientEngine(job_of(lambda: mlp(12, 8, 3)))
    assert torch.equal(gradient_engine.initial_values(3), gradient_engine.initial_values(3))
    assert not torch.equal(gradient_engine.initial_values(3), gradient_engine.initial_values(4))


# ---- buffers


def test_each_worker_has_its_own_batch_norm():
    def model():
        return nn.Sequential(nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    job = job_of(model)
    gradient_engine = GradientEngine(job)
    works = works_for(gradient_engine, 2)
    modules = [Replica(model()) for _ in works]
    for _ in range(3):
        results = gradient_engine.evaluate(works)
        for work, result, replica in zip(works, results, modules, strict=True):
            replica.load(work.values)
            replica.zero_grad()
            job.loss(replica.module(work.inputs), work.targets).backward()
            torch.testing.assert_close(result.values, replica.grads)
            torch.testing.assert_close(result.buffers, replica.buffers_flat())
            work.buffers = result.buffers
    assert works[0].buffers[-1] == 3
    assert not torch.equal(works[0].buffers, works[1].buffers)


# ---- other models


def test_tied_weights():
    def model():
        module = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, 3))
        module[2].weight = module[0].weight
        return module

    job = job_of(model)
    gradient_engine = GradientEngine(job)
    works = works_for(gradient_engine, LEAST_PENDING)
    assert works[0].values.numel() == 12 * 12 + 12 + 12 + 39
    for work, result in zip(works, gradient_engine.evaluate(works), strict=True):
        torch.testing.assert_close(result.values, plain_gradient(job, work)[0])
    assert how(gradient_engine).startswith("stacked: vmap")


def test_a_layer_that_is_applied_twice():
    """The module keeps its parameters after a stack, so later gradients are computed alone too."""

    def model():
        twice = nn.Linear(12, 12)
        return nn.Sequential(twice, nn.ReLU(), twice, nn.Linear(12, 3))

    job = job_of(model)
    gradient_engine = GradientEngine(job)
    for number in (LEAST_PENDING, 1, LEAST_PENDING):
        works = works_for(gradient_engine, number)
        for work, result in zip(works, gradient_engine.evaluate(works), strict=True):
            torch.testing.assert_close(result.values, plain_gradient(job, work)[0])
    assert how(gradient_engine).startswith("stacked: vmap")


def test_a_frozen_layer_has_no_gradient_and_keeps_its_values():
    def model():
        module = mlp(12, 8, 3)
        module[1].weight.requires_grad_(False)
        return module

    gradient_engine, exact = GradientEngine(job_of(model)), GradientEngine(job_of(model), exact=True)
    works = works_for(gradient_engine, LEAST_PENDING)
    for one, other in zip(gradient_engine.evaluate(works), exact.evaluate(works), strict=True):
        torch.testing.assert_close(one.values, other.values)
        assert one.values.numel() == 8 + 24 + 3


def test_an_unused_parameter_has_the_gradient_zero():
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(12, 3), nn.Linear(2, 2)

        def forward(self, inputs):
            return self.used(inputs)

    gradient_engine = GradientEngine(job_of(Unused))
    for count in (1, LEAST_PENDING):
        result = gradient_engine.evaluate(works_for(gradient_engine, count))[0]
        assert not result.values[39:].any()
        assert result.values[:39].any()


def test_sparse_gradients():
    def model():
        return nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Flatten(), nn.Linear(6, 3))

    job = job_of(model)
    gradient_engine = GradientEngine(job)
    work = dataclasses.replace(
        works_for(gradient_engine, 1, inputs=(2, 2))[0],
        inputs=torch.tensor([[1, 1], [2, 8]]),
        targets=torch.tensor([0, 2]),
    )
    (result,) = gradient_engine.evaluate([work])
    dense = job_of(lambda: nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(6, 3)))
    torch.testing.assert_close(result.values, plain_gradient(dense, work)[0])


# ---- values that travel


def test_gradients_scale_and_are_replaced():
    gradient = Gradient(torch.tensor([1.0, 2.0]), loss=0.5, samples=4)
    assert gradient.scaled(0.5).values.tolist() == [0.5, 1.0]
    other = gradient.with_values(torch.zeros(2))
    assert (other.loss, other.samples, other.values.tolist()) == (0.5, 4, [0, 0])
    assert gradient.values.tolist() == [0.5, 1.0]


def test_a_timing_only_gradient_has_a_size_and_nothing_else():
    work = GradientWork(0, 0, Ghost(100), None, None, 0, 1.0)
    ghost = work.ghost().scaled(0.5)
    assert ghost.values.numel() == 100
    assert ghost.loss == 0.0


class TwoDevices:
    """The generators of two devices, as `torch.cuda` has them."""

    def __init__(self):
        self.generators = [torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)]
        self.current = 0

    def _is_in_bad_fork(self):
        return False

    def manual_seed(self, seed):
        self.generators[self.current].manual_seed(seed)

    def manual_seed_all(self, seed):
        for generator in self.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device):
        return self.generators[device.index].get_state()

    def set_rng_state(self, state, device):
        self.generators[device.index].set_state(state)

    @contextlib.contextmanager
    def device_index(self, index):
        before, self.current = self.current, index
        yield
        self.current = before


def test_a_gradient_on_one_device_seeds_its_generator_and_leaves_those_of_all_devices_as_they_were(monkeypatch):
    devices = TwoDevices()
    monkeypatch.setattr(torch, "cuda", devices)
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    monkeypatch.setattr(torch.accelerator, "device_index", devices.device_index)
    before = [torch.get_rng_state(), *(each.get_state() for each in devices.generators)]
    with Isolated(False, 17, torch.device("cuda:1")):
        seeds = [torch.initial_seed(), *(each.initial_seed() for each in devices.generators)]
    after = [torch.get_rng_state(), *(each.get_state() for each in devices.generators)]
    assert seeds == [17, 5, 17]
    assert all(map(torch.equal, before, after))


class Force(nn.Module):
    """The force of an energy, by a gradient within the forward."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return -gradient


class PerSample(nn.Linear):
    """A gradient of each sample, by `torch.func`."""

    def forward(self, x):
        return x + torch.func.vmap(torch.func.grad(lambda row: super(PerSample, self).forward(row).tanh().sum()))(x)


def penalized(outputs, targets):
    loss = functional.mse_loss(outputs, targets)
    (gradient,) = torch.autograd.grad(loss, outputs, create_graph=True)
    return loss + gradient.square().sum()


def one_process(job, steps):
    """The parameters after plain SGD, without this library."""
    module = job.build(0)
    (sampler,) = job.samplers((job.batch_size,), seed=0)
    optimizer = torch.optim.SGD(module.parameters(), lr=job.optimizer.lr)
    for _ in range(steps):
        inputs, targets = job.train.batch(sampler.next())
        optimizer.zero_grad()
        job.loss(module(inputs), targets).backward()
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in module.parameters()])


DIFFERENTIATING = {
    "force": (Force, functional.mse_loss),
    "torch.func": (lambda: nn.Sequential(nn.Linear(4, 4), PerSample(4, 4)), functional.mse_loss),
    "penalty": (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)), penalized),
}


@pytest.mark.parametrize("name", DIFFERENTIATING)
def test_models_and_losses_with_gradients_inside_train_as_in_plain_pytorch(name):
    """Each is counted, checked and evaluated too, by `dure.train`."""
    model, loss = DIFFERENTIATING[name]
    inputs = torch.linspace(-1, 1, 160).sin().reshape(40, 4)
    job = Job(model, loss, Data(inputs, inputs.flip(1)), batch_size=8, optimizer=OptimizerSpec(lr=0.1), name=name)
    run = virtual(job, "bsp collective", workers=1, steps=4)
    assert torch.equal(run.params, one_process(job, 4))
    many = dure.train(job, sync="ssp", topology="ps", workers=LEAST_PENDING + 1, steps=2, on="virtual")
    ((_, choice),) = many.figures["batching"]["shapes"].items()
    assert choice.startswith("stacked: vmap" if name == "torch.func" else "one at a time: vmap") or name == "penalty"
    if name == "torch.func":
        cut = virtual(job, "bsp collective gpipe:stages=2,micro=1", workers=2, steps=4)
        assert torch.equal(cut.params, run.params)
