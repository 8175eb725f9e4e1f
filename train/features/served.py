"""Features that a server computes. They are checked against the target before training."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from heads.errors import UserError
from heads.target.families import final_norm
from heads.target.model import Features, FrozenTarget
from train.data.packing import Mixture, Rows
from train.features.base import FeatureSource
from train.features.server import HiddenStatesServer, documents_of
from train.features.settings import VllmFeatures
from train.launch import on_main

CHECKED_ROWS = 8
LARGEST_DISTANCE = 0.2
"""Largest relative distance of hidden states. In bfloat16, engines differ by some per cent."""
LARGEST_DIFFERENCE = 0.1
"""Largest mean difference of log-probabilities."""


class ServedFeatures(FeatureSource):
    """Features from a vLLM server, requested ahead of the steps."""

    def __init__(
        self, target: FrozenTarget, settings: VllmFeatures, rows_of_step: int, accelerator: Accelerator, **own: Any
    ) -> None:
        """`rows_of_step`: the rows of one process in a step."""
        super().__init__(target, **own)
        if target.start_token is not None or target.is_recurrent:
            raise UserError(f"{target.name}: vLLM does not extract its states; use features.kind=process")
        norm = final_norm(target.base, target.layers, target.hidden_size)
        if norm is None:
            raise UserError(f"{target.name}: no final norm was found, which vLLM leaves out; use features.kind=process")
        self.norm, self.settings, self.accelerator = norm, settings, accelerator
        self.steps_ahead = -(-settings.in_flight // rows_of_step) + 1
        self.server: HiddenStatesServer | None = None
        target.remote = self.fetch

    def open_server(self, aux_layer_ids: Sequence[int]) -> HiddenStatesServer:
        """Return the server, and open it at the first call. `aux_layer_ids`: the layers that the head reads."""
        if self.server is None:
            streams = sorted({*aux_layer_ids, self.target.num_layers})
            self.server = HiddenStatesServer(self.settings.url, streams, self.settings.in_flight)
        return self.server

    def expect(self, rows: Rows) -> None:
        assert self.server is not None
        for _, _, tokens in documents_of(rows.tokens, rows.documents):
            self.server.ask(tokens)

    @torch.no_grad()
    def fetch(self, tokens: Tensor, positions: Tensor, documents: Tensor, aux_layer_ids: Sequence[int]) -> Features:
        """Return features of packed rows, (B, T) each, on the target's device. They are zero in the padding."""
        server, target = self.open_server(aux_layer_ids), self.target
        states = self.states(server, tokens.cpu(), documents.cpu())
        last = states[:, :, -1]
        aux = states[:, :, [server.streams.index(k) for k in aux_layer_ids]].flatten(2)
        hidden = self.norm(last.to(target.dtype))
        return Features(aux, hidden.masked_fill((documents < 0)[..., None], 0))

    def states(self, server: HiddenStatesServer, tokens: Tensor, documents: Tensor) -> Tensor:
        """Return all streams (B, T, S, D) from the server, on the target's device, for packed rows (B, T) on the
        CPU."""
        whole: Tensor | None = None
        for row, place, part in documents_of(tokens, documents):
            found = server.take(part).to(self.target.device)
            if whole is None:
                whole = found.new_zeros(*tokens.shape, *found.shape[1:])
            whole[row, place] = found
        assert whole is not None
        return whole

    def check(self, mixture: Mixture, aux_layer_ids: Sequence[int]) -> None:
        """Compare the server's states for some rows with those of a copy of the target or, without room for one, with
        the server's own log-probabilities. UserError for other layers, for states after the final norm, and for a
        target with learned positions if conversations are cut."""

        def act() -> None:
            rows = mixture.rows(range(CHECKED_ROWS))
            server = self.open_server(aux_layer_ids)
            if self.measures:
                with self.whole() as whole:
                    self._compare(server, whole, rows)
            else:
                self._compare_logits(server, rows)

        if getattr(self.target.config, "rope_parameters", None) is None and any(
            bool((pool.pieces[:, 2] > 0).any()) for pool in mixture.pools
        ):
            raise UserError(
                f"{self.target.name}: has learned positions, which vLLM counts from 0, and some conversations are cut; "
                "raise data.context_length, or use features.kind=process"
            )
        self.open_server(aux_layer_ids)
        try:
            on_main(self.accelerator, act)
        except BaseException:
            self.close()
            raise

    def _compare(self, server: HiddenStatesServer, whole: FrozenTarget, rows: Rows) -> None:
        """Raise UserError unless each stream is closest to the target's stream of the same layer, and close to it."""
        n, kept = whole.num_layers, rows.documents >= 0
        known = sorted({k + step for k in server.streams for step in (-1, 0, 1)} & set(range(n + 1)))
        batch = [part.to(whole.device) for part in (rows.tokens, rows.positions, rows.documents)]
        features = whole.packed_features(batch[0], batch[1], batch[2], known)
        ours = features.aux_hidden_states.unflatten(-1, (len(known), -1)).cpu()[kept].float()
        names = [f"enters layer {k}" for k in known[:-1]] + ["leaves the last layer", "leaves the final norm"]
        candidates = torch.cat([ours, features.hidden.cpu()[kept].float()[:, None]], 1)  # (N, known + 1, D)
        theirs = self.states(server, rows.tokens, rows.documents).cpu()[kept].float()
        for place, k in enumerate(server.streams):
            apart = (candidates - theirs[:, place, None]).norm(dim=(0, 2)) / candidates.norm(dim=(0, 2))
            nearest, own = int(apart.argmin()), known.index(k)
            if nearest != own:
                raise self._wrong(server, f"its state number {place + 1} {names[nearest]}, expected what {names[own]}")
            if not float(apart[own]) <= LARGEST_DISTANCE:
                raise self._wrong(server, f"what {names[own]} is {float(apart[own]):.0%} from the target's own")

    def _compare_logits(self, server: HiddenStatesServer, rows: Rows) -> None:
        """Raise UserError unless our final norm and output head turn the server's states into its own
        log-probabilities."""
        target = self.target
        apart = []
        for _, _, tokens in documents_of(rows.tokens, rows.documents):
            if len(tokens) > 1:
                last = server.take(tokens)[:-1, -1].to(target.device)
                ours = target.lm_head(self.norm(last.to(target.dtype))).log_softmax(-1)
                own = ours.gather(-1, tokens[1:, None].to(target.device))[:, 0].cpu()
                apart.append((own - server.log_probabilities(tokens)).abs())
        mean = float(torch.cat(apart).mean())
        if not mean <= LARGEST_DIFFERENCE:
            raise self._wrong(server, f"its last states give log-probabilities {mean:.2f} from its own")

    def _wrong(self, server: HiddenStatesServer, what: str) -> UserError:
        return server.http.error(
            f"{what}; serve {self.target.name} itself, with eagle_aux_hidden_state_layer_ids {server.streams}"
        )

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
