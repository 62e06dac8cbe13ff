"""Odd arguments together: an initialised model does with them what transformers does, or refuses them in its words.

On the CPU, where what does not fit is an error that can be caught: which tier takes a call is the host's decision.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fuseopt
from tests import tiny
from tests.axes import thinned
from tests.generation.same_calls import FAMILIES, GENERATION, VOCAB, sweep, used_cache

HIDDEN, ROWS, LENGTH = 24, 2, 5
IDS = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(9)
DRAWN = torch.linspace(-1, 1, 3 * 9 * HIDDEN).view(3, 9, HIDDEN)

# What depends on the model is a function of it, see OF_THE_MODEL.
ODD = {
    "no prompt": {"inputs": None},
    "one row": {"inputs": IDS[:1]},
    "one token": {"inputs": IDS[:, :1]},
    "no row": {"inputs": IDS[:0]},
    "no token": {"inputs": IDS[:, :0]},
    "a row alone": {"inputs": IDS[0]},
    "int32": {"inputs": IDS.int()},
    "tokens between the numbers": {"inputs": IDS.float()},
    "a token outside the vocabulary": {"inputs": torch.cat([IDS[:, 1:], torch.full((ROWS, 1), VOCAB)], dim=1)},
    "a negative token": {"inputs": torch.cat([torch.full((ROWS, 1), -1), IDS[:, 1:]], dim=1)},
    "one token outside the vocabulary": {"inputs": torch.full((ROWS, 1), VOCAB)},
    "a mask in floating point": {"attention_mask": torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0], [1.0] * LENGTH])},
    "a mask of a whole row": {"attention_mask": torch.tensor([[0] * LENGTH, [1] * LENGTH])},
    "a mask of truths": {"attention_mask": torch.tensor([[False, False, True, True, True], [True] * LENGTH])},
    "a mask with a gap": {"attention_mask": torch.tensor([[1, 0, 1, 0, 1], [1] * LENGTH])},
    "a mask on the right": {"attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1] * LENGTH])},
    "a mask for all rows": {"attention_mask": torch.ones(1, LENGTH, dtype=torch.long)},
    "a long mask": {"attention_mask": torch.ones(ROWS, 9, dtype=torch.long)},
    "a short mask": {"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])},
    "a mask in three dimensions": {"attention_mask": torch.ones(ROWS, LENGTH, LENGTH, dtype=torch.long)},
    "positions for all rows": {"position_ids": POSITIONS[None, :LENGTH]},
    "positions of more rows": {"position_ids": POSITIONS[:LENGTH].repeat(3, 1)},
    "more positions": {"position_ids": POSITIONS.repeat(ROWS, 1)},
    "fewer positions": {"position_ids": POSITIONS[:3].repeat(ROWS, 1)},
    "positions in any order": {"position_ids": torch.tensor([[7, 3, 2, 9, 1]] * ROWS)},
    "positions that there are none of": {"position_ids": POSITIONS[None, :LENGTH] + 60},
    "negative positions": {"position_ids": POSITIONS[None, :LENGTH] - 2},
    "positions without a row": {"position_ids": POSITIONS[:LENGTH]},
    "embeddings": {"inputs_embeds": DRAWN[:ROWS, :LENGTH]},
    "more embeddings": {"inputs_embeds": DRAWN[:ROWS]},
    "embeddings of more rows": {"inputs_embeds": DRAWN[:, :LENGTH]},
    "embeddings without a row": {"inputs_embeds": DRAWN[0, :LENGTH]},
    "a decoder's prompt": {"decoder_input_ids": torch.tensor([[0, 4], [0, 5]])},
    "a decoder's prompt of more rows": {"decoder_input_ids": torch.tensor([[0], [0], [0]])},
    "a decoder's mask": {"decoder_attention_mask": torch.ones(ROWS, 1, dtype=torch.long)},
    "a decoder's start for each row": {"decoder_start_token_id": [7, 8]},
    "a used cache": {"past_key_values": lambda model: used_cache(model, IDS)},
    "a used cache of fewer rows": {"past_key_values": lambda model: used_cache(model, IDS[:1])},
    "an encoder's output of more rows": {"encoder_outputs": lambda model: encoded(model, torch.cat([IDS, IDS[:1]]))},
    "sampling": {"do_sample": True},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
    "sequences of greedy search": {"num_return_sequences": 2},
    "beams": {"num_beams": 3},
    "ends": {"eos_token_id": list(range(0, VOCAB, 3))},
    "no end": {"eos_token_id": -1},
    "a list of padding": {"pad_token_id": [0]},
    "padding outside the vocabulary": {"pad_token_id": VOCAB, "eos_token_id": list(range(0, VOCAB, 3))},
    "no tokens": {"max_new_tokens": 0},
    "a prefix function": {"prefix_allowed_tokens_fn": lambda row, tokens: [7, 8, 9]},
    "the host's clock": {"max_time": 1e6},
    "chunks": {"prefill_chunk_size": 2},
    "no cache": {"use_cache": False},
    "labels": {"labels": IDS},
}
OF_THE_MODEL = {"past_key_values", "encoder_outputs"}


def encoded(model, tokens):
    with torch.no_grad():
        return model.get_encoder()(tokens) if model.config.is_encoder_decoder else None


def outcome(model, arguments):
    """What a call returns, and the number that torch draws next, or what it raises."""
    given = {name: value(model) if name in OF_THE_MODEL else value for name, value in arguments.items()}
    torch.manual_seed(0)
    try:
        tokens = model.generate(**{"inputs": IDS, "max_new_tokens": 6, **given})
    except Exception as error:
        return type(error), str(error)
    return tokens.tolist(), torch.rand(()).item()


@pytest.fixture(params=FAMILIES)
def models(request):
    """A stock one, and one for all examples, as it may remember what earlier calls came to."""
    make = tiny.FAMILIES[request.param]
    return make(), fuseopt.initialize(make(), GENERATION)


@thinned(3, models=list(FAMILIES), name=list(ODD), indirect=["models"])
def test_what_each_odd_argument_comes_to(models, name):
    stock, initialised = models
    assert outcome(initialised, ODD[name]) == outcome(stock, ODD[name])


@sweep(150)
@given(names=st.lists(st.sampled_from(sorted(ODD)), unique=True, min_size=1, max_size=3))
def test_what_odd_arguments_come_to(models, names):
    arguments = {name: value for argument in names for name, value in ODD[argument].items()}
    stock, initialised = models
    assert outcome(initialised, arguments) == outcome(stock, arguments)
