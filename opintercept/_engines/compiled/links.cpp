// Links of noted calls, as `_origin/links.py` makes and finds them, where nothing about them is unusual: no custom
// Function, no saved tensor that is packed, no node with several calls, no compiled graph.
//
// Invariant: the interpreter's lock is held, and all is kept in the dictionaries of `Links`, which sees the other calls.

#include "links.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <optional>
#include <tuple>
#include <typeindex>
#include <utility>

namespace {

using namespace opintercept;

constexpr Py_ssize_t HARD = 1 << 16; // as `Links.HARD`
constexpr size_t MOST = 4096; // answers that are remembered

// See `set_up_links`.
PyTypeObject *link_type, *place_type;
PyObject *is_of, *factors_of, *nowhere;
Slot by_number, in_backward_slot, round_slot, seen, links_slot, places_slot, shared_slot, later_slot;

// What is known of operators by the name that their rows have, until rows change. The names are owned.
struct Factors {
  size_t lhs, rhs; // their positions among the arguments
  bool foreign;
};
std::map<PyObject*, std::optional<Factors>> known_factors;
std::map<std::tuple<std::type_index, PyObject*, bool>, bool> known_nodes;

void forget() {
  for (auto [op, factors] : std::exchange(known_factors, {})) {
    Py_DECREF(op);
  }
  for (auto [key, answer] : std::exchange(known_nodes, {})) {
    Py_DECREF(std::get<PyObject*>(key));
  }
}

// Remembers an answer about an operator, and returns it.
template <typename Map>
const auto& remember(Map& known, const typename Map::key_type& key, PyObject* op, typename Map::mapped_type answer) {
  if (known.size() >= MOST) {
    forget();
  }
  auto [place, is_new] = known.emplace(key, std::move(answer));
  Py_XINCREF(is_new ? op : nullptr);
  return place->second;
}

void set(PyObject*& slot, PyObject* value) { // which it takes
  PyObject* before = slot;
  slot = value;
  Py_XDECREF(before);
}

PyObject* number_of(uint64_t value) {
  return check(PyLong_FromUnsignedLongLong(value));
}

// The links of a thread, by torch's number of it; null if there are none, or if some are of threads without numbers.
PyObject* of_thread(PyObject* links, uint64_t thread) {
  PyObject* all = by_number.of(links);
  if (PyDict_Contains(all, Py_None) != 0) {
    return nullptr;
  }
  THPObjectPtr number(number_of(thread));
  return PyDict_GetItemWithError(all, number.get());
}

template <typename Value, typename Convert>
PyObject* tuple_of(c10::ArrayRef<Value> values, const Convert& convert) {
  THPObjectPtr made(check(PyTuple_New(static_cast<Py_ssize_t>(values.size()))));
  for (size_t i = 0; i < values.size(); i++) {
    PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), check(convert(values[i])));
  }
  PyObject_GC_UnTrack(made.get()); // plain values, which the collector of garbage need not visit
  return made.release();
}

bool computes(const torch::autograd::Node& node, PyObject* op, bool sure) {
  const auto key = std::tuple(std::type_index(typeid(node)), op, sure);
  if (auto found = known_nodes.find(key); found != known_nodes.end()) {
    return found->second;
  }
  THPObjectPtr answer(check(PyObject_CallFunction(is_of, "sOO", node.name().c_str(), op, sure ? Py_True : Py_False)));
  return remember(known_nodes, key, op, answer.get() == Py_True);
}

const std::optional<Factors>& factors(PyObject* op) {
  if (auto found = known_factors.find(op); found != known_factors.end()) {
    return found->second;
  }
  THPObjectPtr answer(check(PyObject_CallOneArg(factors_of, op)));
  std::optional<Factors> made;
  if (answer.get() != Py_None) {
    Py_ssize_t lhs, rhs;
    int foreign;
    if (!PyArg_ParseTuple(answer.get(), "nnp", &lhs, &rhs, &foreign)) {
      raise();
    }
    made = Factors{static_cast<size_t>(lhs), static_cast<size_t>(rhs), foreign != 0};
  }
  return remember(known_factors, op, op, made);
}

// A `Link`, by its fields.
struct Linked {
  PyObject *index, *op, *operands, *wanted;
  bool sure, needed, packed;

  explicit Linked(PyObject* link)
      : index(PyTuple_GET_ITEM(link, 0)),
        op(PyTuple_GET_ITEM(link, 1)),
        operands(PyTuple_GET_ITEM(link, 3)),
        wanted(PyTuple_GET_ITEM(link, 6)),
        sure(PyTuple_GET_ITEM(link, 4) == Py_True),
        needed(PyTuple_GET_ITEM(link, 5) == Py_True),
        packed(PyTuple_GET_ITEM(link, 8) != Py_None) {}

  const void* operand(size_t position) const {
    const auto at = static_cast<Py_ssize_t>(position);
    return at < PyTuple_GET_SIZE(operands) ? PyLong_AsVoidPtr(PyTuple_GET_ITEM(operands, at)) : nullptr;
  }

  bool wants(size_t position) const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(wanted); i++) {
      if (PyLong_AsSize_t(PyTuple_GET_ITEM(wanted, i)) == position) {
        return true;
      }
    }
    return false;
  }
};

