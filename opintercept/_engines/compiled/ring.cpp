// The ring of `ring.h`, and its type in Python, which `_rows.Rows` uses.
//
// Invariant: who holds a ring's mutex neither waits for the interpreter's lock nor runs Python code.

#include "ring.h"

#include "kernels.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace opintercept {

std::atomic<uint64_t> Ring::forgotten{0};
PyObject* Ring::nowhere = nullptr;

bool operator==(const Walked& a, const Walked& b) {
  return a.module == b.module && a.root == b.root && a.code == b.code && a.instruction == b.instruction;
}

size_t Ring::ByWalk::operator()(const Walked& walked) const {
  size_t mixed = static_cast<size_t>(walked.instruction);
  for (PyObject* each : {walked.module, walked.root, walked.code}) {
    mixed = (mixed ^ reinterpret_cast<size_t>(each) >> 4) * 0x9e3779b97f4a7c15u;
  }
  return mixed;
}

Ring::Numbered Ring::place_of(const Walked& walked) {
  return number_of(by_walk, walked);
}

Ring::Numbered Ring::look_of(const std::string& key) {
  return number_of(by_look, key);
}

template <typename Map, typename Key>
Ring::Numbered Ring::number_of(const Map& numbers, const Key& key) {
  std::lock_guard lock(mutex);
  if (seen_forgotten != forgotten.load(std::memory_order_acquire)) {
    return {};
  }
  auto found = numbers.find(key);
  return found == numbers.end() ? Numbered{} : Numbered{found->second, epoch};
}

Released::~Released() {
  for (PyObject* each : objects) {
    Py_XDECREF(each);
  }
}

void Ring::forget(Released& old) {
  epoch++;
  by_walk.clear();
  by_place.clear();
  by_look.clear();
  place_texts.clear();
  look_texts.clear();
  for (auto* owner : {&places, &looks, &modules}) {
    old.objects.insert(old.objects.end(), owner->begin(), owner->end());
    owner->clear();
  }
}

bool Ring::has_room(Released& old) {
  uint64_t now = forgotten.load(std::memory_order_acquire);
  if (seen_forgotten == now && places.size() < MOST && looks.size() < MOST) {
    return true;
  }
  if (filled > 0) {
    return false; // rows refer to what would be forgotten
  }
  forget(old);
  seen_forgotten = now;
  return true;
}

template <typename Map, typename Key>
Ring::Numbered Ring::remember(
    Map& numbers, const Key& key, std::vector<PyObject*>& objects, PyObject* object, std::vector<std::string>& texts, const std::string& text) {
  Released old;
  std::lock_guard lock(mutex);
  if (!has_room(old)) {
    return {};
  }
  auto [found, fresh] = numbers.try_emplace(key, static_cast<uint32_t>(objects.size()));
  if (fresh) {
    objects.push_back(Py_NewRef(object));
    texts.push_back(text);
  }
  return {found->second, epoch};
}

Ring::Numbered Ring::remember_place(PyObject* place, const std::string& text) {
  return remember(by_place, place, places, place, place_texts, text);
}

Ring::Numbered Ring::remember_look(const std::string& key, PyObject* look, const std::string& text) {
  return remember(by_look, key, looks, look, look_texts, text);
}

namespace {

PyObject* died; // a builtin function, see `module_died`

// A module that a ring knows by its address is gone, and another object may get the address.
PyObject* module_died(PyObject*, PyObject*) {
  Ring::forgotten.fetch_add(1, std::memory_order_release);
  Py_RETURN_NONE;
}

PyMethodDef module_died_method = {"module_died", module_died, METH_O, nullptr};

} // namespace

Ring::Numbered Ring::remember_place(const Walked& walked, PyObject* place, const std::string& text) {
  Owned module(walked.module == nullptr ? nullptr : check(PyWeakref_NewRef(walked.module, died)));
  Owned root(walked.root == nullptr ? nullptr : check(PyWeakref_NewRef(walked.root, died)));
  Numbered known = remember_place(place, text);
  if (known.number != UNKNOWN) {
    std::lock_guard lock(mutex);
    if (known.epoch == epoch) {
      by_walk.try_emplace(walked, known.number);
      modules.push_back(Py_XNewRef(module.p));
      modules.push_back(Py_XNewRef(root.p));
    }
  }
  return known;
}

size_t Ring::stride(const Plan& of) const {
  return sizeof(Row) + static_cast<size_t>(std::count(of.reads.begin(), of.reads.end(), true)) * sizeof(Values);
}

