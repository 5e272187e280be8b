// Reads the values of a CPU tensor in one pass, 4096 at a time so that whatever else is asked of them finds them in the
// cache: counts, range, sums, the hash of `hooks._hash`, the powers and channels of `hooks._sums`.
//
// Invariant: the results do not depend on the number of threads, and no operator of torch runs. A tensor that is not a
// plain array of floats in memory is not read.

#include <Python.h>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <pybind11/pybind11.h>

#include "threads.h"
#include "values.h"
#include "vectors.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <vector>

namespace torch::jit { // torch/csrc/jit/python/pybind_utils.h, see `kernels.cpp`
c10::IValue toIValue(pybind11::handle obj, const c10::TypePtr& type, std::optional<int32_t> N);
} // namespace torch::jit

bool opintercept::in_memory(const at::Tensor& tensor, const void*& data) {
  static const c10::DispatchKeySet plain(
      {c10::DispatchKey::CPU,
       c10::DispatchKey::AutogradCPU,
       c10::DispatchKey::ADInplaceOrView,
       c10::DispatchKey::AutocastCPU});
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl == nullptr || !plain.isSupersetOf(impl->key_set()) || impl->layout() != c10::kStrided ||
      impl->has_symbolic_sizes_strides() || !impl->has_storage()) {
    return false;
  }
  data = nullptr;
  int64_t last = impl->storage_offset();
  for (size_t d = 0; d < impl->sizes().size(); d++) {
    if (impl->sizes()[d] == 0) {
      return true;
    }
    last += (impl->sizes()[d] - 1) * impl->strides()[d];
  }
  // A program may have freed the memory, or a part of it.
  const c10::Storage& storage = impl->unsafe_storage();
  auto item = static_cast<int64_t>(impl->itemsize());
  if (storage.data() == nullptr || (last + 1) * item > static_cast<int64_t>(storage.nbytes())) {
    return false;
  }
  data = static_cast<const char*>(storage.data()) + impl->storage_offset() * item;
  return true;
}

namespace {

using namespace opintercept;

constexpr int DOUBLES = WIDTH / 8;
constexpr int64_t BLOCK = 1 << 12; // values that are read together
constexpr int64_t CHUNK = 1 << 16; // values that one thread reads at a time
constexpr size_t DEEPEST = 16; // dimensions

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

// A number of the same order as the value: -NaN < -Inf < -1 < -0.0 < 0.0 < 1 < Inf < NaN. It is its own inverse.
template <typename F, typename V>
inline V ordered(V bits) {
  return bits ^ ((bits >> (8 * static_cast<int>(sizeof(typename F::Bits)) - 1)) & F::MAX);
}

// The range of values as `ordered` numbers, and how many are zero.
template <typename F>
struct Range {
  typename F::Bits low = F::MAX, high = -F::MAX - 1;
  int64_t zeros = 0, nan = 0, odd = 0; // odd: NaN or infinite

