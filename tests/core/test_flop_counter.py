"""The counter of operations against convolutions whose backward is two forwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dure.core.flop_counter import FlopCounter


@pytest.mark.parametrize("groups", [1, 4, 32])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_backward_of_a_convolution_is_two_forwards_also_in_groups(kind, groups):
    layer = kind(64, 32, 3, stride=2, padding=1, groups=groups, device="meta")
    images = torch.empty(2, 64, 9, 9, device="meta", requires_grad=True)
    with FlopCounter() as counter:
        outputs = layer(images)
        forward = counter.get_total_flops()
        outputs.sum().backward()
    places = (outputs if kind is nn.Conv2d else images).shape[2:].numel()
    assert forward == 2 * 2 * places * 64 * 32 * 9 // groups
    assert counter.get_total_flops() == 3 * forward


def test_a_convolution_whose_inputs_need_no_gradient_has_one_forward_as_backward():
    layer = nn.Conv2d(8, 8, 3, groups=2, device="meta")
    with FlopCounter() as counter:
        layer(torch.empty(1, 8, 5, 5, device="meta")).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 9 * 8 * 8 * 9 // 2)
