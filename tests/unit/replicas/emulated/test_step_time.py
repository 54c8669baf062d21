from __future__ import annotations

from pathlib import Path

import pytest

from replicas.emulated.step_time import DEFAULT_PROFILE, PROFILES, StepTime, StepWork, load_profile

WORK = StepWork(prefill_tokens=1000, decoding_seqs=10, prefill_attention=2e6, decode_context=50_000)


def test_every_term_of_the_formula_counts() -> None:
    model = StepTime(a=1.0, b=2e-3, c=3e-2, d=4e-6, e=5e-5)
    assert model.seconds(WORK) == pytest.approx(1.0 + 2.0 + 0.3 + 8.0 + 2.5)


def test_the_default_profile_prefills_a_full_step_in_about_half_a_second() -> None:
    step = PROFILES[DEFAULT_PROFILE].seconds(StepWork(prefill_tokens=2048, prefill_attention=2048 * 1024))
    assert step == pytest.approx(0.574, abs=0.01)


def test_linear_prefills_at_its_rate_and_decodes_for_free() -> None:
    model = load_profile("linear:10000")
    assert model.seconds(StepWork(prefill_tokens=2500)) == pytest.approx(0.25)
    assert model.seconds(StepWork(decoding_seqs=100, decode_context=10**6)) == 0.0


@pytest.mark.parametrize("name", ["p.json", "p.yaml", "p.yml"])
def test_a_file_gives_all_five_parameters(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text('{"a": 1e-2, "b": 0.001, "c": 0, "d": 3e-8, "e": 0}')
    assert load_profile(str(path)) == StepTime(a=1e-2, b=1e-3, c=0.0, d=3e-8, e=0.0)


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"a": 1}', '{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}', '{"a":-1,"b":0,"c":0,"d":0,"e":0}',
     '{"a":"x","b":0,"c":0,"d":0,"e":0}', '{"a":.inf,"b":0,"c":0,"d":0,"e":0}', '{"a":null,"b":0,"c":0,"d":0,"e":0}'],
)  # fmt: skip
def test_a_bad_file_is_refused_with_the_choices(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match="choose one of a100x4-qwen72b, linear:TOKENS_PER_SECOND"):
        load_profile(str(path))


@pytest.mark.parametrize("text", ["", "h100", "linear:", "linear:x", "linear:0", "linear:-3", "linear:nan", "no.json"])
def test_a_bad_name_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ValueError, match="choose one of a100x4-qwen72b, linear:TOKENS_PER_SECOND"):
        load_profile(text)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_parameters_are_finite_and_not_negative(value: float) -> None:
    with pytest.raises(ValueError, match="parameter d"):
        StepTime(a=0, b=0, c=0, d=value, e=0)
