"""Records: one run is one JSON file in the run's own folder, schema 1, written whole or not at all and never overwritten.

It does not know how the numbers were made. The keys and their units are documented in results/README.md.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UserError
from harness.measure.metrics import SUMMARY_KEYS, TIMINGS

SCHEMA = 1
OK, INCORRECT, OOM, FAILED = "ok", "incorrect", "oom", "failed"
STATUSES = (OK, INCORRECT, OOM, FAILED)

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "strategy": ("name", "storage", "page_size", "mask", "codec_k", "codec_v", "heads", "rewind"),
    "model": ("name", "sha256", "architecture", "layers", "query_heads", "kv_heads", "head_dim", "dtype"),
    "data": ("name", "sha256", "tokens", "bos"),
    "workload": (),
    "environment": (),
    "config": (),
    "backend": ("name", "kernels", "storage_dtypes"),
    "metrics": (
        *("ttft_s", "itl_s", "e2e_s", "prefill_tok_per_s", "decode_tok_per_s", "tokens_fed", "tokens_recomputed"),
        *("kv_bytes_per_token", "kv_reserved_bytes", "kv_in_use_bytes_peak", "kv_live_bytes_peak", "kv_waste_ratio"),
        *("device_peak_bytes", "host_peak_rss_bytes"),
    ),
    "quality": ("perplexity", "bits_per_byte", "scored_tokens", "cached_read_ratio", "kl_mean", "top1_agreement"),
    "reference": ("strategy", "metrics"),
}
FILE_NAME = "record.json"
RESULTS = ("metrics", "quality", "reference")  # what a run that did not end well may lack
COMPARISON_KEYS = ("ratio", "low", "high", "pairs", "verdict")
_RUN_FOLDERS = "[0-9]" * 8 + "-" + "[0-9]" * 6 + "-" + "[0-9]" * 6 + "-*"  # ids as clock.moment makes them
_NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def skeleton(run_id: str, started_utc: str, config: Mapping[str, object], environment: Mapping[str, object]) -> dict[str, object]:
    """A new record as it stands when a run starts: what is known already, and `failed` until somebody says otherwise."""
    record: dict[str, object] = {"schema": SCHEMA, "id": run_id, "started_utc": started_utc, "ended_utc": None}
    record |= {"status": FAILED, "error": "the run did not reach its end"}
    record |= dict.fromkeys(SECTIONS)
    record |= {"config": dict(config), "environment": dict(environment), "workload": {}, "verify": None}
    return record


def check(record: Mapping[str, object]) -> None:
    """ValueError naming the key unless `record` keeps schema 1. The rule above all: a wrong answer has no speed."""
    for key in ("schema", "id", "status", "error", *SECTIONS):
        if key not in record:
            raise ValueError(f"a record needs the key {key!r}")
    if record["schema"] != SCHEMA:
        raise ValueError(f"schema {record['schema']!r} is not the one that this version reads and writes, {SCHEMA}")
    if not isinstance(record["id"], str) or not record["id"] or Path(record["id"]).name != record["id"]:
        raise ValueError(f"id {record['id']!r} must be a string that can name a file")
    status = record["status"]
    if status not in STATUSES:
        raise ValueError(f"unknown status {status!r}: use one of {', '.join(STATUSES)}")
    if (status == OK) != (record["error"] is None):
        raise ValueError(f"status {status!r} with error {record['error']!r}: an error belongs to every status but 'ok'")
    for section, keys in SECTIONS.items():
        _check_section(section, record[section], keys, status)
    if status == INCORRECT:
        _check_no_timing(record)


def make_run_folder(results_folder: str | Path, run_id: str) -> Path:
    """RESULTS/ID, new and empty, for one run's record and whatever else it leaves. UserError if it cannot be made."""
    folder = Path(results_folder) / run_id
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError as error:
        raise UserError(f"the folder {folder} exists already: each run needs one of its own; choose another results folder") from error
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    return folder


def write_record(record: Mapping[str, object], run_folder: str | Path) -> Path:
    """Write `record` to RUN_FOLDER/record.json and return that path.

    A reader sees the whole file or none: it is written and synced under another name first. Numbers that JSON cannot hold
    (nan, inf) become null and are listed by key under `nonfinite`. FileExistsError if the folder has a record already;
    ValueError if this one breaks the schema; UserError if the folder cannot be written.
    """
    check(record)
    nonfinite: dict[str, str] = {}
    plain = _plain(record, "", nonfinite)
    if nonfinite:
        plain["nonfinite"] = nonfinite
    text = json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    path = Path(run_folder) / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_once(path, text)
    except OSError as error:
        if isinstance(error, FileExistsError) and path.exists():
            raise
        raise _unwritable(path.parent, error) from error
    return path


