// The ranges of `ranges.h`.
//
// Invariant: only `settle` waits for a device.

#include "ranges.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace opintercept {

namespace {

// Lets the kernel count the values below all finite ones, and those above, see `kernel.h`.
constexpr Target INFINITE{-INFINITY, DBL_MAX};

Ends ends_of(const Sums& sums) {
  if (sums.nan != 0) {
    return {};
  }
  return {sums.underflow != 0 ? -INFINITY : sums.low, sums.overflow != 0 ? INFINITY : sums.high};
}

} // namespace

Ranges::~Ranges() {
  for (Range& each : ranges) {
    if (each.pending.is_open()) {
      device::drop(each.pending);
    }
  }
}

Ranges Ranges::shared() const {
  Ranges found;
  found.arguments = arguments;
  found.placed = placed;
  found.ranges = ranges;
  for (const Range& each : ranges) {
    if (each.pending.is_open()) {
      device::share(each.pending);
    }
  }
  return found;
}

void Ranges::expect(size_t count) {
  ranges.reserve(ranges.size() + count); // a launch knows where they are
}

Range& Ranges::add(const at::Tensor& tensor) {
  Range& range = ranges.emplace_back();
  if (placed && tensor.layout() == c10::kStrided && tensor.has_storage() && tensor.numel() != 0 &&
      tensor.storage().data() != nullptr) {
    const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
    range.place.emplace(
        Range::Place{
            tensor.storage().getWeakStorageImpl(),
            tensor.device(),
            counter.enabled() ? counter.current_version() : -1});
  }
  return range;
}

bool Ranges::take(const at::Tensor& tensor, bool lasts) {
  Range& range = add(tensor);
  if (c10::isIntegralType(tensor.scalar_type(), true)) {
    return true;
  }
  range.is_read = true;
  if (tensor.is_cpu()) {
    return find_range(tensor, range.ends);
  }
  if (tensor.numel() == 0) {
    return true;
  }
  return launch.takes(tensor, false, &INFINITE, range.pending, lasts) ||
      (launch.size() != 0 && start() && launch.takes(tensor, false, &INFINITE, range.pending, lasts));
}

bool Ranges::start() {
  bool begun = launch.size() == 0 || launch.start();
  launch = {};
  return begun;
}

bool Ranges::has_arrived() const {
  return std::all_of(ranges.rbegin(), ranges.rend(), [](const Range& each) {
    return !each.pending.is_open() || device::has_arrived(each.pending);
  });
}

bool Ranges::settle() {
  bool known = true;
  for (Range& each : ranges) {
    if (each.pending.is_open()) {
      Sums sums;
      uint64_t hash;
      each.is_read = device::wait_for(each.pending, sums, hash);
      each.ends = ends_of(sums);
      known = known && each.is_read;
    }
  }
  return known;
}

bool Ranges::are_finite() const {
  return std::all_of(ranges.begin() + static_cast<std::ptrdiff_t>(arguments), ranges.end(), [](const Range& each) {
    return !each.is_read || each.ends.are_finite();
  });
}

bool Ranges::have_nan() const {
  return std::any_of(ranges.begin() + static_cast<std::ptrdiff_t>(arguments), ranges.end(), [](const Range& each) {
    return each.is_read && std::isnan(each.ends.low);
  });
}

} // namespace opintercept
