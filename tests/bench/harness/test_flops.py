"""The matmuls of a forward are counted as one counts them by hand."""

import pytest
import torch

from fuseopt.bench.harness.flops import forward_flops, matmul_timing


def test_gpt2_attends_to_half_of_the_positions():
    width, layers, vocab, batch, length = 768, 12, 50257, 2, 1024
    weights = layers * 12 * width**2 + vocab * width
    scores_and_values = layers * 2 * length * width / 2  # the causal half
    assert forward_flops("gpt2", batch, length) == batch * length * 2 * (weights + scores_and_values)


def test_t5_has_three_attentions_of_which_one_is_causal():
    width, inner, feed_forward, layers, vocab, batch, length = 64, 64, 128, 2, 512, 3, 10
    attention = 4 * width * inner
    encoder = layers * (attention + 2 * width * feed_forward + 2 * length * inner)
    decoder = layers * (2 * attention + 2 * width * feed_forward + (1 / 2 + 1) * 2 * length * inner)
    assert forward_flops("t5-tiny", batch, length) == batch * length * 2 * (encoder + decoder + vocab * width)


def test_a_matmul_is_timed():
    assert matmul_timing(64, torch.device("cpu"), torch.float32).seconds.median > 0


@pytest.mark.parametrize("model", ["t5-v1_1-base"])
def test_gated_feed_forwards_have_a_matmul_more(model):
    plain = forward_flops("t5-base", 1, 8)
    assert forward_flops(model, 1, 8) - plain == 8 * 2 * 24 * 768 * (3 * 2048 - 2 * 3072)
