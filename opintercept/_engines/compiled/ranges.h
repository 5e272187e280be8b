// The ranges of a call's tensors, which tell whether all values are finite, and where they lie.

#pragma once

#include "../../_native/device/driver.h"
#include "../../_native/values.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace opintercept {

struct Range {
  struct Place { // see `hooks._infs.MemoryPlace`
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::Device device;
    int64_t version; // -1 where none is counted
  };

  bool is_read = false; // whether it has values that may not be finite
  Ends ends{0, 0}; // once they are known
  device::Pending pending; // while a device reads them
  std::optional<Place> place;
  int argument = -1; // of what has been written to an argument: which one
};

// They are read at once on the host, and in launches on a device. All together belong to one device.
class Ranges {
 public:
  size_t arguments = 0; // the first ones
  bool placed = false; // whether it is noted where tensors lie

  Ranges() = default;
  Ranges(Ranges&&) = default;
  Ranges& operator=(Ranges&&) = default;
  ~Ranges(); // drops what is not known yet
  Ranges shared() const; // the same for another owner, once they have been started

  void expect(size_t count); // before so many are added
  Range& add(const at::Tensor& tensor); // without reading it
  // Begins to read. False if it cannot be read. What `lasts` is read as `Launch::takes` says.
  bool take(const at::Tensor& tensor, bool lasts = false);
  bool start(); // what has been taken; false if that fails
  bool has_arrived() const;
  bool settle(); // waits for the device; false if it has failed
  bool are_finite() const; // but for the arguments; once they are settled
  bool have_nan() const; // likewise
  Range& last() {
    return ranges.back();
  }
  std::vector<Range>& all() {
    return ranges;
  }
  const std::vector<Range>& all() const {
    return ranges;
  }

 private:
  std::vector<Range> ranges;
  device::Launch launch;
};

} // namespace opintercept
