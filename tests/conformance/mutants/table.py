"""Every planted fault: what it is built on, the kind of fault, the public cases it repeats, and the promise that finds it.

Data only. `healthy` is the same cache without the fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from harness.conformance.subject import Factory, Subject
from kernels.api import Ops
from strategies import contiguous
from strategies.base import KVCache
from strategies.contiguous import Contiguous
from strategies.kivi import Kivi
from strategies.paged import Paged
from tests.conformance.mutants import caches, kernels

PAGED = {"page_size": 4}
WINDOW = {"page_size": 4, "window": 7, "sinks": 2, "slack": 5}
PREFIX = {"page_size": 4, "prefix": True}
INT8 = {"page_size": 4, "codec_k": "int8", "codec_v": "int8"}
Q8 = {"page_size": 4, "codec_k": "q8_0", "codec_v": "q8_0"}
FOUND_BY_A_GREEDY_RUN = {"decode_window_is_one_short"}
KIVI = {"bits": 4, "group": 4, "residual": 6, "value_group": 8, "slack": 5}


@dataclass(frozen=True)
class Mutant:
    """One planted fault. `build(geometry, budget, ops, **parameters)` makes the faulty cache, `sound` the healthy one."""

    name: str
    kind: str
    cases: tuple[str, ...]
    killer: str  # the promise that finds it
    build: Callable[..., KVCache]
    sound: Callable[..., KVCache]
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def survives_greedy(self) -> bool:
        """Whether one sequence, fed at once and decoded greedily, gives the tokens of the healthy cache."""
        return self.name not in FOUND_BY_A_GREEDY_RUN

    def subject(self, faulty: bool = True, examples: int = 8) -> Subject:
        """The subject to put before the kit."""
        build = self.build if faulty else self.sound

        def vary(parameters: dict[str, Any]) -> Factory:
            return lambda geometry, budget, ops: build(geometry, budget, ops, **parameters)

        return Subject(self.name, vary(self.parameters), "reference", 0, examples, self.parameters, vary)


def _attend(kind: str, cases: str, killer: str, fault: kernels.Attend, parameters: dict[str, Any]) -> Mutant:
    """A fault in the attention kernel of a paged cache."""
    return _ops(kind, cases, killer, lambda ops: kernels.with_attend(ops, fault), parameters, fault.__name__)


def _encode(kind: str, cases: str, killer: str, fault: Callable[..., Any], parameters: dict[str, Any]) -> Mutant:
    """A fault in the write kernel of a paged cache."""
    return _ops(kind, cases, killer, lambda ops: kernels.with_encode(ops, fault), parameters, fault.__name__)


def _ops(kind: str, cases: str, killer: str, fault: Callable[[Ops], Ops], parameters: dict[str, Any], name: str = "") -> Mutant:
    def build(geometry, budget, ops, **own):
        return Paged(geometry, budget, fault(ops), **own)

    return Mutant(name or fault.__name__, kind, tuple(cases.split()), killer, build, Paged, parameters)


def _cache(kind: str, cases: str, killer: str, fault: type, sound: type, parameters: dict[str, Any]) -> Mutant:
    """A fault in a cache class."""
    return Mutant(fault.__name__, kind, tuple(cases.split()), killer, fault, sound, parameters)


def _part(kind: str, cases: str, killer: str, fault: type, parameters: dict[str, Any], part: str = "Lane") -> Mutant:
    """A fault in a part of a paged cache."""
    return Mutant(fault.__name__, kind, tuple(cases.split()), killer, caches.paged_with(**{part: fault}), Paged, parameters)


def _never_merges(*arguments: Any, **parameters: Any) -> KVCache:
    with mock.patch.object(contiguous, "Extents", caches.NeverMerges):
        return Contiguous(*arguments, **parameters)


MUTANTS = [
    _attend("B", "B02 B06", "every_query_attends_exactly_the_allowed_set", kernels.decode_window_is_one_short, WINDOW),
    _attend("B", "B11", "every_query_attends_exactly_the_allowed_set", kernels.later_chunks_share_one_mask, WINDOW),
    _attend("B", "B08", "no_chunking_changes_an_answer", kernels.chunk_larger_than_the_window_overruns, WINDOW),
    _attend("B", "B05 D02", "batches_of_whole_and_partial_pages_are_exact", kernels.last_page_is_cut_short_in_a_batch, PAGED),
    _attend("B", "B06", "every_query_attends_exactly_the_allowed_set", kernels.sinks_are_forgotten_by_chunks, WINDOW),
    _cache("P", "P01", "ragged_prompts_keep_their_own_positions", caches.OnePositionRow, Paged, PAGED),
    _cache("P", "P03 P09", "rewind_within_reach_is_exact_and_beyond_it_is_refused", caches.RollbackKeepsCounting, Paged, PAGED),
    _cache("P", "P01", "forks_and_rewinds_number_tokens_alike", caches.ForksCountTwice, Paged, PAGED),
    _cache("P", "P01", "ragged_prompts_keep_their_own_positions", caches.LogitsOfTheLastRow, Paged, PAGED),
    _cache("P", "P08", "rewind_within_reach_is_exact_and_beyond_it_is_refused", caches.PromisesOneTooMany, Paged, WINDOW),
    _cache("P", "P08", "rewind_within_reach_is_exact_and_beyond_it_is_refused", caches.RefusesOneTooEarly, Paged, WINDOW),
    _cache("L", "L01 L04", "six_interleaved_sequences_answer_as_if_alone", caches.WritesOnce, Contiguous, {}),
    _cache("L", "L13", "closed_sequences_are_gone", caches.ReusesIds, Paged, PAGED),
    _part("L", "L05", "memory_handed_on_gives_the_bits_of_fresh_memory", caches.TrustsTheHash, PREFIX, "PrefixIndex"),
    _part("L", "L05", "only_a_prefix_of_the_same_tokens_is_adopted", caches.ForgetsTheParent, PREFIX, "PrefixIndex"),
    _cache("L", "L08", "what_was_never_committed_is_never_adopted", caches.PublishesWhatItPlans, Paged, PREFIX),
    _part("L", "L05 R07", "what_was_published_is_never_written_to", caches.lane_with_pool(caches.WritesToPublishedPages), PREFIX),
    _cache("L", "L10", "pads_reach_no_sequence", caches.PadsTakeTheLastRow, Paged, PAGED),
    _cache("L", "L10", "pads_reach_no_sequence", caches.PadsAreNotBilled, Contiguous, {}),
    _part("R", "R07", "forks_share_until_they_write", caches.NoCopyOnWrite, PAGED),
    _cache("R", "R07 R02", "rewind_by_ones_with_a_fork_at_each_stop", caches.CopiesOnlyKeys, Paged, PAGED),
    _cache("R", "R02", "rewind_by_ones_with_a_fork_at_each_stop", caches.CopiesKeysIntoValues, Paged, PAGED),
    _part("R", "R01", "rewind_by_ones_with_a_fork_at_each_stop", caches.CutsAPageTooMuch, PAGED),
    _part("R", "A10 R07", "abort_after_any_layer_is_as_if_never_planned", caches.UndoForgetsTheCopy, PAGED),
    _cache("R", "R06", "rewind_by_ones_with_a_fork_at_each_stop", caches.TwinHistories, Paged, PAGED),
    _encode("Q", "Q07", "neighbouring_heads_do_not_share_a_scale", kernels.scale_is_shared_by_heads, INT8),
    _encode("Q", "Q01", "codes_do_not_depend_on_how_tokens_were_fed", kernels.scale_is_shared_by_a_call, INT8),
    _encode("Q", "Q01", "rows_read_back_as_written_for_every_head_dim", kernels.codes_are_truncated, INT8),
    _encode("Q", "Q07", "rows_read_back_as_written_for_every_head_dim", kernels.short_group_borrows_a_scale, Q8),
    _encode("Q", "Q03", "rows_read_back_as_written_for_every_head_dim", kernels.padding_lanes_join_the_range, Q8),
    _cache("Q", "Q09 Q01", "rows_read_back_as_written_for_every_head_dim", caches.ChunkAges, Kivi, KIVI),
    _cache("Q", "Q01 C04", "the_codec_is_really_read", caches.OnlyClaimsInt8, Paged, INT8),
    _part("A", "A04", "cutting_gives_capacity_back", caches.LeaksCutPages, PAGED),
    _part("A", "A10", "cancel_at_any_moment_leaks_nothing", caches.LeaksAbortedPages, PAGED),
    _cache("A", "A01", "full_plan_changes_nothing", caches.RefusalCostsAPage, Paged, PAGED),
    _cache("A", "A01", "full_plan_changes_nothing", caches.ShortByNothing, Paged, PAGED),
    _cache("A", "A02", "no_memory_is_given_to_two", caches.FreesWithoutCounting, Contiguous, {}),
    _part("A", "A07", "capacity_comes_back_after_any_life", caches.lane_with_pool(caches.StalePrefix), PREFIX),
    Mutant("NeverMerges", "A", ("A04",), "capacity_comes_back_after_any_life", _never_merges, Contiguous, {}),
    _ops("N", "N01 B04", "memory_that_is_not_read_changes_no_bit", kernels.tail_of_the_last_page_is_multiplied, PAGED),
    _attend("N", "N06", "huge_scores_do_not_overflow", kernels.softmax_does_not_shift, PAGED),
    _attend("N", "N06", "huge_scores_do_not_overflow", kernels.scores_are_kept_in_float16, PAGED),
    _attend("N", "N03", "one_visible_key_gives_its_value", kernels.empty_tile_has_no_guard, WINDOW),
    _encode("N", "N05", "zero_and_constant_rows_read_back_exactly", kernels.zero_rows_divide_by_zero, INT8),
    _attend("N", "N06", "softcap_bounds_the_scores", kernels.softcap_is_not_passed_on, PAGED),
    _attend("X", "X03", "query_heads_map_to_their_own_kv_head", kernels.heads_divide_by_kv_heads, PAGED),
    _attend("X", "X05", "head_dims_of_every_size_use_every_lane", kernels.only_64_lanes_are_scored, PAGED),
    _attend("X", "X08", "input_strides_do_not_matter", kernels.query_is_scaled_in_place, PAGED),
    _ops("X", "X08", "every_element_is_read_where_it_was_written", kernels.batches_read_the_first_table, PAGED),
    _ops("X", "X01", "rows_far_into_a_large_pool_are_their_own", kernels.small_integers_hold_the_slots, PAGED),
    _ops("X", "X08", "input_strides_do_not_matter", kernels.strides_are_taken_for_granted, PAGED),
    _attend("D", "D01 D05", "batch_mates_do_not_matter", kernels.mates_lower_the_precision, PAGED),
    _attend("D", "D04", "placement_does_not_matter", kernels.physical_order_is_walked, PAGED),
    _attend("D", "D04", "capacity_does_not_matter", kernels.pool_size_picks_the_splits, PAGED),
    _attend("D", "D08", "placement_does_not_matter", kernels.second_call_forgets_the_newest_key, PAGED),
    _attend("D", "D05", "working_dtypes_stay_within_the_derived_bound", kernels.bfloat16_accumulates_in_bfloat16, PAGED),
    _cache("C", "C02", "live_bytes_follow_the_closed_formula", caches.BillsTheFormula, Paged, PAGED),
    _cache("C", "C02", "predicted_bytes_are_reserved_bytes", caches.ForgetsScales, Paged, INT8),
    _cache("C", "C02", "live_bytes_follow_the_closed_formula", caches.WindowIsStillLive, Paged, WINDOW),
    _cache("C", "C02", "shared_memory_is_counted_once", caches.ForksAreBilledTwice, Contiguous, {}),
    _cache("C", "C01", "predicted_bytes_are_reserved_bytes", caches.RoundsDown, Paged, PAGED),
    _cache("C", "C08", "buffers_die_with_their_cache", caches.NeverLetsGo, Paged, PAGED),
    _cache("C", "C07", "shared_memory_is_counted_once", caches.OverspendsByAPage, Paged, PAGED),
]
