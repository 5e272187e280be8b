// What checks of products remember of weights, until torch writes to them.
//
// Invariant: no memory of a weight is kept alive, and none is taken for another that got its address.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace opintercept {

template <typename Value> // one made without arguments stands for nothing
class Weights {
 public:
  struct Key {
    const void *counter, *data; // the first of the weight's versions, which its views share
    std::array<int64_t, 4> shape;
    c10::ScalarType dtype;
    uint64_t of; // tells apart what is remembered of the same weight
    bool operator==(const Key&) const = default;
  };

  // Of a strided matrix whose writes torch counts, which those of inference mode are not.
  static std::optional<Key> key_of(const at::Tensor& weight, uint64_t of) {
    const c10::VariableVersion& counter = counter_of(weight);
    if (weight.layout() != c10::kStrided || weight.dim() != 2 || !counter.enabled()) {
      return std::nullopt;
    }
    // torch has no function that tells counters apart, but a pointer to the counter is all that is in it.
    static_assert(sizeof counter == sizeof(void*));
    const void* identity;
    std::memcpy(&identity, &counter, sizeof identity);
    std::array shape{weight.size(0), weight.size(1), weight.stride(0), weight.stride(1)};
    return Key{identity, weight.const_data_ptr(), shape, weight.scalar_type(), of};
  }

  // Nothing if nothing is known. Then `keeps` says whether it is worth remembering, since most operands are seen only
  // once.
  Value find(const Key& key, const at::Tensor& weight, bool& keeps) {
    const c10::VariableVersion& counter = counter_of(weight);
    Kept now{weight.storage().getWeakStorageImpl(), counter, counter.current_version(), {}};
    keeps = is_trained(weight); // others when they are seen a second time
    std::lock_guard lock(mutex);
    if (kept.size() >= MOST) {
      std::erase_if(kept, [](const auto& each) { return each.second.memory.expired(); });
      if (kept.size() >= MOST) {
        kept.clear();
      }
    }
    auto [found, fresh] = kept.try_emplace(key, now);
    if (!fresh && found->second.version == now.version && found->second.memory == now.memory) {
      keeps = true;
    } else if (!fresh) {
      found->second = std::move(now);
    }
    return found->second.value;
  }

  void keep(const Key& key, Value value) {
    std::lock_guard lock(mutex);
    if (auto found = kept.find(key); found != kept.end()) {
      found->second.value = std::move(value);
    }
  }

  void forget(const Key& key) {
    std::lock_guard lock(mutex);
    kept.erase(key);
  }

  void forget_parent() { // in a forked child: another thread of the parent may have been changing these
    new (&mutex) std::mutex;
    new (&kept) decltype(kept);
  }

 private:
  static constexpr size_t MOST = 1024;

  struct ByKey {
    size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.data) * 31 + std::hash<const void*>()(key.counter);
    }
  };
  struct Kept {
    // What keeps the addresses of the key from others. A weak reference to the tensor would do so too, but
    // `torch.utils.swap_tensors` refuses a tensor that has one.
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    c10::VariableVersion counter;
    uint32_t version;
    Value value;
  };

  static const c10::VariableVersion& counter_of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->version_counter();
  }
  static bool is_trained(const at::Tensor& tensor) { // or a view of what is
    at::Tensor base = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
    return base.requires_grad() && base.is_leaf();
  }

  std::mutex mutex; // never held while Python runs
  std::unordered_map<Key, Kept, ByKey> kept;
};

} // namespace opintercept
