"""The models of the jobs, in plain torch."""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


def multilayer_perceptron(inputs: int, hidden: int, hidden_layers: int, classes: int) -> nn.Sequential:
    """Linear layers with ReLU between them: [N, inputs] to [N, classes]."""
    widths = [inputs] + [hidden] * hidden_layers
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, classes))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, and a 1x1 convolution on the shortcut where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.body(images) + self.shortcut(images))


class ResNet(nn.Module):
    """ResNet-18's layout (He et al. 2016) at a chosen width: [N, 1, 32, 32] to [N, classes]."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        stages: list[nn.Module] = [
            nn.Conv2d(1, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        before = width
        for stage in range(4):
            after = width * 2**stage
            stages += [ResidualBlock(before, after, 1 if stage == 0 else 2), ResidualBlock(after, after, 1)]
            before = after
        self.features = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.features(images)))


class TransformerBlock(nn.Module):
    """Causal self-attention and a feed-forward layer of four times the width, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.query_key_value(self.attention_norm(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return cast(Tensor, hidden + self.feed_forward(self.feed_forward_norm(hidden)))


class GPT(nn.Module):
    """A pre-norm decoder (Radford et al. 2019) over characters: int64 [N, length] to logits [N, length, vocabulary]."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # torch's own initialisation elsewhere: with 0.02 throughout, 300 steps never leave the plateau at 2.9
        nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, characters: Tensor) -> Tensor:
        positions = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.blocks(self.token(characters) + self.position(positions))
        return cast(Tensor, self.head(self.norm(hidden)))
