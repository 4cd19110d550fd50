"""IDX files: tiny ones made here in the published layout, whole and damaged; the real ones where there are any."""

import gzip
import os
import struct
from pathlib import Path

import pytest
import torch
from support.wording import raising

from dure.errors import DataError
from dure_jobs.data.mnist import load_mnist, read_images, read_labels

NOWHERE = ("http://127.0.0.1:9",)


def images(count: int, rows: int = 28, magic: int = 2051, announced: int | None = None) -> bytes:
    header = struct.pack(">4i", magic, count if announced is None else announced, rows, 28)
    return header + bytes(i * 7 % 256 for i in range(count * rows * 28))


def labels(count: int, magic: int = 2049, high: int = 10) -> bytes:
    return struct.pack(">2i", magic, count) + bytes(i % high for i in range(count))


def write_set(folder: Path, *, packed: bool = True) -> None:
    folder.mkdir(parents=True)
    for part, count in (("train", 12), ("t10k", 5)):
        for name, body in ((f"{part}-images-idx3-ubyte", images(count)), (f"{part}-labels-idx1-ubyte", labels(count))):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(body))
            else:
                (folder / name).write_bytes(body)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
def test_reads_the_published_layout(tmp_path: Path, packed: bool, folder: str) -> None:
    write_set(tmp_path / "root" / folder, packed=packed)
    loaded = load_mnist(tmp_path / "root", NOWHERE)
    assert loaded.train.inputs.shape == (12, 1, 28, 28)
    assert loaded.train.inputs.dtype == torch.float32
    assert loaded.train.targets.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert len(loaded.test) == 5
    assert "12 training and 5 test images" in loaded.source


def test_pixels_keep_their_places_and_are_standardised(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(images(3))
    pixels = read_images(path)
    assert pixels.dtype == torch.uint8
    assert [int(pixels[2, 1, 5]), int(pixels[0, 0, 1])] == [(2 * 784 + 28 + 5) * 7 % 256, 7]
    write_set(tmp_path / "mnist")
    train = load_mnist(tmp_path, NOWHERE).train
    assert train.inputs[0, 0, 0, 1].item() == pytest.approx((7 / 255 - 0.1307) / 0.3081, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (images(3, magic=2049), "number 2049,"),
        (images(3)[:-1], "announces 3"),
        (images(3) + b"\0", "follow"),
        (images(3, announced=4), "announces 4"),
        (images(3, announced=-1), "1"),
        (images(3, announced=2**31 - 1), "2,147,483,647"),
        (images(0), "announces 0"),
        (images(3, rows=29), "x 28"),
        (images(3)[:9], "of 16"),
        (b"", "header"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_damaged_images_are_refused(tmp_path: Path, body: bytes, said: str, packed: bool) -> None:
    path = tmp_path / ("damaged.gz" if packed else "damaged")
    path.write_bytes(gzip.compress(body) if packed else body)
    with raising(DataError, said) as caught:
        read_images(path)
    assert str(path) in str(caught.value)
    assert f"published {path.name}" in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-20], lambda b: b[:10], lambda b: b"PK" + b[2:], lambda b: b[:30] + b"\xff" * 9]
)
def test_damaged_gzip_is_refused(tmp_path: Path, damage) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(damage(gzip.compress(images(30))))
    with raising(DataError, "x.gz"):
        read_images(path)


def test_a_flipped_bit_in_gzip_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(bytes(images(3)), compresslevel=0))
    packed[len(packed) // 2] ^= 1
    (tmp_path / "x.gz").write_bytes(packed)
    with raising(DataError, "CRC"):
        read_images(tmp_path / "x.gz")


def test_labels_above_nine_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(labels(20, high=12))
    with raising(DataError, "label 11,"):
        read_labels(tmp_path / "x")


def test_images_and_labels_must_be_of_one_set(tmp_path: Path) -> None:
    write_set(tmp_path / "mnist")
    (tmp_path / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels(11)))
    with raising(DataError, "12"):
        load_mnist(tmp_path, NOWHERE)


def test_offline_the_error_says_which_files_go_where(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_mnist(tmp_path, NOWHERE)
    for part in ("train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz", str(tmp_path / "mnist"), "127.0.0.1:9"):
        assert part in str(caught.value)
    assert list((tmp_path / "mnist").iterdir()) == []


@pytest.mark.skipif("DURE_DATA" not in os.environ, reason="DURE_DATA names no folder with MNIST")
def test_the_real_set() -> None:
    loaded = load_mnist(Path(os.environ["DURE_DATA"]), NOWHERE)
    assert (len(loaded.train), len(loaded.test)) == (60_000, 10_000)
    assert loaded.train.targets[:8].tolist() == [5, 0, 4, 1, 9, 2, 1, 3]
    assert abs(loaded.train.inputs.mean().item()) < 1e-3
    assert abs(loaded.train.inputs.std().item() - 1) < 1e-3
