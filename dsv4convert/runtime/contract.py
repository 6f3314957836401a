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
    "kernels/ops/attention/dsv4_attn_metadata_kernels.py": "4276de2afa328739ddcbecf7d8a48f273fddfa8d8a029e7024b82e7dacb91969",
    "kernels/ops/attention/flash_mla_sm120.py": "560837536f54bb7a38caed26e5967650ed0a13b73e3065e9e5584eb2ad34d799",
    "srt/arg_groups/overrides.py": "a897f4787c5d6c6c01be71dee42b5322dcb6cdf1efeb981f0d4f2efa026a5e9e",
    "srt/configs/model_config.py": "60f37ccb03682c20d6a64670a9e8ff27630d76017c49ee1ab348004bdd0fd7ff",
    "srt/entrypoints/engine.py": "3fc01012d5e06050767573a31ea6a5b07447e88136d23cb7fd8454743dac1db4",
    "srt/entrypoints/http_server.py": "5cdce94aaf3a446ac43e5a8e46961cbafdca9de7f0234404d285ed47ef5274d6",
    "srt/entrypoints/openai/encoding_dsv4.py": "012e4dc254c4046f600674eaa799d59dffe5e4a46450da7b4629cf16706fc6c3",
    "srt/entrypoints/openai/serving_chat.py": "fe39d9a4bd9a347abdfe2c6e62bf509768d23f0764b275e2dfc18c849b9c6b32",
    "srt/entrypoints/openai/serving_responses.py": "a2e0ee02a0cdd36e51d3b7b983742ca50571394b23735d372ed1424a3126b359",
    "srt/layers/attention/deepseek_v4_backend.py": "57e6a41f005e4f28a12394addb028cb4777b0f05026a8cbcefc0319527f74ea7",
    "srt/layers/attention/dsv4/compressor_v2.py": "b16467043e68a467d115ad6517ea3e69eb14d4f682973b45b5264fc8016a01e2",
    "srt/layers/attention/dsv4/indexer.py": "278e2e1eaa8a04f40ead90a35f8d9e926b1f86ffc502c906da7d97f9520f044a",
    "srt/layers/attention/dsv4/metadata.py": "b3db5764cf8dd4d34cf7fa4df8d6a98ff3a2e3dcb116eb210694384be67de7ac",
    "srt/layers/moe/fused_moe_triton/layer.py": "1aa9a454a3726476a6c52e8b2c28a2e0d1907d460c132b4c41cf481ad8a5884c",
    "srt/layers/moe/hash_topk.py": "d13b6f54f1bbb5498dcc50c3b8f8116eb57bb3b70dfdf2cea923f18fed26ddd0",
    "srt/layers/moe/topk.py": "8181725ad238ee6f8610044d01ca30267a1306546dfd7ea97b15a7810c5fdef3",
    "srt/layers/quantization/fp8.py": "2731f589488532ba47d9921d01a8e96264162571cfcc8ebe2fc5585454456485",
    "srt/layers/quantization/mxfp4_flashinfer_trtllm_moe.py": "ea026b850917a80598c58143f12a3785d4763237653d90338c1d90aaae72d65e",
    "srt/layers/quantization/mxfp4_marlin_moe.py": "c3db87b2a500b9500b4056d768ee2ae4e454ce4b6be58d34939b307d18d72fcb",
    "srt/managers/mm_utils.py": "4eabea66a9bf08b56e070332fd08b70e492e9dbc7c63af4b8cf0a8921144c63a",
    "srt/managers/multimodal_processor.py": "ab6c7d37be861461f4b57771b9d24ad1e1e616cd1f0575448b633c2c8f12e37a",
    "srt/managers/schedule_batch.py": "27e20908294c9d76d0a8ae1199ecac4379232532878013404a8b4fb08842ac43",
    "srt/managers/schedule_policy.py": "d8a5cc9435ef5e946ef6f050d75bb01e2dd50e05a912ac6366bb4134bf66e9ab",
    "srt/managers/scheduler.py": "159837693ec244d2dfb482d5788b8f4fa934c780505609c90a728939abe89815",
    "srt/managers/tokenizer_manager.py": "4646904f0da00d4810db3e08b90d0dee41d8ecf317c68e99ad8ca727fa96deb8",
    "srt/mem_cache/deepseek_v4_memory_pool.py": "cda2e39ff538f5bed654fdf038c2249ddb95c13e5c4784be9ea4dec43dd4aa31",
    "srt/mem_cache/kv_cache_configurator.py": "0a3810ce07fe9d73f2c091c595c81a6b9db130cbe3230439a79cfc7eac195c78",
    "srt/model_executor/pool_configurator.py": "eef3dcb9af3f861118311d8ad2a291df2f687b026399031ca423a8c24f37ed24",
    "srt/models/deepseek_v2.py": "47709951b15d7ac494c25f079a242c17375a8ee01007c829ea0c9ab604794689",
    "srt/models/deepseek_v4.py": "cbf7f358cb173ca07019554a8a37474fd5416c20c493870d9917734b29399870",
    "srt/models/deepseek_v4_dspark.py": "d9e03e950ed8b75f18e38eb17843c7ff57e6d2bb0a335cbcb8da5c06a0335779",
    "srt/models/deepseek_v4_nextn.py": "4f6bf95a011be0ff4a278d8eac0952f570d6eb3e2d292571a93627f8fe2016e9",
    "srt/models/registry.py": "3c5b4e87c5943147c28cb5b68e187cdf8f8f9d880c42f1f6941fce99fe757e41",
    "srt/multimodal/processors/base_processor.py": "5b05a9be3d54c539e0fde4272b2d2dbc2f2c1450b6c19eca1b1c4862eeff55b5",
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
_REQUEST = "sglang.srt.managers.schedule_batch"
_ADDER = "sglang.srt.managers.schedule_policy"
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
# In force when `settings.sees_pictures`, besides those above. Text requests pass through them as they are.
PICTURE_PATCHES: Final[tuple[Patch, ...]] = (
    Patch("V1", _BACKEND, "DeepseekV4AttnBackend._build_forward_metadata",
          ("self", "forward_batch", "max_seq_len_override", "use_prefill_cuda_graph"), "window:widen", "wrap",
          "positions of a picture would not see what follows them in it"),
    Patch("V2", "sglang.srt.entrypoints.openai.serving_chat", "OpenAIServingChat._apply_jinja_template",
          ("self", "request", "tools", "is_multimodal"), "chat:with_pictures", "wrap",
          "pictures of a chat are dropped without a word, and every prompt is empty"),
    Patch("V2b", "sglang.srt.entrypoints.openai.serving_chat", "OpenAIServingChat._validate_request",
          ("self", "request"), "chat:with_places", "wrap",
          "Messages answers 500 to a picture in a turn of the assistant"),
    Patch("V2c", "sglang.srt.entrypoints.openai.serving_responses", "OpenAIServingResponses._construct_input_messages",
          ("self", "request", "prev_response"), "chat:of_responses", "wrap",
          "Responses drops pictures of system turns, and refuses those of function results"),
    # A prefill must not stop inside a picture, and a cached prefix must not end there.
    Patch("V3", _REQUEST, "Req.init_next_round_input", ("self", "tree_cache", "cow_mamba"), "whole:match_prefix", "wrap",
          "a cached prefix could end inside a picture"),
    Patch("V3b", _REQUEST, "Req._compute_max_prefix_len", ("self", "input_len"), "whole:longest_prefix", "wrap",
          "V3 could not shorten a cached prefix"),
    Patch("V4", _REQUEST, "Req.set_extend_range", ("self", "start", "end"), "whole:end_of_step", "wrap",
          "a prefill step could stop inside a picture"),
    Patch("V4b", _ADDER, "PrefillAdder.add_one_req", ("self", "req", "has_chunked_req", "truncation_align_size"),
          "whole:admit", "wrap", "a step too short for a picture would make no progress"),
    Patch("V4c", _ADDER, "PrefillAdder.add_chunked_req", ("self", "req"), "whole:go_on", "wrap", "as V4b"),
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


#: SGLang's own way to a model class, a processor and a multimodal architecture of somebody else.
PICTURES: Final[Mapping[str, str]] = {
    settings.MODEL_PACKAGE: settings.MODELS,
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "dsv4convert.runtime.vision.processors",
    # The architecture of text checkpoints too, so that these variables must not be set for them.
    "SGLANG_EXTERNAL_MM_MODEL_ARCH": "DeepseekV4ForCausalLM",
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
    pictures = PICTURE_PATCHES if settings.sees_pictures() else ()
    return (*(patch for patch in PATCHES if patch.switch in on), *pictures)


def status() -> dict[str, Any]:
    """Return what the shim is and has done in this process, as JSON values."""
    return {
        "enabled": hook.is_enabled(),
        "installed": hook.is_installed(),
        "sglang": VERSION,
        "applied": list(hook.APPLIED),
    }
