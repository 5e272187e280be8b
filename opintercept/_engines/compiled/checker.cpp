// Checks the products of noted calls for `hooks.Checksum`, as `expect` and `screen` of `hooks.checksum.arithmetic` do.
//
// Invariant: the checksums of B and of A (B e) are those of `_native/checksums.cpp`, bit for bit, so that Python can
// take them again. Everything else only has to be close, since Python examines whatever is suspected here.

#include "checker.h"

#include "../../_native/values.h"
#include "ring.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <utility>

namespace opintercept {

thread_local const Checked* handed_over = nullptr;
PyObject* Checker::keep_out = nullptr;

namespace {

double unit(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kDouble:
      return DBL_EPSILON / 2;
    case c10::kFloat:
      return FLT_EPSILON / 2;
    case c10::kHalf:
      return 0x1p-11;
    default:
      return 0x1p-8;
  }
}

bool is_low(c10::ScalarType dtype) {
  return dtype == c10::kHalf || dtype == c10::kBFloat16;
}

template <typename Context>
bool rounds_operands(const Context& context) { // whether oneDNN may multiply float32 in fewer bits
  auto precision = context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL);
  return precision != at::Float32Precision::IEEE && precision != at::Float32Precision::NONE;
}

template <typename Context>
void look_at(std::string& key, const Context& context) {
  for (auto backend : {at::Float32Backend::MKLDNN, at::Float32Backend::CUDA, at::Float32Backend::GENERIC}) {
    auto op = backend == at::Float32Backend::GENERIC ? at::Float32Op::ALL : at::Float32Op::MATMUL;
    key.push_back(static_cast<char>(context.float32Precision(backend, op)));
  }
}

template <typename Context>
void look_at_sums(std::string& key, const Context& context) { // see `_values.precision.reduced_sums`
  key.push_back(static_cast<char>(context.allowFP16ReductionCuBLAS()));
  key.push_back(static_cast<char>(context.allowBF16ReductionCuBLAS()));
  key.push_back(static_cast<char>(context.allowFP16AccumulationCuBLAS()));
}

template <typename... Values>
void add_to(std::string& key, const Values&... values) {
  (key.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
}

at::Tensor empty(std::vector<int64_t> sizes, bool wide) {
  return at::detail::empty_cpu(sizes, wide ? c10::kDouble : c10::kFloat);
}

template <typename W>
W* data_of(const at::Tensor& tensor) {
  return static_cast<W*>(tensor.data_ptr());
}

// A number of the program; false for one that is not real.
bool number_of(const c10::IValue& value, double& number) {
  if (!value.isDouble() && !value.isInt()) {
    return false;
  }
  number = value.toScalar().toDouble();
  return true;
}

const at::Tensor* tensor_of(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? &value.toTensor() : nullptr;
}

// The norms of [batch, rows, groups] over rows, [batch, groups].
template <typename T>
std::vector<double> norms_over_rows(const T* values, int64_t batch, int64_t rows, int64_t groups) {
  std::vector<double> norms(static_cast<size_t>(batch * groups), 0.0);
  for (int64_t b = 0; b < batch; b++) {
    double* sums = norms.data() + b * groups;
    for (const T* at = values + b * rows * groups; at < values + (b + 1) * rows * groups; at += groups) {
      for (int64_t g = 0; g < groups; g++) {
        sums[g] += static_cast<double>(at[g]) * static_cast<double>(at[g]);
      }
    }
  }
  for (double& each : norms) {
    each = std::sqrt(each);
  }
  return norms;
}

} // namespace

void look_at_precision(std::string& key) {
  look_at(key, at::globalContext());
}

Limits::~Limits() {
  give_up({kind});
}

