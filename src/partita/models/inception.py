"""Inception v3 with its auxiliary classifier, and Baechi's smaller models made of its blocks.

Every pool, concatenation, addition and flattening is a module, as in Baechi, so that the leaves
(a ``BasicConv2d`` counting as one) are the 133 ops of Baechi's graph. Both logits are added.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partita.models.scaling import scaled, scaled_classes

CLASSES = 1000
Kernel = int | tuple[int, int]


class BasicConv2d(nn.Module):
    """Convolution, batch norm and ReLU: one op of Baechi's graph."""

    def __init__(
        self, inputs: int, outputs: int, kernel: Kernel, *, stride: int = 1, padding: Kernel = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated features."""
        result: Tensor = self.relu(self.bn(self.conv(x)))
        return result


class Concatenate(nn.Module):
    """Joins features along the channels."""

    def forward(self, *features: Tensor) -> Tensor:
        """Return the features one after another."""
        return torch.cat(features, 1)


class Add(nn.Module):
    """Adds two tensors."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum."""
        return a + b


class Branches(nn.Module):
    """Branches that all read the same input, joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.concatenate = Concatenate()

    def forward(self, x: Tensor) -> Tensor:
        """Return the joined features."""
        result: Tensor = self.concatenate(*(branch(x) for branch in self.branches))
        return result


class Widths:
    """Builds the blocks of Inception at one scale; widths are those of the full model."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def of(self, *channels: int) -> int:
        """Return the width of features joined from these parts."""
        return sum(scaled(part, self.scale) for part in channels)

    def chain(self, inputs: int, *steps: tuple[int, Kernel], stride: int = 1) -> nn.Sequential:
        """Return convolutions one after another; the stride is the last one's, without padding."""
        modules: list[nn.Module] = []
        for index, (outputs, kernel) in enumerate(steps):
            last = index == len(steps) - 1
            width = self.of(outputs)
            step = stride if last else 1
            padding: Kernel = 0 if step > 1 else _same(kernel)
            modules.append(BasicConv2d(inputs, width, kernel, stride=step, padding=padding))
            inputs = width
        return nn.Sequential(*modules)

    def pooled(self, inputs: int, outputs: int) -> nn.Sequential:
        """Return an average over 3×3 and a 1×1 convolution."""
        pool = nn.AvgPool2d(3, stride=1, padding=1)
        return nn.Sequential(pool, BasicConv2d(inputs, self.of(outputs), 1))

    def stem(self) -> nn.Sequential:
        """Return the first convolutions: 3 to 192 channels, an eighth of the side."""
        a, b, c, d = (self.of(width) for width in (32, 64, 80, 192))
        return nn.Sequential(
            BasicConv2d(3, a, 3, stride=2),
            BasicConv2d(a, a, 3),
            BasicConv2d(a, b, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            BasicConv2d(b, c, 1),
            BasicConv2d(c, d, 3),
            nn.MaxPool2d(3, stride=2),
        )

    def block_a(self, inputs: int, pool: int) -> Branches:
        """Return block A: 224 channels and those of the pool."""
        return Branches(
            self.chain(inputs, (64, 1)),
            self.chain(inputs, (48, 1), (64, 5)),
            self.chain(inputs, (64, 1), (96, 3), (96, 3)),
            self.pooled(inputs, pool),
        )

    def block_b(self, inputs: int) -> Branches:
        """Return block B, which halves the side: 480 channels and the input's."""
        return Branches(
            self.chain(inputs, (384, 3), stride=2),
            self.chain(inputs, (64, 1), (96, 3), (96, 3), stride=2),
            nn.MaxPool2d(3, stride=2),
        )

    def block_c(self, inputs: int, inner: int) -> Branches:
        """Return block C: 768 channels."""
        row, column = (1, 7), (7, 1)
        double = ((inner, column), (inner, row), (inner, column), (192, row))
        return Branches(
            self.chain(inputs, (192, 1)),
            self.chain(inputs, (inner, 1), (inner, row), (192, column)),
            self.chain(inputs, (inner, 1), *double),
            self.pooled(inputs, 192),
        )

    def block_d(self, inputs: int) -> Branches:
        """Return block D, which halves the side: 512 channels and the input's."""
        return Branches(
            self.chain(inputs, (192, 1), (320, 3), stride=2),
            self.chain(inputs, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), stride=2),
            nn.MaxPool2d(3, stride=2),
        )

    def block_e(self, inputs: int, *, double: bool = True) -> Branches:
        """Return block E: 2048 channels, or 1280 without its double 3×3 branch."""
        branches: list[nn.Module] = [
            self.chain(inputs, (320, 1)),
            nn.Sequential(self.chain(inputs, (384, 1)), self._fork()),
        ]
        if double:
            branches.append(
                nn.Sequential(self.chain(inputs, (448, 1), (384, 3)), self._fork()),
            )
        return Branches(*branches, self.pooled(inputs, 192))

    def _fork(self) -> Branches:
        inputs = self.of(384)
        return Branches(*(self.chain(inputs, (384, kernel)) for kernel in ((1, 3), (3, 1))))


def _same(kernel: Kernel) -> Kernel:
    return kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)


