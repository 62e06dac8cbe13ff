"""RMS norm and rotation of each head's vector, as queries and keys of a decoder take them before attention.

Rotary positions: Su et al. 2021, arXiv 2104.09864. Norms of queries and keys: Henry et al. 2020, arXiv 2010.04245.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fuseopt.ops.library import check_shape, compute_dtype


class HeadRotation(NamedTuple):
    """What is done to each query [head_dim] and each new key [head_dim], in float32: norm, then rotation.

    Attributes:
        table: [positions, rotated] float32: cosines of a position, then its sines, rotated / 2 of each. None: nothing
            is rotated. Dimensions from `rotated` on pass as they are.
        row_positions: [rows], int32 or int64: each row's position in `table`.
        interleaved: pairs are dimensions (2i, 2i + 1); else (i, i + rotated / 2).
        q_norm, k_norm: [head_dim], weights of RMS norms of queries and keys, or None for no norm.
        norm_eps: added to the mean of squares.
        norm_offset: added to the weights of the norms.
    """

    table: Tensor | None = None
    row_positions: Tensor | None = None
    interleaved: bool = False
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0

    @property
    def is_identity(self) -> bool:
        return self.table is None and self.q_norm is None and self.k_norm is None

    def check(self, head_dim: int, positions_shape: tuple[int, ...]) -> None:
        """Raises ValueError or TypeError unless these fit vectors of `head_dim`, and rows of `positions_shape`."""
        for name, weight in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if weight is not None:
                check_shape(name, weight, torch.Size((head_dim,)))
        table, positions = self.table, self.row_positions
        if (table is None) != (positions is None):
            raise ValueError("rotary and row_positions must be given together, or neither")
        if table is None or positions is None:
            return
        if table.dim() != 2 or table.shape[1] % 2 or not 0 < table.shape[1] <= head_dim or len(table) == 0:
            raise ValueError(
                f"rotary must be [positions, rotated] with an even rotated of at most {head_dim}, not"
                f" {tuple(table.shape)}"
            )
        if table.dtype != torch.float32:
            raise TypeError(f"rotary must be float32, not {table.dtype}")
        check_shape("row_positions", positions, torch.Size(positions_shape))
        if positions.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"row_positions must be int32 or int64, not {positions.dtype}")

    def of_queries(self, query: Tensor) -> Tensor:
        """[rows..., heads, head_dim] -> the same, normalised and rotated, in the same dtype."""
        return self._apply(query, self.q_norm)

    def of_keys(self, key: Tensor) -> Tensor:
        """[rows..., kv_heads, head_dim] -> the same, normalised and rotated, in the same dtype."""
        return self._apply(key, self.k_norm)

    def _apply(self, x: Tensor, norm: Tensor | None) -> Tensor:
        if self.table is None and norm is None:
            return x
        wide = x.to(compute_dtype(x))
        if norm is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm_eps)
            wide = wide * (norm.to(wide.dtype) + self.norm_offset)
        if self.table is not None and self.row_positions is not None:
            cos, sin = self.table[self.row_positions].to(wide.dtype).unsqueeze(-2).chunk(2, -1)
            rotated, passed = wide.tensor_split([self.table.shape[1]], -1)
            pairs = rotated.unflatten(-1, (-1, 2) if self.interleaved else (2, -1))
            axis = -1 if self.interleaved else -2
            first, second = pairs.unbind(axis)
            pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), axis)
            wide = torch.cat((pairs.flatten(-2), passed), -1)
        return wide.to(x.dtype)
