// Launches the kernel of `kernel.h` behind a call, on its stream, and takes the rows that it writes to the host's memory.
// It asks the CUDA driver itself, so that one library serves each build of a torch, and those without CUDA.
//
// Invariant: only `wait_for` waits for a device. A thread that captures a CUDA graph, or that does while another thread
// is here, keeps its capture.

#include "driver.h"

#include "../values.h"
#include "checksum.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace opintercept::device {

namespace {

// The part of the driver's API that is used here, see cuda.h.
using Result = int;
constexpr Result SUCCESS = 0, NOT_READY = 600;
constexpr int RELAXED = 2; // a mode of capture, in which this thread's calls do not end another one's
constexpr unsigned PORTABLE = 1, MAPPED = 2; // how memory of the host is allocated

struct Driver {
  Result (*cuDeviceGet)(int*, int);
  Result (*cuDevicePrimaryCtxRetain)(void**, int);
  Result (*cuCtxPushCurrent_v2)(void*);
  Result (*cuCtxPopCurrent_v2)(void**);
  Result (*cuModuleLoadData)(void**, const void*);
  Result (*cuModuleGetFunction)(void**, void*, const char*);
  Result (*cuMemAlloc_v2)(uint64_t*, size_t);
  Result (*cuMemFree_v2)(uint64_t);
  Result (*cuMemsetD8Async)(uint64_t, unsigned char, size_t, void*);
  Result (*cuMemHostAlloc)(void**, size_t, unsigned);
  Result (*cuMemcpyDtoH_v2)(void*, uint64_t, size_t);
  Result (*cuStreamIsCapturing)(void*, int*);
  Result (*cuStreamGetId)(void*, uint64_t*);
  Result (*cuStreamQuery)(void*);
  Result (*cuEventCreate)(void**, unsigned);
  Result (*cuEventRecord)(void*, void*);
  Result (*cuEventQuery)(void*);
  Result (*cuEventSynchronize)(void*);
  Result (*cuEventElapsedTime)(float*, void*, void*);
  Result (*cuThreadExchangeStreamCaptureMode)(int*);
  Result (*cuGetErrorString)(Result, const char**);
  Result (*cuLaunchKernel)(
      void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
};
Driver driver;
c10::DeviceType type = c10::DeviceType::CPU; // of the devices; CPU without a driver

void check(Result result, const char* what) {
  if (result != SUCCESS) {
    const char* text = nullptr;
    driver.cuGetErrorString(result, &text);
    throw std::runtime_error(std::string(what) + ": " + (text == nullptr ? std::to_string(result) : text));
  }
}

// The context of a device, in which this thread may allocate and ask while another one captures a graph.
class Entered {
 public:
  explicit Entered(void* context) : pushed(driver.cuCtxPushCurrent_v2(context) == SUCCESS) {
    exchange();
  }
  ~Entered() {
    exchange();
    void* left;
    if (pushed) {
      driver.cuCtxPopCurrent_v2(&left);
    }
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  void exchange() {
    driver.cuThreadExchangeStreamCaptureMode(&mode);
  }
  int mode = RELAXED;
  bool pushed;
};

constexpr size_t MOST_DEVICES = 64, LOT = 1 << 10, MOST_LOTS = 64;

constexpr size_t LEAST_MEMO = 1 << 21, MOST_MEMOS = 1 << 11; // bytes of a tensor, and tensors of a stream

// A tensor that lasts.
struct Lasting {
  Version version;
  Memo* memo;
};

struct HashOfJob {
  size_t operator()(const Job& job) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(&job), sizeof job});
  }
};
struct SameJob {
  bool operator()(const Job& a, const Job& b) const {
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
};

// What launches on a stream share, since it runs them one after the other.
struct OfStream {
  std::mutex mutex; // held until a launch is behind the one before it
  void* scratch = nullptr;
  Counters* counters = nullptr;
  std::unordered_map<Job, Lasting, HashOfJob, SameJob> lasting;
  std::vector<Memo*> free;

