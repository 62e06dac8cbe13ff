"""The static tensors that a decode step writes to."""

import torch
from torch import Tensor


def state_of(rows: int, length: int, finished: list[int], device: torch.device) -> dict[str, Tensor]:
    unfinished = torch.ones(rows, dtype=torch.bool, device=device)
    unfinished[finished] = False
    return {
        "tokens": torch.full((rows,), -1, device=device),
        "ids": torch.full((rows, 9), -1, device=device),
        "length": torch.tensor([length], device=device),
        "unfinished": unfinished,
        "going": torch.ones((), dtype=torch.bool, device=device),
        "pad": torch.tensor(3, device=device),
    }
