"""decode_attention_ with grouped heads, rotation, norms, windows and soft caps: against transformers, and the kernels
against float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotated_pairs
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotated_halves
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fuseopt.ops import decode_attention, decode_attention_

ROWS, HEADS, KV_HEADS, CAPACITY = 3, 6, 2, 20


def rotary_table(positions: int, rotated: int, device: str = "cpu") -> Tensor:
    """[positions, rotated] float32: cosines, then sines."""
    frequencies = 100.0 ** -(torch.arange(0, rotated, 2, device=device) / rotated)
    angles = torch.arange(positions, device=device).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1)


def upstream_rotation(x: Tensor, table: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """[rows, heads, head_dim] by transformers' functions."""
    cos, sin = table[positions].chunk(2, -1)  # [rows, rotated / 2]
    rotated, passed = x.tensor_split([table.shape[1]], -1)
    if interleaved:
        rotated = rotated_pairs(rotated.unsqueeze(1), sin.unsqueeze(1), cos.unsqueeze(1)).squeeze(1)
    else:
        both = [torch.cat((part, part), -1).unsqueeze(1) for part in (cos, sin)]
        rotated = rotated_halves(rotated.unsqueeze(2), rotated.unsqueeze(2), *both)[0].squeeze(2)
    return torch.cat((rotated, passed), -1)


