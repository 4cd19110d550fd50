"""Gradients that travel encoded: over collectives and to servers, in virtual time and on processes."""

import math

import pytest
import torch

import dure
from dure.codec.coder import SliceLayout
from dure.codec.exchange import Owner
from dure.codec.floats import Float16
from dure.codec.one_bit import OneBit
from dure.codec.sign import Sign
from dure.codec.strom import Strom
from dure.errors import StrategyError, UsageError
from dure.strategy import Strategy

K, STEPS = 4, 20


def run(strategy, **options):
    return dure.train("digits-mlp", strategy=strategy, on="virtual", workers=K, steps=STEPS, **options)


def numel():
    return 64 * 64 + 64 + 64 * 10 + 10


def stripes():
    return [numel() // K + (i < numel() % K) for i in range(K)]


@pytest.mark.parametrize(("codec", "per_stripe"), [("sign", lambda n: math.ceil(n / 8)), ("fp16", lambda n: 2 * n)])
def test_each_member_sends_its_stripes_and_what_its_own_makes(codec, per_stripe):
    summary = run(f"bsp collective {codec}", lr=0.002).summary()
    assert sum(stripes()) == numel()
    sizes = [per_stripe(size) for size in stripes()]
    each = [sum(sizes) - mine + (K - 1) * mine for mine in sizes]
    assert summary["bytes_sent"] == STEPS * sum(each)
    assert summary["bytes_received"] == summary["bytes_sent"]


def test_servers_are_sent_what_is_encoded_and_send_all():
    summary = run("bsp ps:shards=2 fp16").summary()
    assert summary["bytes_sent"] == K * STEPS * 2 * numel()
    assert summary["bytes_received"] >= K * STEPS * 4 * numel()


@pytest.mark.parametrize("strategy", ["bsp collective it-sign:start=3", "bsp collective strom:threshold=0.001"])
def test_both_runtimes_give_the_same_bits(strategy):
    options = {"workers": 3, "steps": 12, "lr": 0.01}
    model, real = (
        dure.train("digits-mlp", strategy=strategy, on=on, **options).summary() for on in ("virtual", "local")
    )
    assert model["params_sha256"] == real["params_sha256"]
    assert model["bytes_sent"] == real["bytes_sent"]


def test_weights_are_shares_of_the_batch():
    owner = Owner(Float16(), SliceLayout.plain(2))
    coder = Float16().coder(SliceLayout.plain(2))
    messages = {0: coder.encode(torch.tensor([1.0, 4.0])), 1: coder.encode(torch.tensor([3.0, 0.0]))}
    out = torch.empty(2)
    coder.decode(owner.combine(messages, {0: 0.25, 1: 0.75}), out)
    assert out.tolist() == [2.5, 1.0]


def test_what_an_owner_loses_comes_later():
    """Two-stage error feedback: all that owners ever sent and their residual are all that they ever combined."""
    layout = SliceLayout(12, (0, 6, 12), (True, True))
    owner, sender = Owner(OneBit(), layout), OneBit(feedback=False).coder(layout)
    combined, sent = torch.zeros(12), torch.zeros(12)
    for values in torch.randn(10, 12, generator=torch.Generator().manual_seed(0)):
        message = sender.encode(values)
        sender.accumulate(message, combined)
        sender.accumulate(owner.combine({0: message}), sent)
    torch.testing.assert_close(sent + owner.state()["residual"], combined, rtol=1e-5, atol=1e-5)


def test_a_vote_of_one_is_its_own():
    layout = SliceLayout.plain(9)
    message = Sign().coder(layout).encode(torch.randn(9))
    assert torch.equal(Owner(Sign(), layout).combine({0: message}), message)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("bsp ps sign", "a mean of signs is no sign of the mean"),
        ("bsp ps it-sign", "bsp collective it-sign"),
        ("averaging collective fp16", "averaging over collective sends none"),
        ("ad-psgd gossip:graph=ring 1bit", "sends none"),
        ("hogwild 1bit", "sends none"),
        ("bsp collective sign+ef", "Use sign:scaled=true"),
        ("bsp collective sign:zeros=abstain", "positive or random"),
        ("bsp collective strom:threshold=0", "threshold must be above 0"),
        ("bsp collective top-k:share=2", "at most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(strategy, words):
    with pytest.raises(StrategyError, match=words):
        Strategy.parse(strategy)


def test_sizes_without_values_are_refused():
    with pytest.raises(UsageError, match="depends on them"):
        run("bsp collective strom", timing_only=True)


def test_a_user_of_ddp_is_sent_to_the_hook():
    net = torch.nn.Linear(3, 2)
    with pytest.raises(UsageError, match=r'dure.hook\("1bit:feedback=true"\)'):
        dure.attach(net, torch.optim.SGD(net.parameters(), lr=0.1), sync="bsp", codec="1bit")


def test_gradients_that_are_no_numbers_end_the_run_before_they_are_encoded():
    with pytest.raises(dure.DureError, match=r"loss became|NaN or infinity"):
        run("bsp collective 1bit", lr=1e30)


def test_a_constant_gradient_is_sent_threshold_by_threshold():
    """Strom's trap: what is above the threshold at every step piles up."""
    coder = Strom(0.5).coder(SliceLayout.plain(1))
    sent = torch.zeros(1)
    for _ in range(100):
        coder.accumulate(coder.encode(torch.tensor([2.0])), sent)
    assert sent.item() == 50
    assert coder.residual.item() == 150
