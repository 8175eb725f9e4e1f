"""On-policy distillation: a draft model is trained on text that it generates itself (DistillSpec, arXiv 2310.08461,
section 4; GKD, arXiv 2306.13649). No gradient flows through the decoding.

After every fixed number of steps the draft answers the next prompts. These answers are training rows until the next
renewal. They are stored in files, because a resumed run no longer has the weights that generated them.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling_params import Sampling
from heads.core.contract import DraftHead
from heads.core.errors import UserError
from heads.core.files import write_text
from heads.targets.frozen_target import FrozenTarget, Opening
from train.data.corpus import Document, corpus_of
from train.data.data_settings import OnPolicy
from train.data.packing import PATTERN, Mixture, Pool

SEED_STRIDE = 1_000_003


class Samples:
    """The answers that a draft model generates in one run."""

    def __init__(
        self, base: Mixture, prompts: Sequence[list[int]], settings: OnPolicy, target: FrozenTarget, folder: Path
    ) -> None:
        """`base`: the other data. Until the first samples it is all the data. UserError if the target has no room for
        an answer."""
        self.base, self.prompts, self.settings, self.folder = base, prompts, settings, folder
        self.max_length = max(map(len, prompts)) + settings.new_tokens + 1
        if self.max_length > target.context_length:
            raise UserError(
                f"data.on_policy.new_tokens: a prompt and its answer need up to {self.max_length} positions, "
                f"{target.name} has {target.context_length}; lower it"
            )

    def begin(self, step: int) -> int:
        """Return the step whose weights generate the samples for step `step`; 0 if there are none yet."""
        return step - step % self.settings.every

    def file(self, begin: int) -> Path:
        return self.folder / f"step-{begin}.jsonl"

    def requests(self, begin: int) -> list[Request]:
        """Return the requests at step `begin`: the next prompts in turn, each with its own noise."""
        settings, renewal = self.settings, begin // self.settings.every
        first = (renewal - 1) * settings.samples
        return [
            Request(
                self.prompts[n % len(self.prompts)],
                settings.new_tokens,
                Sampling(temperature=settings.temperature, seed=settings.seed + SEED_STRIDE * renewal + n),
            )
            for n in range(first, first + settings.samples)
        ]

    def write(self, begin: int, head: DraftHead, target: FrozenTarget) -> int:
        """Generate the samples with a draft model, write their tokens to a file, and return the number of tokens."""
        assert head.language_model is not None
        ends = Opening(eos_token_ids=target.eos_token_ids)
        draft = FrozenTarget(head.language_model, f"the draft of {target.name}", opening=ends)
        options = EngineOptions(batch_size=self.settings.batch_size, max_length=self.max_length)
        samples = [output.tokens for output in Engine(draft, None, options).generate(self.requests(begin))]
        write_text(self.file(begin), "".join(f"{json.dumps(tokens)}\n" for tokens in samples))
        return sum(map(len, samples))

    def read(self, begin: int) -> list[list[int]]:
        """Return the samples of the steps from `begin` to the next renewal; there are none before the first one."""
        if begin == 0:
            return []
        file, number = self.file(begin), len(self.requests(begin))
        try:
            samples: list[list[int]] = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        except (OSError, ValueError):
            samples = []
        if len(samples) != number:
            raise UserError(
                f"{file}: expected the {number} samples of step {begin}, which the run was learning from; "
                "restore the file, or begin anew in another output_dir"
            )
        return samples

    def mixture(self, begin: int, samples: list[list[int]]) -> Mixture:
        """Return the data of the steps from `begin` to the next renewal, with their samples."""
        if begin == 0:
            return self.base
        settings, documents = self.settings, []
        for request, sample in zip(self.requests(begin), samples, strict=True):
            ids = [*request.prompt, *sample]
            first_label = 0 if settings.train_on_prompts else len(request.prompt)
            documents.append(Document.of(ids, np.arange(len(ids)) >= first_label))
        pool = Pool(corpus_of(documents), self.base.row_length, packs=self.base.pools[0].packs)
        if settings.share == 1:
            return Mixture([pool], [1.0], self.base.seed)
        weights = [count * (1 - settings.share) for count in self.base.counts]
        return Mixture([*self.base.pools, pool], [*weights, PATTERN * settings.share], self.base.seed)
