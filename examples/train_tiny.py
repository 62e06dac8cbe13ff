"""Train the checkpoints in `examples/checkpoints` from scratch: GPT-2, Llama and T5 that know the King James Bible.

    python examples/train_tiny.py --model all --out examples/checkpoints

The text is public domain. It comes from Debian's packages `bible-kjv` and `bible-kjv-text`: after
`sudo apt-get install bible-kjv bible-kjv-text` this script calls the `bible` program. Without it, but on a machine
with apt, the two packages are downloaded and unpacked under `.data`, which needs no root. Elsewhere, give
`--text FILE`, one verse a line behind its reference: `Ge1:1 In the beginning God created the heaven and the earth.`

All models learn passages of up to four verses. GPT-2 and Llama read them as one stream. T5 reads the beginning of a
passage in the encoder and writes the rest in the decoder. The aim is to know the text by heart, so that the next token
is rarely a close call; one chapter in fifty is held out, and its loss is reported beside that of the training text.
"""

import argparse
import copy
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    get_cosine_schedule_with_warmup,
)

ROOT = Path(__file__).resolve().parents[1]
WHOLE_BIBLE = "Gen1:1-Rev22:21"
REFERENCE = re.compile(r"(?P<chapter>\w+):\d+ ")

VERSES_PER_PASSAGE = 4
HELD_OUT_EVERY = 50
VOCAB_SIZE = 4096
CONTEXT = 256
RESTART_PROBABILITY = 0.5
SOURCE_LENGTH = 64
LONGEST_CUT = 52
TARGET_LENGTH = 96
IGNORED_LABEL = -100

PROMPTS = (
    "In the beginning",
    "And God said, Let there be",
    "The LORD is my shepherd; I shall",
    "For God so loved the world, that he gave",
    "And it came to pass, when Moses",
)


def fetch_text(folder: Path) -> Path:
    """The King James text as `folder/kjv.txt`, made once, from the `bible` program or from Debian's packages by apt."""
    path = folder / "kjv.txt"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("bible"):
        command = ["bible", "-f", WHOLE_BIBLE]
    elif shutil.which("apt-get") and shutil.which("dpkg-deb"):
        subprocess.run(["apt-get", "download", "bible-kjv", "bible-kjv-text"], cwd=folder, check=True)
        for package in sorted(folder.glob("bible-kjv*.deb")):
            subprocess.run(["dpkg-deb", "--extract", package, folder / "bible-kjv"], check=True)
        unpacked = folder / "bible-kjv" / "usr"
        command = [str(unpacked / "bin" / "bible"), "-f", "-p", str(unpacked / "lib"), WHOLE_BIBLE]
    else:
        raise SystemExit("no text: install Debian's packages bible-kjv and bible-kjv-text, or give --text FILE")
    verses = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    path.write_text(verses, encoding="utf-8")
    return path


def read_chapters(path: Path, names: Sequence[str] = ()) -> list[list[str]]:
    """Verses by chapter, references taken off, in the order of the file; of `names` only, if there are any."""
    chapters: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        reference = REFERENCE.match(line)
        if reference is None:
            raise SystemExit(
                f"{path}:{number}: a verse starts with its reference, as in 'Ge1:1 In the', not {line[:30]!r}"
            )
        chapters.setdefault(reference["chapter"], []).append(line[reference.end() :])
    unknown = sorted({*names} - {*chapters})
    if unknown:
        raise SystemExit(f"{path} has no chapter {', '.join(unknown)}; the first are {', '.join([*chapters][:3])}")
    return [verses for name, verses in chapters.items() if not names or name in names]


