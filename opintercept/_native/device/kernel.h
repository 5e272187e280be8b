// What one launch on a GPU reads of some tensors: counts, range, sums and the hash of `_values.hash`, as
// `vectors/read_values.cpp` reads them on the CPU. NVRTC compiles this for GPUs, and the host's compiler for tests,
// which run the threads of a block in turn.
//
// Invariant: no result depends on the order in which blocks run or on how many there is room for, so every device, and
// the host, finds the same bits. This file includes nothing, since NVRTC brings no headers.

#pragma once

namespace opintercept::device {

using Word = unsigned long long;

constexpr int THREADS = 256; // of a block
constexpr int WARP = 32, WARPS = THREADS / WARP;
constexpr int MOST_PARTS = 264; // of a tensor, which are read by themselves: two for each processor of an H100
constexpr int MOST_JOBS = 10; // tensors that one launch reads
constexpr int DEEPEST = 6; // dimensions of the rows
constexpr int ROWS_EACH = 8; // that a thread reads before another block is worth its start
constexpr int FETCHED = 4; // vectors that are on their way to a thread
constexpr int SAMPLED = 1024; // values of a tensor that says what it said before
constexpr int FEW_BLOCKS = 64; // that look whether it does
constexpr Word BLOCK = 1 << 16, PIECE = 1 << 18; // as in `_values.hash`

enum Kind : int {
  FLOAT64,
  FLOAT32,
  BFLOAT16,
  FLOAT16,
  FLOAT8_E5M2,
  FLOAT8_E4M3FN,
  FLOAT8_E5M2FNUZ,
  FLOAT8_E4M3FNUZ,
  INT64,
  INT32,
  INT16,
  INT8, // and truth values
  UINT8,
  KINDS,
};

// What is found of a tensor. `_native.values` has the words in this order.
struct Row {
  Word hash, finite, nan, odd, zeros, underflow, overflow; // odd: NaN or infinite
  double total, spread, low, high;
  Word mark; // that of the launch, written last
};

// What a tensor said before, on the device.
struct Memo {
  Word sample; // the hash of some of its values
  Row row;
};

// What some of the values add to it. Everything but the counts of NaN and of odd values is about the finite ones.
struct Part {
  Word hash, finite, nan, odd, zeros, underflow, overflow;
  double total, mean, spread, squares; // squares: those of float64, which may be too large
  long long low, high; // in the order of the values
};

// A tensor as a matrix of virtual rows: a row of more than BLOCK columns is read in pieces. The threads of a block lie
// beside each other, each with as many columns as 16 bytes have, and go down the rows together.
struct Job {
  const void* data;
  Row* to;
  Memo* memo; // null where the tensor is read at any rate
  Word height, width, pieces; // of the matrix, and how many pieces a row has
  long long step; // from one column to the next
  long long sizes[DEEPEST], strides[DEEPEST]; // of the dimensions that make up the rows
  int dims;
  int kind;
  bool hashed, swapped, has_target;
  bool is_known; // whether the memo is of this tensor, if a sample of it says so
  bool aligned; // whether 16 bytes can be loaded at once
  double tiny, huge; // see `Target`
  int lanes, across, down; // threads beside each other, and the parts that are read by themselves
  int blocks; // of the launch
  Word rows_each; // the virtual rows of a block
};

struct Jobs {
  Job job[MOST_JOBS];
};

// NVRTC lays it out as the host does, and the arguments of a launch take at most 4096 bytes.
static_assert(sizeof(Job) == 208 && sizeof(Part) == 104 && sizeof(Jobs) <= 4000);

// Where the blocks of a launch leave what they have found. Zero when it is new, and again after each launch.
struct Scratch {
  unsigned int done[MOST_JOBS];
  Part parts[MOST_JOBS][MOST_PARTS];
};

template <typename To, typename From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

struct alignas(16) Vector {
  unsigned words[4];
};

#ifdef __CUDACC_RTC__
inline double fused(double a, double b, double c) {
  return fma(a, b, c);
}
#else
inline double fused(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}
#endif

// The order of float32, and of what is shorter in their upper bits.
inline int order(int single) {
  return single ^ (single >> 31 & 0x7FFFFFFF);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// Of words that hold one float32 each, or two bfloat16, the lesser values. NaN is the result where there is one.
template <int LANES>
inline unsigned lesser(unsigned a, unsigned b) {
  unsigned found;
  if constexpr (LANES == 1) {
    asm("min.NaN.f32 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  } else {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  }
  return found;
}
template <int LANES>
inline unsigned greater(unsigned a, unsigned b) {
  unsigned found;
  if constexpr (LANES == 1) {
    asm("max.NaN.f32 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  }
  return found;
}

template <int LANES>
inline unsigned magnitude(unsigned word) {
  unsigned found = word & 0x7FFF7FFF;
  if constexpr (LANES == 1) {
    asm("abs.f32 %0, %1;" : "=r"(found) : "r"(word)); // part of the instruction that uses it
  }
  return found;
}

// Adds a product to the hash of a column. The compiler takes eight instructions for what these two do.
inline void add_product(Word& hash, int bits, int lower, unsigned upper) {
  asm("{\n\t.reg .u32 low, high;\n\tmad.wide.s32 %0, %1, %2, %0;\n\tmov.b64 {low, high}, %0;\n\t"
      "mad.lo.u32 high, %1, %3, high;\n\tmov.b64 %0, {low, high};\n\t}"
      : "+l"(hash)
      : "r"(bits), "r"(lower), "r"(upper));
}

inline unsigned add_bytes(unsigned bytes, unsigned to) {
  asm("dp4a.u32.u32 %0, %1, 0x01010101, %0;" : "+r"(to) : "r"(bytes));
  return to;
}

// Lets a vector come to the memory of the block, where it needs no registers until it is there.
inline void fetch(Vector& to, const void* from) {
  const auto shared = static_cast<unsigned>(__cvta_generic_to_shared(&to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
inline void end_lot() { // of what `await` waits for
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT> // so many lots may still be on their way
inline void await() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

#else

// A negative NaN is the least here, another one the greatest.
inline unsigned farther(unsigned a, unsigned b, bool up) {
  return (order(static_cast<int>(a)) < order(static_cast<int>(b))) != up ? a : b;
}
template <int LANES>
inline unsigned farther(unsigned a, unsigned b, bool up) {
  return LANES == 1 ? farther(a, b, up) : (farther(a, b, up) & 0xFFFF0000) | farther(a << 16, b << 16, up) >> 16;
}
template <int LANES>
inline unsigned lesser(unsigned a, unsigned b) {
  return farther<LANES>(a, b, false);
}
template <int LANES>
inline unsigned greater(unsigned a, unsigned b) {
  return farther<LANES>(a, b, true);
}

template <int LANES>
inline unsigned magnitude(unsigned word) {
  return word & (LANES == 1 ? 0x7FFFFFFF : 0x7FFF7FFF);
}

inline void add_product(Word& hash, int bits, int lower, unsigned upper) {
  hash += static_cast<Word>(static_cast<long long>(bits) * lower) +
      (static_cast<Word>(static_cast<unsigned>(bits) * upper) << 32);
}

inline unsigned add_bytes(unsigned bytes, unsigned to) {
  return to + (bytes & 0xFF) + (bytes >> 8 & 0xFF) + (bytes >> 16 & 0xFF) + (bytes >> 24);
}

inline void fetch(Vector& to, const void* from) {
  to = *static_cast<const Vector*>(from);
}
inline void end_lot() {}
template <int LEFT>
inline void await() {}

#endif

constexpr long long INFINITE = 0x7FF0000000000000, SIGN = -0x7FFFFFFFFFFFFFFF - 1;

inline bool is_finite(double value) {
  return (same_bits<long long>(value) & INFINITE) != INFINITE;
}

// `splitmix.h`
inline Word splitmix64(Word number) {
  Word z = number * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// The weight of a row or a column in its block, and the factor of the block.
inline Word weight(Word place, bool of_rows) {
  return splitmix64(2 * (place % BLOCK) + of_rows + (Word(1) << 40));
}
inline Word factor(Word block, bool of_rows) {
  return splitmix64(2 * block + of_rows + (Word(1) << 32)) | 1;
}

inline bool in_blocks(const Job& job) {
  return job.height > BLOCK || job.width > BLOCK || job.height * job.width > PIECE;
}

// The dtypes. Each says of the bits of a value whether it is NaN, infinite or zero, what it is, and its place in the
// order of all values. There are few, since NVRTC takes a second for each.

struct Float64 {
  using Bits = long long;
  using Key = long long;
  static constexpr bool WIDE = true, IN_WORDS = false;

  long long single(Bits bits) const {
    return bits;
  }
  static Key key(long long bits) {
    return bits ^ (bits >> 63 & ~SIGN);
  }
  static bool is_odd(long long bits) {
    return (bits & INFINITE) == INFINITE;
  }
  static bool is_nan(long long bits) {
    return (bits & ~SIGN) > INFINITE;
  }
  static bool is_zero(long long bits) {
    return (bits & ~SIGN) == 0;
  }
  static double value(long long bits) {
    return same_bits<double>(bits);
  }
  static double value_of(long long key) {
    return value(Float64::key(key));
  }
};

// Those of at most 32 bits are read as float32.
struct Single {
  using Key = int;
  static constexpr bool WIDE = false, IN_WORDS = true;

  static Key key(int single) {
    return order(single);
  }
  static bool is_odd(int single) {
    return (single & 0x7F800000) == 0x7F800000;
  }
  static bool is_nan(int single) {
    return (single & 0x7FFFFFFF) > 0x7F800000;
  }
  static bool is_zero(int single) {
    return (single & 0x7FFFFFFF) == 0;
  }
  static double value(int single) {
    return same_bits<float>(single);
  }
  static double value_of(long long key) {
    return value(Single::key(static_cast<int>(key)));
  }
};

// All values of a word at once, by their signs.
template <int BYTES>
struct Words {
  static constexpr unsigned ONES = BYTES == 4 ? 1 : BYTES == 2 ? 0x00010001 : 0x01010101;
  static constexpr unsigned SIGNS = ONES << (8 * BYTES - 1), MAGNITUDES = ~SIGNS;

  static unsigned nonzero(unsigned word) {
    return ((word & MAGNITUDES) + MAGNITUDES) & SIGNS;
  }
};

// What a thread does with vectors of such values: it takes a float32 as it is, and others as the upper bits of a
// bfloat16, which have the same order. The double whose upper bits have the same sign, exponent and mantissa is the
// value without a scale, also of a subnormal one, so that none has to be converted.
template <typename B>
struct Short : Single, Words<sizeof(B)> {
  using Bits = B;
  static constexpr int LANES = sizeof(B) == 4 ? 1 : 2; // of a word that is taken
  static constexpr int TAKEN = sizeof(B) == 1 ? 8 : 4; // words of a vector
  using Taken = Words<4 / LANES>;
  static constexpr unsigned MOST = LANES == 1 ? 0x7F7FFFFF : 0x7F7F7F7F, LEAST = MOST | Taken::SIGNS;
  int special; // the first magnitude that is infinite or NaN; 0 where -0.0 is the only NaN
  int shift; // of the sign, exponent and mantissa, to where a double has them
  unsigned mask;
  double scale;

  Short(int mantissa, int bias, int special) : special(special) {
    shift = 12 - 8 * static_cast<int>(sizeof(B)) + mantissa;
    mask = (LANES == 1 ? 0x7FFFFFFF : 0x7FFF0000) >> shift | 0x80000000;
    scale = same_bits<double>(static_cast<Word>(2046 - bias) << 52);
  }

  static unsigned take(const Vector& loaded, int i) {
    if constexpr (sizeof(B) == 1) {
      const unsigned two = loaded.words[i / 2] >> (i % 2 * 16);
      return (two & 0xFF) << 8 | (two & 0xFF00) << 16;
    }
    return loaded.words[i];
  }
  static Bits bits_of(unsigned taken, int lane) {
    return static_cast<Bits>(taken >> (16 * lane + (sizeof(B) == 1 ? 8 : 0)));
  }
  double scaled(unsigned taken, int lane) const {
    const unsigned top = lane + 1 == LANES ? taken : taken << 16;
    const unsigned upper = static_cast<unsigned>(static_cast<int>(top) >> shift) & mask;
    return same_bits<double>(static_cast<Word>(upper) << 32 | (LANES == 1 ? taken << (32 - shift) : 0));
  }
  // Whether one of the smallest magnitudes is zero.
  static bool has_zero(unsigned smallest) {
    return ((smallest + Taken::MAGNITUDES) & Taken::SIGNS) != Taken::SIGNS;
  }
  // Whether a vector that has this range has others than finite values.
  bool has_odd(const Vector& loaded, unsigned least, unsigned most) const {
    constexpr unsigned signs = Taken::SIGNS;
    unsigned odd = 0;
    if (special == 0) {
      for (const unsigned word : loaded.words) {
        const unsigned other = word ^ this->SIGNS;
        odd |= ~(this->nonzero(other) | other) & this->SIGNS;
      }
    } else {
      const unsigned below = signs - (static_cast<unsigned>(special) << (sizeof(B) == 1 ? 8 : 0)) * Taken::ONES;
      odd = (((least & ~signs) + below) | ((most & ~signs) + below)) & signs;
    }
    return odd != 0;
  }
};

struct Float32 : Short<int> {
  Float32() : Short(23, 127, 0x7F800000) {}
  int single(Bits bits) const {
    return bits;
  }
};

struct BFloat16 : Short<short> {
  BFloat16() : Short(7, 127, 0x7F80) {}
  int single(Bits bits) const {
    return static_cast<int>(static_cast<unsigned>(bits) << 16);
  }
};

// In integer arithmetic, since not every device knows every float8.
template <typename B>
struct Narrow : Short<B> {
  int mantissa, bias;
  float unit; // the smallest value

  Narrow(int mantissa, int bias, int special) : Short<B>(mantissa, bias, special), mantissa(mantissa), bias(bias) {
    unit = 1.0f / static_cast<float>(1 << (bias + mantissa - 1));
  }
  int single(B from) const {
    constexpr int MAX = sizeof(B) == 2 ? 0x7FFF : 0x7F;
    const int bits = from, magnitude = bits & MAX, shifted = magnitude << (23 - mantissa), special = this->special;
    int found = shifted + ((127 - bias) << 23);
    if (magnitude >> mantissa == 0) { // subnormal
      found = same_bits<int>(static_cast<float>(magnitude) * unit);
    }
    if (special != 0 ? magnitude >= special : bits == -0x80) {
      found = special != 0 ? shifted | 0x7F800000 : 0x7FC00000;
    }
    return found | (bits & (-0x7FFFFFFF - 1));
  }
};

// Whole numbers and truth values, all as 64 bits: a thread loads them one by one.
struct Whole {
  using Bits = long long;
  using Key = long long;
  static constexpr bool WIDE = false, IN_WORDS = false;
  bool is_unsigned;

  long long single(Bits bits) const {
    return is_unsigned ? bits & 0xFF : bits;
  }
  static Key key(long long number) {
    return number;
  }
  static bool is_odd(long long) {
    return false;
  }
  static bool is_nan(long long) {
    return false;
  }
  static bool is_zero(long long number) {
    return number == 0;
  }
  static double value(long long number) {
    return static_cast<double>(number);
  }
  static double value_of(long long key) {
    return value(key);
  }
};

inline Narrow<signed char> float8(int kind) {
  const bool is_e5m2 = kind == FLOAT8_E5M2 || kind == FLOAT8_E5M2FNUZ, is_fnuz = kind >= FLOAT8_E5M2FNUZ;
  return {is_e5m2 ? 2 : 3, (is_e5m2 ? 15 : 7) + is_fnuz, is_fnuz ? 0 : is_e5m2 ? 0x7C : 0x7F};
}

// Calls `use(format)` for a kind.
template <typename Use>
inline void with_format(int kind, const Use& use) {
  switch (kind) {
    case FLOAT64:
      return use(Float64());
    case FLOAT32:
      return use(Float32());
    case BFLOAT16:
      return use(BFloat16());
    case FLOAT16:
      return use(Narrow<short>(10, 15, 0x7C00));
    case FLOAT8_E5M2:
    case FLOAT8_E4M3FN:
    case FLOAT8_E5M2FNUZ:
    case FLOAT8_E4M3FNUZ:
      return use(float8(kind));
    default:
      return use(Whole{kind == UINT8});
  }
}

inline void clear(Part& sums) {
  sums = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ~SIGN, SIGN};
}

// Adds what was found of other values: Chan, Golub and LeVeque (1979).
inline void add(Part& to, const Part& other) {
  if (other.finite != 0) {
    double mine = static_cast<double>(to.finite), theirs = static_cast<double>(other.finite), all = mine + theirs;
    double apart = other.mean - to.mean, part = mine == theirs ? 0.5 : theirs / all; // most have seen equally many
    to.spread = to.finite == 0 ? other.spread : to.spread + other.spread + apart * apart * (mine * part);
    to.mean = to.finite == 0 ? other.mean : to.mean + apart * part;
    to.total += other.total;
    to.squares += other.squares;
  }
  to.hash += other.hash;
  to.finite += other.finite;
  to.nan += other.nan;
  to.odd += other.odd;
  to.zeros += other.zeros;
  to.underflow += other.underflow;
  to.overflow += other.overflow;
  to.low = other.low < to.low ? other.low : to.low;
  to.high = other.high > to.high ? other.high : to.high;
}

// Without the upper halves, where there are none, it takes a fifth of the time.
inline Word quotient(Word number, Word by) {
  if (number >> 32 == 0 && by >> 32 == 0) {
    return static_cast<unsigned>(number) / static_cast<unsigned>(by);
  }
  return number / by;
}

// How far a value is from the first one.
inline long long place_of(const Job& job, Word row, Word column) {
  long long at = static_cast<long long>(column) * job.step;
  for (int d = job.dims - 1; d > 0; d--) {
    auto size = static_cast<Word>(job.sizes[d]);
    const Word rest = quotient(row, size);
    at += static_cast<long long>(row - rest * size) * job.strides[d];
    row = rest;
  }
  return at + static_cast<long long>(row) * job.strides[0];
}

inline Word bits_at(const Job& job, long long at) {
  switch (job.kind) {
    case FLOAT64:
    case INT64:
      return static_cast<const Word*>(job.data)[at];
    case FLOAT32:
    case INT32:
      return static_cast<const unsigned*>(job.data)[at];
    case BFLOAT16:
    case FLOAT16:
    case INT16:
      return static_cast<const unsigned short*>(job.data)[at];
    default:
      return static_cast<const unsigned char*>(job.data)[at];
  }
}

// What a thread keeps while it reads its columns.
template <typename F>
struct Reading {
  using Bits = typename F::Bits;
  using Key = typename F::Key;
  static constexpr int COLUMNS = 16 / sizeof(Bits);

  struct alignas(16) Loaded {
    Bits bits[COLUMNS];
  };

  unsigned finite = 0, nan = 0, odd = 0, zeros = 0, underflow = 0, overflow = 0;
  Key low, high;
  unsigned least = 0, most = 0; // of whole vectors, as their words are taken
  double pivot = 0, apart = 0, distances = 0, squares = 0; // apart and distances: from the pivot
  Word hashes[COLUMNS] = {};

  Reading() {
    low = static_cast<Key>(~(Key(1) << (8 * sizeof(Key) - 1)));
    high = ~low;
    if constexpr (F::IN_WORDS) {
      least = F::MOST;
      most = F::LEAST;
    }
  }

  // Adds a whole vector if it has nothing but finite values, as most have. False otherwise.
  bool add_finite(const F& format, const Vector& loaded, Word by, bool hashed) {
    if constexpr (!F::IN_WORDS) {
      return false;
    } else {
      constexpr int LANES = F::LANES;
      unsigned taken[F::TAKEN], lower, upper, smallest;
      for (int i = 0; i < F::TAKEN; i++) {
        const unsigned word = taken[i] = F::take(loaded, i);
        lower = i == 0 ? word : lesser<LANES>(word, lower);
        upper = i == 0 ? word : greater<LANES>(word, upper);
        smallest = i == 0 ? magnitude<LANES>(word) : lesser<LANES>(magnitude<LANES>(word), smallest);
      }
      if (format.has_odd(loaded, lower, upper)) {
        return false;
      }
      least = lesser<LANES>(lower, least);
      most = greater<LANES>(upper, most);
      if (F::has_zero(smallest)) {
        unsigned nonzero = 0;
        for (const unsigned word : loaded.words) {
          nonzero = add_bytes(F::nonzero(word), nonzero);
        }
        zeros += COLUMNS - nonzero / 0x80; // which is what a sign is in its byte
      }
      if (finite == 0) {
        pivot = format.scaled(taken[0], 0) * format.scale;
      }
      finite += COLUMNS;
      for (int i = 0; i < F::TAKEN * LANES; i++) {
        const double distance = fused(format.scaled(taken[i / LANES], i % LANES), format.scale, -pivot);
        apart += distance;
        distances = fused(distance, distance, distances);
      }
      if (hashed) { // as a signed number of 32 bits and the rest
        const auto signed_by = static_cast<int>(by);
        const auto rest = static_cast<unsigned>((by - static_cast<Word>(static_cast<long long>(signed_by))) >> 32);
        const auto values = same_bits<Loaded>(loaded);
        for (int i = 0; i < COLUMNS; i++) {
          add_product(hashes[i], values.bits[i], signed_by, rest);
        }
      }
      return true;
    }
  }

  void add(const F& format, Bits bits, Word& hash, Word by, const Job& job) {
    if (job.hashed) {
      hash += lanes_of(bits, job) * by;
    }
    auto single = format.single(bits);
    const bool is_odd = F::is_odd(single), is_zero = F::is_zero(single);
    odd += is_odd;
    nan += F::is_nan(single);
    zeros += is_zero;
    double value = F::value(single);
    if (job.has_target) {
      double size = value < 0 && job.tiny >= 0 ? -value : value; // a negative `tiny` tells the infinite values apart
      underflow += size <= job.tiny && !is_zero;
      overflow += size > job.huge;
    }
    if (is_odd) {
      return;
    }
    Key key = F::key(single);
    low = key < low ? key : low;
    high = key > high ? key : high;
    pivot = finite == 0 ? value : pivot; // squares of distances from it lose no digits, whatever the mean
    finite++;
    double distance = value - pivot;
    apart += distance;
    distances = fused(distance, distance, distances);
    if constexpr (F::WIDE) {
      squares += value * value;
    }
  }

  static Word lanes_of(Bits bits, const Job& job) { // the hash takes an element of 64 bits for two
    if constexpr (sizeof(Bits) == 8) {
      if (F::WIDE || job.kind == INT64) {
        auto lower = static_cast<Word>(static_cast<long long>(static_cast<int>(bits)));
        return lower * splitmix64(2) + static_cast<Word>(bits >> 32) * splitmix64(3);
      }
    }
    return static_cast<Word>(static_cast<long long>(bits));
  }

  // Where the columns of this thread begin in a virtual row, and how many there are.
  struct Place {
    long long at;
    int count;
  };
  static Place find(const Job& job, Word virtual_row, Word first) {
    Word row = virtual_row, piece = 0;
    if (job.height == 1) {
      row = 0;
      piece = virtual_row;
    } else if (job.pieces > 1) {
      row = quotient(virtual_row, job.pieces);
      piece = virtual_row - row * job.pieces;
    }
    const Word column = piece * BLOCK + first;
    const Word end = piece + 1 < job.pieces ? (piece + 1) * BLOCK : job.width;
    if (column >= end) {
      return {0, 0};
    }
    return {place_of(job, row, column), end - column < COLUMNS ? static_cast<int>(end - column) : COLUMNS};
  }

  // Where the columns of this thread are whole vectors, if they lie as those of most tensors do.
  struct Vectors {
    bool are_whole; // whether any can be
    Word pitch; // from one virtual row to the next; 0 if `find` has to tell
    Word end; // of the values of which vectors are taken

    // How many rows of a thread have one, from the first on.
    int count(Word row, Word step, Word rows, Word first) const {
      const Word begin = row * pitch + first;
      if (!are_whole || pitch == 0 || row >= rows || begin + COLUMNS > end) {
        return 0;
      }
      const auto some = static_cast<unsigned>(rows - row - 1) / static_cast<unsigned>(step);
      const Word others = (end - COLUMNS - begin) / (step * pitch);
      return static_cast<int>(others < some ? others : some) + 1;
    }
  };
  static Vectors vectors_of(const Job& job, Word first) {
    // Of others than infinite values, a target counts some.
    const bool are_whole = F::IN_WORDS && job.aligned && !(job.has_target && job.tiny >= 0);
    if (job.dims > 1 || (job.height > 1 && job.pieces > 1)) {
      return {are_whole, 0, 0};
    }
    if (job.height == 1) {
      return {are_whole, BLOCK, job.width};
    }
    return {are_whole && first + COLUMNS <= job.width, static_cast<Word>(job.strides[0]), ~Word(0)};
  }

  // Reads the columns of this thread in virtual rows. Of most tensors the rows have whole vectors at known distances, up
  // to one, and some of these are always on their way to the slots of the thread.
  void add_rows(
      const F& format, const Job& job, Word row, Word step, Word end, Word first, const Word* weights, Vector* slots) {
    const Vectors vectors = vectors_of(job, first);
    const auto* next = static_cast<const Bits*>(job.data) + row * vectors.pitch + first;
    const Word apart = step * vectors.pitch;
    const int count = vectors.count(row, step, end, first);
    const bool hashed = job.hashed;
    auto fetch_next = [&](int number, int slot) {
      if (number < count) {
        fetch(slots[slot], next);
        next += apart;
      }
      end_lot();
    };
    for (int i = 0; i < FETCHED; i++) {
      fetch_next(i, i * THREADS);
    }
    for (int i = 0, slot = 0; i < count; i++, row += step, weights += step) {
      await<FETCHED - 1>();
      const Vector loaded = slots[slot];
      fetch_next(i + FETCHED, slot);
      slot = (slot + THREADS) % (FETCHED * THREADS);
      const Word by = hashed ? *weights : 0;
      if (!add_finite(format, loaded, by, hashed)) {
        add_row(format, job, find(job, row, first), by);
      }
    }
    for (; row < end; row += step, weights += step) {
      const Place place = find(job, row, first);
      const Word by = job.hashed ? *weights : 0;
      const bool is_whole = vectors.are_whole && place.count == COLUMNS;
      if (!is_whole || !add_finite(format, *vector_at(job, place.at), by, hashed)) {
        add_row(format, job, place, by);
      }
    }
  }

  static const Vector* vector_at(const Job& job, long long at) {
    return reinterpret_cast<const Vector*>(static_cast<const Bits*>(job.data) + at);
  }

  // Value by value.
  void add_row(const F& format, const Job& job, Place place, Word by) {
    Loaded loaded;
    if (job.aligned && place.count == COLUMNS) {
      loaded = *reinterpret_cast<const Loaded*>(static_cast<const Bits*>(job.data) + place.at);
    } else {
      for (int i = 0; i < COLUMNS; i++) {
        loaded.bits[i] = i < place.count ? load(job, place.at + i * job.step) : 0;
      }
    }
    for (int i = 0; i < COLUMNS; i++) {
      if (i < place.count) {
        add(format, loaded.bits[i], hashes[i], by, job);
      }
    }
  }

  static Bits load(const Job& job, long long at) {
    if constexpr (sizeof(Bits) == 8 && !F::WIDE) {
      switch (job.kind) {
        case INT32:
          return static_cast<const int*>(job.data)[at];
        case INT16:
          return static_cast<const short*>(job.data)[at];
        case INT8:
        case UINT8:
          return static_cast<const signed char*>(job.data)[at];
      }
    }
    return static_cast<const Bits*>(job.data)[at];
  }

  void end(const F& format, const Job& job, Word first, Part& sums) {
    clear(sums);
    if constexpr (F::IN_WORDS) {
      for (int lane = 0; lane < F::LANES; lane++) {
        const Key lower = F::key(format.single(F::bits_of(least, lane)));
        const Key upper = F::key(format.single(F::bits_of(most, lane)));
        if (lower <= upper) { // there was a vector
          low = lower < low ? lower : low;
          high = upper > high ? upper : high;
        }
      }
    }
    if (job.hashed) {
      for (int i = 0; i < COLUMNS; i++) {
        sums.hash += hashes[i] * weight(first + i, job.swapped);
      }
    }
    sums.finite = finite;
    sums.nan = nan;
    sums.odd = odd;
    sums.zeros = zeros;
    sums.underflow = underflow;
    sums.overflow = job.has_target ? overflow : odd - nan;
    if (finite != 0) {
      double count = finite, away = apart / count;
      sums.total = apart + count * pivot;
      sums.mean = pivot + away;
      double spread = distances - apart * away;
      sums.spread = spread > 0 ? spread : 0;
      sums.spread = is_finite(distances) ? sums.spread : distances;
      sums.squares = squares;
      sums.low = low;
      sums.high = high;
    }
  }
};

// The threads of a block: on a GPU this is one of them, and on the host it is all.
#ifdef __CUDACC_RTC__
constexpr int HELD = 1;

struct PartWords {
  Word words[sizeof(Part) / sizeof(Word)];
};

// What another block has left, past the cache next to the processor, which may hold an older copy.
inline Part fetched(const Part& from) {
  PartWords found;
  for (int i = 0; i < static_cast<int>(sizeof found / sizeof(Word)); i++) {
    found.words[i] = reinterpret_cast<const volatile Word*>(&from)[i];
  }
  return same_bits<Part>(found);
}

template <typename Use>
inline void each_thread(const Use& use) {
  use(static_cast<int>(threadIdx.x), 0);
  __syncthreads();
}

// Adds up what `get(thread, held, part)` finds in each thread, in the first of `sums`, of which there is one for a warp.
template <typename Get>
inline void join(const Get& get, Part* sums) {
  const int thread = static_cast<int>(threadIdx.x);
  Part own;
  auto add_those = [&](int width) { // of so many threads beside each other
    for (int half = width / 2; half > 0; half /= 2) {
      auto theirs = same_bits<PartWords>(own);
      for (Word& word : theirs.words) {
        word = __shfl_down_sync(0xFFFFFFFF, word, half);
      }
      add(own, same_bits<Part>(theirs));
    }
  };
  get(thread, 0, own);
  add_those(WARP);
  if (thread % WARP == 0) {
    sums[thread / WARP] = own;
  }
  __syncthreads();
  if (thread < WARP) {
    own = sums[thread % WARPS];
    add_those(WARPS);
    if (thread == 0) {
      sums[0] = own;
    }
  }
  __syncthreads();
}
#else
constexpr int HELD = THREADS;

inline Part fetched(const Part& from) {
  return from;
}

template <typename Use>
void each_thread(const Use& use) {
  for (int thread = 0; thread < THREADS; thread++) {
    use(thread, thread);
  }
}

template <typename Get>
void join(const Get& get, Part* sums) {
  Part all[THREADS];
  for (int thread = 0; thread < THREADS; thread++) {
    get(thread, thread, all[thread]);
  }
  auto add_those = [](Part* parts, int width) {
    for (int half = width / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; i++) {
        add(parts[i], parts[i + half]);
      }
    }
  };
  for (int warp = 0; warp < WARPS; warp++) {
    add_those(all + warp * WARP, WARP);
    sums[warp] = all[warp * WARP];
  }
  add_those(sums, WARPS);
}
#endif

// Takes what the threads of a block have in the memory that they share, an item each, into the first one.
template <typename Item, typename Take>
inline void fold(Item* items, const Take& take) {
  for (int half = THREADS / 2; half > 0; half /= 2) {
    each_thread([&](int thread, int) {
      if (thread < half) {
        take(items[thread], items[thread + half]);
      }
    });
  }
}

inline Word weight_of_row(const Job& job, Word virtual_row) {
  Word row = virtual_row / job.pieces, found = weight(row, !job.swapped);
  if (in_blocks(job)) {
    found *= factor(row / BLOCK, !job.swapped) * factor(virtual_row % job.pieces, job.swapped);
  }
  return found;
}

// Reads a part of the tensor. The sums and the weights are in memory that the threads of a block share: one for each warp,
// and one for each thread.
template <typename F>
inline void read_part(F format, const Job& job, int part, Part* sums, Word* weights, Vector* slots) {
  Reading<F> readings[HELD];
  const int lanes = job.lanes, strip = part % job.across, beside = lanes * Reading<F>::COLUMNS;
  const Word rows = job.height * job.pieces, first = static_cast<Word>(part / job.across) * job.rows_each;
  const Word last = first + job.rows_each < rows ? first + job.rows_each : rows;
  auto column_of = [&](int thread) {
    return static_cast<Word>(strip) * beside + static_cast<Word>(thread % lanes) * Reading<F>::COLUMNS;
  };
  for (Word base = first; base < last; base += THREADS) {
    const Word end = base + THREADS < last ? base + THREADS : last;
    if (job.hashed) {
      each_thread([&](int thread, int) {
        if (base + thread < end) {
          weights[thread] = weight_of_row(job, base + thread);
        }
      });
    }
    each_thread([&](int thread, int held) {
      Reading<F>& own = readings[held];
      const Word column = column_of(thread), step = THREADS / lanes;
      const Word row = base + thread / lanes;
      own.add_rows(format, job, row, step, end, column, weights + (row - base), slots + thread);
    });
  }
  join([&](int thread, int held, Part& own) { readings[held].end(format, job, column_of(thread), own); }, sums);
}

inline void read_part(const Job& job, int part, Part* sums, Word* weights, Vector* slots) {
  with_format(job.kind, [&](auto format) { read_part(format, job, part, sums, weights, slots); });
}

// Adds up what the blocks have found, always in the same order.
inline void join_parts(const Job& job, const Part* found, Part* sums) {
  join(
      [&](int thread, int, Part& own) {
        clear(own);
        for (int part = thread; part < job.across * job.down; part += THREADS) {
          add(own, fetched(found[part]));
        }
      },
      sums);
}

// The hash of some values, one of each stretch of the same length. All threads of a block find the same.
inline Word sample(const Job& job, Word* words) {
  const Word all = job.height * job.width, stretch = all / SAMPLED;
  each_thread([&](int thread, int) {
    words[thread] = 0;
    for (Word i = thread; i < SAMPLED; i += THREADS) {
      const Word mixed = splitmix64(i), number = i * stretch + mixed % stretch, row = number / job.width;
      words[thread] += bits_at(job, place_of(job, row, number - row * job.width)) * (mixed | 1);
    }
  });
  fold(words, [](Word& word, Word other) { word += other; });
  const Word found = words[0];
  each_thread([](int, int) {}); // before the memory is used again
  return found;
}

// But for its mark.
inline Row row_of(const Job& job, const Part& sums) {
  const bool is_known = is_finite(sums.spread) && is_finite(sums.squares);
  Row row{
      sums.hash,
      sums.finite,
      sums.nan,
      sums.odd,
      sums.zeros,
      sums.underflow,
      sums.overflow,
      sums.total,
      is_known ? sums.spread : same_bits<double>(INFINITE),
      same_bits<double>(INFINITE),
      same_bits<double>(INFINITE | SIGN),
      0};
  if (sums.finite != 0) {
    with_format(job.kind, [&](auto format) {
      row.low = format.value_of(sums.low);
      row.high = format.value_of(sums.high);
    });
  }
  return row;
}

// What a block of the launch does. `count` adds to the number of the blocks that are done, and returns it. The last one
// writes the row, but for its mark. Returns whether it has.
constexpr unsigned HAS_READ = 1u << 16;

template <typename Count>
inline bool run_block(
    const Job& job, int block, Part* found, Part* sums, Word* words, Vector* slots, const Count& count) {
  unsigned done = 0;
  bool alone = false;
  do {
    const bool same = job.is_known && !alone && sample(job, words) == job.memo->sample;
    const int parts = same ? 0 : job.across * job.down, step = alone ? 1 : job.blocks;
    for (int part = alone ? 0 : block; part < parts; part += step) {
      read_part(job, part, sums, words, slots);
      each_thread([&](int thread, int) {
        if (thread == 0) {
          found[part] = sums[0];
        }
      });
    }
    if (!alone) {
      done = count(same ? 1 : HAS_READ + 1);
      if (done % HAS_READ != static_cast<unsigned>(job.blocks)) {
        return false;
      }
    }
    // Something may write to the tensor meanwhile, so that blocks find different samples.
    alone = !alone && done > HAS_READ && done / HAS_READ != static_cast<unsigned>(job.blocks);
  } while (alone);
  const bool same = done < HAS_READ;
  Word sampled = 0;
  if (!same) {
    if (job.across * job.down > 1) {
      join_parts(job, found, sums);
    }
    sampled = job.memo == nullptr ? 0 : sample(job, words);
  }
  each_thread([&](int thread, int) {
    if (thread == 0 && same) {
      *job.to = job.memo->row;
    } else if (thread == 0) {
      const Row row = row_of(job, sums[0]);
      *job.to = row;
      if (job.memo != nullptr) {
        *job.memo = {sampled, row};
      }
    }
  });
  return true;
}

#ifdef __CUDACC_RTC__
#ifndef OPINTERCEPT_CHECKS // which are compiled by themselves

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    opintercept_read(const __grid_constant__ Jobs jobs, Scratch* scratch, Word mark) {
  __shared__ alignas(16) unsigned char memory[WARPS * sizeof(Part)];
  __shared__ Word words[THREADS];
  __shared__ Vector slots[FETCHED * THREADS];
  __shared__ unsigned now;
  const int number = blockIdx.y, block = blockIdx.x;
  const Job& job = jobs.job[number];
  unsigned& done = scratch->done[number];
  if (block >= job.blocks) {
    return;
  }
  const bool is_last =
      run_block(job, block, scratch->parts[number], reinterpret_cast<Part*>(memory), words, slots, [&](unsigned mine) {
        if (job.blocks == 1) {
          return mine;
        }
        if (threadIdx.x == 0) {
          __threadfence(); // before another block sees that this one is done
          now = atomicAdd(&done, mine) + mine;
        }
        __syncthreads();
        __threadfence();
        return now;
      });
  if (is_last && threadIdx.x == 0) {
    done = 0;
    __threadfence_system(); // the host reads the row once it sees the mark
    *const_cast<volatile Word*>(&job.to->mark) = mark;
  }
}

#endif
#else

// How a launch reads a tensor whose matrix is known.
inline void lay_out(Job& job) {
  static constexpr int BYTES[KINDS] = {8, 4, 2, 2, 1, 1, 1, 1, 8, 4, 2, 1, 1};
  const int bytes = BYTES[job.kind];
  const Word wide = job.kind < INT64 ? 16 / bytes : 2;
  job.pieces = (job.width + BLOCK - 1) / BLOCK;
  const Word columns = job.width < BLOCK ? job.width : BLOCK, rows = job.height * job.pieces;
  // Threads that are neighbours read neighbours in memory: down the rows, where these are dense and the columns are not.
  const Word most_across = job.step != 1 && job.strides[job.dims - 1] == 1 ? MOST_PARTS / 8 : 1;
  job.lanes = 1;
  while (job.lanes < THREADS && job.lanes * wide * most_across < columns) {
    job.lanes *= 2;
  }
  const Word beside = job.lanes * wide;
  job.across = static_cast<int>((columns + beside - 1) / beside);
  const Word least = ROWS_EACH * static_cast<Word>(THREADS / job.lanes), most = MOST_PARTS / job.across;
  Word down = (rows + least - 1) / least;
  down = down < most ? down : most;
  job.rows_each = (rows + down - 1) / down;
  job.down = static_cast<int>((rows + job.rows_each - 1) / job.rows_each);
  auto address = reinterpret_cast<Word>(job.data);
  job.aligned = job.kind <= INT64 && job.step == 1 && address % 16 == 0;
  for (int d = 0; d < job.dims; d++) {
    job.aligned = job.aligned && (job.sizes[d] == 1 || job.strides[d] * bytes % 16 == 0);
  }
  job.blocks = job.across * job.down;
}

#endif

} // namespace opintercept::device
