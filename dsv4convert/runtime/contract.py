"""What the shim knows about SGLang 0.5.16: files and their hashes, patches, environment, lines it logs.

This is data; `hook` and `gate` act on it, `preflight` checks an installation against it, and the contract
tests hold every row of it against the published wheel. A port to another version starts here: read the
difference of each file in `HASHES`, then change hash, target or parameters row by row.

Source: wheel ``sglang-0.5.16-cp311-cp311-manylinux_2_34_x86_64.whl`` of PyPI. It records no commit, so that
each file is pinned by its own hash; `COMMIT` is that of the tag and holds for a git checkout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsv4convert.runtime import hook, settings

VERSION: Final = "0.5.16"
COMMIT: Final = "fdebc938f7f4d16fe6b9f55dcd9a767cf0899ea1"
#: The version the Triton kernels were compiled for SM80 with; SGLang 0.5.16 brings the same one.
TRITON: Final = "3.6.0"
#: The first Starlette that does not take the path of a request from its Host header (patch S3).
STARLETTE: Final = (1, 0, 1)
#: The directory that goes on PYTHONPATH.
SITE: Final = Path(__file__).resolve().parent / "activate"

#: Beginnings of the lines that a healthy server logs: `SHIM_LINE` once per process that builds a model,
#: `GUARD_LINE` once per model and rank.
SHIM_LINE: Final = "dsv4convert shim:"
GUARD_LINE: Final = "dsv4convert guard:"

#: File below the package ``sglang`` -> SHA-256. Patched files, and those whose behaviour a patch rests on.
HASHES: Final[Mapping[str, str]] = {
    "jit_kernel/csrc/deepseek_v4/c_plan.cuh": "6fa3a2a0cef7a4d751f21bfafd09b770bfca92b57cbfc76186d16b337397e497",
    "jit_kernel/csrc/deepseek_v4/fused_norm_rope_v2.cuh": "83cf06154b8ee047073aac91a29b49eeedd2f21efe289a274c719bf8a1298594",
    "jit_kernel/csrc/deepseek_v4/topk_v1.cuh": "a34aa27a1cbe752e59a7f6274cdba0486c6b68b7b4b15f384d5ecb7f3a9efed0",
    "jit_kernel/dsv4/compress.py": "a49bdf2b32e34da75ed665fcf7ebe7d7143a7d25cdb1e94192e8512d226597bb",
    "jit_kernel/include/sgl_kernel/deepseek_v4/compress_v2.cuh": "a3d2a13e2ffa149ee5ef8cc4d787bd52f9057cd6e2f0017d4c846b40db4bcf92",
    "kernels/ops/attention/flash_mla_sm120.py": "560837536f54bb7a38caed26e5967650ed0a13b73e3065e9e5584eb2ad34d799",
    "srt/arg_groups/overrides.py": "a897f4787c5d6c6c01be71dee42b5322dcb6cdf1efeb981f0d4f2efa026a5e9e",
    "srt/entrypoints/engine.py": "3fc01012d5e06050767573a31ea6a5b07447e88136d23cb7fd8454743dac1db4",
    "srt/entrypoints/http_server.py": "5cdce94aaf3a446ac43e5a8e46961cbafdca9de7f0234404d285ed47ef5274d6",
    "srt/layers/attention/deepseek_v4_backend.py": "57e6a41f005e4f28a12394addb028cb4777b0f05026a8cbcefc0319527f74ea7",
    "srt/layers/attention/dsv4/compressor_v2.py": "b16467043e68a467d115ad6517ea3e69eb14d4f682973b45b5264fc8016a01e2",
    "srt/layers/attention/dsv4/indexer.py": "278e2e1eaa8a04f40ead90a35f8d9e926b1f86ffc502c906da7d97f9520f044a",
    "srt/layers/attention/dsv4/metadata.py": "b3db5764cf8dd4d34cf7fa4df8d6a98ff3a2e3dcb116eb210694384be67de7ac",
    "srt/layers/moe/fused_moe_triton/layer.py": "1aa9a454a3726476a6c52e8b2c28a2e0d1907d460c132b4c41cf481ad8a5884c",
    "srt/layers/quantization/fp8.py": "2731f589488532ba47d9921d01a8e96264162571cfcc8ebe2fc5585454456485",
    "srt/layers/quantization/mxfp4_flashinfer_trtllm_moe.py": "ea026b850917a80598c58143f12a3785d4763237653d90338c1d90aaae72d65e",
    "srt/layers/quantization/mxfp4_marlin_moe.py": "c3db87b2a500b9500b4056d768ee2ae4e454ce4b6be58d34939b307d18d72fcb",
    "srt/mem_cache/deepseek_v4_memory_pool.py": "cda2e39ff538f5bed654fdf038c2249ddb95c13e5c4784be9ea4dec43dd4aa31",
    "srt/mem_cache/kv_cache_configurator.py": "0a3810ce07fe9d73f2c091c595c81a6b9db130cbe3230439a79cfc7eac195c78",
    "srt/model_executor/pool_configurator.py": "eef3dcb9af3f861118311d8ad2a291df2f687b026399031ca423a8c24f37ed24",
    "srt/models/deepseek_v4.py": "cbf7f358cb173ca07019554a8a37474fd5416c20c493870d9917734b29399870",
    "srt/models/deepseek_v4_dspark.py": "d9e03e950ed8b75f18e38eb17843c7ff57e6d2bb0a335cbcb8da5c06a0335779",
    "srt/models/deepseek_v4_nextn.py": "4f6bf95a011be0ff4a278d8eac0952f570d6eb3e2d292571a93627f8fe2016e9",
    "srt/server_args.py": "e04556de6d99ba8a76b91fffa49aa70ea9d65cd99f09d0da5d4cfe1228e28500",
    "srt/utils/auth.py": "016734a0263cbc2bd6657481ab11535f1cac073efb7eed4bcdbf66f81dfd3ef7",
    "srt/utils/msgspec_utils.py": "488b2a3fd0bb582d6a89c7fee668a0fc0731b8447b013b6998cd510f0dc2f1ff",
}


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of SGLang that is replaced.

    Attributes:
        id: Short name, the one that logs and `applied` use.
        module: Module whose import triggers it.
        attribute: Name in the module, dotted for a method.
        parameters: Names of the parameters of what is replaced; None if it is no function.
        maker: ``module:function`` below ``dsv4convert.runtime.patches``; takes what is there and the module, returns
            what replaces it.
        kind: ``kernel`` (another implementation), ``wrap`` (calls what it replaces), ``class``, ``flag``.
        why: What would happen on SM80 without it.
        switch: Variable of the environment without which it is left out; None if it always applies.
    """

    id: str
    module: str
    attribute: str
    parameters: tuple[str, ...] | None
    maker: str
    kind: str
    why: str
    switch: str | None = None


