// The ring of `ring.h`, and its type in Python, which `_core/noted.py` uses.
//
// Invariant: who holds a ring's mutex neither waits for the interpreter's lock nor runs Python code.

#include "ring.h"

#include "kernels.h"

#include "../../_native/threads.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace opintercept {

std::atomic<uint64_t> Ring::forgotten{0};
PyObject* Ring::nowhere = nullptr;

bool operator==(const Walked& a, const Walked& b) {
  return a.module == b.module && a.root == b.root && a.code == b.code && a.instruction == b.instruction &&
      a.function == b.function && a.caller == b.caller && a.caller_instruction == b.caller_instruction &&
      a.inside == b.inside;
}

size_t Generation::ByWalk::operator()(const Walked& walked) const {
  size_t mixed = static_cast<size_t>(walked.instruction);
  for (PyObject* each : {walked.module, walked.root, walked.code, walked.function, walked.caller, walked.inside[0]}) {
    mixed = (mixed ^ reinterpret_cast<size_t>(each) >> 4) * 0x9e3779b97f4a7c15u;
  }
  return mixed;
}

namespace {

std::mutex left_mutex;
std::vector<PyObject*> left; // what threads without the interpreter's lock have given up

} // namespace

void give_up(std::vector<PyObject*> objects) {
  {
    std::lock_guard lock(left_mutex);
    left.insert(left.end(), objects.begin(), objects.end());
    objects.clear();
    if (PyGILState_Check()) {
      objects.swap(left);
    }
  }
  for (PyObject* each : objects) {
    Py_XDECREF(each);
  }
}

Generation::Generation(std::shared_ptr<const Plan> of)
    : plan(std::move(of)), forgotten(Ring::forgotten.load(std::memory_order_acquire)) {}

Generation::~Generation() {
  for (auto* owner : {&places, &looks, &walked}) {
    give_up(std::move(*owner));
  }
}

GenerationPtr Ring::current() {
  std::lock_guard lock(mutex);
  return suspended ? nullptr : generation;
}

template <typename Map, typename Key>
uint32_t Ring::number_in(const Generation& known, Map Generation::* numbers, const Key& key) {
  std::lock_guard lock(mutex);
  if (known.forgotten != forgotten.load(std::memory_order_acquire)) {
    return UNKNOWN;
  }
  auto found = (known.*numbers).find(key);
  return found == (known.*numbers).end() ? UNKNOWN : found->second;
}

uint32_t Ring::place_of(const Generation& known, Walked walked) {
  std::vector<ModuleName> names;
  if (walked.wrapper != nullptr) {
    std::lock_guard lock(mutex);
    auto found = known.needs.find(walked);
    names = found == known.needs.end() ? names : found->second;
  }
  if (!names.empty()) {
    Locked locked;
    for (size_t i = 0; i < names.size(); i++) {
      walked.inside[i] = find_module(walked, names[i]);
    }
  }
  return number_in(known, &Generation::by_walk, walked);
}

uint32_t Ring::place_of(const Generation& known, PyObject* place) {
  return number_in(known, &Generation::by_place, place);
}

uint32_t Ring::look_of(const GenerationPtr& known, const std::string& key) const {
  if (suspended || known != generation || known->forgotten != forgotten.load(std::memory_order_acquire)) {
    return UNKNOWN;
  }
  auto found = known->by_look.find(key);
  return found == known->by_look.end() ? UNKNOWN : found->second;
}

bool Ring::takes_more(GenerationPtr& known) {
  if (suspended || known != generation) {
    return false; // other hooks learn other things of a call
  }
  bool right = known->forgotten == forgotten.load(std::memory_order_acquire);
  if (right && known->places.size() < MOST && known->looks.size() < MOST && known->key_bytes < MOST_BYTES) {
    return true;
  }
  if (filled > 0) {
    return false; // rows refer to what would be forgotten
  }
  generation = known = std::make_shared<Generation>(known->plan);
  return true;
}

template <typename Map, typename Key>
uint32_t Ring::remember(
    GenerationPtr& known, Map Generation::* numbers, const Key& key, std::vector<PyObject*> Generation::* objects,
    PyObject* object, std::vector<uint32_t> Generation::* numbered, uint32_t number) {
  GenerationPtr before = known; // freed after the mutex, since that may run Python code
  std::lock_guard lock(mutex);
  if (!takes_more(known)) {
    return UNKNOWN;
  }
  auto& owned = (*known).*objects;
  auto [found, fresh] = ((*known).*numbers).try_emplace(key, static_cast<uint32_t>(owned.size()));
  if (fresh) {
    owned.push_back(Py_NewRef(object));
    ((*known).*numbered).push_back(number);
  }
  return found->second;
}

