// `_origin.stack.walk` in C++: the same answer from the interpreter's own frames. None becomes a Python object, which
// takes nearly all of the time of a walk in Python.
//
// Invariant: nothing here runs Python code while it holds a frame, except the isinstance of a class that overrides it.
// It reads Python's internal headers, for the versions that were tested; with any other the walk stays in Python.

#define Py_BUILD_CORE
#include <Python.h>

#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)

#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>

#include <initializer_list>

namespace {

using Frame = _PyInterpreterFrame;

PyObject *outer_call, *inner_call, *run; // code objects
PyObject *module_type, *not_source; // torch.nn.Module, and a tuple of the paths that hold no code of the user
PyObject *forward_name, *wrapper_name, *inner_name; // interned

Frame* seen(Frame* frame) { // the next frame that Python would show, neither C's nor incomplete
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

// Compared by text too: the names of unpickled code are other string objects.
bool is_named(PyObject* code, PyObject* name) {
  PyObject* its = reinterpret_cast<PyCodeObject*>(code)->co_name;
  return its == name || (!PyUnicode_CHECK_INTERNED(its) && PyUnicode_Compare(its, name) == 0);
}

// A new reference to the module whose method the frame runs. nullptr if there is none, or with an exception that this
// frame or an earlier one raised.
PyObject* module_of(Frame* frame) {
  auto* code = reinterpret_cast<PyCodeObject*>(code_of(frame));
  if (code->co_argcount == 0 || PyErr_Occurred()) {
    return nullptr;
  }
  PyObject* first = frame->localsplus[0];
  if (first != nullptr && PyCell_Check(first) && _PyLocals_GetKind(code->co_localspluskinds, 0) & CO_FAST_CELL) {
    first = PyCell_GET(first); // a function inside the method uses it too
  }
  if (first == nullptr) {
    return nullptr;
  }
  Py_INCREF(first); // an odd class may release it
  if (PyObject_IsInstance(first, module_type) == 1) {
    return first;
  }
  Py_DECREF(first);
  return nullptr;
}

// `_origin.stack._called_directly`, for a function named forward
bool is_forward_called_directly(Frame* frame) {
  if (!is_named(code_of(frame), forward_name)) {
    return false;
  }
  Frame* caller = back(frame);
  while (caller != nullptr && code_of(caller) != inner_call &&
         (is_named(code_of(caller), wrapper_name) || is_named(code_of(caller), inner_name))) {
    caller = back(caller);
  }
  if (caller != nullptr && code_of(caller) == inner_call) {
    return false;
  }
  PyObject* module = module_of(frame);
  Py_XDECREF(module);
  return module != nullptr;
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

// walk() -> (innermost module, outermost module, the user's code object, its instruction), with None and -1 for what
// does not exist
PyObject* opintercept_walk(PyObject*, PyObject*) {
  Frame* frame = top();
  while (frame != nullptr && code_of(frame) != run) {
    frame = back(frame);
  }
  Frame *users = frame, *inner = frame;
  while (inner != nullptr && code_of(inner) != outer_call && !is_forward_called_directly(inner)) {
    inner = back(inner);
  }
  Frame* outer = inner;
  for (frame = inner; frame != nullptr; frame = back(frame)) {
    outer = code_of(frame) == outer_call ? frame : outer;
  }
  for (frame = outer == nullptr ? nullptr : back(outer); frame != nullptr; frame = back(frame)) {
    outer = is_forward_called_directly(frame) ? frame : outer;
  }
  PyObject* module = inner == nullptr ? nullptr : module_of(inner);
  PyObject* root = outer == nullptr ? nullptr : module_of(outer);
  if (PyErr_Occurred()) {
    Py_XDECREF(module);
    return nullptr;
  }
  while (users != nullptr && !is_users(code_of(users))) {
    users = back(users);
  }
  return Py_BuildValue(
      "NNOi",
      module == nullptr ? Py_NewRef(Py_None) : module,
      root == nullptr ? Py_NewRef(Py_None) : root,
      users == nullptr ? Py_None : code_of(users),
      users == nullptr ? -1 : static_cast<int>(_PyInterpreterFrame_LASTI(users) * sizeof(_Py_CODEUNIT)));
}

// set_up_walk(code of Module._wrapped_call_impl, of _call_impl, of run, Module, paths) -> whether walk() works here
PyObject* opintercept_set_up_walk(PyObject*, PyObject* args) {
  if (!PyArg_ParseTuple(args, "OOOOO!", &outer_call, &inner_call, &run, &module_type, &PyTuple_Type, &not_source)) {
    return nullptr;
  }
  for (PyObject* each : {outer_call, inner_call, run, module_type, not_source}) {
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
