"""A matrix product by the measured fastest of cuBLASLt's algorithms. cuBLASLt itself chooses one by a heuristic."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fuseopt.ops import registry
from fuseopt.ops.backends import assumed_gpu
from fuseopt.ops.decode.linear import ACTIVATIONS as ALL_ACTIVATIONS
from fuseopt.ops.library import check_shape, compute_dtype, define, without_autocast

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = {name: ALL_ACTIVATIONS[name] for name in ("relu", "gelu_tanh")}


def _fake(
    left: Tensor, right: Tensor, bias: Tensor | None, activation: str, float_result: bool, measure: bool
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.float32 if float_result else left.dtype)


RAW = define(
    "tuned_matmul(Tensor left, Tensor right, Tensor? bias, str activation, bool float_result, bool measure) -> Tensor",
    _fake,
)
WITH_GELU = define(
    "tuned_matmul_gelu(Tensor left, Tensor right, Tensor bias, bool measure) -> (Tensor, Tensor)",
    lambda left, right, bias, measure: tuple(left.new_empty((left.shape[0], right.shape[1])) for _ in range(2)),
)
"""`left @ right + bias`, and GELU (tanh approximation) of the unrounded sum; both in 16 bits."""
GELU_COLUMNS = 8
"""`WITH_GELU` needs a multiple of this many columns; for others cuBLASLt does not return the sum."""

_INTO = define(
    "tuned_matmul_(Tensor(a!) output, Tensor left, Tensor right, bool accumulate, bool measure) -> ()",
    lambda output, left, right, accumulate, measure: None,
)
_MEASURES: ContextVar[bool] = ContextVar("measures", default=False)


@dataclass(frozen=True)
class _CublasLt(registry.NativeBackend):
    """The backend: cuBLASLt as loaded by torch, called from the native library."""

    def not_supported_reasons(
        self, device: torch.device, dtypes: Sequence[torch.dtype], *, may_build: bool = False
    ) -> list[str]:
        reasons = super().not_supported_reasons(device, dtypes, may_build=may_build)
        is_there = (may_build and assumed_gpu() is not None) or _is_loaded()
        return reasons or ([] if is_there else ["torch has not loaded cuBLASLt as a library of its own"])


@functools.cache
def _is_loaded() -> bool:
    try:
        ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _check(left: Tensor, right: Tensor, bias: Tensor | None, activation: str | None, float_result: bool) -> None:
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
        raise ValueError(
            f"left must be [rows, inner] and right [inner, columns], not {tuple(left.shape)} and {tuple(right.shape)}"
        )
    if bias is not None:
        check_shape("bias", bias, right.shape[1:])
    if any(tensor is not None and tensor.dtype != left.dtype for tensor in (right, bias)):
        raise ValueError("left, right and bias must have one dtype")
    if float_result and bias is not None:
        raise ValueError("a float32 result has no bias")
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(f"activation must be None, {', '.join(map(repr, ACTIVATIONS))}, not {activation!r}")


def _reference(left: Tensor, right: Tensor, bias: Tensor | None, activation: str, float_result: bool) -> Tensor:
    dtype = compute_dtype(left)
    with without_autocast(left):
        product = left.to(dtype) @ right.to(dtype)
    product = product if bias is None else product + bias.to(dtype)
    product = ACTIVATIONS[activation](product) if activation else product
    return product if float_result else product.to(left.dtype)


def tuned_matmul(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    float_result: bool = False,
    measure: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """`activation(left @ right + bias)`, with sums in float32.

    cuBLASLt (https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api) proposes up to eight algorithms for shapes,
    layouts and dtypes. The first call that may measures them, and keeps the fastest until the process ends, unless it
    gains less than a fiftieth. Which one that is may differ from process to process, and with it the order of the sums.

    Args:
        left: [rows, inner]; float32, float16 or bfloat16, which the reference takes in float64 too. Rows or columns
            that are contiguous are read where they are.
        right: [inner, columns], likewise, in the dtype of `left`.
        bias: [columns], in the dtype of `left`.
        activation: None, or "relu" or "gelu_tanh" (its tanh approximation), taken of the sum in float32.
        float_result: return what was summed up, and do not round it; takes no bias.
        measure: whether the call may measure, for which it waits for the device; by default in `measuring()`. Not while
            a CUDA graph is captured, nor where torch is to be deterministic. Where nothing has been measured, the
            library's first proposal runs.
        backend: "auto", "cuda" or "reference". Tensors that require a gradient under grad mode, and torch.func
            transforms, need the reference, which "auto" then takes.

    Returns:
        [rows, columns], contiguous, in the dtype of `left` or float32.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
        BackendError: the backend named cannot run here; the message says why.
    """
    _check(left, right, bias, activation, float_result)
    chosen = registry.pick_without_gradient("tuned_matmul", backend, (left.dtype,), left, right, bias)
    if chosen == "reference" or not left.shape[1]:
        return _reference(left, right, bias, activation or "", float_result)
    # cuBLASLt's float32 GELU uses an approximate tanh.
    is_coarse = activation == "gelu_tanh" and (float_result or left.dtype is torch.float32)
    if measure is None:
        measure = not is_dynamo_compiling() and _MEASURES.get()
    measure = measure and not torch.are_deterministic_algorithms_enabled()
    output = RAW[chosen](left, right, bias, "" if is_coarse else activation or "", float_result, measure)
    return ACTIVATIONS[activation](output) if is_coarse and activation else output


def is_fast(left: Tensor) -> bool:
    """Whether cuBLASLt is at least as fast as PyTorch's products. False if those may use TF32."""
    if left.dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return False
    return registry.pick("tuned_matmul", "auto", left.device, (left.dtype,)) == "cuda"


