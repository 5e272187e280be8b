// Runs a call and notes it in the rings of the pipelines that see it, for hooks that need no more than a row,
// statistics or to know that all values are finite, or the product right. What is new, such as a shape or a place, is
// shown to the hooks in Python once.
//
// Invariant: until the operator runs, a call can still be handed to Python, and nothing has changed. Without the
// interpreter's lock nothing here reads a Python object but those that the scope or this thread's frames keep alive.

#include "kernels.h"
#include "links.h"
#include "record.h"
#include "ring.h"
#include "stack.h"

#include "../../_native/remembered.h"

#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <list>
#include <optional>
#include <unordered_map>

namespace {

using namespace opintercept;

// See `set_up_notes`.
PyObject *state, *rings_of_watch;
PyObject *number_of_name, *lasting_call_site_name, *link_name, *links_name, *forward_of_name, *begin_call_name,
    *end_call_name, *deliver_name, *flush_name, *link_in_function_name, *begin_backward_name;
Slot state_everywhere, scope_everywhere, scope_carried, scope_notes, watch_row, watch_hidden;

struct Entry {
  std::vector<Ring*> rings; // of the pipelines, in order
  std::vector<PyObject*> owned;
  std::array<int, ROLES> positions{}; // of the operands among the arguments, or -1
  // Of other arguments with tensors: the position, and the slot of a record that they take, or -1 for the next free
  // ones.
  std::vector<std::pair<size_t, int>> others;
  std::vector<size_t> written, overwritten; // the arguments that it writes to, and those of them that it reads before
  bool opaque = false; // then each call becomes a row, to be counted
  bool unread = false; // whether it makes no values, as `_ops.families.makes_values` says
  bool in_table = true; // and not one of those that `ops="all"` adds
  bool sees_writes = false; // whether a block watches every operator
  int results = 0; // how many of its tensors are for the program, see `_ops.scratch.FOR_PROGRAM`; or `ALL_OUTPUTS`
  PyObject *row = nullptr, *name = nullptr; // the row's
  PyObject* hidden_scope = nullptr; // the watch owns it, and the scope the watch
  ScopePtr hidden;
};

// What a scope knows of overloads, by number. Null until somebody has looked; `NEVER` if Python has to run hooks.
struct Notes {
  PyObject_HEAD
  size_t size;
  std::atomic<const Entry*>* entries;
  std::unordered_map<size_t, const Entry*>* launched; // of generated kernels, with the interpreter's lock
};
const Entry NEVER;

void free_entry(const Entry* entry) {
  if (entry != nullptr && entry != &NEVER) {
    for (PyObject* each : entry->owned) {
      Py_DECREF(each);
    }
    delete entry;
  }
}

void free_notes(PyObject* self) {
  auto* notes = reinterpret_cast<Notes*>(self);
  for (size_t i = 0; i < notes->size; i++) {
    free_entry(notes->entries[i]);
  }
  for (auto [number, entry] : *notes->launched) {
    free_entry(entry);
  }
  delete[] notes->entries;
  delete notes->launched;
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject NotesType = {PyVarObject_HEAD_INIT(nullptr, 0) "opintercept._engines.compiled.Notes"};

const Entry* entry_of(const Overload& overload, PyObject* scope) {
  PyObject* notes = __atomic_load_n(&scope_notes.of(scope), __ATOMIC_ACQUIRE);
  if (notes == nullptr || notes == Py_None) {
    return nullptr;
  }
  auto* known = reinterpret_cast<Notes*>(notes);
  if (overload.generated) {
    auto found = known->launched->find(overload.number);
    return found == known->launched->end() ? nullptr : found->second;
  }
  return overload.number < known->size ? known->entries[overload.number].load(std::memory_order_acquire) : nullptr;
}

// Ends a call that hooks have seen before it ran, also where another hook raised.
struct EndsCall {
  void operator()(PyObject* call) const {
    Locked locked;
    if (PyObject_SetAttrString(call, "owner", Py_None) < 0) {
      PyErr_Clear();
    }
    Py_DECREF(call);
  }
};

// A call in one ring.
struct Part {
  Ring* ring = nullptr;
  GenerationPtr known; // with which the call began
  bool noted = false; // whether the call becomes a row
  bool rows = false; // whether the call is described, for a row or a line
  Row row{};
  std::unique_ptr<Checked> checked; // what the output should be; null if the call is not checked
  std::unique_ptr<PyObject, EndsCall> begun; // the call, if its hooks have seen it before it ran
  bool described = false; // whether the key says all that a look depends on
  bool generated = false; // whether a wrapper of Inductor makes the call
  std::array<Values, ROLES> values;
  std::list<Values> more; // of what a record has no slot for; they stay where they are
  device::Launch launch; // reads those that are on a device

  const Plan& plan() const {
    return *known->plan;
  }
  bool is_put_off() const { // whether a device is checking the product
    return checked != nullptr && checked->product != nullptr;
  }
  bool records_alone() const { // whether values are read for nothing but a record
    return plan().writes != nullptr && !plan().rows;
  }
  bool records_values() const {
    return plan().writes != nullptr && plan().written[OUTPUT];
  }
  template <typename Use>
  void each_values(const Use& use) {
    std::for_each(values.begin(), values.end(), use);
    std::for_each(more.begin(), more.end(), use);
  }
};

// As `each_tensor`, but for the numbers of the program.
template <typename Use>
void each_real(const c10::IValue& value, const Use& use) {
  each_tensor(value, [&](const at::Tensor& tensor) {
    if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      use(tensor);
    }
  });
}

bool holds(const std::vector<size_t>& places, size_t place) {
  return std::find(places.begin(), places.end(), place) != places.end();
}

PyObject* pipeline_of(const Ring* ring) { // borrowed: the watch's pipeline owns it
  return THPObjectPtr(check(PyObject_CallNoArgs(ring->pipeline))).get();
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

struct NotedCall {
  const Overload& overload;
  const Entry& entry;
  const ScopePtr& scope;
  const c10::IValue* values; // the arguments, on the stack
  c10::SmallVector<Part, 2> parts;
  std::vector<c10::IValue> given; // the arguments again, once the stack has the outputs
  bool backward = false;
  double elapsed = 0;
  std::vector<std::pair<at::Tensor, Ends>> before; // the range of what the call overwrites
  Ranges ranges{}; // of what it overwrites, while a device reads them; if they are judged later, of all that it reads
  bool later = false; // whether hooks look for values that are not finite, and are told once a device has read them
  bool infs_later = false; // whether they may be told later, too, that the host has made an Inf
  bool on_host = false; // whether it has, so that no device has to read anything
  std::pair<int64_t, std::string> node{-1, {}}; // what autograd runs, if so
  std::optional<c10::Device> timed; // where the call runs, if a device times it

  ~NotedCall() {
    for (Part& part : parts) {
      if (part.row.timing.is_open()) {
        device::drop(part.row.timing);
      }
      part.each_values([](Values& each) {
        if (each.pending.is_open()) { // seldom: this is the path of each call
          device::drop(each.pending);
        }
      });
    }
  }

  bool writes() const {
    return !entry.written.empty();
  }

  const at::Tensor* operand(size_t role) const {
    int position = entry.positions[role];
    if (position < 0 || !values[position].isTensor()) {
      return nullptr;
    }
    const at::Tensor& tensor = values[position].toTensor();
    return tensor.defined() ? &tensor : nullptr;
  }

  struct Operands {
    std::array<const at::Tensor*, ROLES> slots{};
    c10::SmallVector<const at::Tensor*, 0> more;
  };

  // The tensors that are read before the operator runs. A record has others beside the operands, as `_ops.slots` says.
  Operands operands(const Part& part) const {
    Operands found;
    if (!reads_any()) {
      return found;
    }
    for (size_t role = 0; role < ROLES; role++) {
      found.slots[role] = operand(role);
    }
    if (part.plan().writes != nullptr) {
      for (auto [position, slot] : entry.others) {
        if (slot >= 0) {
          size_t own = static_cast<size_t>(slot);
          fill(found, own, values[position]);
        }
      }
      size_t free = 0;
      for (auto [position, slot] : entry.others) {
        if (slot < 0) {
          fill(found, free, values[position]);
        }
      }
    }
    return found;
  }

  static void fill(Operands& found, size_t& free, const c10::IValue& value) {
    if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        fill(found, free, item);
      }
    } else if (value.isTensor() && value.toTensor().defined() && !is_number(value.toTensor())) {
      while (free < ROLES && (found.slots[free] != nullptr || is_output(free))) {
        free++;
      }
      if (free < ROLES) {
        found.slots[free] = &value.toTensor();
      } else {
        found.more.push_back(&value.toTensor());
      }
    }
  }

