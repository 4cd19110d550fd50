"""DNI against its recursion, written from the paper's equations as plain loops, and against back-propagation."""

from dataclasses import replace

import pytest
import torch
from support.chains import BATCH, LR, WIDTH, chain, flat, free_network, linear, play, samples, stage_modules
from support.runs import resolved, virtual
from support.wording import raising
from torch import nn
from torch.nn.functional import mse_loss

import dure
from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.models.mlp import digits_mlp
from dure.job.replica import Replica
from dure.partition.layout import StageLayout
from dure.partition.methods.dni import DNI
from dure.partition.synthesizer import Labels, Synthesizer

STEPS = 9
RATE = 0.3


def linear_synthesizer(width_in):
    made = nn.Linear(width_in, WIDTH).double()
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def recursion(num_stages, steps, *, labels, optimizer, every=0):
    """All modules in turn for each mini-batch: none has stale weights."""
    stages = stage_modules(num_stages)
    nets = [linear_synthesizer(WIDTH * (2 if labels else 1)) for _ in stages[:-1]]
    optimizers = [getattr(torch.optim, optimizer)(net.parameters(), lr=RATE) for net in nets]
    waiting = []

    def learn():
        for net, each, (features, target) in zip(nets, optimizers, waiting.pop(0), strict=True):
            each.zero_grad()
            scale = 1 + features.square().sum(dim=1).mean()
            ((net(features) - BATCH * target).square().sum(dim=1).mean() / scale).backward()
            each.step()

    for t in range(steps):
        value, targets = samples(t)
        seen, found = [], []
        for k, stage in enumerate(stages):
            value = value.detach().requires_grad_(k > 0)
            outputs = stage(value)
            wanted = [*stage.parameters(), *([value] if k else [])]
            if k == num_stages - 1:
                gradients = torch.autograd.grad(mse_loss(outputs, targets), wanted)
            else:
                features = torch.cat([outputs.detach(), *([targets] if labels else [])], dim=1)
                seen.append(features)
                gradients = torch.autograd.grad(outputs, wanted, nets[k](features).detach() / BATCH)
            if k:
                *gradients, target = gradients
                found.append(target)
            with torch.no_grad():
                for parameter, gradient in zip(stage.parameters(), gradients, strict=True):
                    parameter.add_(gradient, alpha=-LR)
            value = outputs
        waiting.append(list(zip(seen, found, strict=True)))
        if len(waiting) == 2:
            learn()
        if t + 1 == steps or (every and (t + 1) % every == 0):
            learn()
    return flat(stages), [torch.cat([net.weight.detach().flatten(), net.bias.detach()]) for net in nets]


@pytest.mark.parametrize(("labels", "optimizer", "every"), [(False, "SGD", 0), (True, "Adam", 0), (True, "Adam", 4)])
def test_the_run_follows_the_recursion_through_checkpoints(labels, optimizer, every):
    text = f"dni:rate={RATE},labels={str(labels).lower()},optimizer={optimizer.lower()}"
    run = play(text, 4, checkpoint_every=every or None)
    stages, nets = recursion(4, STEPS, labels=labels, optimizer=optimizer, every=every)
    assert torch.allclose(run.params, stages, rtol=0, atol=1e-13)
    for stage, net in zip(run.stages, nets, strict=False):
        assert torch.allclose(stage.requester.kept["synthesizer.values"], net, rtol=0, atol=1e-13)
    assert "synthesizer.values" not in run.stages[-1].requester.kept


def trained(num_stages, steps):
    """Plain SGD; the gradients of the outputs of each stage but the last, and the stages at the end."""
    stages, found = stage_modules(num_stages), []
    for t in range(steps):
        value, targets = samples(t)
        outputs = []
        for stage in stages:
            value = stage(value)
            outputs.append(value)
        loss = mse_loss(value, targets)
        parameters = [each for stage in stages for each in stage.parameters()]
        gradients = torch.autograd.grad(loss, [*outputs[:-1], *parameters])
        found.append(gradients[: num_stages - 1])
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients[num_stages - 1 :], strict=True):
                parameter.add_(gradient, alpha=-LR)
    return found, flat(stages)