bool Ring::put(
    const Plan* as_planned, uint64_t as_numbered, const Row& row, const std::array<Values, ROLES>& values, bool& half_full) {
  std::lock_guard lock(mutex);
  const Plan* now = plan.load(std::memory_order_relaxed);
  if (now != as_planned || epoch != as_numbered || filled == CAPACITY) {
    return false;
  }
  size_t size = stride(*now);
  if (slots == nullptr) {
    slots.reset(new char[CAPACITY * size]); // of which only what is used takes memory
  }
  char* to = slots.get() + (first + filled) % CAPACITY * size;
  std::memcpy(to, &row, sizeof row);
  to += sizeof row;
  for (size_t role = 0; role < ROLES; role++) {
    if (now->reads[role]) {
      std::memcpy(to, &values[role], sizeof values[role]);
      to += sizeof values[role];
    }
  }
  half_full = ++filled >= CAPACITY / 2;
  return true;
}

bool Ring::write(const Plan* as_planned, uint64_t as_numbered, const Row& row, const std::array<Values, ROLES>& values) {
  static thread_local std::string line; // keeps its memory
  line.clear();
  {
    std::lock_guard lock(mutex);
    if (plan.load(std::memory_order_relaxed) != as_planned || epoch != as_numbered) {
      return false;
    }
    static const std::string nowhere_text = "\"module\":null,\"source\":null";
    const std::string& place = row.place == UNKNOWN ? nowhere_text : place_texts[row.place];
    append_line(line, row, values, as_planned->hashed, place, look_texts[row.look]);
  }
  as_planned->flight->put(line);
  return true;
}

bool Ring::set_plan(std::unique_ptr<const Plan> fresh) {
  Released old;
  std::lock_guard lock(mutex);
  if (fresh != nullptr && filled > 0) {
    return false;
  }
  plan.store(fresh.get(), std::memory_order_release);
  if (fresh != nullptr) { // other hooks learn other things of a call
    forget(old);
    slots.reset();
    first = 0;
    plans.push_back(std::move(fresh));
  }
  return true;
}

bool Ring::empty() {
  std::lock_guard lock(mutex);
  return filled == 0;
}

void Ring::forget_parent() {
  new (&mutex) std::mutex; // another thread of the parent may have held it
  filled = 0;
  for (const auto& each : plans) {
    if (each->checker != nullptr) {
      each->checker->forget_parent();
    }
  }
}

Ring::~Ring() {
  Released old;
  forget(old);
  for (const auto& each : plans) {
    for (PyObject* owner : each->owned) {
      Py_XDECREF(owner);
    }
  }
  Py_XDECREF(rows);
}

namespace {

PyObject *role_names[ROLES], *forward_name, *backward_name;

} // namespace

// ((summary, index, step, phase, place, forward, grad_of, autocast, started, thread, elapsed), values by role, learned)
PyObject* Ring::take() {
  Row row;
  std::array<Values, ROLES> values;
  const Plan* now;
  PyObject *look, *place;
  {
    std::lock_guard lock(mutex);
    if (filled == 0) {
      Py_RETURN_NONE;
    }
    now = plans.back().get(); // rows are never of an older plan
    const char* from = slots.get() + first * stride(*now);
    std::memcpy(&row, from, sizeof row);
    from += sizeof row;
    for (size_t role = 0; role < ROLES; role++) {
      if (now->reads[role]) {
        std::memcpy(&values[role], from, sizeof values[role]);
        from += sizeof values[role];
      }
    }
    look = Py_NewRef(looks[row.look]);
    place = row.place == UNKNOWN ? Py_NewRef(nowhere) : Py_NewRef(places[row.place]);
    first = (first + 1) % CAPACITY;
    filled--;
  }
  Owned look_owned(look), place_owned(place), found(PyDict_New());
  if (found.p == nullptr) {
    return nullptr;
  }
  for (size_t role = 0; role < ROLES; role++) {
    if (values[role].known) {
      PyObject* hash = now->hashed ? PyLong_FromUnsignedLongLong(values[role].hash) : Py_NewRef(Py_None);
      Owned each(as_found(values[role].sums, hash, Py_NewRef(Py_None), Py_NewRef(Py_None)));
      if (each.p == nullptr || PyDict_SetItem(found.p, role_names[role], each.p) < 0) {
        return nullptr;
      }
    }
  }
  return Py_BuildValue(
      "((OLLOONOOLLd)OO)",
      PyTuple_GET_ITEM(look, 0), // summary
      static_cast<long long>(row.index),
      static_cast<long long>(row.step),
      row.backward ? backward_name : forward_name,
      place,
      row.forward < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(row.forward),
      row.grad_of < 0 ? Py_None : role_names[static_cast<size_t>(row.grad_of)],
      PyTuple_GET_ITEM(look, 1), // autocast
      static_cast<long long>(row.started),
      static_cast<long long>(row.thread),
      row.elapsed,
      found.p,
      PyTuple_GET_ITEM(look, 2)); // learned
}

