// The flight recorder of `runs/store/flight.py` for calls that do not become Python objects.
//
// Invariant: a slot that is being written has the number 0, so that a reader never takes a part of a line for a call.

#include "flight.h"

#include "kernels.h"

#include <atomic>
#include <charconv>
#include <cstring>
#include <new>

namespace opintercept {

const char* const ROLE_NAMES[ROLES] = {"lhs", "rhs", "bias", "value", "output", "output.1"};

namespace {

constexpr size_t SLOT_HEAD = 2 * sizeof(uint64_t); // number and length, as `runs.store.flight.SLOT`

void append(std::string& line, int64_t number) {
  std::array<char, 24> text;
  line.append(text.data(), std::to_chars(text.data(), text.data() + text.size(), number).ptr);
}

void append(std::string& line, double number) { // as Python's `repr`, or null as `runs.store.codec` has it
  if (!std::isfinite(number)) {
    line += "null";
    return;
  }
  std::array<char, 40> text;
  char* end = std::to_chars(text.data(), text.data() + text.size(), number).ptr;
  bool is_whole = std::none_of(text.data(), end, [](char c) { return c == '.' || c == 'e'; });
  line.append(text.data(), end);
  line += is_whole ? ".0" : "";
}

void append_hex(std::string& line, uint64_t number) {
  for (int shift = 60; shift >= 0; shift -= 4) {
    line.push_back("0123456789abcdef"[number >> shift & 15]);
  }
}

uint64_t mixed(uint64_t number) { // `_values.hash._mixed`
  number *= 0x9e3779b97f4a7c15u;
  number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9u;
  number = (number ^ number >> 27) * 0x94d049bb133111ebu;
  return number ^ number >> 31;
}

// `_values.content._values_of`
void append_values(std::string& line, const Values& values) {
  const Sums& sums = values.sums;
  line += "{\"hash\":\"";
  append_hex(line, sums.count ? values.hash + mixed(static_cast<uint64_t>(sums.count)) : 0);
  line += "\",\"count\":";
  append(line, sums.count);
  line += ",\"nan\":";
  append(line, sums.nan);
  line += ",\"inf\":";
  append(line, sums.count - sums.finite - sums.nan);
  if (sums.finite == 0) {
    line += ",\"min\":null,\"max\":null,\"mean\":null,\"rms\":null}";
    return;
  }
  auto finite = static_cast<double>(sums.finite);
  double mean = sums.total / finite;
  line += ",\"min\":";
  append(line, sums.low);
  line += ",\"max\":";
  append(line, sums.high);
  line += ",\"mean\":";
  append(line, mean);
  line += ",\"rms\":";
  append(line, std::sqrt(sums.spread / finite + mean * mean));
  line.push_back('}');
}

} // namespace

void append_line(
    std::string& line, const Row& row, const std::array<Values, ROLES>& values, const std::array<bool, ROLES>& written,
    const std::string& place, const std::string& look) {
  line += "{\"index\":";
  append(line, row.index);
  line += ",\"step\":";
  append(line, row.step);
  line += row.backward ? ",\"phase\":\"backward\"," : ",\"phase\":\"forward\",";
  line += place;
  line += ",\"forward\":";
  row.forward < 0 ? void(line += "null") : append(line, row.forward);
  line += row.grad_of < 0 ? ",\"grad_of\":null" : row.grad_of ? ",\"grad_of\":\"rhs\"" : ",\"grad_of\":\"lhs\"";
  line += ",\"started\":";
  append(line, row.started);
  line += ",\"thread\":";
  append(line, row.thread);
  line += ",\"elapsed\":";
  append(line, row.elapsed);
  line.push_back(',');
  line += look;
  const char* before = ",\"values\":{\"";
  for (size_t role = 0; role < ROLES; role++) {
    if (written[role] && values[role].known) {
      line += before;
      line += ROLE_NAMES[role];
      line += "\":";
      append_values(line, values[role]);
      before = ",\"";
    }
  }
  line += *before == ',' && before[2] == '\0' ? "}}\n" : "}\n";
}

bool Flight::open(PyObject* buffer, uint64_t first, uint64_t slot_count, uint64_t slot_size, uint64_t lines) {
  close();
  std::lock_guard lock(mutex);
  if (PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE) < 0) {
    return false;
  }
  base = static_cast<char*>(view.buf) + first;
  slots = slot_count;
  size = slot_size;
  next = lines;
  return true;
}

void Flight::put(const std::string& line) {
  std::lock_guard lock(mutex);
  if (base == nullptr) {
    return; // outside of the block
  }
  char* slot = base + next % slots * size;
  auto* number = reinterpret_cast<uint64_t*>(slot);
  uint64_t length = std::min<uint64_t>(line.size(), size - SLOT_HEAD);
  if (length < line.size()) { // too long for its slot: only that there was a call can be told
    length = 0;
  }
  // A process that reads the file meanwhile must see the 0 before any byte of the new line. A store of any order does not
  // hold back those after it, and ARM reorders them: that takes the fence. The last store publishes the line.
  __atomic_store_n(number, 0, __ATOMIC_RELAXED);
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(slot + sizeof *number, &length, sizeof length);
  std::memcpy(slot + SLOT_HEAD, line.data(), length);
  __atomic_store_n(number, ++next, __ATOMIC_RELEASE);
}

void Flight::close() {
  Py_buffer old{};
  {
    std::lock_guard lock(mutex);
    if (base == nullptr) {
      return;
    }
    base = nullptr;
    std::swap(old, view);
  }
  PyBuffer_Release(&old);
}

void Flight::forget_parent() {
  new (&mutex) std::mutex; // another thread of the parent may have held it
  base = nullptr; // the file is the parent's
}

namespace {

// open(buffer, place of the first slot, number of slots, bytes of a slot, how many lines were written before)
PyObject* open(PyObject* self, PyObject* args) {
  PyObject* buffer;
  unsigned long long first, slots, size, lines;
  if (!PyArg_ParseTuple(args, "OKKKK", &buffer, &first, &slots, &size, &lines)) {
    return nullptr;
  }
  return flight_of(self)->open(buffer, first, slots, size, lines) ? Py_NewRef(Py_None) : nullptr;
}

PyObject* put(PyObject* self, PyObject* line) {
  char* text;
  Py_ssize_t length;
  if (PyBytes_AsStringAndSize(line, &text, &length) < 0) {
    return nullptr;
  }
  flight_of(self)->put(std::string(text, static_cast<size_t>(length)));
  Py_RETURN_NONE;
}

PyObject* close(PyObject* self, PyObject*) {
  flight_of(self)->close();
  Py_RETURN_NONE;
}

PyObject* forget_parent(PyObject* self, PyObject*) {
  flight_of(self)->forget_parent();
  Py_RETURN_NONE;
}

PyMethodDef flight_methods[] = {
    {"open", open, METH_VARARGS, nullptr},
    {"put", put, METH_O, nullptr},
    {"close", close, METH_NOARGS, nullptr},
    {"forget_parent", forget_parent, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

PyObject* new_flight() {
  return PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&Wrapped<Flight>::type));
}

Flight* flight_of(PyObject* object) {
  return Wrapped<Flight>::of(object);
}

} // namespace opintercept

bool opintercept_add_flight(PyObject* module) {
  using namespace opintercept;
  return Wrapped<Flight>::add(module, "Flight", flight_methods);
}