class Planted:
    """Gives the true gradients of one stage in the order of the mini-batches, and keeps the targets."""

    def __init__(self, gradients):
        self.left, self.targets = iter(gradients), []

    def predict(self, outputs, targets):
        return [next(self.left)]

    def learn(self, gradients):
        self.targets += [each.clone() for each in gradients]


def test_with_true_gradients_it_is_sgd_bit_for_bit(monkeypatch):
    true, params = trained(4, STEPS)
    planted = [Planted([of_stages[k] for of_stages in true]) for k in range(3)]
    monkeypatch.setattr(DNI, "synthesizer", lambda self, stage: planted[stage.rank])
    assert torch.equal(play("dni", 4).params, params)
    for k, each in enumerate(planted):
        assert all(map(torch.equal, each.targets, [of_stages[k] for of_stages in true]))
        assert len(each.targets) == STEPS  # the target of the last mini-batch too


def test_one_module_is_sgd_bit_for_bit():
    assert torch.equal(play("dni", 1).params, trained(1, STEPS)[1])


def test_with_frozen_synthesizers_only_the_last_module_moves():
    run = play("dni:rate=0", 3)
    stages = stage_modules(3)
    before = flat(stages[:2])
    assert torch.equal(run.params[: len(before)], before)
    for t in range(STEPS):
        inputs, targets = samples(t)
        parameters = list(stages[2].parameters())
        hidden = stages[1](stages[0](inputs)).detach()
        gradients = torch.autograd.grad(mse_loss(stages[2](hidden), targets), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=-LR)
    assert torch.equal(run.params, flat(stages))


def errors(labels, steps):
    """The relative errors of the last gradients of the modules before the last, whose weights do not move."""
    text = f"dni:labels={str(labels).lower()},optimizer=sgd,rate={RATE}"
    run = play(text, 3, job=chain(linear), lr=0.0, steps=steps)
    stages = stage_modules(3, module=linear)
    inputs, targets = samples(steps - 1)
    loss = mse_loss(nn.Sequential(*stages)(inputs), targets)
    exact = [flat_gradient(loss, stage) for stage in stages[:-1]]
    return [float((run.gradients[k][-1] - each).norm() / each.norm()) for k, each in enumerate(exact)]


def flat_gradient(loss, stage):
    found = torch.autograd.grad(loss, list(stage.parameters()), retain_graph=True)
    return torch.cat([each.flatten() for each in found])


@pytest.mark.long
def test_synthesizers_with_labels_learn_the_gradients_of_a_linear_chain():
    """The gradient of a quadratic loss is affine in (h, y), so a linear synthesizer can become exact; without y not."""
    assert max(errors(True, 500)) < 1e-2
    assert min(errors(False, 200)) > 0.3


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_mini_batch_takes_the_time_of_one_module_and_its_synthesizer(num_stages):
    """At f = b and a free network: N (f + b + 3 s) at stage K - 1, which h_{K-2} of the first mini-batch reaches.

    A synthesizer has the operations of one of the four layers; it goes forward twice and backward once.
    """
    run = play("dni:labels=false", num_stages, cluster=free_network(num_stages))
    layer = play("gpipe:micro=1", 1, cluster=free_network(1)).finished.seconds / STEPS / 8
    f = 4 / num_stages
    assert run.finished.seconds == pytest.approx(layer * (STEPS * (2 * f + 3) + (num_stages - 2) * f), rel=1e-9)


def test_a_run_without_tensors_takes_as_long():
    timed = play("dni:hidden=1", 3, timing_only=True)
    assert timed.finished.seconds == play("dni:hidden=1", 3).finished.seconds


def test_a_resumed_run_goes_on_with_the_synthesizers(tmp_path):
    options = {"on": "virtual", "partition": "dni:stages=2,hidden=1", "workers": 2, "checkpoint_every": 4}
    whole = dure.train("digits-mlp", steps=12, out=tmp_path / "whole", **options)
    dure.train("digits-mlp", steps=8, out=tmp_path / "part", **options)
    resumed = dure.train("digits-mlp", resume=tmp_path / "part", steps=12)
    assert resumed.figures["params_sha256"] == whole.figures["params_sha256"]


def test_weights_are_never_stale_and_one_graph_is_kept():
    for stage in play("dni", 4).stages:
        assert stage.counts.staleness == {0: STEPS}
        assert (stage.counts.most_sets, stage.counts.most_versions) == (1, 1)


