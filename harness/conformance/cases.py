"""Public bug reports that the kit, or another part of the project, answers for: what went wrong, where it was reported, who tests it.

Data only. A case that the kit tests names no owner here: its promises carry its id, and `answered_by` looks them up.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.conformance.promise import promises


@dataclass(frozen=True)
class Case:
    """One report. `owner` says who tests it beside, or instead of, the kit: empty for the kit alone."""

    source: str
    what: str
    owner: str = ""


SCHEDULER = "scheduler: tests/harness/engine"
ENGINE = "engine: tests/harness/engine"
MODEL = "model loading: tests/harness/model"
KERNELS = "kernels: tests/kernels"
TRITON = "Triton kernels: tests/kernels/gpu and tests/gpu"
CLI = "command line: tests/harness"
MEASURE = "measurement: tests/harness/measure"
BENCHMARKS = "benchmarks: tests/benchmarks"

CASES: dict[str, Case] = {
    "B01": Case("huggingface/transformers#37574", "a window store shifts one step before it is full"),
    "B02": Case("sgl-project/sglang#32087", "decode sees one key fewer than the window allows"),
    "B04": Case("pytorch/pytorch#160861", "slots past the length in a partial page are attended"),
    "B05": Case("EricLBuehler/mistral.rs#552", "a prompt that fills its pages leaves no place for the next token"),
    "B06": Case("EricLBuehler/mistral.rs#2094", "the paged decode kernel is never given the window"),
    "B08": Case("pytorch/executorch#20346", "a chunk longer than the window overwrites keys it still needs"),
    "B11": Case("pytorch/executorch#21857", "one mask for a whole chunk shows its rows too much"),
    "P01": Case("unslothai/unsloth#3795", "prompts of a batch share one row of positions"),
    "P03": Case("huggingface/transformers#38156", "the length is read from a layer that only keeps a window"),
    "P05": Case("huggingface/transformers#35350", "old keys are renumbered after eviction, new ones are not"),
    "P07": Case("ggml-org/llama.cpp#5652", "old keys are moved and coded again, or cannot be"),
    "P08": Case("mybigday/llama.rn#396", "a rollback goes deeper than the window still holds"),
    "P09": Case("huggingface/transformers#4130", "an earlier padding mask is forgotten in later calls"),
    "L01": Case("vllm-project/vllm#42494", "a reused table row still names its previous owner's pages"),
    "L03": Case("huggingface/transformers#48809", "a reset empties the rows and keeps the length"),
    "L04": Case("ml-explore/mlx-lm#965", "one conversation's content appears in another's answer"),
    "L05": Case("openvinotoolkit/openvino.genai#3722", "a prefix is found by its hash, its tokens are not compared"),
    "L08": Case("huggingface/text-generation-inference#2489", "prefix pages are published before they are written"),
    "L10": Case("vllm-project/vllm#43810", "a padding slot of -1 writes into the last row of the pool", KERNELS),
    "L12": Case("ovg-project/kvcached#446", "the third identical request answers differently when prefixes and windows meet"),
    "L13": Case("huggingface/transformers#45943", "a second call finds the first one's requests; settings stay changed", ENGINE),
    "L14": Case("vllm-project/vllm#3239", "a prompt that is held completely leaves nothing to run"),
    "R01": Case("huggingface/transformers#47433", "cutting to nothing keeps all, cutting too much keeps a token"),
    "R02": Case("huggingface/transformers#34232", "values are rebuilt from keys when caches are joined"),
    "R04": Case("huggingface/transformers#46612", "a beam reorder is silently skipped"),
    "R06": Case("Blaizzy/mlx-vlm#1155", "rows that accept different draft lengths all move by the longest"),
    "R07": Case("ggml-org/llama.cpp#3802", "beams write over each other after their common prefix"),
    "R09": Case("huggingface/transformers#30312", "a rollback replaces a preallocated buffer by a shorter one"),
    "Q01": Case("rajveer43/VeloxQuant-MLX#162", "tokens fed one by one are never really coded"),
    "Q03": Case("InternLM/lmdeploy#4849", "dead lanes stretch the range of a group to include zero"),
    "Q05": Case("vllm-project/vllm#49716", "scales of padded pages are looked up as if pages were packed"),
    "Q06": Case("sgl-project/sglang#18882", "scales never reach the read kernel"),
    "Q07": Case("ggml-org/llama.cpp#4425", "head_dim is not a multiple of the group"),
    "Q09": Case("huggingface/transformers#35185", "a prompt is coded in one shot, residual or not"),
    "Q11": Case("ikawrakow/ik_llama.cpp#1592", "keys are used as values in some layers"),
    "Q12": Case(
        "ahb-sjsu/turboquant-pro#98", "reconstruction error says nothing about attention", MEASURE + " (KL and top-1 are the gate)"
    ),
    "Q13": Case("SqueezeAILab/KVQuant#2", "a clamped zero point loses channels far from zero"),
    "A01": Case("vllm-project/vllm#35541", "a request that can never fit waits and blocks the rest", SCHEDULER),
    "A02": Case("vllm-project/vllm#42571", "one page is freed twice and then owned twice"),
    "A04": Case("sgl-project/sglang#6888", "rolled back drafts leak pages"),
    "A07": Case("vllm-project/vllm#4764", "an evicted page is still found as a prefix"),
    "A09": Case("vllm-project/vllm#16832", "a preempted request answers less or otherwise", SCHEDULER),
    "A10": Case("vllm-project/vllm-ascend#16662", "a cancel at the wrong moment leaks pages"),
    "N01": Case("vllm-project/vllm#936", "NaN in unwritten slots reaches the output"),
    "N03": Case("vllm-project/vllm#4405", "a tile that a window hides completely gives NaN"),
    "N05": Case("huggingface/kernels-community#681", "an all-zero group divides by its scale of zero"),
    "N06": Case("ROCm/hip-ep#120", "scores overflow in half precision before they are scaled"),
    "N08": Case("NVIDIA/kvpress#264", "nothing is kept of a short context"),
    "X01": Case("vllm-project/vllm#47671", "offsets in a large pool overflow 32 bits", KERNELS),
    "X03": Case("PSAL-POSTECH/ONNXim#33", "query heads read the wrong KV head"),
    "X05": Case("sgl-project/sglang#1281", "head_dim is not a power of two, or not the expected one"),
    "X06": Case("huggingface/text-generation-inference#949", "a layout is right for one page size only"),
    "X08": Case("flagos-ai/FlagGems#5235", "rows are addressed by a stride that is taken for granted"),
    "D01": Case("huggingface/transformers#30670", "an answer depends on the other prompts of the batch"),
    "D02": Case("sgl-project/sglang-jax#20", "slices of a batch start where the kernel does not expect them"),
    "D04": Case("pytorch/pytorch#182593", "an answer depends on where its pages lie"),
    "D05": Case("vllm-project/vllm#9567", "greedy output changes with the batch size"),
    "D08": Case("huggingface/transformers#48947", "the first call is exact and the next on the same cache is not"),
    "C01": Case("LMCache/LMCache#688", "head_dim is guessed from the hidden size", MODEL),
    "C02": Case("hahnyuan/LLM-Viewer#12", "bytes are counted with query heads"),
    "C04": Case("NVIDIA/kvpress#225", "compression is simulated, or costs more than it saves"),
    "C07": Case("ggml-org/llama.cpp#23652", "a shared capacity is promised to each sequence"),
    "C08": Case("huggingface/transformers#47731", "a buffer outlives its run and inflates the next"),
    "G01": Case("hydra-ecosystem/hydra#2888", "a sweep with a key that only some members have", CLI),
    "G02": Case("hydra-ecosystem/hydra#1577", "values with = and commas on the command line", CLI),
    "G03": Case("hydra-ecosystem/hydra#2414", "results land in the folder of launch", CLI),
    "G05": Case("wandb/wandb#2877", "a second run in one process joins the first", CLI),
    "G07": Case("wandb/wandb#8114", "an offline run that dies loses its summary", CLI),
    "G09": Case("wandb/wandb#1427", "a sweep agent passes arguments in its own style", CLI),
    "G10": Case("EleutherAI/lm-evaluation-harness#3171", "old data set names fail late and unclearly", CLI),
    "G12": Case("huggingface/transformers#31766", "GGUF keys are unpermuted as if they had query heads", MODEL),
    "M01": Case("huggingface/transformers#34138", "perplexity is a mean of window means", MEASURE),
    "M03": Case("huggingface/transformers#40524", "the start token is in the first window only", MEASURE),
    "M04": Case("ml-explore/mlx-lm#1855", "padding is scored", MEASURE),
    "M06": Case("EleutherAI/lm-evaluation-harness#1586", "contexts start with the wrong special token", MEASURE),
    "M07": Case("EleutherAI/lm-evaluation-harness#1105", "quality is measured without the cache", MEASURE),
    "M08": Case("EleutherAI/lm-evaluation-harness#2301", "word, byte and token perplexity are mixed up", MEASURE),
    "M09": Case("ray-project/llmperf#45", "steps or chunks are counted as tokens", MEASURE),
    "M10": Case("RunanywhereAI/runanywhere-sdks#662", "the prefill is inside the decode rate", MEASURE),
    "M12": Case("TristanBilot/mlx-benchmark#21", "the clock stops before the device does", MEASURE),
    "M14": Case("ionelmc/pytest-benchmark#222", "a timed target grows from round to round", BENCHMARKS),
    "M15": Case("namecheap/fast_mail_parser#128", "one threshold on a noisy machine fails the same commit", BENCHMARKS),
    "T01": Case("triton-lang/triton#11153", "the interpreter is right and the compiled kernel is not", TRITON),
    "T02": Case("triton-lang/triton#5895", "float32 products are silently made in TF32", TRITON),
    "T03": Case("triton-lang/triton#6547", "autotuning applies an update many times", TRITON),
    "T05": Case("triton-lang/triton#737", "a masked load has no fill value", TRITON),
    "T08": Case("triton-lang/triton#8259", "a pipelined loop loads before it has stored", TRITON),
}


def answered_by(case: str) -> list[str]:
    """The promises of the kit that carry this id."""
    return [one.name for one in promises() if case in one.cases]