  template <typename Which>
  void forget(const Which& which) {
    std::erase_if(lasting, [&](const auto& each) {
      const bool goes = which(each.second);
      if (goes) {
        free.push_back(each.second.memo);
      }
      return goes;
    });
  }
  void forget_all() {
    forget([](const Lasting&) { return true; });
  }
};

struct Device {
  void *context = nullptr, *function = nullptr;
  void* checks[2][STAGES] = {}; // of float and of double, by stage
  std::map<uint64_t, OfStream> streams; // by what CUDA gives no other stream
  std::vector<uint32_t> events; // that nobody waits for
};

struct Event {
  void* event;
  size_t ordinal;
};

struct Waiting { // for whom a row is written
  void* stream;
  size_t ordinal;
};

// What there is once a driver has been found. It is never freed: a launch may still write when the process ends.
struct State {
  std::mutex mutex; // of all but the marks
  std::array<Device, MOST_DEVICES> devices;
  std::array<std::atomic<Row*>, MOST_LOTS> lots{}; // in memory that devices write
  std::vector<uint32_t> free; // rows that nobody waits for
  std::vector<Pending> dropped; // before they were written
  std::vector<Waiting> waiting = std::vector<Waiting>(MOST_LOTS * LOT);
  std::vector<uint8_t> owners = std::vector<uint8_t>(MOST_LOTS * LOT); // of each row
  std::deque<Event> events{{nullptr, 0}}; // 0 stands for none
  size_t made = 0;
  uint64_t marks = 0;

