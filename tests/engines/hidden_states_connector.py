"""vLLM's connector of hidden states for its build for CPUs, on which the original's streams of CUDA do not exist."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as original


class HiddenStatesConnector(original.ExampleHiddenStatesConnector):  # type: ignore[misc] # mypy runs without vLLM
    """The original, which copies the states at once in place of in a stream. The rest is the original's code."""

    def _submit_async_write(self, pending: Any) -> None:
        blocks = torch.tensor(pending.block_ids)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = original.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        copied = SimpleNamespace(synchronize=lambda: None, query=lambda: True)
        lock = self._lock_fds.pop(pending.req_id)
        future = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_copy_events[pending.req_id], self._req_futures[pending.req_id] = copied, future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
