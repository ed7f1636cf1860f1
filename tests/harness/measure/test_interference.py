"""What others take from the processors: read from counters of the system's form, without what this process used itself."""

from __future__ import annotations

import os

import pytest

from harness.measure.interference import SHARE_LIMIT, disturbed, others_s

TICKS = os.sysconf("SC_CLK_TCK")


def stat(path, seconds_by_core: dict[int, float]):
    """A /proc/stat: each core has used this many seconds, spread over user, system and steal, and idled and waited for 1000 more."""
    lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]
    for core, seconds in seconds_by_core.items():
        third = round(seconds * TICKS / 3)
        lines.append(f"cpu{core} {third} 0 {third} {1000 * TICKS} {1000 * TICKS} 0 0 {third} 0 0")
    path.write_text("\n".join([*lines, "intr 5 5 5"]) + "\n")
    return path


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no /proc/stat")
def test_all_that_is_not_idle_on_our_cores_counts_but_for_our_own(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 12})
    before = others_s(stat(tmp_path / "before", {0: 300, 1: 900, 12: 600}))
    after = others_s(stat(tmp_path / "after", {0: 303, 1: 9000, 12: 606}))
    assert after - before == pytest.approx(9.0, abs=0.2)  # what this process used in between is taken off
    assert others_s(tmp_path / "no such file") is None


def test_a_tenth_of_a_core_disturbs():
    assert not disturbed(5.0, 5.0 + SHARE_LIMIT * 10 - 0.01, 10.0)
    assert disturbed(5.0, 5.0 + SHARE_LIMIT * 10 + 0.01, 10.0)
    assert not disturbed(None, 5.0, 1.0)
    assert not disturbed(5.0, 5.02, 0.01)  # two steps of the counter
