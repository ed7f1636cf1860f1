"""The static card of the Triton kernels: compile every listed form for GPUs that are not here and read what it costs.

    python -m harness.kernels_card                    compile (or take from the cache), print, write results/kernels/card.json and card.md
    python -m harness.kernels_card --check            compile a covering sample and compare it, and every source, with the committed card

It proves what a compiler makes of the kernels. It runs none of them: how fast they are, only a GPU can say.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from harness.errors import UserError
from harness.kernels_table import markdown
from harness.measure.environment import output_of

CARD = Path(__file__).resolve().parent.parent / "results" / "kernels" / "card.json"
SHARED_LIMIT_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
SPILL_FREE_HEAD_DIM = 128
WIDE_LOAD_BYTES = 16


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.kernels_card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the committed card instead of writing it")
    parser.add_argument("--jobs", type=int, default=1, help="compilations at once (default 1)")
    options = parser.parse_args(arguments)
    try:
        _require_compiler()
        problems = check(options.jobs) if options.check else write(options.jobs)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def write(jobs: int) -> list[str]:
    """Compile everything, print the card, write it. -> every broken rule."""
    from kernels.gpu.specialisations import LISTED

    kernels = measure(((spec, target) for spec in ordered(LISTED) for target in SHARED_LIMIT_BYTES), jobs)
    problems = [problem for entry in kernels for problem in entry["problems"]]
    print_card(kernels)
    card = {"schema": 1, "triton": _triton_version(), "kernels": [_committed(entry) for entry in kernels]}
    CARD.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(entry) for entry in card.pop("kernels"))
    temporary = CARD.with_suffix(".tmp")
    temporary.write_text(json.dumps(card, indent=1).removesuffix("\n}") + ',\n "kernels": [\n' + lines + "\n ]\n}\n")
    os.replace(temporary, CARD)
    CARD.with_suffix(".md").write_text(markdown(json.loads(CARD.read_text())))
    return problems


def check(jobs: int) -> list[str]:
    """What is wrong with the committed card: forms it lacks, sources that changed since, rules broken, sampled figures that grew."""
    from kernels.gpu.specialisations import LISTED, SAMPLE

    if not CARD.is_file():
        raise UserError(f"there is no card at {CARD}: run python -m harness.kernels_card")
    card = json.loads(CARD.read_text())
    committed = {(entry["name"], entry["target"]): entry for entry in card["kernels"]}
    if card["triton"] != _triton_version():
        made_by, here = card["triton"], _triton_version()
        raise UserError(f"the committed card was made by triton {made_by} and this is {here}: install that version, or make a new card")
    problems = stale(committed, LISTED)
    fresh = measure(((spec, target) for spec in ordered(SAMPLE) for target in SHARED_LIMIT_BYTES), jobs)
    problems += [problem for entry in fresh for problem in entry["problems"]]
    problems += [problem for entry in fresh for problem in grown(entry, committed.get((entry["name"], entry["target"])))]
    print(f"{len(committed)} compiled forms on the card, {len(fresh)} compiled again, {len(problems)} problems")
    return problems


def stale(committed: dict, listed: Iterable) -> list[str]:
    """Forms whose source or tuning is not the one the card was made from."""
    from kernels.gpu.compiled import request, supported

    wanted = {(s.name, t): request(s, t).digest(t) for s in listed for t in SHARED_LIMIT_BYTES if supported(s, t)}
    missing = [f"{name} on {target} is not on the card" for name, target in sorted(wanted.keys() - committed.keys())]
    extra = [f"{name} on {target} is on the card but no longer listed" for name, target in sorted(committed.keys() - wanted.keys())]
    changed = [
        f"{name} on {target} has changed since the card was made: run python -m harness.kernels_card"
        for (name, target), digest in sorted(wanted.items())
        if (name, target) in committed and committed[name, target]["digest"] != digest
    ]
    return missing + extra + changed


def grown(entry: dict, committed: dict | None) -> list[str]:
    """Figures of a fresh compilation that exceed the committed ones."""
    if committed is None:
        return []
    return [
        f"{entry['name']} on {entry['target']}: {key} grew from {committed[key]} to {entry[key]}"
        for key in ("registers", "spills", "scalar_spills", "local_bytes", "shared_bytes")
        if entry[key] > committed[key]
    ]


def measure(forms: Iterable[tuple], jobs: int) -> list[dict]:
    """One entry per form and target that is not refused there, with its facts and the rules it breaks."""
    from kernels.gpu.compiled import supported

    wanted = [(spec, target) for spec, target in forms if supported(spec, target)]
    if jobs == 1:
        return [entry_of(form) for form in wanted]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(entry_of, wanted, chunksize=8))


def entry_of(form: tuple) -> dict:
    """Facts of one form on one target, from the cache when the same source was read before."""
    from kernels.gpu.compiled import request

    spec, target = form
    wanted = request(spec, target)
    digest = wanted.digest(target)
    cached = cache_folder() / f"{digest}.json"
    if cached.is_file():
        facts = json.loads(cached.read_text())
    else:
        facts = _compile(spec, target, wanted.threads(target))
        temporary = cached.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(facts))
        os.replace(temporary, cached)
    entry = {"name": spec.name, "target": target, "digest": digest, **facts}
    return entry | {"problems": [f"{spec.name} on {target}: {rule}" for rule in broken_rules(spec, target, facts)]}


def broken_rules(spec, target: str, facts: dict) -> list[str]:
    """The allowance of every form: what it may not cost, whatever the card says."""
    from kernels.gpu.specialisations import Attend

    rules = []
    if getattr(spec, "head_dim", 0) <= SPILL_FREE_HEAD_DIM and (facts["spills"] or facts["local_bytes"]):
        spilled = f"spills {facts['spills']} and uses {facts['local_bytes']} bytes of local memory"
        rules.append(f"{spilled}: none is allowed up to head_dim {SPILL_FREE_HEAD_DIM}")
    if facts["shared_bytes"] > SHARED_LIMIT_BYTES[target]:
        rules.append(f"needs {facts['shared_bytes']} bytes of shared memory and a program has {SHARED_LIMIT_BYTES[target]}")
    return rules + (_broken_attention_rules(spec, target, facts) if isinstance(spec, Attend) else [])


def _broken_attention_rules(spec, target: str, facts: dict) -> list[str]:
    from kernels.gpu.compiled import request

    rules, wanted = [], request(spec, target)
    threads, keys = wanted.threads(target), wanted.constants["BLOCK_N"]
    if spec.dtype != "float32" and facts["matrix_instructions"] == 0:
        rules.append("has no matrix instruction")
    if target == "gfx942":
        return rules
    rows = [code_row_bytes(codec, spec.dtype, spec.head_dim) for codec in (spec.codec_k, spec.codec_v)]
    if all(row % WIDE_LOAD_BYTES == 0 for row in rows) and facts["loop_widest_load_bytes"] < WIDE_LOAD_BYTES:
        rules.append(f"loads K and V {facts['loop_widest_load_bytes']} bytes at a time: {WIDE_LOAD_BYTES} are possible")
    padded = [code_row_bytes(codec, spec.dtype, wanted.constants["BLOCK_D"]) for codec in (spec.codec_k, spec.codec_v)]
    tile = sum(max(keys * row, threads * facts["loop_widest_load_bytes"]) for row in padded)
    passes, rest = divmod(facts["loop_load_bytes"], tile)
    if rest or passes == 0 or facts["loop_exponentials"] < passes * spec.rows * keys // threads:
        rules.append(f"loads {facts['loop_load_bytes']} bytes in one pass of its loop: not whole tiles of {tile} bytes, each used once")
    return rules


def code_row_bytes(codec: str, dtype: str, lanes: int) -> int:
    """Bytes of the codes of `lanes` values of one head's row."""
    from kernels.codec import DTYPE_BYTES, codec_named

    width = DTYPE_BYTES[dtype] if codec == "raw" else 1
    return codec_named(codec).codes_per_row(lanes) * width