Form* Checker::form(const Overload& overload) {
  {
    std::lock_guard lock(mutex);
    auto found = forms.find(&overload);
    if (found != forms.end()) {
      return found->second;
    }
  }
  std::unique_ptr<Form> made;
  {
    Locked locked;
    THPObjectPtr told(check(PyObject_CallFunctionObjArgs(form_of, overload.in_python().overload, nullptr)));
    if (told.get() != Py_None) {
      made = std::make_unique<Form>();
      if (!PyArg_ParseTuple(told.get(), "iiiii", &made->lhs, &made->rhs, &made->bias, &made->beta, &made->alpha)) {
        raise();
      }
    }
  }
  std::lock_guard lock(mutex);
  auto [found, fresh] = forms.try_emplace(&overload, made.get());
  if (fresh && made != nullptr) {
    made->overload = &overload;
    made->next = newest.load();
    newest = made.release();
  }
  return found->second;
}

const void* Checker::signs(int64_t columns, bool is_wide) {
  {
    std::lock_guard lock(mutex);
    auto found = signs_by_columns[is_wide].find(columns);
    if (found != signs_by_columns[is_wide].end()) {
      return found->second.data_ptr();
    }
  }
  Locked locked;
  THPObjectPtr n(check(PyLong_FromLongLong(columns)));
  THPObjectPtr told(check(PyObject_CallFunctionObjArgs(signs_of, n.get(), is_wide ? Py_True : Py_False, nullptr)));
  at::Tensor signs;
  if (!as_tensor(told.get(), signs)) {
    return nullptr;
  }
  std::lock_guard lock(mutex);
  return signs_by_columns[is_wide].try_emplace(columns, signs).first->second.data_ptr();
}

bool Checker::expect(
    const Overload& overload, const c10::IValue* arguments, int64_t index, std::unique_ptr<Checked>& found) {
  // As `hooks.checksum.checksum._chosen`.
  if (every > 1 && static_cast<uint64_t>(index) * 0x9E3779B97F4A7C15 > UINT64_MAX / every) {
    return true;
  }
  Form* known = form(overload);
  if (known == nullptr) {
    return false;
  }
  found = std::make_unique<Checked>();
  found->form = known;
  if (known->lhs < 0) {
    return true;
  }
  const at::Tensor *left = tensor_of(arguments[known->lhs]), *right = tensor_of(arguments[known->rhs]);
  const at::Tensor* bias = known->bias < 0 ? nullptr : tensor_of(arguments[known->bias]);
  double alpha = 1, beta = 1;
  Matrices lhs, rhs;
  if (left != nullptr && right != nullptr && !left->is_cpu()) {
    device::Operands operands{left, right, bias};
    return (known->alpha < 0 || number_of(arguments[known->alpha], operands.alpha)) &&
        (known->beta < 0 || number_of(arguments[known->beta], operands.beta)) && begin(*found, operands);
  }
  if (left == nullptr || right == nullptr || left->dim() != right->dim() ||
      left->scalar_type() != right->scalar_type() || !lhs.describe(*left) || !rhs.describe(*right) ||
      lhs.columns != rhs.rows || lhs.batch != rhs.batch || (rhs.columns == 1 && lhs.rows > 1 && left->dim() == 2) ||
      (known->alpha >= 0 && !number_of(arguments[known->alpha], alpha)) ||
      (known->beta >= 0 && !number_of(arguments[known->beta], beta)) ||
      (known->bias >= 0 && beta != 0 && bias == nullptr) ||
      (lhs.dtype == c10::kFloat && rounds_operands(at::globalContext()))) {
    return false;
  }
  Checked& expected = *found;
  expected.dtype = lhs.dtype;
  expected.wide = exact || lhs.dtype == c10::kDouble;
  expected.batch = lhs.batch;
  expected.rows = lhs.rows;
  expected.depth = lhs.columns;
  expected.columns = rhs.columns;
  if (is_low(lhs.dtype)) {
    expected.groups = std::max<int64_t>(1, std::min({rhs.columns / GROUP, MOST_GROUPS, lhs.columns / 8}));
  }
  const at::Tensor* added = beta == 0 ? nullptr : bias;
  return expected.wide ? compute<double>(expected, lhs, rhs, *right, added, alpha, beta)
                       : compute<float>(expected, lhs, rhs, *right, added, alpha, beta);
}

