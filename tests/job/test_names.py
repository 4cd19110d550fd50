"""Names of jobs: other distributions offer them by entry points, and a missing one is named with its remedy."""

import sys
from importlib.metadata import PackageNotFoundError

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
    for name in ("curves", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
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


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("broken:curved", "ModuleNotFoundError"),
        ("curves:curvd", "AttributeError"),
        ("curves:curved:dim", "curves:curved:dim"),
        ("", "''"),
        ("curves", "is curves"),
    ],
)
def test_an_entry_point_that_offers_no_function_is_named_with_its_distribution(value, named, site):
    (site / "broken.py").write_text("import absent_package\n")
    offer(site, "curves", {"curved": value})
    with raising(UsageError, "of curves", named):
        load_job("curved")


@pytest.mark.parametrize("value", ["curves:Family.curved", "curves:curved [more, parts]"])
def test_an_entry_point_has_any_form_that_packaging_defines(value, site):
    (site / "curves.py").write_text(f"{MODULE}\n\nclass Family:\n    curved = staticmethod(curved)\n")
    offer(site, "curves", {"curved": value})
    assert load_job("curved:dim=5").optimum.shape == (5,)


@pytest.mark.parametrize(
    "entries", [b"[dure.jobs]\ncurved\n", b"[dure.jobs]\ncurved = curves:curv\xff\n"], ids=["line", "byte"]
)
def test_entry_points_that_cannot_be_read_are_named_with_their_distribution(entries, site):
    offer(site, "curves", {})
    (site / "curves-0.1.0.dist-info" / "entry_points.txt").write_bytes(entries)
    with raising(UsageError, f"curves, in {site}"):
        load_job("curved")


def test_a_name_of_two_distributions_without_a_name_is_refused(site):
    for name in ("curves", "others"):
        offer(site, name, {"curved": f"{name}:curved"})
        (site / f"{name}-0.1.0.dist-info" / "METADATA").write_text("Version: 0.1.0\n")
    with raising(UsageError, "curves:curved, others:curved"):
        load_job("curved")


def test_a_job_of_a_missing_distribution_is_named_with_its_remedy(site, monkeypatch):
    monkeypatch.setattr(names, "version", missing)
    assert (
        names.unknown("cifar10-vgg16")
        == "the job cifar10-vgg16 is part of dure-jobs, which is not installed: pip install dure-jobs"
    )


def missing(name):
    raise PackageNotFoundError(name)


def test_a_job_that_an_older_distribution_lacks_is_named_with_the_version(site):
    offer(site, "dure-jobs", {"mnist-mlp": "curves:curved"})
    said = "the job cifar10-vgg16 is part of dure-jobs, and dure-jobs 0.1.0 has none of this name: "
    assert names.unknown("cifar10-vgg16") == f"{said}pip install --upgrade dure-jobs"
