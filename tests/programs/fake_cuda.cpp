// A stand-in for the CUDA driver, of which it has the functions that `_native/device/driver.cpp` uses: it runs the
// kernel's own source on the host, its blocks in a random order, and counts and checks what it is asked.
//
// The host can write the mark of a row late, as a device does: when somebody asks for its stream.

#include "../../opintercept/_native/device/checksum.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace opintercept::device;

constexpr int SUCCESS = 0, INVALID = 1, NO_MEMORY = 2, NOT_READY = 600, LAUNCH_FAILED = 719;
std::recursive_mutex mutex;
std::map<std::string, int64_t> counts, failures; // of functions, and how many of the next calls fail
std::vector<std::pair<void*, std::function<void()>>> late; // marks by stream
bool is_late = false, capturing = false, lost = false;
std::map<void*, std::vector<std::function<void()>>> behind; // what streams have still to do before the next launch
std::mt19937 order;
thread_local int entered = 0; // each thread has contexts of its own
// Of the device that this is the driver of, if it is not the host: lets the host read memory, or no longer; says whether a
// graph captures a stream; runs a launch, or lets the graph keep it.
void (*open_memory)(void*, int) = nullptr;
int (*captures)(void*) = nullptr;
int (*run_launch)(void (*)(void*), void*, void*) = nullptr;
void (*count_wait)() = nullptr;
int64_t blocks_that_read = 0;
void (*between_blocks)() = nullptr; // what tests do while a launch reads
thread_local bool launches = false; // whether this thread does, and so a wait keeps the program

// Counts a call. False if it has been told to fail.
bool asked(const char* function) {
  std::lock_guard lock(mutex);
  counts[function]++;
  auto failing = failures.find(function);
  return failing == failures.end() || failing->second-- <= 0;
}

void open(const void* memory, int by) {
  if (open_memory != nullptr && memory != nullptr) {
    open_memory(const_cast<void*>(memory), by);
  }
}

struct Recorded {
  std::chrono::steady_clock::time_point at;
  bool is_over = false;
};

// Publishes a row that a launch has written, at once or late.
void publish(void* stream, Word& to, Word mark) {
  auto write = [&to, mark] { __atomic_store_n(&to, mark, __ATOMIC_RELEASE); };
  if (is_late) {
    late.emplace_back(stream, write);
  } else {
    write();
  }
}

struct Launched {
  Jobs jobs;
  Scratch* scratch;
  Word mark;
  unsigned across, down;
  void* stream;
};

void run(const Launched& launch) {
  static Part parts[THREADS];
  static Word words[THREADS];
  static Vector slots[FETCHED * THREADS];
  for (unsigned number = 0; number < launch.down; number++) {
    const Job& job = launch.jobs.job[number];
    open(job.data, 1);
    open(job.to, 1);
    open(launch.scratch, 1);
    open(job.memo, 1);
    std::vector<int> blocks(static_cast<size_t>(job.blocks));
    std::iota(blocks.begin(), blocks.end(), 0);
    std::shuffle(blocks.begin(), blocks.end(), order);
    bool is_written = launch.scratch->done[number] != 0; // another launch has left something
    for (int block : blocks) {
      if (is_written) {
        std::abort();
      }
      std::memset(static_cast<void*>(parts), 0xFF, sizeof parts); // whatever the last block has left
      std::memset(words, 0xFF, sizeof words);
      std::memset(static_cast<void*>(slots), 0xFF, sizeof slots);
      is_written = run_block(job, block, launch.scratch->parts[number], parts, words, slots, [&](unsigned mine) {
        blocks_that_read += mine > HAS_READ;
        if (between_blocks != nullptr) {
          between_blocks();
        }
        return launch.scratch->done[number] += mine;
      });
    }
    if (!is_written) {
      std::abort();
    }
    launch.scratch->done[number] = 0;
    Row* to = job.to;
    open(job.data, -1);
    open(job.to, -1);
    open(job.memo, -1);
    open(launch.scratch, -1);
    if (launch.mark != 0) { // not of a graph, for which nobody waits
      publish(launch.stream, to->mark, launch.mark);
    }
  }
}

struct LaunchedCheck {
  Check check;
  Counters* counters;
  Word mark;
  unsigned blocks;
  void* stream;
};

