"""Transformers without values: parameters and operations are the published ones, and splits inside layers work."""

from __future__ import annotations

import pytest
import torch
from support.runs import virtual
from support.wording import raising
from torch import nn

from dure.core.flop_counter import FlopCounter
from dure.errors import UsageError
from dure.job.job import load_job
from dure.job.shapes.transformers import Attention, Sizes, rotated
from dure.partition.blocks import blocks_of

LLAMA = "transformer:layers=32,hidden=4096,heads=32,kv=8,ffn=14336,vocab=128256,sequence=64,form=llama"

PUBLISHED = {
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "transformer": 124_439_808,  # GPT-2
    "transformer:layers=48,hidden=1600,heads=25": 1_557_611_200,  # GPT-2 XL
    LLAMA: 8_030_261_248,  # Llama 3.1
}


def numel(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert numel(load_job(name).build()) == PUBLISHED[name]


def test_encoders_without_their_heads_have_the_published_parameters() -> None:
    for name, expected in (("bert-base", 109_482_240), ("albert-base", 11_683_584)):
        embeddings, layer, *_, head = load_job(name).build().children()
        pooler = numel(head.pooled)
        layers = 12 * numel(layer) if name == "bert-base" else numel(layer)
        assert numel(embeddings) + layers + pooler == expected


def test_a_decoder_makes_six_operations_per_parameter_and_word_and_those_of_attention() -> None:
    job = load_job("transformer:layers=4,hidden=512,heads=8,vocab=1000,sequence=256")
    module = job.build()
    inputs, _ = job.train.batch(torch.arange(2))
    with FlopCounter() as counter, torch.no_grad():
        module(inputs)
    weights = 4 * 12 * 512**2 + 1000 * 512
    attention = 4 * 2 * 256 * 512  # products of queries with keys, and of their shares with values
    assert counter.get_total_flops() == 2 * 2 * 256 * (weights + attention)


def test_attention_with_few_heads_of_keys_is_that_of_repeated_heads() -> None:
    torch.manual_seed(0)
    few = Attention(Sizes(32, 4, 2, 64, "llama"), causal=True)
    many = Attention(Sizes(32, 4, 4, 64, "llama"), causal=True)
    with torch.no_grad():
        for name in ("query", "output"):
            getattr(many, name).weight.copy_(getattr(few, name).weight)
        for name in ("key", "value"):
            heads = getattr(few, name).weight.unflatten(0, (2, 8))
            getattr(many, name).weight.copy_(heads.repeat_interleave(2, dim=0).flatten(0, 1))
    inputs = torch.randn(3, 5, 32)
    assert torch.allclose(few(inputs), many(inputs), atol=1e-6)


def test_rotated_products_depend_on_the_distance_of_positions() -> None:
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    products = rotated(query.expand(1, 1, 6, 16)) @ rotated(key.expand(1, 1, 6, 16)).transpose(2, 3)
    for distance in range(5):
        diagonal = products[0, 0].diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4)
    assert not torch.allclose(products[0, 0, 3, 0], products[0, 0, 0, 0], atol=1e-2)


def test_layers_are_blocks_of_a_pipeline_and_split_over_workers() -> None:
    job = load_job("transformer:layers=2,hidden=64,heads=4,vocab=100,sequence=16,batch=4")
    assert len(blocks_of(job, job.build())) == 4
    for strategy in ("bsp 1f1b:stages=2,micro=2", "bsp tensor:ways=2", "bsp 1f1b:stages=2,micro=2+tensor:ways=2"):
        assert virtual(job, strategy, workers=4, steps=2, timing_only=True).summary["seconds"] > 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("transformer:layers=0", "layers must be at least 1"),
        ("transformer:heads=5", "hidden=768 must be an even number for each of heads=5"),
        ("transformer:kv=5", "kv=5 must divide heads=12"),
        ("transformer:ffn=-1", "ffn must be at least 1"),
        ("transformer:form=bert", "form must be gpt or llama"),
        ("transformer:precision=fp12", "precision must be one of fp32"),
        ("transformer:batch=999999999", "batch must be at most 100,000"),
        ("transformer:layers=100000", "layers must be at most 1,000"),
        ("transformer:accumulate=64", "accumulate=64 divides a step of batch_size=32"),
        ("bert-base:sequence=513", "sequence must be from 1 to its 512 places"),
    ],
)
def test_wrong_sizes_are_refused(name: str, words: str) -> None:
    with raising(UsageError, words):
        load_job(name)