namespace {

PyObject* next_index(PyObject* self, PyObject*) {
  return PyLong_FromLongLong(ring_of(self)->calls.fetch_add(1, std::memory_order_relaxed));
}

PyObject* calls(PyObject* self, PyObject*) {
  return PyLong_FromLongLong(ring_of(self)->calls.load(std::memory_order_relaxed));
}

PyObject* set_step(PyObject* self, PyObject* number) {
  ring_of(self)->step.store(PyLong_AsLongLong(number), std::memory_order_relaxed);
  return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

PyObject* attach(PyObject* self, PyObject* reference) {
  Ring* ring = ring_of(self);
  PyObject* before = ring->rows;
  ring->rows = Py_NewRef(reference);
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

PyObject* suspend(PyObject* self, PyObject*) {
  ring_of(self)->set_plan(nullptr);
  Py_RETURN_NONE;
}

// plan(rows, finite, place, links, settings, roles, hashed, target or None, flight or None, checker or None) -> whether
// it is set; not while there are rows
PyObject* set_plan(PyObject* self, PyObject* args) {
  auto plan = std::make_unique<Plan>();
  int rows, finite, place, links, settings, hashed;
  PyObject *roles, *target, *flight, *checker;
  if (!PyArg_ParseTuple(
          args, "pppppO!pOOO", &rows, &finite, &place, &links, &settings, &PyTuple_Type, &roles, &hashed, &target, &flight, &checker)) {
    return nullptr;
  }
  plan->rows = rows;
  plan->finite = finite;
  plan->place = place;
  plan->links = links;
  plan->settings = settings;
  plan->hashed = hashed;
  plan->has_target = target != Py_None;
  if (plan->has_target && !PyArg_ParseTuple(target, "dd", &plan->target.tiny, &plan->target.huge)) {
    return nullptr;
  }
  for (size_t role = 0; role < ROLES; role++) {
    int asked = PySequence_Contains(roles, role_names[role]);
    if (asked < 0) {
      return nullptr;
    }
    plan->reads[role] = asked;
  }
  plan->flight = flight == Py_None ? nullptr : flight_of(flight);
  plan->checker = checker == Py_None ? nullptr : checker_of(checker);
  plan->owned = {flight, checker};
  if (!ring_of(self)->set_plan(std::move(plan))) {
    Py_RETURN_FALSE;
  }
  Py_INCREF(flight); // the ring releases them
  Py_INCREF(checker);
  Py_RETURN_TRUE;
}

PyObject* flight(PyObject*, PyObject*) {
  return new_flight();
}

PyObject* checker(PyObject*, PyObject*) {
  return new_checker();
}

PyObject* take(PyObject* self, PyObject*) {
  return ring_of(self)->take();
}

PyObject* empty(PyObject* self, PyObject*) {
  return PyBool_FromLong(ring_of(self)->empty());
}

PyObject* forget_parent(PyObject* self, PyObject*) {
  ring_of(self)->forget_parent();
  Py_RETURN_NONE;
}

PyMethodDef ring_methods[] = {
    {"next_index", next_index, METH_NOARGS, nullptr},
    {"calls", calls, METH_NOARGS, nullptr},
    {"set_step", set_step, METH_O, nullptr},
    {"attach", attach, METH_O, nullptr},
    {"suspend", suspend, METH_NOARGS, nullptr},
    {"plan", set_plan, METH_VARARGS, nullptr},
    {"flight", flight, METH_NOARGS, nullptr},
    {"checker", checker, METH_NOARGS, nullptr},
    {"take", take, METH_NOARGS, nullptr},
    {"empty", empty, METH_NOARGS, nullptr},
    {"forget_parent", forget_parent, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace

Ring* ring_of(PyObject* object) {
  return Wrapped<Ring>::of(object);
}

} // namespace opintercept

bool opintercept_add_ring(PyObject* module) {
  using namespace opintercept;
  for (size_t role = 0; role < ROLES; role++) {
    role_names[role] = PyUnicode_InternFromString(ROLE_NAMES[role]);
  }
  forward_name = PyUnicode_InternFromString("forward");
  backward_name = PyUnicode_InternFromString("backward");
  died = PyCFunction_New(&module_died_method, nullptr);
  return died != nullptr && Wrapped<Ring>::add(module, "Ring", ring_methods);
}

// forget_notes(): forget what calls look like and where they come from
PyObject* opintercept_forget_notes(PyObject*, PyObject*) {
  opintercept::Ring::forgotten.fetch_add(1, std::memory_order_release);
  Py_RETURN_NONE;
}
