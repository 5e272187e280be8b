// The kernel of `kernels._make_kernel` in C++. It makes the same decisions in the same order, and runs watched calls in
// the same loop, `_core.pipeline.run`. A call that no block watches does not become Python objects.
//
// Invariant: what outlives a call, from `prepare` and `setup`, lives for ever, so that kernels can be removed and the
// interpreter can shut down in any order. The thread's scope is restored on every way out.

#include "kernels.h"

#include "../../_native/remembered.h"
#include "../../_native/values.h"
#include "ring.h"

#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <layout.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include <cstddef>
#include <cstring>
#include <iterator>
#include <numeric>

// Defined in the files beside this one and in `_native`.
PyObject* opintercept_walk(PyObject*, PyObject*);
PyObject* opintercept_script(PyObject*, PyObject*);
PyObject* opintercept_set_up_walk(PyObject*, PyObject*);
PyObject* opintercept_look(PyObject*, PyObject* const*, Py_ssize_t);
PyObject* opintercept_set_up_signature(PyObject*, PyObject*);
PyObject* opintercept_read(PyObject*, PyObject* const*, Py_ssize_t);
PyObject* opintercept_extent(PyObject*, PyObject*);
PyObject* opintercept_storage(PyObject*, PyObject*);
PyObject* opintercept_remember(PyObject*, PyObject*);
PyObject* opintercept_project(PyObject*, PyObject* const*, Py_ssize_t);
PyObject* opintercept_sign_sums(PyObject*, PyObject* const*, Py_ssize_t);
PyObject* opintercept_set_up_values(PyObject*, PyObject*);
PyObject* opintercept_set_up_notes(PyObject*, PyObject*);
PyObject* opintercept_forget_notes(PyObject*, PyObject*);
PyObject* opintercept_set_up_links(PyObject*, PyObject*);
PyObject* opintercept_forget_links(PyObject*, PyObject*);
bool opintercept_add_ring(PyObject* module);
bool opintercept_add_records(PyObject* module);
bool opintercept_add_readings(PyObject* module);
bool opintercept_add_checks(PyObject* module);
bool opintercept_add_checker(PyObject* module);
bool opintercept_add_launches(PyObject* module);
PyObject* opintercept_set_up_launches(PyObject*, PyObject*);

thread_local PyObject* opintercept::hidden_here = nullptr;
thread_local bool opintercept::inside_noted = false;
size_t opintercept::prepared = 0;
std::atomic<bool> opintercept::has_tasks{false};

// What the other sources need of headers that take long to compile.

void opintercept::raise() {
  python_error error;
  error.persist();
  throw error;
}

void opintercept::raise_again() {
  throw pybind11::error_already_set();
}

void opintercept::set_error(const std::exception_ptr& thrown) {
  torch::translate_exception_to_python(thrown);
}

PyObject* opintercept::exception_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const pybind11::error_already_set& error) { // of a kernel in Python; it can be restored only once
    return error.value().inc_ref().ptr();
  } catch (...) {
    set_error(thrown);
  }
  PyObject *kind, *value, *trace;
  PyErr_Fetch(&kind, &value, &trace);
  PyErr_NormalizeException(&kind, &value, &trace);
  Py_XDECREF(kind);
  Py_XDECREF(trace);
  return value;
}

const at::Tensor& opintercept::unpacked(PyObject* tensor) {
  return THPVariable_Unpack(tensor);
}

PyObject* opintercept::wrapped(const at::Tensor& tensor) {
  return THPVariable_Wrap(tensor);
}

opintercept::ScopePtr opintercept::shared(PyObject* scope) {
  // A thread releases its scope when the system ends it, which may be while the interpreter shuts down: Python would then
  // end a thread that takes its lock, and with that the process.
  auto release = [](c10::SafePyObject* owner) {
    PyObject* owned = owner->release();
    delete owner;
    if (Py_IsInitialized()) {
      give_up({owned});
    }
  };
  return {new c10::SafePyObject(Py_NewRef(scope), getPyInterpreter()), release};
}

PyObject* opintercept::object_of(const ScopePtr& scope) {
  return scope->ptr(getPyInterpreter());
}

bool opintercept::in_backward() {
  return torch::autograd::get_current_graph_task_id() != -1;
}

