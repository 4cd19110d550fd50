"""`imdb-bert` and `imdb-albert`: Hugging Face's BERT and ALBERT, which classify film reviews as good or bad.

Devlin et al., "BERT", NAACL 2019; Lan et al., "ALBERT", ICLR 2020. The sizes are free, and the initial values random.
BERT has a set of parameters for each layer. ALBERT applies one layer again and again, and its word embeddings are
narrower than the layers.

| block        | outputs                                          | BERT            | ALBERT                       |
|--------------|--------------------------------------------------|-----------------|------------------------------|
| `Words`      | hidden (batch, tokens, width), mask (batch, 1, 1, tokens) | embeddings | embeddings and a dense layer |
| `EncoderLayer` | the same                                         | layer 1 to L    | the one layer, L times       |
| `Classifier` | logits (batch, 2)                                | pooler, classifier | the same                  |

Attention is Hugging Face's `eager` one, of matrix products, whose operations PyTorch's counter counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dure.core.packages import import_extra
from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.models.mlp import top1
from dure.job.optimizer import OptimizerSpec
from dure_jobs.data.wordpieces import PADDING, load_pieces

BASE = {"hidden": 768, "layers": 12, "heads": 12, "intermediate": 3072}
"""The sizes of BERT-base and ALBERT-base."""

BASE_WORDS = {"bert": 28_996, "albert": 30_000}
"""Their vocabularies: BERT's cased one, and ALBERT's."""


def imdb_bert(
    data_root: Path,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    intermediate: int = 0,
    vocabulary: int = 4000,
    tokens: int = 64,
    dropout: float = 0.1,
    reviews: int = 0,
) -> Job:
    """A job of a BERT with `layers` layers of `hidden` units, and perceptrons of `intermediate` (0: four times hidden).

    Of each review the first `tokens` word pieces are read; `reviews` is the number of training reviews, 0 for all.
    """
    given = _checked(layers, hidden, heads, intermediate, dropout) | {"words": vocabulary, "places": tokens}
    data = load_pieces(data_root, vocabulary=vocabulary, tokens=tokens, reviews=reviews)
    return _job("imdb-bert", partial(bert, given), data.train, data.test, data.source)


def imdb_albert(
    data_root: Path,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    intermediate: int = 0,
    embedding: int = 32,
    vocabulary: int = 4000,
    tokens: int = 64,
    dropout: float = 0.1,
    reviews: int = 0,
) -> Job:
    """A job of an ALBERT that applies its layer `layers` times; other parameters as those of `imdb-bert`.

    `embedding` is the width of the word embeddings.
    """
    given = _checked(layers, hidden, heads, intermediate, dropout) | {"words": vocabulary, "places": tokens}
    data = load_pieces(data_root, vocabulary=vocabulary, tokens=tokens, reviews=reviews)
    return _job("imdb-albert", partial(albert, given | {"embedding": embedding}), data.train, data.test, data.source)


def base_shapes(kind: str, reviews: int = 25_000, tokens: int = 512, batch_size: int = 6) -> Job:
    """A job of BERT-base ("bert") or ALBERT-base ("albert") with shapes but no values, for timing-only virtual runs."""
    given = BASE | {"words": BASE_WORDS[kind], "places": 512, "dropout": 0.1, "embedding": 128}
    words = torch.empty(reviews, tokens, dtype=torch.int64, device="meta")
    labels = torch.empty(reviews, dtype=torch.int64, device="meta")
    made = partial(_on_meta, partial(bert if kind == "bert" else albert, given))
    return Job(made, cross_entropy, Data(words, labels), batch_size=batch_size, name=f"imdb-{kind}", stages=blocks)


def _on_meta(made: Any) -> nn.Module:
    with torch.device("meta"):
        found: nn.Module = made()
    return found


def _checked(layers: int, hidden: int, heads: int, intermediate: int, dropout: float) -> dict[str, Any]:
    library()
    if min(layers, hidden, heads) < 1 or intermediate < 0:
        raise UsageError(
            f"layers, hidden and heads must be >= 1 and intermediate >= 0, got {layers}, {hidden}, {heads} and "
            f"{intermediate}."
        )
    if hidden % heads:
        raise UsageError(
            f"hidden={hidden} cannot be divided among heads={heads}: write a multiple, hidden={heads * 16}."
        )
    if not 0 <= dropout < 1:
        raise UsageError(f"dropout is a probability from 0 to below 1, got {dropout}.")
    width = intermediate or 4 * hidden
    return {"layers": layers, "hidden": hidden, "heads": heads, "intermediate": width, "dropout": dropout}


def _job(name: str, model: Any, train: Any, test: Any, source: str) -> Job:
    return Job(
        model,
        cross_entropy,
        train,
        test,
        batch_size=32,
        optimizer=OptimizerSpec("adamw", lr=0.0005),
        steps=300,
        accuracy=top1,
        name=name,
        source=source,
        stages=blocks,
    )


def library() -> ModuleType:
    """Hugging Face's `transformers`. Raises `UsageError` where it is not installed."""
    _, transformers = import_extra("text", "a model of Hugging Face")
    return transformers


