"""Metrics: pure functions of an event log, with the unit in every name.

It does not know the clock, the strategy or the device, and imports no torch.

Where a request's time goes: its first token belongs to prefill (`ttft_s`, from arrival), every later one to decode. A gap
that ends with several tokens at once is shared evenly among them, so that the mean does not depend on how they were grouped.
The time of a mixed step is divided between the phases by the tokens fed for each, so that phase times never exceed the wall.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby

from harness.engine.events import DECODE, EventLog, StepEvent, TokenEvent

TIMINGS = ("ttft_s", "itl_s", "e2e_s", "prefill_tok_per_s", "decode_tok_per_s", "output_tok_per_s", "wall_s")
SUMMARY_KEYS = ("mean", "p50", "p90", "p99", "n")


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile (0..1) by linear interpolation between order statistics (Hyndman & Fan 1996, type 7)."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float | int | None]:
    """{mean, p50, p90, p99, n}; all but n are None when there is no value."""
    if not values:
        return {"mean": None, "p50": None, "p90": None, "p99": None, "n": 0}
    return {
        "mean": math.fsum(values) / len(values),
        "p50": quantile(values, 0.50),
        "p90": quantile(values, 0.90),
        "p99": quantile(values, 0.99),
        "n": len(values),
    }


def ttft_s(log: EventLog) -> list[float]:
    """Seconds from arrival to the end of the step that emitted the first token, for each request that emitted one."""
    ends = _step_ends(log)
    return [ends[tokens[0].step] - log.requests[request_id].arrival_s for request_id, tokens in _by_request(log).items()]


def itl_s(log: EventLog) -> list[float]:
    """Seconds between successive tokens of a request, one value per token after its first."""
    return [seconds for _, seconds in itl_by_context(log)]


def itl_by_context(log: EventLog) -> list[tuple[int, float]]:
    """(tokens the query could see, seconds since the request's previous token), one pair per token after a request's first."""
    ends = _step_ends(log)
    pairs = []
    for tokens in _by_request(log).values():
        previous_s = ends[tokens[0].step]
        for step, group in groupby(tokens[1:], key=lambda token: token.step):
            together = list(group)
            gap_s = (ends[step] - previous_s) / len(together)
            pairs.extend((token.context, gap_s) for token in together)
            previous_s = ends[step]
    return pairs


def e2e_s(log: EventLog) -> list[float]:
    """Seconds from arrival to the last token, for each request that ended with a complete answer."""
    ends = _step_ends(log)
    last_s = {request_id: ends[tokens[-1].step] for request_id, tokens in _by_request(log).items()}
    return [end_s - log.requests[request_id].arrival_s for request_id, end_s in last_s.items() if log.requests[request_id].complete]


def prefill_s(log: EventLog) -> float:
    """Seconds of the run spent on prefill spans."""
    return math.fsum(_duration_s(step) * step.prefill_tokens_fed / step.tokens_fed for step in log.steps if step.tokens_fed)


def decode_s(log: EventLog) -> float:
    """Seconds of the run spent on decode spans."""
    return math.fsum(_duration_s(step) * step.decode_tokens_fed / step.tokens_fed for step in log.steps if step.tokens_fed)


def wall_s(log: EventLog) -> float:
    """Seconds from the start of the first step to the end of the last."""
    return log.steps[-1].end_s - log.steps[0].start_s if log.steps else 0.0


def prefill_tok_per_s(log: EventLog) -> float | None:
    """Prompt tokens fed per second of prefill; None if there was no prefill."""
    return _rate(sum(step.prefill_tokens_fed for step in log.steps), prefill_s(log))


def decode_tok_per_s(log: EventLog) -> float | None:
    """Tokens emitted by decode spans per second of decode, all requests together; None if there was no decode."""
    return _rate(sum(token.phase == DECODE for token in log.tokens), decode_s(log))


def output_tok_per_s(log: EventLog) -> float | None:
    """Tokens emitted per second of the whole run, prefill and waiting included; None for an empty run."""
    return _rate(len(log.tokens), wall_s(log))


def kv_waste_ratio(log: EventLog) -> float | None:
    """1 - live / in use, both averaged over steps; None where nothing was in use. Steps, not seconds: bytes do not depend on speed."""
    in_use = sum(step.kv_in_use_bytes for step in log.steps)
    return None if in_use == 0 else 1.0 - sum(step.kv_live_bytes for step in log.steps) / in_use


def metrics(log: EventLog, kv_bytes_per_token: float, device_peak_bytes: int | None, host_peak_rss_bytes: int | None) -> dict[str, object]:
    """The `metrics` section of a record. The three arguments are facts that no event holds: they are passed through."""
    return {
        "ttft_s": summary(ttft_s(log)),
        "itl_s": summary(itl_s(log)),
        "e2e_s": summary(e2e_s(log)),
        "prefill_tok_per_s": prefill_tok_per_s(log),
        "decode_tok_per_s": decode_tok_per_s(log),
        "output_tok_per_s": output_tok_per_s(log),
        "wall_s": wall_s(log),
        "steps": len(log.steps),
        "requests": len(log.requests),
        "requests_complete": sum(request.complete for request in log.requests.values()),
        "tokens_fed": sum(step.tokens_fed for step in log.steps),
        "tokens_recomputed": sum(step.tokens_recomputed for step in log.steps),
        "tokens_emitted": len(log.tokens),
        "kv_bytes_per_token": kv_bytes_per_token,
        "kv_reserved_bytes": _peak(step.kv_reserved_bytes for step in log.steps),
        "kv_in_use_bytes_peak": _peak(step.kv_in_use_bytes for step in log.steps),
        "kv_live_bytes_peak": _peak(step.kv_live_bytes for step in log.steps),
        "kv_cached_bytes_peak": _peak(step.kv_cached_bytes for step in log.steps),
        "kv_waste_ratio": kv_waste_ratio(log),
        "device_peak_bytes": device_peak_bytes,
        "host_peak_rss_bytes": host_peak_rss_bytes,
    }


def perplexity_per_token(nll_sum_nats: float, tokens: int) -> float:
    """exp(summed nll / scored tokens): one mean over all of them, never a mean of window means. inf when it overflows."""
    return _exp(nll_sum_nats / _counted(tokens, "scored tokens"))


def perplexity_per_word(nll_sum_nats: float, words: int) -> float:
    """exp(summed nll / words of the scored text)."""
    return _exp(nll_sum_nats / _counted(words, "words"))


def bits_per_byte(nll_sum_nats: float, text_bytes: int) -> float:
    """Summed nll in bits over the UTF-8 bytes of the scored text: the one that tokenisers cannot change."""
    return nll_sum_nats / _counted(text_bytes, "bytes") / math.log(2.0)


def _step_ends(log: EventLog) -> dict[int, float]:
    return {step.step: step.end_s for step in log.steps}


def _by_request(log: EventLog) -> dict[int, list[TokenEvent]]:
    """Each request's tokens in the order they were emitted."""
    tokens: dict[int, list[TokenEvent]] = defaultdict(list)
    for token in log.tokens:
        tokens[token.request_id].append(token)
    return tokens


def _duration_s(step: StepEvent) -> float:
    return step.end_s - step.start_s


def _rate(count: int, seconds: float) -> float | None:
    return None if count == 0 or seconds <= 0.0 else count / seconds


def _peak(values: Iterable[int]) -> int:
    return max(values, default=0)


def _exp(mean_nats: float) -> float:
    try:
        return math.exp(mean_nats)
    except OverflowError:
        return math.inf


def _counted(count: int, what: str) -> int:
    if count < 1:
        raise ValueError(f"no {what}: there is nothing to average over")
    return count
