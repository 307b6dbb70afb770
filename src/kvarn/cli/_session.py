"""What `run` and `chat` share: loading a model with a sign of life, and the statistics of an answer."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

import kvarn
from kvarn import hub
from kvarn.cli._contention import Watch, advice
from kvarn.cli._gate import pass_gate
from kvarn.cli._progress import progress_bars
from kvarn.core.options import EngineOptions
from kvarn.core.requests import RequestOutput

if TYPE_CHECKING:
    from kvarn.engine.llm import LLM
    from kvarn.engine.report import DecodeReads

KV_FIELDS = (
    "format",
    "block_size",
    "bytes_per_token",
    "blocks_peak",
    "physical_bytes_peak",
    "logical_bytes",
    "reserved_bytes",
    "utilisation",
)


def load(model: str | None, options: EngineOptions, *, require_gate: bool = False) -> LLM:
    """Find, fetch and load a model; on a terminal, stderr shows what is going on. require_gate: refuse a lossy cache
    that has not passed the gate. Where no number of threads was asked for and others keep cores busy, fewer run, which
    stderr says."""
    name = model or hub.default_name()
    with progress_bars() as progress:
        files = hub.resolve(name, progress=progress)
    pass_gate(files, options, required=require_gate)
    console, watch = Console(stderr=True), Watch()
    with console.status(f"loading {name}") if console.is_terminal else nullcontext():
        llm = kvarn.LLM(files, options)
    if options.threads is None and (found := advice(watch)) is not None:
        _use_threads(*found)
    return llm


def _use_threads(threads: int, why: str) -> None:
    import torch  # noqa: PLC0415  (the help pages must not load it)

    torch.set_num_threads(threads)
    click.echo(why, err=True)


@dataclass(frozen=True, slots=True)
class Report:
    """An answer's figures. Rates count the tokens that were computed in that time: the prompt without what the cache
    held already; the answer without its first token, which the prefill gives."""

    model: str
    output: RequestOutput
    load_s: float
    kv: dict[str, Any]
    reads: DecodeReads
    verify: dict[str, Any] | None = None

    @classmethod
    def of(cls, llm: LLM, output: RequestOutput) -> Report:
        found = llm.kv_report().as_dict()
        order = (*KV_FIELDS, *(name for name in found if name not in KV_FIELDS))
        verifier = llm.engine.verifier
        verify = None if verifier is None else asdict(verifier.report)
        kv = {name: found[name] for name in order}
        return cls(llm.files.name, output, llm.load_s, kv, _reads(llm, output), verify)

    @property
    def decode_tokens_per_s(self) -> float:
        after_first = len(self.output.completions[0].token_ids) - 1
        return _rate(after_first, self.output.timings.decode_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        computed = len(self.output.prompt_ids) - self.output.cached_tokens
        return _rate(computed, self.output.timings.prefill_s)

    def as_dict(self) -> dict[str, Any]:
        """The object that `kvarn run --json` prints."""
        answer, timings = self.output.completions[0], self.output.timings
        return {
            "model": self.model,
            "text": answer.text,
            "prompt_ids": list(self.output.prompt_ids),
            "token_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "prompt_tokens": len(self.output.prompt_ids),
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": self.output.cached_tokens,
            "timings": {
                "load_s": self.load_s,
                "prefill_s": timings.prefill_s,
                "ttft_s": timings.ttft_s,
                "decode_s": timings.decode_s,
                "decode_tokens_per_s": self.decode_tokens_per_s,
                "prefill_tokens_per_s": self.prefill_tokens_per_s,
            },
            "kv": self.kv,
            "decode_reads": self.reads.as_dict(),
            **({} if self.verify is None else {"verify": self.verify}),
        }

    def lines(self) -> tuple[str, ...]:
        """The same for people, without what only machines want."""
        answer, timings, kv = self.output.completions[0], self.output.timings, self.kv
        prompt = f"prompt {len(self.output.prompt_ids)} tokens"
        if self.output.cached_tokens:
            prompt += f" ({self.output.cached_tokens} from the cache)"
        return (
            f"{prompt}, {self.prefill_tokens_per_s:,.1f} tokens/s; answer {len(answer.token_ids)} tokens, "
            f"{self.decode_tokens_per_s:,.1f} tokens/s, ended by {answer.finish_reason}; "
            f"load {self.load_s:.2f} s, first token after {timings.ttft_s:.3f} s",
            f"KV cache {kv['format']}: {_blocks(kv)} held at most, "
            f"{kv['physical_bytes_peak'] / 2**20:,.2f} MiB ({kv['bytes_per_token']:,} bytes a token, "
            f"{kv['utilisation']:.0%} of the reserved slots used)",
            self.reads.line(),
            *self._verify_line(),
        )

    def _verify_line(self) -> tuple[str, ...]:
        if (found := self.verify) is None:
            return ()
        if not found["steps"]:
            return ("verified 0 decode steps against a full cache: none was chosen",)
        return (
            f"verified {found['steps']} decode steps against a full cache: KL {found['kl']:.4g} nats "
            f"(most {found['kl_max']:.4g}), the same likeliest token in {found['top1_agreement']:.1%}",
        )


def _reads(llm: LLM, output: RequestOutput) -> DecodeReads:
    """Of the answer's middle step."""
    from kvarn.engine.report import decode_reads  # noqa: PLC0415  (torch, which the help pages must not load)
    from kvarn.planner.hardware import known_read_bytes_per_s  # noqa: PLC0415

    steps = len(output.completions[0].token_ids) - 1
    step_s = output.timings.decode_s / steps if steps > 0 else 0.0
    found = decode_reads(llm.model, llm.engine.cache, len(output.prompt_ids) + max(0, steps) / 2, step_s)
    return replace(found, read_bytes_per_s=known_read_bytes_per_s())


def _blocks(kv: dict[str, Any]) -> str:
    count, each = kv["blocks_peak"], {"layer": " of a layer", "head": " of a KV head"}.get(kv["grain"], "")
    return f"{count:,} block{'s' * (count != 1)} of {kv['block_size']} tokens{each}"


def _rate(tokens: int, seconds: float) -> float:
    """Tokens a second; 0 where nothing was computed."""
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0


def print_report(report: Report) -> None:
    """To stderr, dimmed on a terminal."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for line in report.lines():
        console.print(line, style="dim", markup=False)