  static bool is_number(const at::Tensor& tensor) { // to Python
    return tensor.unsafeGetTensorImpl()->is_wrapped_number();
  }

  static bool is_output(size_t slot) {
    return slot >= OUTPUT && slot < AFTER_OUTPUTS;
  }

  // Whether tensors are read. Those of views have been, where they were made, and have no place in a record.
  bool reads_any() const {
    return !entry.unread;
  }

  bool reads(Part& part, size_t role, const at::Tensor& tensor) {
    return reads(part, role, tensor, part.values[role]);
  }

  // The same of tensors without a slot.
  bool reads_more(Part& part, c10::ArrayRef<const at::Tensor*> tensors, size_t role) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor* tensor) {
      return reads(part, role, *tensor, part.more.emplace_back());
    });
  }

  bool reads(Part& part, size_t role, const at::Tensor& tensor, Values& found) {
    const Plan& plan = part.plan();
    const Target* target = plan.has_target ? &plan.target : nullptr;
    if (!tensor.is_cpu() && tensor.numel() != 0) {
      const bool lasting = entry.in_table && role < OUTPUT && lasts(tensor);
      if (part.launch.is_full() && !launch(part)) {
        return false;
      }
      found.known = part.launch.takes(tensor, plan.hashed, target, found.pending, lasting);
      return found.known;
    }
    // What a generated kernel writes is not counted, nor what an operator makes.
    const bool counts_later = role >= OUTPUT && role < AFTER_OUTPUTS && writes() && !overload.generated;
    const Keep keeps = !entry.sees_writes ? Keep::NOTHING : counts_later ? Keep::WRITTEN : Keep::VALUES;
    found.known = !tensor.is_cpu() ||
        read_sums(tensor, target, plan.hashed, !part.records_alone(), keeps, found.sums, found.hash);
    return found.known;
  }

  // Begins to read the tensors on a device that are to be read. False if that cannot be: then their values are unknown.
  static bool launch(Part& part) {
    bool begun = part.launch.size() == 0 || part.launch.start();
    part.launch = {};
    return begun;
  }

  // The number by which a record names a place.
  static uint32_t number_of(const Part& part, PyObject* place) {
    if (part.plan().writes == nullptr) {
      return 0;
    }
    THPObjectPtr number(check(PyObject_CallMethodObjArgs(pipeline_of(part.ring), number_of_name, place, nullptr)));
    return number_in(number.get());
  }

  // Where the call comes from. False if hooks in Python have to be told.
  bool find_place(Part& part) {
    Walked walked;
    if (!walk_here(walked)) {
      return false;
    }
    part.generated = walked.generated;
    part.row.place = part.ring->place_of(*part.known, walked);
    if (part.row.place == UNKNOWN) {
      Locked locked;
      THPObjectPtr place(check(PyObject_CallMethodObjArgs(
          pipeline_of(part.ring),
          lasting_call_site_name,
          or_none(walked.module),
          or_none(walked.root),
          or_none(walked.code),
          THPObjectPtr(check(PyLong_FromLong(walked.instruction))).get(),
          nullptr)));
      if (place.get() != Py_None) {
        PyObject *found = PyTuple_GET_ITEM(place.get(), 0), *needs = PyTuple_GET_ITEM(place.get(), 1);
        if (needs == Py_None) {
          take_place(part, found);
        } else {
          part.row.place = part.ring->remember_place(part.known, walked, found, number_of(part, found), needs);
        }
      }
    }
    return part.row.place != UNKNOWN;
  }

  // Notes the place of a call that Python has found.
  static void take_place(Part& part, PyObject* place) {
    part.row.place = part.ring->place_of(*part.known, place);
    if (part.row.place == UNKNOWN) {
      part.row.place = part.ring->remember_place(part.known, place, number_of(part, place));
    }
  }

  c10::SmallVector<const void*, 8> addresses() const { // of the positional arguments; null for what is not a tensor
    c10::SmallVector<const void*, 8> found;
    for (size_t i = 0; i < overload.positional; i++) {
      found.push_back(address(values[i]));
    }
    return found;
  }

  static const void* address(const c10::IValue& value) { // `_origin.links.address`
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().has_storage()) {
      return nullptr;
    }
    return value.toTensor().const_data_ptr(); // and not of a copy, which writing to a lazy clone would make
  }

  // Of which forward call this backward call computes a gradient. False if Python has to find out.
  bool find_forward(Part& part) {
    Locked locked;
    const auto used = addresses();
    const at::Tensor* lhs = operand(0);
    const void* left = lhs == nullptr ? nullptr : address(*lhs);
    Forward found;
    if (!opintercept::find_forward(links_of(part).get(), used, left, found) && !ask_forward(part, used, left, found)) {
      return false;
    }
    take_place(part, found.place.get());
    part.row.forward = found.index;
    part.row.grad_of = found.grad_of;
    return part.row.place != UNKNOWN;
  }

  static bool ask_forward(const Part& part, Addresses used, const void* left, Forward& answer) {
    THPObjectPtr operands(in_python(used)), lhs(in_python(left));
    THPObjectPtr found(
        check(PyObject_CallMethodObjArgs(pipeline_of(part.ring), forward_of_name, operands.get(), lhs.get(), nullptr)));
    if (found.get() == Py_None) {
      return false;
    }
    answer.place = Py_NewRef(PyTuple_GET_ITEM(found.get(), 0));
    PyObject *forward = PyTuple_GET_ITEM(found.get(), 1), *grad_of = PyTuple_GET_ITEM(found.get(), 2);
    answer.index = forward == Py_None ? -1 : PyLong_AsLongLong(forward);
    answer.grad_of = static_cast<int8_t>(grad_of == Py_None ? -1 : PyUnicode_READ_CHAR(grad_of, 0) == 'r');
    return true;
  }

  static THPObjectPtr links_of(const Part& part) {
    return THPObjectPtr(check(PyObject_GetAttr(pipeline_of(part.ring), links_name)));
  }

  static bool needs_gradient(const c10::IValue& value) {
    if (value.isList()) {
      auto items = value.toListRef();
      return std::any_of(items.begin(), items.end(), needs_gradient);
    }
    return value.isTensor() && value.toTensor().defined() && value.toTensor().requires_grad();
  }

  // Notes a forward call that autograd records, or a custom Function that makes it, for its backward calls.
  void note(Part& part, bool in_function) {
    c10::SmallVector<size_t, 8> wanted;
    for (size_t i = 0; i < overload.positional; i++) {
      if (needs_gradient(values[i])) {
        wanted.push_back(i);
      }
    }
    if (!in_function && wanted.empty() && !entry.in_table &&
        !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Conjugate)) {
      return; // autograd has no node for it, nor for a wrapper that it is inside of
    }
    Locked locked;
    PyObject* place = part.known->place(part.row.place);
    const auto used = addresses();
    if (!in_function && link(links_of(part).get(), entry.name, part.row.index, used, wanted, place)) {
      return;
    }
    THPObjectPtr operands(in_python(used)), positions(in_python(wanted));
    THPObjectPtr index(check(PyLong_FromLongLong(part.row.index)));
    THPObjectPtr packed(is_packing() ? positional_of(overload, values) : Py_NewRef(Py_None));
    THPObjectPtr noted(check(PyObject_CallMethodObjArgs(
        pipeline_of(part.ring),
        in_function ? link_in_function_name : link_name,
        entry.row,
        index.get(),
        operands.get(),
        positions.get(),
        place,
        packed.get(),
        nullptr)));
  }

  // Writes the record of a call that has run. Leaves the values of operands, which other hooks get.
  bool write(Part& part, const std::string& key) const {
    if (part.plan().writes == nullptr) {
      return true;
    }
    if (entry.unread) {
      return part.ring->write(part.known, key, part.row, {}, {});
    }
    bool written = part.ring->write(part.known, key, part.row, part.values, part.more);
    for (size_t role = 0; role < ROLES; role++) {
      if (!is_output(role) && entry.positions[role] < 0) {
        part.values[role].known = false;
        device::drop(part.values[role].pending);
      }
    }
    return written;
  }

  // Counts a call that was checked, unless the hooks see it, which check it again.
  static void count(const Part& part) {
    if (part.checked != nullptr) {
      part.plan().checker->count(*part.checked);
    }
  }

  // Shows the hooks in Python that a call begins. Of a call that has a row, only those that look whether values are
  // finite.
  void begin(Part& part, bool has_row) const {
    THPObjectPtr args(positional_of(overload, values)), kwargs(keywords_of(overload, values)),
        read(check(PyList_New(0)));
    for (auto& [tensor, ends] : before) {
      THPObjectPtr each(Py_BuildValue("(Ndd)", wrapped(tensor), ends.low, ends.high));
      if (each.get() == nullptr || PyList_Append(read.get(), each.get()) < 0) {
        check(nullptr);
      }
    }
    THPObjectPtr index(check(PyLong_FromLongLong(part.row.index)));
    THPObjectPtr phase(check(PyUnicode_FromString(backward ? "backward" : "forward")));
    part.begun.reset(check(PyObject_CallMethodObjArgs(
        pipeline_of(part.ring),
        begin_call_name,
        entry.row,
        overload.in_python().overload,
        phase.get(),
        args.get(),
        kwargs.get(),
        index.get(),
        backward ? Py_None : part.known->place(part.row.place),
        read.get(),
        has_row ? Py_True : Py_False,
        nullptr)));
  }

  void show_before(Part& part) const {
    Hidden hooks(entry.hidden, entry.hidden_scope, scope);
    HandedOver checked(part.checked.get());
    begin(part, false);
  }

  // Shows the hooks a call that has run, and returns what they learn of it. With `judged`, those that look whether values
  // are finite are told later.
  PyObject* show(Part& part, PyObject* output, PyObject* exception, bool has_row = false, bool judged = false) const {
    Hidden hooks(entry.hidden, entry.hidden_scope, scope);
    HandedOver checked(part.checked.get());
    if (part.begun == nullptr) {
      begin(part, has_row);
    }
    THPObjectPtr started(check(PyLong_FromLongLong(part.row.started)));
    THPObjectPtr seconds(check(PyFloat_FromDouble(elapsed)));
    THPObjectPtr time(check(device::as_python(part.row.timing)));
    const auto call = std::move(part.begun);
    return check(PyObject_CallMethodObjArgs(
        pipeline_of(part.ring),
        end_call_name,
        call.get(),
        entry.row,
        output,
        exception,
        started.get(),
        seconds.get(),
        time.get(),
        has_row ? Py_True : Py_False,
        judged ? Py_True : Py_False,
        nullptr));
  }

  // The tensors among the outputs, in lists too; of an operator that returns nothing, those that it has written to.
  std::vector<at::Tensor> results(const c10::IValue* outputs, size_t count) const {
    std::vector<at::Tensor> found;
    for (size_t i = 0; i < count; i++) {
      add_tensors(found, outputs[i]);
    }
    for (size_t i = 0; count == 0 && i < entry.written.size(); i++) {
      add_tensors(found, given[entry.written[i]]);
    }
    return found;
  }

  static void add_tensors(std::vector<at::Tensor>& found, const c10::IValue& value) {
    if (value.isList()) {
      for (const c10::IValue& item : value.toListRef()) {
        add_tensors(found, item);
      }
    } else {
      found.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
    }
  }

  // Whether an argument that the operator only reads lies in memory that it writes to.
  bool reads_written() const {
    std::vector<const c10::StorageImpl*> memory;
    for (size_t place : entry.written) {
      each_real(values[place], [&](const at::Tensor& tensor) { memory.push_back(storage_of(tensor)); });
    }
    bool found = false;
    for (size_t i = 0; i < overload.count; i++) {
      if (!holds(entry.written, i)) {
        each_real(values[i], [&](const at::Tensor& tensor) {
          const auto* own = storage_of(tensor);
          found = found || (own != nullptr && std::find(memory.begin(), memory.end(), own) != memory.end());
        });
      }
    }
    return found;
  }

  // Of what has been read of tensors that the call has written to, where its operator's kernel does not know of it.
  void forget_written() const {
    if (entry.written.size() > overload.writes.size() && remembers_any()) {
      for (size_t place : entry.written) {
        each_tensor(given[place], [](const at::Tensor& tensor) { forget_values(storage_of(tensor)); });
      }
    }
  }

  // Looks for values that are not finite in what the call is about to overwrite. False if there are any, or if that
  // cannot be told: then hooks look themselves. If they are told later, begins to read all arguments instead.
  bool look_before() {
    return !writes() || entry.unread || (take_arguments(0) && ranges.start() && (later || settle_before()));
  }

  bool take_arguments(size_t more) { // and then so many others in the same launch
    size_t count = 0;
    for (size_t i = 0; i < overload.count; i++) {
      each_real(values[i], [&](const at::Tensor&) { count++; });
    }
    ranges.placed = later;
    ranges.expect(count + more);
    bool taken = true;
    for (size_t i = 0; i < overload.count; i++) {
      const bool is_read = holds(entry.overwritten, i) || (later && !holds(entry.written, i));
      each_real(values[i], [&](const at::Tensor& tensor) {
        if (is_read) {
          taken = taken && ranges.take(tensor, lasts(tensor) && !holds(entry.written, i));
        } else {
          ranges.add(tensor);
        }
      });
    }
    ranges.arguments = count;
    return taken;
  }

  // Whether a launch may take it for what it was if it seems to be. The key and the value of attention may be a cache,
  // which operators of others write without a new version.
  bool lasts(const at::Tensor& tensor) const {
    return entry.positions[VALUE] < 0 && (entry.in_table || (tensor.is_leaf() && tensor.requires_grad()));
  }

  // Keeps the ranges of what the call overwrites for hooks. Returns whether they are finite.
  bool settle_before() {
    bool finite = ranges.settle();
    each_overwritten([&](const at::Tensor& tensor, const Range& range) {
      before.emplace_back(tensor, range.ends);
      finite = finite && range.ends.are_finite();
    });
    ranges = {};
    return finite;
  }

  template <typename Use>
  void each_overwritten(const Use& use) {
    size_t number = 0;
    for (size_t i = 0; i < overload.count; i++) {
      each_real(values[i], [&](const at::Tensor& tensor) {
        Range& range = ranges.all()[number++];
        if (range.is_read && holds(entry.overwritten, i)) {
          use(tensor, range);
        }
      });
    }
  }

  // The same of the outputs, once the operator has run.
  bool look_after(const c10::IValue* outputs, size_t count) {
    if (entry.unread) {
      return true;
    }
    const Results results = results_of(outputs, count);
    if (later) {
      const bool is_judged = judges(results);
      if (is_judged && (writes() || take_arguments(results.size())) && take(ranges, results) && ranges.start()) {
        return true;
      }
      later = false;
      if (!is_judged) {
        return true;
      }
      if (writes()) {
        settle_before();
      }
    }
    ranges = {};
    Ranges now;
    if (!take(now, results) || !now.start() || !now.settle()) {
      return false;
    }
    return now.are_finite() || (infs_later && !now.have_nan() && judges(results) && put_off(results));
  }

  using Results = c10::SmallVector<std::pair<const at::Tensor*, int>, 4>; // with the argument that each is, or -1

  // What the call has made for the program, and what it has written to.
  Results results_of(const c10::IValue* outputs, size_t count) const {
    Results found;
    for (size_t i = 0; i < count && (writes() || !entry.unread); i++) {
      each_real(outputs[i], [&](const at::Tensor& tensor) {
        if (static_cast<int>(found.size()) < entry.results) {
          found.emplace_back(&tensor, -1);
        }
      });
    }
    int number = 0;
    const size_t returned = found.size();
    for (size_t i = 0; i < overload.count && writes(); i++) {
      each_real(given[i], [&](const at::Tensor& tensor) {
        auto is_same = [&](const auto& each) { return each.first->is_same(tensor); };
        if (holds(entry.written, i) && std::none_of(found.begin(), found.begin() + returned, is_same)) {
          found.emplace_back(&tensor, number);
        }
        number++;
      });
    }
    return found;
  }

  // Whether the call makes values. Its schema does not always say that it returns memory that it was given.
  bool judges(const Results& results) const {
    return writes() || !(results.empty() || is_view(*results[0].first));
  }

  // Reads what hooks are told later of a call that has run on the host. False if it cannot.
  bool put_off(const Results& results) {
    later = true; // from here on, for what is taken
    later = on_host = take_arguments(results.size()) && take(ranges, results);
    if (later) {
      auto known = before.begin();
      each_overwritten([&](const at::Tensor&, Range& range) { range.ends = (known++)->second; });
    }
    return later;
  }

  bool take(Ranges& into, const Results& results) const {
    into.expect(results.size());
    return std::all_of(results.begin(), results.end(), [&](const auto& each) {
      if (!writes() && !later && is_view(*each.first)) {
        return true;
      }
      const bool taken = into.take(*each.first);
      into.last().argument = each.second;
      return taken;
    });
  }

  // Whether an output lies in the memory of an argument, which has been read where it was made.
  bool is_view(const at::Tensor& output) const {
    const auto* memory = storage_of(output);
    return memory != nullptr && std::any_of(given.begin(), given.end(), [&](const c10::IValue& value) {
             return value.isTensor() && storage_of(value.toTensor()) == memory;
           });
  }
};

