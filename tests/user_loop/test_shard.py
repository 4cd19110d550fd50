"""`dure.attach(..., shard="zero:stage=1|2")`: ranks of a real torchrun that hold parts of optimizer and gradient."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import sharded
from support.wording import raising
from torch import nn

import dure
from dure.core.shards import SLICES_AT_ONCE
from dure.errors import StrategyError, UsageError
from dure.job.overlap import cut
from dure.job.replica import Replica

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.xdist_group("shard"), pytest.mark.timeout(400)]

STAGES = sharded.STAGES
SHORT = ("equal", "unequal", "norms", "memory", "discarded", "nan")
LONG = ("equal_too", "clipped", "clips_without_backward", "accumulated", "quarantined", "resumed", "refused")
LONG_TOO = ("two_models", "stops")
OF_THREE = ("equal", "equal_too", "clipped", "nan")


def torchrun(folder, *cases, ranks=2):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*module, sharded.__file__, str(folder), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, request):
    """The results of the cases at both ranks; without the long ones in `make test`."""
    parts = [SHORT] if "not long" in request.config.option.markexpr else [SHORT, LONG, LONG_TOO]
    gave = [{}, {}]
    for part in parts:
        for rank, found in zip(gave, torchrun(tmp_path_factory.mktemp("sharded"), *part), strict=True):
            rank |= found
    return gave


def distance(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


# ---- the result


def check_equal(ranks, rule):
    """Bits of `attach` without shards, which are those of DistributedDataParallel."""
    for number, rank in enumerate(ranks):
        (bits, values), mean = rank[f"{rule} None"]
        for other in STAGES:
            assert rank[f"{rule} {other}"] == [[bits, values], mean]
        ddp = rank[f"{rule} ddp"]
        assert ddp[0] == [bits, values]
        assert number or ddp[1] == mean  # the other ranks get the buffers before the next forward
    assert ranks[0][f"{rule} None"] == ranks[1][f"{rule} None"]


def test_two_ranks_with_shards_have_the_bits_of_two_without(ranks):
    check_equal([rank["equal"] for rank in ranks], "adamw")


def test_ranks_with_shards_count_by_their_batch_size(ranks):
    for rank in ranks:
        whole, *others = rank["unequal"]
        assert others == [whole, whole]


@pytest.mark.long
@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_two_ranks_with_shards_have_the_bits_of_two_without_by_each_rule(ranks, rule):
    check_equal([rank["equal_too"] for rank in ranks], rule)


@pytest.mark.long
def test_three_ranks_are_close_and_alike(tmp_path):
    ranks = torchrun(tmp_path, *OF_THREE, ranks=3)
    for rank in ranks:
        for stage in STAGES:
            for other in ("None", "ddp"):
                assert distance(rank["clipped"][stage], rank["clipped"][other]) < 1e-6
                for rule in sharded.RULES:
                    found = rank["equal"] | rank["equal_too"]
                    assert distance(found[f"{rule} {stage}"][0][1], found[f"{rule} {other}"][0][1]) < 1e-6
            assert rank["equal"][f"adamw {stage}"] == ranks[0]["equal"][f"adamw {stage}"]
            assert rank["nan"][stage] == ranks[0]["nan"][stage]


def test_clipping_is_by_the_norm_of_the_whole_mean(ranks):
    for rank in ranks:
        whole = rank["norms"]["None"]
        for stage in STAGES:
            for (before, after), (wanted, _) in zip(rank["norms"][stage], whole, strict=True):
                assert before == pytest.approx(wanted, rel=3e-5)  # a sum of 640,000 squares in float32
                assert after == pytest.approx(0.1, rel=1e-5)
        assert all(before > 0.2 for before, _ in whole)
        assert rank["norms"]["zero:stage=1"] == ranks[0]["norms"]["zero:stage=2"]


@pytest.mark.long
@pytest.mark.parametrize("case", ["clipped", "clips_without_backward"])
def test_a_clipped_training_is_that_without_shards(ranks, case):
    for rank in ranks:
        for values in rank[case].values():
            assert distance(values, rank[case]["None"]) < 1e-6
        assert rank[case]["zero:stage=2"] == ranks[0][case]["zero:stage=1"]


@pytest.mark.parametrize("case", ["discarded", pytest.param("accumulated", marks=pytest.mark.long)])
def test_gradients_gather_and_are_discarded_as_without_shards(ranks, case):
    for rank in ranks:
        assert [*rank[case]] == ["None", *STAGES]
        assert rank[case][STAGES[0]] == rank[case][STAGES[1]] == rank[case]["None"]


@pytest.mark.long
def test_a_second_model_is_trained_beside_one_with_shards(ranks):
    assert ranks[0]["two_models"][0] == ranks[0]["two_models"][1] == ranks[1]["two_models"][0]


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_both_end_with_the_first_that_has_no_more_work(ranks, stage):
    (one, model, sent), (other, same, _) = (rank["stops"][stage] for rank in ranks)
    assert (one, other) == (2, 2)
    assert model == same
    # The model of rank 0 at first, half of it in each gather, half of the gradient in each backward.
    assert sent == pytest.approx(1 + 2 * 0.5 + 3 * 0.5, rel=0.01)


# ---- memory


@pytest.mark.parametrize("stage", STAGES)
def test_memory_is_that_of_a_part(ranks, stage):
    net = nn.Sequential(*(nn.Linear(640, 640, bias=False) for _ in range(40)))
    replica = Replica(net)
    largest = 4 * max(stop - start for start, stop in cut(replica))
    for rank in ranks:
        found = rank["memory"][stage]
        params = found["params"]
        assert params == replica.params.nbytes
        assert found["state"] == params  # two vectors of AdamW, half of each
        assert found["users"] == 0, "the user's optimizer has no state"
        assert found["after"] == 0, "no parameter has a gradient between backward and step"
        # The own part; of each slice under way the parts of others, and with stage 2 the slice itself and the next. The
        # engine's threads may hold what has ended for a moment more.
        slices = 2 * SLICES_AT_ONCE + 5 if stage == "zero:stage=2" else SLICES_AT_ONCE + 4
        assert params / 2 < found["peak"] <= params / 2 + slices * largest
        assert found["kept"] == (4 if stage == "zero:stage=2" else params)
        assert slices * largest < 0.7 * params, "slices that are not freed would be found"


# ---- gradients that are not finite


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_with_nan_at_one_rank_skips_the_step_of_all(ranks, stage):
    for rank in ranks:
        first, second, third = rank["nan"][stage]
        assert first == second
        assert second != third
        assert rank["nan"][stage] == rank["nan"]["None"] == ranks[0]["nan"][stage]


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_the_third_in_a_row_names_the_rank(ranks, stage):
    for rank in ranks:
        assert rank["quarantined"][stage].startswith("Quarantined: the gradients of Net")
        assert "at rank 1 hold NaN or infinity in 3 steps in a row" in rank["quarantined"][stage]


# ---- save and resume


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_saves_its_part_and_goes_on_exactly(ranks, stage):
    for rank in ranks:
        unbroken, resumed, numels, whole = rank["resumed"][stage]
        assert unbroken == resumed
        assert all(numel < 0.51 * whole for numel in numels)


# ---- mistakes

SAID = {
    "clip": "write replica.clip_grad_norm_(1.0) in place of clip_grad_norm_",
    "clip_value": "each rank has a part",
    "norm": "each rank has a part",
    "backward": "Call backward() once before replica.step()",
    "closure": "Call backward() once before replica.step()",
    "optimizer": "Write replica.step() in its place",
    "scaler": "dtype=torch.bfloat16), which needs no scaler",
    "group": "On the shards of the ranks only the rate may change",
    "state": "load what replica.state_dict() gave at each rank",
}


@pytest.mark.long
@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("stage", STAGES)
def test_a_use_of_a_gradient_that_is_scattered_is_refused(ranks, stage, name):
    for rank in ranks:
        said = rank["refused"][stage][name]
        assert said.startswith("UsageError")
        assert SAID[name] in said


def attached(kind=torch.optim.SGD, net=None, **options):
    net = net or nn.Linear(3, 1)
    return dure.attach(net, kind(net.parameters(), lr=0.1), **{"sync": "bsp", "shard": "zero:stage=1"} | options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"shard": "zero:stage=3"}, "whole at every rank"),
        ({"shard": "zero:stage=4"}, "stage"),
        ({"shard": "zero:stage=1,within=2"}, "over all ranks"),
        ({"shard": "tensor:ways=2"}, "shard is"),
        ({"shard": "stage=2"}, "stage"),
        ({"shard": None, "partition": "zero:stage=2"}, 'write shard="zero:stage=2"'),
        ({"sync": "averaging:period=4"}, "replicas differ"),
        ({"sync": "ssp"}, "does not run over"),
        ({"topology": "ps"}, "does not run over"),
        ({"topology": "collective:algorithm=ring"}, "does not run over"),
        ({"codec": "int8"}, "does not encode"),
    ],
)
def test_shards_that_a_loop_cannot_have_are_refused(options, text):
    with raising((UsageError, StrategyError), text):
        attached(**options)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (torch.optim.RMSprop, "RMSprop does not"),
        (lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True), "amsgrad=True"),
        (lambda p, lr: torch.optim.SGD(p, lr=lr, maximize=True), "maximize=True"),
    ],
)
def test_an_optimizer_without_a_rule_for_a_part_is_refused(kind, text):
    with raising(UsageError, text):
        attached(kind)


def test_one_rank_has_all_parts():
    """Also where it clips by PyTorch's own function, as no gradient is scattered."""
    torch.manual_seed(0)
    nets = [nn.Linear(3, 1) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    plain = torch.optim.AdamW(nets[0].parameters(), lr=0.1)
    replica = attached(torch.optim.AdamW, nets[1], shard="zero:stage=2")
    for x in torch.randn(4, 5, 3):
        for net in nets:
            net(x).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        replica.step()
    replica.close()
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.allclose(one, other, atol=1e-7)
    assert not replica.optimizer.state


def test_a_parameter_without_a_gradient_decays_as_one_whose_gradient_is_zero():
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    before = net[1].weight.detach().clone()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    with dure.attach(net, optimizer, sync="bsp", shard="zero:stage=1") as replica:
        for x in torch.randn(2, 5, 3):
            net[0](x).square().mean().backward()
            replica.step()
    assert torch.allclose(net[1].weight, before * 0.95**2)
