"""FusedLinearCrossEntropy and its lazy logits: what is computed when, and that it is what a linear layer gives."""

import copy
import operator
import pickle
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

from fuseopt import ops
from fuseopt.modules import FusedLinearCrossEntropy
from fuseopt.modules.lazy_logits import LazyLogits

pytestmark = pytest.mark.usefixtures("each_device")


def heads(bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    source = nn.Linear(8, 31, bias=bias, dtype=dtype)
    return source, FusedLinearCrossEntropy.from_module(source)


def inputs(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(2, 5, 8, dtype=dtype, requires_grad=True), torch.randint(31, (2, 5))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, target: F.cross_entropy(logits.view(-1, 31), target.view(-1)),
        lambda logits, target: F.cross_entropy(logits.float().view(-1, 31), target.view(-1), reduction="sum"),
        lambda logits, target: F.cross_entropy(logits.contiguous().view(-1, 31), target.view(-1)),
        lambda logits, target: nn.CrossEntropyLoss(ignore_index=3)(logits.reshape((10, 31)), target.flatten()),
        lambda logits, target: F.cross_entropy(
            logits.view(-1, logits.size(-1)), target.view(-1), label_smoothing=0.1, reduction="none"
        ).sum(),
    ],
    ids=["functional", "float", "contiguous", "module", "smoothed"],
)
def test_cross_entropy_runs_the_op_and_never_looks(bias, loss):
    source, fused = heads(bias)
    input, target = inputs()
    logits = fused(input)
    assert isinstance(logits, LazyLogits)
    with mock.patch.object(ops, "linear_cross_entropy", wraps=ops.linear_cross_entropy) as op:
        found = loss(logits, target)
    assert op.call_count == 1 and logits.output.computed is None
    expected = loss(source(input), target)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)
    leaves = [input, *source.parameters()]
    for grad, wanted in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(grad, wanted)


