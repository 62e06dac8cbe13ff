"""Launches by csrc/python on a CPU: a C function in the place of cuLaunchKernel, kernels of Triton compiled only."""

import ctypes
import functools
import gc
import struct
import types
import weakref

import pytest
import torch
import triton

import fuseopt
from fuseopt.build import loader
from fuseopt.errors import BackendError
from fuseopt.extend import launches, triton_expression
from fuseopt.extend.launches import PreparedLaunch, launches_by
from fuseopt.ops import registry
from fuseopt.ops.library import TRITON_INTERPRETED
from fuseopt.ops.triton.compile_only import compile_only
from fuseopt.ops.triton.launch import Launch, Loaded, parameters_of

POINTER, UINT = ctypes.c_void_p, ctypes.c_uint
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, *[UINT] * 7, POINTER, ctypes.POINTER(POINTER), POINTER)
compiled = pytest.mark.skipif(TRITON_INTERPRETED, reason="of processes in which Triton compiles")


class Driver:
    """Launches of kernels that are Python functions: the handle is the place in `kernels`, plus 1."""

    def __init__(self):
        self.kernels, self.launches = [], []
        self.cuLaunchKernel = LAUNCH(self.launch)

    def launch(self, function, *rest):
        *sizes, stream, given, _ = rest
        self.launches.append((*sizes, stream))
        self.kernels[function - 1](given)
        return 0