std::pair<int64_t, std::string> opintercept::running_node() {
  auto node = torch::autograd::get_current_node();
  return {torch::autograd::get_current_graph_task_id(), node == nullptr ? std::string() : node->name()};
}

bool opintercept::is_cast(const at::Tensor* lhs) {
  int depth = at::autocast::increment_nesting() - 1;
  at::autocast::decrement_nesting();
  if (depth == 0 || lhs == nullptr) {
    return false;
  }
  auto device = lhs->device().type();
  return !at::autocast::is_autocast_enabled(device) && at::autocast::get_autocast_dtype(device) == lhs->scalar_type();
}

namespace {

using at::impl::ThreadLocalPythonObjects;
using c10::DispatchKey;
using c10::DispatchKeySet;
using namespace opintercept;

const DispatchKeySet BELOW(DispatchKeySet::FULL_AFTER, DispatchKey::BackendSelect);
const DispatchKeySet UNREAL_KEYS = std::accumulate(
    std::begin(UNREAL), std::end(UNREAL), DispatchKeySet(),
    [](DispatchKeySet keys, const char* name) { return keys.add(c10::parseDispatchKey(name)); });

// Python objects, see `setup`.
PyObject *state, *carried, *watch_of, *run, *current, *backward_phase, *has_changed, *overload_of;
PyObject *source, *forward_phase; // strings
PyObject* invoke_function;

std::atomic<bool> all_threads{false}; // whether threads that have entered nothing may be watched
std::atomic<long long> unseen{0}; // how many calls of watched operators they made
thread_local int running = 0; // kernels on the stack of this thread

Slot state_everywhere, state_idle, scope_everywhere, scope_carried, scope_tables, watch_hidden, watch_inner,
    watch_pipelines, watch_row, watch_tally;

PyObject* to_python(const c10::IValue& value, Kind kind = Kind::OTHER) {
  if (value.isNone()) {
    Py_RETURN_NONE;
  }
  if (kind != Kind::OTHER && value.isInt()) {
    auto number = value.toInt();
    return Py_NewRef(
        kind == Kind::DTYPE ? reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(number)))
            : kind == Kind::LAYOUT ? reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<at::Layout>(number)))
                                   : torch::utils::getTHPMemoryFormat(static_cast<at::MemoryFormat>(number)));
  }
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      return check(THPVariable_Wrap(tensor));
    }
  }
  return torch::jit::toPyObject(value).release().ptr();
}

Kind kind_of(const c10::Argument& argument) {
  std::string type = argument.real_type()->str();
  return type.find("ScalarType") != std::string::npos  ? Kind::DTYPE
      : type.find("Layout") != std::string::npos       ? Kind::LAYOUT
      : type.find("MemoryFormat") != std::string::npos ? Kind::MEMORY_FORMAT
                                                       : Kind::OTHER;
}

} // namespace

const Described& opintercept::Overload::in_python() const {
  if (described == nullptr) {
    THPObjectPtr found(check(PyObject_CallOneArg(overload_of, name)));
    auto made = std::make_unique<Described>();
    made->overload = Py_NewRef(PyTuple_GET_ITEM(found.get(), 0));
    made->redispatch = Py_NewRef(PyTuple_GET_ITEM(found.get(), 1));
    auto packet = std::string(PyUnicode_AsUTF8(name));
    size_t dot = packet.find('.');
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        packet.substr(0, dot).c_str(), dot == std::string::npos ? "" : packet.substr(dot + 1).c_str());
    for (const auto& argument : op.schema().arguments()) {
      made->names.push_back(PyUnicode_InternFromString(argument.name().c_str()));
      made->kinds.push_back(kind_of(argument));
      made->defaults.push_back(argument.default_value());
    }
    if (described == nullptr) { // Python may have made it while it looked
      described = made.release();
    }
  }
  return *described;
}

PyObject* opintercept::positional_of(const Overload& overload, const c10::IValue* values) {
  const Described& known = overload.in_python();
  size_t positional = overload.positional;
  while (positional > 0 && known.defaults[positional - 1].has_value() &&
         *known.defaults[positional - 1] == values[positional - 1]) {
    positional--;
  }
  THPObjectPtr args(check(PyTuple_New(static_cast<Py_ssize_t>(positional))));
  for (size_t i = 0; i < positional; i++) {
    PyTuple_SET_ITEM(args.get(), static_cast<Py_ssize_t>(i), to_python(values[i], known.kinds[i]));
  }
  return Py_NewRef(args.get());
}