// As `links.grad_of`.
int8_t grad_of(Addresses operands, const void* left, const Linked& link) {
  if (left == nullptr || (link.sure && !link.needed)) {
    return -1;
  }
  const std::optional<Factors>& row = factors(link.op);
  if (!row) {
    return -1;
  }
  const void *lhs = link.operand(row->lhs), *rhs = link.operand(row->rhs);
  const bool of_lhs = link.wants(row->lhs), of_rhs = link.wants(row->rhs);
  if (of_lhs != of_rhs && !row->foreign) {
    (of_lhs ? lhs : rhs) = nullptr; // not saved, and others may be in its memory
  }
  auto is_used = [&](const void* each) {
    return each != nullptr && std::find(operands.begin(), operands.end(), each) != operands.end();
  };
  if (is_used(lhs) == is_used(rhs)) {
    const bool sure = row->foreign && of_lhs != of_rhs && !is_used(lhs);
    return static_cast<int8_t>(!sure ? -1 : of_lhs ? 0 : 1);
  }
  return is_used(lhs) ? 1 : 0;
}

} // namespace

PyObject* opintercept::in_python(const void* address) {
  return check(PyLong_FromVoidPtr(const_cast<void*>(address)));
}

PyObject* opintercept::in_python(Addresses addresses) {
  return tuple_of(addresses, [](const void* each) { return in_python(each); });
}

PyObject* opintercept::in_python(c10::ArrayRef<size_t> numbers) {
  return tuple_of(numbers, PyLong_FromSize_t);
}

bool opintercept::is_packing() {
  return at::SavedTensorDefaultHooks::get_hooks(true).has_value();
}

bool opintercept::link(
    PyObject* links, PyObject* op, int64_t index, Addresses operands, c10::ArrayRef<size_t> wanted, PyObject* place) {
  PyObject* mine = of_thread(links, at::RecordFunction::currentThreadId());
  if (mine == nullptr || place == Py_None || in_backward_slot.of(links) == Py_True || is_packing() ||
      (wanted.empty() && c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Conjugate))) {
    return false;
  }
  PyObject* all = links_slot.of(mine);
  THPObjectPtr number(check(PyLong_FromLongLong(static_cast<int64_t>(at::sequence_number::peek()) - 1)));
  const int is_taken = PyDict_Contains(all, number.get());
  if (is_taken != 0 || PyDict_GET_SIZE(all) > HARD) {
    return false;
  }
  if (!wanted.empty()) { // otherwise autograd has no node for it
    const std::array<PyObject*, 9> fields{
        check(PyLong_FromLongLong(index)),
        Py_NewRef(op),
        Py_NewRef(round_slot.of(links)),
        in_python(operands),
        Py_NewRef(Py_True),
        Py_NewRef(Py_True),
        in_python(wanted),
        Py_NewRef(Py_None),
        Py_NewRef(Py_None),
    };
    THPObjectPtr made(check(link_type->tp_alloc(link_type, fields.size())));
    for (size_t i = 0; i < fields.size(); i++) {
      PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), fields[i]);
    }
    PyObject_GC_UnTrack(made.get());
    if (PyDict_SetItem(all, number.get(), made.get()) < 0 ||
        PyDict_SetItem(places_slot.of(mine), number.get(), place) < 0) {
      raise();
    }
  }
  set(seen.of(mine), number.release());
  return true;
}

bool opintercept::find_forward(PyObject* links, Addresses operands, const void* left, Forward& found) {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr || std::strstr(typeid(*node).name(), "PyNode") != nullptr) {
    return false; // custom Functions have one type in C++, and names of their own
  }
  PyObject* its = of_thread(links, node->thread_id());
  if (its == nullptr) {
    return false;
  }
  set(in_backward_slot.of(links), Py_NewRef(Py_True));
  THPObjectPtr number(number_of(node->sequence_nr()));
  PyObject* link = PyDict_GetItemWithError(links_slot.of(its), number.get());
  if (link == nullptr || !computes(*node, Linked(link).op, Linked(link).sure)) {
    found.place = Py_NewRef(nowhere);
    return true;
  }
  PyObject* place = PyDict_GetItemWithError(places_slot.of(its), number.get());
  if (place == nullptr || Py_TYPE(place) != place_type || Linked(link).packed) {
    return false; // in a compiled graph, or with operands that come back elsewhere
  }
  const bool is_shared = PySet_Contains(shared_slot.of(its), number.get()) != 0;
  if (!is_shared && PyDict_Contains(later_slot.of(its), number.get()) != 0 &&
      !computes(*node, Linked(link).op, false)) {
    return false; // one operator has run several calls
  }
  found.place = Py_NewRef(place);
  if (is_shared) {
    return true;
  }
  found.index = PyLong_AsLongLong(Linked(link).index);
  found.grad_of = grad_of(operands, left, Linked(link));
  return true;
}

// Forgets what was known of rows, which have changed. For `_core.noted.on_forget`.
PyObject* opintercept_forget_links(PyObject*, PyObject*) {
  forget();
  Py_RETURN_NONE;
}

// set_up_links(Links, ThreadLinks, Link, is_of, factors_of, CallSite, NOWHERE)
PyObject* opintercept_set_up_links(PyObject*, PyObject* args) {
  PyObject *links, *of_threads;
  if (!PyArg_ParseTuple(args, "OOOOOOO", &links, &of_threads, &link_type, &is_of, &factors_of, &place_type, &nowhere)) {
    return nullptr;
  }
  for (PyObject* each : {reinterpret_cast<PyObject*>(link_type), is_of, factors_of}) {
    Py_INCREF(each); // as `place_type` and `nowhere`, for ever
  }
  Py_INCREF(place_type);
  Py_INCREF(nowhere);
  const bool found = by_number.find(links, "_by_number") && in_backward_slot.find(links, "_in_backward") &&
      round_slot.find(links, "_round") && seen.find(of_threads, "seen") && links_slot.find(of_threads, "links") &&
      places_slot.find(of_threads, "places") && shared_slot.find(of_threads, "shared") &&
      later_slot.find(of_threads, "later");
  return found ? Py_NewRef(Py_None) : nullptr;
}
