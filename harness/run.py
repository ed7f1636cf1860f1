"""One run from a checked configuration to one record: refuse, verify, audit, measure, quality, write, show.

It does not know how any phase works. Refused before the start, nothing is written; after it, one record with its status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.build import Settings, parse, pick_device
from harness.describe import describe_backend, describe_model, describe_strategy
from harness.errors import UserError
from harness.measure.eventfile import EventFile
from harness.points import point_id

if TYPE_CHECKING:
    from rich.console import Console

    from harness.measure.datasets import Text
    from harness.measure.paired import Paired
    from harness.measure.quality import Protocol
    from harness.phases import Load
    from harness.report.tracking import Tracker

TRACE, PROFILE = "trace.json", "profile.md"  # files in a run's folder
SUMMARISED = ("status", "error", "metrics", "quality", "reference", "audit")  # what W&B shows of a run beside its series


class Job:
    """A run that nothing refuses: both sides loaded, the text read, the requests made, the results folder writable."""

    def __init__(self, settings: Settings, console: Console) -> None:
        from harness.measure.datasets import load_text
        from harness.measure.record import require_writable
        from harness.phases import require_room
        from harness.sides import contenders

        self.settings = settings
        self.device = pick_device(settings.general.device)
        require_writable(settings.general.results_dir)
        self.text: Text = load_text(settings.data)
        with console.status("loading the model"):
            self.strategy, self.reference = contenders(settings, self.device)
        self.tokens: list[int] = self.strategy.model.tokenizer.encode(self.text.text, False)
        self.load: Load = self._load()
        for side in (self.strategy, self.reference):
            require_room(side, self.load)
        self.protocol: Protocol | None = self._protocol()

    def _load(self) -> Load:
        from harness.phases import Load

        workload, context = self.settings.workload, self.strategy.model.geometry.context
        requests = workload.requests(self.tokens, self.settings.general.seed, context)
        return Load(tuple(requests), workload.step_tokens, workload.max_sequences)

    def _protocol(self) -> Protocol | None:
        from harness.measure.quality import Protocol, check_room
        from harness.sides import bos_id

        wanted, bos = self.settings.quality, bos_id(self.settings, self.strategy.model)
        if not wanted.enabled:
            return None
        for side in (self.strategy, self.reference):
            check_room(side.cache(), wanted.context)
        protocol = Protocol(wanted.context, wanted.windows, wanted.chunk, bos)
        protocol.cut(self.tokens)
        return protocol


def run(config: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Run `config` and return its record, which is on disk by then. UserError when it is refused before the start."""
    from harness.report.table import render_run
    from harness.report.tracking import Tracker

    job = Job(parse(config), console)
    record, folder = _started(job, config)
    events, tracker = EventFile(folder, record), Tracker()
    try:
        tracker = _tracker(job, record, folder, console)
        _phases(job, record, tracker, events, console)
    except BaseException as error:
        record |= {"status": _status(error), "error": _reason(error)}
        raise
    finally:
        _ended(record, folder, tracker, events)
    console.print(render_run(record))
    console.print(f"record: {folder / 'record.json'}")
    return record


