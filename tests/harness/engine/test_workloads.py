"""Workloads are pure functions of parameters, seed and text."""

from __future__ import annotations

import json
import random
from itertools import combinations, pairwise

import pytest

from harness.engine.traces import Trace, read_trace
from harness.engine.workloads import Fork, Poisson, Ragged, Rewind, SharedPrefix, Steady, log_uniform
from harness.errors import UserError

STREAM = [(i * i + 7 * i) % 997 for i in range(5000)]


def occurs(piece, stream) -> bool:
    return any(tuple(stream[i : i + len(piece)]) == tuple(piece) for i in range(len(stream)))


def test_steady_prompts_are_different_slices_of_the_text():
    requests = Steady(batch=8, prompt_tokens=64, new_tokens=5).requests(STREAM, seed=0, context=128)
    assert [request.id for request in requests] == list(range(8))
    assert {(len(request.prompt), request.max_new_tokens, request.arrival_s) for request in requests} == {(64, 5, 0.0)}
    assert all(request.ignore_eos for request in requests)
    assert len({request.prompt for request in requests}) == 8
    assert all(occurs(request.prompt, STREAM) for request in requests)


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    make = Steady(batch=4, prompt_tokens=32, new_tokens=5)
    assert make.requests(STREAM, 0, 128) == make.requests(STREAM, 0, 128)
    assert {r.prompt for r in make.requests(STREAM, 0, 128)} != {r.prompt for r in make.requests(STREAM, 1, 128)}


def test_prompts_do_not_overlap_while_the_text_is_long_enough():
    stream = list(range(640))
    requests = Steady(batch=10, prompt_tokens=64, new_tokens=1).requests(stream, 0, 128)
    for a, b in combinations(requests, 2):
        assert not set(a.prompt) & set(b.prompt)


def test_a_short_text_still_gives_different_prompts():
    requests = Steady(batch=3, prompt_tokens=8, new_tokens=1).requests(list(range(10)), 0, 128)
    assert len({request.prompt for request in requests}) == 3


def test_a_text_without_enough_prompts_is_refused_with_the_numbers():
    with pytest.raises(UserError, match="the text has 10 tokens, which is too short for 4 different prompts of up to 8 tokens"):
        Steady(batch=4, prompt_tokens=8).requests(list(range(10)), 0, 128)
    with pytest.raises(UserError, match="the text has 20 tokens, which is too short for 2 different"):
        Steady(batch=2, prompt_tokens=4).requests([3] * 20, 0, 128)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers():
    with pytest.raises(UserError, match="a prompt of 500 tokens with 32 new tokens does not fit the model's context of 256 tokens"):
        Steady(prompt_tokens=500).requests(STREAM, 0, 256)
    assert Steady(prompt_tokens=225, new_tokens=32).requests(STREAM, 0, 256)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Steady(batch=0), "workload.batch=0"),
        (lambda: Steady(prompt_tokens=0), "workload.prompt_tokens=0"),
        (lambda: Steady(new_tokens=0), "workload.new_tokens=0"),
        (lambda: Steady(step_tokens=0), "workload.step_tokens=0"),
        (lambda: Steady(max_sequences=0), "workload.max_sequences=0"),
        (lambda: Steady(temperature=-1.0), "workload.temperature=-1.0"),
        (lambda: Steady(top_p=0.0), "workload.top_p=0.0"),
        (lambda: Ragged(prompt_tokens_min=9, prompt_tokens_max=8), "workload.prompt_tokens_max=8: use 9 or more"),
        (lambda: Poisson(rate_per_s=0.0), "workload.rate_per_s=0.0"),
        (lambda: Trace(path="x.csv", speed=0.0), "workload.speed=0.0"),
    ],
)
def test_values_that_make_no_sense_are_named(make, named):
    with pytest.raises(UserError, match=named):
        make()


