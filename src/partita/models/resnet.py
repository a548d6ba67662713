"""Residual networks, plain and wide, with torchvision's module names and parameter counts.

Layers as Merak counts them: the stem with the first block, the other blocks one by one, the pool
with the classifier.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from partita.models.layers import Layer, named_blocks
from partita.models.scaling import scaled, scaled_classes

STEM = ("conv1", "bn1", "relu", "maxpool")
GROUPS = ("layer1", "layer2", "layer3", "layer4")


@dataclass(frozen=True, slots=True)
class ResNetSize:
    """Depth and width of a residual network.

    Attributes:
        blocks: Number of blocks in each of the four groups.
        bottleneck: Whether a block is three convolutions (else two).
        widening: Factor on the inner width of a bottleneck.
    """

    blocks: tuple[int, int, int, int]
    bottleneck: bool = True
    widening: int = 1
    channels: int = 64
    classes: int = 1000


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def _conv1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a skip connection."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3(inputs, inner, stride)
        self.bn1 = nn.BatchNorm2d(inner)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3(inner, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features."""
        skip = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += skip
        result: Tensor = self.relu(y)
        return result


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a skip connection."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv1(inputs, inner)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = _conv3(inner, inner, stride)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = _conv1(inner, outputs)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features."""
        skip = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += skip
        result: Tensor = self.relu(y)
        return result


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv1(inputs, outputs, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """An image classifier: (batch, 3, height, width) to logits."""

    def __init__(self, size: ResNetSize, scale: float = 1.0) -> None:
        super().__init__()
        base = scaled(size.channels, scale)
        self.conv1 = nn.Conv2d(3, base, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(base)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        block = Bottleneck if size.bottleneck else BasicBlock
        inputs = base
        for index, (group, count) in enumerate(zip(GROUPS, size.blocks, strict=True)):
            planes = base * 2**index
            outputs = planes * 4 if size.bottleneck else planes
            blocks = []
            for position in range(count):
                stride = 2 if index and not position else 1
                blocks.append(block(inputs, planes * size.widening, outputs, stride))
                inputs = outputs
            self.add_module(group, nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(inputs, scaled_classes(size.classes, scale))
        initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the classes."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for group in GROUPS:
            x = self.get_submodule(group)(x)
        logits: Tensor = self.fc(self.flatten(self.avgpool(x)))
        return logits


def initialise_convolutions(model: nn.Module) -> None:
    """Draw convolutions as He et al. do; models on the meta device are left alone."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def resnet_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Return the stem with block 1, the other blocks one by one, the pool with the classifier."""
    first, *others = (block for group in GROUPS for block in named_blocks(model, group))
    return (
        Layer(f"stem+{first.name}", (*STEM, *first.prefixes)),
        *others,
        Layer("classifier", ("avgpool", "flatten", "fc")),
    )
