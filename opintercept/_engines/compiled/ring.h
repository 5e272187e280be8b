// The calls of one pipeline that kernels have noted and its hooks have not been told of, in a bounded ring.

#pragma once

#include <Python.h>

#include "../../_native/values.h"
#include "checker.h"
#include "ranges.h"
#include "records.h"
#include "stack.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace opintercept {

constexpr uint32_t UNKNOWN = UINT32_MAX;

// Releases references; without the GIL, queues them for the next holder.
void give_up(std::vector<PyObject*> objects);

// What the hooks of a ring want of each call, see `_core.in_kernel.Plan`.
struct Plan {
  bool rows = false, finite = false, waits = false, later = false, infs_later = false, places = false, links = false;
  bool settings = false;
  bool times = false; // whether calls on devices are timed there
  bool hashed = false, has_target = false;
  std::array<bool, ROLES> reads{};
  Target target{};
  Records* writes = nullptr; // takes a record of each call, likewise
  std::array<bool, ROLES> written{}; // the roles whose values it gets
  Checker* checker = nullptr; // checks each product, likewise
  std::vector<PyObject*> owned; // what these belong to

  bool on_host() const { // whether calls on other devices are for Python
    return finite && !waits;
  }
  bool reads_any() const {
    return finite || reads != std::array<bool, ROLES>{};
  }

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    give_up(std::move(owned));
  }
};

// What rows refer to by number, for one plan. A ring goes on to another generation when its hooks change or what it
// knows may have become wrong. A call keeps the generation with which it began, so that nothing it uses goes away
// meanwhile and what is learned of it reaches no other hooks. The ring's mutex guards what is in it.
struct Generation {
  struct ByWalk {
    size_t operator()(const Walked& walked) const;
  };

  const std::shared_ptr<const Plan> plan;
  const uint64_t forgotten; // `Ring::forgotten` when it began
  std::unordered_map<Walked, uint32_t, ByWalk> by_walk;
  std::unordered_map<Walked, std::vector<ModuleName>, ByWalk> needs; // what `Walked.inside` holds of such calls
  std::unordered_map<PyObject*, uint32_t> by_place;
  std::unordered_map<std::string, uint32_t> by_look;
  std::vector<PyObject*> places, looks, walked; // owned; names, and weak references to what `by_walk` has addresses of
  std::vector<uint32_t> place_numbers, look_numbers; // by which records name them
  size_t key_bytes = 0; // of looks; those of a list of tensors are long

  explicit Generation(std::shared_ptr<const Plan> of);
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;
  ~Generation();

  PyObject* place(uint32_t number) const { // borrowed, with the interpreter's lock
    return number == UNKNOWN ? Py_None : places[number];
  }
};

using GenerationPtr = std::shared_ptr<Generation>;

// A call of which a device still reads the ranges, or checks the product.
struct Unjudged {
  GenerationPtr known;
  Row row;
  Ranges ranges;
  std::unique_ptr<device::Product> product;
  LimitsPtr limits; // of the product
  int64_t task; // of autograd, or -1
  std::string node; // that autograd ran
  int64_t unseen = 0; // how much code had run that nobody sees
  PyObject *look = nullptr, *place = nullptr; // of the generation, or owned
  std::vector<PyObject*> owned;

  Unjudged(GenerationPtr known, const Row& row, int64_t task, const std::string& node)
      : known(std::move(known)), row(row), task(task), node(node) {
    this->row.timing = {}; // that of the row that is told of the call
  }
  Unjudged(GenerationPtr known, const Row& row, Checked& checked)
      : known(std::move(known)),
        row(row),
        product(std::move(checked.product)),
        limits(std::move(checked.limits)),
        task(-1) {
    this->row.timing = {};
  }
  Unjudged(Unjudged&&) = default;
  Unjudged& operator=(Unjudged&&) = default;
  ~Unjudged() {
    if (!owned.empty()) {
      give_up(std::move(owned));
    }
  }

  bool has_arrived() const {
    return product == nullptr ? ranges.has_arrived() : product->has_arrived();
  }
  void settle() { // waits for the device
    product == nullptr ? ranges.settle() : product->settle();
  }
  bool is_odd() const { // once it is settled
    return product == nullptr ? !ranges.are_finite() : product->is_suspect();
  }
};

class Ring {
 public:
  std::atomic<int64_t> calls{0}, step{0}, unseen{0};
  std::atomic<int64_t> task{-1}; // of autograd, the last of which the hooks were told

  GenerationPtr current(); // null while the hooks have to see each call

  uint32_t place_of(const Generation& known, Walked walked); // UNKNOWN if it has not been remembered
  uint32_t place_of(const Generation& known, PyObject* place); // likewise

