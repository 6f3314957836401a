"""SGLang's own HTTP server around our chat encoding and our processor; what the model says is a rule.

Real: every route, the serving classes of all protocols, the reading of requests into tokens and pictures,
and all checks on the way. Stand-in: whatever is behind the scheduler's door.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import uvicorn
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize, OpenAIServingTokenize
from sglang.srt.environ import envs
from sglang.srt.managers import multimodal_processor as table
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.parser.template_manager import TemplateManager
from transformers import AutoTokenizer

from dsv4convert.runtime import contract
from tests.fakechat import follow
from tests.sglang import world

CONTEXT: Final = 65536


class Engine(TokenizerManager):
    """Reads requests as SGLang does, and answers with printable characters that follow from all tokens."""

    def __init__(self, root: Path, limit: int) -> None:
        self.server_args = args = world.server_args(root)
        args.limit_mm_data_per_request = {"image": limit}
        args.served_model_name = "tiny"
        args.tool_call_parser, args.reasoning_parser = "deepseekv4", "deepseek-v4"
        self.model_config = ModelConfig(model_path=str(root), quantization="fp8", dtype="bfloat16")
        self.tokenizer = AutoTokenizer.from_pretrained(root)
        table.import_processors(contract.PICTURES["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"], overwrite=True)
        config = self.model_config
        self.mm_processor = table.get_mm_processor(
            config.hf_config, args, self.tokenizer, None, model_config=config
        )
        self.served_model_name, self.model_path = "tiny", str(root)
        config.context_len = self.context_len = CONTEXT
        self.max_req_input_len, self.num_reserved_tokens = CONTEXT - 8, 0
        self.validate_total_tokens, self.allow_auto_truncate = True, False
        self.is_generation, self.gracefully_exit = True, False
        self.server_status = ServerStatus.Up
        self.async_dynamic_batch_tokenizer = None
        self.request_logger = SimpleNamespace(log_requests=False)

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return []

    def create_abort_task(self, obj: Any) -> None:
        return None

    def _create_tokenized_object(
        self, obj: Any, text: Any, ids: Any, embeds: Any, pictures: Any, *more: Any
    ) -> Any:
        return SimpleNamespace(ids=ids, seen=pictures.padded_input_ids if pictures else ids)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        obj.normalize_batch_and_arguments()
        read = await self._tokenize_one_request(obj)
        limit = obj.sampling_params["max_new_tokens"]
        letters = [follow([*(token % 2**32 for token in read.seen), n]) for n in range(limit)]
        text = "".join(map(_letter, letters))
        for length in range(1, limit + 1) if obj.stream else (limit,):
            ended = {"type": "length", "length": limit} if length == limit else None
            yield {
                "text": text[:length],
                "output_ids": letters[:length],
                "meta_info": self._meta(obj, read.ids, letters[:length]) | {"finish_reason": ended},
            }

    def _meta(self, obj: Any, ids: Sequence[int], letters: Sequence[int]) -> dict[str, Any]:
        top = [[(gap, n, _letter(n)) for gap, n in ((-0.5, n), (-2.5, n + 1))] for n in letters]
        return {
            "id": obj.rid,
            "prompt_tokens": len(ids),
            "completion_tokens": len(letters),
            "cached_tokens": 0,
            "output_token_logprobs": [rows[0] for rows in top],
            "output_top_logprobs": top,
            "weight_version": "default",
            "e2e_latency": 0.0,
        }


def _letter(token: int) -> str:
    return chr(97 + token % 26)


@contextmanager
def front(root: Path, limit: int = 12) -> Iterator[str]:
    """Serve a converted Vision checkpoint, and yield the address; one at a time in a process."""
    engine, templates = Engine(root, limit), TemplateManager()
    app = http_server.app
    http_server.set_global_state(http_server._GlobalState(engine, templates, {}))
    app.state.openai_serving_chat = chat = OpenAIServingChat(engine, templates)
    app.state.anthropic_serving = AnthropicServing(chat)
    app.state.openai_serving_responses = OpenAIServingResponses(engine, templates)
    app.state.openai_serving_tokenize = OpenAIServingTokenize(engine, templates)
    app.state.openai_serving_detokenize = OpenAIServingDetokenize(engine)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.02)
    try:
        # Asked for its health, it answers without a token.
        with envs.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION.override(False):
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        engine.mm_processor.io_executor.shutdown()
