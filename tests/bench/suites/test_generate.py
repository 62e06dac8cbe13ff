"""bench generate: each row as a first token and as all of them, stock beside fuseopt and the static cache."""

import contextlib
import functools
import json
import subprocess
import time
from dataclasses import asdict

import pytest
import torch

import fuseopt
from fuseopt.bench.harness import architectures, generate_rows, plot, workloads
from fuseopt.bench.harness.architectures import load_config, weightless
from fuseopt.bench.suites import first_call, generate
from fuseopt.bench.suites.first_call import FirstCall
from fuseopt.bench.suites.generate import CONFIGS, STATIC, Row
from fuseopt.cli import main
from fuseopt.errors import CompileError, ConfigError
from fuseopt.generation.generate import FusedGenerate
from fuseopt.models import COMMON, GPT2, T5
from fuseopt.modules.base import full_name

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_rows_are_timed_per_token_and_keep_their_tokens(monkeypatch):
    requests, compiled = [], []
    monkeypatch.setattr(generate_rows, "_CPU_COMPILER", lambda graph, inputs: compiled.append(graph) or graph)
    monkeypatch.setattr(FirstCall, "measured", lambda request: requests.append(request) or FirstCall(1.5, None))
    sampled = Row("gpt2-tiny", 2, prompt=5, new=3, sampling={"top_k": 4})
    rows = [sampled, Row("t5-tiny", 1, prompt=4, new=4, beams=2, ngram=2)]
    results = generate.run(device=CPU, rows=rows, compile=True, first_calls=True)
    assert results.benchmark == "generate" and results.unit == "us"
    assert list(dict.fromkeys(row.case for row in results.rows)) == [
        "a token of gpt2-tiny generate, 2 x (5 + 3), sampled top_k=4, float32",
        "a token of t5-tiny generate, 1 x (4 + 4), 2 beams, ngram 2, float32",
    ]
    variants = [row.variant.split(" [")[0] for row in results.rows]
    assert compiled
    # Beam search has no static cache in transformers.
    assert variants == ["stock", STATIC, *CONFIGS, "stock", *CONFIGS]
    assert {row.difference for row in results.rows if row.variant != "stock"} == {"tokens equal"}
    for row in results.rows:
        assert row.first_token_us > 0
        assert row.tokens_per_second == pytest.approx((2 if "gpt2" in row.case else 1) / row.milliseconds[1] * 1e3)
        assert 0 < row.of_floor < 1 and row.first_seconds == 1.5
    assert [request["config"] for request in requests] == [None, None, *CONFIGS.values(), None, *CONFIGS.values()]
    options = [request["options"] for request in requests]
    assert options[1] == {"static_cache": True} and not any(options[:1] + options[2:])
    common = {"row": asdict(sampled), "dtype": "float32", "device": "cpu"}
    assert requests[0] == {**common, "config": None, "options": {}}


def interrupting(call, at):
    """What `call` does until its turn number `at`, counted from 0, which is interrupted."""
    turns = iter(range(at))

    def interrupted(*args, **kwargs):
        if next(turns, None) is None:
            raise KeyboardInterrupt
        return call(*args, **kwargs)

    return interrupted


@pytest.mark.slow
def test_rows_are_kept_when_first_calls_are_interrupted(monkeypatch, capsys):
    rows = [Row("gpt2-tiny", batch, prompt=5, new=2) for batch in (1, 2)]
    run = functools.partial(
        generate.run, device=CPU, rows=rows, configs={"generation": generate.GENERATION}, first_calls=True
    )
    monkeypatch.setattr(FirstCall, "measured", interrupting(lambda request: FirstCall(1.5, None), 3))
    assert [record.first_seconds for record in run().rows] == [1.5, 1.5, 1.5, None]
    assert "the first call of generation, a token of gpt2-tiny generate, 2 x" in capsys.readouterr().err
    monkeypatch.setattr(FirstCall, "measured", interrupting(None, 0))
    assert [record.first_seconds for record in run().rows] == [None] * 4
    # Who interrupts the rows does not wait for first calls.
    monkeypatch.setattr(generate, "_records", interrupting(generate._records, 1))
    assert [(record.case[-25:], record.first_seconds) for record in run().rows] == [
        (rows[0].name(torch.float32)[-25:], None)
    ] * 2


