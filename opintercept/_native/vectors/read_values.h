// What `read_values.cpp` reads of an array, for each set of vector instructions.

#pragma once

#include "sets.h"

#include <c10/core/ScalarType.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace at {
class Tensor;
}

namespace opintercept {

constexpr size_t DEEPEST = 16; // dimensions

// The twin of `_values.stats.Sums`. The range is that of the finite values, as are the total and the sum of
// squared distances from the mean.
struct Sums {
  int64_t count = 0, finite = 0, nan = 0, zeros = 0, underflow = 0, overflow = 0;
  double total = 0, spread = 0, low = INFINITY, high = -INFINITY;
};

// Values of magnitude up to `tiny` become zero in the target dtype, and those above `huge` are beyond it.
struct Target {
  double tiny, huge;
};

// Counts by power of two, as in `_values.sums.powers`.
constexpr int LOWEST = -149, HIGHEST = 127, POWERS = HIGHEST - LOWEST + 1;

// A matrix in the order in which it is read: as torch sees it, or with its dimensions swapped.
struct Matrix {
  int64_t height = 1, width = 1;
  bool swapped = false;
};

// What is asked beside the sums.
struct Request {
  const Target* target = nullptr;
  bool powers = false, channels = false, hash = false;
  bool zeros = true; // whether to count them

  bool in_order() const { // whether it matters where a value is
    return channels || hash;
  }
  bool takes_whole() const { // whether whole numbers and truth values can be read
    return hash && !channels && !powers && target == nullptr;
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

  // False for a tensor that cannot be read here: floats can, and `whole` numbers if they are asked for.
  bool describe(const at::Tensor& tensor, bool in_order, bool whole = false);

  bool dense() const {
    return dims == 0 || (dims == 1 && strides[0] == 1);
  }

 private:
  void sort();
  void join();
};

struct Answer {
  Sums sums;
  std::array<int64_t, POWERS> powers{};
  std::vector<double> channels;
  uint64_t hash = 0;
};

struct Ends {
  double low = NAN, high = NAN;

  bool are_finite() const {
    return std::isfinite(low) && std::isfinite(high);
  }
};

// Both leave the answer as it is where there are no values.
FOR_EACH_SET(
    void read(const Layout& layout, const Request& request, int workers, Answer& answer);
    void find_ends(const Layout& layout, int workers, Ends& ends);)

} // namespace opintercept
