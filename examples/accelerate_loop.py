"""gradwire in a script of Hugging Face Accelerate: `prepare` in place of `accelerator.prepare`.

pip install '.[accelerate]'    (in a checkout)
torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import gradwire as gw
from gradwire.integrations.accelerate import prepare


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    inputs = torch.randn(2560, 100)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :10]), batch_size=32, shuffle=True)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, plan=gw.QSGD(bits=4))
    for features, targets in loader:
        with accelerator.accumulate(model):
            loss = (model(features) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    (handle,) = accelerator.gradwire
    weights = sum(parameter.sum().item() for parameter in model.parameters())
    print(
        f"rank {accelerator.process_index}: loss {loss.item():.4f}, weights {weights:.6f}, "
        f"{handle.stats().wire_bytes / 1e6:.3f} MB sent a step"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
