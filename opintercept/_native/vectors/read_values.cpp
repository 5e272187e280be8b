// Reads the values of a CPU tensor in one pass, 4096 at a time so that whatever else is asked of them finds them in the
// cache: counts, range, sums, the hash of `_values.hash`, the powers and channels of `_values.sums`.
//
// Invariant: the results do not depend on the number of threads. This file is compiled for each set of vector
// instructions, see `sets.h`.

#include "../splitmix.h"
#include "read_values.h"
#include "run.h"
#include "vectors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

namespace opintercept::CPU_CAPABILITY {

namespace {

constexpr int DOUBLES = WIDTH / 8;
constexpr int64_t BLOCK = 1 << 12; // values that are read together
constexpr int64_t CHUNK = 1 << 16; // values that one thread reads at a time

// The dtypes: how many bits their exponent and mantissa have, and N values as doubles.

struct Float64 {
  using Bits = int64_t;
  static constexpr int EXPONENT = 11, MANTISSA = 52;
  template <int N>
  static Vec<double, N> widen(const Bits* from) {
    return load<Vec<double, N>>(from);
  }
};

struct Float32 {
  using Bits = int32_t;
  static constexpr int EXPONENT = 8, MANTISSA = 23;
  template <int N>
  static Vec<double, N> widen(const Bits* from) {
    return doubles<N>(load<Vec<float, N>>(from));
  }
};

struct BFloat16 {
  using Bits = int16_t;
  static constexpr int EXPONENT = 8, MANTISSA = 7;
  template <int N>
  static Vec<double, N> widen(const Bits* from) {
    return doubles<N>(same_bits<Vec<float, N>>(zero_extended<N>(from) << 16));
  }
};

struct Float16 {
  using Bits = int16_t;
  static constexpr int EXPONENT = 5, MANTISSA = 10;
  template <int N>
  static Vec<double, N> widen(const Bits* from) {
    return doubles<N>(from_half<N>(from));
  }
};

template <typename F>
struct Format : F {
  using typename F::Bits;
  using Unsigned = std::make_unsigned_t<Bits>;
  static constexpr Bits MAX = std::numeric_limits<Bits>::max(); // all bits but the sign
  static constexpr Bits INF = static_cast<Bits>(((int64_t{1} << F::EXPONENT) - 1) << F::MANTISSA);
  static constexpr int LANES = WIDTH / static_cast<int>(sizeof(Bits));

  static double value(Bits bits) {
    return F::template widen<1>(&bits)[0];
  }
};

// The range of values by their bits, and how many are NaN or infinite.
template <typename F>
struct Range {
  using Bits = typename F::Bits;
  using Unsigned = typename F::Unsigned;
  Unsigned least = std::numeric_limits<Unsigned>::max(), most = 0;
  Bits top = std::numeric_limits<Bits>::min();
  int64_t nan = 0, odd = 0; // odd: NaN or infinite

  bool all_below(Bits limit) const { // whether all magnitudes are
    return top < limit && (static_cast<Bits>(most) >= 0 || (static_cast<Bits>(most) & F::MAX) < limit);
  }
  bool finite() const {
    return all_below(F::INF);
  }
  bool has_nan() const {
    return !all_below(F::INF + 1);
  }
  // -0.0 is below 0.0. The bits of negative numbers are in the opposite order, and without a sign above all others.
  double low() const {
    return F::value(static_cast<Bits>(static_cast<Bits>(most) < 0 ? most : least));
  }
  double high() const {
    return F::value(top >= 0 ? top : static_cast<Bits>(least));
  }
};

// The same of vectors of values.
template <typename F, int N>
struct Ranges {
  using V = Vec<typename F::Bits, N>;
  using U = Vec<typename F::Unsigned, N>;
  U least = ~U{}, most{};
  V top = V{} + std::numeric_limits<typename F::Bits>::min();

