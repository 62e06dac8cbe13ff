# %% [markdown]
# # Quickstart: load, plan, initialize, verify, generate, restore
#
# A GPT-2 of 4.27 M parameters that knows the King James Bible continues 4 verses, first as transformers runs it, then
# with fuseopt's decode loop. It runs on a CPU or a GPU, without network.
#
#     python examples/quickstart.py

# %%
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fuseopt

# %% [markdown]
# ## 1. Load
#
# Nothing here is specific to fuseopt.

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
examples = Path(fuseopt.__file__).parents[1] / "examples"
tokenizer = AutoTokenizer.from_pretrained(examples / "checkpoints" / "gpt2-kjv")
model = AutoModelForCausalLM.from_pretrained(examples / "checkpoints" / "gpt2-kjv").to(device)

prompts = (examples / "checkpoints" / "prompts.txt").read_text().splitlines()[:4]
inputs = tokenizer(prompts, padding=True, return_tensors="pt").to(device)

# %% [markdown]
# ## 2. Plan
#
# The plan lists what would be replaced, and changes nothing. With `verbose=True` it also lists what would not be
# (`-/->`), and the reason of each.

# %%
config = {
    "kernel_fusion": {"custom_cuda_kernels": ["FusedLayerNorm", "FusedGELU"]},
    "generation": {"enable": True},
}
print(fuseopt.plan(model, config))

# %% [markdown]
# ## 3. Verify
#
# Stock and fused model run on your inputs and are compared with a copy in float64. Both also generate. The model is
# unchanged afterwards.

# %%
verification = fuseopt.verify(model, config, inputs, generate={"max_new_tokens": 24})
print(verification)
assert verification.ok

# %% [markdown]
# ## 4. Generate with stock transformers


# %%
def timed_generate() -> tuple[list[str], float]:
    """The continuations, and the milliseconds per new token of the faster of 2 calls after a first one."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        tokens = tokens.cpu()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    new = tokens[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True), 1000 * min(seconds[1:]) / new.shape[1]


stock_texts, stock_ms = timed_generate()

# %% [markdown]
# ## 5. Initialize, and generate again
#
# `initialize` replaces parts of the model in place. Class, parameters and arguments of `generate()` stay the same.

# %%
model = fuseopt.initialize(model, config)
fused_texts, fused_ms = timed_generate()

print(f"{'generate()':12} {'ms per token':>12} {'speed-up':>9}  texts equal")
print(f"{'stock':12} {stock_ms:12.2f}")
print(f"{'fused':12} {fused_ms:12.2f} {stock_ms / fused_ms:8.2f}x  {fused_texts == stock_texts}")
for prompt, text in zip(prompts[:3], fused_texts, strict=False):
    print(f"\n{prompt} |{text}")

# %% [markdown]
# The report adds to the plan what happened in the calls: which tier decoded, and what is kept on the GPU.

# %%
print(fuseopt.report(model))

# %% [markdown]
# ## 6. Restore
#
# Every original object comes back. `with fuseopt.fused(model, config):` does both for the length of a block.

# %%
fuseopt.restore(model)
print(fuseopt.report(model))
