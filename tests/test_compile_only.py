"""Every Triton kernel, as the host code launches it, compiled for GPUs that need not be there, spills no registers."""

import importlib
import os
import pkgutil
import re
import subprocess
from functools import partial

import pytest
import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import fuseopt.ops.triton
from fuseopt.ops.triton import (
    cross_entropy_bwd,
    cross_entropy_fwd,
    dropout_add_layer_norm_bwd,
    dropout_add_layer_norm_fwd,
    dropout_add_rms_norm_bwd,
    dropout_add_rms_norm_fwd,
    gated_activation_bwd,
    gated_activation_fwd,
    gelu_bias_bwd,
    gelu_bwd,
    gelu_fwd,
    layer_norm,
    layer_norm_bwd,
    layer_norm_fwd,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
    relative_attention_bwd,
    relative_attention_fwd,
    relative_attention_line,
    rms_norm,
    rms_norm_bwd,
    rms_norm_fwd,
    rotary_embedding_bwd,
    rotary_embedding_fwd,
    softmax_bwd,
    softmax_fwd,
)
from fuseopt.ops.triton.compile_only import compile_only

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def targets(*shape):
    return empty(*shape, dtype=torch.int64)


def statistics(dtype):
    return empty(512, dtype=torch.promote_types(dtype, torch.float32))


