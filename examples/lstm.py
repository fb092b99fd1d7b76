"""An LSTM language model, in plain PyTorch; its data and loss are those of `examples/gpt.py`. Nothing here knows raypar.

`nn.LSTM` returns its output and its state; the embedding and the output layer share their weight, which first and last stage
then both hold.

    raypar train jobs/lstm.yaml
"""

from __future__ import annotations

from torch import Tensor, nn


class LSTMLanguageModel(nn.Module):
    """tokens [mb, seq] -> logits [mb, seq, vocab]: layers of LSTM with residuals and dropout between them."""

    def __init__(self, vocab: int = 256, width: int = 192, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.rnns = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.logits.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        for rnn in self.rnns:
            y, _ = rnn(x)
            x = x + self.dropout(y)
        logits: Tensor = self.logits(self.norm(x))
        return logits
