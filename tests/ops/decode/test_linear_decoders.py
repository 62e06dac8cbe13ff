"""decode_linear as Llama, Qwen, Phi and Gemma need it: RMS norms, gated SiLU, and weights of unequal widths."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Gemma2Config, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from fuseopt.ops import decode_linear
from fuseopt.ops.decode.linear import decode_linear_reference
from tests.ops.cases import RawCalls, error, to_float64
from tests.ops.decode.test_cpu_kernels import weight_of
from tests.ops.decode.test_linear import HALVES, randomised

NORMS = ("rms_norm", "gemma_rms_norm")


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_feed_forward(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40}
    if family == "llama":
        mlp, norm = LlamaMLP(LlamaConfig(**sizes, num_attention_heads=2)), LlamaRMSNorm(24, eps=1e-6)
    else:
        mlp, norm = Gemma2MLP(Gemma2Config(**sizes)), Gemma2RMSNorm(24, eps=1e-6)
    mlp, norm, x = randomised(mlp).to(dtype), randomised(norm).to(dtype), torch.randn(3, 24, dtype=dtype)
    hidden = decode_linear(
        x,
        [mlp.gate_proj.weight, mlp.up_proj.weight],
        norm="rms_norm" if family == "llama" else "gemma_rms_norm",
        norm_weight=norm.weight,
        eps=1e-6,
        activation="silu" if family == "llama" else "gelu_tanh",
        gated=True,
    )
    output = decode_linear(hidden, mlp.down_proj.weight, residual=x)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(output, x + mlp(norm(x)), rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("module", [LlamaRMSNorm, Gemma2RMSNorm])
def test_norms_keep_their_cast_order(module: type[nn.Module], dtype: torch.dtype) -> None:
    """An identity for a weight lets the norm's own result through, to the bit."""
    torch.manual_seed(0)
    norm, x = randomised(module(64, eps=1e-6)).to(dtype), torch.randn(5, 64, dtype=dtype)
    name = "rms_norm" if module is LlamaRMSNorm else "gemma_rms_norm"
    output = decode_linear(x, torch.eye(64, dtype=dtype), norm=name, norm_weight=norm.weight, eps=1e-6)
    assert torch.equal(output, norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
@pytest.mark.parametrize("widths", [(277, 65, 64), (1, 300), (40, 0, 33)], ids=str)
def test_weights_of_unequal_widths_on_a_cpu(
    widths: tuple[int, ...], layout: str, norm: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights = [weight_of(layout, n, 331, dtype) for n in widths]
    biases, residual = [torch.randn(n, dtype=dtype) for n in widths], torch.randn(2, sum(widths), dtype=dtype)
    parameters = {"norm": norm, "norm_weight": torch.rand(331).to(dtype), "residual": residual}
    x = torch.randn(2, 331).to(dtype)
    with RawCalls() as raw:
        output = decode_linear(x, weights, biases, activation="silu", **parameters, backend="cpu")
    assert raw.names().count("decode_linear.default") == 1
    x, weights, biases, parameters = tree_map_only(Tensor, to_float64, (x, weights, biases, parameters))
    added = parameters.pop("residual")
    parts = [
        decode_linear_reference(x, weight, bias, activation="silu", **parameters)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    expected = torch.cat(parts, -1) + added
    torch.testing.assert_close(
        decode_linear_reference(x, weights, biases, activation="silu", residual=added, **parameters), expected
    )
    assert error([output], [expected]) <= 8 * torch.finfo(dtype if dtype.itemsize == 2 else torch.float32).eps
