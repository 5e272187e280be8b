// `_origin.stack.walk` in C++: the same answer from the interpreter's own frames. None becomes a Python object, which
// takes nearly all of the time of a walk in Python.
//
// Invariant: nothing here runs Python code while it holds a frame, except the isinstance of a class that overrides it.
// It reads Python's internal headers, for the versions that were tested; with any other the walk stays in Python.

#define Py_BUILD_CORE
#include "stack.h"

#include <torch/csrc/jit/runtime/interpreter.h>

// script() -> the modules and methods of TorchScript that run on this thread, outermost first and one on each line, in
// its words: "fc1(Linear)::forward". Empty outside of it. Private, and what torch's profiler asks for modules. It
// follows pointers that freezing leaves behind: ask only while `_origin.names.running_part` has seen that none are.
PyObject* opintercept_script(PyObject*, PyObject*) {
  std::string lines;
  for (const std::string& each : torch::jit::currentModuleHierarchy()) {
    lines += each + '\n';
  }
  return PyUnicode_FromStringAndSize(lines.data(), static_cast<Py_ssize_t>(lines.size()));
}

#if PY_VERSION_HEX < 0x03100000 && !defined(Py_GIL_DISABLED)

#include <internal/pycore_code.h>
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe.h>
#else
#include <internal/pycore_frame.h>
#endif

#include <cstring>
#include <initializer_list>

