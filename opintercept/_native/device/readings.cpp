// `Reading`, what a launch reads of a tensor on a device, and `Timed`, what a device takes for a call, in Python's terms.
//
// Invariant: without the interpreter's lock, nothing here holds more than a row.

#include "../objects.h"
#include "../threads.h"
#include "../values.h"
#include "driver.h"

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace {

using namespace opintercept;

struct Reading {
  std::mutex mutex; // of whoever waits first
  device::Pending pending;
  std::atomic<bool> is_read = false;
  bool is_known = false, hashed = false;
  Sums sums;
  uint64_t hash = 0;

  ~Reading() {
    device::drop(pending);
  }
};

// has_arrived() -> whether `found` does not wait
PyObject* has_arrived(PyObject* self, PyObject*) {
  Reading& reading = *Wrapped<Reading>::of(self);
  std::unique_lock alone(reading.mutex, std::try_to_lock); // not while another thread waits
  return PyBool_FromLong(reading.is_read || (alone && device::has_arrived(reading.pending)));
}

// found() -> as `values.read`; None if the device has failed
PyObject* found(PyObject* self, PyObject*) {
  Reading& reading = *Wrapped<Reading>::of(self);
  if (!reading.is_read) {
    Unlocked others(true);
    std::lock_guard alone(reading.mutex);
    if (!reading.is_read) {
      reading.is_known = device::wait_for(reading.pending, reading.sums, reading.hash);
      reading.is_read = true;
    }
  }
  if (!reading.is_known) {
    Py_RETURN_NONE;
  }
  PyObject* hash = reading.hashed ? PyLong_FromUnsignedLongLong(reading.hash) : Py_NewRef(Py_None);
  return as_found(reading.sums, hash, Py_NewRef(Py_None), Py_NewRef(Py_None));
}

PyMethodDef methods_of_reading[] = {
    {"has_arrived", has_arrived, METH_NOARGS, nullptr},
    {"found", found, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

struct Timed {
  device::Timing timing;
  double seconds = 0;
  bool idle = false;

  ~Timed() {
    device::drop(timing);
  }
};

// found() -> (seconds, whether the device was idle before); waits for the device
PyObject* found_time(PyObject* self, PyObject*) {
  Timed& timed = *Wrapped<Timed>::of(self);
  if (timed.timing.is_open()) { // with the lock from here on to the next line, so that one thread waits
    device::Timing timing = std::exchange(timed.timing, {});
    Unlocked others(true);
    timed.seconds = device::wait_for(timing);
  }
  return Py_BuildValue("(dO)", timed.seconds, timed.idle ? Py_True : Py_False);
}

PyMethodDef methods_of_timed[] = {
    {"found", found_time, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// What `use` throws becomes a RuntimeError.
template <typename Use>
PyObject* caught(const Use& use) {
  try {
    unlocked(use);
    Py_RETURN_NONE;
  } catch (const std::exception& exception) {
    PyErr_SetString(PyExc_RuntimeError, exception.what());
    return nullptr;
  }
}

// set_up_device(path of the driver's library, type of the devices)
PyObject* set_up_device(PyObject*, PyObject* args) {
  const char *library, *type;
  if (!PyArg_ParseTuple(args, "ss", &library, &type)) {
    return nullptr;
  }
  return caught([&] { device::set_up(library, type); });
}

// enter_device(number of the device)
PyObject* enter_device(PyObject*, PyObject* number) {
  const size_t ordinal = PyLong_AsSize_t(number);
  return PyErr_Occurred() ? nullptr : caught([&] { device::enter(ordinal); });
}

// load_on_device(number of the device, code[, whether it is that of checks])
PyObject* load_on_device(PyObject*, PyObject* args) {
  Py_ssize_t ordinal;
  PyObject* code;
  int checks = 0;
  if (!PyArg_ParseTuple(args, "nS|p", &ordinal, &code, &checks)) {
    return nullptr;
  }
  return caught([&] { device::load(static_cast<size_t>(ordinal), PyBytes_AS_STRING(code), checks); });
}

// read_on_device(tensor, target or None, hashed, whether it lasts[, row, scratch]) -> a Reading, or with a row how often
// each value of it occurs; None if the kernel cannot read the tensor now
PyObject* read_on_device(PyObject*, PyObject* args) {
  PyObject *value, *limits, *row = nullptr, *scratch = nullptr;
  int hashed, lasts;
  Target target;
  if (!PyArg_ParseTuple(args, "OOpp|OO", &value, &limits, &hashed, &lasts, &row, &scratch)) {
    return nullptr;
  }
  if (limits != Py_None && !PyArg_ParseTuple(limits, "dd", &target.tiny, &target.huge)) {
    return nullptr;
  }
  try {
    at::Tensor tensor;
    THPObjectPtr made(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&Wrapped<Reading>::type)));
    if (made.get() == nullptr) {
      return nullptr;
    }
    Reading& reading = *Wrapped<Reading>::of(made.get());
    reading.hashed = hashed;
    device::Launch launch;
    if (!as_tensor(value, tensor) ||
        !launch.takes(tensor, hashed, limits == Py_None ? nullptr : &target, reading.pending, lasts)) {
      Py_RETURN_NONE;
    }
    if (row != nullptr) {
      void *rows = unpacked(row).mutable_data_ptr(), *shared = unpacked(scratch).mutable_data_ptr();
      if (!unlocked([&] { return launch.start(rows, shared); })) {
        Py_RETURN_NONE;
      }
      return PyLong_FromLongLong(reading.pending.repeats);
    }
    if (!unlocked([&] { return launch.start(); })) {
      Py_RETURN_NONE;
    }
    return made.release();
  } catch (const std::exception&) { // torch cannot tell what the tensor is
    PyErr_Clear();
    Py_RETURN_NONE;
  }
}

PyMethodDef functions[] = {
    {"set_up_device", set_up_device, METH_VARARGS, nullptr},
    {"enter_device", enter_device, METH_O, nullptr},
    {"load_on_device", load_on_device, METH_VARARGS, nullptr},
    {"read_on_device", read_on_device, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

PyObject* opintercept::device::as_python(Timing& timing) {
  if (!timing.is_open()) {
    Py_RETURN_NONE;
  }
  PyObject* made = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&Wrapped<Timed>::type));
  if (made != nullptr) {
    Timed& timed = *Wrapped<Timed>::of(made);
    timed.idle = timing.idle;
    timed.timing = std::exchange(timing, {});
  }
  return made;
}

bool opintercept_add_readings(PyObject* module) {
  return Wrapped<Reading>::add(module, "Reading", methods_of_reading) &&
      Wrapped<Timed>::add(module, "Timed", methods_of_timed) && PyModule_AddFunctions(module, functions) == 0;
}