  void add(V bits) {
    add(bits, same_bits<U>(bits), same_bits<U>(bits));
  }
  void add(V for_top, U for_least, U for_most) {
    least = for_least < least ? for_least : least;
    most = for_most > most ? for_most : most;
    top = for_top > top ? for_top : top;
  }
  void put(Range<F>& range) const {
    for (int i = 0; i < N; i++) {
      range.least = std::min<typename F::Unsigned>(range.least, least[i]);
      range.most = std::max<typename F::Unsigned>(range.most, most[i]);
      range.top = std::max<typename F::Bits>(range.top, top[i]);
    }
  }
};

// `masked`: take finite values only, and count the others.
template <typename F, int N, bool masked>
inline int64_t range_of(const typename F::Bits* from, int64_t at, int64_t count, Range<F>& range) {
  Ranges<F, N> ranges;
  using V = typename decltype(ranges)::V;
  using U = typename decltype(ranges)::U;
  V nan{}, odd{};
  for (; at + N <= count; at += N) {
    V bits = load<V>(from + at);
    if constexpr (masked) {
      V is_odd = (bits & F::MAX) >= F::INF;
      odd -= is_odd;
      nan -= (bits & F::MAX) > F::INF;
      V least = bits | is_odd, most = bits & ~is_odd;
      V top = most | (is_odd & std::numeric_limits<typename F::Bits>::min());
      ranges.add(top, same_bits<U>(least), same_bits<U>(most));
    } else {
      ranges.add(bits);
    }
  }
  ranges.put(range);
  for (int i = 0; i < N; i++) {
    range.nan += nan[i];
    range.odd += odd[i];
  }
  return at;
}

// Of at most BLOCK values, since lanes of 16 bits count.
template <typename F, bool masked>
inline Range<F> range_of(const typename F::Bits* from, int64_t count) {
  Range<F> range;
  int64_t at = 0;
  if (count >= F::LANES) {
    at = range_of<F, F::LANES, masked>(from, 0, count, range);
  }
  if (at < count) {
    range_of<F, 1, masked>(from, at, count, range);
  }
  return range;
}

template <typename F, int N>
inline int64_t count_zeros(const typename F::Bits* from, int64_t at, int64_t count, int64_t& zeros) {
  Vec<typename F::Bits, N> found{};
  for (; at + N <= count; at += N) {
    found -= (load<Vec<typename F::Bits, N>>(from + at) & F::MAX) == 0;
  }
  for (int i = 0; i < N; i++) {
    zeros += found[i];
  }
  return at;
}

// The sum of the distances from a number, and that of their squares.
struct Moments {
  double total = 0, squares = 0;
};

enum class Take { ALL, RANGE, FINITE }; // values: all of them, with their range, or those that are finite

template <typename F, int N, int UNROLL, Take take>
inline int64_t moments_of(
    const typename F::Bits* from, int64_t at, int64_t count, double around, Moments& moments, Range<F>& range) {
  using V = Vec<double, N>;
  constexpr int LANES = std::min(F::LANES, N * UNROLL);
  Ranges<F, LANES> ranges;
  std::array<V, UNROLL> total{}, squares{}; // several, since an addition takes as long as four others can begin
  for (; at + N * UNROLL <= count; at += N * UNROLL) {
    for (int i = 0; take == Take::RANGE && i < N * UNROLL; i += LANES) {
      ranges.add(load<typename decltype(ranges)::V>(from + at + i));
    }
    for (int i = 0; i < UNROLL; i++) {
      V value = F::template widen<N>(from + at + i * N), apart = take == Take::RANGE ? value : value - around;
      if constexpr (take == Take::FINITE) {
        auto finite = (same_bits<Vec<int64_t, N>>(value) & INT64_MAX) < Format<Float64>::INF;
        apart = same_bits<V>(same_bits<Vec<int64_t, N>>(apart) & finite);
      }
      total[i] += apart;
      squares[i] += apart * apart;
    }
  }
  for (int i = 1; i < UNROLL; i++) {
    total[0] += total[i];
    squares[0] += squares[i];
  }
  for (int i = 0; i < N; i++) {
    moments.total += total[0][i];
    moments.squares += squares[0][i];
  }
  if constexpr (take == Take::RANGE) {
    ranges.put(range);
  }
  return at;
}

template <typename F, Take take>
inline Moments moments_of(const typename F::Bits* from, int64_t count, double around, Range<F>& range) {
  Moments moments;
  int64_t at = 0;
  if (count >= 4 * DOUBLES) {
    at = moments_of<F, DOUBLES, 4, take>(from, at, count, around, moments, range);
  }
  if (at + DOUBLES <= count) {
    at = moments_of<F, DOUBLES, 1, take>(from, at, count, around, moments, range);
  }
  if (at < count) {
    moments_of<F, 1, 1, take>(from, at, count, around, moments, range);
  }
  return moments;
}

template <typename F, int N>
inline int64_t count_misfits(
    const typename F::Bits* from, int64_t at, int64_t count, const Target& target, Sums& sums) {
  Vec<int64_t, N> below{}, above{};
  for (; at + N <= count; at += N) {
    auto value = F::template widen<N>(from + at);
    auto size = same_bits<Vec<double, N>>(same_bits<Vec<int64_t, N>>(value) & INT64_MAX);
    below -= (size <= target.tiny) & (size != 0.0);
    above -= size > target.huge;
  }
  for (int i = 0; i < N; i++) {
    sums.underflow += below[i];
    sums.overflow += above[i];
  }
  return at;
}

template <typename F>
inline Sums sums_of(const typename F::Bits* from, int64_t count, const Request& request) {
  Sums sums;
  Range<F> range;
  Moments moments = moments_of<F, Take::RANGE>(from, count, 0, range);
  const bool masked = !range.finite();
  if (masked) {
    range = range_of<F, true>(from, count);
    moments = moments_of<F, Take::FINITE>(from, count, 0, range);
  }
  sums.count = count;
  sums.finite = count - range.odd;
  sums.nan = range.nan;
  if (request.zeros) {
    int64_t at = count_zeros<F, F::LANES>(from, 0, count, sums.zeros);
    count_zeros<F, 1>(from, at, count, sums.zeros);
  }
  sums.overflow = range.odd - range.nan;
  if (sums.finite == 0) {
    return sums;
  }
  sums.low = range.low();
  sums.high = range.high();
  auto finite = static_cast<double>(sums.finite);
  sums.total = moments.total;
  sums.spread = std::isfinite(moments.squares) ? moments.squares - moments.total * moments.total / finite : INFINITY;
  if (sums.spread * 1e4 < moments.squares) { // the difference has lost digits
    const double mean = sums.total / finite;
    moments = masked ? moments_of<F, Take::FINITE>(from, count, mean, range)
                     : moments_of<F, Take::ALL>(from, count, mean, range);
    sums.spread = std::max(0.0, moments.squares - moments.total * moments.total / finite);
  }
  const Target* target = request.target;
  if (target != nullptr) {
    sums.overflow = 0;
    int64_t at = count_misfits<F, DOUBLES>(from, 0, count, *target, sums);
    count_misfits<F, 1>(from, at, count, *target, sums);
  }
  return sums;
}

template <typename F>
struct Powers {
  static constexpr int EXPONENTS = 1 << F::EXPONENT, BIAS = EXPONENTS / 2 - 1;
  // Two tables: where neighbours have the same exponent, the counts need not wait for each other.
  std::array<std::array<int64_t, EXPONENTS>, 2> counts{};
  std::array<int64_t, F::MANTISSA> subnormal{};