namespace {

using Frame = _PyInterpreterFrame;

PyObject *outer_call, *inner_call, *engine; // code objects, the last one or None
PyObject* entries; // a tuple of those by which hooks are run
PyObject* checkpoint; // a path
PyObject *module_type, *not_source; // torch.nn.Module, and a tuple of the paths that hold no code of the user
PyObject *forward_name, *wrapper_name, *inner_name, *fn_name, *function_name; // interned

Frame* seen(Frame* frame) { // the next frame that Python would show, neither C's nor incomplete
  while (frame != nullptr && _PyFrame_IsIncomplete(frame)) {
    frame = frame->previous;
  }
  return frame;
}

Frame* top(PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030D0000
  return seen(thread->current_frame);
#else
  return seen(thread->cframe->current_frame);
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

PyObject* first_in(Frame* frame) { // its first argument, or nullptr
  if (reinterpret_cast<PyCodeObject*>(code_of(frame))->co_argcount == 0) {
    return nullptr;
  }
#if PY_VERSION_HEX >= 0x030E0000
  _PyStackRef first = frame->localsplus[0]; // a pointer with a tag
  return PyStackRef_IsNull(first) ? nullptr : PyStackRef_AsPyObjectBorrow(first);
#else
  return frame->localsplus[0];
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
  PyObject* first = PyErr_Occurred() ? nullptr : first_in(frame);
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

// As `module_of`, borrowed and without the lock: the frames of a thread and what they refer to stay while it is here.
// `sure` becomes false if only `module_of` can tell.
PyObject* module_in(Frame* frame, bool& sure) {
  PyObject* first = first_in(frame);
  if (first == nullptr) {
    return nullptr;
  }
  // Another thread may change what a cell holds. An object of another type may say that it is a module.
  bool is_module = PyType_IsSubtype(Py_TYPE(first), reinterpret_cast<PyTypeObject*>(module_type));
  bool is_plain = Py_TYPE(first)->tp_getattro == PyObject_GenericGetAttr || PyType_Check(first);
  sure = sure && !PyCell_Check(first) && (is_module || is_plain);
  return is_module ? first : nullptr;
}

// `_origin.stack._called_directly`, for a function named forward. `is_module` tells whether a frame is a module's.
template <typename IsModule>
bool is_forward_called_directly(Frame* frame, const IsModule& is_module) {
  if (!is_named(code_of(frame), forward_name)) {
    return false;
  }
  Frame* caller = back(frame);
  while (caller != nullptr && code_of(caller) != inner_call &&
         (is_named(code_of(caller), wrapper_name) || is_named(code_of(caller), inner_name))) {
    caller = back(caller);
  }
  return (caller == nullptr || code_of(caller) != inner_call) && is_module(frame);
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

// The frames that `_origin.stack.walk` looks for, from one outwards; null for those that do not exist.
struct Found {
  Frame *inner, *outer, *users;
};

template <typename IsModule>
Found find(Frame* frame, const IsModule& is_module) {
  Frame *users = frame, *inner = frame;
  while (inner != nullptr && code_of(inner) != outer_call && !is_forward_called_directly(inner, is_module)) {
    inner = back(inner);
  }
  Frame* outer = inner;
  for (frame = inner; frame != nullptr; frame = back(frame)) {
    outer = code_of(frame) == outer_call ? frame : outer;
  }
  for (frame = outer == nullptr ? nullptr : back(outer); frame != nullptr; frame = back(frame)) {
    outer = is_forward_called_directly(frame, is_module) ? frame : outer;
  }
  while (users != nullptr && !is_users(code_of(users))) {
    users = back(users);
  }
  return {inner, outer, users};
}

int instruction_of(Frame* frame) {
  return static_cast<int>(_PyInterpreterFrame_LASTI(frame) * sizeof(_Py_CODEUNIT));
}

// Whether code is that of a wrapper of Inductor, which has its hash as a name: `_origin.compiled_graphs.is_wrapper`.
bool is_wrapper(PyObject* code) {
  PyObject* file = reinterpret_cast<PyCodeObject*>(code)->co_filename;
  constexpr Py_ssize_t SHORTEST = 40, TAIL = 3; // of a hash, and of ".py"
  Py_ssize_t size = PyUnicode_GET_LENGTH(file);
  if (!PyUnicode_IS_COMPACT_ASCII(file) || size < SHORTEST + TAIL + 2) {
    return false;
  }
  const char* text = static_cast<const char*>(PyUnicode_DATA(file));
  if (std::memcmp(text + size - TAIL, ".py", TAIL) != 0) {
    return false;
  }
  Py_ssize_t at = size - TAIL;
  while (at > 0 && ((text[at - 1] >= 'a' && text[at - 1] <= 'z') || (text[at - 1] >= '2' && text[at - 1] <= '7'))) {
    at--;
  }
  return at > 0 && (text[at - 1] == '/' || text[at - 1] == '\\') && text[at] == 'c' && size - TAIL - at > SHORTEST;
}

PyObject* value_in(Frame* frame, int place) { // of a variable, perhaps a cell, or nullptr
#if PY_VERSION_HEX >= 0x030E0000
  _PyStackRef ref = frame->localsplus[place];
  return PyStackRef_IsNull(ref) ? nullptr : PyStackRef_AsPyObjectBorrow(ref);
#else
  return frame->localsplus[place];
#endif
}

// The value of a variable of a frame, the first of which is looked at; null if it has none of this name.
PyObject* variable_in(Frame* frame, PyObject* name, int first) {
  auto* code = reinterpret_cast<PyCodeObject*>(code_of(frame));
  for (int i = first; i < code->co_nlocalsplus; i++) {
    if (PyTuple_GET_ITEM(code->co_localsplusnames, i) == name) {
      PyObject* value = value_in(frame, i);
      bool is_cell = _PyLocals_GetKind(code->co_localspluskinds, i) & (CO_FAST_CELL | CO_FAST_FREE);
      return is_cell && value != nullptr && PyCell_Check(value) ? PyCell_GET(value) : value;
    }
  }
  return nullptr;
}

PyObject* free_in(Frame* frame, PyObject* name) {
  auto* code = reinterpret_cast<PyCodeObject*>(code_of(frame));
  return variable_in(frame, name, code->co_nlocalsplus - code->co_nfreevars);
}

PyObject* item_of(PyObject* variables, PyObject* name) {
  return variables != nullptr && PyDict_Check(variables) ? PyDict_GetItemWithError(variables, name) : nullptr;
}

bool is_graph(PyObject* module) { // `_origin.origin._is_graph`
  PyObject* order = Py_TYPE(module)->tp_mro;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(order); i++) {
    if (std::strcmp(reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(order, i))->tp_name, "GraphModule") == 0) {
      return true;
    }
  }
  return false;
}

// What is around a wrapper, as `_origin.origin._Stack._in_graph` finds it.
void walk_around(Frame* wrapper, opintercept::Walked& walked, bool& sure) {
  walked.generated = true;
  walked.wrapper = wrapper;
  walked.module = walked.root = nullptr;
  bool told = false;
  for (Frame* frame = back(wrapper); frame != nullptr; frame = back(frame)) {
    PyObject* code = code_of(frame);
    PyObject* module = code == outer_call ? module_in(frame, sure) : nullptr;
    if (module != nullptr && !is_graph(module)) {
      walked.root = module;
      walked.module = walked.module == nullptr ? module : walked.module;
    }
    if (walked.function == nullptr && is_named(code, fn_name)) {
      walked.function = free_in(frame, function_name);
      sure = sure && (walked.function == nullptr || PyType_SUPPORTS_WEAKREFS(Py_TYPE(walked.function)));
    }
    if (!told && is_users(code)) {
      told = true;
      if (walked.module != nullptr) {
        walked.caller = code;
        walked.caller_instruction = instruction_of(frame);
      }
    }
  }
}

bool enters_hooks(PyObject* code) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); i++) {
    if (PyTuple_GET_ITEM(entries, i) == code) {
      return true;
    }
  }
  return false;
}

} // namespace