  Row& row(uint32_t number) const {
    return lots[number / LOT].load(std::memory_order_relaxed)[number % LOT];
  }
};
std::atomic<State*> state{nullptr};

bool is_written(const State& known, const Pending& pending) {
  return __atomic_load_n(&known.row(pending.row).mark, __ATOMIC_ACQUIRE) == pending.mark;
}

// With the mutex, in the context of a device: whether there are so many free rows.
bool have_rows(State& known, size_t count) {
  if (known.free.size() >= count) {
    return true;
  }
  std::erase_if(known.dropped, [&](const Pending& pending) {
    bool over = is_written(known, pending);
    if (over) {
      known.free.push_back(pending.row);
    }
    return over;
  });
  void* memory = nullptr;
  if (known.free.size() < count && known.made < MOST_LOTS &&
      driver.cuMemHostAlloc(&memory, LOT * sizeof(Row), PORTABLE | MAPPED) == SUCCESS) {
    auto* rows = static_cast<Row*>(memory);
    std::fill_n(rows, LOT, Row{});
    const auto lot = known.made++;
    known.lots[lot].store(rows, std::memory_order_release);
    for (size_t i = LOT; i-- > (lot == 0 ? 1 : 0);) { // 0 stands for no row
      known.free.push_back(static_cast<uint32_t>(lot * LOT + i));
    }
  }
  return known.free.size() >= count;
}

// With the mutex: gives a free row, of which there is one, to somebody who waits.
void give_row(State& known, Pending& pending, uint64_t mark, const Waiting& by) {
  pending.row = known.free.back();
  pending.mark = mark;
  known.free.pop_back();
  known.waiting[pending.row] = by;
  known.owners[pending.row] = 1;
}

// In the context of a device: memory on it that is zero for what follows on a stream; null if there is none.
void* zeroed(size_t bytes, void* stream) {
  uint64_t memory = 0;
  if (driver.cuMemAlloc_v2(&memory, bytes) != SUCCESS) {
    return nullptr;
  }
  if (driver.cuMemsetD8Async(memory, 0, bytes, stream) != SUCCESS) {
    driver.cuMemFree_v2(memory);
    return nullptr;
  }
  return reinterpret_cast<void*>(memory);
}

// In the context of a device: makes room for the memos of a launch, of tensors that are gone first.
void make_room(OfStream& own, void* stream) {
  if (own.free.empty() && own.lasting.empty()) {
    auto* memos = static_cast<Memo*>(zeroed(MOST_MEMOS * sizeof(Memo), stream));
    for (size_t i = 0; memos != nullptr && i < MOST_MEMOS; i++) {
      own.free.push_back(memos + i);
    }
  }
  if (own.free.size() < MOST_JOBS) {
    own.forget([](const Lasting& each) { return each.version.storage.expired(); });
  }
  if (own.free.size() < MOST_JOBS) {
    own.forget_all();
  }
}

// Lets few blocks look at a tensor if it is, for all that is known, as it was before.
void remember(OfStream& own, const Version& version, Jobs& jobs, size_t number) {
  Job& job = jobs.job[number];
  auto found = own.lasting.find(job);
  if (found != own.lasting.end()) {
    const Memo* memo = found->second.memo;
    if (std::any_of(jobs.job, jobs.job + number, [&](const Job& earlier) { return earlier.memo == memo; })) {
      return; // twice in one launch, which would write and read the memo at the same time
    }
    job.is_known = found->second.version == version;
    found->second.version = version;
  } else if (!own.free.empty()) {
    found = own.lasting.try_emplace(job, Lasting{version, own.free.back()}).first;
    own.free.pop_back();
  } else {
    return;
  }
  job.memo = found->second.memo;
  job.blocks = job.is_known ? std::min(job.blocks, FEW_BLOCKS) : job.blocks;
}

bool describe(const at::Tensor& tensor, bool hashed, Job& job, int64_t& repeats) {
  if (!device::describe(tensor.scalar_type(), job.kind)) {
    return false;
  }
  using Dim = std::pair<int64_t, int64_t>; // size and stride
  c10::SmallVector<Dim, 8> dims; // allocates nothing, as this is the path of each call
  for (int64_t d = 0; d < tensor.dim(); d++) {
    dims.emplace_back(tensor.size(d), tensor.stride(d));
  }
  job.hashed = hashed;
  job.swapped = hashed && dims.size() == 2 && dims[0].second == 1 && dims[1].second != 1;
  repeats = 1;
  if (job.swapped) {
    std::swap(dims[0], dims[1]);
  } else if (!hashed) { // each value once, in the order of memory
    auto left = std::remove_if(dims.begin(), dims.end(), [&](const Dim& dim) {
      repeats *= dim.second == 0 ? dim.first : 1;
      return dim.second == 0;
    });
    dims.erase(left, dims.end());
    auto is_before = [](const Dim& a, const Dim& b) { return a.second > b.second; };
    if (!std::is_sorted(dims.begin(), dims.end(), is_before)) { // seldom, and to sort allocates
      std::stable_sort(dims.begin(), dims.end(), is_before);
    }
  }
  if (dims.empty()) {
    dims.emplace_back(1, 1);
  }
  c10::SmallVector<Dim, 8> joined;
  for (size_t d = 0; d < dims.size(); d++) {
    const bool is_last = d + 1 == dims.size(), apart = is_last && hashed; // the columns of the hash stay by themselves
    if (!joined.empty() && !apart && joined.back().second == dims[d].first * dims[d].second) {
      joined.back() = {joined.back().first * dims[d].first, dims[d].second};
    } else if (dims[d].first > 1 || is_last) {
      joined.push_back(dims[d]);
    }
  }
  job.width = static_cast<Word>(joined.back().first);
  job.step = joined.back().second;
  joined.pop_back();
  if (joined.size() > DEEPEST) {
    return false;
  }
  if (joined.empty()) {
    joined.emplace_back(1, 0);
  }
  job.height = 1;
  job.dims = static_cast<int>(joined.size());
  for (size_t d = 0; d < joined.size(); d++) {
    std::tie(job.sizes[d], job.strides[d]) = joined[d];
    job.height *= static_cast<Word>(joined[d].first);
  }
  return true;
}

// The current one, as the driver knows it. The host has none, which tests take for a device.
void* stream_of(c10::Device device) {
  return device.is_cpu() ? nullptr : c10::impl::VirtualGuardImpl(type).getStream(device).native_handle();
}

// Torch gives the only device of a type no number.
size_t number_of(c10::Device device) {
  return device.has_index() ? static_cast<size_t>(device.index()) : 0;
}

} // namespace