  void add(const typename F::Bits* from, int64_t count) {
    int64_t before = counts[0][0] + counts[1][0];
    int64_t at = 0;
    for (; at + 2 <= count; at += 2) {
      counts[0][exponent(from[at])]++;
      counts[1][exponent(from[at + 1])]++;
    }
    if (at < count) {
      counts[0][exponent(from[at])]++;
    }
    if (counts[0][0] + counts[1][0] == before) {
      return;
    }
    for (int64_t i = 0; i < count; i++) { // zeros and subnormal numbers
      auto rest = static_cast<uint64_t>(from[i] & F::MAX);
      if (rest != 0 && rest >> F::MANTISSA == 0) {
        subnormal[std::bit_width(rest) - 1]++;
      }
    }
  }

  void put(std::array<int64_t, POWERS>& found) const {
    for (int e = 1; e < EXPONENTS - 1; e++) {
      found[place(e - BIAS)] += counts[0][e] + counts[1][e];
    }
    for (int e = 0; e < F::MANTISSA; e++) {
      found[place(1 - BIAS - F::MANTISSA + e)] += subnormal[e];
    }
  }

 private:
  static size_t exponent(typename F::Bits bits) {
    return static_cast<size_t>(bits & F::MAX) >> F::MANTISSA;
  }
  static size_t place(int power) {
    return static_cast<size_t>(std::clamp(power, LOWEST, HIGHEST) - LOWEST);
  }
};

// The hash of `_values.hash`, in which the names are the same.
constexpr int64_t HASH_BLOCK = 1 << 16, SMALL = 1 << 14, PIECE = 1 << 18;

uint64_t factor(int64_t block, bool of_rows) {
  return splitmix64(2 * static_cast<uint64_t>(block) + of_rows + (uint64_t{1} << 32)) | 1;
}

// Weights, whole and in two parts, of which the lower one has a sign.
struct Weights {
  alignas(WIDTH) std::array<int32_t, HASH_BLOCK> upper, lower;
  std::array<uint64_t, HASH_BLOCK> whole; // is loaded with the last lower part
};

std::unique_ptr<Weights[]> made_weights() {
  auto made = std::make_unique<Weights[]>(2);
  for (uint64_t i = 0; i < 2 * HASH_BLOCK; i++) {
    uint64_t at = i % HASH_BLOCK, weight = splitmix64(2 * at + i / HASH_BLOCK + (uint64_t{1} << 40));
    Weights& to = made[i / HASH_BLOCK];
    to.whole[at] = weight;
    to.lower[at] = static_cast<int32_t>(weight);
    to.upper[at] = static_cast<int32_t>((weight - static_cast<uint64_t>(int64_t{to.lower[at]})) >> 32);
  }
  return made;
}

inline const Weights& weights(bool of_rows) { // is short, since it is asked for each row
  static const auto all = made_weights();
  return all[of_rows];
}

template <typename Bits>
inline uint64_t weighted(const Bits* from, const Weights& by, int64_t first, int64_t count) {
  const uint64_t* whole = by.whole.data() + first;
  uint64_t sum = 0, high = 0;
  int64_t i = 0;
#ifdef __AVX2__
  if constexpr (sizeof(Bits) <= 4) {
    constexpr int N = WIDTH / 4;
    using Wide = Vec<uint64_t, N / 2>;
    Wide even{}, odd{};
    Vec<uint32_t, N> above{};
    const int32_t *lower = by.lower.data() + first, *upper = by.upper.data() + first;
    for (; i + N <= count; i += N) {
      __builtin_prefetch(from + i + BLOCK); // the next block comes while this one is multiplied
      auto values = sign_extended<N>(from + i);
      auto next = same_bits<Vec<int32_t, N>>(same_bits<Wide>(values) >> 32);
      even += multiplied_evens<N>(values, load<Vec<int32_t, N>>(lower + i));
      odd += multiplied_evens<N>(next, load<Vec<int32_t, N>>(lower + i + 1));
      above += same_bits<Vec<uint32_t, N>>(values) * load<Vec<uint32_t, N>>(upper + i);
    }
    auto pairs = same_bits<Wide>(above);
    sum = added<N / 2>(even + odd + ((pairs + (pairs >> 32)) << 32));
  }
#endif
  for (; i < count; i++) {
    if constexpr (sizeof(Bits) == 8) { // an element of 64 bits has two lanes
      sum += static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(from[i]))) * whole[i];
      high += static_cast<uint64_t>(from[i] >> 32) * whole[i];
    } else {
      sum += static_cast<uint64_t>(static_cast<int64_t>(from[i])) * whole[i];
    }
  }
  return sizeof(Bits) == 8 ? sum * splitmix64(2) + high * splitmix64(3) : sum;
}

