// `_origin.walk` in C++: the same answer from the interpreter's own frames, of which none becomes a Python object,
// which is what takes nearly all of the time of a walk in Python.
//
// Invariant: nothing here runs Python code while it holds a frame, but for the isinstance of a class that wants it so.
// Python's internal headers, of the versions whose layout was tried; with another one the walk stays in Python.

#define Py_BUILD_CORE
#include <Python.h>

#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)

#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>

#include <initializer_list>

namespace {

using Frame = _PyInterpreterFrame;

PyObject *outer_call, *inner_call, *run, *run_several; // code objects
PyObject *module_type, *not_source; // torch.nn.Module, and a tuple of the paths in which nothing is the user's
PyObject *forward_name, *wrapper_name, *inner_name; // interned, as are the names of code objects

Frame* seen(Frame* frame) { // what Python shows: no frame of C's, and none that is still being made
  while (frame != nullptr && _PyFrame_IsIncomplete(frame)) {
    frame = frame->previous;
  }
  return frame;
}

Frame* top() {
#if PY_VERSION_HEX >= 0x030D0000
  return seen(PyThreadState_Get()->current_frame);
#else
  return seen(PyThreadState_Get()->cframe->current_frame);
#endif
}

Frame* back(Frame* frame) {
  return seen(frame->previous);
}

PyObject* code_of(Frame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<PyObject*>(_PyFrame_GetCode(frame));
#else
  return reinterpret_cast<PyObject*>(frame->f_code);
#endif
}

PyObject* name_of(PyObject* code) {
  return reinterpret_cast<PyCodeObject*>(code)->co_name;
}

// The module whose method the frame runs, borrowed; nullptr if none, or with an exception.
PyObject* module_of(Frame* frame) {
  if (reinterpret_cast<PyCodeObject*>(code_of(frame))->co_argcount == 0) {
    return nullptr;
  }
  PyObject* first = frame->localsplus[0];
  if (first != nullptr && PyCell_Check(first)) { // a function inside of the method uses it too
    first = PyCell_GET(first);
  }
  if (first == nullptr) {
    return nullptr;
  }
  return PyObject_IsInstance(first, module_type) == 1 ? first : nullptr;
}

// `_origin._called_directly`
bool called_directly(Frame* frame) {
  Frame* caller = back(frame);
  while (caller != nullptr && code_of(caller) != inner_call &&
         (name_of(code_of(caller)) == wrapper_name || name_of(code_of(caller)) == inner_name)) {
    caller = back(caller);
  }
  return (caller == nullptr || code_of(caller) != inner_call) && module_of(frame) != nullptr;
}

bool is_forward_called_directly(Frame* frame) {
  return name_of(code_of(frame)) == forward_name && called_directly(frame);
}

bool is_users(PyObject* code) {
  PyObject* file = reinterpret_cast<PyCodeObject*>(code)->co_filename;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(not_source); i++) {
    if (PyUnicode_Tailmatch(file, PyTuple_GET_ITEM(not_source, i), 0, PY_SSIZE_T_MAX, -1) == 1) {
      return false;
    }
  }
  return true;
}

} // namespace

// walk() -> (innermost module, outermost module, code object of the user's, its instruction), None and -1 for what is
// not there
PyObject* opintercept_walk(PyObject*, PyObject*) {
  Frame* frame = top();
  while (frame != nullptr && code_of(frame) != run && code_of(frame) != run_several) {
    frame = back(frame);
  }
  Frame *inner = nullptr, *outer = nullptr, *users = nullptr;
  for (; frame != nullptr; frame = back(frame)) {
    if (users == nullptr && is_users(code_of(frame))) {
      users = frame;
    }
    if (code_of(frame) == outer_call || (name_of(code_of(frame)) == forward_name && called_directly(frame))) {
      inner = inner == nullptr ? frame : inner;
      outer = frame;
    }
  }
  PyObject* module = inner == nullptr ? nullptr : module_of(inner);
  PyObject* root = outer == nullptr ? nullptr : module_of(outer);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  auto or_none = [](PyObject* found) { return found == nullptr ? Py_None : found; };
  return Py_BuildValue(
      "OOOi",
      or_none(module),
      or_none(root),
      or_none(users == nullptr ? nullptr : code_of(users)),
      users == nullptr ? -1 : static_cast<int>(_PyInterpreterFrame_LASTI(users) * sizeof(_Py_CODEUNIT)));
}

// set_up_walk(code of Module._wrapped_call_impl, of _call_impl, of run, of _run_several, Module, paths) -> whether there
// is a walk
PyObject* opintercept_set_up_walk(PyObject*, PyObject* args) {
  if (!PyArg_ParseTuple(
          args, "OOOOOO!", &outer_call, &inner_call, &run, &run_several, &module_type, &PyTuple_Type, &not_source)) {
    return nullptr;
  }
  for (PyObject* each : {outer_call, inner_call, run, run_several, module_type, not_source}) {
    Py_INCREF(each);
  }
  forward_name = PyUnicode_InternFromString("forward");
  wrapper_name = PyUnicode_InternFromString("wrapper");
  inner_name = PyUnicode_InternFromString("inner");
  Py_RETURN_TRUE;
}

#else

PyObject* opintercept_walk(PyObject*, PyObject*) {
  Py_RETURN_NONE;
}

PyObject* opintercept_set_up_walk(PyObject*, PyObject*) {
  Py_RETURN_FALSE;
}

#endif