def require_writable(folder: str | Path) -> None:
    """UserError unless a record could be written to `folder`. Creates nothing, so that a refused run leaves no trace."""
    folder = Path(folder).absolute()
    for place in (folder, *folder.parents):
        if not os.path.lexists(place):
            continue
        if not place.is_dir():
            raise UserError(f"the results folder {folder} cannot be made: {place} is not a folder; choose another results folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise UserError(f"the results folder {folder} cannot be written: no permission for {place}; choose another results folder")
        return


@dataclass(frozen=True)
class Loaded:
    """The records below a folder, oldest first, and the files that could not be read as one, each with the reason."""

    records: tuple[dict[str, object], ...]
    broken: tuple[tuple[str, str], ...]  # ((path below the folder, reason), ...)
    unfinished: tuple[str, ...]  # run folders without a record: running now, or killed


def load_records(folder: str | Path) -> Loaded:
    """Every record.json below `folder`, at any depth. UserError if there is no such folder; what cannot be read is listed."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: give the folder that the runs wrote their records to")
    records, broken = [], []
    for path in sorted(folder.rglob(FILE_NAME)):
        try:
            records.append(read_record(path))
        except (OSError, ValueError) as error:
            broken.append((path.relative_to(folder).as_posix(), str(error)))
    records.sort(key=lambda record: record["id"])
    unfinished = [place.relative_to(folder).as_posix() for place in sorted(folder.rglob(_RUN_FOLDERS)) if _unfinished(place)]
    return Loaded(tuple(records), tuple(broken), tuple(unfinished))


def read_record(path: str | Path) -> dict[str, object]:
    """The record in the file `path`. ValueError if it is not a whole record of this schema."""
    record = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    if not isinstance(record, dict):
        raise ValueError("not a record: the file holds no JSON object")
    check(record)
    return record


def _unfinished(place: Path) -> bool:
    return place.is_dir() and not (place / FILE_NAME).exists()


def _check_section(section: str, value: object, keys: tuple[str, ...], status: object) -> None:
    if value is None:
        if status == OK and section != "quality":  # quality may be switched off
            raise ValueError(f"a record with status 'ok' needs its {section!r} section")
        return
    if not isinstance(value, Mapping):
        raise ValueError(f"section {section!r} must be a mapping, not {type(value).__name__}")
    if status != OK and section in RESULTS:
        return
    missing = [key for key in keys if key not in value]
    if missing:
        raise ValueError(f"section {section!r} needs the keys {', '.join(missing)}")
    if section == "data" and not isinstance(value["bos"], bool):
        raise ValueError(f"data.bos is {value['bos']!r}: it must be true or false, because it decides what may be compared")
    if section == "metrics":
        for name in ("ttft_s", "itl_s", "e2e_s"):
            _check_keys(f"metrics.{name}", value[name], SUMMARY_KEYS)
    if section == "reference":
        for name, comparison in value["metrics"].items():
            _check_keys(f"reference.metrics.{name}", comparison, COMPARISON_KEYS)


def _check_keys(name: str, value: object, keys: tuple[str, ...]) -> None:
    if not isinstance(value, Mapping) or any(key not in value for key in keys):
        raise ValueError(f"{name} must be a mapping with the keys {', '.join(keys)}")


def _check_no_timing(record: Mapping[str, object]) -> None:
    metrics = record["metrics"]
    timed = [name for name in TIMINGS if metrics is not None and metrics.get(name) is not None]
    if timed:
        raise ValueError(f"a record with status 'incorrect' has no timing, and this one has {', '.join(timed)}")
    if record["reference"] is not None:
        raise ValueError("a record with status 'incorrect' has no timing, and this one has a comparison with a reference")


def _plain(value: object, name: str, nonfinite: dict[str, str]) -> object:
    """`value` in JSON's own types; nan and inf become None and are noted by key."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite[name] = str(value)
        return None
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise ValueError(f"{name or 'the record'} has the key {odd[0]!r}: keys must be strings")
        return {key: _plain(item, f"{name}.{key}" if name else key, nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}[{index}]", nonfinite) for index, item in enumerate(value)]
    raise ValueError(f"{name} is a {type(value).__name__}: a record holds only numbers, strings, lists and mappings")


def _write_once(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _name_once(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _name_once(temporary: Path, path: Path) -> None:
    """Give the finished file its name, or FileExistsError: a hard link fails where a rename would overwrite."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "a record with this id exists", str(path)) from error
        os.replace(temporary, path)


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut, where the system lets a folder be synced."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(f"the results folder {folder} cannot be written ({error.strerror}): choose another results folder")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the file holds {name}, which is not JSON")
