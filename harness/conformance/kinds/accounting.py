"""Byte accounting: what is reported is what is held, what was predicted is what is reserved, and compression buys tokens.

Formulas here are written again from the formats' description, in `payload_bytes`; they share nothing with the strategies.
"""

from __future__ import annotations

import gc
import weakref

from harness.conformance.promise import NotApplicable, promise
from harness.conformance.subject import Subject, stored
from harness.conformance.world import World, budget_for, tokens
from strategies.geometry import CacheFull

WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def payload_bytes(codec: str, head_dim: int, dtype: str) -> int | None:
    """Bytes of one head's row: codes and scales. None for a format that this file does not know."""
    groups = -(-head_dim // 32)
    known = {
        "raw": head_dim * WIDTH[dtype],
        "int8": head_dim + 4,
        "q8_0": head_dim + 2 * groups,
        "q4_0": -(-head_dim // 2) + 2 * groups,
        "fp8": head_dim,
    }
    return known.get(codec)


@promise("C", "C02", "C04")
def live_bytes_follow_the_closed_formula(subject: Subject) -> None:
    """Layers x KV heads x (codes + scales) x visible tokens, for several head shapes, lengths and dtypes."""
    for heads, head_dim, dtype in (((6, 3), 16, "float16"), ((8, 2), 24, "float32"), ((4, 1), 80, "bfloat16")):
        geometry = subject.geometry(heads=heads, head_dim=head_dim, dtype=dtype)
        facts = stored(subject, geometry)
        world = World(subject, geometry, shadowed=False)
        for number, length in enumerate((1, 7, min(facts.reach + 3, 100))):
            world.start(tokens(length, number), 6)
        want = sum(_live_bytes(world, layer, len(log)) for log in world.logs.values() for layer in range(len(geometry.layers)))
        got = world.cache.stats().live_bytes
        assert got == want, f"live_bytes is {got}, layers x heads x row bytes x visible tokens is {want}"


@promise("C", "C01", "C02", "C07")
def predicted_bytes_are_reserved_bytes(subject: Subject) -> None:
    """bytes_for of the final lengths, asked before, equals what is reserved when they are reached; asking changes nothing."""
    for lengths, chunk in (([1], 1), ([9], 9), ([17, 5, 8], 17), ([12, 30], 4), ([3] * 7, 2)):
        geometry = subject.geometry(heads=(8, 2), head_dim=24, dtype="float32")
        world = World(subject, geometry, shadowed=False)
        before = world.cache.stats()
        predicted = world.raw.bytes_for(lengths, chunk)
        assert world.cache.stats() == before, "asking for a prediction changed the cache"
        sids = [world.open(expect=length) for length in lengths]
        for at in range(0, max(lengths), chunk):
            world.step({sid: tokens(length)[at : at + chunk] for sid, length in zip(sids, lengths, strict=True) if at < length})
        reserved = world.cache.stats().reserved_bytes
        assert reserved == predicted, f"lengths {lengths} fed {chunk} at a time reserve {reserved} bytes, {predicted} were predicted"


@promise("C", "C02")
def shared_memory_is_counted_once(subject: Subject) -> None:
    """A fork adds nothing in use and nothing live until it writes; closing everything leaves nothing in use or live."""
    geometry = subject.geometry()
    stored(subject, geometry)
    world = World(subject, geometry, budget_for(subject, geometry, 5, 24))
    sid = world.start(tokens(11), 4)
    before = world.cache.stats()
    children = [world.fork(sid) for _ in range(3)]
    after = world.cache.stats()
    assert (after.in_use_bytes, after.live_bytes) == (before.in_use_bytes, before.live_bytes), "forks that wrote nothing are billed"
    world.step({children[0]: [1]})
    assert world.cache.stats().live_bytes > before.live_bytes, "a token that a fork wrote is not billed"
    world.close_all()
    empty = world.cache.stats()
    assert (empty.in_use_bytes, empty.live_bytes) == (0, 0), f"nothing is open, yet {empty}"


@promise("C", "C02", "C04")
def heads_and_codecs_change_the_price_as_written(subject: Subject) -> None:
    """Bytes per token follow KV heads, not query heads, and the codec's own width; measured on the tensors, not on a counter."""
    held = {}
    for kv_heads in (1, 2, 4):
        geometry = subject.geometry(heads=(8, kv_heads), head_dim=32, windows=(None, None), dtype="float16")
        if geometry.layers[0].kv_heads != kv_heads:
            raise NotApplicable(f"asks the loader for {geometry.layers[0].kv_heads} KV heads")
        stored(subject, geometry)
        world = World(subject, geometry, shadowed=False)
        world.start(tokens(16), expect=16)
        held[kv_heads] = sum(tensor.numel() * tensor.element_size() for tensor in world.cache.tensors())
    assert held[2] == 2 * held[1] and held[4] == 4 * held[1], f"bytes by KV heads are {held}: they should double"


@promise("C", "C04")
def compression_buys_tokens(subject: Subject) -> None:
    """Tokens that fit a fixed budget, found by filling it: as many more than raw rows as the format says, within two pages a layer."""
    geometry = subject.geometry(heads=(8, 2), head_dim=32, windows=(None, None), dtype="float16", context=4096)
    facts = stored(subject, geometry)
    if facts.lossless:
        raise NotApplicable("stores rows as they are")
    if facts.window is not None:
        raise NotApplicable("forgets tokens: how many fit is not the codec's doing")
    world = World(subject, geometry, shadowed=False)
    row = sum(_row_bytes(world, layer) for layer in range(2))
    length = (facts.page_size or 8) * 2
    budget = row * length * 12
    world = World(subject, geometry, budget, shadowed=False)
    fitting = world.capacity(length, 100)
    spare = 2 * (facts.page_size or 0) * row + row * length
    assert budget - spare <= fitting * length * row <= budget, f"{fitting} sequences of {length} tokens fit where the format promises 12"


@promise("C", "C07")
def admission_by_prediction_is_kept(subject: Subject) -> None:
    """When bytes_for says that n sequences fit the budget, n sequences fit, all at once and to their full length."""
    geometry = subject.geometry(heads=(4, 1), head_dim=8, context=96)
    length = min(max(9, stored(subject, geometry).reach), 48)
    ask = World(subject, geometry, shadowed=False).raw
    for count, chunk in ((1, length), (2, length), (3, length), (2, 4)):
        budget = ask.bytes_for([length] * count, chunk)
        world = World(subject, geometry, budget, shadowed=False)
        sids = [world.open(expect=length) for _ in range(count)]
        try:
            for at in range(0, length, chunk):
                world.step({sid: tokens(length, lane)[at : at + chunk] for lane, sid in enumerate(sids)})
        except CacheFull as full:
            raise AssertionError(
                f"{count} sequences of {length} tokens fed {chunk} at a time were predicted to fit {budget} bytes: {full}"
            ) from full


@promise("C", "C08")
def buffers_die_with_their_cache(subject: Subject) -> None:
    """Nothing keeps a tensor alive after the cache is gone: the next run starts from the same memory."""
    geometry = subject.geometry()
    stored(subject, geometry)
    world = World(subject, geometry)
    world.start(tokens(9))
    watched = [weakref.ref(tensor) for tensor in world.cache.tensors()]
    del world
    gc.collect()
    assert not any(ref() is not None for ref in watched), "a buffer outlives its cache"


def _row_bytes(world: World, layer: int) -> int:
    cache, shape = world.raw, world.geometry.layers[layer]
    sizes = [payload_bytes(codec.name, shape.head_dim, world.geometry.dtype) for codec in (cache.codec_k, cache.codec_v)]
    if None in sizes:
        raise NotApplicable(f"codes rows as {cache.codec_k.name} and {cache.codec_v.name}, whose bytes this kit does not know")
    return shape.kv_heads * sum(sizes)


def _live_bytes(world: World, layer: int, length: int) -> int:
    """Bytes of the rows that the next query of a sequence of `length` tokens, or a later one, may read."""
    cache, shape = world.raw, world.geometry.layers[layer]
    if not cache.codec_k.name.startswith("kivi"):
        return _row_bytes(world, layer) * _visible_rows(world, layer, length)
    # A group is coded by the first query that reads its codes: until then its rows are kept as they came.
    aged, codes = cache.aged(length - 1), -(-shape.head_dim * cache.bits // 8)
    keys = aged * codes + aged // cache.group * shape.head_dim * 4  # a float16 scale and zero for each channel of a group
    values = aged * (codes + -(-shape.head_dim // cache.value_group) * 4)
    raw = (length - aged) * 2 * shape.head_dim * WIDTH[world.geometry.dtype]
    return shape.kv_heads * (keys + values + raw)


def _visible_rows(world: World, layer: int, length: int) -> int:
    """Tokens that the next query, or a later one, may see."""
    mask = world.raw.mask(layer)
    if mask.window is None:
        return length
    return sum(1 for token in range(length) if length - token < mask.window or token < mask.sinks)