bool describe(c10::ScalarType dtype, int& kind) {
  switch (dtype) {
    case c10::kDouble:
      kind = FLOAT64;
      break;
    case c10::kFloat:
      kind = FLOAT32;
      break;
    case c10::kBFloat16:
      kind = BFLOAT16;
      break;
    case c10::kHalf:
      kind = FLOAT16;
      break;
    case c10::kFloat8_e5m2:
      kind = FLOAT8_E5M2;
      break;
    case c10::kFloat8_e4m3fn:
      kind = FLOAT8_E4M3FN;
      break;
    case c10::kFloat8_e5m2fnuz:
      kind = FLOAT8_E5M2FNUZ;
      break;
    case c10::kFloat8_e4m3fnuz:
      kind = FLOAT8_E4M3FNUZ;
      break;
    case c10::kLong:
      kind = INT64;
      break;
    case c10::kInt:
      kind = INT32;
      break;
    case c10::kShort:
      kind = INT16;
      break;
    case c10::kChar:
    case c10::kBool:
      kind = INT8;
      break;
    case c10::kByte:
      kind = UINT8;
      break;
    default:
      return false;
  }
  return true;
}

const void* address_of(const at::Tensor& tensor) {
  using c10::DispatchKey;
  const void* data = nullptr;
  if (tensor.is_cpu()) {
    return in_memory(tensor, data) ? data : nullptr;
  }
  static const c10::DispatchKeySet keys(
      {DispatchKey::CUDA,
       DispatchKey::AutogradCUDA,
       DispatchKey::AutocastCUDA,
       DispatchKey::PrivateUse1,
       DispatchKey::AutogradPrivateUse1,
       DispatchKey::AutocastPrivateUse1,
       DispatchKey::ADInplaceOrView});
  return in_memory(tensor, keys, data) ? data : nullptr;
}

// What is known of a device; null if nothing is.
static Device* find_device(c10::Device device) {
  State* known = state.load(std::memory_order_acquire);
  const bool may_be = known != nullptr && device.type() == type && number_of(device) < MOST_DEVICES;
  return may_be ? &known->devices[number_of(device)] : nullptr;
}

static bool is_there(void* const& what) { // since another thread has found or loaded it
  return __atomic_load_n(&what, __ATOMIC_ACQUIRE) != nullptr;
}

// In the context of a device: whether a stream captures no graph.
static bool is_free(void* stream) {
  int capturing = 0;
  return driver.cuStreamIsCapturing(stream, &capturing) == SUCCESS && capturing == 0;
}

static bool is_free(c10::Device device, void* Device::* what) {
  const Device* own = find_device(device);
  if (own == nullptr || !is_there(own->*what)) {
    return false;
  }
  Entered entered(own->context);
  return is_free(stream_of(device));
}

bool can_read(c10::Device device) {
  return is_free(device, &Device::function);
}

bool can_time(c10::Device device) {
  return is_free(device, &Device::context);
}

// In the context of a device: the number of an event that its stream has come to when the device has done what is before
// it; 0 if there is none.
static uint32_t record(State& known, size_t ordinal, void* stream) {
  void* event = nullptr;
  uint32_t number = 0;
  {
    std::lock_guard lock(known.mutex);
    auto& free = known.devices[ordinal].events;
    if (free.empty()) {
      if (driver.cuEventCreate(&event, 0) != SUCCESS) {
        return 0;
      }
      free.push_back(static_cast<uint32_t>(known.events.size()));
      known.events.push_back({event, ordinal});
    }
    number = free.back();
    free.pop_back();
    event = known.events[number].event;
  }
  if (driver.cuEventRecord(event, stream) == SUCCESS) {
    return number;
  }
  std::lock_guard lock(known.mutex);
  known.devices[ordinal].events.push_back(number);
  return 0;
}

