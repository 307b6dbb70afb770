"""A model exported as a Hugging Face directory is the same model in bfloat16, for Kvarn and for transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from kvarn.bench.export import export_hf, tensors_of
from kvarn.bench.prepare import kept_as, q4_0_file
from kvarn.core.errors import KvarnError
from kvarn.hub import resolve
from kvarn.models.loading import load_model
from kvarn.models.loading.load import open_model
from kvarn.text import load_tokenizer
from support.dense import dense_logits
from support.gguf_writing import write_gguf
from support.models import write_model_directory

IDS = [5, 9, 200, 33, 71, 4, 128, 8]
TEXT = "A mill grinds slowly."


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_kvarn_and_transformers_read_the_same_model(name: str, tmp_path: Path) -> None:
    model = resolve(str(write_model_directory(tmp_path / "model", name)))
    made = export_hf(model, tmp_path / "exported")
    before, after = (load_model(path, "bfloat16") for path in (model.path, made))
    logits = dense_logits(after, IDS)
    assert (dense_logits(before, IDS) - logits).abs().max() < 0.05 * logits.abs().max()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits[0]
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
    ours, exported = load_tokenizer(model), load_tokenizer(resolve(str(made)))
    assert ours.encode(TEXT) == exported.encode(TEXT)
    assert ours.encode_chat([{"role": "user", "content": TEXT}]) == exported.encode_chat(
        [{"role": "user", "content": TEXT}]
    )
    assert exported.end_ids == ours.end_ids
    assert export_hf(model, made) == made and not (tmp_path / "exported.part").exists()


def test_norms_that_a_gguf_file_holds_plus_one_are_put_back(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=320,
        sliding_window=16,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config)
    for name, numbers in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(numbers, 0.0, 0.1)
    write_gguf(model, tmp_path / "model.gguf")
    held, tensors = model.state_dict(), tensors_of(*open_model(tmp_path / "model.gguf"))
    assert any("norm" in name for name in tensors)
    for name, numbers in tensors.items():
        assert torch.allclose(numbers.float(), held[name], atol=2**-7, rtol=2**-8), name


def test_another_file_of_the_same_name_has_another_place(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"
    for path in (one, other):
        path.parent.mkdir()
        path.write_bytes(b"GGUF")
    assert kept_as(one, tmp_path, "-hf") == kept_as(one, tmp_path, "-hf") != kept_as(other, tmp_path, "-hf")


def test_what_llama_quantize_says_is_passed_on(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    with pytest.raises(KvarnError, match="make peers"):
        q4_0_file(model, tmp_path, tmp_path / "models")
    program = tmp_path / "llama-quantize"
    program.write_text("#!/bin/sh\necho 'not a model' >&2\nexit 3\n", "utf-8")
    program.chmod(0o755)
    with pytest.raises(KvarnError, match="ended with 3: not a model"):
        q4_0_file(model, tmp_path, tmp_path / "models")
    assert not list((tmp_path / "models").glob("*.gguf"))