bool Checker::begin(Checked& found, const device::Operands& operands) {
  if (exact ||
      (operands.rhs->dim() == 2 && operands.rhs->size(1) == 1 && operands.lhs->numel() > operands.rhs->size(0)) ||
      (found.form->bias >= 0 && operands.beta != 0 && operands.bias == nullptr)) {
    return false;
  }
  device::Operands read = operands;
  read.bias = operands.beta == 0 ? nullptr : operands.bias;
  try {
    found.product = device::Product::begin(read, weights_on_devices);
  } catch (const c10::Error&) { // the device has no memory left, and Python says so
    return false;
  }
  if (found.product == nullptr) {
    return false;
  }
  found.rows = static_cast<int64_t>(found.product->rows());
  return true;
}

bool Checker::finish(Checked& expected, const c10::IValue* arguments, const at::Tensor& output) {
  const Form& form = *expected.form;
  const at::Tensor &lhs = arguments[form.lhs].toTensor(), &rhs = arguments[form.rhs].toTensor();
  double alpha = 1, beta = 1;
  if ((form.alpha >= 0 && !number_of(arguments[form.alpha], alpha)) ||
      (form.beta >= 0 && !number_of(arguments[form.beta], beta))) {
    return false;
  }
  const at::Tensor* bias = form.bias < 0 || beta == 0 ? nullptr : tensor_of(arguments[form.bias]);
  std::string key;
  add_to(
      key, lhs.device(), lhs.scalar_type(), output.scalar_type(), lhs.dim(), rhs.size(-2), rhs.size(-1), alpha, beta);
  key.push_back(bias != nullptr);
  look_at_precision(key);
  look_at_sums(key, at::globalContext());
  {
    std::lock_guard lock(mutex);
    if (auto found = limits_by_look.find(key); found != limits_by_look.end()) {
      expected.limits = found->second;
    }
  }
  if (expected.limits == nullptr) {
    auto made = std::make_shared<Limits>();
    {
      Locked locked;
      auto object = [](const at::Tensor* tensor) { return tensor == nullptr ? Py_NewRef(Py_None) : wrapped(*tensor); };
      THPObjectPtr told(check(PyObject_CallFunction(
          limits_of, "NNNNdd", object(&lhs), object(&rhs), object(bias), object(&output), alpha, beta)));
      if (!PyArg_ParseTuple(told.get(), "ddiO", &made->deviation, &made->limit, &made->fields, &made->kind)) {
        raise();
      }
      Py_INCREF(made->kind);
    }
    expected.limits = made;
    decltype(limits_by_look) old; // freed without the mutex, since that may run Python code
    std::lock_guard lock(mutex);
    if (limits_by_look.size() >= MOST_LOOKS) {
      limits_by_look.swap(old);
    }
    limits_by_look.emplace(key, made);
  }
  const Limits& limits = *expected.limits;
  try {
    return expected.product->finish(output, limits.deviation, limits.limit, limits.fields);
  } catch (const c10::Error&) {
    return false;
  }
}

