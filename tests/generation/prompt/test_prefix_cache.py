"""The prefix cache: tokens are those of transformers, and only tokens that are not cached run."""

import copy
import gc
import re
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import fuseopt
from fuseopt.generation.engine import prompt_attention
from fuseopt.generation.engine.graphs import StepGraphs
from fuseopt.generation.engine.state import CacheShape, DecodeState, Sizes
from fuseopt.generation.families import spec_step
from fuseopt.generation.families.spec_step import SpecStep
from fuseopt.generation.prompt import prefill, prefix_cache
from fuseopt.generation.prompt import prompts as prompts_module
from fuseopt.generation.prompt.early_prefill import EarlyPrefill
from fuseopt.generation.prompt.early_work import EarlyWork
from fuseopt.generation.prompt.prefix_cache import BLOCK, PrefixCache
from fuseopt.generation.tiers import Tier
from fuseopt.runtime.written_values import WeightVersions
from tests import tiny
from tests.generation.families.tiny_decoders import DECODERS, grouped
from tests.generation.same_calls import CLOSE, VOCAB, calls_of, generate, sweep

pytestmark = pytest.mark.usefixtures("each_device")
CONFIG = {"generation": {"prefix_cache_mib": 8}}
MODELS = {
    "gpt2": lambda: tiny.gpt2(n_positions=150),
    # Shared heads, positions that rotate.
    "llama": lambda: grouped("llama", max_position_embeddings=150),
    # Windows of 8 slots in some layers.
    "gemma3": DECODERS["gemma3"],
    # Capped scores.
    "gemma2": DECODERS["gemma2"],
    # Learned positions with an offset.
    "opt": lambda: tiny.decoder("opt", max_position_embeddings=150),
}
CALLS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 12, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "T1": {"max_time": 1e6},
    "T1 beams": {"num_beams": 2, "bad_words_ids": [[5, 6]]},
}


@pytest.fixture
def ran(monkeypatch):
    """The prompts that decode steps run, as (first slot, tokens a row), without padding after them."""
    seen, run = [], prompts_module.run_forward

    def noting(forward, graphs, state, rows, length, *args, **kwargs):
        seen.append((state.start, length))
        return run(forward, graphs, state, rows, length, *args, **kwargs)

    monkeypatch.setattr(prompts_module, "run_forward", noting)
    return seen


@pytest.fixture
def ran_padded(monkeypatch):
    """As `ran`, of the forwards that run, with padding; a replayed graph runs none."""
    seen, run = [], SpecStep._prefill_prompt

    def noting(step, state, length, masked):
        seen.append((state.start, length))
        run(step, state, length, masked)

    monkeypatch.setattr(SpecStep, "_prefill_prompt", noting)
    return seen


def tokens(length, seed, rows=1):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator, device="cpu")


def prompts(*parts):
    """input_ids and attention_mask of rows that are each a sequence of (tokens, seed), padded on the left."""
    rows = [torch.cat([tokens(*part)[0] for part in row]) for row in parts]
    longest = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.int64, device="cpu") for _ in range(2))
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :], mask[index, longest - len(row) :] = row, 1
    device = torch.get_default_device()
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def assert_same_tokens(got, wanted):
    (got, got_random), (wanted, wanted_random) = got, wanted
    assert torch.equal(got.sequences, wanted.sequences) and torch.equal(got_random, wanted_random)
    for ours, theirs in zip(got.logits, wanted.logits, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def prefixes_of(model):
    return model.generate.graphs.prefixes


@pytest.mark.parametrize(
    ("name", "how"),
    [*(("llama", how) for how in CALLS), *((name, "greedy") for name in MODELS if name != "llama"), ("gpt2", "beams")],
)
def test_only_new_tokens_run_and_tokens_are_those_of_transformers(name, how, ran):
    model, kwargs = MODELS[name](), {"max_new_tokens": 5, **CALLS[how]}
    system = (40, 1)
    given_prompts = [prompts([system, (9, 2)]), prompts([system, (13, 3)]), prompts([system, (9, 2)])]
    wanted = [generate(model, inputs, **kwargs) for inputs in given_prompts]
    fuseopt.initialize(model, CONFIG)
    for inputs, stock in zip(given_prompts, wanted, strict=True):
        assert_same_tokens(generate(model, inputs, **kwargs), stock)
    # 40 tokens are 2 blocks and a part of one; 49 are 3 and a token that the first logits need.
    assert ran == [(0, 49), (32, 21), (48, 1)]
    assert {call.tier for call in calls_of(model)} == {Tier.FAST_FORWARD if "T1" in how else Tier.DEVICE_LOOP}
    rows = CALLS[how].get("num_beams") or CALLS[how].get("num_return_sequences", 1)
    assert f"{48 * rows} prompt tokens from the prefix cache" in str(calls_of(model)[-1])
    assert f"2 of 3 calls reused {80 * rows} prompt tokens" in str(fuseopt.report(model))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "opt"])  # Gemma 2 masks eagerly, by its own forward
