"""Models that are split by the plans found for them, against whole models: outputs, gradients and collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from itertools import combinations
from threading import Lock
from typing import Any

import pytest
import torch
from support.ways import on_ways
from support.wording import raising
from torch import Tensor, nn
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

from dure.errors import UsageError
from dure.job.models.char_gpt import decoder
from dure.job.shapes.transformers import Sizes
from dure.job.shapes.transformers import decoder as decoder_by_name
from dure.partition.tensor.plan import SplitPlan
from dure.partition.tensor.plans import columns, megatron, rows
from dure.partition.tensor.sequence import by_positions
from dure.partition.tensor.ways import CollectiveCall, Ways

WORDS = torch.randint(0, 31, (3, 7), generator=torch.Generator().manual_seed(1))
LAYERS = 2


def bert(kind: type = BertModel, config: type = BertConfig, dropout: float = 0.0) -> nn.Module:
    sizes = {
        "vocab_size": 31,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "intermediate_size": 26,
        "max_position_embeddings": 9,
    }
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return kind(config(num_hidden_layers=LAYERS, embedding_size=8, **sizes, **drops))


def albert() -> nn.Module:
    return bert(AlbertModel, AlbertConfig)


def gpt() -> nn.Module:
    return decoder(31, 24, LAYERS, 6, 9)


MODELS: dict[str, Callable[[], nn.Module]] = {"bert": bert, "albert": albert, "gpt": gpt}


def outputs_of(model: nn.Module) -> Tensor:
    if isinstance(model, nn.Sequential):
        outputs: Tensor = model(WORDS)
        return outputs
    found: Tensor = model(input_ids=WORDS, attention_mask=(WORDS > 3).long()).pooler_output
    return found


Passes = tuple[Tensor, dict[str, Any], Counter[str], Counter[str]]
"""At one worker: outputs, gradients, and the collectives of the forward and of both passes."""


def passes(whole: nn.Module, plan: SplitPlan, ways: int) -> list[Passes]:
    """A forward and a backward of a split model, at each worker."""

    def at(own: Ways) -> Passes:
        part = plan.apply(deepcopy(whole), own)
        part.zero_grad()
        found = outputs_of(part)
        forward = Counter(own.counts)
        found.square().sum().backward()
        return found.detach(), {key: each.grad for key, each in part.named_parameters()}, forward, own.counts

    return on_ways(ways, at)


PLANS: dict[str, Callable[[nn.Module, int], SplitPlan]] = {"pairs": megatron, "rows": rows, "columns": columns}


@pytest.mark.parametrize(("plan", "right"), [("pairs", 8), ("rows", 27), ("columns", 23)])
def test_a_layer_sends_as_many_elements_as_the_papers_say(plan: str, right: int) -> None:
    """In units of its input, along rings: one more layer of BERT. An all-reduce counts twice."""

    def elements(layers: int) -> int:
        sizes = {"vocab_size": 31, "hidden_size": 24, "num_attention_heads": 6, "intermediate_size": 96}
        whole = BertModel(
            BertConfig(num_hidden_layers=layers, max_position_embeddings=9, **sizes), add_pooling_layer=False
        )
        split = PLANS[plan](whole, 2)

        def at(ways: Ways) -> int:
            sent, carried = 0, ways.carry_out

            def counted(call: CollectiveCall) -> Any:
                nonlocal sent
                sent += sum(shape.numel() for shape in call.receives) * (2 if call.kind == "all_reduce" else 1)
                return carried(call)

            ways.carry_out = counted
            part = split.apply(deepcopy(whole), ways)
            part(input_ids=WORDS, attention_mask=(WORDS > 3).long()).last_hidden_state.square().sum().backward()
            return sent

        return on_ways(2, at)[0]

    assert elements(3) - elements(2) == right * WORDS.numel() * 24


def sequence(module: nn.Module, ways: int) -> SplitPlan:
    return by_positions(megatron(module, ways), module)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ways", [1, 2, 4, 6])
@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_sequence_parallelism_equals_the_whole_model(name: str, ways: int) -> None:
    """7 positions, in uneven parts. Gradients of layers between are partial; all others are as in the whole model."""
    torch.manual_seed(0)
    whole = MODELS[name]().double()
    outputs = outputs_of(whole)
    outputs.square().sum().backward()
    plan = sequence(whole, ways)

    each, shards = passes(whole, plan, ways), plan.shards(whole, ways)
    for rank, (found, gradients, forward, both) in enumerate(each):
        torch.testing.assert_close(found, outputs.detach(), rtol=0, atol=1e-12)
        assert dict(forward) == {"all_reduce": 1, "all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS}
        backward = both - forward
        assert dict(backward) == {"all_gather": 2 * LAYERS + 1, "reduce_scatter": 2 * LAYERS}
        for key, parameter in whole.named_parameters():
            if parameter.grad is None:
                continue
            right = shards[key][rank].of(parameter.grad) if key in shards else parameter.grad
            mine = sum(other[1][key] for other in each) if key in plan.partial else gradients[key]
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


def test_pairs_outside_of_a_transformer_have_no_positions() -> None:
    """A perceptron of the mean over all positions, behind a BERT."""
    torch.manual_seed(0)
    whole = nn.ModuleDict(
        {"bert": bert(), "head": nn.Sequential(nn.Linear(24, 6), nn.GELU(), nn.Linear(6, 2))}
    ).double()

    def outputs(model: nn.Module) -> Tensor:
        hidden = model.get_submodule("bert")(input_ids=WORDS).last_hidden_state
        found: Tensor = model.get_submodule("head")(hidden.mean(1))
        return found.detach()

    plan = sequence(whole, 2)
    for found in on_ways(2, lambda ways: outputs(plan.apply(deepcopy(whole), ways))):
        torch.testing.assert_close(found, outputs(whole), rtol=0, atol=1e-12)


def test_sequence_parallelism_is_refused_where_it_is_not_known() -> None:
    with raising(UsageError, "char-gpt"):
        sequence(albert(), 2)


def collectives(name: str, plan: str) -> tuple[dict[str, int], dict[str, int]]:
    """The right numbers: of a forward, and of a forward and its backward.

    A transformer layer has two collectives forward and two backward in pairs, and else one for each linear layer: six,
    of which char-gpt joins three. All models but char-gpt have a pooler, ALBERT a map from embeddings too, and char-gpt
    a head. Queries, keys and values share one all-reduce of their input's gradient, but not one all-gather.
    """
    if plan == "pairs":
        return {"all_reduce": 1 + 2 * LAYERS}, {"all_reduce": 1 + 4 * LAYERS}
    linear = {"bert": 6 * LAYERS + 1, "albert": 6 * LAYERS + 2, "gpt": 4 * LAYERS + 1}[name]
    if plan == "rows":
        return {"all_reduce": linear}, {"all_reduce": linear, "all_gather": linear}
    copies = {"bert": 4 * LAYERS + 1, "albert": 4 * LAYERS + 2, "gpt": 4 * LAYERS + 1}[name]
    return {"all_gather": linear}, {"all_gather": linear, "all_reduce": copies}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ways", [1, 2, 4, 6])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_equals_the_whole_one(name: str, plan: str, ways: int) -> None:
    """Outputs, gradients and the number of collectives; heads may be divided unevenly."""
    torch.manual_seed(0)
    whole = MODELS[name]().double()
    outputs = outputs_of(whole)
    outputs.square().sum().backward()
    splits = PLANS[plan](whole, ways)

    shards = splits.shards(whole, ways)
    for rank, (found, gradients, *counts) in enumerate(passes(whole, splits, ways)):
        torch.testing.assert_close(found, outputs.detach(), rtol=0, atol=1e-12)
        assert tuple(map(dict, counts)) == collectives(name, plan)
        for key, each in whole.named_parameters():
            if each.grad is not None:
                right = shards[key][rank].of(each.grad) if key in shards else each.grad
                torch.testing.assert_close(gradients[key], right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize(("form", "kv"), [("gpt", 6), ("llama", 6), ("llama", 3)])
def test_a_split_transformer_by_name_equals_the_whole_one(form: str, kv: int, ways: int) -> None:
    if kv % ways:
        with raising(UsageError, "cannot divide 3 heads of keys"):
            megatron(decoder_by_name(Sizes(24, 6, kv, 26, form), LAYERS, 31, 9), ways)
        return
    torch.manual_seed(0)
    whole = decoder_by_name(Sizes(24, 6, kv, 26, form), LAYERS, 31, 9).double()
    outputs = outputs_of(whole)
    outputs.square().sum().backward()
    splits = megatron(whole, ways)

    shards = splits.shards(whole, ways)
    assert len(shards) >= LAYERS * 6
    for rank, (found, gradients, *_) in enumerate(passes(whole, splits, ways)):
        torch.testing.assert_close(found, outputs.detach(), rtol=0, atol=1e-12)
        for key, each in whole.named_parameters():
            right = shards[key][rank].of(each.grad) if key in shards else each.grad
            torch.testing.assert_close(gradients[key], right, rtol=1e-14, atol=1e-12)


def test_parts_hold_their_share_of_the_split_parameters() -> None:
    whole = bert()
    plan = megatron(whole, 2)
    split = {key for key, _ in whole.named_parameters() if key in plan.shards(whole, 2)}
    numel = {key: each.numel() for key, each in whole.named_parameters()}
    for part in on_ways(2, lambda ways: plan.apply(deepcopy(whole), ways)):
        assert [key for key, _ in part.named_parameters()] == list(numel)
        for key, each in part.named_parameters():
            if key != "embeddings.word_embeddings.weight":  # 16 and 15 rows
                assert each.numel() == (numel[key] // 2 if key in split else numel[key])


def test_random_numbers_differ_between_split_layers_and_agree_elsewhere() -> None:
    """The attention of one worker at a time, each from the same state of the generator."""
    torch.manual_seed(0)
    whole = bert(dropout=0.5)
    plan, turn = megatron(whole, 2), Lock()

    def at(ways: Ways) -> tuple[list[Tensor], list[Tensor]]:
        part, seen = plan.apply(deepcopy(whole), ways), ([], [])
        part.get_submodule("encoder.layer.0.attention.self").register_forward_hook(
            lambda *_: seen[0].append(torch.rand(9))
        )
        part.get_submodule("encoder.layer.0.output").register_forward_hook(lambda *_: seen[1].append(torch.rand(9)))
        part.get_submodule("encoder.layer.1.attention.self").register_forward_hook(
            lambda *_: seen[0].append(torch.rand(9))
        )
        ways.carry_out = lambda call: call.sends[0].clone()
        with turn:
            torch.manual_seed(1)
            ways.begin()
            outputs_of(part)
            ways.end()
            seen[1].append(torch.rand(9))
        return seen

    (first, outside), (second, same) = on_ways(2, at)
    assert torch.equal(torch.stack(outside), torch.stack(same))
    drawn = [*first, *second]
    assert not any(torch.equal(one, other) for one, other in combinations(drawn, 2))


def test_dropout_behind_split_layers_draws_as_in_the_whole_model() -> None:
    assert not any(on_ways(2, lambda ways: draws_inside(decoder(31, 24, 2, 6, 9, dropout=0.5), ways)))
    assert all(on_ways(2, lambda ways: draws_inside(bert(dropout=0.5), ways)))


def draws_inside(model: nn.Module, ways: Ways) -> bool:
    megatron(model, 2).apply(model, ways)
    return ways.draws


def test_models_without_known_layers_are_refused() -> None:
    with raising(UsageError, "layers"):
        megatron(nn.LSTM(3, 4), 2)
    with raising(UsageError, "ways=8"):
        megatron(bert(), 8)


class Mixed(nn.Sequential):
    """Two dense layers, and a forward that reads all outputs of the first: shares of them would be too little."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self[0](inputs)
        return super().forward(inputs) + hidden.sum(1, keepdim=True)


def test_a_sequential_with_a_forward_of_its_own_is_not_split() -> None:
    mixed = Mixed(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    with raising(UsageError, "layers"):
        megatron(mixed, 2)
    inside = megatron(nn.Sequential(mixed, nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)), 2)
    assert set(inside.layers) == {"1", "3"}
