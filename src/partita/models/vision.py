"""VGG-16, AlexNet, SqueezeNet 1.0 and DenseNet-121, with torchvision's structure and counts."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from partita.models.resnet import initialise_convolutions
from partita.models.scaling import scaled, scaled_classes

CLASSES = 1000
VGG16: tuple[tuple[int, int], ...] = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
SQUEEZENET_FIRES: tuple[tuple[int, int], ...] = (
    (16, 64),
    (16, 64),
    (32, 128),
    (0, 0),
    (32, 128),
    (48, 192),
    (48, 192),
    (64, 256),
    (0, 0),
    (64, 256),
)
DENSENET121 = (6, 12, 24, 16)


class Classifier(nn.Module):
    """Features, a pool to a fixed size and a classifier, one after another."""

    def __init__(self, features: nn.Sequential, pool: nn.Module, head: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = pool
        self.flatten = nn.Flatten()
        self.classifier = head

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the classes."""
        logits: Tensor = self.classifier(self.flatten(self.avgpool(self.features(x))))
        return logits


def vgg16(scale: float = 1.0) -> nn.Module:
    """Return VGG-16 without batch norm."""
    features: list[nn.Module] = []
    inputs = 3
    for channels, count in VGG16:
        outputs = scaled(channels, scale)
        for _ in range(count):
            features += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = outputs
        features.append(nn.MaxPool2d(2, stride=2))
    hidden = scaled(4096, scale)
    head = nn.Sequential(
        nn.Linear(inputs * 49, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, scaled_classes(CLASSES, scale)),
    )
    model = Classifier(nn.Sequential(*features), nn.AdaptiveAvgPool2d(7), head)
    initialise_convolutions(model)
    return model


def alexnet(scale: float = 1.0) -> nn.Module:
    """Return AlexNet (the one-column version)."""
    widths = [scaled(width, scale) for width in (64, 192, 384, 256, 256)]
    features = nn.Sequential(
        nn.Conv2d(3, widths[0], 11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(widths[0], widths[1], 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
        nn.Conv2d(widths[1], widths[2], 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(widths[2], widths[3], 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(widths[3], widths[4], 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2),
    )
    hidden = scaled(4096, scale)
    head = nn.Sequential(
        nn.Dropout(0.5),
        nn.Linear(widths[4] * 36, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, scaled_classes(CLASSES, scale)),
    )
    return Classifier(features, nn.AdaptiveAvgPool2d(6), head)


class Fire(nn.Module):
    """Squeezes to few channels, expands by 1×1 and 3×3 convolutions side by side."""

    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeeze, 1)
        self.squeeze_activation = nn.ReLU(inplace=True)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand1x1_activation = nn.ReLU(inplace=True)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)
        self.expand3x3_activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return both expansions, one after the other."""
        x = self.squeeze_activation(self.squeeze(x))
        small = self.expand1x1_activation(self.expand1x1(x))
        large = self.expand3x3_activation(self.expand3x3(x))
        return torch.cat([small, large], 1)


def squeezenet(scale: float = 1.0) -> nn.Module:
    """Return SqueezeNet 1.0."""
    inputs = scaled(96, scale)
    features: list[nn.Module] = [
        nn.Conv2d(3, inputs, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
    ]
    for squeeze, expand in SQUEEZENET_FIRES:
        if squeeze:
            outputs = scaled(expand, scale)
            features.append(Fire(inputs, scaled(squeeze, scale), outputs))
            inputs = 2 * outputs
        else:
            features.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
    # The classifier is a convolution: it comes before the pool.
    last = nn.Conv2d(inputs, scaled_classes(CLASSES, scale), 1)
    head = nn.Sequential(nn.Dropout(0.5), last, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(*features))
    model.add_module("classifier", head)
    model.add_module("flatten", nn.Flatten())
    initialise_convolutions(model)
    return model


class DenseLayer(nn.Module):
    """A bottleneck that reads all features before it and adds a few."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Return the new features alone."""
        x = torch.cat(list(features), 1)
        inner = self.conv1(self.relu1(self.norm1(x)))
        result: Tensor = self.conv2(self.relu2(self.norm2(inner)))
        return result


class DenseBlock(nn.Module):
    """Layers each of which reads the block's input and all layers before it."""

    def __init__(self, inputs: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(inputs + index * growth, growth) for index in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return all features."""
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def densenet121(scale: float = 1.0) -> nn.Module:
    """Return DenseNet-121."""
    growth, width = scaled(32, scale), scaled(64, scale)
    features = nn.Sequential()
    features.add_module("conv0", nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False))
    features.add_module("norm0", nn.BatchNorm2d(width))
    features.add_module("relu0", nn.ReLU(inplace=True))
    features.add_module("pool0", nn.MaxPool2d(3, stride=2, padding=1))
    for index, count in enumerate(DENSENET121, start=1):
        features.add_module(f"denseblock{index}", DenseBlock(width, growth, count))
        width += count * growth
        if index < len(DENSENET121):
            transition = nn.Sequential(
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Conv2d(width, width // 2, 1, bias=False),
                nn.AvgPool2d(2, stride=2),
            )
            features.add_module(f"transition{index}", transition)
            width //= 2
    features.add_module("norm5", nn.BatchNorm2d(width))
    features.add_module("relu5", nn.ReLU(inplace=True))
    head = nn.Sequential(nn.Linear(width, scaled_classes(CLASSES, scale)))
    model = Classifier(features, nn.AdaptiveAvgPool2d(1), head)
    initialise_convolutions(model)
    return model
