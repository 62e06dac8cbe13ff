"""HostCopy: a tensor's values on their way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """Copy of a tensor to the host, made in stream order; the host waits for it only when it reads.

    Args:
        tensor: on any device.
        dtype: of the copy.
    """

    def __init__(self, tensor: Tensor, dtype: torch.dtype) -> None:
        # From CUDA, PyTorch copies to pinned memory. From other devices the host waits here, as there is no event.
        is_on_gpu = tensor.device.type == "cuda"
        self._copy = tensor.to("cpu", dtype, non_blocking=is_on_gpu, copy=True)
        self._event = torch.cuda.current_stream(tensor.device).record_event() if is_on_gpu else None

    def read(self) -> Tensor:
        """The values, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