class Inception3(nn.Module):
    """An image classifier whose output is the sum of the main and the auxiliary logits."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        widths = Widths(scale)
        classes = scaled_classes(CLASSES, scale)
        c = widths.of(192, 192, 192, 192)
        d = widths.of(320, 192) + c
        e = widths.of(320, 384, 384, 384, 384, 192)
        self.stem = widths.stem()
        self.early = _early_blocks(widths)
        self.auxiliary = nn.Sequential(
            nn.AvgPool2d(5, stride=3),
            BasicConv2d(c, widths.of(128), 1),
            BasicConv2d(widths.of(128), widths.of(768), 5),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(widths.of(768), classes),
        )
        self.late = nn.Sequential(widths.block_d(c), widths.block_e(d), widths.block_e(e))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(e, classes)
        )
        self.add = Add()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both logits."""
        x = self.early(self.stem(x))
        auxiliary = self.auxiliary(x)
        result: Tensor = self.add(self.head(self.late(x)), auxiliary)
        return result


def _early_blocks(widths: Widths) -> nn.Sequential:
    """Return blocks A, B and C: 192 to 768 channels."""
    base = (64, 64, 96)
    a1, a2 = widths.of(*base, 32), widths.of(*base, 64)
    b = widths.of(384, 96) + a2
    c = widths.of(192, 192, 192, 192)
    return nn.Sequential(
        widths.block_a(widths.of(192), 32),
        widths.block_a(a1, 64),
        widths.block_a(a2, 64),
        widths.block_b(a2),
        widths.block_c(b, 128),
        widths.block_c(c, 160),
        widths.block_c(c, 160),
        widths.block_c(c, 192),
    )


def _pool_and_flatten() -> Sequence[nn.Module]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten()


def inception_dummy(scale: float = 1.0) -> nn.Module:
    """Return Baechi's Inception up to 768 channels with a classifier."""
    widths = Widths(scale)
    head = nn.Linear(widths.of(192, 192, 192, 192), scaled_classes(CLASSES, scale))
    return nn.Sequential(widths.stem(), _early_blocks(widths), *_pool_and_flatten(), head)


def inception_e(scale: float = 1.0, *, double: bool = True) -> nn.Module:
    """Return one block E (reduced without ``double``) over 1280 channels, then a pool."""
    widths = Widths(scale)
    return nn.Sequential(widths.block_e(widths.of(1280), double=double), *_pool_and_flatten())


def inception_e2(scale: float = 1.0) -> nn.Module:
    """Return the reduced block E, then a pool."""
    return inception_e(scale, double=False)


def short_inception_e(scale: float = 1.0) -> nn.Module:
    """Return two branches of plain convolutions over 512 channels, then two linear layers."""
    widths = Widths(scale)
    inputs, half, full = widths.of(512), widths.of(320), widths.of(640)
    branches = [
        nn.Sequential(
            nn.Conv2d(inputs, half, 1, bias=False),
            nn.Conv2d(half, outputs, 3, stride=3, bias=False),
        )
        for outputs in (full, half)
    ]
    return nn.Sequential(
        Branches(*branches),
        *_pool_and_flatten(),
        nn.Linear(full + half, inputs),
        nn.ReLU(inplace=True),
        nn.Linear(inputs, inputs),
        nn.ReLU(inplace=True),
    )
