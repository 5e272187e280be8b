// `_core.record.signature_of` in C++: the same bytes for calls that look alike, without a Python object for each shape
// and dtype.
//
// Invariant: a call that this cannot describe goes to `_core.record.signature_of`, so that both find the same calls
// alike.

#include <Python.h>

#include "record.h"

#include "../../_native/values.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cmath>
#include <string>

namespace {

PyObject *look_in_python, *tensor_type, *parameter_type, *schema_name;

template <typename T>
void put(std::string& key, char kind, const T& value) {
  key.push_back(kind);
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put(std::string& key, c10::IntArrayRef numbers) {
  put(key, 'a', numbers.size());
  key.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
}

constexpr int DEEPEST = 16; // lists in lists; a list that contains itself has no end

// Each function below returns whether it can describe its value.

bool look_at_tensor(std::string& key, const at::Tensor& tensor, bool numbers = false) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->has_symbolic_sizes_strides() || impl->layout() != c10::kStrided || tensor.is_nested()) {
    return false;
  }
  auto dtype = tensor.scalar_type();
  if (numbers && !c10::isFloatingType(dtype) && tensor.numel() < 64) {
    return false; // its values may decide the summary
  }
  put(key, 'T', dtype);
  put(key, 'd', tensor.device());
  put(key, 'r', tensor.requires_grad());
  put(key, tensor.sizes());
  put(key, tensor.strides());
  return true;
}

bool look_at(std::string& key, PyObject* value, bool numbers, int depth = 0) {
  auto type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  if (type == tensor_type || type == parameter_type) {
    return look_at_tensor(key, opintercept::unpacked(value), numbers);
  }
  if (value == Py_None || PyBool_Check(value)) {
    key.push_back(value == Py_None ? 'n' : value == Py_True ? 'y' : 'z');
    return true;
  }
  if (PyLong_CheckExact(value)) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    put(key, 'i', number);
    return overflow == 0;
  }
  if (PyFloat_CheckExact(value)) {
    put(key, 'f', PyFloat_AS_DOUBLE(value));
    return true;
  }
  if ((!PyTuple_CheckExact(value) && !PyList_CheckExact(value)) || depth == DEEPEST) {
    return false;
  }
  Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
  put(key, 't', size);
  for (Py_ssize_t i = 0; i < size; i++) {
    if (!look_at(key, PySequence_Fast_GET_ITEM(value, i), numbers, depth + 1)) {
      return false;
    }
  }
  return true;
}

bool look_at_named(std::string& key, PyObject* named, bool numbers) {
  Py_ssize_t at = 0;
  PyObject *name, *value;
  while (PyDict_Next(named, &at, &name, &value)) {
    Py_ssize_t size;
    const char* text = PyUnicode_AsUTF8AndSize(name, &size);
    if (text == nullptr) {
      PyErr_Clear();
      return false;
    }
    put(key, 'k', size);
    key.append(text, static_cast<size_t>(size));
    if (!look_at(key, value, numbers)) {
      return false;
    }
  }
  return true;
}

bool look_at_call(std::string& key, PyObject* const* call) {
  try {
    const bool numbers = !PyObject_HasAttr(call[0], schema_name); // a function may take dimensions as a tensor
    return PyTuple_CheckExact(call[1]) && PyDict_CheckExact(call[2]) && look_at(key, call[1], numbers) &&
        look_at_named(key, call[2], numbers) && look_at(key, call[3], numbers);
  } catch (const std::exception&) { // a tensor that stands for others, without sizes of its own
    PyErr_Clear();
    return false;
  }
}

} // namespace

namespace {

// The 1 in `x + 1`, which Python gets as a number.
bool look_at_wrapped(std::string& key, const at::Tensor& number, bool fractions) {
  const c10::TensorImpl* impl = number.unsafeGetTensorImpl();
  if (!number.is_cpu() || number.numel() != 1 || !impl->has_storage() || impl->unsafe_storage().data() == nullptr) {
    return false;
  }
  put(key, 'w', number.scalar_type());
  if (!fractions && number.scalar_type() == c10::kDouble && std::isfinite(*number.const_data_ptr<double>())) {
    return true;
  }
  key.append(static_cast<const char*>(number.const_data_ptr()), number.itemsize());
  return true;
}

bool look_at_any(std::string& key, const at::Tensor& tensor, bool fractions) {
  if (!tensor.defined()) {
    key.push_back('n');
    return true;
  }
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? look_at_wrapped(key, tensor, fractions)
                                                           : look_at_tensor(key, tensor);
}

} // namespace

bool opintercept::look_at_output(std::string& key, const c10::IValue& value) {
  if (value.isInt() || value.isDouble() || value.isBool() || value.isComplexDouble()) {
    key.push_back(value.isInt() ? 'I' : value.isDouble() ? 'D' : value.isBool() ? 'B' : 'C');
    return true;
  }
  return look_at(key, value);
}

bool opintercept::look_at(std::string& key, const c10::IValue& value, bool fractions) {
  if (value.isTensor()) {
    return look_at_any(key, value.toTensor(), fractions);
  }
  if (value.isNone() || value.isBool()) {
    key.push_back(value.isNone() ? 'n' : value.toBool() ? 'y' : 'z');
    return true;
  }
  if (value.isInt()) {
    put(key, 'i', value.toInt());
    return true;
  }
  if (value.isDouble()) {
    put(key, 'f', fractions || !std::isfinite(value.toDouble()) ? value.toDouble() : 0.0);
    return true;
  }
  if (value.isIntList()) {
    put(key, value.toIntVector());
    return true;
  }
  if (value.isComplexDouble()) {
    put(key, 'c', value.toComplexDouble());
    return true;
  }
  if (value.isString()) {
    put(key, 's', value.toStringRef().size());
    key += value.toStringRef();
    return true;
  }
  if (value.isDevice()) {
    put(key, 'D', value.toDevice());
    return true;
  }
  if (value.isGenerator() || value.isStream()) { // whichever it is, calls look alike
    key.push_back(value.isGenerator() ? 'g' : 'S');
    return true;
  }
  if (value.isList()) {
    auto items = value.toListRef();
    put(key, 'l', items.size());
    for (const auto& item : items) {
      if (!look_at(key, item, fractions)) {
        return false;
      }
    }
    return true;
  }
  return false;
}

// signature_of(func, args, kwargs, output) -> bytes, or what `_core.record.signature_of` returns
PyObject* opintercept_look(PyObject*, PyObject* const* call, Py_ssize_t count) {
  if (count != 4) {
    PyErr_Format(
        PyExc_TypeError, "signature_of must get a call's func, args, kwargs and output, got %zd values", count);
    return nullptr;
  }
  std::string key;
  put(key, 'F', call[0]);
  if (look_at_call(key, call)) {
    return PyBytes_FromStringAndSize(key.data(), static_cast<Py_ssize_t>(key.size()));
  }
  return PyObject_Vectorcall(look_in_python, call, 4, nullptr);
}

// set_up_signature(look, torch.Tensor, torch.nn.Parameter)
PyObject* opintercept_set_up_signature(PyObject*, PyObject* args) {
  if (!PyArg_ParseTuple(args, "OOO", &look_in_python, &tensor_type, &parameter_type)) {
    return nullptr;
  }
  for (PyObject* each : {look_in_python, tensor_type, parameter_type}) {
    Py_INCREF(each);
  }
  schema_name = PyUnicode_InternFromString("_schema");
  Py_RETURN_NONE;
}
