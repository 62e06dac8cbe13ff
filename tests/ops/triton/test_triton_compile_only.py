"""What one process compiles for a GPU that it does not have, another one finds in Triton's cache."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

from fuseopt.ops.layout import Layout

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
BFLOAT16 = torch.bfloat16


def layout(*shape, dtype=BFLOAT16):
    return Layout.of(torch.empty(shape, dtype=dtype, device="meta"))


def test_a_process_keeps_its_own_settings(monkeypatch, tmp_path):
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from fuseopt.ops.triton import compile_only, rms_norm_fwd
    from fuseopt.ops.triton.rows import MULTIPROCESSORS

    monkeypatch.setenv("TRITON_CACHE_DIR", "its own")

    def state():
        return compile_only.settings(), driver._active, JITFunction.run, MULTIPROCESSORS.get(), CUDABackend.hash

    before = state()
    rows, weight = layout(24, 64), layout(64)
    target = compile_only.Target(80, 108, {"TRITON_CACHE_DIR": str(tmp_path)}, "V0.0.0")
    assert compile_only.compile_call(rms_norm_fwd, (rows, weight, 1e-6, 1, 1.0), target) == ["rms_norm_fwd_kernel"]
    assert list(tmp_path.iterdir()) and not os.path.exists("its own")
    other = target._replace(settings={"TRITON_CACHE_DIR": str(tmp_path / "other")})
    assert compile_only.compile_call(rms_norm_fwd, (rows, weight, 1e-6, 1, 1.0), other) == ["rms_norm_fwd_kernel"]
    assert list((tmp_path / "other").iterdir())
    with pytest.raises(TypeError):
        compile_only.compile_call(rms_norm_fwd, (), target)
    assert state() == before


# After a call of the forward here, before any there: what a name in the cache is made of must not depend on it.
ELSEWHERE = """
import json, pickle, sys
import triton
from fuseopt.ops.triton.compile_only import compile_call
seen = []
triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: seen.append((src.name, cache_hit))
compile_call(*pickle.load(sys.stdin.buffer))
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_another_process_finds_what_this_one_has_compiled(tmp_path):
    from fuseopt.ops.triton import relative_attention_bwd_joined, relative_attention_fwd
    from fuseopt.ops.triton.compile_only import Target, compile_call

    target = Target(90, 132, {"TRITON_CACHE_DIR": str(tmp_path)}, "V0.0.0")
    tensor = Layout.of(torch.empty(2, 128, 3, 4, 64, dtype=BFLOAT16, device="meta").select(2, 0).transpose(1, 2))
    line, seed = layout(4, 768, dtype=torch.float32), layout(1, dtype=torch.int64)
    output, lse = layout(2, 128, 4, 64), layout(2, 4, 128, dtype=torch.float32)
    inputs, scalars = (tensor, tensor, tensor, line, None, seed), (1.0, 0.1, True)
    compile_call(relative_attention_fwd, (*inputs, *scalars), target)
    grad = Layout.of(torch.empty(2, 128, 4, 64, dtype=BFLOAT16, device="meta").transpose(1, 2))
    arguments = grad, *inputs, output, lse, *scalars, True, True
    job = relative_attention_bwd_joined, arguments, target
    names = compile_call(*job)
    assert len(names) == 4

    command = [sys.executable, "-c", ELSEWHERE]
    done = subprocess.run(command, input=pickle.dumps(job), capture_output=True, check=True)
    assert json.loads(done.stdout) == [[name, True] for name in names]


def test_names_are_made_with_the_version_of_ptxas_that_the_process_knows(tmp_path, monkeypatch):
    from triton.backends.nvidia.compiler import get_ptxas_version

    from fuseopt.ops.triton.compile_only import Target

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("fuseopt.ops.triton.compile_only.multiprocessor_count", lambda device: 132)
    gpu = torch.device("cuda", 0)
    known = Target.of(gpu)
    # As Inductor does in a process when its others are not there yet.
    ptxas = tmp_path / "ptxas"
    ptxas.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V0.0.0'\n")
    ptxas.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(ptxas))
    assert Target.of(gpu).assembler == known.assembler
    get_ptxas_version.cache_clear()
    try:
        assert "V0.0.0" in Target.of(gpu).assembler and "V0.0.0" not in known.assembler
    finally:
        get_ptxas_version.cache_clear()
