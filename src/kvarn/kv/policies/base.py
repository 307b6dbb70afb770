"""What a cache policy is: a frozen dataclass that reads a view of one sequence and returns a decision, as data.

A policy is asked after a step in which it is `due`; the manager checks the decision, acts, and emits an event. A policy
never sees a tensor that it could change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from kvarn.core.errors import IncompatiblePlan
from kvarn.core.options import Grain
from kvarn.core.registry import load, names_in
from kvarn.core.specs import LayerSpec
from kvarn.kernels.api import Rope

PACKAGE = "kvarn.kv.policies"


class Signal(StrEnum):
    """What a policy reads beside positions. Collected only for sequences whose policy asks for it."""

    ATTENTION_MASS = "attention_mass"  # a slot's softmax weights, summed over all queries so far and the head's group
    RECENT_QUERIES = "recent_queries"  # the last `query_tokens` queries of every layer, rotated
    QUERY_MOMENTS = "query_moments"  # mean and covariance of all queries so far before their rotation, by query head
    KEYS = "keys"
    VALUES = "values"
    RECONSTRUCTION = "reconstruction"  # the largest weight a slot gets while the model repeats the text
    ROTATION = "rotation"  # the model's rotary embedding, as a function of positions


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of the cache to keep, in exactly one of three units. Raises IncompatiblePlan."""

    tokens: int | None = None
    nbytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        stated = [v for v in (self.tokens, self.nbytes, self.share) if v is not None]
        if len(stated) != 1:
            raise IncompatiblePlan("a budget is stated in tokens, in bytes or as a share: exactly one of them")
        if self.share is not None and not 0 < self.share <= 1:
            raise IncompatiblePlan(f"a budget of {self.share:.6g} of the text", fixes=("use a share in (0, 1]",))
        if (self.tokens is not None and self.tokens < 1) or (self.nbytes is not None and self.nbytes < 1):
            raise IncompatiblePlan(f"a budget of {stated[0]}", fixes=("use 1 or more",))

    def tokens_at(self, length: int, bytes_per_token: int) -> int:
        """Tokens a layer and head may keep on average, at least 1, of a sequence of `length` tokens."""
        if self.tokens is not None:
            return self.tokens
        if self.share is not None:
            return max(1, int(np.ceil(self.share * length)))
        assert self.nbytes is not None
        return max(1, self.nbytes // bytes_per_token)


@dataclass(frozen=True)
class GroupView:
    """One cache group of one sequence. R table rows: layer by layer, head by head at grain `head`; S: the longest row.

    positions [R, S] int32: the logical position in each physical place, -1 where there is nothing. fill [R] int32.
    mass [R, S] float32, or None where it was not asked for. layers: model layer indices. heads: rows a layer.
    turn: positions [n] int64 -> cos, sin [n, R/2] of the layers' rotary embedding, None where it hangs on the length.
    pools [R, S] uint8: which pool holds each place; formats, block_bytes: of the group's pools, the open one first.
    reconstruction [R, S] float32: the largest softmax weight that a place got from any query head while the model read
    the text again; NaN for tokens that came later.
    """

    spec: LayerSpec
    layers: tuple[int, ...]
    heads: int
    positions: np.ndarray
    fill: np.ndarray
    mass: np.ndarray | None
    reader: GroupReader
    turn: Callable[[Tensor], Rope] | None = None
    pools: np.ndarray | None = None
    formats: tuple[str, ...] = ()
    block_bytes: tuple[int, ...] = ()
    reconstruction: np.ndarray | None = None

    def pool_of(self, name: str) -> int:
        """Index of the tier pool with this format."""
        return 1 + self.formats[1:].index(name)

    def keys(self) -> Tensor:
        """[R, S, D] float32, rotated as they were written; places without a token undefined."""
        return self.reader.keys()

    def values(self) -> Tensor:
        """[R, S, E] float32."""
        return self.reader.values()

    def queries(self) -> Tensor:
        """[R, w, G, D] float32: the last w queries of each row's layer and head, rotated."""
        return self.reader.queries()

    def query_moments(self) -> tuple[Tensor, Tensor]:
        """(mean [R, G, D], covariance [R, G, D, D]) float32 of all queries from the policy's first_query on, before
        their rotation."""
        return self.reader.query_moments()

    def recent_mass(self) -> np.ndarray:
        """[R, S] float32: the softmax weights of the last w queries alone, summed over them and the head's group."""
        return self.reader.recent_mass()

    def recent_weights(self, row: int) -> np.ndarray:
        """[w, G, S] float32: the softmax weights of each of the last w queries of one row's layer and head."""
        return self.reader.recent_weights(row)

    @property
    def order(self) -> np.ndarray:
        """[R, S] int64: each row's places in the order of their logical positions, empty ones last."""
        late = np.where(self.positions < 0, np.iinfo(np.int32).max, self.positions)
        return np.argsort(late, axis=1, kind="stable")


class GroupReader(Protocol):
    """Reads tensors of one group of one sequence when a policy asks for them."""

    def keys(self) -> Tensor: ...
    def values(self) -> Tensor: ...
    def queries(self) -> Tensor: ...
    def query_moments(self) -> tuple[Tensor, Tensor]: ...
    def recent_mass(self) -> np.ndarray: ...
    def recent_weights(self, row: int) -> np.ndarray: ...


@dataclass(frozen=True)
class SequenceView:
    """What a policy may read of one sequence. length: logical tokens; prompt_tokens of them came in; block_size.
    bytes_per_token: of the groups that this policy can shrink. groups: None for a group that it leaves alone."""

    length: int
    prompt_tokens: int
    block_size: int
    bytes_per_token: int
    groups: tuple[GroupView | None, ...]


@dataclass(frozen=True)
class Decision:
    """keep: for each group a bool [R, S] over physical places, or None: change nothing. note: why, in a few words.
    turn: for each group, by how many positions the keys of each row's first_blocks blocks are turned ahead of how they
    were written, or None; empty: no group's are.
    demote: for each group an int [R, S], the pool into which a kept place moves, 0 where it stays; whole blocks of them
    a row. seal: for each group a bool [R, C], full open blocks that are encoded as they are in the pool seal_into."""

    keep: tuple[np.ndarray | None, ...]
    note: str = ""
    first_blocks: int = 0
    demote: tuple[np.ndarray | None, ...] = ()
    seal: tuple[np.ndarray | None, ...] = ()
    seal_into: tuple[int, ...] = ()
    turn: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class KVPolicy:
    """Base of all policies.

    grain: how finely it cuts. needs: signals it reads. rewrites: it drops single tokens, so kept ones are moved
    together within their blocks (False: it drops whole blocks only). prefix_pure: it needs no signals of the prompt, so
    a sequence may begin with blocks that the prefix index holds. leaves_prompt: it leaves its own prompt's blocks there
    (later ones are only left if the policy never decides: they hang on more than the text before them). decides: False
    for a policy that never changes anything.
    query_tokens: w of RECENT_QUERIES.
    """

    grain: ClassVar[Grain] = "group"
    needs: ClassVar[frozenset[Signal]] = frozenset()
    rewrites: ClassVar[bool] = False
    prefix_pure: ClassVar[bool] = False
    leaves_prompt: ClassVar[bool] = False
    decides: ClassVar[bool] = True
    query_tokens: int = field(default=1, kw_only=True)

    @property
    def settles_in(self) -> str | None:
        """The format in which all of its blocks come to rest; room for that is kept for each."""
        return None

    @property
    def tiers(self) -> tuple[str, ...]:
        """Formats of further pools that it moves tokens into, which an engine has that may be asked for it."""
        return ()

    @property
    def first_query(self) -> int:
        """The query from which on QUERY_MOMENTS counts them."""
        return 0

    @property
    def signals(self) -> frozenset[Signal]:
        """What it needs with its parameters."""
        return self.needs

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        """Is there anything to decide? Asked when the prompt is complete, and then each time that the text has grown by
        another block."""
        raise NotImplementedError

    def decide(self, view: SequenceView) -> Decision | None:
        """Pure: the same view gives the same decision. None: nothing to change."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScoredPolicy(KVPolicy):
    """Keeps the tokens of the highest score, by layer and KV head, within a budget.

    budget: what a layer and head keep on average. sinks: the first tokens of the text, always kept. recent: the newest
    tokens, always kept. A subclass says how places score, and may divide the budget unevenly.

    Paging: decided when the prompt is complete, then each time a block fills, so between decisions a row holds up to
    one block more than its budget; papers that evict one token a step decide block_size tokens at a time here.
    """

    grain: ClassVar[Grain] = "head"
    rewrites: ClassVar[bool] = True
    budget: Budget = field(default_factory=lambda: Budget(share=0.5))
    sinks: int = 0
    recent: int = 32

    def __post_init__(self) -> None:
        for name in ("sinks", "recent", "query_tokens"):
            if (value := getattr(self, name)) < 0:
                raise IncompatiblePlan(f"{name} is {value}; it must not be negative")
        if self.budget.tokens is not None and self.budget.tokens < self.least:
            raise IncompatiblePlan(
                f"a budget of {self.budget.tokens} tokens is less than {self.sinks} sinks and {self.newest} newest, "
                "which are always kept",
                fixes=(f"a budget of at least {self.least}", "fewer sinks, recent or query_tokens"),
            )

    @property
    def newest(self) -> int:
        """How many of the newest tokens are always kept."""
        return self.recent

    @property
    def least(self) -> int:
        """Tokens that are kept whatever the budget says."""
        return max(1, self.sinks + self.newest)

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        return longest_row > max(self.budget.tokens_at(length, bytes_per_token), self.least)

    def decide(self, view: SequenceView) -> Decision | None:
        tokens = max(self.budget.tokens_at(view.length, view.bytes_per_token), self.least)
        keep = tuple(None if g is None else self._keep(g, view, tokens) for g in view.groups)
        return Decision(keep, f"{type(self).__name__.lower()}: {tokens} tokens a head")

    def _keep(self, group: GroupView, view: SequenceView, tokens: int) -> np.ndarray:
        scores = np.where(group.positions < 0, -np.inf, self.scores(group, view))
        fixed = self.protected(group, view)
        counts = np.maximum(self.counts(group, scores, fixed, tokens), fixed.sum(1))
        return top_places(np.where(fixed, np.inf, scores), counts)

    def protected(self, group: GroupView, view: SequenceView) -> np.ndarray:
        """bool [R, S]: places that are kept whatever they score."""
        at = group.positions
        return (at >= 0) & ((at < self.sinks) | (at >= view.length - self.newest))

    def counts(self, group: GroupView, scores: np.ndarray, fixed: np.ndarray, tokens: int) -> np.ndarray:
        """[R] int: how many places each row keeps, protected ones included. scores [R, S]: -inf where nothing is."""
        return np.full(len(scores), tokens)

    def scores(self, group: GroupView, view: SequenceView) -> np.ndarray:
        """[R, S]: higher is kept. What stands at empty places does not matter."""
        raise NotImplementedError


def policy_names() -> tuple[str, ...]:
    return names_in(PACKAGE)


def load_policy(name: str) -> type[KVPolicy]:
    """The policy class in the file `name`.py. Raises UnknownName with the known ones."""
    return load(PACKAGE, name, "POLICY", "KV policy")


def top_places(scores: np.ndarray, counts: Sequence[int] | np.ndarray) -> np.ndarray:
    """bool [R, S]: in each row the counts[r] places of highest score; -inf is never kept. Ties: the earlier place."""
    order = np.argsort(-scores, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.broadcast_to(np.arange(scores.shape[1]), scores.shape), axis=1)
    return (ranks < np.asarray(counts)[:, None]) & (scores > -np.inf)
