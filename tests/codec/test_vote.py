"""Majority and log-likelihood votes against brute force, closed forms and a simulated channel."""

import itertools
import math

import pytest
import torch
from support.wording import raising

from dure.codec.coder import SliceLayout
from dure.codec.sign import Sign
from dure.codec.ternary import Ternary
from dure.codec.vote import LogLikelihood, Majority
from dure.errors import DamagedMessage

M = 15


def coders(numel):
    return {"sign": Sign().coder(SliceLayout.plain(numel)), "ternary": Ternary().coder(SliceLayout.plain(numel))}


def decoded(message, coder):
    out = torch.empty(coder.numel)
    coder.decode(message, out)
    return out


def random_votes(voters, numel, seed=0, zeros=False):
    drawn = torch.randn(voters, numel, generator=torch.Generator().manual_seed(seed))
    return torch.where(drawn.abs() < 0.3, 0.0, drawn) if zeros else drawn


@pytest.mark.parametrize("voters", range(1, 17))
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
def test_the_majority_is_that_of_the_unpacked_signs(voters, numel):
    coder = coders(numel)["sign"]
    votes = random_votes(voters, numel, seed=voters)
    messages = {voter: coder.encode(vote) for voter, vote in enumerate(votes)}
    total = torch.where(votes >= 0, 1, -1).sum(0)
    assert torch.equal(decoded(Majority().decide(messages, coder), coder), torch.where(total >= 0, 1.0, -1.0))


@pytest.mark.parametrize("voters", [1, 2, 15])
def test_zeros_abstain(voters):
    coder = coders(500)["ternary"]
    votes = random_votes(voters, 500, zeros=True)
    messages = {voter: coder.encode(vote) for voter, vote in enumerate(votes)}
    expected = torch.sign(torch.sign(votes).sum(0))
    assert torch.equal(decoded(Majority().decide(messages, coder), coder), expected)


def test_a_vote_over_more_elements_than_a_block_has():
    coder = coders(300_003)["sign"]
    votes = random_votes(5, 300_003)
    messages = {voter: coder.encode(vote) for voter, vote in enumerate(votes)}
    expected = torch.where(torch.where(votes >= 0, 1, -1).sum(0) >= 0, 1.0, -1.0)
    assert torch.equal(decoded(Majority().decide(messages, coder), coder), expected)


def test_bits_beyond_the_last_element_are_no_votes():
    coder = coders(3)["sign"]
    with raising(DamagedMessage, "element"):
        Majority().decide({0: torch.tensor([255], dtype=torch.uint8)}, coder)


@pytest.mark.parametrize("kind", ["sign", "ternary"])
@pytest.mark.parametrize("granularity", ["worker", "coordinate"])
def test_equal_weights_are_the_majority(kind, granularity):
    """As long as all start, and where all are equally good."""
    coder = coders(200)[kind]
    forever = LogLikelihood(granularity, start=10**9)
    alike = LogLikelihood(granularity, start=0)
    for voter in range(M):
        shape = (200,) if granularity == "coordinate" else ()
        alike.rounds[voter], alike.seen[voter] = 1, torch.full(shape, 100.0)
        alike.wrong[voter] = torch.full(shape, 30.0)
    for seed in range(3):
        votes = random_votes(M, 200, seed, zeros=kind == "ternary")
        messages = {voter: coder.encode(vote) for voter, vote in enumerate(votes)}
        expected = Majority().decide(messages, coder)
        assert torch.equal(forever.decide(messages, coder), expected)
        if seed == 0:
            assert torch.equal(alike.decide(messages, coder), expected)


def test_the_decision_is_the_likeliest():
    """All patterns of three voters: the sign under which what was seen is most probable."""
    chances = (0.1, 0.3, 0.45)
    patterns = torch.tensor(list(itertools.product([1.0, -1.0], repeat=3))).T
    coder = coders(8)["sign"]
    vote = LogLikelihood("worker", start=0, least=1e-6)
    for voter, p in enumerate(chances):
        vote.rounds[voter], vote.seen[voter] = 1, torch.tensor(1e6 - 2)
        vote.wrong[voter] = torch.tensor(p * 1e6 - 1)
    decision = decoded(vote.decide({m: coder.encode(patterns[m]) for m in range(3)}, coder), coder)
    for column in range(8):
        likelihood = {
            sign: math.prod(1 - p if patterns[m, column] == sign else p for m, p in enumerate(chances))
            for sign in (1.0, -1.0)
        }
        assert decision[column] == max(likelihood, key=likelihood.get)