def test_rows_with_padding_reuse_their_own_prefixes(name, ran):
    model, kwargs = MODELS[name](), {"max_new_tokens": 4}
    calls = [
        prompts([(33, 1), (5, 2)], [(17, 3), (2, 4)]),
        # Slots 0 to 13 of the second row are padding, and its first block ends at slot 30.
        prompts([(33, 1), (9, 5)], [(17, 3), (11, 6)]),
        # Nothing of the second row is kept, so the first 34 slots are padding or run.
        prompts([(33, 1), (20, 7)], [(19, 8)]),
        # A prompt alone, which was padded before.
        prompts([(17, 3), (11, 6)]),
    ]
    wanted = [generate(model, inputs, **kwargs) for inputs in calls]
    fuseopt.initialize(model, CONFIG)
    for inputs, stock in zip(calls, wanted, strict=True):
        assert_same_tokens(generate(model, inputs, **kwargs), stock)
    assert ran == [(0, 38), (30, 12), (32, 21), (16, 12)]
    assert {call.tier for call in calls_of(model)} == {Tier.DEVICE_LOOP}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_random_prompts_that_share_random_prefixes(name, monkeypatch):
    model = MODELS[name]()
    stock = MODELS[name]()
    fuseopt.initialize(model, CONFIG)
    part = st.tuples(st.integers(1, 40), st.integers(0, 2))
    # A capacity so small that blocks are evicted in most calls.
    monkeypatch.setattr(PrefixCache, "capacity", 12)

    @sweep(30)
    @given(rows=st.lists(st.lists(part, min_size=1, max_size=3), min_size=1, max_size=3), beams=st.integers(1, 2))
    def check(rows, beams):
        inputs, kwargs = prompts(*rows), {"max_new_tokens": 2, "num_beams": beams}
        assert_same_tokens(generate(model, inputs, **kwargs), generate(stock, inputs, **kwargs))

    check()
    # The random prompts may have had fewer blocks than fit.
    generate(model, prompts([(120, 0)], [(120, 1)]), max_new_tokens=2)
    assert len(prefixes_of(model)) == 12 and re.search(
        r"[1-9]\d* of \d+ calls reused [1-9]", str(fuseopt.report(model))
    )


@pytest.fixture
def llama():
    model = fuseopt.initialize(MODELS["llama"](), CONFIG)
    return model, prompts([(40, 1), (9, 2)])


@pytest.mark.parametrize("each_device", ["cpu"], indirect=True)
def test_what_the_state_still_holds_is_not_copied_again(as_on_gpu, monkeypatch):
    model, stock, copied = MODELS["llama"](), MODELS["llama"](), []
    copy_blocks = prefix_cache._copy

    def counted(pool, places, slots, *, to_pool):
        copied.append((len(places), to_pool))
        copy_blocks(pool, places, slots, to_pool=to_pool)

    monkeypatch.setattr(prefix_cache, "_copy", counted)
    fuseopt.initialize(model, CONFIG)

    def run(*parts, **kwargs):
        del copied[:]
        inputs, kwargs = prompts(*parts), {"max_new_tokens": 3, **kwargs}
        assert_same_tokens(generate(model, inputs, **kwargs), generate(stock, inputs, **kwargs))
        return [count for count, to_pool in copied if not to_pool]

    first, other = (64, 1), (64, 2)
    for _ in range(3):  # the state is kept once its step is captured
        run([first, (9, 3)])
    assert run([first, (7, 4)]) == [] and run([first, (30, 5)]) == []
    assert run([(40, 1), (20, 6)]) == []
    # Other prompts, and other calls, have overwritten what the state held.
    run([other, (9, 7)])
    assert run([first, (8, 8)]) == [4] and run([other, (8, 9)]) == [4] and run([other, (6, 10)]) == []
    run([(90, 11)], logits_processor=[lambda ids, scores: scores])
    assert run([other, (5, 12)]) == [4]
    with torch.no_grad():
        for each in (model, stock):
            each.model.layers[0].self_attn.v_proj.weight[1, 2] += 1
    assert run([other, (5, 12)]) == [0] and run([other, (5, 13)]) == []


