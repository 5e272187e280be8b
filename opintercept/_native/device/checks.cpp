// Checks a product on a GPU in the launches of `checksum.h`, for kernels in C++ and, as `Check`, for Python.
//
// Invariant: nothing but `settle` and `read_terms` waits for a device. Memory comes from torch's allocator on the
// stream of the call, which gives it away behind what was launched there, and no operand is kept.

#include "checks.h"

#include "../objects.h"
#include "../threads.h"
#include "../values.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <exception>
#include <utility>

namespace opintercept::device {

namespace {

constexpr Word MOST_SPLITS = 32; // of A (B E)

// Lays out arrays in memory that is allocated once their sizes are known.
class Layout {
 public:
  template <typename T>
  void add(T*& array, Word count, size_t bytes = sizeof(T)) {
    size += (-size) % 16;
    places.emplace_back(reinterpret_cast<void**>(&array), size);
    size += count * bytes;
  }
  void add(void*& array, Word count, size_t bytes) {
    add<void>(array, count, bytes);
  }
  c10::DataPtr allocate(c10::Device device) {
    c10::DeviceGuard guard(device);
    c10::DataPtr memory = c10::GetAllocator(device.type())->allocate(size);
    for (auto [array, place] : places) {
      *array = static_cast<char*>(memory.get()) + place;
    }
    return memory;
  }

