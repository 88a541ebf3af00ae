"""Which backend is chosen, and every reason where none is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from cupyflash import support
from cupyflash.backend import AttentionSelectorConfig, AttentionType
from cupyflash.backends import (
    FlashAttentionBackend,
    ReferenceBackend,
    get_attn_backend,
    unsupported_reasons,
)
from cupyflash.backends.flash_attn import _need_of
from cupyflash.fa_version import _resolve, fa_version, resolve_need

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))


def config(**changes):
    return AttentionSelectorConfig(**{"head_size": 128, "dtype": "bfloat16", **changes})


@pytest.fixture
def built(monkeypatch):
    """Every kernel of the support table is there, as in a complete release."""
    monkeypatch.setattr(support, "SUPPORT", tuple(replace(r, built=True) for r in support.SUPPORT))
    _resolve.cache_clear()
    yield
    _resolve.cache_clear()


# B89: capability x head size x cache x sink or ALiBi.
@pytest.mark.parametrize(
    ("capability", "head_size", "kv", "option"),
    list(product(CAPABILITIES, (64, 256), ("auto", "fp8"), ("has_sink", "use_alibi"))),
)
def test_what_is_chosen_runs(built, capability, head_size, kv, option):
    asked = config(head_size=head_size, kv_cache_dtype=kv, **{option: True})
    if capability == (7, 5):
        with pytest.raises(ValueError, match=r"compute capability 7.5 is below 8.0"):
            get_attn_backend(asked, capability)
        return
    assert get_attn_backend(asked, capability) is FlashAttentionBackend
    assert resolve_need(_need_of(asked), capability) in (2, 3)


@pytest.mark.parametrize("capability", CAPABILITIES[1:])
def test_what_is_not_built_is_not_chosen(monkeypatch, capability):
    rows = tuple(replace(row, built=False) for row in support.SUPPORT)
    monkeypatch.setattr(support, "SUPPORT", rows)
    _resolve.cache_clear()
    with pytest.raises(ValueError, match="not in this release"):
        get_attn_backend(config(), capability)
    _resolve.cache_clear()


def test_the_version_asked_for_counts(built):
    asked = config(head_size=72, kv_cache_dtype="fp8")
    with fa_version(3), pytest.raises(ValueError, match=r"version 3.*head size 72"):
        get_attn_backend(asked, (9, 0))
    with fa_version(2):
        assert get_attn_backend(asked, (9, 0)) is FlashAttentionBackend


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv", ["auto", "fp8_e5m2"])
def test_numpy_arrays_get_the_reference(dtype, kv):
    asked = config(dtype=dtype, kv_cache_dtype=kv, block_size=5, use_alibi=True, has_sink=True)
    assert get_attn_backend(asked, None) is ReferenceBackend


def test_a_backend_can_be_named():
    assert get_attn_backend(config(), None, "FLASH_ATTN") is FlashAttentionBackend
    with pytest.raises(ValueError, match="FLASH_ATTN: dtype=float32"):
        get_attn_backend(config(dtype="float32"), None, "FLASH_ATTN")
    with pytest.raises(ValueError, match="on a GPU; REFERENCE"):
        get_attn_backend(config(), (9, 0), "REFERENCE")
    with pytest.raises(ValueError, match=r"FLASHINFER.*FLASH_ATTN, REFERENCE"):
        get_attn_backend(config(), (9, 0), "FLASHINFER")


def test_all_reasons_come_at_once():
    asked = config(
        head_size=100, dtype="float64", kv_cache_dtype="int8", block_size=24, use_mla=True,
        use_sparse=True, use_mm_prefix=True, use_rswa=True, attn_type="unknown",
    )  # fmt: skip
    reasons = unsupported_reasons(asked, (7, 5))
    for part in (
        *("latent", "sparse", "bidirectional", "reference sliding"),
        *("head_size=100", "dtype=float64", "kv_cache_dtype='int8'", "block_size=24"),
        *("attn_type='unknown'", "7.5"),
    ):
        (found,) = [text for text in reasons["FLASH_ATTN"] if part in text]
        assert found
    with pytest.raises(ValueError, match=r"head_size=100.*block_size=24.*7\.5"):
        get_attn_backend(asked, (7, 5))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kv_cache_dtype": "float16"}, "use 'auto'"),
        ({"kv_cache_dtype": "fp8", "attn_type": AttentionType.ENCODER_ONLY}, "no cache"),
        ({"kv_cache_dtype": "fp8", "attn_type": AttentionType.ENCODER}, "no cache"),
    ],
)
def test_settings_that_do_not_go_together(changes, match):
    (reason,) = unsupported_reasons(config(**changes), None)["FLASH_ATTN"]
    assert match in reason


# B58: what a backend accepts, it applies: the accepted block sizes are those of its caches.
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32, 48, 256])
def test_an_accepted_block_size_has_a_cache_shape(block_size):
    reasons = unsupported_reasons(config(block_size=block_size), None)["FLASH_ATTN"]
    if block_size % 16:
        assert "block_size" in reasons[0]
        with pytest.raises(ValueError, match="multiple of 16"):
            FlashAttentionBackend.get_kv_cache_shape(2, block_size, 1, 64)
    else:
        assert not reasons
        assert FlashAttentionBackend.get_kv_cache_shape(2, block_size, 1, 64)[2] == block_size


def test_the_reference_computes_numpy_arrays_only():
    impl = ReferenceBackend.get_impl_cls()(1, 64, 0.1, 1)
    with pytest.raises(TypeError, match="FLASH_ATTN"):
        impl.forward(None, [1.0], None, None, None, None, None)
