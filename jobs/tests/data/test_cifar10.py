"""The binary layout of CIFAR-10: tiny sets made here, whole and damaged; the real one where there is any."""

import os
import tarfile
from pathlib import Path

import pytest
import torch
from support.archives import pack, unpack
from support.wording import raising

from dure.errors import DataError
from dure_jobs.data.cifar10 import load_cifar10

NOWHERE = ("http://127.0.0.1:9",)
FOLDER = "cifar-10-batches-bin"


def batch(count: int, first: int = 0) -> bytes:
    """Image i: label (first + i) % 10, red 10, green 20, blue 30, but its second red pixel is i."""
    planes = bytes([10]) * 1024 + bytes([20]) * 1024 + bytes([30]) * 1024
    return b"".join(bytes([(first + i) % 10]) + planes[:1] + bytes([i]) + planes[2:] for i in range(count))


def members() -> dict[str, bytes]:
    return {
        f"{FOLDER}/batches.meta.txt": b"airplane\n",
        f"{FOLDER}/data_batch_1.bin": batch(4),
        f"{FOLDER}/data_batch_3.bin": batch(3, first=5),
        f"{FOLDER}/test_batch.bin": batch(2),
    }


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("under", ["cifar10", "."])
def test_takes_the_batches_that_are_there(tmp_path: Path, packed: bool, under: str) -> None:
    if packed:
        pack(tmp_path / under / "cifar-10-binary.tar.gz", members())
    else:
        unpack(tmp_path / under, members())
    loaded = load_cifar10(tmp_path, NOWHERE)
    assert loaded.train.inputs.shape == (7, 3, 32, 32)
    assert loaded.train.inputs.dtype == torch.float32
    assert loaded.train.targets.tolist() == [0, 1, 2, 3, 5, 6, 7]
    assert len(loaded.test) == 2
    assert "2 of 5 training batches (7 images) and 2 test images" in loaded.source


def test_pixels_keep_channel_and_place_and_are_standardised(tmp_path: Path) -> None:
    unpack(tmp_path, members())
    image = load_cifar10(tmp_path, NOWHERE).train.inputs[3]
    assert image[:, 9, 9].tolist() == pytest.approx(
        [(10 / 255 - 0.4914) / 0.2470, (20 / 255 - 0.4822) / 0.2435, (30 / 255 - 0.4465) / 0.2616], abs=1e-5
    )
    assert image[0, 0, 1].item() == pytest.approx((3 / 255 - 0.4914) / 0.2470, abs=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("data_batch_3.bin", batch(3)[:-1], "where 1"),
        ("data_batch_3.bin", b"", "has 0"),
        ("data_batch_3.bin", b"\x0a" + batch(1)[1:], "label 10,"),
        ("test_batch.bin", None, "test_batch"),
    ],
)
def test_damaged_batches_are_refused(tmp_path: Path, packed: bool, name: str, body: bytes | None, said: str) -> None:
    files = {**members(), f"{FOLDER}/{name}": body}
    files = {key: value for key, value in files.items() if value is not None}
    if packed:
        pack(tmp_path / "cifar-10-binary.tar.gz", files)
    else:
        unpack(tmp_path, files)
    with raising(DataError, said) as caught:
        load_cifar10(tmp_path, NOWHERE)
    assert "published cifar-10-binary.tar.gz" in str(caught.value)


def test_an_archive_without_training_batches_is_refused(tmp_path: Path) -> None:
    pack(tmp_path / "cifar-10-binary.tar.gz", {"elsewhere/data_batch_1.bin": batch(1)})
    with raising(DataError, "data_batch_1.bin"):
        load_cifar10(tmp_path, NOWHERE)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("../escape.bin", tarfile.REGTYPE, "folder"),
        (f"{FOLDER}/../../escape", tarfile.REGTYPE, "folder"),
        ("/etc/escape", tarfile.REGTYPE, "folder"),
        (f"{FOLDER}/data_batch_2.bin", tarfile.SYMTYPE, "neither"),
        (f"{FOLDER}/data_batch_2.bin", tarfile.LNKTYPE, "neither"),
        (f"{FOLDER}/device", tarfile.CHRTYPE, "neither"),
    ],
)
def test_unsafe_archives_are_refused(tmp_path: Path, name: str, kind: bytes, said: str) -> None:
    extra = tarfile.TarInfo(name)
    extra.type = kind
    extra.linkname = "/etc/passwd"
    pack(tmp_path / "cifar-10-binary.tar.gz", members(), extra)
    with raising(DataError, said):
        load_cifar10(tmp_path, NOWHERE)


def test_a_member_larger_than_any_published_is_refused(tmp_path: Path) -> None:
    pack(tmp_path / "cifar-10-binary.tar.gz", {**members(), f"{FOLDER}/bomb": bytes(40_000_000)})
    with raising(DataError, "40,000,000"):
        load_cifar10(tmp_path, NOWHERE)


@pytest.mark.parametrize("keep", [0, 5, 200, -30, -4])
def test_cut_archives_are_refused(tmp_path: Path, keep: int) -> None:
    path = pack(tmp_path / "cifar-10-binary.tar.gz", members())
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with raising(DataError, "binary.tar.gz"):
        load_cifar10(tmp_path, NOWHERE)


def test_offline_the_error_says_which_file_goes_where(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_cifar10(tmp_path, NOWHERE)
    for part in ("cifar-10-binary.tar.gz", FOLDER, str(tmp_path / "cifar10"), "127.0.0.1:9"):
        assert part in str(caught.value)


@pytest.mark.skipif("DURE_DATA" not in os.environ, reason="DURE_DATA names no folder with CIFAR-10")
def test_the_real_set() -> None:
    loaded = load_cifar10(Path(os.environ["DURE_DATA"]), NOWHERE)
    assert len(loaded.train) in range(10_000, 50_001, 10_000)
    assert loaded.train.targets.bincount(minlength=10).min() > 900
    assert abs(loaded.train.inputs.mean().item()) < 0.05
    assert abs(loaded.train.inputs.std().item() - 1) < 0.05