int64_t nanoseconds_since_1970() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(system_clock::now().time_since_epoch()).count();
}

// As `threading.get_native_id`, which asks the system each time. The thread that a fork leaves in the child has a new
// one.
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

// What a call looks like, in the memory of a thread that no other call uses: a finaliser may multiply while Python
// runs.
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

// The outputs for which a record has no slot.
c10::SmallVector<const at::Tensor*, 0> more_of(const std::vector<at::Tensor>& results) {
  c10::SmallVector<const at::Tensor*, 0> found;
  for (size_t i = AFTER_OUTPUTS - OUTPUT; i < results.size(); i++) {
    if (results[i].defined()) {
      found.push_back(&results[i]);
    }
  }
  return found;
}

// What the outputs say. Returns whether the pipeline's hooks have to see the call.
bool look_at_outputs(
    NotedCall& call, Part& part, std::string& key, size_t described, const c10::IValue* outputs, size_t count) {
  const Plan& plan = part.plan();
  if (part.checked != nullptr && part.checked->form->lhs >= 0 &&
      !plan.checker->agrees(*part.checked, call.values, outputs[0])) {
    return true;
  }
  if (call.reads_any()) {
    const bool strict = count > 0 && !part.records_alone(); // other hooks see what is not a tensor
    std::vector<at::Tensor> results;
    if (!strict || part.records_values()) {
      results = call.results(outputs, count);
    }
    for (size_t role = OUTPUT; role < AFTER_OUTPUTS && role - OUTPUT < (strict ? count : results.size()); role++) {
      if (!plan.reads[role] || (!strict && !results[role - OUTPUT].defined())) {
        continue;
      }
      if (strict && !outputs[role - OUTPUT].isTensor()) {
        return true;
      }
      if (strict && !outputs[role - OUTPUT].toTensor().defined()) {
        if (role == OUTPUT) {
          return true; // hooks take the first tensor of several
        }
        continue;
      }
      if (!call.reads(part, role, strict ? outputs[role - OUTPUT].toTensor() : results[role - OUTPUT])) {
        return true;
      }
    }
    if (part.records_values() && call.entry.results == ALL_OUTPUTS &&
        !call.reads_more(part, more_of(results), OUTPUT)) {
      return true;
    }
    if (!NotedCall::launch(part) && !call.writes()) { // of what was overwritten, hooks would see the wrong values
      return true;
    }
  }
  if (!part.rows) {
    return false;
  }
  key.resize(described);
  if (!call.writes()) {
    for (size_t i = 0; i < count; i++) {
      if (!look_at_output(key, outputs[i])) {
        return true;
      }
    }
  }
  part.described = true;
  return false;
}

