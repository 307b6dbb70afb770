"""KV policies beside NVIDIA's kvpress: the same model in float32, the same budget, the same text.

    scripts/bench beside_kvpress [--tokens 1024] [--share 50%] [--windows 4] [--json FILE]

Each method runs twice: both with their own defaults, and with Kvarn's parameters set so that every stated difference is
gone. The first shows how far the defaults lie apart, the second that the rule is the same. `in common`: the share of
kept (layer, head, token) triples that both keep. nats: mean negative log-likelihood of the next tokens of the text.
Needs `pip install kvpress`, which wants an older transformers than Kvarn's development tools: in an environment of its
own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvarn.core.files import ModelFiles
from kvarn.core.options import EngineOptions
from kvarn.engine.build import assemble
from kvarn.engine.engine import Engine
from kvarn.evals.scoring import Scorer
from kvarn.evals.texts import shipped_text
from kvarn.hub import resolve
from kvarn.kernels import load_backend
from kvarn.models.loading import load_model
from kvarn.text import load_tokenizer

try:
    import kvpress
    from transformers import AutoModelForCausalLM, DynamicCache
except ImportError as error:
    sys.exit(f"kvpress is not installed here ({error}): pip install kvpress")

NEXT_TOKENS = 128


@dataclass(frozen=True)
class Pair:
    """A method in both: `choice` as Kvarn writes it, {b} its budget; press: of a compression ratio."""

    method: str
    setting: str
    choice: str
    press: Any


def pairs() -> list[Pair]:
    """Why the defaults differ stands in `setting` of the row in which they do not."""
    return [
        Pair("knorm", "defaults", "knorm:{b}", lambda r: kvpress.KnormPress(r)),
        Pair("knorm", "no protected newest tokens", "knorm:{b},recent=0", lambda r: kvpress.KnormPress(r)),
        Pair("keydiff", "defaults", "keydiff:{b}", lambda r: kvpress.KeyDiffPress(r)),
        Pair("keydiff", "no protected newest tokens", "keydiff:{b},recent=0", lambda r: kvpress.KeyDiffPress(r)),
        Pair("tova", "defaults", "tova:{b}", lambda r: kvpress.TOVAPress(r)),
        Pair("snapkv", "defaults", "snapkv:{b}", lambda r: kvpress.SnapKVPress(r)),
        Pair(
            "snapkv",
            "64 queries, no smoothing",
            "snapkv:{b},query_tokens=64,pool=1",
            lambda r: kvpress.SnapKVPress(r, window_size=64, kernel_size=1),
        ),
        Pair("expected_attention", "defaults", "expected_attention:{b}", lambda r: kvpress.ExpectedAttentionPress(r)),
        Pair(
            "expected_attention",
            "epsilon 0",
            "expected_attention:{b},epsilon=0",
            lambda r: kvpress.ExpectedAttentionPress(r),
        ),
        Pair("pyramidkv", "defaults", "pyramidkv:{b}", lambda r: kvpress.PyramidKVPress(r)),
        Pair(
            "pyramidkv",
            "16 queries, no smoothing, beta 8",
            "pyramidkv:{b},query_tokens=16,pool=1,beta=8",
            lambda r: kvpress.PyramidKVPress(r, window_size=16, kernel_size=1, beta=8),
        ),
        Pair("adakv", "defaults", "adakv:{b}", lambda r: kvpress.AdaKVPress(kvpress.SnapKVPress(r))),
        Pair(
            "adakv",
            "64 queries, no smoothing, no floor",
            "adakv:{b},query_tokens=64,pool=1,floor=0",
            lambda r: kvpress.AdaKVPress(kvpress.SnapKVPress(r, 64, 1), alpha_safeguard=0.0),
        ),
    ]


@dataclass(frozen=True)
class Found:
    """nats: mean over windows. error: standard error of the mean difference between the two."""

    method: str
    setting: str
    in_common: float
    nats_kvarn: float
    nats_kvpress: float
    error: float
    tokens: int


class Kvarn:
    """Kvarn's side. Its blocks are as long as what is scored, so that it decides once, as kvpress does."""

    def __init__(self, files: ModelFiles, prompt_tokens: int) -> None:
        self.tokenizer, self._model = load_tokenizer(files), load_model(files, "float32")
        self._options = EngineOptions(
            weights="float32",
            block_size=NEXT_TOKENS,
            max_seqs=1,
            prefix_caching=False,
            context_tokens=prompt_tokens + NEXT_TOKENS + 1,
        )

    def run(self, choice: str, prompt: Sequence[int], rest: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None]:
        """Log-probabilities of the rest [n], and bool [L * H, T]: what was kept of the prompt (None: everything)."""
        options = EngineOptions(**{**asdict(self._options), "kv": f"{choice}+float32"})
        engine = assemble(self._model, self.tokenizer, load_backend(None), options).engine
        kept: list[np.ndarray] = []
        _note_decisions(engine, kept)
        scores = Scorer(engine).score(prompt, rest)
        return scores.logprobs.numpy(), kept[0][:, : len(prompt)] if kept else None


