// The arithmetic of checksums in one pass over each matrix, whatever its dtype and layout.
//
// Invariant: what is computed of a row depends on that row and the layout of its matrix alone, so that the same memory
// gives the same bits again. This file is compiled for each set of vector instructions, see `sets.h`.

#include "run.h"
#include "sum_columns.h"
#include "vectors.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace opintercept::CPU_CAPABILITY {

namespace {

constexpr int64_t DEEP = 256; // columns that are converted together
constexpr int64_t TILE = 16; // and rows
constexpr int64_t TALL = 512; // rows of a transposed matrix that are added up together
constexpr int64_t PART = 1 << 16; // values that one thread reads at a time

template <typename W>
constexpr int LANES = WIDTH / static_cast<int>(sizeof(W));

template <typename X, typename W>
void widen(const X* from, int64_t step, int64_t count, W* to) {
  int64_t i = 0;
  if (step == 1) {
    if constexpr (std::is_same_v<X, c10::Half> && std::is_same_v<W, float>) {
      constexpr int N = 8;
      for (; i + N <= count; i += N) {
        auto values = from_half<N>(reinterpret_cast<const int16_t*>(from + i));
        std::memcpy(to + i, &values, sizeof values);
      }
    }
    for (; i < count; i++) {
      to[i] = static_cast<W>(from[i]);
    }
    return;
  }
  for (; i < count; i++) {
    to[i] = static_cast<W>(from[i * step]);
  }
}

template <typename W>
W dot(const W* x, const W* y, int64_t count) {
  using V = Vec<W, LANES<W>>;
  constexpr int64_t N = LANES<W>;
  V sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * N <= count; i += 4 * N) {
    for (int64_t u = 0; u < 4; u++) {
      sums[u] += load<V>(x + i + u * N) * load<V>(y + i + u * N);
    }
  }
  for (; i + N <= count; i += N) {
    sums[0] += load<V>(x + i) * load<V>(y + i);
  }
  V all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  W total = 0;
  for (int lane = 0; lane < N; lane++) {
    total += all[lane];
  }
  for (; i < count; i++) {
    total += x[i] * y[i];
  }
  return total;
}

// `out` += `rows` rows of x, [TILE, DEEP], times `by`, [depth, padded], for R rows and V vectors of groups.
template <typename W, int R, int V>
void multiply(const W* x, const W* by, int64_t depth, int64_t padded, W* out) {
  using Lane = Vec<W, LANES<W>>;
  Lane sums[R][V];
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) {
      sums[r][v] = load<Lane>(out + r * padded + v * LANES<W>);
    }
  }
  for (int64_t j = 0; j < depth; j++) {
    for (int v = 0; v < V; v++) {
      Lane factor = load<Lane>(by + j * padded + v * LANES<W>);
      for (int r = 0; r < R; r++) {
        sums[r][v] += factor * x[r * DEEP + j];
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int v = 0; v < V; v++) {
      std::memcpy(out + r * padded + v * LANES<W>, &sums[r][v], sizeof(Lane));
    }
  }
}

template <typename W, int R>
void multiply(const W* x, const W* by, int64_t depth, int64_t padded, W* out) {
  int64_t left = padded / LANES<W>;
  for (; left >= 3; left -= 3, by += 3 * LANES<W>, out += 3 * LANES<W>) {
    multiply<W, R, 3>(x, by, depth, padded, out);
  }
  if (left == 2) {
    multiply<W, R, 2>(x, by, depth, padded, out);
  } else if (left == 1) {
    multiply<W, R, 1>(x, by, depth, padded, out);
  }
}

// One matrix of a batch.
template <typename X, typename W>
struct Pass {
  const X* x;
  int64_t of_row, of_column, columns;

