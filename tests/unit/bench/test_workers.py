"""The peers' workers: how a kept case is measured on each."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvarn.bench.cases import Case, prompt_ids
from kvarn.bench.workers import run_llama_cpp, run_transformers

KEPT = Case("kept", 3, 20, 5, "decode", kept=True)
PROMPTS = [[i % 100 for i in ids] for ids in prompt_ids(KEPT)]
MORE = KEPT.output_tokens - 1
PROGRAM = """#!/bin/sh
echo "$@" >"$0.said"
echo '{"t_pp": 2.0, "t_tg": 5.0}'
"""


@pytest.mark.parametrize(
    ("case", "shared"),
    [(KEPT, True), (replace(KEPT, streams=1, kept=False), False), (replace(KEPT, counted="all", kept=False), False)],
)
def test_llama_cpp_copies_one_prompt_where_decoding_several_alone_counts(
    case: Case, shared: bool, tmp_path: Path
) -> None:
    program = tmp_path / "bench"
    program.write_text(PROGRAM, "utf-8")
    program.chmod(0o755)
    answer = run_llama_cpp.run(program, "m.gguf", "2", "f16", case.as_dict())
    assert answer == {"prefill_s": 2.0, "decode_s": 4.0}
    assert ("-pps" in (tmp_path / "bench.said").read_text("utf-8").split()) is shared


@pytest.fixture
def network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=100, num_hidden_layers=2, initializer_range=0.5, **shape)
    return LlamaForCausalLM(config).eval()


def test_transformers_goes_on_from_the_cache_that_all_prompts_at_once_would_give(
    network: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_transformers.Engine(network)
    rows: list[tuple[int, int]] = []
    network.register_forward_pre_hook(lambda _, args: rows.append(tuple(args[0].shape)))
    with torch.inference_mode():
        assert alone.go_on(KEPT.as_dict(), PROMPTS)["decode_s"] > 0
        assert alone.go_on(KEPT.as_dict(), PROMPTS)["decode_s"] > 0
        assert rows == [(1, KEPT.prompt_tokens)] * KEPT.streams + [(KEPT.streams, 1)] * MORE * 2
        together = run_transformers.Engine(network)
        together.run(replace(KEPT, output_tokens=1 + 2 * MORE).as_dict(), PROMPTS)
        assert alone._token.tolist() == together._token.tolist() and len(set(alone._token.flatten().tolist())) > 1
        rows.clear()
        monkeypatch.setattr(run_transformers, "CONTEXT_TOKENS", KEPT.prompt_tokens + 2 * MORE)
        alone.go_on(KEPT.as_dict(), PROMPTS)
        assert rows[0] == (1, KEPT.prompt_tokens)


class Steps:
    """What stands in for a peer's engine: each step computes one prompt, or gives a token to all that are computed."""

    def __init__(self, stuck: bool = False) -> None:
        self.asked: dict[Any, int] = {}
        self.got: dict[Any, int] = {}
        self.prompts, self.stuck = 0, stuck

    def add(self, name: Any, max_tokens: int) -> None:
        self.asked[name] = max_tokens

    def step(self) -> list[Any]:
        """The names of those that got a token."""
        if waiting := [name for name in self.asked if name not in self.got]:
            self.prompts += 1
            self.got[waiting[0]] = 0
        growing = list(self.got)[: 1 if self.stuck and not waiting else None]
        for name in growing:
            self.got[name] += 1
            if self.got[name] == self.asked[name]:
                self.drop(name)
        return growing

    def drop(self, name: Any) -> None:
        self.asked.pop(name, None)
        self.got.pop(name, None)


class OpenVinoPipe(Steps):
    def __init__(self, stuck: bool = False) -> None:
        super().__init__(stuck)
        self.unread: list[Any] = []

    def add_request(self, name: int, _: Any, config: SimpleNamespace) -> SimpleNamespace:
        self.add(name, config.max_new_tokens)
        return SimpleNamespace(
            can_read=lambda: name in self.unread,
            read=lambda: {name: self.unread.remove(name) or SimpleNamespace(generated_ids=[1])},
        )

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.unread += super().step()

    def has_non_finished_requests(self) -> bool:
        return bool(self.asked)


class VllmEngine(Steps):
    def add_request(self, name: str, _: Any, params: SimpleNamespace) -> None:
        self.add(name, params.max_tokens)

    def step(self) -> list[Any]:
        counts = dict(self.got)
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[1] * (counts.get(name, 0) + 1))])
            for name in super().step()
        ]

    def has_unfinished_requests(self) -> bool:
        return bool(self.asked)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.drop(name)


def named(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


MODULES = {
    "openvino": named(Tensor=lambda array: array),
    "openvino_genai": named(GenerationConfig=named, TokenizedInputs=named),
    "vllm": named(EngineArgs=None, LLMEngine=None, SamplingParams=named),
}


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker's module, over stand-ins of the packages that it imports."""
    for needed, module in MODULES.items():
        monkeypatch.setitem(sys.modules, needed, module)
    full = f"kvarn.bench.workers.{name}"
    monkeypatch.delitem(sys.modules, full, raising=False)
    module = importlib.import_module(full)
    monkeypatch.delitem(sys.modules, full)
    monkeypatch.setattr(module, "CONTEXT_TOKENS", KEPT.prompt_tokens + 20)
    return module


class OpenVino:
    """The worker's engine; made: the pipelines that it had, the last one last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
        self.made: list[Any] = []
        self._stuck = stuck
        self.engine = imported("run_openvino", monkeypatch).Engine(lambda: self.made.append("whole"), self._stepped)

    def _stepped(self) -> OpenVinoPipe:
        self.made.append(OpenVinoPipe(self._stuck))
        return self.made[-1]

    @property
    def filled(self) -> int:
        """Prompts computed so far."""
        return sum(pipe.prompts for pipe in self.made[1:])

    @property
    def longest(self) -> int:
        return max(self.made[-1].got.values())


class Vllm:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
        self.steps = VllmEngine(stuck)
        self.engine = imported("run_vllm", monkeypatch).Engine(self.steps)

    @property
    def filled(self) -> int:
        return self.steps.prompts

    @property
    def longest(self) -> int:
        return max(self.steps.got.values())


PEERS = pytest.mark.parametrize("peer", [OpenVino, Vllm])


@PEERS
def test_a_peer_computes_the_prompts_once_and_starts_over_where_its_context_is_full(
    peer: type[OpenVino | Vllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = peer(monkeypatch, stuck=False)
    filled, longest = [], []
    for _ in range(6):
        assert worker.engine.go_on(KEPT.as_dict(), PROMPTS)["decode_s"] > 0
        filled.append(worker.filled)
        longest.append(worker.longest)
    # 20 tokens have room: 3 of the first stream while prompts are computed, then four times 4.
    assert filled == [3, 3, 3, 3, 6, 6] and longest == [7, 11, 15, 19, 7, 11]


@PEERS
def test_streams_that_do_not_all_grow_are_no_measurement(
    peer: type[OpenVino | Vllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "too small" in peer(monkeypatch, stuck=True).engine.go_on(KEPT.as_dict(), PROMPTS)["error"]


def test_vllm_ends_its_streams_before_another_case(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Vllm(monkeypatch, stuck=False)
    worker.engine.go_on(KEPT.as_dict(), PROMPTS)
    assert worker.engine.run(Case("batch", 3, 20, 2, "all").as_dict(), PROMPTS)["prefill_s"] > 0
    assert not worker.steps.asked and worker.filled == 6
    worker.engine.go_on(KEPT.as_dict(), PROMPTS)
    assert worker.filled == 9
