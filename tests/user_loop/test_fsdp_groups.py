"""`dure.attach(across=...)`: groups of ranks whose inside `fully_shard` synchronizes, by four ranks of a real torchrun.

The oracle is `by_hand` of `support/fsdp_groups.py`: `fully_shard`, and the equations of the papers along a line. Where
sums are exact, plain PyTorch in this process has the same bits too, without any part.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import fsdp_groups as groups
from support.wording import raising
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dure
from dure.errors import ReplicaError, UsageError
from dure.user_loop.groups import Lines

ROOT = Path(__file__).parents[2]
RANKS = range(4)
# One process runs them all, since they share what the torchruns gave.
pytestmark = [pytest.mark.xdist_group("fsdp"), pytest.mark.timeout(700)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
CASES = sorted(name.removeprefix("case_") for name in vars(groups) if name.startswith("case_"))


def torchrun(*arguments, timeout=300):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    return subprocess.run(
        [*command, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of the cases, by rank: those that resume have processes of their own."""
    folder, gave = tmp_path_factory.mktemp("fsdp"), [{} for _ in RANKS]
    for some in ([name for name in CASES if name != "resumes"], ["resumes"]):
        done = torchrun(groups.__file__, folder, *some)
        assert done.returncode == 0, done.stderr[-4000:]
        for rank in RANKS:
            gave[rank] |= json.loads((folder / f"{rank}.json").read_text())
    return gave


def of_all(ranks, case):
    return [ranks[rank][case] for rank in RANKS]


def simulated(name, shape, weights=None, left_out=()):
    """The model that a method delivers, by plain PyTorch: a whole model for each group, and no part of any."""
    count, inside = shape
    shares = weights or [1 / count] * count
    models = [groups.Linears(0) for _ in range(count)]
    optimizers = [groups.sgd(model) for model in models]
    center = [each.detach().clone() for each in models[0].parameters()]
    begun, delta = center, [torch.zeros_like(each) for each in center]

    def means():
        each_of = zip(*(model.parameters() for model in models), strict=True)
        return [sum(s * each.detach() for s, each in zip(shares, some, strict=True)) for some in each_of]

    for step in range(groups.STEPS):
        for group, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for rank in range(group * inside, (group + 1) * inside):
                (groups.squares(model, groups.dyadic(step, rank)) / inside).backward()
            if step not in left_out:
                optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % groups.PERIOD and step + 1 < groups.STEPS:
            continue
        if name == "averaging":
            begun = center = means()
        else:
            delta = [0.5 * d + 0.75 * (mean - old) for d, mean, old in zip(delta, means(), begun, strict=True)]
            center = [old + d for old, d in zip(center, delta, strict=True)]
            ahead = 0.0 if name == "classical" else 0.5
            begun = [new + ahead * d for new, d in zip(center, delta, strict=True)]
        for model in models:
            for parameter, values in zip(model.parameters(), begun, strict=True):
                parameter.data.copy_(values)
    return list(chain.from_iterable(each.flatten().tolist() for each in center))


# ---- what is synchronized


@pytest.mark.long
@pytest.mark.parametrize(("shape", "name"), [(shape, name) for shape, names in groups.SHAPES.items() for name in names])
def test_each_method_has_the_bits_of_a_loop_by_hand(ranks, shape, name):
    case = f"{name} {shape[0]}x{shape[1]}"
    for rank in RANKS:
        hand, found = ranks[rank]["exact"][case]
        assert found == hand
    models = [ranks[rank]["exact"][case][1]["whole"] for rank in RANKS]
    assert all(each == models[0] for each in models)
    assert len({json.dumps(ranks[rank]["exact"][case][1]["trace"]) for rank in RANKS}) == len(RANKS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((2, 2), "averaging"),
        ((2, 2), "bmuf"),
        ((2, 2), "classical"),
        ((2, 2), "diloco"),
        ((1, 4), "bmuf"),
        ((4, 1), "bmuf"),
    ],
)
def test_the_model_does_not_depend_on_its_parts(ranks, shape, name):
    """Parts of 5, 1 and 3 rows over 4, 2 and 1 ranks: some have fewer rows than others, and some have none."""
    assert ranks[0]["exact"][f"{name} {shape[0]}x{shape[1]}"][1]["whole"] == simulated(name, shape)


