"""Static KV caches whose rows may differ in length: `KVCache` of the native decoder and of heads, `HFCache` for any
Hugging Face causal LM.

Every sequence owns a row of `capacity` slots. `set_slots` sets the slots of a step's tokens. Each layer then writes
there and reads views of the static tensors. The mask alone decides what a query sees. Sliding-window layers keep all
slots too, because a rolling window cannot undo a rejected draft.

A recurrent layer has a state instead of slots. The cache keeps the states after the newest tokens: the state after the
first p tokens of a row is in entry p mod R. A step whose first token is in slot p begins with that state, or with zeros
if p is 0. Rejected drafts, finished rows and new texts therefore need no call of their own, just as with slots.

Letters: B rows, B' rows of a step, N tokens of a step, S slots per row, E slots visible to attention, H or Hkv
key-value heads, Dh or d head width, W width of a slot, R recurrent states kept.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

Forms = tuple[tuple[int, int], tuple[int, int]]
"""Number of heads and width, of keys and of values."""


class KVCache:
    """Keys and values of all layers for a whole batch: a slot holds the keys of all heads, then their values.

    Rows of the batch have different lengths. Each pass sets the slots that its tokens go to, and masks set the slots
    that a query may see.
    """

    def __init__(
        self, *, num_layers: int, batch_size: int, capacity: int, forms: Forms, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.batch_size = batch_size
        self.capacity = capacity
        self.forms = forms
        width = sum(heads * width for heads, width in forms)
        self.store = torch.zeros(num_layers, batch_size * capacity, width, dtype=dtype, device=device)
        self.flat = list(self.store)  # per layer (B * S, W)
        self.row_starts = torch.arange(batch_size, device=device)[:, None] * capacity  # (B, 1)
        self.slots = self.row_starts  # (B' * N,) after `set_slots`: the next pass's slots in flat storage
        self.shown: list[tuple[Tensor, Tensor]] = []  # per layer: keys (B', E, Hkv, d) and values
        self.rows = slice(0, 0)
        self.extent = 0
        self.set_slots(self.row_starts, extent=capacity)

    def set_slots(self, slots: Tensor, *, extent: int, row: int | None = None) -> None:
        """Set the slots of the next pass's tokens: `slots` (B', N) of every row, or of rows `row`, `row` + 1, ...
        Attention sees the first `extent` slots."""
        rows = slice(row or 0, (row or 0) + len(slots))
        alone = self.batch_size == 1
        self.slots = slots[0] if alone else (slots + self.row_starts[rows]).flatten()
        if (rows, extent) != (self.rows, self.extent):
            self.rows = rows
            self.extent = extent
            L, _, W = self.store.shape
            visible = self.store.view(L, self.batch_size, self.capacity, W)[:, rows, :extent]
            parts = visible.split([heads * width for heads, width in self.forms], dim=3)
            keys, values = (part.unflatten(3, form) for part, form in zip(parts, self.forms, strict=True))
            self.shown = list(zip(keys, values, strict=True))

    def write(self, layer: int, states: Tensor) -> tuple[Tensor, Tensor]:
        """Write the pass's states (B' * N, W) to its slots. Return keys and values (B', E, Hkv, d) of all visible
        slots."""
        self.flat[layer].index_copy_(0, self.slots, states)
        return self.shown[layer]

    @property
    def bytes(self) -> int:
        return self.store.nbytes

    def compact(self, slots_from: Tensor, slots_to: Tensor) -> None:
        """Move the slots slots_from[b] of row b to slots_to[b], (B, P) each, in every layer. All slots are read before
        any is written."""
        sources = (slots_from + self.row_starts).flatten()
        goals = (slots_to + self.row_starts).flatten()
        self.store.index_copy_(1, goals, self.store.index_select(1, sources))


def cache_name(module: nn.Module) -> str:
    """Return the name of a module's cache argument and of the cache in its output: transformers 5.24 changed it."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


class HFCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, (B, S, H, Dh) each, in storage shared by all layers of the same shape."""

    is_compileable = True
    is_sliding = False
    keys: Tensor
    values: Tensor
    flat_keys: Tensor  # (B * S, H, Dh), the same storage
    flat_values: Tensor
    shown_keys: Tensor  # (B', H, E, Dh), a view: what attention reads
    shown_values: Tensor

    def __init__(self, cache: "HFCache") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self.cache.storage("keys", key_states)
        self.values = self.cache.storage("values", value_states)
        self.flat_keys, self.flat_values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        self.show()
        self.is_initialized = True

    def show(self) -> None:
        rows = self.cache.rows
        extent = self.cache.extent
        self.shown_keys = self.keys[rows, :extent].transpose(1, 2)
        self.shown_values = self.values[rows, :extent].transpose(1, 2)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values (B', H, N, Dh) to its slots. Return all visible keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self.cache.slots
        self.flat_keys.index_copy_(0, slots, key_states.transpose(1, 2).flatten(0, 1))
        self.flat_values.index_copy_(0, slots, value_states.transpose(1, 2).flatten(0, 1))
        return self.shown_keys, self.shown_values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of visible keys, and the slot of the first."""
        return self.cache.extent, 0

    def get_seq_length(self) -> int:
        """Return the number of visible slots. Rows differ in length, which only the device knows. Positions and masks
        are always given."""
        return self.cache.extent

    def get_max_length(self) -> int:
        return self.cache.capacity


class MixerState:
    """One layer's states of the current step's rows, with the interface that transformers' modules expect."""

    def __init__(self, cache: "HFCache") -> None:
        self.cache = cache
        self.stored: dict[tuple[str, int], Tensor] = {}  # (B * R, ..) each
        self.current: dict[tuple[str, int], Tensor] = {}  # (B', ..) each; empty before the very first step

    def recall(self) -> None:
        """Begin a step with the states after the tokens before it."""
        cache = self.cache
        for kind, stored in self.stored.items():
            states = stored[cache.state_slots[:, 0]]
            self.current[kind] = states.masked_fill_(cache.is_first.view(-1, *[1] * (states.ndim - 1)), 0)

    def keep(self, count: int) -> None:
        """Keep the states after the first `count` tokens of the step."""
        for kind, states in self.current.items():
            if kind not in self.stored:
                self.stored[kind] = states.new_zeros(self.cache.batch_size_ * self.cache.num_states, *states.shape[1:])
            self.stored[kind].index_copy_(0, self.cache.state_slots[:, count], states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the inputs that the convolution still sees (B', C, W)."""
        return self.current.get(("conv", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Add new inputs (B', C, N). Return the earlier inputs followed by the new ones."""
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size)
        seen = torch.cat([before, conv_states], dim=2)
        self.current["conv", state_idx] = seen[:, :, -conv_kernel_size:]
        return seen

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state (B', ..), which some modules write to."""
        return self.current.get(("recurrent", state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.current["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: inputs are only kept as long as the convolution sees them."""
        return False


class HFCache(Cache):
    """Keys, values and recurrent states of the target for a whole batch."""

    def __init__(
        self,
        *,
        num_layers: int,
        batch_size: int,
        capacity: int,
        num_stored: int | None = None,
        num_states: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`num_stored`: number of layers with keys, by default all. `num_states`: R, one more than the tokens of the
        longest step that may be partly undone; 0 for a model without recurrent layers."""
        self.batch_size_ = batch_size
        self.capacity = capacity
        self.num_states = num_states
        self.rows = slice(0, batch_size)
        self.extent = capacity
        self.row_starts = torch.arange(batch_size, device=device)[:, None] * capacity  # (B, 1)
        self.prompt = False
        """True if the step reads whole prompts."""
        self.marks: Tensor | None = None  # (B, S) bool: slots of an encoder's input; None without an encoder
        self.slots = self.row_starts  # (B' * N,) after `set_slots`: where the next step's keys go, in flat storage
        self.stores: dict[str, list[Tensor]] = {"keys": [], "values": []}
        self.free: dict[str, list[Tensor]] = {"keys": [], "values": []}  # layers of the first stores that are not taken
        self.state_slots = (
            self.row_starts
        )  # (B', N + 1) after `set_slots`: entries of the states before and after each token
        self.is_first = self.row_starts[:, 0] == 0  # (B',) bool after `set_slots`: the step begins a text
        self.recurrent: dict[int, MixerState] = {}
        self.num_stored = num_layers if num_stored is None else num_stored
        self.row_layers = [HFCacheLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.row_layers))

    def set_slots(self, slots: Tensor, *, extent: int, row: int | None = None, prompt: bool = False) -> None:
        """Set the slots of the next step's tokens, (B', N) for all rows or for rows `row`, `row` + 1, ..., and make the
        first `extent` slots visible. `prompt`: the tokens are a prompt, which an encoder or a recurrent layer reads at
        once."""
        self.prompt = prompt
        rows = slice(row or 0, (row or 0) + len(slots))
        self.slots = (slots + self.row_starts[rows]).flatten()
        if self.num_states:
            first = slots[:, :1]
            row_states = self.row_starts[rows] // self.capacity * self.num_states
            behind = torch.arange(slots.shape[1] + 1, device=slots.device)
            self.state_slots = row_states + (first + behind) % self.num_states
            self.is_first = first[:, 0] == 0
        if (rows, extent) != (self.rows, self.extent):
            self.rows = rows
            self.extent = extent
            for layer in self.row_layers:
                if layer.is_initialized:
                    layer.show()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write to a layer and return what it makes visible. The model's attention calls this."""
        return self.row_layers[layer_idx].update(key_states, value_states)

    def recall(self, layer_idx: int) -> MixerState:
        """Return a recurrent layer's states before the step. The layer itself calls this."""
        state = self.recurrent.setdefault(layer_idx, MixerState(self))
        state.recall()
        return state

    def compact(self, slots_from: Tensor, slots_to: Tensor) -> None:
        """Move the entries of row b from slots_from[b] to slots_to[b] in every layer; (B, P) each. All reads precede
        all writes."""
        sources = (slots_from + self.row_starts).flatten()
        goals = (slots_to + self.row_starts).flatten()
        for store in (*self.stores["keys"], *self.stores["values"]):
            flat = store.flatten(1, 2)  # (layers, B * S, H, Dh)
            flat.index_copy_(1, goals, flat.index_select(1, sources))

    @property
    def bytes(self) -> int:
        return sum(store.nbytes for store in (*self.stores["keys"], *self.stores["values"]))

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's recurrent states after one token, in all layers."""
        return sum(tensor[0].nbytes for state in self.recurrent.values() for tensor in state.stored.values())

    def storage(self, kind: str, states: Tensor) -> Tensor:
        """Return zeros (B, S, H, Dh) for one layer. The first call allocates all layers in the first layer's shape, so
        that `compact` is a few large copies. A layer of another shape gets its own tensor."""
        _, H, _, Dh = states.shape
        stores = self.stores[kind]
        free = self.free[kind]
        shape = (self.batch_size_, self.capacity, H, Dh)
        if not stores:
            stores.append(states.new_zeros(self.num_stored, *shape))
            free.extend(stores[0])
        if stores[0].shape[1:] == shape:
            return free.pop(0)
        stores.append(states.new_zeros(1, *shape))
        return stores[-1][0]