PyObject* opintercept::keywords_of(const Overload& overload, const c10::IValue* values) {
  const Described& known = overload.in_python();
  THPObjectPtr kwargs(check(PyDict_New()));
  for (size_t i = overload.positional; i < overload.count; i++) {
    if (!known.defaults[i].has_value() || !(*known.defaults[i] == values[i])) {
      THPObjectPtr value(to_python(values[i], known.kinds[i]));
      if (PyDict_SetItem(kwargs.get(), known.names[i], value.get()) < 0) {
        check(nullptr);
      }
    }
  }
  return Py_NewRef(kwargs.get());
}

PyObject* opintercept::outputs_to_python(const Overload& overload, const Stack& stack, size_t count) {
  if (count == 0) {
    Py_RETURN_NONE;
  }
  if (overload.constructs && stack.back().isTensor() && stack.back().toTensor().defined()) {
    const auto* impl = stack.back().toTensor().unsafeGetTensorImpl(); // another tensor with the same memory
    return check(THPVariable_Wrap(at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false))));
  }
  if (count == 1) {
    return to_python(stack.back());
  }
  THPObjectPtr found(check(PyTuple_New(static_cast<Py_ssize_t>(count))));
  for (size_t i = 0; i < count; i++) {
    PyTuple_SET_ITEM(found.get(), static_cast<Py_ssize_t>(i), to_python(stack[stack.size() - count + i]));
  }
  return Py_NewRef(found.get());
}

namespace {

// One watched call, which `invoke` gets through its head.
struct ShownCall {
  const Overload* overload;
  const c10::OperatorHandle* op;
  DispatchKeySet below;
  Stack* stack;
  size_t count; // how many values at the end of the stack are this call's
  PyObject* args;
  std::vector<std::pair<PyObject*, PyObject*>> kwargs; // interned names, and values that this owns
  ScopePtr inner; // nullptr if hidden
  ScopePtr hidden;
  PyObject* output = nullptr; // the operator's own outputs in Python
  bool done = false; // whether the values on the stack are outputs by now, or gone

  ShownCall() = default;
  ShownCall(const ShownCall&) = delete;
  ShownCall& operator=(const ShownCall&) = delete;
  ~ShownCall() {
    for (auto& [name, value] : kwargs) {
      Py_DECREF(value);
    }
    Py_XDECREF(output);
  }
};

struct Head { // what `run` hands to `invoke`; a traceback may keep it longer than its call
  PyObject_HEAD
  ShownCall* call;
};

PyTypeObject HeadType = {PyVarObject_HEAD_INIT(nullptr, 0) "opintercept._engines.compiled.Head"};

struct Inside { // puts the scope for an operator's inner steps in place
  ShownCall* call;
  explicit Inside(ShownCall* c) : call(c) {
    if (call->inner) {
      hidden_here = nullptr;
      ThreadLocalPythonObjects::set(KEY, call->inner);
    }
  }
  ~Inside() {
    if (call->inner) {
      ThreadLocalPythonObjects::set(KEY, call->hidden);
      hidden_here = call->hidden->ptr(getPyInterpreter());
    }
  }
};

// Whether `run` passes on the very arguments that it got, so that the values on the stack are still right. A list may
// have changed.
bool same_arguments(const ShownCall& call, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (count != PyTuple_GET_SIZE(call.args)) {
    return false;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    if (args[i] != PyTuple_GET_ITEM(call.args, i) || PyList_CheckExact(args[i])) {
      return false;
    }
  }
  Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  if (named != static_cast<Py_ssize_t>(call.kwargs.size())) {
    return false;
  }
  for (Py_ssize_t i = 0; i < named; i++) {
    auto& [name, value] = call.kwargs[i];
    if (PyTuple_GET_ITEM(names, i) != name || args[count + i] != value || PyList_CheckExact(value)) {
      return false;
    }
  }
  return true;
}

// Whether no hook can have changed an output in place, so that the values on the stack are still right.
bool frozen(PyObject* output) {
  if (PyTuple_CheckExact(output)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(output); i++) {
      if (PyList_CheckExact(PyTuple_GET_ITEM(output, i))) {
        return false;
      }
    }
  }
  return !PyList_CheckExact(output);
}

