"""The faults that `make mutants` plants. `test_mutants.py` fails if the code of an entry no longer exists."""

from tests.mutants.mutant import Mutant

_TIERS = "fuseopt/generation/tiers.py"
_PROCESSOR_LIST_TESTS = "tests/generation/select/test_logits_processor_list.py"
_TOUCHED_TESTS = "tests/strategies/test_touched_modules.py"


def _without_reason(what: str, old: str, new: str) -> Mutant:
    """A call that transformers has to decode is decoded by fuseopt."""
    return Mutant(f"T2 without a reason: {what}", _TIERS, old, new, ("tests/generation/test_reasons.py",))


def _not_undone(what: str, old: str, new: str) -> Mutant:
    """A call whose memory runs out, and which transformers then decodes from its prompt."""
    tests = ("tests/generation/test_out_of_memory.py",)
    return Mutant(f"out of memory: {what}", "fuseopt/generation/rollback.py", old, new, tests)


REASONS = (
    _without_reason("custom_generate", 'if arguments.get("custom_generate") is not None:', "if False:"),
    _without_reason("assisted decoding", 'if arguments.get("assistant_model") is not None:', "if False:"),
    _without_reason(
        "stop strings and methods of the model's own",
        'if setting("stop_strings") is not None and not CachingModelProxy.stands_in_for(model):',
        "if False:",
    ),
    _without_reason("synced_gpus", 'if arguments.get("synced_gpus"):', "if False:"),
    _without_reason(
        "torch.compile tracing", "if torch.compiler.is_compiling():\n        yield", "if False:\n        yield"
    ),
    _without_reason("modes", "if _has_modes():\n        yield", "if False:\n        yield"),
    _without_reason("several processes", "torch.distributed.get_world_size() > 1 and", "False and"),
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
        "fuseopt/generation/engine/state.py",
        "        self._cross_length = None\n",
        "",
        ("tests/generation/prompt/test_prompts.py::test_a_mask_of_an_encoder_s_output_ends_with_its_call",),
    ),
    _not_undone("random numbers", "torch.set_rng_state(self._random)", "pass"),
    _not_undone("the caller's cache", "        self._cache.restore()\n", ""),
    _not_undone("tokens that a streamer has", "prepared._replace(streamer=RemainingStream(self.stream))", "prepared"),
    _not_undone("an error of the streamer's", "self.is_possible and not has_raised", "self.is_possible"),
    _not_undone("tokens that processors have seen", "self.is_possible and not has_raised", "not has_raised"),
    Mutant(
        "max_length ignores the encoder's length",
        _TIERS,
        "if max_length is not None and max(sizes.capacity, sizes.cross_capacity) > max_length:",
        "if max_length is not None and sizes.capacity > max_length:",
        ("tests/generation/test_tiers.py::test_max_length_bounds_both_caches",),
    ),
    Mutant(
        "one position more than the model has",
        _TIERS,
        "sizes.capacity > longest:",
        "sizes.capacity > longest + 1:",
        ("tests/generation/test_tiers.py::test_a_model_s_last_position_is_used_and_none_after_it",),
    ),
    Mutant(
        "max_batch is one too many",
        _TIERS,
        "if sizes.rows > max_batch:",
        "if sizes.rows > max_batch + 1:",
        ("tests/generation/test_tiers.py::test_calls_that_transformers_decodes",),
    ),
    Mutant(
        "views of scores are edited in place",
        "fuseopt/generation/select/logits_processor_list.py",
        "        if scores._is_view():\n            return False\n",
        "",
        (f"{_PROCESSOR_LIST_TESTS}::test_scores_that_are_part_of_another_tensor_are_not_written_to",),
    ),
    Mutant(
        "scores that output_logits keeps are edited in place",
        "fuseopt/generation/select/logits_processor_list.py",
        "is_kept = config.return_dict_in_generate and config.output_logits",
        "is_kept = False",
        (f"{_PROCESSOR_LIST_TESTS}::test_all_edits_are_one_op_a_step_and_in_place_unless_logits_are_kept",),
    ),
    Mutant(
        "filters are left to the op that draws in whatever order they are",
        "fuseopt/generation/select/device_processors.py",
        "        order = order[: order.index(type(processor))]\n",
        "",
        ("tests/generation/select/test_device_processors.py::test_which_filters_the_op_that_draws_applies",),
    ),
    Mutant(
        "top-k is dropped beside top-p",
        "fuseopt/ops/decode/sample.py",
        "    if 0 < filters.top_k < scores.shape[-1]:\n",
        "    if filters.top_p == 1 and 0 < filters.top_k < scores.shape[-1]:\n",
        ("tests/ops/decode/test_sample.py::test_ties",),
    ),
    Mutant(
        "sampled beams are drawn without the scores so far",
        "fuseopt/generation/select/beam_selection.py",
        "accumulated = scores.unflatten(0, beams.shape) + beams.running_scores[:, :, None]",
        "accumulated = scores.unflatten(0, beams.shape) + 0 * beams.running_scores[:, :, None]",
        ("tests/generation/select/test_beam_search.py",),
    ),
)

