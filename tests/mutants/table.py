"""The faults that `make mutants` plants. `test_mutants.py` fails if the code of an entry no longer exists."""

from tests.mutants.mutant import Mutant

_TIERS = "fuseopt/generation/tiers.py"
_LOOP = "fuseopt/generation/loop.py"
_OPS_TESTS = ("tests/ops/test_contract.py",)
_GENERATION_TESTS = ("tests/generation/test_tiers.py", "tests/generation/test_odd_arguments.py")


def _without_reason(what: str, old: str, new: str, *tests: str) -> Mutant:
    """A call that transformers has to decode is decoded by fuseopt."""
    return Mutant(f"T2 without a reason: {what}", _TIERS, old, new, tests or _GENERATION_TESTS)


REASONS = (
    _without_reason("custom_generate", 'if arguments.get("custom_generate") is not None:', "if False:"),
    _without_reason("assisted decoding", 'if arguments.get("assistant_model") is not None:', "if False:"),
    _without_reason(
        "stop strings and methods of the model's own",
        'if setting("stop_strings") is not None and not RememberingModel.METHODS.isdisjoint(vars(model)):',
        "if False:",
    ),
    _without_reason("synced_gpus", 'if arguments.get("synced_gpus"):', "if False:"),
    _without_reason(
        "torch.compile tracing", "if torch.compiler.is_compiling():\n        yield", "if False:\n        yield"
    ),
    _without_reason("modes", "if _has_modes():\n        yield", "if False:\n        yield"),
    _without_reason("several processes", "and torch.distributed.get_world_size() > 1", "and False"),
    _without_reason("model.compile()", "if model._compiled_call_impl is not None:", "if False:"),
    _without_reason("global hooks", "if nn.modules.module._has_any_global_hook():", "if False:"),
    _without_reason("is_assistant", "if config.is_assistant:", "if False:"),
    _without_reason("several criteria", "if len(stops) > 1:", "if False:"),
    _without_reason("no pad token", "if stops and pad is None and (config.num_beams or 1) == 1:", "if False:"),
    _without_reason("several pad tokens", "if pad is not None and pad.dim():", "if False:"),
    _without_reason("use_cache", "if not config.use_cache:", "if False:"),
)

GENERATION = (
    Mutant(
        "an encoder's mask stays for the next call without one",
        "fuseopt/generation/state.py",
        "        self._cross_length = None\n",
        "",
        ("tests/generation/test_generate_lifecycle.py", "tests/generation/test_generate.py"),
    ),
    Mutant(
        "max_length ignores the encoder's length",
        _LOOP,
        "if max(sizes.capacity, sizes.cross_capacity) > self.max_length:",
        "if sizes.capacity > self.max_length:",
        ("tests/generation/test_tiers.py",),
    ),
    Mutant(
        "one position more than the model has",
        _LOOP,
        "sizes.capacity > longest:",
        "sizes.capacity > longest + 1:",
        ("tests/generation/test_tiers.py",),
    ),
    Mutant(
        "max_batch is one too many",
        _LOOP,
        "if sizes.rows > self.max_batch:",
        "if sizes.rows > self.max_batch + 1:",
        ("tests/generation/test_tiers.py",),
    ),
    Mutant(
        "views of scores are edited in place",
        "fuseopt/generation/logits_processor_list.py",
        "        if scores._is_view():\n            return False\n",
        "",
        ("tests/generation/test_logits_processor_list.py", "tests/generation/test_logits_processors.py"),
    ),
    Mutant(
        "scores that output_logits keeps are edited in place",
        "fuseopt/generation/logits_processor_list.py",
        "is_kept = config.return_dict_in_generate and config.output_logits",
        "is_kept = False",
        ("tests/generation/test_logits_processor_list.py", "tests/generation/test_generate.py"),
    ),
    Mutant(
        "sampled beams are drawn without the scores so far",
        "fuseopt/generation/beam_selection.py",
        "accumulated = scores.unflatten(0, beams.shape) + beams.running_scores[:, :, None]",
        "accumulated = scores.unflatten(0, beams.shape) + 0 * beams.running_scores[:, :, None]",
        ("tests/generation/test_beam_search.py",),
    ),
)