// walk() -> (innermost module, outermost module, the user's code object, its instruction), with None and -1 for what
// does not exist
PyObject* opintercept_walk(PyObject*, PyObject*) {
  Frame* frame = top(PyThreadState_Get());
  while (frame != nullptr && !enters_hooks(code_of(frame))) {
    frame = back(frame);
  }
  Found found = find(frame, [](Frame* of) {
    PyObject* module = module_of(of);
    Py_XDECREF(module);
    return module != nullptr;
  });
  PyObject* module = found.inner == nullptr ? nullptr : module_of(found.inner);
  PyObject* root = found.outer == nullptr ? nullptr : module_of(found.outer);
  if (PyErr_Occurred()) {
    Py_XDECREF(module);
    return nullptr;
  }
  return Py_BuildValue(
      "NNOi",
      module == nullptr ? Py_NewRef(Py_None) : module,
      root == nullptr ? Py_NewRef(Py_None) : root,
      found.users == nullptr ? Py_None : code_of(found.users),
      found.users == nullptr ? -1 : instruction_of(found.users));
}

bool opintercept::walk_here(Walked& walked) {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  bool sure = true;
  Found found = find(thread == nullptr ? nullptr : top(thread), [&](Frame* of) { return module_in(of, sure); });
  walked.module = found.inner == nullptr ? nullptr : module_in(found.inner, sure);
  walked.root = found.outer == nullptr ? nullptr : module_in(found.outer, sure);
  walked.code = found.users == nullptr ? nullptr : code_of(found.users);
  walked.instruction = found.users == nullptr ? -1 : instruction_of(found.users);
  if (walked.code != nullptr && is_wrapper(walked.code)) {
    walk_around(found.users, walked, sure);
  }
  return sure;
}

PyObject* opintercept::find_module(const Walked& walked, const ModuleName& name) {
  auto* wrapper = static_cast<Frame*>(const_cast<void*>(walked.wrapper));
  for (Frame* frame = back(wrapper); frame != nullptr; frame = back(frame)) {
    PyObject* found;
    if (name.global) {
      found = item_of(frame->f_globals, name.name);
    } else if (reinterpret_cast<PyCodeObject*>(code_of(frame))->co_flags & CO_OPTIMIZED) {
      found = variable_in(frame, name.name, 0);
    } else {
      found = item_of(frame->f_locals, name.name);
    }
    if (found != nullptr && PyType_IsSubtype(Py_TYPE(found), reinterpret_cast<PyTypeObject*>(module_type))) {
      return found;
    }
  }
  return nullptr;
}

bool opintercept::find_here(Here& here) {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  Frame* frame = thread == nullptr ? nullptr : top(thread);
  if (frame == nullptr) {
    return false;
  }
  here = {frame->f_globals, code_of(frame), instruction_of(frame)};
  return true;
}

bool opintercept::is_recompute() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  Frame* frame = thread == nullptr ? nullptr : top(thread);
  for (; frame != nullptr && code_of(frame) != engine; frame = back(frame)) {
    if (code_of(frame) == outer_call) {
      return true; // perhaps: a walk in Python looks at the node, too
    }
    PyObject* file = reinterpret_cast<PyCodeObject*>(code_of(frame))->co_filename;
    if (file == checkpoint || PyUnicode_Compare(file, checkpoint) == 0) {
      return true;
    }
  }
  return false;
}

// set_up_walk(code of Module._wrapped_call_impl, of _call_impl, of what runs hooks, of autograd's engine, path of
// checkpoints, Module, paths) -> whether walk() works here
PyObject* opintercept_set_up_walk(PyObject*, PyObject* args) {
  if (!PyArg_ParseTuple(
          args,
          "OOO!OUOO!",
          &outer_call,
          &inner_call,
          &PyTuple_Type,
          &entries,
          &engine,
          &checkpoint,
          &module_type,
          &PyTuple_Type,
          &not_source)) {
    return nullptr;
  }
  for (PyObject* each : {outer_call, inner_call, entries, engine, checkpoint, module_type, not_source}) {
    Py_INCREF(each);
  }
  forward_name = PyUnicode_InternFromString("forward");
  wrapper_name = PyUnicode_InternFromString("wrapper");
  inner_name = PyUnicode_InternFromString("inner");
  fn_name = PyUnicode_InternFromString("_fn");
  function_name = PyUnicode_InternFromString("fn");
  Py_RETURN_TRUE;
}

#else

PyObject* opintercept_walk(PyObject*, PyObject*) {
  Py_RETURN_NONE;
}

PyObject* opintercept_set_up_walk(PyObject*, PyObject*) {
  Py_RETURN_FALSE;
}

bool opintercept::walk_here(Walked&) {
  return false;
}

PyObject* opintercept::find_module(const Walked&, const ModuleName&) {
  return nullptr;
}

bool opintercept::find_here(Here&) {
  return false;
}

bool opintercept::is_recompute() {
  return true; // only a walk in Python can tell
}

#endif
