"""`python -m harness.survey MODEL`: quality and bytes of many strategies at once, all in lock-step with one reference.

It times nothing. Every strategy reads the same forced text through its own cache beside the reference, so that the reference
is computed once for all of them; what a single run's `quality` phase reports, this reports for each.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.capacity import largest_batch
from harness.catalogue import strategy_mapping, strategy_names
from harness.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from harness.build import StrategySettings
    from harness.measure.quality import Protocol
    from harness.sides import Contender

MIB = 1 << 20
COLUMNS = ("strategy", "perplexity", "against the reference", "KL, nats", "top-1, %", "bytes a token", "largest batch", "heads")


@dataclass(frozen=True)
class Question:
    """What is asked of every strategy."""

    protocol: Protocol
    length: int
    budget_bytes: int


def survey(sides: list[Contender], reference: Contender, tokens: list[int], question: Question, console: Console) -> list[dict[str, Any]]:
    """One row for each side, in their order. All sides and the reference are stepped together, window by window."""
    from harness.measure.quality import Scores, summary
    from harness.measure.reading import Reads, Side, reading
    from harness.progress import bar

    protocol = question.protocol
    windows = protocol.cut(tokens)
    scores, reads = [Scores() for _ in sides], [Reads() for _ in sides]
    steps = len(windows) * (len(protocol.spans) + 1)
    with bar(console, f"{len(sides)} strategies in lock-step") as progress:
        done = 0
        for window in windows:
            with ExitStack() as stack:
                theirs = stack.enter_context(reading(Side(reference.decoder, reference.cache()), window))
                ours = [stack.enter_context(reading(Side(side.decoder, side.cache()), window)) for side in sides]
                for reader, read in zip(ours, reads, strict=True):
                    reader.reads = read
                for reader in (theirs, *ours):
                    reader.feed(0, protocol.half)
                progress(done := done + 1, steps)
                for first, stop in protocol.spans:
                    expected = theirs.read(first, stop)  # [stop - first, V]
                    for reader, score in zip(ours, scores, strict=True):
                        score.add(reader.read(first, stop), expected, window[first + 1 : stop + 1], first + 1)
                    progress(done := done + 1, steps)
    found = zip(sides, scores, reads, strict=True)
    return [_row(side, summary(score, None, read, None, protocol, len(windows)).as_dict(), question) for side, score, read in found]


def same_rows(side: Contender) -> tuple[Any, ...]:
    """What decides the answers: which rows a query sees and what it reads of them. Where they lie does not."""
    cache = side.unbounded_cache()
    masks = tuple(cache.mask(layer) for layer in range(len(cache.geometry.layers)))
    aged = tuple(cache.aged(position) for position in range(cache.geometry.context))
    return cache.codec_k.name, cache.codec_v.name, masks, aged, side.model.architecture.kv_heads, side.model.heads_label


def survey_shared(
    sides: list[Contender], reference: Contender, tokens: list[int], question: Question, console: Console
) -> list[dict[str, Any]]:
    """`survey` with one strategy of each set that stores and reads the same rows; the others' quality is that one's, and says so."""
    leaders: dict[tuple[Any, ...], Contender] = {}
    for side in sides:
        leaders.setdefault(same_rows(side), side)
    measured = survey(list(leaders.values()), reference, tokens, question, console)
    quality = {key: row["quality"] for key, row in zip(leaders, measured, strict=True)}
    found = []
    for side in sides:
        key = same_rows(side)
        leader = leaders[key]
        found.append(_row(side, quality[key], question, None if leader is side else leader.settings.name))
    return found


def _row(side: Contender, quality: dict[str, Any], question: Question, measured_as: str | None = None) -> dict[str, Any]:
    cache = side.unbounded_cache()
    return {
        "strategy": side.settings.name,
        "measured_as": measured_as,
        "heads": side.model.heads_label,
        "kv_heads": side.model.architecture.kv_heads,
        "kv_bytes_per_token": cache.bytes_per_token(),
        "largest_batch": largest_batch(lambda lengths: cache.bytes_for(lengths), question.length, question.budget_bytes),
        "quality": quality,
    }


def markdown(rows: list[dict[str, Any]], refused: dict[str, str], question: Question) -> str:
    """The rows as a Markdown table, and why the others are missing."""
    p = question.protocol
    lines = [
        f"{p.windows} windows of {p.context} tokens, second half scored, fed {p.chunk} tokens a step, "
        f"{'with' if p.bos_id is not None else 'no'} BOS; "
        f"largest batch of {question.length}-token sequences in {question.budget_bytes // MIB} MiB.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * (len(COLUMNS) - 2) + "---|",
    ]
    for row in rows:
        q = row["quality"]
        batch = "no limit" if row["largest_batch"] is None else f"{row['largest_batch']:,}"
        change = (q["perplexity"] / q["reference_perplexity"] - 1) * 100
        name = row["strategy"] if row["measured_as"] is None else f"{row['strategy']} (as {row['measured_as']})"
        cells = (
            *(name, f"{q['perplexity']:.4f} ± {q['perplexity_error']:.2f}", f"{change:+.2f} %", f"{q['kl_mean']:.2e}"),
            *(f"{q['top1_agreement'] * 100:.2f}", f"{row['kv_bytes_per_token']:,.0f}", batch, f"{row['kv_heads']}, {row['heads']}"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"\n{name}: {why}" for name, why in refused.items())]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 the table was made, 2 refused."""
    from rich.console import Console

    options = _parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        rows, refused, question, about = _asked(options, console)
    except UserError as error:
        print(f"kvbench: {error}", file=sys.stderr)
        return 2
    table = markdown(rows, refused, question)
    print(table)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(about | {"rows": rows, "refused": refused}, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".md").write_text(table, encoding="utf-8")
    return 0


