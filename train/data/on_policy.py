"""On-policy distillation: training on what the head itself does in decoding. No gradient flows through the decoding.

A draft model learns from text that it generates (DistillSpec, arXiv 2310.08461, section 4; GKD, arXiv 2306.13649).

Any other head learns from rounds (Draft-OPD, arXiv 2605.29343). The runtime decodes with the head. The text is the
target's own, but the head decides where each round has its root, and which of its draft tokens is the first rejected
one. In a round with the root x_a that accepted n tokens, the target verified the k-th draft token, k = 0 .. n, after
x_{a+k}. All these tokens are in the text, so a record is the text and the lengths of its rounds:

    loss of a round = sum over k = 0 .. n of w_k D(p, q_k),  both after .. x_a .. x_{a+k}

with the head's own weights w_k and divergence D. p is the distribution that verified the draft token, and q_k is what
the head would draft there now. Draft tokens behind the first rejected one are left out: whatever they are, they cannot
be accepted. The paper has reverse KL at rejected tokens, and goes on behind the first one along the draft's own path.

Other training of block heads draws the roots and goes on to the end of each block. A head that recycles its states
(EAGLE-3, MTP) already unrolls them from every token. There, and in Medusa, rounds only choose what is learnt: each
token at the one depth at which it was drafted.

After every fixed number of steps the runtime answers the next prompts. These answers are training rows until the next
renewal. They are stored in files, because a resumed run no longer has the weights that made them.
"""

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from eval.runtime.engine import Engine, EngineOptions, Request
from eval.runtime.sampling_params import Sampling
from heads.core.contract import DraftHead
from heads.core.errors import UserError
from heads.core.files import write_text
from heads.core.tree import ROOT_ONLY, parse_shape
from heads.targets.model import FrozenTarget
from train.data.corpus import Document, corpus_of
from train.data.packing import PATTERN, Mixture, Pool
from train.data.settings import OnPolicy

SEED_STRIDE = 1_000_003


class Samples:
    """The answers in one run that a draft model, or the target with the head, generates."""

    def __init__(
        self,
        base: Mixture,
        prompts: Sequence[list[int]],
        settings: OnPolicy,
        head: DraftHead,
        target: FrozenTarget,
        folder: Path,
    ) -> None:
        """`base`: the other data. Until the first samples it is all the data. `head`: a head of the shape that will be
        trained. UserError if the target has no room for an answer."""
        self.base, self.prompts, self.settings, self.folder = base, prompts, settings, folder
        self.has_rounds = head.language_model is None
        self.shape = parse_shape(f"chain:{len(head.depth_weights)}") if self.has_rounds else ROOT_ONLY
        self.most_tokens = max(map(len, prompts)) + settings.new_tokens + self.shape.nodes
        if self.most_tokens > target.context_length:
            raise UserError(
                f"data.on_policy.new_tokens: a prompt, its answer and a round need up to {self.most_tokens} positions, "
                f"{target.name} has {target.context_length}; lower it"
            )
        if self.has_rounds:
            head.check_draft(self.shape, self.most_tokens)

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
        """Generate the samples, write the tokens of every round to a file, and return the number of tokens."""
        options = EngineOptions(shape=self.shape, batch_size=self.settings.batch_size, max_length=self.most_tokens)
        if head.language_model is None:
            engine = Engine(target, head, options)
        else:
            writer = FrozenTarget(head.language_model, f"the draft of {target.name}")
            writer.eos_token_ids = target.eos_token_ids
            engine = Engine(writer, None, options)
        outputs, lines = engine.generate(self.requests(begin)), []
        for output in outputs:
            ends = np.cumsum([1, *output.emitted()])  # the prompt's pass gives the first token
            lines.append(json.dumps([part.tolist() for part in np.split(np.array(output.tokens), ends[:-1])]))
        write_text(self.file(begin), "".join(f"{line}\n" for line in lines))
        return sum(len(output.tokens) for output in outputs)

    def mixture(self, begin: int) -> Mixture:
        """Return the data of the steps from `begin` to the next renewal."""
        if begin == 0:
            return self.base
        file, settings = self.file(begin), self.settings
        if not file.is_file():
            raise UserError(
                f"{file}: missing: the answers of step {begin}, which the run was learning from; restore it, "
                "or begin anew in another output_dir"
            )
        prompts = [list(request.prompt) for request in self.requests(begin)]
        try:
            answers = [
                [[int(token) for token in tokens] for tokens in json.loads(line)]
                for line in file.read_text("utf-8").splitlines()
            ]
        except (ValueError, TypeError):
            raise UserError(
                f"{file}: expected a list of rounds of token ids a line; restore the file, or begin anew in another "
                "output_dir"
            ) from None
        if len(answers) != len(prompts):
            raise UserError(f"{file}: expected {len(prompts)} samples, found {len(answers)}; begin anew elsewhere")
        documents, depths = [], []
        for prompt, rounds in zip(prompts, answers, strict=True):
            ids = [*prompt, *chain(*rounds)]
            # No round drafts the first token of an answer.
            first = 0 if settings.train_on_prompts else len(prompt) + self.has_rounds
            documents.append(Document.of(ids, np.arange(len(ids)) >= first))
            depths += [np.zeros(len(prompt), dtype=np.int64), *(np.arange(len(tokens)) for tokens in rounds)]
        pool = Pool(
            corpus_of(documents),
            self.base.pools[0].row_length,
            packs=self.base.pools[0].packs,
            depths=np.concatenate(depths) if self.has_rounds else None,
        )
        if settings.share == 1:
            return Mixture([pool], [1.0], self.base.seed)
        weights = [count * (1 - settings.share) for count in self.base.counts]
        return Mixture([*self.base.pools, pool], [*weights, PATTERN * settings.share], self.base.seed)
