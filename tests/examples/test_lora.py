"""examples/lora: values and gradients against float64, kernels in the interpreter and compiled for sm_90."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fuseopt
from fuseopt.bench.harness.records import Results
from fuseopt.extend import registered
from fuseopt.extend.replaced import unreplace
from tests.examples.native_builds import assert_compiles_for_sm_90

pytest.importorskip("triton")

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "lora"
ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}


@pytest.fixture(scope="module")
def main():
    """The script as a module, as its folder's other script imports it."""
    before = registered().keys()
    spec = importlib.util.spec_from_file_location("main", FOLDER / "main.py")
    module = sys.modules["main"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["main"]
    for name in registered().keys() - before:
        fuseopt.unregister(name)


def inputs(*shape, dtype=torch.float32):
    return [torch.randn(each, dtype=dtype).requires_grad_() for each in (shape, shape, shape[-1:])]


def check_against_float64(given, activation, output, grads, cotangent, tolerance):
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    exact = ACTIVATIONS[activation](wide[0] + 0.5 * wide[1] + wide[2])
    wanted = (exact, *torch.autograd.grad(exact, wide, cotangent.double()))
    for found, expected in zip((output, *grads), wanted, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_is_the_formula(main, activation):
    given, cotangent = inputs(7, 33), torch.randn(7, 33)
    output = main.epilogue(*given, 0.5, activation)
    grads = torch.autograd.grad(output, given, cotangent)
    check_against_float64(given, activation, output, grads, cotangent, 1e-5)


def test_expression_is_the_op_with_gelu(main):
    given = inputs(7, 33)
    torch.testing.assert_close(main.by_expression(*given, scale=0.5), main.epilogue(*given, 0.5, "gelu"))


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 1025), (1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_triton_kernel_in_the_interpreter(main, activation, dtype, shape):
    given, cotangent = inputs(*shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    assert main.epilogue.choose(*given, 0.5, activation).backend == "triton"
    output = main.epilogue(*given, 0.5, activation)
    grads = torch.autograd.grad(output, given, cotangent)
    check_against_float64(given, activation, output, grads, cotangent, 1e-5 if dtype == torch.float32 else 2e-2)


def test_kernels_take_what_they_say(main):
    base, delta, bias = inputs(4, 8)
    assert main.takes(base, delta, bias, 0.5, "gelu") is True
    for wrong in ((base.double(), delta, bias), (base.T, delta.T, bias), (base, delta, bias[:1]), (bias.sum(),) * 3):
        assert "takes contiguous" in main.takes(*wrong, 0.5, "gelu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles without launching, on machines without a GPU")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_triton_kernel_compiles_for_sm_90(main, activation, monkeypatch):
    from fuseopt.ops.triton.compile_only import compile_only

    base, delta, bias = (tensor.detach().to("meta", torch.bfloat16) for tensor in inputs(64, 768))
    with compile_only(90, multiprocessors=132) as compiled:
        main.launch(base, delta, bias, 0.5, activation)
        main.launch(base, delta, bias, 0.5, activation, base)
    assert [kernel.metadata.name for kernel in compiled] == ["epilogue_kernel"] * 2
    assert {kernel.metadata.target.arch for kernel in compiled} == {90}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_source_compiles_for_sm_90(main):
    assert_compiles_for_sm_90("lora::epilogue", FOLDER / "epilogue.cu")


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_kernels_on_a_gpu(main, backend, dtype, activation):
    given = [tensor.detach().cuda().requires_grad_() for tensor in inputs(70, 1032, dtype=dtype)]
    assert main.epilogue.choose(*given, 0.5, activation).backend == "cuda"
    output, cotangent = main.epilogue(*given, 0.5, activation, backend=backend), torch.randn_like(given[0])
    grads = torch.autograd.grad(output, given, cotangent)
    check_against_float64(given, activation, output, grads, cotangent, 1e-4 if dtype == torch.float32 else 4e-2)


@pytest.mark.slow
def test_script_checks_times_and_saves(main, tmp_path, capsys):
    main.main(["--shapes", "8x16", "--dtypes", "float32", "--out", str(tmp_path / "a" / "new")])
    printed = capsys.readouterr().out
    assert "lora::epilogue keeps its contract" in printed and "lora::by_expression keeps its contract" in printed
    cases = {row.case for row in Results.load(tmp_path / "a" / "new" / "lora.json").rows if row.variant == "eager"}
    ops = ("lora::epilogue", "lora::by_expression")
    assert cases == {f"{op} {way}, 8x16, float32" for op in ops for way in ("fwd", "bwd")}
    for plot in ("lora.png", "roofline.png"):
        assert (tmp_path / "a" / "new" / plot).exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_peft_model_has_the_op_and_stocks_loss_and_gradients(main, capsys, monkeypatch):
    pytest.importorskip("peft")
    calls = []
    spec = importlib.util.spec_from_file_location("peft_model", FOLDER / "peft_model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(
        module, "epilogue", lambda *given, **options: calls.append(1) or main.epilogue(*given, **options)
    )
    try:
        module.main()
        assert len(calls) == 4  # query and value of two layers
        printed = capsys.readouterr().out
        assert printed.count("lora_A.default.weight ") == 4 and printed.count("lora_B.default.weight ") == 4
        device = torch.device("cpu")
        stock, model = module.tiny_bert(device), fuseopt.initialize(module.tiny_bert(device), module_config())
        ids = torch.randint(0, 99, (2, 5))
        calls.clear()
        with stock.disable_adapter(), model.disable_adapter():
            torch.testing.assert_close(model(ids).logits, stock(ids).logits)
        for each in (stock, model):
            each.merge_adapter()
        torch.testing.assert_close(model(ids).logits, stock(ids).logits)
        assert not calls
    finally:
        unreplace("FusedLoraLinear")


def module_config():
    return {"kernel_fusion": {"custom_cuda_kernels": ["FusedLoraLinear"], "jit": False}}
