"""bench kernels: the steps in a trace, what a kernel adds to them, and whose bytes it reads."""

import pytest
import torch

from fuseopt.bench.suites import kernels
from fuseopt.bench.suites.generate import Row
from fuseopt.bench.suites.kernels import ALL, IDLE, Launch, Read, Reads, bytes_of, records_of, short_name, steady_steps
from fuseopt.cli import main
from fuseopt.errors import ConfigError

STEP = ["embed", "linear", "attend", "linear", "linear", "attend", "linear", "select"]


def trace(steps: int, step: list[str] = STEP) -> list[Launch]:
    """A prompt, then steps whose kernels run 5 us each, start 2 us before the last has ended, and 1 us apart."""
    launches, now = [Launch("prompt", 0.0, 50.0)], 50.0
    for _ in range(steps):
        now += 3.0
        for name in step:
            launches.append(Launch(name, now - 2.0, now + 3.0))
            now += 3.0
    return launches


def test_every_step_of_the_middle_is_found_and_no_other():
    launches = trace(20)
    starts = steady_steps(launches)
    assert starts.step == len(STEP) and len(starts) == 10
    for start in starts:
        assert sorted(launch.name for launch in launches[start : start + len(STEP)]) == sorted(STEP)
    assert not steady_steps(trace(1, [str(i) for i in range(40)]))
    # The call takes over from steps that were queued ahead of it.
    launches = trace(40)
    launches.insert(1 + 12 * len(STEP), Launch("copy", launches[12 * len(STEP)].end, launches[12 * len(STEP)].end))
    starts = steady_steps(launches)
    assert starts.step == len(STEP) and len(starts) == 10 and starts[0] > len(launches) // 2 - 1
    assert not steady_steps([])


def test_times_add_up_to_the_step():
    reads = [Read("linear", size) for size in (100, 200, 100, 200)]
    reads = [Read("embed", None), reads[0], Read("attend", 7), *reads[1:3], Read("attend", 9), reads[3]]
    rows = {row.variant: row for row in records_of("case", trace(40), reads, 6400, bandwidth=1e9)}
    whole = rows[ALL]
    # Seven kernels add 3 us, the first one 5 us and 1 us before it.
    assert whole.milliseconds[1] == pytest.approx(0.027) and whole.launches == 8 and whole.share == pytest.approx(1)
    assert whole.of_floor == pytest.approx(6.4 / 27) and whole.gigabytes_per_second == pytest.approx(6400 / 27e-6 / 1e9)
    assert rows[IDLE].milliseconds[1] == pytest.approx(0.001) and rows[IDLE].share == pytest.approx(1 / 27)
    assert set(rows) == {
        ALL,
        IDLE,
        "embed",
        "select",
        "linear, 0.0001 MB",
        "linear, 0.0002 MB",
        "attend, 7e-06 MB",
        "attend, 9e-06 MB",
    }
    assert rows["embed"].milliseconds[1] == pytest.approx(0.006) and rows["embed"].kernel_us == pytest.approx(5)
    assert rows["linear, 0.0002 MB"].launches == 2 and rows["linear, 0.0002 MB"].bytes == 200
    kernels_alone = [row for name, row in rows.items() if name not in (ALL, IDLE)]
    assert sum(row.share for row in kernels_alone) == pytest.approx(1)
    assert sum(row.launches * row.milliseconds[1] for row in kernels_alone) == pytest.approx(0.027)
    # Flags are copied to the host every few steps, which makes no steps of these.
    launches = trace(40)
    for place in range(len(launches) - 4 * len(STEP), 0, -4 * len(STEP)):
        end = launches[place].start
        launches.insert(place, Launch("Memcpy DtoH (Device -> Pinned)", end - 1.0, end - 0.5))
    copied = {row.variant: row for row in records_of("case", launches, reads, 6400, bandwidth=1e9)}
    assert {name: row.launches for name, row in copied.items()} == {name: row.launches for name, row in rows.items()}
    (none,) = records_of("case", trace(0), reads, 1, 1.0)
    assert none.milliseconds is None and "no two steps" in none.note


def test_bytes_go_to_the_kernels_of_their_op_wherever_the_list_begins():
    reads = [Read("embed", 1), Read("linear", 2), Read("attend", 3), Read("linear", 4), Read("select", None)]
    names = ["embed_kernel", "linear<1>", "attend<2>", "linear<3>", "chunk", "finish"]
    for shift in range(len(names)):
        rotated = names[shift:] + names[:shift]
        expected = dict(zip(names, [1, 2, 3, 4, None, None], strict=True))
        assert bytes_of(rotated, reads) == [expected[name] for name in rotated]
    # More launches than calls: whose bytes are whose is not known.
    assert bytes_of([*names, "linear<4>"], reads) == [1, None, 3, None, None, None, None]
    # Nothing says where the lists begin.
    assert bytes_of(["linear", "linear"], [Read("linear", 2), Read("linear", 4)]) == [None, None]


