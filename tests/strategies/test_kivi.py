"""KIVI: bytes as predicted, old tokens coded and recent ones raw whatever the feeding, and rewinding, forks, undoing, a budget."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.backend import resolve
from strategies.geometry import CacheFull, CannotRewind, Geometry, LayerShape, Refused
from strategies.kivi import Kivi
from strategies.kivi_codec import decode_keys, decode_values, encode_keys, encode_values
from tests.strategies.driving import Driver, coarse_value, fresh_fits, nbytes, ops, shape


def kivi(budget: int | None = None, group: int = 4, residual: int = 4, slack: int = 0, context: int = 64, layers: int = 1) -> Kivi:
    return Kivi(shape((None,) * layers, context=context), budget, ops(), group=group, residual=residual, value_group=4, slack=slack)


def driven(*arguments: int | None, **parameters: int | None) -> Driver:
    """Values of whole numbers from 0 to 15, which 4-bit groups hold exactly: coded or not, the answer is the same."""
    return Driver(kivi(*arguments, **parameters), coarse_value)


def test_oracle_boundary_is_the_written_formula():
    for group, residual in ((1, 1), (4, 4), (4, 1), (8, 13), (32, 128)):
        cache = kivi(group=group, residual=residual)
        for i in range(300):
            assert cache.aged(i) == group * (max(0, i + 1 - residual) // group)


@pytest.mark.parametrize("slack", [0, 5])
@pytest.mark.parametrize(("group", "residual"), [(4, 4), (4, 1), (3, 8), (8, 20)])
@pytest.mark.parametrize("bits", [2, 4])
def test_predicted_bytes_are_the_bytes_held(bits, group, residual, slack):
    layers = (LayerShape(2, 24), LayerShape(3, 10))
    geometry = Geometry(layers, 6, 0.2, None, "float16", "cpu", 64)
    for lengths, chunk in (([1], 1), ([9], 9), ([17, 5, 8], 17), ([12, 50], 4), ([3] * 7, 2)):
        cache = Kivi(geometry, None, resolve("reference"), bits=bits, group=group, residual=residual, value_group=16, slack=slack)
        predicted = cache.bytes_for(lengths, chunk)
        sids = [cache.open(expect=length) for length in lengths]
        for at in range(0, max(lengths), chunk):
            plan = cache.plan({sid: min(at + chunk, length) for sid, length in zip(sids, lengths, strict=True) if at < length})
            cache.commit(plan, range(len(plan.positions)))
        assert nbytes(cache) == cache.stats().reserved_bytes == predicted
        coded = 1 + sum(max(0, length - residual) // group for length in lengths)
        page = 0
        for layer in layers:
            codes = 2 * group * -(-layer.head_dim * bits // 8)
            key_scales, value_scales = layer.head_dim * 2 * 2, group * -(-layer.head_dim // 16) * 2 * 2
            page += layer.kv_heads * (codes + key_scales + value_scales)
        raw_page = group * sum(layer.kv_heads * 2 * layer.head_dim * 2 for layer in layers)
        assert (predicted - coded * page) % raw_page == 0
        assert cache.bytes_per_token() == page / group


def test_old_tokens_are_coded_and_recent_ones_are_bit_exact_whatever_the_feeding():
    rows = torch.randn(23, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = []
    for chunk in (1, 3, 23):
        cache = kivi(group=4, residual=4)
        sid = cache.open()
        for at in range(0, 23, chunk):
            plan = cache.plan({sid: min(at + chunk, 23)})
            part = rows[at : at + chunk]
            cache.attend(0, torch.zeros(len(part), 3, 4, dtype=torch.float64), part, part, plan)
            cache.commit(plan, range(len(part)))
        plan = cache.plan({sid: 24})
        groups = cache.aged(23) // 4
        assert (groups, plan.private.folded[sid][1]) == (5, 5)
        cache.attend(0, torch.zeros(1, 3, 4, dtype=torch.float64), rows[:1], rows[:1], plan)
        keys, values = cache._codes.read(0, sid, groups, torch.float64)
        seen.append((keys, values))
        for coded in (keys, values):
            error = (coded - rows[:20]).abs()
            assert 0 < error.max() < 0.5 * 8 / 15
        raw = cache._raw.stores[0][0].codes.unflatten(0, (-1, 4))[plan.private.raw_pages[0].long()].flatten(0, 1)
        assert torch.equal(raw[20:23], rows[20:])
        cache.abort(plan)
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("bits", [2, 4])
def test_round_trip_stays_within_half_a_step_of_its_own_group(bits):
    rows = torch.randn(8, 2, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[:, :, 3] += 50
    codes, scale, zero = encode_keys(rows, bits)
    back = decode_keys(codes[None], scale[None], zero[None], bits, torch.float64)[0]
    step = (rows.amax(0) - rows.amin(0)) / (2**bits - 1)
    assert bool(((back - rows).abs() <= step * 0.51 + rows.abs().amax(0) * 2**-10).all())
    codes, scale, zero = encode_values(rows, bits, 4)
    back = decode_values(codes, scale, zero, bits, 4, 10, torch.float64)
    for lanes in (slice(0, 4), slice(4, 8), slice(8, 10)):
        part = rows[..., lanes]
        step = (part.amax(-1, keepdim=True) - part.amin(-1, keepdim=True)) / (2**bits - 1)
        assert bool(((back[..., lanes] - part).abs() <= step * 0.51 + part.abs().amax(-1, keepdim=True) * 2**-9).all())


def test_memory_of_raw_rows_is_bounded_and_codes_grow_by_one_page_a_group():
    driver = driven(group=4, residual=8, slack=2)
    sid = driver.open()
    for length in range(1, 60):
        driver.step({sid: [length % 16]})
        assert len(driver.cache._raw.tables.mapped(sid)) <= -(-(8 + 4 + 2) // 4) + 1
        assert driver.cache._codes._tables.count(sid) == driver.cache.aged(length - 1) // 4
    driver.look()


@pytest.mark.parametrize("slack", [0, 1, 6])
@pytest.mark.parametrize(("group", "residual"), [(4, 4), (4, 1), (3, 8)])
def test_rewinding_by_ones_is_possible_to_the_promised_depth_with_a_fork_at_each_stop(group, residual, slack):
    for length in (21,):
        driver = driven(group=group, residual=residual, slack=slack)
        sid = driver.start([n % 16 for n in range(length)], 3)
        assert driver.cache.rewind == slack
        for back in range(1, slack + 1):
            driver.truncate(sid, length - back)
            child = driver.fork(sid)
            driver.look()
            driver.step({child: [3] * 7})
            driver.close(child)
        driver.step({sid: [2] * 9})
        driver.look()


def test_cannot_rewind_names_the_limit_and_changes_nothing():
    driver = driven(slack=2)
    sid = driver.start([n % 16 for n in range(30)], 4)
    before = driver.cache.stats()
    for length in (20, 9, 1):
        with pytest.raises(CannotRewind, match=f"cannot go back to {length} tokens.*slack=2 allows 28 and above"):
            driver.truncate(sid, length)
        assert driver.cache.held(sid) == 30 and driver.cache.stats() == before
    driver.look()
    driver.truncate(sid, 0)
    driver.feed(sid, [5, 6, 7])
    driver.look()


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_abort_brings_back_codes_raw_rows_and_shared_pages(layers):
    driver = driven(layers=2)
    a = driver.start([n % 16 for n in range(13)], 5)
    b = driver.fork(a)
    used = driver.cache.stats().in_use_bytes
    for _ in range(2):
        driver.abort_after({a: [1] * 9, b: [2] * 2}, layers)
        assert driver.cache.stats().in_use_bytes == used
        driver.look()
    driver.step({a: [1] * 9, b: [2] * 2})
    driver.look()


def test_forks_share_codes_and_capacity_comes_back():
    budget = kivi().bytes_for([30] * 4, 30)

    def make() -> Kivi:
        return kivi(budget)

    driver = Driver(make(), coarse_value)
    parent = driver.start([n % 16 for n in range(21)], 4)
    used = driver.cache.stats().in_use_bytes
    children = [driver.fork(parent) for _ in range(5)]
    assert driver.cache.stats().in_use_bytes == used
    driver.step({children[0]: [3] * 6})
    driver.close(parent, *children[1:])
    driver.look()
    driver.close()
    assert [driver.fits(length) for length in (4, 9, 30)] == [fresh_fits(make, length) for length in (4, 9, 30)]


def test_full_plan_changes_nothing():
    driver = Driver(kivi(kivi().bytes_for([20] * 2, 4)), coarse_value)
    a, b = driver.start([1] * 9, 3), driver.start([2] * 5)
    before = driver.cache.stats(), [bytes(tensor.contiguous().view(torch.uint8).numpy()) for tensor in driver.cache.tensors()]
    with pytest.raises(CacheFull) as full:
        driver.plan({a: [1] * 2, b: [3] * 50})
    assert full.value.short_bytes > 0 and set(full.value.sids) == {a, b}
    assert before == (driver.cache.stats(), [bytes(tensor.contiguous().view(torch.uint8).numpy()) for tensor in driver.cache.tensors()])
    driver.look()


@pytest.mark.parametrize("extra", [0, 1, 500, 5000, 10**5])
def test_budget_is_never_passed_and_holds_a_token(extra):
    with pytest.raises(Refused) as refusal:
        kivi(64)
    smallest = int(str(refusal.value).split("smallest that does is ")[1].split(" ")[0])
    cache = kivi(smallest + extra)
    assert nbytes(cache) <= smallest + extra
    assert Driver(cache).fits(1, 10**4) >= 1


def test_forks_without_a_budget_reserve_once():
    driver = driven()
    parent = driver.start([n % 16 for n in range(20)], expect=40)
    family = [parent, *(driver.fork(parent) for _ in range(2))]
    driver.step({sid: [2] for sid in family})
    held = [tensor.data_ptr() for tensor in driver.cache.tensors()]
    for token in range(15):
        driver.step({sid: [token] for sid in family})
    assert [tensor.data_ptr() for tensor in driver.cache.tensors()] == held


@pytest.mark.parametrize("seed", range(2))
def test_random_life_within_a_budget(seed):
    rng = random.Random(seed)
    budget = kivi(slack=3, context=40).bytes_for([20] * 4, 5)

    def make() -> Kivi:
        return kivi(budget, slack=3, context=40)

    driver = Driver(make(), coarse_value)
    for _ in range(50):
        sids = list(driver.logs)
        act = rng.choice(("open", "step", "step", "step", "abort", "fork", "cut", "close"))
        try:
            if act == "open" or not sids:
                driver.open(expect=rng.choice((None, 12)))
            elif act in ("step", "abort"):
                news = {sid: [rng.randrange(16)] * rng.randint(1, 7) for sid in rng.sample(sids, min(2, len(sids)))}
                news = {sid: new for sid, new in news.items() if len(driver.logs[sid]) + len(new) <= 40}
                if news:
                    driver.step(news) if act == "step" else driver.abort_after(news, rng.randint(0, 1))
            elif act == "fork":
                driver.fork(rng.choice(sids))
            elif act == "cut":
                sid = rng.choice(sids)
                driver.truncate(sid, max(0, len(driver.logs[sid]) - rng.randint(0, 3)))
            else:
                driver.close(rng.choice(sids))
        except CacheFull:
            driver.close(min(driver.logs))
        except CannotRewind:
            driver.look()
    driver.close()
    assert [driver.fits(length) for length in (4, 15)] == [fresh_fits(make, length) for length in (4, 15)]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"bits": 3}, "bits=3"),
        ({"group": 0}, "group=0"),
        ({"residual": 0}, "residual=0"),
        ({"value_group": 0}, "value_group=0"),
        ({"slack": -1}, "slack=-1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(parameters, message):
    with pytest.raises(Refused, match=message):
        Kivi(shape(), None, resolve("reference"), **parameters)


def test_model_with_windows_is_refused_naming_them():
    with pytest.raises(Refused, match=r"windows of \[5\].*paged"):
        Kivi(shape((None, 5)), None, resolve("reference"))
