// Runs a call and notes it in the rings of the pipelines that see it, for hooks that need no more than a row, statistics
// or to know that all values are finite, or the product right. What is new, such as a shape or a place, is shown to the
// hooks in Python once.
//
// Invariant: until the operator runs, a call can still be handed to Python, and nothing has changed. Without the
// interpreter's lock nothing here reads a Python object but those that the scope or this thread's frames keep alive.

#include "kernels.h"
#include "record.h"
#include "ring.h"
#include "stack.h"

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>

namespace {

using namespace opintercept;

// See `set_up_notes`.
PyObject *state, *rings_of_watch;
PyObject *number_name, *here_name, *note_name, *behind_name, *late_name, *settle_name;
Slot state_everywhere, scope_everywhere, scope_carried, scope_notes, watch_row, watch_hidden;

struct Entry {
  std::vector<Ring*> rings; // of the pipelines, in order
  std::vector<PyObject*> owned;
  std::array<int, OUTPUT> positions{}; // of the operands among the arguments, or -1
  bool opaque = false; // then each call becomes a row, to be counted
  PyObject* row = nullptr;
  PyObject* hidden_scope = nullptr; // the watch owns it, and the scope the watch
  ScopePtr hidden;
};

// What a scope knows of overloads, by number. Null until somebody has looked; `NEVER` if Python has to run hooks.
struct Notes {
  PyObject_HEAD
  size_t size;
  std::atomic<const Entry*>* entries;
};
const Entry NEVER;

void free_notes(PyObject* self) {
  auto* notes = reinterpret_cast<Notes*>(self);
  for (size_t i = 0; i < notes->size; i++) {
    const Entry* entry = notes->entries[i];
    if (entry != nullptr && entry != &NEVER) {
      for (PyObject* each : entry->owned) {
        Py_DECREF(each);
      }
      delete entry;
    }
  }
  delete[] notes->entries;
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject NotesType = {PyVarObject_HEAD_INIT(nullptr, 0) "opintercept._engines.compiled.Notes"};

const Entry* entry_of(const Overload& overload, PyObject* scope) {
  PyObject* notes = __atomic_load_n(&scope_notes.of(scope), __ATOMIC_ACQUIRE);
  if (notes == nullptr || notes == Py_None) {
    return nullptr;
  }
  auto* known = reinterpret_cast<Notes*>(notes);
  return overload.number < known->size ? known->entries[overload.number].load(std::memory_order_acquire) : nullptr;
}

template <typename Context>
void look_at_settings(std::string& key, const Context& context) { // those that `hooks.profile` tells of
  for (auto backend : {at::Float32Backend::MKLDNN, at::Float32Backend::CUDA, at::Float32Backend::GENERIC}) {
    auto op = backend == at::Float32Backend::GENERIC ? at::Float32Op::ALL : at::Float32Op::MATMUL;
    key.push_back(static_cast<char>(context.float32Precision(backend, op)));
  }
}

bool is_cast(const at::Tensor* lhs) { // `_origin.autocast.autocast_below`
  int depth = at::autocast::increment_nesting() - 1;
  at::autocast::decrement_nesting();
  if (depth == 0 || lhs == nullptr) {
    return false;
  }
  auto device = lhs->device().type();
  return !at::autocast::is_autocast_enabled(device) && at::autocast::get_autocast_dtype(device) == lhs->scalar_type();
}

// A call in one ring.
struct Part {
  Ring* ring;
  GenerationPtr known; // with which the call began
  bool noted; // whether the call becomes a row
  bool rows; // whether the call is described, for a row or a line
  Row row{};
  std::unique_ptr<Checked> checked; // what the output should be; null if the call is not checked
  bool described = false; // whether the key says all that a look depends on
  std::array<Values, ROLES> values;

  const Plan& plan() const {
    return *known->plan;
  }
};

PyObject* rows_of(const Ring* ring) { // borrowed: the watch's pipeline owns it
  return check(PyWeakref_GetObject(ring->rows));
}

PyObject* or_none(PyObject* object) {
  return object == nullptr ? Py_None : object;
}

struct HandedOver { // what the hooks get of a call that they are shown
  const Checked* before = handed_over;
  explicit HandedOver(const Checked* checked) {
    handed_over = checked;
  }
  ~HandedOver() {
    handed_over = before;
  }
};

// The number in what `learn` or `number_of` returned; 0 where no record names anything.
uint32_t number_in(PyObject* bytes) {
  uint32_t number = 0;
  if (bytes != Py_None && PyBytes_GET_SIZE(bytes) == sizeof number) {
    std::memcpy(&number, PyBytes_AS_STRING(bytes), sizeof number);
  }
  return number;
}

struct Call {
  const Overload& overload;
  const Entry& entry;
  const ScopePtr& scope;
  const c10::IValue* values; // the arguments, on the stack
  c10::SmallVector<Part, 2> parts;
  std::vector<c10::IValue> given; // the arguments again, once the stack has the outputs
  bool backward = false;
  uint64_t before = 0; // autograd's number of the next node
  double elapsed = 0;

  const at::Tensor* operand(size_t role) const {
    int position = entry.positions[role];
    if (position < 0 || !values[position].isTensor()) {
      return nullptr;
    }
    const at::Tensor& tensor = values[position].toTensor();
    return tensor.defined() ? &tensor : nullptr;
  }

  bool reads(Part& part, size_t role, const at::Tensor& tensor) {
    Values& found = part.values[role];
    const Plan& plan = part.plan();
    const Target* target = plan.has_target ? &plan.target : nullptr;
    found.known = read_sums(tensor, target, plan.hashed, found.sums, found.hash);
    return found.known;
  }

  // The number by which a record names a place.
  static uint32_t number_of(const Part& part, PyObject* place) {
    if (part.plan().writes == nullptr) {
      return 0;
    }
    THPObjectPtr number(check(PyObject_CallMethodObjArgs(rows_of(part.ring), number_name, place, nullptr)));
    return number_in(number.get());
  }

  // Where the call comes from. False if Python has to find out each time.
  bool find_place(Part& part) {
    Walked walked;
    if (!walk_here(walked)) {
      return false;
    }
    part.row.place = part.ring->place_of(*part.known, walked);
    if (part.row.place == UNKNOWN) {
      pybind11::gil_scoped_acquire gil;
      THPObjectPtr place(check(PyObject_CallMethodObjArgs(
          rows_of(part.ring),
          here_name,
          or_none(walked.module),
          or_none(walked.root),
          or_none(walked.code),
          THPObjectPtr(check(PyLong_FromLong(walked.instruction))).get(),
          nullptr)));
      if (place.get() != Py_None) {
        part.row.place = part.ring->remember_place(part.known, walked, place.get(), number_of(part, place.get()));
      }
    }
    return part.row.place != UNKNOWN;
  }

  PyObject* addresses() const { // of the positional arguments; 0 for what is not a tensor
    THPObjectPtr found(check(PyTuple_New(static_cast<Py_ssize_t>(overload.positional))));
    for (size_t i = 0; i < overload.positional; i++) {
      PyTuple_SET_ITEM(found.get(), static_cast<Py_ssize_t>(i), check(PyLong_FromVoidPtr(address(values[i]))));
    }
    return Py_NewRef(found.get());
  }

  static void* address(const c10::IValue& value) { // `_origin.links.address`
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().has_storage()) {
      return nullptr;
    }
    return value.toTensor().data_ptr();
  }

  // Of which forward call this backward call computes a gradient. False if Python has to find out.
  bool find_forward(Part& part) {
    pybind11::gil_scoped_acquire gil;
    THPObjectPtr used(addresses());
    const at::Tensor* lhs = operand(0);
    THPObjectPtr left(check(PyLong_FromVoidPtr(lhs == nullptr ? nullptr : address(*lhs))));
    THPObjectPtr found(
        check(PyObject_CallMethodObjArgs(rows_of(part.ring), behind_name, used.get(), left.get(), nullptr)));
    if (found.get() == Py_None) {
      return false;
    }
    PyObject* place = PyTuple_GET_ITEM(found.get(), 0);
    part.row.place = part.ring->remember_place(part.known, place, number_of(part, place));
    PyObject *forward = PyTuple_GET_ITEM(found.get(), 1), *grad_of = PyTuple_GET_ITEM(found.get(), 2);
    part.row.forward = forward == Py_None ? -1 : PyLong_AsLongLong(forward);
    part.row.grad_of = static_cast<int8_t>(grad_of == Py_None ? -1 : PyUnicode_READ_CHAR(grad_of, 0) == 'r');
    return part.row.place != UNKNOWN;
  }

  // Notes a forward call that autograd records, for its backward calls.
  void note(Part& part) {
    pybind11::gil_scoped_acquire gil;
    THPObjectPtr used(addresses());
    std::vector<long> wanted;
    for (size_t i = 0; i < overload.positional; i++) {
      if (values[i].isTensor() && values[i].toTensor().defined() && values[i].toTensor().requires_grad()) {
        wanted.push_back(static_cast<long>(i));
      }
    }
    THPObjectPtr positions(check(PyTuple_New(static_cast<Py_ssize_t>(wanted.size()))));
    for (size_t i = 0; i < wanted.size(); i++) {
      PyTuple_SET_ITEM(positions.get(), static_cast<Py_ssize_t>(i), check(PyLong_FromLong(wanted[i])));
    }
    THPObjectPtr index(check(PyLong_FromLongLong(part.row.index)));
    THPObjectPtr noted(check(PyObject_CallMethodObjArgs(
        rows_of(part.ring),
        note_name,
        entry.row,
        index.get(),
        used.get(),
        positions.get(),
        part.known->place(part.row.place),
        nullptr)));
  }

  // Counts a call that was checked, unless the hooks see it, which check it again.
  static void count(const Part& part) {
    if (part.checked != nullptr) {
      part.plan().checker->count(*part.checked);
    }
  }

  // Tells the pipeline of a call that has run, so that its hooks see it in Python. Returns what they learn of it.
  PyObject* show(Part& part, PyObject* output, PyObject* exception) {
    Hidden hooks(entry.hidden, entry.hidden_scope, scope);
    HandedOver checked(part.checked.get());
    THPObjectPtr args(positional_of(overload, given.data())), kwargs(keywords_of(overload, given.data()));
    THPObjectPtr index(check(PyLong_FromLongLong(part.row.index))),
        started(check(PyLong_FromLongLong(part.row.started)));
    THPObjectPtr seconds(check(PyFloat_FromDouble(elapsed)));
    THPObjectPtr phase(check(PyUnicode_FromString(backward ? "backward" : "forward")));
    return check(PyObject_CallMethodObjArgs(
        rows_of(part.ring),
        late_name,
        entry.row,
        overload.overload,
        phase.get(),
        args.get(),
        kwargs.get(),
        output,
        exception,
        index.get(),
        backward ? Py_None : part.known->place(part.row.place),
        started.get(),
        seconds.get(),
        nullptr));
  }
};

int64_t nanoseconds_since_1970() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count();
}

