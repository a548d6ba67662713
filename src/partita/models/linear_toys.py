"""Baechi's toys of linear layers, over inputs of shape (batch, 1, 3072), and a graph's MLP."""

from itertools import pairwise

from torch import Tensor, nn

from partita.models.inception import Concatenate
from partita.models.scaling import scaled

WIDTH = 3072
LINEAR_MODEL = (3072, 6144, 27648, 9216, 3072, 3072, 3072, 3072, 3072, 3072)
SHORT_LINEAR = (3072, 21504, 6144, 24576, 3072)
ONE_LAYER = (3072, 3072, 3072)
GRAPH_FEATURES = 767
GRAPH_HIDDEN = 4096
GRAPH_CLASSES = 10


class Squeeze(nn.Module):
    """Removes the second dimension, of length one."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor without that dimension."""
        return x.squeeze(1)


def linear_chain(widths: tuple[int, ...], scale: float = 1.0) -> nn.Module:
    """Return linear layers one after another, without activations (as Baechi's toys are)."""
    sizes = [scaled(width, scale) for width in widths]
    layers = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    return nn.Sequential(Squeeze(), *layers)


class ParallelThreeLayer(nn.Module):
    """A linear layer, two branches of two linear layers each, joined, and two more.

    Two branches despite the name, which is Baechi's.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        width, wide = scaled(WIDTH, scale), scaled(4 * WIDTH, scale)
        self.squeeze = Squeeze()
        self.fc1 = nn.Linear(width, wide)
        self.branch_a = nn.Sequential(nn.Linear(wide, width), nn.Linear(width, width))
        self.branch_b = nn.Sequential(nn.Linear(wide, width), nn.Linear(width, width))
        self.concatenate = Concatenate()
        self.fc3 = nn.Linear(2 * width, width)
        self.fc4 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's features."""
        x = self.fc1(self.squeeze(x))
        joined = self.concatenate(self.branch_a(x), self.branch_b(x))
        result: Tensor = self.fc4(self.fc3(joined))
        return result


class GraphMLP(nn.Module):
    """DynamicMLTrainer's classifier of a graph's nodes: three hidden layers over their features.

    What a node hears from its neighbours is part of the data (their features, averaged), as in
    GraphSAGE with precomputed aggregation; the model itself reads (nodes, features).
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        hidden = scaled(GRAPH_HIDDEN, scale)
        self.chain1_linear_0 = nn.Linear(scaled(GRAPH_FEATURES, scale), hidden)
        self.chain1_linear_1 = nn.Linear(hidden, hidden)
        self.chain1_linear_2 = nn.Linear(hidden, hidden)
        self.final_linear = nn.Linear(hidden, GRAPH_CLASSES)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logarithms of the classes' probabilities."""
        x = self.dropout(self.chain1_linear_0(x).relu())
        x = self.dropout(self.chain1_linear_1(x).relu())
        x = self.chain1_linear_2(x).relu()
        result: Tensor = self.final_linear(x).relu().log_softmax(1)
        return result