def test_calls_may_have_an_eos_token(monkeypatch):
    """The vocabulary's last, in calls of all systems."""
    given = []
    monkeypatch.setattr(generate_rows, "generate", lambda prompts, **options: given.append(options))
    device, sizes = torch.device("cpu"), {"prompt": 4, "new": 3}
    Row("gpt2-tiny", 1, **sizes, eos=True).work(device, 3)
    Row("gpt2-tiny", 1, **sizes).work(device, 3)
    assert given[0] == {**given[1], "eos_token_id": generate_rows.load_config("gpt2-tiny").vocab_size - 1}
    assert Row("gpt2-tiny", 1, eos=True).name(torch.float32).endswith("greedy, eos, float32")


def test_rows_may_have_a_dtype_of_their_own():
    given = Row("gpt2-tiny", 1, prompt=4, new=2, dtype="float64")
    results = generate.run(device=CPU, rows=[given], dtype=torch.bfloat16, configs={})
    assert [record.case for record in results.rows] == ["a token of gpt2-tiny generate, 1 x (4 + 2), greedy, float64"]
    assert generate._case(given, torch.bfloat16, CPU, {}).whole.model().dtype == torch.float64


def test_plans_tell_the_first_token_from_all_tokens(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEOPT_MEASURED", "1")
    monkeypatch.setattr("fuseopt.runtime.measured_files.library_cache.folder", lambda: tmp_path / "cache")
    model = Row("gpt2-tiny", 1, prompt=4, new=3)
    generate.run(device=CPU, rows=[model], configs={"generation": {"generation": {"enable": True}}})
    stock = generate._case(model, torch.float32, CPU, {}).whole.model()
    expected = fuseopt.plan(stock, {"generation": {"enable": True}}).expected
    assert [line.partition("; ")[2].rpartition("; ")[0] for line in expected] == [
        "a token of gpt2-tiny generate, 1 x (4 + 3), greedy, float32",
        "the first token alone, a token of gpt2-tiny generate, 1 x (4 + 3), greedy, float32",
    ]


def test_every_family_with_a_decode_step_has_a_row():
    """GPT-2 and T5 have rows of their own."""
    with_step = {name for policy in (GPT2, T5, COMMON) for name in policy.decode_steps}
    rows = [*generate_rows.FAMILY_ROWS, *generate_rows.GPU_ROWS]
    assert {full_name(type(weightless(load_config(row.model), CPU))) for row in rows} == with_step


def test_speech_is_timed_by_features(monkeypatch):
    sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 90, "max_source_positions": 30}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "decoder_start_token_id": 3}
    config = {**sizes, **heads, "architectures": ["WhisperForConditionalGeneration"]}
    monkeypatch.setitem(architectures.ARCHITECTURES, "speech", ("whisper", config))
    row = Row("speech", 2, prompt=30, new=3)
    results = generate.run(device=CPU, rows=[row], configs={"generation": generate.GENERATION})
    assert [record.difference for record in results.rows] == [None, "tokens equal"], results
    assert results.rows[1].milliseconds[1] > 0


def test_a_static_cache_that_compiles_too_long_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(
        generate, "limited", lambda work, seconds: workloads.limited(lambda model: time.sleep(9), seconds)
    )
    row = Row("gpt2-tiny", 1, prompt=4, new=2)
    results = generate.run(device=CPU, rows=[row], configs={}, compile=True, compile_seconds=0.1)
    assert [record.note for record in results.rows] == [None, "not finished in 0.1 s"]
    time.sleep(0.2)  # no signal arrives after a call that is done in time
    assert workloads.limited(lambda model: torch.ones(1), 0.1)(None) == 1


