"""A deep-learning recommender (DLRM), and the fused parts that `fuseopt.initialize` puts into it."""

import torch
from dlrm_ops import bias_relu, interaction, linear_relu
from torch import Tensor, nn
from torch.nn import functional as F

import fuseopt

DENSE, CATEGORICAL = 13, 26


class LinearReLU(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.weight, self.bias))


class HashedEmbeddings(nn.Module):
    """A table for each categorical column, all in one weight; any int64 id is hashed to a row, on its device."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.rows = rows
        self.weight = nn.Parameter(0.1 * torch.randn(CATEGORICAL * rows, dim))
        self.register_buffer("first_rows", torch.arange(CATEGORICAL) * rows)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(hashed(ids, self.rows) + self.first_rows, self.weight)


def hashed(ids: Tensor, rows: int) -> Tensor:
    """Rows in [0, rows) of int64 ids: the high bits of a product, which all bits of an id reach."""
    return ((ids * 0x9E3779B97F4A7C1 >> 24) & 0x7FFFFFFF) % rows


class EmbeddingsFromHost(HashedEmbeddings):
    """The same with two host syncs in forward: a tensor built on the host, and a value read back to test it."""

    def forward(self, ids: Tensor) -> Tensor:
        first_rows = torch.tensor([column * self.rows for column in range(CATEGORICAL)], device=ids.device)
        if ids.min().item() < 0:
            raise ValueError("ids must not be negative")
        return F.embedding(hashed(ids, self.rows) + first_rows, self.weight)


class Interaction(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return interaction.function(features)


class DLRM(nn.Module):
    """(dense [batch, 13], ids [batch, 26]) -> logits of a click [batch]."""

    def __init__(self, rows: int, dim: int, hidden: int, embeddings: type[HashedEmbeddings] = HashedEmbeddings) -> None:
        super().__init__()
        self.bottom = nn.Sequential(LinearReLU(DENSE, hidden), LinearReLU(hidden, dim))
        self.embeddings = embeddings(rows, dim)
        self.interaction = Interaction()
        pairs = (CATEGORICAL + 1) * CATEGORICAL // 2
        self.top = nn.Sequential(LinearReLU(dim + pairs, hidden), LinearReLU(hidden, hidden), nn.Linear(hidden, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        features = torch.cat((self.bottom(dense).unsqueeze(1), self.embeddings(ids)), 1)
        return self.top(self.interaction(features)).squeeze(1)


@fuseopt.replaces(LinearReLU)
class LinearThenBiasReLU(fuseopt.FusedModule):
    """With a pass of its own for bias + ReLU, to be compared with."""

    def forward(self, x):
        return bias_relu(F.linear(x, self.weight), self.bias, backend=self.backend)


@fuseopt.replaces(LinearReLU, when=lambda layer: layer.bias is not None or "has no bias")
class FusedLinearReLU(fuseopt.FusedModule):
    def forward(self, x):
        return linear_relu(x, self.weight, self.bias, backend=self.backend)


@fuseopt.replaces(Interaction)
class FusedInteraction(fuseopt.FusedModule):
    def forward(self, features):
        return interaction(features, backend=self.backend)


def clicks(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Synthetic clicks in Criteo's shape: dense [batch, 13], skewed ids [batch, 26], and labels [batch] of both."""
    dense = torch.log1p(torch.rand(batch, DENSE, device=device) * 100)
    ids = (torch.rand(batch, CATEGORICAL, device=device, dtype=torch.float64) ** 4 * 2**40).long()
    chance = torch.sigmoid(dense[:, 0] - 3.5 + (ids[:, 0] % 3 - 1))
    return dense, ids, (torch.rand(batch, device=device) < chance).float()
