"""A small GPT on characters, trained by a plan or in one process."""

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import partita

STEPS = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdecimal() else 100
BATCH, LENGTH, WIDTH, HEADS, LAYERS = 8, 32, 32, 4, 4
TEXT = "It is a truth universally acknowledged, that a plan is in want of a run. " * 48
LETTERS = sorted(set(TEXT))


class Block(nn.Module):
    """Attention and a perceptron, each with its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batches(seed: int, count: int):
    data = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        begins = torch.randint(0, len(data) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[b : b + LENGTH + 1] for b in begins.tolist()])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def rate(step: int) -> float:
    return min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


def build():
    torch.manual_seed(0)
    inputs, labels = next(batches(0, 1))
    return GPT().double(), (inputs[:2], labels[:2]), loss_fn


def main() -> None:
    model = build()[0]
    trainer = partita.parallelize(
        model, loss_fn, groups=lambda _, p: p.dim() < 2, clip_norm=1.0,
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
    )  # fmt: skip
    for batch in batches(1, STEPS):
        print(f"loss {trainer.step(batch):.15g}")
    print(f"validation {trainer.evaluate(batches(2, 4))['loss']:.15g}")


if __name__ == "__main__":
    main()
