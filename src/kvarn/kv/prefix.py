"""The prefix index: which cached blocks hold the beginning of a text. Integers only; it decides, the manager acts.

A tree of blocks under one root an identity. The index owns one reference to each block it names. A sequence *pins* the
deepest node it shares or made; whatever lies above a pin is in use. What nobody uses stands on a shelf, in the order in
which it was last used: a node is shelved after its children, so the first on the shelf is always a leaf.

Groups with a window need only the blocks that the next query can see: the parts of a window group are shelved and
evicted one by one, and a prefix can be used wherever its last window is complete.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from kvarn.kv.identity import Digest, Identity, block_key, sha256
from kvarn.kv.prefix_node import Eviction, Inserted, Match, Node, Part, PoolKey, Shelf, oldest
from kvarn.kv.prefix_why import Complete, Evicted, Mismatch, NeverSeen, OtherIdentity, Why, WindowGone

GHOSTS = 1 << 14  # keys of evicted blocks that are remembered, to say why a lookup missed
NEIGHBOURS = 8  # children looked at on each side for a partial match


class PrefixIndex:
    """window_tokens: for each cache group, its window or None. Keys come from `digest`."""

    def __init__(self, block_size: int, window_tokens: Sequence[int | None], digest: Digest = sha256) -> None:
        self.block_size = block_size
        self.window_nodes = tuple(None if w is None else -(-(w - 1) // block_size) for w in window_tokens)
        self._full = tuple(g for g, w in enumerate(window_tokens) if w is None)
        self._windowed = tuple(g for g, w in enumerate(window_tokens) if w is not None)
        self._digest = digest
        self._roots: dict[Identity, Node] = {}
        self._nodes: dict[bytes, Node] = {}
        self._shelves: dict[tuple[str, str], Shelf] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._tick = 0
        self._removals = self._adoptions = 0

    def __len__(self) -> int:
        """Blocks of tokens."""
        return len(self._nodes)

    # -- looking ------------------------------------------------------------------------------------------------------

    def lookup(self, identity: Identity, token_ids: Sequence[int], *, partial: bool = True) -> Match:
        """The longest usable beginning of token_ids; at least the last token is left to compute. Pure.

        partial: whether the beginning of one more block may be copied (formats whose slots stand alone)."""
        root = self._roots.get(identity)
        limit = len(token_ids) - 1
        path, why = self._path(root, token_ids, limit) if root else ([], self._absent(identity, token_ids))
        usable, lacking = self._usable(path)
        if usable < len(path):
            why = WindowGone(usable * self.block_size, lacking)
        tokens = usable * self.block_size
        nodes = tuple(path[:usable])
        source, n_tokens = None, 0
        if partial and root:
            wanted = tuple(token_ids[tokens : min(tokens + self.block_size, limit)])
            source, n_tokens = self._partial(nodes[-1] if nodes else root, wanted)
        return Match(identity, len(token_ids), nodes, tokens, why, source, n_tokens)

    def stamp(self, match: Match) -> tuple[int, ...]:
        """Changes whenever the same lookup could find something else: more behind its end, or less before it."""
        end = match.nodes[-1] if match.nodes else self._roots.get(match.identity)
        return (self._removals, len(end.children) if end else -1, self._adoptions if self._windowed else 0)

    def _path(self, root: Node, token_ids: Sequence[int], limit: int) -> tuple[list[Node], Why]:
        """The nodes that hold the full blocks of the first `limit` tokens, as far as there are any, and why no more."""
        path: list[Node] = []
        key, size = root.key, self.block_size
        for begin in range(0, limit - size + 1, size):
            span = tuple(token_ids[begin : begin + size])
            key = block_key(key, span, self._digest)
            node = self._nodes.get(key)
            if node is None:
                return path, Evicted(begin) if key in self._ghosts else NeverSeen(begin)
            if node.tokens != span or node.parent is not (path[-1] if path else root):
                return path, Mismatch(begin)
            path.append(node)
        return path, Complete(len(path) * size)

    def _absent(self, identity: Identity, token_ids: Sequence[int]) -> Why:
        """Why there is nothing at all of an identity."""
        if len(token_ids) <= self.block_size:
            return NeverSeen(0)
        first = block_key(identity.root_key(self._digest), token_ids[: self.block_size], self._digest)
        return Evicted(0) if first in self._ghosts else NeverSeen(0)

    def _usable(self, path: Sequence[Node]) -> tuple[int, int]:
        """(the most nodes of the path whose last windows are complete, the group that lacks one beyond that)."""
        usable, lacking = 0, 0
        present = dict.fromkeys(self._windowed, 0)
        for n, node in enumerate(path, 1):
            complete = True
            for group in self._windowed:
                present[group] = present[group] + 1 if node.parts[group] is not None else 0
                if present[group] < min(n, self.window_nodes[group] or 0):
                    complete, lacking = False, group
            if complete:
                usable = n
        return usable, lacking

    def _partial(self, parent: Node, wanted: tuple[int, ...]) -> tuple[Node | None, int]:
        """The child that begins with the most of `wanted` and has all its blocks. In sorted order it stands next to
        where `wanted` would; a few steps further, where a window group's part is gone there."""
        children = parent.children
        at = bisect_left(children, wanted, key=_tokens)
        best, most = None, 0
        for side in (children[at : at + NEIGHBOURS], children[max(0, at - NEIGHBOURS) : at][::-1]):
            for node in side:
                if (n := _common(node.tokens, wanted)) <= most:
                    break
                if all(part is not None for part in node.parts):
                    best, most = node, n
        return best, most

    def parts(self, match: Match, group: int) -> tuple[Part, ...]:
        """The blocks of a group that a sequence takes over: all of them, or those of its window. The last ones."""
        reach = self.window_nodes[group]
        nodes = match.nodes if reach is None else match.nodes[max(0, len(match.nodes) - reach) :]
        found = tuple(part for node in nodes if (part := node.parts[group]) is not None)
        assert len(found) == len(nodes), "a match promised blocks that are gone"
        return found

    def explain(self, match: Match, token_ids: Sequence[int]) -> Why:
        """Why a match ends where it does, also looking at other formats, policies and adapters of the same model and
        salt. Other salts are never looked at: what one tenant asked is no other's to learn."""
        best: Match | None = None
        for other in self._roots:
            if other != match.identity and (other.model, other.salt) == (match.identity.model, match.identity.salt):
                found = self.lookup(other, token_ids, partial=False)
                if found.tokens > (best or match).tokens:
                    best = found
        if best is None or match.tokens + self.block_size > match.asked_tokens - 1:
            return match.why
        return OtherIdentity(match.tokens, best.tokens, best.identity)

    # -- using --------------------------------------------------------------------------------------------------------

    def acquire(self, match: Match) -> Node:
        """Pin what a match found, right after the lookup, and get the sequence's place in the index."""
        if match.nodes:
            assert match.nodes[-1].alive, "the index changed between lookup and acquire"
            return self.pin(match.nodes[-1])
        return self.pin(self._roots.get(match.identity) or self._new_root(match.identity))

    def _new_root(self, identity: Identity) -> Node:
        kind, groups = _kind(identity), len(self.window_nodes)
        shelf = self._shelves.setdefault(kind, Shelf(groups))
        shelf.roots += 1
        key = identity.root_key(self._digest)
        root = Node(key, shelf, parts=[None] * groups, window_holds=[0] * groups, identity=identity)
        self._roots[identity] = root
        return root

    def pin(self, node: Node) -> Node:
        """One more sequence stands here (a fork, or while a partial block is copied)."""
        node.pins += 1
        self._hold(node)
        for group in self._windowed:
            for above in self._window(node, group):
                above.window_holds[group] += 1
                if above.window_holds[group] == 1 and above.alive:
                    above.shelf.remove(above.shelf.parts[group], above, (group,))
        return node

    def unpin(self, node: Node) -> None:
        """A sequence leaves. Its blocks stay, the most recently used of all."""
        assert node.pins > 0, "unpinned more often than pinned"
        node.pins -= 1
        self._tick += 1
        for group in self._windowed:
            for above in reversed(list(self._window(node, group))):
                above.window_holds[group] -= 1
                if above.window_holds[group] == 0 and above.alive:
                    self._shelve_part(above, group)
        self._let_go(node)

    def extend(
        self, place: Node, token_ids: Sequence[int], parts: Sequence[Part | None], *, switches: bool = False
    ) -> Inserted | None:
        """The sequence that stands at `place` sealed its next block: move its pin there.

        parts: for each group its blocks; None only for a window group that dropped them already. switches: where the
        index has other blocks with the same contents, the sequence goes on with those (`Inserted.node.parts`) and gives
        its own back; a pin stands for a sequence that really holds what is pinned. None where it does not switch and
        would have to, the index was reset meanwhile, or another text has the same key: the sequence then stays where it
        is, and goes on alone.
        """
        assert place.pins > 0 and len(token_ids) == self.block_size and len(parts) == len(self.window_nodes)
        assert all(parts[g] is not None for g in self._full), "a group without a window gave no blocks"
        span = tuple(token_ids)
        key = block_key(place.key, span, self._digest)
        node = self._nodes.get(key)
        if not place.alive or (node is not None and (node.tokens != span or node.parent is not place)):
            return None
        if node is None:
            node = self._new(key, place, span)
        elif not switches and any(
            mine and theirs and mine != theirs for mine, theirs in zip(parts, node.parts, strict=True)
        ):
            return None
        self.pin(node)
        adopted = tuple(g for g, part in enumerate(parts) if part is not None and node.parts[g] is None)
        self._adoptions += len(adopted)
        for group in adopted:
            node.parts[group] = parts[group]
            if group in self._windowed and node.window_holds[group] == 0:  # a window of one token holds no block
                self._shelve_part(node, group)
        self.unpin(place)
        return Inserted(node, adopted)

    def _new(self, key: bytes, parent: Node, tokens: tuple[int, ...]) -> Node:
        groups = len(self.window_nodes)
        node = Node(key, parent.shelf, parent, tokens, parent.depth + 1, [None] * groups, [], [0] * groups)
        self._nodes[key] = node
        self._ghosts.pop(key, None)
        insort(parent.children, node, key=_tokens)
        return node

    def _hold(self, node: Node | None) -> None:
        """Off the shelf, and so are all above."""
        while node is not None:
            node.held += 1
            if node.held > 1:
                return
            node.shelf.remove(node.shelf.nodes, node, self._full)
            node = node.parent

    def _let_go(self, node: Node | None) -> None:
        """Back on the shelf, then those above that are no longer held; what is empty vanishes."""
        while node is not None:
            parent = node.parent
            node.held -= 1
            if node.held:
                return
            if node.alive and node.parent is not None:
                node.shelf.put(node.shelf.nodes, node, self._tick, self._full)
            self._prune(node)
            node = parent

    def _window(self, node: Node, group: int) -> Iterator[Node]:
        """The nodes that a sequence at `node` sees through the group's window, the nearest first."""
        for _ in range(self.window_nodes[group] or 0):
            if node.parent is None:
                return
            yield node
            node = node.parent

    def _shelve_part(self, node: Node, group: int) -> None:
        if node.parts[group] is not None:
            node.shelf.put(node.shelf.parts[group], node, self._tick, (group,))

    # -- evicting -----------------------------------------------------------------------------------------------------

    def evictable_blocks(self, group: int, pool: int) -> int:
        """Blocks of a group's pool that `evict` could free now."""
        return sum(shelf.blocks[group, pool] for shelf in self._shelves.values())

    def evict(self, group: int, pool: int, n_blocks: int) -> tuple[Eviction, ...]:
        """Forget what was least recently used until n_blocks of the group's pool are freed, or there are no more."""
        done: list[Eviction] = []
        while n_blocks > 0 and (shelf := self._oldest_shelf(group, pool)) is not None:
            node = oldest(self._entries(shelf, group))
            gone = self._evict_node(node) if group in self._full else self._evict_part(node, group)
            n_blocks -= sum(place == (group, pool) for place, _ in gone.blocks)
            done.append(gone)
        return tuple(done)

    def _entries(self, shelf: Shelf, group: int) -> OrderedDict[Node, int]:
        return shelf.nodes if group in self._full else shelf.parts[group]

    def _oldest_shelf(self, group: int, pool: int) -> Shelf | None:
        """Of the shelves that hold such blocks, the one whose first entry is unused for longest."""
        holding = [s for s in self._shelves.values() if s.blocks[group, pool]]
        return min(holding, key=lambda s: next(iter(self._entries(s, group).values())), default=None)

    def _evict_node(self, node: Node) -> Eviction:
        assert not node.children and not node.held, "evicted what is in use"
        idle = self._tick - node.shelf.nodes[node]
        blocks = _blocks(node)
        self._remove(node)
        if node.parent is not None:
            self._prune(node.parent)
        return Eviction(blocks, node.depth * self.block_size, True, idle)

    def _evict_part(self, node: Node, group: int) -> Eviction:
        assert not node.window_holds[group], "evicted what is in use"
        idle = self._tick - node.shelf.parts[group][node]
        blocks = tuple(((group, pool), block) for pool, block in node.parts[group] or ())
        node.shelf.remove(node.shelf.parts[group], node, (group,))
        node.parts[group] = None
        self._removals += 1
        self._prune(node)
        return Eviction(blocks, node.depth * self.block_size, not node.alive, idle)

    def _prune(self, node: Node) -> None:
        """Remove a node without blocks that leads nowhere, and those above that then lead nowhere either."""
        while not node.held and not node.children and not any(node.parts) and node.alive:
            parent = node.parent
            self._remove(node)
            if parent is None:
                return
            node = parent

    def _remove(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        shelf = node.shelf
        shelf.remove(shelf.nodes, node, self._full)
        for group in self._windowed:
            shelf.remove(shelf.parts[group], node, (group,))
        node.alive = False
        self._removals += 1
        if node.identity is not None:
            del self._roots[node.identity]
            shelf.roots -= 1
            if not shelf.roots:
                del self._shelves[_kind(node.identity)]
            return
        assert node.parent is not None
        del self._nodes[node.key]
        node.parent.children.pop(bisect_left(node.parent.children, node.tokens, key=_tokens))
        self._ghosts[node.key] = None
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)

    def reset(self) -> tuple[tuple[PoolKey, int], ...]:
        """Forget everything; returns the blocks to give back. Sequences that run keep theirs, and index no more."""
        everything = [*self._nodes.values(), *self._roots.values()]
        blocks = tuple(block for node in everything for block in _blocks(node))
        self._removals += 1
        for node in everything:
            node.alive = False
        for mapping in (self._nodes, self._roots, self._shelves, self._ghosts):
            mapping.clear()
        return blocks

    # -- checking -----------------------------------------------------------------------------------------------------

    def named(self, group: int, pools: int) -> list[Counter[int]]:
        """For each of the group's pools, how often the index refers to each block: once, or not at all."""
        named: list[Counter[int]] = [Counter() for _ in range(pools)]
        for node in self._nodes.values():
            for pool, block in node.parts[group] or ():
                named[pool][block] += 1
        return named

    def check(self) -> None:
        """What is counted equals what a walk over the whole tree finds."""
        nodes = [*self._nodes.values(), *self._roots.values()]
        blocks: Counter[PoolKey] = Counter()
        for node in nodes:
            shelf = node.shelf
            assert node.alive and node.held == node.pins + sum(child.held > 0 for child in node.children)
            assert [c.tokens for c in node.children] == sorted(c.tokens for c in node.children)
            assert all(child.parent is node and self._nodes[child.key] is child for child in node.children)
            assert (node in shelf.nodes) == (not node.held and node.identity is None)
            assert node.held or node.children or any(node.parts), "an empty node leads nowhere"
            for group in self._windowed:
                free = node.parts[group] is not None and not node.window_holds[group]
                assert (node in shelf.parts[group]) == free
            idle = (*self._windowed, *(() if node.held else self._full))
            for group in idle:
                if group in self._full or not node.window_holds[group]:
                    blocks.update((group, pool) for pool, _ in node.parts[group] or ())
        counted: Counter[PoolKey] = Counter()
        for shelf in self._shelves.values():
            counted.update(shelf.blocks)
        assert +counted == blocks, f"{+counted} are counted as evictable, {blocks} are"


def _kind(identity: Identity) -> tuple[str, str]:
    """Blocks of one kind lie in the same pools."""
    return identity.kv_format, identity.policy


def _tokens(node: Node) -> tuple[int, ...]:
    return node.tokens


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two have in common at the beginning."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def _blocks(node: Node) -> tuple[tuple[PoolKey, int], ...]:
    return tuple(((g, pool), block) for g, part in enumerate(node.parts) for pool, block in part or ())
