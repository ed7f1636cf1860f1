"""Reads what W&B wrote down of a run. The format: LevelDB's log framing around W&B's protobuf records.

It knows nothing of what was logged.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

HEADER, BLOCK, FRAME = 7, 32 * 1024, 7  # file header, block and frame header, bytes


def records(path: Path):
    """Every protobuf record of a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), HEADER, b""
    while at + FRAME <= len(data):
        if BLOCK - at % BLOCK < FRAME:  # no frame begins in the last bytes of a block
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + FRAME])
        parts += data[at + FRAME : at + FRAME + length]
        at += FRAME + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(parts)
            parts = b""


def read_back(folder: Path) -> dict:
    """Config, history, summary, exit code, labels and artifacts of the one run in `folder`."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    told = {"config": {}, "history": [], "summary": {}, "exit_code": None, "run": None, "artifacts": []}
    for record in records(file):
        if record.HasField("run"):
            told["run"] = record.run
            told["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            told["history"].append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
        if record.HasField("summary"):
            told["summary"] |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update}
        if record.HasField("artifact"):
            told["artifacts"].append((record.artifact.type, record.artifact.name))
        if record.HasField("request") and record.request.HasField("log_artifact"):
            told["artifacts"].append((record.request.log_artifact.artifact.type, record.request.log_artifact.artifact.name))
        if record.HasField("exit"):
            told["exit_code"] = record.exit.exit_code
    return told