static Event event_of(State& known, uint32_t number) {
  std::lock_guard lock(known.mutex);
  return known.events[number];
}

void begin(c10::Device device, Timing& timing) {
  State& known = *state.load(std::memory_order_acquire);
  Entered entered(known.devices[number_of(device)].context);
  timing.started = record(known, number_of(device), stream_of(device));
}

void end(c10::Device device, Timing& timing) {
  State& known = *state.load(std::memory_order_acquire);
  const Event first = event_of(known, timing.started);
  Entered entered(known.devices[number_of(device)].context);
  timing.idle = driver.cuEventQuery(first.event) == SUCCESS;
  timing.ended = record(known, number_of(device), stream_of(device));
  if (timing.ended == 0) {
    drop(timing);
  }
}

bool has_arrived(const Timing& timing) {
  State* known = state.load(std::memory_order_acquire);
  if (timing.ended == 0 || known == nullptr) {
    return true;
  }
  const Event last = event_of(*known, timing.ended);
  Entered entered(known->devices[last.ordinal].context);
  return driver.cuEventQuery(last.event) != NOT_READY;
}

double wait_for(Timing& timing) {
  State* known = state.load(std::memory_order_acquire);
  float milliseconds = 0;
  if (timing.ended != 0 && known != nullptr) {
    const Event first = event_of(*known, timing.started), last = event_of(*known, timing.ended);
    Entered entered(known->devices[last.ordinal].context);
    if (driver.cuEventSynchronize(last.event) != SUCCESS ||
        driver.cuEventElapsedTime(&milliseconds, first.event, last.event) != SUCCESS) {
      milliseconds = 0;
    }
  }
  drop(timing);
  return milliseconds * 1e-3;
}

void drop(Timing& timing) {
  State* known = state.load(std::memory_order_acquire);
  if (known != nullptr) {
    std::lock_guard lock(known->mutex);
    for (uint32_t number : {timing.started, timing.ended}) {
      if (number != 0) { // its next use replaces what it stands for, whether the stream has come to it or not
        known->devices[known->events[number].ordinal].events.push_back(number);
      }
    }
  }
  timing = {};
}

Launch::Launch() = default;
Launch::Launch(Launch&&) noexcept = default;
Launch& Launch::operator=(Launch&&) noexcept = default;
Launch::~Launch() = default;

bool Launch::is_full() const {
  return wanted.size() == MOST_JOBS;
}

size_t Launch::size() const {
  return wanted.size();
}

bool Launch::takes(const at::Tensor& tensor, bool hashed, const Target* target, Pending& pending, bool lasts) {
  const Device* own = find_device(tensor.device());
  if (own == nullptr || !is_there(own->function) || tensor.numel() == 0 || wanted.size() == MOST_JOBS ||
      (!wanted.empty() && tensor.device() != device)) {
    return false;
  }
  if (jobs == nullptr) {
    jobs = std::make_unique<Jobs>();
  }
  Job& job = jobs->job[wanted.size()];
  job.data = address_of(tensor);
  if (job.data == nullptr || !describe(tensor, hashed, job, pending.repeats)) {
    return false;
  }
  job.has_target = target != nullptr;
  job.tiny = target == nullptr ? 0 : target->tiny;
  job.huge = target == nullptr ? 0 : target->huge;
  lay_out(job);
  device = tensor.device();
  pending.row = 0;
  pending.mark = 1; // until there is a row
  wanted.push_back(&pending);
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  lasting.emplace_back();
  // Of an expanded tensor each value is read once; inference tensors count no versions.
  if (lasts && job.height * job.width * tensor.itemsize() >= LEAST_MEMO && counter.enabled()) {
    lasting.back() = {tensor.storage().getWeakStorageImpl(), counter.current_version()};
  }
  return true;
}

