"""The wheel: it holds every package, the configuration and the type markers, and works from any folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "strategies", "harness")
SHIPPED = (*PACKAGES, "conf", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of what the repository ships, with the backend that is installed here."""
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    program = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return source / "dist" / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds the unpacked wheel, as site-packages would."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_pyproject_names_every_package():
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
    found = {".".join(file.parent.relative_to(ROOT).parts) for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert set(re.findall(r'"([\w.]+)"', listed)) == found | {"harness._conf"}


def test_every_package_folder_is_a_package():
    folders = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_the_wheel_holds_the_code_the_configuration_and_the_type_markers_and_nothing_else(wheel):
    source = wheel.parents[1]
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    code = {file.relative_to(source).as_posix() for package in PACKAGES for file in (source / package).rglob("*.py")}
    conf = {f"harness/_conf/{file.relative_to(source / 'conf').as_posix()}" for file in (source / "conf").rglob("*.yaml")}
    markers = {f"{package}/py.typed" for package in PACKAGES}
    assert names == code | conf | markers


def test_the_installed_program_answers_from_another_folder(installed, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(installed)}
    program = "import harness.cli as c; print(c.__file__); print(c.cli(['--help'])); print(c.cli(['+strategy=paged', '--cfg', 'job']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed / "harness" / "cli.py"))
    assert "contiguous_growth" in done.stdout
    assert "page_size: 16" in done.stdout
    module = subprocess.run([sys.executable, "-m", "harness"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (module.returncode, module.stdout) == (2, "")
    assert "no strategy given" in module.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_metadata_say_licence_python_and_console_script(installed):
    (info,) = installed.glob("kvbench-*.dist-info")
    metadata = (info / "METADATA").read_text()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    assert "kvbench = harness.cli:main" in (info / "entry_points.txt").read_text()
    assert (info / "licenses" / "LICENSE").is_file()


def test_the_tested_versions_fit_the_declared_ranges():
    from packaging.requirements import Requirement

    text = (ROOT / "pyproject.toml").read_text()
    (core,) = re.findall(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    (optional,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)^\[", text, re.DOTALL | re.MULTILINE)
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for quoted in re.findall(r'"([^"]+)"', core + optional):
        requirement = Requirement(quoted)
        if requirement.name == "setuptools":  # the build's own, left to whatever builds
            continue
        assert requirement.specifier.contains(pinned[requirement.name]), quoted
