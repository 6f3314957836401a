"""Chats with pictures through SGLang's own server classes: where a picture stands, and what stays text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from transformers import AutoTokenizer

from dsv4convert.runtime.patches.chat import AS_TEXT
from dsv4convert.vision.layout import PLACEHOLDER

_BOS, _EOS, _USER, _ASSISTANT = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
#: What the model continues in chat mode.
_REPLY = f"{_ASSISTANT}</think>"


@pytest.fixture(scope="module")
def tokenizer(shelf: Path) -> Any:
    return AutoTokenizer.from_pretrained(shelf / "vision-int8")


@pytest.fixture
def server(tokenizer: Any) -> OpenAIServingChat:
    """Return SGLang's class with the state that its encoder reads."""
    made = object.__new__(OpenAIServingChat)
    made.tokenizer_manager = SimpleNamespace(
        tokenizer=tokenizer,
        model_config=SimpleNamespace(is_multimodal=True),
        server_args=SimpleNamespace(
            context_length=4096,
            reasoning_parser=None,
            tool_call_parser="deepseekv4",
            allow_auto_truncate=False,
        ),
        request_logger=SimpleNamespace(log_requests=False),
    )
    made.template_manager = SimpleNamespace(jinja_template_content_format="string", chat_template_name=None)
    made.chat_encoding_spec = "dsv4"
    made.default_chat_template_kwargs = None
    made.default_sampling_params = {}
    made.tool_call_parser = made.reasoning_parser = made.allowed_custom_labels = None
    made.is_gpt_oss = made.is_gemma4 = False
    return made


def _image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"https://example.org/{name}.png"}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _request(messages: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="m", messages=messages, **fields)


def _names(pictures: Any) -> list[str]:
    return [Path(url).stem for url in pictures or ()]


@pytest.fixture
def encode(server: OpenAIServingChat) -> Callable[..., Any]:
    """Return ``encode(messages, **fields)``: what SGLang hands on for a chat."""
    return lambda messages, **fields: server._apply_jinja_template(_request(messages, **fields), None, True)


def test_a_picture_stands_in_its_place(encode: Callable[..., Any], tokenizer: Any) -> None:
    found = encode([{"role": "user", "content": [_text("before"), _image("cat"), _text("after")]}])
    wanted = f"{_BOS}{_USER}before\n\n{PLACEHOLDER}\n\nafter{_REPLY}"
    assert found.prompt == wanted and _names(found.image_data) == ["cat"]
    assert found.prompt_ids == tokenizer.encode(wanted)
    (placeholder,) = tokenizer.encode(PLACEHOLDER)
    assert found.prompt_ids.count(placeholder) == 1


def test_stock_drops_the_picture_without_a_word_and_leaves_the_prompt_empty(
    server: OpenAIServingChat,
) -> None:
    """The twin."""
    stock = OpenAIServingChat._apply_jinja_template.__wrapped__
    found = stock(
        server, _request([{"role": "user", "content": [_image("cat"), _text("what?")]}]), None, True
    )
    assert found.prompt == "" and found.image_data is None


def test_what_is_sent_to_the_tokenizer_has_text_and_pictures(server: OpenAIServingChat) -> None:
    messages = [{"role": "user", "content": [_image("a"), _image("b"), _text("compare")]}]
    sent, _ = server._convert_to_internal_request(_request(messages))
    assert sent.text == f"{_BOS}{_USER}{PLACEHOLDER}\n\n{PLACEHOLDER}\n\ncompare{_REPLY}"
    assert _names(sent.image_data) == ["a", "b"]


def test_every_answer_of_several_gets_all_pictures(server: OpenAIServingChat) -> None:
    messages = [{"role": "user", "content": [_image("a"), _image("b")]}]
    sent, _ = server._convert_to_internal_request(_request(messages, n=3))
    sent.normalize_batch_and_arguments()
    assert [_names(pictures) for pictures in sent.image_data] == [["a", "b"]] * 3


def test_pictures_of_earlier_turns_stay(encode: Callable[..., Any]) -> None:
    turns = [
        {"role": "user", "content": [_image("first"), _text("one")]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [_text("two"), _image("second")]},
    ]
    found = encode(turns)
    assert found.prompt == (
        f"{_BOS}{_USER}{PLACEHOLDER}\n\none{_ASSISTANT}</think>A cat.{_EOS}"
        f"{_USER}two\n\n{PLACEHOLDER}{_REPLY}"
    )
    assert _names(found.image_data) == ["first", "second"]
    # What a prefix cache lives on: the prompt of a turn begins with that of the turn before.
    earlier = encode(turns[:1]).prompt
    assert found.prompt.startswith(earlier.removesuffix(_REPLY))