class Words(nn.Module):
    """Embeddings of word pieces and places, and the mask that attention adds to its scores: very low at padding."""

    def __init__(self, embeddings: nn.Module, widened: nn.Module | None) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.widened = widened

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        hidden: Tensor = self.embeddings(words)
        if self.widened is not None:
            hidden = self.widened(hidden)
        padded = (words == PADDING)[:, None, None, :]
        return hidden, padded.to(hidden.dtype) * torch.finfo(hidden.dtype).min


class EncoderLayer(nn.Module):
    """A layer of the encoder, which passes the mask on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layer(hidden, attention_mask=mask)
        return (found if isinstance(found, Tensor) else found[0]), mask


class Classifier(nn.Module):
    """The pooled first piece, dropout, and the scores of bad and good."""

    def __init__(self, pooled: nn.Module, dropout: nn.Module, scores: nn.Module) -> None:
        super().__init__()
        self.pooled = pooled
        self.dropout = dropout
        self.scores = scores

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.scores(self.dropout(self.pooled(hidden)))
        return found


class AlbertPooler(nn.Module):
    """ALBERT's pooler: a dense layer of the first piece and tanh, which `AlbertModel` holds as two modules."""

    def __init__(self, dense: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.dense = dense
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.activation(self.dense(hidden[:, 0]))
        return found


class ReviewClassifier(nn.Module):
    """A network of Hugging Face whose forward calls its `blocks` in order: word pieces (batch, tokens) to logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, words: Tensor) -> Tensor:
        first, *others = blocks(self)
        value = first(words)
        for block in others:
            value = block(*value)
        found: Tensor = value
        return found


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a `ReviewClassifier`."""
    network = model.get_submodule("network")
    kind = "bert" if hasattr(network, "bert") else "albert"
    encoder = network.get_submodule(kind)
    dropout, scores = network.get_submodule("dropout"), network.get_submodule("classifier")
    embeddings = encoder.get_submodule("embeddings")
    if kind == "bert":
        layers = [EncoderLayer(each) for each in encoder.get_submodule("encoder.layer").children()]
        pooled = encoder.get_submodule("pooler")
        return [Words(embeddings, None), *layers, Classifier(pooled, dropout, scores)]
    shared = encoder.get_submodule("encoder.albert_layer_groups.0.albert_layers.0")
    widened = encoder.get_submodule("encoder.embedding_hidden_mapping_in")
    times = int(network.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    pooler = AlbertPooler(encoder.get_submodule("pooler"), encoder.get_submodule("pooler_activation"))
    return [
        Words(embeddings, widened),
        *(EncoderLayer(shared) for _ in range(times)),
        Classifier(pooler, dropout, scores),
    ]


def bert(given: Mapping[str, Any]) -> nn.Module:
    """A BERT of the given sizes."""
    transformers = library()
    return ReviewClassifier(transformers.BertForSequenceClassification(transformers.BertConfig(**_settings(given))))


def albert(given: Mapping[str, Any]) -> nn.Module:
    """An ALBERT of the given sizes."""
    transformers = library()
    settings = _settings(given) | {"embedding_size": given["embedding"], "classifier_dropout_prob": given["dropout"]}
    return ReviewClassifier(transformers.AlbertForSequenceClassification(transformers.AlbertConfig(**settings)))


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": given["words"],
        "hidden_size": given["hidden"],
        "num_hidden_layers": given["layers"],
        "num_attention_heads": given["heads"],
        "intermediate_size": given["intermediate"],
        "max_position_embeddings": given["places"],
        "hidden_dropout_prob": given["dropout"],
        "attention_probs_dropout_prob": given["dropout"],
        "pad_token_id": PADDING,
        "num_labels": 2,
        "attn_implementation": "eager",
    }
