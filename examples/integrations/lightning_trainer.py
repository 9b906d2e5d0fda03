"""A small GPT-2 learns this file with Lightning's Trainer: python examples/integrations/lightning_trainer.py

Trainer starts the ranks itself, or takes those of torchrun.  With --resume FILE it goes on from a checkpoint.
"""

import argparse
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, random_split

from osdp.integrations.lightning import OSDPStrategy
from osdp.models.config import GPT2Config
from osdp.models.gpt2 import GPT2

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--folder", default="lightning_checkpoints")
parser.add_argument("--resume")
options = parser.parse_args()


class Learner(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2(GPT2Config(vocabulary_size=256, maximum_positions=64, hidden_size=64, layers=4, heads=4))

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(tokens, labels=tokens)

    def validation_step(self, tokens: torch.Tensor, index: int) -> None:
        self.log("held_out", self.model(tokens, labels=tokens), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


text = torch.tensor(list(Path(__file__).read_bytes()))
windows = text.unfold(0, 64, 16)  # (samples, 64)
lightning.seed_everything(0, verbose=False)
parts = random_split(windows, [0.9, 0.1])
trainer = lightning.Trainer(
    # What is new: plans for 4 GiB a device, and shards the model in the LightningModule.
    strategy=OSDPStrategy({"optimizer": "adamw", "micro_batch": 8}, "4GB"),
    devices=options.devices,
    max_epochs=options.epochs,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(options.folder, "{epoch}", monitor="held_out")],
    logger=False,
    enable_progress_bar=False,
)
learner = Learner()
loaders = DataLoader(parts[0], 8, shuffle=True, drop_last=True), DataLoader(parts[1], 8)
trainer.fit(learner, *loaders, ckpt_path=options.resume)
if trainer.is_global_zero:
    print(f"epoch {trainer.current_epoch}: held out {trainer.callback_metrics['held_out']:.3f}")
dist.barrier()  # gloo's threads end what they do; one that is still at it when Python ends aborts the process
dist.destroy_process_group()