template <int STAGE, typename W>
void run_check(const LaunchedCheck& launch) {
  static Room<W> room;
  const Check& check = launch.check;
  const void* used[] = {
      check.lhs.data,
      check.rhs.data,
      check.output.data,
      check.bias.data,
      check.rows,
      check.columns,
      check.inner,
      check.middle,
      check.terms,
      check.to,
      launch.counters};
  for (const void* each : used) {
    open(each, 1);
  }
  std::vector<Word> blocks(launch.blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), order);
  int written = 0;
  for (Word block : blocks) {
    std::memset(static_cast<void*>(&room), 0xFF, sizeof room); // whatever the last block has left
    written += run_check<STAGE, W>(
        check,
        block,
        *launch.counters,
        room,
        [](unsigned* counter, unsigned of) {
          if (of == 1) {
            return true;
          }
          const bool is_last = ++*counter == of;
          *counter = is_last ? 0 : *counter;
          return is_last;
        },
        [](Word* word, Word by) { *word = std::max(*word, by); });
  }
  const auto* left = reinterpret_cast<const unsigned char*>(launch.counters);
  const bool is_clean = std::all_of(left, left + sizeof(Counters), [](unsigned char each) { return each == 0; });
  if (written != (STAGE + 1 == STAGES) || !is_clean) {
    std::abort();
  }
  if (written != 0) {
    publish(launch.stream, reinterpret_cast<Verdict*>(check.to)->mark, launch.mark);
  }
  for (const void* each : used) {
    open(each, -1);
  }
}

using RunCheck = void (*)(const LaunchedCheck&);
constexpr RunCheck CHECKS[2][STAGES] = {
    {run_check<0, float>, run_check<1, float>, run_check<2, float>, run_check<3, float>},
    {run_check<0, double>, run_check<1, double>, run_check<2, double>, run_check<3, double>}};

} // namespace

extern "C" {

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal + 100;
  return asked("cuDeviceGet") ? SUCCESS : INVALID;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(device));
  return asked("cuDevicePrimaryCtxRetain") && device >= 100 ? SUCCESS : INVALID;
}

int cuCtxPushCurrent_v2(void* context) {
  entered += context != nullptr;
  return asked("cuCtxPushCurrent") ? SUCCESS : INVALID;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = nullptr;
  entered--;
  return asked("cuCtxPopCurrent") ? SUCCESS : INVALID;
}

int cuModuleLoadData(void** module, const void* code) {
  *module = const_cast<void*>(code);
  return asked("cuModuleLoadData") && std::strncmp(static_cast<const char*>(code), "code", 4) == 0 ? SUCCESS : INVALID;
}

int cuModuleGetFunction(void** function, void*, const char* name) {
  static int kernel;
  *function = &kernel;
  bool known = std::string(name) == "opintercept_read";
  for (int wide = 0; wide < 2; wide++) {
    for (int stage = 0; stage < STAGES; stage++) {
      if (name == "opintercept_check_" + std::to_string(stage) + (wide ? "_double" : "_float")) {
        *function = const_cast<RunCheck*>(&CHECKS[wide][stage]);
        known = true;
      }
    }
  }
  return asked("cuModuleGetFunction") && known ? SUCCESS : INVALID;
}

int cuMemAlloc_v2(uint64_t* memory, size_t bytes) {
  if (!asked("cuMemAlloc")) {
    return NO_MEMORY;
  }
  *memory = reinterpret_cast<uint64_t>(std::malloc(bytes));
  return SUCCESS;
}

int cuMemFree_v2(uint64_t memory) {
  std::free(reinterpret_cast<void*>(memory));
  return asked("cuMemFree") ? SUCCESS : INVALID;
}

int cuMemsetD8Async(uint64_t memory, unsigned char byte, size_t bytes, void* stream) {
  std::lock_guard lock(mutex);
  if (!asked("cuMemsetD8")) {
    return INVALID;
  }
  auto* to = reinterpret_cast<void*>(memory);
  std::memset(to, ~byte, bytes);
  behind[stream].emplace_back([=] { std::memset(to, byte, bytes); }); // when the stream comes to it
  return SUCCESS;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  if (!asked("cuMemHostAlloc")) {
    return NO_MEMORY;
  }
  *memory = std::malloc(bytes);
  return SUCCESS;
}

int cuMemcpyDtoH_v2(void* to, uint64_t memory, size_t bytes) {
  auto* from = reinterpret_cast<void*>(memory);
  if (!asked("cuMemcpyDtoH") || lost) {
    return INVALID;
  }
  open(from, 1);
  std::memcpy(to, from, bytes);
  open(from, -1);
  return SUCCESS;
}

int cuStreamIsCapturing(void* stream, int* status) {
  *status = capturing || (captures != nullptr && captures(stream));
  return asked("cuStreamIsCapturing") ? SUCCESS : INVALID;
}

int cuStreamGetId(void* stream, uint64_t* id) {
  *id = reinterpret_cast<uint64_t>(stream) + 7;
  return asked("cuStreamGetId") ? SUCCESS : INVALID;
}

int cuStreamQuery(void* stream) {
  std::lock_guard lock(mutex);
  asked("cuStreamQuery");
  if (lost) {
    return LAUNCH_FAILED;
  }
  if (launches && count_wait != nullptr) {
    count_wait();
  }
  for (auto& [of, publish] : late) {
    if (of == stream) {
      publish();
    }
  }
  std::erase_if(late, [&](const auto& each) { return each.first == stream; });
  return SUCCESS;
}