def _note_decisions(engine: Engine, kept: list[np.ndarray]) -> None:
    decide = engine.cache.decide

    def noting(seq_id: int) -> Any:
        decision = decide(seq_id)
        if decision is not None:
            kept.extend(k for k in decision.keep if k is not None)
        return decision

    engine.cache.decide = noting  # pyright: ignore[reportAttributeAccessIssue]  (a look from outside)


class Press:
    """kvpress' side."""

    def __init__(self, files: ModelFiles) -> None:
        folder, name = files.weights[0].parent, files.weights[0].name
        self.network = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=name, dtype=torch.float32).eval()
        self._tokens = 0

    @torch.inference_mode()
    def run(self, press: Any, prompt: Sequence[int], rest: Sequence[int]) -> tuple[np.ndarray, np.ndarray | None]:
        """As Kvarn.run. The rest goes in one token a step, at its place in the text."""
        cache = DynamicCache()
        ids = torch.tensor([[*prompt, *rest]])
        if press is None:
            out = self.network(ids[:, : len(prompt)], past_key_values=cache, logits_to_keep=1)
        else:
            kept = _Noted(press, self.network.config)
            with press(self.network), kept:
                out = self.network(ids[:, : len(prompt)], past_key_values=cache, logits_to_keep=1)
        found = []
        for at in range(len(prompt), len(prompt) + len(rest)):
            found.append(float(torch.log_softmax(out.logits[0, -1], -1)[ids[0, at]]))
            place = torch.tensor([[at]])
            out = self.network(ids[:, at : at + 1], past_key_values=cache, position_ids=place)
        return np.array(found), None if press is None else kept.places


class _Noted:
    """Notes which places a press keeps, from outside: by what its `compress` returns, or masks."""

    def __init__(self, press: Any, config: Any) -> None:
        self._press, self._config, self._rows = press, config, {}

    def __enter__(self) -> None:
        compress = self._press.compress

        def noting(module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            k, v = compress(module, hidden, keys, values, attentions, kwargs)
            heads, length = keys.shape[1:3]
            kept = np.zeros((heads, length), bool)
            if (masked := getattr(module, "masked_key_indices", None)) is not None:
                kept[:] = True
                kept[masked[1].numpy(), masked[2].numpy()] = False
            else:
                for head in range(heads):
                    kept[head] = torch.isin(keys[0, head, :, 0], k[0, head, :, 0]).numpy()
            self._rows[module.layer_idx] = kept
            return k, v

        self._press.compress = noting

    def __exit__(self, *_: object) -> None:
        return

    @property
    def places(self) -> np.ndarray:
        return np.concatenate([self._rows[i] for i in sorted(self._rows)])


def windows(ids: Sequence[int], prompt_tokens: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
    size = prompt_tokens + NEXT_TOKENS
    for start in range(0, count * size, size):
        yield list(ids[start : start + prompt_tokens]), list(ids[start + prompt_tokens : start + size])


def compared(pair: Pair, share: float, ours: Kvarn, theirs: Press, texts: Sequence[Any]) -> Found:
    mine, other, common = [], [], []
    for prompt, rest in texts:
        a, kept_a = ours.run(pair.choice.format(b=f"{share:.0%}"), prompt, rest)
        b, kept_b = theirs.run(pair.press(1 - share), prompt, rest)
        assert kept_a is not None and kept_b is not None, "both dropped something"
        mine.append(-a.mean())
        other.append(-b.mean())
        common.append((kept_a & kept_b).sum() / max(kept_a.sum(), kept_b.sum()))
    differs = np.array(mine) - np.array(other)
    error = float(differs.std(ddof=1) / len(differs) ** 0.5) if len(differs) > 1 else float("nan")
    n = NEXT_TOKENS * len(texts)
    return Found(
        pair.method, pair.setting, float(np.mean(common)), float(np.mean(mine)), float(np.mean(other)), error, n
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--share", type=lambda t: float(t.removesuffix("%")) / 100, default=0.5)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--only", help="one method")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    files = resolve("smollm2-135m")
    ours, theirs = Kvarn(files, asked.tokens), Press(files)
    texts = list(windows(ours.tokenizer.encode(shipped_text()), asked.tokens, asked.windows))
    full = [
        -np.mean([side.run(which, *t)[0].mean() for t in texts]) for side, which in ((ours, "full"), (theirs, None))
    ]
    print(f"full: Kvarn {full[0]:.4f}, transformers {full[1]:.4f} nats a token")
    print(f"| method | setting | in common | Kvarn | kvpress | difference |\n|{'---|' * 6}")
    found = []
    for pair in pairs():
        if asked.only in (None, pair.method):
            found.append(f := compared(pair, asked.share, ours, theirs, texts))
            print(
                f"| {f.method} | {f.setting} | {f.in_common:.2%} | {f.nats_kvarn:.4f} | {f.nats_kvpress:.4f} "
                f"| {f.nats_kvarn - f.nats_kvpress:+.4f} ± {f.error:.4f} |",
                flush=True,
            )
    if asked.json is not None:
        asked.json.write_text(json.dumps({"full": full, "rows": [asdict(f) for f in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
