// A stand-in for a GPU: a device of torch's whose operators run on the CPU. Autograd has a thread of its own for it.
//
// Each operator copies its operands to the CPU and its results back. The host cannot touch its memory otherwise: it is
// mapped without rights but for a copy, filled with 0xFF when it is new, and unmapped when it is freed. It counts what
// costs time on a GPU. If told so, copies to the host that nobody waits for arrive when somebody waits for their stream.
//
// There are two of them. An operator fails that takes tensors of both, or what another stream has written without that
// somebody has waited for it. While a graph is captured, what would end the capture fails, and operators do not run: they
// do when the graph is replayed.

#include <sys/mman.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto TOY = c10::DeviceType::PrivateUse1;

enum { LAUNCHES, TO_DEVICE, TO_HOST, LATE_TO_HOST, ITEMS, WAITS, BYTES_TO_HOST, COUNTERS };
std::array<std::atomic<int64_t>, COUNTERS> counters;
thread_local bool is_running = false; // an operator, which copies its operands and results
thread_local int64_t stream = 0; // the current one
thread_local c10::DeviceIndex current_device = 0;
thread_local bool is_capturing = false;

void needs_no_capture() {
  TORCH_CHECK(is_running || !is_capturing, "operation not permitted when stream is capturing");
}

using Graph = std::vector<std::function<void()>>; // what it launches
std::shared_ptr<Graph> captured;
int64_t captured_stream = 0;

Graph* capturing() { // the graph that captures the current stream
  return !is_running && captured && captured_stream == stream ? captured.get() : nullptr;
}

struct Running {
  bool before = std::exchange(is_running, true);
  ~Running() {
    is_running = before;
  }
};

void count(int counter, int64_t by = 1) {
  if (!is_running) {
    counters[counter] += by;
  }
}

constexpr int64_t EVERY = -1;
struct Block {
  size_t bytes;
  int64_t writer; // the stream that may read it; `EVERY` once somebody has waited for it
  int open = 0;
};
std::recursive_mutex mutex; // of what follows
std::map<void*, Block> blocks;
int64_t held = 0, limit = std::numeric_limits<int64_t>::max();

void release(void* data) {
  std::lock_guard lock(mutex);
  auto block = blocks.extract(data);
  held -= block.mapped().bytes;
  munmap(data, block.mapped().bytes);
}