// An event is the time of its last record, and whether that has been: late ones have not until somebody waits.
int cuEventCreate(void** event, unsigned) {
  if (!asked("cuEventCreate")) {
    return NO_MEMORY;
  }
  *event = new Recorded;
  return SUCCESS;
}

int cuEventRecord(void* event, void*) {
  if (!asked("cuEventRecord")) {
    return INVALID;
  }
  *static_cast<Recorded*>(event) = {std::chrono::steady_clock::now(), !is_late};
  return SUCCESS;
}

int cuEventQuery(void* event) {
  return static_cast<Recorded*>(event)->is_over ? SUCCESS : NOT_READY;
}

int cuEventSynchronize(void* event) {
  asked("cuEventSynchronize");
  static_cast<Recorded*>(event)->is_over = true;
  return lost ? LAUNCH_FAILED : SUCCESS;
}

int cuEventElapsedTime(float* milliseconds, void* first, void* last) {
  using namespace std::chrono;
  *milliseconds =
      duration<float, std::milli>(static_cast<Recorded*>(last)->at - static_cast<Recorded*>(first)->at).count();
  return SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  static thread_local int current = 0;
  std::swap(current, *mode);
  return SUCCESS;
}

int cuGetErrorString(int error, const char** text) {
  *text = error == NO_MEMORY ? "out of memory" : error == INVALID ? "invalid argument" : nullptr;
  return SUCCESS;
}

int cuLaunchKernel(
    void* function, unsigned across, unsigned down, unsigned deep, unsigned threads, unsigned, unsigned, unsigned,
    void* stream, void** arguments, void**) {
  std::lock_guard lock(mutex);
  launches = true;
  if (!asked("cuLaunchKernel") || lost) {
    return LAUNCH_FAILED;
  }
  for (const auto& each : std::exchange(behind[stream], {})) {
    each();
  }
  auto* check = static_cast<const RunCheck*>(function);
  if (check >= &CHECKS[0][0] && check <= &CHECKS[1][STAGES - 1]) {
    auto kept = std::make_unique<std::pair<RunCheck, LaunchedCheck>>(
        *check,
        LaunchedCheck{
            *static_cast<Check*>(arguments[0]),
            *static_cast<Counters**>(arguments[1]),
            *static_cast<Word*>(arguments[2]),
            across,
            stream});
    if (entered <= 0 || deep != 1 || threads != THREADS || across == 0 || down != 1) {
      return INVALID;
    }
    auto run_kept = [](void* each) {
      auto& [use, launch] = *static_cast<std::pair<RunCheck, LaunchedCheck>*>(each);
      use(launch);
    };
    if (run_launch == nullptr) {
      run_kept(kept.get());
    } else if (run_launch(run_kept, kept.get(), stream)) {
      return INVALID; // no graph takes checks
    }
    return SUCCESS;
  }
  Launched launch{
      *static_cast<Jobs*>(arguments[0]),
      *static_cast<Scratch**>(arguments[1]),
      *static_cast<Word*>(arguments[2]),
      across,
      down,
      stream};
  if (entered <= 0 || deep != 1 || threads != THREADS || across == 0 || across > MOST_PARTS || down == 0 ||
      down > MOST_JOBS) {
    return INVALID;
  }
  static const bool is_idle = std::getenv("FAKE_CUDA_IDLE") != nullptr; // to time what stands around a launch
  if (is_idle) {
    for (unsigned number = 0; number < down; number++) {
      launch.jobs.job[number].to->mark = launch.mark;
    }
    return SUCCESS;
  }
  if (run_launch == nullptr) {
    run(launch);
    return SUCCESS;
  }
  auto kept = std::make_unique<Launched>(launch);
  if (run_launch([](void* each) { run(*static_cast<Launched*>(each)); }, kept.get(), stream)) {
    kept.release(); // the graph runs it
  }
  return SUCCESS;
}

// What tests ask of it.

int64_t fake_count(const char* function) { // of calls since the last time
  std::lock_guard lock(mutex);
  return std::exchange(counts[function], 0);
}

void fake_fail(const char* function, int64_t times) {
  std::lock_guard lock(mutex);
  failures[function] = times;
}

void fake_behave(bool marks_are_late, bool captures, bool is_lost) {
  std::lock_guard lock(mutex);
  is_late = marks_are_late;
  capturing = captures;
  lost = is_lost;
  for (auto& [_, publish] : std::exchange(late, {})) {
    if (!is_lost) {
      publish();
    }
  }
}

int64_t fake_blocks_that_read() { // since the last time
  return std::exchange(blocks_that_read, 0);
}

void fake_between_blocks(void (*use)()) {
  between_blocks = use;
}

void fake_device(
    void (*open)(void*, int), int (*captures_stream)(void*), int (*launch)(void (*)(void*), void*, void*),
    void (*wait)()) {
  open_memory = open;
  captures = captures_stream;
  run_launch = launch;
  count_wait = wait;
}

} // extern "C"
