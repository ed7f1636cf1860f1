"""Random lives of every storage, in which other sequences are opened, forked, cut and closed while a step is in the middle."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from strategies.base import KVCache
from strategies.contiguous import Contiguous
from strategies.geometry import CacheFull, CannotRewind
from strategies.kivi import Kivi
from strategies.none import NoCache
from strategies.paged import Paged
from tests.strategies.driving import Driver, coarse_value, fresh_fits, nbytes, ops, shape

CONTEXT = 40


def paged(windows: tuple[int | None, ...], **parameters: object):
    return lambda budget: Paged(shape(windows, context=CONTEXT), budget, ops(), page_size=4, **parameters)


MAKERS = {
    "none": lambda budget: NoCache(shape(context=CONTEXT), budget, ops()),
    "exact": lambda budget: Contiguous(shape((None, 5), context=CONTEXT), budget, ops()),
    "growth": lambda budget: Contiguous(shape(context=CONTEXT), budget, ops(), slab="growth"),
    "paged": paged((None,)),
    "lanes": paged((None, 5), slack=2),
    "window": paged((None,), window=6, sinks=2, slack=3),
    "prefix": paged((None, 5), prefix=True, slack=2),
    "kivi": lambda budget: Kivi(shape(context=CONTEXT), budget, ops(), group=4, residual=4, value_group=4, slack=3),
}


class Life:
    """Random operations on one driver; CacheFull is answered by closing the oldest sequence that may be closed."""

    def __init__(self, cache: KVCache, seed: int) -> None:
        self.rng = random.Random(seed)
        self.driver = Driver(cache, coarse_value)

    def meddle(self, planned: set[int]) -> None:
        """One operation on a sequence that no open plan writes to, or on a new one."""
        others = [sid for sid in self.driver.logs if sid not in planned]
        act = self.rng.choice(("open", "fork", "cut", "close", "close"))
        if act == "open" or not others:
            prompt = [self.rng.randrange(2)] * 9
            self.driver.open(prompt if self.rng.random() < 0.5 else (), self.rng.choice((None, 6, 20)))
            return
        sid = self.rng.choice(others)
        if act == "fork":
            self.driver.fork(sid)
        elif act == "close":
            self.driver.close(sid)
        else:
            with suppress(CannotRewind):
                self.driver.truncate(sid, max(0, len(self.driver.logs[sid]) - self.rng.randint(0, 4)))

    def step(self) -> None:
        logs = self.driver.logs
        open_ended = [sid for sid, log in logs.items() if len(log) < CONTEXT]
        picked = self.rng.sample(open_ended, min(len(open_ended), self.rng.randint(1, 3)))
        news = {sid: [self.rng.randrange(16) for _ in range(self.rng.randint(1, min(9, CONTEXT - len(logs[sid]))))] for sid in picked}
        if not news:
            return
        try:
            plan = self.driver.plan(news)
        except CacheFull:
            self.driver.close(min(logs))
            return
        layers = len(self.driver.cache.geometry.layers)
        keep = self.rng.random() < 0.6
        self.driver.run(plan, news, layers if keep else self.rng.randint(0, layers))
        for _ in range(self.rng.randint(0, 2)):
            self.meddle(set(news))
        self.driver.commit(plan, news) if keep else self.driver.cache.abort(plan)

    def run(self, moves: int) -> None:
        for _ in range(moves):
            self.meddle(set()) if self.rng.random() < 0.4 else self.step()
            while len(self.driver.logs) > 7:
                self.driver.close(self.rng.choice(list(self.driver.logs)))
            stats, budget = self.driver.cache.stats(), self.driver.cache.budget_bytes
            assert 0 <= stats.live_bytes <= stats.in_use_bytes <= stats.reserved_bytes == nbytes(self.driver.cache)
            assert budget is None or stats.reserved_bytes <= budget


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MAKERS)
def test_life_without_a_budget_loses_no_row(name, seed):
    life = Life(MAKERS[name](None), seed)
    life.run(25)
    life.driver.look()
    life.driver.close()
    assert life.driver.cache.stats().in_use_bytes == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "none"])
def test_life_within_a_budget_loses_neither_rows_nor_room(name, seed):
    budget = MAKERS[name](None).bytes_for([16] * 5, 9)
    life = Life(MAKERS[name](budget), seed)
    life.run(30)
    life.driver.close()
    assert life.driver.cache.stats().in_use_bytes == 0
    for length in (2, 9, 16):
        assert life.driver.fits(length) == fresh_fits(lambda: MAKERS[name](budget), length)