class Opened { // the memory of a tensor, as long as this lives
 public:
  explicit Opened(void* data) : data_(data) {
    change(1);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;
  ~Opened() {
    change(-1);
  }
  void keep(int by) { // stays open, or closes what has stayed
    change(by);
  }

 private:
  void change(int by) {
    std::lock_guard lock(mutex);
    auto block = blocks.find(data_);
    if (block != blocks.end()) {
      int rights = (block->second.open += by) ? PROT_READ | PROT_WRITE : PROT_NONE;
      mprotect(data_, block->second.bytes, rights);
    }
  }
  void* data_;
};

void check(const at::Tensor& tensor) { // that the current stream may read it
  std::lock_guard lock(mutex);
  auto block = blocks.find(tensor.storage().mutable_data());
  TORCH_CHECK(
      block == blocks.end() || block->second.writer == EVERY || block->second.writer == stream,
      "another stream has written this tensor, and nobody has waited for it");
}

void end_wait(int64_t of) { // for what a stream has written
  std::lock_guard lock(mutex);
  for (auto& [_, block] : blocks) {
    if (of == EVERY || block.writer == of) {
      block.writer = EVERY;
    }
  }
}

// Autograd runs a node on the stream of its forward call, and waits for those that others have run on.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TOY;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override {
    return TOY;
  }
  c10::Device getDevice() const override {
    return {TOY, current_device};
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {TOY, std::exchange(current_device, device.index())};
  }
  void setDevice(c10::Device device) const override {
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, device, stream);
  }
  c10::Stream exchangeStream(c10::Stream used) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, used.device(), std::exchange(stream, used.id()));
  }
  void* getStreamNativeHandle(const c10::Stream of) const { // which torch 2.11 does not ask for
    return reinterpret_cast<void*>(of.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 2;
  }
  void record(void** event, const c10::Stream& of, c10::DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(of.id());
  }
  void block(void* event, const c10::Stream&) const override {
    end_wait(reinterpret_cast<int64_t>(event));
  }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(TOY, Guard().getDevice().index());
    if (bytes == 0) {
      return {nullptr, nullptr, &release, device};
    }
    std::lock_guard lock(mutex);
    int64_t whole = (bytes + 4095) / 4096 * 4096;
    TORCH_CHECK_WITH(OutOfMemoryError, held + whole <= limit, "the device has no memory left");
    void* data = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "the host has no memory left");
    std::memset(data, 0xFF, whole);
    mprotect(data, whole, PROT_NONE);
    held += whole;
    blocks[data] = {static_cast<size_t>(whole), stream};
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Opened target(to), source(const_cast<void*>(from));
    std::memcpy(to, from, bytes);
  }
};
Memory memory;
REGISTER_ALLOCATOR(TOY, &memory)

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::kCPU);
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
};

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) { // the same memory, which `Opened` opens
  auto made = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

struct Copy { // that has not arrived
  at::Tensor from, to;
  int64_t stream, number;
};
bool are_late = false;
std::deque<Copy> late;
int64_t copies_made = 0;

void arrive(int64_t of, int64_t number) { // wait for so many copies of all, on a stream
  std::lock_guard lock(mutex);
  std::erase_if(late, [&](const Copy& copy) {
    bool arrives = copy.number <= number && (of == EVERY || copy.stream == of);
    if (arrives) {
      copy.to.copy_(copy.from);
    }
    return arrives;
  });
}

void wait() { // as copies do, for the current stream
  needs_no_capture();
  count(WAITS);
  if (!is_running) {
    arrive(stream, std::numeric_limits<int64_t>::max());
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  Opened target(to.storage().mutable_data()), source(self.storage().mutable_data());
  if (!is_running) {
    check(self);
  }
  if (!to.is_cpu()) {
    count(self.is_cpu() ? TO_DEVICE : LAUNCHES);
    if (auto* graph = capturing()) {
      TORCH_CHECK(!self.is_cpu(), "a replay would copy from memory that is gone by then");
      graph->push_back([self, to] { copy_from(self, to, false); });
      return to;
    }
    if (self.is_cpu() && !non_blocking) {
      wait(); // as on CUDA
      std::lock_guard lock(mutex);
      auto block = blocks.find(to.storage().mutable_data()); // none if it is empty
      if (block != blocks.end()) {
        block->second.writer = EVERY;
      }
    }
  } else if (non_blocking) {
    needs_no_capture(); // which the memory that it goes to would end
    count(LATE_TO_HOST);
    count(BYTES_TO_HOST, self.nbytes());
    if (are_late) {
      std::lock_guard lock(mutex);
      late.push_back({on_host(self).clone(), to, stream, ++copies_made});
      std::memset(to.data_ptr(), 0xFF, to.nbytes()); // dense, as it is new
      return to;
    }
  } else {
    count(TO_HOST);
    count(BYTES_TO_HOST, self.nbytes());
    wait();
  }
  on_host(to).copy_(on_host(self));
  return to;
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) {
    return self;
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  auto* storage = self.storage().unsafeGetStorageImpl();
  size_t bytes = self.element_size() * (self.numel() + self.storage_offset());
  if (bytes > storage->nbytes()) { // of the result of an `out=` form, whose values do not matter
    c10::DeviceGuard guard(self.device());
    storage->set_data_ptr_noswap(memory.allocate(bytes));
    storage->set_nbytes(bytes);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  count(ITEMS);
  wait();
  Opened source(self.storage().mutable_data());
  return at::native::_local_scalar_dense_cpu(on_host(self));
}

// Their results have sizes that depend on values, or they are none.
const std::set<std::string> WAITING = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::bincount",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave"};

bool picks(const c10::OperatorHandle& op, const torch::jit::Stack& stack) { // by a mask, which `nonzero` reads
  if (op.schema().name() != "aten::index") {
    return false;
  }
  auto places = stack.back().toListRef();
  return std::any_of(places.begin(), places.end(), [](const c10::IValue& each) {
    return each.isTensor() && each.toTensor().defined() && each.toTensor().scalar_type() == at::kBool;
  });
}

void check_operands(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  std::optional<c10::Device> device;
  for (const auto& argument : torch::jit::last(stack, op.schema().arguments().size())) {
    if (!argument.isTensor() && !argument.isTensorList()) {
      continue;
    }
    for (const auto& tensor : argument.isTensor() ? std::vector{argument.toTensor()} : argument.toTensorVector()) {
      if (tensor.defined() && tensor.is_privateuseone()) {
        TORCH_CHECK(!device || *device == tensor.device(), "operands are on several devices");
        device = tensor.device();
        check(tensor);
      }
    }
  }
}

template <typename Function>
void each_tensor(const c10::IValue& value, Function function) {
  if (value.isTensor() && value.toTensor().defined()) {
    function(value.toTensor());
  } else if (value.isTensorList()) {
    std::ranges::for_each(value.toTensorVector(), function);
  }
}

// Its results are made, but hold 0xFF until a replay computes them. What it writes to stays as it is until then.
void capture(Graph& graph, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Running running;
  const auto& arguments = op.schema().arguments();
  auto given = torch::jit::pop(*stack, arguments.size());
  torch::jit::Stack results;
  for (size_t i = 0; i < given.size(); ++i) {
    if (const auto* alias = arguments[i].alias_info(); alias != nullptr && alias->isWrite()) {
      results.push_back(given[i]);
    }
  }
  bool writes = !results.empty();
  if (!writes) {
    results = given;
    at::native::cpu_fallback(op, &results);
    for (const auto& result : results) {
      each_tensor(result, [](const at::Tensor& tensor) {
        Opened opened(tensor.storage().mutable_data());
        std::memset(tensor.storage().mutable_data(), 0xFF, tensor.storage().nbytes());
      });
    }
  }
  results.resize(op.schema().returns().size());
  graph.push_back([op, given, results, writes] {
    auto again = given;
    at::native::cpu_fallback(op, &again);
    for (size_t i = 0; !writes && i < results.size(); ++i) {
      std::vector<at::Tensor> found;
      each_tensor(again[i], [&](const at::Tensor& tensor) { found.push_back(tensor); });
      each_tensor(results[i], [&, at = size_t(0)](const at::Tensor& tensor) mutable { tensor.copy_(found[at++]); });
    }
  });
  stack->insert(stack->end(), results.begin(), results.end());
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  count(LAUNCHES);
  check_operands(op, *stack);
  if (WAITING.count(op.schema().name()) || picks(op, *stack)) {
    wait();
  }
  if (auto* graph = capturing()) {
    return capture(*graph, op, stack);
  }
  Running running;
  at::native::cpu_fallback(op, stack);
}

} // namespace

// What the stand-in for CUDA's driver needs, see fake_cuda.cpp.
extern "C" {

void toy_change(void* data, int by) { // lets the host read the memory that this lies in, or no longer
  std::lock_guard lock(mutex);
  auto block = blocks.upper_bound(data);
  if (block != blocks.begin() &&
      static_cast<char*>(data) < static_cast<char*>((--block)->first) + block->second.bytes) {
    Opened(block->first).keep(by);
  }
}

int toy_captures(void* of) {
  return captured != nullptr && captured_stream == reinterpret_cast<int64_t>(of);
}

int toy_launch(void (*run)(void*), void* launch, void* of) { // and return whether a graph keeps it
  count(LAUNCHES);
  if (toy_captures(of)) {
    captured->push_back([run, launch] { run(launch); });
    return 1;
  }
  run(launch);
  return 0;
}

void toy_wait() {
  count(WAITS);
}

} // extern "C"

namespace {

std::vector<std::shared_ptr<Graph>> graphs;

int64_t end_capture() { // and return the number of the graph
  is_capturing = false;
  graphs.push_back(std::exchange(captured, nullptr));
  return graphs.size() - 1;
}

void replay(int64_t graph) {
  count(LAUNCHES);
  Running running;
  for (const auto& launch : *graphs.at(graph)) {
    launch();
  }
}

std::vector<int64_t> counts() { // since the last time
  std::vector<int64_t> found;
  for (auto& counter : counters) {
    found.push_back(counter.exchange(0));
  }
  return found;
}

int64_t copies() {
  std::lock_guard lock(mutex);
  return copies_made;
}

void wait_for(int64_t of, int64_t number, bool counts) { // an event, a stream or the device
  needs_no_capture();
  count(WAITS, counts);
  arrive(of, number);
  end_wait(of);
}

int64_t set_limit(int64_t bytes) { // of new memory, and how much there is
  std::lock_guard lock(mutex);
  limit = bytes < 0 ? std::numeric_limits<int64_t>::max() : held + bytes;
  return held;
}

const std::set<std::string> OWN = {
    "empty.memory_format",
    "empty_strided",
    "as_strided",
    "view",
    "_reshape_alias",
    "_copy_from",
    "_copy_from_and_resize",
    "_local_scalar_dense",
    "resize_"};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  // A fallback for the whole device would not do: `mm` has a default that dispatches `mm.out`, which real devices do not.
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    std::string full = c10::toString(name);
    if (full.rfind("aten::", 0) == 0 && OWN.count(full.substr(6)) == 0) {
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }
}

// A copy resolves views that are conjugate or negative; torch's fallbacks would copy these first.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY(toy, m) {
  m.def("counts() -> int[]", counts);
  m.def("copies() -> int", copies);
  m.def("wait_for(int stream, int copies, bool counts) -> ()", wait_for);
  m.def("stream() -> int", [] { return stream; });
  m.def("use(int stream) -> int", [](int64_t used) { return std::exchange(stream, used); });
  m.def("begin_capture() -> ()", [] {
    is_capturing = true;
    captured_stream = stream;
    captured = std::make_shared<Graph>();
  });
  m.def("end_capture() -> int", end_capture);
  m.def("replay(int graph) -> ()", replay);
  m.def("late(bool on) -> ()", [](bool on) { are_late = on; });
  m.def("limit(int bytes) -> int", set_limit);
}

} // namespace