OPS = (
    Mutant(
        "the fake of rms_norm has the input's dtype for its statistics",
        "fuseopt/ops/rms_norm.py",
        "rstd = input.new_empty(input.shape[:-1], dtype=compute_dtype(input))",
        "rstd = input.new_empty(input.shape[:-1])",
        ("tests/ops/test_contract.py::test_fakes_have_the_dtypes_of_what_kernels_return", "-k", "rms_norm"),
    ),
    Mutant(
        "the fake of layer_norm has the input's dtype for its statistics",
        "fuseopt/ops/layer_norm.py",
        "mean = input.new_empty(input.shape[:-1], dtype=compute_dtype(input))",
        "mean = input.new_empty(input.shape[:-1])",
        ("tests/ops/test_contract.py::test_fakes_have_the_dtypes_of_what_kernels_return", "-k", "layer_norm"),
    ),
    Mutant(
        "the plain rms_norm ignores eps",
        "fuseopt/ops/rms_norm.py",
        "torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)",
        "torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
        ("tests/ops/test_norm_constants.py", "-k", "rms_norm"),
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
        "dx[i] = (0 * factor + 1) * y[i] * (g[i] - dot);",
        ("tests/ops/test_softmax.py",),
    ),
    Mutant(
        "softmax on a CPU scales logits and not their differences",
        "fuseopt/csrc/cpu/softmax.cpp",
        "wanted != 0 && wanted != 1",
        "false",
        ("tests/ops/test_softmax.py",),
    ),
    Mutant(
        "softmax on a CPU does not subtract the largest",
        "fuseopt/csrc/cpu/softmax.cpp",
        "y[i] = exp((x[i] - largest) * steepness);",
        "y[i] = exp(x[i] * steepness);",
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
        "tiles of rows leave out the last lines",
        "fuseopt/csrc/cpu/decode_tiles_body.h",
        "last.lines = p.lines - whole;",
        "last.lines = 0;",
        ("tests/ops/decode/test_cpu_kernels.py",),
    ),
    Mutant(
        "pairs of a quantised weight take the next element twice",
        "fuseopt/csrc/cpu/low_bit_tiles_body.h",
        "const auto low = (Words)element(std::integral_constant<int, 2 * line>());",
        "const auto low = (Words)element(std::integral_constant<int, 2 * line + 1>());",
        ("tests/ops/decode/test_low_bit_cpu.py",),
    ),
    Mutant(
        "a prepared launch serves pointers of every alignment",
        "fuseopt/csrc/python/launches.h",
        "add_to_kind(static_cast<char>(address % kAlignment == 0));",
        "",
        ("tests/extend/test_launches.py",),
    ),
    Mutant(
        "launches do not ask for hooks",
        "fuseopt/extend/triton_expression.py",
        "hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls",
        "hooks.launch_enter_hook.calls",
        ("tests/extend/test_launches.py",),
    ),
    Mutant(
        "a kernel with scratch memory is launched without it",
        "fuseopt/ops/triton/launch.py",
        '"global_scratch_size": 0,',
        "",
        ("tests/extend/test_launches.py",),
    ),
    Mutant(
        "a replay gives an operation the recorded list itself",
        "fuseopt/csrc/python/tape.h",
        "c10::List<IValue> list = copied(argument.constant);",
        "c10::List<IValue> list = argument.constant.toList();",
        ("tests/runtime/test_recorded_runs.py",),
    ),
    Mutant(
        "a replay follows the first recording, whatever later runs do",
        "fuseopt/runtime/recorded_runs.py",
        'difference = "its first run" if before is None else tape.difference(before)',
        'difference = ""',
        ("tests/runtime/test_recorded_runs.py",),
    ),
    Mutant(
        "a binding takes a mask of integers for one of floating point",
        "fuseopt/csrc/shared_arguments.h",
        '{{"input", kFloats}, {"mask", kFloats}}',
        '{{"input", kFloats}, {"mask", kFloats | kIntegers}}',
        ("tests/ops/test_arguments.py::test_another_dtype_gives_the_same_or_is_refused", "-k", "softmax_fwd"),
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
        "fuseopt/training/code_key.py",
        '_FOLDERS = ("blocks", "modules", "ops", "runtime", "training", "tuning")',
        '_FOLDERS = ("ops",)',
        ("tests/training/test_code_key.py",),
    ),
    Mutant(
        "the key of compiled code lacks kernels in folders of ops",
        "fuseopt/training/code_key.py",
        '.rglob("*")',
        '.glob("*")',
        ("tests/training/test_code_key.py",),
    ),
    Mutant(
        "what is drawn at random may be drawn again in the backward pass",
        "fuseopt/training/partitioner.py",
        "if _is_random(node) or node.target in _EXPENSIVE_OPS:",
        "if node.target in _EXPENSIVE_OPS:",
        ("tests/training/test_partitioner.py",),
    ),
    Mutant(
        "a plan counts containers among what it keeps",
        "fuseopt/plan.py",
        "leaves = (c for c in index.candidates if not c.module._modules)",
        "leaves = (c for c in index.candidates)",
        ("tests/test_api.py", "tests/test_cli.py", "tests/models/test_policies.py"),
    ),
    Mutant(
        "verify is ok whatever the gradients are",
        "fuseopt/verify.py",
        "(self._outputs, self.loss, self.gradient)",
        "(self._outputs, self.loss)",
        ("tests/test_verify_training.py",),
    ),
    Mutant(
        "verify takes a NaN on one side for no difference",
        "fuseopt/verify.py",
        "nan_to_num(nan=math.inf)",
        "nan_to_num(nan=0.0)",
        ("tests/test_verify.py",),
    ),
)

