"""The job `cifar10-vgg16`: shapes of the paper, any width, images of two sizes."""

from pathlib import Path

import pytest
import torch
from support.archives import unpack
from support.runs import virtual
from support.wording import raising
from torch import nn

import dure
from dure.errors import UsageError
from dure.job.job import load_job
from dure.job.shapes.images import vgg, vgg16

RECORD = bytes([10]) * 1024 + bytes([20]) * 1024 + bytes([30]) * 1024


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """CIFAR-10 with twenty training images: label i % 10; pixel 1 of row 0 is 10 i in red."""
    images = [bytes([i % 10]) + RECORD[:1] + bytes([10 * i]) + RECORD[2:] for i in range(20)]
    files = {"data_batch_1.bin": b"".join(images), "test_batch.bin": b"".join(images[:4])}
    unpack(tmp_path, {f"cifar-10-batches-bin/{name}": body for name, body in files.items()})
    return tmp_path


def parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def test_the_whole_network_has_the_size_of_the_paper() -> None:
    with torch.device("meta"):
        whole = vgg(width=1, size=224, classes=1000)
    assert parameters(whole) == 138_357_544
    assert [each.shape for each in whole.parameters()] == [each.shape for each in vgg16().model().parameters()]
    features, classifier = whole[:31], whole[31:]
    assert features(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 512, 7, 7)
    assert classifier(torch.empty(2, 512, 7, 7, device="meta")).shape == (2, 1000)
    assert parameters(features) == 14_714_688  # the paper's convolutions


def test_width_is_a_factor_of_channels_and_units(root: Path) -> None:
    module = load_job("cifar10-vgg16", data_root=root, width=1 / 16, classes=12).build()
    channels = [each.out_channels for each in module if isinstance(each, nn.Conv2d)]
    assert channels == [4, 4, 8, 8, 16, 16, 16, 32, 32, 32, 32, 32, 32]
    shapes = [tuple(each.weight.shape) for each in module if isinstance(each, nn.Linear)]
    assert shapes == [(256, 32), (256, 256), (12, 256)]
    assert module(torch.zeros(2, 3, 32, 32)).shape == (2, 12)


def test_the_default_job_has_real_values(root: Path) -> None:
    job = load_job("cifar10-vgg16", data_root=root)
    module = job.build()
    assert parameters(module) == 2_112_730
    inputs, targets = job.train.batch(torch.arange(20))
    outputs = module(inputs)
    job.loss(outputs, targets).backward()
    assert all(each.grad.abs().sum() > 0 for each in module.parameters())
    assert outputs.std() > 0.1  # with PyTorch's initial values 13 convolutions leave 1e-3 of the signal
    assert "20 images" in job.source


def test_images_are_enlarged_as_they_are_read(root: Path) -> None:
    small, large = (load_job("cifar10-vgg16", data_root=root, width=1 / 32, size=size) for size in (32, 64))
    rows = torch.tensor([3, 17])
    images, labels = small.train.batch(rows)
    enlarged, same = large.train.batch(rows)
    assert torch.equal(labels, same)
    assert enlarged.shape == (2, 3, 64, 64)
    assert torch.equal(enlarged, images.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))
    assert large.build()(enlarged).shape == (2, 10)
    run = dure.train(large, on="virtual", workers=2, steps=2, batch_size=2, eval_every=2, split="dirichlet:alpha=1")
    assert run.history[-1]["updates"] == 4


def test_features_and_classifier_in_two_stages_are_one_worker(root: Path) -> None:
    job = load_job("cifar10-vgg16", data_root=root, width=1 / 32, dtype="float64", batch_size=4)
    one = virtual(job, "bsp", workers=1, steps=3)
    pipeline = virtual(job, "bsp gpipe:stages=2,micro=2,cuts=31", workers=2, steps=3)
    assert (pipeline.params - one.params).abs().max() < 1e-12
    sent = pipeline.summary["per_worker"]["worker 0"]["bytes_sent"]
    assert sent == 3 * 4 * 16 * 8  # 16 channels of one pixel, in float64


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"width": 0.0}, "width=0.25"),
        ({"size": 48}, "of 32,"),
        ({"classes": 9}, "CIFAR-10"),
    ],
)
def test_settings_that_cannot_be_are_explained(root: Path, settings: dict[str, object], said: str) -> None:
    with raising(UsageError, said):
        load_job("cifar10-vgg16", data_root=root, **settings)
