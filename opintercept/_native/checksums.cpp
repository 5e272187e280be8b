// Finds out where matrices are, for `vectors/sum_columns.cpp`, and hands them over from Python.

#include <Python.h>

#include "checksums.h"
#include "threads.h"
#include "values.h"

#include <ATen/core/Tensor.h>

namespace opintercept {

bool Matrices::describe(const at::Tensor& tensor) {
  const void* found;
  if (tensor.layout() != c10::kStrided) { // sparse CSR has no strides
    return false;
  }
  auto sizes = tensor.sizes(), strides = tensor.strides();
  if (sizes.empty() || sizes.size() > 3 || !in_memory(tensor, found) || found == nullptr) {
    return false;
  }
  data = static_cast<const char*>(found);
  dtype = tensor.scalar_type();
  columns = sizes.back();
  of_column = strides.back();
  if (sizes.size() > 1) {
    rows = sizes[sizes.size() - 2];
    of_row = strides[sizes.size() - 2];
  }
  if (sizes.size() == 3) {
    batch = sizes[0];
    of_batch = strides[0];
  }
  return dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kBFloat16 || dtype == c10::kHalf;
}

template <typename W>
void project(const Matrices& x, const W* by, bool by_batch, int64_t groups, W* out, W* norms) {
  CHOSEN(project<W>)(x, by, by_batch, groups, out, norms, workers_for(x.count()));
}

template <typename W>
void sign_sums(const Matrices& x, const W* signs, int64_t width, int64_t groups, W* out) {
  CHOSEN(sign_sums<W>)(x, signs, width, groups, out, workers_for(x.count()));
}

template void project(const Matrices&, const float*, bool, int64_t, float*, float*);
template void project(const Matrices&, const double*, bool, int64_t, double*, double*);
template void sign_sums(const Matrices&, const float*, int64_t, int64_t, float*);
template void sign_sums(const Matrices&, const double*, int64_t, int64_t, double*);

namespace {

// Whether a tensor is contiguous, of W, and has this many values.
template <typename W>
W* array_of(const at::Tensor& tensor, int64_t count) {
  const void* data;
  bool fits = tensor.scalar_type() == c10::CppTypeToScalarType<W>::value && tensor.is_contiguous() &&
      tensor.numel() == count && in_memory(tensor, data);
  return fits ? static_cast<W*>(const_cast<void*>(data)) : nullptr;
}

template <typename W>
bool project_into(const Matrices& x, const at::Tensor& by, const at::Tensor& out, const at::Tensor* norms) {
  bool by_batch = by.dim() == 3;
  int64_t groups = by.sizes().back(), matrices = by_batch ? x.batch : 1;
  const W* factors = array_of<W>(by, matrices * x.columns * groups);
  W* sums = array_of<W>(out, x.batch * x.rows * groups);
  W* lengths = norms == nullptr ? nullptr : array_of<W>(*norms, x.batch * x.rows);
  if (factors == nullptr || sums == nullptr || (norms != nullptr && lengths == nullptr)) {
    return false;
  }
  Unlocked unlocked(x.count() > WITH_LOCK);
  project(x, factors, by_batch, groups, sums, lengths);
  return true;
}

template <typename W>
bool sign_sums_into(const Matrices& x, const at::Tensor& signs, const at::Tensor& out) {
  int64_t groups = out.sizes().back();
  const W* factors = array_of<W>(signs, x.columns);
  W* sums = array_of<W>(out, x.batch * x.rows * groups);
  if (factors == nullptr || sums == nullptr || groups == 0) {
    return false;
  }
  Unlocked unlocked(x.count() > WITH_LOCK);
  sign_sums(x, factors, (x.columns + groups - 1) / groups, groups, sums);
  return true;
}

} // namespace

} // namespace opintercept

// project(x, by, out, norms or None) -> whether it was computed, see `values.Project`
PyObject* opintercept_project(PyObject*, PyObject* const* args, Py_ssize_t count) {
  using namespace opintercept;
  try {
    at::Tensor x, by, out, norms;
    Matrices matrices;
    if (count != 4 || !as_tensor(args[0], x) || !as_tensor(args[1], by) || !as_tensor(args[2], out) ||
        (args[3] != Py_None && !as_tensor(args[3], norms)) || !matrices.describe(x) || x.dim() < 2 || by.dim() < 2) {
      Py_RETURN_FALSE;
    }
    const at::Tensor* lengths = args[3] == Py_None ? nullptr : &norms;
    bool wide = by.scalar_type() == c10::kDouble;
    bool done =
        wide ? project_into<double>(matrices, by, out, lengths) : project_into<float>(matrices, by, out, lengths);
    return PyBool_FromLong(done);
  } catch (const std::exception&) { // as in `opintercept_read`
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
}

// sign_sums(x, signs, out) -> whether it was computed, see `values.SignSums`
PyObject* opintercept_sign_sums(PyObject*, PyObject* const* args, Py_ssize_t count) {
  using namespace opintercept;
  try {
    at::Tensor x, signs, out;
    Matrices matrices;
    if (count != 3 || !as_tensor(args[0], x) || !as_tensor(args[1], signs) || !as_tensor(args[2], out) ||
        !matrices.describe(x) || x.dim() < 2 || out.dim() < 2) {
      Py_RETURN_FALSE;
    }
    bool wide = signs.scalar_type() == c10::kDouble;
    return PyBool_FromLong(
        wide ? sign_sums_into<double>(matrices, signs, out) : sign_sums_into<float>(matrices, signs, out));
  } catch (const std::exception&) { // as in `opintercept_read`
    PyErr_Clear();
    Py_RETURN_FALSE;
  }
}
