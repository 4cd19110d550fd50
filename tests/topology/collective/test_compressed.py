"""Gradients that travel encoded: over collectives and to servers, in virtual time and on processes."""

import math

import pytest
import torch
from support.purposes import soaked
from support.runs import recorded
from support.wording import raising

import dure
from dure.codec.coder import SliceLayout
from dure.codec.exchange import Owner
from dure.codec.feedback import Momentum
from dure.codec.floats import Float16
from dure.codec.one_bit import OneBit
from dure.codec.sign import Sign
from dure.codec.strom import Strom
from dure.codec.ternary import Ternary
from dure.errors import StrategyError
from dure.run.strategy import Strategy
from dure.runtime.virtual.cluster import Cluster

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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("bsp collective it-sign:start=3", 3),
        *soaked(("bsp ps:shards=2 it-sign:start=3", 3), ("bsp collective strom:threshold=0.001", 3)),
        ("bmuf:period=3,momentum=0.5 collective strom:threshold=0.001", 2),  # a mean of two that are alike is exact
    ],
)
def test_both_runtimes_give_the_same_bits(strategy, workers, fork_server):
    options = {"workers": workers, "steps": 12, "lr": 0.01}
    model = dure.train("digits-mlp", strategy=strategy, on="virtual", **options).summary()
    real = recorded("digits-mlp", strategy, fork_server, **options).summary()
    assert model["params_sha256"] == real["params_sha256"]
    assert model["bytes_sent"] == real["bytes_sent"]


def test_models_that_meet_send_how_far_they_have_gone():
    """A meeting costs what a gradient does, and what comes of it is what it is without a codec, but for rounding."""
    every, fifth, whole = (run(s).summary() for s in ("bsp collective fp16", AVERAGING + "fp16", AVERAGING + "fp32"))
    assert 5 * fifth["bytes_sent"] == every["bytes_sent"]
    assert fifth["loss"] == pytest.approx(whole["loss"], rel=1e-3)
    assert fifth["params_sha256"] != whole["params_sha256"]


