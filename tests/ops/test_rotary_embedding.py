"""rotary_embedding beyond the contract: transformers' own functions bit for bit, any layout, what is kept."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from fuseopt import ops
from fuseopt.errors import BackendError
from tests.ops.cases import DTYPES, Case, RawCalls, cases
from tests.ops.variations import LAYOUTS

every_case = pytest.mark.parametrize("case", cases("rotary_embedding"))
triton_cases = pytest.mark.parametrize(
    "case", [case for case in cases("rotary_embedding") if case.values[0].backend == "triton"]
)


def interpreted(case: Case) -> bool:
    return case.backend == "triton" and case.device.type == "cpu"


def stock(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    modeling = modeling_llama if cos.shape[-1] == query.shape[-1] else modeling_gpt_neox
    return modeling.apply_rotary_pos_emb(query, key, cos, sin)


def projected(case: Case, batch: int, heads: int, length: int, dim: int, dtype: torch.dtype) -> Tensor:
    """As a projection leaves it, [batch, length, heads, dim] in memory."""
    tensor = torch.randn(batch, length, heads, dim, device=case.device, dtype=dtype)
    return tensor.transpose(1, 2).requires_grad_()


def angles(case: Case, batch: int, length: int, rotary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unlike a model's: the halves differ, and so do the angles of cosine and sine."""
    cos, sin = 3 * torch.randn(2, batch, length, rotary, device=case.device, dtype=torch.float64)
    return cos.cos().to(dtype), sin.sin().to(dtype)


