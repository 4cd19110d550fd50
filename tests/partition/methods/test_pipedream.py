"""PipeDream against its recursion, written from the paper's equations as plain loops."""

import hashlib

import pytest
import torch
from support.chains import play
from support.delayed import delayed, sgd

from dure.partition.methods.pipedream import PipeDream
from dure.partition.stage import Stage

STEPS = 14


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "delay_of"),
    [
        ("", lambda stages, k: stages - 1 - k),
        ("sync=vertical", lambda stages, k: stages - 1),
        ("ahead=many", lambda stages, k: 2 * (stages - 1 - k)),
        ("sync=vertical,ahead=many", lambda stages, k: 2 * (stages - 1)),
    ],
)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_run_follows_its_recursion_bit_for_bit(options, delay_of, stages):
    delays = [delay_of(stages, k) for k in range(stages)]
    run = play(f"pipedream:{options}", stages, steps=STEPS)
    assert torch.equal(run.params, delayed(delays, STEPS))
    for k, (stage, delay) in enumerate(zip(run.stages, delays, strict=True)):
        filling = dict.fromkeys(range(delay), 1)
        assert stage.counts.staleness == filling | {delay: STEPS - delay}
        assert stage.pipeline.staleness(k) == delay
        assert stage.counts.most_versions == delay + 1  # the newest included


def test_a_stage_keeps_the_activations_of_the_mini_batches_in_flight():
    assert [stage.counts.most_sets for stage in play("pipedream", 4).stages] == [4, 3, 2, 1]
    assert [stage.counts.most_sets for stage in play("pipedream:ahead=many", 4).stages] == [7, 5, 3, 1]


@pytest.mark.parametrize("options", ["", "sync=vertical", "ahead=many"])
def test_one_stage_is_sgd_bit_for_bit(options):
    assert torch.equal(play(f"pipedream:{options}", 1, steps=STEPS).params, sgd(STEPS))


@pytest.mark.parametrize("options", ["sync=none", "sync=vertical"])
def test_rematerialisation_changes_no_bit(options):
    kept, again = (play(f"pipedream:{options},remat={remat}", 3).params for remat in ("false", "true"))
    assert torch.equal(kept, again)


def hashes(monkeypatch):
    """The hash of the weights that each forward and each backward reads, by (kind, rank, mini-batch)."""
    found = {}

    def hashed(kind, reads):
        def reading(pipeline, stage, batch):
            weights = reads(pipeline, stage, batch)
            found[kind, stage.rank, batch] = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
            return weights

        return reading

    for kind, name in (("F", "forward_reads"), ("B", "backward_reads")):
        monkeypatch.setattr(PipeDream, name, hashed(kind, getattr(PipeDream, name)))
    return found


def mismatches(found):
    return [
        (rank, batch)
        for kind, rank, batch in found
        if kind == "F" and found["F", rank, batch] != found["B", rank, batch]
    ]


def test_a_backward_reads_the_weights_of_its_forward(monkeypatch):
    found = hashes(monkeypatch)
    play("pipedream", 4, steps=STEPS)
    assert len(found) == 2 * 4 * STEPS
    assert not mismatches(found)
    assert found["F", 0, 4] != found["F", 0, 5]


def test_a_stash_by_reference_is_found(monkeypatch):
    monkeypatch.setattr(Stage, "stash", lambda stage, batch: stage.newest)  # the weights under it change
    found = hashes(monkeypatch)
    run = play("pipedream", 4, steps=STEPS)
    assert mismatches(found)
    assert not torch.allclose(run.params, delayed([3, 2, 1, 0], STEPS), rtol=0, atol=1e-6)


def test_a_stage_moves_to_other_memory_before_its_weights_change_under_a_stash():
    run = play("pipedream", 3)
    for stage in run.stages:
        assert len(stage._free) <= stage.counts.most_versions - 1  # no more memory than versions
