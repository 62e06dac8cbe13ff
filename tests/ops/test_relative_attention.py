"""relative_attention beyond the contract: T5's own attention, masks, dropout, odd sizes, what is kept and refused."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention, eager_attention_forward

from fuseopt import ops
from fuseopt.errors import BackendError
from fuseopt.ops.philox import keep_scores, philox2
from fuseopt.ops.relative_attention import BWD, BWD_JOINED, FWD, LINE, MASKED, MOST_OF_TILE, has_kernel, reach_of
from fuseopt.training import partitioner
from fuseopt.training.graph_nodes import MATMULS
from fuseopt.training.passes import merge_projections
from tests.ops.cases import Case, Graphs, RawCalls, cases, error

every_case = pytest.mark.parametrize("case", cases("relative_attention"))
triton_cases = pytest.mark.parametrize(
    "case", [case for case in cases("relative_attention") if case.values[0].backend == "triton"]
)


def draw(case: Case, *shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, device=case.device, dtype=dtype).requires_grad_(requires_grad)


def inputs(
    case: Case, batch: int, heads: int, queries: int, keys: int, dim: int, reach: int | None = None
) -> list[torch.Tensor]:
    """As a projection leaves them, [batch, length, heads, dim] in memory, and the bias, of all distances by default."""
    tensors = [draw(case, batch, length, heads, dim).transpose(1, 2) for length in (queries, keys, keys)]
    return [*tensors, draw(case, heads, 2 * (reach or max(queries, keys)) + 1)]


def bias_matrix(bias: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    matrix = torch.empty(len(bias), queries, keys, dtype=bias.dtype, device=bias.device)
    reach = bias.shape[1] // 2
    for i in range(queries):
        for j in range(keys):
            matrix[:, i, j] = bias[:, reach + min(max(j - i, -reach), reach)]
    return matrix


def stock(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """transformers' eager attention, with a matrix of biases: [batch, heads, queries, dim]."""
    matrix = bias_matrix(bias, query.shape[2], key.shape[2])[None]
    module = torch.nn.Module().eval()
    return eager_attention_forward(module, query, key, value, mask, scaling=1.0, position_bias=matrix)[0].transpose(
        1, 2
    )


