// The records of `runs/store/records.py` for calls that do not become Python objects.
//
// Invariant: the record of a call that is being written does not check, and those of its tensors are bound to its lap.
// In a mapped file, the record of a tensor that a device has not read does not check, either.

#include "records.h"

#include "../../_native/objects.h"
#include "../../_native/splitmix.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace opintercept {

namespace {

// `runs.store.records.checks_of`
template <typename Record>
uint64_t check_of(const Record& record, uint64_t lap) {
  constexpr size_t words = sizeof(Record) / sizeof(uint64_t);
  static const std::array<uint64_t, words> weights = [] {
    std::array<uint64_t, words> made;
    for (size_t i = 0; i < words; i++) {
      made[i] = splitmix64(i + 1) | 1;
    }
    return made;
  }();
  std::array<uint64_t, words> read;
  std::memcpy(read.data(), &record, sizeof record);
  uint64_t sum = (lap + 1) * weights[0];
  for (size_t i = 1; i < words; i++) {
    sum += read[i] * weights[i];
  }
  return sum;
}

// `_values.content._values_of`, as a record has it. False if there is no room for the values.
bool describe(StoredTensor& record, const Values& values) {
  const Sums& sums = values.sums;
  int64_t inf = sums.count - sums.finite - sums.nan;
  if ((sums.nan | inf) >> 32 != 0) {
    return false;
  }
  record.hash = sums.count ? values.hash + splitmix64(static_cast<uint64_t>(sums.count)) : 0;
  record.nan = static_cast<uint32_t>(sums.nan);
  record.inf = static_cast<uint32_t>(inf);
  record.min = record.max = record.mean = record.rms = std::nan("");
  if (sums.finite != 0) {
    auto finite = static_cast<double>(sums.finite);
    double mean = sums.total / finite, rms = std::sqrt(sums.spread / finite + mean * mean);
    record.min = sums.low;
    record.max = sums.high;
    record.mean = std::isfinite(mean) ? mean : record.mean;
    record.rms = std::isfinite(rms) ? rms : record.rms;
  }
  return true;
}

template <typename Record>
PyObject* bytes_of(const std::vector<Record>& records) {
  auto size = static_cast<Py_ssize_t>(records.size() * sizeof(Record));
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(records.data()), size);
}

} // namespace

void Values::settle() {
  if (pending.is_open()) {
    known = device::wait_for(pending, sums, hash);
  }
}

bool Records::Unfinished::has_arrived() const {
  return std::all_of(late.begin(), late.end(), [](const Late& each) { return device::has_arrived(each.pending); });
}

void Records::Unfinished::finish() {
  for (Late& each : late) {
    Values values;
    values.pending = each.pending;
    values.settle();
    uint32_t& number = written.number_of(each.role);
    if (!values.known || !describe(written.tensors[number - 1], values)) {
      number = 0;
    }
  }
}

bool Records::put(
    const Row& row, const std::array<Values, ROLES>& values, const std::array<bool, ROLES>& wanted,
    const std::list<Values>& more, uint32_t signature, uint32_t site) {
  Written written{};
  StoredCall& call = written.call;
  call.index = row.index;
  call.step = row.step;
  call.forward = row.forward;
  call.started = row.started;
  call.thread = row.thread;
  call.elapsed = row.elapsed;
  call.signature = signature;
  call.site = site;
  call.phase = row.backward ? BACKWARD : FORWARD;
  call.grad_of = static_cast<uint8_t>(row.grad_of + 1);
  c10::SmallVector<Late, ROLES> late;
  written.more.resize(more.size());
  auto add = [&](size_t role, const Values& found) {
    if (!found.known) {
      return true;
    }
    StoredTensor& tensor = written.tensors.emplace_back();
    written.number_of(role) = static_cast<uint32_t>(written.tensors.size());
    if (found.pending.is_open()) {
      late.push_back({role, found.pending});
      return true;
    }
    return describe(tensor, found);
  };
  size_t role = 0;
  for (const Values& found : values) {
    if (wanted[role] && !add(role, found)) {
      return false;
    }
    role++;
  }
  for (const Values& found : more) {
    if (!add(role++, found)) {
      return false;
    }
  }
  if (is_full()) {
    return false;
  }
  for (const Late& each : late) {
    device::share(each.pending);
  }
  put(std::move(written), late);
  return true;
}

