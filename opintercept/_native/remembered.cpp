// The memory behind `remembered.h`, by storage. It holds no memory of tensors alive.

#include <Python.h>

#include "remembered.h"

#include "splitmix.h"
#include "values.h"

#include <c10/core/StorageImpl.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <unordered_map>
#include <vector>

namespace opintercept {

namespace {

constexpr size_t MOST = 1 << 14; // storages
constexpr size_t MOST_LOOKS = 8; // of one storage, which may be a buffer for all gradients
constexpr size_t MOST_SAMPLED = 1 << 9;

std::atomic<int64_t> least{1 << 14}; // values of a tensor that is remembered
std::atomic<size_t> sampled{MOST_SAMPLED}; // values that are looked at again
std::atomic<int64_t> recalled{0};

struct Kept {
  Layout layout;
  std::optional<Target> target;
  bool hash, zeros;
  uint32_t version, later; // that it has now, and that it may have once torch has counted the write
  uint64_t sample;
  Sums sums;
  uint64_t digits;

  bool is_of(const Asked& asked) const { // dense arrays differ in nothing else
    const Layout& other = asked.layout;
    const Target* wanted = asked.request.target;
    return layout.data == other.data && layout.dtype == other.dtype && layout.count == other.count &&
        layout.repeats == other.repeats && layout.matrix.height == other.matrix.height &&
        layout.matrix.width == other.matrix.width && layout.matrix.swapped == other.matrix.swapped &&
        hash == asked.request.hash && zeros == asked.request.zeros && target.has_value() == (wanted != nullptr) &&
        (wanted == nullptr || (target->tiny == wanted->tiny && target->huge == wanted->huge));
  }
};

struct Extent {
  uintptr_t begin, end;

  explicit Extent(const c10::StorageImpl& storage)
      : begin(reinterpret_cast<uintptr_t>(storage.data())), end(begin + storage.nbytes()) {}
  bool overlaps(const Extent& other) const {
    return begin < other.end && other.begin < end;
  }
};

struct Lasting {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage; // keeps its address from another one
  Extent extent;
  std::vector<Kept> looks;
};

// How often something was written to, as far as readers may care.
class Writes {
 public:
  void count(const c10::StorageImpl* storage) { // null for all
    any++;
    (storage != nullptr && storage->resizable() ? of(*storage) : shared)++;
  }
  uint64_t until_now(const c10::StorageImpl& storage) const { // the same as before if nothing was written to its memory
    return storage.resizable() ? of(storage) + shared : any.load();
  }

 private:
  std::atomic<uint64_t> any{0}, shared{0}; // to storages that may have memory in common
  mutable std::array<std::atomic<uint64_t>, 64> others{};

  std::atomic<uint64_t>& of(const c10::StorageImpl& storage) const {
    return others[splitmix64(reinterpret_cast<uintptr_t>(&storage)) % others.size()];
  }
};

struct Memory {
  std::mutex mutex;
  std::atomic<bool> has_any{false}; // so that writes where nothing is remembered cost nothing
  std::atomic<int64_t> readings{0}; // that have begun
  Writes writes;
  std::unordered_map<const c10::StorageImpl*, Lasting> storages;
  // Those that may share their memory with another storage, as of NumPy or of DLPack, by where it begins; and the size of
  // the largest one so far.
  std::multimap<uintptr_t, const c10::StorageImpl*> shared;
  size_t largest = 0;
  size_t room = 256; // when so many are there, those that are gone are left out

  void erase(const c10::StorageImpl* storage) {
    auto found = storages.find(storage);
    if (found == storages.end()) {
      return;
    }
    auto [first, last] = shared.equal_range(found->second.extent.begin);
    auto own = std::find_if(first, last, [&](const auto& each) { return each.second == storage; });
    if (own != last) {
      shared.erase(own);
    }
    storages.erase(found);
  }

  void clear() {
    storages.clear();
    shared.clear();
    largest = 0;
  }

  // With those in whose memory the storage lies, too.
  void erase_overlapping(const c10::StorageImpl& storage) {
    erase(&storage);
    const Extent extent(storage);
    std::vector<const c10::StorageImpl*> found;
    if (!storage.resizable()) {
      for (const auto& [other, lasting] : storages) {
        if (lasting.extent.overlaps(extent)) {
          found.push_back(other);
        }
      }
    } else {
      auto from = shared.lower_bound(extent.begin < largest ? 0 : extent.begin - largest);
      for (; from != shared.end() && from->first < extent.end; ++from) {
        if (storages.at(from->second).extent.overlaps(extent)) {
          found.push_back(from->second);
        }
      }
    }
    for (const auto* other : found) {
      erase(other);
    }
  }
};

// Lives for ever, since operators may run while the process ends.
Memory& memory() {
  static auto* const made = [] {
    static auto* const fresh = new Memory;
    // Another thread of the parent may hold the mutex, or be changing what is in there.
    pthread_atfork(nullptr, nullptr, [] { new (fresh) Memory; });
    return fresh;
  }();
  return *made;
}

uint32_t version_of(const at::Tensor& tensor) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0; // tensors of inference mode have none
}

// A sum over some values, one of each stretch of the same length.
template <typename Bits>
uint64_t sample_of(const Layout& layout, size_t places) {
  static const std::array<uint64_t, MOST_SAMPLED> drawn = [] {
    std::array<uint64_t, MOST_SAMPLED> made;
    for (size_t i = 0; i < made.size(); i++) {
      made[i] = splitmix64(i);
    }
    return made;
  }();
  auto values = static_cast<const Bits*>(layout.data);
  const auto stretch = static_cast<uint64_t>(layout.count) / places;
  uint64_t sum = 0;
  for (size_t i = 0; i < places; i++) {
    const uint64_t place = i * stretch + ((drawn[i] >> 32) * stretch >> 32);
    sum += static_cast<uint64_t>(values[place]) * (drawn[i] | 1);
  }
  return sum;
}

uint64_t sample_of(const Layout& layout) {
  const size_t places = std::min(sampled.load(), static_cast<size_t>(layout.count));
  switch (places == 0 ? 0 : c10::elementSize(layout.dtype)) {
    case 1:
      return sample_of<uint8_t>(layout, places);
    case 2:
      return sample_of<uint16_t>(layout, places);
    case 4:
      return sample_of<uint32_t>(layout, places);
    case 8:
      return sample_of<uint64_t>(layout, places);
    default:
      return 0;
  }
}

void make_room(Memory& known) {
  if (known.storages.size() < known.room) {
    return;
  }
  std::vector<const c10::StorageImpl*> gone;
  for (const auto& [storage, lasting] : known.storages) {
    if (lasting.storage.expired()) {
      gone.push_back(storage);
    }
  }
  for (const auto* storage : gone) {
    known.erase(storage);
  }
  if (known.storages.size() >= MOST) {
    known.clear();
  }
  known.room = 2 * known.storages.size() + 256;
}

} // namespace

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