// As `threading.get_native_id`, which asks the system each time. The thread that a fork leaves in the child has a new one.
int64_t this_thread() {
  static std::atomic<int> forks{0};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  static thread_local int64_t number = 0;
  static thread_local int known_at = -1;
  if (int now = forks.load(std::memory_order_relaxed); known_at != now || registered != 0) {
    number = static_cast<int64_t>(PyThread_get_thread_native_id());
    known_at = now;
  }
  return number;
}

double seconds_since(std::chrono::steady_clock::time_point started) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

// What a call looks like, in the memory of a thread that no other call uses: a finaliser may multiply while Python runs.
struct Key {
  std::string text = std::move(kept);
  Key() {
    text.clear();
  }
  ~Key() {
    kept = std::move(text);
  }

 private:
  static thread_local std::string kept;
};

thread_local std::string Key::kept;

bool is_surely_finite(const at::Tensor& tensor) {
  bool finite = true;
  return !tensor.defined() || c10::isIntegralType(tensor.scalar_type(), true) || (is_finite(tensor, finite) && finite);
}

// What the outputs say. Returns whether the pipeline's hooks have to see the call.
bool look_at_outputs(
    Call& call, Part& part, std::string& key, size_t described, const c10::IValue* outputs, size_t count) {
  const Plan& plan = part.plan();
  if (part.checked != nullptr && part.checked->form->lhs >= 0 && !plan.checker->agrees(*part.checked, outputs[0])) {
    return true;
  }
  for (size_t i = 0; plan.finite && i < count; i++) {
    if (outputs[i].isList() || (outputs[i].isTensor() && !is_surely_finite(outputs[i].toTensor()))) {
      return true;
    }
  }
  for (size_t role = OUTPUT; role < ROLES && role - OUTPUT < count; role++) {
    const c10::IValue& output = outputs[role - OUTPUT];
    if (plan.reads[role] &&
        (!output.isTensor() || !output.toTensor().defined() || !call.reads(part, role, output.toTensor()))) {
      return true;
    }
  }
  if (!part.rows) {
    return false;
  }
  key.resize(described);
  for (size_t i = 0; i < count; i++) {
    if (!look_at(key, outputs[i])) {
      return true;
    }
  }
  if (plan.settings) {
    look_at_settings(key, at::globalContext());
  }
  part.described = true;
  return false;
}