def test_half_right_has_no_influence_and_always_wrong_is_turned_around():
    coder = coders(100)["sign"]
    votes = random_votes(3, 100)

    def decide(p, third):
        vote = LogLikelihood("worker", start=0)
        for voter, chance in enumerate((0.3, 0.4, p)):
            vote.rounds[voter], vote.seen[voter] = 1, torch.tensor(9998.0)
            vote.wrong[voter] = torch.tensor(chance * 10000 - 1)
        messages = {0: coder.encode(votes[0]), 1: coder.encode(votes[1]), 2: coder.encode(third)}
        return vote.decide(messages, coder)

    assert torch.equal(decide(0.5, votes[2]), decide(0.5, -votes[2]))
    assert torch.equal(decide(0.1, votes[2]), decide(0.9, -votes[2]))
    assert not torch.equal(decide(0.1, votes[2]), decide(0.1, -votes[2]))


def test_weights_are_bounded():
    vote = LogLikelihood("worker", start=0, least=0.01)
    vote.rounds[0], vote.seen[0], vote.wrong[0] = 1, torch.tensor(1e9), torch.tensor(0.0)
    assert float(vote.weight(0)) == pytest.approx(math.log(99))


def test_an_absent_worker_keeps_what_is_known_of_it():
    coder = coders(50)["sign"]
    vote = LogLikelihood("worker", start=2)
    for round_ in range(4):
        votes = random_votes(3, 50, round_)
        vote.decide({m: coder.encode(votes[m]) for m in range(3) if m or round_ < 2}, coder)
    assert vote.rounds == {0: 2, 1: 4, 2: 4}


@pytest.mark.parametrize("granularity", ["coordinate", "worker"])
def test_what_is_known_survives_a_restart(granularity):
    coder = coders(50)["ternary"]
    whole, first, second = (LogLikelihood(granularity, start=1) for _ in range(3))
    rounds = [{m: coder.encode(v) for m, v in enumerate(random_votes(5, 50, seed, zeros=True))} for seed in range(6)]
    expected = [whole.decide(messages, coder) for messages in rounds]
    for messages in rounds[:3]:
        first.decide(messages, coder)
    second.restore(first.state())
    assert all(torch.equal(second.decide(m, coder), e) for m, e in zip(rounds[3:], expected[3:], strict=True))


def channel(profile, decide, rounds, numel=200):
    """The share of wrong signs in the last 100 rounds, where worker m's are wrong with probability `profile[m]`."""
    generator = torch.Generator().manual_seed(3)
    chances = torch.tensor(profile).unsqueeze(1)
    coder = coders(numel)["sign"]
    wrong = 0.0
    for round_ in range(rounds):
        truth = torch.where(torch.rand(numel, generator=generator) < 0.5, 1.0, -1.0)
        flips = torch.rand(len(profile), numel, generator=generator) < chances
        votes = torch.where(flips, -truth, truth)
        decision = decoded(decide({m: coder.encode(v) for m, v in enumerate(votes)}, coder), coder)
        if round_ >= rounds - 100:
            wrong += float((decision != truth).float().mean()) / 100
    return wrong


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("profile", "majority", "pooled"),
    [
        ([0.35] * 15, 0.113, 0.113),
        ([0.45] * 9 + [0.2] * 6, 0.105, 0.049),
        ([0.45] * 12 + [0.2] * 3, 0.210, 0.103),
    ],
)
def test_errors_of_votes_over_a_channel(profile, majority, pooled):
    assert channel(profile, Majority().decide, rounds=100) == pytest.approx(majority, abs=0.01)
    assert channel(profile, LogLikelihood("worker").decide, rounds=200) == pytest.approx(pooled, abs=0.01)