// Call `use(values, row, column, count)` for values that begin at a place in a matrix, each time in one row and block.
template <typename Bits, typename Use>
inline void each_row(const Bits* from, int64_t at, int64_t count, const Matrix& matrix, const Use& use) {
  for (int64_t row = at / matrix.width, column = at % matrix.width; count > 0;) {
    int64_t most = std::min(matrix.width, (column / HASH_BLOCK + 1) * HASH_BLOCK);
    int64_t here = std::min(count, most - column);
    use(from, row, column, here);
    from += here;
    count -= here;
    column += here;
    if (column == matrix.width) {
      column = 0;
      row++;
    }
  }
}

// What some values of a row add to the hash.
template <typename Bits>
inline uint64_t hash_of(const Bits* from, int64_t row, int64_t column, int64_t count, const Matrix& matrix) {
  uint64_t sum = weighted(from, weights(matrix.swapped), column % HASH_BLOCK, count);
  sum *= weights(!matrix.swapped).whole[row % HASH_BLOCK];
  int64_t size = matrix.height * matrix.width;
  if (size > SMALL && (matrix.height > HASH_BLOCK || matrix.width > HASH_BLOCK || size > PIECE)) {
    sum *= factor(row / HASH_BLOCK, !matrix.swapped) * factor(column / HASH_BLOCK, matrix.swapped);
  }
  return sum;
}

