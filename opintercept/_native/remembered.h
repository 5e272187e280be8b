// What was read of tensors on the CPU that no operator has written to since.
//
// Invariant: whoever keeps something here sees every operator, and says what each has written to. A write past all
// operators is noticed if it moves the tensor's version, or changes one of the values that are looked at again.

#pragma once

#include "vectors/read_values.h"

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace opintercept {

// What is asked of a tensor, and where it lies.
struct Asked {
  const at::Tensor& tensor;
  const Layout& layout;
  const Request& request;
};

// Whether it is worth remembering, which small tensors are not, nor those that are no dense array.
bool is_worth_remembering(const Layout& layout);

// Takes up what was kept of a tensor. False if there is nothing, or if it may have changed.
bool recall(const Asked& asked, Sums& sums, uint64_t& hash);

// From before a tensor is read until what was read is kept: another thread may write to it meanwhile.
class Keeping {
 public:
  explicit Keeping(const Asked& asked);
  Keeping(const Keeping&) = delete;
  Keeping& operator=(const Keeping&) = delete;
  ~Keeping();

  // `counts_later`: whether torch counts the write that has made these values once the operator has returned.
  void keep(bool counts_later, const Sums& sums, uint64_t hash) const;

 private:
  const Asked& asked;
  const uint64_t began;
};

const c10::StorageImpl* storage_of(const at::Tensor& tensor); // null where there is none

// After something has been written to a storage; null for all of them.
void forget_values(const c10::StorageImpl* storage);
bool remembers_any(); // or may soon, since something is being read

} // namespace opintercept
