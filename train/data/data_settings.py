"""The recipe's section `data`."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from eval.runtime.sampling_params import Temperature
from eval.servers.openai_client import check_url
from heads.core.strict_settings import Count, Seed, Settings, Share
from train.core.strict_yaml import Name
from train.data.sources import AnySource

Url = Annotated[Name, AfterValidator(check_url)]
"""The address of a server, with or without the protocol's `/v1`."""


class Server(Settings):
    """A server with OpenAI's protocol that returns token ids: a running one, vLLM or SGLang, by its `url`, or an
    `engine` that each process starts. An API key is read from the environment variable DRAFTSMITH_SERVER_KEY."""

    url: Url | None = None
    """Address of the server, such as `http://localhost:8000`."""
    engine: Literal["vllm"] | None = None
    """Engine to start, in an environment of its own: `scripts/make_engine.sh vllm` makes one for CPUs, and the
    environment variable DRAFTSMITH_VLLM_PYTHON names the Python of another."""
    model: Name | None = None
    """Name of the target on the server. Null: `target.path`."""
    in_flight: Count = 64
    """Number of concurrent prompts, over all processes."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.url is None) == (self.engine is None):
            raise ValueError("expected either `url`, the address of a server, or `engine`, one to start")
        return self


class Answers(Settings):
    """Prompts from the sources, and settings for answering them."""

    prompts: Annotated[int, Field(ge=1, le=10**8)] | None = None
    """Number of prompts to take from the sources. The sources must have that many. Null: all of them, one per
    conversation or text."""
    prompt_tokens: Count = 512
    """Maximum number of tokens of a prompt. Prompts cut from text are shortened to it. Conversations whose first prompt
    is longer are skipped."""
    new_tokens: Count = 256
    """Maximum number of tokens of an answer."""
    batch_size: Count = 8
    """Prompts answered together in one batch."""
    seed: Seed = 0
    """Seed of the sampling."""
    train_on_prompts: bool = False
    """Also use the tokens of the prompts as labels."""
    temperature: Temperature = 0.0
    """Sampling temperature of the answers; 0 is greedy."""


class Regenerate(Answers):
    """Train on the target's own answers to prompts from the sources, since a draft head has to predict the target's
    text.

    The target generates every answer of a conversation, after its own earlier answers. Answers of weight 0 stay as
    recorded. A conversation ends before a prompt of more than `prompt_tokens`. Answers are stored next to the tokenised
    data, for all heads of the target.
    """

    prompts: Annotated[int, Field(ge=1, le=10**8)] | None = None
    """Number of conversations, or prompts cut from text, to take from the sources. The sources must have that many.
    Null: all conversations, and one prompt per text."""
    share: Share = 1.0
    """Fraction of the training rows that are answers. The rest are rows of the unchanged sources."""
    server: Server | None = None
    """A server that generates the answers. Null: the runtime generates them in every process."""


class OnPolicy(Answers):
    """Train a draft model (`head.kind: draft`) on text that it generates (arXiv 2310.08461, section 4)."""

    every: Count
    """Steps between two renewals of the samples. The first samples are generated after this many steps."""
    samples: Annotated[int, Field(ge=1, le=10**6)]
    """Number of prompts answered at each renewal. The prompts are used in turn."""
    temperature: Temperature = 1.0
    """Sampling temperature of the samples; 0 is greedy."""
    share: Share = 0.5
    """Fraction of the training rows that are samples. The rest are the other data."""


class Data(Settings):
    """Training data."""

    sources: Annotated[list[AnySource], Field(min_length=1)]
    """Sources of text, each of one of the kinds below."""
    context_length: Annotated[int, Field(ge=8)] = 2048
    """Tokens per training row. Documents are packed into rows; attention does not cross documents. A longer
    conversation is cut after answers, and positions continue; a longer text is cut into separate texts. A target with
    recurrent layers gets one document per row, padded."""
    template: dict[str, bool | int | float | str] = Field(default={})
    """Arguments of the chat template, such as `{enable_thinking: false}`."""
    regenerate: Regenerate | None = None
    """Train on the target's answers. Null: train on the unchanged sources."""
    on_policy: OnPolicy | None = None
    """Train a draft model on samples that it generates during training. Null: none."""
