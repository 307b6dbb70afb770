"""Tokenizers of Hugging Face directories: what the files beside tokenizer.json state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from kvarn.core.errors import InvalidRequest, ModelError
from kvarn.text import Tokenizer
from kvarn.text.hf import load_directory
from support.vocabularies import train_byte_level


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    trained = train_byte_level(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    trained.add_special_tokens(["<s>", "<|turn|>"])
    trained.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory: Path, **files: dict) -> Tokenizer:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return load_directory(directory)


def test_special_tokens_as_text_or_object(directory: Path) -> None:
    found = write(
        directory, tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "<|end|>", "add_bos_token": True}
    )
    assert found.bos_id == found.token_id("<s>")
    assert found.end_ids == {0}
    assert found.encode("hi") == [found.bos_id, *found.encode("hi", add_special=False)]


def test_end_ids_of_the_generation_config(directory: Path) -> None:
    assert write(directory, generation_config={"eos_token_id": [3, 4]}, config={"eos_token_id": 5}).end_ids == {3, 4, 5}


def test_bos_by_the_post_processor(directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    index = backend.token_to_id("<s>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", index)])
    backend.save(str(directory / "tokenizer.json"))
    assert write(directory, tokenizer_config={"bos_token": "<s>"}).encode("hi")[0] == index


def test_templates(directory: Path) -> None:
    user = [{"role": "user", "content": "x"}]
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    found = write(directory, tokenizer_config={"chat_template": named})
    assert found.apply_chat_template(user) == "A"
    assert found.apply_chat_template(user, tools=[{"name": "f"}]) == "B"
    (directory / "chat_template.jinja").write_text("{{ bos_token }}C")
    found = write(directory, tokenizer_config={"chat_template": "A", "bos_token": "<s>"})
    assert found.apply_chat_template(user) == "<s>C"
    assert found.encode_chat(user) == [found.bos_id, *found.encode("C", add_special=False)]


def test_padding_and_truncation_of_the_file_are_ignored(directory: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(directory / "tokenizer.json"))
    ids = load_directory(directory).encode("one two three four five")
    assert 2 < len(ids) < 50


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("generation_config.json", "[]", "is not a JSON object"),
    ],
)
def test_broken_files(directory: Path, name: str, content: str, said: str) -> None:
    (directory / name).write_text(content)
    with pytest.raises(ModelError, match=said):
        load_directory(directory)


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_directory(tmp_path)


def test_a_word_piece_tokenizer_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="WordPiece"):
        load_directory(tmp_path)


def test_text_that_is_not_unicode(directory: Path) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        load_directory(directory).encode("a\udcffb")
