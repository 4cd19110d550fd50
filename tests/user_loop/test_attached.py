"""`dure.attach`: a user's own loop, alone in this process and at two ranks of a real torchrun."""

import copy
import functools
import inspect
import itertools
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from support import attached
from support.purposes import soaked
from support.wording import raising
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import dure
from dure.errors import Quarantined, ReplicaError, StrategyError, UsageError
from dure.job.data import load_digits
from dure.job.optimizer import OptimizerSpec
from dure.job.replica import Replica
from dure.run.config import TrainConfig
from dure.run.launchers.torchrun import after_restart
from dure.runtime.launch.rendezvous import RankEnvironment, announced, place
from dure.runtime.memory import SHARD_PROCESS_NBYTES, check_memory
from dure.user_loop.optimizer import FlatRule

ROOT = Path(__file__).parents[2]
# One process runs them all, since they share what two torchruns gave: time enough for both.
pytestmark = [pytest.mark.xdist_group("attach"), pytest.mark.timeout(400)]

TORCHRUN = Path(sys.executable).with_name("torchrun")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def torchrun(*arguments, timeout=180):
    """Two ranks. The command has a port of its own, so that other runs on this machine are left alone."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *map(str, arguments),
    ]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, request):
    """The results of the cases of `support/attached.py`, by rank; without the long ones in `make test`."""
    cases = sorted(name.removeprefix("case_") for name in vars(attached) if name.startswith("case_"))
    if "not long" in request.config.option.markexpr:
        parts = [[name for name in cases if name not in attached.LONG]]
    else:
        parts = [cases[::2], cases[1::2]]  # each call within its time on a busy machine
    gave = [{}, {}]
    for number, some in enumerate(parts):
        folder = tmp_path_factory.mktemp(f"attached-{number}")
        done = torchrun(attached.__file__, folder, *some)
        assert done.returncode == 0, done.stderr[-4000:]
        for rank in (0, 1):
            gave[rank] |= json.loads((folder / f"{rank}.json").read_text())
    return gave


def plain(make=None, schedule=None, steps=9, clip=None):
    """PyTorch alone, with the whole of every batch."""
    module = attached.model(0)
    optimizer = make(module) if make else torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = schedule(optimizer) if schedule else None
    for batch in attached.batches(steps):
        optimizer.zero_grad()
        attached.loss_of(module, batch).backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return attached.flat(module)


def distance(one, other):
    return (torch.tensor(one) - torch.tensor(other)).abs().max().item()


def close(one, other):
    return distance(one, other) < 1e-6


def with_long(case, quick, long):
    """The parameters of a test of `case`, and of the case of its `long` ones."""
    return [
        *((case, each) for each in quick),
        *(pytest.param(f"{case}_too", each, marks=pytest.mark.long) for each in long),
    ]


# ---- two ranks


@pytest.mark.parametrize("strategy", attached.SKIPPING)
def test_a_step_that_all_ranks_skip_moves_nothing(ranks, strategy):
    for rank in ranks:
        before, skipped, after, clock = rank["skipped"][strategy]
        assert skipped == before
        assert distance(after, skipped) > 1e-4, "one rank gave a gradient"
        assert clock == 5
    assert ranks[0]["skipped"][strategy] == ranks[1]["skipped"][strategy]


@pytest.mark.parametrize("strategy", attached.OVERFLOWING)
def test_an_overflow_at_one_rank_skips_the_step_of_both_and_lowers_both_scales(ranks, strategy):
    one, other = (rank["overflow"][strategy] for rank in ranks)
    for rank in (one, other):
        assert rank["scales"] == [1024, 2048, 2048, 1024, 1024, 2048]  # a scale grows after two good steps
        assert rank["unmoved"] == [False, False, False, True, False, False]
        assert rank["clock"] == 6
    assert one["model"] == other["model"]


@pytest.mark.parametrize("strategy", attached.WHOLE)
def test_two_ranks_are_one_with_the_whole_batch(ranks, strategy):
    for rank in ranks:
        assert close(rank["means"][strategy], plain())
    assert ranks[0]["means"][strategy] == ranks[1]["means"][strategy]


def plainly_adversarial(steps=6):
    models = attached.adversaries()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in models]
    return attached.compete([(each, optimizer.step) for each, optimizer in zip(models, optimizers, strict=True)], steps)


@pytest.mark.long
@pytest.mark.parametrize("strategy", attached.ADVERSARIAL)
def test_two_attached_models_whose_losses_pass_through_each_other_are_one_process(ranks, strategy):
    """The generator's backward leaves a gradient in the discriminator, in the last step too: it is in no step."""
    for rank in ranks:
        for found, wanted in zip(rank["adversaries"][strategy], plainly_adversarial(), strict=True):
            assert close(found, wanted)


@pytest.mark.parametrize("strategy", ["bsp", "averaging:period=1"])
def test_two_attached_models_alone_are_plain_pytorch_bit_for_bit(strategy):
    assert attached.two_attached(strategy) == plainly_adversarial()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["bsp", "bsp ps"])
def test_groups_and_schedules_reach_whoever_steps(ranks, strategy):
    make = functools.partial(attached.groups, momentum=0.9, nesterov=True)
    wanted = plain(make, attached.halving)
    assert distance(wanted, plain(make)) > 1e-2  # the schedule matters
    assert distance(wanted, plain(schedule=attached.halving)) > 1e-2  # so do the groups
    assert close(ranks[0]["groups"][strategy], wanted)


@pytest.mark.long
@pytest.mark.parametrize("strategy", attached.LEARNING)
def test_every_rank_gets_a_model_that_has_learned(ranks, strategy):
    (accuracy, params), (_, same) = (rank["learns"][strategy] for rank in ranks)
    assert accuracy > 0.9
    assert params == same


@pytest.mark.long
@pytest.mark.parametrize("strategy", attached.ALL)
def test_uneven_loaders_end(ranks, strategy):
    longer, shorter = (rank["uneven"][strategy] for rank in ranks)
    over_server = strategy.endswith("ps") or strategy.split(":")[0] in ("downpour", "ssp")
    assert shorter["clock"] == 6
    assert shorter["going"] == [True] * 6
    assert longer["clock"] == (10 if over_server else 6)
    assert longer["going"] == ([True] * 10 if over_server else [True] * 6 + [False] * 4)
    assert longer["params"] == shorter["params"]


