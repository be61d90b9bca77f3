"""What `scripts/test` leaves to `scripts/test --all`: long sweeps, and most examples of Hypothesis.

A flag or fence whose controls differ only in the algorithm around it keeps one of them.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

KERNELS, UNIT, MPI = "tests/kernels/", "tests/unit/", "tests/mpi/"
QUICK_RUNS_EVERY = {
    # Registers, types and devices of kernels: NVRTC takes about a second for each.
    f"{KERNELS}test_compiled.py::test_kernel_has_the_registers_it_needs": 9,
    f"{KERNELS}test_compiled.py::test_updates_of_every_type_compile": 11,
    f"{KERNELS}test_compiled.py::test_public_header_compiles_in_kernels_of_a_user": 3,
    f"{KERNELS}test_compiled.py::test_expressions_compile": 4,
    f"{UNIT}collectives/gpu/algorithms/test_arguments.py::test_every_reduction_compiles": 3,
    f"{UNIT}collectives/gpu/algorithms/test_arguments.py::"
    "test_every_kernel_compiles_and_agrees_with_the_host_on_structures_and_constants": 4,
    f"{UNIT}collectives/gpu/algorithms/test_arguments.py::test_host_and_kernel_agree_on_the_threads_of_a_block": 4,
    # Kernels on CPU threads: further numbers of ranks, types, sizes and seeds.
    f"{KERNELS}test_collectives.py::test_every_class_of_types": 3,
    f"{KERNELS}test_collectives.py::test_every_size_at_which_something_changes": 3,
    f"{KERNELS}test_negative_controls.py::test_hundreds_of_calls_across_the_end_of_32_bits": 0,
    f"{KERNELS}test_accumulate.py::test_updates_of_several_ranks_are_atomic": 4,
    f"{KERNELS}test_packets.py::test_results_have_the_bits_of_the_host": 4,
    f"{KERNELS}test_device_counts.py::test_every_rank_gets_its_blocks_and_their_counts": 3,
    f"{KERNELS}test_user_kernels.py::test_messages_arrive": 5,
    f"{KERNELS}test_user_kernels.py::test_no_race_in_functions": 3,
    f"{KERNELS}test_user_kernels.py::test_reduction_equals_numpys_in_rank_order": 7,
    f"{KERNELS}test_epilogues.py::test_the_kernel_after_the_reduction": 2,
    f"{KERNELS}test_epilogues.py::test_in_the_kernel_that_reduces": 4,
    f"{KERNELS}test_experts.py::test_random_routings": 3,
    f"{KERNELS}test_experts.py::test_no_race": 0,
    f"{KERNELS}test_norms.py::test_a_thread_that_gives_up_in_a_row_leaves_with_its_group": 2,
    f"{KERNELS}test_norms.py::test_fences_that_come_too_late_for_rows_are_found": 2,
    f"{KERNELS}test_norms.py::test_no_race": 0,
    f"{KERNELS}test_norms.py::test_no_race_of_scales": 2,
    f"{KERNELS}test_norms.py::test_slots_are_used_again": 4,
    f"{KERNELS}test_norms.py::test_what_is_put_back_may_arrive_as_late_as_the_next_fence": 2,
    f"{KERNELS}test_packets.py::test_hundreds_of_launches_while_numbers_begin_again": 3,
    f"{KERNELS}test_packets.py::test_no_race": 2,
    f"{KERNELS}test_packets.py::test_no_race_between_ranks_that_send_unevenly": 0,
    f"{KERNELS}test_packets.py::test_one_rank_sends_more_than_the_other": 3,
    f"{KERNELS}test_norms.py::test_the_kernel_after_the_reduction": 4,
    f"{KERNELS}test_norms.py::test_the_kernel_that_reduces": 4,
    f"{KERNELS}test_packets.py::test_no_race_if_quantized": 0,
    f"{KERNELS}test_compiled.py::test_functions_for_users_move_words_of_sixteen_bytes": 3,
    f"{KERNELS}test_compiled.py::test_slots_in_memory_of_the_host_take_fences_of_the_whole_system": 2,
    # On ranks: further types, shapes, and places of arrays.
    f"{MPI}collectives/test_collectives.py::test_reductions_have_the_same_bits_by_every_algorithm_on_every_rank": 3,
    f"{MPI}domains/test_collectives.py::test_movements": 4,
    f"{MPI}domains/test_collectives.py::test_reductions": 5,
    f"{MPI}messages/test_mixed_messages.py::test_any_buffer_is_received_into_any_buffer": 3,
    f"{MPI}collectives/test_collectives.py::test_large_reductions": 3,
    f"{MPI}domains/test_collectives.py::test_long_calls_go_in_pieces": 3,
    f"{MPI}session/test_missing_ranks.py::test_a_communicator_can_be_made_after_a_rank_came_late": 3,
    f"{MPI}session/test_missing_ranks.py::test_a_rank_that_comes_after_the_others_have_given_up_raises_as_they_did": 3,
    f"{MPI}session/test_setup_failures.py::test_what_fails_on_one_rank_fails_on_all": 2,
    # One process: further orders of streams, forms and shapes; all links.
    f"{UNIT}collectives/gpu/algorithms/test_copies.py::test_calls_in_any_order_of_streams": 4,
    f"{UNIT}collectives/gpu/test_decision.py::test_all_ranks_choose_alike": 3,
    f"{UNIT}collectives/test_packed.py::test_ranks_with_gaps_meet_ranks_without": 3,
    f"{UNIT}scripts/test_written_files.py::test_every_link_leads_to_a_page_or_a_file_and_to_its_anchor": 0,
    # Jobs of ranks: further ends of programs, planted faults and numbers of ranks.
    f"{UNIT}doctor/test_doctor_command.py::test_an_import_without_an_mpi_says_the_way_out": 3,
    f"{UNIT}recording/test_recordings.py::test_the_trace_ends_and_the_table_is_printed": 3,
    f"{UNIT}test_examples.py::test_halo_exchange_computes_the_results_of_one_rank": 3,
    f"{UNIT}test_examples.py::test_stock_program_gives_the_results_of_mpi4py": 3,
    f"{UNIT}test_process_end.py::test_exception_of_one_rank_ends_the_job": 3,
    f"{UNIT}test_process_end.py::test_interrupt_ends_the_job": 3,
    f"{UNIT}test_process_end.py::test_rank_that_did_not_come_keeps_no_rank_from_ending": 2,
    f"{UNIT}cli/test_planted_faults.py::test_an_error_on_one_rank_ends_the_job": 2,
    f"{UNIT}test_runner.py::test_a_program_starts_and_ends_mpi_itself": 2,
    f"{UNIT}cli/test_commands.py::test_every_collective_runs": 0,
    f"{UNIT}doctor/test_doctor_command.py::test_containers": 3,
    f"{UNIT}helpers/test_jobs.py::test_the_end_names_the_rank_that_a_signal_ended_and_its_test": 0,
    f"{UNIT}helpers/test_jobs.py::test_what_failed": 0,
    f"{UNIT}scripts/test_written_files.py::"
    "test_the_site_begins_with_the_first_document_and_each_page_has_all_others_in_its_navigation": 0,
    f"{UNIT}test_examples.py::test_programs_find_wrong_results": 0,
    f"{UNIT}test_examples.py::test_heat_equals_the_heat_of_one_rank_in_every_way": 2,
}
"""Of the parameters of a test the quick run takes the last one of so many; of a test with 0 it takes none."""


QUICK_LEAVES_OUT = {
    # Another mistake with the same flag, or the same line in another kernel.
    f"{KERNELS}test_user_kernels.py::test_mistake_is_seen": (
        "put_around-Block-  group.sync();  // a thread copies bytes",
        "get_around-Block-  group.sync();  // without it",
    ),
    f"{KERNELS}test_experts.py::test_race_is_seen": (" loaded relaxed",),
    f"{KERNELS}test_experts.py::test_race_of_packets_is_seen": (
        "announcement turned",
        "announcement loaded",
    ),
    f"{KERNELS}test_packets.py::test_mistake_with_fences_in_two_hops_is_seen": ("a turn too seldom",),
    f"{KERNELS}test_sendrecv.py::test_race_is_seen": ("acquire turned relaxed",),
    f"{MPI}collectives/host/test_engine.py::test_random_calls": ("many",),
}
"""Of these tests the quick run leaves out the parameters with these words."""


EXAMPLES, FEWEST_EXAMPLES = 4, 10
"""The quick run draws every fourth example of Hypothesis, and no fewer than so many."""


def mark_sweeps(items: list[pytest.Item]) -> None:
    """Mark what is left to ``--all``."""
    seen: dict[str, int] = {}
    for item in items:
        test, _, parameters = item.nodeid.partition("[")
        if any(words in parameters for words in QUICK_LEAVES_OUT.get(test, ())):
            item.add_marker(pytest.mark.sweep)
        every = QUICK_RUNS_EVERY.get(test)
        if every is None:
            continue
        seen[test] = seen.get(test, 0) + 1
        if every == 0 or seen[test] % every:
            item.add_marker(pytest.mark.sweep)


def draw_few_examples(items: list[pytest.Item]) -> None:
    """Let tests of Hypothesis draw as many examples as the quick run does."""
    for test in {getattr(item, "function", None) for item in items}:
        # Hypothesis has no public way to change the settings of a test. Without this one all examples are drawn.
        given = getattr(test, "_hypothesis_internal_use_settings", None)
        if given is not None:
            fewer = min(given.max_examples, max(FEWEST_EXAMPLES, given.max_examples // EXAMPLES))
            setattr(test, "_hypothesis_internal_use_settings", settings(given, max_examples=fewer))  # noqa: B010
