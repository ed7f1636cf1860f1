"""A record is written whole or not at all, never twice, and never says how fast a wrong answer was."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.measure import record as r
from harness.measure.clock import moment

TIMES = {"mean": 0.01, "p50": 0.01, "p90": 0.01, "p99": 0.01, "n": 31}


def good_record():
    """A whole record with status ok."""
    at = moment()
    record = r.skeleton(at.id, at.utc, config={"seed": 0}, environment={"machine": "toy", "threads": 1})
    record |= {"status": "ok", "error": None, "ended_utc": at.utc}
    for name, keys in r.SECTIONS.items():
        if keys:
            record[name] = dict.fromkeys(keys, 1)
    record["data"]["bos"] = False
    record["metrics"] |= {"ttft_s": TIMES, "itl_s": TIMES, "e2e_s": TIMES, "device_peak_bytes": None}
    comparison = {"ratio": 1.0, "low": 0.9, "high": 1.1, "pairs": 5, "verdict": "indistinguishable"}
    record["reference"] = {"strategy": "contiguous", "metrics": {"itl_s": comparison}}
    return record


def incorrect_record():
    record = good_record() | {"status": "incorrect", "error": "layer 3 differs", "reference": None, "quality": None}
    record["metrics"] = {"kv_reserved_bytes": 10}
    return record


def test_what_is_written_is_what_is_read(tmp_path):
    record = good_record()
    folder = r.make_run_folder(tmp_path / "runs", record["id"])
    path = r.write_record(record, folder)
    assert path == tmp_path / "runs" / record["id"] / "record.json"
    assert r.read_record(path) == record
    assert [entry.name for entry in folder.iterdir()] == ["record.json"]
    assert r.load_records(tmp_path).records == (record,)


def test_the_start_token_is_in_every_record(tmp_path):
    record = good_record()
    del record["data"]["bos"]
    with pytest.raises(ValueError, match="section 'data' needs the keys bos"):
        r.write_record(record, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_start_token_is_yes_or_no_and_never_unknown():
    record = good_record()
    record["data"]["bos"] = None
    with pytest.raises(ValueError, match=r"data\.bos is None: it must be true or false"):
        r.check(record)


def test_a_new_record_says_that_it_failed_until_it_has_ended(tmp_path):
    record = r.skeleton("one", "2026-01-02T03:04:05+00:00", {"seed": 0}, {"machine": "toy"})
    assert (record["status"], record["schema"]) == ("failed", 1)
    r.write_record(record, tmp_path)
    assert r.load_records(tmp_path).records[0]["error"] == "the run did not reach its end"


@pytest.mark.parametrize(
    "timing", [{"itl_s": TIMES}, {"decode_tok_per_s": 5.0}, {"prefill_tok_per_s": 5.0}, {"ttft_s": TIMES}, {"wall_s": 1.0}]
)
def test_a_wrong_answer_has_no_speed(tmp_path, timing):
    record = incorrect_record()
    record["metrics"] |= timing
    with pytest.raises(ValueError, match=f"'incorrect' has no timing, and this one has {next(iter(timing))}"):
        r.write_record(record, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_answer_is_not_compared_with_a_reference():
    record = incorrect_record()
    r.check(record)
    with pytest.raises(ValueError, match="comparison with a reference"):
        r.check(record | {"reference": good_record()["reference"]})


@pytest.mark.parametrize("status", ["oom", "failed"])
def test_a_run_that_broke_off_keeps_what_it_had(tmp_path, status):
    record = good_record() | {"status": status, "error": "no memory", "quality": None, "reference": None, "metrics": None}
    r.write_record(record, tmp_path)
    assert r.load_records(tmp_path).records[0]["status"] == status


@pytest.mark.parametrize("section", sorted(name for name in r.SECTIONS if name != "quality"))
def test_a_good_run_needs_every_section(section):
    with pytest.raises(ValueError, match=f"needs its '{section}' section"):
        r.check(good_record() | {section: None})


def test_quality_may_be_switched_off():
    r.check(good_record() | {"quality": None})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema": 2}, "schema 2 is not the one"),
        ({"status": "fine"}, "unknown status 'fine'"),
        ({"error": "odd"}, "an error belongs to every status but 'ok'"),
        ({"status": "failed"}, "an error belongs to every status but 'ok'"),
        ({"id": "../up"}, "must be a string that can name a file"),
        ({"data": [1]}, "section 'data' must be a mapping, not list"),
    ],
)
def test_a_broken_rule_is_named(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        r.check(good_record() | change)


def test_latencies_need_their_whole_summary():
    record = good_record()
    record["metrics"]["itl_s"] = {"mean": 1.0}
    with pytest.raises(ValueError, match=r"metrics\.itl_s must be a mapping with the keys mean, p50"):
        r.check(record)


def test_comparisons_need_an_interval_and_a_verdict():
    record = good_record()
    del record["reference"]["metrics"]["itl_s"]["low"]
    with pytest.raises(ValueError, match=r"reference\.metrics\.itl_s must be a mapping with the keys ratio, low"):
        r.check(record)


def test_numbers_that_json_cannot_hold_are_listed_by_key(tmp_path):
    record = good_record()
    record["quality"]["perplexity"] = math.inf
    record["quality"]["curve"] = [1.0, math.nan]
    loaded = r.read_record(r.write_record(record, tmp_path))
    assert loaded["quality"]["perplexity"] is None
    assert loaded["nonfinite"] == {"quality.perplexity": "inf", "quality.curve[1]": "nan"}
    assert record["quality"]["perplexity"] == math.inf


def test_a_value_that_is_not_plain_data_is_named(tmp_path):
    record = good_record()
    record["config"]["where"] = Path("somewhere")
    with pytest.raises(ValueError, match=r"config\.where is a \w*Path"):
        r.write_record(record, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_exists_is_never_overwritten(tmp_path):
    record = good_record()
    path = r.write_record(record, tmp_path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        r.write_record(record | {"ended_utc": "later"}, tmp_path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_two_runs_cannot_share_a_folder(tmp_path):
    r.make_run_folder(tmp_path, "one")
    with pytest.raises(UserError, match="exists already"):
        r.make_run_folder(tmp_path, "one")


def no_hard_links(source, target):
    raise OSError(errno.EPERM, "Operation not permitted")


def test_file_systems_without_hard_links_keep_the_promise(tmp_path, monkeypatch):
    monkeypatch.setattr(r.os, "link", no_hard_links)
    record = good_record()
    path = r.write_record(record, tmp_path)
    assert r.read_record(path) == record
    with pytest.raises(FileExistsError):
        r.write_record(record, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_a_write_that_dies_midway_leaves_no_record(tmp_path, monkeypatch, step):
    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(r.os, step, die)
    with pytest.raises(KeyboardInterrupt):
        r.write_record(good_record(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_process_killed_while_writing_leaves_no_record(tmp_path):
    code = (
        "import json, os, sys; from harness.measure import record as r; record = json.load(sys.stdin);"
        "r.os.fsync = lambda handle: os._exit(9); r.write_record(record, sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "20260101-000000-000000-ab")], input=json.dumps(good_record()), text=True
    )
    assert done.returncode == 9
    loaded = r.load_records(tmp_path)
    assert (loaded.records, loaded.broken) == ((), ())
    assert loaded.unfinished == ("20260101-000000-000000-ab",)


def test_processes_writing_at_once_never_collide(tmp_path):
    code = (
        "import json, sys; from harness.measure import record as r; from harness.measure.clock import moment\n"
        "record = json.load(sys.stdin)\n"
        "for _ in range(25):\n"
        "    record['id'] = moment().id; r.write_record(record, r.make_run_folder(sys.argv[1], record['id']))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(3)]
    for writer in writers:
        writer.stdin.write(json.dumps(good_record()))
        writer.stdin.close()
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    loaded = r.load_records(tmp_path)
    assert len({record["id"] for record in loaded.records}) == 75
    assert (loaded.broken, loaded.unfinished) == ((), ())


def test_one_of_two_writers_of_the_same_name_wins(tmp_path):
    code = "import json, sys; from harness.measure import record as r; r.write_record(json.load(sys.stdin), sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(3)]
    for writer in writers:
        writer.stdin.write(json.dumps(good_record()))
        writer.stdin.close()
    assert sorted(writer.wait() for writer in writers) == [0, 1, 1]
    assert len(r.load_records(tmp_path).records) == 1


def test_broken_files_are_listed_with_a_reason_and_the_rest_is_read(tmp_path):
    record = good_record()
    r.write_record(record, tmp_path / "good")
    old = copy.deepcopy(record) | {"schema": 0}
    for name, content in {"half": '{"schema": 1', "list": "[]", "old": json.dumps(old), "nan": '{"schema": NaN}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(content)
    loaded = r.load_records(tmp_path)
    assert loaded.records == (record,)
    reasons = dict(loaded.broken)
    assert sorted(reasons) == ["half/record.json", "list/record.json", "nan/record.json", "old/record.json"]
    assert "no JSON object" in reasons["list/record.json"]
    assert "schema 0" in reasons["old/record.json"]
    assert "NaN" in reasons["nan/record.json"]


def test_records_are_read_oldest_first_and_other_files_are_left_alone(tmp_path):
    ids = []
    for place in ("b", "a"):
        record = good_record()
        ids.append(record["id"])
        r.write_record(record, tmp_path / place)
    (tmp_path / "a" / "settings.json").write_text("not ours")
    loaded = r.load_records(tmp_path)
    assert [record["id"] for record in loaded.records] == sorted(ids)
    assert loaded.broken == ()


def test_a_missing_folder_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there is no folder"):
        r.load_records(tmp_path / "nowhere")


def test_a_results_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    target = tmp_path / "file" / "runs"
    for attempt in (
        lambda: r.require_writable(target),
        lambda: r.make_run_folder(target, "one"),
        lambda: r.write_record(good_record(), target),
    ):
        with pytest.raises(UserError, match=r"results folder .* cannot be"):
            attempt()
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_permission_is_one_sentence(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="no permission"):
            r.require_writable(tmp_path / "runs")
    finally:
        tmp_path.chmod(0o700)


def test_asking_whether_a_folder_is_writable_creates_nothing(tmp_path):
    r.require_writable(tmp_path / "results" / "runs")
    assert list(tmp_path.iterdir()) == []


def test_every_key_of_the_schema_is_documented():
    documented = (Path(__file__).parents[3] / "results" / "README.md").read_text(encoding="utf-8")
    names = {key for keys in r.SECTIONS.values() for key in keys} | set(good_record()) | {"nonfinite"}
    assert sorted(name for name in names if f"`{name}`" not in documented) == []
