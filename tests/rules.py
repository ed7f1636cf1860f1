"""Rules about source files, as functions from a file's path and text to the sentences that say where it breaks them.

They read text and syntax trees only; nothing is imported.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator

OURS = ("kernels", "strategies", "harness")
THIRD = {"kernels": {"torch"}, "strategies": {"torch", "numpy"}}
MAX_LINES = 300
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

CLOCK = "harness/measure/clock.py"
# Package -> the only files that may import it.
ONE_PLACE = {
    "hydra": ("harness/cli.py",),
    "omegaconf": ("harness/cli.py",),
    "wandb": ("harness/report/tracking.py",),
    "time": (CLOCK,),
    "subprocess": ("harness/measure/environment.py", "kernels/gpu/binary.py"),  # git and nvidia-smi; disassemblers
}
# Files that must be testable in milliseconds: what they import on loading, through our own modules too, has no torch in it.
TORCH_FREE = (
    "strategies/geometry.py",
    "strategies/pages.py",
    "kernels/codec.py",
    "harness/engine/scheduler.py",
    "harness/engine/events.py",
    "harness/engine/request.py",
    "harness/engine/workloads.py",
    "harness/measure/metrics.py",
    "harness/measure/compare.py",
    "harness/measure/gate.py",
    "harness/gate.py",
    "harness/measure/record.py",
    "harness/model/architecture.py",
)
# What `python -m harness --help` may not load.
HEAVY = {"torch", "transformers", "datasets", "wandb", "numpy", "rich", "triton", "numba", "scipy", "gguf", "safetensors", "tokenizers"}


def imports(text: str, on_loading_only: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of each import; `from a import b` counts as a and a.b. TYPE_CHECKING blocks do not load."""
    for node in _nodes(ast.parse(text), on_loading_only):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{name.name}") for name in node.names)


def _nodes(tree: ast.AST, on_loading_only: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if on_loading_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if on_loading_only and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from _nodes(node, on_loading_only)


def layers(path: str, text: str) -> list[str]:
    """harness -> strategies -> kernels -> torch, and never back; nobody imports tests; relative imports hide the direction."""
    layer = path.split("/")[0]
    found = []
    for line, root in sorted({(line, module.split(".")[0]) for line, module in imports(text)}):
        if root == "":
            found.append(f"{path}:{line} imports relatively: write the whole name")
        elif root in ("tests", "conf", "results"):
            found.append(f"{path}:{line} imports {root}")
        elif root in OURS and OURS.index(root) > OURS.index(layer):
            found.append(f"{path}:{line} imports {root}, which lies above {layer}")
        elif layer in THIRD and root not in OURS and root not in sys.stdlib_module_names and root not in _allowed(path, layer):
            found.append(f"{path}:{line} imports {root}, which {layer} may not")
    return found


def _allowed(path: str, layer: str) -> set[str]:
    extra = {"kernels/gpu/": {"triton", "numpy"}, "kernels/cpu/": {"numba", "llvmlite", "numpy"}}
    return THIRD[layer].union(*(names for folder, names in extra.items() if path.startswith(folder)))


def one_place(path: str, text: str) -> list[str]:
    """Hydra, W&B, the clock and child processes each have one file in all of our packages."""
    found = []
    for line, root in sorted({(line, module.split(".")[0]) for line, module in imports(text)}):
        homes = ONE_PLACE.get(root)
        if homes is not None and path not in homes:
            found.append(f"{path}:{line} imports {root}, which only {' and '.join(homes)} may")
    return found


def clock(path: str, text: str) -> list[str]:
    """Only one file reads the time of day or waits for the device."""
    if path == CLOCK:
        return []
    called = {
        (node.lineno, node.func.attr, ast.unparse(node.func.value))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    waits = [f"{path}:{line} waits for the device" for line, name, _ in called if name == "synchronize"]
    reads = [f"{path}:{line} reads the time" for line, name, of in called if name in ("now", "utcnow", "today") and "date" in of]
    return [f"{fault}, which only {CLOCK} does" for fault in sorted(waits + reads)]


def unpickles(path: str, text: str) -> list[str]:
    """Nothing is ever unpickled."""
    found = [f"{path}:{line} imports {module}" for line, module in imports(text) if module.split(".")[0] in PICKLES]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
            found.append(f"{path}:{node.lineno} calls {ast.unparse(node.func)}, which can unpickle")
    return found


def shape(path: str, text: str) -> list[str]:
    """A module says what it is for, is short, and so are its functions; no **kwargs between our own functions; no banners, no TODO."""
    tree = ast.parse(text)
    lines = text.splitlines()
    found = []
    if ast.get_docstring(tree) is None:
        found.append(f"{path} has no docstring")
    if len(lines) > MAX_LINES:
        found.append(f"{path} has {len(lines)} lines, more than {MAX_LINES}: split it")
    for number, comment in _comments(text):
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", comment):
            found.append(f"{path}:{number} leaves work undone in a comment")
        if re.match(r"#\s*[-=#*~]{4,}", comment):
            found.append(f"{path}:{number} is a banner: split the file instead")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if _own_lines(node) > _screen(node):
            found.append(f"{path}:{node.lineno} {node.name} does not fit a screen ({_own_lines(node)} lines)")
        if node.args.kwarg is not None and not node.name.startswith("_") and not node.args.kwarg.arg.startswith("_"):
            found.append(f"{path}:{node.lineno} {node.name} takes **{node.args.kwarg.arg}: name the parameters")
    return found


def _own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, without those of functions inside it."""
    inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node is not function]
    lines = set(range(function.body[0].lineno, function.end_lineno + 1))
    return len(lines.difference(*(range(node.lineno, node.end_lineno + 1) for node in inner)))


def _screen(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """A GPU kernel is one function, however much it does."""
    compiled = any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)
    return MAX_KERNEL_LINES if compiled else MAX_FUNCTION_LINES


def _comments(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def loaded_by(path: str, sources: dict[str, str]) -> set[str]:
    """Root names of every foreign module that importing `path` loads, through our own modules and their packages too."""
    waiting, seen, foreign = [path], set(), set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        folders = current.split("/")[:-1]
        waiting += [
            file for file in ("/".join([*folders[:depth], "__init__.py"]) for depth in range(1, len(folders) + 1)) if file in sources
        ]
        for _, module in imports(sources[current], on_loading_only=True):
            if module.split(".")[0] not in OURS:
                foreign.add(module.split(".")[0])
                continue
            base = module.replace(".", "/")
            waiting += [file for file in (f"{base}.py", f"{base}/__init__.py") if file in sources]
    return foreign
