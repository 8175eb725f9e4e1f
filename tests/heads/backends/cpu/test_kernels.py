"""The CPU kernels against torch's operations: products, whole decoders, and rows that depend on no neighbour."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from heads.backends.cpu import compiling, library
from heads.backends.cpu.decoder import CpuDecoder
from heads.backends.cpu.kernels import CompiledProduct
from heads.backends.slot_mapping import CacheSpec, Observed, SlotMapping, Verified
from heads.backends.torch.cached_decoder import TorchDecoder
from heads.backends.torch.decoder import NativeDecoder
from heads.backends.torch.linear import Product
from heads.target.frozen import FrozenTarget
from tests.closeness import assert_close

compiled = pytest.mark.skipif(library.load() is None, reason="no C compiler")
BASE = dict(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=88,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
)
VARIANTS: dict[str, dict[str, object]] = {
    "llama": {},
    "llama one key head": dict(num_key_value_heads=1, head_dim=64),
    "llama wide heads": dict(head_dim=80),
    "llama wide feedforward": dict(intermediate_size=1100),
    "llama biases": dict(attention_bias=True, mlp_bias=True),
    "mistral": dict(sliding_window=20),
    "qwen2": dict(use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "qwen3": dict(head_dim=24),
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def decoders(variant: str, batch_size: int) -> tuple[TorchDecoder, TorchDecoder]:
    """A random decoder in float32 and its caches: through the kernels, and without them."""
    config = AutoConfig.for_model(variant.split()[0], **{**BASE, **VARIANTS[variant]})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
    target, spec = FrozenTarget(model, variant), CacheSpec(batch_size=batch_size, capacity=192, aux_layer_ids=(1, 3))
    decoder = CpuDecoder.of(target, spec)
    assert decoder is not None and decoder.stack is not None
    plain = NativeDecoder(**{name: part for name, part in vars(decoder.native).items() if name != "stack"})
    return decoder, TorchDecoder(target, spec, plain)


def decode(decoder: TorchDecoder, tokens: Tensor, spans: list[slice], *, rows: int = 1, masked: bool = True) -> Tensor:
    """(B, T, 3 D): two auxiliary hidden states and the last hidden state of tokens (B, T), read span by span, `rows`
    rows at a time; what is seen is given by masks or follows from the positions."""
    B, T = tokens.shape
    out = torch.zeros(B, T, 3 * decoder.native.embedding.shape[1])
    for span in spans:
        for row in range(B) if rows == 1 else [None]:
            which = slice(None) if row is None else slice(row, row + 1)
            chosen = tokens[which, span]
            start, depths = torch.full((len(chosen),), span.start), torch.arange(chosen.shape[1]).expand_as(chosen)
            mapping: SlotMapping = Observed(start, None, decoder.slot, chosen.shape[1])
            if masked:
                above = (depths[:, None] <= depths[..., None]).contiguous()
                mapping = Verified(start, (depths - 1).clamp_min(0), depths, above, T, decoder.slot)
            features = decoder.forward(chosen, mapping, extent=-(-span.stop // 64) * 64, row=row)
            out[which, span] = torch.cat([features.aux_hidden_states, features.hidden], dim=-1)
    return out


@compiled
@pytest.mark.parametrize("R", [1, 2, 3, 5, 6, 7, 9, 13, 25, 64])
def test_products_are_torchs(R: int, threads: int) -> None:
    for inputs, outputs in ((7, 3), (300, 129), (512, 640)):
        x, weight, bias, residual = (
            torch.randn(R, inputs + 5)[:, 2:-3],
            torch.randn(outputs, inputs),
            torch.randn(outputs),
            torch.randn(R, outputs),
        )
        packed, plain = (CompiledProduct(Product(weight, added)) for added in (bias, None))
        assert_close(packed(x, residual), x @ weight.T + bias + residual, roundings=16)
        assert_close(plain(x), x @ weight.T, roundings=16)
        assert torch.equal(plain(x)[-1:], plain(x[-1:])), "a row depends on its neighbours"


@compiled
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_decoders_through_the_kernels_are_those_without(variant: str, threads: int) -> None:
    ours, plain = decoders(variant, 3)
    tokens = torch.randint(61, (3, 150), generator=torch.Generator().manual_seed(0))
    spans = [slice(0, 100), slice(100, 101), slice(101, 107), slice(107, 150)]
    expected = decode(plain, tokens, [slice(0, 150)])
    assert_close(decode(ours, tokens, spans, rows=3), expected, roundings=256)
    assert_close(decode(ours, tokens, spans, masked=False), expected, roundings=256)
    assert_close(decode(plain, tokens, spans, masked=False), expected, roundings=256)


@compiled
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_chain_verified_is_a_chain_decoded_to_the_bit(variant: str, threads: int) -> None:
    decoder, _ = decoders(variant, 2)
    tokens = torch.randint(61, (2, 80), generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(1)
    one_by_one = decode(decoder, tokens, [slice(t, t + 1) for t in range(80)])
    torch.set_num_threads(threads)
    for size in (5, 8, 27, 80):
        spans = [slice(t, min(t + size, 80)) for t in range(0, 80, size)]
        assert torch.equal(decode(decoder, tokens, spans), one_by_one)
        assert torch.equal(decode(decoder, tokens, spans, masked=False), one_by_one)
        assert torch.equal(decode(decoder, tokens, spans, rows=2), one_by_one)


@compiled
@torch.no_grad()
def test_slots_move_all_at_once() -> None:
    cache = decoders("llama one key head", 2)[0].cache
    for store in (cache.keys, cache.values):
        store.copy_(torch.randn_like(store))
    keys = cache.keys.transpose(-1, -2).flatten(3, 4).clone()  # (L, B, Hkv, S, d)
    values = cache.values.clone()
    cache.compact(torch.tensor([[60, 66, 63], [190, 191, 188]]), torch.tensor([[60, 61, 66], [126, 127, 128]]))
    for row, moves in enumerate([{60: 60, 66: 61, 63: 66}, {190: 126, 191: 127, 188: 128}]):
        for source, goal in moves.items():
            moved = cache.keys.transpose(-1, -2).flatten(3, 4)[:, row, :, goal]
            assert torch.equal(moved, keys[:, row, :, source])
            assert torch.equal(cache.values[:, row, :, goal], values[:, row, :, source])


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    library.load.cache_clear()
    compiling.find_compiler.cache_clear()
    monkeypatch.setenv("CC", "none")
    with caplog.at_level(logging.INFO, "draftsmith"):
        assert library.load() is None and library.load() is None
    assert [record.message for record in caplog.records] == [
        "no C compiler found: decoding on this CPU takes torch's operations, which are slower"
    ]
    library.load.cache_clear()
    compiling.find_compiler.cache_clear()


@compiled
def test_a_compiler_that_fails_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CFLAGS", "--no-such-flag")
    with caplog.at_level(logging.INFO, "draftsmith"):
        assert library.load() is None
    assert "could not be compiled" in caplog.text and not list(tmp_path.rglob("*.so"))
    library.load.cache_clear()


@compiled
def test_half_a_library_in_the_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "half.c"
    source.write_text("int half(void) { return 2; }\n")
    compiler = compiling.find_compiler()
    assert compiler is not None
    whole = compiling.build([source], compiler)
    before = whole.read_bytes()
    assert compiling.build([source], compiler) == whole
    whole.write_bytes(before[:1000])  # loaded, it would end the process
    assert compiling.build([source], compiler).read_bytes() == before
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # no folder
    assert compiling.compiled(source) is None


@compiled
def test_a_header_that_changed_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sources = [tmp_path / name for name in ("two.c", "three.c", "number.h")]
    sources[0].write_text('#include "number.h"\nint two(void) { return NUMBER; }\n')
    sources[1].write_text("int three(void) { return 3; }\n")
    for number in (2, 4):
        sources[2].write_text(f"#define NUMBER {number}\n")
        made = compiling.compiled(*sources)
        assert made is not None
        assert (made.two(), made.three()) == (number, 3)
