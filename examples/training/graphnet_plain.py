"""A small graph network, as people write it: plain torch in one process."""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

STEPS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdecimal() else 100
BATCH, NODES, FEATURES, WIDTH, LAYERS, CLASSES = 8, 12, 6, 32, 4, 3


class Layer(nn.Module):
    """What a node knows and the mean of its neighbours, mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, nodes: Tensor, weights: Tensor) -> Tensor:
        mixed = self.own(nodes) + self.others(weights @ nodes)
        return nodes + functional.relu(self.norm(mixed))


class GraphNet(nn.Module):
    """Says of which kind a graph is, by its nodes and its edges."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        weights = edges / edges.sum(-1, keepdim=True).clamp(min=1)
        nodes = self.embed(features)
        for layer in self.layers:
            nodes = layer(nodes, weights)
        return self.head(nodes.mean(1))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)


def batches(seed: int, count: int):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        features = torch.randn(BATCH, NODES, FEATURES, generator=generator).double()
        features = features + labels[:, None, None]
        edges = torch.rand(BATCH, NODES, NODES, generator=generator).double()
        yield features, (edges < 0.3).double(), labels


def build():
    torch.manual_seed(0)
    features, edges, labels = next(batches(0, 1))
    return GraphNet().double(), (features[:2], edges[:2], labels[:2]), loss_fn


def main() -> None:
    model = build()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for features, edges, labels in batches(1, STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model(features, edges), labels)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.15g}")


if __name__ == "__main__":
    main()