OPS = (
    Mutant(
        "the fake of rms_norm has the input's dtype for its statistics",
        "fuseopt/ops/rms_norm.py",
        "rstd = input.new_empty(input.shape[:-1], dtype=compute_dtype(input))",
        "rstd = input.new_empty(input.shape[:-1])",
        (*_OPS_TESTS, "tests/ops/test_rms_norm.py"),
    ),
    Mutant(
        "the fake of layer_norm has the input's dtype for its statistics",
        "fuseopt/ops/layer_norm.py",
        "mean = input.new_empty(input.shape[:-1], dtype=compute_dtype(input))",
        "mean = input.new_empty(input.shape[:-1])",
        (*_OPS_TESTS, "tests/ops/test_layer_norm.py"),
    ),
    Mutant(
        "the plain rms_norm ignores eps",
        "fuseopt/ops/rms_norm.py",
        "torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)",
        "torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
        ("tests/ops/test_rms_norm.py", *_OPS_TESTS),
    ),
    Mutant(
        "the weight's offset is not in its gradient's norm",
        "fuseopt/ops/rms_norm.py",
        "return (xhat.to(dtype) * (weight.to(dtype) + offset)).to(output_dtype)",
        "return (xhat.to(dtype) * weight.to(dtype)).to(output_dtype)",
        ("tests/ops/test_rms_norm.py",),
    ),
    Mutant(
        "softmax's backward on a CPU has no scale",
        "fuseopt/csrc/cpu/softmax.cpp",
        "dx[i] = factor * y[i] * (g[i] - dot);",
        "dx[i] = y[i] * (g[i] - dot);",
        ("tests/ops/test_softmax.py", *_OPS_TESTS),
    ),
    Mutant(
        "softmax on a CPU does not subtract the largest",
        "fuseopt/csrc/cpu/softmax.cpp",
        "y[i] = exp(x[i] - largest);",
        "y[i] = exp(x[i]);",
        ("tests/ops/test_softmax.py",),
    ),
    Mutant(
        "an n-gram at the end of the tokens is overlooked",
        "fuseopt/csrc/cpu/process_logits.cpp",
        "for (int64_t begin = 0; begin + n <= length; ++begin) {",
        "for (int64_t begin = 0; begin + n < length; ++begin) {",
        ("tests/ops/test_no_repeat_ngram.py", "tests/ops/test_process_logits.py"),
    ),
    Mutant(
        "a repetition penalty divides negative scores too",
        "fuseopt/csrc/cpu/process_logits.cpp",
        "static_cast<T>(x < 0 ? x * penalty : x / penalty)",
        "static_cast<T>(x / penalty)",
        ("tests/ops/test_process_logits.py",),
    ),
    Mutant(
        "wide rows in Triton leave out their last block",
        "fuseopt/ops/triton/rms_norm.py",
        "        square_sum += x * x\n",
        "        square_sum += tl.where(start + BLOCK_COLUMNS < columns, x * x, 0.0)\n",
        ("tests/ops/triton/test_triton_rms_norm.py",),
        interpreter=True,
    ),
)

MODULES = (
    Mutant(
        "the key of compiled code lacks the traced modules",
        "fuseopt/modules/code_key.py",
        '_FOLDERS = ("modules", "ops")',
        '_FOLDERS = ("ops",)',
        ("tests/modules/test_code_key.py",),
    ),
    Mutant(
        "the key of compiled code lacks kernels in folders of ops",
        "fuseopt/modules/code_key.py",
        '.rglob("*.py")',
        '.glob("*.py")',
        ("tests/modules/test_code_key.py",),
    ),
    Mutant(
        "what is drawn at random may be drawn again in the backward pass",
        "fuseopt/modules/partitioner.py",
        "if _draws(node) or node.target in _PRODUCTS:",
        "if node.target in _PRODUCTS:",
        ("tests/modules/test_partitioner.py",),
    ),
    Mutant(
        "a plan counts containers among what it keeps",
        "fuseopt/plan.py",
        "leaves = (c for c in index.candidates if not c.module._modules)",
        "leaves = (c for c in index.candidates)",
        ("tests/test_api.py", "tests/test_cli.py", "tests/models/test_policies.py"),
    ),
    Mutant(
        "verify takes a NaN on one side for no difference",
        "fuseopt/verify.py",
        "nan_to_num(nan=math.inf)",
        "nan_to_num(nan=0.0)",
        ("tests/test_verify.py",),
    ),
)

NATIVE = (
    Mutant(
        "a folder that others can write is trusted",
        "fuseopt/library_cache.py",
        "writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
        "writable = 0",
        ("tests/native/test_library_cache.py",),
    ),
    Mutant(
        "only the cache folder itself is looked at, not what leads there",
        "fuseopt/library_cache.py",
        "reason = _distrust(step, status, is_last=is_last)",
        "reason = _distrust(step, status, is_last=is_last) if is_last else None",
        ("tests/native/test_library_cache.py",),
    ),
    Mutant(
        "a library whose digest differs is loaded",
        "fuseopt/library_cache.py",
        "if _digest_of(library, status.st_ino, status.st_size, status.st_mtime_ns) != expected:",
        "if False:",
        ("tests/native/test_library_cache.py",),
    ),
    Mutant(
        "libraries get their names before they are on disk",
        "fuseopt/library_cache.py",
        "            os.fsync(opened.fileno())\n",
        "            pass\n",
        ("tests/native/test_library_cache.py",),
    ),
    Mutant(
        "a compiler may take as long as it likes to answer",
        "fuseopt/toolchain.py",
        "process.communicate(timeout=QUERY_SECONDS)",
        "process.communicate()",
        ("tests/native/test_toolchain_faults.py",),
    ),
    Mutant(
        "a build needs stderr",
        "fuseopt/toolchain.py",
        "with contextlib.suppress(OSError, ValueError):  # full, closed",
        "with contextlib.suppress():",
        ("tests/native/test_toolchain_faults.py",),
    ),
    Mutant(
        "a prebuilt library that has lost bytes is loaded",
        "fuseopt/prebuilt.py",
        "if found.size != size:",
        "if False:",
        ("tests/native/test_native.py", "-k", "prebuilt_library_that_does_not_fit"),
    ),
    Mutant(
        "the key of a library lacks its headers",
        "fuseopt/toolchain.py",
        "for folder in (CSRC, CSRC / kind) for path in folder.glob",
        "for folder in (CSRC / kind,) for path in folder.glob",
        ("tests/native/test_native.py", "-k", "key_is_of_content"),
    ),
)

BENCH = (
    Mutant(
        "a contender that raises ends the run",
        "fuseopt/bench/measure.py",
        "                records.append(Record(case.name, WHOLE_CASE, note=failed(error)))\n",
        "                raise\n",
        ("tests/bench/test_measure.py",),
    ),
    Mutant(
        "a wrong result is timed",
        "fuseopt/bench/op_timing.py",
        "        if error <= allowed:\n",
        "        if True:\n",
        ("tests/bench/test_op_cases.py", "tests/bench/test_ops.py"),
    ),
)

MUTANTS = (*REASONS, *GENERATION, *OPS, *MODULES, *NATIVE, *BENCH)