// Puts the row of a call that has run into the ring, or shows the call to the hooks.
void tell(Call& call, Part& part, std::string& key, size_t described, const Stack& stack, size_t count) {
  const c10::IValue* outputs = stack.data() + stack.size() - count;
  if (!look_at_outputs(call, part, key, described, outputs, count)) {
    if (!part.rows) {
      call.count(part);
      return;
    }
    part.row.elapsed = call.elapsed;
    bool half_full = false;
    bool written = part.plan().writes == nullptr || part.ring->write(part.known, key, part.row, part.values);
    if (written && !part.noted) {
      call.count(part);
      return;
    }
    if (written && part.ring->put(part.known, key, part.row, part.values, half_full)) {
      call.count(part);
      if (half_full) {
        pybind11::gil_scoped_acquire gil;
        Hidden hooks(call.entry.hidden, call.entry.hidden_scope, call.scope);
        THPObjectPtr(check(PyObject_CallMethodObjArgs(rows_of(part.ring), settle_name, Py_True, nullptr)));
      }
      return;
    }
  }
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr output(outputs_to_python(stack, count));
  THPObjectPtr look(call.show(part, output.get(), Py_None));
  if (look.get() != Py_None && part.described) {
    part.ring->remember_look(part.known, key, look.get(), number_in(PyTuple_GET_ITEM(look.get(), 3)));
  }
}

} // namespace

