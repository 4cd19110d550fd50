"""Features Replay against its recursion, written from the paper's equations as plain loops."""

import copy
import weakref

import pytest
import torch
from support.chains import LR, chain, drained, flat, free_network, play, samples, stage_modules, with_dropout
from support.wording import raising
from torch.nn.functional import mse_loss

import dure

STEPS = 9


def recursion(num_stages, segments):
    """Iteration t: each stage goes forward with x(t), then replays sample s = t - K + k and steps."""
    now = stage_modules(num_stages)
    inputs, errors = {}, {}
    for batches in segments:
        for t in range(batches.start, batches.stop + num_stages - 1):
            value = samples(t)[0]
            for k, module in enumerate(now if t in batches else []):
                inputs[t, k] = value
                value = module(value).detach()
            sent = dict(errors)  # module k uses what module k + 1 found in iteration t - 1
            for k, module in enumerate(now):
                s = t - (num_stages - 1 - k)
                if s in batches:
                    *gradients, errors[s, k - 1] = replayed(module, inputs.pop((s, k)), s, sent.get((s, k)))
                    with torch.no_grad():
                        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                            parameter.add_(gradient, alpha=-LR)
    assert not inputs
    return flat(now)


def replayed(module, inputs, sample, error):
    """The gradients of the parameters and of the inputs: from the loss where there is no error of the next module."""
    inputs.requires_grad_()
    found = module(inputs)
    scalar = mse_loss(found, samples(sample)[1]) if error is None else (found * error).sum()
    return torch.autograd.grad(scalar, [*module.parameters(), inputs])


@pytest.mark.parametrize(("num_stages", "every"), [(1, 0), (2, 0), (4, 0), (4, 5)])
def test_the_run_follows_the_recursion_bit_for_bit(num_stages, every):
    run = play("features-replay", num_stages, checkpoint_every=every or None)
    assert torch.equal(run.params, recursion(num_stages, drained(STEPS, every)))


def test_over_servers_both_passes_read_the_newest_weights():
    assert torch.equal(play("features-replay", 3, sync="bsp ps").params, recursion(3, drained(STEPS, 0)))


def test_the_trajectory_is_its_own():
    run = play("features-replay", 4)
    for other in ("ddg", "ddg:weights=current"):
        assert not torch.allclose(run.params, play(other, 4).params, rtol=0, atol=1e-5)


@pytest.mark.parametrize("module", [None, with_dropout])
def test_without_steps_it_is_ddg_and_a_replay_draws_the_mask_of_the_forward(module):
    job = None if module is None else chain(module)
    run, ddg = (play(name, 4, lr=0.0, job=job) for name in ("features-replay", "ddg"))
    for rank in range(4):
        assert all(map(torch.equal, run.gradients[rank], ddg.gradients[rank]))
    if module is not None:
        assert not torch.equal(run.gradients[0][0], run.gradients[0][7])  # the same samples, other masks


def graphs_of(num_stages):
    """The number of tensors that a graph of each stage keeps."""
    value, found = samples(0)[0], []
    for k, stage in enumerate(copy.deepcopy(stage_modules(num_stages))):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda each, kept=kept: kept.append(each), lambda each: each):
            value = stage(value.detach().requires_grad_(k > 0))
            if k == num_stages - 1:
                mse_loss(value, samples(0)[1]) * 1.0
        found.append(len(kept))
    return found


class Kept:
    def __init__(self, tensor):
        self.tensor = tensor


def most_kept(strategy, num_stages):
    """The largest number of tensors that all graphs of a run kept at once."""
    live, most = weakref.WeakSet(), 0

    def pack(tensor):
        nonlocal most
        live.add(kept := Kept(tensor.detach()))  # an output refers to its graph
        most = max(most, len(live))
        return kept

    during = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor)
    return play(strategy, num_stages, during=during), most


def seconds_of_a_forward(num_stages):
    """Of an average stage of the chain, on a free network."""
    whole = play("gpipe:micro=1", 1, cluster=free_network(1)).finished.seconds / STEPS
    return whole / 2 / num_stages


def test_no_graph_is_kept_but_that_of_the_replay():
    graphs = graphs_of(4)
    run, most = most_kept("features-replay", 4)
    assert most == sum(graphs)  # one at each worker
    assert [stage.counts.most_sets for stage in run.stages] == [4, 3, 2, 1]  # inputs
    assert [stage.counts.most_versions for stage in run.stages] == [1, 1, 1, 1]
    _, most = most_kept("ddg", 4)
    assert most == sum((4 - k) * graph for k, graph in enumerate(graphs))


def test_a_mini_batch_takes_one_more_forward_in_the_steady_state():
    """Closed forms at f = b and a free network: the last stage never waits once the first mini-batch has reached it."""
    tick = seconds_of_a_forward(4)
    replayed, ddg = (play(name, 4, cluster=free_network(4)).finished.seconds for name in ("features-replay", "ddg"))
    assert ddg == pytest.approx(tick * (3 + 2 * STEPS + 3), rel=1e-9)
    assert replayed == pytest.approx(tick * (3 + 3 * STEPS + 3), rel=1e-9)  # others replay while they wait


def test_features_replay_without_a_replay_is_refused():
    with raising(ValueError, "remat=false"):
        dure.FeaturesReplay(remat=False)
