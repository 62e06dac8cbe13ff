"""The bytes that a decode step has to read, and how fast they can be."""

import pytest
import torch

import fuseopt
from fuseopt.bench.harness import bytes_floor
from fuseopt.bench.harness.architectures import load_config, weightless
from fuseopt.bench.harness.bytes_floor import cache_bytes, copy_bandwidth, read_bandwidth, weight_bytes
from fuseopt.runtime.timer import Timing
from tests import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "millions"),
    # All of GPT-2 but its positions; of T5 the decoder with its head, without what reads the encoder's output once.
    [
        ("gpt2", 124.44 - 1024 * 768 / 1e6),
        ("t5-base", 24.67 + 12 * (6 * 768**2 + 2 * 768 * 3072) / 1e6),
        ("bart-base", 50265 * 768 / 1e6 + 6 * (6 * 768**2 + 2 * 768 * 3072) / 1e6),
    ],
)
def test_a_decoding_step_reads_the_weights_of_the_decoder_once(name, millions):
    model = weightless(load_config(name), CPU).to(torch.bfloat16)
    assert weight_bytes(model) / 2e6 == pytest.approx(millions, rel=1e-3)


def test_a_decoding_step_reads_the_half_filled_caches_of_all_rows():
    """Keys and values of 64 numbers in 12 heads of 12 layers."""
    a_token = 2 * 12 * 12 * 64 * 2
    gpt2, t5 = (weightless(load_config(name), CPU).to(torch.bfloat16) for name in ("gpt2", "t5-base"))
    assert cache_bytes(gpt2, 8, 1, 128, 100) == 8 * (128 + 50) * a_token
    assert cache_bytes(gpt2, 8, 4, 128, 100) == 32 * (128 + 50) * a_token
    assert cache_bytes(t5, 8, 4, 128, 100) == (8 * 128 + 32 * 50) * a_token
    bart = weightless(load_config("bart-base", encoder_layers=3, encoder_attention_heads=3), CPU).to(torch.bfloat16)
    assert cache_bytes(bart, 8, 4, 128, 100) == (8 * 128 + 32 * 50) * a_token // 2


def test_caches_of_8_bits_have_a_scale_for_each_head_and_token():
    model = fuseopt.initialize(tiny.gpt2(), {"generation": {"cache_dtype": "int8"}})
    a_token = 2 * 2 * 3  # keys and values of 8 numbers in 3 heads of 2 layers
    assert cache_bytes(model, 2, 1, 5, 4) == 14 * a_token * 8 * 4  # no call has quantised yet
    model.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2)
    assert cache_bytes(model, 2, 1, 5, 4) == 14 * a_token * (8 + 4)


def test_a_copy_reads_and_writes_and_a_sum_reads(monkeypatch):
    returned = []

    def half_a_second(calls, sample, rounds):
        returned.append(calls["call"]())
        return {"call": Timing((0.5,) * rounds)}

    monkeypatch.setattr(bytes_floor, "time_in_turns", half_a_second)
    assert copy_bandwidth(CPU) == 4 * 2**26
    assert read_bandwidth(CPU) == 2 * 4 * 2**26
    assert returned[1] == 2**26
