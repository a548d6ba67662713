"""A VGG-16 over sparse points in three dimensions, in the style of Minkowski convolutions.

An activation is a ``SparseTensor``: integer coordinates and the features of the points at them.
Layers and widths are those of SparsePipedream's ``minkvgg`` profile (3×3×3 convolutions without
bias, batch norm, 40 classes). Every sample has the same number of points, made so that every
occupied cell of a coarser level holds the same number of points of the finer one: shapes are then
known beforehand, a batch is a dense (batch, points, …) array, and may be split into microbatches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from partita.models.scaling import scaled, scaled_classes

CLASSES = 40
# Channels, convolutions, and how many points each cell joins when the level is pooled.
LEVELS: tuple[tuple[int, int, int], ...] = (
    (64, 2, 2),
    (128, 2, 3),
    (256, 3, 4),
    (512, 3, 4),
    (512, 3, 5),
)
COARSE_CELLS = 8
COARSE_SIDE = 4
SIDE = COARSE_SIDE * 2 ** len(LEVELS)


@dataclass(frozen=True, slots=True)
class SparseTensor:
    """Points and what is known at them.

    Attributes:
        coordinates: Integers of shape (batch, points, 3), distinct within a sample.
        features: Of shape (batch, points, channels).
    """

    coordinates: Tensor
    features: Tensor


def _keys(coordinates: Tensor) -> Tensor:
    """Return one number a cell; the border of one cell keeps neighbours from wrapping around."""
    x, y, z = (coordinates + 1).unbind(-1)
    keys: Tensor = (x * (SIDE + 2) + y) * (SIDE + 2) + z
    return keys


class SparseConvolution(nn.Module):
    """A 3×3×3 convolution at the points alone: each reads those of its neighbours that exist."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(27 * inputs, outputs))
        if not self.kernel.is_meta:
            nn.init.normal_(self.kernel, std=(2.0 / (27 * inputs)) ** 0.5)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return new features at the same points."""
        batch, points, channels = x.features.shape
        steps = torch.arange(-1, 2, device=x.coordinates.device)
        near = (steps[:, None] * (SIDE + 2) + steps).flatten()
        offsets = (steps[:, None] * (SIDE + 2) ** 2 + near).flatten()
        keys = _keys(x.coordinates)
        ordered, order = keys.sort(dim=1)
        wanted = (keys[:, :, None] + offsets).flatten(1)
        place = torch.searchsorted(ordered, wanted).clamp(max=points - 1)
        found = ordered.gather(1, place) == wanted
        source = order.gather(1, place)
        read = x.features.gather(1, source[:, :, None].expand(-1, -1, channels))
        read = (read * found[:, :, None].to(read.dtype)).view(batch, points, 27 * channels)
        return SparseTensor(x.coordinates, read.matmul(self.kernel))


class SparsePool(nn.Module):
    """The maximum over each cell of 2×2×2, every one of which holds the same number of points."""

    def __init__(self, joined: int) -> None:
        super().__init__()
        self.joined = joined

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return one point a cell."""
        cells = torch.div(x.coordinates, 2, rounding_mode="floor")
        order = _keys(cells).sort(dim=1, stable=True).indices
        sorted_cells = cells.gather(1, order[:, :, None].expand(-1, -1, 3))
        batch, _, channels = x.features.shape
        features = x.features.gather(1, order[:, :, None].expand(-1, -1, channels))
        groups = features.view(batch, -1, self.joined, channels)
        return SparseTensor(sorted_cells[:, :: self.joined], groups.max(2).values)


class SparseNorm(nn.Module):
    """Batch norm over all points of the batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(channels)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return normed features at the same points."""
        flat = self.bn(x.features.flatten(0, 1))
        return SparseTensor(x.coordinates, flat.view_as(x.features))


class SparseReLU(nn.Module):
    """ReLU of the features."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return activated features at the same points."""
        return SparseTensor(x.coordinates, x.features.relu())


class GlobalMaxPool(nn.Module):
    """The maximum over all points of a sample."""

    def forward(self, x: SparseTensor) -> Tensor:
        """Return features of shape (batch, channels)."""
        return x.features.max(1).values


class SparseVGG(nn.Module):
    """A classifier of point clouds: coordinates and features to logits."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 1
        for channels, count, joined in LEVELS:
            outputs = scaled(channels, scale)
            for _ in range(count):
                layers += [SparseConvolution(inputs, outputs), SparseNorm(outputs), SparseReLU()]
                inputs = outputs
            layers.append(SparsePool(joined))
        hidden = scaled(4096, scale)
        self.features = nn.Sequential(*layers)
        self.pool = GlobalMaxPool()
        self.classifier = nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(hidden, scaled_classes(CLASSES, scale)),
        )

    def forward(self, coordinates: Tensor, features: Tensor) -> Tensor:
        """Return the logits of the classes."""
        x = self.features(SparseTensor(coordinates, features))
        logits: Tensor = self.classifier(self.pool(x))
        return logits