uint32_t Ring::remember_place(GenerationPtr& known, PyObject* place, uint32_t number) {
  return remember(known, &Generation::by_place, place, &Generation::places, place, &Generation::place_numbers, number);
}

void Ring::remember_look(GenerationPtr& known, const std::string& key, PyObject* look, uint32_t number) {
  if (remember(known, &Generation::by_look, key, &Generation::looks, look, &Generation::look_numbers, number) !=
      UNKNOWN) {
    std::lock_guard lock(mutex);
    known->key_bytes += key.size();
  }
}

namespace {

PyObject* died; // a builtin function, see `walked_died`

// What a ring knows by its address is gone, and another object may get the address.
PyObject* walked_died(PyObject*, PyObject*) {
  Ring::forgotten.fetch_add(1, std::memory_order_release);
  Py_RETURN_NONE;
}

PyMethodDef walked_died_method = {"walked_died", walked_died, METH_O, nullptr};

} // namespace

uint32_t Ring::remember_place(
    GenerationPtr& known, Walked walked, PyObject* place, uint32_t numbered, PyObject* needs) {
  const Walked around = walked;
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(needs));
  if (count > walked.inside.size()) {
    return remember_place(known, place, numbered);
  }
  std::vector<THPObjectPtr> references;
  std::vector<ModuleName> names;
  for (size_t i = 0; i < count; i++) {
    PyObject* need = PyTuple_GET_ITEM(needs, static_cast<Py_ssize_t>(i));
    PyObject* name = Py_NewRef(PyTuple_GET_ITEM(need, 1));
    PyUnicode_InternInPlace(&name);
    references.emplace_back(name);
    names.push_back({PyTuple_GET_ITEM(need, 0) == Py_True, name});
    walked.inside[i] = PyTuple_GET_ITEM(need, 2);
  }
  for (PyObject* each :
       {walked.module,
        walked.root,
        walked.function,
        walked.generated ? walked.code : nullptr, // other places keep their code
        walked.caller,
        walked.inside[0],
        walked.inside[1]}) {
    if (each != nullptr) {
      references.emplace_back(check(PyWeakref_NewRef(each, died)));
    }
  }
  uint32_t number = remember_place(known, place, numbered);
  if (number != UNKNOWN) {
    std::lock_guard lock(mutex);
    known->by_walk.try_emplace(walked, number);
    if (count > 0) {
      known->needs.insert_or_assign(around, std::move(names));
    }
    for (THPObjectPtr& each : references) {
      known->walked.push_back(each.release());
    }
  }
  return number;
}

namespace {

size_t stride(const Plan& of) {
  return sizeof(Row) + static_cast<size_t>(std::count(of.reads.begin(), of.reads.end(), true)) * sizeof(Values);
}

// Calls `use(values)` for those of a row where they lie.
template <typename Use>
void each_values(const Plan& of, char* row, const Use& use) {
  for (char *at = row + sizeof(Row), *end = row + stride(of); at < end; at += sizeof(Values)) {
    Values values;
    std::memcpy(&values, at, sizeof values);
    use(values);
    std::memcpy(at, &values, sizeof values);
  }
}

device::Timing timing_of(const char* row) {
  Row found;
  std::memcpy(&found, row, sizeof found);
  return found.timing;
}

void drop_row(const Plan& of, char* row) {
  each_values(of, row, [](Values& values) { device::drop(values.pending); });
  if (device::Timing timing = timing_of(row); timing.is_open()) {
    device::drop(timing);
  }
}

bool has_arrived(const Plan& of, char* row) {
  bool found = true;
  each_values(of, row, [&](Values& values) { found = found && device::has_arrived(values.pending); });
  return found && (!of.times || device::has_arrived(timing_of(row)));
}

} // namespace

bool Ring::put(
    const GenerationPtr& known, const std::string& key, Row row, std::array<Values, ROLES>& values, bool& half_full) {
  std::lock_guard lock(mutex);
  row.look = look_of(known, key);
  if (row.look == UNKNOWN || filled == CAPACITY) {
    return false;
  }
  const Plan& plan = *known->plan;
  size_t size = stride(plan);
  if (slots == nullptr) {
    slots.reset(new char[CAPACITY * size]); // of which only what is used takes memory
  }
  char* to = slots.get() + (first + filled) % CAPACITY * size;
  std::memcpy(to, &row, sizeof row);
  to += sizeof row;
  for (size_t role = 0; role < ROLES; role++) {
    if (plan.reads[role]) {
      std::memcpy(to, &values[role], sizeof values[role]);
      to += sizeof values[role];
      values[role].pending = {};
    }
  }
  half_full = ++filled >= CAPACITY / 2;
  return true;
}