def multiply_into(
    output: Tensor, left: Tensor, right: Tensor, *, accumulate: bool = False, measure: bool = False
) -> None:
    """`output = left @ right`, or `output += left @ right`: on a GPU like `tuned_matmul`, elsewhere by torch.

    Args:
        output: [rows, columns], contiguous, in the dtype of the factors or a wider one.
        measure: as for `tuned_matmul`.
    """
    if is_fast(left):
        measure = measure and not torch.are_deterministic_algorithms_enabled()
        _INTO["cuda"](output, left, right, accumulate, measure)
        return
    wider = {"out_dtype": output.dtype} if output.dtype != left.dtype else {}
    if wider and not output.is_cuda:
        left, right, wider = left.to(output.dtype), right.to(output.dtype), {}
    if accumulate:
        torch.addmm(output, left, right, **wider, out=output)
    else:
        torch.mm(left, right, **wider, out=output)


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """A context in which calls measure algorithms, unless they pass `measure=False`."""
    token = _MEASURES.set(True)
    try:
        yield
    finally:
        _MEASURES.reset(token)


def sample_inputs(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> Iterator[registry.SampleInput]:
    def make(rows: int, inner: int, columns: int, *, bias: bool = False) -> tuple[Tensor, ...]:
        shapes = ((rows, inner), (inner, columns), *(((columns,),) if bias else ()))
        return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)

    yield registry.SampleInput(make(8, 16, 24))
    yield registry.SampleInput(make(5, 7, 3, bias=True))
    yield registry.SampleInput(make(16, 8, 40, bias=True), {"activation": "gelu_tanh"})
    left, right = make(24, 16, 8)
    yield registry.SampleInput((left.t().contiguous().t(), right.t().contiguous().t()), {"measure": False})
    yield registry.SampleInput(make(9, 24, 16), {"activation": "relu", "float_result": True})
    yield registry.SampleInput(make(1, 9, 1))
    yield registry.SampleInput(make(0, 4, 8, bias=True))
    yield registry.SampleInput(make(3, 0, 8))


def _bench_input(device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int) -> registry.SampleInput:
    shapes = (rows, inner), (inner, columns), (columns,)
    tensors = tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return registry.SampleInput(tensors, {"measure": True})


def _torch_matmul(left: Tensor, right: Tensor, bias: Tensor, measure: bool) -> Tensor:
    return torch.addmm(bias, left, right)


registry.register(
    registry.Op(
        name="tuned_matmul",
        raw=("tuned_matmul", "tuned_matmul_gelu", "tuned_matmul_"),
        function=tuned_matmul,
        reference=functools.partial(tuned_matmul, backend="reference"),
        sample_inputs=sample_inputs,
        backends=(_CublasLt("cuda", DTYPES), registry.REFERENCE),
        benchmarks=(
            registry.Benchmark(
                _bench_input,
                shapes=("65536x768x3072", "65536x3072x768", "4096x768x2304", "4096x768x3072"),
                torch=_torch_matmul,
            ),
        ),
    )
)
