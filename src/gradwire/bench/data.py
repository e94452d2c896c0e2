"""The data of the jobs. scikit-learn and the running Python contain the data, so nothing is downloaded."""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

TEXT_BYTES = 4_000_000
"""The length of the text. The limit makes the text about equally long under every Python version."""


@cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, shuffled once: float32 images [1797, 64] of mean 0 and deviation 1, labels [1797]."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs = torch.tensor(images, dtype=torch.float32)[order]
    return (inputs - inputs.mean()) / inputs.std(), torch.tensor(labels, dtype=torch.int64)[order]


@cache
def standard_library_text(vocabulary: int) -> Tensor:
    """The standard library's top-level modules in name order, as int64 characters. The text depends on the Python version.

    The few bytes at or above `vocabulary` become the last character.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    characters = torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).to(torch.int64)
    return characters.clamp_(max=vocabulary - 1)
