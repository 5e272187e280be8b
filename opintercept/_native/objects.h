// Objects of Python in C++: their errors as exceptions, their slots, and types that own objects of C++.
//
// Invariant: none of torch's headers for Python is included here, nor anywhere but in `kernels.cpp`: they take ten
// seconds to compile.

#pragma once

#include <Python.h>
#include <structmember.h>

#include <torch/csrc/utils/object_ptr.h>

#include <exception>
#include <string>

namespace opintercept {

[[noreturn]] void raise(); // Python's error as an exception of C++
PyObject* exception_of(const std::exception_ptr& thrown); // what it is to Python; it can still be thrown
[[noreturn]] void raise_again(); // the same of an error that `exception_of` may be asked for
void set_error(const std::exception_ptr& thrown);

inline PyObject* check(PyObject* p) {
  if (p == nullptr) {
    raise();
  }
  return p;
}

// Holds the interpreter's lock, whether or not this thread has it already.
class Locked {
 public:
  Locked() = default;
  ~Locked() {
    PyGILState_Release(before);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE before = PyGILState_Ensure();
};

// The place of a slot in Python objects. Reading it by name takes five times as long, and longer with cold caches.
struct Slot {
  Py_ssize_t offset = 0;

  bool find(PyObject* type, const char* name) {
    PyObject* found = PyObject_GetAttrString(type, name);
    if (found == nullptr || Py_TYPE(found) != &PyMemberDescr_Type) {
      Py_XDECREF(found);
      PyErr_Format(PyExc_TypeError, "%s must be a slot", name);
      return false;
    }
    offset = reinterpret_cast<PyMemberDescrObject*>(found)->d_member->offset;
    Py_DECREF(found);
    return true;
  }

  PyObject*& of(PyObject* object) const { // borrowed
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
  }
};

// The Python type of objects that own one of type `T`, made with its default constructor and destroyed with the lock.
template <typename T>
struct Wrapped {
  PyObject_HEAD
  T* object;

  static inline PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

  static T* of(PyObject* self) { // null for an object of another type
    return Py_TYPE(self) == &type ? reinterpret_cast<Wrapped*>(self)->object : nullptr;
  }

  static bool add(PyObject* module, const char* name, PyMethodDef* methods) {
    static const std::string full = std::string("opintercept._engines.compiled.") + name;
    type.tp_name = full.c_str();
    type.tp_basicsize = sizeof(Wrapped);
    type.tp_flags = Py_TPFLAGS_DEFAULT;
    type.tp_methods = methods;
    type.tp_new = [](PyTypeObject* made_of, PyObject*, PyObject*) {
      PyObject* made = made_of->tp_alloc(made_of, 0);
      if (made != nullptr) {
        reinterpret_cast<Wrapped*>(made)->object = new T;
      }
      return made;
    };
    type.tp_dealloc = [](PyObject* self) {
      delete reinterpret_cast<Wrapped*>(self)->object;
      Py_TYPE(self)->tp_free(self);
    };
    return PyType_Ready(&type) == 0 && PyModule_AddObjectRef(module, name, reinterpret_cast<PyObject*>(&type)) == 0;
  }
};

} // namespace opintercept