template <typename W>
bool Checker::compute(
    Checked& found, const Matrices& lhs, const Matrices& rhs, const at::Tensor& right, const at::Tensor* bias,
    double alpha, double beta) {
  auto by = static_cast<const W*>(signs(found.columns, found.wide));
  if (by == nullptr) {
    return false;
  }
  // What is remembered of the weight.
  bool keeps = false;
  const auto key = Weights<Weighed>::key_of(right, found.wide);
  if (key) {
    found.weight = weights.find(*key, right, keeps);
  }
  int64_t groups = found.groups, width = (found.columns + groups - 1) / groups;
  found.weight.remembered = found.weight.inner.defined();
  bool by_batch = right.dim() == 3;
  if (!found.weight.remembered) {
    found.weight.inner =
        by_batch ? empty({rhs.batch, rhs.rows, groups}, found.wide) : empty({rhs.rows, groups}, found.wide);
    sign_sums(rhs, by, width, groups, data_of<W>(found.weight.inner));
  }
  found.middle = by_batch ? empty({lhs.batch, lhs.rows, groups}, found.wide) : empty({lhs.rows, groups}, found.wide);
  std::vector<W> norms(static_cast<size_t>(lhs.batch * lhs.rows));
  const W *inner = data_of<W>(found.weight.inner), *middle = data_of<W>(found.middle);
  project(lhs, inner, by_batch, groups, data_of<W>(found.middle), norms.data());
  size_t count = static_cast<size_t>(found.batch * found.rows * groups);
  found.sums.resize(count);
  std::vector<double> smooth(count, 0.0);
  for (size_t i = 0; i < count; i++) {
    found.sums[i] = alpha * static_cast<double>(middle[i]);
  }
  if (bias != nullptr && !add_bias(found, *bias, beta, by, smooth)) {
    return false;
  }
  std::vector<double>& scale = found.weight.scale;
  if (!found.weight.remembered) {
    // How much of |A_i| |B| is left of A_i B: all if the terms have one sign, 1 / sqrt(k) if they have any. The
    // checksums of a few rows may be less by chance, and those of later rows more.
    scale = norms_over_rows(inner, rhs.batch, rhs.rows, groups);
    double left = 0, all = 0;
    for (size_t i = 0; i < count; i++) {
      size_t row = i / static_cast<size_t>(groups), b = row / static_cast<size_t>(found.rows);
      double whole =
          static_cast<double>(norms[row]) * scale[b * static_cast<size_t>(groups) + i % static_cast<size_t>(groups)];
      left += static_cast<double>(middle[i]) * static_cast<double>(middle[i]);
      all += whole * whole;
    }
    double ratio = std::sqrt(left) / std::sqrt(all),
           least = 1 / std::sqrt(static_cast<double>(rhs.rows) * static_cast<double>(count));
    for (double& each : scale) {
      each *= std::isfinite(ratio) ? std::max(ratio, least) : least;
    }
    if (keeps) {
      weights.keep(*key, found.weight);
    }
  }
  found.size.resize(count);
  for (size_t i = 0; i < count; i++) {
    size_t row = i / static_cast<size_t>(groups), b = row / static_cast<size_t>(found.rows);
    smooth[i] += std::abs(alpha) * static_cast<double>(norms[row]) *
        scale[b * static_cast<size_t>(groups) + i % static_cast<size_t>(groups)];
    found.size[i] = std::hypot(found.sums[i], smooth[i]);
  }
  return true;
}

// Adds the checksums of a bias of one row, or of as many as the output, and about the norms of its elements in groups.
template <typename W>
bool Checker::add_bias(
    Checked& found, const at::Tensor& bias, double beta, const W* by, std::vector<double>& smooth) const {
  Matrices added;
  if (found.batch != 1 || !added.describe(bias) || added.dtype != found.dtype || added.batch != 1 ||
      added.columns != found.columns || (added.rows != 1 && added.rows != found.rows)) {
    return false;
  }
  int64_t groups = found.groups, width = (found.columns + groups - 1) / groups;
  std::vector<W> sums(static_cast<size_t>(added.rows * groups));
  sign_sums(added, by, width, groups, sums.data());
  std::vector<double> rms(static_cast<size_t>(groups));
  if (added.rows > 1) {
    rms = norms_over_rows(sums.data(), 1, added.rows, groups);
    for (double& each : rms) {
      each /= std::sqrt(static_cast<double>(added.rows));
    }
  } else {
    std::vector<W> norm(1), nothing(static_cast<size_t>(width), W(0)), none(1);
    for (int64_t g = 0; g < groups; g++) {
      Matrices part = added;
      part.data += g * width * added.of_column * static_cast<int64_t>(bias.element_size());
      part.columns = std::clamp<int64_t>(added.columns - g * width, 0, width);
      project(part, nothing.data(), false, 1, none.data(), norm.data());
      rms[static_cast<size_t>(g)] = static_cast<double>(norm[0]);
    }
  }
  for (size_t i = 0; i < found.sums.size(); i++) {
    size_t g = i % static_cast<size_t>(groups), from = added.rows == 1 ? g : i;
    auto sum = static_cast<double>(sums[from]);
    found.sums[i] += beta * sum;
    smooth[i] += std::abs(beta) * (added.rows == 1 ? rms[g] : std::hypot(sum, rms[g]));
  }
  return true;
}

