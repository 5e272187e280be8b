// A file of the last calls, which outlives the process, see `runs/store/flight.py`.

#pragma once

#include <Python.h>

#include "../../_native/values.h"

#include <array>
#include <cstdint>
#include <mutex>
#include <string>

namespace opintercept {

// The order of `_core.noted.ROLES`; outputs come last.
constexpr size_t ROLES = 6, OUTPUT = ROLES - 2;
extern const char* const ROLE_NAMES[ROLES];

struct Values {
  bool known = false;
  uint64_t hash = 0;
  Sums sums;
};

struct Row {
  int64_t index, step, forward; // -1 for no forward call
  int64_t started; // nanoseconds since 1970
  int64_t thread; // the operating system's number
  double elapsed;
  uint32_t look, place; // what `Ring` remembers
  bool backward;
  int8_t grad_of; // -1, 0 for lhs, 1 for rhs
};

class Flight {
 public:
  // False with an exception.
  bool open(PyObject* buffer, uint64_t first, uint64_t slot_count, uint64_t slot_size, uint64_t lines);
  void put(const std::string& line);
  void close();
  void forget_parent();
  ~Flight() {
    close();
  }

 private:
  std::mutex mutex;
  Py_buffer view{};
  char* base = nullptr;
  uint64_t next = 0, slots = 0, size = 0;
};

// The line of a call, as `runs/store/codec.py` writes it, with the values of some roles.
void append_line(
    std::string& line, const Row& row, const std::array<Values, ROLES>& values, const std::array<bool, ROLES>& written,
    const std::string& place, const std::string& look);

PyObject* new_flight();
Flight* flight_of(PyObject* object); // of a Python object of its type; null for another

} // namespace opintercept
