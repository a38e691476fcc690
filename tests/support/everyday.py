"""Tests that `make test` leaves to `make test-all`, each with the one that proves the same every day.

What is slow by its nature (minutes) carries the mark `slow` where it stands; large matrices carry `one_in`. This list
is for single cases that take seconds and whose subject another test covers: six minutes on two cores are the limit.
"""

from __future__ import annotations

ALSO_PROVED = {
    # drafting ahead in a process
    "ahead/test_ahead_worker.py::test_a_disturbed_process_changes_nothing[1-0.9]": "the same, [8-0.0]",
    "ahead/test_ahead_worker.py::test_no_process_outlives_the_program[abrupt]": "the same, ordinarily",
    "ahead/test_ahead_worker.py::test_a_process_that_cannot_start_reports_why": "test_a_killed_process_is_restarted",
    "ahead/test_ahead_worker.py::test_a_process_that_stays_stopped_is_ended": "test_a_killed_process_is_restarted",
    "ahead/test_ahead_worker.py::test_the_model_is_waited_for_only_before_the_first_request": "test_ahead_modes.py",
    "ahead/test_ahead.py::test_conformance_kit_with_a_model_that_is_often_wrong": "test_lossless.py: the kit, ahead",
    "ahead/test_ahead.py::test_the_targets_noise_finds_its_choice": "test_ahead_modes.py",
    "ahead/test_ahead_graphs.py::test_captured_passes_grow_the_same_forks": "test_ahead.py, eager",
    "ahead/test_ahead_sim.py": "test_ahead_pays.py",
    # loops and captured passes in triton's interpreter
    "backends/test_rounds.py::test_every_source_of_drafts[head]": "the same, tree",
    "backends/test_rounds.py::test_every_source_of_drafts[layerskip]": "the same, model",
    "backends/test_rounds.py::test_every_source_of_drafts[suffix]": "test_late_drafts_are_accepted",
    "backends/test_graphs.py::test_every_drafter_says_what_the_target_says[model-options0-2]": "test_rounds.py, model",
    "backends/test_graphs.py::test_every_drafter_says_what_the_target_says[suffix-options4-2]": "test_rounds.py",
    "backends/test_graphs.py::test_a_good_draft_is_accepted_without_being_read": "test_rounds.py, model",
    "backends/test_uncaptured.py::test_a_text_on_a_device_is_scored_as_on_the_cpu": "test_cuda.py",
    "head/test_head_graphs.py::test_nothing_is_missed_while_nothing_is_drafted": "test_rounds.py, tree",
    "head/test_head_graphs.py::test_streams_are_left_where_their_rows_are": "test_rounds.py, tree",
    "head/test_head_gpu.py::test_both_devices_agree[block-2]": "the same, other shapes",
    "translate/test_translate_graphs.py": "test_translate.py, eager",
    "backends/test_native.py::test_two_processes_may_build_and_quantise_at_once": "test_what_was_built_is_used_again",
    "backends/test_device.py::test_a_draft_model_beside_an_int8_target[None]": "the same, other dtypes",
    "backends/test_blocks.py::test_no_bit_is_lost[Q4_0]": "the same, Q4_1",
    "backends/test_blocks.py::test_no_bit_is_lost[Q8_0]": "the same, Q4_1",
    "head/test_head.py::test_no_head_changes_the_text[('eagle3', 1)-True]": "the same, other shapes",
    "head/test_head.py::test_no_head_changes_the_text[('block', 3)-False]": "the same, other shapes",
    "head/test_int8_head.py::test_no_head_in_eight_bits_changes_the_text[('eagle3', 1)-False]": "the same, others",
    # real weights
    "cli/test_cli.py::test_verify_on_the_default_model": "test_llm.py::test_real_drafters_change_nothing",
    "engine/test_guides.py::test_real_json_with_and_without_speculation[greedy]": "the same, warm",
    "layerskip/test_skipsearch.py::test_real_weights": "test_llm.py::test_real_drafters_change_nothing[layerskip]",
    "measure/test_bench.py::test_real_weights": "test_measure_cli.py",
    # methods that train or learn
    "exit/test_exit.py::test_the_text_stays[options0]": "the same, options1",
    "exit/test_exit.py::test_others_may_write_scratch_into_the_same_places": "test_lossless.py: the kit, exit",
    "exit/test_exit.py::test_one_command_makes_an_exit[0]": "the same, 200",
    "head/test_train_head.py::test_a_narrow_head_learns_too[int8]": "the same, in floats",
    "head/test_train_head.py::test_a_trained_head_drafts_as_well_as_evaluated": "test_one_command_makes_a_head",
    "exit/test_exit.py::test_an_adapter_is_read_back_and_changes_no_text": "test_the_text_stays",
    "head/test_int8_head.py::test_eight_bits_can_be_asked_for": "test_int8_head.py, the others",
    "layerskip/test_refine.py::test_comparing_changes_no_text": "test_lossless.py: the kit, layerskip",
    "layerskip/test_skipsearch.py::test_seeds_skip_the_least_important_layers": "test_the_planted_set_is_found",
    "online/test_online_head.py::test_a_learning_head_changes_no_text": "test_lossless.py: the kit, online",
    "layerskip/test_skipsearch.py::test_a_drafter_with_a_shortlist_changes_no_text": "test_lossless.py: the kit",
    "online/test_online.py::test_learning_goes_on_after_one_failure": "test_an_interrupted_update_leaves_nothing",
    "online/test_online.py::test_the_target_is_left_alone": "test_lossless.py: the kit, online",
    "online/test_online.py::test_what_was_learnt_is_kept_and_loaded": "test_learn_cli.py",
    "online/test_online_head.py::test_a_fresh_adapter_says_what_the_head_says": "test_lossless.py: the kit, online",
    "train/test_train.py::test_a_generation_pool_gives_the_answers_of_one_process": "test_kill_and_resume",
    "train/test_train.py::test_one_command_makes_a_small_model": "test_one_command_makes_a_head",
    "train/test_train.py::test_a_training_can_begin_with_another_head": "test_kill_and_resume",
    "translate/test_translate.py::test_it_is_a_drafter_like_any_other[slem]": "the same, tli",
    "backends/test_transformers.py::test_greedy_text_is_that_of_every_k_batch_and_chunk[t5]": "the same, others",
    # the server and the page
    "server/test_server_live.py::test_sigterm_lets_streams_end[0]": "the same, [20]",
    "web/test_page.py::test_run_and_what_if_are_accessible_and_fit_a_phone[dark]": "the same, light",
    "web/test_page.py::test_a_bad_traces_error_is_seen_where_the_reader_is[desktop]": "the same, phone",
    "web/test_page_stage.py::test_next_never_moves_and_the_prompt_stays[desktop]": "the same, phone",
    "web/test_page_stage.py::test_every_station_is_accessible[desktop]": "the same, phone",
}


def is_left_out(nodeid: str) -> bool:
    if "narrowest" in nodeid:  # the same source without vectors; `tuned` every day
        return True
    return any(f"{place}[" in f"{nodeid}[" or f"{place}::" in nodeid for place in ALSO_PROVED)