def _started(job: Job, config: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    import torch

    from harness.measure.clock import moment
    from harness.measure.environment import fingerprint
    from harness.measure.record import make_run_folder, skeleton

    now, general, measure = moment(), job.settings.general, job.settings.measure
    threads = torch.get_num_threads() if measure.threads is None else measure.threads
    record = skeleton(now.id, now.utc, config, fingerprint(job.device, threads, general.seed))
    record |= {
        "point": point_id(config),
        "strategy": describe_strategy(job.strategy),
        "model": describe_model(job.strategy),
        "data": {"name": job.text.name, "sha256": job.text.sha256, "tokens": len(job.tokens), "bos": job.settings.model.bos},
        "workload": dict(config["workload"]),
    }
    return record, make_run_folder(general.results_dir, now.id)


def _tracker(job: Job, record: dict[str, Any], folder: Path, console: Console) -> Tracker:
    from harness.report.tracking import start_tracking

    tags = (job.strategy.settings.name, job.strategy.model.name, record["workload"]["kind"])
    return start_tracking(job.settings.tracking, folder, record["id"], record["config"], "run", tags, console.print)


def _phases(job: Job, record: dict[str, Any], tracker: Tracker, events: EventFile, console: Console) -> None:
    """Fill the record, phase by phase; a wrong answer ends it before anything is timed."""
    from harness import phases
    from harness.measure.memory import restart_peaks
    from harness.progress import bar
    from harness.report.logged import tell

    events.phase("verify")
    with bar(console, "verify: every attend against the oracle") as progress:
        verified = phases.verify(job.strategy, job.tokens, progress)
    record["verify"] = asdict(verified)
    events.phase("audit")
    audit = phases.audit(job.strategy, job.load, job.tokens, job.device)
    record["audit"] = audit.as_dict()
    record["backend"] = describe_backend(job.strategy, audit)
    problem = verified.problem if verified.problem is not None else audit.problem
    if problem is not None:
        record |= {"status": "incorrect", "error": problem}
        return
    record["limits"] = _limits(job, console)
    restart_peaks(job.device)
    events.phase("measure")
    with bar(console, f"measure: {job.strategy.settings.name} beside {job.reference.settings.name}") as progress:
        how = (job.settings.general.seed, job.settings.measure, events.new_log, progress)
        paired = phases.measure(job.strategy, job.reference, job.load, job.device, *how)
    _measured(job, record, paired)
    if job.settings.measure.profile_steps:
        events.phase("profile")
        record["profile"] = _profiled(job, events.folder, console)
    tell(tracker, paired)
    if job.protocol is not None:
        events.phase("quality")
        with bar(console, "quality: text through the cache, next to the reference") as progress:
            found = phases.quality(job.strategy, job.reference, job.tokens, job.protocol, True, progress)
        record["quality"] = found.as_dict()
    record["backend"] = describe_backend(job.strategy, audit)
    record |= {"status": "ok", "error": None}


def _limits(job: Job, console: Console) -> dict[str, Any]:
    """The static card of a decode step in the middle of the workload: shown before anything is measured."""
    from harness.measure.costs import DEVICES
    from harness.measure.limits import card, this_machine

    cache, requests = job.strategy.cache(), job.load.requests
    batch = sum(request.samples for request in requests)
    context = sum(len(request.prompt) + request.max_new_tokens // 2 for request in requests) // len(requests)
    here = this_machine(cache.geometry.dtype, job.device)
    cards = {device.name: card(job.strategy.model.architecture, cache, batch, context, device) for device in (here, *DEVICES.values())}
    found = cards[here.name]
    console.print(
        f"a decode step of {batch} x {context} tokens moves {found['bytes'] / 2**20:,.0f} MiB ({found['kv_bytes'] / 2**20:,.1f} of KV) and "
        f"computes {found['flops'] / 1e9:,.2f} GFLOP: at least {found['limit_s'] * 1e3:,.2f} ms here, where "
        f"{here.bytes_per_s / 1e9:,.0f} GB/s and {max(here.flops_per_s.values()) / 1e9:,.0f} GFLOP/s were measured"
    )
    elsewhere = {name: found["limit_s"] for name, found in cards.items() if name != here.name}
    return found | {"bytes_per_s": here.bytes_per_s, "flops_per_s": dict(here.flops_per_s), "elsewhere_limit_s": elsewhere}


def _measured(job: Job, record: dict[str, Any], paired: Paired) -> None:
    from harness.measure.environment import device_used_bytes
    from harness.measure.memory import device_peak_bytes, device_reserved_peak_bytes, host_peak_rss_bytes
    from harness.measure.metrics import metrics
    from harness.phases import laws

    peaks = device_peak_bytes(job.device), host_peak_rss_bytes()
    found = metrics(paired.strategy.typical, job.strategy.cache().bytes_per_token(), *peaks)
    beyond = {"device_reserved_peak_bytes": device_reserved_peak_bytes(job.device), "device_used_bytes": device_used_bytes(job.device)}
    record["metrics"] = found | {"first_use_s": paired.strategy.first_use_s} | beyond
    record["reference"] = {
        "strategy": job.reference.settings.name,
        "metrics": {name: comparison.as_dict() for name, comparison in paired.compared().items()},
        "pairs": {"disturbed": paired.disturbed, "set_aside": paired.set_aside},
        "laws": laws(paired, job.strategy.model.geometry.context),
    }
    record["samples"] = paired.raw()


def _profiled(job: Job, folder: Path, console: Console) -> dict[str, Any]:
    """One more pass of the strategy alone, with every op timed: its times are no part of the comparison."""
    from harness import phases

    with console.status("profile: where a decode step's time goes"):
        found = phases.profile(job.strategy, job.load, job.device, job.settings.measure.profile_steps, folder / TRACE)
    table = found.table()
    (folder / PROFILE).write_text(table + "\n", encoding="utf-8")
    console.print(table)
    return found.as_dict() | {"trace": TRACE}


def _ended(record: dict[str, Any], folder: Path, tracker: Tracker, events: EventFile) -> None:
    from harness.measure.clock import moment
    from harness.measure.record import write_record

    record["ended_utc"] = moment().utc
    try:
        events.close()
        path = write_record(record, folder)
        tracker.summarise({key: record[key] for key in SUMMARISED if record.get(key) is not None})
        tracker.keep(path, "record")
    finally:
        tracker.finish(failed=record["status"] != "ok")


def _status(error: BaseException) -> str:
    import torch

    return "oom" if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error) else "failed"


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