def test_ragged_lengths_stay_in_their_bounds_and_differ():
    requests = Ragged(batch=40, prompt_tokens_min=4, prompt_tokens_max=60, new_tokens_min=2, new_tokens_max=9).requests(STREAM, 3, 128)
    lengths = {len(request.prompt) for request in requests}
    assert min(lengths) >= 4
    assert max(lengths) <= 60
    assert len(lengths) > 10
    assert {request.max_new_tokens for request in requests} <= set(range(2, 10))


def test_log_uniform_reaches_both_ends_and_nothing_else():
    rng = random.Random(0)
    assert {log_uniform(rng, 2, 5) for _ in range(500)} == {2, 3, 4, 5}


def test_a_shared_prefix_is_shared_and_the_rest_is_not():
    requests = SharedPrefix(batch=5, prefix_tokens=48, prompt_tokens=16, new_tokens=4, gap_s=0.5).requests(STREAM, 0, 128)
    assert len({request.prompt[:48] for request in requests}) == 1
    assert len({request.prompt[48:] for request in requests}) == 5
    assert [request.arrival_s for request in requests] == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_forks_leave_room_for_their_ids():
    requests = Fork(batch=3, prompt_tokens=16, new_tokens=4, samples=4).requests(STREAM, 0, 128)
    assert [id_ for request in requests for id_ in request.ids] == list(range(12))
    assert {request.temperature for request in requests} == {0.8}


def test_rewind_asks_for_guesses():
    assert {r.draft_tokens for r in Rewind(batch=2, draft_tokens=3, prompt_tokens=8).requests(STREAM, 0, 128)} == {3}


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential():
    requests = Poisson(batch=2000, rate_per_s=4.0, prompt_tokens_max=20).requests(list(range(50_000)), 1, 128)
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert requests[0].arrival_s == 0.0
    assert mean == pytest.approx(0.25, rel=0.1)
    assert spread / mean == pytest.approx(1.0, rel=0.1)


@pytest.fixture
def azure(tmp_path):
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:16:00,8,1\n"
    )
    return str(file)


@pytest.fixture
def mooncake(tmp_path):
    file = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 4000, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 9]},
        {"timestamp": 2500, "input_length": 600, "output_length": 3, "hash_ids": [0, 4]},
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(file)


def test_an_azure_trace_gives_times_from_its_first_line_and_lengths(azure):
    arrivals = read_trace(azure, count=10)
    assert [(a.prompt_tokens, a.new_tokens) for a in arrivals] == [(374, 44), (396, 109), (8, 1)]
    assert [a.at_s for a in arrivals] == pytest.approx([0.0, 4.314579, 13.31941])
    assert len(read_trace(azure, count=2)) == 2


def test_a_mooncake_trace_shares_tokens_exactly_where_it_shares_blocks(mooncake):
    first, second, third = Trace(path=mooncake).requests(STREAM, 0, 4096)
    assert [len(r.prompt) for r in (first, second, third)] == [1100, 600, 1536]
    assert [r.arrival_s for r in (first, second, third)] == [0.0, 1.5, 3.0]
    assert first.prompt[:1024] == third.prompt[:1024]
    assert first.prompt[1024:1100] != third.prompt[1024:1100]
    assert second.prompt[:512] == first.prompt[:512]
    assert second.prompt[512:600] != first.prompt[512:600]


def test_speed_and_shrink_scale_times_and_lengths(mooncake):
    first, _, third = Trace(path=mooncake, speed=2.0, shrink=8.0).requests(STREAM, 0, 4096)
    assert third.arrival_s == 1.5
    assert (len(first.prompt), len(third.prompt)) == (138, 192)
    assert first.prompt[:128] == third.prompt[:128]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "x", "is neither .csv"),
        ("a.csv", None, "there is no trace file"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("a.csv", "when,what\n1,2\n", "is not in the expected format"),
        ("a.jsonl", "{broken\n", "is not in the expected format"),
    ],
)
def test_a_trace_that_cannot_be_read_says_so(tmp_path, name, text, said):
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=said):
        read_trace(str(file), 5)