@pytest.mark.long
def test_what_is_left_over_changes_nothing(ranks):
    assert ranks[0]["uneven"]["bsp"]["params"] == ranks[0]["uneven_whole"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", attached.ALL)
def test_running_statistics_are_merged(ranks, strategy):
    longer, shorter = (rank["uneven"][strategy] for rank in ranks)
    assert longer["merged"] == shorter["merged"]
    assert longer["batches"] == shorter["batches"] >= 6
    if strategy == "downpour":
        assert longer["own"] != shorter["own"]
        assert close(longer["merged"], ((torch.tensor(longer["own"]) + torch.tensor(shorter["own"])) / 2).tolist())


@pytest.mark.long
@pytest.mark.parametrize("strategy", attached.PINNED)
def test_what_is_frozen_starts_from_rank_0_too(ranks, strategy):
    first, second = (rank["constants"][strategy] for rank in ranks)
    assert first["before"] != second["before"]
    assert second["inside"] == second["after"] == first["inside"] == first["after"] == first["before"]
    assert first["head"] == second["head"]


def plainly_in_channels_last():
    """A model of PyTorch alone after six steps, and the strides of its parameters and gradients."""
    module = attached.images()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for batch in attached.batches(6):
        optimizer.zero_grad()
        attached.loss_of(module, batch).backward()
        optimizer.step()
    return module, [str([(each.stride(), each.grad.stride()) for each in module.parameters()])]


@pytest.mark.long
@pytest.mark.parametrize("strategy", attached.CHANNELS_LAST)
def test_ranks_train_in_channels_last_as_one_process(ranks, strategy):
    module, strides = plainly_in_channels_last()
    for rank in ranks:
        found = rank["channels_last"][strategy]
        assert close(found["params"], attached.flat(module))
        assert found["strides"] == strides


def test_alone_channels_last_has_the_strides_and_bits_of_plain_pytorch():
    module, strides = plainly_in_channels_last()
    assert attached.train_images("bsp") == {"params": attached.flat(module), "strides": strides}


def test_the_state_of_channels_last_loads_into_a_plain_model(tmp_path):
    module, other = attached.images(), attached.images(torch.contiguous_format)
    with attached.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), "bsp") as replica:
        attached.loss_of(module, next(attached.batches(1))).backward()
        replica.step()
    torch.save(module.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert attached.flat(other) == attached.flat(module)


def test_clipping_under_bsp_is_of_the_mean(ranks):
    assert ranks[0]["clipping"] == ranks[1]["clipping"]
    assert close(ranks[0]["clipping"][1], plain(steps=3, clip=0.1))


@pytest.mark.long
def test_accumulated_halves_are_the_whole(ranks):
    assert close(ranks[0]["accumulate"], plain())


def test_slices_leave_during_the_backward_of_the_last_micro_batch(ranks):
    """As those of DistributedDataParallel: nothing before, the last layer while the first is still computed."""
    for rank in ranks:
        events = rank["leaves_during_backward"]["events"]
        last = events.index("last micro-batch")
        numbers = [event for event in events if isinstance(event, int)]
        assert events[:last].count("micro-batch") == 3
        assert not any(isinstance(event, int) for event in events[:last])
        # the counts of what ranks intend; three layers, the first behind the marks of parameters with a gradient
        assert numbers == [5, 640 * 641, 640 * 641, 64 + 64 * 640 + 640]
        assert last < events.index(5) < events.index(640 * 641) < events.index("0.weight", last)


@pytest.mark.long
def test_accumulation_and_clipping_equal_ddp(ranks):
    for rank in ranks:
        ours, ddp = rank["leaves_during_backward"], rank["leaves_during_backward_with_ddp"]
        assert distance(ours["params"], ddp["params"]) < 1e-6
        assert distance(ours["norms"], ddp["norms"]) < 1e-6  # of the mean, which is there after backward()
        assert min(ours["norms"]) > 0.05


@pytest.mark.long
def test_a_call_of_ddp_around_an_attached_module_is_refused(ranks):
    """Both would average. A wrapper that nobody calls does nothing, and a wrapper of another model is let through."""
    for rank in ranks:
        found = rank["beside_ddp"]
        assert close(found.pop("uncalled"), plain())
        assert len(found) == 4
        for kind, message in found.values():
            assert kind == "UsageError"
            assert "the gradient of parameter '0.weight' as well" in message
            assert "ddp.module in place of ddp" in message


def test_batch_sizes_weigh(ranks):
    assert close(ranks[1]["weights"], plain())


def test_evaluation_shows_what_would_be_delivered(ranks):
    for rank in ranks:
        for found in rank["evaluation"].values():
            assert found["after"] == found["before"]
    apart = [rank["evaluation"]["averaging:period=100"] for rank in ranks]
    mean = (torch.tensor(apart[0]["before"]) + torch.tensor(apart[1]["before"])) / 2
    assert distance(apart[0]["before"], apart[1]["before"]) > 1e-3
    for found in apart:
        assert close(found["inside"], mean.tolist())
        assert found["end"] == found["inside"]  # the last average is of the same parameters
    assert ranks[0]["evaluation"]["bsp"]["inside"] == ranks[1]["evaluation"]["bsp"]["before"]


@pytest.mark.parametrize("strategy", attached.MEETING)
def test_evaluation_delivers_what_close_would(ranks, strategy):
    for rank, other in zip(ranks, reversed(ranks), strict=True):
        for found, theirs in zip(rank["delivers"][strategy], other["delivers"][strategy], strict=True):
            assert found["around"]
            assert found["inside"] == found["end"] == theirs["end"]


@pytest.mark.parametrize(("case", "strategy"), with_long("resumed", attached.RESUMED, attached.RESUMED_TOO))
def test_a_training_in_parts_equals_one_without_a_break(ranks, case, strategy):
    for rank in ranks:
        unbroken, in_three_parts = rank[case][strategy]
        assert unbroken == in_three_parts
    assert ranks[0][case][strategy] == ranks[1][case][strategy]


def heads_by_hand(average):
    """The models of both ranks with AdamW, gradients averaged, or parameters after each two steps."""
    modules = [attached.Heads(0) for _ in range(2)]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.3) for module in modules]
    for number, (x, y) in enumerate(attached.batches(5)):
        for rank, module in enumerate(modules):
            inputs, targets = x.chunk(2)[rank], y.chunk(2)[rank]
            trunk = module.trunk(inputs)
            if number == 3:
                nn.functional.cross_entropy(trunk, targets).backward()
                trunk = module.trunk(inputs)
            loss = nn.functional.cross_entropy(module.heads[rank](trunk), targets)
            (loss * (0.0 if (number, rank) == (2, 0) else 1.0)).backward()
        pairs = [[*pair] for pair in zip(*(module.parameters() for module in modules), strict=True)]
        if not average:
            for one, other in pairs:
                if one.grad is not None or other.grad is not None:
                    zero = torch.zeros_like(one)
                    mean = sum(zero if each.grad is None else each.grad for each in (one, other)) / 2
                    one.grad, other.grad = mean.clone(), mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if average and number % 2 == 1:
            with torch.no_grad():
                for one, other in pairs:
                    mean = (one + other) / 2
                    one.copy_(mean)
                    other.copy_(mean)
    return modules


@pytest.mark.parametrize(
    ("strategy", "average"), [("bsp", False), (attached.RING, False), ("averaging:period=2", True)]
)
def test_parameters_without_a_gradient_stay_as_they_are(ranks, strategy, average):
    modules = heads_by_hand(average)
    if average:
        ends = torch.stack([torch.tensor(attached.flat(module)) for module in modules]).mean(0).tolist()
        expected = [ends, ends]
    else:
        expected = [attached.flat(module) for module in modules]
    for rank, found in enumerate(ranks):
        assert close(found["unused"][strategy], expected[rank])
    untouched = attached.flat(attached.Heads(0).heads[2])
    assert all(rank["unused"][strategy][-len(untouched) :] == untouched for rank in ranks)


@pytest.mark.long
def test_ranks_that_wait_for_each_other_are_told(ranks):
    for rank in ranks:
        kind, text, seconds = rank["waits_for_each_other"]
        assert kind == "PeerLost"
        places = r"rank 1 in torch\.distributed\.barrier \(attached\.py:\d+\) and rank 0 in dure \(attached\.py:\d+\)"
        assert re.search(places, text)
        assert "as many batches as the others" in text
        assert seconds > 7.0, "two slow steps end nothing"


@pytest.mark.parametrize("uneven", ["False", "True"])
def test_gossip_keeps_the_mean_of_all_models(ranks, uneven):
    """n steps with a constant gradient g move the mean of K models by lr g / K times the sum of (1 - m^k) / (1 - m)."""
    one, other = (rank["gossip"][uneven] for rank in ranks)
    moved = [sum((1 - 0.5**k) / 0.5 for k in range(1, n + 1)) for n in ((20, 12) if uneven == "True" else (20, 20))]
    expected = torch.tensor(one["start"]) - 0.1 * (moved[0] * 1.0 + moved[1] * 2.0) / 2
    assert one["inside"] == other["inside"] == one["end"] == other["end"]
    assert distance(one["end"], expected.tolist()) < 1e-5  # rounding of 20 steps in fp32
    assert one["averaged"] > 0
    assert other["averaged"] > 0


def test_evaluation_in_gossip_is_the_weighted_mean_that_close_delivers(ranks):
    one, other = (rank["gossip_evaluates"] for rank in ranks)
    assert one["inside"] == other["inside"] == one["end"] == other["end"]
    assert one["again"] == one["end"][0], "a rank that has ended takes part"


@pytest.mark.long
def test_bytes_sent_are_those_of_the_gradient_and_what_controls_it(ranks):
    """Of two ranks, each sends the gradient once: half in the sum, and half of the sum, or all of it to a server."""
    whole = 4 * len(attached.flat(attached.model()))
    for rank in ranks:
        sent = rank["bytes_sent"]
        for way in ("bsp None", f"{attached.RING} None", "bsp ps None"):
            assert all(whole <= step < 1.1 * whole for step in sent[way]), (way, sent[way], whole)
        assert all(0.25 * whole <= step < 0.4 * whole for step in sent["bsp int8"]), (sent["bsp int8"], whole)


@pytest.mark.long
def test_a_rank_that_loads_a_state_alone_is_told(ranks):
    for rank in ranks:
        kind, text, _ = rank["loads_alone"]
        assert kind == "PeerLost"
        assert re.search(r"rank 1 in torch\.distributed\.barrier \(attached\.py:\d+\) and rank 0 in dure", text)