bool Ring::write(
    const GenerationPtr& known, const std::string& key, const Row& row, const std::array<Values, ROLES>& values,
    const std::list<Values>& more) {
  const Plan& plan = *known->plan;
  uint32_t signature, site = 0; // that of no place
  {
    std::lock_guard lock(mutex);
    uint32_t look = look_of(known, key);
    if (look == UNKNOWN) {
      return false;
    }
    signature = known->look_numbers[look];
    if (row.place != UNKNOWN) {
      site = known->place_numbers[row.place];
    }
  }
  return plan.writes->put(row, values, plan.written, more, signature, site);
}

bool Ring::put(const std::string& key, Unjudged& call, PyObject* look) {
  std::lock_guard lock(mutex);
  const Generation& known = *call.known;
  if (look == nullptr) {
    uint32_t number = look_of(call.known, key);
    if (number == UNKNOWN) {
      return false;
    }
    call.look = known.looks[number];
  } else {
    call.look = look;
    call.owned = {Py_NewRef(look)};
  }
  if (call.product == nullptr && PyTuple_GET_ITEM(call.look, 4) == Py_None) {
    return false;
  }
  call.place = call.row.place == UNKNOWN ? nowhere : known.places[call.row.place];
  call.unseen = unseen.load(std::memory_order_relaxed);
  unjudged.push_back(std::move(call));
  return true;
}

bool Ring::has_odd(bool any) {
  std::vector<Unjudged> over; // freed without the mutex, since that may run Python code
  std::lock_guard lock(mutex);
  while (!unjudged.empty() && unjudged.front().has_arrived()) {
    unjudged.front().settle();
    if (unjudged.front().is_odd()) {
      return true;
    }
    over.push_back(std::move(unjudged.front()));
    unjudged.pop_front();
  }
  return any && !unjudged.empty();
}

bool Ring::is_crowded() {
  std::lock_guard lock(mutex);
  return unjudged.size() >= MOST_UNJUDGED;
}

void Ring::suspend() {
  std::lock_guard lock(mutex);
  suspended = true;
}

bool Ring::set_plan(std::shared_ptr<const Plan> fresh) {
  GenerationPtr next = std::make_shared<Generation>(std::move(fresh)); // then the old one, freed without the mutex
  std::lock_guard lock(mutex);
  if (filled > 0) {
    return false;
  }
  generation.swap(next);
  suspended = false;
  slots.reset();
  first = 0;
  return true;
}

bool Ring::empty() {
  std::lock_guard lock(mutex);
  return filled == 0;
}

void Ring::forget_parent() {
  new (&mutex) std::mutex; // another thread of the parent may have held it
  new (&left_mutex) std::mutex;
  filled = 0;
  unjudged.clear();
  if (generation != nullptr && generation->plan->checker != nullptr) {
    generation->plan->checker->forget_parent();
  }
  if (generation != nullptr && generation->plan->writes != nullptr) {
    generation->plan->writes->forget_parent();
  }
}

Ring::~Ring() {
  if (generation != nullptr) {
    for (size_t i = 0; i < filled; i++) {
      drop_row(*generation->plan, slots.get() + (first + i) % CAPACITY * stride(*generation->plan));
    }
  }
  give_up({pipeline});
}

namespace {

PyObject *role_names[ROLES], *forward_name, *backward_name;

} // namespace