def held(dtype, columns):
    """As many columns as a kernel that takes no row in parts takes at most."""
    return min(columns, 32 * 1024 // max(dtype.itemsize, 4))


# Calls that launch kernels, given the dtype and the width of a row. A new kernel joins by a line here.
CALLS = {
    "rms_norm_fwd": lambda d, n: rms_norm_fwd(empty(512, n, dtype=d), empty(n, dtype=d), 1e-6, 1, 1.0),
    "rms_norm": lambda d, n: rms_norm(empty(512, n, dtype=d), empty(n, dtype=d), 1e-6, 1, 1.0),
    "rms_norm_bwd": lambda d, n: rms_norm_bwd(
        empty(512, n, dtype=d), empty(512, n, dtype=d), empty(n, dtype=d), empty(512, dtype=torch.float32), 1.0, True
    ),
    "layer_norm_fwd": lambda d, n: layer_norm_fwd(empty(512, n, dtype=d), *[empty(n, dtype=d)] * 2, 1e-6),
    "layer_norm": lambda d, n: layer_norm(empty(512, n, dtype=d), *[empty(n, dtype=d)] * 2, 1e-6),
    "layer_norm_bwd": lambda d, n: layer_norm_bwd(
        *[empty(512, n, dtype=d)] * 2, empty(n, dtype=d), *[empty(512, dtype=torch.float32)] * 2, True, True
    ),
    "softmax_fwd": lambda d, n: softmax_fwd(empty(512, n, dtype=d), None, 0.125, d),
    "softmax_fwd, masked": lambda d, n: softmax_fwd(
        empty(2, 16, 8, n, dtype=d), empty(2, 1, 8, n, dtype=torch.float32), 0.125, d
    ),
    "softmax_bwd": lambda d, n: softmax_bwd(empty(512, n, dtype=d), empty(512, n, dtype=d), 0.125, d),
    "cross_entropy_fwd": lambda d, n: cross_entropy_fwd(empty(512, n, dtype=d), targets(512), -100, 0.1, 1e-4),
    "cross_entropy_bwd": lambda d, n: cross_entropy_bwd(
        statistics(d), empty(512, n, dtype=d), targets(512), statistics(d), statistics(d), -100, 0.1, 1e-4
    ),
    "linear_cross_entropy_fwd": lambda d, n: linear_cross_entropy_fwd(
        empty(512, 64, dtype=d), empty(n, 64, dtype=d), None, targets(512), -100, 0.0, 0.0, d, True, True, False
    ),
    "linear_cross_entropy_fwd, no gradient": lambda d, n: linear_cross_entropy_fwd(
        empty(512, 64, dtype=d), empty(n, 64, dtype=d), None, targets(512), -100, 0.0, 0.0, d, False, False, False
    ),
    "linear_cross_entropy_bwd": lambda d, n: linear_cross_entropy_bwd(
        *[statistics(d), empty(512, 64, dtype=d), empty(n, 64, dtype=d), empty(n, dtype=d), targets(512)],
        *[-100, 0.1, 1e-4, d, True, True, True],
    ),
    "dropout_add_layer_norm_fwd": lambda d, n: dropout_add_layer_norm_fwd(
        *[empty(512, held(d, n), dtype=d)] * 2, *[empty(held(d, n), dtype=d)] * 2, targets(1), 0.1, 1e-5, d
    ),
    "dropout_add_layer_norm_bwd": lambda d, n: dropout_add_layer_norm_bwd(
        *[empty(512, held(d, n), dtype=d)] * 3,
        *[empty(held(d, n), dtype=d), statistics(d), statistics(d), targets(1)],
        *[0.1, d, True, True],
    ),
    "dropout_add_rms_norm_fwd": lambda d, n: dropout_add_rms_norm_fwd(
        *[empty(512, held(d, n), dtype=d)] * 2, empty(held(d, n), dtype=d), targets(1), 0.1, 1e-6, 1, 1.0
    ),
    "dropout_add_rms_norm_bwd": lambda d, n: dropout_add_rms_norm_bwd(
        *[empty(512, held(d, n), dtype=d)] * 3,
        *[empty(held(d, n), dtype=d), statistics(d), targets(1), 0.1, 1.0, d, True],
    ),
}


# Likewise, of operations element by element.
ELEMENTWISE_CALLS = {
    "gelu_fwd": lambda d, n: gelu_fwd(empty(512, n, dtype=d)),
    "gelu_fwd, tanh, bias": lambda d, n: gelu_fwd(empty(512, n, dtype=d), True, empty(n, dtype=d)),
    "gelu_bwd": lambda d, n: gelu_bwd(*[empty(512, n, dtype=d)] * 2),
    "gelu_bias_bwd": lambda d, n: gelu_bias_bwd(*[empty(512, n, dtype=d)] * 2, True, empty(n, dtype=d)),
    "gated_activation_fwd": lambda d, n: gated_activation_fwd(*[empty(512, n, dtype=d)] * 2, 2),
    "gated_activation_bwd, halves": lambda d, n: gated_activation_bwd(
        empty(512, n, dtype=d), *empty(512, 2 * n, dtype=d).chunk(2, -1), 1
    ),
}


def attention(dtype, dim, mask=None, biased=True):
    """Of a projection's views, with a bias of the distance, as T5's, and dropout."""
    views = [empty(2, 512, 4, dim, dtype=dtype).transpose(1, 2)] * 3
    line = (
        relative_attention_line(empty(4, 257, dtype=torch.float32), torch.promote_types(dtype, torch.float32))
        if biased
        else None
    )
    return *views, line, mask, targets(1)


def backward_of(dtype, dim, mask, causal, biased=True):
    statistic = torch.promote_types(dtype, torch.float32)
    return relative_attention_bwd(
        *[empty(2, 512, 4, dim, dtype=dtype), *attention(dtype, dim, mask, biased)],
        *[empty(2, 512, 4, dim, dtype=dtype), empty(2, 4, 512, dtype=statistic), 1.0, 0.1, causal, biased],
    )


# Likewise, given the dtype and the size of a head.
ATTENTION_CALLS = {
    "relative_attention_fwd": lambda d, n: relative_attention_fwd(*attention(d, n), 1.0, 0.1, True),
    "relative_attention_fwd, masked": lambda d, n: relative_attention_fwd(
        *attention(d, n, empty(2, 1, 512, 512, dtype=torch.bool)), 1.0, 0.1, False
    ),
    "relative_attention_fwd, padded": lambda d, n: relative_attention_fwd(
        *attention(d, n, empty(2, 1, 1, 512, dtype=torch.float32), False), 1.0, 0.1, True
    ),
    "relative_attention_bwd": lambda d, n: backward_of(d, n, None, True),
    "relative_attention_bwd, masked": lambda d, n: backward_of(d, n, empty(2, 1, 512, 512, dtype=torch.bool), False),
    "relative_attention_bwd, padded": lambda d, n: backward_of(
        d, n, empty(2, 1, 1, 512, dtype=torch.float32), True, biased=False
    ),
}


def projected(dtype, heads, dim):
    return empty(2, 512, heads, dim, dtype=dtype)


# Likewise; the second takes a part of a head whose size is no power of two.
ROTARY_CALLS = {
    "rotary_embedding_fwd": lambda d, n: rotary_embedding_fwd(
        *[projected(d, heads, n).transpose(1, 2) for heads in (8, 2)], *[empty(1, 512, n, dtype=d)] * 2
    ),
    "rotary_embedding_fwd, part": lambda d, n: rotary_embedding_fwd(
        *[projected(d, heads, n + 16).transpose(1, 2) for heads in (8, 2)], *[empty(2, 512, n - 16, dtype=d)] * 2
    ),
    "rotary_embedding_bwd": lambda d, n: rotary_embedding_bwd(
        *[projected(d, heads, n) for heads in (8, 2)], *[empty(1, 512, n, dtype=d)] * 2, d, d
    ),
}
ELEMENTWISE = [(torch.bfloat16, 768), (torch.float16, 1023), (torch.float32, 3072), (torch.float64, 1024)]
HEADS = [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 64)]
# Than the first, which is in the test of all.
OTHER_HEADS = [HEADS[1], pytest.param(*HEADS[2], marks=pytest.mark.slow)]
# Narrow rows, hidden sizes, an odd width, rows that norms in float32 walk along, the widest rows held in registers,
# vocabularies; 768 and 50257 in bfloat16 are in the test of all.
ROWS = [
    (torch.bfloat16, 64),
    (torch.float16, 1023),
    (torch.float32, 1600),
    (torch.float32, 32768),
    *[
        pytest.param(dtype, columns, marks=pytest.mark.slow)
        for dtype, columns in (
            (torch.bfloat16, 4096),
            (torch.float32, 4096),
            (torch.float64, 16384),
            (torch.bfloat16, 50257),
            (torch.bfloat16, 262144),
        )
    ],
]
# Bytes of stack that a kernel may take; later compilers spill a few registers of the widest rows.
STACK = 0 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8) else 24
# Kernels are compiled for this one in all sizes.
CAPABILITY = 90


