"""The environment section describes the machine and betrays nobody."""

from __future__ import annotations

import getpass
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from harness.measure import environment as e


@pytest.fixture
def print_of_this_machine():
    return e.fingerprint("cpu", threads=3, seed=0)


def test_the_fingerprint_is_plain_data_and_keeps_what_it_was_told(print_of_this_machine):
    assert json.loads(json.dumps(print_of_this_machine)) == print_of_this_machine
    assert (print_of_this_machine["threads"], print_of_this_machine["seed"], print_of_this_machine["device"]) == (3, 0, "cpu")
    assert print_of_this_machine["gpu"] is None
    assert print_of_this_machine["cpu"]["usable_cores"] >= 1
    assert print_of_this_machine["cpu"]["memory_bytes"] > 2**28


def test_it_names_no_person_host_or_folder(print_of_this_machine):
    written = json.dumps(print_of_this_machine)
    for secret in (platform.node(), str(Path.home()), os.getcwd(), sys.prefix, str(Path(e.__file__).parent)):
        assert len(secret) < 2 or secret not in written
    values = [value for value in written.replace('"', " ").replace(",", " ").split() if value == getpass.getuser()]
    assert values == []


def test_versions_are_read_without_importing_anything():
    code = "import sys; from harness.measure.environment import versions; v = versions(); print(v['torch'], 'torch' in sys.modules)"
    version, imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    torch = pytest.importorskip("torch")
    assert version == torch.__version__
    assert imported == "False"


def test_a_package_that_is_missing_has_no_version(monkeypatch):
    monkeypatch.setattr(e, "PACKAGES", ("surely-nobody-published-this",))
    assert e.versions() == {"surely-nobody-published-this": None}


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "first", "--no-verify")
    return tmp_path


def test_a_clean_checkout_has_a_commit_and_an_edited_one_is_dirty(checkout):
    clean = e.commit(checkout)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (checkout / "file").write_text("two")
    assert e.commit(checkout) == {"commit": clean["commit"], "dirty": True}


def test_outside_a_checkout_there_is_no_commit_and_no_dirty_flag(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert e.commit(tmp_path) == {"commit": None, "dirty": None}


def test_an_environment_inside_somebody_elses_checkout_is_not_that_checkout(checkout):
    inner = checkout / "venv"
    inner.mkdir()
    assert e.commit(inner) == {"commit": None, "dirty": None}


def test_a_program_that_is_missing_is_no_answer():
    assert e._output(["surely-no-such-program"]) is None


def test_the_machine_class_tells_machines_apart_and_can_name_a_folder():
    cpu = {"model": "Toy(R) Core(TM) i9 @ 3.0GHz", "usable_cores": 8}
    name = e.machine_class(cpu, None)
    assert name.endswith("-toy-core-i9-3.0ghz-8c")
    assert "/" not in name
    assert e.machine_class(cpu | {"usable_cores": 4}, None) != name
    generations = [e.machine_class(cpu | {"generation": number}, None) for number in ("25-17", "23-49")]
    assert len({*generations, name}) == 3
    assert e.machine_class(cpu, {"name": "Toy GPU 80GB"}) == "toy-gpu-80gb"
