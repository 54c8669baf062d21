"""A model's chat templates: which of them renders a body, and with what."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from router.chat_messages import ContentFormat, malformed
from router.chat_template import ChatTemplate, RenderOptions, compile_template
from router.errors import UnknownPrompt
from router.model_files import ModelFiles
from router.quick_template import prove_quick

# vLLM renders these without the model's Jinja template.
_OWN_RENDERERS = frozenset({"gpt_oss", "deepseek_v32", "deepseek_v4"})

logger = logging.getLogger("whohas.templates")


class ModelTemplates:
    """Safe to share between threads. `fast`: find out in the background which of the templates minijinja can render;
    jinja2 renders them until then.
    """

    def __init__(self, files: ModelFiles, options: RenderOptions, *, fast: bool = False) -> None:
        self.backends: dict[str, str] = {}  # by name of a template: minijinja, or jinja2 and why
        self._files = files
        self._options = options
        self._named = {**files.templates}
        if options.chat_template:
            self._named["default"] = files.templates.get(options.chat_template, options.chat_template)
            self._named.pop("tool_use", None)
        self._quick: dict[str, ChatTemplate] = {}
        self.prover = threading.Thread(target=self._prove, name="whohas-templates", daemon=True)
        if fast:
            self.prover.start()

    def choose(self, body: Mapping[str, Any], *, tools: bool) -> ChatTemplate:
        """The template for this body. Raises `UnknownPrompt`."""
        if self._files.model_type in _OWN_RENDERERS:
            raise UnknownPrompt("template", f"{self._files.model_type} is rendered by code, not by a template")
        asked = body.get("chat_template")
        if asked is not None and not self._options.trust_request_chat_template:
            raise UnknownPrompt("template", "a client's chat_template is left to the engine")
        if asked:
            if not isinstance(asked, str):
                raise malformed("chat_template must be a string")
            return compile_template(self._files.templates.get(asked, asked))
        name = "tool_use" if tools and "tool_use" in self._named else "default"
        if name not in self._named:
            raise UnknownPrompt("template", "the model has no chat template")
        return self._quick.get(name) or compile_template(self._named[name])

    def content_format(self, template: ChatTemplate) -> ContentFormat:
        wanted = self._options.content_format
        return template.content_format if wanted == "auto" else wanted

    def _prove(self) -> None:
        for name in self._named.keys() & {"default", "tool_use"}:
            try:
                template = ChatTemplate(self._named[name])
                quick, why = prove_quick(template, self._files.special_tokens, self.content_format(template))
            except Exception as error:  # a template that can't be used says so to each request
                quick, why = None, f"{type(error).__name__}: {error}"
            self.backends[name] = f"jinja2: {why}" if quick is None else "minijinja"
            logger.info("chat template %r is rendered by %s", name, self.backends[name])
            if quick is not None:
                template.quick = quick.render
                self._quick[name] = template