def half(values):
    return values.half().float()


@pytest.mark.parametrize("where", ["fp16", "fp16 ps"])
def test_a_codec_encodes_the_gradients_of_a_loop(ranks, where):
    """Each gradient rounded to 16 bits, then their mean; over collectives the mean is rounded too."""
    module = attached.model()
    for x, y in attached.batches(12):
        found = []
        for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = nn.functional.cross_entropy(module(inputs), targets)
            found.append([half(each) for each in torch.autograd.grad(loss, [*module.parameters()])])
        with torch.no_grad():
            for each, pair in zip(module.parameters(), zip(*found, strict=True), strict=True):
                mean = sum(pair) / 2
                each -= 0.1 * (half(mean) if where == "fp16" else mean)
    for rank in ranks:
        assert close(rank["codecs"][where]["end"], attached.flat(module))
    assert distance(plain(steps=12), attached.flat(module)) > 4e-6


def test_a_codec_encodes_gradients_of_16_bits(ranks):
    one, other = (rank["codecs"]["bfloat16"] for rank in ranks)
    assert one == other
    assert 0 < distance(*one) < 0.2


@pytest.mark.parametrize(("case", "sync"), with_long("encoded", attached.ENCODED, attached.ENCODED_TOO))
def test_errors_of_a_codec_are_state_and_evaluation_leaves_them_alone(ranks, case, sync):
    for rank in ranks:
        unbroken, evaluated, in_parts = rank[case][sync]
        assert unbroken["end"] == evaluated["end"]
        assert evaluated["inside"] == [evaluated["end"]]
        assert in_parts["end"] == unbroken["end"]
    assert ranks[0][case][sync] == ranks[1][case][sync]


def test_nan_under_a_codec_skips_the_step_of_all_ranks(ranks):
    for rank in ranks:
        first, second, third = rank["codec_of_nan"]
        assert first == second != third
        assert all(map(math.isfinite, third))
    assert ranks[0]["codec_of_nan"] == ranks[1]["codec_of_nan"]


def test_a_gradient_of_no_step_is_refused_under_a_codec_with_a_memory(ranks):
    for rank in ranks:
        for kind, text, _ in rank["codec_of_a_stray_gradient"]:
            assert kind == "UsageError"
            assert "loss.backward(inputs=list(other.parameters()))" in text


@pytest.mark.long
def test_unused_parameters_equal_those_of_ddp_bit_for_bit(ranks):
    for rank in ranks:
        assert rank["unused"]["bsp"] == rank["unused_beside_ddp"]


def test_buffers_are_those_of_rank_0(ranks):
    """Under `bsp` over collectives after each step, elsewhere where models meet."""
    one, other = (rank["buffers_of_rank_0"] for rank in ranks)
    assert one["bsp"] == other["bsp"]
    assert one["averaging:period=2"][0] != other["averaging:period=2"][0]
    assert one["averaging:period=2"][1] == other["averaging:period=2"][1]
    for strategy in one:
        *steps, end, count = one[strategy]
        assert steps[-1] == end, strategy  # what rank 0 had itself
        assert other[strategy][-2:] == [end, count]
        assert count == 4


def test_an_error_at_one_rank_is_heard_at_the_other(ranks):
    for strategy in ("bsp", "averaging:period=2", attached.RING):
        kind, message, seconds, again = ranks[0]["one_fails"][strategy]
        assert kind == "PeerLost"
        assert "rank 1 failed with OverflowError: the user's own mistake" in message
        assert ".cc" not in message
        assert seconds < 20  # not the time-out of the engine
        assert again  # a failed replica says the same every time
        assert ranks[1]["one_fails"][strategy][0] == "OverflowError"


@pytest.mark.long
def test_a_rank_that_fails_does_not_count_as_one_that_has_finished(ranks):
    assert [rank["quorum_of_the_living"] for rank in ranks] == [6, None]


@pytest.mark.long
def test_a_server_that_is_gone_is_an_error_and_a_worker_is_not(ranks):
    kind, message, seconds = ranks[1]["owner_fails"]
    assert kind == "PeerLost"
    assert "rank 0 failed with OverflowError: out of luck" in message
    assert seconds < 20
    assert ranks[0]["other_fails"] == 12


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("different_constants", "'constants': 4"),
        ("different_models", "rank 0 has {'parameters': 1210"),
        ("different_strides", "'contiguous': 5"),
        ("backward_twice", "with replica.accumulate():"),
        ("adversaries_without_zero_grad", "Sequential (model 2, attached at attached.py:"),
        ("one_evaluates", "1 of 2 ranks entered replica.evaluation()"),
        ("one_leaves_out", "1 of 2 ranks left out a step whose gradient had been exchanged"),
        ("one_leaves_out_its_last", "1 of 2 ranks left out a step whose gradient had been exchanged"),
        ("ranks_unknown_to_the_environment", "torch.distributed has 2 ranks, and the environment names 1"),
    ],
)
def test_what_ranks_must_agree_on_is_an_error_at_both(ranks, case, words):
    for rank in ranks:
        kind, message, seconds = rank[case]
        assert kind == "UsageError"
        assert words in message
        assert seconds < 20


def test_a_backward_that_failed_before_its_gradient_left_can_be_repeated(ranks):
    for rank in ranks:
        assert rank["repeats_a_backward"] == [pytest.approx(ranks[0]["repeats_a_backward"][1], abs=1e-6)] * 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        pytest.param("repeats_a_wide_backward", "has not come to its end", marks=pytest.mark.long),
        ("goes_on_after_two_backwards", "backward() ran twice"),
        ("adds_a_group", "parameter '3.weight' was added after the replica was made"),
    ],
)
def test_steps_that_would_make_replicas_differ_end_the_training(ranks, case, words):
    for rank in ranks:
        assert words in rank[case][1]


def test_all_ranks_may_leave_out_a_step_that_was_exchanged(ranks):
    """The mean decides, which all ranks hold: a plain loop that leaves out the same batch."""
    module = attached.model(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step, batch in enumerate(attached.batches(3)):
        optimizer.zero_grad()
        attached.loss_of(module, batch).backward()
        if step != 1:
            optimizer.step()
    for rank in ranks:
        assert close(rank["all_leave_out"], attached.flat(module))


def test_a_killed_rank_does_not_hang_the_others(tmp_path):
    """Without torchrun, which would end the survivor too."""
    program = tmp_path / "loop.py"
    program.write_text(KILLED, encoding="utf-8")
    port = free_port()
    ranks = [start_rank(program, rank, port) for rank in (0, 1)]
    with ranks[0], ranks[1]:
        try:
            out, errors = ranks[0].communicate(timeout=60)
        finally:
            for each in ranks:
                each.kill()
    assert ranks[1].returncode == -signal.SIGKILL
    assert "PeerLost after 3 steps" in out, errors
    assert float(out.split()[-1]) < 5


KILLED = """
import os, signal, time, torch, dure
model = torch.nn.Linear(4, 1)
with dure.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), sync="bsp") as replica:
    for step in range(100):
        if step == 3 and replica.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            model(torch.ones(2, 4)).sum().backward()
            replica.step()
        except dure.DureError as error:
            print(type(error).__name__, "after", replica.clock, "steps", time.monotonic() - started, flush=True)
            os._exit(0)
"""


def free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def start_rank(program, rank, port, *arguments):
    here = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, str(program), *arguments],
        env={**ENVIRONMENT, **here},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


