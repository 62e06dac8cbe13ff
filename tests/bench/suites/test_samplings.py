"""bench generate --samplings: every setting beside greedy, in the decode loop, and what it costs over greedy."""

import pytest
import torch

from fuseopt.bench.harness.generate_rows import Row
from fuseopt.bench.suites import samplings
from fuseopt.cli import main
from fuseopt.runtime.timer import Timing

CPU = torch.device("cpu")


def test_each_setting_is_timed_beside_greedy(monkeypatch):
    tokens, said = {}, {}

    def time_in_turns(calls, sample, **options):
        whole = [name for name in calls if not name.endswith(samplings._FIRST)]
        tokens.update({name: calls[name]() for name in whole})
        said.update({name: calls[name].args[0].generate.calls[-1] for name in whole})
        assert all(calls[name + samplings._FIRST]().shape == (2, 6) for name in whole)
        # Calls of greedy take 4, 8 and 2 s, of each setting 3 s more than the one before; one token takes 1 s.
        times = {name: Timing((4.0 + 3 * i, 8.0 + 3 * i, 2.0 + 3 * i)) for i, name in enumerate(whole)}
        return times | {name + samplings._FIRST: Timing((1.0, 1.0, 1.0)) for name in whole}

    monkeypatch.setattr(samplings, "time_in_turns", time_in_turns)
    results = samplings.run(device=CPU, rows=[Row("gpt2-tiny", 2, prompt=5, new=4)])
    greedy, *others = results.rows
    assert greedy.case == "a token of gpt2-tiny generate, 2 x (5 + 4), greedy, float32 or sampled"
    assert (greedy.variant, greedy.note, greedy.milliseconds[1], greedy.tokens) == ("greedy", None, 1000.0, 2)
    assert {row.first_token_us for row in results.rows} == {1e6}
    assert [row.variant for row in others] == list(samplings.SAMPLINGS)
    assert [row.note for row in others] == [f"+{i}000000.0 us a step over greedy" for i in range(1, len(others) + 1)]
    assert all(call.steps for call in said.values())
    model = Row("gpt2-tiny", 2).random_model(CPU, torch.float32)
    for name, sampling in samplings.SAMPLINGS.items():
        expected = Row("gpt2-tiny", 2, prompt=5, new=4, sampling=sampling).work(CPU, 4)(model)
        assert torch.equal(tokens[name], expected), name
    assert not torch.equal(tokens["sampled"], tokens["greedy"])


def test_the_command_line_names_rows_or_takes_those_of_gpt2(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(
        samplings, "run", lambda **options: seen.append(options) or samplings.Results.measured_here("", [])
    )
    command = ["bench", "generate", "--device", "cpu", "--samplings"]
    assert main(command) == 0
    assert main([*command, "--model", "gpt2-tiny", "--batch", "3", "--new", "6", "--dtype", "float16"]) == 0
    assert [(list(options["rows"]), options["dtype"]) for options in seen] == [
        ([], None),
        ([Row("gpt2-tiny", 3, new=6)], torch.float16),
    ]
    assert main([*command, "--first-call", "--families"]) == 2
    assert "--samplings: has its own settings; leave out --families, --first-call" in capsys.readouterr().err


@pytest.mark.gpu
def test_samplings_on_a_gpu():
    results = samplings.run(device=torch.device("cuda"), rows=[Row("gpt2-tiny", 2, prompt=5, new=8)])
    assert len(results.rows) == 1 + len(samplings.SAMPLINGS) and not any(row.failed for row in results.rows)
