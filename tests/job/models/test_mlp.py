"""Dense jobs: the default model is unchanged, and deep networks begin with signals of equal strength."""

import torch
from support.runs import virtual
from support.wording import raising
from torch import nn

from dure.errors import UsageError
from dure.job.job import load_job
from dure.job.models.mlp import deep_mlp_maker


def test_one_hidden_layer_is_the_network_of_pytorch() -> None:
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    for job in (load_job("digits-mlp", hidden=32), load_job("digits-mlp", hidden=32, depth=1)):
        built = job.build(3)
        assert [type(each) for each in built] == [type(each) for each in expected]
        for mine, right in zip(built.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, right)


def test_depth_counts_hidden_layers() -> None:
    module = load_job("digits-mlp", hidden=5, depth=7).build()
    assert isinstance(module, nn.Sequential)
    shapes = [tuple(each.weight.shape) for each in module if isinstance(each, nn.Linear)]
    assert shapes == [(5, 64), *[(5, 5)] * 6, (10, 5)]
    with raising(UsageError, "depth=7"):
        load_job("digits-mlp", depth=0)


def test_a_deep_network_keeps_the_strength_of_a_signal() -> None:
    """The mean square of a layer's sums stays about 2; PyTorch's values divide it by 6 in each layer."""
    torch.manual_seed(0)
    module = deep_mlp_maker(600, 600, 7, 600)()
    signal, strengths = torch.randn(50, 600), []
    for layer in module:
        signal = layer(signal).detach()
        if isinstance(layer, nn.Linear):
            strengths.append(float(signal.square().mean()))
            assert not layer.bias.any()
    assert len(strengths) == 8
    assert all(0.5 < each / strengths[0] < 2 for each in strengths)


def test_a_pipeline_of_eight_stages_is_one_worker() -> None:
    job, options = "digits-mlp:depth=7,hidden=16", {"steps": 5, "batch_size": 8, "dtype": "float64"}
    one = virtual(job, "bsp", workers=1, **options)
    for partition in ("gpipe:stages=8,micro=2", "1f1b:stages=4,micro=4"):
        pipeline = virtual(job, f"bsp {partition}", workers=int(partition[partition.index("=") + 1]), **options)
        assert (pipeline.params - one.params).abs().max() < 1e-12