bool Records::is_full() {
  std::lock_guard lock(mutex);
  return is_open && to_calls == nullptr && calls.size() + unfinished.size() >= slots;
}

void Records::put(StoredCall call, std::vector<StoredTensor>& found) {
  put({call, {found.begin(), found.begin() + static_cast<ptrdiff_t>(std::min(found.size(), ROLES))}, {}}, {});
}

void Records::put(Written written, c10::ArrayRef<Late> late) {
  {
    std::lock_guard lock(mutex);
    const bool is_mapped = to_calls != nullptr, is_whole = late.empty() && (is_mapped || unfinished.empty());
    if (is_mapped || is_whole) {
      write(written, late); // also what a device may never read: that call is looked for
    }
    if (is_whole) {
      return;
    }
    unfinished.push_back({std::move(written), {late.begin(), late.end()}, next - 1}); // in the order of the calls
  }
  write_finished(false);
}

void Records::write_finished(bool waits) {
  std::unique_lock alone(writing, std::defer_lock);
  if (!waits) {
    if (!alone.try_lock()) {
      return;
    }
  } else {
    alone.lock();
  }
  while (true) {
    Unfinished* oldest;
    {
      std::lock_guard lock(mutex);
      if (unfinished.empty() || !(waits || unfinished.front().has_arrived())) {
        return;
      }
      oldest = &unfinished.front(); // stays where it is while others are added
    }
    oldest->finish();
    std::lock_guard lock(mutex);
    if (to_calls == nullptr) {
      write(oldest->written);
    } else {
      write_late(*oldest);
    }
    unfinished.pop_front();
  }
}

void Records::write(Written& written, c10::ArrayRef<Late> late) {
  if (!is_open) {
    return; // outside of the block
  }
  auto& [call, found, numbers] = written;
  if (to_calls == nullptr) {
    const auto before = static_cast<uint32_t>(tensors.size());
    for (uint32_t& row : call.rows) {
      row += row == 0 ? 0 : before;
    }
    for (uint32_t row : numbers) {
      more.push_back({static_cast<uint32_t>(calls.size()), row == 0 ? 0 : row + before});
    }
    tensors.insert(tensors.end(), found.begin(), found.end());
    calls.push_back(call);
    return;
  }
  uint64_t slot = next % slots, lap = next / slots + 1;
  next++;
  call.lap = static_cast<uint32_t>(lap);
  // A process that reads the file meanwhile, or after a kill, drops what does not check, in whatever order it sees
  // this.
  to_calls[slot].check = 0;
  for (size_t i = 0; i < found.size() && i < rows_of_call; i++) {
    auto is_it = [&](const Late& each) { return written.number_of(each.role) == i + 1; };
    if (std::none_of(late.begin(), late.end(), is_it)) {
      found[i].check = check_of(found[i], lap);
      to_tensors[slot * rows_of_call + i] = found[i];
    }
  }
  call.has |= late.empty() ? 0 : LATE;
  call.check = check_of(call, 0);
  to_calls[slot] = call;
}

void Records::write_late(Unfinished& finished) {
  if (next > finished.number + slots) {
    return; // written over
  }
  const uint64_t first = finished.number % slots * rows_of_call;
  for (const Late& each : finished.late) {
    if (const uint32_t row = finished.written.number_of(each.role); row != 0 && row <= rows_of_call) {
      StoredTensor& tensor = finished.written.tensors[row - 1];
      tensor.check = check_of(tensor, finished.number / slots + 1);
      to_tensors[first + row - 1] = tensor;
    }
  }
}

bool Records::open(PyObject* call_buffer, PyObject* tensor_buffer, uint64_t room, uint64_t before) {
  close();
  std::lock_guard lock(mutex);
  if (call_buffer != Py_None) {
    if (PyObject_GetBuffer(call_buffer, &views[0], PyBUF_WRITABLE) < 0) {
      return false;
    }
    if (PyObject_GetBuffer(tensor_buffer, &views[1], PyBUF_WRITABLE) < 0) {
      PyBuffer_Release(&views[0]);
      return false;
    }
    to_calls = static_cast<StoredCall*>(views[0].buf);
    to_tensors = static_cast<StoredTensor*>(views[1].buf);
    rows_of_call = static_cast<uint64_t>(views[1].len) / sizeof(StoredTensor) / room;
  }
  slots = room;
  next = before;
  is_open = true;
  return true;
}