@pytest.mark.long
@pytest.mark.parametrize("name", ["averaging", "bmuf", "diloco"])
def test_a_network_with_adamw_equals_a_loop_by_hand(ranks, name):
    for rank in RANKS:
        hand, found = ranks[rank]["adamw"][name]
        if name == "averaging":
            assert found == hand
        else:  # the equations round in another order
            pairs = zip([*found["trace"], found["whole"]], [*hand["trace"], hand["whole"]], strict=True)
            assert all(torch.allclose(torch.tensor(one), torch.tensor(two), atol=1e-6) for one, two in pairs)


@pytest.mark.long
def test_a_group_counts_by_the_batches_of_its_ranks(ranks):
    for hand, found in of_all(ranks, "weights"):
        assert found == hand
    assert ranks[0]["weights"][1]["whole"] == simulated("averaging", (2, 2), weights=[0.25, 0.75])


@pytest.mark.long
def test_gradients_that_add_up_are_those_of_the_whole_batch(ranks):
    for rank in RANKS:
        whole = ranks[rank]["exact"]["averaging 2x2"][1]["part"]
        assert ranks[rank]["accumulated"] == [whole, whole]


@pytest.mark.long
def test_bytes_are_those_of_the_part_at_a_synchronization_and_of_the_agreement_at_each_step(ranks):
    """Two ranks send a half of their part twice; four ranks send 2 * 3 of the four pieces of five numbers."""
    for steps, part in of_all(ranks, "bytes_sent"):
        agreement = steps[0]
        assert agreement in (28, 32)
        assert steps == [agreement, agreement + part] * 2


@pytest.mark.long
def test_running_statistics_are_merged_over_all_ranks(ranks):
    found = of_all(ranks, "buffers")
    mean = torch.tensor([each["own"] for each in found]).mean(0)
    for each in found:
        assert torch.allclose(torch.tensor(each["merged"]), mean)
        assert each["merged"] == found[0]["merged"]
        assert each["batches"] == 3
    assert found[0]["own"] != found[1]["own"]


@pytest.mark.long
def test_what_is_frozen_starts_from_the_first_group(ranks):
    found = of_all(ranks, "frozen")
    for rank in RANKS:
        assert found[rank]["after"] == found[rank % 2]["before"]
        assert found[rank]["whole"] == found[0]["whole"]
    assert found[0]["before"] != found[2]["before"]


@pytest.mark.long
def test_codecs_encode_parts(ranks):
    """All ranks have one model; rank 1 and rank 3 have no part of the layer of one row."""
    for models in zip(*(each["codecs"].values() for each in ranks), strict=True):
        assert all(each == models[0] for each in models)
    models = ranks[0]["codecs"]
    assert len({json.dumps(models[f"{codec} net"]) for codec in ("int8", "1bit", "top-k")}) == 3


# ---- evaluation, changes and states


@pytest.mark.long
def test_evaluation_shows_what_close_delivers_and_leaves_no_trace(ranks):
    """The forward inside leaves whole parameters in the root module, which the next step must not compute with."""
    for rank in RANKS:
        seen = ranks[rank]["evaluation"].pop("seen")
        outputs = ranks[rank]["evaluation"].pop("outputs")
        assert ranks[rank]["evaluation"] == ranks[rank]["exact"]["bmuf 2x2"][1]
        assert seen[1:3] == ranks[rank]["delivered"]
        model = groups.Linears(0)
        for values, output in zip(seen, outputs, strict=True):
            nn.utils.vector_to_parameters(torch.tensor(values, dtype=torch.float64), model.parameters())
            assert torch.equal(model(groups.dyadic(0, rank)[0]), torch.tensor(output, dtype=torch.float64))


@pytest.mark.long
def test_changes_in_place_count_between_steps_and_are_refused_inside_evaluation(ranks):
    for refused, counts, at_the_end in of_all(ranks, "changes_inside"):
        assert refused[0] == "UsageError"
        assert "changed in place inside `with replica.evaluation()" in refused[1]
        assert {*counts} == {2.0}
        assert {*at_the_end} == {3.0}


@pytest.mark.long
@pytest.mark.parametrize("name", groups.RESUMED)
def test_a_training_in_parts_equals_one_without_a_break(ranks, name):
    for rank in RANKS:
        resumed, unbroken = ranks[rank]["resumes"][name]
        assert resumed == unbroken != ranks[rank]["saves"][name]


