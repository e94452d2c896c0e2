"""The data of the jobs: what scikit-learn and the running Python carry with them, so nothing is downloaded."""

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["digits", "standard_library_text"]

TEXT_BYTES = 4_000_000
"""Where the standard library's text is cut off, so that every interpreter gives about the same amount."""


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
    """The top-level modules of the running Python's standard library in name order, as int64 characters.

    Bytes at or above `vocabulary` (there are few) become the last character. The text differs between Python
    versions and is the same in every process of one.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    characters = torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).to(torch.int64)
    return characters.clamp_(max=vocabulary - 1)