// Runs an operator, and forgets what was read of the tensors that it may have written to.
void run_below(const Overload& overload, const c10::OperatorHandle& op, DispatchKeySet below, Stack* stack) {
  struct Forgets {
    c10::SmallVector<c10::weak_intrusive_ptr<c10::StorageImpl>, 4> written; // the stack may hold the last reference
    bool all = false; // if another thread has begun to read meanwhile
    ~Forgets() {
      if (all) {
        forget_values(nullptr);
      }
      for (const auto& storage : written) {
        forget_values(storage._unsafe_get_target());
      }
    }
  } forgets;
  forgets.all = !overload.writes.empty() && !remembers_any();
  if (!overload.writes.empty() && !forgets.all) {
    const c10::IValue* values = stack->data() + stack->size() - overload.count;
    for (size_t place : overload.writes) {
      each_tensor(values[place], [&](const at::Tensor& tensor) {
        if (tensor.has_storage()) {
          forgets.written.push_back(tensor.storage().getWeakStorageImpl());
        }
      });
    }
  }
  op.redispatchBoxed(below, stack);
}

// invoke(head, *args, **kwargs), which `run` calls between its hooks.
PyObject* invoke(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  ShownCall* call = reinterpret_cast<Head*>(args[0])->call;
  if (call == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the operator has returned");
    return nullptr;
  }
  try {
    if (!call->done && same_arguments(*call, args + 1, count - 1, names)) {
      call->done = true;
      {
        Inside inside(call);
        pybind11::gil_scoped_release nogil;
        run_below(*call->overload, *call->op, call->below, call->stack);
      }
      call->count = call->op->schema().returns().size();
      call->output = outputs_to_python(*call->overload, *call->stack, call->count);
      return Py_NewRef(call->output);
    }
    THPObjectPtr raw(check(PyLong_FromUnsignedLongLong(call->below.raw_repr())));
    Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    std::vector<PyObject*> all(args, args + count + named);
    all[0] = raw.get();
    Inside inside(call);
    PyObject* result =
        PyObject_Vectorcall(call->overload->in_python().redispatch, all.data(), static_cast<size_t>(count), names);
    if (!call->overload->writes.empty()) {
      forget_values(nullptr); // of what a hook has put in the place of arguments, too
    }
    return result;
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
}

// Whether a call is one of what a `FakeTensor` is made of, which is on meta without its key.
bool is_fake(const c10::OperatorHandle& op, const Stack& stack) {
  const size_t count = op.schema().arguments().size();
  return count > 0 && stack[stack.size() - count].isTensor() && stack[stack.size() - count].toTensor().is_meta();
}

struct Kernel final : c10::OperatorKernel {
  const Overload* overload;
  explicit Kernel(const Overload* o) : overload(o) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keyset, Stack* stack) {
    struct Running {
      Running() {
        running++;
      }
      ~Running() {
        running--;
      }
    } counted;
    DispatchKeySet below = keyset & BELOW;
    if (keyset.has(DispatchKey::Meta) || keyset.has_any(UNREAL_KEYS) || is_fake(op, *stack) ||
        !ran_with_hooks(*overload, op, below, stack)) {
      run_below(*overload, op, below, stack);
    }
  }

  // Runs the call with its hooks if a block watches it; false if the caller must run it.
  static bool ran_with_hooks(
      const Overload& overload, const c10::OperatorHandle& op, DispatchKeySet below, Stack* stack) {
    ScopePtr saved;
    if (inside_noted) {
      return false;
    }
    if (ThreadLocalPythonObjects::contains(KEY)) {
      saved = ThreadLocalPythonObjects::get(KEY);
      if (saved->ptr(getPyInterpreter()) == hidden_here) {
        return false;
      }
    } else if (!all_threads.load(std::memory_order_relaxed)) {
      unseen.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    bool idle = !saved;
    auto run_here = [&](Stack* on) { run_below(overload, op, below, on); };
    if (!idle && ran_noted(overload, run_here, op.schema().returns().size(), stack, saved)) {
      return true;
    }
    pybind11::gil_scoped_acquire gil;
    bool ran = ran_with_hooks(overload, op, below, stack, saved);
    saved.reset(); // while this thread has the GIL
    if (idle && !ran) {
      unseen.fetch_add(1, std::memory_order_relaxed);
    }
    return ran;
  }

  static bool ran_with_hooks(
      const Overload& overload, const c10::OperatorHandle& op, DispatchKeySet below, Stack* stack, ScopePtr& saved) {
    if (!saved) {
      saved = shared(state_idle.of(state));
    }
    PyObject* task = nullptr;
    if (PyContextVar_Get(carried, nullptr, &task) < 0) {
      check(nullptr);
    }
    Py_DECREF(task); // the context owns it, or it is None
    PyObject* known = saved->ptr(getPyInterpreter());
    if (scope_everywhere.of(known) != state_everywhere.of(state) || scope_carried.of(known) != task) {
      THPObjectPtr fresh(check(PyObject_CallNoArgs(current)));
      saved = shared(fresh.get());
    }
    PyObject* scope = saved->ptr(getPyInterpreter());
    PyObject* table = PyDict_GetItemWithError(scope_tables.of(scope), source);
    PyObject* found = table == nullptr ? nullptr : PyDict_GetItemWithError(table, overload.name);
    if (found == Py_None) {
      return false;
    }
    THPObjectPtr watch(
        found != nullptr ? Py_NewRef(found)
                         : check(PyObject_CallFunctionObjArgs(watch_of, scope, source, overload.name, nullptr)));
    if (watch.get() == Py_None) {
      return false;
    }
    if (PyObject* tally = watch_tally.of(watch.get()); tally != Py_None) {
      THPObjectPtr(check(PyObject_CallNoArgs(tally)));
      return false;
    }
    if (overload.foreign) {
      THPObjectPtr changed(check(PyObject_CallOneArg(has_changed, overload.in_python().overload)));
      if (changed.get() == Py_True) {
        return false;
      }
    }
    if (remember(overload, scope, watch.get())) {
      pybind11::gil_scoped_release nogil;
      auto run_here = [&](Stack* on) { run_below(overload, op, below, on); };
      if (ran_noted(overload, run_here, op.schema().returns().size(), stack, saved)) {
        return true;
      }
    }
    PyObject* hidden = watch_hidden.of(watch.get()); // the watch owns it, since it never assigns it again
    PyObject* inner = watch_inner.of(watch.get());

    ShownCall call;
    call.overload = &overload;
    call.op = &op;
    call.below = below;
    call.stack = stack;
    call.count = overload.count;
    const c10::IValue* values = stack->data() + stack->size() - call.count;
    THPObjectPtr args(positional_of(overload, values));
    THPObjectPtr kwargs(keywords_of(overload, values));
    Py_ssize_t at = 0;
    for (PyObject *name, *value; PyDict_Next(kwargs.get(), &at, &name, &value);) {
      call.kwargs.emplace_back(name, Py_NewRef(value));
    }
    call.args = args.get();
    call.hidden = shared(hidden);
    if (inner != hidden) {
      call.inner = shared(inner);
    }
    THPObjectPtr phase(!in_backward() ? Py_NewRef(forward_phase) : check(PyObject_CallNoArgs(backward_phase)));
    THPObjectPtr head(check(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&HeadType))));
    reinterpret_cast<Head*>(head.get())->call = &call;
    THPObjectPtr result(nullptr);
    {
      Hidden hooks(call.hidden, hidden, saved);
      struct Ended {
        Head* head;
        ~Ended() {
          head->call = nullptr;
        }
      } ended{reinterpret_cast<Head*>(head.get())};
      PyObject* arguments[] = {
          watch_pipelines.of(watch.get()),
          watch_row.of(watch.get()),
          overload.in_python().overload,
          phase.get(),
          invoke_function,
          head.get(),
          args.get(),
          kwargs.get()};
      result = PyObject_Vectorcall(run, arguments, 8, nullptr);
    }
    check(result.get());
    if (result.get() == call.output && frozen(result.get())) {
      return true;
    }
    const auto& returns = op.schema().returns();
    Stack results;
    if (returns.empty()) {
      TORCH_CHECK(result.get() == Py_None, "expected no output of ", op.operator_name());
    } else if (returns.size() == 1) {
      results.push_back(torch::jit::toIValue(result.get(), returns[0].real_type(), std::nullopt));
    } else {
      THPObjectPtr each(
          check(PySequence_Fast(result.get(), "an operator with several outputs must return a sequence")));
      TORCH_CHECK(
          PySequence_Fast_GET_SIZE(each.get()) == static_cast<Py_ssize_t>(returns.size()),
          "expected ",
          returns.size(),
          " outputs of ",
          op.operator_name());
      for (size_t i = 0; i < returns.size(); i++) {
        results.push_back(
            torch::jit::toIValue(
                PySequence_Fast_GET_ITEM(each.get(), static_cast<Py_ssize_t>(i)),
                returns[i].real_type(),
                std::nullopt));
      }
    }
    stack->erase(stack->end() - static_cast<ptrdiff_t>(call.count), stack->end());
    for (auto& value : results) {
      stack->push_back(std::move(value));
    }
    return true;
  }
};

