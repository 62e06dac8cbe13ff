"""Copies of models whose linear layers torchao has quantised, weight-only."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fuseopt.bench.harness.workloads import Work, parameter_sharing_copy

GROUP = 128
NOT_INSTALLED = "torchao is not installed"
# torchao's configs set this, and more that multiplies the time to compile, for the whole process by default.
_INDUCTOR_OPTIONS = {"coordinate_descent_tuning": True}


def quantised(model: nn.Module, bits: int) -> nn.Module | str:
    """A copy of `model` with weights in 8 or 4 bits, which shares the other Parameters; or why there is none.

    torchao quantises `torch.nn.Linear` only, which in GPT-2 is the head alone. Layers of an encoder are not quantised.

    Args:
        bits: 8, with a scale for each output; or 4, with a scale for each `GROUP` inputs of an output.
    """
    if importlib.util.find_spec("torchao") is None:
        return NOT_INSTALLED
    taken = functools.partial(_is_taken, bits)
    if not any(taken(module, path) for path, module in model.named_modules()):
        inputs = f" with inputs in whole groups of {GROUP}" if bits == 4 else ""
        return f"torchao quantises no layer: none is a torch.nn.Linear{inputs}"
    library = importlib.import_module("torchao.quantization")
    twin = parameter_sharing_copy(model)
    try:
        if bits == 8:
            config = library.Int8WeightOnlyConfig(set_inductor_config=False)
        else:
            on_gpu = next(model.parameters()).is_cuda
            packing = {"int4_packing_format": "tile_packed_to_4d"} if on_gpu else {}
            config = library.Int4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False, **packing)
        library.quantize_(twin, config, filter_fn=taken)
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"torchao cannot quantise the model: {(str(error) or type(error).__name__).splitlines()[0]}"
    return twin


def with_inductor_options(work: Work) -> Work:
    """`work` by a model under torch.compile, with the tuning that torchao recommends."""

    def tuned_work(model: nn.Module) -> Tensor:
        with torch._inductor.config.patch(_INDUCTOR_OPTIONS):
            return work(model)

    return tuned_work


def _is_taken(bits: int, module: nn.Module, path: str) -> bool:
    is_divided = isinstance(module, nn.Linear) and (bits == 8 or module.in_features % GROUP == 0)
    return is_divided and not path.startswith("encoder.")


def stored_bytes(model: nn.Module) -> int:
    """Bytes of the parameters, each counted once; a quantised one counts with the tensors inside it."""
    return sum(tensor.nbytes for parameter in model.parameters() for tensor in _held(parameter))


def _held(tensor: Tensor) -> Iterator[Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _held(getattr(tensor, name))
