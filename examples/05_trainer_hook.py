"""Hugging Face's Trainer with a codec: a callback of four lines registers dure's hook with the Trainer's DDP model.

The model is a tiny GPT-2 with random weights. The data are sequences of consecutive numbers. Nothing is downloaded.
Without torchrun, the script starts two ranks:

python examples/05_trainer_hook.py
torchrun --nproc-per-node 2 examples/05_trainer_hook.py
"""

import os
import subprocess
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

import dure

LETTERS, LENGTH, STEPS = 16, 12, 25


class Counting(torch.utils.data.Dataset):
    """Sample i counts up from i, modulo the number of letters."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (index + torch.arange(LENGTH)) % LETTERS
        return {"input_ids": ids, "labels": ids}


class Hooked(TrainerCallback):
    def __init__(self, trainer, codec):
        self.trainer, self.hook = trainer, dure.hook(codec)

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.model_wrapped.register_comm_hook(None, self.hook)


def train(folder, codec=None):
    set_seed(0)
    size = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=LETTERS, bos_token_id=0, eos_token_id=0, **size, **dropout))
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=Counting())
    trainer.remove_callback(PrinterCallback)
    if codec:
        trainer.add_callback(Hooked(trainer, codec))
    trainer.train()
    with torch.no_grad():
        rows = torch.stack([Counting()[start]["input_ids"] for start in range(LETTERS)])
        loss = trainer.model(input_ids=rows, labels=rows).loss.item()
    return loss, torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def main():
    with tempfile.TemporaryDirectory() as folder:
        _, expected = train(folder)
        _, params = train(folder, "fp32")
        loss, _ = train(folder, "1bit")
    if os.environ["RANK"] == "0":
        print("hook fp32 and no hook end within 1e-5:", bool((params - expected).abs().max() < 1e-5))
        print("hook 1bit learns to count:", loss < 1.0)  # a random guess has log 16 = 2.8
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        sys.exit(subprocess.run([sys.executable, *ranks, __file__], check=False).returncode)
    main()