  bool finite() const {
    return high < F::INF && low > ~F::INF;
  }
  bool has_nan() const {
    return high > F::INF || low < ~F::INF;
  }
};

// `masked`: take finite values only, and count the others.
template <typename F, int N, bool masked, bool zeros>
inline int64_t range_of(const typename F::Bits* from, int64_t at, int64_t count, Range<F>& range) {
  using Bits = typename F::Bits;
  using V = Vec<Bits, N>;
  V low = V{} + F::MAX, high = ~low, zero{}, nan{}, odd{};
  for (; at + N <= count; at += N) {
    V bits = load<V>(from + at), key = ordered<F>(bits);
    if constexpr (zeros) {
      zero -= (bits & F::MAX) == 0;
    }
    if constexpr (masked) {
      V is_odd = (bits & F::MAX) >= F::INF;
      odd -= is_odd;
      nan -= (bits & F::MAX) > F::INF;
      V below = is_odd ? V{} + F::MAX : key, above = is_odd ? ~(V{} + F::MAX) : key;
      low = below < low ? below : low;
      high = above > high ? above : high;
    } else {
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
  }
  for (int i = 0; i < N; i++) {
    range.low = std::min<Bits>(range.low, low[i]);
    range.high = std::max<Bits>(range.high, high[i]);
    range.zeros += zero[i];
    range.nan += nan[i];
    range.odd += odd[i];
  }
  return at;
}

// Of at most BLOCK values, since lanes of 16 bits count.
template <typename F, bool masked, bool zeros = true>
inline Range<F> range_of(const typename F::Bits* from, int64_t count) {
  Range<F> range;
  int64_t at = 0;
  if (count >= F::LANES) {
    at = range_of<F, F::LANES, masked, zeros>(from, 0, count, range);
  }
  if (at < count) {
    range_of<F, 1, masked, zeros>(from, at, count, range);
  }
  return range;
}

// The sum of the distances from a number, and that of their squares.
struct Moments {
  double total = 0, squares = 0;
};

template <typename F, int N, int UNROLL, bool masked>
inline int64_t moments_of(const typename F::Bits* from, int64_t at, int64_t count, double around, Moments& moments) {
  using V = Vec<double, N>;
  std::array<V, UNROLL> total{}, squares{}; // several, since an addition takes as long as four others can begin
  for (; at + N * UNROLL <= count; at += N * UNROLL) {
    for (int i = 0; i < UNROLL; i++) {
      V value = F::template widen<N>(from + at + i * N), apart = value - around;
      if constexpr (masked) {
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
  return at;
}

template <typename F, bool masked>
inline Moments moments_of(const typename F::Bits* from, int64_t count, double around) {
  Moments moments;
  int64_t at = 0;
  if (count >= 4 * DOUBLES) {
    at = moments_of<F, DOUBLES, 4, masked>(from, at, count, around, moments);
  }
  if (at + DOUBLES <= count) {
    at = moments_of<F, DOUBLES, 1, masked>(from, at, count, around, moments);
  }
  if (at < count) {
    moments_of<F, 1, 1, masked>(from, at, count, around, moments);
  }
  return moments;
}

template <typename F, int N>
inline int64_t count_misfits(const typename F::Bits* from, int64_t at, int64_t count, const Target& target, Sums& sums) {
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
inline Sums sums_of(const typename F::Bits* from, int64_t count, const Target* target) {
  Sums sums;
  Range<F> range = range_of<F, false>(from, count);
  bool masked = !range.finite();
  if (masked) {
    range = range_of<F, true>(from, count);
  }
  sums.count = count;
  sums.finite = count - range.odd;
  sums.nan = range.nan;
  sums.zeros = range.zeros;
  sums.overflow = range.odd - range.nan;
  if (sums.finite == 0) {
    return sums;
  }
  sums.low = F::value(ordered<F>(range.low));
  sums.high = F::value(ordered<F>(range.high));
  auto finite = static_cast<double>(sums.finite);
  auto around = [&](double number) {
    return masked ? moments_of<F, true>(from, count, number) : moments_of<F, false>(from, count, number);
  };
  Moments moments = around(0);
  sums.total = moments.total;
  sums.spread = std::isfinite(moments.squares) ? moments.squares - moments.total * moments.total / finite : INFINITY;
  if (sums.spread * 1e4 < moments.squares) { // the difference has lost digits
    moments = around(sums.total / finite);
    sums.spread = std::max(0.0, moments.squares - moments.total * moments.total / finite);
  }
  if (target != nullptr) {
    sums.overflow = 0;
    int64_t at = count_misfits<F, DOUBLES>(from, 0, count, *target, sums);
    count_misfits<F, 1>(from, at, count, *target, sums);
  }
  return sums;
}

// Counts by power of two, as in `hooks._sums.powers`.
constexpr int LOWEST = -149, HIGHEST = 127, POWERS = HIGHEST - LOWEST + 1;

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

// The hash of `hooks._hash`, in which the names are the same.
constexpr int64_t HASH_BLOCK = 1 << 16, SMALL = 1 << 14, PIECE = 1 << 18;

uint64_t mixed(uint64_t number) {
  uint64_t z = number * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

uint64_t factor(int64_t block, bool of_rows) {
  return mixed(2 * static_cast<uint64_t>(block) + of_rows + (uint64_t{1} << 32)) | 1;
}

const uint64_t* weights(bool of_rows) {
  static const std::vector<uint64_t> all = [] {
    std::vector<uint64_t> made(2 * HASH_BLOCK);
    for (uint64_t i = 0; i < made.size(); i++) {
      made[i] = mixed(2 * (i % HASH_BLOCK) + i / HASH_BLOCK + (uint64_t{1} << 40));
    }
    return made;
  }();
  return all.data() + of_rows * HASH_BLOCK;
}

template <typename Bits>
inline uint64_t weighted(const Bits* from, const uint64_t* by, int64_t count) {
  uint64_t sum = 0, upper = 0;
  for (int64_t i = 0; i < count; i++) {
    if constexpr (sizeof(Bits) == 8) { // an element of 64 bits has two lanes
      sum += static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(from[i]))) * by[i];
      upper += static_cast<uint64_t>(from[i] >> 32) * by[i];
    } else {
      sum += static_cast<uint64_t>(static_cast<int64_t>(from[i])) * by[i];
    }
  }
  return sizeof(Bits) == 8 ? sum * mixed(2) + upper * mixed(3) : sum;
}

// A matrix in the order in which it is read: as torch sees it, or with its dimensions swapped.
struct Matrix {
  int64_t height = 1, width = 1;
  bool swapped = false;
};

// What is asked beside the sums.
struct Request {
  const Target* target = nullptr;
  bool powers = false, channels = false, hash = false;

  bool in_order() const { // whether it matters where a value is
    return channels || hash;
  }
};

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
    for (int64_t row = at / matrix.width, column = at % matrix.width; request.in_order() && count > 0;) {
      int64_t most = std::min(matrix.width, (column / HASH_BLOCK + 1) * HASH_BLOCK);
      int64_t here = std::min(count, most - column);
      if (request.hash) {
        add_hash(from, row, column, here, matrix);
      }
      if (request.channels) {
        add_channels(from, row, column, here, matrix);
      }
      from += here;
      count -= here;
      column += here;
      if (column == matrix.width) {
        column = 0;
        row++;
      }
    }
  }

 private:
  void add_hash(const typename F::Bits* from, int64_t row, int64_t column, int64_t count, const Matrix& matrix) {
    uint64_t sum = weighted(from, weights(matrix.swapped) + column % HASH_BLOCK, count);
    sum *= weights(!matrix.swapped)[row % HASH_BLOCK];
    int64_t size = matrix.height * matrix.width;
    if (size > SMALL && (matrix.height > HASH_BLOCK || matrix.width > HASH_BLOCK || size > PIECE)) {
      sum *= factor(row / HASH_BLOCK, !matrix.swapped) * factor(column / HASH_BLOCK, matrix.swapped);
    }
    hash += sum;
  }

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

// Where the values are. Dimensions of one element are left out, and neighbours that lie one in the other are joined.
struct Layout {
  const void* data = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  size_t dims = 0;
  std::array<int64_t, DEEPEST> sizes{}, strides{};
  int64_t count = 1;
  int64_t repeats = 1; // how often each value occurs, as expanded tensors have them
  Matrix matrix;

  // False for a tensor that cannot be read here.
  bool describe(const at::Tensor& tensor, bool in_order) {
    if (!in_memory(tensor, data) || tensor.sizes().size() > DEEPEST) {
      return false;
    }
    dtype = tensor.scalar_type();
    dims = tensor.sizes().size();
    for (size_t d = 0; d < dims; d++) {
      sizes[d] = tensor.sizes()[d];
      strides[d] = tensor.strides()[d];
      count *= sizes[d];
    }
    if (count == 0) {
      return true;
    }
    matrix.width = dims == 0 ? 1 : sizes[dims - 1];
    matrix.height = count / matrix.width;
    if (!in_order) {
      sort();
    } else if (dims == 2 && strides[0] == 1 && strides[1] != 1) { // read in the order of memory
      std::swap(sizes[0], sizes[1]);
      std::swap(strides[0], strides[1]);
      matrix = {matrix.width, matrix.height, true};
    }
    join();
    return true;
  }

  bool dense() const {
    return dims == 0 || (dims == 1 && strides[0] == 1);
  }

 private:
  // In the order of memory, and each value once.
  void sort() {
    size_t kept = 0;
    for (size_t d = 0; d < dims; d++) {
      if (sizes[d] == 1) {
        continue;
      }
      if (strides[d] == 0) {
        repeats *= sizes[d];
        count /= sizes[d];
        continue;
      }
      size_t place = kept++;
      int64_t size = sizes[d], stride = strides[d];
      for (; place > 0 && strides[place - 1] < stride; place--) {
        sizes[place] = sizes[place - 1];
        strides[place] = strides[place - 1];
      }
      sizes[place] = size;
      strides[place] = stride;
    }
    dims = kept;
  }

  void join() {
    size_t kept = 0;
    for (size_t d = 0; d < dims; d++) {
      if (sizes[d] == 1) {
        continue;
      }
      if (kept > 0 && strides[kept - 1] == sizes[d] * strides[d]) {
        sizes[kept - 1] *= sizes[d];
        strides[kept - 1] = strides[d];
      } else {
        sizes[kept] = sizes[d];
        strides[kept++] = strides[d];
      }
    }
    dims = kept;
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

int64_t chunks_of(const Layout& layout) {
  return (layout.count + CHUNK - 1) / CHUNK;
}

struct Answer {
  Sums sums;
  std::array<int64_t, POWERS> powers{};
  std::vector<double> channels;
  uint64_t hash = 0;
};

template <typename F>
void read(const Layout& layout, const Request& request, Answer& answer) {
  auto chunks = static_cast<size_t>((layout.count + CHUNK - 1) / CHUNK);
  if (chunks <= 1 && !request.powers && !request.in_order()) { // allocates nothing
    each_block<typename F::Bits>(layout, 0, [&](const auto* from, int64_t, int64_t count) {
      answer.sums.add(sums_of<F>(from, count, request.target));
    });
    answer.sums.repeat(layout.repeats);
    return;
  }
  int workers = workers_for(layout.count);
  const int64_t width = layout.matrix.swapped ? layout.matrix.height : layout.matrix.width;
  std::vector<Sums> sums(chunks); // of each chunk, so that they are always added up in the same order
  std::vector<Found<F>> found(static_cast<size_t>(workers));
  for (auto& each : found) {
    each.channels.resize(request.channels ? static_cast<size_t>(width) : 0);
  }
  run(chunks_of(layout), workers, [&](int64_t chunk, int worker) {
    each_block<typename F::Bits>(layout, chunk, [&](const auto* from, int64_t at, int64_t count) {
      sums[chunk].add(sums_of<F>(from, count, request.target));
      found[worker].add(from, at, count, layout.matrix, request);
    });
  });
  for (const Sums& each : sums) {
    answer.sums.add(each);
  }
  answer.sums.repeat(layout.repeats);
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

struct Ends {
  double low = NAN, high = NAN;
};

template <typename F>
Ends ends_of(const Layout& layout) {
  int workers = workers_for(layout.count);
  std::vector<Range<F>> ranges(static_cast<size_t>(workers));
  run(chunks_of(layout), workers, [&](int64_t chunk, int worker) {
    each_block<typename F::Bits>(layout, chunk, [&](const auto* from, int64_t, int64_t count) {
      Range<F> range = range_of<F, false, false>(from, count);
      ranges[worker].low = std::min(ranges[worker].low, range.low);
      ranges[worker].high = std::max(ranges[worker].high, range.high);
    });
  });
  Range<F> all;
  for (const auto& range : ranges) {
    all.low = std::min(all.low, range.low);
    all.high = std::max(all.high, range.high);
  }
  return all.has_nan() ? Ends{} : Ends{F::value(ordered<F>(all.low)), F::value(ordered<F>(all.high))};
}

// Call `use(Format<...>())` for the layout's dtype; false for another dtype.
template <typename Use>
bool with_format(const Layout& layout, const Use& use) {
  switch (layout.dtype) {
    case c10::ScalarType::Float:
      return use(Format<Float32>()), true;
    case c10::ScalarType::BFloat16:
      return use(Format<BFloat16>()), true;
    case c10::ScalarType::Half:
      return use(Format<Float16>()), true;
    case c10::ScalarType::Double:
      return use(Format<Float64>()), true;
    default:
      return false;
  }
}

PyObject *tensor_type, *parameter_type;

// False if the object is not a tensor that can be read here.
bool describe(PyObject* value, bool in_order, at::Tensor& tensor, Layout& layout) {
  return as_tensor(value, tensor) && layout.describe(tensor, in_order);
}

// A tuple of new references; null if one of them is.
template <size_t N>
PyObject* tuple_of(const std::array<PyObject*, N>& parts) {
  PyObject* tuple = PyTuple_New(N);
  bool whole = tuple != nullptr && std::none_of(parts.begin(), parts.end(), [](PyObject* part) { return !part; });
  for (size_t i = 0; i < N; i++) {
    if (whole) {
      PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), parts[i]);
    } else {
      Py_XDECREF(parts[i]);
    }
  }
  if (!whole) {
    Py_CLEAR(tuple);
  }
  return tuple;
}

PyObject* array_of(const auto& numbers, bool asked) {
  if (!asked) {
    Py_RETURN_NONE;
  }
  return PyByteArray_FromStringAndSize(
      reinterpret_cast<const char*>(numbers.data()), static_cast<Py_ssize_t>(numbers.size() * sizeof numbers[0]));
}

} // namespace

bool opintercept::as_tensor(PyObject* value, at::Tensor& tensor) {
  auto type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  if (type != tensor_type && type != parameter_type) {
    return false; // a subclass may stand for other tensors
  }
  tensor = torch::jit::toIValue(value, c10::TensorType::get(), std::nullopt).toTensor();
  return true;
}

PyObject* opintercept::as_found(const Sums& sums, PyObject* hash, PyObject* powers, PyObject* channels) {
  PyObject* added = tuple_of<8>(
      {PyLong_FromLongLong(sums.count),
       PyLong_FromLongLong(sums.finite),
       PyLong_FromLongLong(sums.nan),
       PyLong_FromLongLong(sums.count - sums.zeros),
       PyLong_FromLongLong(sums.underflow),
       PyLong_FromLongLong(sums.overflow),
       PyFloat_FromDouble(sums.total),
       PyFloat_FromDouble(sums.spread)});
  return tuple_of<6>(
      {added, PyFloat_FromDouble(-sums.low), PyFloat_FromDouble(sums.high), hash, powers, channels});
}

bool opintercept::read_sums(const at::Tensor& tensor, const Target* target, bool hashed, Sums& sums, uint64_t& hash) {
  Request request;
  request.target = target;
  request.hash = hashed;
  Layout layout;
  if (!layout.describe(tensor, request.in_order())) {
    return false;
  }
  Answer answer;
  bool known = with_format(layout, [&](auto format) {
    if (layout.count > 0) {
      read<decltype(format)>(layout, request, answer);
    }
  });
  sums = answer.sums;
  hash = answer.hash;
  return known;
}

bool opintercept::is_finite(const at::Tensor& tensor, bool& finite) {
  Layout layout;
  if (!layout.describe(tensor, false)) {
    return false;
  }
  finite = true;
  return with_format(layout, [&](auto format) {
    if (layout.count > 0) {
      Ends ends = ends_of<decltype(format)>(layout);
      finite = std::isfinite(ends.low) && std::isfinite(ends.high);
    }
  });
}

// read(tensor, target or None, powers, channels, hash) -> see `values.read`
PyObject* opintercept_read(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 1 && count != 5) {
    PyErr_Format(PyExc_TypeError, "read must get a tensor, or a tensor and 4 options, got %zd values", count);
    return nullptr;
  }
  Request request;
  Target target;
  if (count == 5) {
    if (args[1] != Py_None) {
      if (!PyArg_ParseTuple(args[1], "dd", &target.tiny, &target.huge)) {
        return nullptr;
      }
      request.target = &target;
    }
    request.powers = args[2] == Py_True;
    request.channels = args[3] == Py_True;
    request.hash = args[4] == Py_True;
  }
  try {
    at::Tensor tensor;
    Layout layout;
    if (!describe(args[0], request.in_order(), tensor, layout)) {
      Py_RETURN_NONE;
    }
    Answer answer;
    bool known = with_format(layout, [&](auto format) {
      if (layout.count > 0) {
        Unlocked unlocked(layout.count);
        read<decltype(format)>(layout, request, answer);
      }
    });
    if (!known) {
      Py_RETURN_NONE;
    }
    return opintercept::as_found(
        answer.sums,
        request.hash ? PyLong_FromUnsignedLongLong(answer.hash) : Py_NewRef(Py_None),
        array_of(answer.powers, request.powers),
        array_of(answer.channels, request.channels));
  } catch (const std::exception&) { // torch cannot tell what the tensor is, or memory is short
    PyErr_Clear();
    Py_RETURN_NONE;
  }
}

// extent(tensor) -> see `values.extent`
PyObject* opintercept_extent(PyObject*, PyObject* value) {
  try {
    at::Tensor tensor;
    Layout layout;
    Ends ends;
    if (!describe(value, false, tensor, layout) || layout.count == 0) {
      Py_RETURN_NONE;
    }
    bool known = with_format(layout, [&](auto format) {
      Unlocked unlocked(layout.count);
      ends = ends_of<decltype(format)>(layout);
    });
    return known ? tuple_of<2>({PyFloat_FromDouble(ends.low), PyFloat_FromDouble(ends.high)}) : Py_NewRef(Py_None);
  } catch (const std::exception&) { // as in `opintercept_read`
    PyErr_Clear();
    Py_RETURN_NONE;
  }
}

// set_up_values(torch.Tensor, torch.nn.Parameter)
PyObject* opintercept_set_up_values(PyObject*, PyObject* args) {
  if (!PyArg_ParseTuple(args, "OO", &tensor_type, &parameter_type)) {
    return nullptr;
  }
  Py_INCREF(tensor_type);
  Py_INCREF(parameter_type);
  Py_RETURN_NONE;
}