FROZEN = """
import os, signal, sys, time, torch, dure
sync, topology = sys.argv[1:]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
started = 0
try:
    with dure.attach(model, optimizer, sync=sync, topology=topology, frozen_after=3.0) as replica:
        for step in range(5):
            if step == 3 and replica.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            if step == 1 and replica.rank == 1:
                time.sleep(5)  # slow, not frozen
            started = time.monotonic()
            model(torch.ones(2, 4)).sum().backward()
            replica.step()
except dure.DureError as error:
    print(error, "|", type(error).__name__, "after", replica.clock, "steps", time.monotonic() - started, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("sync", "topology"),
    [
        ("bsp", "collective"),
        pytest.param("bsp", "ps", marks=pytest.mark.soak),
        pytest.param("bsp", "collective:algorithm=ring", marks=pytest.mark.soak),
        pytest.param("averaging:period=2", "collective", marks=pytest.mark.soak),
        pytest.param("downpour", "ps", marks=pytest.mark.soak),
    ],
)
def test_a_frozen_rank_ends_the_others_which_name_it_and_a_slow_one_ends_nothing(sync, topology, tmp_path):
    program = tmp_path / "loop.py"
    program.write_text(FROZEN, encoding="utf-8")
    port = free_port()
    ranks = [start_rank(program, rank, port, sync, topology) for rank in (0, 1)]
    with ranks[0], ranks[1]:
        try:
            out, errors = ranks[0].communicate(timeout=60)
        finally:
            for each in ranks:
                each.kill()
    assert "rank 1 is frozen or gone: no heartbeat for 3 s" in out, errors
    assert "rank 1 is frozen: no heartbeat for 1 s" in errors
    assert float(out.split()[-1]) < 12


@pytest.mark.soak
def test_a_frozen_rank_that_holds_the_store_ends_the_others(tmp_path):
    """Rank 0, which holds the store where no agent does."""
    program = tmp_path / "loop.py"
    program.write_text(FROZEN.replace("replica.rank == 1", "replica.rank == 0"), encoding="utf-8")
    port = free_port()
    ranks = [start_rank(program, rank, port, "bsp", "collective") for rank in (0, 1)]
    with ranks[0], ranks[1]:
        try:
            out, errors = ranks[1].communicate(timeout=60)
        finally:
            for each in ranks:
                each.kill()
    assert "the store where the ranks meet, and so rank 0 or torchrun's agent, is frozen or gone" in out, errors


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sync", "topology"),
    [("bsp", "collective"), ("bsp", "ps"), *soaked(("downpour", "ps:shards=2"), ("averaging:period=2", "ps"))],
)
def test_a_gradient_of_nan_skips_its_step_and_the_third_in_a_row_ends_the_training(sync, topology):
    module, _, replica = attached_alone(sync=sync, topology=topology)
    batch = next(attached.batches(1))
    for spoiled in (False, True, True, False, True, True):
        attached.loss_of(module, batch).backward()
        if spoiled:
            module[0].weight.grad[0, 0] = torch.nan
        replica.step()
    assert replica.clock == 6
    with replica.evaluation():
        assert all(torch.isfinite(each).all() for each in module.parameters())
    attached.loss_of(module, batch).backward()
    module[0].weight.grad[0, 0] = torch.nan
    with pytest.raises(Quarantined, match=r"the gradients of Sequential .* at rank 0 hold NaN or infinity .* step 6"):
        replica.step()


SPOILED = """
import sys, torch, dure
model = torch.nn.Linear(4, 1)
with dure.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), sync=sys.argv[1]) as replica:
    try:
        for step in range(9):
            outputs = model(torch.ones(2, 4))
            if replica.rank == 1 and step in (1, 4, 5, 6):
                outputs.register_hook(lambda gradient: gradient * torch.nan)
            outputs.sum().backward()
            replica.step()
    except dure.DureError as error:
        print(error, "|", all(bool(torch.isfinite(each).all()) for each in model.parameters()), flush=True)
        sys.exit(7)
"""


@pytest.mark.long
@pytest.mark.parametrize("sync", ["bsp", pytest.param("averaging:period=2", marks=pytest.mark.soak)])
def test_a_rank_whose_gradients_are_nan_is_named_by_all_that_meet_it(sync, tmp_path):
    program = tmp_path / "loop.py"
    program.write_text(SPOILED, encoding="utf-8")
    port = free_port()
    ranks = [start_rank(program, rank, port, sync) for rank in (0, 1)]
    with ranks[0], ranks[1]:
        try:
            said = [each.communicate(timeout=60) for each in ranks]
        finally:
            for each in ranks:
                each.kill()
    assert [each.returncode for each in ranks] == [7, 7]
    for out, errors in said if sync == "bsp" else said[1:]:
        assert re.match(r"the gradients of Linear .* at rank 1 hold NaN or infinity in 3 steps in a row, ", out), errors
        assert out.endswith("| True\n")
    assert "rank 1" in said[0][0]


@pytest.mark.parametrize("limit", [0, -1.0, math.nan])
def test_a_limit_without_sense_is_refused(limit):
    with pytest.raises(UsageError, match="frozen_after is a number of seconds above 0"):
        attached_alone(frozen_after=limit)


# ---- alone


def loop(replica, module, steps=9):
    for batch in attached.batches(steps):
        attached.loss_of(module, batch).backward()
        replica.step()


OPTIMIZERS = [
    (kind, flag)
    for kind in vars(torch.optim).values()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    for flag in (None, "foreach", "fused", "capturable", "differentiable")
    if flag is None or flag in inspect.signature(kind).parameters
]
UNABLE = {"LBFGS": "LBFGS computes the loss itself", "SparseAdam": r"SparseAdam needs sparse gradients.*Take Adam"}
"""Optimizers that are refused, and flags with which any is."""
UNABLE |= {flag: rf"parameter group 0 of \w+ has {flag}=True" for flag in ("differentiable", "capturable")}


def matrices():
    """A model without vectors, which Muon does not take."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16, bias=False), nn.Tanh(), nn.Linear(16, 10, bias=False))


@pytest.mark.parametrize(("kind", "flag"), OPTIMIZERS, ids=lambda each: getattr(each, "__name__", str(each)))
def test_each_optimizer_trains_as_in_plain_pytorch_or_is_refused_by_name(kind, flag):
    module, alone = matrices(), matrices()
    flags = {} if flag is None else {flag: True}
    optimizer, plainly = (kind(each.parameters(), **flags) for each in (module, alone))
    reason = UNABLE.get(kind.__name__) or UNABLE.get(flag)
    if reason is not None:
        with pytest.raises(UsageError, match=reason):
            attached.attach(module, optimizer, "bsp")
        return
    with attached.attach(module, optimizer, "bsp") as replica:
        loop(replica, module, steps=3)
    for batch in attached.batches(3):
        plainly.zero_grad()
        attached.loss_of(alone, batch).backward()
        plainly.step()
    assert (replica.rank, replica.world_size, replica.clock) == (0, 1, 3)
    assert attached.flat(module) == attached.flat(alone)


@pytest.mark.long
def test_alone_over_servers_equals_alone():
    make = functools.partial(attached.groups, kind=torch.optim.Adam)
    module = attached.model()
    with attached.attach(module, make(module), "ssp ps:shards=2") as replica:
        loop(replica, module)
        with replica.evaluation():
            shown = attached.flat(module)
    assert close(attached.flat(module), plain(make))
    assert close(shown, plain(make))


RULES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.2, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.2, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.1),
}


@pytest.mark.parametrize("name", RULES)
def test_server_rules_are_the_users(name):
    """The rule that a server is given does what the user's optimizer does, on the same gradients."""
    from dure.job.optimizer import FlatOptimizer

    module, alike = attached.model(), attached.model()
    replica = Replica(module)
    rule = FlatRule(RULES[name](module.parameters()), replica)
    flat = FlatOptimizer(rule.spec, replica.numel, segments=rule.segments)
    values = replica.params.clone()
    optimizer = RULES[name](alike.parameters())
    for batch in attached.batches(4):
        optimizer.zero_grad()
        attached.loss_of(alike, batch).backward()
        gradient = torch.cat([each.grad.reshape(-1) for each in alike.parameters()])
        flat.apply(values, gradient, values, lr=rule.rates())
        optimizer.step()
    assert close(values.tolist(), attached.flat(alike))


def test_parameters_of_no_group_do_not_move_on_servers():
    module = attached.model()
    rule = FlatRule(torch.optim.SGD(module[2].parameters(), lr=0.1), Replica(module))
    assert rule.rates() == [0.1, 0.0]
    assert [(each.start, each.stop, each.group) for each in rule.segments] == [(0, 1040, 1), (1040, 1210, 0)]
    assert rule.spec == OptimizerSpec("sgd", lr=0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop does not"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "dampening=0.5"),
    ],
)
def test_servers_refuse_what_they_cannot_do(make, words):
    module = attached.model()
    with pytest.raises(UsageError, match="run on servers") as raised:
        attached.attach(module, make(module.parameters()), "downpour")
    assert words in str(raised.value)