bool Checker::agrees(Checked& expected, const c10::IValue* arguments, const c10::IValue& output) {
  const at::Tensor* tensor = tensor_of(output);
  Matrices matrices;
  if (expected.product != nullptr) {
    return tensor != nullptr && finish(expected, arguments, *tensor);
  }
  if (tensor == nullptr || !matrices.describe(*tensor) || matrices.dtype != expected.dtype ||
      matrices.batch != expected.batch || matrices.rows != expected.rows || matrices.columns != expected.columns) {
    return false; // Python finds out
  }
  const void* by = signs(expected.columns, expected.wide);
  return expected.wide ? holds(expected, matrices, static_cast<const double*>(by))
                       : holds(expected, matrices, static_cast<const float*>(by));
}

template <typename W>
bool Checker::holds(const Checked& expected, const Matrices& output, const W* by) const {
  int64_t groups = expected.groups, width = (expected.columns + groups - 1) / groups;
  std::vector<W> sums(expected.sums.size());
  sign_sums(output, by, width, groups, sums.data());
  // The model of `hooks.checksum.arithmetic.screen` for a device that rounds each partial sum and the output.
  auto k = static_cast<double>(expected.depth), n = static_cast<double>(expected.columns);
  double inside = expected.dtype == c10::kDouble ? DBL_EPSILON / 2 : FLT_EPSILON / 2;
  double own = expected.wide ? DBL_EPSILON / 2 : FLT_EPSILON / 2, out = unit(expected.dtype);
  double variance =
      (inside * inside * (k + 1) + own * own * (k + n / static_cast<double>(groups))) / 6 + 0.2 * out * out;
  double deviation = std::sqrt(variance);
  double least = (expected.wide ? DBL_MIN : static_cast<double>(FLT_MIN)) / deviation * (k + 2);
  std::vector<double> together(static_cast<size_t>(expected.batch * groups), 0.0);
  double shift = std::sqrt(static_cast<double>(groups));
  for (int64_t row = 0, i = 0; row < expected.batch * expected.rows; row++) {
    double in_row = 0;
    for (int64_t g = 0; g < groups; g++, i++) {
      auto at = static_cast<size_t>(i);
      double relative =
          std::abs(static_cast<double>(sums[at]) - expected.sums[at]) / std::max(expected.size[at], least) / deviation;
      if (!(relative <= limit)) { // also if it is NaN
        return false;
      }
      in_row += relative * relative;
      together[static_cast<size_t>(row / expected.rows * groups + g)] += relative * relative;
    }
    if (groups > 1 && std::sqrt(in_row) - shift > limit) {
      return false;
    }
  }
  for (double each : together) {
    if (groups > 1 && std::sqrt(each) - std::sqrt(static_cast<double>(expected.rows)) > limit) {
      return false;
    }
  }
  return true;
}

void Checker::count(const Checked& expected) {
  if (expected.form->lhs < 0) {
    expected.form->skipped.fetch_add(1, std::memory_order_relaxed);
  } else {
    checked.fetch_add(1, std::memory_order_relaxed);
    rows.fetch_add(expected.batch * expected.rows, std::memory_order_relaxed);
  }
}

void Checker::forget(const at::Tensor& rhs, bool is_wide) {
  if (const auto key = Weights<Weighed>::key_of(rhs, is_wide)) {
    weights.forget(*key);
  }
}

PyObject* Checker::skipped() {
  THPObjectPtr found(check(PyList_New(0)));
  for (const Form* form = newest; form != nullptr; form = form->next) {
    if (form->lhs < 0 && form->skipped.load() > 0) {
      THPObjectPtr each(
          Py_BuildValue("(OL)", form->overload->in_python().overload, static_cast<long long>(form->skipped.load())));
      if (each.get() == nullptr || PyList_Append(found.get(), each.get()) < 0) {
        return nullptr;
      }
    }
  }
  return Py_NewRef(found.get());
}

void Checker::clear() {
  checked = rows = 0;
  for (Form* form = newest; form != nullptr; form = form->next) {
    form->skipped = 0;
  }
}