CHILDREN = (
    Mutant(
        "the class that c_fc has is taken for the one that the policy names",
        "fuseopt/modules/mlp.py",
        'self._linear_class = reads["c_fc"]',
        "self._linear_class = type(self.c_fc)",
        (f"{_TOUCHED_TESTS}::test_the_bias_is_folded_for_a_plain_conv1d_alone",),
    ),
    Mutant(
        "c_fc is read whatever it is by now",
        "fuseopt/modules/mlp.py",
        "            and runs_untouched(self.c_fc, self._linear_class)\n",
        "",
        (f"{_TOUCHED_TESTS}::test_the_bias_is_folded_for_a_plain_conv1d_alone",),
    ),
    Mutant(
        "any class counts as the one that is read past",
        "fuseopt/modules/base.py",
        "(type(module) is expected or fused_class(module) is expected)",
        "isinstance(module, expected)",
        (f"{_TOUCHED_TESTS}::test_the_bias_is_folded_for_a_plain_conv1d_alone",),
    ),
    Mutant(
        "hooks on what is read past are not called",
        "fuseopt/modules/base.py",
        "        and not has_hooks(module)\n",
        "",
        (f"{_TOUCHED_TESTS}::test_the_bias_is_folded_for_a_plain_conv1d_alone",),
    ),
    Mutant(
        "a forward that was set on what is read past is not called",
        "fuseopt/modules/base.py",
        '        and "forward" not in module.__dict__\n',
        "",
        (f"{_TOUCHED_TESTS}::test_whatever_is_done_to_a_module_counts_as_in_stock", "-k", "gpt2"),
    ),
    Mutant(
        "weights of a tensor subclass are read as plain ones",
        "fuseopt/modules/base.py",
        "        and has_plain_weights(module)\n",
        "",
        (f"{_TOUCHED_TESTS}::test_the_bias_is_folded_for_a_plain_conv1d_alone",),
    ),
    Mutant(
        "hooks on every module are not called for what is read past",
        "fuseopt/modules/base.py",
        "        and not nn.modules.module._has_any_global_hook()\n",
        "",
        (f"{_TOUCHED_TESTS}::test_a_hook_on_every_module_is_called_for_the_same_modules_as_in_stock",),
    ),
    Mutant(
        "norms after a residual add are passed by whatever they are",
        "fuseopt/blocks/residual.py",
        "return all(runs_untouched(norm, self.norm) for norm in self.norms(self.block))",
        "return True",
        (f"{_TOUCHED_TESTS}::test_modules_whose_forward_is_passed_by_are_of_their_class",),
    ),
    Mutant(
        "layers of a T5 block are passed by whatever they are",
        "fuseopt/blocks/residual.py",
        "            and all(map(runs_untouched, layers, self._layer_classes))\n",
        "",
        (f"{_TOUCHED_TESTS}::test_modules_whose_forward_is_passed_by_are_of_their_class",),
    ),
    Mutant(
        "an attention whose dropout is put off may be anything",
        "fuseopt/blocks/dropout_add.py",
        "return untouched and super()._is_plain(",
        "return super()._is_plain(",
        (f"{_TOUCHED_TESTS}::test_what_is_added_to_an_attention_is_not_dropped",),
    ),
    Mutant(
        "a drop-in has a class name of its own",
        "fuseopt/modules/base.py",
        "            source.__name__, (fused, source),",
        "            fused.__name__, (fused, source),",
        ("tests/modules/test_drop_ins.py::test_classes_names_and_attributes_are_the_source_s",),
    ),
    Mutant(
        "what was set on a drop-in is lost with it",
        "fuseopt/apply.py",
        "            yield functools.partial(new.__dict__.update, shared)\n",
        "",
        ("tests/modules/test_drop_ins.py", "tests/test_api.py"),
    ),
)

