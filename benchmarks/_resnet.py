"""ResNet-18 for small images, and real ones to train it on: scikit-learn's handwritten digits.

Reference: K. He, X. Zhang, S. Ren and J. Sun, "Deep Residual Learning for Image Recognition", CVPR
2016; the stem is that for images of 32 x 32 pixels (one 3 x 3 convolution, no pooling).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from digits import load_data

WIDTHS = (64, 128, 256, 512)  # of the four stages; each begins by halving the image, but the first
PIXELS, CLASSES = 32, 10


class Block(nn.Module):
    """Two 3 x 3 convolutions, added to the input, which is projected where shapes differ."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.short = nn.Sequential(project, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet18(nn.Module):
    """From images (n, 3, 32, 32) to logits (n, 10); 11.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        inputs = WIDTHS[0]
        for width in WIDTHS:
            stages += [Block(inputs, width, 1 + (width > inputs)), Block(width, width, 1)]
            inputs = width
        stem = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(WIDTHS[0]), nn.ReLU())
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(self.stem(x)).mean(dim=(2, 3)))
        return logits


def images(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random digits, enlarged to (batch, 3, 32, 32), and what they are."""
    train, _ = load_data()
    x, y = train[torch.randint(len(train), (batch,), generator=generator)]
    grey = F.interpolate(x, size=PIXELS, mode="bilinear")
    return grey.expand(-1, 3, -1, -1).contiguous(), y
