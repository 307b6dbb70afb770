"""The front door in Python: load a model, generate, stream, chat."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from kvarn.core.cache_params import CacheParams
from kvarn.core.errors import InvalidRequest
from kvarn.core.files import ModelFiles
from kvarn.core.options import EngineOptions
from kvarn.core.requests import RequestOutput, SamplingParams
from kvarn.engine.build import Parts, build_engine, with_overrides
from kvarn.engine.report import KVReport, kv_report
from kvarn.engine.stream import Outbox, Stream
from kvarn.hub import default_name, resolve
from kvarn.kv.choice import check_context, parse_choice
from kvarn.text.chat import Message

Prompt = str | Sequence[int]
CacheChoice = CacheParams | str


class LLM:
    """A loaded model with its cache.

    model: short name, GGUF file, Hugging Face directory or hub id; None: the default model. options, or its fields by
    keyword: see `EngineOptions`. Not thread-safe. Raises FetchError, ModelError, DoesNotFit, IncompatiblePlan.

    >>> llm = LLM("smollm2-135m", kv="float16")
    >>> llm.generate("The capital of France is", max_tokens=8)[0].completions[0].text
    """

    def __init__(
        self, model: str | Path | ModelFiles | None = None, options: EngineOptions | None = None, **overrides: Any
    ) -> None:
        begun = time.perf_counter()
        self.options = with_overrides(options, overrides)
        self.files = model if isinstance(model, ModelFiles) else resolve(str(model or default_name()))
        parts: Parts = build_engine(self.files, self.options)
        self.model, self.tokenizer, self.plan, self.engine = parts.model, parts.tokenizer, parts.plan, parts.engine
        self.load_s = time.perf_counter() - begun
        self.last_output: RequestOutput | None = None
        self._outbox = Outbox(self.engine)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        cache: CacheChoice | None = None,
        **overrides: Any,
    ) -> list[RequestOutput]:
        """Answer prompts (texts or token ids; one or many, batched together), in their order.

        cache: the cache of these prompts, in the words of `kv` ('h2o:25%', 'int8') or as CacheParams; None: the
        engine's own. A format beside the engine's, and a policy that cuts by head, must stand in the options' `also`.
        What each answer's cache took is in its `trace`. overrides: fields of SamplingParams. Raises InvalidRequest,
        DoesNotFit, IncompatiblePlan and UnknownName before anything runs. Streams that are open go on.

        >>> llm = LLM("smollm2-135m", also=("int8",))
        >>> llm.generate("The capital of France is", cache="int8", max_tokens=8)[0].completions[0].trace.physical_bytes
        """
        wanted = self._params(params, overrides)
        request_ids = self._submit([self._encode(p) for p in _as_list(prompts)], wanted, cache, patient=True)
        try:
            for request_id in request_ids:
                self._outbox.finish(request_id)
        finally:
            outputs = [self._outbox.close(request_id) for request_id in request_ids]
        return [output for output in outputs if output is not None]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache: CacheChoice | None = None,
        **overrides: Any,
    ) -> Stream:
        """Answer one prompt piece by piece; leaving the loop early cancels it. The whole answer is in the stream's
        `output` at its end, and the last one that ended in `last_output`. cache, and what it raises: as in
        `generate`."""
        (request_id,) = self._submit([self._encode(prompt)], self._params(params, overrides), cache, patient=False)
        return Stream(self._outbox, request_id, self._note)

    def _note(self, output: RequestOutput) -> None:
        self.last_output = output

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        cache: CacheChoice | None = None,
        **overrides: Any,
    ) -> RequestOutput:
        """Answer a conversation ({'role', 'content'} each) with the model's own chat template. cache, and what it
        raises: as in `generate`."""
        return self.generate([self.chat_ids(messages)], params, cache=cache, **overrides)[0]

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation's prompt, ready for the assistant's turn."""
        return self.tokenizer.encode_chat(messages)

    def kv_report(self) -> KVReport:
        """What the cache cost at its fullest so far."""
        return kv_report(self.engine.cache)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt) if prompt else []
        elif isinstance(prompt, Iterable):
            ids = list(prompt)
        else:
            raise InvalidRequest(f"the prompt is {prompt!r}", fixes=("give a text, or a list of token ids",))
        if not ids:
            raise InvalidRequest("the prompt is empty", fixes=("give some text",))
        return ids

    def _params(self, params: SamplingParams | None, overrides: dict[str, Any]) -> SamplingParams:
        if not overrides:
            return params or SamplingParams()
        fields = {f: getattr(params or SamplingParams(), f) for f in SamplingParams.__dataclass_fields__}
        return SamplingParams(**{**fields, **overrides})

    def _submit(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, cache: CacheChoice | None, patient: bool
    ) -> list[str]:
        """All or none: a prompt that cannot be served takes back those before it."""
        chosen = parse_choice(cache) if isinstance(cache, str) else cache
        if chosen is not None:
            check_context(chosen, self.plan.context_tokens)
        request_ids: list[str] = []
        try:
            for ids in prompts:
                request_id = f"llm-{next(self._ids)}"
                self.engine.add_request(request_id, ids, params, cache=chosen, patient=patient)
                self._outbox.open(request_id)
                request_ids.append(request_id)
        except Exception:
            for request_id in request_ids:
                self._outbox.close(request_id)
            raise
        return request_ids


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many? A list of integers is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(f"the prompts are {prompts!r}", fixes=("give texts, or lists of token ids",))
    items = list(prompts)
    if items and all(isinstance(i, Integral) for i in items):
        return [items]  # pyright: ignore[reportReturnType]
    return items  # pyright: ignore[reportReturnType]
