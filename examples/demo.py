"""The main job: a batch of prompts that begin alike, through one engine. `make demo` runs it.

Eight prompts share a preamble, and four are computed at a time. The first four find nothing in the prefix cache; the
others start as earlier ones finish, and find the preamble's KV blocks there.
"""

import time

from octavo import LLM, SamplingParams

PREAMBLE = (
    "<|im_start|>system\n"
    "You are a guide for curious travellers. Begin with the most important fact about the place, go on with one "
    "surprising detail that few visitors know, and end with a piece of practical advice about the best season, the "
    "best food, or the best way to get around. Do not exaggerate, and keep every sentence easy to read aloud."
    "<|im_end|>\n<|im_start|>user\n"
)
"""In the chat format of the default model."""
PLACES = ("Paris", "the Nile", "Mount Fuji", "Venice", "the Amazon", "Iceland", "Istanbul", "the Sahara")


def main() -> None:
    """Generate, show, and sum up in one line."""
    questions = [f"Tell me about {place}." for place in PLACES]
    prompts = [f"{PREAMBLE}{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    with LLM(model="smollm2", enable_prefix_caching=True, max_num_seqs=4, kv_cache_memory="64MiB") as llm:
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        metrics = llm.get_metrics()
    print(f"All prompts begin with:\n{PREAMBLE}")
    for question, output in zip(questions, outputs, strict=True):
        print(
            f"--- {question}  ({output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached)"
        )
        print(output.outputs[0].text.strip(), "\n")
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    hit_rate = metrics["prefix_cache_hits"] / metrics["prefix_cache_queries"]
    peak, total = metrics["kv_blocks_peak_in_use"], metrics["kv_blocks_total"]
    print(
        f"{generated / seconds:.1f} tokens/s | prefix-cache hit rate {hit_rate:.0%} | peak KV usage {peak} of {total} "
        f"blocks ({peak / total:.0%}) | preemptions {metrics['num_preemptions']}"
    )


if __name__ == "__main__":
    main()
