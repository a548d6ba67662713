"""Losses of the models of the zoo: what the model returned and the labels to one number."""

import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from partita.models.data import IGNORED
from partita.models.gnmt import PADDING


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the tokens that have a label."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def sentence_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over the words of a sentence, averaged over sentences."""
    words = logits.flatten(0, 1), labels.flatten()
    return F.cross_entropy(*words, ignore_index=PADDING, reduction="sum") / len(labels)


def class_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(logits, labels)


def log_likelihood(logarithms: Tensor, labels: Tensor) -> Tensor:
    """Return the mean negative logarithm of the right class's probability."""
    return F.nll_loss(logarithms, labels)


def mean_squared_error(output: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all numbers of the output."""
    return F.mse_loss(output, labels)
