"""The quick tier: tests that touch every module and every template of mtagen in 90 seconds of two idle cores.

``python -m pytest -m quick -n 2`` runs them; ``python -m tests.quick`` also checks that they touch everything.
"""

from __future__ import annotations

# Files below tests/, functions in them, or single cases of functions, as pytest names them.
QUICK = frozenset(
    {
        "test_accuracy.py",
        "test_bench.py::test_authors_are_right",
        "test_bench.py::test_contenders_of_the_cpu_are_right[eager]",
        "test_bench.py::test_roofline_of_decode_is_its_bytes",
        "test_bench.py::test_rows_follow_the_contract",
        "test_bench.py::test_timing_is_of_the_warmed_up_call",
        "test_bench_report.py::test_comparison_flags_what_is_slower_by_more_than_the_threshold",
        "test_bench_report.py::test_layers_table_compares_with_all_who_compute_the_same",
        "test_bench_report.py::test_panels_show_what_data_costs",
        "test_bench.py::test_flex_attention_has_the_expression",
        "test_batching.py::test_tokens_equal_generate[8-16]",
        "test_bias_plans.py",
        "test_cache.py::test_triton_finds_the_source",
        "test_cli.py::test_check_refuses_what_it_cannot_judge",
        "test_cli.py::test_collect_env",
        "test_cli.py::test_module_runs_as_a_program",
        "test_cli.py::test_plan_json_is_the_plan",
        "test_config.py",
        "test_contributing.py::test_every_file_has_tests",
        "test_contributing.py::test_every_name_in_the_table_exists",
        "test_contributing.py::test_every_test_of_the_quick_tier_exists",
        "test_contributing.py::test_every_test_that_commands_select_exists",
        "test_cpu.py",
        "test_distributed.py::test_gradients_of_a_chunk_are_summed",
        "test_distributed.py::test_parts_count_from_the_begin_of_a_sequence[prefix-None]",
        "test_distributed.py::test_shapes_follow_from_arguments",
        "test_docs.py::test_code[docs/distributed.md]",
        "test_emulated_documents.py::test_dropout[sm_80-3x3-d32-bf16-both-causal-source-dropout]",
        "test_emulated_kernels.py::test_accurate[sm_80-1x1-d32-bf16-both-causal-output]",
        "test_emulated_kernels.py::test_accurate[sm_90a-4x2-d32-bf16-both-causal-source]",
        "test_emulated_kernels.py::test_masks_in_tables[sm_80-3x3-d32-bf16-both-full-tables]",
        "test_emulated_learned.py::test_forward[sm_80-3x3-d32-bf16-both-causal-source-left40-right-1]",
        "test_emulated_pages.py::test_steps_have_the_bits_of_a_cache[1-sm_80-1x1-d32-bf16-both-causal-source]",
        "test_emulated_pages.py::test_chunks_have_the_bits_of_packed_documents[sm_80-1x1-d32-bf16-both-causal-source]",
        "test_emulated_strip.py::test_convolution[(3, 3), left]",
        "test_emulated_strip.py::test_convolution_of_a_decode_step[(3, 3), left]",
        "test_emulated_strip.py::test_gradient_of_the_weight[(3, 3), left]",
        "test_emulated_strip.py::test_product[gradients of shares, of 16, full-sm_80]",
        "test_emulated_strip.py::test_product[gradients of shares, of 16, full-sm_90a]",
        "test_emulated_strip.py::test_softmax[pairs of 10 heads]",
        "test_emulated_strip.py::test_softmax_backward[pairs of 10 heads]",
        "test_emulated_strip.py::test_values[of 16, full]",
        "test_cuda_compile.py::test_parameters_compile",
        "test_dynamic.py::test_emitted_kernels_have_no_atomics[triton]",
        "test_dynamic.py::test_layer_is_that_of_the_paper",
        "test_emulated_tokens.py::test_mixing[before]",
        "test_executor.py",
        "test_expressions.py::test_named_expressions",
        "test_generated.py::test_a_file_for_each_source",
        "test_generated.py::test_cuda_sources_are_clean",
        "test_install.py",
        "test_interpreter.py::test_in_the_interpreter[test_dropout.py]",
        "test_interpreter.py::test_in_the_interpreter[test_rings.py]",
        "test_interpreter.py::test_in_the_interpreter[test_row_kernels.py]",
        "test_keys.py::test_other_sources_make_another_key",
        "test_launches.py::test_inside_a_mode_of_the_callers",
        "test_loops.py::test_the_owner_of_rows_visits_its_tiles_in_the_right_class[left11_right6-0]",
        "test_mask.py",
        "test_measure.py",
        "test_nn.py::test_accurate",
        "test_nn.py::test_generation",
        "test_nn.py::test_is_the_authors_layer",
        "test_offline.py::test_decode_keeps_to_its_registers[64-sm_80]",
        "test_offline.py::test_pages",
        "test_op.py::test_equals_reference",
        "test_paged.py::test_has_the_bits_of_contiguous_keys",
        "test_parameters.py::test_ranges_hold",
        "test_peft.py::test_names_in_other_modules",
        "test_op.py::test_flop_of_hand_computed_sizes",
        "test_prediction.py::test_balance",
        "test_prediction.py::test_one_rank",
        "test_processes.py::test_compiling_imports_nothing_from_the_current_folder",
        "test_project.py",
        "test_retrofit.py::test_same_tokens_as_before[gpt_oss]",
        "test_strip_compile.py::test_chunks_read_pages[sm_80]",
        "test_strip_compile.py::test_steps_read_pages[sm_80]",
        "test_torchtitan_interface.py",
        "test_transformers.py::test_packed_documents",
        "test_transformers.py::test_padding_is_not_seen",
        "test_tuning.py::test_the_time_of_a_kernel_in_strips",
        "test_tuning.py::test_what_is_planned_stays_unless_beaten",
    }
)
FILES = frozenset(name.partition("::")[0] for name in QUICK)


def is_quick(name: str) -> bool:
    """Whether a test belongs to the quick tier, by its name below tests/."""
    function = name.partition("[")[0]
    file = function.partition("::")[0]
    return not QUICK.isdisjoint((file, function, name))
