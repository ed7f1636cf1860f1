"""How often benchmarks are passed over, and what pytest-benchmark writes of them.

That is the facts that speeds depend on, no raw samples, and nothing that names a person, host or folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.pairs import PASSES


def pytest_addoption(parser: pytest.Parser) -> None:
    """--passes, known where tests/benchmarks is named on the command line."""
    parser.addoption("--passes", type=int, default=PASSES, help=f"how often to go over all benchmarks (default: {PASSES})")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Repeat what is timed, pass after pass, so that a benchmark's rounds lie all over the session."""
    off = config.getoption("benchmark_disable") and not config.getoption("benchmark_enable")
    if off or hasattr(config, "workerinput"):  # pytest-benchmark times nothing in a worker of xdist
        return
    timed = [item for item in items if "benchmark" in item.fixturenames and item.path.parent == Path(__file__).parent]
    items += timed * (config.getoption("passes", PASSES) - 1)


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_generate_json(benchmarks: list[Any]) -> None:
    """Drop later passes, whose samples the first report has; pytest-benchmark goes on to write what is left."""
    benchmarks[:] = [benchmark for benchmark in benchmarks if benchmark.stats]


def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any]:
    """The machine class, and the conditions under which a speed of that class can be compared."""
    import torch

    import kernels.cpu
    from harness.measure.environment import fingerprint
    from tests.benchmarks import toy

    facts = fingerprint("cpu", torch.get_num_threads(), 0)
    packages = facts["packages"]
    conditions = {
        "python": ".".join(facts["python"].split(".")[:2]),
        "kernels": f"{toy.ops().name}, {kernels.cpu.FLAVOUR}",
        "simd": " ".join(facts["cpu"]["simd"]),  # one model name can stand for several generations
        "threads": facts["threads"],
        **{name: packages[name] for name in ("torch", "numba", "numpy")},
    }
    return {"machine": facts["machine"], "conditions": conditions}


def pytest_benchmark_generate_commit_info(config: pytest.Config) -> dict[str, Any]:
    """Which commit was measured, and no names."""
    from harness.measure.environment import commit

    found = commit()
    return {"id": found["commit"], "dirty": found["dirty"]}


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    """A baseline is read by people in a diff: drop the samples, and say what the inputs were."""
    from tests.benchmarks import toy

    output_json["data_sha256"] = toy.data_sha256()
    for benchmark in output_json["benchmarks"]:
        benchmark["stats"].pop("data", None)
