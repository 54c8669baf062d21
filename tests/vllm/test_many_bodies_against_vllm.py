"""In part what `python -m tests.vllm.many_bodies` compares at length: three tokenizers, each with its own template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from router.prompt import PromptEncoder
from tests.vllm.many_bodies import compare, growing, same_hashes
from tests.vllm.tokenizer_files import MAKERS

if TYPE_CHECKING:
    from tests.vllm.vllm_renderer import VllmRenderer

Model = tuple[PromptEncoder, "VllmRenderer"]


@pytest.fixture(scope="module", params=MAKERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    from tests.vllm.vllm_renderer import VllmRenderer

    try:
        folder: Path = MAKERS[request.param](tmp_path_factory.mktemp(request.param))
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    encoder = PromptEncoder.load("demo-model", str(folder), ["adapter-a"], fast=True)
    assert encoder.settle(240)["default"] == "minijinja"
    renderer = VllmRenderer(folder)
    yield encoder, renderer
    renderer.close()


def test_h3_bodies_of_every_kind_have_vllms_ids(model: Model) -> None:
    counts = compare(*model, seed=3, count=80)
    assert counts.pop("refused") < 200
    assert counts == {"equal": 80}  # none is left to the engine


def test_adversarial_chats_have_the_same_hashes_with_and_without_memory(model: Model) -> None:
    encoder, _ = model
    for number, body in enumerate(growing(encoder, 5, 200)):
        assert same_hashes(encoder, body, (16, 32, 1)[number % 3]), body
