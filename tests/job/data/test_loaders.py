"""The folder of data sets, and the digits of the package."""

import hashlib
from importlib import resources
from pathlib import Path

import pytest
from support.wording import raising

from dure.errors import DataError
from dure.job.data import loaders
from dure.job.data.loaders import data_root, load_digits, published


def test_the_root_is_the_flag_then_the_environment_then_the_cache(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    environ = {"DURE_DATA": str(tmp_path / "b"), "XDG_CACHE_HOME": "/cache"}
    assert data_root(tmp_path / "a", environ) == tmp_path / "a"
    assert data_root(None, environ) == tmp_path / "b"
    assert data_root(None, {"XDG_CACHE_HOME": "/cache", "DURE_DATA": ""}) == Path("/cache/dure/data")
    assert data_root(None, {}) == Path.home() / ".cache" / "dure" / "data"


def test_a_named_root_must_exist(tmp_path: Path) -> None:
    with raising(DataError, "--data"):
        data_root(tmp_path / "absent", {})
    with raising(DataError, "DURE_DATA"):
        data_root(None, {"DURE_DATA": str(tmp_path / "absent")})


PUBLISHED = "f6d9e39f37dc45d327f6db33428ee58970ccceabb2535a5c179de35886b70443"
"""SHA-256 of the images and the labels that `sklearn.datasets.load_digits(return_X_y=True)` of 1.9.1 returns."""

LOADED = (
    "014741e7d698fcf5fea9c5cb3c4d4219f08921b4262250879db8006fb023543a",
    "b62c5684e8251c8e20627b6f858d1d50425f76bc8df93d7d32a0a37610a341dc",
    "d46231a84602579fa8ba279d748e7f125fe830316d9f61251a65fc3d25e523d0",
    "5cdf6153e06c54789040e110205f7e1770aadd654b9a62373e10c0ca293008d2",
)
"""SHA-256 of training and test inputs and targets, as they were when scikit-learn delivered the images."""


def test_the_bundled_images_are_those_of_scikit_learn():
    images, labels = published()
    assert (images.shape, images.min(), images.max(), labels.max()) == ((1797, 64), 0, 16, 9)
    assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest() == PUBLISHED


@pytest.mark.parametrize("part", ["missing", "empty", "half", "changed"])
def test_a_damaged_file_is_named_with_its_remedy(part, tmp_path, monkeypatch):
    whole = (resources.files("dure.job.data") / "digits.npz").read_bytes()
    middle = len(whole) // 2
    parts = {"empty": b"", "half": whole[:middle], "changed": whole[:middle] + bytes(8) + whole[middle + 8 :]}
    if part in parts:
        (tmp_path / "damaged.npz").write_bytes(parts[part])
    monkeypatch.setattr(loaders, "FILE", str(tmp_path / "damaged.npz"))
    with pytest.raises(DataError) as caught:
        published()
    assert "damaged.npz, a part of dure, is missing or damaged (" in str(caught.value)


def test_the_split_and_the_scaling_are_fixed():
    data = load_digits()
    assert (len(data.train), len(data.test)) == (1437, 360)
    tensors = (data.train.inputs, data.train.targets, data.test.inputs, data.test.targets)
    assert tuple(hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in tensors) == LOADED


def test_the_licences_stand_beside_the_images():
    text = (resources.files("dure.job.data") / "digits.txt").read_text(encoding="utf-8")
    for part in ("Alpaydin", "CC BY 4.0", "BSD 3-Clause License", "(c) 2007-2026 The scikit-learn developers"):
        assert part in text
