"""FusedLMHead: logits of odd vocabularies in aligned products, and when they are left to F.linear."""

import copy
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import fuseopt
from fuseopt.modules import FusedLinearCrossEntropy, FusedLMHead, lm_head
from fuseopt.tuning import tuned
from tests import tiny

CONFIG = {"kernel_fusion": {"custom_cuda_kernels": ["FusedLMHead"], "jit": False}}
on_a_gpu = pytest.mark.parametrize("each_device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


def assert_product(rows, columns, width, dtype):
    generator = torch.Generator(torch.get_default_device()).manual_seed(rows * columns)
    input, weight = (torch.randn(size, width, generator=generator, dtype=dtype) for size in (rows, columns))
    output = lm_head.aligned_product(input, weight)
    exact = input.double() @ weight.double().T
    size = input.double().abs() @ weight.double().abs().T
    assert output.is_contiguous() and output.dtype is dtype
    allowed = torch.finfo(dtype).eps * exact.abs() + 1e-6 * size
    assert ((output - exact).abs() <= allowed).all()


@given(rows=st.integers(0, 40), columns=st.integers(16, 90), width=st.integers(1, 5))
def test_any_number_of_rows_and_columns(rows, columns, width):
    assert_product(rows, columns, 8 * width, torch.float32)


@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 1023, 2048])
@pytest.mark.parametrize("columns", [101, 1006, 1007, 1008])
def test_products_in_half_precision_for_rows_and_columns_of_any_number(rows, columns, dtype):
    assert_product(rows, columns, 64, dtype)


@on_a_gpu
@pytest.mark.usefixtures("each_device")
@pytest.mark.parametrize("kernel", [FusedLMHead, FusedLinearCrossEntropy])
def test_many_rows_without_gradients_in_half_precision_take_it(kernel):
    stock = torch.nn.Linear(64, 1007, bias=False, dtype=torch.bfloat16)
    head = kernel.from_module(stock).eval()
    input = torch.randn(4, tuned("lm_head_min_rows", stock.weight.device), 64, dtype=torch.bfloat16)

    def products(input, head=head):
        with mock.patch.object(lm_head, "aligned_product", wraps=lm_head.aligned_product) as product:
            output = head(input)
        assert output.dtype is F.linear(input, head.weight).dtype and output.shape == (*input.shape[:-1], 1007)
        return product.call_count, output

    with torch.no_grad():
        count, logits = products(input)
        assert count == 1
        torch.testing.assert_close(logits, stock(input), rtol=2e-2, atol=2e-2)
        assert products(input[:1, :9])[0] == 0
        with torch.autocast("cuda", torch.float16):
            assert head(input).dtype is torch.float16
    assert products(input)[0] == 0
    assert torch.compile(head, backend="aot_eager", fullgraph=True)(input).shape == logits.shape


@on_a_gpu
@pytest.mark.usefixtures("each_device")
def test_a_model_s_logits():
    stock = tiny.gpt2().to(torch.bfloat16)
    fused = fuseopt.initialize(copy.deepcopy(stock), CONFIG, strict=True)
    assert isinstance(fused.lm_head, FusedLMHead) and fused.lm_head.weight is fused.transformer.wte.weight
    inputs = tiny.inputs(stock, batch=200)
    with torch.no_grad(), mock.patch.object(lm_head, "aligned_product", wraps=lm_head.aligned_product) as product:
        logits = fused(**inputs).logits
    assert product.call_count == 1
    with torch.no_grad():
        torch.testing.assert_close(logits, stock(**inputs).logits, rtol=2e-2, atol=2e-2)
    assert fuseopt.restore(fused).lm_head.__class__ is torch.nn.Linear


def test_heads_that_stay_say_why():
    model = tiny.gpt2()
    with pytest.warns(UserWarning, match="the model is on a CPU"):
        fuseopt.initialize(model, CONFIG)
    reasons = FusedLMHead.not_supported_reasons
    assert "multiple of 8" in reasons(torch.nn.Linear(8, 64, bias=False))[0]
    assert reasons(torch.nn.Linear(8, 61)) == ["it has a bias"]
    assert not reasons(torch.nn.Linear(8, 61, bias=False))
