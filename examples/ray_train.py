"""gradwire in Ray Train: `gw.parallelize` in place of DDP, with the residuals of all ranks in Ray's checkpoints.

pip install '.[ray]'    (in a checkout)
python examples/ray_train.py
"""

import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.integrations.handles import load_handle, save_handle


def train(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    model = ray.train.torch.prepare_model(model, parallel_strategy=None)  # its device, and no DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    handle = gw.parallelize(model, optimizer, plan=gw.ErrorFeedback(gw.QSGD(bits=4)))
    first = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:  # Ray starts this run again
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "model.pt"))
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            load_handle(handle, folder)
            first = saved["step"]
    for step in range(first, config["steps"]):
        inputs = torch.randn(32, 100, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(inputs) - inputs[:, :10]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            weights: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(weights, f"{sum(parameter.sum().item() for parameter in model.parameters()):.6f}")
            with tempfile.TemporaryDirectory() as folder:
                save_handle(handle, folder)  # every rank its own file: Ray puts them into one folder
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, Path(folder, "model.pt"))
                kept = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"loss": loss.item(), "weights": weights}, checkpoint=kept)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = ray.train.torch.TorchTrainer(
            train,
            train_loop_config={"steps": 20},
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder, name="example"),
        )
        print(trainer.fit().metrics)
    ray.shutdown()


if __name__ == "__main__":
    main()