namespace {

// ((summary, index, step, phase, place, forward, grad_of, autocast, started, thread, elapsed, timed), values by role,
// learned)
PyObject* in_python(
    const Plan& plan, const Row& row, const std::array<Values, ROLES>& values, PyObject* look, PyObject* place) {
  THPObjectPtr look_owned(look), place_owned(place), found(PyDict_New()), timed(Py_NewRef(Py_None));
  if (row.timed >= 0) {
    timed = Py_BuildValue("(dO)", row.timed, row.idle ? Py_True : Py_False);
  }
  if (found.get() == nullptr) {
    return nullptr;
  }
  for (size_t role = 0; role < ROLES; role++) {
    if (plan.reads[role] && values[role].known) {
      PyObject* hash = plan.hashed ? PyLong_FromUnsignedLongLong(values[role].hash) : Py_NewRef(Py_None);
      THPObjectPtr each(as_found(values[role].sums, hash, Py_NewRef(Py_None), Py_NewRef(Py_None)));
      if (each.get() == nullptr || PyDict_SetItem(found.get(), role_names[role], each.get()) < 0) {
        return nullptr;
      }
    }
  }
  return Py_BuildValue(
      "((OLLOONOOLLdO)OO)",
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
      timed.get(),
      found.get(),
      PyTuple_GET_ITEM(look, 2)); // learned
}

void settle_time(Row& row) {
  if (row.timing.is_open()) {
    row.idle = row.timing.idle;
    row.timed = device::wait_for(row.timing);
  }
}

// Waits for the device that reads some values or times the call, without the interpreter's lock.
void settle(Row& row, std::array<Values, ROLES>& values) {
  auto waits = [](const Values& each) { return each.pending.is_open(); };
  if (row.timing.is_open() || std::any_of(values.begin(), values.end(), waits)) {
    Unlocked others(true);
    std::for_each(values.begin(), values.end(), [](Values& each) { each.settle(); });
    settle_time(row);
  }
}

// Reads a row where it lies.
Row read_row(const Plan& plan, const char* from, std::array<Values, ROLES>& values) {
  Row row;
  std::memcpy(&row, from, sizeof row);
  from += sizeof row;
  for (size_t role = 0; role < ROLES; role++) {
    if (plan.reads[role]) {
      std::memcpy(&values[role], from, sizeof values[role]);
      from += sizeof values[role];
    }
  }
  return row;
}

} // namespace

PyObject* Ring::take(bool waits) {
  Row row;
  std::array<Values, ROLES> values;
  GenerationPtr known;
  PyObject *look, *place;
  {
    std::lock_guard lock(mutex);
    if (filled == 0) {
      Py_RETURN_NONE;
    }
    known = generation; // rows are never of an older one
    if (!waits && !has_arrived(*known->plan, slots.get() + first * stride(*known->plan))) {
      Py_RETURN_NONE;
    }
    row = read_row(*known->plan, slots.get() + first * stride(*known->plan), values);
    look = Py_NewRef(known->looks[row.look]);
    place = Py_NewRef(row.place == UNKNOWN ? nowhere : known->places[row.place]);
    first = (first + 1) % CAPACITY;
    filled--;
  }
  settle(row, values);
  return in_python(*known->plan, row, values, look, place);
}

namespace {

// (smallest, largest, place), with two Nones for what is not read; the place is (device, storage, what keeps its number,
// version), or None
PyObject* in_python(const Range& range) {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  THPObjectPtr place(Py_NewRef(Py_None));
  if (range.place) {
    auto weak = std::make_unique<Weak>(range.place->storage);
    PyObject* holder = check(PyCapsule_New(weak.get(), nullptr, [](PyObject* capsule) {
      delete static_cast<Weak*>(PyCapsule_GetPointer(capsule, nullptr));
    }));
    PyObject* number = PyLong_FromVoidPtr(weak.release()->_unsafe_get_target());
    const int64_t version = range.place->version;
    place = check(Py_BuildValue(
        "(sNNN)",
        range.place->device.str().c_str(),
        number,
        holder,
        version < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(version)));
  }
  return check(
      range.is_read ? Py_BuildValue("(ddO)", range.ends.low, range.ends.high, place.get())
                    : Py_BuildValue("(OOO)", Py_None, Py_None, place.get()));
}

// (arguments, outputs, what was written to arguments by their numbers, node, task, unseen), see `_core.in_kernel.CallRanges`
PyObject* in_python(const Unjudged& call) {
  THPObjectPtr arguments(check(PyList_New(0))), outputs(check(PyList_New(0))), written(check(PyDict_New()));
  const auto& all = call.ranges.all();
  for (size_t i = 0; i < all.size(); i++) {
    THPObjectPtr range(in_python(all[i]));
    if (all[i].argument >= 0) {
      THPObjectPtr number(check(PyLong_FromLong(all[i].argument)));
      PyDict_SetItem(written.get(), number.get(), range.get());
    } else {
      PyList_Append(i < call.ranges.arguments ? arguments.get() : outputs.get(), range.get());
    }
  }
  return check(Py_BuildValue(
      "(OOOsLL)",
      arguments.get(),
      outputs.get(),
      written.get(),
      call.node.c_str(),
      static_cast<long long>(call.task),
      static_cast<long long>(call.unseen)));
}

} // namespace