void Checker::forget_parent() { // another thread of the parent may have been changing these
  new (&mutex) std::mutex;
  new (&forms) decltype(forms);
  weights.forget_parent();
  new (&limits_by_look) decltype(limits_by_look);
  weights_on_devices->forget_parent();
  for (auto& each : signs_by_columns) {
    new (&each) std::remove_reference_t<decltype(each)>;
  }
}

Checker::~Checker() {
  for (Form* form = newest; form != nullptr;) {
    delete std::exchange(form, form->next);
  }
  Py_XDECREF(signs_of);
  Py_XDECREF(form_of);
  Py_XDECREF(limits_of);
}

namespace {

// set_up(limit, exact, every, signs_of, form_of, limits_of), once
PyObject* set_up(PyObject* self, PyObject* args) {
  Checker& checker = *checker_of(self);
  int exact;
  unsigned long long every;
  PyObject *signs, *form, *limits;
  if (!PyArg_ParseTuple(args, "dpKOOO", &checker.limit, &exact, &every, &signs, &form, &limits)) {
    return nullptr;
  }
  checker.exact = exact;
  checker.every = every;
  THPObjectPtr before(checker.signs_of), also(checker.form_of), last(checker.limits_of);
  checker.signs_of = PyObject_CallFunctionObjArgs(Checker::keep_out, signs, nullptr);
  checker.form_of = PyObject_CallFunctionObjArgs(Checker::keep_out, form, nullptr);
  checker.limits_of = PyObject_CallFunctionObjArgs(Checker::keep_out, limits, nullptr);
  const bool failed = checker.signs_of == nullptr || checker.form_of == nullptr || checker.limits_of == nullptr;
  return failed ? nullptr : Py_NewRef(Py_None);
}

// A copy. What is remembered never gets a Python object, which could only be released with the interpreter's lock.
PyObject* wrapped_copy(const at::Tensor& tensor) {
  at::Tensor copy = at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type());
  std::memcpy(copy.data_ptr(), tensor.data_ptr(), tensor.nbytes());
  return wrapped(copy);
}

// taken() -> (checksums of B, of A (B e), whether the first are remembered) of the call that is shown, or None
PyObject* taken(PyObject*, PyObject*) {
  if (handed_over == nullptr || !handed_over->middle.defined()) {
    Py_RETURN_NONE;
  }
  const Weighed& weight = handed_over->weight;
  return Py_BuildValue(
      "(NNO)", wrapped_copy(weight.inner), wrapped_copy(handed_over->middle), weight.remembered ? Py_True : Py_False);
}

// forget(rhs, whether in float64)
PyObject* forget(PyObject* self, PyObject* args) {
  PyObject* rhs;
  int wide;
  at::Tensor tensor;
  if (!PyArg_ParseTuple(args, "Op", &rhs, &wide)) {
    return nullptr;
  }
  if (as_tensor(rhs, tensor)) {
    checker_of(self)->forget(tensor, wide);
  }
  Py_RETURN_NONE;
}

// counts() -> (products, rows, [(overload, calls that were skipped)])
PyObject* counts(PyObject* self, PyObject*) {
  Checker& checker = *checker_of(self);
  PyObject* skipped = checker.skipped();
  return skipped == nullptr ? nullptr : Py_BuildValue("(LLN)", checker.checked.load(), checker.rows.load(), skipped);
}

PyObject* clear(PyObject* self, PyObject*) {
  checker_of(self)->clear();
  Py_RETURN_NONE;
}

PyMethodDef checker_methods[] = {
    {"set_up", set_up, METH_VARARGS, nullptr},
    {"taken", taken, METH_NOARGS, nullptr},
    {"forget", forget, METH_VARARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

PyObject* new_checker() {
  return PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&Wrapped<Checker>::type));
}

Checker* checker_of(PyObject* object) {
  return Wrapped<Checker>::of(object);
}

} // namespace opintercept

bool opintercept_add_checker(PyObject* module) {
  using namespace opintercept;
  return Wrapped<Checker>::add(module, "Checker", checker_methods);
}