def is_wide(name):
    """Whether there is another kernel for rows too wide to be held."""
    return not name.startswith("dropout_add")


@pytest.fixture(params=[CAPABILITY], ids="sm_{}".format)
def compiled(request, monkeypatch):
    """The kernels compiled since, in place of launching them."""
    run = JITFunction.run

    def run_as_told(self, *args, **kwargs):
        assert "enable_fp_fusion" in kwargs, f"{self.__name__}: what Triton does by default is about to change"
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", run_as_told)
    with compile_only(request.param, multiprocessors=132) as kernels:
        yield kernels


def resource_usage(kernel, folder) -> dict[str, int]:
    """Registers a thread, and bytes of stack and local memory, which hold what was spilled."""
    cubin = folder / f"{kernel.metadata.name}.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", listing)}


@pytest.mark.parametrize(("dtype", "columns"), ROWS, ids=str)
def test_compiles_without_spills(compiled, tmp_path, dtype, columns):
    for name, call in CALLS.items():
        compiled.clear()
        call(dtype, columns)
        # The exponential of float64 is a function, whose return address may take a slot.
        assert_fits(name, compiled, tmp_path, stack=STACK + 8 if dtype == torch.float64 else STACK)


@pytest.mark.parametrize(("dtype", "columns"), ELEMENTWISE, ids=str)
def test_elementwise_kernels_compile_without_spills_and_go_by_vectors(compiled, tmp_path, dtype, columns):
    for name, call in ELEMENTWISE_CALLS.items():
        compiled.clear()
        call(dtype, columns)
        assert_fits(name, compiled, tmp_path, stack=0)
        accesses = re.findall(r"(?:ld|st)\.global\.\S+", compiled[0].asm["ptx"])
        contiguous = "bias" not in name and "halves" not in name
        if contiguous or columns % 8 == 0:
            assert accesses and all(".v" in access for access in accesses)