def test_bytes_are_of_all_arguments_but_as_far_as_a_cache_is_filled():
    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    raw, query, cache, row = torch.ops.fuseopt, make(2, 3, 4), make(2, 3, 20, 4), 2 * 3 * 4 * 2
    slot = torch.empty(1, dtype=torch.int64, device="meta")
    with Reads(filled=11) as reads:
        weights = [make(16, 8), make(16, 8)]
        raw.decode_linear(make(2, 8), weights, [], None, "", None, None, 1e-5, "", False, False, [make(99)])
        # How far each row of the cache is filled has to be known.
        real = (torch.zeros_like(tensor, device="cpu") for tensor in (query, cache, cache))
        raw.decode_attention(*real, None, None, torch.tensor([5, 7]), None, None, None, 1.0, False)
        of_heads = (None, None, False, None, None, 1e-6, 0.0, 0, 0.0)
        scales, eight = make(2, 3, 20).float(), cache.to(torch.int8)
        for caches in ((cache, cache, None, None), (eight, eight, scales, scales)):
            raw.decode_attention_(query, query, query, *caches, slot, None, None, None, None, 1.0, *of_heads, False)
        ids = torch.empty(2, 5, dtype=torch.int64, device="meta")
        end = (ids[:, 0], ids, ids[0, :1], ids[:, 0] > 0, ids[0, 0] > 0, ids[0, :1], None, [], True)
        of_norm = ("rms_norm", make(8), None, 1e-5)
        raw.decode_head_select_(make(2, 8), None, make(9, 8), *of_norm, [make(99)], *end)
        addends = raw.decode_linear_partials(make(2, 8), make(8, 8), None, False, [make(99)])
        raw.decode_linear_of_sum(make(2, 8), addends, make(16, 8), make(16), *of_norm, False, [])
        raw.decode_head_select_(make(2, 8), addends, make(9, 8), *of_norm, [], *end)
        heads = make(1, 3, 20, 4)
        of_cache = (heads, heads, slot, None, 1.0)
        raw.decode_qkv_attention_(make(1, 8), make(36, 8), make(36), *of_cache, *of_norm, False)
        torch.zeros(3).sum()
    assert [(call.op, call.bytes) for call in reads.calls] == [
        ("decode_linear", 2 * (2 * 8 + 2 * 16 * 8)),
        ("decode_attention", row * (1 + 2 * 7) + 16),
        ("decode_attention", row * (3 + 2 * 11) + 8),
        ("decode_attention", row * 3 + 2 * 2 * 3 * 11 * (4 + 4) + 8),
        ("decode_linear", 2 * (2 * 8 + 9 * 8 + 8)),
        ("decode_select", None),
        ("decode_linear", 2 * (2 * 8 + 8 * 8)),
        ("decode_linear", 2 * (2 * 8 + 16 * 8 + 16 + 8) + 4 * 2 * 2 * 8),
        ("decode_linear", 2 * (2 * 8 + 9 * 8 + 8) + 4 * 2 * 2 * 8),
        ("decode_select", None),
        ("decode_qkv_attention", 2 * (8 + 36 * 8 + 36 + 8) + 2 * 2 * 3 * 4 * 11 + 8),
    ]


def test_a_step_is_what_runs_between_two_tokens():
    reads = Reads(0)
    ran = ["decode_linear", "decode_select", "decode_embedding", "decode_linear", "decode_select", "decode_linear"]
    reads.calls = [Read(op, place) for place, op in enumerate(ran)]
    assert [call.bytes for call in reads.of_a_step()] == [2, 3, 4]
    reads.calls = reads.calls[:3]
    assert reads.of_a_step() == []


def test_names_without_types_of_arguments():
    full = "void fuseopt::decode_linear<__nv_bfloat16, (fuseopt::Layout)1, true>(fuseopt::Layer<__nv_bfloat16>)"
    assert short_name(full) == "decode_linear<bfloat16, (Layout)1, true>"
    assert short_name("void fuseopt::(anonymous namespace)::finish_kernel<float>(int)") == "finish_kernel<float>"
    assert short_name("Memcpy DtoH (Device -> Pinned)") == "Memcpy DtoH "
    assert short_name("nvjet_sm90_tst_384x64") == "nvjet_sm90_tst_384x64"


def test_it_takes_a_gpu(capsys):
    with pytest.raises(ConfigError, match="bench kernels: needs a GPU, not cpu; "):
        kernels.run(device=torch.device("cpu"))
    assert main(["bench", "kernels", "--device", "cpu", "--model", "gpt2-tiny"]) == 2
    assert main(["bench", "kernels", "--batch", "2"]) == 2
    assert "--batch: also name a model" in capsys.readouterr().err


@pytest.mark.gpu
def test_kernels_of_a_model():
    rows = [Row("gpt2-tiny", 2, prompt=8, new=40), Row("t5-tiny", 2, prompt=8, new=40, beams=2, ngram=2)]
    results = kernels.run(device=torch.device("cuda"), rows=rows)
    for row in rows:
        of_row = [record for record in results.rows if record.case.startswith(row.name(torch.bfloat16))]
        assert [of_row[0].variant, of_row[-1].variant] == [ALL, IDLE] and of_row[0].note is None
        layers = [record for record in of_row if record.variant.startswith("decode_linear")]
        assert sum(record.launches for record in layers) >= 4 and all(record.bytes for record in layers)
        assert sum(record.share for record in of_row[1:-1]) == pytest.approx(1, abs=1e-6)