INTERRUPTS = (
    Mutant(
        "the record is set before the sites",
        "fuseopt/apply.py",
        "    steps.append(_step(model.__dict__, RECORD, Absent if record is None else record))\n",
        "    _step(model.__dict__, RECORD, Absent if record is None else record)()\n",
        ("tests/test_interrupts.py::test_interrupted_anywhere_a_model_is_wholly_stock_or_wholly_fused",),
    ),
    Mutant(
        "sites are set one after the other",
        "fuseopt/apply.py",
        "    deque(map(functools.partial.__call__, list(steps)), maxlen=0)  # type: ignore[arg-type]\n",
        "    for step in list(steps):\n        step()\n",
        ("tests/test_interrupts.py::test_interrupted_anywhere_a_model_is_wholly_stock_or_wholly_fused",),
    ),
    Mutant(
        "an interrupted with block leaves the model as it is",
        "fuseopt/apply.py",
        "    except BaseException:\n        put_back()\n        raise\n",
        "    except BaseException:\n        raise\n",
        ("tests/test_interrupts.py::test_interrupted_anywhere_a_model_is_wholly_stock_or_wholly_fused",),
    ),
    Mutant(
        "two threads change a model at the same time",
        "fuseopt/apply.py",
        "return _locks.setdefault(model, threading.RLock())",
        "return threading.RLock()",
        ("tests/test_interrupts.py::test_of_two_threads_that_initialize_a_model_one_waits",),
    ),
)

