"""GNMT v2: a recurrent translator with attention, as Baechi configures it (4 layers, width 512).

The encoder's first layer is bidirectional and reads packed sequences; skip connections start at
the third layer. In the decoder the first layer's output attends to the encoder (normalised
Bahdanau attention) and the context is joined to the input of every later layer. Encoder and
decoder call one and the same embedding.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from partita.models.scaling import scaled, scaled_vocabulary

VOCABULARY = 30000
HIDDEN = 512
NUM_LAYERS = 4
DROPOUT = 0.2
PADDING = 0
UNSEEN = -65504.0
INITIAL_RANGE = 0.1


class PackedBidirectional(nn.Module):
    """A bidirectional LSTM over sequences of several lengths."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Return both directions joined; zero beyond a sequence's length.

        Args:
            x: Of shape (batch, length, features).
            lengths: Of each sequence, in descending order.
        """
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        packed, _ = self.lstm(packed)
        result, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return result


class Encoder(nn.Module):
    """The layers that read the source."""

    def __init__(self, embedding: nn.Embedding, hidden: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.dropout = nn.Dropout(DROPOUT)
        self.first = PackedBidirectional(hidden)
        self.second = nn.LSTM(2 * hidden, hidden, batch_first=True)
        self.others = nn.ModuleList(
            nn.LSTM(hidden, hidden, batch_first=True) for _ in range(NUM_LAYERS - 2)
        )

    def forward(self, source: Tensor, lengths: Tensor) -> Tensor:
        """Return what the decoder attends to."""
        x = self.first(self.dropout(self.embedding(source)), lengths)
        x, _ = self.second(self.dropout(x))
        for layer in self.others:
            y, _ = layer(self.dropout(x))
            x = y + x
        result: Tensor = x
        return result


class BahdanauAttention(nn.Module):
    """Normalised additive attention (Bahdanau et al. 2015)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.vector = nn.Parameter(torch.zeros(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.factor = nn.Parameter(torch.full((1,), hidden**-0.5))

    def forward(self, query: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        """Return the context of every query: what it reads of the memory."""
        summed = self.query(query)[:, :, None, :] + self.key(memory)[:, None, :, :] + self.bias
        vector = self.vector / self.vector.norm() * self.factor
        scores = torch.tanh(summed).matmul(vector)
        positions = torch.arange(memory.shape[1], device=memory.device)
        beyond = positions >= lengths.to(memory.device)[:, None]
        scores = scores.masked_fill(beyond[:, None, :], UNSEEN)
        return torch.bmm(scores.softmax(-1), memory)


class Decoder(nn.Module):
    """The layers that write the target."""

    def __init__(self, embedding: nn.Embedding, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.dropout = nn.Dropout(DROPOUT)
        self.first = nn.LSTM(hidden, hidden, batch_first=True)
        self.attention = BahdanauAttention(hidden)
        self.others = nn.ModuleList(
            nn.LSTM(2 * hidden, hidden, batch_first=True) for _ in range(NUM_LAYERS - 1)
        )
        self.classifier = nn.Linear(hidden, vocabulary)

    def forward(self, target: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits of every target position."""
        x, _ = self.first(self.dropout(self.embedding(target)))
        context = self.attention(x, memory, lengths)
        for index, layer in enumerate(self.others):
            y, _ = layer(self.dropout(torch.cat([x, context], 2)))
            x = y + x if index else y
        logits: Tensor = self.classifier(x)
        return logits


class GNMT(nn.Module):
    """A translator: source tokens, their lengths and target tokens to logits."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        hidden, vocabulary = scaled(HIDDEN, scale), scaled_vocabulary(VOCABULARY, scale)
        embedding = nn.Embedding(vocabulary, hidden, padding_idx=PADDING)
        self.encoder = Encoder(embedding, hidden)
        self.decoder = Decoder(embedding, hidden, vocabulary)
        fixed = {id(self.decoder.attention.factor), id(self.decoder.attention.bias)}
        for parameter in self.parameters():
            if id(parameter) not in fixed and not parameter.is_meta:
                nn.init.uniform_(parameter, -INITIAL_RANGE, INITIAL_RANGE)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Return the logits of every target position.

        Args:
            source: Tokens of shape (batch, length), padded.
            lengths: Of each source sequence, in descending order.
            target: Tokens of shape (batch, length).
        """
        memory = self.encoder(source, lengths)
        logits: Tensor = self.decoder(target, memory, lengths)
        return logits
