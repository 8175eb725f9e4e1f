"""A server of llama.cpp. Run by a Python that has xllamacpp: python llamacpp_server.py JOB

It prints its address, and ends when its standard input ends: so it never outlives the process that started it.
"""

import json
import os
import sys
from pathlib import Path

import xllamacpp


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    params = xllamacpp.CommonParams()
    params.model.path = job["target"]
    params.n_ctx = job["context"]
    params.n_parallel = 1
    params.endpoint_metrics = True
    cache = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{job['cache'].upper()}")
    params.cache_type_k = params.cache_type_v = cache
    if job["cache"] == "f32":  # its kernel computes in 16 bits
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    draft = params.speculative.draft
    sets = [params.cpuparams, params.cpuparams_batch]
    if job["head"] is not None:
        name = f"COMMON_SPECULATIVE_TYPE_DRAFT_{job['method'].upper()}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
        draft.mparams.path = job["head"]
        draft.n_max = job["depth"]
        draft.cache_type_k = draft.cache_type_v = cache
        sets += [draft.cpuparams, draft.cpuparams_batch]
    for threads in sets:
        threads.n_threads = job["threads"]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