LIFETIMES = (
    Mutant(
        "a forward holds the module that it is set on",
        "fuseopt/runtime/references.py",
        "        self.ref = weakref.ref(to)\n",
        "        self.ref = lambda: to\n",
        ("tests/test_lifetime.py::test_a_fused_model_is_freed_without_the_garbage_collector",),
    ),
    Mutant(
        "generate() holds its model",
        "fuseopt/generation/generate.py",
        "self._model = weakref.ref(model)",
        "self._model = lambda: model",
        ("tests/generation/test_lifetimes.py::test_a_model_goes_with_its_last_user",),
    ),
    Mutant(
        "a part of another call's drop-in is fused",
        "fuseopt/plan.py",
        "            if drop_in is not None:\n",
        "            if False:\n",
        ("tests/test_given_back.py::test_a_model_and_a_part_of_it_are_restored_in_any_order",),
    ),
    Mutant(
        "what is remembered of a freed module keeps its first mode",
        "fuseopt/runtime/references.py",
        "        self._made.training = True in modes\n",
        "",
        ("tests/test_lifetime.py::test_a_shallow_copy_outlives_the_model",),
    ),
    Mutant(
        "the last of an unknown number of rows is taken by select",
        "fuseopt/training/passes/unbacked_selects.py",
        " or index >= 0 or ",
        " or index < 0 or ",
        ("tests/training/passes/test_unbacked_selects.py",),
    ),
    Mutant(
        "a compilation of a training step is not said",
        "fuseopt/training/forward.py",
        "        on_compilation(_is_on_cpu(value for value in inputs if isinstance(value, torch.Tensor)))\n",
        "",
        ("tests/training/test_compile_notice.py",),
    ),
    Mutant(
        "two layers of one number",
        "fuseopt/generation/hf/redundant_attributes.py",
        "if index in taken or index not in",
        "if index not in",
        ("tests/generation/hf/test_redundant_attributes.py",),
    ),
    Mutant(
        "what compares modules holds the first",
        "fuseopt/runtime/module_watch.py",
        "self._top, self.states = weakref.ref(top), ",
        "self._top, self.states = (lambda: top), ",
        (
            "tests/test_lifetime.py::test_a_fused_model_is_freed_without_the_garbage_collector",
            "tests/generation/test_lifetimes.py::test_a_model_goes_with_its_last_user",
        ),
    ),
)

TRAINING = (
    Mutant(
        "lazy logits compare versions while Dynamo traces",
        "fuseopt/modules/lazy_logits.py",
        "if torch.compiler.is_dynamo_compiling():",
        "if False:",
        (
            "tests/training/passes/test_drop_logits.py",
            "tests/training/test_stock_fallback.py::test_a_loss_of_ones_own_is_compiled",
        ),
    ),
    Mutant(
        "lazy logits compare values under a dispatch mode",
        "fuseopt/modules/lazy_logits.py",
        "or not all(isinstance(mode, Observer) for mode in _get_current_dispatch_mode_stack())",
        "",
        ("tests/modules/test_lazy_logits.py::test_logits_are_read_under_a_fake_tensor_mode",),
    ),
    Mutant(
        "lazy logits are computed of a weight that has changed",
        "fuseopt/modules/lazy_logits.py",
        "if not self._is_unwritten():",
        "if False:",
        ("tests/modules/test_lazy_logits.py::test_logits_not_looked_at_before_the_weight_changed_are_refused",),
    ),
    Mutant(
        "strict training falls back in silence",
        "fuseopt/training/forward.py",
        "error if fallback.strict else None",
        "None",
        ("tests/training/test_stock_fallback.py::test_strict_raises_in_the_call_and_leaves_the_model_as_it_was",),
    ),
    Mutant(
        "a compiled step that failed has drawn random numbers",
        "fuseopt/training/forward.py",
        "        with stock_fallback.rng_restored_on_error(inputs):\n            outputs = run(*inputs)\n",
        "        outputs = run(*inputs)\n",
        (
            "tests/training/test_stock_fallback.py"
            "::test_a_step_that_cannot_be_compiled_trains_as_stock_from_the_same_state",
        ),
    ),
)

