// The records of `runs/store/records.py` for calls that do not become Python objects.
//
// Invariant: the record of a call that is being written does not check, and those of its tensors are bound to its lap.

#include "records.h"

#include "../../_native/splitmix.h"
#include "objects.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <new>

namespace opintercept {

const char* const ROLE_NAMES[ROLES] = {
    "lhs", "rhs", "bias", "value", "output", "output.1", "output.2", "attn_mask", "grad_out", "logsumexp"};

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
bool describe(TensorRecord& record, const Values& values) {
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

bool Records::put(
    const Row& row, const std::array<Values, ROLES>& values, const std::array<bool, ROLES>& written, uint32_t signature,
    uint32_t site) {
  CallRecord call{};
  call.index = row.index;
  call.step = row.step;
  call.forward = row.forward;
  call.started = row.started;
  call.thread = row.thread;
  call.elapsed = row.elapsed;
  call.signature = signature;
  call.site = site;
  call.phase = row.backward ? 2 : 1; // the place among the choices of `CallRecord.phase`
  call.grad_of = static_cast<uint8_t>(row.grad_of + 1);
  std::array<TensorRecord, ROLES> found{};
  size_t count = 0;
  for (size_t role = 0; role < ROLES; role++) {
    if (written[role] && values[role].known) {
      if (!describe(found[count], values[role])) {
        return false;
      }
      call.rows[role] = static_cast<uint32_t>(++count);
    }
  }
  std::lock_guard lock(mutex);
  if (is_open && to_calls == nullptr && calls.size() >= slots) {
    return false;
  }
  write(call, found.data(), count);
  return true;
}

bool Records::is_full() {
  std::lock_guard lock(mutex);
  return is_open && to_calls == nullptr && calls.size() >= slots;
}

void Records::put(CallRecord call, std::vector<TensorRecord>& found) {
  std::lock_guard lock(mutex);
  write(call, found.data(), found.size());
}

void Records::write(CallRecord& call, TensorRecord* found, size_t count) {
  if (!is_open) {
    return; // outside of the block
  }
  if (to_calls == nullptr) {
    for (uint32_t& row : call.rows) {
      row += row == 0 ? 0 : static_cast<uint32_t>(tensors.size());
    }
    tensors.insert(tensors.end(), found, found + count);
    calls.push_back(call);
    return;
  }
  uint64_t slot = next % slots, lap = next / slots + 1;
  next++;
  call.lap = static_cast<uint32_t>(lap);
  // A process that reads the file meanwhile, or after a kill, drops what does not check, in whatever order it sees
  // this.
  to_calls[slot].check = 0;
  for (size_t i = 0; i < count && i < rows_of_call; i++) {
    found[i].check = check_of(found[i], lap);
    to_tensors[slot * rows_of_call + i] = found[i];
  }
  call.check = check_of(call, 0);
  to_calls[slot] = call;
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
    to_calls = static_cast<CallRecord*>(views[0].buf);
    to_tensors = static_cast<TensorRecord*>(views[1].buf);
    rows_of_call = static_cast<uint64_t>(views[1].len) / sizeof(TensorRecord) / room;
  }
  slots = room;
  next = before;
  is_open = true;
  return true;
}

PyObject* Records::take() {
  std::vector<CallRecord> taken_calls;
  std::vector<TensorRecord> taken_tensors;
  {
    std::lock_guard lock(mutex);
    taken_calls.swap(calls);
    taken_tensors.swap(tensors);
  }
  if (taken_calls.empty()) {
    Py_RETURN_NONE;
  }
  return Py_BuildValue("(NN)", bytes_of(taken_calls), bytes_of(taken_tensors));
}

void Records::close() {
  Py_buffer old[2]{};
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
  calls.clear();
  tensors.clear();
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
  CallRecord record{};
  std::memcpy(&record, PyBytes_AS_STRING(call), std::min(sizeof record, static_cast<size_t>(PyBytes_GET_SIZE(call))));
  std::vector<TensorRecord> found(static_cast<size_t>(PyBytes_GET_SIZE(tensors)) / sizeof(TensorRecord));
  std::copy_n( // and not memcpy, which takes no null pointer, as that of no tensors may be
      PyBytes_AS_STRING(tensors), found.size() * sizeof(TensorRecord), reinterpret_cast<char*>(found.data()));
  records_of(self)->put(record, found);
  Py_RETURN_NONE;
}

PyObject* take(PyObject* self, PyObject*) {
  return records_of(self)->take();
}

PyObject* close(PyObject* self, PyObject*) {
  records_of(self)->close();
  Py_RETURN_NONE;
}

PyObject* forget_parent(PyObject* self, PyObject*) {
  records_of(self)->forget_parent();
  Py_RETURN_NONE;
}

// layout() -> the offsets of the fields of each record, and then its size
PyObject* layout(PyObject*, PyObject*) {
  constexpr size_t row = sizeof(uint32_t), rows = offsetof(CallRecord, rows);
  static_assert(ROLES == 10);
  return Py_BuildValue(
      "{s(nnnnnnnnnnnnnnnnnnnnnnnnn)s(nnnnnnnnn)}",
      "call",
      offsetof(CallRecord, check),
      offsetof(CallRecord, index),
      offsetof(CallRecord, step),
      offsetof(CallRecord, forward),
      offsetof(CallRecord, started),
      offsetof(CallRecord, thread),
      offsetof(CallRecord, elapsed),
      offsetof(CallRecord, text),
      offsetof(CallRecord, signature),
      offsetof(CallRecord, site),
      offsetof(CallRecord, lap),
      rows,
      rows + row,
      rows + 2 * row,
      rows + 3 * row,
      rows + 4 * row,
      rows + 5 * row,
      rows + 6 * row,
      rows + 7 * row,
      rows + 8 * row,
      rows + 9 * row,
      offsetof(CallRecord, phase),
      offsetof(CallRecord, grad_of),
      offsetof(CallRecord, has),
      sizeof(CallRecord),
      "tensor",
      offsetof(TensorRecord, check),
      offsetof(TensorRecord, hash),
      offsetof(TensorRecord, nan),
      offsetof(TensorRecord, inf),
      offsetof(TensorRecord, min),
      offsetof(TensorRecord, max),
      offsetof(TensorRecord, mean),
      offsetof(TensorRecord, rms),
      sizeof(TensorRecord));
}

PyMethodDef records_methods[] = {
    {"open", open, METH_VARARGS, nullptr},
    {"put", put, METH_VARARGS, nullptr},
    {"take", take, METH_NOARGS, nullptr},
    {"close", close, METH_NOARGS, nullptr},
    {"forget_parent", forget_parent, METH_NOARGS, nullptr},
    {"layout", layout, METH_NOARGS, nullptr},
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
