"""What `scripts/test` leaves to `scripts/test --all`: long sweeps. Controls of flags and fences are in none of them."""

from __future__ import annotations

import pytest

KERNELS, UNIT, MPI = "tests/kernels/", "tests/unit/", "tests/mpi/"
QUICK_RUNS_EVERY = {
    # Registers, types and devices of kernels: NVRTC takes about a second for each.
    f"{KERNELS}test_compiled.py::test_kernel_for_bandwidth_has_the_registers_it_needs": 6,
    f"{KERNELS}test_compiled.py::test_kernels_with_epilogues_have_the_registers_they_need": 4,
    f"{KERNELS}test_compiled.py::test_updates_of_every_type_compile": 6,
    f"{KERNELS}test_compiled.py::test_the_largest_block_fits_on_every_gpu": 4,
    f"{KERNELS}test_compiled.py::test_public_header_compiles_in_kernels_of_a_user": 3,
    f"{KERNELS}test_compiled.py::test_expressions_compile": 4,
    f"{UNIT}devices/cuda/test_compile.py::test_every_kernel_compiles": 2,
    # Kernels on CPU threads: further numbers of ranks, types, sizes and seeds.
    f"{KERNELS}test_negative_controls.py::test_every_class_of_types": 5,
    f"{KERNELS}test_negative_controls.py::test_every_size_at_which_something_changes": 3,
    f"{KERNELS}test_chain.py::test_every_class_of_types": 2,
    f"{KERNELS}test_chain.py::test_every_size_at_which_something_changes_past_the_end_of_32_bits": 3,
    f"{KERNELS}test_coded_packets.py::test_results_have_the_bits_of_the_host": 4,
    f"{KERNELS}test_epilogues.py::test_conversions_in_the_kernel_that_reduces": 3,
    f"{KERNELS}test_epilogues.py::test_the_kernel_after_the_reduction": 2,
    f"{KERNELS}test_epilogues.py::test_in_the_kernel_that_reduces": 2,
    f"{KERNELS}test_experts.py::test_random_routings": 4,
    f"{KERNELS}test_experts.py::test_no_race": 0,
    f"{KERNELS}test_norms.py::test_rows_are_normalised": 3,
    f"{KERNELS}test_norms.py::test_slots_are_used_again": 4,
    f"{KERNELS}test_norms.py::test_what_is_put_back_may_arrive_as_late_as_the_next_fence": 2,
    f"{KERNELS}test_packets.py::test_every_size_at_which_something_changes": 2,
    f"{KERNELS}test_packets.py::test_hundreds_of_launches_while_numbers_begin_again": 4,
    f"{KERNELS}test_packets.py::test_no_race_between_ranks_that_send_unevenly": 0,
    f"{KERNELS}test_packets.py::test_one_rank_sends_more_than_the_other": 3,
    f"{KERNELS}test_packets.py::test_types_of_every_width": 4,
    f"{KERNELS}test_programs.py::test_collectives_of_any_size": 0,
    f"{KERNELS}test_programs.py::test_straight_into_memory": 4,
    f"{KERNELS}test_negative_controls.py::test_rings_of_every_class_of_types": 3,
    f"{KERNELS}test_negative_controls.py::test_rings_of_every_size_at_which_something_changes": 3,
    f"{KERNELS}test_norms.py::test_the_kernel_after_the_reduction": 4,
    f"{KERNELS}test_norms.py::test_the_kernel_that_reduces": 4,
    # On ranks: further types, shapes, and places of arrays.
    f"{MPI}collectives/test_collectives.py::test_every_reduction_of_every_type": 3,
    f"{MPI}domains/test_collectives.py::test_movements": 4,
    f"{MPI}domains/test_collectives.py::test_reductions": 5,
    f"{MPI}messages/test_derived_messages.py::test_kernels_pack_and_unpack": 4,
    f"{MPI}symmetric/test_array.py::test_dtype_and_every_shape": 3,
    # Jobs of ranks: further ends of programs, planted faults and numbers of ranks.
    f"{UNIT}helpers/test_peer_death.py::test_survivors_of_any_death_learn_it_in_time_and_go_on": 2,
    f"{UNIT}scripts/test_recorded_results.py::test_rows_of_long_runs_share_a_table": 0,
    f"{UNIT}scripts/test_soak.py::test_nothing_is_wrong_and_nothing_grows": 0,
    f"{UNIT}test_examples.py::test_a_picture_without_matplotlib_is_refused": 5,
    f"{UNIT}test_examples.py::test_halo_exchange_computes_the_results_of_one_rank": 3,
    f"{UNIT}test_examples.py::test_stock_program_gives_the_results_of_mpi4py": 3,
    f"{UNIT}test_process_end.py::test_clean_end_is_clean": 4,
    f"{UNIT}test_ring_command.py::test_all_is_well": 2,
}
"""Of the parameters of a test the quick run takes the last one of so many; of a test with 0 it takes none."""


def mark_sweeps(items: list[pytest.Item]) -> None:
    """Mark what is left to ``--all``."""
    seen: dict[str, int] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        every = QUICK_RUNS_EVERY.get(test)
        if every is None:
            continue
        seen[test] = seen.get(test, 0) + 1
        if every == 0 or seen[test] % every:
            item.add_marker(pytest.mark.sweep)