CONFIG = (
    Mutant(
        "an extension of one family's policy covers every model",
        "fuseopt/models/registration.py",
        "self.model_types is None or model_type in self.model_types",
        "True",
        ("tests/models/test_policies.py::test_an_extension_is_planned_for_its_models_until_it_is_removed",),
    ),
    Mutant(
        "a kernel's order counts for nothing",
        "fuseopt/kernel_table.py",
        "sorted(_kernels.values(), key=lambda kernel: kernel.order)",
        "_kernels.values()",
        ("tests/test_kernel_table.py",),
    ),
    Mutant(
        "of a key that is given twice the last value counts",
        "fuseopt/config_file.py",
        "object_pairs_hook=_unique",
        "object_pairs_hook=dict",
        ("tests/test_config.py",),
    ),
    Mutant(
        "names of modules reach the terminal as they are",
        "fuseopt/errors.py",
        "character if character.isprintable() else",
        "character if True else",
        ("tests/test_report.py", "tests/test_api.py", "tests/test_config.py"),
    ),
)

NATIVE = (
    Mutant(
        "a folder that others can write is trusted",
        "fuseopt/build/library_cache.py",
        "writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
        "writable = 0",
        ("tests/build/test_library_cache.py",),
    ),
    Mutant(
        "only the cache folder itself is looked at, not what leads there",
        "fuseopt/build/library_cache.py",
        "reason = _distrust(step, status, is_last=is_last)",
        "reason = _distrust(step, status, is_last=is_last) if is_last else None",
        ("tests/build/test_library_cache.py",),
    ),
    Mutant(
        "a library whose digest differs is loaded",
        "fuseopt/build/library_cache.py",
        "if _digest_of(library, status.st_ino, status.st_size, status.st_mtime_ns) != expected:",
        "if False:",
        ("tests/build/test_library_cache.py",),
    ),
    Mutant(
        "libraries get their names before they are on disk",
        "fuseopt/build/library_cache.py",
        "            os.fsync(opened.fileno())\n",
        "            pass\n",
        ("tests/build/test_library_cache.py",),
    ),
    Mutant(
        "a compiler may take as long as it likes to answer",
        "fuseopt/build/toolchain.py",
        "process.communicate(timeout=QUERY_SECONDS)",
        "process.communicate()",
        ("tests/build/test_toolchain_faults.py",),
    ),
    Mutant(
        "a build needs stderr",
        "fuseopt/build/compilation.py",
        "with contextlib.suppress(OSError, ValueError):  # full, closed",
        "with contextlib.suppress():",
        ("tests/build/test_toolchain_faults.py",),
    ),
    Mutant(
        "a prebuilt library that has lost bytes is loaded",
        "fuseopt/build/prebuilt.py",
        "if found.size != size:",
        "if False:",
        ("tests/build/test_loader.py", "-k", "prebuilt_library_that_does_not_fit"),
    ),
    Mutant(
        "the key of a library lacks its headers",
        "fuseopt/build/toolchain.py",
        '*CSRC.glob("*.*"), ',
        "*(), ",
        ("tests/build/test_loader.py", "-k", "key_is_of_content"),
    ),
    Mutant(
        "the READMEs beside sources are in the key of a library",
        "fuseopt/build/toolchain.py",
        'if path.suffix == ".md":',
        "if False:",
        ("tests/build/test_toolchain_faults.py", "-k", "readme_beside_sources"),
    ),
)

BENCH = (
    Mutant(
        "a contender that raises ends the run",
        "fuseopt/bench/harness/measure.py",
        "            records.append(Record(case.name, WHOLE_CASE, note=failed(error)))\n",
        "            raise\n",
        ("tests/bench/harness/test_measure.py",),
    ),
    Mutant(
        "a wrong result is timed",
        "fuseopt/bench/harness/op_timing.py",
        "        if error <= allowed:\n",
        "        if True:\n",
        ("tests/bench/harness/test_op_cases.py", "tests/bench/suites/test_ops.py"),
    ),
)

