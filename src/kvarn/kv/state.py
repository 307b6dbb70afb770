"""One admitted sequence, as the manager keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from kvarn.kv.moments import QueryMoments
from kvarn.kv.policies.base import Decision, KVPolicy
from kvarn.kv.prefix_node import Node
from kvarn.kv.prefix_why import Why
from kvarn.kv.signals import QueryRing
from kvarn.kv.turning import Written


@dataclass(slots=True)
class SequenceState:
    """rows: its first table row in each group. length: tokens whose K and V are in the cache; reserved: how many could
    be, before another block is taken. token_ids: the committed tokens. policy: what decides over its blocks; rings: the
    queries it reads, moments: those of all its queries, for each group; decided_blocks: full blocks of the text when it
    was asked last, -1 before that; written: of each group whose first blocks were turned, how they were written;
    reread: for each group, the weights that reading the text again gave its tokens [R, n], once that was done;
    filled: the last step filled a block; grown: tokens that it brought. place: where it stands in the prefix index,
    None where it has no part in it; indexed: its blocks that the index knows. decision: what
    its policy decided and found no free blocks for; it must be acted on before another token is computed.
    prefix_why: why its prefix lookup ended where it did.
    """

    seq_id: int
    rows: tuple[int, ...]
    length: int = 0
    reserved: int = 0
    token_ids: list[int] = field(default_factory=list)
    policy: KVPolicy | None = None
    prompt_tokens: int = 0
    rings: tuple[QueryRing | None, ...] = ()
    moments: tuple[QueryMoments | None, ...] = ()
    decided_blocks: int = -1
    reread: tuple[np.ndarray | None, ...] = ()
    written: dict[int, Written] = field(default_factory=dict)
    filled: bool = False
    grown: int = 0
    place: Node | None = None
    indexed: int = 0
    decision: Decision | None = None
    prefix_why: Why | None = None

    @property
    def decides_now(self) -> bool:
        """Whether a policy changes its blocks from here on: not before its prompt is complete."""
        return self.policy is not None and self.policy.decides and self.length >= self.prompt_tokens

    def child(self, seq_id: int, rows: tuple[int, ...]) -> SequenceState:
        """A sequence that goes on from here on its own; its rows are empty, and it has no place in the index yet."""
        return replace(
            self,
            seq_id=seq_id,
            rows=rows,
            reserved=self.length,
            token_ids=list(self.token_ids),
            rings=tuple(r and r.copy() for r in self.rings),
            moments=tuple(m and m.copy() for m in self.moments),
            written=dict(self.written),
            filled=False,
            place=None,
            indexed=0,
            prefix_why=None,
        )