PyObject* Ring::take_odd(bool waits) {
  while (true) {
    std::optional<Unjudged> oldest;
    {
      std::lock_guard lock(mutex);
      if (unjudged.empty() || (!waits && !unjudged.front().has_arrived())) {
        Py_RETURN_NONE;
      }
      oldest.emplace(std::move(unjudged.front()));
      unjudged.pop_front();
    }
    unlocked([&] { oldest->settle(); });
    if (!oldest->is_odd()) {
      continue;
    }
    THPObjectPtr note(
        check(in_python(*oldest->known->plan, oldest->row, {}, Py_NewRef(oldest->look), Py_NewRef(oldest->place))));
    if (oldest->product != nullptr) {
      THPObjectPtr product(check(opintercept::as_python(std::move(oldest->product))));
      return Py_BuildValue("(O(OO)O)", PyTuple_GET_ITEM(note.get(), 0), product.get(), oldest->limits->kind, Py_None);
    }
    THPObjectPtr seen(in_python(*oldest));
    return Py_BuildValue("(OOO)", PyTuple_GET_ITEM(note.get(), 0), seen.get(), PyTuple_GET_ITEM(oldest->look, 4));
  }
}

PyObject* Ring::take_all(bool waits) {
  THPObjectPtr made(check(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&Wrapped<Chunk>::type))));
  GenerationPtr known;
  std::vector<char> rows;
  {
    std::lock_guard lock(mutex);
    const Plan* plan = filled == 0 ? nullptr : generation->plan.get();
    const size_t size = filled == 0 ? 0 : stride(*plan);
    size_t count = waits ? filled : 0;
    while (count < filled && has_arrived(*plan, slots.get() + (first + count) % CAPACITY * size)) {
      count++;
    }
    if (count == 0) {
      Py_RETURN_NONE;
    }
    known = generation;
    const size_t before_end = std::min(count, CAPACITY - first);
    rows.reserve(count * size);
    const char* from = slots.get();
    rows.insert(rows.end(), from + first * size, from + (first + before_end) * size);
    rows.insert(rows.end(), from, from + (count - before_end) * size);
    first = (first + count) % CAPACITY;
    filled -= count;
  }
  Wrapped<Chunk>::of(made.get())->fill(std::move(known), std::move(rows));
  return made.release();
}

static void release(std::optional<Unlocked>& others) {
  if (!others) {
    others.emplace(true);
  }
}

void Chunk::fill(GenerationPtr of, std::vector<char> taken) {
  known = std::move(of);
  rows = std::move(taken);
  const Plan& plan = *known->plan;
  std::optional<Unlocked> others; // from the first call on that a device may still have to do with
  std::unordered_map<uint64_t, uint32_t> numbers;
  for (size_t i = 0; i < size(); i++) {
    char* at = rows.data() + i * stride(plan);
    Row row;
    std::memcpy(&row, at, sizeof row);
    if (row.timing.is_open()) {
      release(others);
      settle_time(row);
      std::memcpy(at, &row, sizeof row);
    }
    // A look is one of `Ring::MOST`.
    const uint64_t key = static_cast<uint64_t>(row.look) << 33 | static_cast<uint64_t>(row.place) << 1 | row.backward;
    auto [found, fresh] = numbers.try_emplace(key, static_cast<uint32_t>(by_kind.size()));
    if (fresh) {
      by_kind.push_back({i});
    }
    kind_of.push_back(found->second);
    Kind& kind = by_kind[found->second];
    kind.calls++;
    kind.elapsed += row.elapsed;
    kind.seconds += row.timed >= 0 ? row.timed : row.elapsed;
    kind.idle += row.idle;
    size_t role = 0;
    each_values(plan, at, [&](Values& values) {
      if (values.pending.is_open()) {
        release(others);
        values.settle();
      }
      for (; !plan.reads[role]; role++) {}
      kind.read[role] = kind.read[role] || values.known;
      role++;
    });
  }
}

size_t Chunk::size() const {
  return rows.size() / stride(*known->plan);
}

PyObject* Chunk::row(size_t number) const {
  std::array<Values, ROLES> values;
  Row row = read_row(*known->plan, rows.data() + number * stride(*known->plan), values);
  PyObject* look = Py_NewRef(known->looks[row.look]);
  return in_python(*known->plan, row, values, look, Py_NewRef(place_of(row)));
}

PyObject* Chunk::place_of(const Row& row) const {
  return row.place == UNKNOWN ? Ring::nowhere : known->places[row.place];
}