bool Launch::launch(void* scratch, uint64_t mark, void* stream) {
  State& known = *state.load(std::memory_order_acquire);
  int most = 0;
  for (size_t i = 0; i < wanted.size(); i++) {
    most = std::max(most, jobs->job[i].blocks);
  }
  void* arguments[] = {jobs.get(), &scratch, &mark};
  return driver.cuLaunchKernel(
             known.devices[number_of(device)].function,
             static_cast<unsigned>(most),
             static_cast<unsigned>(wanted.size()),
             1,
             THREADS,
             1,
             1,
             0,
             stream,
             arguments,
             nullptr) == SUCCESS;
}

bool Launch::start(void* rows, void* scratch) {
  for (size_t i = 0; i < wanted.size(); i++) {
    jobs->job[i].to = static_cast<Row*>(rows) + i;
  }
  State& known = *state.load(std::memory_order_acquire);
  Entered entered(known.devices[number_of(device)].context);
  return launch(scratch, 0, stream_of(device)); // nobody waits for it
}

bool Launch::start() {
  State& known = *state.load(std::memory_order_acquire);
  Device& own = known.devices[number_of(device)];
  void* stream = stream_of(device);
  Entered entered(own.context);
  uint64_t id = 0, mark;
  if (!is_free(stream) || driver.cuStreamGetId(stream, &id) != SUCCESS) {
    return false;
  }
  OfStream* shared;
  {
    std::lock_guard lock(known.mutex);
    shared = &own.streams[id];
  }
  std::lock_guard in_order(shared->mutex);
  if (shared->scratch == nullptr && (shared->scratch = zeroed(sizeof(Scratch), stream)) == nullptr) {
    return false;
  }
  {
    std::lock_guard lock(known.mutex);
    if (!have_rows(known, wanted.size())) {
      return false;
    }
    mark = ++known.marks;
    for (Pending* pending : wanted) {
      give_row(known, *pending, mark, {stream, number_of(device)});
    }
  }
  if (std::any_of(lasting.begin(), lasting.end(), [](const auto& each) { return each.has_value(); })) {
    make_room(*shared, stream);
  }
  for (size_t i = 0; i < wanted.size(); i++) {
    if (lasting[i]) {
      remember(*shared, *lasting[i], *jobs, i);
    }
    jobs->job[i].to = &known.row(wanted[i]->row);
  }
  if (launch(shared->scratch, mark, stream)) {
    return true;
  }
  shared->forget_all(); // they have not been read
  std::lock_guard lock(known.mutex);
  for (Pending* pending : wanted) {
    known.free.push_back(std::exchange(pending->row, 0));
  }
  return false;
}

bool has_arrived(const Pending& pending) {
  const State* known = state.load(std::memory_order_acquire);
  return pending.row == 0 || known == nullptr || is_written(*known, pending);
}

// A device that has failed writes no more rows.
static bool has_failed(State& known, const Pending& pending) {
  Waiting by;
  {
    std::lock_guard lock(known.mutex);
    by = known.waiting[pending.row];
  }
  Entered entered(known.devices[by.ordinal].context);
  int capturing = 0;
  if (driver.cuStreamIsCapturing(by.stream, &capturing) != SUCCESS) {
    return true;
  }
  // To ask a stream that is captured by now would end the capture.
  return capturing == 0 && driver.cuStreamQuery(by.stream) != NOT_READY && !is_written(known, pending);
}

