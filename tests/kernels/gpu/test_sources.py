"""Rules that the interpreter cannot see broken, read from the kernels' source: fills, precision, nothing searched for at run time."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "kernels" / "gpu"
KERNEL_FILES = ("attend.py", "copy_pages.py", "pointwise.py", "rows.py", "tiles.py")


def loads_without_fill(text: str) -> list[str]:
    """T05: every masked `tl.load` names what masked lanes read: the interpreter hands out zeros, a GPU whatever it likes."""
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in _calls(text, "tl.load")
        if _keyword(call, "mask") is not None and _keyword(call, "other") is None
    ]


def dots_without_precision(text: str) -> list[str]:
    """T02: float32 products use TF32 unless told otherwise."""
    return [f"line {call.lineno}: {ast.unparse(call)}" for call in _calls(text, "tl.dot") if _keyword(call, "input_precision") is None]


def narrow_program_ids(text: str) -> list[str]:
    """X01: a page, slot, token or row number is widened before it is multiplied into an address."""
    products = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult))
    loaded = ("tl.load(", "page", "slot", "token", "stored")
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in products
        if ast.unparse(node.left).startswith(loaded) and not _is_wide(node.left, text)
    ]


@pytest.mark.parametrize("name", KERNEL_FILES)
@pytest.mark.parametrize("rule", [loads_without_fill, dots_without_precision, narrow_program_ids])
def test_every_kernel_file_keeps_the_rule(rule, name):
    assert rule((FOLDER / name).read_text()) == []


@pytest.mark.parametrize("name", KERNEL_FILES)
def test_nothing_is_tuned_or_blocked_behind_our_back(name):
    text = (FOLDER / name).read_text()
    assert not [word for word in ("autotune", "heuristics", "make_block_ptr", "tl.float16_accumulate") if word in text]


def test_every_kernel_file_is_looked_at():
    with_kernels = {path.name for path in FOLDER.glob("*.py") if "@triton.jit" in path.read_text()}
    assert with_kernels == set(KERNEL_FILES)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (loads_without_fill, "x = tl.load(p, mask=m)"),
        (dots_without_precision, "x = tl.dot(a, b)"),
        (narrow_program_ids, "x = tl.load(p + page * size)"),
        (narrow_program_ids, "x = p + tl.load(slots) * heads"),
    ],
)
def test_the_rules_see_what_they_forbid(rule, text):
    assert len(rule(text)) == 1


def _calls(text: str, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _is_wide(node: ast.expr, text: str) -> bool:
    """Whether the expression, or the assignment of the name it is, converts to int64 (or is computed from something that does)."""
    if "tl.int64" in ast.unparse(node) or "store_rows(" in ast.unparse(node):
        return True
    names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    assigned = [
        statement.value
        for statement in ast.walk(ast.parse(text))
        if isinstance(statement, ast.Assign) and {ast.unparse(target) for target in statement.targets} & names - {"tl"}
    ]
    return any(
        _is_wide(value, text) for value in assigned if not {x.id for x in ast.walk(value) if isinstance(x, ast.Name)} & names - {"tl"}
    )