PyObject* Chunk::opaque() const { // of those whose `summary.opaque` is true
  std::vector<long> counts(known->looks.size());
  for (const Kind& kind : by_kind) {
    counts[first_of(kind).look] += kind.calls;
  }
  THPObjectPtr found(check(PyList_New(0)));
  for (size_t look = 0; look < counts.size(); look++) {
    if (counts[look] == 0) {
      continue;
    }
    PyObject* summary = PyTuple_GET_ITEM(known->looks[look], 0);
    THPObjectPtr opaque(check(PyObject_GetAttrString(summary, "opaque")));
    if (opaque.get() == Py_True) {
      THPObjectPtr each(check(Py_BuildValue("(Ol)", summary, counts[look])));
      if (PyList_Append(found.get(), each.get()) < 0) {
        return nullptr;
      }
    }
  }
  return found.release();
}

Row Chunk::first_of(const Kind& kind) const {
  Row row;
  std::memcpy(&row, rows.data() + kind.first * stride(*known->plan), sizeof row);
  return row;
}

PyObject* Chunk::kinds(Py_ssize_t hook) const {
  THPObjectPtr found(check(PyList_New(0)));
  for (const Kind& kind : by_kind) {
    const Row row = first_of(kind);
    PyObject *look = known->looks[row.look], *learned = PyTuple_GET_ITEM(look, 2);
    if (hook < 0 || hook >= PyTuple_GET_SIZE(learned)) {
      PyErr_SetString(PyExc_IndexError, "nothing was learned for such a hook");
      return nullptr;
    }
    THPObjectPtr roles(check(PyList_New(0)));
    for (size_t role = 0; role < ROLES; role++) {
      if (kind.read[role] && PyList_Append(roles.get(), role_names[role]) < 0) {
        return nullptr;
      }
    }
    THPObjectPtr each(check(Py_BuildValue(
        "(OOOOOOlddl)",
        PyTuple_GET_ITEM(look, 0), // summary
        row.backward ? backward_name : forward_name,
        place_of(row),
        PyTuple_GET_ITEM(look, 1), // autocast
        PyTuple_GET_ITEM(PyTuple_GET_ITEM(learned, hook), 1),
        roles.get(),
        kind.calls,
        kind.elapsed,
        kind.seconds,
        kind.idle)));
    if (PyList_Append(found.get(), each.get()) < 0) {
      return nullptr;
    }
  }
  return found.release();
}

namespace {

// The attributes of a `_values.sums.Cell`.
enum {
  CALLS,
  COUNT,
  FINITE,
  NAN_VALUES,
  NONZERO,
  UNDERFLOW_VALUES,
  OVERFLOW_VALUES,
  TOTAL,
  SPREAD,
  LOW,
  HIGH,
  ATTRIBUTES
};
constexpr const char* ATTRIBUTE_NAMES[ATTRIBUTES] = {
    "calls", "count", "finite", "nan", "nonzero", "underflow", "overflow", "total", "spread", "low", "high"};
using Cell = std::array<double, ATTRIBUTES>;

void add(Cell& cell, const Sums& sums) { // as `_values.stats.Sums.add`
  const auto finite = static_cast<double>(sums.finite);
  cell[SPREAD] += sums.spread;
  if (finite != 0 && cell[FINITE] != 0) {
    const double apart = cell[TOTAL] / cell[FINITE] - sums.total / finite;
    cell[SPREAD] += apart * apart * (cell[FINITE] * finite / (cell[FINITE] + finite));
  }
  cell[CALLS]++;
  cell[COUNT] += static_cast<double>(sums.count);
  cell[FINITE] += finite;
  cell[NAN_VALUES] += static_cast<double>(sums.nan);
  cell[NONZERO] += static_cast<double>(sums.count - sums.zeros);
  cell[UNDERFLOW_VALUES] += static_cast<double>(sums.underflow);
  cell[OVERFLOW_VALUES] += static_cast<double>(sums.overflow);
  cell[TOTAL] += sums.total;
  cell[LOW] = sums.low < cell[LOW] ? sums.low : cell[LOW];
  cell[HIGH] = sums.high > cell[HIGH] ? sums.high : cell[HIGH];
}

} // namespace