def assert_gradients_are_exact(
    case: Case,
    tensors: list[torch.Tensor],
    gradients: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> None:
    """Beside float64; those of the bias beside all that a head adds up, which may cancel where the bias ends.

    What it adds up are differences of products of `grad` and value, and carry the rounding of those.
    """
    *exact, scores = (tensor.detach().double() for tensor in (*tensors, torch.zeros_like(tensors[0] @ tensors[1].mT)))
    if mask is not None:
        scores += mask if mask.is_floating_point() else torch.zeros_like(scores).masked_fill(~mask, 2 * MASKED)
    leaves = [tensor.requires_grad_() for tensor in (*exact, scores)]
    expected = torch.autograd.grad(case.op.reference(*exact, mask=scores, **options), leaves, grad.double())
    assert error(gradients[:3], expected[:3]) <= 1e-5
    added_up = expected[4].abs().sum((0, 2, 3)).clamp(min=1e-2)
    products = grad.double().norm(dim=-1).amax((0, 2)) * exact[2].detach().norm(dim=-1).amax((0, 2))
    allowed = 1e-6 * added_up + torch.finfo(torch.float32).eps * products
    assert ((gradients[3] - expected[3]).abs().amax(1) <= allowed).all()


@every_case
def test_padding_gives_what_transformers_gives_also_where_all_is_padding(case: Case) -> None:
    torch.manual_seed(0)
    tensors = [tensor.detach() for tensor in inputs(case, 3, 2, 9, 9, 8)]
    seen = torch.arange(9, device=case.device) < torch.tensor([[9], [4], [0]], device=case.device)
    mask = seen[:, None, None, :].expand(3, 1, 9, 9)
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    expected = stock(*tensors, additive)
    for given_mask in (mask, additive, additive.contiguous(), mask.contiguous(), additive.clamp(min=MASKED).half()):
        torch.testing.assert_close(case(*tensors, mask=given_mask), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected[2], tensors[2][2].mean(1, keepdim=True).expand(2, 9, 8))


@every_case
def test_a_causal_mask_with_padding_on_the_left(case: Case) -> None:
    """As transformers makes it: rows of padding see masked keys only."""
    torch.manual_seed(0)
    tensors = [tensor.detach() for tensor in inputs(case, 2, 2, 20, 20, 8)]
    position = torch.arange(20, device=case.device)
    mask = (position <= position[:, None]) & (position >= torch.tensor([0, 5], device=case.device)[:, None, None])
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[:, None]
    torch.testing.assert_close(case(*tensors, mask=mask[:, None]), stock(*tensors, additive), rtol=1e-5, atol=1e-5)


@every_case
@pytest.mark.parametrize("causal", [True, False])
def test_hidden_keys_give_what_torch_s_attention_gives_for_a_bool_mask(case: Case, causal: bool) -> None:
    """Padding on the left, on the right, in between, on both sides and everywhere."""
    torch.manual_seed(0)
    query, key, value, _ = inputs(case, 5, 1, 20, 20, 8)
    seen = torch.ones(5, 20, dtype=torch.bool, device=case.device)
    seen[0, :5] = seen[1, 3:] = seen[2, 4:11] = seen[4] = False
    seen[3, :7] = seen[3, 17:] = False
    additive = torch.zeros(seen.shape, device=case.device).masked_fill(~seen, float("-inf"))[:, None, None, :]
    position = torch.arange(20, device=case.device)
    both = seen[:, None, None, :] & ((position <= position[:, None]) if causal else torch.tensor(True))
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=both, scale=0.3)
    assert not expected[4].any() and expected[0, :, :5].any() != causal
    for mask in (additive.half(), additive.expand(5, 1, 20, 20).contiguous()):
        output = case(query, key, value, None, mask=mask, scale=0.3, causal=causal)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        gradients = [
            torch.autograd.grad(found.square().sum(), (query, key, value), retain_graph=True)
            for found in (output, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@every_case
def test_queries_without_keys_give_zeros_and_finite_gradients(case: Case) -> None:
    torch.manual_seed(0)
    tensors = inputs(case, 1, 2, 6, 4, 8)
    mask = torch.ones(1, 1, 6, 4, dtype=torch.bool, device=case.device)
    mask[:, :, 3] = False
    output = case(*tensors, causal=True, mask=mask)
    assert torch.equal(output[:, :, :2], torch.zeros_like(output[:, :, :2]))
    torch.testing.assert_close(output[:, :, 3], tensors[2][:, :, :2].mean(2))
    gradients = torch.autograd.grad(output.square().sum(), tensors)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][:, :, [0, 1, 3]].any() and gradients[0][:, :, 4].any()
    without = case(*tensors[:1], *(tensor[:, :, :0] for tensor in tensors[1:3]), tensors[3])
    assert torch.equal(without, torch.zeros_like(tensors[0]))


@every_case
def test_the_seed_decides_which_weights_are_dropped(case: Case) -> None:
    torch.manual_seed(0)
    seed = torch.tensor([2**61 + 12345], device=case.device)
    query, key, _, bias = (tensor.detach() for tensor in inputs(case, 2, 3, 21, 40, 40))
    value = torch.eye(40, device=case.device).expand(2, 3, 40, 40)
    dropped = case(query, key, value, bias, p=0.3, seed=seed)
    weights = case(query, key, value, bias)
    kept = keep_scores(seed, dropped.shape, 0.3)
    assert torch.equal(dropped != 0, kept & (weights != 0))
    torch.testing.assert_close(dropped, weights * kept / (1 - 0.3))
    assert not torch.equal(dropped, case(query, key, value, bias, p=0.3, seed=seed + 1))


def test_philox2_gives_the_published_numbers() -> None:
    """Known answers of Philox2x32-7 for key and counter of zeros and of ones, from Random123's kat_vectors."""
    for word, expected in ((0, [0x257A3673, 0xCD26BE2A]), (0xFFFFFFFF, [0xAB302C4D, 0x3DC9D239])):
        words = torch.full((1,), word, dtype=torch.int64)
        assert torch.cat(philox2(words, words, words)).tolist() == expected


def test_drawn_masks_have_the_share_asked_for_and_no_pattern() -> None:
    shape, p = torch.Size((3, 4, 200, 300)), 0.1
    mask = keep_scores(torch.tensor([7]), shape, p).double()
    sigma = (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(mask.mean() - (1 - p)) < 4 * sigma
    centred = mask - (1 - p)
    neighbours = [centred.roll(shift, dim) for dim in range(4) for shift in (1, 8) if shift < shape[dim]]
    for other in (*neighbours, keep_scores(torch.tensor([8]), shape, p).double() - (1 - p)):
        assert abs((centred * other).mean()) < 4 * p * (1 - p) / mask.numel() ** 0.5


@triton_cases
@settings(
    max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(data=st.data())
def test_outputs_and_gradients_of_random_sizes_against_float64(case: Case, data: st.DataObject) -> None:
    """Tiles that are not full, several of them, heads of any size, and a bias that ends where it may."""
    batch, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    queries, keys = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 80))
    torch.manual_seed(data.draw(st.integers(0, 2**20)))
    dim, reach = data.draw(st.sampled_from([1, 8, 48, 64, 128])), data.draw(st.integers(1, 150))
    tensors = inputs(case, batch, heads, queries, keys, dim, reach)
    options = {
        "causal": data.draw(st.booleans()),
        "scale": 0.3,
        "p": data.draw(st.sampled_from([0.0, 0.2])),
        "seed": torch.randint(2**62, (1,), device=case.device),
        "mask": data.draw(
            st.sampled_from([None, torch.rand(batch, 1, 1, keys) > 0.3, torch.randn(heads, queries, keys)])
        ),
    }
    if options["mask"] is not None:
        options["mask"] = options["mask"].to(case.device)
    output = case(*tensors, **options)
    assert error([output], [case.op.reference(*(tensor.double() for tensor in tensors), **options)]) <= 2e-6
    grad = torch.randn_like(output)
    gradients = torch.autograd.grad(output, tensors, grad)
    assert_gradients_are_exact(case, tensors, gradients, grad, **options)
    again = torch.autograd.grad(case(*tensors, **options), tensors, grad)
    assert all(map(torch.equal, gradients, again))


@triton_cases
@pytest.mark.parametrize("causal", [True, False])
def test_keys_behind_the_last_one_that_is_seen_take_no_part(case: Case, causal: bool) -> None:
    """Whole tiles of them are left out; where all keys are masked, none is."""
    torch.manual_seed(0)
    tensors = inputs(case, 3, 1, 150, 150, 8, reach=9)
    lengths = torch.tensor([150, 20, 0], device=case.device)
    options = {"mask": (torch.arange(150, device=case.device) < lengths[:, None])[:, None, None, :], "causal": causal}
    output = case(*tensors, **options)
    assert error([output], [case.op.reference(*(tensor.double() for tensor in tensors), **options)]) <= 2e-6
    grad = torch.randn_like(output)
    gradients = torch.autograd.grad(output, tensors, grad)
    assert_gradients_are_exact(case, tensors, gradients, grad, **options)
    assert not any(gradient[1, :, 20:].any() for gradient in gradients[1:3])
    assert gradients[2][2].any() and not gradients[1][2].any()


@every_case
@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_gradient_reaches_the_buckets(case: Case, bidirectional: bool) -> None:
    """A vector looked up once a distance, against T5's own matrix looked up once a pair."""
    torch.manual_seed(0)
    config = T5Config(num_heads=2, d_kv=8, d_model=16, is_decoder=not bidirectional, dropout_rate=0.0)
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).to(case.device)
    table = attention.relative_attention_bias.weight
    query, key, value, _ = inputs(case, 2, 2, 40, 70, 8)
    matrix = attention.compute_bias(40, 70)
    expected = (query @ key.mT + matrix).softmax(-1) @ value
    distance = torch.arange(-128, 129, device=case.device)
    bucket = attention._relative_position_bucket(distance, bidirectional=bidirectional)
    output = case(query, key, value, table[bucket].t())
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(output)
    (actual,), (wanted,) = (torch.autograd.grad(result, table, grad) for result in (output, expected))
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@triton_cases
def test_what_is_kept_grows_with_the_length_not_its_square(case: Case) -> None:
    sizes = []
    for length in (32, 64):
        tensors = inputs(case, 1, 2, length, length, 8, reach=8)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):  # noqa: B023
            case(*tensors)
        sizes.append(sum(tensor.numel() for tensor in saved))
    assert sizes[1] <= 2 * sizes[0]


