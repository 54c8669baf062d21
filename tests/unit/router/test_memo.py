"""The memo gives what tokenising and hashing the whole text gives, and remembers only so much."""

from __future__ import annotations

import random
from array import array

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from router.cuts import SNIPPETS, prove, safe_cuts
from router.hashing import HashChain, chain, pack_token_ids, root_hash
from router.memo import PrefixMemo
from router.model_files import load_model_files
from router.tokenizing import TextEncoder

ROOT = root_hash("m")


@pytest.fixture(scope="module")
def qwen() -> TextEncoder:
    return TextEncoder(load_model_files("builtin").tokenizer, fast=False)


def whole(encoder: TextEncoder, text: str, block_size: int = 16) -> tuple[int, HashChain]:
    ids = encoder.ids(text)
    return len(ids), HashChain(b"".join(chain(ROOT, pack_token_ids(ids), block_size)))


def turns(draw: random.Random, count: int) -> list[str]:
    """Rendered turns made of what tends to go wrong."""
    words = ["hello", " world", "<|im_end|>\n<|im_start|>user\n", "<think>", "</tool_call>", "\n", *SNIPPETS]
    return [
        f"<|im_start|>{role}\n{''.join(draw.choice(words) for _ in range(draw.randint(0, 60)))}<|im_end|>\n"
        for role in draw.choices(("system", "user", "assistant", "tool"), k=count)
    ]


def test_growing_and_branching_chats_have_the_hashes_of_the_whole_text(qwen: TextEncoder) -> None:
    draw, memo = random.Random(3), PrefixMemo(qwen.packed, qwen.cuts)
    for _ in range(60):
        chat = turns(draw, 8)
        for end in range(1, 9):
            text = "".join(chat[:end]) + "<|im_start|>assistant\n"
            assert memo.chain(ROOT, text, 16) == whole(qwen, text)
        branch = "".join(chat[:4] + turns(draw, 2))
        assert memo.chain(ROOT, branch, 16) == whole(qwen, branch)


@pytest.mark.parametrize("block_size", [1, 16, 32, 128])
def test_every_block_size_and_root_has_a_chain_of_its_own(qwen: TextEncoder, block_size: int) -> None:
    memo = PrefixMemo(qwen.packed, qwen.cuts)
    text = "".join(turns(random.Random(4), 12))
    assert memo.chain(ROOT, text, block_size) == whole(qwen, text, block_size)
    assert memo.chain(root_hash("m", "lora"), text, block_size)[1] != memo.chain(ROOT, text, block_size)[1]
    assert memo.chain(ROOT, text, block_size) == whole(qwen, text, block_size)


def test_a_new_turn_tokenises_only_what_is_new(qwen: TextEncoder) -> None:
    seen: list[str] = []

    def encode(piece: str) -> bytes:
        seen.append(piece)
        return qwen.packed(piece)

    memo = PrefixMemo(encode, qwen.cuts)
    old = "".join(
        f"<|im_start|>user\nQuestion {i} is long enough to be a piece of its own, is it not?<|im_end|>\n"
        for i in range(50)
    )
    memo.chain(ROOT, old, 16)
    seen.clear()
    memo.chain(ROOT, old + "<|im_start|>user\nAnd now?<|im_end|>\n", 16)
    assert sum(map(len, seen)) < 200


def test_memory_is_bounded_whatever_comes_and_hot_prefixes_stay(qwen: TextEncoder) -> None:
    memo = PrefixMemo(lambda piece: array("I", range(len(piece) // 4)).tobytes(), qwen.cuts, max_bytes=200_000)
    hot = "<|im_start|>system\n" + "Be kind. " * 100
    for i in range(3000):
        memo.chain(ROOT, f"<|im_start|>user\n{i} " + "x" * 300, 16)
        memo.chain(ROOT, f"{hot}<|im_start|>user\n{i} " + "y" * 100, 16)
        assert memo.bytes <= 200_000
    hits = memo.hits
    memo.chain(ROOT, f"{hot}<|im_start|>user\nanother one " + "y" * 100, 16)
    assert memo.hits == hits + 1


def test_what_is_dropped_is_not_kept_alive_by_what_stays(qwen: TextEncoder) -> None:
    memo = PrefixMemo(qwen.packed, qwen.cuts, max_bytes=20_000)
    for i in range(200):
        memo.chain(ROOT, "".join(f"<|im_start|>user\n{i} {turn} " + "word " * 30 for turn in range(6)), 16)
        kept = set(map(id, memo._nodes.values()))
        assert all(node.parent is None or id(node.parent) in kept for node in memo._nodes.values())


def test_a_text_of_nothing_but_special_tokens_makes_few_pieces(qwen: TextEncoder) -> None:
    memo = PrefixMemo(qwen.packed, qwen.cuts)
    text = "<|im_start|>" * 20_000
    assert len(memo.split(text)) <= len(text) // 64
    assert memo.chain(ROOT, text, 16) == whole(qwen, text)


def test_pieces_of_a_prefix_are_pieces_of_the_longer_text(qwen: TextEncoder) -> None:
    memo, draw = PrefixMemo(qwen.packed, qwen.cuts), random.Random(8)
    for _ in range(200):
        chat = turns(draw, 6)
        short, long = memo.split("".join(chat[:3])), memo.split("".join(chat))
        assert "".join(long) == "".join(chat)
        assert short[:-1] == long[: len(short) - 1]


def little(*added: AddedToken, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={chr(c): c for c in range(32, 127)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    return tokenizer


@pytest.mark.parametrize(
    ("added", "safe"),
    [
        ([AddedToken("<|a|>", normalized=False)], ["<|a|>"]),
        ([AddedToken("<|a|>", normalized=False, lstrip=True)], []),
        ([AddedToken("<|a|>", normalized=False, single_word=True)], []),
        ([AddedToken("<|a|>", normalized=False), AddedToken("x<|a|>", normalized=False)], []),
        ([AddedToken("<|a|>", normalized=False), AddedToken("<|b|><|", normalized=False)], ["<|b|><|"]),
        ([AddedToken("word", normalized=False)], []),
        ([AddedToken(" <|a|>", normalized=False)], []),
    ],
    ids=str,
)
def test_only_tokens_that_nothing_can_blur_are_cut_before(added: list[AddedToken], safe: list[str]) -> None:
    assert safe_cuts(little(*added)) == safe


def test_a_normalised_token_is_safe_only_without_a_normaliser() -> None:
    token = AddedToken("<|a|>", normalized=True)
    assert safe_cuts(little(token)) == ["<|a|>"]
    assert safe_cuts(little(token, normalizer=normalizers.Lowercase())) == []


def test_truncation_and_padding_rule_cuts_out() -> None:
    tokenizer = little(AddedToken("<|a|>", normalized=False))
    tokenizer.enable_truncation(5)
    assert safe_cuts(tokenizer) == []


def test_the_proof_finds_a_cut_that_changes_ids() -> None:
    tokenizer = little(AddedToken("<|a|>", normalized=False, lstrip=True))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def joined(text: str) -> list[int]:
        at = text.find("<|a|>", 1)
        return encode(text) if at < 0 else encode(text[:at]) + encode(text[at:])

    assert prove(encode, joined, ["<|a|>"])
    assert prove(encode, encode, ["<|a|>"]) == ""