bool Chunk::add_up(size_t role, PyObject* cells) const {
  std::array<THPObjectPtr, ATTRIBUTES> names;
  for (size_t i = 0; i < ATTRIBUTES; i++) {
    names[i] = check(PyUnicode_InternFromString(ATTRIBUTE_NAMES[i]));
  }
  std::unordered_map<PyObject*, Cell> by_cell; // calls of several kinds may have the same one
  std::vector<Cell*> of_kind;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(cells); i++) {
    PyObject* object = PyList_GET_ITEM(cells, i);
    Cell* cell = nullptr;
    if (object != Py_None) {
      auto [found, fresh] = by_cell.try_emplace(object);
      cell = &found->second;
      for (size_t each = 0; fresh && each < ATTRIBUTES; each++) {
        (*cell)[each] = PyFloat_AsDouble(THPObjectPtr(check(PyObject_GetAttr(object, names[each]))).get());
      }
    }
    of_kind.push_back(cell);
  }
  if (PyErr_Occurred()) {
    return false;
  }
  if (of_kind.size() != by_kind.size()) {
    PyErr_SetString(PyExc_ValueError, "each kind of call needs a cell, or None");
    return false;
  }
  const Plan& plan = *known->plan;
  const size_t before = static_cast<size_t>(std::count(plan.reads.begin(), plan.reads.begin() + role, true));
  for (size_t i = 0; plan.reads[role] && i < size(); i++) {
    Values values;
    std::memcpy(&values, rows.data() + i * stride(plan) + sizeof(Row) + before * sizeof values, sizeof values);
    if (Cell* cell = of_kind[kind_of[i]]; cell != nullptr && values.known) {
      add(*cell, values.sums);
    }
  }
  for (auto& [object, cell] : by_cell) {
    for (size_t each = 0; each < ATTRIBUTES; each++) {
      const double number = cell[each];
      THPObjectPtr value(check(each == CALLS ? PyLong_FromDouble(number) : PyFloat_FromDouble(number)));
      if (PyObject_SetAttr(object, names[each], value.get()) < 0) {
        return false;
      }
    }
  }
  return true;
}

PyObject* Ring::as_python(
    const GenerationPtr& known, const std::string& key, Row& row, std::array<Values, ROLES>& values) {
  PyObject *look, *place;
  {
    std::lock_guard lock(mutex);
    auto found = known->by_look.find(key);
    if (found == known->by_look.end()) {
      return nullptr;
    }
    look = Py_NewRef(known->looks[found->second]);
    place = Py_NewRef(row.place == UNKNOWN ? nowhere : known->places[row.place]);
  }
  settle(row, values);
  return in_python(*known->plan, row, values, look, place);
}