@triton_cases
def test_a_frozen_bias_is_left_out_of_the_backward(case: Case) -> None:
    *tensors, bias = inputs(case, 1, 2, 20, 20, 8)
    with RawCalls() as raw:
        case(*tensors, bias.detach()).sum().backward()
    assert [(str(op), args[-1]) for op, args in raw.calls if "bwd" in str(op)] == [
        ("fuseopt.relative_attention_bwd.triton", False)
    ]


@triton_cases
@pytest.mark.parametrize(("frozen", "masked"), [((), True), ((0,), False), ((1, 2), True), ((3,), False)])
def test_a_compiled_call_is_one_node_for_dynamo(case: Case, frozen: tuple[int, ...], masked: bool) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if masked:
        mask = torch.arange(7, device=case.device) < torch.tensor([[7], [4]], device=case.device)
        options = {"mask": mask[:, None, None, :], "seed": torch.tensor([3], device=case.device), "p": 0.2}
    tensors = inputs(case, 2, 1, 5, 7, 8, reach=3)
    tensors = [tensor.detach() if index in frozen else tensor for index, tensor in enumerate(tensors)]
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    if 3 in frozen:
        del tensors[3]
    nodes, graphs = [], Graphs()

    def backend(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if "attention" in str(node.target))
        return graphs.compiled(graph, example_inputs)

    torch._dynamo.reset()
    output = torch.compile(case, fullgraph=True, backend=backend)(*tensors, **options)
    expected = case(*tensors, **options)
    assert nodes == ["fuseopt.relative_attention.default"]
    assert torch.equal(output, expected)
    grad = torch.randn_like(output)
    assert all(map(torch.equal, *(torch.autograd.grad(result, leaves, grad) for result in (output, expected))))
    line = ["relative_attention_line.triton"] if len(tensors) == 4 else []
    assert graphs.forward == [*line, "relative_attention_fwd.triton"]
    assert graphs.backward == ["relative_attention_bwd.triton"]