def test_servers_refuse_an_optimizer_that_has_state_and_hyper_parameters_that_change():
    module = attached.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    rule = FlatRule(optimizer, Replica(module))
    optimizer.param_groups[0]["lr"] = 0.5
    assert rule.rates() == [0.5, 0.0]
    optimizer.param_groups[0]["momentum"] = 0.8
    with pytest.raises(UsageError, match=r"momentum of parameter group 0 went from 0\.9 to 0\.8"):
        rule.rates()
    attached.loss_of(module, next(attached.batches(1))).backward()
    optimizer.step()
    with pytest.raises(UsageError, match="has taken steps"):
        attached.attach(module, optimizer, "downpour")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("topology", ["collective", "ps"])
def test_what_is_loaded_into_the_optimizer_goes_on_deciding_the_rate(topology):
    """PyTorch puts new parameter groups in the place of the old."""

    def stepped(module, step, optimizer):
        for number, batch in enumerate(attached.batches(4)):
            if number == 2:
                optimizer.param_groups[0]["lr"] = 0.01
            attached.loss_of(module, batch).backward()
            step()

    alone, (module, optimizer, replica) = attached.model(), attached_alone(topology=topology)
    plainly = torch.optim.SGD(alone.parameters(), lr=0.1)
    plainly.register_step_post_hook(lambda *_: plainly.zero_grad())
    stepped(alone, plainly.step, plainly)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(module, replica.step, optimizer)
    replica.close()
    assert close(attached.flat(module), attached.flat(alone))


@pytest.mark.long
def test_states_that_servers_would_not_see_are_refused():
    module = attached.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    attached.loss_of(module, next(attached.batches(1))).backward()
    optimizer.step()
    gathered = copy.deepcopy(optimizer.state_dict())
    fresh = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with (
        dure.attach(module, fresh, topology="ps"),
        pytest.raises(UsageError, match="load the model's state alone"),
    ):
        fresh.load_state_dict(gathered)
    assert not fresh.state
    for topology in ("collective", "ps"):  # where servers keep a mean, it is this optimizer that steps
        with dure.attach(module, fresh, sync="averaging", topology=topology):
            fresh.load_state_dict(gathered)
    assert fresh.state


@pytest.mark.long
def test_groups_that_servers_do_not_know_are_refused():
    module = attached.model()
    optimizer = torch.optim.SGD(module[0].parameters(), lr=0.1)
    replica = dure.attach(module, optimizer, topology="ps")
    optimizer.add_param_group({"params": list(module[2].parameters())})
    with pytest.raises(UsageError, match="has 2 parameter groups, and had 1"):
        replica.step()


def attached_alone(momentum=0.0, **more):
    module = attached.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)
    return module, optimizer, dure.attach(module, optimizer, **more)


def test_a_scaler_that_overflows_skips_the_step_and_the_clock_advances():
    module, optimizer, replica = attached_alone(sync="averaging:period=2")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    batch = next(attached.batches(1))
    before = attached.flat(module)
    scaler.scale(attached.loss_of(module, batch)).backward()
    module[0].weight.grad[0, 0] = torch.inf
    assert replica.step(scaler)
    scaler.update()
    assert (attached.flat(module), replica.clock, scaler.get_scale()) == (before, 1, 2.0)
    scaler.scale(attached.loss_of(module, batch)).backward()
    scaler.unscale_(optimizer)  # as one does before clipping
    replica.step(scaler)
    scaler.update()
    assert replica.clock == 2
    assert close(attached.flat(module), plain(steps=1))
    replica.close()


@pytest.mark.parametrize("swapped", [False, True])
def test_gradients_that_are_unscaled_by_one_optimizer_are_stepped_by_the_other(swapped):
    module, optimizer, replica = attached_alone()
    by, stepped = (optimizer, replica.routed_optimizer)[:: -1 if swapped else 1]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for batch in attached.batches(3):
        scaler.scale(attached.loss_of(module, batch)).backward()
        scaler.unscale_(by)
        replica.step(scaler) if stepped is optimizer else scaler.step(stepped)
        scaler.update()
    assert close(attached.flat(module), plain(steps=3))
    scaler.scale(attached.loss_of(module, batch)).backward()
    module[0].bias.grad[0] = torch.inf
    scaler.unscale_(by)
    replica.step(scaler) if stepped is optimizer else scaler.step(stepped)
    scaler.update()
    assert (close(attached.flat(module), plain(steps=3)), scaler.get_scale()) == (True, 2.0)
    scaler.scale(attached.loss_of(module, batch)).backward()
    scaler.unscale_(by)
    scaler.unscale_(stepped)
    with raising(UsageError):
        replica.step(scaler)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_is_bound_to_connections_is_neither_copied_nor_pickled(duplicate):
    module, optimizer, replica = attached_alone()
    for bound in (replica, replica.routed_optimizer):
        with raising(UsageError):
            duplicate(bound)
    duplicate(module)
    duplicate(optimizer)
    replica.close()


def test_a_routed_optimizer_steps_the_replica():
    """A trainer that steps, zeroes, schedules and scales by itself is the loop that calls the replica."""
    module, optimizer, replica = attached_alone(momentum=0.9)
    routed = replica.routed_optimizer
    assert isinstance(routed, torch.optim.Optimizer)
    assert routed.param_groups is optimizer.param_groups
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    alone = attached.model()
    plainly = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    steps = torch.optim.lr_scheduler.LambdaLR(plainly, lambda step: 0.5**step)
    own = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for number, batch in enumerate(attached.batches(4)):
        for each, by, scales, rates in ((module, routed, scaler, schedule), (alone, plainly, own, steps)):
            by.zero_grad()
            loss = attached.loss_of(each, batch) * (math.inf if number == 2 else 1.0)
            scales.scale(loss).backward()
            scales.unscale_(by)  # clipping is of the true gradient
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            scales.step(by)
            scales.update()
            rates.step()
    assert (replica.clock, scaler.get_scale()) == (4, own.get_scale()) == (4, 2.0)
    assert attached.flat(module) == attached.flat(alone)
    assert str(routed.state_dict()) == str(plainly.state_dict())
    routed.load_state_dict(plainly.state_dict())
    loss = routed.step(lambda: attached.loss_of(module, batch).backward() or 3.0)
    assert (loss, replica.clock, replica.closed) == (3.0, 5, False)
    replica.close()
    assert replica.closed


def test_after_the_end_parameters_own_their_memory(tmp_path):
    module, _, replica = attached_alone()
    attached.loss_of(module, next(attached.batches(1))).backward()
    replica.step()
    replica.close()
    torch.save(module[2].bias, tmp_path / "bias.pt")
    assert (tmp_path / "bias.pt").stat().st_size < 3000 < sum(each.nbytes for each in module.parameters())
    save_model(module, tmp_path / "model.safetensors")  # refuses parameters that share memory


@pytest.mark.parametrize(
    ("change", "case"),
    [
        ({"world_size": 3}, "3 ranks"),
        ({"rank": 1}, "rank 1"),
        ({"strategy": "bsp collective"}, "bsp collective"),
        ({"model": "5"}, "layers 5"),
        ({"kind": "AdamW"}, "AdamW"),
        ({"format": 1}, "format 1"),
    ],
)
def test_the_state_of_another_rank_is_refused(change, case):
    _, _, replica = attached_alone(sync="averaging:period=2")
    with raising(UsageError, case):
        replica.load_state_dict(replica.state_dict() | change)


@pytest.mark.parametrize("part", ["strategy", "clock", "optimizer", "tensors", "tensors params", "plain kept"])
def test_a_state_with_a_missing_part_is_refused(part):
    _, _, replica = attached_alone(sync="averaging:period=2")
    state = replica.state_dict()
    outer, _, inner = part.partition(" ")
    del (state[outer] if inner else state)[inner or outer]
    with raising(UsageError, inner or outer):
        replica.load_state_dict(state)


def test_a_state_without_the_gradients_that_add_up_is_refused():
    module, _, replica = attached_alone()
    batch = next(attached.batches(1))
    for discard in (replica.step, replica.skip, replica.zero_grad, module.zero_grad):
        with replica.accumulate():
            attached.loss_of(module, batch).backward()
        with raising(UsageError):
            replica.state_dict()
        with replica.evaluation(), raising(UsageError):
            replica.state_dict()
        discard()
        assert replica.state_dict()["clock"] == replica.clock
    attached.loss_of(module, batch).backward()  # as the loss of another model may
    assert replica.state_dict()["clock"] == 2
    replica.close()