_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
_INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
_TARGET = "sglang.srt.models.deepseek_v4"
_NEXTN = "sglang.srt.models.deepseek_v4_nextn"
_DSPARK = "sglang.srt.models.deepseek_v4_dspark"
_BUILD = ("self", "config", "quant_config", "prefix")

# fmt: off
PATCHES: Final[tuple[Patch, ...]] = (
    # BF16 KV cache. The classes stay: `_make_kv_pool` holds one of them as a default argument.
    Patch("K1", _POOL, "DeepSeekV4SingleKVPool.create_buffer", ("self", "num_pages"), "kv:create_buffer", "kernel",
          "the pools are 584-byte rows of FP8 and BF16, and a BF16 cache fails an assertion"),
    Patch("K1b", _POOL, "DeepSeekV4SingleKVPool.get_bytes_per_token", ("self",), "kv:bytes_per_token", "kernel",
          "pool sizes in the log would be those of FP8 rows"),
    Patch("K2", _POOL, "fused_k_norm_rope_flashmla",
          ("kv", "kv_weight", "eps", "freqs_cis", "positions", "out_loc", "kvcache", "page_size"), "kv:store", "kernel",
          "the stock kernel writes FP8 rows only"),
    Patch("K3", "sglang.srt.model_executor.pool_configurator", "DSV4PoolConfigurator._get_bytes_per_full_token",
          ("self",), "kv:bytes_per_full_token", "wrap", "pools would be planned 1.55 times too large for the card"),
    Patch("C1", "sglang.srt.layers.attention.dsv4.compressor_v2", "compress_norm_rope_store",
          ("kv", "plan", "norm_weight", "norm_eps", "freq_cis", "out_loc", "kvcache", "page_size", "use_fp4", "bf16_store"),
          "kv:store_compressed", "kernel", "compressed keys are stored as FP8"),
    # INT8 indexer: same 132 bytes per key as FP8, so that the pool stays.
    Patch("I1", _INDEXER, "fused_q_indexer_rope_hadamard_quant",
          ("q_input", "weight", "weight_scale", "freqs_cis", "positions"), "indexer:quantize_queries", "kernel",
          "index queries are quantized to FP8"),
    Patch("I2", _INDEXER, "fp8_paged_mqa_logits_torch",
          ("q_fp8", "kvcache_fp8", "weight", "seq_lens", "page_table", "deep_gemm_metadata", "max_seq_len", "clean_logits"),
          "indexer:logits", "kernel", "the fallback reads FP8 and asserts a shape that its caller never passes"),
    Patch("I3", _INDEXER, "C4IndexerBackendMixin.forward_c4_indexer",
          ("self", "x", "q_lora", "c4_indexer", "forward_batch", "alt_streams", "enable_multi_stream", "q_lora_ready",
           "skip_compressor"),
          "indexer:split_queries", "wrap", "every rank scores every query of a long prefill",
          settings.PARALLEL_INDEXER),
    # Sparse attention through the branch that needs no FlashMLA.
    Patch("A1", _BACKEND, "_is_sm120", None, "attention:without_flash_mla", "flag",
          "FlashMLA has code for SM90 and SM100 only"),
    Patch("A2", "sglang.kernels.ops.attention.flash_mla_sm120", "flash_mla_with_kvcache_sm120", ("kwargs",),
          "attention:sparse", "kernel", "the stock kernel reads FP8 rows"),
    Patch("A3", _BACKEND, "DeepseekV4AttnBackend.forward",
          ("self", "q", "k", "v", "layer", "forward_batch", "compress_ratio", "save_kv_cache", "attn_sink", "_"),
          "attention:local_heads", "wrap", "queries are padded to 64 heads; those of other ranks are uninitialized memory"),
    # After A3, so that it meets the padded queries.
    Patch("D1", _BACKEND, "DeepseekV4AttnBackend.forward",
          ("self", "q", "k", "v", "layer", "forward_batch", "compress_ratio", "save_kv_cache", "attn_sink", "_"),
          "attention:poison", "wrap", "a test could not tell whether padding reaches an answer", settings.POISON),
    Patch("M1", "sglang.srt.layers.quantization.mxfp4_marlin_moe", "Mxfp4MarlinMoEMethod", None, "moe:method", "class",
          "the Marlin method refuses SM80 and cannot read the layout `int8`"),
    # Guards: SGLang only warns about weights that are missing or left over.
    Patch("G1", _TARGET, "DeepseekV4ForCausalLM.__init__", _BUILD, "guard:build", "wrap",
          "nothing would tell M1 the layout, and BF16 weights would be cast to FP8 without their scale"),
    Patch("G1n", _NEXTN, "DeepseekV4ForCausalLMNextN.__init__", _BUILD, "guard:build", "wrap", "as G1"),
    Patch("G1d", _DSPARK, "DeepseekV4ForCausalLMDSpark.__init__", _BUILD, "guard:build", "wrap", "as G1"),
    # NextN loads through the target's method.
    Patch("G2", _TARGET, "DeepseekV4ForCausalLM.load_weights", ("self", "weights", "is_nextn"), "guard:load", "wrap",
          "parameters that no tensor filled would be served as they are"),
    Patch("G2d", _DSPARK, "DeepseekV4ForCausalLMDSpark.load_weights", ("self", "weights"), "guard:load", "wrap", "as G2"),
    # Keys. The second one is imported by http_server, engine and scheduler: /server_info, /get_server_info.
    Patch("S1", "sglang.srt.server_args", "ServerArgs.__repr__", ("self",), "secret:args_repr", "wrap",
          "the API key is logged at start"),
    Patch("S2", "sglang.srt.utils.msgspec_utils", "msgspec_to_builtins", ("obj",), "secret:builtins", "wrap",
          "the API key is part of the answer of /server_info"),
    # http_server imports it from its module when it starts.
    Patch("S3", "sglang.srt.utils.auth", "add_api_key_middleware", ("app", "api_key", "admin_api_key"),
          "secret:key_check", "wrap", "with Starlette before 1.0.1 a Host header like `x/health?` passes without a key"),
)
# fmt: on

