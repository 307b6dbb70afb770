"""Tokenizers converted from GGUF vocabularies, against the libraries that the vocabularies were trained with."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from kvarn.core.errors import ModelError
from kvarn.hub.local import open_local
from kvarn.text import Tokenizer, load_tokenizer
from kvarn.text.splits import SPLITS
from support.vocabularies import TEXTS, train_byte_level, train_sentencepiece, write_byte_level, write_sentencepiece


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path / "home"))


def load(path: Path) -> Tokenizer:
    return load_tokenizer(open_local(path.name, path))


@pytest.mark.parametrize("pre", sorted({split: name for name, split in SPLITS.items()}.values()))
def test_byte_level_ids_are_those_of_the_trained_tokenizer(tmp_path: Path, pre: str) -> None:
    split = SPLITS[pre]
    trained = train_byte_level(split.pre_tokenizer(), ignore_merges=split.whole_words)
    if split.nfc:
        trained.normalizer = tokenizers.normalizers.NFC()
    ours = load(write_byte_level(tmp_path / "m.gguf", trained, pre))
    for text in TEXTS:
        ids = trained.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == trained.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("architecture", "dummy_prefix"), [("llama", False), ("llama", True), ("phi3", True)])
def test_sentencepiece_ids_are_sentencepieces_own(tmp_path: Path, architecture: str, dummy_prefix: bool) -> None:
    trained = train_sentencepiece(tmp_path / "sp", dummy_prefix=dummy_prefix)
    path = write_sentencepiece(tmp_path / "m.gguf", trained, architecture=architecture, space_prefix=dummy_prefix)
    ours = load(path)
    for text in TEXTS:
        # A control token in a text is found by the model's tokenizer, and is plain text to sentencepiece.
        if "<" in text or (architecture == "llama" and dummy_prefix and text.startswith(" ")):
            continue
        ids = trained.EncodeAsIds(text)
        assert ours.encode(text, add_special=False) == ids, text
        assert ours.decode(ids) == text


def test_control_and_user_tokens_are_found_whole(tmp_path: Path) -> None:
    trained = train_sentencepiece(tmp_path / "sp", dummy_prefix=False)
    ours = load(write_sentencepiece(tmp_path / "m.gguf", trained, space_prefix=False))
    tool = trained.PieceToId("<tool>")
    ids = ours.encode("a<tool>b</s>", add_special=False)
    assert tool in ids
    assert ids[-1] == trained.eos_id()
    assert ours.decode(ids) == "a<tool>b"
    assert ours.decode(ids, skip_special=False) == "a<tool>b</s>"


@pytest.mark.parametrize(("stated", "begins"), [(None, True), (True, True), (False, False)])
def test_bos_as_the_model_states(tmp_path: Path, stated: bool | None, begins: bool) -> None:
    trained = train_sentencepiece(tmp_path / "sp", dummy_prefix=False)
    ours = load(write_sentencepiece(tmp_path / "m.gguf", trained, add_bos=stated))
    assert (ours.encode("a")[0] == trained.bos_id()) is begins
    assert ours.encode("a", add_special=False)[0] != trained.bos_id()


def test_leading_space_stays_where_text_goes_on(tmp_path: Path) -> None:
    trained = train_sentencepiece(tmp_path / "sp", dummy_prefix=True)
    ours = load(write_sentencepiece(tmp_path / "m.gguf", trained))
    ids = ours.encode("fox", add_special=False)
    assert (ours.decode(ids), ours.decode(ids, continuing=True)) == ("fox", " fox")


def test_end_tokens_and_template(tmp_path: Path) -> None:
    trained = train_byte_level(SPLITS["gpt-2"].pre_tokenizer())
    path = write_byte_level(
        tmp_path / "m.gguf", trained, "gpt-2", eos_id=5, template="{{ eos_token }}|{{ messages[0].content }}"
    )
    ours = load(path)
    assert ours.end_ids == {0, 5}  # <|end|> ends a turn by its name
    assert ours.apply_chat_template([{"role": "user", "content": "x"}]).endswith("|x")


def test_without_a_template(tmp_path: Path) -> None:
    ours = load(write_byte_level(tmp_path / "m.gguf", train_byte_level(SPLITS["gpt-2"].pre_tokenizer()), "gpt-2"))
    assert not ours.has_chat_template
    with pytest.raises(ModelError, match="no chat template"):
        ours.encode_chat([{"role": "user", "content": "x"}])


def test_the_converted_tokenizer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_byte_level(tmp_path / "m.gguf", train_byte_level(SPLITS["gpt-2"].pre_tokenizer()), "gpt-2")
    first = load(path)
    (kept,) = (tmp_path / "home" / "tokenizers").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("kvarn.text.gguf_vocab.convert", lambda header: pytest.fail("converted a second time"))
        assert load(path).encode(TEXTS[0]) == first.encode(TEXTS[0])
    kept.write_text("{")  # a broken copy is made anew
    assert load(path).encode(TEXTS[0]) == first.encode(TEXTS[0])
    write_byte_level(path, train_byte_level(SPLITS["smollm"].pre_tokenizer()), "smollm")
    load(path)
    assert len(list(kept.parent.iterdir())) == 2  # another file under the same name has its own


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path / "m.gguf", train_byte_level(SPLITS["gpt-2"].pre_tokenizer()), "esperanto")
    with pytest.raises(ModelError, match=r"'esperanto'.*known: .*llama-bpe"):
        load(path)


def test_unknown_kind_is_refused(tmp_path: Path) -> None:
    from gguf import GGUFWriter  # noqa: PLC0415

    for kind, said in (("rwkv", "kind 'rwkv' is not implemented"), (None, "no tokenizer in its metadata")):
        writer = GGUFWriter(tmp_path / "m.gguf", "llama")
        if kind is not None:
            writer.add_tokenizer_model(kind)
            writer.add_token_list(["a"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelError, match=said):
            load(tmp_path / "m.gguf")