// setup(state, carried, Scope, Watch, source, Scope.watch, run, current, backward_phase, has_changed, overload_of)
PyObject* setup(PyObject*, PyObject* args) {
  PyObject *scope, *watch;
  if (!PyArg_ParseTuple(
          args,
          "OOOOOOOOOOO",
          &state,
          &carried,
          &scope,
          &watch,
          &source,
          &watch_of,
          &run,
          &current,
          &backward_phase,
          &has_changed,
          &overload_of)) {
    return nullptr;
  }
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(state));
  if (!state_everywhere.find(type, "everywhere") || !state_idle.find(type, "idle") ||
      !scope_everywhere.find(scope, "everywhere") || !scope_carried.find(scope, "carried") ||
      !scope_tables.find(scope, "tables") || !watch_hidden.find(watch, "hidden") || !watch_inner.find(watch, "inner") ||
      !watch_pipelines.find(watch, "pipelines") || !watch_row.find(watch, "row") || !watch_tally.find(watch, "tally")) {
    return nullptr;
  }
  for (PyObject* each : {state, carried, source, watch_of, run, current, backward_phase, has_changed, overload_of}) {
    Py_INCREF(each);
  }
  Py_RETURN_NONE;
}

// prepare(name, overload name, both as one, foreign, constructs) -> capsule
PyObject* prepare(PyObject*, PyObject* args) {
  const char *name, *overload_name;
  PyObject* key;
  int foreign, constructs;
  if (!PyArg_ParseTuple(args, "ssOpp", &name, &overload_name, &key, &foreign, &constructs)) {
    return nullptr;
  }
  try {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload_name);
    auto* made = new Overload{Py_NewRef(key), foreign != 0, prepared++, constructs != 0};
    // Schemas of other libraries need not say what is written to, as those of collectives do not.
    const bool is_atens = std::strncmp(name, "aten::", 6) == 0;
    for (const auto& argument : op.schema().arguments()) {
      if (!is_atens || (argument.alias_info() != nullptr && argument.alias_info()->isWrite())) {
        made->writes.push_back(made->count);
      }
      made->count++;
      made->positional += !argument.kwarg_only();
    }
    made->kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(made));
    if (made->foreign) {
      made->in_python(); // while its schema is there
    }
    return PyCapsule_New(made, nullptr, nullptr);
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
}

