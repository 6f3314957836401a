"""KV pools and their accounting: BF16 in all three, the indexer's as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pool_module
from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator

from dsv4convert.errors import Refused
from tests.sglang.world import make_pool


def test_all_three_pools_hold_bf16_rows_of_512() -> None:
    pool = make_pool()
    for single, page in ((pool.swa_kv_pool, 256), (pool.c4_kv_pool, 64), (pool.c128_kv_pool, 2)):
        assert type(single) is pool_module.DeepSeekV4SingleKVPool
        assert single.get_bytes_per_token() == 1024
        for buffer in single.kv_buffer:
            assert buffer.dtype is torch.bfloat16
            assert buffer.shape[1:] == (page * 512,)
        assert single.bytes_per_page_padded == page * 1024 == single.kv_buffer[0][0].nbytes
        assert single.kv_cache_total_dim == 512
    assert [len(p.kv_buffer) for p in (pool.swa_kv_pool, pool.c4_kv_pool, pool.c128_kv_pool)] == [5, 2, 1]


def test_index_keys_keep_their_132_bytes() -> None:
    pool = make_pool()
    assert [(b.dtype, b.shape[1]) for b in pool.c4_indexer_kv_pool.index_k_with_scale_buffer] == [
        (torch.uint8, 64 * 132)
    ] * 2


def test_swapping_the_class_would_leave_two_pools_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the method is replaced and not the class: the class is a default argument of `_make_kv_pool`."""

    class Swapped(pool_module.DeepSeekV4SingleKVPool):
        pass

    monkeypatch.setattr(Swapped, "create_buffer", lambda self, *, num_pages: "swapped")
    monkeypatch.setattr(pool_module, "DeepSeekV4SingleKVPool", Swapped)
    # K1 refuses a class it does not know; here it only has to tell the two apart.
    pool = make_pool()
    assert pool.c4_kv_pool.kv_buffer == ["swapped"] * 2
    assert "swapped" not in pool.swa_kv_pool.kv_buffer + pool.c128_kv_pool.kv_buffer


def test_a_kv_cache_of_another_type_is_refused() -> None:
    with pytest.raises(Refused) as caught:
        make_pool(torch.float8_e4m3fn)
    assert str(caught.value).splitlines() == [
        "error: `--kv-cache-dtype`: the kernels read a BF16 KV cache: expected bfloat16, found float8_e4m3fn"
        "   [shim.option]",
        "hint: change this option of SGLang to what is expected",
    ]


def test_hisparse_is_refused() -> None:
    with pytest.raises(Refused, match=r"`HiSparseC4DevicePool`: this KV pool of SGLang has no BF16 form"):
        make_pool(enable_hisparse=True)


def test_a_token_of_flash_costs_what_its_rows_cost() -> None:
    """V4-Flash: 43 layers, 21 of ratio 4, 20 of ratio 128, all with a window of which a tenth is kept."""
    flash = SimpleNamespace(
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        swa_ratio=0.1,
        swa_page_size=128,
        c4_ring_size=8,
        c128_ring_size=128,
        c4_shrink_factor=1,
        num_layers_total=43,
        num_layers_ca4=21,
        num_layers_ca128=20,
    )
    # Rows of 1024 bytes: 4.3 window rows, 5.25 of ratio 4, 0.15625 of ratio 128; index keys of 132 bytes.
    rows = 1024 * (4.3 + 5.25 + 0.15625) + 132 * 5.25
    # State of the ratio-4 compressors, f32, 8 slots per 128 window tokens: KV of 4 * 512, keys of 4 * 128.
    state = 0.1 * 8 / 128 * 21 * 4 * (4 * 512 + 4 * 128)
    found = DSV4PoolConfigurator._get_bytes_per_full_token(flash)
    assert found == pytest.approx(rows + state, rel=1e-12)
    assert round(found) == 11976