@pytest.fixture(autouse=True)
def driver(monkeypatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(launches.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(launches, "_driver", launches._driver.__wrapped__)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x55, raising=False)
    assert loader.load("python") and loader.python_library() is not None
    return driver


def read(given, place, kind):
    """A parameter of a launch."""
    return ctypes.cast(given[place], ctypes.POINTER(kind))[0]


def floats_at(address: int, count: int):
    return (ctypes.c_float * count).from_address(address)


class Scaled:
    """Launches of `scale * x + shift`, flattened, with the parameters (result, x, scale, shift, size)."""

    def __init__(self, driver, as_floats=True, **options):
        self.met, self.as_floats = [], as_floats
        driver.kernels.append(self.compute)
        self.run = launches_by(loader.python_library(), self.prepare, as_floats=as_floats, **options)

    def prepare(self, x, scale, shift):
        self.met.append((tuple(x.shape), scale, shift))
        if x.dtype != torch.float32:
            return None
        size = struct.pack("q", x.numel())
        return PreparedLaunch(1, (2, 3, 4), (32, 1, 1), 48, [((x.numel(),), x.dtype)], [3, 0, 1, 2, size], [0])

    def compute(self, given):
        number = ctypes.c_float if self.as_floats else ctypes.c_double
        size = read(given, 4, ctypes.c_int64)
        result, x = (floats_at(read(given, place, POINTER), size) for place in (0, 1))
        for i in range(size):
            result[i] = x[i] * read(given, 2, number) + read(given, 3, number)


def test_a_launch_serves_all_numbers_that_are_passed_as_float(driver):
    scaled = Scaled(driver)
    x = torch.randn(3, 5)
    for scale, shift in ((2.0, 1), (3, -0.25), (True, 0.1)):
        found = scaled.run(x, scale, shift)
        torch.testing.assert_close(found, (x.double() * scale + shift).float().flatten())
    assert len(scaled.met) == 1 and driver.launches == [(2, 3, 4, 32, 1, 1, 48, 0x55)] * 3


def test_a_launch_is_for_one_kind_of_call(driver):
    scaled = Scaled(driver)
    memory = torch.randn(40)
    kinds = [memory[:12].view(3, 4), memory[:12].view(4, 3), memory[1:13].view(3, 4), memory[:12].view(4, 3).t()]
    kinds += [memory[:24].view(3, 8)[:, ::2], memory[:12], memory[0], torch.zeros(0, 3)]
    for _ in range(2):
        for x in kinds:
            torch.testing.assert_close(scaled.run(x, 2.0, 1.0), (x * 2 + 1).flatten())
    assert len(scaled.met) == len(kinds) and len(driver.launches) == 2 * (len(kinds) - 1)  # none for the empty one


def test_prepared_launches_are_bounded(driver):
    scaled = Scaled(driver)
    for size in range(1, 1100):
        scaled.run(torch.ones(size), 1.0, 0.0)
    assert len(scaled.met) == 1099
    scaled.run(torch.ones(1099), 1.0, 0.0)
    scaled.run(torch.ones(1), 1.0, 0.0)
    assert [shape for shape, *_ in scaled.met[1099:]] == [(1,)]


def test_numbers_are_of_the_kind_where_they_are_passed_as_they_are(driver):
    scaled = Scaled(driver, as_floats=False)
    for scale in (2.0, 3.0, 2.0):
        torch.testing.assert_close(scaled.run(torch.ones(2), scale, 0.5), torch.full((2,), scale + 0.5))
    assert [scale for _, scale, _ in scaled.met] == [2.0, 3.0]


def test_calls_that_python_has_to_launch_are_not_implemented(driver):
    scaled = Scaled(driver)
    for _ in range(2):
        assert scaled.run(torch.ones(2, dtype=torch.float64), 1.0, 0.0) is NotImplemented
    assert len(scaled.met) == 1  # prepared once for its kind
    for given in ((torch.ones(2), "1", 0.0), (torch.ones(2).to_sparse(), 1.0, 0.0), (1.0, 1.0, 0.0)):
        assert scaled.run(*given) is NotImplemented
    watched = [True]
    observed = Scaled(driver, is_watched=lambda: watched[0])
    assert observed.run(torch.ones(2), 1.0, 0.0) is NotImplemented and not observed.met
    watched[0] = False
    assert observed.run(torch.ones(2), 1.0, 0.0).tolist() == [1, 1]
    assert len(driver.launches) == 1


def test_a_kernel_runs_for_the_results_that_have_elements(driver):
    def fill(given):
        floats_at(read(given, 0, POINTER), 2)[:] = (3.0, 4.0)

    def prepare(x):
        shapes = [((0,), x.dtype), ((len(x),), x.dtype)]
        return PreparedLaunch(1, (1, 1, 1), (1, 1, 1), 0, shapes, [2], [])

    driver.kernels.append(fill)
    run = launches_by(loader.python_library(), prepare)
    empty, filled = run(torch.ones(2))
    assert empty.shape == (0,) and filled.tolist() == [3, 4]
    run(torch.ones(0))
    assert len(driver.launches) == 1


def test_wrong_launches_are_errors(driver):
    good = PreparedLaunch(1, (1, 1, 1), (1, 1, 1), 0, [((1,), torch.float32)], [], [])
    for launch in (
        "no",
        good._replace(results=[]),
        good._replace(results=[(1, torch.float32)]),
        good._replace(parameters=[2]),
        good._replace(parameters=[bytes(9)]),
        good._replace(contiguous=[1]),
        good._replace(grid=(1, 1)),
    ):
        run = launches_by(loader.python_library(), functools.partial(lambda launch, x: launch, launch))
        with pytest.raises((TypeError, ValueError)):
            run(torch.ones(1))
    assert not driver.launches


def test_what_launches_refer_to_is_freed(driver):
    class Owner:
        def prepare(self, x):
            return PreparedLaunch(1, (1, 1, 1), (1, 1, 1), 0, [((1,), x.dtype)], [], [], keeps=self)

    owner = Owner()
    driver.kernels.append(lambda given: None)
    owner.run = launches_by(loader.python_library(), owner.prepare)
    owner.run(torch.ones(1))
    freed = weakref.ref(owner)
    del owner
    gc.collect()
    assert freed() is None


@pytest.fixture
def on_cpu(monkeypatch, driver):
    """A dict of functions by name that compute kernels of expressions. The kernels are compiled for sm_90."""
    functions = {}

    def loaded(self, tensors, floats):
        with compile_only(90, 108) as kernels:
            values = [*tensors.values(), *self._numbers, *floats.values()]
            self._function.warmup(*values, grid=self.grid, **self._constants)
        (kernel,) = kernels
        driver.kernels.append(functions[kernel.metadata.name])
        parameters = parameters_of(kernel, [*tensors], self._numbers, [*floats])
        return Loaded(len(driver.kernels), 32 * kernel.metadata.num_warps, kernel.metadata.shared, parameters, kernel)

    monkeypatch.setattr(Launch, "loaded", loaded)
    monkeypatch.setattr(registry.TRITON.__class__, "not_supported_reasons", lambda *given, **named: [])
    monkeypatch.setattr(triton_expression, "_column_sums", triton_expression._column_sums.__wrapped__)
    triton_expression.kernels_of.cache_clear()
    return functions


SIZE = 33


def in_row(given, *places):
    """The tensors of SIZE elements at these parameters."""
    return [floats_at(read(given, place, POINTER), SIZE) for place in places]


def scaled_sum(given):
    """`scale * a + b`: result, a, b, size, two row strides, scale."""
    result, a, b = in_row(given, 0, 1, 2)
    assert read(given, 3, ctypes.c_int) == SIZE
    for i in range(SIZE):
        result[i] = read(given, 6, ctypes.c_float) * a[i] + b[i]


def scaled_sum_gradient(given):
    """Of `scaled_sum`: the gradient that comes in, a, b, their gradients, size, two row strides, scale."""
    grad, of_a, of_b = in_row(given, 0, 3, 4)
    for i in range(SIZE):
        of_a[i], of_b[i] = read(given, 8, ctypes.c_float) * grad[i], grad[i]


@compiled
def test_an_expression_is_launched_without_python(on_cpu, driver, asked):
    op = fuseopt.elementwise("mine::launched", "scale * a + b", scalars=("scale",))
    on_cpu["forward_kernel"] = scaled_sum
    a, b = torch.randn(SIZE), torch.randn(SIZE)
    op(a, b, scale=1.0, backend="triton")
    assert asked == ["_takes", "prepare_forward"]
    for scale in (0.5, 2, -3.0):
        torch.testing.assert_close(op(a, b, scale=scale, backend="triton"), scale * a + b)
    assert len(asked) == 2 and len(driver.launches) == 4 and driver.launches[0][3:6] == (128, 1, 1)
    op.supports(lambda a, b, scale: scale != 7.0 or "no 7", "triton")
    assert torch.equal(op(a, b, scale=2.0, backend="triton"), 2 * a + b)
    with pytest.raises(BackendError, match="no 7"):
        op(a, b, scale=7.0, backend="triton")
    assert asked.count("prepare_forward") == 2  # a change of the op drops its launches


@compiled
def test_a_gradient_of_an_expression_is_launched_without_triton(on_cpu, driver, asked):
    op = fuseopt.elementwise("mine::launched", "scale * a + b", scalars=("scale",))
    on_cpu |= {"forward_kernel": scaled_sum, "backward_kernel": scaled_sum_gradient}
    a, b = torch.randn(SIZE, requires_grad=True), torch.randn(SIZE, requires_grad=True)
    for scale in (0.5, -2.0):
        output = op(a, b, scale=scale, backend="triton")
        torch.testing.assert_close(output, scale * a + b)
        for cotangent in (torch.randn(SIZE), torch.randn(1).expand(SIZE)):
            of_a, of_b = torch.autograd.grad(output, (a, b), cotangent, retain_graph=True)
            torch.testing.assert_close(of_a, scale * cotangent)
            assert torch.equal(of_b, cotangent)
    assert len(driver.launches) == 6
    assert asked == [
        "_takes",
        "prepare_forward",
        "prepare_backward",
        "prepare_backward",
    ]  # one for each stride of cotangents


@compiled
@pytest.mark.parametrize("row", [(SIZE,), (1, SIZE), (1,)])
def test_the_gradient_of_a_row_is_summed_by_a_launch(on_cpu, driver, asked, row):
    op = fuseopt.elementwise("mine::launched", "a + b")
    rows, shares = 40, 3  # tiles of 16 rows

    def gradient(given):
        """Of a + b: the gradient that comes in, a, b, their gradients; that of a row is one for each share of rows."""
        grad, of_a, of_b = (floats_at(read(given, place, POINTER), rows * SIZE) for place in (0, 3, 4))
        of_a[:] = grad[:]
        if row == (1,):
            of_b[:] = grad[:]
            return
        for share in range(shares):
            part = grad[share * 16 * SIZE : (share + 1) * 16 * SIZE]
            of_b[share * SIZE : (share + 1) * SIZE] = [sum(part[column::SIZE]) for column in range(SIZE)]

    def column_sum(given):
        summed, (total,) = floats_at(read(given, 0, POINTER), shares * SIZE), in_row(given, 1)
        assert (read(given, 2, ctypes.c_int), read(given, 3, ctypes.c_int)) == (shares, SIZE)
        total[:] = [sum(summed[column::SIZE]) for column in range(SIZE)]

    on_cpu |= {"forward_kernel": lambda given: None, "backward_kernel": gradient, "column_sum_kernel": column_sum}
    a, b = torch.randn(rows, SIZE, requires_grad=True), torch.randn(row, requires_grad=True)
    cotangent = torch.randn(rows, SIZE)
    for _ in range(2):
        of_a, of_b = torch.autograd.grad(op(a, b, backend="triton"), (a, b), cotangent)
        assert torch.equal(of_a, cotangent)
        torch.testing.assert_close(of_b, cotangent.sum_to_size(row))
    assert len(driver.launches) == 2 * (2 if row == (1,) else 3) and "backward" not in asked


@compiled
def test_hooks_on_launches_and_other_versions_of_triton_go_through_triton(on_cpu, driver, asked, monkeypatch):
    op = fuseopt.elementwise("mine::launched", "scale * a + b", scalars=("scale",))
    on_cpu["forward_kernel"] = scaled_sum
    a, b = torch.randn(SIZE), torch.randn(SIZE)
    by_triton = lambda self, tensors, scalars: torch.zeros(3)  # noqa: E731
    monkeypatch.setattr(triton_expression._Forward, "__call__", by_triton)
    assert torch.equal(op(a, b, scale=2.0, backend="triton"), 2 * a + b)
    hook = lambda *given: None  # noqa: E731
    triton.knobs.runtime.launch_exit_hook.add(hook)
    try:
        assert len(op(a, b, scale=2.0, backend="triton")) == 3
    finally:
        triton.knobs.runtime.launch_exit_hook.remove(hook)
    assert torch.equal(op(a, b, scale=2.0, backend="triton"), 2 * a + b)
    monkeypatch.setattr(Launch, "loaded", lambda *given: None)
    for _ in range(2):
        assert len(op(a[1:], b[1:], scale=2.0, backend="triton")) == 3
    assert len(driver.launches) == 2 and asked.count("prepare_forward") == 2


@compiled
@pytest.mark.parametrize("shapes", [((64, 768), (768,)), ((3, 5), (5,)), ((SIZE,), (SIZE,)), ((1, 1), ())])
def test_parameters_are_those_of_the_code(shapes):
    kernels = triton_expression.kernels_of("where(a > b, a * s, b + t)", ("a", "b"), ("s", "t"))
    with compile_only(90, 108) as made:
        output = kernels.forward([torch.empty(shape, device="meta") for shape in shapes], (0.5, 2.0))
    (kernel,) = made
    numbers = [*places_numbers(shapes)]
    parameters = parameters_of(kernel, [4, 0, 1], numbers, [2, 3])
    assert [each for each in parameters if isinstance(each, int)] == [4, 0, 1, 2, 3] and output.dtype == torch.float32
    constants = [each for each in parameters if isinstance(each, bytes)]
    assert constants[-2:] == [bytes(8)] * 2
    assert [struct.unpack("i", each)[0] for each in constants[:-2]] == [number for number in numbers if number != 1]
    for change in (
        {"global_scratch_size": 8},
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"tensordesc_meta": [None]},
    ):
        assert (
            parameters_of(changed(kernel, metadata=kernel.metadata._replace(**change)), [4, 0, 1], numbers, [2, 3])
            is None
        )
    for other in ([4, 0], [4, 0, 1, 1]):
        assert parameters_of(kernel, other, numbers, [2, 3]) is None
    assert parameters_of(kernel, [4, 0, 1], numbers, [2]) is None
    ptx = kernel.asm["ptx"].replace(".param .f32", ".param .f64")
    assert parameters_of(changed(kernel, asm={"ptx": ptx}), [4, 0, 1], numbers, [2, 3]) is None
    assert parameters_of(None, [4, 0, 1], numbers, [2, 3]) is None


def places_numbers(shapes):
    """Rows, columns, tiles of columns, and strides, as an expression's kernel gets them."""
    at = triton_expression.places_of([torch.empty(shape, device="meta") for shape in shapes])
    return at.rows, at.columns, 1, *(stride for pair in at.strides for stride in pair)


def changed(kernel, **attributes):
    return types.SimpleNamespace(**{"metadata": kernel.metadata, "src": kernel.src, "asm": kernel.asm} | attributes)
