"""Chats with images: what the router says of a prompt's beginning is what vLLM makes of it, image and all."""

from __future__ import annotations

import asyncio
import base64
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.chat_template import RenderOptions
from router.errors import UnknownPrompt
from router.hashing import pack_token_ids
from router.prompt import CHAT_PATH, PromptEncoder
from tests.vllm.media_model import TEMPLATES, tiny_idefics3
from tests.vllm.test_prompts_against_vllm import texts

if TYPE_CHECKING:
    from vllm.inputs import MultiModalInput

Render = Callable[[dict[str, Any]], "MultiModalInput"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def vllms(folder: Path, vllm_is_there: None) -> Any:
    """vLLM's settings and renderer for the model. The first image that it renders takes it some ten seconds."""
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig
    from vllm.renderers import renderer_from_config

    with warnings.catch_warnings(action="ignore"):
        config = ModelConfig(model=str(folder), dtype="float32", max_model_len=4096)
        return config, renderer_from_config(VllmConfig(model_config=config, device_config=DeviceConfig("cpu")))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(params=TEMPLATES)
def model(
    request: pytest.FixtureRequest, folder: Path, vllms: Any, runner: asyncio.Runner
) -> tuple[PromptEncoder, Render]:
    """The router's encoder and vLLM's renderer for the same model."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.online_renderer import OnlineRenderer

    template = TEMPLATES[request.param]
    config, renderer = vllms
    online = OnlineRenderer(
        model_config=config,
        renderer=renderer,
        request_logger=None,
        chat_template=template,
        chat_template_content_format="auto",
    )

    def render(body: dict[str, Any]) -> MultiModalInput:
        with warnings.catch_warnings(action="ignore"):
            result: Any = runner.run(online.render_chat(ChatCompletionRequest(**body)))
        assert isinstance(result, tuple), result
        (prompt,) = result[1]
        return prompt  # type: ignore[no-any-return]

    return PromptEncoder.load("m", str(folder), options=RenderOptions(chat_template=template)), render


def image(color: str, size: tuple[int, int] = (70, 60)) -> dict[str, Any]:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


def check(model: tuple[PromptEncoder, Render], messages: list[dict[str, Any]]) -> int:
    """Tokens of the head; fails where vLLM's prompt does not begin with it."""
    encoder, render = model
    body = {"model": "m", "messages": messages}
    head = encoder.prompt(CHAT_PATH, body)
    assert not head.whole
    theirs = render(body)
    assert pack_token_ids(theirs["prompt_token_ids"][: head.num_tokens]) == head.token_ids
    assert head.num_tokens < theirs["mm_placeholders"]["image"][0].offset
    return head.num_tokens


SYSTEM = {"role": "system", "content": "You look at images and say what is in them, in one sentence. " * 3}


def test_e14_the_head_is_what_vllm_has_before_any_image(model: tuple[PromptEncoder, Render]) -> None:
    heads = {
        check(model, [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Look: "}, image(color, size)]}])
        for color in ("red", "blue")
        for size in ((70, 60), (200, 20))
    }
    assert len(heads) == 1
    assert heads.pop() > 40


def test_e14_vllm_tells_images_apart_by_what_is_in_them(model: tuple[PromptEncoder, Render]) -> None:
    _, render = model
    red, again, blue = (
        render({"model": "m", "messages": [{"role": "user", "content": [image(color)]}]})
        for color in ("red", "red", "blue")
    )
    assert red["prompt_token_ids"] == blue["prompt_token_ids"]  # so the ids alone would give credit for another image
    assert red["mm_hashes"] == again["mm_hashes"] != blue["mm_hashes"]


turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts}), min_size=1, max_size=3
)
parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}) | st.just("image"), max_size=3)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(before=turns, content=parts, after=turns)
def test_whatever_stands_around_an_image_the_head_is_vllms(
    model: tuple[PromptEncoder, Render],
    before: list[dict[str, Any]],
    content: list[Any],
    after: list[dict[str, Any]],
) -> None:
    pictures = [image("green") if part == "image" else part for part in [*content, "image"]]
    with suppress(UnknownPrompt):
        check(model, [*before, {"role": "user", "content": pictures}, *after])