 private:
  size_t size = 0;
  std::vector<std::pair<void**, size_t>> places;
};

// The last dimensions of a tensor as those of matrices, which may be broadcast to these sizes.
bool view(const at::Tensor& tensor, Word batch, Word rows, Word columns, View& found) {
  found.data = address_of(tensor);
  if (found.data == nullptr || tensor.dim() > 3 || !describe(tensor.scalar_type(), found.kind) ||
      found.kind > FLOAT8_E4M3FNUZ) {
    return false;
  }
  const Word wanted[] = {batch, rows, columns};
  long long* strides[] = {&found.of_batch, &found.of_row, &found.of_column};
  for (int64_t d = 1; d <= 3; d++) {
    const auto size = d <= tensor.dim() ? static_cast<Word>(tensor.size(-d)) : 1;
    if (size != 1 && size != wanted[3 - d]) {
      return false;
    }
    *strides[3 - d] = size == 1 ? 0 : tensor.stride(-d);
  }
  return true;
}

// Scales of rows or columns: one, or as many.
bool view(const at::Tensor* tensor, Word count, const float*& data, long long& stride) {
  if (tensor == nullptr) {
    return true;
  }
  const auto size = static_cast<Word>(tensor->numel());
  data = static_cast<const float*>(address_of(*tensor));
  if (data == nullptr || tensor->scalar_type() != c10::kFloat || (size != 1 && size != count)) {
    return false;
  }
  stride = 0;
  for (int64_t d = 0; d < tensor->dim(); d++) {
    stride = tensor->size(d) > 1 ? tensor->stride(d) : stride;
  }
  return size == 1 || std::max(tensor->size(0), tensor->size(-1)) == tensor->numel();
}

} // namespace

std::unique_ptr<Product> Product::begin(const Operands& operands, const std::shared_ptr<WeightsOnDevices>& weights) {
  const at::Tensor &lhs = *operands.lhs, &rhs = *operands.rhs;
  auto found = std::make_unique<Product>();
  Check& check = found->check;
  if (lhs.dim() != rhs.dim() || lhs.dim() < 2 || lhs.dim() > 3 || lhs.scalar_type() != rhs.scalar_type() ||
      lhs.device() != rhs.device() || lhs.size(-1) != rhs.size(-2) || lhs.numel() == 0 || rhs.numel() == 0 ||
      rhs.size(-1) > INT32_MAX || (lhs.dim() == 3 && lhs.size(0) != rhs.size(0)) ||
      !find_stream(lhs.device(), found->stream)) {
    return nullptr;
  }
  check.batch = lhs.dim() == 3 ? static_cast<Word>(lhs.size(0)) : 1;
  check.height = static_cast<Word>(lhs.size(-2));
  check.depth = static_cast<Word>(lhs.size(-1));
  check.width = static_cast<Word>(rhs.size(-1));
  check.alpha = operands.alpha;
  check.beta = operands.beta;
  const bool wide = found->wide = lhs.scalar_type() == c10::kDouble;
  if (!view(lhs, check.batch, check.height, check.depth, check.lhs) ||
      !view(rhs, check.batch, check.depth, check.width, check.rhs) ||
      !view(operands.rows, check.height, check.rows, check.of_rows) ||
      !view(operands.columns, check.width, check.columns, check.of_columns) ||
      ((operands.rows != nullptr || operands.columns != nullptr) && (wide || check.batch != 1))) {
    return nullptr;
  }
  check.has_bias = operands.bias != nullptr;
  if (check.has_bias) {
    const at::Tensor& bias = *operands.bias;
    if (bias.device() != lhs.device() || (bias.scalar_type() == c10::kDouble) != wide ||
        !view(bias, check.batch, check.height, check.width, check.bias)) {
      return nullptr;
    }
    check.one_bias = check.bias.of_batch == 0 && check.bias.of_row == 0;
  }

  const bool few = lhs.element_size() <= 2;
  check.groups = few ? static_cast<int>(std::max<Word>(
                           1, std::min({check.width / 16, static_cast<Word>(MOST_GROUPS), check.depth / 8})))
                     : 1;
  const auto groups = static_cast<Word>(check.groups);
  check.group_width = static_cast<int>(parts_of(check.width, groups));
  const Word tiles = product_tiles(check), rows = check.batch * check.height, count = rows * groups;
  const Word wanted = std::min({MOST_SPLITS, parts_of(FEW_TILES, tiles), parts_of(check.depth, 2 * DEPTH)});
  const Word splits = tiles >= FEW_TILES ? 1 : wanted;
  check.split_depth = static_cast<int>(parts_of(parts_of(check.depth, splits), DEPTH) * DEPTH);
  check.splits = static_cast<int>(parts_of(check.depth, static_cast<Word>(check.split_depth)));
  const bool many = lhs.dim() == 2 && groups == 1 && check.height >= 32; // `arithmetic.MANY`
  check.fallback = 1 / std::sqrt(static_cast<double>(check.depth) * static_cast<double>(count));
  check.floor = many ? 0 : check.fallback;
  check.least = (wide ? DBL_MIN / (DBL_EPSILON / 2) : static_cast<double>(FLT_MIN) / (FLT_EPSILON / 2)) *
      static_cast<double>(check.depth + 2);

  const size_t bytes = wide ? sizeof(double) : sizeof(float);
  bool keeps = false;
  if (weights != nullptr && operands.columns == nullptr) {
    found->weights = weights;
    found->key = WeightsOnDevices::key_of(rhs, found->stream.id);
  }
  if (found->key) {
    found->weight = weights->find(*found->key, rhs, keeps);
  }
  check.is_fresh = found->weight == nullptr;
  if (check.is_fresh) {
    auto made = std::make_shared<Weight>();
    Layout layout;
    layout.add(made->inner, check.batch * check.depth * groups, bytes);
    layout.add(made->scale, check.batch * groups + 1);
    made->memory = layout.allocate(rhs.device());
    found->weight = std::move(made);
  }
  check.inner = found->weight->inner;
  check.scale = found->weight->scale;
  const Word row_count = check.has_bias ? bias_rows(check) : 0;
  Layout layout;
  layout.add(check.middle, count, bytes);
  layout.add(check.norms, rows, bytes);
  layout.add(check.parts, static_cast<Word>(check.splits) * rows * (groups + 1), bytes);
  layout.add(check.scale_parts, static_cast<Word>(check.splits) * check.batch * groups);
  layout.add(check.tile_sums, 2 * tiles);
  layout.add(check.bias_sums, row_count * groups, bytes);
  layout.add(check.bias_norms, row_count * groups, bytes);
  layout.add(check.bias_copy, check.has_bias && check.one_bias ? check.width : 0, bytes);
  layout.add(check.residual, count, bytes);
  layout.add(check.bests, tiles_of(rows) + 1);
  found->scratch = layout.allocate(rhs.device());
  if ((check.is_fresh && !launch(found->stream, check, 0, wide)) || !launch(found->stream, check, 1, wide)) {
    return nullptr;
  }
  if (check.is_fresh && keeps) {
    weights->keep(*found->key, found->weight);
  }
  return found;
}

bool Product::finish(const at::Tensor& output, double deviation, double limit, int fields) {
  if (output.device() != stream.device || output.dim() < 2 || output.dim() > 3 || pending.is_open() ||
      (output.scalar_type() == c10::kDouble) != wide || static_cast<Word>(output.numel()) != rows() * check.width ||
      !view(output, check.batch, check.height, check.width, check.output)) {
    return false;
  }
  Stream now;
  if (!find_stream(stream.device, now) || now.id != stream.id) {
    return false; // the program has changed streams, and this one may be ahead
  }
  check.deviation = deviation;
  check.limit = limit;
  check.fields = fields;
  Layout layout;
  layout.add(check.terms, this->fields() * check.width);
  terms = layout.allocate(stream.device);
  check.to = reserve(stream, pending);
  if (check.to == nullptr) {
    return false;
  }
  const bool begun = launch(stream, check, 2, wide) && launch(stream, check, 3, wide, pending.mark);
  if (!begun) {
    give_back(pending);
  }
  scratch.clear(); // for what is launched on the stream from here on
  weight = nullptr;
  return begun;
}

bool Product::has_arrived() const {
  return !pending.is_open() || device::has_arrived(pending);
}

bool Product::settle() {
  Row row;
  if (!pending.is_open()) {
    return !has_failed;
  }
  if (!wait_for(pending, row)) {
    has_failed = true;
    return false;
  }
  verdict = same_bits<Verdict>(row);
  if (!is_suspect()) {
    terms.clear();
  }
  return true;
}

bool Product::read_terms(void* to) const {
  return copy(stream.device, to, check.terms, fields() * check.width * sizeof(double));
}

void Product::forget() const {
  if (key) {
    weights->forget(*key);
  }
}

Product::~Product() {
  drop(pending);
}

} // namespace opintercept::device

