"""Engines over tiny models, with poisoned pages, checked after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvarn.core.options import EngineOptions
from kvarn.core.requests import Delta, RequestOutput, SamplingParams
from kvarn.engine.build import assemble
from kvarn.engine.engine import Engine, StepResult
from kvarn.engine.pacing import Pace
from kvarn.engine.prices import Allowance, TokenAllowance
from kvarn.kernels import load_backend
from kvarn.kv.manager import CacheManager
from kvarn.kv.sizing import plan_cache
from kvarn.models.base import CausalLM
from kvarn.text import Tokenizer
from support.models import byte_tokenizer, tiny_model

BLOCK = 4
CONTEXT = 128
SMALL = EngineOptions(
    weights="float32", block_size=BLOCK, context_tokens=CONTEXT, max_seqs=32, step_tokens=64, poison=True
)


def blocks_bytes(model: CausalLM, options: EngineOptions, blocks: int) -> int:
    """Bytes in which every pool has so many blocks, or all that it could ever use, if those are fewer."""
    roomy = plan_cache(model.layers, options, max_context=None, default_format="float32", free_bytes=1 << 30)
    return sum(p.block_bytes * min(blocks, p.n_blocks) for g in roomy.groups for p in g.pools)


def block_bytes(model: CausalLM, options: EngineOptions = SMALL) -> int:
    """Bytes of one block of every pool together."""
    return blocks_bytes(model, options, 1)


def make_engine(
    model: CausalLM | str = "llama", tokenizer: Tokenizer | None = None, *, blocks: int | None = None, **options: Any
) -> Engine:
    """blocks: in each pool that can use them, None for as many as max_seqs contexts take. options: of EngineOptions."""
    model = tiny_model(model) if isinstance(model, str) else model
    asked = EngineOptions(**{**{f: getattr(SMALL, f) for f in SMALL.__dataclass_fields__}, **options})
    if blocks is not None:
        asked = EngineOptions(**{**vars(asked), "kv_memory_bytes": blocks_bytes(model, asked, blocks)})
    return assemble(model, tokenizer or byte_tokenizer(), load_backend(), asked).engine


@dataclass
class SomeLayers:
    """An allowance of so many layers a step, for chunks of so many tokens."""

    tokens_each: int
    layers_each: int

    def tokens(self, start: int) -> int:
        return 1

    def layered_tokens(self, start: int, layers: int) -> int:
        return self.tokens_each

    def layers(self, start: int, n_tokens: int, layers: int) -> int:
        return self.layers_each

    def spend(self, start: int, n_tokens: int, share: float = 1.0) -> None:
        self.layers_each = 0


class LayerByLayer(Pace):
    """Beside rows that decode, prompts go through so many layers a step; every third step goes without."""

    def __init__(self, tokens: int, layers: int) -> None:
        super().__init__(2.0)
        self._each, self._steps = (tokens, layers), 0

    def allowance(self, decodes: int) -> Allowance:
        self._steps += 1
        return SomeLayers(*self._each) if self._steps % 3 else TokenAllowance(0)


def layer_by_layer(engine: Engine, tokens: int = 7, layers: int = 1) -> Engine:
    """The engine, whose prompts now go through the layers in several steps wherever somebody decodes."""
    engine.scheduler.config = replace(engine.scheduler.config, short_tokens=1)
    engine.scheduler.pace = LayerByLayer(tokens, layers)
    return engine


@dataclass
class Watch:
    """What an engine did: outputs by request id, deltas in order, steps."""

    engine: Engine
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    deltas: list[Delta] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)

    def step(self) -> StepResult:
        result = self.engine.step()
        self.engine.cache.check()
        self.steps.append(result)
        self.deltas += result.deltas
        self.outputs.update((r.request_id, r) for r in result.finished)
        return result

    def finish(self, each: Callable[[StepResult], None] | None = None, most_steps: int = 2000) -> None:
        """Step until nothing is left to do; then every stream must equal its text."""
        for _ in range(most_steps):
            if not self.engine.has_work:
                break
            result = self.step()
            if each is not None:
                each(result)
        else:
            raise AssertionError(f"no end after {most_steps} steps")
        self.check_streams()

    def check_streams(self) -> None:
        for request_id, output in self.outputs.items():
            for completion in output.completions:
                mine = [d for d in self.deltas if (d.request_id, d.index) == (request_id, completion.index)]
                assert "".join(d.text for d in mine) == completion.text
                assert tuple(t for d in mine for t in d.token_ids) == completion.token_ids
                assert [d.finish_reason for d in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]

    @property
    def preemptions(self) -> int:
        return sum(len(s.plan.preempted) for s in self.steps)


Asked = tuple[Sequence[int], SamplingParams]


def serve(engine: Engine, asked: Sequence[Asked]) -> Watch:
    """Add all requests ('0', '1', ...), run to the end."""
    watch = Watch(engine)
    for index, (ids, params) in enumerate(asked):
        engine.add_request(str(index), ids, params)
    watch.finish()
    return watch


def answers(engine: Engine, asked: Sequence[Asked]) -> list[list[tuple[int, ...]]]:
    """Token ids of each completion of each request."""
    watch = serve(engine, asked)
    return [[c.token_ids for c in watch.outputs[str(i)].completions] for i in range(len(asked))]


def held_blocks(engine: Engine) -> int:
    """Blocks that sequences hold, over all pools; what only the prefix index keeps for later is not counted."""
    if not isinstance(engine.cache, CacheManager):
        return 0
    sequences = list(engine.cache.sequences.values())
    found = 0
    for index, group in enumerate(engine.cache.groups):
        found += sum(len(named) for named in group.named([s.rows[index] for s in sequences]))
    return found