class Branches(nn.Module):
    """Gives two tensors that train and a mask that does not."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.left(x), (x > 0).long(), self.right(x).unsqueeze(1)


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, WIDTH)

    def forward(self, left, mask, right):
        return self.head(torch.cat([left, right.squeeze(1)], dim=1)) * mask


class Branched(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Branches().double(), Joined().double()

    def forward(self, x):
        return self.second(*self.first(x))


def test_one_synthesizer_predicts_the_gradients_of_all_tensors_of_a_border(monkeypatch):
    """Against SGD with the gradients that the synthesizer predicted, tensor by tensor."""
    seen, predict = [], Synthesizer.predict

    def recording(self, outputs, targets):
        seen.append(predict(self, outputs, targets))
        return seen[-1]

    monkeypatch.setattr(Synthesizer, "predict", recording)
    options = {"workers": 2, "dtype": "float64", "steps": 4}
    job = replace(chain(Branched), stages=lambda model: [model.first, model.second])
    found = virtual(job, "bsp dni:stages=2,cuts=1,rate=0.5", **options).params
    module = job.build(0)
    first, second = module.first, module.second
    for t, predicted in enumerate(seen):
        inputs, targets = samples(t)
        left, mask, right = first(inputs)
        assert [each.shape for each in predicted] == [left.shape, right.shape]
        of_first = torch.autograd.grad([left, right], list(first.parameters()), predicted)
        loss = mse_loss(second(left.detach(), mask, right.detach()), targets)
        of_second = torch.autograd.grad(loss, list(second.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(
                [*first.parameters(), *second.parameters()], [*of_first, *of_second], strict=True
            ):
                parameter.add_(gradient, alpha=-LR)
    assert any(each.any() for each in seen[-1])
    assert torch.equal(found, flat([first, second]))


class Turned(nn.Module):
    def forward(self, x):
        return x.T


def test_a_border_without_a_row_for_each_sample_is_refused():
    job = chain(lambda: nn.Sequential(nn.Linear(WIDTH, 4), Turned(), Turned(), nn.Linear(4, WIDTH)).double())
    with raising(UsageError, "of 3"):
        virtual(job, "bsp dni:stages=2,cuts=2", workers=2, steps=1, dtype="float64")


def test_targets_that_are_no_features_are_refused():
    job = chain()
    job.train = Data(job.train.inputs, {"a": job.train.targets, "b": job.train.targets})
    with raising(UsageError, "labels=false"):
        Labels(layout(job))


def layout(job):
    return StageLayout(job, DNI(stages=2), Replica(job.build(0)))


def test_classes_are_read_as_one_hot_vectors():
    labels = Labels(layout(digits_mlp()))
    assert labels.width == 10
    expected = torch.eye(10, dtype=torch.float64)[[2, 9, 0]]
    expected[2] = 0
    assert torch.equal(labels.encoded(torch.tensor([2, 9, -100]), torch.zeros(0, dtype=torch.float64)), expected)


def summed(column, *behind):
    """The chain, whose outputs have one column, with the sum of the inputs as the target of each sample."""
    job = chain(lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1), *behind).double())
    totals = job.train.inputs.sum(1, keepdim=column)
    job.train = Data(job.train.inputs, totals)
    return virtual(job, "bsp dni:stages=2", workers=2, steps=STEPS, dtype="float64")


def test_a_number_per_sample_trains_as_a_column_of_one():
    assert torch.equal(summed(False, nn.Flatten(0)).params, summed(True).params)


def test_targets_are_refused_before_the_run():
    job = chain()
    job.train = Data(job.train.inputs, (job.train.targets, job.train.targets))
    job.loss = lambda outputs, targets: mse_loss(outputs, targets[0])
    with raising(UsageError, "labels=false"):
        resolved(job, "bsp dni:stages=2", on="virtual", workers=2, dtype="float64")


def test_classes_without_a_column_each_are_refused():
    job = digits_mlp()
    job.model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Linear(4, 1), nn.Flatten(0))
    with raising(UsageError, "outputs"):
        Labels(layout(job))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"remat": True}, "forward"),
        ({"hidden": -1}, "layers"),
        ({"rate": float("inf")}, "number"),
    ],
)
def test_parameters_out_of_range_are_refused(given, says):
    with raising(ValueError, says):
        DNI(**given)
