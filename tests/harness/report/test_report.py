"""Reports put side by side only what may be compared, name the units, and never show the speed of a wrong answer."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from harness.measure.record import make_run_folder, skeleton, write_record
from harness.report import rows
from harness.report.__main__ import main
from harness.report.rows import differing, groups

pytest.importorskip("rich")

QUALITY = {"perplexity": 18.0753, "scored_tokens": 512, "kl_mean": 0.0, "top1_agreement": 0.995}
COSTS = {
    "prefill_tok_per_s": 1000.0,
    "tokens_fed": 159,
    "tokens_recomputed": 0,
    "kv_bytes_per_token": 46080,
    "kv_reserved_bytes": 3 * 2**20,
    "kv_in_use_bytes_peak": 2**20,
    "kv_live_bytes_peak": 2**20,
    "kv_waste_ratio": 0.25,
    "device_peak_bytes": None,
    "host_peak_rss_bytes": 2**30,
}


def record(name, rate=100.0, number=0, **changes):
    """A whole record of strategy `name`; `changes` are {section: {key: value}}."""
    made = skeleton(
        f"20260101-000000-00000{number}-{name}", "2026-01-01T00:00:00+00:00", {"budget_bytes": None}, {"machine": "toy", "threads": 2}
    )
    times = {"mean": 0.01, "p50": 0.0123, "p90": 0.011, "p99": 0.0456, "n": 31}
    found = {"ratio": 1.23, "low": 1.18, "high": 1.28, "pairs": 12, "verdict": "faster"}
    made |= {
        "status": "ok",
        "error": None,
        "strategy": dict.fromkeys(("storage", "page_size", "mask", "codec_k", "codec_v", "heads", "rewind")) | {"name": name},
        "model": dict.fromkeys(("architecture", "layers", "query_heads", "kv_heads", "head_dim"))
        | {"name": "toy", "sha256": "ab" * 32, "dtype": "float32"},
        "data": {"name": "text", "sha256": "cd" * 32, "tokens": 100, "bos": False},
        "workload": {"kind": "steady", "batch": 1},
        "backend": {"name": "reference", "kernels": {"attend": 1234}, "storage_dtypes": ["float32"]},
        "verify": {"attends": 24, "worst": [0.125, 0.25]},
        "quality": dict.fromkeys(("bits_per_byte", "cached_read_ratio"), 0.9) | QUALITY,
        "reference": {"strategy": "contiguous", "metrics": {"decode_tok_per_s": found}},
        "metrics": dict.fromkeys(("ttft_s", "itl_s", "e2e_s"), times) | COSTS | {"decode_tok_per_s": rate},
    }
    for section, values in changes.items():
        made[section] = made[section] | values
    return made


def wrong(name, number):
    return record(name, number=number) | {
        "status": "incorrect",
        "error": "layer 3 differs",
        "metrics": None,
        "reference": None,
        "quality": None,
    }


@pytest.fixture
def folder(tmp_path):
    def save(*records):
        for one in records:
            write_record(one, make_run_folder(tmp_path, one["id"]))
        return str(tmp_path)

    return save


def test_records_of_one_kind_share_a_table_best_first(folder, capsys):
    place = folder(record("slow", 50.0), record("quick", 150.0), wrong("broken", 1))
    assert main([place]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in lines] == ["quick", "slow", "broken"]
    assert "must not be compared" not in printed
    for text in (
        "tok/s",
        "ms",
        "MiB",
        "bytes/token",
        "nats",
        "reference",
        "1.230 [1.180, 1.280] faster",
        "/ contiguous",
        "12.30",
        "45.60",
        "99.50",
    ):
        assert text in printed


def test_a_wrong_answer_shows_its_reason_and_no_speed(folder, capsys):
    main([folder(wrong("broken", 1))])
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("│"))
    assert "NO" in row
    assert not any(character.isdigit() for character in row)
    assert "incorrect: layer 3 differs" in printed


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data": {"bos": True}}, "bos"),
        ({"data": {"sha256": "ef" * 32}}, "data"),
        ({"environment": {"machine": "other"}}, "machine"),
        ({"environment": {"threads": 8}}, "machine"),
        ({"model": {"dtype": "bfloat16"}}, "model"),
        ({"workload": {"batch": 8}}, "workload"),
        ({"config": {"budget_bytes": 1000}}, "KV budget"),
        ({"config": {"quality": {"context": 512}}}, "quality"),
    ],
)
def test_what_differs_is_said_and_never_put_side_by_side(folder, capsys, changes, name):
    one, other = record("paged"), record("paged", number=1, **changes)
    assert differing(groups([one, other])) == [name]
    main([folder(one, other)])
    printed = capsys.readouterr().out
    assert f"2 tables that must not be compared with each other: they differ in {name}." in printed
    assert printed.count("┏") == 2


def test_the_choice_of_start_token_is_shown(folder, capsys):
    main([folder(record("a", data={"bos": True}), record("b", number=1))])
    printed = capsys.readouterr().out
    assert "bos: yes" in printed
    assert "bos: no" in printed


def test_several_references_are_named_in_the_cells(folder, capsys):
    main([folder(record("a"), record("b", number=1, reference={"strategy": "contiguous_max"}))])
    printed = capsys.readouterr().out
    assert "faster (contiguous)" in printed
    assert "faster (contiguous_max)" in printed


def test_a_mix_of_commits_is_said(folder, capsys):
    main([folder(record("a", environment={"commit": "1"}), record("b", number=1, environment={"commit": "2"}))])
    assert "2 different commits" in capsys.readouterr().out


def test_a_run_that_failed_early_is_listed_with_its_error(folder, capsys):
    early = skeleton("20260101-000000-000009-x", "2026-01-01T00:00:00+00:00", {}, {})
    main([folder(early)])
    printed = capsys.readouterr().out
    assert "failed: the run did not reach its end" in printed


def test_numbers_that_were_not_finite_are_said(folder, capsys):
    main([folder(record("a", quality={"perplexity": float("inf")}))])
    assert "quality.perplexity is inf" in capsys.readouterr().out


def test_markdown_has_one_cell_for_each_column(folder, capsys):
    place = folder(record("a|b"), wrong("c", 1))
    assert main([place, "--markdown"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 4
    assert {line.replace("\\|", "").count("|") for line in rows} == {15}
    assert "decode tok/s" in rows[0]
    assert "decode rate / contiguous" in rows[0]
    assert "a\\|b" in rows[2]


def test_an_empty_or_missing_folder_is_one_sentence(tmp_path, capsys):
    for place, sentence in ((tmp_path, "there is no record in"), (tmp_path / "nowhere", "there is no folder")):
        assert main([str(place)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(sentence)
        assert captured.err.count("\n") == 1


def test_what_was_left_out_is_said(folder, tmp_path, capsys):
    place = folder(record("a"))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "record.json").write_text("{")
    (tmp_path / "20260101-000000-000000-ab").mkdir()
    assert main([place]) == 0
    complaints = capsys.readouterr().err
    assert "left out: half/record.json" in complaints
    assert "left out: 20260101-000000-000000-ab has no record" in complaints


def test_piped_output_keeps_every_row_on_one_line(folder):
    place = folder(record("contiguous_growth_int8_keys"))
    done = subprocess.run([sys.executable, "-m", "harness.report", place], capture_output=True, text=True, check=True)
    row = next(line for line in done.stdout.splitlines() if line.startswith("│"))
    assert "contiguous_growth_int8_keys" in row
    assert "indistinguishable" in row or "faster" in row
    assert max(map(len, done.stdout.splitlines())) <= 200


def shown(one):
    from rich.console import Console

    from harness.report.table import render_run

    output = io.StringIO()
    Console(width=120, file=output).print(render_run(one))
    return output.getvalue()


def test_one_run_answers_four_questions():
    printed = shown(record("paged"))
    for text in (
        "right?",
        "yes (24 attends compared with the oracle, worst error 0.25 of",
        "fast?",
        "100.0 tok/s",
        "12 pairs",
        "bytes?",
        "46,080 bytes",
        "3.00 MiB",
        "25.00 %",
        "quality?",
        "18.0753",
    ):
        assert text in printed
    assert "reference kernels (attend 1,234), storage float32" in printed


def test_what_could_not_be_checked_is_said():
    printed = shown(record("paged", verify={"skipped": ["a window of 4096: needs 4115 tokens, and 1100 fit"]}))
    assert "not checked: a window of 4096" in printed


def test_one_wrong_run_has_no_speed():
    printed = shown(wrong("paged", 1))
    assert "NO: layer 3 differs" in printed
    assert "a wrong answer has no speed" in printed
    assert "tok/s" not in printed


def test_replayed_and_compiled_steps_are_named_beside_the_kernels():
    record = {
        "backend": {"name": "triton", "graphs": {"launched_because": None, "steps": {"recorded": 3, "replayed": 40}}, "compiled": True}
    }
    assert rows.kernels(record) == "triton, graphs, torch.compile"
    never = {"launched_because": "graphs=off", "steps": {}}
    assert rows.kernels({"backend": {"name": "cpu", "graphs": never, "compiled": False}}) == "cpu"