def grouped(cache: Tensor) -> Tensor:
    """Each head of keys repeated for its queries."""
    return cache.repeat_interleave(HEADS // KV_HEADS, 1)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotated"), [(16, 16), (20, 8), (80, 20)])
def test_rotation_and_grouped_heads_are_those_of_transformers(
    head_dim: int, rotated: int, interleaved: bool, backend: str
) -> None:
    torch.manual_seed(0)
    query = torch.randn(ROWS, HEADS, head_dim)
    key, value = torch.randn(2, ROWS, KV_HEADS, head_dim).unbind()
    caches = torch.randn(2, ROWS, KV_HEADS, CAPACITY, head_dim)
    table, positions, slot = rotary_table(30, rotated), torch.tensor([3, 29, 11]), 13
    expected_caches = caches.clone()
    expected_caches[0][:, :, slot] = upstream_rotation(key, table, positions, interleaved)
    expected_caches[1][:, :, slot] = value
    output = decode_attention_(
        query,
        key,
        value,
        *caches,
        torch.tensor([slot]),
        rotary=table,
        row_positions=positions,
        interleaved=interleaved,
        scale=0.3,
        backend=backend,
    )
    torch.testing.assert_close(caches, expected_caches)
    keys, values = (grouped(cache[:, :, : slot + 1]) for cache in expected_caches)
    query = upstream_rotation(query, table, positions, interleaved).unsqueeze(2)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(query, keys, values, scale=0.3).flatten(1))


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize(("norm", "offset"), [(Qwen3RMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_norms_are_those_of_transformers(norm: type, offset: float, backend: str) -> None:
    torch.manual_seed(0)
    head_dim, slot = 24, 4
    norms = norm(head_dim, eps=1e-3), norm(head_dim, eps=1e-3)
    for module in norms:
        torch.nn.init.normal_(module.weight)
    query, key, value = (torch.randn(ROWS, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    caches = torch.randn(2, ROWS, KV_HEADS, CAPACITY, head_dim)
    with torch.no_grad():
        output = decode_attention_(
            query,
            key,
            value,
            *caches,
            torch.tensor([slot]),
            q_norm=norms[0].weight,
            k_norm=norms[1].weight,
            norm_eps=1e-3,
            norm_offset=offset,
            backend=backend,
        )
        torch.testing.assert_close(caches[0][:, :, slot], norms[1](key))
        keys, values = (grouped(cache[:, :, : slot + 1]) for cache in caches)
        expected = F.scaled_dot_product_attention(norms[0](query).unsqueeze(2), keys, values, scale=1.0)
    torch.testing.assert_close(output, expected.flatten(1))


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("window", [0, 1, 5, 50])
def test_windows_soft_caps_and_biases(window: int, backend: str) -> None:
    """In the order of Gemma 2: scale, soft cap, bias; slots outside the window hold NaN."""
    torch.manual_seed(0)
    head_dim, slot = 8, 12
    query, key, value = (torch.randn(ROWS, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    caches = torch.randn(2, ROWS, KV_HEADS, CAPACITY, head_dim)
    starts, bias = torch.tensor([0, 9, 3]), torch.randn(HEADS, CAPACITY)
    seen = torch.arange(CAPACITY) > slot - window if window else torch.ones(CAPACITY, dtype=torch.bool)
    caches.masked_fill_(~seen[:, None], torch.nan)
    options = {"window": window, "softcap": 1.5, "starts": starts, "bias": bias, "scale": 2.0}
    output = decode_attention_(query, key, value, *caches, torch.tensor([slot]), **options, backend=backend)
    scores = (query.unsqueeze(2) @ grouped(caches[0]).mT).squeeze(2)
    scores = 1.5 * torch.tanh(scores * 2 / 1.5) + bias[:, (slot - torch.arange(CAPACITY)).clamp(min=0)]
    attended = seen & (torch.arange(CAPACITY) <= slot) & (torch.arange(CAPACITY) >= starts.unsqueeze(1))
    weights = scores.masked_fill(~attended.unsqueeze(1), -torch.inf).softmax(-1)
    expected = weights.unsqueeze(2) @ grouped(caches[1].nan_to_num(0.0))
    torch.testing.assert_close(output, expected.flatten(1))


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_beams_share_the_grouped_heads_of_an_item(backend: str) -> None:
    torch.manual_seed(0)
    query, bias = torch.randn(4, HEADS, 8), torch.randn(HEADS, 7)
    caches, lengths = torch.randn(2, 2, KV_HEADS, 9, 8), torch.tensor([9, 4])
    output = decode_attention(query, *caches, lengths, bias=bias, backend=backend)
    plain = [grouped(cache.repeat_interleave(2, 0)) for cache in caches]
    expected = decode_attention(query, *plain, lengths.repeat_interleave(2), bias=bias, backend="reference")
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(
    ("changed", "exception", "message"),
    [
        ({"query": torch.zeros(2, 3, 8)}, ValueError, "3 heads, which is no multiple of the 2 heads of key_cache"),
        ({"key": torch.zeros(2, 4, 8)}, ValueError, "key must have shape"),
        ({"rotary": torch.zeros(5, 8)}, ValueError, "given together"),
        ({"row_positions": torch.zeros(2, dtype=torch.int64)}, ValueError, "given together"),
        ({"rotary": torch.zeros(5, 10), "row_positions": torch.zeros(2, dtype=torch.int64)}, ValueError, "at most 8"),
        ({"rotary": torch.zeros(5, 7), "row_positions": torch.zeros(2, dtype=torch.int64)}, ValueError, "even"),
        ({"rotary": torch.zeros(5, 8).half(), "row_positions": torch.zeros(2).long()}, TypeError, "must be float32"),
        ({"rotary": torch.zeros(5, 8), "row_positions": torch.zeros(1).long()}, ValueError, "row_positions must have"),
        ({"rotary": torch.zeros(5, 8), "row_positions": torch.zeros(2)}, TypeError, "int32 or int64"),
        ({"q_norm": torch.zeros(7)}, ValueError, "q_norm must have shape"),
        ({"k_norm": torch.zeros(1, 8)}, ValueError, "k_norm must have shape"),
        ({"window": -1}, ValueError, "window and softcap must be positive"),
        ({"softcap": -0.5}, ValueError, "window and softcap must be positive"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changed: dict, exception: type[Exception], message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 4, 8),
        "key": torch.ones(2, 2, 8),
        "value": torch.ones(2, 2, 8),
        "key_cache": torch.zeros(2, 2, 5, 8),
        "value_cache": torch.zeros(2, 2, 5, 8),
        "positions": torch.tensor([1]),
        **changed,
    }
    with pytest.raises(exception, match=message):
        decode_attention_(**arguments)
    assert arguments["key_cache"].count_nonzero() == 0