namespace {

using namespace opintercept;

struct Held {
  std::mutex mutex; // of whoever waits first
  std::unique_ptr<device::Product> product;
  bool is_settled = false, is_known = false;
};

struct Memory {
  std::shared_ptr<device::WeightsOnDevices> weights = std::make_shared<device::WeightsOnDevices>();
};

// finish(output, deviation, limit, fields) -> whether the output is being checked
PyObject* finish(PyObject* self, PyObject* args) {
  Held& held = *Wrapped<Held>::of(self);
  PyObject* value;
  double deviation, limit;
  int fields;
  if (!PyArg_ParseTuple(args, "Oddi", &value, &deviation, &limit, &fields)) {
    return nullptr;
  }
  try {
    at::Tensor output;
    const bool begun =
        as_tensor(value, output) && unlocked([&] { return held.product->finish(output, deviation, limit, fields); });
    return PyBool_FromLong(begun);
  } catch (const std::exception& exception) { // the device has no memory left
    PyErr_SetString(PyExc_RuntimeError, exception.what());
    return nullptr;
  }
}

PyObject* has_arrived(PyObject* self, PyObject*) {
  Held& held = *Wrapped<Held>::of(self);
  std::unique_lock alone(held.mutex, std::try_to_lock); // not while another thread waits
  return PyBool_FromLong(alone && (held.is_settled || held.product->has_arrived()));
}

// found() -> (how suspect the most suspected row is, which it is, how many are suspect, the largest magnitude of an
// operand, how many rows a matrix has); None if the device has failed
PyObject* found(PyObject* self, PyObject*) {
  Held& held = *Wrapped<Held>::of(self);
  unlocked([&] {
    std::lock_guard alone(held.mutex);
    if (!held.is_settled) {
      held.is_known = held.product->settle();
      held.is_settled = true;
    }
  });
  if (!held.is_known) {
    Py_RETURN_NONE;
  }
  const device::Verdict& verdict = held.product->found();
  return Py_BuildValue(
      "(dKKdn)",
      verdict.worst,
      verdict.flat,
      verdict.suspected,
      verdict.most,
      static_cast<Py_ssize_t>(held.product->height()));
}

// terms() -> what was wanted of the suspected row, as the bytes of float64; None if the device has failed
PyObject* terms(PyObject* self, PyObject*) {
  Held& held = *Wrapped<Held>::of(self);
  const device::Product& product = *held.product;
  PyObject* made = PyByteArray_FromStringAndSize(
      nullptr, static_cast<Py_ssize_t>(product.fields() * product.columns() * sizeof(double)));
  if (made != nullptr && !unlocked([&] { return product.read_terms(PyByteArray_AS_STRING(made)); })) {
    Py_DECREF(made);
    Py_RETURN_NONE;
  }
  return made;
}

PyObject* forget(PyObject* self, PyObject*) {
  Wrapped<Held>::of(self)->product->forget();
  Py_RETURN_NONE;
}

PyMethodDef methods_of_check[] = {
    {"finish", finish, METH_VARARGS, nullptr},
    {"has_arrived", has_arrived, METH_NOARGS, nullptr},
    {"found", found, METH_NOARGS, nullptr},
    {"terms", terms, METH_NOARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef methods_of_memory[] = {{nullptr, nullptr, 0, nullptr}};

// check_on_device(Weights or None, lhs, rhs, bias or None, rows or None, columns or None, alpha, beta) -> a Check of
// what the operator is about to compute; None if the kernel cannot check it now
PyObject* check_on_device(PyObject*, PyObject* args) {
  PyObject *memory, *values[5];
  device::Operands operands{};
  if (!PyArg_ParseTuple(
          args,
          "OOOOOOdd",
          &memory,
          &values[0],
          &values[1],
          &values[2],
          &values[3],
          &values[4],
          &operands.alpha,
          &operands.beta)) {
    return nullptr;
  }
  try {
    at::Tensor tensors[5];
    const at::Tensor** wanted[] = {&operands.lhs, &operands.rhs, &operands.bias, &operands.rows, &operands.columns};
    for (size_t i = 0; i < 5; i++) {
      *wanted[i] = values[i] == Py_None ? nullptr : &tensors[i];
      if (values[i] != Py_None && !as_tensor(values[i], tensors[i])) {
        Py_RETURN_NONE;
      }
    }
    std::shared_ptr<device::WeightsOnDevices> weights;
    if (memory != Py_None) {
      weights = Wrapped<Memory>::of(memory)->weights;
    }
    auto product = unlocked([&] { return device::Product::begin(operands, weights); });
    return product == nullptr ? Py_NewRef(Py_None) : as_python(std::move(product));
  } catch (const std::exception& exception) { // the device has no memory left
    PyErr_SetString(PyExc_RuntimeError, exception.what());
    return nullptr;
  }
}

PyMethodDef functions_of_checks[] = {
    {"check_on_device", check_on_device, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

PyObject* opintercept::as_python(std::unique_ptr<device::Product> product) {
  PyObject* made = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&Wrapped<Held>::type));
  if (made != nullptr) {
    Wrapped<Held>::of(made)->product = std::move(product);
  }
  return made;
}

bool opintercept_add_checks(PyObject* module) {
  return Wrapped<Held>::add(module, "Check", methods_of_check) &&
      Wrapped<Memory>::add(module, "Weights", methods_of_memory) &&
      PyModule_AddFunctions(module, functions_of_checks) == 0;
}
