"""A BERT of Hugging Face in a pipeline of two stages: `stages` lists its blocks, and the attention mask travels along.

The model is tiny, with random weights. The data are sentences of random letters, padded with more random letters; the
question is whether a sentence contains the letter 5. Nothing is downloaded.

python examples/07_bert_pipeline.py
dure train examples/07_bert_pipeline.py:contains --partition gpipe:stages=2,micro=2 --workers 2
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

import dure

LETTERS, LENGTH, LETTER = 12, 10, 5


class Embeddings(nn.Module):
    """The first block. It also makes the mask that every layer of the encoder reads."""

    def __init__(self, bert):
        super().__init__()
        self.embeddings = bert.embeddings

    def forward(self, input_ids, attention_mask):
        return self.embeddings(input_ids), attention_mask[:, None, None, :].bool()


class Layer(nn.Module):
    """A layer of the encoder. It passes the mask on, over a border of stages too."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden, mask):
        return self.layer(hidden, attention_mask=mask), mask


class Classifier(nn.Module):
    """The last block: the pooler, dropout and the classifier. Its outputs are those of the whole model."""

    def __init__(self, model):
        super().__init__()
        self.pooler, self.dropout, self.classifier = model.bert.pooler, model.dropout, model.classifier

    def forward(self, hidden, mask):
        return SequenceClassifierOutput(logits=self.classifier(self.dropout(self.pooler(hidden))))


def blocks(model):
    return [Embeddings(model.bert), *map(Layer, model.bert.encoder.layer), Classifier(model)]


def bert():
    size = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=LETTERS, max_position_embeddings=LENGTH, num_labels=2, **size, **dropout)
    )


def contains(sentences: int = 512):
    """A job: sentences of random letters, by whether they contain the letter."""
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(LETTERS, (sentences, LENGTH), generator=draw)
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (sentences, 1), generator=draw)).long()
    return dure.Job(
        model=bert,
        loss=lambda outputs, targets: cross_entropy(outputs.logits, targets),
        train=dure.Data(
            {"input_ids": letters, "attention_mask": mask}, ((letters == LETTER) & (mask == 1)).any(1).long()
        ),
        accuracy=lambda outputs, targets: float((outputs.logits.argmax(1) == targets).double().mean()),
        batch_size=32,
        optimizer=dure.OptimizerSpec("adam", lr=0.01),
        steps=30,
        stages=blocks,
    )


def main():
    job = f"{__file__}:contains"
    pipeline = dure.train(job, partition="gpipe:stages=2,micro=2", workers=2, eval_every=30).summary()
    alone = dure.train(job, on="virtual", workers=1, eval_every=30, exact=True).summary()
    print("two stages learn to find the letter:", pipeline["accuracy"] > 0.95)
    print("the loss of one process, within 1 %:", abs(pipeline["loss"] / alone["loss"] - 1) < 0.01)


if __name__ == "__main__":
    main()