@pytest.mark.long
def test_one_good_worker_is_found_among_many_bad_ones():
    """As good as it is by itself, 0.15; what it was taken for under other weights has to be forgotten."""
    profile = [0.45] * 14 + [0.15]
    assert channel(profile, Majority().decide, rounds=100) == pytest.approx(0.289, abs=0.01)
    assert channel(profile, LogLikelihood("worker").decide, rounds=500) == pytest.approx(0.150, abs=0.01)
    remembering = LogLikelihood("worker", forget=1)
    assert channel(profile, remembering.decide, rounds=500) > 0.18


@pytest.mark.long
def test_reliabilities_are_estimated_without_bias():
    profile = [0.4] * 8 + [0.3] * 4 + [0.2] * 3
    vote = LogLikelihood("worker", start=10, forget=0.98)
    channel(profile, vote.decide, rounds=300, numel=1000)
    estimated = [float(vote.wrong[m] / vote.seen[m]) for m in range(len(profile))]
    assert estimated == pytest.approx(profile, abs=0.02)


def test_those_who_always_say_the_same_are_found_to_know_nothing():
    """Four beside nine: to a majority they are four votes, and they agree with each other."""
    numel, honest = 1000, [0.3] * 9
    said = {9 + m: coders(numel)["sign"].encode(torch.ones(numel)) for m in range(4)}
    vote = LogLikelihood("worker")
    alone = channel(honest, Majority().decide, rounds=100, numel=numel)
    outvoted = channel(honest, lambda messages, coder: Majority().decide(messages | said, coder), 100, numel)
    found = channel(honest, lambda messages, coder: vote.decide(messages | said, coder), 200, numel)
    assert outvoted > alone + 0.15
    assert found == pytest.approx(alone, abs=0.02)
    assert all(abs(float(vote.weight(voter))) < 0.3 for voter in said)


def test_where_nothing_is_news_all_go_on_with_equal_weights():
    coder, votes = coders(50)["ternary"], random_votes(5, 50)
    vote = LogLikelihood("worker", start=0)
    majority = decoded(Majority().decide({m: coder.encode(v) for m, v in enumerate(votes)}, coder), coder)
    assert majority.any()
    for _ in range(200):
        decision = decoded(vote.decide({m: coder.encode(v) for m, v in enumerate(votes)}, coder), coder)
    assert torch.equal(decision, majority)


@pytest.mark.long
def test_one_estimate_per_coordinate_locks_onto_one_good_worker():
    profile = [0.45] * 14 + [0.15]
    error = channel(profile, LogLikelihood("coordinate", start=50).decide, rounds=700)
    assert error == pytest.approx(0.206, abs=0.02)


def test_the_binomial_sum():
    for p, wrong in ((0.35, 0.1132), (0.45, 0.3465)):
        exact = sum(math.comb(M, k) * p**k * (1 - p) ** (M - k) for k in range(M // 2 + 1, M + 1))
        assert exact == pytest.approx(wrong, abs=1e-4)
        assert channel([p] * M, Majority().decide, rounds=100) == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("rounds", [2, 8, 30])
def test_an_error_rate_is_n_plus_1_of_t_plus_2(rounds):
    """The third worker disagrees in every round, the others never: ln((1 - p) / p) with n = t and n = 0."""
    coder, vote = coders(4)["sign"], LogLikelihood("coordinate", start=1000)
    signs = {0: torch.ones(4), 1: torch.ones(4), 2: -torch.ones(4)}
    for _ in range(rounds):
        vote.settle(signs, coder)
    vote.start = 0
    agrees = math.log((rounds + 1) / 1)
    assert [float(vote.weight(voter)[0]) for voter in signs] == pytest.approx([agrees, agrees, -agrees], rel=1e-5)


def test_an_abstention_is_neither_right_nor_wrong():
    """The third worker agrees in 4 rounds and abstains in 6: n = 0 and t = 4. The others vote in all 10."""
    coder, vote = coders(4)["ternary"], LogLikelihood("coordinate", start=1000)
    for third in [torch.ones(4)] * 4 + [torch.zeros(4)] * 6:
        vote.settle({0: torch.ones(4), 1: torch.ones(4), 2: third}, coder)
    vote.start = 0
    expected = [math.log(11 / 1), math.log(11 / 1), math.log(5 / 1)]
    assert [float(vote.weight(voter)[0]) for voter in range(3)] == pytest.approx(expected, rel=1e-5)
