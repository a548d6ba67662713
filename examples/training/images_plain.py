"""A small convolutional network on images, as people write it: plain torch in one process."""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

STEPS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdecimal() else 100
BATCH, CLASSES = 32, 5


class Net(nn.Module):
    """Convolutions, each with its norm, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        )  # fmt: skip
        self.classifier = nn.Linear(32, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.layers(images).mean((2, 3)))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)


def dataset(seed: int, count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    images = torch.randn(count, 3, 32, 32, generator=generator) + labels[:, None, None, None] / 4
    return TensorDataset(images.double(), labels)


def build():
    torch.manual_seed(0)
    return Net().double(), dataset(0, 8)[:], loss_fn


def main() -> None:
    model = build()[0]
    torch.manual_seed(1)
    loader = DataLoader(dataset(1, BATCH * STEPS), batch_size=BATCH, shuffle=True)
    validation = DataLoader(dataset(2, 100), batch_size=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.15g}")
    model.eval()
    total = 0.0
    with torch.no_grad():
        for images, labels in validation:
            total += loss_fn(model(images), labels).item() * len(labels)
    print(f"validation {total / 100:.15g}")


if __name__ == "__main__":
    main()
