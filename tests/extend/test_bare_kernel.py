"""Launches of users' kernels without host code, on a CPU: a C function in the place of cuLaunchKernel."""

import contextlib
import ctypes
import types

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.build import loader
from fuseopt.errors import OpError
from fuseopt.extend import launches, native

POINTER, UINT = ctypes.c_void_p, ctypes.c_uint
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, *[UINT] * 7, POINTER, ctypes.POINTER(POINTER), POINTER)


class Driver:
    """A launch of `output, total = a * times + scale, a[:1]`; `statuses` are given before launches succeed."""

    def __init__(self):
        self.launches, self.statuses, self.contexts = [], [], []
        self.cuLaunchKernel = LAUNCH(self.launch)

    def launch(self, function, *rest):
        *sizes, stream, given, _ = rest
        if self.statuses:
            return self.statuses.pop(0)
        self.launches.append((function, *sizes, stream))
        kinds = (POINTER, ctypes.c_int, ctypes.c_double, POINTER, POINTER, ctypes.c_int)
        a, times, scale, output, total, n = (
            ctypes.cast(given[place], ctypes.POINTER(kind))[0] for place, kind in enumerate(kinds)
        )
        read, written, first = (
            (ctypes.c_float * size).from_address(at) for at, size in ((a, n), (output, n), (total, 1))
        )
        for i in range(n):
            written[i] = read[i] * times + scale
        first[0] = read[0]
        return 0


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    loaded = {"scaled_kernel": types.SimpleNamespace(func=POINTER(0x77))}
    monkeypatch.setattr(native, "_check_device", lambda: None)
    monkeypatch.setattr(native, "_capability", lambda: "90")
    monkeypatch.setattr(native, "cubin", lambda source, kernel, architecture: b"")
    monkeypatch.setattr(launches.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(launches, "_driver", launches._driver.__wrapped__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", driver.contexts.append)
    monkeypatch.setattr(torch.cuda._utils, "_cuda_load_module", lambda code, names: loaded)
    monkeypatch.setattr(torch.cuda._utils, "_check_cuda", lambda status: pytest.fail(f"status {status}"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x55, raising=False)
    assert loader.load("python") and loader.python_library() is not None
    return driver


@pytest.fixture
def run(driver):
    @fuseopt.op("mine::scaled")
    def scaled(a: Tensor, times: int, scale: float, unused: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return a * times + scale, a.flatten()[:1].clone()

    grid = (lambda a, *_: (a.numel(), 2)), (lambda a, *_: a.numel()), (lambda a, *_: 0)
    scaled.native(
        cuda="__global__ void scaled_kernel();", kernel="scaled_kernel", grid=lambda *given: grid[place](*given)
    )
    place = 0

    def run(a, times, scale, unused=None, which=0):
        nonlocal place
        place = which
        return scaled.calls.run(scaled._kernels["cuda"], (a, times, scale, unused))

    run.kernel = scaled._kernels["cuda"]
    return run


def test_results_and_launches(run, driver):
    for a in (torch.randn(3, 5), torch.randn(5, 3).t(), torch.randn(4, 6)[:, ::2], torch.tensor(2.0)):
        for times, scale, which in ((3, 0.5, 0), (-7, -2.0, 1), (True, 1.0, 1)):
            output, first = run(a, times, scale, which=which)
            torch.testing.assert_close(output, a * times + scale)
            assert output.is_contiguous() and torch.equal(first, a.reshape(-1)[:1])
            blocks = (a.numel(), 2 - which, 1)
            assert driver.launches.pop() == (0x77, *blocks, 256, 1, 1, 0, 0x55) and not driver.launches


def test_a_thread_without_a_context_gets_one_and_other_failures_raise(run, driver):
    a = torch.randn(4)
    driver.statuses = [launches._INVALID_CONTEXT]
    torch.testing.assert_close(run(a, 1, 0.0)[0], a)
    assert driver.contexts == [-1]  # the index of a CPU
    for statuses in ([launches._INVALID_CONTEXT] * 2, [700]):
        driver.statuses = statuses
        with pytest.raises(pytest.fail.Exception, match=f"status {statuses[-1]}"):
            run(a, 1, 0.0)


def test_what_a_bare_kernel_does_not_take(run, driver):
    with pytest.raises(OverflowError, match="into which 2147483648 does not fit"):
        run(torch.randn(4), 2**31, 0.0)
    with pytest.raises(TypeError, match="takes tensors, ints and floats, not str"):
        run(torch.randn(4), "1", 0.0)
    with pytest.raises(ValueError, match="on different devices"):
        run(torch.randn(4), 1, 0.0, torch.randn(4, device="meta"))
    with pytest.raises(OpError, match="its grid must be a positive int"):
        run(torch.randn(4), 1, 0.0, which=2)
    huge = torch.zeros(()).expand(2**31)
    for kernel in (run, lambda a, *given: run.kernel.function(a, *given, None)):
        with pytest.raises(OverflowError, match="size of its first result as int, into which 2147483648 does not fit"):
            kernel(huge, 1, 0.0)
    assert not driver.launches