LOOKS = {
    "argmax": lambda t: t.argmax(-1),
    "softmax": lambda t: torch.softmax(t, dim=-1),
    "slice": lambda t: t[..., :-1, :].contiguous(),
    "other view": lambda t: t.view(5, 2, 31),
    "add": lambda t: t + 1,
    "reflected": lambda t: 2.0 - t,
    "two of them": lambda t: torch.stack([t, t]),
    "with itself": lambda t: t * t,
    "compare": lambda t: t > 0,
    "iterate": lambda t: torch.stack(list(t)),
    "in a list": lambda t: torch.cat([t, torch.zeros(1, 5, 31)]),
    "detach": lambda t: t.detach(),
    "attribute": lambda t: t.mT,
    "dtype": lambda t: t.to(torch.float64),
    "class weights": lambda t: F.cross_entropy(t.view(-1, 31), torch.arange(10), weight=torch.ones(31)),
    "probabilities": lambda t: F.cross_entropy(t.view(-1, 31), torch.ones(10, 31) / 31),
    "kl": lambda t: F.kl_div(t.log_softmax(-1), torch.ones(2, 5, 31) / 31),
    "module": lambda t: nn.LayerNorm(31)(t),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_whatever_else_is_asked_is_asked_of_the_logits(look):
    source, fused = heads()
    input, _ = inputs()
    logits = fused(input)
    expected, found = look(source(input)), look(logits)
    assert type(found) is torch.Tensor and logits.output.computed is not None
    assert (found.dtype, found.requires_grad) == (expected.dtype, expected.requires_grad)
    torch.testing.assert_close(found, expected)
    if found.requires_grad:
        leaves = [input, source.weight]
        weights = torch.randn_like(found)
        grads = torch.autograd.grad(found, leaves, weights), torch.autograd.grad(expected, leaves, weights)
        torch.testing.assert_close(*grads)


def test_what_is_known_without_looking():
    source, fused = heads()
    input, _ = inputs()
    expected, logits = source(input), fused(input)
    for read in (
        operator.attrgetter("shape"),
        operator.attrgetter("dtype"),
        operator.attrgetter("device"),
        operator.attrgetter("requires_grad"),
        operator.attrgetter("ndim"),
        operator.methodcaller("dim"),
        operator.methodcaller("size"),
        operator.methodcaller("size", -1),
    ):
        assert read(logits) == read(expected)
    assert logits.float().dtype == torch.float32 and logits.view(-1, 31).shape == (10, 31)
    assert logits.output.computed is None


def test_logits_are_computed_once_and_part_of_the_graph_even_without_gradients():
    _, fused = heads()
    input, _ = inputs()
    logits = fused(input)
    with torch.no_grad():
        first = logits.tensor()
    assert first.requires_grad
    assert logits.view(-1, 31).tensor().data_ptr() == first.data_ptr() == logits.tensor().data_ptr()


def test_logits_that_were_edited_are_what_the_loss_is_of():
    source, fused = heads()
    input, target = inputs()
    found, expected = fused(input), source(input)
    for logits in (found, expected):
        logits[..., 3] = -torch.inf
        logits *= 2
    losses = [F.cross_entropy(logits.view(-1, 31), target.view(-1) * 0) for logits in (found, expected)]
    torch.testing.assert_close(*losses)


def test_logits_not_looked_at_before_the_weight_changed_are_refused():
    _, fused = heads()
    input, _ = inputs()
    seen, late = fused(input), fused(input)
    values = seen.tensor().clone()
    with torch.no_grad():
        fused.weight.add_(1.0)
    assert torch.equal(seen.tensor(), values)
    with pytest.raises(RuntimeError, match=r"read them before optimizer.step\(\)"):
        late.argmax(-1)


def fused_step(head, input):
    torch.optim.AdamW([head.weight], lr=1e-5, fused=True).step()


def fused_step_of_the_bias(head, input):
    torch.optim.AdamW([head.bias], lr=1e-5, fused=True).step()


def write_to_the_weight_s_data(head, input):
    head.weight.data += 1e-5


def write_to_the_bias_s_data(head, input):
    head.bias.data += 1e-5


def write_to_the_input_s_data(head, input):
    input.data += 1e-5


UNCOUNTED = [
    fused_step,
    fused_step_of_the_bias,
    write_to_the_weight_s_data,
    write_to_the_bias_s_data,
    write_to_the_input_s_data,
]


@pytest.mark.parametrize("write", UNCOUNTED)
def test_a_write_that_changes_no_version_is_seen(write):
    _, fused = heads(bias=True)
    input, target = inputs()
    logits = fused(input)
    F.cross_entropy(logits.view(-1, 31), target.view(-1)).backward()
    before = [tensor._version for tensor in (fused.weight, fused.bias, input)]
    write(fused, input)
    assert [tensor._version for tensor in (fused.weight, fused.bias, input)] == before
    assert logits.output.computed is None
    with pytest.raises(RuntimeError, match=r"before optimizer.step\(\) and before writes through weight.data"):
        logits.argmax(-1)


def test_a_bias_that_changed_alone_is_seen():
    _, fused = heads(bias=True)
    logits = fused(inputs()[0])
    with torch.no_grad():
        fused.bias.add_(1.0)
    with pytest.raises(RuntimeError, match="weight or bias, or the hidden states, had been modified in place"):
        logits.argmax(-1)


def test_values_that_are_not_numbers_equal_themselves():
    source, fused = heads(bias=True)
    with torch.no_grad():
        fused.weight[3] = torch.nan
    input, _ = inputs()
    torch.testing.assert_close(fused(input) + 0, source(input), equal_nan=True)


@pytest.mark.parametrize("steps", [False, True], ids=["alone", "after a step of other parameters"])
def test_logits_of_an_unwritten_head_are_read_with_their_gradients(steps):
    source, fused = heads(bias=True)
    input, _ = inputs()
    expected, logits = source(input), fused(input)
    if steps:
        other = torch.zeros(1, device=input.device, requires_grad=True)
        other.grad = torch.ones_like(other)
        torch.optim.SGD([other]).step()
    found = logits + 0
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    leaves = [input, *source.parameters()]
    grads = (torch.autograd.grad(each, leaves, weights) for each in (found, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("made", ["in the mode", "before it"])
def test_logits_are_read_under_a_fake_tensor_mode(made):
    _, fused = heads()
    logits = fused(inputs()[0])
    with FakeTensorMode(allow_non_fake_inputs=True):
        if made == "in the mode":
            logits = fused(torch.empty(2, 5, 8, requires_grad=True))
        assert isinstance(logits, LazyLogits) and (logits + 0).shape == (2, 5, 31)


def test_logits_are_read_on_the_meta_device():
    fused = heads()[1].to("meta")
    assert (fused(torch.empty(2, 5, 8, device="meta")) + 0).shape == (2, 5, 31)


@pytest.mark.parametrize("before", [False, True], ids=["in the capture", "before it"])
def test_logits_are_read_while_a_cuda_graph_is_captured(before, each_device):
    if each_device.type != "cuda":
        pytest.skip("needs a GPU")
    source, fused = heads()
    input = inputs()[0].detach()
    expected, logits = source(input), fused(input) if before else None
    (fused(input) + 0).sum()  # cuBLAS is initialised outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = (fused(input) if logits is None else logits) + 0
    graph.replay()
    torch.testing.assert_close(read, expected)


def test_copies_and_pickles_are_tensors():
    _, fused = heads()
    logits = fused(inputs()[0])
    expected = logits.tensor().detach()
    for found in (pickle.loads(pickle.dumps(logits)), copy.deepcopy(logits.detach()), copy.copy(logits.detach())):
        assert type(found) is torch.Tensor and torch.equal(found, expected)
    assert "LazyLogits(tensor(" in repr(logits)


def test_hooks_on_the_logits_run_when_they_take_part():
    _, fused = heads()
    seen = []
    logits = fused(inputs()[0])
    logits.register_hook(lambda grad: seen.append("first"))
    removed = logits.register_hook(lambda grad: seen.append("removed"))
    removed.remove()
    assert logits.output.computed is None
    logits.sum().backward()
    assert seen == ["first"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("upcast", [False, True])
def test_dtypes_under_autocast_are_those_of_a_linear_layer(dtype, autocast, upcast):
    device = torch.get_default_device()
    source, fused = heads(dtype=dtype)
    input, target = inputs(dtype)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        expected, found = source(input), fused(input)
        if upcast:
            expected, found = expected.float(), found.float()
        losses = [F.cross_entropy(logits.view(-1, 31), target.view(-1)) for logits in (found, expected)]
    assert found.dtype == expected.dtype and losses[0].dtype == losses[1].dtype
    # Looked at outside of autocast, they are what they would have been inside.
    assert torch.equal(found.tensor(), expected)
    # Logits that nobody looks at are not rounded to bfloat16.
    rounded = torch.bfloat16 in (dtype, losses[0].dtype) or autocast
    torch.testing.assert_close(*losses, rtol=1e-2 if rounded else 1e-4, atol=1e-4)


def hooked(head):
    head.register_forward_hook(lambda *_: None)


def backward_hooked(head):
    head.register_full_backward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [nn.Module.eval, hooked, backward_hooked], ids=["eval", "hook", "backward hook"])
def test_a_plain_tensor_where_somebody_expects_one(change):
    source, fused = heads()
    input, _ = inputs()
    change(fused)
    assert type(fused(input)) is torch.Tensor
    torch.testing.assert_close(fused(input), source(input))


def test_a_plain_tensor_without_gradients_and_in_transforms():
    source, fused = heads()
    input, _ = inputs()
    with torch.no_grad():
        assert type(fused(input)) is torch.Tensor
    torch.testing.assert_close(torch.func.vmap(fused)(input), source(input))


def test_torch_export_sees_a_linear_layer():
    source, fused = heads()
    input, _ = inputs()
    exported = torch.export.export(fused, (input,), strict=False).module()
    torch.testing.assert_close(exported(input), source(input))


def test_the_head_remains_a_linear_layer_with_the_source_s_parameters():
    source, fused = heads(bias=True)
    assert isinstance(fused, nn.Linear)
    assert fused.weight is source.weight and fused.bias is source.bias
    assert list(fused.state_dict()) == ["weight", "bias"]
    (reason,) = FusedLinearCrossEntropy.not_supported_reasons(mock.Mock(weight=torch.zeros(3, dtype=torch.int8)))
    assert "torch.int8" in reason
