"""decode_linear as Llama, Qwen, Phi and Gemma need it: RMS norms, gated SiLU, and weights of unequal widths."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import Gemma2Config, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from fuseopt.ops import decode_linear
from fuseopt.ops.decode.linear import decode_linear_reference
from tests.ops.cases import RawCalls, error, needs_sm90, to_float64
from tests.ops.decode.test_cpu_kernels import weight_of
from tests.ops.decode.test_linear import HALVES, assert_kernel_is_accurate, kernels_of, randomised

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


LAYERS = [
    pytest.param(2048, (2048, 512, 512), {"norm": "rms_norm"}, id="Llama-3.2-1B qkv"),
    pytest.param(2048, (8192, 8192), {"norm": "rms_norm", "activation": "silu", "gated": True}, id="Llama-3.2-1B up"),
    pytest.param(8192, (2048,), {"residual": True}, id="Llama-3.2-1B down"),
    pytest.param(14336, (4096,), {"residual": True}, id="Llama-3.1-8B down"),
    pytest.param(1024, (2048, 1024, 1024), {"norm": "rms_norm"}, id="Qwen3-0.6B qkv"),
    pytest.param(896, (896, 128, 128), {"norm": "rms_norm", "biased": True}, id="Qwen2.5-0.5B qkv"),
    pytest.param(5120, (1280,), {"norm": "rms_norm"}, id="long and normalised"),
    pytest.param(2304, (2048, 1024, 1024), {"norm": "gemma_rms_norm"}, id="Gemma-2-2B qkv"),
    pytest.param(
        640, (2048, 2048), {"norm": "gemma_rms_norm", "activation": "gelu_tanh", "gated": True}, id="Gemma-3 up"
    ),
    pytest.param(2048, (4096, 4096), {"activation": "silu", "gated": True}, id="gated without a norm"),
    pytest.param(256, (96, 96), {"activation": "relu", "gated": True}, id="small and gated without a norm"),
    pytest.param(1032, (137, 71, 8), {"norm": "gemma_rms_norm", "biased": True, "residual": True}, id="odd widths"),
    pytest.param(4104, (4097, 33, 5), {"norm": "layer_norm", "biased": True}, id="odd widths, large"),
    pytest.param(1001, (40, 24, 24), {"norm": "gemma_rms_norm"}, id="odd K"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 11, 16, 40])
@pytest.mark.parametrize(("columns", "widths", "options"), LAYERS)
@torch.no_grad()
def test_layers_of_decoders(
    columns: int, widths: tuple[int, ...], options: dict, rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype)

    options = dict(options)
    biases = [make(n) for n in widths] if options.pop("biased", False) else None
    if options.pop("residual", False):
        options["residual"] = make(rows, sum(widths))
    if "norm" in options:
        options["norm_weight"] = make(columns) * 0.3 + (options["norm"] != "gemma_rms_norm")
    # Rows of a weight that do not follow one another, at 16-byte addresses if K is a multiple of 8.
    weights = [(make(n, columns + 8) / columns**0.5)[:, :columns] for n in widths]
    assert_kernel_is_accurate(make(rows, columns), weights, biases, **options)


@pytest.mark.gpu
@needs_sm90
@pytest.mark.parametrize(
    ("rows", "columns", "widths", "options", "kernel"),
    [
        (1, 2048, (3072, 1024, 1024), {"norm": "rms_norm"}, "streamed_nk_kernel<[^>]*, true, 1, 3, false, false>"),
        (1, 8192, (2048,), {}, "streamed_nk_kernel<[^>]*, false, 1, 3, false, false>"),
        (
            1,
            2048,
            (8192, 8192),
            {"activation": "silu", "gated": True},
            "streamed_nk_kernel<[^>]*, false, 1, 3, false, false>",
        ),
        (16, 4096, (4096, 1024, 1024), {"norm": "rms_norm"}, "streamed_nk_kernel<[^>]*, true, 2, 2, false, false>"),
        (1, 1024, (2048, 1024, 1024), {"norm": "gemma_rms_norm"}, "skinny_mma_kernel"),
        (1, 1001, (40, 24, 24), {}, "plain_kernel"),
    ],
)
@torch.no_grad()
def test_kernels_that_layers_of_decoders_take(
    rows: int, columns: int, widths: tuple[int, ...], options: dict, kernel: str
) -> None:
    x, *weights = (torch.randn(n, columns, device="cuda", dtype=torch.bfloat16) for n in (rows, *widths))
    assert re.search(kernel, kernels_of(lambda: decode_linear(x, weights, **options)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16])
@torch.no_grad()
def test_what_is_not_finite_stays_in_its_row_and_column(rows: int) -> None:
    x = torch.ones(rows, 2048, device="cuda", dtype=torch.bfloat16)
    weights = [torch.ones(n, 2048, device="cuda", dtype=torch.bfloat16) for n in (2048, 520, 520)]
    weights[1][7, 2047], weights[2][519, 0], x[-1, 100] = torch.nan, torch.inf, torch.nan
    expected = torch.full((rows, 3088), 2048.0, device="cuda", dtype=torch.bfloat16)
    expected[:, 2048 + 7], expected[:, -1], expected[-1] = torch.nan, torch.inf, torch.nan
    torch.testing.assert_close(decode_linear(x, weights, backend="cuda"), expected, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16])
@torch.no_grad()
def test_a_chain_of_layers_in_a_graph_waits_for_each_predecessor(rows: int) -> None:
    """Launches that overlap and prefetch give what they give one at a time, replay after replay."""
    torch.manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    qkv = [make(2048, 2048), make(512, 2048), make(512, 2048)]
    out, gated, down = make(2048, 2048), [make(8192, 2048), make(8192, 2048)], make(2048, 8192)
    norm = {"norm": "rms_norm", "norm_weight": torch.rand(2048, device="cuda", dtype=torch.bfloat16) + 0.5}
    x = torch.empty(rows, 2048, device="cuda", dtype=torch.bfloat16)

    def chain(pdl: bool) -> Tensor:
        y = x
        for _ in range(20):
            heads = decode_linear(y, qkv, **norm, pdl=pdl, prefetch=[out])
            y = decode_linear(heads[:, :2048].contiguous(), out, residual=y, pdl=pdl)
            hidden = decode_linear(y, gated, **norm, activation="silu", gated=True, pdl=pdl)
            y = decode_linear(hidden, down, residual=y, pdl=pdl, prefetch=qkv[1:])
        return y

    x.normal_()
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = chain(True)
    for seed in range(5):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        assert torch.equal(output, chain(False))
