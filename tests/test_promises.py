"""README's "What it never does", traced: no connection is opened, and a forward starts no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# What Python announces of connections and new processes while the models are fused and run, and plans are printed.
TRACED = """
import contextlib, io, json, os, sys
events, phase = [], "import"
def hook(event, arguments):
    if event.startswith("socket.") and event != "socket.__new__" or event in ("subprocess.Popen", "os.posix_spawn"):
        events.append((phase, event, str(arguments[:2])))
sys.addaudithook(hook)
import fuseopt, torch
from fuseopt.cli import main
from tests import tiny
phase = "initialize"
models = [fuseopt.initialize(make(), preset) for make in (tiny.gpt2, tiny.t5) for preset in ("inference", "reference")]
phase = "forward"
for model in models:
    tiny.logits(model)
    model.generate(tiny.inputs(model)["input_ids"], max_new_tokens=2, no_repeat_ngram_size=2)
phase = "plan"
with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as said:
    codes = [main(["plan", name, "--config", "reference"]) for name in ("owner/absent", "owner/cached", "gpt2-tiny")]
print(json.dumps({"events": events, "codes": codes, "printed": printed.getvalue(), "said": said.getvalue()}))
"""


def test_nothing_is_downloaded_and_no_forward_starts_a_compiler(tmp_path):
    cached = tmp_path / "hub" / "models--owner--cached"
    for folder, name, content in (
        ("refs", "main", "abc"),
        ("snapshots/abc", "config.json", '{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1}'),
    ):
        (cached / folder).mkdir(parents=True)
        (cached / folder / name).write_text(content)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "PYTHONPATH": os.getcwd()}
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        environment.pop(name, None)
    found = subprocess.run([sys.executable, "-c", TRACED], env=environment, capture_output=True, text=True, check=True)
    told = json.loads(found.stdout.splitlines()[-1])
    assert [event for event in told["events"] if event[1].startswith("socket.")] == []
    assert [event for event in told["events"] if event[0] in ("forward", "plan")] == []
    assert told["codes"] == [2, 0, 0]
    assert "owner/absent is not in transformers' cache" in told["said"] and "transformer.ln_f" in told["printed"]