def assert_stock_s_bits(case: Case, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    expected, outputs = stock(query, key, cos, sin), case(query, key, cos, sin)
    grads = [torch.randn_like(output) for output in expected]
    gradients = [torch.autograd.grad(results, (query, key), grads) for results in (outputs, expected)]
    for actual, wanted in zip((*outputs, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
        if interpreted(case) and actual.dtype == torch.bfloat16:  # it truncates, two products and their sum
            torch.testing.assert_close(actual, wanted, rtol=2**-6, atol=2**-6 * wanted.abs().max().item())
        else:
            assert torch.equal(actual, wanted)


@every_case
@pytest.mark.parametrize(("dtype", "angle_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_transformers_function_and_its_gradient_bit_for_bit(
    case: Case, dtype: torch.dtype, angle_dtype: torch.dtype
) -> None:
    if interpreted(case) and (dtype, angle_dtype) == (torch.bfloat16, torch.float64):
        pytest.skip("the interpreter takes the bits of float64 for bfloat16")
    torch.manual_seed(0)
    query, key = (projected(case, 2, heads, 5, 12, dtype) for heads in (4, 2))
    for rotary, batch in ((12, 2), (6, 1)):
        assert_stock_s_bits(case, query, key, *angles(case, batch, 5, rotary, angle_dtype))


@every_case
def test_queries_and_keys_of_two_dtypes(case: Case) -> None:
    torch.manual_seed(0)
    query, key = projected(case, 2, 3, 4, 8, torch.float16), projected(case, 2, 1, 4, 8, torch.float32)
    assert_stock_s_bits(case, query, key, *angles(case, 1, 4, 8, torch.float16))


@every_case
@settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 5),
    key_heads=st.integers(1, 3),
    length=st.integers(1, 40),
    half=st.integers(1, 33),
    rest=st.sampled_from([0, 0, 1, 40]),
    shared=st.booleans(),
    dtypes=st.tuples(st.sampled_from([torch.float32, torch.float16]), st.sampled_from([torch.float32, torch.float16])),
    layouts=st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3),
    seed=st.integers(0, 2**20),
)
def test_any_sizes_and_layouts(
    case: Case,
    batch: int,
    heads: int,
    key_heads: int,
    length: int,
    half: int,
    rest: int,
    shared: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    layouts: list,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    query, key = (projected(case, batch, n, length, 2 * half + rest, dtypes[0]).detach() for n in (heads, key_heads))
    cos, sin = angles(case, 1 if shared else batch, length, 2 * half, dtypes[1])
    query, key, cos = (layout(tensor) for layout, tensor in zip(layouts, (query, key, cos), strict=True))
    assert_stock_s_bits(case, query.requires_grad_(), key.requires_grad_(), cos, sin)


@every_case
def test_gradients_of_any_layout_and_of_one_result_alone(case: Case) -> None:
    torch.manual_seed(0)
    query, key = (projected(case, 2, heads, 6, 8, torch.float32) for heads in (3, 2))
    cos, sin = angles(case, 2, 6, 8, torch.float32)
    for layout in (*LAYOUTS, lambda grad: grad[:1, :1, :1, :1].expand_as(grad)):
        grads = [layout(torch.randn(tensor.shape, device=case.device)) for tensor in (query, key)]
        actual, wanted = (
            torch.autograd.grad(function(query, key, cos, sin), (query, key), grads) for function in (case, stock)
        )
        assert all(map(torch.equal, actual, wanted))
    for which, tensor in enumerate((query, key)):
        actual, wanted = (
            torch.autograd.grad(function(query, key, cos, sin)[which].square().sum(), tensor)[0]
            for function in (case, stock)
        )
        assert torch.equal(actual, wanted)


@every_case
def test_cosines_and_sines_may_be_learned(case: Case) -> None:
    torch.manual_seed(0)
    query, key = (projected(case, 3, heads, 4, 6, torch.float64) for heads in (2, 1))
    for batch in (1, 3):
        cos, sin = (tensor.requires_grad_() for tensor in angles(case, batch, 4, 6, torch.float64))
        for learned in ((cos,), (sin,), (cos, sin), (query, cos)):
            leaves = [
                tensor.detach().requires_grad_(any(tensor is one for one in learned))
                for tensor in (query, key, cos, sin)
            ]
            wanted, actual = (
                torch.autograd.grad(
                    sum(output.sin().sum() for output in function(*leaves)), [t for t in leaves if t.requires_grad]
                )
                for function in (stock, case)
            )
            torch.testing.assert_close(actual, wanted)


@triton_cases
def test_both_are_rotated_by_one_op_which_keeps_neither(case: Case) -> None:
    query, key = (projected(case, 2, heads, 5, 8, torch.float32) for heads in (4, 2))
    cos, sin = angles(case, 1, 5, 8, torch.float32)
    saved: list[Tensor] = []
    with (
        RawCalls() as raw,
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
        ),
    ):
        outputs = case(query, key, cos, sin)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    assert raw.names() == ["rotary_embedding_fwd.triton", "rotary_embedding_bwd.triton"]
    assert {tensor.data_ptr() for tensor in saved} == {cos.data_ptr(), sin.data_ptr()}
    assert query.grad is not None and query.grad.transpose(1, 2).is_contiguous()


@triton_cases
@pytest.mark.slow
@pytest.mark.usefixtures("most_of_a_gpu")
def test_more_than_2_to_the_31_elements(case: Case) -> None:
    if interpreted(case):
        pytest.skip("takes minutes to interpret")
    length = 2**31 // 256 + 5
    query, key = (
        torch.randn(1, length, heads, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for heads in (2, 1)
    )
    cos, sin = angles(case, 1, 64, 128, torch.bfloat16)
    cos, sin = (tensor.repeat(1, -(-length // 64), 1)[:, :length] for tensor in (cos, sin))
    outputs = case(query, key, cos, sin)
    expected = stock(query[:, :, -99:], key[:, :, -99:], cos[:, -99:], sin[:, -99:])
    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output[:, :, -99:], wanted)


def test_arguments_that_do_not_fit_are_refused() -> None:
    query, key, cos = torch.zeros(2, 4, 3, 8), torch.zeros(2, 2, 3, 8), torch.zeros(1, 3, 8)

    def refused(error_type: type[Exception], match: str, *args: Tensor, **kwargs: str) -> None:
        with pytest.raises(error_type, match=match):
            ops.rotary_embedding(*args, **kwargs)

    refused(ValueError, "query and key must have shape", query[0], key, cos, cos)
    refused(ValueError, "key must have shape", query, key[:1], cos, cos)
    refused(ValueError, "key must have shape", query, key[:, :, :2], cos, cos)
    refused(ValueError, r"cos must have shape \[2 or 1, 3, rotary\]", query, key, cos[0], cos[0])
    refused(ValueError, r"cos must have shape \[2 or 1, 3, rotary\]", query, key, cos[:, :2], cos[:, :2])
    refused(ValueError, r"cos must have shape \[2 or 1, 3, rotary\]", query, key, *[cos.expand(3, 3, 8)] * 2)
    refused(ValueError, "even number", query, key, cos[..., :7], cos[..., :7])
    refused(ValueError, "even number", query, key, cos[..., :0], cos[..., :0])
    refused(ValueError, "at most 8", query, key, *[torch.zeros(1, 3, 10)] * 2)
    refused(ValueError, "sin must have shape", query, key, cos, cos[..., :4])
    refused(TypeError, "cos and sin must have one dtype", query, key, cos, cos.half())
    refused(BackendError, "no backend 'cuda'", query, key, cos, cos, backend="cuda")