#: Variable -> value that SM80 needs; read by SGLang when its modules are imported. Set unless already set.
_SGLANG: Final[Mapping[str, str]] = {
    # `wo_a` is BF16; the FP8 einsum is DeepGEMM's.
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    # DeepGEMM's tf32_hc_prenorm_gemm needs SM90; the alternative is arch-neutral.
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    # Top-k v2 is built from thread-block clusters.
    "SGLANG_OPT_USE_TOPK_V2": "0",
    # The way to I2 past DeepGEMM's paged and non-paged logits.
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": "1",
    "SGLANG_OPT_DSV4_NONPAGED_INDEXER": "0",
    "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL": "0",
    # Another cache format of the ratio-128 compressor, without a BF16 store.
    "SGLANG_OPT_USE_ONLINE_COMPRESS": "0",
    # Routes experts to the MXFP4 classes; layout `int8` has no `.weight` that would tell.
    "SGLANG_DSV4_FP4_EXPERTS": "1",
}


def environment(backend: str, *, parallel_indexer: bool = False) -> dict[str, str]:
    """Return every variable that a process which serves needs.

    Args:
        backend: One of `settings.MOE_BACKENDS`.
        parallel_indexer: Split the index queries of a long prefill between the ranks.
    """
    switched = {settings.PARALLEL_INDEXER: "1"} if parallel_indexer else {}
    return {settings.SWITCH: "1", settings.MOE: backend, **switched, **_SGLANG}


def wanted() -> tuple[Patch, ...]:
    """Return the patches that the environment of this process asks for.

    Raises:
        Refused: a switch is neither on nor off.
    """
    on = (None, *settings.switched_on())
    return tuple(patch for patch in PATCHES if patch.switch in on)


def status() -> dict[str, Any]:
    """Return what the shim is and has done in this process, as JSON values."""
    return {
        "enabled": hook.is_enabled(),
        "installed": hook.is_installed(),
        "sglang": VERSION,
        "applied": list(hook.APPLIED),
    }