PyObject* flush(NotedCall& call, Part& part, PyObject* only_if_free) {
  Hidden hooks(call.entry.hidden, call.entry.hidden_scope, call.scope);
  return check(PyObject_CallMethodObjArgs(pipeline_of(part.ring), flush_name, only_if_free, nullptr));
}

// Puts the row of a call that has run into the ring. Returns whether there is nothing left to note.
bool put_row(NotedCall& call, Part& part, std::string& key) {
  if (!part.rows) {
    call.count(part);
    return true;
  }
  if (!part.noted && (call.later || part.is_put_off()) && !part.ring->knows(part.known, key)) {
    return false;
  }
  part.row.elapsed = call.elapsed;
  bool half_full = false;
  bool written = call.write(part, key);
  if (written && (!part.noted || part.ring->put(part.known, key, part.row, part.values, half_full))) {
    part.row.timing = {}; // which the ring owns, if there is one
    call.count(part);
    if (half_full) {
      Locked locked;
      THPObjectPtr(flush(call, part, Py_True));
    }
    return true;
  }
  if (written) { // hooks cannot see it again: its record is written, and what it has overwritten is gone
    Locked locked;
    if (PyObject* row = part.ring->as_python(part.known, key, part.row, part.values); row != nullptr) {
      part.row.timing = {};
      THPObjectPtr owned(row);
      call.count(part);
      Hidden hooks(call.entry.hidden, call.entry.hidden_scope, call.scope);
      THPObjectPtr(check(PyObject_CallMethodObjArgs(pipeline_of(part.ring), deliver_name, row, nullptr)));
      return true;
    }
  }
  return false;
}

