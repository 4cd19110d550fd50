"""Files of safetensors that are written piece by piece, read by the library of the format."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from dure.run.tensor_file import TensorFile, TensorSize


def test_pieces_in_any_order_make_the_tensors(tmp_path):
    tensors = {
        "half": torch.arange(7).to(torch.bfloat16),
        "flags": torch.tensor([[True, False, True]]),
        "double": torch.randn(3, 5, dtype=torch.float64),
        "count": torch.tensor(3),
        "nothing": torch.empty(0, 4),
    }
    sizes = {name: TensorSize(each.dtype, each.shape) for name, each in tensors.items()}
    with TensorFile(tmp_path / "whole.safetensors", sizes) as file:
        for name, each in tensors.items():
            values = each.reshape(-1)
            file.put(name, values.numel() // 2, values[values.numel() // 2 :])
            file.put(name, 0, values[: values.numel() // 2])
    found = load_file(tmp_path / "whole.safetensors")
    assert found.keys() == tensors.keys()
    for name, each in tensors.items():
        assert found[name].shape == each.shape
        assert torch.equal(found[name], each), name


@pytest.mark.parametrize("step", [1, 3, 4, 100])
def test_ranges_of_a_vector_get_their_elements_from_pieces_of_it(step, tmp_path):
    whole, ranges = torch.arange(20.0), [(12, 17), (0, 4), (6, 7)]
    with TensorFile(tmp_path / "own.safetensors", {"own": TensorSize(whole.dtype, [10])}) as file:
        for start in range(0, 20, step):
            file.put_ranges("own", ranges, start, whole[start : start + step])
    assert load_file(tmp_path / "own.safetensors")["own"].tolist() == [12, 13, 14, 15, 16, 0, 1, 2, 3, 6]


def test_a_type_that_the_format_has_not_is_refused(tmp_path):
    with pytest.raises(ValueError, match="complex128"):
        TensorFile(tmp_path / "no.safetensors", {"no": TensorSize(torch.complex128, [1])})
