// Cutting a step's attention into work items, and running them on threads.
#pragma once
#include "attend.h"

namespace {

struct Job {
  const Step* step;
  const AttendCall* call;
  Shape shape;
  Tile* tiles;
  int* first_split;  // [n_tiles + 1]: items of a tile in `split` mode
  int* open_splits;  // [n_tiles]: splits not yet done
  float* partials;
  int64_t partial_floats;  // of one split
  int n_tiles, n_splits, next;  // next: of the tiles or splits, the first that nobody has taken
};

// KV heads that go together for n_tokens query tokens of one sequence.
INLINE int heads_together(const Step& s, const Shape& h, int n_tokens) {
  if (s.table.head_stride != 0) return 1;
  return imin(s.kv_heads, imax(1, h.tile_tokens / n_tokens));
}

inline Tile make_tile(const Step& s, const AttendCall& c, const Shape& h, int seq, int head, int n_heads, int token, int end) {
  Tile t{};
  t.seq = seq, t.head = head, t.n_heads = n_heads, t.token = token;
  t.row = table_row(s, seq, c.layer, head);
  t.n_tokens = imin(h.tile_tokens, end - token);
  t.head_rows = t.n_tokens * h.group;
  t.n_rows = t.head_rows * n_heads;
  t.first_position = t.last_position = s.positions[token];
  for (int i = 1; i < t.n_tokens; i++) {
    t.first_position = imin(t.first_position, s.positions[token + i]);
    t.last_position = imax(t.last_position, s.positions[token + i]);
  }
  return t;
}

INLINE int count_splits(const Step& s, const Shape& h, const Tile& t) {
  return (s.table.length[t.row] + h.columns - 1) / h.columns;
}

// Calls body(sequence, head, heads, first token, end of the sequence's tokens) for every tile of a step. Late tiles see
// more keys, so they stand first: the last items of a call are small ones.
template <class F>
INLINE void each_tile(const Step& s, const Shape& h, F body) {
  for (int i = s.n_seqs - 1; i >= 0; i--) {
    const int begin = s.query_start[i], end = s.query_start[i + 1];
    for (int k = (end - begin + h.tile_tokens - 1) / h.tile_tokens - 1; k >= 0; k--) {
      const int token = begin + k * h.tile_tokens, together = heads_together(s, h, imin(h.tile_tokens, end - token));
      for (int head = 0; head < s.kv_heads; head += together) body(i, head, imin(together, s.kv_heads - head), token, end);
    }
  }
}

inline int count_tiles(const Step& s, const Shape& h) {
  int n = 0;
  each_tile(s, h, [&](int, int, int, int, int) { n++; });
  return n;
}

inline void cut_tiles(const Step& s, const AttendCall& c, const Shape& h, Tile* out) {
  int n = 0;
  each_tile(s, h, [&](int seq, int head, int heads, int token, int end) {
    out[n++] = make_tile(s, c, h, seq, head, heads, token, end);
  });
}

inline Partial partial_at(const Job& j, int item) {
  float* p = j.partials + item * j.partial_floats;
  return {p, p + j.shape.rows, p + 2 * j.shape.rows};
}

// One tile, all its splits in order.
inline void run_tile(const Job& j, const Tile& t, Walk& walk) {
  thread_scratch.reset(work_bytes(*j.step, j.shape));
  Work w = take_work(thread_scratch, *j.step, j.shape);
  Partial total = take_partial(thread_scratch, j.shape), part = take_partial(thread_scratch, j.shape);
  stage_queries(*j.step, *j.call, j.shape, t, w);
  const int length = j.step->table.length[t.row];
  if (length == 0) clear(j.shape, t.n_rows, total);
  for (int begin = 0; begin < length; begin += j.shape.columns) {
    const int end = imin(begin + j.shape.columns, length);
    walk.tile = &t, walk.begin = end;
    if (end == length) {
      const int after = __atomic_load_n(&j.next, __ATOMIC_RELAXED);
      walk.tile = after < j.n_tiles ? j.tiles + after : nullptr, walk.begin = 0;
    }
    attend_split(*j.step, *j.call, j.shape, t, w, begin, end, walk, begin == 0 ? total : part);
    if (begin > 0) merge(j.shape, t.n_rows, total, part);
  }
  finish(*j.step, *j.call, j.shape, t, total);
}

// Tile after tile, as long as there are any. While one ends, the keys of the one that is probably next are asked for.
inline void run_tiles(int, void* context) {
  Job& j = *static_cast<Job*>(context);
  Walk walk{nullptr, 0, 0};
  for (;;) {
    const int i = __atomic_fetch_add(&j.next, 1, __ATOMIC_RELAXED);
    if (i >= j.n_tiles) return;
    if (walk.tile != j.tiles + i) walk.asked_columns = 0;
    run_tile(j, j.tiles[i], walk);
  }
}

struct Split {
  const Tile* tile;         // null: there is none
  int item, index, begin;  // its number, its tile's, its first column
};
INLINE Split split_at(const Job& j, int item) {
  if (item >= j.n_splits) return {nullptr, 0, 0, 0};
  int index = 0;
  while (j.first_split[index + 1] <= item) index++;
  return {j.tiles + index, item, index, (item - j.first_split[index]) * j.shape.columns};
}

// One split of one tile; whoever finishes a tile's last split merges them all, in their order.
inline void run_split(const Job& j, const Split& split, Walk& walk) {
  const Tile& t = *split.tile;
  thread_scratch.reset(work_bytes(*j.step, j.shape));
  Work w = take_work(thread_scratch, *j.step, j.shape);
  stage_queries(*j.step, *j.call, j.shape, t, w);
  const int end = imin(split.begin + j.shape.columns, j.step->table.length[t.row]);
  attend_split(*j.step, *j.call, j.shape, t, w, split.begin, end, walk, partial_at(j, split.item));
  if (__atomic_sub_fetch(j.open_splits + split.index, 1, __ATOMIC_ACQ_REL) > 0) return;
  const Partial total = partial_at(j, j.first_split[split.index]);
  for (int i = j.first_split[split.index] + 1; i < j.first_split[split.index + 1]; i++) merge(j.shape, t.n_rows, total, partial_at(j, i));
  finish(*j.step, *j.call, j.shape, t, total);
}

// Split after split. Each thread takes its next one before it works at one, so that it can ask for its keys; but for the last
// ones, which go to whoever is free.
inline void run_splits(int, void* context) {
  Job& j = *static_cast<Job*>(context);
  Walk walk{nullptr, 0, 0};
  auto take = [&] { return split_at(j, __atomic_fetch_add(&j.next, 1, __ATOMIC_RELAXED)); };
  for (Split split = take(); split.tile != nullptr;) {
    const bool early = split.item + 2 * j.step->n_threads < j.n_splits;
    Split then = early ? take() : Split{nullptr, 0, 0, 0};
    walk.tile = then.tile, walk.begin = then.begin;
    run_split(j, split, walk);
    if (!early) then = take(), walk.asked_columns = 0;
    split = then;
  }
}

// Tiles of long sequences are split over threads unless there are enough of them to share. The sums are the same either way.
inline void run_attend(const Step& s, const AttendCall& c) {
  find_spans(s, c.layer);
  Job j{};
  j.step = &s, j.call = &c, j.shape = shape_of(s, c);
  j.n_tiles = count_tiles(s, j.shape);
  if (j.n_tiles == 0) return;
  j.partial_floats = int64_t(j.shape.rows) * (2 + j.shape.padded_v);
  int64_t head_bytes = Scratch::bytes<Tile>(j.n_tiles) + 2 * Scratch::bytes<int>(j.n_tiles + 1);
  call_scratch.reset(head_bytes);
  j.tiles = call_scratch.take<Tile>(j.n_tiles);
  cut_tiles(s, c, j.shape, j.tiles);
  int n_items = 0, longest = 0;
  for (int i = 0; i < j.n_tiles; i++) {
    const int splits = imax(1, count_splits(s, j.shape, j.tiles[i]));
    n_items += splits, longest = imax(longest, splits);
  }
  if (s.n_threads <= 1 || n_items == j.n_tiles || longest <= n_items / (4 * s.n_threads)) {
    parallel_for(imin(s.n_threads, j.n_tiles), s.n_threads, run_tiles, &j);
    return;
  }
  call_scratch.reset(head_bytes + Scratch::bytes<float>(n_items * j.partial_floats));  // may move: cut again
  j.tiles = call_scratch.take<Tile>(j.n_tiles);
  cut_tiles(s, c, j.shape, j.tiles);
  j.first_split = call_scratch.take<int>(j.n_tiles + 1);
  j.open_splits = call_scratch.take<int>(j.n_tiles + 1);
  j.partials = call_scratch.take<float>(n_items * j.partial_floats);
  j.first_split[0] = 0;
  for (int i = 0; i < j.n_tiles; i++) {
    j.open_splits[i] = imax(1, count_splits(s, j.shape, j.tiles[i]));
    j.first_split[i + 1] = j.first_split[i] + j.open_splits[i];
  }
  j.n_splits = n_items;
  parallel_for(s.n_threads, s.n_threads, run_splits, &j);
}

}  // namespace