bool opintercept::ran_noted(
    const Overload& overload, const c10::OperatorHandle& op, c10::DispatchKeySet below, Stack* stack,
    const ScopePtr& saved) {
  PyObject* scope = saved->ptr(getPyInterpreter());
  const Entry* entry = entry_of(overload, scope);
  if (entry == nullptr || entry == &NEVER || has_tasks.load(std::memory_order_relaxed) ||
      __atomic_load_n(&state_everywhere.of(state), __ATOMIC_ACQUIRE) != scope_everywhere.of(scope) ||
      scope_carried.of(scope) != Py_None) {
    return false;
  }
  size_t count = overload.names.size();
  Call call{overload, *entry, saved, stack->data() + stack->size() - count, {}, {}};
  bool recording = c10::GradMode::is_enabled();
  call.backward = torch::autograd::get_current_graph_task_id() != -1;
  if (call.backward && (recording || is_recompute())) {
    return false; // may be a forward call, or be recorded as one
  }
  bool links = false, on_host = false;
  for (Ring* ring : entry->rings) {
    GenerationPtr known = ring->current();
    if (known == nullptr) {
      return false;
    }
    const Plan& plan = *known->plan;
    bool noted = plan.rows || entry->opaque;
    links = links || plan.links;
    on_host = on_host || plan.on_host();
    call.parts.push_back(Part{ring, std::move(known), noted, noted || plan.writes != nullptr, {}, nullptr, false, {}});
  }
  if (links && !recording && !call.backward && !c10::AutogradState::get_tls_state().get_fw_grad_mode() &&
      !c10::InferenceMode::is_enabled()) {
    return false; // the forward of a custom Function
  }
  Key key;
  key.text.append(reinterpret_cast<const char*>(&overload.number), sizeof overload.number);
  for (size_t i = 0; i < count; i++) {
    const c10::IValue& value = call.values[i];
    if ((on_host && value.isTensor() && value.toTensor().defined() && !value.toTensor().is_cpu()) ||
        !look_at(key.text, value)) {
      return false;
    }
  }
  key.text.push_back(is_cast(call.operand(0)) ? 'c' : '-');
  size_t described = key.text.size();
  for (Part& part : call.parts) {
    part.row.backward = call.backward;
    part.row.forward = part.row.grad_of = -1;
    part.row.place = UNKNOWN;
    if (call.backward ? part.plan().links && !call.find_forward(part) : part.plan().place && !call.find_place(part)) {
      return false;
    }
    for (size_t role = 0; role < OUTPUT; role++) {
      const at::Tensor* operand = part.plan().reads[role] ? call.operand(role) : nullptr;
      if (operand != nullptr && !call.reads(part, role, *operand)) {
        return false;
      }
    }
    if (Checker* checker = part.plan().checker; checker != nullptr) {
      int64_t index = part.ring->calls.load(std::memory_order_relaxed); // or near it, with several threads
      if (!checker->expect(overload, call.values, index, part.checked)) {
        return false;
      }
    }
  }
  for (Part& part : call.parts) { // from here on there is no way back
    part.row.index = part.ring->calls.fetch_add(1, std::memory_order_relaxed);
    part.row.step = part.ring->step.load(std::memory_order_relaxed);
    if (recording && part.plan().links) {
      call.note(part);
    }
  }
  call.given.assign(call.values, call.values + count);
  int64_t began = nanoseconds_since_1970(), thread = this_thread();
  for (Part& part : call.parts) {
    part.row.started = began;
    part.row.thread = thread;
  }
  auto started = std::chrono::steady_clock::now();
  try {
    inside_noted = true;
    op.redispatchBoxed(below, stack);
    inside_noted = false;
  } catch (...) {
    inside_noted = false;
    call.elapsed = seconds_since(started);
    call.values = call.given.data();
    pybind11::gil_scoped_acquire gil;
    torch::translate_exception_to_python(std::current_exception());
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyErr_NormalizeException(&kind, &value, &trace);
    THPObjectPtr owned_kind(kind), owned_value(value), owned_trace(trace);
    for (Part& part : call.parts) {
      THPObjectPtr(call.show(part, Py_None, or_none(value)));
    }
    throw;
  }
  call.elapsed = seconds_since(started);
  call.values = call.given.data();
  for (Part& part : call.parts) {
    tell(call, part, key.text, described, *stack, op.schema().returns().size());
  }
  return true;
}

