"""Generated batches for the models of the zoo.

Every sample of a batch has the same number of labels that count, so that a loss averaged over
microbatches is the loss of the batch; GNMT's, with sequences of several lengths, is summed over
words for that reason.
"""

import torch

from partita.models import gnmt, linear_toys, sparse_vgg, transformer
from partita.models.scaling import scaled, scaled_classes, scaled_vocabulary
from partita.models.spec import Batch, Request

IGNORED = -100
MASKED_SHARE = 0.15
NEIGHBOURS = 15
SHORTEST_SENTENCE = 5


def causal_tokens(request: Request, *, vocabulary: int, seen: bool = False) -> Batch:
    """Return tokens and, as labels, the tokens that follow; with a mask of ones if ``seen``."""
    words = scaled_vocabulary(vocabulary, request.scale)
    batch, length = request.batch_size, request.sequence_length
    tokens = request.draw.integers(0, words, batch, length + 1)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    mask = (request.draw.ones(batch, length),) if seen else ()
    return Batch((inputs, *mask), {}, labels)


def masked_tokens(request: Request, *, vocabulary: int) -> Batch:
    """Return tokens, a mask of ones, two segments, and labels for 15 % of the positions."""
    words = scaled_vocabulary(vocabulary, request.scale)
    draw, batch, length = request.draw, request.batch_size, request.sequence_length
    tokens = draw.integers(0, words, batch, length)
    labels = torch.full((batch, length), IGNORED, dtype=torch.long, device=draw.device)
    chosen = draw.choices(length, max(1, round(MASKED_SHARE * length)), batch)
    labels = labels.scatter(1, chosen, draw.integers(0, words, *chosen.shape))
    types = draw.ones(batch, length)
    types[:, : length // 2] = 0
    return Batch((tokens, draw.ones(batch, length), types), {}, labels)


def sequence_pair(request: Request, *, vocabulary: int) -> Batch:
    """Return T5's input and output tokens, a mask of ones, and the output shifted as labels."""
    words = scaled_vocabulary(vocabulary, request.scale)
    batch, length = request.batch_size, request.sequence_length
    inputs = request.draw.integers(0, words, batch, length)
    labels = request.draw.integers(0, words, batch, length)
    outputs = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)
    return Batch((inputs, outputs, request.draw.ones(batch, length)), {}, labels)


def translation_pair(request: Request) -> Batch:
    """Return source and target tokens and, as Baechi does, normal targets of the logits."""
    words = scaled_vocabulary(transformer.VOCABULARY, request.scale)
    shape = (request.batch_size, request.sequence_length)
    source = request.draw.integers(1, words, *shape)
    target = request.draw.integers(1, words, *shape)
    return Batch((source, target), {}, request.draw.normal(*shape, words))


def sentences(request: Request) -> Batch:
    """Return padded sentences, their lengths in descending order, target tokens and labels.

    Lengths lie on the CPU, with values, whatever the device: packing reads them.
    """
    words = scaled_vocabulary(gnmt.VOCABULARY, request.scale)
    draw, batch, length = request.draw, request.batch_size, request.sequence_length
    shortest = min(SHORTEST_SENTENCE, length)
    # Spread over the range instead of drawn, so that shapes do not depend on the seed.
    spread = torch.linspace(length, shortest, batch).round().long()
    source = draw.integers(1, words, batch, length)
    target = draw.integers(1, words, batch, length + 1)
    beyond = (torch.arange(length) >= spread[:, None]).to(draw.device)
    source = source.masked_fill(beyond, gnmt.PADDING)
    labels = target[:, 1:].masked_fill(beyond, gnmt.PADDING)
    return Batch((source, spread, target[:, :-1].contiguous()), {}, labels)


def images(request: Request, *, side: int, classes: int) -> Batch:
    """Return images and their classes."""
    draw, batch = request.draw, request.batch_size
    labels = draw.integers(0, scaled_classes(classes, request.scale), batch)
    return Batch((draw.normal(batch, 3, side, side),), {}, labels)


def image_targets(request: Request, *, side: int, classes: int) -> Batch:
    """Return images and, as Baechi does, normal targets of the logits."""
    draw, batch = request.draw, request.batch_size
    targets = draw.normal(batch, scaled_classes(classes, request.scale))
    return Batch((draw.uniform(batch, 3, side, side),), {}, targets)


def feature_maps(request: Request, *, channels: int, side: int, outputs: tuple[int, ...]) -> Batch:
    """Return feature maps and normal targets; both widths follow the scale."""
    draw, batch, scale = request.draw, request.batch_size, request.scale
    maps = draw.uniform(batch, scaled(channels, scale), side, side)
    targets = draw.normal(batch, sum(scaled(part, scale) for part in outputs))
    return Batch((maps,), {}, targets)


def vectors(request: Request) -> Batch:
    """Return the inputs of Baechi's linear toys and normal targets."""
    draw, batch = request.draw, request.batch_size
    width = scaled(linear_toys.WIDTH, request.scale)
    return Batch((draw.uniform(batch, 1, width),), {}, draw.normal(batch, width))


def point_clouds(request: Request) -> Batch:
    """Return coordinates, features and classes of point clouds.

    Cells are filled level by level, from coarse to fine, each with the same number of distinct
    cells of the next level: the number of points is fixed at every level.
    """
    draw, batch = request.draw, request.batch_size
    side = sparse_vgg.COARSE_SIDE
    cells = draw.choices(side**3, sparse_vgg.COARSE_CELLS, batch)
    points = torch.stack([cells // side**2, cells // side % side, cells % side], -1)
    for *_, joined in reversed(sparse_vgg.LEVELS):
        octants = draw.choices(8, joined, batch, points.shape[1])
        steps = torch.stack([octants // 4, octants // 2 % 2, octants % 2], -1)
        points = (2 * points[:, :, None, :] + steps).flatten(1, 2)
    labels = draw.integers(0, scaled_classes(sparse_vgg.CLASSES, request.scale), batch)
    return Batch((points, draw.normal(batch, points.shape[1], 1)), {}, labels)


def graph_nodes(request: Request) -> Batch:
    """Return features of a generated graph's nodes, averaged over their neighbours, and classes.

    Classes have a centre each; a node's features lie around its class's. Its neighbours are drawn,
    three of four from its own class, and what the model reads is the mean over them and itself.
    """
    draw, nodes = request.draw, request.batch_size
    width = scaled(linear_toys.GRAPH_FEATURES, request.scale)
    classes = linear_toys.GRAPH_CLASSES
    labels = draw.integers(0, classes, nodes)
    own = draw.uniform(nodes, NEIGHBOURS) < 0.75
    heard = torch.where(own, labels[:, None], draw.integers(0, classes, nodes, NEIGHBOURS))
    share = torch.zeros(nodes, classes, device=draw.device).scatter_add(
        1, heard, torch.full((nodes, NEIGHBOURS), 1.0 / NEIGHBOURS, device=draw.device)
    )
    centres = draw.normal(classes, width)
    noise = draw.normal(nodes, width) / (NEIGHBOURS + 1) ** 0.5
    return Batch((share @ centres + noise,), {}, labels)