  // With the interpreter's lock: remember, and return the number. UNKNOWN if the hooks have changed or there is no
  // room. Puts a new generation in the place of one that is full or may have become wrong.
  uint32_t remember_place(GenerationPtr& known, PyObject* place, uint32_t number);
  uint32_t remember_place(GenerationPtr& known, Walked walked, PyObject* place, uint32_t number, PyObject* needs);
  void remember_look(GenerationPtr& known, const std::string& key, PyObject* look, uint32_t number);

  // Adds a row for a call that looks like this, which then owns the values. False if the look is unknown, if the ring has another generation by now
  // or no room.
  bool put(
      const GenerationPtr& known, const std::string& key, Row row, std::array<Values, ROLES>& values, bool& half_full);

  // Writes the record of a row instead. As `put`, and false if too many wait.
  bool write(
      const GenerationPtr& known, const std::string& key, const Row& row, const std::array<Values, ROLES>& values,
      const std::list<Values>& more);

  // Keeps a call that looks like this until its ranges have arrived. With the look of a call that was just shown to the
  // hooks, it need not be known. False, with nothing taken, if it is not, or if the hooks must see such calls.
  bool put(const std::string& key, Unjudged& call, PyObject* look = nullptr);
  // Forgets calls that turn out to be finite, or right. Returns whether there is one next that is not; with `any`,
  // whether there are any left.
  bool has_odd(bool any);
  bool is_crowded(); // whether so many are left that hooks should be told of them
  // With the interpreter's lock: the oldest such call in Python's terms; None if there is none, or if this would have to
  // wait for a device.
  PyObject* take_odd(bool waits);

  // Whether calls that look like this have been seen.
  bool knows(const GenerationPtr& known, const std::string& key);

  // With the interpreter's lock.
  void suspend();
  bool set_plan(std::shared_ptr<const Plan> fresh); // false if there are rows
  // The oldest row in Python's terms; None if there is none, or if a device still reads its values and this may not wait.
  PyObject* take(bool waits);
  // All rows as one object of Python, a `Chunk`; None if there are none. Likewise, but for those behind such a row.
  PyObject* take_all(bool waits);
  // The same of a row that is not in the ring; null without an exception if it is not known how the call looks.
  PyObject* as_python(const GenerationPtr& known, const std::string& key, Row& row, std::array<Values, ROLES>& values);
  bool empty();
  PyObject* pipeline = nullptr; // a weak reference to the pipeline of this ring
  void forget_parent(); // in a forked child
  ~Ring();

  static std::atomic<uint64_t> forgotten; // how often all rings had to forget
  static PyObject* nowhere; // `_core.call_site.NOWHERE`

 private:
  template <typename Map, typename Key>
  uint32_t number_in(const Generation& known, Map Generation::* numbers, const Key& key);

  static constexpr size_t CAPACITY = 2048, MOST = 4096, MOST_BYTES = 1 << 23; // rows, and things that they refer to
  static constexpr size_t MOST_UNJUDGED = 64; // of the host, whose numbers of storages wait to be used again

  template <typename Map, typename Key>
  uint32_t remember(
      GenerationPtr& known, Map Generation::* numbers, const Key& key, std::vector<PyObject*> Generation::* objects,
      PyObject* object, std::vector<uint32_t> Generation::* numbered, uint32_t number);
  bool takes_more(GenerationPtr& known); // with both locks
  uint32_t look_of(const GenerationPtr& known, const std::string& key) const; // with the mutex

  std::mutex mutex;
  GenerationPtr generation; // of the rows; null before the first plan
  bool suspended = true;
  std::unique_ptr<char[]> slots;
  size_t first = 0, filled = 0;
  std::deque<Unjudged> unjudged;
};

// Rows that were taken together, to be made objects of Python when somebody asks for them. No device reads their values
// any more.
class Chunk {
 public:
  Chunk() = default;
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;
  void fill(GenerationPtr of, std::vector<char> taken);
  size_t size() const;
  PyObject* row(size_t number) const; // as `Ring::take`
  PyObject* opaque() const; // a list of the summary and the number of calls of each signature that is opaque
  PyObject* kinds(Py_ssize_t hook) const; // see `_core.in_kernel.CallKind`
  // Adds what was read of a role to the `_values.sums.Cell` of each row's kind, in their order. False with an exception.
  bool add_up(size_t role, PyObject* cells) const;

 private:
  struct Kind { // of calls that look alike and come from one place
    size_t first; // row
    long calls = 0, idle = 0;
    double elapsed = 0, seconds = 0;
    std::array<bool, ROLES> read{};
  };

  Row first_of(const Kind& kind) const;
  PyObject* place_of(const Row& row) const; // borrowed

  GenerationPtr known;
  std::vector<char> rows;
  std::vector<Kind> by_kind;
  std::vector<uint32_t> kind_of; // each row
};

// The ring of a Python object of its type; null for another object.
Ring* ring_of(PyObject* object);

} // namespace opintercept