def test_the_state_of_a_model_of_the_same_size_is_refused():
    _, _, replica = attached_alone(sync="averaging:period=2")
    state = replica.state_dict()
    replica.close()
    module = nn.Linear(len(attached.flat(attached.model())), 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    replica = dure.attach(module, optimizer, sync="averaging:period=2")
    with raising(UsageError, "model of the layers"):
        replica.load_state_dict(state)


@pytest.mark.parametrize(("sync", "topology"), [("ssp", "ps"), ("easgd", "collective")])
def test_states_that_are_not_at_the_ranks_are_refused(sync, topology):
    _, _, replica = attached_alone(sync=sync, topology=topology)
    with raising(UsageError, sync):
        replica.state_dict()
    replica.close()


def test_a_failure_of_the_trainer_ends_the_training():
    _, optimizer, replica = attached_alone()
    error = KeyError("of the trainer")
    assert replica.failed(error) is error
    assert replica.closed
    with pytest.raises(KeyError):
        replica.step()
    optimizer.step()
    _, _, replica = attached_alone()
    replica.close()
    assert replica.failed(error) is error  # it has ended in order


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sync", "topology", "skipped"),
    [("bsp", "ps", "skip"), ("downpour+dc-asgd", "ps:shards=2", "overflow"), ("downpour:n_push=2", "ps", "skip")],
)
def test_a_skipped_step_does_not_move_the_momentum_of_servers(sync, topology, skipped):
    """A step, two that are skipped, two steps: the plain optimizer makes three, or two if one push has the last."""
    alone, (module, optimizer, replica) = attached.model(), attached_alone(sync=sync, topology=topology, momentum=0.9)
    plainly = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate([*attached.batches(1)] * 5):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(attached.loss_of(module, batch)).backward()
        if step not in (1, 2):
            replica.step()
            attached.loss_of(alone, batch).backward()
            if not (step == 3 and "n_push" in sync):
                plainly.step()
                plainly.zero_grad()
        elif skipped == "skip":
            replica.skip()
        else:
            module[0].weight.grad[0, 0] = torch.inf
            replica.step(scaler)
    replica.close()
    assert replica.clock == 5
    assert close(attached.flat(module), attached.flat(alone))
    assert not optimizer.state


def test_a_skipped_step_advances_the_clock_and_nothing_else():
    module, _, replica = attached_alone()
    before = attached.flat(module)
    attached.loss_of(module, next(attached.batches(1))).backward()
    assert replica.skip()
    assert (attached.flat(module), replica.clock) == (before, 1)
    assert all(not each.grad.any() for each in module.parameters())
    replica.close()


def test_own_steps_are_refused_until_the_end():
    _, optimizer, replica = attached_alone()
    with pytest.raises(UsageError, match=r"replica\.step\(\) in its place"):
        optimizer.step()
    replica.close()
    replica.close()
    optimizer.step()
    with pytest.raises(UsageError, match=r"step\(\) was called after close"):
        replica.step()


def test_moved_parameters_are_an_error_that_stays():
    module, _, replica = attached_alone()
    module.double()
    with pytest.raises(ReplicaError, match=r"double.*attach after model\.to\(torch\.float64\)") as first:
        replica.step()
    for call in (replica.step, replica.skip, replica.close):
        with pytest.raises(ReplicaError) as again:
            call()
        assert again.value is first.value


def clamp_data(module):
    for parameter in module.parameters():
        parameter.data.clamp_(-0.01, 0.01)


@pytest.mark.long
def test_clipped_weights_count_over_collectives_and_are_refused_over_servers():
    """As WGAN clips after each step."""

    def clipped(step, module):
        for batch in attached.batches(3):
            attached.loss_of(module, batch).backward()
            step()
            clamp_data(module)

    alone = attached.model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    clipped(optimizer.step, alone)
    module, _, replica = attached_alone()
    clipped(replica.step, module)
    replica.close()
    assert close(attached.flat(module), attached.flat(alone))
    assert max(map(abs, attached.flat(module))) <= 0.01
    module, _, replica = attached_alone(topology="ps")
    with pytest.raises(
        UsageError, match=r"^the model's parameters were changed in place after the last step\. The next"
    ):
        clipped(replica.step, module)
    assert replica.clock == 1


def clamp(module):
    with torch.no_grad():
        module[2].bias.clamp_(-0.01, 0.01)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "call", "sync", "topology"),
    [
        (lambda module: module.load_state_dict(attached.model(1).state_dict()), "close", "bsp", "ps"),
        (clamp, "close", "averaging:period=2", "ps"),
        (clamp, "close", "easgd", "collective"),
        *soaked(
            (clamp, "skip", "ssp:form=rmw", "ps"),
            (clamp, "evaluation", "downpour:n_fetch=4", "ps"),
            (clamp, "step", "downpour+dc-asgd", "ps:shards=2"),
        ),
    ],
)
def test_a_change_that_a_call_would_undo_is_refused_by_it(change, call, sync, topology):
    module, _, replica = attached_alone(sync=sync, topology=topology)
    loop(replica, module, steps=2)
    change(module)
    with pytest.raises(UsageError, match=r"changed in place after the last step.*(after replica\.close|attach again)"):
        getattr(replica, call)().__enter__() if call == "evaluation" else getattr(replica, call)()


def test_buffers_that_are_loaded_before_the_end_are_kept():
    module = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    best = {name: value + 1 for name, value in module.state_dict().items()}
    with dure.attach(module, torch.optim.SGD(module.parameters(), lr=0.1)) as replica:
        loop(replica, module, steps=2)
        module.load_state_dict(best)
    assert all(torch.equal(value, best[name]) for name, value in module.state_dict().items())


def test_a_change_inside_evaluation_is_refused_and_the_training_goes_on():
    module, _, replica = attached_alone()
    loop(replica, module, steps=2)
    before = attached.flat(module)
    with replica.evaluation():
        shown = copy.deepcopy(module.state_dict())
        clamp_data(module)
        module.load_state_dict(shown)  # as an average of weights puts them back
    with pytest.raises(UsageError, match=r"changed in place inside `with replica\.evaluation"), replica.evaluation():
        clamp_data(module)
    assert attached.flat(module) == before
    loop(replica, module, steps=2)
    replica.close()


def test_foreign_parameters_in_the_optimizer_are_refused_at_the_next_step():
    module, optimizer, replica = attached_alone()
    optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [module[2].bias], "lr": 0.5})
    assert replica.step()  # a parameter of the model may move to another group
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(UsageError, match=r"parameter group 2 of the optimizer has a parameter .* none of the model's"):
        replica.step()


@pytest.mark.long
@pytest.mark.parametrize("topology", ["collective", "ps"])
def test_parameters_frozen_while_attached_are_refused(topology):
    """Momentum and weight decay would move them on. Who thaws them before the step is let through."""
    module, _, replica = attached_alone(topology=topology)
    module[0].requires_grad_(False)
    attached.loss_of(module, next(attached.batches(1))).backward()
    module[0].requires_grad_(True)
    assert replica.step()
    module[0].weight.requires_grad_(False)
    with pytest.raises(ReplicaError, match=r"'0\.weight' was trainable .* requires_grad_\(False\) and attach again"):
        replica.step()


@pytest.mark.long
def test_a_schedule_sees_steps_where_servers_take_them():
    """PyTorch warns, which is an error here, of a scheduler that steps before its optimizer has."""
    module = attached.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = attached.halving(optimizer)
    with attached.attach(module, optimizer, "downpour") as replica:
        for batch in attached.batches(4):
            attached.loss_of(module, batch).backward()
            replica.step()
            scheduler.step()
    assert close(attached.flat(module), plain(schedule=attached.halving, steps=4))