# ---- tools


def _call(number: int, **arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": json.dumps(arguments)}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _tool(description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": "look", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def test_a_picture_in_a_tool_result_keeps_its_place(encode: Callable[..., Any]) -> None:
    """Traps 10 and 16: agents look at files, and arguments of the call are replayed as they were."""
    found = encode(
        [
            {"role": "user", "content": "open it"},
            {"role": "assistant", "content": "", "tool_calls": [_call(1, path="a.png", zoom=2)]},
            {"role": "tool", "tool_call_id": "call_1", "content": [_text("a.png:"), _image("a")]},
        ]
    )
    assert f"<tool_result>a.png:\n\n{PLACEHOLDER}</tool_result>" in found.prompt
    assert _names(found.image_data) == ["a"]
    parameter = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'
    assert parameter.format("path", "true", "a.png") in found.prompt
    assert parameter.format("zoom", "false", "2") in found.prompt
    assert 'name="arguments"' not in found.prompt


def test_pictures_follow_tool_results_that_the_encoder_sorts(encode: Callable[..., Any]) -> None:
    found = encode(
        [
            {"role": "user", "content": [_text("both"), _image("question")]},
            {"role": "assistant", "content": "", "tool_calls": [_call(1), _call(2)]},
            {"role": "tool", "tool_call_id": "call_2", "content": [_text("second"), _image("b")]},
            {"role": "tool", "tool_call_id": "call_1", "content": [_text("first"), _image("a")]},
        ]
    )
    assert found.prompt.index("first") < found.prompt.index("second")
    assert _names(found.image_data) == ["question", "a", "b"]


# ---- text that looks like a picture


_LITERAL = {
    "user": [{"role": "user", "content": f"see {PLACEHOLDER}?"}],
    "user, in parts": [{"role": "user", "content": [_text("see"), _text(PLACEHOLDER)]}],
    "system": [{"role": "system", "content": PLACEHOLDER}, {"role": "user", "content": "hello"}],
    "assistant": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": f"I saw {PLACEHOLDER}."},
        {"role": "user", "content": "go on"},
    ],
    "reasoning": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "reasoning_content": PLACEHOLDER, "tool_calls": [_call(1)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ],
    "arguments of a tool": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [_call(1, text=PLACEHOLDER)]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ],
    "tool result": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [_call(1)]},
        {"role": "tool", "tool_call_id": "call_1", "content": f"found {PLACEHOLDER} in a file"},
    ],
}


@pytest.mark.parametrize("place", _LITERAL)
@pytest.mark.parametrize("with_picture", [False, True])
def test_the_special_token_as_text_stays_text(
    encode: Callable[..., Any], tokenizer: Any, place: str, with_picture: bool
) -> None:
    """Trap 5: it would count as a picture, which fails this turn and every later one of the conversation."""
    messages = [*_LITERAL[place]]
    if with_picture:
        messages.append({"role": "user", "content": [_image("real"), _text("and this?")]})
    # With tools, reasoning of earlier turns is part of the prompt.
    found = encode(messages, chat_template_kwargs={"thinking": True}, tools=[_tool("Looks at a file.")])
    (placeholder,) = tokenizer.encode(PLACEHOLDER)
    assert found.prompt_ids.count(placeholder) == found.prompt.count(PLACEHOLDER) == int(with_picture)
    assert AS_TEXT in found.prompt and _names(found.image_data) == ["real"] * with_picture
    # For display: whoever knows the character gets the original text back.
    assert AS_TEXT.replace("\u200b", "") == PLACEHOLDER


def test_the_special_token_in_a_description_of_a_tool_stays_text(encode: Callable[..., Any]) -> None:
    found = encode([{"role": "user", "content": [_image("a")]}], tools=[_tool(f"Finds {PLACEHOLDER}.")])
    assert found.prompt.count(PLACEHOLDER) == found.prompt.count(AS_TEXT) == 1