  // Converts rows from `first` on and columns from `left` on.
  void tile(int64_t first, int64_t rows, int64_t left, int64_t width, W* to) const {
    const X* from = x + first * of_row + left * of_column;
    if (of_row == 1 && of_column != 1) { // in the order of memory
      for (int64_t j = 0; j < width; j++) {
        for (int64_t r = 0; r < rows; r++) {
          to[r * DEEP + j] = static_cast<W>(from[r + j * of_column]);
        }
      }
      return;
    }
    for (int64_t r = 0; r < rows; r++) {
      widen(from + r * of_row, of_column, width, to + r * DEEP);
    }
  }

  void several(int64_t first, int64_t rows, const W* by, int64_t padded, int64_t groups, W* out, W* norms) const {
    std::vector<W> values(TILE * DEEP), sums(static_cast<size_t>(TILE * padded));
    for (int64_t top = first; top < first + rows; top += TILE) {
      int64_t height = std::min(TILE, first + rows - top);
      std::fill(sums.begin(), sums.end(), W(0));
      W squares[TILE] = {};
      for (int64_t left = 0; left < columns; left += DEEP) {
        int64_t width = std::min(DEEP, columns - left);
        tile(top, height, left, width, values.data());
        const W* factors = by + left * padded;
        int64_t r = 0;
        for (; r + 4 <= height; r += 4) {
          multiply<W, 4>(values.data() + r * DEEP, factors, width, padded, sums.data() + r * padded);
        }
        for (; r < height; r++) {
          multiply<W, 1>(values.data() + r * DEEP, factors, width, padded, sums.data() + r * padded);
        }
        for (r = 0; norms != nullptr && r < height; r++) {
          const W* row = values.data() + r * DEEP;
          squares[r] += dot(row, row, width);
        }
      }
      for (int64_t r = 0; r < height; r++) {
        std::copy_n(sums.data() + r * padded, groups, out + (top + r) * groups);
        if (norms != nullptr) {
          norms[top + r] = std::sqrt(squares[r]);
        }
      }
    }
  }

  // For one group, or for groups of neighbours: `by` has one factor for each column.
  void each_row(int64_t first, int64_t rows, const W* by, int64_t width, int64_t groups, W* out, W* norms) const {
    std::vector<W> values;
    for (int64_t row = first; row < first + rows; row++) {
      const W* from;
      if constexpr (std::is_same_v<X, W>) {
        from = x + row * of_row;
      }
      if (!std::is_same_v<X, W> || of_column != 1) {
        values.resize(static_cast<size_t>(columns));
        widen(x + row * of_row, of_column, columns, values.data());
        from = values.data();
      }
      for (int64_t g = 0; g < groups; g++) {
        int64_t left = g * width;
        out[row * groups + g] = left < columns ? dot(from + left, by + left, std::min(width, columns - left)) : W(0);
      }
      if (norms != nullptr) {
        norms[row] = std::sqrt(dot(from, from, columns));
      }
    }
  }

  // The same for a transposed matrix, column by column.
  void each_column(int64_t first, int64_t rows, const W* by, int64_t width, int64_t groups, W* out, W* norms) const {
    W sums[TALL], squares[TALL], values[TALL];
    for (int64_t top = first; top < first + rows; top += TALL) {
      int64_t height = std::min(TALL, first + rows - top);
      std::fill_n(squares, height, W(0));
      for (int64_t g = 0; g < groups; g++) {
        std::fill_n(sums, height, W(0));
        for (int64_t j = g * width; j < std::min(columns, (g + 1) * width); j++) {
          const X* column = x + top + j * of_column;
          const W* from = values;
          if constexpr (std::is_same_v<X, W>) {
            from = column;
          } else {
            widen(column, 1, height, values);
          }
          const W factor = by[j];
          for (int64_t r = 0; r < height; r++) {
            sums[r] += from[r] * factor;
          }
          for (int64_t r = 0; norms != nullptr && r < height; r++) {
            squares[r] += from[r] * from[r];
          }
        }
        for (int64_t r = 0; r < height; r++) {
          out[(top + r) * groups + g] = sums[r];
        }
      }
      for (int64_t r = 0; norms != nullptr && r < height; r++) {
        norms[top + r] = std::sqrt(squares[r]);
      }
    }
  }
};