bool wait_for(Pending& pending, Row& row) {
  State* known = state.load(std::memory_order_acquire);
  if (pending.row == 0 || known == nullptr) { // as in a forked child
    pending = {};
    return false;
  }
  using Clock = std::chrono::steady_clock;
  auto asked = Clock::now();
  auto patience = std::chrono::microseconds(200);
  while (!is_written(*known, pending)) {
    if (Clock::now() - asked < patience) {
      std::this_thread::yield();
      continue;
    }
    if (has_failed(*known, pending)) {
      pending = {}; // and the row is not used again
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    asked = Clock::now();
    patience = std::chrono::microseconds(20);
  }
  row = known->row(pending.row);
  std::lock_guard lock(known->mutex);
  if (--known->owners[pending.row] == 0) {
    known->free.push_back(pending.row);
  }
  pending = {};
  return true;
}

bool wait_for(Pending& pending, Sums& sums, uint64_t& hash) {
  const auto times = pending.repeats;
  Row row;
  if (!wait_for(pending, row)) {
    return false;
  }
  sums.count = static_cast<int64_t>(row.finite + row.odd) * times;
  sums.finite = static_cast<int64_t>(row.finite) * times;
  sums.nan = static_cast<int64_t>(row.nan) * times;
  sums.zeros = static_cast<int64_t>(row.zeros) * times;
  sums.underflow = static_cast<int64_t>(row.underflow) * times;
  sums.overflow = static_cast<int64_t>(row.overflow) * times;
  sums.total = row.total * static_cast<double>(times);
  sums.spread = row.spread * static_cast<double>(times);
  sums.low = row.low;
  sums.high = row.high;
  hash = row.hash;
  return true;
}

bool find_stream(c10::Device device, Stream& stream) {
  State* known = state.load(std::memory_order_acquire);
  Device* found = find_device(device);
  if (found == nullptr || !is_there(found->checks[1][STAGES - 1])) {
    return false;
  }
  Device& own = *found;
  stream.device = device;
  stream.handle = stream_of(device);
  Entered entered(own.context);
  if (!is_free(stream.handle) || driver.cuStreamGetId(stream.handle, &stream.id) != SUCCESS) {
    return false;
  }
  OfStream* shared;
  {
    std::lock_guard lock(known->mutex);
    shared = &own.streams[stream.id];
  }
  std::lock_guard in_order(shared->mutex);
  if (shared->counters == nullptr) {
    shared->counters = static_cast<Counters*>(zeroed(sizeof(Counters), stream.handle));
  }
  stream.counters = shared->counters;
  return stream.counters != nullptr;
}

bool launch(const Stream& stream, const Check& check, int stage, bool wide, uint64_t mark) {
  const Device& own = state.load(std::memory_order_acquire)->devices[number_of(stream.device)];
  Entered entered(own.context);
  auto given = check;
  auto* counters = stream.counters;
  void* arguments[] = {&given, &counters, &mark};
  const Word blocks = blocks_of(check, stage);
  return blocks <= INT32_MAX &&
      driver.cuLaunchKernel(
          own.checks[wide][stage],
          static_cast<unsigned>(blocks),
          1,
          1,
          THREADS,
          1,
          1,
          0,
          stream.handle,
          arguments,
          nullptr) == SUCCESS;
}

Row* reserve(const Stream& stream, Pending& pending) {
  State& known = *state.load(std::memory_order_acquire);
  Entered entered(known.devices[number_of(stream.device)].context);
  std::lock_guard lock(known.mutex);
  if (!have_rows(known, 1)) {
    return nullptr;
  }
  give_row(known, pending, ++known.marks, {stream.handle, number_of(stream.device)});
  return &known.row(pending.row);
}

void give_back(Pending& pending) {
  State& known = *state.load(std::memory_order_acquire);
  std::lock_guard lock(known.mutex);
  known.free.push_back(pending.row);
  pending = {};
}

bool copy(c10::Device device, void* to, const void* from, size_t bytes) {
  State* known = state.load(std::memory_order_acquire);
  if (known == nullptr) {
    return false;
  }
  Entered entered(known->devices[number_of(device)].context);
  return driver.cuMemcpyDtoH_v2(to, reinterpret_cast<uint64_t>(from), bytes) == SUCCESS;
}

void share(const Pending& pending) {
  State* known = state.load(std::memory_order_acquire);
  if (pending.row != 0 && known != nullptr) {
    std::lock_guard lock(known->mutex);
    known->owners[pending.row]++;
  }
}

void drop(Pending& pending) {
  State* known = state.load(std::memory_order_acquire);
  if (pending.row != 0 && known != nullptr) {
    std::lock_guard lock(known->mutex);
    if (--known->owners[pending.row] == 0) {
      known->dropped.push_back(pending);
    }
  }
  pending = {};
}

void set_up(const char* library, const char* device_type) {
  void* loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) {
    throw std::runtime_error(dlerror());
  }
  auto find = [loaded](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(loaded, name));
    if (function == nullptr) {
      throw std::runtime_error(std::string("the driver has no ") + name);
    }
  };
