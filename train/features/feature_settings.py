"""A recipe's `features`: one section of settings for each place where the target can run."""

from typing import Annotated, Literal

from pydantic import Field

from heads.core.strict_settings import Settings
from train.core.strict_yaml import NamedPlace
from train.data.data_settings import Url


class ProcessFeatures(Settings):
    """Every process of the launch holds the whole target."""

    kind: Literal["process"]
    """Each process computes the features of its own rows."""


class ShardedFeatures(Settings):
    """The processes of the launch share the target's decoder layers."""

    kind: Literal["sharded"]
    """Each process holds its shard of every layer. All processes gather a layer while it computes (FSDP)."""


class VllmFeatures(Settings):
    """A vLLM server with `extract_hidden_states` computes the features. train/README.md has its command."""

    kind: Literal["vllm"]
    """The processes of the launch hold the target's embedding, final norm and output head."""
    url: Url
    """Address of the server, such as `http://localhost:8000`. Its storage folder has the same path on this machine."""
    in_flight: Annotated[int, Field(ge=1, le=4096)] = 32
    """Maximum number of documents that each process requests at a time, ahead of its steps."""


class CacheFeatures(Settings):
    """The features are read from a folder that `scripts/cache_features.py` has filled."""

    kind: Literal["cache"]
    """The processes of the launch hold the target's embedding, final norm and output head."""
    folder: NamedPlace
    """Path of the folder."""
    dtype: Literal["fp8", "bfloat16", "float32"] = "fp8"
    """Dtype of the stored features. `fp8`: e4m3, with a scale for each token and layer."""


AnyFeatures = Annotated[ProcessFeatures | ShardedFeatures | VllmFeatures | CacheFeatures, Field(discriminator="kind")]