def last_note(model):
    return str(calls_of(model)[-1])


def assert_as_stock(model, inputs, **kwargs):
    """Compares the tokens of a call with those of the restored model."""
    got = generate(model, inputs, max_new_tokens=4, **kwargs)
    options = {"max_new_tokens": 4, **kwargs}
    with fuseopt.fused(model, {"generation": {"enable": True}}):
        wanted = generate(model, inputs, **options)
    assert_same_tokens(got, wanted)


@pytest.mark.parametrize("edit", ["in place", "a step", "a fused step", "through data", "assigned", "load_state_dict"])
def test_keys_and_values_of_other_weights_are_not_reused(edit, ran):
    model, stock, inputs = MODELS["llama"](), MODELS["llama"](), prompts([(40, 1), (9, 2)])
    fuseopt.initialize(model, CONFIG)
    generate(model, inputs, max_new_tokens=2)
    for each in (model, stock):
        weight = each.model.layers[0].self_attn.v_proj.weight
        if edit == "in place":
            with torch.no_grad():
                weight[1, 2] += 1
        elif edit == "through data":
            weight.data.mul_(1.5)
        elif edit in ("a step", "a fused step"):
            optimizer = torch.optim.AdamW(each.parameters(), lr=0.1, fused=edit == "a fused step")
            each.train()
            torch.autograd.backward(each(inputs["input_ids"]).logits.sum())
            optimizer.step()
            each.eval()
        elif edit == "assigned":
            each.model.layers[0].self_attn.v_proj.weight = torch.nn.Parameter(weight.detach() * 1.5)
        else:
            each.load_state_dict({name: value * 1.1 for name, value in each.state_dict().items()})
    del ran[:]
    for _ in range(2):
        assert_same_tokens(generate(model, inputs, max_new_tokens=4), generate(stock, inputs, max_new_tokens=4))
    # A GPU may run the prompt before the check finds the change.
    assert ran[-2:] == [(0, 49), (48, 1)] and len(prefixes_of(model)) == 3 and ran.count((0, 49)) == 1


def test_keys_and_values_of_other_adapters_are_not_reused(ran):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(MODELS["llama"](), config)
    adapted.add_adapter("other", config)
    adapted.eval()
    inputs, model = prompts([(40, 1), (9, 2)]), adapted.base_model.model
    factor = model.model.layers[1].self_attn.v_proj.lora_B["default"].weight
    before = factor.detach().clone()

    def outputs():
        calls = []
        for name in ("default", "other", "default"):
            adapted.set_adapter(name)
            calls += [generate(adapted, inputs, max_new_tokens=4) for _ in range(2)]
        with adapted.disable_adapter():
            calls += [generate(adapted, inputs, max_new_tokens=4) for _ in range(2)]
        with torch.no_grad():
            factor.add_(1)
        return calls + [generate(adapted, inputs, max_new_tokens=4) for _ in range(2)]

    fuseopt.initialize(model, CONFIG)
    got = outputs()
    assert ran == [(0, 49), (48, 1)] * 5
    fuseopt.restore(model)
    with torch.no_grad():
        factor.copy_(before)
    for ours, theirs in zip(got, outputs(), strict=True):
        assert_same_tokens(ours, theirs)


