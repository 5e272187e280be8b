// What `values.cpp` reads of a tensor for other sources. Only `as_tensor` and `as_found` need the interpreter's lock.

#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace opintercept {

// What `Stats` adds up, see `hooks._sums.Cell`. The range is that of the finite values, as are the total and the sum of squared distances from the mean.
struct Sums {
  int64_t count = 0, finite = 0, nan = 0, zeros = 0, underflow = 0, overflow = 0;
  double total = 0, spread = 0, low = INFINITY, high = -INFINITY;

  void add(const Sums& other) {
    if (finite && other.finite) { // as in `hooks._sums._between`
      auto mine = static_cast<double>(finite), theirs = static_cast<double>(other.finite);
      double apart = total / mine - other.total / theirs;
      spread += other.spread + apart * apart * (mine * theirs / (mine + theirs));
      spread = std::isnan(spread) ? INFINITY : spread; // the total is infinite
    } else {
      spread += other.spread;
    }
    count += other.count;
    finite += other.finite;
    nan += other.nan;
    zeros += other.zeros;
    underflow += other.underflow;
    overflow += other.overflow;
    total += other.total;
    low = std::min(low, other.low);
    high = std::max(high, other.high);
  }

  void repeat(int64_t times) {
    for (int64_t* each : {&count, &finite, &nan, &zeros, &underflow, &overflow}) {
      *each *= times;
    }
    total *= static_cast<double>(times);
    spread *= static_cast<double>(times);
  }
};

// Values of magnitude up to `tiny` become zero in the target dtype, and those above `huge` are beyond it.
struct Target {
  double tiny, huge;
};

// Whether a tensor is a plain array in the memory of this process, which is `data`, or null for an empty one.
bool in_memory(const at::Tensor& tensor, const void*& data);

// The tensor of a Python object. False if it is not one, or of a subclass.
bool as_tensor(PyObject* value, at::Tensor& tensor);

// Both return false for a tensor that they cannot read.
bool read_sums(const at::Tensor& tensor, const Target* target, bool hashed, Sums& sums, uint64_t& hash);
bool is_finite(const at::Tensor& tensor, bool& finite);

// What `values.read` returns. Takes over the references; null if one of them is.
PyObject* as_found(const Sums& sums, PyObject* hash, PyObject* powers, PyObject* channels);

} // namespace opintercept