#define FIND(name) find(driver.name, #name)
  FIND(cuDeviceGet);
  FIND(cuDevicePrimaryCtxRetain);
  FIND(cuCtxPushCurrent_v2);
  FIND(cuCtxPopCurrent_v2);
  FIND(cuModuleLoadData);
  FIND(cuModuleGetFunction);
  FIND(cuMemAlloc_v2);
  FIND(cuMemFree_v2);
  FIND(cuMemsetD8Async);
  FIND(cuMemHostAlloc);
  FIND(cuMemcpyDtoH_v2);
  FIND(cuStreamIsCapturing);
  FIND(cuStreamGetId);
  FIND(cuStreamQuery);
  FIND(cuEventCreate);
  FIND(cuEventRecord);
  FIND(cuEventQuery);
  FIND(cuEventSynchronize);
  FIND(cuEventElapsedTime);
  FIND(cuThreadExchangeStreamCaptureMode);
  FIND(cuGetErrorString);
  FIND(cuLaunchKernel);
#undef FIND
  type = c10::Device(device_type).type();
  static const int registered = pthread_atfork(nullptr, nullptr, [] { state = nullptr; }); // a child has no device
  if (registered == 0) {
    state = new State;
  }
}

static Device& device_of(size_t ordinal) {
  State* known = state.load(std::memory_order_acquire);
  if (known == nullptr || ordinal >= MOST_DEVICES) {
    throw std::runtime_error("a process that was forked has no devices");
  }
  return known->devices[ordinal];
}

void enter(size_t ordinal) {
  Device& own = device_of(ordinal);
  if (own.context == nullptr) {
    int number = 0;
    void* context = nullptr;
    check(driver.cuDeviceGet(&number, static_cast<int>(ordinal)), "cuDeviceGet");
    check(driver.cuDevicePrimaryCtxRetain(&context, number), "cuDevicePrimaryCtxRetain");
    __atomic_store_n(&own.context, context, __ATOMIC_RELEASE);
  }
}

void load(size_t ordinal, const void* code, bool checks) {
  enter(ordinal);
  Device& own = device_of(ordinal);
  void* module = nullptr;
  Entered entered(own.context);
  check(driver.cuModuleLoadData(&module, code), "cuModuleLoadData");
  auto find = [module](void*& function, const std::string& name) {
    void* found = nullptr;
    check(driver.cuModuleGetFunction(&found, module, name.c_str()), "cuModuleGetFunction");
    __atomic_store_n(&function, found, __ATOMIC_RELEASE);
  };
  if (!checks) {
    return find(own.function, "opintercept_read");
  }
  for (bool wide : {false, true}) {
    for (int stage = 0; stage < STAGES; stage++) {
      find(own.checks[wide][stage], "opintercept_check_" + std::to_string(stage) + (wide ? "_double" : "_float"));
    }
  }
}

} // namespace opintercept::device
