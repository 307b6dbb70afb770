"""EleutherAI's lm-eval over any cache choice: `lm_eval.simple_evaluate(model=KvarnLM("smollm2-135m", kv="int8"), ...)`.

Needs the package lm-eval (`pip install 'kvarn[lm-eval]'`). What a task scores goes through the cache as while decoding:
the policy decides after the context, and what is sealed is read back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]  (an optional extra)
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

from kvarn.core.requests import SamplingParams
from kvarn.engine.llm import LLM
from kvarn.evals.scoring import Scorer

DEFAULT_NEW_TOKENS = 256


class KvarnLM(LM):
    """A Kvarn model as lm-eval takes one. model: a name, or a loaded LLM. options: fields of EngineOptions, such as
    kv='h2o:25%+int8' and context_tokens. Longer contexts than the engine's lose their beginning, as lm-eval has it."""

    def __init__(self, model: LLM | str | None = None, **options: Any) -> None:
        super().__init__()
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._scorer = Scorer(self.llm.engine)
        self._most = self.llm.plan.context_tokens - 1

    @property
    def tokenizer_name(self) -> str:
        return self.llm.files.name.replace("/", "__")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """For each (context, continuation): log p(continuation | context), and whether greedy decoding gives it."""
        return [self._loglikelihood(*request.args) for request in requests]

    def _loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Split where the context's own tokens end; white space at its end belongs to the continuation."""
        stripped = context.rstrip()
        whole = self._encode(context + continuation)
        n = len(self._encode(stripped)) if stripped else 0
        if not n:
            whole, n = [self._first, *whole], 1
        answer = whole[n:][-self._most + 1 :]
        found = self._scorer.score(whole[:n][-(self._most - len(answer)) :], answer)
        return float(found.logprobs.sum()), found.exact

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """log p of each whole text, in windows of the context that do not overlap."""
        return [self._rolling(*request.args) for request in requests]

    def _rolling(self, text: str) -> float:
        ids = [self._first, *self.llm.tokenizer.encode(text, add_special=False)]
        step = self._most - 1
        parts = [ids[at : at + step + 1] for at in range(0, len(ids) - 1, step)]
        return sum(float(self._scorer.score(part[:1], part[1:]).logprobs.sum()) for part in parts)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Each context's continuation up to one of `until`. Batched: the engine runs as many as fit."""
        asked = [(self._encode(context), _params(how)) for context, how in map(_arguments, requests)]
        groups = itertools.groupby(range(len(asked)), key=lambda i: asked[i][1])
        texts: list[str] = []
        for params, group in groups:
            most = min(params.max_tokens, self._most - 1)
            prompts = [asked[i][0][-(self._most - most) :] for i in group]
            outputs = self.llm.generate(prompts, replace(params, max_tokens=most))
            texts += [output.completions[0].text for output in outputs]
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.llm.tokenizer.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, by which lm-eval tells its caches apart."""
        templates = self.llm.tokenizer.settings.chat_templates
        return templates.get("default") or next(iter(templates.values()), None)

    def _encode(self, text: str) -> list[int]:
        return self.llm.tokenizer.encode(text) or [self._first]

    @property
    def _first(self) -> int:
        """What stands before a text without a context: the token that begins a text, or one that ends an answer."""
        bos = self.llm.tokenizer.bos_id
        return bos if bos is not None else min(self.llm.tokenizer.end_ids, default=0)


def _arguments(request: Any) -> tuple[Any, ...]:
    return request.args


def _params(how: dict[str, Any]) -> SamplingParams:
    """lm-eval's words for sampling."""
    until: Sequence[str] | str = how.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(s for s in until if s)
    sampled = how.get("do_sample", how.get("temperature", 0.0) > 0)
    return SamplingParams(
        max_tokens=int(how.get("max_gen_toks") or how.get("max_tokens") or DEFAULT_NEW_TOKENS),
        temperature=float(how.get("temperature", 1.0)) if sampled else 0.0,
        top_p=float(how.get("top_p", 1.0)),
        stop=stops,
        seed=how.get("seed"),
    )