@pytest.mark.parametrize(("dtype", "dim"), OTHER_HEADS, ids=str)
def test_attention_compiles_with_few_spills(compiled, tmp_path, dtype, dim):
    for name, call in ATTENTION_CALLS.items():
        compiled.clear()
        call(dtype, dim)
        # Tiles of scores, their gradients and sums fill the registers; a few bytes more are not read in the loop.
        assert_fits(name, compiled, tmp_path, stack=64)


@pytest.mark.parametrize(("dtype", "dim"), HEADS, ids=str)
def test_rotation_compiles_without_spills_and_goes_by_vectors(compiled, tmp_path, dtype, dim):
    for name, call in ROTARY_CALLS.items():
        compiled.clear()
        call(dtype, dim)
        assert_fits(name, compiled, tmp_path, stack=0)
        accesses = re.findall(r"(?:ld|st)\.global\.\S+", compiled[0].asm["ptx"])
        assert accesses and all(".v" in access for access in accesses)


def assert_fits(name, kernels, folder, *, stack):
    """`stack`: bytes of it that a thread may take."""
    assert kernels, f"{name} launched nothing"
    for kernel in kernels:
        usage = resource_usage(kernel, folder)
        assert 0 < usage["REG"] <= 65536 // (32 * kernel.metadata.num_warps)
        assert usage["STACK"] <= stack and not usage["LOCAL"], f"{name}: {kernel.metadata.name} spills: {usage}"
        # What a block can have at 9.0; at any capability from 8.0 on.
        most = 227 if driver.active.capability == 90 else 99
        assert kernel.metadata.shared <= most * 1024, f"{name}: {kernel.metadata.name}: {kernel.metadata.shared}"


@pytest.mark.parametrize(
    "compiled", [CAPABILITY, pytest.param(80, marks=pytest.mark.slow)], ids="sm_{}".format, indirect=True
)
def test_every_kernel_is_compiled(compiled, tmp_path):
    kernels, found = set(), set()
    for module in pkgutil.iter_modules(fuseopt.ops.triton.__path__, "fuseopt.ops.triton."):
        members = vars(importlib.import_module(module.name)).values()
        kernels |= {member.__name__ for member in members if isinstance(member, JITFunction)}
    calls = {name: partial(call, torch.bfloat16, 768) for name, call in (CALLS | ELEMENTWISE_CALLS).items()}
    calls |= {f"{name}, wide": partial(call, torch.bfloat16, 50257) for name, call in CALLS.items() if is_wide(name)}
    calls |= {name: partial(call, torch.bfloat16, 64) for name, call in (ATTENTION_CALLS | ROTARY_CALLS).items()}
    for name, call in calls.items():
        compiled.clear()
        call()
        assert_fits(name, compiled, tmp_path, stack=64 if name in ATTENTION_CALLS else STACK)
        found |= {kernel.metadata.name for kernel in compiled}
    assert found == {name for name in kernels if name.endswith("_kernel")}


# Kernel -> its accesses by element: the ends of a row, and what it reads and writes once.
ACCESSES_BY_ELEMENT = {
    "softmax_fwd": 3,
    "softmax_bwd": 3,
    "cross_entropy_fwd": 6,
    "cross_entropy_bwd": 8,
    "linear_cross_entropy_fwd": 5,
}


@pytest.mark.parametrize("columns", [50257, 50264])
def test_wide_rows_are_read_by_vectors_at_any_width(compiled, columns):
    for name, by_element in ACCESSES_BY_ELEMENT.items():
        compiled.clear()
        CALLS[name](torch.bfloat16, columns)
        accesses = re.findall(r"(?:ld|st)\.global\.\S+", compiled[0].asm["ptx"])
        assert sum(not access.endswith("v4.b32") for access in accesses) <= by_element
        assert sum(access.endswith("v4.b32") for access in accesses) > 7
