"""`dure.integrations.accelerate.attach` beside Accelerate's own DDP, at ranks of a real torchrun."""

from importlib.metadata import version

import pytest

pytest.importorskip("accelerate")

from support import accelerate_cases as cases
from support.trainers import distance, started

from dure.errors import UsageError
from dure.integrations.accelerate import check_version

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("accelerate"), pytest.mark.timeout(400)]
EQUAL = ("fp64", "fp32", "sgd", "accumulation", "bf16", "norm", "unused", "split_batches", "dispatched")
OTHERS = ("methods", "resume", "from_ddp", "last_model", "two_models", "refusals", "wrapper_is_not_called", "uneven")
OTHERS += ("overflow",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def ranks(folder):
    return started(cases.__file__, folder, *EQUAL, *OTHERS)


@pytest.mark.parametrize("case", EQUAL)
def test_bsp_equals_accelerates_ddp_at_two_ranks(ranks, case):
    for rank in ranks:
        ddp, bsp = rank[case]
        assert len(ddp["losses"]) >= 22
        assert ddp["losses"][0] != ddp["losses"][-1]
        assert distance(ddp, bsp) == 0


THREE = (
    "this state is of a training with 2 ranks, and 3 are attached: each has a replica of its own. Start 2 ranks, or "
    "load the model alone and leave the state."
)


def test_bsp_differs_in_the_last_bits_at_three_ranks_and_a_checkpoint_of_two_is_refused(folder, ranks):
    below = folder / "three"
    below.mkdir()
    for rank in started(cases.__file__, below, "fp64", "three_ranks_read", ranks=3):
        assert distance(*rank["fp64"]) < 1e-12
        assert rank["three_ranks_read"] == THREE


def test_methods_end_near_bsp(ranks):
    def score(way):
        return sum(sum(rank["methods"][way]["scores"][-3:]) for rank in ranks)

    for way in ("averaging", "diloco", "int8"):
        assert score(way) == pytest.approx(score("bsp"), rel=0.05)
        assert score(way) != score("bsp")
    assert score("servers") < 1.1 * score("bsp")
    for way in ("averaging", "diloco", "servers"):
        assert ranks[0]["methods"][way]["state"] == ranks[1]["methods"][way]["state"]


@pytest.mark.parametrize("way", cases.RESUMED)
def test_a_resumed_training_equals_an_uninterrupted_one(ranks, way):
    for rank in ranks:
        whole, resumed, files = rank["resume"][way]
        assert len(resumed["losses"]) == 24 - cases.SAVED_AT[way]
        assert distance(whole, resumed, tail=True) == 0
        assert files == ["rank0.pt", "rank1.pt"]


def test_a_checkpoint_of_ddp_goes_on_under_bsp(ranks):
    for rank in ranks:
        assert distance(*rank["from_ddp"], tail=True) == 0


def test_the_last_checkpoint_is_the_final_model(ranks):
    assert [rank["last_model"] for rank in ranks] == [[True] * 3] * 2


def test_two_models_of_one_accelerator_are_kept_apart(ranks):
    assert [rank["two_models"] for rank in ranks] == [[True, [6, 6], "Net"]] * 2


def test_a_step_that_overflows_at_one_rank_is_skipped_by_all(ranks):
    for rank in ranks:
        ways = rank["overflow"]
        assert ways["bsp"] == ways["ddp"]
        for way, found in ways.items():
            assert found["skipped"] == [False, False, True, *5 * [False]]
            assert found["scales"] == ways["ddp"]["scales"]
            assert found["rates"] == ways["ddp"]["rates"]
            assert found["state"] == ranks[0]["overflow"][way]["state"]
    assert ranks[0]["overflow"]["averaging:period=3"]["norms"][2] > 0  # without an overflow of its own


def test_ranks_with_loaders_of_different_lengths_end_with_the_shortest(ranks):
    assert [rank["uneven"] for rank in ranks] == [[8, 6], [6, 6]]


def test_what_cannot_be_attached_is_refused(ranks):
    for rank in ranks:
        unprepared, hooked = rank["refusals"]
        assert unprepared == (
            "attach needs the model and the optimizer that accelerator.prepare returned, and got Net and AdamW. Write "
            "`model, optimizer = accelerator.prepare(model, optimizer)` first."
        )
        assert hooked == (
            "the hook fp16 of DistributedDataParallelKwargs would not run: attach synchronizes in place of "
            'DistributedDataParallel. Leave it out; attach(..., codec="int8") encodes what is sent.'
        )
        assert rank["wrapper_is_not_called"].startswith(
            "DistributedDataParallel was called around an attached model: it would synchronize"
        )


def test_a_version_without_a_needed_method_is_refused_and_another_one_is_named(caplog):
    with pytest.raises(UsageError) as refused:
        check_version("accelerate", "0.1", object, ("no_sync",))
    assert str(refused.value) == (
        f"dure.integrations.accelerate needs object.no_sync, which accelerate {version('accelerate')} does not have. "
        "Install accelerate==0.1, the version that is tested."
    )
    check_version("accelerate", "0.1", object, ())
    assert "dure.integrations.accelerate is tested with accelerate 0.1, and this is" in caplog.text