def test_other_constants_and_dtypes_drop_it(llama, ran):
    model, inputs = llama
    generate(model, inputs, max_new_tokens=2)
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5
    assert_as_stock(model, inputs)
    model.double()
    generate(model, inputs, max_new_tokens=2)
    # The first call, that after each change, and that of the restored model.
    assert ran.count((0, 49)) == 4 and ran[-1] == (0, 49) and prefixes_of(model)._pool.dtype is torch.float64


def test_restore_and_deletion_free_it(llama):
    model, inputs = llama
    generate(model, inputs, max_new_tokens=2)
    pool = weakref.ref(prefixes_of(model)._pool)
    fuseopt.restore(model)
    gc.collect()
    assert pool() is None


def test_an_interrupted_copy_leaves_nothing_to_reuse(llama, ran, monkeypatch):
    model, inputs = llama

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(prefix_cache, "store", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(model, inputs, max_new_tokens=2)
    assert len(prefixes_of(model)) == 0
    assert_as_stock(model, inputs)
    assert ran == [(0, 49)] * 3  # that of the restored model too


def test_a_call_that_runs_its_prompt_twice_counts_once(llama, ran, monkeypatch):
    model, inputs = llama
    generate(model, prompts([(40, 1), (9, 3)]), max_new_tokens=2)
    run, again = prefill.run_tokens, lambda *args: run(*args) and run(*args)
    monkeypatch.setattr(prefill, "run_tokens", again)  # as after an early prefill that is discarded
    monkeypatch.setattr(EarlyPrefill, "take", lambda early, arguments, extra, *_, **__: EarlyWork(extra))
    generate(model, inputs, max_new_tokens=2)
    assert list(dict.fromkeys(ran)) == [(0, 49), (32, 17), (48, 1)]
    assert "; 1 of 2 calls reused 32 prompt tokens" in str(fuseopt.report(model))
    # transformers decodes: nothing is reused.
    generate(model, inputs, max_new_tokens=2, prompt_lookup_num_tokens=2)
    assert calls_of(model)[-1].tier is Tier.STOCK
    assert "; 1 of 2 calls reused 32 prompt tokens" in str(fuseopt.report(model))


def test_memory_that_runs_out_takes_it_back(llama, ran, monkeypatch):
    model, inputs = llama
    generate(model, inputs, max_new_tokens=2)
    pool, make = weakref.ref(prefixes_of(model)._pool), DecodeState.__init__

    def failing(state, *args):
        if pool() is not None:
            raise torch.OutOfMemoryError("no memory")
        make(state, *args)

    monkeypatch.setattr(DecodeState, "__init__", failing)
    assert_same_tokens(
        generate(model, inputs, max_new_tokens=90), generate(MODELS["llama"](), inputs, max_new_tokens=90)
    )
    assert pool() is None and ran == [(0, 49)] * 2
    assert "the prefix cache was not used: its memory was freed, since memory ran out" in last_note(model)
    assert calls_of(model)[-1].tier is Tier.DEVICE_LOOP
    monkeypatch.undo()


def test_a_pool_without_memory_is_said(llama, monkeypatch):
    model, inputs = llama

    def failing(cache, state):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(PrefixCache, "_allocate", failing)
    for _ in range(2):
        generate(model, inputs, max_new_tokens=2)
        assert "there was no memory for a prefix cache of 8 MiB" in last_note(model)
        assert calls_of(model)[-1].tier is Tier.DEVICE_LOOP


def _hole(model, inputs):
    inputs["attention_mask"][0, 20] = 0


def _padding_after(model, inputs):
    inputs["attention_mask"][0, -2:] = 0


def _positions(model, inputs):
    inputs["position_ids"] = torch.arange(49)[None] + 3


def _embeddings(model, inputs):
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"]).detach()


def _cache(model, inputs):
    cache = DynamicCache()
    with torch.no_grad():
        model(inputs["input_ids"][:, :20], past_key_values=cache)
    inputs["past_key_values"] = cache


def _chunks(model, inputs):
    inputs["prefill_chunk_size"] = 16


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hole, "the attention mask excludes tokens after the first of a prompt"),
        (_padding_after, "the attention mask excludes tokens after the first of a prompt"),
        (_positions, "position_ids do not count up from 0 in each prompt"),
        (_embeddings, "the model's own forward ran the prompt"),
        (_cache, "the model's own forward ran the prompt"),
        (_chunks, "the model's own forward ran the prompt"),
    ],
)
def test_prompts_that_are_more_than_tokens_are_not_looked_up(llama, change, reason):
    model, inputs = llama
    generate(model, inputs, max_new_tokens=2)
    held, stock = len(prefixes_of(model)), MODELS["llama"]()
    calls = []
    for each in (stock, model):
        changed = {name: value.clone() for name, value in inputs.items()}
        change(each, changed)
        calls.append(generate(each, changed, max_new_tokens=4))
    assert_same_tokens(*calls)
    assert f"the prefix cache was not used: {reason}" in last_note(model) and held == len(prefixes_of(model)) == 3


