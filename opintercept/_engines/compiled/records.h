// The records of calls and of tensors that a run consists of, see `runs/store/records.py`, and where kernels put them.
// `layout.h` is made of `_native/layout.py`: their fields, and the roles, of which each has a slot in a record.

#pragma once

#include <Python.h>

#include "../../_native/device/driver.h"
#include "../../_native/values.h"

#include <c10/util/SmallVector.h>
#include <layout.h>

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <mutex>
#include <vector>

namespace opintercept {

struct Values {
  bool known = false;
  uint64_t hash = 0;
  Sums sums;
  device::Pending pending; // while a device reads them; then they are only known once they have been settled

  void settle(); // waits for the device
};

struct Row {
  int64_t index, step, forward; // -1 for no forward call
  int64_t started; // nanoseconds since 1970
  int64_t thread; // the operating system's number
  double elapsed;
  device::Timing timing; // owned, if it is open
  double timed; // seconds on the device, once they are known; -1 for none
  uint32_t look, place; // what `Ring` remembers
  bool backward;
  bool idle; // of the device that was timed, see `device::Timing`
  int8_t grad_of; // -1, 0 for lhs, 1 for rhs
};

// Keeps records until somebody takes them, or writes them into mapped files over the oldest ones.
class Records {
 public:
  // For mapped files: their buffers, the number of calls that they have room for, and how many were written before.
  // Without buffers, how many calls may wait. False with an exception.
  bool open(PyObject* calls, PyObject* tensors, uint64_t room, uint64_t before);

  // `more` are the values of tensors for which a record has no slot, which those in mapped files never have. False if a
  // value has no room in a record, or too many calls wait.
  bool put(
      const Row& row, const std::array<Values, ROLES>& values, const std::array<bool, ROLES>& written,
      const std::list<Values>& more, uint32_t signature, uint32_t site);
  void put(StoredCall call, std::vector<StoredTensor>& tensors); // the numbers of whose rows begin at 1
  bool is_full(); // whether so many calls wait that the next ones should
  // The bytes of the waiting calls, of their tensors, and of pairs of a call and of a tensor without a slot, or 0 for one
  // that could not be read; None if there are none. Of calls whose tensors a device still reads only if it `waits`.
  PyObject* take(bool waits);
  // Writes the calls whose values have arrived, the oldest first, or waits for them. Better without the interpreter's lock.
  void write_finished(bool waits);
  void close();
  void forget_parent();
  ~Records() {
    close();
  }

 private:
  struct Late { // a tensor that a device still reads
    size_t role; // or `ROLES` and more for those without a slot
    device::Pending pending;
  };
  struct Written { // a call with its tensors, by whose numbers it knows them, from 1
    StoredCall call;
    c10::SmallVector<StoredTensor, ROLES> tensors;
    c10::SmallVector<uint32_t, 0> more; // the numbers of those without a slot; 0 for one that could not be read

    uint32_t& number_of(size_t role) {
      return role < ROLES ? call.rows[role] : more[role - ROLES];
    }
  };
  // A call with such tensors, or one behind it. That of a mapped file is written already, but for these tensors.
  struct Unfinished {
    Written written;
    c10::SmallVector<Late, ROLES> late;
    uint64_t number; // of the call in a mapped file

    bool has_arrived() const;
    void finish();
  };

  void put(Written written, c10::ArrayRef<Late> late);
  // With the mutex. Of the tensors that a device still reads only the places, if to a mapped file.
  void write(Written& written, c10::ArrayRef<Late> late = {});
  void write_late(Unfinished& finished); // their values, if the file still has the call

  std::mutex mutex;
  std::mutex writing; // held by who writes the oldest of the unfinished calls
  std::deque<Unfinished> unfinished;
  bool is_open = false;
  uint64_t slots = 0, next = 0, rows_of_call = 0;
  Py_buffer views[2]{};
  StoredCall* to_calls = nullptr; // of the mapped file
  StoredTensor* to_tensors = nullptr;
  std::vector<StoredCall> calls; // that wait
  std::vector<StoredTensor> tensors;
  std::vector<std::array<uint32_t, 2>> more;
};

PyObject* new_records();
Records* records_of(PyObject* object); // of a Python object of its type; null for another

} // namespace opintercept
