"""Tokenizers in GGUF files give the ids that llama.cpp and transformers give for the same vocabulary."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from muxk.models.errors import ModelError
from muxk.models.resolve import GgufSource
from muxk.models.tokenizer import Tokenizer, load_tokenizer
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder
from transformers import AutoTokenizer, PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CORPUS = [
    f"The {noun} of {number} says: it's {noun}'s way!\n\tdef f(x):\n    return x + {number}  # été 你好"
    for noun in ("quick brown fox", "lazy dog", "river bank", "old saying", "sailor")
    for number in (7, 42, 1984, 31415926)
]
TEXTS = (
    "The quick brown fox of 1984 says: it's",
    "I'LL don't 3.14159e10!?",
    "def f(x):\n    return x  # c\n\n\n",
    "tab\t\tx\r\n  \n",
    "été 你好 🎉 ½ Ⅷ",
    "a  b   c    d \n e ",
    "",
)


def write_tokenizer(path: Path, kind: str, tokens: list[str], types: list[int], **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def loaded(path: Path) -> Tokenizer:
    return load_tokenizer(GgufSource("tiny", path))


def peer(path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def trained(encoder: Encoder, **settings: Any) -> tuple[list[str], list[str]]:
    """Tokens by id and merges, each as two tokens with a space between."""
    encoder.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, show_progress=False, **settings))
    tokens = sorted(encoder.get_vocab(), key=encoder.get_vocab().__getitem__)
    return tokens, [" ".join(merge) for merge in json.loads(encoder.to_str())["model"]["merges"]]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a byte-level vocabulary under the name of a pre-tokenizer."""
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = trained(encoder, initial_alphabet=alphabet)
    whole = "Ġunreachable"
    tokens += [whole, "<begin>", "<end>", "<think>"]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]

    def write(**fields: Any) -> Path:
        path = tmp_path_factory.mktemp("byte-level") / "tiny.gguf"
        begin = {"bos_token_id": len(tokens) - 3, "eos_token_id": len(tokens) - 2}
        return write_tokenizer(path, "gpt2", tokens, types, token_merges=merges, **begin, **fields)

    return write


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken", "deepseek-r1-qwen"])
def test_a_byte_level_vocabulary_encodes_as_in_transformers(
    byte_level: Callable[..., Path], name: str
) -> None:
    path = byte_level(tokenizer_pre=name, add_bos_token=False)
    tokenizer, reference = loaded(path), peer(path)
    for text in (*TEXTS, *CORPUS[::5], "<begin>x<think> <end>"):
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"], text
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<begin>", "").replace("<end>", "")


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("smollm", ["It", "'s", " x", "=", "1", "2", "3", "4", "5", "!?", " ", " y"]),
        ("gpt-2", ["It", "'s", " x", "=", "12345", "!?", " ", " y"]),
        ("default", ["It", "'", "s", " x", "=", "123", "45", "!?", " ", " y"]),
        (None, ["It", "'", "s", " x", "=", "123", "45", "!?", " ", " y"]),
        ("llama-bpe", ["It", "'s", " x", "=", "123", "45", "!?", " ", " y"]),
        ("qwen2", ["It", "'s", " x", "=", "1", "2", "3", "4", "5", "!?", " ", " y"]),
    ],
)
def test_text_is_cut_as_llama_cpp_cuts_it(
    byte_level: Callable[..., Path], name: str | None, cuts: list[str]
) -> None:
    tokenizer = loaded(byte_level(**({} if name is None else {"tokenizer_pre": name})))
    pre_tokenizer = tokenizer._encoder.pre_tokenizer
    assert pre_tokenizer is not None
    found = [piece for piece, _ in pre_tokenizer.pre_tokenize_str("It's x=12345!?  y")]
    assert found == [cut.replace(" ", "Ġ") for cut in cuts]


@pytest.mark.parametrize(("name", "whole", "begins"), [("llama-bpe", True, True), ("qwen2", False, False)])
def test_what_a_pre_tokenizer_implies_holds_where_the_file_does_not_say_otherwise(
    byte_level: Callable[..., Path], name: str, whole: bool, begins: bool
) -> None:
    tokenizer = loaded(byte_level(tokenizer_pre=name))
    ids = tokenizer.encode(" unreachable")
    begin = tokenizer.vocabulary_size - 3
    assert (ids[0] == begin) == begins
    assert (begin - 1 in ids) == whole
    assert begin not in loaded(byte_level(tokenizer_pre=name, add_bos_token=False)).encode("x")
    assert loaded(byte_level(tokenizer_pre=name, add_bos_token=True)).encode("x")[0] == begin


SPACE = "\u2581"
SPECIAL = ["<unk>", "<s>", "</s>"]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a SentencePiece vocabulary as llama's: special tokens, bytes, merged tokens, characters."""
    encoder = Encoder(models.BPE())
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    encoder.pre_tokenizer = pre_tokenizers.Split(Regex(f"{SPACE}+[^{SPACE}]*"), behavior="isolated")
    tokens, _ = trained(encoder)
    longer = [token for token in tokens if len(token) > 1]
    characters = [token for token in tokens if len(token) == 1]
    ordered = [*longer, *characters]
    all_tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *ordered, "<turn>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(ordered), USER_DEFINED]
    scores = [0.0] * (3 + 256) + [-float(index) for index in range(len(ordered))] + [0.0]

    def write(**fields: Any) -> Path:
        path = tmp_path_factory.mktemp("sentencepiece") / "tiny.gguf"
        ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
        return write_tokenizer(path, "llama", all_tokens, types, token_scores=scores, **ids, **fields)

    return write


