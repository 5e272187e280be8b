// How `hooks.Checksum` screens one product C = A B on a GPU, in at most four launches: B E, and A (B E), before the
// operator runs; C E with the most suspected row, and what is exact of that row if it is suspect, after it has.
//
// Invariant: as in `kernel.h`. The formulas are those of `hooks.checksum.arithmetic`, and the verdict is Python's.

#pragma once

#define OPINTERCEPT_CHECKS
#include "kernel.h"

namespace opintercept::device {

constexpr int STAGES = 4;
constexpr int TILE = 32, DEPTH = 32; // rows that a block has at once, and columns of A
constexpr int SLOTS = 3, MOST_GROUPS = 16 * SLOTS; // checksums of a row
constexpr int RUN = 8; // values that a thread loads before it uses one
constexpr int FEW_TILES = 256; // fewer are split among blocks
constexpr int PARTS = 32; // see `arithmetic.PARTS`

// Matrices of the batch, which may be the same one.
struct View {
  const void* data;
  long long of_batch, of_row, of_column; // strides
  int kind;
};

// What is computed of the suspected row: an array of so many numbers as it has columns for each that is wanted.
enum Field : int { GOT, VALUE, SIZE, SQUARE, CUT, PART, BIAS, LOST, FACTOR, FIELDS };

// A row in the host's memory, in the place of a `Row`.
struct Verdict {
  double worst; // how suspect the most suspected row is
  double most; // the largest magnitude in that row of A, and in B; only if the row is suspect
  Word flat, suspected; // which it is, counted through the batch, and how many are suspect
  Word unused[sizeof(Row) / sizeof(Word) - 5];
  Word mark;
};
static_assert(sizeof(Verdict) == sizeof(Row));
#ifndef __CUDACC_RTC__ // which does not know it before 13.5
static_assert(__builtin_offsetof(Verdict, mark) == __builtin_offsetof(Row, mark));
#endif

struct Best {
  double score;
  Word flat, suspected;
};

// What the launches on a stream share. Zero when it is new, and again after each launch.
struct Counters {
  unsigned int done[STAGES][FEW_TILES], all[STAGES];
  Word most;
};

// A product. Arrays of `void` are of float, or of double for float64.
struct Check {
  View lhs, rhs, output, bias; // [batch, height, depth], [batch, depth, width]; [batch, height, width]
  const float *rows, *columns; // scales of lhs and of rhs, or null
  long long of_rows, of_columns;
  Word batch, height, depth, width;
  int groups, group_width;
  int splits, split_depth; // of A (B E)
  bool is_fresh; // whether nothing is remembered of B
  bool has_bias, one_bias; // of one row for all
  double alpha, beta;
  double least; // about the errors of numbers too small for the dtype
  double floor, fallback; // added to the share of |A_i| |B| that is left of A_i B, and what stands for one that is odd
  double deviation, limit; // of what is not suspect
  void* inner; // B E, [batch, depth, groups]
  double* scale; // its norms over rows, [batch, groups], and the share after them
  void *middle, *norms; // A (B E), [batch, height, groups], and the norms of the rows of A
  void* parts; // of both, by split
  double *scale_parts, *tile_sums;
  void *bias_sums, *bias_norms, *bias_copy; // [1 or batch * height, groups], and the one row
  void* residual; // C E, [batch, height, groups]
  Best* bests; // of tiles of rows, and of all after them
  double* terms; // [fields, width]
  int fields; // those that are wanted, as bits
  Row* to;
};
static_assert(sizeof(Check) <= 4000);

template <typename W>
struct Summed {
  W sum, squares;
};

// The memory that the threads of a block share.
template <typename W>
union Room {
  struct {
    W lhs[TILE][DEPTH + 1], inner[DEPTH * MOST_GROUPS];
  } tile;
  Summed<W> sums[THREADS];
  double doubles[THREADS][2];
  struct {
    double relative[TILE * MOST_GROUPS];
    Best best[TILE];
  } score;
  Best bests[THREADS];
  Word words[THREADS];
};

#ifdef __CUDACC_RTC__
inline float fused(float a, float b, float c) {
  return fmaf(a, b, c);
}
inline double root(double value) {
  return sqrt(value);
}
#else
inline float fused(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
inline double root(double value) {
  return __builtin_sqrt(value);
}
#endif

template <typename T>
inline T absolute(T value) {
  return value < 0 ? -value : value;
}
inline double magnitude(double value) { // of zeros and NaN, too
  return same_bits<double>(same_bits<long long>(value) & ~SIGN);
}
inline double larger_of(double a, double b) { // NaN if one of them is
  return a != a || a >= b ? a : b;
}

// The root of the sum of squares, one of them not zero, which may be smaller than any number.
inline double length(double a, double b) {
  const double one = magnitude(a), other = magnitude(b), longer = one > other ? one : other;
  const double ratio = (one > other ? other : one) / longer;
  return longer * root(1 + ratio * ratio);
}

template <typename T>
inline T least_of(T a, T b) {
  return a < b ? a : b;
}
inline Word parts_of(Word count, Word each) {
  return (count + each - 1) / each;
}

// What another block has written in this launch.
template <typename T>
inline T fetched_value(const T* from) {
  return *reinterpret_cast<const volatile T*>(from);
}
inline Best fetched_best(const Best* from) {
  return {fetched_value(&from->score), fetched_value(&from->flat), fetched_value(&from->suspected)};
}

// The random sign of a column, as a bit.
inline unsigned sign_of(unsigned column) {
  unsigned mixed = column * 0x9E3779B1u + 0x7F4A7C15u;
  mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6Bu;
  mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35u;
  return mixed >> 31;
}
inline float with_sign(float value, unsigned column) {
  return same_bits<float>(same_bits<unsigned>(value) ^ (sign_of(column) << 31));
}
inline double with_sign(double value, unsigned column) {
  return same_bits<double>(same_bits<Word>(value) ^ (static_cast<Word>(sign_of(column)) << 63));
}

// Loads up to `count` values that are `step` apart, and zeros after them.
template <int N, typename W>
inline void load(const View& x, long long at, long long step, int count, W* to) {
  auto values = [&](auto format) {
    using F = decltype(format);
    auto* data = static_cast<const typename F::Bits*>(x.data) + at;
    for (int i = 0; i < N; i++) {
      to[i] = i < count ? static_cast<W>(F::value(format.single(data[i * step]))) : W(0);
    }
  };
  if constexpr (sizeof(W) == 8) {
    values(Float64());
  } else {
    switch (x.kind) {
      case FLOAT32:
        return values(Float32());
      case BFLOAT16:
        return values(BFloat16());
      case FLOAT16:
        return values(Narrow<short>(10, 15, 0x7C00));
      default:
        return values(float8(x.kind));
    }
  }
}

template <typename W>
inline W value_of(const View& x, long long at) {
  W found;
  load<1>(x, at, 0, 1, &found);
  return found;
}

inline long long place_of(const View& x, Word matrix, Word row, Word column) {
  return static_cast<long long>(matrix) * x.of_batch + static_cast<long long>(row) * x.of_row +
      static_cast<long long>(column) * x.of_column;
}

inline bool goes_down(const View& x) { // whether rows are closer together than columns
  return absolute(x.of_row) < absolute(x.of_column);
}

// How a block adds up `TILE` rows in groups: so many sums at once, each by so many threads.
struct Passes {
  bool down;
  int lanes, items, count;

  Passes(const Check& check, const View& x) : down(goes_down(x)), lanes(1) {
    while (lanes < (down ? 8 : THREADS) && 2 * lanes * RUN <= check.group_width) {
      lanes *= 2;
    }
    items = THREADS / lanes;
    count = (TILE * check.groups + items - 1) / items;
  }
};

// Calls `use(row, group, sum)` with sums over the columns of a group, times signs and `columns`. There are `all` rows, in
// matrices of `rows` each.
template <typename W, typename Use>
inline void add_signed(
    const Check& check, const View& x, const Passes& passes, Word rows, Word all, Word tile, int pass,
    const float* columns, Summed<W>* room, const Use& use) {
  const int lanes = passes.lanes, items = passes.items;
  auto slice_of = [&](int thread) { return passes.down ? thread / items : thread % lanes; };
  auto find = [&](int thread, Word& row, int& group) {
    const int item = pass * items + (passes.down ? thread % items : thread / lanes);
    row = tile * TILE + (passes.down ? item % TILE : item / check.groups);
    group = passes.down ? item / TILE : item % check.groups;
    return item < TILE * check.groups && row < all;
  };
  each_thread([&](int thread, int) {
    Summed<W> own{0, 0};
    Word row;
    int group;
    if (find(thread, row, group)) {
      const Word matrix = row / rows;
      const long long base = place_of(x, matrix, row - matrix * rows, 0);
      const int first = group * check.group_width;
      const int end = least_of(first + check.group_width, static_cast<int>(check.width));
      for (int at = first + slice_of(thread); at < end; at += lanes * RUN) {
        const int count = least_of(RUN, (end - at + lanes - 1) / lanes);
        W values[RUN];
        load<RUN>(x, base + at * x.of_column, lanes * x.of_column, count, values);
        for (int i = 0; i < RUN; i++) {
          const int column = at + i * lanes;
          if (columns != nullptr && i < count) {
            values[i] *= columns[column * check.of_columns];
          }
          own.sum += with_sign(values[i], column);
          own.squares = fused(values[i], values[i], own.squares);
        }
      }
    }
    room[thread] = own;
  });
  for (int half = lanes / 2; half > 0; half /= 2) {
    each_thread([&](int thread, int) {
      if (slice_of(thread) < half) {
        const Summed<W>& other = room[thread + half * (passes.down ? items : 1)];
        room[thread].sum += other.sum;
        room[thread].squares += other.squares;
      }
    });
  }
  each_thread([&](int thread, int) {
    Word row;
    int group;
    if (slice_of(thread) == 0 && find(thread, row, group)) {
      use(row, group, room[thread]);
    }
  });
}

inline Word tiles_of(Word rows) {
  return parts_of(rows, TILE);
}
inline Word bias_rows(const Check& check) {
  return check.one_bias ? 1 : check.batch * check.height;
}
inline Word bias_blocks(const Check& check) {
  return check.has_bias ? tiles_of(bias_rows(check)) * Passes(check, check.bias).count : 0;
}
inline Word product_tiles(const Check& check) {
  return check.batch * tiles_of(check.height);
}
// Among how many blocks the sums of a tile of the output are split.
inline int output_splits(const Check& check) {
  const Word tiles = tiles_of(check.batch * check.height);
  const auto passes = static_cast<Word>(Passes(check, check.output).count);
  return tiles >= FEW_TILES ? 1 : static_cast<int>(least_of(passes, parts_of(FEW_TILES, tiles)));
}
inline Word blocks_of(const Check& check, int stage) {
  switch (stage) {
    case 0:
      return tiles_of(check.batch * check.depth) * Passes(check, check.rhs).count;
    case 1:
      return product_tiles(check) * check.splits + bias_blocks(check);
    case 2:
      return tiles_of(check.batch * check.height) * output_splits(check);
    default:
      return parts_of(check.width, THREADS);
  }
}

// B E.
template <typename W>
inline void add_inner(const Check& check, Word block, Room<W>& room) {
  const Passes passes(check, check.rhs);
  const Word tile = block / passes.count;
  W* inner = static_cast<W*>(check.inner);
  add_signed(
      check,
      check.rhs,
      passes,
      check.depth,
      check.batch * check.depth,
      tile,
      static_cast<int>(block - tile * passes.count),
      check.columns,
      room.sums,
      [&](Word row, int group, const Summed<W>& found) { inner[row * check.groups + group] = found.sum; });
}

// The sums of a bias, and the norms of its elements in groups.
template <typename W>
inline void add_bias(const Check& check, Word block, Room<W>& room) {
  const Passes passes(check, check.bias);
  const Word tile = block / passes.count, all = bias_blocks(check);
  W *sums = static_cast<W*>(check.bias_sums), *norms = static_cast<W*>(check.bias_norms);
  add_signed(
      check,
      check.bias,
      passes,
      check.one_bias ? 1 : check.height,
      bias_rows(check),
      tile,
      static_cast<int>(block - tile * passes.count),
      nullptr,
      room.sums,
      [&](Word row, int group, const Summed<W>& found) {
        sums[row * check.groups + group] = found.sum;
        norms[row * check.groups + group] = static_cast<W>(root(found.squares));
      });
  if (check.one_bias) { // somebody may overwrite it before the row is looked at
    each_thread([&](int thread, int) {
      for (Word column = block * THREADS + thread; column < check.width; column += all * THREADS) {
        static_cast<W*>(check.bias_copy)[column] = value_of<W>(check.bias, place_of(check.bias, 0, 0, column));
      }
    });
  }
}

// Adds up two numbers of each thread in the first ones.
inline void join(double (*numbers)[2]) {
  fold(numbers, [](double (&to)[2], const double (&other)[2]) {
    to[0] += other[0];
    to[1] += other[1];
  });
}

// A part of A (B E), of the norms of A's rows, and of those of B E.
template <typename W>
inline void multiply(const Check& check, Word tile, int split, Room<W>& room) {
  const int groups = check.groups, slots = (groups + 15) / 16;
  const Word each = tiles_of(check.height), matrix = tile / each, first = (tile - matrix * each) * TILE;
  const Word from = static_cast<Word>(split) * check.split_depth;
  const Word to = least_of(from + check.split_depth, check.depth);
  const bool down = goes_down(check.lhs), scales = check.is_fresh && first == 0;
  const W* inner = static_cast<const W*>(check.inner) + matrix * check.depth * groups;
  W sums[HELD][2][SLOTS] = {}, norms[HELD] = {}, squares[HELD] = {};
  auto& shared = room.tile;
  for (Word depth = from; depth < to; depth += DEPTH) {
    each_thread([&](int thread, int) {
      constexpr int EACH = TILE * DEPTH / THREADS, APART = THREADS / TILE;
      const int fast = thread % TILE, slow = thread / TILE;
      const Word row = first + (down ? fast : slow), column = depth + (down ? slow : fast);
      const Word at_most = down ? to : check.height, start = down ? column : row;
      const bool inside = down ? row < check.height : column < to;
      const Word rest = inside && start < at_most ? parts_of(at_most - start, APART) : 0;
      W values[EACH];
      load<EACH>(
          check.lhs,
          rest == 0 ? 0 : place_of(check.lhs, matrix, row, column),
          APART * (down ? check.lhs.of_column : check.lhs.of_row),
          static_cast<int>(least_of<Word>(rest, EACH)),
          values);
      for (int i = 0; i < EACH; i++) {
        (down ? shared.lhs[fast][slow + i * APART] : shared.lhs[slow + i * APART][fast]) = values[i];
      }
      const int count = static_cast<int>(least_of<Word>(DEPTH, to - depth)) * groups;
      for (int i = thread; i < DEPTH * groups; i += THREADS) {
        shared.inner[i] = i < count ? inner[depth * groups + i] : W(0);
      }
    });
    each_thread([&](int thread, int held) {
      const int row = thread / 16;
      for (int d = 0; d < DEPTH; d++) {
        const W a = shared.lhs[row][d], b = shared.lhs[row + 16][d];
        for (int slot = 0; slot < SLOTS; slot++) {
          if (slot < slots) {
            const W by = shared.inner[d * groups + least_of(thread % 16 + 16 * slot, groups - 1)];
            sums[held][0][slot] = fused(a, by, sums[held][0][slot]);
            sums[held][1][slot] = fused(b, by, sums[held][1][slot]);
          }
        }
      }
      if (thread >= THREADS - TILE) {
        for (int d = 0; d < DEPTH; d++) {
          const W value = shared.lhs[thread - (THREADS - TILE)][d];
          norms[held] = fused(value, value, norms[held]);
        }
      }
      if (scales && thread < groups) {
        for (int d = 0; d < DEPTH; d++) {
          const W value = shared.inner[d * groups + thread];
          squares[held] = fused(value, value, squares[held]);
        }
      }
    });
  }
  const Word row_size = groups + 1;
  W* parts = static_cast<W*>(check.parts) + (split * check.batch + matrix) * check.height * row_size;
  each_thread([&](int thread, int held) {
    for (int half = 0; half < 2; half++) {
      const Word row = first + thread / 16 + 16 * half;
      for (int slot = 0; slot < SLOTS; slot++) {
        const int group = thread % 16 + 16 * slot;
        if (row < check.height && group < groups) {
          parts[row * row_size + group] = sums[held][half][slot];
        }
      }
    }
    const Word row = first + thread - (THREADS - TILE);
    if (thread >= THREADS - TILE && row < check.height) {
      parts[row * row_size + groups] = norms[held];
    }
    if (scales && thread < groups) {
      check.scale_parts[(split * check.batch + matrix) * groups + thread] = squares[held];
    }
  });
}

// Adds up the parts of a tile, and how large they are.
template <typename W>
inline void join_tile(const Check& check, Word tile, Room<W>& room) {
  const Word each = tiles_of(check.height), matrix = tile / each, first = (tile - matrix * each) * TILE;
  const Word row_size = check.groups + 1, all = check.batch * check.height * row_size;
  const W* parts = static_cast<const W*>(check.parts) + matrix * check.height * row_size;
  W *middle = static_cast<W*>(check.middle), *norms = static_cast<W*>(check.norms);
  each_thread([&](int thread, int) {
    double left = 0, lengths = 0;
    for (Word i = thread; i < TILE * row_size; i += THREADS) {
      const Word row = first + i / row_size, group = i % row_size;
      if (row < check.height) {
        W sum = 0;
        for (int split = 0; split < check.splits; split++) {
          sum += fetched_value(parts + split * all + row * row_size + group);
        }
        const Word flat = matrix * check.height + row;
        if (group < static_cast<Word>(check.groups)) {
          middle[flat * check.groups + group] = sum;
          left += magnitude(sum);
        } else {
          const double norm = root(sum);
          norms[flat] = static_cast<W>(norm);
          lengths += norm;
        }
      }
    }
    room.doubles[thread][0] = left;
    room.doubles[thread][1] = lengths;
  });
  if (check.is_fresh) {
    join(room.doubles);
    each_thread([&](int thread, int) {
      if (thread < 2) {
        check.tile_sums[2 * tile + thread] = room.doubles[0][thread];
      }
    });
  }
}

// How much of |A_i| |B| is left of A_i B: see `arithmetic._left`.
template <typename W>
inline void find_share(const Check& check, Room<W>& room) {
  const Word count = check.batch * check.groups, each = tiles_of(check.height);
  each_thread([&](int thread, int) {
    for (Word i = thread; i < count; i += THREADS) {
      double squares = 0;
      for (int split = 0; split < check.splits; split++) {
        squares += fetched_value(check.scale_parts + split * count + i);
      }
      check.scale[i] = root(squares);
    }
  });
  each_thread([&](int thread, int) {
    double left = 0, whole = 0;
    for (Word tile = thread; tile < product_tiles(check); tile += THREADS) {
      left += fetched_value(check.tile_sums + 2 * tile);
      double scale = 0;
      for (int group = 0; group < check.groups; group++) {
        scale += check.scale[tile / each * check.groups + group];
      }
      whole += fetched_value(check.tile_sums + 2 * tile + 1) * scale;
    }
    room.doubles[thread][0] = left;
    room.doubles[thread][1] = whole;
  });
  join(room.doubles);
  each_thread([&](int thread, int) {
    if (thread == 0) {
      const double share = room.doubles[0][0] / room.doubles[0][1];
      check.scale[count] = is_finite(share) ? share + check.floor : check.fallback;
    }
  });
}

inline void take_better(Best& best, const Best& other) {
  const Word suspected = best.suspected + other.suspected;
  if (other.score > best.score || (other.score == best.score && other.flat < best.flat)) {
    best = other;
  }
  best.suspected = suspected;
}

// How suspect the rows of a tile are: see `arithmetic.Screen.rows`.
template <typename W>
inline void score_tile(const Check& check, Word tile, Room<W>& room) {
  const Word all = check.batch * check.height, first = tile * TILE;
  const int groups = check.groups;
  auto& shared = room.score;
  const double share = check.scale[check.batch * groups];
  each_thread([&](int thread, int) {
    for (int i = thread; i < TILE * groups; i += THREADS) {
      const Word row = first + i / groups;
      const int group = i % groups;
      if (row >= all) {
        continue;
      }
      const Word matrix = row / check.height;
      double factor = check.alpha, added = 0, smooth = check.least;
      if (check.rows != nullptr) {
        factor *= check.rows[static_cast<long long>(row) * check.of_rows];
      }
      if (check.has_bias) {
        const Word place = (check.one_bias ? 0 : row) * groups + group;
        added = check.beta * static_cast<const W*>(check.bias_sums)[place];
        smooth += magnitude(check.beta) * static_cast<const W*>(check.bias_norms)[place];
      }
      const double expected = factor * static_cast<const W*>(check.middle)[row * groups + group] + added;
      smooth +=
          magnitude(factor) * static_cast<const W*>(check.norms)[row] * check.scale[matrix * groups + group] * share;
      const double found = fetched_value(static_cast<const W*>(check.residual) + row * groups + group);
      shared.relative[i] = magnitude(found - expected) / length(expected, smooth);
    }
  });
  each_thread([&](int thread, int) {
    if (thread < TILE) {
      const Word row = first + thread;
      double worst = 0, squares = 0;
      for (int group = 0; group < groups && row < all; group++) {
        const double each = shared.relative[thread * groups + group];
        worst = larger_of(worst, each);
        squares += each * each;
      }
      if (groups > 1) {
        const double together = root(squares) - root(groups) * check.deviation;
        worst = together > worst ? together : worst;
      }
      worst = worst >= 0 ? worst : same_bits<double>(INFINITE);
      shared.best[thread] = {row < all ? worst : -1, row, row < all && !(worst <= check.limit)};
    }
  });
  each_thread([&](int thread, int) {
    if (thread == 0) {
      Best best = shared.best[0];
      for (int i = 1; i < TILE; i++) {
        take_better(best, shared.best[i]);
      }
      check.bests[tile] = best;
    }
  });
}

template <typename W>
inline void find_best(const Check& check, Word tiles, Room<W>& room) {
  each_thread([&](int thread, int) {
    Best best{-1, ~Word(0), 0};
    for (Word tile = thread; tile < tiles; tile += THREADS) {
      take_better(best, fetched_best(check.bests + tile));
    }
    room.bests[thread] = best;
  });
  fold(room.bests, [](Best& best, const Best& other) { take_better(best, other); });
  each_thread([&](int thread, int) {
    if (thread == 0) {
      check.bests[tiles] = room.bests[0];
    }
  });
}

// The 11 bits of a float32 that TF32 has: see `arithmetic._cut`.
inline double cut(double value, int way) {
  const unsigned bits = same_bits<unsigned>(static_cast<float>(value)) + (way == 0 ? 0x1000 : way == 1 ? 0 : 0x1FFF);
  return same_bits<float>(bits & 0xFFFFE000);
}

inline bool wants(const Check& check, Field field) {
  return check.fields >> field & 1;
}

// What `arithmetic.terms_of` computes of one element of the suspected row. Returns the largest magnitude of an operand.
template <typename W>
inline double examine(const Check& check, Word flat, Word column) {
  const Word matrix = flat / check.height, row = flat - matrix * check.height;
  const Word width = parts_of(check.depth, PARTS);
  double values[FIELDS] = {}, cuts[3] = {}, part = 0, most = 0;
  for (Word d = 0; d < check.depth; d++) {
    const double a = value_of<W>(check.lhs, place_of(check.lhs, matrix, row, d));
    const double b = value_of<W>(check.rhs, place_of(check.rhs, matrix, d, column));
    const double term = a * b;
    if (wants(check, PART)) {
      part += term;
      if ((d + 1) % width == 0 || d + 1 == check.depth) {
        values[VALUE] += part;
        values[PART] += magnitude(part) + magnitude(values[VALUE]);
        part = 0;
      }
    } else {
      values[VALUE] += term;
    }
    values[SIZE] += magnitude(term);
    values[SQUARE] += term * term;
    values[LOST] += magnitude(a) + magnitude(b);
    if (wants(check, CUT)) {
      for (int way = 0; way < 3; way++) {
        cuts[way] += cut(a, way) * cut(b, way);
      }
    }
    most = larger_of(most, larger_of(magnitude(a), magnitude(b)));
  }
  for (double each : cuts) {
    values[CUT] = larger_of(values[CUT], magnitude(each - values[VALUE]));
  }
  values[GOT] = value_of<W>(check.output, place_of(check.output, matrix, row, column));
  if (check.has_bias) {
    values[BIAS] = check.one_bias ? static_cast<const W*>(check.bias_copy)[column]
                                  : value_of<W>(check.bias, place_of(check.bias, matrix, row, column));
  }
  values[FACTOR] = check.alpha;
  if (check.rows != nullptr) {
    values[FACTOR] *= check.rows[static_cast<long long>(flat) * check.of_rows];
  }
  if (check.columns != nullptr) {
    values[FACTOR] *= check.columns[static_cast<long long>(column) * check.of_columns];
  }
  double* to = check.terms + column;
  for (int field = 0; field < FIELDS; field++) {
    if (wants(check, static_cast<Field>(field))) {
      *to = values[field];
      to += check.width;
    }
  }
  return most;
}

// What a block of a launch does. `is_last(counter, blocks)` says whether it is the last of some that have counted;
// `raise(word, by)` makes a word at least as large. Returns whether the row may be published.
template <int STAGE, typename W, typename IsLast, typename Raise>
inline bool run_check(
    const Check& check, Word block, Counters& counters, Room<W>& room, const IsLast& is_last, const Raise& raise) {
  if constexpr (STAGE == 0) {
    add_inner<W>(check, block, room);
  } else if constexpr (STAGE == 1) {
    const Word tiles = product_tiles(check);
    if (block >= tiles * check.splits) {
      add_bias<W>(check, block - tiles * check.splits, room);
      return false;
    }
    const Word tile = block / check.splits;
    multiply<W>(check, tile, static_cast<int>(block - tile * check.splits), room);
    if (is_last(check.splits == 1 ? nullptr : &counters.done[STAGE][tile], check.splits)) {
      join_tile<W>(check, tile, room);
      if (check.is_fresh && is_last(&counters.all[STAGE], static_cast<unsigned>(tiles))) {
        find_share<W>(check, room);
      }
    }
  } else if constexpr (STAGE == 2) {
    const Word rows = check.batch * check.height, tiles = tiles_of(rows);
    const int splits = output_splits(check);
    const Passes passes(check, check.output);
    const Word tile = block / splits;
    W* residual = static_cast<W*>(check.residual);
    for (int pass = static_cast<int>(block - tile * splits); pass < passes.count; pass += splits) {
      add_signed(
          check,
          check.output,
          passes,
          check.height,
          rows,
          tile,
          pass,
          nullptr,
          room.sums,
          [&](Word row, int group, const Summed<W>& found) { residual[row * check.groups + group] = found.sum; });
    }
    if (is_last(splits == 1 ? nullptr : &counters.done[STAGE][tile], splits)) {
      score_tile<W>(check, tile, room);
      if (is_last(&counters.all[STAGE], static_cast<unsigned>(tiles))) {
        find_best<W>(check, tiles, room);
      }
    }
  } else {
    const Best best = check.bests[tiles_of(check.batch * check.height)];
    const bool suspect = !(best.score <= check.limit);
    if (!suspect && block != 0) {
      return false;
    }
    if (suspect) {
      each_thread([&](int thread, int) {
        const Word column = block * THREADS + thread;
        room.words[thread] = column < check.width ? same_bits<Word>(examine<W>(check, best.flat, column)) : 0;
      });
      each_thread([&](int thread, int) {
        if (thread == 0) {
          Word most = 0;
          for (Word each : room.words) {
            most = each > most ? each : most;
          }
          raise(&counters.most, most);
        }
      });
      if (!is_last(&counters.all[STAGE], static_cast<unsigned>(blocks_of(check, STAGE)))) {
        return false;
      }
    }
    each_thread([&](int thread, int) {
      if (thread == 0) {
        const Word most = suspect ? fetched_value(&counters.most) : 0;
        *reinterpret_cast<Verdict*>(check.to) = {best.score, same_bits<double>(most), best.flat, best.suspected, {}, 0};
        counters.most = 0;
      }
    });
    return true;
  }
  return false;
}

#ifdef __CUDACC_RTC__

template <int STAGE, typename W>
inline void check_on_device(const Check& check, Counters* counters, Word mark) {
  __shared__ Room<W> room;
  __shared__ unsigned now;
  const bool is_over = run_check<STAGE, W>(
      check,
      blockIdx.x,
      *counters,
      room,
      [&](unsigned* counter, unsigned blocks) {
        __syncthreads(); // all threads have written
        if (blocks == 1) {
          return true;
        }
        if (threadIdx.x == 0) {
          __threadfence(); // before another block sees that this one is done
          now = atomicAdd(counter, 1u) + 1;
          if (now == blocks) {
            *counter = 0;
          }
        }
        __syncthreads();
        __threadfence();
        const bool last = now == blocks;
        __syncthreads(); // before it is written again
        return last;
      },
      [](Word* word, Word by) { atomicMax(word, by); });
  if (is_over && threadIdx.x == 0) {
    __threadfence_system(); // the host reads the row once it sees the mark
    *const_cast<volatile Word*>(&check.to->mark) = mark;
  }
}

#define CHECK(stage, type)                                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                     \
      opintercept_check_##stage##_##type(const __grid_constant__ Check check, Counters* counters, Word mark) { \
    check_on_device<stage, type>(check, counters, mark);                                                       \
  }
CHECK(0, float)
CHECK(1, float)
CHECK(2, float)
CHECK(3, float)
CHECK(0, double)
CHECK(1, double)
CHECK(2, double)
CHECK(3, double)
#undef CHECK

#endif

} // namespace opintercept::device