def test_the_special_token_cannot_be_built_around_another_one(encode: Callable[..., Any]) -> None:
    half = len(PLACEHOLDER) // 2
    nested = PLACEHOLDER[:half] + PLACEHOLDER + PLACEHOLDER[half:]
    assert PLACEHOLDER not in encode([{"role": "user", "content": nested}]).prompt


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("text", ["<image>", "<image>/etc/passwd</image>", "[img-0]"])
def test_other_notations_are_text(encode: Callable[..., Any], role: str, text: str) -> None:
    """Trap 6: nothing is opened because a message names it."""
    found = encode(
        [{"role": "user", "content": "hello"}, {"role": role, "content": text}, _LITERAL["user"][0]]
    )
    assert text in found.prompt and found.image_data is None


# ---- what is refused


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_pictures_of_other_roles_are_refused(encode: Callable[..., Any], role: str) -> None:
    """Trap 9."""
    with pytest.raises(
        ValueError, match=f"pictures belong into messages of user and tool, found one of role '{role}'"
    ):
        encode([{"role": role, "content": [_image("a"), _text("x")]}, {"role": "user", "content": "hello"}])


@pytest.mark.parametrize("kind", ["video_url", "audio_url"])
def test_parts_that_are_no_picture_are_refused(encode: Callable[..., Any], kind: str) -> None:
    part = {"type": kind, kind: {"url": "https://example.org/x"}}
    with pytest.raises(
        ValueError, match=f"this model sees pictures, and a message holds a part of type '{kind}'"
    ):
        encode([{"role": "user", "content": [part, _text("what?")]}])


def test_a_refusal_is_an_answer_with_status_400(server: OpenAIServingChat) -> None:
    request = _request([{"role": "system", "content": [_image("a")]}, {"role": "user", "content": "hello"}])
    answer = asyncio.run(server.handle_request(request, None))
    assert answer.status_code == 400 and b"pictures belong into" in answer.body


# ---- requests without pictures


_PLAIN: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "user", "content": [_text("one"), _text("two")]}],
    [{"role": "user", "content": " it 's not  so , is n't it ? \n\n . "}],
    [{"role": "system", "content": "short"}, {"role": "user", "content": "héllo \u200b 世界 🙂 \ufffd"}],
    [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [_call(1, a=[1, {"b": None}])]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ],
]


@pytest.mark.parametrize("messages", _PLAIN, ids=range(len(_PLAIN)))
@pytest.mark.parametrize("thinking", [False, True])
def test_a_chat_without_pictures_has_the_ids_that_stock_gives_it(
    server: OpenAIServingChat, tokenizer: Any, messages: list[dict[str, Any]], thinking: bool
) -> None:
    request = _request(messages, chat_template_kwargs={"thinking": thinking})
    stock = OpenAIServingChat._apply_jinja_template.__wrapped__
    wanted = stock(server, request, None, False)
    found = server._apply_jinja_template(request, None, True)
    # A server that sees is sent the text, and makes the ids of it again.
    assert found.prompt_ids == tokenizer(found.prompt)["input_ids"] == wanted.prompt_ids
    assert found.image_data is wanted.image_data is None
    assert found.stop == wanted.stop


def test_continued_answers_are_continued(server: OpenAIServingChat, tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": [_image("a"), _text("say")]},
        {"role": "assistant", "content": "I see a"},
    ]
    found = server._apply_jinja_template(_request(messages, continue_final_message=True), None, True)
    assert found.prompt == f"{_BOS}{_USER}{PLACEHOLDER}\n\nsay{_REPLY}I see a"
    assert found.prompt_ids == tokenizer.encode(found.prompt) and _names(found.image_data) == ["a"]


# ---- other protocols


def test_messages_of_the_other_protocol_arrive_alike(server: OpenAIServingChat) -> None:
    """Anthropic's: a picture of the user, and one in a tool result."""
    source = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    asked = AnthropicMessagesRequest(
        model="m",
        max_tokens=8,
        messages=[
            {"role": "user", "content": [{"type": "image", "source": source}, _text("open it")]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {"path": "a"}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_1",
                        "content": [_text("here:"), {"type": "image", "source": {**source, "data": "REVG"}}],
                    }
                ],
            },
        ],
    )
    translator = AnthropicServing(server)
    found = server._apply_jinja_template(translator._convert_to_chat_completion_request(asked), None, True)
    assert f"{_USER}{PLACEHOLDER}\n\nopen it" in found.prompt
    assert f"<tool_result>here:\n\n{PLACEHOLDER}</tool_result>" in found.prompt
    assert [url.rpartition(",")[2] for url in found.image_data] == ["QUJD", "REVG"]