bool is_worth_remembering(const Layout& layout) {
  return layout.count >= least.load(std::memory_order_relaxed) && layout.dense();
}

bool recall(const Asked& asked, Sums& sums, uint64_t& hash) {
  Memory& known = memory();
  const c10::StorageImpl* storage = storage_of(asked.tensor);
  const uint32_t version = version_of(asked.tensor);
  uint64_t sample;
  {
    std::lock_guard lock(known.mutex);
    auto found = known.storages.find(storage);
    if (found == known.storages.end()) {
      return false;
    }
    auto& looks = found->second.looks;
    auto kept = std::find_if(looks.begin(), looks.end(), [&](const Kept& each) { return each.is_of(asked); });
    if (kept == looks.end()) {
      return false;
    }
    if (version != kept->version && version != kept->later) {
      known.erase(storage);
      return false;
    }
    kept->version = kept->later = version;
    sums = kept->sums;
    hash = kept->digits;
    sample = kept->sample;
  }
  if (sample_of(asked.layout) != sample) {
    forget_values(storage);
    return false;
  }
  recalled.fetch_add(1, std::memory_order_relaxed);
  return true;
}

Keeping::Keeping(const Asked& of)
    : asked(of), began((memory().readings++, memory().writes.until_now(*storage_of(of.tensor)))) {}

Keeping::~Keeping() {
  memory().readings--;
}

void Keeping::keep(bool counts_later, const Sums& sums, uint64_t hash) const {
  Memory& known = memory();
  const Request& request = asked.request;
  const uint32_t version = version_of(asked.tensor);
  Kept kept{
      asked.layout,
      std::nullopt,
      request.hash,
      request.zeros,
      version,
      version + counts_later,
      sample_of(asked.layout),
      sums,
      hash};
  if (request.target != nullptr) {
    kept.target = *request.target;
  }
  std::lock_guard lock(known.mutex);
  make_room(known);
  const c10::StorageImpl* storage = storage_of(asked.tensor);
  if (known.writes.until_now(*storage) != began) {
    return;
  }
  auto found = known.storages.find(storage);
  if (found == known.storages.end()) {
    const Extent extent(*storage);
    found = known.storages.emplace(storage, Lasting{asked.tensor.storage().getWeakStorageImpl(), extent, {}}).first;
    if (!storage->resizable()) {
      known.shared.emplace(extent.begin, storage);
      known.largest = std::max(known.largest, static_cast<size_t>(extent.end - extent.begin));
    }
  }
  auto& looks = found->second.looks;
  std::erase_if(looks, [&](const Kept& each) { return each.is_of(asked); });
  if (looks.size() >= MOST_LOOKS) {
    looks.erase(looks.begin());
  }
  looks.push_back(std::move(kept));
  known.has_any.store(true, std::memory_order_relaxed);
}

bool remembers_any() {
  // Who has begun to read sees what was written before this, or is seen here.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return memory().has_any.load(std::memory_order_relaxed) || memory().readings.load(std::memory_order_relaxed) != 0;
}

void forget_values(const c10::StorageImpl* storage) {
  Memory& known = memory();
  if (!remembers_any()) {
    return;
  }
  std::lock_guard lock(known.mutex);
  known.writes.count(storage);
  if (storage == nullptr) {
    known.clear();
  } else {
    known.erase_overlapping(*storage);
  }
  known.has_any.store(!known.storages.empty(), std::memory_order_relaxed);
}

} // namespace opintercept

// remember(least values of a tensor, values that are looked at again) -> how many were recalled before, for tests
PyObject* opintercept_remember(PyObject*, PyObject* args) {
  using namespace opintercept;
  long long values;
  Py_ssize_t again;
  if (!PyArg_ParseTuple(args, "Ln", &values, &again)) {
    return nullptr;
  }
  least = values;
  sampled = std::min(static_cast<size_t>(again), MOST_SAMPLED);
  forget_values(nullptr);
  return PyLong_FromLongLong(recalled.exchange(0));
}
