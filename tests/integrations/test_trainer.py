"""`DureTrainer` beside the Trainer of transformers with its own DDP, at ranks of a real torchrun."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support import trainer_cases as cases
from support.trainers import distance, started

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("trainer"), pytest.mark.timeout(600)]
EQUAL = ("fp64", "fp32", "sgd", "accumulation", "bf16", "checkpointing", "subclass")
MORE = ("plain", "best_model", "last_checkpoint", "again", "refusals", "uneven", "overflow")
OTHERS = ("methods", "resume", "from_ddp", "error_at_one_rank")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def ranks(folder):
    """In two calls, each within its time on a busy machine."""
    first = started(cases.__file__, folder, *EQUAL, *MORE)
    return [one | other for one, other in zip(first, started(cases.__file__, folder, *OTHERS), strict=True)]


@pytest.mark.parametrize("case", EQUAL)
def test_bsp_equals_the_trainers_ddp_at_two_ranks(ranks, case):
    for rank in ranks:
        ddp, bsp = rank[case]
        assert len(ddp["losses"]) == ddp["clock"] >= 6
        assert ddp["losses"][0] != ddp["losses"][-1]
        assert distance(ddp, bsp) == 0


def test_with_batch_norm_losses_weights_and_the_buffers_of_rank_0_are_equal(ranks):
    """At other ranks the Trainer evaluates with running statistics of their own under its DDP."""
    for number, rank in enumerate(ranks):
        ddp, bsp = rank["plain"]
        assert distance(ddp, bsp, kinds=("losses",)) == 0
        differing = {name for name, values in ddp["state"].items() if values != bsp["state"][name]}
        assert differing == ({"body.1.running_mean", "body.1.running_var"} if number else set())
        assert bsp["state"] == ranks[0]["plain"][1]["state"]


THREE = (
    "this state is of a training with 2 ranks, and 3 are attached: each has a replica of its own. Start 2 ranks, or "
    "load the model alone and leave the state."
)


def test_bsp_differs_in_the_last_bits_at_three_ranks_and_a_checkpoint_of_two_is_refused(folder, ranks):
    below = folder / "three"
    below.mkdir()
    found = started(cases.__file__, below, "fp64", "three_ranks_read", ranks=3)
    for rank in found:
        ddp, bsp = rank["fp64"]
        assert distance(ddp, bsp) < 1e-12
        assert rank["three_ranks_read"]
    assert THREE in [rank["three_ranks_read"] for rank in found]


def test_methods_end_near_bsp(ranks):
    def score(way):
        return ranks[0]["methods"][way]["scores"][-1]

    assert 0.6 < score("bsp") < 0.63
    assert score("ssp:bound=2 ps:shards=2") < 1.05 * score("bsp")  # in an order of its own
    for way in cases.WAYS[1:]:
        if "ps" not in way.split()[-1]:
            assert score(way) == pytest.approx(score("bsp"), rel=0.05)
        assert score(way) != score("bsp")
        assert ranks[0]["methods"][way]["state"] == ranks[1]["methods"][way]["state"]


@pytest.mark.parametrize("way", cases.RESUMED)
def test_a_resumed_training_equals_an_uninterrupted_one(ranks, way):
    for rank in ranks:
        whole, resumed, files = rank["resume"][way]
        assert len(resumed["losses"]) == 12 - cases.RESUMED[way]
        assert distance(whole, resumed, tail=True) == 0
        assert files == ["rank0.pt", "rank1.pt"]


def test_a_checkpoint_of_ddp_goes_on_under_bsp(ranks):
    for rank in ranks:
        assert distance(*rank["from_ddp"], tail=True) == 0


def test_the_best_model_is_the_one_of_the_best_evaluation(ranks):
    for rank in ranks:
        for best, after, same in rank["best_model"].values():
            assert best == after
            assert same


def test_the_last_checkpoint_is_the_final_model(ranks):
    for rank in ranks:
        for same, last, after, (evaluated, predicted) in rank["last_checkpoint"].values():
            assert same
            assert last == after
            assert evaluated == predicted


def test_a_trainer_trains_twice(ranks):
    for rank in ranks:
        first, second, logs, detached = rank["again"]
        assert second < first
        assert logs == 24
        assert detached


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_a_step_that_overflows_at_one_rank_is_skipped_by_all(ranks, optim):
    for rank in ranks:
        ddp, bsp, averaging = (rank["overflow"][f"{way} {optim}"] for way in ("ddp", "bsp", "averaging:period=3"))
        assert bsp == ddp
        assert averaging[:2] == ddp[:2]
        rates = ddp[0]
        assert (rates[1] == rates[2]) == (optim == "adamw_torch")  # a schedule pauses, where Accelerate sees the skip
        assert averaging == ranks[0]["overflow"][f"averaging:period=3 {optim}"]


def test_ranks_with_loaders_of_different_lengths_end_with_the_shortest(ranks):
    """Rank 0 has taken a batch more when it learns of the end."""
    assert [rank["uneven"]["bsp"]["clock"] for rank in ranks] == [13, 12]
    assert [len(rank["uneven"]["bsp"]["losses"]) for rank in ranks] == [12, 12]
    assert [len(rank["uneven"]["averaging:period=5"]["losses"]) for rank in ranks] == [2, 2]
    for way in ranks[0]["uneven"]:
        assert ranks[0]["uneven"][way]["state"] == ranks[1]["uneven"][way]["state"]


def test_an_error_at_one_rank_ends_the_others_with_its_cause(ranks):
    assert ranks[0]["error_at_one_rank"].startswith("PeerLost: rank 1 failed with RuntimeError: the disk is full. ")
    assert ranks[1]["error_at_one_rank"] == "RuntimeError: the disk is full"


def test_what_cannot_be_trained_is_refused(ranks):
    for rank in ranks:
        assert rank["refusals"] == (
            "enable_jit_checkpoint=True lets each rank save after a timer of its own, so ranks may save at different "
            'steps and wait for each other for ever. Leave it out, and save by save_strategy="steps".'
        )
