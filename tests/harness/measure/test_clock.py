"""Timing rules, on a clock that moves only when told to and a device that launches at once and finishes later."""

from __future__ import annotations

import contextlib
import gc
import statistics
import types

import pytest

from harness.measure import clock, environment, memory


class StubDevice:
    """Launching returns at once; the first launch costs 2 s, every other 20 ms."""

    def __init__(self):
        self.clock = clock.ManualClock()
        self.launches = 0

    def step(self):
        self.clock.launch(2.0 if self.launches == 0 else 0.020)
        self.launches += 1


def test_a_sample_waits_for_the_device():
    device = StubDevice()
    device.step()
    assert clock.timed(device.clock, device.step) == pytest.approx(0.020)


def test_without_waiting_the_clock_sees_nothing():
    device = StubDevice()
    start_s = device.clock.now()
    device.step()
    assert device.clock.now() == start_s  # what a reading without synchronise would report


def test_work_launched_before_a_sample_is_not_part_of_it():
    device = StubDevice()
    device.step()
    device.step()
    assert clock.timed(device.clock, device.step) == pytest.approx(0.020)


def test_first_use_is_reported_apart_and_enters_no_mean():
    device = StubDevice()
    warm = clock.warm_up(device.clock, device.step)
    samples = [clock.timed(device.clock, device.step) for _ in range(20)]
    assert warm.first_call_s == pytest.approx(2.0)
    assert warm.first_use_s == pytest.approx(1.98)
    assert warm.steady_call_s == pytest.approx(0.020)
    assert max(samples) == pytest.approx(0.020)
    assert statistics.mean(samples) == pytest.approx(0.020)
    assert device.launches == 3 + 20


def test_one_warm_up_call_cannot_tell_first_use_from_steady_time():
    with pytest.raises(ValueError, match="2 or more"):
        clock.warm_up(clock.ManualClock(), lambda: None, calls=1)


def test_the_real_clock_never_goes_back():
    real = clock.DeviceClock("cpu")
    real.synchronise()
    readings = [real.now() for _ in range(100)]
    assert readings == sorted(readings)


@pytest.mark.parametrize("collecting", [True, False])
def test_quiet_stops_the_garbage_collector_and_puts_it_back(collecting):
    before = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        with clock.quiet() as conditions:
            assert not gc.isenabled()
            assert conditions.garbage_collection is False
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if before else gc.disable)()


def test_quiet_pins_threads_and_puts_them_back_even_after_an_error():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt), clock.quiet(threads=before + 1) as conditions:
        raise KeyboardInterrupt
    assert conditions.threads == before + 1
    assert torch.get_num_threads() == before


def test_zero_threads_are_refused():
    with pytest.raises(ValueError, match="threads=0"), clock.quiet(threads=0):
        pass


def test_ids_are_unique_within_one_microsecond_and_sort_by_time(monkeypatch):
    moments = [clock.moment() for _ in range(1000)]
    assert len({moment.id for moment in moments}) == 1000
    stamps = [moment.id[:22] for moment in moments]
    assert stamps == sorted(stamps)
    assert moments[0].utc.endswith("+00:00")


def test_two_runs_in_the_same_microsecond_have_different_ids(monkeypatch):
    class Stopped(clock.datetime):
        @classmethod
        def now(cls, tz=None):
            return clock.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=tz)

    monkeypatch.setattr(clock, "datetime", Stopped)
    first, second = clock.moment(), clock.moment()
    assert first.utc == second.utc
    assert first.id[:22] == second.id[:22] == "20260102-030405-000006"
    assert first.id != second.id


def test_peak_memory_sees_what_was_touched_and_forgets_it_when_restarted():
    if not memory.restart_peaks("cpu"):
        pytest.skip("this system cannot restart the peak")
    before = memory.host_peak_rss_bytes()
    size = 96 * 1024**2
    held = bytearray(b"\x01") * size
    grown = memory.host_peak_rss_bytes()
    assert grown - before > size // 2
    del held
    memory.restart_peaks("cpu")
    assert memory.host_peak_rss_bytes() < grown - size // 2


def test_a_cpu_has_no_device_memory_to_report():
    assert memory.device_peak_bytes("cpu") is None


class StubCuda:
    """A GPU by its API: launches queue up, events mark places in the queue, synchronising runs it."""

    def __init__(self):
        self.now_ms = 0.0
        self.synchronised = 0

    def device(self, device):
        return contextlib.nullcontext()

    def Event(self, enable_timing):
        assert enable_timing
        return StubEvent(self)

    def synchronize(self, device):
        self.synchronised += 1

    def max_memory_reserved(self, device):
        return 3 << 20

    def max_memory_allocated(self, device):
        return 2 << 20

    def current_device(self):
        return 0

    def get_device_properties(self, index):
        return types.SimpleNamespace(uuid=f"uuid-{index}")


class StubEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at_ms = self.device.now_ms

    def elapsed_time(self, other):
        assert self.device.synchronised, "an event was read before the device had reached it"
        return other.at_ms - self.at_ms


@pytest.fixture
def cuda(monkeypatch):
    import torch

    stub = StubCuda()
    for name in (name for name in dir(StubCuda) if not name.startswith("_")):
        monkeypatch.setattr(torch.cuda, name, getattr(stub, name))
    return stub


def test_device_events_time_the_device_and_not_the_launching(cuda):
    spent_ms = iter((5.0, 7.0, 6.0))

    def call():
        cuda.now_ms += next(spent_ms)

    assert clock.device_timed("cuda", call, 3) == pytest.approx([0.005, 0.007, 0.006])
    assert cuda.synchronised == 1  # once, after all of them


def test_a_cpu_is_timed_by_the_hosts_clock(monkeypatch):
    readings = iter((1.0, 3.0, 3.0, 7.0))
    monkeypatch.setattr(clock, "now", lambda: next(readings))
    assert clock.device_timed("cpu", lambda: None, 2) == [2.0, 4.0]


def test_device_memory_is_told_three_ways(cuda, monkeypatch):
    asked = []
    monkeypatch.setattr(environment, "_output", lambda command: asked.append(command) or "512\n")
    assert memory.device_peak_bytes("cuda:1") == 2 << 20
    assert memory.device_reserved_peak_bytes("cuda:1") == 3 << 20
    assert environment.device_used_bytes("cuda:1") == 512 << 20
    assert "--id=GPU-uuid-1" in asked[0]
    assert environment.device_used_bytes("cuda") == 512 << 20 and "--id=GPU-uuid-0" in asked[1]


@pytest.mark.parametrize("answer", [None, "", "[N/A]\n"])
def test_no_word_from_nvml_is_no_number(cuda, monkeypatch, answer):
    monkeypatch.setattr(environment, "_output", lambda command: answer)
    assert environment.device_used_bytes("cuda") is None


def test_a_cpu_has_no_device_memory():
    assert memory.device_reserved_peak_bytes("cpu") is None
    assert environment.device_used_bytes("cpu") is None