bool Ring::knows(const GenerationPtr& known, const std::string& key) {
  std::lock_guard lock(mutex);
  return look_of(known, key) != UNKNOWN;
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

PyObject* set_unseen(PyObject* self, PyObject* count) {
  ring_of(self)->unseen.store(PyLong_AsLongLong(count), std::memory_order_relaxed);
  return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

PyObject* attach(PyObject* self, PyObject* reference) {
  Ring* ring = ring_of(self);
  PyObject* before = ring->pipeline;
  ring->pipeline = Py_NewRef(reference);
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

PyObject* suspend(PyObject* self, PyObject*) {
  ring_of(self)->suspend();
  Py_RETURN_NONE;
}

// Which roles a tuple names. False with an exception.
bool find_roles(PyObject* names, std::array<bool, ROLES>& found) {
  for (size_t role = 0; role < ROLES; role++) {
    int named = PySequence_Contains(names, role_names[role]);
    if (named < 0) {
      return false;
    }
    found[role] = named;
  }
  return true;
}

PyObject* field(PyObject* object, const char* name) { // borrowed from a tuple with names
  THPObjectPtr found(check(PyObject_GetAttrString(object, name)));
  return found.get();
}

bool holds(PyObject* object, const char* name) {
  return field(object, name) == Py_True;
}

// plan(plan) -> whether it is set; not while there are rows
PyObject* set_plan(PyObject* self, PyObject* wanted) {
  try {
    PyObject* work = field(wanted, "work");
    auto plan = std::make_shared<Plan>();
    plan->rows = holds(work, "rows");
    plan->finite = holds(work, "finite");
    plan->waits = holds(work, "waits");
    plan->later = holds(work, "later");
    plan->infs_later = holds(work, "infs_later");
    plan->settings = holds(work, "settings");
    plan->times = holds(work, "times");
    plan->hashed = holds(work, "hashed");
    plan->places = holds(wanted, "places");
    plan->links = holds(wanted, "links");
    PyObject* target = field(work, "target");
    plan->has_target = target != Py_None;
    if ((plan->has_target && !PyArg_ParseTuple(target, "dd", &plan->target.tiny, &plan->target.huge)) ||
        !find_roles(field(work, "reads"), plan->reads) || !find_roles(field(wanted, "written"), plan->written)) {
      return nullptr;
    }
    PyObject *sink = field(wanted, "sink"), *checker = field(wanted, "checker");
    plan->writes = sink == Py_None ? nullptr : records_of(sink);
    plan->checker = checker == Py_None ? nullptr : checker_of(checker);
    plan->owned = {Py_NewRef(sink), Py_NewRef(checker)};
    return PyBool_FromLong(ring_of(self)->set_plan(std::move(plan)));
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
}

PyObject* sink(PyObject*, PyObject*) {
  return new_records();
}

PyObject* checker(PyObject*, PyObject*) {
  return new_checker();
}

// take(whether to wait for a device)
PyObject* take(PyObject* self, PyObject* waits) {
  return ring_of(self)->take(waits == Py_True);
}

// take_all(whether to wait for a device)
PyObject* take_all(PyObject* self, PyObject* waits) {
  return ring_of(self)->take_all(waits == Py_True);
}

// has_odd(whether any call that has not been judged counts)
PyObject* has_odd(PyObject* self, PyObject* any) {
  return PyBool_FromLong(ring_of(self)->has_odd(any == Py_True));
}

// take_odd(whether to wait for a device)
PyObject* take_odd(PyObject* self, PyObject* waits) {
  return ring_of(self)->take_odd(waits == Py_True);
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
    {"set_unseen", set_unseen, METH_O, nullptr},
    {"attach", attach, METH_O, nullptr},
    {"suspend", suspend, METH_NOARGS, nullptr},
    {"plan", set_plan, METH_O, nullptr},
    {"sink", sink, METH_NOARGS, nullptr},
    {"checker", checker, METH_NOARGS, nullptr},
    {"take", take, METH_O, nullptr},
    {"take_all", take_all, METH_O, nullptr},
    {"has_odd", has_odd, METH_O, nullptr},
    {"take_odd", take_odd, METH_O, nullptr},
    {"empty", empty, METH_NOARGS, nullptr},
    {"forget_parent", forget_parent, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyObject* chunk_row(PyObject* self, PyObject* number) {
  size_t at = PyLong_AsSize_t(number);
  Chunk& chunk = *Wrapped<Chunk>::of(self);
  if (!PyErr_Occurred() && at >= chunk.size()) {
    PyErr_SetString(PyExc_IndexError, "a chunk has no such row");
  }
  return PyErr_Occurred() ? nullptr : chunk.row(at);
}

PyObject* chunk_opaque(PyObject* self, PyObject*) {
  return Wrapped<Chunk>::of(self)->opaque();
}

PyObject* chunk_size(PyObject* self, PyObject*) {
  return PyLong_FromSize_t(Wrapped<Chunk>::of(self)->size());
}

// kinds(number of the hook) -> a list of `_core.in_kernel.CallKind`
PyObject* chunk_kinds(PyObject* self, PyObject* hook) {
  const Py_ssize_t number = PyLong_AsSsize_t(hook);
  return PyErr_Occurred() ? nullptr : Wrapped<Chunk>::of(self)->kinds(number);
}

// add_up(role, list of a cell or None for each kind)
PyObject* chunk_add_up(PyObject* self, PyObject* args) {
  const char* name;
  PyObject* cells;
  if (!PyArg_ParseTuple(args, "sO!", &name, &PyList_Type, &cells)) {
    return nullptr;
  }
  const auto* role =
      std::find_if(ROLE_NAMES, ROLE_NAMES + ROLES, [&](const char* each) { return !strcmp(each, name); });
  if (role == ROLE_NAMES + ROLES) {
    PyErr_SetString(PyExc_ValueError, "no such role");
    return nullptr;
  }
  try {
    return Wrapped<Chunk>::of(self)->add_up(role - ROLE_NAMES, cells) ? Py_NewRef(Py_None) : nullptr;
  } catch (...) {
    set_error(std::current_exception());
    return nullptr;
  }
}

PyMethodDef chunk_methods[] = {
    {"row", chunk_row, METH_O, nullptr},
    {"opaque", chunk_opaque, METH_NOARGS, nullptr},
    {"size", chunk_size, METH_NOARGS, nullptr},
    {"kinds", chunk_kinds, METH_O, nullptr},
    {"add_up", chunk_add_up, METH_VARARGS, nullptr},
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
  died = PyCFunction_New(&walked_died_method, nullptr);
  return died != nullptr && Wrapped<Ring>::add(module, "Ring", ring_methods) &&
      Wrapped<Chunk>::add(module, "Chunk", chunk_methods);
}

// forget_notes(): forget what calls look like and where they come from
PyObject* opintercept_forget_notes(PyObject*, PyObject*) {
  opintercept::Ring::forgotten.fetch_add(1, std::memory_order_release);
  Py_RETURN_NONE;
}