// Puts the row of a call that has run into the ring, or shows the call to the hooks.
void tell(
    NotedCall& call, Part& part, std::string& key, size_t described, const Stack& stack, size_t count, bool finite,
    bool is_last) {
  const c10::IValue* outputs = stack.data() + stack.size() - count;
  const bool later = call.later && part.plan().finite;
  bool noted = (finite || call.writes()) && !look_at_outputs(call, part, key, described, outputs, count) &&
      part.begun == nullptr && put_row(call, part, key);
  const bool checks = noted && part.is_put_off();
  if (checks) {
    Unjudged call_of(part.known, part.row, *part.checked);
    part.ring->put(key, call_of); // not where the hooks have just changed
  }
  std::optional<Unjudged> unjudged;
  bool judged = false;
  if (later) {
    unjudged.emplace(part.known, part.row, call.node.first, call.node.second);
    unjudged->ranges = is_last ? std::move(call.ranges) : call.ranges.shared();
    judged = noted && part.ring->put(key, *unjudged);
  }
  if (!noted || !(later ? judged : finite)) {
    Locked locked;
    if (noted && later && !call.on_host) { // hooks have to see such calls themselves
      call.ranges = unjudged->ranges.shared();
      call.settle_before();
    }
    THPObjectPtr output(outputs_to_python(call.overload, stack, count));
    THPObjectPtr look(call.show(part, output.get(), Py_None, noted, later && !noted));
    if (look.get() != Py_None && part.described) {
      part.ring->remember_look(part.known, key, look.get(), number_in(PyTuple_GET_ITEM(look.get(), 3)));
    }
    if (look.get() != Py_None && later && !noted) {
      part.ring->put(key, *unjudged, look.get());
    }
  }
  if ((checks || (later && (!call.on_host || part.ring->is_crowded()))) && part.ring->has_odd(false)) {
    Locked locked;
    THPObjectPtr(flush(call, part, Py_True));
  }
}

} // namespace