def test_bad_requests_are_refused_before_anything_starts():
    module = attached.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(StrategyError, match="bound"):
        dure.attach(module, optimizer, sync="ssp:bound=-1")
    with pytest.raises(UsageError, match="schedule=adaptive does not run in a loop"):
        dure.attach(module, optimizer, sync="averaging:schedule=adaptive")
    with pytest.raises(StrategyError, match=r"sign\+momentum is for votes, and downpour has servers add"):
        dure.attach(module, optimizer, sync="downpour", codec="sign+momentum")
    with pytest.raises(UsageError, match=r'has servers count votes, .* over collectives: topology="collective"'):
        dure.attach(module, optimizer, topology="ps", codec="sign+momentum")
    narrow = nn.Linear(2, 1, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match=r"are torch\.bfloat16, and over servers int8 encodes float32 and float64"):
        dure.attach(narrow, torch.optim.SGD(narrow.parameters(), lr=0.1), topology="ps", codec="int8")
    with pytest.raises(UsageError, match=r"gpipe:stages=2 gives a rank a part of it\. .*dure\.train\(job, partition"):
        dure.attach(module, optimizer, partition="gpipe:stages=2")
    with pytest.raises(UsageError, match="batch_size"):
        dure.attach(module, optimizer, batch_size=0)
    with pytest.raises(UsageError, match="none of the model's"):
        dure.attach(nn.Linear(2, 2), optimizer)
    elsewhere = torch.optim.SGD(nn.Linear(2, 2, device="meta").parameters())
    with pytest.raises(UsageError, match=r"on meta, and the model is on cpu: make the optimizer after model\.to"):
        dure.attach(nn.Linear(2, 2), elsewhere)
    with pytest.raises(UsageError, match="LBFGS computes the loss itself, by the closure"):
        dure.attach(module, torch.optim.LBFGS(module.parameters()))
    with pytest.raises(StrategyError, match='sync="bsp ps" is more than a sync: write sync="bsp", topology="ps"'):
        dure.attach(module, optimizer, sync="bsp ps")
    tiny = nn.Linear(1, 1)
    with pytest.raises(StrategyError, match="3 are more than the model has parameters, 2"):
        dure.attach(tiny, torch.optim.SGD(tiny.parameters(), lr=0.1), topology="ps:shards=3")
    for shards in (65, 1000):
        with pytest.raises(UsageError, match=f"{shards} helper processes on one machine, and at most 64 .*ps:shards=1"):
            dure.attach(module, optimizer, topology=f"ps:shards={shards}")
    optimizer.step()  # a failed attempt leaves nothing behind


def test_servers_that_fit_into_no_memory_are_refused(monkeypatch):
    """As on a machine of 4 GB: a server takes 0.15 GB and its part of the model, and 64 take 9.6."""
    monkeypatch.setattr("dure.user_loop.servers.physical_memory", lambda: 4_000_000_000)
    module = attached.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="64 processes take 10 GB at least, and this machine has 4: take fewer shards"):
        dure.attach(module, optimizer, topology="ps:shards=64")
    optimizer.step()
    check_memory(26, 8_000, 4_000_000_000, own=SHARD_PROCESS_NBYTES)
    with pytest.raises(UsageError, match="take fewer workers"):
        check_memory(2, 1_000_000_000, 4_000_000_000)


@pytest.mark.parametrize("topology", ["collective", "ps"])
def test_a_model_without_values_is_refused(topology):
    module = attached.model()
    module.register_buffer("table", torch.zeros(3, device="meta"))
    with pytest.raises(UsageError, match="'table' is on the meta device"):
        dure.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), topology=topology)


def test_what_is_attached_is_not_attached_again():
    module, optimizer, replica = attached_alone()
    with pytest.raises(UsageError, match=r"this optimizer is attached already.*replica\.close\(\)"):
        dure.attach(module, optimizer)
    part = module[2]
    with pytest.raises(UsageError, match="this model is attached already"):
        dure.attach(part, torch.optim.SGD(part.parameters(), lr=0.1))
    assert replica.step()  # and is none the worse for it
    other, _, beside = attached_alone()
    assert other is not module
    assert beside.step()
    replica.close()
    with dure.attach(module, optimizer) as again:
        assert again.step()
    with pytest.raises(OverflowError), dure.attach(module, optimizer):
        raise OverflowError("which ends it as well")
    dure.attach(module, optimizer).close()
    beside.close()


def steps(replica, module, *, before="", after="", scale=1.0, backward=True):
    """Three steps with `zero_grad()` of the model or the optimizer before or after backward."""
    for batch in attached.batches(3):
        calls = {"": lambda: None, "model": module.zero_grad, "optimizer": replica.optimizer.zero_grad}
        calls["zeros"] = functools.partial(module.zero_grad, set_to_none=False)
        calls[before]()
        if backward:
            (scale * attached.loss_of(module, batch)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        calls[after]()
        replica.step()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"backward": False}, "no backward() came before it"),
        ({"backward": False, "before": "optimizer"}, "no backward() came before it"),
        ({"after": "model"}, "zero_grad() came between backward() and replica.step()"),
        ({"after": "optimizer"}, "zero_grad() came between backward() and replica.step()"),
        ({"after": "zeros"}, "zero_grad() came between backward() and replica.step()"),
        ({"before": "model"}, ""),
        ({"before": "zeros"}, ""),
        ({"scale": 0.0}, ""),
        ({"scale": 0.0, "before": "optimizer"}, ""),
    ],
)
@pytest.mark.parametrize("strategy", ["bsp", pytest.param("bsp ps", marks=pytest.mark.soak)])
def test_a_step_whose_gradient_is_missing_is_warned_of_once(strategy, case, words, caplog):
    module = attached.model()
    with attached.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), strategy) as replica:
        steps(replica, module, **case)
    assert len(caplog.messages) == bool(words)
    assert words in "".join(caplog.messages)


def test_gradients_of_accumulation_of_the_loops_own_and_of_skipped_steps_are_not_missing(caplog):
    module, optimizer, replica = attached_alone()
    (batch,) = attached.batches(1)
    with replica.accumulate():
        attached.loss_of(module, batch).backward()
    replica.step()
    replica.skip()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    replica.step()
    replica.close()
    assert caplog.messages == []
    optimizer.step()


class Unhooked(torch.optim.Optimizer):
    """A wrapper that does not call the constructor of its base class, as Accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (lambda optimizer: [optimizer], "got an object of type list"),
        (lambda optimizer: None, "got an object of type NoneType"),
        (lambda optimizer: type(optimizer), "got an object of type type"),
        (Unhooked, "Unhooked has no hooks for steps"),
    ],
)
def test_what_is_no_optimizer_is_refused(wrap, words):
    module = attached.model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=words):
        dure.attach(module, wrap(optimizer))
    with pytest.raises(UsageError, match=r"needs a torch\.nn\.Module first, and got an object of type SGD"):
        dure.attach(optimizer, module)


WRAPPED = """
import torch, dure
import torch.distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.device_mesh import init_device_mesh

def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

nested, whole = net(), net()
nested[1] = DistributedDataParallel(nested[1])
fully_shard(whole, mesh=init_device_mesh("cpu", (1,)))
models = (
    DistributedDataParallel(net()), nested, DataParallel(net()), whole,
    FullyShardedDataParallel(net(), device_id=torch.device("cpu")),
)
for topology in ("collective", "ps"):
    for model in models:
        try:
            dure.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), topology=topology)
            print("attached")
        except dure.DureError as error:
            print(type(error).__name__, error)
inside = DistributedDataParallel(net()).module
dure.attach(inside, torch.optim.SGD(inside.parameters(), lr=0.1)).close()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_models_that_synchronize_themselves_are_refused():
    """Over collectives and over servers alike."""
    done = run_alone(WRAPPED)
    assert done.returncode == 0, done.stderr
    outer, nested, parallel, sharded, fsdp, *over_servers = done.stdout.splitlines()
    assert over_servers == [outer, nested, parallel, sharded, fsdp]
    assert all(line.startswith("UsageError the ") for line in done.stdout.splitlines())
    assert "the model is wrapped by DistributedDataParallel" in outer
    assert "Attach the module inside (model.module)" in outer
    assert "the submodule '1' is wrapped by DistributedDataParallel" in nested
    assert "Put the module inside (model.1.module) in its place" in nested
    assert "wrapped by DataParallel" in parallel
    assert 'across=mesh["groups"]). Or attach the module before it is sharded, where shard=' in sharded
    assert "wrapped by FullyShardedDataParallel" in fsdp


def run_alone(program, *arguments):
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)


