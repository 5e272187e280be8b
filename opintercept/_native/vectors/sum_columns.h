// Sums over the columns of matrices on the CPU, each row times one or more vectors, as
// `hooks.checksum.arithmetic.project`.

#pragma once

#include "sets.h"

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace at {
class Tensor;
}

namespace opintercept {

// A matrix in memory, or a batch of them, or a vector as a matrix of one row.
struct Matrices {
  const char* data = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  int64_t batch = 1, rows = 1, columns = 0;
  int64_t of_batch = 0, of_row = 0, of_column = 0; // strides

  // False for a tensor that is no such thing, or whose values are not floating-point numbers of 16 bits or more.
  bool describe(const at::Tensor& tensor);

  bool transposed() const {
    return of_row == 1 && of_column != 1;
  }

  int64_t count() const {
    return batch * rows * columns;
  }
};

// `out`, [batch, rows, groups], becomes x times `by`, [columns, groups] or [batch, columns, groups]. `norms`, [batch,
// rows] or null, become those of the rows. The results depend neither on the number of threads nor on other rows.
//
// The same for signs, [columns], of which each belongs to one group of neighbours, the first `width` to the first.
FOR_EACH_SET(
    template <typename W>
    void project(const Matrices& x, const W* by, bool by_batch, int64_t groups, W* out, W* norms, int workers);
    template <typename W>
    void sign_sums(const Matrices& x, const W* signs, int64_t width, int64_t groups, W* out, int workers);)

} // namespace opintercept