@pytest.mark.long
def test_the_state_of_another_rank_is_refused(ranks):
    for rank in RANKS:
        kind, text = ranks[rank]["state_of_another_rank"]
        assert (kind, f"of a rank with rank {rank ^ 1}, and this rank has {rank}" in text) == ("UsageError", True)


# ---- steps that all ranks leave out


@pytest.mark.long
def test_a_step_that_one_rank_cannot_take_is_left_out_by_all(ranks):
    for hand, with_nan, skipped in of_all(ranks, "left_out"):
        assert with_nan == hand
        assert skipped == hand
    assert ranks[0]["left_out"][1]["whole"] == simulated("averaging", (2, 2), left_out=(1,))


@pytest.mark.long
def test_gradients_of_nan_end_the_training_of_all_ranks(ranks):
    for rank, (kind, text) in enumerate(of_all(ranks, "nan_stays")):
        assert kind == "Quarantined"
        assert ("at rank 2 hold" if rank == 2 else "at another rank hold") in text
        assert "in 3 steps in a row, the last of them step 2" in text


@pytest.mark.long
def test_an_overflow_at_one_rank_skips_the_step_of_all_and_lowers_all_scales(ranks):
    for rank, found in enumerate(of_all(ranks, "scaler")):
        assert found["scale"] == 2.0
        assert found["part"] == ranks[rank]["left_out"][0]["part"]


@pytest.mark.long
def test_all_ranks_end_with_the_group_that_has_fewer_batches(ranks):
    found = of_all(ranks, "uneven_loaders")
    assert [each["clock"] for each in found] == [3] * 4
    assert [each["going"] for each in found] == [[True, True, True, False, False]] * 2 + [[True, True, True]] * 2
    assert all(each["whole"] == found[0]["whole"] for each in found)


KILLED = """
import os, signal, sys, torch, torch.distributed as dist, dure
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("groups", "inside"))
model = torch.nn.Linear(4, 5)
fully_shard(model, mesh=mesh["inside"])
try:
    with dure.attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), sync="diloco:period=2", across=mesh["groups"]
    ) as replica:
        for step in range(100):
            if step == 3 and replica.rank in (2, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(2, 4)).sum().backward()
            replica.step()
except dure.DureError as error:
    print(type(error).__name__, "after", replica.clock, "steps:", error, flush=True)
os._exit(0)
"""