// What one thread has found beside the sums. All of it can be put together in any order.
template <typename F>
struct Found {
  Powers<F> powers;
  std::vector<typename F::Unsigned> channels;
  uint64_t hash = 0;

  // Add values that begin at a place in the matrix.
  void add(const typename F::Bits* from, int64_t at, int64_t count, const Matrix& matrix, const Request& request) {
    if (request.powers) {
      powers.add(from, count);
    }
    if (!request.in_order()) {
      return;
    }
    each_row(from, at, count, matrix, [&](const auto* part, int64_t row, int64_t column, int64_t here) {
      if (request.hash) {
        hash += hash_of(part, row, column, here, matrix);
      }
      if (request.channels) {
        add_channels(part, row, column, here, matrix);
      }
    });
  }

 private:
  void add_channels(const typename F::Bits* from, int64_t row, int64_t column, int64_t count, const Matrix& matrix) {
    // Without the sign, bits have the order of the magnitudes, and NaN is the largest.
    using Unsigned = typename F::Unsigned;
    constexpr auto MAX = static_cast<Unsigned>(F::MAX);
    if (matrix.swapped) {
      Unsigned most = channels[row];
      for (int64_t i = 0; i < count; i++) {
        most = std::max<Unsigned>(most, static_cast<Unsigned>(from[i]) & MAX);
      }
      channels[row] = most;
    } else {
      Unsigned* to = channels.data() + column;
      for (int64_t i = 0; i < count; i++) {
        to[i] = std::max<Unsigned>(to[i], static_cast<Unsigned>(from[i]) & MAX);
      }
    }
  }
};