@pytest.mark.slow
@triton_cases
def test_a_compiled_step_is_found_on_disk_until_the_source_changes(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tensors = inputs(case, 1, 1, 3, 3, 8)
    backend = partial(partitioner.compile_graph, backend="inductor", budget=1.0)
    module, found = ops.relative_attention.__globals__, []
    for source in ("one", "one", "another"):
        monkeypatch.setitem(module, "NODE", partial(module["NODE"].func, source))
        torch._dynamo.reset()
        counters.clear()
        torch.compile(case, fullgraph=True, backend=backend)(*tensors).sum().backward()
        found.append({name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")})
    hit, miss = {"hit": 1, "miss": 0, "bypass": 0}, {"hit": 0, "miss": 1, "bypass": 0}
    assert found == [miss, hit, miss]


@triton_cases
def test_large_heads_are_left_to_the_reference(case: Case) -> None:
    tensors = inputs(case, 1, 1, 3, 3, 129)
    with RawCalls() as raw:
        ops.relative_attention(*tensors)
    assert raw.calls == []
    with pytest.raises(ValueError, match="at most 128"):
        case(*tensors)
    assert not has_kernel("reference", case.device, torch.float32, 8)
    for dtype in (torch.float32, torch.bfloat16):
        assert has_kernel(case.backend, case.device, dtype, 128) and not has_kernel(
            case.backend, case.device, dtype, 129
        )


def test_arguments_that_do_not_fit_are_refused() -> None:
    query, mask = torch.zeros(2, 3, 4, 8), torch.zeros(2, 1, 1, 4)

    def refused(error_type: type[Exception], match: str, *args: torch.Tensor | None, **kwargs: object) -> None:
        with pytest.raises(error_type, match=match):
            ops.relative_attention(*args, **kwargs)

    refused(ValueError, "query and key must have shape", query[0], query, query)
    refused(ValueError, "key must have shape", query, query[:1], query)
    refused(ValueError, "value must have shape", query, query, query[:, :, :2])
    refused(TypeError, "must have one dtype", query, query.half(), query.half())
    for shape in ((3, 6), (3, 1), (2, 7), (3,)):
        refused(ValueError, "bias must have shape", query, query, query, torch.zeros(shape))
    refused(ValueError, "mask must be broadcastable", query, query, query, mask=mask[..., :3])
    refused(ValueError, "mask takes no gradient", query, query, query, mask=mask.requires_grad_())
    refused(ValueError, "p must be at least 0", query, query, query, p=1.0)
    refused(ValueError, "needs a seed", query, query, query, p=0.1)
    refused(ValueError, "seed must have shape", query, query, query, p=0.1, seed=torch.zeros(2, dtype=torch.int64))
    refused(BackendError, "no backend 'cuda'", query, query, query, backend="cuda")


@triton_cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_bias_is_drawn_out_at_both_ends(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for bias in (draw(case, 3, 9), draw(case, 11, 2).t(), draw(case, 2, 5).half(), draw(case, 0, 7)):
        line, reach = LINE["triton"](bias.detach(), dtype), bias.shape[1] // 2
        most = reach + 2 * MOST_OF_TILE
        distance = torch.arange(-most, most + 1, device=case.device).clamp(-reach, reach)
        expected = bias.detach().to(dtype)[:, distance + reach] * math.log2(math.e)
        assert line.is_contiguous() and reach_of(line) == reach
        torch.testing.assert_close(line, expected, rtol=2 * torch.finfo(dtype).eps, atol=0.0)


@triton_cases
@pytest.mark.parametrize(("queries", "with_query"), [(7, True), (7, False), (4, False)])
def test_gradients_side_by_side_are_the_same(case: Case, queries: int, with_query: bool) -> None:
    torch.manual_seed(0)
    for batch, keys, dim, causal in ((2, 7, 8, False), (1, 7, 24, True), (0, 7, 8, False), (2, 0, 8, False)):
        length = min(queries, keys) if with_query else queries
        *tensors, bias = (tensor.detach() for tensor in inputs(case, batch, 3, length, keys, dim, reach=3))
        mask = (torch.rand(batch, 1, 1, keys, device=case.device) < 0.7).expand(-1, -1, length, -1)
        seed = torch.tensor([5], device=case.device)
        given = (*tensors, LINE["triton"](bias, torch.float32), mask, seed)
        scalars = 0.5, 0.25, causal
        output, lse = FWD["triton"](*given, *scalars)
        grad = torch.randn_like(output)
        *expected, expected_bias = BWD["triton"](grad, *given, output, lse, *scalars, True)
        query, joined, bias_grad = BWD_JOINED["triton"](grad, *given, output, lse, *scalars, True, with_query)
        assert joined.is_contiguous() and joined.shape == (batch, keys, 3 if with_query else 2, 3, dim)
        found = [*([] if with_query else [query]), *joined.unbind(2)]
        assert query.numel() == 0 or not with_query
        assert all(map(torch.equal, found, expected)) and torch.equal(bias_grad, expected_bias)


class Projected(torch.nn.Module):
    """Attention of T5: projections [batch, length, 32] around the op, with dropout, and a norm ahead of them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(32, 32, bias=False, device=device) for _ in range(4))
        self.bias = torch.nn.Parameter(torch.randn(2, 9, device=device))

    def forward(self, x: torch.Tensor, states: torch.Tensor | None = None) -> torch.Tensor:
        x = x * x.square().mean(-1, keepdim=True).rsqrt()
        states = x if states is None else states
        heads = [y.view(*y.shape[:2], 2, 16).transpose(1, 2) for y in (self.q(x), self.k(states), self.v(states))]
        seed = torch.ones(1, dtype=torch.int64, device=x.device)
        output = ops.relative_attention(*heads, self.bias, seed=seed, p=0.2, backend="triton")
        return self.o(output.transpose(1, 2).flatten(2))


@pytest.mark.slow
@triton_cases
@pytest.mark.parametrize(("crosses", "products", "with_query"), [(False, 6, True), (True, 9, False)])
def test_a_compiled_step_has_its_gradients_side_by_side(
    case: Case, crosses: bool, products: int, with_query: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its projections as one product each way, or two where keys and values come from elsewhere."""
    torch.manual_seed(0)
    monkeypatch.setattr(merge_projections, "_is_half", lambda value: value.dtype == torch.bfloat16)
    nodes: list[torch.fx.Node] = []

    def join(graph: torch.fx.Graph, plain: Any = merge_projections.run) -> None:
        plain(graph)
        graph.lint()
        nodes.extend(graph.nodes)

    model = Projected(case.device)
    given = [draw(case, 3, length, 32) for length in ((7, 5) if crosses else (7,))]

    def step() -> tuple[torch.Tensor, ...]:
        torch._dynamo.reset()
        compiled = partial(partitioner.compile_graph, backend="aot_eager", budget=1.0)
        with torch.autocast(case.device.type, torch.bfloat16):
            output = torch.compile(model, backend=compiled, fullgraph=True)(*given)
        grad = torch.ones_like(output)
        return output, *torch.autograd.grad(output, [*given, *model.parameters()], grad)

    monkeypatch.setattr(merge_projections, "run", lambda graph: None)
    expected = step()
    monkeypatch.setattr(merge_projections, "run", join)
    found = step()
    assert sum(node.target in MATMULS for node in nodes) == products
    assert [node.args[-1] for node in nodes if node.target is BWD_JOINED["triton"]] == [with_query]
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert (one - other).norm() <= 0.02 * other.norm()