bool opintercept::ran_noted(
    const Overload& overload, c10::function_ref<void(Stack*)> run, size_t returns, Stack* stack,
    const ScopePtr& saved) {
  PyObject* scope = object_of(saved);
  const Entry* entry = entry_of(overload, scope);
  if (entry == nullptr || entry == &NEVER || has_tasks.load(std::memory_order_relaxed) ||
      __atomic_load_n(&state_everywhere.of(state), __ATOMIC_ACQUIRE) != scope_everywhere.of(scope) ||
      scope_carried.of(scope) != Py_None) {
    return false;
  }
  size_t count = overload.count;
  NotedCall call{overload, *entry, saved, stack->data() + stack->size() - count, {}, {}};
  bool recording = c10::GradMode::is_enabled();
  call.backward = in_backward();
  if (call.backward && (recording || is_recompute())) {
    return false; // may be a forward call, or be recorded as one
  }
  bool links = false, on_host = false, reads = false, settings = false, times = false, finite = false;
  bool at_once = false, infs_later = true;
  for (Ring* ring : entry->rings) {
    GenerationPtr known = ring->current();
    if (known == nullptr) {
      return false;
    }
    const Plan& plan = *known->plan;
    bool noted = plan.rows || entry->opaque;
    links = links || plan.links;
    on_host = on_host || plan.on_host();
    reads = reads || plan.reads_any();
    settings = settings || plan.settings;
    times = times || plan.times;
    finite = finite || plan.finite;
    at_once = at_once || (plan.finite && !plan.later);
    infs_later = infs_later && (plan.infs_later || !plan.finite);
    Part& part = call.parts.emplace_back(); // in place, since the room for values is large
    part.ring = ring;
    part.noted = noted;
    part.rows = noted || plan.writes != nullptr;
    part.known = std::move(known);
  }
  const bool in_function = links && !recording && !call.backward &&
      !c10::AutogradState::get_tls_state().get_fw_grad_mode() && !c10::InferenceMode::is_enabled();
  if (finite && !at_once && !entry->unread) { // not for what computes on the host alone
    bool there = false, here = false;
    for (size_t i = 0; i < count; i++) {
      each_real(call.values[i], [&](const at::Tensor& tensor) { (tensor.is_cpu() ? here : there) = true; });
    }
    call.later = there || !here;
    call.infs_later = infs_later && !call.backward; // whose node and losses may be gone
  }
  bool describes = false, fractions = entry->in_table;
  const at::Tensor* lhs = call.operand(0);
  const bool on_device = lhs != nullptr && !lhs->is_cpu();
  for (Part& part : call.parts) {
    part.rows = part.rows || (call.later && part.plan().finite) ||
        (on_device && entry->in_table && part.plan().checker != nullptr);
    describes = describes || part.rows;
    fractions = fractions || part.plan().writes != nullptr;
    if (call.writes() && part.plan().checker != nullptr && entry->in_table) {
      return false; // hooks that check a product again need its operands
    }
  }
  Key key;
  key.text.append(reinterpret_cast<const char*>(&overload.number), sizeof overload.number);
  size_t described = key.text.size();
  auto describe = [&] {
    for (size_t i = 0; i < count; i++) {
      if (!look_at(key.text, call.values[i], fractions)) {
        return false;
      }
    }
    key.text.push_back(is_cast(call.operand(0)) ? 'c' : '-');
    if (settings) {
      look_at_precision(key.text); // of which `hooks.profile` tells
    }
    described = key.text.size();
    return true;
  };
  for (size_t i = 0; i < count; i++) {
    const c10::IValue& value = call.values[i];
    if ((on_host || reads || times) && value.isTensor() && value.toTensor().defined() && !value.toTensor().is_cpu()) {
      const c10::Device device = value.toTensor().device();
      if (on_host || (reads && !device::can_read(device)) || (times && !device::can_time(device))) {
        return false;
      }
      if (times) {
        call.timed = device;
      }
      reads = times = false; // one device is enough to ask
    }
  }
  if (describes && !describe()) {
    return false;
  }
  for (Part& part : call.parts) {
    part.row.backward = call.backward;
    part.row.forward = part.row.grad_of = -1;
    part.row.place = UNKNOWN;
    part.row.timed = -1;
    if (call.backward ? part.plan().links && !call.find_forward(part) : part.plan().places && !call.find_place(part)) {
      return false;
    }
    if (in_function && part.plan().links && !part.generated) {
      return false; // a custom Function of the program, which may contain another one
    }
    const NotedCall::Operands operands = call.operands(part);
    for (size_t role = 0; role < ROLES; role++) {
      const at::Tensor* tensor = operands.slots[role];
      if (part.plan().reads[role] && tensor != nullptr && !call.reads(part, role, *tensor)) {
        return false;
      }
    }
    if (part.records_values() && !call.reads_more(part, operands.more, 0)) {
      return false;
    }
    if (Checker* checker = part.plan().checker; checker != nullptr) {
      int64_t index = part.ring->calls.load(std::memory_order_relaxed); // or near it, with several threads
      if (!checker->expect(overload, call.values, index, part.checked)) {
        return false;
      }
    }
    if (Records* writes = part.plan().writes; call.writes() && writes != nullptr && writes->is_full()) {
      return false; // Python waits for the writer
    }
  }
  if (finite && ((call.writes() && call.reads_written()) || !call.look_before())) {
    return false; // hooks read what is about to change
  }
  for (Part& part : call.parts) {
    if (call.writes() && !NotedCall::launch(part)) { // reads what is about to change
      return false;
    }
  }
  if (call.later && call.backward) {
    call.node = running_node();
    for (Part& part : call.parts) {
      if (part.plan().finite && part.ring->task.exchange(call.node.first) != call.node.first) {
        Locked locked;
        Hidden hooks(entry->hidden, entry->hidden_scope, saved);
        THPObjectPtr task(check(PyLong_FromLongLong(call.node.first)));
        THPObjectPtr(
            check(PyObject_CallMethodObjArgs(pipeline_of(part.ring), begin_backward_name, task.get(), nullptr)));
      }
    }
  }
  int64_t began = nanoseconds_since_1970(), thread = this_thread();
  for (Part& part : call.parts) { // from here on there is no way back
    part.row.index = part.ring->calls.fetch_add(1, std::memory_order_relaxed);
    part.row.step = part.ring->step.load(std::memory_order_relaxed);
    part.row.started = began;
    part.row.thread = thread;
    if ((recording || in_function) && part.plan().links) {
      call.note(part, in_function);
    }
    if (call.writes() && part.rows && !part.ring->knows(part.known, key.text)) {
      Locked locked;
      call.show_before(part);
    }
  }
  call.given.assign(call.values, call.values + count);
  for (Part& part : call.parts) {
    if (call.timed && part.plan().times && part.noted) {
      device::begin(*call.timed, part.row.timing);
    }
  }
  auto started = std::chrono::steady_clock::now();
  try {
    inside_noted = true;
    run(stack);
    inside_noted = false;
  } catch (...) {
    inside_noted = false;
    call.forget_written();
    call.elapsed = seconds_since(started);
    call.values = call.given.data();
    Locked locked;
    THPObjectPtr exception(exception_of(std::current_exception()));
    for (Part& part : call.parts) {
      THPObjectPtr(call.show(part, Py_None, or_none(exception.get())));
    }
    throw;
  }
  call.elapsed = seconds_since(started);
  call.forget_written();
  for (Part& part : call.parts) {
    if (part.row.timing.is_open()) {
      device::end(*call.timed, part.row.timing);
    }
  }
  call.values = call.given.data();
  bool known = !finite || call.look_after(stack->data() + stack->size() - returns, returns);
  if (call.on_host) {
    known = call.later = describes || describe();
    for (Part& part : call.parts) {
      part.rows = part.rows || (known && part.plan().finite);
    }
  }
  for (size_t i = 0; i < call.parts.size(); i++) {
    Part& part = call.parts[i];
    const bool is_last = i + 1 == call.parts.size();
    tell(call, part, key.text, described, *stack, returns, known || !part.plan().finite, is_last);
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
    fresh->launched = new std::unordered_map<size_t, const Entry*>;
    THPObjectPtr before(notes);
    __atomic_store_n(&notes, made, __ATOMIC_RELEASE);
  }
  auto* known = reinterpret_cast<Notes*>(notes);
  if (entry_of(overload, scope) != nullptr || (!overload.generated && overload.number >= known->size)) {
    return false;
  }
  THPObjectPtr found(
      check(PyObject_CallFunctionObjArgs(rings_of_watch, watch, overload.in_python().overload, nullptr)));
  const Entry* entry = &NEVER;
  if (found.get() != Py_None) {
    auto made = std::make_unique<Entry>();
    PyObject *rings, *positions, *others, *written, *overwritten;
    int opaque, unread, in_table, sees_writes, results;
    if (!PyArg_ParseTuple(
            found.get(),
            "O!pO!O!O!O!pppi",
            &PyTuple_Type,
            &rings,
            &opaque,
            &PyTuple_Type,
            &positions,
            &PyTuple_Type,
            &others,
            &PyTuple_Type,
            &written,
            &PyTuple_Type,
            &overwritten,
            &unread,
            &in_table,
            &sees_writes,
            &results)) {
      check(nullptr);
    }
    made->opaque = opaque;
    made->unread = unread;
    made->in_table = in_table;
    made->sees_writes = sees_writes;
    made->results = results;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rings); i++) {
      made->rings.push_back(ring_of(PyTuple_GET_ITEM(rings, i)));
    }
    for (size_t role = 0; role < ROLES; role++) {
      made->positions[role] =
          static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(positions, static_cast<Py_ssize_t>(role))));
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(others); i++) {
      PyObject* each = PyTuple_GET_ITEM(others, i);
      made->others.emplace_back(
          PyLong_AsSize_t(PyTuple_GET_ITEM(each, 0)), static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(each, 1))));
    }
    for (auto [places, numbers_of] : {std::pair(written, &made->written), std::pair(overwritten, &made->overwritten)}) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); i++) {
        numbers_of->push_back(PyLong_AsSize_t(PyTuple_GET_ITEM(places, i)));
      }
    }
    made->row = watch_row.of(watch);
    made->hidden_scope = watch_hidden.of(watch);
    made->hidden = shared(made->hidden_scope);
    made->name = check(PyObject_GetAttrString(made->row, "name"));
    made->owned = {Py_NewRef(rings), Py_NewRef(made->row), made->name};
    entry = made.release();
  }
  if (overload.generated) {
    known->launched->emplace(overload.number, entry);
  } else {
    known->entries[overload.number].store(entry, std::memory_order_release);
  }
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
  number_of_name = PyUnicode_InternFromString("number_of");
  lasting_call_site_name = PyUnicode_InternFromString("lasting_call_site");
  link_name = PyUnicode_InternFromString("link");
  links_name = PyUnicode_InternFromString("links");
  forward_of_name = PyUnicode_InternFromString("forward_of");
  begin_call_name = PyUnicode_InternFromString("begin_call");
  end_call_name = PyUnicode_InternFromString("end_call");
  deliver_name = PyUnicode_InternFromString("deliver");
  flush_name = PyUnicode_InternFromString("flush");
  link_in_function_name = PyUnicode_InternFromString("link_in_function");
  begin_backward_name = PyUnicode_InternFromString("begin_backward");
  NotesType.tp_basicsize = sizeof(Notes);
  NotesType.tp_flags = Py_TPFLAGS_DEFAULT;
  NotesType.tp_dealloc = free_notes;
  return PyType_Ready(&NotesType) < 0 ? nullptr : Py_NewRef(Py_None);
}