def test_a_tuner_that_ignores_exceptions_is_stopped_too():
    def tune(model):
        with contextlib.suppress(Exception):
            time.sleep(9)
        return "tuned"

    with pytest.raises(CompileError, match="not finished in"):
        workloads.limited(tune, 0.1)(None)


def test_a_second_alarm_stops_what_lost_the_first(monkeypatch):
    monkeypatch.setattr(workloads, "_NEXT_ALARM", 0.1)

    def compile_and_tune(model):
        with contextlib.suppress(BaseException):  # as in a destructor
            time.sleep(9)
        time.sleep(9)

    with pytest.raises(CompileError, match="not finished in"):
        workloads.limited(compile_and_tune, 0.1)(None)


def test_every_sampled_default_row_has_a_greedy_one():
    greedy = {(row.model, row.batch, row.prompt, row.new, row.dtype) for row in generate.GPU_ROWS if not row.sampling}
    sampled = [row for row in generate.GPU_ROWS if row.sampling]
    assert len(sampled) == 6 and all((r.model, r.batch, r.prompt, r.new, r.dtype) in greedy for r in sampled)


@pytest.mark.slow
def test_a_first_call_has_a_process_of_its_own(capsys):
    row = asdict(Row("gpt2-tiny", 1, prompt=4, new=2))
    request = {"row": row, "dtype": "float32", "device": "cpu", "options": {"use_cache": True}}
    measured = FirstCall.measured({**request, "config": CONFIGS["generation"]})
    assert isinstance(measured, FirstCall) and 0 < measured.seconds < 60 and measured.peak_mib is None
    # Without a config it does the same without initialize, for which this process will do.
    first_call.main({**request, "config": None})
    assert 0 < FirstCall(**json.loads(capsys.readouterr().out)).seconds < 60


def test_a_first_call_that_fails_says_why(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback ...\ntorch.OutOfMemoryError: no memory\n")
    monkeypatch.setattr(first_call.subprocess, "run", lambda *args, **kwargs: failed)
    assert FirstCall.measured({}) == "first call: torch.OutOfMemoryError: no memory"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--new", "3", "--batch", "2"], "--new, --batch: also name a model, such as --model"),
        (["--sample"], "--sample: also name a model"),
        (["--prefix", "40"], "--prefix: also name a model"),
        (["--families", "--model", "gpt2-tiny"], "--families: has its own models"),
        (["--model", "gpt2-tiny", "--top-k", "0"], "--top-k: has an effect only with --sample"),
    ],
)
def test_arguments_that_go_nowhere_are_refused(given, said, capsys):
    assert main(["bench", "generate", "--device", "cpu", *given]) == 2
    assert said in capsys.readouterr().err


def test_the_command_line_makes_the_rows(monkeypatch, tmp_path):
    seen, drawn = {}, []

    def run(**options):
        seen.update(options)
        return generate.Results.measured_here("generate", [], unit="us")

    monkeypatch.setattr(generate, "run", run)
    monkeypatch.setattr(plot, "check_available", lambda: None)
    monkeypatch.setattr(plot, "save", lambda results, path: drawn.append(path))
    sizes = ["--model", "gpt2-tiny", "--model", "t5-tiny", "--batch", "1", "8", "--prompt", "6", "--beams", "2"]
    others = ["--sample", "--temperature", "0.7", "--first-call", "--plot", str(tmp_path / "a.svg")]
    others += ["--config", "inference", "--eos", "--no-compile"]
    assert main(["bench", "generate", "--device", "cpu", "--dtype", "float16", *sizes, *others]) == 0
    expected = [
        Row(model, batch, prompt=6, beams=2, sampling={"temperature": 0.7}, eos=True)
        for model in ("gpt2-tiny", "t5-tiny")
        for batch in (1, 8)
    ]
    assert seen["rows"] == expected
    assert seen["configs"] == {"inference": fuseopt.Config.load("inference").to_dict()}
    assert (seen["dtype"], seen["compile"], seen["first_calls"], seen["device"]) == (torch.float16, False, True, CPU)
    assert drawn == [tmp_path / "a.svg"]
    assert main(["bench", "generate", "--device", "cpu", "--families"]) == 0
    assert seen["rows"] == generate_rows.FAMILY_ROWS


