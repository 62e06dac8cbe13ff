"""Programmatic dependent launch: what kernels must not read while the previous kernel may still write it."""

import re
from pathlib import Path

import pytest

from fuseopt.build import toolchain

CUDA = toolchain.CSRC / "cuda"
BINDINGS = sorted([*CUDA.rglob("*_binding.cpp"), *CUDA.rglob("*_binding.h")])
WITH_PDL = [path for path in BINDINGS if "pdl" in path.read_text()]


def test_there_are_bindings_with_pdl() -> None:
    assert {"decode_linear_binding.h", "decode_attention_binding.cpp", "decode_beams_binding.cpp"} <= {
        path.name for path in WITH_PDL
    }


@pytest.mark.parametrize("path", WITH_PDL, ids=lambda path: path.name)
def test_an_op_with_pdl_makes_its_copies_through_the_guard(path: Path) -> None:
    """A kernel reads parameters before it waits for the previous kernel, which must not be one that copies them."""
    source = path.read_text()
    assert "as_contiguous(" not in source and "torch::stable::" not in source
    assert ".pdl = pdl;" not in source  # what was asked for, whatever has been copied


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CUDA.rglob("*.cu*")) if "follow_predecessor();" in path.read_text()],
    ids=lambda path: path.name,
)
def test_a_kernel_that_follows_another_reads_no_input_past_coherence(path: Path) -> None:
    """nvcc emits ld.global.nc for `const T* __restrict__`; it is only valid for data that does not change meanwhile."""
    source = path.read_text()
    assert "load_once<" not in source and "ld.global.nc" not in source and "__ldg(" not in source
    assert not re.findall(r"const \w+\* __restrict__", source)
