"""One run from a checked configuration to one record: refuse, verify, audit, measure, quality, write, show.

It does not know how any phase works. Refused before the start, nothing is written; after it, one record with its status.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.build import Settings, parse, pick_device
from harness.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from harness.measure.datasets import Text
    from harness.measure.quality import Protocol
    from harness.phases import Load
    from harness.report.tracking import Tracker
    from harness.sides import Contender


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
    settings = parse(config)
    job = Job(settings, console)
    record, folder = _started(job, config)
    tracker = _tracker(job, record, folder, console)
    try:
        _phases(job, record, tracker, console)
    except BaseException as error:
        record |= {"status": _status(error), "error": _reason(error)}
        raise
    finally:
        _ended(record, folder, tracker)
    from harness.report.table import render_run

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
        "strategy": describe_strategy(job.strategy),
        "model": describe_model(job.strategy),
        "data": {"name": job.text.name, "sha256": job.text.sha256, "tokens": len(job.tokens), "bos": job.settings.model.bos},
        "workload": dict(config["workload"]),
    }
    return record, make_run_folder(general.results_dir, now.id)


def _tracker(job: Job, record: dict[str, Any], folder: Path, console: Console) -> Tracker:
    from harness.report.tracking import start_tracking

    tags = (job.strategy.settings.name, job.strategy.model.name)
    return start_tracking(job.settings.tracking, folder, record["id"], record["config"], "run", tags, console.print)


def _phases(job: Job, record: dict[str, Any], tracker: Tracker, console: Console) -> None:
    from harness import phases
    from harness.measure.memory import device_peak_bytes, host_peak_rss_bytes, restart_peaks
    from harness.progress import bar

    settings = job.settings
    with bar(console, "verify: every attend against the oracle") as progress:
        verified = phases.verify(job.strategy, job.tokens, progress)
    record["verify"] = asdict(verified)
    audit = phases.audit(job.strategy, job.load, job.device)
    record["audit"] = asdict(audit)
    record["backend"] = describe_backend(job.strategy)
    problem = verified.problem
    if problem is None and not audit.agree:
        problem = f"the byte formula bills {audit.billed_bytes} bytes and the cache holds {audit.stored_bytes}"
    if problem is not None:
        record |= {"status": "incorrect", "error": problem}
        return
    restart_peaks(job.device)
    with bar(console, f"measure: {job.strategy.settings.name} beside {job.reference.settings.name}") as progress:
        m = settings.measure
        how = (settings.general.seed, m.pairs, m.seconds, m.warmup, m.threads)
        paired = phases.measure(job.strategy, job.reference, job.load, job.device, *how, progress)
    from harness.measure.metrics import metrics

    typical = paired.strategy.typical
    peaks = device_peak_bytes(job.device), host_peak_rss_bytes()
    record["metrics"] = metrics(typical, job.strategy.cache().bytes_per_token(), *peaks) | {"first_use_s": paired.strategy.first_use_s}
    record["reference"] = {
        "strategy": job.reference.settings.name,
        "metrics": {name: found.as_dict() for name, found in paired.compared().items()},
        "laws": phases.laws(paired, job.strategy.model.geometry.context),
    }
    record["samples"] = paired.raw()
    _track_steps(tracker, typical)
    if job.protocol is not None:
        with bar(console, "quality: text through the cache, next to the reference") as progress:
            found = phases.quality(job.strategy, job.reference, job.tokens, job.protocol, True, progress)
        record["quality"] = found.as_dict()
    record["backend"] = describe_backend(job.strategy)
    record |= {"status": "ok", "error": None}


def _track_steps(tracker: Tracker, log: Any) -> None:
    for step in log.steps:
        tracker.log(
            {"step_s": step.end_s - step.start_s, "kv_in_use_bytes": step.kv_in_use_bytes, "batch": step.batch_size}, step=step.step
        )


def _ended(record: dict[str, Any], folder: Path, tracker: Tracker) -> None:
    from harness.measure.clock import moment
    from harness.measure.record import write_record

    record["ended_utc"] = moment().utc
    try:
        write_record(record, folder)
        tracker.summarise({key: record[key] for key in ("status", "metrics", "quality", "reference") if record[key] is not None})
    finally:
        tracker.finish(failed=record["status"] != "ok")


def describe_strategy(side: Contender) -> dict[str, Any]:
    """The `strategy` section of a record, read from the cache itself, not from what was asked for."""
    cache = side.cache()
    masks = {cache.mask(layer) for layer in range(len(cache.geometry.layers))}
    heads = cache.heads
    return {
        "name": side.settings.name,
        "storage": side.settings.storage,
        "page_size": getattr(cache, "page_size", None),
        "mask": [asdict(mask) for mask in sorted(masks, key=lambda mask: (mask.window or 0, mask.sinks))],
        "codec_k": cache.codec_k.name,
        "codec_v": cache.codec_v.name,
        "heads": None if heads is None else asdict(heads) | {"label": side.model.heads_label},
        "rewind": None if cache.rewind == float("inf") else cache.rewind,
        "parameters": {name: str(value) if name == "heads" else value for name, value in side.settings.parameters.items()},
    }


def describe_model(side: Contender) -> dict[str, Any]:
    """The `model` section of a record."""
    model = side.model
    shapes = model.geometry.layers
    return {
        "name": model.name,
        "sha256": model.sha256,
        "architecture": model.architecture.family,
        "layers": len(shapes),
        "query_heads": model.geometry.query_heads,
        "kv_heads": sorted({shape.kv_heads for shape in shapes})[-1],
        "head_dim": sorted({shape.head_dim for shape in shapes})[-1],
        "heads": model.heads_label,
        "dtype": model.dtype,
    }


def describe_backend(side: Contender) -> dict[str, Any]:
    """The activation proof: which kernels ran how often, and in which dtypes rows lie."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in side.cache().tensors()})
    return {"name": side.ops.name, "kernels": dict(sorted(side.ops.calls.items())), "storage_dtypes": dtypes}


def _status(error: BaseException) -> str:
    import torch

    return "oom" if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error) else "failed"


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
