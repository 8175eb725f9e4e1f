"""Greedy texts of mlx-lm, and the tokens that its draft model gave. Run by a Python that has mlx_lm:

python mlx_answers.py JOB RESULT
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.utils import load_model


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    target, _ = load_model(Path(job["target"]))
    target.set_dtype(mx.float32)
    draft = None
    if job["head"] is not None:
        draft, _ = load_model(Path(job["head"]))
        draft.set_dtype(mx.float32)
    answers = []
    for ids in job["prompts"]:
        prompt = mx.array(ids)
        if draft is None:
            steps = ((token, False) for token, _ in generate_step(prompt, target, max_tokens=job["new_tokens"]))
        else:
            drafted = speculative_generate_step(
                prompt, target, draft, num_draft_tokens=job["depth"], max_tokens=job["new_tokens"]
            )
            steps = ((token, by_draft) for token, _, by_draft in drafted)
        tokens = []
        accepted = 0
        for token, by_draft in steps:
            tokens.append(int(token))
            accepted += bool(by_draft)
            if tokens[-1] in job["ends"]:
                break
        answers.append({"tokens": tokens, "accepted": accepted} if draft is not None else {"tokens": tokens})
    Path(result_file).write_text(json.dumps({"version": f"mlx-lm {version('mlx-lm')}", "answers": answers}))


if __name__ == "__main__":
    main(*sys.argv[1:])