AVERAGING = "averaging:period=5 collective "


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", ["top-k:share=1,feedback=false", "fp16"])
def test_a_mean_is_weighted_by_batches_however_messages_go(codec):
    coded, plain = (
        run(f"bsp collective {each}", batch_sizes=(2, 4, 8, 50)).summary()["loss"] for each in (codec, "fp32")
    )
    assert coded == pytest.approx(plain, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("codec", ["1bit", "strom:threshold=0.002", "int8+ef", "top-k:share=0.02"])
def test_meeting_at_every_step_is_bsp_of_the_same_codec(codec):
    """What a step changes is the gradient times the rate: so is the threshold."""
    rate, scale = 0.0625, 16
    scaled = codec.replace("0.002", str(0.002 * scale))
    apart, together = (
        run(strategy, lr=rate).summary()
        for strategy in (f"averaging:period=1 collective {codec}", f"bsp collective {scaled}")
    )
    rounding = 1e-2 if codec == "1bit" else 1e-3  # a value of zero goes with those of one sign, and signs are turned
    assert apart["loss"] == pytest.approx(together["loss"], rel=rounding)
    assert apart["bytes_sent"] == pytest.approx(together["bytes_sent"], rel=1e-2)


def test_blocks_filter_what_was_decoded():
    """Over collectives and over servers alike: without momentum, and only one of two encodings lossy, both average."""
    for strategy in ("bmuf:period=4,momentum=0.5 collective int8+ef", "bmuf:period=4,momentum=0.5 ps:shards=2 int8+ef"):
        coded, plain = run(strategy), run(strategy.replace("int8+ef", "fp32"))
        assert coded.summary()["bytes_sent"] < 0.3 * plain.summary()["bytes_sent"]
        assert coded.summary()["loss"] == pytest.approx(plain.summary()["loss"], rel=2e-2)


VOTES = [
    "sign",
    "sign:zeros=random",
    "sign+momentum",
    "ternary",
    "it-sign:start=3",
    "it-sign:granularity=coordinate,zeros=random,start=3,forget=1",
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", VOTES)
def test_servers_vote_as_owners_of_stripes_do(codec):
    """As many shards as workers hold just the stripes; an even number of workers has even splits."""
    over = {topology: run(f"bsp {topology} {codec}", lr=0.01) for topology in ("collective", f"ps:shards={K}", "ps")}
    digests = {topology: each.summary()["params_sha256"] for topology, each in over.items()}
    assert digests["collective"] == digests[f"ps:shards={K}"]
    if codec in ("sign", "ternary", "sign+momentum"):  # others draw, or estimate, for each shard
        assert digests["ps"] == digests["collective"]
    assert over["ps"].summary()["accuracy"] > 0.8


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "strategy",
    [
        "bsp ps:shards=2 it-sign:granularity=coordinate,start=2+momentum",
        "bsp collective it-sign:start=3",
        "bsp collective 1bit",
        "bsp collective strom:threshold=0.01",
        "averaging:period=3 collective 1bit",
        "bsp ps:shards=2 strom:threshold=0.01",
    ],
)
def test_what_is_remembered_goes_on_from_a_checkpoint(tmp_path, strategy):
    """As in a run that has none: one with the same checkpoints might forget the same."""
    options = {"on": "virtual", "workers": 3, "lr": 0.01, "strategy": strategy}
    whole = dure.train("digits-mlp", steps=12, **options).summary()
    dure.train("digits-mlp", steps=7, checkpoint_every=6, out=tmp_path / "run", **options)
    resumed = dure.train("digits-mlp", on="virtual", resume=tmp_path / "run", steps=12).summary()
    assert resumed["params_sha256"] == whole["params_sha256"]


def test_who_is_absent_has_no_vote(tmp_path):
    """Of five, one dies and one is always too late: the others' majority goes on."""
    cluster = Cluster.uniform(5, events=[{"kind": "crash", "at": "40 ms", "worker": 1}])
    done = dure.train("digits-mlp", strategy="backup:backups=1 ps it-sign:start=3", on=cluster, steps=60, lr=0.01)
    assert done.summary()["failures_survived"] == 1
    assert done.summary()["accuracy"] > 0.9


def test_momentum_is_the_voters_alone():
    """Signum: the majority of the signs of their averages, which is not averaged again."""
    layout = SliceLayout.plain(3)
    for inner in (Sign(), Ternary()):
        owner, coder = Owner(Momentum(inner, beta=0.5), layout), Momentum(inner, beta=0.5).coder(layout)
        for values, average in (([1.0, 1.0, -4.0], [1, 1, -1]), ([-3.0, 1.0, -1.0], [-1, 1, -1])):
            out = torch.empty(3)
            coder.decode(owner.combine({0: coder.encode(torch.tensor(values))}), out)
            assert out.tolist() == average


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
    torch.testing.assert_close(sent + owner.state()["again residual"], combined, rtol=1e-5, atol=1e-5)


def test_momentum_is_applied_once():
    """A constant gradient of one is said by workers as 0.1, 0.19, ..., and handed on by owners as that."""
    codec, layout, out = Momentum(Sign(scaled=True)), SliceLayout.plain(8), torch.empty(8)
    owner, sender = Owner(codec, layout), codec.coder(layout)
    for step in range(1, 5):
        sender.decode(owner.combine({0: sender.encode(torch.ones(8))}), out)
        assert out.tolist() == pytest.approx([1 - 0.9**step] * 8)


def test_a_vote_of_one_is_its_own():
    layout = SliceLayout.plain(9)
    message = Sign().coder(layout).encode(torch.randn(9))
    assert torch.equal(Owner(Sign(), layout).combine({0: message}), message)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("ssp ps sign", "signs"),
        ("downpour ps it-sign", "it-sign"),
        ("averaging ps fp16", "servers"),
        ("averaging:weights=fisher collective fp16", "vectors"),
        ("bmuf:period=4,overlap=1 collective fp16", "travel"),
        ("diloco:period=4,fragments=2 collective fp16", "travel"),
        ("bmuf collective sign", "far"),
        ("averaging collective it-sign+momentum", "far"),
        ("easgd collective fp16", "collective"),
        ("ad-psgd gossip:graph=ring 1bit", "sends"),
        ("hogwild 1bit", "sends"),
        ("bsp collective sign+ef", "scaled=true"),
        ("bsp collective top-k+ef", "residual"),
        ("bsp collective fp16+ef+ef", "Leave"),
        ("bsp collective sign:scaled=true+momentum+ef", "Leave"),
        ("bsp collective strom+momentum", "momentum"),
        ("bsp collective sign:zeros=abstain", "positive"),
        ("bsp collective strom:threshold=0", "above 0"),
        ("bsp collective top-k:share=2", "most 1"),
    ],
)
def test_what_makes_no_sense_is_refused(strategy, words):
    with raising(StrategyError, words):
        Strategy.parse(strategy)


def test_gradients_that_are_no_numbers_end_the_run_before_they_are_encoded():
    with raising(dure.DureError):
        run("bsp collective 1bit", lr=1e30)


def test_a_constant_gradient_is_sent_threshold_by_threshold():
    """Strom's trap: what is above the threshold at every step piles up."""
    coder = Strom(0.5).coder(SliceLayout.plain(1))
    sent = torch.zeros(1)
    for _ in range(100):
        coder.accumulate(coder.encode(torch.tensor([2.0])), sent)
    assert sent.item() == 50
    assert coder.residual.item() == 150
