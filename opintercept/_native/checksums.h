// The sums of `vectors/sum_columns.h` with the vector instructions of this processor, on torch's threads.

#pragma once

#include "vectors/sum_columns.h"

namespace opintercept {

// `out`, [batch, rows, groups], becomes x times `by`, [columns, groups] or [batch, columns, groups]. `norms`, [batch,
// rows] or null, become those of the rows. The results depend neither on the number of threads nor on other rows.
template <typename W>
void project(const Matrices& x, const W* by, bool by_batch, int64_t groups, W* out, W* norms);

// The same for signs, [columns], of which each belongs to one group of neighbours, the first `width` to the first.
template <typename W>
void sign_sums(const Matrices& x, const W* signs, int64_t width, int64_t groups, W* out);

} // namespace opintercept
