"""Texts: the right letters, the right checksum, and one sentence when there is no text to be had."""

from __future__ import annotations

import hashlib
from pydoc_data.topics import topics

import pytest

from harness.errors import UserError
from harness.measure.datasets import joined, load_text, require_tokens
from harness.network import answers
from harness.schema import BuiltinData, HubData, TextData

WIKITEXT = HubData("hub", "wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1", "test", "text", "", " \n")


def test_the_builtin_text_is_the_whole_language_reference_in_the_order_of_its_topics():
    text = load_text(BuiltinData("builtin", "builtin"))
    assert text.name == "builtin"
    assert text.text == "".join(topics[name] + "\n" for name in sorted(topics))
    assert len(text.text) > 300_000  # enough for every default of the command line
    assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()


@pytest.mark.parametrize("name", ["plain.txt", "a=b, c*[1] é.txt"])
def test_a_file_is_read_byte_for_byte_whatever_it_is_called(tmp_path, name):
    content = "één\r\ntwo \n\n\tthree".encode()
    path = tmp_path / name
    path.write_bytes(content)
    text = load_text(TextData("text", None, str(path)))
    assert (text.name, text.text.encode()) == (name, content)
    assert text.sha256 == hashlib.sha256(content).hexdigest()


def test_an_edited_file_is_read_anew(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one")
    first = load_text(TextData("text", "mine", str(path)))
    path.write_text("two")
    second = load_text(TextData("text", "mine", str(path)))
    assert (first.text, second.text, second.name) == ("one", "two", "mine")


def test_a_relative_path_counts_from_where_the_command_is_typed(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("here")
    monkeypatch.chdir(tmp_path)
    assert load_text(TextData("text", None, "text.txt")).text == "here"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "the text 'text.txt' is empty"), (b" \n\n\t", "the text 'text.txt' is empty"), (b"abc\xff", "is not UTF-8 text .* at byte 3")],
)
def test_a_file_without_a_text_is_refused(tmp_path, content, sentence):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        load_text(TextData("text", None, str(tmp_path / "text.txt")))


@pytest.mark.parametrize("path", ["missing.txt", "."])
def test_a_path_without_a_file_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        load_text(TextData("text", None, path))


def test_a_text_that_is_too_short_says_how_much_is_needed_and_for_what():
    require_tokens("mine", 1024, 1024, "one window of quality")
    with pytest.raises(UserError, match="the text 'mine' has 1023 tokens and one window of quality needs 1024"):
        require_tokens("mine", 1023, 1024, "one window of quality")


def test_the_hub_without_a_network_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # `datasets` prefers a local folder of the same name
    with pytest.raises(UserError, match="data=wikitext2 needs Salesforce/wikitext .*the hub cannot be reached.*use data=builtin"):
        load_text(WIKITEXT)


def test_rows_of_the_hub_give_the_original_file_back(tmp_path, monkeypatch):
    """The hub's WikiText rows end their own lines, and its blank lines (a space in the original) are empty rows."""
    from datasets import Dataset

    original = " \n = Title = \n \n Some words . \n"
    rows = ["" if line == " \n" else line for line in original.splitlines(keepends=True)]
    folder = tmp_path / "Salesforce" / "wikitext"
    folder.mkdir(parents=True)
    Dataset.from_dict({"text": rows}).to_parquet(folder / "test.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n  - split: test\n    path: test.parquet\n---\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert load_text(WIKITEXT).text == original
    with pytest.raises(UserError, match=r"data.column='words' is not in .*choose one of text"):
        load_text(HubData("hub", "wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1", "test", "words", "", ""))


def test_row_ends_are_added_where_rows_have_none():
    assert joined(["a", "", "b"], row_end="\n", empty_row="") == "a\n\nb\n"


def test_a_server_that_is_not_there_does_not_answer():
    assert not answers("http://127.0.0.1:9", 1.0)
    assert not answers("not an address", 1.0)


@pytest.mark.parametrize(("status", "expected"), [(200, True), (404, True), (503, False)])
def test_a_server_that_answers_is_told_from_one_that_is_broken(status, expected):
    import http.server
    import threading

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            assert answers(f"http://127.0.0.1:{server.server_port}", 5.0) is expected
        finally:
            server.shutdown()
            thread.join()
