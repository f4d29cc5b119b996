"""Token ids are those of the model's own tokenizer, and token bytes put the text together again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from muxk.models.errors import ModelError
from muxk.models.resolve import EMBEDDED_ALIAS, FolderSource, resolve_model
from muxk.models.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

TEXTS = (
    "Hello world 1234  <|im_end|>\n\n  x's été 你好 🎉",
    "   lead",
    "tab\t\tx\r\n  \n",
    "I'LL don't 3.14159e10",
    "def f(x):\n    return x  # c\n\n\n",
    " ",
    "",
    "a  b   c    d \n e",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|> spaced <|endoftext|>",
)
# transformers' GGUF conversion does not cut at digits beyond ASCII, as the model's own tokenizer does.
PLAIN = st.text(
    st.characters(exclude_categories=["Cs", "Nd", "Nl", "No"]) | st.sampled_from("0123456789 \n't")
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(EMBEDDED_ALIAS)


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerBase:
    path = resolve_model(EMBEDDED_ALIAS).path
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_encodes_as_in_transformers(
    text: str, tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.encode(text) == reference(text)["input_ids"]


@pytest.mark.model
@given(text=PLAIN)
def test_any_text_encodes_as_in_transformers(
    text: str, tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.encode(text) == reference(text)["input_ids"]


@pytest.mark.model
@given(text=st.text())
def test_any_text_encodes_as_with_the_pre_tokenizer_of_the_models_own_tokenizer_json(
    text: str, tokenizer: Tokenizer, own_encoder: Encoder
) -> None:
    assert tokenizer.encode(text) == own_encoder.encode(text).ids


@pytest.fixture(scope="module")
def own_encoder(reference: PreTrainedTokenizerBase) -> Encoder:
    """The vocabulary with the pre-tokenizer that the model's tokenizer.json names."""
    encoder = Encoder.from_str(reference.backend_tokenizer.to_str())
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return encoder


@pytest.mark.model
def test_a_chat_encodes_as_in_transformers(tokenizer: Tokenizer, reference: PreTrainedTokenizerBase) -> None:
    turns = [("system", "Be brief."), ("user", "Hi <b>"), ("assistant", "Hello"), ("user", "Bye")]
    messages = [{"role": role, "content": content} for role, content in turns]
    wanted = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.chat(turns) == wanted


# The vocabulary lacks some control bytes, and those that only begin unassigned characters past U+3FFFF.
@pytest.mark.model
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF)))
def test_text_survives_encoding_and_decoding(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.model
def test_special_tokens_are_no_text_and_end_tokens_are_known(
    tokenizer: Tokenizer, reference: PreTrainedTokenizerBase
) -> None:
    (end,) = tokenizer.encode("<|im_end|>")
    (start,) = tokenizer.encode("<|im_start|>")
    assert tokenizer.decode([end, *tokenizer.encode("x"), start]) == "x"
    assert tokenizer.token_bytes(end) == b"<|im_end|>"
    assert tokenizer.special_ids >= {start, *reference.all_special_ids}
    assert end in tokenizer.end_ids
    assert start not in tokenizer.end_ids
    assert tokenizer.vocabulary_size == 49152
    assert tokenizer.token_bytes(99999) == b""


@pytest.mark.model
def test_a_chat_that_the_template_cannot_take_is_refused_with_a_reason(tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelError, match="smollm2-135m-instruct: its chat template refuses"):
        tokenizer.chat([("user", None)])  # type: ignore[list-item]


@given(text=st.text())
def test_the_byte_tokenizer_is_utf8(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), 256]) == text
    assert tokenizer.end_ids == tokenizer.special_ids == {256}


def test_a_tokenizer_needs_no_torch() -> None:
    code = "import sys, muxk.models.tokenizer as t; t.ByteTokenizer().chat([('user', 'x')]); "
    code += "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with a byte-level tokenizer of a few tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Encoder(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<turn>", special=True)])
    encoder.add_tokens([AddedToken("é!", special=False)])
    encoder.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "eos_token": {"content": "<end>"},
        "chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257]}))
    return tmp_path


def test_a_checkpoint_folder_gives_its_tokens_template_and_end_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(FolderSource("tiny", folder))
    assert tokenizer.decode(tokenizer.encode("xé!ü<end>")) == "xé!ü"
    assert tokenizer.token_bytes(258) == "é!".encode()
    assert tokenizer.special_ids == {256, 257}
    assert tokenizer.end_ids == {256, 257}
    assert tokenizer.chat([("user", "x")]) == [*tokenizer.encode("x"), 256]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "does not compile"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
    ],
)
def test_a_bad_or_hostile_template_is_an_error_of_the_model(
    folder: Path, template: str, message: str
) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(FolderSource("tiny", folder)).chat([("user", "x")])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}[{{ m['content'] }}]{% endgeneration %}\n{% endfor %}!",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{%- set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
        "{% endfor %}",
        "{% if tools is defined and tools %}x{% endif %}{% if messages[0].content is string %}y{% endif %}"
        "{{ messages[-1].content.split('</think>')[-1].lstrip('\n') }}"
        "{% if add_generation_prompt %}<a>{% endif %}{{ eos_token }}",
    ],
)
def test_templates_say_what_they_say_in_transformers(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    turns = [("user", "a <b>"), ("assistant", "c</think>\nd"), ("user", "é")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (wanted,), _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, eos_token="<end>"
    )
    tokenizer = load_tokenizer(FolderSource("tiny", folder))
    assert tokenizer.chat(turns) == tokenizer.encode(wanted)


def test_a_model_without_template_refuses_chats(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="tiny has no chat template"):
        load_tokenizer(FolderSource("tiny", folder)).chat([("user", "x")])


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model": 3}'])
def test_a_missing_or_damaged_tokenizer_is_named(folder: Path, content: str | None) -> None:
    path = folder / "tokenizer.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(FolderSource("tiny", folder))
