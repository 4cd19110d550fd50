"""Multi-version pipelines against SGD and data parallelism, written as plain loops."""

import pytest
import torch
from support.chains import LR, chain, flat, play, stage_modules
from support.delayed import loss_of
from support.purposes import soaked
from support.wording import raising

from dure.errors import StrategyError
from dure.partition.methods.multi_version import MultiVersion
from dure.partition.stage import Stage
from dure.run.strategy import Strategy

MOMENTUM = 0.6
OPTIMIZER = f"momentum:lr={LR},momentum={MOMENTUM}"


def step(modules, velocity, gradients):
    with torch.no_grad():
        for parameter, v, gradient in zip(
            (p for m in modules for p in m.parameters()), velocity, gradients, strict=True
        ):
            v.mul_(MOMENTUM).add_(gradient)
            parameter.add_(v, alpha=-LR)


def gradients_of(stages, batches):
    """The mean gradient over mini-batches."""
    loss = sum(loss_of(stages, batch) for batch in batches) / len(batches)
    return torch.autograd.grad(loss, [p for stage in stages for p in stage.parameters()])


def sgd_on(rounds, num_stages=2):
    """SGD with momentum, one step for each group of mini-batches."""
    stages = stage_modules(num_stages)
    velocity = [torch.zeros_like(p) for stage in stages for p in stage.parameters()]
    for batches in rounds:
        step(stages, velocity, gradients_of(stages, batches))
    return flat(stages)


def trained(options, stages, steps, **rest):
    return play(f"multi-version:{options}", stages, steps=steps, optimizer=OPTIMIZER, **rest)


def versions_of(run):
    """The whole model of each version, from the stages."""
    count = run.stages[0].pipeline.versions
    return [torch.cat([s.requester.kept[f"params of version {number}"] for s in run.stages]) for number in range(count)]


@pytest.mark.parametrize("stages", [2, 3, *soaked(4)])
def test_each_version_is_sgd_on_its_own_mini_batches_bit_for_bit(stages):
    versions, steps = 2 * stages - 1, 4 * stages + 1
    run = trained("average=0", stages, steps)
    found = versions_of(run)
    assert len(found) == versions
    for number, own in enumerate(found):
        assert torch.equal(own, sgd_on(([t] for t in range(number, steps, versions)), stages))
    assert torch.allclose(run.params, torch.stack(found).mean(dim=0), rtol=0, atol=1e-15)


def test_one_version_less_is_found(monkeypatch):
    """With 2K - 2 versions the weights of a mini-batch change between its forward and its backward."""
    monkeypatch.setattr(MultiVersion, "versions", property(lambda pipeline: 2 * pipeline.stages - 2))
    found = versions_of(trained("average=0", 2, 9))
    assert len(found) == 2
    for number, own in enumerate(found):
        assert not torch.allclose(own, sgd_on([t] for t in range(number, 9, 2)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stages", [2, *soaked(3)])
def test_a_mean_after_each_round_is_data_parallelism_of_the_versions(stages):
    versions = 2 * stages - 1
    run = trained("average=1", stages, 4 * versions)
    rounds = (range(start, start + versions) for start in range(0, 4 * versions, versions))
    assert torch.allclose(run.params, sgd_on(rounds, stages), rtol=0, atol=1e-12)


def test_a_mean_of_one_stage_alone_is_found(monkeypatch):
    average = Stage.average
    monkeypatch.setattr(Stage, "average", lambda stage: average(stage) if stage.rank == 0 else None)
    rounds = (range(start, start + 3) for start in range(0, 12, 3))
    assert not torch.allclose(trained("average=1", 2, 12).params, sgd_on(rounds), rtol=0, atol=1e-6)


def test_means_after_two_rounds_are_local_sgd():
    run = trained("average=2", 2, 12)
    workers = [stage_modules(2) for _ in range(3)]
    velocities = [[torch.zeros_like(p) for stage in stages for p in stage.parameters()] for stages in workers]
    for batch in range(12):
        step(workers[batch % 3], velocities[batch % 3], gradients_of(workers[batch % 3], [batch]))
        if batch % 6 == 5:
            models = [[p.data for stage in stages for p in stage.parameters()] for stages in workers]
            for group in (zip(*models, strict=True), zip(*velocities, strict=True)):
                for same in group:
                    mean = torch.stack(same).mean(dim=0)
                    for each in same:
                        each.copy_(mean)
    assert torch.allclose(run.params, flat(workers[0]), rtol=0, atol=1e-13)


def test_one_stage_is_sgd_bit_for_bit():
    assert torch.equal(trained("average=1", 1, 5).params, sgd_on([[t] for t in range(5)], 1))


def test_counts_are_those_of_the_paper():
    run = trained("average=0", 3, 14)
    for rank, stage in enumerate(run.stages):
        assert stage.counts.staleness == {0: 14}
        assert stage.counts.most_versions == 5
        assert stage.counts.most_sets == 2 * (2 - rank) + 1


def test_versions_of_equal_data_are_equal():
    job = chain()
    job.split.samplers = lambda targets, sizes, seed: [Same() for _ in sizes]
    first, *others = versions_of(trained("average=0", 2, 9, job=job))
    for each in others:
        assert torch.equal(each, first)


class Same:
    epoch = 0.0

    def next(self):
        return torch.arange(3)

    def state(self):
        return {}

    def restore(self, state):
        pass


def test_a_checkpoint_has_all_versions():
    drained = trained("average=2", 2, 14, checkpoint_every=4)
    run = trained("average=2", 2, 14)
    assert torch.allclose(drained.params, run.params, rtol=0, atol=1e-13)  # each version has its own mini-batches


def test_a_method_that_writes_to_the_model_is_refused():
    with raising(StrategyError, "has 3"):
        Strategy.parse("averaging:period=4 multi-version:stages=2")
    with raising(ValueError, "average=-1"):
        MultiVersion(average=-1)
