from __future__ import annotations

import pytest

from replicas.emulated.errors import ApiError
from replicas.emulated.models import ServedModels, parse_module


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ada", ("ada", "ada")), ("ada=/models/ada", ("ada", "/models/ada")), ('{"name": "a", "path": "p"}', ("a", "p"))],
)
def test_modules_have_a_name_and_a_path(text: str, expected: tuple[str, str]) -> None:
    assert parse_module(text) == expected


@pytest.mark.parametrize("text", ["", "=p", '{"name": "a"}', "{"])
def test_a_module_without_them_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lora_modules"):
        parse_module(text)


def test_adapters_come_and_go_and_ids_are_never_used_again() -> None:
    models = ServedModels("base", ["ada"])
    models.load("bob", "/b")
    assert [models.lora_id(name) for name in ("base", "ada", "bob")] == [None, 1, 2]
    models.unload("ada")
    models.load("ada", "/a")
    models.load("bob", "/b2", in_place=True)
    assert [models.lora_id(name) for name in ("ada", "bob")] == [3, 2]
    assert [(card["id"], card["root"], card["parent"]) for card in models.cards()] == [
        ("base", "base", None),
        ("bob", "/b2", "base"),
        ("ada", "/a", "base"),
    ]


@pytest.mark.parametrize(("name", "path"), [("base", "/b"), ("ada", "/a"), ("", "/a"), ("x", "")])
def test_what_cannot_be_loaded_is_a_400(name: str, path: str) -> None:
    with pytest.raises(ApiError) as error:
        ServedModels("base", ["ada"]).load(name, path)
    assert (error.value.status, error.value.kind) == (400, "InvalidUserInput")


def test_names_that_are_not_served_are_a_404() -> None:
    models = ServedModels("base", ["ada"])
    assert [models.resolve({"model": name}) for name in (None, "", "base", "ada")] == ["base", "base", "base", "ada"]
    models.unload("ada")
    with pytest.raises(ApiError) as unserved:
        models.resolve({"model": "ada"})
    with pytest.raises(ApiError) as unloaded:
        models.unload("ada")
    assert unserved.value.status == unloaded.value.status == 404
