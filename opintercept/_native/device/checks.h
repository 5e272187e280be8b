// A check of one product on a GPU, in the launches of `checksum.h`.

#pragma once

#include <Python.h>

#include "../weights.h"
#include "checksum.h"
#include "driver.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace opintercept::device {

// B E of a matrix, with its norms, on a device.
struct Weight {
  c10::DataPtr memory;
  void* inner = nullptr;
  double* scale = nullptr;
};
using WeightPtr = std::shared_ptr<const Weight>;

// Keys are of the stream that has computed it.
using WeightsOnDevices = Weights<WeightPtr>;

// What a check is made of: lhs and rhs, and what else `checksum.products.Product` has, or null.
struct Operands {
  const at::Tensor *lhs, *rhs, *bias = nullptr, *rows = nullptr, *columns = nullptr;
  double alpha = 1, beta = 1;
};

class Product {
 public:
  // Before the operator runs. Null if the kernel cannot check it now. `weights` may be null.
  static std::unique_ptr<Product> begin(const Operands& operands, const std::shared_ptr<WeightsOnDevices>& weights);
  // After it has run: whether the output is being checked. `fields` is what is wanted of a row that is suspect.
  bool finish(const at::Tensor& output, double deviation, double limit, int fields);

  bool has_arrived() const;
  // Waits for the device, without the interpreter's lock. False if it has failed.
  bool settle();
  // Once it is settled; also if the device has failed.
  bool is_suspect() const {
    return has_failed || !(verdict.worst <= check.limit);
  }
  const Verdict& found() const {
    return verdict;
  }
  size_t fields() const {
    return static_cast<size_t>(__builtin_popcount(static_cast<unsigned>(check.fields)));
  }
  size_t columns() const {
    return check.width;
  }
  size_t height() const {
    return check.height;
  }
  uint64_t rows() const {
    return check.batch * check.height;
  }
  bool read_terms(void* to) const; // `fields() * columns()` doubles; waits
  void forget() const; // what is remembered of rhs

  Product() = default;
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;
  ~Product();

 private:
  Check check{};
  Stream stream;
  bool wide = false;
  WeightPtr weight;
  c10::DataPtr scratch, terms;
  std::shared_ptr<WeightsOnDevices> weights;
  std::optional<WeightsOnDevices::Key> key; // if what is computed of rhs may be remembered
  Pending pending;
  Verdict verdict{};
  bool has_failed = false;
};

} // namespace opintercept::device

namespace opintercept {

PyObject* as_python(std::unique_ptr<device::Product> product); // a `Check`; null with an error

} // namespace opintercept