EXTEND = (
    Mutant(
        "a user's kernel gives its argument back",
        "fuseopt/extend/eager_calls.py",
        "return unshared(self.checked(output, kernel.backend), tensors_of(arguments))",
        "return self.checked(output, kernel.backend)",
        ("tests/extend/test_eager_calls.py", "-k", "never_an_argument"),
    ),
    Mutant(
        "strict passes over a predicate that raised",
        "fuseopt/plan.py",
        "if isinstance(skip.reason, RaisedReason):",
        "if False:",
        ("tests/extend/test_odd_replacements.py", "-k", "predicate_that_raises"),
    ),
    Mutant(
        "Dynamo reads the file's globals in a copied forward",
        "fuseopt/extend/exchange.py",
        'if name != "__name__"}',
        "if True}",
        ("tests/extend/test_replaces.py", "-k", "ways_in_which"),
    ),
    Mutant(
        "the decode loop is put on a peft model itself",
        "fuseopt/strategies/context.py",
        'base = model.get_base_model() if hasattr(type(model), "get_base_model") else model',
        "base = model",
        ("tests/generation/test_peft.py",),
    ),
)

_SEARCH = "fuseopt/auto/search.py"
AUTO = (
    Mutant(
        "auto takes noise for a gain",
        _SEARCH,
        "return spread.low > 1 and spread.median >= max(LEAST_GAIN, 1 + self.noise)",
        "return spread.median > 1",
        ("tests/auto/test_auto.py",),
    ),
    Mutant(
        "auto keeps stock if the best is not confirmed",
        _SEARCH,
        "self._confirmed(best, stock) or self._next_confirmed(stock)",
        "self._confirmed(best, stock) or stock",
        ("tests/auto/test_auto.py",),
    ),
    Mutant(
        "auto keeps what is wrong",
        _SEARCH,
        "found.speed_up > best.speed_up and self._is_right(found)",
        "found.speed_up > best.speed_up",
        ("tests/auto/test_auto.py",),
    ),
    Mutant(
        "auto remembers a result for inputs of every size",
        "fuseopt/auto/work.py",
        "values = [(name, _described(value)) for name, value in given]",
        "values = [name for name, value in given]",
        ("tests/auto/test_auto.py",),
    ),
    Mutant(
        "generate() calls of the search stay in the report",
        "fuseopt/auto/__init__.py",
        "apply.forget_calls(best.record)",
        "pass",
        ("tests/auto/test_auto.py",),
    ),
)

_QUANTISED = "fuseopt/modules/quantised"
_CHECKPOINT_TESTS = ("tests/generation/test_checkpoint_layouts.py",)


def _misread(what: str, old: str, new: str, file: str = f"{_QUANTISED}.py") -> Mutant:
    """A mutant that reads a pre-quantised checkpoint differently from the checkpoint's own layers."""
    return Mutant(f"a quantised checkpoint: {what}", file, old, new, _CHECKPOINT_TESTS)


_LOW_BIT = "fuseopt/generation/engine/low_bit.py"
CHECKPOINTS = (
    _misread("order of AWQ's outputs", "unpack(qweight).T", "unpack_in_order(qweight).T", f"{_QUANTISED}_gptqmodel.py"),
    _misread(
        "groups that g_idx orders",
        "(g_idx == of_inputs // (inputs // groups)).all()",
        "True",
        f"{_QUANTISED}_gptqmodel.py",
    ),
    _misread("zero points of int8", "zeros is None or not bool(zeros.any())", "True", f"{_QUANTISED}_torchao.py"),
    _misread("layers of other groups together", "len({weight.format for weight in weights}) > 1", "False"),
    _misread(
        "weights repacked by their forward",
        "require(not repacked, layout",
        "require(True, layout",
        f"{_QUANTISED}_gptqmodel.py",
    ),
    _misread(
        "tensors that are written to",
        "tensors += [tensor for layer in self._came for part in layer.checkpoint for tensor in part.tensors]",
        "pass",
        _LOW_BIT,
    ),
    _misread(
        "dtype of the scales",
        "self.weights = tuple(weight.stand_in(dtype)",
        "tuple(weight.stand_in(dtype)",
        "fuseopt/generation/engine/layers.py",
    ),
)

MUTANTS = (
    *REASONS,
    *GENERATION,
    *OPS,
    *MODULES,
    *CHILDREN,
    *INTERRUPTS,
    *LIFETIMES,
    *TRAINING,
    *CONFIG,
    *NATIVE,
    *BENCH,
    *EXTEND,
    *AUTO,
    *CHECKPOINTS,
)
