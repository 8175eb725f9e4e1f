"""On-policy distillation: training on text that the draft itself generates (DistillSpec, arXiv 2310.08461, section 4;
GKD, arXiv 2306.13649). No gradient flows through the generation.

After every fixed number of steps the runtime lets the draft answer the next prompts. These answers are training rows
until the next renewal. They are stored in files, because a resumed run no longer has the weights that generated them.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling_params import Sampling
from heads.core.contract import DraftHead
from heads.core.errors import UserError
from heads.core.files import write_text
from heads.targets.model import FrozenTarget
from train.data.answers import answer_documents
from train.data.corpus import corpus_of
from train.data.packing import PATTERN, Mixture, Pool
from train.data.settings import OnPolicy

SEED_STRIDE = 1_000_003


class Samples:
    """The draft's own text in one run."""

    def __init__(self, base: Mixture, prompts: Sequence[list[int]], settings: OnPolicy, folder: Path) -> None:
        """`base`: the other data. Until the first samples it is all the data."""
        self.base, self.prompts, self.settings, self.folder = base, prompts, settings, folder

    def begin(self, step: int) -> int:
        """Return the step whose weights generate the samples for step `step`; 0 if there are none yet."""
        return step - step % self.settings.every

    def file(self, begin: int) -> Path:
        return self.folder / f"step-{begin}.jsonl"

    def requests(self, begin: int) -> list[Request]:
        """Return the requests to the draft at step `begin`: the next prompts in turn, each with its own noise."""
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

    def write(self, begin: int, draft: DraftHead, target: FrozenTarget) -> int:
        """Let the draft answer, write its answers to a file, and return their number of tokens."""
        requests = self.requests(begin)
        assert draft.language_model is not None
        writer = FrozenTarget(draft.language_model, f"the draft of {target.name}")
        writer.eos_token_ids = target.eos_token_ids
        longest = max(len(request.prompt) for request in requests) + self.settings.new_tokens + 1
        outputs = Engine(writer, None, EngineOptions(batch_size=self.settings.batch_size, max_length=longest)).generate(
            requests
        )
        write_text(self.file(begin), "".join(json.dumps(output.tokens) + "\n" for output in outputs))
        return sum(len(output.tokens) for output in outputs)

    def mixture(self, begin: int) -> Mixture:
        """Return the data of the steps from `begin` to the next renewal."""
        if begin == 0:
            return self.base
        file, settings = self.file(begin), self.settings
        if not file.is_file():
            raise UserError(
                f"{file}: missing: what the draft wrote at step {begin}, which the run was learning from; restore it, "
                "or begin anew in another output_dir"
            )
        prompts = [list(request.prompt) for request in self.requests(begin)]
        try:
            answers = [[int(token) for token in json.loads(line)] for line in file.read_text("utf-8").splitlines()]
        except (ValueError, TypeError):
            raise UserError(
                f"{file}: expected a list of token ids a line; restore the file, or begin anew in another output_dir"
            ) from None
        if len(answers) != len(prompts):
            raise UserError(f"{file}: expected {len(prompts)} samples, found {len(answers)}; begin anew elsewhere")
        documents = [
            document
            for exchange in zip(prompts, answers, strict=True)
            for document in answer_documents([exchange], train_on_prompts=settings.train_on_prompts)
        ]
        pool = Pool(
            corpus_of(documents),
            self.base.pools[0].row_length,
            packs=self.base.pools[0].packs,
        )
        if settings.share == 1:
            return Mixture([pool], [1.0], self.base.seed)
        weights = [count * (1 - settings.share) for count in self.base.counts]
        return Mixture([*self.base.pools, pool], [*weights, PATTERN * settings.share], self.base.seed)
