"""The event log: one row per step and one per emitted token, from which every metric can be recomputed.

It does not know what a strategy, a tensor or a metric is; times are whatever clock the engine was given, in seconds.

Two rules keep the counts honest. A step may emit any number of tokens, so tokens are counted by their own rows and never by
steps. A row is written only for a request that is running, so one that has finished adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

PREFILL = "prefill"
DECODE = "decode"
MIXED = "mixed"

# Why a request ended. The first two are whole answers; the others are not, and have no end-to-end latency.
LENGTH = "length"  # all max_new_tokens were emitted
STOP = "stop"  # an end token was emitted
CAPACITY = "capacity"  # it ran alone and the KV budget was still too small
REFUSED = "refused"  # it could never have fitted
CANCELLED = "cancelled"  # the caller took it back
COMPLETE = (LENGTH, STOP)
REASONS = (LENGTH, STOP, CAPACITY, REFUSED, CANCELLED)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token. `phase` is the kind of span that emitted it: a request's first token is always `prefill`."""

    request_id: int
    step: int
    phase: str  # prefill or decode
    index: int  # 0 for the request's first new token
    context: int  # tokens the query could see, itself included
    token_id: int


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One step of the engine.

    A span is prefill while its request reads known text (its prompt, or everything again after a preemption) and decode
    afterwards; a strategy that feeds the whole history at each decode step is still decoding, and says so in
    `tokens_recomputed`: tokens fed that had already been fed for the same request.
    """

    step: int
    start_s: float
    end_s: float
    batch_size: int  # sequences in the step
    prefill_tokens_fed: int
    decode_tokens_fed: int
    tokens_recomputed: int
    tokens_emitted: int
    kv_reserved_bytes: int
    kv_in_use_bytes: int
    kv_live_bytes: int
    kv_cached_bytes: int

    @property
    def tokens_fed(self) -> int:
        """Tokens of the step, both phases."""
        return self.prefill_tokens_fed + self.decode_tokens_fed

    @property
    def phase(self) -> str:
        """prefill, decode or mixed."""
        if self.decode_tokens_fed == 0:
            return PREFILL
        return DECODE if self.prefill_tokens_fed == 0 else MIXED


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """One request from the moment it waits; `reason` and `end_s` are None while it is not over."""

    request_id: int
    arrival_s: float
    prompt_tokens: int
    reason: str | None = None
    end_s: float | None = None

    @property
    def complete(self) -> bool:
        """Whether it ended with a whole answer."""
        return self.reason in COMPLETE


@dataclass
class EventLog:
    """What one run did, in order. Only the engine adds to it."""

    requests: dict[int, RequestEvent] = field(default_factory=dict)
    steps: list[StepEvent] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)

    def arrived(self, request_id: int, arrival_s: float, prompt_tokens: int) -> None:
        """A request waits from `arrival_s` on, on the clock that times the steps. ValueError if the id was used before."""
        if request_id in self.requests:
            raise ValueError(f"request {request_id} has already arrived in this log")
        self.requests[request_id] = RequestEvent(request_id, arrival_s, prompt_tokens)

    def stepped(self, step: StepEvent, tokens: Sequence[TokenEvent]) -> None:
        """A step ended having emitted `tokens`. ValueError if the rows contradict each other or a request that is over emits."""
        if step.tokens_emitted != len(tokens):
            raise ValueError(f"step {step.step} says it emitted {step.tokens_emitted} tokens and has {len(tokens)} rows")
        for token in tokens:
            if token.step != step.step:
                raise ValueError(f"step {step.step} was given a token of step {token.step}")
            self._running(token.request_id)
        self.steps.append(step)
        self.tokens.extend(tokens)

    def ended(self, request_id: int, reason: str, end_s: float) -> None:
        """The request will emit nothing more. ValueError for an unknown reason or a request that is not running."""
        request = self._running(request_id)
        if reason not in REASONS:
            raise ValueError(f"unknown finish reason {reason!r}: use one of {', '.join(REASONS)}")
        self.requests[request_id] = replace(request, reason=reason, end_s=end_s)

    def rows(self) -> Iterator[dict[str, object]]:
        """Plain dicts, fit for JSON lines: the requests, then each step followed by the tokens it emitted, times filled in."""
        for request in self.requests.values():
            yield {"row": "request", **asdict(request)}
        emitted = iter(self.tokens)
        for step in self.steps:
            yield {"row": "step", "phase": step.phase, "tokens_fed": step.tokens_fed, **asdict(step)}
            for _ in range(step.tokens_emitted):
                yield {"row": "token", "start_s": step.start_s, "end_s": step.end_s, **asdict(next(emitted))}

    def _running(self, request_id: int) -> RequestEvent:
        request = self.requests.get(request_id)
        if request is None:
            raise ValueError(f"request {request_id} never arrived in this log")
        if request.reason is not None:
            raise ValueError(f"request {request_id} has already ended ({request.reason})")
        return request