// Calls `use` with a null pointer to the type of a dtype's values.
template <typename Use>
void with_values(c10::ScalarType dtype, const Use& use) {
  switch (dtype) {
    case c10::kFloat:
      return use(static_cast<const float*>(nullptr));
    case c10::kDouble:
      return use(static_cast<const double*>(nullptr));
    case c10::kBFloat16:
      return use(static_cast<const c10::BFloat16*>(nullptr));
    default:
      return use(static_cast<const c10::Half*>(nullptr));
  }
}

// Calls `use(pass, number of the matrix, first row, rows)` for parts of all matrices, on several threads.
template <typename W, typename Use>
void each_part(const Matrices& x, int workers, const Use& use) {
  int64_t height = std::max(x.transposed() ? TALL : 1, PART / std::max<int64_t>(1, x.columns));
  int64_t parts = (x.rows + height - 1) / height;
  with_values(x.dtype, [&](auto type) {
    using X = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    run(x.batch * parts, workers, [&](int64_t chunk, int) {
      int64_t b = chunk / parts, first = chunk % parts * height;
      const X* data = reinterpret_cast<const X*>(x.data) + b * x.of_batch;
      use(Pass<X, W>{data, x.of_row, x.of_column, x.columns}, b, first, std::min(height, x.rows - first));
    });
  });
}

template <typename W>
void by_sides(
    const Matrices& x, const W* by, int64_t of_batch, int64_t width, int64_t groups, W* out, W* norms, int workers) {
  each_part<W>(x, workers, [&](const auto& pass, int64_t b, int64_t first, int64_t rows) {
    W *sums = out + b * x.rows * groups, *lengths = norms == nullptr ? nullptr : norms + b * x.rows;
    if (x.transposed()) {
      pass.each_column(first, rows, by + b * of_batch, width, groups, sums, lengths);
    } else {
      pass.each_row(first, rows, by + b * of_batch, width, groups, sums, lengths);
    }
  });
}

} // namespace

template <typename W>
void project(const Matrices& x, const W* by, bool by_batch, int64_t groups, W* out, W* norms, int workers) {
  if (groups == 1) {
    return by_sides(x, by, by_batch ? x.columns : 0, x.columns, 1, out, norms, workers);
  }
  int64_t padded = (groups + LANES<W> - 1) / LANES<W> * LANES<W>, given = by_batch ? x.batch : 1;
  std::vector<W> room;
  if (padded != groups) {
    room.resize(static_cast<size_t>(given * x.columns * padded));
    for (int64_t row = 0; row < given * x.columns; row++) {
      std::copy_n(by + row * groups, groups, room.data() + row * padded);
    }
    by = room.data();
  }
  each_part<W>(x, workers, [&](const auto& pass, int64_t b, int64_t first, int64_t rows) {
    const W* factors = by + (by_batch ? b * x.columns * padded : 0);
    W* lengths = norms == nullptr ? nullptr : norms + b * x.rows;
    pass.several(first, rows, factors, padded, groups, out + b * x.rows * groups, lengths);
  });
}

template <typename W>
void sign_sums(const Matrices& x, const W* signs, int64_t width, int64_t groups, W* out, int workers) {
  by_sides<W>(x, signs, 0, width, groups, out, nullptr, workers);
}

template void project(const Matrices&, const float*, bool, int64_t, float*, float*, int);
template void project(const Matrices&, const double*, bool, int64_t, double*, double*, int);
template void sign_sums(const Matrices&, const float*, int64_t, int64_t, float*, int);
template void sign_sums(const Matrices&, const double*, int64_t, int64_t, double*, int);

} // namespace opintercept::CPU_CAPABILITY
