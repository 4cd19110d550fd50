"""The progress line of a run of reinforcement learning."""

import pytest

import dure


@pytest.mark.soak
def test_a_run_shows_its_job_and_its_return_in_its_progress_line(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    job = "apex:env=CartPole-v1,actors=1,min_size=60,episodes=1"
    run = dure.train(job, on="virtual", workers=1, steps=2, eval_every=1, batch_size=8)
    shown = capsys.readouterr().err
    assert run.history[-1]["mean_return"] > 0
    assert "apex CartPo" in shown
    assert f"return {run.history[-1]['mean_return']:.4g}" in shown
