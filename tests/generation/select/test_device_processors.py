"""Logits processors on static tensors against transformers' own, at every length of a sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process

from fuseopt.generation.engine.device_constants import DeviceConstantCache
from fuseopt.generation.engine.state import CacheShape, DecodeState, Sizes, capacity_for
from fuseopt.generation.select.device_processors import Edits, chained, device_processor, sampling_filters
from fuseopt.generation.select.logits_processors import FusedEncoderNoRepeatNGram, FusedNoRepeatNGram
from fuseopt.generation.select.selection import Selection
from fuseopt.ops import SamplingFilters

VOCAB, ROWS = 11, 4
pytestmark = pytest.mark.usefixtures("each_device")
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)


def state_with(ids, rest):
    """A state that holds `ids` [rows, length], with `rest` in the columns behind them, which must not count."""
    shape = CacheShape(1, 1, 1, torch.float32, ids.device)
    state = DecodeState(Sizes(len(ids), capacity_for(ids.shape[1])), shape, VOCAB)
    state.ids.fill_(rest)
    state.ids[:, : ids.shape[1]] = ids
    state.length.fill_(ids.shape[1])
    return state


def encoder_ids():
    return torch.randint(VOCAB, (2, 6), generator=torch.Generator("cpu").manual_seed(4), device="cpu").to(
        torch.empty(0).device
    )


def on_device(*processors):
    """What a selection is given for these."""
    kept = DeviceConstantCache()
    return chained((device_processor(each, ROWS, VOCAB, device(), kept) for each in processors), VOCAB, kept)


def device():
    return torch.empty(0).device


PROCESSORS = {
    "min length": lambda draw: logits_process.MinLengthLogitsProcessor(
        draw(st.integers(0, 9)), draw(tokens), device=device()
    ),
    "min new tokens": lambda draw: logits_process.MinNewTokensLengthLogitsProcessor(
        draw(st.integers(0, 4)), draw(st.integers(0, 5)), draw(tokens), device=device()
    ),
    "forced bos": lambda draw: logits_process.ForcedBOSTokenLogitsProcessor(draw(st.integers(0, VOCAB - 1))),
    "forced eos": lambda draw: logits_process.ForcedEOSTokenLogitsProcessor(
        draw(st.integers(1, 9)), draw(tokens), device=device()
    ),
    "suppressed": lambda draw: logits_process.SuppressTokensLogitsProcessor(
        draw(st.lists(st.integers(0, VOCAB + 3), min_size=1)), device=device()
    ),
    "suppressed at begin": lambda draw: logits_process.SuppressTokensAtBeginLogitsProcessor(
        draw(tokens), draw(st.integers(1, 9)), device=device()
    ),
    "repetition": lambda draw: logits_process.RepetitionPenaltyLogitsProcessor(
        draw(st.floats(0.2, 4.0)), draw(st.one_of(st.none(), st.integers(0, 5)))
    ),
    "n-gram": lambda draw: logits_process.NoRepeatNGramLogitsProcessor(draw(st.integers(1, 5))),
    "fused n-gram": lambda draw: FusedNoRepeatNGram(draw(st.integers(1, 5))),
    "encoder n-gram": lambda draw: logits_process.EncoderNoRepeatNGramLogitsProcessor(
        draw(st.integers(1, 8)), encoder_ids()
    ),
    "fused encoder n-gram": lambda draw: FusedEncoderNoRepeatNGram(draw(st.integers(1, 8)), encoder_ids()),
    "temperature": lambda draw: logits_process.TemperatureLogitsWarper(draw(st.floats(0.1, 3.0))),
    "top-k": lambda draw: logits_process.TopKLogitsWarper(draw(st.integers(1, VOCAB + 4))),
    "top-p": lambda draw: logits_process.TopPLogitsWarper(draw(st.floats(0.0, 1.0))),
    "min-p": lambda draw: logits_process.MinPLogitsWarper(draw(st.floats(0.0, 1.0))),
    "typical-p": lambda draw: logits_process.TypicalLogitsWarper(draw(st.floats(0.01, 0.99))),
    "normalised": lambda draw: logits_process.LogitNormalization(),
    "valid": lambda draw: logits_process.InfNanRemoveLogitsProcessor(),
}


@pytest.mark.parametrize("name", PROCESSORS)
@settings(deadline=None, max_examples=15)
@given(st.data())
def test_scores_are_those_of_transformers(name, data):
    processor = PROCESSORS[name](data.draw)
    length, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 10**6))
    generator = torch.Generator("cpu").manual_seed(seed)
    few = data.draw(st.sampled_from([2, 4, VOCAB]))
    ids = torch.randint(few, (ROWS, length), generator=generator, device="cpu").to(device())
    scores = 4 * torch.randn(ROWS, VOCAB, generator=generator, device="cpu").to(device())
    scores[0, 1], scores[1] = -torch.inf, -1.0
    (chain,) = on_device(processor)
    before = scores.clone()
    got = chain(state_with(ids, data.draw(st.integers(0, few - 1))), scores)
    assert torch.equal(scores, before)
    assert torch.equal(got, processor(ids, scores))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_chain_in_any_order_is_run_by_as_few_ops_as_can_be(data):
    names = data.draw(st.lists(st.sampled_from(sorted(PROCESSORS)), min_size=1, max_size=6))
    processors = [PROCESSORS[name](data.draw) for name in names]
    length, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 10**6))
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(3, (ROWS, length), generator=generator, device="cpu").to(device())
    scores = 4 * torch.randn(ROWS, VOCAB, generator=generator, device="cpu").to(device())
    got, expected = scores, scores
    for chain in on_device(*processors):
        got = chain(state_with(ids, 1), got)
    for processor in processors:
        expected = processor(ids, expected)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@settings(deadline=None, max_examples=10)
@given(st.data())
def test_what_one_op_runs(data):
    """In the order of generate() all of a kind; where another order would give another result, several ops."""

    def lengths(*names):
        chains = on_device(*(PROCESSORS[name](data.draw) for name in names))
        return [len(chain.fields) if isinstance(chain, Edits) else 0 for chain in chains]

    usual = ("repetition", "n-gram", "encoder n-gram", "min length", "min new tokens", "forced bos", "forced eos")
    assert len(lengths(*usual, "suppressed", "suppressed at begin", "temperature")) == 1
    assert lengths("temperature", "top-k", "temperature") == [1, 0, 1]
    assert lengths("n-gram", "n-gram") == [1, 1]
    assert lengths("forced eos", "n-gram") == [3, 1]
    assert lengths("temperature", "n-gram") == [1, 1]
    assert lengths("n-gram", "fused encoder n-gram", "temperature") == [4]
    assert lengths(*["suppressed"] * 9) == [3, 3]


def test_which_filters_the_op_that_draws_applies():
    """Those after the edits, in the order of generate(), that remove tokens by -inf and may leave a single one."""
    edit = logits_process.TemperatureLogitsWarper(0.5)
    top_k, top_p = logits_process.TopKLogitsWarper(5), logits_process.TopPLogitsWarper(0.9)
    min_p, typical = logits_process.MinPLogitsWarper(0.1), logits_process.TypicalLogitsWarper(0.8)
    normal = logits_process.LogitNormalization()
    for processors, expected in (
        ((edit,), (0, SamplingFilters())),
        ((edit, top_k, top_p, min_p, typical, normal), (5, SamplingFilters(5, 0.9, 0.1, 0.8))),
        ((top_k, min_p), (2, SamplingFilters(top_k=5, min_p=0.1))),
        ((top_p, top_k), (1, SamplingFilters(top_k=5))),
        ((top_k, top_k), (1, SamplingFilters(top_k=5))),
        ((top_k, edit, typical), (1, SamplingFilters(typical_p=0.8))),
        ((logits_process.TopPLogitsWarper(0.9, min_tokens_to_keep=2), min_p), (1, SamplingFilters(min_p=0.1))),
        ((logits_process.TopKLogitsWarper(5, filter_value=-100.0),), (0, SamplingFilters())),
    ):
        assert sampling_filters(on_device(*processors)) == expected


def test_everything_may_be_banned():
    ids = torch.arange(VOCAB).repeat(ROWS, 1)
    scores = torch.zeros(ROWS, VOCAB)
    (chain,) = on_device(logits_process.NoRepeatNGramLogitsProcessor(1))
    assert chain(state_with(ids, 0), scores).isneginf().all()


def test_tokens_beyond_the_vocabulary_ban_and_weigh_nothing():
    ids = torch.full((ROWS, 5), VOCAB + 7)
    scores = torch.randn(ROWS, VOCAB)
    for processor in (
        logits_process.NoRepeatNGramLogitsProcessor(1),
        logits_process.RepetitionPenaltyLogitsProcessor(3.0),
    ):
        (chain,) = on_device(processor)
        assert torch.equal(chain(state_with(ids, 0), scores), scores)


def test_padding_that_is_not_to_be_penalised():
    ids = torch.randint(VOCAB, (ROWS, 6))
    ignored = torch.tensor([0, 2, 6, 4])
    processor = logits_process.RepetitionPenaltyLogitsProcessor(2.0)
    processor.prompt_ignore_length = ignored
    scores = torch.randn(ROWS, VOCAB)
    (chain,) = on_device(processor)
    got = chain(state_with(ids, 1), scores)
    for row in range(ROWS):
        alone = logits_process.RepetitionPenaltyLogitsProcessor(2.0)
        kept = ids[row : row + 1, ignored[row] :]
        torch.testing.assert_close(got[row : row + 1], alone(kept, scores[row : row + 1]))


def test_what_a_captured_step_writes_over_is_its_own():
    kept, eos = DeviceConstantCache(), torch.tensor([3, 4])
    ignoring = logits_process.RepetitionPenaltyLogitsProcessor(2.0)
    ignoring.prompt_ignore_length = torch.tensor([0, 2, 6, 4])
    processors = (
        ignoring,
        logits_process.MinLengthLogitsProcessor(5, eos),
        logits_process.TemperatureLogitsWarper(2.0),
        logits_process.MinLengthLogitsProcessor(5, eos),
    )
    edits = (device_processor(each, ROWS, VOCAB, device(), kept) for each in processors)
    selection = Selection(chained(edits, VOCAB, kept), eos=eos)
    shared = selection.tensors
    assert len({tensor.data_ptr() for tensor in shared}) < len(shared)
    selection.own_tensors()
    assert not {tensor.data_ptr() for tensor in shared} & {tensor.data_ptr() for tensor in selection.tensors}
    assert len({tensor.data_ptr() for tensor in selection.tensors}) == len(shared)
    for own, other in zip(selection.tensors, shared, strict=True):
        assert torch.equal(own, other)


def test_what_the_device_does_not_know():
    class Mine(logits_process.TemperatureLogitsWarper):
        pass

    refused = (
        Mine(2.0),
        logits_process.EpsilonLogitsWarper(0.5),
        logits_process.ForcedBOSTokenLogitsProcessor(VOCAB),
        logits_process.ForcedEOSTokenLogitsProcessor(4, [1, VOCAB]),
        logits_process.EncoderNoRepeatNGramLogitsProcessor(2, torch.zeros(3, 5, dtype=torch.long)),
        FusedEncoderNoRepeatNGram(2, torch.zeros(3, 5, dtype=torch.long)),
    )
    known = [device_processor(each, ROWS, VOCAB, device(), DeviceConstantCache()) for each in refused]
    assert known == [None] * len(refused)


@pytest.mark.parametrize(
    ("length", "capacity"),
    [(1, 128), (128, 128), (129, 256), (1000, 1024), (1024, 1024), (1025, 2048), (2049, 3072), (4096, 4096)],
)
def test_cache_capacities_are_rounded_up_to_a_few_sizes(length, capacity):
    assert capacity_for(length) == capacity