def print_card(kernels: list[dict]) -> None:
    """One line per form, one column per target: registers, spills, shared memory, widest K/V load in the loop, matrix instructions."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="registers / spills / shared KiB / loop load bytes wide / matrix instructions")
    for heading in ("form", *SHARED_LIMIT_BYTES):
        table.add_column(heading, overflow="fold")
    by_name: dict[str, dict[str, dict]] = {}
    for entry in kernels:
        by_name.setdefault(entry["name"], {})[entry["target"]] = entry
    for name, targets in by_name.items():
        table.add_row(name, *(_cell(targets.get(target)) for target in SHARED_LIMIT_BYTES))
    Console(width=140).print(table)


def ordered(specs: Iterable) -> list:
    return sorted(specs, key=lambda spec: spec.name)


def _require_compiler() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1 turns the compiler off: unset it to make the kernels' card")


def cache_folder() -> Path:
    """Where facts are kept between runs, by a digest of what was compiled."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home) / "kvbench" / "kernels_card" / _triton_version()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(spec, target: str, threads: int) -> dict:
    from kernels.gpu.binary import amd, nvidia
    from kernels.gpu.compiled import compile_for

    compiled = compile_for(spec, target)
    shared = compiled.metadata.shared
    if "cubin" not in compiled.asm:
        return asdict(amd(compiled.asm["amdgcn"], shared, threads))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = output_of([_tool("cuobjdump"), "--dump-resource-usage", str(path)])
        return asdict(nvidia(usage, output_of([_tool("nvdisasm"), str(path)]), shared, threads))


def _tool(name: str) -> str:
    """One of the binary tools that come with triton."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _committed(entry: dict) -> dict:
    return {key: value for key, value in entry.items() if key != "problems"}


def _cell(entry: dict | None) -> str:
    if entry is None:
        return "refused"
    shared_kib = -(-entry["shared_bytes"] // 1024)
    return f"{entry['registers']} / {entry['spills']} / {shared_kib} / {entry['loop_widest_load_bytes']} / {entry['matrix_instructions']}"


def _triton_version() -> str:
    from importlib.metadata import version

    return version("triton")


if __name__ == "__main__":
    sys.exit(main())