bool opintercept::remember(const Overload& overload, PyObject* scope, PyObject* watch) {
  PyObject*& notes = scope_notes.of(scope);
  if (notes == nullptr || notes == Py_None) {
    PyObject* made = check(NotesType.tp_alloc(&NotesType, 0));
    auto* fresh = reinterpret_cast<Notes*>(made);
    fresh->size = prepared;
    fresh->entries = new std::atomic<const Entry*>[prepared]();
    THPObjectPtr before(notes);
    __atomic_store_n(&notes, made, __ATOMIC_RELEASE);
  }
  auto* known = reinterpret_cast<Notes*>(notes);
  if (overload.number >= known->size || known->entries[overload.number].load(std::memory_order_relaxed) != nullptr) {
    return false;
  }
  THPObjectPtr found(check(PyObject_CallFunctionObjArgs(rings_of_watch, watch, overload.overload, nullptr)));
  const Entry* entry = &NEVER;
  if (found.get() != Py_None) {
    auto made = std::make_unique<Entry>();
    PyObject *rings = PyTuple_GET_ITEM(found.get(), 0), *positions = PyTuple_GET_ITEM(found.get(), 2);
    made->opaque = PyTuple_GET_ITEM(found.get(), 1) == Py_True;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rings); i++) {
      made->rings.push_back(ring_of(PyTuple_GET_ITEM(rings, i)));
    }
    for (size_t role = 0; role < OUTPUT; role++) {
      made->positions[role] =
          static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(positions, static_cast<Py_ssize_t>(role))));
    }
    made->row = watch_row.of(watch);
    made->hidden_scope = watch_hidden.of(watch);
    made->hidden = shared(made->hidden_scope);
    made->owned = {Py_NewRef(rings), Py_NewRef(made->row)};
    entry = made.release();
  }
  known->entries[overload.number].store(entry, std::memory_order_release);
  return entry != &NEVER;
}

// set_up_notes(state, Scope, Watch, rings_of, NOWHERE, keep_out)
PyObject* opintercept_set_up_notes(PyObject*, PyObject* args) {
  PyObject *scope, *watch;
  if (!PyArg_ParseTuple(args, "OOOOOO", &state, &scope, &watch, &rings_of_watch, &Ring::nowhere, &Checker::keep_out)) {
    return nullptr;
  }
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(state));
  if (!state_everywhere.find(type, "everywhere") || !scope_everywhere.find(scope, "everywhere") ||
      !scope_carried.find(scope, "carried") || !scope_notes.find(scope, "notes") || !watch_row.find(watch, "row") ||
      !watch_hidden.find(watch, "hidden")) {
    return nullptr;
  }
  Py_INCREF(state);
  Py_INCREF(rings_of_watch);
  Py_INCREF(Ring::nowhere);
  Py_INCREF(Checker::keep_out);
  number_name = PyUnicode_InternFromString("number_of");
  here_name = PyUnicode_InternFromString("lasting_call_site");
  note_name = PyUnicode_InternFromString("link");
  behind_name = PyUnicode_InternFromString("forward_of");
  late_name = PyUnicode_InternFromString("after_kernel");
  settle_name = PyUnicode_InternFromString("flush");
  NotesType.tp_basicsize = sizeof(Notes);
  NotesType.tp_flags = Py_TPFLAGS_DEFAULT;
  NotesType.tp_dealloc = free_notes;
  return PyType_Ready(&NotesType) < 0 ? nullptr : Py_NewRef(Py_None);
}