def split_chapters(chapters: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """(training chapters, held-out chapters): the middle one of every fifty is held out, and at least the last one."""
    held_out = set(range(HELD_OUT_EVERY // 2, len(chapters), HELD_OUT_EVERY)) or {len(chapters) - 1}
    training = [chapter for index, chapter in enumerate(chapters) if index not in held_out]
    return training, [chapters[index] for index in sorted(held_out)]


def train_tokenizer(chapters: list[list[str]], special_tokens: list[str]) -> Tokenizer:
    """A byte-level BPE of at most `VOCAB_SIZE` tokens; the special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(("\n".join(chapter) for chapter in chapters), trainer)
    return tokenizer


def causal_tokenizer(chapters: list[list[str]]) -> PreTrainedTokenizerFast:
    """GPT-2's conventions: `<|endoftext|>` begins and ends, nothing is added to a prompt; pads on the left."""
    end, pad = "<|endoftext|>", "<|pad|>"
    return PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(chapters, [end, pad]),
        bos_token=end,
        eos_token=end,
        pad_token=pad,
        padding_side="left",
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def t5_tokenizer(chapters: list[list[str]]) -> PreTrainedTokenizerFast:
    """T5's conventions: `<pad>` is 0, `</s>` is 1 and ends every text; pads on the right."""
    pad, end = "<pad>", "</s>"
    tokenizer = train_tokenizer(chapters, [pad, end])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=pad,
        padding_side="right",
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def gpt2_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """4 layers of 256 in 4 heads, learned positions up to `CONTEXT`, no dropout."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        n_embd=256,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GPT2LMHeadModel(config)


def llama_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """4 layers of 256 in 4 heads, 2 of keys and values, positions up to `CONTEXT`, tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def t5_model(tokenizer: PreTrainedTokenizerFast) -> T5ForConditionalGeneration:
    """T5 v1.0 (ReLU, tied embeddings): 3 + 3 layers of 256 in 4 heads of 64, no dropout."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=256,
        d_kv=64,
        d_ff=768,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return T5ForConditionalGeneration(config)


@dataclass(frozen=True)
class Corpus:
    """Passages on the device as one stream of tokens: verses joined by a newline, each passage ended by EOS.

    Attributes:
        tokens: [tokens] int64.
        begins_verse: [tokens] bool, true at each verse's first token.
        verse_starts: [verses] int64, offset of each verse's first token.
        passage_ends: [verses] int64, offset just past the EOS of the passage that the verse belongs to.
        next_words: [tokens] int64, offset of the first token at or after each token that starts a word or is EOS.
    """

    tokens: Tensor
    begins_verse: Tensor
    verse_starts: Tensor
    passage_ends: Tensor
    next_words: Tensor


def build_corpus(chapters: list[list[str]], tokenizer: PreTrainedTokenizerFast, device: torch.device) -> Corpus:
    """Tokenize `chapters`, cut them into passages and put the result on `device`."""
    (newline,) = tokenizer.encode("\n", add_special_tokens=False)
    tokens: list[int] = []
    verse_starts: list[int] = []
    passage_ends: list[int] = []
    for chapter in chapters:
        verses = tokenizer(chapter, add_special_tokens=False)["input_ids"]
        for first in range(0, len(verses), VERSES_PER_PASSAGE):
            passage = verses[first : first + VERSES_PER_PASSAGE]
            for verse in passage:
                verse_starts.append(len(tokens))
                tokens += [*verse, newline]
            tokens[-1] = tokenizer.eos_token_id
            passage_ends += [len(tokens)] * len(passage)

    starts_word = [
        token in (newline, tokenizer.eos_token_id) or text.startswith("Ġ")
        for token, text in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    ]
    next_words = list(range(len(tokens)))
    for offset in reversed(range(len(tokens) - 1)):
        if not starts_word[tokens[offset]]:
            next_words[offset] = next_words[offset + 1]

    verse_offsets = torch.tensor(verse_starts, device=device)
    begins_verse = torch.zeros(len(tokens), dtype=torch.bool, device=device)
    begins_verse[verse_offsets] = True
    return Corpus(
        tokens=torch.tensor(tokens, device=device),
        begins_verse=begins_verse,
        verse_starts=verse_offsets,
        passage_ends=torch.tensor(passage_ends, device=device),
        next_words=torch.tensor(next_words, device=device),
    )


Batch = dict[str, Tensor]


def sample_windows(corpus: Corpus, batch_size: int, model: PreTrainedModel, generator: torch.Generator) -> Batch:
    """Batch of GPT-2 and Llama: windows [batch_size, CONTEXT] of the stream, a ring, each from the start of a verse.

    Position 0 returns at every passage and at every second verse or so. transformers keeps tokens from attending across
    such a return, so the model sees texts that begin at any verse, as prompts do, and learns to go on after few words.
    """
    device = corpus.tokens.device
    columns = torch.arange(CONTEXT, device=device)
    verses = torch.randint(len(corpus.verse_starts), (batch_size, 1), generator=generator, device=device)
    offsets = (corpus.verse_starts[verses] + columns) % len(corpus.tokens)
    windows = corpus.tokens[offsets]
    after_passage = windows.roll(1, dims=1) == model.config.eos_token_id
    chosen = torch.rand(windows.shape, generator=generator, device=device) < RESTART_PROBABILITY
    restarts = corpus.begins_verse[offsets] & (after_passage | chosen)
    position_ids = columns - columns.where(restarts, 0).cummax(dim=1).values
    return {"input_ids": windows, "position_ids": position_ids, "labels": windows}


def sample_continuations(corpus: Corpus, batch_size: int, model: PreTrainedModel, generator: torch.Generator) -> Batch:
    """T5's batch: passages from the start of a verse on, cut in two before a word.

    Source [batch_size, SOURCE_LENGTH] is the beginning and EOS, target [batch_size, TARGET_LENGTH] the rest with EOS.
    """
    device = corpus.tokens.device
    verses = torch.randint(len(corpus.verse_starts), (batch_size, 1), generator=generator, device=device)
    starts, ends = corpus.verse_starts[verses], corpus.passage_ends[verses]
    longest_source = (ends - starts - 1).clamp(max=LONGEST_CUT)
    fractions = torch.rand(verses.shape, generator=generator, device=device)
    cuts = corpus.next_words[starts + 1 + (fractions * (longest_source - 1)).long()]

    def span(begins: Tensor, ends: Tensor, width: int) -> tuple[Tensor, Tensor]:
        offsets = begins + torch.arange(width, device=device)
        return corpus.tokens[offsets.clamp(max=len(corpus.tokens) - 1)], offsets < ends

    source, in_source = span(starts, cuts, SOURCE_LENGTH)
    source = source.where(in_source, model.config.pad_token_id)
    source.scatter_(1, (cuts - starts).clamp(max=SOURCE_LENGTH - 1), model.config.eos_token_id)
    target, in_target = span(cuts, ends, TARGET_LENGTH)
    return {
        "input_ids": source,
        "attention_mask": (source != model.config.pad_token_id).long(),
        "labels": target.where(in_target, IGNORED_LABEL),
    }


@dataclass(frozen=True)
class Recipe:
    """How one checkpoint is made: its builders, its batches and the optimizer's settings."""

    folder: str
    tokenizer: Callable[[list[list[str]]], PreTrainedTokenizerFast]
    model: Callable[[PreTrainedTokenizerFast], PreTrainedModel]
    sample: Callable[[Corpus, int, PreTrainedModel, torch.Generator], Batch]
    steps: int
    batch_size: int
    learning_rate: float
    autocast: bool
    weight_decay: float = 0.01
    warmup: float = 0.03


RECIPES = {
    "gpt2": Recipe("gpt2-kjv", causal_tokenizer, gpt2_model, sample_windows, 2500, 128, 2e-3, autocast=True),
    "llama": Recipe("llama-kjv", causal_tokenizer, llama_model, sample_windows, 500, 4, 2e-3, autocast=True),
    # In bfloat16 autocast, at a rate of 2e-3, its loss became NaN within 500 steps (torch 2.11, H200).
    "t5": Recipe("t5-kjv", t5_tokenizer, t5_model, sample_continuations, 7000, 192, 1.5e-3, autocast=False),
}


def fit(model: PreTrainedModel, corpus: Corpus, recipe: Recipe, steps: int, batch_size: int, seed: int) -> None:
    """Train `model` in place: AdamW, linear warm-up then cosine; on a GPU in bfloat16 autocast or TF32.

    Raises:
        FloatingPointError: the loss is no longer a number.
    """
    device = corpus.tokens.device
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay, fused=True
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, int(recipe.warmup * steps), steps)
    model.train()
    with tqdm(range(steps), desc=recipe.folder, mininterval=1.0) as progress:
        for step in progress:
            with torch.autocast(device.type, torch.bfloat16, enabled=recipe.autocast and device.type == "cuda"):
                loss = model(**recipe.sample(corpus, batch_size, model, generator), use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step % 50 == 0:  # reading the loss waits for the GPU
                if not loss.isfinite():
                    raise FloatingPointError(f"{recipe.folder}: the loss is {loss.item()} at step {step}")
                progress.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()


@torch.no_grad()
def round_to_half(model: PreTrainedModel) -> None:
    """Round every parameter to a float16 value, so that the losses reported are those of the file shipped."""
    for parameter in model.parameters():
        parameter.copy_(parameter.half())


@torch.no_grad()
def mean_loss(model: PreTrainedModel, corpus: Corpus, recipe: Recipe, batch_size: int, batches: int = 8) -> float:
    """Cross-entropy a token, in nats and float32, over random batches that are the same in every call."""
    generator = torch.Generator(corpus.tokens.device).manual_seed(0)
    samples = (recipe.sample(corpus, batch_size, model, generator) for _ in range(batches))
    return torch.stack([model(**sample, use_cache=False).loss for sample in samples]).mean().item()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, facts: dict, folder: Path) -> None:
    """Write float16 weights beside a config that says float32, tokenizer files and `training.json`.

    transformers loads in the dtype of the config, so a bare `from_pretrained` gives a float32 model.
    """
    model.save_pretrained(folder, state_dict=copy.deepcopy(model).half().state_dict())
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=2) + "\n")


