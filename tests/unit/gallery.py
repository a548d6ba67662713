"""Small models of many kinds, each with an example, to try a capture on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from partita.capture.setting import Example

WIDTH, BATCH, LENGTH, VOCABULARY = 8, 4, 6, 16


@dataclass(frozen=True)
class Case:
    """A model with an example.

    Attributes:
        build: Makes the model.
        example: Makes an example, given a seed.
        loss: Makes the loss; None where the model does.
        runs_eval: Whether the training graph holds in eval mode too.
    """

    build: Callable[[], nn.Module]
    example: Callable[[int], Example]
    loss: Any = field(default=lambda output, labels: (output.sin() + output.pow(2)).mean())
    runs_eval: bool = True


def features(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tokens(seed: int, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (BATCH, length), generator=generator)


def _rows(seed: int) -> Example:
    return Example(args=(features(BATCH, WIDTH, seed=seed),))


def _steps(seed: int) -> Example:
    return Example(args=(features(BATCH, LENGTH, WIDTH, seed=seed),))


def _images(seed: int) -> Example:
    return Example(args=(features(BATCH, 3, 8, 8, seed=seed),))


def _tokens(seed: int) -> Example:
    return Example(args=(tokens(seed),), labels=tokens(seed + 1))


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)]
    blocks = nn.Sequential(Residual(6), Residual(6))
    return nn.Sequential(*stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.pool = nn.Conv2d(3, 2, 1)
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        pooled = self.pool(functional.avg_pool2d(x, 3, stride=1, padding=1))
        out = torch.cat([functional.relu(self.one(x)), self.three(x), pooled], 1)
        return self.head(out.mean((2, 3)))


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(2 * WIDTH, WIDTH)
        self.decoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, source, target):
        memory, (h, c) = self.encoder(self.embed(source))
        memory = self.bridge(memory)
        states, _ = self.decoder(self.embed(target), (h[-1:], c[-1:]))
        weights = torch.softmax(states @ memory.transpose(1, 2), -1)
        return self.out(torch.cat([states, weights @ memory], -1))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.rnn(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        return self.out(padded)


def _packed_example(seed: int) -> Example:
    return Example(args=(features(BATCH, LENGTH, WIDTH, seed=seed), torch.tensor([3, 6, 2, 5])))


class TimeLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x):
        h = c = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
        made = []
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
            made.append(self.out(h))
        return torch.stack(made, 1)


class FullTransformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Transformer(
            WIDTH, 2, 2, 2, dim_feedforward=16, dropout=dropout, batch_first=True
        )

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=source.dtype)
        return self.body(source, target, tgt_mask=mask)


def _pair(seed: int) -> Example:
    source = features(BATCH, LENGTH, WIDTH, seed=seed)
    return Example(args=(source, features(BATCH, 5, WIDTH, seed=seed + 1)))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class GptBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 2, WIDTH // 2).unbind(2)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + self.dropout(self.proj(y.transpose(1, 2).reshape(b, t, WIDTH)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, dropout: float = 0.0, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(GptBlock(dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", 1.0 / 100 ** (torch.arange(0, 4, 2) / 4))

    def forward(self, ids):
        angles = torch.arange(ids.shape[1])[:, None] * self.frequencies
        angles = torch.cat([angles, angles], -1)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin())
        return self.head(x)


class BiasedAttention(nn.Module):
    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.bias = nn.Embedding(2 * LENGTH, 2) if first else None

    def forward(self, x, bias):
        b, t, _ = x.shape
        if bias is None:
            places = torch.arange(t)
            bias = self.bias(places[:, None] - places[None] + t).permute(2, 0, 1).unsqueeze(0)
        q, k, v = (p.view(b, t, 2, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2)
        scores += bias
        y = scores.float().softmax(-1).type_as(scores) @ v
        return x + y.transpose(1, 2).contiguous().view(b, t, -1), bias


class SharedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BiasedAttention(first=i == 0) for i in range(3))

    def forward(self, x):
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weight, choice = self.gate(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            chosen = choice == index
            result[chosen] = expert(flat[chosen]) * weight[chosen, None]
        return self.out(result.view_as(x) + x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.first(x)
        h.relu_()
        skip = h.clone()
        skip.mul_(2.0).add_(x)
        h = self.second(h)
        h[:, 0] = skip[:, 1]
        view = h.view(-1, 2)
        view.mul_(0.5)
        mask = torch.zeros(BATCH, WIDTH, dtype=x.dtype)
        early = h + mask
        mask[0] = 1.0
        mask[1].copy_(x[1])
        x = x.clone()
        x += mask
        return h * mask + early + x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(self.layer(torch.tanh(self.norm(self.layer(x)))))


@dataclass
class Batch:
    left: Tensor
    more: dict[str, Tensor]
    scale: float = 2.0


class Pair(NamedTuple):
    total: Tensor
    parts: list[Tensor]


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, batch, *, options):
        a, b = self.left(batch.left), self.right(batch.more["right"])
        c = Batch(left=a, more={"right": b}, scale=batch.scale)
        total = c.left * c.scale + c.more["right"] * options["factor"]
        return {
            "pair": Pair(total, [a, b]),
            "loss": (total.sin() - options["target"]).pow(2).mean(),
        }


def _containers(seed: int) -> Example:
    batch = Batch(
        left=features(BATCH, WIDTH, seed=seed),
        more={"right": features(BATCH, WIDTH, seed=seed + 1)},
    )
    options = {"factor": 3.0, "target": features(BATCH, 4, seed=seed + 2)}
    return Example(args=(batch,), kwargs={"options": options})


class Sparse:
    """Coordinates and features, a class of its own."""

    def __init__(self, coords: Tensor, feats: Tensor) -> None:
        self.coords, self.feats = coords, feats


class Points:
    """A container that torch's pytrees know."""

    def __init__(self, coords: Tensor, feats: Tensor) -> None:
        self.coords, self.feats = coords, feats


