"""A drop-in behaves as its source: for code that selects by class or name, in values and in errors."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune
from transformers.trainer_pt_utils import get_parameter_names

import fuseopt
from fuseopt import modules
from fuseopt.modules.base import FusedModule, fused_class, runs_untouched, source_class
from tests import tiny
from tests.modules.drop_ins import DROP_INS, KINDS

pytestmark = [
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),  # torch.nn.RMSNorm's own
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
]
FAMILIES = ("gpt2", "t5", "t5_gated", "llama", "gemma", "mt5")
CONFIGS = ("inference", "training", {"kernel_fusion": {"jit": True}})
each = pytest.mark.parametrize("name", DROP_INS)


def test_every_drop_in_is_gone_through():
    assert {case.kind for case in DROP_INS.values()} == KINDS.keys()


@each
def test_classes_names_and_attributes_are_the_source_s(name):
    source, fused = DROP_INS[name].make()
    kind = KINDS[DROP_INS[name].kind]
    assert isinstance(fused, type(source)) and isinstance(fused, kind)
    assert (fused_class(fused), source_class(fused)) == (kind, type(source))
    assert type(fused).__name__ == type(source).__name__
    assert fused.extra_repr() == source.extra_repr()
    assert repr(fused) == repr(source).replace(type(source).__name__, kind.__name__, 1)
    for attribute, value in source.__dict__.items():
        assert fused.__dict__[attribute] is value
    for attribute in {*dir(source)} - {"forward"} - {*dir(object)} - {*dir(nn.Module)}:
        expected = getattr(source, attribute)
        if not isinstance(expected, nn.Parameter):
            assert getattr(fused, attribute) == expected or callable(expected)


@each
def test_copies_and_pickles_are_drop_ins_of_the_same_classes(name):
    _, fused = DROP_INS[name].make()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert type(pickle.loads(pickle.dumps(fused, protocol))) is type(fused)
    assert type(copy.deepcopy(fused)) is type(fused)


@each
def test_a_subclass_of_its_class_is_no_drop_in(name):
    _, fused = DROP_INS[name].make()
    assert runs_untouched(fused, fused_class(fused)) and runs_untouched(fused, type(fused))
    fused.__class__ = type("Mine", (type(fused),), {})
    assert fused_class(fused) is type(fused) is source_class(fused)


@each
def test_reset_parameters_gives_what_the_source_s_gives(name):
    source, fused = DROP_INS[name].make()
    if not hasattr(source, "reset_parameters"):
        pytest.skip("the source has none")
    before = {key: value.clone() for key, value in source.state_dict().items()}
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.fill_(7.0)
    torch.manual_seed(0)
    fused.reset_parameters()
    for key, value in fused.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_fall_into_the_groups_of_the_stock_model(family, config):
    """The names with weight decay, by transformers' Trainer's rule: by class and by name."""
    stock, fused = tiny.FAMILIES[family](), fuseopt.initialize(tiny.FAMILIES[family](), config)
    assert any(isinstance(module, FusedModule) for module in fused.modules())
    patterns = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decayed = [get_parameter_names(model, [nn.LayerNorm], patterns) for model in (stock, fused)]
    assert decayed[0] == decayed[1]


def test_weight_decay_by_class_trains_gpt2_as_stock():
    weights = []
    for config in (None, {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"], "jit": False}}):
        model = tiny.gpt2().double()
        if config:
            fuseopt.initialize(model, config, strict=True)
        decayed = {*get_parameter_names(model, [nn.LayerNorm], ["bias"])}
        named = dict(model.named_parameters())
        groups = [
            {"params": [named[name] for name in named if name in decayed], "weight_decay": 0.5},
            {"params": [named[name] for name in named if name not in decayed], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        for _ in range(4):
            model(**tiny.labelled(model)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(named)
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_init_weights_gives_what_stock_gives(family, config):
    states = []
    for fuse in (False, True):
        model = tiny.FAMILIES[family]()
        if fuse:
            fuseopt.initialize(model, config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3.0)
                parameter._is_hf_initialized = False
        torch.manual_seed(0)
        model.apply(model._init_weights)
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


@pytest.mark.parametrize("name", ["layer_norm", "t5_norm", "rms_norm", "head", "training_head"])
def test_pruning_and_parametrization_reach_the_numbers(name):
    for change in (
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        lambda module: parametrize.register_parametrization(module, "weight", nn.Tanh()),
    ):
        source, fused = (pair[place] for place, pair in enumerate(DROP_INS[name].make() for _ in range(2)))
        input = torch.randn(3, 6)
        for module in (source, fused):
            with torch.no_grad():
                module.weight.copy_(torch.linspace(-1, 1, module.weight.numel()).view_as(module.weight))
            change(module)
        assert torch.equal(source.weight, fused.weight) and isinstance(fused, modules.FusedModule)
        with torch.no_grad():
            torch.testing.assert_close(fused(input), source(input), rtol=1e-5, atol=1e-6)


def test_a_pruned_norm_is_given_back_pruned():
    model = fuseopt.initialize(
        nn.Sequential(nn.LayerNorm(6)), {"kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm"]}}
    )
    prune.l1_unstructured(model[0], "weight", 0.5)
    pruned = model[0].weight
    assert fuseopt.restore(model)[0].weight is pruned and type(model[0]) is nn.LayerNorm


# Shapes and dtypes, some of which every drop-in takes and some of which none does.
SHAPES = ((2, 5, 6), (6,), (), (0, 6), (2, 5, 0), (2, 5, 1), (2, 5, 7), (5, 6), (1, 2, 5, 6))
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64),
)


def outcome(module: nn.Module, input: Tensor) -> object:
    """The result of a call, or the class of the exception it raises."""
    try:
        output = module(input)
    except Exception as error:  # which one, is what is compared
        return type(error)
    return output[0] if isinstance(output, tuple) else output


@each
def test_odd_inputs_give_the_source_s_value_or_raise_its_error(name):
    values = 0
    for weight_dtype in (torch.float32, torch.bfloat16, torch.float64):
        source, fused = (module.eval() for module in DROP_INS[name].make(weight_dtype))
        # What a shape leads to does not depend on the weight's dtype.
        shapes = SHAPES if weight_dtype is torch.float32 else SHAPES[:1]
        for shape, dtype, device in itertools.product(shapes, DTYPES, ("cpu", "meta")):
            if device == "meta" and dtype in (torch.float8_e4m3fn, torch.complex64):
                continue  # torch's products take any dtype there
            input = (3 * torch.randn(shape)).to(dtype).to(device)
            for needs_grad in {False, input.is_floating_point() or input.is_complex()}:
                input = input.detach().requires_grad_(needs_grad)
                wanted, got = outcome(source, input), outcome(fused, input)
                case = (weight_dtype, shape, dtype, device, needs_grad)
                if isinstance(wanted, type) or isinstance(got, type):
                    assert got is wanted, case
                    continue
                traits = [(o.dtype, o.shape, o.device, o.requires_grad) for o in (got, wanted)]
                assert traits[0] == traits[1], case
                if device == "cpu":
                    low = {dtype, weight_dtype, wanted.dtype} & {torch.bfloat16, torch.float16}
                    tolerance = 3e-2 if low else 1e-5
                    got, wanted = got.to(torch.complex128), wanted.to(torch.complex128)
                    assert torch.allclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True), case
                    values += 1
    assert values >= 6


def tangent(module: nn.Module, input: Tensor, direction: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(first(module(forward_ad.make_dual(input, direction)))).tangent


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def transforms(module: nn.Module, input: Tensor, direction: Tensor) -> dict[str, object]:
    """Name of a question to one module -> function without arguments that answers it."""
    parameters = {key: value.detach() for key, value in module.named_parameters()}

    def call(input: Tensor) -> Tensor:
        return first(module(input))

    def scalar(input: Tensor) -> Tensor:
        return call(input).sin().sum()

    def of_parameters(parameters: dict[str, Tensor]) -> Tensor:
        return first(func.functional_call(module, parameters, (input,))).sin().sum()

    jvp = partial(func.jvp, call)
    return {
        "jvp": lambda: jvp((input,), (direction,)),
        "jvp_of_jvp": lambda: func.jvp(lambda x: jvp((x,), (direction,))[1], (input,), (direction,)),
        "jacfwd": lambda: func.jacfwd(call)(input),
        "jacrev": lambda: func.jacrev(call)(input),
        "hessian": lambda: func.hessian(scalar)(input),
        "parameters": lambda: func.jacfwd(of_parameters)(parameters),
        "hessian_of_parameters": lambda: func.hessian(of_parameters)(parameters),
        "vmap": lambda: func.vmap(call)(torch.stack([input, direction])),
        "vmap_of_jvp": lambda: func.vmap(lambda x: jvp((x,), (x,))[1])(torch.stack([input, direction])),
        "dual": lambda: tangent(module, input, direction),
        "dual_without_grad": lambda: torch.no_grad()(tangent)(module, input, direction),
        "functional_hessian": lambda: torch.autograd.functional.hessian(scalar, input),
    }


@each
@pytest.mark.parametrize("training", [False, True])
def test_forward_mode_and_transforms_give_the_source_s_derivatives(name, training):
    source, fused = (module.train(training) for module in DROP_INS[name].make(torch.float64))
    # Attention, norms over two dimensions and softmax of rows take a batch.
    shape = (1, 5, 6) if name in ("t5_attention", "softmax_of_rows", "layer_norm_of_two") else (5, 6)
    input, direction = torch.randn(2, *shape, dtype=torch.float64)
    expected = transforms(source, input, direction)
    for key, call in transforms(fused, input, direction).items():
        try:
            wanted = expected[key]()
        except Exception as error:  # what stock refuses, the drop-in refuses alike
            with pytest.raises(type(error)):
                call()
            continue
        # Some sources compute in float32.
        torch.testing.assert_close(call(), wanted, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_backend_that_is_named_takes_forward_mode_too(backend):
    norm = nn.LayerNorm(6).double()
    fused = modules.FusedLayerNorm.from_module(norm, backend=backend)
    input, direction = torch.randn(2, 3, 6, dtype=torch.float64)
    torch.testing.assert_close(func.jvp(fused, (input,), (direction,)), func.jvp(norm, (input,), (direction,)))