@pytest.mark.long
def test_a_killed_group_does_not_hang_the_others(tmp_path):
    program = tmp_path / "loop.py"
    program.write_text(KILLED, encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {**ENVIRONMENT, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in RANKS
    ]
    try:
        said = [each.communicate(timeout=100) for each in processes]
    finally:
        for each in processes:
            each.kill()
    assert [each.returncode for each in processes] == [0, 0, -signal.SIGKILL, -signal.SIGKILL]
    for out, errors in said[:2]:
        assert out.startswith("PeerLost after 3 steps: "), errors
        assert "a rank is gone" in out


@pytest.mark.soak
def test_the_example_prints_the_same_under_torchrun():
    done = torchrun(ROOT / "examples" / "11_fsdp_groups.py")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == (ROOT / "examples" / "11_fsdp_groups.out").read_text(encoding="utf-8")


# ---- what is refused


@pytest.mark.long
def test_what_ranks_must_agree_on_is_an_error(ranks):
    for case in ("over_both_dimensions", "the_other_dimension"):
        for found in of_all(ranks, case):
            for kind, text in found if case == "over_both_dimensions" else [found]:
                assert kind == "UsageError"
                assert "too, which is in another group. Split it inside a group alone" in text
    for kind, text in of_all(ranks, "different_models"):
        assert (kind, "all ranks must attach the same model" in text) == ("UsageError", True)
    for kind, text in of_all(ranks, "mean_of_gradients"):
        assert (kind, "asks for the mean of a gradient over all groups" in text) == ("UsageError", True)


@pytest.fixture
def mesh():
    """A device mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("groups", "inside"))
    dist.destroy_process_group()


def attach(mesh, sync, make=groups.exact, **more):
    module, optimizer = make(mesh)
    return module, dure.attach(module, optimizer, sync=sync, **{"across": mesh["groups"], **more})


def test_alone_a_group_has_the_bits_of_a_loop_by_hand(mesh):
    given = groups.exact, groups.squares, groups.dyadic, mesh
    assert groups.attached(groups.METHODS["bmuf"], *given) == groups.by_hand("bmuf", *given)


@pytest.mark.parametrize(
    ("sync", "topology", "words"),
    [
        ("bsp", None, "bsp"),
        ("bsp", "ps", "ps"),
        ("ssp", None, "ssp"),
        ("ad-psgd", None, "ad-psgd"),
        ("easgd", None, "easgd"),
        ("averaging", "collective:algorithm=ring", "algorithm=ring"),
        ("averaging:schedule=overhead", None, "schedule=overhead"),
        ("diloco:fragments=2", None, "fragments=2"),
    ],
)
def test_strategies_that_do_not_run_across_groups_are_refused(mesh, sync, topology, words):
    with raising(UsageError, words):
        attach(mesh, sync, topology=topology)


def test_a_method_whose_decisions_use_the_gradient_is_refused(mesh):
    class Choosy(groups.MeanOfGradients):
        traits = dure.Traits(needs=("group",), delivers="mean", keeps={})

    with raising(UsageError, "Choosy"):
        attach(mesh, Choosy())


@pytest.mark.parametrize("across", [None, "groups", 0, "mesh"])
def test_what_is_no_dimension_of_a_mesh_is_refused(mesh, across):
    with raising(UsageError, "fully_shard" if across is None else "across"):
        attach(mesh, "averaging", across=mesh if across == "mesh" else across)


def unsplit(mesh):
    module = groups.Linears(0)
    return module, groups.sgd(module)


def partly_split(mesh):
    module = groups.Linears(0)
    fully_shard(module.layers[0], mesh=mesh["inside"])
    return module, groups.sgd(module)


@pytest.mark.parametrize(("make", "words"), [(unsplit, "Linears"), (partly_split, "layers.1.weight")])
def test_parameters_that_are_not_split_are_refused(mesh, make, words):
    with raising(UsageError, words):
        attach(mesh, "averaging", make)


@pytest.mark.parametrize("lines", [[[0, 1], []], [[0, 1], [1]], [[0], [0]], [[1, 0], [1, 0]]])
def test_ranks_that_name_different_lines_are_refused(lines):
    with raising(UsageError, "across"):
        Lines.of([{"line": line, "inside": [rank]} for rank, line in enumerate(lines)])


def freeze(module):
    module.layers[1].bias.requires_grad_(False)


def convert(module):
    module.float()


def add(module):
    module.layers.append(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("change", "words"), [(freeze, "layers.1.bias"), (convert, "float32"), (add, "layers.3.weight")]
)
def test_changes_of_the_model_are_an_error_of_the_next_step(mesh, change, words):
    module, replica = attach(mesh, "averaging")
    groups.squares(module, groups.dyadic(0, 0)).backward()
    change(module)
    with raising(ReplicaError, words):
        replica.step()


def test_a_forward_without_gradients_before_attach_and_between_steps_changes_nothing(mesh):
    def look(module, *_):
        with torch.no_grad():  # it leaves whole parameters in the root module
            module(groups.dyadic(0, 0)[0])

    def looked_at(mesh):
        module, optimizer = groups.exact(mesh)
        look(module)
        return module, optimizer

    rest = groups.METHODS["bmuf"], groups.exact, groups.squares, groups.dyadic, mesh
    found = groups.attached(rest[0], looked_at, *rest[2:], between=look)
    assert found == groups.attached(*rest)


def test_a_state_without_the_gradients_that_add_up_is_refused(mesh):
    module, replica = attach(mesh, "averaging")
    module.set_requires_gradient_sync(False)
    with replica.accumulate():
        groups.squares(module, groups.dyadic(0, 0)).backward()
    with raising(UsageError, "accumulate"):
        replica.state_dict()
    module.set_requires_gradient_sync(True)
    groups.squares(module, groups.dyadic(1, 0)).backward()
    replica.step()
    assert replica.state_dict()["clock"] == 1
    replica.close()


def test_a_step_without_a_gradient_is_warned_of_and_a_parameter_without_one_stays(mesh, caplog):
    module, replica = attach(mesh, "averaging:period=9")
    before = groups.part(module)[-12:]
    module.layers[0](groups.dyadic(0, 0)[0]).sum().backward()
    replica.step()
    assert torch.equal(groups.part(module)[-12:], before)
    assert caplog.messages == []
    replica.step()
    assert "no backward() came before it" in caplog.text
    replica.close()
    assert all(each.grad is None for each in module.parameters())