def _asked(options: argparse.Namespace, console: Console) -> tuple[list[dict[str, Any]], dict[str, str], Question, dict[str, Any]]:
    from harness.build import make_ops, pick_device, strategy_settings
    from harness.measure.datasets import load_text
    from harness.measure.quality import Protocol
    from harness.model.load import load_model
    from harness.schema import BuiltinData, TextData
    from harness.sides import Contender

    device = pick_device("auto")
    text = load_text(BuiltinData("builtin", "builtin") if options.text is None else TextData("text", None, options.text))
    models: dict[Any, Any] = {}

    def contender(settings: StrategySettings) -> Contender:
        ops = make_ops(options.backend, device)
        if settings.heads not in models:
            models[settings.heads] = load_model(options.model, options.dtype, device, ops, settings.heads)
        model = models[settings.heads]
        found = Contender(settings, model, type(model.decoder)(model.decoder.architecture, model.decoder.weights, ops), ops, None)
        found.cache()
        return found

    wanted = options.strategies.split(",") if options.strategies else strategy_names(options.config_dir)
    reference = contender(strategy_settings("reference", strategy_mapping(options.reference, options.config_dir)))
    sides, refused = [], {}
    for name in wanted:
        settings = strategy_settings("strategy", strategy_mapping(name, options.config_dir))
        try:
            sides.append(contender(settings))
        except UserError as error:
            refused[name] = str(error)
    tokenizer, longest = reference.model.tokenizer, reference.model.geometry.context
    if max(options.length, options.context) > longest:
        raise UserError(f"--length {options.length} and --context {options.context} must not pass the model's context of {longest} tokens")
    if options.bos and tokenizer.bos_id is None:
        raise UserError(f"--bos, but the tokenizer of {options.model} has no BOS token: leave it out")
    protocol = Protocol(options.context, options.windows, options.chunk, tokenizer.bos_id if options.bos else None)
    question = Question(protocol, options.length, options.budget_mib * MIB)
    tokens = tokenizer.encode(text.text, False)
    about = {
        "model": reference.model.name,
        "sha256": reference.model.sha256,
        "dtype": reference.model.dtype,
        "text": text.name,
        "text_sha256": text.sha256,
        "reference": options.reference,
        "backend": reference.ops.name,
    }
    ask = survey if options.each else survey_shared
    return ask(sides, reference, tokens, question, console), refused, question, about


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.survey", description="Quality and bytes of many strategies, in lock-step.")
    parser.add_argument("model", help="package:NAME, a .gguf file, a Hugging Face folder or hub id, llama2c:PATH")
    parser.add_argument("--text", help="a UTF-8 text file (default: the text that ships with Python)")
    parser.add_argument("--strategies", default="", help="names with commas (default: all in conf/strategy)")
    parser.add_argument("--reference", default="contiguous", help="what they are compared with (default: contiguous)")
    parser.add_argument("--context", type=int, default=2048, help="tokens in a window (default: 2048)")
    parser.add_argument("--windows", type=int, default=4, help="windows of the text (default: 4)")
    parser.add_argument("--chunk", type=int, default=16, help="tokens fed a step while scoring (default: 16)")
    parser.add_argument("--bos", action="store_true", help="windows begin with the model's BOS token")
    parser.add_argument("--each", action="store_true", help="read the text with every strategy, also those that read the same rows")
    parser.add_argument("--length", type=int, default=1024, help="tokens of the sequences that the budget is filled with (default: 1024)")
    parser.add_argument("--budget-mib", type=int, default=256, help="KV budget for the largest batch, in MiB (default: 256)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 or float64 (default: auto)")
    parser.add_argument("--backend", default="auto", help="kernels: auto, reference, cpu or triton (default: auto)")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file, and the table beside it as .md")
    parser.add_argument("--config-dir", type=Path, action="append", default=[], help="a folder with strategy/NAME.yaml files of your own")
    return parser


if __name__ == "__main__":
    sys.exit(main())