def as_in_llama_cpp(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """`llm_tokenizer_spm_session`: of all neighbours that make a token, the best and leftmost is merged."""
    ids = {token: index for index, token in enumerate(tokens)}
    parts: list[str | None] = list(text.replace(" ", SPACE))
    queue: list[tuple[float, int, int, str]] = []

    def offer(left: int | None, right: int | None) -> None:
        if left is None or right is None:
            return
        joined = f"{parts[left]}{parts[right]}"
        if joined in ids:
            heapq.heappush(queue, (-scores[ids[joined]], left, right, joined))

    def neighbour(index: int, step: int) -> int | None:
        places = range(index + step, len(parts) if step > 0 else -1, step)
        return next((place for place in places if parts[place] is not None), None)

    for index in range(len(parts) - 1):
        offer(index, index + 1)
    while queue:
        _, left, right, joined = heapq.heappop(queue)
        if parts[left] is None or parts[right] is None or f"{parts[left]}{parts[right]}" != joined:
            continue
        parts[left], parts[right] = joined, None
        offer(neighbour(left, -1), left)
        offer(left, neighbour(left, 1))
    found: list[int] = []
    for part in parts:
        if part is not None:
            found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
    return found


@pytest.fixture(scope="module")
def llama_cpp(sentencepiece: Callable[..., Path]) -> Callable[[str], list[int]]:
    reader = gguf.GGUFReader(sentencepiece())
    fields = [reader.get_field(f"tokenizer.ggml.{name}") for name in ("tokens", "scores")]
    tokens, scores = (field.contents() for field in fields if field is not None)
    return lambda text: as_in_llama_cpp(text, tokens, scores)


@pytest.fixture(scope="module")
def spm(sentencepiece: Callable[..., Path]) -> Tokenizer:
    return loaded(sentencepiece())


@pytest.mark.parametrize("text", [*TEXTS, *CORPUS[::5], "  two spaces first", " "])
def test_a_sentencepiece_vocabulary_encodes_as_in_llama_cpp(
    spm: Tokenizer, llama_cpp: Callable[[str], list[int]], text: str
) -> None:
    assert spm.encode(text) == [1, *(llama_cpp(f" {text}") if text else [])]


@settings(max_examples=50)
@given(text=st.text(st.sampled_from("The quickbrownfx '\nß🎉")))
def test_any_text_encodes_as_in_llama_cpp_and_survives(
    spm: Tokenizer, llama_cpp: Callable[[str], list[int]], text: str
) -> None:
    ids = spm.encode(text)
    assert ids == [1, *(llama_cpp(f" {text}") if text else [])]
    assert spm.decode(ids) == (f" {text}" if text else "")


def test_a_sentencepiece_vocabulary_encodes_as_in_transformers(
    spm: Tokenizer, sentencepiece: Callable[..., Path]
) -> None:
    """But for spaces at the beginning, of which transformers' class for these files drops one."""
    reference = peer(sentencepiece())
    for text in (*TEXTS, *CORPUS):
        assert spm.encode(text) == reference(text)["input_ids"], text


def test_special_tokens_in_text_are_found_and_a_space_follows_each(
    spm: Tokenizer, sentencepiece: Callable[..., Path], llama_cpp: Callable[[str], list[int]]
) -> None:
    turn = spm.vocabulary_size - 1
    assert spm.encode("fox</s>dog<turn>") == [1, *llama_cpp(" fox"), 2, *llama_cpp(" dog"), turn]
    assert spm.special_ids == {0, 1, 2}
    assert spm.end_ids == {2}
    assert spm.token_bytes(turn) == b"<turn>"
    assert spm.token_bytes(3 + 0xE9) == b"\xe9"
    plain = loaded(sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert plain.encode("fox</s>dog") == [*llama_cpp("fox"), 2, *llama_cpp("dog")]


def test_a_vocabulary_of_a_kind_that_is_not_supported_or_not_whole_is_refused(tmp_path: Path) -> None:
    def fails(kind: str, message: str, **fields: Any) -> None:
        path = write_tokenizer(tmp_path / "tiny.gguf", kind, ["a", "b"], [1, 1], **fields)
        with pytest.raises(ModelError, match=rf"tiny\.gguf: .*{message}"):
            loaded(path)

    fails("bert", "tokenizer model 'bert' is not supported.*'gpt2'.*'llama'")
    fails("llama", r"'tokenizer\.ggml\.scores' does not fit")
    fails("llama", r"'tokenizer\.ggml\.scores' does not fit", token_scores=[0.0])
    fails("llama", "bos_token_id is None", token_scores=[0.0, 0.0])
    fails("gpt2", "pre-tokenizer 'mpt' is not supported; supported: default, ", tokenizer_pre="mpt")
    fails("gpt2", r"'tokenizer\.ggml\.merges' is missing")