// Call `use(values, place of the first, count)` for the values of a chunk, at most BLOCK at a time.
template <typename Bits, typename Use>
inline void each_block(const Layout& layout, int64_t chunk, const Use& use) {
  auto base = static_cast<const Bits*>(layout.data);
  int64_t at = chunk * CHUNK, end = std::min(layout.count, at + CHUNK);
  if (layout.dense()) {
    for (; at < end; at += BLOCK) {
      use(base + at, at, std::min(BLOCK, end - at));
    }
    return;
  }
  alignas(WIDTH) std::array<Bits, BLOCK> gathered;
  std::array<int64_t, DEEPEST> index{};
  const size_t inner = layout.dims - 1;
  const int64_t length = layout.sizes[inner], step = layout.strides[inner];
  int64_t rest = at, row = 0; // row: where the innermost dimension begins
  for (size_t d = layout.dims; d-- > 0;) {
    index[d] = rest % layout.sizes[d];
    rest /= layout.sizes[d];
    row += d == inner ? 0 : index[d] * layout.strides[d];
  }
  while (at < end) {
    int64_t filled = 0, room = std::min(BLOCK, end - at);
    while (filled < room) {
      int64_t here = std::min(room - filled, length - index[inner]);
      const Bits* from = base + row + index[inner] * step;
      Bits* to = gathered.data() + filled;
      if (step == 1) {
        std::memcpy(to, from, static_cast<size_t>(here) * sizeof(Bits));
      } else {
        for (int64_t i = 0; i < here; i++) {
          to[i] = from[i * step];
        }
      }
      filled += here;
      index[inner] += here;
      for (size_t d = inner; index[d] == layout.sizes[d] && d > 0; d--) { // carry
        index[d] = 0;
        index[d - 1]++;
        row += layout.strides[d - 1];
        if (index[d - 1] == layout.sizes[d - 1]) {
          row -= layout.sizes[d - 1] * layout.strides[d - 1];
        }
      }
    }
    use(gathered.data(), at, room);
    at += room;
  }
}

// Adds up what was found of two parts.
void add(Sums& to, const Sums& other) {
  if (to.finite && other.finite) { // as in `_values.stats.Sums.add`
    auto mine = static_cast<double>(to.finite), theirs = static_cast<double>(other.finite);
    double apart = to.total / mine - other.total / theirs;
    to.spread += other.spread + apart * apart * (mine * theirs / (mine + theirs));
    to.spread = std::isnan(to.spread) ? INFINITY : to.spread; // the total is infinite
  } else {
    to.spread += other.spread;
  }
  to.count += other.count;
  to.finite += other.finite;
  to.nan += other.nan;
  to.zeros += other.zeros;
  to.underflow += other.underflow;
  to.overflow += other.overflow;
  to.total += other.total;
  to.low = std::min(to.low, other.low);
  to.high = std::max(to.high, other.high);
}

void repeat(Sums& sums, int64_t times) {
  for (int64_t* each : {&sums.count, &sums.finite, &sums.nan, &sums.zeros, &sums.underflow, &sums.overflow}) {
    *each *= times;
  }
  sums.total *= static_cast<double>(times);
  sums.spread *= static_cast<double>(times);
}

int64_t chunks_of(const Layout& layout) {
  return (layout.count + CHUNK - 1) / CHUNK;
}

template <typename F>
void read_all(const Layout& layout, const Request& request, int workers, Answer& answer) {
  auto chunks = static_cast<size_t>((layout.count + CHUNK - 1) / CHUNK);
  if (chunks <= 1 && !request.powers && !request.in_order()) { // allocates nothing
    each_block<typename F::Bits>(layout, 0, [&](const auto* from, int64_t, int64_t count) {
      add(answer.sums, sums_of<F>(from, count, request));
    });
    repeat(answer.sums, layout.repeats);
    return;
  }
  const int64_t width = layout.matrix.swapped ? layout.matrix.height : layout.matrix.width;
  std::vector<Sums> sums(chunks); // of each chunk, so that they are always added up in the same order
  std::vector<Found<F>> found(static_cast<size_t>(workers));
  for (auto& each : found) {
    each.channels.resize(request.channels ? static_cast<size_t>(width) : 0);
  }
  run(chunks_of(layout), workers, [&](int64_t chunk, int worker) {
    each_block<typename F::Bits>(layout, chunk, [&](const auto* from, int64_t at, int64_t count) {
      add(sums[chunk], sums_of<F>(from, count, request));
      found[worker].add(from, at, count, layout.matrix, request);
    });
  });
  for (const Sums& each : sums) {
    add(answer.sums, each);
  }
  repeat(answer.sums, layout.repeats);
  for (size_t worker = 0; worker < found.size(); worker++) {
    found[worker].powers.put(answer.powers);
    answer.hash += found[worker].hash;
    for (size_t i = 0; worker > 0 && i < found[0].channels.size(); i++) {
      found[0].channels[i] = std::max(found[0].channels[i], found[worker].channels[i]);
    }
  }
  for (int64_t& count : answer.powers) {
    count *= layout.repeats;
  }
  for (auto bits : found[0].channels) {
    answer.channels.push_back(F::value(static_cast<typename F::Bits>(bits)));
  }
}

