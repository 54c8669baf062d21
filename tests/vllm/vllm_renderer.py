"""vLLM's own renderer on a tokenizer's files, with no engine: request body -> token ids."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer

from tests.vllm.vllm_scheduler import SHAPE


class Refused(Exception):
    """vLLM wouldn't serve this body."""


class VllmRenderer:
    """`folder` has the tokenizer's files (see `tests.vllm.tokenizer_files`); a config.json is added."""

    def __init__(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": 151_936}))
        model = ModelConfig(model=str(folder), dtype="float32", max_model_len=SHAPE["max_position_embeddings"])
        self._renderer = OnlineRenderer(
            model_config=model,
            renderer=renderer_from_config(VllmConfig(model_config=model, device_config=DeviceConfig("cpu"))),
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
        )
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self._runner.close()

    def token_ids(self, path: str, body: Mapping[str, Any]) -> list[list[int]]:
        """Ids of every prompt in the body. Raises `Refused` where vLLM answers with an error."""
        try:
            # vLLM's request models warn of fields that OpenAI deprecates.
            with warnings.catch_warnings(action="ignore"):
                prompts = self._runner.run(self._prompts(path, body))
        except Exception as error:  # whatever it is, a server would turn it into an answer to the client
            raise Refused(f"{type(error).__name__}: {error}") from error
        if isinstance(prompts, ErrorResponse):
            raise Refused(prompts.error.message)
        return [list(prompt["prompt_token_ids"]) for prompt in prompts]

    async def _prompts(self, path: str, body: Mapping[str, Any]) -> Any:
        if path == "/v1/completions":
            return await self._renderer.render_completion(CompletionRequest(**body))
        if path == "/tokenize":
            asked = TokenizeChatRequest(**body)
            tools = [tool.model_dump() for tool in asked.tools] if asked.tools is not None else None
            return (await self._renderer.preprocess_chat(asked, asked.messages, None, "auto", None, tools))[1]
        result = await self._renderer.render_chat(ChatCompletionRequest(**body))
        return result[1] if isinstance(result, tuple) else result
