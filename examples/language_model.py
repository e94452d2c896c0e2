"""A small language model reads Python's own documentation, with DDP or with gradwire, until it has learned enough.

gradwire emulate --nodes 2 --inter 100mbit -- examples/language_model.py [ddp] [--steps 400] [--target 2.0] [--log FILE]

The text is part of every Python: `pydoc_data.topics`, 0.46 MB, under the PSF licence. The last tenth is held out.
"""

import argparse
import json
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw

LENGTH, BATCH, WIDTH, LAYERS = 64, 8, 256, 4


class LanguageModel(nn.Module):
    """A transformer of 3.3 million parameters that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the loss of each next byte. `text` is (batch, LENGTH + 1), int64."""
        before, after = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        states = self.layers(self.bytes(before) + self.places.weight, mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(states).flatten(0, 1), after.flatten())


def batch(text: torch.Tensor, size: int, chance: torch.Generator) -> torch.Tensor:
    """Cut `size` pieces out of the text, (size, LENGTH + 1)."""
    starts = torch.randint(len(text) - LENGTH, (size, 1), generator=chance)
    return text[starts + torch.arange(LENGTH + 1)].long()


def held_out_loss(model: nn.Module, pieces: torch.Tensor) -> float:
    """Each rank computes its part of the pieces; the mean is the same on all ranks."""
    with torch.no_grad():
        loss = model(pieces.chunk(dist.get_world_size())[dist.get_rank()])
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ddp", nargs="?", choices=["ddp"], help="DDP instead of gradwire")
    parser.add_argument("--steps", type=int, default=400, help="at most")
    parser.add_argument("--target", type=float, default=2.0, help="the held-out loss that is enough")
    parser.add_argument("--log", type=Path, help="a file for the curve")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8)
    text, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    pieces = batch(held_out, 64, torch.Generator().manual_seed(0))
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.ddp:
        trained, handle = nn.parallel.DistributedDataParallel(model), None
    else:
        trained, handle = model, gw.parallelize(model, optimizer)

    chance, curve, start = torch.Generator().manual_seed(1 + dist.get_rank()), [], time.perf_counter()
    for step in range(1, options.steps + 1):
        trained(batch(text, BATCH, chance)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            loss, seconds = held_out_loss(model, pieces), time.perf_counter() - start
            curve.append({"step": step, "seconds": seconds, "held_out": loss})
            if dist.get_rank() == 0:
                print(f"step {step}, {seconds:.0f} s: held-out loss {loss:.2f}", flush=True)
            if loss <= options.target:
                break
    if dist.get_rank() == 0:
        if handle is not None:
            print(f"{handle.stats().wire_bytes} bytes sent a step, for {handle.stats().gradient_bytes} bytes of gradients")
        if options.log:
            options.log.write_text(json.dumps(curve))
    if handle is not None:
        handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