pytree.register_pytree_node(
    Points, lambda p: ([p.coords, p.feats], None), lambda parts, _: Points(*parts)
)


class SparseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def gather(self, x, shift):
        place = {tuple(c): i for i, c in enumerate(x.coords.tolist())}
        pairs = [(i, place.get((c[0] + shift, c[1]))) for i, c in enumerate(x.coords.tolist())]
        found = torch.tensor([(i, j) for i, j in pairs if j is not None]).reshape(-1, 2)
        return torch.zeros_like(x.feats).index_add(0, found[:, 0], x.feats[found[:, 1]])

    def forward(self, x):
        y = type(x)(x.coords, functional.relu(self.first(x.feats)))
        y = type(x)(y.coords, y.feats + self.gather(y, 1))
        keep = (y.coords[:, 0] % 2 == 0).nonzero().squeeze(1)
        kept = type(x)(y.coords[keep] // 2, y.feats[keep])
        return self.second(kept.feats)


def _sparse(kind: type) -> Callable[[int], Example]:
    def example(seed: int) -> Example:
        coords = torch.stack([torch.arange(10), torch.zeros(10, dtype=torch.int64)], 1)
        return Example(args=(kind(coords, features(10, WIDTH, seed=seed)),), batch_size=1)

    return example


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3.0 * x * gradient * ctx.factor, None


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.second(Square.apply(self.first(x), 0.5))


class ReadsValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x):
        h = self.first(x)
        if (x.abs().sum() > 0).item():
            h = torch.tanh(h)
        return self.second(h)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        self.rnn = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x):
        h = functional.dropout(torch.relu(self.first(x)), 0.3, self.training)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h, _ = self.rnn(h)
        return self.second(functional.dropout(h, 0.2, training=self.training))


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 3)])
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        h = torch.tanh(self.trunk(x)) * self.frozen
        values, places = h.max(-1)
        with torch.no_grad():
            norm = h.norm(dim=-1, keepdim=True)
        return self.heads[0](h / norm), self.heads[1](h), values, places


def _several_loss(output: tuple[Tensor, ...], labels: object) -> Tensor:
    first, second, values, _ = output
    return first.pow(2).mean() + second.sin().mean() + values.mean()


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.rate, self.skipped = 0.4, frozenset()

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            drawn = torch.rand([]) if self.training else 1.0
            if index in self.skipped or drawn < self.rate:
                continue
            x = torch.tanh(layer(x))
        return x


class RunningMean(nn.Module):
    """Changes buffers in three ways: in place, by assignment, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("table", torch.zeros(2, WIDTH))

    def forward(self, x):
        h = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.largest = torch.maximum(self.largest, h.abs().max())
            self.table[0].copy_(h[0])
        return (h - self.mean) / (1 + self.largest) + self.table.sum(0)


def _translation(seed: int) -> Example:
    return Example(args=(tokens(seed), tokens(seed + 1, 5)), labels=tokens(seed + 2, 5))


GALLERY: Mapping[str, Case] = {
    "mlp": Case(mlp, _rows),
    "resnet": Case(resnet, _images),
    "branches": Case(Branches, _images),
    "seq2seq": Case(Seq2Seq, _translation, cross_entropy),
    "packed": Case(Packed, _packed_example),
    "time loop": Case(TimeLoop, _steps),
    "transformer": Case(FullTransformer, _pair),
    "transformer with dropout": Case(lambda: FullTransformer(0.2), _pair),
    "gpt": Case(Gpt, _tokens, cross_entropy),
    "gpt with dropout": Case(lambda: Gpt(0.2), _tokens, cross_entropy),
    "shared bias": Case(SharedBias, _steps),
    "experts": Case(Experts, _steps),
    "in place": Case(InPlace, _rows),
    "twice": Case(Twice, _rows),
    "containers": Case(Containers, _containers, None),
    "sparse": Case(SparseNet, _sparse(Sparse)),
    "points": Case(SparseNet, _sparse(Points)),
    "own function": Case(OwnFunction, _rows),
    "reads a value": Case(ReadsValue, _rows),
    "dropout": Case(Dropped, _steps),
    "several outputs": Case(Several, _rows, _several_loss),
    "layer drop": Case(LayerDrop, _rows, runs_eval=False),
    "running mean": Case(RunningMean, _rows, runs_eval=True),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return GALLERY[name].build().double()
