// The calls of one pipeline that kernels have noted and its hooks have not been told of, in a bounded ring.

#pragma once

#include <Python.h>

#include "../../_native/values.h"
#include "checker.h"
#include "flight.h"
#include "stack.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace opintercept {

constexpr uint32_t UNKNOWN = UINT32_MAX;

// What the hooks of a ring want of each call, see `_rows.Work`.
struct Plan {
  bool rows = false, finite = false, place = false, links = false, settings = false;
  bool hashed = false, has_target = false;
  std::array<bool, ROLES> reads{};
  Target target{};
  Flight* flight = nullptr; // writes each call to a file, see `_rows.Work`
  Checker* checker = nullptr; // checks each product, likewise
  std::array<PyObject*, 2> owned{}; // what these belong to; the ring releases it

  bool on_host() const { // whether calls on other devices are for Python
    return finite || settings || checker != nullptr || reads != std::array<bool, ROLES>{};
  }
};

// References that are given up once the mutex is free, since that may run Python code.
struct Released {
  std::vector<PyObject*> objects;
  ~Released();
};

class Ring {
 public:
  std::atomic<int64_t> calls{0}, step{0};
  std::atomic<const Plan*> plan{nullptr}; // null while the hooks have to see each call

  // What rows refer to by number. `epoch` tells whether the numbers are still right.
  struct Numbered {
    uint32_t number = UNKNOWN;
    uint64_t epoch = 0;
  };
  Numbered place_of(const Walked& walked); // UNKNOWN if it has not been remembered
  Numbered look_of(const std::string& key);

  // With the interpreter's lock: remember, and return the number; UNKNOWN if there is no room.
  Numbered remember_place(PyObject* place, const std::string& text);
  Numbered remember_place(const Walked& walked, PyObject* place, const std::string& text);
  Numbered remember_look(const std::string& key, PyObject* look, const std::string& text);
  PyObject* place(uint32_t number) const { // borrowed
    return places[number];
  }

  // Adds a row. False if the plan or the numbers have changed since the call began, or if there is no room.
  bool put(const Plan* as_planned, uint64_t epoch, const Row& row, const std::array<Values, ROLES>& values, bool& half_full);

  // Writes the line of a row to the plan's file instead. As `put`.
  bool write(const Plan* as_planned, uint64_t epoch, const Row& row, const std::array<Values, ROLES>& values);

  // With the interpreter's lock.
  bool set_plan(std::unique_ptr<const Plan> fresh); // false if there are rows
  PyObject* take(); // the oldest row in Python's terms; None if there is none
  bool empty();
  PyObject* rows = nullptr; // a weak reference to the `_rows.Rows` of this ring
  void forget_parent(); // in a forked child
  ~Ring();

  static std::atomic<uint64_t> forgotten; // how often all rings had to forget
  static PyObject* nowhere; // `_origin.place.NOWHERE`

 private:
  static constexpr size_t CAPACITY = 2048, MOST = 4096; // rows, and things that they refer to

  struct ByWalk {
    size_t operator()(const Walked& walked) const;
  };
  template <typename Map, typename Key>
  Numbered number_of(const Map& numbers, const Key& key);
  template <typename Map, typename Key>
  Numbered remember(
      Map& numbers, const Key& key, std::vector<PyObject*>& objects, PyObject* object, std::vector<std::string>& texts, const std::string& text);
  bool has_room(Released& old); // with both locks; empties what is remembered if it has become too much
  void forget(Released& old); // with both locks
  size_t stride(const Plan& of) const;

  std::mutex mutex;
  uint64_t epoch = 1, seen_forgotten = 0;
  std::unordered_map<Walked, uint32_t, ByWalk> by_walk;
  std::unordered_map<PyObject*, uint32_t> by_place;
  std::unordered_map<std::string, uint32_t> by_look;
  std::vector<PyObject*> places, looks, modules; // owned; weak references to modules
  std::vector<std::string> place_texts, look_texts; // what a line says of them
  std::vector<std::unique_ptr<const Plan>> plans; // all, since a call that has begun may still read one
  std::unique_ptr<char[]> slots;
  size_t first = 0, filled = 0;
};

// The ring of a Python object of its type; null for another object.
Ring* ring_of(PyObject* object);

} // namespace opintercept
