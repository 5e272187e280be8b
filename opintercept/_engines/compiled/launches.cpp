// `Launcher`, which stands for a generated kernel among the globals of a wrapper of Inductor: it notes a launch as
// `noted.cpp` notes the call of an operator, and leaves what cannot be noted to Python.
//
// Invariant: the kernel gets the very objects that the wrapper passes, and runs once, whoever tells the hooks. What a
// ring may refer to lives for ever, as in `kernels.cpp`.

#include "kernels.h"
#include "stack.h"

#include "../../_native/remembered.h"
#include "../../_native/threads.h"
#include "../../_native/values.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace {

using namespace opintercept;
using at::impl::ThreadLocalPythonObjects;

PyObject *state, *watch_of, *level, *tensor_type, *parameter_type; // see `set_up_launches`
PyObject *schema_name, *arguments_name, *name_name;
Slot state_everywhere, scope_everywhere, scope_carried, scope_tables;

struct Launch { // one line of a wrapper
  PyObject* code;
  int instruction;
  const Overload* overload; // null if the wrapper's text does not tell it
};

struct Launcher {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *in_python, *kernel, *globals, *find; // see `make`
  PyObject* references; // weak ones
  std::vector<Launch>* launches;
};

PyObject* attribute(PyObject* object, PyObject* name) {
  return check(PyObject_GetAttr(object, name));
}

// A `GeneratedKernel` as an overload without defaults.
const Overload* overload_of(PyObject* kernel) {
  THPObjectPtr name(attribute(kernel, name_name)), schema(attribute(kernel, schema_name));
  THPObjectPtr arguments(attribute(schema.get(), arguments_name));
  auto known = std::make_unique<Described>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments.get()); i++) {
    known->names.push_back(PyTuple_GET_ITEM(PyTuple_GET_ITEM(arguments.get(), i), 0)); // the kernel owns it
    known->kinds.push_back(Kind::OTHER);
    known->defaults.emplace_back();
  }
  known->overload = Py_NewRef(kernel);
  known->redispatch = Py_None;
  auto* made = new Overload{name.release(), false, prepared++, false};
  made->generated = true;
  made->count = made->positional = known->names.size();
  made->described = known.release();
  return made;
}

// What the running line of the wrapper launches.
const Overload* overload_here(Launcher& launcher) {
  Here here;
  if (!find_here(here) || here.globals != launcher.globals) {
    return nullptr;
  }
  for (const Launch& each : *launcher.launches) {
    if (each.code == here.code && each.instruction == here.instruction) {
      return each.overload;
    }
  }
  THPObjectPtr found(check(PyObject_CallFunction(launcher.find, "Oi", here.code, here.instruction)));
  const Overload* overload = found.get() == Py_None ? nullptr : overload_of(found.get());
  launcher.launches->push_back({Py_NewRef(here.code), here.instruction, overload});
  return overload;
}

bool put(Stack& stack, PyObject* value) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  if (type == tensor_type || type == parameter_type) {
    stack.emplace_back(unpacked(value));
  } else if (PyBool_Check(value)) {
    stack.emplace_back(value == Py_True);
  } else if (PyLong_CheckExact(value)) {
    int overflow;
    stack.emplace_back(static_cast<int64_t>(PyLong_AsLongLongAndOverflow(value, &overflow)));
    return overflow == 0;
  } else if (PyFloat_CheckExact(value)) {
    stack.emplace_back(PyFloat_AS_DOUBLE(value));
  } else {
    return false;
  }
  return true;
}

