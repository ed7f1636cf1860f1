"""The text of `--help`: what the program is for, what to type, which files each group has.

It reads folder listings and nothing else, so that it answers at once; it does not know Hydra.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.arguments import GROUPS

HEAD = """\
kvbench compares KV-cache strategies for LLM decoding on one decoder and one engine, so that only the strategy differs.
A run answers four questions: is it right, how fast, how many bytes, at what quality. It prints a table and writes one record.

Examples
  python -m harness +strategy=paged                                 one strategy against the reference, about a minute
  python -m harness +strategy=paged strategy.page_size=32           with a parameter of its own
  python -m harness +strategy=paged reference=contiguous_max        compared with another reference
  python -m harness +strategy=paged workload.batch=8 workload.prompt_tokens=512 dtype=float32
  python -m harness +strategy=paged model=gguf model.source=FILE.gguf data=text data.path=FILE.txt
  python -m harness +strategy=paged model=hf model.source=FOLDER_OR_HUB_ID data=wikitext2
  python -m harness -m '+strategy=glob(*)'                          every strategy, one after another
  python -m harness -m strategy=paged strategy.page_size=8,16,32    a sweep over a parameter
  python -m harness sweep=strategies                                a sweep with a name; stopped, it goes on where it was
  python -m harness experiment=forks_share_pages                    one of the claims, measured here
  python -m harness +strategy=mine --config-dir FOLDER              a file of your own, FOLDER/strategy/mine.yaml
  python -m harness +strategy=paged --cfg job                       show the configuration, run nothing
  python -m harness.report results/runs                             all records as one table (--markdown, --wandb PROJECT)
"""

TAIL = """\
Keys, set with key=value (text needs no quotes beyond the shell's own)
  strategy.KEY  reference.KEY     parameters of the storage; a wrong one lists those that there are
  model.source  model.bos  data.path  workload.batch  workload.prompt_tokens  workload.new_tokens
  quality.context  quality.windows  quality.chunk  measure.pairs  measure.seconds  measure.threads
  seed  backend  device  dtype  budget_bytes  results_dir  force  tracking.group

In a sweep, a key that one of the strategies does not have refuses that strategy's points, and the others run. Points that are
finished are skipped (force=true repeats them); two sweeps into one results_dir share the points; a table ends it.
Exit code: 0 all right; 1 a run failed or gave a wrong answer; 2 refused before the start, nothing written; 130 interrupted.
strategy.storage=module:Class imports that module and so runs its code: name only code that you trust.
Sweepers, launchers, shell completion: --hydra-help
"""


def manual(folders: Sequence[Path]) -> str:
    """The whole help text; `folders` are the configuration folders to list."""
    lines = ["Groups, chosen with group=file (a + before it is fine)"]
    width = max(len(group) for group in GROUPS)
    for group in GROUPS:
        listed = "any strategy; what the speed is compared with" if group == "reference" else ", ".join(_options(folders, group))
        lines.append(f"  {group:<{width}}  {listed}")
    return "\n".join([HEAD, *lines, "", TAIL])


def _options(folders: Sequence[Path], group: str) -> list[str]:
    return sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})