// The sums and the hash of whole numbers or truth values, which are `Number` and are hashed as `Bits`.
template <typename Number, typename Bits>
void read_whole(const Layout& layout, Answer& answer) {
  auto value = [](Bits bits) { return static_cast<double>(static_cast<Number>(bits)); };
  for (int64_t chunk = 0; chunk < chunks_of(layout); chunk++) {
    each_block<Bits>(layout, chunk, [&](const Bits* from, int64_t at, int64_t count) {
      Sums sums;
      sums.count = sums.finite = count;
      for (int64_t i = 0; i < count; i++) {
        double number = value(from[i]);
        sums.zeros += from[i] == 0;
        sums.total += number;
        sums.low = std::min(sums.low, number);
        sums.high = std::max(sums.high, number);
      }
      double mean = sums.total / static_cast<double>(count);
      for (int64_t i = 0; i < count; i++) {
        sums.spread += (value(from[i]) - mean) * (value(from[i]) - mean);
      }
      add(answer.sums, sums);
      each_row(from, at, count, layout.matrix, [&](const Bits* part, int64_t row, int64_t column, int64_t here) {
        answer.hash += hash_of(part, row, column, here, layout.matrix);
      });
    });
  }
}

template <typename F>
Ends ends_of(const Layout& layout, int workers) {
  std::vector<Range<F>> ranges(static_cast<size_t>(workers));
  run(chunks_of(layout), workers, [&](int64_t chunk, int worker) {
    each_block<typename F::Bits>(layout, chunk, [&](const auto* from, int64_t, int64_t count) {
      Range<F> range = range_of<F, false>(from, count), &all = ranges[worker];
      all.least = std::min(all.least, range.least);
      all.most = std::max(all.most, range.most);
      all.top = std::max(all.top, range.top);
    });
  });
  Range<F> all;
  for (const auto& range : ranges) {
    all.least = std::min(all.least, range.least);
    all.most = std::max(all.most, range.most);
    all.top = std::max(all.top, range.top);
  }
  return all.has_nan() ? Ends{} : Ends{all.low(), all.high()};
}

// Call `use(Format<...>())` for the layout's dtype, unless there are no values.
template <typename Use>
void with_format(const Layout& layout, const Use& use) {
  if (layout.count == 0) {
    return;
  }
  switch (layout.dtype) {
    case c10::ScalarType::Float:
      return use(Format<Float32>());
    case c10::ScalarType::BFloat16:
      return use(Format<BFloat16>());
    case c10::ScalarType::Half:
      return use(Format<Float16>());
    default:
      return use(Format<Float64>());
  }
}

} // namespace

void read(const Layout& layout, const Request& request, int workers, Answer& answer) {
  if (c10::isIntegralType(layout.dtype, true)) {
    switch (layout.count == 0 ? c10::ScalarType::Undefined : layout.dtype) {
      case c10::ScalarType::Bool:
      case c10::ScalarType::Char:
        return read_whole<int8_t, int8_t>(layout, answer);
      case c10::ScalarType::Byte:
        return read_whole<uint8_t, int8_t>(layout, answer);
      case c10::ScalarType::Short:
        return read_whole<int16_t, int16_t>(layout, answer);
      case c10::ScalarType::Int:
        return read_whole<int32_t, int32_t>(layout, answer);
      case c10::ScalarType::Long:
        return read_whole<int64_t, int64_t>(layout, answer);
      default:
        return;
    }
  }
  with_format(layout, [&](auto format) { read_all<decltype(format)>(layout, request, workers, answer); });
}

void find_ends(const Layout& layout, int workers, Ends& ends) {
  with_format(layout, [&](auto format) { ends = ends_of<decltype(format)>(layout, workers); });
}

} // namespace opintercept::CPU_CAPABILITY
