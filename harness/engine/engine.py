"""The loop: schedule, plan, decode, sample, commit, and write down what happened; any exception undoes the step.

It does not know how rows are stored or what a metric is. It owns the token logs; the plan says which of their tokens to feed.

An exception before the commit, KeyboardInterrupt included, aborts the plan: calling `step` again gives what it would have
given. While nothing can run before the next arrival, the engine's time jumps there instead of sleeping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from harness.engine.decoding import DecoderLike
from harness.engine.drafts import lookup
from harness.engine.events import CANCELLED, CAPACITY, DECODE, PREFILL, REFUSED, EventLog, StepEvent, TokenEvent
from harness.engine.graphs import GraphedDecoder
from harness.engine.request import Completion, Request
from harness.engine.sampler import Sampler
from harness.engine.scheduler import Entry, Scheduler
from harness.engine.tokenlog import Fed, TokenLog
from harness.measure.clock import Clock
from strategies.base import KVCache, Plan
from strategies.geometry import CacheFull


class Engine:
    """Runs requests on one decoder and one cache, which must be empty. A step ends when the device has finished it, commit included.

    `log` holds the events and `completions` the answers (by sequence id) since the last `run` began; `preemptions` counts
    sequences that had to leave the cache and start again. `new_log` makes the log, so that one can be handed in that tells others.
    With a `GraphedDecoder`, decode steps are planned so that it can replay them, and its recording takes no time of the engine's.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        cache: KVCache,
        scheduler: Scheduler,
        sampler: Sampler,
        clock: Clock,
        eos_ids: Iterable[int] = (),
        new_log: Callable[[], EventLog] = EventLog,
    ) -> None:
        self.log = new_log()
        self.completions: dict[int, Completion] = {}
        self.preemptions = 0
        self._decoder = decoder
        self._cache = cache
        self._scheduler = scheduler
        self._sampler = sampler
        self._clock = clock
        self._eos_ids = frozenset(eos_ids)
        self._new_events = new_log
        self._logs: dict[int, TokenLog] = {}  # by sequence id, unfinished ones
        self._steps = 0
        self._ages = 0
        self._skipped_s = 0.0
        self._cancelled: set[int] = set()
        self._stepping = False

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._logs)

    def now_s(self) -> float:
        """The engine's time: the clock's, plus idle time that was skipped, less what went into recording graphs."""
        recording_s = self._decoder.recording_s if isinstance(self._decoder, GraphedDecoder) else 0.0
        return self._clock.now() + self._skipped_s - recording_s

    def run(self, requests: Iterable[Request]) -> EventLog:
        """Serve all requests, each from its arrival on -> the events. RuntimeError while earlier requests are unfinished."""
        if self.busy:
            raise RuntimeError("earlier requests are unfinished: step until the engine is idle, or cancel them, before a new run")
        self.log, self.completions, self.preemptions, self._steps = self._new_events(), {}, 0, 0
        coming = sorted(requests, key=lambda request: request.arrival_s)
        start_s = self.now_s()
        while coming or self.busy:
            now_s = self.now_s()
            if coming and not self.busy:
                due_s = start_s + coming[0].arrival_s
                self._skipped_s += max(0.0, due_s - now_s)
                now_s = max(now_s, due_s)
            while coming and start_s + coming[0].arrival_s <= now_s:
                request = coming.pop(0)
                self.submit(request, start_s + request.arrival_s)
            self.step()
        return self.log

    def submit(self, request: Request, arrival_s: float) -> None:
        """Queue a request, or refuse it at once if it can never fit (its completion says why). ValueError if an id is in use."""
        for id_ in request.ids:
            if id_ in self.log.requests:
                raise ValueError(f"request {request.id} would take the id {id_}, which is in use: an id serves one sequence a run")
        for id_ in request.ids:
            self.log.arrived(id_, arrival_s, len(request.prompt))
        logs = [self._new_log(id_, request) for id_ in request.ids]
        reason = self._refusal(request)
        if reason is not None:
            for log in logs:
                self._finish(log, REFUSED, arrival_s, f"request {log.id} can never run: {reason}")
            return
        logs[0].forks = logs[1:]
        self._scheduler.submit(logs[0].entry)

    def cancel(self, id_: int) -> None:
        """Take a sequence back. Legal at any time, also during a step (it then counts from the end of it) and after the end."""
        self._cancelled.add(id_)
        if not self._stepping:
            self._drop_cancelled()

    def step(self) -> bool:
        """One step. False when there was nothing to do."""
        if not self.busy:
            return False
        self._stepping = True
        try:
            self._step()
        finally:
            self._stepping = False
            self._drop_cancelled()
        return True

    def _step(self) -> None:
        start_s = self.now_s()
        self._guess()
        stops = self._scheduler.schedule(self._cache.held, self._admit)
        plan = self._plan(stops)
        if plan is None:
            return
        try:
            spans = self._spans(plan)
            drawn = self._decode(plan, spans)
            self._cache.commit(plan, [token for span in spans for token in span.ids])
        except BaseException:
            self._cache.abort(plan)
            raise
        self._record(start_s, spans, drawn)

    def _plan(self, stops: dict[int, int]) -> Plan | None:
        """A plan for `stops`, taking the youngest sequences off while the cache is full; None when nothing is left to run."""
        if not stops and not self._scheduler.running:
            self._give_up(self._scheduler.waiting[0], "the KV budget has no room for its first tokens")
        while stops:
            try:
                return self._cache.plan(stops, self._pad_to(stops))
            except CacheFull as full:
                stops = self._shed(stops, full)
        return None

    def _pad_to(self, stops: dict[int, int]) -> int | None:
        """The spans to plan for where the step can be a graph's, one token for each sequence; None otherwise."""
        graphed = isinstance(self._decoder, GraphedDecoder) and all(stop - self._cache.held(sid) == 1 for sid, stop in stops.items())
        return self._decoder.pad_to(len(stops)) if graphed else None

    def _shed(self, stops: dict[int, int], full: CacheFull) -> dict[int, int]:
        """Make room -> the stops that remain. One sequence at a time: the cache itself says when the bytes freed are enough."""
        youngest = self._scheduler.youngest()
        sid = youngest.sid
        if len(self._scheduler.running) == 1:
            self._give_up(youngest, str(full))
        else:
            self.preemptions += youngest.started
            self._cache.close(sid)
            self._scheduler.evict(youngest)
            self._logs[youngest.id].caught_up = False
        return {other: stop for other, stop in stops.items() if other != sid}

    def _spans(self, plan: Plan) -> list[Fed]:
        by_sid = {entry.sid: self._logs[entry.id] for entry in self._scheduler.running}
        spans, row = [], 0
        for sid, start, stop in plan.spans:
            spans.append(Fed(by_sid[sid], start, stop, row))
            row += stop - start
        return spans

    def _decode(self, plan: Plan, spans: list[Fed]) -> list[dict[int, list[int]]]:
        """Run the decoder and draw -> for each span {sequence id: its draws}, more than one id where forks split off."""
        rows, draws, owners = [], [], []
        for b, span in enumerate(spans):
            for log in (span.log, *(span.log.forks if span.sampled else ())):
                rows.extend(span.rows)
                draws.extend(log.draw(position) for position in span.sampled)
                owners.extend([(b, log.id)] * len(span.sampled))
        device = plan.positions.device
        ids = torch.tensor([token for span in spans for token in span.ids], device=device)  # [T] int64
        last_rows = [span.row + span.stop - span.start - 1 for span in spans]
        with torch.no_grad():
            wanted = None if rows == last_rows else torch.tensor(rows, dtype=torch.int64, device=device)  # [R]
            tokens = self._sampler(self._decoder(ids, plan, self._cache, wanted), draws)
        drawn: list[dict[int, list[int]]] = [{} for _ in spans]
        for (b, id_), token in zip(owners, tokens, strict=True):
            drawn[b].setdefault(id_, []).append(token)
        return drawn

    def _record(self, start_s: float, spans: list[Fed], drawn: list[dict[int, list[int]]]) -> None:
        """The step happened: move the logs on, write the events, give back what is over."""
        fed = {PREFILL: 0, DECODE: 0}
        recomputed = 0
        events: list[TokenEvent] = []
        ended: list[tuple[TokenLog, str]] = []
        for span, draws in zip(spans, drawn, strict=True):
            phase = span.log.phase
            fed[phase] += span.stop - span.start
            recomputed += span.recomputed
            for log, new, reason in self._advance(span, draws):
                prompt, known = len(log.request.prompt), len(log.tokens) - len(new)
                events += [TokenEvent(log.id, self._steps, phase, at - prompt, at, token) for at, token in enumerate(new, known)]
                if reason is not None:
                    ended.append((log, reason))
        self._clock.synchronise()
        end_s = self.now_s()
        stats = self._cache.stats()
        held = (stats.reserved_bytes, stats.in_use_bytes, stats.live_bytes, stats.cached_bytes)
        step = StepEvent(self._steps, start_s, end_s, len(spans), fed[PREFILL], fed[DECODE], recomputed, len(events), *held)
        self._steps += 1
        self.log.stepped(step, events)
        for log, reason in ended:
            self._finish(log, reason, end_s, None)

    def _advance(self, span: Fed, draws: dict[int, list[int]]) -> list[tuple[TokenLog, list[int], str | None]]:
        """Move the span's log, and the forks that split off here, on by what was drawn -> (log, new tokens, finish reason) of each."""
        log = span.log
        log.entry.started = True
        if not draws:
            log.highest = max(log.highest, span.stop)
            return []
        right = span.verified(draws[log.id])
        kept = len(log.tokens) + len(right) - 1  # tokens fed so far that belong to the answer
        forks, log.forks = log.forks, []
        moved = [(fork, *fork.take(draws[fork.id], self._eos_ids)) for fork in forks]
        moved.insert(0, (log, *log.take(right, self._eos_ids)))
        for each, _, _ in moved:
            each.highest, each.guesses, each.caught_up = kept, [], True
            each.entry.known, each.entry.drafted = len(each.tokens), 0
        if span.stop > kept:
            self._cache.truncate(log.entry.sid, kept)
        for fork, _, reason in moved[1:]:
            if reason is None:
                self._split(log, fork)
        return moved

    def _split(self, log: TokenLog, fork: TokenLog) -> None:
        """Let `fork` share the rows of `log`, or wait and read its tokens again where there is no room for it to run."""
        if self._scheduler.has_room:
            try:
                self._scheduler.enter(fork.entry, self._cache.fork(log.entry.sid))
                return
            except CacheFull:
                pass
        fork.caught_up = False
        self._scheduler.submit(fork.entry)

    def _guess(self) -> None:
        """Guess the next tokens of running sequences that asked for it and have nothing else to read."""
        for entry in self._scheduler.running:
            log = self._logs[entry.id]
            count = min(log.request.draft_tokens, entry.final - entry.known) if log.caught_up else 0
            log.guesses = lookup(log.tokens, count) if count else []
            entry.drafted = len(log.guesses)

    def _admit(self, entry: Entry) -> int:
        return self._cache.open(self._logs[entry.id].tokens, expect=entry.final)

    def _new_log(self, id_: int, request: Request) -> TokenLog:
        entry = Entry(id_, self._ages, len(request.prompt), request.stored_tokens)
        self._ages += 1
        log = self._logs[id_] = TokenLog(request, entry, list(request.prompt))
        return log

    def _refusal(self, request: Request) -> str | None:
        if request.draft_tokens > self._cache.rewind:
            return f"it takes back up to {request.draft_tokens} tokens a step and the cache can take back {self._cache.rewind}"
        return self._scheduler.refusal(request.stored_tokens)

    def _give_up(self, entry: Entry, why: str) -> None:
        self._finish(self._logs[entry.id], CAPACITY, self.now_s(), f"request {entry.id} ran alone and did not fit: {why}")

    def _drop_cancelled(self) -> None:
        for id_ in sorted(self._cancelled & self._logs.keys()):
            self._finish(self._logs[id_], CANCELLED, self.now_s(), None)
        self._cancelled.clear()

    def _finish(self, log: TokenLog, reason: str, end_s: float, detail: str | None) -> None:
        """The sequence is over: give everything back. Its forks that have not split off yet go on without it."""
        if log.entry.sid is not None:
            self._cache.close(log.entry.sid)
        self._scheduler.leave(log.entry)
        del self._logs[log.id]
        for other in self._logs.values():
            if log in other.forks:
                other.forks.remove(log)
        if log.forks:
            leader = log.forks[0]
            leader.forks = log.forks[1:]
            self._scheduler.submit(leader.entry)
        self.completions[log.id] = Completion(log.id, log.produced, reason, detail)
        self.log.ended(log.id, reason, end_s)
