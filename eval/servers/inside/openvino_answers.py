"""Greedy texts of OpenVINO GenAI, and the drafts that it accepted. Run by a Python that has openvino_genai:

python openvino_answers.py JOB RESULT
"""

import json
import sys
from pathlib import Path

import numpy
import openvino
import openvino_genai


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.enable_prefix_caching = False
    settings = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": job["threads"]}
    draft = {}
    if job["head"] is not None:
        draft["draft_model"] = openvino_genai.draft_model(job["head"], "CPU", **settings)
    pipeline = openvino_genai.LLMPipeline(job["target"], "CPU", scheduler_config=scheduler, **settings, **draft)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = job["new_tokens"]
    config.do_sample = False
    config.stop_token_ids = set(job["ends"])
    if job["head"] is not None:
        config.num_assistant_tokens = job["depth"]
    answers = []
    for ids in job["prompts"]:
        done = pipeline.generate(openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), config)
        answer: dict[str, object] = {"tokens": [int(token) for token in done.tokens[0]]}
        if job["head"] is not None:
            metrics = done.extended_perf_metrics
            # One pass more than rounds: the prompt's.
            answer["rounds"] = len(metrics.main_model_metrics.raw_metrics.m_batch_sizes) - 1
            answer["accepted"] = int(metrics.get_num_accepted_tokens())
        answers.append(answer)
    version = f"OpenVINO GenAI {openvino_genai.__version__}"
    Path(result_file).write_text(json.dumps({"version": version, "answers": answers}))


if __name__ == "__main__":
    main(*sys.argv[1:])