def test_weights_made_in_inference_mode_are_not_trusted():
    with torch.inference_mode():
        model = MODELS["llama"]()
    fuseopt.initialize(model, CONFIG)
    generate(model, prompts([(40, 1)]), max_new_tokens=2)
    assert "writes to weights made in inference mode cannot be seen" in last_note(model)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_calls_in_inference_mode_share_with_others(llama, ran, mode):
    model, inputs = llama
    with mode():
        generate(model, inputs, max_new_tokens=2)
    generate(model, inputs, max_new_tokens=2)
    with torch.inference_mode():
        generate(model, prompts([(48, 1), (9, 2)]), max_new_tokens=2)
    assert ran == [(0, 49), (48, 1), (32, 25)]


def test_plan_says_for_whom():
    def reason(model, config=CONFIG):
        return next(r.reason for r in fuseopt.plan(model, config).replacements if r.sites[0].path == "generate")

    assert "prefix cache of 8 MiB" in reason(MODELS["llama"]())
    assert "prefix cache" not in reason(MODELS["llama"](), {"generation": {"enable": True}})
    assert "no prefix cache: each token of an encoder's output depends on all of its input" in reason(tiny.t5())


def test_an_encoder_decoder_runs_without(monkeypatch):
    model, stock = tiny.t5(), tiny.t5()
    fuseopt.initialize(model, CONFIG)
    # A prompt of two tokens for the decoder, which transformers runs.
    inputs = {**prompts([(20, 1)]), "decoder_input_ids": tokens(2, 2).to(torch.get_default_device())}
    assert_same_tokens(generate(model, inputs, max_new_tokens=4), generate(stock, inputs, max_new_tokens=4))
    assert "prefix cache" not in str(fuseopt.report(model)).partition("generate():")[2] and not len(prefixes_of(model))


def test_a_pool_smaller_than_a_block_is_said():
    cache, of = PrefixCache(1, lambda: WeightVersions(0, lambda: 0)), (torch.float32, torch.device("cpu"))
    assert cache.find(CacheShape(8, 8, 132, *of), tokens(20, 1), None, None) == "a block takes 1.03 of 1 MiB"
    assert cache.find(CacheShape(8, 8, 128, *of), tokens(20, 1), None, None).start == 0