// install(name, overload name, prepared) -> capsule, whose end removes the kernel
PyObject* install(PyObject*, PyObject* args) {
  const char *name, *overload_name;
  PyObject* made;
  if (!PyArg_ParseTuple(args, "ssO", &name, &overload_name, &made)) {
    return nullptr;
  }
  try {
    auto* overload = static_cast<Overload*>(PyCapsule_GetPointer(made, nullptr));
    auto* handle = new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().registerImpl(
            c10::OperatorName(name, overload_name),
            DispatchKey::BackendSelect,
            overload->kernel,
            std::nullopt,
            nullptr,
            "opintercept"));
    return PyCapsule_New(handle, nullptr, [](PyObject* capsule) {
      delete static_cast<c10::RegistrationHandleRAII*>(PyCapsule_GetPointer(capsule, nullptr));
      forget_values(nullptr); // what it writes to is not seen from now on
    });
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
}

std::atomic<long long> registered{0};

struct Listener final : c10::OpRegistrationListener { // counts operators that come and go
  void onOperatorRegistered(const c10::OperatorHandle&) override {
    registered.fetch_add(1, std::memory_order_relaxed);
  }
  void onOperatorDeregistered(const c10::OperatorHandle&) override {
    registered.fetch_add(1, std::memory_order_relaxed);
  }
};

