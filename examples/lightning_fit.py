"""gradwire in Lightning's Trainer: a strategy in place of "ddp".

pip install '.[lightning]'    (in a checkout)
torchrun --nproc-per-node 2 examples/lightning_fit.py
"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import gradwire as gw
from gradwire.integrations.lightning import GradwireStrategy


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (inputs,) = batch
        loss = (self.net(inputs) - inputs[:, :10]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.001)


def main() -> None:
    torch.manual_seed(0)
    model, loader = Regression(), DataLoader(TensorDataset(torch.randn(2560, 100)), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        strategy=GradwireStrategy(plan=gw.QSGD(bits=4)), accelerator="cpu", devices=2, max_epochs=1, log_every_n_steps=5,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    weights = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"rank {trainer.global_rank}: weights {weights:.6f}", flush=True)
    print(f"rank {trainer.global_rank}: {trainer.logged_metrics}", flush=True)


if __name__ == "__main__":
    main()