UNCLOSED = """
import sys, torch, dure

def main():
    model = torch.nn.Linear(4, 1)
    replica = dure.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), topology="ps")
    model(torch.ones(2, 4)).sum().backward()
    if sys.argv[1] == "takes no step":
        return
    replica.step()
    if sys.argv[1] == "closes":
        replica.close()
    if sys.argv[1] == "raises":
        raise OverflowError("the user's own mistake")
    if sys.argv[1] == "fails":
        model.double()
        replica.step()
    if sys.argv[1] == "exits":
        sys.exit(3)
    if sys.argv[1] == "keeps":
        globals()["kept"] = replica

main()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "code", "warns"),
    [
        ("forgets", 0, True),
        ("raises", 1, False),
        *soaked(
            ("keeps", 0, True),
            ("exits", 3, True),
            ("closes", 0, False),
            ("takes no step", 0, False),
            ("fails", 1, False),
        ),
    ],
)
def test_a_missing_close_is_warned_of_at_exit(how, code, warns):
    done = run_alone(UNCLOSED, how)
    assert done.returncode == code
    assert ("replica.close()" in done.stderr) == warns
    if warns:
        (line,) = done.stderr.splitlines()
        assert line.startswith("rank 0 ended its training without replica.close(): the ranks' models may differ")
    assert done.stderr.count("Traceback") == (code == 1)


ENDS_AT_ONCE = """
import os, signal
from dure.runtime.launch.shard_process import ShardProcess
helper = ShardProcess("takes_long_to_import", "server 0", {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_helper_ends_with_its_starter_even_before_it_has_come_up(tmp_path):
    """This waits for everybody who has the starter's standard error: the helper, too."""
    (tmp_path / "takes_long_to_import.py").write_text("import time; time.sleep(150)", encoding="utf-8")
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", ENDS_AT_ONCE]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=100)
    assert done.returncode == -signal.SIGKILL


def test_samplers_share_a_data_set_out():
    from dure.user_loop.source import share_of

    data = load_digits().train
    parts = [share_of(data, rank, 3, seed=1) for rank in range(3)]
    epochs = [[sorted(part) for part in parts] for _ in range(2)]
    assert sorted(index for part in epochs[0] for index in part) == list(range(len(data)))
    assert epochs[0] == epochs[1]
    first, second = list(parts[0]), list(parts[0])
    assert first != second
    assert len(parts[0]) == len(first)
    assert [len(share_of(data, rank, 3, split="whole")) for rank in range(3)] == [len(data)] * 3
    uneven = share_of(data, 0, 3, split="dirichlet:alpha=0.1")
    assert len(uneven) == len(set(uneven))


class InOrder(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Mislabelled(list):
    targets = (0, 1)


@pytest.mark.parametrize(
    ("data", "split", "words"),
    [
        (
            InOrder(),
            "iid",
            r"InOrder has none: .* islice\(samples, 1, None, 3\), which is islice\(samples, replica\.rank",
        ),
        ((i for i in range(9)), "iid", "generator has none: it needs __len__ and __getitem__"),
        (range(9).__iter__(), "iid", "range_iterator has none"),
        (7, "whole", "int has none"),
        (
            DataLoader(range(9)),
            "iid",
            r"a DataLoader gives batches\. Write sampler = replica\.sampler\(loader\.dataset",
        ),
        ([], "whole", "the data set is empty"),
        ([1, 2], "iid", "2 samples cannot go to 3 workers without overlap"),
        (
            Mislabelled(range(9)),
            "dirichlet:alpha=1",
            r"2 were found for 9 samples\. Write replica\.sampler\(dataset, targets",
        ),
        (range(9), "dirichlet:alpha=1", "dirichlet splits by label"),
    ],
)
def test_what_a_sampler_cannot_index_is_refused_with_what_to_write(data, split, words):
    from dure.user_loop.source import share_of

    with pytest.raises(UsageError, match=words):
        share_of(data, 1, 3, split=split)


def test_a_stream_that_each_rank_slices_has_each_sample_once():
    """Advice in the error of `share_of`."""
    parts = [list(itertools.islice(InOrder(), rank, None, 3)) for rank in range(3)]
    assert sorted(itertools.chain(*parts)) == list(range(9))


def test_labels_count_only_where_they_decide():
    from dure.user_loop.source import share_of

    data = Mislabelled(range(9))
    data.targets = ["cat"]  # of no tensor, and of another length
    parts = [list(share_of(data, rank, 2)) for rank in range(2)]
    assert sorted(itertools.chain(*parts)) == list(range(9))


def test_a_place_is_announced_for_a_while(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "5")
    with announced(RankEnvironment(1, 2, "127.0.0.1", local_size=2, local_rank=1), 29500):
        found = place()
        assert (found.rank, found.world_size, found.master, found.local_size) == (1, 2, "127.0.0.1", 2)
        assert os.environ["MASTER_PORT"] == "29500"
    assert "RANK" not in os.environ
    assert os.environ["WORLD_SIZE"] == "5"


def test_places():
    assert place({}) is None
    started = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    again = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert place({**started, **again}) == RankEnvironment(
        1, 2, "h", restarts=3, launch="job", local_size=2, local_rank=1
    )
    assert place(started).launch == place(started).launch != ""
    assert RankEnvironment(0, 2, "127.0.0.1").interface == "127.0.0.1"
    with pytest.raises(UsageError, match="not MASTER_ADDR, MASTER_PORT"):
        place({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="RANK must be from 0 to 1"):
        place({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        for text in ("\N{SUPERSCRIPT TWO}", "x", "-1", "9" * 5000):
            with pytest.raises(UsageError, match=f"{name} must be a whole number"):
                place({**started, name: text})


# ---- programs


@pytest.mark.soak
def test_the_example_prints_the_same_under_torchrun():
    done = torchrun(ROOT / "examples" / "02_attach.py")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == (ROOT / "examples" / "02_attach.out").read_text(encoding="utf-8")


@pytest.mark.long
def test_train_under_torchrun(tmp_path):
    command = ["-m", "dure", "train", "digits-mlp", "--sync", "ssp", "--on", "torchrun", "--steps", 60]
    started, key, secret = time.monotonic(), tmp_path / "key", os.urandom(32)
    key.write_bytes(secret)
    key.chmod(0o600)
    options = ["--topology", "ps:shards=2", "--key-file", key, "--integrity", "checksum"]
    done = torchrun(*command, *options, "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = done.stdout.splitlines()  # rank 0's, and nobody else's
    summary = json.loads(line)
    assert (summary["workers"], summary["on"], summary["time"]) == (2, "torchrun", "real")
    assert summary["updates_applied"] == 120
    assert summary["accuracy"] > 0.85
    assert 0 < summary["seconds"] < time.monotonic() - started
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["params_sha256"] == summary["params_sha256"]
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(secret in text or secret.hex().encode() in text for text in written)


RESTARTED = """
import os, signal, sys, threading, time
from pathlib import Path
from dure.cli.main import main

latest, mark = Path(sys.argv[1]) / "run" / "checkpoints" / "LATEST", Path(sys.argv[1]) / "killed"

def kill():
    while not ({early} or latest.exists()):
        time.sleep(0.005)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["RANK"] == "1" and not mark.exists():
    threading.Thread(target=kill, daemon=True).start()
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "early",
    [
        pytest.param(False, id="from its last checkpoint"),
        pytest.param(True, id="from its beginning", marks=pytest.mark.soak),
    ],
)
def test_after_a_death_torchrun_starts_all_again_and_the_run_goes_on(early, tmp_path):
    """A rank is killed once the first checkpoint is there, or before there is any; collectives need everybody."""
    program = tmp_path / "program.py"
    program.write_text(RESTARTED.replace("{early}", str(early)), encoding="utf-8")
    options = ["train", "digits-mlp", "--sync", "averaging:period=4", "--on", "torchrun", "--steps", 240]
    record = ["--checkpoint-every", 40, "--out", tmp_path / "run", "--json"]
    done = torchrun("--max-restarts", 1, program, tmp_path, *options, *record)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "killed").exists()
    summary = json.loads(done.stdout.splitlines()[-1])
    calm = dure.train("digits-mlp", sync="averaging:period=4", on="local", workers=2, steps=240)
    assert summary["params_sha256"] == calm.summary()["params_sha256"]
    assert summary["samples"] == 2 * 240 * 32
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_a_restart_touches_nothing_of_another_launch(tmp_path, monkeypatch):
    dure.train("digits-mlp", on="virtual", steps=4, out=tmp_path / "run", checkpoint_every=2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    config = TrainConfig(job="digits-mlp", on="torchrun", out=tmp_path / "run")
    assert after_restart(config) == config
    (tmp_path / "run" / "launch").write_text("mine")
    assert after_restart(config).resume == tmp_path / "run"


def test_on_torchrun_without_torchrun_says_what_to_write():
    with pytest.raises(UsageError, match="torchrun --nproc-per-node"):
        dure.train("digits-mlp", on="torchrun", steps=1)
