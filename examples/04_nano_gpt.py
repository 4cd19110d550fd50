"""A loop of nanoGPT's shape: a small GPT over characters, accumulation over micro-batches, clipping, AdamW.

The same loop runs under DistributedDataParallel and under `dure.attach` with BSP. Both give the same model. The lines
that differ are in `train`. Without torchrun, the script starts two ranks:

python examples/04_nano_gpt.py
torchrun --nproc-per-node 2 examples/04_nano_gpt.py
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import dure

LENGTH, MICRO_BATCHES, STEPS = 32, 4, 30
text = topics["assignment"]  # from Python's own manual
letters = sorted(set(text))
characters = torch.tensor([letters.index(letter) for letter in text])


class GPT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.characters, self.places = nn.Embedding(len(letters), width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(letters))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x):
        return self.head(self.blocks(self.characters(x) + self.places.weight, self.mask))


def batch(draw):
    starts = torch.randint(len(characters) - LENGTH, (8,), generator=draw).tolist()
    return (torch.stack([characters[start + shift :][:LENGTH] for start in starts]) for shift in (0, 1))


def train(with_ddp):
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    if with_ddp:
        model = DistributedDataParallel(model)
    else:
        replica = dure.attach(model, optimizer, sync="bsp")
    draw = torch.Generator().manual_seed(1337 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        for micro_step in range(MICRO_BATCHES):
            last = micro_step == MICRO_BATCHES - 1
            gather = model.no_sync if with_ddp else replica.accumulate
            with nullcontext() if last else gather():
                x, y = batch(draw)
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten()) / MICRO_BATCHES
                loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)  # clips the mean gradient, the same at every rank
        if with_ddp:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        else:
            replica.step()
        losses.append(MICRO_BATCHES * loss.item())
    if not with_ddp:
        replica.close()
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main():
    dist.init_process_group("gloo")
    (_, expected), (losses, params) = train(with_ddp=True), train(with_ddp=False)
    if dist.get_rank() == 0:
        print("loss falls:", losses[-1] < 0.8 * losses[0])
        print("attach with BSP and DDP end within 1e-5:", bool((params - expected).abs().max() < 1e-5))
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.run([sys.executable, *ranks, __file__], check=False).returncode)
    main()