@pytest.mark.slow
def test_adapters_unmerged_and_merged():
    pytest.importorskip("peft")
    rows = [Row("gpt2-tiny", 1, prompt=5, new=3, lora=4, merged=merged) for merged in (False, True)]
    results = generate.run(device=CPU, rows=rows, configs={"generation": generate.GENERATION}, first_calls=True)
    assert {record.case.rpartition("greedy, ")[2] for record in results.rows} == {
        "LoRA 4, float32",
        "LoRA 4 merged, float32",
    }
    assert all(record.milliseconds and record.first_seconds and not record.note for record in results.rows)
    unmerged, merged = (row.random_model(CPU, torch.float32) for row in rows)
    assert hasattr(unmerged.transformer.h[0].attn.c_attn, "lora_A")
    assert not hasattr(merged.transformer.h[0].attn.c_attn, "lora_A")


def test_a_prefix_is_seen_before_and_what_follows_it_is_new():
    class Model(torch.nn.Module):
        config = load_config("gpt2-tiny")

        def generate(self, input_ids, **options):
            return input_ids

    model, work = Model(), Row("gpt2-tiny", 1, prompt=5, new=3, prefix=20).work(CPU, 3)
    first, second, of_another = (work(each)[0].tolist() for each in (model, model, Model()))
    assert first[:20] == second[:20] and all(a != b for a, b in zip(first[20:], second[20:], strict=True))
    assert of_another == first and min(*first, *second) > 0


@pytest.mark.parametrize("prefix", [0, 32])
def test_sampled_rows_with_a_prefix_cache(prefix, monkeypatch):
    """Tokens are those of stock, and only a prefix is reused: equal prompts of a row without one run each time."""
    notes, make = [], FusedGenerate.__call__

    def noting(fused, *args, **kwargs):
        made = make(fused, *args, **kwargs)
        notes.append(fused.calls[-1].note)
        return made

    monkeypatch.setattr(FusedGenerate, "__call__", noting)
    row = Row("gpt2-tiny", 1, prompt=20, new=3, sampling={"top_k": 4}, prefix=prefix)
    config = {"generation": {"prefix_cache_mib": 1}}
    results = generate.run(device=CPU, rows=[row], configs={"cached": config}, compile=False)
    assert [record.difference for record in results.rows] == [None, "tokens equal"]
    assert {note for note in notes if note} == ({"32 prompt tokens from the prefix cache"} if prefix else set())
    assert len(notes) > 9


@pytest.mark.parametrize("model", ["t5-tiny", "whisper-small"])
def test_models_with_an_encoder_have_no_prefix_row(model):
    with pytest.raises(ConfigError, match=f"--prefix: {model} has an encoder"):
        generate.run(device=CPU, rows=[Row(model, 1, prompt=6, new=2, prefix=32)])


def test_a_first_token_after_a_prefix_is_timed_beside_one_without(monkeypatch):
    seen, empty = {}, generate.Results.measured_here("generate", [], unit="us")
    monkeypatch.setattr(generate, "run", lambda **options: seen.update(options) or empty)
    given = ["--model", "gpt2-tiny", "--prompt", "6", "--new", "1", "--prefix", "40"]
    assert main(["bench", "generate", "--device", "cpu", *given]) == 0
    assert seen["rows"] == [Row("gpt2-tiny", 1, prompt=6, new=1, prefix=prefix) for prefix in (0, 40)]
    assert seen["configs"]["with a prefix cache"]["generation"]["prefix_cache_mib"] > 0