// Runs the kernel, and notes it if a block watches it. Null without an exception if Python has to.
PyObject* launch(Launcher& launcher, PyObject* const* args, size_t given, PyObject* names) {
  size_t count = static_cast<size_t>(PyVectorcall_NARGS(given));
  auto run = [&] {
    PyObject* result = PyObject_Vectorcall(launcher.kernel, args, given, names);
    forget_values(nullptr); // of what it has written to
    return check(result);
  };
  if (inside_noted) {
    return run();
  }
  if (!ThreadLocalPythonObjects::contains(KEY)) {
    return nullptr;
  }
  ScopePtr saved = ThreadLocalPythonObjects::get(KEY);
  PyObject* scope = object_of(saved);
  if (scope == hidden_here) {
    return run();
  }
  if (has_tasks.load(std::memory_order_relaxed) || scope_everywhere.of(scope) != state_everywhere.of(state) ||
      scope_carried.of(scope) != Py_None) {
    return nullptr;
  }
  const Overload* overload = overload_here(launcher);
  if (overload == nullptr || overload->count != count) {
    return nullptr;
  }
  PyObject* kernel = overload->in_python().overload;
  PyObject* table = PyDict_GetItemWithError(scope_tables.of(scope), level);
  PyObject* known = table == nullptr ? nullptr : PyDict_GetItemWithError(table, kernel);
  THPObjectPtr watch(
      known != nullptr ? Py_NewRef(known)
                       : check(PyObject_CallFunctionObjArgs(watch_of, scope, level, kernel, nullptr)));
  if (watch.get() == Py_None) {
    return run();
  }
  remember(*overload, scope, watch.get());
  Stack stack;
  stack.reserve(count);
  bool on_host = true;
  for (size_t i = 0; i < count; i++) {
    if (!put(stack, args[i])) {
      return nullptr;
    }
    on_host = on_host && (!stack.back().isTensor() || stack.back().toTensor().is_cpu());
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd; // for what hooks compute
  c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  THPObjectPtr result(nullptr);
  auto run_here = [&](Stack* on) {
    on->clear();
    Locked locked;
    result = PyObject_Vectorcall(launcher.kernel, args, given, names);
    if (result.get() == nullptr) {
      raise_again();
    }
  };
  bool noted;
  {
    Unlocked unlocked(!on_host);
    noted = ran_noted(*overload, run_here, 0, &stack, saved);
    stack.clear();
  }
  return noted ? result.release() : nullptr;
}

PyObject* call(PyObject* self, PyObject* const* args, size_t given, PyObject* names) {
  auto& launcher = *reinterpret_cast<Launcher*>(self);
  try {
    if (PyObject* result = launch(launcher, args, given, names); result != nullptr) {
      return result;
    }
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
  PyObject* result = PyObject_Vectorcall(launcher.in_python, args, given, names);
  forget_values(nullptr); // as above
  return result;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  auto* launcher = reinterpret_cast<Launcher*>(self);
  for (PyObject* each : {launcher->in_python, launcher->kernel, launcher->globals, launcher->find}) {
    Py_VISIT(each);
  }
  return 0;
}

int clear(PyObject* self) {
  auto* launcher = reinterpret_cast<Launcher*>(self);
  Py_CLEAR(launcher->in_python);
  Py_CLEAR(launcher->kernel);
  Py_CLEAR(launcher->globals);
  Py_CLEAR(launcher->find);
  return 0;
}

void free_launcher(PyObject* self) {
  auto* launcher = reinterpret_cast<Launcher*>(self);
  PyObject_GC_UnTrack(self);
  if (launcher->references != nullptr) {
    PyObject_ClearWeakRefs(self);
  }
  clear(self);
  for (const Launch& each : *launcher->launches) {
    Py_DECREF(each.code);
  }
  delete launcher->launches;
  Py_TYPE(self)->tp_free(self);
}

// Launcher(what runs a launch with its hooks in Python, the kernel, the wrapper's globals, what finds the
// `GeneratedKernel` of a code object and an instruction)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *in_python, *kernel, *globals, *find;
  if (!PyArg_ParseTuple(args, "OOO!O", &in_python, &kernel, &PyDict_Type, &globals, &find)) {
    return nullptr;
  }
  PyObject* made = type->tp_alloc(type, 0);
  if (made != nullptr) {
    auto* launcher = reinterpret_cast<Launcher*>(made);
    launcher->call = call;
    launcher->in_python = Py_NewRef(in_python);
    launcher->kernel = Py_NewRef(kernel);
    launcher->globals = Py_NewRef(globals);
    launcher->find = Py_NewRef(find);
    launcher->launches = new std::vector<Launch>;
  }
  return made;
}

PyTypeObject LauncherType = {PyVarObject_HEAD_INIT(nullptr, 0) "opintercept._engines.compiled.Launcher"};

} // namespace

bool opintercept_add_launches(PyObject* module) {
  LauncherType.tp_basicsize = sizeof(Launcher);
  LauncherType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  LauncherType.tp_vectorcall_offset = offsetof(Launcher, call);
  LauncherType.tp_weaklistoffset = offsetof(Launcher, references);
  LauncherType.tp_call = PyVectorcall_Call;
  LauncherType.tp_new = make;
  LauncherType.tp_dealloc = free_launcher;
  LauncherType.tp_traverse = traverse;
  LauncherType.tp_clear = clear;
  return PyType_Ready(&LauncherType) == 0 &&
      PyModule_AddObjectRef(module, "Launcher", reinterpret_cast<PyObject*>(&LauncherType)) == 0;
}

// set_up_launches(state, Scope, Scope.watch, level, torch.Tensor, torch.nn.Parameter)
PyObject* opintercept_set_up_launches(PyObject*, PyObject* args) {
  PyObject* scope;
  if (!PyArg_ParseTuple(args, "OOOOOO", &state, &scope, &watch_of, &level, &tensor_type, &parameter_type)) {
    return nullptr;
  }
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(state));
  if (!state_everywhere.find(type, "everywhere") || !scope_everywhere.find(scope, "everywhere") ||
      !scope_carried.find(scope, "carried") || !scope_tables.find(scope, "tables")) {
    return nullptr;
  }
  for (PyObject* each : {state, watch_of, level, tensor_type, parameter_type}) {
    Py_INCREF(each);
  }
  schema_name = PyUnicode_InternFromString("_schema");
  arguments_name = PyUnicode_InternFromString("arguments");
  name_name = PyUnicode_InternFromString("_name");
  Py_RETURN_NONE;
}
