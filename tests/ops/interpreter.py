"""Triton's interpreter: whether it runs on this machine's NumPy, rounding as GPUs do, and faster; for a process with
TRITON_INTERPRET=1."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import numpy
import pytest
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

UNFIT = "Triton's interpreter is unfit for this NumPy"


@triton.jit
def loop_from_the_program_id(output):
    for i in range(tl.program_id(0), 3):
        tl.store(output + i, 1.0)


@functools.cache
def unfit_interpreter() -> str | None:
    """Why a loop from a tensor on cannot be interpreted, or None. NumPy 2.4 refuses how Triton 3.6 makes it an int."""
    output = torch.zeros(3)
    try:
        loop_from_the_program_id[(1,)](output)
    except InterpreterError as error:
        return f"{UNFIT}: {error.__cause__}"
    assert output.tolist() == [1, 1, 1]
    return None


def better() -> Iterator[None]:
    """Meanwhile kernels are interpreted with a GPU's roundings, and without what Triton does more often than their
    results need."""
    with pytest.MonkeyPatch.context() as patch:
        round_bfloat16_to_nearest(patch)
        exchange_the_language_once(patch)
        check_no_overflow_for_nothing(patch)
        remember_types(patch)
        leave_operands_of_one_type(patch)
        yield


def round_bfloat16_to_nearest(patch: pytest.MonkeyPatch) -> None:
    """Triton cuts off what does not fit into a bfloat16, in a loop over bits, and makes an integer of a float64."""
    plain_cast = interpreter.InterpreterBuilder.cast_impl

    def cast(self: interpreter.InterpreterBuilder, source: interpreter.TensorHandle, kind: tl.dtype) -> object:
        if source.dtype.scalar == tl.bfloat16:
            bits = source.data.astype(numpy.uint32) << numpy.uint32(16)
            source = interpreter.TensorHandle(bits.view(numpy.float32), tl.float32)
        if kind.scalar == tl.bfloat16:
            rounded = torch.from_numpy(numpy.asarray(source.data, numpy.float32)).bfloat16()
            return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        return plain_cast(self, source, kind)

    patch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)


def exchange_the_language_once(patch: pytest.MonkeyPatch) -> None:
    """`triton.language` is exchanged for what is interpreted where a kernel is launched first, and stays so.

    Triton goes through all that is in it in every launch, and in every call of a jitted function by another one too,
    where it finds nothing left to exchange: more than half of the time of these tests.
    """
    exchange = interpreter._patch_lang

    def exchange_what_is_left(function: Callable) -> object:
        if any(tl.core.is_builtin(module.load) for module in (tl, tl.core)):
            exchange(function)
        return SimpleNamespace(restore=lambda: None)

    patch.setattr(interpreter, "_patch_lang", exchange_what_is_left)


def check_no_overflow_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """Sums and products of integers are computed once: Triton computes them in int64 too, for an assertion that only
    its debug mode makes."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))


def remember_types(patch: pytest.MonkeyPatch) -> None:
    """What is known of a tensor from its type is found once a type, and not in every operation."""
    numpy_types: dict[str, object] = {}
    plain_numpy_type = interpreter._get_np_dtype

    def numpy_type(kind: tl.dtype) -> object:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = plain_numpy_type(kind)
        return numpy_types[name]

    blocks: dict[tuple[object, ...], tl.block_type] = {}

    def block_of(kind: tl.dtype, shape: Iterable[int]) -> tl.block_type:
        key = kind.name, *shape
        if key not in blocks:
            blocks[key] = tl.block_type(kind, list(shape))
        return blocks[key]

    @functools.cache
    def shape_and_size(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
        return tl.tuple(map(tl.constexpr, shape)), tl.constexpr(math.prod(shape))

    def make_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_size(tuple(type.shape) if type.is_block() else ())

    patch.setattr(interpreter, "_get_np_dtype", numpy_type)
    patch.setattr(interpreter.InterpreterBuilder, "get_block_ty", lambda self, kind, shape: block_of(kind, shape))
    patch.setattr(tl.block_type, "with_element_ty", lambda self, kind: block_of(kind, self.shape))
    patch.setattr(tl.tensor, "__init__", make_tensor)


def leave_operands_of_one_type(patch: pytest.MonkeyPatch) -> None:
    """Operands of one type are neither promoted nor broadcast, which Triton finds after a walk over their shapes."""
    plain_promotion = TritonSemantic.binary_op_type_checking_impl
    plain_broadcast = TritonSemantic.broadcast_impl_value
    # Of types that division promotes no more than other operations do.
    kinds = {tl.float32, tl.float64, tl.int32, tl.int64}

    def promote(self: TritonSemantic, lhs: object, rhs: object, *args: bool, **kwargs: bool) -> tuple:
        is_one_type = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.type is rhs.type
        if is_one_type and not lhs.dtype.is_ptr() and lhs.dtype in kinds:
            return lhs, rhs
        return plain_promotion(self, lhs, rhs, *args, **kwargs)

    def broadcast(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple:
        shapes = [list(value.type.shape) if value.type.is_block() else None for value in (lhs, rhs)]
        return (lhs, rhs) if shapes[0] == shapes[1] else plain_broadcast(self, lhs, rhs)

    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", promote)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)
