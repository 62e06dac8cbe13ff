"""`fuseopt.check` passes an op that keeps its contract, and names what is wrong with one that does not."""

import functools
import re
import textwrap

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.cli import main
from fuseopt.errors import OpError
from fuseopt.extend import backends
from tests.extend.failures import failures


@pytest.fixture
def op() -> fuseopt.Op:
    """An op with a right kernel and a right gradient."""

    @fuseopt.op("mine::mul_add_relu")
    def mul_add_relu(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return torch.relu(a * b + c)

    @mul_add_relu.samples
    def _(device, dtype):
        yield tuple(torch.randn(4, 24, device=device, dtype=dtype) for _ in range(3))

    @mul_add_relu.kernel("cpu")
    def _(a, b, c):
        return torch.addcmul(c, a, b).clamp_min(0)

    @mul_add_relu.backward
    def _(inputs, output, grad_output):
        a, b, _ = inputs
        grad = torch.where(output > 0, grad_output, 0)
        return grad * b, grad * a, grad

    return mul_add_relu


def test_a_right_op_is_ok_and_the_table_says_what_was_tried(op):
    report = fuseopt.check(op, device="cpu")
    assert report.ok, str(report)
    tried = {row.check for row in report.rows if row.backend == "cpu" and row.status == "ok"}
    assert tried >= {
        *(f"{kind}, {dtype}" for kind in ("as sampled", "odd shapes", "non-contiguous") for dtype in ("fp32", "bf16")),
        *(f"{kind}, {dtype}" for kind in ("broadcast", "empty", "0-d", "gradient") for dtype in ("fp32", "fp16")),
        *("gradcheck", "second derivative", "fake", "writes no input", "same bits again", "opcheck"),
        *("torch.compile, fullgraph", "autocast", "vmap"),
    }
    assert str(report).startswith("mine::mul_add_relu on cpu: ok\n")


def test_a_wrong_backward_fails(op):
    @op.backward
    def _(inputs, output, grad_output):
        a, b, _ = inputs
        return grad_output * b, grad_output * a, grad_output  # without the ReLU

    found = failures(op)
    assert {"gradient, fp32", "gradient, bf16", "gradcheck"} <= found.keys()
    assert "the gradient of a (" in found["gradient, fp32"] and "Jacobian mismatch" in found["gradcheck"]


def test_a_kernel_wrong_in_the_last_column_fails(op):
    @op.kernel("cpu")
    def _(a, b, c):
        output = op.function(a, b, c)
        output[..., output.shape[-1] // 8 * 8 :] = 0
        return output

    found = failures(op, dtypes=(torch.float32,))
    assert "as sampled, fp32" not in found and "off by" in found["odd shapes, fp32"]


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_a_fake_of_another_dtype_or_shape_fails(op, what):
    @op.fake
    def _(a, b, c):
        return torch.empty_like(a, dtype=torch.float64) if what == "dtype" else a.new_empty(a.shape[:1])

    expected = "is float64 (4, 24)" if what == "dtype" else "is float32 (4,)"
    assert expected in failures(op)["fake"]


def test_a_kernel_that_writes_an_input_fails(op):
    @op.kernel("cpu")
    def _(a, b, c):
        output = op.function(a, b, c)
        c.detach().zero_()
        return output

    assert "the call writes into tensor 2" in failures(op)["writes no input"]


def test_a_backward_that_writes_its_gradient_fails(op):
    @op.backward
    def _(inputs, output, grad_output):
        a, b, _ = inputs
        grad_output.mul_(output > 0)
        return grad_output * b, grad_output * a, grad_output.clone()

    assert "the backward writes into tensor" in failures(op)["writes no input"]


def test_a_kernel_that_assumes_contiguous_inputs_fails_unless_supports_says_so(op):
    def flat(a, b, c):
        def memory(t):
            return torch.as_strided(t, (t.numel(),), (1,))

        output = torch.empty(a.shape, dtype=a.dtype)
        output.view(-1).copy_(op.function(memory(a), memory(b), memory(c)))
        return output

    op.kernel("cpu")(flat)
    found = failures(op, dtypes=(torch.float32,))
    assert "non-contiguous, fp32" in found and "as sampled, fp32" not in found
    op.supports(
        lambda *given: all(t.is_contiguous() and t.shape == given[0].shape for t in given) or "contiguous alone"
    )
    report = fuseopt.check(op, device="cpu")
    assert report.ok, str(report)
    assert ("non-contiguous, fp32", "-", "not taken: contiguous alone") in {
        (row.check, row.status, row.detail) for row in report.rows
    }


def test_what_a_kernel_raises_is_a_finding(op):
    @op.kernel("cpu")
    def _(a, b, c):
        raise RuntimeError("no luck")

    assert failures(op)["as sampled, fp32"].startswith("RuntimeError: no luck (test_check.py:")


def test_without_samples_it_says_how_to_give_them():
    @fuseopt.op("mine::bare")
    def bare(a: Tensor) -> Tensor:
        return a + 1

    with pytest.raises(OpError, match=r"@bare.samples"):
        fuseopt.check(bare)
    with pytest.raises(OpError, match="takes an op made by"):
        fuseopt.check(torch.relu)


def test_the_command_checks_all_ops_of_a_file(tmp_path, capsys):
    source = """
        import torch, fuseopt
        from torch import Tensor

        @fuseopt.op("file::double")
        def double(a: Tensor) -> Tensor:
            return torch.mul(a, 2)

        @double.samples
        def _(device, dtype):
            yield torch.randn(3, 8, device=device, dtype=dtype)
    """
    file = tmp_path / "ops.py"
    file.write_text(textwrap.dedent(source))
    assert main(["check", str(file), "--device", "cpu"]) == 0
    assert "file::double on cpu: ok" in capsys.readouterr().out
    fuseopt.unregister("file::double")
    file.write_text(textwrap.dedent(source) + "\n@double.kernel('cpu')\ndef _(a): return 3 * a\n")
    assert main(["check", str(file), "--device", "cpu"]) == 1
    assert "FAIL" in capsys.readouterr().out
    file.write_text("x = 1\n")
    assert main(["check", str(file)]) == 2
    assert "registers no op" in capsys.readouterr().err


def test_a_result_that_depends_on_some_arguments_only():
    @fuseopt.op("mine::scaled_product")
    def scaled_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * 2, a * b

    @scaled_product.samples
    def _(device, dtype):
        yield torch.randn(4, 24, device=device, dtype=dtype), torch.randn(4, 24, device=device, dtype=dtype)

    scaled_product.kernel("cpu")(lambda a, b: (a * 2, a * b))
    report = fuseopt.check(scaled_product, device="cpu")
    assert report.ok, str(report)
    assert any(row.backend == "cpu" and row.check.startswith("gradient") and row.status == "ok" for row in report.rows)


@pytest.mark.slow
def test_the_compile_backend_is_traced_without_inductor_which_takes_seconds(op, monkeypatch):
    used, real = [], torch.compile

    def noting(function, *, backend, **options):
        used.extend(backend.args if isinstance(backend, functools.partial) else [backend])
        return real(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", noting)
    # As on a GPU, where "auto" takes this backend too.
    monkeypatch.setattr(backends.Kernel, "not_supported_reasons", lambda *_, **__: [])
    report = fuseopt.check(op, device="cpu", dtypes=(torch.float32,))
    assert report.ok, str(report)
    tried = {row.check for row in report.rows if row.backend == "compile" and row.status == "ok"}
    assert {"as sampled, fp32", "empty, fp32", "gradient, fp32"} <= tried
    assert len(used) > 8 and set(used) == {"aot_eager"}


def test_a_report_is_true_if_it_is_ok(op):
    assert bool(fuseopt.check(op, device="cpu", dtypes=[torch.float32])) is True
    op.kernel("cpu")(lambda a, b, c: torch.relu(a * b + c) + 1)
    report = fuseopt.check(op, device="cpu", dtypes=[torch.float32])
    assert report.failures and bool(report) is False


def test_an_op_without_samples_is_a_row_beside_the_others(tmp_path, capsys):
    file = tmp_path / "ops.py"
    source = """
        import fuseopt
        from torch import Tensor

        @fuseopt.op("file::bare")
        def bare(a: Tensor, b: list[Tensor], scale: float = 1.0) -> Tensor:
            return a * b[0] * scale

        @fuseopt.op("file::raising")
        def raising(a: Tensor) -> Tensor:
            return a + 1

        @raising.samples
        def _(device, dtype):
            raise KeyError("data")

        # The expression of test_elementwise_cpu.py: its C++ is compiled once for both.
        plus = fuseopt.elementwise("file::plus", "silu(a * w + b) + scale * b", scalars=("scale",))
    """
    file.write_text(textwrap.dedent(source))
    try:
        assert main(["check", str(file), "--device", "cpu"]) == 1
        printed = capsys.readouterr().out
    finally:
        for name in ("bare", "raising", "plus"):
            fuseopt.unregister(f"file::{name}")
    drawn = "torch.randn(8, 768, device=device, dtype=dtype)"
    assert f"yield ({drawn}, [{drawn}], 0.5)" in printed
    assert "samples  FAIL  KeyError: 'data'" in printed and "file::plus on cpu: ok" in printed


@pytest.mark.parametrize(("expression", "low"), [("a * k + b", -2), ("log(a) + k * b", 0.5), ("sqrt(1 - a) + b", 0.1)])
def test_samples_of_an_expression_are_in_its_domain(expression, low):
    scalars = ("k",) if "k" in expression else ()
    op = fuseopt.elementwise("mine::sampled", expression, scalars)
    try:
        samples = list(op.sample_arguments(torch.device("cpu"), torch.float32))
        assert [sample[1].shape for sample in samples] == [(8, 768), (768,)]
        for sample in samples:
            assert low <= sample[0].min() < low + 0.2 and op.function(*sample).isfinite().all()
    finally:
        fuseopt.unregister("mine::sampled")


def test_a_result_of_another_shape_is_named_with_both(op):
    op.kernel("cpu")(lambda a, b, c: torch.relu(a * b + c)[:1])
    wrong = "its cpu kernel gave float32 (1, 24), the function gives float32 (4, 24)"
    found = failures(op, dtypes=[torch.float32])
    assert found["as sampled, fp32"].endswith(wrong)
    assert "(4, 24) with strides (48, 2)" in found["non-contiguous, fp32"]
    drawn = [torch.randn(4, 24, requires_grad=True) for _ in range(3)]
    with pytest.raises(OpError) as raised:
        op(*drawn).sum().backward()
    assert wrong in str(raised.value)


def test_gradcheck_of_a_kernel_in_float32_says_so(op):
    op.kernel("cpu")(lambda a, b, c: torch.relu(a.float() * b.float() + c.float()).to(a.dtype))
    found = failures(op, dtypes=[torch.float32])["gradcheck"]
    assert found.startswith("Jacobian mismatch") and ",;" not in found and "refuse it in `supports`" in found


def test_what_raises_is_shown_with_its_line_its_arguments_and_the_fix(op):
    @op.kernel("cpu", supports=lambda a, b, c: a.shape == b.shape == c.shape or "takes one shape")
    def _(a, b, c):
        return torch.relu(a * b + c) * (a.shape[-1] > 0)

    found = failures(op, dtypes=[torch.float32])
    assert found.keys() == {"0-d, fp32", "gradient, fp32", "fake"}
    for detail in found.values():
        assert re.fullmatch(
            r"IndexError: tuple index out of range \(test_check\.py:\d+\), "
            r"called with \(\), \(\), \(\); if the kernel is not for these, refuse them in `supports`",
            detail,
        )


def test_numbers_and_lists_are_among_the_arguments_shown():
    @fuseopt.op("mine::scaled_sum")
    def scaled_sum(xs: list[Tensor], k: Tensor, scale: float) -> Tensor:
        return scale * k.to(xs[0].dtype) * (xs[0] + xs[1])

    scaled_sum.kernel("cpu")(lambda xs, k, scale: 0.5 * k.to(xs[0].dtype) * (xs[0] + xs[1]))
    scaled_sum.backward(lambda inputs, output, grad: (0.5 * grad, grad, None))

    @scaled_sum.samples
    def _(device, dtype):
        x = torch.randn(2, 3, device=device, dtype=dtype)
        yield [x, x], torch.ones((), dtype=torch.int64, device=device), 0.5

    found = failures(scaled_sum, dtypes=[torch.float32])
    # 0.5 is another number there, too.
    assert re.match(r"the result of \[\(2, 3\), \(2, 3\)\], \(\), 0\.54\d* is off", found["other numbers, fp32"])
    assert found["gradient, fp32"].startswith("the gradient of xs[1] (as sampled) is off by")


def test_a_function_that_writes_into_its_arguments_is_named_first(op):
    @fuseopt.op("mine::in_place")
    def in_place(a: Tensor, b: Tensor) -> Tensor:
        return b.mul_(a)

    @in_place.samples
    def _(device, dtype):
        yield torch.randn(4, 3, device=device, dtype=dtype), torch.randn(4, 3, device=device, dtype=dtype)

    row = fuseopt.check(in_place, device="cpu", dtypes=[torch.float32]).rows[0]
    assert (row.status, row.detail[:36]) == ("FAIL", "the function writes into tensor 1 of")