def show_continuations(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Print what the model makes of `PROMPTS`: greedy, four beams, and one sample."""
    ways = {"greedy": {}, "4 beams": {"num_beams": 4}, "sampled": {"do_sample": True, "top_k": 0}}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        for way, options in ways.items():
            output = model.generate(**inputs, max_new_tokens=60, **options)[0]
            if not model.config.is_encoder_decoder:
                output = output[inputs["input_ids"].shape[1] :]
            text = tokenizer.decode(output, skip_special_tokens=True).replace("\n", " / ")
            print(f"  [{way}] {prompt} |{text}")


def train(name: str, chapters: list[list[str]], args: argparse.Namespace) -> None:
    """Train one model on `chapters`, report its losses and continuations, and save it under `args.out`."""
    recipe = RECIPES[name]
    steps = args.steps or recipe.steps
    batch_size = args.batch_size or recipe.batch_size
    device = torch.device(args.device)
    started = time.perf_counter()

    torch.manual_seed(args.seed)
    training_chapters, held_out_chapters = split_chapters(chapters)
    tokenizer = recipe.tokenizer(training_chapters)
    training_corpus = build_corpus(training_chapters, tokenizer, device)
    held_out_corpus = build_corpus(held_out_chapters, tokenizer, device)
    model = recipe.model(tokenizer).to(device)
    fit(model, training_corpus, recipe, steps, batch_size, args.seed)
    round_to_half(model)

    facts = {
        "parameters": model.num_parameters(),
        "training_tokens": len(training_corpus.tokens),
        "held_out_tokens": len(held_out_corpus.tokens),
        "steps": steps,
        "batch_size": batch_size,
        "learning_rate": recipe.learning_rate,
        "seed": args.seed,
        "training_loss": round(mean_loss(model, training_corpus, recipe, batch_size), 4),
        "held_out_loss": round(mean_loss(model, held_out_corpus, recipe, batch_size), 4),
        "seconds": round(time.perf_counter() - started, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(facts, indent=2))
    save(model, tokenizer, facts, args.out / recipe.folder)
    show_continuations(model, tokenizer)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*RECIPES, "all"], default="all")
    parser.add_argument(
        "--text", type=Path, help="one verse a line, as `bible -f` prints it (default: fetched into .data)"
    )
    parser.add_argument("--chapters", nargs="+", default=[], metavar="NAME", help="such as Ge1 (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "checkpoints", help="(default: %(default)s)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps a model (default: what the shipped ones were given)")
    parser.add_argument("--batch-size", type=int, help="rows a step (default: what the shipped ones were given)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=args.out).close()  # raises here, and not after training, if nothing can be written
    chapters = read_chapters(args.text or fetch_text(ROOT / ".data"), args.chapters)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for name in RECIPES if args.model == "all" else [args.model]:
            train(name, chapters, args)
    finally:
        torch.set_float32_matmul_precision(precision)


if __name__ == "__main__":
    main()
