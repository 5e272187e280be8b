// What `driver.cpp` reads of tensors on GPUs.

#pragma once

#include <Python.h>

#include "../vectors/read_values.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace opintercept::device {

// Finds the driver's functions in a library, for devices of a type. Then, for one of these, enters the context that torch
// uses, which is enough to time calls, and loads the code of `kernel.h` or `checksum.h`. All throw a std::runtime_error
// that says what is wrong.
void set_up(const char* library, const char* device_type);
void enter(size_t ordinal);
void load(size_t ordinal, const void* code, bool checks);

// A row that a launch writes, and by what it is known that it has. Each of its owners waits for it or drops it, once.
struct Pending {
  uint32_t row = 0; // 0 for none: the launch has failed
  int64_t repeats = 1; // see `Layout`
  uint64_t mark = 0; // 0 for nothing that is to be read

  bool is_open() const {
    return mark != 0;
  }
};

// Where a tensor lies, and how often that has been written. The reference keeps the address from another storage.
struct Version {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint32_t number;

  bool operator==(const Version& other) const {
    return storage == other.storage && number == other.number;
  }
};

struct Jobs;
struct Row;
struct Check;
struct Counters;

// Whether launches can read tensors on a device now: it has the kernel, and captures no graph on its current stream.
bool can_read(c10::Device device);

// The tensors that one launch reads.
class Launch {
 public:
  Launch();
  Launch(Launch&&) noexcept;
  Launch& operator=(Launch&&) noexcept;
  ~Launch();

  // Whether the kernel can read the tensor, after those that it has taken already. `pending` is set by `start`. A tensor
  // that lasts, such as a weight, is read again only if its memory, its version or a sample of its values is another.
  bool takes(const at::Tensor& tensor, bool hashed, const Target* target, Pending& pending, bool lasts = false);
  // Begins to read. False if nothing is read, because a CUDA graph is captured, say, or there is no room for more rows.
  bool start();
  // The same into rows on the device, behind each other; the scratch is for as many tensors.
  bool start(void* rows, void* scratch);
  size_t size() const;
  bool is_full() const;

 private:
  bool launch(void* scratch, uint64_t mark, void* stream);

  std::unique_ptr<Jobs> jobs;
  c10::SmallVector<Pending*, 6> wanted;
  c10::SmallVector<std::optional<Version>, 6> lasting; // beside them
  c10::Device device{c10::DeviceType::CPU};
};

// What the device needs for a call, between two events on its stream. Each is waited for or dropped, once.
struct Timing {
  uint32_t started = 0, ended = 0; // the numbers of the events; 0 for none
  bool idle = false; // whether the device was there before the host had begun the call, and may have waited for it

  bool is_open() const {
    return started != 0;
  }
};

// Whether calls on a device can be timed now: its context is there, and its current stream captures no graph.
bool can_time(c10::Device device);
void begin(c10::Device device, Timing& timing); // leaves it closed if there is no event to be had
void end(c10::Device device, Timing& timing);
bool has_arrived(const Timing& timing);
double wait_for(Timing& timing); // seconds, without the interpreter's lock; 0 if the device has failed
void drop(Timing& timing);
PyObject* as_python(Timing& timing); // which then owns it, see `Timed` in readings.cpp; None if it is closed

// A stream of a device, and what the launches of checks on it share.
struct Stream {
  c10::Device device{c10::DeviceType::CPU};
  void* handle = nullptr;
  uint64_t id = 0;
  Counters* counters = nullptr;
};
// The current one. False if checks cannot be launched there now.
bool find_stream(c10::Device device, Stream& stream);
bool launch(const Stream& stream, const Check& check, int stage, bool wide, uint64_t mark = 0);
Row* reserve(const Stream& stream, Pending& pending); // a row for what is about to be launched; null if there is none
void give_back(Pending& pending); // the row of a launch that has failed
bool copy(c10::Device device, void* to, const void* from, size_t bytes); // to the host; waits
bool describe(c10::ScalarType dtype, int& kind); // false for one that no kernel reads
const void* address_of(const at::Tensor& tensor); // null unless it is a plain array

bool has_arrived(const Pending& pending);
// Waits for the row. False if it will not come. Without the interpreter's lock.
bool wait_for(Pending& pending, Row& row);
bool wait_for(Pending& pending, Sums& sums, uint64_t& hash);
void share(const Pending& pending); // with another owner
void drop(Pending& pending);

} // namespace opintercept::device