PyObject* registrations(PyObject*, PyObject*) {
  static const auto* const kept = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
  (void)kept; // for ever: operators go while the process ends
  return PyLong_FromLongLong(registered.load(std::memory_order_relaxed));
}

// watch(whether threads that have entered nothing may be watched, whether tasks have blocks of their own)
PyObject* watch(PyObject*, PyObject* args) {
  int all, tasks;
  if (!PyArg_ParseTuple(args, "pp", &all, &tasks)) {
    return nullptr;
  }
  all_threads = all;
  has_tasks = tasks;
  Py_RETURN_NONE;
}

PyObject* unseen_calls(PyObject*, PyObject*) {
  return PyLong_FromLongLong(unseen.load(std::memory_order_relaxed));
}

// threads() -> the number by which torch knows this thread, and that of the thread that made the running node, or None.
PyObject* threads(PyObject*, PyObject*) {
  auto node = torch::autograd::get_current_node();
  auto mine = static_cast<unsigned long long>(at::RecordFunction::currentThreadId());
  return node ? Py_BuildValue("(KK)", mine, static_cast<unsigned long long>(node->thread_id()))
              : Py_BuildValue("(KO)", mine, Py_None);
}

PyObject* running_kernels(PyObject*, PyObject*) {
  return PyLong_FromLong(running);
}

PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, nullptr},
    {"prepare", prepare, METH_VARARGS, nullptr},
    {"install", install, METH_VARARGS, nullptr},
    {"watch", watch, METH_VARARGS, nullptr},
    {"unseen", unseen_calls, METH_NOARGS, nullptr},
    {"running", running_kernels, METH_NOARGS, nullptr},
    {"threads", threads, METH_NOARGS, nullptr},
    {"registrations", registrations, METH_NOARGS, nullptr},
    {"invoke", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(invoke)), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"set_up_walk", opintercept_set_up_walk, METH_VARARGS, nullptr},
    {"walk", opintercept_walk, METH_NOARGS, nullptr},
    {"script", opintercept_script, METH_NOARGS, nullptr},
    {"set_up_signature", opintercept_set_up_signature, METH_VARARGS, nullptr},
    {"signature_of", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(opintercept_look)), METH_FASTCALL, nullptr},
    {"set_up_values", opintercept_set_up_values, METH_VARARGS, nullptr},
    {"read", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(opintercept_read)), METH_FASTCALL, nullptr},
    {"extent", opintercept_extent, METH_O, nullptr},
    {"storage", opintercept_storage, METH_O, nullptr},
    {"remember", opintercept_remember, METH_VARARGS, nullptr},
    {"project", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(opintercept_project)), METH_FASTCALL, nullptr},
    {"sign_sums",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(opintercept_sign_sums)),
     METH_FASTCALL,
     nullptr},
    {"set_up_notes", opintercept_set_up_notes, METH_VARARGS, nullptr},
    {"forget_notes", opintercept_forget_notes, METH_NOARGS, nullptr},
    {"set_up_links", opintercept_set_up_links, METH_VARARGS, nullptr},
    {"forget_links", opintercept_forget_links, METH_NOARGS, nullptr},
    {"set_up_launches", opintercept_set_up_launches, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)
#define INIT_OF(name) PyInit_##name
#define INIT(name) INIT_OF(name)

PyModuleDef module = {PyModuleDef_HEAD_INIT, TEXT(TORCH_EXTENSION_NAME), nullptr, -1, methods};

} // namespace

PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  HeadType.tp_basicsize = sizeof(Head);
  HeadType.tp_flags = Py_TPFLAGS_DEFAULT;
  HeadType.tp_new = PyType_GenericNew;
  if (PyType_Ready(&HeadType) < 0) {
    return nullptr;
  }
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr) {
    return nullptr;
  }
  if (!opintercept_add_ring(made) || !opintercept_add_records(made) || !opintercept_add_readings(made) ||
      !opintercept_add_checks(made) || !opintercept_add_checker(made) || !opintercept_add_launches(made)) {
    Py_DECREF(made);
    return nullptr;
  }
  forward_phase = PyUnicode_InternFromString("forward");
  invoke_function = PyObject_GetAttrString(made, "invoke");
  return made;
}
