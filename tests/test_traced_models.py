"""Fused models under torch.jit.trace, torch.export and torch.fx hold what a graph of the stock model holds."""

import io
import re

import pytest
import torch
from torch import Tensor, nn

import fuseopt
from tests import tiny

OP_BY_OP = {
    "kernel_fusion": {
        "custom_cuda_kernels": [
            {"name": "FusedLayerNorm", "fuse_residual": True},
            {"name": "FusedRMSNorm", "fuse_residual": True},
            {"name": "FusedGELU", "fold_bias": True},
            "FusedSwiGLU",
        ],
        "triton_kernels": ["FusedRotaryEmbedding"],
        "jit": False,
    }
}
pytestmark = pytest.mark.filterwarnings("ignore:.*matches nothing in the model", "ignore::torch.jit.TracerWarning")
CONFIGS = {"inference": "inference", "op by op": OP_BY_OP, "training": "training"}


class Logits(nn.Module):
    """Of a model, from tokens of the encoder or decoder, and of the decoder if there are both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tokens: Tensor) -> Tensor:
        names = ("input_ids", "decoder_input_ids")
        return self.model(**dict(zip(names, tokens, strict=False)), use_cache=False).logits


def own_ops(graph: torch._C.Graph) -> list[str]:
    """Operations of fuseopt's, and calls of Python, which no file can hold."""
    return re.findall(r"fuseopt::\w+|\^\w+", str(graph))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_a_trace_holds_torchs_operations_and_its_gradient_is_the_stock_models(family, config, training):
    rates = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if family == "gpt2" else {}
    rates |= {"dropout_rate": 0.0} if family == "t5" else {}
    model = tiny.FAMILIES[family](**rates).train(training)
    tokens = tuple(tiny.inputs(model).values())
    logits = Logits(model)
    wanted = logits(*tokens)
    weight = model.get_input_embeddings().weight
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), weight)

    fuseopt.initialize(model, CONFIGS[config])
    traced = torch.jit.trace(logits, tokens)
    assert not own_ops(traced.inlined_graph)
    saved = io.BytesIO()
    torch.jit.save(traced, saved)
    found = traced(*tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(found.square().sum(), weight)
    tiny.assert_same_gradients({"weight": grad}, {"weight": wanted_grad})


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "by Dynamo"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_exported_program_holds_torchs_operations(family, config, strict):
    model = tiny.FAMILIES[family]()
    (tokens,) = tiny.inputs(model).values()
    fuseopt.initialize(model, CONFIGS[config])
    for module, options in ((Logits(model), {}), (model, {"use_cache": False})):
        for has_gradients in (True, False):
            with torch.set_grad_enabled(has_gradients):
                program = torch.export.export(module, (tokens,), options, strict=strict)
            targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
            assert not [target for target in targets if "fuseopt" in target], targets


def test_blocks_and_stacks_with_forwards_of_their_own_can_be_exported():
    model = tiny.t5()
    fuseopt.initialize(model, {"kernel_fusion": {"triton_kernels": ["FusedRelativeAttention"]}})
    assert "forward" in vars(model.encoder)
    (tokens, _) = tiny.inputs(model).values()
    program = torch.export.export(model.encoder, (tokens,), strict=False)
    torch.testing.assert_close(program.module()(tokens)[0], model.encoder(tokens)[0], rtol=1e-4, atol=1e-5)


def test_torch_fx_keeps_drop_ins_of_torchs_own_modules_whole():
    layers = nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.RMSNorm(4, 1e-6), nn.Softmax(-1), nn.SiLU()
    model, input = nn.Sequential(*layers), torch.randn(3, 4)
    wanted = model(input)
    fuseopt.initialize(model)
    graph = torch.fx.symbolic_trace(model)
    assert [node.op for node in graph.graph.nodes] == ["placeholder", *["call_module"] * len(layers), "output"]
    torch.testing.assert_close(graph(input), wanted)
