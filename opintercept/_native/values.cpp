// Finds out where the values of a tensor are, lets `vectors/read_values.cpp` read them, and hands the answers to
// Python.
//
// Invariant: no operator of torch runs. A tensor that is not a plain array in memory is not read.

#include <Python.h>

#include <ATen/core/Tensor.h>

#include "remembered.h"
#include "threads.h"
#include "values.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

bool opintercept::in_memory(const at::Tensor& tensor, const void*& data) {
  static const c10::DispatchKeySet keys(
      {c10::DispatchKey::CPU,
       c10::DispatchKey::AutogradCPU,
       c10::DispatchKey::ADInplaceOrView,
       c10::DispatchKey::AutocastCPU});
  return in_memory(tensor, keys, data);
}

bool opintercept::in_memory(const at::Tensor& tensor, const c10::DispatchKeySet& keys, const void*& data) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl == nullptr || !keys.isSupersetOf(impl->key_set()) || impl->layout() != c10::kStrided ||
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

bool opintercept::Layout::describe(const at::Tensor& tensor, bool in_order, bool whole) {
  dtype = tensor.scalar_type();
  bool known = dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kBFloat16 || dtype == c10::kHalf ||
      (whole &&
       (dtype == c10::kBool || dtype == c10::kChar || dtype == c10::kByte || dtype == c10::kShort ||
        dtype == c10::kInt || dtype == c10::kLong));
  if (!known || !in_memory(tensor, data) || tensor.sizes().size() > DEEPEST) {
    return false;
  }
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

// In the order of memory, and each value once.
void opintercept::Layout::sort() {
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

void opintercept::Layout::join() {
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

namespace {

using namespace opintercept;

PyObject *tensor_type, *parameter_type;

// False if the object is not a tensor that can be read here.
bool describe(PyObject* value, const Request& request, at::Tensor& tensor, Layout& layout) {
  return as_tensor(value, tensor) && layout.describe(tensor, request.in_order(), request.takes_whole());
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
  tensor = unpacked(value);
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
  return tuple_of<6>({added, PyFloat_FromDouble(-sums.low), PyFloat_FromDouble(sums.high), hash, powers, channels});
}

bool opintercept::read_sums(
    const at::Tensor& tensor, const Target* target, bool hashed, bool zeros, Keep keeps, Sums& sums, uint64_t& hash) {
  Request request;
  request.target = target;
  request.hash = hashed;
  request.zeros = zeros;
  Layout layout;
  if (!layout.describe(tensor, request.in_order(), request.takes_whole())) {
    return false;
  }
  const bool remembers = keeps != Keep::NOTHING && is_worth_remembering(layout);
  const Asked asked{tensor, layout, request};
  if (remembers && recall(asked, sums, hash)) {
    return true;
  }
  std::optional<Keeping> keeping;
  if (remembers) {
    keeping.emplace(asked);
  }
  Answer answer;
  CHOSEN(read)(layout, request, workers_for(layout.count), answer);
  sums = answer.sums;
  hash = answer.hash;
  if (keeping) {
    keeping->keep(keeps == Keep::WRITTEN, sums, hash);
  }
  return true;
}

bool opintercept::find_range(const at::Tensor& tensor, Ends& ends) {
  Layout layout;
  if (!layout.describe(tensor, false)) {
    return false;
  }
  CHOSEN(find_ends)(layout, workers_for(layout.count), ends);
  return true;
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
    if (!describe(args[0], request, tensor, layout)) {
      Py_RETURN_NONE;
    }
    Answer answer;
    {
      Unlocked unlocked(layout.count > WITH_LOCK);
      CHOSEN(read)(layout, request, workers_for(layout.count), answer);
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
    if (!describe(value, Request(), tensor, layout) || layout.count == 0) {
      Py_RETURN_NONE;
    }
    {
      Unlocked unlocked(layout.count > WITH_LOCK);
      CHOSEN(find_ends)(layout, workers_for(layout.count), ends);
    }
    return tuple_of<2>({PyFloat_FromDouble(ends.low), PyFloat_FromDouble(ends.high)});
  } catch (const std::exception&) { // as in `opintercept_read`
    PyErr_Clear();
    Py_RETURN_NONE;
  }
}

// storage(tensor) -> see `values.storage`
PyObject* opintercept_storage(PyObject*, PyObject* value) {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  if (PyObject_IsInstance(value, tensor_type) != 1 || !unpacked(value).has_storage()) {
    Py_RETURN_NONE;
  }
  const c10::Storage& storage = unpacked(value).storage();
  auto weak = std::make_unique<Weak>(storage.getWeakStorageImpl());
  PyObject* holder = PyCapsule_New(weak.get(), nullptr, [](PyObject* capsule) {
    delete static_cast<Weak*>(PyCapsule_GetPointer(capsule, nullptr));
  });
  if (holder == nullptr) {
    return nullptr;
  }
  weak.release();
  return Py_BuildValue("(NN)", PyLong_FromVoidPtr(storage.unsafeGetStorageImpl()), holder);
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
