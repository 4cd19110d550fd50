"""Names of jobs: other distributions offer them by entry points, and a missing one is named with its remedy."""

import pytest
from support.core_only import offer
from support.wording import raising

import dure
from dure.errors import UsageError
from dure.job import names
from dure.job.job import load_job

MODULE = """
from dure.job.models.quadratic import quadratic


def curved(dim: int = 3):
    return quadratic(dim)
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages, with a module that the jobs of a distribution are in."""
    (tmp_path / "curves.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


def test_a_distribution_offers_a_job_here_and_in_the_processes_of_a_run(site):
    offer(site, "curves", {"curved": "curves:curved", "digits-mlp": "curves:curved"})
    assert names.known_jobs()[-1] == "curved"
    assert names.may_have_companions("curved:dim=4")
    assert load_job("curved:dim=4").optimum.shape == (4,)
    assert load_job("digits-mlp").name == "digits-mlp"  # a name of dure stays dure's
    settings = {"workers": 1, "steps": 3, "seed": 0}
    real, virtual = (dure.train("curved:dim=4", on=on, **settings) for on in ("local", "virtual"))
    assert real.summary()["loss"] == pytest.approx(virtual.summary()["loss"], rel=1e-6)


def test_a_name_of_two_distributions_is_refused(site):
    offer(site, "curves", {"curved": "curves:curved"})
    offer(site, "others", {"curved": "others:curved"})
    with raising(UsageError, "Uninstall"):
        load_job("curved")


def test_a_job_whose_module_is_broken_is_named(site):
    (site / "broken.py").write_text("import absent_package\n")
    offer(site, "curves", {"curved": "broken:curved"})
    with raising(UsageError, "ModuleNotFoundError"):
        load_job("curved")


def test_a_job_of_a_missing_distribution_is_named_with_its_remedy():
    assert names.unknown("vgg16") == "the job vgg16 is part of dure-jobs, which is not installed: pip install dure-jobs"