PyObject* Records::take(bool waits) {
  PyThreadState* state = PyEval_SaveThread();
  write_finished(waits);
  PyEval_RestoreThread(state);
  std::vector<StoredCall> taken_calls;
  std::vector<StoredTensor> taken_tensors;
  decltype(more) taken_more;
  {
    std::lock_guard lock(mutex);
    taken_calls.swap(calls);
    taken_tensors.swap(tensors);
    taken_more.swap(more);
  }
  if (taken_calls.empty()) {
    Py_RETURN_NONE;
  }
  return Py_BuildValue("(NNN)", bytes_of(taken_calls), bytes_of(taken_tensors), bytes_of(taken_more));
}

void Records::close() {
  Py_buffer old[2]{};
  write_finished(true);
  {
    std::lock_guard lock(mutex);
    is_open = false;
    if (to_calls == nullptr) {
      return; // what waits can still be taken
    }
    to_calls = nullptr;
    to_tensors = nullptr;
    std::swap(old, views);
  }
  PyBuffer_Release(&old[0]);
  PyBuffer_Release(&old[1]);
}

void Records::forget_parent() {
  new (&mutex) std::mutex; // another thread of the parent may have held it
  is_open = false; // the files are the parent's
  to_calls = nullptr;
  to_tensors = nullptr;
  new (&writing) std::mutex;
  unfinished.clear(); // a child has no device
  calls.clear();
  tensors.clear();
  more.clear();
}

namespace {

// open(buffer of calls or None, buffer of tensors or None, how many calls there is room for, how many were written
// before)
PyObject* open(PyObject* self, PyObject* args) {
  PyObject *calls, *tensors;
  unsigned long long room, before;
  if (!PyArg_ParseTuple(args, "OOKK", &calls, &tensors, &room, &before)) {
    return nullptr;
  }
  return records_of(self)->open(calls, tensors, room, before) ? Py_NewRef(Py_None) : nullptr;
}

// put(bytes of a call, bytes of its tensors)
PyObject* put(PyObject* self, PyObject* args) {
  PyObject *call, *tensors;
  if (!PyArg_ParseTuple(args, "SS", &call, &tensors)) {
    return nullptr;
  }
  StoredCall record{};
  std::memcpy(&record, PyBytes_AS_STRING(call), std::min(sizeof record, static_cast<size_t>(PyBytes_GET_SIZE(call))));
  std::vector<StoredTensor> found(static_cast<size_t>(PyBytes_GET_SIZE(tensors)) / sizeof(StoredTensor));
  std::copy_n( // and not memcpy, which takes no null pointer, as that of no tensors may be
      PyBytes_AS_STRING(tensors), found.size() * sizeof(StoredTensor), reinterpret_cast<char*>(found.data()));
  records_of(self)->put(record, found);
  Py_RETURN_NONE;
}

// take(whether to wait for devices)
PyObject* take(PyObject* self, PyObject* waits) {
  return records_of(self)->take(waits == Py_True);
}

PyObject* close(PyObject* self, PyObject*) {
  PyThreadState* state = PyEval_SaveThread();
  records_of(self)->write_finished(true);
  PyEval_RestoreThread(state);
  records_of(self)->close();
  Py_RETURN_NONE;
}

PyObject* forget_parent(PyObject* self, PyObject*) {
  records_of(self)->forget_parent();
  Py_RETURN_NONE;
}

PyMethodDef records_methods[] = {
    {"open", open, METH_VARARGS, nullptr},
    {"put", put, METH_VARARGS, nullptr},
    {"take", take, METH_O, nullptr},
    {"close", close, METH_NOARGS, nullptr},
    {"forget_parent", forget_parent, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

PyObject* new_records() {
  return PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&Wrapped<Records>::type));
}

Records* records_of(PyObject* object) {
  return Wrapped<Records>::of(object);
}

} // namespace opintercept

bool opintercept_add_records(PyObject* module) {
  using namespace opintercept;
  return Wrapped<Records>::add(module, "Records", records_methods);
}