class Prompts:
    """A PrefixCache of a number of blocks, and a state whose keys and values are its tokens and their positions."""

    def __init__(self, blocks):
        # A block of 1 MiB.
        self.shape = CacheShape(2**12 // BLOCK, 16, 2, torch.float32, torch.device("cpu"))
        self.version = self.sample = 0
        self.cache = PrefixCache(blocks, lambda: WeightVersions(self.version, lambda: self.sample))

    def __call__(self, *parts):
        """Runs a prompt; returns how many of its tokens were cached."""
        ids = prompts(parts)["input_ids"].cpu()
        length = ids.shape[1]
        state = DecodeState(Sizes(1, length + 1), self.shape, 5)
        state.cache.fill_(torch.nan)
        wanted = torch.stack((ids[0], torch.arange(length, device="cpu")), dim=1).float().expand(256, 2, 16, -1, -1)
        state.load_prompt(ids, None, None)
        match = self.cache.find(self.shape, ids, None, None)
        self.cache.load(match, state, ())
        match = self.cache.confirmed(match)
        assert torch.equal(state.cache[:, :, 0, :, : match.start], wanted[:, :, :, : match.start])
        state.cache[:, :, 0, :, match.start : length] = wanted[:, :, :, match.start :]
        assert self.cache.store(match, state) == ""
        return match.start


def test_the_least_recently_used_block_goes_first_and_the_last_of_a_prompt_before_its_first():
    run = Prompts(6)
    assert run((32, 1), (1, 0)) == 0 and run((32, 2), (1, 0)) == 0 and run((32, 3), (1, 0)) == 0
    assert run((32, 1), (1, 0)) == 32  # now prompt 2 is the oldest
    assert run((16, 4), (1, 0)) == 0  # takes the place of its last block
    assert run((32, 1), (1, 0)) == 32 and run((32, 3), (1, 0)) == 32
    assert run((32, 2), (1, 0)) == 16 and len(run.cache) == 6
    # The block of prompt 4 was the oldest, and was evicted for the last block of prompt 2.
    assert run((16, 4), (1, 0)) == 0


def test_a_prompt_longer_than_the_pool_keeps_its_beginning():
    run = Prompts(3)
    assert run((70, 1), (1, 0)) == 0 and run((70, 1), (1, 0)) == 48
    assert run((16, 2), (1, 0)) == 0 and run((70, 1), (1, 0)) == 32


def test_equal_blocks_after_others_are_others():
    run = Prompts(9)
    assert run((16, 1), (16, 2), (1, 0)) == 0
    assert run((16, 2), (16, 1), (1, 0)) == 0
    assert run((16, 2), (16, 2), (1, 0)) == 16
    assert run((16, 1), (16, 2), (1, 0)) == run((16, 2), (16, 1), (1, 0)) == 32
    run.version += 1
    assert run((16, 1), (16, 2), (1, 0)) == 0 and len(run.cache) == 2
    run.sample += 1
    assert run((16, 1), (16, 3), (1, 0)) == 0 and len(run.cache) == 2
    assert run((16, 1), (16, 3), (1, 0)) == 32


@pytest.mark.parametrize("most_copies", [0, 3, 99])
def test_fragmented_places_are_copied_in_order(most_copies, monkeypatch):
    monkeypatch.setattr(prefix_cache, "_MOST_COPIES", most_copies)
    run, generator = Prompts(7), torch.Generator("cpu").manual_seed(0)
    kept = 0
    for _ in range(60):
        first, second = torch.randint(0, 3, (2,), generator=generator, device="cpu").tolist()
        length = int(torch.randint(1, 60, (1,), generator=generator, device="cpu"))
        kept += run((35, first), (length, second)) > 0  # the class compares keys and values
    assert 20 < kept < 60


def test_paths_of_a_gpu_pad_what_is_left_of_a_prompt(llama, ran_padded, as_on_gpu):
    model, inputs = llama
    stock = MODELS["llama"]()
    calls = [inputs, prompts([(40, 1), (19, 3)]), prompts([(40, 1), (21, 4)]), prompts([(40, 1), (21, 5)], [(35, 1)])]
    for each in calls:
        assert_same_tokens(generate(model, each, max_new_tokens=3), generate(stock, each, max_new_tokens=3))
    # 27 and 29 tokens run as 32. In the last call slots 0 to 25 of the second row are padding.
    assert ran_padded[-3:] == [(32, 32), (32, 32), (32, 32)] and ran_padded[0] == (0, 64)


def test_what_is_left_is_not_padded_beyond_the_cache(llama, ran_padded, as_on_gpu):
    model = llama[0]
    stock = MODELS["llama"]()
    for each in (prompts([(80, 1), (9, 2)]), prompts([(80, 1), (40, 3)])):
        assert_same_tokens(generate(model, each, max_new_tokens=3), generate(stock, each, max_new_tokens=3))
    assert ran_padded[-1] == (80, 40)


def flash_attention(query, key, value, queries_begin, keys_begin, longest, most, dropout, causal, debug, **options):
    """What PyTorch's FlashAttention computes with these arguments, in float64."""
    assert causal and not dropout and most >= int(options["seqused_k"].max())
    found = torch.empty_like(query)
    for row, count in enumerate(options["seqused_k"].tolist()):
        queries = query[queries_begin[row] : queries_begin[row + 1]]
        keys, values = (part[keys_begin[row] :][:count].double() for part in (key, value))
        assert len(queries) == longest and len(keys) == count
        shared = query.shape[1] // key.shape[1]
        keys, values = (part.repeat_interleave(shared, dim=1).transpose(0, 1) for part in (keys, values))
        seen = torch.ones(longest, count, dtype=torch.bool).tril(count - longest)
        if options["window_size_left"] is not None:
            seen = seen.triu(count - longest - options["window_size_left"])
        scores = queries.double().transpose(0, 1) @ keys.mT * options["scale"]
        attended = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
        found[queries_begin[row] : queries_begin[row + 1]] = attended.transpose(0, 1)
    return found, None, None, None, None


@pytest.mark.parametrize("each_device", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt"])
def test_one_captured_prompt_serves_any_start(name, as_on_gpu, monkeypatch):
    for module in (prompt_attention, spec_step):
        monkeypatch.setattr(module, "reads_start_on_device", lambda state, attentions: True)
    monkeypatch.setattr(prompt_attention, "_flash_attention", flash_attention)
    keys, run = [], StepGraphs.run_prompt
    monkeypatch.setattr(StepGraphs, "run_prompt", lambda graphs, prompt: keys.append(prompt.key) or run(graphs, prompt))
    model, stock = MODELS[name](), MODELS[name]()
    fuseopt.initialize(model, CONFIG)
    rows = [[(80, 1), (2, 2)], [(80, 5), (2, 6)]]
    for first, new in ((80, 2), (64, 17), (48, 25), (32, 31), (20, 9)):
        inputs = prompts(*([(first, row[0][1]), (new, first)] for row in rows))
        for _ in range(2):
            assert_same_tokens(generate(model, inputs, max_new_tokens=3), generate(stock, inputs, max_new_tokens=3))
    for new in (18, 20, 22):
        inputs = prompts([(64, 1), (new, 90 + new)], [(64, 5), (new, 90 + new)])
        assert_same_tokens(generate(model, inputs, max_new_tokens=3), generate(stock, inputs, max_new_tokens=3))
    # The starts 64, 48 and 32 with 17 to 31 tokens, once each, then 64 again.
    assert [key[-1] for key in keys if key[2] == 32] == [None] * 6 and len({key for key in keys if key[2] == 32}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("each_device", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_one_graph_serves_any_start(name):
    model = MODELS[name]().bfloat16()
    judge, stock = copy.deepcopy(model).double(), copy.deepcopy(model)
    fuseopt.initialize(model, CONFIG)
    for first, new in ((112, 2), (80, 17), (64, 17), (48, 25), (32, 31), (96, 20), (64, 18), (64, 19), (64, 20)):
        seed = 100 * first + new
        inputs = prompts([(first, 1), (new, seed)], [(first, 5), (new, seed + 50)])
        got, by_torch, right = (generate(each, inputs, max_new_tokens=1)[0].logits[0] for each in (model, stock, judge))
        assert (got - right).abs().max() <= 2 * (by_torch - right).abs().max() + 1e-2
        if first < 80:
            assert f"{2 * first} prompt tokens from the prefix cache" in last_note(model)
    starts = [key[-1] for key in model.generate.graphs._prompts if key[2] == 32]
    assert starts == [None]


@pytest.mark.parametrize("each_device", ["cpu"], indirect=True)
def test_a_cache_in_8_bits_is_not_shared(ran):
    config, inputs = {"generation": {"prefix_cache_mib": 8, "cache_dtype": "int8"}}, prompts([(40, 1), (9, 2)])
    reason = "a prompt attends to its keys and values before they are rounded to 8 bits"
    model = MODELS["llama"]()
    assert f"no prefix cache: {reason}" in fuseopt.plan(model, config).replacements[0].reason
    fuseopt.initialize(model, config)
    for _ in range(2):
        generate(model, inputs, max_new_tokens=2)
        assert f"the prefix cache was not used: {reason}" in last_note(model)
    assert ran == [(0, 49)] * 2
    assert "calls reused" not in str(fuseopt.report(model))
