"""A static key/value cache whose rows stand at different lengths, in the form that any Hugging Face causal LM takes.

Every sequence owns a row of `capacity` slots. A step says which slots its tokens go to (`aim`); each layer then
writes there and hands the model views of the static tensors. What a query may see is the mask's business: sliding
layers keep all slots too, because a rolling window cannot take back a rejected draft.

A recurrent layer has one state where others have slots. It keeps the states behind the newest tokens, that behind the
first p tokens of a row in place p mod R. A step whose first token is in slot p begins with that one, and before a
text's first token with zeros: so rejected drafts, finished rows and new texts need no word, just as with slots.

Letters: B rows, N tokens of a step, S slots a row, E slots shown to attention, H key-value heads, Dh head width, R
recurrent states kept.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin


def cache_name(module: nn.Module) -> str:
    """The name under which a module takes a cache and gives it back: transformers 5.24 changed it."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


class HFCacheLayer(CacheLayerMixin):
    """One layer's keys and values, (B, S, H, Dh) each, in storage that all layers of the same form share."""

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
        """Take storage of the form that the model's first keys and values show."""
        self.keys = self.cache.storage("keys", key_states)
        self.values = self.cache.storage("values", value_states)
        self.flat_keys, self.flat_values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        self.show()
        self.is_initialized = True

    def show(self) -> None:
        """Renew the views after the rows or the extent changed."""
        rows, extent = self.cache.rows, self.cache.extent
        self.shown_keys = self.keys[rows, :extent].transpose(1, 2)
        self.shown_values = self.values[rows, :extent].transpose(1, 2)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values (B', H, N, Dh) to the slots aimed at; return all that is shown."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self.cache.slots
        self.flat_keys.index_copy_(0, slots, key_states.transpose(1, 2).flatten(0, 1))
        self.flat_values.index_copy_(0, slots, value_states.transpose(1, 2).flatten(0, 1))
        return self.shown_keys, self.shown_values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys shown, and the first one's slot."""
        return self.cache.extent, 0

    def get_seq_length(self) -> int:
        """Slots shown. Rows differ in length and the device alone knows it; positions and masks are always given."""
        return self.cache.extent

    def get_max_length(self) -> int:
        """Slots a row."""
        return self.cache.capacity


class RecurrentState:
    """One layer's states of the current step's rows, asked for and renewed as transformers' modules do it."""

    def __init__(self, cache: "HFCache") -> None:
        self.cache = cache
        self.kept: dict[tuple[str, int], Tensor] = {}  # (B * R, ..) each
        self.current: dict[tuple[str, int], Tensor] = {}  # (B', ..) each; none before the first step of all

    def recall(self) -> None:
        """Begin a step with the states behind the tokens before it."""
        cache = self.cache
        for kind, kept in self.kept.items():
            states = kept[cache.state_slots[:, 0]]
            self.current[kind] = states.masked_fill_(cache.is_first.view(-1, *[1] * (states.ndim - 1)), 0)

    def keep(self, count: int) -> None:
        """Keep the states behind the first `count` tokens of the step."""
        for kind, states in self.current.items():
            if kind not in self.kept:
                self.kept[kind] = states.new_zeros(self.cache.batch_size_ * self.cache.num_states, *states.shape[1:])
            self.kept[kind].index_copy_(0, self.cache.state_slots[:, count], states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The inputs that the convolution still sees (B', C, W)."""
        return self.current.get(("conv", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Take new inputs (B', C, N). Return them behind those before them."""
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size)
        seen = torch.cat([before, conv_states], dim=2)
        self.current["conv", state_idx] = seen[:, :, -conv_kernel_size:]
        return seen

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state (B', ..), which some modules write to."""
        return self.current.get(("recurrent", state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Take the state behind the newest token."""
        self.current["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: inputs are no longer kept than they are seen."""
        return False


class HFCache(Cache):
    """The target's keys, values and recurrent states of a whole batch."""

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
        """`num_stored`: layers with keys, by default all. `num_states`: R, one more than the tokens of any step that
        may be taken back in part; 0 for a model without recurrent layers."""
        self.batch_size_, self.capacity, self.num_states = batch_size, capacity, num_states
        self.rows, self.extent = slice(0, batch_size), capacity
        self.row_starts = torch.arange(batch_size, device=device)[:, None] * capacity  # (B, 1)
        self.prompt = False
        """True if the step aimed at reads prompts whole."""
        self.marks: Tensor | None = None  # (B, S) bool: slots of an encoder's input; None without an encoder
        self.slots = self.row_starts  # (B' * N,) once aimed: where the next step's keys go, in flat storage
        self.stores: dict[str, list[Tensor]] = {"keys": [], "values": []}
        self.free: dict[str, list[Tensor]] = {"keys": [], "values": []}  # parts of the first stores
        self.state_slots = self.row_starts  # (B', N + 1) once aimed: where the states around the step's tokens are kept
        self.is_first = self.row_starts[:, 0] == 0  # (B',) bool once aimed: the step begins a text
        self.recurrent: dict[int, RecurrentState] = {}
        self.num_stored = num_layers if num_stored is None else num_stored
        self.row_layers = [HFCacheLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.row_layers))

    def aim(self, slots: Tensor, *, extent: int, row: int | None = None, prompt: bool = False) -> None:
        """Send the next step's tokens to `slots` (B, N) of every row, or (1, N) of one row; show the first `extent`
        slots. `prompt`: the tokens are those of a prompt, which an encoder or a recurrent layer reads at once."""
        self.prompt = prompt
        rows = slice(0, self.batch_size_) if row is None else slice(row, row + 1)
        self.slots = (slots + self.row_starts[rows]).flatten()
        if self.num_states:
            first, row_states = slots[:, :1], self.row_starts[rows] // self.capacity * self.num_states
            behind = torch.arange(slots.shape[1] + 1, device=slots.device)
            self.state_slots, self.is_first = row_states + (first + behind) % self.num_states, first[:, 0] == 0
        if (rows, extent) != (self.rows, self.extent):
            self.rows, self.extent = rows, extent
            for layer in self.row_layers:
                if layer.is_initialized:
                    layer.show()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write to a layer and show it, called by the model's attention."""
        return self.row_layers[layer_idx].update(key_states, value_states)

    def recall(self, layer_idx: int) -> RecurrentState:
        """Return a recurrent layer's states, those before the step aimed at, called by the layer itself."""
        state = self.recurrent.setdefault(layer_idx, RecurrentState(self))
        state.recall()
        return state

    def compact(self, slots_from: Tensor, slots_to: Tensor) -> None:
        """Move, in every layer, what row b holds in slots_from[b] to slots_to[b]; (B, P) each. All is read before any
        is written."""
        sources, goals = (slots_from + self.row_starts).flatten(), (slots_to + self.row_starts).flatten()
        for store in (*self.stores["keys"], *self.stores["values"]):
            flat = store.flatten(1, 2)  # (layers, B * S, H, Dh)
            flat.index_copy_(1, goals, flat.index_select(1, sources))

    @property
    def state_bytes(self) -> int:
        """Bytes of one row's recurrent states behind one token, of all layers."""
        kept = [tensor for state in self.recurrent.values() for tensor in state.kept.values()]
        return sum(tensor[0].numel() * tensor.element_size() for tensor in kept)

    def storage(self, kind: str, states: Tensor) -> Tensor:
        """(B, S, H, Dh) of zeros for one layer. The first layer's form is taken for all, so that `compact` is a few
        large copies; a layer of another form gets its own."""
        _, H, _, Dh = states.shape
        stores, free = self.stores[kind], self.free[kind]
        shape = (self.batch_size_, self.capacity, H, Dh)
        if not stores:
            stores.append(states.new_zeros(self.num_stored, *shape))
            free.extend(stores[0])
        if stores[0].shape[1:] == shape:
            return free.pop(0)
        stores.append(states.new_zeros(1, *shape))
        return stores[-1][0]
