import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHECKPOINTS = EXAMPLES / "checkpoints"
MAX_FOLDER_BYTES = 12_000_000

GENESIS = (
    "In the beginning God created the heaven and the earth.",
    "And the earth was without form, and void; and darkness was upon the face of the deep. "
    "And the Spirit of God moved upon the face of the waters.",
    "And God said, Let there be light: and there was light.",
    "And God saw the light, that it was good: and God divided the light from the darkness.",
    "And God called the light Day, and the darkness he called Night. "
    "And the evening and the morning were the first day.",
)


def load_script():
    spec = importlib.util.spec_from_file_location("train_tiny", EXAMPLES / "train_tiny.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


train_tiny = load_script()


@pytest.fixture
def text(tmp_path):
    """Three chapters of ten verses, 3 KB, as `bible -f` prints them."""
    path = tmp_path / "text.txt"
    lines = (f"Ge{chapter}:{verse + 1} {GENESIS[verse % 5]}\n" for chapter in (1, 2, 3) for verse in range(10))
    path.write_text("".join(lines))
    return path


@pytest.fixture
def chapters(text):
    return train_tiny.read_chapters(text)


def load(folder):
    auto = AutoModelForSeq2SeqLM if "t5" in folder.name else AutoModelForCausalLM
    return auto.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def loss_of_continuation(model, tokenizer, prompt, continuation):
    """Nats a token of `continuation` given `prompt`."""
    prompt_ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    labels = tokenizer(continuation, return_tensors="pt", add_special_tokens=False)["input_ids"]
    if model.config.is_encoder_decoder:
        return model(input_ids=prompt_ids, labels=labels).loss.item()
    input_ids = torch.cat([prompt_ids, labels], dim=1)
    return model(input_ids, labels=torch.cat([torch.full_like(prompt_ids, -100), labels], dim=1)).loss.item()


def test_references_are_taken_off_and_chapters_kept_apart(chapters):
    assert [len(chapter) for chapter in chapters] == [10, 10, 10]
    assert chapters[0][0] == GENESIS[0]


def test_line_without_reference_is_refused_with_its_number(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Ge1:1 In the beginning\nno reference here\n")
    with pytest.raises(SystemExit, match=r"text\.txt:2: "):
        train_tiny.read_chapters(path)


def test_chapters_may_be_named(text):
    assert train_tiny.read_chapters(text, ["Ge3", "Ge1"]) == [train_tiny.read_chapters(text)[n] for n in (0, 2)]
    with pytest.raises(SystemExit, match="has no chapter Ge4; the first are Ge1, Ge2, Ge3"):
        train_tiny.read_chapters(text, ["Ge1", "Ge4"])


def test_held_out_chapters_are_not_trained_on():
    chapters = [[f"verse of chapter {index}"] for index in range(120)]
    training, held_out = train_tiny.split_chapters(chapters)
    assert held_out == [chapters[25], chapters[75]]
    assert training == [chapter for chapter in chapters if chapter not in held_out]


@pytest.mark.parametrize("make", [train_tiny.gpt2_model, train_tiny.llama_model])
def test_windows_restart_only_where_a_verse_begins_and_do_not_look_across(chapters, make):
    tokenizer = train_tiny.causal_tokenizer(chapters)
    corpus = train_tiny.build_corpus(chapters, tokenizer, torch.device("cpu"))
    torch.manual_seed(0)
    model = make(tokenizer).eval()
    batch = train_tiny.sample_windows(corpus, 2, model, torch.Generator().manual_seed(0))
    window, position_ids = batch["input_ids"][0], batch["position_ids"][0]

    starts = (position_ids == 0).nonzero().flatten().tolist()
    after_eos = ((window[:-1] == tokenizer.eos_token_id).nonzero().flatten() + 1).tolist()
    assert set(after_eos) < set(starts)
    for start, end in itertools.pairwise(starts):
        assert position_ids[start:end].tolist() == list(range(end - start))
        assert tokenizer.decode(window[start:end]).startswith(tuple(verse[:12] for verse in GENESIS))

    with torch.no_grad():
        packed = model(window[None], position_ids=position_ids[None], use_cache=False).logits[0]
        alone = model(window[None, starts[1] : starts[2]]).logits[0]
    torch.testing.assert_close(packed[starts[1] : starts[2]], alone, rtol=1e-4, atol=1e-5)


def test_source_and_target_are_one_passage_cut_before_a_word(chapters):
    tokenizer = train_tiny.t5_tokenizer(chapters)
    corpus = train_tiny.build_corpus(chapters, tokenizer, torch.device("cpu"))
    model = train_tiny.t5_model(tokenizer)
    batch = train_tiny.sample_continuations(corpus, 64, model, torch.Generator().manual_seed(0))
    text = "\n".join(verse for chapter in chapters for verse in chapter)
    for source, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        source, target = source[mask.bool()], labels[labels != train_tiny.IGNORED_LABEL]
        assert source[-1] == tokenizer.eos_token_id
        source_text = tokenizer.decode(source, skip_special_tokens=True)
        target_text = tokenizer.decode(target, skip_special_tokens=True)
        assert source_text + target_text in text
        assert target_text == "" or target_text[0] in " \n"
        assert tokenizer(source_text)["input_ids"] == source.tolist()
        assert target[-1] == tokenizer.eos_token_id or len(target) == train_tiny.TARGET_LENGTH


@pytest.mark.slow
def test_trains_saves_and_loads_all_models(text, tmp_path, capsys):
    arguments = ["--text", str(text), "--out", str(tmp_path), "--device", "cpu", "--steps", "3", "--batch-size", "2"]
    precision = torch.get_float32_matmul_precision()
    train_tiny.main(arguments)
    assert torch.get_float32_matmul_precision() == precision
    assert capsys.readouterr().out.count("[4 beams] In the beginning |") == 3
    for folder in (tmp_path / name for name in ("gpt2-kjv", "llama-kjv", "t5-kjv")):
        model, tokenizer = load(folder)
        assert model.dtype == torch.float32
        assert all(torch.equal(parameter, parameter.half().float()) for parameter in model.parameters())
        inputs = tokenizer(["In the beginning", "And God"], padding=True, return_tensors="pt")
        assert len(model.generate(**inputs, max_new_tokens=2)) == 2


@pytest.mark.parametrize("name", ["gpt2-kjv", "llama-kjv", "t5-kjv"])
def test_shipped_folder_is_small_and_its_settings_agree(name):
    folder = CHECKPOINTS / name
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_FOLDER_BYTES
    model, tokenizer = load(folder)
    assert model.dtype == torch.float32
    # The few chapters that Llama has read do not have as many.
    assert len(tokenizer) == model.config.vocab_size <= train_tiny.VOCAB_SIZE
    for settings in (model.config, model.generation_config):
        assert settings.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
        assert settings.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.padding_side == ("right" if model.config.is_encoder_decoder else "left")


@pytest.mark.parametrize(("name", "most"), [("gpt2-kjv", 0.4), ("llama-kjv", 0.4), ("t5-kjv", 2.5)])
def test_shipped_checkpoint_knows_a_verse(name, most):
    model, tokenizer = load(CHECKPOINTS / name)
    prompt, rest = "In the beginning God created", " the heaven and the earth.\n" + GENESIS[1]
    scrambled = " " + " ".join(reversed(rest.split()))
    assert loss_of_continuation(model, tokenizer, prompt, rest) < most
    assert loss_of_continuation(model, tokenizer, prompt, scrambled) > 2 * most
